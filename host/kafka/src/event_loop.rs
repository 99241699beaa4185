//! The loop that owns a consumer's state and handles its events.

use std::{collections::HashMap, sync::Arc, time::Duration};

use oncebox_model::{hooks, record::Record};
use tokio::{
    sync::{mpsc, watch},
    task::{Id, JoinHandle, JoinSet},
};
use tokio_util::sync::CancellationToken;

use crate::{
    config::ConsumerConfig,
    error::ConsumerError,
    handle::ConsumerEnd,
    metric::Labels,
    partition::Partition,
    partition_state::{PartitionState, QueueBounds},
    poll::{BATCH_MESSAGES, BATCHES_WAITING},
    poll_event::PollEvent,
    status::{ConsumerState, StatusSnapshot},
    worker::{PartitionWorker, StopSignal, WorkerContext},
};

mod release;
mod tick;

/// Records that may arrive after a partition was paused: the rest of the present batch, the batches
/// that wait, and the batch in reading.
pub(crate) const OVERSHOOT: usize = (BATCHES_WAITING + 2) * BATCH_MESSAGES;

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
pub(crate) struct EventLoop {
    config: ConsumerConfig,
    shared: Arc<WorkerContext>,
    events: mpsc::Receiver<PollEvent>,
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
    snapshot: watch::Sender<StatusSnapshot>,
    /// Cancelled to make the poll thread leave the group.
    stop: CancellationToken,
    /// Cancelled when the poll thread has left the group.
    left: CancellationToken,
}

impl EventLoop {
    /// Makes the loop of a consumer without partitions.
    pub(crate) fn new(
        config: ConsumerConfig,
        shared: Arc<WorkerContext>,
        events: mpsc::Receiver<PollEvent>,
        drain: watch::Receiver<Option<Duration>>,
        snapshot: watch::Sender<StatusSnapshot>,
        stop: CancellationToken,
        left: CancellationToken,
    ) -> Self {
        Self {
            config,
            shared,
            events,
            assigned: HashMap::new(),
            workers: Workers(JoinSet::new()),
            leaving: HashMap::new(),
            failure: None,
            measuring: None,
            checking: None,
            drain,
            snapshot,
            stop,
            left,
        }
    }

    /// Handles events until a drain or a failure, then gives up all partitions and leaves the
    /// group.
    pub(crate) async fn run(mut self) -> ConsumerEnd {
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
        ConsumerEnd { result, unfinished }
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

    async fn handle(&mut self, event: PollEvent) -> Result<(), ConsumerError> {
        match event {
            PollEvent::Records { generation, records } => self.distribute(generation, records)?,
            PollEvent::Assigned { generation, partitions } => self.assign(generation, partitions),
            PollEvent::Revoked { partitions, lost, answer } => {
                self.revoke(partitions, lost).await;
                // The callback may have stopped waiting; then the answer is dropped.
                let _ = answer.send(());
            }
            PollEvent::Fatal(error) => return Err(error),
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
        let bounds = QueueBounds {
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
        let worker = PartitionWorker::new(
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

    fn publish(&self, state: ConsumerState) {
        let partitions =
            self.assigned.values().map(|assigned| Arc::clone(&assigned.state)).collect();
        self.snapshot.send_replace(StatusSnapshot { state, partitions });
    }
}

fn names(partitions: &[Partition]) -> String {
    let mut names: Vec<String> = partitions.iter().map(ToString::to_string).collect();
    names.sort();
    names.join(" ")
}
