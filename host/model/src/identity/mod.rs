//! From a record to a message: its id, its event type, and the key that it must stay in order with.

mod cloudevents;

use oncebox_registry::{Decoded, Decoder};
use serde_json::Value;

use self::cloudevents::CloudEvent;
use crate::{
    message::Message,
    payload_key::PayloadKey,
    policy::{
        IdSource, IdentityPolicy, KeySource, ReferencePolicy, Sequence, TypeSource, VersionSource,
    },
    record::{self, Record},
};

/// The reason why a record is no message.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Undecodable {
    /// Record in which no source of the policy yields an id.
    #[error("no message id")]
    NoId,
    /// Value that cannot be an id.
    #[error("the message id {0}")]
    BadId(&'static str),
    /// Record in which no source of the policy yields an event type.
    #[error("no event type")]
    NoType,
    /// Value that cannot be an event type.
    #[error("the event type {0}")]
    BadType(&'static str),
    /// Record of a guarded sequence without a version of its aggregate.
    #[error("no version of its aggregate")]
    NoVersion,
    /// Value that cannot be a version.
    #[error("the version of its aggregate is not a whole number from 0 to 9223372036854775806")]
    BadVersion,
    /// Record of a guarded sequence without an ordering key, which names its aggregate.
    #[error("no ordering key, which is to name its aggregate")]
    NoKey,
    /// Structured CloudEvent that does not parse.
    #[error("not a CloudEvent: {0}")]
    BadEvent(String),
    /// Payload that does not decode by its schema, or has none.
    #[error("{0}")]
    BadPayload(oncebox_registry::Fault),
}

/// Content type of decoded payloads.
pub(crate) const JSON: &str = "application/json";

/// Longest id and event type, bytes.
const ID_BYTES_MAX: usize = 512;

/// Decodes a record by its consumer's policy, with a decoder where payloads come in the wire format
/// of a schema registry. Hashes the payload under the tenant's key, with the reference to another
/// one where a header has it.
///
/// # Errors
///
/// The record itself, to be parked, with the reason why it is no message.
#[expect(
    clippy::result_large_err,
    reason = "the record itself comes back, to be parked; boxing it would move it once more"
)]
pub fn decode(
    record: Record,
    policy: &IdentityPolicy,
    sequence: Option<&Sequence>,
    reference: Option<&ReferencePolicy>,
    decoder: Option<&Decoder>,
    key: &PayloadKey,
) -> Result<Message, (Record, Undecodable)> {
    let event = match cloudevents::read(&record) {
        Ok(event) => event,
        Err(error) => return Err((record, Undecodable::BadEvent(error))),
    };
    // The data of a structured CloudEvent stands in the event as it is, not in the wire format.
    let payload = record.payload.as_deref().filter(|_| event.data.is_none());
    let decoded =
        match decoder.zip(payload).map(|(decoder, payload)| decoder.decode(payload)).transpose() {
            Ok(decoded) => decoded,
            Err(fault) => return Err((record, Undecodable::BadPayload(fault))),
        };
    let mut lookup =
        Lookup { record: &record, event: &event, decoded: decoded.as_ref(), json: None };
    match lookup.identify(policy, sequence) {
        Err(undecodable) => Err((record, undecodable)),
        Ok((id, event_type, ordering_key, sequence)) => {
            let mut message = Message {
                id,
                source: event.source.clone().unwrap_or_else(|| record.topic.to_string()),
                event_type,
                event_version: text_header(&record, "ce_dataschema")
                    .or_else(|| event.dataschema.clone()),
                ordering_key,
                sequence,
                content_type: if decoded.is_some() {
                    Some(JSON.to_owned())
                } else {
                    event.content_type.clone()
                },
                decoded: decoded.map(|decoded| decoded.json.into()),
                fetched: None,
                trace_parent: event.trace_parent.clone(),
                payload_hash: None,
                record: event.unfold(record),
            };
            let payload = message.record.payload.as_deref();
            message.payload_hash = match reference.and_then(|of| of.header(&message.record)) {
                Some(header) => Some(key.hash_with_reference(payload.unwrap_or_default(), header)),
                None => payload.map(|payload| key.hash(payload)),
            };
            Ok(message)
        }
    }
}

fn text_header(record: &Record, name: &str) -> Option<String> {
    record.header(name).and_then(|value| std::str::from_utf8(value).ok()).map(str::to_owned)
}

/// A look-up in one record. It parses the payload as JSON at most once, and only when needed.
struct Lookup<'a> {
    record: &'a Record,
    event: &'a CloudEvent,
    decoded: Option<&'a Decoded>,
    json: Option<Option<Value>>,
}

type Identified = (String, String, Option<Vec<u8>>, Option<i64>);

impl Lookup<'_> {
    fn identify(
        &mut self,
        policy: &IdentityPolicy,
        sequence: Option<&Sequence>,
    ) -> Result<Identified, Undecodable> {
        let event_type = self.event_type(&policy.event_type)?;
        let id = self.id(&policy.id)?;
        let id = if policy.scoped_by_event_type { scoped(&event_type, &id) } else { id };
        valid(&id).map_err(Undecodable::BadId)?;
        let ordering_key = match &policy.ordering_key {
            KeySource::RecordKey => self.record.key.clone(),
            KeySource::JsonPointer(pointer) => self.pointer(pointer).map(String::into_bytes),
        };
        let sequence = match sequence {
            Some(_) if ordering_key.is_none() => return Err(Undecodable::NoKey),
            Some(sequence) => Some(self.version(&sequence.version)?),
            None => None,
        };
        Ok((id, event_type, ordering_key, sequence))
    }

    fn version(&mut self, source: &VersionSource) -> Result<i64, Undecodable> {
        let found = match source {
            VersionSource::Header(name) => {
                self.header(name).map_err(|_| Undecodable::BadVersion)?
            }
            VersionSource::JsonPointer(pointer) => self.pointer(pointer),
        };
        let digits = found.ok_or(Undecodable::NoVersion)?;
        let is_number = digits.bytes().all(|digit| digit.is_ascii_digit());
        digits
            .parse()
            .ok()
            .filter(|version| is_number && *version < i64::MAX)
            .ok_or(Undecodable::BadVersion)
    }

    fn id(&mut self, sources: &[IdSource]) -> Result<String, Undecodable> {
        for source in sources {
            let found = match source {
                IdSource::Header(name) => self.header(name).map_err(Undecodable::BadId)?,
                IdSource::Cloudevents => self.event.identity(),
                IdSource::JsonPointer(pointer) => self.pointer(pointer),
                IdSource::Position => Some(self.record.position()),
            };
            if let Some(id) = found {
                return valid(&id).map(|()| id).map_err(Undecodable::BadId);
            }
        }
        Err(Undecodable::NoId)
    }

    fn event_type(&mut self, sources: &[TypeSource]) -> Result<String, Undecodable> {
        for source in sources {
            let found = match source {
                TypeSource::Cloudevents => self.event.event_type.clone(),
                TypeSource::Header(name) => self.header(name).map_err(Undecodable::BadType)?,
                TypeSource::JsonPointer(pointer) => self.pointer(pointer),
                TypeSource::Topic => Some(self.record.topic.to_string()),
                TypeSource::Schema => self.decoded.and_then(|decoded| decoded.name.clone()),
            };
            if let Some(event_type) = found {
                return valid(&event_type).map(|()| event_type).map_err(Undecodable::BadType);
            }
        }
        Err(Undecodable::NoType)
    }

    fn header(&self, name: &str) -> Result<Option<String>, &'static str> {
        let Some(value) = self.record.header(name) else { return Ok(None) };
        std::str::from_utf8(value).map(|text| Some(text.to_owned())).map_err(|_| "is not UTF-8")
    }

    fn pointer(&mut self, pointer: &str) -> Option<String> {
        let plain = self.event.data.as_deref().or(self.record.payload.as_deref());
        let payload = self.decoded.map(|decoded| decoded.json.as_slice()).or(plain);
        let json = self.json.get_or_insert_with(|| {
            payload.and_then(|payload| serde_json::from_slice(payload).ok())
        });
        match json.as_ref()?.pointer(pointer)? {
            Value::String(text) => Some(text.clone()),
            Value::Number(number) if !number.is_f64() => Some(number.to_string()),
            _ => None,
        }
    }
}

/// Checks that a text may be an id or an event type. PostgreSQL's text and its index must be able
/// to hold it, and an operator to read it in a log.
fn valid(text: &str) -> Result<(), &'static str> {
    if text.is_empty() {
        return Err("is empty");
    }
    if text.len() > ID_BYTES_MAX {
        return Err("is longer than 512 bytes");
    }
    if text.chars().any(char::is_control) {
        return Err("has a control character");
    }
    Ok(())
}

/// Returns an id with the event type before it. Colons of the type are written in another way.
fn scoped(event_type: &str, id: &str) -> String {
    format!("{}:{id}", event_type.replace('%', "%25").replace(':', "%3A"))
}

/// Returns an id without the event type that [`scoped`] puts before it.
fn unscoped(id: &str) -> &str {
    id.split_once(':').map_or(id, |(_, id)| id)
}

/// Returns whether the id that a record got by this policy is the position of the record.
pub fn is_by_position(
    policy: &IdentityPolicy,
    id: &str,
    topic: &str,
    partition: i32,
    offset: i64,
) -> bool {
    let id = if policy.scoped_by_event_type { unscoped(id) } else { id };
    record::is_position(id, topic, partition, offset)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(headers: &[(&str, &str)], payload: &str) -> Record {
        Record {
            topic: "orders".into(),
            topic_id: Some("T1".into()),
            partition: 3,
            offset: 42,
            timestamp_ms: 0,
            key: Some(b"k".to_vec()),
            headers: headers
                .iter()
                .map(|(n, v)| ((*n).to_owned(), v.as_bytes().to_vec()))
                .collect(),
            payload: Some(payload.as_bytes().to_vec()),
        }
    }

    fn key() -> PayloadKey {
        PayloadKey::new(&[1; 32])
    }

    fn check(
        headers: &[(&str, &str)],
        payload: &str,
        policy: &str,
        expected: Result<(&str, &str), Undecodable>,
    ) {
        let policy: IdentityPolicy = toml::from_str(policy).expect("a policy of the test");
        let decoded = decode(record(headers, payload), &policy, None, None, None, &key());
        let decoded = decoded
            .as_ref()
            .map(|m| (m.id.as_str(), m.event_type.as_str()))
            .map_err(|(_, why)| why.clone());
        assert_eq!(decoded, expected);
    }

    // What could go wrong: a position passes for an id of the producer, or the other way round,
    // with a colon in the event type, or without a topic id.
    #[test]
    fn a_position_is_recognised_as_it_is_written() {
        for scope in ["", "scoped_by_event_type = true\n"] {
            let policy = "id = [{header = 'x-id'}, 'position']\nevent_type = [{header = 't'}]\n";
            let policy: IdentityPolicy = toml::from_str(&(policy.to_owned() + scope)).expect(scope);
            let is_by_position = |topic_id: Option<&str>, headers: &[(&str, &str)]| {
                let record = Record { topic_id: topic_id.map(Into::into), ..record(headers, "") };
                let message = decode(record, &policy, None, None, None, &key()).expect("a message");
                super::is_by_position(&policy, &message.id, "orders", 3, 42)
            };
            for topic_id in [None, Some("T1")] {
                assert!(is_by_position(topic_id, &[("t", "a:b%3A")]), "{scope}");
                for id in ["orders:3:41", "orders:3", "3:42", "orders:T1:T2:3:42", "x:3:42"] {
                    let headers = [("t", "a:b"), ("x-id", id)];
                    assert!(!is_by_position(topic_id, &headers), "{scope}{id}");
                }
            }
        }
    }

    const CE: &[(&str, &str)] =
        &[("ce_specversion", "1.0"), ("ce_id", "1"), ("ce_source", "/s"), ("ce_type", "t")];

    // S0-015, S0-016, S1-050: ordered sources, the first that yields wins.
    #[test]
    fn identity_is_found_where_the_policy_says() {
        // S0-015, S0-016, S1-050.
        check(&[("x-id", "a")], "", "id = [{header = 'x-id'}, 'position']", Ok(("a", "orders")));
        check(&[], "", "id = [{header = 'x-id'}, 'position']", Ok(("orders:T1:3:42", "orders")));
        check(
            &[],
            r#"{"e":{"id":7,"t":"paid"}}"#,
            "id = [{json_pointer = '/e/id'}]\nevent_type = [{json_pointer = '/e/t'}]",
            Ok(("7", "paid")),
        );
        check(CE, "", "id = [{header = 'x-id'}, 'cloudevents']", Ok(("/s 1", "t")));
        // S0-048.
        check(CE, "", "scoped_by_event_type = true", Ok(("t:/s 1", "t")));
        let typed = "scoped_by_event_type = true\nevent_type = [{header = 'x-type'}]\nid = \
            [{header = 'x-id'}]";
        check(&[("x-type", "a:b"), ("x-id", "c")], "", typed, Ok(("a%3Ab:c", "a:b")));
        check(&[("x-type", "a"), ("x-id", "b:c")], "", typed, Ok(("a:b:c", "a")));
    }

    // S1-051: the identity of a CloudEvent is source and id, in both modes.
    #[test]
    fn cloudevents_in_structured_mode() {
        let headers = &[("content-type", "application/cloudevents+json; charset=UTF-8")];
        let event = r#"{"specversion":"1.0","id":"1","source":"/s","type":"t","data":{"a":1}}"#;
        // S1-051.
        check(headers, event, "", Ok(("/s 1", "t")));
        check(headers, "{", "", Err(Undecodable::BadEvent("it is not JSON".into())));
        let policy = IdentityPolicy::default();
        let message =
            decode(record(headers, event), &policy, None, None, None, &key()).expect("decodes");
        assert_eq!(message.record.payload.as_deref(), Some(br#"{"a":1}"#.as_slice()));
        assert_eq!(message.record.header("ce_type"), Some(b"t".as_slice()));
    }

    // S1-122, A8 (c): a value that cannot be an id is never replaced by an invented one.
    #[test]
    fn unusable_ids_are_undecodable() {
        // S1-122.
        check(&[], "x", "id = ['cloudevents']", Err(Undecodable::NoId));
        check(&[("ce_source", "/s"), ("ce_id", "")], "", "", Err(Undecodable::BadId("is empty")));
        check(
            &[("x-id", "")],
            "",
            "id = [{header = 'x-id'}, 'position']",
            Err(Undecodable::BadId("is empty")),
        );
        check(
            &[("x-id", "a\0b")],
            "",
            "id = [{header = 'x-id'}]",
            Err(Undecodable::BadId("has a control character")),
        );
        check(
            &[("x-id", &"x".repeat(513))],
            "",
            "id = [{header = 'x-id'}]",
            Err(Undecodable::BadId("is longer than 512 bytes")),
        );
        check(
            &[("x-id", "a")],
            "",
            "id = [{header = 'x-id'}]\nevent_type = ['cloudevents']",
            Err(Undecodable::NoType),
        );
    }

    // S1-020: a version is a whole number, found where the policy says, of an aggregate that has a
    // name.
    #[test]
    fn versions_are_whole_numbers_of_an_aggregate() {
        let by_position: IdentityPolicy =
            toml::from_str("id = ['position']").expect("a policy of the test");
        let version = |headers: &[(&str, &str)], payload, source| {
            let sequence =
                toml::from_str(&format!("version = {source}")).expect("a sequence of the test");
            decode(record(headers, payload), &by_position, Some(&sequence), None, None, &key())
                .map(|m| m.sequence)
                .map_err(|(_, why)| why)
        };
        let in_header = |text| version(&[("v", text)], "", "{ header = 'V' }");
        // S1-020.
        assert_eq!(in_header("7"), Ok(Some(7)));
        assert_eq!(in_header("9223372036854775806"), Ok(Some(i64::MAX - 1)));
        for text in ["", "-1", "+1", "1.0", "9223372036854775807", "9223372036854775808", "seven"] {
            assert_eq!(in_header(text), Err(Undecodable::BadVersion), "{text}");
        }
        let in_payload = |payload| version(&[], payload, "{ json_pointer = '/v' }");
        assert_eq!(in_payload(r#"{"v":7}"#), Ok(Some(7)));
        assert_eq!(in_payload(r#"{"v":"7"}"#), Ok(Some(7)));
        assert_eq!(in_payload(r#"{"v":-7}"#), Err(Undecodable::BadVersion));
        assert_eq!(in_payload(r#"{"v":7.5}"#), Err(Undecodable::NoVersion));
        assert_eq!(in_payload("{}"), Err(Undecodable::NoVersion));
        let mut keyless = record(&[("v", "7")], "");
        keyless.key = None;
        let sequence =
            toml::from_str("version = { header = 'v' }").expect("a sequence of the test");
        assert_eq!(
            decode(keyless, &by_position, Some(&sequence), None, None, &key())
                .map_err(|(_, why)| why)
                .err(),
            Some(Undecodable::NoKey)
        );
    }

    #[test]
    fn a_topic_made_again_gives_other_positions() {
        let mut again = record(&[], "");
        again.topic_id = Some("T2".into());
        assert_ne!(again.position(), record(&[], "").position());
    }
}
