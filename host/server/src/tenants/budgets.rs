//! The bounds on connections and transactions, for each database server.
//!
//! Tenants share what is scarce with those of their own server alone. So a server that is away, or
//! slow, keeps nothing from the tenants of another one, whatever their number.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use oncebox_control::Tenant;
use oncebox_inbox::Budget;

use crate::config::Config;

/// The budgets of a host.
pub(crate) struct Budgets {
    /// For the host's database, and those that tenants named.
    own: Arc<Budget>,
    /// For the databases in which hosts place tenants, by name.
    named: BTreeMap<String, Arc<Budget>>,
}

impl Budgets {
    /// Makes the budgets of a host from its configuration.
    pub(crate) fn of(config: &Config) -> Self {
        let budget =
            |connections_max| Budget::of(connections_max, config.host_bounds(connections_max));
        let named = config
            .databases
            .iter()
            .map(|database| (database.name.clone(), budget(database.connections_max)));
        Self { own: budget(config.database.connections_max), named: named.collect() }
    }

    /// Returns the budget of a tenant. One whose database this host's configuration does not name
    /// has that of the host's database.
    pub(crate) fn of_tenant(&self, tenant: &Tenant) -> &Arc<Budget> {
        tenant.database_name().and_then(|name| self.named.get(name)).unwrap_or(&self.own)
    }

    /// Forgets a tenant that has no sessions any more.
    pub(crate) fn forget(&self, tenant_id: i32) {
        self.all().for_each(|(_, budget)| budget.scheduler().forget(tenant_id));
    }

    /// Closes connections that were unused for at least this long, and shows how many are open.
    pub(crate) async fn close_unused(&self, unused: Duration) {
        let closing = self.all().map(|(_, budget)| budget.close_unused(unused));
        futures::future::join_all(closing).await;
        let mut sum = 0;
        for (name, budget) in self.all() {
            let in_use = budget.in_use();
            sum += in_use;
            if let Some(database) = name.map(str::to_owned) {
                metrics::gauge!("oncebox_named_database_connections", "database" => database)
                    .set(in_use as f64);
            }
        }
        metrics::gauge!("oncebox_database_connections").set(sum as f64);
    }

    fn all(&self) -> impl Iterator<Item = (Option<&str>, &Arc<Budget>)> {
        let named = self.named.iter().map(|(name, budget)| (Some(name.as_str()), budget));
        std::iter::once((None, &self.own)).chain(named)
    }
}
