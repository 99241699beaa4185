//! What could go wrong: a person is left alone with a stack trace, a secret on the screen, or a
//! command that failed half way. Every failure is one clear line on standard error that names what
//! is wrong, with a non-zero exit code, and nothing is changed; every success can be read by people
//! and by programs.

mod metrics;

use std::{
    collections::BTreeMap,
    net::TcpListener,
    path::{Path, PathBuf},
    process::{Output, Stdio},
    time::Duration,
};

use oncebox_control::MasterKey;
use oncebox_devkit::local::{free_port, process::Child};
use oncebox_tests::{
    guests::{self, End},
    kafka::KafkaServer,
    postgres::{TestDatabase, drop_database},
    temp_dir::TempDir,
    wait::DEADLINE,
};
use serde_json::{Value, json};
use sqlx::AssertSqlSafe;
use tokio::{
    io::AsyncWriteExt,
    process::Command,
    task::spawn_blocking,
    time::{Instant, sleep, timeout},
};

const POLICY: &str = "topics = ['orders']\nack = 'after_commit'\n";
/// A secret that must not be seen again.
const SECRET: &str = "hunter2";

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

/// The folder of everything that is built.
fn target_dir() -> PathBuf {
    program().ancestors().nth(2).unwrap().to_owned()
}

/// A folder with files, an empty database, and the program with its environment.
struct ProgramFixture {
    dir: PathBuf,
    database: TestDatabase,
    environment: BTreeMap<String, String>,
}

impl ProgramFixture {
    /// Nothing but an empty database, which the program is told.
    async fn empty() -> Self {
        let database = TestDatabase::create("empty", async |_: &str| Ok(())).await.unwrap();
        let dir = target_dir().join("test-cli").join(format!("{:08x}", rand::random::<u32>()));
        std::fs::create_dir_all(&dir).unwrap();
        let environment = [
            ("ONCEBOX_DATABASE_URL", database.url()),
            ("ONCEBOX_MASTER_KEY", &MasterKey::generate()),
            ("ONCEBOX_LOG_FORMAT", "text"),
        ];
        let environment = environment
            .into_iter()
            .map(|(name, value)| (name.to_owned(), value.to_owned()))
            .collect();
        Self { dir, database, environment }
    }

    /// A database that holds an inbox, tenant `acme` and consumer `orders`.
    async fn with_consumer() -> Self {
        let cli = Self::empty().await;
        cli.ok(&["migrate"]).await;
        cli.ok(&["tenant", "create", "acme"]).await;
        let policy = cli.file("orders.toml", POLICY);
        cli.ok(&["consumer", "create", "orders", "--tenant", "acme", "--policy", &policy]).await;
        cli
    }

    /// With another value of a variable; without it when there is none.
    fn with(&self, name: &str, value: Option<&str>) -> Command {
        let mut command = Command::new(program());
        for (name, _) in std::env::vars().filter(|(name, _)| name.starts_with("ONCEBOX_")) {
            command.env_remove(name);
        }
        command
            .envs(&self.environment)
            .env_remove(name)
            .current_dir(&self.dir)
            .stdin(Stdio::null())
            .kill_on_drop(true);
        if let Some(value) = value {
            command.env(name, value);
        }
        command
    }

    fn command(&self) -> Command {
        self.with("ONCEBOX_NOTHING", None)
    }

    /// A file in the folder; its path.
    fn file(&self, name: &str, content: impl AsRef<[u8]>) -> String {
        let path = self.dir.join(name);
        std::fs::write(&path, content).unwrap();
        path.to_str().unwrap().to_owned()
    }

    /// What a command that succeeds prints.
    async fn ok(&self, arguments: &[&str]) -> String {
        let output = run(self.command().args(arguments)).await;
        let stderr = text(&output.stderr);
        assert!(
            output.status.success() && stderr.is_empty(),
            "{arguments:?}: {} {stderr}",
            output.status
        );
        text(&output.stdout)
    }

    async fn json(&self, arguments: &[&str]) -> Value {
        serde_json::from_str(&self.ok(&[arguments, &["--json"]].concat()).await).unwrap()
    }

    /// A command that fails with this line, and leaves everything as it was.
    async fn fails(&self, arguments: &[&str], line: &str) {
        self.fails_as(self.command(), arguments, line).await;
    }

    async fn fails_as(&self, mut command: Command, arguments: &[&str], line: &str) {
        let before = self.state().await;
        let output = run(command.args(arguments)).await;
        let said = text(&output.stderr).replace(self.dir.to_str().unwrap(), "DIR");
        assert_eq!(said, format!("error: {line}\n"), "{arguments:?}");
        assert_eq!(
            (output.status.code(), text(&output.stdout).as_str()),
            (Some(1), ""),
            "{arguments:?}"
        );
        assert!(!said.contains(SECRET), "{said}");
        assert_eq!(self.state().await, before, "{arguments:?} changed something");
    }

    /// A command that is not understood: what is wrong comes first, and no secret.
    async fn misunderstood(&self, arguments: &[&str], first: &str) {
        let output = run(self.command().args(arguments)).await;
        let said = text(&output.stderr);
        assert_eq!(
            (said.lines().next(), output.status.code()),
            (Some(first), Some(2)),
            "{arguments:?}: {said}"
        );
    }

    /// Schemas, tables' contents and roles of the database, to compare.
    async fn state(&self) -> String {
        const STATE: &str = "SELECT coalesce(string_agg(nspname, ','), '') || (SELECT count(*) \
            FROM pg_roles WHERE rolname LIKE 'oncebox%' \
            AND oid IN (SELECT nspowner FROM pg_namespace)) FROM (SELECT nspname FROM pg_namespace \
            ORDER BY 1) n";
        let mut connection = self.database.connect().await.unwrap();
        let mut state: String = sqlx::query_scalar(STATE).fetch_one(&mut connection).await.unwrap();
        if state.contains("oncebox_host") {
            for table in ["tenant", "consumer", "handler", "version", "deployment", "inbox"] {
                let sql = format!(
                    "SELECT coalesce(string_agg(t::text, E'\\n' ORDER BY t::text), '') FROM \
                        oncebox.{table} t"
                );
                state.push_str(
                    &sqlx::query_scalar::<_, String>(AssertSqlSafe(sql))
                        .fetch_one(&mut connection)
                        .await
                        .unwrap(),
                );
            }
        }
        state
    }

    fn url_with(&self, find: &str, replacement: &str) -> String {
        let url = self.database.url();
        assert!(url.contains(find), "the tests' own URL has no `{find}`");
        url.replacen(find, replacement, 1)
    }
}

impl Drop for ProgramFixture {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            let _ = std::fs::remove_dir_all(&self.dir); // what is left is in `target`
        }
    }
}

async fn run(command: &mut Command) -> Output {
    timeout(DEADLINE, command.output()).await.expect("the command ends").unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

/// Policies are looked at before there is a server, with everything that is wrong in one answer.
#[tokio::test(flavor = "multi_thread")]
async fn policies_are_checked_and_explained_as_files() {
    let cli = ProgramFixture::empty().await;
    let good = cli.file("good.toml", format!("{POLICY}retry = {{ preset = 'seed-002' }}\n"));
    assert_eq!(cli.ok(&["policy", "check", &good]).await, format!("`{good}` can work\n"));
    assert_eq!(
        cli.json(&["policy", "check", &good]).await,
        json!([{ "file": good, "problems": [] }])
    );

    let bad = cli.file(
        "bad.toml",
        "topics = []\n[retry]\nworkers = 'hunter2'\nbackof = \
        1\n[kafka.properties]\n'group.id' = 'hunter2'\n",
    );
    let output = run(cli.command().args(["policy", "check", &good, &bad])).await;
    let lines: Vec<_> = text(&output.stdout).lines().map(str::to_owned).collect();
    assert_eq!(
        lines[..5],
        [
            format!("`{good}` can work"),
            format!("`{bad}` cannot work, for 4 reasons:"),
            "  line 1: `topics` must name at least one topic".to_owned(),
            "  line 3: `retry.workers`: invalid type: string, expected usize".to_owned(),
            lines[4].clone(),
        ]
    );
    assert!(
        lines[4].starts_with("  line 4: unknown key `retry.backof`, expected one of `preset`"),
        "{lines:?}"
    );
    assert_eq!(lines[5..], ["  missing field `ack`"]);
    assert_eq!(
        (text(&output.stderr).as_str(), output.status.code()),
        ("error: 1 of 2 policies cannot work\n", Some(1))
    );
    let output = run(cli.command().args(["policy", "check", &bad, "--json"])).await;
    let checked: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(
        (&checked[0]["problems"][1]["key"], &checked[0]["problems"][1]["line"]),
        (&json!("retry.workers"), &json!(3))
    );
    assert_eq!(output.status.code(), Some(1));
    let own =
        cli.file("own.toml", format!("{POLICY}kafka.properties = {{ 'group.id' = 'hunter2' }}"));
    let output = run(cli.command().args(["policy", "check", &own])).await;
    assert!(
        text(&output.stdout).contains("kafka property `group.id` cannot be set here"),
        "{}",
        text(&output.stdout)
    );
    assert!(!text(&output.stdout).contains(SECRET));

    for sample in ["order-projection", "notification-sender"] {
        let sample = format!("{}/../docs/samples/{sample}.toml", env!("CARGO_MANIFEST_DIR"));
        assert!(cli.ok(&["policy", "check", &sample]).await.contains("can work"));
    }

    let explained = cli.ok(&["policy", "explain", &good]).await;
    for part in [
        "is run again after 30 s and 2 min (`seed-002`)",
        "\n 1. What is the message id?\n    holds: ",
        "\n18. Was it killed at every step?\n    look: ",
    ] {
        assert!(explained.contains(part), "{explained}");
    }
    let explained = cli.json(&["policy", "explain", &good]).await;
    assert_eq!(
        (
            explained["sentences"].as_array().unwrap().len(),
            explained["readiness"].as_array().unwrap().len()
        ),
        (11, 18)
    );
    let output = run(cli.command().args(["policy", "explain", &bad])).await;
    assert!(
        text(&output.stderr)
            .starts_with(&format!("error: the policy `{bad}` is not valid, for 4 reasons\n")),
        "{}",
        text(&output.stderr)
    );

    let presets = cli.ok(&["policy", "presets"]).await;
    assert!(presets.contains("seed-002            3     exactly  30 s, 120 s\n"), "{presets}");
    assert_eq!(cli.json(&["policy", "presets"]).await[0]["preset"], "exponential-jitter");
}

/// S1-070 begins with a host that starts, or says why it does not.
#[tokio::test(flavor = "multi_thread")]
async fn a_configuration_that_cannot_work_is_named() {
    let cli = ProgramFixture::empty().await;
    let list: &[&str] = &["tenant", "list"];
    for (name, content, line) in [
        (
            "key.toml",
            "[database]\nurll = 'x'",
            "line 2: unknown field `urll`, expected one of `url`, `connections_max`, \
                `statement_timeout_ms`, `lock_timeout_ms`, `idle_in_transaction_timeout_ms`, \
                `migration_lock_timeout_ms`, `migration_attempts_max`, \
                `migration_statement_timeout_ms`, `leave_after_ms`",
        ),
        (
            "section.toml",
            "[databas]\n",
            "line 1: unknown field `databas`, expected one of `database`, `databases`, `kafka`, \
                `schema_registry`, `keys`, `runtime`, `http`, `api`, `ingress`, `oidc`, `log`, \
                `telemetry`, `retention`, `archive`, `references`, `http_destinations`, `storage`, `shutdown`",
        ),
        (
            "open.toml",
            "[database]\nurl = 'postgres://u:hunter2@h/x",
            "line 2: invalid literal string, expected `'`",
        ),
        (
            "type.toml",
            "[kafka]\nproperties = 'hunter2'",
            "line 2: invalid type: string, expected a map",
        ),
        (
            "secret.toml",
            "[keys]\nmaster_key = 'hunter2'",
            "line 2: unknown field `master_key`, expected `master_key_file` or \
                `previous_master_key_file`",
        ),
    ] {
        let path = cli.file(name, content);
        cli.fails(
            &[list, &["--config", &path]].concat(),
            &format!("failed to read the configuration `DIR/{name}`, {line}"),
        )
        .await;
    }
    cli.fails(
        &["tenant", "list", "--config", "nowhere.toml"],
        "failed to read the configuration `nowhere.toml`: No such file or directory (os error 2)",
    )
    .await;
    let dir = cli.dir.to_str().unwrap().to_owned();
    cli.fails(
        &["tenant", "list", "--config", &dir],
        "failed to read the configuration `DIR`: Is a directory (os error 21)",
    )
    .await;
    for (variable, value, line) in [
        (
            "ONCEBOX_HTTP_LISTEN",
            "here",
            "failed to read ONCEBOX_HTTP_LISTEN: invalid socket address syntax",
        ),
        (
            "ONCEBOX_RUNTIME_INSTANCES_MAX",
            SECRET,
            "failed to read ONCEBOX_RUNTIME_INSTANCES_MAX: invalid type: string, expected u32",
        ),
        (
            "ONCEBOX_MASTER_KEY",
            SECRET,
            "the master key must be 64 hexadecimal digits; make one with `openssl rand -hex 32`",
        ),
        (
            "ONCEBOX_MASTER_KEY",
            "00ff",
            "the master key must be 64 hexadecimal digits; make one with `openssl rand -hex 32`",
        ),
    ] {
        cli.fails_as(cli.with(variable, Some(value)), list, line).await;
    }
    cli.fails_as(
        cli.with("ONCEBOX_LOG_LEVEL", Some("loud")),
        &["migrate"],
        "`log.level` is `loud`; use error, warn, info, debug or trace",
    )
    .await;
    let no_key = "no master key is configured; set `keys.master_key_file` or ONCEBOX_MASTER_KEY \
        (make one with `openssl rand -hex 32`)";
    for arguments in [list, &["migrate"]] {
        cli.fails_as(cli.with("ONCEBOX_MASTER_KEY", None), arguments, no_key).await;
    }
    let file = cli.file("keys.toml", "[keys]\nmaster_key_file = 'nowhere.key'");
    let line =
        "failed to read the master key from `nowhere.key`: No such file or directory (os error 2)";
    cli.fails_as(
        cli.with("ONCEBOX_MASTER_KEY", None),
        &["tenant", "list", "--config", &file],
        line,
    )
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_database_that_cannot_be_used_is_named_without_its_password() {
    let cli = ProgramFixture::empty().await;
    cli.fails(&["tenant", "list"], "the database holds no inbox; run `oncebox migrate` first")
        .await;
    let no_database = "no database is configured; set `database.url` or ONCEBOX_DATABASE_URL, or \
        start `oncebox dev` in this folder";
    let bad_url = "`database.url` is not a PostgreSQL URL; it looks like \
        postgres://user:password@host:5432/database";
    let check = "check `database.url` (ONCEBOX_DATABASE_URL)";
    let refused =
        format!("the database is not reachable: Connection refused (os error 111); {check}");
    let login = format!(
        "the database is not reachable: password authentication failed for user \"postgres\"; \
            {check}"
    );
    let closed = format!("postgres://u:{SECRET}@127.0.0.1:{}/x", free_port().unwrap());
    let wrong = {
        let password = cli.database.url().split([':', '@']).nth(2).unwrap();
        cli.url_with(&format!(":{password}@"), &format!(":{SECRET}@"))
    };
    for (url, line) in [
        (None, no_database),
        (Some(""), no_database),
        (Some("hunter2"), bad_url),
        (Some("mysql://u:hunter2@h/x"), bad_url),
        (Some("postgres://u:hunter2@h:port/x"), bad_url),
        (Some(closed.as_str()), &refused),
        (Some(wrong.as_str()), &login),
    ] {
        let migrating = if line.starts_with("the database") {
            format!("failed to prepare the database: {line}")
        } else {
            line.to_owned()
        };
        // Commands that try again until they give up take 5 s each, every time.
        let mut took: Vec<Duration> = Vec::new();
        while took.last().is_none_or(|took| *took >= Duration::from_secs(8)) {
            assert!(took.len() < 5, "{took:?} until `{migrating}`");
            let started = Instant::now();
            cli.fails_as(cli.with("ONCEBOX_DATABASE_URL", url), &["tenant", "list"], line).await;
            cli.fails_as(cli.with("ONCEBOX_DATABASE_URL", url), &["migrate"], &migrating).await;
            took.push(started.elapsed());
        }
    }
}

/// What could go wrong: whoever follows the README is told that a database is out of reach that
/// nobody created.
#[tokio::test(flavor = "multi_thread")]
async fn migrate_creates_the_database_where_it_may() {
    let cli = ProgramFixture::empty().await;
    let name = format!("{}-new", cli.database.name());
    let url = cli.url_with(cli.database.name(), &name);
    let with = |url: &str| cli.with("ONCEBOX_DATABASE_URL", Some(url));
    let missing = format!("database `{name}` does not exist; `oncebox migrate` creates it");
    cli.fails_as(with(&url), &["tenant", "list"], &missing).await;
    let mut serve = with(&url);
    serve.envs([
        ("ONCEBOX_KAFKA_BROKERS", "127.0.0.1:1"),
        ("ONCEBOX_HTTP_LISTEN", "127.0.0.1:0"),
        ("ONCEBOX_API_LISTEN", "127.0.0.1:0"),
    ]);
    let served = run(serve.arg("serve")).await;
    assert!(
        !served.status.success() && text(&served.stderr).contains(&missing),
        "{}",
        text(&served.stderr)
    );
    // Nothing is created for a configuration that cannot go on with it.
    let no_key = "no master key is configured; set `keys.master_key_file` or ONCEBOX_MASTER_KEY \
        (make one with `openssl rand -hex 32`)";
    let mut keyless = with(&url);
    keyless.env_remove("ONCEBOX_MASTER_KEY");
    cli.fails_as(keyless, &["migrate"], no_key).await;
    cli.fails_as(with(&url), &["tenant", "list"], &missing).await;

    // A login that may not create databases is told which statement does.
    let mut connection = cli.database.connect().await.unwrap();
    let login = format!("login_{:08x}", rand::random::<u32>());
    let make = format!("CREATE ROLE {login} LOGIN PASSWORD '{SECRET}'");
    sqlx::raw_sql(AssertSqlSafe(make)).execute(&mut connection).await.unwrap();
    let (owner, rest) = url.split_once('@').unwrap();
    let theirs = format!("{}://{login}:{SECRET}@{rest}", owner.split_once("://").unwrap().0);
    let refused = run(with(&theirs).arg("migrate")).await;
    let said = text(&refused.stderr);
    let begins = format!(
        "error: failed to prepare the database: database `{name}` does not exist, and login \
            `{login}` cannot create it ("
    );
    let ends = format!("); let a superuser run: CREATE DATABASE \"{name}\" OWNER \"{login}\"\n");
    assert!(said.starts_with(&begins) && said.ends_with(&ends) && !said.contains(SECRET), "{said}");
    sqlx::raw_sql(AssertSqlSafe(format!("DROP ROLE {login}")))
        .execute(&mut connection)
        .await
        .unwrap();

    let created = run(with(&url).arg("migrate")).await;
    assert_eq!(
        text(&created.stdout),
        format!("database `{name}` created\nthe database is up to date\n"),
        "{}",
        text(&created.stderr)
    );
    let again = run(with(&url).arg("migrate")).await;
    assert_eq!(text(&again.stdout), "the database is up to date\n", "{}", text(&again.stderr));
    drop_database(&name).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_host_that_cannot_start_says_why() {
    let cli = ProgramFixture::empty().await;
    cli.fails(
        &["serve"],
        "no brokers are configured; set `kafka.brokers` or ONCEBOX_KAFKA_BROKERS",
    )
    .await;
    // From here on the database may be prepared.
    cli.ok(&["migrate"]).await;
    let broker = format!("127.0.0.1:{}", free_port().unwrap());
    // A broker that does not answer is waited for (outages.rs); what it would be asked with is
    // looked at before that.
    for property in ["'sasl.passwordd' = 'hunter2'", "'security.protocol' = 'hunter2'"] {
        let config = cli.file(
            "kafka.toml",
            format!(
                "[http]\nlisten = '127.0.0.1:0'\n[api]\nlisten = \
                '127.0.0.1:0'\n[kafka]\nbrokers = '{broker}'\n[kafka.properties]\n{property}"
            ),
        );
        let name = property.split('\'').nth(1).unwrap();
        let line = format!(
            "kafka property `{name}` is unknown or its value is not accepted; check \
                `kafka.properties`"
        );
        cli.fails(&["serve", "--config", &config], &line).await;
    }
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap();
    for (variable, other, setting) in [
        ("ONCEBOX_HTTP_LISTEN", "ONCEBOX_API_LISTEN", "http.listen"),
        ("ONCEBOX_API_LISTEN", "ONCEBOX_HTTP_LISTEN", "api.listen"),
    ] {
        let mut command = cli.with("ONCEBOX_KAFKA_BROKERS", Some(&broker));
        command.env(variable, address.to_string()).env(other, "127.0.0.1:0");
        let line = format!(
            "failed to listen on `{address}`; set `{setting}` ({variable}) to a free address: \
                Address already in use (os error 98)"
        );
        cli.fails_as(command, &["serve"], &line).await;
    }
}

/// What could go wrong: a host whose password the brokers refuse waits for ever, and says that no
/// broker is there; or it says the password.
#[tokio::test(flavor = "multi_thread")]
async fn a_password_that_the_brokers_refuse_ends_the_host() {
    let cli = ProgramFixture::empty().await;
    cli.ok(&["migrate"]).await;
    let kafka = spawn_blocking(|| KafkaServer::start_with_password("host", "right"))
        .await
        .unwrap()
        .unwrap();
    let broker = format!("127.0.0.1:{}", kafka.own_ports()[0]);
    let config = cli.file(
        "password.toml",
        format!(
            "[http]\nlisten = '127.0.0.1:0'\n[api]\nlisten = '127.0.0.1:0'\n[kafka]\nbrokers = \
                '{broker}'\n[kafka.properties]\n\
             'security.protocol' = 'sasl_plaintext'\n'sasl.mechanism' = 'PLAIN'\n'sasl.username' = \
             'host'\n'sasl.password' = 'hunter2'"
        ),
    );
    let output = run(cli.command().args(["serve", "--config", &config])).await;
    let said = text(&output.stderr);
    let last = said.lines().last().unwrap_or_default();
    assert!(
        last.starts_with(&format!("error: the brokers at `{broker}` refuse this host: ")),
        "{said}"
    );
    assert!(
        last.contains("uthentication failed") && last.contains("; check `kafka.properties`"),
        "{said}"
    );
    assert!(!said.contains("hunter2") && output.status.code() == Some(1), "{said}");
    spawn_blocking(move || drop(kafka)).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn tenants_are_created_whole_or_not_at_all() {
    let cli = ProgramFixture::empty().await;
    for _ in 0..2 {
        assert_eq!(cli.ok(&["migrate"]).await, "the database is up to date\n");
    }
    assert_eq!(cli.json(&["migrate"]).await, json!({ "done": "the database is up to date" }));
    assert_eq!(cli.ok(&["tenant", "list"]).await, "TENANT  STATE  DATABASE  SCHEMA  CREATED\n");

    for name in ["Acme", "1st", "a_b", "", "ä", &"a".repeat(64)] {
        let line = format!(
            "`{name}` cannot be the name of a tenant; use a lower-case letter, then up to 62 of \
                a-z, 0-9 and `-`"
        );
        cli.fails(&["tenant", "create", name], &line).await;
    }
    cli.fails(
        &["tenant", "create", "acme", "--schema", "nowhere.sql"],
        "failed to read the migration `nowhere.sql`: No such file or directory (os error 2)",
    )
    .await;
    let good = cli.file("good.sql", "CREATE TABLE stock (sku text);");
    let bad = cli.file("bad.sql", "CREATE TABLE other (n int); CREATE TABLE stock (sku text);");
    let line = "tenant `acme` was not created: migration `bad` was not applied: line 1: relation \
        \"stock\" already exists";
    cli.fails(&["tenant", "create", "acme", "--schema", &good, "--schema", &bad], line).await;

    let said = cli.ok(&["tenant", "create", "acme", "--schema", &good]).await;
    let tenants = cli.json(&["tenant", "list"]).await;
    let tenant = &tenants[0];
    let schema = tenant["schema_name"].as_str().unwrap();
    assert_eq!(said, format!("tenant `acme` created; its tables live in schema `{schema}`\n"));
    assert_eq!((tenants.as_array().unwrap().len(), &tenant["name"]), (1, &json!("acme")));
    assert!(!tenants.to_string().contains("secret"), "{tenants}");
    let listed = cli.ok(&["tenant", "list"]).await;
    let lines: Vec<Vec<&str>> =
        listed.lines().map(|line| line.split_whitespace().collect()).collect();
    let headings = ["TENANT", "STATE", "DATABASE", "SCHEMA", "CREATED"];
    assert_eq!(
        (lines.len(), &lines[0][..], &lines[1][..4]),
        (2, &headings[..], &["acme", "active", "-", schema][..])
    );
    cli.fails(&["tenant", "create", "acme"], "there is a tenant `acme` already").await;
    let mut connection = cli.database.connect().await.unwrap();
    let left: i64 = sqlx::query_scalar("SELECT count(*) FROM pg_namespace WHERE nspname ~ '^t_'")
        .fetch_one(&mut connection)
        .await
        .unwrap();
    assert_eq!(left, 1, "a schema of the tenant that was not created is left over");
    // Every change has its line in the audit, also the one that was taken back.
    let audit: Vec<String> =
        sqlx::query_scalar("SELECT action FROM oncebox.audit ORDER BY audit_id")
            .fetch_all(&mut connection)
            .await
            .unwrap();
    assert_eq!(
        audit,
        ["tenant.create", "tenant.migrate", "tenant.take_back", "tenant.create", "tenant.migrate"]
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_policy_that_cannot_work_is_refused_by_its_key() {
    let cli = ProgramFixture::with_consumer().await;
    let create = async |policy: &str, line: &str| {
        let path = cli.file("policy.toml", policy);
        cli.fails(
            &["consumer", "create", "other", "--tenant", "acme", "--policy", &path],
            &format!("the policy `DIR/policy.toml` is not valid: {line}"),
        )
        .await;
    };
    let base = |rest: &str| format!("{POLICY}{rest}");
    create(
        &base("kafkaa = 1"),
        "line 3: unknown key `kafkaa`, expected one of `topics`, `ack`, \
        `order`, `sequence`, `dedup`, `inbox`, `light`, `retention`, `factors`, `effects`, `payload`, `masking`, `collision`, \
        `no_route`, `wire_format`, `identity`, `ingress`, `reference`, `schemas`, `batch`, `retry`, \
        `dead_letters`, `replay`, `breaker`, `limits`, `outgoing`, `alerts`, \
        `kafka`",
    )
    .await;
    // S1-072, S1-073.
    create("topics = ['t']", "missing field `ack`").await;
    create("ack = 'after_commit'", "missing field `topics`").await;
    create("topics = []\nack = 'after_commit'", "line 1: `topics` must name at least one topic")
        .await;
    create(
        "topics = ['t']\nack = 'never'",
        "line 2: `ack`: unknown variant `never`, expected `after_commit` or `after_insert`",
    )
    .await;
    create(
        &base("limits = { deadline_ms = 0 }"),
        "line 3: `limits.deadline_ms` is 0; it must be at least 1",
    )
    .await;
    create(
        &base("limits = { deadline_ms = -1 }"),
        "line 3: `limits.deadline_ms`: invalid value: integer `-1`, expected u64",
    )
    .await;
    create(
        &base("batch = { messages_max = 1001 }"),
        "line 3: `batch.messages_max` is 1001; it must be at most 1000",
    )
    .await;
    create(
        "topics = ['t']\nack = 'after_insert'\ndedup = 'off'",
        "line 3: `dedup = \"off\"` needs `ack = \"after_commit\"`: what is acked after its insert \
            is in the inbox",
    )
    .await;
    create(
        &base("retry = { backoff_min_ms = 10, backoff_max_ms = 5 }"),
        "line 3: `retry.backoff_max_ms` is below `retry.backoff_min_ms`",
    )
    .await;
    create(
        &base("breaker = { failures_percent = 100 }"),
        "line 3: `breaker.failures_percent` is 100; it must be at most 99",
    )
    .await;
    create(
        &base("breaker = { runs_min = 0 }"),
        "line 3: `breaker.runs_min` is 0; it must be at least 1",
    )
    .await;
    create(
        &base("breaker = { pause_max_ms = 5 }"),
        "line 3: `breaker.pause_max_ms` is below `breaker.pause_ms`",
    )
    .await;
    for lease_ms in [5_000, 7_500] {
        let text = format!(
            "line 3: `retry.lease_ms` is {lease_ms}; it must be over `limits.deadline_ms`, 5000, \
                by more than 2500: time to end a \
             statement, log in and record the failure"
        );
        // S0-032.
        create(&base(&format!("retry = {{ lease_ms = {lease_ms} }}")), &text).await;
    }
    create(
        &base("retry = { preset = 'seed-003' }"),
        "line 3: `retry.preset`: unknown variant `seed-003`, expected `exponential-jitter` or \
            `seed-002`",
    )
    .await;
    let path = cli.file(
        "policy.toml",
        base("limits = { deadline_ms = 0 }\nretry = { backof = 1 }\nno_route = 5"),
    );
    let output = run(cli
        .command()
        .args(["consumer", "create", "other", "--tenant", "acme", "--policy", &path]))
    .await;
    let said = text(&output.stderr).replace(cli.dir.to_str().unwrap(), "DIR");
    let lines: Vec<_> = said.lines().map(|line| line.split(", expected").next().unwrap()).collect();
    assert_eq!(
        lines,
        [
            "error: the policy `DIR/policy.toml` is not valid, for 3 reasons",
            "  line 3: `limits.deadline_ms` is 0; it must be at least 1",
            "  line 4: unknown key `retry.backof`",
            "  line 5: `no_route`: invalid type: integer `5`",
        ]
    );
    create(
        &base("kafka.properties = { 'group.id' = 'hunter2' }"),
        "kafka property `group.id` cannot be set here: set `group` in the policy's `kafka` table \
            instead",
    )
    .await;
    create(
        &base("kafka.properties = { 'sasl.password' = hunter2 }"),
        "line 3: string values must be quoted, expected literal string",
    )
    .await;

    let policy = cli.file("orders.toml", POLICY);
    cli.fails(
        &["consumer", "create", "other", "--tenant", "acme", "--policy", "nowhere.toml"],
        "failed to read the policy `nowhere.toml`: No such file or directory (os error 2)",
    )
    .await;
    cli.fails(
        &["consumer", "create", "orders", "--tenant", "acme", "--policy", &policy],
        "there is a consumer `orders` already",
    )
    .await;
    cli.fails(
        &["consumer", "create", "orders", "--tenant", "nobody", "--policy", &policy],
        "there is no tenant `nobody`; `oncebox tenant list` shows those there are",
    )
    .await;
    cli.fails(
        &["consumer", "create", "Orders", "--tenant", "acme", "--policy", &policy],
        "`Orders` cannot be the name of a consumer; use a lower-case letter, then up to 62 of a-z, \
            0-9 and `-`",
    )
    .await;

    assert_eq!(
        cli.ok(&["consumer", "create", "second", "--tenant", "acme", "--policy", &policy]).await,
        "consumer `acme/second` created; it starts with its first deployment\ncollapses: every \
            delivery of one event, also when it was produced twice\n"
    );
    assert_eq!(
        cli.ok(&["consumer", "list"]).await,
        "\
TENANT  CONSUMER  STATE    TOPICS  ACK           GENERATION  COLLAPSES
acme    orders    running  orders  after_commit  0           every delivery of one event, also \
            when it was produced twice
acme    second    running  orders  after_commit  0           every delivery of one event, also \
            when it was produced twice
"
    );
    let consumers = cli.json(&["consumer", "list"]).await;
    assert_eq!(
        (&consumers[1]["name"], &consumers[1]["policy"]["ack"]),
        (&json!("second"), &json!("after_commit"))
    );
}

/// Components that are none, or not ours.
#[tokio::test(flavor = "multi_thread")]
async fn what_cannot_be_deployed_is_told_what_to_do() {
    let cli = ProgramFixture::with_consumer().await;
    let text = guests::text(&[], &End::Ok);
    let core = wat::parse_str(&text).unwrap();
    let foreign = "(component (import \"wasi:http/outgoing-handler@0.2.0\" (instance)) (import \
        \"acme:db/sql\" (instance)))";
    let files = [
        ("text.wasm", b"hello".to_vec()),
        ("core.wasm", core.clone()),
        ("empty.wasm", wat::parse_str("(component)").unwrap()),
        ("foreign.wasm", wat::parse_str(foreign).unwrap()),
        ("broken.wasm", [wat::parse_str("(component)").unwrap(), vec![1, 2, 3]].concat()),
        ("good.wasm", guests::encode(&text)),
        ("bad_name!.wasm", guests::encode(&text)),
    ];
    for (name, bytes) in &files {
        cli.file(name, bytes);
    }
    let target: &[&str] =
        &["--tenant", "acme", "--consumer", "orders", "--event-type", "order.placed"];
    for (file, said) in [
        (
            "text.wasm",
            &["this is not a WebAssembly file; upload the `.wasm` file that your compiler writes"]
                [..],
        ),
        (
            "empty.wasm",
            &["must export `oncebox:handler/incoming-handler@0.1.0`", "and it exports nothing"],
        ),
        // Everything that is wrong with it, at once.
        (
            "foreign.wasm",
            &[
                "`wasi:http/outgoing-handler@0.2.0`",
                "a handler has no network",
                "`acme:db/sql`",
                "must export",
            ],
        ),
        ("broken.wasm", &["damaged"]),
    ] {
        let output = run(cli.command().args([&["deploy", file], target].concat())).await;
        let error = String::from_utf8(output.stderr).unwrap();
        assert!(error.starts_with(&format!("error: `{file}` cannot be deployed")), "{error}");
        // S0-047, S1-119.
        assert!(said.iter().all(|part| error.contains(part)), "{error}");
    }
    cli.fails(
        &[&["deploy", "nowhere.wasm"], target].concat(),
        "failed to read the component `nowhere.wasm`: No such file or directory (os error 2)",
    )
    .await;
    cli.fails(
        &[&["deploy", "bad_name!.wasm"], target].concat(),
        "`bad_name!.wasm` was not uploaded: `bad-name!` cannot be the name of a handler; use a \
            lower-case letter, then up to 62 of a-z, 0-9 and `-`",
    )
    .await;
    cli.fails(
        &["deploy", "good.wasm", "--tenant", "nobody", "--consumer", "orders", "--event-type", "x"],
        "there is no consumer `nobody/orders`; `oncebox consumer list` shows those there are",
    )
    .await;
    cli.fails(
        &["deploy", "good.wasm", "--tenant", "acme", "--consumer", "nobody", "--event-type", "x"],
        "there is no consumer `acme/nobody`; `oncebox consumer list` shows those there are",
    )
    .await;
    cli.fails(
        &["deploy", "good.wasm", "--tenant", "acme", "--consumer", "orders", "--event-type", ""],
        "the event type is empty; use `*` for those that no other deployment takes",
    )
    .await;
    let size = files[5].1.len();
    cli.fails_as(
        cli.with("ONCEBOX_RUNTIME_COMPONENT_BYTES_MAX", Some("10")),
        &[&["deploy", "good.wasm"], target].concat(),
        "`good.wasm` was not uploaded: the body has more than 10 bytes, which is what this path \
            takes",
    )
    .await;
    cli.misunderstood(
        &[&["deploy", "good.wasm"], target, &["--set", "novalue"]].concat(),
        "error: invalid value 'novalue' for '--set <KEY=VALUE>': a setting is `key=value`",
    )
    .await;

    // By hand.
    cli.fails(
        &["component", "encode", "nowhere.wasm", "-o", "out.wasm"],
        "failed to read `nowhere.wasm`: No such file or directory (os error 2)",
    )
    .await;
    cli.fails(
        &["component", "encode", "text.wasm", "-o", "out.wasm"],
        "failed to encode `text.wasm`: this is not a WebAssembly file",
    )
    .await;
    cli.fails(
        &["component", "encode", "good.wasm", "-o", "out.wasm"],
        "failed to encode `good.wasm`: this is a component already",
    )
    .await;
    cli.fails(
        &["component", "encode", "core.wasm", "-o", "nowhere/out.wasm"],
        "failed to write `nowhere/out.wasm`: No such file or directory (os error 2)",
    )
    .await;
    assert!(!cli.dir.join("out.wasm").exists(), "a component that failed was written");
    assert_eq!(
        cli.ok(&["component", "encode", "core.wasm", "-o", "out.wasm"]).await,
        format!("wrote `out.wasm`, {size} bytes\n")
    );
    let said = cli.ok(&[&["deploy", "out.wasm", "--handler", "shipping"], target].concat()).await;
    let deployed = cli
        .json(
            &[&["deploy", "out.wasm", "--handler", "shipping"], target, &["--set", "colour=a=b"]]
                .concat(),
        )
        .await;
    let digest = deployed["digest"].as_str().unwrap();
    assert!(
        said.starts_with(&format!(
            "handler `shipping`, version {}, takes `order.placed` of `acme/orders`\nimports: \
                oncebox:handler/",
            &digest[..12]
        )),
        "{said}"
    );
    assert_eq!(deployed["settings"], json!({ "colour": "a=b" }));
    // A core module is made a component on the way, and is the same version.
    let made = cli
        .json(&["version", "upload", "core.wasm", "--tenant", "acme", "--handler", "shipping"])
        .await;
    assert_eq!(made["digest"], deployed["digest"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn commands_that_are_not_understood_are_explained() {
    let cli = ProgramFixture::empty().await;
    cli.misunderstood(&["tenants"], "error: unrecognized subcommand 'tenants'").await;
    cli.misunderstood(&["deploy"], "error: the following required arguments were not provided:")
        .await;
    cli.misunderstood(
        &["inbox", "list", "--status", "lost"],
        "error: invalid value 'lost' for '--status <STATUS>'",
    )
    .await;
    cli.misunderstood(
        &["inbox", "list", "--limit", "many"],
        "error: invalid value 'many' for '--limit <LIMIT>': invalid digit found in string",
    )
    .await;
    let help = cli.ok(&["--help"]).await;
    assert_eq!(
        help.split_once("\n\nOptions").unwrap().0,
        "\
Message handlers as WebAssembly components, each effect exactly once

Usage: oncebox [OPTIONS] <COMMAND>

Commands:
  serve        Run a host: consume, run handlers, commit, ack
  migrate      Create the database where it does not exist, and bring it up to date
  rights       Print what an administrator of a PostgreSQL server gives the hosts' login, as SQL
  keys         The master key
  choose       Say which pattern makes an effect safe to repeat, by questions about it
  new          Write a new handler's project: sources, build script, tables, messages
  dev          Run a host with a PostgreSQL and a broker of its own
  send         Publish the messages of a file
  demo         Run the main job on real input, kill it again and again, and count the effects
  test         Run a handler on messages and show what it does; nothing is kept
  verify       Kill a handler at every step, deliver its messages in every way, compare the effects
  component    Components as files
  policy       Policies as files
  openapi      Print the OpenAPI document of the HTTP API
  completions  Print a script that completes commands in a shell
  manual       Write the manual pages of all commands into a folder
  tenant       Tenants
  consumer     Consumers
  version      Versions of handlers
  deploy       Make a component the live handler of an event type
  canary       Try a version on a share of the ordering keys
  shadow       Try a version on live messages, without an effect
  rollback     Go back to the version before, or to a named one
  deployments  List what is deployed, and how far the hosts are with it
  apply        Make tenants, consumers and deployments what a file says
  inbox        Look into the inbox
  outgoing     Messages that handlers send after their commit
  endpoint     Places outside to which handlers send
  job          What redrives, retries and discards of many messages did, and how far they are
  replay       Run completed messages again, on purpose
  why          Show the history of a message: what became of it, what it waits for, what to do
  erase        Erase the payloads of a data subject, and prove it
  databases    List the databases in which hosts place tenants
  hosts        List the hosts that run
  doctor       Look whether the database keeps tenants apart, and say what to do where it does not
  retention    What is removed when, and removing it now
  archive      Messages that were archived before their removal
  storage      Show how large the inboxes are, and how large they will be
  token        Who may use the API
  audit        List who changed what
  help         Print this message or the help of the given subcommand(s)"
    );
    // The programs that a host starts of itself are no commands, and a usage shows what a command
    // takes, whatever the environment sets.
    for misspelt in ["verif", "compil", "verify-worke"] {
        let output = run(cli.command().arg(misspelt)).await;
        let said = text(&output.stderr);
        assert!(!said.contains("verify-worker") && !said.contains("compile-component"), "{said}");
    }
    for variable in ["ONCEBOX_CONFIG", "ONCEBOX_SERVER", "ONCEBOX_TOKEN_FILE", "ONCEBOX_CA_FILE"] {
        let output = run(cli.command().env(variable, "x").args(["inbox", "show"])).await;
        let said = text(&output.stderr);
        let usage = said.lines().find(|line| line.starts_with("Usage")).unwrap();
        assert_eq!(
            usage,
            "Usage: oncebox inbox show [OPTIONS] --tenant <TENANT> --consumer <CONSUMER> \
                <MESSAGE_ID>",
            "{said}"
        );
    }
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        let script = cli.ok(&["completions", shell]).await;
        assert!(
            ["redrive", "rotate-credentials", "promote"].iter().all(|verb| script.contains(verb)),
            "{shell}: {script}"
        );
        assert!(
            !script.contains("verify-worker") && !script.contains("compile-component"),
            "{shell}"
        );
    }
    let manual = TempDir::new("manual");
    let folder = manual.path().join("man1").to_str().unwrap().to_owned();
    let said = cli.ok(&["manual", &folder]).await;
    assert_eq!(said, format!("the manual pages are in `{folder}`\n"));
    for (page, part) in [
        ("oncebox", "oncebox\\-inbox(1)"),
        ("oncebox-inbox-redrive", "redrive"),
        ("oncebox-tenant-rotate-credentials", "rotate\\-credentials"),
    ] {
        let text = std::fs::read_to_string(format!("{folder}/{page}.1")).unwrap();
        assert!(text.starts_with(".ie") && text.contains(part), "{page}: {text}");
    }
    let pages = std::fs::read_dir(&folder).unwrap();
    let names = pages.map(|page| page.unwrap().file_name().into_string().unwrap());
    let names: Vec<_> = names.collect();
    assert!(names.len() > 100, "{names:?}");
    let own = ["-verify-worker", "-compile-component", "-help"];
    assert!(!names.iter().any(|name| own.iter().any(|own| name.contains(own))), "{names:?}");
    // A shell reads it, and completes a verb by it.
    let script = "source <(\"$1\" completions bash); COMP_WORDS=(oncebox canary gr); COMP_CWORD=2; \
        _oncebox oncebox gr canary; echo \"${COMPREPLY[*]}\"";
    let mut bash = Command::new("bash");
    let completed = run(bash.args(["-c", script, "bash"]).arg(program())).await;
    assert_eq!(text(&completed.stdout), "grow\n", "{}", text(&completed.stderr));
    assert_eq!(cli.ok(&["--version"]).await, format!("oncebox {}\n", env!("CARGO_PKG_VERSION")));
    for (arguments, part) in [
        (&["tenant", "create", "--help"][..], "SQL file with the tenant's tables"),
        (
            &["tenant", "schema", "apply", "--help"],
            "A folder, whose files `*.sql` are applied by name",
        ),
        (&["tenant", "limits", "--help"], "Its share of a busy host against the other tenants'"),
        (
            &["tenant", "delete", "--help"],
            "Its name once more; without it, you are asked at the terminal",
        ),
        (&["keys", "rotate", "--help"], "keys.previous_master_key_file"),
        (&["consumer", "create", "--help"], "TOML file with the policy"),
        (&["consumer", "pause", "--help"], "Wait until every running host has done it"),
        (&["consumer", "seek", "--help"], "says first what that means"),
        (&["consumer", "policy", "set", "--help"], "Accept what follows for messages"),
        (&["policy", "check", "--help"], "everything that is wrong is said, with its line"),
        (&["policy", "explain", "--help"], "Say in sentences what a policy does"),
        (&["consumer", "policy", "explain", "--help"], "Say in sentences what it does"),
        (&["consumer", "delete", "--help"], "its inbox is deleted for good"),
        (&["deploy", "--help"], "The event type it takes; `*` takes those"),
        (&["inbox", "list", "--help"], "[possible values: received, in_progress,"),
        (
            &["inbox", "stats", "--help"],
            "Count what is open, and say what is too much by the policy",
        ),
        (&["inbox", "show", "--help"], "Also print headers and payload"),
        (&["inbox", "unmask", "--help"], "Show one message with what its policy masks"),
        (
            &["inbox", "redrive", "--help"],
            "Run dead letters again, under their ids and with their headers",
        ),
        (&["inbox", "discard", "--help"], "Why: kept with each message and in the audit log"),
        (&["inbox", "retry", "--help"], "Only count the messages, and change nothing"),
        (&["erase", "--help"], "Write the proof to this file, which must not be there yet"),
        (&["component", "encode", "--help"], "Where to write the component"),
        (&["serve", "--help"], "[env: ONCEBOX_CONFIG=]"),
        (&["dev", "--help"], "Usage: oncebox dev"),
        (&["demo", "--help"], "Usage: oncebox demo"),
        (&["version", "upload", "--help"], "Do not wait until it is compiled"),
        (&["canary", "start", "--help"], "Its share of the ordering keys"),
        (&["shadow", "start", "--help"], "The share of messages that it runs on"),
        (&["rollback", "--help"], "Run again what the withdrawn version failed"),
        (&["apply", "--help"], "Only show what would be done"),
        (&["storage", "--help"], "Only this tenant"),
        (&["token", "create", "--help"], "Only for this tenant"),
        (&["tenant", "list", "--help"], "--server <URL>"),
    ] {
        let help = cli.ok(arguments).await;
        assert!(help.contains(part), "{arguments:?}: {help}");
    }
}

/// What could go wrong: of several consumers' messages with one time, some are on no page, or on
/// two.
#[tokio::test(flavor = "multi_thread")]
async fn messages_of_several_consumers_are_paged() {
    let cli = ProgramFixture::with_consumer().await;
    let policy = cli.file("orders.toml", POLICY);
    cli.ok(&["consumer", "create", "another", "--tenant", "acme", "--policy", &policy]).await;
    let explained = cli.ok(&["consumer", "policy", "explain", "another", "--tenant", "acme"]).await;
    assert_eq!(
        explained,
        cli.ok(&["policy", "explain", &policy]).await,
        "a row is read as its file is"
    );
    let mut connection = cli.database.connect().await.unwrap();
    // Four times, of five messages each, of two consumers, under the same ids.
    const ROWS: &str = "INSERT INTO oncebox.inbox (consumer_id, message_id, retention_class, \
        bucket, topic, partition, \"offset\", \
        record_timestamp_ms, event_type, status, reason, attempts, received_at, processed_at) \
        SELECT consumer_id, 'm' || n, 1, oncebox.bucket_at(1::smallint, now()), 'orders', 0, n, 0, \
        'placed', \
        CASE n % 2 WHEN 0 THEN 'completed' ELSE 'parked' END, CASE n % 2 WHEN 1 THEN 'no_route' \
        END, 1, \
        now() - (n / 5) * interval '1 hour', now() FROM oncebox.consumer, generate_series(0, 19) \
        n";
    sqlx::query(ROWS).execute(&mut connection).await.unwrap();
    let key = |row: &Value| {
        format!("{}/{}", row["consumer"].as_str().unwrap(), row["message_id"].as_str().unwrap())
    };
    let all: Vec<String> =
        cli.json(&["inbox", "list"]).await.as_array().unwrap().iter().map(key).collect();
    assert_eq!((all.len(), &all[0][..], &all[5][..]), (40, "another/m0", "orders/m0"));
    for limit in ["3", "7", "40"] {
        let (mut paged, mut after): (Vec<String>, Option<String>) = (Vec::new(), None);
        loop {
            let mut arguments = vec!["inbox", "list", "--limit", limit];
            arguments.extend(after.iter().flat_map(|after| ["--after", after]));
            let rows = cli.json(&arguments).await;
            let said = cli.ok(&arguments).await;
            paged.extend(rows.as_array().unwrap().iter().map(key));
            let Some(place) = said
                .lines()
                .last()
                .and_then(|line| line.strip_prefix("there may be more: --after '"))
            else {
                break;
            };
            after = Some(place.trim_end_matches('\'').to_owned());
        }
        assert_eq!(paged, all, "pages of {limit}");
    }
    let count = async |more: &[&str]| {
        cli.json(&[&["inbox", "list"], more].concat()).await.as_array().unwrap().len()
    };
    assert_eq!(count(&["--reason", "no_route", "--event-type", "placed"]).await, 20);
    assert_eq!((count(&["--since", "90m"]).await, count(&["--until", "90m"]).await), (20, 20));
    assert_eq!(
        (
            count(&["--key", "k"]).await,
            count(&["--error", "x"]).await,
            count(&["--version", "ab"]).await
        ),
        (0, 0, 0)
    );
    let redrive = [
        "inbox",
        "redrive",
        "--tenant",
        "acme",
        "--consumer",
        "orders",
        "--because",
        "a handler is there",
    ];
    let redriven = async |more: &[&str]| cli.ok(&[&redrive[..], more].concat()).await;
    cli.fails(
        &redrive,
        "say which messages: by their ids, by an option such as `--reason`, or with `--all`",
    )
    .await;
    assert_eq!(
        redriven(&["--all", "--dry-run"]).await,
        "would redrive 0 messages\n",
        "their records are not kept"
    );
    sqlx::query("UPDATE oncebox.inbox SET headers = ''").execute(&mut connection).await.unwrap();
    assert_eq!(
        redriven(&["--reason", "no_route", "--dry-run"]).await,
        "would redrive 10 messages\n"
    );
    assert_eq!(redriven(&["m1", "m3", "m4"]).await, "redriven 2 messages\n");
    assert_eq!(redriven(&["m1", "m3", "m4"]).await, "there is nothing to redrive\n");
    let answer = cli.json(&[&redrive[..], &["--since", "90m"]].concat()).await;
    assert_eq!((&answer["changed"], &answer["left_out"]), (&json!(3), &json!({})));
    assert_eq!(count(&["--consumer", "orders", "--status", "received"]).await, 5);
    cli.misunderstood(
        &["inbox", "list", "--since", "yesterday"],
        "error: invalid value 'yesterday' for '--since <SINCE>': use a time as \
            `2026-01-31T12:00:00Z`, or how long ago, as `90s`, `15m`, `2h`, `3d`",
    )
    .await;
    cli.misunderstood(
        &["inbox", "list", "--after", "m1"],
        "error: invalid value 'm1' for '--after <CURSOR>': a cursor is a time, a consumer and a \
            message id, with commas between them",
    )
    .await;
}

/// A record with an id, a type and a value, through Kafka's own console producer.
async fn produce(brokers: &str, topic: &str, lines: &str) {
    let jars = target_dir().join("kafka-libs");
    let java = std::env::var_os("JAVA_HOME")
        .map_or_else(|| "java".into(), |home| Path::new(&home).join("bin/java"));
    let mut command = Command::new(java);
    command
        .arg("-Xmx128m")
        .arg("-Dorg.slf4j.simpleLogger.defaultLogLevel=error")
        .arg("-cp")
        .arg(format!("{}/*", jars.display()));
    command.args([
        "org.apache.kafka.tools.ConsoleProducer",
        "--bootstrap-server",
        brokers,
        "--topic",
        topic,
        "--property",
        "parse.headers=true",
    ]);
    let mut producer = command
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .kill_on_drop(true)
        .spawn()
        .unwrap();
    producer.stdin.take().unwrap().write_all(lines.as_bytes()).await.unwrap();
    let output =
        timeout(DEADLINE, producer.wait_with_output()).await.expect("the producer ends").unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

/// A host, with its log in the folder.
fn host(cli: &ProgramFixture) -> Child {
    let mut serve = std::process::Command::new(program());
    for (name, _) in std::env::vars().filter(|(name, _)| name.starts_with("ONCEBOX_")) {
        serve.env_remove(name);
    }
    let log = std::fs::File::create(cli.dir.join("host.log")).unwrap();
    serve
        .arg("serve")
        .envs(&cli.environment)
        .env("ONCEBOX_HTTP_LISTEN", "127.0.0.1:0")
        .env("ONCEBOX_API_LISTEN", "127.0.0.1:0")
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(log);
    Child::spawn(serve, libc::SIGKILL).unwrap()
}

/// The whole path with nothing but commands: Kafka's own producer, the program, its `inbox show`.
/// S4-010, S1-070: what became of a message is found without the logs.
#[tokio::test(flavor = "multi_thread")]
async fn a_message_from_the_console_is_shown_as_completed() {
    let mut cli = ProgramFixture::empty().await;
    let kafka = tokio::task::spawn_blocking(KafkaServer::shared).await.unwrap().unwrap();
    cli.environment.insert("ONCEBOX_KAFKA_BROKERS".to_owned(), kafka.bootstrap().to_owned());
    let unique = format!("{:08x}", rand::random::<u32>());
    let (topic, tenant) = (format!("orders.{unique}"), format!("t-{unique}"));
    kafka.create_topic(&topic, 1, &[]).await.unwrap();

    let example = Path::new(env!("CARGO_MANIFEST_DIR")).join("../guest-examples");
    let schema = cli.file(
        "stock.sql",
        [
            std::fs::read(example.join("inventory-reservation/schema.sql")).unwrap(),
            b"INSERT INTO stock VALUES ('apple', 10);".to_vec(),
        ]
        .concat(),
    );
    let policy = cli.file(
        "policy.toml",
        format!(
            "topics = ['{topic}']\nack = 'after_commit'\nidentity = {{ id = [{{ header = 'id' }}], \
                event_type = [{{ header = 'type' }}] }}"
        ),
    );
    cli.ok(&["migrate"]).await;
    cli.ok(&["tenant", "create", &tenant, "--schema", &schema]).await;
    cli.ok(&["consumer", "create", "stock", "--tenant", &tenant, "--policy", &policy]).await;
    let component = example.join("components/inventory-reservation.wasm");
    cli.ok(&[
        "deploy",
        component.to_str().unwrap(),
        "--tenant",
        &tenant,
        "--consumer",
        "stock",
        "--event-type",
        "inventory.reserve",
    ])
    .await;

    let host = host(&cli);

    let payload = r#"{"reservation_id":"r-1","order_id":"o-1","sku":"apple","quantity":3}"#;
    let line = |id: &str, event_type: &str, payload: &str| {
        format!("id:{id},type:{event_type}\t{payload}\n")
    };
    let lines = [
        line("msg-abc-123", "inventory.reserve", payload),
        line("msg-abc-123", "inventory.reserve", payload),
        line("msg-bad", "inventory.reserve", "oops"),
        line("msg-lost", "nobody", "{}"),
    ];
    produce(kafka.bootstrap(), &topic, &lines.concat()).await;

    let of: &[&str] = &["--tenant", &tenant, "--consumer", "stock"];
    let deadline = Instant::now() + DEADLINE;
    while cli.json(&[&["inbox", "list"], of].concat()).await.as_array().unwrap().len() < 3 {
        assert!(
            host.is_running() && Instant::now() < deadline,
            "{}",
            std::fs::read_to_string(cli.dir.join("host.log")).unwrap()
        );
        sleep(Duration::from_millis(100)).await;
    }
    let shown = cli.ok(&[&["inbox", "show", "msg-abc-123"], of].concat()).await;
    let fields: BTreeMap<&str, &str> = shown
        .lines()
        .map(|line| line.split_once(' ').unwrap())
        .map(|(name, value)| (name, value.trim()))
        .collect();
    // S0-024, S1-070.
    assert_eq!(
        (fields["status"], fields["attempts"], fields["event_type"], fields["result"]),
        ("completed", "1", "inventory.reserve", r#"{"status":"reserved"}"#)
    );
    let shown = cli.json(&[&["inbox", "show", "msg-bad", "--payload"], of].concat()).await;
    assert_eq!(
        (&shown["status"], &shown["reason"], &shown["payload"]),
        (&json!("failed_terminal"), &json!("reject"), &json!("oops"))
    );
    assert_eq!(shown["headers"], json!([["id", "msg-bad"], ["type", "inventory.reserve"]]));
    let listed = cli.ok(&[&["inbox", "list"], of].concat()).await;
    let mut rows: Vec<Vec<&str>> =
        listed.lines().skip(1).map(|line| line.split_whitespace().skip(2).collect()).collect();
    rows.sort_unstable();
    let consumer = format!("{tenant}/stock");
    assert_eq!(
        rows,
        [
            vec![consumer.as_str(), "msg-abc-123", "inventory.reserve", "completed", "1"],
            vec![
                consumer.as_str(),
                "msg-bad",
                "inventory.reserve",
                "failed_terminal",
                "1",
                "reject"
            ],
            vec![consumer.as_str(), "msg-lost", "nobody", "parked", "0", "no_route"],
        ]
    );
    assert_eq!(
        cli.json(&[&["inbox", "list", "--status", "parked"], of].concat()).await[0]["message_id"],
        "msg-lost"
    );
    cli.fails(
        &[&["inbox", "show", "nothing"], of].concat(),
        &format!("the inbox of `{consumer}` holds no message `nothing`"),
    )
    .await;
    cli.fails(
        &["inbox", "list", "--tenant", "nobody"],
        "there is no tenant `nobody`; `oncebox tenant list` shows those there are",
    )
    .await;

    let mut connection = cli.database.connect().await.unwrap();
    let schema: String = sqlx::query_scalar("SELECT schema_name FROM oncebox.tenant")
        .fetch_one(&mut connection)
        .await
        .unwrap();
    let left: i32 =
        sqlx::query_scalar(AssertSqlSafe(format!("SELECT available FROM {schema}.stock")))
            .fetch_one(&mut connection)
            .await
            .unwrap();
    assert_eq!(left, 7, "the second delivery took effect");
    host.signal(libc::SIGTERM);
    assert!(host.wait(DEADLINE).expect("the host ends").success());
}
