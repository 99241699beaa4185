//! Files of messages, as `oncebox test` and `oncebox send` read them.

use std::collections::BTreeMap;

use serde::{Deserialize, Deserializer};
use serde_json::value::RawValue;

use crate::Message;

/// One object of a message file.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Entry {
    id: String,
    event_type: String,
    #[serde(default, deserialize_with = "present")]
    payload: Option<Box<RawValue>>,
    payload_base64: Option<String>,
    key: Option<String>,
    source: Option<String>,
    content_type: Option<String>,
    #[serde(default)]
    timestamp_ms: i64,
    #[serde(default)]
    headers: BTreeMap<String, String>,
}

/// A payload of `null` is a payload, and not an absent one.
fn present<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Box<RawValue>>, D::Error> {
    Box::<RawValue>::deserialize(deserializer).map(Some)
}

/// The messages of a file: JSON objects, one after the other, with `id`, `event_type` and
/// `payload` or `payload_base64` (neither: a tombstone), and where wanted `key`, `source`,
/// `content_type`, `timestamp_ms` and `headers`. A payload's bytes are as they are written.
///
/// ```
/// let messages = oncebox_guest::test::messages(
///     r#"{"id": "m-1", "event_type": "order.placed", "payload": {"order_id": "o-1"}}"#,
/// );
/// assert_eq!(messages[0].payload.as_deref(), Some(&br#"{"order_id": "o-1"}"#[..]));
/// ```
#[track_caller]
pub fn messages(file: &str) -> Vec<Message> {
    let entries = serde_json::Deserializer::from_str(file).into_iter::<Entry>();
    let read = |(at, entry): (usize, serde_json::Result<Entry>)| {
        let message = entry.map_err(|error| error.to_string()).and_then(message);
        message.map_err(|error| format!("message {}: {error}", at + 1))
    };
    let messages: Result<_, String> = entries.enumerate().map(read).collect();
    match messages {
        Ok(messages) => messages,
        Err(error) => panic!("{error}"),
    }
}

fn message(entry: Entry) -> Result<Message, String> {
    let payload = match (entry.payload, entry.payload_base64) {
        (Some(_), Some(_)) => return Err("give `payload` or `payload_base64`, not both".to_owned()),
        (Some(payload), None) => Some(payload.get().as_bytes().to_vec()),
        (None, Some(text)) => Some(base64(&text).ok_or("`payload_base64` is not base64")?),
        (None, None) => None,
    };
    let headers = entry
        .headers
        .into_iter()
        .map(|(name, value)| (name, value.into_bytes()));
    Ok(Message {
        id: entry.id,
        source: entry.source.unwrap_or_else(|| "test".to_owned()),
        event_type: entry.event_type,
        key: entry.key.map(String::into_bytes),
        timestamp: entry.timestamp_ms,
        headers: headers.collect(),
        content_type: entry.content_type,
        payload,
    })
}

/// Bytes of base64 (RFC 4648) with its padding.
fn base64(text: &str) -> Option<Vec<u8>> {
    let digit = |byte: u8| match byte {
        b'A'..=b'Z' => Some(byte - b'A'),
        b'a'..=b'z' => Some(byte - b'a' + 26),
        b'0'..=b'9' => Some(byte - b'0' + 52),
        b'+' => Some(62),
        b'/' => Some(63),
        _ => None,
    };
    let digits = text.trim_end_matches('=');
    if !text.len().is_multiple_of(4) || text.len() - digits.len() > 2 {
        return None;
    }
    let mut bytes = Vec::with_capacity(digits.len() * 3 / 4);
    for group in digits.as_bytes().chunks(4) {
        let add = |sum: u32, byte: &u8| Some(sum << 6 | u32::from(digit(*byte)?));
        let bits = group.iter().try_fold(0, add)? << (6 * (4 - group.len()));
        bytes.extend_from_slice(&bits.to_be_bytes()[1..group.len()]);
    }
    Some(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// RFC 4648, section 10.
    #[test]
    fn base64_is_read() {
        for (text, bytes) in [
            ("", ""),
            ("Zg==", "f"),
            ("Zm8=", "fo"),
            ("Zm9v", "foo"),
            ("Zm9vYg==", "foob"),
            ("Zm9vYmE=", "fooba"),
            ("Zm9vYmFy", "foobar"),
        ] {
            assert_eq!(base64(text).as_deref(), Some(bytes.as_bytes()), "{text}");
        }
        for text in ["Zg", "Z===", "Zm9v!", "Zm-v"] {
            assert_eq!(base64(text), None, "{text}");
        }
    }

    #[test]
    fn files_are_objects_one_after_the_other() {
        let read = messages(
            r#"{"id": "a", "event_type": "t", "payload": null, "key": "k", "headers": {"h": "v"}}
               {"id": "b",
                "event_type": "t", "payload_base64": "Zm9v", "timestamp_ms": 5}{"id": "c", "event_type": "t"}"#,
        );
        let payloads: Vec<_> = read
            .iter()
            .map(|message| message.payload.as_deref())
            .collect();
        assert_eq!(payloads, [Some(&b"null"[..]), Some(&b"foo"[..]), None]);
        assert_eq!((read[0].header("h"), read[1].timestamp), (Some("v"), 5));
    }

    #[test]
    #[should_panic(expected = "message 2: unknown field `extra`")]
    fn an_unknown_member_is_refused_with_the_number_of_its_object() {
        messages(r#"{"id": "a", "event_type": "t"} {"id": "b", "event_type": "t", "extra": 1}"#);
    }
}
