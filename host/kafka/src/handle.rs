//! The handle to a running consumer.

use std::time::Duration;

use tokio::sync::watch;

use crate::{
    error::ConsumerError,
    status::{ConsumerStatus, StatusSnapshot},
};

/// Time beyond a drain's own, for the loop to report its end.
const MARGIN: Duration = Duration::from_secs(2);

/// A running consumer. Dropping it drains it in the background.
pub struct ConsumerHandle {
    pub(crate) drain: watch::Sender<Option<Duration>>,
    pub(crate) snapshots: watch::Receiver<StatusSnapshot>,
    pub(crate) ended: watch::Receiver<Option<ConsumerEnd>>,
}

/// The result of a drain.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Drained {
    /// Every batch has ended, and the offsets that it settled were offered for commit.
    Clean,
    /// The deadline passed while partitions still run; records that they settle later are not
    /// acked.
    Unfinished,
}

impl ConsumerHandle {
    /// Stops fetching, lets each partition finish the batch that runs, commits, closes the
    /// partitions and leaves the group, all within `within`.
    pub async fn drain(&self, within: Duration) -> Drained {
        self.drain.send_replace(Some(within));
        let mut ended = self.ended.clone();
        match tokio::time::timeout(within + MARGIN, ended.wait_for(Option::is_some)).await {
            Ok(Ok(ending)) if ending.as_ref().is_some_and(|ending| ending.unfinished == 0) => {
                Drained::Clean
            }
            _ => Drained::Unfinished,
        }
    }

    /// Waits until the consumer has ended, after a drain or by a failure.
    ///
    /// # Errors
    ///
    /// The error that ended the consumer, if it was not drained.
    pub async fn join(&self) -> Result<(), ConsumerError> {
        let mut ended = self.ended.clone();
        match ended.wait_for(Option::is_some).await {
            Ok(ending) => ending.as_ref().map_or(Ok(()), |ending| ending.result.clone()),
            Err(_) => Err(ConsumerError::Panicked),
        }
    }

    /// Returns the consumer's present status.
    pub fn status(&self) -> ConsumerStatus {
        self.snapshots.borrow().status()
    }
}

/// The end of a consumer.
pub(crate) struct ConsumerEnd {
    pub(crate) result: Result<(), ConsumerError>,
    /// Number of workers that still run.
    pub(crate) unfinished: usize,
}
