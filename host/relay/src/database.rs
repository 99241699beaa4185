//! The loop of one database: finds the pairs with something due, and begins a task for each.
//!
//! The host names the pairs for which it has committed messages that are due. Their tasks begin at
//! once, or after the pause of the task before; a task that runs is told. Beside that it looks
//! every second. A look asks what is unsent, so that it finds what becomes due, what other hosts
//! left, and leases that ran out.

use std::{
    collections::HashMap,
    sync::{Arc, atomic::AtomicBool},
    time::Duration,
};

use oncebox_model::{error::InboxError, outgoing::OutgoingWakeup};
use tokio::{
    task::{Id, JoinError, JoinSet},
    time::{Instant, sleep, sleep_until, timeout},
};
use tokio_util::sync::CancellationToken;

use crate::{
    metric::Gauges,
    pair::{ENDING_MAX, PairTask},
    pair_state::{PairEnd, PairKey, PairState},
    relay::Shared,
    store::{LookStart, Store},
};

/// Time between two looks.
const EVERY: Duration = Duration::from_secs(1);
/// Shortest rest after a look.
const GAP_MIN: Duration = Duration::from_millis(10);
/// Rest after a look, as a multiple of the time that the look took.
const REST: u32 = 4;
/// Longest such rest.
const REST_MAX: Duration = Duration::from_secs(5);
/// Longest time that a database may take to answer a look.
const PATIENCE: Duration = Duration::from_secs(10);
/// Longest pause after looks that failed.
const PAUSE_MAX: Duration = Duration::from_secs(15);
/// Time between two counts of what is open.
const COUNT: Duration = Duration::from_secs(10);

/// The loop of one database.
pub(crate) struct DatabaseLoop {
    pub(crate) shared: Arc<Shared>,
    pub(crate) store: Arc<Store>,
    pub(crate) wakeup: Arc<OutgoingWakeup>,
    /// Name of the database; none for the host's.
    pub(crate) name: Option<String>,
}

/// The pairs of a database, and the tasks that work on them.
#[derive(Default)]
struct Pairs {
    states: HashMap<PairKey, PairState>,
    tasks: JoinSet<PairEnd>,
    meant: HashMap<Id, PairKey>,
}

impl DatabaseLoop {
    /// Sends what becomes due until `stop` is cancelled, then waits for what is under way.
    pub(crate) async fn run(self, stop: CancellationToken) {
        let counting = self.count();
        let sending = self.send(&stop);
        tokio::select! {
            () = sending => {}
            () = counting => {}
        }
    }

    async fn send(&self, stop: &CancellationToken) {
        let mut pairs = Pairs::default();
        let (mut look_at, mut not_before) = (Instant::now(), Instant::now());
        let mut failures = 0;
        let mut start = LookStart::default();
        loop {
            tokio::select! {
                biased;
                () = stop.cancelled() => break,
                Some(ended) = pairs.tasks.join_next_with_id() => {
                    let again = self.ended(&mut pairs, ended);
                    self.begin(&mut pairs, again, stop);
                    continue;
                }
                () = self.wakeup.notified() => {
                    self.begin(&mut pairs, self.wakeup.take(), stop);
                    continue;
                }
                () = sleep_until(look_at.max(not_before)) => {}
            }
            let began = Instant::now();
            pairs.states.retain(|_, state| !state.is_forgettable(began));
            let looked = tokio::select! {
                () = stop.cancelled() => break,
                looked = self.look(&start) => looked,
            };
            match looked {
                Ok((due, next)) => {
                    start = next;
                    if failures > 0 {
                        tracing::info!(database = self.name, "outgoing messages are sent again");
                    }
                    failures = 0;
                    self.begin(&mut pairs, due, stop);
                    look_at = began + EVERY;
                    not_before = Instant::now() + (began.elapsed() * REST).clamp(GAP_MIN, REST_MAX);
                }
                Err(error) => {
                    failures += 1;
                    self.log_failure(failures, &error);
                    look_at = Instant::now() + (EVERY * failures).min(PAUSE_MAX);
                    not_before = look_at;
                }
            }
        }
        self.finish(pairs).await;
    }

    async fn look(&self, start: &LookStart) -> Result<(Vec<(i32, String)>, LookStart), InboxError> {
        let silent =
            |_| InboxError::Unreachable(sqlx::Error::Io(std::io::ErrorKind::TimedOut.into()));
        timeout(PATIENCE, self.store.due(start)).await.map_err(silent)?
    }

    /// Begins the tasks of pairs that were found due.
    fn begin(
        &self,
        pairs: &mut Pairs,
        due: impl IntoIterator<Item = (i32, String)>,
        stop: &CancellationToken,
    ) {
        let now = Instant::now();
        for (tenant_id, destination) in due {
            let key = PairKey { tenant_id, destination };
            let state = pairs.states.entry(key.clone()).or_default();
            if !state.begins(now) {
                continue;
            }
            let task = PairTask {
                shared: self.shared.clone(),
                store: Arc::new(self.store.of_tenant(tenant_id)),
                destination: key.destination.parse().ok(),
                named: state.named(),
                key: key.clone(),
                is_probing: state.is_probing(),
                stop: stop.clone(),
                is_halted: AtomicBool::new(false),
            };
            let handle = pairs.tasks.spawn(Arc::new(task).drain());
            pairs.meant.insert(handle.id(), key);
        }
    }

    /// Notes the end of a task, and returns its pair where that has something due again.
    fn ended(
        &self,
        pairs: &mut Pairs,
        ended: Result<(Id, PairEnd), JoinError>,
    ) -> Option<(i32, String)> {
        let (id, end) = match ended {
            Ok(ended) => ended,
            Err(error) => {
                (error.id(), PairEnd::Database("a task of the relay panicked".to_owned()))
            }
        };
        let key = pairs.meant.remove(&id)?;
        let state = pairs.states.entry(key.clone()).or_default();
        let (before, troubles) = (state.failures(), state.troubles());
        let is_due = state.ends(&end, Instant::now());
        match &end {
            PairEnd::Away { error, .. } if before == 0 => tracing::warn!(
                tenant_id = key.tenant_id,
                destination = key.destination,
                error,
                "the destination of outgoing messages is away; they wait, and it is tried again"
            ),
            PairEnd::Away { error, .. } => tracing::debug!(
                tenant_id = key.tenant_id,
                destination = key.destination,
                error,
                "the destination of outgoing messages is still away"
            ),
            PairEnd::Database(error) if troubles == 0 => tracing::warn!(
                tenant_id = key.tenant_id,
                destination = key.destination,
                error,
                "outgoing messages wait for a database"
            ),
            PairEnd::Database(error) => tracing::debug!(
                tenant_id = key.tenant_id,
                destination = key.destination,
                error,
                "outgoing messages still wait for a database"
            ),
            PairEnd::Dry if before > 0 => tracing::info!(
                tenant_id = key.tenant_id,
                destination = key.destination,
                "the destination of outgoing messages is back"
            ),
            PairEnd::Limited { error, rest } => tracing::info!(
                tenant_id = key.tenant_id,
                destination = key.destination,
                error,
                rest_ms = rest.as_millis() as u64,
                "the destination of outgoing messages asks for fewer; they wait"
            ),
            PairEnd::Dry | PairEnd::Resting | PairEnd::BreakerOpen(_) => {}
        }
        is_due.then_some((key.tenant_id, key.destination))
    }

    /// Waits for the tasks, which have been told to stop.
    async fn finish(&self, mut pairs: Pairs) {
        let all = async { while pairs.tasks.join_next().await.is_some() {} };
        if timeout(ENDING_MAX, all).await.is_err() {
            tracing::warn!(
                database = self.name,
                "outgoing messages are still under way; they may be sent a second time"
            );
        }
    }

    fn log_failure(&self, failures: u32, error: &InboxError) {
        let database = self.name.as_deref();
        if failures == 1 {
            tracing::warn!(database, %error, "failed to look for outgoing messages; they wait");
        } else {
            tracing::debug!(database, %error, "still failed to look for outgoing messages");
        }
    }

    /// Counts what is open, for the metrics, until dropped.
    async fn count(&self) {
        let mut gauges = Cleared(Gauges::default());
        loop {
            match timeout(PATIENCE, self.store.figures()).await {
                Ok(Ok(figures)) => gauges.0.set(&figures),
                Ok(Err(error)) => tracing::debug!(%error, "outgoing messages are not counted"),
                Err(_) => tracing::debug!("outgoing messages are not counted in time"),
            }
            sleep(COUNT).await;
        }
    }
}

/// Gauges that are set to zero when nobody sets them any more.
struct Cleared(Gauges);

impl Drop for Cleared {
    fn drop(&mut self) {
        self.0.clear();
    }
}
