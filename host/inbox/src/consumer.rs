//! A consumer as one host runs it.

use std::{
    collections::HashSet,
    sync::{
        Arc, Mutex, MutexGuard, OnceLock,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use oncebox_model::{
    error::InboxError,
    handler::{Handler, Handlers},
    message::Message,
    outcome::{Disposition, Failure},
    policy::{Policy, Schemas},
    status::BreakerState,
};
use oncebox_registry::Decoder;
use tokio::{
    sync::{Notify, watch},
    time::timeout,
};

use crate::{
    admission::{Admission, Ask, Class, ConsumerCaps, batch_sizer::Pace, breaker::Breakers},
    batch::{
        claim::{Claimant, Claimed},
        complete::{Completion, Recorded},
    },
    ordering::key_lock,
    retry::{lease::Interrupted, wakeup::Due},
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
    /// Longest call of a handler that the host allows, whatever the policy says.
    deadline_max: Option<Duration>,
    /// Event types that have metrics of their own; a producer can invent any number of them.
    event_types: Mutex<HashSet<String>>,
    /// Deliveries that were refused, since their message was done already; the host takes the count
    /// away when it reports it.
    duplicates: Arc<AtomicU64>,
    /// Leases whose runs ended for no fault of their messages, which the database is still to be
    /// told.
    interrupted: Mutex<Vec<Interrupted>>,
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
        let schemas = Schemas::new(&policy.schemas);
        Self::with_schemas(consumer_id, tenant, name, policy, owner, sessions, handlers, schemas)
    }

    /// The same with the schemas of its policy, which were compiled where that holds up nobody.
    #[allow(clippy::too_many_arguments, reason = "those of `new`, and what it would compile")]
    pub fn with_schemas(
        consumer_id: i32,
        tenant: String,
        name: String,
        policy: Policy,
        owner: String,
        sessions: Arc<Sessions>,
        handlers: Arc<dyn Handlers>,
        schemas: Schemas,
    ) -> Arc<Self> {
        let pace = Pace::new(policy.batch.messages_max);
        let breakers = Breakers::new(&tenant, &name, policy.breaker.clone());
        let memory = policy.limits.memory_bytes as u64;
        let shadows = Queue::new(consumer_id, (&tenant, &name), policy.payload, memory, &sessions);
        let caps = ConsumerCaps {
            transactions_max: policy.limits.transactions_max,
            messages_per_second: policy.limits.messages_per_second,
        };
        sessions.scheduler().set_caps(sessions.tenant_id, consumer_id, caps);
        let deadline_max = sessions.scheduler().deadline_max(sessions.tenant_id);
        // A counter that begins with its first case would not be seen to rise.
        metrics::counter!("oncebox_suspect_ids_total", "tenant" => tenant.clone(), "consumer" => name.clone()).increment(0);
        metrics::counter!("oncebox_claims_withdrawn_total", "tenant" => tenant.clone(), "consumer" => name.clone()).increment(0);
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
            deadline_max,
            event_types: Mutex::default(),
            duplicates: Arc::default(),
            interrupted: Mutex::default(),
        })
    }

    /// Its tenant's sessions.
    pub fn sessions(&self) -> &Arc<Sessions> {
        &self.sessions
    }

    /// Decode payloads by the schemas of a registry.
    pub fn decode_with(&self, decoder: Decoder) {
        let _ = self.decoder.set(decoder); // there is one for all
    }

    /// Have the schemas of payloads at hand. The answer is how many of these messages can be
    /// decoded now, from the first; an error is that not even that one can.
    pub(crate) async fn prepare<'a>(
        &self,
        payloads: impl Iterator<Item = Option<&'a [u8]>>,
    ) -> Result<usize, InboxError> {
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

    /// Stop handlers that run: their transactions are rolled back, and their messages come again
    /// with attempts as before. Returns how many transactions were told.
    pub fn stop_handlers(&self) -> usize {
        self.sessions.scheduler().stop(self.consumer_id)
    }

    /// The longest call of a handler, where the host or the tenant's limits allow less than the
    /// policy says.
    pub fn deadline_cut(&self) -> Option<Duration> {
        self.deadline_max
            .filter(|most| *most < Duration::from_millis(self.policy.limits.deadline_ms))
    }

    /// The live handlers.
    pub fn handlers(&self) -> Arc<dyn Handlers> {
        self.handlers.borrow().clone()
    }

    /// Ask for newer handlers than those of a generation that was refused, and wait for them.
    /// False: they did not come in time.
    pub(crate) async fn newer_than(&self, generation: i64) -> bool {
        if let Some(notify) = self.stale.get() {
            notify.notify_one();
        }
        let mut handlers = self.handlers.subscribe();
        let newer = handlers.wait_for(|handlers| handlers.generation() > generation);
        matches!(tokio::time::timeout(NEWER_TIMEOUT, newer).await, Ok(Ok(_)))
    }

    /// Call the retry workers when what a transaction is about to make due is due. One that does
    /// not commit calls them in vain; one that takes long to commit is found by the next look.
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
        self.sessions
            .scheduler()
            .admit(Ask { tenant_id, consumer_id, class, memory, messages })
            .await
    }

    /// Wall clock for one call of a handler.
    pub(crate) fn deadline(&self, handler: &Arc<dyn Handler>) -> Duration {
        let deadline =
            handler.deadline().unwrap_or(Duration::from_millis(self.policy.limits.deadline_ms));
        self.deadline_max.map_or(deadline, |most| deadline.min(most))
    }

    /// What a message is in order with.
    pub(crate) fn ordering(&self, message: &Message) -> Option<i64> {
        key_lock::ordering(self.consumer_id, self.policy.order, message)
    }

    /// `generation` is that of the handlers that were asked where the messages go: those loaded by
    /// now may be newer, and would speak for a version that is not theirs.
    pub(crate) fn claimant(&self, generation: i64) -> Claimant {
        Claimant { consumer_id: self.consumer_id, generation, payload: self.policy.payload }
    }

    /// Leases that the database is still to be told of.
    pub(crate) fn interrupted(&self) -> MutexGuard<'_, Vec<Interrupted>> {
        self.interrupted.lock().expect("no panic while held")
    }

    /// Returns the counter of refused duplicates, which is this inbox's alone as long as it counts.
    pub fn duplicates(&self) -> Arc<AtomicU64> {
        self.duplicates.clone()
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
        let outcome = claimed.name();
        metrics::counter!("oncebox_claims_total", "tenant" => self.tenant.clone(), "consumer" => self.name.clone(),
            "event_type" => self.label(&message.event_type), "outcome" => outcome)
        .increment(1);
        if claimed.is_duplicate() {
            self.duplicates.fetch_add(1, Ordering::Relaxed);
        }
        let (tenant, consumer, message_id, event_type) =
            (&self.tenant, &self.name, &message.id, &message.event_type);
        let trace_id = message.trace_id();
        match claimed {
            Claimed::Known { status, same_payload, .. } => {
                tracing::debug!(
                    tenant,
                    consumer,
                    message_id,
                    event_type,
                    trace_id,
                    outcome,
                    status,
                    same_payload,
                    "duplicate skipped"
                );
            }
            _ => tracing::debug!(
                tenant,
                consumer,
                message_id,
                event_type,
                trace_id,
                outcome,
                "message claimed"
            ),
        }
    }

    /// Count and log a claim that waited in vain for another session's claim of one of these
    /// messages; it is made again. Which of them it was, PostgreSQL does not tell: their event type
    /// is named where they have one.
    pub(crate) fn count_elsewhere<'a>(&self, messages: impl Iterator<Item = &'a Message>) {
        let (mut event_type, mut count) = (None, 0);
        for message in messages {
            count += 1;
            event_type = match event_type {
                None => Some(&*message.event_type),
                Some(known) if known == message.event_type => Some(known),
                Some(_) => Some(""),
            };
        }
        let event_type = event_type.unwrap_or_default();
        metrics::counter!("oncebox_claims_total", "tenant" => self.tenant.clone(), "consumer" => self.name.clone(),
            "event_type" => self.label(event_type), "outcome" => "in_flight_elsewhere")
        .increment(1);
        tracing::debug!(
            tenant = self.tenant,
            consumer = self.name,
            event_type,
            messages = count,
            "claim in flight elsewhere"
        );
    }

    /// Count claims that were written and taken back, since there was no time to run them.
    pub(crate) fn count_withdrawn(&self, withdrawn: usize) {
        metrics::counter!("oncebox_claims_withdrawn_total", "tenant" => self.tenant.clone(), "consumer" => self.name.clone())
            .increment(withdrawn as u64);
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

    /// Count and log failures whose rows are committed, of these messages.
    pub(crate) fn tell_failures<'a>(
        &self,
        messages: impl Iterator<Item = &'a Message> + Clone,
        failures: impl Iterator<Item = Recorded>,
    ) {
        for Recorded { message_id, failure, disposition, attempt } in failures {
            if let Some(message) = messages.clone().find(|message| message.id == message_id) {
                self.log_failure(message, &failure, disposition, attempt);
            }
        }
    }

    /// Count and log a failure whose row is committed. One that parks its message is logged as that
    /// (S1-088).
    fn log_failure(
        &self,
        message: &Message,
        failure: &Failure,
        disposition: Disposition,
        attempt: u32,
    ) {
        self.count_failure(&message.event_type, failure.kind.name());
        let reason = failure.kind.reason();
        if disposition == Disposition::Parked {
            let Message { id, event_type, .. } = message;
            return self.log_parked(&Parked {
                attempt: Some(attempt),
                error: Some(&failure.text),
                trace_id: message.trace_id(),
                ..Parked::new(id, event_type, &reason)
            });
        }
        tracing::warn!(
            tenant = self.tenant,
            consumer = self.name,
            message_id = message.id,
            event_type = message.event_type,
            trace_id = message.trace_id(),
            attempt,
            reason,
            error = failure.text,
            disposition = disposition.status(),
            "message failed"
        );
    }

    /// Count a run that failed, or that ended without an answer.
    pub(crate) fn count_failure(&self, event_type: &str, reason: &'static str) {
        metrics::counter!("oncebox_failures_total", "tenant" => self.tenant.clone(), "consumer" => self.name.clone(),
            "event_type" => self.label(event_type), "reason" => reason)
        .increment(1);
    }

    /// Count and log a message that is kept for a person.
    pub(crate) fn log_parked(&self, parked: &Parked<'_>) {
        let Parked { message_id, event_type, trace_id, reason, attempt, error, collides_with } =
            *parked;
        metrics::counter!("oncebox_parked_total", "tenant" => self.tenant.clone(), "consumer" => self.name.clone(),
            "event_type" => self.label(event_type), "reason" => reason.split(':').next().unwrap_or(reason).to_owned())
        .increment(1);
        let (tenant, consumer) = (&self.tenant, &self.name);
        tracing::warn!(
            tenant,
            consumer,
            message_id,
            event_type,
            trace_id,
            reason,
            attempt,
            error,
            collides_with,
            "message parked"
        );
    }
}

/// A message that is kept for a person, as it is told.
pub(crate) struct Parked<'a> {
    /// The id of its row.
    pub(crate) message_id: &'a str,
    /// Its event type; empty where it has none.
    pub(crate) event_type: &'a str,
    /// The trace it is part of.
    pub(crate) trace_id: Option<&'a str>,
    /// Why, as its row says.
    pub(crate) reason: &'a str,
    /// Which run parked it; none where it never ran.
    pub(crate) attempt: Option<u32>,
    /// What that run said.
    pub(crate) error: Option<&'a str>,
    /// The known id that it came with, where another payload has that.
    pub(crate) collides_with: Option<&'a str>,
}

impl<'a> Parked<'a> {
    /// One of which no more is known.
    pub(crate) fn new(message_id: &'a str, event_type: &'a str, reason: &'a str) -> Self {
        Self {
            message_id,
            event_type,
            trace_id: None,
            reason,
            attempt: None,
            error: None,
            collides_with: None,
        }
    }
}
