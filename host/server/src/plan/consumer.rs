//! One consumer of a host: the state that its rows demand, the state of its run, and the next
//! action.

use std::time::Duration;

use oncebox_control::{Consumer, ConsumerStatus, DesiredState, RunMode, RunState};
use oncebox_model::status::ConsumerState;
use tokio::time::Instant;

use super::{Action, Urgency};
use crate::consumer::runtime::{ConsumerRuntime, Status};

/// Longest pause before a failed consumer is started again. A consumer that has run for longer
/// counts as healthy.
const RESTART_MAX: Duration = Duration::from_secs(60);

/// The failure of a consumer that did not start or ended by itself, until its next try.
pub(super) struct Failing {
    failures: u32,
    again_at: Instant,
    /// Version of the rows when it failed; with another version, the host tries at once.
    version: (i64, i64, i64),
    error: String,
}

/// A consumer that runs, with the state that it was started for.
pub(crate) struct RunningConsumer {
    pub(crate) running: ConsumerRuntime,
    pub(crate) consumer: Consumer,
    pub(crate) work: RunMode,
    /// Revision of the consumer's row that it was started for.
    pub(crate) revision: i64,
    pub(crate) tenant_revision: i64,
    since: Instant,
    pub(super) is_loading: bool,
}

impl RunningConsumer {
    pub(crate) fn new(
        running: ConsumerRuntime,
        consumer: Consumer,
        desired: &DesiredState,
    ) -> Self {
        let (revision, tenant_revision) = (desired.revision, desired.tenant_revision);
        Self {
            running,
            consumer,
            work: desired.run_mode(),
            revision,
            tenant_revision,
            since: Instant::now(),
            is_loading: false,
        }
    }

    /// Returns whether the consumer runs as its rows say, apart from its deployments.
    fn fits(&self, desired: &DesiredState) -> bool {
        self.work == desired.run_mode()
            && self.revision == desired.revision
            && self.tenant_revision == desired.tenant_revision
    }
}

/// The state of one consumer on this host.
pub(super) enum RunPhase {
    /// No part of it runs.
    Stopped,
    /// A task loads and starts it.
    Starting,
    /// It runs.
    Running(Box<RunningConsumer>),
    /// A task stops the run of this revision.
    Stopping { revision: i64 },
}

/// One consumer: the state that its rows demand, and the state of its run.
pub(super) struct HostedConsumer {
    pub(super) desired: DesiredState,
    pub(super) state: RunPhase,
    pub(super) failing: Option<Failing>,
    /// Text of what a change that this host carries out waits for.
    pub(super) note: Option<String>,
    pub(super) is_changing: bool,
    pub(super) change_due: Instant,
    pub(super) was_tried: bool,
    pub(super) is_gone: bool,
    /// Whether the metric shows it as quarantined.
    pub(super) is_told_quarantined: bool,
}

impl HostedConsumer {
    pub(super) fn new(desired: DesiredState) -> Self {
        let change_due = Instant::now();
        Self {
            desired,
            state: RunPhase::Stopped,
            failing: None,
            note: None,
            is_changing: false,
            change_due,
            was_tried: false,
            is_gone: false,
            is_told_quarantined: false,
        }
    }

    fn quarantine(&self) -> Option<String> {
        self.desired
            .quarantine
            .as_ref()
            .map(|quarantine| quarantine.text(&self.desired.tenant, &self.desired.name))
    }

    /// Sets the quarantine metric where its value changed. Alerts read it.
    pub(super) fn tell_quarantine(&mut self) {
        let is_quarantined = self.desired.quarantine.is_some() && !self.is_gone;
        if is_quarantined != self.is_told_quarantined {
            let DesiredState { tenant, name, .. } = &self.desired;
            let gauge = metrics::gauge!("oncebox_consumer_quarantined", "tenant" => tenant.clone(), "consumer" => name.clone());
            gauge.set(if is_quarantined { 1.0 } else { 0.0 });
            self.is_told_quarantined = is_quarantined;
        }
    }

    fn work(&self) -> RunMode {
        if self.is_gone { RunMode::Stopped } else { self.desired.run_mode() }
    }

    pub(super) fn next_action(&mut self, now: Instant) -> Option<Action> {
        self.notice_end();
        if self.wants_change() && !self.is_changing && self.change_due <= now {
            self.is_changing = true;
            return Some(Action::Change(self.desired.clone()));
        }
        let work = self.work();
        match &mut self.state {
            RunPhase::Starting | RunPhase::Stopping { .. } => None,
            RunPhase::Stopped if work == RunMode::Stopped => {
                (self.failing, self.was_tried) = (None, true);
                None
            }
            // A quarantined consumer that runs goes on; one that is stopped is not started.
            RunPhase::Stopped if self.desired.quarantine.is_some() => {
                self.was_tried = true;
                None
            }
            RunPhase::Stopped => {
                if self.must_wait(now) {
                    return None;
                }
                self.state = RunPhase::Starting;
                Some(Action::Start(self.desired.clone()))
            }
            RunPhase::Running(current) if self.is_gone || !current.fits(&self.desired) => {
                self.stop()
            }
            RunPhase::Running(current)
                if current.running.generation() < self.desired.generation =>
            {
                if current.is_loading || self.must_wait(now) {
                    return None;
                }
                let RunPhase::Running(current) = &mut self.state else { return None };
                current.is_loading = true;
                Some(Action::Load(current.consumer.clone()))
            }
            RunPhase::Running(current) => {
                // Only a consumer that has run for a while counts as healthy.
                if current.since.elapsed() > RESTART_MAX {
                    self.failing = None;
                }
                current
                    .running
                    .has_canary()
                    .then(|| Action::Judge(Box::new(current.consumer.clone())))
            }
        }
    }

    fn stop(&mut self) -> Option<Action> {
        let RunPhase::Running(current) = &self.state else { return None };
        let stopping = RunPhase::Stopping { revision: current.revision };
        let is_unwanted = self.is_gone
            || !self.desired.tenant_state.is_active()
            || self.desired.state.is_deleting();
        let urgency = if is_unwanted { Urgency::Now } else { Urgency::Finish };
        match std::mem::replace(&mut self.state, stopping) {
            RunPhase::Running(current) => Some(Action::Stop(current, urgency)),
            _ => None,
        }
    }

    /// Marks a consumer that ended by itself as failed. It is then stopped like any other, and
    /// started again after growing pauses.
    fn notice_end(&mut self) {
        let RunPhase::Running(current) = &mut self.state else { return };
        if let Status::Ended(error) = current.running.status() {
            // A revision that matches no row, so that the consumer is stopped.
            current.revision = current.revision.min(self.desired.revision) - 1;
            self.failed(self.desired.generation, error);
        }
    }

    /// Returns whether a host has to carry out a drain's end, a seek or a removal.
    fn wants_change(&self) -> bool {
        if self.is_gone {
            return false;
        }
        let rests = matches!(self.state, RunPhase::Stopped);
        match self.desired.state {
            ConsumerState::Deleting => rests,
            ConsumerState::Draining => {
                matches!(&self.state, RunPhase::Running(current) if current.fits(&self.desired))
            }
            _ => self.desired.is_sought && rests,
        }
    }

    fn must_wait(&self, now: Instant) -> bool {
        self.failing.as_ref().is_some_and(|failing| {
            failing.again_at > now && failing.version == self.desired.version()
        })
    }

    pub(super) fn failed(&mut self, generation: i64, error: String) {
        let version = self.desired.version();
        let before = self
            .failing
            .as_ref()
            .filter(|failing| failing.version == version)
            .map_or(0, |failing| failing.failures);
        let failures = before + 1;
        let pause =
            (Duration::from_secs(1) * 2_u32.saturating_pow(before.min(16))).min(RESTART_MAX);
        let DesiredState { tenant, name, .. } = &self.desired;
        tracing::error!(
            tenant,
            consumer = name,
            generation,
            error,
            failures,
            pause_ms = pause.as_millis() as u64,
            "a consumer does not do what its rows say"
        );
        metrics::counter!("oncebox_consumer_failures_total", "tenant" => tenant.clone(), "consumer" => name.clone()).increment(1);
        self.failing = Some(Failing { failures, again_at: Instant::now() + pause, version, error });
    }

    /// Returns this host's status for the consumer.
    pub(super) fn run(&self) -> ConsumerStatus {
        let DesiredState { consumer_id, revision, generation, state, .. } = &self.desired;
        let rests = self.work() == RunMode::Stopped;
        let error = self.failing.as_ref().map(|failing| failing.error.clone());
        let (run, revision) = match &self.state {
            RunPhase::Running(current) if current.running.is_idle() => {
                (RunState::Idle, current.revision)
            }
            RunPhase::Running(current) => (RunState::Running, current.revision),
            RunPhase::Stopping { revision } => {
                (if error.is_some() { RunState::Failing } else { RunState::Running }, *revision)
            }
            // It failed with the version that it is started for again; an error of an earlier
            // version no longer counts.
            RunPhase::Starting
                if self
                    .failing
                    .as_ref()
                    .is_some_and(|failing| failing.version == self.desired.version()) =>
            {
                (RunState::Failing, *revision)
            }
            RunPhase::Starting => (RunState::Starting, *revision),
            RunPhase::Stopped
                if rests
                    && *generation == 0
                    && *state == ConsumerState::Running
                    && !self.desired.is_sought =>
            {
                (RunState::Idle, *revision)
            }
            RunPhase::Stopped if rests => (RunState::Stopped, *revision),
            RunPhase::Stopped if self.desired.quarantine.is_some() => {
                (RunState::Failing, *revision)
            }
            RunPhase::Stopped => (
                RunState::Failing,
                self.failing.as_ref().map_or(*revision, |failing| failing.version.0),
            ),
        };
        let is_still = rests && matches!(self.state, RunPhase::Stopped);
        let error = match &self.state {
            // Handlers that cannot be loaded; an error from before this run no longer counts.
            RunPhase::Running(current)
                if current.running.generation() < self.desired.generation =>
            {
                error
            }
            RunPhase::Running(_) => self.note.clone(),
            RunPhase::Starting if run == RunState::Starting => None,
            RunPhase::Stopped if is_still => self.note.clone(),
            RunPhase::Stopped => self.quarantine().or(error),
            _ => error,
        };
        ConsumerStatus {
            consumer_id: *consumer_id,
            state: run,
            revision,
            error,
            stopped_generation: is_still.then_some(*generation),
        }
    }
}
