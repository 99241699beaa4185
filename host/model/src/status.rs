//! States, as rows, metrics and the API show them.

use serde::Serialize;

/// A breaker that is not closed, as a host shows it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct BreakerState {
    /// The handler's version.
    pub version_id: i32,
    /// `open` or `half_open`.
    pub state: &'static str,
    /// Milliseconds until it lets a message probe; none while one does.
    pub probes_in_ms: Option<u64>,
    /// How long it stays open the next time, milliseconds.
    pub pause_ms: u64,
}
