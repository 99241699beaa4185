//! Tenants: their rows, roles and schemas.

// Suspend and resume a tenant, and change its limits.
pub(crate) mod suspend;
// End a tenant's access to a database.
pub(crate) mod shut_out;
// Delete a tenant, in steps that may each be repeated.
pub(crate) mod delete;
// Move a tenant to another database, in such steps.
pub(crate) mod moves;
// The two roles of a tenant, and its schema.
pub(crate) mod roles;
// Passwords and secrets of a tenant's logins.
pub(crate) mod credentials;
// Rotation of credentials while sessions run.
pub(crate) mod rotation;
// The master key, and the values derived from it.
pub(crate) mod keys;
// Values sealed under that key.
pub(crate) mod seal;
// Verifiers of passwords, as PostgreSQL stores them.
pub(crate) mod scram;

use oncebox_model::{error::InboxError, status::TenantState, tenant_limits::TenantLimits};
use serde::Serialize;
use serde_json::json;
use sqlx::{Executor, PgConnection, PgPool};

use self::{credentials::Credentials, keys::secret_hash, roles::role_statements};
use crate::{
    audit::Subject,
    control::taken,
    database::locks::{self, HostLock},
    handles::{TenantDatabases, Tenants},
};

/// A tenant's row.
#[derive(Debug, Clone, Serialize, sqlx::FromRow)]
pub struct Tenant {
    /// Key.
    pub tenant_id: i32,
    /// Name.
    pub name: String,
    /// Schema of the tenant's tables.
    pub schema_name: String,
    /// Login that handlers run as.
    pub login: String,
    /// Login that owns the schema.
    pub owner_login: String,
    /// State.
    pub state: TenantState,
    /// Limits that hosts enforce for the tenant.
    #[sqlx(json)]
    pub limits: TenantLimits,
    /// Number of the latest change; it grows with every change that running hosts must observe.
    pub revision: i64,
    /// SHA-256 of the secret that host functions require of the tenant's sessions.
    #[serde(skip)]
    pub(crate) secret_hash: Vec<u8>,
    /// Credentials, sealed under the master key; none where they are derived from that key.
    #[serde(skip)]
    pub(crate) credentials: Option<Vec<u8>>,
    /// Address of the database with the tenant's inbox and tables, sealed under the master key;
    /// none for the host's database.
    #[serde(skip)]
    pub(crate) database_url: Option<Vec<u8>>,
    /// Name of that database in the settings of hosts; where it has none, its host, port and name.
    pub database: Option<String>,
    /// Time of creation.
    pub created_at: chrono::DateTime<chrono::Utc>,
}

impl Tenants<'_> {
    /// Creates a tenant in the host's database: its row, its schema and its two login roles. Returns
    /// the tenant.
    ///
    /// # Errors
    /// `Conflict` for a name in use.
    pub(crate) async fn create_here(&self, name: &str) -> Result<Tenant, InboxError> {
        let opaque = hex::encode(rand::random::<[u8; 6]>());
        let (schema, login, owner) =
            (format!("t_{opaque}"), format!("oncebox_{opaque}"), format!("oncebox_{opaque}_owner"));
        let mut tx = self.0.pool.begin().await?;
        lock_grants(&mut tx).await?;
        let credentials = Credentials::generate();
        let database: String = sqlx::query_scalar("SELECT quote_ident(current_database())")
            .fetch_one(&mut *tx)
            .await?;
        for statement in role_statements(&database, &schema, &login, &owner, &credentials) {
            tx.execute(sqlx::raw_sql(sqlx::AssertSqlSafe(statement))).await?;
        }
        const INSERT: &str = "INSERT INTO oncebox.tenant (name, schema_name, login, owner_login, \
            secret_hash, credentials) \
            VALUES ($1, $2, $3, $4, $5, $6) RETURNING *";
        let tenant = sqlx::query_as(INSERT)
            .bind(name)
            .bind(&schema)
            .bind(&login)
            .bind(&owner)
            .bind(secret_hash(&credentials.secret))
            .bind(credentials.sealed(&self.0.key, &login))
            .fetch_one(&mut *tx)
            .await
            .map_err(|error| taken(error, "tenant", name))?;
        self.0.audit().record(&mut tx, "tenant.create", Subject::tenant(name), json!({})).await?;
        tx.commit().await?;
        self.0.tenant_databases().restrict_logs(&self.0.pool, &login, &owner).await;
        Ok(tenant)
    }
}

impl TenantDatabases<'_> {
    /// Sets defaults of the tenant's roles. They keep parameters of slow statements out of the
    /// server's log and bound temporary files. The guest login also notices deadlocks soon: on hot
    /// rows the wait for the detector is most of the time. Only a superuser may set them; each
    /// failure is logged as a warning.
    pub(crate) async fn restrict_logs(&self, pool: &PgPool, login: &str, owner: &str) {
        let settings = [
            "log_parameter_max_length = 0",
            "temp_file_limit = '256MB'",
            "deadlock_timeout = '100ms'",
        ];
        // The owner's session binds the secret, too, with which it records a migration.
        for (role, setting) in settings
            .map(|setting| (login, setting))
            .into_iter()
            .chain([(owner, settings[0]), (owner, settings[1])])
        {
            let statement = format!("ALTER ROLE {role} SET {setting}");
            if let Err(error) = pool.execute(sqlx::raw_sql(sqlx::AssertSqlSafe(statement))).await {
                tracing::warn!(%error, setting, "failed to set a default of the tenant's role; a \
                    superuser has to");
            }
        }
    }
}

impl Tenants<'_> {
    /// Removes a tenant that was just created and has neither consumers nor sessions, so that its
    /// creation can be tried again.
    ///
    /// # Errors
    /// An error of the host's database or of the tenant's.
    pub async fn take_back(&self, tenant: &Tenant) -> Result<(), InboxError> {
        if tenant.database.is_some() {
            return self.0.tenant_databases().take_back_from_database(tenant).await;
        }
        let Tenant { schema_name: schema, login, owner_login: owner, .. } = tenant;
        let database: String = sqlx::query_scalar("SELECT quote_ident(current_database())")
            .fetch_one(&self.0.pool)
            .await?;
        let mut tx = self.0.pool.begin().await?;
        lock_grants(&mut tx).await?;
        sqlx::query("DELETE FROM oncebox.tenant WHERE tenant_id = $1")
            .bind(tenant.tenant_id)
            .execute(&mut *tx)
            .await?;
        let undo = format!(
            "DROP SCHEMA {schema} CASCADE; REVOKE ALL ON DATABASE {database} FROM {login}, \
                {owner}; \
             REVOKE ALL ON SCHEMA oncebox_host FROM {login}, {owner}; \
             REVOKE ALL ON ALL FUNCTIONS IN SCHEMA oncebox_host FROM {login}, {owner}; \
             DROP ROLE {login}, {owner}"
        );
        tx.execute(sqlx::raw_sql(sqlx::AssertSqlSafe(undo))).await?;
        self.0
            .audit()
            .record(&mut tx, "tenant.take_back", Subject::tenant(&tenant.name), json!({}))
            .await?;
        Ok(tx.commit().await?)
    }

    /// Lists all tenants, by name.
    ///
    /// # Errors
    /// An error of the host's database.
    pub async fn list(&self) -> Result<Vec<Tenant>, InboxError> {
        Ok(sqlx::query_as("SELECT * FROM oncebox.tenant ORDER BY name")
            .fetch_all(&self.0.pool)
            .await?)
    }

    /// Returns one tenant.
    ///
    /// # Errors
    /// `NotFound` where there is no such tenant, or an error of the host's database.
    pub async fn get(&self, name: &str) -> Result<Tenant, InboxError> {
        let tenant = sqlx::query_as("SELECT * FROM oncebox.tenant WHERE name = $1")
            .bind(name)
            .fetch_optional(&self.0.pool)
            .await?;
        tenant.ok_or_else(|| {
            InboxError::NotFound(format!(
                "there is no tenant `{name}`; `oncebox tenant list` shows those there are"
            ))
        })
    }
}

/// Locks changes of privileges until the transaction ends. Two concurrent transactions would write
/// one list of privileges, and PostgreSQL would refuse one of them. A process that stops in the
/// middle holds up the others for a minute.
pub(crate) async fn lock_grants(connection: &mut PgConnection) -> Result<(), InboxError> {
    connection.execute("SET LOCAL idle_in_transaction_session_timeout = '60s'").await?;
    locks::take(connection, HostLock::Grants).await
}

/// Locks changes of privileges until the connection ends. A process that stops in the middle holds
/// up the others for a minute.
pub(crate) async fn lock_grants_for_session(
    connection: &mut PgConnection,
) -> Result<(), InboxError> {
    connection
        .execute(
            "SET idle_session_timeout = '60s'; SET idle_in_transaction_session_timeout = '60s'",
        )
        .await?;
    locks::take_for_session(connection, HostLock::Grants).await
}
