//! A private PostgreSQL cluster from the server binaries on the machine.
//!
//! The folder given holds everything: `data` (the cluster), `password` (the superuser's, mode
//! 0600), `postgres.log`, `port` and `lock`. It can be used again by the next run, also after
//! a crash. Only where root may not create user namespaces does the cluster live in the
//! system's folder for temporary files, owned by another user.

mod binaries;
mod home;

use std::fs::File;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use libc::{SIGINT, SIGKILL, SIGQUIT, c_int, pid_t};
use sqlx::postgres::{PgConnectOptions, PgSslMode};

use self::binaries::find_binaries;
#[cfg(feature = "test-hooks")]
pub use self::binaries::program;
use self::home::{Home, create_private_dir, take_lock};
use super::process::{Child, Identity, limit_memory};

/// Cap on the address space of each server process: shared buffers and 1.5 GB for everything
/// else, so that one statement cannot take the machine's memory.
const MEMORY_LIMIT_BYTES: u64 = (128 + 1536) * 1024 * 1024;

/// Server settings that come before the caller's, which win. `jit` compiles with LLVM, which needs
/// more address space than it is worth for short statements.
const SETTINGS: [(&str, &str); 4] = [
    ("shared_buffers", "128MB"),
    ("max_connections", "200"),
    ("max_locks_per_transaction", "256"),
    ("jit", "off"),
];

const SUPERUSER: &str = "postgres";

/// Port in the socket file's name where no TCP port is wanted; no other server uses the folder.
const SOCKET_ONLY_PORT: u16 = 5432;

const PORT_ATTEMPTS: usize = 3;

/// Signals that stop a server, each with the longest wait for it: fast shutdown, immediate
/// shutdown, kill.
const STOP: [(c_int, Duration); 3] = [
    (SIGINT, Duration::from_secs(30)),
    (SIGQUIT, Duration::from_secs(10)),
    (SIGKILL, Duration::from_secs(10)),
];

/// The folder and the settings of a server to start.
#[derive(Debug, Clone)]
pub struct PostgresOptions {
    /// The folder of this cluster; created with mode 0700 if missing.
    pub dir: PathBuf,
    /// Whether to listen on a free port of 127.0.0.1 besides the unix socket, for clients that know
    /// TCP only. The port stays from run to run, unless another process takes it.
    pub tcp: bool,
    /// Server settings (`postgresql.conf` names), stronger than the defaults of this module.
    pub settings: Vec<(String, String)>,
    /// The folder with `initdb` and `postgres`; searched for when `None`.
    pub binaries: Option<PathBuf>,
    /// The server that a new cluster is a copy of; none for an empty one.
    #[cfg(feature = "test-hooks")]
    pub copy_of: Option<CopyOf>,
}

/// A server whose copy a new cluster is.
#[cfg(feature = "test-hooks")]
#[derive(Debug, Clone)]
pub struct CopyOf {
    /// The superuser's URL of the server.
    pub url: String,
    /// Whether the copy follows the server, as an asynchronous standby, until it is promoted.
    pub follows: bool,
}

impl PostgresOptions {
    /// Makes options for a cluster in `dir` that listens on a unix socket only.
    pub fn new(dir: impl Into<PathBuf>) -> Self {
        Self {
            dir: dir.into(),
            tcp: false,
            settings: Vec::new(),
            binaries: None,
            #[cfg(feature = "test-hooks")]
            copy_of: None,
        }
    }

    /// Sets whether the server listens on TCP loopback too.
    pub fn tcp(mut self, tcp: bool) -> Self {
        self.tcp = tcp;
        self
    }

    /// Makes a new cluster a copy of a server.
    #[cfg(feature = "test-hooks")]
    pub fn copy_of(mut self, url: &str, follows: bool) -> Self {
        self.copy_of = Some(CopyOf { url: url.to_owned(), follows });
        self
    }

    /// Adds a server setting.
    pub fn setting(mut self, name: &str, value: &str) -> Self {
        self.settings.push((name.to_owned(), value.to_owned()));
        self
    }
}

/// A running server. It is shut down cleanly when this is dropped, and also when this
/// process is killed.
#[derive(Debug)]
pub struct PrivatePostgres {
    options: PostgresOptions,
    home: Home,
    password: String,
    port: u16,
    child: Option<Child>,
    /// Lock on the folder, held as long as this process owns the cluster; the system releases it
    /// when the process dies.
    _lock: File,
}

impl PrivatePostgres {
    /// Creates the cluster if the folder is new, ends a server left over from a crash, and
    /// starts. Takes about a second for a new folder and a tenth of that for an old one;
    /// blocks for that time.
    pub fn start(options: PostgresOptions) -> Result<Self> {
        let postgres = find_binaries(&options)?.join("postgres");
        let identity = Identity::choose(&postgres)?;
        Self::start_as(options, identity)
    }

    fn start_as(mut options: PostgresOptions, identity: Identity) -> Result<Self> {
        options.dir =
            std::path::absolute(&options.dir).context("failed to find the current folder")?;
        create_private_dir(&options.dir)?;
        let lock = take_lock(&options.dir)?;
        let home = Home::open(&options, identity)?;
        home.end_leftover_server()?;
        let password = home.password(&options)?;
        home.create_cluster(&options)?;
        let mut server =
            Self { options, home, password, port: SOCKET_ONLY_PORT, child: None, _lock: lock };
        server.launch_on_free_port()?;
        Ok(server)
    }

    /// Returns a URL of the superuser, password included, for any client: over TCP if asked for,
    /// else over the unix socket.
    pub fn url(&self) -> String {
        let (password, port) = (&self.password, self.port);
        if self.options.tcp {
            return format!(
                "postgres://{SUPERUSER}:{password}@127.0.0.1:{port}/postgres?sslmode=disable"
            );
        }
        let socket = percent_encode(&self.home.socket_dir);
        format!(
            "postgres://{SUPERUSER}:{password}@localhost:{port}/postgres?host={socket}&sslmode=disable"
        )
    }

    /// Returns the superuser's connection options for sqlx, always over the unix socket.
    pub fn connect_options(&self) -> PgConnectOptions {
        PgConnectOptions::new_without_pgpass()
            .socket(&self.home.socket_dir)
            .port(self.port)
            .username(SUPERUSER)
            .password(&self.password)
            .database("postgres")
            .ssl_mode(PgSslMode::Disable)
    }

    /// Returns whether the server process runs.
    pub fn is_running(&self) -> bool {
        self.child.as_ref().is_some_and(Child::is_running)
    }

    /// Returns the process id of the server while it runs.
    pub fn pid(&self) -> Option<pid_t> {
        self.child.as_ref().filter(|child| child.is_running()).map(Child::pid)
    }

    /// Kills the server and all its sessions at one blow. Clients see a connection break without a
    /// message; data that was not flushed is lost.
    pub fn kill(&mut self) -> Result<()> {
        let Some(child) = self.child.take() else {
            return Ok(());
        };
        child.kill_with_children(Duration::from_secs(10)).context("failed to kill `postgres`")
    }

    /// Starts a server that was killed or stopped, at the same address.
    pub fn start_again(&mut self) -> Result<()> {
        ensure!(self.child.is_none(), "`postgres` is running already");
        self.launch()
    }

    /// Kills the server and starts it at its old address, as a crash and a recovery would.
    pub fn restart_immediate(&mut self) -> Result<()> {
        self.kill()?;
        self.start_again()
    }

    /// Shuts down cleanly; sessions are ended, open transactions rolled back.
    pub fn stop(&mut self) -> Result<()> {
        let Some(child) = self.child.take() else {
            return Ok(());
        };
        child.end(&STOP).context("`postgres` does not stop; end it by hand")?;
        Ok(())
    }

    /// Stops, and removes the cluster with its folder.
    pub fn remove(mut self) -> Result<()> {
        self.stop()?;
        for dir in [&self.options.dir, &self.home.dir, &self.home.socket_dir] {
            match std::fs::remove_dir_all(dir) {
                Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                    return Err(error)
                        .with_context(|| format!("failed to remove `{}`", dir.display()));
                }
                _ => {}
            }
        }
        Ok(())
    }

    /// Launches the server. Over TCP it tries a few ports, since one that was free a moment ago may
    /// be taken.
    fn launch_on_free_port(&mut self) -> Result<()> {
        if !self.options.tcp {
            return self.launch();
        }
        for attempt in 1.. {
            self.port = self.home.free_port(attempt == 1)?;
            match self.launch() {
                Err(error) if attempt < PORT_ATTEMPTS && error.to_string().contains("TCP/IP") => {}
                result => return result,
            }
        }
        Ok(())
    }

    fn launch(&mut self) -> Result<()> {
        let log = self.home.log()?;
        let mut command = self.home.command("postgres");
        command.arg("-D").arg(self.home.data()).arg("-k").arg(&self.home.socket_dir);
        command.args(["-p", &self.port.to_string()]);
        command.args([
            "-c",
            if self.options.tcp { "listen_addresses=127.0.0.1" } else { "listen_addresses=" },
        ]);
        let ours = SETTINGS.iter().map(|(name, value)| format!("{name}={value}"));
        let theirs = self.options.settings.iter().map(|(name, value)| format!("{name}={value}"));
        for setting in ours.chain(theirs) {
            command.arg("-c").arg(setting);
        }
        command.stdout(log.try_clone().context("failed to share the log file")?).stderr(log);
        limit_memory(&mut command, MEMORY_LIMIT_BYTES);
        // Ctrl-C reaches the group of a terminal's command: the host drains first, and ends the
        // server after that.
        command.process_group(0);
        let child = Child::spawn(command, SIGINT).context("failed to start `postgres`")?;
        let ready = self.home.wait_until_ready(&child);
        self.child = Some(child);
        ready.inspect_err(|_| drop(self.stop()))
    }
}

impl Drop for PrivatePostgres {
    fn drop(&mut self) {
        if let Err(error) = self.stop() {
            tracing::warn!("{error:#}");
        }
    }
}

/// Encodes a path for a URL's query: everything but unreserved characters and `/`.
fn percent_encode(path: &Path) -> String {
    let encode = |byte: &u8| match byte {
        b'A'..=b'Z' | b'a'..=b'z' | b'0'..=b'9' | b'-' | b'.' | b'_' | b'~' | b'/' => {
            char::from(*byte).to_string()
        }
        _ => format!("%{byte:02X}"),
    };
    path.as_os_str().as_encoded_bytes().iter().map(encode).collect()
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a panic is how a test fails")]
mod tests {
    use std::fs;
    use std::os::unix::fs::MetadataExt;

    use super::*;

    /// A folder that is removed at the end of its test.
    struct Folder(PathBuf);

    impl Folder {
        fn new(name: &str) -> Self {
            let path =
                std::env::temp_dir().join(format!("oncebox-test-{}-{name}", std::process::id()));
            Self(path)
        }
    }

    impl Drop for Folder {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    /// Where user namespaces are blocked, root's server must run as another user; a data
    /// folder left in root's hands would not be readable to it.
    #[test]
    fn root_without_namespaces_runs_the_server_as_another_user() {
        // SAFETY: plain system call.
        if unsafe { libc::geteuid() } != 0 {
            return; // only root has other users to run as
        }
        let folder = Folder::new("fallback");
        let postgres = find_binaries(&PostgresOptions::new(&folder.0)).unwrap().join("postgres");
        assert_ne!(Identity::choose(&postgres).unwrap(), Identity::Caller);
        let (uid, gid) = (65534, 65534);
        let server =
            PrivatePostgres::start_as(PostgresOptions::new(&folder.0), Identity::User(uid, gid))
                .unwrap();
        let owner = fs::metadata(format!("/proc/{}", server.pid().unwrap())).unwrap().uid();
        assert_eq!(owner, uid);
        let home = Folder(server.home.dir.clone());
        drop(server);
        assert!(!home.0.join("data/postmaster.pid").exists(), "the shutdown was not clean");
    }

    /// A socket path over the kernel's limit makes the server end at once.
    #[test]
    fn a_folder_with_a_long_path_gets_a_short_socket() {
        let folder = Folder::new(&"long".repeat(40));
        let server = PrivatePostgres::start(PostgresOptions::new(&folder.0)).unwrap();
        let _socket_dir = Folder(server.home.socket_dir.clone());
        assert!(server.home.socket_dir.as_os_str().len() < 60);
        assert!(server.is_running());
    }

    #[test]
    fn paths_are_encoded_for_a_url() {
        assert_eq!(percent_encode(Path::new("/a b/ü&?")), "/a%20b/%C3%BC%26%3F");
    }
}
