//! Pauses of a removal, so that it leaves most of the database's processors and disk to messages.

use std::time::Duration;

use tokio::time::{Instant, sleep};

/// Pause after some work, as a multiple of its time.
const FACTOR: u32 = 4;
/// Longest pause. It is well below the time for which the transaction of the count may be idle.
const PAUSE_MAX: Duration = Duration::from_secs(1);
/// Longest sum of the pauses of a removal. After that it works without any, so that a partition of
/// any size is done within a run.
const SUM_MAX: Duration = Duration::from_secs(30 * 60);

/// The pauses of one removal.
#[derive(Debug)]
pub(super) struct Pauses {
    /// Sum of the pauses that are left.
    left: Duration,
}

impl Pauses {
    pub(super) fn new() -> Self {
        Self { left: SUM_MAX }
    }

    /// Pauses after work that began at a time.
    pub(super) async fn after(&mut self, began: Instant) {
        sleep(self.take(began.elapsed())).await;
    }

    /// Returns the pause after work of this duration, and takes it from what is left.
    fn take(&mut self, worked: Duration) -> Duration {
        let pause = worked.saturating_mul(FACTOR).min(PAUSE_MAX).min(self.left);
        self.left -= pause;
        pause
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    // What could go wrong: a removal pauses for ever, or for longer than a transaction may be idle.
    #[test]
    fn pauses_follow_the_work_and_end() {
        let mut pauses = Pauses::new();
        assert_eq!(pauses.take(Duration::from_millis(10)), Duration::from_millis(40));
        assert_eq!(pauses.take(Duration::MAX), PAUSE_MAX);
        let mut sum = Duration::from_millis(1_040);
        for _ in 0..10_000 {
            sum += pauses.take(Duration::from_secs(1));
        }
        assert_eq!(sum, SUM_MAX);
    }
}
