//! The database or the broker goes away under load and comes back; a host is asked to leave in the
//! middle of its work. Nothing is lost, nothing is done twice, and nobody's attempts are used up.

#![allow(clippy::unwrap_used, reason = "a panic is how a test fails")]

use std::{
    path::PathBuf,
    time::{Duration, Instant},
};

use oncebox_server::local::postgres::{PostgresOptions, PrivatePostgres};
use oncebox_tests::{
    host::{Options, Scenario},
    kafka::KafkaServer,
    load::{Load, Work},
};
use tokio::task::spawn_blocking;

const EFFECTS: &str = "SELECT count(*) FROM {schema}.ledger_entry";

/// Payments, every tenth of which fails once. Nothing in them is slow, so whatever an outage stops is
/// the outage's.
fn load(messages: usize) -> Load {
    Load::of((0..messages).map(|number| if number % 10 == 0 { Work::Fails(2) } else { Work::Pay }))
}

/// A folder that goes away with the test.
struct Folder(PathBuf);

impl Folder {
    fn new() -> Self {
        Self(std::env::temp_dir().join(format!("oncebox-outage-{:08x}", rand::random::<u32>())))
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// What could go wrong: PostgreSQL crashes in the middle of a batch, and what was under way is acked
/// without its effect, repeated, or charged to the messages. A3, D3, S1-001 (network timeout), S1-105.
#[tokio::test(flavor = "multi_thread")]
async fn a_crash_of_the_database_costs_nothing() {
    let folder = Folder::new();
    let options = PostgresOptions::new(&folder.0).tcp(true);
    let mut postgres = spawn_blocking(move || PrivatePostgres::start(options)).await.unwrap().unwrap();
    let scenario = Scenario::with(Options { postgres: Some(postgres.url()), ..Options::default() }).await.unwrap();
    let load = load(600);
    scenario.open_accounts(&load).await.unwrap();
    let host = scenario.start_ready("a", &[]).await.unwrap();
    let mut sent = 0;
    for (outage, chunk) in load.deliveries.chunks(200).enumerate() {
        let before = scenario.number(EFFECTS).await.unwrap();
        scenario.send(&Load { deliveries: chunk.to_vec() }).await.unwrap();
        sent += chunk.len();
        scenario.until(EFFECTS, before + 10).await.unwrap();
        if outage == 1 {
            postgres.kill().unwrap();
            host.wait_not_ready().await.unwrap();
            postgres.start_again().unwrap();
        } else {
            postgres.restart_immediate().unwrap();
        }
        host.wait_ready().await.unwrap();
        scenario.wait_settled().await.unwrap();
    }
    assert_eq!(sent, 600);
    scenario.check().await.unwrap();
    assert!(host.is_running(), "an outage is to be waited for");
    host.stop().await.unwrap();
    drop(scenario);
    drop(postgres);
}

/// What could go wrong: the broker dies or restarts, offsets go back or a fetch is repeated, and
/// messages are skipped or done twice. S1-001 (redelivery, network timeout), S4-002.
#[tokio::test(flavor = "multi_thread")]
async fn a_crash_of_the_broker_costs_nothing() {
    let mut kafka = spawn_blocking(KafkaServer::start_private).await.unwrap().unwrap();
    let options = Options { brokers: Some(kafka.bootstrap().to_owned()), ..Options::default() };
    let scenario = Scenario::with(options).await.unwrap();
    let host = scenario.start_ready("a", &[]).await.unwrap();
    for (outage, chunk) in load(400).deliveries.chunks(200).enumerate() {
        let before = scenario.number(EFFECTS).await.unwrap();
        scenario.send(&Load { deliveries: chunk.to_vec() }).await.unwrap();
        scenario.until(EFFECTS, before + 10).await.unwrap();
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
        scenario.wait_settled().await.unwrap();
    }
    scenario.check().await.unwrap();
    assert!(host.is_running(), "an outage is to be waited for");
    host.stop().await.unwrap();
}

/// What could go wrong: a host that is asked to leave drops what it runs, does not say so, hangs, or
/// leaves the offset behind so that its successor starts over. S4-003, S0-022.
#[tokio::test(flavor = "multi_thread")]
async fn a_host_that_is_asked_to_leave_finishes_what_it_runs() {
    let scenario = Scenario::with(Options { partitions: 1, ..Options::default() }).await.unwrap();
    scenario.send(&Load::of([Work::Sleeps(1_500); 3])).await.unwrap();
    let host = scenario.start_ready("a", &[("ONCEBOX_SHUTDOWN_DRAIN_MS", "6000")]).await.unwrap();
    scenario.until_sleeping(1).await.unwrap();
    let asked = Instant::now();
    host.signal(libc::SIGTERM);
    host.wait_not_ready().await.unwrap();
    let status = host.wait_exit(Duration::from_secs(8)).await.unwrap();
    assert!(status.success() && asked.elapsed() < Duration::from_secs(6), "{status} after {:?}", asked.elapsed());
    let done = scenario.number(EFFECTS).await.unwrap();
    assert!((1..3).contains(&done), "what ran was finished, nothing else was begun: {done}");
    assert_eq!(scenario.positions().await.unwrap()[&0].0, done, "what was finished is acked");

    let successor = scenario.start("a", &[]).unwrap();
    scenario.wait_settled().await.unwrap();
    scenario.check().await.unwrap();
    successor.stop().await.unwrap();
}

/// What could go wrong: work that does not end in time keeps the process for ever, or half of it stays.
#[tokio::test(flavor = "multi_thread")]
async fn a_drain_that_takes_too_long_is_cut_short_and_leaves_nothing_half_done() {
    let scenario = Scenario::with(Options { partitions: 1, ..Options::default() }).await.unwrap();
    scenario.send(&Load::of([Work::Sleeps(2_000); 2])).await.unwrap();
    let host = scenario.start_ready("a", &[("ONCEBOX_SHUTDOWN_DRAIN_MS", "300")]).await.unwrap();
    scenario.until_sleeping(1).await.unwrap();
    let asked = Instant::now();
    host.signal(libc::SIGTERM);
    host.wait_exit(Duration::from_secs(10)).await.unwrap();
    assert!(asked.elapsed() < Duration::from_secs(6), "{:?}", asked.elapsed());
    scenario.check_whole().await.unwrap();
    let successor = scenario.start("a", &[]).unwrap();
    scenario.wait_settled().await.unwrap();
    scenario.check().await.unwrap();
    successor.stop().await.unwrap();
}
