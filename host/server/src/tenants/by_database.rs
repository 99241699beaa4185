//! Work on tenants, for one tenant of each database at a time: a database that is away, or slow,
//! holds up the work on its own tenants alone.

use std::{collections::HashMap, sync::Arc};

use oncebox_control::Tenant;
use tokio::sync::Semaphore;
use tokio_util::task::AbortOnDropHandle;

/// Databases at a time: work may hold a connection of the host's database.
const AT_ONCE: usize = 16;

/// The work that is under way, by the database of its tenants; none for the host's. It ends with
/// this value.
pub(crate) struct DatabaseTasks {
    under_way: HashMap<Option<String>, AbortOnDropHandle<()>>,
    turns: Arc<Semaphore>,
}

impl Default for DatabaseTasks {
    fn default() -> Self {
        Self { under_way: HashMap::new(), turns: Arc::new(Semaphore::new(AT_ONCE)) }
    }
}

impl DatabaseTasks {
    /// Begins to work on tenants, one after the other in each database. A database whose earlier
    /// work is under way is left out.
    pub(crate) fn begin<W, F>(&mut self, tenants: Vec<Tenant>, work: W)
    where
        W: Fn(Tenant) -> F + Clone + Send + 'static,
        F: Future<Output = ()> + Send,
    {
        self.under_way.retain(|_, task| !task.is_finished());
        let mut by_database: HashMap<_, Vec<_>> = HashMap::new();
        for tenant in tenants {
            by_database.entry(tenant.database.clone()).or_default().push(tenant);
        }
        for (database, tenants) in by_database {
            let (work, turns) = (work.clone(), self.turns.clone());
            self.under_way.entry(database).or_insert_with(|| {
                AbortOnDropHandle::new(tokio::spawn(async move {
                    let _turn = turns.acquire_owned().await;
                    for tenant in tenants {
                        work(tenant).await;
                    }
                }))
            });
        }
    }
}
