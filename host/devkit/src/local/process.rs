//! Child processes that cannot outlive this process, and the user they run as.

use std::ffi::CStr;
use std::io;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::Path;
use std::process::{Command, ExitStatus, Stdio};
use std::sync::mpsc::{SyncSender, sync_channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::Context;
use libc::{c_int, gid_t, pid_t, uid_t};

/// A child process that receives a signal when this process ends, even by SIGKILL.
///
/// Dropping the handle leaves the child running; its owner calls [`Child::end`].
#[derive(Debug)]
pub struct Child {
    pid: pid_t,
    exit: Arc<Exit>,
}

#[derive(Debug, Default)]
struct Exit {
    status: Mutex<Option<ExitStatus>>,
    changed: Condvar,
}

impl Exit {
    fn status(&self) -> MutexGuard<'_, Option<ExitStatus>> {
        self.status.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Child {
    /// Starts `command`, which gets `death_signal` when this process ends.
    ///
    /// The kernel ties that signal to the *thread* that started the child, so each child has a
    /// thread of its own, which does nothing but wait for it.
    pub fn spawn(mut command: Command, death_signal: c_int) -> io::Result<Self> {
        let parent = own_pid();
        // SAFETY: `die_with_parent` makes three system calls and allocates nothing, so it
        // may run between fork and exec. It is registered last: changes of credentials
        // made by an earlier hook would clear the death signal again.
        unsafe { command.pre_exec(move || die_with_parent(parent, death_signal)) };
        let exit = Arc::new(Exit::default());
        let (started, answer) = sync_channel(1);
        let keeper = thread::Builder::new().name("child-keeper".to_owned());
        keeper.spawn({
            let exit = exit.clone();
            move || keep(command, &started, &exit)
        })?;
        let pid = answer.recv().map_err(io::Error::other)??;
        Ok(Self { pid, exit })
    }

    /// Returns the process id, also after the process has ended.
    pub fn pid(&self) -> pid_t {
        self.pid
    }

    /// Sends a signal, unless the process has ended: another process may have its id by then.
    pub fn signal(&self, signal: c_int) {
        let status = self.exit.status();
        if status.is_none() {
            // SAFETY: plain system call; while `status` is locked and empty the child is
            // not reaped, so the id is still its own.
            unsafe { libc::kill(self.pid, signal) };
        }
    }

    /// Waits for the end of the process, at most for `timeout`; `None` while it runs.
    pub fn wait(&self, timeout: Duration) -> Option<ExitStatus> {
        let status = self.exit.status();
        let waited =
            self.exit.changed.wait_timeout_while(status, timeout, |status| status.is_none());
        *waited.unwrap_or_else(PoisonError::into_inner).0
    }

    /// Returns whether the process has not ended yet.
    pub fn is_running(&self) -> bool {
        self.exit.status().is_none()
    }

    /// Sends one signal after the other, with a time to react for each, until the process ends.
    pub fn end(&self, signals: &[(c_int, Duration)]) -> Option<ExitStatus> {
        signals.iter().find_map(|(signal, patience)| {
            self.signal(*signal);
            self.wait(*patience)
        })
    }

    /// Kills the process and its children at one blow, as a crash would, and waits until
    /// all of them are gone. The parent is stopped first, so that it starts no more children.
    pub fn kill_with_children(&self, timeout: Duration) -> anyhow::Result<()> {
        let deadline = Instant::now() + timeout;
        self.signal(libc::SIGSTOP);
        // It may still be starting one when the signal is sent.
        let is_stopped = |(state, _)| matches!(state, 'T' | 't' | 'Z' | 'X');
        while !state_and_parent(self.pid).is_none_or(is_stopped) {
            anyhow::ensure!(Instant::now() < deadline, "the process to be killed does not stop");
            thread::sleep(Duration::from_millis(1));
        }
        let children = children_of(self.pid)?;
        for child in &children {
            // SAFETY: plain system call; their parent is stopped and has not reaped them.
            unsafe { libc::kill(*child, libc::SIGKILL) };
        }
        self.signal(libc::SIGKILL);
        self.wait(timeout).context("the killed process does not end")?;
        while children.iter().any(|child| is_running(*child)) {
            anyhow::ensure!(Instant::now() < deadline, "children of the killed process do not end");
            thread::sleep(Duration::from_millis(2));
        }
        Ok(())
    }
}

/// Returns whether a process with this id exists and is more than a zombie.
pub fn is_running(pid: pid_t) -> bool {
    state_and_parent(pid).is_some_and(|(state, _)| state != 'Z' && state != 'X')
}

fn children_of(parent: pid_t) -> anyhow::Result<Vec<pid_t>> {
    let processes = std::fs::read_dir("/proc").context("failed to list processes in `/proc`")?;
    let pids = processes.flatten().filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    Ok(pids.filter(|pid| state_and_parent(*pid).is_some_and(|(_, of)| of == parent)).collect())
}

/// Reads `/proc/<pid>/stat`; the name before the state may itself contain parentheses.
fn state_and_parent(pid: pid_t) -> Option<(char, pid_t)> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let mut fields = stat.rsplit_once(')')?.1.split_whitespace();
    Some((fields.next()?.chars().next()?, fields.next()?.parse().ok()?))
}

/// Runs as the body of a child's thread: starts the child, reports its id, waits, reaps it.
fn keep(mut command: Command, started: &SyncSender<io::Result<pid_t>>, exit: &Exit) {
    let spawned = command.spawn();
    drop(command);
    let mut child = match spawned {
        Ok(child) => child,
        Err(error) => return drop(started.send(Err(error))),
    };
    let pid = pid_t::try_from(child.id()).unwrap_or(pid_t::MAX);
    // A failed send means that this process is ending, and the child with it.
    let _ = started.send(Ok(pid));
    wait_without_reaping(pid);
    let mut status = exit.status();
    *status = Some(child.wait().unwrap_or_else(|_| ExitStatus::from_raw(libc::SIGKILL)));
    exit.changed.notify_all();
}

/// Returns when the child has ended but still owns its process id, so that the id can be
/// given up under the lock that [`Child::signal`] takes.
fn wait_without_reaping(pid: pid_t) {
    let Ok(id) = libc::id_t::try_from(pid) else {
        return;
    };
    loop {
        // SAFETY: an all-zero `siginfo_t` is a valid value; the call overwrites it.
        let mut info: libc::siginfo_t = unsafe { std::mem::zeroed() };
        // SAFETY: `info` is valid for writing for the whole call.
        let done =
            unsafe { libc::waitid(libc::P_PID, id, &mut info, libc::WEXITED | libc::WNOWAIT) };
        if done == 0 || io::Error::last_os_error().kind() != io::ErrorKind::Interrupted {
            return;
        }
    }
}

/// Requests the death signal, in the child before exec. A parent that died before the request gives
/// no signal, hence the second check.
fn die_with_parent(parent: pid_t, signal: c_int) -> io::Result<()> {
    // SAFETY: plain system call with integer arguments.
    if unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, signal, 0, 0, 0) } != 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: plain system call.
    if unsafe { libc::getppid() } != parent {
        return Err(io::Error::from_raw_os_error(libc::ESRCH));
    }
    Ok(())
}

/// Limits the address space of every process that `command` starts to `bytes`.
pub fn limit_memory(command: &mut Command, bytes: u64) {
    let limit = libc::rlimit { rlim_cur: bytes, rlim_max: bytes };
    let set = move || {
        // SAFETY: `limit` is a valid `rlimit`, moved into the closure.
        let done = unsafe { libc::setrlimit(libc::RLIMIT_AS, &limit) };
        if done == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
    };
    // SAFETY: one system call, no allocation: fit to run between fork and exec.
    unsafe { command.pre_exec(set) };
}

/// The identity of a server that refuses to run as root.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Identity {
    /// The user of this process, which is not root.
    Caller,
    /// A user inside a namespace: this process and the files are root's, and the server believes to
    /// be this user. It works in any folder that this process can write, also below a closed home.
    Namespace(uid_t),
    /// Another user, who must own the files: this process is root's, and user namespaces are
    /// blocked.
    User(uid_t, gid_t),
}

impl Identity {
    /// Chooses the identity that works on this machine. It runs `program --version` as a trial.
    pub fn choose(program: &Path) -> anyhow::Result<Self> {
        // SAFETY: plain system call.
        if unsafe { libc::geteuid() } != 0 {
            return Ok(Self::Caller);
        }
        let (inner, _) = look_up(&["nobody", "postgres"])?;
        let namespace = Self::Namespace(inner);
        if namespace.works_for(program) {
            return Ok(namespace);
        }
        let (uid, gid) = look_up(&["postgres", "nobody"])?;
        Ok(Self::User(uid, gid))
    }

    /// Makes `command` run as this identity.
    pub fn apply(self, command: &mut Command) {
        match self {
            Self::Caller => {}
            Self::User(uid, gid) => {
                command.uid(uid).gid(gid);
            }
            Self::Namespace(uid) => {
                let map = format!("{uid} 0 1");
                // SAFETY: `enter_namespace` makes system calls only; `map` is allocated here.
                unsafe { command.pre_exec(move || enter_namespace(map.as_bytes())) };
            }
        }
    }

    fn works_for(self, program: &Path) -> bool {
        let mut trial = Command::new(program);
        trial.arg("--version").stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        self.apply(&mut trial);
        trial.status().is_ok_and(|status| status.success())
    }
}

/// Enters a user namespace, in the child before exec: root outside becomes one plain user inside.
fn enter_namespace(map: &[u8]) -> io::Result<()> {
    // SAFETY: plain system call; the child has one thread, as the call demands.
    if unsafe { libc::unshare(libc::CLONE_NEWUSER) } != 0 {
        return Err(io::Error::last_os_error());
    }
    write_file(c"/proc/self/setgroups", b"deny")?;
    write_file(c"/proc/self/uid_map", map)?;
    write_file(c"/proc/self/gid_map", map)
}

/// Writes a file without allocating. `std::fs::write` may allocate, which is not allowed between
/// fork and exec.
fn write_file(path: &CStr, content: &[u8]) -> io::Result<()> {
    // SAFETY: `path` is a valid C string; the descriptor is closed below.
    let file = unsafe { libc::open(path.as_ptr(), libc::O_WRONLY | libc::O_CLOEXEC) };
    if file < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: `content` is valid for reading `content.len()` bytes.
    let written = unsafe { libc::write(file, content.as_ptr().cast(), content.len()) };
    let error = io::Error::last_os_error();
    // SAFETY: `file` was opened above and is closed once.
    unsafe { libc::close(file) };
    if usize::try_from(written).is_ok_and(|n| n == content.len()) { Ok(()) } else { Err(error) }
}

/// Returns the first of these users that exists, with its group.
fn look_up(names: &[&str]) -> anyhow::Result<(uid_t, gid_t)> {
    let users = std::fs::read_to_string("/etc/passwd").context("failed to read `/etc/passwd`")?;
    let find = |name: &&str| {
        let line = users.lines().find(|line| line.split(':').next() == Some(name))?;
        let mut ids = line.split(':').skip(2).map_while(|id| id.parse().ok());
        Some((ids.next()?, ids.next()?))
    };
    let found = names.iter().find_map(find);
    found.with_context(|| {
        format!(
            "no user {} exists; create one, or start as a user other than root",
            names.join(" or ")
        )
    })
}

fn own_pid() -> pid_t {
    // SAFETY: plain system call.
    unsafe { libc::getpid() }
}
