//! One consumer of a tenant as one Kafka group. Records of a partition go to the inbox in order,
//! and an offset is stored when everything before it is settled. The crate knows no WebAssembly and
//! no SQL; the code that settles a record is behind [`Inbox`].
//!
//! A record's way: `poll` reads it on a thread of its own, and `event_loop` puts it into its
//! partition's queue. The `worker` of that partition offers it to the inbox. `offsets` stores
//! the offset if the partition still belongs to this consumer.

#![cfg_attr(test, allow(clippy::unwrap_used))]

mod backoff;
mod client;
mod config;
mod consumer;
mod error;
mod event_loop;
mod handle;
mod metric;
mod native;
mod offsets;
mod partition;
mod partition_state;
mod pause;
mod poll;
mod poll_event;
mod position;
mod producer;
mod rebalance;
mod seek;
mod status;
mod topic_id;
mod topic_id_cache;
mod topic_settings;
mod watcher;
mod worker;

#[cfg(test)]
mod tests;

pub use config::{CONNECTION, ConsumerConfig, Timing};
pub use consumer::start_consumer;
pub use error::ConsumerError;
pub use handle::{ConsumerHandle, Drained};
pub use oncebox_model::inbox::{
    Behind, Inbox, OpenAt, Opened, PartitionInbox, PartitionInboxError, ServerRun,
};
pub use producer::{NewRecord, OUTGOING_MAX, ProduceError, Producer};
pub use seek::{GroupPosition, SeekError, SeekTo, delete_group, positions, set_offsets};
pub use status::{ConsumerState, ConsumerStatus, PartitionStatus};
pub use topic_settings::topic_settings;
pub use watcher::{Lag, LagWatch, Watchers};
