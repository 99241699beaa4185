//! The watcher's requests to brokers. Each has a deadline, and a result leaves out the entries that
//! brokers did not answer.

use std::{collections::HashMap, ffi::CString, sync::Arc, time::Duration};

use rdkafka::{
    ClientContext, TopicPartitionList, bindings as rd,
    config::RDKafkaLogLevel,
    consumer::{BaseConsumer, Consumer as _, ConsumerContext},
    error::KafkaError,
    types::RDKafkaRespErr,
};

use super::group::{Committed, Offsets, Topic, Topics};
use crate::{
    client::noted_beside,
    native::{ReplyEvent, ReplyQueue, RequestOptions, TopicNames, any_broker, elements, text},
    partition::Partition,
    position, topic_id,
};

/// The longest wait for an answer of brokers.
const DEADLINE: Duration = Duration::from_secs(3);
/// Time beyond that, for librdkafka to report that it has passed.
const MARGIN: Duration = Duration::from_millis(500);
/// The most topics or partitions of one request.
const REQUEST_MAX: usize = 2_000;
/// The most groups that are asked about at one time; each is a request of its own.
const GROUPS_AT_ONCE: usize = 32;

const NO_ERROR: RDKafkaRespErr = RDKafkaRespErr::RD_KAFKA_RESP_ERR_NO_ERROR;

/// An end of a partition.
#[derive(Clone, Copy)]
pub(super) enum Offset {
    /// The first offset that still exists.
    First,
    /// The offset after the last record.
    End,
}

impl Offset {
    fn spec(self) -> i64 {
        match self {
            Self::First => rd::rd_kafka_OffsetSpec_t::RD_KAFKA_OFFSET_SPEC_EARLIEST as i64,
            Self::End => rd::rd_kafka_OffsetSpec_t::RD_KAFKA_OFFSET_SPEC_LATEST as i64,
        }
    }
}

/// A client that is a member of no group.
pub(super) struct Asker {
    client: BaseConsumer<WatcherContext>,
}

/// The receiver of librdkafka's callbacks.
pub(super) struct WatcherContext;

impl ConsumerContext for WatcherContext {}

impl ClientContext for WatcherContext {
    fn log(&self, level: RDKafkaLogLevel, facility: &str, line: &str) {
        use RDKafkaLogLevel::{Alert, Critical, Emerg, Error, Warning};
        match level {
            Emerg | Alert | Critical | Error | Warning => {
                tracing::warn!(target: "librdkafka", watcher = true, facility, "{line}")
            }
            _ => tracing::debug!(target: "librdkafka", watcher = true, facility, "{line}"),
        }
    }

    fn error(&self, error: KafkaError, reason: &str) {
        tracing::debug!(target: "librdkafka", watcher = true, %error, "{reason}");
    }

    fn stats_raw(&self, _: &[u8]) {}
}

/// A request about one group.
struct Group(*mut rd::rd_kafka_ListConsumerGroupOffsets_t);

impl Drop for Group {
    fn drop(&mut self) {
        // SAFETY: made by `rd_kafka_ListConsumerGroupOffsets_new` and not used after this.
        unsafe { rd::rd_kafka_ListConsumerGroupOffsets_destroy(self.0) }
    }
}

impl Asker {
    pub(super) fn new(client: BaseConsumer<WatcherContext>) -> Self {
        Self { client }
    }

    /// Serves librdkafka's events other than answers, such as a token that has to be renewed.
    pub(super) fn serve(&self) {
        while let Some(Err(error)) = self.client.poll(Duration::ZERO) {
            tracing::debug!(target: "librdkafka", watcher = true, %error, "error reported by the \
                watcher's client");
        }
    }

    /// Asks for the partitions of topics. A topic that does not exist has none. A topic without an
    /// answer is left out.
    pub(super) fn topics(&self, names: &[Arc<str>]) -> Topics {
        let mut topics = Topics::new();
        for names in names.chunks(REQUEST_MAX) {
            match self.some_topics(names) {
                Ok(found) => topics.extend(found),
                Err(error) => tracing::debug!(error, "topic lookup of the watcher failed"),
            }
        }
        topics
    }

    /// Asks for the ends or the first offsets of partitions.
    pub(super) fn offsets(&self, which: Offset, partitions: &[Partition]) -> Offsets {
        let mut offsets = Offsets::new();
        for partitions in partitions.chunks(REQUEST_MAX) {
            match self.some_offsets(which, partitions) {
                Ok(found) => offsets.extend(found),
                Err(error) => {
                    tracing::debug!(error, "partition offset lookup of the watcher failed")
                }
            }
        }
        offsets
    }

    /// Asks for the committed offsets of groups, and returns them by group. A group without an
    /// answer is left out.
    pub(super) fn committed(
        &self,
        groups: &[(&str, Vec<Partition>)],
    ) -> HashMap<String, Committed> {
        let mut committed = HashMap::new();
        for groups in groups.chunks(GROUPS_AT_ONCE) {
            committed.extend(self.some_committed(groups));
        }
        committed
    }

    fn some_topics(&self, names: &[Arc<str>]) -> Result<Topics, String> {
        let first = names.first().ok_or("no topic is asked about")?;
        let broker = any_broker(&self.client, first, DEADLINE)?;
        let names = names
            .iter()
            .map(|name| CString::new(&**name))
            .collect::<Result<Vec<_>, _>>()
            .map_err(|error| error.to_string())?;
        let queue = self.queue();
        count("topics");
        // SAFETY: the client is alive during these calls; names, options and queue outlive the
        // request, which copies what it needs.
        unsafe {
            let names = TopicNames::new(&names);
            let options = self.options(rd::rd_kafka_admin_op_t::RD_KAFKA_ADMIN_OP_DESCRIBETOPICS);
            // Any broker can answer, while the controller may be out of reach or missing.
            options.set_broker(broker);
            rd::rd_kafka_DescribeTopics(self.native(), names.0, options.0, queue.ptr);
        }
        let event = answer(&queue)?;
        // SAFETY: the event is a live answer to DescribeTopics.
        unsafe { described(event.ptr) }
    }

    fn some_offsets(&self, which: Offset, partitions: &[Partition]) -> Result<Offsets, String> {
        let list = list(partitions);
        // SAFETY: the list is alive and has as many elements as it says.
        for element in unsafe { elements_mut(list.ptr()) } {
            element.offset = which.spec();
        }
        let queue = self.queue();
        count("ends");
        // SAFETY: as in `some_topics`.
        unsafe {
            let options = self.options(rd::rd_kafka_admin_op_t::RD_KAFKA_ADMIN_OP_LISTOFFSETS);
            rd::rd_kafka_ListOffsets(self.native(), list.ptr(), options.0, queue.ptr);
        }
        let event = answer(&queue)?;
        // SAFETY: the event is a live answer to ListOffsets.
        unsafe { listed(event.ptr) }
    }

    /// Sends one request per group, all at once; the answers arrive in any order.
    fn some_committed(&self, groups: &[(&str, Vec<Partition>)]) -> HashMap<String, Committed> {
        let queue = self.queue();
        let mut asked = 0;
        for (group, partitions) in groups {
            let Ok(name) = CString::new(*group) else { continue };
            let list = list(partitions);
            count("groups");
            // SAFETY: as in `some_topics`.
            unsafe {
                let group =
                    Group(rd::rd_kafka_ListConsumerGroupOffsets_new(name.as_ptr(), list.ptr()));
                let options = self
                    .options(rd::rd_kafka_admin_op_t::RD_KAFKA_ADMIN_OP_LISTCONSUMERGROUPOFFSETS);
                rd::rd_kafka_ListConsumerGroupOffsets(
                    self.native(),
                    &raw const group.0 as *mut _,
                    1,
                    options.0,
                    queue.ptr,
                );
            }
            asked += 1;
        }
        let mut found = HashMap::new();
        for _ in 0..asked {
            // SAFETY: the event is a live answer to ListConsumerGroupOffsets.
            match answer(&queue).and_then(|event| unsafe { fetched(event.ptr) }) {
                Ok((group, committed)) => drop(found.insert(group, committed)),
                Err(error) => {
                    tracing::debug!(error, "group offset lookup of the watcher failed")
                }
            }
        }
        found
    }

    fn queue(&self) -> ReplyQueue {
        ReplyQueue::of(self.native())
    }

    fn options(&self, request: rd::rd_kafka_admin_op_t) -> RequestOptions {
        // SAFETY: the client is alive.
        unsafe { RequestOptions::new(self.native(), request, DEADLINE) }
    }

    fn native(&self) -> *mut rd::rd_kafka_t {
        self.client.client().native_ptr()
    }
}

/// Counts a request of a watcher, by its subject.
fn count(about: &'static str) {
    metrics::counter!("oncebox_watcher_lookups_total", "about" => about).increment(1);
}

fn list(partitions: &[Partition]) -> TopicPartitionList {
    let mut list = TopicPartitionList::with_capacity(partitions.len());
    for partition in partitions {
        list.add_partition(&partition.topic, partition.number);
    }
    list
}

/// Waits for an answer without an error.
fn answer(queue: &ReplyQueue) -> Result<ReplyEvent, String> {
    let event = queue.wait(DEADLINE + MARGIN).ok_or("no answer in time")?;
    match event.code() {
        NO_ERROR => Ok(event),
        _ => Err(event.text()),
    }
}

/// Returns the topics of an answer.
///
/// # Safety
/// `event` is alive and the answer to a DescribeTopics request.
unsafe fn described(event: *mut rd::rd_kafka_event_t) -> Result<Topics, String> {
    let mut found = Topics::new();
    // SAFETY: by this function's contract; everything read lives as long as the event.
    unsafe {
        let result = rd::rd_kafka_event_DescribeTopics_result(event);
        if result.is_null() {
            return Err("the answer about topics is of another kind".to_owned());
        }
        let mut count = 0;
        let topics = rd::rd_kafka_DescribeTopics_result_topics(result, &raw mut count);
        for topic in slice(topics, count) {
            let error = rd::rd_kafka_TopicDescription_error(*topic);
            let name = text(rd::rd_kafka_TopicDescription_name(*topic)).into();
            match if error.is_null() { NO_ERROR } else { rd::rd_kafka_error_code(error) } {
                NO_ERROR => {
                    let mut count = 0;
                    let partitions =
                        rd::rd_kafka_TopicDescription_partitions(*topic, &raw mut count);
                    let numbers = slice(partitions, count)
                        .iter()
                        .map(|partition| rd::rd_kafka_TopicPartitionInfo_partition(*partition));
                    found.insert(
                        name,
                        Topic { partitions: numbers.collect(), id: topic_id::id_of(*topic) },
                    );
                }
                RDKafkaRespErr::RD_KAFKA_RESP_ERR_UNKNOWN_TOPIC_OR_PART => {
                    drop(found.insert(name, Topic::default()))
                }
                _ => {}
            }
        }
    }
    Ok(found)
}

/// Returns the offsets of an answer.
///
/// # Safety
/// `event` is alive and the answer to a ListOffsets request.
unsafe fn listed(event: *mut rd::rd_kafka_event_t) -> Result<Offsets, String> {
    let mut found = Offsets::new();
    // SAFETY: by this function's contract; everything read lives as long as the event.
    unsafe {
        let result = rd::rd_kafka_event_ListOffsets_result(event);
        if result.is_null() {
            return Err("the answer about offsets is of another kind".to_owned());
        }
        let mut count = 0;
        let infos = rd::rd_kafka_ListOffsets_result_infos(result, &raw mut count);
        for info in slice(infos, count) {
            let element = &*rd::rd_kafka_ListOffsetsResultInfo_topic_partition(*info);
            if element.err == NO_ERROR && element.offset >= 0 {
                found.insert(partition(element), element.offset);
            }
        }
    }
    Ok(found)
}

/// Returns the group of an answer, with its committed offsets.
///
/// # Safety
/// `event` is alive and the answer to a ListConsumerGroupOffsets request.
unsafe fn fetched(event: *mut rd::rd_kafka_event_t) -> Result<(String, Committed), String> {
    // SAFETY: by this function's contract; everything read lives as long as the event.
    unsafe {
        let result = rd::rd_kafka_event_ListConsumerGroupOffsets_result(event);
        if result.is_null() {
            return Err("the answer about a group is of another kind".to_owned());
        }
        let mut count = 0;
        let groups = rd::rd_kafka_ListConsumerGroupOffsets_result_groups(result, &raw mut count);
        let group = *slice(groups, count).first().ok_or("the answer has no group")?;
        let error = rd::rd_kafka_group_result_error(group);
        if !error.is_null() {
            return Err(text(rd::rd_kafka_error_string(error)));
        }
        let mut committed = Committed::new();
        for element in elements(rd::rd_kafka_group_result_partitions(group)) {
            // A partition that failed is left out, or it would pass for one without an offset.
            if element.err == NO_ERROR {
                let offset = Some(element.offset).filter(|offset| *offset >= 0);
                let noted = offset
                    .map(|offset| position::Committed { offset, note: noted_beside(element) });
                committed.insert(partition(element), noted);
            }
        }
        Ok((text(rd::rd_kafka_group_result_name(group)), committed))
    }
}

fn partition(element: &rd::rd_kafka_topic_partition_t) -> Partition {
    // SAFETY: an element of a list has a name, which lives as long as the list.
    let topic = unsafe { text(element.topic) };
    Partition { topic: topic.into(), number: element.partition }
}

/// Returns the elements of a list, for changes.
///
/// # Safety
/// As for [`elements`], and nothing else uses the list as long as the result is used.
unsafe fn elements_mut<'a>(
    list: *mut rd::rd_kafka_topic_partition_list_t,
) -> &'a mut [rd::rd_kafka_topic_partition_t] {
    // SAFETY: by this function's contract, and a list has as many elements as it says.
    unsafe {
        match list.as_mut() {
            Some(list) if list.cnt > 0 => {
                std::slice::from_raw_parts_mut(list.elems, list.cnt as usize)
            }
            _ => &mut [],
        }
    }
}

/// Returns the elements of a C array.
///
/// # Safety
/// `first` is null or points to `count` elements that are alive for as long as the result is used.
unsafe fn slice<'a, T>(first: *const T, count: usize) -> &'a [T] {
    // SAFETY: by this function's contract.
    if first.is_null() { &[] } else { unsafe { std::slice::from_raw_parts(first, count) } }
}
