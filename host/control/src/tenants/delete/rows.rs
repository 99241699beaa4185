//! Removal of a tenant's rows, in the order of their references.

use oncebox_model::{error::InboxError, hooks};
use serde_json::json;
use sqlx::PgPool;

use crate::{
    audit::Subject,
    consumers::delete::{remove_beside_messages, remove_messages, remove_outgoing},
    handles::Tenants,
    tenants::Tenant,
};

/// Most messages that are counted exactly.
const COUNT_MAX: i64 = 100_000;

impl Tenants<'_> {
    async fn consumer_ids(&self, tenant: &Tenant) -> Result<Vec<i32>, InboxError> {
        const IDS: &str =
            "SELECT consumer_id FROM oncebox.consumer WHERE tenant_id = $1 ORDER BY consumer_id";
        Ok(sqlx::query_scalar(IDS).bind(tenant.tenant_id).fetch_all(&self.0.pool).await?)
    }

    pub(super) async fn count_messages(
        &self,
        database: &PgPool,
        tenant: &Tenant,
    ) -> Result<i64, InboxError> {
        const COUNT: &str = "SELECT count(*) FROM (SELECT FROM oncebox.inbox WHERE consumer_id = \
            ANY ($1) LIMIT $2) i";
        let consumers = self.consumer_ids(tenant).await?;
        Ok(sqlx::query_scalar(COUNT)
            .bind(consumers)
            .bind(COUNT_MAX + 1)
            .fetch_one(database)
            .await?)
    }

    /// Deletes the tenant's messages and those that its handlers sent, in batches. The tenant is
    /// shut out by then, so none are added.
    pub(super) async fn remove_messages(
        &self,
        database: &PgPool,
        tenant: &Tenant,
    ) -> Result<(), InboxError> {
        for consumer in self.consumer_ids(tenant).await? {
            let mut connection = database.acquire().await?;
            while remove_messages(&mut connection, consumer).await? > 0 {
                hooks::point("tenant:delete:batch");
            }
            while remove_outgoing(&mut connection, consumer).await? > 0 {
                hooks::point("tenant:delete:batch");
            }
            remove_beside_messages(&mut connection, consumer).await?;
        }
        Ok(())
    }

    /// Deletes the rows that refer to the tenant, but not its own row. Reports of hosts and shadows
    /// go with the rows they refer to.
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
        // A concurrent upload of the component holds its row, or inserts it again.
        const COMPONENTS: &str = "DELETE FROM oncebox.component c WHERE c.digest = ANY ($1) \
            AND NOT EXISTS (SELECT FROM oncebox.version v WHERE v.digest = c.digest)";
        const OTHERS: [&str; 5] = [
            "DELETE FROM oncebox.tenant_store WHERE tenant_id = $1",
            "DELETE FROM oncebox.endpoint WHERE tenant_id = $1",
            "DELETE FROM oncebox.handler WHERE tenant_id = $1",
            "DELETE FROM oncebox.token WHERE tenant_id = $1",
            "DELETE FROM oncebox.tenant_migration WHERE tenant_id = $1",
        ];
        let mut tx = self.0.pool.begin().await?;
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

    /// Deletes the tenant's own row. Rows that were added in between block this, and a repeated
    /// removal deletes them.
    pub(super) async fn remove_last(&self, tenant: &Tenant) -> Result<(), InboxError> {
        let mut tx = self.0.pool.begin().await?;
        sqlx::query("DELETE FROM oncebox.tenant WHERE tenant_id = $1")
            .bind(tenant.tenant_id)
            .execute(&mut *tx)
            .await?;
        self.0
            .audit()
            .record(
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
