//! States, as rows, metrics and the API show them.

use serde::Serialize;

/// A breaker that is not closed, as a host shows it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct BreakerState {
    /// The handler's version.
    pub version_id: i32,
    /// `open` or `half_open`.
    pub state: &'static str,
    /// Milliseconds until it lets a message probe; none while one probes.
    pub probes_in_ms: Option<u64>,
    /// Milliseconds for which it stays open the next time.
    pub pause_ms: u64,
}
