//! Redrives in a tenant's own database, which the transaction that withdraws a version cannot
//! reach.

use oncebox_model::{error::InboxError, hooks};
use sqlx::Connection;

use super::{TenantDatabase, replica};
use crate::{
    deployments::{Deployment, canary, select},
    handles::TenantDatabases,
    tenants::{Tenant, moves::is_here},
};

impl TenantDatabases<'_> {
    /// Redrives the messages that withdrawals have marked. Where a process dies before a mark is
    /// gone, the next reconciliation finds the messages that have not run since.
    pub(super) async fn redrive_pending(
        &self,
        database: &TenantDatabase,
        tenant: &Tenant,
    ) -> Result<(), InboxError> {
        const PENDING: &str = "SELECT c.consumer_id, d.deployment_id FROM oncebox.deployment d \
            JOIN oncebox.consumer c USING (consumer_id) \
            WHERE c.tenant_id = $1 AND d.redrive_pending ORDER BY d.deployment_id";
        let pending: Vec<(i32, i64)> =
            sqlx::query_as(PENDING).bind(tenant.tenant_id).fetch_all(&self.0.pool).await?;
        for (consumer_id, deployment_id) in pending {
            self.redrive_in(database, tenant, consumer_id, deployment_id).await?;
        }
        Ok(())
    }

    /// Redrives the messages of one withdrawn version, and clears its mark. The fence is in the
    /// replica already, so due messages run with the live version.
    async fn redrive_in(
        &self,
        database: &TenantDatabase,
        tenant: &Tenant,
        consumer_id: i32,
        deployment_id: i64,
    ) -> Result<(), InboxError> {
        const DONE: &str = "UPDATE oncebox.deployment SET redrive_pending = false, redriven = $2 \
            WHERE deployment_id = $1 AND redrive_pending";
        hooks::point("tenant_database:redrive:before");
        let mut connection = database.connect().await?;
        let mut tx =
            connection.begin_with("BEGIN ISOLATION LEVEL READ COMMITTED READ WRITE").await?;
        replica::lock(&mut tx, tenant.tenant_id).await?;
        // While the tenant is being moved the mark stays, for the other database.
        if !is_here(&mut tx, consumer_id).await? {
            return Ok(());
        }
        // Another process may have been faster, before the lock.
        let Some(withdrawn) = self.pending(deployment_id).await? else { return Ok(()) };
        let redriven = canary::redrive(
            &mut tx,
            consumer_id,
            &withdrawn,
            self.keeps_payloads(consumer_id).await?,
        )
        .await?;
        tx.commit().await?;
        hooks::point("tenant_database:redrive:after");
        sqlx::query(DONE).bind(deployment_id).bind(redriven as i64).execute(&self.0.pool).await?;
        connection.close().await;
        tracing::info!(
            tenant = tenant.name,
            deployment = deployment_id,
            redriven,
            "messages of a withdrawn version are due again"
        );
        Ok(())
    }

    async fn pending(&self, deployment_id: i64) -> Result<Option<Deployment>, InboxError> {
        Ok(select("WHERE d.deployment_id = $1 AND d.redrive_pending")
            .bind(deployment_id)
            .fetch_optional(&self.0.pool)
            .await?)
    }

    /// Returns the number of messages that a withdrawal made due again, as recorded when its mark
    /// was cleared. Zero before that.
    pub(crate) async fn redriven(&self, deployment_id: i64) -> Result<u64, InboxError> {
        let redriven: Option<i64> =
            sqlx::query_scalar("SELECT redriven FROM oncebox.deployment WHERE deployment_id = $1")
                .bind(deployment_id)
                .fetch_one(&self.0.pool)
                .await?;
        Ok(redriven.unwrap_or_default() as u64)
    }

    async fn keeps_payloads(&self, consumer_id: i32) -> Result<bool, InboxError> {
        const KEEPS: &str = "SELECT policy->>'payload' IS DISTINCT FROM 'none' FROM \
            oncebox.consumer WHERE consumer_id = $1";
        Ok(sqlx::query_scalar(KEEPS).bind(consumer_id).fetch_one(&self.0.pool).await?)
    }
}
