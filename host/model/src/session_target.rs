//! Where the sessions of a tenant lead to.

use sqlx::{PgPool, postgres::PgConnectOptions};

use crate::tenant_limits::TenantLimits;

/// What a host needs to open sessions of a tenant, as the tenant's row had it. Never shown, never
/// logged: it holds the password.
pub struct SessionTarget {
    /// Key of the tenant.
    pub tenant_id: i32,
    /// Its name.
    pub tenant: String,
    /// The revision that `limits` are of.
    pub revision: i64,
    /// What the host gives it.
    pub limits: TenantLimits,
    /// The database with its inbox and its tables, as the login that handlers run as, with its
    /// password.
    pub options: PgConnectOptions,
    /// What is bound to every host function that is called in its sessions.
    pub secret: [u8; 32],
    /// Schema of its tables.
    pub schema: String,
    /// Connections of the host's own login in that database.
    pub pool: PgPool,
}
