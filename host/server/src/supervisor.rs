//! Starts what the rows say, keeps it running, and switches handlers when a deployment changes.

use std::{
    collections::{BTreeMap, HashMap},
    sync::Arc,
    time::Duration,
};

use anyhow::{Context, Result};
use futures::{FutureExt, future::BoxFuture};
use oncebox_inbox::{
    Admin, Budget, Consumer, ConsumerInbox, InboxError, PartitionInbox, SessionSettings, Sessions, message::Record, retry,
};
use oncebox_kafka::{ConsumerConfig, ConsumerHandle, Drained, SinkError, Timing};
use tokio::{sync::watch, task::JoinHandle};
use tokio_util::sync::CancellationToken;

use crate::{handlers::Loader, http::Readiness, report};

/// How often rows are looked at.
const POLL: Duration = Duration::from_millis(500);
/// How often partitions are made ahead of time.
const PARTITIONS: Duration = Duration::from_secs(600);
/// Longest pause before a failed consumer is started again.
const RESTART_MAX: Duration = Duration::from_secs(60);

/// What all consumers of a host share.
pub(crate) struct Supervisor {
    pub(crate) admin: Admin,
    pub(crate) loader: Loader,
    pub(crate) budget: Arc<Budget>,
    pub(crate) settings: SessionSettings,
    pub(crate) properties: BTreeMap<String, String>,
    pub(crate) owner: String,
    pub(crate) readiness: watch::Sender<Readiness>,
}

/// A consumer that runs here.
struct Running {
    inbox: Arc<ConsumerInbox>,
    generation: i64,
    kafka: ConsumerHandle,
    workers: Vec<JoinHandle<()>>,
    stop: CancellationToken,
}

/// A consumer that did not start or ended by itself, until it is tried again.
struct Failing {
    failures: u32,
    again_at: tokio::time::Instant,
    error: String,
}

#[derive(Default)]
struct State {
    sessions: HashMap<String, Arc<Sessions>>,
    running: HashMap<i32, Running>,
    failing: HashMap<i32, Failing>,
    /// Retry workers of consumers that ended, on their last message.
    ending: Vec<JoinHandle<()>>,
}

impl Supervisor {
    /// Run until told to stop, then drain everything.
    pub(crate) async fn run(self, stop: CancellationToken, drain: Duration) -> Drained {
        let mut state = State::default();
        let mut partitions_due = tokio::time::Instant::now();
        while !stop.is_cancelled() {
            if partitions_due <= tokio::time::Instant::now() {
                self.make_partitions().await;
                partitions_due += PARTITIONS;
            }
            // What it does after its last wait is done at once, so that nothing is left half started.
            let reconciled = tokio::select! {
                () = stop.cancelled() => break,
                reconciled = self.reconcile(&mut state) => reconciled,
            };
            let readiness = match reconciled {
                Ok(()) => state.readiness(),
                Err(error) => Err(report::one_line(&error)),
            };
            self.announce(readiness);
            tokio::select! {
                () = stop.cancelled() => {}
                () = tokio::time::sleep(POLL) => {}
            }
        }
        self.announce(Err("draining".to_owned()));
        state.drain(drain).await
    }

    async fn make_partitions(&self) {
        if let Err(error) = oncebox_inbox::schema::ensure_partitions(&self.admin.pool).await {
            tracing::error!(%error, "failed to make the inbox's partitions ahead of time");
        }
    }

    fn announce(&self, readiness: Readiness) {
        self.readiness.send_if_modified(|known| {
            let changed = *known != readiness;
            if changed {
                match &readiness {
                    Ok(()) => tracing::info!("ready"),
                    Err(why) => tracing::warn!(why, "not ready"),
                }
                *known = readiness;
            }
            changed
        });
    }

    /// Make what runs equal to what the rows say.
    async fn reconcile(&self, state: &mut State) -> Result<()> {
        let consumers = self.admin.consumers().await?;
        state.collect_ended();
        // A consumer without a deployment has nothing to hand its messages to; it waits for one.
        for consumer in consumers.into_iter().filter(|consumer| consumer.generation > 0) {
            let id = consumer.consumer_id;
            let outcome = match state.running.get_mut(&id) {
                Some(running) if running.generation == consumer.generation => continue,
                _ if state.failing.get(&id).is_some_and(|failing| failing.again_at > tokio::time::Instant::now()) => continue,
                Some(_) => self.switch(state, &consumer).await,
                None => self.start(state, &consumer).await,
            };
            match outcome {
                Ok(()) => {
                    state.failing.remove(&id);
                }
                Err(error) => state.failed(id, format!("consumer `{}/{}`: {}", consumer.tenant, consumer.name, report::one_line(&error))),
            }
        }
        Ok(())
    }

    /// Load the new deployments, then switch; the next transaction uses them.
    async fn switch(&self, state: &mut State, consumer: &Consumer) -> Result<()> {
        let tenant = self.admin.tenant(&consumer.tenant).await?;
        let running = state.running.get_mut(&consumer.consumer_id).context("the consumer does not run")?;
        let handlers = self.loader.load(&tenant, consumer, &running.inbox.policy.limits).await?;
        running.generation = handlers.generation();
        running.inbox.set_handlers(handlers);
        tracing::info!(tenant = consumer.tenant, consumer = consumer.name, generation = running.generation, "deployments switched");
        Ok(())
    }

    async fn start(&self, state: &mut State, consumer: &Consumer) -> Result<()> {
        let policy = consumer.policy()?;
        let (deadline_ms, idle_ms) = (policy.limits.deadline_ms, self.settings.idle_in_transaction_timeout_ms);
        if deadline_ms >= idle_ms {
            tracing::warn!(
                tenant = consumer.tenant,
                consumer = consumer.name,
                deadline_ms,
                idle_ms,
                "a handler that computes for longer than `database.idle_in_transaction_timeout_ms` loses its connection"
            );
        }
        let tenant = self.admin.tenant(&consumer.tenant).await?;
        let handlers = self.loader.load(&tenant, consumer, &policy.limits).await?;
        let generation = handlers.generation();
        let make_sessions = || Sessions::of(&self.admin, &tenant, &self.settings, self.budget.clone());
        let sessions = state.sessions.entry(tenant.login.clone()).or_insert_with(make_sessions).clone();
        let (tenant, name) = (consumer.tenant.clone(), consumer.name.clone());
        let inbox =
            ConsumerInbox::new(consumer.consumer_id, tenant.clone(), name.clone(), policy.clone(), self.owner.clone(), sessions, handlers);
        let config = ConsumerConfig {
            tenant,
            consumer: name,
            topics: policy.topics.clone(),
            kafka: policy.reading(),
            host_properties: self.properties.clone(),
            timing: Timing::default(),
        };
        let kafka = oncebox_kafka::Consumer::start(config, Arc::new(Sink(inbox.clone())))?;
        let stop = CancellationToken::new();
        let work = |_| tokio::spawn(retry::work(inbox.clone(), stop.clone()));
        let workers = (0..policy.retry.workers).map(work).collect();
        tracing::info!(tenant = consumer.tenant, consumer = consumer.name, generation, topics = ?policy.topics, "consumer started");
        state.running.insert(consumer.consumer_id, Running { inbox, generation, kafka, workers, stop });
        Ok(())
    }
}

impl State {
    fn readiness(&self) -> Readiness {
        self.failing.values().next().map_or(Ok(()), |failing| Err(failing.error.clone()))
    }

    fn failed(&mut self, consumer_id: i32, error: String) {
        let failures = self.failing.get(&consumer_id).map_or(0, |failing| failing.failures) + 1;
        let pause = (Duration::from_secs(1) * 2_u32.saturating_pow(failures - 1)).min(RESTART_MAX);
        tracing::error!(error, pause_ms = pause.as_millis() as u64, "a consumer does not run");
        self.failing.insert(consumer_id, Failing { failures, again_at: tokio::time::Instant::now() + pause, error });
    }

    /// Consumers that ended by themselves are started again, later and later.
    fn collect_ended(&mut self) {
        let ended: Vec<_> = self.running.iter().filter(|(_, r)| r.kafka.join().now_or_never().is_some()).map(|(id, _)| *id).collect();
        for id in ended {
            let Some(running) = self.running.remove(&id) else { continue };
            let ended = running.kafka.join().now_or_never().and_then(Result::err);
            let error = ended.map_or_else(|| "it ended".to_owned(), |error| error.to_string());
            self.failed(id, format!("consumer `{}/{}`: {error}", running.inbox.tenant, running.inbox.name));
            running.stop.cancel();
            self.ending.extend(running.workers);
        }
        self.ending.retain(|worker| !worker.is_finished());
    }

    /// Finish what runs, everywhere at once.
    async fn drain(self, within: Duration) -> Drained {
        let drains = self.running.into_values().map(|running| async move {
            running.stop.cancel();
            let workers = tokio::time::timeout(within, futures::future::join_all(running.workers));
            let (drained, workers) = tokio::join!(running.kafka.drain(within), workers);
            drained == Drained::Clean && workers.is_ok()
        });
        let ending = tokio::time::timeout(within, futures::future::join_all(self.ending));
        let (drained, ending) = tokio::join!(futures::future::join_all(drains), ending);
        if drained.into_iter().all(|clean| clean) && ending.is_ok() { Drained::Clean } else { Drained::Unfinished }
    }
}

/// Where the records of a consumer go.
struct Sink(Arc<ConsumerInbox>);

impl oncebox_kafka::Inbox for Sink {
    fn open(
        &self,
        topic: &str,
        partition: i32,
        next_offset: i64,
    ) -> BoxFuture<'_, Result<Box<dyn oncebox_kafka::PartitionInbox>, SinkError>> {
        let topic = topic.to_owned();
        async move {
            let opened = PartitionInbox::open(self.0.clone(), &topic, partition, next_offset).await;
            opened.map(|inbox| Box::new(PartitionSink(inbox)) as Box<dyn oncebox_kafka::PartitionInbox>).map_err(trouble)
        }
        .boxed()
    }
}

struct PartitionSink(PartitionInbox);

impl oncebox_kafka::PartitionInbox for PartitionSink {
    fn process<'a>(&'a mut self, records: &'a [Record]) -> BoxFuture<'a, Result<usize, SinkError>> {
        async move { self.0.process(records).await.map_err(trouble) }.boxed()
    }

    fn batch_max(&self) -> usize {
        self.0.batch_max()
    }

    fn close<'a>(self: Box<Self>, _next_offset: i64) -> BoxFuture<'a, ()> {
        self.0.close().boxed()
    }
}

fn trouble(error: InboxError) -> SinkError {
    SinkError { text: error.to_string() }
}
