//! A message as a handler sees it: a decoded record.

use std::sync::Arc;

use crate::{payload_key::PayloadKey, record::Record, reference::FetchedPayload};

/// Begin of the id of a record that could not be decoded; its position follows.
pub const UNDECODABLE: &str = "undecodable:";

/// Returns the id under which a record is parked where its message's own cannot be used.
pub fn undecodable_id(record: &Record) -> String {
    format!("{UNDECODABLE}{}", record.position())
}

/// A decoded message: a record whose identity and event type are known.
#[derive(Debug, Clone)]
pub struct Message {
    /// Identity for deduplication within (tenant, consumer).
    pub id: String,
    /// CloudEvents `source`, or the topic.
    pub source: String,
    /// Type of the event; it selects the handler.
    pub event_type: String,
    /// Version of the event's schema, where the message carries one.
    pub event_version: Option<String>,
    /// Key of the messages that must run in order, where the policy names a source.
    pub ordering_key: Option<Vec<u8>>,
    /// The payload as JSON, where it came in the wire format of a schema registry.
    pub decoded: Option<Arc<[u8]>>,
    /// The payload that the host fetched by the message's reference; none where it fetched none.
    /// No row keeps it.
    pub fetched: Option<FetchedPayload>,
    /// Version of the aggregate that the message creates, where the policy names a source. None for
    /// a message that is run again: its row holds the version.
    pub sequence: Option<i64>,
    /// Media type of the payload.
    pub content_type: Option<String>,
    /// W3C `traceparent` of the record.
    pub trace_parent: Option<String>,
    /// Hash of the payload under the tenant's key, with the reference where a header has it; none
    /// for a tombstone without a reference.
    pub payload_hash: Option<[u8; 32]>,
    /// The record of the message. In structured mode of CloudEvents its payload is the event's
    /// `data`, and the attributes stand among the headers, as in binary mode.
    pub record: Record,
}

impl Message {
    /// Creates a message from a record that could not be decoded: its position is the id, its topic
    /// the source.
    pub fn undecodable(record: &Record, key: &PayloadKey) -> Self {
        Self {
            id: undecodable_id(record),
            source: record.topic.to_string(),
            event_type: String::new(),
            event_version: None,
            ordering_key: None,
            sequence: None,
            content_type: None,
            trace_parent: None,
            decoded: None,
            fetched: None,
            payload_hash: record.payload.as_deref().map(|payload| key.hash(payload)),
            record: record.clone(),
        }
    }

    /// Returns the body that handlers get and that schemas check: the fetched payload where there
    /// is one, else the body that the message carries.
    pub fn body(&self) -> Option<&[u8]> {
        self.fetched.as_deref().or(self.carried())
    }

    /// Returns the body that the message carries, which JSON pointers look into: the decoded
    /// payload where there is one, else the payload itself.
    pub fn carried(&self) -> Option<&[u8]> {
        self.decoded.as_deref().or(self.record.payload.as_deref())
    }
}

impl Message {
    /// Returns the trace id within the record's `traceparent`.
    pub fn trace_id(&self) -> Option<&str> {
        self.trace_parent.as_deref()?.split('-').nth(1)
    }
}
