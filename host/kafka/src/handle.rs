//! The handle to a running consumer.

use std::time::Duration;

use tokio::sync::watch;

use crate::{
    error::ConsumerError,
    status::{ConsumerStatus, Snapshot},
};

/// Time beyond a drain's own, for the loop to say that it is over.
const MARGIN: Duration = Duration::from_secs(2);

/// A running consumer. Dropping it drains it in the background.
pub struct ConsumerHandle {
    pub(crate) drain: watch::Sender<Option<Duration>>,
    pub(crate) snapshots: watch::Receiver<Snapshot>,
    pub(crate) ended: watch::Receiver<Option<Ending>>,
}

/// What became of a drain.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Drained {
    /// Everything that ran has ended, and what it settled was offered for commit.
    Clean,
    /// Time was up; some partitions still run, and what they settle now is not acked.
    Unfinished,
}

impl ConsumerHandle {
    /// Stops fetching, lets each partition finish the batch it runs, commits, closes the
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

    /// Waits until the consumer has ended: after a drain, or by itself with an error.
    pub async fn join(&self) -> Result<(), ConsumerError> {
        let mut ended = self.ended.clone();
        match ended.wait_for(Option::is_some).await {
            Ok(ending) => ending.as_ref().map_or(Ok(()), |ending| ending.result.clone()),
            Err(_) => Err(ConsumerError::Panicked),
        }
    }

    /// The consumer as it is now.
    pub fn status(&self) -> ConsumerStatus {
        self.snapshots.borrow().status()
    }
}

/// How a consumer ended.
pub(crate) struct Ending {
    pub(crate) result: Result<(), ConsumerError>,
    /// Workers that still run.
    pub(crate) unfinished: usize,
}
