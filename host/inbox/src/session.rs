//! Sessions of a tenant: connections that log in as its guest role, and transactions on them.

use std::{
    collections::VecDeque,
    sync::{
        Arc, Mutex, Weak,
        atomic::{AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use sqlx::{ConnectOptions, Connection, Executor, PgConnection, PgPool, postgres::PgConnectOptions};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};

use crate::{
    admin::Admin,
    away::Away,
    credentials::Credentials,
    error::InboxError,
    scheduler::{Admission, HostBounds, Meter, Scheduler},
    tenant::Tenant,
    tx::{Tx, bounded},
};

/// Settings of every session of a tenant. They travel as startup options, so that they hold after
/// `RESET ALL` and over anything a role was made to default to.
#[derive(Debug, Clone)]
pub struct SessionSettings {
    /// Longest statement of a guest, milliseconds.
    pub statement_timeout_ms: u64,
    /// Longest wait for a lock, milliseconds.
    pub lock_timeout_ms: u64,
    /// Longest pause between two statements of an open transaction, milliseconds.
    pub idle_in_transaction_timeout_ms: u64,
}

impl Default for SessionSettings {
    fn default() -> Self {
        Self { statement_timeout_ms: 5_000, lock_timeout_ms: 2_000, idle_in_transaction_timeout_ms: 60_000 }
    }
}

/// The connections of one tenant. Each is opened when it is needed and counts against the host's
/// budget for as long as it lives.
pub struct Sessions {
    pub(crate) tenant_id: i32,
    /// Shared with the sessions that were made from these, so that all are renewed at once.
    access: Arc<watch::Sender<Arc<Access>>>,
    /// Longest wait for a lock, where it is another than that of `access`.
    giving_way: Option<Duration>,
    budget: Arc<Budget>,
    /// The host's own connections, to end a backend whose client went away.
    admin: PgPool,
    idle: Mutex<VecDeque<Session>>,
    away: Away,
}

/// What a connection is opened with and host functions are called with. Connections keep what they were
/// opened with for as long as they live, and live no longer than it is good.
struct Access {
    options: PgConnectOptions,
    secret: [u8; 32],
}

/// How long a login whose password was just changed waits to be told the new one.
const RENEWAL_WAIT: Duration = Duration::from_secs(5);

/// How long a transaction waits for a connection before it looks for an idle one again.
const LOOK_AGAIN: Duration = Duration::from_millis(250);

/// Guests' memory of a host that is not told otherwise.
const MEMORY_BYTES_MAX: u64 = 4 << 30;

/// The host's bound on connections of all tenants together, and who may begin transactions on them. Over
/// it, transactions wait; they do so for their admission, so that none waits for a connection while it
/// holds what others could use.
pub struct Budget {
    connections_max: usize,
    scheduler: Arc<Scheduler>,
    permits: Arc<Semaphore>,
    /// Transactions that wait for a permit.
    waiting: AtomicUsize,
    tenants: Mutex<Vec<Weak<Sessions>>>,
}

impl Budget {
    /// A budget of this many connections.
    pub fn new(connections_max: usize) -> Arc<Self> {
        Self::of(connections_max, HostBounds { transactions_max: connections_max, memory_bytes_max: MEMORY_BYTES_MAX })
    }

    /// The same, with bounds on what runs; never more transactions than connections.
    pub fn of(connections_max: usize, limits: HostBounds) -> Arc<Self> {
        let scheduler = Scheduler::new(HostBounds { transactions_max: limits.transactions_max.min(connections_max), ..limits });
        let permits = Arc::new(Semaphore::new(connections_max));
        Arc::new(Self { scheduler, connections_max, permits, waiting: AtomicUsize::new(0), tenants: Mutex::default() })
    }

    /// Who lets transactions begin. A tenant whose limits change is told to it.
    pub fn scheduler(&self) -> &Arc<Scheduler> {
        &self.scheduler
    }

    /// A permit for one connection. When none is left, a connection that only idles makes room.
    async fn permit(&self) -> OwnedSemaphorePermit {
        if let Ok(permit) = self.permits.clone().try_acquire_owned() {
            return permit;
        }
        self.waiting.fetch_add(1, Ordering::SeqCst);
        let permit = loop {
            self.close_idle();
            // Again after a while: a connection may have been put back just as this began to wait.
            if let Ok(permit) = tokio::time::timeout(LOOK_AGAIN, self.permits.clone().acquire_owned()).await {
                break permit.expect("the budget is never closed");
            }
        };
        self.waiting.fetch_sub(1, Ordering::SeqCst);
        permit
    }

    /// A permit that nobody will miss: there is another one left, and nobody waits.
    fn spare(&self) -> Option<OwnedSemaphorePermit> {
        if self.is_short() {
            return None;
        }
        let permit = self.permits.clone().try_acquire_owned().ok()?;
        (self.permits.available_permits() > 0).then_some(permit)
    }

    /// Whether a connection is better closed than kept.
    fn is_short(&self) -> bool {
        self.waiting.load(Ordering::SeqCst) > 0
    }

    /// Close connections that nobody has used for a while, of all tenants, so that one without work holds
    /// none. The answer is how many.
    pub async fn close_unused(&self, unused: Duration) -> usize {
        let tenants: Vec<_> = self.tenants.lock().expect("no panic while held").iter().filter_map(Weak::upgrade).collect();
        let old: Vec<_> = tenants.iter().flat_map(|sessions| sessions.take_unused(unused)).collect();
        let count = old.len();
        for session in old {
            // Its end is said, so that the server's log does not show a client that vanished.
            let _ = tokio::time::timeout(CONNECT_TIMEOUT, session.connection.close()).await;
        }
        count
    }

    /// Connections of all tenants that are open.
    pub fn in_use(&self) -> usize {
        self.connections_max - self.permits.available_permits()
    }

    /// Close one idle connection, of whichever tenant.
    fn close_idle(&self) {
        let mut tenants = self.tenants.lock().expect("no panic while held");
        tenants.retain(|tenant| tenant.upgrade().is_some());
        let idle = tenants.iter().filter_map(Weak::upgrade).find_map(|sessions| sessions.take_oldest());
        drop(idle);
    }
}

/// One connection, its backend and its share of the budget.
struct Session {
    connection: PgConnection,
    backend: i32,
    access: Arc<Access>,
    /// When it was used last.
    used_at: Instant,
    _permit: OwnedSemaphorePermit,
}

/// An open transaction of a tenant.
pub struct Transaction<'a> {
    sessions: &'a Sessions,
    tx: Option<Tx>,
    backend: i32,
    access: Arc<Access>,
    permit: Option<OwnedSemaphorePermit>,
}

/// Connections kept open per tenant when nothing runs.
const IDLE_MAX: usize = 8;

/// What shadows' connections are called in `pg_stat_activity`.
const SHADOW_NAME: &str = "oncebox shadow";

/// How long a connection may take to open.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);

impl Sessions {
    /// The sessions of a tenant's guest role, under the host's budget.
    pub fn of(admin: &Admin, tenant: &Tenant, settings: &SessionSettings, budget: Arc<Budget>) -> Result<Arc<Self>, InboxError> {
        let (place, credentials) = (admin.place(tenant)?, admin.credentials(tenant)?);
        let options = place.options.username(&tenant.login).password(&credentials.guest_password);
        budget.scheduler.set_limits(tenant);
        Ok(Self::new(tenant.tenant_id, options, credentials.secret, settings, &tenant.schema_name, place.pool, budget))
    }

    fn new(
        tenant_id: i32,
        options: PgConnectOptions,
        secret: [u8; 32],
        settings: &SessionSettings,
        schema: &str,
        admin: PgPool,
        budget: Arc<Budget>,
    ) -> Arc<Self> {
        // A guest's texts and notices are its own; the host's log carries none of them.
        let options = options.disable_statement_logging().statement_cache_capacity(200).options([
            ("statement_timeout", settings.statement_timeout_ms.to_string()),
            ("lock_timeout", settings.lock_timeout_ms.to_string()),
            ("idle_in_transaction_session_timeout", settings.idle_in_transaction_timeout_ms.to_string()),
            ("client_connection_check_interval", "500".to_owned()),
            ("default_transaction_read_only", "on".to_owned()),
            ("search_path", schema.to_owned()),
            ("application_name", "oncebox".to_owned()),
        ]);
        let access = Arc::new(watch::Sender::new(Arc::new(Access { options, secret })));
        Self::with(tenant_id, access, None, admin, budget)
    }

    fn with(
        tenant_id: i32,
        access: Arc<watch::Sender<Arc<Access>>>,
        giving_way: Option<Duration>,
        admin: PgPool,
        budget: Arc<Budget>,
    ) -> Arc<Self> {
        let away = Away::new(access.borrow().options.get_username());
        let sessions = Arc::new(Self { tenant_id, access, giving_way, budget, admin, idle: Mutex::default(), away });
        sessions.budget.tenants.lock().expect("no panic while held").push(Arc::downgrade(&sessions));
        sessions
    }

    /// Sessions of the same role that wait for no lock for longer than this.
    pub(crate) fn giving_way(&self, lock_timeout: Duration) -> Arc<Self> {
        Self::with(self.tenant_id, self.access.clone(), Some(lock_timeout), self.admin.clone(), self.budget.clone())
    }

    /// Log in with other credentials from now on. Transactions that are open go on to their end with the
    /// secret that they began with; then their connections are closed.
    pub fn renew(&self, credentials: &Credentials) {
        let renewed = self.access.send_if_modified(|access| {
            let options = access.options.clone().password(&credentials.guest_password);
            let is_new = access.secret != credentials.secret;
            if is_new {
                *access = Arc::new(Access { options, secret: credentials.secret });
            }
            is_new
        });
        if renewed {
            self.idle.lock().expect("no panic while held").clear();
        }
    }

    fn access(&self) -> Arc<Access> {
        self.access.borrow().clone()
    }

    /// Who lets transactions begin.
    pub(crate) fn scheduler(&self) -> &Arc<Scheduler> {
        &self.budget.scheduler
    }

    /// Begin a transaction that nobody else waits for, on an idle connection or a new one.
    pub async fn begin(&self) -> Result<Transaction<'_>, InboxError> {
        self.begin_metered(&Arc::default()).await
    }

    /// Begin a transaction that was let in.
    pub(crate) async fn begin_admitted(&self, admission: &Admission) -> Result<Transaction<'_>, InboxError> {
        self.begin_metered(admission.meter()).await
    }

    async fn begin_metered(&self, meter: &Arc<Meter>) -> Result<Transaction<'_>, InboxError> {
        while let Some(session) = self.take_idle() {
            // An idle connection may have died with its server; that says nothing about a new one.
            if let Ok(transaction) = self.begin_on(session, meter).await {
                return Ok(transaction);
            }
            // The others are as old.
            self.idle.lock().expect("no panic while held").clear();
        }
        self.begin_on(self.connect().await?, meter).await
    }

    /// Begin a transaction where a connection is to spare; none is ever waited for.
    pub(crate) async fn begin_spare(&self, admission: &Admission) -> Result<Option<Transaction<'_>>, InboxError> {
        let meter = admission.meter();
        if self.budget.is_short() {
            self.idle.lock().expect("no panic while held").clear();
            return Ok(None);
        }
        if let Some(session) = self.take_idle()
            && let Ok(transaction) = self.begin_on(session, meter).await
        {
            return Ok(Some(transaction));
        }
        let Some(permit) = self.budget.spare() else { return Ok(None) };
        let session = self.connect_with(permit).await?;
        self.begin_on(session, meter).await.map(Some)
    }

    /// Whether someone waits for a connection, or to begin.
    pub(crate) fn is_short(&self) -> bool {
        self.budget.is_short() || self.scheduler().is_crowded(self.tenant_id)
    }

    /// The host's own connections.
    pub(crate) fn admin(&self) -> &PgPool {
        &self.admin
    }

    async fn begin_on(&self, mut session: Session, meter: &Arc<Meter>) -> Result<Transaction<'_>, InboxError> {
        const BEGIN: &str = "RESET ALL; BEGIN ISOLATION LEVEL READ COMMITTED READ WRITE";
        let sent = Instant::now();
        bounded(session.connection.execute(sqlx::raw_sql(BEGIN))).await?;
        meter.add_database(sent.elapsed());
        let Session { connection, backend, access, _permit, .. } = session;
        let tx = Tx::metered(connection, meter.clone());
        Ok(Transaction { sessions: self, tx: Some(tx), backend, access, permit: Some(_permit) })
    }

    async fn connect(&self) -> Result<Session, InboxError> {
        let permit = self.budget.permit().await;
        self.connect_with(permit).await
    }

    async fn connect_with(&self, permit: OwnedSemaphorePermit) -> Result<Session, InboxError> {
        self.away.connect(self.open(permit)).await
    }

    async fn open(&self, permit: OwnedSemaphorePermit) -> Result<Session, InboxError> {
        let mut renewals = self.access.subscribe();
        let access = renewals.borrow_and_update().clone();
        let (access, mut connection) = match self.log_in(&access).await {
            Ok(connection) => (access, connection),
            Err(error) if is_wrong_password(&error) => {
                // Passwords change a moment before hosts hear of it.
                let renewed = tokio::time::timeout(RENEWAL_WAIT, renewals.changed()).await;
                if !matches!(renewed, Ok(Ok(()))) {
                    return Err(error.into());
                }
                let access = self.access();
                let connection = self.log_in(&access).await?;
                (access, connection)
            }
            Err(error) => return Err(error.into()),
        };
        let backend = bounded(sqlx::query_scalar("SELECT pg_backend_pid()").fetch_one(&mut connection)).await?;
        Ok(Session { connection, backend, access, used_at: Instant::now(), _permit: permit })
    }

    async fn log_in(&self, access: &Access) -> Result<PgConnection, sqlx::Error> {
        let mut options = access.options.clone();
        if let Some(lock_timeout) = self.giving_way {
            let lock_timeout = format!("{}ms", lock_timeout.as_millis());
            options = options.application_name(SHADOW_NAME).options([("lock_timeout", lock_timeout)]);
        }
        let connecting = tokio::time::timeout(CONNECT_TIMEOUT, PgConnection::connect_with(&options));
        connecting.await.map_err(|_| sqlx::Error::Io(std::io::ErrorKind::TimedOut.into()))?
    }

    /// The front has rested longest: sessions are taken from the back and put there.
    fn take_unused(&self, unused: Duration) -> Vec<Session> {
        let mut idle = self.idle.lock().expect("no panic while held");
        let old = idle.iter().take_while(|session| session.used_at.elapsed() >= unused).count();
        idle.drain(..old).collect()
    }

    fn take_oldest(&self) -> Option<Session> {
        self.idle.lock().expect("no panic while held").pop_front()
    }

    /// An idle connection; one that was opened with what is no longer good is closed instead.
    fn take_idle(&self) -> Option<Session> {
        let access = self.access();
        let mut idle = self.idle.lock().expect("no panic while held");
        idle.retain(|session| Arc::ptr_eq(&session.access, &access));
        idle.pop_back()
    }

    fn keep(&self, session: Session) {
        if !Arc::ptr_eq(&session.access, &self.access()) {
            return;
        }
        let mut idle = self.idle.lock().expect("no panic while held");
        // A waiting tenant is better served by the budget than this one by a warm connection.
        if idle.len() < IDLE_MAX && !self.budget.is_short() {
            idle.push_back(session);
        }
    }
}

impl Transaction<'_> {
    /// The handle that handlers get.
    pub fn tx(&self) -> &Tx {
        self.tx.as_ref().expect("taken only by commit and rollback, which consume")
    }

    /// Process id of its backend.
    pub(crate) fn backend(&self) -> i32 {
        self.backend
    }

    /// The secret that host functions ask for.
    pub(crate) fn secret(&self) -> &[u8] {
        &self.access.secret
    }

    /// Check deferred constraints at top level, as the tenant, then commit, in one round trip.
    /// The checked completion stands right before it.
    pub async fn commit(self) -> Result<(), CommitError> {
        const COMMIT: &str = "SET CONSTRAINTS ALL IMMEDIATE; COMMIT";
        let mut statement = self.tx().statement().await;
        let answer = bounded(statement.connection().execute(sqlx::raw_sql(COMMIT))).await.map(drop);
        statement.finish(answer.as_ref().err());
        match answer {
            Ok(()) => {
                self.end().await;
                Ok(())
            }
            Err(error) => match crate::tx::answered(&error) {
                Some(answered) => {
                    self.rollback().await;
                    Err(CommitError::RolledBack(answered))
                }
                None => Err(CommitError::Unknown(error)),
            },
        }
    }

    /// Undo everything and give the connection back. A connection in doubt is closed, and its
    /// backend ended, so that its locks do not outlive it.
    pub async fn rollback(self) {
        if !self.tx().is_broken().await {
            let mut statement = self.tx().statement().await;
            let answer = bounded(statement.connection().execute(sqlx::raw_sql("ROLLBACK"))).await.map(drop);
            statement.finish(answer.as_ref().err());
        }
        self.end().await;
    }

    async fn end(mut self) {
        let tx = self.tx.take().expect("a transaction ends once");
        if tx.has_forgotten().await {
            // Others may have forgotten too, and nobody has noticed yet.
            self.sessions.idle.lock().expect("no panic while held").clear();
        }
        let permit = self.permit.take();
        match (tx.into_connection(), permit) {
            (Some(connection), Some(permit)) => {
                let (backend, access) = (self.backend, self.access.clone());
                self.sessions.keep(Session { connection, backend, access, used_at: Instant::now(), _permit: permit });
            }
            _ => self.terminate().await,
        }
    }

    async fn terminate(&self) {
        // Process ids are used again; the role makes sure that it is still one of ours.
        const TERMINATE: &str = "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity WHERE pid = $1 AND usename = $2";
        let terminate = sqlx::query(TERMINATE).bind(self.backend).bind(self.access.options.get_username());
        let ended = bounded(terminate.execute(&self.sessions.admin)).await;
        if let Err(error) = ended {
            tracing::warn!(backend = self.backend, %error, "failed to end the backend of an abandoned statement");
        }
    }
}

/// PostgreSQL knows the role and refuses the password, or does not tell which of the two it is.
fn is_wrong_password(error: &sqlx::Error) -> bool {
    error.as_database_error().and_then(|error| error.code()).is_some_and(|code| code == "28P01")
}

/// What became of a COMMIT that did not succeed.
#[derive(Debug)]
pub enum CommitError {
    /// PostgreSQL answered with an error: nothing was committed.
    RolledBack(crate::tx::StatementError),
    /// The answer was lost.
    Unknown(sqlx::Error),
}

impl Drop for Transaction<'_> {
    /// A transaction that is neither committed nor rolled back closes its connection: dropping the
    /// handle does, and PostgreSQL aborts what it held.
    fn drop(&mut self) {
        if self.tx.is_some() {
            tracing::debug!(backend = self.backend, "a transaction was dropped; its connection is closed");
        }
    }
}
