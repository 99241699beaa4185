//! When what is open in the inbox is too much.

use serde::{Deserialize, Serialize};

/// Messages of one state that are counted again and again, for all consumers of a host; so no bound
/// of [`Alerts`] is above it.
pub const WATCHED_MAX: i64 = 10_000;

/// From where on what is open in the inbox is an alert: a metric, an event in the log, a line of
/// `oncebox inbox stats`. 0 is never.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Alerts {
    /// Seconds since the oldest message was received that is still to be run.
    pub pending_age_s: u64,
    /// Parked messages.
    pub parked: u64,
    /// Dead letters.
    pub dead_letters: u64,
    /// Known ids that came with another payload and are parked.
    pub collisions: u64,
}

impl Default for Alerts {
    fn default() -> Self {
        Self { pending_age_s: 600, parked: 1, dead_letters: 1, collisions: 1 }
    }
}

impl Alerts {
    pub(super) fn is_default(&self) -> bool {
        *self == Self::default()
    }
}
