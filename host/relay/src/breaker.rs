//! Circuit breakers of endpoints: messages wait for an endpoint that fails again and again, instead
//! of each taking its time to fail.
//!
//! One per endpoint, on each host for itself, in the manner of those of versions in the inbox.
//! Closed: failures in a row are counted. Open: nothing is leased. Half open, after a pause: one
//! message at a time probes. Its success closes the breaker; its failure opens it again, for twice
//! as long. An answer that refuses a message is an answer: the endpoint does its work.

use std::time::Duration;

use tokio::time::Instant;

/// Longest pause of an open breaker.
const PAUSE_MAX: Duration = Duration::from_secs(300);

/// The phase of a breaker.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) enum BreakerPhase {
    /// Messages are sent.
    #[default]
    Closed,
    /// Nothing is sent until this moment.
    Open {
        /// Moment of the next probe.
        until: Instant,
    },
    /// One message at a time probes.
    HalfOpen,
}

/// The answer of a breaker to a task that wants to send.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Admission {
    /// As many messages as there may be.
    All,
    /// One message, as a probe.
    Probe,
    /// None, for this time.
    Wait(Duration),
}

/// The breaker of one endpoint.
#[derive(Debug, Default)]
pub(crate) struct Breaker {
    phase: BreakerPhase,
    /// Failures in a row.
    failures: u32,
    /// Pause of the next opening; none for the first pause of the endpoint.
    pause: Option<Duration>,
}

impl Breaker {
    /// Returns what may be sent now. The end of a pause half opens the breaker.
    pub(crate) fn admits(&mut self, now: Instant) -> Admission {
        match self.phase {
            BreakerPhase::Closed => Admission::All,
            BreakerPhase::HalfOpen => Admission::Probe,
            BreakerPhase::Open { until } if until > now => Admission::Wait(until - now),
            BreakerPhase::Open { .. } => {
                self.phase = BreakerPhase::HalfOpen;
                Admission::Probe
            }
        }
    }

    /// Notes an answer of the endpoint.
    pub(crate) fn succeeded(&mut self) {
        *self = Self::default();
    }

    /// Notes a failure, and opens the breaker where there were too many in a row. What was under
    /// way when it opened does not open it again.
    pub(crate) fn failed(&mut self, failures_max: u32, first_pause: Duration, now: Instant) {
        self.failures = self.failures.saturating_add(1);
        let opens = match self.phase {
            BreakerPhase::Closed => self.failures >= failures_max,
            BreakerPhase::HalfOpen => true,
            BreakerPhase::Open { .. } => false,
        };
        if opens {
            let pause = self.pause.unwrap_or(first_pause).min(PAUSE_MAX);
            self.phase = BreakerPhase::Open { until: now + pause };
            self.pause = Some((pause * 2).min(PAUSE_MAX));
        }
    }

    /// Returns the phase.
    pub(crate) fn phase(&self) -> BreakerPhase {
        self.phase
    }

    /// Returns the failures in a row.
    pub(crate) fn failures(&self) -> u32 {
        self.failures
    }

    /// Returns whether nothing is to be remembered of it.
    pub(crate) fn is_idle(&self) -> bool {
        self.phase == BreakerPhase::Closed && self.failures == 0
    }
}

impl BreakerPhase {
    /// Returns the name of the phase: `closed`, `open` or `half_open`.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Closed => "closed",
            Self::Open { .. } => "open",
            Self::HalfOpen => "half_open",
        }
    }

    /// Returns the phase as the gauge shows it.
    pub(crate) fn gauge(self) -> f64 {
        match self {
            Self::Closed => 0.0,
            Self::HalfOpen => 1.0,
            Self::Open { .. } => 2.0,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAUSE: Duration = Duration::from_secs(5);

    // What could go wrong: a breaker opens by failures that have successes between them, or never
    // closes again.
    #[test]
    fn it_opens_by_failures_in_a_row_and_a_probe_decides() {
        let (mut breaker, now) = (Breaker::default(), Instant::now());
        for _ in 0..10 {
            breaker.failed(3, PAUSE, now);
            breaker.failed(3, PAUSE, now);
            breaker.succeeded();
        }
        assert_eq!(breaker.admits(now), Admission::All);
        for _ in 0..3 {
            breaker.failed(3, PAUSE, now);
        }
        assert_eq!((breaker.phase().name(), breaker.failures()), ("open", 3));
        assert_eq!(breaker.admits(now), Admission::Wait(PAUSE));
        assert_eq!(breaker.admits(now + PAUSE), Admission::Probe);
        assert_eq!(breaker.admits(now + PAUSE), Admission::Probe, "the first found no message");
        breaker.succeeded();
        assert!(breaker.is_idle());
        assert_eq!(breaker.admits(now + PAUSE), Admission::All);
    }

    #[test]
    fn pauses_double_up_to_their_bound_and_success_resets_them() {
        let (mut breaker, mut now) = (Breaker::default(), Instant::now());
        breaker.failed(1, PAUSE, now);
        for seconds in [5, 10, 20, 40, 80, 160, 300, 300] {
            // What was under way when it opened says nothing new.
            breaker.failed(1, PAUSE, now);
            let pause = Duration::from_secs(seconds);
            assert_eq!(breaker.admits(now), Admission::Wait(pause));
            now += pause;
            assert_eq!(breaker.admits(now), Admission::Probe);
            breaker.failed(1, PAUSE, now);
        }
        now += PAUSE_MAX;
        assert_eq!(breaker.admits(now), Admission::Probe);
        breaker.succeeded();
        breaker.failed(1, PAUSE, now);
        assert_eq!(breaker.admits(now), Admission::Wait(PAUSE));
    }
}
