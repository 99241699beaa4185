//! The host's bound on connections, of all tenants together.

use std::{
    collections::HashMap,
    sync::{
        Arc, Mutex, PoisonError, Weak,
        atomic::{AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use oncebox_model::{connect::CONNECT_TIMEOUT, error::InboxError};
use sqlx::{Connection, postgres::PgConnectOptions};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::Sessions;
use crate::admission::{HostBounds, Scheduler};

/// Pause after which a transaction that waits for a connection looks for an idle one again.
const RECHECK: Duration = Duration::from_millis(250);

/// Logins at a time that only ask whether a server answers. They count as no connection of a
/// tenant.
const PROBES_MAX: usize = 4;

/// Bytes of guests' memory of a budget that is made without bounds of its own.
const MEMORY_BYTES_MAX: u64 = 4 << 30;

/// The host's bound on connections of all tenants together, with the scheduler of their
/// transactions. Over the bound, transactions wait. They wait for their admission, so that none
/// waits for a connection while it holds what others could use.
pub struct Budget {
    connections_max: usize,
    scheduler: Arc<Scheduler>,
    permits: Arc<Semaphore>,
    /// Transactions that wait for a permit.
    waiting: AtomicUsize,
    pub(super) tenants: Mutex<Vec<Weak<Sessions>>>,
    /// Turns of probes, by host and port of the server.
    probes: Mutex<HashMap<String, Arc<ServerProbes>>>,
}

/// Turns of the probes of a server, which many tenants may ask at the same time.
pub(super) struct ServerProbes {
    turns: Semaphore,
    /// Time of the last probe that the server did not answer.
    silent_at: Mutex<Option<Instant>>,
}

impl ServerProbes {
    /// Waits for a turn, and asks the server whether it answers. Where it has left another probe
    /// without an answer since then, that is the answer to this one.
    pub(super) async fn ask<T>(
        &self,
        asking: impl Future<Output = Result<T, InboxError>>,
    ) -> Result<T, InboxError> {
        let began = Instant::now();
        let _turn = self.turns.acquire().await.expect("it is never closed");
        let silent_at = *self.silent_at.lock().unwrap_or_else(PoisonError::into_inner);
        if silent_at.is_some_and(|at| at >= began) {
            return Err(InboxError::DatabaseUnavailable { retry_after: RECHECK });
        }
        let answer = asking.await;
        if let Err(InboxError::Unreachable(sqlx::Error::Io(_))) = &answer {
            *self.silent_at.lock().unwrap_or_else(PoisonError::into_inner) = Some(Instant::now());
        }
        answer
    }
}

impl Budget {
    /// Makes a budget of this many connections, with default bounds on what runs.
    pub fn new(connections_max: usize) -> Arc<Self> {
        Self::of(connections_max, HostBounds::new(connections_max, MEMORY_BYTES_MAX))
    }

    /// Makes a budget with bounds on what runs; never admits more transactions than connections.
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
            probes: Mutex::default(),
        })
    }

    /// Returns the scheduler that admits transactions. A tenant's changed limits are passed to it.
    pub fn scheduler(&self) -> &Arc<Scheduler> {
        &self.scheduler
    }

    /// Returns the turns of the probes of a server.
    pub(super) fn probes(&self, server: &PgConnectOptions) -> Arc<ServerProbes> {
        let server = format!("{}:{}", server.get_host(), server.get_port());
        let new = || {
            Arc::new(ServerProbes {
                turns: Semaphore::new(PROBES_MAX),
                silent_at: Mutex::default(),
            })
        };
        let mut probes = self.probes.lock().unwrap_or_else(PoisonError::into_inner);
        probes.entry(server).or_insert_with(new).clone()
    }

    /// Waits for a permit for one connection. Where none is left, closes an idle connection, of any
    /// tenant, to make room.
    pub(super) async fn permit(&self) -> OwnedSemaphorePermit {
        if let Ok(permit) = self.permits.clone().try_acquire_owned() {
            return permit;
        }
        self.waiting.fetch_add(1, Ordering::SeqCst);
        let permit = loop {
            self.close_idle();
            // Looks again after a pause: a connection may have become idle just as this wait began.
            if let Ok(permit) =
                tokio::time::timeout(RECHECK, self.permits.clone().acquire_owned()).await
            {
                break permit.expect("the budget is never closed");
            }
        };
        self.waiting.fetch_sub(1, Ordering::SeqCst);
        permit
    }

    /// Returns a permit that no transaction misses: another one is left, and no transaction waits.
    pub(super) fn spare(&self) -> Option<OwnedSemaphorePermit> {
        if self.is_short() {
            return None;
        }
        let permit = self.permits.clone().try_acquire_owned().ok()?;
        (self.permits.available_permits() > 0).then_some(permit)
    }

    /// Returns whether a transaction waits for a permit, so that a connection is better closed than
    /// kept.
    pub(super) fn is_short(&self) -> bool {
        self.waiting.load(Ordering::SeqCst) > 0
    }

    /// Closes the connections of all tenants that were unused for at least this long, so that a
    /// tenant without work holds none. Returns the number of closed connections.
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
            // Closes with a message to the server, whose log would otherwise show a client that
            // vanished.
            let _ = tokio::time::timeout(CONNECT_TIMEOUT, session.connection.close()).await;
        }
        count
    }

    /// Returns the number of connections of all tenants that are open or being opened.
    pub fn in_use(&self) -> usize {
        self.connections_max - self.permits.available_permits()
    }

    /// Closes the idle connection, of any tenant, that is least likely to be used soon. Its last
    /// use but one is the longest ago (LRU-2: O'Neil, O'Neil and Weikum, 1993). By the last use
    /// alone, tenants with long transactions would close the connections of a tenant that has a
    /// short one every now and then.
    pub(super) fn close_idle(&self) {
        let mut tenants = self.tenants.lock().expect("no panic while held");
        tenants.retain(|tenant| tenant.upgrade().is_some());
        let least = tenants
            .iter()
            .filter_map(Weak::upgrade)
            .filter_map(|sessions| Some((sessions.least_used()?, sessions)));
        // Of equal connections the first is closed, so a tenant that was there earlier has no
        // advantage.
        if let Some(((_, backend), sessions)) = least.min_by_key(|(least, _)| *least) {
            drop(sessions.take(backend));
        }
    }
}
