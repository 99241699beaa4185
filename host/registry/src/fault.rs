//! Faults of payloads and their schemas.

/// Most bytes of a fault's reason.
const WHY_BYTES_MAX: usize = 400;

/// A fault of a payload or of its schema. No text shows content of the payload.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Fault {
    /// A payload of less than five bytes.
    #[error("it ends within the first five bytes of the schema registry's wire format")]
    TooShort,
    /// A payload that does not begin with a byte 0.
    #[error("its first byte is not 0, so it is not in the schema registry's wire format")]
    NotInWireFormat,
    /// A schema id that the registry does not have.
    #[error("schema {schema_id} is not in the registry")]
    UnknownSchema {
        /// Schema id of the payload.
        schema_id: u32,
    },
    /// A schema that the registry has and the host cannot use.
    #[error("schema {schema_id} cannot be used: {why}")]
    UnusableSchema {
        /// Schema id of the payload.
        schema_id: u32,
        /// Reason, in one line.
        why: String,
    },
    /// A payload that does not match its schema.
    #[error("it does not decode by schema {schema_id}: {why}")]
    Undecodable {
        /// Schema id of the payload.
        schema_id: u32,
        /// Reason and position, in one line.
        why: String,
    },
    /// A schema that is not cached, or was evicted. The payload may be sound.
    #[error("schema {schema_id} is not at hand")]
    NotPrepared {
        /// Schema id of the payload.
        schema_id: u32,
    },
}

impl Fault {
    /// Returns whether the payload must be prepared, again if it was before, and then decoded.
    pub fn is_not_prepared(&self) -> bool {
        matches!(self, Self::NotPrepared { .. })
    }

    pub(crate) fn unusable(schema_id: u32, why: &str) -> Self {
        Self::UnusableSchema { schema_id, why: tidy(why) }
    }

    pub(crate) fn undecodable(schema_id: u32, why: &str) -> Self {
        Self::Undecodable { schema_id, why: tidy(why) }
    }
}

/// Makes one line of a text, of at most [`WHY_BYTES_MAX`] bytes and an ellipsis.
fn tidy(text: &str) -> String {
    let mut text: String = text
        .chars()
        .take(WHY_BYTES_MAX + 1)
        .map(|c| if c.is_control() { ' ' } else { c })
        .collect();
    if text.len() > WHY_BYTES_MAX {
        text.truncate(text.floor_char_boundary(WHY_BYTES_MAX));
        text.push('…');
    }
    text
}
