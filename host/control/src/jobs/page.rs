//! One page of a job: the action, the counts and the place behind it, in one transaction.

use std::{collections::BTreeMap, time::Duration};

use chrono::{DateTime, Utc};
use oncebox_model::{
    error::InboxError,
    hooks::{self, Defect},
};
use serde::{Deserialize, Serialize};
use serde_json::json;
use sqlx::{Executor, PgConnection, types::Json};

use super::{
    JobAction,
    lease::{LEASE, LeasedJob},
};
use crate::{
    audit::Subject,
    handles::Jobs,
    messages::bulk::Selection,
    outgoing::act::{OutgoingAction, OutgoingSelection},
};

/// Messages that a page reads.
const PAGE: u32 = 500;
/// Passes over the messages, at most.
const PASSES_MAX: i32 = 10;
/// Pause before a pass over messages that others work on; it grows with each pass.
const BUSY: Duration = Duration::from_millis(500);
/// Most messages under way that a pass counts.
const COUNTED_MAX: i64 = 1_000;
/// Statement that limits those of a page on the server, to half of a lease.
const WITHIN: &str = "SET LOCAL statement_timeout = 15000";

/// Place in a job's messages behind which the next page begins.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(default)]
pub(super) struct JobCursor {
    /// Number of the status among those of the action.
    status: usize,
    /// Time of receipt and id of the last message of that status.
    after: Option<(DateTime<Utc>, String)>,
    /// Consumer of the last outgoing message, and its position.
    outgoing: Option<(i32, i64)>,
}

/// What a page did.
#[derive(Debug, Default)]
struct PageResult {
    /// Messages that the action was asked for.
    asked: usize,
    changed: i64,
    left_out: BTreeMap<String, i64>,
    /// Place behind the page; none where the pass is over.
    next: Option<JobCursor>,
}

impl PageResult {
    /// Counts messages that the action was asked for. Those that it did not change are busy.
    fn acted(&mut self, asked: usize, changed: i64) {
        self.asked += asked;
        self.changed += changed;
        self.leave_out(BUSY_NAME, asked as i64 - changed);
    }

    fn leave_out(&mut self, reason: &str, messages: i64) {
        if messages > 0 {
            *self.left_out.entry(reason.to_owned()).or_default() += messages;
        }
    }
}

/// The state of a job after a page.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum JobStep {
    /// The next page is due after this pause.
    Next(Duration),
    /// It is over.
    Done,
    /// Another process has it, or an operator paused or ended it.
    Lost,
}

impl Jobs<'_> {
    /// Works on one page of a job.
    ///
    /// # Errors
    /// An error of a database. The page is rolled back.
    pub async fn step(&self, job: &mut LeasedJob) -> Result<JobStep, InboxError> {
        // Under this lock no operator pauses or ends the job within the page.
        const LOCK: &str = "SELECT true FROM oncebox.job WHERE job_id = $1 AND epoch = $2 \
            AND step = $3 AND state = 'running' FOR UPDATE";
        let mut tx = job.database.pool.begin().await?;
        tx.execute(sqlx::raw_sql(WITHIN)).await?;
        let lock = sqlx::query_scalar(LOCK).bind(job.job_id).bind(job.epoch).bind(job.step);
        let is_ours = lock.fetch_optional(&mut *tx).await? == Some(true);
        if !is_ours && !hooks::sabotage(Defect::JobLeaseUnchecked) {
            return Ok(JobStep::Lost);
        }
        let page = job.page(&mut tx).await?;
        let changed = page.changed;
        hooks::point("inbox:action:before");
        let step = job.advance(page);
        job.write(&mut tx, step == JobStep::Done).await?;
        if step == JobStep::Done {
            hooks::point("job:end:before");
            self.record_end(&mut tx, job).await?;
        }
        tx.commit().await?;
        job.count(changed);
        hooks::point(if step == JobStep::Done { "job:end:after" } else { "inbox:action:after" });
        Ok(match step {
            JobStep::Next(pause) => JobStep::Next(pause.max(job.slowed(changed))),
            step => step,
        })
    }

    /// Writes the end of a job to the audit log: in its transaction, or before it where the job is
    /// in another database.
    async fn record_end(
        &self,
        connection: &mut PgConnection,
        job: &LeasedJob,
    ) -> Result<(), InboxError> {
        let control = self.0.acting_as(job.actor.clone());
        let subject = match &job.consumer {
            Some(consumer) => Subject::of(&job.tenant, &consumer.name),
            None => Subject::tenant(&job.tenant),
        };
        let details = json!({
            "job_id": job.job_id,
            "action": job.action.name(),
            "messages": job.changed,
            "left_out": job.left_out,
        });
        let audit = control.audit();
        audit
            .record_beside(connection, job.database.is_dedicated, "job.done", subject, details)
            .await
    }
}

impl LeasedJob {
    /// Counts the messages that a committed page changed.
    fn count(&self, changed: i64) {
        metrics::counter!("oncebox_job_messages_total", "tenant" => self.tenant.clone(), "action" => self.action.name())
            .increment(u64::try_from(changed).unwrap_or(0));
    }

    /// Most messages that a page changes: no more than a second's.
    fn page_max(&self) -> usize {
        self.rate.map_or(PAGE, |rate| rate.min(PAGE)) as usize
    }

    /// Returns the pause that the job's rate asks for.
    fn slowed(&self, changed: i64) -> Duration {
        let changed = u32::try_from(changed).unwrap_or(PAGE);
        self.rate.map_or(Duration::ZERO, |rate| {
            Duration::from_secs(1).mul_f64(f64::from(changed) / f64::from(rate.max(1)))
        })
    }

    async fn page(&self, connection: &mut PgConnection) -> Result<PageResult, InboxError> {
        match (self.action, &self.consumer) {
            (JobAction::Inbox(action), Some(consumer)) => {
                let filter = self.filter.of_inbox()?;
                let selection = Selection {
                    consumer_id: consumer.consumer_id,
                    class: consumer.policy()?.retention.class(),
                    action,
                    filter: &filter,
                    versions: &self.versions,
                    ids: self.filter.ids.as_deref(),
                    as_of: self.as_of,
                };
                self.inbox_page(connection, &selection).await
            }
            (JobAction::Inbox(_), None) => {
                Err(InboxError::NotFound("the consumer of this job is gone".to_owned()))
            }
            (JobAction::Outgoing(action), _) => self.outgoing_page(connection, action).await,
        }
    }

    /// Acts on the next messages of the inbox. A page goes on with the next status while it has
    /// room.
    async fn inbox_page(
        &self,
        connection: &mut PgConnection,
        selection: &Selection<'_>,
    ) -> Result<PageResult, InboxError> {
        let (mut result, mut cursor) = (PageResult::default(), self.cursor.clone());
        let (statuses, mut read) = (selection.statuses(), 0);
        while let Some(status) = statuses.get(cursor.status) {
            let limit = PAGE as usize;
            let found = selection.page(connection, *status, &cursor.after, limit as i64).await?;
            let mut is_last = found.len() < limit;
            read += found.len();
            let (mut ids, room) = (Vec::new(), self.page_max() - result.asked);
            for message in &found {
                if ids.len() == room {
                    is_last = false;
                    break;
                }
                cursor.after = Some((message.received_at, message.message_id.clone()));
                match &message.obstacle {
                    _ if !message.is_selected => {}
                    Some(obstacle) => result.leave_out(obstacle, 1),
                    None => ids.push(&*message.message_id),
                }
            }
            if !ids.is_empty() {
                let changed = selection.act(connection, &ids, &self.actor, &self.reason).await?;
                result.acted(ids.len(), changed);
            }
            if is_last {
                cursor = JobCursor { status: cursor.status + 1, ..JobCursor::default() };
            }
            if result.asked >= self.page_max() || read >= limit {
                break;
            }
        }
        if cursor.status < statuses.len() {
            result.next = Some(cursor);
        } else {
            result.leave_out(BUSY_NAME, selection.running(connection, COUNTED_MAX).await?);
        }
        Ok(result)
    }

    /// Acts on the next outgoing messages, consumer by consumer.
    async fn outgoing_page(
        &self,
        connection: &mut PgConnection,
        action: OutgoingAction,
    ) -> Result<PageResult, InboxError> {
        const CONSUMERS: &str = "SELECT consumer_id FROM oncebox.consumer WHERE tenant_id = $1 \
            AND ($2::int IS NULL OR consumer_id = $2) AND consumer_id >= $3 ORDER BY consumer_id";
        let filter = self.filter.of_outgoing(None)?;
        let (first, mut after) = self.cursor.outgoing.unwrap_or((0, 0));
        let one = self.consumer.as_ref().map(|consumer| consumer.consumer_id);
        let query = sqlx::query_scalar(CONSUMERS).bind(self.tenant_id).bind(one).bind(first);
        let consumers: Vec<i32> = query.fetch_all(&mut *connection).await?;
        let (mut result, mut read) = (PageResult::default(), 0);
        for (nth, consumer_id) in consumers.iter().copied().enumerate() {
            if nth > 0 || consumer_id != first {
                after = 0;
            }
            let selection =
                OutgoingSelection { consumer_id, action, filter: &filter, as_of: self.as_of };
            let (found, has_more) = selection.page(connection, after, i64::from(PAGE)).await?;
            read += found.len();
            let mut is_last = !has_more;
            let (mut messages, room) = (Vec::new(), self.page_max() - result.asked);
            for message in &found {
                if messages.len() == room {
                    is_last = false;
                    break;
                }
                after = message.position;
                if message.is_selected {
                    messages.push(message);
                }
            }
            if !messages.is_empty() {
                let changed = selection.act(connection, &messages).await?;
                result.acted(messages.len(), changed);
            }
            if !is_last {
                result.next = Some(JobCursor {
                    outgoing: Some((consumer_id, after)),
                    ..JobCursor::default()
                });
                return Ok(result);
            }
            result.leave_out(BUSY_NAME, selection.under_way(connection, COUNTED_MAX).await?);
            let next = consumers.get(nth + 1);
            if let Some(next) =
                next.filter(|_| result.asked >= self.page_max() || read >= PAGE as usize)
            {
                result.next =
                    Some(JobCursor { outgoing: Some((*next, 0)), ..JobCursor::default() });
                return Ok(result);
            }
        }
        Ok(result)
    }

    /// Counts a page, and moves the job behind it. Passes over an inbox repeat until one finds
    /// nothing to do. Outgoing messages have one pass: a second would take those that failed again.
    fn advance(&mut self, page: PageResult) -> JobStep {
        self.step += 1;
        self.changed += page.changed;
        self.changed_in_pass += page.changed;
        for (reason, messages) in page.left_out {
            *self.left_out.entry(reason).or_default() += messages;
        }
        if let Some(next) = page.next {
            self.cursor = next;
            return JobStep::Next(Duration::ZERO);
        }
        let is_busy = self.left_out.contains_key(BUSY_NAME);
        let passes_max = if matches!(self.action, JobAction::Inbox(_)) { PASSES_MAX } else { 1 };
        if self.pass >= passes_max || (self.changed_in_pass == 0 && !is_busy) {
            return JobStep::Done;
        }
        let pause = if is_busy { BUSY * self.pass.unsigned_abs() } else { Duration::ZERO };
        self.pass += 1;
        self.cursor = JobCursor::default();
        self.changed_in_pass = 0;
        self.left_out.clear();
        JobStep::Next(pause)
    }

    /// Writes the job as it is behind a page, and renews the lease or ends it.
    async fn write(&self, connection: &mut PgConnection, is_done: bool) -> Result<(), InboxError> {
        const WRITE: &str = "UPDATE oncebox.job SET step = $3, pass = $4, cursor = $5, \
            changed = $6, changed_in_pass = $7, left_out = $8, crashes = 0, \
            state = CASE WHEN $9 THEN 'done' ELSE state END, \
            ended_at = CASE WHEN $9 THEN now() END, \
            locked_by = CASE WHEN NOT $9 THEN locked_by END, \
            locked_until = CASE WHEN NOT $9 THEN now() + $10 * interval '1 millisecond' END \
            WHERE job_id = $1 AND epoch = $2";
        let query = sqlx::query(WRITE)
            .bind(self.job_id)
            .bind(self.epoch)
            .bind(self.step)
            .bind(self.pass)
            .bind(Json(&self.cursor))
            .bind(self.changed)
            .bind(self.changed_in_pass)
            .bind(Json(&self.left_out))
            .bind(is_done)
            .bind(LEASE.as_millis() as i64);
        query.execute(connection).await?;
        Ok(())
    }
}

/// Reason of messages that others work on: a host runs them or one of their key, or someone else
/// acts on them.
const BUSY_NAME: &str = "busy";
