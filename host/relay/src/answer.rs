//! The answers of endpoints: what is kept of them, and the messages that they become.

use base64::{Engine, engine::general_purpose::STANDARD};
use chrono::Utc;
use oncebox_model::{headers, outgoing::answer_id};
use oncebox_sender::{BodyEnd, Response};
use serde_json::{Map, Value, json};

use crate::row::OutgoingRow;

/// Behind the event type of a message, that of its answer.
const ANSWERED: &str = ".answered";

/// What is kept of an answer. It may repeat what the request held, so that it is shown by its
/// status alone.
#[derive(Clone, PartialEq, Eq)]
pub(crate) struct KeptAnswer {
    /// Status.
    pub(crate) status: u16,
    /// Media type; none where the answer named none.
    pub(crate) content_type: Option<String>,
    /// Body, up to the host's bound.
    pub(crate) body: Vec<u8>,
    /// Whether that is all of it.
    pub(crate) is_whole: bool,
}

impl std::fmt::Debug for KeptAnswer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("KeptAnswer").field("status", &self.status).finish_non_exhaustive()
    }
}

impl From<Response> for KeptAnswer {
    fn from(response: Response) -> Self {
        Self {
            status: response.status,
            content_type: response.content_type,
            body: response.body,
            is_whole: response.body_end == BodyEnd::Whole,
        }
    }
}

/// Returns the message that an answer becomes. It has the key of the message that it answers and is
/// caused by it.
pub(crate) fn message_of(
    row: &OutgoingRow,
    (tenant, emitter): (&str, &str),
    event_type: Option<&str>,
    answer: &KeptAnswer,
) -> OutgoingRow {
    OutgoingRow {
        id: answer_id(tenant, emitter, &row.id),
        message_id: row.id.clone(),
        event_type: event_type
            .map_or_else(|| format!("{}{ANSWERED}", row.event_type), str::to_owned),
        content_type: Some("application/json".to_owned()),
        headers: headers::encode(&Vec::new()),
        payload: Some(payload(row, answer).to_string().into_bytes()),
        created_at: Utc::now(),
        ..row.clone()
    }
}

/// Returns the payload of an answer: its body as a text where it is one, else in base64; and
/// whether an earlier request of the message may have arrived.
fn payload(row: &OutgoingRow, answer: &KeptAnswer) -> Value {
    let mut members = Map::new();
    let (name, body) = match std::str::from_utf8(&answer.body) {
        Ok(text) => ("body", text.to_owned()),
        Err(_) => ("body_base64", STANDARD.encode(&answer.body)),
    };
    for (name, value) in [
        ("outgoing_id", json!(row.id)),
        ("cancel_token", json!(row.cancel_token)),
        ("status", json!(answer.status)),
        ("content_type", json!(answer.content_type)),
        (name, json!(body)),
        ("is_whole", json!(answer.is_whole)),
        ("is_repeated", json!(row.may_have_arrived)),
    ] {
        members.insert(name.to_owned(), value);
    }
    Value::Object(members)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::row::fixture::row;

    fn answer(body: &[u8]) -> KeptAnswer {
        let content_type = Some("application/json".to_owned());
        KeptAnswer { status: 201, content_type, body: body.to_vec(), is_whole: true }
    }

    fn payload_of(message: &OutgoingRow) -> Value {
        serde_json::from_slice(message.payload.as_deref().unwrap()).unwrap()
    }

    // What could go wrong: an answer that comes twice is two messages, or a handler cannot tell
    // what it answers.
    #[test]
    fn an_answer_says_what_it_answers_and_has_one_id() {
        let row = OutgoingRow { cancel_token: Some("saga-7".to_owned()), ..row() };
        let message = message_of(&row, ("acme", "orders"), None, &answer(b"{\"paid\":true}"));
        assert_eq!(message.event_type, "order.paid.answered");
        assert_eq!((message.message_id.as_str(), &message.key), (row.id.as_str(), &row.key));
        assert_eq!(message.correlation_id, row.correlation_id);
        assert_eq!(
            payload_of(&message),
            json!({
                "outgoing_id": row.id, "cancel_token": "saga-7", "status": 201,
                "content_type": "application/json", "body": "{\"paid\":true}", "is_whole": true,
                "is_repeated": false,
            })
        );
        let repeated = OutgoingRow { may_have_arrived: true, ..row.clone() };
        let repeated = message_of(&repeated, ("acme", "orders"), None, &answer(b""));
        assert_eq!(payload_of(&repeated)["is_repeated"], json!(true));
        let again = message_of(&row, ("acme", "orders"), Some("paid"), &answer(b"other"));
        assert_eq!((again.id, again.event_type.as_str()), (message.id, "paid"));
        assert_ne!(message_of(&row, ("acme", "other"), None, &answer(b"")).id, row.id);
    }

    #[test]
    fn a_body_that_is_no_text_is_base64() {
        let message = message_of(&row(), ("acme", "orders"), None, &answer(b"\xff\x00"));
        let payload = payload_of(&message);
        assert_eq!((payload.get("body"), &payload["body_base64"]), (None, &json!("/wA=")));
        assert!(!format!("{:?}", answer(b"s3cr3t")).contains("115"), "bytes are shown");
    }
}
