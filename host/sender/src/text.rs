//! Texts from outside, as errors show them.

use std::error::Error;

/// Most characters that an error shows of a text from outside.
const SHOWN_MAX: usize = 100;

/// Returns a text from outside as an error shows it: cut, with control characters escaped.
pub(crate) fn shown(text: &str) -> String {
    text.chars().take(SHOWN_MAX).flat_map(char::escape_debug).collect()
}

/// Returns the text of an error and of all that caused it.
pub(crate) fn causes(error: &(dyn Error + 'static)) -> String {
    let (mut texts, mut next) = (Vec::new(), Some(error));
    while let Some(error) = next {
        texts.push(error.to_string());
        next = error.source();
    }
    texts.join(": ")
}

#[cfg(test)]
mod tests {
    use super::*;

    // What could go wrong: a text from outside writes a line of its own into a log.
    #[test]
    fn a_text_from_outside_is_cut_and_has_no_line_breaks() {
        assert_eq!(shown("a\r\nb"), "a\\r\\nb");
        assert_eq!(shown(&"x".repeat(500)).len(), SHOWN_MAX);
    }

    #[test]
    fn an_error_comes_with_its_causes() {
        #[derive(Debug, thiserror::Error)]
        #[error("outer")]
        struct Outer(#[source] std::num::ParseIntError);
        let error = Outer("x".parse::<u8>().unwrap_err());
        assert_eq!(causes(&error), "outer: invalid digit found in string");
    }
}
