//! Which tenants are in which named database, and which one is next.

use std::{collections::BTreeMap, time::Duration};

use oncebox_model::error::InboxError;

use super::{
    identity::Mark, inbox_database::DatabaseLabel, named::OpenNamed, open::answered_within,
};
use crate::{handles::TenantDatabases, tenants::Tenant};

/// Longest check of a named database.
const CHECK_MAX: Duration = Duration::from_secs(10);

/// A named database, and the tenants in it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DatabaseUse {
    /// Its name.
    pub name: String,
    /// Host, port and name; none where the settings of this process do not name it.
    pub address: Option<String>,
    /// Its share of new tenants; none where the settings of this process do not name it.
    pub weight: Option<u32>,
    /// Maximum of connections of all tenants in it together, per host; none where the settings of
    /// this process do not name it.
    pub connections_max: Option<usize>,
    /// Number of the tenants in it.
    pub tenants: u64,
}

impl Tenant {
    /// Returns the name of the database in which it was placed; none where its inbox is in the
    /// host's database, or in one that it named itself by its address. Addresses have a colon,
    /// names have none.
    pub fn database_name(&self) -> Option<&str> {
        self.database.as_deref().filter(|database| !database.contains(':'))
    }
}

impl TenantDatabases<'_> {
    /// Lists the named databases, with those that only tenants' rows name.
    ///
    /// # Errors
    /// An error of the host's database.
    pub async fn named(&self) -> Result<Vec<DatabaseUse>, InboxError> {
        let mut tenants = self.tenants_by_database().await?;
        let named = self.0.named_databases.all();
        let mut all: Vec<_> = named
            .map(|open| DatabaseUse {
                name: open.named.name.clone(),
                address: Some(open.named.url.shown().to_owned()),
                weight: Some(open.named.weight),
                connections_max: Some(open.named.connections_max),
                tenants: tenants.remove(&open.named.name).unwrap_or(0),
            })
            .collect();
        let unknown = tenants.into_iter().map(|(name, tenants)| DatabaseUse {
            name,
            address: None,
            weight: None,
            connections_max: None,
            tenants,
        });
        all.extend(unknown);
        all.sort_by(|a, b| a.name.cmp(&b.name));
        Ok(all)
    }

    /// Checks that a named database answers, and that it is the one that its tenants are in.
    ///
    /// # Errors
    /// `NotFound` where the settings of this process do not name it, `Unreachable` where it does not
    /// answer, `Invalid` where it is another one.
    pub async fn check_named(&self, database: &DatabaseUse) -> Result<(), InboxError> {
        let open = self.0.named_databases.get(&database.name)?;
        answered_within(CHECK_MAX, self.check_named_at(open, database)).await?
    }

    async fn check_named_at(
        &self,
        open: &OpenNamed,
        database: &DatabaseUse,
    ) -> Result<(), InboxError> {
        let mut connection = open.database.connect().await?;
        // One without tenants is taken with the first one.
        if database.tenants > 0 || Mark::read(&mut connection).await?.is_some() {
            let label = DatabaseLabel { tenant: None, database: Some(database.name.clone()) };
            self.check_is_ours(&mut connection, &label).await?;
        }
        connection.close().await;
        Ok(())
    }

    /// Returns the databases that take new tenants, the one with the most room first. Empty where
    /// tenants belong into the host's database.
    ///
    /// # Errors
    /// `NotFound` where tenants are in a database that the settings of this process do not name. An
    /// error of the host's database.
    pub(super) async fn named_by_room(&self) -> Result<Vec<&OpenNamed>, InboxError> {
        let tenants = self.tenants_by_database().await?;
        // Not into the host's database, by a process that lacks the configuration of the others.
        for name in tenants.keys() {
            self.0.named_databases.get(name)?;
        }
        Ok(self.0.named_databases.by_room(&tenants))
    }

    /// Counts the tenants in each named database.
    async fn tenants_by_database(&self) -> Result<BTreeMap<String, u64>, InboxError> {
        const COUNT: &str = "SELECT database, count(*) FROM oncebox.tenant \
            WHERE database !~ ':' GROUP BY 1";
        let counts: Vec<(String, i64)> = sqlx::query_as(COUNT).fetch_all(&self.0.pool).await?;
        Ok(counts.into_iter().map(|(name, tenants)| (name, tenants.max(0) as u64)).collect())
    }
}
