//! Jobs on this host: actions of operators on many messages. Any host carries any of them on; a
//! lease in each row keeps hosts apart.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use oncebox_control::{Control, LeasedJob};
use oncebox_model::InboxError;
use tokio::{
    sync::{Notify, Semaphore, SemaphorePermit},
    task::JoinSet,
    time::{Instant, sleep_until},
};
use tokio_util::sync::CancellationToken;

use crate::context::answered;

/// Jobs that a host works on at a time. Each holds a connection while it works on a page.
const AT_ONCE: usize = 4;
/// Databases that are looked into at a time.
const LOOKS: usize = 16;
/// Pause between two looks into every database, for jobs that another host left.
const LOOK: Duration = Duration::from_secs(10);

/// The databases in which jobs may wait: names of tenants with databases of their own, and an empty
/// name for the host's.
#[derive(Debug, Default)]
pub(crate) struct JobNotes {
    tenants: Mutex<BTreeSet<String>>,
    notify: Notify,
}

impl JobNotes {
    /// Notes that a job may wait in a database.
    pub(crate) fn add(&self, tenant: &str) {
        self.tenants.lock().unwrap_or_else(PoisonError::into_inner).insert(tenant.to_owned());
        self.notify.notify_one();
    }

    fn take(&self) -> BTreeSet<String> {
        std::mem::take(&mut self.tenants.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// Works on jobs until `stop` is cancelled, and gives back the leases of those under way.
pub(crate) async fn keep(
    control: Control,
    owner: String,
    notes: Arc<JobNotes>,
    stop: CancellationToken,
) {
    let turns = Arc::new(Turns {
        control,
        owner,
        notes,
        stop,
        looks: Semaphore::new(LOOKS),
        places: Semaphore::new(AT_ONCE),
        looked_at: Mutex::default(),
    });
    let (mut running, mut look_at) = (JoinSet::new(), Instant::now());
    while !turns.stop.is_cancelled() {
        let tenants = match Instant::now() >= look_at {
            true => {
                look_at = Instant::now() + LOOK;
                turns.every_database().await
            }
            false => turns.notes.take(),
        };
        for tenant in tenants.into_iter().filter(|tenant| turns.begin(tenant)) {
            let turns = turns.clone();
            running.spawn(async move { turns.turn(&tenant).await });
        }
        while running.try_join_next().is_some() {}
        tokio::select! {
            () = turns.stop.cancelled() => {}
            () = turns.notes.notify.notified() => {}
            () = sleep_until(look_at) => {}
        }
    }
    while running.join_next().await.is_some() {}
}

/// The turns of this host's jobs.
struct Turns {
    control: Control,
    owner: String,
    notes: Arc<JobNotes>,
    stop: CancellationToken,
    looks: Semaphore,
    places: Semaphore,
    /// Databases that are looked into, and whether one was noted again meanwhile.
    looked_at: Mutex<BTreeMap<String, bool>>,
}

impl Turns {
    /// Returns the names of every database with an inbox.
    async fn every_database(&self) -> BTreeSet<String> {
        let dedicated = answered(self.control.tenant_databases().dedicated_tenants()).await;
        let dedicated = dedicated.unwrap_or_else(|error| {
            tracing::debug!(%error, "the databases with an inbox are not known");
            Vec::new()
        });
        dedicated.into_iter().map(|source| source.tenant).chain([String::new()]).collect()
    }

    fn looked_at(&self) -> MutexGuard<'_, BTreeMap<String, bool>> {
        self.looked_at.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Begins a look into a database. Returns false while another one is under way, which is then
    /// repeated.
    fn begin(&self, tenant: &str) -> bool {
        let mut looked_at = self.looked_at();
        match looked_at.get_mut(tenant) {
            Some(again) => {
                *again = true;
                false
            }
            None => looked_at.insert(tenant.to_owned(), false).is_none(),
        }
    }

    /// Ends a look into a database.
    fn end(&self, tenant: &str) {
        if self.looked_at().remove(tenant) == Some(true) {
            self.notes.add(tenant);
        }
    }

    /// Looks for a job in a database, and works on it for a turn.
    async fn turn(&self, tenant: &str) {
        let leased = self.lease(tenant).await;
        self.end(tenant);
        match leased {
            Ok(Some((job, _place))) => {
                // Others may wait there.
                self.notes.add(tenant);
                self.control.jobs().work(job, &self.stop).await;
                self.notes.add(tenant);
            }
            Ok(None) => {}
            Err(error) => {
                tracing::debug!(tenant, %error, "the jobs of a database are not known");
            }
        }
    }

    /// Leases a job of a database. A database that does not answer holds none of the places for
    /// work.
    async fn lease(
        &self,
        tenant: &str,
    ) -> Result<Option<(LeasedJob, SemaphorePermit<'_>)>, InboxError> {
        let jobs = self.control.jobs();
        let database = {
            let Ok(_look) = self.looks.acquire().await else { return Ok(None) };
            let database = answered(jobs.database(tenant)).await?;
            if !answered(jobs.is_waiting(&database)).await? {
                return Ok(None);
            }
            database
        };
        let Ok(place) = self.places.acquire().await else { return Ok(None) };
        if self.stop.is_cancelled() {
            return Ok(None);
        }
        let job = answered(jobs.lease(&database, &self.owner, None)).await?;
        Ok(job.map(|job| (job, place)))
    }
}
