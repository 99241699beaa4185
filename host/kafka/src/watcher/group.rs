//! The group of one watched consumer, and its lag by the brokers' answers.

use std::{
    collections::{BTreeMap, HashMap},
    sync::Arc,
    time::{Duration, Instant},
};

use oncebox_model::{
    hooks::{self, Defect},
    inbox::ServerRun,
};
use tokio::sync::watch;

use super::Lag;
use crate::{partition::Partition, position, topic_id::TopicId};

/// The longest time without an answer about a group before its lag is unavailable.
const PATIENCE: Duration = Duration::from_secs(5);

/// A group's committed offsets by partition; none where it has committed none.
pub(super) type Committed = BTreeMap<Partition, Option<position::Committed>>;

/// The group of a watched consumer.
pub(super) struct WatchedGroup {
    /// Name of the group.
    pub(super) name: String,
    /// The consumer's topics.
    pub(super) topics: Vec<Arc<str>>,
    /// The committed offsets of the coordinator's last answer; none where it did not answer.
    pub(super) committed: Option<Committed>,
    /// The time to ask the coordinator again: another host or an operator may have moved the group.
    pub(super) ask_at: Instant,
    /// The last time that the lag was known; at first, the time that watching began.
    known_at: Instant,
    /// The run of the database's server, as far as the host knows it.
    server: watch::Receiver<ServerRun>,
    sender: watch::Sender<Lag>,
}

/// Topics by name, from brokers' answers.
pub(super) type Topics = HashMap<Arc<str>, Topic>;
/// The partitions and id of a topic.
#[derive(Debug, Clone, Default)]
pub(super) struct Topic {
    /// Numbers of the partitions; empty where the topic does not exist.
    pub(super) partitions: Vec<i32>,
    pub(super) id: TopicId,
}

/// Offsets by partition, from brokers' answers.
pub(super) type Offsets = HashMap<Partition, i64>;

impl WatchedGroup {
    pub(super) fn new(
        name: String,
        topics: &[String],
        server: watch::Receiver<ServerRun>,
        sender: watch::Sender<Lag>,
    ) -> Self {
        let topics = topics.iter().map(|topic| topic.as_str().into()).collect();
        let now = Instant::now();
        Self { name, topics, committed: None, ask_at: now, known_at: now, server, sender }
    }

    /// Returns whether the subscription is dropped.
    pub(super) fn is_dropped(&self) -> bool {
        self.sender.is_closed()
    }

    /// Returns all partitions of the group's topics; none while a topic is unknown or does not
    /// exist.
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

    /// Returns whether the coordinator is to be asked: the time has come, or there are partitions
    /// that the last answer does not cover.
    pub(super) fn is_due(&self, topics: &Topics) -> bool {
        let knows_all = |committed: &Committed| {
            self.partitions(topics).is_none_or(|partitions| {
                partitions.iter().all(|partition| committed.contains_key(partition))
            })
        };
        self.ask_at <= Instant::now()
            || self.committed.as_ref().is_some_and(|committed| !knows_all(committed))
    }

    /// Returns the partitions without a valid offset: the group never committed one, or only for a
    /// deleted topic of that name.
    pub(super) fn without_offset<'a>(
        &'a self,
        topics: &'a Topics,
    ) -> impl Iterator<Item = &'a Partition> {
        let committed = self.committed.iter().flatten();
        committed
            .filter(move |(partition, committed)| offset(topics, partition, committed).is_none())
            .map(|(partition, _)| partition)
    }

    /// Returns the group's lag; none where an answer is missing that it depends on.
    pub(super) fn lag(&self, topics: &Topics, ends: &Offsets, starts: &Offsets) -> Option<Lag> {
        if self
            .topics
            .iter()
            .any(|topic| topics.get(topic).is_some_and(|topic| topic.partitions.is_empty()))
        {
            // The topic does not exist. A consumer that opens logs that, and notices when the topic
            // is made.
            return Some(Lag::Unavailable);
        }
        let (partitions, committed) = (self.partitions(topics)?, self.committed.as_ref()?);
        let mut lag = Lag::CaughtUp { committed: committed.values().any(Option::is_some) };
        for partition in partitions {
            let (committed, end) = (committed.get(&partition)?, ends.get(&partition)?);
            let is_read = match offset(topics, &partition, committed) {
                // An offset beyond the end means that the topic was truncated, which the consumer
                // has to handle.
                Some(next) => next == *end && self.is_of_server(committed),
                // A group without an offset begins at the first record that exists.
                None => *end == 0 || starts.get(&partition)? == end,
            };
            if !is_read {
                lag = Lag::Behind;
            }
        }
        Some(lag)
    }

    /// Returns whether the offset was acked in the present run of the database's server, as far as
    /// both are known.
    fn is_of_server(&self, committed: &Option<position::Committed>) -> bool {
        let noted = committed.as_ref().and_then(|committed| committed.note.server.as_ref());
        let present = self.server.borrow();
        noted.is_none()
            || present.is_none()
            || noted == present.as_ref()
            || hooks::sabotage(Defect::ServerUnchecked)
    }

    /// Reports the lag to the subscription. Without a lag, reports it as unavailable once the last
    /// known one is too old.
    pub(super) fn report(&mut self, lag: Option<Lag>) {
        let known = match lag {
            Some(lag) => {
                self.known_at = Instant::now();
                lag
            }
            None if self.known_at.elapsed() < PATIENCE => return,
            None => Lag::Unavailable,
        };
        self.sender.send_if_modified(|reported| {
            let changed = *reported != known;
            *reported = known;
            changed
        });
    }
}

/// Returns the committed offset if it is valid in the present topic.
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
    use crate::offsets::OffsetNote;

    fn of_a(offset: i64) -> position::Committed {
        let note = OffsetNote { topic_id: Some("a".into()), server: None };
        position::Committed { offset, note }
    }

    /// A group of which nothing is known yet, and the run of its database's server.
    fn watched(server: Option<&str>) -> WatchedGroup {
        let server = watch::channel(server.map(Into::into)).1;
        WatchedGroup::new("g".to_owned(), &["t".to_owned()], server, watch::channel(Lag::Pending).0)
    }

    fn topics(partitions: &[i32], id: Option<&str>) -> Topics {
        [("t".into(), Topic { partitions: partitions.to_vec(), id: id.map(Into::into) })].into()
    }

    fn partition(number: i32) -> Partition {
        Partition { topic: "t".into(), number }
    }

    /// Returns the lag of a group on a topic of two partitions.
    fn lag(committed: [Option<i64>; 2], ends: &[i64], starts: &[i64]) -> Option<Lag> {
        lag_of(Some("a"), committed, ends, starts)
    }

    /// Returns the lag on a topic with this id; the offsets are of the topic with id `a`.
    fn lag_of(
        id: Option<&str>,
        committed: [Option<i64>; 2],
        ends: &[i64],
        starts: &[i64],
    ) -> Option<Lag> {
        let mut group = watched(None);
        group.committed = Some(
            (0..)
                .zip(committed)
                .map(|(number, offset)| (partition(number), offset.map(of_a)))
                .collect(),
        );
        let offsets = |offsets: &[i64]| {
            (0..).zip(offsets).map(|(number, offset)| (partition(number), *offset)).collect()
        };
        group.lag(&topics(&[0, 1], id), &offsets(ends), &offsets(starts))
    }

    // What could go wrong: a consumer stays closed, and nobody finds out that its database lost the
    // commits of what was acked.
    #[test]
    fn an_offset_of_another_server_is_unread() {
        let lag = |noted: Option<&str>, present| {
            let mut group = watched(present);
            let mut offset = of_a(5);
            offset.note.server = noted.map(Into::into);
            group.committed = Some([(partition(0), Some(offset))].into());
            group.lag(&topics(&[0], Some("a")), &[(partition(0), 5)].into(), &Offsets::new())
        };
        for (noted, present) in
            [(None, None), (None, Some("1")), (Some("1"), None), (Some("1"), Some("1"))]
        {
            assert_eq!(lag(noted, present), Some(Lag::CaughtUp { committed: true }));
        }
        assert_eq!(lag(Some("1"), Some("2")), Some(Lag::Behind));
    }

    #[test]
    fn a_group_is_caught_up_only_by_known_offsets() {
        const CAUGHT_UP: Option<Lag> = Some(Lag::CaughtUp { committed: true });
        assert_eq!(lag([Some(5), Some(7)], &[5, 7], &[]), CAUGHT_UP);
        assert_eq!(lag([Some(5), Some(7)], &[5, 8], &[]), Some(Lag::Behind));
        assert_eq!(
            lag([Some(5), Some(7)], &[5, 6], &[]),
            Some(Lag::Behind),
            "the topic was truncated"
        );
        assert_eq!(lag([Some(5), Some(7)], &[5], &[]), None, "one partition is not known");
        assert_eq!(lag([None, Some(7)], &[0, 7], &[]), CAUGHT_UP);
        assert_eq!(
            lag([None, Some(7)], &[5, 7], &[]),
            None,
            "what is left of the partition is not known"
        );
        assert_eq!(
            lag([None, Some(7)], &[5, 7], &[5]),
            CAUGHT_UP,
            "nothing is left of the partition"
        );
        assert_eq!(lag([None, Some(7)], &[5, 7], &[4]), Some(Lag::Behind));
        assert_eq!(lag([None, None], &[0, 0], &[]), Some(Lag::CaughtUp { committed: false }));
    }

    #[test]
    fn an_offset_of_a_deleted_topic_does_not_count() {
        let other =
            |ends: &[i64], starts: &[i64]| lag_of(Some("b"), [Some(5), Some(7)], ends, starts);
        assert_eq!(other(&[5, 7], &[0, 0]), Some(Lag::Behind), "as long as the one that is gone");
        assert_eq!(other(&[5, 7], &[]), None, "what is left of it is not known");
        assert_eq!(other(&[0, 0], &[]), Some(Lag::CaughtUp { committed: true }));
        assert_eq!(
            lag_of(None, [Some(5), Some(7)], &[5, 7], &[]),
            Some(Lag::CaughtUp { committed: true }),
            "the id is not known"
        );
        let mut group = watched(None);
        group.committed = Some([(partition(0), Some(of_a(5))), (partition(1), None)].into());
        let without = |id| {
            group
                .without_offset(&topics(&[0, 1], id))
                .map(|partition| partition.number)
                .collect::<Vec<_>>()
        };
        assert_eq!(without(Some("a")), [1]);
        assert_eq!(without(Some("b")), [0, 1]);
    }

    #[test]
    fn a_partition_that_is_added_is_asked_about_at_once() {
        let mut group = watched(None);
        assert!(group.is_due(&topics(&[0], None)), "nothing is known");
        group.committed = Some([(partition(0), None)].into());
        group.ask_at = Instant::now() + Duration::from_secs(3_600);
        assert!(!group.is_due(&topics(&[0], None)));
        assert!(group.is_due(&topics(&[0, 1], None)));
    }

    #[test]
    fn an_unknown_topic_is_not_an_empty_one() {
        let mut group = watched(None);
        group.committed = Some(Committed::new());
        assert_eq!(group.lag(&Topics::new(), &Offsets::new(), &Offsets::new()), None);
        assert_eq!(
            group.lag(&topics(&[], None), &Offsets::new(), &Offsets::new()),
            Some(Lag::Unavailable)
        );
    }
}
