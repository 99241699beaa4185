//! Giving up partitions, at a revocation and at the consumer's end.

use std::{sync::Arc, time::Duration};

use oncebox_model::hooks::{self, Defect};
use tokio::{
    task::{Id, JoinError},
    time::{Instant, timeout_at},
};

use super::{EventLoop, names};
use crate::{
    error::ConsumerError, metric::Labels, offsets::ToCommit, partition::Partition,
    status::ConsumerState,
};

impl EventLoop {
    /// Gives up partitions that a rebalance revoked, and publishes the ones that are left.
    pub(super) async fn revoke(&mut self, partitions: Vec<Partition>, lost: bool) {
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
        if !lost && !hooks::sabotage(Defect::RevokeWithoutWaiting) {
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
    pub(super) fn worker_ended(
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

    /// Gives up all partitions, those of a topic that was made again as lost, and leaves the group.
    /// Returns how many workers still run.
    pub(super) async fn end(mut self, within: Duration, made_again: Option<&str>) -> usize {
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
