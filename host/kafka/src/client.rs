//! The librdkafka consumer, and the few calls that its safe wrapper lacks.

use std::{
    ffi::{CStr, CString},
    ptr,
    sync::Arc,
    time::Duration,
};

use rdkafka::{
    Offset, TopicPartitionList, bindings as rd,
    consumer::{BaseConsumer, Consumer as _},
    error::{KafkaError, KafkaResult},
    types::{RDKafkaErrorCode, RDKafkaRespErr},
};
use tokio::sync::Semaphore;

use crate::{flow::Partition, offsets::OffsetStore, rebalance::Context};

/// Questions to brokers that may be under way at the same time; each holds a thread of
/// the blocking pool.
const LOOKUPS_MAX: usize = 8;

/// One member of the group. Thread-safe; only the poll thread polls it.
pub(crate) struct Client {
    pub(crate) consumer: BaseConsumer<Context>,
    lookups: Semaphore,
}

/// What brokers know of a partition.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Bearings {
    /// The group's committed offset.
    pub(crate) committed: Option<i64>,
    /// The first offset that still exists.
    pub(crate) low: i64,
    /// The offset after the last one.
    pub(crate) high: i64,
}

impl Client {
    pub(crate) fn new(consumer: BaseConsumer<Context>) -> Self {
        Self { consumer, lookups: Semaphore::new(LOOKUPS_MAX) }
    }

    /// Asks a blocking question off the runtime's threads. `ask` has a deadline of its own.
    pub(crate) async fn lookup<T: Send + 'static>(
        self: &Arc<Self>,
        ask: impl FnOnce(&Self) -> Result<T, String> + Send + 'static,
    ) -> Result<T, String> {
        let _permit = self.lookups.acquire().await.map_err(|error| error.to_string())?;
        let client = Arc::clone(self);
        tokio::task::spawn_blocking(move || ask(&client)).await.map_err(|error| error.to_string())?
    }

    /// Committed offset and watermarks, from the brokers.
    pub(crate) async fn bearings(self: &Arc<Self>, partition: &Partition, within: Duration) -> Result<Bearings, String> {
        let partition = partition.clone();
        self.lookup(move |client| client.ask_bearings(&partition, within).map_err(|error| error.to_string())).await
    }

    fn ask_bearings(&self, partition: &Partition, within: Duration) -> KafkaResult<Bearings> {
        let mut list = TopicPartitionList::new();
        list.add_partition(&partition.topic, partition.number);
        let list = self.consumer.committed_offsets(list, within)?;
        let mut committed = None;
        for element in list.elements() {
            element.error()?;
            if let Offset::Offset(offset) = element.offset() {
                committed = Some(offset);
            }
        }
        let (low, high) = self.watermarks(partition, within)?;
        Ok(Bearings { committed, low, high })
    }

    /// Watermarks, from the broker.
    pub(crate) fn watermarks(&self, partition: &Partition, within: Duration) -> KafkaResult<(i64, i64)> {
        self.consumer.fetch_watermarks(&partition.topic, partition.number, within)
    }

    /// Watermarks as of the last fetch, if there was one. Asks nobody.
    pub(crate) fn watermarks_seen(&self, partition: &Partition) -> Option<(i64, i64)> {
        let topic = CString::new(&*partition.topic).ok()?;
        let (mut low, mut high) = (-1, -1);
        // SAFETY: the client lives as long as `self`; the topic's name is a C string that
        // outlives the call, and both results are valid for writes.
        let code = unsafe {
            rd::rd_kafka_get_watermark_offsets(
                self.consumer.client().native_ptr(),
                topic.as_ptr(),
                partition.number,
                &raw mut low,
                &raw mut high,
            )
        };
        let known = code == RDKafkaRespErr::RD_KAFKA_RESP_ERR_NO_ERROR && low >= 0 && high >= 0;
        known.then_some((low, high))
    }

    /// Stops or restarts fetching. Takes effect before the next poll, without a broker.
    pub(crate) fn set_paused(&self, partition: &Partition, paused: bool) -> KafkaResult<()> {
        let mut list = TopicPartitionList::new();
        list.add_partition(&partition.topic, partition.number);
        match paused {
            true => self.consumer.pause(&list)?,
            false => self.consumer.resume(&list)?,
        }
        list.elements().iter().try_for_each(|element| element.error())
    }

    /// Commits and waits for the broker's answer, for `within` at most. The safe wrapper
    /// would wait as long as a session lasts.
    pub(crate) fn commit(&self, offsets: &[(Partition, i64)], within: Duration) -> KafkaResult<()> {
        let mut list = TopicPartitionList::new();
        for (partition, next) in offsets {
            list.add_partition_offset(&partition.topic, partition.number, Offset::Offset(*next))?;
        }
        let queue = ReplyQueue::new(self);
        // SAFETY: client and queue are alive; librdkafka copies the list; without a
        // callback the answer goes to the queue as an event.
        let code = unsafe { rd::rd_kafka_commit_queue(self.consumer.client().native_ptr(), list.ptr(), queue.ptr, None, ptr::null_mut()) };
        check(code)?;
        let event = queue.wait(within).ok_or(KafkaError::ConsumerCommit(RDKafkaErrorCode::OperationTimedOut))?;
        check(event.code())
    }
}

impl OffsetStore for Client {
    fn store_offset(&self, partition: &Partition, next: i64) -> Result<(), KafkaError> {
        // `Consumer::store_offset` would add one, which is wrong where offsets have gaps.
        let mut list = TopicPartitionList::new();
        list.add_partition_offset(&partition.topic, partition.number, Offset::Offset(next))?;
        self.consumer.store_offsets(&list)
    }
}

fn check(code: RDKafkaRespErr) -> KafkaResult<()> {
    match code {
        RDKafkaRespErr::RD_KAFKA_RESP_ERR_NO_ERROR => Ok(()),
        code => Err(KafkaError::ConsumerCommit(code.into())),
    }
}

/// A queue for the answer to one request.
pub(crate) struct ReplyQueue {
    pub(crate) ptr: *mut rd::rd_kafka_queue_t,
}

impl ReplyQueue {
    pub(crate) fn new(client: &Client) -> Self {
        Self::of(client.consumer.client().native_ptr())
    }

    /// A queue of a client that is alive, and stays so for as long as the queue.
    pub(crate) fn of(client: *mut rd::rd_kafka_t) -> Self {
        // SAFETY: the client is alive; the queue is destroyed exactly once, on drop.
        Self { ptr: unsafe { rd::rd_kafka_queue_new(client) } }
    }

    pub(crate) fn wait(&self, within: Duration) -> Option<ReplyEvent> {
        let timeout_ms = i32::try_from(within.as_millis()).unwrap_or(i32::MAX);
        // SAFETY: the queue is alive; the event is destroyed exactly once, on drop.
        let ptr = unsafe { rd::rd_kafka_queue_poll(self.ptr, timeout_ms) };
        (!ptr.is_null()).then_some(ReplyEvent { ptr })
    }
}

impl Drop for ReplyQueue {
    fn drop(&mut self) {
        // SAFETY: made by `rd_kafka_queue_new` and not used after this. An answer that
        // comes later finds its queue gone and is dropped by librdkafka.
        unsafe { rd::rd_kafka_queue_destroy(self.ptr) }
    }
}

/// An answer.
pub(crate) struct ReplyEvent {
    pub(crate) ptr: *mut rd::rd_kafka_event_t,
}

impl ReplyEvent {
    pub(crate) fn code(&self) -> RDKafkaRespErr {
        // SAFETY: the event is alive.
        unsafe { rd::rd_kafka_event_error(self.ptr) }
    }

    pub(crate) fn text(&self) -> String {
        // SAFETY: the event is alive and owns the text, which is copied at once.
        unsafe { text(rd::rd_kafka_event_error_string(self.ptr)) }
    }
}

impl Drop for ReplyEvent {
    fn drop(&mut self) {
        // SAFETY: came from `rd_kafka_queue_poll` and is not used after this.
        unsafe { rd::rd_kafka_event_destroy(self.ptr) }
    }
}

/// Copies a C string; empty for none.
///
/// # Safety
/// `ptr` is null or a C string that is alive during the call.
pub(crate) unsafe fn text(ptr: *const std::ffi::c_char) -> String {
    if ptr.is_null() {
        return String::new();
    }
    // SAFETY: not null, and a live C string by this function's contract.
    unsafe { CStr::from_ptr(ptr) }.to_string_lossy().into_owned()
}
