//! This host's heartbeat, and its reports on each consumer, in the host's database.

use std::{collections::HashMap, sync::Arc, time::Duration};

use futures::FutureExt;
use oncebox_control::{ConsumerStatus, Control, Progress};
use oncebox_model::{BreakerState, InboxError};
use oncebox_relay::Relay;
use tokio::{task::JoinHandle, time::Instant};

use crate::{
    compile::Compilations,
    consumer::{duplicates::Duplicates, starts::Starts},
    context::answered,
    http::Scrapes,
    outgoing::breaker_report,
};

/// Pause between two heartbeats of a host.
const BEAT: Duration = Duration::from_secs(2);

/// The host's rows.
pub(crate) struct Heartbeat {
    control: Control,
    components: Compilations,
    starting: Arc<Starts>,
    duplicates: Arc<Duplicates>,
    scrapes: Arc<Scrapes>,
    name: String,
    host_id: Option<i64>,
    /// The task that writes the host's row. A caller that stops waiting in the middle must not
    /// leave a row that belongs to no host.
    row: Option<JoinHandle<Result<i64, InboxError>>>,
    beat_due: Instant,
    /// The last reported status of each consumer.
    published: HashMap<i32, ConsumerStatus>,
    /// Transitions of endpoints' breakers at the last report; none where it is lost.
    endpoints_seen: Option<u64>,
}

/// Reports this host's progress with deployments, from wherever they are loaded.
#[derive(Clone)]
pub(crate) struct Reporter {
    control: Control,
    host_id: Option<i64>,
}

impl Heartbeat {
    pub(crate) fn new(
        control: Control,
        components: Compilations,
        starting: Arc<Starts>,
        duplicates: Arc<Duplicates>,
        scrapes: Arc<Scrapes>,
        name: String,
    ) -> Self {
        Self {
            control,
            components,
            starting,
            duplicates,
            scrapes,
            name,
            host_id: None,
            row: None,
            beat_due: Instant::now(),
            published: HashMap::new(),
            endpoints_seen: None,
        }
    }

    /// Sends the heartbeat, where it is due. A host that was silent for so long that its row was
    /// deleted begins again. Returns true then, as it does the first time: every earlier report is
    /// lost.
    pub(crate) async fn beat(&mut self) -> Result<bool, InboxError> {
        if self.beat_due > Instant::now() {
            return Ok(false);
        }
        let is_known = match self.host_id {
            Some(host_id) => answered(self.control.hosts().beat(host_id)).await?,
            None => false,
        };
        if !is_known {
            let host_id = answered(self.write_row()).await?;
            self.components.on_host(host_id);
            self.starting.on_host(host_id);
            self.host_id = Some(host_id);
            self.published.clear();
            self.endpoints_seen = None;
        }
        self.beat_due = Instant::now() + BEAT;
        // Without an answer the counts are lost, as with an error.
        let _ = answered(self.duplicates.report(&self.control).map(Ok)).await;
        self.report_scrape().await;
        Ok(!is_known)
    }

    /// Reports that somebody asked for this host's metrics since the last heartbeat. A report that
    /// is lost is made up for by the next scrape.
    async fn report_scrape(&self) {
        let Some(host_id) = self.host_id.filter(|_| self.scrapes.take()) else { return };
        if let Err(error) = answered(self.control.hosts().report_scrape(host_id)).await {
            tracing::debug!(%error, "failed to report that the metrics were read");
        }
    }

    /// Writes the host's row, or waits for the task that is writing it.
    async fn write_row(&mut self) -> Result<i64, InboxError> {
        let row = self.row.get_or_insert_with(|| {
            let (control, name) = (self.control.clone(), self.name.clone());
            tokio::spawn(async move { control.hosts().start(&name).await })
        });
        let written = row.await;
        self.row = None;
        written.unwrap_or_else(|ended| {
            Err(InboxError::Unreachable(sqlx::Error::Io(std::io::Error::other(ended))))
        })
    }

    /// Writes this host's status of each consumer, where it changed.
    pub(crate) async fn publish(
        &mut self,
        runs: impl Iterator<Item = ConsumerStatus>,
    ) -> Result<(), InboxError> {
        let Some(host_id) = self.host_id else { return Ok(()) };
        let runs: HashMap<i32, ConsumerStatus> = runs.map(|run| (run.consumer_id, run)).collect();
        let changed: Vec<ConsumerStatus> = runs
            .values()
            .filter(|run| self.published.get(&run.consumer_id) != Some(run))
            .cloned()
            .collect();
        if !changed.is_empty() {
            self.control.hosts().report_statuses(host_id, &changed).await?;
        }
        self.published = runs;
        Ok(())
    }

    /// Returns a reporter of this host's progress, for tasks beside the loop.
    pub(crate) fn reporter(&self) -> Reporter {
        Reporter { control: self.control.clone(), host_id: self.host_id }
    }

    /// Reports this host's progress with a consumer's deployments.
    pub(crate) async fn report(&self, consumer_id: i32, generation: i64, progress: Progress) {
        self.reporter().report(consumer_id, generation, progress).await;
    }

    /// Writes the circuit breakers of a consumer that are not closed here; operators read them.
    /// Returns false where they could not be written.
    pub(crate) async fn report_breakers(
        &self,
        consumer_id: i32,
        breakers: &[BreakerState],
    ) -> bool {
        let Some(host_id) = self.host_id else { return false };
        let told = self.control.hosts().report_breakers(host_id, consumer_id, breakers).await;
        told.inspect_err(
            |error| tracing::warn!(%error, "failed to report the state of circuit breakers"),
        )
        .is_ok()
    }

    /// Writes the circuit breakers of endpoints that are not closed here, where one turned since
    /// the last report; operators read them. A report that fails is repeated in the next round.
    pub(crate) async fn report_endpoints(&mut self, relay: &Relay) {
        let Some(host_id) = self.host_id else { return };
        let Some(breakers) = relay.breakers_changed(&mut self.endpoints_seen) else { return };
        let reports: Vec<_> = breakers.into_iter().map(breaker_report).collect();
        let told = answered(self.control.endpoints().report_breakers(host_id, &reports)).await;
        if let Err(error) = told {
            self.endpoints_seen = None;
            tracing::warn!(%error, "failed to report the circuit breakers of endpoints");
        }
    }

    /// Removes this host's rows, so that nothing waits for it any longer.
    pub(crate) async fn end(&mut self) {
        self.duplicates.report(&self.control).await;
        if self.row.is_some() {
            self.host_id = answered(self.write_row()).await.ok();
        }
        self.starting.quiet().await;
        if let Some(host_id) = self.host_id
            && let Err(error) = self.control.hosts().end(host_id).await
        {
            tracing::debug!(%error, "failed to take this host's rows away; they are forgotten by \
                themselves");
        }
    }
}

impl Reporter {
    /// Reports this host's progress with a consumer's deployments. A caller that waits for it waits
    /// a little longer when the report is lost; nothing else depends on it.
    pub(crate) async fn report(&self, consumer_id: i32, generation: i64, progress: Progress) {
        let Some(host_id) = self.host_id else { return };
        if let Err(error) =
            self.control.hosts().report_progress(host_id, consumer_id, generation, &progress).await
        {
            tracing::warn!(%error, ?progress, generation, "failed to report how far this host is");
        }
    }
}
