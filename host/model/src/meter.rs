//! What a transaction uses of the host and of the database, added up while it runs, and whether it
//! is to stop.

use std::{
    sync::{
        Arc, OnceLock,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::Duration,
};

use tokio::sync::{Notify, Semaphore};

/// Adds up what one transaction uses.
#[derive(Debug, Default)]
pub struct Meter {
    cpu_ns: AtomicU64,
    database_ns: AtomicU64,
    turns: TenantTurns,
    /// Why its handlers are to stop.
    stopped: OnceLock<Stopped>,
    /// Told when they are to.
    stopping: Notify,
}

/// Why a transaction is stopped before its end. Its messages have lost nothing and run again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stopped {
    /// It held a place that is kept for other tenants for longer than that was lent.
    GaveWay,
    /// Its consumer or tenant is to rest.
    Withdrawn,
}

/// What a transaction used.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Usage {
    /// Processor time of its handlers.
    pub cpu: Duration,
    /// Time between its statements and their answers.
    pub database: Duration,
}

impl Usage {
    /// Both together, in nanoseconds: what a tenant's share is counted in.
    pub fn cost_ns(self) -> f64 {
        (self.cpu + self.database).as_nanos() as f64
    }
}

impl Meter {
    /// A meter of one of a tenant's transactions.
    pub fn of(turns: TenantTurns) -> Self {
        Self { turns, ..Self::default() }
    }

    /// What is known of its tenant's handlers.
    pub fn turns(&self) -> &TenantTurns {
        &self.turns
    }

    /// A handler computed for so long.
    pub fn add_cpu(&self, time: Duration) {
        self.cpu_ns.fetch_add(time.as_nanos() as u64, Ordering::Relaxed);
    }

    /// A statement was under way for so long.
    pub fn add_database(&self, time: Duration) {
        self.database_ns.fetch_add(time.as_nanos() as u64, Ordering::Relaxed);
    }

    /// Tell the handlers of this transaction to stop. False: they were told already.
    pub fn stop(&self, why: Stopped) -> bool {
        let is_first = self.stopped.set(why).is_ok();
        self.stopping.notify_waiters();
        is_first
    }

    /// Wait until the transaction is told to stop.
    pub async fn stopped(&self) -> Stopped {
        loop {
            let told = self.stopping.notified();
            if let Some(why) = self.stopped.get() {
                return *why;
            }
            told.await;
        }
    }

    /// What was used so far.
    pub fn usage(&self) -> Usage {
        let nanos = |of: &AtomicU64| Duration::from_nanos(of.load(Ordering::Relaxed));
        Usage { cpu: nanos(&self.cpu_ns), database: nanos(&self.database_ns) }
    }
}

/// How many handlers that compute are polled at the same time: as many as there are processors but
/// one, and at least one.
pub fn turns() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from).saturating_sub(1).max(1)
}

/// What is known of a tenant's handlers, shared by all of its transactions.
#[derive(Debug, Clone)]
pub struct TenantTurns {
    /// Places in the queue for turns: as many as there are turns, so that tenants alternate however
    /// many handlers of each compute.
    pub places: Arc<Semaphore>,
    /// Whether the one that was polled last computes. Handlers begin with it: otherwise the first
    /// polls of many that begin together took no turn.
    pub computes: Arc<AtomicBool>,
}

impl Default for TenantTurns {
    fn default() -> Self {
        Self { places: Arc::new(Semaphore::new(turns())), computes: Arc::default() }
    }
}
