//! One page of a job: the action, the counts and the place behind it, in one transaction.

use std::{collections::BTreeMap, time::Duration};

use chrono::{DateTime, Utc};
use oncebox_model::{
    error::InboxError,
    hooks::{self, Defect},
};
use serde::{Deserialize, Serialize};
use serde_json::json;
use sqlx::{PgConnection, types::Json};

use super::{JobAction, lease::LeasedJob};
use crate::{
    audit::Subject,
    handles::Jobs,
    messages::bulk::{Action, Selection},
    outgoing::act::{self, OutgoingAction},
};

/// Messages of a page.
const PAGE: u32 = 500;
/// Passes over the messages, at most.
const PASSES_MAX: i32 = 10;
/// Pause before a pass over messages that others work on; it grows with each pass.
const BUSY: Duration = Duration::from_millis(500);

/// Place in a job's messages behind which the next page begins.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(default)]
pub(super) struct JobCursor {
    /// Number of the status among those of the action.
    status: usize,
    /// Time of receipt and id of the last message of that status.
    after: Option<(DateTime<Utc>, String)>,
    /// Position of the last outgoing message.
    position: Option<i64>,
}

/// What a page did.
#[derive(Debug, Default)]
struct PageResult {
    changed: i64,
    left_out: BTreeMap<String, i64>,
    /// Place behind the page; none where the pass is over.
    next: Option<JobCursor>,
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
    /// `NotFound` where its consumer is gone, or an error of a database. The page is rolled back.
    pub async fn step(&self, job: &mut LeasedJob) -> Result<JobStep, InboxError> {
        // Under this lock no operator pauses or ends the job within the page.
        const LOCK: &str = "SELECT true FROM oncebox.job WHERE job_id = $1 AND epoch = $2 \
            AND step = $3 AND state = 'running' FOR UPDATE";
        let mut tx = job.database.pool.begin().await?;
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
        let subject = match &job.consumer_name {
            Some(consumer) => Subject::of(&job.tenant, consumer),
            None => Subject::tenant(&job.tenant),
        };
        let details = json!({
            "job_id": job.job_id,
            "action": job.action.name(),
            "messages": job.changed,
            "left_out": job.left_out,
        });
        if !job.database.is_dedicated {
            return control.audit().record(connection, "job.done", subject, details).await;
        }
        let mut log = control.pool.begin().await?;
        control.audit().record(&mut log, "job.done", subject, details).await?;
        Ok(log.commit().await?)
    }
}

impl LeasedJob {
    /// Most messages of a page: no more than a second's.
    fn page_max(&self) -> u32 {
        self.rate.map_or(PAGE, |rate| rate.min(PAGE))
    }

    /// Returns the pause that the job's rate asks for.
    fn slowed(&self, changed: i64) -> Duration {
        let changed = u32::try_from(changed).unwrap_or(PAGE);
        self.rate.map_or(Duration::ZERO, |rate| {
            Duration::from_secs(1).mul_f64(f64::from(changed) / f64::from(rate.max(1)))
        })
    }

    async fn page(&self, connection: &mut PgConnection) -> Result<PageResult, InboxError> {
        match self.action {
            JobAction::Inbox(action) => self.inbox_page(connection, action).await,
            JobAction::Outgoing(action) => self.outgoing_page(connection, action).await,
        }
    }

    /// Acts on the next messages of the inbox. A page goes on with the next status while it has
    /// room.
    async fn inbox_page(
        &self,
        connection: &mut PgConnection,
        action: Action,
    ) -> Result<PageResult, InboxError> {
        let consumer = self
            .consumer
            .as_ref()
            .ok_or_else(|| InboxError::NotFound("the consumer of this job is gone".to_owned()))?;
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
        let (mut result, mut room) = (PageResult::default(), i64::from(self.page_max()));
        let mut cursor = self.cursor.clone();
        while let Some(status) = action.statuses().get(cursor.status) {
            // Ids are at most two pages, and have no place in the order of a page.
            let limit = if selection.ids.is_some() { i64::MAX } else { room };
            let found = selection.page(connection, *status, &cursor.after, limit).await?;
            let is_last = selection.ids.is_some() || (found.len() as i64) < limit;
            room -= found.len() as i64;
            cursor.after = found.last().map(|last| (last.received_at, last.message_id.clone()));
            let mut ids = Vec::new();
            for message in found.iter().filter(|message| message.is_selected) {
                match &message.obstacle {
                    Some(obstacle) => *result.left_out.entry(obstacle.clone()).or_default() += 1,
                    None => ids.push(&*message.message_id),
                }
            }
            if !ids.is_empty() {
                let changed = selection.act(connection, &ids, &self.actor, &self.reason).await?;
                result.changed += changed;
                let busy = ids.len() as i64 - changed;
                if busy > 0 {
                    *result.left_out.entry(BUSY_NAME.to_owned()).or_default() += busy;
                }
            }
            if is_last {
                cursor = JobCursor { status: cursor.status + 1, ..JobCursor::default() };
            }
            if room <= 0 {
                break;
            }
        }
        result.next = (cursor.status < action.statuses().len()).then_some(cursor);
        Ok(result)
    }

    /// Acts on the next outgoing messages. Those that a relay is sending are left alone.
    async fn outgoing_page(
        &self,
        connection: &mut PgConnection,
        action: OutgoingAction,
    ) -> Result<PageResult, InboxError> {
        let filter = self.filter.of_outgoing(self.consumer_name.as_deref())?;
        let after = self.cursor.position;
        let (changed, last) =
            act::change(connection, &self.tenant, action, &filter, after, self.page_max()).await?;
        let next = last.map(|last| JobCursor { position: Some(last), ..JobCursor::default() });
        Ok(PageResult { changed, left_out: BTreeMap::new(), next })
    }

    /// Counts a page, and moves the job behind it. Passes repeat until one finds nothing to do.
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
        if self.pass >= PASSES_MAX || (self.changed_in_pass == 0 && !is_busy) {
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
            .bind(Self::lease_ms());
        query.execute(connection).await?;
        Ok(())
    }
}

/// Reason of messages that others work on: a host runs one of their key, or holds their row.
const BUSY_NAME: &str = "busy";
