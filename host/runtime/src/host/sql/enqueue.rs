//! The function `enqueue`: statements that the guest does not wait for.
//!
//! The host keeps them in order. Any later statement of the run brings their answers, and so does
//! the end of the run.

use std::{collections::VecDeque, time::Instant};

use oncebox_model::{
    hooks::{self, Defect},
    outcome::Failure,
    policy::Limits,
    trace::Span,
    tx::Tx,
};
use sqlx::{PgConnection, Statement as _};

use super::{
    encode,
    run::{
        AFTER, ExchangeError, SqlAnswer, StatementMode, bytes, check, describe, finish, parameters,
        run_statement, types, unsupported,
    },
    session::SqlSession,
    span,
    stop::SqlStop,
    types::is_too_deep,
};
use crate::{
    bindings::{
        enqueuer::oncebox::handler0_2_0::sql,
        oncebox::handler::sql::{DatabaseError, Error, Value},
    },
    failure::failure_of,
    record::Recording,
    state::StoreState,
};

/// Enqueued statements of a run that are not answered, in order.
pub(crate) type Enqueued = VecDeque<EnqueuedStatement>;

/// An enqueued statement.
pub(crate) struct EnqueuedStatement {
    /// Moment of the call in the session.
    moment: u64,
    /// Rows that it has to touch, and what the message ends with otherwise. Its texts are bounded.
    expected: Option<(u64, Failure)>,
    span: Option<Span>,
    /// Number of the statement among those of the record, and when it was enqueued.
    recorded: (usize, Instant),
}

/// Fail point behind an enqueued statement. It is sent at once where this one or that behind any
/// statement is armed.
const ENQUEUED: &str = "runtime:sql:enqueued";

impl sql::Host for StoreState {
    async fn enqueue(
        &mut self,
        statement: String,
        params: Vec<Value>,
        expected: Option<sql::Expected>,
    ) -> wasmtime::Result<Result<(), Error>> {
        let result = self.enqueue_statement(&statement, &params, expected).await;
        self.session.answer(result)
    }
}

impl StoreState {
    async fn enqueue_statement(
        &mut self,
        text: &str,
        params: &[Value],
        expected: Option<sql::Expected>,
    ) -> Result<(), SqlStop> {
        let recorded = self.recording.as_mut().map_or(0, |it| it.sent(false, text, params));
        let admitted = self.session.admit(text, &self.limits).map_err(SqlStop::Guest);
        let span = span::begin(text, self.spans.youngest());
        let expected = expected.map(|it| (it.rows, failure_of(&it.otherwise)));
        let rows = expected.as_ref().map(|(rows, _)| *rows);
        let statement = EnqueuedStatement {
            moment: self.session.moment(),
            expected,
            span,
            recorded: (recorded, Instant::now()),
        };
        let submitted = match admitted.and_then(|()| self.tx()) {
            Ok(tx) => submit_statement(&tx, &self.limits, text, params, rows).await,
            Err(stop) => Err(stop),
        };
        hooks::point(ENQUEUED);
        hooks::point(AFTER);
        if let Ok(Submitted::Enqueued) = submitted {
            self.enqueued.push_back(statement);
            self.note_answers().await; // those of earlier ones
            return Ok(());
        }
        self.note_answers().await; // those of earlier ones, in their order
        let answer = submitted.map(|submitted| match submitted {
            Submitted::Answered(answer) => answer,
            Submitted::Enqueued => SqlAnswer::default(),
        });
        statement.end(&answer, &mut self.session, self.recording.as_mut());
        answer.map(drop)
    }

    /// Waits for the answers to what the run has enqueued, and the runs before it. The transaction keeps
    /// PostgreSQL's error.
    pub(crate) async fn wait_for_enqueued(&mut self) {
        if let Ok(tx) = self.tx() {
            let _kept_by_the_transaction = tx.wait_for_enqueued().await;
        }
        self.note_answers().await;
    }

    /// Notes the answers that have come with those of other statements.
    pub(crate) async fn note_answers(&mut self) {
        if self.enqueued.is_empty() {
            return;
        }
        let Ok(tx) = self.tx() else { return };
        for answer in tx.take_answers().await {
            let Some(statement) = self.enqueued.pop_front() else { return };
            let answer = match answer {
                Some(rows_affected) => Ok(SqlAnswer { rows_affected, ..SqlAnswer::default() }),
                None => Err(SqlStop::Guest(Error::Database(first_error(&tx).await))),
            };
            statement.end(&answer, &mut self.session, self.recording.as_mut());
        }
    }
}

impl EnqueuedStatement {
    /// Ends a statement with its answer. The message fails where it touched another number of rows
    /// than expected.
    fn end(
        self,
        answer: &Result<SqlAnswer, SqlStop>,
        session: &mut SqlSession,
        recording: Option<&mut Recording>,
    ) {
        span::end(self.span, answer);
        if let Some(recording) = recording {
            let (index, since) = self.recorded;
            recording.answered(index, since, answer);
        }
        if let (Ok(answer), Some((rows, failure))) = (answer, self.expected)
            && answer.rows_affected != rows
            && !hooks::sabotage(Defect::RowsUnexpected)
        {
            session.fail_at(self.moment, failure.kind, &failure.text);
        }
    }
}

/// What became of a statement that may be enqueued.
enum Submitted {
    Enqueued,
    /// It was waited for, since there was no room for it, or it returns rows.
    Answered(SqlAnswer),
}

/// Enqueues a statement of a guest. Waits for its answer where it would take too much room, or
/// returns rows: nobody reads them before the next statement is written. `rows` is the number of
/// rows that it has to touch.
async fn submit_statement(
    tx: &Tx,
    limits: &Limits,
    text: &str,
    params: &[Value],
    rows: Option<u64>,
) -> Result<Submitted, SqlStop> {
    check(limits, text, params).map_err(SqlStop::Guest)?;
    let bytes = bytes(params);
    if let Some(mut statement) = tx.enqueueable(bytes).await {
        match enqueue(statement.connection(), text, params).await {
            Ok(true) => {
                statement.enqueued_by_run(rows, bytes);
                return Ok(Submitted::Enqueued);
            }
            Ok(false) => statement.finish(None),
            Err(error) => return finish(tx, statement, Err(error)).await.map(Submitted::Answered),
        }
    }
    let answer = run_statement(tx, limits, StatementMode::Execute, text, params).await;
    answer.map(Submitted::Answered)
}

/// Enqueues a statement, and returns whether it could be: not where it returns rows.
async fn enqueue(
    connection: &mut PgConnection,
    text: &str,
    params: &[Value],
) -> Result<bool, ExchangeError> {
    let prepared = describe(connection, text).await?;
    if types(&prepared).any(is_too_deep) {
        return Err(ExchangeError::TooDeep);
    }
    if !prepared.columns().is_empty() {
        return Ok(false);
    }
    let arguments = encode::arguments(parameters(&prepared), params).map_err(unsupported)?;
    connection.enqueue(prepared.query_with(arguments)).await?;
    if [ENQUEUED, AFTER].into_iter().any(hooks::is_armed) {
        connection.send_enqueued().await?;
    }
    Ok(true)
}

/// Returns the error that made PostgreSQL refuse an enqueued statement: its own, or that of one
/// before it.
async fn first_error(tx: &Tx) -> DatabaseError {
    let error = tx.error().await;
    let (sqlstate, message, constraint) = match error {
        Some(error) => (error.sqlstate, error.message, error.constraint),
        None => Default::default(),
    };
    DatabaseError { sqlstate, message, detail: None, constraint }
}
