//! Changes of the live deployments: deploy, canary, shadow, promote, roll back, end.
//!
//! Each change is one transaction that raises the consumer's generation. A host learns of it by
//! polling, and switches between two of its own transactions. A change that withdraws a version
//! also raises the generation that claims must show. No host, however far away, then completes a
//! message with that version in a transaction that begins later.

use oncebox_model::{
    error::InboxError,
    policy::{Limits, Policy},
};
use serde_json::{Value, json};
use sqlx::PgConnection;

use crate::{
    audit::Subject,
    consumers::{Consumer, state::lock},
    deployments::{
        Deployment, DeploymentRole, NewDeployment, Slot,
        check::{
            check, check_imports, check_limits, check_memory, check_migration, check_percent,
            check_slot,
        },
        select, version,
    },
    handles::Deployments,
};

/// The way in which a deployment ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum EndedHow {
    Superseded,
    RolledBack,
    Promoted,
    Ended,
}

impl EndedHow {
    fn name(self) -> &'static str {
        match self {
            Self::Superseded => "superseded",
            Self::RolledBack => "rolled_back",
            Self::Promoted => "promoted",
            Self::Ended => "ended",
        }
    }
}

/// A change of one consumer's deployments, under the lock of the consumer's row.
pub(crate) struct Change<'a> {
    pub(crate) connection: &'a mut PgConnection,
    pub(crate) consumer_id: i32,
    /// Generation that the change creates.
    pub(crate) generation: i64,
}

impl Deployments<'_> {
    /// Makes a version live in its slot, in any role. Returns the deployment.
    ///
    /// # Errors
    /// `NotFound` where there is no such consumer or version. `Invalid` for limits or shares that
    /// cannot be. `Conflict` where the slot does not allow the role now.
    pub async fn deploy(
        &self,
        tenant: &str,
        consumer: &str,
        new: &NewDeployment,
    ) -> Result<Deployment, InboxError> {
        check(new)?;
        let consumer = self.0.consumers().get(tenant, consumer).await?;
        check_limits(&new.limits, &consumer.policy()?)?;
        if new.requires_migration.is_some() {
            self.0
                .tenant_databases()
                .copy_migrations(&self.0.tenants().get(&consumer.tenant).await?)
                .await?;
        }
        let mut tx = self.0.pool.begin().await?;
        let mut change = Change::begin(&mut tx, &consumer).await?;
        let version =
            version::find(change.connection, consumer.tenant_id, &new.handler, &new.version)
                .await?;
        version.check_deployable()?;
        check_imports(change.connection, &version, &new.grants).await?;
        check_memory(&version, &limits(&consumer.policy()?, &Value::Object(new.limits.clone()))?)?;
        check_migration(change.connection, &consumer, new).await?;
        check_slot(&mut change, new, &version).await?;
        if new.role == DeploymentRole::Stable {
            change.end_live(&new.slot, DeploymentRole::Stable, EndedHow::Superseded, None).await?;
        }
        let deployment_id = self.insert(&mut change, new, version.version_id).await?;
        change.finish(false).await?;
        let details = json!({ "deployment_id": deployment_id, "role": new.role, "event_type": new.slot.event_type,
            "event_versions": new.slot.event_versions, "handler": new.handler, "digest": hex::encode(&version.digest), "percent": new.percent,
            "grants": distinct(&new.grants) });
        self.0
            .audit()
            .record(
                &mut tx,
                action(new.role),
                Subject::of(&consumer.tenant, &consumer.name),
                details,
            )
            .await?;
        tx.commit().await?;
        self.announce(&consumer).await;
        self.get(consumer.consumer_id, deployment_id).await
    }

    /// Sets the share of a canary or a shadow. A canary keeps its ordering keys while its share
    /// grows. Returns the deployment.
    ///
    /// # Errors
    /// `Invalid` for a share out of range, or for a deployment without one. `Conflict` where it is
    /// not live.
    pub async fn set_percent(
        &self,
        tenant: &str,
        consumer: &str,
        deployment_id: i64,
        percent: f64,
    ) -> Result<Deployment, InboxError> {
        check_percent(percent)?;
        let consumer = self.0.consumers().get(tenant, consumer).await?;
        let mut tx = self.0.pool.begin().await?;
        let mut change = Change::begin(&mut tx, &consumer).await?;
        let deployment = change.live_by_id(deployment_id).await?;
        if deployment.role == DeploymentRole::Stable {
            return Err(InboxError::Invalid(format!(
                "deployment {deployment_id} is stable and takes everything that no canary takes"
            )));
        }
        let set =
            sqlx::query("UPDATE oncebox.deployment SET percent = $2 WHERE deployment_id = $1")
                .bind(deployment_id)
                .bind(percent);
        set.execute(&mut *change.connection).await?;
        change.finish(false).await?;
        let details = json!({ "deployment_id": deployment_id, "from": deployment.percent, "percent": percent });
        self.0
            .audit()
            .record(
                &mut tx,
                "deployment.percent",
                Subject::of(&consumer.tenant, &consumer.name),
                details,
            )
            .await?;
        tx.commit().await?;
        self.announce(&consumer).await;
        self.get(consumer.consumer_id, deployment_id).await
    }

    /// Makes a canary the stable deployment of its slot. Returns the deployment.
    ///
    /// # Errors
    /// `Invalid` where it is no canary. `Conflict` where it is not live.
    pub async fn promote(
        &self,
        tenant: &str,
        consumer: &str,
        deployment_id: i64,
    ) -> Result<Deployment, InboxError> {
        let consumer = self.0.consumers().get(tenant, consumer).await?;
        let mut tx = self.0.pool.begin().await?;
        let mut change = Change::begin(&mut tx, &consumer).await?;
        let canary = change.live_by_id(deployment_id).await?;
        if canary.role != DeploymentRole::Canary {
            return Err(InboxError::Invalid(format!(
                "deployment {deployment_id} is no canary; `oncebox deploy` makes a version live"
            )));
        }
        change.end(&canary, EndedHow::Promoted, None).await?;
        change.end_live(&canary.slot, DeploymentRole::Stable, EndedHow::Superseded, None).await?;
        let live = self.insert_again(&mut change, &canary, DeploymentRole::Stable).await?;
        change.finish(false).await?;
        let details = json!({ "deployment_id": live, "canary": deployment_id, "digest": hex::encode(&canary.digest) });
        self.0
            .audit()
            .record(
                &mut tx,
                "canary.promote",
                Subject::of(&consumer.tenant, &consumer.name),
                details,
            )
            .await?;
        tx.commit().await?;
        self.announce(&consumer).await;
        self.get(consumer.consumer_id, live).await
    }

    /// Ends a deployment. Messages of a slot without a stable deployment go to a wider slot, or
    /// have no handler. Returns the deployment.
    ///
    /// # Errors
    /// `Conflict` where it is not live, or where a canary needs it. `NotPropagated` where the
    /// tenant's own database does not know of the change yet.
    pub async fn end(
        &self,
        tenant: &str,
        consumer: &str,
        deployment_id: i64,
        reason: Option<&str>,
    ) -> Result<Deployment, InboxError> {
        let consumer = self.0.consumers().get(tenant, consumer).await?;
        let mut tx = self.0.pool.begin().await?;
        let mut change = Change::begin(&mut tx, &consumer).await?;
        let deployment = change.live_by_id(deployment_id).await?;
        if deployment.role == DeploymentRole::Stable {
            for role in [DeploymentRole::Canary, DeploymentRole::Shadow] {
                if let Some(other) = change.live(&deployment.slot, role).await? {
                    let text = format!(
                        "the {} {} runs beside it; end it first",
                        role.name(),
                        other.deployment_id
                    );
                    return Err(InboxError::conflict(text));
                }
            }
        }
        change.end(&deployment, EndedHow::Ended, reason).await?;
        change.finish(true).await?;
        let details =
            json!({ "deployment_id": deployment_id, "role": deployment.role, "reason": reason });
        self.0
            .audit()
            .record(
                &mut tx,
                "deployment.end",
                Subject::of(&consumer.tenant, &consumer.name),
                details,
            )
            .await?;
        tx.commit().await?;
        self.announce(&consumer).await;
        self.fence_replica(&consumer).await?;
        self.get(consumer.consumer_id, deployment_id).await
    }

    /// Writes the generation that claims must show into the tenant's own database, where the claims
    /// are made. Until that succeeds, the call reports an error: a host may still begin a
    /// transaction with the withdrawn version. Hosts repeat the write.
    pub(super) async fn fence_replica(&self, consumer: &Consumer) -> Result<(), InboxError> {
        let text = || {
            format!(
                "the change of `{}/{}` is made, but the tenant's own database does not know of it \
                    yet: hosts that reach it may still \
                 complete messages with what was withdrawn; they tell it as soon as it answers, \
                 `oncebox deployments` shows what is live",
                consumer.tenant, consumer.name
            )
        };
        let fenced = self.0.tenant_databases().replicate_named(&consumer.tenant).await;
        fenced
            .map_err(|source| InboxError::NotPropagated { text: text(), source: Box::new(source) })
    }

    /// Notifies the hosts that deployments changed. Call it after the commit. The notification is
    /// only a hint, because hosts also poll: a full notification queue must not stop a deployment.
    pub(crate) async fn announce(&self, consumer: &Consumer) {
        let notify = sqlx::query("SELECT pg_notify($1, $2)")
            .bind(CHANNEL)
            .bind(consumer.consumer_id.to_string());
        if let Err(error) = notify.execute(&self.0.pool).await {
            tracing::debug!(%error, "hosts were not told of a deployment; they find it by \
                themselves");
        }
    }

    async fn insert(
        &self,
        change: &mut Change<'_>,
        new: &NewDeployment,
        version_id: i32,
    ) -> Result<i64, InboxError> {
        const INSERT: &str = "INSERT INTO oncebox.deployment (consumer_id, event_type, \
            event_versions, version_id, settings, limits, \
            requires_migration, retries, role, percent, guard, generation, created_by, grants) \
            VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14) RETURNING \
            deployment_id";
        let guard = (new.role == DeploymentRole::Canary)
            .then(|| json!(new.guard.clone().unwrap_or_default()));
        let insert = sqlx::query_scalar(INSERT)
            .bind(change.consumer_id)
            .bind(&new.slot.event_type)
            .bind(&new.slot.event_versions)
            .bind(version_id)
            .bind(Value::Object(new.settings.clone()))
            .bind(Value::Object(new.limits.clone()))
            .bind(&new.requires_migration)
            .bind(new.retries.name())
            .bind(new.role.name())
            .bind(new.percent)
            .bind(guard)
            .bind(change.generation)
            .bind(&self.0.actor)
            .bind(distinct(&new.grants));
        Ok(insert.fetch_one(&mut *change.connection).await?)
    }

    /// Inserts a new row with the version, settings, limits and grants of the deployment `of`.
    pub(super) async fn insert_again(
        &self,
        change: &mut Change<'_>,
        of: &Deployment,
        role: DeploymentRole,
    ) -> Result<i64, InboxError> {
        let object = |value: &Value| value.as_object().cloned().unwrap_or_default();
        let new = NewDeployment {
            slot: of.slot.clone(),
            handler: of.handler.clone(),
            version: hex::encode(&of.digest),
            settings: object(&of.settings),
            limits: object(&of.limits),
            grants: of.grants.clone(),
            requires_migration: of.requires_migration.clone(),
            retries: of.retries,
            role,
            percent: None,
            guard: None,
        };
        self.insert(change, &new, of.version_id).await
    }
}

/// Notification channel on which hosts listen for changes.
pub const CHANNEL: &str = "oncebox_deployments";

impl<'a> Change<'a> {
    /// Locks the consumer's row, so that changes of its deployments run one after the other.
    pub(crate) async fn begin(
        connection: &'a mut PgConnection,
        consumer: &Consumer,
    ) -> Result<Self, InboxError> {
        let (state, generation, _) = lock(&mut *connection, consumer).await?;
        if state.is_deleting() {
            return Err(InboxError::conflict(format!(
                "consumer `{}/{}` is being deleted",
                consumer.tenant, consumer.name
            )));
        }
        Ok(Self { connection, consumer_id: consumer.consumer_id, generation: generation + 1 })
    }

    /// Reads the live deployment of a slot and role.
    pub(crate) async fn live(
        &mut self,
        slot: &Slot,
        role: DeploymentRole,
    ) -> Result<Option<Deployment>, InboxError> {
        const LIVE: &str = "WHERE d.consumer_id = $1 AND d.event_type = $2 AND d.event_versions IS \
            NOT DISTINCT FROM $3 AND d.role = $4 AND d.ended_at IS NULL";
        let query = select(LIVE)
            .bind(self.consumer_id)
            .bind(&slot.event_type)
            .bind(&slot.event_versions)
            .bind(role.name());
        Ok(query.fetch_optional(&mut *self.connection).await?)
    }

    /// Reads a deployment by its key, and refuses one that has ended.
    pub(crate) async fn live_by_id(
        &mut self,
        deployment_id: i64,
    ) -> Result<Deployment, InboxError> {
        const ONE: &str = "WHERE d.consumer_id = $1 AND d.deployment_id = $2";
        let found = select(ONE)
            .bind(self.consumer_id)
            .bind(deployment_id)
            .fetch_optional(&mut *self.connection)
            .await?;
        let found = found.ok_or_else(|| {
            InboxError::NotFound(format!("this consumer has no deployment {deployment_id}"))
        })?;
        match &found.ended_how {
            Some(how) => {
                Err(InboxError::conflict(format!("deployment {deployment_id} has ended: {how}")))
            }
            None => Ok(found),
        }
    }

    /// Ends the live deployment of a slot and role, where there is one.
    async fn end_live(
        &mut self,
        slot: &Slot,
        role: DeploymentRole,
        how: EndedHow,
        reason: Option<&str>,
    ) -> Result<(), InboxError> {
        match self.live(slot, role).await? {
            Some(live) => self.end(&live, how, reason).await,
            None => Ok(()),
        }
    }

    pub(crate) async fn end(
        &mut self,
        deployment: &Deployment,
        how: EndedHow,
        reason: Option<&str>,
    ) -> Result<(), InboxError> {
        const END: &str = "UPDATE oncebox.deployment SET ended_at = now(), ended_how = $2, \
            ended_reason = $3 WHERE deployment_id = $1";
        let end = sqlx::query(END).bind(deployment.deployment_id).bind(how.name()).bind(reason);
        end.execute(&mut *self.connection).await?;
        Ok(())
    }

    /// Writes the new generation to the consumer's row. With `fence`, claims of older generations
    /// are refused from the commit on.
    pub(crate) async fn finish(&mut self, fence: bool) -> Result<(), InboxError> {
        const RAISE: &str = "UPDATE oncebox.consumer SET generation = $2, \
            generation_required = CASE WHEN $3 THEN $2 ELSE generation_required END WHERE \
            consumer_id = $1";
        let raise = sqlx::query(RAISE).bind(self.consumer_id).bind(self.generation).bind(fence);
        raise.execute(&mut *self.connection).await?;
        Ok(())
    }
}

/// Returns names of grants in order, each once, so that rows with the same ones are equal.
pub(super) fn distinct(grants: &[String]) -> Vec<String> {
    let mut grants = grants.to_vec();
    grants.sort_unstable();
    grants.dedup();
    grants
}

fn action(role: DeploymentRole) -> &'static str {
    match role {
        DeploymentRole::Stable => "deploy",
        DeploymentRole::Canary => "canary.start",
        DeploymentRole::Shadow => "shadow.start",
    }
}

/// Returns the consumer's limits, overridden by those of a deployment.
///
/// # Errors
/// `Invalid` where the deployment's limits are not readable.
pub fn limits(policy: &Policy, over: &Value) -> Result<Limits, InboxError> {
    let mut limits = json!(policy.limits);
    if let (Some(limits), Some(over)) = (limits.as_object_mut(), over.as_object()) {
        limits.extend(over.clone());
    }
    serde_json::from_value(limits).map_err(|error| {
        InboxError::Invalid(format!("the deployment's limits are not readable: {error}"))
    })
}
