//! A consumer: starting it, and the loop that owns its state.

use std::{
    collections::{HashMap, HashSet},
    sync::Arc,
    thread,
    time::Duration,
};

use oncebox_model::{hooks, record::Record};
use rdkafka::consumer::{BaseConsumer, Consumer as _};
use tokio::{
    sync::{mpsc, watch},
    task::{Id, JoinError, JoinHandle, JoinSet},
    time::{Instant, timeout_at},
};
use tokio_util::sync::CancellationToken;

use crate::{
    client::Client,
    config::ConsumerConfig,
    error::ConsumerError,
    flow::{Bounds, Flow, Partition},
    handle::{ConsumerHandle, Ending},
    metric::Labels,
    offsets::{Ledger, ToCommit},
    pause::PauseList,
    poll::{BATCH_MESSAGES, BATCHES_WAITING, Poller},
    rebalance::{Context, Event},
    sabotage,
    sink::Inbox,
    status::{ConsumerState, Snapshot},
    topic_id::{TopicIds, describe},
    worker::{Leave, Shared, Worker},
};

/// Time that a callback waits beyond the loop's own deadlines.
const MARGIN: Duration = Duration::from_secs(2);
/// One question about a paused partition's watermarks.
const MEASURE: Duration = Duration::from_secs(1);
/// Records that may come in after a partition was paused: the rest of the batch at hand,
/// the batches that wait, and the one being read.
pub(crate) const OVERSHOOT: usize = (BATCHES_WAITING + 2) * BATCH_MESSAGES;

/// One consumer of a tenant, as one member of its Kafka group.
pub struct Consumer;

impl Consumer {
    /// Joins the group and begins to feed `inbox`. Must be called on a tokio runtime.
    /// Fails at once when a property is refused; trouble with brokers comes later, and
    /// is retried.
    pub fn start(
        config: ConsumerConfig,
        inbox: Arc<dyn Inbox>,
    ) -> Result<ConsumerHandle, ConsumerError> {
        let labels = Labels { tenant: config.tenant.clone(), consumer: config.consumer.clone() };
        let (sender, events) = mpsc::channel(BATCHES_WAITING);
        let patience = config.timing.revoke + config.timing.commit + MARGIN;
        let context = Context::new(labels.clone(), sender.clone(), patience);
        let client = Arc::new(Client::new(connect(&config, context)?));
        let (stop, left) = (CancellationToken::new(), CancellationToken::new());
        let pauses = Arc::new(PauseList::default());
        let poller = Poller {
            client: Arc::clone(&client),
            events: sender,
            stop: stop.clone(),
            labels: labels.clone(),
            pauses: Arc::clone(&pauses),
            topics: Vec::new(),
        };
        spawn_poller(poller, left.clone())?;

        let shared = Arc::new(Shared {
            client,
            inbox,
            ledger: Ledger::default(),
            topic_ids: TopicIds::default(),
            labels,
            pauses,
            lookup: config.timing.lookup,
            commit: config.timing.commit,
            replacing: tokio::sync::Mutex::default(),
            bell: tokio::sync::Notify::new(),
        });
        let (drain, drain_asked) = watch::channel(None);
        let (snapshot, snapshots) =
            watch::channel(Snapshot { state: ConsumerState::Running, flows: Vec::new() });
        let (ending, ended) = watch::channel(None);
        let state = Loop {
            config,
            shared,
            events,
            assigned: HashMap::new(),
            workers: Workers(JoinSet::new()),
            leaving: HashMap::new(),
            failure: None,
            measuring: None,
            checking: None,
            drain: drain_asked,
            snapshot,
            stop,
            left,
        };
        tokio::spawn(async move { ending.send_replace(Some(state.run().await)) });
        Ok(ConsumerHandle { drain, snapshots, ended })
    }
}

fn connect(
    config: &ConsumerConfig,
    context: Context,
) -> Result<BaseConsumer<Context>, ConsumerError> {
    let failed = |error| ConsumerError::from_creation(error, &config.secrets());
    let consumer: BaseConsumer<Context> =
        config.client_config()?.create_with_context(context).map_err(failed)?;
    let topics: Vec<&str> = config.topics.iter().map(String::as_str).collect();
    consumer.subscribe(&topics).map_err(failed)?;
    hooks::subscribed(&config.topics);
    Ok(consumer)
}

fn spawn_poller(poller: Poller, left: CancellationToken) -> Result<(), ConsumerError> {
    let left = left.drop_guard();
    thread::Builder::new()
        .name("oncebox-poll".to_owned())
        .spawn(move || {
            poller.run();
            drop(left);
        })
        .map(|_| ())
        .map_err(|error| ConsumerError::Client { text: format!("no thread to poll on: {error}") })
}

/// Running workers. They hold transactions, so they are never aborted, not even when the
/// loop panics.
struct Workers(JoinSet<Result<(), ConsumerError>>);

impl Drop for Workers {
    fn drop(&mut self) {
        self.0.detach_all();
    }
}

/// One assigned partition, as the loop sees it.
struct Assigned {
    generation: u64,
    queue: mpsc::Sender<Record>,
    flow: Arc<Flow>,
    leave: Arc<Leave>,
    task: Id,
}

/// The consumer's state; changed by nobody else.
struct Loop {
    config: ConsumerConfig,
    shared: Arc<Shared>,
    events: mpsc::Receiver<Event>,
    assigned: HashMap<Partition, Assigned>,
    workers: Workers,
    /// Workers that were asked to leave and have not ended.
    leaving: HashMap<Id, (Partition, CancellationToken)>,
    /// An error that came up while something else was awaited.
    failure: Option<ConsumerError>,
    measuring: Option<JoinHandle<()>>,
    /// A look at the ids of topics; the first topic whose id is another one than it was.
    checking: Option<JoinHandle<Option<Arc<str>>>>,
    drain: watch::Receiver<Option<Duration>>,
    snapshot: watch::Sender<Snapshot>,
    /// Tells the poll thread to leave the group.
    stop: CancellationToken,
    /// Cancelled when the poll thread has left the group.
    left: CancellationToken,
}

impl Loop {
    async fn run(mut self) -> Ending {
        let served = self.serve().await;
        let Labels { tenant, consumer } = &self.shared.labels;
        let (within, result) = match served {
            Ok(within) => {
                tracing::info!(tenant, consumer, "draining");
                (within, Ok(()))
            }
            Err(error) => {
                tracing::error!(tenant, consumer, %error, "the consumer ends");
                (self.config.timing.revoke, Err(error))
            }
        };
        // Offsets of a topic that was made again mean nothing in it. What librdkafka has stored of
        // them it commits nevertheless, with the id of the topic that is gone beside it.
        let made_again = result.as_ref().err().and_then(ConsumerError::topic_made_again);
        let unfinished = self.end(within, made_again).await;
        Ending { result, unfinished }
    }

    /// Handles events until asked to drain (how long that may take) or until it fails.
    async fn serve(&mut self) -> Result<Duration, ConsumerError> {
        let mut tick = tokio::time::interval(self.config.timing.tick);
        tick.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                biased;
                asked = self.drain.changed() => return Ok(self.drain_time(asked.is_ok())),
                Some(ended) = self.workers.0.join_next_with_id() => self.worker_ended(ended)?,
                () = self.shared.bell.notified() => self.regulate_all(),
                Some(event) = self.events.recv() => self.handle(event).await?,
                _ = tick.tick() => self.tick().await?,
                () = self.left.cancelled() => return Err(ConsumerError::Panicked),
            }
        }
    }

    /// A dropped handle is a request to drain, too.
    fn drain_time(&self, asked: bool) -> Duration {
        let default = self.config.timing.revoke;
        if asked { self.drain.borrow().unwrap_or(default) } else { default }
    }

    async fn handle(&mut self, event: Event) -> Result<(), ConsumerError> {
        match event {
            Event::Records { generation, records } => self.distribute(generation, records)?,
            Event::Assigned { generation, partitions } => self.assign(generation, partitions),
            Event::Revoked { partitions, lost, answer } => {
                self.revoke(partitions, lost).await;
                // The callback may have lost its patience; then nobody is there to hear.
                let _ = answer.send(());
            }
            Event::Fatal(error) => return Err(error),
        }
        self.failure.take().map_or(Ok(()), Err)
    }

    /// Puts records into their partitions' queues. A record of an assignment that is over
    /// is dropped: it is not settled, so it comes again where it belongs.
    fn distribute(&mut self, generation: u64, records: Vec<Record>) -> Result<(), ConsumerError> {
        for record in records {
            let partition =
                Partition { topic: Arc::clone(&record.topic), number: record.partition };
            let Some(assigned) = self.assigned.get(&partition) else { continue };
            if assigned.generation > generation {
                continue;
            }
            assigned.flow.take_in(&record);
            assigned.flow.meters.read.increment(1);
            if let Err(mpsc::error::TrySendError::Full(_)) = assigned.queue.try_send(record) {
                return Err(ConsumerError::Overflow { partition: partition.to_string() });
            }
            self.regulate(&assigned.flow);
        }
        Ok(())
    }

    fn regulate_all(&self) {
        for assigned in self.assigned.values() {
            self.regulate(&assigned.flow);
        }
    }

    fn regulate(&self, flow: &Arc<Flow>) {
        self.shared.pauses.regulate(&self.shared.client, flow, &self.shared.labels);
    }

    /// Starts a worker for each partition. It opens the partition by itself, so that
    /// trouble in doing so does not hold up the group.
    fn assign(&mut self, generation: u64, partitions: Vec<Partition>) {
        self.shared.labels.rebalance("assigned");
        let Labels { tenant, consumer } = &self.shared.labels;
        tracing::info!(tenant, consumer, partitions = names(&partitions), "partitions assigned");
        for partition in partitions {
            let assigned = self.start_worker(generation, &partition);
            self.shared.ledger.assign(partition.clone(), generation);
            self.assigned.insert(partition, assigned);
        }
        self.publish(ConsumerState::Running);
        hooks::point("kafka:assign:after");
    }

    fn start_worker(&mut self, generation: u64, partition: &Partition) -> Assigned {
        let bounds = Bounds {
            messages: self.config.kafka.prefetch_messages,
            bytes: self.config.kafka.prefetch_bytes,
        };
        let meters = self.shared.labels.partition(partition);
        let flow = Arc::new(Flow::new(partition.clone(), bounds, meters));
        let leave = Arc::new(Leave::default());
        let (queue, records) = mpsc::channel(bounds.messages + OVERSHOOT);
        let predecessors = self
            .leaving
            .values()
            .filter(|(left, _)| left == partition)
            .map(|(_, done)| done.clone())
            .collect();
        let worker = Worker::new(
            Arc::clone(&self.shared),
            Arc::clone(&flow),
            Arc::clone(&leave),
            generation,
            records,
            predecessors,
        );
        let task = self.workers.0.spawn(worker.run()).id();
        Assigned { generation, queue, flow, leave, task }
    }

    async fn revoke(&mut self, partitions: Vec<Partition>, lost: bool) {
        self.shared.labels.rebalance(if lost { "lost" } else { "revoked" });
        let Labels { tenant, consumer } = &self.shared.labels;
        tracing::info!(
            tenant,
            consumer,
            partitions = names(&partitions),
            lost,
            "partitions taken away"
        );
        self.give_up(&partitions, lost, self.config.timing.revoke).await;
        self.publish(ConsumerState::Running);
    }

    /// Ends the partitions' workers after the batch that each runs, then commits what
    /// they settled. Lost partitions belong to somebody else already: no waiting, no commit.
    async fn give_up(&mut self, partitions: &[Partition], lost: bool, within: Duration) {
        let mut tasks = Vec::new();
        for partition in partitions {
            let Some(assigned) = self.assigned.remove(partition) else { continue };
            assigned.leave.ask(lost);
            assigned.flow.set_leaving();
            self.leaving.insert(assigned.task, (partition.clone(), assigned.leave.done.clone()));
            tasks.push(assigned.task);
        }
        if !lost && !sabotage::on(sabotage::REVOKE_WITHOUT_WAITING) {
            self.wait_for(&tasks, within).await;
        }
        // From here on a worker that is late cannot store anything.
        let offsets = self.shared.ledger.revoke(partitions.iter());
        if !lost && !offsets.is_empty() {
            self.commit(offsets).await;
        }
    }

    async fn wait_for(&mut self, tasks: &[Id], within: Duration) {
        let deadline = Instant::now() + within;
        while tasks.iter().any(|task| self.leaving.contains_key(task)) {
            match timeout_at(deadline, self.workers.0.join_next_with_id()).await {
                Ok(Some(ended)) => {
                    if let Err(error) = self.worker_ended(ended) {
                        self.failure.get_or_insert(error);
                    }
                }
                Ok(None) => return,
                Err(_) => return self.report_late(),
            }
        }
    }

    fn report_late(&self) {
        let late: Vec<Partition> =
            self.leaving.values().map(|(partition, _)| partition.clone()).collect();
        let Labels { tenant, consumer } = &self.shared.labels;
        tracing::error!(
            tenant,
            consumer,
            partitions = names(&late),
            "given up while a batch still runs; it will not be acked"
        );
    }

    /// A worker ends because it was asked to, or because it cannot go on.
    fn worker_ended(
        &mut self,
        ended: Result<(Id, Result<(), ConsumerError>), JoinError>,
    ) -> Result<(), ConsumerError> {
        match ended {
            Ok((task, result)) => {
                self.leaving.remove(&task);
                result
            }
            Err(error) => {
                self.leaving.remove(&error.id());
                Err(ConsumerError::Panicked)
            }
        }
    }

    /// A commit that fails is only a redelivery.
    async fn commit(&self, offsets: Vec<ToCommit>) {
        let (client, within) = (Arc::clone(&self.shared.client), self.config.timing.commit);
        hooks::point("kafka:commit:before");
        let committed = tokio::task::spawn_blocking(move || client.commit(&offsets, within)).await;
        hooks::point("kafka:commit:after");
        let Labels { tenant, consumer } = &self.shared.labels;
        match committed {
            Ok(Ok(())) => {}
            Ok(Err(error)) => {
                self.shared.labels.commit_error();
                tracing::warn!(tenant, consumer, %error, "failed to commit offsets; their records \
                    will come again");
            }
            Err(error) => tracing::error!(tenant, consumer, %error, "committing offsets panicked"),
        }
    }

    /// Also repeats what failed: a partition must not stay paused for want of an event.
    async fn tick(&mut self) -> Result<(), ConsumerError> {
        self.regulate_all();
        self.measure_lag();
        self.check_topics().await
    }

    /// Notices a topic that was made again and has records beyond the offset of its predecessor:
    /// those below are not read, and no record goes back. What was stored meanwhile has the id of
    /// the predecessor beside it, so the consumer that starts anew begins at the beginning.
    async fn check_topics(&mut self) -> Result<(), ConsumerError> {
        if let Some(checking) = self.checking.take_if(|checking| checking.is_finished()) {
            match checking.await {
                Ok(Some(topic)) => {
                    self.shared
                        .ledger
                        .of_topic(&topic)
                        .iter()
                        .for_each(|(partition, _)| self.shared.labels.topic_made_again(partition));
                    return Err(ConsumerError::MadeAgain { topic: topic.to_string() });
                }
                Ok(None) => {}
                Err(_) => return Err(ConsumerError::Panicked),
            }
        }
        if self.checking.is_none() {
            let known = self.assigned.values().filter_map(|assigned| assigned.flow.topic_id());
            let known: HashSet<_> = known.collect();
            let (client, lookup) = (Arc::clone(&self.shared.client), self.config.timing.lookup);
            self.checking = Some(tokio::spawn(async move {
                for (topic, id) in known {
                    let name = Arc::clone(&topic);
                    // Not through `topic_ids`, where workers would wait for it.
                    let present = client
                        .lookup(move |client| describe(&client.consumer, &name, lookup))
                        .await;
                    // No answer says nothing. The next tick asks again, in another order; one
                    // silent broker is enough for this one.
                    if present.ok()?.is_some_and(|present| present != id) {
                        return Some(topic);
                    }
                }
                None
            }));
        }
        Ok(())
    }

    /// Asks brokers only for paused partitions; the others' high watermark comes with
    /// each fetch.
    fn measure_lag(&mut self) {
        if self.measuring.as_ref().is_some_and(|measuring| !measuring.is_finished()) {
            return;
        }
        let client = Arc::clone(&self.shared.client);
        let flows: Vec<_> =
            self.assigned.values().map(|assigned| Arc::clone(&assigned.flow)).collect();
        self.measuring = Some(tokio::task::spawn_blocking(move || {
            for flow in flows {
                let seen = client.watermarks_seen(&flow.partition).filter(|_| !flow.is_paused());
                let known = seen.map_or_else(|| client.watermarks(&flow.partition, MEASURE), Ok);
                // The next tick asks again; one silent broker is enough for this one.
                let Ok((_, high)) = known else { return };
                if let Some(next) = flow.next_offset() {
                    flow.set_lag((high - next).max(0));
                }
            }
        }));
    }

    fn publish(&self, state: ConsumerState) {
        let flows = self.assigned.values().map(|assigned| Arc::clone(&assigned.flow)).collect();
        self.snapshot.send_replace(Snapshot { state, flows });
    }

    /// Gives everything up, partitions of a topic that was made again as lost, and leaves the
    /// group. Returns how many workers still run.
    async fn end(mut self, within: Duration, made_again: Option<&str>) -> usize {
        let deadline = Instant::now() + within;
        self.publish(ConsumerState::Draining);
        let is_of_another = |partition: &Partition| made_again == Some(&*partition.topic);
        let (of_another, partitions): (Vec<_>, Vec<_>) =
            self.assigned.keys().cloned().partition(is_of_another);
        self.give_up(&of_another, true, Duration::ZERO).await;
        // The rest is for the commit and for leaving.
        self.give_up(&partitions, false, within.mul_f64(0.75)).await;
        let earlier: Vec<Id> = self.leaving.keys().copied().collect();
        self.wait_for(&earlier, deadline.saturating_duration_since(Instant::now()).mul_f64(0.5))
            .await;
        if let Some(measuring) = self.measuring.take() {
            let _ = timeout_at(deadline, measuring).await;
        }
        if let Some(checking) = self.checking.take() {
            // A question under way ends by itself, and keeps nobody from leaving the group.
            checking.abort();
        }
        self.shared.pauses.quiet(deadline).await;
        self.publish(ConsumerState::Ended);
        let unfinished = self.leaving.len();
        let Self { shared, events, workers, stop, left, .. } = self;
        // The poll thread should hold the last reference to the client, and may be waiting
        // for room in `events` or, in a callback, for an answer to one of them.
        drop((shared, workers, events));
        stop.cancel();
        let _ = timeout_at(deadline, left.cancelled()).await;
        unfinished
    }
}

fn names(partitions: &[Partition]) -> String {
    let mut names: Vec<String> = partitions.iter().map(ToString::to_string).collect();
    names.sort();
    names.join(" ")
}
