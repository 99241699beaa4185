//! What a handler learns about its delivery in a test.

use std::time::Duration;

use crate::DeliveryKind;

/// Facts about the next delivery.
#[derive(Debug, Clone)]
#[allow(missing_docs, reason = "they are those of `Context`")]
pub struct Delivery {
    pub tenant: String,
    pub consumer: String,
    pub topic: String,
    pub partition: i32,
    pub offset: i64,
    pub attempt: u32,
    pub kind: DeliveryKind,
    pub event_version: Option<String>,
    pub trace_parent: Option<String>,
    pub deadline_left: Duration,
}

impl Default for Delivery {
    fn default() -> Self {
        Self {
            tenant: "test".to_owned(),
            consumer: "test".to_owned(),
            topic: "test".to_owned(),
            partition: 0,
            offset: 0,
            attempt: 1,
            kind: DeliveryKind::Live,
            event_version: None,
            trace_parent: None,
            deadline_left: Duration::from_secs(10),
        }
    }
}
