//! Ranges of event versions, as semantic-version requirements.
//!
//! Event versions are written in many ways: `2`, `v2`, `2.1`, `2.1.0`. Missing numbers count as
//! zero, and a leading `v` is ignored. A text that is no version at all, such as a date or a word,
//! lies in no range.

use semver::{Version, VersionReq};

use crate::error::InboxError;

/// Parses a range, as a deployment names it.
///
/// # Errors
///
/// [`InboxError::Invalid`] where the text is no range.
pub fn parse(text: &str) -> Result<VersionReq, InboxError> {
    VersionReq::parse(text).map_err(|error| {
        InboxError::Invalid(format!(
            "`{text}` is no range of event versions: {error}; write it as `2`, `>=2, <4` or `~2.1`"
        ))
    })
}

/// Parses an event's version; none where the text does not consist of numbers.
pub fn version(text: &str) -> Option<Version> {
    let numbers = text.strip_prefix('v').unwrap_or(text);
    let dots = numbers.split(['-', '+']).next()?.matches('.').count();
    let padded = match dots {
        0 | 1 => {
            let end = numbers.find(['-', '+']).unwrap_or(numbers.len());
            format!("{}{}{}", &numbers[..end], ".0".repeat(2 - dots), &numbers[end..])
        }
        _ => numbers.to_owned(),
    };
    Version::parse(&padded).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(range: &str, text: &str, expected: bool) {
        let range = parse(range).expect("a range");
        assert_eq!(
            version(text).is_some_and(|version| range.matches(&version)),
            expected,
            "{text} in {range}"
        );
    }

    // S1-114: a handler is found by the event's type and version.
    #[test]
    fn versions_are_padded_and_words_lie_in_no_range() {
        // S1-114.
        check("2", "2", true);
        check("2", "v2.7", true);
        check("2", "3", false);
        check(">=2, <4", "3.9.9", true);
        check(">=2, <4", "4", false);
        check("~2.1", "2.1.5", true);
        check("*", "2024-01-01", false);
        check("*", "latest", false);
        check("*", "", false);
    }

    #[test]
    fn a_range_that_is_none_is_named() {
        let error = parse("two or so").expect_err("no range").to_string();
        assert!(error.contains("two or so"), "{error}");
    }
}
