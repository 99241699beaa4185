//! Owners of librdkafka's objects, and reads of its memory, for calls that the safe wrapper lacks.

use std::{
    ffi::{CStr, CString},
    ptr,
    time::Duration,
};

use rdkafka::{
    bindings as rd,
    consumer::{BaseConsumer, Consumer as _, ConsumerContext},
    types::RDKafkaRespErr,
};

/// A queue for the answer to one request.
pub(crate) struct ReplyQueue {
    pub(crate) ptr: *mut rd::rd_kafka_queue_t,
}

impl ReplyQueue {
    /// Makes a queue of a client, which must be alive for as long as the queue.
    pub(crate) fn of(client: *mut rd::rd_kafka_t) -> Self {
        // SAFETY: the client is alive; the queue is destroyed exactly once, on drop.
        Self { ptr: unsafe { rd::rd_kafka_queue_new(client) } }
    }

    /// Waits for the answer; none when `within` has passed.
    pub(crate) fn wait(&self, within: Duration) -> Option<ReplyEvent> {
        let timeout_ms = i32::try_from(within.as_millis()).unwrap_or(i32::MAX);
        // SAFETY: the queue is alive; the event is destroyed exactly once, on drop.
        let ptr = unsafe { rd::rd_kafka_queue_poll(self.ptr, timeout_ms) };
        (!ptr.is_null()).then_some(ReplyEvent { ptr })
    }
}

impl Drop for ReplyQueue {
    fn drop(&mut self) {
        // SAFETY: made by `rd_kafka_queue_new` and not used after this. librdkafka drops an
        // answer that arrives later, since its queue is gone.
        unsafe { rd::rd_kafka_queue_destroy(self.ptr) }
    }
}

/// The answer to a request.
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

/// The options of an admin request.
pub(crate) struct RequestOptions(pub(crate) *mut rd::rd_kafka_AdminOptions_t);

impl RequestOptions {
    /// Makes options for a request of this kind, with a deadline.
    ///
    /// # Safety
    /// `client` is alive during the call.
    pub(crate) unsafe fn new(
        client: *mut rd::rd_kafka_t,
        request: rd::rd_kafka_admin_op_t,
        within: Duration,
    ) -> Self {
        let timeout_ms = i32::try_from(within.as_millis()).unwrap_or(i32::MAX);
        // SAFETY: the client is alive; options that were just made are valid for writes.
        unsafe {
            let options = Self(rd::rd_kafka_AdminOptions_new(client, request));
            rd::rd_kafka_AdminOptions_set_request_timeout(
                options.0,
                timeout_ms,
                ptr::null_mut(),
                0,
            );
            options
        }
    }

    /// Sends the request to this broker.
    pub(crate) fn set_broker(&self, broker: i32) {
        // SAFETY: the options are alive and valid for writes.
        unsafe { rd::rd_kafka_AdminOptions_set_broker(self.0, broker, ptr::null_mut(), 0) };
    }
}

impl Drop for RequestOptions {
    fn drop(&mut self) {
        // SAFETY: made by `rd_kafka_AdminOptions_new` and not used after this.
        unsafe { rd::rd_kafka_AdminOptions_destroy(self.0) }
    }
}

/// A list of topic names.
pub(crate) struct TopicNames(pub(crate) *mut rd::rd_kafka_TopicCollection_t);

impl TopicNames {
    /// Makes a list, which copies the names.
    pub(crate) fn new(names: &[CString]) -> Self {
        let mut pointers: Vec<_> = names.iter().map(|name| name.as_ptr()).collect();
        // SAFETY: the pointers are of C strings that outlive the call.
        Self(unsafe {
            rd::rd_kafka_TopicCollection_of_topic_names(pointers.as_mut_ptr(), pointers.len())
        })
    }
}

impl Drop for TopicNames {
    fn drop(&mut self) {
        // SAFETY: made by `rd_kafka_TopicCollection_of_topic_names` and not used after this.
        unsafe { rd::rd_kafka_TopicCollection_destroy(self.0) }
    }
}

/// Returns the number of a broker to ask. Any broker can answer. The controller, which librdkafka
/// would ask, may be out of the consumer's reach, and the mock cluster has none.
pub(crate) fn any_broker(
    consumer: &BaseConsumer<impl ConsumerContext>,
    topic: &str,
    within: Duration,
) -> Result<i32, String> {
    let metadata =
        consumer.fetch_metadata(Some(topic), within).map_err(|error| error.to_string())?;
    let first = metadata.brokers().first().map(|broker| broker.id());
    first.ok_or_else(|| "no broker is known yet".to_owned())
}

/// Returns the elements of a list.
///
/// # Safety
/// `list` is null or a list that is alive for as long as the result is used.
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

/// Copies a C string. Returns an empty string for null.
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
