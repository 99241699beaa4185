//! Runs a handler natively, in `cargo test`, against a real PostgreSQL.
//!
//! ```no_run
//! use oncebox_guest::{Message, Result, execute, json, params, test::{Database, Outcome}};
//!
//! #[oncebox_guest::handler]
//! fn greet(name: String) -> Result<()> {
//!     execute("INSERT INTO greeting (name) VALUES ($1)", params![name])?;
//!     Ok(())
//! }
//!
//! # fn test() {
//! let mut db = Database::from_env("CREATE TABLE greeting (name text PRIMARY KEY)");
//! let outcome = db.run(greet, &Message::new("m-1", "name.heard", &json!("Ann")));
//! assert_eq!(outcome, Outcome::ok(()));
//! assert_eq!(db.query::<String>("SELECT name FROM greeting", params![]), ["Ann"]);
//! # }
//! ```
//!
//! The rules are the host's: the same kinds of statements, parameters encoded by the types
//! PostgreSQL describes, a failed statement that fails the message although the handler
//! answers ok, savepoints, deferred constraints checked before the commit, the bounds of outgoing
//! messages, which `Database::sent` shows with the feature `emit`. What is not here: other
//! limits, deadlines, the tenant's role, deduplication, and the clock and randomness of a
//! component. `oncebox test` runs the built component on the host itself.

mod batch;
mod decode;
mod delivery;
mod encode;
mod engine;
mod messages;
#[rustfmt::skip] // The host's own file, byte for byte.
mod numeric;
mod outcome;
#[cfg(feature = "emit")]
mod outgoing;
mod private;
mod session;
#[rustfmt::skip] // The host's own file, byte for byte.
mod statement;
pub(crate) mod sys;
mod types;

use std::{
    collections::BTreeMap,
    process,
    str::FromStr,
    sync::atomic::{AtomicU32, Ordering},
    time::SystemTime,
};

use postgres::{Client, Config, NoTls};
use serde::de::DeserializeOwned;

pub use delivery::Delivery;
pub use messages::messages;
pub use outcome::Outcome;
#[cfg(feature = "emit")]
pub use outgoing::Sent;
use session::Run;

use crate::{Handler, Message, Result, Row, Value, log::Level};

/// Where a database is looked for, one after the other.
const VARIABLES: [&str; 2] = ["ONCEBOX_TEST_DATABASE_URL", "DATABASE_URL"];

/// A schema of its own in a PostgreSQL, dropped with this value.
///
/// Its methods panic, with a text that says why, where a test cannot go on.
pub struct Database {
    /// What [`config`](crate::config) answers.
    pub settings: BTreeMap<String, String>,
    /// What a handler's [`Context`](crate::Context) answers.
    pub delivery: Delivery,
    config: Config,
    schema: String,
    client: Option<Client>,
    lines: Vec<(Level, String)>,
    #[cfg(feature = "emit")]
    outbox: outgoing::Outbox,
}

/// What becomes of what a handler wrote, when it answers ok.
#[derive(Clone, Copy, PartialEq, Eq)]
enum End {
    Commit,
    Rollback,
}

impl Database {
    /// A schema with these tables, in the database that `ONCEBOX_TEST_DATABASE_URL` or
    /// `DATABASE_URL` names. With neither, a private PostgreSQL is started from the server's
    /// binaries on this machine, once for all tests of the process, and ends with it.
    #[track_caller]
    pub fn from_env(tables: &str) -> Self {
        let set = |name: &&str| std::env::var(name).ok().filter(|url| !url.is_empty());
        let url = VARIABLES.iter().find_map(set);
        let config = match &url {
            Some(url) => parsed(url),
            None => private::config().unwrap_or_else(|why| panic!(
                "{why}; set `DATABASE_URL` to a PostgreSQL that tests may use, such as `postgres://postgres@127.0.0.1:5432/postgres`: each test makes a schema in it and drops it"
            )),
        };
        Self::new(config, tables)
    }

    /// The same in the database of this URL.
    #[track_caller]
    pub fn connect(url: &str, tables: &str) -> Self {
        Self::new(parsed(url), tables)
    }

    #[track_caller]
    fn new(config: Config, tables: &str) -> Self {
        let mut database = Self {
            settings: BTreeMap::new(),
            delivery: Delivery::default(),
            config,
            schema: unique_name(),
            client: None,
            lines: Vec::new(),
            #[cfg(feature = "emit")]
            outbox: outgoing::Outbox::default(),
        };
        let schema = database.schema.clone();
        database.script(
            "the schema of the test",
            &format!("CREATE SCHEMA {schema}; SET search_path = {schema}"),
        );
        database.script("the tables", tables);
        database
    }

    /// Runs the handler as for a new message. When it answers ok, what it wrote is committed,
    /// otherwise it is rolled back.
    pub fn run<'m, A>(&mut self, handler: impl Handler<'m, A>, message: &'m Message) -> Outcome {
        self.transact(End::Commit, message, || handler.call(message))
    }

    /// The same, and what it wrote is rolled back in any case.
    pub fn dry_run<'m, A>(
        &mut self,
        handler: impl Handler<'m, A>,
        message: &'m Message,
    ) -> Outcome {
        self.transact(End::Rollback, message, || handler.call(message))
    }

    /// The rows of a statement, read as [`query_as`](crate::query_as) reads them.
    #[track_caller]
    pub fn query<T: DeserializeOwned>(&mut self, statement: &str, params: &[Value]) -> Vec<T> {
        let rows = engine::query(self.client(), statement, params);
        let rows = rows.and_then(|rows| rows.into_iter().map(Row::into).collect());
        rows.unwrap_or_else(|error| panic!("{error}, in `{statement}`"))
    }

    /// Runs a statement of the test's own; answers how many rows it touched.
    #[track_caller]
    pub fn execute(&mut self, statement: &str, params: &[Value]) -> u64 {
        let touched = engine::execute(self.client(), statement, params);
        touched.unwrap_or_else(|error| panic!("{error}, in `{statement}`"))
    }

    /// What the last run wrote to its log.
    pub fn log(&self) -> &[(Level, String)] {
        &self.lines
    }

    fn transact(
        &mut self,
        end: End,
        message: &Message,
        call: impl FnOnce() -> Result<Option<String>>,
    ) -> Outcome {
        self.begin();
        let run = self.take_run(std::slice::from_ref(message));
        let (answer, mut run) = session::enter(run, call);
        let outcome = Outcome::of(answer, &run.faults);
        let deferred = run.end(if outcome.is_ok() { end } else { End::Rollback });
        self.put_back(run);
        match outcome.is_ok() {
            true => deferred.unwrap_or(outcome),
            false => outcome,
        }
    }

    #[track_caller]
    fn begin(&mut self) {
        self.script("the transaction", "BEGIN ISOLATION LEVEL READ COMMITTED");
    }

    /// The run of these messages, which takes the connection.
    #[cfg_attr(not(feature = "emit"), allow(unused_variables, unused_mut))]
    fn take_run(&mut self, messages: &[Message]) -> Run {
        let client = self.client.take().expect("`begin` has just used it");
        let mut run = Run::new(client, self.settings.clone(), self.delivery.clone());
        #[cfg(feature = "emit")]
        {
            // When the handler panics, what was sent before is still there.
            run.outbox = self.outbox.clone();
            run.outbox
                .begin(messages.iter().map(|message| message.id.clone()).collect());
        }
        run
    }

    fn put_back(&mut self, run: Run) {
        self.client = Some(run.client);
        self.lines = run.lines;
        #[cfg(feature = "emit")]
        {
            self.outbox = run.outbox;
        }
    }

    /// The connection. It is gone when a handler panicked, and its transaction with it.
    #[track_caller]
    fn client(&mut self) -> &mut Client {
        let connect = || {
            let mut client = self.config.connect(NoTls).unwrap_or_else(|error| {
                panic!("cannot connect to the database: {}", with_cause(&error))
            });
            let path = format!("SET search_path = {}", self.schema);
            client
                .batch_execute(&path)
                .unwrap_or_else(|error| panic!("{}", with_cause(&error)));
            client
        };
        self.client.get_or_insert_with(connect)
    }

    #[track_caller]
    fn script(&mut self, what: &str, text: &str) {
        if let Err(error) = self.client().batch_execute(text) {
            panic!("{what}: {}", with_cause(&error));
        }
    }
}

impl Drop for Database {
    fn drop(&mut self) {
        let client = self
            .client
            .take()
            .or_else(|| self.config.connect(NoTls).ok());
        if let Some(mut client) = client {
            // The schema may outlive a test whose database is gone; there is no one to tell.
            let _ = client.batch_execute(&format!(
                "ROLLBACK; DROP SCHEMA IF EXISTS {} CASCADE",
                self.schema
            ));
        }
    }
}

#[track_caller]
fn parsed(url: &str) -> Config {
    Config::from_str(url)
        .unwrap_or_else(|error| panic!("the database's URL: {}", with_cause(&error)))
}

/// No two tests share a schema, whatever process they are in.
fn unique_name() -> String {
    static COUNT: AtomicU32 = AtomicU32::new(0);
    let now = SystemTime::now()
        .duration_since(SystemTime::UNIX_EPOCH)
        .unwrap_or_default();
    let count = COUNT.fetch_add(1, Ordering::Relaxed);
    format!("oncebox_test_{}_{}_{count}", process::id(), now.as_nanos())
}

/// The driver's own text says only where it failed.
fn with_cause(error: &postgres::Error) -> String {
    match std::error::Error::source(error) {
        Some(cause) => format!("{error}: {cause}"),
        None => error.to_string(),
    }
}
