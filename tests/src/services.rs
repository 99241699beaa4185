//! Servers that all test processes of a run share: one Kafka, one PostgreSQL.
//!
//! Each shared server belongs to a supervisor, a detached process of the program `services`.
//! Everything is agreed upon by locks on files in `target/test-services`, which the system
//! releases when their holder dies, so that nothing stale needs to be recognised:
//!
//! - `<name>.users`: each test process holds it shared until it ends; the supervisor stops
//!   its server when it could hold it alone for [`IDLE_LIMIT`];
//! - `<name>.start`: held by the test process that looks for or starts the supervisor;
//! - `<name>.json`: the address; locked by the supervisor as long as it lives.

use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::Write;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use serde::{Deserialize, Serialize};

use crate::temp_dir::own_path;

/// How long a shared server outlives its last user: between two test binaries there may be
/// nobody who uses it.
pub const IDLE_LIMIT: Duration = Duration::from_secs(30);

/// Covers a first download of Kafka.
const START_TIMEOUT: Duration = Duration::from_secs(300);
const POLL: Duration = Duration::from_millis(20);

/// A kind of server that can be shared.
pub trait Service: Sized {
    /// Names the files and the subcommand of `services`.
    const NAME: &'static str;

    /// Starts a server with its data in `dir`, which does not exist yet.
    fn start(dir: &Path) -> Result<Self>;

    /// Where clients reach it.
    fn address(&self) -> String;

    /// Whether its process lives.
    fn is_running(&self) -> bool;

    /// Shuts it down.
    fn stop(self);
}

#[derive(Serialize, Deserialize)]
struct Running {
    /// The supervisor's process, for people who look.
    pid: u32,
    address: String,
}

/// The address of the shared server, started if need be and kept until this process ends.
pub fn shared<S: Service>() -> Result<String> {
    static USED: Mutex<Vec<(&str, File, String)>> = Mutex::new(Vec::new());
    let mut used = USED.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some((_, _, address)) = used.iter().find(|(name, _, _)| *name == S::NAME) {
        return Ok(address.clone());
    }
    let user = open(S::NAME, "users")?;
    user.lock_shared().context("failed to lock the list of users")?;
    let address = find_or_start(S::NAME)?;
    used.push((S::NAME, user, address.clone()));
    Ok(address)
}

fn find_or_start(name: &str) -> Result<String> {
    let start = open(name, "start")?;
    start.lock().context("failed to wait for another process that starts the server")?;
    let deadline = Instant::now() + START_TIMEOUT;
    let mut supervisor = None;
    loop {
        match (supervised(name)?, &mut supervisor) {
            (true, _) => {
                if let Some(running) = read_state(name) {
                    return Ok(running.address);
                }
            }
            (false, None) => supervisor = Some(spawn_supervisor(name)?),
            (false, Some(child)) => ensure_running(name, child)?,
        }
        ensure!(
            Instant::now() < deadline,
            "the shared {name} is not up after {START_TIMEOUT:?}; see `{}`",
            file(name, "log").display()
        );
        std::thread::sleep(POLL);
    }
}

/// Whether a supervisor lives. If not, what the last one wrote is removed.
fn supervised(name: &str) -> Result<bool> {
    let state = open(name, "json")?;
    match state.try_lock() {
        Ok(()) => state.set_len(0).context("failed to clear the state").map(|()| false),
        Err(TryLockError::WouldBlock) => Ok(true),
        Err(TryLockError::Error(error)) => Err(error).context("failed to look for the supervisor"),
    }
}

/// `None` while the server is starting.
fn read_state(name: &str) -> Option<Running> {
    serde_json::from_slice(&fs::read(file(name, "json")).ok()?).ok()
}

/// Starts the program `services`, which cargo builds beside the tests, in a process group of
/// its own: a Ctrl-C meant for the tests leaves it to notice that nobody is there any more.
fn spawn_supervisor(name: &str) -> Result<Child> {
    let log =
        File::create(file(name, "log")).context("failed to create the log of a shared server")?;
    let mut command = Command::new(program()?);
    command.arg(name).process_group(0).stdin(Stdio::null());
    command.stdout(log.try_clone().context("failed to share the log")?).stderr(log);
    command.spawn().context("failed to start `services`")
}

/// Test programs are in `target/<profile>/deps`, others one folder up.
fn program() -> Result<PathBuf> {
    let own = std::env::current_exe().context("failed to find the running program")?;
    let found =
        own.ancestors().skip(1).take(2).map(|dir| dir.join("services")).find(|path| path.is_file());
    found.context("the program `services` is missing; run `cargo build -p oncebox-tests --bins`")
}

fn ensure_running(name: &str, supervisor: &mut Child) -> Result<()> {
    let Some(status) = supervisor.try_wait().context("failed to look at `services`")? else {
        return Ok(());
    };
    let log = fs::read_to_string(file(name, "log")).unwrap_or_default();
    bail!("the shared {name} did not start ({status}):\n{}", log.trim_end())
}

/// The supervisor's life: starts the server, publishes its address, stops it when idle.
pub fn supervise<S: Service>() -> Result<()> {
    let mut state = open(S::NAME, "json")?;
    state.lock().context("failed to lock the state")?;
    let dir = own_path(S::NAME);
    let server = S::start(&dir)?;
    let running = Running { pid: std::process::id(), address: server.address() };
    state.write_all(&serde_json::to_vec(&running)?).context("failed to publish the address")?;
    let alone = wait_until_idle(&server)?;
    state.set_len(0).context("failed to withdraw the address")?;
    server.stop();
    fs::remove_dir_all(&dir).with_context(|| format!("failed to remove `{}`", dir.display()))?;
    drop(alone); // only now may a new user come: it starts a new supervisor
    Ok(())
}

/// Returns with the users' lock held, so that nobody finds a server that is going away; or
/// without it when the server has ended by itself.
fn wait_until_idle<S: Service>(server: &S) -> Result<Option<File>> {
    let users = open(S::NAME, "users")?;
    let mut last_used = Instant::now();
    while server.is_running() {
        match users.try_lock() {
            Ok(()) if last_used.elapsed() >= IDLE_LIMIT => return Ok(Some(users)),
            Ok(()) => users.unlock().context("failed to unlock the list of users")?,
            Err(_) => last_used = Instant::now(),
        }
        std::thread::sleep(Duration::from_millis(500));
    }
    Ok(None)
}

fn open(name: &str, extension: &str) -> Result<File> {
    services_dir()?;
    let path = file(name, extension);
    let file = OpenOptions::new().read(true).write(true).create(true).truncate(false).open(&path);
    file.with_context(|| format!("failed to open `{}`", path.display()))
}

fn file(name: &str, extension: &str) -> PathBuf {
    target_dir().join(format!("test-services/{name}.{extension}"))
}

fn services_dir() -> Result<PathBuf> {
    let dir = target_dir().join("test-services");
    fs::create_dir_all(&dir).with_context(|| format!("failed to create `{}`", dir.display()))?;
    Ok(dir)
}

/// The workspace's `target`.
pub fn target_dir() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).with_file_name("target")
}
