//! PgBouncer in front of a server, as operators run it.

use std::{fs, path::Path, process::Command, time::Duration};

use anyhow::{Context, Result, ensure};
use oncebox_devkit::local::{free_port, process::Child};
use tokio::net::TcpStream;

use crate::{
    temp_dir::TempDir,
    wait::{self, DEADLINE},
};

/// It runs as this user where the tests run as root, which it refuses.
const USER: &str = "nobody";
const USER_ID: u32 = 65_534;
/// Where Debian has it, which is not on everybody's path.
const PROGRAM: &str = "/usr/sbin/pgbouncer";

/// A pooler on loopback. It ends with this value.
pub struct Pooler {
    child: Child,
    port: u16,
    server: String,
    folder: TempDir,
}

impl Pooler {
    /// A pooler in front of the server of a superuser's URL, with lines of `pgbouncer.ini`.
    pub async fn before(url: &str, settings: &str) -> Result<Self> {
        // Not in the project's folder, which the other user may not read.
        let (folder, port) = (TempDir::new("pooler"), free_port()?);
        fs::create_dir(folder.path()).context("failed to make a folder")?;
        let (login, server) = parts(url)?;
        let (user, password) = login.split_once(':').context("the URL has no password")?;
        let (host, server_port) = server.split_once(':').context("the URL has no port")?;
        let ini = format!(
            "[databases]\n* = host={host} port={server_port} user={user} \
                password={password}\n[pgbouncer]\n\
             listen_addr = 127.0.0.1\nlisten_port = {port}\nunix_socket_dir =\nauth_type = \
             any\n{settings}\n"
        );
        let file = folder.path().join("pgbouncer.ini");
        fs::write(&file, ini).context("failed to write `pgbouncer.ini`")?;
        let log = fs::File::create(folder.path().join("pgbouncer.log"))?;
        let mut command =
            Command::new(if Path::new(PROGRAM).exists() { PROGRAM } else { "pgbouncer" });
        // SAFETY: it only asks who this is.
        if unsafe { libc::geteuid() } == 0 {
            for path in [folder.path(), file.as_path()] {
                std::os::unix::fs::chown(path, Some(USER_ID), None)
                    .context("failed to give the folder away")?;
            }
            command.args(["-u", USER]);
        }
        command.arg(&file).stdout(log.try_clone()?).stderr(log);
        let child = Child::spawn(command, libc::SIGKILL)
            .context("failed to start `pgbouncer`; run `./scripts/install.sh tests`")?;
        let pooler = Self { child, port, server: server.to_owned(), folder };
        pooler.wait().await?;
        Ok(pooler)
    }

    /// A URL of its server, through it.
    pub fn through(&self, url: &str) -> String {
        url.replacen(&self.server, &format!("127.0.0.1:{}", self.port), 1)
    }

    async fn wait(&self) -> Result<()> {
        let text = || {
            let log = fs::read_to_string(self.folder.path().join("pgbouncer.log"));
            format!("`pgbouncer` does not listen: {}", log.unwrap_or_default())
        };
        wait::until(
            DEADLINE,
            Duration::from_millis(20),
            async || {
                ensure!(self.child.is_running(), text());
                Ok(TcpStream::connect(("127.0.0.1", self.port)).await.is_ok())
            },
            async || text(),
        )
        .await
    }
}

impl Drop for Pooler {
    fn drop(&mut self) {
        self.child.end(&[
            (libc::SIGTERM, Duration::from_secs(5)),
            (libc::SIGKILL, Duration::from_secs(5)),
        ]);
    }
}

/// Login with password, and address.
fn parts(url: &str) -> Result<(&str, &str)> {
    let authority = url
        .split("://")
        .nth(1)
        .and_then(|rest| rest.split(['/', '?']).next())
        .context("the URL has no address")?;
    authority.rsplit_once('@').context("the URL has no login")
}
