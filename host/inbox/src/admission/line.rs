//! The queue of a consumer, and the transactions that wait in it or run.

use std::{collections::VecDeque, time::Duration};

use super::{AdmissionRequest, bucket::Bucket};

/// State of a tenant's next transaction: ready, or the reason why it waits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum NextInLine {
    /// Ready transaction, of this consumer; none for one that goes first.
    Ready(Option<i32>),
    /// Time at which a rate allows it.
    Rate(Duration),
    /// Full cap of the tenant or of its consumers.
    Capped,
    /// Lack of memory on the host.
    Memory,
}

/// A transaction in the queue.
#[derive(Debug)]
pub(super) struct Waiting {
    pub(super) id: u64,
    pub(super) ask: AdmissionRequest,
    /// Transactions that other tenants had been granted when it came.
    pub(super) others: u64,
}

/// A consumer's queue and caps.
#[derive(Debug)]
pub(super) struct Line {
    pub(super) transactions_max: Option<usize>,
    pub(super) running: usize,
    pub(super) waiting: VecDeque<Waiting>,
    pub(super) bucket: Bucket,
}

impl Line {
    pub(super) fn is_full(&self) -> bool {
        self.transactions_max.is_some_and(|max| self.running >= max.max(1))
    }
}

/// A transaction that runs.
#[derive(Debug)]
pub(super) struct Running {
    pub(super) id: u64,
    /// Time of its admission.
    pub(super) since: Duration,
    /// Least cost that it is charged, nanoseconds.
    pub(super) cost_ns: f64,
    /// True where it holds a place, or memory, that is kept for tenants that run nothing.
    pub(super) is_lent: bool,
    /// True where nothing was known of its tenant when it was lent its place.
    pub(super) is_trial: bool,
    /// True once it was called back.
    pub(super) is_called_back: bool,
}

impl Running {
    pub(super) fn held(&self, now: Duration) -> Duration {
        now.saturating_sub(self.since)
    }

    /// Returns whether it holds a kept place or kept memory and was not called back. With
    /// `trials_alone`, only trials count.
    pub(super) fn is_loan(&self, trials_alone: bool) -> bool {
        self.is_lent && !self.is_called_back && (self.is_trial || !trials_alone)
    }
}
