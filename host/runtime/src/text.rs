//! Text of a guest on its way into rows and logs.

/// Bytes of a guest's text that are kept in a failure.
pub(crate) const FAILURE_BYTES: usize = 2048;

/// At most `max` bytes, cut between characters, and without NUL, which PostgreSQL's text
/// cannot hold.
pub(crate) fn bounded(text: &str, max: usize) -> String {
    let end = if text.len() <= max { text.len() } else { text.floor_char_boundary(max) };
    let mut kept = text[..end].replace('\0', "\u{fffd}");
    if end < text.len() {
        kept.push('…');
    }
    kept
}

/// Control characters as escapes, so that no line of a guest can look like one of the host's.
pub(crate) fn printable(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '\t' => out.push(c),
            c if c.is_control() => out.extend(c.escape_default()),
            c => out.push(c),
        }
    }
    out
}
