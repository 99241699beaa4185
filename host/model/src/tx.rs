//! The open transaction, as a handler may use it.

use std::{
    collections::VecDeque,
    sync::{Arc, Mutex as Lock, PoisonError},
    time::{Duration, Instant},
};

use sqlx::{
    Connection, PgConnection,
    postgres::{PgDatabaseError, PgSeverity},
};
use tokio::sync::{Mutex, MutexGuard};

use self::enqueued::Enqueued;
use crate::{meter::Meter, sqlstate};

pub use enqueued::ENQUEUED_BYTES_MAX;
use enqueued::is_stale;

mod enqueued;

/// Interval at which the host asks the server whether it still knows a session whose handler sends
/// nothing.
const PULSE: Duration = Duration::from_secs(1);

/// The time since which a database has left a question of this host unanswered.
#[derive(Debug, Default)]
pub struct Silence(Lock<Option<Instant>>);

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

/// A handle on the host's open transaction. Clones share it; one statement runs at a time.
#[derive(Clone)]
pub struct Tx {
    state: Arc<Mutex<TxState>>,
    meter: Arc<Meter>,
    silence: Arc<Silence>,
}

/// The connection and what is known about the transaction on it.
struct TxState {
    connection: PgConnection,
    /// True while a statement was sent and its answer is not read to the end. It stays true where
    /// the future that ran the statement was dropped. Nothing may be sent on this connection again
    /// then.
    in_flight: bool,
    /// True where the connection itself failed.
    broken: bool,
    /// True where a guest's code has made the session forget its prepared statements. The
    /// connection then serves for the rest of the transaction at most.
    forgot: bool,
    /// True where a prepared statement of the session fails for ever. The connection then serves
    /// for the rest of the transaction at most.
    stale: bool,
    /// The statement that put the transaction into its aborted state.
    error: Option<StatementError>,
    /// Statements that were sent.
    statements: u64,
    /// First contention error, such as a deadlock, since the run began. It stays where the handler
    /// has rolled back to a savepoint since.
    contention: Option<StatementError>,
    /// Number of the run under way among those of the transaction.
    run: u64,
    /// Statements that are enqueued and whose answers were not noted, in order.
    enqueued: VecDeque<Enqueued>,
    /// Approximate bytes of these.
    enqueued_bytes: usize,
    /// Answers to the enqueued statements of the run under way, until it takes them.
    answers: Vec<Option<u64>>,
    /// True where an enqueued statement failed whose run was over.
    earlier_failed: bool,
}

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

impl Tx {
    /// Creates a handle on the transaction that was begun on a connection.
    pub fn on(connection: PgConnection) -> Self {
        Self::metered(connection, Arc::default(), Arc::default())
    }

    /// Creates a handle whose statements are added up by a meter and noted as questions to the
    /// database.
    pub fn metered(connection: PgConnection, meter: Arc<Meter>, silence: Arc<Silence>) -> Self {
        let enqueued = std::iter::repeat_n(Enqueued::Host, connection.enqueued()).collect();
        let state = TxState {
            connection,
            in_flight: false,
            broken: false,
            forgot: false,
            stale: false,
            error: None,
            contention: None,
            statements: 0,
            run: 0,
            enqueued,
            enqueued_bytes: 0,
            answers: Vec::new(),
            earlier_failed: false,
        };
        Self { state: Arc::new(Mutex::new(state)), meter, silence }
    }

    /// Returns the meter of its statements and of its handlers' computing time.
    pub fn meter(&self) -> &Arc<Meter> {
        &self.meter
    }

    /// Starts a statement. Call [`OpenStatement::finish`] when its answer has been read: a
    /// statement that is dropped before that condemns the connection.
    pub async fn statement(&self) -> OpenStatement<'_> {
        let mut statement = self.asking().await;
        statement.state.statements += 1;
        statement
    }

    /// Opens the connection to ask the database something that is no statement.
    async fn asking(&self) -> OpenStatement<'_> {
        let mut statement = self.open().await;
        statement.has_asked = true;
        self.silence.asked();
        statement
    }

    async fn open(&self) -> OpenStatement<'_> {
        self.opened(self.state.lock().await)
    }

    fn opened<'a>(&'a self, mut state: MutexGuard<'a, TxState>) -> OpenStatement<'a> {
        state.in_flight = true;
        OpenStatement {
            state,
            meter: &self.meter,
            silence: &self.silence,
            sent: Instant::now(),
            has_asked: false,
            is_cleared: false,
        }
    }

    /// Returns the number of statements sent so far, the host's included.
    pub async fn statements(&self) -> u64 {
        self.state.lock().await.statements
    }

    /// Returns the first error since the transaction was last sound; none while it is not aborted.
    pub async fn error(&self) -> Option<StatementError> {
        self.state.lock().await.error.clone()
    }

    /// Waits until the connection is found to be lost, which would otherwise stay unnoticed while a
    /// handler sends nothing. Asks the server every `PULSE`, where no statement is under way.
    /// Dropping this future in the middle of a question condemns the connection: wait for
    /// [`Tx::idle`] before.
    pub async fn lost(&self) {
        loop {
            tokio::time::sleep(PULSE).await;
            let Ok(mut state) = self.state.try_lock() else { continue };
            if !state.broken && !state.in_flight {
                state.in_flight = true;
                // A ping asks for an answer and nothing else; it also works in a transaction that
                // failed. The answers to what is enqueued, and their error, wait in the driver for
                // the next statement.
                let answer = state.connection.ping().await;
                state.in_flight = false;
                state.broken |= answer.is_err();
            }
            if state.broken {
                return;
            }
        }
    }

    /// Waits until nothing is under way on the connection.
    pub async fn idle(&self) {
        drop(self.state.lock().await);
    }

    /// Prepares for the run of a handler: forgets earlier contention.
    pub async fn run_begins(&self) {
        let mut state = self.state.lock().await;
        state.contention = None;
        state.run += 1;
        state.answers.clear();
    }

    /// Returns the contention error that may have caused a handler's failure, although the handler
    /// rolled back to a savepoint.
    pub async fn contention(&self) -> Option<StatementError> {
        self.state.lock().await.contention.clone()
    }

    /// Forgets the error after a rollback to a savepoint.
    pub async fn recovered(&self) {
        self.state.lock().await.error = None;
    }

    /// Returns whether the connection is unusable.
    pub async fn is_broken(&self) -> bool {
        let state = self.state.lock().await;
        state.broken || state.in_flight
    }

    /// Returns whether a guest's code has made the session forget its prepared statements.
    pub async fn has_forgotten(&self) -> bool {
        self.state.lock().await.forgot
    }

    /// Returns whether a statement was abandoned half way, as opposed to a connection that failed.
    pub async fn is_abandoned(&self) -> bool {
        let state = self.state.lock().await;
        state.in_flight && !state.broken
    }

    /// Returns the connection when no clone is left and it is sound.
    pub fn into_connection(self) -> Option<PgConnection> {
        let state = Arc::into_inner(self.state)?.into_inner();
        let is_sound = !(state.broken || state.in_flight || state.forgot || state.stale);
        is_sound.then_some(state.connection)
    }
}

/// A statement under way.
pub struct OpenStatement<'a> {
    state: MutexGuard<'a, TxState>,
    meter: &'a Meter,
    silence: &'a Silence,
    sent: Instant,
    /// Whether it was noted as a question to the database.
    has_asked: bool,
    /// Whether the session's prepared statements were closed after an error.
    is_cleared: bool,
}

impl Drop for OpenStatement<'_> {
    /// Adds the statement's time to the meter. An abandoned statement counts as well: PostgreSQL
    /// worked on it.
    fn drop(&mut self) {
        self.meter.add_database(self.sent.elapsed());
    }
}

impl OpenStatement<'_> {
    /// Returns the connection to run the statement on.
    pub fn connection(&mut self) -> &mut PgConnection {
        &mut self.state.connection
    }

    /// Ends the statement, whose answer has been read to the end. An error answered by PostgreSQL
    /// aborts the transaction. An error of the client's own leaves the connection sound. Any other
    /// error means that the connection is lost. So does one of what the host enqueued before, such
    /// as BEGIN: that is no error of this statement, and nothing is known about the session.
    pub fn finish(mut self, error: Option<&sqlx::Error>) {
        self.state.in_flight = false;
        self.state.note_answers();
        match error.map(|error| (error, answered(error))) {
            None => {}
            Some((error, Some(answered))) => {
                self.state.forgot |= answered.sqlstate == sqlstate::UNDEFINED_PREPARED_STATEMENT;
                self.state.stale |= is_stale(error) && !self.is_cleared;
                if answered.is_contention() {
                    self.state.contention.get_or_insert_with(|| answered.clone());
                }
                self.state.error.get_or_insert(answered);
            }
            Some((error, None)) => {
                self.state.broken |= !is_local(error);
                return;
            }
        }
        if self.has_asked {
            self.silence.answered();
        }
    }

    /// Closes the session's prepared statements where an error says that one of them fails for ever.
    ///
    /// # Errors
    ///
    /// Fails where the connection does.
    pub async fn clear_if_stale(&mut self, error: &sqlx::Error) -> Result<(), sqlx::Error> {
        if is_stale(error) {
            self.state.connection.clear_cached_statements().await?;
            self.is_cleared = true;
        }
        Ok(())
    }
}

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
