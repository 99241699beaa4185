//! The triggers that capture row changes. They are on every table of a tenant while one of its
//! consumers has a shadow, and on no table otherwise.

use std::time::Duration;

use oncebox_model::{
    error::{InboxError, plain},
    sqlstate,
    tx::answered,
};
use sqlx::{AssertSqlSafe, Connection, Executor, PgConnection};

use crate::{
    database::schema::quoted,
    handles::Shadows,
    tenants::{Tenant, lock_grants},
};

/// Longest wait for a table's lock, milliseconds. Other writers of the table queue behind this
/// wait.
const LOCK_TIMEOUT_MS: u32 = 100;
/// Tries for one table, and the pause between them.
const TRIES: u32 = 5;
const PAUSE: Duration = Duration::from_millis(200);
/// SQLSTATEs of a table that was dropped, or that another host has changed already.
const SUPERSEDED: [&str; 3] =
    [sqlstate::UNDEFINED_TABLE, sqlstate::DUPLICATE_OBJECT, sqlstate::INTERNAL_ERROR];

/// Name of the trigger. PostgreSQL runs triggers of one event in the order of their names. This one
/// runs before those of the tenant, so their changes are captured after the change that fired them.
const TRIGGER: &str = "\"RI_oncebox_capture\"";

const MISSING: &str = "SELECT t::text FROM oncebox.capture_missing($1) AS t";
const INSTALLED: &str = "SELECT c.relname::text FROM pg_trigger g JOIN pg_class c ON c.oid = \
    g.tgrelid JOIN pg_namespace n ON n.oid = c.relnamespace \
    WHERE n.nspname = $1 AND g.tgname = 'RI_oncebox_capture' AND NOT c.relispartition ORDER BY 1";

impl Shadows<'_> {
    /// Installs or removes the triggers of a tenant, as its live shadows require. Safe to repeat,
    /// and to run on several hosts at once. Hosts call it when a shadow begins or ends. They also
    /// repeat it at intervals, for tables that were created later and for hosts that died half way.
    /// Returns the tables that are left, because other sessions hold them all the time.
    ///
    /// # Errors
    /// An error of the tenant's database, or its silence for too long.
    pub async fn reconcile_capture(&self, tenant: &Tenant) -> Result<Vec<String>, InboxError> {
        const WANTED: &str = "SELECT EXISTS (SELECT FROM oncebox.deployment d JOIN \
            oncebox.consumer c USING (consumer_id) \
            WHERE c.tenant_id = $1 AND d.role = 'shadow' AND d.ended_at IS NULL)";
        let wanted: bool =
            sqlx::query_scalar(WANTED).bind(tenant.tenant_id).fetch_one(&self.0.pool).await?;
        if wanted { self.install_capture(tenant).await } else { self.remove_capture(tenant).await }
    }

    /// Lists tenants whose triggers may have to be installed or removed: those with a shadow, and
    /// those whose shadow ended in the last hour. It also lists tenants in the host's own database
    /// that have a trigger for any other reason. A tenant with its own database is listed only for
    /// the hour after its shadow.
    ///
    /// # Errors
    /// An error of the host's database.
    pub async fn tenants_with_capture(&self) -> Result<Vec<Tenant>, InboxError> {
        const WITH_CAPTURE: &str = "SELECT t.* FROM oncebox.tenant t WHERE EXISTS (SELECT FROM \
            oncebox.consumer c JOIN oncebox.deployment d USING (consumer_id) \
                WHERE c.tenant_id = t.tenant_id AND d.role = 'shadow' AND (d.ended_at IS NULL OR \
                d.ended_at > now() - interval '1 hour')) \
            OR t.schema_name IN (SELECT n.nspname FROM pg_trigger g JOIN pg_class c ON c.oid = \
            g.tgrelid JOIN pg_namespace n ON n.oid = c.relnamespace \
                WHERE g.tgname = 'RI_oncebox_capture') ORDER BY t.name";
        Ok(sqlx::query_as(WITH_CAPTURE).fetch_all(&self.0.pool).await?)
    }

    /// Lists the tables of a tenant without the trigger.
    pub(crate) async fn uncaptured_tables(
        &self,
        tenant: &Tenant,
    ) -> Result<Vec<String>, InboxError> {
        self.tables(MISSING, tenant).await
    }

    /// Installs the trigger on every table of a tenant without it. Returns the tables that are
    /// left.
    ///
    /// # Errors
    /// An error of the tenant's database, or its silence for too long.
    pub async fn install_capture(&self, tenant: &Tenant) -> Result<Vec<String>, InboxError> {
        let missing = self.uncaptured_tables(tenant).await?;
        if missing.is_empty() {
            return Ok(missing);
        }
        // The owner creates the trigger, so it needs access to the function. That access allows
        // nothing else.
        let owner = quoted(&tenant.owner_login);
        let grant = format!(
            "GRANT USAGE ON SCHEMA oncebox_host TO {owner}; GRANT EXECUTE ON FUNCTION \
                oncebox_host.capture_row() TO {owner}"
        );
        let mut tx = self.0.tenant_databases().get(tenant)?.pool.begin().await?;
        lock_grants(&mut tx).await?;
        tx.execute(sqlx::raw_sql(AssertSqlSafe(grant))).await?;
        tx.commit().await?;
        // A trigger of that name that does not work was disabled.
        self.as_owner(tenant, &missing, |table| {
            format!(
                "DROP TRIGGER IF EXISTS {TRIGGER} ON {table}; \
                 CREATE TRIGGER {TRIGGER} AFTER INSERT OR UPDATE OR DELETE ON {table} FOR EACH ROW \
                 WHEN (pg_catalog.current_setting('oncebox.capture', true) <> '') EXECUTE FUNCTION \
                 oncebox_host.capture_row()"
            )
        })
        .await
    }

    /// Removes the trigger from every table of a tenant that has it. Returns the tables that are
    /// left.
    ///
    /// # Errors
    /// An error of the tenant's database, or its silence for too long.
    pub async fn remove_capture(&self, tenant: &Tenant) -> Result<Vec<String>, InboxError> {
        let installed = self.tables(INSTALLED, tenant).await?;
        if installed.is_empty() {
            return Ok(installed);
        }
        self.as_owner(tenant, &installed, |table| {
            format!("DROP TRIGGER IF EXISTS {TRIGGER} ON {table}")
        })
        .await
    }

    async fn tables(
        &self,
        query: &'static str,
        tenant: &Tenant,
    ) -> Result<Vec<String>, InboxError> {
        Ok(sqlx::query_scalar(query)
            .bind(&tenant.schema_name)
            .fetch_all(&self.0.tenant_databases().get(tenant)?.pool)
            .await?)
    }

    /// Runs one statement for each table, over a short connection of the owner. Returns the tables
    /// that other sessions held for too long.
    async fn as_owner(
        &self,
        tenant: &Tenant,
        tables: &[String],
        statement: impl Fn(&str) -> String,
    ) -> Result<Vec<String>, InboxError> {
        let credentials = self.0.tenant_databases().credentials(tenant)?;
        let options = self
            .0
            .tenant_databases()
            .get(tenant)?
            .options
            .username(&tenant.owner_login)
            .password(&credentials.owner_password)
            .options([
                ("search_path", tenant.schema_name.clone()),
                ("lock_timeout", LOCK_TIMEOUT_MS.to_string()),
            ]);
        let mut connection = PgConnection::connect_with(&options).await?;
        let mut left = Vec::new();
        for table in tables {
            let sql = statement(&format!("{}.{}", quoted(&tenant.schema_name), quoted(table)));
            if !change(&mut connection, &sql, table).await? {
                left.push(table.clone());
            }
        }
        let _ = connection.close().await; // what it was for is done
        Ok(left)
    }
}

/// Runs a statement on a table and returns whether it is done. Another session may hold the table,
/// and then waits behind this one for [`LOCK_TIMEOUT_MS`] at most.
async fn change(connection: &mut PgConnection, sql: &str, table: &str) -> Result<bool, InboxError> {
    for number in 1..=TRIES {
        let Err(error) = connection.execute(sqlx::raw_sql(AssertSqlSafe(sql.to_owned()))).await
        else {
            return Ok(true);
        };
        match answered(&error) {
            Some(answer) if sqlstate::is_contention(&answer.sqlstate) => {}
            Some(answer) if SUPERSEDED.contains(&&*answer.sqlstate) => return Ok(true),
            Some(_) => {
                return Err(InboxError::Invalid(format!(
                    "the table `{table}` cannot have its changes captured: {}",
                    plain(&error)
                )));
            }
            None => return Err(error.into()),
        }
        if number < TRIES {
            tokio::time::sleep(PAUSE).await;
        }
    }
    Ok(false)
}
