//! The functions `query` and `execute`: the run of one statement, from its text to its rows.

use std::time::Instant;

use futures::TryStreamExt;
use oncebox_model::{
    hooks,
    policy::Limits,
    tx::{ENQUEUED_BYTES_MAX, OpenStatement, Tx},
};
use sqlx::{
    AssertSqlSafe, Connection, Either, Executor, PgConnection, SqlSafeStr, Statement as _,
    postgres::{PgArguments, PgDatabaseError, PgRow, PgStatement, PgTypeInfo},
};

use super::{
    decode::Layout,
    encode, span, statement,
    stop::{ConnectionLost, SqlStop, limit},
    types::{is_too_deep, is_unknown},
};
use crate::{
    bindings::oncebox::handler::sql::{
        self, Column, DatabaseError, Element, Error, ResultSet, Value,
    },
    state::StoreState,
    text::bounded,
};

/// Fail point behind any statement.
pub(super) const AFTER: &str = "runtime:sql:after";
/// Most parameters that the wire protocol can count.
const PARAMS_MAX: usize = 65_535;
/// Most bytes of each of PostgreSQL's own texts that a guest gets.
const ERROR_BYTES: usize = 4096;
/// Most bytes of PostgreSQL's description of one type: an enum's labels, a row's attributes.
const TYPE_BYTES_MAX: usize = 256 << 10;
/// Bytes of a row on the wire beside its values: the lengths of the most columns that PostgreSQL
/// allows.
const ROW_OVERHEAD: usize = 4 * 1_700;

/// The use of a statement's rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StatementMode {
    /// Rows are read and returned.
    Query,
    /// Rows are counted and dropped.
    Execute,
}

/// The result of a statement.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct SqlAnswer {
    /// Columns of the rows; none for [`StatementMode::Execute`].
    pub columns: Vec<Column>,
    /// Rows that were returned; none for [`StatementMode::Execute`].
    pub rows: Vec<Vec<Value>>,
    /// Number of rows that were returned or changed.
    pub rows_affected: u64,
}

impl sql::Host for StoreState {
    async fn query(
        &mut self,
        statement: String,
        params: Vec<Value>,
    ) -> wasmtime::Result<Result<ResultSet, Error>> {
        let answer = self.run(StatementMode::Query, &statement, &params).await?;
        Ok(answer.map(|answer| ResultSet { columns: answer.columns, rows: answer.rows }))
    }

    async fn execute(
        &mut self,
        statement: String,
        params: Vec<Value>,
    ) -> wasmtime::Result<Result<u64, Error>> {
        let answer = self.run(StatementMode::Execute, &statement, &params).await?;
        Ok(answer.map(|answer| answer.rows_affected))
    }
}

impl StoreState {
    async fn run(
        &mut self,
        mode: StatementMode,
        statement: &str,
        params: &[Value],
    ) -> wasmtime::Result<Result<SqlAnswer, Error>> {
        let is_query = mode == StatementMode::Query;
        let recorded = self.recording.as_mut().map_or(0, |it| it.sent(is_query, statement, params));
        let sent = Instant::now();
        let result = match self.session.admit(statement, &self.limits) {
            Ok(()) => match self.tx() {
                Ok(tx) => {
                    let span = span::begin(statement, self.spans.youngest());
                    let result = run_statement(&tx, &self.limits, mode, statement, params).await;
                    span::end(span, &result);
                    result
                }
                Err(stop) => Err(stop),
            },
            Err(error) => Err(SqlStop::Guest(error)),
        };
        hooks::point(AFTER);
        self.note_answers().await;
        if let Some(recording) = &mut self.recording {
            recording.answered(recorded, sent, &result);
            recording.pause().await;
        }
        self.session.answer(result)
    }
}

/// Runs one statement of a guest. Dropping the future condemns the connection.
///
/// # Errors
///
/// [`SqlStop::Guest`] for an error that the guest gets, [`SqlStop::Host`] for a lost connection.
pub async fn run_statement(
    tx: &Tx,
    limits: &Limits,
    mode: StatementMode,
    text: &str,
    params: &[Value],
) -> Result<SqlAnswer, SqlStop> {
    check(limits, text, params).map_err(SqlStop::Guest)?;
    if bytes(params) > ENQUEUED_BYTES_MAX {
        wait_for_enqueued(tx).await?;
    }
    let mut statement = tx.statement().await;
    let answer = exchange(statement.connection(), limits, mode, text, params).await;
    finish(tx, statement, answer).await
}

/// Waits for what is enqueued.
async fn wait_for_enqueued(tx: &Tx) -> Result<(), SqlStop> {
    match tx.wait_for_enqueued().await {
        Ok(()) => Ok(()),
        Err(error) => Err(stop_of(tx, &error).await),
    }
}

/// Ends a statement with its answer.
pub(super) async fn finish<T>(
    tx: &Tx,
    mut statement: OpenStatement<'_>,
    answer: Result<T, ExchangeError>,
) -> Result<T, SqlStop> {
    match answer {
        Ok(answer) => {
            statement.finish(None);
            // An earlier run's: what this one reads is void, and it must not act on it.
            match tx.has_earlier_failed().await {
                true => Err(SqlStop::Host(ConnectionLost)),
                false => Ok(answer),
            }
        }
        Err(ExchangeError::Guest(error)) => {
            statement.finish(None);
            Err(SqlStop::Guest(error))
        }
        Err(ExchangeError::Sql(error)) => {
            // A prepared statement would fail like this for ever.
            if statement.clear_if_stale(&error).await.is_err() {
                return Err(SqlStop::Host(ConnectionLost)); // it stays unfinished
            }
            statement.finish(Some(&error));
            Err(stop_of(tx, &error).await)
        }
        // The statement stays unfinished, which condemns the connection and the driver's types.
        Err(ExchangeError::TooDeep) => Err(SqlStop::Host(ConnectionLost)),
    }
}

/// Runs a fixed text of the host, such as a savepoint's. The text never contains text of a guest.
pub(crate) async fn control(tx: &Tx, text: String) -> Result<(), SqlStop> {
    let mut statement = tx.statement().await;
    match sqlx::raw_sql(AssertSqlSafe(text)).execute(statement.connection()).await {
        Ok(_) => finish(tx, statement, Ok(())).await,
        Err(error) => finish(tx, statement, Err(ExchangeError::Sql(error))).await,
    }
}

/// Distinguishes PostgreSQL's error answer, which the guest gets, from a broken connection, and from
/// the error of an earlier run, whose transaction is of no use to this one.
async fn stop_of(tx: &Tx, error: &sqlx::Error) -> SqlStop {
    if tx.is_broken().await || tx.has_earlier_failed().await {
        return SqlStop::Host(ConnectionLost);
    }
    match error.as_database_error().and_then(|error| error.try_downcast_ref::<PgDatabaseError>()) {
        Some(error) => SqlStop::Guest(Error::Database(database_error(error))),
        None => {
            SqlStop::Guest(Error::Unsupported(format!("the statement cannot be sent: {error}")))
        }
    }
}

/// Copies what a guest may see of an error. Context, hint and source position stay in the host.
fn database_error(error: &PgDatabaseError) -> DatabaseError {
    DatabaseError {
        sqlstate: error.code().to_owned(),
        message: bounded(error.message(), ERROR_BYTES),
        detail: error.detail().map(|detail| bounded(detail, ERROR_BYTES)),
        constraint: error.constraint().map(str::to_owned),
    }
}

/// Checks everything that the host can refuse before it sends the statement.
pub(super) fn check(limits: &Limits, text: &str, params: &[Value]) -> Result<(), Error> {
    statement::check(text).map_err(Error::Refused)?;
    if text.len() > limits.statement_bytes_max {
        return Err(limit("statement_bytes_max", limits.statement_bytes_max));
    }
    let params_max = limits.params_max.min(PARAMS_MAX);
    if params.len() > params_max {
        return Err(limit("params_max", params_max));
    }
    if bytes(params) > limits.params_bytes_max {
        return Err(limit("params_bytes_max", limits.params_bytes_max));
    }
    Ok(())
}

/// Returns the approximate bytes of parameters.
pub(super) fn bytes(params: &[Value]) -> usize {
    params.iter().map(size).sum()
}

/// Returns the approximate bytes of a parameter.
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

/// The reason for which an exchange with PostgreSQL failed.
pub(super) enum ExchangeError {
    /// An error that the guest gets.
    Guest(Error),
    /// An error of the driver, which may be PostgreSQL's answer or a broken connection.
    Sql(sqlx::Error),
    /// A type whose nesting endangers the driver's stack.
    TooDeep,
}

impl From<sqlx::Error> for ExchangeError {
    fn from(error: sqlx::Error) -> Self {
        Self::Sql(error)
    }
}

pub(super) fn unsupported(text: impl Into<String>) -> ExchangeError {
    ExchangeError::Guest(Error::Unsupported(text.into()))
}

async fn exchange(
    connection: &mut PgConnection,
    limits: &Limits,
    mode: StatementMode,
    text: &str,
    params: &[Value],
) -> Result<SqlAnswer, ExchangeError> {
    let prepared = describe(connection, text).await?;
    if types(&prepared).any(is_too_deep) {
        return Err(ExchangeError::TooDeep);
    }
    let arguments = encode::arguments(parameters(&prepared), params).map_err(unsupported)?;
    let layout = match mode {
        StatementMode::Query => Some(Layout::of(prepared.columns()).map_err(unsupported)?),
        StatementMode::Execute => None,
    };
    let (rows, rows_affected) =
        read(connection, &prepared, arguments, layout.as_ref(), limits).await?;
    Ok(SqlAnswer {
        columns: layout.map(|layout| layout.columns).unwrap_or_default(),
        rows,
        rows_affected,
    })
}

const NOT_DESCRIBED: &str = "a type of this statement cannot be described; cast it to text";

/// Asks PostgreSQL for the types of a statement, once per text and connection. The text goes
/// through the extended protocol, which takes one statement only.
pub(super) async fn describe(
    connection: &mut PgConnection,
    text: &str,
) -> Result<PgStatement, ExchangeError> {
    connection.set_row_bytes_max(TYPE_BYTES_MAX);
    let prepared = connection.prepare(AssertSqlSafe(text).into_sql_str()).await;
    connection.set_row_bytes_max(usize::MAX);
    let passed_over = connection.take_rows_passed_over();
    match prepared {
        // A type is too large, or was dropped before the driver could look it up.
        Ok(prepared) if passed_over > 0 || types(&prepared).any(is_unknown) => {
            connection.clear_cached_statements().await?;
            Err(unsupported(NOT_DESCRIBED))
        }
        // The driver gives up on types that are nested too deeply. The connection is sound if it
        // still answers.
        Err(sqlx::Error::Protocol(_)) => {
            connection.ping().await?;
            Err(unsupported(NOT_DESCRIBED))
        }
        result => Ok(result?),
    }
}

/// Returns the types of the parameters and of the columns.
pub(super) fn types(prepared: &PgStatement) -> impl Iterator<Item = &PgTypeInfo> {
    parameters(prepared).iter().chain(prepared.columns().iter().map(sqlx::Column::type_info))
}

pub(super) fn parameters(prepared: &PgStatement) -> &[PgTypeInfo] {
    match prepared.parameters() {
        Some(Either::Left(types)) => types,
        _ => &[],
    }
}

/// Reads the answer completely, within the caps on rows. Rows beyond a cap are dropped, and the
/// connection stays sound: the message fails, its neighbours in the transaction need not. The
/// deadline bounds the time. A row longer than the cap on all rows is not even read into memory.
async fn read(
    connection: &mut PgConnection,
    prepared: &PgStatement,
    arguments: PgArguments,
    layout: Option<&Layout>,
    limits: &Limits,
) -> Result<(Vec<Vec<Value>>, u64), ExchangeError> {
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
            Err(ExchangeError::Guest(limit("result_bytes_max", limits.result_bytes_max)))
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
) -> Result<(Vec<Vec<Value>>, u64), ExchangeError> {
    let mut rows = ResultRows { rows: Vec::new(), bytes: 0, limits };
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
        Some(error) => Err(ExchangeError::Guest(error)),
        None => Ok((rows.rows, rows_affected)),
    }
}

/// The rows of a result, up to the caps.
struct ResultRows<'a> {
    rows: Vec<Vec<Value>>,
    bytes: usize,
    limits: &'a Limits,
}

impl ResultRows<'_> {
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
