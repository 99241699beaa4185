//! The messages of a replay, on their way to a run: their rows, their payloads, their handlers.

use std::{sync::Arc, time::Duration};

use oncebox_model::{
    error::InboxError,
    handler::{Handler, Handlers},
    message::Message,
    outcome::Failure,
    reference::FetchError,
    sqlstate,
};

use super::job::Candidate;
use crate::{
    admission::{Admission, AdmissionRequest, Class},
    batch::{
        claim::ClaimRequest,
        replay_turn::{ReplayEnd, ReplayTurn},
        routed::Routed,
        statements::refused,
    },
    consumer::ConsumerInbox,
    retry::lease::read_message,
};

/// A completed message with its payload.
pub(super) struct ReplayedMessage {
    pub(super) message: Message,
    /// Reason why its payload does not decode; none where it does.
    fault: Option<String>,
    /// Failure to fetch the payload that it refers to; none where there is none.
    unfetched: Option<Failure>,
}

/// End of one attempt to replay a message.
#[derive(Debug)]
pub(super) enum Attempted {
    /// Its transaction ended.
    Ended(Box<Message>, ReplayEnd),
    /// It waits for so long, and nothing happened: others come first.
    Waits(Duration),
    /// It is not as the replay found it.
    Gone,
}

/// Pause before what others hold is tried again.
const BUSY: Duration = Duration::from_millis(100);
/// Longest pause for a circuit breaker.
const BREAKER: Duration = Duration::from_secs(5);

/// Returns whether PostgreSQL refused a completion since the replay is not this host's any more.
fn is_lost(error: &InboxError) -> bool {
    refused(error).is_some_and(|answer| answer.sqlstate == sqlstate::NOT_OURS)
}

impl ConsumerInbox {
    /// Tries to replay a message: reads it, decodes it or fetches its payload, and runs it where
    /// nobody waits for what the run takes.
    pub(super) async fn attempt_replay(
        &self,
        candidate: &Candidate,
        turn: ReplayTurn,
    ) -> Result<Attempted, InboxError> {
        // Before anything is read: a message that waits holds no payload.
        let Some(admission) = self.spare_admission() else { return Ok(Attempted::Waits(BUSY)) };
        let Some(message) = self.completed_message(candidate).await? else {
            return Ok(Attempted::Gone);
        };
        let mut replayed = ReplayedMessage { message, fault: None, unfetched: None };
        if !self.decode_stored(&mut replayed.message, &mut replayed.fault) {
            drop(admission); // a wait for a registry holds no place of the host
            let payload = replayed.message.record.payload.as_deref();
            self.prepare(std::iter::once(payload)).await?;
            return Ok(Attempted::Waits(Duration::ZERO));
        }
        let admission = if replayed.fault.is_none() && self.refers(&replayed.message) {
            drop(admission); // nor does a fetch
            self.fetch_replayed(&mut replayed).await?;
            match self.spare_admission() {
                Some(admission) => admission,
                None => return Ok(Attempted::Waits(BUSY)),
            }
        } else {
            admission
        };
        self.run_replayed(admission, turn, replayed).await
    }

    /// Returns an admission where no transaction waits for room, and a connection is to spare. It
    /// does not count against the consumer's messages a second, which are for live messages.
    fn spare_admission(&self) -> Option<Admission> {
        if self.sessions.is_short() {
            return None;
        }
        self.sessions.scheduler().admit_spare(AdmissionRequest {
            tenant_id: self.sessions.tenant_id,
            consumer_id: self.consumer_id,
            class: Class::Fair,
            memory: self.policy.limits.memory_bytes as u64,
            messages: 0,
        })
    }

    /// Reads a completed message; none where it is not as the page showed it.
    async fn completed_message(
        &self,
        candidate: &Candidate,
    ) -> Result<Option<Message>, InboxError> {
        const READ: &str = "SELECT i.message_id AS id, i.topic, i.partition, i.\"offset\", \
                i.record_timestamp_ms AS timestamp_ms, i.key, i.ordering_key, i.source, \
                i.event_type, i.event_version, i.content_type, i.trace_parent, i.headers, \
                i.payload, i.payload_hash \
            FROM oncebox.inbox i WHERE i.consumer_id = $1 AND i.retention_class = $2 \
              AND i.message_id = $3 AND i.status = 'completed' AND i.processed_at = $4 \
              AND i.erased_at IS NULL AND i.headers IS NOT NULL";
        let query = sqlx::query(READ)
            .bind(self.consumer_id)
            .bind(self.policy.retention.class())
            .bind(&candidate.message_id)
            .bind(candidate.completed_at);
        let row = query.fetch_optional(self.sessions.host_pool()).await?;
        Ok(row.as_ref().map(read_message).transpose()?)
    }

    /// Fetches the payload that a message refers to. A fault of the host ends the attempt.
    async fn fetch_replayed(&self, replayed: &mut ReplayedMessage) -> Result<(), InboxError> {
        match self.fetch(&replayed.message, true).await {
            Ok(payload) => replayed.message.fetched = Some(payload),
            Err(FetchError::Reference(error)) => replayed.unfetched = Some(error.into()),
            Err(error) => return Err(InboxError::StoreNotOpened(error.to_string())),
        }
        Ok(())
    }

    /// Runs a replayed message by the present version of its handler, and commits the result.
    async fn run_replayed(
        &self,
        admission: Admission,
        turn: ReplayTurn,
        replayed: ReplayedMessage,
    ) -> Result<Attempted, InboxError> {
        let handlers = self.handlers();
        let generation = handlers.generation();
        let settled = match self.handler_of_replayed(&*handlers, &replayed) {
            Ok(handler) => {
                if let Some(left) = self.breakers.wait_of(&*handler) {
                    return Ok(Attempted::Waits(left.min(BREAKER)));
                }
                let routed = self.route_replayed(turn, &replayed.message, handler, generation);
                self.settle_leased(&admission, &routed).await
            }
            Err(failure) => {
                let of = (&replayed.message, None, generation);
                self.record_replayed(&admission, turn, of, failure).await
            }
        };
        drop(admission);
        match settled {
            Err(InboxError::StaleDeployments) => match self.newer_than(generation).await {
                true => Ok(Attempted::Waits(Duration::ZERO)),
                false => Err(InboxError::StaleDeployments),
            },
            // It was paused, ended or taken over while the message ran, which is rolled back.
            Err(error) if is_lost(&error) => {
                Ok(Attempted::Ended(Box::new(replayed.message), ReplayEnd::Lost))
            }
            Err(error) => Err(error),
            Ok(settled) => Ok(match settled.replayed {
                Some(ReplayEnd::Busy) | None => Attempted::Waits(BUSY),
                Some(ReplayEnd::Changed) => Attempted::Gone,
                Some(end) => Attempted::Ended(Box::new(replayed.message), end),
            }),
        }
    }

    fn handler_of_replayed(
        &self,
        handlers: &dyn Handlers,
        replayed: &ReplayedMessage,
    ) -> Result<Arc<dyn Handler>, Failure> {
        let ReplayedMessage { message, fault, unfetched } = replayed;
        self.handler_for(handlers, (message, None), (fault.as_deref(), unfetched.as_ref()))
    }

    fn route_replayed(
        &self,
        turn: ReplayTurn,
        message: &Message,
        handler: Arc<dyn Handler>,
        generation: i64,
    ) -> Routed {
        let request = ClaimRequest {
            message: message.clone(),
            version: Some(handler.version()),
            reason: None,
            ordering: None,
        };
        Routed { replay: Some(turn), ..Routed::new(request, handler, generation) }
    }
}
