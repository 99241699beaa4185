//! The supervisor's tasks beside its loop: loading, starting, stopping, carrying out changes. A
//! task that panics is a failure of its consumer only.

use std::{collections::HashMap, future::Future, sync::Arc, time::Duration};

use anyhow::{Context, Result, anyhow, bail};
use oncebox_control::{Consumer, DesiredState, Progress, RunMode};
use oncebox_kafka::Drained;
use oncebox_model::policy::{Schemas, apart};
use tokio::task::{AbortHandle, Id, JoinError, JoinSet};

use crate::{
    consumer::{
        operations,
        router::Routes,
        runtime::{ConsumerRuntime, StartParts},
    },
    context::HostContext,
    error_text,
    heartbeat::{Heartbeat, Reporter},
    plan::{Action, Consumers, RunningConsumer, Urgency},
};

/// Longest drain of a consumer that is stopped: longer than the drain of its partitions.
const STOP: Duration = Duration::from_secs(30);

/// Time that running handlers have when their consumer is stopped.
const PATIENCE: Duration = Duration::from_secs(10);
/// Time that they have when the tenant or the consumer is to do nothing more.
const PATIENCE_SUSPENDED: Duration = Duration::from_secs(1);

/// The result of a task.
pub(crate) enum TaskResult {
    /// A started consumer, or the reason that it did not start.
    Started { consumer_id: i32, started: Result<Box<RunningConsumer>, String> },
    /// Loaded deployments, or the error of loading them.
    Loaded { consumer: Box<Consumer>, made_for: i64, routes: Result<Arc<Routes>> },
    /// A stopped consumer.
    Stopped { consumer_id: i32 },
    /// A change that was carried out, or the text of what it waits for.
    Changed { consumer_id: i32, note: Option<String> },
}

impl TaskResult {
    /// Returns the id of the consumer that the result is about.
    pub(crate) fn consumer_id(&self) -> i32 {
        match self {
            Self::Started { consumer_id, .. }
            | Self::Stopped { consumer_id }
            | Self::Changed { consumer_id, .. } => *consumer_id,
            Self::Loaded { consumer, .. } => consumer.consumer_id,
        }
    }
}

/// The purpose of a task, for the result of one that panicked.
enum TaskPurpose {
    Start(i32),
    Load(Box<Consumer>),
    Stop(i32),
    Change(i32),
}

/// The tasks of a supervisor.
pub(crate) struct Tasks {
    host: Arc<HostContext>,
    /// Longest drain of all consumers at the end.
    within: Duration,
    running: JoinSet<TaskResult>,
    meant: HashMap<Id, (TaskPurpose, AbortHandle)>,
}

impl Tasks {
    pub(crate) fn new(host: Arc<HostContext>, within: Duration) -> Self {
        Self { host, within, running: JoinSet::new(), meant: HashMap::new() }
    }

    /// Begins the task of an action.
    pub(crate) fn begin(&mut self, heartbeat: &Heartbeat, consumer_id: i32, action: Action) {
        let (host, reporter) = (self.host.clone(), heartbeat.reporter());
        match action {
            Action::Start(desired) => self.spawn(TaskPurpose::Start(consumer_id), async move {
                let started = start(&host, &reporter, desired).await;
                TaskResult::Started {
                    consumer_id,
                    started: started.map_err(|error| error_text::one_line(&error)),
                }
            }),
            Action::Load(consumer) => {
                self.spawn(TaskPurpose::Load(Box::new(consumer.clone())), async move {
                    let made_for = consumer.revision;
                    let (consumer, routes) = load(&host, &reporter, consumer).await;
                    TaskResult::Loaded { consumer: Box::new(consumer), made_for, routes }
                })
            }
            Action::Stop(current, urgency) => {
                self.spawn(TaskPurpose::Stop(consumer_id), async move {
                    stop(*current, urgency).await;
                    TaskResult::Stopped { consumer_id }
                })
            }
            Action::Change(desired) => self.spawn(TaskPurpose::Change(consumer_id), async move {
                let changed = operations::carry_out(&host, &desired).await;
                TaskResult::Changed {
                    consumer_id,
                    note: changed.unwrap_or_else(|error| Some(error_text::one_line(&error))),
                }
            }),
            Action::Judge(_) => {}
        }
    }

    fn spawn(
        &mut self,
        meant: TaskPurpose,
        task: impl Future<Output = TaskResult> + Send + 'static,
    ) {
        let handle = self.running.spawn(task);
        self.meant.insert(handle.id(), (meant, handle));
    }

    /// Waits for the result of the next task; without a task, for ever.
    pub(crate) async fn next(&mut self) -> TaskResult {
        match self.running.join_next_with_id().await {
            Some(ended) => self.ended(ended),
            None => std::future::pending().await,
        }
    }

    /// Returns the result of another task that has already ended.
    pub(crate) fn try_next(&mut self) -> Option<TaskResult> {
        let ended = self.running.try_join_next_with_id()?;
        Some(self.ended(ended))
    }

    fn ended(&mut self, ended: Result<(Id, TaskResult), JoinError>) -> TaskResult {
        let error = match ended {
            Ok((id, done)) => {
                self.meant.remove(&id);
                return done;
            }
            Err(error) => error,
        };
        const PANICKED: &str = "a task of the host panicked; see its log";
        match self.meant.remove(&error.id()).expect("every task is noted").0 {
            TaskPurpose::Start(consumer_id) => {
                TaskResult::Started { consumer_id, started: Err(PANICKED.to_owned()) }
            }
            TaskPurpose::Load(consumer) => TaskResult::Loaded {
                made_for: consumer.revision,
                consumer,
                routes: Err(anyhow!(PANICKED)),
            },
            TaskPurpose::Stop(consumer_id) => TaskResult::Stopped { consumer_id },
            TaskPurpose::Change(consumer_id) => {
                TaskResult::Changed { consumer_id, note: Some(PANICKED.to_owned()) }
            }
        }
    }

    /// Drains all consumers at once. Loading tasks are aborted; stopping and changing tasks run to
    /// their end.
    pub(crate) async fn drain(mut self, consumers: Consumers) -> Drained {
        let within = self.within;
        let loading = self
            .meant
            .values()
            .filter(|(meant, _)| matches!(meant, TaskPurpose::Start(_) | TaskPurpose::Load(_)));
        loading.for_each(|(_, handle)| handle.abort());
        let drains = futures::future::join_all(
            consumers.into_running().map(|running| running.drain(within)),
        );
        let rest = async {
            let mut started: Vec<ConsumerRuntime> = Vec::new();
            while !self.running.is_empty() {
                if let TaskResult::Started { started: Ok(current), .. } = self.next().await {
                    started.push(current.running);
                }
            }
            futures::future::join_all(started.into_iter().map(|running| running.drain(within)))
                .await
        };
        let (drained, rest) = tokio::join!(drains, tokio::time::timeout(within, rest));
        let is_clean = drained.into_iter().all(|clean| clean)
            && rest.is_ok_and(|rest| rest.into_iter().all(|clean| clean));
        if is_clean { Drained::Clean } else { Drained::Unfinished }
    }
}

/// Reads the row of a consumer. A limited number of starts read theirs at a time. None holds its
/// permit while it waits for a tenant, its database or a compilation.
async fn newest(host: &HostContext, consumer_id: i32) -> Result<Consumer> {
    let _permit = host.starts.acquire().await.context("the host ends")?;
    host.control.consumers().by_id(consumer_id).await?.context("the consumer is gone")
}

/// Loads and starts a consumer as its rows say now.
async fn start(
    host: &HostContext,
    reporter: &Reporter,
    desired: DesiredState,
) -> Result<Box<RunningConsumer>> {
    let consumer = newest(host, desired.consumer_id).await?;
    reporter.report(consumer.consumer_id, consumer.generation, Progress::Compiling).await;
    let running = start_here(host, &consumer, desired.run_mode()).await?;
    // No await from here on: an aborted task would leave the consumer running.
    Ok(Box::new(RunningConsumer::new(running, consumer, &desired)))
}

/// Loads a consumer and starts it.
async fn start_here(
    host: &HostContext,
    consumer: &Consumer,
    work: RunMode,
) -> Result<ConsumerRuntime> {
    let policy = consumer.policy()?;
    let tenant = host.control.tenants().get(&consumer.tenant).await?;
    // Here, where no other consumer waits for it: a tenant's own database may be unavailable.
    host.control.tenant_databases().prepare(&tenant).await?;
    let routes = host.loader.load(&tenant, consumer, &policy).await?;
    let sessions = host.sessions.of(host, &tenant)?;
    let schemas = policy.schemas.clone();
    let schemas = apart(move || Schemas::new(&schemas)).await?;
    let reference = policy.reference.as_ref();
    let fetcher = reference.map(|of| host.control.tenant_stores().fetcher(&tenant, &of.store));
    let outgoing_wakeup = host.relay.wakeup(tenant.database.as_deref());
    let trial = host.starting.trial(consumer);
    if let Some(quarantine) = &consumer.quarantine {
        bail!(quarantine.text(&consumer.tenant, &consumer.name));
    }
    // Last: slow work comes before it. A consumer that reads nothing makes no client.
    let mark = match work {
        RunMode::Consume => Some(trial.begin().await?),
        RunMode::RetryOnly | RunMode::ReplayOnly | RunMode::Stopped => None,
    };
    ConsumerRuntime::start(
        host,
        consumer,
        StartParts { routes, sessions, schemas, fetcher, trial, mark, outgoing_wakeup },
        host.look.clone(),
        work,
    )
    .with_context(|| format!("failed to start consumer `{}/{}`", consumer.tenant, consumer.name))
}

/// Loads the newest deployments of a running consumer.
async fn load(
    host: &HostContext,
    reporter: &Reporter,
    consumer: Consumer,
) -> (Consumer, Result<Arc<Routes>>) {
    let load = async {
        let newest = newest(host, consumer.consumer_id).await?;
        reporter.report(newest.consumer_id, newest.generation, Progress::Compiling).await;
        let tenant = host.control.tenants().get(&newest.tenant).await?;
        // The row's policy may be newer than the running one; for that, the consumer is restarted.
        let routes = host.loader.load(&tenant, &newest, &consumer.policy()?).await?;
        anyhow::Ok((newest, routes))
    };
    match load.await {
        Ok((newest, routes)) => (newest, Ok(routes)),
        Err(error) => (consumer, Err(error)),
    }
}

async fn stop(current: RunningConsumer, urgency: Urgency) {
    let Consumer { tenant, name, .. } = &current.consumer;
    let patience = match urgency {
        Urgency::Finish => PATIENCE,
        Urgency::Now => PATIENCE_SUSPENDED,
    };
    let clean = current.running.drain_within(patience, STOP).await;
    if clean {
        tracing::info!(tenant, consumer = name, revision = current.revision, "consumer stopped");
    } else {
        tracing::warn!(
            tenant,
            consumer = name,
            "what a consumer ran did not end in time; it is redelivered where it was not acked"
        );
    }
}
