//! Canaries: counts of their runs, and the verdict over them.

use oncebox_model::{error::InboxError, policy::PayloadPolicy};
use sqlx::PgConnection;

use crate::{
    audit::Subject,
    consumers::Consumer,
    deployments::{
        Deployment, Guard,
        deploy::{Change, EndedHow},
        select,
    },
    handles::Deployments,
    tenants::moves::check_is_here,
};

/// Counts of a deployment's runs that ended since the last report.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Outcomes {
    /// Key of the deployment.
    pub deployment_id: i64,
    /// Runs that completed.
    pub completed: i64,
    /// Runs that did not complete.
    pub failed: i64,
}

/// Failure counts of a canary and of the stable deployment of its slot, over the guard's window.
#[derive(Debug, Clone, PartialEq, serde::Serialize, sqlx::FromRow)]
pub struct CanaryRates {
    /// Key of the canary.
    pub deployment_id: i64,
    /// Runs of the canary that completed.
    pub completed: i64,
    /// Runs of the canary that did not complete.
    pub failed: i64,
    /// Runs of the stable deployment that completed.
    pub stable_completed: i64,
    /// Runs of the stable deployment that did not complete.
    pub stable_failed: i64,
}

impl CanaryRates {
    /// Returns the reason for which the guard ends the canary; none while the canary is within the
    /// guard.
    pub fn breach(&self, guard: &Guard) -> Option<String> {
        let runs = self.completed + self.failed;
        let stable_runs = self.stable_completed + self.stable_failed;
        let (rate, stable_rate) =
            (percent(self.failed, runs), percent(self.stable_failed, stable_runs));
        if runs < guard.messages_min.into() || rate <= stable_rate + guard.margin_percent {
            return None;
        }
        Some(format!(
            "{} of {runs} runs failed within {} s ({rate:.1} %), of the stable version {} of \
                {stable_runs} ({stable_rate:.1} %); \
             the guard allows {} points more",
            self.failed, guard.window_s, self.stable_failed, guard.margin_percent
        ))
    }
}

fn percent(part: i64, whole: i64) -> f64 {
    if whole == 0 { 0.0 } else { part as f64 * 100.0 / whole as f64 }
}

/// A canary that its guard withdrew.
#[derive(Debug, Clone)]
pub struct Withdrawn {
    /// The withdrawn canary.
    pub deployment: Deployment,
    /// Reason for the withdrawal.
    pub reason: String,
    /// Messages that the canary had failed and that the stable version runs again.
    pub redriven: u64,
}

impl Deployments<'_> {
    /// Adds the counts of runs in slots that have a canary. Deletes counts that are older than a
    /// day.
    ///
    /// # Errors
    /// An error of the host's database.
    pub async fn count_outcomes(&self, outcomes: &[Outcomes]) -> Result<(), InboxError> {
        const COUNT: &str = "INSERT INTO oncebox.deployment_outcome AS o (deployment_id, at, \
            completed, failed) \
            SELECT u.id, date_trunc('second', now()), u.completed, u.failed FROM \
            unnest($1::bigint[], $2::bigint[], $3::bigint[]) AS u(id, completed, failed) \
            ON CONFLICT (deployment_id, at) DO UPDATE SET completed = o.completed + \
            excluded.completed, failed = o.failed + excluded.failed";
        let mut outcomes = outcomes.to_vec();
        // Rows are locked in the order of their keys, so that two hosts do not wait for each other.
        outcomes.sort_by_key(|outcome| outcome.deployment_id);
        let query = sqlx::query(COUNT)
            .bind(outcomes.iter().map(|o| o.deployment_id).collect::<Vec<_>>())
            .bind(outcomes.iter().map(|o| o.completed).collect::<Vec<_>>())
            .bind(outcomes.iter().map(|o| o.failed).collect::<Vec<_>>());
        query.execute(&self.0.pool).await?;
        sqlx::query("DELETE FROM oncebox.deployment_outcome WHERE at < now() - interval '1 day'")
            .execute(&self.0.pool)
            .await?;
        Ok(())
    }

    /// Sums the runs of a canary and of its stable deployment, over the window of the canary's
    /// guard.
    ///
    /// # Errors
    /// An error of the host's database.
    pub async fn canary_rates(&self, canary: &Deployment) -> Result<CanaryRates, InboxError> {
        const RATES: &str = "SELECT $1::bigint AS deployment_id, \
                coalesce(sum(o.completed) FILTER (WHERE o.deployment_id = $1), 0)::bigint AS \
                completed, \
                coalesce(sum(o.failed) FILTER (WHERE o.deployment_id = $1), 0)::bigint AS failed, \
                coalesce(sum(o.completed) FILTER (WHERE o.deployment_id <> $1), 0)::bigint AS \
                stable_completed, \
                coalesce(sum(o.failed) FILTER (WHERE o.deployment_id <> $1), 0)::bigint AS \
                stable_failed \
            FROM oncebox.deployment_outcome o JOIN oncebox.deployment d USING (deployment_id) \
            JOIN oncebox.deployment c ON c.deployment_id = $1 AND d.consumer_id = c.consumer_id \
            AND d.event_type = c.event_type \
                AND d.event_versions IS NOT DISTINCT FROM c.event_versions \
            WHERE (d.deployment_id = $1 OR (d.role = 'stable' AND d.ended_at IS NULL)) AND o.at > \
            now() - make_interval(secs => $2)";
        let window = canary.guard.as_ref().map_or(0, |guard| guard.window_s);
        Ok(sqlx::query_as(RATES)
            .bind(canary.deployment_id)
            .bind(f64::from(window))
            .fetch_one(&self.0.pool)
            .await?)
    }

    /// Withdraws those canaries of a consumer that fail too often, and returns them. Any host may
    /// call this, and several at once.
    ///
    /// # Errors
    /// An error of the host's database or of the tenant's.
    pub async fn judge_canaries(&self, consumer: &Consumer) -> Result<Vec<Withdrawn>, InboxError> {
        const CANARIES: &str =
            "WHERE d.consumer_id = $1 AND d.role = 'canary' AND d.ended_at IS NULL";
        let mut withdrawn = Vec::new();
        for canary in select(CANARIES).bind(consumer.consumer_id).fetch_all(&self.0.pool).await? {
            let Some(guard) = &canary.guard else { continue };
            let Some(reason) = self.canary_rates(&canary).await?.breach(guard) else { continue };
            withdrawn.extend(self.withdraw_canary(consumer, &canary, reason).await?);
        }
        Ok(withdrawn)
    }

    async fn withdraw_canary(
        &self,
        consumer: &Consumer,
        canary: &Deployment,
        reason: String,
    ) -> Result<Option<Withdrawn>, InboxError> {
        let mut tx = self.0.pool.begin().await?;
        let mut change = Change::begin(&mut tx, consumer).await?;
        // Another host or an operator may have ended the canary first.
        let deployment = match change.live_by_id(canary.deployment_id).await {
            Ok(deployment) => deployment,
            Err(InboxError::Conflict { .. }) => return Ok(None),
            Err(error) => return Err(error),
        };
        change.end(&deployment, EndedHow::RolledBack, Some(&reason)).await?;
        change.finish(true).await?;
        let details = serde_json::json!({ "deployment_id": deployment.deployment_id, "event_type": deployment.slot.event_type,
            "digest": hex::encode(&deployment.digest), "reason": reason });
        let host = self.0.acting_as("oncebox");
        host.audit()
            .record(
                &mut tx,
                "canary.rollback",
                Subject::of(&consumer.tenant, &consumer.name),
                details,
            )
            .await?;
        let redriven =
            self.redrive_withdrawn(&mut tx, consumer, &deployment).await?.unwrap_or_default();
        tx.commit().await?;
        // The caller waits for no tenant's database. The announcement makes a host read the
        // deployments and update that database.
        self.announce(consumer).await;
        Ok(Some(Withdrawn { deployment, reason, redriven }))
    }

    /// Redrives the messages that a withdrawn deployment failed, in the transaction that withdraws
    /// it. Returns none where the messages are in the tenant's own database, which that transaction
    /// does not reach. The transaction then sets `redrive_pending`.
    pub(crate) async fn redrive_withdrawn(
        &self,
        connection: &mut PgConnection,
        consumer: &Consumer,
        withdrawn: &Deployment,
    ) -> Result<Option<u64>, InboxError> {
        const ELSEWHERE: &str =
            "SELECT database_url IS NOT NULL FROM oncebox.tenant WHERE tenant_id = $1";
        const MARK: &str =
            "UPDATE oncebox.deployment SET redrive_pending = true WHERE deployment_id = $1";
        if sqlx::query_scalar(ELSEWHERE)
            .bind(consumer.tenant_id)
            .fetch_one(&mut *connection)
            .await?
        {
            sqlx::query(MARK).bind(withdrawn.deployment_id).execute(connection).await?;
            return Ok(None);
        }
        check_is_here(connection, consumer.consumer_id).await?;
        let keeps_payloads = consumer.policy()?.payload != PayloadPolicy::None;
        redrive(connection, consumer.consumer_id, withdrawn, keeps_payloads).await.map(Some)
    }
}

/// Redrives the messages that a withdrawn deployment failed, with the live version. Rows that kept
/// no payload cannot run again, unless they wait for a retry. Messages under a lease return without
/// this.
pub(crate) async fn redrive(
    connection: &mut PgConnection,
    consumer_id: i32,
    withdrawn: &Deployment,
    keeps_payloads: bool,
) -> Result<u64, InboxError> {
    const REDRIVE: &str = "UPDATE oncebox.inbox i SET status = 'failed_retryable', next_attempt_at \
        = now(), processed_at = NULL, \
            bucket = oncebox.bucket_at(i.retention_class, now()) \
        FROM oncebox.consumer c WHERE c.consumer_id = $1 AND i.consumer_id = $1 AND \
        i.retention_class = c.retention_class \
            AND i.version_id = $2 AND i.status IN ('failed_retryable', 'failed_terminal', \
            'parked') AND i.received_at >= $3 AND i.reason IS DISTINCT FROM 'horizon' \
            AND (i.status = 'failed_retryable' OR $4)";
    // Messages received before this deployment began are left out: they failed under an earlier
    // deployment, and an operator has decided about them.
    let redrive = sqlx::query(REDRIVE)
        .bind(consumer_id)
        .bind(withdrawn.version_id)
        .bind(withdrawn.created_at)
        .bind(keeps_payloads);
    Ok(redrive.execute(connection).await?.rows_affected())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(canary: [i64; 2], stable: [i64; 2], is_breach: bool) {
        let rates = CanaryRates {
            deployment_id: 1,
            completed: canary[0],
            failed: canary[1],
            stable_completed: stable[0],
            stable_failed: stable[1],
        };
        assert_eq!(rates.breach(&Guard::default()).is_some(), is_breach, "{rates:?}");
    }

    #[test]
    fn a_canary_is_compared_with_the_stable_version() {
        check([80, 20], [1_000, 0], true);
        check([80, 20], [800, 200], false);
        check([10, 9], [1_000, 0], false); // too few runs to tell
        check([95, 5], [1_000, 0], false); // within the margin
        check([0, 20], [0, 0], true);
    }
}
