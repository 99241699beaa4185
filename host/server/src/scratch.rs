//! A database of its own for one command: the host's schema, a tenant with the handler's tables, a
//! consumer and the handler as a deployment, made by the same functions as anywhere else.

use std::path::PathBuf;

use anyhow::{Context, Result, bail};
use oncebox_control::{Admin, Consumer, MasterKey, NewDeployment, Tenant, schema};
use oncebox_model::policy::Policy;
use sqlx::{AssertSqlSafe, Connection, Executor, PgConnection, postgres::PgConnectOptions};
use tokio::signal::unix::{SignalKind, signal};

use crate::{
    cli::create_with_tables,
    local::postgres::{PostgresOptions, PrivatePostgres},
};

/// Where a handler is tried.
pub(crate) const TENANT: &str = "scratch";
/// Its only consumer.
pub(crate) const CONSUMER: &str = "scratch";
/// The database that others are copied from.
pub(crate) const DATABASE: &str = "postgres";

/// A private PostgreSQL in the system's folder for temporary files. It is stopped and removed with
/// this value.
pub(crate) struct Scratch {
    postgres: Option<PrivatePostgres>,
    /// The master key of what is made in it.
    pub(crate) key: String,
    /// A folder that goes with it.
    pub(crate) dir: PathBuf,
}

/// What is to be tried.
pub(crate) struct Subject<'a> {
    /// Name of the handler.
    pub(crate) handler: &'a str,
    /// The component.
    pub(crate) component: &'a [u8],
    /// Files with its tables.
    pub(crate) schema: &'a [PathBuf],
    /// What it reads through `config`.
    pub(crate) settings: &'a [(String, String)],
    /// The consumer's policy.
    pub(crate) policy: &'a Policy,
}

/// What was made for it.
pub(crate) struct Furnished {
    pub(crate) admin: Admin,
    pub(crate) tenant: Tenant,
    pub(crate) consumer: Consumer,
}

impl Scratch {
    /// Start an empty one; takes about a second.
    pub(crate) async fn start() -> Result<Self> {
        let dir = std::env::temp_dir()
            .join(format!("oncebox-{}", hex::encode(rand::random::<[u8; 6]>())));
        // Nothing in it outlives the command, so nothing has to survive the machine.
        let options = ["fsync", "synchronous_commit", "full_page_writes"]
            .iter()
            .fold(PostgresOptions::new(dir.join("postgres")), |options, setting| {
                options.setting(setting, "off")
            });
        std::fs::create_dir_all(&dir)
            .with_context(|| format!("failed to create `{}`", dir.display()))?;
        // Made before the server starts, so that a failure leaves no folder behind.
        let mut scratch = Self { postgres: None, key: MasterKey::generate(), dir };
        let started = tokio::task::spawn_blocking(|| PrivatePostgres::start(options)).await?;
        scratch.postgres = Some(started.context("failed to start a private PostgreSQL")?);
        Ok(scratch)
    }

    /// How to reach a database of it.
    pub(crate) fn options(&self, database: &str) -> Result<PgConnectOptions> {
        let postgres = self.postgres.as_ref().context("the private PostgreSQL is gone")?;
        Ok(postgres.connect_options().database(database))
    }

    /// A URL for another process.
    pub(crate) fn url(&self, database: &str) -> Result<String> {
        let url = self.postgres.as_ref().context("the private PostgreSQL is gone")?.url();
        Ok(url.replacen("/postgres?", &format!("/{database}?"), 1))
    }

    /// The functions of a person's commands on a database of it.
    pub(crate) fn admin(&self, database: &str) -> Result<Admin> {
        Ok(Admin::new(self.options(database)?, MasterKey::parse(&self.key)?, "scratch"))
    }

    /// Make everything a handler needs to run.
    pub(crate) async fn furnish(&self, subject: &Subject<'_>) -> Result<Furnished> {
        let admin = self.admin(DATABASE)?;
        schema::migrate(&self.options(DATABASE)?)
            .await
            .context("failed to prepare the scratch database")?;
        let tenant = create_with_tables(&admin, TENANT, subject.schema)
            .await
            .map_err(|error| about_schema(&error))?;
        admin.create_consumer(TENANT, CONSUMER, subject.policy).await?;
        let settings = subject
            .settings
            .iter()
            .map(|(key, value)| (key.clone(), serde_json::Value::String(value.clone())))
            .collect();
        let deployment =
            NewDeployment { settings, ..NewDeployment::stable("*", subject.handler, "") };
        admin.deploy_compiled(TENANT, CONSUMER, deployment, subject.component).await?;
        let consumer = admin.consumer(TENANT, CONSUMER).await?;
        Ok(Furnished { admin, tenant, consumer })
    }

    /// A copy of the furnished database, in which nothing has happened yet. Nobody may be connected
    /// to the original.
    pub(crate) async fn copy(&self, name: &str) -> Result<()> {
        self.execute(&format!("CREATE DATABASE {name} TEMPLATE {DATABASE}")).await
    }

    /// Give a copy up.
    pub(crate) async fn drop_copy(&self, name: &str) -> Result<()> {
        self.execute(&format!("DROP DATABASE {name} WITH (FORCE)")).await
    }

    async fn execute(&self, sql: &str) -> Result<()> {
        let mut connection = PgConnection::connect_with(&self.options("template1")?).await?;
        let done = connection.execute(sqlx::raw_sql(AssertSqlSafe(sql.to_owned()))).await;
        let _ = connection.close().await; // the answer is there
        done.map(drop).context("failed to copy the scratch database")
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        if let Some(Err(error)) = self.postgres.take().map(PrivatePostgres::remove) {
            tracing::warn!("{error:#}");
        }
        let _ = std::fs::remove_dir_all(&self.dir); // nothing in it is of use to anyone
    }
}

/// The tenant that could not be made is nobody's; the file is the user's.
fn about_schema(error: &anyhow::Error) -> anyhow::Error {
    let text = crate::report::one_line(error);
    let tenant = format!("tenant `{TENANT}` was not created, because of ");
    anyhow::anyhow!("{}", text.replacen(&tenant, "the schema cannot be used: ", 1))
}

/// Run a command that has something to clean up, also when it is interrupted.
pub(crate) async fn interruptible<T>(work: impl Future<Output = Result<T>>) -> Result<T> {
    let (mut term, mut int) = (signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?);
    tokio::select! {
        done = work => done,
        _ = term.recv() => bail!("interrupted"),
        _ = int.recv() => bail!("interrupted"),
    }
}
