//! The open transaction, as a handler may use it.

use std::{
    sync::{Arc, Mutex as Lock, PoisonError},
    time::{Duration, Instant},
};

use sqlx::{Connection, PgConnection, postgres::PgDatabaseError, postgres::PgSeverity};
use tokio::sync::{Mutex, MutexGuard};

use crate::meter::Meter;

/// How often the server is asked whether it still knows a session whose handler sends nothing.
const PULSE: Duration = Duration::from_secs(1);

/// Since when a database has left a question of this host without an answer.
#[derive(Debug, Default)]
pub struct Silence(Lock<Option<Instant>>);

impl Silence {
    /// Something is asked.
    pub fn asked(&self) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert_with(Instant::now);
    }

    /// Something was answered: the database is there, whatever else was asked.
    pub fn answered(&self) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }

    /// For how long, if something is asked.
    pub fn lasts(&self) -> Option<Duration> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).map(|since| since.elapsed())
    }
}

/// A handle on the host's open transaction. Clones share it; one statement runs at a time.
#[derive(Clone)]
pub struct Tx {
    state: Arc<Mutex<State>>,
    meter: Arc<Meter>,
    silence: Arc<Silence>,
}

/// The connection and what is known about the transaction on it.
struct State {
    connection: PgConnection,
    /// A statement was sent and its answer not read to the end: the future that ran it
    /// was dropped. Nothing may be sent on this connection again.
    in_flight: bool,
    /// The connection itself failed.
    broken: bool,
    /// Code of a guest has made it forget what was prepared on it: good for the rest of the
    /// transaction at most.
    forgot: bool,
    /// The statement that put the transaction into its aborted state.
    error: Option<StatementError>,
    /// Statements that were sent.
    statements: u64,
    /// The first deadlock or its like since the run began, also when the handler has rolled back to
    /// a savepoint since.
    contention: Option<StatementError>,
}

/// An error that PostgreSQL answered to a statement of a handler.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StatementError {
    /// PostgreSQL's five-character code.
    pub sqlstate: String,
    /// Its message.
    pub message: String,
    /// The constraint it names, if any.
    pub constraint: Option<String>,
}

impl StatementError {
    /// Deadlock, serialization failure or lock timeout: nobody's fault, worth another try.
    pub fn is_contention(&self) -> bool {
        is_contention(&self.sqlstate)
    }
}

/// What PostgreSQL answers to a statement that was prepared and is so no more.
pub const UNKNOWN_STATEMENT: &str = "26000";

/// Deadlock, serialization failure, lock timeout, and a lock table that is full.
pub fn is_contention(sqlstate: &str) -> bool {
    matches!(sqlstate, "40001" | "40P01" | "55P03" | "53200")
}

impl Tx {
    /// A handle on the transaction that was begun on this connection.
    pub fn on(connection: PgConnection) -> Self {
        Self::metered(connection, Arc::default(), Arc::default())
    }

    /// The same, whose statements are added up by a meter, and noted as questions to the database.
    pub fn metered(connection: PgConnection, meter: Arc<Meter>, silence: Arc<Silence>) -> Self {
        let state = State {
            connection,
            in_flight: false,
            broken: false,
            forgot: false,
            error: None,
            contention: None,
            statements: 0,
        };
        Self { state: Arc::new(Mutex::new(state)), meter, silence }
    }

    /// What adds up its statements, and what its handlers compute.
    pub fn meter(&self) -> &Arc<Meter> {
        &self.meter
    }

    /// Start a statement. Call [`Statement::finish`] when its answer has been read; a
    /// statement that is dropped before that condemns the connection.
    pub async fn statement(&self) -> Statement<'_> {
        let mut state = self.state.lock().await;
        state.in_flight = true;
        state.statements += 1;
        self.silence.asked();
        Statement { state, meter: &self.meter, silence: &self.silence, sent: Instant::now() }
    }

    /// Statements sent so far, the host's included.
    pub async fn statements(&self) -> u64 {
        self.state.lock().await.statements
    }

    /// The first error since the transaction was last sound; the transaction is aborted.
    pub async fn error(&self) -> Option<StatementError> {
        self.state.lock().await.error.clone()
    }

    /// Wait until the connection is found to be lost, which nobody hears of while a handler sends
    /// nothing. Asks the server every `PULSE`, where no statement is under way. Dropping this in
    /// the middle of a question condemns the connection: wait for [`Tx::idle`] before.
    pub async fn lost(&self) {
        loop {
            tokio::time::sleep(PULSE).await;
            let Ok(mut state) = self.state.try_lock() else { continue };
            if !state.broken && !state.in_flight {
                state.in_flight = true;
                // A message that asks for an answer and nothing else, in a transaction that failed
                // as well.
                let answer = state.connection.ping().await;
                state.in_flight = false;
                state.broken |= answer.is_err();
            }
            if state.broken {
                return;
            }
        }
    }

    /// Wait for the end of what is under way on the connection.
    pub async fn idle(&self) {
        drop(self.state.lock().await);
    }

    /// A handler is about to run.
    pub async fn run_begins(&self) {
        self.state.lock().await.contention = None;
    }

    /// What a handler that failed may have failed of, although it rolled back to a savepoint.
    pub async fn contention(&self) -> Option<StatementError> {
        self.state.lock().await.contention.clone()
    }

    /// Forget the error after a rollback to a savepoint.
    pub async fn recovered(&self) {
        self.state.lock().await.error = None;
    }

    /// Whether the connection can no longer be used.
    pub async fn is_broken(&self) -> bool {
        let state = self.state.lock().await;
        state.broken || state.in_flight
    }

    /// Whether code of a guest has made the session forget what was prepared on it.
    pub async fn has_forgotten(&self) -> bool {
        self.state.lock().await.forgot
    }

    /// Whether a statement was abandoned half way, as opposed to a connection that failed.
    pub async fn is_abandoned(&self) -> bool {
        let state = self.state.lock().await;
        state.in_flight && !state.broken
    }

    /// The connection back, when no clone is left and it is sound.
    pub fn into_connection(self) -> Option<PgConnection> {
        let state = Arc::into_inner(self.state)?.into_inner();
        (!state.broken && !state.in_flight && !state.forgot).then_some(state.connection)
    }
}

/// A statement under way.
pub struct Statement<'a> {
    state: MutexGuard<'a, State>,
    meter: &'a Meter,
    silence: &'a Silence,
    sent: Instant,
}

impl Drop for Statement<'_> {
    /// Also where it was abandoned: PostgreSQL worked on it.
    fn drop(&mut self) {
        self.meter.add_database(self.sent.elapsed());
    }
}

impl Statement<'_> {
    /// The connection to run it on.
    pub fn connection(&mut self) -> &mut PgConnection {
        &mut self.state.connection
    }

    /// The answer has been read to the end. An error answered by PostgreSQL aborts the
    /// transaction; any other error means that the connection is lost.
    pub fn finish(mut self, error: Option<&sqlx::Error>) {
        self.state.in_flight = false;
        match error {
            None => self.silence.answered(),
            Some(error) => match answered(error) {
                Some(answered) => {
                    self.silence.answered();
                    self.state.forgot |= answered.sqlstate == UNKNOWN_STATEMENT;
                    if answered.is_contention() {
                        self.state.contention.get_or_insert_with(|| answered.clone());
                    }
                    self.state.error.get_or_insert(answered);
                }
                None => self.state.broken |= !is_local(error),
            },
        }
    }
}

/// The error PostgreSQL answered while the connection lives, if it is one. FATAL and
/// worse end the connection, and no SQL of a tenant can raise them.
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

/// How long a statement of the host may take on the client's side. The server's own timeouts are
/// far below; this one notices a server that nothing is heard of any more.
const HOST_STATEMENT_MAX: Duration = Duration::from_secs(60);

/// The answer to a statement of the host, or the error that none came.
pub async fn bounded<T>(
    answer: impl Future<Output = Result<T, sqlx::Error>>,
) -> Result<T, sqlx::Error> {
    let silence = |_| sqlx::Error::Io(std::io::ErrorKind::TimedOut.into());
    tokio::time::timeout(HOST_STATEMENT_MAX, answer).await.map_err(silence)?
}

/// An error made on this side of the connection, which is as sound as before.
fn is_local(error: &sqlx::Error) -> bool {
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
