//! Who is next: the scheduler's state and its rules, without a clock, a lock or a task.

use std::{
    collections::{BTreeMap, HashMap},
    time::Duration,
};

use super::{
    Ask, Grant, HostBounds,
    meter::Usage,
    share::{Next, Share},
};
use crate::tenant::TenantLimits;

/// What the room for one more transaction depends on besides its tenant.
#[derive(Debug, Clone, Copy)]
pub(super) struct Room {
    /// Bytes of guests' memory that are left.
    pub(super) memory: u64,
    /// Nothing runs that has any: what asks for more than there is runs alone.
    pub(super) is_empty: bool,
}

/// What the last look found.
#[derive(Debug, Default)]
pub(super) struct Looked {
    /// Who may begin.
    pub(super) grants: Vec<Grant>,
    /// When somebody who waits for nothing but a rate may begin.
    pub(super) again_at: Option<Duration>,
}

/// The scheduler without its clock. Time is passed in, counted from any beginning.
#[derive(Debug)]
pub(super) struct State {
    host: HostBounds,
    shares: HashMap<i32, Share>,
    /// Tenants of which something runs or waits: a few of many.
    active: Vec<i32>,
    /// Where a tenant that had nothing to do goes on: the least of the clocks of those that wait for nothing
    /// but their turn. It never goes back, so a tenant that was idle, or held back by bounds of its own, saves
    /// no time up, and holds nobody else's clock.
    floor: f64,
    pub(super) running: usize,
    running_peak: usize,
    memory: u64,
    memory_peak: u64,
    /// Transactions that run in the part that is kept for tenants that run nothing.
    reserved: usize,
    granted: u64,
    waiting: usize,
    next_id: u64,
    /// Somebody waits for what another's transaction holds.
    crowded: bool,
}

impl State {
    pub(super) fn new(host: HostBounds) -> Self {
        Self {
            host,
            shares: HashMap::new(),
            active: Vec::new(),
            floor: 0.0,
            running: 0,
            running_peak: 0,
            memory: 0,
            memory_peak: 0,
            reserved: 0,
            granted: 0,
            waiting: 0,
            next_id: 0,
            crowded: false,
        }
    }

    /// What a tenant gets from now on. False: it had that before, or it has something newer.
    pub(super) fn set_limits(&mut self, tenant_id: i32, revision: i64, name: &str, limits: &TenantLimits, now: Duration) -> bool {
        self.share(tenant_id, now).set_limits(revision, name, limits, now)
    }

    /// What a consumer gets from now on.
    pub(super) fn set_caps(&mut self, tenant_id: i32, consumer_id: i32, transactions: Option<usize>, rate: Option<u32>, now: Duration) {
        self.share(tenant_id, now).set_caps(consumer_id, transactions, rate, now);
    }

    /// A tenant that is gone. False: something of it runs or waits.
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

    /// Begin to wait. The answer names the place in the queue.
    pub(super) fn ask(&mut self, ask: Ask, now: Duration) -> u64 {
        self.raise_floor(None);
        self.next_id += 1;
        let (id, floor, granted) = (self.next_id, self.floor, self.granted);
        let share = self.shares.entry(ask.tenant_id).or_insert_with(|| Share::new(now));
        let was_active = share.is_active();
        share.ask(id, ask, floor, granted, now);
        self.waiting += 1;
        if !was_active {
            self.active.push(ask.tenant_id);
        }
        id
    }

    /// Wait no longer.
    pub(super) fn cancel(&mut self, tenant_id: i32, id: u64) {
        if let Some(share) = self.shares.get_mut(&tenant_id) {
            self.waiting -= usize::from(share.cancel(id));
        }
        self.rest(tenant_id);
    }

    /// A tenant of which nothing runs or waits any more is passed over.
    fn rest(&mut self, tenant_id: i32) {
        if !self.shares.get(&tenant_id).is_some_and(Share::is_active) {
            self.active.retain(|active| *active != tenant_id);
        }
    }

    /// Tenants of which something runs or waits.
    fn active(&self) -> impl Iterator<Item = (i32, &Share)> {
        self.active.iter().filter_map(|id| Some((*id, self.shares.get(id)?)))
    }

    /// Let in whoever has room.
    pub(super) fn look(&mut self, now: Duration) -> Looked {
        let mut looked = Looked::default();
        while let Some((tenant_id, consumer_id)) = self.pick(now, &mut looked.again_at) {
            looked.grants.push(self.grant(tenant_id, consumer_id, now));
        }
        looked
    }

    /// A transaction for nobody's account but its tenant's spare time: never waited for, and only where
    /// nobody else waits for room.
    pub(super) fn ask_spare(&mut self, ask: Ask, now: Duration) -> Option<Grant> {
        if self.is_crowded(ask.tenant_id) || !self.is_free() {
            return None;
        }
        let room = self.room();
        let fits = self.share(ask.tenant_id, now).has_room(&ask, room);
        if !fits {
            return None;
        }
        let id = self.ask(ask, now);
        let granted = self.shares.get_mut(&ask.tenant_id).is_some_and(|share| share.move_to_front(id));
        granted.then(|| self.grant(ask.tenant_id, None, now))
    }

    /// Whether somebody waits for what this tenant's transactions hold.
    pub(super) fn is_crowded(&self, tenant_id: i32) -> bool {
        self.crowded || self.shares.get(&tenant_id).is_some_and(|share| share.waits() && share.is_crowded)
    }

    /// A transaction came to its end.
    pub(super) fn end(&mut self, grant: &Grant, usage: Usage, settled: u32, now: Duration) {
        self.running -= 1;
        self.memory -= grant.memory;
        self.reserved -= usize::from(grant.is_reserved);
        if let Some(share) = self.shares.get_mut(&grant.tenant_id) {
            share.pay(grant, usage, settled, now);
        }
        self.raise_floor(Some(grant.tenant_id));
        if let Some(share) = self.shares.get_mut(&grant.tenant_id) {
            share.leave(grant);
        }
        self.rest(grant.tenant_id);
    }

    /// `ended`: of whom a transaction ended; where nobody waits, the clock is that tenant's.
    fn raise_floor(&mut self, ended: Option<i32>) {
        let waiting = self.active().filter(|(_, share)| share.waits() && !share.is_held_back);
        let least = waiting.map(|(_, share)| share.paid()).reduce(f64::min);
        let least = least.or_else(|| Some(self.shares.get(&ended?)?.paid()));
        self.floor = least.map_or(self.floor, |least| self.floor.max(least));
    }

    fn room(&self) -> Room {
        Room { memory: self.host.memory_bytes_max.saturating_sub(self.memory), is_empty: self.memory == 0 }
    }

    /// Transactions that are kept for tenants that run nothing: a tenant with slow ones does not hold every
    /// place while another one's first message waits.
    fn reserve(&self) -> usize {
        self.host.transactions_max / 8
    }

    /// Whether there is room beside what is kept.
    fn is_free(&self) -> bool {
        self.host.transactions_max - self.running > self.reserve() - self.reserved
    }

    /// The tenant whose turn it is, with the consumer; none of it for what goes first.
    fn pick(&mut self, now: Duration, again_at: &mut Option<Duration>) -> Option<(i32, Option<i32>)> {
        *again_at = None;
        self.crowded = false;
        if self.waiting == 0 {
            return None;
        }
        if self.running >= self.host.transactions_max {
            self.crowded = true;
            return None;
        }
        let mut waiting: Vec<_> = self.active().filter(|(_, share)| share.waits()).map(|(id, share)| (share.order(), id)).collect();
        waiting.sort_by(|(one, _), (other, _)| one.partial_cmp(other).expect("clocks are numbers"));
        let mut room = self.room();
        let (free, floor) = (self.is_free(), self.floor);
        let front = if free { f64::INFINITY } else { self.active().map(|(_, share)| share.key()).fold(f64::INFINITY, f64::min) };
        for (_, tenant_id) in waiting {
            let share = self.shares.get_mut(&tenant_id)?;
            // What is kept is for whoever runs nothing, and only within its share.
            if !free && (share.runs() || share.key() > front) {
                self.crowded = true;
                continue;
            }
            let next = share.next(room, now);
            share.is_held_back = matches!(next, Next::Rate(_) | Next::Capped);
            match next {
                Next::Ready(consumer_id) => return Some((tenant_id, consumer_id)),
                Next::Rate(at) => {
                    share.catch_up(floor);
                    *again_at = Some(again_at.map_or(at, |known| known.min(at)));
                }
                Next::Capped => share.catch_up(floor),
                Next::Memory => {
                    // Whoever is behind takes no memory before it, or it might wait for ever.
                    self.crowded = true;
                    room = Room { memory: 0, is_empty: false };
                }
            }
        }
        None
    }

    fn grant(&mut self, tenant_id: i32, consumer_id: Option<i32>, now: Duration) -> Grant {
        let is_reserved = !self.is_free();
        let share = self.shares.get_mut(&tenant_id).expect("a tenant that was picked is there");
        let mut grant = share.grant(consumer_id, self.host.memory_bytes_max, self.granted, now);
        grant.is_reserved = is_reserved;
        self.granted += 1;
        self.waiting -= 1;
        self.running += 1;
        self.memory += grant.memory;
        self.reserved += usize::from(is_reserved);
        self.running_peak = self.running_peak.max(self.running);
        self.memory_peak = self.memory_peak.max(self.memory);
        grant
    }

    /// The longest wait of a tenant's transaction, in those that others began meanwhile.
    pub(super) fn overtaken_max(&self, tenant_id: i32) -> u64 {
        self.shares.get(&tenant_id).map_or(0, Share::overtaken_max)
    }

    /// Nothing runs, nothing waits, and no tenant is taken to do either.
    #[cfg(test)]
    pub(super) fn is_at_rest(&self) -> bool {
        let is_free = self.running == 0 && self.memory == 0 && self.reserved == 0 && self.waiting == 0 && self.active.is_empty();
        is_free && self.shares.values().all(|share| !share.is_active())
    }

    /// What was counted so far.
    pub(super) fn snapshot(&self) -> super::Snapshot {
        let tenants: BTreeMap<_, _> = self.shares.iter().map(|(id, share)| (*id, share.counted())).collect();
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
