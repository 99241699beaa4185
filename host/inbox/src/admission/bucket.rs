//! Rate limit: the number of messages that may begin in a second.

use std::time::Duration;

/// A token bucket that holds a second's messages. Its caller supplies the time.
#[derive(Debug)]
pub(super) struct Bucket {
    per_second: Option<f64>,
    tokens: f64,
    filled_at: Duration,
}

impl Bucket {
    pub(super) fn new(per_second: Option<u32>, now: Duration) -> Self {
        let per_second = per_second.map(|rate| f64::from(rate.max(1)));
        Self { per_second, tokens: per_second.unwrap_or_default(), filled_at: now }
    }

    /// Replaces the rate; tokens that were taken stay taken.
    pub(super) fn set(&mut self, per_second: Option<u32>, now: Duration) {
        if per_second.map(|rate| f64::from(rate.max(1))) == self.per_second {
            return;
        }
        self.fill(now);
        let before = self.per_second;
        self.per_second = per_second.map(|rate| f64::from(rate.max(1)));
        match (before, self.per_second) {
            (None, Some(rate)) => self.tokens = rate,
            (_, Some(rate)) => self.tokens = self.tokens.min(rate),
            (_, None) => {}
        }
    }

    /// Returns the number of whole messages that may begin now.
    pub(super) fn allowed(&mut self, now: Duration) -> u32 {
        self.fill(now);
        // A hair under a whole token counts as one: time is counted in nanoseconds.
        self.per_second.map_or(u32::MAX, |_| (self.tokens + 1e-6).floor().max(0.0) as u32)
    }

    /// Returns the time at which the next message may begin, where none may now.
    pub(super) fn next_at(&self) -> Duration {
        let Some(rate) = self.per_second else { return self.filled_at };
        self.filled_at + Duration::from_secs_f64((1.0 - self.tokens).max(0.0) / rate)
    }

    pub(super) fn take(&mut self, messages: u32) {
        if self.per_second.is_some() {
            self.tokens -= f64::from(messages);
        }
    }

    /// Puts back tokens of messages that began and were not settled.
    pub(super) fn put_back(&mut self, messages: u32) {
        if let Some(rate) = self.per_second {
            self.tokens = (self.tokens + f64::from(messages)).min(rate);
        }
    }

    fn fill(&mut self, now: Duration) {
        let passed = now.saturating_sub(self.filled_at);
        self.filled_at = self.filled_at.max(now);
        if let Some(rate) = self.per_second {
            self.tokens = (self.tokens + rate * passed.as_secs_f64()).min(rate);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    #[test]
    fn over_any_time_no_more_begin_than_the_rate_and_one_second_of_it() {
        let (mut bucket, mut taken) = (Bucket::new(Some(10), at(0)), 0);
        for ms in 0..5_000 {
            let allowed = bucket.allowed(at(ms)).min(3);
            bucket.take(allowed);
            taken += allowed;
        }
        assert!((58..=60).contains(&taken), "{taken} in 5 s at 10 a second");
    }

    #[test]
    fn an_empty_bucket_knows_when_the_next_message_may_begin() {
        let mut bucket = Bucket::new(Some(4), at(0));
        bucket.take(4);
        assert_eq!((bucket.allowed(at(0)), bucket.next_at()), (0, at(250)));
        assert_eq!(bucket.allowed(at(250)), 1);
        bucket.put_back(100);
        assert_eq!(bucket.allowed(at(250)), 4, "no more than a second's");
    }

    #[test]
    fn a_rate_that_changes_holds_from_now_on() {
        let mut bucket = Bucket::new(None, at(0));
        assert_eq!(bucket.allowed(at(0)), u32::MAX);
        bucket.set(Some(2), at(1_000));
        assert_eq!(bucket.allowed(at(1_000)), 2);
        bucket.take(2);
        bucket.set(Some(1_000), at(1_000));
        assert_eq!(bucket.allowed(at(1_010)), 10);
        bucket.set(None, at(1_010));
        assert_eq!(bucket.allowed(at(1_010)), u32::MAX);
    }
}
