//! The databases in which hosts place tenants, as the settings of a process name them.

use std::collections::BTreeMap;

use oncebox_model::error::InboxError;

use super::{
    address::DatabaseUrl,
    open::{CONNECTIONS_MAX_NAMED, TenantDatabase},
};
use crate::control::check_name;

/// Largest weight of a database.
pub const WEIGHT_MAX: u32 = 1_000;

/// A database in which hosts place tenants, with a name.
#[derive(Debug, Clone)]
pub struct NamedDatabase {
    /// Its name, as for a tenant.
    pub name: String,
    /// Where it is, and the host's login there.
    pub url: DatabaseUrl,
    /// Its share of new tenants, beside the other databases' weights; zero for none.
    pub weight: u32,
    /// Maximum of connections of all tenants in it together, per host.
    pub connections_max: usize,
}

/// The named databases of a process.
#[derive(Default)]
pub struct NamedDatabases(BTreeMap<String, OpenNamed>);

/// A named database, and its connections.
pub(crate) struct OpenNamed {
    pub(crate) named: NamedDatabase,
    pub(crate) database: TenantDatabase,
}

impl NamedDatabases {
    /// Makes the databases of a process. Opens no connection.
    ///
    /// # Errors
    /// `Invalid` for a bad name, two databases of one name or one address, and a weight over the
    /// maximum.
    pub fn new(named: impl IntoIterator<Item = NamedDatabase>) -> Result<Self, InboxError> {
        let mut all = BTreeMap::<String, OpenNamed>::new();
        for named in named {
            check_name("database", &named.name)?;
            let (name, weight) = (named.name.clone(), named.weight);
            if weight > WEIGHT_MAX {
                return Err(InboxError::Invalid(format!(
                    "the weight of database `{name}` is {weight}; it must be 0 to {WEIGHT_MAX}"
                )));
            }
            if let Some(other) =
                all.values().find(|other| other.named.url.shown() == named.url.shown())
            {
                return Err(InboxError::Invalid(format!(
                    "the databases `{}` and `{name}` are both {}; give each database one name",
                    other.named.name,
                    named.url.shown()
                )));
            }
            let database = TenantDatabase::at(&named.url, CONNECTIONS_MAX_NAMED);
            if all.insert(name.clone(), OpenNamed { named, database }).is_some() {
                return Err(InboxError::Invalid(format!(
                    "there are two databases `{name}`; give each a name of its own"
                )));
            }
        }
        Ok(Self(all))
    }

    /// Returns the same databases with connections of their own, for requests.
    pub(crate) fn for_requests(&self) -> Self {
        let again = self.0.iter().map(|(name, OpenNamed { named, .. })| {
            let database = TenantDatabase::at(&named.url, CONNECTIONS_MAX_NAMED);
            (name.clone(), OpenNamed { named: named.clone(), database })
        });
        Self(again.collect())
    }

    /// Returns the databases with their connections, by name.
    pub(super) fn all(&self) -> impl Iterator<Item = &OpenNamed> {
        self.0.values()
    }

    /// Returns the maximum of connections of the tenants in a database; none where the settings of
    /// this process do not name it.
    pub(crate) fn connections_max(&self, name: &str) -> Option<usize> {
        Some(self.0.get(name)?.named.connections_max)
    }

    /// Returns a database by its name.
    ///
    /// # Errors
    /// `NotFound` where the settings of this process do not name it.
    pub(crate) fn get(&self, name: &str) -> Result<&OpenNamed, InboxError> {
        self.0.get(name).ok_or_else(|| {
            InboxError::NotFound(format!(
                "no database is named `{name}` in `[[databases]]` of this process; `oncebox \
                    databases` lists those that are"
            ))
        })
    }

    /// Returns the databases that take new tenants, the next one first: the one with the fewest
    /// tenants for its weight. `tenants` counts those that each has.
    pub(super) fn by_room(&self, tenants: &BTreeMap<String, u64>) -> Vec<&OpenNamed> {
        let mut open: Vec<_> = self.0.values().filter(|open| open.named.weight > 0).collect();
        // With one more tenant, as a share of the weight. Both sides are multiplied out.
        let with_one_more = |name: &str| u128::from(tenants.get(name).copied().unwrap_or(0)) + 1;
        open.sort_by(|a, b| {
            let a_share = with_one_more(&a.named.name) * u128::from(b.named.weight);
            let b_share = with_one_more(&b.named.name) * u128::from(a.named.weight);
            a_share.cmp(&b_share)
        });
        open
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test")]

    use super::*;

    fn named(name: &str, host: &str, weight: u32) -> NamedDatabase {
        let url = DatabaseUrl::parse(&format!("postgres://oncebox:x@{host}:5432/oncebox")).unwrap();
        NamedDatabase { name: name.to_owned(), url, weight, connections_max: 8 }
    }

    // What could go wrong: all tenants land in one database, or in one that is to get none.
    #[tokio::test]
    async fn new_tenants_are_spread_by_weight() {
        let databases =
            NamedDatabases::new([named("db1", "a", 1), named("db2", "b", 3), named("db3", "c", 0)])
                .unwrap();
        let mut tenants = BTreeMap::new();
        for _ in 0..40 {
            let next = databases.by_room(&tenants)[0].named.name.clone();
            *tenants.entry(next).or_insert(0) += 1;
        }
        assert_eq!(tenants, BTreeMap::from([("db1".to_owned(), 10), ("db2".to_owned(), 30)]));
    }

    // What could go wrong: a host begins with names that lead to one database, or that a tenant's
    // row cannot tell from an address.
    #[tokio::test]
    async fn databases_that_cannot_be_told_apart_are_refused() {
        for (all, says) in [
            (vec![named("db1", "a", 1), named("db1", "b", 1)], "two databases `db1`"),
            (vec![named("db1", "a", 1), named("db2", "a", 1)], "`db1` and `db2` are both"),
            (vec![named("a:5432", "a", 1)], "cannot be the name of a database"),
            (vec![named("db1", "a", WEIGHT_MAX + 1)], "it must be 0 to 1000"),
        ] {
            let error = NamedDatabases::new(all).err().map(|error| error.to_string());
            assert!(error.as_deref().is_some_and(|error| error.contains(says)), "{error:?}");
        }
    }
}
