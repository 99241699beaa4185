//! Facts about a delivery that are not part of its message.

use std::time::Duration;

use crate::{DeliveryKind, sys};

/// Facts about this delivery that are not part of the message: take it as an argument,
/// `fn reserve(order: Order, context: Context) -> Result<()>`.
///
/// Most of them differ between two deliveries of one message, so an effect had better not
/// depend on them. Handlers of batches have no context.
#[derive(Debug)]
pub struct Context(());

impl Context {
    pub(crate) fn new() -> Self {
        Self(())
    }

    /// The tenant's name.
    pub fn tenant(&self) -> String {
        sys::context::tenant()
    }

    /// The consumer's name.
    pub fn consumer(&self) -> String {
        sys::context::consumer()
    }

    /// The topic of the record.
    pub fn topic(&self) -> String {
        sys::context::topic()
    }

    /// The partition of the record.
    pub fn partition(&self) -> i32 {
        sys::context::partition()
    }

    /// The record's offset in its partition.
    pub fn offset(&self) -> i64 {
        sys::context::offset()
    }

    /// Which run of this message this is, from 1.
    pub fn attempt(&self) -> u32 {
        sys::context::attempt()
    }

    /// Whether this is the first run, a later one, a replay or a trial.
    pub fn delivery(&self) -> DeliveryKind {
        sys::context::delivery()
    }

    /// Version of the event's schema, where the message says.
    pub fn event_version(&self) -> Option<String> {
        sys::context::event_version()
    }

    /// W3C trace context of the record.
    pub fn trace_parent(&self) -> Option<String> {
        sys::context::trace_parent()
    }

    /// Time left until the host stops this call.
    pub fn deadline_left(&self) -> Duration {
        Duration::from_millis(sys::context::deadline_left_ms())
    }
}
