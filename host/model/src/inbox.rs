//! The interface between a Kafka consumer and the inbox. Neither knows the other; both know this.

use std::{sync::Arc, time::Duration};

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
    fn open(&self, at: OpenAt) -> BoxFuture<'_, Result<Opened, PartitionInboxError>>;

    /// Returns how far the database is behind the offset, as [`Inbox::open`] would; none where it is
    /// not. Opens nothing.
    ///
    /// # Errors
    ///
    /// A [`PartitionInboxError`] when the database does not answer at present.
    fn behind(&self, _at: OpenAt) -> BoxFuture<'_, Result<Option<Behind>, PartitionInboxError>> {
        Box::pin(std::future::ready(Ok(None)))
    }
}

/// A run of a database server, from its start to its end. A failover, a restart and a restored
/// backup each give another one. None where it is not known.
pub type ServerRun = Option<Arc<str>>;

/// The offset at which a partition is to be opened.
#[derive(Debug, Clone)]
pub struct OpenAt {
    /// Name of the topic.
    pub topic: Arc<str>,
    /// Kafka's id of the topic; none where the brokers have no ids.
    pub topic_id: Option<Arc<str>>,
    /// Number of the partition.
    pub partition: i32,
    /// Offset of the first record that is not settled.
    pub next_offset: i64,
    /// Server run in which the records before it were settled. None: the offset comes from an
    /// operator, another program or an earlier version, and is taken as it is.
    pub server: ServerRun,
}

/// Answer to the opening of a partition.
pub enum Opened {
    /// The partition is open.
    Ready(Box<dyn PartitionInbox>),
    /// The database may have lost commits, and nothing was opened.
    Behind(Behind),
}

/// Position of a database that may have lost commits of a partition.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Behind {
    /// Offset before which the database knows all records as settled.
    pub next_offset: i64,
    /// Server run that says so.
    pub server: ServerRun,
}

/// The inbox of one assigned partition.
pub trait PartitionInbox: Send {
    /// Waits until [`PartitionInbox::process`] may begin at once with records from the front of
    /// `_records`, on a host that several consumers share, and until the payloads that they refer
    /// to are at hand. The worker drops the future when the partition is given up.
    fn ready<'a>(&'a mut self, _records: &'a [Record]) -> BoxFuture<'a, ()> {
        Box::pin(std::future::ready(()))
    }

    /// Watches the partition while there is no record to process. It ends where the database is in
    /// another run of its server that has all commits of the partition. The worker drops the future
    /// when a record arrives.
    ///
    /// # Errors
    ///
    /// A [`PartitionInboxError`] when the database has lost commits of the partition.
    fn idle(&mut self) -> BoxFuture<'_, Result<(), PartitionInboxError>> {
        Box::pin(std::future::pending())
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

    /// Returns the server run that has all records that were settled.
    fn server(&self) -> ServerRun {
        None
    }

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
    /// Whether the database has lost commits of the partition, whose records are to be read again.
    pub commits_lost: bool,
}

impl From<InboxError> for PartitionInboxError {
    fn from(error: InboxError) -> Self {
        let commits_lost = matches!(error, InboxError::CommitsLost { .. });
        Self { text: error.to_string(), pause: error.retry_after(), commits_lost }
    }
}
