//! Every console block of README.md and of the pages in docs/ is run, in order, by a shell in a
//! folder that holds nothing but a clone of the project. What could go wrong: a command does not
//! work as it is pasted, wants a step that the page does not tell, or prints something else than
//! what the page shows.
//!
//! What stands in for what a page names is said here and nowhere else: addresses of servers, and
//! commands that are not run, each with its reason. `ONCEBOX_WRITE_DOCS=1` writes what is printed
//! into the pages, to be looked at.

use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
    process::Command,
    time::Duration,
};

use oncebox_devkit::local::{
    free_port,
    postgres::{PostgresOptions, PrivatePostgres},
};
use oncebox_tests::{
    console::{self, Patience, Session, ShellOutput, Step},
    guests::{self, End},
    kafka::KafkaServer,
    program,
    temp_dir::TempDir,
};

/// The project's folder.
fn project() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap().to_owned()
}

/// A page with commands.
struct Page {
    path: &'static str,
    /// Commands that are not run, without their comments, each with what is done instead.
    not_run: &'static [(&'static str, &'static str)],
}

const PAGES: [Page; 6] = [README, CURES, VERIFY, VERSIONS, LANGUAGES, BENCHMARK];

const README: Page = Page {
    path: "README.md",
    not_run: &[
        ("cargo build -p oncebox-cli", "takes ten minutes; the tests' own build is in its place"),
        (
            "rustup target add wasm32-wasip2",
            "changes the machine; `build.sh` takes Debian's rustc-web as well, as in first_hour.rs",
        ),
        (
            "docker run -d --name oncebox-postgres -p 127.0.0.1:5544:5432 -e \
                POSTGRES_PASSWORD=secret postgres:17",
            "a private PostgreSQL is in its place",
        ),
        (
            "docker run -d --name oncebox-kafka -p 127.0.0.1:9092:9092 apache/kafka:4.1.0",
            "a private Kafka is in its place",
        ),
        ("./test.sh", "runs this test"),
        ("./check.sh", "compiles everything that the tests run; what decides on changes runs it"),
        ("./bench.sh", "takes twelve minutes; benchmark.rs runs its parts"),
    ],
};
const CURES: Page = Page { path: "docs/cures.md", not_run: &[] };
const VERIFY: Page = Page { path: "docs/verify.md", not_run: &[] };
const VERSIONS: Page = Page { path: "docs/versions.md", not_run: &[] };
const LANGUAGES: Page = Page { path: "docs/languages.md", not_run: &[] };
const BENCHMARK: Page = Page {
    path: "docs/benchmark.md",
    not_run: &[
        ("./bench.sh", MEASURES),
        ("./bench.sh --quick", MEASURES),
        ("./bench.sh --variants b,c,d", MEASURES),
        ("./bench.sh --parts latency", MEASURES),
        ("./bench.sh --parts hosts", MEASURES),
        ("./bench.sh --parts pages", MEASURES),
        ("./bench.sh --parts history,removal,soak", MEASURES),
        ("./bench.sh --json report.json", MEASURES),
        ("./bench.sh --docs", MEASURES),
    ],
};
const MEASURES: &str = "measures for minutes, on a machine that does nothing else; benchmark.rs \
    runs what it consists of";

/// A folder with a clone of the project, which goes away when all went well.
struct Checkout {
    root: PathBuf,
}

impl Checkout {
    /// The files of the project are links, but for the folder of what is built: it holds the
    /// programs of these tests.
    fn with_clone(page: &Page) -> Self {
        let programs = program::path().unwrap().parent().unwrap().to_owned();
        let name = Path::new(page.path).file_stem().unwrap().to_str().unwrap().to_lowercase();
        let root = programs
            .parent()
            .unwrap()
            .join("test-docs")
            .join(format!("{name}-{:08x}", rand::random::<u32>()));
        let clone = root.join("oncebox");
        fs::create_dir_all(clone.join("target")).unwrap();
        for entry in fs::read_dir(project()).unwrap() {
            let entry = entry.unwrap();
            let name = entry.file_name();
            if name != "target" && name != ".git" && name != ".oncebox" {
                std::os::unix::fs::symlink(entry.path(), clone.join(name)).unwrap();
            }
        }
        std::os::unix::fs::symlink(programs, clone.join("target/debug")).unwrap();
        Self { root }
    }

    fn clone(&self) -> PathBuf {
        self.root.join("oncebox")
    }
}

impl Drop for Checkout {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            let _ = fs::remove_dir_all(&self.root); // what is left is in `target`
        }
    }
}

/// What is on the machine of a page's reader.
struct Machine {
    /// Addresses that the page names, and those that are there.
    addresses: Vec<(&'static str, String)>,
    variables: Vec<(&'static str, String)>,
}

impl Machine {
    /// One on which nothing runs. Its hosts listen where those of no other test do.
    fn empty() -> Self {
        let (artifacts, flags) = guests::rust_artifacts();
        let (http, api) = (
            format!("127.0.0.1:{}", free_port().unwrap()),
            format!("127.0.0.1:{}", free_port().unwrap()),
        );
        let variables = vec![
            ("CARGO_BUILD_BUILD_DIR", artifacts.to_str().unwrap().to_owned()),
            ("CARGO_ENCODED_RUSTFLAGS", flags),
            ("ONCEBOX_HTTP_LISTEN", http.clone()),
            ("ONCEBOX_API_LISTEN", api.clone()),
        ];
        Self { addresses: vec![("127.0.0.1:9464", http), ("127.0.0.1:9465", api)], variables }
    }

    /// The same with the program on the path.
    fn with_program() -> Self {
        let path = format!(
            "{}:{}",
            program::path().unwrap().parent().unwrap().display(),
            std::env::var("PATH").unwrap()
        );
        let mut machine = Self::empty();
        machine.variables.push(("PATH", path));
        machine
    }

    fn theirs(&self, text: &str) -> String {
        self.addresses.iter().fold(text.to_owned(), |text, (shown, real)| text.replace(shown, real))
    }

    fn ours(&self, text: &str) -> String {
        self.addresses.iter().fold(text.to_owned(), |text, (shown, real)| text.replace(real, shown))
    }

    fn variables(&self) -> Vec<(String, String)> {
        self.variables.iter().map(|(name, value)| ((*name).to_owned(), value.clone())).collect()
    }
}

/// Runs a page; with `ONCEBOX_WRITE_DOCS` writes what is printed into it. The answer is what each
/// command printed.
fn check(page: &Page, machine: &Machine) -> Vec<(String, ShellOutput)> {
    let folder = Checkout::with_clone(page);
    let is_written = std::env::var_os("ONCEBOX_WRITE_DOCS").is_some();
    let mut patience = Patience::default();
    if is_written {
        patience.look = Duration::from_secs(10);
    }
    let mut session = Session::open(
        &folder.clone(),
        &folder.root.join("records"),
        &machine.variables(),
        patience,
    )
    .unwrap();
    let path = project().join(page.path);
    let text = fs::read_to_string(&path).unwrap();
    let mut not_run: BTreeSet<&str> = page.not_run.iter().map(|(command, _)| *command).collect();
    let mut printed: Vec<(Step, ShellOutput)> = Vec::new();
    let mut all = Vec::new();
    for step in console::steps(&text).unwrap() {
        let command = step.command.split(" #").next().unwrap().trim_end();
        if page.not_run.iter().any(|(not_run, _)| *not_run == command) {
            not_run.remove(command);
            continue;
        }
        println!("{}:{}: $ {}", page.path, step.line, step.command);
        let theirs = Step {
            line: step.line,
            command: machine.theirs(&step.command),
            output: step.output.iter().map(|line| machine.theirs(line)).collect(),
        };
        let said = match session.follow(&theirs) {
            Ok(said) => said,
            Err(error) if is_written => {
                println!("{error:#}");
                let mut said = session.last().unwrap().clone();
                said.lines.iter_mut().for_each(|line| *line = machine.ours(line));
                printed.push((step, said.clone()));
                said
            }
            Err(error) => panic!("{}: {error:#}\nin `{}`", page.path, folder.root.display()),
        };
        all.push((theirs.command, said));
    }
    session
        .close()
        .unwrap_or_else(|error| panic!("{}: {error:#}\nin `{}`", page.path, folder.root.display()));
    assert!(not_run.is_empty(), "{} has no longer {not_run:?}", page.path);
    if is_written {
        fs::write(path, rewritten(&text, &printed)).unwrap();
    }
    all
}

/// The page with what these steps printed.
fn rewritten(text: &str, printed: &[(Step, ShellOutput)]) -> String {
    let mut lines: Vec<String> = text.lines().map(str::to_owned).collect();
    for (step, said) in printed.iter().rev() {
        let begin = step.line - 1 + step.command.lines().count();
        lines.splice(begin..begin + step.output.len(), said.lines.iter().cloned());
    }
    lines.join("\n") + "\n"
}

#[test]
fn readme() {
    let kafka = KafkaServer::start_with_automatic_topics().unwrap();
    let folder = TempDir::new("docs");
    let postgres = PrivatePostgres::start(PostgresOptions::new(folder.path()).tcp(true)).unwrap();
    let url = postgres.url();
    let (login, rest) = url.strip_prefix("postgres://").unwrap().split_once('@').unwrap();
    let password = login.split_once(':').unwrap().1;
    let port = rest.split(['/', '?']).next().unwrap().rsplit(':').next().unwrap().to_owned();
    let mut machine = Machine::empty();
    machine.addresses.extend([
        (":secret@", format!(":{password}@")),
        ("PGPASSWORD=secret", format!("PGPASSWORD={password}")),
        ("127.0.0.1:5544", format!("127.0.0.1:{port}")),
        ("-p 5544", format!("-p {port}")),
        ("PGPORT=5544", format!("PGPORT={port}")),
        ("127.0.0.1:9092", kafka.bootstrap().to_owned()),
    ]);
    check(&README, &machine);
    postgres.remove().unwrap();
}

/// What could go wrong: a person finds a stuck message and no way out, or one that the page says
/// and that is none.
#[test]
fn stuck_messages_are_found_and_cured_as_the_page_shows() {
    let broken = project().join("docs/samples/cures/broken.wasm");
    let made = guests::component(&[guests::trap()], &End::Ok);
    if std::env::var_os("ONCEBOX_WRITE_DOCS").is_some() {
        fs::write(&broken, &made).unwrap();
    }
    assert!(
        fs::read(&broken).unwrap() == made,
        "`{}` is old; ONCEBOX_WRITE_DOCS=1 writes it anew",
        broken.display()
    );
    let printed = check(&CURES, &Machine::with_program());
    let look = "oncebox inbox list --tenant acme --status completed";
    let completed = printed
        .iter()
        .rfind(|(command, _)| command == look)
        .expect("the page ends with a look at what is completed");
    // S0-030, S0-050, S1-030, S1-034, S1-070.
    assert_eq!(
        completed.1.lines.iter().filter(|line| line.contains(" completed ")).count(),
        6,
        "{completed:?}"
    );
}

macro_rules! pages {
    ($($name:ident: $page:ident)+) => {$(
        #[test]
        fn $name() {
            check(&$page, &Machine::with_program());
        }
    )+};
}

pages! { verify: VERIFY versions: VERSIONS languages: LANGUAGES benchmark: BENCHMARK }

/// Pages with a block that is no session: forms of commands, each to be given alone.
const FORMS: [&str; 12] = [
    "docs/archive.md",
    "docs/consumers.md",
    "docs/endpoints.md",
    "docs/erase.md",
    "docs/inbox.md",
    "docs/ingress.md",
    "docs/jobs.md",
    "docs/outgoing.md",
    "docs/policy.md",
    "docs/readiness.md",
    "docs/replay.md",
    "docs/versions.md",
];

/// The blocks of a page whose fence says one of these words, as lines.
fn blocks(text: &str, kinds: &[&str]) -> Vec<String> {
    let (mut lines, mut is_inside, mut is_fenced) = (Vec::new(), false, false);
    for line in text.lines() {
        if let Some(kind) = line.strip_prefix("```") {
            is_inside = !is_fenced && kinds.contains(&kind);
            is_fenced = !is_fenced;
        } else if is_inside {
            lines.push(line.to_owned());
        }
    }
    lines
}

/// README.md and the pages in docs/, with their texts.
fn all_pages() -> Vec<(String, String)> {
    let docs = fs::read_dir(project().join("docs")).unwrap();
    let docs = docs.map(|entry| format!("docs/{}", entry.unwrap().file_name().to_str().unwrap()));
    let pages = docs.chain(["README.md".to_owned()]).filter(|path| path.ends_with(".md"));
    pages.map(|path| (path.clone(), fs::read_to_string(project().join(path)).unwrap())).collect()
}

/// What could go wrong: a page comes, or a block, that nothing runs.
#[test]
fn no_page_is_left_out() {
    let with = |kinds: &[&str]| -> BTreeSet<String> {
        all_pages()
            .into_iter()
            .filter(|(_, text)| !blocks(text, kinds).is_empty())
            .map(|(path, _)| path)
            .collect()
    };
    assert_eq!(with(&["console"]), PAGES.iter().map(|page| page.path.to_owned()).collect());
    assert_eq!(with(&["sh", "bash", "shell"]), FORMS.iter().map(|&path| path.to_owned()).collect());
}

/// What could go wrong: a page names a command or an option that is not there. What follows
/// `--help` is not done.
#[test]
fn forms_of_commands_are_understood() {
    for (path, text) in all_pages() {
        for line in blocks(&text, &["sh", "bash", "shell"])
            .iter()
            .filter(|line| line.starts_with("oncebox "))
        {
            let form = line.split(" #").next().unwrap().split(" > ").next().unwrap();
            let output = Command::new("bash")
                .args(["-c", &format!("\"$0\" {} --help", form.strip_prefix("oncebox ").unwrap())])
                .arg(program::path().unwrap())
                .output()
                .unwrap();
            assert!(
                output.status.success(),
                "{path}: {line}: {}",
                String::from_utf8_lossy(&output.stderr)
            );
            assert!(String::from_utf8_lossy(&output.stdout).contains("Usage: "), "{path}: {line}");
        }
    }
}
