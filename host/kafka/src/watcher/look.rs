//! The watcher's thread: takes consumers in, asks brokers a few questions for all of them together,
//! and tells each what follows.

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
    Sight,
    ask::{Asker, Offset, Quiet},
    subject::{Offsets, Subject, Topics},
};
use crate::{error::ConsumerError, flow::Partition};

/// Pause between two looks at the ends of partitions.
const PAUSE: Duration = Duration::from_millis(250);
/// The longest one: what came meanwhile waits for it.
const PAUSE_MAX: Duration = Duration::from_secs(2);
/// A look takes, up to that, at most this share of a watcher's time: one in so many.
const SHARE: u32 = 4;
/// Partitions of one look; where there are more, consumers take turns.
const PARTITIONS_MAX: usize = 4_000;
/// Groups whose offsets one look asks for.
const GROUPS_MAX: usize = 256;
/// How often a group's offsets are asked for when nothing says that they moved; spread, so that not
/// all groups are asked for at once.
const GROUP_FRESH: Duration = Duration::from_secs(30);
/// How often topics are looked at: for new partitions, and whether they were made again.
const TOPICS_FRESH: Duration = Duration::from_secs(3);
/// How long a watcher without consumers stays.
const LINGER: Duration = Duration::from_secs(60);

/// The state of the thread.
pub(super) struct Look {
    asker: Asker,
    incoming: Receiver<Subject>,
    /// Those at the front have waited longest.
    subjects: VecDeque<Subject>,
    topics: Topics,
    topics_at: HashMap<Arc<str>, Instant>,
    busy_at: Instant,
}

impl Look {
    /// Start a watcher.
    pub(super) fn start(
        properties: &BTreeMap<String, String>,
        secrets: &[String],
        incoming: Receiver<Subject>,
    ) -> Result<(), ConsumerError> {
        let mut config = ClientConfig::new();
        config
            .set_log_level(RDKafkaLogLevel::Warning)
            .set("client.id", "oncebox-watcher")
            .set("enable.auto.commit", "false");
        // How long librdkafka believes in a coordinator that has moved.
        config.set("metadata.max.age.ms", "30000");
        for (name, value) in properties {
            config.set(name, value);
        }
        // It never joins it. Without a group, librdkafka 2.12 dereferences null when a coordinator
        // of any group answers that it is none, or none yet.
        config.set("group.id", "oncebox.watcher");
        let client = config
            .create_with_context(Quiet)
            .map_err(|error| ConsumerError::from_creation(error, secrets))?;
        let look = Self {
            asker: Asker::new(client),
            incoming,
            subjects: VecDeque::new(),
            topics: Topics::new(),
            topics_at: HashMap::new(),
            busy_at: Instant::now(),
        };
        let spawned =
            thread::Builder::new().name("oncebox-watch".to_owned()).spawn(move || look.run());
        spawned.map(drop).map_err(|error| ConsumerError::Client {
            text: format!("no thread to watch on: {error}"),
        })
    }

    /// Until nobody can bring consumers any more, or has not for a while.
    fn run(mut self) {
        let mut pause = Duration::ZERO;
        while self.take_in(pause) {
            let began = Instant::now();
            self.asker.serve();
            self.look();
            pause = (began.elapsed() * (SHARE - 1)).clamp(PAUSE, PAUSE_MAX);
        }
    }

    /// Wait for the next look, or for a new consumer, which is looked at soon. False: there is
    /// nothing left to do.
    fn take_in(&mut self, pause: Duration) -> bool {
        self.subjects.retain(|subject| !subject.is_dropped());
        if self.subjects.is_empty() {
            (self.topics, self.topics_at) = Default::default();
        } else {
            self.busy_at = Instant::now();
        }
        let (until, mut open) = (Instant::now() + pause, true);
        let mut fresh = Vec::new();
        loop {
            // Those that come together are asked about together.
            let limit =
                if fresh.is_empty() { until } else { until.min(Instant::now() + PAUSE / 10) };
            match self.incoming.recv_timeout(limit.saturating_duration_since(Instant::now())) {
                Ok(subject) => fresh.push(subject),
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
        fresh.into_iter().rev().for_each(|subject| self.subjects.push_front(subject));
        !self.subjects.is_empty() || (open && self.busy_at.elapsed() < LINGER)
    }

    /// One look at as many consumers as it may take.
    fn look(&mut self) {
        let mut subjects = self.next();
        self.find_topics(&subjects);
        let due = subjects
            .iter_mut()
            .filter(|subject| subject.is_due(&self.topics))
            .take(GROUPS_MAX)
            .collect();
        self.find_committed(due);
        let (ends, mut starts) = (self.find_ends(&subjects), Offsets::new());
        self.find_starts(&subjects, &ends, &mut starts);
        // What was read since the group was last asked about is not waiting to be read.
        let doubtful = subjects
            .iter_mut()
            .filter(|s| s.judge(&self.topics, &ends, &starts) == Some(Sight::Something));
        self.find_committed(doubtful.take(GROUPS_MAX).collect());
        self.find_starts(&subjects, &ends, &mut starts);
        for mut subject in subjects {
            let sight = subject.judge(&self.topics, &ends, &starts);
            subject.tell(sight);
            self.subjects.push_back(subject);
        }
    }

    /// Those whose turn it is.
    fn next(&mut self) -> Vec<Subject> {
        let (mut subjects, mut partitions) = (Vec::new(), 0);
        while partitions < PARTITIONS_MAX
            && let Some(subject) = self.subjects.pop_front()
        {
            partitions += subject.partitions(&self.topics).map_or(1, |partitions| partitions.len());
            subjects.push(subject);
        }
        subjects
    }

    fn find_topics(&mut self, subjects: &[Subject]) {
        let is_due = |topic: &&Arc<str>| {
            self.topics_at.get(*topic).is_none_or(|at| at.elapsed() > TOPICS_FRESH)
        };
        let due: BTreeSet<_> =
            subjects.iter().flat_map(|subject| &subject.topics).filter(is_due).cloned().collect();
        if due.is_empty() {
            return;
        }
        let due: Vec<_> = due.into_iter().collect();
        let mut found = self.asker.topics(&due);
        for topic in due {
            match found.remove(&topic) {
                Some(mut found) => {
                    // After an id was seen, its absence is taken for an error.
                    let known = self.topics.get(&topic).and_then(|known| known.id.clone());
                    found.id = found.id.or(known);
                    self.topics.insert(Arc::clone(&topic), found);
                    self.topics_at.insert(topic, Instant::now());
                }
                None => drop((self.topics.remove(&topic), self.topics_at.remove(&topic))),
            }
        }
    }

    fn find_committed(&self, subjects: Vec<&mut Subject>) {
        let questions = |subject: &&mut Subject| {
            Some((subject.group.clone(), subject.partitions(&self.topics)?))
        };
        let questions: Vec<_> = subjects.iter().filter_map(questions).collect();
        if questions.is_empty() {
            return;
        }
        let questions: Vec<_> = questions
            .iter()
            .map(|(group, partitions)| (group.as_str(), partitions.clone()))
            .collect();
        let mut committed = self.asker.committed(&questions);
        for subject in subjects {
            // An offset that was known a while ago says nothing once the coordinator does not
            // answer.
            subject.committed = committed.remove(&subject.group);
            if subject.committed.is_some() {
                subject.ask_at =
                    Instant::now() + GROUP_FRESH.mul_f64(0.5 + rand::random::<f64>() / 2.0);
            }
        }
    }

    fn find_ends(&self, subjects: &[Subject]) -> Offsets {
        let partitions: BTreeSet<Partition> = subjects
            .iter()
            .filter_map(|subject| subject.partitions(&self.topics))
            .flatten()
            .collect();
        self.asker.offsets(Offset::End, &partitions.into_iter().collect::<Vec<_>>())
    }

    /// First offsets are of use only for partitions that have an end and a group without an offset.
    fn find_starts(&self, subjects: &[Subject], ends: &Offsets, starts: &mut Offsets) {
        let without =
            |subject: &Subject| subject.without_offset(&self.topics).cloned().collect::<Vec<_>>();
        let wanted = |partition: &Partition| {
            ends.get(partition).is_some_and(|end| *end > 0) && !starts.contains_key(partition)
        };
        let partitions: BTreeSet<_> = subjects.iter().flat_map(without).filter(wanted).collect();
        let partitions: Vec<_> = partitions.into_iter().collect();
        if !partitions.is_empty() {
            starts.extend(self.asker.offsets(Offset::First, &partitions));
        }
    }
}
