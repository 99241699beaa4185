//! The consumer's client of librdkafka, and its requests to brokers.

use std::{ffi::CString, ptr, sync::Arc, time::Duration};

use rdkafka::{
    Offset, TopicPartitionList, bindings as rd,
    consumer::{BaseConsumer, Consumer as _},
    error::{KafkaError, KafkaResult},
    types::{RDKafkaErrorCode, RDKafkaRespErr},
};
use tokio::sync::Semaphore;

use crate::{
    native::{ReplyQueue, elements, text},
    offsets::{OffsetNote, OffsetTracker, ToCommit, add_offset},
    partition::Partition,
    position::{Committed, Positions},
    rebalance::Context,
    topic_id::TopicId,
};

/// The most requests to brokers at one time; each holds a thread of the blocking pool.
const LOOKUPS_MAX: usize = 8;

/// One member of the group. It is thread-safe; only the poll thread polls it.
pub(crate) struct Client {
    pub(crate) consumer: BaseConsumer<Context>,
    lookups: Semaphore,
}

impl Client {
    pub(crate) fn new(consumer: BaseConsumer<Context>) -> Self {
        Self { consumer, lookups: Semaphore::new(LOOKUPS_MAX) }
    }

    /// Runs a blocking request outside the runtime's threads. `ask` has a deadline of its own.
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

    /// Asks brokers for the partition's committed offset and watermarks.
    pub(crate) async fn positions(
        self: &Arc<Self>,
        partition: &Partition,
        within: Duration,
    ) -> Result<Positions, String> {
        let partition = partition.clone();
        self.lookup(move |client| {
            client.fetch_positions(&partition, within).map_err(|error| error.to_string())
        })
        .await
    }

    fn fetch_positions(&self, partition: &Partition, within: Duration) -> KafkaResult<Positions> {
        let committed = self.committed(std::slice::from_ref(partition), within)?.pop().flatten();
        let (low, high) = self.watermarks(partition, within)?;
        Ok(Positions { committed, low, high })
    }

    /// Asks the group's coordinator for the committed offsets, and returns one entry per partition.
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

    /// Asks the broker for the partition's low and high watermark.
    pub(crate) fn watermarks(
        &self,
        partition: &Partition,
        within: Duration,
    ) -> KafkaResult<(i64, i64)> {
        self.consumer.fetch_watermarks(&partition.topic, partition.number, within)
    }

    /// Returns the watermarks of the last fetch, if there was one. Asks no broker.
    pub(crate) fn watermarks_seen(&self, partition: &Partition) -> Option<(i64, i64)> {
        let topic = CString::new(&*partition.topic).ok()?;
        let (mut low, mut high) = (-1, -1);
        // SAFETY: the client lives as long as `self`; the topic's name is a C string that outlives
        // the call. Both results are valid for writes.
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

    /// Pauses or resumes fetching. Takes effect before the next poll, without a request to a
    /// broker.
    pub(crate) fn set_paused(&self, partition: &Partition, paused: bool) -> KafkaResult<()> {
        let mut list = TopicPartitionList::new();
        list.add_partition(&partition.topic, partition.number);
        match paused {
            true => self.consumer.pause(&list)?,
            false => self.consumer.resume(&list)?,
        }
        list.elements().iter().try_for_each(|element| element.error())
    }

    /// Commits the low watermark for partitions of the topic with this id whose committed offset
    /// belongs to another topic. Returns each replaced partition with its old and new offset. Skips
    /// partitions that `tracker` does not list under the given assignment, since another member may
    /// own them.
    pub(crate) fn start_over(
        &self,
        tracker: &OffsetTracker,
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
                    partition == of && tracker.is_ours(of, *generation)
                })
            };
            replaced.retain(|(partition, ..)| is_ours(partition));
            if !replaced.is_empty() {
                let offsets: Vec<_> = replaced
                    .iter()
                    .map(|(partition, _, low)| {
                        let note = OffsetNote { topic_id: id.clone(), server: None };
                        (partition.clone(), *low, note)
                    })
                    .collect();
                self.commit(&offsets, commit)?;
            }
            Ok(replaced)
        };
        replace().map_err(|error| error.to_string())
    }

    /// Commits offsets, and waits at most `within` for the broker's answer. The safe wrapper would
    /// wait as long as a session lasts.
    pub(crate) fn commit(&self, offsets: &[ToCommit], within: Duration) -> KafkaResult<()> {
        let mut list = TopicPartitionList::new();
        for (partition, next, note) in offsets {
            add_offset(&mut list, &partition.topic, partition.number, *next, note)?;
        }
        let queue = ReplyQueue::of(self.consumer.client().native_ptr());
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

/// Returns the committed offset of a partition, from a list that the coordinator has filled in.
pub(crate) fn committed_in(
    list: &TopicPartitionList,
    topic: &str,
    partition: i32,
) -> KafkaResult<Option<Committed>> {
    let Some(element) = list.find_partition(topic, partition) else { return Ok(None) };
    element.error()?;
    let Offset::Offset(offset) = element.offset() else { return Ok(None) };
    // SAFETY: the list is alive, and nothing else uses it.
    let elements = unsafe { elements(list.ptr()) };
    let found = elements.iter().find(|element| {
        // SAFETY: an element of a list has a name, which lives as long as the list.
        element.partition == partition && unsafe { text(element.topic) } == topic
    });
    Ok(Some(Committed { offset, note: found.map_or_else(OffsetNote::default, noted_beside) }))
}

/// Returns the note beside an offset. The safe wrapper panics on one that is not UTF-8.
pub(crate) fn noted_beside(element: &rd::rd_kafka_topic_partition_t) -> OffsetNote {
    if element.metadata.is_null() || element.metadata_size == 0 {
        return OffsetNote::default();
    }
    // SAFETY: an element's metadata is that many bytes, which live as long as the element.
    OffsetNote::of(unsafe {
        std::slice::from_raw_parts(element.metadata.cast::<u8>(), element.metadata_size)
    })
}

fn check(code: RDKafkaRespErr) -> KafkaResult<()> {
    match code {
        RDKafkaRespErr::RD_KAFKA_RESP_ERR_NO_ERROR => Ok(()),
        code => Err(KafkaError::ConsumerCommit(code.into())),
    }
}
