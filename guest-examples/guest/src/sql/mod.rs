//! Statements in the host's open transaction.

mod array;
mod deserialize;
mod row;
mod value;

use std::{error, fmt};

use serde::de::DeserializeOwned;

#[cfg(all(feature = "test", not(target_family = "wasm")))]
pub(crate) use array::{element, value};
pub use row::Row;
pub use value::{Date, Json, Numeric, Time, Timestamp, Timestamptz, ToElement, ToValue};

use crate::{DatabaseError, Failure, Value, sys};

/// Runs a statement for its effect; answers how many rows it touched.
///
/// A statement begins with SELECT, INSERT, UPDATE, DELETE, MERGE, VALUES, TABLE or WITH. What
/// it writes is committed together with the message's completion, or not at all.
pub fn execute(statement: &str, params: &[Value]) -> Result<u64, SqlError> {
    sys::execute(statement, params)
}

/// Runs a statement for its effect, and does not wait for its answer.
///
/// The host sends it with the next statement, or at the end of the handler, so that several of them
/// take one round trip to the database. They run in the order of the calls. An error that PostgreSQL
/// answers is that of the next call that waits, whose own statement has no effect then; it fails the
/// message even when the handler answers ok. A component that calls this imports
/// `oncebox:handler/sql@0.2.0`, which needs no grant.
pub fn enqueue(statement: &str, params: &[Value]) -> Result<(), SqlError> {
    sys::enqueue(statement, params, None)
}

/// The same for a statement that has to touch this many rows. Where it touches another number, the
/// message ends with this failure, whatever the handler answers, unless it answers a retry, a reject
/// or a park of its own.
///
/// ```no_run
/// use oncebox_guest::{Failure, SqlError, enqueue_expecting, params};
///
/// fn book(account: i32, amount: i64) -> Result<(), SqlError> {
///     enqueue_expecting(
///         "UPDATE account SET balance = balance + $2 WHERE id = $1",
///         params![account, amount],
///         1,
///         Failure::reject(format_args!("no account {account}")),
///     )
/// }
/// ```
pub fn enqueue_expecting(
    statement: &str,
    params: &[Value],
    rows: u64,
    otherwise: Failure,
) -> Result<(), SqlError> {
    sys::enqueue(statement, params, Some((rows, otherwise)))
}

/// Runs a statement and reads its rows as they are.
pub fn query(statement: &str, params: &[Value]) -> Result<Vec<Row>, SqlError> {
    sys::query(statement, params)
}

/// Runs a statement and reads each row as `T`.
///
/// A struct that implements `Deserialize` takes the columns by their names, a tuple takes them
/// in their order, and any other type takes the only column.
pub fn query_as<T: DeserializeOwned>(
    statement: &str,
    params: &[Value],
) -> Result<Vec<T>, SqlError> {
    query(statement, params)?
        .into_iter()
        .map(Row::into)
        .collect()
}

/// The same for a statement that must answer one row.
pub fn query_one<T: DeserializeOwned>(statement: &str, params: &[Value]) -> Result<T, SqlError> {
    query_optional(statement, params)?
        .ok_or_else(|| SqlError::Row("the statement answered no row, not one".to_owned()))
}

/// The same for a statement that answers at most one row.
pub fn query_optional<T: DeserializeOwned>(
    statement: &str,
    params: &[Value],
) -> Result<Option<T>, SqlError> {
    let mut rows = query(statement, params)?;
    match rows.len() {
        0 | 1 => rows.pop().map(Row::into).transpose(),
        more => Err(SqlError::Row(format!(
            "the statement answered {more} rows, not one"
        ))),
    }
}

/// Does some work that may fail without failing the message: when it does, what it wrote is
/// undone, the statement that failed is forgiven, and its error is answered.
///
/// Without one, a failed statement fails the message, even when the handler answers ok.
///
/// ```no_run
/// use oncebox_guest::{SqlError, execute, params, savepoint};
///
/// fn open(account: &str) -> Result<(), SqlError> {
///     let opened = savepoint(|| {
///         execute("INSERT INTO account (account) VALUES ($1)", params![account])
///     });
///     match opened {
///         Err(error) if error.is_unique_violation() => Ok(()),
///         other => other.map(drop),
///     }
/// }
/// ```
pub fn savepoint<T, E: From<SqlError>>(work: impl FnOnce() -> Result<T, E>) -> Result<T, E> {
    let savepoint = sys::Savepoint::open()?;
    match work() {
        // The release answers the error of what the work has enqueued.
        Ok(value) => match savepoint.release() {
            Ok(()) => Ok(value),
            Err(error) => {
                savepoint.rollback()?;
                Err(error.into())
            }
        },
        Err(error) => {
            savepoint.rollback()?;
            Err(error)
        }
    }
}

/// Why a statement brought no answer.
#[derive(Debug, Clone, PartialEq)]
pub enum SqlError {
    /// PostgreSQL's own error.
    Database(DatabaseError),
    /// The statement is not of an allowed kind, or not what a helper wants.
    Refused(String),
    /// A parameter does not fit, or a column's type cannot be carried; says what to cast.
    Unsupported(String),
    /// A cap of the consumer was reached; says which.
    Limit(String),
    /// A row is not what the handler reads it as, or there are too few or too many.
    Row(String),
}

impl SqlError {
    /// PostgreSQL's five characters, where it was PostgreSQL that failed.
    pub fn sqlstate(&self) -> Option<&str> {
        self.database().map(|error| error.sqlstate.as_str())
    }

    /// The constraint that was violated, where one was.
    pub fn constraint(&self) -> Option<&str> {
        self.database()?.constraint.as_deref()
    }

    /// True when the statement met a key that is there already.
    pub fn is_unique_violation(&self) -> bool {
        self.sqlstate() == Some("23505")
    }

    fn database(&self) -> Option<&DatabaseError> {
        match self {
            Self::Database(error) => Some(error),
            _ => None,
        }
    }
}

impl fmt::Display for SqlError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Database(error) => {
                write!(f, "database error {}", error.sqlstate)?;
                if let Some(constraint) = &error.constraint {
                    write!(f, " ({constraint})")?;
                }
                write!(f, ": {}", error.message)
            }
            Self::Refused(text) => write!(f, "statement refused: {text}"),
            Self::Unsupported(text) => write!(f, "value not supported: {text}"),
            Self::Limit(text) => write!(f, "limit reached: {text}"),
            Self::Row(text) => f.write_str(text),
        }
    }
}

impl error::Error for SqlError {}

/// The parameters of a statement, of any types that implement [`ToValue`]. They are only
/// borrowed.
///
/// ```
/// use oncebox_guest::{Value, params};
///
/// let note = String::from("a gift");
/// let params = params![17, note, None::<bool>];
/// assert_eq!(params, [Value::Int4(17), Value::Text(note), Value::Null]);
/// ```
#[macro_export]
macro_rules! params {
    ($($value:expr),* $(,)?) => {
        &[$($crate::ToValue::to_value(&$value)),*] as &[$crate::Value]
    };
}
