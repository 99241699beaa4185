//! The events of the poll thread.

use std::sync::mpsc::SyncSender;

use oncebox_model::record::Record;

use crate::{error::ConsumerError, partition::Partition};

/// An event that the poll thread sends to the consumer's loop, in order.
pub(crate) enum PollEvent {
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
