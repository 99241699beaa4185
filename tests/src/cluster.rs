//! A PostgreSQL whose server can be lost: clients reach whichever server is the primary, and the
//! next one does not have everything that the last one confirmed.

use std::{path::PathBuf, time::Duration};

use anyhow::{Context, Result};
use oncebox_devkit::local::postgres::{PostgresOptions, PrivatePostgres};
use sqlx::{Connection, Executor, PgConnection};
use tokio::{
    task::spawn_blocking,
    time::{Instant, sleep},
};

use crate::{proxy::Proxy, temp_dir::TempDir, wait::DEADLINE};

/// How the primary is replaced.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Successor {
    /// An asynchronous standby that is promoted.
    Standby,
    /// A server on a backup.
    Backup,
    /// The same server, which has everything.
    Itself,
}

/// Servers, one of which is the primary.
pub struct Cluster {
    folder: TempDir,
    servers: usize,
    primary: PrivatePostgres,
    /// In front of the primary.
    way: Proxy,
    url: String,
    next: Option<Next>,
}

/// The server that replaces the primary.
enum Next {
    Standby(PrivatePostgres, Proxy),
    Backup(PostgresOptions),
    Itself,
}

impl Cluster {
    /// Starts the first primary.
    pub async fn start() -> Result<Self> {
        let folder = TempDir::new("cluster");
        let primary = start(PostgresOptions::new(folder.path().join("0"))).await?;
        let (way, url) = Proxy::before(&primary.url()).await?;
        Ok(Self { folder, servers: 1, primary, way, url, next: None })
    }

    /// The superuser's URL, of whichever server is the primary.
    pub fn url(&self) -> &str {
        &self.url
    }

    fn dir(&mut self) -> PathBuf {
        self.servers += 1;
        self.folder.path().join(self.servers.to_string())
    }

    /// Makes the server that replaces the primary. From here on it does not get what is committed,
    /// or, as a standby, until [`Cluster::sever`].
    pub async fn prepare(&mut self, successor: Successor) -> Result<()> {
        let options = PostgresOptions::new(self.dir());
        let url = self.primary.url();
        self.next = Some(match successor {
            Successor::Itself => Next::Itself,
            Successor::Standby => {
                let (way, through) = Proxy::before(&url).await?;
                Next::Standby(start(options.copy_of(&through, true)).await?, way)
            }
            Successor::Backup => {
                let options = options.copy_of(&url, false);
                let backup = start(options.clone()).await?;
                spawn_blocking(move || drop(backup)).await?;
                Next::Backup(options)
            }
        });
        Ok(())
    }

    /// Cuts a standby off: what is committed from here on is lost with the primary.
    pub fn sever(&self) {
        if let Some(Next::Standby(_, way)) = &self.next {
            way.swallow();
            way.swallow_present();
        }
    }

    /// Kills the primary, and makes the server that was prepared the next one. Clients reach none
    /// until [`Cluster::heal`].
    pub async fn fail_over(&mut self) -> Result<()> {
        self.way.close();
        self.primary.kill()?;
        match self.next.take().context("nothing is prepared")? {
            Next::Itself => self.primary.start_again()?,
            Next::Backup(options) => self.primary = start(options).await?,
            Next::Standby(standby, way) => {
                drop(way);
                promote(&standby).await?;
                self.primary = standby;
            }
        }
        let url = self.primary.url();
        let server = url.rsplit('@').next().and_then(|rest| rest.split('/').next());
        self.way.lead_to(server.context("the URL has no address")?.parse()?);
        Ok(())
    }

    /// Lets clients reach the primary again.
    pub fn heal(&self) {
        self.way.heal();
    }

    /// A number from a database of the primary, which clients may not reach now.
    pub async fn number(&self, database: &str, sql: &'static str) -> Result<i64> {
        let options = self.primary.connect_options().database(database);
        let mut connection = PgConnection::connect_with(&options).await?;
        let number = sqlx::query_scalar(sql).fetch_one(&mut connection).await?;
        connection.close().await?;
        Ok(number)
    }
}

async fn start(options: PostgresOptions) -> Result<PrivatePostgres> {
    spawn_blocking(move || PrivatePostgres::start(options.tcp(true))).await?
}

async fn promote(standby: &PrivatePostgres) -> Result<()> {
    let mut connection = PgConnection::connect_with(&standby.connect_options()).await?;
    connection.execute("SELECT pg_promote(true, 60)").await?;
    let deadline = Instant::now() + DEADLINE;
    while sqlx::query_scalar("SELECT pg_is_in_recovery()").fetch_one(&mut connection).await? {
        anyhow::ensure!(Instant::now() < deadline, "the standby was not promoted");
        sleep(Duration::from_millis(20)).await;
    }
    connection.close().await?;
    Ok(())
}
