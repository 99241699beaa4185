//! The PostgreSQL of the tests: one server for all, one database per test.

use std::path::Path;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use anyhow::{Context, Result};
use oncebox_devkit::local::postgres::{PostgresOptions, PrivatePostgres};
use sha2::{Digest, Sha256};
use sqlx::postgres::PgConnection;
use sqlx::{AssertSqlSafe, Connection, Executor};

use crate::services::{self, Service};

/// Set to a superuser's URL to use a server that runs already.
pub const DATABASE_URL: &str = "ONCEBOX_TEST_DATABASE_URL";

impl Service for PrivatePostgres {
    const NAME: &'static str = "postgres";

    fn start(dir: &Path) -> Result<Self> {
        // Nothing here outlives the machine, and hundreds of databases are made and dropped:
        // without this, each checkpoint stalls everyone. Tests that crash a server start one of
        // their own.
        // Many hosts at a time use it, of several test processes. The lock table stays as large.
        let options = PostgresOptions::new(dir).tcp(true).setting("fsync", "off");
        let options = options.setting("max_connections", "400");
        Self::start(options.setting("max_locks_per_transaction", "128"))
    }

    fn address(&self) -> String {
        self.url()
    }

    fn is_running(&self) -> bool {
        self.is_running()
    }

    fn stop(self) {
        drop(self);
    }
}

/// The superuser's URL of the server that all tests share, started if need be. Tests that
/// stop or kill a server start a [`PrivatePostgres`] instead. Blocks for the first caller.
pub fn admin_url() -> Result<String> {
    match std::env::var(DATABASE_URL) {
        Ok(url) => Ok(url),
        Err(_) => services::shared::<PrivatePostgres>(),
    }
}

/// Creates an empty database on the shared server and returns its URL.
pub async fn create_database(name: &str) -> Result<String> {
    let admin = admin_url()?;
    run(&admin, format!("CREATE DATABASE {}", quoted(name))).await?;
    with_database(&admin, name)
}

/// Drops a database of the shared server and the sessions in it; one that is not there is fine.
pub async fn drop_database(name: &str) -> Result<()> {
    drop_database_of(&admin_url()?, name).await
}

/// A test's own database, copied from a template; dropped with this value, as far as possible.
#[derive(Debug)]
pub struct TestDatabase {
    admin: String,
    name: String,
    url: String,
}

impl TestDatabase {
    /// A database as `migrate` leaves it, on the shared server. `source` is anything that
    /// changes whenever `migrate` would do something else, such as the text of the
    /// migrations: `migrate` runs once for each, and never by two tests at a time.
    ///
    /// Roles belong to the server, not to a database: what `migrate` creates of them is there
    /// for all tests, and must allow for being there already.
    pub async fn create(
        source: &str,
        migrate: impl AsyncFnOnce(&str) -> Result<()>,
    ) -> Result<Self> {
        Self::create_on(&admin_url()?, source, migrate).await
    }

    /// The same on another server, given by a superuser's URL.
    pub async fn create_on(
        admin: &str,
        source: &str,
        migrate: impl AsyncFnOnce(&str) -> Result<()>,
    ) -> Result<Self> {
        let template = format!("template_{}", hex::encode(&Sha256::digest(source)[..8]));
        ensure_template(admin, &template, migrate).await?;
        let name = unique_name();
        run(admin, format!("CREATE DATABASE {} TEMPLATE {}", quoted(&name), quoted(&template)))
            .await?;
        Ok(Self { admin: admin.to_owned(), url: with_database(admin, &name)?, name })
    }

    /// The superuser's URL of this database.
    pub fn url(&self) -> &str {
        &self.url
    }

    /// Its name, for tests that make URLs of other roles.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// A connection as superuser.
    pub async fn connect(&self) -> Result<PgConnection> {
        connect(&self.url).await
    }
}

impl Drop for TestDatabase {
    /// In a thread of its own, since a runtime cannot wait inside another. A failure leaves
    /// the database to the end of the server.
    fn drop(&mut self) {
        let (admin, name) = (self.admin.clone(), self.name.clone());
        let dropping = std::thread::spawn(move || -> Result<()> {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
            let limit = Duration::from_secs(10);
            runtime.block_on(async {
                tokio::time::timeout(limit, drop_database_of(&admin, &name)).await
            })?
        });
        if let Ok(Err(error)) = dropping.join() {
            tracing::warn!("{error:#}");
        }
    }
}

/// `url` with another database; a plain text operation, so that all parameters stay.
pub fn with_database(url: &str, name: &str) -> Result<String> {
    let (base, parameters) =
        url.split_once('?').map_or((url, String::new()), |(base, rest)| (base, format!("?{rest}")));
    let (scheme, rest) =
        base.split_once("://").context("a database URL starts with `postgres://`")?;
    let authority = rest.split('/').next().unwrap_or_default();
    Ok(format!("{scheme}://{authority}/{name}{parameters}"))
}

/// A template is marked as one when it is complete; a half-made one is made anew. Nobody may
/// connect to it, since a database with sessions cannot be copied.
async fn ensure_template(
    admin: &str,
    name: &str,
    migrate: impl AsyncFnOnce(&str) -> Result<()>,
) -> Result<()> {
    let mut lock = connect(admin).await?;
    sqlx::query("SELECT pg_advisory_lock(hashtextextended($1, 0))")
        .bind(name)
        .execute(&mut lock)
        .await
        .context("failed to wait for the template's lock")?;
    let complete: bool = sqlx::query_scalar(
        "SELECT EXISTS (SELECT FROM pg_database WHERE datname = $1 AND datistemplate)",
    )
    .bind(name)
    .fetch_one(&mut lock)
    .await
    .context("failed to look for the template")?;
    if !complete {
        drop_database_of(admin, name).await?;
        run(admin, format!("CREATE DATABASE {}", quoted(name))).await?;
        migrate(&with_database(admin, name)?)
            .await
            .context("failed to prepare the template database")?;
        run(
            admin,
            format!("ALTER DATABASE {} ALLOW_CONNECTIONS false IS_TEMPLATE true", quoted(name)),
        )
        .await?;
        sqlx::query("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = $1")
            .bind(name)
            .execute(&mut lock)
            .await
            .context("failed to end sessions in the template")?;
    }
    lock.close().await.context("failed to release the template's lock")
}

async fn drop_database_of(admin: &str, name: &str) -> Result<()> {
    run(admin, format!("DROP DATABASE IF EXISTS {} WITH (FORCE)", quoted(name))).await
}

async fn run(url: &str, sql: String) -> Result<()> {
    let mut connection = connect(url).await?;
    let failed = || format!("failed: `{sql}`");
    connection.execute(AssertSqlSafe(sql.clone())).await.with_context(failed)?;
    connection.close().await.with_context(failed)
}

async fn connect(url: &str) -> Result<PgConnection> {
    PgConnection::connect(url).await.context("failed to connect to the database of the tests")
}

fn quoted(name: &str) -> String {
    format!("\"{}\"", name.replace('"', "\"\""))
}

/// Process ids come again, on an external server even from several machines.
fn unique_name() -> String {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    format!("test_{}_{number}_{:08x}", std::process::id(), rand::random::<u32>())
}
