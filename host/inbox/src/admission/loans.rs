//! Kept places and kept memory: lent for a time, called back when a tenant that runs nothing waits,
//! and never lent to slow tenants.

use std::time::Duration;

use oncebox_model::hooks::{self, Defect};

use super::{
    line::NextInLine,
    share::Share,
    state::{Dispatched, Room, State},
};

/// Average time of holding a place above which a tenant is slow. It gets none of the places that
/// are kept for others' short transactions.
const SLOW: Duration = Duration::from_millis(500);
/// Time for which a kept place is lent. A transaction that still holds it then gives it back when
/// another tenant waits for it.
pub(super) const LOAN: Duration = Duration::from_secs(1);
/// Time for which a tenant is lent no kept place after one had to be called back.
pub(super) const DISTRUST: Duration = Duration::from_secs(60);
/// Largest distance at which transactions of slow tenants begin.
const APART_MAX: Duration = Duration::from_millis(100);

impl Share {
    /// Returns whether its transactions hold their places for long: lately, or one of them at
    /// `now`.
    pub(super) fn is_slow(&self, now: Duration) -> bool {
        now < self.distrusted_until
            || self.held_ns > SLOW.as_nanos() as f64
            || self.running.iter().any(|running| running.held(now) > LOAN)
    }

    /// Returns how much later than its last transaction the next one of a slow tenant begins, on a
    /// host with this many places. All places are taken within half of the time for which such
    /// transactions hold them.
    pub(super) fn apart(&self, places: usize) -> Duration {
        (self.held_last / 2 / u32::try_from(places).unwrap_or(u32::MAX)).min(APART_MAX)
    }

    /// Returns when the longest of its loans ends; of all loans, or of trials alone.
    pub(super) fn loan_ends(&self, trials_alone: bool) -> Option<Duration> {
        self.running
            .iter()
            .filter(|running| running.is_loan(trials_alone))
            .map(|running| running.since + LOAN)
            .min()
    }

    /// Returns the number of loans that were called back and that it still has.
    pub(super) fn called_back(&self) -> usize {
        self.running.iter().filter(|running| running.is_called_back).count()
    }

    /// Calls back its longest loan, of all or of trials alone, and returns its transaction. From
    /// then on the tenant counts as slow.
    pub(super) fn call_back(&mut self, trials_alone: bool, now: Duration) -> Option<u64> {
        let lent = self.running.iter_mut().filter(|running| running.is_loan(trials_alone));
        let longest = lent.min_by_key(|running| running.since)?;
        longest.is_called_back = true;
        self.distrusted_until = now + DISTRUST;
        self.held_ns = self.held_ns.max(LOAN.as_nanos() as f64);
        self.counts.stopped += 1;
        Some(longest.id)
    }

    /// Counts transactions that were told to stop because their consumer is to stop.
    pub(super) fn count_stopped(&mut self, transactions: u64) {
        self.counts.stopped += transactions;
    }
}

impl State {
    /// Calls back loans for tenants that run nothing and wait for a kept place, or for kept memory,
    /// of which none is left. It calls back as many as those tenants need, of loans that last for
    /// longer than is allowed.
    pub(super) fn call_back(&mut self, now: Duration, dispatched: &mut Dispatched) {
        let (is_place_left, is_trial_left) =
            (self.kept < self.reserve(), self.trials < self.trials_max());
        let is_left = is_place_left && is_trial_left && !self.lacks_memory;
        if self.waiting == 0 || is_left || hooks::sabotage(Defect::LoansNeverEnd) {
            return;
        }
        let (kept_room, default_max) = (self.kept_room(), self.default_max());
        let any = Room { memory: u64::MAX, is_empty: true };
        let mut wanted = 0;
        let mut given_back = 0;
        for tenant_id in &self.active {
            let Some(share) = self.shares.get_mut(tenant_id) else { continue };
            given_back += share.called_back();
            if !share.waits() || share.runs() || share.is_slow(now) {
                continue;
            }
            let lacks_place = !is_place_left || share.is_new() && !is_trial_left;
            let lacks_memory =
                self.lacks_memory && share.next(kept_room, default_max, now) == NextInLine::Memory;
            wanted += usize::from(
                (lacks_place || lacks_memory)
                    && matches!(share.next(any, default_max, now), NextInLine::Ready(_)),
            );
        }
        // Where places are left, one that a known tenant gives back is of no use to a new tenant.
        let trials_alone = is_place_left && !self.lacks_memory;
        while given_back < wanted {
            let loans = self
                .active
                .iter()
                .filter_map(|id| Some((self.shares.get(id)?.loan_ends(trials_alone)?, *id)));
            let Some((ends_at, tenant_id)) = loans.min() else { return };
            if ends_at > now {
                dispatched.again_at =
                    Some(dispatched.again_at.map_or(ends_at, |known| known.min(ends_at)));
                return;
            }
            dispatched.called_back.extend(
                self.shares
                    .get_mut(&tenant_id)
                    .and_then(|share| share.call_back(trials_alone, now)),
            );
            given_back += 1;
        }
    }
}
