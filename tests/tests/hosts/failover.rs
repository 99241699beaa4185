//! The database loses commits that it had confirmed: a standby that did not have them yet is
//! promoted, or a backup takes the server's place. The group's offsets are past their messages.

use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use oncebox_tests::{
    cluster::{Cluster, Successor},
    host::{HostFixture, HostProcess, Options},
    load::{Load, Work},
    wait::DEADLINE,
};
use rand::{Rng, SeedableRng, rngs::StdRng};
use tokio::time::sleep;

use crate::crash_recovery::run_seeds;

const EFFECTS: &str = "SELECT count(*) FROM {schema}.ledger_entry";
const ROWS: &str = "SELECT count(*) FROM oncebox.inbox";

/// Failovers of one seed.
const ROUNDS: usize = 2;
/// Seeds side by side; each has two hosts, and up to two servers.
const AT_ONCE: usize = 2;
/// Messages between two failovers.
const MESSAGES: usize = 240;

/// What could go wrong: commits that were confirmed and acked are lost with the primary, and nobody
/// reads their messages again; or they are read again and have their effect twice; or a host that
/// dies meanwhile leaves the offsets where nobody looks. S0-002, S1-105, S4-002.
///
/// `ONCEBOX_FAILOVER_SEEDS` says how many new seeds are run (3 by default), or, as a list with a
/// comma, which.
#[tokio::test(flavor = "multi_thread")]
async fn commits_that_a_failover_lost_have_their_effects_after_it() {
    run_seeds("ONCEBOX_FAILOVER_SEEDS", 3, AT_ONCE, fail_over).await;
}

/// What could go wrong: a server that only started again, with everything it had, is taken for one
/// that lost commits, and each restart has consumers join their groups anew.
#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_has_everything_is_not_read_again() {
    let mut cluster = Cluster::start().await.unwrap();
    let fixture = fixture(&cluster, false).await.unwrap();
    let host = fixture.start_ready("a", &[]).await.unwrap();
    const WHOLE: &str = "it has all commits of the partition";
    let loads = [
        Load::of([Work::Pay; 40]).named("new"),
        Load::of([Work::Fails(2); 20]).named("failing"),
        // Nothing but duplicates.
        Load::of([Work::Pay; 40]).named("new"),
    ];
    for (round, load) in loads.iter().enumerate() {
        cluster.prepare(Successor::Itself).await.unwrap();
        fixture.open_accounts(load).await.unwrap();
        fixture.send(load).await.unwrap();
        if round == 0 {
            fixture.until(EFFECTS, 20).await.unwrap();
        } else {
            fixture.wait_settled().await.unwrap();
        }
        let checked = host.log_lines(WHOLE);
        cluster.fail_over().await.unwrap();
        cluster.heal();
        let deadline = Instant::now() + DEADLINE;
        while host.log_lines(WHOLE) == checked {
            assert!(Instant::now() < deadline, "nobody looked whether commits are lost");
            sleep(Duration::from_millis(50)).await;
        }
        fixture.wait_settled().await.unwrap();
    }
    fixture.check().await.unwrap();
    assert_eq!(host.sum("oncebox_kafka_rewinds_total").await.unwrap_or(0.0), 0.0);
    assert_eq!(host.log_lines("database found behind"), 0);
    host.stop().await.unwrap();
}

/// What could go wrong: nothing comes any more when commits are lost, so that nobody asks the
/// database: a partition that is held waits for a record, a consumer rests outside its group, a
/// host that starts later sees no lag. S1-105.
#[tokio::test(flavor = "multi_thread")]
async fn what_was_lost_is_found_where_nothing_comes_any_more() {
    for (idle_after_ms, starts_later) in [(0, false), (1_000, false), (1_000, true)] {
        let mut cluster = Cluster::start().await.unwrap();
        let fixture = HostFixture::with(Options {
            postgres: Some(cluster.url().to_owned()),
            static_members: false,
            idle_after_ms,
            ..Options::default()
        })
        .await
        .unwrap();
        let host = fixture.start_ready("a", &[]).await.unwrap();
        cluster.prepare(Successor::Standby).await.unwrap();
        fixture.send(&Load::of([Work::Pay; 20]).named("kept")).await.unwrap();
        fixture.until(EFFECTS, 20).await.unwrap();
        cluster.sever();
        fixture.send(&Load::of([Work::Pay; 20]).named("lost")).await.unwrap();
        fixture.wait_settled().await.unwrap();
        if idle_after_ms > 0 {
            host.wait_log("consumer closed: nothing to do").await.unwrap();
        }
        if starts_later {
            host.stop().await.unwrap();
        }
        cluster.fail_over().await.unwrap();
        let had = cluster.number(fixture.database_name(), ROWS).await.unwrap();
        assert!(had < 40, "nothing was lost: {had} rows");
        cluster.heal();
        let later = if starts_later { Some(fixture.start("b", &[]).unwrap()) } else { None };
        all_done(&fixture, 40).await.unwrap();
        fixture.wait_settled().await.unwrap();
        fixture.check().await.unwrap();
        later.unwrap_or(host).stop().await.unwrap();
    }
}

/// What could go wrong: an operator skips messages, and the host that opens the partitions on
/// another server goes back to where the database was.
#[tokio::test(flavor = "multi_thread")]
async fn an_offset_of_an_operator_counts_on_any_server() {
    let mut cluster = Cluster::start().await.unwrap();
    let fixture = fixture(&cluster, false).await.unwrap();
    let host = fixture.start_ready("a", &[]).await.unwrap();
    fixture.send(&Load::of([Work::Pay; 20]).named("first")).await.unwrap();
    fixture.wait_settled().await.unwrap();
    host.stop().await.unwrap();
    let before = fixture.positions().await.unwrap();
    fixture.send(&Load::of([Work::Pay; 20]).named("skipped")).await.unwrap();
    let ends: Vec<_> = fixture.positions().await.unwrap().into_iter().collect();
    assert!(ends.iter().any(|(partition, (_, end))| before[partition].1 < *end));
    let offsets: Vec<_> =
        ends.iter().map(|(partition, (_, end))| (*partition, *end, String::new())).collect();
    fixture.set_offsets_with_notes(&offsets).await.unwrap();
    cluster.prepare(Successor::Itself).await.unwrap();
    cluster.fail_over().await.unwrap();
    cluster.heal();
    let host = fixture.start_ready("a", &[]).await.unwrap();
    fixture.send(&Load::of([Work::Pay; 20]).named("second")).await.unwrap();
    fixture.until(EFFECTS, 40).await.unwrap();
    assert_eq!(fixture.number(EFFECTS).await.unwrap(), 40, "what was skipped stays skipped");
    host.stop().await.unwrap();
    assert_eq!(fixture.number(EFFECTS).await.unwrap(), 40);
}

/// The inbox on a cluster: in the host's database, or in one of the tenant's own.
async fn fixture(cluster: &Cluster, own_database: bool) -> Result<HostFixture> {
    let url = Some(cluster.url().to_owned());
    let (postgres, own_postgres) = if own_database { (None, url) } else { (url, None) };
    HostFixture::with(Options {
        postgres,
        own_database,
        own_postgres,
        idle_after_ms: 0,
        static_members: false,
        ..Options::default()
    })
    .await
}

/// Fails over in mid-load, and tells what was lost.
async fn fail_over(seed: u64) -> Result<String> {
    let mut random = StdRng::seed_from_u64(seed);
    let mut cluster = Cluster::start().await?;
    let own_database = random.random_bool(0.4);
    let fixture = fixture(&cluster, own_database).await?;
    let mut hosts = [fixture.start_ready("a", &[]).await?, fixture.start_ready("b", &[]).await?];
    let mut told = Vec::new();
    for round in 0..ROUNDS {
        let successor =
            [Successor::Standby, Successor::Standby, Successor::Backup][random.random_range(0..3)];
        let load = load(&mut random).named(&format!("{round}"));
        fixture.open_accounts(&load).await?;
        cluster.prepare(successor).await?;
        let before = fixture.number(EFFECTS).await?;
        fixture.send(&load).await?;
        fixture.until(EFFECTS, before + random.random_range(1..60)).await?;
        cluster.sever();
        let cut = fixture.number(EFFECTS).await?;
        fixture.until(EFFECTS, cut + random.random_range(20..90)).await?;
        let had = fixture.number(ROWS).await?;
        cluster.fail_over().await?;
        let lost = had - cluster.number(fixture.database_name(), ROWS).await?;
        ensure!(lost > 0, "nothing was lost by {successor:?}");
        let killed = random.random_bool(0.4).then(|| random.random_range(0..hosts.len()));
        cluster.heal();
        if let Some(one) = killed {
            sleep(Duration::from_millis(random.random_range(0..4_000))).await;
            hosts[one].kill().await?;
            hosts[one] = fixture.start(["a", "b"][one], &[])?;
        }
        all_done(&fixture, ((round + 1) * MESSAGES) as i64).await?;
        told.push(format!(
            "{successor:?} lost {lost} rows{}",
            if killed.is_some() { ", and a host died" } else { "" }
        ));
    }
    let rewinds = rewinds(&hosts).await;
    fixture.wait_settled().await?;
    fixture.check().await?;
    for host in hosts {
        host.stop().await?;
    }
    let whose = if own_database { "the tenant's own server" } else { "the host's server" };
    Ok(format!("{whose}: {}; {rewinds} partitions were read again", told.join(", ")))
}

/// Payments, a tenth of which fail at first, and some of which take a while.
fn load(random: &mut StdRng) -> Load {
    Load::of((0..MESSAGES).map(|_| match random.random_range(0..20) {
        0 | 1 => Work::Fails(2),
        2 => Work::Sleeps(random.random_range(5..60)),
        _ => Work::Pay,
    }))
}

/// Waits until all messages have rows that are done. What was acked may be missing for a while.
async fn all_done(fixture: &HostFixture, messages: i64) -> Result<()> {
    const DONE: &str = "SELECT count(*) FROM oncebox.inbox WHERE status = 'completed'";
    let deadline = Instant::now() + DEADLINE;
    loop {
        let done = fixture.number(DONE).await.unwrap_or(0);
        if done >= messages {
            return Ok(());
        }
        if Instant::now() > deadline {
            return fixture
                .violated(format!("messages are lost: {done} of {messages} have their effect"));
        }
        sleep(Duration::from_millis(50)).await;
    }
}

async fn rewinds(hosts: &[HostProcess]) -> f64 {
    let mut sum = 0.0;
    for host in hosts {
        sum += host.sum("oncebox_kafka_rewinds_total").await.unwrap_or(0.0);
    }
    sum
}
