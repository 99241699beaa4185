//! The broker and the database server of a benchmark, and a fresh database for each run.

use std::{ffi::CString, path::PathBuf};

use anyhow::{Context, Result, ensure};
use libc::pid_t;
use oncebox_control::{Control, MasterKey, Tenant, schema};
use oncebox_devkit::local::postgres::{PostgresOptions, PrivatePostgres};
use oncebox_tests::{collector::Collector, kafka::KafkaServer, postgres::with_database};
use sqlx::{AssertSqlSafe, Connection, Executor, PgConnection};

use crate::load::{ACCOUNTS, Totals};

/// The tables of the effect.
pub const SCHEMA: &str = "\
CREATE TABLE orders (id text PRIMARY KEY, account int NOT NULL, amount bigint NOT NULL, note text \
NOT NULL);
CREATE TABLE account (id int PRIMARY KEY, balance bigint NOT NULL DEFAULT 0, n bigint NOT NULL \
    DEFAULT 0);";

/// The table of processed ids, for consumers that are not a host.
const PROCESSED: &str = "\
CREATE TABLE processed (message_id text PRIMARY KEY, done boolean NOT NULL DEFAULT false, at \
timestamptz NOT NULL DEFAULT now());";

/// The outbox of a consumer that is written by hand.
const OUTBOX: &str = "\
CREATE TABLE outbox (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, key text NOT NULL, \
event_type text NOT NULL, payload bytea NOT NULL, created_at timestamptz NOT NULL DEFAULT now(), \
sent_at timestamptz);
CREATE INDEX outbox_unsent ON outbox (id) WHERE sent_at IS NULL;";

const TENANT: &str = "bench";
/// Template database of runs with a host: migrated, with the tenant and its filled tables.
const HOST: &str = "bench_host";
/// Template database of runs without a host.
const PLAIN: &str = "bench_plain";

/// A private database server with default durability, and a private broker.
pub struct Servers {
    /// The broker.
    pub kafka: KafkaServer,
    /// The host's master key.
    pub master_key: String,
    /// The tenant in every database of a host.
    pub tenant: Tenant,
    /// A collector of OpenTelemetry, in the process that measures.
    pub collector: Collector,
    postgres: PrivatePostgres,
    dir: PathBuf,
    databases: u32,
}

/// The database of one run.
#[derive(Clone)]
pub struct Database {
    /// URL that connects as the superuser.
    pub url: String,
    /// Schema of the tables of the effect.
    pub schema: String,
    name: String,
}

impl Servers {
    /// Starts the broker and the database server. The database server's data is below `dir`.
    pub async fn start(dir: PathBuf) -> Result<Self> {
        let kafka = tokio::task::spawn_blocking(KafkaServer::start_lasting).await??;
        let options = PostgresOptions::new(dir.join("postgres"))
            .tcp(true)
            .setting("shared_buffers", "256MB")
            .setting("max_wal_size", "4GB")
            .setting("track_commit_timestamp", "on");
        let postgres =
            tokio::task::spawn_blocking(move || PrivatePostgres::start(options)).await??;
        let master_key = MasterKey::generate();
        let tenant = make_templates(&postgres.url(), &master_key).await?;
        let collector = Collector::start().await?;
        Ok(Self { kafka, master_key, tenant, collector, postgres, dir, databases: 0 })
    }

    /// Returns the process ids of the database server and the broker.
    pub fn pids(&self) -> Result<(pid_t, pid_t)> {
        let database = self.postgres.pid().context("the database server has ended")?;
        Ok((database, self.kafka.pid().context("the broker has ended")?))
    }

    /// Creates the database of a run from a template. Ends with a CHECKPOINT, so that no earlier
    /// write is flushed during the run.
    pub async fn database(&mut self, host: bool) -> Result<Database> {
        self.databases += 1;
        let name = format!("run_{}", self.databases);
        let (template, schema) = if host {
            (HOST, self.tenant.schema_name.clone())
        } else {
            (PLAIN, "public".to_owned())
        };
        let mut admin = connect(&self.postgres.url()).await?;
        run(&mut admin, format!("CREATE DATABASE {name} TEMPLATE {template}")).await?;
        // Privileges on a database are not copied from its template.
        let Tenant { login, owner_login, .. } = &self.tenant;
        run(&mut admin, format!("GRANT CONNECT ON DATABASE {name} TO {login}, {owner_login}"))
            .await?;
        run(&mut admin, "CHECKPOINT".to_owned()).await?;
        Ok(Database { url: with_database(&self.postgres.url(), &name)?, schema, name })
    }

    /// Makes the server log every statement that a consumer sends to this database.
    pub async fn log_statements(&self, database: &Database, host: bool) -> Result<()> {
        let name = &database.name;
        let whose = if host {
            format!("ROLE {} IN DATABASE {name}", self.tenant.login)
        } else {
            format!("DATABASE {name}")
        };
        run(
            &mut connect(&self.postgres.url()).await?,
            format!("ALTER {whose} SET log_statement = 'all'"),
        )
        .await
    }

    /// Returns the path of the database server's log.
    pub fn database_log(&self) -> PathBuf {
        self.dir.join("postgres/postgres.log")
    }

    /// Drops the database of a run.
    pub async fn drop_database(&self, database: Database) -> Result<()> {
        run(
            &mut connect(&self.postgres.url()).await?,
            format!("DROP DATABASE {} WITH (FORCE)", database.name),
        )
        .await
    }

    /// Sets a setting of the whole database server, or takes it back.
    pub async fn set(&self, name: &str, value: Option<&str>) -> Result<()> {
        let change = match value {
            Some(value) => format!("ALTER SYSTEM SET {name} = '{value}'"),
            None => format!("ALTER SYSTEM RESET {name}"),
        };
        let mut admin = connect(&self.postgres.url()).await?;
        run(&mut admin, change).await?;
        run(&mut admin, "SELECT pg_reload_conf()".to_owned()).await
    }

    /// Returns the folder of the database server's data, and the bytes that are free there.
    pub async fn room(&self) -> Result<(String, u64)> {
        let mut admin = connect(&self.postgres.url()).await?;
        let dir: String = sqlx::query_scalar("SHOW data_directory").fetch_one(&mut admin).await?;
        let path = CString::new(dir.as_str()).context("the data's folder has a NUL in its name")?;
        // SAFETY: all members of the structure are integers, for which zero is a value.
        let mut found: libc::statvfs = unsafe { std::mem::zeroed() };
        // SAFETY: plain system call; the path ends with a NUL, and both live until it returns.
        let answer = unsafe { libc::statvfs(path.as_ptr(), &mut found) };
        ensure!(
            answer == 0,
            "failed to find out how much room `{dir}` has: {}",
            std::io::Error::last_os_error()
        );
        Ok((dir, found.f_bavail * found.f_frsize))
    }

    /// Returns the version of the database server.
    pub async fn postgres_version(&self) -> Result<String> {
        let mut admin = connect(&self.postgres.url()).await?;
        Ok(sqlx::query_scalar("SHOW server_version").fetch_one(&mut admin).await?)
    }

    /// Stops both servers and removes their data.
    pub fn stop(mut self) -> Result<()> {
        self.postgres.stop()?;
        drop(self.kafka);
        std::fs::remove_dir_all(&self.dir)
            .with_context(|| format!("failed to remove `{}`", self.dir.display()))
    }
}

impl Database {
    /// Returns a database that a test has made.
    #[cfg(test)]
    pub fn at(url: String, schema: String) -> Self {
        Self { url, schema, name: String::new() }
    }

    /// Opens a connection as the superuser.
    pub async fn connect(&self) -> Result<PgConnection> {
        connect(&self.url).await
    }

    /// Executes statements as the superuser.
    pub async fn execute(&self, sql: impl Into<String>) -> Result<()> {
        run(&mut self.connect().await?, sql.into()).await
    }

    /// Brings the tables of the effect back to the state before the first message, and ends with a
    /// CHECKPOINT.
    pub async fn empty_effect(&self) -> Result<()> {
        let schema = &self.schema;
        let mut connection = self.connect().await?;
        let statements = [
            format!("TRUNCATE {schema}.orders, {schema}.account"),
            format!("INSERT INTO {schema}.account (id) SELECT generate_series(0, {ACCOUNTS} - 1)"),
            format!("VACUUM (FREEZE, ANALYZE) {schema}.account"),
            "CHECKPOINT".to_owned(),
        ];
        for statement in statements {
            run(&mut connection, statement).await?;
        }
        Ok(())
    }

    /// Adds up the tables of the effect.
    pub async fn totals(&self) -> Result<Totals> {
        let schema = &self.schema;
        let sql = format!(
            "SELECT (SELECT count(*) FROM {schema}.orders) AS orders, sum(n)::bigint AS bookings, \
                sum(balance)::bigint AS balance FROM {schema}.account"
        );
        Ok(sqlx::query_as(AssertSqlSafe(sql)).fetch_one(&mut self.connect().await?).await?)
    }

    /// Makes the tables of the effect for another tenant, fills them, and returns the database with
    /// that tenant's schema.
    pub async fn of_tenant(&self, admin: &Control, tenant: &Tenant) -> Result<Self> {
        admin.tenant_databases().apply_migration(tenant, "tables", SCHEMA).await?;
        fill(self.connect().await?, &tenant.schema_name).await?;
        Ok(Self {
            url: self.url.clone(),
            schema: tenant.schema_name.clone(),
            name: self.name.clone(),
        })
    }

    /// Returns the position in the server's write-ahead log, in bytes.
    pub async fn wal_position(&self) -> Result<i64> {
        const POSITION: &str = "SELECT (pg_current_wal_insert_lsn() - '0/0'::pg_lsn)::bigint";
        Ok(sqlx::query_scalar(POSITION).fetch_one(&mut self.connect().await?).await?)
    }

    /// Returns the bytes of the inbox per completed message, indexes included; `None` where none
    /// completed. Time partitions without messages do not count.
    pub async fn inbox_bytes(&self) -> Result<Option<f64>> {
        const BYTES: &str = "SELECT (sum(pg_total_relation_size(p.id)) / sum(p.messages))::float8 \
            FROM (SELECT tableoid AS id, count(*) AS messages FROM oncebox.inbox \
            WHERE status = 'completed' GROUP BY 1) p";
        Ok(sqlx::query_scalar(BYTES).fetch_one(&mut self.connect().await?).await?)
    }

    /// Returns the partition of each message with the time of its commit, microseconds since the
    /// Unix epoch. Ordered by both.
    pub async fn commits_by_partition(&self) -> Result<Vec<(i32, f64)>> {
        const COMMITS: &str = "SELECT partition, extract(epoch FROM \
            pg_xact_commit_timestamp(xmin))::float8 * 1e6 FROM oncebox.inbox ORDER BY 1, 2";
        Ok(sqlx::query_as(COMMITS).fetch_all(&mut self.connect().await?).await?)
    }

    /// Returns the time of each commit of orders, microseconds since the Unix epoch, with the
    /// number of orders in it. Earliest first.
    pub async fn commits(&self) -> Result<Vec<(f64, i64)>> {
        let sql = format!(
            "SELECT extract(epoch FROM pg_xact_commit_timestamp(x))::float8 * 1e6, n FROM (SELECT \
                xmin AS x, count(*) AS n FROM {}.orders GROUP BY xmin) t ORDER BY 1",
            self.schema
        );
        Ok(sqlx::query_as(AssertSqlSafe(sql)).fetch_all(&mut self.connect().await?).await?)
    }
}

async fn make_templates(url: &str, master_key: &str) -> Result<Tenant> {
    let mut admin = connect(url).await?;
    run(&mut admin, format!("CREATE DATABASE {PLAIN}")).await?;
    let mut plain = connect(&with_database(url, PLAIN)?).await?;
    run(&mut plain, format!("{SCHEMA}{PROCESSED}{OUTBOX}")).await?;
    fill(plain, "public").await?;

    run(&mut admin, format!("CREATE DATABASE {HOST}")).await?;
    let host = with_database(url, HOST)?;
    schema::migrate(&host.parse()?).await?;
    let inbox = Control::new(host.parse()?, MasterKey::parse(master_key)?, "bench");
    let tenant = inbox.tenants().create(TENANT).await?;
    inbox.tenant_databases().apply_migration(&tenant, "tables", SCHEMA).await?;
    inbox.pool.close().await;
    fill(connect(&host).await?, &tenant.schema_name).await?;
    Ok(tenant)
}

async fn fill(mut connection: PgConnection, schema: &str) -> Result<()> {
    run(
        &mut connection,
        format!("INSERT INTO {schema}.account (id) SELECT generate_series(0, {ACCOUNTS} - 1)"),
    )
    .await?;
    run(&mut connection, "VACUUM (FREEZE, ANALYZE)".to_owned()).await?;
    Ok(connection.close().await?)
}

async fn connect(url: &str) -> Result<PgConnection> {
    PgConnection::connect(url).await.context("failed to connect to the benchmark's database")
}

async fn run(connection: &mut PgConnection, sql: String) -> Result<()> {
    connection
        .execute(sqlx::raw_sql(AssertSqlSafe(sql.clone())))
        .await
        .with_context(|| format!("failed: `{sql}`"))?;
    Ok(())
}
