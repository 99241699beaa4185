//! The database or the broker goes away under load and comes back; a host is asked to leave in the
//! middle of its work. Nothing is lost, nothing is done twice, and nobody's attempts are used up.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use oncebox_devkit::local::postgres::{PostgresOptions, PrivatePostgres};
use oncebox_tests::{
    host::{HostFixture, HostProcess, Options, aside},
    kafka::KafkaServer,
    load::{Load, Work},
    pooler::Pooler,
    proxy::Proxy,
    temp_dir::TempDir,
    wait::DEADLINE,
};
use sqlx::{Connection, Executor, PgConnection, postgres::PgConnectOptions};
use tokio::task::spawn_blocking;

const EFFECTS: &str = "SELECT count(*) FROM {schema}.ledger_entry";

/// Payments, every tenth of which fails once. Nothing in them is slow, so whatever an outage stops
/// is the outage's.
fn load(messages: usize) -> Load {
    Load::of((0..messages).map(|number| if number % 10 == 0 { Work::Fails(2) } else { Work::Pay }))
}

/// What could go wrong: PostgreSQL crashes in the middle of a batch, and what was under way is
/// acked without its effect, repeated, or charged to the messages. A3, D3, S1-001 (network
/// timeout), S1-105.
#[tokio::test(flavor = "multi_thread")]
async fn a_crash_of_the_database_costs_nothing() {
    let folder = TempDir::new("outage");
    let options = PostgresOptions::new(folder.path()).tcp(true);
    let mut postgres =
        spawn_blocking(move || PrivatePostgres::start(options)).await.unwrap().unwrap();
    let fixture =
        HostFixture::with(Options { postgres: Some(postgres.url()), ..Options::default() })
            .await
            .unwrap();
    let load = load(600);
    fixture.open_accounts(&load).await.unwrap();
    let host = fixture.start_ready("a", &[]).await.unwrap();
    let mut sent = 0;
    for (outage, chunk) in load.deliveries.chunks(200).enumerate() {
        let before = fixture.number(EFFECTS).await.unwrap();
        fixture.send(&Load { deliveries: chunk.to_vec() }).await.unwrap();
        sent += chunk.len();
        fixture.until(EFFECTS, before + 10).await.unwrap();
        if outage == 1 {
            postgres.kill().unwrap();
            host.wait_not_ready().await.unwrap();
            postgres.start_again().unwrap();
        } else {
            postgres.restart_immediate().unwrap();
        }
        host.wait_ready().await.unwrap();
        fixture.wait_settled().await.unwrap();
    }
    assert_eq!(sent, 600);
    // S1-001, S1-105, S4-002.
    fixture.check().await.unwrap();
    assert!(host.is_running(), "an outage is to be waited for");
    host.stop().await.unwrap();
    drop(fixture);
    drop(postgres);
}

/// What could go wrong: the broker dies or restarts, offsets go back or a fetch is repeated, and
/// messages are skipped or done twice. S1-001 (redelivery, network timeout), S4-002.
#[tokio::test(flavor = "multi_thread")]
async fn a_crash_of_the_broker_costs_nothing() {
    let mut kafka = spawn_blocking(KafkaServer::start_private).await.unwrap().unwrap();
    let options = Options { brokers: Some(kafka.bootstrap().to_owned()), ..Options::default() };
    let fixture = HostFixture::with(options).await.unwrap();
    let host = fixture.start_ready("a", &[]).await.unwrap();
    for (outage, chunk) in load(400).deliveries.chunks(200).enumerate() {
        let before = fixture.number(EFFECTS).await.unwrap();
        fixture.send(&Load { deliveries: chunk.to_vec() }).await.unwrap();
        fixture.until(EFFECTS, before + 10).await.unwrap();
        kafka = spawn_blocking(move || {
            if outage == 0 {
                kafka.kill().unwrap();
                kafka.start_again().unwrap();
            } else {
                kafka.restart().unwrap();
            }
            kafka
        })
        .await
        .unwrap();
        fixture.wait_settled().await.unwrap();
    }
    // S1-001, S4-002.
    fixture.check().await.unwrap();
    assert!(host.is_running(), "an outage is to be waited for");
    host.stop().await.unwrap();
}

/// What could go wrong: a host that is asked to leave drops what it runs, does not say so, hangs,
/// or leaves the offset behind so that its successor starts over. S4-003, S0-022.
#[tokio::test(flavor = "multi_thread")]
async fn a_host_that_is_asked_to_leave_finishes_what_it_runs() {
    let fixture =
        HostFixture::with(Options { partitions: 1, deadline_ms: 12_000, ..Options::default() })
            .await
            .unwrap();
    fixture.send(&Load::of([Work::Sleeps(1_500); 3])).await.unwrap();
    let host = fixture.start_ready("a", &[("ONCEBOX_SHUTDOWN_DRAIN_MS", "18000")]).await.unwrap();
    fixture.until_sleeping(1).await.unwrap();
    let asked = Instant::now();
    host.signal(libc::SIGTERM);
    host.wait_not_ready().await.unwrap();
    let status = host.wait_exit().await.unwrap();
    assert!(
        status.success() && asked.elapsed() < Duration::from_secs(18),
        "{status} after {:?}",
        asked.elapsed()
    );
    let done = fixture.number(EFFECTS).await.unwrap();
    assert!((1..3).contains(&done), "what ran was finished, nothing else was begun: {done}");
    // S4-003.
    assert_eq!(fixture.positions().await.unwrap()[&0].0, done, "what was finished is acked");

    let successor = fixture.start("a", &[]).unwrap();
    fixture.wait_settled().await.unwrap();
    fixture.check().await.unwrap();
    successor.stop().await.unwrap();
}

/// What could go wrong: work that does not end in time keeps the process for ever, or half of it
/// stays.
#[tokio::test(flavor = "multi_thread")]
async fn a_drain_that_takes_too_long_is_cut_short_and_leaves_nothing_half_done() {
    let fixture = HostFixture::with(Options { partitions: 1, ..Options::default() }).await.unwrap();
    fixture.send(&Load::of([Work::Sleeps(2_000); 2])).await.unwrap();
    let host = fixture.start_ready("a", &[("ONCEBOX_SHUTDOWN_DRAIN_MS", "300")]).await.unwrap();
    fixture.until_sleeping(1).await.unwrap();
    let asked = Instant::now();
    host.signal(libc::SIGTERM);
    host.wait_exit().await.unwrap();
    assert!(asked.elapsed() < Duration::from_secs(18), "{:?}", asked.elapsed());
    fixture.check_whole().await.unwrap();
    let successor = fixture.start("a", &[]).unwrap();
    fixture.wait_settled().await.unwrap();
    fixture.check().await.unwrap();
    successor.stop().await.unwrap();
}

/// What could go wrong: a host that starts while the database is away, or a broker, ends, and
/// whoever starts it again and again hides why; or it looks ready and does nothing; or what only a
/// person can mend is waited for. S4-003.
#[tokio::test(flavor = "multi_thread")]
async fn a_host_waits_for_its_database_and_its_broker() {
    let mut kafka = spawn_blocking(KafkaServer::start_private).await.unwrap().unwrap();
    let options = Options { brokers: Some(kafka.bootstrap().to_owned()), ..Options::default() };
    let fixture = HostFixture::with(options).await.unwrap();
    fixture.send(&load(50)).await.unwrap();
    let (database, through) = Proxy::before(fixture.database_url()).await.unwrap();
    let (kafka_again, stopped) = spawn_blocking(move || (kafka.stop(), kafka))
        .await
        .map(|(stopped, kafka)| (kafka, stopped))
        .unwrap();
    stopped.unwrap();
    let mut kafka = kafka_again;

    database.close();
    let host = fixture.start("a", &[("ONCEBOX_DATABASE_URL", &through)]).unwrap();
    host.wait_not_ready_for("the database is not reachable").await.unwrap();
    // It is told why once, however often it tries.
    let (tried, deadline) = (database.accepted(), Instant::now() + DEADLINE);
    while database.accepted() < tried + 3 {
        assert!(Instant::now() < deadline, "{} tries", database.accepted() - tried);
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    assert_says_no_reason_twice(&host, 1);

    // Nothing comes back at all: that is news, of another kind.
    database.swallow();
    host.wait_not_ready_for("timed out").await.unwrap();
    database.heal();
    host.wait_not_ready_for("no broker answers").await.unwrap();
    assert!(host.is_running());
    let kafka = spawn_blocking(move || kafka.start_again().map(|()| kafka)).await.unwrap().unwrap();
    host.wait_ready().await.unwrap();
    assert_says_no_reason_twice(&host, 3);
    fixture.wait_settled().await.unwrap();
    fixture.check().await.unwrap();
    host.stop().await.unwrap();

    // One that waits can be stopped.
    database.close();
    let waiting = fixture.start("a", &[("ONCEBOX_DATABASE_URL", &through)]).unwrap();
    waiting.wait_not_ready_for("the database is not reachable").await.unwrap();
    waiting.stop().await.unwrap();
    drop(kafka);
}

/// A line of the log for each change, of which there were so many or more, and none for each try.
fn assert_says_no_reason_twice(host: &HostProcess, changes_min: usize) {
    let log = std::fs::read_to_string(host.log()).unwrap();
    let reasons: Vec<_> =
        log.lines().filter_map(|line| line.split_once("not ready")).map(|(_, why)| why).collect();
    assert!(
        reasons.len() >= changes_min && reasons.windows(2).all(|pair| pair[0] != pair[1]),
        "{reasons:?}"
    );
}

/// What could go wrong: a host that can never start waits in silence.
#[tokio::test(flavor = "multi_thread")]
async fn a_host_does_not_wait_for_what_only_a_person_mends() {
    let fixture = HostFixture::new().await.unwrap();
    let url = fixture.database_url().to_owned();
    let (_, address) = url.rsplit_once('@').unwrap();
    let password = url.split([':', '@']).nth(2).unwrap();
    let wrong_login = url.replacen(&format!(":{password}@"), ":wrong@", 1);
    let nowhere = format!("{}/nowhere_at_all?sslmode=disable", url.rsplit_once('/').unwrap().0);
    let bad_scheme = format!("mysql://{address}");
    for (variable, value, said) in [
        ("ONCEBOX_DATABASE_URL", wrong_login.as_str(), "password authentication failed"),
        (
            "ONCEBOX_DATABASE_URL",
            nowhere.as_str(),
            "database `nowhere_at_all` does not exist; `oncebox migrate` creates it",
        ),
        ("ONCEBOX_DATABASE_URL", bad_scheme.as_str(), "is not a PostgreSQL URL"),
        ("ONCEBOX_MASTER_KEY", "short", "the master key must be"),
        ("ONCEBOX_KAFKA_BROKERS", "", "no brokers are configured"),
    ] {
        let host = fixture.start("a", &[(variable, value)]).unwrap();
        let status = host.wait_exit().await.unwrap();
        assert_eq!(
            (status.code(), host.log_lines(said)),
            (Some(1), 1),
            "{}",
            std::fs::read_to_string(host.log()).unwrap()
        );
        std::fs::remove_file(host.log()).unwrap();
    }
}

/// What could go wrong: a pooler drops the startup options that every session rests on, and the
/// host's tables are made in the wrong schema, a tenant's session may write what it likes, or the
/// error names something else.
#[tokio::test(flavor = "multi_thread")]
async fn a_pooler_that_drops_startup_options_is_refused() {
    let fixture = HostFixture::new().await.unwrap();
    let folder = TempDir::new("outage");
    std::fs::create_dir(folder.path()).unwrap();
    let url = fixture.database_url();
    let drops = "ignore_startup_parameters = extra_float_digits, options";
    for settings in [
        format!("pool_mode = session\n{drops}"),
        format!("pool_mode = transaction\n{drops}"),
        format!("pool_mode = statement\n{drops}"),
        "pool_mode = session\nignore_startup_parameters = extra_float_digits".to_owned(),
    ] {
        let pooler = Pooler::before(url, &settings).await.unwrap();
        let through = pooler.through(url);
        let lost = if settings.contains(drops) {
            "`search_path`, `statement_timeout`"
        } else {
            "`options`"
        };
        for command in ["migrate", "serve"] {
            let mut program = fixture.program().unwrap();
            program.arg(command).env("ONCEBOX_DATABASE_URL", &through);
            program
                .env("ONCEBOX_HTTP_LISTEN", "127.0.0.1:0")
                .env("ONCEBOX_API_LISTEN", "127.0.0.1:0");
            let said = spawn_blocking(move || program.output()).await.unwrap().unwrap();
            let text = format!(
                "{}{}",
                String::from_utf8_lossy(&said.stdout),
                String::from_utf8_lossy(&said.stderr)
            );
            assert_eq!(said.status.code(), Some(1), "{settings}: {text}");
            let clear = text.contains(&format!("the startup options {lost}"))
                && text.contains("connect to PostgreSQL directly");
            assert!(clear && !text.contains("exists"), "{settings}: {text}");
        }
        // A tenant's own database is reached in the same way.
        let mut command = fixture.program().unwrap();
        let file = folder.path().join("url");
        std::fs::write(&file, &through).unwrap();
        command.args(["tenant", "create", "pooled", "--database-url-file", file.to_str().unwrap()]);
        let said = spawn_blocking(move || command.output()).await.unwrap().unwrap();
        let text = String::from_utf8_lossy(&said.stderr).into_owned();
        assert!(
            said.status.code() == Some(1) && text.contains(&format!("the startup options {lost}")),
            "{settings}: {text}"
        );
    }
    const MISPLACED: &str = "SELECT count(*) FROM pg_class WHERE relname = '_sqlx_migrations' AND \
        relnamespace <> 'oncebox'::regnamespace";
    assert_eq!(fixture.number(MISPLACED).await.unwrap(), 0);
}

/// What could go wrong: a connection that a firewall has forgotten is waited for until the system
/// gives it up, a quarter of an hour later, or for ever.
#[tokio::test(flavor = "multi_thread")]
async fn a_connection_that_goes_dead_is_noticed() {
    let fixture = HostFixture::new().await.unwrap();
    let (way, through) = Proxy::before(fixture.database_url()).await.unwrap();
    let options: PgConnectOptions = through.parse().unwrap();
    let mut connection =
        PgConnection::connect_with(&options.clone().answer_timeout(Duration::from_secs(3)))
            .await
            .unwrap();
    // The system asks for signs of life, and gives up where what was sent is not acknowledged.
    let sockets = sockets_to(way.address().port());
    assert!(!sockets.is_empty());
    for socket in sockets {
        let option = |level, name| {
            let (mut value, mut length): (libc::c_int, libc::socklen_t) = (0, 4);
            // SAFETY: both point to what they say, for the length of the call.
            let got = unsafe {
                libc::getsockopt(socket, level, name, (&raw mut value).cast(), &raw mut length)
            };
            assert_eq!(got, 0, "{}", std::io::Error::last_os_error());
            value
        };
        let tcp = |name| option(libc::IPPROTO_TCP, name);
        assert_eq!(option(libc::SOL_SOCKET, libc::SO_KEEPALIVE), 1);
        assert_eq!(
            (
                tcp(libc::TCP_USER_TIMEOUT),
                tcp(libc::TCP_KEEPIDLE),
                tcp(libc::TCP_KEEPINTVL),
                tcp(libc::TCP_KEEPCNT)
            ),
            (8_000, 4, 2, 2)
        );
    }
    // An answer in pieces is none that is missing: the bound is on what is not heard, not on the
    // whole.
    const PIECES: &str = "SELECT pg_sleep(0.7), repeat('x', 20000) FROM generate_series(1, 6)";
    assert_eq!(connection.fetch_all(PIECES).await.unwrap().len(), 6);
    assert_eq!(way.swallow_present(), 1);
    let error = connection.fetch_one("SELECT 1").await.unwrap_err();
    assert!(
        matches!(&error, sqlx::Error::Io(io) if io.kind() == std::io::ErrorKind::TimedOut),
        "{error}"
    );
    assert_eq!(way.struck().swallowed.load(std::sync::atomic::Ordering::SeqCst), 1);
}

/// This process's ends of connections to a port.
fn sockets_to(port: u16) -> Vec<libc::c_int> {
    let open = std::fs::read_dir("/proc/self/fd")
        .unwrap()
        .filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok());
    let peer = |socket: &libc::c_int| {
        // SAFETY: an address of another family is longer, and is not looked at.
        let mut address: libc::sockaddr_storage = unsafe { std::mem::zeroed() };
        let mut length = size_of::<libc::sockaddr_storage>() as libc::socklen_t;
        // SAFETY: both point to what they say, for the length of the call.
        let got = unsafe { libc::getpeername(*socket, (&raw mut address).cast(), &raw mut length) };
        // SAFETY: it is as long as any address.
        let inet = unsafe { &*(&raw const address).cast::<libc::sockaddr_in>() };
        got == 0
            && i32::from(address.ss_family) == libc::AF_INET
            && u16::from_be(inet.sin_port) == port
    };
    open.filter(peer).collect()
}

/// What could go wrong: a host that is cut off from the database, and not from Kafka, keeps its
/// partitions for as long as that lasts, while another host could do their work; or it never comes
/// back. S4-002.
#[tokio::test(flavor = "multi_thread")]
async fn a_host_cut_off_from_its_database_leaves_its_work_to_others() {
    // Whether consumers rest when there is nothing to do makes no difference.
    for idle_after_ms in [60_000, 0] {
        let fixture = HostFixture::with(Options {
            partitions: 4,
            static_members: false,
            idle_after_ms,
            ..Options::default()
        })
        .await
        .unwrap();
        let (database, through) = Proxy::before(fixture.database_url()).await.unwrap();
        let quick = [
            ("ONCEBOX_DATABASE_LEAVE_AFTER_MS", "1000"),
            ("ONCEBOX_DATABASE_STATEMENT_TIMEOUT_MS", "3000"),
        ];
        let of_a = [&quick[..], &[("ONCEBOX_DATABASE_URL", through.as_str())]].concat();
        let cut_off = fixture.start_ready("a", &of_a).await.unwrap();
        let healthy = fixture.start_ready("b", &quick).await.unwrap();
        // Each of them has read.
        for host in [&cut_off, &healthy] {
            let deadline = Instant::now() + DEADLINE;
            while host.log_lines("consumer opened") == 0 && idle_after_ms > 0 {
                assert!(Instant::now() < deadline, "host `{}` has read nothing", host.name());
                fixture
                    .send(&load(20).named(&format!("{:08x}", rand::random::<u32>())))
                    .await
                    .unwrap();
                fixture.wait_settled().await.unwrap();
            }
        }
        database.swallow();
        fixture.send(&load(200).named("while")).await.unwrap();
        fixture.wait_settled().await.unwrap();
        cut_off.wait_log("it left its group").await.unwrap();
        cut_off.wait_not_ready_for("the database").await.unwrap();
        assert!(cut_off.is_running(), "an outage is to be waited for");

        database.heal();
        cut_off.wait_log("its database answers again").await.unwrap();
        cut_off.wait_ready().await.unwrap();
        healthy.stop().await.unwrap();
        fixture.send(&load(200).named("after")).await.unwrap();
        fixture.wait_settled().await.unwrap();
        fixture.check().await.unwrap();
        cut_off.stop().await.unwrap();
    }
}

/// What a host is struck by.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fault {
    /// SIGKILL.
    Killed,
    /// SIGSTOP, for good.
    Frozen,
    /// Its connections to PostgreSQL are forgotten by a firewall; new ones work.
    ConnectionsForgotten,
    /// It reaches PostgreSQL no more, and Kafka it does.
    CutOffFromDatabase,
    /// Every session on the database ends.
    SessionsEnded,
}

/// With its name in docs/guarantees.md.
const FAULTS: [(Fault, &str); 5] = [
    (Fault::Killed, "a host is killed"),
    (Fault::Frozen, "a host freezes"),
    (Fault::ConnectionsForgotten, "connections to PostgreSQL go dead without a word"),
    (Fault::CutOffFromDatabase, "a host is cut off from PostgreSQL"),
    (Fault::SessionsEnded, "all sessions on PostgreSQL end"),
];

/// How often each fault is tried, to measure; once where nothing is said.
const ROUNDS: &str = "ONCEBOX_RECOVERY_ROUNDS";

/// What could go wrong: with the settings that a host has by itself, messages wait for a minute and
/// more after a fault that another host, or the same one, could make up for. S4-002.
///
/// It prints how long it took from the fault, which meets open transactions, to the effect of the
/// last of 40 messages that were there or came just after; `ONCEBOX_RECOVERY_ROUNDS=5 ./test.sh
/// outages::recovery -- --nocapture` tries each five times. Nothing is judged by that but
/// that it comes to an end.
#[tokio::test(flavor = "multi_thread")]
async fn recovery_from_each_fault_comes_by_itself() {
    let rounds: usize = std::env::var(ROUNDS).map_or(1, |rounds| rounds.parse().unwrap());
    for (fault, name) in FAULTS {
        let mut took = Vec::new();
        for _ in 0..rounds {
            took.push(
                aside(move || recover(fault)).await.with_context(|| format!("{fault:?}")).unwrap(),
            );
        }
        took.sort();
        println!(
            "{name}: {:.1} s, at worst {:.1} s of {rounds}",
            took[rounds / 2].as_secs_f64(),
            took[rounds - 1].as_secs_f64()
        );
    }
}

async fn recover(fault: Fault) -> Result<Duration> {
    // What a host has by itself, but for Kafka's side. A deadline that strikes while an answer is
    // missing is the message's.
    let options = Options {
        partitions: 4,
        static_members: false,
        session_timeout_ms: 10_000,
        deadline_ms: 12_000,
        ..Options::default()
    };
    let fixture = HostFixture::with(options).await?;
    let (database, through) = Proxy::before(fixture.database_url()).await?;
    let struck = fixture.start_ready("a", &[("ONCEBOX_DATABASE_URL", &through)]).await?;
    // It has all partitions, and messages under way on each.
    fixture.send(&load(40)).await?;
    fixture.wait_settled().await?;
    let healthy = fixture.start_ready("b", &[]).await?;
    fixture.send(&Load::of([Work::Sleeps(400); 20]).named("during")).await?;
    fixture.until_sleeping(1).await?;
    let struck_at = Instant::now();
    match fault {
        Fault::Killed => struck.signal(libc::SIGKILL),
        Fault::Frozen => struck.signal(libc::SIGSTOP),
        Fault::ConnectionsForgotten => assert!(database.swallow_present() > 0),
        Fault::CutOffFromDatabase => database.swallow(),
        Fault::SessionsEnded => assert!(fixture.end_all_sessions().await? > 0),
    }
    fixture.send(&Load::of([Work::Pay; 20]).named("after")).await?;
    while fixture.number(EFFECTS).await? < 80 {
        ensure!(
            struck_at.elapsed() < DEADLINE,
            "{} of 80 effects after {DEADLINE:?}",
            fixture.number(EFFECTS).await?
        );
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    let took = struck_at.elapsed();
    database.heal();
    struck.signal(libc::SIGCONT);
    fixture.wait_settled().await?;
    fixture.check().await?;
    ensure!(struck.is_running() == (fault != Fault::Killed), "a host that can go on does");
    healthy.stop().await?;
    match fault {
        Fault::Killed => {}
        // How long a host needs to end that has just lost its partitions is not what is asked here.
        Fault::Frozen => struck.signal(libc::SIGKILL),
        _ => struck.stop().await?,
    }
    Ok(took)
}
