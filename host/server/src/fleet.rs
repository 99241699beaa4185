//! The consumers of a host: what each is to do, what it does, and the next step from the one to the
//! other. Nothing here waits or asks anybody.

use std::{collections::HashMap, sync::Arc, time::Duration};

use oncebox_control::{Consumer, Progress, Run, RunState, Standing, Work};
use oncebox_model::BreakerState;
use tokio::time::Instant;

use crate::{
    routes::Routes,
    running::{Running, Status},
    tasks::Done,
};

/// Longest pause before a failed consumer is started again.
const RESTART_MAX: Duration = Duration::from_secs(60);
/// Pause between two looks whether a change can be carried out.
const CHANGE_AGAIN: Duration = Duration::from_millis(700);

/// A consumer that did not start or ended by itself, until it is tried again.
struct Failing {
    failures: u32,
    again_at: Instant,
    /// What the rows said when it failed; when they say something else, it is tried at once.
    version: (i64, i64, i64),
    error: String,
}

/// A consumer that runs, and what it was started for.
pub(crate) struct Current {
    pub(crate) running: Running,
    pub(crate) consumer: Consumer,
    pub(crate) work: Work,
    /// Of the rows that it was started for.
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

    /// Whether it does what it should, but for its deployments.
    fn fits(&self, standing: &Standing) -> bool {
        self.work == standing.work()
            && self.revision == standing.revision
            && self.tenant_revision == standing.tenant_revision
    }
}

/// What a host does with one consumer.
enum State {
    /// Nothing of it runs.
    Stopped,
    /// A task loads and starts it.
    Starting,
    /// It runs.
    Running(Box<Current>),
    /// A task brings what ran for this revision to its end.
    Stopping { revision: i64 },
}

struct Member {
    standing: Standing,
    state: State,
    failing: Option<Failing>,
    /// What a change that is carried out here waits for.
    note: Option<String>,
    is_changing: bool,
    change_due: Instant,
    was_tried: bool,
    is_gone: bool,
    /// Whether the metric says that it is quarantined.
    is_told_quarantined: bool,
}

/// What is to be done for a consumer now.
pub(crate) enum Step {
    /// Load it and start it.
    Start(Standing),
    /// Load its deployments, beside what runs.
    Load(Consumer),
    /// Bring what runs to its end.
    Stop(Box<Current>, Urgency),
    /// Carry out what was asked for: the end of a drain, a seek, a removal.
    Change(Standing),
    /// Look how its canary does.
    Judge(Box<Consumer>),
}

/// How long what runs may go on when it is stopped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Urgency {
    /// Until the messages that are under way are done, within reason.
    Finish,
    /// No longer than stopping takes: nothing is wanted of the tenant or the consumer any more.
    Now,
}

/// All consumers.
#[derive(Default)]
pub(crate) struct Fleet(HashMap<i32, Member>);

impl Fleet {
    /// What the rows say now.
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

    /// What there is to do. Each step is begun by whoever asks.
    pub(crate) fn steps(&mut self, now: Instant) -> Vec<(i32, Step)> {
        self.0.iter_mut().filter_map(|(id, member)| Some((*id, member.step(now)?))).collect()
    }

    /// How this host is with each.
    pub(crate) fn runs(&self) -> impl Iterator<Item = Run> {
        self.0.values().filter(|member| !member.is_gone).map(Member::run)
    }

    /// Circuit breakers of consumers in which one turned since this was last asked.
    pub(crate) fn breakers_changed(&self) -> Vec<(i32, Vec<BreakerState>)> {
        let running = self.0.iter().filter_map(|(id, member)| match &member.state {
            State::Running(current) => Some((*id, current.running.breakers_changed()?)),
            _ => None,
        });
        running.collect()
    }

    /// What that answered last, of one consumer or of all, was told to nobody.
    pub(crate) fn breakers_untold(&self, only: Option<i32>) {
        for (_, member) in self.0.iter().filter(|(id, _)| only.is_none_or(|only| only == **id)) {
            if let State::Running(current) = &member.state {
                current.running.breakers_untold();
            }
        }
    }

    /// Consumers that were never tried yet.
    pub(crate) fn first_starts(&self) -> usize {
        self.0
            .values()
            .filter(|member| !member.was_tried && member.standing.work() != Work::Rest)
            .count()
    }

    /// New handlers for what runs. The generation that is used from now on, where something runs;
    /// else why not. They were loaded for a revision of the consumer, whose limits they have: what
    /// was started since for another has loaded its own.
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

    /// What a task brings. The answer is how far this host is with the consumer's deployments,
    /// where that changed.
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

    /// Everything that runs, to be brought to its end.
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

    /// Alerts look at the metric.
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
            // What runs goes on; what does not is left alone.
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
                // Only what has run for a while is well again.
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

    /// One that ended by itself is brought to its end like any other, and started again later and
    /// later.
    fn notice_end(&mut self) {
        let State::Running(current) = &mut self.state else { return };
        if let Status::Ended(error) = current.running.status() {
            // What it was started for is over: it fits nothing any more.
            current.revision = current.revision.min(self.standing.revision) - 1;
            self.failed(self.standing.generation, error);
        }
    }

    /// Whether a host has to carry something out that was asked for.
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

    /// How this host is with it.
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
            // It failed at what it is started for again; what failed before that is over.
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
            // Handlers that cannot be loaded; what went wrong before it ran is over.
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
