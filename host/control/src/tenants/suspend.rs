//! Changes of a tenant while hosts run: suspend, resume, other limits. Each raises the tenant's
//! revision in its own transaction. Hosts compare the revision with the one they run, and act.

use oncebox_model::{error::InboxError, status::TenantState};
use oncebox_sender::AllowedHosts;
use serde_json::{Map, Value, json};
use sqlx::PgConnection;

use crate::{
    audit::Subject,
    deployments::deploy::CHANNEL,
    handles::Tenants,
    tenants::{Tenant, moves::refuse_moving},
};

impl Tenants<'_> {
    /// Suspends all consumers of a tenant: hosts finish the batches that they run and leave its
    /// groups. Its tokens only read from then on. Returns the tenant.
    ///
    /// # Errors
    /// `NotFound` where there is no such tenant. `Conflict` where it is being deleted.
    pub async fn suspend(&self, name: &str) -> Result<Tenant, InboxError> {
        self.change_state(name, TenantState::Suspended, "tenant.suspend").await
    }

    /// Resumes a suspended tenant: its consumers continue where they were. Returns the tenant.
    ///
    /// # Errors
    /// `NotFound` where there is no such tenant. `Conflict` where it is being deleted.
    pub async fn resume(&self, name: &str) -> Result<Tenant, InboxError> {
        self.change_state(name, TenantState::Active, "tenant.resume").await
    }

    /// Returns the state of a tenant, or none where there is no tenant.
    ///
    /// # Errors
    /// An error of the host's database.
    pub async fn state(&self, name: &str) -> Result<Option<TenantState>, InboxError> {
        let state =
            sqlx::query_scalar("SELECT state FROM oncebox.tenant WHERE name = $1").bind(name);
        Ok(state.fetch_optional(&self.0.pool).await?)
    }

    /// Sets the state of a tenant. Setting the present state changes nothing and writes no audit
    /// row.
    async fn change_state(
        &self,
        name: &str,
        to: TenantState,
        action: &str,
    ) -> Result<Tenant, InboxError> {
        let mut tx = self.0.pool.begin().await?;
        let tenant = self.lock(&mut tx, name).await?;
        if tenant.state == to {
            tx.rollback().await?;
            return Ok(tenant);
        }
        let tenant = set_state(&mut tx, &tenant, to).await?;
        self.0
            .audit()
            .record(&mut tx, action, Subject::tenant(name), json!({ "revision": tenant.revision }))
            .await?;
        tx.commit().await?;
        self.announce(&tenant).await;
        Ok(tenant)
    }

    /// Changes some of a tenant's limits; `null` removes one. Limits that `changes` does not name
    /// stay. Returns the tenant.
    ///
    /// # Errors
    /// `NotFound` where there is no such tenant. `Invalid` for an unknown limit or a value out of
    /// range. `Conflict` where it is being deleted.
    pub async fn set_limits(
        &self,
        name: &str,
        changes: &Map<String, Value>,
    ) -> Result<Tenant, InboxError> {
        const SET: &str = "UPDATE oncebox.tenant SET limits = $2, revision = revision + 1 WHERE \
            tenant_id = $1 RETURNING *";
        let mut tx = self.0.pool.begin().await?;
        let tenant = self.lock(&mut tx, name).await?;
        let limits = tenant.limits.changed(changes)?;
        AllowedHosts::parse(limits.endpoint_hosts_allowed())
            .map_err(|fault| InboxError::Invalid(format!("`endpoint_hosts_allowed`: {fault}")))?;
        if limits == tenant.limits {
            tx.rollback().await?;
            return Ok(tenant);
        }
        let tenant: Tenant = sqlx::query_as(SET)
            .bind(tenant.tenant_id)
            .bind(json!(limits))
            .fetch_one(&mut *tx)
            .await?;
        self.0
            .audit()
            .record(&mut tx, "tenant.limits", Subject::tenant(name), Value::Object(changes.clone()))
            .await?;
        tx.commit().await?;
        self.announce(&tenant).await;
        Ok(tenant)
    }

    /// Reads and locks a tenant's row against other changes. Refuses a tenant that is being
    /// deleted, or that stands still for a move.
    pub(crate) async fn lock(
        &self,
        connection: &mut PgConnection,
        name: &str,
    ) -> Result<Tenant, InboxError> {
        let tenant = self.lock_row(connection, name).await?;
        if tenant.state.is_deleting() {
            return Err(being_deleted(name));
        }
        refuse_moving(connection, &tenant).await?;
        Ok(tenant)
    }

    /// Reads and locks a tenant's row, in whatever state it is.
    pub(super) async fn lock_row(
        &self,
        connection: &mut PgConnection,
        name: &str,
    ) -> Result<Tenant, InboxError> {
        // The weaker lock, so that transactions that only refer to the row need not wait.
        const LOCK: &str = "SELECT * FROM oncebox.tenant WHERE name = $1 FOR NO KEY UPDATE";
        let tenant: Option<Tenant> =
            sqlx::query_as(LOCK).bind(name).fetch_optional(connection).await?;
        match tenant {
            Some(tenant) => Ok(tenant),
            None => self.get(name).await,
        }
    }

    /// Notifies the hosts that a tenant changed. Call it after the commit. As for deployments, it
    /// is only a hint.
    pub(crate) async fn announce(&self, tenant: &Tenant) {
        let notify = sqlx::query("SELECT pg_notify($1, $2)")
            .bind(CHANNEL)
            .bind(format!("tenant {}", tenant.tenant_id));
        if let Err(error) = notify.execute(&self.0.pool).await {
            tracing::debug!(%error, "hosts were not told of a change of a tenant; they find it by \
                themselves");
        }
    }
}

/// Sets the state of a tenant and raises the revisions of its consumers. A host's later report of a
/// consumer then belongs to this state, and not to an earlier one.
pub(crate) async fn set_state(
    connection: &mut PgConnection,
    tenant: &Tenant,
    to: TenantState,
) -> Result<Tenant, InboxError> {
    const SET: &str = "UPDATE oncebox.tenant SET state = $2, revision = revision + 1 WHERE \
        tenant_id = $1 RETURNING *";
    const CONSUMERS: &str =
        "UPDATE oncebox.consumer SET revision = revision + 1 WHERE tenant_id = $1";
    sqlx::query(CONSUMERS).bind(tenant.tenant_id).execute(&mut *connection).await?;
    Ok(sqlx::query_as(SET).bind(tenant.tenant_id).bind(to.as_str()).fetch_one(connection).await?)
}

pub(crate) fn being_deleted(name: &str) -> InboxError {
    InboxError::conflict(format!(
        "tenant `{name}` is being deleted; `oncebox tenant delete {name} --confirm {name}` says \
            how far that is"
    ))
}
