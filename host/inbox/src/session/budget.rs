//! The host's bound on connections, of all tenants together.

use std::{
    sync::{
        Arc, Mutex, Weak,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use oncebox_model::connect::CONNECT_TIMEOUT;
use sqlx::Connection;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::Sessions;
use crate::admission::{HostBounds, Scheduler};

/// How long a transaction waits for a connection before it looks for an idle one again.
const LOOK_AGAIN: Duration = Duration::from_millis(250);

/// Guests' memory of a host that is not told otherwise.
const MEMORY_BYTES_MAX: u64 = 4 << 30;

/// The host's bound on connections of all tenants together, and who may begin transactions on them.
/// Over it, transactions wait; they do so for their admission, so that none waits for a connection
/// while it holds what others could use.
pub struct Budget {
    connections_max: usize,
    scheduler: Arc<Scheduler>,
    permits: Arc<Semaphore>,
    /// Transactions that wait for a permit.
    waiting: AtomicUsize,
    pub(super) tenants: Mutex<Vec<Weak<Sessions>>>,
}

impl Budget {
    /// A budget of this many connections.
    pub fn new(connections_max: usize) -> Arc<Self> {
        Self::of(connections_max, HostBounds::new(connections_max, MEMORY_BYTES_MAX))
    }

    /// The same, with bounds on what runs; never more transactions than connections.
    pub fn of(connections_max: usize, limits: HostBounds) -> Arc<Self> {
        let scheduler = Scheduler::new(HostBounds {
            transactions_max: limits.transactions_max.min(connections_max),
            ..limits
        });
        let permits = Arc::new(Semaphore::new(connections_max));
        Arc::new(Self {
            scheduler,
            connections_max,
            permits,
            waiting: AtomicUsize::new(0),
            tenants: Mutex::default(),
        })
    }

    /// Who lets transactions begin. A tenant whose limits change is told to it.
    pub fn scheduler(&self) -> &Arc<Scheduler> {
        &self.scheduler
    }

    /// A permit for one connection. When none is left, a connection that only idles makes room.
    pub(super) async fn permit(&self) -> OwnedSemaphorePermit {
        if let Ok(permit) = self.permits.clone().try_acquire_owned() {
            return permit;
        }
        self.waiting.fetch_add(1, Ordering::SeqCst);
        let permit = loop {
            self.close_idle();
            // Again after a while: a connection may have been put back just as this began to wait.
            if let Ok(permit) =
                tokio::time::timeout(LOOK_AGAIN, self.permits.clone().acquire_owned()).await
            {
                break permit.expect("the budget is never closed");
            }
        };
        self.waiting.fetch_sub(1, Ordering::SeqCst);
        permit
    }

    /// A permit that nobody will miss: there is another one left, and nobody waits.
    pub(super) fn spare(&self) -> Option<OwnedSemaphorePermit> {
        if self.is_short() {
            return None;
        }
        let permit = self.permits.clone().try_acquire_owned().ok()?;
        (self.permits.available_permits() > 0).then_some(permit)
    }

    /// Whether a connection is better closed than kept.
    pub(super) fn is_short(&self) -> bool {
        self.waiting.load(Ordering::SeqCst) > 0
    }

    /// Close connections that nobody has used for a while, of all tenants, so that one without work
    /// holds none. The answer is how many.
    pub async fn close_unused(&self, unused: Duration) -> usize {
        let tenants: Vec<_> = self
            .tenants
            .lock()
            .expect("no panic while held")
            .iter()
            .filter_map(Weak::upgrade)
            .collect();
        let old: Vec<_> =
            tenants.iter().flat_map(|sessions| sessions.take_unused(unused)).collect();
        let count = old.len();
        for session in old {
            // Its end is said, so that the server's log does not show a client that vanished.
            let _ = tokio::time::timeout(CONNECT_TIMEOUT, session.connection.close()).await;
        }
        count
    }

    /// Connections of all tenants that are open.
    pub fn in_use(&self) -> usize {
        self.connections_max - self.permits.available_permits()
    }

    /// Closes the idle connection that is least likely to be used soon, of whichever tenant: the
    /// one whose last use but one is longest ago (LRU-2: O'Neil, O'Neil and Weikum, 1993). By the
    /// last use alone, tenants whose transactions are long would close the connections of one that
    /// has a short one every now and then.
    pub(super) fn close_idle(&self) {
        let mut tenants = self.tenants.lock().expect("no panic while held");
        tenants.retain(|tenant| tenant.upgrade().is_some());
        let least = tenants
            .iter()
            .filter_map(Weak::upgrade)
            .filter_map(|sessions| Some((sessions.least_used()?, sessions)));
        // Of equal ones the first counts, so a tenant that is there for longer has no better place.
        if let Some(((_, backend), sessions)) = least.min_by_key(|(least, _)| *least) {
            drop(sessions.take(backend));
        }
    }
}
