//! One consumer as this host runs it: its inbox, its membership in the Kafka group, its retry
//! workers.

use std::{sync::Arc, time::Duration};

use anyhow::{Context, Result, bail};
use oncebox_control::{Consumer, RunMode};
use oncebox_inbox::{ConsumerInbox, PartitionReceiver, Sessions, replay, retry};
use oncebox_kafka::Drained;
use oncebox_model::{
    BreakerState,
    handler::Handlers,
    outgoing::OutgoingWakeup,
    policy::{Policy, Schemas, WireFormat},
    reference::ReferenceFetcher,
};
use tokio::{sync::Notify, task::JoinHandle};
use tokio_util::sync::CancellationToken;

use crate::{
    consumer::{
        dead_letter_topic,
        horizon::HorizonGuard,
        idle::IdleConsumer,
        router::Routes,
        starts::{Mark, Trial},
    },
    context::HostContext,
};

/// Pause between two stops of the handlers of a consumer that must end: another may have begun in
/// between.
const STOP_AGAIN: Duration = Duration::from_millis(250);

/// The status of a started consumer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Status {
    /// It reads, or runs due messages.
    Running,
    /// It ended by itself, for this reason.
    Ended(String),
}

/// A consumer that runs here.
pub(crate) struct ConsumerRuntime {
    inbox: Arc<ConsumerInbox>,
    /// The Kafka half; none for a consumer that reads nothing.
    reading: Option<IdleConsumer>,
    routes: Arc<Routes>,
    workers: Vec<JoinHandle<()>>,
    stop: CancellationToken,
    /// Checks of its memory; none for a consumer that reads nothing, or needs none.
    _horizon: Option<HorizonGuard>,
}

/// The parts that a consumer is started with.
pub(crate) struct StartParts {
    pub(crate) routes: Arc<Routes>,
    pub(crate) sessions: Arc<Sessions>,
    pub(crate) schemas: Schemas,
    /// Fetcher of payloads that messages refer to, where the policy has references.
    pub(crate) fetcher: Option<Arc<dyn ReferenceFetcher>>,
    /// The trial under which its client is made, at each opening.
    pub(crate) trial: Trial,
    /// The mark of this start, for a consumer that makes a client or is watched.
    pub(crate) mark: Option<Mark>,
    /// Signal to the relay, for the database of the tenant.
    pub(crate) outgoing_wakeup: Arc<OutgoingWakeup>,
}

impl ConsumerRuntime {
    /// Starts a consumer, or only its retry workers where it is drained, or only its replays where
    /// it is paused. It notifies `look` when claims are refused because newer deployments are
    /// required.
    pub(crate) fn start(
        host: &HostContext,
        consumer: &Consumer,
        prepared: StartParts,
        look: Arc<Notify>,
        work: RunMode,
    ) -> Result<Self> {
        let StartParts { routes, sessions, schemas, fetcher, trial, mark, outgoing_wakeup } =
            prepared;
        let policy = consumer.policy()?;
        if let Some((_, fault)) = policy.native_fault() {
            bail!("its policy cannot be used, and would be refused today: {fault}");
        }
        let (tenant, name) = (consumer.tenant.clone(), consumer.name.clone());
        let inbox = ConsumerInbox::with_schemas(
            consumer.consumer_id,
            tenant.clone(),
            name.clone(),
            policy.clone(),
            host.owner.clone(),
            sessions,
            routes.clone(),
            schemas,
        );
        warn_of_deadline(&inbox, consumer, &policy);
        inbox.tell_when_stale(look);
        inbox.tell_relay(consumer.tenant_id, outgoing_wakeup);
        fetcher.into_iter().for_each(|fetcher| inbox.fetch_with(fetcher));
        if policy.wire_format == WireFormat::Confluent {
            let decoder = host.decoder.clone();
            inbox.decode_with(decoder.context(
                "its policy says `wire_format = \"confluent\"`, and this host knows no schema \
                    registry; set `schema_registry.url` (ONCEBOX_SCHEMA_REGISTRY_URL)",
            )?);
        }
        let config = host.kafka.config(&tenant, &name, &policy);
        let copying = config.clone();
        let horizon = match work {
            RunMode::Consume => host.horizons.watch(&config, &policy),
            RunMode::RetryOnly | RunMode::ReplayOnly | RunMode::Stopped => None,
        };
        let reading = match work {
            RunMode::Consume => {
                let kafka_inbox = Arc::new(PartitionReceiver(inbox.clone()));
                Some(IdleConsumer::start(
                    host.idle_limits.clone(),
                    config,
                    kafka_inbox,
                    Some(trial),
                    mark,
                    inbox.sessions().clone(),
                )?)
            }
            RunMode::RetryOnly | RunMode::ReplayOnly | RunMode::Stopped => None,
        };
        host.due_poller.watch_consumer(&inbox);
        host.duplicates.watch(inbox.consumer_id, inbox.duplicates());
        let stop = CancellationToken::new();
        // A paused consumer runs no messages but those of a replay.
        let is_paused = work == RunMode::ReplayOnly;
        let retries = if is_paused { 0 } else { policy.retry.workers };
        let work = |_| tokio::spawn(retry::work(inbox.clone(), stop.clone()));
        let mut workers: Vec<_> = (0..retries).map(work).collect();
        workers.push(tokio::spawn(replay::work(inbox.clone(), stop.clone())));
        if let Some(topic) = policy.dead_letters.topic.filter(|_| !is_paused) {
            workers.push(tokio::spawn(dead_letter_topic::copy(
                inbox.clone(),
                copying,
                topic,
                stop.clone(),
            )));
        }
        let generation = routes.generation();
        tracing::info!(tenant = consumer.tenant, consumer = consumer.name, generation, topics = ?policy.topics, "consumer started");
        Ok(Self { inbox, reading, routes, workers, stop, _horizon: horizon })
    }

    /// Returns the circuit breakers that are not closed, if any changed since the last call.
    pub(crate) fn breakers_changed(&self) -> Option<Vec<BreakerState>> {
        self.inbox.breakers_changed()
    }

    /// Marks the last answer of [`Self::breakers_changed`] as unsent.
    pub(crate) fn breakers_unsent(&self) {
        self.inbox.breakers_unsent();
    }

    /// Returns the generation of deployments that its next transaction uses.
    pub(crate) fn generation(&self) -> i64 {
        self.routes.generation()
    }

    /// Returns whether the consumer is outside its Kafka group because there is nothing to read.
    pub(crate) fn is_idle(&self) -> bool {
        self.reading.as_ref().is_some_and(|reading| !reading.is_open())
    }

    /// Returns whether the consumer has a canary.
    pub(crate) fn has_canary(&self) -> bool {
        self.routes.has_canary()
    }

    /// Switches to other deployments from the next transaction on, and returns their generation.
    pub(crate) fn switch(&mut self, routes: Arc<Routes>) -> i64 {
        self.routes = routes.clone();
        self.inbox.set_handlers(routes);
        self.generation()
    }

    /// Returns whether the consumer runs, or the error with which it ended.
    pub(crate) fn status(&self) -> Status {
        if self.workers.iter().any(JoinHandle::is_finished) {
            return Status::Ended("a worker panicked; see the log".to_owned());
        }
        match self.reading.as_ref().and_then(IdleConsumer::failure) {
            None => Status::Running,
            Some(error) => Status::Ended(error.to_string()),
        }
    }

    /// Drains the consumer, and stops handlers that run for longer than `patience`: their
    /// transactions are rolled back, and their messages are redelivered. Returns whether everything
    /// ended in time.
    pub(crate) async fn drain_within(self, patience: Duration, within: Duration) -> bool {
        let inbox = self.inbox.clone();
        let stop = async {
            tokio::time::sleep(patience).await;
            loop {
                let stopped = inbox.stop_handlers();
                if stopped > 0 {
                    tracing::info!(
                        tenant = inbox.tenant,
                        consumer = inbox.name,
                        transactions = stopped,
                        "handlers stopped"
                    );
                }
                tokio::time::sleep(STOP_AGAIN).await;
            }
        };
        tokio::select! {
            clean = self.drain(within) => clean,
            () = stop => false,
        }
    }

    /// Finishes running messages, and returns whether all of them ended within the time.
    pub(crate) async fn drain(self, within: Duration) -> bool {
        self.stop.cancel();
        let workers = tokio::time::timeout(within, futures::future::join_all(self.workers));
        let reading = async {
            match self.reading {
                Some(reading) => reading.drain(within).await,
                None => Drained::Clean,
            }
        };
        let (drained, workers) = tokio::join!(reading, workers);
        let shadows = tokio::time::timeout(within, self.inbox.finish_shadows()).await;
        drained == Drained::Clean && workers.is_ok() && shadows.is_ok()
    }
}

/// Logs where the host or the tenant's limits allow less time than the policy says.
fn warn_of_deadline(inbox: &ConsumerInbox, consumer: &Consumer, policy: &Policy) {
    if let Some(most) = inbox.deadline_cut() {
        tracing::warn!(
            tenant = consumer.tenant,
            consumer = consumer.name,
            deadline_ms = policy.limits.deadline_ms,
            deadline_ms_max = most.as_millis() as u64,
            "policy's deadline cut: `runtime.deadline_ms_max` or the tenant's limits allow less"
        );
    }
}
