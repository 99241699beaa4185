//! The database, login and limits of a tenant's sessions.

use sqlx::{PgPool, postgres::PgConnectOptions};

use crate::{payload_key::PayloadKey, tenant_limits::TenantLimits};

/// The data that a host needs to open sessions of a tenant, as the tenant's row had it. Never shown
/// and never logged: it holds the password and the keys.
pub struct SessionTarget {
    /// Key of the tenant.
    pub tenant_id: i32,
    /// Name of the tenant.
    pub tenant: String,
    /// Revision of the tenant's row that `limits` belong to.
    pub revision: i64,
    /// Limits that the host sets for the tenant.
    pub limits: TenantLimits,
    /// Connection to the database with the tenant's inbox and tables, as the login that handlers
    /// run as, with its password.
    pub options: PgConnectOptions,
    /// Secret that is bound to every host function called in the tenant's sessions.
    pub secret: [u8; 32],
    /// Key of the hashes of the tenant's payloads. No rotation changes it.
    pub payload_key: PayloadKey,
    /// Schema of the tenant's tables.
    pub schema: String,
    /// Connections of the host's own login in that database.
    pub pool: PgPool,
}
