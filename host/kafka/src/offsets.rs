//! Which offsets may be stored: those of settled records, of partitions that are ours,
//! by the worker of the present assignment.

use std::{
    collections::HashMap,
    sync::{Mutex, MutexGuard, PoisonError},
};

use oncebox_model::hooks;
use rdkafka::error::KafkaError;

use crate::{flow::Partition, topic_id::TopicId};

/// Where offsets are stored for the next commit; librdkafka, or a list in tests.
pub(crate) trait OffsetStore {
    /// `next` is the offset of the next record to read, not of the last one settled; the topic's id
    /// is noted beside it.
    fn store_offset(
        &self,
        partition: &Partition,
        next: i64,
        topic_id: &TopicId,
    ) -> Result<(), KafkaError>;
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

/// An offset to commit, and the id of the topic that it is of.
pub(crate) type ToCommit = (Partition, i64, TopicId);

/// Assigned partitions and what was stored for them.
#[derive(Default)]
pub(crate) struct Ledger {
    entries: Mutex<HashMap<Partition, Entry>>,
}

struct Entry {
    generation: u64,
    stored: Option<(i64, TopicId)>,
}

impl Ledger {
    /// The partition is ours from now on; `generation` names this assignment of it.
    pub(crate) fn assign(&self, partition: Partition, generation: u64) {
        self.entries().insert(partition, Entry { generation, stored: None });
    }

    /// The partitions are no longer ours. Returns what was stored, for a last commit.
    pub(crate) fn revoke<'a>(
        &self,
        partitions: impl Iterator<Item = &'a Partition>,
    ) -> Vec<ToCommit> {
        let mut entries = self.entries();
        partitions
            .filter_map(|partition| entries.remove_entry(partition))
            .filter_map(|(partition, entry)| {
                entry.stored.map(|(next, topic_id)| (partition, next, topic_id))
            })
            .collect()
    }

    /// The partitions of a topic that are ours, each with its assignment.
    pub(crate) fn of_topic(&self, topic: &str) -> Vec<(Partition, u64)> {
        let entries = self.entries();
        let of_topic = entries.iter().filter(|(partition, _)| &*partition.topic == topic);
        of_topic.map(|(partition, entry)| (partition.clone(), entry.generation)).collect()
    }

    /// Whether the partition is ours by this assignment. Whoever commits past [`Self::store`] asks
    /// right before.
    pub(crate) fn is_ours(&self, partition: &Partition, generation: u64) -> bool {
        self.entries().get(partition).is_some_and(|entry| entry.generation == generation)
    }

    /// Stores an offset under the lock, so that no revocation comes between the check
    /// and the store.
    pub(crate) fn store(
        &self,
        to: &impl OffsetStore,
        partition: &Partition,
        generation: u64,
        next: i64,
        topic_id: &TopicId,
    ) -> Stored {
        let mut entries = self.entries();
        let Some(entry) = entries.get_mut(partition).filter(|entry| entry.generation == generation)
        else {
            return Stored::NotOurs;
        };
        hooks::point("kafka:ack:before");
        if let Err(error) = to.store_offset(partition, next, topic_id) {
            return Stored::Failed(error);
        }
        hooks::point("kafka:ack:after");
        entry.stored = Some((next, topic_id.clone()));
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
        fn store_offset(&self, _: &Partition, next: i64, _: &TopicId) -> Result<(), KafkaError> {
            self.0.lock().unwrap().push(next);
            Ok(())
        }
    }

    fn partition() -> Partition {
        Partition { topic: "t".into(), number: 3 }
    }

    #[test]
    fn only_the_present_assignment_stores() {
        let (ledger, list, id) = (Ledger::default(), List::default(), Some("an-id".into()));
        assert!(matches!(ledger.store(&list, &partition(), 1, 10, &id), Stored::NotOurs));
        ledger.assign(partition(), 1);
        assert!(matches!(ledger.store(&list, &partition(), 1, 11, &id), Stored::Yes));
        assert_eq!(ledger.revoke([partition()].iter()), vec![(partition(), 11, id.clone())]);
        assert!(matches!(ledger.store(&list, &partition(), 1, 12, &id), Stored::NotOurs));
        ledger.assign(partition(), 2);
        assert!(matches!(ledger.store(&list, &partition(), 1, 13, &id), Stored::NotOurs));
        assert!(matches!(ledger.store(&list, &partition(), 2, 14, &id), Stored::Yes));
        assert!(ledger.is_ours(&partition(), 2) && !ledger.is_ours(&partition(), 1));
        assert_eq!((ledger.of_topic("t"), ledger.of_topic("u")), (vec![(partition(), 2)], vec![]));
        assert_eq!(*list.0.lock().unwrap(), [11, 14]);
    }

    #[test]
    fn nothing_stored_is_nothing_to_commit() {
        let ledger = Ledger::default();
        ledger.assign(partition(), 1);
        assert!(ledger.revoke([partition()].iter()).is_empty());
    }
}
