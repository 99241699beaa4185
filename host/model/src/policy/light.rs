//! The form of the rows of completed messages: full, or light.

use serde::{Deserialize, Serialize};

use super::{Collision, Policy};

/// The form of the rows of completed messages. Every other row is full.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RowForm {
    /// The row keeps what is known of the message.
    #[default]
    Full,
    /// The row keeps the id, the position and the timestamp of the record, the version of the
    /// handler, the place in an order, and the times. For topics of very many messages that must
    /// have their effect once and are not looked up later.
    Light,
}

impl RowForm {
    pub(super) fn is_full(&self) -> bool {
        *self == Self::Full
    }
}

/// What light rows keep beside what all of them do.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct LightRows {
    /// Whether a light row keeps the result of the handler. That costs an update of the row.
    pub result: bool,
}

impl LightRows {
    pub(super) fn is_default(&self) -> bool {
        *self == Self::default()
    }
}

impl Policy {
    /// Returns whether a message that completes leaves a light row.
    pub fn is_light(&self) -> bool {
        self.inbox == RowForm::Light
    }

    /// Returns whether the row of a completed message keeps the result of the handler.
    pub fn keeps_result(&self) -> bool {
        !self.is_light() || self.light.result
    }

    /// Returns the treatment of a known id that comes with another payload.
    pub fn collision(&self) -> Collision {
        match self.collision {
            Some(collision) => collision,
            None if self.is_light() => Collision::Ignore,
            None => Collision::default(),
        }
    }
}
