//! The answers of endpoints.

use std::{fmt, str::FromStr};

/// What becomes of the answer of an endpoint.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum AnswerMode {
    /// Nothing: its status decides, and the rest is dropped.
    #[default]
    None,
    /// It is kept with the outgoing message.
    Stored,
    /// It becomes a message in the inbox of a consumer.
    Delivered,
}

/// A text that is no answer mode.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{0:.40}` says nothing of answers; there are `none`, `stored` and `delivered`")]
pub struct UnknownAnswerMode(String);

impl AnswerMode {
    /// Names of all modes, in the order of the table's constraint.
    pub const NAMES: [&str; 3] =
        [Self::None.as_str(), Self::Stored.as_str(), Self::Delivered.as_str()];

    /// Returns the name of the mode in rows and the API.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Stored => "stored",
            Self::Delivered => "delivered",
        }
    }
}

impl fmt::Display for AnswerMode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl FromStr for AnswerMode {
    type Err = UnknownAnswerMode;

    fn from_str(text: &str) -> Result<Self, UnknownAnswerMode> {
        let all = [Self::None, Self::Stored, Self::Delivered];
        let named = all.into_iter().find(|mode| mode.as_str() == text);
        named.ok_or_else(|| UnknownAnswerMode(text.escape_default().to_string()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mode_is_read_as_it_is_written() {
        for name in AnswerMode::NAMES {
            assert_eq!(name.parse::<AnswerMode>().map(AnswerMode::as_str), Ok(name));
        }
        let fault = "Stored\n".parse::<AnswerMode>().expect_err("no mode").to_string();
        assert!(fault.contains("`stored`") && !fault.contains('\n'), "{fault}");
    }
}
