//! Starts what the rows say, keeps it running, and switches handlers when a deployment changes.
//!
//! One loop owns everything that runs. Loading, which may compile, happens in tasks beside it; what they
//! bring is put in place between two of its steps, and the next transaction of the consumer uses it.

use std::{
    collections::{BTreeMap, HashMap, HashSet},
    sync::Arc,
    time::Duration,
};

use anyhow::{Context, Result};
use futures::FutureExt;
use oncebox_inbox::{Admin, Budget, Consumer, Progress, SessionSettings, Sessions};
use oncebox_kafka::Drained;
use tokio::{
    sync::{Notify, watch},
    task::{JoinHandle, JoinSet},
    time::Instant,
};
use tokio_util::sync::CancellationToken;

use crate::{announcements, handlers::Loader, http::Readiness, presence::Presence, report, routes::Routes, running::Running};

/// How often rows are looked at when nobody says that they changed.
const POLL: Duration = Duration::from_millis(500);
/// How often partitions are made ahead of time.
const PARTITIONS: Duration = Duration::from_secs(600);
/// How often the triggers that shadows need are looked at.
const CAPTURE: Duration = Duration::from_secs(2);
/// Longest pause before a failed consumer is started again.
const RESTART_MAX: Duration = Duration::from_secs(60);

/// What all consumers of a host share.
pub(crate) struct Supervisor {
    pub(crate) admin: Admin,
    pub(crate) loader: Arc<Loader>,
    pub(crate) budget: Arc<Budget>,
    pub(crate) settings: SessionSettings,
    pub(crate) properties: BTreeMap<String, String>,
    pub(crate) owner: String,
    pub(crate) readiness: watch::Sender<Readiness>,
}

/// A consumer that did not start or ended by itself, until it is tried again.
struct Failing {
    failures: u32,
    again_at: Instant,
    error: String,
}

/// What a loading task brings.
type Loaded = (Consumer, Result<Arc<Routes>>);

struct State {
    presence: Presence,
    sessions: HashMap<String, Arc<Sessions>>,
    running: HashMap<i32, Running>,
    failing: HashMap<i32, Failing>,
    /// Consumers whose deployments are being loaded.
    loading: HashSet<i32>,
    loads: JoinSet<Loaded>,
    /// Retry workers of consumers that ended, on their last message.
    ending: Vec<JoinHandle<()>>,
}

impl Supervisor {
    /// Run until told to stop, then drain everything.
    pub(crate) async fn run(self, stop: CancellationToken, drain: Duration) -> Drained {
        let mut state = State::new(Presence::new(self.admin.clone(), self.loader.components().clone(), self.owner.clone()));
        // Deployments that changed, and claims that were refused because they had.
        let look = Arc::new(Notify::new());
        let announcements = tokio::spawn(announcements::listen(self.admin.clone(), look.clone()));
        let mut partitions_due = Instant::now();
        let capture = tokio::spawn(keep_capture(self.admin.clone()));
        while !stop.is_cancelled() {
            if partitions_due <= Instant::now() {
                self.make_partitions().await;
                partitions_due += PARTITIONS;
            }
            // What it does after its last wait is done at once, so that nothing is left half started.
            let reconciled = tokio::select! {
                () = stop.cancelled() => break,
                reconciled = self.reconcile(&mut state) => reconciled,
            };
            let readiness = match reconciled {
                Ok(()) => state.readiness(),
                Err(error) => Err(report::one_line(&error)),
            };
            self.announce(readiness);
            tokio::select! {
                () = stop.cancelled() => {}
                () = look.notified() => {}
                Some(loaded) = state.loads.join_next() => self.put_in_place(&mut state, loaded, &look).await,
                () = tokio::time::sleep(POLL) => {}
            }
        }
        announcements.abort();
        capture.abort();
        self.announce(Err("draining".to_owned()));
        state.drain(drain).await
    }

    async fn make_partitions(&self) {
        if let Err(error) = oncebox_inbox::schema::ensure_partitions(&self.admin.pool).await {
            tracing::error!(%error, "failed to make the inbox's partitions ahead of time");
        }
    }

    fn announce(&self, readiness: Readiness) {
        self.readiness.send_if_modified(|known| {
            let changed = *known != readiness;
            if changed {
                match &readiness {
                    Ok(()) => tracing::info!("ready"),
                    Err(why) => tracing::warn!(why, "not ready"),
                }
                *known = readiness;
            }
            changed
        });
    }

    /// See what the rows say and begin to make it so.
    async fn reconcile(&self, state: &mut State) -> Result<()> {
        state.presence.beat().await?;
        let consumers = self.admin.consumers().await?;
        state.collect_ended();
        // A consumer without a deployment has nothing to hand its messages to; it waits for one.
        for consumer in consumers.into_iter().filter(|consumer| consumer.generation > 0) {
            if state.has(&consumer) {
                self.judge(state, &consumer).await?;
            } else {
                self.load(state, consumer).await;
            }
        }
        Ok(())
    }

    /// Count what canaries did, and withdraw those that fail too often.
    async fn judge(&self, state: &State, consumer: &Consumer) -> Result<()> {
        if !state.running.get(&consumer.consumer_id).is_some_and(Running::has_canary) {
            return Ok(());
        }
        let counts = self.loader.counts().take();
        if !counts.is_empty()
            && let Err(error) = self.admin.count_outcomes(&counts).await
        {
            self.loader.counts().put_back(&counts);
            return Err(error.into());
        }
        for withdrawn in self.admin.judge_canaries(consumer).await? {
            let (deployment, tenant, name) = (&withdrawn.deployment, &consumer.tenant, &consumer.name);
            metrics::counter!("oncebox_canary_rollbacks_total", "tenant" => tenant.clone(), "consumer" => name.clone()).increment(1);
            tracing::warn!(
                tenant,
                consumer = name,
                deployment = deployment.deployment_id,
                event_type = deployment.slot.event_type,
                reason = withdrawn.reason,
                redriven = withdrawn.redriven,
                "a canary was rolled back"
            );
        }
        Ok(())
    }

    /// Begin to load what is new for a consumer.
    async fn load(&self, state: &mut State, consumer: Consumer) {
        state.loading.insert(consumer.consumer_id);
        state.presence.report(consumer.consumer_id, consumer.generation, Progress::Compiling).await;
        let (admin, loader) = (self.admin.clone(), self.loader.clone());
        state.loads.spawn(async move {
            let load = async {
                let policy = consumer.policy()?;
                let tenant = admin.tenant(&consumer.tenant).await?;
                loader.load(&tenant, &consumer, &policy).await
            };
            let loaded = load.await;
            (consumer, loaded)
        });
    }

    /// Use what was loaded: from the next transaction on, everywhere in this process.
    async fn put_in_place(&self, state: &mut State, loaded: Result<Loaded, tokio::task::JoinError>, look: &Arc<Notify>) {
        let (consumer, routes) = match loaded {
            Ok(loaded) => loaded,
            Err(error) => {
                // A bug of ours; the next look begins anew.
                tracing::error!(%error, "loading deployments did not come to its end");
                return state.loading.clear();
            }
        };
        let id = consumer.consumer_id;
        state.loading.remove(&id);
        let placed = match routes {
            Ok(routes) => self.place(state, &consumer, routes, look).await,
            Err(error) => Err(error),
        };
        match placed {
            Ok(generation) => {
                state.failing.remove(&id);
                state.presence.report(id, generation, Progress::Switched).await;
            }
            Err(error) => {
                let error = report::one_line(&error);
                state.presence.report(id, consumer.generation, Progress::Failed(error.clone())).await;
                state.failed(id, format!("consumer `{}/{}`: {error}", consumer.tenant, consumer.name));
            }
        }
    }

    async fn place(&self, state: &mut State, consumer: &Consumer, routes: Arc<Routes>, look: &Arc<Notify>) -> Result<i64> {
        if let Some(running) = state.running.get_mut(&consumer.consumer_id) {
            let generation = running.switch(routes);
            tracing::info!(tenant = consumer.tenant, consumer = consumer.name, generation, "deployments switched");
            return Ok(generation);
        }
        let tenant = self.admin.tenant(&consumer.tenant).await?;
        let sessions = match state.sessions.get(&tenant.login) {
            Some(sessions) => sessions.clone(),
            None => {
                let sessions = Sessions::of(&self.admin, &tenant, &self.settings, self.budget.clone())?;
                state.sessions.insert(tenant.login.clone(), sessions.clone());
                sessions
            }
        };
        let running = Running::start(self, consumer, routes, sessions, look.clone())
            .with_context(|| format!("failed to start consumer `{}/{}`", consumer.tenant, consumer.name))?;
        let generation = running.generation();
        state.running.insert(consumer.consumer_id, running);
        Ok(generation)
    }
}

/// Keep the triggers that capture row changes on the tables of tenants with a shadow, and on no others.
/// Whatever a host leaves half done when it dies, the next look of any host puts right.
async fn keep_capture(admin: Admin) {
    loop {
        match admin.tenants().await {
            Ok(tenants) => {
                for tenant in tenants {
                    match admin.reconcile_capture(&tenant).await {
                        Ok(left) if left.is_empty() => {}
                        Ok(left) => tracing::info!(tenant = tenant.name, tables = ?left, "tables are busy; the trigger for shadows waits"),
                        Err(error) => tracing::warn!(tenant = tenant.name, %error, "failed to look after the triggers for shadows"),
                    }
                }
            }
            Err(error) => tracing::debug!(%error, "tenants are not known"),
        }
        tokio::time::sleep(CAPTURE).await;
    }
}

impl State {
    fn new(presence: Presence) -> Self {
        Self {
            presence,
            sessions: HashMap::new(),
            running: HashMap::new(),
            failing: HashMap::new(),
            loading: HashSet::new(),
            loads: JoinSet::new(),
            ending: Vec::new(),
        }
    }

    /// Whether nothing is to be done for a consumer now: it runs what its row says, or is about to, or has
    /// to wait after a failure.
    fn has(&self, consumer: &Consumer) -> bool {
        let id = consumer.consumer_id;
        self.loading.contains(&id)
            || self.running.get(&id).is_some_and(|running| running.generation() >= consumer.generation)
            || self.failing.get(&id).is_some_and(|failing| failing.again_at > Instant::now())
    }

    fn readiness(&self) -> Readiness {
        if let Some(failing) = self.failing.values().next() {
            return Err(failing.error.clone());
        }
        let starting = self.loading.iter().filter(|id| !self.running.contains_key(id)).count();
        if starting > 0 { Err(format!("{starting} consumers are being loaded")) } else { Ok(()) }
    }

    fn failed(&mut self, consumer_id: i32, error: String) {
        let failures = self.failing.get(&consumer_id).map_or(0, |failing| failing.failures) + 1;
        let pause = (Duration::from_secs(1) * 2_u32.saturating_pow(failures - 1)).min(RESTART_MAX);
        tracing::error!(error, pause_ms = pause.as_millis() as u64, "a consumer does not run what its deployments say");
        self.failing.insert(consumer_id, Failing { failures, again_at: Instant::now() + pause, error });
    }

    /// Consumers that ended by themselves are started again, later and later.
    fn collect_ended(&mut self) {
        let ended: Vec<_> = self.running.iter().filter(|(_, r)| r.kafka.join().now_or_never().is_some()).map(|(id, _)| *id).collect();
        for id in ended {
            let Some(running) = self.running.remove(&id) else { continue };
            let ended = running.kafka.join().now_or_never().and_then(Result::err);
            let error = ended.map_or_else(|| "it ended".to_owned(), |error| error.to_string());
            self.failed(id, format!("consumer `{}/{}`: {error}", running.inbox.tenant, running.inbox.name));
            self.ending.extend(running.abandon());
        }
        self.ending.retain(|worker| !worker.is_finished());
    }

    /// Finish what runs, everywhere at once.
    async fn drain(mut self, within: Duration) -> Drained {
        self.loads.abort_all();
        let drains = self.running.into_values().map(|running| running.drain(within));
        let ending = tokio::time::timeout(within, futures::future::join_all(self.ending));
        let (drained, ending) = tokio::join!(futures::future::join_all(drains), ending);
        self.presence.end().await;
        if drained.into_iter().all(|clean| clean) && ending.is_ok() { Drained::Clean } else { Drained::Unfinished }
    }
}
