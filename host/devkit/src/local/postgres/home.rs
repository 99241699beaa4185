//! The folder of a private cluster: its files, and their owner.

use std::fs::{self, DirBuilder, File, OpenOptions, TryLockError};
use std::io::Write;
use std::net::{Ipv4Addr, TcpListener};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use libc::pid_t;
use sha2::{Digest, Sha256};

use super::binaries::find_binaries;
use super::{PostgresOptions, STOP, SUPERUSER};
use crate::local::free_port;
use crate::local::process::{Child, Identity, is_running};

/// Longest path of a unix socket that the kernel allows, in bytes without the final NUL.
const SOCKET_PATH_MAX: usize = 107;

/// Longest start of a server, crash recovery included.
const START_TIMEOUT: Duration = Duration::from_secs(60);
const READY_POLL: Duration = Duration::from_millis(2);

/// The folders of a cluster, and the user that works on them.
#[derive(Debug)]
pub(super) struct Home {
    /// The folder that was asked for, or a temporary one where another user needs to own it.
    pub(super) dir: PathBuf,
    /// The folder of the socket: `dir`, unless its path is too long.
    pub(super) socket_dir: PathBuf,
    binaries: PathBuf,
    identity: Identity,
}

impl Home {
    pub(super) fn open(options: &PostgresOptions, identity: Identity) -> Result<Self> {
        let dir = match identity {
            Identity::User(uid, gid) => temporary_dir(&options.dir, uid, gid)?,
            _ => options.dir.clone(),
        };
        let longest = dir.join(".s.PGSQL.65535");
        let socket_dir = match longest.as_os_str().len() <= SOCKET_PATH_MAX {
            true => dir.clone(),
            false => temporary_dir(&options.dir, effective_uid(), effective_gid())?,
        };
        Ok(Self { dir, socket_dir, binaries: find_binaries(options)?, identity })
    }

    pub(super) fn data(&self) -> PathBuf {
        self.dir.join("data")
    }

    pub(super) fn command(&self, program: &str) -> Command {
        let mut command = Command::new(self.binaries.join(program));
        command.current_dir(&self.dir).stdin(Stdio::null());
        self.identity.apply(&mut command);
        command
    }

    /// Returns the superuser's password, which it makes up on first use; its file is whole or
    /// absent.
    pub(super) fn password(&self, options: &PostgresOptions) -> Result<String> {
        let path = self.dir.join("password");
        if let Ok(password) = fs::read_to_string(&path) {
            return Ok(password.trim_end().to_owned());
        }
        let password = first_password(options);
        self.write_password(&path, &password)
            .with_context(|| format!("failed to write `{}`", path.display()))?;
        Ok(password)
    }

    fn write_password(&self, path: &Path, password: &str) -> Result<()> {
        let unfinished = path.with_extension("new");
        let mut options = OpenOptions::new();
        options.write(true).create(true).truncate(true).mode(0o600);
        writeln!(options.open(&unfinished)?, "{password}")?;
        self.hand_over(&unfinished)?;
        Ok(fs::rename(&unfinished, path)?)
    }

    /// Creates the cluster beside its place and renames it, so that `data` is whole or absent.
    pub(super) fn create_cluster(&self, options: &PostgresOptions) -> Result<()> {
        if self.data().exists() {
            return Ok(());
        }
        let unfinished = self.dir.join("data.new");
        if unfinished.exists() {
            fs::remove_dir_all(&unfinished)
                .with_context(|| format!("failed to remove `{}`", unfinished.display()))?;
        }
        let (program, mut creating) = self.creating(options);
        creating.arg("-D").arg(&unfinished).arg("--no-sync");
        let output = creating.output().with_context(|| format!("failed to run `{program}`"))?;
        ensure!(
            output.status.success(),
            "`{program}` failed: {}",
            String::from_utf8_lossy(&output.stderr).trim_end()
        );
        sync_file_system(&unfinished)?;
        fs::rename(&unfinished, self.data()).context("failed to move the new cluster to its place")
    }

    /// Returns the command that creates the cluster, and its name.
    fn creating(&self, _options: &PostgresOptions) -> (&'static str, Command) {
        #[cfg(feature = "test-hooks")]
        if let Some(source) = &_options.copy_of {
            let mut copy = self.command("pg_basebackup");
            copy.args(["-d", &source.url, "--checkpoint=fast", "--wal-method=stream"]);
            if source.follows {
                copy.arg("--write-recovery-conf");
            }
            return ("pg_basebackup", copy);
        }
        let mut initdb = self.command("initdb");
        initdb.arg("--pwfile").arg(self.dir.join("password"));
        initdb.args(["--username", SUPERUSER, "--auth", "scram-sha-256"]);
        initdb.args(["--encoding", "UTF8", "--locale", "C"]);
        ("initdb", initdb)
    }

    /// Ends a server that was left over in this folder. This process holds the lock, so such a
    /// server has lost its owner.
    pub(super) fn end_leftover_server(&self) -> Result<()> {
        for (signal, patience) in STOP {
            let Some(pid) = self.leftover_server() else {
                return Ok(());
            };
            tracing::info!(pid, "ending a `postgres` left over in `{}`", self.dir.display());
            // SAFETY: plain system call; the process was found to be this cluster's.
            unsafe { libc::kill(pid, signal) };
            let deadline = Instant::now() + patience;
            while is_running(pid) && Instant::now() < deadline {
                std::thread::sleep(READY_POLL);
            }
        }
        bail!("a `postgres` left over in `{}` does not stop; end it by hand", self.dir.display())
    }

    /// Returns the process named in `postmaster.pid`, if it is a server of this folder: ids are
    /// reused.
    fn leftover_server(&self) -> Option<pid_t> {
        let pid: pid_t = self.pid_file_line(1)?.parse().ok()?;
        let arguments = fs::read(format!("/proc/{pid}/cmdline")).ok()?;
        let data = self.data();
        let ours = arguments
            .split(|byte| *byte == 0)
            .any(|argument| argument == data.as_os_str().as_encoded_bytes());
        (ours && is_running(pid)).then_some(pid)
    }

    /// Returns a line of `postmaster.pid`, counted from one: the process id is 1, the state is 8.
    fn pid_file_line(&self, number: usize) -> Option<String> {
        let file = fs::read_to_string(self.data().join("postmaster.pid")).ok()?;
        Some(file.lines().nth(number - 1)?.trim().to_owned())
    }

    pub(super) fn wait_until_ready(&self, server: &Child) -> Result<()> {
        let deadline = Instant::now() + START_TIMEOUT;
        let pid = server.pid().to_string();
        while self.pid_file_line(1).as_ref() != Some(&pid)
            || self.pid_file_line(8).as_deref() != Some("ready")
        {
            if let Some(status) = server.wait(READY_POLL) {
                bail!(
                    "`postgres` ended at once ({status}); its last words:\n{}",
                    self.last_words()
                );
            }
            ensure!(
                Instant::now() < deadline,
                "`postgres` is not ready after {START_TIMEOUT:?}; see `{}`",
                self.log_path().display()
            );
        }
        Ok(())
    }

    fn log_path(&self) -> PathBuf {
        self.dir.join("postgres.log")
    }

    pub(super) fn log(&self) -> Result<File> {
        let path = self.log_path();
        let file = OpenOptions::new().append(true).create(true).mode(0o600).open(&path);
        file.with_context(|| format!("failed to open `{}`", path.display()))
    }

    fn last_words(&self) -> String {
        let log = fs::read(self.log_path()).unwrap_or_default();
        let log = String::from_utf8_lossy(&log).into_owned();
        let lines: Vec<&str> = log.lines().collect();
        lines[lines.len().saturating_sub(5)..].join("\n")
    }

    /// Returns the port of the last run if `reuse` and still free, else any free one.
    pub(super) fn free_port(&self, reuse: bool) -> Result<u16> {
        let path = self.dir.join("port");
        let last = fs::read_to_string(&path).ok().and_then(|port| port.trim().parse().ok());
        if let Some(port) =
            last.filter(|port| reuse && TcpListener::bind((Ipv4Addr::LOCALHOST, *port)).is_ok())
        {
            return Ok(port);
        }
        let port = free_port()?;
        fs::write(&path, format!("{port}\n"))
            .with_context(|| format!("failed to write `{}`", path.display()))?;
        Ok(port)
    }

    /// Gives a file to the user the server runs as.
    fn hand_over(&self, path: &Path) -> Result<()> {
        let Identity::User(uid, gid) = self.identity else {
            return Ok(());
        };
        std::os::unix::fs::chown(path, Some(uid), Some(gid))
            .with_context(|| format!("failed to change the owner of `{}`", path.display()))
    }
}

/// Returns the superuser's password of a new cluster; a copy has that of its source.
fn first_password(_options: &PostgresOptions) -> String {
    #[cfg(feature = "test-hooks")]
    if let Some(source) = &_options.copy_of
        && let Some((_, password)) = source.url.split('@').next().and_then(|us| us.rsplit_once(':'))
    {
        return password.to_owned();
    }
    hex::encode(rand::random::<[u8; 16]>())
}

/// Takes the lock of a folder, which has one owner at a time. Without it, a second `postgres` on
/// the data would be refused less clearly.
pub(super) fn take_lock(dir: &Path) -> Result<File> {
    let path = dir.join("lock");
    let file = OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(false)
        .mode(0o600)
        .open(&path)
        .with_context(|| format!("failed to open `{}`", path.display()))?;
    match file.try_lock() {
        Ok(()) => Ok(file),
        Err(TryLockError::WouldBlock) => {
            bail!(
                "the database in `{}` is in use by another process; stop that, or choose another \
                    folder",
                dir.display()
            )
        }
        Err(TryLockError::Error(error)) => {
            Err(error).with_context(|| format!("failed to lock `{}`", path.display()))
        }
    }
}

pub(super) fn create_private_dir(dir: &Path) -> Result<()> {
    let created = DirBuilder::new().recursive(true).mode(0o700).create(dir);
    created.with_context(|| format!("failed to create `{}`", dir.display()))
}

/// Returns a folder with a short path that belongs to `dir`. Other users can write beside it, so it
/// must belong to the user and be closed to others.
fn temporary_dir(dir: &Path, uid: libc::uid_t, gid: libc::gid_t) -> Result<PathBuf> {
    let digest = hex::encode(&Sha256::digest(dir.as_os_str().as_encoded_bytes())[..8]);
    let path = std::env::temp_dir().join(format!("oncebox-{uid}-{digest}"));
    if !path.exists() {
        DirBuilder::new()
            .mode(0o700)
            .create(&path)
            .with_context(|| format!("failed to create `{}`", path.display()))?;
        std::os::unix::fs::chown(&path, Some(uid), Some(gid))
            .with_context(|| format!("failed to change the owner of `{}`", path.display()))?;
    }
    let found = fs::symlink_metadata(&path)
        .with_context(|| format!("failed to look at `{}`", path.display()))?;
    let safe = found.is_dir() && found.uid() == uid && found.permissions().mode() & 0o077 == 0;
    ensure!(safe, "`{}` is not a private folder of user {uid}; remove it", path.display());
    Ok(path)
}

/// Flushes all of a new cluster's thousand files at once: `initdb` flushes them one by one, which
/// takes seconds on a slow disk.
fn sync_file_system(dir: &Path) -> Result<()> {
    let dir = File::open(dir).context("failed to open the new cluster")?;
    // SAFETY: the descriptor is open for the whole call.
    let done = unsafe { libc::syncfs(dir.as_raw_fd()) };
    ensure!(done == 0, "failed to flush the new cluster: {}", std::io::Error::last_os_error());
    Ok(())
}

fn effective_uid() -> libc::uid_t {
    // SAFETY: plain system call.
    unsafe { libc::geteuid() }
}

fn effective_gid() -> libc::gid_t {
    // SAFETY: plain system call.
    unsafe { libc::getegid() }
}
