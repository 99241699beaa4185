//! Commands of the program in a working directory: on a database with the host's schema, or through
//! the API of a server.

use std::{net::SocketAddr, path::Path, process::Stdio, time::Duration};

use anyhow::{Context, Result, ensure};
use oncebox_control::MasterKey;
use oncebox_devkit::local::{broker::MockBroker, free_port, process::Child};
use serde_json::Value;
use sha2::{Digest, Sha256};
use sqlx::AssertSqlSafe;

use crate::{
    http, inbox,
    postgres::TestDatabase,
    program::{self, CommandOutput, WorkingDir},
    services,
    wait::{self, DEADLINE},
};

/// Access of commands to the inbox.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Access {
    /// On the database.
    Database,
    /// Through the API of a server, with an admin's token.
    Server,
}

/// A working directory, a database, and a server where a test started one.
pub struct CliFixture {
    server: Option<Server>,
    folder: WorkingDir,
    database: TestDatabase,
    key: String,
}

/// A running host with its API. It is killed with this value.
pub struct Server {
    child: Child,
    http: SocketAddr,
    api: SocketAddr,
    _broker: MockBroker,
}

impl CliFixture {
    /// Prepares a fixture with an access.
    pub async fn open(access: Access) -> Self {
        let mut cli = Self::on_database().await.expect("a fixture");
        if access == Access::Server {
            cli.start_server(&[]).await.expect("a server");
            let token = cli.json(&["token", "create", "tester", "--role", "admin"]).await;
            let token = token["token"].as_str().expect("a token").to_owned();
            let url = cli.server_url();
            cli.folder.unset("ONCEBOX_DATABASE_URL");
            cli.folder.unset("ONCEBOX_MASTER_KEY");
            cli.folder.set("ONCEBOX_SERVER", &url);
            cli.folder.set("ONCEBOX_TOKEN", &token);
        }
        cli
    }

    async fn on_database() -> Result<Self> {
        let database = TestDatabase::create(&inbox::SOURCE, async |url: &str| {
            inbox::prepare(&url.parse()?).await
        })
        .await?;
        let key = MasterKey::generate();
        let folder = WorkingDir::new()?
            .with("ONCEBOX_DATABASE_URL", database.url())
            .with("ONCEBOX_MASTER_KEY", &key);
        Ok(Self { server: None, folder, database, key })
    }

    /// Start a host that serves the API of this database.
    pub async fn start_server(&mut self, variables: &[(&str, &str)]) -> Result<()> {
        let broker = MockBroker::start()?;
        let (http, api) = (
            SocketAddr::from(([127, 0, 0, 1], free_port()?)),
            SocketAddr::from(([127, 0, 0, 1], free_port()?)),
        );
        let log = std::fs::File::create(self.dir().join("server.log"))?;
        let mut command = std::process::Command::new(program::path()?);
        for (name, _) in std::env::vars().filter(|(name, _)| name.starts_with("ONCEBOX_")) {
            command.env_remove(name);
        }
        command
            .arg("serve")
            .env("ONCEBOX_DATABASE_URL", self.database.url())
            .env("ONCEBOX_MASTER_KEY", &self.key)
            .env("ONCEBOX_KAFKA_BROKERS", broker.bootstrap())
            .env("ONCEBOX_HTTP_LISTEN", http.to_string())
            .env("ONCEBOX_API_LISTEN", api.to_string())
            .env("ONCEBOX_RUNTIME_CACHE_DIR", services::target_dir().join("test-hosts/cache"))
            .env("ONCEBOX_LOG_FORMAT", "text")
            .envs(variables.iter().copied())
            .stdin(Stdio::null())
            .stdout(log.try_clone()?)
            .stderr(log);
        let child = Child::spawn(command, libc::SIGKILL).context("failed to start a server")?;
        let server = self.server.insert(Server { child, http, api, _broker: broker });
        let log = self.folder.dir().join("server.log");
        let text = || {
            let log = std::fs::read_to_string(&log).unwrap_or_default();
            format!("the server does not become ready: {log}")
        };
        wait::until(
            DEADLINE,
            Duration::from_millis(50),
            async || {
                ensure!(server.child.is_running(), text());
                Ok(server.is_ready().await)
            },
            async || text(),
        )
        .await
    }

    /// Whether the server says that it is ready.
    pub async fn is_ready(&self) -> bool {
        self.server.as_ref().expect("a server").is_ready().await
    }

    /// Where the server listens.
    pub fn server_url(&self) -> String {
        format!("http://{}", self.server.as_ref().expect("a server").api)
    }

    /// The environment of commands.
    pub fn folder(&mut self) -> &mut WorkingDir {
        &mut self.folder
    }

    /// Where files are.
    pub fn dir(&self) -> &Path {
        self.folder.dir()
    }

    /// Write a file.
    pub fn file(&self, name: &str, content: impl AsRef<[u8]>) {
        self.folder.write(name, content).expect("a file");
    }

    /// The digest of a file, in short.
    pub fn digest(&self, name: &str) -> String {
        let bytes = std::fs::read(self.dir().join(name)).expect("a file");
        hex::encode(Sha256::digest(bytes))[..12].to_owned()
    }

    /// Run a command.
    pub async fn run(&self, arguments: &[&str]) -> CommandOutput {
        self.folder.run(arguments, "").await.expect("the program runs")
    }

    /// What a command that succeeds prints.
    pub async fn ok(&self, arguments: &[&str]) -> String {
        let said = self.run(arguments).await;
        assert_eq!(said.code, Some(0), "{arguments:?}: {}{}", said.stdout, said.stderr);
        said.stdout
    }

    /// The same, as JSON.
    pub async fn json(&self, arguments: &[&str]) -> Value {
        let printed = self.ok(&[arguments, &["--json"]].concat()).await;
        serde_json::from_str(&printed)
            .unwrap_or_else(|error| panic!("{arguments:?}: {error}: {printed}"))
    }

    /// A command that fails with one line, and changes nothing.
    pub async fn fails(&self, arguments: &[&str], line: &str) {
        let before = (self.state().await, self.audit().await);
        let said = self.run(arguments).await;
        assert_eq!(said.stderr, format!("error: {line}\n"), "{arguments:?}");
        assert_eq!((said.code, said.stdout.as_str()), (Some(1), ""), "{arguments:?}");
        assert_eq!(
            (self.state().await, self.audit().await),
            before,
            "{arguments:?} changed something"
        );
    }

    /// Rows of a query, as a superuser sees them.
    pub async fn rows(&self, query: &str) -> Vec<Value> {
        let mut connection = self.database.connect().await.expect("the database");
        sqlx::query_scalar(AssertSqlSafe(query.to_owned()))
            .fetch_all(&mut connection)
            .await
            .expect("rows")
    }

    /// What a person's commands change.
    pub async fn state(&self) -> String {
        let mut state = String::new();
        // A host that runs raises by itself what a consumer requires.
        let consumers = "(SELECT consumer_id, tenant_id, name, policy, generation, state, \
            revision, seek FROM oncebox.consumer)";
        let tables = [
            "tenant",
            "tenant_migration",
            "tenant_store",
            "endpoint",
            "handler",
            "version",
            "deployment",
            "token",
        ]
        .map(|table| format!("oncebox.{table}"));
        for table in tables.into_iter().chain([consumers.to_owned()]) {
            let rows = self
                .rows(&format!("SELECT to_jsonb(t::text) FROM {table} t ORDER BY t::text"))
                .await;
            state.push_str(&format!("{table} {rows:?}\n"));
        }
        state
    }

    /// How many changes the audit log knows.
    pub async fn audit(&self) -> i64 {
        self.rows("SELECT to_jsonb(count(*)) FROM oncebox.audit").await[0]
            .as_i64()
            .expect("a number")
    }
}

impl Server {
    async fn is_ready(&self) -> bool {
        let response = http::get(self.http, "/readyz", DEADLINE).await;
        response.is_some_and(|response| response.status == 200)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.child.end(&[(libc::SIGKILL, Duration::from_secs(10))]);
    }
}
