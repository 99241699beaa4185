//! When the workers of a consumer have something to do.

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

use super::poller::EVERY;

/// Moments at which workers are woken are this far apart, so that there are few of them however
/// much is due.
const GRAIN: Duration = Duration::from_millis(20);

/// When the workers of a consumer have something to do.
#[derive(Default)]
pub(crate) struct Due {
    bell: Notify,
    /// Moments at which the bell rings.
    set: Mutex<BTreeSet<Instant>>,
    /// Whether a [`Lookout`](super::poller::Lookout) tells what is due. Where none does, workers look for themselves.
    pub(super) is_told: AtomicBool,
}

impl Due {
    /// Something is due now.
    pub(crate) fn now(&self) {
        self.bell.notify_one();
    }

    /// Something is due after a while. What is far off is left to a look.
    pub(crate) fn after(self: &Arc<Self>, delay: Duration) {
        if delay >= 2 * EVERY || !self.is_told() {
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

    /// Whether a look tells what is due.
    pub(crate) fn is_told(&self) -> bool {
        self.is_told.load(Ordering::Acquire)
    }

    /// Wait for something to be due.
    pub(crate) async fn wait(&self) {
        self.bell.notified().await;
    }

    fn set(&self) -> MutexGuard<'_, BTreeSet<Instant>> {
        self.set.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
