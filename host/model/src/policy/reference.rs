//! The references of messages to payloads that stand elsewhere.

use std::time::Duration;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::Policy;
use crate::{
    message::Message,
    record::Record,
    reference::{ReferenceError, ReferenceFault},
};

/// Where a message carries the reference to its payload, the store that references lead to, and the
/// bounds of a fetch.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ReferencePolicy {
    /// Name of the store, among those that the tenant has keys for.
    pub store: String,
    /// Place of the reference in a message. A message without one carries its payload itself.
    pub source: ReferenceSource,
    /// Bytes of a fetched payload. Over it, the message is parked.
    #[serde(default = "ReferencePolicy::bytes_max")]
    pub bytes_max: usize,
    /// Milliseconds that a fetch may take. Waits for other fetches and for memory do not count.
    #[serde(default = "ReferencePolicy::timeout_ms")]
    pub timeout_ms: u64,
}

/// The place of a reference in a message.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ReferenceSource {
    /// The value of a header, as UTF-8. The attributes of a CloudEvent are headers too, as
    /// `ce_dataref`.
    Header(String),
    /// A JSON pointer (RFC 6901) into the payload; the value is a string.
    JsonPointer(String),
}

/// Time that a lease has beyond that of a run, where a payload is fetched before the run. The lease
/// is renewed within it, for as long as the fetch takes.
const RENEWAL_MS: u64 = 10_000;

impl Policy {
    /// Returns how long a lease lasts: the time of a run, with time to renew it where a payload is
    /// fetched before the run.
    pub fn lease(&self) -> Duration {
        let renewal = if self.reference.is_some() { RENEWAL_MS } else { 0 };
        Duration::from_millis(self.retry.lease_ms.saturating_add(renewal))
    }

    /// Returns the longest time of an attempt, with that of a fetch before its run.
    pub(super) fn attempt_ms(&self) -> u64 {
        let fetch = self.reference.as_ref().map_or(0, |reference| reference.timeout_ms);
        (self.lease().as_millis() as u64).saturating_add(fetch)
    }
}

impl ReferencePolicy {
    fn bytes_max() -> usize {
        8 << 20
    }

    fn timeout_ms() -> u64 {
        30_000
    }

    /// Returns the longest time of a fetch.
    pub fn timeout(&self) -> Duration {
        Duration::from_millis(self.timeout_ms)
    }

    /// Returns the value of the header that has the reference of a record. None where the record
    /// has none, or the payload has the reference.
    pub fn header<'r>(&self, record: &'r Record) -> Option<&'r [u8]> {
        match &self.source {
            ReferenceSource::Header(name) => record.header(name),
            ReferenceSource::JsonPointer(_) => None,
        }
    }

    /// Finds the reference of a message; none where the message carries its payload itself.
    ///
    /// # Errors
    ///
    /// `Malformed` where a value stands in the place of the reference and is no text, or where the
    /// payload that is to hold the reference cannot be read.
    pub fn find(&self, message: &Message) -> Result<Option<String>, ReferenceError> {
        match &self.source {
            ReferenceSource::Header(name) => match message.record.header(name) {
                None => Ok(None),
                Some(value) => match std::str::from_utf8(value) {
                    Ok(text) => Ok(Some(text.to_owned())),
                    Err(_) => Err(no_text(&format!("the header `{name}` is not UTF-8"))),
                },
            },
            ReferenceSource::JsonPointer(pointer) => {
                let Some(body) = message.carried().filter(|body| !body.is_empty()) else {
                    return Ok(None);
                };
                let value: Value =
                    serde_json::from_slice(body).map_err(|_| no_text("the payload is not JSON"))?;
                match value.pointer(pointer) {
                    None | Some(Value::Null) => Ok(None),
                    Some(Value::String(text)) => Ok(Some(text.clone())),
                    Some(_) => Err(no_text(&format!("`{pointer}` of the payload is no string"))),
                }
            }
        }
    }
}

fn no_text(what: &str) -> ReferenceError {
    let text = format!(
        "{what}, where the policy looks for a reference; have the producer write \
            `s3://bucket/key` there, or change `reference.source` in the policy"
    );
    ReferenceError::new(ReferenceFault::Malformed, text)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{payload_key::PayloadKey, record::Record};

    fn message(header: &[u8], payload: &str) -> Message {
        let record = Record {
            topic: "t".into(),
            topic_id: None,
            partition: 0,
            offset: 0,
            timestamp_ms: 0,
            key: None,
            headers: vec![("Ref".to_owned(), header.to_vec())],
            payload: Some(payload.as_bytes().to_vec()),
        };
        Message::undecodable(&record, &PayloadKey::new(&[1; 32]))
    }

    fn policy(source: ReferenceSource) -> ReferencePolicy {
        let (store, bytes_max) = ("s".to_owned(), ReferencePolicy::bytes_max());
        ReferencePolicy { store, source, bytes_max, timeout_ms: ReferencePolicy::timeout_ms() }
    }

    // What could go wrong: a payload is taken for a reference, or a reference for a payload.
    #[test]
    fn a_reference_is_found_where_the_policy_says() {
        let (header, pointer) = (
            policy(ReferenceSource::Header("ref".to_owned())),
            policy(ReferenceSource::JsonPointer("/data/ref".to_owned())),
        );
        let found = |policy: &ReferencePolicy, header: &[u8], payload: &str| {
            policy.find(&message(header, payload)).map_err(|error| error.fault)
        };
        assert_eq!(found(&header, b"s3://b/k", ""), Ok(Some("s3://b/k".to_owned())));
        assert_eq!(found(&header, b"\xff", ""), Err(ReferenceFault::Malformed));
        let other = policy(ReferenceSource::Header("other".to_owned()));
        assert_eq!(found(&other, b"s3://b/k", ""), Ok(None));
        for (payload, expected) in [
            (r#"{"data":{"ref":"s3://b/k"}}"#, Ok(Some("s3://b/k".to_owned()))),
            (r#"{"data":{"ref":null}}"#, Ok(None)),
            (r#"{"data":{"ref":5}}"#, Err(ReferenceFault::Malformed)),
            (r#"{"data":{}}"#, Ok(None)),
            ("no JSON", Err(ReferenceFault::Malformed)),
            ("", Ok(None)),
        ] {
            assert_eq!(found(&pointer, b"", payload), expected, "{payload}");
        }
    }
}
