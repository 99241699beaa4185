//! What a handler sees: a record that was understood.

use std::sync::Arc;

use sha2::{Digest, Sha256};

use crate::record::Record;

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
    /// What a record says of itself when nothing in it is understood.
    pub fn undecodable(record: &Record) -> Self {
        Self {
            id: format!("undecodable:{}", record.position()),
            source: record.topic.to_string(),
            event_type: String::new(),
            event_version: None,
            ordering_key: None,
            sequence: None,
            content_type: None,
            trace_parent: None,
            decoded: None,
            payload_hash: record.payload.as_deref().map(hash_payload),
            record: record.clone(),
        }
    }

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
