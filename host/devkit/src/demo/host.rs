//! The host process, and its end by SIGKILL while a transaction is open.

use std::{
    fs::File,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::Duration,
};

use anyhow::{Context, Result, bail, ensure};
use oncebox_control::Control;
use oncebox_server::Config;

use crate::local::process::Child;

/// A host as a child that dies with this process.
pub(super) struct Host {
    command: Box<dyn Fn() -> Result<Command> + Send>,
    child: Child,
    log: PathBuf,
}

impl Host {
    /// Starts the host with a configuration, of which `settings` is the file. Its log is in `dir`.
    pub(super) fn start(config: &Config, settings: &Path, dir: &Path) -> Result<Self> {
        let log = dir.join("host.log");
        let (config, settings, path) = (config.clone(), settings.to_owned(), log.clone());
        let command: Box<dyn Fn() -> Result<Command> + Send> =
            Box::new(move || serve(&config, &settings, &path));
        let child = Child::spawn(command()?, libc::SIGKILL).context("failed to start the host")?;
        Ok(Self { command, child, log })
    }

    pub(super) fn log(&self) -> &Path {
        &self.log
    }

    /// Checks that the host still runs. A host that ends by itself is an error.
    pub(super) fn check(&self) -> Result<()> {
        ensure!(
            self.child.is_running(),
            "the host ended by itself; its log is `{}`",
            self.log.display()
        );
        Ok(())
    }

    /// Kills the host while the database holds an open transaction of it that has written, and
    /// starts it again. The host is stopped while the database is asked, so that the answer still
    /// holds.
    pub(super) async fn kill_in_transaction(&mut self, control: &Control) -> Result<()> {
        for _ in 0..10_000 {
            self.child.signal(libc::SIGSTOP);
            if open_transactions(control).await? > 0 {
                self.child.end(&[(libc::SIGKILL, Duration::from_secs(10))]);
                self.child = Child::spawn((self.command)()?, libc::SIGKILL)
                    .context("failed to start the host again")?;
                return Ok(());
            }
            self.child.signal(libc::SIGCONT);
            self.check()?;
            tokio::time::sleep(Duration::from_millis(3)).await;
        }
        bail!("the host held no transaction open that it could be killed in")
    }

    /// Stops the host with a clean drain.
    pub(super) fn stop(&mut self) -> Result<()> {
        let status = self.child.end(&[
            (libc::SIGTERM, Duration::from_secs(40)),
            (libc::SIGKILL, Duration::from_secs(5)),
        ]);
        ensure!(
            status.is_some_and(|status| status.success()),
            "the host did not drain; its log is `{}`",
            self.log.display()
        );
        Ok(())
    }
}

fn serve(config: &Config, settings: &Path, log: &Path) -> Result<Command> {
    let log = File::options()
        .create(true)
        .append(true)
        .open(log)
        .with_context(|| format!("failed to open `{}`", log.display()))?;
    let mut command = Command::new(std::env::current_exe().context("failed to find this program")?);
    command
        .arg("serve")
        .env("ONCEBOX_CONFIG", settings)
        .env("ONCEBOX_DATABASE_URL", &config.database.url)
        .env("ONCEBOX_KAFKA_BROKERS", &config.kafka.brokers)
        // As in `dev`: the embedded broker is slow with groups that every member has left.
        .env("ONCEBOX_KAFKA_IDLE_AFTER_MS", "0")
        .env("ONCEBOX_MASTER_KEY", config.keys.master_key.as_deref().unwrap_or_default())
        .env("ONCEBOX_HTTP_LISTEN", "127.0.0.1:0")
        .env("ONCEBOX_API_LISTEN", "127.0.0.1:0")
        .env("ONCEBOX_LOG_FORMAT", "text")
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(log);
    if let Some(dir) = &config.runtime.cache_dir {
        command.env("ONCEBOX_RUNTIME_CACHE_DIR", dir);
    }
    Ok(command)
}

/// Counts the transactions of tenants' sessions that have written, which a claim does first.
async fn open_transactions(control: &Control) -> Result<i64> {
    const OPEN: &str = "SELECT count(*) FROM pg_stat_activity a JOIN oncebox.tenant t ON t.login = \
        a.usename WHERE a.backend_xid IS NOT NULL";
    Ok(sqlx::query_scalar(OPEN).fetch_one(&control.pool).await?)
}
