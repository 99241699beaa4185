//! One statement, from its text to its rows.

use futures::TryStreamExt;
use oncebox_model::{
    policy::Limits,
    tx::{Statement, Tx},
};
use sqlx::{
    AssertSqlSafe, Connection, Either, Executor, PgConnection, SqlSafeStr, Statement as _,
    postgres::{PgArguments, PgDatabaseError, PgRow, PgStatement, PgTypeInfo},
};

use super::{
    Column, DatabaseError, Element, Error, Value,
    decode::Layout,
    encode,
    session::limit,
    statement,
    types::{is_too_deep, is_unknown},
};
use crate::text::bounded;

/// Parameters the wire protocol can count.
const PARAMS_MAX: usize = 65_535;
/// Bytes of PostgreSQL's own texts that are handed to a guest.
const ERROR_BYTES: usize = 4096;
/// Bytes of what PostgreSQL says of one type: an enum's labels, a row's attributes.
const TYPE_BYTES_MAX: usize = 256 << 10;
/// Bytes of a row on the wire beside its values: the lengths of as many columns as PostgreSQL
/// allows.
const ROW_OVERHEAD: usize = 4 * 1_700;

/// Whether rows are wanted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    /// Read the rows.
    Query,
    /// Only count what was touched; rows are passed over.
    Execute,
}

/// What a statement brought.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Answer {
    /// The result's columns; none for [`Mode::Execute`].
    pub columns: Vec<Column>,
    /// Its rows; none for [`Mode::Execute`].
    pub rows: Vec<Vec<Value>>,
    /// Rows that were returned or touched.
    pub rows_affected: u64,
}

/// Why there is no answer.
#[derive(Debug)]
pub enum Stopped {
    /// The guest is told.
    Guest(Error),
    /// The guest is ended, since nothing can be sent any more.
    Host(ConnectionLost),
}

/// The connection broke, or is in a state in which it must not be used again.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the connection to the database was lost")]
pub struct ConnectionLost;

/// Run one statement of a guest. Dropping the future condemns the connection.
pub async fn run_statement(
    tx: &Tx,
    limits: &Limits,
    mode: Mode,
    text: &str,
    params: &[Value],
) -> Result<Answer, Stopped> {
    check(limits, text, params).map_err(Stopped::Guest)?;
    let mut statement = tx.statement().await;
    match exchange(statement.connection(), limits, mode, text, params).await {
        Ok(answer) => {
            statement.finish(None);
            Ok(answer)
        }
        Err(Trouble::Guest(error)) => {
            statement.finish(None);
            Err(Stopped::Guest(error))
        }
        Err(Trouble::Sql(error)) => Err(stopped(tx, statement, &error).await),
        // Not finished, which condemns the connection and with it the driver's types.
        Err(Trouble::TooDeep) => Err(Stopped::Host(ConnectionLost)),
    }
}

/// Run fixed text of the host, such as a savepoint's. It never holds a word of a guest.
pub(crate) async fn control(tx: &Tx, text: String) -> Result<(), Stopped> {
    let mut statement = tx.statement().await;
    match sqlx::raw_sql(AssertSqlSafe(text)).execute(statement.connection()).await {
        Ok(_) => {
            statement.finish(None);
            Ok(())
        }
        Err(error) => Err(stopped(tx, statement, &error).await),
    }
}

/// Tell an answered error, which is the guest's, from a broken connection.
async fn stopped(tx: &Tx, statement: Statement<'_>, error: &sqlx::Error) -> Stopped {
    statement.finish(Some(error));
    if tx.is_broken().await {
        return Stopped::Host(ConnectionLost);
    }
    match error.as_database_error().and_then(|error| error.try_downcast_ref::<PgDatabaseError>()) {
        Some(error) => Stopped::Guest(Error::Database(database_error(error))),
        None => {
            Stopped::Guest(Error::Unsupported(format!("the statement cannot be sent: {error}")))
        }
    }
}

/// Only what a client may know: no context, no hint, no place in the server's source.
fn database_error(error: &PgDatabaseError) -> DatabaseError {
    DatabaseError {
        sqlstate: error.code().to_owned(),
        message: bounded(error.message(), ERROR_BYTES),
        detail: error.detail().map(|detail| bounded(detail, ERROR_BYTES)),
        constraint: error.constraint().map(str::to_owned),
    }
}

/// What can be refused before anything is sent.
fn check(limits: &Limits, text: &str, params: &[Value]) -> Result<(), Error> {
    statement::check(text).map_err(Error::Refused)?;
    if text.len() > limits.statement_bytes_max {
        return Err(limit("statement_bytes_max", limits.statement_bytes_max));
    }
    let params_max = limits.params_max.min(PARAMS_MAX);
    if params.len() > params_max {
        return Err(limit("params_max", params_max));
    }
    if params.iter().map(size).sum::<usize>() > limits.params_bytes_max {
        return Err(limit("params_bytes_max", limits.params_bytes_max));
    }
    Ok(())
}

/// About how many bytes a parameter takes.
fn size(value: &Value) -> usize {
    match value {
        Value::Numeric(text) | Value::Text(text) | Value::Uuid(text) | Value::Json(text) => {
            text.len()
        }
        Value::Bytea(bytes) => bytes.len(),
        Value::Array(elements) => elements.iter().map(element_size).sum(),
        _ => std::mem::size_of::<i64>(),
    }
}

fn element_size(element: &Element) -> usize {
    match element {
        Element::Numeric(text)
        | Element::Text(text)
        | Element::Uuid(text)
        | Element::Json(text) => 4 + text.len(),
        Element::Bytea(bytes) => 4 + bytes.len(),
        _ => 4 + std::mem::size_of::<i64>(),
    }
}

/// Why an exchange ended.
enum Trouble {
    Guest(Error),
    Sql(sqlx::Error),
    TooDeep,
}

impl From<sqlx::Error> for Trouble {
    fn from(error: sqlx::Error) -> Self {
        Self::Sql(error)
    }
}

fn unsupported(text: impl Into<String>) -> Trouble {
    Trouble::Guest(Error::Unsupported(text.into()))
}

async fn exchange(
    connection: &mut PgConnection,
    limits: &Limits,
    mode: Mode,
    text: &str,
    params: &[Value],
) -> Result<Answer, Trouble> {
    let prepared = describe(connection, text).await?;
    if types(&prepared).any(is_too_deep) {
        return Err(Trouble::TooDeep);
    }
    let arguments = encode::arguments(parameters(&prepared), params).map_err(unsupported)?;
    let layout = match mode {
        Mode::Query => Some(Layout::of(prepared.columns()).map_err(unsupported)?),
        Mode::Execute => None,
    };
    let result = read(connection, &prepared, arguments, layout.as_ref(), limits).await;
    if result.as_ref().is_err_and(is_stale) {
        connection.clear_cached_statements().await?;
    }
    let (rows, rows_affected) = result?;
    Ok(Answer {
        columns: layout.map(|layout| layout.columns).unwrap_or_default(),
        rows,
        rows_affected,
    })
}

const NOT_DESCRIBED: &str = "a type of this statement cannot be described; cast it to text";

/// Ask PostgreSQL for the types, once per text and connection. The text goes through the
/// extended protocol, which takes one statement only.
async fn describe(connection: &mut PgConnection, text: &str) -> Result<PgStatement, Trouble> {
    connection.set_row_bytes_max(TYPE_BYTES_MAX);
    let prepared = connection.prepare(AssertSqlSafe(text).into_sql_str()).await;
    connection.set_row_bytes_max(usize::MAX);
    let passed_over = connection.take_rows_passed_over();
    match prepared {
        // A type that is too large, or was dropped meanwhile.
        Ok(prepared) if passed_over > 0 || types(&prepared).any(is_unknown) => {
            connection.clear_cached_statements().await?;
            Err(unsupported(NOT_DESCRIBED))
        }
        // The driver gives up on types that are nested too deeply; the connection is well
        // if it still answers.
        Err(sqlx::Error::Protocol(_)) => {
            connection.ping().await?;
            Err(unsupported(NOT_DESCRIBED))
        }
        result => Ok(result?),
    }
}

/// Of the parameters and of the columns.
fn types(prepared: &PgStatement) -> impl Iterator<Item = &PgTypeInfo> {
    parameters(prepared).iter().chain(prepared.columns().iter().map(sqlx::Column::type_info))
}

fn parameters(prepared: &PgStatement) -> &[PgTypeInfo] {
    match prepared.parameters() {
        Some(Either::Left(types)) => types,
        _ => &[],
    }
}

/// Read the answer to its end, whatever it holds. Rows beyond a cap are passed over rather
/// than the connection given up: the message fails, its neighbours in the transaction need
/// not, and the deadline bounds how long it takes. One that is longer than all may be together
/// is not even taken into memory.
async fn read(
    connection: &mut PgConnection,
    prepared: &PgStatement,
    arguments: PgArguments,
    layout: Option<&Layout>,
    limits: &Limits,
) -> Result<(Vec<Vec<Value>>, u64), Trouble> {
    connection.set_row_bytes_max(if layout.is_some() {
        limits.result_bytes_max.saturating_add(ROW_OVERHEAD)
    } else {
        0
    });
    let answer = read_rows(connection, prepared, arguments, layout, limits).await;
    connection.set_row_bytes_max(usize::MAX);
    let passed_over = connection.take_rows_passed_over();
    match layout {
        Some(_) if answer.is_ok() && passed_over > 0 => {
            Err(Trouble::Guest(limit("result_bytes_max", limits.result_bytes_max)))
        }
        _ => answer,
    }
}

async fn read_rows(
    connection: &mut PgConnection,
    prepared: &PgStatement,
    arguments: PgArguments,
    layout: Option<&Layout>,
    limits: &Limits,
) -> Result<(Vec<Vec<Value>>, u64), Trouble> {
    let mut rows = Rows { rows: Vec::new(), bytes: 0, limits };
    let (mut rows_affected, mut error) = (0, None);
    let mut stream = connection.fetch_many(prepared.query_with(arguments));
    while let Some(item) = stream.try_next().await? {
        match (item, layout) {
            (Either::Left(done), _) => rows_affected += done.rows_affected(),
            (Either::Right(row), Some(layout)) if error.is_none() => {
                error = rows.keep(layout, &row).err()
            }
            (Either::Right(_), _) => {}
        }
    }
    match error {
        Some(error) => Err(Trouble::Guest(error)),
        None => Ok((rows.rows, rows_affected)),
    }
}

/// The rows of a result, up to its caps.
struct Rows<'a> {
    rows: Vec<Vec<Value>>,
    bytes: usize,
    limits: &'a Limits,
}

impl Rows<'_> {
    fn keep(&mut self, layout: &Layout, row: &PgRow) -> Result<(), Error> {
        if self.rows.len() >= self.limits.rows_max {
            self.rows.clear();
            return Err(limit("rows_max", self.limits.rows_max));
        }
        let room = self.limits.result_bytes_max.saturating_sub(self.bytes);
        let Some((values, size)) = layout.row(row, room).map_err(Error::Unsupported)? else {
            self.rows.clear();
            return Err(limit("result_bytes_max", self.limits.result_bytes_max));
        };
        self.bytes += size;
        self.rows.push(values);
        Ok(())
    }
}

/// Errors after which a prepared statement would fail for ever: its result or a type of it
/// changed, or it was deallocated behind the driver's back.
fn is_stale(trouble: &Trouble) -> bool {
    let Trouble::Sql(error) = trouble else { return false };
    let code = error.as_database_error().and_then(|error| error.code());
    code.is_some_and(|code| matches!(code.as_ref(), "0A000" | "26000" | "XX000"))
}
