//! A real schema registry for the tests: Apicurio Registry, which speaks the protocol of
//! Confluent's, from the archive that `tests/registry/pom.xml` names. Maven fetches it into
//! `target/registry` on first use.

use std::fs::{self, File};
use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::PathBuf;
use std::process::Command;
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use libc::{SIGCONT, SIGKILL, SIGSTOP, SIGTERM, c_int};
use oncebox_devkit::local::free_port;
use oncebox_devkit::local::process::Child;
use serde_json::{Value, json};

use crate::maven;
use crate::wait::DEADLINE;

/// Where the routes of Confluent's registry stand in Apicurio's.
const PREFIX: &str = "/apis/ccompat/v7";
const POLL: Duration = Duration::from_millis(50);

/// A registry with its schemas in memory. It ends with the value, and with the process however that
/// ends.
#[derive(Debug)]
pub struct Registry {
    port: u16,
    log: PathBuf,
    child: Option<Child>,
}

/// A schema that another refers to: its name there, its subject and its version.
pub type Reference<'r> = (&'r str, &'r str, u32);

impl Registry {
    /// The registry of this process, started if need be; it takes some seconds and 400 MB. Blocks.
    /// Tests of one process that run at a time share it, so subjects need names of their own.
    pub fn start() -> Result<Arc<Self>> {
        static RUNNING: Mutex<Weak<Registry>> = Mutex::new(Weak::new());
        let mut running = RUNNING.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(registry) = running.upgrade() {
            return Ok(registry);
        }
        let registry = Arc::new(Self::start_private()?);
        *running = Arc::downgrade(&registry);
        Ok(registry)
    }

    /// A registry of one's own, to stop. Blocks.
    pub fn start_private() -> Result<Self> {
        let name =
            format!("oncebox-registry-{}-{:08x}.log", std::process::id(), rand::random::<u32>());
        let mut registry =
            Self { port: free_port()?, log: std::env::temp_dir().join(name), child: None };
        let log = File::create(&registry.log).context("failed to create the registry's log")?;
        let mut command = java(registry.port)?;
        command.stdout(log.try_clone().context("failed to share the log")?).stderr(log);
        registry.child = Some(
            Child::spawn(command, SIGKILL)
                .context("failed to start `java`; install a runtime of version 17 or newer")?,
        );
        registry.wait_until_ready()?;
        Ok(registry)
    }

    /// Where `/schemas/ids/…` begins.
    pub fn url(&self) -> String {
        format!("http://127.0.0.1:{}{PREFIX}", self.port)
    }

    /// Registers a schema of a type (`AVRO`, `PROTOBUF`, `JSON`) as the next version of a subject,
    /// and returns its id.
    pub fn register(
        &self,
        subject: &str,
        schema: &str,
        schema_type: &str,
        references: &[Reference<'_>],
    ) -> Result<u32> {
        let references: Vec<Value> =
            references.iter().map(|(name, subject, version)| json!({ "name": name, "subject": subject, "version": version })).collect();
        let body = json!({ "schema": schema, "schemaType": schema_type, "references": references });
        let answer =
            self.ask("POST", &format!("/subjects/{subject}/versions"), &body.to_string())?;
        let id = answer["id"].as_u64().with_context(|| {
            format!("the registry does not take a schema of `{subject}`: {answer}")
        })?;
        Ok(u32::try_from(id)?)
    }

    /// Let it sleep: it takes connections and answers nothing.
    pub fn pause(&self) {
        self.signal(SIGSTOP);
    }

    /// Wake it.
    pub fn wake(&self) {
        self.signal(SIGCONT);
    }

    fn signal(&self, signal: c_int) {
        if let Some(child) = &self.child {
            child.signal(signal);
        }
    }

    /// One request over a connection of its own, answered in JSON.
    fn ask(&self, method: &str, path: &str, body: &str) -> Result<Value> {
        let mut stream =
            TcpStream::connect(("127.0.0.1", self.port)).context("failed to reach the registry")?;
        stream.set_read_timeout(Some(DEADLINE))?;
        let length = body.len();
        // HTTP/1.0, so that the answer comes in one piece and ends with the connection.
        write!(
            stream,
            "{method} {PREFIX}{path} HTTP/1.0\r\nhost: 127.0.0.1\r\naccept: application/json\r\n\
             content-type: application/json\r\ncontent-length: {length}\r\n\r\n{body}"
        )
        .context("failed to ask the registry")?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer).context("failed to read the registry's answer")?;
        let Some((_, body)) = answer.split_once("\r\n\r\n") else {
            bail!("the registry answers {answer:?}")
        };
        serde_json::from_str(body).with_context(|| format!("the registry answers {answer:?}"))
    }

    /// Ready is when the list of subjects is answered.
    fn wait_until_ready(&self) -> Result<()> {
        let deadline = Instant::now() + DEADLINE;
        while !self.ask("GET", "/subjects", "").is_ok_and(|subjects| subjects.is_array()) {
            let runs = self.child.as_ref().is_some_and(Child::is_running);
            let log = || fs::read_to_string(&self.log).unwrap_or_default();
            ensure!(
                runs && Instant::now() < deadline,
                "the registry does not start; it says:\n{}",
                log()
            );
            std::thread::sleep(POLL);
        }
        Ok(())
    }
}

impl Drop for Registry {
    fn drop(&mut self) {
        let signals = [(SIGTERM, Duration::from_secs(10)), (SIGKILL, Duration::from_secs(10))];
        if self.child.take().is_some_and(|child| child.end(&signals).is_none()) {
            tracing::warn!("the registry does not end");
        }
        let _ = fs::remove_file(&self.log); // what is left is in the folder for temporary files
    }
}

/// `java` with a small heap and the quick compiler, as for Kafka.
fn java(port: u16) -> Result<Command> {
    let dir = maven::fetched("registry/pom.xml", "dependency:unpack", "registry", "install Maven")?;
    let jar = fs::read_dir(dir)
        .context("failed to look for the registry")?
        .flatten()
        .map(|entry| entry.path());
    let jar = jar.into_iter().find(|path| path.to_string_lossy().ends_with("-runner.jar"));
    let mut java = maven::java();
    java.args(["-Xmx384m", "-Dquarkus.http.host=127.0.0.1"]);
    java.arg(format!("-Dquarkus.http.port={port}"))
        .arg("-jar")
        .arg(jar.context("the registry's archive has no program")?);
    Ok(java)
}
