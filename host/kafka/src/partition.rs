//! A partition of a topic, by its name and number.

use std::{fmt, sync::Arc};

/// A partition of a topic.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct Partition {
    /// Name of the topic.
    pub(crate) topic: Arc<str>,
    /// Number of the partition in its topic.
    pub(crate) number: i32,
}

impl fmt::Display for Partition {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.topic, self.number)
    }
}
