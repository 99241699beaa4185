//! `context`: facts about this delivery.

use oncebox_model::handler::DeliveryKind;
use tokio::time::Instant;

use crate::{
    bindings::oncebox::handler::context::{self, DeliveryKind as Delivery},
    state::StoreState,
};

impl context::Host for StoreState {
    async fn tenant(&mut self) -> wasmtime::Result<String> {
        Ok(self.facts.tenant.clone())
    }

    async fn consumer(&mut self) -> wasmtime::Result<String> {
        Ok(self.facts.consumer.clone())
    }

    async fn topic(&mut self) -> wasmtime::Result<String> {
        Ok(self.facts.topic.to_string())
    }

    async fn partition(&mut self) -> wasmtime::Result<i32> {
        Ok(self.facts.partition)
    }

    async fn offset(&mut self) -> wasmtime::Result<i64> {
        Ok(self.facts.offset)
    }

    async fn attempt(&mut self) -> wasmtime::Result<u32> {
        Ok(self.facts.attempt)
    }

    async fn delivery(&mut self) -> wasmtime::Result<Delivery> {
        Ok(match self.facts.kind {
            DeliveryKind::Live => Delivery::Live,
            DeliveryKind::Retry => Delivery::Retry,
            DeliveryKind::Replay => Delivery::Replay,
            DeliveryKind::Shadow => Delivery::Shadow,
        })
    }

    async fn event_version(&mut self) -> wasmtime::Result<Option<String>> {
        Ok(self.facts.event_version.clone())
    }

    async fn trace_parent(&mut self) -> wasmtime::Result<Option<String>> {
        Ok(self.facts.trace_parent.clone())
    }

    async fn deadline_left_ms(&mut self) -> wasmtime::Result<u64> {
        let left = self.facts.deadline.saturating_duration_since(Instant::now());
        Ok(u64::try_from(left.as_millis()).unwrap_or(u64::MAX))
    }
}
