//! Messages to others, which the host sends after the commit.
//!
//! This module needs the feature `emit` of this crate. A component that calls it imports
//! `oncebox:handler/emit`, and its deployment needs the grant for it:
//! `oncebox deploy --grant emit`. The tenant's limits say which destinations it may name.
//!
//! ```no_run
//! use oncebox_guest::{Result, emit::Outgoing, handler, json};
//!
//! #[derive(serde::Deserialize)]
//! struct Order {
//!     order_id: String,
//! }
//!
//! # fn main() {}
//! #[handler]
//! fn place(order: Order) -> Result<()> {
//!     Outgoing::json("order.confirmed", &json!({ "order_id": order.order_id }))
//!         .to("kafka:orders")
//!         .key(&order.order_id)
//!         .send()?;
//!     Ok(())
//! }
//! ```
//!
//! The message is written in the transaction of the message that is handled. When that one fails,
//! nothing is sent, and a [`savepoint`](crate::savepoint) that fails takes back what was sent and
//! cancelled in it. A refused [`send`](Outgoing::send) fails the message even when the handler
//! answers ok, as a failed statement does.
//!
//! The host derives the id of an outgoing message from the message that caused it and from the
//! number of the call, so another run has the same ids. A receiver may get a message twice; the id
//! tells.

use std::{error, fmt, time::Duration};

use serde::Serialize;

use crate::{Message, Timestamptz, sys};

/// A message to be sent. The functions that make one name what happened: the CloudEvents `type`.
#[derive(Debug, Clone, PartialEq)]
#[must_use = "it is sent by `send`"]
pub struct Outgoing {
    pub(crate) destination: String,
    pub(crate) event_type: String,
    pub(crate) content_type: Option<String>,
    pub(crate) headers: Vec<(String, Vec<u8>)>,
    /// The payload, or why there is none.
    pub(crate) payload: Result<Option<Vec<u8>>, String>,
    pub(crate) key: Option<Vec<u8>>,
    pub(crate) due: Due,
    pub(crate) cancel_token: Option<String>,
    pub(crate) cause: Option<String>,
}

/// When a message is sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Due {
    /// After the commit.
    Now,
    /// This time after the beginning of the transaction.
    After(Duration),
    /// At this time, in milliseconds since the Unix epoch, by the database's clock.
    At(i64),
}

impl Outgoing {
    /// A message with a JSON payload.
    pub fn json(event_type: impl Into<String>, payload: &impl Serialize) -> Self {
        let payload = serde_json::to_vec(payload)
            .map(Some)
            .map_err(|error| format!("the payload cannot be written as JSON: {error}"));
        let outgoing = Self::of(event_type.into(), payload);
        outgoing.content_type("application/json")
    }

    /// A message with these bytes.
    pub fn bytes(event_type: impl Into<String>, payload: impl Into<Vec<u8>>) -> Self {
        Self::of(event_type.into(), Ok(Some(payload.into())))
    }

    /// A message without a payload.
    pub fn tombstone(event_type: impl Into<String>) -> Self {
        Self::of(event_type.into(), Ok(None))
    }

    fn of(event_type: String, payload: Result<Option<Vec<u8>>, String>) -> Self {
        Self {
            destination: String::new(),
            event_type,
            content_type: None,
            headers: Vec::new(),
            payload,
            key: None,
            due: Due::Now,
            cancel_token: None,
            cause: None,
        }
    }

    /// Where it goes: `kafka:` and a topic, `inbox:` and a consumer of the tenant, or `http:` and
    /// an endpoint of the tenant.
    pub fn to(mut self, destination: impl Into<String>) -> Self {
        self.destination = destination.into();
        self
    }

    /// Its key: messages of one destination and key are sent in the order of their due times, then
    /// of their calls. Without a key there is no order.
    pub fn key(mut self, key: impl AsRef<[u8]>) -> Self {
        self.key = Some(key.as_ref().to_vec());
        self
    }

    /// The media type of its payload.
    pub fn content_type(mut self, content_type: impl Into<String>) -> Self {
        self.content_type = Some(content_type.into());
        self
    }

    /// One more header. The host adds those of CloudEvents itself.
    pub fn header(mut self, name: impl Into<String>, value: impl Into<Vec<u8>>) -> Self {
        self.headers.push((name.into(), value.into()));
        self
    }

    /// Sends it this time after the beginning of the transaction; a year at most.
    pub fn after(mut self, delay: Duration) -> Self {
        self.due = Due::After(delay);
        self
    }

    /// Sends it at this time by the database's clock; a year ahead at most. The past is now.
    pub fn at(mut self, time: Timestamptz) -> Self {
        self.due = Due::At(time.0.div_euclid(1_000));
        self
    }

    /// Names it for [`cancel`].
    pub fn cancel_token(mut self, token: impl Into<String>) -> Self {
        self.cancel_token = Some(token.into());
        self
    }

    /// The message of a batch that causes it. A handler of batches must name it.
    pub fn caused_by(mut self, message: &Message) -> Self {
        self.cause = Some(message.id.clone());
        self
    }

    /// Sends it after the commit, if the message that causes it commits. The answer is its id.
    ///
    /// A payload that cannot be written as JSON never reaches the host, so only this error tells
    /// of it.
    pub fn send(self) -> Result<String, EmitError> {
        match &self.payload {
            Ok(_) => sys::emit(self),
            Err(reason) => Err(EmitError::Refused(reason.clone())),
        }
    }
}

/// Withdraws what this consumer's handlers sent with this token and no relay has begun to send, in
/// this transaction. True if there was any.
pub fn cancel(token: &str) -> Result<bool, EmitError> {
    sys::cancel(token)
}

/// Why a message cannot be sent or withdrawn. It fails the message that is handled.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum EmitError {
    /// The destination is not allowed, or a value cannot be sent. Running it again cannot help.
    Refused(String),
    /// A cap of the consumer was reached; says which.
    Limit(String),
    /// PostgreSQL's error of a [`cancel`].
    Database(String),
}

impl fmt::Display for EmitError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Refused(text) => write!(f, "outgoing message refused: {text}"),
            Self::Limit(text) => write!(f, "limit reached: {text}"),
            Self::Database(text) => write!(f, "database error {text}"),
        }
    }
}

impl error::Error for EmitError {}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::json;

    #[test]
    fn a_message_has_what_it_was_given() {
        let cause = Message::new("m-1", "order.placed", &json!({}));
        let outgoing = Outgoing::json("order.confirmed", &json!({ "order_id": "o-1" }))
            .to("kafka:orders")
            .key("o-1")
            .header("region", "north")
            .after(Duration::from_secs(30))
            .cancel_token("reminder:o-1")
            .caused_by(&cause);
        let expected = Outgoing {
            destination: "kafka:orders".into(),
            event_type: "order.confirmed".into(),
            content_type: Some("application/json".into()),
            headers: vec![("region".into(), b"north".to_vec())],
            payload: Ok(Some(br#"{"order_id":"o-1"}"#.to_vec())),
            key: Some(b"o-1".to_vec()),
            due: Due::After(Duration::from_secs(30)),
            cancel_token: Some("reminder:o-1".into()),
            cause: Some("m-1".into()),
        };
        assert_eq!(outgoing, expected);
    }

    #[test]
    fn times_before_the_epoch_are_rounded_down() {
        let at = |micros| Outgoing::tombstone("t").at(Timestamptz(micros)).due;
        assert_eq!(
            (at(1_999), at(-1), at(0)),
            (Due::At(1), Due::At(-1), Due::At(0))
        );
    }

    /// What could go wrong: a value that is no JSON is sent as something else.
    #[test]
    fn a_payload_that_cannot_be_written_is_refused() {
        let outgoing = Outgoing::json("t", &std::collections::BTreeMap::from([((1, 2), 3)]));
        let sent = outgoing.to("kafka:items").send();
        assert!(
            matches!(&sent, Err(EmitError::Refused(why)) if why.contains("JSON")),
            "{sent:?}"
        );
    }
}
