//! Order within a transaction: which messages of a batch run, by the versions of their aggregates.

use std::time::Duration;

use oncebox_model::{message::Message, policy::Gap};

use crate::{
    batch::{claim::ClaimOutcome, complete::GAP, state::BatchState},
    consumer::ConsumerInbox,
    metrics::Parked,
    ordering::sequence::{SequencePosition, SequenceVerdict},
};

impl BatchState<'_> {
    /// Decides by its version whether a new message runs. Otherwise marks its claim as a gap, or
    /// skips the message.
    pub(super) fn in_sequence(&mut self, index: usize) {
        let message = &self.batch[index].request.message;
        if self.claims[index] != ClaimOutcome::New {
            return;
        }
        match self.sequence.verdict(message, self.consumer.gap()) {
            SequenceVerdict::Next => {}
            SequenceVerdict::Gap(_) | SequenceVerdict::Overdue(_) => {
                self.claims[index] = ClaimOutcome::Gap;
            }
            SequenceVerdict::Superseded(position) => {
                let text = "a version that its aggregate is past was skipped";
                self.consumer.log_sequence(message, position, text);
                let execution = self.execution_of(index);
                self.completion.is_superseded(execution, &position, &self.consumer.policy);
                self.claims[index] = ClaimOutcome::Superseded;
            }
        }
    }

    /// Stores a message that has missing versions before it. It is due at once where this
    /// transaction brought those versions. A leased message that waited too long is parked.
    pub(super) fn waits_for_gap(&mut self, index: usize) {
        let consumer = self.consumer;
        let (message, lease) = (&self.batch[index].request.message, self.batch[index].lease);
        let execution = self.execution_of(index);
        match self.sequence.verdict(message, consumer.gap()) {
            SequenceVerdict::Gap(position) => {
                let text = "versions are missing before a message; it waits";
                consumer.log_sequence(message, position, text);
                self.completion.waits_for_gap(execution, &position, consumer.gap_wait());
            }
            SequenceVerdict::Overdue(position) if let Some(lease) = lease => {
                let Message { id, event_type, .. } = message;
                consumer.log_parked(&Parked {
                    trace_id: message.trace_id(),
                    attempt: Some(lease.attempt),
                    ..Parked::new(id, event_type, GAP)
                });
                self.completion.parked_for_gap(execution, &position);
            }
            _ => self.completion.waits(message, true),
        }
    }

    /// Splits a group into messages that may run in this call if the earlier ones complete, and the
    /// rest. The rest can only be decided after the call. Messages that do not run are marked and
    /// left out.
    pub(super) fn split_runnable(&mut self, group: Vec<usize>) -> (Vec<usize>, Vec<usize>) {
        let gap = self.consumer.gap();
        let mut ahead = self.sequence.aggregates().clone();
        let mut runnable = Vec::with_capacity(group.len());
        for (nth, index) in group.iter().copied().enumerate() {
            let request = &self.batch[index].request;
            self.blocked.hold_back(index, request, &mut self.claims[index]);
            if self.claims[index] != ClaimOutcome::New {
                continue;
            }
            let message = &request.message;
            if self.sequence.verdict_at(&ahead, message, gap) == SequenceVerdict::Next {
                self.sequence.advance(&mut ahead, message);
                runnable.push(index);
            } else if ahead.of(message) == self.sequence.aggregates().of(message) {
                self.in_sequence(index);
            } else {
                return (runnable, group[nth..].to_vec());
            }
        }
        (runnable, Vec::new())
    }
}

impl ConsumerInbox {
    /// Returns the policy for messages whose gap outlasts the wait.
    fn gap(&self) -> Gap {
        self.policy.sequence.as_ref().map(|sequence| sequence.gap).unwrap_or_default()
    }

    /// Returns how long a message waits for missing versions.
    fn gap_wait(&self) -> Duration {
        let wait_ms = self.policy.sequence.as_ref().map_or(0, |sequence| sequence.gap_wait_ms);
        Duration::from_millis(wait_ms)
    }

    /// Logs a decision about a message's version.
    fn log_sequence(&self, message: &Message, position: SequencePosition, text: &str) {
        tracing::info!(
            tenant = self.tenant,
            consumer = self.name,
            message_id = message.id,
            event_type = message.event_type,
            trace_id = message.trace_id(),
            version = position.version,
            at = position.at,
            "{text}"
        );
    }
}
