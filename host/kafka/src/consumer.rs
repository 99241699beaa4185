//! A consumer: its start, and the loop that owns its state.

use std::{
    collections::{HashMap, HashSet},
    sync::{Arc, mpsc::SyncSender},
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
    handle::{ConsumerHandle, Ending},
    inbox::Inbox,
    metric::Labels,
    offsets::{OffsetTracker, ToCommit},
    partition::{Bounds, Partition, PartitionState},
    pause::PauseList,
    poll::{BATCH_MESSAGES, BATCHES_WAITING, Poller},
    rebalance::Context,
    status::{ConsumerState, Snapshot},
    topic_id::{TopicIds, describe},
    worker::{Shared, StopSignal, Worker},
};

/// Time that a revocation waits beyond the loop's own deadlines.
const MARGIN: Duration = Duration::from_secs(2);
/// The longest wait for a paused partition's watermarks.
const MEASURE: Duration = Duration::from_secs(1);
/// Records that may arrive after a partition was paused: the rest of the present batch, the batches
/// that wait, and the batch in reading.
pub(crate) const OVERSHOOT: usize = (BATCHES_WAITING + 2) * BATCH_MESSAGES;

/// An event that the poll thread sends to the consumer's loop, in order.
pub(crate) enum Event {
    /// Records, in the order of their partitions. They were read after `generation` rebalances, and
    /// do not belong to a later assignment.
    Records { generation: u64, records: Vec<Record> },
    /// Partitions that are assigned to this consumer.
    Assigned { generation: u64, partitions: Vec<Partition> },
    /// Partitions that this consumer gives up with the `answer`. If `lost`, another member may own
    /// them already.
    Revoked { partitions: Vec<Partition>, lost: bool, answer: SyncSender<()> },
    /// An error after which the client cannot be used.
    Fatal(ConsumerError),
}

/// One consumer of a tenant, as one member of its Kafka group.
pub struct Consumer;

impl Consumer {
    /// Joins the group and begins to pass records to `inbox`. Must be called on a tokio runtime.
    /// Brokers that do not answer are no error here; the consumer tries them again.
    ///
    /// # Errors
    ///
    /// A [`ConsumerError`] when a property or setting is refused, or the client cannot be created.
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
            offset_tracker: OffsetTracker::default(),
            topic_ids: TopicIds::default(),
            labels,
            pauses,
            lookup: config.timing.lookup,
            commit: config.timing.commit,
            replacing: tokio::sync::Mutex::default(),
            wake: tokio::sync::Notify::new(),
        });
        let (drain, drain_asked) = watch::channel(None);
        let (snapshot, snapshots) =
            watch::channel(Snapshot { state: ConsumerState::Running, partitions: Vec::new() });
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

/// The running workers. They hold transactions, so they are never aborted, not even when the loop
/// panics.
struct Workers(JoinSet<Result<(), ConsumerError>>);

impl Drop for Workers {
    fn drop(&mut self) {
        self.0.detach_all();
    }
}

/// The loop's entry of one assigned partition.
struct Assigned {
    /// Number of rebalances up to this assignment.
    generation: u64,
    /// The worker's queue.
    queue: mpsc::Sender<Record>,
    state: Arc<PartitionState>,
    stop: Arc<StopSignal>,
    /// The worker's task.
    task: Id,
}

/// The consumer's state; only the loop changes it.
struct Loop {
    config: ConsumerConfig,
    shared: Arc<Shared>,
    events: mpsc::Receiver<Event>,
    assigned: HashMap<Partition, Assigned>,
    workers: Workers,
    /// Workers that were told to stop and have not ended, with their partitions.
    leaving: HashMap<Id, (Partition, CancellationToken)>,
    /// An error of a worker that ended while the loop waited for others.
    failure: Option<ConsumerError>,
    /// A measurement of lag that runs.
    measuring: Option<JoinHandle<()>>,
    /// A check of the topics' ids that runs. Its result is the first topic whose id has changed.
    checking: Option<JoinHandle<Option<Arc<str>>>>,
    /// The handle's request to drain, with the time that the drain may take.
    drain: watch::Receiver<Option<Duration>>,
    snapshot: watch::Sender<Snapshot>,
    /// Cancelled to make the poll thread leave the group.
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
                tracing::info!(tenant, consumer, "consumer drain started");
                (within, Ok(()))
            }
            Err(error) => {
                tracing::error!(tenant, consumer, %error, "consumer failed");
                (self.config.timing.revoke, Err(error))
            }
        };
        // Offsets of a topic that was made again are invalid in the new topic. librdkafka still
        // commits those that it has stored, with the id of the old topic beside them.
        let made_again = result.as_ref().err().and_then(ConsumerError::topic_made_again);
        let unfinished = self.end(within, made_again).await;
        Ending { result, unfinished }
    }

    /// Handles events until the handle requests a drain, and returns the time that the drain may
    /// take.
    async fn serve(&mut self) -> Result<Duration, ConsumerError> {
        let mut tick = tokio::time::interval(self.config.timing.tick);
        tick.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                biased;
                asked = self.drain.changed() => return Ok(self.drain_time(asked.is_ok())),
                Some(ended) = self.workers.0.join_next_with_id() => self.worker_ended(ended)?,
                () = self.shared.wake.notified() => self.regulate_all(),
                Some(event) = self.events.recv() => self.handle(event).await?,
                _ = tick.tick() => self.tick().await?,
                () = self.left.cancelled() => return Err(ConsumerError::Panicked),
            }
        }
    }

    /// Returns the time for the requested drain. A dropped handle is also a request to drain.
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
                // The callback may have stopped waiting; then the answer is dropped.
                let _ = answer.send(());
            }
            Event::Fatal(error) => return Err(error),
        }
        self.failure.take().map_or(Ok(()), Err)
    }

    /// Puts records into their partitions' queues. Drops a record of an earlier assignment: it is
    /// not settled, so the broker redelivers it to the partition's owner.
    fn distribute(&mut self, generation: u64, records: Vec<Record>) -> Result<(), ConsumerError> {
        for record in records {
            let partition =
                Partition { topic: Arc::clone(&record.topic), number: record.partition };
            let Some(assigned) = self.assigned.get(&partition) else { continue };
            if assigned.generation > generation {
                continue;
            }
            assigned.state.enqueued(&record);
            assigned.state.meters.read.increment(1);
            if let Err(mpsc::error::TrySendError::Full(_)) = assigned.queue.try_send(record) {
                return Err(ConsumerError::Overflow { partition: partition.to_string() });
            }
            self.regulate(&assigned.state);
        }
        Ok(())
    }

    fn regulate_all(&self) {
        for assigned in self.assigned.values() {
            self.regulate(&assigned.state);
        }
    }

    fn regulate(&self, state: &Arc<PartitionState>) {
        self.shared.pauses.regulate(&self.shared.client, state, &self.shared.labels);
    }

    /// Starts a worker for each partition. The worker opens the partition itself, so that a failure
    /// to open it does not delay the group.
    fn assign(&mut self, generation: u64, partitions: Vec<Partition>) {
        self.shared.labels.rebalance("assigned");
        let Labels { tenant, consumer } = &self.shared.labels;
        tracing::info!(tenant, consumer, partitions = names(&partitions), "partitions assigned");
        for partition in partitions {
            let assigned = self.start_worker(generation, &partition);
            self.shared.offset_tracker.assign(partition.clone(), generation);
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
        let state = Arc::new(PartitionState::new(partition.clone(), bounds, meters));
        let stop = Arc::new(StopSignal::default());
        let (queue, records) = mpsc::channel(bounds.messages + OVERSHOOT);
        let predecessors = self
            .leaving
            .values()
            .filter(|(left, _)| left == partition)
            .map(|(_, done)| done.clone())
            .collect();
        let worker = Worker::new(
            Arc::clone(&self.shared),
            Arc::clone(&state),
            Arc::clone(&stop),
            generation,
            records,
            predecessors,
        );
        let task = self.workers.0.spawn(worker.run()).id();
        Assigned { generation, queue, state, stop, task }
    }

    async fn revoke(&mut self, partitions: Vec<Partition>, lost: bool) {
        self.shared.labels.rebalance(if lost { "lost" } else { "revoked" });
        let Labels { tenant, consumer } = &self.shared.labels;
        tracing::info!(
            tenant,
            consumer,
            partitions = names(&partitions),
            lost,
            "partitions revoked"
        );
        self.give_up(&partitions, lost, self.config.timing.revoke).await;
        self.publish(ConsumerState::Running);
    }

    /// Stops the partitions' workers after the batch that each runs, then commits the offsets that
    /// they settled. Lost partitions may already have another owner, so for these it neither waits
    /// nor commits.
    async fn give_up(&mut self, partitions: &[Partition], lost: bool, within: Duration) {
        let mut tasks = Vec::new();
        for partition in partitions {
            let Some(assigned) = self.assigned.remove(partition) else { continue };
            assigned.stop.request(lost);
            assigned.state.set_leaving();
            self.leaving.insert(assigned.task, (partition.clone(), assigned.stop.done.clone()));
            tasks.push(assigned.task);
        }
        if !lost && !hooks::sabotage("revoke_without_waiting") {
            self.wait_for(&tasks, within).await;
        }
        // From here on a late worker cannot store an offset.
        let offsets = self.shared.offset_tracker.revoke(partitions.iter());
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
            "deadline passed while a batch still runs; its records are not acked"
        );
    }

    /// Removes a worker that has ended, and returns the error if it failed.
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

    /// Commits offsets. A failure is only logged, since it costs no more than a redelivery.
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
                tracing::warn!(tenant, consumer, %error, "offset commit failed; the records \
                    are redelivered");
            }
            Err(error) => tracing::error!(tenant, consumer, %error, "offset commit panicked"),
        }
    }

    /// Runs the periodic work. It also pauses and resumes again where that failed before: a
    /// partition must not stay paused for lack of an event.
    async fn tick(&mut self) -> Result<(), ConsumerError> {
        self.regulate_all();
        self.measure_lag();
        self.check_topics().await
    }

    /// Fails when a topic was made again. The check is needed where the new topic has records
    /// beyond the offset of the old one. Records below that offset are not read, and no record
    /// steps back. Offsets stored before the check have the old topic's id beside them, so the
    /// restarted consumer begins at the low watermark.
    async fn check_topics(&mut self) -> Result<(), ConsumerError> {
        if let Some(checking) = self.checking.take_if(|checking| checking.is_finished()) {
            match checking.await {
                Ok(Some(topic)) => {
                    self.shared
                        .offset_tracker
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
            let known = self.assigned.values().filter_map(|assigned| assigned.state.topic_id());
            let known: HashSet<_> = known.collect();
            let (client, lookup) = (Arc::clone(&self.shared.client), self.config.timing.lookup);
            self.checking = Some(tokio::spawn(async move {
                for (topic, id) in known {
                    let name = Arc::clone(&topic);
                    // Not through `topic_ids`: workers would wait for its lock.
                    let present = client
                        .lookup(move |client| describe(&client.consumer, &name, lookup))
                        .await;
                    // A missing answer proves nothing. The check ends at the first silent broker;
                    // the next tick asks again, in another order.
                    if present.ok()?.is_some_and(|present| present != id) {
                        return Some(topic);
                    }
                }
                None
            }));
        }
        Ok(())
    }

    /// Measures the partitions' lag. Asks brokers only about paused partitions; the high watermark
    /// of the others comes with each fetch.
    fn measure_lag(&mut self) {
        if self.measuring.as_ref().is_some_and(|measuring| !measuring.is_finished()) {
            return;
        }
        let client = Arc::clone(&self.shared.client);
        let partitions: Vec<_> =
            self.assigned.values().map(|assigned| Arc::clone(&assigned.state)).collect();
        self.measuring = Some(tokio::task::spawn_blocking(move || {
            for state in partitions {
                let seen = client.watermarks_seen(&state.partition).filter(|_| !state.is_paused());
                let known = seen.map_or_else(|| client.watermarks(&state.partition, MEASURE), Ok);
                // The measurement ends at the first silent broker; the next tick asks again.
                let Ok((_, high)) = known else { return };
                if let Some(next) = state.next_offset() {
                    state.set_lag((high - next).max(0));
                }
            }
        }));
    }

    fn publish(&self, state: ConsumerState) {
        let partitions =
            self.assigned.values().map(|assigned| Arc::clone(&assigned.state)).collect();
        self.snapshot.send_replace(Snapshot { state, partitions });
    }

    /// Gives up all partitions, those of a topic that was made again as lost, and leaves the group.
    /// Returns how many workers still run.
    async fn end(mut self, within: Duration, made_again: Option<&str>) -> usize {
        let deadline = Instant::now() + within;
        self.publish(ConsumerState::Draining);
        let is_of_another = |partition: &Partition| made_again == Some(&*partition.topic);
        let (of_another, partitions): (Vec<_>, Vec<_>) =
            self.assigned.keys().cloned().partition(is_of_another);
        self.give_up(&of_another, true, Duration::ZERO).await;
        // The rest of the time is for the commit and for leaving the group.
        self.give_up(&partitions, false, within.mul_f64(0.75)).await;
        let earlier: Vec<Id> = self.leaving.keys().copied().collect();
        self.wait_for(&earlier, deadline.saturating_duration_since(Instant::now()).mul_f64(0.5))
            .await;
        if let Some(measuring) = self.measuring.take() {
            let _ = timeout_at(deadline, measuring).await;
        }
        if let Some(checking) = self.checking.take() {
            // A request that is under way ends by itself and does not delay leaving the group.
            checking.abort();
        }
        self.shared.pauses.quiet(deadline).await;
        self.publish(ConsumerState::Ended);
        let unfinished = self.leaving.len();
        let Self { shared, events, workers, stop, left, .. } = self;
        // The poll thread should hold the last reference to the client. It may wait for room in
        // `events` or, in a callback, for an answer to an event; both waits end here.
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
