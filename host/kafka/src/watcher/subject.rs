//! One watched consumer, and what follows from what brokers say.

use std::{
    collections::{BTreeMap, HashMap},
    sync::Arc,
    time::{Duration, Instant},
};

use tokio::sync::watch;

use super::Sight;
use crate::flow::Partition;

/// How long brokers may leave a question about a consumer unanswered before it counts as one that cannot be
/// told.
const PATIENCE: Duration = Duration::from_secs(5);

/// The group's offsets, where it has any.
pub(super) type Committed = BTreeMap<Partition, Option<i64>>;

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

/// The partitions that brokers told of, by topic; none of a topic that does not exist.
pub(super) type Topics = HashMap<Arc<str>, Vec<i32>>;
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
            let numbers = topics.get(topic).filter(|numbers| !numbers.is_empty())?;
            partitions.extend(numbers.iter().map(|number| Partition { topic: Arc::clone(topic), number: *number }));
        }
        Some(partitions)
    }

    /// What is there to read, as far as it is known.
    pub(super) fn judge(&self, topics: &Topics, ends: &Offsets, starts: &Offsets) -> Option<Sight> {
        if self.topics.iter().any(|topic| topics.get(topic).is_some_and(Vec::is_empty)) {
            // It does not exist; a consumer says so, and notices when it is made.
            return Some(Sight::Blind);
        }
        let (partitions, committed) = (self.partitions(topics)?, self.committed.as_ref()?);
        let mut sight = Sight::Nothing { committed: committed.values().any(Option::is_some) };
        for partition in partitions {
            let (committed, end) = (committed.get(&partition)?, ends.get(&partition)?);
            let is_read = match committed {
                // Beyond the end, the topic was truncated or made anew, which is for the consumer to see.
                Some(next) => next == end,
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

#[cfg(test)]
mod tests {
    use super::*;

    fn partition(number: i32) -> Partition {
        Partition { topic: "t".into(), number }
    }

    /// A consumer of a topic with two partitions: what the group committed, and the ends.
    fn judge(committed: [Option<i64>; 2], ends: &[i64], starts: &[i64]) -> Option<Sight> {
        let mut subject = Subject::new("g".to_owned(), &["t".to_owned()], watch::channel(Sight::Unknown).0);
        subject.committed = Some((0..).zip(committed).map(|(number, offset)| (partition(number), offset)).collect());
        let offsets = |offsets: &[i64]| (0..).zip(offsets).map(|(number, offset)| (partition(number), *offset)).collect();
        subject.judge(&[("t".into(), vec![0, 1])].into(), &offsets(ends), &offsets(starts))
    }

    #[test]
    fn nothing_to_read_is_said_of_what_is_known_alone() {
        const NOTHING: Option<Sight> = Some(Sight::Nothing { committed: true });
        assert_eq!(judge([Some(5), Some(7)], &[5, 7], &[]), NOTHING);
        assert_eq!(judge([Some(5), Some(7)], &[5, 8], &[]), Some(Sight::Something));
        assert_eq!(judge([Some(5), Some(7)], &[5, 6], &[]), Some(Sight::Something), "the topic was made anew");
        assert_eq!(judge([Some(5), Some(7)], &[5], &[]), None, "one partition is not known");
        assert_eq!(judge([None, Some(7)], &[0, 7], &[]), NOTHING);
        assert_eq!(judge([None, Some(7)], &[5, 7], &[]), None, "what is left of the partition is not known");
        assert_eq!(judge([None, Some(7)], &[5, 7], &[5]), NOTHING, "nothing is left of the partition");
        assert_eq!(judge([None, Some(7)], &[5, 7], &[4]), Some(Sight::Something));
        assert_eq!(judge([None, None], &[0, 0], &[]), Some(Sight::Nothing { committed: false }));
    }

    #[test]
    fn a_topic_that_nobody_knows_is_not_an_empty_one() {
        let mut subject = Subject::new("g".to_owned(), &["t".to_owned()], watch::channel(Sight::Unknown).0);
        subject.committed = Some(Committed::new());
        assert_eq!(subject.judge(&Topics::new(), &Offsets::new(), &Offsets::new()), None);
        assert_eq!(subject.judge(&[("t".into(), Vec::new())].into(), &Offsets::new(), &Offsets::new()), Some(Sight::Blind));
    }
}
