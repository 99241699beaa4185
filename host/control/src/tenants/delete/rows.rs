//! A tenant's rows, in the order in which they refer to each other.

use oncebox_model::{error::InboxError, hooks};
use serde_json::json;
use sqlx::PgPool;

use crate::{
    audit::Subject, consumers::delete::remove_beside_messages, control::Admin, tenants::Tenant,
};

/// Messages that go in one transaction.
const BATCH: i64 = 5_000;
/// Messages are counted up to here.
const COUNT_MAX: i64 = 100_000;

impl Admin {
    async fn consumer_ids(&self, tenant: &Tenant) -> Result<Vec<i32>, InboxError> {
        const IDS: &str =
            "SELECT consumer_id FROM oncebox.consumer WHERE tenant_id = $1 ORDER BY consumer_id";
        Ok(sqlx::query_scalar(IDS).bind(tenant.tenant_id).fetch_all(&self.pool).await?)
    }

    pub(super) async fn count_messages(
        &self,
        place: &PgPool,
        tenant: &Tenant,
    ) -> Result<i64, InboxError> {
        const COUNT: &str = "SELECT count(*) FROM (SELECT FROM oncebox.inbox WHERE consumer_id = \
            ANY ($1) LIMIT $2) i";
        let consumers = self.consumer_ids(tenant).await?;
        Ok(sqlx::query_scalar(COUNT).bind(consumers).bind(COUNT_MAX + 1).fetch_one(place).await?)
    }

    /// Nobody claims for the tenant any more, so what is gone stays gone.
    pub(super) async fn remove_messages(
        &self,
        place: &PgPool,
        tenant: &Tenant,
    ) -> Result<(), InboxError> {
        const REMOVE: &str = "DELETE FROM oncebox.inbox i USING (SELECT message_id, \
            retention_class, bucket FROM oncebox.inbox \
                WHERE consumer_id = $1 LIMIT $2) d \
            WHERE i.consumer_id = $1 AND i.message_id = d.message_id AND i.retention_class = \
            d.retention_class AND i.bucket = d.bucket";
        for consumer in self.consumer_ids(tenant).await? {
            while sqlx::query(REMOVE)
                .bind(consumer)
                .bind(BATCH)
                .execute(place)
                .await?
                .rows_affected()
                > 0
            {
                hooks::point("tenant:delete:batch");
            }
            remove_beside_messages(place, consumer).await?;
        }
        Ok(())
    }

    /// What refers to the tenant, but for its own row. Reports of hosts and shadows go with what
    /// they are of.
    pub(super) async fn remove_rows(&self, tenant: &Tenant) -> Result<(), InboxError> {
        const OF_DEPLOYMENTS: [&str; 3] = [
            "DELETE FROM oncebox.deployment_outcome o USING oncebox.deployment d JOIN \
                oncebox.consumer c USING (consumer_id) \
                WHERE d.deployment_id = o.deployment_id AND c.tenant_id = $1",
            "DELETE FROM oncebox.deployment d USING oncebox.consumer c WHERE c.consumer_id = \
                d.consumer_id AND c.tenant_id = $1",
            "DELETE FROM oncebox.consumer WHERE tenant_id = $1",
        ];
        const VERSIONS: &str = "DELETE FROM oncebox.version v USING oncebox.handler h WHERE \
            h.handler_id = v.handler_id AND h.tenant_id = $1 RETURNING v.digest";
        // Whoever uploads the same component right now holds its row, or makes it again.
        const COMPONENTS: &str = "DELETE FROM oncebox.component c WHERE c.digest = ANY ($1) \
            AND NOT EXISTS (SELECT FROM oncebox.version v WHERE v.digest = c.digest)";
        const OTHERS: [&str; 3] = [
            "DELETE FROM oncebox.handler WHERE tenant_id = $1",
            "DELETE FROM oncebox.token WHERE tenant_id = $1",
            "DELETE FROM oncebox.tenant_migration WHERE tenant_id = $1",
        ];
        let mut tx = self.pool.begin().await?;
        for statement in OF_DEPLOYMENTS {
            sqlx::query(statement).bind(tenant.tenant_id).execute(&mut *tx).await?;
        }
        let digests: Vec<Vec<u8>> =
            sqlx::query_scalar(VERSIONS).bind(tenant.tenant_id).fetch_all(&mut *tx).await?;
        sqlx::query(COMPONENTS).bind(digests).execute(&mut *tx).await?;
        for statement in OTHERS {
            sqlx::query(statement).bind(tenant.tenant_id).execute(&mut *tx).await?;
        }
        Ok(tx.commit().await?)
    }

    /// The tenant's own row. What someone has added since is in its way, and goes when this is
    /// repeated.
    pub(super) async fn remove_last(&self, tenant: &Tenant) -> Result<(), InboxError> {
        let mut tx = self.pool.begin().await?;
        sqlx::query("DELETE FROM oncebox.tenant WHERE tenant_id = $1")
            .bind(tenant.tenant_id)
            .execute(&mut *tx)
            .await?;
        self.audit(
            &mut tx,
            "tenant.deleted",
            Subject::tenant(&tenant.name),
            json!({ "schema": tenant.schema_name }),
        )
        .await?;
        tx.commit().await?;
        tracing::info!(tenant = tenant.name, "the tenant and everything of it is deleted");
        Ok(())
    }
}
