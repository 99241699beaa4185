//! What runs in its order, and in the sequence of its aggregate.

use serde::{Deserialize, Serialize};

use super::VersionSource;

/// What runs in its order. A message that failed, was parked or waits for its retry is open until
/// it completes, is skipped or is discarded; what comes behind an open one waits in the inbox, and
/// the rest goes on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Order {
    /// Nothing: a message that fails lets later ones pass.
    #[default]
    None,
    /// Messages of a partition.
    Partition,
    /// Messages of an ordering key; those without one are in order with nothing.
    Key,
}

impl Order {
    pub(super) fn is_none(&self) -> bool {
        *self == Self::None
    }
}

/// In which sequence messages of one aggregate run: that of an ordering key. Each says which
/// version it makes; one that is not above the aggregate's is skipped, one that leaves a gap waits
/// for it to close.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Sequence {
    /// Where the version is found.
    pub version: VersionSource,
    /// The version that an aggregate begins with; none where it begins with whatever comes first.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub first: Option<u32>,
    /// Milliseconds that a message waits for a gap to close.
    #[serde(default = "Sequence::gap_wait_ms")]
    pub gap_wait_ms: u64,
    /// What becomes of a message that waited that long.
    #[serde(default)]
    pub gap: Gap,
}

impl Sequence {
    fn gap_wait_ms() -> u64 {
        300_000
    }
}

/// What becomes of a message whose gap did not close in time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Gap {
    /// It is parked, and its key with it; it goes on when the gap closes, or when it is redriven.
    #[default]
    Park,
    /// It runs, and the aggregate is at its version: what was missing is skipped when it comes.
    GoOn,
}
