//! A topic's id, which differs for a topic that is deleted and made again under its old name.
//!
//! Position ids depend on it, so it must never change between known and unknown: a partition is
//! opened only after the broker has answered. "No id" is an answer too (brokers before 2.8), and
//! holds for the consumer's life. A missing answer is none, and is asked for again. Once an id was
//! seen, its absence is an error.

use std::{ffi::CString, sync::Arc, time::Duration};

use rdkafka::{
    bindings as rd,
    consumer::{BaseConsumer, Consumer as _, ConsumerContext},
    types::RDKafkaRespErr,
};

use crate::native::{ReplyQueue, RequestOptions, TopicNames, any_broker, text};

/// A topic's id; none where the broker has no ids.
pub(crate) type TopicId = Option<Arc<str>>;

/// Asks a broker for a topic's id with DescribeTopics. `Ok(None)` means that the broker answered
/// and has no ids.
pub(crate) fn describe(
    consumer: &BaseConsumer<impl ConsumerContext>,
    topic: &str,
    within: Duration,
) -> Result<TopicId, String> {
    let name = CString::new(topic).map_err(|error| error.to_string())?;
    let rk = consumer.client().native_ptr();
    let broker = any_broker(consumer, topic, within)?;
    let queue = ReplyQueue::of(rk);
    // SAFETY: the client is alive during all of these calls; names, options and queue
    // outlive the request, which copies what it needs.
    unsafe {
        let names = TopicNames::new(&[name]);
        let request = rd::rd_kafka_admin_op_t::RD_KAFKA_ADMIN_OP_DESCRIBETOPICS;
        let options = RequestOptions::new(rk, request, within);
        options.set_broker(broker);
        rd::rd_kafka_DescribeTopics(rk, names.0, options.0, queue.ptr);
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
