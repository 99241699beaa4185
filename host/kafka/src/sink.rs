//! The seam to the inbox.

use std::time::Duration;

use futures::future::BoxFuture;
use oncebox_model::record::Record;

/// Where the records of assigned partitions go.
pub trait Inbox: Send + Sync + 'static {
    /// Opened when a partition is assigned, before its first record. Tried again with a
    /// backoff until it succeeds or the partition is taken away; never cancelled.
    fn open(
        &self,
        topic: &str,
        partition: i32,
        next_offset: i64,
    ) -> BoxFuture<'_, Result<Box<dyn PartitionInbox>, SinkError>>;
}

/// One assigned partition.
pub trait PartitionInbox: Send {
    /// Waits until [`PartitionInbox::process`] may begin at once, with up to so many records, on a
    /// host that others share. Dropped half way when the partition is given up.
    fn ready(&mut self, _records: usize) -> BoxFuture<'_, ()> {
        Box::pin(std::future::ready(()))
    }

    /// Works through the front of `records` (never empty). `Ok(n)`, n >= 1: the first n
    /// are settled and may be acked. May take long; is never cancelled half way.
    fn process<'a>(&'a mut self, records: &'a [Record]) -> BoxFuture<'a, Result<usize, SinkError>>;

    /// Records that are of use per call, at most.
    fn batch_max(&self) -> usize;

    /// The partition is given up cleanly; nothing of it runs any more. Not called for a
    /// partition that was lost, since its next owner may have opened it already.
    fn close<'a>(self: Box<Self>, next_offset: i64) -> BoxFuture<'a, ()>;
}

/// The host's trouble, never the message's: the same records are offered again after a
/// backoff.
#[derive(Debug, Clone, Default, thiserror::Error)]
#[error("{text}")]
pub struct SinkError {
    /// What failed, for the log.
    pub text: String,
    /// Nothing failed: the sink wants these records later, after this long, and the partition rests
    /// meanwhile.
    pub pause: Option<Duration>,
}
