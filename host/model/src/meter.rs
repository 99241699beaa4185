//! The resources of the host and the database that a transaction uses, added up while it runs, and
//! the signal for it to stop.

use std::{
    sync::{
        Arc, OnceLock,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::Duration,
};

use tokio::sync::{Notify, Semaphore};

/// The counters of one transaction, and its signal to stop.
#[derive(Debug, Default)]
pub struct Meter {
    cpu_ns: AtomicU64,
    database_ns: AtomicU64,
    turns: CpuSlots,
    /// Reason why its handlers must stop; none while they may go on.
    stopped: OnceLock<Stopped>,
    /// Signal to its handlers when they must stop.
    stopping: Notify,
}

/// The reason why a transaction is stopped before its end. Its messages have lost nothing and run
/// again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stopped {
    /// The transaction held a place kept for other tenants for longer than it was lent.
    GaveWay,
    /// Its consumer or tenant must stop.
    Withdrawn,
}

/// The resources that a transaction used.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Usage {
    /// Processor time of its handlers.
    pub cpu: Duration,
    /// Time between its statements and their answers.
    pub database: Duration,
}

impl Usage {
    /// Returns the sum of both times in nanoseconds, the unit in which a tenant's share is counted.
    pub fn cost_ns(self) -> f64 {
        (self.cpu + self.database).as_nanos() as f64
    }
}

impl Meter {
    /// Creates the meter of one of a tenant's transactions.
    pub fn of(turns: CpuSlots) -> Self {
        Self { turns, ..Self::default() }
    }

    /// Returns the shared state of its tenant's handlers.
    pub fn turns(&self) -> &CpuSlots {
        &self.turns
    }

    /// Adds the time that a handler computed.
    pub fn add_cpu(&self, time: Duration) {
        self.cpu_ns.fetch_add(time.as_nanos() as u64, Ordering::Relaxed);
    }

    /// Adds the time that a statement was under way.
    pub fn add_database(&self, time: Duration) {
        self.database_ns.fetch_add(time.as_nanos() as u64, Ordering::Relaxed);
    }

    /// Signals the handlers of this transaction to stop. Returns false where they already had the
    /// signal.
    pub fn stop(&self, why: Stopped) -> bool {
        let is_first = self.stopped.set(why).is_ok();
        self.stopping.notify_waiters();
        is_first
    }

    /// Waits until the transaction is signalled to stop, and returns the reason.
    pub async fn stopped(&self) -> Stopped {
        loop {
            let told = self.stopping.notified();
            if let Some(why) = self.stopped.get() {
                return *why;
            }
            told.await;
        }
    }

    /// Returns the resources used so far.
    pub fn usage(&self) -> Usage {
        let nanos = |of: &AtomicU64| Duration::from_nanos(of.load(Ordering::Relaxed));
        Usage { cpu: nanos(&self.cpu_ns), database: nanos(&self.database_ns) }
    }
}

/// Returns how many computing handlers are polled at once: one fewer than there are processors, and
/// at least one.
pub fn turns() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from).saturating_sub(1).max(1)
}

/// The state of a tenant's handlers, shared by all of its transactions.
#[derive(Debug, Clone)]
pub struct CpuSlots {
    /// Places in the queue for turns, as many as there are turns. Tenants therefore alternate,
    /// however many handlers of each compute.
    pub places: Arc<Semaphore>,
    /// True where the handler that was polled last computes. New handlers start with this value.
    /// Otherwise the first polls of many handlers that begin together would take no turn.
    pub computes: Arc<AtomicBool>,
}

impl Default for CpuSlots {
    fn default() -> Self {
        Self { places: Arc::new(Semaphore::new(turns())), computes: Arc::default() }
    }
}
