//! The place of a message in a replay, and its end there.

use chrono::{DateTime, Utc};
use oncebox_model::{outcome::Failure, outgoing::OutgoingMessage, policy::ReplayEmit};

/// Place of a message in a replay.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ReplayTurn {
    /// Key of the replay.
    pub(crate) replay_id: i64,
    /// Number of the host's lease of the replay.
    pub(crate) epoch: i64,
    /// Moves of the replay's cursor before this message.
    pub(crate) step: i64,
    /// Time at which the message completed.
    pub(crate) completed_at: DateTime<Utc>,
    /// Answer to an emit.
    pub(crate) emit: ReplayEmit,
}

/// End of a replayed message.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum ReplayEnd {
    /// It ran. Its effect and the move of the cursor are committed.
    Replayed {
        /// Messages that the run emitted and that are dropped.
        suppressed: Vec<OutgoingMessage>,
    },
    /// It failed and was rolled back. The move of the cursor is committed.
    Failed {
        /// Failure of the run.
        failure: Failure,
        /// True where this was one failure in a row too many, and the replay is paused.
        is_paused: bool,
    },
    /// Another session has the message or its key; nothing happened.
    Busy,
    /// The message is not as the replay found it; nothing happened.
    Changed,
    /// Another host has the replay, or it is paused or over; nothing happened.
    Lost,
}

/// Result of the run of a replayed message, until its transaction is completed.
#[derive(Debug)]
pub(crate) enum ReplayedRun {
    /// The run emitted these messages.
    Ok(Vec<OutgoingMessage>),
    /// The run failed, and its effect is rolled back.
    Failed(Failure),
}
