//! Compiling happens in a process of its own. What could go wrong: a component that crashes the
//! compiler, runs for ever or takes all memory takes the host with it; the process outlives its
//! host or sees its secrets; its output is taken though it is not for this engine.

use std::{
    fs,
    os::fd::AsRawFd,
    path::PathBuf,
    process::{Command, Stdio},
    time::{Duration, Instant},
};

use oncebox_devkit::local::process::is_running;
use oncebox_model::policy::Limits;
use oncebox_runtime::{
    Compiler, HandlerSettings, LoadError, RuntimeConfig, WasmRuntime, encode_component,
};
use oncebox_tests::{
    host::program,
    program::{in_own_process, write_script},
    wait::DEADLINE,
};

const LEDGER: &[u8] = include_bytes!("../../../guest-examples/components/ledger.wasm");
const HELPER: &str = "ONCEBOX_TEST_PARENT";

fn own() -> Compiler {
    Compiler { program: program().unwrap(), memory_bytes_max: 4 << 30, duration_max: DEADLINE }
}

fn runtime(compiler: Compiler) -> WasmRuntime {
    WasmRuntime::new(RuntimeConfig {
        instances_max: 1,
        compiler: Some(compiler),
        ..RuntimeConfig::default()
    })
    .unwrap()
}

/// A shell script in the place of the compiler, in a folder of its own.
struct Script(PathBuf);

impl Script {
    fn new(name: &str, body: &str) -> Self {
        let dir =
            std::env::temp_dir().join(format!("oncebox-compiler-{name}-{}", std::process::id()));
        fs::create_dir_all(&dir).unwrap();
        let script = Self(dir);
        write_script(&script.path(), body).unwrap();
        script
    }

    fn path(&self) -> PathBuf {
        self.0.join("compiler")
    }

    fn compiler(&self) -> Compiler {
        Compiler { program: self.path(), ..own() }
    }
}

impl Drop for Script {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

async fn error(compiler: Compiler, component: &[u8]) -> LoadError {
    runtime(compiler).load(component).await.err().expect("it cannot be loaded")
}

/// The host fails in this way, or the component has this problem.
async fn check(name: &str, body: &str, problem: Option<&str>, part: &str) {
    let script = Script::new(name, body);
    let error = error(script.compiler(), LEDGER).await;
    assert_eq!(error.problem().map(|it| it.code).as_deref(), problem, "`{name}`: {error}");
    assert!(error.to_string().contains(part), "`{name}`: `{error}` lacks `{part}`");
}

#[tokio::test]
async fn what_the_process_compiles_runs_as_what_the_host_compiles() {
    let loaded = runtime(own()).load(LEDGER).await.unwrap();
    runtime(own()).probe(&loaded).await.expect("it starts");
    for config in [
        RuntimeConfig { count_fuel: true, ..RuntimeConfig::default() },
        RuntimeConfig { small_virtual_memory: true, ..RuntimeConfig::default() },
        RuntimeConfig { memory_bytes_max: 32 << 20, ..RuntimeConfig::default() },
    ] {
        let with = WasmRuntime::new(RuntimeConfig {
            instances_max: 1,
            compiler: Some(own()),
            ..config.clone()
        })
        .unwrap();
        let loaded = with.load(LEDGER).await.unwrap_or_else(|error| panic!("{config:?}: {error}"));
        with.handler(
            &loaded,
            HandlerSettings {
                version: 1,
                limits: Limits::default(),
                config: vec![],
                random_key: [0; 32],
                may_emit: false,
            },
        );
    }
    let invalid = error(own(), b"\0asm\x0d\0\x01\0garbage").await;
    assert!(matches!(&invalid, LoadError::Invalid(text) if text.contains("offset")), "{invalid}");
}

#[tokio::test]
async fn a_crash_of_the_compiler_is_the_components_problem() {
    check("segv", "kill -SEGV $$", Some("compiler_crashed"), "signal: 11").await;
    check(
        "abort",
        "echo 'thread panicked at the disco' >&2; kill -ABRT $$",
        Some("compiler_crashed"),
        "at the disco",
    )
    .await;
    check(
        "allocation",
        "echo 'memory allocation of 9 bytes failed' >&2; kill -ABRT $$",
        Some("compiling_takes_too_much_memory"),
        "4294967296",
    )
    .await;
    let bound = format!("{} s", DEADLINE.as_secs());
    check("cpu", "kill -XCPU $$", Some("compiling_takes_too_long"), &bound).await;
    check(
        "refusal",
        "echo 'no such instruction'; exit 3",
        Some("cannot_be_compiled"),
        "no such instruction",
    )
    .await;
}

#[tokio::test]
async fn a_failure_of_the_host_is_not() {
    check("killed", "kill -KILL $$", None, "killed from outside").await;
    check("other", "echo something else", None, "another program").await;
    let missing = Compiler { program: "/nowhere/oncebox".into(), ..own() };
    let error = error(missing, LEDGER).await;
    assert!(error.problem().is_none() && error.to_string().contains("/nowhere/oncebox"), "{error}");
}

#[tokio::test]
async fn time_and_memory_are_bounded() {
    let script = Script::new("sleeper", "echo $$ > \"$0.pid\"; exec sleep 600");
    let start = Instant::now();
    let compiler = Compiler { duration_max: Duration::from_millis(700), ..script.compiler() };
    let slow = error(compiler, LEDGER).await;
    assert!(
        matches!(slow, LoadError::CompileTimeout(_)) && start.elapsed() < Duration::from_secs(20),
        "{slow}"
    );
    let pid =
        fs::read_to_string(script.path().with_extension("pid")).unwrap().trim().parse().unwrap();
    assert!(!is_running(pid), "it sleeps on");

    // One function that is too much for little memory.
    let adds = "(local.set 0 (i64.mul (i64.add (local.get 0) (local.get 1)) (local.get 0)))"
        .repeat(400_000);
    let core = format!(
        r#"(module (func (param i64 i64) {adds}) (memory (export "memory") 1)
        (func (export "cabi_realloc") (param i32 i32 i32 i32) (result i32) unreachable)
        (func (export "oncebox:handler/incoming-handler@0.1.0#handle") (param i32) (result i32) unreachable))"#
    );
    let large = encode_component(&wat::parse_str(core).unwrap()).unwrap();
    let small = Compiler { memory_bytes_max: 160 << 20, ..own() };
    let hungry = error(small, &large).await;
    assert!(matches!(hungry, LoadError::CompileMemory(_)), "{hungry}");
}

#[tokio::test]
async fn nothing_of_the_host_is_inherited() {
    if !in_own_process("compiler_process::nothing_of_the_host_is_inherited").unwrap() {
        return;
    }
    // SAFETY: no other test runs in this process, so that nothing reads a variable at this time.
    unsafe { std::env::set_var("ONCEBOX_MASTER_KEY", "secret") };
    // As a C library opens one: not closed by exec.
    let socket = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    // SAFETY: the descriptor is open; only its flags change.
    unsafe { libc::fcntl(socket.as_raw_fd(), libc::F_SETFD, 0) };
    let script = Script::new(
        "nosy",
        "env > \"$0.env\"; ls -l /proc/$$/fd > \"$0.fds\"; nice > \"$0.nice\"; exit 1",
    );
    let _ = error(script.compiler(), LEDGER).await;
    let seen = |what: &str| fs::read_to_string(script.path().with_extension(what)).unwrap();
    assert!(!seen("env").contains("secret"), "{}", seen("env"));
    assert_eq!(seen("nice").trim(), "10");
    assert!(!seen("fds").contains("socket:"), "{}", seen("fds"));
    drop(socket);
}

/// Run by the next test in a process of its own, which is killed.
#[tokio::test]
async fn parent() {
    if let Ok(program) = std::env::var(HELPER) {
        let _ = error(Compiler { program: program.into(), ..own() }, LEDGER).await;
    }
}

#[tokio::test]
async fn the_process_ends_with_its_host() {
    let script =
        Script::new("orphan", "echo $$ > \"$0.new\"; mv \"$0.new\" \"$0.pid\"; exec sleep 600");
    let mut command = Command::new(std::env::current_exe().unwrap());
    command
        .args(["--exact", "compiler_process::parent"])
        .env(HELPER, script.path())
        .stdout(Stdio::null())
        .stderr(Stdio::null());
    let mut host = command.spawn().unwrap();
    let deadline = Instant::now() + DEADLINE;
    let pid = loop {
        if let Ok(pid) = fs::read_to_string(script.path().with_extension("pid")) {
            break pid.trim().parse().unwrap();
        }
        assert!(Instant::now() < deadline, "the compiler never began");
        tokio::time::sleep(Duration::from_millis(10)).await;
    };
    assert!(is_running(pid));
    host.kill().unwrap();
    host.wait().unwrap();
    while is_running(pid) {
        assert!(Instant::now() < deadline, "it outlives its host");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}
