//! The consumers of a host: the desired and the actual state of each, and the next action from the
//! one to the other. Nothing here waits or does I/O.

mod consumer;

pub(crate) use consumer::RunningConsumer;

use std::{collections::HashMap, sync::Arc, time::Duration};

use oncebox_control::{Consumer, ConsumerStatus, DesiredState, Progress, RunMode};
use oncebox_model::BreakerState;
use tokio::time::Instant;

use self::consumer::{HostedConsumer, RunPhase};
use crate::{
    consumer::{router::Routes, runtime::ConsumerRuntime},
    tasks::TaskResult,
};

/// Pause between two tries to carry out a change.
const CHANGE_AGAIN: Duration = Duration::from_millis(700);

/// The next action for a consumer.
pub(crate) enum Action {
    /// Loads and starts it.
    Start(DesiredState),
    /// Loads its deployments, while it runs.
    Load(Consumer),
    /// Stops its run.
    Stop(Box<RunningConsumer>, Urgency),
    /// Carries out a change: the end of a drain, a seek, a removal.
    Change(DesiredState),
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
pub(crate) struct Consumers(HashMap<i32, HostedConsumer>);

impl Consumers {
    /// Records the desired states that were just read. A consumer without a row is gone, and is
    /// forgotten once nothing of it runs.
    pub(crate) fn observe(&mut self, desired_states: Vec<DesiredState>) {
        self.0.values_mut().for_each(|consumer| consumer.is_gone = true);
        for desired in desired_states {
            match self.0.get_mut(&desired.consumer_id) {
                Some(consumer) => (consumer.desired, consumer.is_gone) = (desired, false),
                None => drop(self.0.insert(desired.consumer_id, HostedConsumer::new(desired))),
            }
        }
        self.0.values_mut().for_each(HostedConsumer::tell_quarantine);
        self.0.retain(|_, consumer| {
            !(consumer.is_gone
                && matches!(consumer.state, RunPhase::Stopped)
                && !consumer.is_changing)
        });
    }

    /// Returns the actions that are due. The caller must begin each of them.
    pub(crate) fn plan(&mut self, now: Instant) -> Vec<(i32, Action)> {
        self.0
            .iter_mut()
            .filter_map(|(id, consumer)| Some((*id, consumer.next_action(now)?)))
            .collect()
    }

    /// Returns this host's status for each consumer.
    pub(crate) fn runs(&self) -> impl Iterator<Item = ConsumerStatus> {
        self.0.values().filter(|consumer| !consumer.is_gone).map(HostedConsumer::run)
    }

    /// Returns the breaker states of consumers in which a breaker changed since the last call.
    pub(crate) fn breakers_changed(&self) -> Vec<(i32, Vec<BreakerState>)> {
        let running = self.0.iter().filter_map(|(id, consumer)| match &consumer.state {
            RunPhase::Running(current) => Some((*id, current.running.breakers_changed()?)),
            _ => None,
        });
        running.collect()
    }

    /// Marks the last answer of [`Self::breakers_changed`] as unsent, for one consumer or for all.
    pub(crate) fn breakers_unsent(&self, only: Option<i32>) {
        for (_, consumer) in self.0.iter().filter(|(id, _)| only.is_none_or(|only| only == **id)) {
            if let RunPhase::Running(current) = &consumer.state {
                current.running.breakers_unsent();
            }
        }
    }

    /// Returns the number of consumers that should run and were never tried.
    pub(crate) fn first_starts(&self) -> usize {
        self.0
            .values()
            .filter(|consumer| {
                !consumer.was_tried && consumer.desired.run_mode() != RunMode::Stopped
            })
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
        let Some(consumer) = self.0.get_mut(&id) else { return Ok(None) };
        let RunPhase::Running(current) = &mut consumer.state else { return Ok(None) };
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
                consumer.failing = None;
                Ok(Some(generation))
            }
            Err(error) => {
                consumer.failed(generation, error.clone());
                Err(error)
            }
        }
    }

    /// Applies the result of a task. Returns this host's progress with the consumer's deployments,
    /// where it changed.
    pub(crate) fn apply(&mut self, result: TaskResult) -> Option<(i32, i64, Progress)> {
        let id = result.consumer_id();
        let consumer = self.0.get_mut(&id)?;
        consumer.was_tried = true;
        match result {
            TaskResult::Started { started: Ok(current), .. } => {
                let generation = current.running.generation();
                consumer.state = RunPhase::Running(current);
                return Some((id, generation, Progress::Switched));
            }
            TaskResult::Started { started: Err(error), .. } => {
                consumer.state = RunPhase::Stopped;
                consumer.failed(consumer.desired.generation, error.clone());
                return Some((id, consumer.desired.generation, Progress::Failed(error)));
            }
            TaskResult::Stopped { .. } => consumer.state = RunPhase::Stopped,
            TaskResult::Changed { note, .. } => {
                (consumer.is_changing, consumer.note) = (false, note);
                consumer.change_due = Instant::now() + CHANGE_AGAIN;
            }
            TaskResult::Loaded { .. } => unreachable!("handlers are switched"),
        }
        None
    }

    /// Returns every running consumer, to be drained.
    pub(crate) fn into_running(self) -> impl Iterator<Item = ConsumerRuntime> {
        self.0.into_values().filter_map(|consumer| match consumer.state {
            RunPhase::Running(current) => Some(current.running),
            _ => None,
        })
    }
}
