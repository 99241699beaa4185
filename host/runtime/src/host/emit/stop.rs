//! Reasons for which an emit or a cancel has no result.

use oncebox_model::{outcome::FailureKind, tx::StatementError};

use crate::{
    bindings::emitter::oncebox::handler0_2_0::emit::Error,
    host::sql::{self, ConnectionLost},
    text::{FAILURE_BYTES, bounded},
};

/// The reason for which an emit or a cancel has no result.
#[derive(Debug)]
pub(super) enum EmitStop {
    /// An error that the guest gets.
    Guest(Error),
    /// A lost connection, which ends the guest.
    Host(ConnectionLost),
}

impl EmitStop {
    /// Returns the refusal for this reason.
    pub(super) fn refused(reason: String) -> Self {
        Self::Guest(Error::Refused(reason))
    }

    /// Returns the error of a cap.
    pub(super) fn limit(text: String) -> Self {
        Self::Guest(Error::Limit(text))
    }

    /// Returns the error of a cancel that PostgreSQL, or the driver, refuses.
    pub(super) fn of_database(error: &sqlx::Error) -> Self {
        let text = match error.as_database_error() {
            Some(error) => {
                format!("{}: {}", error.code().unwrap_or_default(), error.message())
            }
            None => error.to_string(),
        };
        Self::Guest(Error::Database(bounded(&text, FAILURE_BYTES)))
    }

    /// Returns the error of an earlier statement, which a cancel meets.
    pub(super) fn of_statement(error: &StatementError) -> Self {
        let text = format!("{}: {}", error.sqlstate, error.message);
        Self::Guest(Error::Database(bounded(&text, FAILURE_BYTES)))
    }

    /// Returns the error of a call that the session of SQL does not admit.
    pub(super) fn of_sql(error: sql::Error) -> Self {
        Self::Guest(match error {
            sql::Error::Limit(text) => Error::Limit(text),
            sql::Error::Refused(text) | sql::Error::Unsupported(text) => Error::Refused(text),
            sql::Error::Database(error) => {
                Error::Database(format!("{}: {}", error.sqlstate, error.message))
            }
        })
    }
}

/// Returns the failure that an error is for its message. The transaction records PostgreSQL's own
/// errors, which go before it.
pub(super) fn fault(error: &Error) -> (FailureKind, &str) {
    match error {
        Error::Refused(text) => (FailureKind::StatementRefused, text),
        Error::Limit(text) => (FailureKind::Limit, text),
        Error::Database(text) => (FailureKind::Other, text),
    }
}
