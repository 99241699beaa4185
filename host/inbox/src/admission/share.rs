//! One tenant's part of a host: what it may have, what it had, and who of its consumers waits.

use std::{
    collections::{BTreeMap, VecDeque},
    time::Duration,
};

use oncebox_model::{
    hooks,
    meter::{TenantTurns, Usage},
    tenant_limits::TenantLimits,
};

use super::{
    Ask, Class, Grant, TenantCounts,
    bucket::Bucket,
    state::{Picked, Room},
};

/// What a tenant's transactions are taken to cost before one of them has ended.
const FIRST_COST_NS: f64 = 1e6;
/// The least that a transaction costs, so that even free ones cannot go on for ever before
/// another's.
const COST_MIN_NS: f64 = 20e3;
/// Transactions over which the cost, and the time that places are held, are averaged.
const AVERAGED: f64 = 8.0;
/// A tenant whose transactions hold their places for longer than this, on average, gets none that
/// is kept for others' short ones.
const SLOW: Duration = Duration::from_millis(500);
/// How long a place that is kept is lent. Whoever still holds it then gives it back when another
/// tenant waits for it.
pub(super) const LOAN: Duration = Duration::from_secs(1);
/// How long a tenant is lent no kept place after it had to be told to give one back.
pub(super) const DISTRUST: Duration = Duration::from_secs(60);
/// The most by which transactions of slow tenants begin apart.
const APART_MAX: Duration = Duration::from_millis(100);

/// Why a tenant's next transaction may begin, or not.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Next {
    /// It may: of this consumer, or what goes first.
    Ready(Option<i32>),
    /// A rate allows it then.
    Rate(Duration),
    /// A cap of the tenant or of its consumers is reached.
    Capped,
    /// The host has not enough memory left.
    Memory,
}

/// Somebody in the queue.
#[derive(Debug)]
struct Waiting {
    id: u64,
    ask: Ask,
    /// Transactions that others had been granted when it came.
    others: u64,
}

/// A consumer's queue and caps.
#[derive(Debug)]
struct Line {
    transactions_max: Option<usize>,
    running: usize,
    waiting: VecDeque<Waiting>,
    bucket: Bucket,
}

impl Line {
    fn is_full(&self) -> bool {
        self.transactions_max.is_some_and(|max| self.running >= max.max(1))
    }
}

/// A transaction that runs.
#[derive(Debug)]
pub(super) struct Running {
    pub(super) id: u64,
    /// When it was let in.
    since: Duration,
    /// What it is charged at least, nanoseconds.
    cost_ns: f64,
    /// It holds a place, or memory, that is kept for tenants that run nothing.
    is_lent: bool,
    /// Nothing was known of its tenant when it was lent its place.
    is_trial: bool,
    /// It was told to stop.
    is_called_back: bool,
}

impl Running {
    fn held(&self, now: Duration) -> Duration {
        now.saturating_sub(self.since)
    }

    /// It holds something that is kept, and was not told to give it back.
    fn is_loan(&self, trials_alone: bool) -> bool {
        self.is_lent && !self.is_called_back && (self.is_trial || !trials_alone)
    }
}

#[derive(Debug)]
pub(super) struct Share {
    limits: TenantLimits,
    /// The tenant's revision that has these limits.
    revision: i64,
    /// Cost over weight of what has ended: the tenant's own time.
    paid: f64,
    /// Cost of its transactions lately, nanoseconds.
    average_ns: f64,
    /// Time for which they held their places lately, nanoseconds.
    held_ns: f64,
    /// For how long the last one did.
    held_last: Duration,
    /// Until then it is lent no kept place.
    distrusted_until: Duration,
    /// Transactions with messages that have ended.
    ended: u64,
    running: Vec<Running>,
    memory: u64,
    /// Short transactions of the host itself, before the tenant's others.
    first: VecDeque<Waiting>,
    lines: BTreeMap<i32, Line>,
    /// Consumers that wait, in the order of their turns.
    turns: VecDeque<i32>,
    bucket: Bucket,
    counts: TenantCounts,
    cpu_turns: TenantTurns,
    /// Somebody of the tenant waits for what another of its transactions holds.
    pub(super) is_crowded: bool,
    /// It waits for bounds of its own, and not for its turn.
    pub(super) is_held_back: bool,
}

impl Share {
    pub(super) fn new(now: Duration) -> Self {
        Self {
            limits: TenantLimits::default(),
            revision: 0,
            paid: 0.0,
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
            cpu_turns: TenantTurns::default(),
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

    /// Transactions at the same time; each has one connection. `default_max` holds where the
    /// tenant's limits say nothing.
    fn transactions_max(&self, default_max: Option<usize>) -> usize {
        let or_all = |max: Option<usize>| max.map_or(usize::MAX, |max| max.max(1));
        or_all(self.limits.transactions_max.or(default_max))
            .min(or_all(self.limits.connections_max))
    }

    /// Longest call of a handler, where the tenant's limits have one.
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

    /// Whether nothing is known of how long its transactions take.
    pub(super) fn is_new(&self) -> bool {
        self.ended == 0
    }

    /// Whether its transactions hold their places for long: lately, or one of them now.
    pub(super) fn is_slow(&self, now: Duration) -> bool {
        now < self.distrusted_until
            || self.held_ns > SLOW.as_nanos() as f64
            || self.running.iter().any(|running| running.held(now) > LOAN)
    }

    /// How much later than its transaction the next one of a slow tenant begins, where the host has
    /// so many places. All of them are taken within half of the time for which such transactions
    /// hold them.
    pub(super) fn apart(&self, places: usize) -> Duration {
        (self.held_last / 2 / u32::try_from(places).unwrap_or(u32::MAX)).min(APART_MAX)
    }

    /// When the loan of what is kept ends, of the one that it has had for longest; of all of them,
    /// or of trials alone.
    pub(super) fn loan_ends(&self, trials_alone: bool) -> Option<Duration> {
        self.running
            .iter()
            .filter(|running| running.is_loan(trials_alone))
            .map(|running| running.since + LOAN)
            .min()
    }

    /// Loans that it was told to give back and has not given back yet.
    pub(super) fn called_back(&self) -> usize {
        self.running.iter().filter(|running| running.is_called_back).count()
    }

    /// Tell its longest such loan to end. From here on the tenant is known to be slow.
    pub(super) fn call_back(&mut self, trials_alone: bool, now: Duration) -> Option<u64> {
        let lent = self.running.iter_mut().filter(|running| running.is_loan(trials_alone));
        let longest = lent.min_by_key(|running| running.since)?;
        longest.is_called_back = true;
        self.distrusted_until = now + DISTRUST;
        self.held_ns = self.held_ns.max(LOAN.as_nanos() as f64);
        self.counts.stopped += 1;
        Some(longest.id)
    }

    /// Count transactions that were told to stop because their consumer is to rest.
    pub(super) fn count_stopped(&mut self, transactions: u64) {
        self.counts.stopped += transactions;
    }

    pub(super) fn is_active(&self) -> bool {
        self.runs() || self.waits()
    }

    /// Its place among the tenants: the least goes first. What runs is charged for as long as it
    /// has held its place, and at least what the tenant's transactions cost lately.
    pub(super) fn key(&self, now: Duration) -> f64 {
        let until = if hooks::sabotage("running_uncharged") { Duration::ZERO } else { now };
        let charged = self
            .running
            .iter()
            .map(|running| running.cost_ns.max(running.held(until).as_nanos() as f64));
        self.paid + charged.sum::<f64>() / self.weight()
    }

    /// What it had and paid for.
    pub(super) fn paid(&self) -> f64 {
        self.paid
    }

    /// What it did not use while it could have, or while its own bounds held it back, it does not
    /// save up.
    pub(super) fn catch_up(&mut self, floor: f64) {
        self.paid = self.paid.max(floor);
    }

    /// By share; of equals, whoever has less to do.
    pub(super) fn order(&self, now: Duration) -> (f64, usize) {
        (self.key(now), self.running.len() + self.counts.waiting)
    }

    pub(super) fn ask(&mut self, id: u64, ask: Ask, floor: f64, granted: u64, now: Duration) {
        if !self.waits() {
            self.catch_up(floor);
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

    /// True: it waited.
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

    /// Put one that just asked before all others. False: it is not there.
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

    /// Whether a transaction could begin at once, apart from rates.
    pub(super) fn has_room(&self, ask: &Ask, room: Room, default_max: Option<usize>) -> bool {
        let is_full = self.lines.get(&ask.consumer_id).is_some_and(Line::is_full);
        !is_full
            && self.running.len() < self.transactions_max(default_max)
            && fits(ask.memory, room)
            && fits(ask.memory, self.own_room())
    }

    fn own_room(&self) -> Room {
        Room { memory: self.memory_max().saturating_sub(self.memory), is_empty: self.memory == 0 }
    }

    /// What may begin next. A consumer that may not keeps its turn, and others go before it.
    pub(super) fn next(&mut self, room: Room, default_max: Option<usize>, now: Duration) -> Next {
        self.is_crowded = false;
        if self.running.len() >= self.transactions_max(default_max) {
            self.is_crowded = true;
            return Next::Capped;
        }
        if !self.first.is_empty() {
            return Next::Ready(None);
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
                return Next::Ready(Some(*consumer_id));
            }
        }
        match again_at {
            _ if is_short => Next::Memory,
            Some(at) => Next::Rate(at),
            None => Next::Capped,
        }
    }

    /// Let the next one of a consumer begin, in a place, and with memory, that is kept or not.
    /// `granted`: transactions of all tenants until now.
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

    /// The front of a consumer's queue; where more of it waits, its next turn is the last.
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

    /// What a transaction really cost takes the place of what it was taken to cost.
    pub(super) fn pay(&mut self, grant: &Grant, usage: Usage, settled: u32, now: Duration) {
        let cost = usage.cost_ns().max(COST_MIN_NS);
        self.paid += cost / self.weight();
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

    /// It holds nothing any more.
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

/// Whether there is room for so much memory. What is larger than any room could be runs where
/// nothing else has memory.
fn fits(memory: u64, room: Room) -> bool {
    memory == 0 || memory <= room.memory || room.is_empty
}
