//! Migrations of a tenant's own tables: named, applied once, by the role that owns them.

use std::time::Duration;

use oncebox_model::{
    connect,
    error::{InboxError, plain},
    sqlstate, tx,
};
use sha2::{Digest, Sha256};
use sqlx::{Connection, Executor, PgConnection, PgPool};
use tokio::time::sleep;

use crate::{
    database::{
        locks::{self, HostLock},
        migration_bounds::MigrationBounds,
        statements::{self, Statement},
        tenant_database::TenantDatabase,
    },
    handles::TenantDatabases,
    tenants::Tenant,
};

/// Shortest pause before another attempt. It doubles with each attempt.
const PAUSE_MIN: Duration = Duration::from_millis(100);
/// Longest pause before another attempt.
const PAUSE_MAX: Duration = Duration::from_secs(2);
/// Interval at which the holder of a lock is queried while a migration waits.
const LOOK: Duration = Duration::from_millis(50);
/// Application name of the sessions that apply migrations, in `pg_stat_activity`.
const SESSION_NAME: &str = "oncebox migration";

/// A migration that a tenant's schema holds.
#[derive(Debug, Clone, serde::Serialize, sqlx::FromRow)]
pub struct Migration {
    /// Name, unique within the tenant.
    pub name: String,
    /// SHA-256 of its text.
    #[serde(serialize_with = "hex::serde::serialize")]
    pub digest: Vec<u8>,
    /// Time at which it was applied.
    pub applied_at: chrono::DateTime<chrono::Utc>,
    /// Actor that applied it.
    pub applied_by: String,
}

/// A migration to be applied.
struct NewMigration<'a> {
    name: &'a str,
    /// SHA-256 of its text.
    digest: [u8; 32],
    statements: Vec<Statement>,
}

impl TenantDatabases<'_> {
    /// Applies a tenant's own DDL under a name, as the owner of its schema, over a short connection
    /// of its own. The statements and their record are committed together or not at all. Returns
    /// false where the schema holds the migration already.
    ///
    /// # Errors
    /// `Conflict` for a name that was applied with another text, while another migration of the
    /// tenant runs, and after the last attempt for a lock. `Statements` for statements that do not
    /// belong in a schema. `Invalid` for a bad name, and where PostgreSQL refuses a statement.
    pub async fn apply_migration(
        &self,
        tenant: &Tenant,
        name: &str,
        sql: &str,
    ) -> Result<bool, InboxError> {
        check_migration_name(name)?;
        let digest: [u8; 32] = Sha256::digest(sql).into();
        if self.is_applied(tenant, name, &digest).await? {
            return Ok(false);
        }
        let what = format!("migration `{name}`");
        let statements = statements::read(sql)
            .map_err(|problems| InboxError::Statements { what: what.clone(), problems })?;
        let migration = NewMigration { name, digest, statements };
        let database = self.get(tenant)?;
        let mut turn = take_turn(&database.pool, tenant).await?;
        let applied = self.apply_in_turn(tenant, &database, &migration).await;
        // Waits for the answer, so that the next migration finds the turn free. PostgreSQL releases
        // the lock of a closed connection only a while later.
        let lock = HostLock::TenantMigration(tenant.tenant_id);
        let _ = locks::release_for_session(&mut turn, lock).await;
        let _ = turn.close().await; // the turn ends either way
        let is_new = applied?;
        if is_new && let Err(error) = self.copy_migrations(tenant).await {
            tracing::warn!(tenant = tenant.name, migration = name, %error, "a migration is \
                recorded in the tenant's own database alone; it is copied later");
        }
        Ok(is_new)
    }

    /// Applies the statements of a migration that has the turn. Returns whether they were new.
    async fn apply_in_turn(
        &self,
        tenant: &Tenant,
        database: &TenantDatabase,
        migration: &NewMigration<'_>,
    ) -> Result<bool, InboxError> {
        let NewMigration { name, digest, statements } = migration;
        let credentials = self.credentials(tenant)?;
        // A migration of another host may have finished just before.
        if self.is_applied(tenant, name, digest).await? {
            return Ok(false);
        }
        let MigrationBounds { lock_timeout_ms, statement_timeout_ms, .. } = self.0.migrations;
        // The meaning of a backslash in quotes decides where a statement ends.
        let options = [
            ("search_path", tenant.schema_name.clone()),
            ("standard_conforming_strings", "on".to_owned()),
            ("lock_timeout", lock_timeout_ms.to_string()),
            ("statement_timeout", statement_timeout_ms.to_string()),
            ("idle_in_transaction_session_timeout", "60s".to_owned()),
            // A migration ends soon after its host dies, and releases its locks.
            ("client_connection_check_interval", "500".to_owned()),
        ];
        let options = database
            .options
            .clone()
            .application_name(SESSION_NAME)
            .username(&tenant.owner_login)
            .password(&credentials.owner_password)
            .answer_timeout(connect::answer_max(statement_timeout_ms))
            .options(options);
        let mut connection = PgConnection::connect_with(&options).await?;
        let applied = self
            .try_migration(
                &mut connection,
                &database.pool,
                &credentials.secret,
                name,
                statements,
                digest,
            )
            .await;
        let _ = connection.close().await; // work that is not committed by now never is
        applied.map_err(|refusal| refusal.into_error(&format!("migration `{name}`")))?;
        Ok(true)
    }

    /// Returns whether the tenant's schema holds a migration of this name and text. A migration of
    /// this name with another text is a `Conflict`.
    async fn is_applied(
        &self,
        tenant: &Tenant,
        name: &str,
        digest: &[u8],
    ) -> Result<bool, InboxError> {
        match self.migrations(&tenant.name).await?.into_iter().find(|known| known.name == name) {
            None => Ok(false),
            Some(known) if known.digest == digest => Ok(true),
            Some(_) => Err(InboxError::conflict(format!(
                "migration `{name}` of tenant `{}` was applied with another text; write what is \
                    new as a migration of its own",
                tenant.name
            ))),
        }
    }

    /// Applies a migration, and retries after a pause where a lock was not available in time.
    /// During a pause, none of its work and none of its locks remain.
    async fn try_migration(
        &self,
        connection: &mut PgConnection,
        pool: &PgPool,
        secret: &[u8; 32],
        name: &str,
        statements: &[Statement],
        digest: &[u8],
    ) -> Result<(), Refusal> {
        let backend: i32 =
            sqlx::query_scalar("SELECT pg_backend_pid()").fetch_one(&mut *connection).await?;
        let (mut pause, mut attempt, mut holder) = (PAUSE_MIN, 1, None);
        loop {
            let ran = tokio::select! {
                ran = self.run_migration(connection, secret, name, statements, digest) => ran,
                never = look_for_holder(pool, backend, &mut holder) => match never {},
            };
            let refusal = match ran {
                Err(refusal) if refusal.is_busy() => refusal,
                ran => return ran,
            };
            if attempt >= self.0.migrations.attempts_max {
                return Err(Refusal { busy: Some(Busy { attempts: attempt, holder }), ..refusal });
            }
            tracing::info!(
                migration = name,
                attempt,
                holder,
                "migration waits: a lock was not to be had in time"
            );
            connection.set_row_bytes_max(usize::MAX);
            connection.execute("ROLLBACK").await?;
            sleep(pause.mul_f64(0.5 + rand::random::<f64>() / 2.0)).await;
            (pause, attempt) = ((pause * 2).min(PAUSE_MAX), attempt + 1);
        }
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
        // Rows of the tenant's statements are not needed, so none is taken into memory.
        connection.set_row_bytes_max(0);
        for statement in statements {
            // Each statement is sent alone over the extended protocol, which takes no second
            // statement beside it.
            let query = sqlx::query(sqlx::AssertSqlSafe(statement.text.clone())).persistent(false);
            query.execute(&mut *connection).await.map_err(|error| Refusal {
                line: Some(statement.line),
                error,
                busy: None,
            })?;
        }
        connection.set_row_bytes_max(usize::MAX);
        // Deferred constraints belong to the migration, and their errors are read here.
        connection.execute("SET CONSTRAINTS ALL IMMEDIATE").await?;
        sqlx::query(APPLIED)
            .bind(&secret[..])
            .bind(name)
            .bind(digest)
            .bind(&self.0.actor)
            .execute(&mut *connection)
            .await?;
        connection.execute("COMMIT").await?;
        Ok(())
    }

    /// Returns the migrations that a tenant's schema holds, in the order in which they were
    /// applied.
    ///
    /// # Errors
    /// `NotFound` for an unknown tenant, or an error of its database.
    pub async fn migrations(&self, tenant: &str) -> Result<Vec<Migration>, InboxError> {
        self.migrations_held(&self.0.tenants().get(tenant).await?).await
    }

    /// Returns the migrations that the schema of a loaded tenant holds, in the order in which they
    /// were applied.
    pub(crate) async fn migrations_held(
        &self,
        tenant: &Tenant,
    ) -> Result<Vec<Migration>, InboxError> {
        const LIST: &str = "SELECT name, digest, applied_at, applied_by FROM \
            oncebox.tenant_migration \
            WHERE tenant_id = $1 ORDER BY applied_at, name";
        Ok(sqlx::query_as(LIST).bind(tenant.tenant_id).fetch_all(&self.get(tenant)?.pool).await?)
    }
}

/// Takes the turn of a tenant's migration, which lasts as long as the returned connection. Fails
/// with `Conflict` while another migration is applied. That migration goes on within its bounds
/// even where its request was given up. A later request with its name and text learns the result.
async fn take_turn(pool: &PgPool, tenant: &Tenant) -> Result<PgConnection, InboxError> {
    let mut turn = pool.acquire().await?.detach();
    if locks::try_for_session(&mut turn, HostLock::TenantMigration(tenant.tenant_id)).await? {
        return Ok(turn);
    }
    Err(InboxError::conflict(format!(
        "a migration of tenant `{}` is being applied; give this one again when that has ended. A \
            migration goes on when its request \
         was given up, and the same name and text again says what became of it",
        tenant.name
    )))
}

/// An error of PostgreSQL against a migration.
struct Refusal {
    /// Line of the refused statement, from 1.
    line: Option<usize>,
    error: sqlx::Error,
    /// Set after the last attempt.
    busy: Option<Busy>,
}

/// The obstacle of a migration that was given up.
struct Busy {
    attempts: u32,
    /// Description of the session that held the lock, as far as it was seen.
    holder: Option<String>,
}

impl Refusal {
    /// Returns whether the error comes from locks of other sessions. Another attempt may find them
    /// free.
    fn is_busy(&self) -> bool {
        const BUSY: [&str; 2] = [sqlstate::LOCK_NOT_AVAILABLE, sqlstate::DEADLOCK_DETECTED];
        tx::answered(&self.error).is_some_and(|answer| BUSY.contains(&&*answer.sqlstate))
    }

    fn into_error(self, what: &str) -> InboxError {
        let Some(Busy { attempts, holder }) = &self.busy else {
            return InboxError::Invalid(format!("{what} was not applied: {self}"));
        };
        let held =
            holder.clone().unwrap_or_else(|| "who held it was gone before it was seen".to_owned());
        InboxError::conflict(format!(
            "{what} was not applied: {self}; it was tried {attempts} times, and gives way so that \
                messages do not queue behind it; {held}. \
             Wait for that to end, or end it, and apply the migration again"
        ))
    }
}

/// Records the holder of the lock that a session waits for, at every [`LOOK`]. Never returns.
async fn look_for_holder(
    pool: &PgPool,
    backend: i32,
    holder: &mut Option<String>,
) -> std::convert::Infallible {
    const HOLDER: &str = "SELECT format('%s is held by process %s, login `%s`%s%s', \
            coalesce((SELECT 'relation `' || l.relation::regclass || '`' FROM pg_locks l \
                WHERE l.pid = $1 AND NOT l.granted AND l.relation IS NOT NULL LIMIT 1), 'the \
                lock'), a.pid, a.usename, \
            CASE WHEN a.application_name <> '' THEN ' (' || a.application_name || ')' END, \
            ', ' || a.state || ', its transaction ' || (extract(epoch FROM clock_timestamp() - \
            a.xact_start))::int || ' s old') \
        FROM pg_stat_activity w CROSS JOIN LATERAL unnest(pg_blocking_pids(w.pid)) AS b (pid) JOIN \
        pg_stat_activity a ON a.pid = b.pid \
        WHERE w.pid = $1 AND w.wait_event_type = 'Lock' ORDER BY a.xact_start LIMIT 1";
    loop {
        sleep(LOOK).await;
        if let Ok(Some(found)) = sqlx::query_scalar(HOLDER).bind(backend).fetch_optional(pool).await
        {
            *holder = Some(found);
        }
    }
}

impl From<sqlx::Error> for Refusal {
    fn from(error: sqlx::Error) -> Self {
        Self { line: None, error, busy: None }
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
        "`{name}` cannot be the name of a migration; use a letter or digit, then up to 99 of A-Z, \
            a-z, 0-9, `.`, `_` and `-`"
    )))
}
