//! The bounds at which open messages of an inbox become an alert.

use serde::{Deserialize, Serialize};

/// Highest number of messages of one state that a host counts, at each check of its consumers. No
/// bound of [`Alerts`] may be above it.
pub const WATCHED_MAX: i64 = 10_000;

/// The bounds at which open messages become an alert: a metric, an event in the log, a line of
/// `oncebox inbox stats`. A bound of 0 raises no alert.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Alerts {
    /// Seconds since the oldest message that runs or is still to run was received.
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
