//! The watcher's thread: receives groups, asks brokers about all of them in a few requests, and
//! reports each group's lag.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap, VecDeque},
    sync::{
        Arc,
        mpsc::{Receiver, RecvTimeoutError},
    },
    thread,
    time::{Duration, Instant},
};

use rdkafka::{ClientConfig, config::RDKafkaLogLevel};

use super::{
    Lag,
    ask::{Asker, Offset, WatcherContext},
    group::{Offsets, Topics, WatchedGroup},
};
use crate::{error::ConsumerError, partition::Partition};

/// The shortest pause between two polls.
const PAUSE: Duration = Duration::from_millis(250);
/// The longest pause; a record that arrives during it waits for its end.
const PAUSE_MAX: Duration = Duration::from_secs(2);
/// The reciprocal of the share of a watcher's time that polls may take, up to the longest pause.
const SHARE: u32 = 4;
/// The partitions of one poll; where there are more, groups take turns.
const PARTITIONS_MAX: usize = 4_000;
/// The most groups whose offsets one poll asks for.
const GROUPS_MAX: usize = 256;
/// The longest age of a group's offsets while nothing shows that they moved. The actual age is
/// spread, so that not all groups are due at once.
const GROUP_FRESH: Duration = Duration::from_secs(30);
/// The longest age of a topic's partitions and id: it may get new partitions, or be made again.
const TOPICS_FRESH: Duration = Duration::from_secs(3);
/// The time that a watcher without consumers stays.
const LINGER: Duration = Duration::from_secs(60);

/// The state of the watcher's thread.
pub(super) struct Poll {
    asker: Asker,
    incoming: Receiver<WatchedGroup>,
    /// The watched groups; the group at the front has waited longest.
    groups: VecDeque<WatchedGroup>,
    topics: Topics,
    /// The time of each topic's last answer.
    topics_at: HashMap<Arc<str>, Instant>,
    /// The last time that there were groups to watch.
    busy_at: Instant,
}

impl Poll {
    /// Starts a watcher's thread.
    pub(super) fn start(
        properties: &BTreeMap<String, String>,
        secrets: &[String],
        incoming: Receiver<WatchedGroup>,
    ) -> Result<(), ConsumerError> {
        let mut config = ClientConfig::new();
        config
            .set_log_level(RDKafkaLogLevel::Warning)
            .set("client.id", "oncebox-watcher")
            .set("enable.auto.commit", "false");
        // The longest time that librdkafka trusts a coordinator that has moved.
        config.set("metadata.max.age.ms", "30000");
        for (name, value) in properties {
            config.set(name, value);
        }
        // The client never joins this group. Without one, librdkafka 2.12 dereferences null when a
        // coordinator of any group answers that it is not, or not yet, the coordinator.
        config.set("group.id", "oncebox.watcher");
        let client = config
            .create_with_context(WatcherContext)
            .map_err(|error| ConsumerError::from_creation(error, secrets))?;
        let poll = Self {
            asker: Asker::new(client),
            incoming,
            groups: VecDeque::new(),
            topics: Topics::new(),
            topics_at: HashMap::new(),
            busy_at: Instant::now(),
        };
        let spawned =
            thread::Builder::new().name("oncebox-watch".to_owned()).spawn(move || poll.run());
        spawned.map(drop).map_err(|error| ConsumerError::Client {
            text: format!("no thread to watch on: {error}"),
        })
    }

    /// Polls until no groups are left, and none can arrive or none has arrived for a while.
    fn run(mut self) {
        let mut pause = Duration::ZERO;
        while self.receive(pause) {
            let began = Instant::now();
            self.asker.serve();
            self.poll();
            pause = (began.elapsed() * (SHARE - 1)).clamp(PAUSE, PAUSE_MAX);
        }
    }

    /// Waits for the time of the next poll, or for new groups, which are polled soon. Returns false
    /// when there is no work left.
    fn receive(&mut self, pause: Duration) -> bool {
        self.groups.retain(|group| !group.is_dropped());
        if self.groups.is_empty() {
            (self.topics, self.topics_at) = Default::default();
        } else {
            self.busy_at = Instant::now();
        }
        let (until, mut open) = (Instant::now() + pause, true);
        let mut fresh = Vec::new();
        loop {
            // Groups that arrive together are polled together.
            let limit =
                if fresh.is_empty() { until } else { until.min(Instant::now() + PAUSE / 10) };
            match self.incoming.recv_timeout(limit.saturating_duration_since(Instant::now())) {
                Ok(group) => fresh.push(group),
                Err(RecvTimeoutError::Timeout) => break,
                Err(RecvTimeoutError::Disconnected) => {
                    open = false;
                    thread::sleep(limit.saturating_duration_since(Instant::now()));
                    break;
                }
            }
            if fresh.len() >= GROUPS_MAX {
                break;
            }
        }
        fresh.into_iter().rev().for_each(|group| self.groups.push_front(group));
        !self.groups.is_empty() || (open && self.busy_at.elapsed() < LINGER)
    }

    /// Polls the lag of as many groups as one poll may take.
    fn poll(&mut self) {
        let mut groups = self.next();
        self.find_topics(&groups);
        let due =
            groups.iter_mut().filter(|group| group.is_due(&self.topics)).take(GROUPS_MAX).collect();
        self.find_committed(due);
        let (ends, mut starts) = (self.find_ends(&groups), Offsets::new());
        self.find_starts(&groups, &ends, &mut starts);
        // A group may have committed since its coordinator was asked, so its lag is asked about
        // once more.
        let doubtful = groups
            .iter_mut()
            .filter(|group| group.lag(&self.topics, &ends, &starts) == Some(Lag::Behind));
        self.find_committed(doubtful.take(GROUPS_MAX).collect());
        self.find_starts(&groups, &ends, &mut starts);
        for mut group in groups {
            let lag = group.lag(&self.topics, &ends, &starts);
            group.report(lag);
            self.groups.push_back(group);
        }
    }

    /// Takes the groups of this poll from the front.
    fn next(&mut self) -> Vec<WatchedGroup> {
        let (mut groups, mut partitions) = (Vec::new(), 0);
        while partitions < PARTITIONS_MAX
            && let Some(group) = self.groups.pop_front()
        {
            partitions += group.partitions(&self.topics).map_or(1, |partitions| partitions.len());
            groups.push(group);
        }
        groups
    }

    fn find_topics(&mut self, groups: &[WatchedGroup]) {
        let is_due = |topic: &&Arc<str>| {
            self.topics_at.get(*topic).is_none_or(|at| at.elapsed() > TOPICS_FRESH)
        };
        let due: BTreeSet<_> =
            groups.iter().flat_map(|group| &group.topics).filter(is_due).cloned().collect();
        if due.is_empty() {
            return;
        }
        let due: Vec<_> = due.into_iter().collect();
        let mut found = self.asker.topics(&due);
        for topic in due {
            match found.remove(&topic) {
                Some(mut found) => {
                    // Once an id was seen, its absence is an error.
                    let known = self.topics.get(&topic).and_then(|known| known.id.clone());
                    found.id = found.id.or(known);
                    self.topics.insert(Arc::clone(&topic), found);
                    self.topics_at.insert(topic, Instant::now());
                }
                None => drop((self.topics.remove(&topic), self.topics_at.remove(&topic))),
            }
        }
    }

    fn find_committed(&self, groups: Vec<&mut WatchedGroup>) {
        let questions =
            |group: &&mut WatchedGroup| Some((group.name.clone(), group.partitions(&self.topics)?));
        let questions: Vec<_> = groups.iter().filter_map(questions).collect();
        if questions.is_empty() {
            return;
        }
        let questions: Vec<_> = questions
            .iter()
            .map(|(group, partitions)| (group.as_str(), partitions.clone()))
            .collect();
        let mut committed = self.asker.committed(&questions);
        for group in groups {
            // An earlier offset is of no use once the coordinator does not answer.
            group.committed = committed.remove(&group.name);
            if group.committed.is_some() {
                group.ask_at =
                    Instant::now() + GROUP_FRESH.mul_f64(0.5 + rand::random::<f64>() / 2.0);
            }
        }
    }

    fn find_ends(&self, groups: &[WatchedGroup]) -> Offsets {
        let partitions: BTreeSet<Partition> =
            groups.iter().filter_map(|group| group.partitions(&self.topics)).flatten().collect();
        self.asker.offsets(Offset::End, &partitions.into_iter().collect::<Vec<_>>())
    }

    /// Asks for the first offsets of partitions, where they matter: the partition's end is above
    /// zero and a group has no offset there.
    fn find_starts(&self, groups: &[WatchedGroup], ends: &Offsets, starts: &mut Offsets) {
        let without =
            |group: &WatchedGroup| group.without_offset(&self.topics).cloned().collect::<Vec<_>>();
        let wanted = |partition: &Partition| {
            ends.get(partition).is_some_and(|end| *end > 0) && !starts.contains_key(partition)
        };
        let partitions: BTreeSet<_> = groups.iter().flat_map(without).filter(wanted).collect();
        let partitions: Vec<_> = partitions.into_iter().collect();
        if !partitions.is_empty() {
            starts.extend(self.asker.offsets(Offset::First, &partitions));
        }
    }
}
