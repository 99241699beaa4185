//! Wakeups for the retry workers of a consumer.

use std::{
    collections::BTreeSet,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use tokio::{
    sync::Notify,
    time::{Instant, sleep_until},
};

/// Time between two polls of a database.
pub(super) const EVERY: Duration = Duration::from_secs(1);
/// Distance between two planned wakeups, so that they stay few however many messages are due.
const GRAIN: Duration = Duration::from_millis(20);

/// Wakeups for the retry workers of a consumer.
#[derive(Default)]
pub(crate) struct Wakeup {
    /// Signal to one waiting worker.
    notify: Notify,
    /// Planned wakeups.
    set: Mutex<BTreeSet<Instant>>,
    /// True where a [`DuePoller`](super::poller::DuePoller) polls for due messages. Where none
    /// does, workers poll themselves.
    pub(super) is_polled: AtomicBool,
}

impl Wakeup {
    /// Wakes a worker now.
    pub(crate) fn now(&self) {
        self.notify.notify_one();
    }

    /// Wakes a worker after a delay. A delay of two polling intervals or more is left to the
    /// poller.
    pub(crate) fn after(self: &Arc<Self>, delay: Duration) {
        if delay >= 2 * EVERY || !self.is_polled() {
            return;
        }
        if delay.is_zero() {
            return self.now();
        }
        let at = Instant::now() + delay;
        let mut set = self.set();
        if set.range(at..at + GRAIN).next().is_some() {
            return;
        }
        let at = at + GRAIN / 2;
        set.insert(at);
        let due = self.clone();
        tokio::spawn(async move {
            sleep_until(at).await;
            due.set().remove(&at);
            due.now();
        });
    }

    /// Returns whether a poller wakes the workers.
    pub(crate) fn is_polled(&self) -> bool {
        self.is_polled.load(Ordering::Acquire)
    }

    /// Waits for a wakeup.
    pub(crate) async fn wait(&self) {
        self.notify.notified().await;
    }

    /// Locks the planned wakeups.
    fn set(&self) -> MutexGuard<'_, BTreeSet<Instant>> {
        self.set.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
