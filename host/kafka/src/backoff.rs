//! Delays between attempts at an operation that failed through no fault of a message.

use std::time::Duration;

/// The upper bound of the first delay.
const FIRST: Duration = Duration::from_millis(50);
/// The upper bound of every delay.
const MAX: Duration = Duration::from_secs(5);

/// An exponential backoff with jitter, up to five seconds.
#[derive(Debug, Default)]
pub(crate) struct Backoff {
    /// Delays handed out since the last reset.
    failures: u32,
}

impl Backoff {
    /// Returns the next delay: between half of a bound that doubles and the bound.
    pub(crate) fn next(&mut self) -> Duration {
        let bound = FIRST.saturating_mul(1 << self.failures.min(10)).min(MAX);
        self.failures += 1;
        bound.mul_f64(0.5 + rand::random::<f64>() / 2.0)
    }

    /// Starts again with the shortest delay, after a success.
    pub(crate) fn reset(&mut self) {
        self.failures = 0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn delays_grow_and_stay_below_the_bound() {
        let mut backoff = Backoff::default();
        let delays: Vec<_> = (0..40).map(|_| backoff.next()).collect();
        assert!(delays[0] <= FIRST);
        assert!(delays.iter().all(|delay| *delay <= MAX && *delay >= FIRST / 2));
        assert!(delays[39] >= MAX / 2);
        backoff.reset();
        assert!(backoff.next() <= FIRST);
    }
}
