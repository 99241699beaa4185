//! What PostgreSQL answers to a statement, and how long it has not answered.

use std::{
    sync::{Mutex, PoisonError},
    time::{Duration, Instant},
};

use sqlx::postgres::{PgDatabaseError, PgSeverity};

use crate::sqlstate;

/// An error that PostgreSQL answered to a statement of a handler.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StatementError {
    /// PostgreSQL's five-character code.
    pub sqlstate: String,
    /// PostgreSQL's message.
    pub message: String,
    /// Name of the violated constraint, where PostgreSQL names one.
    pub constraint: Option<String>,
}

impl StatementError {
    /// Returns whether the error is contention, which is no fault of the handler's and worth
    /// another try.
    pub fn is_contention(&self) -> bool {
        sqlstate::is_contention(&self.sqlstate)
    }
}

/// The time since which a database has left a question of this host unanswered.
#[derive(Debug, Default)]
pub struct Silence(Mutex<Option<Instant>>);

impl Silence {
    /// Notes that the host asks the database something.
    pub fn asked(&self) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert_with(Instant::now);
    }

    /// Notes that the database answered something: it is there, whatever else was asked.
    pub fn answered(&self) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }

    /// Returns how long the database has been silent; none while no question is open.
    pub fn lasts(&self) -> Option<Duration> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).map(|since| since.elapsed())
    }
}

/// SQLSTATEs of a prepared statement that has to be prepared again.
const STALE: [&str; 3] = [
    sqlstate::FEATURE_NOT_SUPPORTED,
    sqlstate::UNDEFINED_PREPARED_STATEMENT,
    sqlstate::INTERNAL_ERROR,
];

/// Returns the error that PostgreSQL answered, where the connection lives on. FATAL and worse end
/// the connection, and no SQL of a tenant can raise them.
pub fn answered(error: &sqlx::Error) -> Option<StatementError> {
    let database = error.as_database_error()?.try_downcast_ref::<PgDatabaseError>()?;
    if matches!(database.severity(), PgSeverity::Fatal | PgSeverity::Panic) {
        return None;
    }
    Some(StatementError {
        sqlstate: database.code().to_owned(),
        message: database.message().to_owned(),
        constraint: database.constraint().map(str::to_owned),
    })
}

/// Longest time of a statement of the host on the client's side. The server's own timeouts are far
/// below; this one notices a server that has gone silent.
const HOST_STATEMENT_MAX: Duration = Duration::from_secs(60);

/// Returns the answer to a statement of the host, or an error where none comes in time.
pub async fn bounded<T>(
    answer: impl Future<Output = Result<T, sqlx::Error>>,
) -> Result<T, sqlx::Error> {
    let silence = |_| sqlx::Error::Io(std::io::ErrorKind::TimedOut.into());
    tokio::time::timeout(HOST_STATEMENT_MAX, answer).await.map_err(silence)?
}

/// Returns whether an error arose on this side of the connection, which stays sound.
pub(super) fn is_local(error: &sqlx::Error) -> bool {
    use sqlx::Error as E;
    matches!(
        error,
        E::Encode(_)
            | E::Decode(_)
            | E::ColumnDecode { .. }
            | E::ColumnNotFound(_)
            | E::TypeNotFound { .. }
            | E::InvalidArgument(_)
    )
}

/// Returns whether a prepared statement fails with this error for ever: its result or types have
/// changed, or PostgreSQL has deallocated it without the driver's knowledge.
pub(super) fn is_stale(error: &sqlx::Error) -> bool {
    let code = error.as_database_error().and_then(|error| error.code());
    code.is_some_and(|code| STALE.contains(&&*code))
}
