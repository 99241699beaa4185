//! The messages that a receiver outside has, by their ids.

use std::collections::{BTreeMap, btree_map::Entry};

use super::expected::SentMessage;

/// A message as its receiver got it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct ReceivedMessage {
    /// Delivery of the webhook that caused it.
    pub(super) delivery: String,
    /// Event type.
    pub(super) event_type: String,
    /// Payload, as it came.
    pub(super) payload: Vec<u8>,
}

/// An arriving message, compared with the ledger.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Arrival {
    /// Nothing came under its id before.
    New,
    /// The same message came under its id before.
    Repeated,
    /// Another message came under its id before.
    Conflict,
}

/// The ledger of one receiver for one tenant.
#[derive(Debug, Clone, Default)]
pub(super) struct ReceiverLedger {
    messages: BTreeMap<String, ReceivedMessage>,
    repeated: u64,
    conflicts: u64,
}

impl ReceiverLedger {
    /// Notes a message under its id. The ledger keeps the first one of each id.
    pub(super) fn note(&mut self, id: String, message: ReceivedMessage) -> Arrival {
        match self.messages.entry(id) {
            Entry::Vacant(place) => {
                place.insert(message);
                Arrival::New
            }
            Entry::Occupied(known) if *known.get() == message => {
                self.repeated += 1;
                Arrival::Repeated
            }
            Entry::Occupied(_) => {
                self.conflicts += 1;
                Arrival::Conflict
            }
        }
    }

    /// Returns the number of distinct ids.
    pub(super) fn distinct(&self) -> u64 {
        self.messages.len() as u64
    }

    /// Returns the number of times that a known message came again.
    pub(super) fn repeated(&self) -> u64 {
        self.repeated
    }

    /// Returns the number of times that another message came under a known id.
    pub(super) fn conflicts(&self) -> u64 {
        self.conflicts
    }

    /// Returns the messages by the delivery that caused them, each with the number of its ids. A
    /// payload that is not JSON is a text, which nothing expects.
    pub(super) fn by_delivery(&self) -> BTreeMap<String, SentMessage> {
        let mut found = BTreeMap::<String, SentMessage>::new();
        for message in self.messages.values() {
            let row = found.entry(message.delivery.clone()).or_insert_with(|| {
                let payload = serde_json::from_slice(&message.payload);
                let text = || String::from_utf8_lossy(&message.payload).into_owned().into();
                (message.event_type.clone(), payload.unwrap_or_else(|_| text()), 0)
            });
            row.2 += 1;
        }
        found
    }
}

/// Returns the delivery's own id, without the CloudEvents source that the message id begins with.
pub(super) fn delivery_of(message_id: &str) -> String {
    message_id.rsplit(' ').next().unwrap_or(message_id).to_owned()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn message(delivery: &str, payload: &str) -> ReceivedMessage {
        ReceivedMessage {
            delivery: delivery.to_owned(),
            event_type: "comment.created".to_owned(),
            payload: payload.as_bytes().to_vec(),
        }
    }

    // What could go wrong: a message that was sent twice under two ids counts as one, or one that
    // was repeated under its id counts as two.
    #[test]
    fn a_repeated_id_is_one_message_and_two_ids_are_two() {
        let mut ledger = ReceiverLedger::default();
        let note = |ledger: &mut ReceiverLedger, id: &str, delivery: &str, payload: &str| {
            ledger.note(id.to_owned(), message(delivery, payload))
        };
        assert_eq!(note(&mut ledger, "1", "d-1", "{\"a\":1}"), Arrival::New);
        assert_eq!(note(&mut ledger, "1", "d-1", "{\"a\":1}"), Arrival::Repeated);
        assert_eq!(note(&mut ledger, "1", "d-1", "{\"a\":2}"), Arrival::Conflict);
        assert_eq!(note(&mut ledger, "2", "d-2", "{\"a\":1}"), Arrival::New);
        assert_eq!(note(&mut ledger, "3", "d-2", "{\"a\":1}"), Arrival::New);
        assert_eq!(note(&mut ledger, "4", "d-3", "no JSON"), Arrival::New);
        assert_eq!((ledger.distinct(), ledger.repeated(), ledger.conflicts()), (4, 1, 1));
        let sent = |payload, ids| ("comment.created".to_owned(), payload, ids);
        let expected = [
            ("d-1".to_owned(), sent(json!({ "a": 1 }), 1)),
            ("d-2".to_owned(), sent(json!({ "a": 1 }), 2)),
            ("d-3".to_owned(), sent(json!("no JSON"), 1)),
        ];
        assert_eq!(ledger.by_delivery(), BTreeMap::from(expected));
    }

    #[test]
    fn a_delivery_is_the_last_word_of_a_message_id() {
        assert_eq!(delivery_of("https://github.com 12-ab"), "12-ab");
        assert_eq!(delivery_of("12-ab"), "12-ab");
    }
}
