//! A detector of bad message ids (S1-049).
//!
//! A payload that comes again under another id probably got its id from a relay or a consumer. Such
//! a message is not deduplicated. The detector only warns.

use std::collections::{HashMap, VecDeque};

use oncebox_model::message::Message;

use crate::consumer::ConsumerInbox;

/// Number of payloads that are remembered per partition.
const REMEMBERED: usize = 1_024;
/// Shortest payload that is compared, in bytes; shorter ones repeat by chance.
const PAYLOAD_BYTES_MIN: usize = 64;

/// The last payloads of a partition, and the ids that they came with.
#[derive(Debug, Default)]
pub(crate) struct DuplicatePayloads {
    /// Message id of each remembered payload, by payload hash.
    ids: HashMap<[u8; 32], String>,
    /// Payload hashes, oldest first.
    order: VecDeque<[u8; 32]>,
    /// True after the warning of this assignment.
    warned: bool,
}

impl DuplicatePayloads {
    /// Warns where this payload came before under another id.
    pub(crate) fn observe(&mut self, consumer: &ConsumerInbox, message: &Message) {
        if self.is_suspect(message) {
            metrics::counter!("oncebox_suspect_ids_total", "tenant" => consumer.tenant.clone(), "consumer" => consumer.name.clone())
                .increment(1);
            // The counter has every case; one log line per assignment is enough to find it.
            if std::mem::replace(&mut self.warned, true) {
                return;
            }
            tracing::warn!(
                tenant = consumer.tenant,
                consumer = consumer.name,
                message_id = message.id,
                trace_id = message.trace_id(),
                "the same payload came under another message id; ids that change between \
                    deliveries defeat deduplication"
            );
        }
    }

    /// Returns whether this payload came before under another id, and remembers it.
    fn is_suspect(&mut self, message: &Message) -> bool {
        let Some(hash) = message.payload_hash.filter(|_| {
            message.record.payload.as_ref().is_some_and(|p| p.len() >= PAYLOAD_BYTES_MIN)
        }) else {
            return false;
        };
        if let Some(known) = self.ids.get(&hash) {
            return *known != message.id;
        }
        self.order.push_back(hash);
        self.ids.insert(hash, message.id.clone());
        if self.order.len() > REMEMBERED
            && let Some(oldest) = self.order.pop_front()
        {
            self.ids.remove(&oldest);
        }
        false
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use oncebox_model::{payload_key::PayloadKey, record::Record};

    /// Returns a delivery of this payload under this id.
    fn delivery(id: &str, payload: &str) -> Message {
        let payload = payload.as_bytes().to_vec();
        let record = Record {
            topic: "t".into(),
            topic_id: None,
            partition: 0,
            offset: 7,
            timestamp_ms: 0,
            key: None,
            headers: Vec::new(),
            payload: Some(payload.clone()),
        };
        Message {
            id: id.to_owned(),
            source: String::new(),
            event_type: String::new(),
            event_version: None,
            ordering_key: None,
            sequence: None,
            content_type: None,
            trace_parent: None,
            decoded: None,
            fetched: None,
            payload_hash: Some(PayloadKey::new(&[1; 32]).hash(&payload)),
            record,
        }
    }

    fn payload(event: usize) -> String {
        format!("{{\"event\": {event:0>64}}}")
    }

    /// Delivers 50 events three times each, in three rounds, and returns how many deliveries were
    /// suspected.
    fn suspected(id: impl Fn(usize, usize) -> String) -> usize {
        let mut suspects = DuplicatePayloads::default();
        let deliveries = (0..3).flat_map(|round| (0..50).map(move |event| (round, event)));
        deliveries
            .filter(|(round, event)| {
                suspects.is_suspect(&delivery(&id(*event, *round), &payload(*event)))
            })
            .count()
    }

    // S1-049: each kind of id that changes between deliveries of one event is seen at every further
    // delivery.
    #[test]
    fn ids_that_change_between_deliveries_are_suspected() {
        // S1-049.
        assert_eq!(
            suspected(|_, _| uuid::Uuid::new_v4().to_string()),
            100,
            "random in the consumer"
        );
        assert_eq!(
            suspected(|event, round| format!("t:0:{}", 50 * round + event)),
            100,
            "the offset of each delivery"
        );
        assert_eq!(
            suspected(|event, round| format!("2026-11-23T10:{round:02}:{event:02}Z")),
            100,
            "the time of each delivery"
        );
        assert_eq!(
            suspected(|event, round| format!("order-{event}/attempt-{}", round + 1)),
            100,
            "the attempt"
        );
        let relayed = |event, round| {
            if round == 0 { format!("event-{event}") } else { format!("relay-{round}-{event}") }
        };
        assert_eq!(suspected(relayed), 100, "made again by a relay");
        assert_eq!(suspected(|event, _| format!("event-{event}")), 0, "an id that stays the same");
    }

    // S1-049: an id that is not unique comes with another payload. The claim treats that as a
    // collision and parks the message
    // (`effect_once::another_payload_under_a_known_id_is_kept_unless_the_policy_says_ignore`); the
    // detector does not suspect it.
    #[test]
    fn a_domain_field_that_is_not_unique_is_no_suspect() {
        assert_eq!(suspected(|event, _| format!("customer-{}", event % 5)), 0);
    }

    // Limits of the detector: short payloads, which repeat by chance, and events that lie too far
    // apart.
    #[test]
    fn short_payloads_and_events_far_apart_are_not_seen() {
        let mut suspects = DuplicatePayloads::default();
        let (short, long) = ("x".repeat(PAYLOAD_BYTES_MIN - 1), "x".repeat(PAYLOAD_BYTES_MIN));
        assert!(["a", "b"].map(|id| suspects.is_suspect(&delivery(id, &short))) == [false, false]);
        assert!(["a", "b"].map(|id| suspects.is_suspect(&delivery(id, &long))) == [false, true]);
        let between = |events: usize| {
            let mut suspects = DuplicatePayloads::default();
            suspects.is_suspect(&delivery("first", &payload(0)));
            (1..=events).for_each(|event| {
                assert!(!suspects.is_suspect(&delivery(&format!("id-{event}"), &payload(event))))
            });
            suspects.is_suspect(&delivery("again", &payload(0)))
        };
        assert!(between(REMEMBERED - 1) && !between(REMEMBERED));
    }
}
