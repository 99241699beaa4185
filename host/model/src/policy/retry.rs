//! The retries of a message that failed.

use std::time::Duration;

use serde::{Deserialize, Serialize};

/// The rules for runs after a failure that may pass.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(from = "WrittenRetry", into = "WrittenRetry")]
pub struct Retry {
    /// Ladder that gives the values of the keys that the policy does not set.
    pub preset: Option<Preset>,
    /// Runs of one message, the first included, before it becomes a dead letter.
    pub attempts_max: u32,
    /// Upper bound of the first delay, milliseconds.
    pub backoff_min_ms: u64,
    /// Upper bound of any delay, milliseconds.
    pub backoff_max_ms: u64,
    /// Factor by which the bound grows after each further attempt; 1 to 100.
    pub backoff_factor: u32,
    /// Choice of the delay below its bound.
    pub jitter: Jitter,
    /// Milliseconds that a leased attempt may take before another worker takes it over. It exceeds
    /// a handler's deadline by more than `LEASE_ROOM_MS`, so that a run that ends at its deadline
    /// is recorded in time.
    pub lease_ms: u64,
    /// Messages that one host retries concurrently for this consumer.
    pub workers: usize,
    /// Milliseconds since a message was received, or last redriven, after which a failing run is
    /// its last; none for no bound.
    pub age_max_ms: Option<u64>,
}

/// Time that a lease has left when a handler is stopped at its deadline in the middle of a
/// statement, milliseconds.
///
/// The first half second is for PostgreSQL: it notices that the client is gone, and lets go of the
/// row. Sessions check their client every 500 ms. A second is for a new login, and a second to
/// record the failure. A database that takes longer costs only time: the former holder of the lease
/// reports it afterwards, and the counted attempt is taken back.
pub const LEASE_ROOM_MS: u64 = 500 + 1_000 + 1_000;

/// The choice of a delay below its bound.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Jitter {
    /// Uniform between zero and the bound: messages that failed together do not come back together.
    #[default]
    Full,
    /// The bound itself.
    None,
}

/// The ladders that have a name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Preset {
    /// Ten attempts; up to 1 s, 2 s, 4 s and so on to an hour, each uniform below its bound.
    ExponentialJitter,
    /// Three attempts; min(30·4ⁿ, 3,600) seconds, n from zero: 30 s, 2 min.
    #[serde(rename = "seed-002")]
    Seed002,
}

impl Preset {
    /// All presets.
    pub const ALL: [Self; 2] = [Self::ExponentialJitter, Self::Seed002];

    /// Returns the name of the preset in a policy.
    pub fn name(self) -> &'static str {
        match self {
            Self::ExponentialJitter => "exponential-jitter",
            Self::Seed002 => "seed-002",
        }
    }

    /// Returns the values of the preset, with the defaults for the rest.
    pub fn retry(self) -> Retry {
        let rest = Retry { preset: Some(self), ..Retry::default() };
        match self {
            Self::ExponentialJitter => Retry { attempts_max: 10, ..rest },
            Self::Seed002 => Retry {
                attempts_max: 3,
                backoff_min_ms: 30_000,
                backoff_factor: 4,
                jitter: Jitter::None,
                ..rest
            },
        }
    }
}

/// Default of `backoff_factor`.
const FACTOR: u32 = 2;

impl Default for Retry {
    fn default() -> Self {
        Self {
            preset: None,
            attempts_max: 5,
            backoff_min_ms: 1_000,
            backoff_max_ms: 3_600_000,
            backoff_factor: FACTOR,
            jitter: Jitter::Full,
            lease_ms: 30_000,
            workers: 2,
            age_max_ms: None,
        }
    }
}

impl Retry {
    /// Returns the upper bound of the delay after a number of attempts.
    pub fn bound(&self, attempts: u32) -> Duration {
        let factor = u64::from(self.backoff_factor).saturating_pow(attempts.saturating_sub(1));
        Duration::from_millis(self.backoff_min_ms.saturating_mul(factor).min(self.backoff_max_ms))
    }

    /// Returns whether a message of an age is not tried again.
    pub fn is_too_old(&self, age: Duration) -> bool {
        self.age_max_ms.is_some_and(|most| age >= Duration::from_millis(most))
    }

    /// Returns a delay after a number of attempts.
    pub fn delay(&self, attempts: u32) -> Duration {
        let bound = self.bound(attempts);
        match self.jitter {
            Jitter::None => bound,
            Jitter::Full => bound.mul_f64(rand::random()),
        }
    }
}

/// The section as its owner writes it; a missing key takes the preset's value, or its default.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct WrittenRetry {
    #[serde(skip_serializing_if = "Option::is_none")]
    preset: Option<Preset>,
    attempts_max: Option<u32>,
    backoff_min_ms: Option<u64>,
    backoff_max_ms: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    backoff_factor: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    jitter: Option<Jitter>,
    lease_ms: Option<u64>,
    workers: Option<usize>,
    #[serde(skip_serializing_if = "Option::is_none")]
    age_max_ms: Option<u64>,
}

impl From<WrittenRetry> for Retry {
    fn from(written: WrittenRetry) -> Self {
        let rest = written.preset.map_or_else(Self::default, Preset::retry);
        Self {
            preset: written.preset,
            attempts_max: written.attempts_max.unwrap_or(rest.attempts_max),
            backoff_min_ms: written.backoff_min_ms.unwrap_or(rest.backoff_min_ms),
            backoff_max_ms: written.backoff_max_ms.unwrap_or(rest.backoff_max_ms),
            backoff_factor: written.backoff_factor.unwrap_or(rest.backoff_factor),
            jitter: written.jitter.unwrap_or(rest.jitter),
            lease_ms: written.lease_ms.unwrap_or(rest.lease_ms),
            workers: written.workers.unwrap_or(rest.workers),
            age_max_ms: written.age_max_ms.or(rest.age_max_ms),
        }
    }
}

impl From<Retry> for WrittenRetry {
    /// Converts every value. Keys that hosts of an earlier release do not know are left out where
    /// they hold their default and no preset is set.
    fn from(retry: Retry) -> Self {
        let says_new = |is_new: bool| is_new || retry.preset.is_some();
        Self {
            preset: retry.preset,
            attempts_max: Some(retry.attempts_max),
            backoff_min_ms: Some(retry.backoff_min_ms),
            backoff_max_ms: Some(retry.backoff_max_ms),
            backoff_factor: says_new(retry.backoff_factor != FACTOR)
                .then_some(retry.backoff_factor),
            jitter: says_new(retry.jitter != Jitter::Full).then_some(retry.jitter),
            lease_ms: Some(retry.lease_ms),
            workers: Some(retry.workers),
            age_max_ms: retry.age_max_ms,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    fn retry(text: &str) -> Retry {
        toml::from_str(text).expect("a policy of the test")
    }

    fn bounds(retry: &Retry, attempts: std::ops::RangeInclusive<u32>) -> Vec<u64> {
        attempts.map(|attempts| retry.bound(attempts).as_millis() as u64).collect()
    }

    #[test]
    fn a_bound_grows_by_its_factor_and_ends_at_its_most() {
        assert_eq!(bounds(&retry(""), 1..=4), [1_000, 2_000, 4_000, 8_000]);
        assert_eq!(
            bounds(&retry("backoff_min_ms = 10\nbackoff_max_ms = 50\nbackoff_factor = 3"), 1..=4),
            [10, 30, 50, 50]
        );
        assert_eq!(bounds(&retry("backoff_factor = 1"), 1..=3), [1_000; 3]);
        assert_eq!(bounds(&retry("backoff_factor = 100"), 1_000..=1_001), [3_600_000; 2]);
    }

    // S2-010, S2-013: min(30·4ⁿ, 3,600) seconds: 30 s, 2 min, 8 min; three attempts.
    #[test]
    fn seed_002_is_the_ladder_of_its_article() {
        let ladder = retry("preset = 'seed-002'");
        // S2-010.
        assert_eq!(
            bounds(&ladder, 1..=6),
            [30_000, 120_000, 480_000, 1_920_000, 3_600_000, 3_600_000]
        );
        // S2-013.
        assert_eq!((ladder.attempts_max, ladder.delay(2)), (3, Duration::from_secs(120)));
        let more = retry("preset = 'seed-002'\nattempts_max = 5");
        assert_eq!((more.attempts_max, more.delay(4)), (5, Duration::from_secs(1_920)));
    }

    // S1-117
    #[test]
    fn exponential_jitter_spreads_ten_attempts() {
        let ladder = retry("preset = 'exponential-jitter'");
        // S1-117.
        assert_eq!((ladder.attempts_max, ladder.jitter), (10, Jitter::Full));
        let delays: Vec<_> = (0..200).map(|_| ladder.delay(3)).collect();
        assert!(delays.iter().all(|delay| *delay <= Duration::from_secs(4)), "{delays:?}");
        assert!(
            delays.iter().any(|d| *d < Duration::from_secs(1))
                && delays.iter().any(|d| *d > Duration::from_secs(3)),
            "{delays:?}"
        );
    }

    #[test]
    fn what_a_row_keeps_is_read_as_it_was() {
        for text in [
            "",
            "preset = 'seed-002'",
            "preset = 'seed-002'\nbackoff_factor = 2\njitter = 'full'",
            "jitter = 'none'",
            "workers = 7",
            "age_max_ms = 1",
        ] {
            let retry = retry(text);
            let row = serde_json::to_value(&retry).expect("a value");
            assert_eq!(
                serde_json::from_value::<Retry>(row.clone()).expect("a policy"),
                retry,
                "{row}"
            );
        }
        // An earlier release reads a row that uses no new key.
        let row = serde_json::to_value(Retry::default()).expect("a value");
        let keys: BTreeSet<_> =
            row.as_object().expect("an object").keys().map(String::as_str).collect();
        assert_eq!(
            keys.into_iter().collect::<Vec<_>>(),
            ["attempts_max", "backoff_max_ms", "backoff_min_ms", "lease_ms", "workers"]
        );
    }
}
