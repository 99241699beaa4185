//! A transaction of a tenant: how it begins, how it commits, and how it ends otherwise.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use oncebox_model::{
    error::InboxError,
    hooks::{self, Defect},
    inbox::ServerRun,
    meter::Meter,
    tx::{StatementError, Tx, answered, bounded},
};
use sqlx::{
    Executor, Postgres,
    postgres::{PgArguments, PgRow},
    query::Query,
};
use tokio::sync::OwnedSemaphorePermit;

use super::pool::{Access, Session, Sessions};
use crate::admission::Admission;

/// An open transaction of a tenant.
pub struct Transaction<'a> {
    sessions: &'a Sessions,
    tx: Option<Tx>,
    backend: i32,
    server: ServerRun,
    /// Whether its claim notes the partition's position.
    notes_position: bool,
    access: Arc<Access>,
    /// End of the transaction before this one on its connection; none where there was none.
    used_before: Option<Instant>,
    permit: Option<OwnedSemaphorePermit>,
    /// Whether a statement was answered, or BEGIN was.
    has_begun: AtomicBool,
}

/// A statement of the host with its bound values.
pub(crate) type HostQuery<'q> = Query<'q, Postgres, PgArguments>;

/// When BEGIN is sent.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Begin {
    /// At once, in a round trip of its own. A connection that died while it was idle is noticed and
    /// replaced.
    Now,
    /// With the first statement.
    WithFirst,
}

/// Longest wait for a backend to end.
const TERMINATE_MAX: Duration = Duration::from_secs(6);

impl Sessions {
    /// Begins a transaction without an admission, on an idle connection or a new one.
    ///
    /// # Errors
    ///
    /// Fails where the database is unavailable, or drops the session's startup options.
    pub async fn begin(&self) -> Result<Transaction<'_>, InboxError> {
        self.begin_metered(&Arc::default(), Begin::Now).await
    }

    /// Begins a transaction under an admission, whose meter counts its time.
    ///
    /// # Errors
    ///
    /// Also fails where the admission is a partition's, and the server has started since the
    /// partition's last transaction.
    pub(crate) async fn begin_admitted(
        &self,
        admission: &Admission,
    ) -> Result<Transaction<'_>, InboxError> {
        self.begin_as(admission, Begin::Now).await
    }

    /// Begins a transaction as [`Self::begin_admitted`] does, whose BEGIN is sent with its first
    /// statement: both take one round trip. An error of BEGIN is that of this statement.
    pub(crate) async fn begin_with_first(
        &self,
        admission: &Admission,
    ) -> Result<Transaction<'_>, InboxError> {
        self.begin_as(admission, Begin::WithFirst).await
    }

    async fn begin_as(
        &self,
        admission: &Admission,
        begin: Begin,
    ) -> Result<Transaction<'_>, InboxError> {
        let mut transaction = self.begin_metered(admission.meter(), begin).await?;
        let Some(turn) = admission.turn() else { return Ok(transaction) };
        if turn.server != transaction.server && !hooks::sabotage(Defect::ServerUnchecked) {
            transaction.rollback().await;
            return Err(InboxError::ServerStarted);
        }
        transaction.notes_position = turn.notes_position;
        Ok(transaction)
    }

    async fn begin_metered(
        &self,
        meter: &Arc<Meter>,
        begin: Begin,
    ) -> Result<Transaction<'_>, InboxError> {
        while let Some(session) = self.take_idle() {
            // An idle connection may have died with its server; that says nothing about a new one.
            if let Ok(transaction) = self.begin_on(session, meter, begin).await {
                return Ok(transaction);
            }
            self.away.lost(None);
            // The other idle connections are as old.
            self.idle.lock().expect("no panic while held").clear();
        }
        self.begin_on(self.connect().await?, meter, begin).await
    }

    /// Begins a transaction where a connection is to spare, and returns none where it is not. Never
    /// waits for a connection.
    pub(crate) async fn begin_spare(
        &self,
        admission: &Admission,
    ) -> Result<Option<Transaction<'_>>, InboxError> {
        let meter = admission.meter();
        if self.budget.is_short() {
            self.idle.lock().expect("no panic while held").clear();
            return Ok(None);
        }
        if let Some(session) = self.take_idle()
            && let Ok(transaction) = self.begin_on(session, meter, Begin::Now).await
        {
            return Ok(Some(transaction));
        }
        let Some(permit) = self.budget.spare() else { return Ok(None) };
        let session = self.connect_with(permit).await?;
        self.begin_on(session, meter, Begin::Now).await.map(Some)
    }

    async fn begin_on(
        &self,
        mut session: Session,
        meter: &Arc<Meter>,
        begin: Begin,
    ) -> Result<Transaction<'_>, InboxError> {
        const BEGIN: &str = "RESET ALL; BEGIN ISOLATION LEVEL READ COMMITTED READ WRITE";
        const POINT: &str = "inbox:begin:after";
        let query = sqlx::raw_sql(BEGIN);
        // A connection that was closed, or has something to say, is tried by itself.
        let has_begun = begin == Begin::Now || !session.connection.is_quiet();
        if !has_begun {
            session.connection.enqueue(query).await?;
            if hooks::is_armed(POINT) {
                session.connection.send_enqueued().await?;
            }
            hooks::point(POINT);
        } else {
            let sent = Instant::now();
            self.silence.asked();
            bounded(session.connection.execute(query)).await?;
            self.silence.answered();
            meter.add_database(sent.elapsed());
        }
        let Session { connection, backend, server, access, used_at, _permit, .. } = session;
        let tx = Tx::metered(connection, meter.clone(), self.silence.clone());
        Ok(Transaction {
            sessions: self,
            tx: Some(tx),
            backend,
            server,
            notes_position: false,
            access,
            used_before: used_at,
            permit: Some(_permit),
            has_begun: AtomicBool::new(has_begun),
        })
    }
}

impl Transaction<'_> {
    /// Returns the handle that handlers get.
    pub fn tx(&self) -> &Tx {
        self.tx.as_ref().expect("taken only by commit and rollback, which consume")
    }

    /// Returns the process id of its backend.
    pub(crate) fn backend(&self) -> i32 {
        self.backend
    }

    /// Returns the run of the server that it is open in.
    pub(crate) fn server(&self) -> &ServerRun {
        &self.server
    }

    /// Returns whether its claim is to note the partition's position.
    pub(crate) fn notes_position(&self) -> bool {
        self.notes_position
    }

    /// Returns the secret that host functions ask for.
    pub(crate) fn secret(&self) -> &[u8] {
        &self.access.secret
    }

    /// Runs a statement of the host and returns its rows. An error leaves the transaction aborted,
    /// or its connection lost.
    pub(crate) async fn rows(&self, query: HostQuery<'_>) -> Result<Vec<PgRow>, sqlx::Error> {
        let mut statement = self.tx().statement().await;
        let rows = bounded(query.fetch_all(statement.connection())).await;
        let is_begins = statement.connection().has_failed_enqueued();
        statement.finish(rows.as_ref().err());
        if !self.has_begun.swap(true, Ordering::Relaxed) && self.tx().is_broken().await {
            // As with a BEGIN that has no answer: the other idle connections are as old.
            self.sessions.away.lost(None);
            self.sessions.idle.lock().expect("no panic while held").clear();
        }
        match rows {
            Err(error) if is_begins => {
                Err(sqlx::Error::Protocol(format!("the transaction did not begin: {error}")))
            }
            rows => rows,
        }
    }

    /// Runs a statement of the host that returns one row.
    pub(crate) async fn row(&self, query: HostQuery<'_>) -> Result<PgRow, sqlx::Error> {
        self.rows(query).await?.into_iter().next().ok_or(sqlx::Error::RowNotFound)
    }

    /// Waits for the answers to what is enqueued.
    pub(crate) async fn wait_for_enqueued(&self) -> Result<(), sqlx::Error> {
        let mut statement = self.tx().statement().await;
        let answer = bounded(statement.connection().wait_for_enqueued()).await;
        statement.finish_enqueued(answer.as_ref().err());
        answer
    }

    /// Checks deferred constraints at top level, as the tenant, then commits, in one round trip
    /// with the completion that is enqueued. A completion that PostgreSQL refuses aborts the
    /// transaction, so that it carries out no COMMIT behind it.
    ///
    /// # Errors
    ///
    /// Distinguishes a refused completion, a transaction that PostgreSQL rolled back, and one whose
    /// answer was lost.
    pub async fn commit(self) -> Result<(), CommitError> {
        const COMMIT: &str = "SET CONSTRAINTS ALL IMMEDIATE; COMMIT";
        const POINT: &str = "inbox:commit:sent";
        let mut statement = self.tx().statement().await;
        let connection = statement.connection();
        let before = connection.enqueued();
        let answer = bounded(async {
            connection.enqueue(sqlx::raw_sql(COMMIT)).await?;
            if hooks::is_armed(POINT) {
                connection.send_enqueued().await?;
            }
            hooks::point(POINT);
            connection.wait_for_enqueued().await
        });
        let answer = answer.await;
        let failed = statement.connection().take_failed_enqueued();
        let is_completion = failed.is_some_and(|failed| failed < before)
            && !hooks::sabotage(Defect::CompletionErrorIsCommits);
        statement.finish_enqueued(answer.as_ref().err());
        match answer {
            Ok(()) => {
                self.end().await;
                Ok(())
            }
            Err(error) => match answered(&error) {
                Some(_) if is_completion => {
                    self.rollback().await;
                    Err(CommitError::Completion(error))
                }
                Some(answered) => {
                    self.rollback().await;
                    Err(CommitError::RolledBack(answered))
                }
                None => {
                    self.sessions.away.lost(None);
                    Err(CommitError::Unknown(error))
                }
            },
        }
    }

    /// Undoes everything and gives the connection back. A connection in doubt is closed, and its
    /// backend is ended, so that its locks do not outlive it.
    pub async fn rollback(self) {
        if !self.tx().is_broken().await {
            let mut statement = self.tx().statement().await;
            let answer =
                bounded(statement.connection().execute(sqlx::raw_sql("ROLLBACK"))).await.map(drop);
            statement.finish(answer.as_ref().err());
        }
        self.end().await;
    }

    async fn end(mut self) {
        let tx = self.tx.take().expect("a transaction ends once");
        if tx.has_forgotten().await {
            // A guest made this session forget its prepared statements. Idle sessions may have
            // forgotten theirs, which is not noticed yet.
            self.sessions.idle.lock().expect("no panic while held").clear();
        }
        let permit = self.permit.take();
        match (tx.into_connection(), permit) {
            (Some(connection), Some(permit)) => {
                let Self { backend, server, access, .. } = &self;
                let (used_at, used_before) = (Some(Instant::now()), self.used_before);
                self.sessions.keep(Session {
                    connection,
                    backend: *backend,
                    server: server.clone(),
                    access: access.clone(),
                    used_at,
                    used_before,
                    _permit: permit,
                });
            }
            _ => {
                self.sessions.silence.asked();
                self.terminate().await;
            }
        }
    }

    async fn terminate(&self) {
        if self.sessions.away.is_known() {
            // No statement reaches the server, which notices by itself that its client is gone.
            return;
        }
        // Process ids are reused; the role makes sure that the backend is still one of this
        // tenant's.
        const TERMINATE: &str = "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity \
            WHERE pid = $1 AND usename = $2";
        let terminate =
            sqlx::query(TERMINATE).bind(self.backend).bind(self.access.options.get_username());
        // A little longer than the wait in the statement. A server that is out of reach delays no
        // transaction beyond that.
        let ended =
            tokio::time::timeout(TERMINATE_MAX, terminate.execute(&self.sessions.host_pool)).await;
        let ended =
            ended.unwrap_or_else(|_| Err(sqlx::Error::Io(std::io::ErrorKind::TimedOut.into())));
        if let Err(error) = ended {
            tracing::warn!(backend = self.backend, %error, "failed to end the backend of an \
                abandoned statement");
        }
    }
}

/// Result of a COMMIT that did not succeed.
#[derive(Debug)]
pub enum CommitError {
    /// Error that PostgreSQL answered to the completion: nothing was committed.
    Completion(sqlx::Error),
    /// Error that PostgreSQL answered: nothing was committed.
    RolledBack(StatementError),
    /// Lost answer: the transaction was committed, or it was not.
    Unknown(sqlx::Error),
}

impl Drop for Transaction<'_> {
    /// Logs a transaction that is neither committed nor rolled back. The drop of its handle closes
    /// the connection, and PostgreSQL aborts what the transaction held.
    fn drop(&mut self) {
        if self.tx.is_some() {
            tracing::debug!(
                backend = self.backend,
                "a transaction was dropped; its connection is closed"
            );
        }
    }
}
