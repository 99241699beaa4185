//! What comes from a broker and what a handler sees.

use std::sync::Arc;

use sha2::{Digest, Sha256};

/// Header names and their values, in the record's order; names may repeat.
pub type Headers = Vec<(String, Vec<u8>)>;

/// A raw record of a partitioned log, before anyone has looked into it.
#[derive(Debug, Clone)]
pub struct Record {
    /// Topic the record was read from.
    pub topic: Arc<str>,
    /// The broker's own id of the topic, which a re-created topic of the same name does
    /// not share. None where the broker does not tell.
    pub topic_id: Option<Arc<str>>,
    /// Partition of the topic.
    pub partition: i32,
    /// Position in the partition.
    pub offset: i64,
    /// Milliseconds since the Unix epoch; 0 where the record has none.
    pub timestamp_ms: i64,
    /// The record's key.
    pub key: Option<Vec<u8>>,
    /// The record's headers.
    pub headers: Headers,
    /// The record's value; none is a tombstone.
    pub payload: Option<Vec<u8>>,
}

impl Record {
    /// Bytes this record holds in memory, for prefetch limits.
    pub fn size(&self) -> usize {
        let headers: usize =
            self.headers.iter().map(|(name, value)| name.len() + value.len()).sum();
        headers
            + self.key.as_ref().map_or(0, Vec::len)
            + self.payload.as_ref().map_or(0, Vec::len)
            + 64
    }

    /// The last value of a header, compared without regard to case.
    pub fn header(&self, name: &str) -> Option<&[u8]> {
        self.headers
            .iter()
            .rev()
            .find(|(n, _)| n.eq_ignore_ascii_case(name))
            .map(|(_, value)| value.as_slice())
    }
}

/// A decoded message: a record whose identity and event type are known.
#[derive(Debug, Clone)]
pub struct Message {
    /// Identity for deduplication within (tenant, consumer).
    pub id: String,
    /// CloudEvents `source`, or the topic.
    pub source: String,
    /// Chooses the handler.
    pub event_type: String,
    /// Version of the event's schema, where the message says.
    pub event_version: Option<String>,
    /// What must run in order, where the policy names something.
    pub ordering_key: Option<Vec<u8>>,
    /// The payload as JSON, where it came in the wire format of a schema registry.
    pub decoded: Option<Arc<[u8]>>,
    /// The version of its aggregate that it makes, where the policy says where that is. Not of a
    /// message that is run again: its row has it.
    pub sequence: Option<i64>,
    /// Media type of the payload.
    pub content_type: Option<String>,
    /// W3C `traceparent` of the record.
    pub trace_parent: Option<String>,
    /// SHA-256 of the payload; none for a tombstone.
    pub payload_hash: Option<[u8; 32]>,
    /// The record it came from. In structured mode of CloudEvents the payload is the
    /// event's `data` and the attributes stand among the headers, as in binary mode.
    pub record: Record,
}

impl Message {
    /// What a handler gets, and where something is looked for: the payload, decoded where that is
    /// asked for.
    pub fn body(&self) -> Option<&[u8]> {
        self.decoded.as_deref().or(self.record.payload.as_deref())
    }
}

impl Message {
    /// The trace id within the record's `traceparent`.
    pub fn trace_id(&self) -> Option<&str> {
        self.trace_parent.as_deref()?.split('-').nth(1)
    }
}

/// SHA-256 of a payload, as kept in the inbox row.
pub fn hash_payload(payload: &[u8]) -> [u8; 32] {
    Sha256::digest(payload).into()
}
