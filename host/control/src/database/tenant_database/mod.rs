//! The database that holds a tenant's inbox and its tables: the host's own, or one that the tenant
//! named.
//!
//! Claim, effect and completion are one transaction, so a tenant's inbox is where its tables are.
//! The host's database stays the source of truth about tenants and consumers. A tenant's own
//! database holds a mirror of the rows that the host functions there read ([`mirror`]). The table
//! lists the effects of each change on two databases, and the state that a crash in between leaves:
//!
//! | change | first | then | a crash in between leaves |
//! | --- | --- | --- | --- |
//! | create | the tenant's database is migrated and taken, the tenant's row is committed | roles, schema and mirror, in one transaction | a tenant without them; reconciliation makes them |
//! | policy, limits, state, consumers | the host's database | the mirror | the earlier mirror; reconciliation makes it equal |
//! | rotation of credentials | the host's database, with the earlier hash | passwords and mirror, in one transaction | earlier sessions that go on; reconciliation does the rest |
//! | withdrawal of a version | generation and fence, with a mark where messages are to be redriven | the fence in the mirror, then the redrive, then the mark goes | no reported success; reconciliation does the rest |
//! | migration of the tenant's tables | the tenant's database, with its record | a copy of the record and the audit row | both in the tenant's database alone; reconciliation copies them |
//! | delete | the tenant is `deleting`, then everything in its database goes | the tenant's row goes | a tenant that is `deleting`; deleting again goes on |
//!
//! Reconciliation is [`Admin::mirror`]: any host runs it when it sees a change, and at intervals.

mod address;
mod create;
mod migrations;
pub(crate) mod mirror;
mod prepare;
mod redrive;

use std::{
    collections::HashMap,
    sync::{Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use oncebox_model::{error::InboxError, session_target::SessionTarget};
use sqlx::{Connection, PgConnection, PgPool, postgres::PgConnectOptions};

pub use address::DatabaseUrl;
pub use mirror::Drift;

use crate::{control::Admin, database::reach, tenants::Tenant};

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

/// Purpose under which the address of a tenant's database is sealed.
const PURPOSE: &str = "database url";

/// A database with an inbox, as the host's own login reaches it. Queries about a tenant's messages
/// and tables go here. Tenants, versions, deployments, tokens and the audit log are in the host's
/// database.
#[derive(Clone)]
pub struct Place {
    /// Connections of the host's login.
    pub pool: PgPool,
    /// Whether the tenant named the database; otherwise it is the host's.
    pub is_own: bool,
    /// Options for another connection, also as another login.
    pub(crate) options: PgConnectOptions,
}

/// The tenants' databases that this process has used, shared by all clones of an [`Admin`].
#[derive(Default)]
pub(crate) struct Places {
    open: Mutex<HashMap<i32, (Vec<u8>, Place)>>,
}

impl Admin {
    /// Returns the database with a tenant's inbox and tables. Opens no connection.
    ///
    /// # Errors
    /// An error where the address cannot be unsealed or parsed.
    pub fn place(&self, tenant: &Tenant) -> Result<Place, InboxError> {
        let Some(sealed) = &tenant.database_url else {
            return Ok(Place {
                pool: self.pool.clone(),
                is_own: false,
                options: self.options.clone(),
            });
        };
        let mut open = self.places.open();
        if let Some((_, place)) = open.get(&tenant.tenant_id).filter(|(known, _)| known == sealed) {
            return Ok(place.clone());
        }
        let place = Place::at(&self.database_url(tenant, sealed)?);
        open.insert(tenant.tenant_id, (sealed.clone(), place.clone()));
        Ok(place)
    }

    /// Returns the parameters with which sessions of a tenant are opened.
    ///
    /// # Errors
    /// An error where the tenant's credentials or address cannot be unsealed.
    pub fn session_target(&self, tenant: &Tenant) -> Result<SessionTarget, InboxError> {
        let (place, credentials) = (self.place(tenant)?, self.credentials(tenant)?);
        Ok(SessionTarget {
            tenant_id: tenant.tenant_id,
            tenant: tenant.name.clone(),
            revision: tenant.revision,
            limits: tenant.limits.clone(),
            options: place.options.username(&tenant.login).password(&credentials.guest_password),
            secret: credentials.secret,
            schema: tenant.schema_name.clone(),
            pool: place.pool,
        })
    }

    fn database_url(&self, tenant: &Tenant, sealed: &[u8]) -> Result<DatabaseUrl, InboxError> {
        let url = self.key.unseal(PURPOSE, &tenant.login, sealed)?;
        DatabaseUrl::parse(&String::from_utf8_lossy(&url))
    }
}

impl Places {
    fn open(&self) -> MutexGuard<'_, HashMap<i32, (Vec<u8>, Place)>> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn remove(&self, tenant_id: i32) -> Option<Place> {
        self.open().remove(&tenant_id).map(|(_, place)| place)
    }
}

impl Place {
    fn at(url: &DatabaseUrl) -> Self {
        let options =
            reach::noticing_silence(url.options().clone().application_name("oncebox host"));
        let pool = reach::pool(CONNECTIONS_MAX, CONNECT_TIMEOUT)
            .min_connections(0)
            .idle_timeout(IDLE)
            .connect_lazy_with(options.clone().options([
                ("lock_timeout", ABSENCE_MAX_MS),
                ("statement_timeout", STATEMENT_MAX_MS),
            ]));
        Self { pool, is_own: true, options }
    }

    /// Opens a connection for one piece of work, outside the pool. Cancelled work closes its
    /// connection, and a process that is suspended in the middle loses its locks soon.
    async fn connect(&self) -> Result<PgConnection, InboxError> {
        let options = self.options.clone().options([
            ("lock_timeout", ABSENCE_MAX_MS),
            ("idle_in_transaction_session_timeout", ABSENCE_MAX_MS),
        ]);
        Ok(answered_within(CONNECT_TIMEOUT, PgConnection::connect_with(&options)).await??)
    }
}

/// Waits for an answer, and returns `Unreachable` where none arrives within the limit.
async fn answered_within<T>(
    limit: Duration,
    answer: impl Future<Output = T>,
) -> Result<T, InboxError> {
    let silent = |_| InboxError::Unreachable(sqlx::Error::Io(std::io::ErrorKind::TimedOut.into()));
    tokio::time::timeout(limit, answer).await.map_err(silent)
}
