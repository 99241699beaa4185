//! The host's own schema: the role that owns it, its migrations, and the privileges that are
//! revoked from PUBLIC.

use std::time::Duration;

use chrono::{DateTime, Utc};
use oncebox_model::{
    connect::connect,
    error::{InboxError, plain},
    hooks, sqlstate,
    tx::answered,
};
use sqlx::{
    ConnectOptions, Connection, Executor, PgConnection, PgPool, migrate::MigrateError,
    postgres::PgConnectOptions,
};

use tokio::time::{Instant, sleep};

use crate::{
    database::{
        functions::Functions,
        locks::{self, HostLock, MIGRATION_WAIT},
        reach,
    },
    tenants::lock_grants_for_session,
};

pub(crate) static MIGRATIONS: sqlx::migrate::Migrator = sqlx::migrate!("../../migrations");

/// Statements that revoke functions of `pg_catalog` from PUBLIC, where this login may. These
/// functions reach past a role, out of a transaction or into another session.
pub(super) const REVOKE_FUNCTIONS: &str = include_str!("revoke_functions.sql");
/// Query for the oids of those functions.
pub(crate) const REVOKED_FUNCTIONS: &str = include_str!("revoked_functions.sql");

/// Statements that revoke the host's functions from PUBLIC, which may execute every new function,
/// and grant tenants the ones that they call. Only missing changes are made: every grant writes a
/// list with an entry for each tenant. With hundreds of tenants, a host that grants everything
/// again takes a minute to start.
pub(crate) const GRANTS: &str = "DO $$ DECLARE g record; BEGIN \
    FOR g IN SELECT p.oid::regprocedure AS function FROM pg_proc p \
        WHERE p.pronamespace IN ('oncebox'::regnamespace, 'oncebox_host'::regnamespace) \
            AND (p.proacl IS NULL OR EXISTS (SELECT FROM aclexplode(p.proacl) a WHERE a.grantee = \
            0)) LOOP \
        EXECUTE format('REVOKE ALL ON FUNCTION %s FROM PUBLIC', g.function); \
    END LOOP; \
    FOR g IN SELECT m.oid::regprocedure AS function, string_agg(quote_ident(m.rolname), ', ') AS \
    roles FROM ( \
            SELECT p.oid, r.rolname, r.oid AS grantee FROM pg_proc p, oncebox.tenant t JOIN \
            pg_roles r ON r.rolname = t.login \
                WHERE p.pronamespace = 'oncebox_host'::regnamespace \
            UNION SELECT p.oid, r.rolname, r.oid FROM pg_proc p, oncebox.tenant t JOIN pg_roles r \
            ON r.rolname = t.owner_login \
                WHERE p.pronamespace = 'oncebox_host'::regnamespace AND p.proname = \
                'migration_applied') m \
            LEFT JOIN (SELECT p.oid, a.grantee FROM pg_proc p, aclexplode(p.proacl) a \
                WHERE p.pronamespace = 'oncebox_host'::regnamespace AND a.privilege_type = \
                'EXECUTE') known USING (oid, grantee) \
        WHERE known.oid IS NULL \
        GROUP BY m.oid LOOP \
        EXECUTE format('GRANT EXECUTE ON FUNCTION %s TO %s', g.function, g.roles); \
    END LOOP; \
    FOR g IN SELECT string_agg(quote_ident(r.rolname), ', ') AS roles FROM pg_roles r \
            JOIN (SELECT login AS rolname FROM oncebox.tenant UNION SELECT owner_login FROM \
            oncebox.tenant) t USING (rolname) \
        WHERE r.oid NOT IN (SELECT a.grantee FROM pg_namespace n, aclexplode(n.nspacl) a \
            WHERE n.nspname = 'oncebox_host' AND a.privilege_type = 'USAGE') \
        HAVING count(*) > 0 LOOP \
        EXECUTE format('GRANT USAGE ON SCHEMA oncebox_host TO %s', g.roles); \
    END LOOP; END $$";

/// Longest wait of a migration for a table, during which hosts wait behind it, and the pause until
/// it tries again.
const LOCK_WAIT: &str = "1s";
const LOCK_PAUSE: Duration = Duration::from_secs(2);

/// Databases that every new server has. The host connects to one of them to create its own.
const FIRST_DATABASES: [&str; 2] = ["postgres", "template1"];

/// Creates the database unless it exists. Returns its name where it was created.
///
/// # Errors
/// `Conflict` where this login may not create it, with the statement for a login that may.
pub async fn create_database(options: &PgConnectOptions) -> Result<Option<String>, InboxError> {
    let database = match reach::connect_to_own(options).await {
        Ok(connection) => {
            let _ = connection.close().await; // the database exists
            return Ok(None);
        }
        Err(InboxError::NoDatabase { database }) => database,
        Err(error) => return Err(error),
    };
    let create = format!("CREATE DATABASE {}", quoted(&database));
    let mut refusal = None;
    for first in FIRST_DATABASES {
        let created = match connect(&options.clone().database(first).disable_statement_logging())
            .await
        {
            Ok(mut connection) => {
                let created =
                    connection.execute(sqlx::raw_sql(sqlx::AssertSqlSafe(create.clone()))).await;
                let _ = connection.close().await; // its work is done
                created.map(drop).map_err(InboxError::Refused)
            }
            // A login may lack access to one of them.
            Err(error) => Err(error),
        };
        match created {
            Ok(()) => return Ok(Some(database)),
            // Another process created it first.
            Err(InboxError::Refused(error))
                if answered(&error)
                    .is_some_and(|answer| answer.sqlstate == sqlstate::DUPLICATE_DATABASE) =>
            {
                return Ok(None);
            }
            Err(error) => refusal = refusal.or(Some(error)),
        }
    }
    let why = match &refusal {
        Some(InboxError::Refused(error)) => plain(error),
        Some(error) => error.to_string(),
        None => String::new(),
    };
    let login = options.get_username();
    Err(InboxError::conflict(format!(
        "database `{database}` does not exist, and login `{login}` cannot create it ({why}); let a \
            superuser run: {create} OWNER {}",
        quoted(login)
    )))
}

/// Returns a name as a quoted SQL identifier.
pub(crate) fn quoted(name: &str) -> String {
    format!("\"{}\"", name.replace('"', "\"\""))
}

/// Brings a database up to date. Safe to repeat, and to run from several hosts at once. Returns the
/// steps against PUBLIC that this login may not carry out.
///
/// # Errors
/// `Invalid` where the database was made by other migrations. `HostLocked` where another process
/// holds a lock for too long.
pub async fn migrate(options: &PgConnectOptions) -> Result<Vec<String>, InboxError> {
    migrate_with(options, &Functions::of_this_program()).await
}

/// Brings a database up to date as a program with these functions does. For tests of how releases
/// meet.
///
/// # Errors
/// As [`migrate`].
pub async fn migrate_with(
    options: &PgConnectOptions,
    functions: &Functions,
) -> Result<Vec<String>, InboxError> {
    // A statement that takes long is expected here; the driver would log its whole text.
    let options = &options.clone().disable_statement_logging();
    let mut admin = PgConnection::connect_with(options).await?;
    locks::take_for_session(&mut admin, HostLock::Migrate).await?;
    let owner = owner_role(&mut admin).await?;
    let settings =
        [("role", owner.as_str()), ("search_path", "oncebox"), ("lock_timeout", LOCK_WAIT)];
    // No answer timeout: building an index of a large inbox takes as long as it takes.
    let mut migrator = PgConnection::connect_with(
        &options.clone().options(settings).answer_timeout(Duration::MAX),
    )
    .await?;
    // Migrations write privilege lists, and functions that have one.
    lock_grants_for_session(&mut migrator).await?;
    // A host that is older than the database leaves it as it is.
    if !functions.are_superseded(&mut migrator).await? {
        if lacks_migrations(&mut migrator).await? {
            functions.supersede(&mut migrator).await?;
        }
        run_migrations(&mut migrator).await?;
        hooks::point("schema:migrated:before_functions");
        functions.apply(&mut migrator).await?;
    }
    migrator.close().await?;
    lock_grants_for_session(&mut admin).await?;
    let open = close_public(&mut admin, &owner).await;
    admin.close().await?;
    Ok(open)
}

/// Runs the migrations that a database lacks. Hosts wait behind a migration that waits for a table,
/// so it gives up soon, lets them pass, and tries again.
async fn run_migrations(migrator: &mut PgConnection) -> Result<(), InboxError> {
    let deadline = Instant::now() + MIGRATION_WAIT;
    loop {
        // `run_direct` does the work of `run` in a form that a task can hold: its bounds are not
        // tied to one lifetime.
        match MIGRATIONS.run_direct(None, &mut *migrator, false).await {
            Err(MigrateError::Execute(error) | MigrateError::ExecuteMigration(error, _))
                if locks::is_lock_timeout(&error) && Instant::now() < deadline =>
            {
                sleep(LOCK_PAUSE).await;
            }
            ran => return ran.map_err(explained),
        }
    }
}

/// Returns the error of a migration with advice where it waited for too long, or where this program
/// does not know it.
fn explained(error: MigrateError) -> InboxError {
    match &error {
        MigrateError::VersionMissing(_) | MigrateError::VersionMismatch(_) => {
            InboxError::Invalid(format!(
                "the database was made by other migrations than those of this program ({error}); \
                    one from before the first release is made anew: use an empty database, or in \
                    `oncebox dev` an empty folder"
            ))
        }
        MigrateError::Execute(cause) | MigrateError::ExecuteMigration(cause, _)
            if locks::is_lock_timeout(cause) =>
        {
            InboxError::HostLocked {
                purpose: "change the host's tables",
                text: format!(
                    "tried for {} s to change the host's tables, which other transactions use; \
                        look in `pg_stat_activity` for transactions that stay open, and try again \
                        ({error})",
                    MIGRATION_WAIT.as_secs()
                ),
            }
        }
        _ => error.into(),
    }
}

/// Returns the number of the newest migration that a database has; none where it has none.
pub(crate) async fn newest_migration(
    connection: &mut PgConnection,
) -> Result<Option<i64>, InboxError> {
    const HAS_TABLE: &str = "SELECT to_regclass('oncebox._sqlx_migrations') IS NOT NULL";
    const NEWEST: &str = "SELECT max(version) FROM oncebox._sqlx_migrations WHERE success";
    if !sqlx::query_scalar(HAS_TABLE).fetch_one(&mut *connection).await? {
        return Ok(None);
    }
    Ok(sqlx::query_scalar(NEWEST).fetch_one(connection).await?)
}

/// Returns whether a database lacks migrations of this program.
async fn lacks_migrations(connection: &mut PgConnection) -> Result<bool, InboxError> {
    let newest = MIGRATIONS.iter().map(|migration| migration.version).max();
    Ok(newest_migration(connection).await? < newest)
}

/// Returns whether a database lacks migrations or functions of this program. A database that a
/// newer program has brought up to date is not behind: old code survives such changes.
pub(crate) async fn is_behind(connection: &mut PgConnection) -> Result<bool, InboxError> {
    if lacks_migrations(connection).await? {
        return Ok(true);
    }
    let functions = Functions::of_this_program();
    Ok(!functions.are_superseded(connection).await? && functions.are_behind(connection).await?)
}

/// Drops the foreign keys from shadow results to deployments in a tenant's own database. The
/// deployments are rows of the host's database.
pub(crate) async fn let_deployments_be_elsewhere(pool: &PgPool) -> Result<(), InboxError> {
    const BOUND: &str = "SELECT format('ALTER TABLE %s DROP CONSTRAINT IF EXISTS %I', \
        conrelid::regclass, conname) FROM pg_constraint \
        WHERE contype = 'f' AND confrelid = 'oncebox.deployment'::regclass \
            AND conrelid IN ('oncebox.shadow_total'::regclass, 'oncebox.shadow_sum'::regclass, \
            'oncebox.shadow_difference'::regclass)";
    for free in sqlx::query_scalar::<_, String>(BOUND).fetch_all(pool).await? {
        pool.execute(sqlx::raw_sql(sqlx::AssertSqlSafe(free))).await?;
    }
    Ok(())
}

/// Returns the role without login that owns the host's schemas, and creates it with the schemas
/// where they are missing. Its name is random, since roles belong to the whole cluster.
async fn owner_role(admin: &mut PgConnection) -> Result<String, InboxError> {
    const OWNER: &str =
        "SELECT pg_get_userbyid(nspowner)::text FROM pg_namespace WHERE nspname = 'oncebox'";
    if let Some(owner) = sqlx::query_scalar(OWNER).fetch_optional(&mut *admin).await? {
        return Ok(owner);
    }
    let owner = format!("oncebox_{}", hex::encode(rand::random::<[u8; 5]>()));
    let create = format!(
        "BEGIN; CREATE ROLE {owner} NOLOGIN; GRANT {owner} TO CURRENT_USER; \
         CREATE SCHEMA oncebox AUTHORIZATION {owner}; CREATE SCHEMA oncebox_host AUTHORIZATION \
         {owner}; COMMIT"
    );
    admin.execute(sqlx::raw_sql(sqlx::AssertSqlSafe(create))).await?;
    Ok(owner)
}

/// Revokes privileges that PostgreSQL gives to every role. Each step is tried by itself: on a
/// managed database some are not allowed. Returns the steps that failed.
async fn close_public(admin: &mut PgConnection, owner: &str) -> Vec<String> {
    let database: String = match sqlx::query_scalar("SELECT quote_ident(current_database())")
        .fetch_one(&mut *admin)
        .await
    {
        Ok(database) => database,
        Err(error) => return vec![format!("the database's name: {error}")],
    };
    let steps = [
        (
            "the database is closed to PUBLIC",
            format!("REVOKE ALL ON DATABASE {database} FROM PUBLIC"),
        ),
        (
            "the schema `public` is closed to PUBLIC",
            "REVOKE ALL ON SCHEMA public FROM PUBLIC".to_owned(),
        ),
        (
            "functions that reach past a role are closed to PUBLIC",
            REVOKE_FUNCTIONS
                .replace("{functions}", REVOKED_FUNCTIONS)
                .replace("{owner}", owner)
                .replace("{login}", "session_user"),
        ),
        (
            "the language `plpgsql` is closed to PUBLIC",
            format!(
                "GRANT USAGE ON LANGUAGE plpgsql TO {owner}; REVOKE USAGE ON LANGUAGE plpgsql FROM \
                    PUBLIC"
            ),
        ),
        (
            "the language `sql` is closed to PUBLIC",
            format!(
                "GRANT USAGE ON LANGUAGE sql TO {owner}; REVOKE USAGE ON LANGUAGE sql FROM PUBLIC"
            ),
        ),
    ];
    let mut open = Vec::new();
    for (what, sql) in steps {
        if let Err(error) = admin.execute(sqlx::raw_sql(sqlx::AssertSqlSafe(sql))).await {
            open.push(format!(
                "not so: {what} ({})",
                oncebox_model::tx::answered(&error)
                    .map_or_else(|| error.to_string(), |answer| answer.message)
            ));
        }
    }
    open
}

/// Number of buckets ahead of the present one for which partitions are made.
pub(crate) const BUCKETS_AHEAD: i32 = 2;

/// Table of outgoing messages, whose time partitions hang on it directly. Those of the inbox hang
/// on the tables of their retention classes.
pub(crate) const OUTGOING: &str = "outgoing";

/// Query for the partitions of those buckets that are missing.
pub(crate) const MISSING_PARTITIONS: &str = include_str!("missing_partitions.sql");

/// A time partition that a database lacks.
#[derive(Debug, Clone, sqlx::FromRow)]
pub(crate) struct MissingPartition {
    /// Name of the table on which it hangs.
    pub(crate) parent: String,
    /// Name of its own table.
    pub(crate) name: String,
    /// Begin of its time.
    pub(crate) from_at: DateTime<Utc>,
    /// End of its time, exclusive.
    pub(crate) to_at: DateTime<Utc>,
}

/// Makes the inbox's partitions of the present and the next buckets, for each retention class that
/// a consumer has, and those of outgoing messages, of today and the next days, where there is a
/// consumer. Returns the number of partitions that were missing.
///
/// A class without a consumer gets no partition: every session plans its first claim over all
/// existing partitions and their indexes.
///
/// # Errors
/// `HostLocked` where another process makes partitions for too long, or an error of the database.
pub async fn ensure_partitions(pool: &PgPool) -> Result<usize, InboxError> {
    ensure_partitions_for(pool, &[]).await
}

/// Makes the partitions of [`ensure_partitions`], and those of the given classes. Consumers whose
/// rows are still to come use these classes.
///
/// # Errors
/// As [`ensure_partitions`].
pub async fn ensure_partitions_for(pool: &PgPool, classes: &[i16]) -> Result<usize, InboxError> {
    let missing: Vec<MissingPartition> = sqlx::query_as(MISSING_PARTITIONS)
        .bind(BUCKETS_AHEAD)
        .bind(classes)
        .fetch_all(pool)
        .await?;
    make_partitions(pool, &missing).await?;
    Ok(missing.len())
}

/// Makes time partitions.
///
/// # Errors
/// As [`ensure_partitions`].
pub(crate) async fn make_partitions(
    pool: &PgPool,
    missing: &[MissingPartition],
) -> Result<(), InboxError> {
    for MissingPartition { parent, name, from_at, to_at } in missing {
        // ATTACH takes a lock that claims do not wait for; CREATE … PARTITION OF would block them.
        let sql = format!(
            "SET LOCAL lock_timeout = '5s'; CREATE TABLE IF NOT EXISTS oncebox.{name} (LIKE \
                oncebox.{root} INCLUDING DEFAULTS INCLUDING CONSTRAINTS); \
             DO $$ BEGIN IF NOT EXISTS (SELECT FROM pg_inherits WHERE inhrelid = \
             'oncebox.{name}'::regclass) THEN \
             ALTER TABLE oncebox.{name} OWNER TO {owner}; \
             ALTER TABLE oncebox.{parent} ATTACH PARTITION oncebox.{name} FOR VALUES FROM \
             ('{from}') TO ('{to}'); END IF; END $$",
            from = from_at.to_rfc3339(),
            to = to_at.to_rfc3339(),
            root = if parent == OUTGOING { OUTGOING } else { "inbox" },
            owner = owner_of_inbox(pool).await?,
        );
        let mut connection = pool.acquire().await?.detach();
        let mut tx = connection.begin().await?;
        locks::take(&mut tx, HostLock::Partitions).await?;
        tx.execute(sqlx::raw_sql(sqlx::AssertSqlSafe(sql))).await?;
        tx.commit().await?;
        connection.close().await?;
    }
    Ok(())
}

async fn owner_of_inbox(pool: &PgPool) -> Result<String, InboxError> {
    const OWNER: &str = "SELECT quote_ident(pg_get_userbyid(relowner)) FROM pg_class WHERE oid = \
        'oncebox.inbox'::regclass";
    Ok(sqlx::query_scalar(OWNER).fetch_one(pool).await?)
}
