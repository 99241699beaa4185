//! Outgoing messages: what a handler sends after its commit, and to where.
//!
//! A handler *emits* an outgoing message. The completion writes it as a row, in the transaction of
//! the message that caused it, and a relay sends it afterwards. Its id is derived from the message
//! that caused it, so that a repeated run emits the same ids.

// The places to which outgoing messages go.
mod destination;
// The answers of endpoints.
mod answer;
// The rights of a run to emit and to cancel.
mod outbox;
// The statuses of an outgoing message.
mod status;
// The signal to the relay after a commit.
mod wakeup;
// The spans of emits and of attempts to send.
mod span;

use std::time::Duration;

use sha2::{Digest, Sha256};

pub use self::{
    answer::{AnswerMode, UnknownAnswerMode},
    destination::{Destination, DestinationFault, destination_part_fault, matches_destination},
    outbox::{CancelNothing, CancelOutgoing, Outbox, OutboxMode},
    span::new_outgoing_span,
    status::{OutgoingStatus, UnknownOutgoingStatus},
    wakeup::OutgoingWakeup,
};
use crate::{
    hooks::{self, Defect},
    message::Message,
    record::Headers,
};

/// Topic in the records of messages that came from a handler of the tenant, and from no broker.
pub const DELIVERED_TOPIC: &str = "oncebox-outgoing";

/// The time at which an outgoing message is to be sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Due {
    /// As soon as the transaction has committed.
    Now,
    /// After this time, from the beginning of the transaction on.
    After(Duration),
    /// At this time by the clock of the database, milliseconds since the Unix epoch. A time in the
    /// past stands for now.
    At(i64),
}

impl Due {
    /// Returns the name of the kind: `now`, `after` or `at`.
    pub fn kind(self) -> &'static str {
        match self {
            Self::Now => "now",
            Self::After(_) => "after",
            Self::At(_) => "at",
        }
    }

    /// Returns whether the message is due with the commit, whatever the clocks say.
    pub fn is_now(self) -> bool {
        match self {
            Self::Now => true,
            Self::After(delay) => delay.is_zero(),
            Self::At(_) => false,
        }
    }
}

/// A message that a handler emitted, before it has a row.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OutgoingMessage {
    /// Number of the emit among those of its cause in the run, from 0. Emits that were undone count
    /// too.
    pub ordinal: u32,
    /// Id of the message, by [`outgoing_id`].
    pub id: String,
    /// Place to which it goes.
    pub destination: Destination,
    /// Type of the event.
    pub event_type: String,
    /// Media type of the payload; none where the handler names none.
    pub content_type: Option<String>,
    /// Key of its order: messages of one destination and key are sent in the order of their due
    /// times, then of their emits. None for no order.
    pub key: Option<Vec<u8>>,
    /// Headers that the handler gave it.
    pub headers: Headers,
    /// Payload; none is a tombstone.
    pub payload: Option<Vec<u8>>,
    /// Time at which it is to be sent.
    pub due: Due,
    /// Name by which the consumer may cancel it; none for a message that is sent in any case.
    pub cancel_token: Option<String>,
}

impl OutgoingMessage {
    /// Returns the bytes that the message takes in memory and in its row, within a few.
    pub fn bytes(&self) -> u64 {
        let headers = self.headers.iter().map(|(name, value)| name.len() + value.len());
        let parts = [
            self.id.len(),
            self.event_type.len(),
            self.content_type.as_ref().map_or(0, String::len),
            self.key.as_ref().map_or(0, Vec::len),
            headers.sum::<usize>(),
            self.payload.as_ref().map_or(0, Vec::len),
            self.cancel_token.as_ref().map_or(0, String::len),
        ];
        parts.iter().sum::<usize>() as u64
    }
}

/// The outcome of a run that succeeded.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Output {
    /// JSON document that the inbox row keeps; none where the handler gave none.
    pub result: Option<String>,
    /// Messages that the run emitted and did not undo, in the order of the emits.
    pub outgoing: Vec<OutgoingMessage>,
}

impl From<Option<String>> for Output {
    fn from(result: Option<String>) -> Self {
        Self { result, outgoing: Vec::new() }
    }
}

/// Separates these hashes from all others.
const DOMAIN: &[u8] = b"oncebox outgoing message 1";
/// Separates the ids of answers from all others.
const ANSWER_DOMAIN: &[u8] = b"oncebox answer 1";

/// Derives the id of an outgoing message from its cause and its ordinal: a UUID of version 8. A
/// repeated run of the cause derives the same ids.
pub fn outgoing_id(tenant: &str, consumer: &str, message_id: &str, ordinal: u32) -> String {
    derived_id(DOMAIN, [tenant, consumer, message_id], ordinal)
}

/// Derives the id of the message that an endpoint's answer becomes, from the outgoing message that
/// it answers: a UUID of version 8, and that of no outgoing message. An answer that comes again has
/// the same id.
pub fn answer_id(tenant: &str, consumer: &str, outgoing_id: &str) -> String {
    derived_id(ANSWER_DOMAIN, [tenant, consumer, outgoing_id], 0)
}

fn derived_id(domain: &[u8], parts: [&str; 3], ordinal: u32) -> String {
    let mut hash = Sha256::new().chain_update(domain);
    for part in parts {
        hash.update((part.len() as u64).to_be_bytes());
        hash.update(part);
    }
    hash.update(ordinal.to_be_bytes());
    let digest: [u8; 32] = hash.finalize().into();
    let first = digest.first_chunk::<16>().copied().unwrap_or_default(); // of 32 bytes
    uuid(match hooks::sabotage(Defect::OutgoingIdsRandom) {
        true => rand::random(),
        false => u128::from_be_bytes(first),
    })
}

/// Formats bits as a UUID of version 8, the one for bits of one's own making (RFC 9562).
fn uuid(bits: u128) -> String {
    const MASK: u128 = (0xf_u128 << 76) | (0b11_u128 << 62);
    const VERSION_AND_VARIANT: u128 = (0x8_u128 << 76) | (0b10_u128 << 62);
    let hex = format!("{:032x}", (bits & !MASK) | VERSION_AND_VARIANT);
    let parts = [&hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..]];
    parts.join("-")
}

/// Headers of a message that name its correlation, the first one that it has counts.
const CORRELATION_HEADERS: [&str; 2] = ["ce_correlationid", "correlation-id"];

/// Maximum bytes of a correlation id that a message hands on.
const CORRELATION_BYTES_MAX: usize = 512;

/// Returns the correlation id of the messages that a message causes: its own, where a header has
/// one that is a text without control characters, else its id.
pub fn correlation_id(cause: &Message) -> &str {
    let usable = |text: &&str| {
        (1..=CORRELATION_BYTES_MAX).contains(&text.len()) && !text.chars().any(char::is_control)
    };
    let named = CORRELATION_HEADERS.iter().find_map(|name| {
        cause.record.header(name).and_then(|value| std::str::from_utf8(value).ok()).filter(usable)
    });
    named.unwrap_or(&cause.id)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{payload_key::PayloadKey, record::Record};

    fn message(headers: &[(&str, &[u8])]) -> Message {
        let headers =
            headers.iter().map(|(name, value)| ((*name).to_owned(), value.to_vec())).collect();
        let record = Record {
            topic: "t".into(),
            topic_id: None,
            partition: 0,
            offset: 1,
            timestamp_ms: 0,
            key: None,
            headers,
            payload: None,
        };
        Message { id: "m".to_owned(), ..Message::undecodable(&record, &PayloadKey::new(&[0; 32])) }
    }

    // What could go wrong: two causes share an id, since their parts are joined without a border,
    // or a run that is repeated emits another id.
    #[test]
    fn an_id_is_that_of_its_cause_and_ordinal() {
        let id = outgoing_id("acme", "orders", "1", 0);
        assert_eq!(id, outgoing_id("acme", "orders", "1", 0));
        for other in [
            outgoing_id("acme", "orders", "1", 1),
            outgoing_id("acme", "orders", "10", 0),
            outgoing_id("acme", "order", "s1", 0),
            outgoing_id("acm", "eorders", "1", 0),
            outgoing_id("acme", "", "orders1", 0),
        ] {
            assert_ne!(id, other);
        }
    }

    // What could go wrong: a consumer that gets its own outgoing message emits in its turn, under
    // the id that the answer to that message has.
    #[test]
    fn an_answer_has_an_id_of_its_own() {
        let sent = outgoing_id("acme", "orders", "1", 0);
        let answer = answer_id("acme", "orders", &sent);
        assert_eq!(answer, answer_id("acme", "orders", &sent));
        assert_ne!(answer, outgoing_id("acme", "orders", &sent, 0));
        assert_ne!(answer, answer_id("acme", "orders", "1"));
    }

    #[test]
    fn an_id_is_a_uuid_of_version_8() {
        for ordinal in 0..200 {
            let id = outgoing_id("acme", "orders", "message", ordinal);
            let lengths: Vec<_> = id.split('-').map(str::len).collect();
            assert_eq!(lengths, [8, 4, 4, 4, 12], "{id}");
            assert_eq!(id.as_bytes()[14], b'8', "{id}");
            assert!(b"89ab".contains(&id.as_bytes()[19]), "{id}");
        }
        assert_eq!(uuid(0), "00000000-0000-8000-8000-000000000000");
        assert_eq!(uuid(u128::MAX), "ffffffff-ffff-8fff-bfff-ffffffffffff");
    }

    // What could go wrong: a header that no text can hold ends the message, or its bytes go on.
    #[test]
    fn a_correlation_is_handed_on_or_begun() {
        assert_eq!(correlation_id(&message(&[])), "m");
        assert_eq!(correlation_id(&message(&[("Correlation-Id", b"c")])), "c");
        let both: [(&str, &[u8]); 2] = [("correlation-id", b"c"), ("ce_correlationid", b"d")];
        assert_eq!(correlation_id(&message(&both)), "d");
        for unusable in [&b""[..], b"\xff", b"a\nb", b"a\0b", &[b'x'; 513]] {
            assert_eq!(correlation_id(&message(&[("ce_correlationid", unusable)])), "m");
        }
    }

    #[test]
    fn only_what_needs_no_clock_is_due_at_once() {
        assert!(Due::Now.is_now() && Due::After(Duration::ZERO).is_now());
        assert!(!Due::After(Duration::from_millis(1)).is_now() && !Due::At(0).is_now());
        let kinds = [Due::Now, Due::After(Duration::ZERO), Due::At(0)].map(Due::kind);
        assert_eq!(kinds, ["now", "after", "at"]);
    }
}
