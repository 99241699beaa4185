//! The scheduler's state and its rules for which transaction is next, without a clock, a lock or a
//! task.

use std::{
    collections::{BTreeMap, HashMap},
    sync::Arc,
    time::Duration,
};

use oncebox_model::{
    hooks::{self, Defect},
    meter::Usage,
    tenant_limits::TenantLimits,
};

use super::{AdmissionRequest, Grant, HostBounds, line::NextInLine, share::Share};

/// Room for one more transaction, apart from its tenant's own bounds.
#[derive(Debug, Clone, Copy)]
pub(super) struct Room {
    /// Bytes of guests' memory that are left.
    pub(super) memory: u64,
    /// True where no running transaction holds memory: a request above the limit then runs alone.
    pub(super) is_empty: bool,
}

/// Result of a look at the queues.
#[derive(Debug, Default)]
pub(super) struct Dispatched {
    /// Transactions that may begin.
    pub(super) grants: Vec<Grant>,
    /// Time of the next look. A transaction waits then for nothing but a rate, the end of a loan,
    /// or for slow ones to be apart.
    pub(super) again_at: Option<Duration>,
    /// Transactions that are to give back the kept places or the kept memory that they were lent.
    pub(super) called_back: Vec<u64>,
}

/// Least memory, bytes, that is worth keeping for tenants that run nothing. It is what a consumer's
/// policy allows an instance unless it says otherwise.
const KEPT_MEMORY_MIN: u64 = 64 << 20;

/// The tenant and consumer whose transaction begins next, and the part of the host in which it
/// does.
#[derive(Debug, Clone, Copy)]
pub(super) struct Picked {
    pub(super) tenant_id: i32,
    /// None for a transaction that goes first.
    pub(super) consumer_id: Option<i32>,
    /// True for a place that is kept for tenants that run nothing.
    pub(super) is_kept: bool,
    /// True for memory that is kept for them.
    pub(super) is_memory_kept: bool,
}

impl Picked {
    /// Makes a pick outside of what is kept.
    fn free(tenant_id: i32, consumer_id: Option<i32>) -> Self {
        Self { tenant_id, consumer_id, is_kept: false, is_memory_kept: false }
    }
}

/// The scheduler without its clock. Callers pass in the time, counted from any beginning.
#[derive(Debug)]
pub(super) struct State {
    pub(super) host: HostBounds,
    pub(super) shares: HashMap<i32, Share>,
    /// Tenants of which a transaction runs or waits: a few of many.
    pub(super) active: Vec<i32>,
    /// Clock at which a tenant that had nothing to do goes on: the least of the tenants that wait
    /// only for their turn. It never goes back. So a tenant that was idle, or held back by bounds
    /// of its own, saves no time up and delays no other tenant's clock.
    pub(super) global_virtual_time: f64,
    pub(super) running: usize,
    pub(super) running_peak: usize,
    pub(super) memory: u64,
    pub(super) memory_peak: u64,
    /// Transactions that run in the part that is kept for tenants that run nothing.
    pub(super) kept: usize,
    /// Those of them whose tenants were not known yet.
    pub(super) trials: usize,
    /// Bytes of guests' memory that are held in that part.
    pub(super) kept_memory: u64,
    pub(super) granted: u64,
    pub(super) waiting: usize,
    pub(super) next_id: u64,
    /// True where a transaction waits for what another tenant's transaction holds.
    pub(super) crowded: bool,
    /// True where a tenant that may have kept memory waits for it.
    pub(super) lacks_memory: bool,
    /// Time before which no transaction of a slow tenant begins.
    pub(super) slow_at: Duration,
}

impl State {
    pub(super) fn new(host: HostBounds) -> Self {
        Self {
            host,
            shares: HashMap::new(),
            active: Vec::new(),
            global_virtual_time: 0.0,
            running: 0,
            running_peak: 0,
            memory: 0,
            memory_peak: 0,
            kept: 0,
            trials: 0,
            kept_memory: 0,
            granted: 0,
            waiting: 0,
            next_id: 0,
            crowded: false,
            lacks_memory: false,
            slow_at: Duration::ZERO,
        }
    }

    /// Sets a tenant's name and limits. Returns false where it has them already, or newer ones.
    pub(super) fn set_limits(
        &mut self,
        tenant_id: i32,
        revision: i64,
        name: &str,
        limits: &TenantLimits,
        now: Duration,
    ) -> bool {
        self.share(tenant_id, now).set_limits(revision, name, limits, now)
    }

    /// Sets a consumer's caps on transactions and on messages a second.
    pub(super) fn set_caps(
        &mut self,
        tenant_id: i32,
        consumer_id: i32,
        transactions: Option<usize>,
        rate: Option<u32>,
        now: Duration,
    ) {
        self.share(tenant_id, now).set_caps(consumer_id, transactions, rate, now);
    }

    /// Forgets a tenant that is gone. Returns false, and keeps it, where a transaction of it runs
    /// or waits.
    pub(super) fn forget(&mut self, tenant_id: i32) -> bool {
        let is_active = self.shares.get(&tenant_id).is_some_and(Share::is_active);
        if !is_active {
            self.shares.remove(&tenant_id);
        }
        !is_active
    }

    fn share(&mut self, tenant_id: i32, now: Duration) -> &mut Share {
        self.shares.entry(tenant_id).or_insert_with(|| Share::new(now))
    }

    /// Puts a transaction into the queue. Returns its place there.
    pub(super) fn ask(&mut self, ask: AdmissionRequest, now: Duration) -> u64 {
        self.raise_global_virtual_time(None);
        self.next_id += 1;
        let (id, global_virtual_time, granted) =
            (self.next_id, self.global_virtual_time, self.granted);
        let share = self.shares.entry(ask.tenant_id).or_insert_with(|| Share::new(now));
        let was_active = share.is_active();
        share.ask(id, ask, global_virtual_time, granted, now);
        self.waiting += 1;
        if !was_active {
            self.active.push(ask.tenant_id);
        }
        id
    }

    /// Removes a transaction from the queue.
    pub(super) fn cancel(&mut self, tenant_id: i32, id: u64) {
        if let Some(share) = self.shares.get_mut(&tenant_id) {
            self.waiting -= usize::from(share.cancel(id));
        }
        self.rest(tenant_id);
    }

    /// Removes a tenant from the active ones, where none of its transactions runs or waits.
    fn rest(&mut self, tenant_id: i32) {
        if !self.shares.get(&tenant_id).is_some_and(Share::is_active) {
            self.active.retain(|active| *active != tenant_id);
        }
    }

    /// Returns the tenants of which a transaction runs or waits.
    fn active(&self) -> impl Iterator<Item = (i32, &Share)> {
        self.active.iter().filter_map(|id| Some((*id, self.shares.get(id)?)))
    }

    /// Grants every transaction that has room, and calls back loans that are wanted.
    pub(super) fn dispatch(&mut self, now: Duration) -> Dispatched {
        let mut dispatched = Dispatched::default();
        while let Some(picked) = self.pick(now, &mut dispatched.again_at) {
            dispatched.grants.push(self.grant(picked, now));
        }
        self.call_back(now, &mut dispatched);
        dispatched
    }

    /// Grants a transaction that uses spare room. It never waits, and begins only where no other
    /// transaction waits for room.
    pub(super) fn ask_spare(&mut self, ask: AdmissionRequest, now: Duration) -> Option<Grant> {
        if self.is_crowded(ask.tenant_id) || !self.is_free() {
            return None;
        }
        let (room, default_max) = (self.room(), self.default_max());
        let fits = self.share(ask.tenant_id, now).has_room(&ask, room, default_max);
        if !fits {
            return None;
        }
        let id = self.ask(ask, now);
        let granted =
            self.shares.get_mut(&ask.tenant_id).is_some_and(|share| share.move_to_front(id));
        granted.then(|| self.grant(Picked::free(ask.tenant_id, None), now))
    }

    /// Returns whether a transaction waits for what this tenant's transactions hold.
    pub(super) fn is_crowded(&self, tenant_id: i32) -> bool {
        self.crowded
            || self.shares.get(&tenant_id).is_some_and(|share| share.waits() && share.is_crowded)
    }

    /// Ends a transaction: charges its cost and releases its place and memory.
    pub(super) fn end(&mut self, grant: &Grant, usage: Usage, settled: u32, now: Duration) {
        self.running -= 1;
        self.memory -= grant.memory;
        self.kept -= usize::from(grant.is_kept);
        self.trials -= usize::from(grant.is_trial);
        self.kept_memory -= if grant.is_memory_kept { grant.memory } else { 0 };
        if let Some(share) = self.shares.get_mut(&grant.tenant_id) {
            share.pay(grant, usage, settled, now);
        }
        self.raise_global_virtual_time(Some(grant.tenant_id));
        if let Some(share) = self.shares.get_mut(&grant.tenant_id) {
            share.leave(grant);
        }
        self.rest(grant.tenant_id);
    }

    /// Raises the global virtual time to the least clock of the tenants that wait only for their
    /// turn. Where none waits, the clock is that of `ended`, the tenant whose transaction ended.
    fn raise_global_virtual_time(&mut self, ended: Option<i32>) {
        let waiting = self.active().filter(|(_, share)| share.waits() && !share.is_held_back);
        let least = waiting.map(|(_, share)| share.virtual_time()).reduce(f64::min);
        let least = least.or_else(|| Some(self.shares.get(&ended?)?.virtual_time()));
        self.global_virtual_time =
            least.map_or(self.global_virtual_time, |least| self.global_virtual_time.max(least));
    }

    /// Returns the memory that is left outside of what is kept.
    pub(super) fn room(&self) -> Room {
        let (all, held) =
            (self.host.memory_bytes_max - self.memory_reserve(), self.memory - self.kept_memory);
        Room { memory: all.saturating_sub(held), is_empty: held == 0 }
    }

    /// Returns the memory that is left of what is kept.
    pub(super) fn kept_room(&self) -> Room {
        Room { memory: self.memory_reserve() - self.kept_memory, is_empty: false }
    }

    /// Returns the number of places that are kept for tenants that run nothing. With them, a tenant
    /// with slow transactions does not hold every place while another one's first message waits.
    pub(super) fn reserve(&self) -> usize {
        self.host.transactions_max / 8
    }

    /// Returns the number of kept places that tenants without a history may have. The others are
    /// left to tenants that are known to give them back soon.
    pub(super) fn trials_max(&self) -> usize {
        if hooks::sabotage(Defect::ReserveForNewcomers) {
            return self.reserve();
        }
        self.reserve().div_ceil(2)
    }

    /// Returns the bytes of guests' memory that are kept for tenants that run nothing.
    fn memory_reserve(&self) -> u64 {
        let eighth = self.host.memory_bytes_max / 8;
        if self.reserve() > 0 && eighth >= KEPT_MEMORY_MIN { eighth } else { 0 }
    }

    /// Returns whether a place is free outside of those that are kept.
    pub(super) fn is_free(&self) -> bool {
        self.running - self.kept < self.host.transactions_max - self.reserve()
    }

    /// Returns the most transactions of a tenant at once, where its own limits say nothing. A
    /// tenant that is alone on the host may have all places.
    pub(super) fn default_max(&self) -> Option<usize> {
        self.host.tenant_transactions_max.filter(|_| self.shares.len() > 1)
    }

    /// Returns the destinations that a tenant's handlers may send to; empty for none.
    pub(super) fn destinations_allowed(&self, tenant_id: i32) -> Arc<[String]> {
        let share = self.shares.get(&tenant_id);
        share.map(|share| share.destinations_allowed.clone()).unwrap_or_default()
    }

    /// Returns the longest call of a tenant's handlers.
    pub(super) fn deadline_max(&self, tenant_id: i32) -> Option<Duration> {
        let own = self.shares.get(&tenant_id).and_then(Share::deadline_max);
        [own, self.host.deadline_max].into_iter().flatten().min()
    }

    /// Counts transactions of a tenant that were told to stop.
    pub(super) fn count_stopped(&mut self, tenant_id: i32, transactions: u64) {
        if let Some(share) = self.shares.get_mut(&tenant_id) {
            share.count_stopped(transactions);
        }
    }

    /// Picks the tenant whose turn it is, with its consumer; none for a transaction that goes
    /// first.
    fn pick(&mut self, now: Duration, again_at: &mut Option<Duration>) -> Option<Picked> {
        *again_at = None;
        self.crowded = false;
        self.lacks_memory = false;
        if self.waiting == 0 {
            return None;
        }
        let mut waiting: Vec<_> = self
            .active()
            .filter(|(_, share)| share.waits())
            .map(|(id, share)| (share.order(now), id))
            .collect();
        waiting.sort_by(|(one, _), (other, _)| one.partial_cmp(other).expect("clocks are numbers"));
        let (mut room, kept_room, default_max) =
            (self.room(), self.kept_room(), self.default_max());
        let (is_free, global_virtual_time, slow_at) =
            (self.is_free(), self.global_virtual_time, self.slow_at);
        let (is_kept_left, is_trial_left) =
            (self.kept < self.reserve(), self.trials < self.trials_max());
        // While half of the kept places are left, a tenant gets one for a second transaction.
        // Otherwise its partitions would wait for each other while every other place is held for
        // long.
        let is_half_left = self.kept < self.reserve() / 2;
        for (_, tenant_id) in waiting {
            let share = self.shares.get_mut(&tenant_id)?;
            // Kept places are for tenants that run nothing and are not known to be slow, whatever
            // the clocks say.
            let is_quick = !share.is_slow(now);
            let may_have_kept = !share.runs() && is_quick;
            let may_have_second = share.runs_one() && is_quick && is_half_left;
            let is_kept = !is_free;
            if is_kept
                && !((may_have_kept || may_have_second)
                    && is_kept_left
                    && (is_trial_left || !share.is_new()))
            {
                self.crowded = true;
                if hooks::sabotage(Defect::KeptPlacesByClock) {
                    break;
                }
                continue;
            }
            let mut is_memory_kept = false;
            let mut next = share.next(room, default_max, now);
            if next == NextInLine::Memory && may_have_kept {
                next = share.next(kept_room, default_max, now);
                is_memory_kept = true;
            }
            share.is_held_back = matches!(next, NextInLine::Rate(_) | NextInLine::Capped);
            match next {
                NextInLine::Ready(Some(_)) if now < slow_at && share.is_slow(now) => {
                    *again_at = Some(again_at.map_or(slow_at, |known| known.min(slow_at)));
                }
                NextInLine::Ready(consumer_id) => {
                    return Some(Picked { tenant_id, consumer_id, is_kept, is_memory_kept });
                }
                NextInLine::Rate(at) => {
                    share.join(global_virtual_time);
                    *again_at = Some(again_at.map_or(at, |known| known.min(at)));
                }
                NextInLine::Capped => share.join(global_virtual_time),
                NextInLine::Memory => {
                    // A tenant behind it takes no memory before it, or it might wait for ever.
                    self.crowded = true;
                    self.lacks_memory |= may_have_kept;
                    room = Room { memory: 0, is_empty: false };
                }
            }
        }
        None
    }

    fn grant(&mut self, picked: Picked, now: Duration) -> Grant {
        let Picked { tenant_id, consumer_id, is_kept, is_memory_kept } = picked;
        let memory_max = self.host.memory_bytes_max - self.memory_reserve();
        let share = self.shares.get_mut(&tenant_id).expect("a tenant that was picked is there");
        if consumer_id.is_some()
            && share.is_slow(now)
            && !hooks::sabotage(Defect::SlowOnesBeginTogether)
        {
            self.slow_at = now + share.apart(self.host.transactions_max);
        }
        let grant = share.grant(picked, memory_max, self.granted, now);
        self.granted += 1;
        self.waiting -= 1;
        self.running += 1;
        self.memory += grant.memory;
        self.kept += usize::from(is_kept);
        self.trials += usize::from(grant.is_trial);
        self.kept_memory += if is_memory_kept { grant.memory } else { 0 };
        self.running_peak = self.running_peak.max(self.running);
        self.memory_peak = self.memory_peak.max(self.memory);
        grant
    }

    /// Returns the longest wait of a tenant's transaction, in transactions that other tenants began
    /// in that time.
    pub(super) fn overtaken_max(&self, tenant_id: i32) -> u64 {
        self.shares.get(&tenant_id).map_or(0, Share::overtaken_max)
    }

    /// Returns whether nothing runs, nothing waits, and no tenant is listed as doing either.
    #[cfg(test)]
    pub(super) fn is_at_rest(&self) -> bool {
        let is_free = self.running == 0
            && self.memory == 0
            && self.kept == 0
            && self.trials == 0
            && self.kept_memory == 0
            && self.waiting == 0
            && self.active.is_empty();
        is_free && self.shares.values().all(|share| !share.is_active())
    }

    /// Returns the counts so far.
    pub(super) fn snapshot(&self) -> super::Snapshot {
        let tenants: BTreeMap<_, _> =
            self.shares.iter().map(|(id, share)| (*id, share.counted())).collect();
        super::Snapshot {
            granted: self.granted,
            running: self.running,
            running_peak: self.running_peak,
            memory_bytes: self.memory,
            memory_bytes_peak: self.memory_peak,
            waiting: self.waiting,
            tenants,
        }
    }
}
