//! A rate, as a token bucket that holds a second's worth.

use std::time::Duration;

use tokio::time::Instant;

/// Tokens for requests that have a rate together. A new bucket is full.
#[derive(Debug, Default)]
pub struct TokenBucket {
    tokens: f64,
    /// Moment for which they are counted; none before the first request.
    at: Option<Instant>,
}

impl TokenBucket {
    /// Takes tokens for at most so many requests, and returns for how many.
    pub fn take(&mut self, per_second: u32, most: usize, now: Instant) -> usize {
        self.fill(per_second, now);
        let taken = (self.tokens.floor() as usize).min(most);
        self.tokens -= taken as f64;
        taken
    }

    /// Gives back tokens for requests that were not made.
    pub fn give_back(&mut self, tokens: usize) {
        self.tokens += tokens as f64;
    }

    /// Returns the time until there is a token.
    pub fn next_in(&self, per_second: u32) -> Duration {
        let missing = (1.0 - self.tokens).max(0.0);
        Duration::from_secs_f64(missing / f64::from(per_second.max(1)))
    }

    fn fill(&mut self, per_second: u32, now: Instant) {
        let most = f64::from(per_second.max(1));
        let since = self.at.map(|at| now.saturating_duration_since(at).as_secs_f64());
        let grown = since.map_or(most, |since| self.tokens + since * most);
        (self.tokens, self.at) = (grown.min(most), Some(now));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    // What could go wrong: more requests a second than the endpoint takes, or none ever again.
    #[test]
    fn a_second_has_as_many_requests_as_it_may() {
        let (mut bucket, begin) = (TokenBucket::default(), Instant::now());
        assert_eq!(bucket.take(4, 3, begin), 3);
        assert_eq!(bucket.take(4, 3, begin), 1, "what is left of the first second");
        assert_eq!(bucket.take(4, 3, begin), 0);
        assert_eq!(bucket.next_in(4), Duration::from_millis(250));
        assert_eq!(bucket.take(4, 8, begin + Duration::from_millis(500)), 2);
        bucket.give_back(1);
        assert_eq!(bucket.take(4, 8, begin + Duration::from_millis(500)), 1);
        assert_eq!(
            bucket.take(4, 100, begin + Duration::from_secs(60)),
            4,
            "no more than a second's"
        );
    }
}
