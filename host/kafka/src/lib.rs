//! One consumer of a tenant as one Kafka group: records of a partition go to the inbox
//! in order, and an offset is stored when everything before it is settled. Knows no
//! WebAssembly and no SQL; what settles a record is behind [`Inbox`].
//!
//! A record's way: `poll` reads it on a thread of its own, the loop in `consumer` puts it
//! into its partition's queue, the `worker` of that partition offers it to the inbox, and
//! `offsets` stores the offset if the partition is still ours.

#![cfg_attr(test, allow(clippy::unwrap_used))]

mod backoff;
mod client;
mod config;
mod consumer;
mod error;
mod flow;
mod handle;
mod metric;
mod offsets;
mod pause;
mod poll;
mod position;
mod producer;
mod rebalance;
mod sabotage;
mod seek;
mod sink;
mod status;
mod topic_id;
mod watcher;
mod worker;

#[cfg(test)]
mod tests;

pub use config::{CONNECTION, ConsumerConfig, Timing};
pub use consumer::Consumer;
pub use error::ConsumerError;
pub use handle::{ConsumerHandle, Drained};
pub use producer::{NewRecord, ProduceError, Producer};
pub use seek::{GroupPosition, SeekError, SeekTo, delete_group, positions, set_offsets};
pub use sink::{Inbox, PartitionInbox, SinkError};
pub use status::{ConsumerState, ConsumerStatus, PartitionStatus};
pub use watcher::{Sight, Watched, Watchers};
