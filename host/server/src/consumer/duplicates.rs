//! Duplicates that this host refused, on their way to the counts of their consumers.

use std::{
    collections::BTreeMap,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
};

use oncebox_control::Control;

/// Counters of the consumers that run here, or did since the counts were reported last.
#[derive(Default)]
pub(crate) struct Duplicates(Mutex<Vec<(i32, Arc<AtomicU64>)>>);

impl Duplicates {
    /// Watches a consumer's counter of refused duplicates for as long as the consumer holds it.
    pub(crate) fn watch(&self, consumer_id: i32, refused: Arc<AtomicU64>) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).push((consumer_id, refused));
    }

    /// Returns the duplicates counted since the last call, by consumer.
    fn take(&self) -> BTreeMap<i32, u64> {
        let mut taken = BTreeMap::new();
        self.0.lock().unwrap_or_else(PoisonError::into_inner).retain(|(consumer_id, refused)| {
            // Read before the swap: a counter that only this list holds counts no more.
            let is_counting = Arc::strong_count(refused) > 1;
            match refused.swap(0, Ordering::AcqRel) {
                0 => {}
                count => *taken.entry(*consumer_id).or_default() += count,
            }
            is_counting
        });
        taken
    }

    /// Adds the duplicates counted since the last call to the consumers' counts, in one statement.
    /// Without any, it sends none.
    pub(crate) async fn report(&self, control: &Control) {
        let taken = self.take();
        if taken.is_empty() {
            return;
        }
        // The counts are not sent again, since the database may have added them: they stay a lower
        // bound.
        if let Err(error) = control.hosts().add_duplicates(&taken).await {
            tracing::warn!(%error, duplicates = taken.values().sum::<u64>(), "failed to report \
                refused duplicates");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_duplicate_is_taken_once_also_of_a_consumer_that_ended() {
        let duplicates = Duplicates::default();
        let (first, again, other) =
            (Arc::new(AtomicU64::new(2)), Arc::new(AtomicU64::new(3)), Arc::new(AtomicU64::new(0)));
        for (consumer_id, counter) in [(1, &first), (1, &again), (2, &other)] {
            duplicates.watch(consumer_id, counter.clone());
        }
        drop(first);
        assert_eq!(duplicates.take(), BTreeMap::from([(1, 5)]));
        assert_eq!(
            duplicates.0.lock().expect("no panic while held").len(),
            2,
            "a counter that ended is forgotten"
        );
        other.fetch_add(7, Ordering::Relaxed);
        assert_eq!(duplicates.take(), BTreeMap::from([(2, 7)]));
        assert_eq!(duplicates.take(), BTreeMap::new());
    }
}
