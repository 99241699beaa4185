//! Delays of a message, and pauses of a pair.

use std::time::Duration;

/// Delay after the first failed attempt of a message; it doubles with each.
const DELAY_MIN: Duration = Duration::from_secs(1);
/// Longest delay between two attempts of a message.
const DELAY_MAX: Duration = Duration::from_secs(300);
/// Pause of a pair whose destination is away; it doubles with each try.
const PAUSE_MIN: Duration = Duration::from_secs(1);
/// Longest pause of a pair: the destination may be back at any time.
const PAUSE_MAX: Duration = Duration::from_secs(30);

/// Pauses between two tries to mark messages, or to deliver an answer. Together they are well below
/// a lease.
pub(crate) const AGAIN: [Duration; 4] = [
    Duration::from_millis(100),
    Duration::from_millis(500),
    Duration::from_secs(2),
    Duration::from_secs(4),
];

/// Returns the delay after a failed attempt, counted from 1. `spread`, from 0 to 1, takes up to a
/// fifth away, so that messages that failed together do not come again together.
pub(crate) fn delay(attempt: u32, spread: f64) -> Duration {
    doubled(DELAY_MIN, attempt, DELAY_MAX).mul_f64(1.0 - 0.2 * spread.clamp(0.0, 1.0))
}

/// Returns the pause of a pair after this many tries in a row that found its destination away.
pub(crate) fn pause(failures: u32) -> Duration {
    doubled(PAUSE_MIN, failures, PAUSE_MAX)
}

/// Returns the first value doubled with each of `nth`, from 1, up to the greatest.
fn doubled(first: Duration, nth: u32, most: Duration) -> Duration {
    first.saturating_mul(2_u32.saturating_pow(nth.saturating_sub(1))).min(most)
}

#[cfg(test)]
mod tests {
    use super::*;

    // What could go wrong: the delay overflows after many attempts and becomes none, or all
    // messages of an outage come again in the same moment.
    #[test]
    fn delays_grow_to_a_bound_and_are_spread() {
        let seconds: Vec<_> = (1..=11).map(|attempt| delay(attempt, 0.0).as_secs()).collect();
        assert_eq!(seconds, [1, 2, 4, 8, 16, 32, 64, 128, 256, 300, 300]);
        assert_eq!(delay(0, 0.0), DELAY_MIN);
        assert_eq!(delay(u32::MAX, 0.0), DELAY_MAX);
        assert_eq!(delay(1, 1.0), Duration::from_millis(800));
        assert_eq!(delay(11, 7.0), Duration::from_secs(240));
    }

    #[test]
    fn a_pause_ends_soon_enough_to_notice_that_the_destination_is_back() {
        assert_eq!(pause(1), PAUSE_MIN);
        assert_eq!(pause(3), Duration::from_secs(4));
        assert_eq!(pause(u32::MAX), PAUSE_MAX);
    }
}
