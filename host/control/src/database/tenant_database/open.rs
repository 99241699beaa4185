//! Access to a database with an inbox, and the databases that this process has opened.

use std::{
    collections::HashMap,
    ops::{Deref, DerefMut},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use oncebox_model::error::InboxError;
use sqlx::{Connection, PgConnection, PgPool, postgres::PgConnectOptions};
use tokio::{
    sync::{OwnedSemaphorePermit, Semaphore},
    time::Instant,
};

use crate::database::{reach, tenant_database::address::DatabaseUrl};

/// Maximum of connections of the host's login in a database that a tenant named. Most serve
/// operators that inspect its inbox.
pub(super) const CONNECTIONS_MAX: u32 = 3;
/// Maximum of those in a database in which hosts place tenants.
pub(super) const CONNECTIONS_MAX_NAMED: u32 = 8;
/// Maximum of connections outside that pool, each for one piece of work. Many tenants may have one
/// database.
const WORK_MAX: usize = 4;
/// Time for which a check that a database can be used counts for all tenants in it.
const CHECKED_FOR: Duration = Duration::from_secs(10);
/// Time after which an idle connection is closed.
const IDLE: Duration = Duration::from_secs(20);
/// Longest wait for a connection to a tenant's database. Short, since others may wait behind the
/// caller.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// Longest time that an idle transaction of the host keeps its locks in a tenant's database,
/// milliseconds. Also the longest wait for a lock there.
const ABSENCE_MAX_MS: &str = "5000";

/// The same for work on the rows of a whole tenant, and the longest wait for the end of a statement.
const LONG_ABSENCE_MAX: &str = "5min";
pub(crate) const LONGEST_ANSWER: Duration = Duration::from_secs(3_600);

/// Longest statement of the host there, milliseconds: its caller may hold resources that others
/// wait for.
const STATEMENT_MAX_MS: &str = "60000";

/// A database with an inbox, as the host's own login reaches it. Queries about a tenant's messages
/// and tables go here. Tenants, versions, deployments, tokens and the audit log are in the host's
/// database.
#[derive(Clone)]
pub struct TenantDatabase {
    /// Connections of the host's login.
    pub pool: PgPool,
    /// Whether it is another one than the host's, so that no transaction spans both.
    pub is_dedicated: bool,
    /// Options for another connection, also as another login.
    pub(crate) options: PgConnectOptions,
    shared: Arc<SharedAccess>,
}

/// What all work on a database shares, whichever tenant it is for.
struct SharedAccess {
    /// Connections outside the pool that may yet be opened.
    work: Arc<Semaphore>,
    /// The last check that the database can be used.
    checked: tokio::sync::Mutex<LastCheck>,
}

/// Times of the last checks of a database.
#[derive(Default)]
struct LastCheck {
    succeeded_at: Option<Instant>,
    failed_at: Option<Instant>,
}

/// A turn to open a connection for one piece of work.
pub(super) struct WorkTurn(OwnedSemaphorePermit);

/// A connection for one piece of work, outside the pool.
pub(crate) struct WorkConnection {
    connection: PgConnection,
    _permit: OwnedSemaphorePermit,
}

/// The tenants' databases that this process has used, shared by all clones of an [`Control`].
#[derive(Default)]
pub(crate) struct OpenDatabases {
    open: Mutex<HashMap<i32, (Vec<u8>, TenantDatabase)>>,
}

impl OpenDatabases {
    /// Locks the map of databases.
    pub(super) fn open(&self) -> MutexGuard<'_, HashMap<i32, (Vec<u8>, TenantDatabase)>> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Removes a tenant's database from the map, and returns it.
    pub(super) fn remove(&self, tenant_id: i32) -> Option<TenantDatabase> {
        self.open().remove(&tenant_id).map(|(_, database)| database)
    }
}

impl TenantDatabase {
    /// Returns a database with its connections.
    pub(super) fn new(pool: PgPool, options: PgConnectOptions, is_dedicated: bool) -> Self {
        let shared = SharedAccess {
            work: Arc::new(Semaphore::new(WORK_MAX)),
            checked: tokio::sync::Mutex::default(),
        };
        Self { pool, is_dedicated, options, shared: Arc::new(shared) }
    }

    /// Returns the database at an address. Opens no connection.
    pub(super) fn at(url: &DatabaseUrl, connections_max: u32) -> Self {
        let options =
            reach::noticing_silence(url.options().clone().application_name("oncebox host"));
        let pool = reach::pool(connections_max, CONNECT_TIMEOUT)
            .min_connections(0)
            .idle_timeout(IDLE)
            .connect_lazy_with(options.clone().options([
                ("lock_timeout", ABSENCE_MAX_MS),
                ("statement_timeout", STATEMENT_MAX_MS),
            ]));
        Self::new(pool, options, true)
    }

    /// Runs a check that the database can be used, unless one has just succeeded, or one has failed
    /// for which this call waited. The check is told whether none has succeeded before in this
    /// process.
    pub(super) async fn check_once<F: Future<Output = Result<(), InboxError>>>(
        &self,
        check: impl FnOnce(bool) -> F,
    ) -> Result<(), InboxError> {
        let began = Instant::now();
        let mut last = self.shared.checked.lock().await;
        if last.succeeded_at.is_some_and(|at| at.elapsed() < CHECKED_FOR) {
            return Ok(());
        }
        if last.failed_at.is_some_and(|at| at >= began) {
            return Err(InboxError::DatabaseUnavailable { retry_after: CONNECT_TIMEOUT });
        }
        let checked = check(last.succeeded_at.is_none()).await;
        let at = Some(Instant::now());
        match &checked {
            Ok(()) => last.succeeded_at = at,
            Err(_) => last.failed_at = at,
        }
        checked
    }

    /// Waits for a turn to open a connection.
    pub(super) async fn turn(&self) -> WorkTurn {
        WorkTurn(self.shared.work.clone().acquire_owned().await.expect("it is never closed"))
    }

    /// Opens a connection for one piece of work, outside the pool, and waits for its turn before
    /// that. Cancelled work closes its connection, and a process that is suspended in the middle
    /// loses its locks soon.
    pub(crate) async fn connect(&self) -> Result<WorkConnection, InboxError> {
        self.connect_in(self.turn().await).await
    }

    /// Opens such a connection for work whose statements take as long as a tenant is large, and
    /// whose transactions wait for rows of another database.
    pub(crate) async fn connect_for_long(&self) -> Result<WorkConnection, InboxError> {
        let turn = self.turn().await;
        let options = self.options.clone().answer_timeout(LONGEST_ANSWER).options([
            ("lock_timeout", ABSENCE_MAX_MS),
            ("idle_in_transaction_session_timeout", LONG_ABSENCE_MAX),
        ]);
        let connection =
            answered_within(CONNECT_TIMEOUT, PgConnection::connect_with(&options)).await??;
        Ok(WorkConnection { connection, _permit: turn.0 })
    }

    /// Opens such a connection in a turn.
    pub(super) async fn connect_in(&self, turn: WorkTurn) -> Result<WorkConnection, InboxError> {
        let options = self.options.clone().options([
            ("lock_timeout", ABSENCE_MAX_MS),
            ("idle_in_transaction_session_timeout", ABSENCE_MAX_MS),
        ]);
        let connection =
            answered_within(CONNECT_TIMEOUT, PgConnection::connect_with(&options)).await??;
        Ok(WorkConnection { connection, _permit: turn.0 })
    }
}

impl WorkConnection {
    /// Closes the connection, whose work is done.
    pub(crate) async fn close(self) {
        let _ = self.connection.close().await;
    }
}

impl Deref for WorkConnection {
    type Target = PgConnection;

    fn deref(&self) -> &PgConnection {
        &self.connection
    }
}

impl DerefMut for WorkConnection {
    fn deref_mut(&mut self) -> &mut PgConnection {
        &mut self.connection
    }
}

/// Waits for an answer, and returns `Unreachable` where none arrives within the limit.
pub(crate) async fn answered_within<T>(
    limit: Duration,
    answer: impl Future<Output = T>,
) -> Result<T, InboxError> {
    let silent = |_| InboxError::Unreachable(sqlx::Error::Io(std::io::ErrorKind::TimedOut.into()));
    tokio::time::timeout(limit, answer).await.map_err(silent)
}
