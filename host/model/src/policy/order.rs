//! The messages that run in order, and in the sequence of their aggregate.

use serde::{Deserialize, Serialize};

use super::VersionSource;

/// The messages that run in order. A message that failed, was parked or waits for its retry is open
/// until it completes, is skipped or is discarded. Messages behind an open one wait in the inbox;
/// all others go on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Order {
    /// No messages: a message that fails lets later ones pass.
    #[default]
    None,
    /// Messages of a partition.
    Partition,
    /// Messages of an ordering key; a message without a key has no order.
    Key,
}

impl Order {
    pub(super) fn is_none(&self) -> bool {
        *self == Self::None
    }
}

/// The sequence in which messages of one aggregate run; the ordering key names the aggregate. Each
/// message carries the version that it creates. A message whose version is not above the
/// aggregate's is skipped. A message that leaves a gap waits for the gap to close.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Sequence {
    /// Source of the version.
    pub version: VersionSource,
    /// First version of an aggregate; none where it begins with the first version that comes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub first: Option<u32>,
    /// Milliseconds that a message waits for a gap to close.
    #[serde(default = "Sequence::gap_wait_ms")]
    pub gap_wait_ms: u64,
    /// Treatment of a message that waited that long.
    #[serde(default)]
    pub gap: Gap,
}

impl Sequence {
    fn gap_wait_ms() -> u64 {
        300_000
    }
}

/// The treatment of a message whose gap did not close in time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Gap {
    /// It is parked, and its key with it. It goes on when the gap closes, or when it is redriven.
    #[default]
    Park,
    /// It runs, and the aggregate takes its version: a missing message is skipped when it comes.
    Proceed,
}
