//! The state of a consumer and its partitions, as shown to the host.

use std::sync::Arc;

use crate::partition_state::PartitionState;

/// The phase of a consumer's life.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ConsumerState {
    /// Reading, or waiting for an assignment.
    Running,
    /// Finishing the batches that run.
    Draining,
    /// Ended; the handle's `join` returns the reason.
    Ended,
}

/// A consumer at one moment.
#[derive(Debug, Clone)]
pub struct ConsumerStatus {
    /// The phase of its life.
    pub state: ConsumerState,
    /// Partitions assigned to this host, sorted.
    pub partitions: Vec<PartitionStatus>,
}

/// An assigned partition at one moment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PartitionStatus {
    /// Name of the topic.
    pub topic: String,
    /// Number of the partition.
    pub partition: i32,
    /// The first offset that is not settled; none until the partition is open.
    pub next_offset: Option<i64>,
    /// Records held in memory.
    pub messages: usize,
    /// Bytes held in memory.
    pub bytes: usize,
    /// Whether fetching is paused.
    pub paused: bool,
    /// Whether the worker waits before it offers records again, because the inbox failed or asked
    /// for a pause.
    pub backing_off: bool,
    /// Whether the partition is being given up and finishes the batch that runs.
    pub leaving: bool,
}

/// A consumer's state as its loop publishes it; counts are read when a status is requested.
#[derive(Clone)]
pub(crate) struct StatusSnapshot {
    pub(crate) state: ConsumerState,
    pub(crate) partitions: Vec<Arc<PartitionState>>,
}

impl StatusSnapshot {
    pub(crate) fn status(&self) -> ConsumerStatus {
        let mut partitions: Vec<_> = self.partitions.iter().map(|state| partition(state)).collect();
        partitions.sort_by(|a, b| (&a.topic, a.partition).cmp(&(&b.topic, b.partition)));
        ConsumerStatus { state: self.state, partitions }
    }
}

fn partition(state: &PartitionState) -> PartitionStatus {
    PartitionStatus {
        topic: state.partition.topic.to_string(),
        partition: state.partition.number,
        next_offset: state.next_offset(),
        messages: state.messages(),
        bytes: state.bytes(),
        paused: state.is_paused(),
        backing_off: state.is_backing_off(),
        leaving: state.is_leaving(),
    }
}
