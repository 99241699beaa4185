//! The database that holds a tenant's inbox and its tables: the host's own, one of the databases
//! that the settings of hosts name ([`named`]), or one that the tenant named.
//!
//! Claim, effect and completion are one transaction, so a tenant's inbox is where its tables are.
//! The host's database stays the source of truth about tenants and consumers. Another
//! database holds a replica of the rows that the host functions there read ([`replica`]). The table
//! lists the effects of each change on two databases, and the state that a crash in between leaves:
//!
//! | change | first | then | a crash in between leaves |
//! | --- | --- | --- | --- |
//! | create | the database is migrated and taken, the tenant's row is committed | roles, schema and replica, in one transaction | a tenant without them; reconciliation makes them |
//! | policy, limits, state, consumers | the host's database | the replica | the earlier replica; reconciliation makes it equal |
//! | rotation of credentials | the host's database, with the earlier hash | passwords and replica, in one transaction | earlier sessions that go on; reconciliation does the rest |
//! | withdrawal of a version | generation and fence, with a mark where messages are to be redriven | the fence in the replica, then the redrive, then the mark goes | no reported success; reconciliation does the rest |
//! | migration of the tenant's tables | the tenant's database, with its record | a copy of the record and the audit row | both in the tenant's database alone; reconciliation copies them |
//! | delete | the tenant is `deleting`, then everything in its database goes | the tenant's row goes | a tenant that is `deleting`; deleting again goes on |
//!
//! Reconciliation is [`TenantDatabases::replicate`]: any host runs it when it sees a change, and at
//! intervals.

mod address;
mod create;
pub(crate) mod identity;
mod inbox_database;
mod migrations;
pub(crate) mod named;
pub(crate) mod open;
pub(crate) mod replica;
mod placement;
pub(crate) mod prepare;
mod redrive;

use oncebox_model::{error::InboxError, session_target::SessionTarget};

use self::open::{CONNECTIONS_MAX, answered_within};
pub use self::{
    address::DatabaseUrl,
    inbox_database::{DatabaseLabel, InboxDatabase},
    named::{NamedDatabase, NamedDatabases},
    open::TenantDatabase,
    placement::DatabaseUse,
    replica::SourceVersion,
};
use crate::{
    control::Control,
    handles::TenantDatabases,
    tenants::{Tenant, credentials::Credentials},
};

/// Purpose under which the address of a tenant's database is sealed.
const PURPOSE: &str = "database url";

impl TenantDatabases<'_> {
    /// Returns the database with a tenant's inbox and tables. Opens no connection.
    ///
    /// # Errors
    /// `NotFound` where the settings of this process do not name it. An error where the address
    /// cannot be unsealed or parsed.
    pub fn get(&self, tenant: &Tenant) -> Result<TenantDatabase, InboxError> {
        let Some(sealed) = &tenant.database_url else { return Ok(self.own()) };
        if let Some(name) = tenant.database_name() {
            return Ok(self.0.named_databases.get(name)?.database.clone());
        }
        let mut open = self.0.tenant_databases.open();
        if let Some((_, database)) =
            open.get(&tenant.tenant_id).filter(|(known, _)| known == sealed)
        {
            return Ok(database.clone());
        }
        let database = TenantDatabase::at(&self.database_url(tenant, sealed)?, CONNECTIONS_MAX);
        open.insert(tenant.tenant_id, (sealed.clone(), database.clone()));
        Ok(database)
    }

    /// Returns the host's database, with the inbox of every tenant that named none.
    pub(crate) fn own(&self) -> TenantDatabase {
        let Control { pool, options, .. } = self.0;
        TenantDatabase::new(pool.clone(), options.clone(), false)
    }

    /// Returns a tenant's secrets.
    ///
    /// # Errors
    /// `Sealed` where they cannot be unsealed with the master key.
    pub fn credentials(&self, tenant: &Tenant) -> Result<Credentials, InboxError> {
        self.0.key.credentials(tenant)
    }

    /// Returns the parameters with which sessions of a tenant are opened.
    ///
    /// # Errors
    /// An error where the tenant's credentials or address cannot be unsealed.
    pub fn session_target(&self, tenant: &Tenant) -> Result<SessionTarget, InboxError> {
        let (database, credentials) = (self.get(tenant)?, self.credentials(tenant)?);
        Ok(SessionTarget {
            tenant_id: tenant.tenant_id,
            tenant: tenant.name.clone(),
            revision: tenant.revision,
            limits: tenant.limits.clone(),
            options: database.options.username(&tenant.login).password(&credentials.guest_password),
            secret: credentials.secret,
            payload_key: credentials.payload_key(),
            schema: tenant.schema_name.clone(),
            pool: database.pool,
        })
    }

    fn database_url(&self, tenant: &Tenant, sealed: &[u8]) -> Result<DatabaseUrl, InboxError> {
        let url = self.0.key.unseal(PURPOSE, &tenant.login, sealed)?;
        DatabaseUrl::parse(&String::from_utf8_lossy(&url))
    }
}
