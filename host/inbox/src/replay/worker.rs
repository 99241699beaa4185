//! The worker: it leases the consumer's replay and works on it until it is done, paused, or another
//! host's.

use std::{sync::Arc, time::Duration};

use oncebox_model::error::InboxError;
use tokio::time::sleep;
use tokio_util::sync::CancellationToken;

use super::{
    job::{Candidate, Job, JobEnd, Passed},
    message::Attempted,
};
use crate::{batch::replay_turn::ReplayEnd, consumer::ConsumerInbox};

/// Pause of a worker without a replay, where no poller wakes it.
const IDLE: Duration = Duration::from_millis(250);
/// Pause after a fault of the host.
const TROUBLE: Duration = Duration::from_secs(1);
/// Longest time for which a host runs a consumer under its policy before a change.
const OLDER_POLICY: Duration = Duration::from_secs(5);
/// Longest pause between two attempts, while live messages keep the host busy.
const WAIT_MAX: Duration = Duration::from_secs(1);

/// Runs a worker until `stop` is cancelled; a message that runs at that time is finished. Where a
/// poller exists, the worker sends no query until it is woken.
pub async fn work(consumer: Arc<ConsumerInbox>, stop: CancellationToken) {
    let mut pause = Duration::ZERO;
    while !stop.is_cancelled() {
        tokio::select! {
            () = stop.cancelled() => return,
            () = consumer.replay_wakeup.notified() => {}
            () = sleep(pause) => {}
        }
        pause = match work_off(&consumer, &stop).await {
            Ok(true) => Duration::ZERO,
            Ok(false) if consumer.wakeup.is_polled() => Duration::MAX,
            Ok(false) => IDLE,
            Err(InboxError::DatabaseUnavailable { retry_after }) => retry_after,
            // Others needed its place, or the consumer stops.
            Err(InboxError::Stopped { .. }) => TROUBLE,
            Err(error) => {
                tracing::warn!(tenant = consumer.tenant, consumer = consumer.name, %error, "the \
                    replay waits");
                TROUBLE
            }
        };
    }
}

/// Leases the consumer's replay, and works on it for as long as this host may. Returns whether
/// there was one.
///
/// # Errors
///
/// Returns an error of the host. What was committed until then stays, and the replay goes on behind
/// it.
pub async fn work_off(
    consumer: &ConsumerInbox,
    stop: &CancellationToken,
) -> Result<bool, InboxError> {
    let Some(mut job) = consumer.lease_replay().await? else { return Ok(false) };
    consumer.tell_leased(&job);
    consumer.gauge_replay(&job, true);
    let worked = consumer.replay_all(&mut job, stop).await;
    consumer.gauge_replay(&job, false);
    let end = match &worked {
        Ok(end) => end.clone(),
        Err(InboxError::LostInHandler { .. }) => JobEnd::Crashed,
        Err(_) => JobEnd::Left,
    };
    consumer.tell_job_end(&job, &end);
    let ended = consumer.end_replay(&job, &end).await;
    worked.and(ended).map(|()| true)
}

impl ConsumerInbox {
    /// Replays message after message.
    async fn replay_all(
        &self,
        job: &mut Job,
        stop: &CancellationToken,
    ) -> Result<JobEnd, InboxError> {
        let mut waits = 0_u32;
        loop {
            if let Some(why) = self.policy_changed(job) {
                // Perhaps it is this host that has the older policy: then the consumer is about to
                // be started again.
                return Ok(tokio::select! {
                    () = stop.cancelled() => JobEnd::Left,
                    () = sleep(OLDER_POLICY) => JobEnd::Paused(why),
                });
            }
            if stop.is_cancelled() {
                return Ok(JobEnd::Left);
            }
            if !self.keep_replay(job).await? || !self.fill_page(job).await? {
                return Ok(JobEnd::Lost);
            }
            if let Some((count, last)) = job.without_record() {
                let passed = Passed { without_payload: count, ..Passed::default() };
                let at = (last.completed_at, &*last.message_id);
                if !self.pass(job, at, passed).await? {
                    return Ok(JobEnd::Lost);
                }
                continue;
            }
            let Some(candidate) = job.page.pop_front() else {
                if job.is_done() {
                    return Ok(JobEnd::Done);
                }
                continue;
            };
            match self.replay_one(job, candidate).await? {
                Progress::Next => waits = 0,
                Progress::Ended(end) => return Ok(end),
                Progress::Waits(least) => {
                    waits = waits.saturating_add(1);
                    let longer = least.saturating_mul(waits).min(WAIT_MAX).max(least);
                    tokio::select! {
                        () = stop.cancelled() => return Ok(JobEnd::Left),
                        () = sleep(longer) => {}
                    }
                }
            }
        }
    }

    /// Tries to replay the first message of the page.
    async fn replay_one(
        &self,
        job: &mut Job,
        candidate: Candidate,
    ) -> Result<Progress, InboxError> {
        let turn = job.turn(&candidate, self.policy.replay.emit);
        match self.attempt_replay(&candidate, turn).await? {
            Attempted::Waits(least) => {
                job.page.push_front(candidate);
                Ok(Progress::Waits(least))
            }
            Attempted::Gone => {
                let passed = Passed { changed: 1, ..Passed::default() };
                let at = (candidate.completed_at, &*candidate.message_id);
                match self.pass(job, at, passed).await? {
                    true => Ok(Progress::Next),
                    false => Ok(Progress::Ended(JobEnd::Lost)),
                }
            }
            Attempted::Ended(message, end) => Ok(match end {
                ReplayEnd::Replayed { suppressed } => {
                    self.tell_replayed(job, &message, &suppressed);
                    job.step += 1;
                    Progress::Next
                }
                ReplayEnd::Failed { failure, is_paused } => {
                    self.tell_replay_failed(job, &message, &failure);
                    job.step += 1;
                    if is_paused {
                        self.tell_paused(job.replay_id, "too many messages in a row failed");
                        return Ok(Progress::Ended(JobEnd::Lost)); // the database says so already
                    }
                    Progress::Next
                }
                ReplayEnd::Busy | ReplayEnd::Changed | ReplayEnd::Lost => {
                    Progress::Ended(JobEnd::Lost)
                }
            }),
        }
    }

    /// Returns why a replay cannot go on under this policy; none where it is as it was planned.
    fn policy_changed(&self, job: &Job) -> Option<String> {
        let replay = &self.policy.replay;
        if job.kind.is_some() && job.kind == replay.kind && job.emit == replay.emit.name() {
            return None;
        }
        Some(
            "the policy's `replay` table is not that of the plan any more; cancel this replay and \
                plan another one"
                .to_owned(),
        )
    }
}

/// Progress of a replay by one attempt.
enum Progress {
    /// The message is behind the cursor.
    Next,
    /// It waits for so long at least.
    Waits(Duration),
    /// The work on the replay ends.
    Ended(JobEnd),
}
