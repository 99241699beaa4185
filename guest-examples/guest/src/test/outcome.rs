//! What became of a message, as the host would record it.

use std::{fmt, time::Duration};

use serde::Serialize;
use serde_json::Value;

use super::session::{Cause, Fault};
use crate::{Failure, SqlError, bindings::handler::oncebox::handler::types};

/// What became of a message.
#[derive(Debug, Clone, PartialEq)]
pub enum Outcome {
    /// Completed, with this result; null when there is none.
    Ok(Value),
    /// To be tried again, after this time or the consumer's backoff.
    Retry(Option<Duration>),
    /// A dead letter, for this reason.
    Reject(String),
    /// Parked, for this reason.
    Park(String),
    /// Failed, and to be tried again after the consumer's backoff.
    Failed {
        /// What the inbox row says under `reason`, such as `sql_error:23505` or `other`.
        reason: String,
        /// The text beside it.
        text: String,
    },
}

impl Outcome {
    /// Completed with this result: `Outcome::ok(())` without one.
    pub fn ok(result: impl Serialize) -> Self {
        Self::Ok(serde_json::to_value(result).expect("a test's expectation can be written as JSON"))
    }

    /// Whether the message is completed.
    pub fn is_ok(&self) -> bool {
        matches!(self, Self::Ok(_))
    }

    /// The answer, unless something went wrong in the transaction: an explicit retry, reject or
    /// park stands, and everything else gives way to it.
    pub(super) fn of(answer: Result<Option<String>, Failure>, faults: &[Fault]) -> Self {
        let said = match &answer {
            Err(Failure::Retry(delay)) => return Self::Retry(*delay),
            Err(Failure::Reject(reason)) => return Self::Reject(reason.clone()),
            Err(Failure::Park(reason)) => return Self::Park(reason.clone()),
            Err(Failure::Other(text)) => text.as_str(),
            Ok(_) => "",
        };
        match worst(faults) {
            Some(Cause::Sql(error)) => return Self::failed(error, said),
            Some(Cause::Expected(otherwise)) => return Self::of(Err(otherwise.clone()), &[]),
            None => {}
        }
        match answer {
            Ok(None) => Self::Ok(Value::Null),
            Ok(Some(result)) => checked(&result),
            Err(failure) => Self::Failed {
                reason: "other".to_owned(),
                text: failure.to_string(),
            },
        }
    }

    pub(super) fn of_wire(
        answer: Result<Option<String>, types::Failure>,
        faults: &[Fault],
    ) -> Self {
        let failure = |failure| match failure {
            types::Failure::Retry(delay) => Failure::Retry(delay.map(Duration::from_millis)),
            types::Failure::Reject(reason) => Failure::Reject(reason),
            types::Failure::Park(reason) => Failure::Park(reason),
            types::Failure::Other(text) => Failure::Other(text),
        };
        Self::of(answer.map_err(failure), faults)
    }

    pub(super) fn failed(error: &SqlError, said: &str) -> Self {
        let (reason, text) = match error {
            SqlError::Database(error) => (
                format!("sql_error:{}", error.sqlstate),
                format!("{}: {}", error.sqlstate, error.message),
            ),
            SqlError::Refused(text) => ("statement_refused".to_owned(), text.clone()),
            SqlError::Limit(text) => ("limit".to_owned(), text.clone()),
            SqlError::Unsupported(text) | SqlError::Row(text) => ("other".to_owned(), text.clone()),
        };
        let text = if said.is_empty() {
            text
        } else {
            format!("{text}; the handler: {said}")
        };
        Self::Failed { reason, text }
    }
}

impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Ok(Value::Null) => f.write_str("ok"),
            Self::Ok(result) => write!(f, "ok: {result}"),
            Self::Retry(None) => f.write_str("retry"),
            Self::Retry(Some(delay)) => write!(f, "retry after {} ms", delay.as_millis()),
            Self::Reject(reason) => write!(f, "reject: {reason}"),
            Self::Park(reason) => write!(f, "park: {reason}"),
            Self::Failed { reason, text } => write!(f, "failed ({reason}): {text}"),
        }
    }
}

/// PostgreSQL's own error goes before the others, as on the host.
fn worst(faults: &[Fault]) -> Option<&Cause> {
    let of_database = faults
        .iter()
        .find(|fault| matches!(fault.cause, Cause::Sql(SqlError::Database(_))));
    of_database
        .or_else(|| faults.first())
        .map(|fault| &fault.cause)
}

/// The result is kept as jsonb, which takes no NUL.
fn checked(result: &str) -> Outcome {
    let bad = |text: String| Outcome::Failed {
        reason: "bad_result".to_owned(),
        text,
    };
    match serde_json::from_str(result) {
        Err(error) => bad(format!("the result is not JSON: {error}")),
        Ok(value) if has_nul(&value) => {
            bad("the result contains `\\u0000`, which PostgreSQL cannot store".to_owned())
        }
        Ok(value) => Outcome::Ok(value),
    }
}

fn has_nul(value: &Value) -> bool {
    match value {
        Value::String(text) => text.contains('\0'),
        Value::Array(values) => values.iter().any(has_nul),
        Value::Object(members) => members
            .iter()
            .any(|(name, value)| name.contains('\0') || has_nul(value)),
        Value::Null | Value::Bool(_) | Value::Number(_) => false,
    }
}
