//! Brings the consumers to the state that their rows demand: starts and stops them, switches their
//! handlers, carries out changes, and restarts those that fail.
//!
//! One loop owns the fleet of consumers and never waits for any of them. Slow work runs in tasks
//! beside it, and the loop applies their results between two of its rounds.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use anyhow::{Context, Result, bail};
use oncebox_control::{Admin, Consumer, Progress, Quarantined, Work};
use oncebox_inbox::{Budget, DuePoller, SessionSettings};
use oncebox_kafka::Drained;
use oncebox_model::{
    InboxError,
    policy::{Schemas, apart},
};
use oncebox_registry::Decoder;
use tokio::{
    sync::{Notify, Semaphore, watch},
    time::Instant,
};
use tokio_util::sync::CancellationToken;

use crate::{
    announcements,
    brokers::Kafka,
    duplicates::Duplicates,
    fleet::{Fleet, Step},
    handlers::Loader,
    http::{self, Readiness},
    open::Openings,
    places,
    presence::Presence,
    report,
    running::{Prepared, Running},
    sessions::TenantSessions,
    starts::Starts,
    tasks::{Done, Tasks},
    wakeups,
};

/// Pause between two reads of the rows without a notification.
const POLL: Duration = Duration::from_millis(500);
/// Pause between two makings of partitions ahead of time.
const PARTITIONS: Duration = Duration::from_secs(600);
/// Pause between two checks of the triggers that shadows need.
const CAPTURE: Duration = Duration::from_secs(2);
/// Longest wait of the loop for one answer of the database.
const ANSWER_MAX: Duration = Duration::from_secs(15);
/// Time after which a host is ready in any case. Before that it is ready once it has tried to start
/// each consumer; one slow consumer does not keep it from that for longer.
const FIRST_STARTS: Duration = Duration::from_secs(10);
/// Most consumers whose rows are read for a start at a time. Each read is a query of the host's
/// database.
const STARTS_MAX: usize = 16;
/// Most changes that are carried out at a time. Each holds connections of the host's login.
const CHANGES_MAX: usize = 2;

/// The parts of a host that all its consumers share.
pub(crate) struct Supervisor {
    pub(crate) admin: Admin,
    pub(crate) loader: Loader,
    pub(crate) budget: Arc<Budget>,
    pub(crate) settings: SessionSettings,
    pub(crate) kafka: Kafka,
    /// Decoder for consumers whose payloads are in the wire format of a schema registry.
    pub(crate) decoder: Option<Decoder>,
    pub(crate) owner: String,
    /// Watchers and limits for opening and closing consumers.
    pub(crate) openings: Arc<Openings>,
    /// Poller that notifies retry workers of due messages.
    pub(crate) due_poller: Arc<DuePoller>,
    pub(crate) readiness: watch::Sender<Readiness>,
    pub(crate) sessions: TenantSessions,
    /// Notification of changed deployments and states, and of claims that were refused because of a
    /// change.
    pub(crate) look: Arc<Notify>,
    pub(crate) starts: Semaphore,
    pub(crate) changes: Semaphore,
    /// Marks of starts, which tell a host that comes back why the process before it ended.
    starting: Arc<Starts>,
    /// Duplicates that consumers refused, until they are reported.
    pub(crate) duplicates: Arc<Duplicates>,
    group_attempts: Mutex<HashMap<i32, u32>>,
}

impl Supervisor {
    /// Creates the supervisor of a host from its parts.
    #[allow(
        clippy::too_many_arguments,
        reason = "each is a part of the host, made by whoever starts it"
    )]
    pub(crate) fn new(
        admin: Admin,
        loader: Loader,
        budget: Arc<Budget>,
        settings: SessionSettings,
        kafka: Kafka,
        decoder: Option<Decoder>,
        owner: String,
        openings: Arc<Openings>,
        readiness: watch::Sender<Readiness>,
    ) -> Self {
        let admin = admin.acting_as("oncebox");
        Self {
            starting: Starts::new(admin.clone(), owner.clone()),
            // The audit log names no user for actions of the host itself.
            admin,
            loader,
            budget,
            settings,
            kafka,
            decoder,
            owner,
            openings,
            due_poller: Arc::default(),
            readiness,
            sessions: TenantSessions::default(),
            look: Arc::default(),
            starts: Semaphore::new(STARTS_MAX),
            changes: Semaphore::new(CHANGES_MAX),
            duplicates: Arc::default(),
            group_attempts: Mutex::default(),
        }
    }

    /// Runs until told to stop, then drains everything.
    pub(crate) async fn run(self, stop: CancellationToken, drain: Duration) -> Drained {
        let host = Arc::new(self);
        let mut presence = Presence::new(
            host.admin.clone(),
            host.loader.components().clone(),
            host.starting.clone(),
            host.duplicates.clone(),
            host.owner.clone(),
        );
        let (mut fleet, mut tasks) = (Fleet::default(), Tasks::new(host.clone(), drain));
        let announcements =
            tokio::spawn(announcements::listen(host.admin.clone(), host.look.clone()));
        let partitions = tokio::spawn(make_partitions(host.admin.clone()));
        let capture = tokio::spawn(keep_capture(host.admin.clone()));
        let places = tokio::spawn(places::keep(host.admin.clone()));
        let waking =
            tokio::spawn(wakeups::run(host.due_poller.clone(), host.budget.clone(), stop.clone()));
        let (began, mut look_due) = (Instant::now(), Instant::now());
        while !stop.is_cancelled() {
            tokio::select! {
                () = stop.cancelled() => break,
                looked = host.round(&mut fleet, &mut tasks, &mut presence, &mut look_due) => host.judge_self(&fleet, began, looked),
            }
            tokio::select! {
                () = stop.cancelled() => {}
                () = host.look.notified() => look_due = Instant::now(),
                done = tasks.next() => {
                    host.put_in_place(&mut fleet, &presence, done).await;
                    // Tasks that ended in between need no round of their own.
                    while let Some(done) = tasks.try_next() {
                        host.put_in_place(&mut fleet, &presence, done).await;
                    }
                }
                () = tokio::time::sleep_until(look_due) => {}
            }
        }
        announcements.abort();
        partitions.abort();
        capture.abort();
        places.abort();
        waking.abort();
        host.announce(Err("draining".to_owned()));
        let drained = tasks.drain(fleet).await;
        presence.end().await;
        drained
    }

    /// Reads the rows where that is due, begins the steps they demand, and reports the status.
    /// Returns whether the read was due.
    async fn round(
        &self,
        fleet: &mut Fleet,
        tasks: &mut Tasks,
        presence: &mut Presence,
        look_due: &mut Instant,
    ) -> Result<bool> {
        let is_due = *look_due <= Instant::now();
        if is_due {
            *look_due = Instant::now() + POLL;
            if presence.beat().await? {
                fleet.breakers_unsent(None);
            }
            for Quarantined { tenant, consumer, host } in
                answered(self.admin.judge_gone_starts()).await?
            {
                tracing::error!(
                    tenant,
                    consumer,
                    host,
                    "consumer quarantined: a host ended while it started it"
                );
            }
            let standings = answered(self.admin.standings()).await?;
            answered(self.sessions.renew(&self.admin, self.budget.scheduler(), &standings)).await?;
            fleet.see(standings);
        }
        let mut judged = Vec::new();
        // All steps begin before the first wait, so that none is left half begun when this future
        // is dropped.
        for (consumer_id, step) in fleet.steps(Instant::now()) {
            match step {
                Step::Judge(consumer) => judged.push(consumer),
                step => tasks.begin(presence, consumer_id, step),
            }
        }
        answered(presence.say(fleet.runs())).await?;
        for (consumer_id, breakers) in fleet.breakers_changed() {
            if !presence.report_breakers(consumer_id, &breakers).await {
                fleet.breakers_unsent(Some(consumer_id));
            }
        }
        for consumer in judged.iter().filter(|_| is_due) {
            self.judge(consumer).await?;
        }
        Ok(is_due)
    }

    /// Sets readiness, which is about the host: the database answers, and its loops come round. A
    /// consumer's failure is reported for the consumer.
    fn judge_self(&self, fleet: &Fleet, began: Instant, looked: Result<bool>) {
        let starting = fleet.first_starts();
        self.announce(match looked {
            Err(error) => Err(report::one_line(&error)),
            Ok(false) => return,
            Ok(true) if starting > 0 && began.elapsed() < FIRST_STARTS => {
                Err(format!("{starting} consumers are being loaded"))
            }
            Ok(true) => Ok(std::time::Instant::now()),
        });
    }

    fn announce(&self, readiness: Readiness) {
        http::announce(&self.readiness, readiness);
    }

    /// Counts the outcomes of canaries, and withdraws those that fail too often.
    async fn judge(&self, consumer: &Consumer) -> Result<()> {
        let counts = self.loader.counts().take();
        if !counts.is_empty()
            && let Err(error) = answered(self.admin.count_outcomes(&counts)).await
        {
            self.loader.counts().put_back(&counts);
            return Err(error.into());
        }
        for withdrawn in answered(self.admin.judge_canaries(consumer)).await? {
            let (deployment, tenant, name) =
                (&withdrawn.deployment, &consumer.tenant, &consumer.name);
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

    /// Applies the result of a task. New handlers are in use from the next transaction on,
    /// everywhere in this process.
    async fn put_in_place(&self, fleet: &mut Fleet, presence: &Presence, done: Done) {
        if let Done::Loaded { consumer, made_for, routes } = done {
            let (id, generation) = (consumer.consumer_id, consumer.generation);
            match fleet.switch(
                id,
                made_for,
                generation,
                routes.map_err(|error| report::one_line(&error)),
            ) {
                Ok(Some(generation)) => presence.report(id, generation, Progress::Switched).await,
                Ok(None) => {}
                Err(error) => presence.report(id, generation, Progress::Failed(error)).await,
            }
            return;
        }
        if let Some((id, generation, progress)) = fleet.take(done) {
            presence.report(id, generation, progress).await;
        }
    }

    /// Counts another attempt to delete a consumer's group, and returns the number of attempts.
    pub(crate) fn group_attempt(&self, consumer_id: i32) -> u32 {
        let mut attempts = self.group_attempts.lock().unwrap_or_else(PoisonError::into_inner);
        let attempts = attempts.entry(consumer_id).or_default();
        *attempts += 1;
        *attempts
    }

    /// Loads a consumer and starts it.
    pub(crate) async fn start(&self, consumer: &Consumer, work: Work) -> Result<Running> {
        let policy = consumer.policy()?;
        let tenant = self.admin.tenant(&consumer.tenant).await?;
        // Here, where no other consumer waits for it: a tenant's own database may be unavailable.
        self.admin.prepare_place(&tenant).await?;
        let routes = self.loader.load(&tenant, consumer, &policy).await?;
        let sessions = self.sessions.of(self, &tenant)?;
        let schemas = policy.schemas.clone();
        let schemas = apart(move || Schemas::new(&schemas)).await?;
        let trial = self.starting.trial(consumer);
        if let Some(quarantine) = &consumer.quarantine {
            bail!(quarantine.text(&consumer.tenant, &consumer.name));
        }
        // Last: slow work comes before it. A consumer that reads nothing makes no client.
        let mark = match work {
            Work::Read => Some(trial.begin().await?),
            Work::Retry | Work::Rest => None,
        };
        Running::start(
            self,
            consumer,
            Prepared { routes, sessions, schemas, trial, mark },
            self.look.clone(),
            work,
        )
        .with_context(|| {
            format!("failed to start consumer `{}/{}`", consumer.tenant, consumer.name)
        })
    }
}

/// Returns the database's answer, or an error after a limited wait. On a connection that a
/// middlebox has forgotten, no answer would ever come, and the loop would wait for it.
pub(crate) async fn answered<T>(
    asked: impl Future<Output = Result<T, InboxError>>,
) -> Result<T, InboxError> {
    let silent = |_| InboxError::Unreachable(sqlx::Error::Io(std::io::ErrorKind::TimedOut.into()));
    tokio::time::timeout(ANSWER_MAX, asked).await.map_err(silent)?
}

async fn make_partitions(admin: Admin) {
    loop {
        if let Err(error) = oncebox_control::schema::ensure_partitions(&admin.pool).await {
            tracing::error!(%error, "failed to make the inbox's partitions ahead of time");
        }
        tokio::time::sleep(PARTITIONS).await;
    }
}

/// Keeps the triggers that capture row changes on the tables of tenants with a shadow, and on no
/// others. The next check of any host repairs changes that a host left half done when it died. One
/// statement names the tenants that need a check, which are few.
async fn keep_capture(admin: Admin) {
    loop {
        match admin.tenants_with_capture().await {
            Ok(tenants) => {
                for tenant in tenants {
                    match admin.reconcile_capture(&tenant).await {
                        Ok(left) if left.is_empty() => {}
                        Ok(left) => {
                            tracing::info!(tenant = tenant.name, tables = ?left, "tables are busy; \
                                the trigger for shadows waits")
                        }
                        Err(error) => {
                            tracing::warn!(tenant = tenant.name, %error, "failed to look after the \
                                triggers for shadows")
                        }
                    }
                }
            }
            Err(error) => tracing::debug!(%error, "tenants are not known"),
        }
        tokio::time::sleep(CAPTURE).await;
    }
}
