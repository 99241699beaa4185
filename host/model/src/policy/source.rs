//! The sources of a message's id, event type, ordering key and version.

use serde::{Deserialize, Serialize};

use super::{Dedup, Policy};

/// The sources of a message's identity: ordered lists, of which the first source that yields a
/// value wins.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct IdentityPolicy {
    /// Sources of the message id.
    pub id: Vec<IdSource>,
    /// Sources of the event type.
    pub event_type: Vec<TypeSource>,
    /// Source of the ordering key.
    pub ordering_key: KeySource,
    /// True to put the event type before the id, for producers whose ids are unique only within a
    /// type.
    pub scoped_by_event_type: bool,
}

impl Default for IdentityPolicy {
    fn default() -> Self {
        Self {
            id: vec![IdSource::Cloudevents],
            event_type: vec![TypeSource::Cloudevents, TypeSource::Topic],
            ordering_key: KeySource::RecordKey,
            scoped_by_event_type: false,
        }
    }
}

/// One place to look for a message id.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum IdSource {
    /// The value of a header, as UTF-8.
    Header(String),
    /// CloudEvents `source` and `id` together.
    Cloudevents,
    /// A JSON pointer (RFC 6901) into the payload; the value is a string or an integer.
    JsonPointer(String),
    /// Topic, topic id, partition and offset. This id collapses redeliveries of one record, but not
    /// two records of one event.
    Position,
}

/// One place to look for an event type.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum TypeSource {
    /// CloudEvents `type`.
    Cloudevents,
    /// The value of a header, as UTF-8.
    Header(String),
    /// A JSON pointer into the payload.
    JsonPointer(String),
    /// The topic's name.
    Topic,
    /// The full name of the record or message that the payload's schema describes.
    Schema,
}

/// The source of the ordering key.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum KeySource {
    /// The record's key.
    #[default]
    RecordKey,
    /// A JSON pointer into the payload.
    JsonPointer(String),
}

/// The source of an aggregate's version.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum VersionSource {
    /// The value of a header, in decimal digits.
    Header(String),
    /// A JSON pointer (RFC 6901) into the payload; the value is an integer, or its digits.
    JsonPointer(String),
}

impl Policy {
    /// Returns the deliveries that have one effect together: all of one event, only those of one
    /// record, or none. The same for every event type.
    pub fn collapses(&self) -> &'static str {
        match (self.dedup, self.identity.id.first()) {
            (Dedup::Off, _) => "nothing: each delivery has its effect",
            (Dedup::Inbox, Some(IdSource::Position) | None) => "redeliveries of one record",
            (Dedup::Inbox, Some(_)) => {
                "every delivery of one event, also when it was produced twice"
            }
        }
    }
}
