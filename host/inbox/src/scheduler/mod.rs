//! Who may begin a transaction on this host, when, and for how many messages.
//!
//! Every transaction in a tenant's session asks for an *admission* before it takes a connection, and holds
//! it until it has ended. Whoever holds one waits for no other, nor for a turn of its consumer's pace. Over a
//! limit one waits; that counts against no handler's deadline, which begins with its call.
//!
//! Between tenants the order is that of weighted fair queueing: each has a clock that goes on by what its
//! transactions cost, processor time of handlers and time of their statements, divided by its weight; the
//! clock that is furthest behind is next. What runs is charged what the tenant's transactions cost lately,
//! until it has ended and its real cost is known. A tenant that had nothing to do begins where the others
//! are. Among a tenant's consumers turns go round, and each consumer's queue goes by arrival.
//!
//! (Start-time fair queueing: Goyal, Vin and Cheng, 1996, with costs that are known only afterwards.)

mod bucket;
mod meter;
mod share;
mod state;
#[cfg(test)]
mod tests;

use std::{
    collections::{BTreeMap, HashMap},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError, Weak,
        atomic::{AtomicU32, Ordering},
    },
    time::Duration,
};

use tokio::{sync::oneshot, time::Instant};

pub use meter::{Meter, Usage};
pub(crate) use meter::{Metered, TenantTurns};
use state::State;

use crate::tenant::{Tenant, TenantLimits};

/// What all tenants of a host share. Over it, transactions wait.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HostBounds {
    /// Transactions at the same time.
    pub transactions_max: usize,
    /// Bytes that instances of handlers may have together, each counted with what its consumer allows.
    pub memory_bytes_max: u64,
}

/// What a consumer may have.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ConsumerCaps {
    /// Transactions at the same time; none for the tenant's bound.
    pub transactions_max: Option<usize>,
    /// Messages a second; none for as many as come.
    pub messages_per_second: Option<u32>,
}

/// When a transaction is let in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Class {
    /// Before all others of its tenant: a short one of the host, on which a rebalance waits. There is one
    /// for each partition that comes or goes, however many those are, so other tenants do not stand back.
    First,
    /// By share and turn.
    Fair,
}

/// What a transaction asks for.
#[derive(Debug, Clone, Copy)]
pub struct Ask {
    /// Whose it is.
    pub tenant_id: i32,
    /// And of which consumer.
    pub consumer_id: i32,
    /// Before the tenant's others or not.
    pub class: Class,
    /// Bytes of guests' memory; none where no handler runs.
    pub memory: u64,
    /// Messages it could make use of; fewer may be granted, down to one. None where it brings no new ones.
    pub messages: u32,
}

/// What was granted.
#[derive(Debug)]
struct Grant {
    id: u64,
    tenant_id: i32,
    consumer_id: i32,
    messages: u32,
    memory: u64,
    /// Charged to the tenant's clock until it ends.
    owed: f64,
    /// Transactions that others began while it waited.
    overtaken: u64,
    /// It runs in the part that is kept for tenants that run nothing.
    is_reserved: bool,
    turns: TenantTurns,
}

/// What the scheduler has counted, for tests and displays.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Snapshot {
    /// Transactions that were let in.
    pub granted: u64,
    /// Transactions that run.
    pub running: usize,
    /// The most that ran at the same time.
    pub running_peak: usize,
    /// Bytes of guests' memory that are held.
    pub memory_bytes: u64,
    /// The most that was held.
    pub memory_bytes_peak: u64,
    /// Transactions that wait.
    pub waiting: usize,
    /// The tenants, by key.
    pub tenants: BTreeMap<i32, TenantCounts>,
}

/// What was counted of one tenant.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct TenantCounts {
    /// Its name.
    pub name: String,
    /// Its weight.
    pub weight: u32,
    /// Transactions that were let in.
    pub granted: u64,
    /// Messages that they settled.
    pub messages: u64,
    /// Transactions that run.
    pub running: usize,
    /// The most that ran at the same time.
    pub running_peak: usize,
    /// Bytes of guests' memory that are held.
    pub memory_bytes: u64,
    /// The most that was held.
    pub memory_bytes_peak: u64,
    /// Transactions that wait.
    pub waiting: usize,
    /// The longest wait of one, in transactions that other tenants began meanwhile.
    pub overtaken_max: u64,
    /// Processor time of its handlers.
    pub cpu: Duration,
    /// Time of its statements.
    pub database: Duration,
}

/// Lets transactions in. One per host.
pub struct Scheduler {
    own: Weak<Self>,
    inner: Mutex<Inner>,
    started: Instant,
}

struct Inner {
    state: State,
    /// Whom to tell, by place in the queue.
    waiting: HashMap<u64, oneshot::Sender<Admission>>,
    meters: HashMap<i32, TenantMeters>,
    /// When the next look is due by a clock.
    look_at: Option<Duration>,
}

impl Inner {
    fn count_waiting(&self, tenant_id: i32, one_more: bool) {
        if let Some(meters) = self.meters.get(&tenant_id) {
            meters.waits(one_more);
        }
    }
}

/// Leave to run transactions, one after the other, until it is dropped.
pub struct Admission {
    scheduler: Arc<Scheduler>,
    grant: Grant,
    meter: Arc<Meter>,
    settled: AtomicU32,
}

impl Admission {
    /// Messages that may be taken.
    pub fn messages(&self) -> usize {
        self.grant.messages as usize
    }

    /// Transactions that other tenants began while this one waited.
    pub fn overtaken(&self) -> u64 {
        self.grant.overtaken
    }

    /// So many messages came to their end; a rate counts these.
    pub(crate) fn settled(&self, messages: usize) {
        self.settled.store(messages.try_into().unwrap_or(u32::MAX), Ordering::Relaxed);
    }

    /// Where what it uses is added up.
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

/// A place in the queue, which is given up when nobody waits for it any more.
struct Place<'a> {
    scheduler: &'a Scheduler,
    tenant_id: i32,
    id: u64,
}

impl Drop for Place<'_> {
    fn drop(&mut self) {
        let mut inner = self.scheduler.lock();
        if inner.waiting.remove(&self.id).is_some() {
            inner.state.cancel(self.tenant_id, self.id);
            inner.count_waiting(self.tenant_id, false);
            // It may have stood in the way of others.
            self.scheduler.look(inner, None);
        }
    }
}

impl Scheduler {
    /// A scheduler with nobody in it.
    pub fn new(host: HostBounds) -> Arc<Self> {
        let host = HostBounds { transactions_max: host.transactions_max.max(1), memory_bytes_max: host.memory_bytes_max.max(1) };
        let inner = Inner { state: State::new(host), waiting: HashMap::new(), meters: HashMap::new(), look_at: None };
        Arc::new_cyclic(|own| Self { own: own.clone(), inner: Mutex::new(inner), started: Instant::now() })
    }

    /// What a tenant gets from now on; what runs goes on as it is. A row that was read before the one that
    /// was told last changes nothing.
    pub fn set_limits(&self, tenant: &Tenant) {
        self.limit(tenant.tenant_id, tenant.revision, &tenant.name, &tenant.limits);
    }

    fn limit(&self, tenant_id: i32, revision: i64, name: &str, limits: &TenantLimits) {
        let mut inner = self.lock();
        if inner.state.set_limits(tenant_id, revision, name, limits, self.now()) {
            inner.meters.entry(tenant_id).or_insert_with(|| TenantMeters::new(name));
            self.look(inner, None);
        }
    }

    /// What a consumer gets from now on.
    pub fn set_caps(&self, tenant_id: i32, consumer_id: i32, caps: ConsumerCaps) {
        let mut inner = self.lock();
        inner.state.set_caps(tenant_id, consumer_id, caps.transactions_max, caps.messages_per_second, self.now());
        self.look(inner, None);
    }

    /// A tenant that is gone; while something of it runs or waits, nothing happens.
    pub fn forget(&self, tenant_id: i32) {
        let mut inner = self.lock();
        if inner.state.forget(tenant_id) {
            inner.meters.remove(&tenant_id);
        }
    }

    /// Wait to be let in. Whoever stops waiting leaves nothing behind.
    pub async fn admit(&self, ask: Ask) -> Admission {
        let (place, receiver) = {
            let mut inner = self.lock();
            let id = inner.state.ask(ask, self.now());
            let (sender, receiver) = oneshot::channel();
            inner.waiting.insert(id, sender);
            inner.count_waiting(ask.tenant_id, true);
            // Made before anybody is told, so that it is given up in any case.
            let place = Place { scheduler: self, tenant_id: ask.tenant_id, id };
            if let Some(admission) = self.look(inner, Some(id)) {
                return admission;
            }
            (place, receiver)
        };
        let admission = receiver.await.expect("a place in the queue is kept until it is granted or given up");
        drop(place);
        admission
    }

    /// Be let in at once, or not at all: where nobody waits for room.
    pub fn admit_spare(&self, ask: Ask) -> Option<Admission> {
        let grant = self.lock().state.ask_spare(ask, self.now())?;
        Some(self.admission(grant))
    }

    /// Whether somebody waits for what this tenant's transactions hold.
    pub fn is_crowded(&self, tenant_id: i32) -> bool {
        self.lock().state.is_crowded(tenant_id)
    }

    /// What was counted so far.
    pub fn snapshot(&self) -> Snapshot {
        self.lock().state.snapshot()
    }

    fn end(&self, grant: &Grant, usage: Usage, settled: u32) {
        let mut inner = self.lock();
        inner.state.end(grant, usage, settled, self.now());
        if let Some(meters) = inner.meters.get(&grant.tenant_id) {
            meters.ended(usage, settled);
            meters.overtaken.set(inner.state.overtaken_max(grant.tenant_id) as f64);
        }
        self.look(inner, None);
    }

    /// Let in whoever has room, and tell them. The answer is for `own`, where that is one of them.
    fn look(&self, mut inner: MutexGuard<'_, Inner>, own: Option<u64>) -> Option<Admission> {
        let looked = inner.state.look(self.now());
        let mut mine = None;
        let mut told = Vec::with_capacity(looked.grants.len());
        for grant in looked.grants {
            let sender = inner.waiting.remove(&grant.id);
            inner.count_waiting(grant.tenant_id, false);
            if own == Some(grant.id) {
                mine = Some(grant);
            } else if let Some(sender) = sender {
                told.push((sender, grant));
            }
        }
        let due = looked.again_at.filter(|at| inner.look_at.is_none_or(|known| *at < known));
        if let Some(at) = due {
            inner.look_at = Some(at);
        }
        drop(inner);
        for (sender, grant) in told {
            // Where nobody waits any more the admission comes back, and is dropped.
            drop(sender.send(self.admission(grant)));
        }
        if let Some(at) = due {
            self.look_later(at);
        }
        mine.map(|grant| self.admission(grant))
    }

    /// A rate lets the next one in by the clock alone.
    fn look_later(&self, at: Duration) {
        let (own, until) = (self.own.clone(), self.started + at);
        let Ok(runtime) = tokio::runtime::Handle::try_current() else { return };
        runtime.spawn(async move {
            tokio::time::sleep_until(until).await;
            if let Some(scheduler) = own.upgrade() {
                let mut inner = scheduler.lock();
                if inner.look_at == Some(at) {
                    inner.look_at = None;
                }
                scheduler.look(inner, None);
            }
        });
    }

    fn admission(&self, grant: Grant) -> Admission {
        let scheduler = self.own.upgrade().expect("whoever calls holds it");
        let meter = Arc::new(Meter::of(grant.turns.clone()));
        Admission { scheduler, grant, meter, settled: AtomicU32::new(0) }
    }

    fn now(&self) -> Duration {
        self.started.elapsed()
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A tenant's metrics. Labels are tenants alone, so there are no more of them than rows.
struct TenantMeters {
    granted: metrics::Counter,
    messages: metrics::Counter,
    /// Counters of the exporter hold whole numbers; these are seconds.
    cpu: metrics::Gauge,
    database: metrics::Gauge,
    waiting: metrics::Gauge,
    overtaken: metrics::Gauge,
}

impl TenantMeters {
    fn new(name: &str) -> Self {
        let tenant = || name.to_owned();
        Self {
            granted: metrics::counter!("oncebox_tenant_transactions_total", "tenant" => tenant()),
            messages: metrics::counter!("oncebox_tenant_messages_total", "tenant" => tenant()),
            cpu: metrics::gauge!("oncebox_tenant_cpu_seconds_total", "tenant" => tenant()),
            database: metrics::gauge!("oncebox_tenant_database_seconds_total", "tenant" => tenant()),
            waiting: metrics::gauge!("oncebox_scheduler_waiting", "tenant" => tenant()),
            overtaken: metrics::gauge!("oncebox_scheduler_overtaken_max", "tenant" => tenant()),
        }
    }

    fn ended(&self, usage: Usage, settled: u32) {
        self.granted.increment(1);
        self.messages.increment(settled.into());
        self.cpu.increment(usage.cpu.as_secs_f64());
        self.database.increment(usage.database.as_secs_f64());
    }

    /// `waits`: one more of it waits, or one less.
    fn waits(&self, one_more: bool) {
        self.waiting.increment(if one_more { 1.0 } else { -1.0 });
    }
}
