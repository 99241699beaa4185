//! Admission: which transactions may begin on this host, when, and for how many messages.
//!
//! Every transaction in a tenant's session asks for an *admission* before it takes a connection,
//! and holds it until it has ended. A transaction that holds one waits for no other, nor for a turn
//! of its consumer's pace. Over a limit it waits. That wait counts against no handler's deadline,
//! which begins with its call.
//!
//! Between tenants the order is that of weighted fair queueing. Each tenant has a clock, which goes
//! on by the cost of its transactions divided by its weight. The cost is processor time of handlers
//! and time of their statements. The tenant whose clock is furthest behind is next. A running
//! transaction is charged for as long as it has held its place, and at least what the tenant's
//! transactions cost lately. When it has ended, its real cost is known and charged instead. A
//! tenant that had nothing to do begins where the others are. A tenant's consumers take turns, and
//! each consumer's queue goes by arrival.
//!
//! An eighth of the places, and of the memory, is kept for tenants that run nothing, whatever their
//! clocks say. A kept place is lent for a second. When it is wanted after that, the transaction is
//! stopped, rolled back and run again later, in a place that is not kept. A tenant whose
//! transactions hold their places for long is lent none. Tenants without a history have half of the
//! kept places at most. So slow tenants, however many there are, share the other places.
//!
//! Transactions of slow tenants begin one after the other, a little apart. Handlers that began
//! together would end together at their deadlines. The work of all of them at once, with sessions
//! that are opened for it, would delay every other tenant's statements.
//!
//! (Start-time fair queueing: Goyal, Vin and Cheng, 1996, with costs that are known only
//! afterwards.)

// State of all tenants: the queues, what runs, which tenant is next.
mod state;
// State of one tenant: its clock, its limits, its queue.
mod share;
// Bounds of the host and of consumers.
mod bounds;
// Counts, for displays and as metrics.
mod counts;
// Kept places that are lent, and called back.
mod loans;
// The queue of a consumer.
mod line;
// Limits on messages a second.
mod bucket;
// Processor time, and the turns of handlers that compute.
mod cpu;
// Size and mode of a consumer's transactions.
pub(crate) mod batch_sizer;
// Circuit breakers of versions that fail too often.
pub(crate) mod breaker;
#[cfg(test)]
mod tests;

use std::{
    collections::HashMap,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError, Weak,
        atomic::{AtomicU32, Ordering},
    },
    time::Duration,
};

use tokio::{sync::oneshot, time::Instant};

pub use bounds::{ConsumerCaps, HostBounds};
use counts::TenantMeters;
pub use counts::{Snapshot, TenantCounts};
pub(crate) use cpu::MeteredFuture;
use oncebox_model::{
    inbox::ServerRun,
    meter::{CpuSlots, Meter, Stopped, Usage},
    tenant_limits::TenantLimits,
};
use state::State;

/// Order of a transaction's admission.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Class {
    /// Admission before all others of its tenant: a short transaction of the host, on which a
    /// rebalance waits. There is one for each partition that comes or goes, however many those are.
    /// So it takes no precedence over other tenants.
    First,
    /// Admission by share and turn.
    Fair,
}

/// A transaction's request for admission.
#[derive(Debug, Clone, Copy)]
pub struct AdmissionRequest {
    /// Id of its tenant.
    pub tenant_id: i32,
    /// Id of its consumer.
    pub consumer_id: i32,
    /// Order of its admission.
    pub class: Class,
    /// Bytes of guests' memory; none where no handler runs.
    pub memory: u64,
    /// Messages that it can use; fewer may be granted, down to one. Zero where it brings no new
    /// ones.
    pub messages: u32,
}

/// A granted request.
#[derive(Debug)]
struct Grant {
    id: u64,
    tenant_id: i32,
    consumer_id: i32,
    messages: u32,
    memory: u64,
    /// Transactions that other tenants began while it waited.
    overtaken: u64,
    /// True where it runs in a place that is kept for tenants that run nothing.
    is_kept: bool,
    /// True where its memory is part of what is kept for them.
    is_memory_kept: bool,
    /// True where it runs in a kept place, and nothing was known of its tenant when it began.
    is_trial: bool,
    turns: CpuSlots,
}

/// The scheduler that admits transactions. One per host.
pub struct Scheduler {
    own: Weak<Self>,
    inner: Mutex<Inner>,
    started: Instant,
}

struct Inner {
    state: State,
    /// Waiting transactions, by place in the queue, each with the channel that takes its admission.
    waiting: HashMap<u64, oneshot::Sender<Admission>>,
    meters: HashMap<i32, TenantMeters>,
    /// Transactions that were admitted and have not ended, by their former place in the queue.
    running: HashMap<u64, Open>,
    /// Time of the next look that is due by a clock.
    look_at: Option<Duration>,
}

/// A transaction that was admitted.
struct Open {
    tenant_id: i32,
    consumer_id: i32,
    meter: Arc<Meter>,
}

impl Inner {
    /// Tells a transaction to stop. Returns false where it was asked to before, or has ended.
    fn stop(&self, id: u64, why: Stopped) -> bool {
        let Some(open) = self.running.get(&id) else { return false };
        let is_first = open.meter.stop(why);
        if let (true, Some(meters)) = (is_first, self.meters.get(&open.tenant_id)) {
            meters.stopped(why);
        }
        is_first
    }

    fn count_waiting(&self, tenant_id: i32, one_more: bool) {
        if let Some(meters) = self.meters.get(&tenant_id) {
            meters.waits(one_more);
        }
    }
}

/// Permit to run transactions, one after the other, until it is dropped.
pub struct Admission {
    scheduler: Arc<Scheduler>,
    grant: Grant,
    meter: Arc<Meter>,
    settled: AtomicU32,
    turn: Option<PartitionTurn>,
}

/// Rules for the transactions of one turn of a partition.
#[derive(Debug, Clone)]
pub(crate) struct PartitionTurn {
    /// Server run that they must be open in: the one that has all commits of the partition.
    pub(crate) server: ServerRun,
    /// Whether their claims note the partition's position.
    pub(crate) notes_position: bool,
}

impl Admission {
    /// Makes it an admission of a partition, which has rules for its transactions.
    pub(crate) fn hold_to(&mut self, turn: Option<PartitionTurn>) {
        self.turn = turn;
    }

    /// Returns the rules of the partition whose admission it is; none for every other one.
    pub(crate) fn turn(&self) -> Option<&PartitionTurn> {
        self.turn.as_ref()
    }

    /// Returns the number of messages that may be taken.
    pub fn messages(&self) -> usize {
        self.grant.messages as usize
    }

    /// Returns the number of transactions that other tenants began while this one waited.
    pub fn overtaken(&self) -> u64 {
        self.grant.overtaken
    }

    /// Sets the number of messages that were settled; a rate counts these.
    pub(crate) fn settled(&self, messages: usize) {
        self.settled.store(messages.try_into().unwrap_or(u32::MAX), Ordering::Relaxed);
    }

    /// Returns the meter that adds up what it uses.
    pub(crate) fn meter(&self) -> &Arc<Meter> {
        &self.meter
    }
}

impl std::fmt::Debug for Admission {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Admission({:?})", self.grant)
    }
}

impl Drop for Admission {
    fn drop(&mut self) {
        self.scheduler.end(&self.grant, self.meter.usage(), self.settled.load(Ordering::Relaxed));
    }
}

/// A place in the queue, which is given up when no caller waits for it any longer.
struct QueueTicket<'a> {
    scheduler: &'a Scheduler,
    tenant_id: i32,
    id: u64,
}

impl Drop for QueueTicket<'_> {
    fn drop(&mut self) {
        let mut inner = self.scheduler.lock();
        if inner.waiting.remove(&self.id).is_some() {
            inner.state.cancel(self.tenant_id, self.id);
            inner.count_waiting(self.tenant_id, false);
            // The place may have delayed others.
            self.scheduler.dispatch(inner, None);
        }
    }
}

impl Scheduler {
    /// Makes a scheduler with an empty queue.
    pub fn new(host: HostBounds) -> Arc<Self> {
        let host = HostBounds {
            transactions_max: host.transactions_max.max(1),
            memory_bytes_max: host.memory_bytes_max.max(1),
            ..host
        };
        let inner = Inner {
            state: State::new(host),
            waiting: HashMap::new(),
            meters: HashMap::new(),
            running: HashMap::new(),
            look_at: None,
        };
        Arc::new_cyclic(|own| Self {
            own: own.clone(),
            inner: Mutex::new(inner),
            started: Instant::now(),
        })
    }

    /// Sets a tenant's name and limits; running transactions go on as they are. A row that is older
    /// than the last one changes nothing.
    pub fn set_limits(&self, tenant_id: i32, revision: i64, name: &str, limits: &TenantLimits) {
        let mut inner = self.lock();
        if inner.state.set_limits(tenant_id, revision, name, limits, self.now()) {
            inner.meters.entry(tenant_id).or_insert_with(|| TenantMeters::new(name));
            self.dispatch(inner, None);
        }
    }

    /// Sets a consumer's caps.
    pub fn set_caps(&self, tenant_id: i32, consumer_id: i32, caps: ConsumerCaps) {
        let mut inner = self.lock();
        inner.state.set_caps(
            tenant_id,
            consumer_id,
            caps.transactions_max,
            caps.messages_per_second,
            self.now(),
        );
        self.dispatch(inner, None);
    }

    /// Forgets a tenant that is gone. Does nothing while a transaction of it runs or waits.
    pub fn forget(&self, tenant_id: i32) {
        let mut inner = self.lock();
        if inner.state.forget(tenant_id) {
            inner.meters.remove(&tenant_id);
        }
    }

    /// Waits for an admission. A caller that stops waiting leaves nothing behind.
    pub async fn admit(&self, ask: AdmissionRequest) -> Admission {
        let (place, receiver) = {
            let mut inner = self.lock();
            let id = inner.state.ask(ask, self.now());
            let (sender, receiver) = oneshot::channel();
            inner.waiting.insert(id, sender);
            inner.count_waiting(ask.tenant_id, true);
            // Made before any admission is sent, so that the place is given up in any case.
            let place = QueueTicket { scheduler: self, tenant_id: ask.tenant_id, id };
            if let Some(admission) = self.dispatch(inner, Some(id)) {
                return admission;
            }
            (place, receiver)
        };
        let admission =
            receiver.await.expect("a place in the queue is kept until it is granted or given up");
        drop(place);
        admission
    }

    /// Returns an admission at once, or none where other transactions wait for room or there is
    /// none.
    pub fn admit_spare(&self, ask: AdmissionRequest) -> Option<Admission> {
        let mut inner = self.lock();
        let grant = inner.state.ask_spare(ask, self.now())?;
        Some(self.admission(&mut inner, grant))
    }

    /// Tells the transactions of a consumer that run handlers to stop: they are rolled back, and
    /// their messages come again. Returns the number of transactions that it told.
    pub(crate) fn stop(&self, consumer_id: i32) -> usize {
        let mut inner = self.lock();
        let of_consumer = inner.running.iter().filter(|(_, open)| open.consumer_id == consumer_id);
        let ids: Vec<_> = of_consumer.map(|(id, open)| (*id, open.tenant_id)).collect();
        let told: Vec<_> =
            ids.into_iter().filter(|(id, _)| inner.stop(*id, Stopped::Withdrawn)).collect();
        for (_, tenant_id) in &told {
            inner.state.count_stopped(*tenant_id, 1);
        }
        told.len()
    }

    /// Returns the longest call of a tenant's handlers, whatever a policy says.
    pub(crate) fn deadline_max(&self, tenant_id: i32) -> Option<Duration> {
        self.lock().state.deadline_max(tenant_id)
    }

    /// Returns the destinations that a tenant's handlers may send to, by its present limits; empty
    /// for none.
    pub(crate) fn destinations_allowed(&self, tenant_id: i32) -> Arc<[String]> {
        self.lock().state.destinations_allowed(tenant_id)
    }

    /// Returns whether a transaction waits for what this tenant's transactions hold.
    pub fn is_crowded(&self, tenant_id: i32) -> bool {
        self.lock().state.is_crowded(tenant_id)
    }

    /// Returns the counts so far.
    pub fn snapshot(&self) -> Snapshot {
        self.lock().state.snapshot()
    }

    fn end(&self, grant: &Grant, usage: Usage, settled: u32) {
        let mut inner = self.lock();
        inner.running.remove(&grant.id);
        inner.state.end(grant, usage, settled, self.now());
        if let Some(meters) = inner.meters.get(&grant.tenant_id) {
            meters.ended(usage, settled);
            meters.overtaken.set(inner.state.overtaken_max(grant.tenant_id) as f64);
        }
        self.dispatch(inner, None);
    }

    /// Admits every transaction that has room, and sends the admissions. Returns the admission of
    /// `own`, where that is one of them.
    fn dispatch(&self, mut inner: MutexGuard<'_, Inner>, own: Option<u64>) -> Option<Admission> {
        let dispatched = inner.state.dispatch(self.now());
        for id in dispatched.called_back {
            inner.stop(id, Stopped::GaveWay);
        }
        let mut mine = None;
        let mut told = Vec::with_capacity(dispatched.grants.len());
        for grant in dispatched.grants {
            let sender = inner.waiting.remove(&grant.id);
            inner.count_waiting(grant.tenant_id, false);
            let is_own = own == Some(grant.id);
            let admission = self.admission(&mut inner, grant);
            if is_own {
                mine = Some(admission);
            } else {
                told.push((sender, admission));
            }
        }
        let due = dispatched.again_at.filter(|at| inner.look_at.is_none_or(|known| *at < known));
        if let Some(at) = due {
            inner.look_at = Some(at);
        }
        drop(inner);
        for (sender, admission) in told {
            // Where no caller waits any longer, the admission comes back and is dropped.
            drop(sender.map(|sender| sender.send(admission)));
        }
        if let Some(at) = due {
            self.dispatch_later(at);
        }
        mine
    }

    /// Schedules a look at this time. A rate allows the next transaction by the clock alone, a loan
    /// ends by it, and slow ones begin apart by it.
    fn dispatch_later(&self, at: Duration) {
        let (own, until) = (self.own.clone(), self.started + at);
        let Ok(runtime) = tokio::runtime::Handle::try_current() else { return };
        runtime.spawn(async move {
            tokio::time::sleep_until(until).await;
            if let Some(scheduler) = own.upgrade() {
                let mut inner = scheduler.lock();
                if inner.look_at == Some(at) {
                    inner.look_at = None;
                }
                scheduler.dispatch(inner, None);
            }
        });
    }

    fn admission(&self, inner: &mut Inner, grant: Grant) -> Admission {
        let scheduler = self.own.upgrade().expect("whoever calls holds it");
        let meter = Arc::new(Meter::of(grant.turns.clone()));
        let open = Open {
            tenant_id: grant.tenant_id,
            consumer_id: grant.consumer_id,
            meter: meter.clone(),
        };
        inner.running.insert(grant.id, open);
        Admission { scheduler, grant, meter, settled: AtomicU32::new(0), turn: None }
    }

    fn now(&self) -> Duration {
        self.started.elapsed()
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
