//! What the supervisor does beside its loop: loading, starting, bringing to an end, carrying out
//! changes. A task that panics is a failure of its consumer, and of nothing else.

use std::{collections::HashMap, future::Future, sync::Arc, time::Duration};

use anyhow::{Context, Result, anyhow};
use oncebox_control::{Consumer, Progress, Standing};
use oncebox_kafka::Drained;
use tokio::task::{AbortHandle, Id, JoinError, JoinSet};

use crate::{
    changes,
    fleet::{Current, Fleet, Step, Urgency},
    presence::{Presence, Reporter},
    report,
    routes::Routes,
    running::Running,
    supervisor::Supervisor,
};

/// How long a consumer that is stopped may finish what it runs: longer than its partitions may.
const STOP: Duration = Duration::from_secs(30);

/// How long handlers that run may go on when their consumer is stopped.
const PATIENCE: Duration = Duration::from_secs(10);
/// How long they may when the tenant or the consumer is to do nothing any more.
const PATIENCE_SUSPENDED: Duration = Duration::from_secs(1);

/// What a task brings.
pub(crate) enum Done {
    /// A consumer was started, or not.
    Started { consumer_id: i32, started: Result<Box<Current>, String> },
    /// Deployments were loaded.
    Loaded { consumer: Box<Consumer>, made_for: i64, routes: Result<Arc<Routes>> },
    /// Nothing of a consumer runs any more.
    Stopped { consumer_id: i32 },
    /// A change was carried out, or waits for something.
    Changed { consumer_id: i32, note: Option<String> },
}

impl Done {
    /// What it is about.
    pub(crate) fn consumer_id(&self) -> i32 {
        match self {
            Self::Started { consumer_id, .. }
            | Self::Stopped { consumer_id }
            | Self::Changed { consumer_id, .. } => *consumer_id,
            Self::Loaded { consumer, .. } => consumer.consumer_id,
        }
    }
}

/// What there is to say of a task that panicked.
enum Meant {
    Start(i32),
    Load(Box<Consumer>),
    Stop(i32),
    Change(i32),
}

/// The tasks of a supervisor.
pub(crate) struct Tasks {
    host: Arc<Supervisor>,
    /// How long everything may take at the end.
    within: Duration,
    running: JoinSet<Done>,
    meant: HashMap<Id, (Meant, AbortHandle)>,
}

impl Tasks {
    pub(crate) fn new(host: Arc<Supervisor>, within: Duration) -> Self {
        Self { host, within, running: JoinSet::new(), meant: HashMap::new() }
    }

    /// Begin a step.
    pub(crate) fn begin(&mut self, presence: &Presence, consumer_id: i32, step: Step) {
        let (host, reporter) = (self.host.clone(), presence.reporter());
        match step {
            Step::Start(standing) => self.spawn(Meant::Start(consumer_id), async move {
                let started = start(&host, &reporter, standing).await;
                Done::Started {
                    consumer_id,
                    started: started.map_err(|error| report::one_line(&error)),
                }
            }),
            Step::Load(consumer) => {
                self.spawn(Meant::Load(Box::new(consumer.clone())), async move {
                    let made_for = consumer.revision;
                    let (consumer, routes) = load(&host, &reporter, consumer).await;
                    Done::Loaded { consumer: Box::new(consumer), made_for, routes }
                })
            }
            Step::Stop(current, urgency) => self.spawn(Meant::Stop(consumer_id), async move {
                stop(*current, urgency).await;
                Done::Stopped { consumer_id }
            }),
            Step::Change(standing) => self.spawn(Meant::Change(consumer_id), async move {
                let changed = changes::carry_out(&host, &standing).await;
                Done::Changed {
                    consumer_id,
                    note: changed.unwrap_or_else(|error| Some(report::one_line(&error))),
                }
            }),
            Step::Judge(_) => {}
        }
    }

    fn spawn(&mut self, meant: Meant, task: impl Future<Output = Done> + Send + 'static) {
        let handle = self.running.spawn(task);
        self.meant.insert(handle.id(), (meant, handle));
    }

    /// What the next task brings; waits for ever where there is none.
    pub(crate) async fn next(&mut self) -> Done {
        match self.running.join_next_with_id().await {
            Some(ended) => self.ended(ended),
            None => std::future::pending().await,
        }
    }

    /// What another task has brought already.
    pub(crate) fn try_next(&mut self) -> Option<Done> {
        let ended = self.running.try_join_next_with_id()?;
        Some(self.ended(ended))
    }

    fn ended(&mut self, ended: Result<(Id, Done), JoinError>) -> Done {
        let error = match ended {
            Ok((id, done)) => {
                self.meant.remove(&id);
                return done;
            }
            Err(error) => error,
        };
        const PANICKED: &str = "a task of the host panicked; see its log";
        match self.meant.remove(&error.id()).expect("every task is noted").0 {
            Meant::Start(consumer_id) => {
                Done::Started { consumer_id, started: Err(PANICKED.to_owned()) }
            }
            Meant::Load(consumer) => Done::Loaded {
                made_for: consumer.revision,
                consumer,
                routes: Err(anyhow!(PANICKED)),
            },
            Meant::Stop(consumer_id) => Done::Stopped { consumer_id },
            Meant::Change(consumer_id) => {
                Done::Changed { consumer_id, note: Some(PANICKED.to_owned()) }
            }
        }
    }

    /// Finish what runs, everywhere at once. What is being loaded is dropped; what is being stopped
    /// or changed comes to its end.
    pub(crate) async fn drain(mut self, fleet: Fleet) -> Drained {
        let within = self.within;
        let loading = self
            .meant
            .values()
            .filter(|(meant, _)| matches!(meant, Meant::Start(_) | Meant::Load(_)));
        loading.for_each(|(_, handle)| handle.abort());
        let drains =
            futures::future::join_all(fleet.into_running().map(|running| running.drain(within)));
        let rest = async {
            let mut started: Vec<Running> = Vec::new();
            while !self.running.is_empty() {
                if let Done::Started { started: Ok(current), .. } = self.next().await {
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

/// The row of a consumer. So many at a time ask for theirs when a host starts; nobody holds a place
/// meanwhile for what depends on a tenant, its database or a compilation.
async fn newest(host: &Supervisor, consumer_id: i32) -> Result<Consumer> {
    let _permit = host.starts.acquire().await.context("the host ends")?;
    host.admin.consumer_by_id(consumer_id).await?.context("the consumer is gone")
}

/// Load and start what the rows say now.
async fn start(host: &Supervisor, reporter: &Reporter, standing: Standing) -> Result<Box<Current>> {
    let consumer = newest(host, standing.consumer_id).await?;
    reporter.report(consumer.consumer_id, consumer.generation, Progress::Compiling).await;
    let running = host.start(&consumer, standing.work()).await?;
    // No wait from here on: a task that is given up would leave it running.
    Ok(Box::new(Current::new(running, consumer, &standing)))
}

/// Load the newest deployments of a consumer that runs.
async fn load(
    host: &Supervisor,
    reporter: &Reporter,
    consumer: Consumer,
) -> (Consumer, Result<Arc<Routes>>) {
    let load = async {
        let newest = newest(host, consumer.consumer_id).await?;
        reporter.report(newest.consumer_id, newest.generation, Progress::Compiling).await;
        let tenant = host.admin.tenant(&newest.tenant).await?;
        // Its policy may be newer than what runs, which is started anew for that.
        let routes = host.loader.load(&tenant, &newest, &consumer.policy()?).await?;
        anyhow::Ok((newest, routes))
    };
    match load.await {
        Ok((newest, routes)) => (newest, Ok(routes)),
        Err(error) => (consumer, Err(error)),
    }
}

async fn stop(current: Current, urgency: Urgency) {
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
