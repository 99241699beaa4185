//! What a person can do, as one set of functions; every change leaves an audit row in its own
//! transaction.

use serde_json::{Value, json};
use sqlx::{
    Connection, Executor, PgConnection, PgPool,
    postgres::{PgConnectOptions, PgPoolOptions},
};
use std::time::Duration;

use crate::{
    audit::Subject,
    error::InboxError,
    keys::{Login, MasterKey, secret_hash},
    policy::Policy,
    scram,
};

/// Connections of the host's own login: the supervisor, the API, and one that listens.
const CONNECTIONS_MAX: u32 = 8;
/// How long the database may take to answer.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);

/// The host's own access to its database, with the master key.
#[derive(Clone)]
pub struct Admin {
    /// Connections of the host's login.
    pub pool: PgPool,
    pub(crate) options: PgConnectOptions,
    pub(crate) key: MasterKey,
    pub(crate) actor: String,
}

/// A tenant's row.
#[derive(Debug, Clone, serde::Serialize, sqlx::FromRow)]
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
    /// When it was created.
    pub created_at: chrono::DateTime<chrono::Utc>,
}

/// A consumer's row.
#[derive(Debug, Clone, serde::Serialize, sqlx::FromRow)]
pub struct Consumer {
    /// Key.
    pub consumer_id: i32,
    /// Its tenant.
    #[serde(skip)]
    pub tenant_id: i32,
    /// Name of its tenant.
    pub tenant: String,
    /// Name.
    pub name: String,
    /// Policy, as kept.
    #[serde(serialize_with = "without_secrets")]
    pub policy: Value,
    /// Generation of its deployments.
    pub generation: i64,
    /// When it was created.
    pub created_at: chrono::DateTime<chrono::Utc>,
}

impl Consumer {
    /// The policy for people: without the values of Kafka's properties, which may be passwords.
    pub fn policy_shown(&self) -> Value {
        shown(&self.policy)
    }

    /// The policy, typed.
    pub fn policy(&self) -> Result<Policy, InboxError> {
        serde_json::from_value(self.policy.clone()).map_err(|error| {
            InboxError::Invalid(format!("the policy of consumer `{}/{}` is not readable: {error}", self.tenant, self.name))
        })
    }
}

impl Admin {
    /// Access for one actor; nothing is connected yet.
    pub fn new(options: PgConnectOptions, key: MasterKey, actor: impl Into<String>) -> Self {
        let options = options.application_name("oncebox host");
        let pool =
            PgPoolOptions::new().max_connections(CONNECTIONS_MAX).acquire_timeout(CONNECT_TIMEOUT).connect_lazy_with(options.clone());
        Self { pool, options, key, actor: actor.into() }
    }

    /// The same access for someone else, whose name the audit log keeps.
    pub fn acting_as(&self, actor: impl Into<String>) -> Self {
        Self { actor: actor.into(), ..self.clone() }
    }

    /// Key of the streams that a tenant's guests get for randomness.
    pub fn random_key(&self, login: &str) -> [u8; 32] {
        self.key.random_key(login)
    }

    /// Whether the database answers and holds the host's schema.
    pub async fn check(&self) -> Result<(), InboxError> {
        // Not the pool: it would try again until its time is up, and then say only that.
        let connecting = tokio::time::timeout(CONNECT_TIMEOUT, PgConnection::connect_with(&self.options)).await;
        let mut connection = connecting.map_err(|_| InboxError::Unreachable(sqlx::Error::Io(std::io::ErrorKind::TimedOut.into())))??;
        let found: Option<String> = sqlx::query_scalar("SELECT to_regclass('oncebox.inbox')::text").fetch_one(&mut connection).await?;
        let _ = connection.close().await; // the answer is there
        found.map(drop).ok_or_else(|| InboxError::NotFound("the database holds no inbox; run `oncebox migrate` first".to_owned()))
    }

    /// Create a tenant: its schema and its two login roles.
    pub async fn create_tenant(&self, name: &str) -> Result<Tenant, InboxError> {
        check_name("tenant", name)?;
        let opaque = hex::encode(rand::random::<[u8; 6]>());
        let (schema, login, owner) = (format!("t_{opaque}"), format!("oncebox_{opaque}"), format!("oncebox_{opaque}_owner"));
        let mut tx = self.pool.begin().await?;
        for statement in self.role_statements(&schema, &login, &owner).await? {
            tx.execute(sqlx::raw_sql(sqlx::AssertSqlSafe(statement))).await?;
        }
        const INSERT: &str =
            "INSERT INTO oncebox.tenant (name, schema_name, login, owner_login, secret_hash) VALUES ($1, $2, $3, $4, $5) RETURNING *";
        let tenant = sqlx::query_as(INSERT)
            .bind(name)
            .bind(&schema)
            .bind(&login)
            .bind(&owner)
            .bind(secret_hash(&self.key.secret(&login)))
            .fetch_one(&mut *tx)
            .await
            .map_err(|error| taken(error, "tenant", name))?;
        self.audit(&mut tx, "tenant.create", Subject::tenant(name), json!({})).await?;
        tx.commit().await?;
        self.restrict_logs(&login).await;
        Ok(tenant)
    }

    async fn role_statements(&self, schema: &str, login: &str, owner: &str) -> Result<Vec<String>, InboxError> {
        let database: String = sqlx::query_scalar("SELECT quote_ident(current_database())").fetch_one(&self.pool).await?;
        let guest_verifier = scram::verifier(&self.key.password(login, Login::Guest));
        let owner_verifier = scram::verifier(&self.key.password(owner, Login::Owner));
        Ok(vec![
            format!("CREATE ROLE {login} LOGIN NOINHERIT PASSWORD '{guest_verifier}'"),
            format!("CREATE ROLE {owner} LOGIN NOINHERIT CONNECTION LIMIT 4 PASSWORD '{owner_verifier}'"),
            // A login that is no superuser may only give away what it could also have.
            format!(
                "DO $$ BEGIN IF NOT (SELECT rolsuper FROM pg_roles WHERE rolname = current_user) THEN EXECUTE format('GRANT {owner}, {login} TO %I', current_user); END IF; END $$"
            ),
            format!("GRANT CONNECT ON DATABASE {database} TO {login}, {owner}"),
            format!("CREATE SCHEMA {schema} AUTHORIZATION {owner}"),
            format!("GRANT USAGE ON SCHEMA {schema}, oncebox_host TO {login}"),
            format!("GRANT EXECUTE ON ALL FUNCTIONS IN SCHEMA oncebox_host TO {login}"),
            format!("GRANT USAGE ON SCHEMA oncebox_host TO {owner}"),
            format!("GRANT EXECUTE ON FUNCTION oncebox_host.migration_applied TO {owner}"),
            format!(
                "ALTER DEFAULT PRIVILEGES FOR ROLE {owner} IN SCHEMA {schema} GRANT SELECT, INSERT, UPDATE, DELETE ON TABLES TO {login}"
            ),
            format!("ALTER DEFAULT PRIVILEGES FOR ROLE {owner} IN SCHEMA {schema} GRANT USAGE ON SEQUENCES TO {login}"),
            format!("ALTER ROLE {login} SET default_transaction_read_only = on"),
            format!("ALTER ROLE {owner} SET search_path = {schema}"),
        ])
    }

    /// Keep parameters of slow statements out of the server's log, bound temporary files, and notice
    /// deadlocks soon: on hot rows the wait for the detector is most of the time. Only a superuser may
    /// say so.
    async fn restrict_logs(&self, login: &str) {
        for setting in ["log_parameter_max_length = 0", "temp_file_limit = '256MB'", "deadlock_timeout = '100ms'"] {
            let statement = format!("ALTER ROLE {login} SET {setting}");
            if let Err(error) = self.pool.execute(sqlx::raw_sql(sqlx::AssertSqlSafe(statement))).await {
                tracing::warn!(%error, setting, "failed to set a default of the tenant's role; a superuser has to");
            }
        }
    }

    /// Take back a tenant that was just created and has neither consumers nor sessions, so that its
    /// creation can be tried again.
    pub async fn take_back_tenant(&self, tenant: &Tenant) -> Result<(), InboxError> {
        let Tenant { schema_name: schema, login, owner_login: owner, .. } = tenant;
        let database: String = sqlx::query_scalar("SELECT quote_ident(current_database())").fetch_one(&self.pool).await?;
        let mut tx = self.pool.begin().await?;
        sqlx::query("DELETE FROM oncebox.tenant WHERE tenant_id = $1").bind(tenant.tenant_id).execute(&mut *tx).await?;
        let undo = format!(
            "DROP SCHEMA {schema} CASCADE; REVOKE ALL ON DATABASE {database} FROM {login}, {owner}; \
             REVOKE ALL ON SCHEMA oncebox_host FROM {login}, {owner}; \
             REVOKE ALL ON ALL FUNCTIONS IN SCHEMA oncebox_host FROM {login}, {owner}; \
             DROP ROLE {login}, {owner}"
        );
        tx.execute(sqlx::raw_sql(sqlx::AssertSqlSafe(undo))).await?;
        self.audit(&mut tx, "tenant.take_back", Subject::tenant(&tenant.name), json!({})).await?;
        Ok(tx.commit().await?)
    }

    /// All tenants, by name.
    pub async fn tenants(&self) -> Result<Vec<Tenant>, InboxError> {
        Ok(sqlx::query_as("SELECT * FROM oncebox.tenant ORDER BY name").fetch_all(&self.pool).await?)
    }

    /// One tenant.
    pub async fn tenant(&self, name: &str) -> Result<Tenant, InboxError> {
        let tenant = sqlx::query_as("SELECT * FROM oncebox.tenant WHERE name = $1").bind(name).fetch_optional(&self.pool).await?;
        tenant.ok_or_else(|| InboxError::NotFound(format!("there is no tenant `{name}`; `oncebox tenant list` shows those there are")))
    }

    /// Create a consumer with its policy.
    pub async fn create_consumer(&self, tenant: &str, name: &str, policy: &Policy) -> Result<Consumer, InboxError> {
        check_name("consumer", name)?;
        policy.check()?;
        let tenant = self.tenant(tenant).await?;
        let mut tx = self.pool.begin().await?;
        const INSERT: &str = "INSERT INTO oncebox.consumer (tenant_id, name, policy, retention_class) VALUES ($1, $2, $3, $4)";
        sqlx::query(INSERT)
            .bind(tenant.tenant_id)
            .bind(name)
            .bind(json!(policy))
            .bind(policy.retention.class())
            .execute(&mut *tx)
            .await
            .map_err(|error| taken(error, "consumer", name))?;
        self.audit(&mut tx, "consumer.create", Subject::of(&tenant.name, name), json!({})).await?;
        tx.commit().await?;
        self.consumer(&tenant.name, name).await
    }

    /// All consumers, by tenant and name.
    pub async fn consumers(&self) -> Result<Vec<Consumer>, InboxError> {
        const LIST: &str = "SELECT c.consumer_id, c.tenant_id, t.name AS tenant, c.name, c.policy, c.generation, c.created_at \
            FROM oncebox.consumer c JOIN oncebox.tenant t USING (tenant_id) ORDER BY t.name, c.name";
        Ok(sqlx::query_as(LIST).fetch_all(&self.pool).await?)
    }

    /// One consumer.
    pub async fn consumer(&self, tenant: &str, name: &str) -> Result<Consumer, InboxError> {
        let found = self.consumers().await?.into_iter().find(|c| c.tenant == tenant && c.name == name);
        found.ok_or_else(|| {
            InboxError::NotFound(format!("there is no consumer `{tenant}/{name}`; `oncebox consumer list` shows those there are"))
        })
    }
}

fn shown(policy: &Value) -> Value {
    let mut policy = policy.clone();
    for (_, value) in policy.pointer_mut("/kafka/properties").and_then(Value::as_object_mut).into_iter().flatten() {
        *value = "…".into();
    }
    policy
}

fn without_secrets<S: serde::Serializer>(policy: &Value, serializer: S) -> Result<S::Ok, S::Error> {
    serde::Serialize::serialize(&shown(policy), serializer)
}

/// Whether something of a tenant, or a tenant, can have this name.
pub fn check_name(kind: &str, name: &str) -> Result<(), InboxError> {
    let sound = name.starts_with(|c: char| c.is_ascii_lowercase())
        && name.len() <= 63
        && name.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-');
    if sound {
        return Ok(());
    }
    Err(InboxError::Invalid(format!("`{name}` cannot be the name of a {kind}; use a lower-case letter, then up to 62 of a-z, 0-9 and `-`")))
}

fn taken(error: sqlx::Error, kind: &str, name: &str) -> InboxError {
    match error.as_database_error().and_then(|e| e.constraint()) {
        Some("tenant_name_unique" | "consumer_name_unique") => InboxError::conflict(format!("there is a {kind} `{name}` already")),
        _ => error.into(),
    }
}
