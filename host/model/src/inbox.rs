//! The interface between a Kafka consumer and the inbox. Neither knows the other; both know this.

use std::time::Duration;

use futures::future::BoxFuture;

use crate::{error::InboxError, record::Record};

/// The receiver of the records of assigned partitions.
pub trait Inbox: Send + Sync + 'static {
    /// Opens a partition when it is assigned, before its first record. The worker repeats a call
    /// that fails, with a backoff, until it succeeds or the partition is revoked. The call is never
    /// cancelled.
    ///
    /// # Errors
    ///
    /// A [`PartitionInboxError`] when the inbox cannot open the partition at present.
    fn open(
        &self,
        topic: &str,
        partition: i32,
        next_offset: i64,
    ) -> BoxFuture<'_, Result<Box<dyn PartitionInbox>, PartitionInboxError>>;
}

/// The inbox of one assigned partition.
pub trait PartitionInbox: Send {
    /// Waits until [`PartitionInbox::process`] may begin at once with records from the front of
    /// `_records`, on a host that several consumers share, and until the payloads that they refer
    /// to are at hand. The worker drops the future when the partition is given up.
    fn ready<'a>(&'a mut self, _records: &'a [Record]) -> BoxFuture<'a, ()> {
        Box::pin(std::future::ready(()))
    }

    /// Processes records from the front of `records`, which is never empty, and returns how many
    /// are settled and may be acked. The count is at least 1. The call may take long and is never
    /// cancelled.
    ///
    /// # Errors
    ///
    /// A [`PartitionInboxError`] when no record is settled; the worker offers the records again.
    fn process<'a>(
        &'a mut self,
        records: &'a [Record],
    ) -> BoxFuture<'a, Result<usize, PartitionInboxError>>;

    /// Returns the largest number of records that one call makes use of.
    fn batch_max(&self) -> usize;

    /// Closes a partition that is given up cleanly, after its last batch has ended. The worker does
    /// not call it for a lost partition, since the next owner may have opened that already.
    fn close<'a>(self: Box<Self>, next_offset: i64) -> BoxFuture<'a, ()>;
}

/// A failure of the host, never of a message: the worker offers the records again after a backoff.
#[derive(Debug, Clone, Default, thiserror::Error)]
#[error("{text}")]
pub struct PartitionInboxError {
    /// The cause, for the log.
    pub text: String,
    /// The time after which the inbox wants the records again, where nothing failed. The partition
    /// is paused until then. None stands for a failure.
    pub pause: Option<Duration>,
}

impl From<InboxError> for PartitionInboxError {
    fn from(error: InboxError) -> Self {
        Self { text: error.to_string(), pause: error.retry_after() }
    }
}
