//! The private PostgreSQL, the embedded broker and the tests' own Kafka do what every other
//! test takes for granted: they keep what was committed, and nothing outlives its owner.

use std::io::{BufRead, BufReader};
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use oncebox_devkit::local::broker::MockBroker;
use oncebox_devkit::local::postgres::{PostgresOptions, PrivatePostgres};
use oncebox_devkit::local::process::is_running;
use oncebox_tests::kafka::KafkaServer;
use oncebox_tests::postgres::{TestDatabase, create_database, drop_database};
use oncebox_tests::temp_dir::TempDir;
use oncebox_tests::wait::DEADLINE;
use rdkafka::ClientConfig;
use rdkafka::Message;
use rdkafka::consumer::{Consumer, StreamConsumer};
use rdkafka::producer::{FutureProducer, FutureRecord};
use sqlx::postgres::PgConnection;
use sqlx::{Connection, Executor};

async fn count(url: &str) -> i64 {
    let mut connection = PgConnection::connect(url).await.unwrap();
    sqlx::query_scalar("SELECT count(*) FROM kept").fetch_one(&mut connection).await.unwrap()
}

/// What could go wrong: a crash loses committed rows, keeps uncommitted ones, or the server
/// comes back under another address.
#[tokio::test]
async fn a_crash_of_the_database_keeps_what_was_committed() {
    let folder = TempDir::new("crash");
    let mut server = PrivatePostgres::start(PostgresOptions::new(folder.path()).tcp(true)).unwrap();
    let url = server.url();
    let mut connection = PgConnection::connect(&url).await.unwrap();
    connection.execute("CREATE TABLE kept AS SELECT 1 AS n").await.unwrap();
    connection.execute("BEGIN; INSERT INTO kept VALUES (2)").await.unwrap();
    server.restart_immediate().unwrap();
    assert!(connection.execute("COMMIT").await.is_err(), "the session survived the crash");
    assert_eq!(server.url(), url);
    assert_eq!(count(&url).await, 1);
}

/// What could go wrong: a second run makes a new cluster, or cannot log in to the old one.
#[tokio::test]
async fn a_database_is_there_again_in_the_next_run() {
    let folder = TempDir::new("again");
    let options = PostgresOptions::new(folder.path());
    let mut first = PrivatePostgres::start(options.clone()).unwrap();
    let mut connection = PgConnection::connect_with(&first.connect_options()).await.unwrap();
    connection.execute("CREATE TABLE kept AS SELECT 1 AS n").await.unwrap();
    let refused = PrivatePostgres::start(options.clone()).unwrap_err();
    assert!(refused.to_string().contains("in use by another process"), "{refused:#}");
    first.stop().unwrap();
    drop(first);
    let second = PrivatePostgres::start(options).unwrap();
    assert_eq!(count(&second.url()).await, 1);
}

/// What could go wrong: Ctrl-C in a terminal reaches the server as well, so that a host cannot
/// drain what it runs.
#[test]
fn the_database_is_no_member_of_its_parents_process_group() {
    let folder = TempDir::new("group");
    let server = PrivatePostgres::start(PostgresOptions::new(folder.path())).unwrap();
    // SAFETY: plain system calls with integer arguments.
    let (own, of_server) = unsafe { (libc::getpgid(0), libc::getpgid(server.pid().unwrap())) };
    assert!(of_server > 0 && of_server != own, "both are in group {own}");
}

/// What could go wrong: a password file that others can read, a server without the memory
/// limit, or a limit so tight that parallel workers do not start.
#[tokio::test]
async fn the_private_server_is_closed_and_limited() {
    let folder = TempDir::new("limits");
    let server =
        PrivatePostgres::start(PostgresOptions::new(folder.path()).setting("work_mem", "8MB"))
            .unwrap();
    let password = std::fs::metadata(folder.path().join("password")).unwrap();
    assert_eq!(std::os::unix::fs::PermissionsExt::mode(&password.permissions()) & 0o777, 0o600);
    let anonymous = server.connect_options().password("guess");
    assert!(PgConnection::connect_with(&anonymous).await.is_err());
    let mut connection = PgConnection::connect_with(&server.connect_options()).await.unwrap();
    let fsync: String = sqlx::query_scalar("SHOW fsync").fetch_one(&mut connection).await.unwrap();
    let work_mem: String =
        sqlx::query_scalar("SHOW work_mem").fetch_one(&mut connection).await.unwrap();
    assert_eq!((fsync.as_str(), work_mem.as_str()), ("on", "8MB"));
    connection
        .execute("CREATE TABLE kept AS SELECT n FROM generate_series(1, 200000) n; ANALYZE kept")
        .await
        .unwrap();
    connection
        .execute(
            "SET parallel_setup_cost = 0; SET parallel_tuple_cost = 0; SET \
        min_parallel_table_scan_size = 0",
        )
        .await
        .unwrap();
    let plan: Vec<String> = sqlx::query_scalar("EXPLAIN ANALYZE SELECT count(*) FROM kept")
        .fetch_all(&mut connection)
        .await
        .unwrap();
    assert!(plan.iter().any(|line| line.contains("Workers Launched: 2")), "{plan:#?}");
    let backend: i32 =
        sqlx::query_scalar("SELECT pg_backend_pid()").fetch_one(&mut connection).await.unwrap();
    let limits = std::fs::read_to_string(format!("/proc/{backend}/limits")).unwrap();
    let memory = limits.lines().find(|line| line.starts_with("Max address space")).unwrap();
    assert!(memory.contains("1744830464"), "{memory}");
}

/// What could go wrong: `kill -9` of the host leaves a server that nobody owns, or one that
/// blocks the next start.
#[tokio::test]
async fn the_database_ends_with_a_killed_parent() {
    let folder = TempDir::new("orphan");
    let mut holder = Command::new(env!("CARGO_BIN_EXE_services"));
    holder.arg("hold-postgres").arg(folder.path()).stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut holder = holder.spawn().unwrap();
    let mut line = String::new();
    BufReader::new(holder.stdout.take().unwrap()).read_line(&mut line).unwrap();
    let postmaster = line.trim().parse().unwrap();
    assert!(is_running(postmaster));
    holder.kill().unwrap();
    holder.wait().unwrap();
    // Started at once, while the old server may still be shutting down.
    let server = PrivatePostgres::start(PostgresOptions::new(folder.path())).unwrap();
    assert!(!is_running(postmaster));
    PgConnection::connect(&server.url()).await.unwrap();
    let log = std::fs::read_to_string(folder.path().join("postgres.log")).unwrap();
    assert!(!log.contains("not properly shut down"), "{log}");
}

/// The same without a next start: the death signal alone must end it.
#[test]
fn the_death_signal_alone_ends_the_database() {
    let folder = TempDir::new("death-signal");
    let mut holder = Command::new(env!("CARGO_BIN_EXE_services"));
    holder.arg("hold-postgres").arg(folder.path()).stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut holder = holder.spawn().unwrap();
    let mut line = String::new();
    BufReader::new(holder.stdout.take().unwrap()).read_line(&mut line).unwrap();
    let postmaster = line.trim().parse().unwrap();
    holder.kill().unwrap();
    holder.wait().unwrap();
    let deadline = Instant::now() + DEADLINE;
    while is_running(postmaster) {
        assert!(Instant::now() < deadline, "the server outlives its parent");
        std::thread::sleep(Duration::from_millis(10));
    }
    assert!(!folder.path().join("data/postmaster.pid").exists(), "the shutdown was not clean");
}

/// What could go wrong: "No such file or directory", and nobody knows what to install.
#[test]
fn missing_server_binaries_are_named() {
    let folder = TempDir::new("missing");
    let options = PostgresOptions {
        binaries: Some(PathBuf::from("/nonexistent")),
        ..PostgresOptions::new(folder.path())
    };
    let error = PrivatePostgres::start(options).unwrap_err().to_string();
    assert!(
        error.contains("`initdb`") && error.contains("`/nonexistent`") && error.contains("install"),
        "{error}"
    );
    assert!(!folder.path().exists(), "a start that cannot succeed leaves nothing behind");
}

/// What could go wrong: tests share data, a template is made twice, or databases pile up.
#[tokio::test]
async fn every_test_gets_its_own_copy_of_one_template() {
    let source = format!("local_services {}", std::process::id());
    let made = std::sync::atomic::AtomicU32::new(0);
    let migrate = async |url: &str| {
        made.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        let mut connection = PgConnection::connect(url).await?;
        connection.execute("CREATE TABLE kept AS SELECT 1 AS n").await?;
        Ok(()) // the open connection must not hinder the copies
    };
    let (one, other) = tokio::join!(
        TestDatabase::create(&source, migrate),
        TestDatabase::create(&source, migrate)
    );
    let (one, other) = (one.unwrap(), other.unwrap());
    one.connect().await.unwrap().execute("DELETE FROM kept").await.unwrap();
    assert_eq!((count(one.url()).await, count(other.url()).await), (0, 1));
    assert_eq!(made.into_inner(), 1);
    let url = one.url().to_owned();
    drop(one);
    assert!(PgConnection::connect(&url).await.is_err(), "the database was not dropped");
}

#[tokio::test]
async fn a_plain_database_comes_and_goes() {
    let name = format!("plain \"{}\"", std::process::id());
    // A URL carries such a name encoded only; a plain one is enough for a connection.
    create_database(&name).await.unwrap();
    assert!(create_database(&name).await.is_err());
    drop_database(&name).await.unwrap();
    drop_database(&name).await.unwrap();
}

async fn produce(bootstrap: &str, topic: &str, payload: &str) {
    let mut config = ClientConfig::new();
    let producer: FutureProducer =
        config.set("bootstrap.servers", bootstrap).set("linger.ms", "0").create().unwrap();
    let record = FutureRecord::to(topic).key("key").payload(payload);
    producer.send(record, DEADLINE).await.unwrap();
}

/// Reads one message per expected payload as a new member of `group`, commits, and compares.
async fn check_consumed(bootstrap: &str, topic: &str, group: &str, expected: &[&str]) {
    let mut config = ClientConfig::new();
    config
        .set("bootstrap.servers", bootstrap)
        .set("group.id", group)
        .set("auto.offset.reset", "earliest");
    let consumer: StreamConsumer = config.set("enable.auto.commit", "false").create().unwrap();
    consumer.subscribe(&[topic]).unwrap();
    let mut received = Vec::new();
    while received.len() < expected.len() {
        let message =
            tokio::time::timeout(DEADLINE, consumer.recv()).await.expect("a message").unwrap();
        received.push(String::from_utf8(message.payload().unwrap().to_vec()).unwrap());
        consumer.commit_message(&message, rdkafka::consumer::CommitMode::Sync).unwrap();
    }
    assert_eq!(received, expected);
}

#[tokio::test]
async fn the_embedded_broker_carries_messages() {
    let broker = MockBroker::start().unwrap();
    broker.create_topic("orders", 16).unwrap();
    assert!(broker.create_topic("orders", 4).is_err());
    produce(broker.bootstrap(), "orders", "one").await;
    // The default delay of a new group alone is 3 s, each time.
    let mut took: Vec<Duration> = Vec::new();
    while took.last().is_none_or(|took| *took >= Duration::from_millis(2500)) {
        assert!(took.len() < 10, "{took:?}");
        let start = Instant::now();
        check_consumed(broker.bootstrap(), "orders", &format!("group-{}", took.len()), &["one"])
            .await;
        took.push(start.elapsed());
    }
}

/// What could go wrong: a restart moves the port, forgets messages or committed offsets.
#[tokio::test(flavor = "multi_thread")]
async fn kafka_keeps_messages_and_offsets_over_a_restart_and_a_crash() {
    let mut kafka = KafkaServer::start_private().unwrap();
    let bootstrap = kafka.bootstrap().to_owned();
    kafka.create_topic("orders", 1, &[("retention.ms", "3600000")]).await.unwrap();
    produce(&bootstrap, "orders", "one").await;
    check_consumed(&bootstrap, "orders", "group", &["one"]).await;
    kafka.restart().unwrap();
    assert_eq!(kafka.bootstrap(), bootstrap);
    produce(&bootstrap, "orders", "two").await;
    check_consumed(&bootstrap, "orders", "group", &["two"]).await;
    kafka.kill().unwrap();
    kafka.start_again().unwrap();
    produce(&bootstrap, "orders", "three").await;
    check_consumed(&bootstrap, "orders", "group", &["three"]).await;
    check_consumed(&bootstrap, "orders", "another", &["one", "two", "three"]).await;
}

/// What could go wrong: a test finds topics of another test, or one it did not create.
#[tokio::test]
async fn the_shared_kafka_has_only_topics_that_were_created() {
    let mut kafka = KafkaServer::shared().unwrap();
    let topic = format!("local-services-{}", std::process::id());
    kafka.create_topic(&topic, 3, &[]).await.unwrap();
    assert!(kafka.create_topic(&topic, 3, &[]).await.is_err());
    produce(kafka.bootstrap(), &topic, "one").await;
    check_consumed(kafka.bootstrap(), &topic, &topic, &["one"]).await;
    kafka.delete_topic(&topic).await.unwrap();
    kafka.create_topic(&topic, 1, &[]).await.unwrap();
    kafka.delete_topic(&topic).await.unwrap();
    if std::env::var_os(oncebox_tests::kafka::BROKERS).is_none() {
        assert!(kafka.kill().is_err(), "nobody may kill the broker of all tests");
    }
}

/// The demo counts the same where every other delivery of a webhook comes over HTTP. What could go
/// wrong: an event that comes both ways has two effects, or one that was answered has none after
/// the host was killed.
#[test]
fn the_demo_takes_webhooks_over_http() {
    let folder = TempDir::new("demo");
    let program = oncebox_tests::host::program().unwrap();
    let dir = folder.path().join("demo");
    let arguments = ["demo", "--events", "120", "--kills", "1", "--source", "http", "--json"];
    let output = Command::new(program).args(arguments).arg("--dir").arg(&dir).output().unwrap();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{errors}");
    let said: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(said["kills"], 1);
    let distinct = |tenant: &serde_json::Value| tenant["distinct"].as_u64().unwrap();
    assert_eq!(said["tenants"].as_array().unwrap().iter().map(distinct).sum::<u64>(), 120);
    let over_http = said["over_http_first"].as_u64().unwrap();
    assert!((1..120).contains(&over_http), "{over_http} came over HTTP first");
}
