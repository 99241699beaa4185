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

use crate::{
    flow::Partition,
    offsets::{Ledger, OffsetStore, ToCommit},
    position::{Committed, note, noted},
    rebalance::Context,
    topic_id::TopicId,
};

/// Questions to brokers that may be under way at the same time; each holds a thread of
/// the blocking pool.
const LOOKUPS_MAX: usize = 8;

/// One member of the group. Thread-safe; only the poll thread polls it.
pub(crate) struct Client {
    pub(crate) consumer: BaseConsumer<Context>,
    lookups: Semaphore,
}

/// What brokers know of a partition.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Bearings {
    /// The group's committed offset.
    pub(crate) committed: Option<Committed>,
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
        tokio::task::spawn_blocking(move || ask(&client))
            .await
            .map_err(|error| error.to_string())?
    }

    /// Committed offset and watermarks, from the brokers.
    pub(crate) async fn bearings(
        self: &Arc<Self>,
        partition: &Partition,
        within: Duration,
    ) -> Result<Bearings, String> {
        let partition = partition.clone();
        self.lookup(move |client| {
            client.ask_bearings(&partition, within).map_err(|error| error.to_string())
        })
        .await
    }

    fn ask_bearings(&self, partition: &Partition, within: Duration) -> KafkaResult<Bearings> {
        let committed = self.committed(std::slice::from_ref(partition), within)?.pop().flatten();
        let (low, high) = self.watermarks(partition, within)?;
        Ok(Bearings { committed, low, high })
    }

    /// What the group has committed, by partition, from its coordinator.
    pub(crate) fn committed(
        &self,
        partitions: &[Partition],
        within: Duration,
    ) -> KafkaResult<Vec<Option<Committed>>> {
        let mut list = TopicPartitionList::new();
        for partition in partitions {
            list.add_partition(&partition.topic, partition.number);
        }
        let list = self.consumer.committed_offsets(list, within)?;
        partitions
            .iter()
            .map(|partition| committed_in(&list, &partition.topic, partition.number))
            .collect()
    }

    /// Watermarks, from the broker.
    pub(crate) fn watermarks(
        &self,
        partition: &Partition,
        within: Duration,
    ) -> KafkaResult<(i64, i64)> {
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

    /// Commits, for partitions of a topic whose id is this, the low watermark in place of offsets
    /// of other topics; what was replaced by what. What is no longer ours in the ledger is left to
    /// whoever has it.
    pub(crate) fn start_over(
        &self,
        ledger: &Ledger,
        assigned: &[(Partition, u64)],
        id: &TopicId,
        lookup: Duration,
        commit: Duration,
    ) -> Result<Vec<(Partition, i64, i64)>, String> {
        let replace = || -> KafkaResult<_> {
            let partitions: Vec<_> =
                assigned.iter().map(|(partition, _)| partition.clone()).collect();
            let mut replaced = Vec::new();
            for (partition, committed) in
                partitions.iter().zip(self.committed(&partitions, lookup)?)
            {
                if let Some(committed) = committed.filter(|committed| !committed.is_of(id)) {
                    let (low, _) = self.watermarks(partition, lookup)?;
                    replaced.push((partition.clone(), committed.offset, low));
                }
            }
            let is_ours = |of: &Partition| {
                assigned.iter().any(|(partition, generation)| {
                    partition == of && ledger.is_ours(of, *generation)
                })
            };
            replaced.retain(|(partition, ..)| is_ours(partition));
            if !replaced.is_empty() {
                let offsets: Vec<_> = replaced
                    .iter()
                    .map(|(partition, _, low)| (partition.clone(), *low, id.clone()))
                    .collect();
                self.commit(&offsets, commit)?;
            }
            Ok(replaced)
        };
        replace().map_err(|error| error.to_string())
    }

    /// Commits and waits for the broker's answer, for `within` at most. The safe wrapper
    /// would wait as long as a session lasts.
    pub(crate) fn commit(&self, offsets: &[ToCommit], within: Duration) -> KafkaResult<()> {
        let mut list = TopicPartitionList::new();
        for (partition, next, topic_id) in offsets {
            add_offset(&mut list, &partition.topic, partition.number, *next, topic_id)?;
        }
        let queue = ReplyQueue::new(self);
        // SAFETY: client and queue are alive; librdkafka copies the list; without a
        // callback the answer goes to the queue as an event.
        let code = unsafe {
            rd::rd_kafka_commit_queue(
                self.consumer.client().native_ptr(),
                list.ptr(),
                queue.ptr,
                None,
                ptr::null_mut(),
            )
        };
        check(code)?;
        let event = queue
            .wait(within)
            .ok_or(KafkaError::ConsumerCommit(RDKafkaErrorCode::OperationTimedOut))?;
        check(event.code())
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
/// committed goes through here.
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

/// What a group has committed for a partition, in a list that its coordinator has filled in.
pub(crate) fn committed_in(
    list: &TopicPartitionList,
    topic: &str,
    partition: i32,
) -> KafkaResult<Option<Committed>> {
    let Some(element) = list.find_partition(topic, partition) else { return Ok(None) };
    element.error()?;
    let Offset::Offset(offset) = element.offset() else { return Ok(None) };
    // SAFETY: the list is alive, and nobody else uses it.
    let elements = unsafe { elements(list.ptr()) };
    let found = elements.iter().find(|element| {
        // SAFETY: an element of a list has a name, which lives as long as the list.
        element.partition == partition && unsafe { text(element.topic) } == topic
    });
    Ok(Some(Committed { offset, topic_id: found.and_then(noted_beside) }))
}

/// The topic's id that is noted beside an offset. The safe wrapper panics where somebody noted what
/// is no UTF-8.
pub(crate) fn noted_beside(element: &rd::rd_kafka_topic_partition_t) -> TopicId {
    if element.metadata.is_null() || element.metadata_size == 0 {
        return None;
    }
    // SAFETY: an element's metadata is that many bytes, which live as long as the element.
    noted(unsafe {
        std::slice::from_raw_parts(element.metadata.cast::<u8>(), element.metadata_size)
    })
}

/// # Safety
/// `list` is null or a list that is alive for as long as the answer is used.
pub(crate) unsafe fn elements<'a>(
    list: *const rd::rd_kafka_topic_partition_list_t,
) -> &'a [rd::rd_kafka_topic_partition_t] {
    // SAFETY: by this function's contract, and a list has as many elements as it says.
    unsafe {
        match list.as_ref() {
            Some(list) if list.cnt > 0 => std::slice::from_raw_parts(list.elems, list.cnt as usize),
            _ => &[],
        }
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
