//! The first hour of a handler's author, in every language: `oncebox new` into an empty folder,
//! then literally the commands that it prints. What could go wrong: a command does not work as it
//! is printed, the project does not build, or nobody sees that something happened.
//!
//! Toolchains are those that `guest-examples/languages/build.sh` installed.

use std::{
    fs::File,
    io::{BufRead, BufReader},
    os::unix::process::CommandExt,
    path::{Path, PathBuf},
    process::Stdio,
    time::Duration,
};

use oncebox_devkit::local::{free_port, process::Child};
use oncebox_tests::{
    console,
    guests::{self, End},
    http,
};
use serde_json::{Value, json};
use sqlx::{AssertSqlSafe, Connection, PgConnection};
use tokio::{
    process::Command,
    time::{Instant, sleep, timeout},
};

/// How long a build or a first start may take, on a machine that does other things as well.
const PATIENCE: Duration = Duration::from_secs(1_200);
const NAME: &str = "my-orders";

/// The program, as a person has it: beside the tests, built by `cargo build --workspace --bins`.
fn program() -> PathBuf {
    let own = std::env::current_exe().unwrap();
    let path = own.ancestors().nth(2).unwrap().join("oncebox");
    assert!(
        path.is_file(),
        "`{}` is missing; run `cargo build --workspace --bins`",
        path.display()
    );
    path
}

/// A new project: an empty folder, and a shell with the program on its path. The folder is removed
/// unless the test fails.
struct ProjectFixture {
    root: PathBuf,
    folder: PathBuf,
    variables: Vec<(&'static str, String)>,
}

impl ProjectFixture {
    fn open(name: &str) -> Self {
        let target = program().ancestors().nth(2).unwrap().to_owned();
        let root =
            target.join("test-first-hour").join(format!("{name}-{:08x}", rand::random::<u32>()));
        std::fs::create_dir_all(&root).unwrap();
        let path =
            format!("{}:{}", program().parent().unwrap().display(), std::env::var("PATH").unwrap());
        let variables = vec![
            ("PATH", path),
            (
                "ONCEBOX_TOOLCHAINS",
                target.join("languages/toolchains").to_str().unwrap().to_owned(),
            ),
            ("ONCEBOX_API_LISTEN", "127.0.0.1:0".to_owned()),
            ("ONCEBOX_HTTP_LISTEN", format!("127.0.0.1:{}", free_port().unwrap())),
            ("ONCEBOX_LOG_FORMAT", "text".to_owned()),
            // Python is 40 MB, and other tests want the processor as well.
            ("ONCEBOX_RUNTIME_COMPILE_TIMEOUT_MS", PATIENCE.as_millis().to_string()),
        ];
        Self { folder: root.clone(), root, variables }
    }

    /// The environment holds nothing of the project but what is set here.
    fn variables(&self) -> impl Iterator<Item = (String, String)> {
        let inherited = std::env::vars().filter(|(name, _)| !name.starts_with("ONCEBOX_"));
        inherited
            .chain(self.variables.iter().map(|(name, value)| ((*name).to_owned(), value.clone())))
            .collect::<Vec<_>>()
            .into_iter()
    }

    async fn run(&self, line: &str) -> std::process::Output {
        let mut bash = Command::new("bash");
        bash.args(["-c", line])
            .current_dir(&self.folder)
            .env_clear()
            .envs(self.variables())
            .stdin(Stdio::null())
            .kill_on_drop(true);
        timeout(PATIENCE, bash.output())
            .await
            .unwrap_or_else(|_| panic!("`{line}` does not end"))
            .unwrap()
    }

    /// Cargo finds its artifacts, among them the standard library, where the examples have theirs.
    fn share_target(&mut self, language: &str) {
        if language == "rust" {
            let (artifacts, flags) = guests::rust_artifacts();
            std::fs::create_dir_all(&artifacts).unwrap();
            std::os::unix::fs::symlink(artifacts, self.folder.join("target")).unwrap();
            self.variables.push(("CARGO_ENCODED_RUSTFLAGS", flags));
        }
    }

    /// What a command that succeeds prints.
    async fn ok(&self, line: &str) -> String {
        let output = self.run(line).await;
        let (stdout, stderr) =
            (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
        assert!(
            output.status.success(),
            "`{line}` in `{}`: {}\n{stdout}\n{stderr}",
            self.folder.display(),
            output.status
        );
        stdout.into_owned()
    }

    async fn json(&self, line: &str) -> Value {
        serde_json::from_str(&self.ok(&format!("{line} --json")).await).unwrap()
    }

    /// A command that fails with one line, which begins like this.
    async fn fails(&self, line: &str, error: &str) {
        let output = self.run(line).await;
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert!(
            !output.status.success() && stderr.starts_with(&format!("error: {error}")),
            "`{line}`: {stderr}"
        );
        assert_eq!(stderr.lines().count(), 1, "`{line}`: {stderr}");
    }

    /// `oncebox dev`, in the background, as in another terminal with a process group of its own.
    fn begin_dev(&self, line: &str) -> Child {
        let output = File::create(self.folder.join("dev.log")).unwrap();
        let mut bash = std::process::Command::new("bash");
        bash.args(["-c", &format!("exec {line}")])
            .current_dir(&self.folder)
            .env_clear()
            .envs(self.variables())
            .process_group(0);
        bash.stdin(Stdio::null()).stderr(output.try_clone().unwrap()).stdout(output);
        Child::spawn(bash, libc::SIGTERM).unwrap()
    }

    /// The same; it is up when its file is there.
    async fn dev(&self, line: &str) -> Child {
        let dev = self.begin_dev(line);
        let deadline = Instant::now() + PATIENCE;
        while !self.folder.join(".oncebox/dev/dev.json").exists() {
            assert!(dev.is_running() && Instant::now() < deadline, "`{line}`: {}", self.dev_log());
            sleep(Duration::from_millis(50)).await;
        }
        dev
    }

    fn dev_log(&self) -> String {
        std::fs::read_to_string(self.folder.join("dev.log")).unwrap()
    }

    /// Rows of the tenant's tables in the private database.
    async fn rows(&self, query: &str) -> Vec<Value> {
        let dev: Value =
            serde_json::from_reader(File::open(self.folder.join(".oncebox/dev/dev.json")).unwrap())
                .unwrap();
        let schema =
            self.json("oncebox tenant list").await[0]["schema_name"].as_str().unwrap().to_owned();
        let mut connection =
            PgConnection::connect(dev["database_url"].as_str().unwrap()).await.unwrap();
        sqlx::raw_sql(AssertSqlSafe(format!("SET search_path = {schema}")))
            .execute(&mut connection)
            .await
            .unwrap();
        sqlx::query_scalar(AssertSqlSafe(format!("SELECT to_jsonb(x) FROM ({query}) x")))
            .fetch_all(&mut connection)
            .await
            .unwrap()
    }

    /// Wait until so many deliveries of known messages were refused.
    async fn until_refused(&self, count: usize) {
        let address =
            &self.variables.iter().find(|(name, _)| *name == "ONCEBOX_HTTP_LISTEN").unwrap().1;
        let deadline = Instant::now() + PATIENCE;
        loop {
            let metrics = http::get(address, "/metrics", PATIENCE).await.unwrap().body;
            let line = metrics.lines().find(|line| {
                line.starts_with("oncebox_claims_total{") && line.contains("\"already_done\"")
            });
            let refused =
                line.and_then(|line| line.rsplit(' ').next()?.parse::<usize>().ok()).unwrap_or(0);
            assert!(
                refused <= count && Instant::now() < deadline,
                "{refused} of {count} refused: {}",
                self.dev_log()
            );
            if refused == count {
                return;
            }
            sleep(Duration::from_millis(100)).await;
        }
    }

    /// Wait until `oncebox dev` has told so many times that it made this live.
    async fn until_dev_redeploys(&self, what: &str, count: usize) {
        let deadline = Instant::now() + PATIENCE;
        let is_it = |line: &&str| {
            line.starts_with(&format!("redeploy  {what}, version "))
                && line.contains(", live after ")
        };
        while self.dev_log().lines().filter(is_it).count() < count {
            assert!(
                Instant::now() < deadline,
                "`{what}` is not {count} times in {}",
                self.dev_log()
            );
            sleep(Duration::from_millis(50)).await;
        }
    }

    /// Wait for a part of a line of `oncebox dev`.
    async fn until_dev_log_has(&self, part: &str) {
        let deadline = Instant::now() + PATIENCE;
        while !self.dev_log().contains(part) {
            assert!(Instant::now() < deadline, "`{part}` is not in {}", self.dev_log());
            sleep(Duration::from_millis(50)).await;
        }
    }

    /// Wait for lines of `oncebox dev`.
    async fn until_dev_says(&self, lines: &[String]) {
        let deadline = Instant::now() + PATIENCE;
        while !lines.iter().all(|line| self.dev_log().lines().any(|said| said == line)) {
            assert!(Instant::now() < deadline, "{lines:?} are not all in {}", self.dev_log());
            sleep(Duration::from_millis(100)).await;
        }
    }
}

impl Drop for ProjectFixture {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            let _ = std::fs::remove_dir_all(&self.root);
        }
    }
}

/// The commands among what `oncebox new` prints: what is indented.
fn commands(printed: &str) -> Vec<String> {
    printed.lines().filter_map(|line| line.strip_prefix("  ")).map(str::to_owned).collect()
}

/// The messages of the project.
fn messages(folder: &Path) -> Vec<Value> {
    let file = BufReader::new(File::open(folder.join("messages.jsonl")).unwrap());
    file.lines().map(|line| serde_json::from_str(&line.unwrap()).unwrap()).collect()
}

async fn check_first_hour(language: &str) {
    let mut project = ProjectFixture::open(language);
    let printed = project.ok(&format!("oncebox new {NAME} --lang {language}")).await;
    let (mut dev, mut done) = (None, Vec::new());
    for command in commands(&printed) {
        println!("{language}: {command}");
        if let Some(folder) = command.strip_prefix("cd ") {
            project.folder.push(folder);
            project.share_target(language);
        } else if command.starts_with("oncebox dev ") {
            dev = Some(project.dev(&command).await);
        } else {
            project.ok(&command).await;
        }
        done.push(command);
    }
    let steps = [
        "cd ",
        "./build.sh",
        "oncebox test ",
        "oncebox dev ",
        "oncebox send ",
        "oncebox inbox list",
    ];
    assert!(
        done.len() == steps.len()
            && done.iter().zip(steps).all(|(command, step)| command.starts_with(step)),
        "{printed}"
    );

    // The project's own page has the same commands.
    let page = std::fs::read_to_string(project.folder.join("README.md")).unwrap();
    let told: Vec<_> =
        console::steps(&page).unwrap().into_iter().map(|step| step.command).collect();
    assert_eq!(told, done[1..]);

    let messages = messages(&project.folder);
    let handled = messages.iter().map(|message| {
        format!("handled   {} (order.placed): completed", message["id"].as_str().unwrap())
    });
    project.until_dev_says(&handled.collect::<Vec<_>>()).await;
    check_effect(&project, &messages).await;

    // The same file again: known, and nothing happens.
    project.ok("oncebox send messages.jsonl").await;
    // S1-031, S1-078.
    project.until_refused(messages.len()).await;
    check_effect(&project, &messages).await;

    // A message that can never succeed says why, where its sender looks.
    let bad = json!({ "id": "bad", "event_type": "order.placed", "payload": { "order_id": "o-9", "account": 999, "amount": 1, "note": "" } });
    project.ok(&format!("echo '{bad}' | oncebox send -")).await;
    project
        .until_dev_says(&[
            "handled   bad (order.placed): failed_terminal, reject: no account 999".to_owned()
        ])
        .await;
    check_effect(&project, &messages).await;

    let status = dev.unwrap().end(&[(libc::SIGTERM, Duration::from_secs(60))]);
    assert!(status.is_some_and(|status| status.success()), "{status:?}: {}", project.dev_log());
    project
        .fails(
            "oncebox send messages.jsonl",
            "no brokers to send to; start `oncebox dev` in this folder, or give `--brokers`",
        )
        .await;
}

/// Every message completed, every order there once, every account moved by what it was sent.
async fn check_effect(project: &ProjectFixture, messages: &[Value]) {
    let rows = project.json("oncebox inbox list --status completed").await;
    assert_eq!(rows.as_array().unwrap().len(), messages.len(), "{rows}");
    let mut orders: Vec<Value> =
        messages.iter().map(|message| message["payload"].clone()).collect();
    orders.sort_by_key(|order| order["order_id"].as_str().unwrap().to_owned());
    assert_eq!(
        project.rows("SELECT id AS order_id, account, amount, note FROM orders ORDER BY id").await,
        orders
    );
    let (sum, count) =
        (orders.iter().map(|order| order["amount"].as_i64().unwrap()).sum::<i64>(), orders.len());
    assert_eq!(
        project
            .rows("SELECT sum(balance)::bigint AS sum, sum(n)::bigint AS count FROM account")
            .await,
        [json!({ "sum": sum, "count": count })]
    );
}

macro_rules! languages {
    ($($language:ident)+) => {$(
        #[tokio::test(flavor = "multi_thread")]
        async fn $language() {
            check_first_hour(stringify!($language)).await;
        }
    )+};
}

languages! { rust typescript javascript python go c }

/// What could go wrong: a build without its toolchain fails in silence, or with words that say
/// nothing of what to install.
#[tokio::test(flavor = "multi_thread")]
async fn a_toolchain_that_is_missing_is_named() {
    let mut project = ProjectFixture::open("missing");
    let programs = project.root.join("programs");
    std::fs::create_dir(&programs).unwrap();
    for program in ["bash", "cat", "cmp", "cp", "dirname", "mkdir", "mktemp", "realpath", "rm"] {
        let path = project.ok(&format!("type -P {program}")).await;
        std::os::unix::fs::symlink(path.trim_end(), programs.join(program)).unwrap();
    }
    for (language, program, remedy) in [
        ("rust", "cargo", "install Rust"),
        ("typescript", "node", "apt-get install nodejs npm"),
        ("javascript", "node", "apt-get install nodejs npm"),
        ("python", "python3", "apt-get install python3 python3-venv"),
        ("go", "go", "install Go 1.25 or newer"),
        ("c", "clang", "apt-get install clang-14 lld-14 wasi-libc"),
    ] {
        project.ok(&format!("oncebox new {NAME} --lang {language} --dir {language}")).await;
        let folder = std::mem::replace(&mut project.folder, project.root.join(language));
        let output = project.run(&format!("PATH='{}' ./build.sh", programs.display())).await;
        project.folder = folder;
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success(), "{language} builds without a toolchain");
        assert!(
            stderr.lines().count() == 1 && stderr.contains(program) && stderr.contains(remedy),
            "{language}: {stderr}"
        );
    }
}

/// What could go wrong: somebody's files are written over, or a mistake is answered with a riddle.
#[tokio::test(flavor = "multi_thread")]
async fn mistakes_are_named_and_nothing_is_written_over() {
    let project = ProjectFixture::open("mistakes");
    let precious = project.root.join(NAME).join("precious");
    std::fs::create_dir_all(precious.parent().unwrap()).unwrap();
    std::fs::write(&precious, "mine").unwrap();
    project
        .fails(
            &format!("oncebox new {NAME} --lang go"),
            "`my-orders` is not empty; choose another `--dir`",
        )
        .await;
    assert_eq!(std::fs::read_dir(precious.parent().unwrap()).unwrap().count(), 1);
    for (line, named) in [
        ("oncebox new 'My Orders' --lang go", "lower-case letter"),
        ("oncebox new ../x --lang go", "lower-case letter"),
        ("oncebox new x --lang cobol", "rust, typescript, javascript, python, go, c"),
        ("oncebox new x", "--lang"),
    ] {
        let output = project.run(line).await;
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert!(
            !output.status.success() && stderr.starts_with("error: ") && stderr.contains(named),
            "`{line}`: {stderr}"
        );
    }
    let made = project.json("oncebox new quoted --lang ts --dir \"it's here\"").await;
    assert_eq!(made["next"][0], json!(r"cd 'it'\''s here'"));
    project
        .ok(r"cd 'it'\''s here' && test -x build.sh && test -f wit/world.wit && test -f handler.ts")
        .await;

    project
        .fails("oncebox send nothing.jsonl", "failed to read the messages `nothing.jsonl`")
        .await;
    project
        .fails("echo '{}' | oncebox send -", "standard input cannot be used as messages: message 1")
        .await;
    let message = r#"{"id":"m","event_type":"e"}"#;
    project
        .fails(
            &format!("echo '{message}' | oncebox send -"),
            "no brokers to send to; start `oncebox dev`",
        )
        .await;
    let nobody = format!("127.0.0.1:{}", free_port().unwrap());
    project
        .fails(
            &format!("echo '{message}' | oncebox send - --brokers {nobody}"),
            &format!("no broker answers at `{nobody}`"),
        )
        .await;
}

/// A handler that writes a word.
fn says(word: &str) -> Vec<u8> {
    guests::component(&[guests::execute(format!("INSERT INTO said VALUES ('{word}')"))], &End::Ok)
}

/// What could go wrong: a file that is saved is not taken up, half of one is, or a broken one takes
/// the live version away.
#[tokio::test(flavor = "multi_thread")]
async fn a_component_that_is_built_again_is_live_a_moment_later() {
    let project = ProjectFixture::open("watch");
    let write = |name: &str, bytes: &[u8]| std::fs::write(project.root.join(name), bytes).unwrap();
    std::fs::create_dir(project.root.join("built")).unwrap();
    write("schema.sql", b"CREATE TABLE said (word text);");
    write("a.wasm", &says("one"));
    write("built/order.closed.wasm", &says("closed"));
    let dev =
        project.dev("oncebox dev order.placed=a.wasm --watch built --schema schema.sql").await;
    let mut sent = 0;
    let mut send = async |event_type: &str| {
        sent += 1;
        project
            .ok(&format!(
                r#"echo '{{"id":"m-{sent}","event_type":"{event_type}"}}' | oncebox send -"#
            ))
            .await;
        project.until_dev_says(&[format!("handled   m-{sent} ({event_type}): completed")]).await;
        let rows = project.rows("SELECT word FROM said").await;
        let words: Vec<_> =
            rows.iter().map(|row| row["word"].as_str().unwrap().to_owned()).collect();
        assert_eq!(words.len(), sent, "{words:?}");
        words.into_iter().next_back().unwrap()
    };
    assert_eq!(send("order.placed").await, "one");
    assert_eq!(send("order.closed").await, "closed");

    // Replaced at once, as a compiler does it.
    write("a.new", &says("two"));
    std::fs::rename(project.root.join("a.new"), project.root.join("a.wasm")).unwrap();
    project.until_dev_redeploys("a.wasm takes `order.placed`", 1).await;
    assert_eq!(send("order.placed").await, "two");

    // Broken: told, with every reason, and what is live stays.
    write("a.wasm", b"hello");
    project
        .until_dev_log_has("refused   `a.wasm` cannot be deployed: this is not a WebAssembly file")
        .await;
    assert_eq!(send("order.placed").await, "two");
    // Foreign.
    write(
        "a.wasm",
        &wat::parse_str("(component (import \"wasi:http/outgoing-handler@0.2.0\" (instance)))")
            .unwrap(),
    );
    project.until_dev_log_has("wasi:http/outgoing-handler@0.2.0").await;
    assert_eq!(send("order.placed").await, "two");

    // Written in place, with a pause in the middle.
    let three = says("three");
    write("a.wasm", &three[..three.len() / 2]);
    sleep(Duration::from_millis(900)).await;
    write("a.wasm", &three);
    project.until_dev_redeploys("a.wasm takes `order.placed`", 2).await;
    assert_eq!(send("order.placed").await, "three");
    assert_eq!(
        project.dev_log().matches("refused   ").count(),
        2,
        "half a file was taken for a broken one: {}",
        project.dev_log()
    );

    // In the folder: one that changes, and one that comes.
    write("built/order.closed.wasm", &says("shut"));
    write("built/order.opened.wasm", &says("opened"));
    project.until_dev_redeploys("built/order.closed.wasm takes `order.closed`", 1).await;
    project.until_dev_redeploys("built/order.opened.wasm takes `order.opened`", 1).await;
    assert_eq!(send("order.closed").await, "shut");
    assert_eq!(send("order.opened").await, "opened");
    let status = dev.end(&[(libc::SIGTERM, Duration::from_secs(60))]);
    assert!(status.is_some_and(|status| status.success()), "{status:?}: {}", project.dev_log());
}

/// Children of a process that compile a component, by their ids.
fn compilers_of(dev: &Child) -> Vec<libc::pid_t> {
    let threads =
        std::fs::read_dir(format!("/proc/{}/task", dev.pid())).into_iter().flatten().flatten();
    let children =
        threads.filter_map(|thread| std::fs::read_to_string(thread.path().join("children")).ok());
    let children: Vec<libc::pid_t> = children
        .flat_map(|pids| {
            pids.split_whitespace().map(|pid| pid.parse().unwrap()).collect::<Vec<_>>()
        })
        .collect();
    let compiles = |pid: &libc::pid_t| {
        std::fs::read(format!("/proc/{pid}/cmdline"))
            .is_ok_and(|words| words.split(|byte| *byte == 0).nth(1) == Some(b"compile-component"))
    };
    children.into_iter().filter(compiles).collect()
}

/// What could go wrong: whoever loses patience in the first compilation has a folder in which
/// nothing is ever compiled again; a command that comes a moment after `oncebox dev` is told that
/// there is none.
#[tokio::test(flavor = "multi_thread")]
async fn a_first_compilation_that_was_interrupted_begins_again() {
    let project = ProjectFixture::open("interrupted");
    // Functions that nobody calls, so many that the compiler is met at its work.
    let text = guests::text(&[guests::execute("INSERT INTO said VALUES ('one')")], &End::Ok);
    let work =
        "(local.set 0 (i32.xor (i32.mul (local.get 0) (i32.const 7)) (local.get 0)))".repeat(100);
    let functions = format!("(func (param i32) (result i32) {work} (local.get 0))").repeat(2_000);
    let text = format!("{}{functions})", text.trim_end().strip_suffix(')').unwrap());
    std::fs::write(project.root.join("a.wasm"), guests::encode(&text)).unwrap();
    std::fs::write(project.root.join("schema.sql"), "CREATE TABLE said (word text);").unwrap();
    let line = "oncebox dev order.placed=a.wasm --schema schema.sql";
    let message = r#"echo '{"id":"m","event_type":"order.placed"}' | oncebox send -"#;
    for signal in [libc::SIGKILL, libc::SIGINT] {
        let dev = project.begin_dev(line);
        let deadline = Instant::now() + PATIENCE;
        let compiler = loop {
            if let [compiler] = compilers_of(&dev)[..] {
                break compiler;
            }
            let is_up = project.folder.join(".oncebox/dev/dev.json").exists();
            assert!(
                dev.is_running() && !is_up && Instant::now() < deadline,
                "the compiler was not met: {}",
                project.dev_log()
            );
            sleep(Duration::from_millis(1)).await;
        };
        // It takes as long as the test wants.
        // SAFETY: plain system call; the parent lives and has not reaped it.
        assert_eq!(unsafe { libc::kill(compiler, libc::SIGSTOP) }, 0);
        project.until_dev_log_has("compiling a.wasm: ").await;
        // What was said of the first signal must not pass for what is said of the second.
        let _ = std::fs::remove_file(project.folder.join("send.log")); // the first time there is none
        let line = format!("{message} 2> send.log");
        let sending = project.run(&line);
        let ending = async {
            let said =
                || std::fs::read_to_string(project.folder.join("send.log")).unwrap_or_default();
            while !said().contains(
                "waiting for the `oncebox dev` of this folder, which is compiling `a.wasm`",
            ) {
                assert!(Instant::now() < deadline, "it does not wait: {}", said());
                sleep(Duration::from_millis(20)).await;
            }
            dev.signal(signal);
        };
        let (sent, ()) = tokio::join!(sending, ending);
        let said = std::fs::read_to_string(project.folder.join("send.log")).unwrap();
        assert!(
            !sent.status.success()
                && said
                    .contains("error: the `oncebox dev` of this folder ended before it was ready"),
            "{said}"
        );
        let status =
            tokio::task::spawn_blocking(move || dev.wait(PATIENCE)).await.unwrap().unwrap();
        assert_eq!(status.success(), signal == libc::SIGINT, "{status}: {}", project.dev_log());
    }
    let dev = project.begin_dev(line);
    project.ok(message).await;
    project.until_dev_says(&["handled   m (order.placed): completed".to_owned()]).await;
    let again = project.run(line).await;
    let said = String::from_utf8_lossy(&again.stderr);
    assert!(
        said.starts_with("error: an `oncebox dev` is running with `.oncebox/dev` already"),
        "{said}"
    );
    assert!(
        dev.end(&[(libc::SIGTERM, PATIENCE)]).is_some_and(|status| status.success()),
        "{}",
        project.dev_log()
    );
}

/// What could go wrong: a file that changed, or is not there, is passed over in silence; what is
/// printed does not work; Ctrl-C takes the database away before the work on it has ended; another
/// host cannot start beside this one.
#[tokio::test(flavor = "multi_thread")]
async fn dev_says_what_it_does_not_do_and_what_it_prints_works() {
    let mut project = ProjectFixture::open("honest");
    project.variables.retain(|(name, _)| !name.ends_with("_LISTEN"));
    let write = |name: &str, text: &str| std::fs::write(project.root.join(name), text).unwrap();
    write("schema.sql", "CREATE TABLE said (word text);");
    std::fs::write(project.root.join("a.wasm"), says("one")).unwrap();
    std::fs::write(project.root.join("b.wasm"), says("two")).unwrap();
    for (line, error) in [
        (
            "oncebox dev a.wasm --schema nowhere.sql",
            "failed to read the migration `nowhere.sql`: No such file",
        ),
        ("oncebox dev nothing.wasm", "failed to read the component `nothing.wasm`: No such file"),
        ("oncebox dev --watch nothing", "failed to look into the folder `nothing`: No such file"),
    ] {
        project.fails(line, error).await;
    }
    assert!(
        !project.root.join(".oncebox").exists(),
        "something was started before the files were looked at"
    );

    let hint = |log: &str| {
        log.lines().find(|line| line.contains("kcat -P")).unwrap_or_default().to_owned()
    };
    let dev = project.dev("oncebox dev order.placed=a.wasm --schema schema.sql").await;
    project.until_dev_log_has(" -t events ").await;
    let log = project.dev_log();
    assert!(
        !log.contains(":9464") && !log.contains(":9465"),
        "a host's own ports are taken: {log}"
    );
    assert!(
        hint(&log).contains(" -t events ") && hint(&log).ends_with(" -H event-type=order.placed"),
        "{log}"
    );
    write("schema.sql", "CREATE TABLE said (word text, at timestamptz);");
    let changed = "schema    schema.sql has changed, and the tables stay as they were made";
    project.until_dev_log_has(changed).await;
    write("schema.sql", "CREATE TABLE said (word text);");
    project.until_dev_log_has("schema    schema.sql is again what the tables were made of").await;

    // The differences of a shadow that was waited for are those of the next messages.
    let slot = "--tenant dev --consumer dev --event-type order.placed";
    project
        .ok(&format!("oncebox shadow start b.wasm --handler a {slot} --duration-ms 2000 --wait"))
        .await;
    let sent: Vec<_> = (1..=3)
        .map(|number| format!(r#"{{"id":"m-{number}","event_type":"order.placed"}}"#))
        .collect();
    write("three.jsonl", &sent.join("\n"));
    project.ok("oncebox send three.jsonl").await;
    let deadline = Instant::now() + PATIENCE;
    loop {
        let found = project.json(&format!("oncebox shadow show {slot}")).await;
        assert!(found["skipped"] == json!([]) && Instant::now() < deadline, "{found}");
        if found["differ"] == 3 {
            break;
        }
        sleep(Duration::from_millis(200)).await;
    }

    // Ctrl-C, as a terminal sends it: to the whole group. The database is there until the host has
    // drained. SAFETY: plain system call; the group is that of the process that was started for it.
    assert_eq!(unsafe { libc::kill(-dev.pid(), libc::SIGINT) }, 0);
    let status = tokio::task::spawn_blocking(move || dev.wait(PATIENCE)).await.unwrap();
    let log = project.dev_log();
    assert!(
        status.is_some_and(|status| status.success()) && log.contains("drained"),
        "{status:?}: {log}"
    );
    assert!(!log.contains("database is away") && !log.contains("not reachable"), "{log}");

    // Changed while nobody looked, and one that is new; another topic.
    write("schema.sql", "CREATE TABLE said (word text, at timestamptz);");
    write("more.sql", "CREATE TABLE heard (word text);");
    let dev = project
        .dev("oncebox dev order.placed=a.wasm --schema schema.sql --schema more.sql --topic others")
        .await;
    project.until_dev_log_has(" -t others ").await;
    let log = project.dev_log();
    assert!(log.contains(changed) && log.contains("applied   more.sql"), "{log}");
    assert!(
        log.contains("topic     others is read from now on, instead of events")
            && hint(&log).contains(" -t others "),
        "{log}"
    );
    project.ok(r#"echo '{"id":"m-4","event_type":"order.placed"}' | oncebox send -"#).await;
    project.until_dev_says(&["handled   m-4 (order.placed): completed".to_owned()]).await;
    let columns = "SELECT count(*)::int FROM information_schema.columns WHERE table_schema = \
        current_schema AND table_name IN ('said', 'heard')";
    assert_eq!(project.rows(columns).await, [json!({ "count": 2 })]);
    assert!(
        dev.end(&[(libc::SIGTERM, PATIENCE)]).is_some_and(|status| status.success()),
        "{}",
        project.dev_log()
    );
}
