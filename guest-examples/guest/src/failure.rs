//! Why a handler did not do its work, and short ways to say so.

use std::{error::Error, fmt, time::Duration};

use crate::bindings::handler::oncebox::handler::types;

/// What a handler's functions return.
pub type Result<T, E = Failure> = std::result::Result<T, E>;

/// Why a handler did not do its work. Whatever it wrote is rolled back.
///
/// Every `std::error::Error` becomes [`Failure::Other`] by `?`, so what nobody thought of is
/// tried again and then becomes a dead letter that says why. Where an error means something
/// else, [`OrFail`] says so: `text.parse::<i64>().or_reject("amount")?`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Failure {
    /// Try again, after this time or after the consumer's backoff.
    Retry(Option<Duration>),
    /// This message can never succeed: it becomes a dead letter, with this reason.
    Reject(String),
    /// A person has to look at this message first, for this reason.
    Park(String),
    /// Anything else: tried again after the consumer's backoff, with this text as the reason.
    Other(String),
}

impl Failure {
    /// The message can never succeed.
    pub fn reject(reason: impl fmt::Display) -> Self {
        Self::Reject(reason.to_string())
    }

    /// A person has to look at the message.
    pub fn park(reason: impl fmt::Display) -> Self {
        Self::Park(reason.to_string())
    }

    /// Try again after the consumer's backoff, for this reason.
    pub fn other(reason: impl fmt::Display) -> Self {
        Self::Other(reason.to_string())
    }
}

/// Try again after this time: `return Err(retry_after(Duration::from_secs(30)))`.
pub fn retry_after(delay: Duration) -> Failure {
    Failure::Retry(Some(delay))
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Retry(None) => f.write_str("retry"),
            Self::Retry(Some(delay)) => write!(f, "retry after {} ms", delay.as_millis()),
            Self::Reject(reason) => write!(f, "reject: {reason}"),
            Self::Park(reason) => write!(f, "park: {reason}"),
            Self::Other(reason) => f.write_str(reason),
        }
    }
}

// `Failure` is no `Error` itself: that is what leaves room for this conversion.
impl<E: Error> From<E> for Failure {
    fn from(error: E) -> Self {
        let mut text = error.to_string();
        let mut cause = error.source();
        while let Some(error) = cause {
            text = format!("{text}: {error}");
            cause = error.source();
        }
        Self::Other(text)
    }
}

impl Failure {
    /// The failure as the contract carries it.
    pub(crate) fn into_wire(self) -> types::Failure {
        match self {
            Self::Retry(delay) => types::Failure::Retry(
                // A delay of more milliseconds than fit is cut by the host in any case.
                delay.map(|delay| u64::try_from(delay.as_millis()).unwrap_or(u64::MAX)),
            ),
            Self::Reject(reason) => types::Failure::Reject(reason),
            Self::Park(reason) => types::Failure::Park(reason),
            Self::Other(reason) => types::Failure::Other(reason),
        }
    }
}

/// Says what an error, or an absent value, means for the message.
pub trait OrFail<T>: Sized {
    /// The message can never succeed.
    fn or_reject(self, what: impl fmt::Display) -> Result<T>;

    /// A person has to look at the message.
    fn or_park(self, what: impl fmt::Display) -> Result<T>;

    /// Try again after the consumer's backoff.
    fn or_retry(self, what: impl fmt::Display) -> Result<T>;
}

impl<T, E: fmt::Display> OrFail<T> for std::result::Result<T, E> {
    fn or_reject(self, what: impl fmt::Display) -> Result<T> {
        self.map_err(|error| Failure::Reject(format!("{what}: {error}")))
    }

    fn or_park(self, what: impl fmt::Display) -> Result<T> {
        self.map_err(|error| Failure::Park(format!("{what}: {error}")))
    }

    fn or_retry(self, what: impl fmt::Display) -> Result<T> {
        self.map_err(|error| Failure::Other(format!("{what}: {error}")))
    }
}

impl<T> OrFail<T> for Option<T> {
    fn or_reject(self, what: impl fmt::Display) -> Result<T> {
        self.ok_or_else(|| Failure::reject(what))
    }

    fn or_park(self, what: impl fmt::Display) -> Result<T> {
        self.ok_or_else(|| Failure::park(what))
    }

    fn or_retry(self, what: impl fmt::Display) -> Result<T> {
        self.ok_or_else(|| Failure::other(what))
    }
}

/// Ends the function: this message can never succeed. Takes what `format!` takes.
#[macro_export]
macro_rules! reject {
    ($($reason:tt)+) => {
        return ::core::result::Result::Err($crate::Failure::Reject(::std::format!($($reason)+)))
    };
}

/// Ends the function: a person has to look at this message. Takes what `format!` takes.
#[macro_export]
macro_rules! park {
    ($($reason:tt)+) => {
        return ::core::result::Result::Err($crate::Failure::Park(::std::format!($($reason)+)))
    };
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(text: &str) -> Result<i64> {
        let number: i64 = text.parse()?;
        if number < 0 {
            reject!("`{text}` is negative");
        }
        Ok(number)
    }

    #[test]
    fn any_error_is_tried_again_with_its_text() {
        assert_eq!(parsed("7"), Ok(7));
        assert_eq!(
            parsed("-7"),
            Err(Failure::Reject("`-7` is negative".into()))
        );
        let other = parsed("seven");
        assert_eq!(
            other,
            Err(Failure::Other("invalid digit found in string".into()))
        );
    }

    #[test]
    fn an_error_can_be_given_a_meaning() {
        let failure = "x".parse::<i64>().or_reject("amount");
        let text = "amount: invalid digit found in string";
        assert_eq!(failure, Err(Failure::Reject(text.into())));
        assert_eq!(
            None::<i64>.or_park("no rate"),
            Err(Failure::Park("no rate".into()))
        );
    }

    #[test]
    fn a_delay_is_carried_in_milliseconds() {
        let wire = |delay| retry_after(delay).into_wire();
        assert_eq!(
            wire(Duration::from_secs(2)),
            types::Failure::Retry(Some(2_000))
        );
        assert_eq!(wire(Duration::MAX), types::Failure::Retry(Some(u64::MAX)));
    }
}
