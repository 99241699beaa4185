//! Which database is which: the mark that a database with tenants bears, compared with what the
//! host's database knows.
//!
//! A database that is used for another one would begin with an empty inbox, which treats every
//! repeated message as new.

use oncebox_model::error::InboxError;
use sqlx::{PgConnection, PgPool};
use uuid::Uuid;

use super::{inbox_database::DatabaseLabel, open::TenantDatabase};
use crate::{handles::TenantDatabases, tenants::Tenant};

/// The mark of a database.
#[derive(Debug, Clone, PartialEq, Eq, sqlx::FromRow)]
pub(crate) struct Mark {
    /// The installation that has the database.
    pub(super) installation_id: Uuid,
    /// Whether it has it for tenants.
    is_dedicated: bool,
    /// Name of the database, where it has one.
    pub(super) database_name: Option<String>,
    /// Id of the database, where it has a name.
    database_id: Option<Uuid>,
}

impl Mark {
    /// Returns the mark of a database that an installation has for tenants.
    fn of_tenants(installation_id: Uuid, named: Option<(&str, Uuid)>) -> Self {
        Self {
            installation_id,
            is_dedicated: true,
            database_name: named.map(|(name, _)| name.to_owned()),
            database_id: named.map(|(_, id)| id),
        }
    }

    /// Returns whether an installation has the database for tenants, under this name.
    pub(super) fn is_named_by(&self, installation: Uuid, name: Option<&str>) -> bool {
        self.installation_id == installation
            && self.is_dedicated
            && self.database_name.as_deref() == name
    }

    /// Reads the mark of a database; none where no installation has it.
    pub(super) async fn read(connection: &mut PgConnection) -> Result<Option<Self>, InboxError> {
        const HAS_TABLE: &str = "SELECT to_regclass('oncebox.installation') IS NOT NULL";
        // A database of the release before has no columns for name and id.
        const MARK: &str = "SELECT installation_id, is_dedicated, \
            to_jsonb(i) ->> 'database_name' AS database_name, \
            (to_jsonb(i) ->> 'database_id')::uuid AS database_id FROM oncebox.installation i";
        if !sqlx::query_scalar(HAS_TABLE).fetch_one(&mut *connection).await? {
            return Ok(None);
        }
        Ok(sqlx::query_as(MARK).fetch_optional(connection).await?)
    }
}

impl TenantDatabases<'_> {
    /// Returns the mark that the database of a name, or one that tenants named, has to bear; none
    /// where no database of that name was taken yet.
    pub(crate) async fn expected_mark(
        &self,
        name: Option<&str>,
    ) -> Result<Option<Mark>, InboxError> {
        let installation = self.installation().await?;
        let Some(name) = name else { return Ok(Some(Mark::of_tenants(installation, None))) };
        let id = known_id(&self.0.pool, name).await?;
        Ok(id.map(|id| Mark::of_tenants(installation, Some((name, id)))))
    }

    /// Checks that a database is the one that holds the inboxes of the tenants that its label
    /// stands for.
    ///
    /// # Errors
    /// `Invalid` where it is another one, was lost and made anew, or belongs to another
    /// installation.
    pub(crate) async fn check_is_ours(
        &self,
        connection: &mut PgConnection,
        label: &DatabaseLabel,
    ) -> Result<(), InboxError> {
        let (expected, found) =
            (self.expected_mark(label.placed_in()).await?, Mark::read(connection).await?);
        if expected.is_some() && found == expected {
            return Ok(());
        }
        let DatabaseLabel { tenant, database } = label;
        let database = database.as_deref().unwrap_or_default();
        let other = found
            .zip(expected)
            .filter(|(found, expected)| found.installation_id == expected.installation_id)
            .and_then(|(found, _)| found.database_name)
            .filter(|name| name != database)
            .map_or_else(String::new, |name| format!("; it is database `{name}`"));
        Err(InboxError::Invalid(match tenant {
            Some(tenant) => format!(
                "the database of tenant `{tenant}` at {database} does not hold its inbox{other}; \
                    restore it from a backup, or correct what its address points to"
            ),
            None => format!(
                "the database that `{database}` leads to does not hold the inboxes of its tenants\
                    {other}; restore it from a backup, or correct its URL in `[[databases]]`"
            ),
        }))
    }

    /// Returns whether what is in a database may be removed for a tenant: it is the one that the
    /// tenant is in, or one that nobody has.
    pub(crate) async fn is_of(
        &self,
        database: &TenantDatabase,
        tenant: &Tenant,
    ) -> Result<bool, InboxError> {
        let expected = self.expected_mark(tenant.label().placed_in()).await?;
        let mut connection = database.connect().await?;
        let found = Mark::read(&mut connection).await?;
        connection.close().await;
        Ok(found.is_none() || found == expected)
    }

    /// Marks a database that is free as one for tenants, under its name where it has one. Returns
    /// its id then.
    pub(super) async fn mark(
        &self,
        connection: &mut PgConnection,
        shown: &str,
        name: Option<&str>,
    ) -> Result<Option<Uuid>, InboxError> {
        const MARK: &str = "INSERT INTO oncebox.installation (installation_id, is_dedicated, \
            database_name, database_id) VALUES ($1, true, $2, $3) ON CONFLICT DO NOTHING";
        let installation = self.installation().await?;
        let new = name.map(|_| Uuid::new_v4());
        sqlx::query(MARK).bind(installation).bind(name).bind(new).execute(&mut *connection).await?;
        // Another process may have been faster.
        let mark = Mark::read(connection).await?;
        let id = mark.as_ref().and_then(|mark| mark.database_id);
        if mark != Some(Mark::of_tenants(installation, name.zip(id))) {
            return Err(InboxError::Invalid(format!(
                "the database {shown} cannot hold tenants: another installation has just taken it"
            )));
        }
        if let Some((name, id)) = name.zip(id) {
            self.note_id(name, id, shown).await?;
        }
        Ok(id)
    }

    /// Notes the id of the database of a name, unless tenants are in another one of that name.
    async fn note_id(&self, name: &str, id: Uuid, shown: &str) -> Result<(), InboxError> {
        const NOTE: &str = "INSERT INTO oncebox.named_database (name, database_id) VALUES ($1, $2) \
            ON CONFLICT DO NOTHING";
        const LOCK: &str = "SELECT database_id FROM oncebox.named_database WHERE name = $1 \
            FOR UPDATE";
        const REPLACE: &str = "UPDATE oncebox.named_database SET database_id = $2 WHERE name = $1";
        let mut tx = self.0.pool.begin().await?;
        sqlx::query(NOTE).bind(name).bind(id).execute(&mut *tx).await?;
        let noted: Uuid = sqlx::query_scalar(LOCK).bind(name).fetch_one(&mut *tx).await?;
        if noted != id {
            // A tenant is inserted under a lock of this row.
            check_is_first(&mut tx, name, shown).await?;
            sqlx::query(REPLACE).bind(name).bind(id).execute(&mut *tx).await?;
        }
        Ok(tx.commit().await?)
    }

    /// Checks that no tenant is in the database of this name yet.
    pub(super) async fn check_is_first(&self, name: &str, shown: &str) -> Result<(), InboxError> {
        check_is_first(&mut *self.0.pool.acquire().await?, name, shown).await
    }
}

/// Checks, in the transaction that inserts a tenant, that the database of a name is still the one
/// that was taken, and keeps it so until the transaction ends.
pub(crate) async fn keep_id(
    connection: &mut PgConnection,
    name: &str,
    id: Uuid,
) -> Result<(), InboxError> {
    const KEEP: &str = "SELECT database_id FROM oncebox.named_database WHERE name = $1 FOR SHARE";
    let noted: Option<Uuid> =
        sqlx::query_scalar(KEEP).bind(name).fetch_optional(connection).await?;
    if noted == Some(id) {
        return Ok(());
    }
    Err(InboxError::conflict(format!(
        "another process has just taken another database as `{name}`; give all hosts the same \
            `[[databases]]`, and try again"
    )))
}

async fn known_id(pool: &PgPool, name: &str) -> Result<Option<Uuid>, InboxError> {
    const ID: &str = "SELECT database_id FROM oncebox.named_database WHERE name = $1";
    Ok(sqlx::query_scalar(ID).bind(name).fetch_optional(pool).await?)
}

async fn check_is_first(
    connection: &mut PgConnection,
    name: &str,
    shown: &str,
) -> Result<(), InboxError> {
    const FIRST: &str = "SELECT name FROM oncebox.tenant WHERE database = $1 LIMIT 1";
    let placed: Option<String> =
        sqlx::query_scalar(FIRST).bind(name).fetch_optional(connection).await?;
    placed.map_or(Ok(()), |tenant| Err(not_of_tenants(name, &tenant, shown)))
}

fn not_of_tenants(name: &str, tenant: &str, shown: &str) -> InboxError {
    InboxError::Invalid(format!(
        "database `{name}` has tenants, such as `{tenant}`, and {shown} does not hold their \
            inboxes; restore it from a backup, or correct its URL"
    ))
}
