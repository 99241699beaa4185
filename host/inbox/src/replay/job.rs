//! A replay in the hands of this host: its lease, the pages of its messages, and the moves of its
//! cursor that need no run.

use std::{collections::VecDeque, time::Duration};

use chrono::{DateTime, Utc};
use oncebox_model::{
    error::InboxError,
    hooks,
    policy::{ReplayEmit, ReplayKind},
};
use serde::Deserialize;
use sqlx::types::Json;
use tokio::time::Instant;

use crate::{batch::replay_turn::ReplayTurn, consumer::ConsumerInbox};

/// Length of a lease, beside the longest run of a message.
const LEASE: Duration = Duration::from_secs(30);
/// Age from which a lease is renewed before the next message.
const RENEW: Duration = Duration::from_secs(10);
/// Hosts that may end while they have a replay, without a message in between. Then it is paused.
const CRASHES_MAX: i32 = 3;
/// Messages of a page.
const PAGE: i32 = 500;

/// Messages that a replay selects, as its row keeps them. A page is given the rest: its begin and
/// its end are times of the row.
#[derive(Debug, Clone, Default, Deserialize)]
pub(super) struct SelectedMessages {
    /// Only messages of this event type.
    #[serde(default)]
    pub(super) event_type: Option<String>,
    /// Only messages with these ids.
    #[serde(default)]
    pub(super) ids: Option<Vec<String>>,
}

/// A completed message on a page.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Candidate {
    pub(super) message_id: String,
    pub(super) completed_at: DateTime<Utc>,
    /// Whether its row keeps its record, so that it can run.
    pub(super) has_record: bool,
}

/// A replay that this host has leased.
#[derive(Debug)]
pub(super) struct Job {
    pub(super) replay_id: i64,
    pub(super) kind: Option<ReplayKind>,
    pub(super) emit: String,
    selected: SelectedMessages,
    until: DateTime<Utc>,
    pub(super) epoch: i64,
    /// Moves of the cursor so far.
    pub(super) step: i64,
    /// Moment of the request for the lease, which is no later than its begin.
    leased_at: Instant,
    /// Messages of the page that are still to be replayed.
    pub(super) page: VecDeque<Candidate>,
    /// Place behind which the next page begins; none after the last page.
    next_page: Option<(DateTime<Utc>, String)>,
}

#[derive(sqlx::FromRow)]
struct JobRow {
    replay_id: i64,
    state: String,
    kind: String,
    emit: String,
    filter: Json<SelectedMessages>,
    until_at: DateTime<Utc>,
    epoch: i64,
    step: i64,
    cursor_at: DateTime<Utc>,
    cursor_id: String,
    note: Option<String>,
}

#[derive(sqlx::FromRow)]
struct PageRow {
    ids: Option<Vec<String>>,
    processed: Option<Vec<DateTime<Utc>>>,
    have_record: Option<Vec<bool>>,
    end_at: Option<DateTime<Utc>>,
    end_id: Option<String>,
}

/// Messages that the cursor passes without a run.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Passed {
    pub(super) without_payload: i64,
    pub(super) changed: i64,
}

/// End of the work on a replay.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum JobEnd {
    /// No message is left.
    Done,
    /// It cannot go on, for this reason, until an operator resumes it.
    Paused(String),
    /// The worker is told to stop; another one goes on.
    Left,
    /// A run broke its connection alone, as one that kills its process would.
    Crashed,
    /// Another host has it, or it is paused or over.
    Lost,
}

impl Job {
    /// Returns the place of a message of it in its transaction.
    pub(super) fn turn(&self, candidate: &Candidate, emit: ReplayEmit) -> ReplayTurn {
        ReplayTurn {
            replay_id: self.replay_id,
            epoch: self.epoch,
            step: self.step,
            completed_at: candidate.completed_at,
            emit,
        }
    }

    /// Takes the messages without a record off the front of the page. Returns their number, and the
    /// last of them.
    pub(super) fn without_record(&mut self) -> Option<(i64, Candidate)> {
        let (mut count, mut last) = (0, None);
        while self.page.front().is_some_and(|candidate| !candidate.has_record) {
            (count, last) = (count + 1, self.page.pop_front());
        }
        last.map(|last| (count, last))
    }

    /// Returns whether nothing is left: the page is done, and was the last one.
    pub(super) fn is_done(&self) -> bool {
        self.page.is_empty() && self.next_page.is_none()
    }
}

impl ConsumerInbox {
    /// Returns the length of a lease of a replay: no run outlasts it.
    fn replay_lease(&self) -> Duration {
        LEASE + Duration::from_millis(self.policy.limits.deadline_ms)
    }

    /// Leases the consumer's replay, if it runs and no other host works on it. One that ended hosts
    /// again and again is paused instead.
    pub(super) async fn lease_replay(&self) -> Result<Option<Job>, InboxError> {
        // A lease that ran out is that of a host that ended, since a host gives its lease back.
        const TAKE: &str = "UPDATE oncebox.replay r SET epoch = r.epoch + 1, \
                crashes = l.crashes, \
                state = CASE WHEN l.crashes < $4 THEN r.state ELSE 'paused' END, \
                note = CASE WHEN l.crashes < $4 THEN NULL ELSE format('%s hosts ended while they \
                    had it, all at the message behind `%s`', l.crashes, r.cursor_id) END, \
                locked_by = CASE WHEN l.crashes < $4 THEN $2 END, \
                locked_until = CASE WHEN l.crashes < $4 \
                    THEN now() + $3 * interval '1 millisecond' END \
            FROM (SELECT c.replay_id, c.crashes + (c.locked_by IS NOT NULL)::int AS crashes \
                FROM oncebox.replay c WHERE c.consumer_id = $1 AND c.state = 'running' \
                  AND (c.locked_until IS NULL OR c.locked_until < now()) \
                FOR UPDATE SKIP LOCKED) l \
            WHERE r.replay_id = l.replay_id \
            RETURNING r.replay_id, r.state, r.kind, r.emit, r.filter, r.until_at, r.epoch, r.step, \
                r.cursor_at, r.cursor_id, r.note";
        let leased_at = Instant::now();
        let query = sqlx::query_as(TAKE)
            .bind(self.consumer_id)
            .bind(&self.owner)
            .bind(self.replay_lease().as_millis() as i64)
            .bind(CRASHES_MAX);
        let row: Option<JobRow> = query.fetch_optional(self.sessions.host_pool()).await?;
        let Some(row) = row else { return Ok(None) };
        if row.state == "paused" {
            self.tell_paused(row.replay_id, row.note.as_deref().unwrap_or_default());
            return Ok(None);
        }
        hooks::point("replay:lease:after");
        Ok(Some(Job {
            replay_id: row.replay_id,
            kind: ReplayKind::named(&row.kind),
            emit: row.emit,
            selected: row.filter.0,
            until: row.until_at,
            epoch: row.epoch,
            step: row.step,
            leased_at,
            page: VecDeque::new(),
            next_page: Some((row.cursor_at, row.cursor_id)),
        }))
    }

    /// Renews the lease of a replay where it is not new any more. Returns false where the replay is
    /// not this host's any more.
    pub(super) async fn keep_replay(&self, job: &mut Job) -> Result<bool, InboxError> {
        const KEEP: &str = "UPDATE oncebox.replay SET locked_until = now() + $3 * interval '1 \
            millisecond' WHERE replay_id = $1 AND epoch = $2 AND state = 'running'";
        if job.leased_at.elapsed() < RENEW {
            return Ok(true);
        }
        let asked_at = Instant::now();
        let query = sqlx::query(KEEP)
            .bind(job.replay_id)
            .bind(job.epoch)
            .bind(self.replay_lease().as_millis() as i64);
        let kept = query.execute(self.sessions.host_pool()).await?.rows_affected() > 0;
        job.leased_at = asked_at;
        Ok(kept)
    }

    /// Reads the next page of a replay, where the last one is done; it may be empty, since a page
    /// is bounded by what it reads. Persists that the cursor passed an empty page. Returns false
    /// where another host has the replay.
    pub(super) async fn fill_page(&self, job: &mut Job) -> Result<bool, InboxError> {
        if !job.page.is_empty() {
            return Ok(true);
        }
        let Some((after, after_id)) = job.next_page.clone() else { return Ok(true) };
        let row = self.read_page(job, after, &after_id).await?;
        job.next_page = row.end_at.zip(row.end_id);
        let ids = row.ids.unwrap_or_default().into_iter();
        let facts = row.processed.unwrap_or_default().into_iter();
        let facts = facts.zip(row.have_record.unwrap_or_default());
        let candidate = |(message_id, (completed_at, has_record))| Candidate {
            message_id,
            completed_at,
            has_record,
        };
        job.page = ids.zip(facts).map(candidate).collect();
        match job.next_page.clone().filter(|_| job.page.is_empty()) {
            Some((at, id)) => self.pass(job, (at, &id), Passed::default()).await,
            None => Ok(true),
        }
    }

    async fn read_page(
        &self,
        job: &Job,
        after: DateTime<Utc>,
        after_id: &str,
    ) -> Result<PageRow, InboxError> {
        const READ: &str = "SELECT * FROM oncebox.page_of_replay($1, $2, $3, $4, $5, $6, $7, $8)";
        let query = sqlx::query_as(READ)
            .bind(self.consumer_id)
            .bind(self.policy.retention.class())
            .bind(after)
            .bind(after_id)
            .bind(job.until)
            .bind(&job.selected.event_type)
            .bind(&job.selected.ids)
            .bind(PAGE);
        Ok(query.fetch_one(self.sessions.host_pool()).await?)
    }

    /// Moves the cursor past messages that do not run, and counts them. Returns false where the
    /// replay is not this host's any more.
    pub(super) async fn pass(
        &self,
        job: &mut Job,
        (at, id): (DateTime<Utc>, &str),
        passed: Passed,
    ) -> Result<bool, InboxError> {
        const PASS: &str = "UPDATE oncebox.replay SET step = step + 1, cursor_at = $4, \
            cursor_id = $5, without_payload = without_payload + $6, changed = changed + $7, \
            crashes = 0 \
            WHERE replay_id = $1 AND epoch = $2 AND step = $3 AND state = 'running'";
        let query = sqlx::query(PASS)
            .bind(job.replay_id)
            .bind(job.epoch)
            .bind(job.step)
            .bind(at)
            .bind(id)
            .bind(passed.without_payload)
            .bind(passed.changed);
        let is_ours = query.execute(self.sessions.host_pool()).await?.rows_affected() > 0;
        job.step += 1;
        Ok(is_ours)
    }

    /// Ends this host's work on a replay: writes its state, and gives the lease back.
    pub(super) async fn end_replay(&self, job: &Job, end: &JobEnd) -> Result<(), InboxError> {
        const END: &str = "UPDATE oncebox.replay SET state = $3, note = $4, \
            crashes = crashes + $5, ended_at = CASE WHEN $3 = 'done' THEN now() END, \
            locked_until = NULL, locked_by = NULL \
            WHERE replay_id = $1 AND epoch = $2 AND state = 'running'";
        let (state, note, crashes) = match end {
            JobEnd::Lost => return Ok(()),
            JobEnd::Done => ("done", None, 0),
            JobEnd::Paused(why) => ("paused", Some(why), 0),
            JobEnd::Left => ("running", None, 0),
            JobEnd::Crashed => ("running", None, 1),
        };
        if *end == JobEnd::Done {
            hooks::point("replay:end:before");
        }
        let query = sqlx::query(END)
            .bind(job.replay_id)
            .bind(job.epoch)
            .bind(state)
            .bind(note)
            .bind(crashes);
        query.execute(self.sessions.host_pool()).await?;
        if *end == JobEnd::Done {
            hooks::point("replay:end:after");
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn candidate(id: &str, has_record: bool) -> Candidate {
        Candidate { message_id: id.to_owned(), completed_at: DateTime::UNIX_EPOCH, has_record }
    }

    // What could go wrong: messages without a record are counted one by one, each in a transaction,
    // or one that can run is passed with them.
    #[test]
    fn messages_without_a_record_are_passed_together() {
        let mut job = Job {
            replay_id: 1,
            kind: Some(ReplayKind::Cache),
            emit: "suppressed".to_owned(),
            selected: SelectedMessages::default(),
            until: DateTime::UNIX_EPOCH,
            epoch: 1,
            step: 0,
            leased_at: Instant::now(),
            page: [("a", false), ("b", false), ("c", true), ("d", false)]
                .map(|(id, has_record)| candidate(id, has_record))
                .into(),
            next_page: None,
        };
        assert_eq!(job.without_record(), Some((2, candidate("b", false))));
        assert_eq!(job.without_record(), None);
        assert_eq!(job.page.pop_front(), Some(candidate("c", true)));
        assert_eq!(job.without_record(), Some((1, candidate("d", false))));
        assert!(job.page.is_empty());
    }

    #[test]
    fn a_filter_of_the_row_is_read() {
        let text = r#"{"event_type": "paid", "from": "2026-01-01T00:00:00Z"}"#;
        let selected: SelectedMessages = serde_json::from_str(text).expect("a filter");
        assert_eq!((selected.event_type.as_deref(), selected.ids), (Some("paid"), None));
    }
}
