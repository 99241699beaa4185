//! Partitions change hands, offsets go back, events are published twice: each message keeps its one
//! effect.

use std::time::{Duration, Instant};

use anyhow::Result;
use oncebox_tests::{
    host::{HostFixture, Options},
    load::{Load, Work},
    wait::DEADLINE,
};
use rand::{SeedableRng, rngs::StdRng};
use tokio::time::sleep;

const EFFECTS: &str = "SELECT count(*) FROM {schema}.ledger_entry";

/// Publish a load over a while.
async fn send_slowly(fixture: &HostFixture, load: &Load, over: Duration) -> Result<()> {
    let parts = load.deliveries.chunks(20);
    let pause = over / parts.len() as u32;
    for part in parts {
        fixture.send(&Load { deliveries: part.to_vec() }).await?;
        sleep(pause).await;
    }
    Ok(())
}

/// Hosts join, leave and die while messages come.
async fn hosts_come_and_go(options: Options) -> Result<()> {
    let fixture = HostFixture::with(options).await?;
    let load = Load::mixed(&mut StdRng::seed_from_u64(rand::random()), 400);
    let changes = async {
        let first = fixture.start_ready("a", &[]).await?;
        fixture.until(EFFECTS, 20).await?;
        let second = fixture.start_ready("b", &[]).await?;
        fixture.until(EFFECTS, 80).await?;
        second.stop().await?;
        let second = fixture.start_ready("b", &[]).await?;
        fixture.until(EFFECTS, 150).await?;
        first.kill().await?;
        let third = fixture.start_ready("c", &[]).await?;
        fixture.until(EFFECTS, 180).await?;
        third.kill().await?;
        let third = fixture.start_ready("c", &[]).await?;
        anyhow::Ok((second, third))
    };
    let (sent, hosts) = tokio::join!(send_slowly(&fixture, &load, Duration::from_secs(6)), changes);
    sent?;
    let (second, third) = hosts?;
    fixture.wait_settled().await?;
    // S0-004, S1-001, S4-002.
    fixture.check().await?;
    second.stop().await?;
    third.stop().await?;
    fixture.check().await
}

/// What could go wrong: at a hand-over a message in flight is lost, or runs on both sides.
/// S0-004, S1-001 (rebalance), S4-002.
#[tokio::test(flavor = "multi_thread")]
async fn hosts_join_leave_and_die_under_load() {
    let options = Options {
        partitions: 6,
        static_members: false,
        session_timeout_ms: 2_000,
        ..Options::default()
    };
    hosts_come_and_go(options).await.unwrap();
}

/// What could go wrong: the same for hosts that keep their place in the group. A partition given up
/// in the first of two steps of a rebalance must not stay without an owner when the second never
/// comes.
#[tokio::test(flavor = "multi_thread")]
async fn static_members_with_a_short_session_join_leave_and_die_under_load() {
    let options = Options { partitions: 6, session_timeout_ms: 2_000, ..Options::default() };
    hosts_come_and_go(options).await.unwrap();
}

/// What could go wrong: a host that slept while its partitions moved wakes up in the middle of a
/// message and finishes it beside its successor. S0-002, S0-004, A4, D8.
#[tokio::test(flavor = "multi_thread")]
async fn a_paused_host_that_wakes_up_after_its_partitions_moved_repeats_nothing() {
    let options =
        Options { static_members: false, session_timeout_ms: 1_500, ..Options::default() };
    let fixture = HostFixture::with(options).await.unwrap();
    let variables = [("ONCEBOX_DATABASE_IDLE_IN_TRANSACTION_TIMEOUT_MS", "1000")];
    let zombie = fixture.start("a", &variables).unwrap();
    for nap in 0..2 {
        let mut load = Load::of([Work::Sleeps(300); 6]);
        (0..60)
            .for_each(|number| load.push(if number % 6 == 0 { Work::Fails(2) } else { Work::Pay }));
        fixture.send(&load.named(&format!("nap-{nap}"))).await.unwrap();
        fixture.until_sleeping(1).await.unwrap();
        zombie.signal(libc::SIGSTOP);
        let successor = fixture.start("b", &variables).unwrap();
        fixture.wait_settled().await.unwrap();
        // It finds out, and joins again.
        zombie.signal(libc::SIGCONT);
        // S0-002, S0-004.
        fixture.check().await.unwrap();
        successor.stop().await.unwrap();
    }
    fixture.wait_settled().await.unwrap();
    fixture.check().await.unwrap();
    zombie.stop().await.unwrap();
}

/// What could go wrong: after a reset of the offsets, or a replay of the whole topic, old messages
/// take effect again, or what failed then is judged anew. S1-001 (offset reset, manual backfill),
/// S1-103.
#[tokio::test(flavor = "multi_thread")]
async fn an_offset_reset_finds_nothing_but_duplicates() {
    let fixture =
        HostFixture::with(Options { static_members: false, ..Options::default() }).await.unwrap();
    fixture.send(&Load::mixed(&mut StdRng::seed_from_u64(rand::random()), 150)).await.unwrap();
    let mut before = None;
    for _ in 0..2 {
        let host = fixture.start("a", &[]).unwrap();
        fixture.wait_settled().await.unwrap();
        host.stop().await.unwrap();
        fixture.check().await.unwrap();
        let rows = rows(&fixture).await;
        // S1-001, S1-103.
        assert_eq!(*before.get_or_insert(rows.clone()), rows, "a second reading changed rows");
        fixture.reset_offsets(0).await.unwrap();
        assert!(
            fixture
                .positions()
                .await
                .unwrap()
                .values()
                .all(|(committed, end)| *committed == 0 && *end > 0)
        );
    }
}

async fn rows(fixture: &HostFixture) -> Vec<(String, String, i32, i64)> {
    let mut rows: Vec<_> = fixture
        .found()
        .await
        .unwrap()
        .into_iter()
        .map(|row| (row.message_id, row.status, row.attempts, row.effects))
        .collect();
    rows.sort();
    rows
}

/// What could go wrong: an event that its producer or a relay published twice, at other offsets or
/// in another partition, takes effect twice, even when two hosts read the two at the same time.
/// S0-003, S1-001 (producer retry, relay duplicate), S4-017.
#[tokio::test(flavor = "multi_thread")]
async fn an_event_published_twice_has_one_effect() {
    let fixture =
        HostFixture::with(Options { partitions: 6, static_members: false, ..Options::default() })
            .await
            .unwrap();
    let hosts = [
        fixture.start_ready("a", &[]).await.unwrap(),
        fixture.start_ready("b", &[]).await.unwrap(),
    ];
    let load =
        Load::of((0..120).map(|number| if number % 10 == 0 { Work::Fails(2) } else { Work::Pay }));
    // Again at once, from two relays, and again when everything is long done.
    let (one, other) = tokio::join!(fixture.send(&load), fixture.send(&load));
    one.unwrap();
    other.unwrap();
    fixture.wait_settled().await.unwrap();
    fixture.send(&load).await.unwrap();
    fixture.wait_settled().await.unwrap();
    fixture.check().await.unwrap();
    // S0-003, S1-001, S4-017.
    assert_eq!(fixture.number(EFFECTS).await.unwrap(), 120);
    for host in hosts {
        host.stop().await.unwrap();
    }
}

/// What could go wrong: a topic that is deleted and made again starts at offset 0, and its records
/// are taken for those of its predecessor, acked and lost. A8 (a), S0-016.
#[tokio::test(flavor = "multi_thread")]
async fn a_topic_made_again_is_not_taken_for_its_predecessor() {
    let fixture = HostFixture::with(Options {
        id: "['position']",
        static_members: false,
        ..Options::default()
    })
    .await
    .unwrap();
    let load = Load::of([Work::Pay; 20]);
    for round in 1..=2 {
        fixture.open_accounts(&load).await.unwrap();
        fixture.send(&load).await.unwrap();
        let host = fixture.start("a", &[]).unwrap();
        fixture.until(EFFECTS, 20 * round).await.unwrap();
        let acked = Instant::now() + DEADLINE;
        while fixture.positions().await.unwrap().values().any(|(committed, end)| committed != end) {
            assert!(Instant::now() < acked, "not acked: {:?}", fixture.positions().await.unwrap());
            sleep(Duration::from_millis(50)).await;
        }
        host.stop().await.unwrap();
        let found = fixture.found().await.unwrap();
        // S0-016.
        assert_eq!(found.len() as i64, 20 * round);
        assert!(found.iter().all(|row| row.status == "completed" && row.effects == 1), "{found:?}");
        fixture.kafka().delete_topic(&fixture.topic).await.unwrap();
        fixture.kafka().create_topic(&fixture.topic, 2, &[]).await.unwrap();
    }
}
