//! The start of a job, and the estimate of what it would change.

use std::time::Duration;

use oncebox_model::error::InboxError;
use serde_json::json;
use sqlx::{AssertSqlSafe, Executor, PgConnection, types::Json};

use super::{JobAction, JobTarget, filter::JobFilter, job::Job};
use crate::{
    deployments::deploy::CHANNEL,
    handles::Jobs,
    messages::bulk::{Action, Selection, refuse_erased},
    outgoing::act,
    replays::plan::in_time,
    tenants::moves::check_may_begin,
};

/// Longest count of an estimate.
const ESTIMATE_TIME: Duration = Duration::from_secs(2);
/// Most messages that an estimate counts.
const ESTIMATE_MAX: i64 = 100_000;
/// Most jobs of a tenant that are not over.
const OPEN_MAX: i64 = 20;
/// Most messages per second that a job can be limited to.
const RATE_MAX: u32 = 100_000;

/// A job to start.
#[derive(Debug, Clone)]
pub struct NewJob {
    /// Action.
    pub action: JobAction,
    /// Name of the consumer; none only for outgoing messages, for those of all consumers.
    pub consumer: Option<String>,
    /// Messages that it selects.
    pub filter: JobFilter,
    /// Reason; stored with each message of an inbox and in the audit log.
    pub reason: String,
    /// Most messages per second; none for no limit.
    pub rate: Option<u32>,
}

/// The number of messages that a job would change.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct JobEstimate {
    /// Messages that were counted.
    pub messages: i64,
    /// Whether the count looked at all messages; else there are at least as many.
    pub is_counted_whole: bool,
}

impl Jobs<'_> {
    /// Counts the messages that a job would change, for as long as a request may. Changes nothing.
    ///
    /// # Errors
    /// Those of [`Self::start`] for the same job.
    pub async fn estimate(&self, tenant: &str, new: &NewJob) -> Result<JobEstimate, InboxError> {
        let target = self.checked(tenant, new).await?;
        self.counted(&target, new).await
    }

    /// Starts a job. Hosts work on it from then on.
    ///
    /// # Errors
    /// `NotFound` where there is no such tenant or consumer. `Invalid` for a filter that the action
    /// does not have. `Conflict` where the consumer is being deleted, where a message to run again
    /// is erased, and where too many jobs of the tenant are not over.
    pub async fn start(&self, tenant: &str, new: &NewJob) -> Result<Job, InboxError> {
        let target = self.checked(tenant, new).await?;
        let estimate = self.counted(&target, new).await?;
        let mut tx = target.database.pool.begin().await?;
        check_may_begin(&self.0.pool, &mut tx, target.tenant_id).await?;
        refuse_too_many(&mut tx, &target).await?;
        forget_old(&mut tx, &target).await?;
        let job_id = self.insert(&mut tx, &target, new, estimate).await?;
        let details = json!({
            "job_id": job_id, "reason": new.reason, "filter": new.filter, "rate": new.rate,
        });
        let action = new.action.audited();
        let audit = self.0.audit();
        audit
            .record_beside(
                &mut tx,
                target.database.is_dedicated,
                &action,
                target.subject(),
                details,
            )
            .await?;
        tx.commit().await?;
        self.announce(&target).await;
        self.show(tenant, job_id).await
    }

    async fn checked(&self, tenant: &str, new: &NewJob) -> Result<JobTarget, InboxError> {
        new.filter.check(new.action)?;
        if new.rate.is_some_and(|rate| !(1..=RATE_MAX).contains(&rate)) {
            return Err(InboxError::Invalid(format!(
                "`rate` is in messages per second, from 1 to {RATE_MAX}; leave it out for no limit"
            )));
        }
        let target = self.target(tenant, new.consumer.as_deref()).await?;
        if target.consumer.as_ref().is_some_and(|consumer| consumer.state.is_deleting()) {
            return Err(InboxError::conflict(format!(
                "consumer `{tenant}/{}` is being deleted",
                new.consumer.as_deref().unwrap_or_default()
            )));
        }
        match (new.action, &target.consumer, &new.filter.ids) {
            (JobAction::Inbox(_), None, _) => Err(InboxError::Invalid(format!(
                "the action `{}` is on messages of one consumer; name it with `consumer`",
                new.action.name()
            ))),
            (JobAction::Inbox(Action::Redrive | Action::Retry), Some(consumer), Some(ids)) => {
                refuse_erased(&target.database.pool, consumer, ids).await?;
                Ok(target)
            }
            _ => Ok(target),
        }
    }

    async fn counted(&self, target: &JobTarget, new: &NewJob) -> Result<JobEstimate, InboxError> {
        let versions = self.0.messages().versions_like(new.filter.version.as_deref()).await?;
        let mut tx = target.database.pool.begin().await?;
        let set = format!(
            "SET LOCAL statement_timeout = {}; SET LOCAL jit = off",
            ESTIMATE_TIME.as_millis()
        );
        tx.execute(sqlx::raw_sql(AssertSqlSafe(set))).await?;
        let counted = match (new.action, &target.consumer) {
            (JobAction::Inbox(action), Some(consumer)) => {
                let selection = Selection {
                    consumer_id: consumer.consumer_id,
                    class: consumer.policy()?.retention.class(),
                    action,
                    filter: &new.filter.of_inbox()?,
                    versions: &versions,
                    ids: new.filter.ids.as_deref(),
                    as_of: sqlx::query_scalar("SELECT now()").fetch_one(&mut *tx).await?,
                };
                selection.count(&mut tx, ESTIMATE_MAX).await
            }
            (JobAction::Outgoing(action), consumer) => {
                let name = consumer.as_ref().map(|consumer| &*consumer.name);
                let filter = new.filter.of_outgoing(name)?;
                act::count(&mut tx, &target.tenant, action, &filter, ESTIMATE_MAX).await
            }
            (JobAction::Inbox(_), None) => Ok(0), // refused before
        };
        let counted = in_time(counted)?;
        tx.rollback().await?; // it was begun for its time limit
        Ok(JobEstimate {
            messages: counted.unwrap_or(0),
            is_counted_whole: counted.is_some_and(|messages| messages < ESTIMATE_MAX),
        })
    }

    async fn insert(
        &self,
        connection: &mut PgConnection,
        target: &JobTarget,
        new: &NewJob,
        estimate: JobEstimate,
    ) -> Result<i64, InboxError> {
        const INSERT: &str = "INSERT INTO oncebox.job (tenant_id, consumer_id, action, filter, \
                rate, actor, reason, estimate, is_counted_whole) \
            VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9) RETURNING job_id";
        let query = sqlx::query_scalar(INSERT)
            .bind(target.tenant_id)
            .bind(target.consumer.as_ref().map(|consumer| consumer.consumer_id))
            .bind(new.action.name())
            .bind(Json(&new.filter))
            .bind(new.rate.map(|rate| rate as i32)) // at most RATE_MAX
            .bind(&self.0.actor)
            .bind(&new.reason)
            .bind(estimate.messages)
            .bind(estimate.is_counted_whole);
        Ok(query.fetch_one(connection).await?)
    }

    /// Notifies the hosts that a job can be worked on. The notification is only a hint, since hosts
    /// also poll.
    pub(super) async fn announce(&self, target: &JobTarget) {
        let database = target.database_name.as_deref().unwrap_or_default();
        let notify = sqlx::query("SELECT pg_notify($1, $2)")
            .bind(CHANNEL)
            .bind(format!("{JOB_NOTE}{database}"));
        if let Err(error) = notify.execute(&self.0.pool).await {
            tracing::debug!(%error, "hosts were not told of a job; they find it by themselves");
        }
    }
}

/// Begin of a notification of a job. The name of the database follows, where that is not the host's.
pub const JOB_NOTE: &str = "job ";

/// Deletes the jobs of a tenant that have been over for long.
async fn forget_old(connection: &mut PgConnection, target: &JobTarget) -> Result<(), InboxError> {
    const FORGET: &str =
        "DELETE FROM oncebox.job WHERE tenant_id = $1 AND ended_at < now() - interval '90 days'";
    sqlx::query(FORGET).bind(target.tenant_id).execute(connection).await?;
    Ok(())
}

async fn refuse_too_many(
    connection: &mut PgConnection,
    target: &JobTarget,
) -> Result<(), InboxError> {
    // Under this lock nobody starts another one meanwhile.
    const LOCK: &str = "SELECT FROM oncebox.tenant WHERE tenant_id = $1 FOR NO KEY UPDATE";
    const OPEN: &str = "SELECT count(*) FROM oncebox.job WHERE tenant_id = $1 \
        AND state IN ('running', 'paused')";
    sqlx::query(LOCK).bind(target.tenant_id).execute(&mut *connection).await?;
    let open: i64 = sqlx::query_scalar(OPEN).bind(target.tenant_id).fetch_one(connection).await?;
    match open < OPEN_MAX {
        true => Ok(()),
        false => Err(InboxError::conflict(format!(
            "{open} jobs of tenant `{}` are not over; wait for one of them, or cancel one with \
                `oncebox job cancel`",
            target.tenant
        ))),
    }
}
