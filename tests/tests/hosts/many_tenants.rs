//! Many tenants in one host: what has nothing to do costs next to nothing, and who comes later
//! disturbs nobody.
//!
//! `ONCEBOX_TEST_TENANTS` says how many tenants there are (120 by default); the figures are
//! printed.

use std::{
    collections::BTreeMap,
    fs,
    net::SocketAddr,
    process::{Command, Stdio},
    time::Duration,
};

use futures::{StreamExt, TryStreamExt, stream};
use oncebox_control::{Control, MasterKey, NamedDatabases, NewDeployment, Tenant};
use oncebox_devkit::local::{broker::MockBroker, free_port};
use oncebox_model::policy::Policy;
use oncebox_tests::{
    host::{HostProcess, program},
    inbox,
    load::{Load, Work},
    postgres::TestDatabase,
    program::WorkingDir,
    wait::{self, DEADLINE},
};
use rdkafka::{
    ClientConfig,
    message::{Header, OwnedHeaders},
    producer::{FutureProducer, FutureRecord},
};
use sqlx::{AssertSqlSafe, PgPool, postgres::PgPoolOptions};
use tokio::time::{Instant, sleep};

const COMPONENT: &[u8] = include_bytes!("../../../guest-examples/components/ledger.wasm");
const SCHEMA: &str = include_str!("../../../guest-examples/ledger/schema.sql");
const CONSUMER: &str = "payments";
/// Tenants with something to do.
const BUSY: usize = 20;
/// The host's budget of tenants' connections.
const CONNECTIONS_MAX: usize = 32;
/// Threads of a librdkafka client and of the thread that polls it, at most.
const THREADS_OF_CLIENT: usize = 8;
/// Threads of a host without consumers, at most.
const THREADS_OF_HOST: usize = 60;

/// A database with many tenants, or several, a broker with a topic for each, and a host.
pub(crate) struct ManyTenants {
    pub(crate) control: Control,
    pool: PgPool,
    pub(crate) tenants: Vec<Tenant>,
    broker: MockBroker,
    producer: FutureProducer,
    key: String,
    folder: WorkingDir,
    database: HostDatabase,
    /// Settings of the host.
    config: String,
}

/// The host's database: one of the tests, or one that a test has made.
enum HostDatabase {
    OfTests(TestDatabase),
    At(String),
}

impl HostDatabase {
    fn url(&self) -> &str {
        match self {
            Self::OfTests(database) => database.url(),
            Self::At(url) => url,
        }
    }
}

impl ManyTenants {
    async fn new(size: usize) -> Self {
        Self::placed(size, NamedDatabases::default(), "").await
    }

    /// Tenants that are placed in some databases. `config` is the host's configuration.
    pub(crate) async fn placed(size: usize, databases: NamedDatabases, config: &str) -> Self {
        let database = TestDatabase::create(&inbox::SOURCE, async |url: &str| {
            inbox::prepare(&url.parse()?).await
        })
        .await
        .unwrap();
        Self::on(HostDatabase::OfTests(database), size, databases, config).await
    }

    /// Tenants in a database that is up to date, which the login of this URL reaches.
    pub(crate) async fn at(url: &str, size: usize) -> Self {
        Self::on(HostDatabase::At(url.to_owned()), size, NamedDatabases::default(), "").await
    }

    async fn on(
        database: HostDatabase,
        size: usize,
        databases: NamedDatabases,
        config: &str,
    ) -> Self {
        let pool = PgPoolOptions::new().max_connections(4).connect_lazy(database.url()).unwrap();
        let key = MasterKey::generate();
        let control =
            Control::new(database.url().parse().unwrap(), MasterKey::parse(&key).unwrap(), "test")
                .placing_in(databases);
        let broker = MockBroker::start().unwrap();
        let producer = ClientConfig::new()
            .set("bootstrap.servers", broker.bootstrap())
            .set("linger.ms", "1")
            .create()
            .unwrap();
        let folder = WorkingDir::new().unwrap();
        let (tenants, config) = (Vec::new(), config.to_owned());
        let mut fixture =
            Self { control, pool, tenants, broker, producer, key, folder, database, config };
        let joined = stream::iter(0..size)
            .map(|number| fixture.join(number))
            .buffered(4)
            .collect::<Vec<_>>()
            .await;
        fixture.tenants = joined;
        fixture
    }

    /// One tenant more, with a consumer and its handler.
    pub(crate) async fn join(&self, number: usize) -> Tenant {
        let topic = topic(number);
        self.broker.create_topic(&topic, 1).unwrap();
        let tenant = self.control.tenants().create(&format!("t-{number}")).await.unwrap();
        self.control.tenant_databases().apply_migration(&tenant, "tables", SCHEMA).await.unwrap();
        let policy = format!(
            "topics = ['{topic}']\nack = 'after_commit'\n\
             identity = {{ id = [{{ header = 'id' }}], event_type = [{{ header = 'type' }}] }}\n\
             retry = {{ attempts_max = 20, backoff_min_ms = 50, backoff_max_ms = 200 }}"
        );
        self.control
            .consumers()
            .create(&tenant.name, CONSUMER, &Policy::parse(&policy).unwrap())
            .await
            .unwrap();
        let deployment = NewDeployment::stable("payment.captured", "ledger", "");
        self.control
            .versions()
            .deploy_compiled(&tenant.name, CONSUMER, deployment, COMPONENT)
            .await
            .unwrap();
        tenant
    }

    pub(crate) fn start(&self) -> HostProcess {
        let http = SocketAddr::from(([127, 0, 0, 1], free_port().unwrap()));
        let log = self.folder.dir().join("host.log");
        let output = fs::File::create(&log).unwrap();
        // A session's length is what the embedded broker lets a group wait for that everyone has
        // left.
        self.folder
            .write(
                "host.toml",
                format!(
                    "[kafka.properties]\n'session.timeout.ms' = '3000'\n\
                    'heartbeat.interval.ms' = '500'\n{}",
                    self.config
                ),
            )
            .unwrap();
        let mut command = Command::new(program().unwrap());
        for (variable, _) in
            std::env::vars().filter(|(variable, _)| variable.starts_with("ONCEBOX_"))
        {
            command.env_remove(variable);
        }
        command
            .arg("serve")
            .env("ONCEBOX_CONFIG", self.folder.dir().join("host.toml"))
            .env("ONCEBOX_DATABASE_URL", self.database.url())
            .env("ONCEBOX_DATABASE_CONNECTIONS_MAX", CONNECTIONS_MAX.to_string())
            .env("ONCEBOX_KAFKA_BROKERS", self.broker.bootstrap())
            .env("ONCEBOX_KAFKA_IDLE_AFTER_MS", "4000")
            .env("ONCEBOX_MASTER_KEY", &self.key)
            .env("ONCEBOX_HTTP_LISTEN", http.to_string())
            .env("ONCEBOX_API_LISTEN", "127.0.0.1:0")
            .env("ONCEBOX_RUNTIME_CACHE_DIR", self.folder.dir().join("cache"))
            .env("ONCEBOX_LOG_FORMAT", "text")
            .stdin(Stdio::null())
            .stdout(output.try_clone().unwrap())
            .stderr(output);
        HostProcess::spawn("many-tenants", command, http, log).unwrap()
    }

    /// Send a load to a tenant's topic.
    pub(crate) async fn send(&self, number: usize, load: &Load) {
        let open = format!(
            "INSERT INTO {}.account (account) SELECT unnest($1::text[]) ON CONFLICT DO NOTHING",
            self.tenants[number].schema_name
        );
        let pool = self.pool_of(number);
        sqlx::query(AssertSqlSafe(open)).bind(load.accounts()).execute(&pool).await.unwrap();
        for message in &load.deliveries {
            let headers = OwnedHeaders::new()
                .insert(Header { key: "type", value: Some(message.event_type()) })
                .insert(Header { key: "id", value: Some(&message.id) });
            let (topic, payload) = (topic(number), message.payload());
            let record =
                FutureRecord::<(), _>::to(&topic).partition(0).payload(&payload).headers(headers);
            self.producer.send(record, DEADLINE).await.unwrap();
        }
    }

    /// Connections to the database of a tenant.
    pub(crate) fn pool_of(&self, number: usize) -> PgPool {
        self.control.tenant_databases().get(&self.tenants[number]).unwrap().pool
    }

    /// Effects of a tenant: entries, and different messages among them.
    pub(crate) async fn effects(&self, number: usize) -> (i64, i64) {
        let sql = format!(
            "SELECT count(*), count(DISTINCT message_id) FROM {}.ledger_entry",
            self.tenants[number].schema_name
        );
        sqlx::query_as(AssertSqlSafe(sql)).fetch_one(&self.pool_of(number)).await.unwrap()
    }

    pub(crate) async fn wait_effects(&self, number: usize, count: i64) {
        wait::until(
            DEADLINE,
            Duration::from_millis(50),
            async || Ok(self.effects(number).await == (count, count)),
            async || {
                let effects = self.effects(number).await;
                format!("tenant {number}: {effects:?} effects instead of {count}")
            },
        )
        .await
        .unwrap();
    }

    /// Connections by tenants' logins.
    async fn sessions(&self) -> BTreeMap<String, i64> {
        const SESSIONS: &str = "SELECT t.login, count(*) FROM pg_stat_activity a JOIN \
            oncebox.tenant t ON t.login = a.usename \
            WHERE a.datname = current_database() GROUP BY 1";
        sqlx::query_as(SESSIONS).fetch_all(&self.pool).await.unwrap().into_iter().collect()
    }

    /// Longest pause between two completed messages of a consumer since a moment, milliseconds.
    async fn longest_pause(&self, tenants: usize, since: chrono::DateTime<chrono::Utc>) -> f64 {
        const PAUSE: &str = "SELECT coalesce(max(p), 0)::float8 FROM (SELECT extract(epoch FROM \
            processed_at - lag(processed_at) OVER (PARTITION BY consumer_id ORDER BY \
            processed_at)) * 1000 AS p \
            FROM oncebox.inbox_message WHERE status = 'completed' AND processed_at > $1 AND \
            tenant_name = ANY ($2)) x";
        let names: Vec<_> =
            self.tenants[..tenants].iter().map(|tenant| tenant.name.clone()).collect();
        sqlx::query_scalar(PAUSE).bind(since).bind(names).fetch_one(&self.pool).await.unwrap()
    }
}

fn topic(number: usize) -> String {
    format!("payments.{number}")
}

/// Returns the sum of a metric's samples whose line holds a text.
async fn metric(host: &HostProcess, name: &str, holds: &str) -> usize {
    let metrics = host.metrics().await.unwrap();
    let lines = metrics.lines().filter(|line| line.starts_with(name) && line.contains(holds));
    lines.filter_map(|line| line.rsplit(' ').next()?.parse::<f64>().ok()).sum::<f64>() as usize
}

async fn consumers(host: &HostProcess, state: &str) -> usize {
    metric(host, "oncebox_consumers", &format!("state=\"{state}\"")).await
}

pub(crate) async fn wait_consumers(host: &HostProcess, state: &str, count: usize) {
    wait::until(
        DEADLINE,
        Duration::from_millis(100),
        async || Ok(consumers(host, state).await == count),
        async || format!("{} consumers are {state}, not {count}", consumers(host, state).await),
    )
    .await
    .unwrap();
}

fn threads(host: &HostProcess) -> usize {
    fs::read_dir(format!("/proc/{}/task", host.pid())).unwrap().count()
}

fn memory_mb(host: &HostProcess) -> usize {
    let status = fs::read_to_string(format!("/proc/{}/status", host.pid())).unwrap();
    let line = status.lines().find(|line| line.starts_with("VmRSS:")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse::<usize>().unwrap() / 1024
}

/// Returns the processor time so far, milliseconds.
fn cpu_ms(host: &HostProcess) -> u64 {
    let stat = fs::read_to_string(format!("/proc/{}/stat", host.pid())).unwrap();
    let fields: Vec<_> = stat.rsplit(')').next().unwrap().split_whitespace().collect();
    10 * (fields[11].parse::<u64>().unwrap() + fields[12].parse::<u64>().unwrap())
}

async fn print(host: &HostProcess, when: &str, fixture: &ManyTenants) {
    let sessions = fixture.sessions().await;
    println!(
        "{when}: {} open, {} idle; {} MB, {} threads, {} connections of {} tenants, {:.1} s of \
            processor time",
        consumers(host, "open").await,
        consumers(host, "idle").await,
        memory_mb(host),
        threads(host),
        sessions.values().sum::<i64>(),
        sessions.len(),
        cpu_ms(host) as f64 / 1000.0,
    );
}

/// Pays, some of which fail at first and are retried.
pub(crate) fn load(name: &str, count: usize) -> Load {
    Load::of((0..count).map(|_| Work::Pay)).named(name)
}

/// What could go wrong: each consumer costs a client with its threads, connections and polls
/// whether it has anything to do or not, so that a host is full with a few dozen; one that rests
/// misses its message; one more makes the others wait. S3-014.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_has_nothing_to_do_costs_next_to_nothing_and_one_more_disturbs_nobody() {
    let size: usize =
        std::env::var("ONCEBOX_TEST_TENANTS").map_or(120, |size| size.parse().unwrap());
    let began = Instant::now();
    let mut fixture = ManyTenants::new(size).await;
    println!("{size} tenants made in {:.1} s", began.elapsed().as_secs_f64());

    let started = Instant::now();
    let host = fixture.start();
    host.wait_ready().await.unwrap();
    println!("ready after {:.1} s", started.elapsed().as_secs_f64());
    wait_consumers(&host, "idle", size).await;
    print(&host, "at rest", &fixture).await;
    assert_eq!(consumers(&host, "open").await, 0);
    assert_eq!(fixture.sessions().await.len(), 0, "a tenant without work holds a connection");
    assert!(threads(&host) <= THREADS_OF_HOST, "{} threads", threads(&host));
    let (before, cpu) = (Instant::now(), cpu_ms(&host));
    let looks = metric(&host, "oncebox_watcher_lookups_total", "").await;
    sleep(Duration::from_secs(5)).await;
    let looks = metric(&host, "oncebox_watcher_lookups_total", "").await - looks;
    let at_rest = (cpu_ms(&host) - cpu) as f64 / before.elapsed().as_millis() as f64;
    println!("at rest: {:.1} % of a core, {looks} requests to the broker in 5 s", at_rest * 100.0);
    // The ends of all partitions together four times a second, topics now and then, each group
    // twice a minute.
    assert!(looks <= 5 * (4 + 1) + size, "{looks} requests in 5 s");

    // Twenty get something to do.
    let first = Instant::now();
    let sent = stream::iter(0..BUSY).map(|number| {
        let (fixture, load) = (&fixture, load("a", 50));
        async move { fixture.send(number, &load).await }
    });
    sent.buffer_unordered(BUSY).collect::<Vec<_>>().await;
    for number in 0..BUSY {
        fixture.wait_effects(number, 50).await;
    }
    println!("{BUSY} woke and took 50 messages each in {:.1} s", first.elapsed().as_secs_f64());
    print(&host, "busy", &fixture).await;
    let (open, sessions) = (consumers(&host, "open").await, fixture.sessions().await);
    assert!(open <= BUSY, "{open} are open");
    assert!(sessions.values().sum::<i64>() <= CONNECTIONS_MAX as i64, "{sessions:?}");
    let busy: Vec<_> = fixture.tenants[..BUSY].iter().map(|tenant| &tenant.login).collect();
    assert!(
        sessions.keys().all(|login| busy.contains(&login)),
        "an idle tenant holds a connection: {sessions:?}"
    );
    assert!(
        threads(&host) <= THREADS_OF_HOST + BUSY * THREADS_OF_CLIENT,
        "{} threads",
        threads(&host)
    );

    // One more comes while they work.
    let since: chrono::DateTime<chrono::Utc> =
        sqlx::query_scalar("SELECT now()").fetch_one(&fixture.pool).await.unwrap();
    let rebalances = metric(&host, "oncebox_kafka_rebalances_total", "").await;
    let joined = {
        let working =
            stream::iter(0..BUSY).map(Ok::<_, ()>).try_for_each_concurrent(BUSY, |number| {
                let fixture = &fixture;
                async move {
                    for part in 0..30 {
                        fixture.send(number, &load(&format!("b-{part}"), 1)).await;
                        sleep(Duration::from_millis(100)).await;
                    }
                    Ok(())
                }
            });
        let joining = async {
            sleep(Duration::from_millis(500)).await;
            fixture.join(size).await
        };
        let (worked, joined) = tokio::join!(working, joining);
        worked.unwrap();
        joined
    };
    fixture.tenants.push(joined);
    let came = Instant::now();
    fixture.send(size, &load("a", 10)).await;
    fixture.wait_effects(size, 10).await;
    println!(
        "number {} took its messages {:.1} s after they came",
        size + 1,
        came.elapsed().as_secs_f64()
    );
    for number in 0..BUSY {
        fixture.wait_effects(number, 80).await;
    }
    let pause = fixture.longest_pause(BUSY, since).await;
    println!("longest pause of a busy tenant meanwhile: {pause:.0} ms");
    let rebalances = metric(&host, "oncebox_kafka_rebalances_total", "").await - rebalances;
    assert_eq!(rebalances, 1, "only the newcomer's partition moved");
    assert_eq!(metric(&host, "oncebox_kafka_inbox_errors_total", "").await, 0);
    assert!(pause < 10_000.0, "a busy tenant waited {pause} ms");
    print(&host, "with one more", &fixture).await;

    // They come to rest, and are woken again.
    wait_consumers(&host, "idle", size + 1).await;
    wait::until(
        DEADLINE,
        Duration::from_millis(500),
        async || Ok(fixture.sessions().await.is_empty()),
        async || format!("connections without use: {:?}", fixture.sessions().await),
    )
    .await
    .unwrap();
    print(&host, "at rest again", &fixture).await;
    assert!(threads(&host) <= THREADS_OF_HOST, "{} threads", threads(&host));
    let came = Instant::now();
    fixture.send(3, &load("c", 1)).await;
    fixture.wait_effects(3, 81).await;
    println!("one that rested took its message after {:.2} s", came.elapsed().as_secs_f64());
    for number in BUSY..size {
        assert_eq!(fixture.effects(number).await, (0, 0));
    }
}
