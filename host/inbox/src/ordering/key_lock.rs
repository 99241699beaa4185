//! The keys that a failed message blocks in its transaction.
//!
//! Messages of one ordering key, or of one partition, share a number
//! ([`ordering_hash`](oncebox_model::ordering::ordering_hash)). A transaction that runs or settles
//! one of them holds their lock to its commit. The upper half of the number names the lock among
//! the locks of the consumer. The host functions `claim`, `resume` and `complete` describe the
//! protocol. Two keys that share a lock wait for each other, and have no other effect on each other.

use std::collections::HashMap;

use oncebox_model::{
    hooks::{self, Defect},
    outcome::Disposition,
};

use crate::batch::claim::{ClaimOutcome, ClaimRequest};

/// First failed message of each ordering key in one transaction: its index in the batch, by number.
/// It holds back claimed messages behind it.
#[derive(Debug, Default)]
pub(crate) struct BlockedKeys(HashMap<i64, usize>);

impl BlockedKeys {
    /// Blocks the key of a message whose result leaves it open, so that later messages of the key
    /// do not run.
    pub(crate) fn failed(
        &mut self,
        index: usize,
        request: &ClaimRequest,
        disposition: Disposition,
    ) {
        let Some(ordering) = request.ordering.filter(|_| disposition.is_open()) else { return };
        if hooks::sabotage(Defect::FailurePassedInBatch) {
            return;
        }
        self.0.entry(ordering).and_modify(|first| *first = index.min(*first)).or_insert(index);
    }

    /// Makes a new message wait where an earlier message of its key failed in this transaction.
    pub(crate) fn hold_back(&self, index: usize, request: &ClaimRequest, claim: &mut ClaimOutcome) {
        let failed = request.ordering.and_then(|ordering| self.0.get(&ordering));
        if *claim == ClaimOutcome::New && failed.is_some_and(|failed| *failed < index) {
            *claim = ClaimOutcome::Waiting { is_due: false };
        }
    }
}
