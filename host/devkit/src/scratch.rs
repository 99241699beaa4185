//! A database of its own for one command: the host's schema, a tenant with the handler's tables, a
//! consumer and the handler as a deployment. The functions that make them are those of any other
//! host.

use std::path::PathBuf;

use anyhow::{Context, Result, bail};
use oncebox_control::{Consumer, Control, MasterKey, NewDeployment, Tenant, schema};
use oncebox_model::policy::Policy;
use serde_json::{Map, Value, json};
use sqlx::{AssertSqlSafe, Connection, Executor, PgConnection, postgres::PgConnectOptions};
use tokio::signal::unix::{SignalKind, signal};

use crate::{
    local::postgres::{PostgresOptions, PrivatePostgres},
    migration::create_with_tables,
};

/// The tenant in which a handler is tried.
pub(crate) const TENANT: &str = "scratch";
/// The tenant's only consumer.
pub(crate) const CONSUMER: &str = "scratch";
/// The database that is the template of copies.
pub(crate) const DATABASE: &str = "postgres";

/// A private PostgreSQL in the system's folder for temporary files. It is stopped and removed with
/// this value.
pub(crate) struct Scratch {
    postgres: Option<PrivatePostgres>,
    /// The master key of the database.
    pub(crate) key: String,
    /// The folder of the server, removed with this value.
    pub(crate) dir: PathBuf,
}

/// The handler to try.
pub(crate) struct TriedHandler<'a> {
    /// Name of the handler.
    pub(crate) handler: &'a str,
    /// The component.
    pub(crate) component: &'a [u8],
    /// SQL files with the handler's tables.
    pub(crate) schema: &'a [PathBuf],
    /// Settings that the handler reads through `config`.
    pub(crate) settings: &'a [(String, String)],
    /// The consumer's policy.
    pub(crate) policy: &'a Policy,
}

/// The tenant and the consumer that were made for a handler.
pub(crate) struct Furnished {
    pub(crate) control: Control,
    pub(crate) tenant: Tenant,
    pub(crate) consumer: Consumer,
}

impl Scratch {
    /// Starts an empty server, in about a second.
    pub(crate) async fn start() -> Result<Self> {
        let dir = std::env::temp_dir()
            .join(format!("oncebox-{}", hex::encode(rand::random::<[u8; 6]>())));
        // Its data does not outlive the command, so none of it must survive a crash of the machine.
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

    /// Returns the options of a connection to one of its databases.
    pub(crate) fn options(&self, database: &str) -> Result<PgConnectOptions> {
        let postgres = self.postgres.as_ref().context("the private PostgreSQL is gone")?;
        Ok(postgres.connect_options().database(database))
    }

    /// Returns the URL of one of its databases, for another process.
    pub(crate) fn url(&self, database: &str) -> Result<String> {
        let url = self.postgres.as_ref().context("the private PostgreSQL is gone")?.url();
        Ok(url.replacen("/postgres?", &format!("/{database}?"), 1))
    }

    /// Returns the administration of one of its databases.
    pub(crate) fn control(&self, database: &str) -> Result<Control> {
        Ok(Control::new(self.options(database)?, MasterKey::parse(&self.key)?, "scratch"))
    }

    /// Makes everything that a handler needs to run.
    pub(crate) async fn furnish(&self, subject: &TriedHandler<'_>) -> Result<Furnished> {
        let control = self.control(DATABASE)?;
        schema::migrate(&self.options(DATABASE)?)
            .await
            .context("failed to prepare the scratch database")?;
        create_with_tables(&control, TENANT, subject.schema)
            .await
            .map_err(|error| about_schema(&error))?;
        // Nothing is sent from here, so that every destination may be named.
        let everywhere = json!(["kafka:*", "inbox:*", "http:*"]);
        let limits = Map::from_iter([("destinations_allowed".to_owned(), everywhere)]);
        let tenant = control.tenants().set_limits(TENANT, &limits).await?;
        control.consumers().create(TENANT, CONSUMER, subject.policy).await?;
        let settings = subject
            .settings
            .iter()
            .map(|(key, value)| (key.clone(), Value::String(value.clone())))
            .collect();
        let deployment = NewDeployment {
            settings,
            grants: vec!["emit".to_owned()],
            ..NewDeployment::stable("*", subject.handler, "")
        };
        control.versions().deploy_compiled(TENANT, CONSUMER, deployment, subject.component).await?;
        let consumer = control.consumers().get(TENANT, CONSUMER).await?;
        Ok(Furnished { control, tenant, consumer })
    }

    /// Copies the furnished database, in which no message has been handled yet. The original must
    /// have no open connection.
    pub(crate) async fn copy(&self, name: &str) -> Result<()> {
        self.execute(&format!("CREATE DATABASE {name} TEMPLATE {DATABASE}")).await
    }

    /// Drops a copy.
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

/// Rewrites the error of a tenant that could not be made: the user has named a schema file, not
/// that tenant.
fn about_schema(error: &anyhow::Error) -> anyhow::Error {
    let text = oncebox_server::error_text::one_line(error);
    let tenant = format!("tenant `{TENANT}` was not created, because of ");
    anyhow::anyhow!("{}", text.replacen(&tenant, "the schema cannot be used: ", 1))
}

/// Runs a command that has to clean up, also when it is interrupted.
pub async fn interruptible<T>(work: impl Future<Output = Result<T>>) -> Result<T> {
    let (mut term, mut int) = (signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?);
    tokio::select! {
        done = work => done,
        _ = term.recv() => bail!("interrupted"),
        _ = int.recv() => bail!("interrupted"),
    }
}
