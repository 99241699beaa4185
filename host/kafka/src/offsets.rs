//! The offsets that may be stored: those of settled records, of partitions that are assigned to
//! this consumer, by the worker of the present assignment. Each is stored with the topic's id in
//! its note.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use oncebox_model::hooks::{self, Defect};
use rdkafka::{
    Offset, TopicPartitionList,
    consumer::Consumer as _,
    error::{KafkaError, KafkaResult},
};

use crate::{client::Client, partition::Partition, topic_id::TopicId};

/// A store of offsets for the next commit: librdkafka, or a list in tests.
pub(crate) trait OffsetStore {
    /// Stores an offset with the topic's id noted beside it. `next` is the offset of the next
    /// record to read, not of the last settled one.
    fn store_offset(
        &self,
        partition: &Partition,
        next: i64,
        topic_id: &TopicId,
    ) -> Result<(), KafkaError>;
}

/// The result of an attempt to store an offset.
#[derive(Debug)]
pub(crate) enum Stored {
    /// The offset is stored, and the next commit includes it.
    Yes,
    /// The partition belongs to another member of the group, or to a later assignment.
    NotOurs,
    /// librdkafka refused the offset; the records are redelivered.
    Failed(KafkaError),
}

/// A partition, the offset to commit for it, and the id of its topic.
pub(crate) type ToCommit = (Partition, i64, TopicId);

/// The assigned partitions and the last offset stored for each.
#[derive(Default)]
pub(crate) struct OffsetTracker {
    entries: Mutex<HashMap<Partition, TrackedPartition>>,
}

/// One assigned partition.
struct TrackedPartition {
    /// Number of the assignment.
    generation: u64,
    /// The last stored offset, with the id of its topic; none before the first.
    stored: Option<(i64, TopicId)>,
}

impl OffsetTracker {
    /// Adds a partition; `generation` names this assignment of it.
    pub(crate) fn assign(&self, partition: Partition, generation: u64) {
        self.entries().insert(partition, TrackedPartition { generation, stored: None });
    }

    /// Removes partitions, and returns their stored offsets for a last commit.
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

    /// Returns the assigned partitions of a topic, each with its assignment.
    pub(crate) fn of_topic(&self, topic: &str) -> Vec<(Partition, u64)> {
        let entries = self.entries();
        let of_topic = entries.iter().filter(|(partition, _)| &*partition.topic == topic);
        of_topic.map(|(partition, entry)| (partition.clone(), entry.generation)).collect()
    }

    /// Returns whether the partition is assigned by this assignment. A caller that commits without
    /// [`Self::store`] checks this right before.
    pub(crate) fn is_ours(&self, partition: &Partition, generation: u64) -> bool {
        self.entries().get(partition).is_some_and(|entry| entry.generation == generation)
    }

    /// Stores an offset under the lock, so that no revocation comes between the check and the
    /// store.
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

    fn entries(&self) -> MutexGuard<'_, HashMap<Partition, TrackedPartition>> {
        self.entries.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl OffsetStore for Client {
    fn store_offset(
        &self,
        partition: &Partition,
        next: i64,
        topic_id: &TopicId,
    ) -> Result<(), KafkaError> {
        // `Consumer::store_offset` would add one, which is wrong where offsets have gaps.
        let mut list = TopicPartitionList::new();
        add_offset(&mut list, &partition.topic, partition.number, next, topic_id)?;
        self.consumer.store_offsets(&list)
    }
}

/// Adds an offset to a list, with the topic's id noted beside it. Every offset that is stored or
/// committed passes through this function.
pub(crate) fn add_offset(
    list: &mut TopicPartitionList,
    topic: &str,
    partition: i32,
    next: i64,
    topic_id: &TopicId,
) -> KafkaResult<()> {
    let mut element = list.add_partition(topic, partition);
    element.set_offset(Offset::Offset(next))?;
    let note = note(topic_id);
    if !note.is_empty() {
        element.set_metadata(note);
    }
    Ok(())
}

/// The first word of this program's notes beside an offset. Other programs may note anything.
const OURS: &str = "oncebox";
/// The beginning of the word that holds the topic's id.
const TOPIC_ID: &str = "topic-id=";

/// Returns the note to commit beside an offset of the topic with that id.
fn note(topic_id: &TopicId) -> String {
    let noted = topic_id.as_ref().filter(|_| !hooks::sabotage(Defect::TopicIdNotNoted));
    noted.map_or_else(String::new, |id| format!("{OURS} {TOPIC_ID}{id}"))
}

/// Returns the topic's id from a note beside an offset, if this program wrote the note.
pub(crate) fn noted(note: &[u8]) -> TopicId {
    let mut words = std::str::from_utf8(note).ok()?.split(' ');
    words.next().filter(|word| *word == OURS)?;
    words.find_map(|word| word.strip_prefix(TOPIC_ID)).filter(|id| !id.is_empty()).map(Arc::from)
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
        let (tracker, list, id) = (OffsetTracker::default(), List::default(), Some("an-id".into()));
        assert!(matches!(tracker.store(&list, &partition(), 1, 10, &id), Stored::NotOurs));
        tracker.assign(partition(), 1);
        assert!(matches!(tracker.store(&list, &partition(), 1, 11, &id), Stored::Yes));
        assert_eq!(tracker.revoke([partition()].iter()), vec![(partition(), 11, id.clone())]);
        assert!(matches!(tracker.store(&list, &partition(), 1, 12, &id), Stored::NotOurs));
        tracker.assign(partition(), 2);
        assert!(matches!(tracker.store(&list, &partition(), 1, 13, &id), Stored::NotOurs));
        assert!(matches!(tracker.store(&list, &partition(), 2, 14, &id), Stored::Yes));
        assert!(tracker.is_ours(&partition(), 2) && !tracker.is_ours(&partition(), 1));
        assert_eq!(
            (tracker.of_topic("t"), tracker.of_topic("u")),
            (vec![(partition(), 2)], vec![])
        );
        assert_eq!(*list.0.lock().unwrap(), [11, 14]);
    }

    #[test]
    fn nothing_stored_is_nothing_to_commit() {
        let tracker = OffsetTracker::default();
        tracker.assign(partition(), 1);
        assert!(tracker.revoke([partition()].iter()).is_empty());
    }

    #[test]
    fn a_note_of_another_program_is_no_topic() {
        let id: TopicId = Some("cGkQNj1IQ2iKZ4wCjoO8jg".into());
        assert_eq!(noted(note(&id).as_bytes()), id);
        assert_eq!(noted(format!("{} more=1", note(&id)).as_bytes()), id);
        assert_eq!(note(&None), "");
        for other in [
            &b""[..],
            b"oncebox",
            b"oncebox topic-id=",
            b"topic-id=a",
            b"another topic-id=a",
            b"\xff\xfe",
            b"oncebox \xff topic-id=a",
        ] {
            assert_eq!(noted(other), None, "{other:?}");
        }
    }
}
