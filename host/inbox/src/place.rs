//! The database that holds a tenant's inbox and its tables.

use sqlx::{PgPool, postgres::PgConnectOptions};

use crate::{admin::Admin, error::InboxError, tenant::Tenant};

/// A database with an inbox, as the host's own login reaches it. What belongs to a tenant's messages and
/// tables is asked for here; tenants, versions, deployments, tokens and the audit log are in the host's
/// database.
#[derive(Clone)]
pub struct Place {
    /// Connections of the host's login.
    pub pool: PgPool,
    /// How to open one more, also as another login.
    pub(crate) options: PgConnectOptions,
}

impl Admin {
    /// Where a tenant's inbox and tables are.
    pub fn place(&self, _tenant: &Tenant) -> Result<Place, InboxError> {
        Ok(Place { pool: self.pool.clone(), options: self.options.clone() })
    }
}
