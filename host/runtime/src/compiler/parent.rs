//! The host's side of the compiler: starts the child within its limits, waits, and reads the
//! result.

use std::{
    ffi::CStr,
    fs::File,
    io::{self, Read, Seek, Write},
    os::{
        fd::FromRawFd,
        unix::process::{CommandExt, ExitStatusExt},
    },
    process::{Child, Command, ExitStatus},
    thread,
    time::{Duration, Instant},
};

use wasmtime::Engine;

use super::{COMPILE_SUBCOMMAND, Compiler, MAGIC, REFUSED};
use crate::{cache::fingerprint, engine::CompileSettings, error::LoadError, text::bounded};

/// Longest pause between two polls of the child.
const POLL_MAX: Duration = Duration::from_millis(10);
/// Most bytes of compiled code. A Python component has 60 MB.
const CODE_BYTES_MAX: u64 = 1 << 30;
/// Most bytes that are kept of the child's message on standard error.
const WORDS_BYTES_MAX: usize = 300;
/// Most threads of the child. Each takes address space of its own.
const THREADS_MAX: usize = 8;
/// Niceness of the child, by which handlers come first.
const NICENESS: libc::c_int = 10;

/// In-memory files that the child reads and writes, so that neither side waits for a pipe.
struct ChildFiles {
    component: File,
    code: File,
    words: File,
}

pub(super) fn compile(
    compiler: &Compiler,
    settings: &CompileSettings,
    engine: &Engine,
    component: &[u8],
) -> Result<Vec<u8>, LoadError> {
    let mut files =
        ChildFiles::with(component).map_err(|error| LoadError::Compiler(error.to_string()))?;
    let child = start(compiler, settings, &files).map_err(|error| {
        LoadError::Compiler(format!("`{}` does not start: {error}", compiler.program.display()))
    })?;
    let ended = wait(child, compiler.duration_max)
        .map_err(|error| LoadError::Compiler(error.to_string()))?;
    let Some(status) = ended else { return Err(LoadError::CompileTimeout(compiler.duration_max)) };
    match status.code() {
        Some(0) => files.code(engine),
        Some(code) if code == i32::from(REFUSED) => Err(refused(compiler, files.refusal())),
        _ => Err(ended_badly(compiler, status, &files.words())),
    }
}

impl ChildFiles {
    fn with(component: &[u8]) -> io::Result<Self> {
        let mut files = Self {
            component: in_memory(c"component")?,
            code: in_memory(c"code")?,
            words: in_memory(c"words")?,
        };
        files.component.write_all(component)?;
        files.component.rewind()?;
        Ok(files)
    }

    /// Reads the compiled code, and refuses code for another engine.
    fn code(&mut self, engine: &Engine) -> Result<Vec<u8>, LoadError> {
        let written = read(&mut self.code, u64::MAX)
            .map_err(|error| LoadError::Compiler(error.to_string()))?;
        let fingerprint = fingerprint(engine);
        let code =
            written.strip_prefix(MAGIC).and_then(|rest| rest.strip_prefix(fingerprint.as_bytes()));
        code.map(<[u8]>::to_vec).ok_or_else(|| {
            LoadError::Compiler(
                "it is another program than the host, or has other settings".to_owned(),
            )
        })
    }

    fn refusal(&mut self) -> String {
        let text = read(&mut self.code, crate::text::FAILURE_BYTES as u64).unwrap_or_default();
        String::from_utf8_lossy(&text).into_owned()
    }

    /// Returns the first line on standard error with a message: a panic's, or that memory ran out.
    fn words(&mut self) -> String {
        let text = read(&mut self.words, 64 << 10).unwrap_or_default();
        let text = String::from_utf8_lossy(&text);
        let line = text
            .lines()
            .map(str::trim)
            .find(|line| !line.is_empty() && !line.starts_with("thread '"));
        bounded(line.unwrap_or_default(), WORDS_BYTES_MAX)
    }
}

fn in_memory(name: &CStr) -> io::Result<File> {
    // SAFETY: `name` ends with NUL. The call returns a new descriptor or -1.
    let descriptor = unsafe { libc::memfd_create(name.as_ptr(), libc::MFD_CLOEXEC) };
    if descriptor < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the descriptor is open, and nothing else owns it.
    Ok(unsafe { File::from_raw_fd(descriptor) })
}

/// Reads a file from its start: parent and child share the position, which the child has moved.
fn read(file: &mut File, max: u64) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    file.rewind()?;
    file.take(max).read_to_end(&mut bytes)?;
    Ok(bytes)
}

fn start(compiler: &Compiler, settings: &CompileSettings, files: &ChildFiles) -> io::Result<Child> {
    let threads = thread::available_parallelism().map_or(1, usize::from).min(THREADS_MAX);
    let bounds = Bounds {
        memory: compiler.memory_bytes_max,
        // The clock limits a child that waits, this limit a child that computes.
        cpu_seconds: (compiler.duration_max.as_secs() + 1) * threads as u64,
        parent: std::process::id(),
    };
    let mut command = Command::new(&compiler.program);
    command
        .arg(COMPILE_SUBCOMMAND)
        .arg(serde_json::to_string(settings)?)
        .env_clear()
        .env("RAYON_NUM_THREADS", threads.to_string())
        .stdin(files.component.try_clone()?)
        .stdout(files.code.try_clone()?)
        .stderr(files.words.try_clone()?)
        // A terminal's signals to the host's process group must reach the host only.
        .process_group(0);
    // SAFETY: `Bounds::apply` makes system calls and allocates nothing, so it may run between fork
    // and exec.
    unsafe { command.pre_exec(move || bounds.apply()) };
    command.spawn()
}

/// Limits of a child.
#[derive(Clone, Copy)]
struct Bounds {
    memory: u64,
    cpu_seconds: u64,
    parent: u32,
}

impl Bounds {
    /// Sets the limits. Runs in the child, between fork and exec.
    fn apply(&self) -> io::Result<()> {
        limit(libc::RLIMIT_AS, self.memory, self.memory)?;
        // At the soft limit the kernel sends SIGXCPU, at the hard limit SIGKILL.
        limit(libc::RLIMIT_CPU, self.cpu_seconds, self.cpu_seconds + 5)?;
        limit(libc::RLIMIT_FSIZE, CODE_BYTES_MAX, CODE_BYTES_MAX)?;
        limit(libc::RLIMIT_CORE, 0, 0)?;
        // SAFETY: plain system calls with integer arguments. The first one makes exec close all
        // other descriptors of the host, such as a C library's sockets.
        unsafe {
            libc::syscall(
                libc::SYS_close_range,
                3 as libc::c_uint,
                libc::c_uint::MAX,
                libc::CLOSE_RANGE_CLOEXEC,
            );
            libc::setpriority(libc::PRIO_PROCESS, 0, NICENESS);
            libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0);
            // The signal is tied to the thread that forked. That thread waits for the child.
            if libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) != 0 {
                return Err(io::Error::last_os_error());
            }
            // A parent that died before this call sends no signal.
            if libc::getppid() as u32 != self.parent {
                return Err(io::ErrorKind::BrokenPipe.into());
            }
        }
        Ok(())
    }
}

fn limit(resource: libc::__rlimit_resource_t, soft: u64, hard: u64) -> io::Result<()> {
    let limit = libc::rlimit { rlim_cur: soft, rlim_max: hard };
    // SAFETY: `limit` is valid for reading for the whole call.
    if unsafe { libc::setrlimit(resource, &limit) } != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

/// Waits for the child and returns its status. Kills it at the limit, and then returns none.
fn wait(mut child: Child, limit: Duration) -> io::Result<Option<ExitStatus>> {
    let deadline = Instant::now() + limit;
    let mut pause = Duration::from_millis(1);
    loop {
        if let Some(status) = child.try_wait()? {
            return Ok(Some(status));
        }
        if Instant::now() >= deadline {
            child.kill()?;
            child.wait()?;
            return Ok(None);
        }
        thread::sleep(pause);
        pause = (pause * 2).min(POLL_MAX);
    }
}

/// Makes an error of the child's refusal. The compiler reports missing memory as a refusal too.
fn refused(compiler: &Compiler, reason: String) -> LoadError {
    match reason.contains("Cannot allocate memory") {
        true => LoadError::CompileMemory(compiler.memory_bytes_max),
        false => LoadError::Invalid(reason),
    }
}

fn ended_badly(compiler: &Compiler, status: ExitStatus, words: &str) -> LoadError {
    let is_out_of_memory = ["memory allocation of", "Cannot allocate memory", "failed to allocate"]
        .iter()
        .any(|sign| words.contains(sign));
    match status.signal() {
        _ if is_out_of_memory => LoadError::CompileMemory(compiler.memory_bytes_max),
        Some(libc::SIGXCPU) => LoadError::CompileTimeout(compiler.duration_max),
        Some(libc::SIGXFSZ) => {
            LoadError::CompilerCrashed(format!("it wrote more than {CODE_BYTES_MAX} bytes of code"))
        }
        // An operator, or the kernel of a machine without memory, has killed the child. Nothing
        // blames the component.
        Some(libc::SIGKILL | libc::SIGTERM | libc::SIGINT | libc::SIGHUP) => {
            LoadError::Compiler("it was killed from outside".to_owned())
        }
        _ if words.is_empty() => LoadError::CompilerCrashed(status.to_string()),
        _ => LoadError::CompilerCrashed(format!("{status}: {words}")),
    }
}
