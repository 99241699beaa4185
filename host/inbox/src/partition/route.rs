//! The way of each record: it is decoded, and then it runs or is parked.

use chrono::TimeDelta;
use oncebox_model::{
    error::InboxError,
    handler::Handlers,
    identity::{self, Undecodable},
    message::Message,
    policy::{PastHorizon, Policy},
    record::Record,
};

use super::{PartitionInbox, parking, payloads::AttachedPayload};
use crate::{
    admission::breaker::{BreakerDecision, Probe, RECHECK},
    batch::{claim::ClaimRequest, routed::Routed},
    reference::Unfetched,
};

/// Bytes of decoded JSON after which a batch ends. The last payload may exceed it, since a few
/// bytes may decode to many.
const DECODED_BYTES_MAX: usize = 16 << 20;

/// Way of a decoded record.
pub(super) enum Route {
    /// The message runs.
    Run(Routed),
    /// The record or message is parked.
    Park(ClaimRequest),
}

impl PartitionInbox {
    /// Decides for each record whether it runs or is parked. Stops at a record whose schema or
    /// payload is not at hand, and after many bytes of decoded JSON.
    pub(super) fn route(
        &mut self,
        handlers: &dyn Handlers,
        records: &[Record],
        horizon_ms: Option<i64>,
    ) -> Vec<Route> {
        let records = records.iter().take(self.batch_max()).cloned();
        let mut routes = Vec::with_capacity(records.len());
        let mut decoded_bytes = 0;
        for record in records {
            if decoded_bytes > DECODED_BYTES_MAX {
                break; // later records come again, once the memory of these is free
            }
            let Policy { identity, sequence, reference, .. } = &self.consumer.policy;
            let (sequence, reference) = (sequence.as_ref(), reference.as_ref());
            let decoder = self.consumer.decoder.get();
            let key = self.consumer.sessions.payload_key();
            let decoded = identity::decode(record, identity, sequence, reference, decoder, key);
            let route = match decoded {
                Err((_, Undecodable::BadPayload(fault))) if fault.is_not_prepared() => break,
                Err((record, why)) => Some(Route::Park(parking::undecodable(&record, key, &why))),
                Ok(mut message) => {
                    self.consumer.give_context(&mut message);
                    decoded_bytes += message.decoded.as_ref().map_or(0, |json| json.len());
                    self.route_message(handlers, message, horizon_ms)
                }
            };
            let Some(route) = route else { break };
            routes.push(route);
        }
        routes
    }

    /// Decides whether a message runs, by the first reason to park it that holds. Returns none
    /// where its payload is still to be fetched.
    fn route_message(
        &mut self,
        handlers: &dyn Handlers,
        mut message: Message,
        horizon_ms: Option<i64>,
    ) -> Option<Route> {
        let consumer = &self.consumer;
        let ordering = consumer.ordering(&message);
        let timestamp_ms = message.record.timestamp_ms;
        if horizon_ms.is_some_and(|horizon| (1..horizon).contains(&timestamp_ms)) {
            return Some(Route::Park(parking::past_horizon(message, ordering)));
        }
        let Some(mut handler) = handlers.resolve(&message, None) else {
            return Some(Route::Park(parking::unrouted(message, ordering)));
        };
        let bytes_max = consumer.policy.limits.payload_bytes_max;
        if message.record.payload_bytes() > bytes_max {
            return Some(Route::Park(parking::too_large(message, ordering, bytes_max)));
        }
        let mut version = Some(handler.version());
        match self.attach_payload(&mut message) {
            AttachedPayload::Whole => {
                if let Some(fault) = self.consumer.schemas.fault(&message) {
                    return Some(Route::Park(parking::invalid(message, ordering, &fault)));
                }
            }
            AttachedPayload::Later => {}
            AttachedPayload::Failed(failure) => {
                (version, handler) = (None, Unfetched::instead_of(&*handler, failure));
            }
            AttachedPayload::NotFetched => return None,
        }
        self.duplicate_payloads.observe(&self.consumer, &message);
        let shadow = handlers
            .shadow(&message)
            .filter(|shadow| version.is_some() && shadow.samples(&message.id));
        let generation = handlers.generation();
        let request = ClaimRequest { message, version, reason: None, ordering };
        Some(Route::Run(Routed { shadow, ..Routed::new(request, handler, generation) }))
    }

    /// Returns the record time before which messages are parked, in milliseconds; none where the
    /// policy does not park them. Earlier messages may have run already, and their rows may be
    /// gone.
    ///
    /// A message is remembered from the time that it completed, which is no earlier than its
    /// record's time. Producers' clocks may be an hour ahead of the database's; the host's clock
    /// does not matter.
    pub(super) async fn horizon_ms(&mut self) -> Result<Option<i64>, InboxError> {
        let Policy { replay, retention, .. } = &self.consumer.policy;
        let Some(days) =
            retention.days().filter(|_| replay.past_horizon == PastHorizon::ParkByTime)
        else {
            return Ok(None);
        };
        let now = self.clock.now(self.consumer.sessions.host_pool()).await?;
        Ok(Some((now - TimeDelta::days(days) + TimeDelta::hours(1)).timestamp_millis()))
    }

    /// Returns the messages at the front whose circuit breakers let them pass: all before the first
    /// that has to wait. A message that is to probe its version goes alone, with its probe.
    pub(super) fn passed(
        &self,
        mut batch: Vec<Routed>,
    ) -> Result<(Vec<Routed>, Option<Probe>), InboxError> {
        let breakers = &self.consumer.breakers;
        let mut passed: Option<i32> = None;
        for index in 0..batch.len() {
            let handler = &*batch[index].handler;
            if passed == Some(handler.version()) {
                continue;
            }
            match breakers.admit(handler, index == 0) {
                BreakerDecision::Pass => passed = Some(handler.version()),
                BreakerDecision::Probe(probe) => {
                    batch.truncate(1);
                    return Ok((batch, Some(probe)));
                }
                BreakerDecision::Wait(left) if index == 0 => {
                    return Err(InboxError::BreakerOpen {
                        version: handler.version(),
                        retry_after: left.min(RECHECK),
                    });
                }
                BreakerDecision::Wait(_) => {
                    batch.truncate(index);
                    break;
                }
            }
        }
        Ok((batch, None))
    }
}
