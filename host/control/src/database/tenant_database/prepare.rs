//! Preparation of databases that hold tenants of an installation.

use std::time::Duration;

use oncebox_model::error::InboxError;
use sqlx::PgConnection;
use uuid::Uuid;

use super::{
    address::DatabaseUrl,
    identity::Mark,
    open::{TenantDatabase, answered_within},
};
use crate::{
    database::{reach, schema},
    handles::TenantDatabases,
    tenants::Tenant,
};

/// Oldest PostgreSQL version that the host functions and the settings of sessions work with.
const VERSION_MIN: i32 = 15;
/// Longest time for each look at a database before it is taken.
const TAKE_MAX: Duration = Duration::from_secs(15);
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
            let check = |is_first| self.check_and_update(&database, tenant, is_first);
            database.check_once(check).await?;
            answered_within(PREPARE_MAX, self.replicate(tenant)).await?
        };
        preparing.await.map_err(|error| of_tenant_database(error, tenant))
    }

    /// Checks that a tenant's database can be used, and brings it up to date.
    async fn check_and_update(
        &self,
        database: &TenantDatabase,
        tenant: &Tenant,
        is_first_check: bool,
    ) -> Result<(), InboxError> {
        let is_behind = answered_within(PREPARE_MAX, self.check_is_behind(database, tenant));
        // A named one is gone over once by each process: a copied one is open to PUBLIC again.
        let is_unseen = is_first_check && tenant.database_name().is_some();
        if is_behind.await?? || is_unseen {
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
        self.check_is_ours(&mut connection, &tenant.label()).await?;
        let is_behind = schema::is_behind(&mut connection).await?;
        connection.close().await;
        Ok(is_behind)
    }

    /// Takes a database for tenants of this installation, under its name where it has one, unless
    /// that was done before. Returns its id where it has a name.
    pub(crate) async fn take(
        &self,
        database: &TenantDatabase,
        url: &DatabaseUrl,
        name: Option<&str>,
    ) -> Result<Option<Uuid>, InboxError> {
        let shown = url.shown();
        if !answered_within(TAKE_MAX, self.is_ready(database, shown, name)).await?? {
            bring_up_to_date(database, shown).await?;
        }
        answered_within(TAKE_MAX, async {
            let mut connection = database.connect().await?;
            let id = self.mark(&mut connection, shown, name).await?;
            connection.close().await;
            Ok(id)
        })
        .await?
    }

    /// Returns whether a database can take a tenant as it is; false where it has to be brought up to
    /// date before. Fails where it cannot be taken.
    async fn is_ready(
        &self,
        database: &TenantDatabase,
        shown: &str,
        name: Option<&str>,
    ) -> Result<bool, InboxError> {
        let cannot = |error: InboxError| unfit(shown, &error.to_string());
        reach::check_options_arrive(&database.options).await.map_err(cannot)?;
        let mut connection = database.connect().await.map_err(cannot)?;
        check_server(&mut connection, shown).await?;
        let expected = self.expected_mark(name).await?;
        let is_ours = expected.is_some() && Mark::read(&mut connection).await? == expected;
        if !is_ours {
            let can_be_taken = self.check_can_be_taken(&mut connection, shown, name).await;
            // Another process may have taken it meanwhile, for the same.
            let expected = self.expected_mark(name).await?;
            if expected.is_none() || Mark::read(&mut connection).await? != expected {
                can_be_taken?;
            }
        }
        // One that a tenant named is always gone over: a copied one is open to PUBLIC again.
        let is_ready = is_ours && name.is_some() && !schema::is_behind(&mut connection).await?;
        connection.close().await;
        Ok(is_ready)
    }

    /// Checks that nobody has a database. One that is marked with its name and has no tenant is free:
    /// a process that died may have left it so.
    async fn check_can_be_taken(
        &self,
        connection: &mut PgConnection,
        shown: &str,
        name: Option<&str>,
    ) -> Result<(), InboxError> {
        const HAS_TENANTS: &str = "SELECT EXISTS (SELECT FROM oncebox.tenant)";
        let (mark, installation) = (Mark::read(connection).await?, self.installation().await?);
        let is_left = name.is_some()
            && mark.is_some_and(|mark| mark.is_named_by(installation, name))
            && !sqlx::query_scalar(HAS_TENANTS).fetch_one(&mut *connection).await?;
        if !is_left {
            check_is_free(connection, shown).await?;
        }
        match name {
            Some(name) => self.check_is_first(name, shown).await,
            None => Ok(()),
        }
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
    if Mark::read(connection).await?.is_some()
        || (has_inbox && sqlx::query_scalar(USED).fetch_one(&mut *connection).await?)
    {
        return Err(unfit(shown, "it is an installation's own database, or one for other tenants"));
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
    InboxError::Invalid(format!("the database {shown} cannot hold tenants: {problem}"))
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
