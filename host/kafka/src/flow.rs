//! What a partition's worker and the consumer's loop both need to know of it.

use std::{
    fmt,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, AtomicI64, AtomicUsize, Ordering},
    },
};

use oncebox_model::record::Record;

use crate::{metric::PartitionMeters, topic_id::TopicId};

/// A partition of a topic.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct Partition {
    pub(crate) topic: Arc<str>,
    pub(crate) number: i32,
}

impl fmt::Display for Partition {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.topic, self.number)
    }
}

/// How much a partition may hold before it is paused.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Bounds {
    pub(crate) messages: usize,
    pub(crate) bytes: usize,
}

/// Whether fetching is paused. The loop wants it; the poll thread does it, between two
/// polls, since a pause in the middle of one makes librdkafka deliver a record twice.
/// The loop resumes by itself.
#[derive(Debug, Default)]
pub(crate) struct Pause {
    pub(crate) wanted: bool,
    pub(crate) done: bool,
}

/// Counts of one assignment of one partition. The loop adds records and decides about
/// pauses, the worker takes records away and says when it is in trouble.
pub(crate) struct Flow {
    pub(crate) partition: Partition,
    pub(crate) meters: PartitionMeters,
    bounds: Bounds,
    messages: AtomicUsize,
    bytes: AtomicUsize,
    in_trouble: AtomicBool,
    pause: Mutex<Pause>,
    leaving: AtomicBool,
    next_offset: AtomicI64,
    /// The topic's id, once its worker knows it.
    topic_id: Mutex<TopicId>,
}

impl Flow {
    pub(crate) fn new(partition: Partition, bounds: Bounds, meters: PartitionMeters) -> Self {
        Self {
            partition,
            meters,
            bounds,
            messages: AtomicUsize::new(0),
            bytes: AtomicUsize::new(0),
            in_trouble: AtomicBool::new(false),
            pause: Mutex::default(),
            leaving: AtomicBool::new(false),
            next_offset: AtomicI64::new(-1),
            topic_id: Mutex::default(),
        }
    }

    /// A record came in.
    pub(crate) fn take_in(&self, record: &Record) {
        self.messages.fetch_add(1, Ordering::AcqRel);
        self.bytes.fetch_add(record.size(), Ordering::AcqRel);
    }

    /// Records were settled.
    pub(crate) fn let_go(&self, settled: &[Record]) {
        self.messages.fetch_sub(settled.len(), Ordering::AcqRel);
        self.bytes.fetch_sub(settled.iter().map(Record::size).sum(), Ordering::AcqRel);
    }

    /// The sink fails; the partition is paused until it works again.
    pub(crate) fn set_in_trouble(&self, in_trouble: bool) {
        self.in_trouble.store(in_trouble, Ordering::Release);
    }

    pub(crate) fn is_in_trouble(&self) -> bool {
        self.in_trouble.load(Ordering::Acquire)
    }

    /// Changes the pause under its lock: what the loop wants and what the poll thread has
    /// done must not overtake each other.
    pub(crate) fn with_pause<T>(&self, change: impl FnOnce(&mut Pause) -> T) -> T {
        let mut pause = self.pause.lock().unwrap_or_else(PoisonError::into_inner);
        let result = change(&mut pause);
        if !self.is_leaving() {
            self.meters.paused.set(if pause.done { 1.0 } else { 0.0 });
        }
        result
    }

    pub(crate) fn is_paused(&self) -> bool {
        self.with_pause(|pause| pause.done)
    }

    /// The partition is being given up. Its gauges end: what they said is another host's to say,
    /// and a later assignment's.
    pub(crate) fn set_leaving(&self) {
        // Gauges are set under this lock, so that none is set after its end.
        let _pause = self.pause.lock().unwrap_or_else(PoisonError::into_inner);
        self.leaving.store(true, Ordering::Release);
        self.meters.end_gauges();
    }

    /// How many records are between the first that is not settled and the end.
    pub(crate) fn set_lag(&self, records: i64) {
        let _pause = self.pause.lock().unwrap_or_else(PoisonError::into_inner);
        if !self.is_leaving() {
            self.meters.lag.set(records as f64);
        }
    }

    pub(crate) fn set_topic_id(&self, id: &TopicId) {
        *self.topic_id.lock().unwrap_or_else(PoisonError::into_inner) = id.clone();
    }

    /// The topic, and its id if it has one that is known.
    pub(crate) fn topic_id(&self) -> Option<(Arc<str>, Arc<str>)> {
        let id = self.topic_id.lock().unwrap_or_else(PoisonError::into_inner).clone();
        id.map(|id| (Arc::clone(&self.partition.topic), id))
    }

    pub(crate) fn is_leaving(&self) -> bool {
        self.leaving.load(Ordering::Acquire)
    }

    pub(crate) fn should_pause(&self) -> bool {
        self.is_in_trouble()
            || self.messages() >= self.bounds.messages
            || self.bytes() >= self.bounds.bytes
    }

    pub(crate) fn should_resume(&self) -> bool {
        let low =
            self.messages() <= self.bounds.messages / 2 && self.bytes() <= self.bounds.bytes / 2;
        low && !self.is_in_trouble()
    }

    pub(crate) fn messages(&self) -> usize {
        self.messages.load(Ordering::Acquire)
    }

    pub(crate) fn bytes(&self) -> usize {
        self.bytes.load(Ordering::Acquire)
    }

    pub(crate) fn set_next_offset(&self, offset: i64) {
        self.next_offset.store(offset, Ordering::Release);
    }

    /// The first offset that is not settled; none until the partition is open.
    pub(crate) fn next_offset(&self) -> Option<i64> {
        Some(self.next_offset.load(Ordering::Acquire)).filter(|offset| *offset >= 0)
    }
}
