//! A host may die anywhere. Whatever step it was at, after a restart every message has had its
//! effect exactly once, and attempts say what really ran.

#![allow(clippy::unwrap_used, reason = "a panic is how a test fails")]

use std::{
    os::unix::process::ExitStatusExt,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use futures::{StreamExt, stream};
use oncebox_inbox::{Filter, Remedy, Verb, hooks::POINTS};
use oncebox_tests::{
    host::{HostProcess, Options, Scenario, aside},
    load::{Load, Work},
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

/// What could go wrong: the same, where effect and claim are in a database that the tenant named, and the host
/// looks after two; and where messages run in the sequence of their versions. S2-008, D14.
#[tokio::test(flavor = "multi_thread")]
async fn a_host_killed_at_any_step_leaves_every_effect_once_in_a_database_of_the_tenants_own() {
    dies_everywhere(true).await;
}

async fn dies_everywhere(own_database: bool) {
    let reached = POINTS.iter().filter(|point| own_database || !point.starts_with("inbox:sequence:"));
    let died = stream::iter(reached).map(|point| async move {
        let started = Instant::now();
        let died = aside(move || dies_at(point, own_database)).await;
        println!("{point:<22} {:>5.1} s  {}", started.elapsed().as_secs_f64(), if died.is_ok() { "ok" } else { "FAILED" });
        died.with_context(|| format!("at `{point}`"))
    });
    let outcomes: Vec<_> = died.buffer_unordered(AT_ONCE).collect().await;
    let failures: Vec<_> = outcomes.into_iter().filter_map(Result::err).map(|error| format!("{error:#}")).collect();
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
    let scenario = Scenario::with(Options { own_database, order, ..Options::default() }).await?;
    let mut load = Load::of([Work::Pay, Work::Fails(2), Work::NoId, Work::Open, Work::Fails(2), Work::Reject, Work::Sleeps(30)]);
    load.mix(&mut rng, 40);
    let load = if own_database { load.keyed(&mut rng, 16).shuffled(&mut rng, 8) } else { load };
    scenario.send(&load).await?;

    let armed = format!("{point}@{}", pass(point));
    let host = scenario.start("a", &[("ONCEBOX_FAILPOINT", &armed)])?;
    let other = provoke(point, &scenario, &host).await?;
    let status = host.wait_exit(Duration::from_secs(40)).await.with_context(|| format!("`{armed}` was never reached; seed {seed}"))?;
    ensure!(status.signal() == Some(libc::SIGKILL), "the host ended with {status}");
    if other.is_none() {
        scenario.check_whole().await?;
    }

    let host = scenario.start("a", &[])?;
    scenario.send(&load).await?;
    scenario.wait_settled().await.with_context(|| format!("seed {seed}"))?;
    scenario.check().await.with_context(|| format!("seed {seed}"))?;
    host.stop().await?;
    if let Some(other) = other {
        other.stop().await?;
    }
    scenario.check().await
}

/// Most points are passed by the messages; partitions are given up when someone asks for them.
async fn provoke(point: &str, scenario: &Scenario, host: &HostProcess) -> Result<Option<HostProcess>> {
    match point {
        "kafka:revoke:before" => {
            scenario.wait_settled().await?;
            // One that waits for something to read would not ask for any.
            Ok(Some(scenario.start("b", &[("ONCEBOX_KAFKA_IDLE_AFTER_MS", "0")])?))
        }
        "kafka:commit:before" | "kafka:commit:after" => {
            scenario.until("SELECT count(*) FROM {schema}.ledger_entry", 5).await?;
            host.signal(libc::SIGTERM);
            Ok(None)
        }
        _ => Ok(None),
    }
}

/// What could go wrong: a message that kills every process that runs it comes back for ever, holds its
/// partition, or takes its neighbours with it. A3, S1-010, S1-070.
#[tokio::test(flavor = "multi_thread")]
async fn a_message_that_kills_the_process_is_parked_and_its_neighbours_complete() {
    let scenario = Scenario::with(Options { partitions: 1, ..Options::default() }).await.unwrap();
    let mut load = Load::of([Work::Pay, Work::Pay, Work::Sleeps(2_000), Work::Pay, Work::Open]);
    (0..20).for_each(|_| load.push(Work::Pay));
    scenario.send(&load).await.unwrap();
    let killer = load.deliveries[2].id.clone();

    let mut kills = 0;
    let mut host = scenario.start("a", &[]).unwrap();
    let deadline = Instant::now() + Duration::from_secs(60);
    loop {
        let found = scenario.found().await.unwrap();
        let row = found.iter().find(|row| row.message_id == killer);
        if row.is_some_and(|row| row.is_settled()) {
            break;
        }
        assert!(Instant::now() < deadline, "killed {kills} times, and still: {row:?}");
        // The handler is in its statement: this is the process dying of the message.
        if scenario.sleeping().await.unwrap() > 0 {
            host.kill().await.unwrap();
            kills += 1;
            // PostgreSQL notices within half a second that its client is gone.
            while scenario.sleeping().await.unwrap() > 0 {
                sleep(Duration::from_millis(20)).await;
            }
            host = scenario.start("a", &[]).unwrap();
        }
        sleep(Duration::from_millis(20)).await;
    }
    scenario.wait_settled().await.unwrap();
    let found = scenario.found().await.unwrap();
    let row = found.iter().find(|row| row.message_id == killer).unwrap();
    assert_eq!((row.status.as_str(), row.reason.as_deref(), row.crashes, row.effects), ("parked", Some("crashed"), 3, 0));
    // Three times under a lease. Before that, a process is careful where another died at the same offset and
    // had made no progress: each of the two messages before this one may be news to one process, as progress,
    // and move the offset of another.
    assert!((4..=8).contains(&kills), "killed {kills} times");
    assert!(found.iter().filter(|row| row.message_id != killer).all(|row| row.status == "completed"), "{found:?}");
    scenario.check().await.unwrap();
    // S1-087: of the three leases that ran out two were taken over; the message of the third is parked.
    let log = std::fs::read_to_string(host.log()).unwrap();
    let taken_over = log.lines().filter(|line| line.contains("lease taken over"));
    assert_eq!(taken_over.clone().count(), 2, "{log}");
    assert!(taken_over.clone().all(|line| line.contains(&killer)), "{log}");
    host.stop().await.unwrap();
}

/// What could go wrong: some mixture of kills, pauses, cut connections, rebalances and duplicates that
/// nobody thought of. S0-001, S0-002, S0-004, S1-002, S4-001, S4-002.
///
/// `ONCEBOX_KILL_LOOP_SEEDS` says how many new seeds are run (5 by default), or, as a list with a comma
/// such as `17,`, which.
#[tokio::test(flavor = "multi_thread")]
async fn nothing_is_lost_or_doubled_whatever_happens() {
    survive_all("none", seeds("ONCEBOX_KILL_LOOP_SEEDS", 5)).await;
}

/// What could go wrong: under the same mixtures, of 64 keys a message passes one that failed, waits for one that
/// is done, or for one of another key. S0-034, S1-062, S1-123, A7.
///
/// `ONCEBOX_ORDER_SEEDS` says how many new seeds are run (3 by default), or which.
#[tokio::test(flavor = "multi_thread")]
async fn every_key_stays_in_order_whatever_happens() {
    survive_all("key", seeds("ONCEBOX_ORDER_SEEDS", 3)).await;
}

/// What could go wrong: the same where the messages of a key come over any partition and in any order, each with its
/// version. S1-020, S1-061.
#[tokio::test(flavor = "multi_thread")]
async fn every_sequence_is_kept_whatever_happens() {
    survive_all("sequence", seeds("ONCEBOX_SEQUENCE_SEEDS", 2)).await;
}

async fn survive_all(order: &'static str, seeds: Vec<u64>) {
    let runs = stream::iter(seeds).map(|seed| async move {
        let started = Instant::now();
        let outcome = aside(move || survive(seed, order)).await;
        let told = outcome.as_ref().map_or_else(|error| format!("FAILED: {error:#}"), ToString::to_string);
        println!("seed {seed}: {:.1} s, {told}", started.elapsed().as_secs_f64());
        outcome.map(drop).map_err(|error| format!("seed {seed}: {error:#}"))
    });
    let outcomes: Vec<_> = runs.buffer_unordered(2).collect().await;
    let failures: Vec<_> = outcomes.into_iter().filter_map(Result::err).collect();
    assert!(
        failures.is_empty(),
        "repeat with ONCEBOX_KILL_LOOP_SEEDS=<seed>, or, for order, ONCEBOX_ORDER_SEEDS or ONCEBOX_SEQUENCE_SEEDS=<seed>,\n{}",
        failures.join("\n\n")
    );
}

fn seeds(variable: &str, default: usize) -> Vec<u64> {
    let wanted = std::env::var(variable).unwrap_or_else(|_| default.to_string());
    if wanted.contains(',') {
        return wanted.split(',').map(str::trim).filter(|seed| !seed.is_empty()).map(|seed| seed.parse().unwrap()).collect();
    }
    (0..wanted.parse().unwrap()).map(|_| u64::from(rand::random::<u32>())).collect()
}

/// How long a seed makes trouble.
const TROUBLE: Duration = Duration::from_secs(6);

async fn survive(seed: u64, order: &'static str) -> Result<String> {
    let mut rng = StdRng::seed_from_u64(seed);
    let options = Options {
        partitions: 4,
        ack: ["after_commit", "after_commit", "after_insert"].choose(&mut rng).unwrap(),
        order,
        static_members: rng.random_bool(0.7),
        session_timeout_ms: 2_500,
        // Hosts leave the group and come back whenever they have read everything, or hardly ever.
        idle_after_ms: *[200, 200, 60_000].choose(&mut rng).unwrap(),
        // Longer than any pause: a deadline is wall clock, and would charge the pause to the message.
        deadline_ms: 5_000,
        own_database: seed % 2 == 1,
        ..Options::default()
    };
    let Options { ack, static_members, idle_after_ms, own_database, .. } = &options;
    let told = format!("{ack}, static members: {static_members}, idle after {idle_after_ms} ms, own database: {own_database}");
    let scenario = Scenario::with(options).await?;
    let load = Load::mixed(&mut rng, 600);
    let load = match order {
        "none" => load,
        "key" => load.keyed(&mut rng, 64),
        _ => load.keyed(&mut rng, 64).shuffled(&mut rng, 100),
    };
    let mut hosts = [Some(start(&scenario, "a")?), None];
    let mut troubles = Vec::new();

    let sending = async {
        for part in load.deliveries.chunks(20) {
            scenario.send(&Load { deliveries: part.to_vec() }).await?;
            sleep(TROUBLE / 30).await;
        }
        anyhow::Ok(())
    };
    let trouble = async {
        let until = Instant::now() + TROUBLE;
        while Instant::now() < until {
            sleep(Duration::from_millis(rng.random_range(50..900))).await;
            troubles.push(make_trouble(&scenario, &mut hosts, &mut rng).await?);
        }
        anyhow::Ok(())
    };
    let (sent, troubled) = tokio::join!(sending, trouble);
    sent?;
    troubled?;

    heal(&scenario, &mut hosts)?;
    let told = format!("{told}; {}", troubles.join(" "));
    scenario.wait_settled().await.with_context(|| told.clone())?;
    scenario.check().await.with_context(|| told.clone())?;
    let told = if order != "none" { format!("{told}; {}", finish_keys(&scenario).await.with_context(|| told.clone())?) } else { told };
    for host in hosts.iter().flatten() {
        host.stop().await.with_context(|| told.clone())?;
    }
    if order != "none" { scenario.check_order().await } else { scenario.check().await }.with_context(|| told.clone())?;
    let crashed = scenario.number("SELECT count(*) FROM oncebox.inbox WHERE reason = 'crashed'").await?;
    Ok(format!("{told}; {crashed} parked as crashed"))
}

/// What stands behind a message that will not run any more follows in its turn, when a person is done with that.
async fn finish_keys(scenario: &Scenario) -> Result<String> {
    const WAITING: &str = "SELECT count(*) FROM oncebox.inbox WHERE consumer_id = {consumer} AND status = 'waiting'";
    let waited = scenario.number(WAITING).await?;
    let deadline = Instant::now() + Duration::from_secs(60);
    while scenario
        .number("SELECT count(*) FROM oncebox.inbox WHERE consumer_id = {consumer} AND status NOT IN ('completed', 'discarded')")
        .await?
        > 0
    {
        ensure!(Instant::now() < deadline, "messages do not follow: {:?}", scenario.found().await?);
        for reason in ["reject", "park", "no_route", "crashed", "undecodable"] {
            let filter = Filter { reason: Some(reason.to_owned()), ..Filter::default() };
            let reason = "they are looked at".to_owned();
            let remedy = Remedy { verb: Verb::Discard, filter, message_ids: Vec::new(), reason, as_of: None, limit: 1_000 };
            scenario.admin.remedy(&scenario.tenant.name, "payments", &remedy).await?;
        }
        sleep(Duration::from_millis(50)).await;
    }
    scenario.check_order().await?;
    Ok(format!("{waited} waited behind dead letters, and followed"))
}

/// A session that nobody uses while its transaction is open ends soon, so that a paused host does not
/// hold its messages for long.
fn start(scenario: &Scenario, name: &str) -> Result<HostProcess> {
    scenario.start(name, &[("ONCEBOX_DATABASE_IDLE_IN_TRANSACTION_TIMEOUT_MS", "1500")])
}

async fn make_trouble(scenario: &Scenario, hosts: &mut [Option<HostProcess>; 2], rng: &mut StdRng) -> Result<String> {
    let place = rng.random_range(0..hosts.len());
    let name = ["a", "b"][place];
    let Some(host) = hosts[place].take_if(|host| !host.is_running()).or_else(|| hosts[place].take()).filter(HostProcess::is_running) else {
        hosts[place] = Some(start(scenario, name)?);
        return Ok(format!("start-{name}"));
    };
    match rng.random_range(0..10) {
        0..4 => {
            host.kill().await?;
            if rng.random_bool(0.7) {
                hosts[place] = Some(start(scenario, name)?);
            }
            Ok(format!("kill-{name}"))
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
            Ok(format!("cut-{}", scenario.cut_sessions().await?))
        }
        _ => {
            host.signal(libc::SIGTERM);
            hosts[place] = Some(host);
            Ok(format!("term-{name}"))
        }
    }
}

fn heal(scenario: &Scenario, hosts: &mut [Option<HostProcess>; 2]) -> Result<()> {
    for (host, name) in hosts.iter_mut().zip(["a", "b"]) {
        // One that is draining comes to its end beside its successor.
        if !host.as_ref().is_some_and(HostProcess::is_running) {
            *host = Some(start(scenario, name)?);
        }
    }
    Ok(())
}
