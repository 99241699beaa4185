//! The state of a pair between two of its tasks: whether one runs, and how long it rests.

use std::{sync::Arc, time::Duration};

use tokio::{sync::Notify, time::Instant};

use crate::backoff;

/// Rest of a pair that must not send now.
const REST: Duration = Duration::from_secs(1);
/// Time after its rest for which a pair is remembered that had nothing due since.
const KEPT: Duration = Duration::from_secs(60);

/// A tenant and a destination.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) struct PairKey {
    /// Key of the tenant.
    pub(crate) tenant_id: i32,
    /// Destination, as rows hold it.
    pub(crate) destination: String,
}

/// The end of a pair's task.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum PairEnd {
    /// Nothing was left to lease.
    Dry,
    /// The destination is away, for this reason; whether it confirmed anything before.
    Away {
        /// Text for readers.
        error: String,
        /// Whether it confirmed messages before in the same task.
        has_confirmed: bool,
    },
    /// The tenant sends nothing now.
    Resting,
    /// The destination asks to be left alone for this time.
    Limited {
        /// Text for readers.
        error: String,
        /// Time of the rest.
        rest: Duration,
    },
    /// The circuit breaker of the endpoint is open, for this time.
    BreakerOpen(Duration),
    /// A database did not do what was asked of it, for this reason.
    Database(String),
}

/// The state of a pair between two of its tasks.
#[derive(Debug, Default)]
pub(crate) struct PairState {
    /// Whether a task works on it.
    is_under_way: bool,
    /// Whether something was found due while a task worked on it.
    is_due_again: bool,
    /// Signal to the task that works on it that something was found due.
    named: Arc<Notify>,
    /// Tasks in a row that found the destination away.
    failures: u32,
    /// Tasks in a row that a database failed.
    troubles: u32,
    /// End of its rest.
    rests_until: Option<Instant>,
}

impl PairState {
    /// Returns whether a task is to begin for a pair that was found due, and notes that it does.
    pub(crate) fn begins(&mut self, now: Instant) -> bool {
        if self.is_under_way {
            self.is_due_again = true;
            self.named.notify_one();
            return false;
        }
        if self.rests_until.is_some_and(|until| until > now) {
            return false;
        }
        self.is_under_way = true;
        self.named = Arc::default();
        true
    }

    /// Returns the signal to the task that has begun.
    pub(crate) fn named(&self) -> Arc<Notify> {
        self.named.clone()
    }

    /// Returns whether the next task only tries whether the destination is back.
    pub(crate) fn is_probing(&self) -> bool {
        self.failures > 0
    }

    /// Notes the end of a task, and returns whether the pair may have something due at once.
    pub(crate) fn ends(&mut self, end: &PairEnd, now: Instant) -> bool {
        self.is_under_way = false;
        self.troubles = match end {
            PairEnd::Database(_) => self.troubles.saturating_add(1),
            _ => 0,
        };
        self.rests_until = match end {
            PairEnd::Dry => {
                self.failures = 0;
                None
            }
            PairEnd::Away { has_confirmed, .. } => {
                self.failures = if *has_confirmed { 1 } else { self.failures.saturating_add(1) };
                Some(now + backoff::pause(self.failures))
            }
            PairEnd::Resting => Some(now + REST),
            PairEnd::Limited { rest, .. } => {
                self.failures = 0;
                Some(now + *rest)
            }
            PairEnd::BreakerOpen(pause) => Some(now + *pause),
            PairEnd::Database(_) => Some(now + backoff::pause(self.troubles)),
        };
        std::mem::take(&mut self.is_due_again) && self.rests_until.is_none()
    }

    /// Returns the tasks in a row that found the destination away.
    pub(crate) fn failures(&self) -> u32 {
        self.failures
    }

    /// Returns the tasks in a row that a database failed.
    pub(crate) fn troubles(&self) -> u32 {
        self.troubles
    }

    /// Returns whether nothing is to be remembered of the pair. What another host has sent is due
    /// here no more, and the pair is forgotten all the same.
    pub(crate) fn is_forgettable(&self, now: Instant) -> bool {
        !self.is_under_way && self.rests_until.is_none_or(|until| until + KEPT <= now)
    }
}

#[cfg(test)]
mod tests {
    use futures::FutureExt;

    use super::*;

    fn away(has_confirmed: bool) -> PairEnd {
        PairEnd::Away { error: "away".to_owned(), has_confirmed }
    }

    // What could go wrong: two tasks of a host work on one pair, or a message that came while a
    // task ended waits for the next look.
    #[test]
    fn one_task_works_on_a_pair_and_what_comes_meanwhile_is_seen() {
        let (mut pair, now) = (PairState::default(), Instant::now());
        let is_named = |named: &Notify| named.notified().now_or_never().is_some();
        assert!(pair.begins(now));
        let named = pair.named();
        assert!(!is_named(&named));
        assert!(!pair.begins(now));
        assert!(is_named(&named), "its task does not wait for its next look");
        assert!(!pair.is_forgettable(now));
        assert!(pair.ends(&PairEnd::Dry, now), "something was due meanwhile");
        assert!(pair.begins(now));
        assert!(!is_named(&pair.named()), "the name was that of the task before");
        assert!(!pair.ends(&PairEnd::Dry, now));
        assert!(pair.is_forgettable(now));
    }

    #[test]
    fn a_dead_destination_is_tried_less_and_less_until_it_confirms() {
        let (mut pair, mut now) = (PairState::default(), Instant::now());
        let mut rests = Vec::new();
        for _ in 0..7 {
            assert!(pair.begins(now));
            assert!(!pair.ends(&away(false), now));
            let until = pair.rests_until.unwrap();
            rests.push((until - now).as_secs());
            assert!(!pair.begins(until - Duration::from_millis(1)));
            now = until;
        }
        assert_eq!(rests, [1, 2, 4, 8, 16, 30, 30]);
        assert!(pair.is_probing() && !pair.is_forgettable(now));
        assert!(pair.is_forgettable(now + KEPT), "another host sends its messages");
        assert!(pair.begins(now));
        pair.ends(&away(true), now);
        assert_eq!(pair.failures(), 1);
        now += Duration::from_secs(1);
        assert!(pair.begins(now));
        pair.ends(&PairEnd::Dry, now);
        assert!(!pair.is_probing());
    }

    #[test]
    fn a_rest_is_no_failure_of_the_destination() {
        for end in [PairEnd::Resting, PairEnd::Database("gone".to_owned())] {
            let (mut pair, now) = (PairState::default(), Instant::now());
            assert!(pair.begins(now) && !pair.begins(now));
            assert!(!pair.ends(&end, now), "it rests, whatever is due");
            assert!(!pair.is_probing() && !pair.begins(now));
            assert!(pair.begins(now + REST));
        }
    }

    #[test]
    fn a_destination_is_left_alone_for_as_long_as_it_asks() {
        let rest = Duration::from_secs(90);
        let limited = PairEnd::Limited { error: "429".to_owned(), rest };
        for end in [limited, PairEnd::BreakerOpen(rest)] {
            let (mut pair, now) = (PairState::default(), Instant::now());
            assert!(pair.begins(now) && !pair.begins(now));
            assert!(!pair.ends(&end, now));
            assert!(!pair.begins(now + rest - Duration::from_millis(1)));
            assert!(!pair.is_probing() && pair.begins(now + rest));
        }
    }

    // What could go wrong: a database that is away is asked for each pair every second, and each
    // answer is a line of the log.
    #[test]
    fn a_database_that_fails_again_is_asked_less_often() {
        let (mut pair, mut now) = (PairState::default(), Instant::now());
        for troubles in 1..=7 {
            assert!(pair.begins(now));
            pair.ends(&PairEnd::Database("gone".to_owned()), now);
            assert_eq!(pair.troubles(), troubles);
            let until = pair.rests_until.unwrap();
            assert_eq!(until - now, backoff::pause(troubles));
            assert!(!pair.is_forgettable(until), "it would be in the log as new");
            now = until;
        }
        assert!(pair.begins(now));
        pair.ends(&PairEnd::Dry, now);
        assert_eq!(pair.troubles(), 0);
    }
}
