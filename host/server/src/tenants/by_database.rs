//! Work on tenants, for one tenant of each database at a time: a database that is away, or slow,
//! holds up the work on its own tenants alone.

use std::collections::HashMap;

use oncebox_control::Tenant;
use tokio_util::task::AbortOnDropHandle;

/// The work that is under way, by the database of its tenants; none for the host's. It ends with
/// this value.
#[derive(Default)]
pub(crate) struct DatabaseTasks(HashMap<Option<String>, AbortOnDropHandle<()>>);

impl DatabaseTasks {
    /// Begins to work on tenants, one after the other in each database. A database whose earlier
    /// work is under way is left out.
    pub(crate) fn begin<W, F>(&mut self, tenants: Vec<Tenant>, work: W)
    where
        W: Fn(Tenant) -> F + Clone + Send + 'static,
        F: Future<Output = ()> + Send,
    {
        self.0.retain(|_, task| !task.is_finished());
        let mut by_database: HashMap<_, Vec<_>> = HashMap::new();
        for tenant in tenants {
            by_database.entry(tenant.database.clone()).or_default().push(tenant);
        }
        for (database, tenants) in by_database {
            let work = work.clone();
            self.0.entry(database).or_insert_with(|| {
                AbortOnDropHandle::new(tokio::spawn(async move {
                    for tenant in tenants {
                        work(tenant).await;
                    }
                }))
            });
        }
    }
}
