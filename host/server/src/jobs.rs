//! Jobs on this host: actions of operators on many messages. Any host carries any of them on; a
//! lease in each row keeps hosts apart.

use std::{
    collections::{BTreeMap, BTreeSet, btree_map::Entry},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use oncebox_control::{Control, InboxDatabase, LeasedJob, OpenJobs};
use oncebox_model::InboxError;
use tokio::{
    sync::{Notify, Semaphore, SemaphorePermit},
    task::JoinSet,
    time::{Instant, sleep, sleep_until},
};
use tokio_util::sync::CancellationToken;

use crate::context::answered;

/// Jobs that a host works on at a time. Each holds a connection while it works on a page.
const AT_ONCE: usize = 4;
/// Databases that are looked into at a time.
const LOOKS: usize = 16;
/// Pause between two looks into every database, for jobs that another host left.
const LOOK: Duration = Duration::from_secs(10);

/// The databases in which jobs may wait, by name; an empty name for the host's.
#[derive(Debug, Default)]
pub(crate) struct JobNotes {
    databases: Mutex<BTreeSet<String>>,
    notify: Notify,
}

impl JobNotes {
    /// Notes that a job may wait in a database.
    pub(crate) fn add(&self, database: &str) {
        self.databases.lock().unwrap_or_else(PoisonError::into_inner).insert(database.to_owned());
        self.notify.notify_one();
    }

    fn take(&self) -> BTreeSet<String> {
        std::mem::take(&mut self.databases.lock().unwrap_or_else(PoisonError::into_inner))
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
        shown: Mutex::default(),
    });
    let (mut running, mut look_at) = (JoinSet::new(), Instant::now());
    while !turns.stop.is_cancelled() {
        let databases = match Instant::now() >= look_at {
            true => {
                look_at = Instant::now() + LOOK;
                turns.every_database().await
            }
            false => turns.notes.take(),
        };
        for look in databases.into_iter().filter_map(|database| turns.begin(database)) {
            let turns = turns.clone();
            running.spawn(async move { turns.turn(look).await });
        }
        while let Some(ended) = running.try_join_next() {
            if let Err(error) = ended {
                tracing::error!(%error, "work on a job failed");
            }
        }
        tokio::select! {
            () = turns.stop.cancelled() => {}
            () = turns.notes.notify.notified() => {}
            () = sleep_until(look_at) => {}
        }
    }
    while running.join_next().await.is_some() {}
}

/// A look into a database. It ends with this value, so also where it panics.
struct Look {
    turns: Arc<Turns>,
    database: String,
}

impl Drop for Look {
    fn drop(&mut self) {
        if self.turns.looked_at().remove(&self.database) == Some(true) {
            self.turns.notes.add(&self.database);
        }
    }
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
    shown: Mutex<ShownJobs>,
}

impl Turns {
    /// Returns the names of every database with an inbox.
    async fn every_database(&self) -> BTreeSet<String> {
        match answered(self.control.tenant_databases().all()).await {
            Ok(databases) => {
                let name = |database: InboxDatabase| database.label.database.unwrap_or_default();
                let names = databases.into_iter().map(name).collect();
                self.shown().keep(&names);
                names
            }
            Err(error) => {
                tracing::debug!(%error, "the databases with an inbox are not known");
                [String::new()].into()
            }
        }
    }

    fn shown(&self) -> MutexGuard<'_, ShownJobs> {
        self.shown.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn looked_at(&self) -> MutexGuard<'_, BTreeMap<String, bool>> {
        self.looked_at.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Begins a look into a database; none while another one is under way, which is then repeated.
    fn begin(self: &Arc<Self>, database: String) -> Option<Look> {
        match self.looked_at().entry(database) {
            Entry::Occupied(mut under_way) => {
                *under_way.get_mut() = true;
                None
            }
            Entry::Vacant(free) => {
                let database = free.key().clone();
                free.insert(false);
                Some(Look { turns: self.clone(), database })
            }
        }
    }

    /// Looks for a job in a database, and works on it for a turn. Returns once it is due again.
    async fn turn(&self, look: Look) {
        let database = look.database.clone();
        let leased = self.lease(&database).await;
        drop(look);
        let (job, place) = match leased {
            Ok(Some(leased)) => leased,
            Ok(None) => return,
            Err(error) => {
                tracing::debug!(database, %error, "the jobs of a database are not known");
                return;
            }
        };
        // Others may wait there.
        self.notes.add(&database);
        let pause = self.control.jobs().work(job, &self.stop).await;
        drop(place);
        tokio::select! {
            () = self.stop.cancelled() => {}
            () = sleep(pause.unwrap_or_default()) => self.notes.add(&database),
        }
    }

    /// Leases a job of a database. A database that does not answer holds none of the places for
    /// work.
    async fn lease(
        &self,
        database: &str,
    ) -> Result<Option<(LeasedJob, SemaphorePermit<'_>)>, InboxError> {
        let jobs = self.control.jobs();
        let inbox = {
            let Ok(_look) = self.looks.acquire().await else { return Ok(None) };
            let inbox = answered(self.control.tenant_databases().by_name(database)).await?;
            let open = answered(jobs.open(&inbox)).await?;
            self.shown().show(database, &open);
            if !open.iter().any(|jobs| jobs.is_waiting) {
                return Ok(None);
            }
            inbox
        };
        let Ok(place) = self.places.acquire().await else { return Ok(None) };
        if self.stop.is_cancelled() {
            return Ok(None);
        }
        let job = answered(jobs.lease(&inbox, &self.owner, None)).await?;
        Ok(job.map(|job| (job, place)))
    }
}

/// The tenants whose gauges this host has set, by the database with their jobs.
#[derive(Default)]
struct ShownJobs(BTreeMap<String, BTreeSet<String>>);

impl ShownJobs {
    /// Sets the gauges of a database's tenants. Those of tenants without jobs become zero.
    fn show(&mut self, database: &str, open: &[OpenJobs]) {
        let tenants: BTreeSet<_> = open.iter().map(|jobs| jobs.tenant.clone()).collect();
        let before = self.0.insert(database.to_owned(), tenants.clone()).unwrap_or_default();
        before.difference(&tenants).for_each(|tenant| set_gauges(tenant, 0, 0, 0.0));
        for jobs in open {
            set_gauges(&jobs.tenant, jobs.running, jobs.paused, jobs.idle_s);
        }
    }

    /// Forgets the databases that are not among these, and sets their tenants' gauges to zero.
    fn keep(&mut self, databases: &BTreeSet<String>) {
        self.0.retain(|database, tenants| {
            let is_kept = databases.contains(database);
            if !is_kept {
                tenants.iter().for_each(|tenant| set_gauges(tenant, 0, 0, 0.0));
            }
            is_kept
        });
    }
}

fn set_gauges(tenant: &str, running: i64, paused: i64, idle_s: f64) {
    metrics::gauge!("oncebox_job_idle_seconds", "tenant" => tenant.to_owned()).set(idle_s.max(0.0));
    for (state, jobs) in [("running", running), ("paused", paused)] {
        metrics::gauge!("oncebox_jobs", "tenant" => tenant.to_owned(), "state" => state)
            .set(jobs as f64);
    }
}

#[cfg(test)]
mod tests {
    use metrics_exporter_prometheus::PrometheusBuilder;

    use super::*;

    // What could go wrong: the gauges of a tenant whose jobs are over, or whose database is gone,
    // keep their last value, and its alert never ends.
    #[test]
    fn gauges_of_tenants_without_jobs_become_zero() {
        let open = |tenant: &str| OpenJobs {
            tenant: tenant.to_owned(),
            running: 2,
            paused: 3,
            idle_s: 1.5,
            is_waiting: true,
        };
        let recorder = PrometheusBuilder::new().build_recorder();
        let shows = |lines: [&str; 3]| {
            let page = recorder.handle().render();
            for line in lines {
                assert!(page.lines().any(|found| found == line), "no `{line}` in {page}");
            }
        };
        metrics::with_local_recorder(&recorder, || {
            let mut shown = ShownJobs::default();
            shown.show("", &[open("a"), open("b")]);
            shown.show("own", &[open("own")]);
            shows([
                "oncebox_jobs{tenant=\"a\",state=\"running\"} 2",
                "oncebox_jobs{tenant=\"a\",state=\"paused\"} 3",
                "oncebox_job_idle_seconds{tenant=\"own\"} 1.5",
            ]);
            shown.show("", &[open("b")]);
            shown.keep(&[String::new()].into());
            shows([
                "oncebox_jobs{tenant=\"a\",state=\"running\"} 0",
                "oncebox_jobs{tenant=\"b\",state=\"running\"} 2",
                "oncebox_job_idle_seconds{tenant=\"own\"} 0",
            ]);
            assert_eq!(shown.0, [(String::new(), ["b".to_owned()].into())].into());
        });
    }
}
