//! Pausing a partition when it holds too much, and resuming it.

use std::{
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use tokio::{
    task::JoinSet,
    time::{Instant, timeout_at},
};

use crate::{client::Client, flow::Flow, metric::Labels};

/// How long the question that wakes a broker's thread may take.
const WAKE: Duration = Duration::from_secs(1);
/// Such questions under way at the same time; one wakes the thread for all partitions of its
/// broker.
const WAKING_MAX: usize = 16;

/// Partitions for the poll thread to pause before its next poll; each at most once.
#[derive(Default)]
pub(crate) struct PauseList {
    flows: Mutex<Vec<Arc<Flow>>>,
    waking: Mutex<JoinSet<()>>,
}

impl PauseList {
    fn push(&self, flow: &Arc<Flow>) {
        let mut flows = self.flows.lock().unwrap_or_else(PoisonError::into_inner);
        if !flows.iter().any(|listed| Arc::ptr_eq(listed, flow)) {
            flows.push(Arc::clone(flow));
        }
    }

    fn take(&self) -> Vec<Arc<Flow>> {
        std::mem::take(&mut *self.flows.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Called by the loop: pauses or resumes a partition as its queue demands.
    pub(crate) fn regulate(&self, client: &Arc<Client>, flow: &Arc<Flow>, labels: &Labels) {
        flow.with_pause(|pause| {
            let wanted = if pause.wanted { !flow.should_resume() } else { flow.should_pause() };
            if wanted == pause.wanted {
                return;
            }
            pause.wanted = wanted;
            if wanted {
                self.push(flow);
            } else if pause.done {
                match client.set_paused(&flow.partition, false) {
                    Ok(()) => {
                        pause.done = false;
                        self.wake(client, flow);
                    }
                    // Wanted again, and tried again with the next tick.
                    Err(error) => {
                        pause.wanted = true;
                        failed(&error.to_string(), flow, labels);
                    }
                }
            }
        });
    }

    /// Has the partition's leader asked something. librdkafka notes a resume on its main thread and
    /// does not tell the broker's, which, with nothing to fetch, sleeps for up to a second; a
    /// request to send and its answer wake it. What the answer says does not matter.
    fn wake(&self, client: &Arc<Client>, flow: &Flow) {
        let mut waking = self.waking.lock().unwrap_or_else(PoisonError::into_inner);
        while waking.try_join_next().is_some() {}
        if waking.len() < WAKING_MAX {
            let (client, partition) = (Arc::clone(client), flow.partition.clone());
            waking.spawn_blocking(move || drop(client.watermarks(&partition, WAKE)));
        }
    }

    /// Waits for what was asked by [`Self::wake`]: it holds the client, which is to be let go of.
    pub(crate) async fn quiet(&self, deadline: Instant) {
        let mut waking =
            std::mem::take(&mut *self.waking.lock().unwrap_or_else(PoisonError::into_inner));
        while let Ok(Some(_)) = timeout_at(deadline, waking.join_next()).await {}
    }

    /// Called on the poll thread: does what is still wanted.
    pub(crate) fn pause_listed(&self, client: &Client, labels: &Labels) {
        for flow in self.take() {
            flow.with_pause(|pause| {
                if !pause.wanted || pause.done || flow.is_leaving() {
                    return;
                }
                match client.set_paused(&flow.partition, true) {
                    Ok(()) => pause.done = true,
                    // The next record tries again; a queue that overflows ends the consumer.
                    Err(error) => {
                        pause.wanted = false;
                        failed(&error.to_string(), &flow, labels);
                    }
                }
            });
        }
    }
}

fn failed(error: &str, flow: &Flow, Labels { tenant, consumer }: &Labels) {
    tracing::warn!(tenant, consumer, partition = %flow.partition, error, "failed to pause or \
        resume a partition");
}
