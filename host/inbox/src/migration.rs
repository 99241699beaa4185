//! Migrations of a tenant's own tables: named, applied once, by the role that owns them.

use sha2::{Digest, Sha256};
use sqlx::{Connection, Executor, PgConnection};

use crate::{
    admin::Admin,
    error::{InboxError, plain},
    statements::{self, Statement},
    tenant::Tenant,
};

/// A migration that a tenant's schema holds.
#[derive(Debug, Clone, serde::Serialize, sqlx::FromRow)]
pub struct Migration {
    /// Its name, unique within the tenant.
    pub name: String,
    /// SHA-256 of its text.
    #[serde(serialize_with = "hex::serde::serialize")]
    pub digest: Vec<u8>,
    /// When it was applied.
    pub applied_at: chrono::DateTime<chrono::Utc>,
    /// Who applied it.
    pub applied_by: String,
}

impl Admin {
    /// Apply a tenant's own DDL under a name, as the owner of its schema, over a short connection of its
    /// own: its statements and their record, or neither. False: the schema holds it already. The same name
    /// with another text is refused, and so is a text with statements that are not for a schema.
    pub async fn apply_migration(&self, tenant: &Tenant, name: &str, sql: &str) -> Result<bool, InboxError> {
        check_migration_name(name)?;
        let digest: [u8; 32] = Sha256::digest(sql).into();
        if let Some(known) = self.migrations(&tenant.name).await?.into_iter().find(|known| known.name == name) {
            if known.digest == digest {
                return Ok(false);
            }
            return Err(InboxError::conflict(format!(
                "migration `{name}` of tenant `{}` was applied with another text; write what is new as a migration of its own",
                tenant.name
            )));
        }
        let what = format!("migration `{name}`");
        let statements = statements::read(sql).map_err(|problems| InboxError::Statements { what: what.clone(), problems })?;
        let credentials = self.credentials(tenant)?;
        // Statements are told from each other by what a backslash in quotes means.
        let options = [("search_path", tenant.schema_name.as_str()), ("standard_conforming_strings", "on")];
        let place = self.place(tenant)?;
        let options = place.options.username(&tenant.owner_login).password(&credentials.owner_password).options(options);
        let mut connection = PgConnection::connect_with(&options).await?;
        let applied = self.run_migration(&mut connection, &credentials.secret, name, &statements, &digest).await;
        let _ = connection.close().await; // what is not committed by now never is
        applied.map_err(|error| InboxError::Invalid(format!("{what} was not applied: {error}")))?;
        if let Err(error) = self.copy_migrations(tenant).await {
            tracing::warn!(tenant = tenant.name, migration = name, %error, "a migration is recorded in the tenant's own database alone; it is copied later");
        }
        Ok(true)
    }

    async fn run_migration(
        &self,
        connection: &mut PgConnection,
        secret: &[u8; 32],
        name: &str,
        statements: &[Statement],
        digest: &[u8],
    ) -> Result<(), Refusal> {
        const APPLIED: &str = "SELECT oncebox_host.migration_applied($1, $2, $3, $4)";
        connection.execute("BEGIN").await?;
        // Nobody wants rows of the tenant's statements, so none is taken into memory.
        connection.set_row_bytes_max(0);
        for statement in statements {
            // Alone and over the extended protocol, which takes no second statement beside it.
            let query = sqlx::query(sqlx::AssertSqlSafe(statement.text.clone())).persistent(false);
            query.execute(&mut *connection).await.map_err(|error| Refusal { line: Some(statement.line), error })?;
        }
        connection.set_row_bytes_max(usize::MAX);
        // Constraints that wait for the end are the migration's own, and their errors are read here.
        connection.execute("SET CONSTRAINTS ALL IMMEDIATE").await?;
        sqlx::query(APPLIED).bind(&secret[..]).bind(name).bind(digest).bind(&self.actor).execute(&mut *connection).await?;
        connection.execute("COMMIT").await?;
        Ok(())
    }

    /// The migrations that a tenant's schema holds, in the order in which they were applied.
    pub async fn migrations(&self, tenant: &str) -> Result<Vec<Migration>, InboxError> {
        self.migrations_held(&self.tenant(tenant).await?).await
    }

    /// The same, of a tenant whose row is at hand.
    pub(crate) async fn migrations_held(&self, tenant: &Tenant) -> Result<Vec<Migration>, InboxError> {
        const LIST: &str = "SELECT name, digest, applied_at, applied_by FROM oncebox.tenant_migration \
            WHERE tenant_id = $1 ORDER BY applied_at, name";
        Ok(sqlx::query_as(LIST).bind(tenant.tenant_id).fetch_all(&self.place(tenant)?.pool).await?)
    }
}

/// What PostgreSQL says against a migration.
struct Refusal {
    /// The line of the statement that it was said to.
    line: Option<usize>,
    error: sqlx::Error,
}

impl From<sqlx::Error> for Refusal {
    fn from(error: sqlx::Error) -> Self {
        Self { line: None, error }
    }
}

impl std::fmt::Display for Refusal {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        if let Some(line) = self.line {
            write!(f, "line {line}: ")?;
        }
        f.write_str(&plain(&self.error))
    }
}

fn check_migration_name(name: &str) -> Result<(), InboxError> {
    let sound = name.starts_with(|c: char| c.is_ascii_alphanumeric())
        && name.len() <= 100
        && name.chars().all(|c| c.is_ascii_alphanumeric() || ".-_".contains(c));
    if sound {
        return Ok(());
    }
    Err(InboxError::Invalid(format!(
        "`{name}` cannot be the name of a migration; use a letter or digit, then up to 99 of A-Z, a-z, 0-9, `.`, `_` and `-`"
    )))
}
