//! An outgoing message as its row holds it.

use chrono::{DateTime, Utc};

/// An outgoing message that this relay has leased.
#[derive(Debug, Clone, sqlx::FromRow)]
pub(crate) struct OutgoingRow {
    /// Consumer whose handler emitted it.
    pub(crate) consumer_id: i32,
    /// Id of the message that caused it.
    pub(crate) message_id: String,
    /// Number of the emit among those of its cause.
    pub(crate) ordinal: i32,
    /// Start of the day that decides the partition of the row. A leased row never moves.
    pub(crate) bucket: DateTime<Utc>,
    /// Place in the order of all emits.
    pub(crate) position: i64,
    /// Id of the message.
    pub(crate) id: String,
    /// Key of its order, and of the record.
    pub(crate) key: Option<Vec<u8>>,
    /// Type of the event.
    pub(crate) event_type: String,
    /// Media type of the payload.
    pub(crate) content_type: Option<String>,
    /// W3C trace context.
    pub(crate) trace_parent: Option<String>,
    /// Id that all messages of one chain of causes share.
    pub(crate) correlation_id: String,
    /// Encoded headers of the handler.
    pub(crate) headers: Vec<u8>,
    /// Payload; none is a tombstone.
    pub(crate) payload: Option<Vec<u8>>,
    /// Attempts, with this one.
    pub(crate) attempts: i32,
    /// Number of this lease.
    pub(crate) epoch: i64,
    /// Name by which its consumer may cancel it.
    pub(crate) cancel_token: Option<String>,
    /// Whether an earlier attempt ended without an answer.
    pub(crate) may_have_arrived: bool,
    /// Begin of the transaction that wrote it.
    pub(crate) created_at: DateTime<Utc>,
}

impl OutgoingRow {
    /// Drops what is sent: the mark does not need it, and may take long.
    pub(crate) fn forget_content(&mut self) {
        (self.key, self.payload, self.headers) = (None, None, Vec::new());
    }

    /// Returns the number of this attempt, from 1.
    pub(crate) fn attempt(&self) -> u32 {
        u32::try_from(self.attempts).unwrap_or(0).max(1)
    }

    /// Returns a number from 0 to 1 that is the message's own, by which its delays differ from
    /// those of others.
    pub(crate) fn spread(&self) -> f64 {
        let last = self.id.rsplit('-').next().unwrap_or_default();
        let digits = last.get(last.len().saturating_sub(8)..).unwrap_or_default();
        f64::from(u32::from_str_radix(digits, 16).unwrap_or_default()) / f64::from(u32::MAX)
    }

    /// Returns the kilobytes of its payload and headers, at least one.
    pub(crate) fn kilobytes(&self) -> usize {
        (self.payload.as_ref().map_or(0, Vec::len) + self.headers.len()) / 1024 + 1
    }
}

#[cfg(test)]
pub(crate) mod fixture {
    use super::*;

    /// Returns a message of the tests, with one header of its handler.
    pub(crate) fn row() -> OutgoingRow {
        OutgoingRow {
            consumer_id: 7,
            message_id: "cause-1".to_owned(),
            ordinal: 2,
            bucket: "2026-03-01T00:00:00Z".parse().unwrap(),
            position: 99,
            id: "0d9f6f0e-0000-8000-8000-000000000001".to_owned(),
            key: Some(b"k".to_vec()),
            event_type: "order.paid".to_owned(),
            content_type: Some("application/json".to_owned()),
            trace_parent: None,
            correlation_id: "chain-1".to_owned(),
            headers: oncebox_model::headers::encode(&vec![("mine".to_owned(), b"1".to_vec())]),
            payload: Some(b"{\"total\":5}".to_vec()),
            attempts: 1,
            epoch: 4,
            cancel_token: None,
            may_have_arrived: false,
            created_at: "2026-03-01T10:20:30.456Z".parse().unwrap(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{fixture::row, *};

    // What could go wrong: a tombstone takes no room, so that any number of them is leased, or a
    // redrive that sets the attempts to none makes an attempt without a number.
    #[test]
    fn a_message_takes_room_and_its_attempts_are_counted_from_1() {
        let last = |id: &str| OutgoingRow { id: id.to_owned(), ..row() }.spread();
        assert_eq!((last("0-00000000"), last("0-00ffffffff"), last("odd")), (0.0, 1.0, 0.0));
        let large = OutgoingRow { payload: Some(vec![0; 3 << 20]), ..row() };
        assert_eq!(large.kilobytes(), 3 * 1024 + 1);
        let tombstone = OutgoingRow { payload: None, headers: Vec::new(), attempts: 0, ..row() };
        assert_eq!((tombstone.kilobytes(), tombstone.attempt()), (1, 1));
    }
}
