//! One consumer as this host runs it: its inbox, its place in the Kafka group, its retry workers.

use std::{sync::Arc, time::Duration};

use anyhow::{Context, Result};
use futures::{FutureExt, future::BoxFuture};
use oncebox_inbox::{
    BreakerState, Consumer, ConsumerInbox, InboxError, PartitionInbox, Sessions, Work, handler::Handlers, message::Record,
    policy::WireFormat, retry,
};
use oncebox_kafka::{Drained, SinkError};
use tokio::{sync::Notify, task::JoinHandle};
use tokio_util::sync::CancellationToken;

use crate::{copies, open::Reading, routes::Routes, supervisor::Supervisor};

/// What a started consumer does now.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Status {
    /// It reads, or runs what is due.
    Running,
    /// It ended by itself, for this reason.
    Ended(String),
}

/// A consumer that runs here.
pub(crate) struct Running {
    inbox: Arc<ConsumerInbox>,
    /// None where nothing is to be read.
    reading: Option<Reading>,
    routes: Arc<Routes>,
    workers: Vec<JoinHandle<()>>,
    stop: CancellationToken,
}

impl Running {
    /// Start to consume, or, of a consumer that is drained, only to run what is due. `look` is told when
    /// claims are refused because newer deployments are required.
    pub(crate) fn start(
        host: &Supervisor,
        consumer: &Consumer,
        routes: Arc<Routes>,
        sessions: Arc<Sessions>,
        look: Arc<Notify>,
        work: Work,
    ) -> Result<Self> {
        let policy = consumer.policy()?;
        let (deadline_ms, idle_ms) = (policy.limits.deadline_ms, host.settings.idle_in_transaction_timeout_ms);
        if deadline_ms >= idle_ms {
            tracing::warn!(
                tenant = consumer.tenant,
                consumer = consumer.name,
                deadline_ms,
                idle_ms,
                "a handler that computes for longer than `database.idle_in_transaction_timeout_ms` loses its connection"
            );
        }
        let (tenant, name) = (consumer.tenant.clone(), consumer.name.clone());
        let inbox = ConsumerInbox::new(
            consumer.consumer_id,
            tenant.clone(),
            name.clone(),
            policy.clone(),
            host.owner.clone(),
            sessions,
            routes.clone(),
        );
        inbox.tell_when_stale(look);
        if policy.wire_format == WireFormat::Confluent {
            let decoder = host.decoder.clone();
            inbox.decode_with(decoder.context(
                "its policy says `wire_format = \"confluent\"`, and this host knows no schema registry; set `schema_registry.url` \
                 (ONCEBOX_SCHEMA_REGISTRY_URL)",
            )?);
        }
        let config = host.kafka.config(&tenant, &name, &policy);
        let copying = config.clone();
        let reading = match work {
            Work::Read => Some(Reading::start(host.openings.clone(), config, Arc::new(Sink(inbox.clone())))?),
            Work::Retry | Work::Rest => None,
        };
        host.lookout.look_after(&inbox);
        let stop = CancellationToken::new();
        let work = |_| tokio::spawn(retry::work(inbox.clone(), stop.clone()));
        let mut workers: Vec<_> = (0..policy.retry.workers).map(work).collect();
        if let Some(topic) = policy.dead_letters.topic {
            workers.push(tokio::spawn(copies::copy(inbox.clone(), copying, topic, stop.clone())));
        }
        let generation = routes.generation();
        tracing::info!(tenant = consumer.tenant, consumer = consumer.name, generation, topics = ?policy.topics, "consumer started");
        Ok(Self { inbox, reading, routes, workers, stop })
    }

    /// Its circuit breakers that are not closed, where one of them turned since this was last asked.
    pub(crate) fn breakers_changed(&self) -> Option<Vec<BreakerState>> {
        self.inbox.breakers_changed()
    }

    /// What that answered last was told to nobody.
    pub(crate) fn breakers_untold(&self) {
        self.inbox.breakers_untold();
    }

    /// The generation of deployments that its next transaction uses.
    pub(crate) fn generation(&self) -> i64 {
        self.routes.generation()
    }

    /// Whether it is not a member of its Kafka group, since there is nothing to read.
    pub(crate) fn is_idle(&self) -> bool {
        self.reading.as_ref().is_some_and(|reading| !reading.is_open())
    }

    /// Whether a canary runs here.
    pub(crate) fn has_canary(&self) -> bool {
        self.routes.has_canary()
    }

    /// Use other deployments, from the next transaction on.
    pub(crate) fn switch(&mut self, routes: Arc<Routes>) -> i64 {
        self.routes = routes.clone();
        self.inbox.set_handlers(routes);
        self.generation()
    }

    /// What it does now.
    pub(crate) fn status(&self) -> Status {
        if self.workers.iter().any(JoinHandle::is_finished) {
            return Status::Ended("a worker panicked; see the log".to_owned());
        }
        match self.reading.as_ref().and_then(Reading::failure) {
            None => Status::Running,
            Some(error) => Status::Ended(error.to_string()),
        }
    }

    /// Finish what runs. True: all of it came to its end in time.
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
    fn ready(&mut self, records: usize) -> BoxFuture<'_, ()> {
        self.0.ready(records).boxed()
    }

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
    SinkError { text: error.to_string(), pause: error.again_in() }
}
