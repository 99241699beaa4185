//! A real host between a server of its own and a broker, with two tenants: one that is attacked,
//! one that attacks.

use std::{
    collections::{BTreeMap, HashMap},
    fs::File,
    net::SocketAddr,
    path::PathBuf,
    process::{Command, Stdio},
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    time::Duration,
};

use oncebox_control::{Control, MasterKey, NewDeployment, NewToken, Tenant, TokenRole, schema};
use oncebox_devkit::local::{
    broker::MockBroker,
    free_port,
    postgres::{PostgresOptions, PrivatePostgres},
    process::Child,
};
use oncebox_model::policy::Policy;
use oncebox_tests::{attacks::FUNCTIONS, http, program, temp_dir::own_path, wait::DEADLINE};
use rdkafka::{
    ClientConfig,
    message::{Header, OwnedHeaders},
    producer::{FutureProducer, FutureRecord},
};
use serde_json::Value;
use sqlx::{AssertSqlSafe, Connection, Executor, PgConnection, PgPool, postgres::PgPoolOptions};
use tokio::{
    task::JoinHandle,
    time::{Instant, sleep},
};

const LEDGER: &[u8] = include_bytes!("../../../../guest-examples/components/ledger.wasm");
const LEDGER_SCHEMA: &str = include_str!("../../../../guest-examples/ledger/schema.sql");

/// The attacker's tables: what it takes goes into `loot`.
const LOOT: &str = "CREATE TABLE effect (consumer text NOT NULL, message_id text NOT NULL, attempt \
    int NOT NULL, version int NOT NULL); \
    CREATE TABLE loot (what text); CREATE TABLE note (id int PRIMARY KEY, text text NOT NULL); \
    INSERT INTO note VALUES (1, 'one'); \
    CREATE TABLE many (n int) PARTITION BY RANGE (n);";

/// Names that the catalogs show to everybody, in the victim's schema.
pub const SEEN: &str = "seen_by_all";

/// Small caps, so that they are reached quickly; and nothing that would have its messages wait.
const ATTACKER: &str = "topics = ['attacks', 'books']
ack = 'after_commit'
identity = { id = [{ header = 'id' }], event_type = [{ header = 'type' }] }
retry = { attempts_max = 2, backoff_min_ms = 1, backoff_max_ms = 1, workers = 4 }
breaker = { enabled = false }
limits = { statements_max = 50, statement_texts_max = 30, statement_bytes_max = 20000, params_max \
    = 100, params_bytes_max = 100000, \
rows_max = 100, result_bytes_max = 100000, savepoints_max = 4, log_bytes_max = 60000, \
outcome_bytes_max = 1000, deadline_ms = 8000 }";

/// A host with an attacking tenant and its victim, on a server, a broker and an address of its own.
pub struct HostileFixture {
    pub control: Control,
    /// A superuser's.
    pub pool: PgPool,
    pub victim: Tenant,
    pub attacker: Tenant,
    /// The victim's consumers: one that works, one whose rows only lie there.
    pub load: i32,
    pub still: i32,
    pub evil: i32,
    /// What nobody but the victim and the host may see.
    pub marker: String,
    pub secrets: Vec<String>,
    pub token: String,
    api: SocketAddr,
    http: SocketAddr,
    host: Option<Child>,
    producer: FutureProducer,
    dir: PathBuf,
    key: String,
    url: String,
    brokers: String,
    _broker: MockBroker,
    _postgres: PrivatePostgres,
}

impl HostileFixture {
    pub async fn new() -> Self {
        let dir = own_path("hostile");
        std::fs::create_dir_all(&dir).unwrap();
        // Everything that the server is asked is in its log, so that what must not be there would
        // be.
        let options = PostgresOptions::new(dir.join("postgres"))
            .tcp(true)
            .setting("fsync", "off")
            .setting("log_min_duration_statement", "0")
            .setting("log_parameter_max_length_on_error", "0");
        let postgres = tokio::task::spawn_blocking(move || PrivatePostgres::start(options))
            .await
            .unwrap()
            .unwrap();
        let url = postgres.url();
        let open = schema::migrate(&url.parse().unwrap()).await.unwrap();
        assert!(open.is_empty(), "{open:?}");
        let pool = PgPoolOptions::new().max_connections(6).connect(&url).await.unwrap();
        let (broker, marker, key) = (
            MockBroker::start().unwrap(),
            format!("mark{:016x}", rand::random::<u64>()),
            MasterKey::generate(),
        );
        let control =
            Control::new(url.parse().unwrap(), MasterKey::parse(&key).unwrap(), marker.clone());
        let (victim, load, still) = victim(&control, &pool, &marker).await;
        let (attacker, evil) = attacker(&control, &pool).await;
        let new = NewToken {
            name: "mallory",
            role: TokenRole::Admin,
            tenant: Some(&attacker.name),
            expires_at: None,
        };
        let token =
            control.acting_as("mallory").tokens().create(&new).await.unwrap().1.reveal().to_owned();
        for topic in [format!("payments.{marker}").as_str(), "attacks", "books"] {
            broker.create_topic(topic, 4).unwrap();
        }
        let secrets = secrets(&control, &pool, &victim, &key).await;
        let brokers = broker.bootstrap().to_owned();
        let mut producer = ClientConfig::new();
        let producer = producer
            .set("bootstrap.servers", &brokers)
            .set("linger.ms", "1")
            .set("log_level", "0")
            .create()
            .unwrap();
        let address = || SocketAddr::from(([127, 0, 0, 1], free_port().unwrap()));
        let (api, http) = (address(), address());
        Self {
            control,
            pool,
            victim,
            attacker,
            load,
            still,
            evil,
            marker,
            secrets,
            token,
            api,
            http,
            host: None,
            producer,
            dir,
            key,
            url,
            brokers,
            _broker: broker,
            _postgres: postgres,
        }
    }

    /// A handler of the attacker.
    pub async fn deploy(&self, event_type: &str, component: &[u8], deadline_ms: u32) {
        let name =
            format!("h-{}", hex::encode(&<sha2::Sha256 as sha2::Digest>::digest(event_type)[..8]));
        let mut deployment = NewDeployment::stable(event_type, &name, "");
        deployment.limits.insert("deadline_ms".to_owned(), deadline_ms.into());
        self.control
            .acting_as("mallory")
            .versions()
            .deploy_compiled(&self.attacker.name, "evil", deployment, component)
            .await
            .unwrap();
    }

    /// Start the host, and wait until it runs everything that was deployed.
    pub async fn open(&mut self) {
        let log = File::create(self.log_path()).unwrap();
        let mut command = Command::new(program::path().unwrap());
        for (name, _) in std::env::vars().filter(|(name, _)| name.starts_with("ONCEBOX_")) {
            command.env_remove(name);
        }
        command
            .arg("serve")
            .env("ONCEBOX_DATABASE_URL", &self.url)
            .env("ONCEBOX_MASTER_KEY", &self.key)
            .env("ONCEBOX_KAFKA_BROKERS", &self.brokers)
            .env("ONCEBOX_HTTP_LISTEN", self.http.to_string())
            .env("ONCEBOX_API_LISTEN", self.api.to_string())
            .env("ONCEBOX_RUNTIME_CACHE_DIR", self.dir.join("cache"))
            .env("ONCEBOX_LOG_FORMAT", "json")
            .env(
                "ONCEBOX_LOG_LEVEL",
                "trace,sqlx=warn,sqlx::postgres::notice=off,h2=info,hyper=info,rdkafka=info,wasmtime=info,cranelift=info",
            )
            .stdin(Stdio::null())
            .stdout(log.try_clone().unwrap())
            .stderr(log);
        self.host = Some(Child::spawn(command, libc::SIGKILL).unwrap());
        let deadline = Instant::now() + DEADLINE;
        while !self
            .get_from(self.http, "/readyz", "")
            .await
            .is_some_and(|answer| answer.starts_with("HTTP/1.1 200"))
        {
            assert!(
                self.is_running() && Instant::now() < deadline,
                "the host does not become ready: {}",
                self.log()
            );
            sleep(Duration::from_millis(100)).await;
        }
        const SWITCHED: &str = "SELECT count(*) = 2 FROM oncebox.host_consumer h JOIN \
            oncebox.consumer c USING (consumer_id) \
            WHERE c.consumer_id = ANY ($1) AND h.generation = c.generation";
        loop {
            let switched: bool = sqlx::query_scalar(SWITCHED)
                .bind([self.load, self.evil])
                .fetch_one(&self.pool)
                .await
                .unwrap();
            if switched {
                break;
            }
            assert!(Instant::now() < deadline, "the host does not switch: {}", self.log());
            sleep(Duration::from_millis(100)).await;
        }
    }

    pub fn is_running(&self) -> bool {
        self.host.as_ref().unwrap().is_running()
    }

    fn log_path(&self) -> PathBuf {
        self.dir.join("host.log")
    }

    pub fn log(&self) -> String {
        String::from_utf8_lossy(&std::fs::read(self.log_path()).unwrap_or_default()).into_owned()
    }

    /// What the database server wrote.
    pub fn server_log(&self) -> String {
        String::from_utf8_lossy(&std::fs::read(self.dir.join("postgres/postgres.log")).unwrap())
            .into_owned()
    }

    /// Publish a message of the attacker.
    pub async fn send(&self, topic: &str, event_type: &str, id: &str, payload: &[u8]) {
        publish(&self.producer, topic, event_type, id, payload, "").await;
    }

    /// Messages of the victim, one after the other, until told to stop. The answer is how many
    /// there were.
    pub fn start_load(&self) -> (Arc<AtomicBool>, Arc<AtomicUsize>, JoinHandle<()>) {
        let (stop, sent) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicUsize::new(0)));
        let (producer, marker, told, count) =
            (self.producer.clone(), self.marker.clone(), stop.clone(), sent.clone());
        let running = tokio::spawn(async move {
            while !told.load(Ordering::Relaxed) {
                let number = count.load(Ordering::Relaxed);
                let payload = format!(
                    r#"{{"account":"a-{marker}","amount":"1","open_account":false,"note":"{marker}"}}"#
                );
                let (topic, kind, id) = (
                    format!("payments.{marker}"),
                    format!("paid.{marker}"),
                    format!("{marker}-{number}"),
                );
                publish(&producer, &topic, &kind, &id, payload.as_bytes(), &marker).await;
                count.fetch_add(1, Ordering::Relaxed);
                sleep(Duration::from_millis(40)).await;
            }
        });
        (stop, sent, running)
    }

    /// Wait until so many messages of a consumer are settled; as long as it takes, while there are
    /// ever more.
    pub async fn settled(&self, consumer: i32, count: usize) {
        const SETTLED: &str = "SELECT count(*) FROM oncebox.inbox WHERE consumer_id = $1 AND \
            processed_at IS NOT NULL";
        let (mut last, mut deadline) = (0, Instant::now() + DEADLINE);
        loop {
            let settled: i64 =
                sqlx::query_scalar(SETTLED).bind(consumer).fetch_one(&self.pool).await.unwrap();
            if settled as usize >= count {
                return;
            }
            if settled > last {
                (last, deadline) = (settled, Instant::now() + DEADLINE);
            }
            assert!(self.is_running(), "the host ended: {}", self.log());
            if Instant::now() > deadline {
                let open = format!(
                    "SELECT concat_ws(' ', message_id, status, reason, attempts, last_error) FROM \
                        oncebox.inbox WHERE consumer_id = {consumer} AND processed_at IS NULL \
                        LIMIT 20"
                );
                panic!(
                    "{settled} of {count} settled; the others: {:#?}; the log is {}",
                    self.texts(&open).await,
                    self.log_path().display()
                );
            }
            sleep(Duration::from_millis(100)).await;
        }
    }

    pub async fn texts(&self, sql: &str) -> Vec<String> {
        let rows: Vec<Option<String>> = sqlx::query_scalar(AssertSqlSafe(sql.to_owned()))
            .fetch_all(&self.pool)
            .await
            .unwrap_or_else(|error| panic!("`{sql}`: {error}"));
        rows.into_iter().map(Option::unwrap_or_default).collect()
    }

    /// What the API answers the attacker, head and body.
    pub async fn ask(&self, method: &str, path: &str, body: Option<&Value>) -> String {
        let body = body.map(Value::to_string).unwrap_or_default();
        let request = format!(
            "{method} {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\nauthorization: \
                Bearer {}\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n{body}",
            self.token,
            body.len()
        );
        exchange(self.api, &request)
            .await
            .unwrap_or_else(|| panic!("the API does not answer {method} {path}"))
    }

    async fn get_from(&self, address: SocketAddr, path: &str, headers: &str) -> Option<String> {
        exchange(
            address,
            &format!(
                "GET {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n{headers}\r\n"
            ),
        )
        .await
    }

    /// End, with everything it left.
    pub fn strike(mut self) {
        if let Some(host) = &mut self.host {
            host.end(&[(libc::SIGKILL, Duration::from_secs(10))]);
        }
        let _ = std::fs::remove_dir_all(&self.dir); // the next test removes what is left
    }
}

async fn exchange(address: SocketAddr, request: &str) -> Option<String> {
    http::exchange(address, request, DEADLINE).await
}

async fn publish(
    producer: &FutureProducer,
    topic: &str,
    event_type: &str,
    id: &str,
    payload: &[u8],
    key: &str,
) {
    let header = |key, value| Header { key, value: Some(value) };
    let headers = OwnedHeaders::new()
        .insert(header("id", id))
        .insert(header("type", event_type))
        .insert(header("note", key));
    let mut record = FutureRecord::to(topic).payload(payload).headers(headers);
    if !key.is_empty() {
        record = record.key(key).partition(rand::random_range(0..4));
    }
    producer.send(record, Duration::from_secs(10)).await.unwrap();
}

/// A tenant all of whose rows, ids and names bear the marker, but for names that the catalogs show.
async fn victim(control: &Control, pool: &PgPool, marker: &str) -> (Tenant, i32, i32) {
    let victim = control.tenants().create("victim").await.unwrap();
    let tables = format!(
        "{LEDGER_SCHEMA} CREATE TABLE vault (secret text, {SEEN}_column int); INSERT INTO vault \
            SELECT '{marker}' FROM generate_series(1, 50); \
         COMMENT ON TABLE vault IS '{SEEN}'; CREATE TABLE {SEEN} (n int DEFAULT length('{SEEN}') \
         CONSTRAINT {SEEN}_check CHECK (n > 0)); \
         CREATE VIEW window_{SEEN} AS SELECT secret FROM vault; CREATE INDEX {SEEN}_index ON vault \
         (secret); \
         CREATE SEQUENCE {SEEN}_sequence; INSERT INTO account VALUES ('a-{marker}'), \
         ('b-{marker}')"
    );
    control
        .tenant_databases()
        .apply_migration(&victim, &format!("tables-{marker}"), &tables)
        .await
        .unwrap();
    let policy = |topic: &str| {
        let text = format!(
            "topics = ['{topic}']\nack = 'after_commit'\nidentity = {{ id = [{{ header = 'id' }}], \
                event_type = [{{ header = 'type' }}] }}\npayload = 'all'"
        );
        Policy::parse(&text).unwrap()
    };
    let load = control
        .consumers()
        .create("victim", "load", &policy(&format!("payments.{marker}")))
        .await
        .unwrap()
        .consumer_id;
    let still = control
        .consumers()
        .create("victim", &format!("still-{marker}"), &policy(&format!("still.{marker}")))
        .await
        .unwrap()
        .consumer_id;
    let mut deployment =
        NewDeployment::stable(&format!("paid.{marker}"), &format!("ledger-{marker}"), "");
    deployment.settings.insert(marker.to_owned(), Value::from(marker));
    control.versions().deploy_compiled("victim", "load", deployment, LEDGER).await.unwrap();
    let new = NewToken {
        name: marker,
        role: TokenRole::Viewer,
        tenant: Some("victim"),
        expires_at: None,
    };
    control.tokens().create(&new).await.unwrap();
    let rows = format!(
        "INSERT INTO oncebox.inbox (consumer_id, message_id, retention_class, bucket, topic, \
            partition, \"offset\", record_timestamp_ms, key, source, \
             event_type, status, reason, last_error, result, payload, headers, processed_at) \
         SELECT {still}, '{marker}-' || s || n, 1, oncebox.bucket_at(1::smallint, now()), \
         'still.{marker}', 0, n, 1, '{marker}', '{marker}', 'paid.{marker}', \
             s, '{marker}', '{marker}', to_jsonb('{marker}'::text), '{marker}', '{marker}', now() \
         FROM generate_series(1, 20) n, unnest(ARRAY['completed', 'parked', 'failed_terminal']) s;
         INSERT INTO oncebox.inbox_history (consumer_id, message_id, event, reason, error, actor)
         SELECT {still}, '{marker}-' || n, 'failed', '{marker}', '{marker}', '{marker}' FROM \
            generate_series(1, 20) n;
         INSERT INTO oncebox.inbox_edit (consumer_id, message_id, edit_number, payload)
         SELECT {still}, '{marker}-' || n, 1, '{marker}' FROM generate_series(1, 20) n;
         INSERT INTO oncebox.copying VALUES ({still}, '{marker}', 'infinity');
         INSERT INTO oncebox.sequence_position (consumer_id, key_hash, version)
         SELECT {still}, sha256(convert_to('{marker}-' || n, 'UTF8')), n FROM generate_series(1, \
            20) n"
    );
    pool.execute(sqlx::raw_sql(AssertSqlSafe(rows))).await.unwrap();
    (victim, load, still)
}

/// A tenant that may even write functions.
async fn attacker(control: &Control, pool: &PgPool) -> (Tenant, i32) {
    let control = control.acting_as("mallory");
    let attacker = control.tenants().create("mallory").await.unwrap();
    pool.execute(AssertSqlSafe(format!(
        "GRANT USAGE ON LANGUAGE plpgsql TO {}",
        attacker.owner_login
    )))
    .await
    .unwrap();
    // Rows of an account are run as they are opened, so that the ledger, which is of Rust, runs
    // what it is sent.
    let tables = format!(
        "{LOOT} {FUNCTIONS} {LEDGER_SCHEMA} \
         CREATE FUNCTION run_account() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN EXECUTE \
         NEW.account; RETURN NEW; END $$; \
         CREATE TRIGGER run BEFORE INSERT ON account FOR EACH ROW EXECUTE FUNCTION run_account(); \
         CREATE FUNCTION deep(n int) RETURNS int LANGUAGE plpgsql AS $$ BEGIN RETURN deep(n + 1); \
         END $$; \
         DO $$ BEGIN FOR i IN 1..400 LOOP EXECUTE format('CREATE TABLE many_%s PARTITION OF many \
         FOR VALUES FROM (%s) TO (%s)', i, i, i + 1); END LOOP; \
         CREATE DOMAIN d0 AS int; FOR i IN 1..300 LOOP EXECUTE format('CREATE DOMAIN d%s AS d%s', \
         i, i - 1); END LOOP; \
         CREATE TYPE c0 AS (a int); FOR i IN 1..300 LOOP EXECUTE format('CREATE TYPE c%s AS (a \
         c%s)', i, i - 1); END LOOP; END $$"
    );
    // Not as a migration, of which most of this is none: the attacker is stronger here than any
    // tenant is.
    let password = control.tenant_databases().credentials(&attacker).unwrap().owner_password;
    let options =
        pool.connect_options().as_ref().clone().username(&attacker.owner_login).password(&password);
    let mut owner =
        PgConnection::connect_with(&options.options([("search_path", &attacker.schema_name)]))
            .await
            .unwrap();
    owner.execute(sqlx::raw_sql(AssertSqlSafe(tables))).await.unwrap();
    owner.close().await.unwrap();
    let evil = control
        .consumers()
        .create("mallory", "evil", &Policy::parse(ATTACKER).unwrap())
        .await
        .unwrap()
        .consumer_id;
    let mut deployment = NewDeployment::stable("book", "ledger", "");
    deployment.limits.insert("deadline_ms".to_owned(), 1_500.into());
    control.versions().deploy_compiled("mallory", "evil", deployment, LEDGER).await.unwrap();
    (attacker, evil)
}

/// Passwords, secrets and what is made of them.
async fn secrets(control: &Control, pool: &PgPool, victim: &Tenant, key: &str) -> Vec<String> {
    let credentials = control.tenant_databases().credentials(victim).unwrap();
    let mut secrets = vec![
        key.to_owned(),
        credentials.guest_password,
        credentials.owner_password,
        hex::encode(credentials.secret),
        hex::encode(credentials.random_key),
    ];
    const STORED: &str = "SELECT rolpassword FROM pg_authid WHERE rolpassword IS NOT NULL UNION \
        ALL SELECT encode(secret_hash, 'hex') FROM oncebox.tenant \
        UNION ALL SELECT encode(hash, 'hex') FROM oncebox.token";
    secrets.extend(sqlx::query_scalar::<_, String>(STORED).fetch_all(pool).await.unwrap());
    secrets
}

/// What sessions of the server show of their statements, again and again.
pub struct Watch {
    seen: Arc<Mutex<HashMap<String, String>>>,
    stop: Arc<AtomicBool>,
    running: JoinHandle<()>,
}

impl Watch {
    pub fn start(pool: &PgPool) -> Self {
        let (seen, stop) =
            (Arc::<Mutex<HashMap<String, String>>>::default(), Arc::new(AtomicBool::new(false)));
        let (pool, kept, told) = (pool.clone(), seen.clone(), stop.clone());
        let running = tokio::spawn(async move {
            while !told.load(Ordering::Relaxed) {
                const SHOWN: &str = "SELECT coalesce(query, ''), coalesce(usename, '') FROM \
                    pg_stat_activity WHERE pid <> pg_backend_pid() AND backend_type = 'client \
                    backend'";
                if let Ok(rows) =
                    sqlx::query_as::<_, (String, String)>(SHOWN).fetch_all(&pool).await
                {
                    kept.lock().unwrap().extend(rows);
                }
                sleep(Duration::from_millis(50)).await;
            }
        });
        Self { seen, stop, running }
    }

    pub async fn end(self) -> BTreeMap<String, String> {
        self.stop.store(true, Ordering::Relaxed);
        self.running.await.unwrap();
        self.seen.lock().unwrap().clone().into_iter().collect()
    }
}
