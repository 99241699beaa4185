//! A position in a list of messages, from which the next page continues.

use chrono::{DateTime, Utc};
use oncebox_model::error::InboxError;

/// A position in the list of one consumer's messages. The list is ordered by time, newest first,
/// then by id.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Cursor {
    /// Time at which the last message of the page was received.
    pub received_at: DateTime<Utc>,
    /// Id of that message. None is a position behind all messages that were received at that time.
    pub message_id: Option<String>,
}

impl std::fmt::Display for Cursor {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.received_at.to_rfc3339_opts(chrono::SecondsFormat::Micros, true))?;
        self.message_id.as_ref().map_or(Ok(()), |id| write!(f, ",{id}"))
    }
}

impl std::str::FromStr for Cursor {
    type Err = InboxError;

    /// Parses a time as of RFC 3339, optionally followed by a comma and the id of a message.
    fn from_str(text: &str) -> Result<Self, InboxError> {
        let (time, id) = text.split_once(',').map_or((text, None), |(time, id)| (time, Some(id)));
        let time = DateTime::parse_from_rfc3339(time);
        let time = time.map_err(|_| {
            InboxError::Invalid(format!(
                "`{text}` is no cursor of a list of messages: a time, a comma, an id"
            ))
        })?;
        Ok(Self { received_at: time.into(), message_id: id.map(str::to_owned) })
    }
}
