//! Which offsets may be stored: those of settled records, of partitions that are ours,
//! by the worker of the present assignment.

use std::{
    collections::HashMap,
    sync::{Mutex, MutexGuard, PoisonError},
};

use oncebox_inbox::hooks;
use rdkafka::error::KafkaError;

use crate::flow::Partition;

/// Where offsets are stored for the next commit; librdkafka, or a list in tests.
pub(crate) trait OffsetStore {
    /// `next` is the offset of the next record to read, not of the last one settled.
    fn store_offset(&self, partition: &Partition, next: i64) -> Result<(), KafkaError>;
}

/// What an attempt to store came to.
#[derive(Debug)]
pub(crate) enum Stored {
    /// It will be committed.
    Yes,
    /// The partition belongs to somebody else, or to a later assignment.
    NotOurs,
    /// librdkafka refused; the records will come again.
    Failed(KafkaError),
}

/// Assigned partitions and what was stored for them.
#[derive(Default)]
pub(crate) struct Ledger {
    entries: Mutex<HashMap<Partition, Entry>>,
}

struct Entry {
    generation: u64,
    stored: Option<i64>,
}

impl Ledger {
    /// The partition is ours from now on; `generation` names this assignment of it.
    pub(crate) fn assign(&self, partition: Partition, generation: u64) {
        self.entries().insert(partition, Entry { generation, stored: None });
    }

    /// The partitions are no longer ours. Returns what was stored, for a last commit.
    pub(crate) fn revoke<'a>(&self, partitions: impl Iterator<Item = &'a Partition>) -> Vec<(Partition, i64)> {
        let mut entries = self.entries();
        partitions
            .filter_map(|partition| entries.remove_entry(partition))
            .filter_map(|(partition, entry)| Some((partition, entry.stored?)))
            .collect()
    }

    /// Stores an offset under the lock, so that no revocation comes between the check
    /// and the store.
    pub(crate) fn store(&self, to: &impl OffsetStore, partition: &Partition, generation: u64, next: i64) -> Stored {
        let mut entries = self.entries();
        let Some(entry) = entries.get_mut(partition).filter(|entry| entry.generation == generation) else {
            return Stored::NotOurs;
        };
        hooks::point("kafka:ack:before");
        if let Err(error) = to.store_offset(partition, next) {
            return Stored::Failed(error);
        }
        hooks::point("kafka:ack:after");
        entry.stored = Some(next);
        Stored::Yes
    }

    fn entries(&self) -> MutexGuard<'_, HashMap<Partition, Entry>> {
        self.entries.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Default)]
    struct List(Mutex<Vec<i64>>);

    impl OffsetStore for List {
        fn store_offset(&self, _: &Partition, next: i64) -> Result<(), KafkaError> {
            self.0.lock().unwrap().push(next);
            Ok(())
        }
    }

    fn partition() -> Partition {
        Partition { topic: "t".into(), number: 3 }
    }

    #[test]
    fn only_the_present_assignment_stores() {
        let (ledger, list) = (Ledger::default(), List::default());
        assert!(matches!(ledger.store(&list, &partition(), 1, 10), Stored::NotOurs));
        ledger.assign(partition(), 1);
        assert!(matches!(ledger.store(&list, &partition(), 1, 11), Stored::Yes));
        assert_eq!(ledger.revoke([partition()].iter()), vec![(partition(), 11)]);
        assert!(matches!(ledger.store(&list, &partition(), 1, 12), Stored::NotOurs));
        ledger.assign(partition(), 2);
        assert!(matches!(ledger.store(&list, &partition(), 1, 13), Stored::NotOurs));
        assert!(matches!(ledger.store(&list, &partition(), 2, 14), Stored::Yes));
        assert_eq!(*list.0.lock().unwrap(), [11, 14]);
    }

    #[test]
    fn nothing_stored_is_nothing_to_commit() {
        let ledger = Ledger::default();
        ledger.assign(partition(), 1);
        assert!(ledger.revoke([partition()].iter()).is_empty());
    }
}
