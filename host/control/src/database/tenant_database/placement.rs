//! Which tenants are in which named database, and which one is next.

use std::collections::BTreeMap;

use oncebox_model::error::InboxError;

use super::{inbox_database::DatabaseLabel, named::NamedDatabase, prepare::check_is_ours};
use crate::{handles::TenantDatabases, tenants::Tenant};

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
        let mut connection = self.0.named_databases.get(&database.name)?.database.connect().await?;
        if database.tenants > 0 {
            let label = DatabaseLabel { tenant: None, database: Some(database.name.clone()) };
            check_is_ours(&mut connection, self.installation().await?, &label).await?;
        }
        connection.close().await;
        Ok(())
    }

    /// Returns the databases that take new tenants, the one with the most room first. Empty where
    /// tenants belong into the host's database.
    ///
    /// # Errors
    /// An error of the host's database.
    pub(super) async fn named_by_room(&self) -> Result<Vec<&NamedDatabase>, InboxError> {
        Ok(self.0.named_databases.by_room(&self.tenants_by_database().await?))
    }

    /// Counts the tenants in each named database.
    async fn tenants_by_database(&self) -> Result<BTreeMap<String, u64>, InboxError> {
        const COUNT: &str = "SELECT database, count(*) FROM oncebox.tenant \
            WHERE database !~ ':' GROUP BY 1";
        let counts: Vec<(String, i64)> = sqlx::query_as(COUNT).fetch_all(&self.0.pool).await?;
        Ok(counts.into_iter().map(|(name, tenants)| (name, tenants.max(0) as u64)).collect())
    }
}
