//! A topic's id, which differs for a topic that is deleted and made again under its old name.
//!
//! Position ids depend on it, so it must never change between known and unknown: a partition is
//! opened only after the broker has answered. "No id" is an answer too (brokers before 2.8), and
//! holds for the consumer's life. A missing answer is none, and is asked for again. Once an id was
//! seen, its absence is an error.

use std::{
    collections::HashMap,
    ffi::CString,
    ptr,
    sync::Arc,
    time::{Duration, Instant},
};

use rdkafka::{
    bindings as rd,
    consumer::{BaseConsumer, Consumer as _, ConsumerContext},
    types::RDKafkaRespErr,
};
use tokio::sync::Mutex;

use crate::client::{Client, ReplyQueue, text};

/// A topic's id; none where the broker has no ids.
pub(crate) type TopicId = Option<Arc<str>>;

/// The ids that brokers have answered with, each with the time of its request.
#[derive(Default)]
pub(crate) struct TopicIds {
    known: Mutex<HashMap<Arc<str>, (TopicId, Instant)>>,
}

impl TopicIds {
    /// Returns the topic's id, as of `since` or later. Partitions of one rebalance share an answer
    /// that way. No partition is opened with the id of a topic that was deleted before the
    /// assignment.
    pub(crate) async fn of(
        &self,
        client: &Arc<Client>,
        topic: &Arc<str>,
        since: Instant,
        within: Duration,
    ) -> Result<TopicId, String> {
        let mut known = self.known.lock().await;
        let before = known.get(topic).cloned();
        match &before {
            Some((None, _)) => return Ok(None),
            Some((id, asked_at)) if *asked_at >= since => return Ok(id.clone()),
            _ => {}
        }
        let (name, asked_at) = (Arc::clone(topic), Instant::now());
        let id = client.lookup(move |client| describe(&client.consumer, &name, within)).await?;
        if before.is_some() && id.is_none() {
            return Err(format!("the broker no longer tells the id of topic `{topic}`"));
        }
        known.insert(Arc::clone(topic), (id.clone(), asked_at));
        Ok(id)
    }
}

/// The options of an admin request.
struct Options(*mut rd::rd_kafka_AdminOptions_t);

impl Drop for Options {
    fn drop(&mut self) {
        // SAFETY: made by `rd_kafka_AdminOptions_new` and not used after this.
        unsafe { rd::rd_kafka_AdminOptions_destroy(self.0) }
    }
}

/// A list of topic names.
struct Topics(*mut rd::rd_kafka_TopicCollection_t);

impl Drop for Topics {
    fn drop(&mut self) {
        // SAFETY: made by `rd_kafka_TopicCollection_of_topic_names` and not used after this.
        unsafe { rd::rd_kafka_TopicCollection_destroy(self.0) }
    }
}

/// Returns the number of a broker to ask. Any broker can answer. The controller, which librdkafka
/// would ask, may be out of the consumer's reach, and the mock cluster has none.
fn any_broker(
    consumer: &BaseConsumer<impl ConsumerContext>,
    topic: &str,
    within: Duration,
) -> Result<i32, String> {
    let metadata =
        consumer.fetch_metadata(Some(topic), within).map_err(|error| error.to_string())?;
    let first = metadata.brokers().first().map(|broker| broker.id());
    first.ok_or_else(|| "no broker is known yet".to_owned())
}

/// Asks a broker for a topic's id with DescribeTopics. `Ok(None)` means that the broker answered
/// and has no ids.
pub(crate) fn describe(
    consumer: &BaseConsumer<impl ConsumerContext>,
    topic: &str,
    within: Duration,
) -> Result<TopicId, String> {
    let name = CString::new(topic).map_err(|error| error.to_string())?;
    let rk = consumer.client().native_ptr();
    let timeout_ms = i32::try_from(within.as_millis()).unwrap_or(i32::MAX);
    let broker = any_broker(consumer, topic, within)?;
    let queue = ReplyQueue::of(rk);
    // SAFETY: the client is alive during all of these calls; names, options and queue
    // outlive the request, which copies what it needs.
    unsafe {
        let mut names = [name.as_ptr()];
        let topics =
            Topics(rd::rd_kafka_TopicCollection_of_topic_names(names.as_mut_ptr(), names.len()));
        let options = Options(rd::rd_kafka_AdminOptions_new(
            rk,
            rd::rd_kafka_admin_op_t::RD_KAFKA_ADMIN_OP_DESCRIBETOPICS,
        ));
        rd::rd_kafka_AdminOptions_set_request_timeout(options.0, timeout_ms, ptr::null_mut(), 0);
        rd::rd_kafka_AdminOptions_set_broker(options.0, broker, ptr::null_mut(), 0);
        rd::rd_kafka_DescribeTopics(rk, topics.0, options.0, queue.ptr);
    }
    let event = queue
        .wait(within + Duration::from_millis(500))
        .ok_or("no answer about the topic's id in time")?;
    match event.code() {
        RDKafkaRespErr::RD_KAFKA_RESP_ERR_NO_ERROR => {}
        RDKafkaRespErr::RD_KAFKA_RESP_ERR__UNSUPPORTED_FEATURE => return Ok(None),
        _ => return Err(event.text()),
    }
    // SAFETY: the event is a live answer to DescribeTopics, and owns what is read from it.
    unsafe { first_id(event.ptr) }
}

/// Returns the id of the first topic of an answer.
///
/// # Safety
/// `event` is alive and the answer to a DescribeTopics request.
unsafe fn first_id(event: *mut rd::rd_kafka_event_t) -> Result<TopicId, String> {
    // SAFETY: by this function's contract; pointers are checked before use, and all of
    // them live as long as the event.
    unsafe {
        let result = rd::rd_kafka_event_DescribeTopics_result(event);
        if result.is_null() {
            return Err("the broker's answer about the topic is of another kind".to_owned());
        }
        let mut count = 0;
        let topics = rd::rd_kafka_DescribeTopics_result_topics(result, &raw mut count);
        if topics.is_null() || count == 0 {
            return Err("the broker's answer has no topic".to_owned());
        }
        let topic = *topics;
        let error = rd::rd_kafka_TopicDescription_error(topic);
        if !error.is_null() {
            return Err(text(rd::rd_kafka_error_string(error)));
        }
        Ok(id_of(topic))
    }
}

/// Returns the id in a topic's description. An id of zero stands for none.
///
/// # Safety
/// `topic` is a description that is alive during the call.
pub(crate) unsafe fn id_of(topic: *const rd::rd_kafka_TopicDescription_t) -> TopicId {
    // SAFETY: by this function's contract; the id lives as long as the description.
    unsafe {
        let id = rd::rd_kafka_TopicDescription_topic_id(topic);
        let zero = id.is_null()
            || (rd::rd_kafka_Uuid_most_significant_bits(id) == 0
                && rd::rd_kafka_Uuid_least_significant_bits(id) == 0);
        (!zero)
            .then(|| text(rd::rd_kafka_Uuid_base64str(id)))
            .filter(|id| !id.is_empty())
            .map(Into::into)
    }
}
