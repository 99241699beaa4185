//! Pausing a partition when it holds too much, and resuming it.

use std::sync::{Arc, Mutex, PoisonError};

use crate::{client::Client, flow::Flow, metric::Labels};

/// Partitions for the poll thread to pause before its next poll; each at most once.
#[derive(Default)]
pub(crate) struct PauseList {
    flows: Mutex<Vec<Arc<Flow>>>,
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
    pub(crate) fn regulate(&self, client: &Client, flow: &Arc<Flow>, labels: &Labels) {
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
                    Ok(()) => pause.done = false,
                    // Wanted again, and tried again with the next tick.
                    Err(error) => {
                        pause.wanted = true;
                        failed(&error.to_string(), flow, labels);
                    }
                }
            }
        });
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
    tracing::warn!(tenant, consumer, partition = %flow.partition, error, "failed to pause or resume a partition");
}
