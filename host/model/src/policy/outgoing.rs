//! The rules for messages that the handlers of a consumer send.

use serde::{Deserialize, Serialize};

/// The rules for the outgoing messages of a consumer.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct OutgoingPolicy {
    /// What a parked message does to those behind it: of its destination and key.
    pub on_parked: OnParked,
}

/// What a parked outgoing message does to those of its destination and key that are due later.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum OnParked {
    /// They are sent without it.
    #[default]
    GoOn,
    /// They wait until an operator redrives or discards it.
    Stop,
}

impl OutgoingPolicy {
    pub(super) fn is_default(&self) -> bool {
        *self == Self::default()
    }

    /// Describes what is not the default, as a sentence.
    pub(super) fn explain(&self) -> Option<String> {
        match self.on_parked {
            OnParked::GoOn => None,
            OnParked::Stop => Some(
                "A message that its handlers send and that is parked holds back those of its \
                    destination and key that are due later."
                    .to_owned(),
            ),
        }
    }
}
