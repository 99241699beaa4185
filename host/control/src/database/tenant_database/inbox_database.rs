//! The databases with an inbox, each once, however many tenants it has.

use oncebox_model::error::InboxError;
use sqlx::PgPool;

use super::open::TenantDatabase;
use crate::{handles::TenantDatabases, tenants::Tenant};

/// The words for a database with an inbox; none of them for the host's.
#[derive(Debug, Clone, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct DatabaseLabel {
    /// Tenant that named the database; the first one where several did. None for one in which hosts
    /// place tenants.
    pub tenant: Option<String>,
    /// Its name in the settings of hosts; where it has none, its host, port and name.
    pub database: Option<String>,
}

impl DatabaseLabel {
    /// Returns the name of a database in which hosts place tenants; none for any other one.
    pub(crate) fn placed_in(&self) -> Option<&str> {
        self.database.as_deref().filter(|_| self.tenant.is_none())
    }
}

/// A database with an inbox.
#[derive(Clone)]
pub struct InboxDatabase {
    /// The words for it.
    pub label: DatabaseLabel,
    pub(crate) database: TenantDatabase,
}

impl InboxDatabase {
    /// Returns its name, as the rows of its tenants have it; none for the host's.
    pub fn name(&self) -> Option<&str> {
        self.label.database.as_deref()
    }

    /// Returns the host's connections to it.
    pub fn pool(&self) -> &PgPool {
        &self.database.pool
    }
}

impl Tenant {
    /// Returns the words for the database with its inbox.
    pub(crate) fn label(&self) -> DatabaseLabel {
        let is_placed = self.database.is_none() || self.database_name().is_some();
        DatabaseLabel {
            tenant: (!is_placed).then(|| self.name.clone()),
            database: self.database.clone(),
        }
    }
}

impl TenantDatabases<'_> {
    /// Lists the databases with an inbox: the host's first, then the others by name.
    ///
    /// # Errors
    /// An error of the host's database.
    pub async fn all(&self) -> Result<Vec<InboxDatabase>, InboxError> {
        // Of a named one a tenant stands for all. Of others each has an address.
        const TENANTS: &str = "SELECT t.* FROM oncebox.tenant t \
            WHERE t.database IS NOT NULL AND t.state <> 'deleting' AND (t.database ~ ':' \
                OR t.name = (SELECT min(o.name) FROM oncebox.tenant o \
                    WHERE o.database = t.database AND o.state <> 'deleting')) \
            ORDER BY t.database, t.name";
        let mut all = vec![InboxDatabase { label: DatabaseLabel::default(), database: self.own() }];
        let tenants: Vec<Tenant> = sqlx::query_as(TENANTS).fetch_all(&self.0.pool).await?;
        for tenant in tenants {
            if all.last().is_some_and(|last| last.name() == tenant.database.as_deref()) {
                continue; // several tenants have named it
            }
            // One that this process cannot find keeps nothing from the others. `doctor` names it,
            // and none of its tenants' consumers runs here.
            match self.inbox_of(&tenant) {
                Ok(database) => all.push(database),
                Err(error) => tracing::debug!(tenant = tenant.name, %error, "database not known"),
            }
        }
        Ok(all)
    }

    /// Returns the database with a tenant's inbox.
    ///
    /// # Errors
    /// An error where its address cannot be unsealed.
    pub fn inbox_of(&self, tenant: &Tenant) -> Result<InboxDatabase, InboxError> {
        Ok(InboxDatabase { label: tenant.label(), database: self.get(tenant)? })
    }

    /// Returns a database by its name, or the host's for an empty name. Opens no connection.
    ///
    /// # Errors
    /// `NotFound` where no tenant is in a database of this name. An error of the host's database, or
    /// where the address cannot be unsealed.
    pub async fn by_name(&self, name: &str) -> Result<TenantDatabase, InboxError> {
        const FIRST: &str = "SELECT t.* FROM oncebox.tenant t \
            WHERE t.database = $1 AND t.state <> 'deleting' ORDER BY t.name LIMIT 1";
        if name.is_empty() {
            return Ok(self.own());
        }
        let tenant: Option<Tenant> =
            sqlx::query_as(FIRST).bind(name).fetch_optional(&self.0.pool).await?;
        self.get(
            &tenant.ok_or_else(|| {
                InboxError::NotFound(format!("no tenant is in a database `{name}`"))
            })?,
        )
    }

    /// Returns the names of the tenants with an inbox in a database; `name` is none for the host's.
    ///
    /// # Errors
    /// An error of the host's database.
    pub(crate) async fn tenants_in(&self, name: Option<&str>) -> Result<Vec<String>, InboxError> {
        const IN: &str =
            "SELECT t.name FROM oncebox.tenant t WHERE t.database IS NOT DISTINCT FROM $1";
        Ok(sqlx::query_scalar(IN).bind(name).fetch_all(&self.0.pool).await?)
    }
}
