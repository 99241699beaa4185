//! The database that holds a tenant's inbox and its tables: the host's own, or one that the tenant
//! named.
//!
//! Claim, effect and completion are one transaction, so a tenant's inbox is where its tables are.
//! The host's database stays the truth about tenants and consumers; a place holds a mirror of the
//! rows that the host functions there read ([`mirror`]). What a change does in two databases, and
//! what a crash in between leaves:
//!
//! | change | first | then | a crash in between leaves |
//! | --- | --- | --- | --- |
//! | create | the place is migrated and taken, the tenant's row is committed | roles, schema and mirror, in one transaction | a tenant without them; a look makes them |
//! | policy, limits, state, consumers | the host's database | the mirror | the mirror of before; a look makes it equal |
//! | rotation of credentials | the host's database, with the hash of before | passwords and mirror, in one transaction | sessions of before go on; a look does the rest |
//! | withdrawal of a version | generation and fence, with a mark where messages are to be redriven | the fence in the mirror, then the redrive, then the mark goes | nobody was told yet; a look does the rest |
//! | migration of the tenant's tables | the place, with its record | a copy of the record and the audit row | both in the place alone; a look copies them |
//! | delete | the tenant is `deleting`, then everything in the place goes | the tenant's row goes | a tenant that is `deleting`; deleting again goes on |
//!
//! A look is [`Admin::mirror`]: any host makes one when it sees that something changed, and every
//! now and then.

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

/// Connections of the host's login in a tenant's database: for people who look into its inbox,
/// mostly.
const CONNECTIONS_MAX: u32 = 3;
/// How long one is kept when nobody needs it.
const IDLE: Duration = Duration::from_secs(20);
/// How long a tenant's database may take to answer. Short, since others may wait behind who asks.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// How long a host may hold a lock in a tenant's database while it is away itself.
const ABSENCE_MAX_MS: &str = "5000";

/// How long a statement of the host may take there: whoever waits for it keeps something from
/// others.
const STATEMENT_MAX_MS: &str = "60000";

/// What the address of a tenant's database is sealed for.
const PURPOSE: &str = "database url";

/// A database with an inbox, as the host's own login reaches it. What belongs to a tenant's
/// messages and tables is asked for here; tenants, versions, deployments, tokens and the audit log
/// are in the host's database.
#[derive(Clone)]
pub struct Place {
    /// Connections of the host's login.
    pub pool: PgPool,
    /// Whether the tenant named it; otherwise it is the host's.
    pub is_own: bool,
    /// How to open one more, also as another login.
    pub(crate) options: PgConnectOptions,
}

/// The tenants' databases that this process has used, shared by all clones of an [`Admin`].
#[derive(Default)]
pub(crate) struct Places {
    open: Mutex<HashMap<i32, (Vec<u8>, Place)>>,
}

impl Admin {
    /// Where a tenant's inbox and tables are. Nothing is connected for it.
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

    /// What sessions of a tenant are opened with.
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

    /// A connection for one piece of work. It is not the pool's: work that is given up half way
    /// closes its connection, and whoever is stopped in the middle loses its locks soon.
    async fn connect(&self) -> Result<PgConnection, InboxError> {
        let options = self.options.clone().options([
            ("lock_timeout", ABSENCE_MAX_MS),
            ("idle_in_transaction_session_timeout", ABSENCE_MAX_MS),
        ]);
        Ok(answered_within(CONNECT_TIMEOUT, PgConnection::connect_with(&options)).await??)
    }
}

/// An answer, or the error of a database that does not give one.
async fn answered_within<T>(
    limit: Duration,
    answer: impl Future<Output = T>,
) -> Result<T, InboxError> {
    let silent = |_| InboxError::Unreachable(sqlx::Error::Io(std::io::ErrorKind::TimedOut.into()));
    tokio::time::timeout(limit, answer).await.map_err(silent)
}
