//! Pausing a partition whose queue is full or whose worker backs off, and resuming it.

use std::sync::{Arc, Mutex, PoisonError};

use crate::{client::Client, metric::Labels, partition_state::PartitionState};

/// The partitions for the poll thread to pause before its next poll, each at most once.
#[derive(Default)]
pub(crate) struct PauseList {
    partitions: Mutex<Vec<Arc<PartitionState>>>,
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
                    Ok(()) => pause.done = false,
                    // The pause is wanted again; the next tick tries to resume again.
                    Err(error) => {
                        pause.wanted = true;
                        failed(&error.to_string(), state, labels);
                    }
                }
            }
        });
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
