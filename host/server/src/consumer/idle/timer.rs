//! The idle time of a consumer, and its entry in the gauge of consumers.

use std::time::Duration;

use oncebox_kafka::{ConsumerStatus, PartitionStatus};
use tokio::time::Instant;

/// The time since a consumer's partitions last changed or had work.
pub(super) struct IdleTimer {
    idle_after: Duration,
    since: Instant,
    seen: Vec<(String, i32, Option<i64>)>,
}

impl IdleTimer {
    pub(super) fn new(idle_after: Duration) -> Self {
        Self { idle_after, since: Instant::now(), seen: Vec::new() }
    }

    /// Returns the pause between two checks.
    pub(super) fn step(&self) -> Duration {
        (self.idle_after / 8).clamp(Duration::from_millis(25), Duration::from_secs(5))
    }

    /// Returns whether nothing has happened for long enough. After a yes, a quarter of the idle
    /// time passes before the next.
    pub(super) fn is_over(&mut self, status: &ConsumerStatus) -> bool {
        let seen: Vec<_> = status
            .partitions
            .iter()
            .map(|p| (p.topic.clone(), p.partition, p.next_offset))
            .collect();
        let rests = |p: &PartitionStatus| {
            p.messages == 0 && !p.backing_off && !p.leaving && p.next_offset.is_some()
        };
        if seen != self.seen || !status.partitions.iter().all(rests) {
            (self.seen, self.since) = (seen, Instant::now());
            return false;
        }
        let is_over = self.since.elapsed() >= self.idle_after;
        if is_over {
            self.since = Instant::now() - self.idle_after.mul_f64(0.75);
        }
        is_over
    }
}

/// One consumer's entry in the gauge of consumers by state, until it is dropped.
pub(super) struct GaugeGuard(&'static str);

impl GaugeGuard {
    pub(super) fn new(state: &'static str) -> Self {
        metrics::gauge!("oncebox_consumers", "state" => state).increment(1.0);
        Self(state)
    }
}

impl Drop for GaugeGuard {
    fn drop(&mut self) {
        metrics::gauge!("oncebox_consumers", "state" => self.0).decrement(1.0);
    }
}
