//! One watched consumer, and what follows from what brokers say.

use std::{
    collections::{BTreeMap, HashMap},
    sync::Arc,
    time::{Duration, Instant},
};

use tokio::sync::watch;

use super::Sight;
use crate::{flow::Partition, position, topic_id::TopicId};

/// How long brokers may leave a question about a consumer unanswered before it counts as one that
/// cannot be told.
const PATIENCE: Duration = Duration::from_secs(5);

/// The group's offsets, where it has any.
pub(super) type Committed = BTreeMap<Partition, Option<position::Committed>>;

/// A watched consumer.
pub(super) struct Subject {
    pub(super) group: String,
    pub(super) topics: Vec<Arc<str>>,
    /// As of the last time that the group's coordinator was asked.
    pub(super) committed: Option<Committed>,
    /// When to ask the coordinator again: another host or a person may have moved the group.
    pub(super) ask_at: Instant,
    /// The last time that everything about it was known, or when it came.
    known_at: Instant,
    tell: watch::Sender<Sight>,
}

/// What brokers told of topics.
pub(super) type Topics = HashMap<Arc<str>, Topic>;
/// A topic.
#[derive(Debug, Clone, Default)]
pub(super) struct Topic {
    /// Its partitions; none where it does not exist.
    pub(super) partitions: Vec<i32>,
    pub(super) id: TopicId,
}

/// Offsets that brokers told, by partition.
pub(super) type Offsets = HashMap<Partition, i64>;

impl Subject {
    pub(super) fn new(group: String, topics: &[String], tell: watch::Sender<Sight>) -> Self {
        let topics = topics.iter().map(|topic| topic.as_str().into()).collect();
        let now = Instant::now();
        Self { group, topics, committed: None, ask_at: now, known_at: now, tell }
    }

    /// Whether nobody asks for it any more.
    pub(super) fn is_dropped(&self) -> bool {
        self.tell.is_closed()
    }

    /// All partitions of its topics; none while one of its topics is not known.
    pub(super) fn partitions(&self, topics: &Topics) -> Option<Vec<Partition>> {
        let mut partitions = Vec::new();
        for topic in &self.topics {
            let numbers =
                &topics.get(topic).filter(|topic| !topic.partitions.is_empty())?.partitions;
            partitions.extend(
                numbers
                    .iter()
                    .map(|number| Partition { topic: Arc::clone(topic), number: *number }),
            );
        }
        Some(partitions)
    }

    /// Whether the coordinator is to be asked: it is time, or there are partitions that it was not
    /// asked about.
    pub(super) fn is_due(&self, topics: &Topics) -> bool {
        let knows_all = |committed: &Committed| {
            self.partitions(topics).is_none_or(|partitions| {
                partitions.iter().all(|partition| committed.contains_key(partition))
            })
        };
        self.ask_at <= Instant::now()
            || self.committed.as_ref().is_some_and(|committed| !knows_all(committed))
    }

    /// The partitions whose group has no offset: never one, or only of a topic of that name that is
    /// gone.
    pub(super) fn without_offset<'a>(
        &'a self,
        topics: &'a Topics,
    ) -> impl Iterator<Item = &'a Partition> {
        let committed = self.committed.iter().flatten();
        committed
            .filter(move |(partition, committed)| offset(topics, partition, committed).is_none())
            .map(|(partition, _)| partition)
    }

    /// What is there to read, as far as it is known.
    pub(super) fn judge(&self, topics: &Topics, ends: &Offsets, starts: &Offsets) -> Option<Sight> {
        if self
            .topics
            .iter()
            .any(|topic| topics.get(topic).is_some_and(|topic| topic.partitions.is_empty()))
        {
            // It does not exist; a consumer says so, and notices when it is made.
            return Some(Sight::Blind);
        }
        let (partitions, committed) = (self.partitions(topics)?, self.committed.as_ref()?);
        let mut sight = Sight::Nothing { committed: committed.values().any(Option::is_some) };
        for partition in partitions {
            let (committed, end) = (committed.get(&partition)?, ends.get(&partition)?);
            let is_read = match offset(topics, &partition, committed) {
                // Beyond the end, the topic was truncated, which is for the consumer to see.
                Some(next) => next == *end,
                // A group without an offset begins at the first record there is.
                None => *end == 0 || starts.get(&partition)? == end,
            };
            if !is_read {
                sight = Sight::Something;
            }
        }
        Some(sight)
    }

    /// Tell whoever asks.
    pub(super) fn tell(&mut self, sight: Option<Sight>) {
        let known = match sight {
            Some(sight) => {
                self.known_at = Instant::now();
                sight
            }
            None if self.known_at.elapsed() < PATIENCE => return,
            None => Sight::Blind,
        };
        self.tell.send_if_modified(|told| {
            let changed = *told != known;
            *told = known;
            changed
        });
    }
}

/// The offset that means something in the topic that there is.
fn offset(
    topics: &Topics,
    partition: &Partition,
    committed: &Option<position::Committed>,
) -> Option<i64> {
    let id = topics.get(&partition.topic).map_or(&None, |topic| &topic.id);
    committed.as_ref().filter(|committed| committed.is_of(id)).map(|committed| committed.offset)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of_a(offset: i64) -> position::Committed {
        position::Committed { offset, topic_id: Some("a".into()) }
    }

    fn topics(partitions: &[i32], id: Option<&str>) -> Topics {
        [("t".into(), Topic { partitions: partitions.to_vec(), id: id.map(Into::into) })].into()
    }

    fn partition(number: i32) -> Partition {
        Partition { topic: "t".into(), number }
    }

    /// A consumer of a topic with two partitions: what the group committed, and the ends.
    fn judge(committed: [Option<i64>; 2], ends: &[i64], starts: &[i64]) -> Option<Sight> {
        judge_of(Some("a"), committed, ends, starts)
    }

    /// The same, of a topic with another id than the offsets are of.
    fn judge_of(
        id: Option<&str>,
        committed: [Option<i64>; 2],
        ends: &[i64],
        starts: &[i64],
    ) -> Option<Sight> {
        let mut subject =
            Subject::new("g".to_owned(), &["t".to_owned()], watch::channel(Sight::Unknown).0);
        subject.committed = Some(
            (0..)
                .zip(committed)
                .map(|(number, offset)| (partition(number), offset.map(of_a)))
                .collect(),
        );
        let offsets = |offsets: &[i64]| {
            (0..).zip(offsets).map(|(number, offset)| (partition(number), *offset)).collect()
        };
        subject.judge(&topics(&[0, 1], id), &offsets(ends), &offsets(starts))
    }

    #[test]
    fn nothing_to_read_is_said_of_what_is_known_alone() {
        const NOTHING: Option<Sight> = Some(Sight::Nothing { committed: true });
        assert_eq!(judge([Some(5), Some(7)], &[5, 7], &[]), NOTHING);
        assert_eq!(judge([Some(5), Some(7)], &[5, 8], &[]), Some(Sight::Something));
        assert_eq!(
            judge([Some(5), Some(7)], &[5, 6], &[]),
            Some(Sight::Something),
            "the topic was truncated"
        );
        assert_eq!(judge([Some(5), Some(7)], &[5], &[]), None, "one partition is not known");
        assert_eq!(judge([None, Some(7)], &[0, 7], &[]), NOTHING);
        assert_eq!(
            judge([None, Some(7)], &[5, 7], &[]),
            None,
            "what is left of the partition is not known"
        );
        assert_eq!(
            judge([None, Some(7)], &[5, 7], &[5]),
            NOTHING,
            "nothing is left of the partition"
        );
        assert_eq!(judge([None, Some(7)], &[5, 7], &[4]), Some(Sight::Something));
        assert_eq!(judge([None, None], &[0, 0], &[]), Some(Sight::Nothing { committed: false }));
    }

    #[test]
    fn an_offset_of_a_topic_that_is_gone_is_none() {
        let other =
            |ends: &[i64], starts: &[i64]| judge_of(Some("b"), [Some(5), Some(7)], ends, starts);
        assert_eq!(
            other(&[5, 7], &[0, 0]),
            Some(Sight::Something),
            "as long as the one that is gone"
        );
        assert_eq!(other(&[5, 7], &[]), None, "what is left of it is not known");
        assert_eq!(other(&[0, 0], &[]), Some(Sight::Nothing { committed: true }));
        assert_eq!(
            judge_of(None, [Some(5), Some(7)], &[5, 7], &[]),
            Some(Sight::Nothing { committed: true }),
            "the id is not known"
        );
        let mut subject =
            Subject::new("g".to_owned(), &["t".to_owned()], watch::channel(Sight::Unknown).0);
        subject.committed = Some([(partition(0), Some(of_a(5))), (partition(1), None)].into());
        let without = |id| {
            subject
                .without_offset(&topics(&[0, 1], id))
                .map(|partition| partition.number)
                .collect::<Vec<_>>()
        };
        assert_eq!(without(Some("a")), [1]);
        assert_eq!(without(Some("b")), [0, 1]);
    }

    #[test]
    fn a_partition_that_is_added_is_asked_about_at_once() {
        let mut subject =
            Subject::new("g".to_owned(), &["t".to_owned()], watch::channel(Sight::Unknown).0);
        assert!(subject.is_due(&topics(&[0], None)), "nothing is known");
        subject.committed = Some([(partition(0), None)].into());
        subject.ask_at = Instant::now() + Duration::from_secs(3_600);
        assert!(!subject.is_due(&topics(&[0], None)));
        assert!(subject.is_due(&topics(&[0, 1], None)));
    }

    #[test]
    fn a_topic_that_nobody_knows_is_not_an_empty_one() {
        let mut subject =
            Subject::new("g".to_owned(), &["t".to_owned()], watch::channel(Sight::Unknown).0);
        subject.committed = Some(Committed::new());
        assert_eq!(subject.judge(&Topics::new(), &Offsets::new(), &Offsets::new()), None);
        assert_eq!(
            subject.judge(&topics(&[], None), &Offsets::new(), &Offsets::new()),
            Some(Sight::Blind)
        );
    }
}
