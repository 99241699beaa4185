//! The offsets that may be stored: those of settled records, of partitions that are assigned to
//! this consumer, by the worker of the present assignment. Each is stored with a note: the topic's
//! id, and the run of the database server in which the records before it were settled.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use oncebox_model::{
    hooks::{self, Defect},
    inbox::ServerRun,
};
use rdkafka::{
    Offset, TopicPartitionList,
    consumer::Consumer as _,
    error::{KafkaError, KafkaResult},
};

use crate::{client::Client, partition::Partition, topic_id::TopicId};

/// A store of offsets for the next commit: librdkafka, or a list in tests.
pub(crate) trait OffsetStore {
    /// Stores an offset with a note beside it. `next` is the offset of the next record to read, not
    /// of the last settled one.
    fn store_offset(
        &self,
        partition: &Partition,
        next: i64,
        note: &OffsetNote,
    ) -> Result<(), KafkaError>;
}

/// What a host notes beside an offset.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct OffsetNote {
    /// The topic's id. The offset is invalid in another topic of that name.
    pub(crate) topic_id: TopicId,
    /// Server run of the database that has the records before the offset.
    pub(crate) server: ServerRun,
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

/// A partition, the offset to commit for it, and the note beside it.
pub(crate) type ToCommit = (Partition, i64, OffsetNote);

/// The assigned partitions and the last offset stored for each.
#[derive(Default)]
pub(crate) struct OffsetTracker {
    entries: Mutex<HashMap<Partition, TrackedPartition>>,
}

/// One assigned partition.
struct TrackedPartition {
    /// Number of the assignment.
    generation: u64,
    /// The last stored offset, with its note; none before the first.
    stored: Option<(i64, OffsetNote)>,
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
                entry.stored.map(|(next, note)| (partition, next, note))
            })
            .collect()
    }

    /// Returns the assigned partitions, each with its assignment.
    pub(crate) fn assigned(&self) -> Vec<(Partition, u64)> {
        let entries = self.entries();
        entries.iter().map(|(partition, entry)| (partition.clone(), entry.generation)).collect()
    }

    /// Returns the assigned partitions of a topic, each with its assignment.
    pub(crate) fn of_topic(&self, topic: &str) -> Vec<(Partition, u64)> {
        let mut assigned = self.assigned();
        assigned.retain(|(partition, _)| &*partition.topic == topic);
        assigned
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
        note: &OffsetNote,
    ) -> Stored {
        let mut entries = self.entries();
        let Some(entry) = entries.get_mut(partition).filter(|entry| entry.generation == generation)
        else {
            return Stored::NotOurs;
        };
        hooks::point("kafka:ack:before");
        if let Err(error) = to.store_offset(partition, next, note) {
            return Stored::Failed(error);
        }
        hooks::point("kafka:ack:after");
        entry.stored = Some((next, note.clone()));
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
        note: &OffsetNote,
    ) -> Result<(), KafkaError> {
        // `Consumer::store_offset` would add one, which is wrong where offsets have gaps.
        let mut list = TopicPartitionList::new();
        add_offset(&mut list, &partition.topic, partition.number, next, note)?;
        self.consumer.store_offsets(&list)
    }
}

/// Adds an offset to a list, with its note. Every offset that is stored or committed passes through
/// this function.
pub(crate) fn add_offset(
    list: &mut TopicPartitionList,
    topic: &str,
    partition: i32,
    next: i64,
    note: &OffsetNote,
) -> KafkaResult<()> {
    let mut element = list.add_partition(topic, partition);
    element.set_offset(Offset::Offset(next))?;
    let text = note.to_text();
    if !text.is_empty() {
        element.set_metadata(text);
    }
    Ok(())
}

/// The first word of this program's notes beside an offset. Other programs may note anything.
const OURS: &str = "oncebox";
/// The beginning of the word that holds the topic's id.
const TOPIC_ID: &str = "topic-id=";
/// The beginning of the word that holds the run of the database server.
const SERVER: &str = "server=";

impl OffsetNote {
    /// Returns the text to commit beside an offset; empty where there is nothing to note.
    fn to_text(&self) -> String {
        let topic_id = self.topic_id.as_ref().filter(|_| !hooks::sabotage(Defect::TopicIdNotNoted));
        let words = [(TOPIC_ID, topic_id), (SERVER, self.server.as_ref())];
        let words = words.map(|(name, value)| value.map(|value| format!(" {name}{value}")));
        let words: String = words.into_iter().flatten().collect();
        if words.is_empty() { words } else { format!("{OURS}{words}") }
    }

    /// Reads the text beside an offset. One that another program wrote notes nothing.
    pub(crate) fn of(text: &[u8]) -> Self {
        let text = std::str::from_utf8(text).unwrap_or_default();
        let Some(words) = text.strip_prefix(OURS).and_then(|rest| rest.strip_prefix(' ')) else {
            return Self::default();
        };
        let word = |name| {
            let found = words.split(' ').find_map(|word| word.strip_prefix(name));
            found.filter(|value| !value.is_empty()).map(Arc::from)
        };
        Self { topic_id: word(TOPIC_ID), server: word(SERVER) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Default)]
    struct List(Mutex<Vec<i64>>);

    impl OffsetStore for List {
        fn store_offset(&self, _: &Partition, next: i64, _: &OffsetNote) -> Result<(), KafkaError> {
            self.0.lock().unwrap().push(next);
            Ok(())
        }
    }

    fn partition() -> Partition {
        Partition { topic: "t".into(), number: 3 }
    }

    #[test]
    fn only_the_present_assignment_stores() {
        let (tracker, list) = (OffsetTracker::default(), List::default());
        let id = OffsetNote { topic_id: Some("an-id".into()), server: None };
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
    fn a_note_of_another_program_says_nothing() {
        let (id, server) = (Some("cGkQNj1IQ2iKZ4wCjoO8jg".into()), Some("1795837".into()));
        for (topic_id, server) in [(&id, &None), (&None, &server), (&id, &server)] {
            let note = OffsetNote { topic_id: topic_id.clone(), server: server.clone() };
            assert_eq!(OffsetNote::of(note.to_text().as_bytes()), note);
            assert_eq!(OffsetNote::of(format!("{} more=1", note.to_text()).as_bytes()), note);
        }
        assert_eq!(OffsetNote::default().to_text(), "");
        for other in [
            &b""[..],
            b"oncebox",
            b"oncebox topic-id=",
            b"topic-id=a",
            b"another topic-id=a",
            b"\xff\xfe",
            b"oncebox \xff topic-id=a",
        ] {
            assert_eq!(OffsetNote::of(other), OffsetNote::default(), "{other:?}");
        }
    }
}
