//! Pausing a partition whose queue is full or whose worker backs off, and resuming it.

use std::{
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use tokio::{
    task::JoinSet,
    time::{Instant, timeout_at},
};

use crate::{client::Client, metric::Labels, partition_state::PartitionState};

/// The longest wait for the request that wakes a broker's thread.
const WAKE_BROKER: Duration = Duration::from_secs(1);
/// The most such requests at one time; one wakes the thread for all partitions of its broker.
const WAKING_MAX: usize = 16;

/// The partitions for the poll thread to pause before its next poll, each at most once.
#[derive(Default)]
pub(crate) struct PauseList {
    partitions: Mutex<Vec<Arc<PartitionState>>>,
    /// Requests that wake brokers' threads.
    waking: Mutex<JoinSet<()>>,
}

impl PauseList {
    fn push(&self, state: &Arc<PartitionState>) {
        let mut partitions = self.partitions.lock().unwrap_or_else(PoisonError::into_inner);
        if !partitions.iter().any(|listed| Arc::ptr_eq(listed, state)) {
            partitions.push(Arc::clone(state));
        }
    }

    fn take(&self) -> Vec<Arc<PartitionState>> {
        std::mem::take(&mut *self.partitions.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Pauses or resumes a partition according to its queue and its worker. Called by the loop.
    pub(crate) fn regulate(
        &self,
        client: &Arc<Client>,
        state: &Arc<PartitionState>,
        labels: &Labels,
    ) {
        state.with_pause(|pause| {
            let wanted = if pause.wanted { !state.should_resume() } else { state.should_pause() };
            if wanted == pause.wanted {
                return;
            }
            pause.wanted = wanted;
            if wanted {
                self.push(state);
            } else if pause.done {
                match client.set_paused(&state.partition, false) {
                    Ok(()) => {
                        pause.done = false;
                        self.wake_broker(client, state);
                    }
                    // The pause is wanted again; the next tick tries to resume again.
                    Err(error) => {
                        pause.wanted = true;
                        failed(&error.to_string(), state, labels);
                    }
                }
            }
        });
    }

    /// Sends the partition's leader a request, to wake librdkafka's thread of that broker.
    /// librdkafka notes a resume on its main thread only. The broker's thread, with nothing to
    /// fetch, sleeps for up to a second, until a request to send or its answer wakes it. The answer
    /// is ignored.
    fn wake_broker(&self, client: &Arc<Client>, state: &PartitionState) {
        let mut waking = self.waking.lock().unwrap_or_else(PoisonError::into_inner);
        while waking.try_join_next().is_some() {}
        if waking.len() < WAKING_MAX {
            let (client, partition) = (Arc::clone(client), state.partition.clone());
            waking.spawn_blocking(move || drop(client.watermarks(&partition, WAKE_BROKER)));
        }
    }

    /// Waits for the requests of [`Self::wake_broker`], until `deadline`: they hold the client, and
    /// the poll thread should hold its last reference.
    pub(crate) async fn quiet(&self, deadline: Instant) {
        let mut waking =
            std::mem::take(&mut *self.waking.lock().unwrap_or_else(PoisonError::into_inner));
        while let Ok(Some(_)) = timeout_at(deadline, waking.join_next()).await {}
    }

    /// Pauses the listed partitions whose pause is still wanted. Called on the poll thread.
    pub(crate) fn pause_listed(&self, client: &Client, labels: &Labels) {
        for state in self.take() {
            state.with_pause(|pause| {
                if !pause.wanted || pause.done || state.is_leaving() {
                    return;
                }
                match client.set_paused(&state.partition, true) {
                    Ok(()) => pause.done = true,
                    // The next record tries the pause again. A queue that overflows ends the
                    // consumer.
                    Err(error) => {
                        pause.wanted = false;
                        failed(&error.to_string(), &state, labels);
                    }
                }
            });
        }
    }
}

fn failed(error: &str, state: &PartitionState, Labels { tenant, consumer }: &Labels) {
    tracing::warn!(tenant, consumer, partition = %state.partition, error, "partition pause or \
        resume failed");
}
