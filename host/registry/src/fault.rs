//! What is wrong with a payload.

/// Bytes of the text that says what is wrong.
const WHY_BYTES_MAX: usize = 400;

/// What is wrong with a payload or its schema. No text of these tells what is in the payload.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Fault {
    /// It has less than five bytes.
    #[error("it ends within the first five bytes of the schema registry's wire format")]
    TooShort,
    /// It does not begin with a byte 0.
    #[error("its first byte is not 0, so it is not in the schema registry's wire format")]
    NotInWireFormat,
    /// Its schema is not there.
    #[error("schema {schema_id} is not in the registry")]
    UnknownSchema {
        /// The id in the payload.
        schema_id: u32,
    },
    /// Its schema is there, and is of no use.
    #[error("schema {schema_id} cannot be used: {why}")]
    UnusableSchema {
        /// The id in the payload.
        schema_id: u32,
        /// What is wrong with it.
        why: String,
    },
    /// It is not what its schema says.
    #[error("it does not decode by schema {schema_id}: {why}")]
    Undecodable {
        /// The id in the payload.
        schema_id: u32,
        /// What is wrong, and where.
        why: String,
    },
    /// Nothing wrong: its schema is not at hand any more, or not yet.
    #[error("schema {schema_id} is not at hand")]
    NotPrepared {
        /// The id in the payload.
        schema_id: u32,
    },
}

impl Fault {
    /// Whether to prepare the payload, again, and then to decode it.
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

/// One line, and not a long one.
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
