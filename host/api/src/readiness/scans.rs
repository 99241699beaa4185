//! Scans of inboxes for readiness. Each reads up to a million rows, so that few run at a time, and
//! requests for one consumer share the last one.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex as Lock, PoisonError},
    time::Duration,
};

use oncebox_control::InboxScan;
use oncebox_model::InboxError;
use tokio::{
    sync::{Mutex, Semaphore},
    task::{JoinError, JoinHandle},
    time::{Instant, timeout},
};

use crate::error::{ApiError, Code};

/// Scans that run at a time.
const TURNS: usize = 2;
/// Longest wait for a turn.
const TURN_MAX: Duration = Duration::from_secs(10);
/// Time for which a scan is given to further requests.
const FRESH: Duration = Duration::from_secs(60);
/// The same for a scan that failed.
const FRESH_FAILURE: Duration = Duration::from_secs(5);

/// The result of a scan, which requests share.
pub(super) type SharedScan = Arc<InboxScan>;

/// The last scan of each consumer's inbox.
pub(crate) struct InboxScans {
    last: Lock<HashMap<i32, Arc<LastScan>>>,
    turns: Arc<ScanTurns>,
}

/// The permission to scan, for few at a time.
pub(super) struct ScanTurns {
    turns: Semaphore,
    wait_max: Duration,
}

/// The last scan of one inbox. A task that scans holds it locked, so that requests for it wait for
/// one scan together.
#[derive(Default)]
pub(super) struct LastScan(Mutex<Option<Scanned>>);

struct Scanned {
    at: Instant,
    /// Revision of the consumer that was scanned.
    revision: i64,
    result: Result<SharedScan, Arc<InboxError>>,
}

impl Default for InboxScans {
    fn default() -> Self {
        let turns = ScanTurns { turns: Semaphore::new(TURNS), wait_max: TURN_MAX };
        Self { last: Lock::default(), turns: Arc::new(turns) }
    }
}

impl InboxScans {
    /// Returns the last scan of a consumer's inbox.
    pub(super) fn of(&self, consumer_id: i32) -> Arc<LastScan> {
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        last.entry(consumer_id).or_default().clone()
    }

    pub(super) fn turns(&self) -> Arc<ScanTurns> {
        self.turns.clone()
    }
}

impl Scanned {
    fn is_fresh(&self, revision: i64) -> bool {
        let fresh = if self.result.is_ok() { FRESH } else { FRESH_FAILURE };
        self.revision == revision && self.at.elapsed() < fresh
    }
}

impl LastScan {
    /// Returns the last scan, or a new one where that is not fresh or was of another revision of
    /// the consumer.
    pub(super) async fn fresh(
        &self,
        turns: &ScanTurns,
        revision: i64,
        scan: impl Future<Output = Result<InboxScan, InboxError>>,
    ) -> Result<SharedScan, ScanError> {
        let mut last = self.0.lock().await;
        if let Some(scanned) = last.as_ref().filter(|scanned| scanned.is_fresh(revision)) {
            return scanned.result.clone().map_err(ScanError::Inbox);
        }
        let turn = timeout(turns.wait_max, turns.turns.acquire()).await;
        let _turn = turn.map_err(|_| ScanError::Busy)?.map_err(|_| ScanError::Busy)?;
        let result = scan.await.map(Arc::new).map_err(Arc::new);
        *last = Some(Scanned { at: Instant::now(), revision, result: result.clone() });
        result.map_err(ScanError::Inbox)
    }
}

impl ScanTurns {
    /// Waits for the task of a scan within the time of a request. One that takes longer goes on, for
    /// the next request.
    pub(super) async fn answer(
        scanning: JoinHandle<Result<SharedScan, ScanError>>,
        request_timeout: Duration,
    ) -> Result<SharedScan, ScanError> {
        let answer_max = request_timeout * 4 / 5;
        match timeout(answer_max, scanning).await {
            Ok(Ok(scan)) => scan,
            Ok(Err(error)) => Err(ScanError::Task(error)),
            Err(_) => Err(ScanError::Late(answer_max)),
        }
    }
}

/// The reason why an inbox has no scan.
#[derive(Debug, thiserror::Error)]
pub(super) enum ScanError {
    #[error("{0}")]
    Inbox(Arc<InboxError>),
    #[error("the host failed to read the inbox; its log says why")]
    Task(JoinError),
    #[error("the host reads {} other inboxes; ask again", TURNS)]
    Busy,
    #[error("the inbox was not read within {} ms; ask again for its result", .0.as_millis())]
    Late(Duration),
}

impl From<ScanError> for ApiError {
    fn from(error: ScanError) -> Self {
        let text = error.to_string();
        match error {
            ScanError::Inbox(error) => {
                let text = "the inbox cannot be read at present; ask again later";
                Self::host(Code::Unavailable, text, error)
            }
            ScanError::Task(error) => Self::host(Code::Internal, text, error),
            ScanError::Busy => Self::new(Code::Unavailable, text),
            ScanError::Late(_) => Self::new(Code::Timeout, text),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    fn turns(count: usize, wait_max: Duration) -> ScanTurns {
        ScanTurns { turns: Semaphore::new(count), wait_max }
    }

    // What could go wrong: each request reads the inbox again, or is given what was read before a
    // change of the consumer.
    #[tokio::test]
    async fn requests_for_one_revision_share_a_scan() {
        let (last, turns, scans) = (LastScan::default(), turns(1, TURN_MAX), AtomicUsize::new(0));
        let ask = async |revision: i64| {
            let scan = async {
                scans.fetch_add(1, Ordering::Relaxed);
                tokio::task::yield_now().await;
                Ok(InboxScan::default())
            };
            last.fresh(&turns, revision, scan).await
        };
        let (one, other) = tokio::join!(ask(1), ask(1));
        assert!(one.is_ok() && other.is_ok());
        assert_eq!(scans.load(Ordering::Relaxed), 1);
        assert!(ask(2).await.is_ok());
        assert_eq!(scans.load(Ordering::Relaxed), 2);
    }

    // What could go wrong: requests queue for a turn without a bound, or a busy host is remembered
    // as the result of a scan.
    #[tokio::test]
    async fn a_request_without_a_turn_is_told_to_repeat() {
        let last = LastScan::default();
        let busy = turns(0, Duration::ZERO);
        let refused = last.fresh(&busy, 1, async { Ok(InboxScan::default()) }).await;
        let refused = refused.expect_err("no turn").to_string();
        assert!(refused.ends_with("ask again"), "{refused}");
        let free = turns(1, TURN_MAX);
        assert!(last.fresh(&free, 1, async { Ok(InboxScan::default()) }).await.is_ok());
    }
}
