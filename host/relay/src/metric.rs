//! Metrics of the relay.

use std::collections::BTreeSet;

use crate::{breaker::BreakerPhase, reason::OutgoingReason, store::OpenOutgoing};

/// Sets the gauge of an endpoint's breaker, and counts its transition.
pub(crate) fn endpoint_breaker(tenant: &str, endpoint: &str, phase: BreakerPhase) {
    let (tenant, endpoint) = (tenant.to_owned(), endpoint.to_owned());
    metrics::gauge!("oncebox_endpoint_breaker_state", "tenant" => tenant.clone(), "endpoint" => endpoint.clone())
        .set(phase.gauge());
    metrics::counter!("oncebox_endpoint_breaker_transitions_total", "tenant" => tenant, "endpoint" => endpoint, "to" => phase.name())
        .increment(1);
}

/// Sets the gauge of an endpoint's breaker that this host has forgotten.
pub(crate) fn endpoint_forgotten(tenant: &str, endpoint: &str) {
    metrics::gauge!("oncebox_endpoint_breaker_state", "tenant" => tenant.to_owned(), "endpoint" => endpoint.to_owned())
        .set(BreakerPhase::Closed.gauge());
}

/// Counts a request to an endpoint by its outcome.
pub(crate) fn endpoint_request(tenant: &str, endpoint: &str, outcome: &'static str) {
    metrics::counter!("oncebox_endpoint_requests_total", "tenant" => tenant.to_owned(), "endpoint" => endpoint.to_owned(), "outcome" => outcome)
        .increment(1);
}

/// Counts a request that was repeated although the one before it may have arrived.
pub(crate) fn endpoint_repeated(tenant: &str, endpoint: &str, receiver_deduplicates: bool) {
    let deduplicates = if receiver_deduplicates { "true" } else { "false" };
    metrics::counter!("oncebox_endpoint_repeated_total", "tenant" => tenant.to_owned(), "endpoint" => endpoint.to_owned(), "deduplicates" => deduplicates)
        .increment(1);
}

/// Counts a repeated request that the endpoint refused.
pub(crate) fn endpoint_repeat_refused(tenant: &str, endpoint: &str) {
    metrics::counter!("oncebox_endpoint_repeat_refused_total", "tenant" => tenant.to_owned(), "endpoint" => endpoint.to_owned())
        .increment(1);
}

/// The tenant and the consumer that a message is of, and the kind of its destination.
#[derive(Debug, Clone)]
pub(crate) struct Labels {
    tenant: String,
    consumer: String,
    destination_kind: &'static str,
}

impl Labels {
    /// Creates the labels of a message.
    pub(crate) fn new(tenant: &str, consumer: &str, destination_kind: &'static str) -> Self {
        Self { tenant: tenant.to_owned(), consumer: consumer.to_owned(), destination_kind }
    }

    /// Counts a message that its destination has confirmed, so many seconds past its due time.
    pub(crate) fn sent(self, delay_s: f64) {
        metrics::histogram!("oncebox_outgoing_delay_seconds", "tenant" => self.tenant.clone(), "consumer" => self.consumer.clone(), "destination_kind" => self.destination_kind)
            .record(delay_s);
        metrics::counter!("oncebox_outgoing_sent_total", "tenant" => self.tenant, "consumer" => self.consumer, "destination_kind" => self.destination_kind)
            .increment(1);
    }

    /// Counts an attempt that failed.
    pub(crate) fn failed(self, reason: OutgoingReason) {
        metrics::counter!("oncebox_outgoing_failures_total", "tenant" => self.tenant, "consumer" => self.consumer, "destination_kind" => self.destination_kind, "reason" => reason.as_str())
            .increment(1);
    }

    /// Counts a message that was parked.
    pub(crate) fn parked(self, reason: OutgoingReason) {
        metrics::counter!("oncebox_outgoing_parked_total", "tenant" => self.tenant, "consumer" => self.consumer, "destination_kind" => self.destination_kind, "reason" => reason.as_str())
            .increment(1);
    }
}

/// The consumers of one database whose gauges are set.
#[derive(Debug, Default)]
pub(crate) struct Gauges(BTreeSet<(String, String)>);

impl Gauges {
    /// Sets the gauges of the consumers with messages that are not completed, and those of all
    /// others to zero.
    pub(crate) fn set(&mut self, figures: &[OpenOutgoing]) {
        let of = |open: &OpenOutgoing| (open.tenant.clone(), open.consumer.clone());
        let now: BTreeSet<_> = figures.iter().map(of).collect();
        for (tenant, consumer) in self.0.difference(&now) {
            gauge(tenant, consumer, 0, 0.0);
        }
        for open in figures {
            gauge(&open.tenant, &open.consumer, open.messages, open.oldest_s);
        }
        self.0 = now;
    }

    /// Sets all gauges to zero, since this host does not look at the database any more.
    pub(crate) fn clear(&mut self) {
        self.set(&[]);
    }
}

fn gauge(tenant: &str, consumer: &str, messages: i64, oldest_s: f64) {
    metrics::gauge!("oncebox_outgoing_open", "tenant" => tenant.to_owned(), "consumer" => consumer.to_owned())
        .set(messages as f64);
    metrics::gauge!("oncebox_outgoing_oldest_seconds", "tenant" => tenant.to_owned(), "consumer" => consumer.to_owned())
        .set(oldest_s);
}

#[cfg(test)]
mod tests {
    use super::*;

    // What could go wrong: the gauge of a consumer that has sent everything keeps its last value,
    // and its alert never ends.
    #[test]
    fn a_consumer_without_figures_is_set_to_zero_once() {
        let open = |consumer: &str| OpenOutgoing {
            tenant: "acme".to_owned(),
            consumer: consumer.to_owned(),
            messages: 3,
            oldest_s: 1.5,
        };
        let mut gauges = Gauges::default();
        gauges.set(&[open("a"), open("b")]);
        assert_eq!(gauges.0.len(), 2);
        gauges.set(&[open("b")]);
        assert_eq!(gauges.0.len(), 1);
        gauges.clear();
        assert!(gauges.0.is_empty());
    }
}
