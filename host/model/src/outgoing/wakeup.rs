//! The signal to the relay that outgoing messages were committed.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{Mutex, MutexGuard, PoisonError},
};

use tokio::sync::Notify;

/// Most destinations of a tenant that are remembered between two turns of the relay. Those beyond
/// it are found by the relay's own query, which looks for what is unsent.
const DESTINATIONS_MAX: usize = 100;

/// Destinations with outgoing messages, by the key of their tenant.
type Destinations = BTreeMap<i32, BTreeSet<String>>;

/// The signal to the relay of this process: destinations with outgoing messages that were committed
/// and are due. It is a hint. The relay finds messages without it, a little later.
#[derive(Debug, Default)]
pub struct OutgoingWakeup {
    destinations: Mutex<Destinations>,
    notify: Notify,
}

impl OutgoingWakeup {
    /// Tells the relay of a tenant's destinations that have something to send.
    pub fn notify(&self, tenant_id: i32, destinations: impl IntoIterator<Item = String>) {
        let mut destinations = destinations.into_iter().peekable();
        if destinations.peek().is_none() {
            return;
        }
        let mut known = self.destinations();
        let of_tenant = known.entry(tenant_id).or_default();
        for destination in destinations {
            if of_tenant.len() >= DESTINATIONS_MAX {
                break;
            }
            of_tenant.insert(destination);
        }
        drop(known);
        self.notify.notify_one();
    }

    /// Takes the destinations since the last call, each with the key of its tenant.
    pub fn take(&self) -> Vec<(i32, String)> {
        let taken = std::mem::take(&mut *self.destinations());
        let of_tenant = |(tenant_id, of): (i32, BTreeSet<String>)| {
            of.into_iter().map(move |destination| (tenant_id, destination))
        };
        taken.into_iter().flat_map(of_tenant).collect()
    }

    /// Waits for a call of [`OutgoingWakeup::notify`]; returns at once where one came since the
    /// last wait.
    pub async fn notified(&self) {
        self.notify.notified().await;
    }

    fn destinations(&self) -> MutexGuard<'_, Destinations> {
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
        wakeup.notify(1, []);
        assert!(!is_notified(&wakeup).await, "nothing is to be sent");
        wakeup.notify(2, ["kafka:a".to_owned(), "kafka:b".to_owned()]);
        wakeup.notify(2, ["kafka:a".to_owned()]);
        wakeup.notify(1, ["kafka:a".to_owned()]);
        assert!(is_notified(&wakeup).await);
        let of = |tenant_id, destination: &str| (tenant_id, destination.to_owned());
        assert_eq!(wakeup.take(), [of(1, "kafka:a"), of(2, "kafka:a"), of(2, "kafka:b")]);
        assert!(!is_notified(&wakeup).await && wakeup.take().is_empty());
        wakeup.notify(1, ["kafka:a".to_owned()]);
        assert!(is_notified(&wakeup).await);
    }

    // What could go wrong: a tenant that makes up destinations fills the memory of a host, or the
    // relay forgets those of others for them.
    #[tokio::test]
    async fn the_destinations_of_a_tenant_are_bounded() {
        let wakeup = OutgoingWakeup::default();
        wakeup.notify(1, (0..2 * DESTINATIONS_MAX).map(|number| format!("kafka:{number}")));
        wakeup.notify(2, ["kafka:a".to_owned()]);
        assert!(is_notified(&wakeup).await);
        let taken = wakeup.take();
        assert_eq!(taken.len(), DESTINATIONS_MAX + 1);
        assert_eq!(taken.last(), Some(&(2, "kafka:a".to_owned())));
    }
}
