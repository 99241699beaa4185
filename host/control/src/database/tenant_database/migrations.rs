//! The host's copy of the migration records in a tenant's own database. Deployments require
//! migrations by name. The audit log repeats the actor that those records name, which an operator
//! of that database may forge.

use oncebox_model::error::InboxError;
use sqlx::Executor;

use crate::{database::migration::Migration, handles::TenantDatabases, tenants::Tenant};

impl TenantDatabases<'_> {
    /// Copies migration records that are only in a tenant's own database, each with its audit row.
    /// A record and its audit row are written together and once, even where several hosts copy.
    pub(crate) async fn copy_migrations(&self, tenant: &Tenant) -> Result<(), InboxError> {
        const COPY: &str = "WITH copied AS (INSERT INTO oncebox.tenant_migration (tenant_id, name, \
            digest, applied_at, applied_by) \
                SELECT $1, u.* FROM unnest($3::text[], $4::bytea[], $5::timestamptz[], $6::text[]) \
                AS u \
                ON CONFLICT DO NOTHING RETURNING name, digest, applied_by) \
            INSERT INTO oncebox.audit (actor, action, subject, tenant, details) \
            SELECT 'oncebox', 'tenant.migrate', format('%s/%s', $2, c.name), $2, \
                jsonb_build_object('digest', encode(c.digest, 'hex'), 'applied_by', \
                left(c.applied_by, 200)) FROM copied c";
        if !self.get(tenant)?.is_dedicated {
            return Ok(());
        }
        let held: Vec<Migration> = self.migrations_held(tenant).await?;
        let copy = sqlx::query(COPY)
            .bind(tenant.tenant_id)
            .bind(&tenant.name)
            .bind(held.iter().map(|m| m.name.as_str()).collect::<Vec<_>>())
            .bind(held.iter().map(|m| m.digest.as_slice()).collect::<Vec<_>>())
            .bind(held.iter().map(|m| m.applied_at).collect::<Vec<_>>())
            .bind(held.iter().map(|m| m.applied_by.as_str()).collect::<Vec<_>>());
        self.0.pool.execute(copy).await?;
        Ok(())
    }
}
