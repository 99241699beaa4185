//! Access to a database with an inbox, and the databases that this process has opened.

use std::{
    collections::HashMap,
    sync::{Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use oncebox_model::error::InboxError;
use sqlx::{Connection, PgConnection, PgPool, postgres::PgConnectOptions};

use crate::database::{reach, tenant_database::address::DatabaseUrl};

/// Maximum of connections of the host's login in a tenant's database. Most serve operators that
/// inspect its inbox.
const CONNECTIONS_MAX: u32 = 3;
/// Time after which an idle connection is closed.
const IDLE: Duration = Duration::from_secs(20);
/// Longest wait for a connection to a tenant's database. Short, since others may wait behind the
/// caller.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// Longest time that an idle transaction of the host keeps its locks in a tenant's database,
/// milliseconds. Also the longest wait for a lock there.
const ABSENCE_MAX_MS: &str = "5000";

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
    /// Whether the tenant named the database; otherwise it is the host's.
    pub is_dedicated: bool,
    /// Options for another connection, also as another login.
    pub(crate) options: PgConnectOptions,
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
    /// Returns the database at an address. Opens no connection.
    pub(super) fn at(url: &DatabaseUrl) -> Self {
        let options =
            reach::noticing_silence(url.options().clone().application_name("oncebox host"));
        let pool = reach::pool(CONNECTIONS_MAX, CONNECT_TIMEOUT)
            .min_connections(0)
            .idle_timeout(IDLE)
            .connect_lazy_with(options.clone().options([
                ("lock_timeout", ABSENCE_MAX_MS),
                ("statement_timeout", STATEMENT_MAX_MS),
            ]));
        Self { pool, is_dedicated: true, options }
    }

    /// Opens a connection for one piece of work, outside the pool. Cancelled work closes its
    /// connection, and a process that is suspended in the middle loses its locks soon.
    pub(crate) async fn connect(&self) -> Result<PgConnection, InboxError> {
        let options = self.options.clone().options([
            ("lock_timeout", ABSENCE_MAX_MS),
            ("idle_in_transaction_session_timeout", ABSENCE_MAX_MS),
        ]);
        Ok(answered_within(CONNECT_TIMEOUT, PgConnection::connect_with(&options)).await??)
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
