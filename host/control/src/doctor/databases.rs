//! The databases in which hosts place tenants are those that the tenants are in.

use oncebox_model::error::InboxError;

use super::{Finding, Severity};
use crate::handles::Doctor;

/// Name of the check.
const CHECK: &str = "databases";

impl Doctor<'_> {
    /// Checks each database that the settings of this process, or the rows of tenants, name.
    /// Returns nothing where there is none.
    pub(super) async fn databases_are_themselves(&self) -> Vec<Finding> {
        let databases = match self.0.tenant_databases().named().await {
            Ok(databases) => databases,
            Err(error) => {
                let found = format!("the database does not tell: {error}");
                return vec![self.of_databases(Severity::Unknown, found)];
            }
        };
        let of_tenants = self.0.tenant_databases();
        let checks = databases.iter().map(|database| of_tenants.check_named(database));
        let checked = futures::future::join_all(checks).await;
        let faults: Vec<_> = std::iter::zip(&databases, checked)
            .filter_map(|(database, checked)| Some((&database.name, checked.err()?)))
            .map(|(name, error)| self.fault(name, &error))
            .collect();
        if faults.is_empty() && !databases.is_empty() {
            let text = "every database of `[[databases]]` answers, and is the one of its tenants";
            return vec![self.of_databases(Severity::Ok, text.to_owned())];
        }
        faults
    }

    /// Finds moves of tenants whose last try failed.
    pub(super) async fn moves_go_on(&self) -> Vec<Finding> {
        const FAILED: &str = "SELECT t.name, m.step IN ('stopping', 'copying'), \
                format('to `%s` (step `%s`) failed at its last try: %s', m.to_database, m.step, \
                m.error) \
            FROM oncebox.tenant_move m JOIN oncebox.tenant t USING (tenant_id) \
            WHERE m.error IS NOT NULL ORDER BY t.name";
        let failed: Vec<(String, bool, String)> =
            match sqlx::query_as(FAILED).fetch_all(&self.0.pool).await {
                Ok(failed) => failed,
                Err(error) => {
                    let found = format!("the database does not tell: {error}");
                    return vec![self.of_databases(Severity::Unknown, found)];
                }
            };
        let finding = |(tenant, stands_still, found): (String, bool, String)| {
            let severity = if stands_still { Severity::Error } else { Severity::Warning };
            let effect = if stands_still { "its messages wait" } else { "its messages run" };
            self.of_databases(severity, format!("the move of tenant `{tenant}` {found}; {effect}"))
                .advise(format!(
                    "hosts try again; `oncebox tenant move {tenant}` shows it, and `--cancel` lets \
                        the tenant stay"
                ))
        };
        failed.into_iter().map(finding).collect()
    }

    fn fault(&self, name: &str, error: &InboxError) -> Finding {
        let advice = match error {
            InboxError::NotFound(_) => {
                "this process runs no message of its tenants; give every process the same \
                    `[[databases]]`"
            }
            _ => "the messages of its tenants wait; `oncebox databases` lists the databases",
        };
        self.of_databases(Severity::Error, format!("database `{name}`: {error}")).advise(advice)
    }

    fn of_databases(&self, severity: Severity, found: String) -> Finding {
        self.of_host_database(CHECK, severity, found)
    }
}
