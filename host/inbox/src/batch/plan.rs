//! The table of what follows an aborted transaction: [`Plan::after`].
//!
//! A transaction is repeated smaller, later or with savepoints, until it commits, or until an abort
//! is the failure of one message, which is recorded in a transaction of its own.

use std::time::Duration;

use oncebox_model::{
    error::InboxError,
    hooks::{self, Defect},
    outcome::{Failure, FailureKind},
};

use crate::{
    admission::batch_sizer::{BatchSizer, SavepointMode},
    batch::{abort::Abort, routed::Routed},
};

/// Repetitions of a message alone that meets contention, before the contention counts as a failed
/// attempt.
const CONTENTION_REPEATS: u32 = 5;

/// Size and mode of the next transaction of a batch.
#[derive(Debug)]
pub(super) struct Plan {
    /// Messages of the transaction, from the front of the batch.
    size: usize,
    pub(super) mode: SavepointMode,
    /// True once the messages are settled one by one.
    pub(super) alone: bool,
    /// Repetitions after contention, with one message.
    repeats: u32,
}

/// Step that follows an aborted transaction.
#[derive(Debug)]
pub(super) enum AfterAbort {
    /// The next transaction, by the plan.
    Again,
    /// The next transaction, after a pause.
    AgainAfter(Duration),
    /// The record of the first message's failure.
    Record(Failure),
    /// The parking of the first message, whose row PostgreSQL refuses.
    Park(Failure),
    /// The end: nothing is settled.
    Fail(InboxError),
}

impl Plan {
    /// Makes the plan of a first transaction.
    pub(super) fn new(size: usize, mode: SavepointMode) -> Self {
        Self { size, mode, alone: false, repeats: 0 }
    }

    /// Returns the messages of the next transaction. The limit of a mode is about savepoints of
    /// messages; a batch handler needs one per call.
    pub(super) fn front<'a>(&self, batch: &'a [Routed]) -> &'a [Routed] {
        let takes_batches = batch[0].handler.takes_batches();
        let size = if takes_batches { self.size } else { self.mode.limit(self.size) };
        &batch[..size.min(batch.len())]
    }

    /// Plans the next transaction after one that was aborted. From a size of one on, a failure is
    /// that message's.
    pub(super) fn after(&mut self, abort: Abort, sizer: &BatchSizer) -> AfterAbort {
        match abort {
            Abort::Failed => self.mode = SavepointMode::Savepoints,
            // The sizer knows of the contention: transactions of this consumer run one at a time
            // from then on, and shrink where that does not help.
            Abort::Contention { .. } if self.size > 1 => self.size = self.size.min(sizer.next().0),
            // A refused claim or COMMIT does not name its message: from here each is settled alone.
            Abort::AtClaim { .. } | Abort::AtCommit { .. } if self.size > 1 => {
                (self.size, self.mode, self.alone) = (1, SavepointMode::Savepoints, true);
            }
            // Fewer claims need fewer locks.
            Abort::LockTableFull(_) if self.size > 1 => {
                sizer.crowded();
                self.size /= 2;
            }
            // The messages before it are settled first, so that positions stay in order.
            Abort::Abandoned { index, .. } if index > 0 => self.size = index,
            // The pause is random, so that two opponents do not meet again.
            Abort::Contention { .. } if self.repeats < CONTENTION_REPEATS => {
                self.repeats += 1;
                let ms = rand::random_range(1..=10 << self.repeats);
                return AfterAbort::AgainAfter(Duration::from_millis(ms));
            }
            Abort::Contention { failure }
            | Abort::AtCommit { failure }
            | Abort::Abandoned { failure, .. } => return AfterAbort::Record(failure),
            Abort::AtClaim { failure } => return AfterAbort::Park(failure),
            Abort::LockTableFull(error) | Abort::Host(error) => return AfterAbort::of_host(error),
        }
        AfterAbort::Again
    }
}

impl AfterAbort {
    /// Returns the step after an error of the host, which costs no message an attempt.
    fn of_host(error: InboxError) -> Self {
        if hooks::sabotage(Defect::AttemptOnHostFault) {
            return Self::Record(Failure::new(FailureKind::Other, error.to_string()));
        }
        Self::Fail(error)
    }
}
