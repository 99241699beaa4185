//! Metrics and logs of a consumer: claims, runs, failures and parked messages.

use std::{sync::atomic::Ordering, time::Duration};

use oncebox_model::{
    Reason,
    message::Message,
    outcome::{Disposition, Failure},
    reference::{FetchError, FetchedPayload},
};

use crate::{
    batch::{
        claim::ClaimOutcome,
        complete::{PAST_HORIZON, Recorded},
    },
    consumer::ConsumerInbox,
};

/// Number of a consumer's event types with metrics of their own; further ones share `other`.
const EVENT_TYPES_MAX: usize = 100;

impl ConsumerInbox {
    /// Returns the event type as a label of metrics, or `other` beyond the bound.
    pub(crate) fn label(&self, event_type: &str) -> String {
        let mut known = self.event_types.lock().expect("no panic while held");
        if known.len() < EVENT_TYPES_MAX && !known.contains(event_type) {
            known.insert(event_type.to_owned());
        }
        if known.contains(event_type) { event_type.to_owned() } else { "other".to_owned() }
    }

    /// Counts and logs the answer to a claim (S0-009, S0-040).
    pub(crate) fn count_claim(&self, message: &Message, claimed: &ClaimOutcome) {
        let outcome = claimed.name();
        metrics::counter!("oncebox_claims_total", "tenant" => self.tenant.clone(), "consumer" => self.name.clone(),
            "event_type" => self.label(&message.event_type), "outcome" => outcome)
        .increment(1);
        if claimed.is_duplicate() {
            self.duplicates.fetch_add(1, Ordering::Relaxed);
        }
        let (tenant, consumer, message_id, event_type) =
            (&self.tenant, &self.name, &message.id, &message.event_type);
        let trace_id = message.trace_id();
        match claimed {
            ClaimOutcome::Forgotten => self.log_parked(&Parked {
                trace_id,
                error: Some(PAST_HORIZON),
                ..Parked::new(message_id, event_type, Reason::Horizon.as_str())
            }),
            ClaimOutcome::Duplicate { status, same_payload, .. } => {
                tracing::debug!(
                    tenant,
                    consumer,
                    message_id,
                    event_type,
                    trace_id,
                    outcome,
                    status,
                    same_payload,
                    "duplicate skipped"
                );
            }
            _ => tracing::debug!(
                tenant,
                consumer,
                message_id,
                event_type,
                trace_id,
                outcome,
                "message claimed"
            ),
        }
    }

    /// Counts and logs a claim that waited in vain for another session's claim of one of these
    /// messages; the claim is repeated. PostgreSQL does not say which message it was. The event
    /// type is named where all have one.
    pub(crate) fn count_elsewhere<'a>(&self, messages: impl Iterator<Item = &'a Message>) {
        let (mut event_type, mut count) = (None, 0);
        for message in messages {
            count += 1;
            event_type = match event_type {
                None => Some(&*message.event_type),
                Some(known) if known == message.event_type => Some(known),
                Some(_) => Some(""),
            };
        }
        let event_type = event_type.unwrap_or_default();
        metrics::counter!("oncebox_claims_total", "tenant" => self.tenant.clone(), "consumer" => self.name.clone(),
            "event_type" => self.label(event_type), "outcome" => "in_flight_elsewhere")
        .increment(1);
        tracing::debug!(
            tenant = self.tenant,
            consumer = self.name,
            event_type,
            messages = count,
            "claim in flight elsewhere"
        );
    }

    /// Counts claims that were written and withdrawn, since there was no time to run them.
    pub(crate) fn count_withdrawn(&self, withdrawn: usize) {
        metrics::counter!("oncebox_claims_withdrawn_total", "tenant" => self.tenant.clone(), "consumer" => self.name.clone())
            .increment(withdrawn as u64);
    }

    /// Records how long a handler took, also one that was stopped.
    pub(crate) fn count_duration(&self, message: &Message, took: Duration) {
        metrics::histogram!("oncebox_run_duration_seconds", "tenant" => self.tenant.clone(), "consumer" => self.name.clone(),
            "event_type" => self.label(&message.event_type))
        .record(took);
    }

    /// Counts a fetch of a payload by its outcome, with its bytes and its duration. One that found
    /// no memory is made again, and counted then.
    pub(crate) fn count_fetch(&self, fetched: &Result<FetchedPayload, FetchError>, took: Duration) {
        let outcome = match fetched {
            Ok(payload) => {
                metrics::counter!("oncebox_reference_bytes_total", "tenant" => self.tenant.clone(), "consumer" => self.name.clone())
                    .increment(payload.len() as u64);
                "fetched"
            }
            Err(FetchError::Reference(error)) => error.fault.reason().as_str(),
            Err(FetchError::Host(_)) => "host_fault",
            Err(FetchError::NoMemory) => return,
        };
        metrics::counter!("oncebox_reference_fetches_total", "tenant" => self.tenant.clone(), "consumer" => self.name.clone(),
            "outcome" => outcome)
        .increment(1);
        metrics::histogram!("oncebox_reference_fetch_duration_seconds", "tenant" => self.tenant.clone(), "consumer" => self.name.clone())
            .record(took);
    }

    /// Counts a message by the disposition that its run, or its parking, gave it.
    pub(crate) fn count_run(&self, message: &Message, disposition: Disposition) {
        metrics::counter!("oncebox_messages_total", "tenant" => self.tenant.clone(), "consumer" => self.name.clone(),
            "event_type" => self.label(&message.event_type), "disposition" => disposition.status())
        .increment(1);
    }

    /// Counts and logs failures of these messages whose rows are committed.
    pub(crate) fn tell_failures<'a>(
        &self,
        messages: impl Iterator<Item = &'a Message> + Clone,
        failures: impl Iterator<Item = Recorded>,
    ) {
        for Recorded { message_id, failure, disposition, attempt } in failures {
            if let Some(message) = messages.clone().find(|message| message.id == message_id) {
                self.log_failure(message, &failure, disposition, attempt);
            }
        }
    }

    /// Counts and logs a failure whose row is committed. One that parks its message is logged as a
    /// parked message (S1-088).
    fn log_failure(
        &self,
        message: &Message,
        failure: &Failure,
        disposition: Disposition,
        attempt: u32,
    ) {
        self.count_failure(&message.event_type, failure.kind.name());
        let reason = failure.kind.reason();
        if disposition == Disposition::Parked {
            let Message { id, event_type, .. } = message;
            return self.log_parked(&Parked {
                attempt: Some(attempt),
                error: Some(&failure.text),
                trace_id: message.trace_id(),
                ..Parked::new(id, event_type, &reason)
            });
        }
        tracing::warn!(
            tenant = self.tenant,
            consumer = self.name,
            message_id = message.id,
            event_type = message.event_type,
            trace_id = message.trace_id(),
            attempt,
            reason,
            error = failure.text,
            disposition = disposition.status(),
            "message failed"
        );
    }

    /// Counts a run that failed, or that ended without an answer.
    pub(crate) fn count_failure(&self, event_type: &str, reason: &'static str) {
        metrics::counter!("oncebox_failures_total", "tenant" => self.tenant.clone(), "consumer" => self.name.clone(),
            "event_type" => self.label(event_type), "reason" => reason)
        .increment(1);
    }

    /// Counts and logs a message that is kept for an operator.
    pub(crate) fn log_parked(&self, parked: &Parked<'_>) {
        let Parked { message_id, event_type, trace_id, reason, attempt, error, collides_with } =
            *parked;
        metrics::counter!("oncebox_parked_total", "tenant" => self.tenant.clone(), "consumer" => self.name.clone(),
            "event_type" => self.label(event_type), "reason" => reason.split(':').next().unwrap_or(reason).to_owned())
        .increment(1);
        let (tenant, consumer) = (&self.tenant, &self.name);
        tracing::warn!(
            tenant,
            consumer,
            message_id,
            event_type,
            trace_id,
            reason,
            attempt,
            error,
            collides_with,
            "message parked"
        );
    }
}

/// Log entry of a message that is kept for an operator.
pub(crate) struct Parked<'a> {
    /// Id of its row.
    pub(crate) message_id: &'a str,
    /// Its event type; empty where it has none.
    pub(crate) event_type: &'a str,
    /// Trace that it is part of.
    pub(crate) trace_id: Option<&'a str>,
    /// Reason in its row.
    pub(crate) reason: &'a str,
    /// Number of the run that parked it; none where it never ran.
    pub(crate) attempt: Option<u32>,
    /// Error text of that run.
    pub(crate) error: Option<&'a str>,
    /// Known id that it came with, where that id belongs to another payload.
    pub(crate) collides_with: Option<&'a str>,
}

impl<'a> Parked<'a> {
    /// Returns an entry without attempt, error and trace.
    pub(crate) fn new(message_id: &'a str, event_type: &'a str, reason: &'a str) -> Self {
        Self {
            message_id,
            event_type,
            trace_id: None,
            reason,
            attempt: None,
            error: None,
            collides_with: None,
        }
    }
}
