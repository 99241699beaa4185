//! Reasons why a transaction ends without a commit.

use oncebox_model::{
    error::InboxError,
    hooks::{self, Defect},
    meter::Stopped,
    outcome::Failure,
};

/// Reason why a transaction was aborted. Nothing of it remains, unless the answer to its COMMIT was
/// lost ([`InboxError::CommitUnknown`]); then the next claim finds out.
#[derive(Debug)]
pub(crate) enum Abort {
    /// Failure of a message without a savepoint before it.
    Failed,
    /// Failure of one message that this transaction cannot record. A statement was cut off, the
    /// savepoint is gone, or claims are not written. It is recorded in another transaction.
    Abandoned { index: usize, failure: Failure },
    /// Deadlock, serialization failure, lock timeout or full lock table, in a message's statement
    /// or at COMMIT.
    Contention { failure: Failure },
    /// Failure that cannot be ascribed to one message of several: a deferred constraint at COMMIT,
    /// a refused result, a deadline of a common call.
    AtCommit { failure: Failure },
    /// Refusal of the data of some message by the claim.
    AtClaim { failure: Failure },
    /// Lock table of the server without room for the locks of this many claims.
    LockTableFull(InboxError),
    /// Error of the host, its database or a connection; it costs no message an attempt.
    Host(InboxError),
}

impl From<InboxError> for Abort {
    fn from(error: InboxError) -> Self {
        Self::Host(error)
    }
}

impl Abort {
    /// Returns the abort for a failure of the message at `index` without a savepoint before it.
    pub(crate) fn without_savepoint(index: usize, failure: Failure) -> Self {
        if hooks::sabotage(Defect::FailureWrittenByUpsert) {
            return Self::Abandoned { index, failure };
        }
        Self::Failed
    }

    /// Returns the abort of a transaction that the host stops.
    pub(crate) fn stopped(why: Stopped) -> Self {
        Self::Host(InboxError::Stopped { why })
    }

    /// Returns the host's error for the abort of a transaction in which no handler ran.
    pub(crate) fn into_host_error(self) -> InboxError {
        match self {
            Self::Host(error) | Self::LockTableFull(error) => error,
            other => {
                InboxError::Invalid(format!("a transaction of the host alone stopped: {other:?}"))
            }
        }
    }
}
