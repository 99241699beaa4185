//! Rollback to an earlier version, at once and on every host.

use oncebox_model::error::InboxError;
use serde_json::json;
use sqlx::PgConnection;

use super::{
    Deployment, DeploymentRole, Slot,
    check::{canary_runs, nothing_live},
    deploy::{Change, EndedHow},
    select, version,
};
use crate::{audit::Subject, handles::Deployments};

/// The result of a rollback.
#[derive(Debug, Clone, serde::Serialize)]
pub struct Rollback {
    /// Deployment that was withdrawn.
    pub withdrawn: Deployment,
    /// Deployment that is live instead; for a canary, the stable deployment of its slot.
    pub live: Deployment,
    /// Names of migrations that were applied since `live` was first deployed; they stay.
    pub migrations_kept: Vec<String>,
    /// Messages that the withdrawn version had failed and that run again.
    pub redriven: u64,
}

impl Deployments<'_> {
    /// Rolls a slot back to the version before, or to a named one that was deployed there before.
    /// Where a canary runs, the rollback withdraws the canary. With `redrive`, messages that the
    /// withdrawn version failed run again.
    ///
    /// # Errors
    /// `NotFound` where there is no such consumer, or no version to return to. `NotPropagated` where
    /// the tenant's own database does not know of the change yet.
    pub async fn roll_back(
        &self,
        tenant: &str,
        consumer: &str,
        slot: &Slot,
        to: Option<&str>,
        reason: Option<&str>,
        redrive: bool,
    ) -> Result<Rollback, InboxError> {
        let consumer = self.0.consumers().get(tenant, consumer).await?;
        let mut tx = self.0.pool.begin().await?;
        let mut change = Change::begin(&mut tx, &consumer).await?;
        let stable =
            change.live(slot, DeploymentRole::Stable).await?.ok_or_else(|| nothing_live(slot))?;
        let canary = change.live(slot, DeploymentRole::Canary).await?;
        let withdrawn = match (&canary, to) {
            (Some(canary), None) => canary.clone(),
            (Some(_), Some(_)) => return Err(canary_runs(slot)),
            (None, _) => stable.clone(),
        };
        let target =
            if canary.is_some() { stable } else { change.target(slot, &stable, to).await? };
        change.end(&withdrawn, EndedHow::RolledBack, reason).await?;
        let live_id = match canary {
            Some(_) => target.deployment_id,
            None => self.insert_again(&mut change, &target, DeploymentRole::Stable).await?,
        };
        change.finish(true).await?;
        let migrations_kept = migrations_since(&mut tx, consumer.tenant_id, &target).await?;
        let details = json!({ "event_type": slot.event_type, "event_versions": slot.event_versions, "withdrawn": withdrawn.deployment_id,
            "withdrawn_digest": hex::encode(&withdrawn.digest), "digest": hex::encode(&target.digest), "reason": reason });
        self.0
            .audit()
            .record(&mut tx, "rollback", Subject::of(&consumer.tenant, &consumer.name), details)
            .await?;
        let redriven = if redrive {
            self.redrive_withdrawn(&mut tx, &consumer, &withdrawn).await?
        } else {
            Some(0)
        };
        tx.commit().await?;
        self.announce(&consumer).await;
        self.fence_replica(&consumer).await?;
        let redriven = match redriven {
            Some(redriven) => redriven,
            None => self.0.tenant_databases().redriven(withdrawn.deployment_id).await?,
        };
        let live = self.get(consumer.consumer_id, live_id).await?;
        let withdrawn = self.get(consumer.consumer_id, withdrawn.deployment_id).await?;
        Ok(Rollback { withdrawn, live, migrations_kept, redriven })
    }
}

impl Change<'_> {
    /// Finds the earlier deployment that a rollback restores. Without `to`, it skips deployments
    /// that were rolled back, and those that equal the live one.
    async fn target(
        &mut self,
        slot: &Slot,
        live: &Deployment,
        to: Option<&str>,
    ) -> Result<Deployment, InboxError> {
        const EARLIER: &str = "WHERE d.consumer_id = $1 AND d.event_type = $2 AND d.event_versions \
            IS NOT DISTINCT FROM $3 \
            AND d.role = 'stable' AND d.ended_at IS NOT NULL \
            AND CASE WHEN $4::text IS NULL THEN d.ended_how <> 'rolled_back' AND (d.version_id, \
            d.settings, d.limits, d.grants) <> ($5, $6, $7, $8) \
                     AND NOT EXISTS (SELECT FROM oncebox.deployment w WHERE w.consumer_id = \
                     d.consumer_id AND w.event_type = d.event_type \
                         AND w.event_versions IS NOT DISTINCT FROM d.event_versions AND \
                         w.ended_how = 'rolled_back' AND w.deployment_id > d.deployment_id \
                         AND (w.version_id, w.settings, w.limits, w.grants) = (d.version_id, \
                         d.settings, d.limits, d.grants)) \
                     ELSE encode(v.digest, 'hex') LIKE $4 || '%' END \
            ORDER BY d.deployment_id DESC LIMIT 1";
        let to = to.map(version::check_prefix).transpose()?;
        let query = select(EARLIER)
            .bind(self.consumer_id)
            .bind(&slot.event_type)
            .bind(&slot.event_versions)
            .bind(&to)
            .bind(live.version_id)
            .bind(&live.settings)
            .bind(&live.limits)
            .bind(&live.grants);
        let found = query.fetch_optional(&mut *self.connection).await?;
        found.ok_or_else(|| {
            InboxError::NotFound(match to {
                Some(to) => format!(
                    "version `{to}` was never live for {slot}; `oncebox deploy \
                    --version {to}` makes it so"
                ),
                None => format!(
                    "there is no version before the live one of {slot} to go back to; `oncebox \
                        deployments --history` shows what there was"
                ),
            })
        })
    }
}

async fn migrations_since(
    connection: &mut PgConnection,
    tenant_id: i32,
    target: &Deployment,
) -> Result<Vec<String>, InboxError> {
    const SINCE: &str = "SELECT name FROM oncebox.tenant_migration WHERE tenant_id = $1 AND \
        applied_at > $2 ORDER BY applied_at, name";
    let ended = target.ended_at.unwrap_or(target.created_at);
    Ok(sqlx::query_scalar(SINCE)
        .bind(tenant_id)
        .bind(ended.min(target.created_at))
        .fetch_all(connection)
        .await?)
}
