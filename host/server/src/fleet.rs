//! The consumers of a host: the desired and the actual state of each, and the next step from the
//! one to the other. Nothing here waits or does I/O.

use std::{collections::HashMap, sync::Arc, time::Duration};

use oncebox_control::{Consumer, Progress, Run, RunState, Standing, Work};
use oncebox_model::BreakerState;
use tokio::time::Instant;

use crate::{
    routes::Routes,
    running::{Running, Status},
    tasks::Done,
};

/// Longest pause before a failed consumer is started again. A consumer that has run for longer
/// counts as healthy.
const RESTART_MAX: Duration = Duration::from_secs(60);
/// Pause between two tries to carry out a change.
const CHANGE_AGAIN: Duration = Duration::from_millis(700);

/// The failure of a consumer that did not start or ended by itself, until its next try.
struct Failing {
    failures: u32,
    again_at: Instant,
    /// Version of the rows when it failed; with another version, the host tries at once.
    version: (i64, i64, i64),
    error: String,
}

/// A consumer that runs, with the state that it was started for.
pub(crate) struct Current {
    pub(crate) running: Running,
    pub(crate) consumer: Consumer,
    pub(crate) work: Work,
    /// Revision of the consumer's row that it was started for.
    pub(crate) revision: i64,
    pub(crate) tenant_revision: i64,
    since: Instant,
    is_loading: bool,
}

impl Current {
    pub(crate) fn new(running: Running, consumer: Consumer, standing: &Standing) -> Self {
        let (revision, tenant_revision) = (standing.revision, standing.tenant_revision);
        Self {
            running,
            consumer,
            work: standing.work(),
            revision,
            tenant_revision,
            since: Instant::now(),
            is_loading: false,
        }
    }

    /// Returns whether the consumer runs as its rows say, apart from its deployments.
    fn fits(&self, standing: &Standing) -> bool {
        self.work == standing.work()
            && self.revision == standing.revision
            && self.tenant_revision == standing.tenant_revision
    }
}

/// The state of one consumer on this host.
enum State {
    /// No part of it runs.
    Stopped,
    /// A task loads and starts it.
    Starting,
    /// It runs.
    Running(Box<Current>),
    /// A task stops the run of this revision.
    Stopping { revision: i64 },
}

struct Member {
    standing: Standing,
    state: State,
    failing: Option<Failing>,
    /// Text of what a change that this host carries out waits for.
    note: Option<String>,
    is_changing: bool,
    change_due: Instant,
    was_tried: bool,
    is_gone: bool,
    /// Whether the metric shows it as quarantined.
    is_told_quarantined: bool,
}

/// The next step for a consumer.
pub(crate) enum Step {
    /// Loads and starts it.
    Start(Standing),
    /// Loads its deployments, while it runs.
    Load(Consumer),
    /// Stops its run.
    Stop(Box<Current>, Urgency),
    /// Carries out a change: the end of a drain, a seek, a removal.
    Change(Standing),
    /// Judges its canary.
    Judge(Box<Consumer>),
}

/// The time that running messages have when a consumer is stopped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Urgency {
    /// Until the running messages are done, within limits.
    Finish,
    /// No longer than stopping takes: the tenant or the consumer is to do nothing more.
    Now,
}

/// All consumers of a host.
#[derive(Default)]
pub(crate) struct Fleet(HashMap<i32, Member>);

impl Fleet {
    /// Records the desired states that were just read. A consumer without a row is gone, and is
    /// forgotten once nothing of it runs.
    pub(crate) fn see(&mut self, standings: Vec<Standing>) {
        self.0.values_mut().for_each(|member| member.is_gone = true);
        for standing in standings {
            match self.0.get_mut(&standing.consumer_id) {
                Some(member) => (member.standing, member.is_gone) = (standing, false),
                None => drop(self.0.insert(standing.consumer_id, Member::new(standing))),
            }
        }
        self.0.values_mut().for_each(Member::tell_quarantine);
        self.0.retain(|_, member| {
            !(member.is_gone && matches!(member.state, State::Stopped) && !member.is_changing)
        });
    }

    /// Returns the steps that are due. The caller must begin each of them.
    pub(crate) fn steps(&mut self, now: Instant) -> Vec<(i32, Step)> {
        self.0.iter_mut().filter_map(|(id, member)| Some((*id, member.step(now)?))).collect()
    }

    /// Returns this host's status for each consumer.
    pub(crate) fn runs(&self) -> impl Iterator<Item = Run> {
        self.0.values().filter(|member| !member.is_gone).map(Member::run)
    }

    /// Returns the breaker states of consumers in which a breaker changed since the last call.
    pub(crate) fn breakers_changed(&self) -> Vec<(i32, Vec<BreakerState>)> {
        let running = self.0.iter().filter_map(|(id, member)| match &member.state {
            State::Running(current) => Some((*id, current.running.breakers_changed()?)),
            _ => None,
        });
        running.collect()
    }

    /// Marks the last answer of [`Self::breakers_changed`] as unsent, for one consumer or for all.
    pub(crate) fn breakers_unsent(&self, only: Option<i32>) {
        for (_, member) in self.0.iter().filter(|(id, _)| only.is_none_or(|only| only == **id)) {
            if let State::Running(current) = &member.state {
                current.running.breakers_unsent();
            }
        }
    }

    /// Returns the number of consumers that should run and were never tried.
    pub(crate) fn first_starts(&self) -> usize {
        self.0
            .values()
            .filter(|member| !member.was_tried && member.standing.work() != Work::Rest)
            .count()
    }

    /// Switches a running consumer to new handlers. Returns the generation in use from its next
    /// transaction on, none where nothing was switched, or the load error. The handlers were loaded
    /// for a revision of the consumer and have its limits. A consumer that was started for another
    /// revision since then has loaded its own.
    pub(crate) fn switch(
        &mut self,
        id: i32,
        revision: i64,
        generation: i64,
        routes: Result<Arc<Routes>, String>,
    ) -> Result<Option<i64>, String> {
        let Some(member) = self.0.get_mut(&id) else { return Ok(None) };
        let State::Running(current) = &mut member.state else { return Ok(None) };
        if current.consumer.revision != revision {
            return Ok(None);
        }
        current.is_loading = false;
        match routes {
            Ok(routes) => {
                let generation = current.running.switch(routes);
                current.consumer.generation = generation;
                let Consumer { tenant, name, .. } = &current.consumer;
                tracing::info!(tenant, consumer = name, generation, "deployments switched");
                member.failing = None;
                Ok(Some(generation))
            }
            Err(error) => {
                member.failed(generation, error.clone());
                Err(error)
            }
        }
    }

    /// Applies the result of a task. Returns this host's progress with the consumer's deployments,
    /// where it changed.
    pub(crate) fn take(&mut self, done: Done) -> Option<(i32, i64, Progress)> {
        let id = done.consumer_id();
        let member = self.0.get_mut(&id)?;
        member.was_tried = true;
        match done {
            Done::Started { started: Ok(current), .. } => {
                let generation = current.running.generation();
                member.state = State::Running(current);
                return Some((id, generation, Progress::Switched));
            }
            Done::Started { started: Err(error), .. } => {
                member.state = State::Stopped;
                member.failed(member.standing.generation, error.clone());
                return Some((id, member.standing.generation, Progress::Failed(error)));
            }
            Done::Stopped { .. } => member.state = State::Stopped,
            Done::Changed { note, .. } => {
                (member.is_changing, member.note) = (false, note);
                member.change_due = Instant::now() + CHANGE_AGAIN;
            }
            Done::Loaded { .. } => unreachable!("handlers are switched"),
        }
        None
    }

    /// Returns every running consumer, to be drained.
    pub(crate) fn into_running(self) -> impl Iterator<Item = Running> {
        self.0.into_values().filter_map(|member| match member.state {
            State::Running(current) => Some(current.running),
            _ => None,
        })
    }
}

impl Member {
    fn new(standing: Standing) -> Self {
        let change_due = Instant::now();
        Self {
            standing,
            state: State::Stopped,
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
        self.standing
            .quarantine
            .as_ref()
            .map(|quarantine| quarantine.text(&self.standing.tenant, &self.standing.name))
    }

    /// Sets the quarantine metric where its value changed. Alerts read it.
    fn tell_quarantine(&mut self) {
        let is_quarantined = self.standing.quarantine.is_some() && !self.is_gone;
        if is_quarantined != self.is_told_quarantined {
            let Standing { tenant, name, .. } = &self.standing;
            let gauge = metrics::gauge!("oncebox_consumer_quarantined", "tenant" => tenant.clone(), "consumer" => name.clone());
            gauge.set(if is_quarantined { 1.0 } else { 0.0 });
            self.is_told_quarantined = is_quarantined;
        }
    }

    fn work(&self) -> Work {
        if self.is_gone { Work::Rest } else { self.standing.work() }
    }

    fn step(&mut self, now: Instant) -> Option<Step> {
        self.notice_end();
        if self.wants_change() && !self.is_changing && self.change_due <= now {
            self.is_changing = true;
            return Some(Step::Change(self.standing.clone()));
        }
        let work = self.work();
        match &mut self.state {
            State::Starting | State::Stopping { .. } => None,
            State::Stopped if work == Work::Rest => {
                (self.failing, self.was_tried) = (None, true);
                None
            }
            // A quarantined consumer that runs goes on; one that is stopped is not started.
            State::Stopped if self.standing.quarantine.is_some() => {
                self.was_tried = true;
                None
            }
            State::Stopped => {
                if self.must_wait(now) {
                    return None;
                }
                self.state = State::Starting;
                Some(Step::Start(self.standing.clone()))
            }
            State::Running(current) if self.is_gone || !current.fits(&self.standing) => self.stop(),
            State::Running(current) if current.running.generation() < self.standing.generation => {
                if current.is_loading || self.must_wait(now) {
                    return None;
                }
                let State::Running(current) = &mut self.state else { return None };
                current.is_loading = true;
                Some(Step::Load(current.consumer.clone()))
            }
            State::Running(current) => {
                // Only a consumer that has run for a while counts as healthy.
                if current.since.elapsed() > RESTART_MAX {
                    self.failing = None;
                }
                current
                    .running
                    .has_canary()
                    .then(|| Step::Judge(Box::new(current.consumer.clone())))
            }
        }
    }

    fn stop(&mut self) -> Option<Step> {
        let State::Running(current) = &self.state else { return None };
        let stopping = State::Stopping { revision: current.revision };
        let is_unwanted = self.is_gone
            || self.standing.tenant_state != "active"
            || self.standing.state == "deleting";
        let urgency = if is_unwanted { Urgency::Now } else { Urgency::Finish };
        match std::mem::replace(&mut self.state, stopping) {
            State::Running(current) => Some(Step::Stop(current, urgency)),
            _ => None,
        }
    }

    /// Marks a consumer that ended by itself as failed. It is then stopped like any other, and
    /// started again after growing pauses.
    fn notice_end(&mut self) {
        let State::Running(current) = &mut self.state else { return };
        if let Status::Ended(error) = current.running.status() {
            // A revision that matches no row, so that the consumer is stopped.
            current.revision = current.revision.min(self.standing.revision) - 1;
            self.failed(self.standing.generation, error);
        }
    }

    /// Returns whether a host has to carry out a drain's end, a seek or a removal.
    fn wants_change(&self) -> bool {
        if self.is_gone {
            return false;
        }
        let rests = matches!(self.state, State::Stopped);
        match self.standing.state.as_str() {
            "deleting" => rests,
            "draining" => {
                matches!(&self.state, State::Running(current) if current.fits(&self.standing))
            }
            _ => self.standing.is_sought && rests,
        }
    }

    fn must_wait(&self, now: Instant) -> bool {
        self.failing.as_ref().is_some_and(|failing| {
            failing.again_at > now && failing.version == self.standing.version()
        })
    }

    fn failed(&mut self, generation: i64, error: String) {
        let version = self.standing.version();
        let before = self
            .failing
            .as_ref()
            .filter(|failing| failing.version == version)
            .map_or(0, |failing| failing.failures);
        let failures = before + 1;
        let pause =
            (Duration::from_secs(1) * 2_u32.saturating_pow(before.min(16))).min(RESTART_MAX);
        let Standing { tenant, name, .. } = &self.standing;
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
    fn run(&self) -> Run {
        let Standing { consumer_id, revision, generation, state, .. } = &self.standing;
        let rests = self.work() == Work::Rest;
        let error = self.failing.as_ref().map(|failing| failing.error.clone());
        let (run, revision) = match &self.state {
            State::Running(current) if current.running.is_idle() => {
                (RunState::Idle, current.revision)
            }
            State::Running(current) => (RunState::Running, current.revision),
            State::Stopping { revision } => {
                (if error.is_some() { RunState::Failing } else { RunState::Running }, *revision)
            }
            // It failed with the version that it is started for again; an error of an earlier
            // version no longer counts.
            State::Starting
                if self
                    .failing
                    .as_ref()
                    .is_some_and(|failing| failing.version == self.standing.version()) =>
            {
                (RunState::Failing, *revision)
            }
            State::Starting => (RunState::Starting, *revision),
            State::Stopped
                if rests && *generation == 0 && state == "running" && !self.standing.is_sought =>
            {
                (RunState::Idle, *revision)
            }
            State::Stopped if rests => (RunState::Stopped, *revision),
            State::Stopped if self.standing.quarantine.is_some() => (RunState::Failing, *revision),
            State::Stopped => (
                RunState::Failing,
                self.failing.as_ref().map_or(*revision, |failing| failing.version.0),
            ),
        };
        let is_still = rests && matches!(self.state, State::Stopped);
        let error = match &self.state {
            // Handlers that cannot be loaded; an error from before this run no longer counts.
            State::Running(current) if current.running.generation() < self.standing.generation => {
                error
            }
            State::Running(_) => self.note.clone(),
            State::Starting if run == RunState::Starting => None,
            State::Stopped if is_still => self.note.clone(),
            State::Stopped => self.quarantine().or(error),
            _ => error,
        };
        Run {
            consumer_id: *consumer_id,
            state: run,
            revision,
            error,
            rests_at: is_still.then_some(*generation),
        }
    }
}
