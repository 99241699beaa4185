//! Metrics and logs of replays.

use oncebox_model::{message::Message, outcome::Failure, outgoing::OutgoingMessage};

use super::job::{Job, JobEnd};
use crate::consumer::ConsumerInbox;

impl ConsumerInbox {
    /// Sets the gauge of a replay that this host works on, or has left. An alert reads it while the
    /// replay runs.
    pub(super) fn gauge_replay(&self, job: &Job, is_running: bool) {
        let kind = job.kind.map_or("unknown", |kind| kind.name());
        metrics::gauge!("oncebox_replay_running", "tenant" => self.tenant.clone(), "consumer" => self.name.clone(),
            "kind" => kind)
        .set(if is_running { 1.0 } else { 0.0 });
    }

    /// Counts a message of a replay by its outcome.
    fn count_replayed(&self, event_type: &str, outcome: &'static str) {
        metrics::counter!("oncebox_replay_messages_total", "tenant" => self.tenant.clone(), "consumer" => self.name.clone(),
            "event_type" => self.label(event_type), "outcome" => outcome)
        .increment(1);
    }

    /// Counts and logs a replayed message, and what it did not send, after the commit (S1-084,
    /// S1-089).
    pub(super) fn tell_replayed(
        &self,
        job: &Job,
        message: &Message,
        suppressed: &[OutgoingMessage],
    ) {
        self.count_replayed(&message.event_type, "replayed");
        for outgoing in suppressed {
            metrics::counter!("oncebox_replay_suppressed_total", "tenant" => self.tenant.clone(), "consumer" => self.name.clone(),
                "event_type" => self.label(&outgoing.event_type))
            .increment(1);
            tracing::info!(
                tenant = self.tenant,
                consumer = self.name,
                replay_id = job.replay_id,
                message_id = message.id,
                trace_id = message.trace_id(),
                outgoing_id = outgoing.id,
                destination = %outgoing.destination,
                event_type = outgoing.event_type,
                "outgoing message suppressed: its cause is replayed"
            );
        }
    }

    /// Counts and logs a replayed message that failed, whose effect is rolled back.
    pub(super) fn tell_replay_failed(&self, job: &Job, message: &Message, failure: &Failure) {
        self.count_replayed(&message.event_type, "failed");
        tracing::warn!(
            tenant = self.tenant,
            consumer = self.name,
            replay_id = job.replay_id,
            message_id = message.id,
            event_type = message.event_type,
            trace_id = message.trace_id(),
            reason = failure.kind.reason(),
            error = failure.text,
            "replayed message failed; it stays completed, without an effect of the replay"
        );
    }

    /// Logs that this host works on a replay. One of a consumer with effects outside is a warning.
    pub(super) fn tell_leased(&self, job: &Job) {
        let (tenant, consumer, replay_id) = (&self.tenant, &self.name, job.replay_id);
        match job.kind {
            Some(kind) if kind.has_outside_effects() => tracing::warn!(
                tenant,
                consumer,
                replay_id,
                kind = kind.name(),
                "a replay of a consumer with effects outside runs; nothing that it emits is sent"
            ),
            kind => tracing::info!(
                tenant,
                consumer,
                replay_id,
                kind = kind.map(|kind| kind.name()),
                "a replay runs"
            ),
        }
    }

    /// Logs that a replay is paused, with the reason.
    pub(super) fn tell_paused(&self, replay_id: i64, note: &str) {
        tracing::warn!(
            tenant = self.tenant,
            consumer = self.name,
            replay_id,
            note,
            "a replay is paused; an operator resumes or cancels it"
        );
    }

    /// Logs the end of this host's work on a replay.
    pub(super) fn tell_job_end(&self, job: &Job, end: &JobEnd) {
        match end {
            JobEnd::Paused(note) => self.tell_paused(job.replay_id, note),
            end => tracing::info!(
                tenant = self.tenant,
                consumer = self.name,
                replay_id = job.replay_id,
                ?end,
                "the work on a replay ends here"
            ),
        }
    }
}
