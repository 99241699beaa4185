//! A place in a list of messages, from which the next page goes on.

use chrono::{DateTime, Utc};
use oncebox_model::error::InboxError;

/// A place in a list of one consumer's messages, which is ordered by time, the newest first, and by
/// id.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Place {
    /// When the last message that was seen was received.
    pub received_at: DateTime<Utc>,
    /// Its id. None stands behind all that were received at that time.
    pub message_id: Option<String>,
}

impl std::fmt::Display for Place {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.received_at.to_rfc3339_opts(chrono::SecondsFormat::Micros, true))?;
        self.message_id.as_ref().map_or(Ok(()), |id| write!(f, ",{id}"))
    }
}

impl std::str::FromStr for Place {
    type Err = InboxError;

    /// A time as of RFC 3339, and behind a comma the id of a message.
    fn from_str(text: &str) -> Result<Self, InboxError> {
        let (time, id) = text.split_once(',').map_or((text, None), |(time, id)| (time, Some(id)));
        let time = DateTime::parse_from_rfc3339(time);
        let time = time.map_err(|_| {
            InboxError::Invalid(format!(
                "`{text}` is no place in a list of messages: a time, a comma, an id"
            ))
        })?;
        Ok(Self { received_at: time.into(), message_id: id.map(str::to_owned) })
    }
}
