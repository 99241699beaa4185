//! Replays that were started: lists, and the actions of operators on them.

use chrono::{DateTime, Utc};
use oncebox_model::error::InboxError;
use serde_json::json;
use sqlx::{AssertSqlSafe, types::Json};

use super::{filter::ReplayFilter, start::already_open};
use crate::handles::Replays;

/// Most replays of a list, from the newest on.
const LIST_MAX: i64 = 200;

/// A replay, as its row has it.
#[derive(Debug, Clone, sqlx::FromRow)]
pub struct ReplayJob {
    /// Key.
    pub replay_id: i64,
    /// Name of the tenant.
    pub tenant: String,
    /// Name of the consumer.
    pub consumer: String,
    /// State: `planned`, `running`, `paused`, `done` or `cancelled`.
    pub state: String,
    /// The policy's `replay.kind` at the plan.
    pub kind: String,
    /// The policy's `replay.emit` at the plan.
    pub emit: String,
    /// Messages that it selects.
    pub filter: Json<ReplayFilter>,
    /// Time before which a message must have completed.
    pub until_at: DateTime<Utc>,
    /// Time of the plan.
    pub planned_at: DateTime<Utc>,
    /// Actor of the plan.
    pub planned_by: String,
    /// Actor of the start; none before it.
    pub actor: Option<String>,
    /// Reason for the start; none before it.
    pub reason: Option<String>,
    /// Time of the start; none before it.
    pub began_at: Option<DateTime<Utc>>,
    /// Time of the end; none before it.
    pub ended_at: Option<DateTime<Utc>>,
    /// Completion time of the message that it came to last; none before the first.
    pub cursor_at: Option<DateTime<Utc>>,
    /// Messages that the plan found.
    pub found: i64,
    /// Whether the plan counted all of them; else there are at least as many.
    pub is_counted_whole: bool,
    /// Messages that ran.
    pub replayed: i64,
    /// Messages that failed and were rolled back.
    pub failed: i64,
    /// Messages without a stored record.
    pub without_payload: i64,
    /// Messages that were not as they were planned.
    pub changed: i64,
    /// Outgoing messages that were not sent.
    pub suppressed: i64,
    /// Generation of the consumer's deployments at the plan.
    pub generation: i64,
    /// Generation that ran the last message; none before the first.
    pub generation_last: Option<i64>,
    /// Reason for which hosts paused it.
    pub note: Option<String>,
    /// Host that works on it; none where none does.
    pub host: Option<String>,
}

/// A message of a replay that failed.
#[derive(Debug, Clone, sqlx::FromRow)]
pub struct ReplayFailure {
    /// Id of the message.
    pub message_id: String,
    /// Time of the failure.
    pub at: DateTime<Utc>,
    /// Kind of the failure.
    pub reason: String,
    /// Text of the failure; none where the message was erased.
    pub error: Option<String>,
}

/// A replay with the first of its failures.
#[derive(Debug, Clone)]
pub struct ReplayDetail {
    /// The replay.
    pub job: ReplayJob,
    /// Its first failures, at most a hundred.
    pub failures: Vec<ReplayFailure>,
}

/// An action of an operator on a replay.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReplayAction {
    /// Hosts stop to work on it before the next message.
    Pause,
    /// Hosts go on with it.
    Resume,
    /// It ends where it is. What was replayed stays.
    Cancel,
}

impl ReplayAction {
    /// Returns the action's name in the audit log.
    pub fn name(self) -> &'static str {
        match self {
            Self::Pause => "replay.pause",
            Self::Resume => "replay.resume",
            Self::Cancel => "replay.cancel",
        }
    }

    /// Returns the columns that the action sets, and the states that it acts in.
    fn change(self) -> (&'static str, &'static str) {
        match self {
            Self::Pause => (
                "state = 'paused', locked_until = NULL, locked_by = NULL, note = NULL",
                "'running'",
            ),
            Self::Resume => {
                ("state = 'running', crashes = 0, failures_in_a_row = 0, note = NULL", "'paused'")
            }
            Self::Cancel => (
                "state = 'cancelled', ended_at = now(), locked_until = NULL, locked_by = NULL",
                "'running', 'paused'",
            ),
        }
    }
}

/// Columns of a replay, with the names of its consumer and its tenant.
const SELECT: &str = "SELECT r.replay_id, t.name AS tenant, c.name AS consumer, r.state, r.kind, \
        r.emit, r.filter, r.until_at, r.planned_at, r.planned_by, r.actor, r.reason, r.began_at, \
        r.ended_at, CASE WHEN r.cursor_id <> '' THEN r.cursor_at END AS cursor_at, r.found, \
        r.is_counted_whole, r.replayed, r.failed, r.without_payload, r.changed, r.suppressed, \
        r.generation, r.generation_last, r.note, r.locked_by AS host \
    FROM oncebox.replay r JOIN oncebox.consumer c USING (consumer_id) \
    JOIN oncebox.tenant t USING (tenant_id)";

impl Replays<'_> {
    /// Lists the replays of a tenant, or of one of its consumers, newest first.
    ///
    /// # Errors
    /// `NotFound` where there is no such tenant or consumer, or an error of a database.
    pub async fn list(
        &self,
        tenant: &str,
        consumer: Option<&str>,
    ) -> Result<Vec<ReplayJob>, InboxError> {
        let row = self.0.tenants().get(tenant).await?;
        if let Some(consumer) = consumer {
            self.0.consumers().get(tenant, consumer).await?;
        }
        let database = self.0.tenant_databases().get(&row)?;
        let list = format!(
            "{SELECT} WHERE t.name = $1 AND ($2::text IS NULL OR c.name = $2) \
                ORDER BY r.replay_id DESC LIMIT $3"
        );
        let query = sqlx::query_as(AssertSqlSafe(list)).bind(tenant).bind(consumer).bind(LIST_MAX);
        Ok(query.fetch_all(&database.pool).await?)
    }

    /// Returns one replay of a consumer.
    ///
    /// # Errors
    /// `NotFound` where there is no such consumer or replay, or an error of a database.
    pub async fn show(
        &self,
        tenant: &str,
        name: &str,
        replay_id: i64,
    ) -> Result<ReplayDetail, InboxError> {
        const FAILURES: &str = "SELECT message_id, at, reason, error FROM oncebox.replay_failure \
            WHERE replay_id = $1 ORDER BY step";
        let consumer = self.0.consumers().get(tenant, name).await?;
        let database = self.0.tenant_databases().get(&self.0.tenants().get(tenant).await?)?;
        let one = format!("{SELECT} WHERE r.replay_id = $1 AND r.consumer_id = $2");
        let query = sqlx::query_as(AssertSqlSafe(one)).bind(replay_id).bind(consumer.consumer_id);
        let job: Option<ReplayJob> = query.fetch_optional(&database.pool).await?;
        let job = job.ok_or_else(|| unknown(tenant, name, replay_id))?;
        let failures = sqlx::query_as(FAILURES).bind(replay_id).fetch_all(&database.pool).await?;
        Ok(ReplayDetail { job, failures })
    }

    /// Pauses, resumes or cancels a replay. An action that is done already changes nothing and
    /// writes no audit row. Returns the replay.
    ///
    /// # Errors
    /// `NotFound` where there is no such replay. `Conflict` where its state has no such action, and
    /// for a resume where the policy's `replay` table is not that of the plan any more.
    pub async fn act(
        &self,
        tenant: &str,
        name: &str,
        replay_id: i64,
        action: ReplayAction,
    ) -> Result<ReplayJob, InboxError> {
        let target = self.target(tenant, name).await?;
        let before = self.show(tenant, name, replay_id).await?.job;
        let replay = &target.policy.replay;
        let is_as_planned = replay.kind.map(|kind| kind.name()) == Some(&*before.kind)
            && replay.emit.name() == before.emit;
        if action == ReplayAction::Resume && !is_as_planned {
            return Err(InboxError::conflict(
                "the policy's `replay` table is not that of the plan any more; cancel this replay \
                    and plan another one",
            ));
        }
        let (set, states) = action.change();
        let details = json!({ "replay_id": replay_id });
        self.audit_before(&target, action.name(), &details).await?;
        let mut tx = target.database.pool.begin().await?;
        let change = format!(
            "UPDATE oncebox.replay SET {set} WHERE replay_id = $1 AND consumer_id = $2 \
                AND state IN ({states})"
        );
        let query =
            sqlx::query(AssertSqlSafe(change)).bind(replay_id).bind(target.consumer.consumer_id);
        let done = query.execute(&mut *tx).await.map_err(|error| already_open(error, &target))?;
        if done.rows_affected() == 0 {
            tx.rollback().await?;
            return self.not_acted(tenant, name, replay_id, action).await;
        }
        self.audit_with(&mut tx, &target, action.name(), &details).await?;
        tx.commit().await?;
        self.0.deployments().announce(&target.consumer).await;
        self.show(tenant, name, replay_id).await.map(|detail| detail.job)
    }

    /// Returns a replay that an action did not change, since it is as the action leaves it, or the
    /// refusal.
    async fn not_acted(
        &self,
        tenant: &str,
        name: &str,
        replay_id: i64,
        action: ReplayAction,
    ) -> Result<ReplayJob, InboxError> {
        let job = self.show(tenant, name, replay_id).await?.job;
        let after = match action {
            ReplayAction::Pause => "paused",
            ReplayAction::Resume => "running",
            ReplayAction::Cancel => "cancelled",
        };
        match job.state == after {
            true => Ok(job),
            false => Err(InboxError::conflict(format!(
                "replay {replay_id} of `{tenant}/{name}` is {}, so there is nothing to do",
                job.state
            ))),
        }
    }
}

fn unknown(tenant: &str, name: &str, replay_id: i64) -> InboxError {
    InboxError::NotFound(format!(
        "there is no replay {replay_id} of `{tenant}/{name}`; `oncebox replay list` shows those \
            that there are"
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    // What could go wrong: an action leaves a lease or a time that the table's constraints refuse,
    // or brings a replay back that is over.
    #[test]
    fn an_action_leaves_no_lease_and_no_end_behind() {
        for action in [ReplayAction::Pause, ReplayAction::Resume, ReplayAction::Cancel] {
            let (set, states) = action.change();
            assert!(!states.contains("done") && !states.contains("cancelled"), "{states}");
            let is_running = set.starts_with("state = 'running'");
            assert_eq!(set.contains("locked_until = NULL"), !is_running, "{set}");
            assert_eq!(set.contains("ended_at = now()"), action == ReplayAction::Cancel);
            assert!(action.name().starts_with("replay."));
        }
    }
}
