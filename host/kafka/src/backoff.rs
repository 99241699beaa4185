//! Delays between attempts at something that is the host's trouble.

use std::time::Duration;

const FIRST: Duration = Duration::from_millis(50);
const MAX: Duration = Duration::from_secs(5);

/// Exponential, with jitter, up to five seconds.
#[derive(Debug, Default)]
pub(crate) struct Backoff {
    failures: u32,
}

impl Backoff {
    /// The next delay: between half of a bound that doubles and the bound.
    pub(crate) fn next(&mut self) -> Duration {
        let bound = FIRST.saturating_mul(1 << self.failures.min(10)).min(MAX);
        self.failures += 1;
        bound.mul_f64(0.5 + rand::random::<f64>() / 2.0)
    }

    /// It worked.
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
