//! Circuit breakers: messages wait for a version that fails too often, instead of being failed by
//! it.
//!
//! One per consumer and version, on each host for itself. A host knows only the failures that it
//! has seen, so a breaker needs neither a round trip nor an agreement. A host whose own trouble
//! makes runs fail stops no other host. The price is one probe per host.
//!
//! Closed: runs are counted. Open: messages of the version wait at their place, and none is marked
//! as failed. Half open, after a pause: one message probes. Its success closes the breaker; its
//! failure opens it again, for twice as long.

use std::{
    collections::{HashMap, VecDeque},
    sync::{Arc, Mutex, MutexGuard},
    time::Duration,
};

use oncebox_model::{
    handler::{Handler, Handlers},
    hooks::{self, Defect},
    outcome::FailureKind,
    policy,
    status::BreakerState,
};
use tokio::time::Instant;

/// The breakers of one consumer on one host.
#[derive(Debug)]
pub(crate) struct Breakers {
    tenant: String,
    consumer: String,
    policy: policy::BreakerPolicy,
    state: Mutex<VersionStates>,
}

#[derive(Debug, Default)]
struct VersionStates {
    versions: HashMap<i32, Breaker>,
    /// Revision of the states, which grows with each transition.
    revision: u64,
    /// Revision that was last reported. None at first, when displays may still show the states of
    /// an earlier run.
    seen: Option<u64>,
}

/// The breaker of one version.
#[derive(Debug)]
struct Breaker {
    phase: Phase,
    /// Time for which it stays open the next time.
    pause: Duration,
    window: Window,
    /// True after a probe that decided nothing; the next probe is neither counted nor logged.
    is_undecided: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    Closed,
    Open { until: Instant },
    HalfOpen,
}

/// Decision on the messages of a version.
pub(crate) enum BreakerDecision {
    /// Permission for all messages.
    Pass,
    /// Permission for one message, whose outcome decides.
    Probe(Probe),
    /// Refusal of all messages, for this time.
    Wait(Duration),
}

/// The one message that tests a version. Where it is dropped undecided, another one takes its
/// place.
pub(crate) struct Probe {
    breakers: Arc<Breakers>,
    version: i32,
    is_decided: bool,
}

/// Wait of a message that comes while another one probes. Also the longest wait of a partition at
/// once, since another version may be deployed in that time.
pub(crate) const RECHECK: Duration = Duration::from_millis(500);
/// Shortest wait, so that a partition that tries again does not spin.
const WAIT_MIN: Duration = Duration::from_millis(10);
/// Number of slots of a window, which are forgotten one after the other.
const SLOTS: u32 = 10;
/// Most versions that are remembered before those without recent runs are forgotten.
const VERSIONS_MAX: usize = 32;

impl Breakers {
    pub(crate) fn new(tenant: &str, consumer: &str, policy: policy::BreakerPolicy) -> Arc<Self> {
        Arc::new(Self {
            tenant: tenant.to_owned(),
            consumer: consumer.to_owned(),
            policy,
            state: Mutex::default(),
        })
    }

    /// Decides whether messages may go to this handler. A version that a canary's guard judges is
    /// never held back: the guard counts its runs, and withdraws it. Only a caller that can send
    /// one message alone may probe.
    pub(crate) fn admit(
        self: &Arc<Self>,
        handler: &dyn Handler,
        may_probe: bool,
    ) -> BreakerDecision {
        let mut state = self.lock();
        let version = handler.version();
        let phase = state.phase(version);
        match self.wait(handler, phase) {
            Some(wait) => BreakerDecision::Wait(wait),
            None if phase == Phase::Closed || !self.applies_to(handler) => BreakerDecision::Pass,
            None if may_probe => {
                self.turn(&mut state, version, Phase::HalfOpen);
                BreakerDecision::Probe(Probe { breakers: self.clone(), version, is_decided: false })
            }
            None => BreakerDecision::Wait(WAIT_MIN),
        }
    }

    /// Returns for how long the messages of a handler wait; none where one may run, or probe. It
    /// takes no probe.
    pub(crate) fn wait_of(&self, handler: &dyn Handler) -> Option<Duration> {
        let phase = self.lock().phase(handler.version());
        self.wait(handler, phase)
    }

    /// Returns for how long no message may run, whichever handler it goes to. None where one may
    /// run, or probe.
    pub(crate) fn held_back(&self, handlers: &dyn Handlers) -> Option<Duration> {
        let is_closed = self.lock().versions.values().all(|breaker| breaker.phase == Phase::Closed);
        if is_closed || hooks::sabotage(Defect::HeldBackLeased) {
            return None;
        }
        let all = handlers.all();
        let state = self.lock();
        let waits = all.iter().map(|handler| self.wait(&**handler, state.phase(handler.version())));
        waits.collect::<Option<Vec<_>>>()?.into_iter().min()
    }

    /// Returns for how long the messages of a version in this phase wait; none where one may run,
    /// or probe.
    fn wait(&self, handler: &dyn Handler, phase: Phase) -> Option<Duration> {
        match phase {
            _ if !self.applies_to(handler) => None,
            Phase::Closed => None,
            Phase::HalfOpen => Some(RECHECK),
            Phase::Open { until } => match until.saturating_duration_since(now()) {
                Duration::ZERO => None,
                left => Some(left.max(WAIT_MIN)),
            },
        }
    }

    /// Counts first runs of a version. Runs that ended while the breaker was not closed decide
    /// nothing here: they began before it opened, or are a probe's.
    pub(crate) fn ran<'a>(
        &self,
        handler: &dyn Handler,
        ends: impl IntoIterator<Item = &'a Option<FailureKind>>,
    ) {
        if !self.applies_to(handler) {
            return;
        }
        let mut count = Count::default();
        ends.into_iter().for_each(|end| count.add(end.as_ref()));
        let mut state = self.lock();
        if state.versions.len() >= VERSIONS_MAX {
            state.versions.retain(|_, breaker| !breaker.is_idle(self.window()));
        }
        let version = handler.version();
        let breaker = state.versions.entry(version).or_insert_with(|| Breaker::new(&self.policy));
        if breaker.phase != Phase::Closed {
            return;
        }
        breaker.window.add(self.window(), count);
        if breaker.window.sum(self.window()).reaches(&self.policy) {
            self.open(&mut state, version);
        }
    }

    /// Returns the breakers that are not closed.
    pub(crate) fn states(&self) -> Vec<BreakerState> {
        self.lock().shown()
    }

    /// Returns the breakers that are not closed, where one of them turned since the last call. The
    /// first call always returns them.
    pub(crate) fn changed(&self) -> Option<Vec<BreakerState>> {
        let mut state = self.lock();
        let is_new = state.seen != Some(state.revision);
        state.seen = Some(state.revision);
        is_new.then(|| state.shown())
    }

    /// Marks the last report as unsent, so that the next call of `changed` returns the states
    /// again.
    pub(crate) fn untold(&self) {
        self.lock().seen = None;
    }

    fn applies_to(&self, handler: &dyn Handler) -> bool {
        self.policy.enabled && !handler.is_judged()
    }

    fn window(&self) -> Duration {
        Duration::from_millis(self.policy.window_ms)
    }

    fn open(&self, state: &mut VersionStates, version: i32) {
        let Some(breaker) = state.versions.get_mut(&version) else { return };
        let until = now() + breaker.pause;
        breaker.pause = (breaker.pause * 2).min(Duration::from_millis(self.policy.pause_max_ms));
        breaker.window = Window::default();
        self.turn(state, version, Phase::Open { until });
    }

    /// Sets the phase of a version, with a line in the log and its metrics.
    fn turn(&self, state: &mut VersionStates, version: i32, phase: Phase) {
        let Some(breaker) = state.versions.get_mut(&version) else { return };
        breaker.phase = phase;
        if std::mem::take(&mut breaker.is_undecided) && phase == Phase::HalfOpen {
            return;
        }
        state.revision += 1;
        let (tenant, consumer, to) = (&self.tenant, &self.consumer, phase.name());
        let labels = [
            ("tenant", tenant.clone()),
            ("consumer", consumer.clone()),
            ("version", version.to_string()),
        ];
        metrics::gauge!("oncebox_breaker_state", &labels).set(phase.gauge());
        metrics::counter!("oncebox_breaker_transitions_total", "tenant" => tenant.clone(), "consumer" => consumer.clone(),
            "version" => version.to_string(), "to" => to)
        .increment(1);
        match phase {
            Phase::Open { until } => {
                let pause_ms = until.saturating_duration_since(now()).as_millis() as u64;
                tracing::warn!(
                    tenant,
                    consumer,
                    version,
                    pause_ms,
                    "a version fails too often; its messages wait"
                );
            }
            Phase::HalfOpen => tracing::info!(
                tenant,
                consumer,
                version,
                "one message tries a version that failed too often"
            ),
            Phase::Closed => tracing::info!(
                tenant,
                consumer,
                version,
                "a version that failed too often does its work again"
            ),
        }
    }

    fn lock(&self) -> MutexGuard<'_, VersionStates> {
        self.state.lock().expect("no panic while held")
    }
}

impl VersionStates {
    fn phase(&self, version: i32) -> Phase {
        self.versions.get(&version).map_or(Phase::Closed, |breaker| breaker.phase)
    }

    fn shown(&self) -> Vec<BreakerState> {
        let now = now();
        let shown = |(version, breaker): (&i32, &Breaker)| BreakerState {
            version_id: *version,
            state: breaker.phase.name(),
            probes_in_ms: match breaker.phase {
                Phase::Open { until } => {
                    Some(until.saturating_duration_since(now).as_millis() as u64)
                }
                _ => None,
            },
            pause_ms: breaker.pause.as_millis() as u64,
        };
        let mut states: Vec<_> = self
            .versions
            .iter()
            .filter(|(_, breaker)| breaker.phase != Phase::Closed)
            .map(shown)
            .collect();
        states.sort_by_key(|state| state.version_id);
        states
    }
}

impl Breaker {
    fn new(policy: &policy::BreakerPolicy) -> Self {
        Self {
            phase: Phase::Closed,
            pause: Duration::from_millis(policy.pause_ms),
            window: Window::default(),
            is_undecided: false,
        }
    }

    fn is_idle(&mut self, window: Duration) -> bool {
        self.phase == Phase::Closed && self.window.sum(window).runs == 0
    }
}

impl Phase {
    fn name(self) -> &'static str {
        match self {
            Self::Closed => "closed",
            Self::Open { .. } => "open",
            Self::HalfOpen => "half_open",
        }
    }

    fn gauge(self) -> f64 {
        match self {
            Self::Closed => 0.0,
            Self::HalfOpen => 1.0,
            Self::Open { .. } => 2.0,
        }
    }
}

impl Probe {
    /// Records the outcome of the message that probed; none for its completion.
    pub(crate) fn ended(mut self, failure: Option<&FailureKind>) {
        let Some(failed) = is_failure(failure) else { return };
        self.is_decided = true;
        let mut state = self.breakers.lock();
        if failed {
            return self.breakers.open(&mut state, self.version);
        }
        if let Some(breaker) = state.versions.get_mut(&self.version) {
            *breaker = Breaker::new(&self.breakers.policy);
        }
        self.breakers.turn(&mut state, self.version, Phase::Closed);
    }
}

impl Drop for Probe {
    /// Lets another message probe at once, where a duplicate, contention or the host's trouble
    /// decided nothing.
    fn drop(&mut self) {
        if !self.is_decided
            && let Some(breaker) = self.breakers.lock().versions.get_mut(&self.version)
        {
            breaker.phase = Phase::Open { until: now() };
            breaker.is_undecided = true;
        }
    }
}

/// Returns whether the end of a run counts as a failure of its version; none where it says nothing.
/// A handler's decision is its work, even where it rejects everything. Contention, and a payload
/// that was not fetched, are no version's fault and say nothing.
fn is_failure(failure: Option<&FailureKind>) -> Option<bool> {
    match failure {
        None => Some(false),
        Some(FailureKind::Contention | FailureKind::Reference(_)) => None,
        Some(kind) => Some(!kind.is_decision()),
    }
}

#[cfg(not(test))]
fn now() -> Instant {
    Instant::now()
}

#[cfg(test)]
use tests::now;

/// Number of runs for which a run that ended at its deadline counts towards the least number of
/// runs. A version that hangs has few runs within any window. Each of them took a processor or
/// locks for as long as it may.
const RUNS_OF_A_DEADLINE: u32 = 5;

/// First runs of a version.
#[derive(Debug, Clone, Copy, Default)]
struct Count {
    runs: u32,
    failed: u32,
    /// Number of runs, with a run that ended at its deadline counted several times.
    weight: u32,
}

impl Count {
    fn add(&mut self, failure: Option<&FailureKind>) {
        let Some(failed) = is_failure(failure) else { return };
        self.runs += 1;
        self.failed += u32::from(failed);
        self.weight +=
            if matches!(failure, Some(FailureKind::Deadline)) { RUNS_OF_A_DEADLINE } else { 1 };
    }

    fn plus(self, other: Self) -> Self {
        Self {
            runs: self.runs + other.runs,
            failed: self.failed + other.failed,
            weight: self.weight + other.weight,
        }
    }

    /// Returns whether a breaker opens.
    fn reaches(self, policy: &policy::BreakerPolicy) -> bool {
        self.weight >= policy.runs_min
            && u64::from(self.failed) * 100
                > u64::from(self.runs) * u64::from(policy.failures_percent)
    }
}

/// Counts of the last window, in slots that are forgotten one after the other.
#[derive(Debug, Default)]
struct Window(VecDeque<(Instant, Count)>);

impl Window {
    fn add(&mut self, window: Duration, count: Count) {
        let now = now();
        match self.0.back_mut() {
            Some((from, known)) if now.duration_since(*from) < window / SLOTS => {
                *known = known.plus(count)
            }
            _ => self.0.push_back((now, count)),
        }
    }

    fn sum(&mut self, window: Duration) -> Count {
        while self.0.front().is_some_and(|(from, _)| now().duration_since(*from) > window) {
            self.0.pop_front();
        }
        self.0.iter().fold(Count::default(), |sum, (_, count)| sum.plus(*count))
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use futures::future::BoxFuture;

    use super::*;
    use oncebox_model::{
        handler::{Answer, Run},
        tx::Tx,
    };

    thread_local! {
        /// Time by which this test's clock is ahead.
        static AHEAD: Cell<Duration> = const { Cell::new(Duration::ZERO) };
        static START: Instant = Instant::now();
    }

    /// Returns the time of a clock that only moves when a test moves it.
    pub(super) fn now() -> Instant {
        START.with(|start| *start) + AHEAD.get()
    }

    fn advance(by: Duration) {
        AHEAD.set(AHEAD.get() + by);
    }

    struct Version(i32, bool);

    impl Handler for Version {
        fn version(&self) -> i32 {
            self.0
        }

        fn is_judged(&self) -> bool {
            self.1
        }

        fn handle<'a>(&'a self, _: &'a Tx, _: &'a Run<'a>) -> BoxFuture<'a, Answer> {
            unreachable!("nothing is run here")
        }
    }

    const ONE: Version = Version(1, false);
    const TRAP: Option<FailureKind> = Some(FailureKind::Trap);

    fn breakers() -> Arc<Breakers> {
        Breakers::new("acme", "orders", policy::BreakerPolicy::default())
    }

    fn ran(breakers: &Breakers, handler: &Version, completed: usize, failed: usize) {
        breakers.ran(
            handler,
            [&None]
                .into_iter()
                .cycle()
                .take(completed)
                .chain([&TRAP].into_iter().cycle().take(failed)),
        );
    }

    fn probe(breakers: &Arc<Breakers>) -> Probe {
        match breakers.admit(&ONE, true) {
            BreakerDecision::Probe(probe) => probe,
            BreakerDecision::Pass => panic!("it is closed"),
            BreakerDecision::Wait(wait) => panic!("it is open for {wait:?}"),
        }
    }

    fn waits(breakers: &Arc<Breakers>, handler: &Version) -> bool {
        matches!(breakers.admit(handler, true), BreakerDecision::Wait(_))
    }

    #[test]
    fn it_opens_over_the_rate_and_not_below_the_least_runs() {
        for (completed, failed, opens) in
            [(0, 19, false), (0, 20, true), (10, 10, false), (10, 11, true), (1_000, 999, false)]
        {
            let breakers = breakers();
            ran(&breakers, &ONE, completed, failed);
            assert_eq!(waits(&breakers, &ONE), opens, "{completed} completed, {failed} failed");
            assert!(!waits(&breakers, &Version(2, false)), "another version is another breaker");
        }
    }

    // What could go wrong: a version that hangs has few runs in any window, and takes a processor
    // for ever.
    #[test]
    fn a_few_deadlines_are_enough() {
        const DEADLINE: Option<FailureKind> = Some(FailureKind::Deadline);
        for (completed, deadlines, opens) in
            [(0, 3, false), (0, 4, true), (3, 4, true), (4, 4, false), (100, 20, false)]
        {
            let breakers = breakers();
            let ends = [&None]
                .into_iter()
                .cycle()
                .take(completed)
                .chain([&DEADLINE].into_iter().cycle().take(deadlines));
            breakers.ran(&ONE, ends);
            assert_eq!(
                waits(&breakers, &ONE),
                opens,
                "{completed} completed, {deadlines} reached their deadline"
            );
        }
    }

    #[test]
    fn what_is_long_ago_is_forgotten() {
        let breakers = breakers();
        for _ in 0..10 {
            ran(&breakers, &ONE, 0, 10);
            if waits(&breakers, &ONE) {
                panic!("10 failures in each half minute");
            }
            advance(Duration::from_secs(31));
        }
    }

    #[test]
    fn pauses_double_up_to_their_bound_and_success_resets_them() {
        let breakers = breakers();
        ran(&breakers, &ONE, 0, 20);
        for pause in [5, 10, 20, 40, 80, 160, 300, 300] {
            advance(Duration::from_millis(pause * 1_000 - 1));
            assert!(waits(&breakers, &ONE), "it stays open for {pause} s");
            advance(Duration::from_millis(1));
            let one = probe(&breakers);
            assert!(waits(&breakers, &ONE), "one message probes");
            one.ended(TRAP.as_ref());
        }
        advance(Duration::from_secs(300));
        probe(&breakers).ended(None);
        assert!(breakers.states().is_empty());
        ran(&breakers, &ONE, 0, 20);
        assert_eq!(breakers.states()[0].probes_in_ms, Some(5_000));
    }

    #[test]
    fn an_undecided_probe_makes_room_for_another() {
        let breakers = breakers();
        ran(&breakers, &ONE, 0, 20);
        advance(Duration::from_secs(5));
        drop(probe(&breakers));
        probe(&breakers).ended(Some(&FailureKind::Contention));
        probe(&breakers).ended(Some(&FailureKind::Reject));
        assert!(!waits(&breakers, &ONE), "a rejection is an answer");
    }

    #[test]
    fn decisions_contention_and_judged_canaries_open_nothing() {
        let breakers = breakers();
        let decisions = [
            Some(FailureKind::Reject),
            Some(FailureKind::Park),
            Some(FailureKind::Retry { delay: None }),
        ];
        breakers.ran(
            &ONE,
            decisions.iter().chain([&Some(FailureKind::Contention)]).cycle().take(1_000),
        );
        ran(&breakers, &Version(2, true), 0, 1_000);
        assert!(breakers.states().is_empty());
        let off = Breakers::new(
            "acme",
            "orders",
            policy::BreakerPolicy { enabled: false, ..policy::BreakerPolicy::default() },
        );
        ran(&off, &ONE, 0, 1_000);
        assert!(off.states().is_empty());
    }

    #[test]
    fn changes_are_told_once() {
        let breakers = breakers();
        assert_eq!(breakers.changed(), Some(Vec::new()), "what an earlier run showed is gone");
        assert!(breakers.changed().is_none());
        ran(&breakers, &ONE, 0, 20);
        for _ in 0..2 {
            assert_eq!(breakers.changed().map(|states| states[0].state), Some("open"));
            assert!(breakers.changed().is_none());
            breakers.untold();
        }
    }
}
