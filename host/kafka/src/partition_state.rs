//! The state of an assigned partition that its worker and the consumer's loop share.

use std::sync::{
    Arc, Mutex, PoisonError,
    atomic::{AtomicBool, AtomicI64, AtomicUsize, Ordering},
};

use oncebox_model::record::Record;

use crate::{metric::PartitionMeters, partition::Partition, topic_id::TopicId};

/// The bounds of a partition's queue; at either, the partition is paused.
#[derive(Debug, Clone, Copy)]
pub(crate) struct QueueBounds {
    /// Number of records.
    pub(crate) messages: usize,
    /// Size of the records, in bytes.
    pub(crate) bytes: usize,
}

/// The wanted and the present pause of fetching. The loop asks for a pause, and the poll thread
/// makes it between two polls. A pause during a poll makes librdkafka deliver a record twice. The
/// loop resumes by itself.
#[derive(Debug, Default)]
pub(crate) struct Pause {
    /// Whether the loop wants the partition paused.
    pub(crate) wanted: bool,
    /// Whether librdkafka has paused the partition.
    pub(crate) done: bool,
}

/// The shared state of one assignment of one partition. The loop adds records and decides about
/// pauses. The worker removes settled records and sets whether it backs off.
pub(crate) struct PartitionState {
    pub(crate) partition: Partition,
    pub(crate) meters: PartitionMeters,
    bounds: QueueBounds,
    /// Records that are enqueued and not settled.
    messages: AtomicUsize,
    /// Size of these records.
    bytes: AtomicUsize,
    /// Whether the worker waits before its next attempt.
    backing_off: AtomicBool,
    pause: Mutex<Pause>,
    /// Whether the partition is being given up.
    leaving: AtomicBool,
    /// The first offset that is not settled; -1 until the worker has set it.
    next_offset: AtomicI64,
    /// The topic's id, once the worker has asked for it.
    topic_id: Mutex<TopicId>,
}

impl PartitionState {
    pub(crate) fn new(partition: Partition, bounds: QueueBounds, meters: PartitionMeters) -> Self {
        Self {
            partition,
            meters,
            bounds,
            messages: AtomicUsize::new(0),
            bytes: AtomicUsize::new(0),
            backing_off: AtomicBool::new(false),
            pause: Mutex::default(),
            leaving: AtomicBool::new(false),
            next_offset: AtomicI64::new(-1),
            topic_id: Mutex::default(),
        }
    }

    /// Counts a record that is enqueued.
    pub(crate) fn enqueued(&self, record: &Record) {
        self.messages.fetch_add(1, Ordering::AcqRel);
        self.bytes.fetch_add(record.size(), Ordering::AcqRel);
    }

    /// Subtracts records that are settled.
    pub(crate) fn released(&self, settled: &[Record]) {
        self.messages.fetch_sub(settled.len(), Ordering::AcqRel);
        self.bytes.fetch_sub(settled.iter().map(Record::size).sum(), Ordering::AcqRel);
    }

    /// Sets whether the worker backs off; the partition is paused for that time.
    pub(crate) fn set_backing_off(&self, backing_off: bool) {
        self.backing_off.store(backing_off, Ordering::Release);
    }

    pub(crate) fn is_backing_off(&self) -> bool {
        self.backing_off.load(Ordering::Acquire)
    }

    /// Changes the pause under its lock, so that the loop's request and the poll thread's action do
    /// not overtake each other.
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

    /// Marks the partition as being given up and ends its gauges: from here on the next owner, or a
    /// later assignment, reports them.
    pub(crate) fn set_leaving(&self) {
        // Gauges are set under this lock, so that none is set after it has ended.
        let _pause = self.pause.lock().unwrap_or_else(PoisonError::into_inner);
        self.leaving.store(true, Ordering::Release);
        self.meters.end_gauges();
    }

    /// Sets the lag gauge: the number of records from the first unsettled one to the end.
    pub(crate) fn set_lag(&self, records: i64) {
        let _pause = self.pause.lock().unwrap_or_else(PoisonError::into_inner);
        if !self.is_leaving() {
            self.meters.lag.set(records as f64);
        }
    }

    pub(crate) fn set_topic_id(&self, id: &TopicId) {
        *self.topic_id.lock().unwrap_or_else(PoisonError::into_inner) = id.clone();
    }

    /// Returns the topic with its id, if an id is known.
    pub(crate) fn topic_id(&self) -> Option<(Arc<str>, Arc<str>)> {
        let id = self.topic_id.lock().unwrap_or_else(PoisonError::into_inner).clone();
        id.map(|id| (Arc::clone(&self.partition.topic), id))
    }

    pub(crate) fn is_leaving(&self) -> bool {
        self.leaving.load(Ordering::Acquire)
    }

    pub(crate) fn should_pause(&self) -> bool {
        self.is_backing_off()
            || self.messages() >= self.bounds.messages
            || self.bytes() >= self.bounds.bytes
    }

    pub(crate) fn should_resume(&self) -> bool {
        let low =
            self.messages() <= self.bounds.messages / 2 && self.bytes() <= self.bounds.bytes / 2;
        low && !self.is_backing_off()
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

    /// Returns the first offset that is not settled; none until the partition's start is known.
    pub(crate) fn next_offset(&self) -> Option<i64> {
        Some(self.next_offset.load(Ordering::Acquire)).filter(|offset| *offset >= 0)
    }
}
