//! Text of a guest on its way into rows and logs.

/// Most bytes of a guest's text that are kept in a failure.
pub(crate) const FAILURE_BYTES: usize = 2048;

/// Cuts a text to at most `max` bytes between two characters, and marks the cut with an ellipsis.
/// Replaces NUL, which PostgreSQL's text cannot hold.
pub(crate) fn bounded(text: &str, max: usize) -> String {
    let end = if text.len() <= max { text.len() } else { text.floor_char_boundary(max) };
    let mut kept = text[..end].replace('\0', "\u{fffd}");
    if end < text.len() {
        kept.push('…');
    }
    kept
}

/// Escapes control characters, so that no text of a guest can look like a line of the host's log.
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
