//! Storage budgets: inboxes that are larger than their tenant's budget, or will be.

use std::collections::{BTreeMap, btree_map::Entry};

use oncebox_model::error::InboxError;

use super::{Finding, Severity};
use crate::{
    database::tenant_database::DatabaseLabel,
    handles::Doctor,
    storage::{BudgetExcess, TenantStorage},
    tenants::Tenant,
};

/// Name of the check.
const CHECK: &str = "storage_budgets";

impl Doctor<'_> {
    /// Checks that the inbox of every tenant with a storage budget is within it, now and in 30
    /// days. Measures only databases with such a tenant.
    pub(super) async fn budgets_are_kept(&self) -> Vec<Finding> {
        let tenants = match self.0.tenants().list().await {
            Ok(tenants) => tenants,
            Err(error) => return vec![self.unknown_budget(&error)],
        };
        let has_budget = |tenant: &Tenant| {
            tenant.limits.storage_budget_bytes.is_some() && !tenant.state.is_deleting()
        };
        let (mut findings, mut measured) = (Vec::new(), BTreeMap::new());
        for tenant in tenants.into_iter().filter(has_budget) {
            match self.measured(&tenant, &mut measured).await {
                Ok(storage) => findings.extend(self.above_budget(&tenant, &storage)),
                Err(error) => findings.push(self.unknown_budget(&error)),
            }
        }
        if findings.is_empty() {
            let text = "every inbox is within its tenant's storage budget, where there is one";
            findings.push(self.budget_finding(Severity::Ok, text.to_owned()));
        }
        findings
    }

    /// Returns the storage of a tenant. `measured` holds the reports of databases.
    async fn measured(
        &self,
        tenant: &Tenant,
        measured: &mut BTreeMap<DatabaseLabel, Vec<TenantStorage>>,
    ) -> Result<TenantStorage, InboxError> {
        let database = self.0.tenant_databases().inbox_of(tenant)?;
        let of_database = match measured.entry(database.label.clone()) {
            Entry::Occupied(known) => known.into_mut(),
            Entry::Vacant(new) => new.insert(self.0.storage().report(&database).await?.tenants),
        };
        let found = of_database.iter().find(|storage| storage.tenant == tenant.name);
        Ok(found.cloned().unwrap_or_else(|| TenantStorage::empty(&tenant.name)))
    }

    fn above_budget(&self, tenant: &Tenant, storage: &TenantStorage) -> Option<Finding> {
        let budget = tenant.limits.storage_budget_bytes;
        let (name, budget_bytes) = (&tenant.name, budget.unwrap_or_default());
        let text = match storage.excess(budget)? {
            BudgetExcess::Now => format!(
                "the inbox of tenant `{name}` takes {} bytes, more than its budget of \
                    {budget_bytes}",
                storage.sum(|consumer| consumer.bytes)
            ),
            BudgetExcess::In30Days => format!(
                "the inbox of tenant `{name}` will take {} bytes in 30 days, more than its budget \
                    of {budget_bytes}",
                storage.sum(|consumer| consumer.bytes_in_30_days)
            ),
        };
        Some(self.budget_finding(Severity::Warning, text).advise(format!(
            "`oncebox storage --tenant {name}` shows which consumer grows; messages go on. Give \
                that one a shorter `retention` in a new consumer, or keep fewer payloads, or raise \
                the budget: `oncebox tenant limits {name} --storage-budget-bytes …`"
        )))
    }

    fn unknown_budget(&self, error: &InboxError) -> Finding {
        let text = format!("the size of inboxes is not known: {error}");
        self.budget_finding(Severity::Unknown, text)
    }

    fn budget_finding(&self, severity: Severity, found: String) -> Finding {
        self.of_host_database(CHECK, severity, found)
    }
}
