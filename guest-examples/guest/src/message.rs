//! What a message offers beside its fields.

use serde::{Deserialize, Serialize};

use crate::{Failure, Message, Result};

impl Message {
    /// A message with a JSON payload and no headers, for tests.
    pub fn new(id: &str, event_type: &str, payload: &impl Serialize) -> Self {
        let payload = serde_json::to_vec(payload).expect("a test's payload can be written as JSON");
        Self {
            id: id.to_owned(),
            source: "test".to_owned(),
            event_type: event_type.to_owned(),
            key: None,
            timestamp: 0,
            headers: Vec::new(),
            content_type: Some("application/json".to_owned()),
            payload: Some(payload),
        }
    }

    /// The payload, read as JSON. What is not the expected JSON can never succeed: rejected.
    pub fn payload_as<'m, T: Deserialize<'m>>(&'m self) -> Result<T> {
        match &self.payload {
            Some(payload) => serde_json::from_slice(payload)
                .map_err(|error| Failure::Reject(format!("malformed payload: {error}"))),
            None => serde_json::from_str("null")
                .map_err(|_| Failure::reject("the message has no payload")),
        }
    }

    /// The first header of this name, where it is text.
    pub fn header(&self, name: &str) -> Option<&str> {
        let (_, value) = self.headers.iter().find(|(header, _)| header == name)?;
        std::str::from_utf8(value).ok()
    }

    /// An id that depends on this message and on `purpose` alone; see [`crate::derive_id`].
    pub fn derive_id(&self, purpose: &str) -> String {
        crate::derive_id(&self.id, purpose)
    }
}
