//! The inbox against a real PostgreSQL, in process: plain Rust handlers, several hosts, no broker.
//!
//! A message says in its body what its handler is to do, one step a line; see [`Script`].
//! Every run first writes a row into the tenant's table `effect`, so that a message that took
//! effect twice, or without being completed, shows.

mod guest;
mod script;

use std::{
    sync::{
        Arc, LazyLock,
        atomic::{AtomicBool, AtomicI64, Ordering},
    },
    time::Duration,
};

use anyhow::{Context, Result};
use oncebox_control::{
    Consumer, Control, Credentials, DatabaseUrl, Functions, MasterKey, Tenant, schema,
};
use oncebox_inbox::{Budget, ConsumerInbox, PartitionInbox, SessionSettings, Sessions, retry};
use oncebox_model::{
    InboxError,
    handler::Handlers,
    policy::{Policy, Retention},
    record::Record,
};
use sqlx::{
    AssertSqlSafe, Connection, Executor, PgConnection, PgPool,
    postgres::{PgConnectOptions, PgPoolOptions},
};
use tokio::time::{Instant, sleep};
use tokio_util::sync::CancellationToken;

pub use guest::{Guest, code};
pub use script::{Gate, PlainHandler, PlainHandlers, Ran, Script, ScriptControl, execute};

use crate::{
    coverage,
    postgres::TestDatabase,
    wait::{self, DEADLINE},
};

/// What the template database is made from: the migrations and functions that are compiled into
/// this very program, and the code that applies them.
pub static SOURCE: LazyLock<String> = LazyLock::new(|| {
    const CODE: &str = concat!(
        include_str!("../../host/control/src/database/schema.rs"),
        include_str!("../../host/control/src/database/functions.rs"),
        include_str!("../../host/control/src/database/missing_partitions.sql"),
        include_str!("../../host/control/src/database/revoke_functions.sql"),
        include_str!("../../host/control/src/database/revoked_functions.sql"),
    );
    let migrations = sqlx::migrate!("../migrations");
    let migrations: String = migrations.iter().map(|migration| migration.sql.as_str()).collect();
    format!("{migrations}{}{CODE}", Functions::of_this_program().texts.concat())
});

const EFFECT: &str = "CREATE TABLE effect (consumer text NOT NULL, message_id text NOT NULL, \
    attempt int NOT NULL, version int NOT NULL); \
    CREATE INDEX ON effect (message_id);";

/// A migrated database of its own, with tenants, consumers and hosts. [`InboxFixture::finish`]
/// makes the final check; a test that forgets it fails.
pub struct InboxFixture {
    database: TestDatabase,
    options: PgConnectOptions,
    key: MasterKey,
    /// The key, as a setting of another process has it.
    key_text: String,
    /// What a person can do.
    pub control: Control,
    /// Connections of a superuser, to look and to meddle.
    pub pool: PgPool,
    /// Gates and the record of runs, shared by all hosts.
    pub script: Arc<ScriptControl>,
    /// Whether the scripted handlers take the messages of a transaction together.
    batches: bool,
    /// Whether a transaction has time for all that is delivered together.
    unhurried: bool,
    finished: AtomicBool,
}

/// A promise is kept by both kinds of handlers: those that take one message, and those that take
/// all messages of a transaction in one call.
pub async fn both(promise: impl AsyncFn(InboxFixture)) {
    promise(InboxFixture::new().await).await;
    println!("the same with a handler that takes batches");
    let mut fixture = InboxFixture::new().await;
    fixture.batches();
    promise(fixture).await;
}

impl InboxFixture {
    /// A new database, copied from a template.
    pub async fn new() -> Self {
        Self::create().await.expect("the test's database")
    }

    /// From now on its scripted handlers take the messages of a transaction together.
    pub fn batches(&mut self) {
        self.batches = true;
    }

    /// Whether its handlers take the messages of a transaction in one call.
    pub fn takes_batches(&self) -> bool {
        self.batches
    }

    /// From now on a consumer whose policy says nothing of batches has a minute for each. On a busy
    /// machine the default leaves messages to a second transaction.
    pub fn unhurried(mut self) -> Self {
        self.unhurried = true;
        self
    }

    async fn create() -> Result<Self> {
        let database =
            TestDatabase::create(&SOURCE, async |url: &str| prepare(&url.parse()?).await).await?;
        let options: PgConnectOptions = database.url().parse()?;
        // Privileges on a database are not copied from its template.
        let revoke = format!("REVOKE ALL ON DATABASE {} FROM PUBLIC", database.name());
        let pool = PgPoolOptions::new().max_connections(8).connect_lazy_with(options.clone());
        pool.execute(AssertSqlSafe(revoke)).await.context("failed to close the database")?;
        let key_text = MasterKey::generate();
        let key = MasterKey::parse(&key_text)?;
        let control = Control::new(options.clone(), key.clone(), "test");
        Ok(Self {
            database,
            options,
            key,
            key_text,
            control,
            pool,
            script: Arc::default(),
            batches: false,
            unhurried: false,
            finished: AtomicBool::new(false),
        })
    }

    /// A tenant with its table of effects and whatever else `schema_sql` makes.
    pub async fn tenant(&self, name: &str, schema_sql: &str) -> Tenant {
        let tenant = self.control.tenants().create(name).await.expect("a tenant");
        self.make_tables(&tenant, schema_sql).await;
        tenant
    }

    /// The table of effects, and others, for a tenant that has none.
    pub async fn make_tables(&self, tenant: &Tenant, schema_sql: &str) {
        self.control
            .tenant_databases()
            .apply_migration(tenant, "tables", &format!("{EFFECT} {schema_sql}"))
            .await
            .expect("the tenant's schema");
    }

    /// A tenant with the same table in a database of its own.
    pub async fn tenant_at(&self, name: &str, database: &TestDatabase, schema_sql: &str) -> Tenant {
        let url = DatabaseUrl::parse(database.url()).expect("a URL");
        let tenant = self.control.tenants().create_dedicated(name, &url).await.expect("a tenant");
        self.make_tables(&tenant, schema_sql).await;
        tenant
    }

    /// Another database with the inbox's schema, which nobody uses yet.
    pub async fn another_database() -> TestDatabase {
        TestDatabase::create(&SOURCE, async |url: &str| prepare(&url.parse()?).await)
            .await
            .expect("another database")
    }

    /// A consumer of the tenant. `policy` is TOML; where it says nothing of topics, ack and
    /// identity they are `t`, `after_commit`, and the header `id`.
    pub async fn consumer(&self, tenant: &Tenant, name: &str, policy: &str) -> TestConsumer {
        let unhurried = ("batch", "batch = { duration_ms = 60000 }");
        let more = self.unhurried.then_some(unhurried);
        let policy = Policy::parse(&with_defaults(policy, more)).expect("the test's policy");
        let row =
            self.control.consumers().create(&tenant.name, name, &policy).await.expect("a consumer");
        TestConsumer { tenant: tenant.clone(), row, policy }
    }

    /// A tenant and a consumer, where a test needs one of each.
    pub async fn simple(&self, schema_sql: &str, policy: &str) -> TestConsumer {
        let tenant = self.tenant("acme", schema_sql).await;
        self.consumer(&tenant, "orders", policy).await
    }

    /// A host: its own connections, its own pace, nothing shared with others but the database.
    pub fn host(&self, consumer: &TestConsumer) -> Arc<ConsumerInbox> {
        self.host_with(consumer, self.scripts(), &SessionSettings::default())
    }

    /// A host with handlers and limits of its own.
    pub fn host_with(
        &self,
        consumer: &TestConsumer,
        handlers: Arc<dyn Handlers>,
        settings: &SessionSettings,
    ) -> Arc<ConsumerInbox> {
        let sessions = Sessions::of(
            self.control.tenant_databases().session_target(&consumer.tenant).expect("sessions"),
            settings,
            Budget::new(16),
        );
        let Consumer { consumer_id, tenant, name, .. } = consumer.row.clone();
        let owner = format!("host-{:08x}", rand::random::<u32>());
        ConsumerInbox::new(
            consumer_id,
            tenant,
            name,
            consumer.policy.clone(),
            owner,
            sessions,
            handlers,
        )
    }

    /// A host whose tenant's sessions go through another address.
    pub fn host_through(
        &self,
        consumer: &TestConsumer,
        address: std::net::SocketAddr,
        settings: &SessionSettings,
    ) -> Arc<ConsumerInbox> {
        self.host_through_with(consumer, address, settings, self.scripts())
    }

    /// The same with handlers of its own.
    pub fn host_through_with(
        &self,
        consumer: &TestConsumer,
        address: std::net::SocketAddr,
        settings: &SessionSettings,
        handlers: Arc<dyn Handlers>,
    ) -> Arc<ConsumerInbox> {
        let options = self.options.clone().host(&address.ip().to_string()).port(address.port());
        let control = Control::new(options, self.key.clone(), "test");
        let sessions = Sessions::of(
            control.tenant_databases().session_target(&consumer.tenant).expect("sessions"),
            settings,
            Budget::new(32),
        );
        let Consumer { consumer_id, tenant, name, .. } = consumer.row.clone();
        ConsumerInbox::new(
            consumer_id,
            tenant,
            name,
            consumer.policy.clone(),
            "host-through".to_owned(),
            sessions,
            handlers,
        )
    }

    /// Handlers that do what the messages say, for every event type but `nobody`.
    pub fn scripts(&self) -> Arc<PlainHandlers> {
        let script = if self.batches { Script::batch_handler } else { Script::handler };
        PlainHandlers::of(script(self.script.clone()))
    }

    /// Options to connect as a tenant's guest role, as a host's sessions do.
    pub fn guest_options(&self, tenant: &Tenant) -> PgConnectOptions {
        let password = self.credentials(tenant).guest_password;
        let options = self.options.clone().username(&tenant.login).password(&password);
        options.options([
            ("search_path", tenant.schema_name.as_str()),
            ("default_transaction_read_only", "on"),
        ])
    }

    /// A connection as a tenant's guest role.
    pub async fn guest(&self, tenant: &Tenant) -> PgConnection {
        PgConnection::connect_with(&self.guest_options(tenant))
            .await
            .expect("a session of the tenant")
    }

    fn credentials(&self, tenant: &Tenant) -> Credentials {
        self.control.tenant_databases().credentials(tenant).expect("credentials")
    }

    /// The secret that host functions ask a tenant's session for.
    pub fn secret(&self, tenant: &Tenant) -> Vec<u8> {
        self.credentials(tenant).secret.to_vec()
    }

    /// The superuser's URL of its database.
    pub fn url(&self) -> String {
        self.database.url().to_owned()
    }

    /// The master key, for a host in another process.
    pub fn master_key(&self) -> &str {
        &self.key_text
    }

    /// Options to connect as superuser.
    pub fn superuser_options(&self) -> PgConnectOptions {
        self.options.clone()
    }

    /// A connection as superuser.
    pub async fn superuser(&self) -> PgConnection {
        self.database.connect().await.expect("a superuser's session")
    }

    /// Statements of a superuser.
    pub async fn execute(&self, sql: impl Into<String>) {
        let sql = sql.into();
        self.pool
            .execute(sqlx::raw_sql(AssertSqlSafe(sql.clone())))
            .await
            .unwrap_or_else(|error| panic!("`{sql}`: {error}"));
    }

    /// A number from the database, read by a superuser.
    pub async fn number(&self, sql: impl Into<String>) -> i64 {
        let sql = sql.into();
        sqlx::query_scalar(AssertSqlSafe(sql.clone()))
            .fetch_one(&self.pool)
            .await
            .unwrap_or_else(|error| panic!("`{sql}`: {error}"))
    }

    /// Wait until a query of a superuser answers true.
    pub async fn until(&self, sql: &str) {
        let text = format!("SELECT coalesce(({sql}), false)");
        wait::until(
            DEADLINE,
            Duration::from_millis(10),
            async || {
                let query = sqlx::query_scalar(AssertSqlSafe(text.clone()));
                query.fetch_one(&self.pool).await.with_context(|| format!("`{sql}`"))
            },
            async || format!("never true: `{sql}`; the inbox holds {:#?}", self.rows().await),
        )
        .await
        .unwrap_or_else(|error| panic!("{error:#}"));
    }

    /// Wait until exactly so many sessions of this database wait for a lock. Other tests' databases
    /// are on the same server, and their sessions wait for locks too.
    pub async fn until_blocked(&self, sessions: usize) {
        self.until(&format!("SELECT count(*) = {sessions} FROM ({BLOCKED}) b")).await;
    }

    /// End every session of this database that waits for a lock, and wait until it has ended.
    pub async fn end_blocked(&self) {
        self.execute(format!("SELECT pg_terminate_backend(pid, 5000) FROM ({BLOCKED}) b")).await;
    }

    /// A row of the inbox.
    pub async fn row(&self, consumer: &TestConsumer, id: &str) -> Row {
        self.find(consumer, id).await.unwrap_or_else(|| panic!("the inbox holds no message `{id}`"))
    }

    /// A row of the inbox, if it is there.
    pub async fn find(&self, consumer: &TestConsumer, id: &str) -> Option<Row> {
        let query = sqlx::query_as(AssertSqlSafe(format!(
            "{ROW} WHERE consumer_id = $1 AND message_id = $2"
        )));
        let row: Option<Row> = query
            .bind(consumer.row.consumer_id)
            .bind(id)
            .fetch_optional(&self.pool)
            .await
            .expect("a row");
        row.iter().for_each(|row| coverage::record_state(&row.status, row.reason.as_deref()));
        row
    }

    /// All rows of the inbox, by offset.
    pub async fn rows(&self) -> Vec<Row> {
        sqlx::query_as(AssertSqlSafe(format!("{ROW} ORDER BY consumer_id, \"offset\", message_id")))
            .fetch_all(&self.pool)
            .await
            .expect("rows")
    }

    /// How often a message took effect.
    pub async fn effects(&self, consumer: &TestConsumer, id: &str) -> i64 {
        let TestConsumer { tenant, row, .. } = consumer;
        let sql = format!(
            "SELECT count(*) FROM {}.effect WHERE consumer = $1 AND message_id = $2",
            tenant.schema_name
        );
        sqlx::query_scalar(AssertSqlSafe(sql))
            .bind(&row.name)
            .bind(id)
            .fetch_one(&self.pool)
            .await
            .expect("a count")
    }

    /// Run what is due in the inbox until nothing is open any more.
    pub async fn retry_until_settled(&self, host: &ConsumerInbox) {
        self.retry_until_settled_in(host, &self.pool).await;
    }

    /// The same in a database of the tenant's own.
    pub async fn retry_until_settled_in(&self, host: &ConsumerInbox, pool: &PgPool) {
        let mut deadline = Instant::now() + DEADLINE;
        let open = format!(
            "SELECT count(*) FROM oncebox.inbox WHERE consumer_id = {} AND status IN ('received', \
                'in_progress', 'failed_retryable')",
            host.consumer_id
        );
        while sqlx::query_scalar::<_, i64>(AssertSqlSafe(open.clone()))
            .fetch_one(pool)
            .await
            .expect("a count")
            > 0
        {
            assert!(Instant::now() < deadline, "still open: {:#?}", self.rows().await);
            match step(host).await {
                Ok(1..) => deadline = Instant::now() + DEADLINE, // it goes on, however slowly
                _ => sleep(Duration::from_millis(10)).await,
            }
        }
    }

    /// No message has two rows.
    pub async fn check_rows(&self) {
        let twice = "SELECT count(*) FROM (SELECT FROM oncebox.inbox GROUP BY consumer_id, \
            message_id HAVING count(*) > 1) t";
        assert_eq!(self.number(twice).await, 0, "a message has two rows");
    }

    /// The final check: each completed message took effect once, no other did, and nothing is left
    /// over of any transaction.
    pub async fn finish(self) {
        self.finished.store(true, Ordering::Relaxed);
        self.until(NOTHING_LEFT).await;
        assert_eq!(
            self.number("SELECT count(*) FROM oncebox.guard").await,
            0,
            "the guard is not empty"
        );
        self.check_rows().await;
        coverage::record_inboxes(&self.pool).await;
        for consumer in self.control.consumers().list().await.expect("consumers") {
            let tenant = self.control.tenants().get(&consumer.tenant).await.expect("a tenant");
            let sql = ODD.replace("{schema}", &tenant.schema_name);
            let place =
                self.control.tenant_databases().get(&tenant).expect("the tenant's database");
            let odd: Vec<(String, Option<String>, i64)> = sqlx::query_as(AssertSqlSafe(sql))
                .bind(consumer.consumer_id)
                .bind(&consumer.name)
                .fetch_all(&place.pool)
                .await
                .expect("the final check");
            assert!(odd.is_empty(), "a completed message has one effect, any other none: {odd:?}");
        }
    }
}

impl Drop for InboxFixture {
    fn drop(&mut self) {
        if !self.finished.load(Ordering::Relaxed) && !std::thread::panicking() {
            panic!("the test ends without `InboxFixture::finish`");
        }
    }
}

const NOTHING_LEFT: &str = "SELECT NOT EXISTS (SELECT FROM pg_locks WHERE locktype = 'advisory' \
        AND database = (SELECT oid FROM pg_database WHERE datname = current_database())) \
    AND NOT EXISTS (SELECT FROM pg_stat_activity WHERE datname = current_database() AND pid <> \
    pg_backend_pid() \
        AND backend_type = 'client backend' AND state <> 'idle')";

const BLOCKED: &str = "SELECT pid FROM pg_stat_activity WHERE datname = current_database() AND \
    wait_event_type = 'Lock'";

const ODD: &str = "WITH e AS (SELECT message_id, count(*) AS n FROM {schema}.effect WHERE consumer \
    = $2 GROUP BY 1), \
        i AS (SELECT message_id, status FROM oncebox.inbox WHERE consumer_id = $1) \
    SELECT message_id, status, coalesce(n, 0) FROM i FULL JOIN e USING (message_id) \
    WHERE coalesce(n, 0) <> (status IS NOT DISTINCT FROM 'completed')::int";

/// Bring a database to the state that tests begin with.
pub async fn prepare(options: &PgConnectOptions) -> Result<()> {
    let open = schema::migrate(options).await?;
    anyhow::ensure!(open.is_empty(), "a superuser may close everything: {open:?}");
    let pool = PgPoolOptions::new().max_connections(1).connect_with(options.clone()).await?;
    // Most tests have a consumer of the class that consumers have by default.
    schema::ensure_partitions_for(&pool, &[Retention::default().class()]).await?;
    pool.close().await;
    Ok(())
}

fn with_defaults(policy: &str, more: Option<(&str, &str)>) -> String {
    let defaults = [
        ("topics", "topics = ['t']"),
        ("ack", "ack = 'after_commit'"),
        (
            "identity",
            "identity = { id = [{ header = 'id' }], event_type = [{ header = 'type' }, 'topic'] }",
        ),
    ];
    let missing = defaults
        .into_iter()
        .chain(more)
        .filter(|(key, _)| !policy.lines().any(|line| line.trim_start().starts_with(key)));
    missing.map(|(_, line)| line).chain([policy]).collect::<Vec<_>>().join("\n")
}

/// A consumer with what belongs to it.
#[derive(Debug, Clone)]
pub struct TestConsumer {
    /// Its tenant.
    pub tenant: Tenant,
    /// Its row.
    pub row: Consumer,
    /// Its policy.
    pub policy: Policy,
}

const ROW: &str = "SELECT message_id, status, reason, attempts, crashes, last_error, epoch, \
    version_id, result, payload, headers, \
    payload_hash, topic, partition, \"offset\", bucket::text, locked_until IS NOT NULL AS leased, \
    processed_at IS NOT NULL AS processed, \
    (extract(epoch FROM next_attempt_at - now()) * 1000)::bigint AS due_in_ms FROM oncebox.inbox";

/// A row of the inbox, as the tests look at it.
#[derive(Debug, Clone, PartialEq, sqlx::FromRow)]
#[allow(missing_docs, reason = "the columns of the table")]
pub struct Row {
    pub message_id: String,
    pub status: String,
    pub reason: Option<String>,
    pub attempts: i32,
    pub crashes: i32,
    pub last_error: Option<String>,
    pub epoch: i64,
    pub version_id: Option<i32>,
    pub result: Option<serde_json::Value>,
    pub payload: Option<Vec<u8>>,
    pub headers: Option<Vec<u8>>,
    pub payload_hash: Option<Vec<u8>>,
    pub topic: String,
    pub partition: i32,
    pub offset: i64,
    pub bucket: String,
    pub leased: bool,
    pub processed: bool,
    /// Milliseconds until the next attempt.
    pub due_in_ms: Option<i64>,
}

impl Row {
    /// Status, reason and attempts, which is what most tests ask for.
    pub fn state(&self) -> (&str, Option<&str>, i32) {
        (&self.status, self.reason.as_deref(), self.attempts)
    }
}

/// A record of partition 0 of topic `t`.
pub fn record(offset: i64, id: &str, script: &str) -> Record {
    Record {
        topic: "t".into(),
        topic_id: None,
        partition: 0,
        offset,
        timestamp_ms: 1_700_000_000_000 + offset,
        key: None,
        headers: vec![("id".to_owned(), id.as_bytes().to_vec())],
        payload: Some(script.as_bytes().to_vec()),
    }
}

/// Records with offsets from 0, for messages that only take effect.
pub fn records<'a>(ids: impl IntoIterator<Item = &'a str>) -> Vec<Record> {
    (0..).zip(ids).map(|(offset, id)| record(offset, id, "")).collect()
}

/// A host's hold on partition 0, as a broker's worker has it.
pub async fn open(host: &Arc<ConsumerInbox>, next_offset: i64) -> PartitionInbox {
    PartitionInbox::open(host.clone(), "t", 0, next_offset).await.expect("the partition")
}

/// Offers records until all are settled, again after an error. It ends after a pause without
/// progress. The answer lists the errors.
pub async fn drive(partition: &mut PartitionInbox, records: &[Record]) -> Vec<InboxError> {
    let (mut settled, mut errors, mut deadline) = (0, Vec::new(), Instant::now() + DEADLINE);
    while settled < records.len() {
        assert!(
            Instant::now() < deadline,
            "settled {settled} of {} records; {} errors, the first {:?}, the last {:?}",
            records.len(),
            errors.len(),
            errors.first(),
            errors.last()
        );
        partition.ready(&records[settled..]).await;
        match partition.process(&records[settled..]).await {
            Ok(0) => panic!("no progress at record {settled}"),
            Ok(count) => {
                settled += count;
                deadline = Instant::now() + DEADLINE;
            }
            Err(error) => {
                errors.push(error);
                sleep(Duration::from_millis(20)).await;
            }
        }
    }
    errors
}

/// A host's hold on partition 0 after a hand-over that was clean: at an offset where nobody died.
pub async fn take(host: &Arc<ConsumerInbox>) -> PartitionInbox {
    static NEXT: AtomicI64 = AtomicI64::new(1_000_000);
    open(host, NEXT.fetch_add(1, Ordering::Relaxed)).await
}

/// A partition taken, driven to its end and given up.
pub async fn deliver(host: &Arc<ConsumerInbox>, records: &[Record]) -> Vec<InboxError> {
    let mut partition = take(host).await;
    let errors = drive(&mut partition, records).await;
    partition.close().await;
    errors
}

/// One round of a retry worker.
pub async fn step(host: &ConsumerInbox) -> Result<usize, InboxError> {
    retry::step(host, &CancellationToken::new()).await
}
