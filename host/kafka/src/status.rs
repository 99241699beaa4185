//! What a consumer tells about itself.

use std::sync::Arc;

use crate::flow::Flow;

/// Where a consumer is in its life.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ConsumerState {
    /// Reading, or waiting for partitions.
    Running,
    /// Finishing what runs.
    Draining,
    /// Over; the handle's `join` says why.
    Ended,
}

/// A consumer at one moment.
#[derive(Debug, Clone)]
pub struct ConsumerStatus {
    /// Where it is in its life.
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
    /// Whether the inbox fails and its records are being offered again.
    pub in_trouble: bool,
    /// Whether it is being given up and finishes the batch it runs.
    pub leaving: bool,
}

/// What the loop publishes; counts are read when someone asks.
#[derive(Clone)]
pub(crate) struct Snapshot {
    pub(crate) state: ConsumerState,
    pub(crate) flows: Vec<Arc<Flow>>,
}

impl Snapshot {
    pub(crate) fn status(&self) -> ConsumerStatus {
        let mut partitions: Vec<_> = self.flows.iter().map(|flow| partition(flow)).collect();
        partitions.sort_by(|a, b| (&a.topic, a.partition).cmp(&(&b.topic, b.partition)));
        ConsumerStatus { state: self.state, partitions }
    }
}

fn partition(flow: &Flow) -> PartitionStatus {
    PartitionStatus {
        topic: flow.partition.topic.to_string(),
        partition: flow.partition.number,
        next_offset: flow.next_offset(),
        messages: flow.messages(),
        bytes: flow.bytes(),
        paused: flow.is_paused(),
        in_trouble: flow.is_in_trouble(),
        leaving: flow.is_leaving(),
    }
}
