//! The result of a committed transaction.

use std::collections::BTreeSet;

use oncebox_model::outcome::{Disposition, FailureKind};

use crate::{
    admission::batch_sizer::Fit,
    batch::{claim::ClaimOutcome, complete::Recorded, replay_turn::ReplayEnd},
    shadow::Sampled,
    spans::RunSpans,
};

/// Result of each message that ran: its index in the batch, its disposition, the kind of its
/// failure.
pub(crate) type Results = Vec<(usize, Disposition, Option<FailureKind>)>;

/// Result of a committed transaction.
#[derive(Debug, Default)]
pub(crate) struct Settled {
    /// Answers to the claims that count, from the first message of the batch on. Later claims were
    /// withdrawn, and their messages come again.
    pub(crate) claims: Vec<ClaimOutcome>,
    /// Result of each message that ran.
    pub(crate) results: Results,
    /// Failure of a run whose message another session has by now; nothing was written about it.
    pub(crate) unrecorded: Option<FailureKind>,
    /// True where one message was settled after a larger transaction failed at its claim or its
    /// COMMIT. The messages behind it are then settled one by one too.
    pub(crate) alone: bool,
    /// Spans of the runs, which end with the transaction.
    pub(crate) spans: RunSpans,
    /// Completed messages, to be tried on shadow candidates after the commit.
    pub(crate) sampled: Vec<Sampled>,
    /// Destinations of outgoing messages that are due with the commit.
    pub(crate) destinations: BTreeSet<String>,
    /// Failures in the committed rows, to be counted and logged after the commit.
    pub(crate) failures: Vec<Recorded>,
    /// Share of the claimed messages that it had time for, which bounds the next batch.
    pub(crate) fit: Fit,
    /// End of a replayed message; none for every other batch.
    pub(crate) replayed: Option<ReplayEnd>,
}

impl Settled {
    /// Returns the result of a transaction that claimed messages and ran none of them.
    pub(crate) fn stored(claims: Vec<ClaimOutcome>) -> Self {
        Self { claims, ..Self::default() }
    }

    /// Returns the result of the transaction of a replayed message.
    pub(crate) fn replayed(end: ReplayEnd) -> Self {
        Self { replayed: Some(end), ..Self::default() }
    }
}
