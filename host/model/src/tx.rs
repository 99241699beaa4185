//! The open transaction, as a handler may use it.
//!
//! A statement may be enqueued: it is sent with a later one, and answered in order. Each has an
//! owner. The error of a statement of the host, such as BEGIN, condemns the session. The error of a
//! handler's statement is one of its run, whichever statement it is answered with.

use std::{
    collections::VecDeque,
    sync::Arc,
    time::{Duration, Instant},
};

use sqlx::{Connection, Execute, PgConnection, Postgres};
use tokio::sync::{Mutex, MutexGuard};

use self::answer::{is_local, is_stale};
use crate::{hooks, meter::Meter, sqlstate};

pub use answer::{Silence, StatementError, answered, bounded};
pub use enqueued::ENQUEUED_BYTES_MAX;

// What PostgreSQL answers, and whether it does.
mod answer;
// The enqueued statements of a handler.
mod enqueued;

/// Interval at which the host asks the server whether it still knows a session whose handler sends
/// nothing.
const PULSE: Duration = Duration::from_secs(1);

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

/// An enqueued statement, by its owner.
#[derive(Debug, Clone, Copy)]
enum Enqueued {
    /// The host. Its error condemns the session.
    Host,
    /// A run of a handler.
    Run {
        /// Number of the run.
        run: u64,
        /// Rows that the statement must touch.
        rows: Option<u64>,
    },
}

/// Bytes of an enqueued statement beside its parameters.
const ENQUEUED_OVERHEAD: usize = 128;

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

    /// Enqueues a statement of the host: it is sent with the next one, which answers its error. At
    /// the fail point `point` it is sent at once, so that a host that is killed there has sent it.
    ///
    /// # Errors
    ///
    /// Fails where the statement has to be prepared first, and cannot be.
    pub async fn enqueue<'q>(
        &self,
        query: impl Execute<'q, Postgres>,
        point: Option<&'static str>,
    ) -> Result<(), sqlx::Error> {
        let mut statement = self.open().await;
        let connection = statement.connection();
        let enqueued = bounded(async {
            connection.enqueue(query).await?;
            if point.is_some_and(hooks::is_armed) {
                connection.send_enqueued().await
            } else {
                Ok(())
            }
        });
        match enqueued.await {
            Ok(()) => statement.enqueued(Enqueued::Host, 0),
            Err(error) => {
                statement.finish(Some(&error));
                return Err(error);
            }
        }
        point.into_iter().for_each(hooks::point);
        Ok(())
    }

    /// Waits for the answers to what is enqueued.
    ///
    /// # Errors
    ///
    /// Returns the first error among the answers.
    pub async fn wait_for_enqueued(&self) -> Result<(), sqlx::Error> {
        if self.state.lock().await.enqueued.is_empty() {
            return Ok(());
        }
        let mut statement = self.asking().await;
        let mut answer = statement.connection().wait_for_enqueued().await;
        if let Err(error) = &answer
            && let Err(lost) = statement.clear_if_stale(error).await
        {
            answer = Err(lost);
        }
        statement.finish(answer.as_ref().err());
        answer
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

    /// Ends the wait for statements that the host has enqueued. Their error is the caller's, and
    /// leaves the connection sound.
    pub fn finish_enqueued(mut self, error: Option<&sqlx::Error>) {
        self.is_cleared = true; // an error of COMMIT is one of code that it runs
        self.state.connection.take_enqueued_answers();
        self.state.enqueued.clear();
        self.finish(error);
    }

    /// Ends a statement that is enqueued: the database was asked nothing.
    fn enqueued(mut self, by: Enqueued, bytes: usize) {
        self.state.in_flight = false;
        self.state.statements += 1;
        self.state.note_answers(); // those of earlier ones may have been read
        self.state.enqueued.push_back(by);
        self.state.enqueued_bytes += bytes + ENQUEUED_OVERHEAD;
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

impl TxState {
    /// Notes the answers to enqueued statements that have been read. What is enqueued behind a
    /// statement that failed is refused, and says nothing about its session.
    fn note_answers(&mut self) {
        self.connection.take_failed_enqueued();
        let mut is_aborted = self.error.is_some();
        for answer in self.connection.take_enqueued_answers() {
            let Some(enqueued) = self.enqueued.pop_front() else { continue };
            match enqueued {
                Enqueued::Host => self.broken |= answer.is_none() && !is_aborted,
                Enqueued::Run { run, .. } if run == self.run => self.answers.push(answer),
                Enqueued::Run { rows, .. } => {
                    self.earlier_failed |= answer.is_none() || rows.is_some() && rows != answer;
                }
            }
            is_aborted |= answer.is_none();
        }
        if self.enqueued.is_empty() {
            self.enqueued_bytes = 0;
        }
    }
}
