//! Preparation of databases that hold tenants of an installation.

use std::time::Duration;

use oncebox_model::error::InboxError;
use sqlx::PgConnection;
use uuid::Uuid;

use super::{
    address::DatabaseUrl,
    inbox_database::DatabaseLabel,
    open::{CONNECTIONS_MAX, TenantDatabase, answered_within},
};
use crate::{
    database::{reach, schema},
    handles::TenantDatabases,
    tenants::Tenant,
};

/// Oldest PostgreSQL version that the host functions and the settings of sessions work with.
const VERSION_MIN: i32 = 15;
/// Longest time for the check of a tenant's database, and for the update of its replica.
pub(super) const PREPARE_MAX: Duration = Duration::from_secs(120);

/// Properties that a server reports.
#[derive(sqlx::FromRow)]
struct Server {
    version: i32,
    is_read_only: bool,
    encoding: String,
    may_create: bool,
}

impl TenantDatabases<'_> {
    /// Checks that the database that a tenant named can be used. Brings it up to date where it is
    /// behind this program, and makes its replica equal. Does nothing for tenants in the host's
    /// database.
    ///
    /// # Errors
    /// `TenantDatabaseUnavailable` where the database cannot be reached. `Invalid` where it is not this
    /// installation's, or cannot hold an inbox.
    pub async fn prepare(&self, tenant: &Tenant) -> Result<(), InboxError> {
        let database = self.get(tenant)?;
        if !database.is_dedicated {
            return Ok(());
        }
        let preparing = async {
            database.check_once(self.check_and_update(&database, tenant)).await?;
            answered_within(PREPARE_MAX, self.replicate(tenant)).await?
        };
        preparing.await.map_err(|error| of_tenant_database(error, tenant))
    }

    /// Checks that a tenant's database can be used, and brings it up to date.
    async fn check_and_update(
        &self,
        database: &TenantDatabase,
        tenant: &Tenant,
    ) -> Result<(), InboxError> {
        if answered_within(PREPARE_MAX, self.check_is_behind(database, tenant)).await?? {
            // Without a time limit: an update that was given up would start from the beginning each
            // time.
            bring_up_to_date(database, tenant.database.as_deref().unwrap_or_default()).await?;
        }
        Ok(())
    }

    /// Returns whether a tenant's database is behind this program. Fails where it cannot be used.
    async fn check_is_behind(
        &self,
        database: &TenantDatabase,
        tenant: &Tenant,
    ) -> Result<bool, InboxError> {
        reach::check_options_arrive(&database.options).await?;
        let mut connection = database.connect().await?;
        check_server(&mut connection, tenant.database.as_deref().unwrap_or_default()).await?;
        check_is_ours(&mut connection, self.installation().await?, &tenant.label()).await?;
        let is_behind = schema::is_behind(&mut connection).await?;
        connection.close().await;
        Ok(is_behind)
    }

    /// Takes an unused database for tenants of this installation, under its name where it has one.
    pub(super) async fn take(
        &self,
        url: &DatabaseUrl,
        name: Option<&str>,
    ) -> Result<(), InboxError> {
        const TAKE: &str = "INSERT INTO oncebox.installation (installation_id, is_dedicated, \
            database_name) VALUES ($1, true, $2) ON CONFLICT DO NOTHING";
        let database = TenantDatabase::at(url, CONNECTIONS_MAX);
        let ours = Holder::tenants_of(self.installation().await?, name);
        reach::check_options_arrive(&database.options)
            .await
            .map_err(|error| unfit(url.shown(), &error.to_string()))?;
        let mut connection =
            database.connect().await.map_err(|error| unfit(url.shown(), &error.to_string()))?;
        check_server(&mut connection, url.shown()).await?;
        let is_ours = holder(&mut connection).await?.as_ref() == Some(&ours);
        if !is_ours {
            check_is_free(&mut connection, url.shown()).await?;
            self.check_is_first(name, url).await?;
        }
        // One that a tenant named is always gone over: a copied one is open to PUBLIC again.
        if !is_ours || name.is_none() || schema::is_behind(&mut connection).await? {
            bring_up_to_date(&database, url.shown()).await?;
        }
        sqlx::query(TAKE)
            .bind(ours.installation_id)
            .bind(&ours.database_name)
            .execute(&mut *connection)
            .await?;
        let is_taken = holder(&mut connection).await? == Some(ours);
        connection.close().await;
        database.pool.close().await;
        if is_taken {
            Ok(())
        } else {
            Err(unfit(url.shown(), "another installation has just taken it"))
        }
    }

    /// Checks that no tenant is in the database of this name yet. One that is empty although tenants
    /// were placed there would treat every repeated message as new.
    async fn check_is_first(
        &self,
        name: Option<&str>,
        url: &DatabaseUrl,
    ) -> Result<(), InboxError> {
        const PLACED: &str = "SELECT name FROM oncebox.tenant WHERE database = $1 LIMIT 1";
        let placed: Option<String> =
            sqlx::query_scalar(PLACED).bind(name).fetch_optional(&self.0.pool).await?;
        let Some(tenant) = placed else { return Ok(()) };
        Err(unfit(
            url.shown(),
            &format!(
                "database `{}` has tenants, such as `{tenant}`, and this one does not hold their \
                    inboxes; restore it from a backup, or correct its URL",
                name.unwrap_or_default()
            ),
        ))
    }

    /// Returns the id of this installation, which marks its tenants' databases. Creates it on first
    /// use.
    pub(crate) async fn installation(&self) -> Result<Uuid, InboxError> {
        const ID: &str = "SELECT installation_id FROM oncebox.installation";
        const MAKE: &str = "INSERT INTO oncebox.installation (installation_id, is_dedicated) VALUES \
            ($1, false) ON CONFLICT DO NOTHING";
        if let Some(id) = sqlx::query_scalar(ID).fetch_optional(&self.0.pool).await? {
            return Ok(id);
        }
        sqlx::query(MAKE).bind(Uuid::new_v4()).execute(&self.0.pool).await?;
        Ok(sqlx::query_scalar(ID).fetch_one(&self.0.pool).await?)
    }

    /// Checks that the host's own database does not hold tenants of another installation.
    ///
    /// # Errors
    /// `Invalid` where it does.
    pub async fn check_host_database(&self) -> Result<(), InboxError> {
        let is_dedicated: Option<bool> =
            sqlx::query_scalar("SELECT is_dedicated FROM oncebox.installation")
                .fetch_optional(&self.0.pool)
                .await?;
        if is_dedicated == Some(true) {
            return Err(InboxError::Invalid(
                "this database holds the inbox of a tenant of another installation; give the host \
                    a database of its own"
                    .to_owned(),
            ));
        }
        Ok(())
    }
}

impl TenantDatabase {
    /// Returns whether no other installation has the database.
    pub(crate) async fn is_free_for(&self, installation: Uuid) -> Result<bool, InboxError> {
        let mut connection = self.connect().await?;
        Ok(holder(&mut connection)
            .await?
            .is_none_or(|holder| holder.installation_id == installation))
    }
}

/// Checks that the database is marked as this installation's for tenants. Fails where it was lost
/// and recreated, or is another one under that address. An inbox that is empty there would treat
/// every repeated message as new.
pub(crate) async fn check_is_ours(
    connection: &mut PgConnection,
    installation: Uuid,
    label: &DatabaseLabel,
) -> Result<(), InboxError> {
    let DatabaseLabel { tenant, database } = label;
    let name = database.as_deref().filter(|_| tenant.is_none());
    let found = holder(connection).await?;
    if found == Some(Holder::tenants_of(installation, name)) {
        return Ok(());
    }
    let database = database.as_deref().unwrap_or_default();
    let other = found
        .filter(|found| found.installation_id == installation)
        .and_then(|found| found.database_name)
        .map_or_else(String::new, |other| format!("; it is database `{other}`"));
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

async fn bring_up_to_date(database: &TenantDatabase, whose: &str) -> Result<(), InboxError> {
    for what in schema::migrate(&database.options).await? {
        tracing::warn!(database = whose, what, "the database is less closed than it should be");
    }
    schema::let_deployments_be_elsewhere(&database.pool).await
}

async fn check_server(connection: &mut PgConnection, shown: &str) -> Result<(), InboxError> {
    const SERVER: &str = "SELECT current_setting('server_version_num')::int / 10000 AS version, \
            pg_is_in_recovery() OR current_setting('default_transaction_read_only')::bool AS \
            is_read_only, \
            pg_encoding_to_char(d.encoding)::text AS encoding, \
            r.rolsuper OR (r.rolcreaterole AND has_database_privilege(d.datname, 'CREATE')) AS \
            may_create \
        FROM pg_database d, pg_roles r WHERE d.datname = current_database() AND r.rolname = \
        current_user";
    let server: Server = sqlx::query_as(SERVER).fetch_one(connection).await?;
    let problem = match server {
        Server { version, .. } if version < VERSION_MIN => {
            format!("it is PostgreSQL {version}; {VERSION_MIN} is the oldest that is supported")
        }
        Server { is_read_only: true, .. } => {
            "it is a replica or read-only; name the primary".to_owned()
        }
        Server { encoding, .. } if encoding != "UTF8" => format!(
            "its encoding is {encoding}; make \
            it with `ENCODING 'UTF8'`"
        ),
        Server { may_create: false, .. } => {
            "the login may not create roles and schemas; give it CREATEROLE, and CREATE on the \
                database"
                .to_owned()
        }
        _ => return Ok(()),
    };
    Err(unfit(shown, &problem))
}

/// The installation that has a database.
#[derive(Debug, PartialEq, Eq, sqlx::FromRow)]
struct Holder {
    installation_id: Uuid,
    /// Whether it has it for tenants.
    is_dedicated: bool,
    /// Name of the database, where it has one.
    database_name: Option<String>,
}

impl Holder {
    /// Returns the mark of a database with tenants of an installation.
    fn tenants_of(installation_id: Uuid, name: Option<&str>) -> Self {
        Self { installation_id, is_dedicated: true, database_name: name.map(str::to_owned) }
    }
}

/// Returns the installation that has the database.
async fn holder(connection: &mut PgConnection) -> Result<Option<Holder>, InboxError> {
    const HAS_TABLE: &str = "SELECT to_regclass('oncebox.installation') IS NOT NULL";
    // A database of the release before has no column for its name.
    const HOLDER: &str = "SELECT installation_id, is_dedicated, \
        to_jsonb(i) ->> 'database_name' AS database_name FROM oncebox.installation i";
    if !sqlx::query_scalar(HAS_TABLE).fetch_one(&mut *connection).await? {
        return Ok(None);
    }
    Ok(sqlx::query_as(HOLDER).fetch_optional(connection).await?)
}

/// Checks that no installation and no application uses the database. The revocations that close it
/// to other tenants would also close it to its other users.
async fn check_is_free(connection: &mut PgConnection, shown: &str) -> Result<(), InboxError> {
    const USED: &str =
        "SELECT EXISTS (SELECT FROM oncebox.tenant) OR EXISTS (SELECT FROM oncebox.audit)";
    const FOREIGN: &str = "SELECT format('%I.%I', n.nspname, c.relname) FROM pg_class c JOIN \
        pg_namespace n ON n.oid = c.relnamespace \
        WHERE c.relkind IN ('r', 'p', 'v', 'm', 'f') AND n.nspname NOT IN ('information_schema', \
        'oncebox', 'oncebox_host') \
            AND n.nspname !~ '^pg_' \
            AND NOT EXISTS (SELECT FROM pg_depend d WHERE d.classid = 'pg_class'::regclass AND \
            d.objid = c.oid AND d.deptype = 'e') LIMIT 1";
    let has_inbox: bool = sqlx::query_scalar("SELECT to_regclass('oncebox.audit') IS NOT NULL")
        .fetch_one(&mut *connection)
        .await?;
    if holder(connection).await?.is_some()
        || (has_inbox && sqlx::query_scalar(USED).fetch_one(&mut *connection).await?)
    {
        return Err(unfit(
            shown,
            "it is an installation's own database, or holds tenants of another installation",
        ));
    }
    if let Some(table) = sqlx::query_scalar::<_, String>(FOREIGN).fetch_optional(connection).await?
    {
        let problem = format!(
            "it is in use: it holds `{table}`; make a database for the tenant alone, since what \
                others may do there by default is revoked"
        );
        return Err(unfit(shown, &problem));
    }
    Ok(())
}

fn unfit(shown: &str, problem: &str) -> InboxError {
    InboxError::Invalid(format!("the database {shown} cannot hold the tenant's inbox: {problem}"))
}

/// Returns the error with the tenant's name where its database cannot be reached.
fn of_tenant_database(error: InboxError, tenant: &Tenant) -> InboxError {
    match error {
        InboxError::Unreachable(error) => {
            InboxError::TenantDatabaseUnavailable { tenant: tenant.name.clone(), source: error }
        }
        other => other,
    }
}
