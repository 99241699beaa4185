//! The signal to the relay that outgoing messages were committed.

use std::{
    collections::BTreeSet,
    sync::{Mutex, MutexGuard, PoisonError},
};

use tokio::sync::Notify;

/// Most destinations that are remembered between two turns of the relay. Those beyond it are found
/// by the relay's own query, which looks for what is unsent.
const DESTINATIONS_MAX: usize = 10_000;

/// The signal to the relay of this process: destinations with outgoing messages that were committed
/// and are due. It is a hint. The relay finds messages without it, a little later.
#[derive(Debug, Default)]
pub struct OutgoingWakeup {
    destinations: Mutex<BTreeSet<String>>,
    notify: Notify,
}

impl OutgoingWakeup {
    /// Tells the relay of destinations that have something to send.
    pub fn notify(&self, destinations: impl IntoIterator<Item = String>) {
        let mut known = self.destinations();
        let mut is_called = false;
        for destination in destinations {
            is_called = true;
            if known.len() < DESTINATIONS_MAX {
                known.insert(destination);
            }
        }
        drop(known);
        if is_called {
            self.notify.notify_one();
        }
    }

    /// Takes the destinations since the last call.
    pub fn take(&self) -> BTreeSet<String> {
        std::mem::take(&mut *self.destinations())
    }

    /// Waits for a call of [`OutgoingWakeup::notify`]; returns at once where one came since the
    /// last wait.
    pub async fn notified(&self) {
        self.notify.notified().await;
    }

    fn destinations(&self) -> MutexGuard<'_, BTreeSet<String>> {
        self.destinations.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use tokio::time::timeout;

    use super::*;

    async fn is_notified(wakeup: &OutgoingWakeup) -> bool {
        timeout(Duration::from_millis(20), wakeup.notified()).await.is_ok()
    }

    // What could go wrong: a call that comes before the wait is lost, so that its messages wait for
    // the next poll.
    #[tokio::test]
    async fn a_call_before_the_wait_is_kept() {
        let wakeup = OutgoingWakeup::default();
        wakeup.notify([]);
        assert!(!is_notified(&wakeup).await, "nothing is to be sent");
        wakeup.notify(["kafka:a".to_owned(), "kafka:b".to_owned()]);
        wakeup.notify(["kafka:a".to_owned()]);
        assert!(is_notified(&wakeup).await);
        assert_eq!(wakeup.take(), BTreeSet::from(["kafka:a".to_owned(), "kafka:b".to_owned()]));
        assert!(!is_notified(&wakeup).await && wakeup.take().is_empty());
        wakeup.notify(["kafka:a".to_owned()]);
        assert!(is_notified(&wakeup).await);
    }

    // What could go wrong: a tenant that makes up destinations fills the memory of a host.
    #[tokio::test]
    async fn the_destinations_are_bounded() {
        let wakeup = OutgoingWakeup::default();
        wakeup.notify((0..2 * DESTINATIONS_MAX).map(|number| format!("kafka:{number}")));
        assert!(is_notified(&wakeup).await);
        assert_eq!(wakeup.take().len(), DESTINATIONS_MAX);
    }
}
