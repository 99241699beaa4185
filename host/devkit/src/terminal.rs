//! Text that is safe for a terminal. Ids, keys, payloads and errors hold any characters of
//! producers and tenants. A terminal obeys some of them: escape sequences move its cursor and
//! change its settings, and bidirectional controls reorder a line.

use std::borrow::Cow;

/// Returns whether a character is written as its number instead. Line ends and tabs are the
/// program's own, except in cells of tables.
fn is_hidden(c: char) -> bool {
    let formats = matches!(c,
        '\u{ad}' | '\u{34f}' | '\u{61c}' | '\u{115f}'..='\u{1160}' | '\u{17b4}'..='\u{17b5}' | '\u{180b}'..='\u{180f}'
        | '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2060}'..='\u{206f}' | '\u{3164}' | '\u{feff}' | '\u{ffa0}'
        | '\u{fff0}'..='\u{fffb}' | '\u{1bca0}'..='\u{1bca3}' | '\u{1d173}'..='\u{1d17a}' | '\u{e0000}'..='\u{e0fff}');
    formats || c.is_control() && c != '\n' && c != '\t'
}

fn escape(text: &str, is_hidden: impl Fn(char) -> bool) -> Cow<'_, str> {
    if !text.contains(&is_hidden) {
        return Cow::Borrowed(text);
    }
    let escaped = |c: char| match u32::from(c) {
        _ if !is_hidden(c) => c.to_string(),
        // As TOML and JSON write them in their strings.
        number @ 0..=0xffff => format!("\\u{number:04X}"),
        number => format!("\\U{number:08X}"),
    };
    Cow::Owned(text.chars().map(escaped).collect())
}

/// Returns lines without any character that a terminal obeys or hides.
pub fn lines(text: &str) -> Cow<'_, str> {
    escape(text, is_hidden)
}

/// Returns a text for one line, without any character that a terminal obeys or hides, line ends and
/// tabs included.
pub fn cell(text: &str) -> Cow<'_, str> {
    escape(text, |c| c == '\n' || c == '\t' || is_hidden(c))
}

/// Prints a line that is safe for a terminal. In the modules declared after this one, and
/// in a crate with `#[macro_use] extern crate oncebox_devkit`, it replaces the standard library's
/// macro.
#[macro_export]
macro_rules! println {
    () => { std::println!() };
    ($($argument:tt)*) => { std::println!("{}", $crate::terminal::lines(&format!($($argument)*))) };
}

/// Prints a line that is safe for a terminal to standard error.
#[macro_export]
macro_rules! eprintln {
    () => { std::eprintln!() };
    ($($argument:tt)*) => { std::eprintln!("{}", $crate::terminal::lines(&format!($($argument)*))) };
}

/// Prints a text that is safe for a terminal, without a line end.
#[macro_export]
macro_rules! print {
    ($($argument:tt)*) => { std::print!("{}", $crate::terminal::lines(&format!($($argument)*))) };
}

/// Prints a text that is safe for a terminal to standard error, without a line end.
#[macro_export]
macro_rules! eprint {
    ($($argument:tt)*) => { std::eprint!("{}", $crate::terminal::lines(&format!($($argument)*))) };
}

/// Shows a text beside a progress bar.
pub fn tell(bar: &indicatif::ProgressBar, text: &str) {
    bar.set_message(cell(text).into_owned());
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every character of Unicode whose general category is Cc, Cf, Zl or Zp, as the regular
    /// expressions of the standard's data know it, but for those of scripts that are seen.
    #[test]
    fn nothing_that_a_terminal_obeys_or_hides_is_printed() {
        for number in 0..=0x10_ffff_u32 {
            let Some(c) = char::from_u32(number) else { continue };
            let text = format!("a{c}b");
            let cell = cell(&text);
            assert!(!cell.chars().any(char::is_control), "{number:x}");
            if c.is_alphanumeric() && !is_hidden(c) {
                assert_eq!(cell, text);
            }
        }
        let bidirectional = ('\u{202a}'..='\u{202e}')
            .chain('\u{2066}'..='\u{2069}')
            .chain(['\u{200e}', '\u{200f}', '\u{61c}']);
        let invisible = ('\u{200b}'..='\u{200d}')
            .chain('\u{2060}'..='\u{2064}')
            .chain(['\u{feff}', '\u{ad}', '\u{2028}', '\u{2029}']);
        let obeyed = (0..=8).chain(11..=31).chain(127..=159).filter_map(char::from_u32);
        for c in bidirectional.chain(invisible).chain(obeyed) {
            assert_eq!(lines(&format!("a{c}\tb\n")), format!("a\\u{:04X}\tb\n", u32::from(c)));
        }
        assert_eq!(cell("a\u{e0041}\n"), "a\\U000E0041\\u000A");
        assert_eq!(cell("größe, 大, ✓"), "größe, 大, ✓");
    }
}
