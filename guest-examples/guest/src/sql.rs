//! `query` and `execute`, and what their errors mean to a handler.

use crate::generated::oncebox::handler::sql::{self, DatabaseError};
use crate::{Failure, FromValue, SqlError, Value};

/// Runs a statement for its effect; answers how many rows it touched.
pub fn execute(statement: &str, params: &[Value]) -> Result<u64, SqlError> {
    sql::execute(statement, params)
}

/// Runs a statement and reads its rows.
pub fn query(statement: &str, params: &[Value]) -> Result<Vec<Row>, SqlError> {
    let answer = sql::query(statement, params)?;
    Ok(answer.rows.into_iter().map(Row).collect())
}

/// One row of an answer.
pub struct Row(Vec<Value>);

impl Row {
    /// The column at `index`, from 0, as a Rust type.
    pub fn get<T: FromValue>(&self, index: usize) -> Result<T, Failure> {
        let value = self.0.get(index).and_then(T::from_value);
        value.ok_or_else(|| Failure::Other(format!("column {index} is absent or of another type")))
    }
}

/// The unique violation of PostgreSQL.
const UNIQUE_VIOLATION: &str = "23505";

impl SqlError {
    /// True when the statement met a key that is there already.
    pub fn is_unique_violation(&self) -> bool {
        matches!(self, Self::Database(error) if error.sqlstate == UNIQUE_VIOLATION)
    }
}

/// Lets a handler use `?` on statements: the message is tried again, with the error as reason.
impl From<SqlError> for Failure {
    fn from(error: SqlError) -> Self {
        Self::Other(match error {
            SqlError::Database(error) => describe(error),
            SqlError::Refused(text) => format!("statement refused: {text}"),
            SqlError::Unsupported(text) => format!("value not supported: {text}"),
            SqlError::Limit(text) => format!("limit reached: {text}"),
        })
    }
}

fn describe(error: DatabaseError) -> String {
    let DatabaseError {
        sqlstate,
        message,
        constraint,
        ..
    } = error;
    match constraint {
        Some(constraint) => format!("database error {sqlstate} ({constraint}): {message}"),
        None => format!("database error {sqlstate}: {message}"),
    }
}
