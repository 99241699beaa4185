//! Message files: a stream of JSON objects, one per line or pretty-printed one after another.
//!
//! ```json
//! {"id": "m-1", "event_type": "order.placed", "payload": {"order_id": "o-1"}, "key": "17",
//!  "source": "shop", "content_type": "application/json", "timestamp_ms": 1763650000000,
//!  "headers": {"tenant": "x"}}
//! ```
//!
//! `id` and `event_type` must be there. The payload is any JSON, handed on exactly as it is
//! written, or bytes as `payload_base64`; a message with neither is a tombstone. Members that are
//! not in this list are refused, so that a misspelt one is found before a handler wonders about it.

use std::{collections::BTreeMap, io::Read, path::Path, sync::Arc};

use anyhow::{Context, Result, anyhow, bail, ensure};
use base64::{Engine, engine::general_purpose::STANDARD};
use oncebox_model::record::{Headers, Record};
use serde::{Deserialize, Deserializer};
use serde_json::value::RawValue;

/// The `identity` of a consumer's policy that reads the headers of [`FileMessage::record`].
pub const IDENTITY: &str =
    "identity.id = [{header = 'message-id'}]\nidentity.event_type = [{header = 'event-type'}]\n";

/// Longest id and event type, in bytes, that the inbox accepts.
const ID_BYTES_MAX: usize = 512;

/// One message of a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FileMessage {
    /// Identity for deduplication.
    pub id: String,
    /// Event type, which selects the handler.
    pub event_type: String,
    /// The payload's bytes; none is a tombstone.
    pub payload: Option<Vec<u8>>,
    /// The record's key.
    pub key: Option<String>,
    /// Source of the message; without it, the topic.
    pub source: Option<String>,
    /// Media type of the payload.
    pub content_type: Option<String>,
    /// Milliseconds since the Unix epoch; without it, the sender decides.
    pub timestamp_ms: Option<i64>,
    /// Further headers, by name.
    pub headers: BTreeMap<String, String>,
}

/// An object as a file holds it.
#[derive(Deserialize)]
#[serde(deny_unknown_fields, expecting = "an object with `id` and `event_type`")]
struct Written {
    id: String,
    event_type: String,
    /// JSON of the payload: `null` is a payload, a missing member is a tombstone.
    #[serde(default, deserialize_with = "present")]
    payload: Option<Box<RawValue>>,
    payload_base64: Option<String>,
    key: Option<String>,
    source: Option<String>,
    content_type: Option<String>,
    timestamp_ms: Option<i64>,
    #[serde(default)]
    headers: BTreeMap<String, String>,
}

fn present<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Box<RawValue>>, D::Error> {
    Box::<RawValue>::deserialize(deserializer).map(Some)
}

/// Reads the messages of a file, in order; `-` is standard input. There is at least one.
pub fn read(path: &Path) -> Result<Vec<FileMessage>> {
    let mut bytes = Vec::new();
    if path == Path::new("-") {
        std::io::stdin()
            .read_to_end(&mut bytes)
            .context("failed to read messages from standard input")?;
    } else {
        bytes = std::fs::read(path)
            .with_context(|| format!("failed to read the messages `{}`", path.display()))?;
    }
    let name = if path == Path::new("-") {
        "standard input".to_owned()
    } else {
        format!("`{}`", path.display())
    };
    let text = String::from_utf8(bytes).map_err(|_| anyhow!("{name} is not UTF-8"))?;
    parse(&text).with_context(|| format!("{name} cannot be used as messages"))
}

/// Parses the messages of a text. An error names the object, counted from 1, and the line.
pub fn parse(text: &str) -> Result<Vec<FileMessage>> {
    let mut messages = Vec::new();
    for written in serde_json::Deserializer::from_str(text).into_iter::<Written>() {
        let number = messages.len() + 1;
        let written = written.map_err(|error| anyhow!("message {number}: {}", place(&error)))?;
        messages.push(written.checked().map_err(|error| anyhow!("message {number}: {error}"))?);
    }
    ensure!(
        !messages.is_empty(),
        "there is no message; write objects such as {{\"id\": \"m-1\", \"event_type\": \
            \"order.placed\"}}"
    );
    Ok(messages)
}

/// Returns the text of a JSON error with its line first, as other errors have it.
fn place(error: &serde_json::Error) -> String {
    let text = error.to_string();
    let what = text.rfind(" at line ").map_or(text.as_str(), |end| &text[..end]);
    format!("line {}: {what}", error.line())
}

impl Written {
    fn checked(self) -> Result<FileMessage> {
        for (name, value) in [("id", &self.id), ("event_type", &self.event_type)] {
            let fits =
                (1..=ID_BYTES_MAX).contains(&value.len()) && !value.chars().any(char::is_control);
            ensure!(fits, "`{name}` must have 1 to {ID_BYTES_MAX} bytes and no control characters");
        }
        let payload = match (self.payload, self.payload_base64) {
            (Some(_), Some(_)) => bail!("`payload` and `payload_base64` are both there; keep one"),
            (Some(json), None) => Some(json.get().as_bytes().to_vec()),
            (None, Some(base64)) => Some(
                STANDARD
                    .decode(base64)
                    .map_err(|error| anyhow!("`payload_base64` is not base64: {error}"))?,
            ),
            (None, None) => None,
        };
        let Self { id, event_type, key, source, content_type, timestamp_ms, headers, .. } = self;
        Ok(FileMessage {
            id,
            event_type,
            payload,
            key,
            source,
            content_type,
            timestamp_ms,
            headers,
        })
    }
}

impl FileMessage {
    /// Returns the message as an object of a file, on one line, whatever it was read from.
    pub fn json(&self) -> serde_json::Value {
        let mut object = serde_json::json!({ "id": self.id, "event_type": self.event_type, "headers": self.headers });
        let members = [
            (
                "payload_base64",
                self.payload.as_ref().map(|payload| STANDARD.encode(payload).into()),
            ),
            ("key", self.key.clone().map(Into::into)),
            ("source", self.source.clone().map(Into::into)),
            ("content_type", self.content_type.clone().map(Into::into)),
            ("timestamp_ms", self.timestamp_ms.map(Into::into)),
        ];
        for (name, value) in members {
            if let Some(value) = value {
                object[name] = value;
            }
        }
        object
    }

    /// Returns the headers of the message's record: its own, then those for the members that Kafka
    /// has no field for.
    pub fn wire_headers(&self) -> Headers {
        let own = self.headers.iter().map(|(name, value)| (name.as_str(), Some(value)));
        let carried = [
            ("message-id", Some(&self.id)),
            ("event-type", Some(&self.event_type)),
            ("ce_source", self.source.as_ref()),
            ("content-type", self.content_type.as_ref()),
        ];
        own.chain(carried)
            .filter_map(|(name, value)| Some((name.to_owned(), value?.clone().into_bytes())))
            .collect()
    }

    /// Returns the record that a broker would deliver at this position.
    pub fn record(&self, topic: &Arc<str>, partition: i32, offset: i64) -> Record {
        Record {
            topic: topic.clone(),
            topic_id: None,
            partition,
            offset,
            timestamp_ms: self.timestamp_ms.unwrap_or(0),
            key: self.key.clone().map(String::into_bytes),
            headers: self.wire_headers(),
            payload: self.payload.clone(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(text: &str, error: &str) {
        assert_eq!(parse(text).expect_err(text).to_string(), error, "{text}");
    }

    #[test]
    fn objects_follow_one_another_on_one_line_or_many() {
        let text = "{\"id\":\"a\",\"event_type\":\"t\",\"payload\":{ \"n\": 1.10 }}\n{\n  \"id\": \
            \"b\",\n  \"event_type\": \
            \"t\"\n}{\"id\":\"c\",\"event_type\":\"t\",\"payload\":null}";
        let messages = parse(text).expect("sound");
        let payloads: Vec<_> = messages.iter().map(|message| message.payload.as_deref()).collect();
        // As written, spaces and digits included; null is a payload, absence a tombstone.
        assert_eq!(payloads, [Some(&b"{ \"n\": 1.10 }"[..]), None, Some(b"null")]);
        assert_eq!(
            messages.iter().map(|message| message.id.as_str()).collect::<Vec<_>>(),
            ["a", "b", "c"]
        );
    }

    #[test]
    fn every_member_reaches_the_record() {
        let text = r#"{"id": "m-1", "event_type": "order.placed", "payload_base64": "AP8=", "key": "17", "source": "shop",
            "content_type": "application/octet-stream", "timestamp_ms": 5, "headers": {"x": "ü"}}"#;
        let messages = parse(text).expect("sound");
        assert_eq!(parse(&messages[0].json().to_string()).expect("sound"), messages);
        let record = messages[0].record(&"orders".into(), 3, 9);
        assert_eq!((record.partition, record.offset, record.timestamp_ms), (3, 9, 5));
        assert_eq!(
            (record.key.as_deref(), record.payload.as_deref()),
            (Some(&b"17"[..]), Some(&[0, 255][..]))
        );
        for (name, value) in [
            ("x", "ü"),
            ("message-id", "m-1"),
            ("event-type", "order.placed"),
            ("ce_source", "shop"),
            ("content-type", "application/octet-stream"),
        ] {
            assert_eq!(record.header(name), Some(value.as_bytes()), "{name}");
        }
    }

    #[test]
    fn what_cannot_be_a_message_is_named_with_its_number_and_line() {
        let good = "{\"id\":\"a\",\"event_type\":\"t\"}\n";
        refused(
            "",
            "there is no message; write objects such as {\"id\": \"m-1\", \"event_type\": \
                \"order.placed\"}",
        );
        refused(&format!("{good}{{\"id\":"), "message 2: line 2: EOF while parsing a value");
        refused(
            &format!("{good}{good}[]"),
            "message 3: line 3: invalid length 0, expected an object with `id` and `event_type`",
        );
        refused("{\"id\":\"a\"}", "message 1: line 1: missing field `event_type`");
        refused(
            &format!("{good}{{\"id\":\"b\",\"event_type\":\"t\",\n\"paylod\":1}}"),
            "message 2: line 3: unknown field `paylod`, expected one of `id`, `event_type`, \
                `payload`, `payload_base64`, `key`, `source`, `content_type`, `timestamp_ms`, \
                `headers`",
        );
        refused(
            "{\"id\":\"a\",\"event_type\":\"t\",\"payload\":1,\"payload_base64\":\"\"}",
            "message 1: `payload` and `payload_base64` are both there; keep one",
        );
        refused(
            "{\"id\":\"\",\"event_type\":\"t\"}",
            "message 1: `id` must have 1 to 512 bytes and no control characters",
        );
        refused(
            "{\"id\":\"a\",\"event_type\":\"t\",\"payload_base64\":\"!\"}",
            "message 1: `payload_base64` is not base64: Invalid symbol 33, offset 0.",
        );
    }
}
