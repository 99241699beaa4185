//! What the owner of a consumer declares about the rows that its handlers write.

use serde::{Deserialize, Serialize};

/// What programs outside the host do with the rows that handlers write. The host cannot see it.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Effects {
    /// The owner's declaration; none for no declaration.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub outside: Option<OutsideEffects>,
}

/// The effects outside the database that follow from the rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum OutsideEffects {
    /// No program acts on them.
    None,
    /// A program acts on them, and the other side recognises an action that is repeated by its key.
    Keyed,
}

impl Effects {
    pub(super) fn is_default(&self) -> bool {
        *self == Self::default()
    }

    /// Describes the declaration, as a sentence.
    pub(super) fn explain(&self) -> Option<String> {
        let text = match self.outside? {
            OutsideEffects::None => {
                "Its owner declares that no program acts on the rows of its handlers."
            }
            OutsideEffects::Keyed => {
                "Its owner declares that what acts on the rows of its handlers gives a key, by \
                    which the other side recognises an action that is repeated."
            }
        };
        Some(text.to_owned())
    }
}
