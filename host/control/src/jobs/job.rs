//! Jobs that were started: lists, and the actions of operators on them.

use std::collections::BTreeMap;

use chrono::{DateTime, Utc};
use oncebox_model::error::InboxError;
use serde_json::json;
use sqlx::{AssertSqlSafe, types::Json};

use super::filter::JobFilter;
use crate::handles::Jobs;

/// Most jobs of a list, from the newest on.
const LIST_MAX: i64 = 200;

/// A job, as its row has it.
#[derive(Debug, Clone, sqlx::FromRow)]
pub struct Job {
    /// Key.
    pub job_id: i64,
    /// Name of the tenant.
    pub tenant: String,
    /// Name of the consumer; none for outgoing messages of all consumers.
    pub consumer: Option<String>,
    /// Name of the action.
    pub action: String,
    /// State: `running`, `paused`, `done` or `cancelled`.
    pub state: String,
    /// Messages that it selects; in a list without the ids.
    pub filter: Json<JobFilter>,
    /// Number of ids in the filter; none where it has none.
    pub ids: Option<i64>,
    /// Latest time by which a message was received, or became a dead letter.
    pub as_of: DateTime<Utc>,
    /// Most messages per second; none for no limit.
    pub rate: Option<i32>,
    /// Actor who started it.
    pub actor: String,
    /// Reason for the start.
    pub reason: String,
    /// Messages that were counted before the start.
    pub estimate: i64,
    /// Whether that count looked at all messages; else there were at least as many.
    pub is_counted_whole: bool,
    /// Time of the start.
    pub began_at: DateTime<Utc>,
    /// Time of the end; none before it.
    pub ended_at: Option<DateTime<Utc>>,
    /// Messages that it changed.
    pub changed: i64,
    /// Messages that it left out in its last pass, by reason.
    pub left_out: Json<BTreeMap<String, i64>>,
    /// Number of the pass over the messages.
    pub pass: i32,
    /// Reason for which hosts paused it.
    pub note: Option<String>,
    /// Host that works on it; none where none does.
    pub host: Option<String>,
}

/// An action of an operator on a job.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum JobControl {
    /// Hosts stop to work on it after the page under way.
    Pause,
    /// Hosts go on with it.
    Resume,
    /// It ends where it is. What it changed stays.
    Cancel,
}

impl JobControl {
    /// Returns the action's name in the audit log.
    pub fn name(self) -> &'static str {
        match self {
            Self::Pause => "job.pause",
            Self::Resume => "job.resume",
            Self::Cancel => "job.cancel",
        }
    }

    /// Returns the columns that the action sets, and the states that it acts in.
    fn change(self) -> (&'static str, &'static str) {
        match self {
            Self::Pause => (
                "state = 'paused', epoch = epoch + 1, locked_until = NULL, locked_by = NULL, \
                    note = NULL",
                "'running'",
            ),
            Self::Resume => {
                ("state = 'running', crashes = 0, note = NULL, due_at = now()", "'paused'")
            }
            Self::Cancel => (
                "state = 'cancelled', ended_at = now(), epoch = epoch + 1, locked_until = NULL, \
                    locked_by = NULL",
                "'running', 'paused'",
            ),
        }
    }

    /// Returns the state after the action.
    fn after(self) -> &'static str {
        match self {
            Self::Pause => "paused",
            Self::Resume => "running",
            Self::Cancel => "cancelled",
        }
    }
}

/// Columns of a job, with the names of its tenant and its consumer.
const SELECT: &str = "SELECT j.job_id, t.name AS tenant, c.name AS consumer, j.action, j.state, \
        {filter} AS filter, jsonb_array_length(j.filter->'ids')::bigint AS ids, j.as_of, j.rate, \
        j.actor, j.reason, j.estimate, j.is_counted_whole, j.began_at, j.ended_at, j.changed, j.left_out, j.pass, j.note, j.locked_by AS host \
    FROM oncebox.job j JOIN oncebox.tenant t USING (tenant_id) \
    LEFT JOIN oncebox.consumer c USING (consumer_id)";

impl Jobs<'_> {
    /// Lists the jobs of a tenant, or those on one of its consumers, newest first.
    ///
    /// # Errors
    /// `NotFound` where there is no such tenant or consumer, or an error of a database.
    pub async fn list(&self, tenant: &str, consumer: Option<&str>) -> Result<Vec<Job>, InboxError> {
        let row = self.0.tenants().get(tenant).await?;
        if let Some(consumer) = consumer {
            self.0.consumers().get(tenant, consumer).await?;
        }
        let database = self.0.tenant_databases().get(&row)?;
        // A thousand ids for each job of a list would be more than an answer.
        let select = SELECT.replace("{filter}", "j.filter - 'ids'");
        let list = format!(
            "{select} WHERE t.name = $1 AND ($2::text IS NULL OR c.name = $2) \
                ORDER BY j.job_id DESC LIMIT $3"
        );
        let query = sqlx::query_as(AssertSqlSafe(list)).bind(tenant).bind(consumer).bind(LIST_MAX);
        Ok(query.fetch_all(&database.pool).await?)
    }

    /// Returns one job of a tenant.
    ///
    /// # Errors
    /// `NotFound` where there is no such tenant or job, or an error of a database.
    pub async fn show(&self, tenant: &str, job_id: i64) -> Result<Job, InboxError> {
        let database = self.0.tenant_databases().get(&self.0.tenants().get(tenant).await?)?;
        let select = SELECT.replace("{filter}", "j.filter");
        let one = format!("{select} WHERE j.job_id = $1 AND t.name = $2");
        let query = sqlx::query_as(AssertSqlSafe(one)).bind(job_id).bind(tenant);
        query.fetch_optional(&database.pool).await?.ok_or_else(|| {
            InboxError::NotFound(format!(
                "there is no job {job_id} of tenant `{tenant}`; `oncebox job list` shows those \
                    that there are"
            ))
        })
    }

    /// Pauses, resumes or cancels a job. An action that is done already changes nothing and writes
    /// no audit row. Returns the job.
    ///
    /// # Errors
    /// `NotFound` where there is no such job, `Conflict` where its state has no such action.
    pub async fn act(
        &self,
        tenant: &str,
        job_id: i64,
        action: JobControl,
    ) -> Result<Job, InboxError> {
        let before = self.show(tenant, job_id).await?;
        let target = self.target(tenant, before.consumer.as_deref()).await?;
        let details = json!({ "job_id": job_id });
        let (set, states) = action.change();
        let mut tx = target.database.pool.begin().await?;
        let change = format!(
            "UPDATE oncebox.job SET {set} WHERE job_id = $1 AND tenant_id = $2 \
                AND state IN ({states})"
        );
        let query = sqlx::query(AssertSqlSafe(change)).bind(job_id).bind(target.tenant_id);
        if query.execute(&mut *tx).await?.rows_affected() == 0 {
            tx.rollback().await?;
            return self.not_acted(tenant, job_id, action).await;
        }
        let (audit, subject) = (self.0.audit(), target.subject());
        audit
            .record_beside(&mut tx, target.database.is_dedicated, action.name(), subject, details)
            .await?;
        tx.commit().await?;
        self.announce(&target).await;
        self.show(tenant, job_id).await
    }

    /// Returns a job that an action did not change, since it is as the action leaves it, or the
    /// refusal.
    async fn not_acted(
        &self,
        tenant: &str,
        job_id: i64,
        action: JobControl,
    ) -> Result<Job, InboxError> {
        let job = self.show(tenant, job_id).await?;
        match job.state == action.after() {
            true => Ok(job),
            false => Err(InboxError::conflict(format!(
                "job {job_id} of tenant `{tenant}` is {}, so there is nothing to do",
                job.state
            ))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    // What could go wrong: an action leaves a lease or a time that the table's constraints refuse,
    // or brings a job back that is over.
    #[test]
    fn an_action_leaves_no_lease_and_no_end_behind() {
        for action in [JobControl::Pause, JobControl::Resume, JobControl::Cancel] {
            let (set, states) = action.change();
            assert!(!states.contains("done") && !states.contains("cancelled"), "{states}");
            assert!(set.starts_with(&format!("state = '{}'", action.after())), "{set}");
            let is_running = action == JobControl::Resume;
            assert_eq!(set.contains("locked_until = NULL"), !is_running, "{set}");
            assert_eq!(set.contains("ended_at = now()"), action == JobControl::Cancel);
            assert!(action.name().starts_with("job."));
        }
    }
}
