//! One tenant's part of a host: its limits, what it had, and its queue of consumers.

use std::{
    collections::{BTreeMap, VecDeque},
    sync::Arc,
    time::Duration,
};

use oncebox_model::{
    hooks::{self, Defect},
    meter::{CpuSlots, Usage},
    tenant_limits::TenantLimits,
};

use super::{
    AdmissionRequest, Class, Grant, TenantCounts,
    bucket::Bucket,
    line::{Line, NextInLine, Running, Waiting},
    state::{Picked, Room},
};

/// Cost that a tenant's transactions are assumed to have before one of them has ended, nanoseconds.
const FIRST_COST_NS: f64 = 1e6;
/// Least cost of a transaction, nanoseconds. Without it, transactions that cost nothing could go
/// before another tenant's for ever.
const COST_MIN_NS: f64 = 20e3;
/// Transactions over which the cost, and the time that places are held, are averaged.
const AVERAGED: f64 = 8.0;
#[derive(Debug)]
pub(super) struct Share {
    pub(super) limits: TenantLimits,
    /// The destinations of these limits, as runs share them; empty for none.
    pub(super) destinations_allowed: Arc<[String]>,
    /// The tenant's revision that has these limits.
    pub(super) revision: i64,
    /// The tenant's own clock: cost over weight of its transactions that have ended.
    pub(super) virtual_time: f64,
    /// Average cost of its transactions lately, nanoseconds.
    pub(super) average_ns: f64,
    /// Average time for which they held their places lately, nanoseconds.
    pub(super) held_ns: f64,
    /// Time for which the last one held its place.
    pub(super) held_last: Duration,
    /// Time until which it is lent no kept place.
    pub(super) distrusted_until: Duration,
    /// Number of transactions with messages that have ended.
    pub(super) ended: u64,
    pub(super) running: Vec<Running>,
    pub(super) memory: u64,
    /// Short transactions of the host itself, which go before the tenant's others.
    pub(super) first: VecDeque<Waiting>,
    pub(super) lines: BTreeMap<i32, Line>,
    /// Consumers that wait, in the order of their turns.
    pub(super) turns: VecDeque<i32>,
    pub(super) bucket: Bucket,
    pub(super) counts: TenantCounts,
    pub(super) cpu_turns: CpuSlots,
    /// True where a transaction of the tenant waits for what another of its transactions holds.
    pub(super) is_crowded: bool,
    /// True where it waits for bounds of its own, and not for its turn.
    pub(super) is_held_back: bool,
}

impl Share {
    pub(super) fn new(now: Duration) -> Self {
        Self {
            limits: TenantLimits::default(),
            destinations_allowed: Arc::default(),
            revision: 0,
            virtual_time: 0.0,
            average_ns: FIRST_COST_NS,
            held_ns: 0.0,
            held_last: Duration::ZERO,
            distrusted_until: Duration::ZERO,
            ended: 0,
            running: Vec::new(),
            memory: 0,
            first: VecDeque::new(),
            lines: BTreeMap::new(),
            turns: VecDeque::new(),
            bucket: Bucket::new(None, now),
            counts: TenantCounts::default(),
            cpu_turns: CpuSlots::default(),
            is_crowded: false,
            is_held_back: false,
        }
    }

    pub(super) fn set_limits(
        &mut self,
        revision: i64,
        name: &str,
        limits: &TenantLimits,
        now: Duration,
    ) -> bool {
        if revision < self.revision {
            return false;
        }
        self.revision = revision;
        if self.limits == *limits && self.counts.name == name {
            return false;
        }
        self.counts.name = name.to_owned();
        self.bucket.set(limits.messages_per_second, now);
        self.destinations_allowed = limits.destinations_allowed().into();
        self.limits = limits.clone();
        true
    }

    pub(super) fn set_caps(
        &mut self,
        consumer_id: i32,
        transactions_max: Option<usize>,
        rate: Option<u32>,
        now: Duration,
    ) {
        let line = self.line(consumer_id, now);
        line.transactions_max = transactions_max;
        line.bucket.set(rate, now);
    }

    fn line(&mut self, consumer_id: i32, now: Duration) -> &mut Line {
        let new = || Line {
            transactions_max: None,
            running: 0,
            waiting: VecDeque::new(),
            bucket: Bucket::new(None, now),
        };
        self.lines.entry(consumer_id).or_insert_with(new)
    }

    fn weight(&self) -> f64 {
        f64::from(self.limits.weight.max(1))
    }

    /// Returns the most transactions that run at once; each has one connection. `default_max` holds
    /// where the tenant's limits say nothing.
    fn transactions_max(&self, default_max: Option<usize>) -> usize {
        let or_all = |max: Option<usize>| max.map_or(usize::MAX, |max| max.max(1));
        or_all(self.limits.transactions_max.or(default_max))
            .min(or_all(self.limits.connections_max))
    }

    /// Returns the longest call of a handler, where the tenant's limits have one.
    pub(super) fn deadline_max(&self) -> Option<Duration> {
        self.limits.deadline_ms_max.map(Duration::from_millis)
    }

    fn memory_max(&self) -> u64 {
        self.limits.memory_bytes_max.unwrap_or(u64::MAX)
    }

    pub(super) fn waits(&self) -> bool {
        !self.turns.is_empty() || !self.first.is_empty()
    }

    pub(super) fn runs(&self) -> bool {
        !self.running.is_empty()
    }

    pub(super) fn runs_one(&self) -> bool {
        self.running.len() == 1
    }

    /// Returns whether nothing is known of how long its transactions take.
    pub(super) fn is_new(&self) -> bool {
        self.ended == 0
    }

    pub(super) fn is_active(&self) -> bool {
        self.runs() || self.waits()
    }

    /// Returns its clock: the tenant with the least goes first. A running transaction is charged
    /// for as long as it has held its place, and at least what the tenant's transactions cost
    /// lately.
    pub(super) fn key(&self, now: Duration) -> f64 {
        let until = if hooks::sabotage(Defect::RunningUncharged) { Duration::ZERO } else { now };
        let charged = self
            .running
            .iter()
            .map(|running| running.cost_ns.max(running.held(until).as_nanos() as f64));
        self.virtual_time + charged.sum::<f64>() / self.weight()
    }

    /// Returns its clock without the transactions that run.
    pub(super) fn virtual_time(&self) -> f64 {
        self.virtual_time
    }

    /// Moves its clock forward to `global_virtual_time`. Time that it could have used and did not,
    /// or in which its own bounds held it back, earns no credit.
    pub(super) fn join(&mut self, global_virtual_time: f64) {
        self.virtual_time = self.virtual_time.max(global_virtual_time);
    }

    /// Returns its rank among the tenants: its clock, then the number of its transactions that run
    /// or wait.
    pub(super) fn order(&self, now: Duration) -> (f64, usize) {
        (self.key(now), self.running.len() + self.counts.waiting)
    }

    pub(super) fn ask(
        &mut self,
        id: u64,
        ask: AdmissionRequest,
        global_virtual_time: f64,
        granted: u64,
        now: Duration,
    ) {
        if !self.waits() {
            self.join(global_virtual_time);
        }
        let waiting = Waiting { id, ask, others: granted - self.counts.granted };
        self.counts.waiting += 1;
        if ask.class == Class::First {
            return self.first.push_back(waiting);
        }
        let line = self.line(ask.consumer_id, now);
        line.waiting.push_back(waiting);
        if line.waiting.len() == 1 {
            self.turns.push_back(ask.consumer_id);
        }
    }

    /// Removes a transaction from the queue. Returns whether it waited.
    pub(super) fn cancel(&mut self, id: u64) -> bool {
        let before = self.counts.waiting;
        let mut take = |queue: &mut VecDeque<Waiting>| {
            if let Some(place) = queue.iter().position(|waiting| waiting.id == id) {
                queue.remove(place);
                self.counts.waiting -= 1;
            }
        };
        take(&mut self.first);
        self.lines.values_mut().for_each(|line| take(&mut line.waiting));
        if self.counts.waiting < before {
            let lines = &self.lines;
            self.turns.retain(|consumer_id| {
                lines.get(consumer_id).is_some_and(|line| !line.waiting.is_empty())
            });
        }
        self.counts.waiting < before
    }

    /// Moves a transaction that just asked before all others. Returns false where it does not wait.
    pub(super) fn move_to_front(&mut self, id: u64) -> bool {
        let Some((consumer_id, waiting)) = self.lines.iter_mut().find_map(|(consumer_id, line)| {
            let place = line.waiting.iter().position(|waiting| waiting.id == id)?;
            Some((*consumer_id, line.waiting.remove(place)?))
        }) else {
            return false;
        };
        if self.lines.get(&consumer_id).is_some_and(|line| line.waiting.is_empty()) {
            self.turns.retain(|turn| *turn != consumer_id);
        }
        self.first.push_front(waiting);
        true
    }

    /// Returns whether a transaction could begin at once, apart from rates.
    pub(super) fn has_room(
        &self,
        ask: &AdmissionRequest,
        room: Room,
        default_max: Option<usize>,
    ) -> bool {
        let is_full = self.lines.get(&ask.consumer_id).is_some_and(Line::is_full);
        !is_full
            && self.running.len() < self.transactions_max(default_max)
            && fits(ask.memory, room)
            && fits(ask.memory, self.own_room())
    }

    fn own_room(&self) -> Room {
        Room { memory: self.memory_max().saturating_sub(self.memory), is_empty: self.memory == 0 }
    }

    /// Returns which transaction may begin next. A consumer that may not begin one keeps its turn,
    /// and others go before it.
    pub(super) fn next(
        &mut self,
        room: Room,
        default_max: Option<usize>,
        now: Duration,
    ) -> NextInLine {
        self.is_crowded = false;
        if self.running.len() >= self.transactions_max(default_max) {
            self.is_crowded = true;
            return NextInLine::Capped;
        }
        if !self.first.is_empty() {
            return NextInLine::Ready(None);
        }
        let (allowed, next_at) = (self.bucket.allowed(now), self.bucket.next_at());
        let mut own = self.own_room();
        let (mut again_at, mut is_short) = (None::<Duration>, false);
        let mut later = |at: Duration| again_at = Some(again_at.map_or(at, |known| known.min(at)));
        for consumer_id in &self.turns {
            let Some(line) = self.lines.get_mut(consumer_id) else { continue };
            let Some(Waiting { ask, .. }) = line.waiting.front() else { continue };
            if line.is_full() {
                self.is_crowded = true;
                continue;
            }
            if ask.messages > 0 && allowed == 0 {
                later(next_at);
            } else if ask.messages > 0 && line.bucket.allowed(now) == 0 {
                later(line.bucket.next_at());
            } else if !fits(ask.memory, own) {
                self.is_crowded = true;
                own = Room { memory: 0, is_empty: false };
            } else if !fits(ask.memory, room) {
                is_short = true;
                own = Room { memory: 0, is_empty: false };
            } else {
                return NextInLine::Ready(Some(*consumer_id));
            }
        }
        match again_at {
            _ if is_short => NextInLine::Memory,
            Some(at) => NextInLine::Rate(at),
            None => NextInLine::Capped,
        }
    }

    /// Grants a consumer's next transaction, in a place and with memory that are kept or not.
    /// `granted` is the number of transactions of all tenants so far.
    pub(super) fn grant(
        &mut self,
        picked: Picked,
        memory_max: u64,
        granted: u64,
        now: Duration,
    ) -> Grant {
        let Picked { consumer_id, is_kept, is_memory_kept, .. } = picked;
        let is_trial = is_kept && self.is_new();
        let waiting = match consumer_id {
            None => self.first.pop_front(),
            Some(consumer_id) => self.take_turn(consumer_id),
        };
        let Waiting { id, ask, others } = waiting.expect("whoever was picked waits");
        let line = self.line(ask.consumer_id, now);
        line.running += 1;
        let messages = ask.messages.min(line.bucket.allowed(now));
        line.bucket.take(messages);
        let messages = match messages.min(self.bucket.allowed(now)) {
            fewer if fewer < messages => {
                self.line(ask.consumer_id, now).bucket.put_back(messages - fewer);
                fewer
            }
            all => all,
        };
        self.bucket.take(messages);
        let memory = ask.memory.min(memory_max);
        let is_lent = is_kept || is_memory_kept;
        self.running.push(Running {
            id,
            since: now,
            cost_ns: self.average_ns,
            is_lent,
            is_trial,
            is_called_back: false,
        });
        self.memory += memory;
        let overtaken = granted - self.counts.granted - others;
        let counts = &mut self.counts;
        counts.waiting -= 1;
        counts.granted += 1;
        counts.running_peak = counts.running_peak.max(self.running.len());
        counts.memory_bytes_peak = counts.memory_bytes_peak.max(self.memory);
        counts.overtaken_max = counts.overtaken_max.max(overtaken);
        Grant {
            id,
            tenant_id: ask.tenant_id,
            consumer_id: ask.consumer_id,
            messages,
            memory,
            overtaken,
            is_kept,
            is_memory_kept,
            is_trial,
            turns: self.cpu_turns.clone(),
        }
    }

    /// Takes the front of a consumer's queue. Where more of it waits, the consumer's next turn is
    /// the last.
    fn take_turn(&mut self, consumer_id: i32) -> Option<Waiting> {
        let line = self.lines.get_mut(&consumer_id)?;
        let waiting = line.waiting.pop_front();
        let more = !line.waiting.is_empty();
        self.turns.retain(|turn| *turn != consumer_id);
        if more {
            self.turns.push_back(consumer_id);
        }
        waiting
    }

    /// Charges the real cost of a transaction, which replaces its assumed cost once it leaves. Puts
    /// back what its rates granted beyond `settled`.
    pub(super) fn pay(&mut self, grant: &Grant, usage: Usage, settled: u32, now: Duration) {
        let cost = usage.cost_ns().max(COST_MIN_NS);
        self.virtual_time += cost / self.weight();
        self.average_ns += (cost - self.average_ns) / AVERAGED;
        if grant.messages > 0
            && let Some(running) = self.running.iter().find(|running| running.id == grant.id)
        {
            self.ended += 1;
            self.held_last = running.held(now);
            self.held_ns += (self.held_last.as_nanos() as f64 - self.held_ns) / AVERAGED;
        }
        let unused = grant.messages.saturating_sub(settled);
        self.bucket.put_back(unused);
        self.line(grant.consumer_id, now).bucket.put_back(unused);
        self.counts.messages += u64::from(settled);
        self.counts.cpu += usage.cpu;
        self.counts.database += usage.database;
    }

    /// Releases the place and the memory of a transaction.
    pub(super) fn leave(&mut self, grant: &Grant) {
        self.running.retain(|running| running.id != grant.id);
        self.memory -= grant.memory;
        if let Some(line) = self.lines.get_mut(&grant.consumer_id) {
            line.running -= 1;
        }
    }

    pub(super) fn overtaken_max(&self) -> u64 {
        self.counts.overtaken_max
    }

    pub(super) fn counted(&self) -> TenantCounts {
        TenantCounts {
            running: self.running.len(),
            memory_bytes: self.memory,
            weight: self.limits.weight,
            ..self.counts.clone()
        }
    }
}

/// Returns whether there is room for this memory. A transaction that is larger than any room runs
/// where no other one has memory.
fn fits(memory: u64, room: Room) -> bool {
    memory == 0 || memory <= room.memory || room.is_empty
}
