//! The host's side: start the child within its bounds, wait, and read what became of it.

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

/// Longest pause between two looks at the child.
const POLL_MAX: Duration = Duration::from_millis(10);
/// Bytes of compiled code; Python's are 60 MB.
const CODE_BYTES_MAX: u64 = 1 << 30;
/// Bytes that are kept of what the child said before it ended.
const WORDS_BYTES_MAX: usize = 300;
/// Threads that compile. Each takes address space of its own.
const THREADS_MAX: usize = 8;
/// How much the child gives way to handlers.
const NICENESS: libc::c_int = 10;

/// Files in memory that the child reads and writes, so that nobody waits for a pipe.
struct Files {
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
        Files::with(component).map_err(|error| LoadError::Compiler(error.to_string()))?;
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

impl Files {
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

    /// The code, if it is for this very engine.
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

    /// The last line that means something: a panic's message, or that memory ran out.
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
    // SAFETY: `name` is a string that ends; the call returns a new descriptor or -1.
    let descriptor = unsafe { libc::memfd_create(name.as_ptr(), libc::MFD_CLOEXEC) };
    if descriptor < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the descriptor is open and nobody else's.
    Ok(unsafe { File::from_raw_fd(descriptor) })
}

/// The child's writes moved the position, which is shared.
fn read(file: &mut File, max: u64) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    file.rewind()?;
    file.take(max).read_to_end(&mut bytes)?;
    Ok(bytes)
}

fn start(compiler: &Compiler, settings: &CompileSettings, files: &Files) -> io::Result<Child> {
    let threads = thread::available_parallelism().map_or(1, usize::from).min(THREADS_MAX);
    let bounds = Bounds {
        memory: compiler.memory_bytes_max,
        // The clock bounds what a child that waits may take, this one what a busy one may.
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
        // What a terminal sends to the host's group is the host's to answer.
        .process_group(0);
    // SAFETY: `Bounds::apply` makes system calls and allocates nothing, so it may run between fork
    // and exec.
    unsafe { command.pre_exec(move || bounds.apply()) };
    command.spawn()
}

/// What a child may use.
#[derive(Clone, Copy)]
struct Bounds {
    memory: u64,
    cpu_seconds: u64,
    parent: u32,
}

impl Bounds {
    /// Runs in the child, before the program begins.
    fn apply(&self) -> io::Result<()> {
        limit(libc::RLIMIT_AS, self.memory, self.memory)?;
        // At the first the kernel sends a signal with a name of its own, at the second it kills.
        limit(libc::RLIMIT_CPU, self.cpu_seconds, self.cpu_seconds + 5)?;
        limit(libc::RLIMIT_FSIZE, CODE_BYTES_MAX, CODE_BYTES_MAX)?;
        limit(libc::RLIMIT_CORE, 0, 0)?;
        // SAFETY: plain system calls with integer arguments. Descriptors of the host that are not
        // closed by exec, such as a C library's sockets, are marked so.
        unsafe {
            libc::syscall(
                libc::SYS_close_range,
                3 as libc::c_uint,
                libc::c_uint::MAX,
                libc::CLOSE_RANGE_CLOEXEC,
            );
            libc::setpriority(libc::PRIO_PROCESS, 0, NICENESS);
            libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0);
            // Tied to the thread that forked, which waits for the child until its end.
            if libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) != 0 {
                return Err(io::Error::last_os_error());
            }
            // A parent that died before that gives no signal.
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

/// How it ended; none when its time was up.
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

/// The compiler takes a refusal of memory for an error of its own.
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
        // By a person, or by the kernel when the machine has no memory left: not the component's
        // fault, as far as anyone knows.
        Some(libc::SIGKILL | libc::SIGTERM | libc::SIGINT | libc::SIGHUP) => {
            LoadError::Compiler("it was killed from outside".to_owned())
        }
        _ if words.is_empty() => LoadError::CompilerCrashed(status.to_string()),
        _ => LoadError::CompilerCrashed(format!("{status}: {words}")),
    }
}
