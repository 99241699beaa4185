//! A host may die anywhere. Whatever step it was at, after a restart every message has had its
//! effect exactly once, and attempts say what really ran.

use std::{
    collections::BTreeMap,
    net::{SocketAddr, TcpListener},
    os::unix::process::ExitStatusExt,
    sync::{
        LazyLock, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use futures::{StreamExt, future::join_all, stream};
use oncebox_control::Action;
use oncebox_model::hooks::POINTS;
use oncebox_tests::{
    host::{HostFixture, HostProcess, Options, aside},
    job::{inbox_job, of_reason},
    kafka::KafkaServer,
    load::{Load, Work},
    proxy::{Proxy, Struck},
    wait::DEADLINE,
};
use rand::{Rng, SeedableRng, rngs::StdRng, seq::IndexedRandom};
use tokio::time::sleep;

/// Scenarios side by side; each has up to two hosts.
const AT_ONCE: usize = 3;

/// What could go wrong: a host dies at some step and its successor loses a message, repeats an
/// effect, keeps half of one, or counts an attempt that never ran. S0-001, S0-023, S0-046, S1-004,
/// S1-005, S1-006, S1-008, S1-009, S1-010, S1-036, S1-104, S1-105, S1-126, S4-003.
///
/// A point that no message comes by fails the test, so every name in the list is passed.
#[tokio::test(flavor = "multi_thread")]
async fn a_host_killed_at_any_step_leaves_every_effect_once() {
    dies_everywhere(false).await;
}

/// What could go wrong: the same, where effect and claim are in a database that the tenant named,
/// and the host looks after two; and where messages run in the sequence of their versions and leave
/// light rows. S2-008, D14.
#[tokio::test(flavor = "multi_thread")]
async fn a_host_killed_at_any_step_leaves_every_effect_once_in_a_database_of_the_tenants_own() {
    dies_everywhere(true).await;
}

async fn dies_everywhere(own_database: bool) {
    let reached =
        POINTS.iter().filter(|point| own_database || !point.starts_with("inbox:sequence:"));
    let died = stream::iter(reached).map(|point| async move {
        let started = Instant::now();
        let died = aside(move || dies_at(point, own_database)).await;
        println!(
            "{point:<22} {:>5.1} s  {}",
            started.elapsed().as_secs_f64(),
            if died.is_ok() { "ok" } else { "FAILED" }
        );
        died.with_context(|| format!("at `{point}`"))
    });
    let outcomes: Vec<_> = died.buffer_unordered(AT_ONCE).collect().await;
    let failures: Vec<_> =
        outcomes.into_iter().filter_map(Result::err).map(|error| format!("{error:#}")).collect();
    assert!(failures.is_empty(), "{}", failures.join("\n\n"));
}

/// Which pass kills: not the first where there are several, so that something was settled before.
fn pass(point: &str) -> u32 {
    match point {
        "retry:lease:before" | "inbox:handle:before" | "inbox:handle:after" => 4,
        _ if point.starts_with("kafka:") || point.starts_with("inbox:park") => 1,
        _ => 2,
    }
}

async fn dies_at(point: &'static str, own_database: bool) -> Result<()> {
    let seed = rand::random();
    let mut rng = StdRng::seed_from_u64(seed);
    let order = if own_database { "sequence" } else { "none" };
    let options = Options { own_database, order, light: own_database, ..Options::default() };
    let fixture = HostFixture::with(options).await?;
    let mut load = Load::of([
        Work::Pay,
        Work::Fails(2),
        Work::NoId,
        Work::Open,
        Work::Fails(2),
        Work::Reject,
        Work::Sleeps(30),
    ]);
    load.mix(&mut rng, 40);
    let load = if own_database { load.keyed(&mut rng, 16).shuffled(&mut rng, 8) } else { load };
    fixture.send(&load).await?;

    let armed = format!("{point}@{}", pass(point));
    let host = fixture.start("a", &[("ONCEBOX_FAILPOINT", &armed)])?;
    let other = provoke(point, &fixture, &host).await?;
    let status = host
        .wait_exit()
        .await
        .with_context(|| format!("`{armed}` was never reached; seed {seed}"))?;
    ensure!(status.signal() == Some(libc::SIGKILL), "the host ended with {status}");
    if other.is_none() {
        // S1-006.
        fixture.check_whole().await?;
    }

    let host = fixture.start("a", &[])?;
    fixture.send(&load).await?;
    fixture.wait_settled().await.with_context(|| format!("seed {seed}"))?;
    // S0-001, S0-023, S0-046, S1-001, S1-004, S1-005, S1-008, S1-009, S1-010, S1-036, S1-104,
    // S1-105, S2-008, S4-003.
    fixture.check().await.with_context(|| format!("seed {seed}"))?;
    host.stop().await?;
    if let Some(other) = other {
        other.stop().await?;
    }
    fixture.check().await
}

/// Most points are passed by the messages; partitions are given up when someone asks for them.
async fn provoke(
    point: &str,
    fixture: &HostFixture,
    host: &HostProcess,
) -> Result<Option<HostProcess>> {
    match point {
        "kafka:revoke:before" => {
            fixture.wait_settled().await?;
            // One that waits for something to read would not ask for any.
            Ok(Some(fixture.start("b", &[("ONCEBOX_KAFKA_IDLE_AFTER_MS", "0")])?))
        }
        "kafka:commit:before" | "kafka:commit:after" => {
            fixture.until("SELECT count(*) FROM {schema}.ledger_entry", 5).await?;
            host.signal(libc::SIGTERM);
            Ok(None)
        }
        _ => Ok(None),
    }
}

/// What could go wrong: a message that kills every process that runs it comes back for ever, holds
/// its partition, or takes its neighbours with it. A3, S1-010, S1-070.
#[tokio::test(flavor = "multi_thread")]
async fn a_message_that_kills_the_process_is_parked_and_its_neighbours_complete() {
    let fixture = HostFixture::with(Options { partitions: 1, ..Options::default() }).await.unwrap();
    let mut load = Load::of([Work::Pay, Work::Pay, Work::Sleeps(2_000), Work::Pay, Work::Open]);
    (0..20).for_each(|_| load.push(Work::Pay));
    fixture.send(&load).await.unwrap();
    let killer = load.deliveries[2].id.clone();

    let mut kills = 0;
    let mut host = fixture.start("a", &[]).unwrap();
    let deadline = Instant::now() + DEADLINE;
    loop {
        let found = fixture.found().await.unwrap();
        let row = found.iter().find(|row| row.message_id == killer);
        if row.is_some_and(|row| row.is_settled()) {
            break;
        }
        assert!(Instant::now() < deadline, "killed {kills} times, and still: {row:?}");
        // The handler is in its statement: this is the process dying of the message.
        if fixture.sleeping().await.unwrap() > 0 {
            host.kill().await.unwrap();
            kills += 1;
            // PostgreSQL notices within half a second that its client is gone.
            while fixture.sleeping().await.unwrap() > 0 {
                sleep(Duration::from_millis(20)).await;
            }
            host = fixture.start("a", &[]).unwrap();
        }
        sleep(Duration::from_millis(20)).await;
    }
    fixture.wait_settled().await.unwrap();
    let found = fixture.found().await.unwrap();
    let row = found.iter().find(|row| row.message_id == killer).unwrap();
    // S1-010.
    assert_eq!(
        (row.status.as_str(), row.reason.as_deref(), row.crashes, row.effects),
        ("parked", Some("crashed"), 3, 0)
    );
    // Three times under a lease. Before that, a process is careful where another died at the same
    // offset and had made no progress: each of the two messages before this one may be news to one
    // process, as progress, and move the offset of another.
    assert!((4..=8).contains(&kills), "killed {kills} times");
    assert!(
        found.iter().filter(|row| row.message_id != killer).all(|row| row.status == "completed"),
        "{found:?}"
    );
    fixture.check().await.unwrap();
    // Of the killer's three leases that ran out two were taken over; with the third it is parked. A
    // neighbour that the other worker ran when the process died was taken over too.
    let log = std::fs::read_to_string(host.log()).unwrap();
    let of_killer = format!("message_id=\"{killer}\"");
    // S1-087.
    assert_eq!(
        log.lines()
            .filter(|line| line.contains("lease taken over") && line.contains(&of_killer))
            .count(),
        2,
        "{log}"
    );
    host.stop().await.unwrap();
}

/// What could go wrong: some mixture of kills, pauses, cut connections, rebalances and duplicates
/// that nobody thought of. S0-001, S0-002, S0-004, S1-002, S4-001, S4-002.
///
/// `ONCEBOX_KILL_LOOP_SEEDS` says how many new seeds are run (5 by default), or, as a list with a
/// comma such as `17,`, which.
#[tokio::test(flavor = "multi_thread")]
async fn nothing_is_lost_or_doubled_whatever_happens() {
    survive_all("none", seeds("ONCEBOX_KILL_LOOP_SEEDS", 5)).await;
}

/// What could go wrong: under the same mixtures, of 64 keys a message passes one that failed, waits
/// for one that is done, or for one of another key. S0-034, S1-062, A7.
///
/// `ONCEBOX_ORDER_SEEDS` says how many new seeds are run (3 by default), or which.
#[tokio::test(flavor = "multi_thread")]
async fn every_key_stays_in_order_whatever_happens() {
    survive_all("key", seeds("ONCEBOX_ORDER_SEEDS", 3)).await;
}

/// What could go wrong: the same where the messages of a key come over any partition and in any
/// order, each with its version. S1-020, S1-061.
#[tokio::test(flavor = "multi_thread")]
async fn every_sequence_is_kept_whatever_happens() {
    survive_all("sequence", seeds("ONCEBOX_SEQUENCE_SEEDS", 2)).await;
}

async fn survive_all(order: &'static str, seeds: Vec<u64>) {
    let runs = stream::iter(seeds).map(|seed| async move {
        let started = Instant::now();
        let outcome = aside(move || survive(seed, order)).await;
        let told =
            outcome.as_ref().map_or_else(|error| format!("FAILED: {error:#}"), ToString::to_string);
        println!("seed {seed}: {:.1} s, {told}", started.elapsed().as_secs_f64());
        outcome.map(drop).map_err(|error| format!("seed {seed}: {error:#}"))
    });
    let outcomes: Vec<_> = runs.buffer_unordered(2).collect().await;
    let seeds = outcomes.len();
    let failures: Vec<_> = outcomes.into_iter().filter_map(Result::err).collect();
    let (struck, troubles) = {
        let struck = STRUCK.lock().unwrap_or_else(PoisonError::into_inner);
        (struck.clone(), TROUBLES.load(Ordering::SeqCst))
    };
    println!("struck, in all seeds of this process so far: {struck:?}");
    let missing: Vec<_> =
        KINDS.into_iter().filter(|kind| struck.get(kind).is_none_or(|count| *count == 0)).collect();
    assert!(
        seeds < ENOUGH_SEEDS || missing.is_empty(),
        "{seeds} seeds, and nothing was {missing:?}"
    );
    let (of_hosts, between) = KINDS.split_at(KINDS_OF_HOSTS);
    for half in [of_hosts, between] {
        let has_struck = half.iter().any(|kind| !missing.contains(kind));
        assert!(
            troubles < ENOUGH_TROUBLES || has_struck,
            "{troubles} troubles, and nothing was one of {half:?}"
        );
    }
    assert!(
        failures.is_empty(),
        "repeat with ONCEBOX_KILL_LOOP_SEEDS=<seed>, or, for order, ONCEBOX_ORDER_SEEDS or \
            ONCEBOX_SEQUENCE_SEEDS=<seed>,\n{}",
        failures.join("\n\n")
    );
}

/// The seeds of an environment variable: so many new ones, or those of a list with a comma.
fn seeds(variable: &str, default: usize) -> Vec<u64> {
    let wanted = std::env::var(variable).unwrap_or_else(|_| default.to_string());
    if wanted.contains(',') {
        return wanted
            .split(',')
            .map(str::trim)
            .filter(|seed| !seed.is_empty())
            .map(|seed| seed.parse().unwrap())
            .collect();
    }
    (0..wanted.parse().unwrap()).map(|_| u64::from(rand::random::<u32>())).collect()
}

/// Runs seeds, so many at a time. Tells what became of each, and fails with those that failed.
pub(super) async fn run_seeds<F>(
    variable: &str,
    default: usize,
    at_once: usize,
    run: impl Fn(u64) -> F + Copy + Send + 'static,
) where
    F: Future<Output = Result<String>> + 'static,
{
    let runs = stream::iter(seeds(variable, default)).map(|seed| async move {
        let started = Instant::now();
        let outcome = aside(move || run(seed)).await;
        let told = outcome.as_ref().map_or_else(|error| format!("FAILED: {error:#}"), Clone::clone);
        println!("seed {seed}: {:.1} s, {told}", started.elapsed().as_secs_f64());
        outcome.map(drop).map_err(|error| format!("seed {seed}: {error:#}"))
    });
    let outcomes: Vec<_> = runs.buffer_unordered(at_once).collect().await;
    let failures: Vec<_> = outcomes.into_iter().filter_map(Result::err).collect();
    assert!(failures.is_empty(), "repeat with {variable}=<seed>,\n{}", failures.join("\n\n"));
}

/// How long a seed makes trouble.
const TROUBLE: Duration = Duration::from_secs(6);
/// How long it may take after that: a message whose process or connection died while it ran waits
/// for its lease.
const SETTLED: Duration = Duration::from_secs(150);

/// Kinds of trouble, and how often each has struck, over all seeds of this process.
static STRUCK: Mutex<BTreeMap<&str, usize>> = Mutex::new(BTreeMap::new());
/// Kinds of trouble of which one seed has few, so that a single seed need not meet each.
const KINDS: [&str; 17] = [
    "kill",
    "pause",
    "cut",
    "term",
    "start",
    "clock",
    "swallowed",
    "truncated",
    "withheld",
    "ended-all",
    "partitions",
    "rotated",
    "sought",
    "full",
    "topic-again",
    "broker-swallowed",
    "broker-truncated",
];
/// Seeds from which on each kind is met, as chance has it.
const ENOUGH_SEEDS: usize = 40;
/// The first of the kinds are of hosts, which six of ten troubles are about; the others are of what
/// is between them.
const KINDS_OF_HOSTS: usize = 6;
/// Troubles from which on some of either half have struck: by chance alone none has in less than
/// one of ten million runs.
const ENOUGH_TROUBLES: usize = 60;
/// Troubles made so far, in all seeds of this process.
static TROUBLES: AtomicUsize = AtomicUsize::new(0);

/// Histories under way at once: three tests with two each.
const WAYS: usize = 6;

/// A broker, and the ways to it that are not in use: where clients of each come to, and where they
/// are passed on to.
struct Brokers {
    kafka: KafkaServer,
    free: Mutex<Vec<(TcpListener, SocketAddr)>>,
}

/// One for all histories of this process; each has a way to it of its own.
static BROKERS: LazyLock<Brokers> = LazyLock::new(|| {
    let listeners: Vec<_> = (0..WAYS).map(|_| TcpListener::bind("127.0.0.1:0").unwrap()).collect();
    let ports: Vec<_> =
        listeners.iter().map(|listener| listener.local_addr().unwrap().port()).collect();
    let kafka = KafkaServer::start_behind(&ports).unwrap();
    let behind = kafka.own_ports().iter().map(|port| SocketAddr::from(([127, 0, 0, 1], *port)));
    let free = Mutex::new(listeners.into_iter().zip(behind).collect());
    Brokers { kafka, free }
});

impl Brokers {
    fn free(&self) -> MutexGuard<'_, Vec<(TcpListener, SocketAddr)>> {
        self.free.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A way that is taken. It is free again when this ends.
struct Taken(Option<(TcpListener, SocketAddr)>);

impl Taken {
    async fn one() -> Result<Self> {
        let taken = tokio::task::spawn_blocking(|| BROKERS.free().pop()).await?;
        Ok(Self(Some(taken.context("every way to the broker is taken")?)))
    }

    fn proxy(&self) -> Result<Proxy> {
        let (listener, behind) = self.0.as_ref().context("a way")?;
        let listener = listener.try_clone()?;
        listener.set_nonblocking(true)?;
        Proxy::at(tokio::net::TcpListener::from_std(listener)?, *behind)
    }
}

impl Drop for Taken {
    fn drop(&mut self) {
        BROKERS.free().extend(self.0.take());
    }
}

/// Count what really struck: a kind of trouble that was asked of a connection on which nothing
/// moved is none.
fn count(troubles: &[String], fixture: &HostFixture) {
    let mut struck = STRUCK.lock().unwrap_or_else(PoisonError::into_inner);
    TROUBLES.fetch_add(troubles.len(), Ordering::SeqCst);
    for kind in KINDS {
        let of_proxies = |count: fn(&Struck) -> &AtomicUsize| {
            fixture
                .ways()
                .iter()
                .map(|way| count(way.struck()).load(Ordering::SeqCst))
                .sum::<usize>()
        };
        let of_brokers = |count: fn(&Struck) -> &AtomicUsize| {
            fixture.broker_way().map_or(0, |way| count(way.struck()).load(Ordering::SeqCst))
        };
        *struck.entry(kind).or_default() += match kind {
            "swallowed" => of_proxies(|struck| &struck.swallowed),
            "truncated" => of_proxies(|struck| &struck.truncated),
            "withheld" => of_proxies(|struck| &struck.commits_withheld),
            "broker-swallowed" => of_brokers(|struck| &struck.swallowed),
            "broker-truncated" => of_brokers(|struck| &struck.truncated),
            "clock" => troubles.iter().filter(|trouble| trouble.contains("-days")).count(),
            kind => troubles.iter().filter(|trouble| trouble.starts_with(kind)).count(),
        };
    }
}

async fn survive(seed: u64, order: &'static str) -> Result<String> {
    let mut rng = StdRng::seed_from_u64(seed);
    let options = Options {
        partitions: 4,
        ack: ["after_commit", "after_commit", "after_insert"].choose(&mut rng).unwrap(),
        order,
        light: rng.random_bool(0.3),
        static_members: rng.random_bool(0.7),
        session_timeout_ms: 2_500,
        // Hosts leave the group and come back whenever they have read everything, or hardly ever.
        idle_after_ms: *[200, 200, 60_000].choose(&mut rng).unwrap(),
        // Longer than any pause, and than a connection is waited for on which nothing is heard: a
        // deadline is wall clock, and would charge either to the message.
        deadline_ms: 12_000,
        own_database: seed % 2 == 1,
        proxied: true,
        fills: true,
        brokers: Some(tokio::task::spawn_blocking(|| BROKERS.kafka.bootstrap().to_owned()).await?),
        ..Options::default()
    };
    let Options { ack, light, static_members, idle_after_ms, own_database, .. } = &options;
    let told = format!(
        "{ack}, light rows: {light}, static members: {static_members}, idle after {idle_after_ms} \
            ms, own database: {own_database}"
    );
    let taken = Taken::one().await?;
    let mut fixture = HostFixture::with(options).await?;
    fixture.reach_brokers_by(taken.proxy()?);
    let load = Load::mixed(&mut rng, 600);
    let load = match order {
        "none" => load,
        "key" => load.keyed(&mut rng, 64),
        _ => load.keyed(&mut rng, 64).shuffled(&mut rng, 100),
    };
    let mut hosts = [Some(fixture.start("a", &STARTED)?), None];
    let mut troubles = Vec::new();

    let sending = async {
        for part in load.deliveries.chunks(20) {
            fixture.send(&Load { deliveries: part.to_vec() }).await?;
            sleep(TROUBLE / 30).await;
        }
        anyhow::Ok(())
    };
    let trouble = async {
        let until = Instant::now() + TROUBLE;
        while Instant::now() < until {
            sleep(Duration::from_millis(rng.random_range(50..900))).await;
            troubles.push(make_trouble(&fixture, &mut hosts, &mut rng, order).await?);
        }
        anyhow::Ok(())
    };
    let (sent, troubled) = tokio::join!(sending, trouble);
    sent?;
    troubled.with_context(|| told.clone())?;

    heal(&fixture, &mut hosts).await?;
    let told = format!("{told}; {}", troubles.join(" "));
    let released = match settle(&fixture, &troubles).await {
        Ok(released) => released,
        Err(error) => {
            let hosts = join_all(hosts.iter().flatten().map(HostProcess::told)).await;
            return Err(error.context(format!("{told}\n{}", hosts.join("\n"))));
        }
    };
    let told = format!(
        "{told}{}",
        if released > 0 { format!("; released {released} times") } else { String::new() }
    );
    count(&troubles, &fixture);
    // S0-001, S0-004, S0-034, S1-002, S1-020, S1-061, S1-062, S1-118, S3-025, S4-001, S4-002.
    fixture.check().await.with_context(|| told.clone())?;
    let told = if order != "none" {
        format!("{told}; {}", finish_keys(&fixture).await.with_context(|| told.clone())?)
    } else {
        told
    };
    for host in hosts.iter().flatten() {
        host.stop().await.with_context(|| told.clone())?;
    }
    if order != "none" { fixture.check_order().await } else { fixture.check().await }
        .with_context(|| told.clone())?;
    let crashed =
        fixture.number("SELECT count(*) FROM oncebox.inbox WHERE reason = 'crashed'").await?;
    Ok(format!("{told}; {crashed} parked as crashed"))
}

/// Wait until everything is settled. A consumer is quarantined, and waits for an operator, where a
/// host was killed while it made its client for the first time, or two were while they joined its
/// group. A host that is not heard of for long, since it was paused or its database was out of
/// reach, counts as dead.
async fn settle(fixture: &HostFixture, troubles: &[String]) -> Result<usize> {
    let is_silence = |trouble: &str| {
        trouble.starts_with("pause")
            || (trouble.starts_with("swallow") && !trouble.contains("brokers"))
    };
    let silenced = troubles
        .iter()
        .filter(|trouble| trouble.starts_with("kill") || is_silence(trouble))
        .count();
    let mut released = 0;
    let releasing = async {
        loop {
            sleep(Duration::from_millis(500)).await;
            if fixture.release_quarantined().await? {
                released += 1;
                ensure!(
                    released <= silenced,
                    "quarantined {released} times, after {silenced} kills and silences"
                );
            }
        }
    };
    tokio::select! {
        settled = fixture.wait_settled_within(SETTLED) => settled?,
        failed = releasing => failed?,
    }
    Ok(released)
}

/// What stands behind a message that will not run any more follows in its turn, when a person is
/// done with that.
async fn finish_keys(fixture: &HostFixture) -> Result<String> {
    const WAITING: &str =
        "SELECT count(*) FROM oncebox.inbox WHERE consumer_id = {consumer} AND status = 'waiting'";
    let waited = fixture.number(WAITING).await?;
    let deadline = Instant::now() + DEADLINE;
    while fixture
        .number(
            "SELECT count(*) FROM oncebox.inbox WHERE consumer_id = {consumer} AND status NOT \
            IN ('completed', 'discarded')",
        )
        .await?
        > 0
    {
        ensure!(Instant::now() < deadline, "messages do not follow: {:?}", fixture.found().await?);
        for reason in ["reject", "park", "no_route", "crashed", "undecodable"] {
            // The hosts carry it out.
            let discard = inbox_job(Action::Discard, "payments", of_reason(reason));
            fixture.job(&discard).await?;
        }
        sleep(Duration::from_millis(50)).await;
    }
    fixture.check_order().await?;
    Ok(format!("{waited} waited behind dead letters, and followed"))
}

/// A session that nobody uses while its transaction is open ends soon, so that a paused host does
/// not hold its messages for long.
const STARTED: [(&str, &str); 1] = [("ONCEBOX_DATABASE_IDLE_IN_TRANSACTION_TIMEOUT_MS", "1500")];

/// Start a host, on a machine whose clock may be days off; how far.
fn start(fixture: &HostFixture, name: &str, rng: &mut StdRng) -> Result<(HostProcess, String)> {
    let days: i64 = if rng.random_bool(0.3) { rng.random_range(-400..400) } else { 0 };
    let ahead = (days * 86_400).to_string();
    let host = fixture.start(name, &[STARTED[0], ("ONCEBOX_CLOCK_AHEAD_S", &ahead)])?;
    Ok((host, if days == 0 { String::new() } else { format!("{days:+}-days") }))
}

async fn make_trouble(
    fixture: &HostFixture,
    hosts: &mut [Option<HostProcess>; 2],
    rng: &mut StdRng,
    order: &'static str,
) -> Result<String> {
    if rng.random_bool(0.4) {
        return make_trouble_between(fixture, rng, order).await;
    }
    let place = rng.random_range(0..hosts.len());
    let name = ["a", "b"][place];
    let Some(host) = hosts[place]
        .take_if(|host| !host.is_running())
        .or_else(|| hosts[place].take())
        .filter(HostProcess::is_running)
    else {
        let (host, off) = start(fixture, name, rng)?;
        hosts[place] = Some(host);
        return Ok(format!("start-{name}{off}"));
    };
    match rng.random_range(0..10) {
        0..4 => {
            host.kill().await?;
            let mut again = String::new();
            if rng.random_bool(0.7) {
                let (host, off) = start(fixture, name, rng)?;
                hosts[place] = Some(host);
                again = format!("-again{off}");
            }
            Ok(format!("kill-{name}{again}"))
        }
        4..7 => {
            let pause = rng.random_range(100..3_500);
            host.signal(libc::SIGSTOP);
            sleep(Duration::from_millis(pause)).await;
            host.signal(libc::SIGCONT);
            hosts[place] = Some(host);
            Ok(format!("pause-{name}-{pause}"))
        }
        7..9 => {
            hosts[place] = Some(host);
            Ok(format!("cut-{}", fixture.cut_sessions().await?))
        }
        _ => {
            host.signal(libc::SIGTERM);
            hosts[place] = Some(host);
            Ok(format!("term-{name}"))
        }
    }
}

/// Trouble that no host is asked about: of networks, servers and people.
async fn make_trouble_between(
    fixture: &HostFixture,
    rng: &mut StdRng,
    order: &'static str,
) -> Result<String> {
    let way = fixture.ways().choose(rng).context("hosts reach their databases through proxies")?;
    let brokers = fixture.broker_way().context("hosts reach the brokers through a proxy")?;
    Ok(match rng.random_range(0..13) {
        // A firewall forgets the connections that there are; new ones work.
        0 => format!("swallow-{}", way.swallow_present()),
        // For a while nothing goes through at all.
        1 => {
            way.swallow();
            let while_ms = rng.random_range(200..2_500);
            sleep(Duration::from_millis(while_ms)).await;
            way.heal();
            format!("swallow-all-{while_ms}")
        }
        2 => {
            way.truncate_next();
            "truncate".to_owned()
        }
        3 => {
            way.withhold_next_commit();
            "withhold".to_owned()
        }
        4 => format!("ended-all-{}", fixture.end_all_sessions().await?),
        // The messages of a key would come over several partitions, in no order.
        5 if order != "key" => {
            let partitions = fixture.partitions() + 1;
            fixture.add_partitions(partitions).await?;
            format!("partitions-{partitions}")
        }
        6 => match fixture.control.tenants().rotate_credentials(&fixture.tenant.name).await {
            Ok(_) => "rotated".to_owned(),
            // Its own database did not hear of it; a host brings it there.
            Err(error) => format!("rotat-later({error})"),
        },
        7 => {
            fixture.fill_disk(true).await?;
            let while_ms = rng.random_range(200..2_500);
            sleep(Duration::from_millis(while_ms)).await;
            fixture.fill_disk(false).await?;
            format!("full-{while_ms}")
        }
        8 => {
            fixture.make_topic_again_and_resend().await?;
            "topic-again".to_owned()
        }
        9 => format!("swallow-brokers-{}", brokers.swallow_present()),
        10 => {
            brokers.swallow();
            let while_ms = rng.random_range(200..2_500);
            sleep(Duration::from_millis(while_ms)).await;
            brokers.heal();
            format!("swallow-all-brokers-{while_ms}")
        }
        11 => {
            brokers.truncate_next();
            "truncate-brokers".to_owned()
        }
        _ => {
            let of = [
                "consumer",
                "seek",
                "payments",
                "--tenant",
                fixture.tenant.name.as_str(),
                "--to",
                "beginning",
                "--yes",
                "--wait",
                "3",
            ];
            match fixture.ok(&of).await {
                Ok(_) => "sought".to_owned(),
                // It waits for hosts that are paused, or another one is under way.
                Err(error) => format!(
                    "seek-refused({})",
                    error.to_string().lines().last().unwrap_or_default()
                ),
            }
        }
    })
}

async fn heal(fixture: &HostFixture, hosts: &mut [Option<HostProcess>; 2]) -> Result<()> {
    fixture.ways().iter().chain(fixture.broker_way()).for_each(Proxy::heal);
    fixture.fill_disk(false).await?;
    for (host, name) in hosts.iter_mut().zip(["a", "b"]) {
        // One that is draining comes to its end beside its successor.
        if !host.as_ref().is_some_and(HostProcess::is_running) {
            *host = Some(fixture.start(name, &STARTED)?);
        }
    }
    Ok(())
}
