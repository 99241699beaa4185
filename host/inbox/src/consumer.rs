//! A consumer as one host runs it.

use std::{
    collections::{BTreeSet, HashSet},
    sync::{Arc, Mutex, MutexGuard, OnceLock, atomic::AtomicU64},
    time::Duration,
};

use oncebox_model::{
    error::InboxError,
    handler::{Handler, Handlers},
    message::Message,
    ordering::ordering_hash,
    outgoing::OutgoingWakeup,
    policy::{PastHorizon, Policy, Schemas},
    reference::ReferenceFetcher,
    status::BreakerState,
};
use oncebox_registry::Decoder;
use tokio::{
    sync::{Notify, watch},
    time::timeout,
};

use crate::{
    admission::{
        Admission, AdmissionRequest, Class, ConsumerCaps, batch_sizer::BatchSizer,
        breaker::Breakers,
    },
    batch::{claim::Claimant, complete::Completion},
    retry::{interrupted::Interrupted, wakeup::Wakeup},
    session::Sessions,
    shadow::TrialQueue,
};

/// A consumer's inbox: its policy, its tenant's sessions, its live handlers and its sizer.
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
    /// Name of this process in leases.
    pub owner: String,
    /// Connections of the tenant.
    pub(crate) sessions: Arc<Sessions>,
    /// Size, mode and serialization of the next transactions.
    pub(crate) sizer: BatchSizer,
    /// Wakeups for the retry workers.
    pub(crate) wakeup: Arc<Wakeup>,
    /// Wakeups for the worker of replays.
    pub(crate) replay_wakeup: Notify,
    /// Circuit breakers of the handlers' versions on this host.
    pub(crate) breakers: Arc<Breakers>,
    /// Messages that wait for a candidate to be tried on them.
    pub(crate) shadows: TrialQueue,
    /// Live handlers, replaced with each deployment.
    handlers: watch::Sender<Arc<dyn Handlers>>,
    /// Schemas that payloads have to match.
    pub(crate) schemas: Schemas,
    /// Signal to the loader of deployments that the loaded ones are stale.
    stale: OnceLock<Arc<Notify>>,
    /// Decoder of payloads that come in the wire format of a schema registry; unset otherwise.
    pub(crate) decoder: OnceLock<Decoder>,
    /// Fetcher of payloads that messages refer to; unset where none is fetched.
    pub(crate) fetcher: OnceLock<Arc<dyn ReferenceFetcher>>,
    /// Signal to the relay of this process, with the tenant's key; unset where none runs.
    outgoing_wakeup: OnceLock<(i32, Arc<OutgoingWakeup>)>,
    /// Longest call of a handler that the host allows, whatever the policy says.
    deadline_max: Option<Duration>,
    /// Event types with metrics of their own, of which a producer can invent any number; bounded by
    /// `EVENT_TYPES_MAX`.
    pub(crate) event_types: Mutex<HashSet<String>>,
    /// Count of refused deliveries whose messages were done already. The host takes the count away
    /// when it reports it.
    pub(crate) duplicates: Arc<AtomicU64>,
    /// Leases whose runs ended for no fault of their messages, still to be reported to the
    /// database.
    interrupted: Mutex<Vec<Interrupted>>,
}

/// Longest wait for a schema in one call. The fetch goes on after it.
const SCHEMA_TIMEOUT: Duration = Duration::from_secs(5);

/// Longest wait for newer handlers after a transaction was refused as stale.
const NEWER_TIMEOUT: Duration = Duration::from_secs(5);

/// Time for a commit to end, added to the delay of a wakeup.
pub(crate) const COMMIT: Duration = Duration::from_millis(20);

impl ConsumerInbox {
    /// Creates a consumer with its loaded handlers, and compiles the schemas of its policy.
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

    /// Creates a consumer with the compiled schemas of its policy. The caller compiles them where
    /// that holds up no other task.
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
        let sizer = BatchSizer::new(policy.batch.messages_max);
        let breakers = Breakers::new(&tenant, &name, policy.breaker.clone());
        let memory = policy.limits.memory_bytes as u64;
        let shadows =
            TrialQueue::new(consumer_id, (&tenant, &name), policy.payload, memory, &sessions);
        let caps = ConsumerCaps {
            transactions_max: policy.limits.transactions_max,
            messages_per_second: policy.limits.messages_per_second,
        };
        sessions.scheduler().set_caps(sessions.tenant_id, consumer_id, caps);
        let deadline_max = sessions.scheduler().deadline_max(sessions.tenant_id);
        // A counter that appears with its first case would not be seen to rise.
        metrics::counter!("oncebox_suspect_ids_total", "tenant" => tenant.clone(), "consumer" => name.clone()).increment(0);
        metrics::counter!("oncebox_claims_withdrawn_total", "tenant" => tenant.clone(), "consumer" => name.clone()).increment(0);
        Arc::new(Self {
            consumer_id,
            tenant,
            name,
            policy,
            owner,
            sessions,
            sizer,
            wakeup: Arc::default(),
            replay_wakeup: Notify::new(),
            breakers,
            shadows,
            handlers: watch::Sender::new(handlers),
            schemas,
            stale: OnceLock::new(),
            decoder: OnceLock::new(),
            fetcher: OnceLock::new(),
            outgoing_wakeup: OnceLock::new(),
            deadline_max,
            event_types: Mutex::default(),
            duplicates: Arc::default(),
            interrupted: Mutex::default(),
        })
    }

    /// Returns the sessions of the tenant.
    pub fn sessions(&self) -> &Arc<Sessions> {
        &self.sessions
    }

    /// Sets the decoder of payloads in the wire format of a schema registry. Only the first call
    /// has an effect.
    pub fn decode_with(&self, decoder: Decoder) {
        let _ = self.decoder.set(decoder); // all consumers share one decoder
    }

    /// Fetches the schemas of payloads and returns how many of these messages, from the first, can
    /// be decoded now. An error means that the first one cannot.
    pub(crate) async fn prepare<'a>(
        &self,
        payloads: impl Iterator<Item = Option<&'a [u8]>>,
    ) -> Result<usize, InboxError> {
        let mut prepared = 0;
        for payload in payloads {
            if let (Some(decoder), Some(payload)) = (self.decoder.get(), payload) {
                let error = match timeout(SCHEMA_TIMEOUT, decoder.prepare(payload)).await {
                    Ok(Ok(())) => None,
                    Ok(Err(error)) => Some(InboxError::RegistryUnavailable(error)),
                    Err(_) => Some(InboxError::SchemaTimeout),
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

    /// Replaces the handlers, with effect from the next transaction.
    pub fn set_handlers(&self, handlers: Arc<dyn Handlers>) {
        self.handlers.send_replace(handlers);
    }

    /// Registers the loader of deployments, which is notified when a claim is refused because newer
    /// deployments are required.
    pub fn tell_when_stale(&self, notify: Arc<Notify>) {
        let _ = self.stale.set(notify); // there is only one loader
    }

    /// Registers the signal to the relay of this process, which is told of outgoing messages after
    /// their commit, and knows the tenant by its key. Only the first call has an effect.
    pub fn tell_relay(&self, tenant_id: i32, wakeup: Arc<OutgoingWakeup>) {
        let _ = self.outgoing_wakeup.set((tenant_id, wakeup)); // there is only one relay
    }

    /// Tells the relay of destinations that a committed transaction has messages for.
    pub(crate) fn tell_relay_of(&self, destinations: BTreeSet<String>) {
        if let Some((tenant_id, wakeup)) = self.outgoing_wakeup.get() {
            wakeup.notify(*tenant_id, destinations);
        }
    }

    /// Wakes a retry worker, for a message of this inbox that has just become due.
    pub fn wake_worker(&self) {
        self.wakeup.now();
    }

    /// Finishes the trial of a candidate that runs, and writes the results of shadows.
    pub async fn finish_shadows(&self) {
        self.shadows.close().await;
    }

    /// Returns the circuit breakers of this consumer on this host that are not closed.
    pub fn breakers(&self) -> Vec<BreakerState> {
        self.breakers.states()
    }

    /// Returns the circuit breakers that are not closed, if any breaker changed its state since the
    /// last call. The first call returns them in any case.
    pub fn breakers_changed(&self) -> Option<Vec<BreakerState>> {
        self.breakers.changed()
    }

    /// Marks the last answer of [`ConsumerInbox::breakers_changed`] as unsent, so that the next
    /// call returns it again.
    pub fn breakers_unsent(&self) {
        self.breakers.untold();
    }

    /// Stops handlers that run. Their transactions are rolled back, and their messages come again
    /// with attempts as before. Returns how many transactions were stopped.
    pub fn stop_handlers(&self) -> usize {
        self.sessions.scheduler().stop(self.consumer_id)
    }

    /// Returns the longest call of a handler, where the host or the tenant's limits allow less than
    /// the policy says.
    pub fn deadline_cut(&self) -> Option<Duration> {
        self.deadline_max
            .filter(|most| *most < Duration::from_millis(self.policy.limits.deadline_ms))
    }

    /// Returns the live handlers.
    pub fn handlers(&self) -> Arc<dyn Handlers> {
        self.handlers.borrow().clone()
    }

    /// Requests newer handlers than those of a refused generation, and waits for them. Returns
    /// false where they do not come in time.
    pub(crate) async fn newer_than(&self, generation: i64) -> bool {
        if let Some(notify) = self.stale.get() {
            notify.notify_one();
        }
        let mut handlers = self.handlers.subscribe();
        let newer = handlers.wait_for(|handlers| handlers.generation() > generation);
        matches!(tokio::time::timeout(NEWER_TIMEOUT, newer).await, Ok(Ok(_)))
    }

    /// Schedules a wakeup of the retry workers for each message that a transaction is about to make
    /// due. A transaction that does not commit wakes them in vain. The poller finds the messages of
    /// one that takes long to commit.
    pub(crate) fn due_after(&self, completion: &Completion) {
        completion.delays().for_each(|delay| self.wakeup.after(delay + COMMIT));
    }

    /// Waits for admission to a transaction of at most `messages` messages. With `runs`, handlers
    /// may run in it, and it reserves their memory.
    pub(crate) async fn admit(&self, messages: usize, runs: bool) -> Admission {
        let memory = if runs { self.policy.limits.memory_bytes as u64 } else { 0 };
        let messages = messages.try_into().unwrap_or(u32::MAX);
        self.ask(Class::Fair, memory, messages).await
    }

    /// Waits for the tenant's next admission, for a short transaction that a rebalance waits for.
    pub(crate) async fn admit_first(&self) -> Admission {
        self.ask(Class::First, 0, 0).await
    }

    /// Waits for an admission of one class by the host's scheduler.
    async fn ask(&self, class: Class, memory: u64, messages: u32) -> Admission {
        let (tenant_id, consumer_id) = (self.sessions.tenant_id, self.consumer_id);
        self.sessions
            .scheduler()
            .admit(AdmissionRequest { tenant_id, consumer_id, class, memory, messages })
            .await
    }

    /// Returns the wall-clock limit of one call: the handler's or the policy's, within the host's.
    pub(crate) fn deadline(&self, handler: &Arc<dyn Handler>) -> Duration {
        let deadline =
            handler.deadline().unwrap_or(Duration::from_millis(self.policy.limits.deadline_ms));
        self.deadline_max.map_or(deadline, |most| deadline.min(most))
    }

    /// Returns the number that a message shares with those that it must run in order with; none
    /// where order does not matter.
    pub(crate) fn ordering(&self, message: &Message) -> Option<i64> {
        ordering_hash(self.consumer_id, self.policy.order, message)
    }

    /// Returns the claimant with the generation of the handlers that chose where the messages go.
    /// Handlers loaded since may be newer, and their generation would stand for versions that are
    /// not theirs.
    pub(crate) fn claimant(&self, generation: i64) -> Claimant {
        let policy = &self.policy;
        Claimant {
            consumer_id: self.consumer_id,
            generation,
            payload: policy.payload,
            payload_bytes_max: policy.limits.payload_bytes_max,
            parks_forgotten: policy.has_horizon() && policy.replay.past_horizon != PastHorizon::Run,
            is_light: policy.is_light(),
            is_front: false,
        }
    }

    /// Locks the list of leases that are still to be reported to the database.
    pub(crate) fn interrupted(&self) -> MutexGuard<'_, Vec<Interrupted>> {
        self.interrupted.lock().expect("no panic while held")
    }

    /// Returns the counter of refused duplicates; only this inbox adds to it.
    pub fn duplicates(&self) -> Arc<AtomicU64> {
        self.duplicates.clone()
    }
}
