//! Creation and removal of tenants outside the host's database.

use oncebox_model::{error::InboxError, hooks};
use serde_json::json;
use sqlx::{AssertSqlSafe, Connection, Executor, PgConnection};
use uuid::Uuid;

use super::{
    DatabaseUrl, PURPOSE, TenantDatabase, answered_within, identity::keep_id, named::OpenNamed,
    open::CONNECTIONS_MAX, replica,
};
use crate::{
    audit::Subject,
    control::{check_name, taken},
    handles::{TenantDatabases, Tenants},
    tenants::{Tenant, credentials::Credentials, keys::secret_hash},
};

/// Longest time for the removal of a tenant from its own database.
const REMOVE_MAX: std::time::Duration = std::time::Duration::from_secs(60);

/// The place of a new tenant.
struct NewPlace<'a> {
    /// Name or address of the database, for its row.
    database: &'a str,
    /// What is sealed as its address.
    address: &'a str,
    /// Id of a named database.
    id: Option<Uuid>,
}

/// Address of a tenant in a named database. It is no URL, so that a host of the release before,
/// which knows no names, reports that and runs none of its consumers.
const NAMED: &str = "the configuration of hosts names its database";

impl Tenants<'_> {
    /// Creates a tenant whose inbox and tables are in a database of its own. That database is
    /// checked, brought up to date and taken before the tenant's row exists. Where the process dies
    /// after that, reconciliation finishes the work.
    ///
    /// # Errors
    /// `Invalid` for a bad name, or where the database cannot hold the inbox. `Conflict` for a name
    /// in use.
    pub async fn create_dedicated(
        &self,
        name: &str,
        url: &DatabaseUrl,
    ) -> Result<Tenant, InboxError> {
        check_name("tenant", name)?;
        let database = TenantDatabase::at(url, CONNECTIONS_MAX);
        let taken = self.0.tenant_databases().take(&database, url, None).await;
        database.pool.close().await;
        taken?;
        self.create_taken(name, &NewPlace { database: url.shown(), address: url.text(), id: None })
            .await
    }

    /// Creates a tenant in the database of this name, in the same steps.
    ///
    /// # Errors
    /// `NotFound` where no database has this name, else as [`Self::create_dedicated`].
    pub async fn create_in(&self, name: &str, database: &str) -> Result<Tenant, InboxError> {
        check_name("tenant", name)?;
        let open = self.0.named_databases.get(database)?;
        let databases = self.0.tenant_databases();
        let id = databases.take(&open.database, &open.named.url, Some(database)).await?;
        self.create_taken(name, &NewPlace { database, address: NAMED, id }).await
    }

    /// Creates a tenant in the named database with the most room, or in the host's database where
    /// no named one takes tenants. A named database that cannot be used is passed over.
    ///
    /// # Errors
    /// `Invalid` for a bad name. `Conflict` for a name in use. The error of the last database where
    /// none can be used.
    pub async fn create(&self, name: &str) -> Result<Tenant, InboxError> {
        check_name("tenant", name)?;
        let databases = self.0.tenant_databases();
        let mut failed = None;
        for OpenNamed { named, database } in databases.named_by_room().await? {
            match databases.take(database, &named.url, Some(&named.name)).await {
                Ok(id) => {
                    let place = NewPlace { database: &named.name, address: NAMED, id };
                    return self.create_taken(name, &place).await;
                }
                Err(error) => {
                    let database = named.name.as_str();
                    tracing::warn!(database, %error, "no tenant is created in this database");
                    failed = Some(error);
                }
            }
        }
        match failed {
            Some(error) => Err(error),
            None => self.create_here(name).await,
        }
    }

    /// Creates a tenant in a database that was taken for it.
    async fn create_taken(&self, name: &str, place: &NewPlace<'_>) -> Result<Tenant, InboxError> {
        let tenant = self.0.tenant_databases().insert(name, place).await?;
        hooks::point("tenant_database:create:after");
        if let Err(error) = self.0.tenant_databases().replicate(&tenant).await {
            self.0.tenant_databases().take_back_from_database(&tenant).await?;
            return Err(error);
        }
        Ok(tenant)
    }
}

impl TenantDatabases<'_> {
    /// Returns what the row of a tenant in a named database has as its address, sealed.
    pub(crate) fn sealed_name(&self, tenant: &Tenant) -> Vec<u8> {
        self.0.key.seal(PURPOSE, &tenant.login, NAMED.as_bytes())
    }

    /// Inserts the row of a tenant.
    async fn insert(&self, name: &str, place: &NewPlace<'_>) -> Result<Tenant, InboxError> {
        const INSERT: &str = "INSERT INTO oncebox.tenant (name, schema_name, login, owner_login, \
            secret_hash, credentials, database_url, database) \
            VALUES ($1, $2, $3, $4, $5, $6, $7, $8) RETURNING *";
        let opaque = hex::encode(rand::random::<[u8; 6]>());
        let (schema, login, owner) =
            (format!("t_{opaque}"), format!("oncebox_{opaque}"), format!("oncebox_{opaque}_owner"));
        let credentials = Credentials::generate();
        let NewPlace { database, address, id } = *place;
        let mut tx = self.0.pool.begin().await?;
        if let Some(id) = id {
            keep_id(&mut tx, database, id).await?;
        }
        let insert = sqlx::query_as(INSERT)
            .bind(name)
            .bind(&schema)
            .bind(&login)
            .bind(&owner)
            .bind(secret_hash(&credentials.secret))
            .bind(credentials.sealed(&self.0.key, &login))
            .bind(self.0.key.seal(PURPOSE, &login, address.as_bytes()))
            .bind(database);
        let tenant =
            insert.fetch_one(&mut *tx).await.map_err(|error| taken(error, "tenant", name))?;
        self.0
            .audit()
            .record(
                &mut tx,
                "tenant.create",
                Subject::tenant(name),
                json!({ "database": database }),
            )
            .await?;
        tx.commit().await?;
        Ok(tenant)
    }

    /// Removes a tenant that was just created, first from its own database. Its row is in state
    /// `deleting` until then, so that readers of the row know that it is going.
    pub(crate) async fn take_back_from_database(&self, tenant: &Tenant) -> Result<(), InboxError> {
        const DELETING: &str = "UPDATE oncebox.tenant SET state = 'deleting', revision = revision \
            + 1 WHERE tenant_id = $1";
        sqlx::query(DELETING).bind(tenant.tenant_id).execute(&self.0.pool).await?;
        let database = self.get(tenant)?;
        if !self.is_of(&database, tenant).await? {
            return Err(InboxError::conflict(format!(
                "the database of tenant `{}` is another one now; it is deleted once the URL is \
                    corrected",
                tenant.name
            )));
        }
        answered_within(REMOVE_MAX, remove_schema(&database, tenant)).await??;
        self.forget(tenant).await?;
        let mut tx = self.0.pool.begin().await?;
        sqlx::query("DELETE FROM oncebox.tenant WHERE tenant_id = $1")
            .bind(tenant.tenant_id)
            .execute(&mut *tx)
            .await?;
        self.0
            .audit()
            .record(&mut tx, "tenant.take_back", Subject::tenant(&tenant.name), json!({}))
            .await?;
        Ok(tx.commit().await?)
    }

    /// Removes the replica of a deleted tenant from its own database, and closes the host's
    /// connections to it. Its messages are gone by then. Its rows in the host's database, which
    /// list what exists there, are removed next.
    ///
    /// # Errors
    /// An error of the tenant's database, or its silence for too long.
    pub async fn forget(&self, tenant: &Tenant) -> Result<(), InboxError> {
        let database = self.get(tenant)?;
        if !database.is_dedicated {
            return Ok(());
        }
        answered_within(REMOVE_MAX, self.remove_replica(&database, tenant)).await??;
        // Work that still runs there holds a handle of its own; the last handle closes the pool.
        self.0.tenant_databases.remove(tenant.tenant_id);
        Ok(())
    }

    async fn remove_replica(
        &self,
        database: &TenantDatabase,
        tenant: &Tenant,
    ) -> Result<(), InboxError> {
        const SHADOWS: &str = "SELECT d.deployment_id FROM oncebox.deployment d JOIN \
            oncebox.consumer c USING (consumer_id) \
            WHERE c.tenant_id = $1 AND d.role = 'shadow'";
        let shadows: Vec<i64> =
            sqlx::query_scalar(SHADOWS).bind(tenant.tenant_id).fetch_all(&self.0.pool).await?;
        let mut connection = database.connect().await?;
        let mut tx = connection.begin().await?;
        replica::lock(&mut tx, tenant.tenant_id).await?;
        for table in ["shadow_difference", "shadow_sum", "shadow_total"] {
            let remove = format!("DELETE FROM oncebox.{table} WHERE deployment_id = ANY ($1)");
            sqlx::query(AssertSqlSafe(remove)).bind(&shadows).execute(&mut *tx).await?;
        }
        for table in ["consumer", "tenant_migration", "tenant"] {
            let remove = format!("DELETE FROM oncebox.{table} WHERE tenant_id = $1");
            sqlx::query(AssertSqlSafe(remove)).bind(tenant.tenant_id).execute(&mut *tx).await?;
        }
        tx.commit().await?;
        connection.close().await;
        Ok(())
    }
}

/// Removes schema and roles of a tenant that has neither consumers nor sessions.
async fn remove_schema(database: &TenantDatabase, tenant: &Tenant) -> Result<(), InboxError> {
    let Tenant { schema_name: schema, login, owner_login: owner, .. } = tenant;
    let mut connection = database.connect().await?;
    let database_name: String = sqlx::query_scalar("SELECT quote_ident(current_database())")
        .fetch_one(&mut *connection)
        .await?;
    let mut tx = connection.begin().await?;
    replica::lock(&mut tx, tenant.tenant_id).await?;
    tx.execute(AssertSqlSafe(format!("DROP SCHEMA IF EXISTS {schema} CASCADE"))).await?;
    for role in [login, owner] {
        if has_role(&mut tx, role).await? {
            let remove = format!(
                "REVOKE ALL ON DATABASE {database_name} FROM {role}; \
                 REVOKE ALL ON SCHEMA oncebox_host FROM {role}; \
                 REVOKE ALL ON ALL FUNCTIONS IN SCHEMA oncebox_host FROM {role}; DROP ROLE {role}"
            );
            tx.execute(sqlx::raw_sql(AssertSqlSafe(remove))).await?;
        }
    }
    tx.commit().await?;
    connection.close().await;
    Ok(())
}

async fn has_role(connection: &mut PgConnection, role: &str) -> Result<bool, InboxError> {
    Ok(sqlx::query_scalar("SELECT to_regrole($1) IS NOT NULL")
        .bind(role)
        .fetch_one(connection)
        .await?)
}
