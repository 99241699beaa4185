//! Brings the consumers to the state that their rows demand: starts and stops them, switches their
//! handlers, carries out changes, and restarts those that fail.
//!
//! One loop owns the consumers and never waits for any of them. Slow work runs in tasks
//! beside it, and the loop applies their results between two of its rounds.

use std::{sync::Arc, time::Duration};

use anyhow::Result;
use oncebox_control::{Consumer, Control, Progress, Quarantined, Tenant};
use oncebox_kafka::Drained;
use tokio::{sync::watch, time::Instant};
use tokio_util::sync::CancellationToken;

use crate::{
    consumer::wakeups,
    context::{HostContext, answered},
    error_text,
    heartbeat::Heartbeat,
    http::{self, Readiness},
    notifications,
    plan::{Action, Consumers},
    tasks::{TaskResult, Tasks},
    tenants::{by_database::DatabaseTasks, databases},
};

/// Pause between two reads of the rows without a notification.
const POLL: Duration = Duration::from_millis(500);
/// Pause between two makings of partitions ahead of time.
const PARTITIONS: Duration = Duration::from_secs(600);
/// Pause between two checks of the triggers that shadows need.
const CAPTURE: Duration = Duration::from_secs(2);
/// Time after which a host is ready in any case. Before that it is ready once it has tried to start
/// each consumer; one slow consumer does not keep it from that for longer.
const FIRST_STARTS: Duration = Duration::from_secs(10);

/// The loop that brings a host's consumers to the state of their rows.
pub(crate) struct Supervisor {
    host: Arc<HostContext>,
    readiness: watch::Sender<Readiness>,
}

impl Supervisor {
    /// Creates the supervisor of a host.
    pub(crate) fn new(host: HostContext, readiness: watch::Sender<Readiness>) -> Self {
        Self { host: Arc::new(host), readiness }
    }

    /// Runs until told to stop, then drains everything.
    pub(crate) async fn run(self, stop: CancellationToken, drain: Duration) -> Drained {
        let host = self.host.clone();
        let mut heartbeat = Heartbeat::new(
            host.control.clone(),
            host.loader.components().clone(),
            host.starting.clone(),
            host.duplicates.clone(),
            host.scrapes.clone(),
            host.owner.clone(),
        );
        let (mut consumers, mut tasks) = (Consumers::default(), Tasks::new(host.clone(), drain));
        let notifications = tokio::spawn(notifications::listen(
            host.control.clone(),
            host.look.clone(),
            host.job_notes.clone(),
        ));
        let partitions = tokio::spawn(make_partitions(host.control.clone()));
        let capture = tokio::spawn(keep_capture(host.control.clone()));
        let databases = tokio::spawn(databases::keep(host.control.clone()));
        let horizons = tokio::spawn(host.horizons.clone().run());
        let waking =
            tokio::spawn(wakeups::run(host.due_poller.clone(), host.budgets.clone(), stop.clone()));
        let mut relaying = tokio::spawn(host.relay.clone().run(stop.clone()));
        let (began, mut look_due) = (Instant::now(), Instant::now());
        while !stop.is_cancelled() {
            tokio::select! {
                () = stop.cancelled() => break,
                looked = self.round(&mut consumers, &mut tasks, &mut heartbeat, &mut look_due) => self.judge_self(&consumers, began, looked),
            }
            tokio::select! {
                () = stop.cancelled() => {}
                () = host.look.notified() => look_due = Instant::now(),
                done = tasks.next() => {
                    self.put_in_place(&mut consumers, &heartbeat, done).await;
                    // Tasks that ended in between need no round of their own.
                    while let Some(done) = tasks.try_next() {
                        self.put_in_place(&mut consumers, &heartbeat, done).await;
                    }
                }
                () = tokio::time::sleep_until(look_due) => {}
            }
        }
        notifications.abort();
        partitions.abort();
        capture.abort();
        databases.abort();
        horizons.abort();
        waking.abort();
        self.announce(Err("draining".to_owned()));
        // The relay has been told to stop with everything else. What consumers still commit is sent
        // by other hosts, or after the next start.
        let (drained, relayed) =
            tokio::join!(tasks.drain(consumers), tokio::time::timeout(drain, &mut relaying));
        if relayed.is_err() {
            relaying.abort();
            tracing::warn!("the relay did not end in time; what it was sending is sent again");
        }
        heartbeat.end().await;
        drained
    }

    /// Reads the rows where that is due, begins the actions they demand, and reports the status.
    /// Returns whether the read was due.
    async fn round(
        &self,
        consumers: &mut Consumers,
        tasks: &mut Tasks,
        heartbeat: &mut Heartbeat,
        look_due: &mut Instant,
    ) -> Result<bool> {
        let is_due = *look_due <= Instant::now();
        if is_due {
            *look_due = Instant::now() + POLL;
            if heartbeat.beat().await? {
                consumers.breakers_unsent(None);
            }
            for Quarantined { tenant, consumer, host } in
                answered(self.host.control.reconciliation().judge_gone_starts()).await?
            {
                tracing::error!(
                    tenant,
                    consumer,
                    host,
                    "consumer quarantined: a host ended while it started it"
                );
            }
            let mut desired_states =
                answered(self.host.control.reconciliation().desired_states()).await?;
            self.host.own_replays.mark(&self.host.control, &self.host.look, &mut desired_states);
            answered(self.host.sessions.renew(
                &self.host.control,
                &self.host.budgets,
                &desired_states,
            ))
            .await?;
            consumers.observe(desired_states);
        }
        let mut judged = Vec::new();
        // All actions begin before the first wait, so that none is left half begun when this future
        // is dropped.
        for (consumer_id, action) in consumers.plan(Instant::now()) {
            match action {
                Action::Judge(consumer) => judged.push(consumer),
                action => tasks.begin(heartbeat, consumer_id, action),
            }
        }
        answered(heartbeat.publish(consumers.runs())).await?;
        for (consumer_id, breakers) in consumers.breakers_changed() {
            if !heartbeat.report_breakers(consumer_id, &breakers).await {
                consumers.breakers_unsent(Some(consumer_id));
            }
        }
        heartbeat.report_endpoints(&self.host.relay).await;
        for consumer in judged.iter().filter(|_| is_due) {
            self.judge(consumer).await?;
        }
        Ok(is_due)
    }

    /// Sets readiness, which is about the host: the database answers, and its loops come round. A
    /// consumer's failure is reported for the consumer.
    fn judge_self(&self, consumers: &Consumers, began: Instant, looked: Result<bool>) {
        let starting = consumers.first_starts();
        self.announce(match looked {
            Err(error) => Err(error_text::one_line(&error)),
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
        let counts = self.host.loader.counts().take();
        if !counts.is_empty()
            && let Err(error) =
                answered(self.host.control.deployments().count_outcomes(&counts)).await
        {
            self.host.loader.counts().put_back(&counts);
            return Err(error.into());
        }
        for withdrawn in answered(self.host.control.deployments().judge_canaries(consumer)).await? {
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
    async fn put_in_place(
        &self,
        consumers: &mut Consumers,
        heartbeat: &Heartbeat,
        done: TaskResult,
    ) {
        if let TaskResult::Loaded { consumer, made_for, routes } = done {
            let (id, generation) = (consumer.consumer_id, consumer.generation);
            match consumers.switch(
                id,
                made_for,
                generation,
                routes.map_err(|error| error_text::one_line(&error)),
            ) {
                Ok(Some(generation)) => heartbeat.report(id, generation, Progress::Switched).await,
                Ok(None) => {}
                Err(error) => heartbeat.report(id, generation, Progress::Failed(error)).await,
            }
            return;
        }
        if let Some((id, generation, progress)) = consumers.apply(done) {
            heartbeat.report(id, generation, progress).await;
        }
    }
}

async fn make_partitions(control: Control) {
    loop {
        if let Err(error) = oncebox_control::schema::ensure_partitions(&control.pool).await {
            tracing::error!(%error, "failed to make the inbox's partitions ahead of time");
        }
        tokio::time::sleep(PARTITIONS).await;
    }
}

/// Keeps the triggers that capture row changes on the tables of tenants with a shadow, and on no
/// others. The next check of any host repairs changes that a host left half done when it died. One
/// statement names the tenants that need a check, which are few.
async fn keep_capture(control: Control) {
    let mut tasks = DatabaseTasks::default();
    loop {
        match control.shadows().tenants_with_capture().await {
            Ok(tenants) => {
                let control = control.clone();
                tasks.begin(tenants, move |tenant| reconcile_capture(control.clone(), tenant));
            }
            Err(error) => tracing::debug!(%error, "tenants are not known"),
        }
        tokio::time::sleep(CAPTURE).await;
    }
}

async fn reconcile_capture(control: Control, tenant: Tenant) {
    match control.shadows().reconcile_capture(&tenant).await {
        Ok(left) if left.is_empty() => {}
        Ok(left) => {
            tracing::info!(tenant = tenant.name, tables = ?left, "tables are busy; the trigger for \
                shadows waits")
        }
        Err(error) => {
            tracing::warn!(tenant = tenant.name, %error, "failed to look after the triggers for \
                shadows")
        }
    }
}
