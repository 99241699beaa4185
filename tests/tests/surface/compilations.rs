//! A host's pool of components on a real PostgreSQL. What could go wrong: a component is compiled
//! twice, or never; a host that died keeps it for ever; one that kills its hosts is tried for ever;
//! a failure of the host is told as the component's; a deployment waits behind uploads.

use std::{
    fs,
    path::PathBuf,
    time::{Duration, Instant},
};

use oncebox_control::{Begun, Compiled, NewVersion, Version};
use oncebox_runtime::{Compiler, RuntimeConfig, WasmRuntime, encode_component};
use oncebox_server::compile::Compilations;
use oncebox_tests::{host::program, inbox::InboxFixture, program::write_script, wait::DEADLINE};
use serde_json::Value;
use tokio_util::sync::CancellationToken;

const LEDGER: &[u8] = include_bytes!("../../../guest-examples/components/ledger.wasm");

/// A component of its own: the ledger with a section that nobody reads.
fn component(name: &str) -> Vec<u8> {
    [LEDGER, &[0, name.len() as u8 + 1, name.len() as u8], name.as_bytes()].concat()
}

/// A compiler that writes down what it begins, in a folder of its own.
struct Counted(PathBuf);

impl Counted {
    fn new(delay: &str) -> Self {
        let dir =
            std::env::temp_dir().join(format!("oncebox-counted-{:08x}", rand::random::<u32>()));
        fs::create_dir_all(&dir).unwrap();
        let counted = Self(dir);
        let (program, runs) = (program().unwrap(), counted.0.join("runs"));
        let (program, runs) = (program.display(), runs.display());
        // The component's last bytes are its name.
        let script = format!(
            "tail -c 1 /proc/self/fd/0 >> {runs}\necho >> {runs}\nsleep {delay}\nexec \
                {program} \"$@\" < /dev/stdin"
        );
        write_script(&counted.path(), &script).unwrap();
        counted
    }

    fn path(&self) -> PathBuf {
        self.0.join("compiler")
    }

    /// Last letters of the names of the components that were compiled, in that order.
    fn runs(&self) -> String {
        fs::read_to_string(self.0.join("runs")).unwrap_or_default().replace('\n', "")
    }

    fn host(&self, fixture: &InboxFixture) -> Compilations {
        host(fixture, self.path())
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn host(fixture: &InboxFixture, program: PathBuf) -> Compilations {
    let compiler = Compiler { program, memory_bytes_max: 4 << 30, duration_max: DEADLINE };
    let runtime = WasmRuntime::new(RuntimeConfig {
        instances_max: 1,
        compiler: Some(compiler),
        ..RuntimeConfig::default()
    })
    .unwrap();
    Compilations::new(fixture.control.clone(), runtime, 1)
}

async fn fixture() -> InboxFixture {
    let fixture = InboxFixture::new().await;
    fixture.tenant("acme", "").await;
    fixture
}

async fn upload(fixture: &InboxFixture, bytes: &[u8]) -> Vec<u8> {
    let version = NewVersion {
        component: bytes,
        source_digest: None,
        report: &Value::Null,
        is_compiled: false,
    };
    fixture.control.versions().add("acme", "ledger", version).await.unwrap().digest
}

async fn version(fixture: &InboxFixture, digest: &[u8]) -> Version {
    fixture.control.versions().get("acme", "ledger", &hex::encode(digest)).await.unwrap()
}

async fn wait(fixture: &InboxFixture, digest: &[u8], state: &str) -> Version {
    let deadline = Instant::now() + DEADLINE;
    loop {
        let version = version(fixture, digest).await;
        if version.state == state {
            return version;
        }
        assert!(
            Instant::now() < deadline,
            "it is {} and never {state}: {:?}",
            version.state,
            version.problems
        );
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

fn code(version: &Version) -> &str {
    version.problems[0]["code"].as_str().unwrap_or_default()
}

#[tokio::test]
async fn an_upload_is_compiled_once_whoever_asks() {
    let (fixture, counted) = (fixture().await, Counted::new("0.2"));
    let (one, other) = (counted.host(&fixture), counted.host(&fixture));
    let digest = upload(&fixture, &component("a")).await;
    for _ in 0..5 {
        one.submit(&digest).unwrap();
        other.submit(&digest).unwrap();
    }
    let version = wait(&fixture, &digest, "ready").await;
    assert!(version.compile_ms.unwrap() >= 200, "{version:?}");
    assert_eq!(counted.runs(), "a", "two hosts at once");
    one.submit(&digest).unwrap();
    one.loaded(&digest).await.unwrap();
    let both = tokio::join!(other.loaded(&digest), other.loaded(&digest));
    assert!(both.0.is_ok() && both.1.is_ok());
    // One of the two has it in memory; the other compiled for its own deployment, once for both who
    // asked.
    assert_eq!(counted.runs(), "aa");
    fixture.finish().await;
}

/// What could go wrong: a deployment finds nothing in memory, the job ends, and the deployment, which
/// finds no job either, compiles again.
#[tokio::test]
async fn deployments_that_ask_at_any_moment_of_a_compilation_share_it() {
    let (fixture, counted) = (fixture().await, Counted::new("0"));
    let host = counted.host(&fixture);
    for name in ["a", "b", "c", "d", "e", "f"] {
        let digest = upload(&fixture, &component(name)).await;
        host.submit(&digest).unwrap();
        let mut asked = tokio::task::JoinSet::new();
        let (done, mut all) = (CancellationToken::new(), 0);
        while !done.is_cancelled() {
            let (host, digest, done) = (host.clone(), digest.clone(), done.clone());
            asked.spawn(async move {
                host.loaded(&digest).await.unwrap();
                done.cancel();
            });
            all += 1;
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        assert!(all > 10, "they asked while it was compiled: {all}");
        while let Some(one) = asked.join_next().await {
            one.unwrap();
        }
    }
    assert_eq!(counted.runs(), "abcdef");
    fixture.finish().await;
}

#[tokio::test]
async fn a_deployment_does_not_wait_behind_uploads() {
    let (fixture, counted) = (fixture().await, Counted::new("0.3"));
    let host = counted.host(&fixture);
    let mut digests = Vec::new();
    for name in ["a", "b", "c", "d"] {
        digests.push(upload(&fixture, &component(name)).await);
        host.submit(digests.last().unwrap()).unwrap();
    }
    wait(&fixture, &digests[0], "compiling").await;
    host.loaded(&digests[3]).await.unwrap();
    for digest in &digests {
        wait(&fixture, digest, "ready").await;
    }
    assert_eq!(counted.runs(), "adbc");
    fixture.finish().await;
}

#[tokio::test]
async fn what_does_not_fit_fails_with_its_reason() {
    let fixture = fixture().await;
    let host = host(&fixture, program().unwrap());
    let core = r#"(module (memory (export "memory") 1) (func $start unreachable) (start $start)
        (func (export "cabi_realloc") (param i32 i32 i32 i32) (result i32) unreachable)
        (func (export "oncebox:handler/incoming-handler@0.1.0#handle") (param i32) (result i32) unreachable))"#;
    let traps = encode_component(&wat::parse_str(core).unwrap()).unwrap();
    let inspected = host.check(traps).await.unwrap().expect("nothing to see from outside");
    let traps = upload(&fixture, &inspected.component).await;
    host.submit(&traps).unwrap();
    assert_eq!(code(&wait(&fixture, &traps, "failed").await), "traps_at_start");
    let error = host.loaded(&traps).await.err().unwrap().to_string();
    assert!(error.contains("when it is started"), "{error}");
    let problems = host.check(b"#!/bin/sh".to_vec()).await.unwrap().unwrap_err();
    assert_eq!(problems[0].code, "not_wasm");
    fixture.finish().await;
}

#[tokio::test]
async fn a_failure_of_the_host_is_tried_again() {
    let fixture = fixture().await;
    let bytes = component("a");
    let digest = upload(&fixture, &bytes).await;
    let lame = host(&fixture, "/nowhere/oncebox".into());
    let error = lame.loaded(&digest).await.err().unwrap().to_string();
    assert!(error.contains("/nowhere/oncebox"), "{error}");
    let starts = "SELECT compile_starts::bigint FROM oncebox.component";
    assert_eq!(
        (version(&fixture, &digest).await.state.as_str(), fixture.number(starts).await),
        ("queued", 0)
    );
    // Another host finds it by itself.
    let (sound, stop) = (host(&fixture, program().unwrap()), CancellationToken::new());
    let running = tokio::spawn({
        let (sound, stop) = (sound.clone(), stop.clone());
        async move { sound.run(stop).await }
    });
    wait(&fixture, &digest, "ready").await;
    stop.cancel();
    running.await.unwrap();
    fixture.finish().await;
}

#[tokio::test]
async fn what_a_host_left_behind_is_taken_over() {
    let (fixture, counted) = (fixture().await, Counted::new("0"));
    let digest = upload(&fixture, &component("a")).await;
    let died = fixture.control.hosts().start("died").await.unwrap();
    let begun = fixture.control.versions().begin_compiling(&digest, Some(died)).await.unwrap();
    assert!(matches!(begun, Begun::Yours(_)), "{begun:?}");
    let alive = fixture.control.hosts().start("alive").await.unwrap();
    for host in [Some(alive), None] {
        let found = fixture.control.versions().begin_compiling(&digest, host).await.unwrap();
        assert!(matches!(found, Begun::Elsewhere), "it may be alive, for anyone: {found:?}");
    }
    fixture
        .execute(format!(
            "UPDATE oncebox.host SET seen_at = now() - interval '1 minute' WHERE host_id = {died}"
        ))
        .await;
    let (host, stop) = (counted.host(&fixture), CancellationToken::new());
    host.on_host(alive);
    let running = tokio::spawn({
        let (host, stop) = (host.clone(), stop.clone());
        async move { host.run(stop).await }
    });
    wait(&fixture, &digest, "ready").await;
    // The host that was taken for dead says something at last.
    let late = fixture
        .control
        .versions()
        .end_compiling(&digest, Some(died), &Compiled::GivenBack)
        .await
        .unwrap();
    assert!(!late && version(&fixture, &digest).await.state == "ready");
    stop.cancel();
    running.await.unwrap();
    fixture.finish().await;
}

/// What could go wrong: a process that is no host, such as a command or `oncebox dev`, is ended
/// while it compiles, and the component waits for it for ever.
#[tokio::test]
async fn what_a_process_left_behind_is_free_when_its_session_ends() {
    let (fixture, counted) = (fixture().await, Counted::new("0"));
    let digest = upload(&fixture, &component("a")).await;
    let Begun::Yours(mut claim) =
        fixture.control.versions().begin_compiling(&digest, None).await.unwrap()
    else {
        panic!("nobody has it")
    };
    // A session that breaks under a process that lives is replaced, under the same claim.
    let terminate = "SELECT pg_terminate_backend(session_pid) FROM oncebox.component";
    fixture.execute(terminate.to_owned()).await;
    fixture.control.versions().compiling_goes_on(&digest, None, &mut claim).await.unwrap();
    let found = fixture.control.versions().begin_compiling(&digest, None).await.unwrap();
    assert!(matches!(found, Begun::Elsewhere), "its process lives: {found:?}");
    assert!(fixture.control.versions().unfinished_components(9).await.unwrap().is_empty());

    drop(claim);
    let host = counted.host(&fixture);
    let deadline = Instant::now() + DEADLINE;
    // The server hears of the end of a session a moment later.
    while fixture.control.versions().unfinished_components(9).await.unwrap().is_empty() {
        assert!(Instant::now() < deadline, "the component belongs to nobody, and is not free");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    let silent_s = "SELECT extract(epoch FROM now() - state_at)::bigint FROM oncebox.component";
    assert!(fixture.number(silent_s).await < 30, "it was free only after its silence");
    host.submit(&digest).unwrap();
    wait(&fixture, &digest, "ready").await;
    assert_eq!(counted.runs(), "a");
    fixture.finish().await;
}

#[tokio::test]
async fn a_component_that_ends_three_hosts_is_not_tried_again() {
    let (fixture, counted) = (fixture().await, Counted::new("0"));
    let bytes = component("a");
    let digest = upload(&fixture, &bytes).await;
    for _ in 0..3 {
        let host = fixture.control.hosts().start("dies").await.unwrap();
        assert!(matches!(
            fixture.control.versions().begin_compiling(&digest, Some(host)).await.unwrap(),
            Begun::Yours(_)
        ));
        fixture.control.hosts().end(host).await.unwrap();
    }
    let host = counted.host(&fixture);
    host.submit(&digest).unwrap();
    assert_eq!(code(&wait(&fixture, &digest, "failed").await), "compiling_ended_the_process");
    assert_eq!(counted.runs(), "");
    // Whoever uploads it again wants another try.
    upload(&fixture, &bytes).await;
    host.submit(&digest).unwrap();
    wait(&fixture, &digest, "ready").await;
    fixture.finish().await;
}

#[tokio::test]
async fn a_host_that_ends_gives_its_work_back() {
    let (fixture, counted) = (fixture().await, Counted::new("25"));
    let digest = upload(&fixture, &component("a")).await;
    let (host, stop) = (counted.host(&fixture), CancellationToken::new());
    host.submit(&digest).unwrap();
    wait(&fixture, &digest, "compiling").await;
    let start = Instant::now();
    stop.cancel();
    host.run(stop).await;
    assert!(start.elapsed() < Duration::from_secs(9), "{:?}", start.elapsed());
    let starts = "SELECT compile_starts::bigint FROM oncebox.component";
    assert_eq!(
        (version(&fixture, &digest).await.state.as_str(), fixture.number(starts).await),
        ("queued", 0)
    );
    fixture.finish().await;
}
