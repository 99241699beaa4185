//! The relay of a process: the loops of all databases, and what they share.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use oncebox_model::outgoing::OutgoingWakeup;
use tokio::{
    sync::Semaphore,
    time::{MissedTickBehavior, interval, timeout},
};
use tokio_util::{sync::CancellationToken, task::AbortOnDropHandle};

use crate::{
    database::DatabaseLoop,
    directory::Directory,
    endpoints::Endpoints,
    host::{EndpointBreakerState, RelayDatabase, RelayHost},
    kafka::Producers,
    store::Store,
};

/// Pause between two looks for databases.
const LOOK: Duration = Duration::from_secs(2);
/// Longest time that the host's database may take to list them.
const PATIENCE: Duration = Duration::from_secs(15);
/// Kilobytes of payloads and headers of this process's leases, over all pairs.
const ROOM_KB: usize = 256 << 10;
/// Time after which a producer that nobody uses is closed.
const UNUSED: Duration = Duration::from_secs(60);

/// What the tasks of a relay share.
pub(crate) struct Shared {
    pub(crate) host: Arc<dyn RelayHost>,
    pub(crate) directory: Directory,
    pub(crate) producers: Producers,
    pub(crate) endpoints: Endpoints,
    /// Room for what is leased, in kilobytes.
    pub(crate) room: Arc<Semaphore>,
    /// Name of this process in leases.
    pub(crate) owner: String,
}

/// The relay of a host process, for all databases of its tenants.
pub struct Relay {
    shared: Arc<Shared>,
    /// Wakeups by the name of a database; none for the host's.
    wakeups: Mutex<HashMap<Option<String>, Arc<OutgoingWakeup>>>,
}

/// A database whose loop runs.
struct RunningLoop {
    store: Arc<Store>,
    stop: CancellationToken,
    task: AbortOnDropHandle<()>,
}

impl Relay {
    /// Creates the relay of a host, under the name that its leases carry. It does nothing before
    /// [`Relay::run`].
    pub fn new(host: Arc<dyn RelayHost>, owner: String) -> Arc<Self> {
        let shared = Shared {
            directory: Directory::new(host.directory()),
            endpoints: Endpoints::new(host.clone()),
            host,
            producers: Producers::default(),
            room: Arc::new(Semaphore::new(ROOM_KB)),
            owner,
        };
        Arc::new(Self { shared: Arc::new(shared), wakeups: Mutex::default() })
    }

    /// Returns the wakeup of a database by its name; none for the host's.
    pub fn wakeup(&self, database: Option<&str>) -> Arc<OutgoingWakeup> {
        self.wakeups().entry(database.map(str::to_owned)).or_default().clone()
    }

    /// Returns the circuit breakers of endpoints that are not closed on this host, where one turned
    /// since `seen`, which the call brings up to date. With none in it the call always
    /// returns them.
    pub fn breakers_changed(&self, seen: &mut Option<u64>) -> Option<Vec<EndpointBreakerState>> {
        self.shared.endpoints.breakers_changed(seen)
    }

    /// Sends outgoing messages until `stop` is cancelled. Then gives back what it has leased and
    /// not begun to send, and waits for the answers of the rest. Nothing goes on where this future
    /// is dropped.
    pub async fn run(self: Arc<Self>, stop: CancellationToken) {
        let mut running: HashMap<Option<String>, RunningLoop> = HashMap::new();
        let mut ending = Vec::new();
        let mut every = interval(LOOK);
        every.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                () = stop.cancelled() => break,
                _ = every.tick() => {}
            }
            let listed = tokio::select! {
                () = stop.cancelled() => break,
                listed = timeout(PATIENCE, self.shared.host.databases()) => listed,
            };
            match listed {
                Ok(Ok(databases)) => {
                    ending.extend(self.serve(&mut running, databases, &stop));
                }
                Ok(Err(error)) => {
                    tracing::debug!(%error, "the databases with outgoing messages are not known");
                }
                Err(_) => tracing::debug!("the databases with outgoing messages are not known"),
            }
            ending.retain(|task: &AbortOnDropHandle<()>| !task.is_finished());
            self.shared.producers.close_unused(UNUSED);
        }
        for task in running.into_values().map(|of| of.task).chain(ending) {
            let _ = task.await; // a panic is in the log
        }
    }

    /// Begins the loops of new databases, and ends and returns those of databases that are gone.
    fn serve(
        &self,
        running: &mut HashMap<Option<String>, RunningLoop>,
        databases: Vec<RelayDatabase>,
        stop: &CancellationToken,
    ) -> Vec<AbortOnDropHandle<()>> {
        let is_listed = |name: &Option<String>| databases.iter().any(|of| of.name == *name);
        let gone = running.extract_if(|name, of| !is_listed(name) || of.task.is_finished());
        let end = |(_, of): (_, RunningLoop)| {
            // Its wakeup stays: consumers have it.
            of.stop.cancel();
            of.task
        };
        let ending = gone.map(end).collect();
        for RelayDatabase { name, pool } in databases {
            if let Some(of) = running.get(&name) {
                of.store.set_pool(pool);
                continue;
            }
            let store = Arc::new(Store::new(pool));
            let stop = stop.child_token();
            let database = DatabaseLoop {
                shared: self.shared.clone(),
                store: store.clone(),
                wakeup: self.wakeup(name.as_deref()),
                name: name.clone(),
            };
            let task = AbortOnDropHandle::new(tokio::spawn(database.run(stop.clone())));
            running.insert(name, RunningLoop { store, stop, task });
        }
        ending
    }

    fn wakeups(&self) -> MutexGuard<'_, HashMap<Option<String>, Arc<OutgoingWakeup>>> {
        self.wakeups.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
