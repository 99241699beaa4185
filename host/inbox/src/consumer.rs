//! A consumer as one host runs it.

use std::{
    collections::HashSet,
    sync::{Arc, Mutex, OnceLock},
    time::Duration,
};

use oncebox_registry::Decoder;
use tokio::{
    sync::{Notify, watch},
    time::timeout,
};

use crate::{
    breaker::{BreakerState, Breakers},
    claim::{Claimant, Claimed},
    complete::{Completion, Disposition},
    due::Due,
    error::InboxError,
    handler::{Failure, Handler, Handlers},
    message::Message,
    order,
    pace::Pace,
    policy::{Policy, Schemas},
    scheduler::{Admission, Ask, Class, ConsumerCaps},
    session::Sessions,
    shadow::Queue,
};

/// A consumer's inbox: its policy, its tenant's sessions, its live handlers and its pace.
/// Partitions and retry workers share it.
pub struct ConsumerInbox {
    /// The consumer's row.
    pub consumer_id: i32,
    /// Name of the tenant.
    pub tenant: String,
    /// Name of the consumer.
    pub name: String,
    /// Its policy.
    pub policy: Policy,
    /// Names this process in leases.
    pub owner: String,
    pub(crate) sessions: Arc<Sessions>,
    pub(crate) pace: Pace,
    /// Tells retry workers that there is something to do.
    pub(crate) due: Arc<Due>,
    pub(crate) breakers: Arc<Breakers>,
    /// Messages that wait for a candidate to be tried on them.
    pub(crate) shadows: Queue,
    handlers: watch::Sender<Arc<dyn Handlers>>,
    /// What payloads have to be.
    pub(crate) schemas: Schemas,
    /// Whoever loads deployments is told here that those that are loaded are stale.
    stale: OnceLock<Arc<Notify>>,
    /// What payloads are decoded with, where they come in the wire format of a schema registry.
    pub(crate) decoder: OnceLock<Decoder>,
    /// Event types that have metrics of their own; a producer can invent any number of them.
    event_types: Mutex<HashSet<String>>,
}

/// How long a schema is waited for at a time; it comes all the same.
const SCHEMA_TIMEOUT: Duration = Duration::from_secs(5);

/// How long a transaction that was refused as stale waits for newer handlers.
const NEWER_TIMEOUT: Duration = Duration::from_secs(5);

/// Room for a commit to end.
const COMMIT: Duration = Duration::from_millis(20);

/// Event types of a consumer with metrics of their own; further ones share `other`.
const EVENT_TYPES_MAX: usize = 100;

impl ConsumerInbox {
    /// A consumer with the handlers loaded for it.
    pub fn new(
        consumer_id: i32,
        tenant: String,
        name: String,
        policy: Policy,
        owner: String,
        sessions: Arc<Sessions>,
        handlers: Arc<dyn Handlers>,
    ) -> Arc<Self> {
        let pace = Pace::new(policy.batch.messages_max);
        let breakers = Breakers::new(&tenant, &name, policy.breaker.clone());
        let memory = policy.limits.memory_bytes as u64;
        let shadows = Queue::new(consumer_id, (&tenant, &name), policy.payload, memory, &sessions);
        let caps =
            ConsumerCaps { transactions_max: policy.limits.transactions_max, messages_per_second: policy.limits.messages_per_second };
        sessions.scheduler().set_caps(sessions.tenant_id, consumer_id, caps);
        let schemas = Schemas::new(&policy.schemas);
        // A counter that begins with its first case would not be seen to rise.
        metrics::counter!("oncebox_suspect_ids_total", "tenant" => tenant.clone(), "consumer" => name.clone()).increment(0);
        Arc::new(Self {
            consumer_id,
            tenant,
            name,
            policy,
            owner,
            sessions,
            pace,
            due: Arc::default(),
            breakers,
            shadows,
            handlers: watch::Sender::new(handlers),
            schemas,
            stale: OnceLock::new(),
            decoder: OnceLock::new(),
            event_types: Mutex::default(),
        })
    }

    /// Decode payloads by the schemas of a registry.
    pub fn decode_with(&self, decoder: Decoder) {
        let _ = self.decoder.set(decoder); // there is one for all
    }

    /// Have the schemas of payloads at hand. The answer is how many of these messages can be decoded now, from the first;
    /// an error is that not even that one can.
    pub(crate) async fn prepare<'a>(&self, payloads: impl Iterator<Item = Option<&'a [u8]>>) -> Result<usize, InboxError> {
        let mut prepared = 0;
        for payload in payloads {
            if let (Some(decoder), Some(payload)) = (self.decoder.get(), payload) {
                let error = match timeout(SCHEMA_TIMEOUT, decoder.prepare(payload)).await {
                    Ok(Ok(())) => None,
                    Ok(Err(error)) => Some(InboxError::RegistryAway(error)),
                    Err(_) => Some(InboxError::SchemaLate),
                };
                match error {
                    None => {}
                    Some(_) if prepared > 0 => return Ok(prepared),
                    Some(error) => return Err(error),
                }
            }
            prepared += 1;
        }
        Ok(prepared)
    }

    /// Switch to another set of handlers; it takes effect with the next transaction.
    pub fn set_handlers(&self, handlers: Arc<dyn Handlers>) {
        self.handlers.send_replace(handlers);
    }

    /// Whom to tell when a claim was refused because newer deployments are required.
    pub fn tell_when_stale(&self, notify: Arc<Notify>) {
        let _ = self.stale.set(notify); // there is one that loads
    }

    /// Finish the trial of a candidate that runs, and write what shadows found so far.
    pub async fn finish_shadows(&self) {
        self.shadows.close().await;
    }

    /// Circuit breakers of this consumer on this host that are not closed.
    pub fn breakers(&self) -> Vec<BreakerState> {
        self.breakers.states()
    }

    /// The same, where one of them turned since this was last asked.
    pub fn breakers_changed(&self) -> Option<Vec<BreakerState>> {
        self.breakers.changed()
    }

    /// What [`ConsumerInbox::breakers_changed`] answered last was told to nobody.
    pub fn breakers_untold(&self) {
        self.breakers.untold();
    }

    /// The live handlers.
    pub fn handlers(&self) -> Arc<dyn Handlers> {
        self.handlers.borrow().clone()
    }

    /// Ask for newer handlers than those of a generation that was refused, and wait for them. False: they
    /// did not come in time.
    pub(crate) async fn newer_than(&self, generation: i64) -> bool {
        if let Some(notify) = self.stale.get() {
            notify.notify_one();
        }
        let mut handlers = self.handlers.subscribe();
        let newer = handlers.wait_for(|handlers| handlers.generation() > generation);
        matches!(tokio::time::timeout(NEWER_TIMEOUT, newer).await, Ok(Ok(_)))
    }

    /// Call the retry workers when what a transaction is about to make due is due. One that does not commit
    /// calls them in vain; one that takes long to commit is found by the next look.
    pub(crate) fn due_after(&self, completion: &Completion) {
        completion.delays().for_each(|delay| self.due.after(delay + COMMIT));
    }

    /// Wait to be let in, for up to so many messages. `runs`: handlers may run, and need memory.
    pub(crate) async fn admit(&self, messages: usize, runs: bool) -> Admission {
        let memory = if runs { self.policy.limits.memory_bytes as u64 } else { 0 };
        let messages = messages.try_into().unwrap_or(u32::MAX);
        self.ask(Class::Fair, memory, messages).await
    }

    /// Wait for the tenant's next place, for a short transaction on which a rebalance waits.
    pub(crate) async fn admit_first(&self) -> Admission {
        self.ask(Class::First, 0, 0).await
    }

    async fn ask(&self, class: Class, memory: u64, messages: u32) -> Admission {
        let (tenant_id, consumer_id) = (self.sessions.tenant_id, self.consumer_id);
        self.sessions.scheduler().admit(Ask { tenant_id, consumer_id, class, memory, messages }).await
    }

    /// Wall clock for one call of a handler.
    pub(crate) fn deadline(&self, handler: &Arc<dyn Handler>) -> Duration {
        handler.deadline().unwrap_or(Duration::from_millis(self.policy.limits.deadline_ms))
    }

    /// What a message is in order with.
    pub(crate) fn ordering(&self, message: &Message) -> Option<i64> {
        order::ordering(self.consumer_id, self.policy.order, message)
    }

    /// `generation` is that of the handlers that were asked where the messages go: those loaded by now
    /// may be newer, and would speak for a version that is not theirs.
    pub(crate) fn claimant(&self, generation: i64) -> Claimant {
        Claimant { consumer_id: self.consumer_id, generation, payload: self.policy.payload }
    }

    /// The event type as a label of metrics.
    fn label(&self, event_type: &str) -> String {
        let mut known = self.event_types.lock().expect("no panic while held");
        if known.len() < EVENT_TYPES_MAX && !known.contains(event_type) {
            known.insert(event_type.to_owned());
        }
        if known.contains(event_type) { event_type.to_owned() } else { "other".to_owned() }
    }

    /// Count and log what a claim answered (S0-009, S0-040).
    pub(crate) fn count_claim(&self, message: &Message, claimed: &Claimed) {
        metrics::counter!("oncebox_claims_total", "tenant" => self.tenant.clone(), "consumer" => self.name.clone(),
            "event_type" => self.label(&message.event_type), "outcome" => claimed.name())
        .increment(1);
        if let Claimed::Known { status, same_payload, .. } = claimed {
            tracing::debug!(
                tenant = self.tenant,
                consumer = self.name,
                message_id = message.id,
                trace_id = message.trace_id(),
                status,
                same_payload,
                "duplicate skipped"
            );
        }
    }

    /// A claim that waited in vain for another session's claim of the same message; it is made again.
    pub(crate) fn count_elsewhere(&self) {
        metrics::counter!("oncebox_claims_total", "tenant" => self.tenant.clone(), "consumer" => self.name.clone(),
            "event_type" => "", "outcome" => "in_flight_elsewhere")
        .increment(1);
    }

    /// How long a handler took, also one that was stopped.
    pub(crate) fn count_duration(&self, message: &Message, took: Duration) {
        metrics::histogram!("oncebox_run_duration_seconds", "tenant" => self.tenant.clone(), "consumer" => self.name.clone(),
            "event_type" => self.label(&message.event_type))
        .record(took);
    }

    pub(crate) fn count_run(&self, message: &Message, disposition: Disposition) {
        metrics::counter!("oncebox_messages_total", "tenant" => self.tenant.clone(), "consumer" => self.name.clone(),
            "event_type" => self.label(&message.event_type), "disposition" => disposition.status())
        .increment(1);
    }

    /// Log a failure once, where it becomes a row.
    pub(crate) fn log_failure(&self, message: &Message, failure: &Failure, disposition: Disposition, attempt: u32) {
        metrics::counter!("oncebox_failures_total", "tenant" => self.tenant.clone(), "consumer" => self.name.clone(),
            "event_type" => self.label(&message.event_type), "reason" => failure.kind.name())
        .increment(1);
        if disposition == Disposition::Parked {
            self.count_parked(message, failure.kind.name());
        }
        tracing::warn!(
            tenant = self.tenant,
            consumer = self.name,
            message_id = message.id,
            event_type = message.event_type,
            trace_id = message.trace_id(),
            attempt,
            reason = failure.kind.reason(),
            error = failure.text,
            disposition = disposition.status(),
            "message failed"
        );
    }

    fn count_parked(&self, message: &Message, reason: &str) {
        metrics::counter!("oncebox_parked_total", "tenant" => self.tenant.clone(), "consumer" => self.name.clone(),
            "event_type" => self.label(&message.event_type), "reason" => reason.split(':').next().unwrap_or(reason).to_owned())
        .increment(1);
    }

    /// Log a message that is kept for a person.
    pub(crate) fn log_parked(&self, message: &Message, reason: &str) {
        self.count_parked(message, reason);
        tracing::warn!(
            tenant = self.tenant,
            consumer = self.name,
            message_id = message.id,
            event_type = message.event_type,
            trace_id = message.trace_id(),
            reason,
            "message parked"
        );
    }
}
