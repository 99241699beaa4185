//! What brokers do to a consumer: a topic is deleted and made again, partitions are added,
//! partitions move to another host. No record is left out for it, and what a host says of its
//! partitions is of those it has.

use std::net::SocketAddr;

use anyhow::{Result, ensure};
use oncebox_control::NewDeployment;
use oncebox_tests::{
    host::{HostFixture, HostProcess, Options, aside},
    kafka::KafkaServer,
    load::{Load, Work},
    proxy::Proxy,
    wait::{self, DEADLINE},
};
use tokio::net::TcpListener;

const EFFECTS: &str = "SELECT count(*) FROM {schema}.ledger_entry";
const POLL: std::time::Duration = std::time::Duration::from_millis(50);

/// Waits until a condition holds.
async fn until(what: &str, mut reached: impl AsyncFnMut() -> bool) -> Result<()> {
    wait::until(
        DEADLINE,
        POLL,
        async || Ok(reached().await),
        async || format!("not within {DEADLINE:?}: {what}"),
    )
    .await
}

/// Waits until everything that is in the topic is acked.
async fn acked(fixture: &HostFixture) -> Result<()> {
    until("everything is acked", async || {
        fixture
            .positions()
            .await
            .is_ok_and(|positions| positions.values().all(|(committed, end)| committed == end))
    })
    .await
}

// A topic made again ------------------------------------------------------------------------------

/// Where the host is while the topic is deleted, made again and filled.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Host {
    /// Reading.
    Runs,
    /// Standing still, so that it sees nothing of it until the new topic is longer than the old one
    /// was.
    Frozen,
    /// Closed, since there was nothing to read.
    Rests,
    /// Ended; another one starts afterwards.
    Away,
    /// Ended, and the group's offsets are what they were: brokers that keep the offsets of a
    /// deleted topic, or a host that committed after its deletion.
    AwayWithOffsets,
}

/// A topic of so many records, read to its end, is made again with 200.
async fn made_again(old: usize, host: Host, partitions: i32, options: Options) -> Result<()> {
    const NEW: usize = 200;
    let all = old + NEW;
    let idle_after_ms = if host == Host::Rests { 500 } else { 0 };
    // One that stands still is not taken for dead.
    let session_timeout_ms = if host == Host::Frozen { 60_000 } else { options.session_timeout_ms };
    let fixture = HostFixture::with(Options {
        static_members: false,
        idle_after_ms,
        session_timeout_ms,
        ..options.clone()
    })
    .await?;
    fixture.send(&Load::of(vec![Work::Pay; old]).named("old")).await?;
    let mut process: Option<HostProcess> = Some(fixture.start_ready("a", &[]).await?);
    fixture.until(EFFECTS, old as i64).await?;
    acked(&fixture).await?;
    if host != Host::Rests {
        let running = process.as_ref().unwrap();
        until("it has its partitions", async || {
            running.samples("oncebox_kafka_lag_records").await.len() == 2
        })
        .await?;
    }
    let notes = fixture.offsets_with_notes().await?;
    let running = process.as_ref().unwrap();
    match host {
        Host::Runs => {}
        Host::Frozen => running.signal(libc::SIGSTOP),
        Host::Rests => running.until_metric("oncebox_consumers", &["idle"], 1.0).await?,
        Host::Away | Host::AwayWithOffsets => process.take().unwrap().stop().await?,
    }
    fixture.make_topic_again(partitions).await?;
    fixture.send(&Load::of([Work::Pay; NEW]).named("new")).await?;
    if host == Host::AwayWithOffsets {
        fixture.set_offsets_with_notes(&notes).await?;
    }
    match host {
        Host::Frozen => process.as_ref().unwrap().signal(libc::SIGCONT),
        Host::Away | Host::AwayWithOffsets => process = Some(fixture.start_ready("a", &[]).await?),
        _ => {}
    }
    // What is not read is lost without a trace: nothing waits, and no lag tells of it.
    if let Err(error) = fixture.until(EFFECTS, all as i64).await {
        let effects = fixture.number(EFFECTS).await?;
        return fixture.violated(format!(
            "{host:?}, {options:?}: {effects} of {} effects, at {:?}: {error:#}",
            all,
            fixture.positions().await?
        ));
    }
    acked(&fixture).await?;
    let found = fixture.found().await?;
    let once = found.iter().all(|row| row.status == "completed" && row.effects == 1);
    if !once || found.len() != all {
        return fixture.violated(format!(
            "{host:?}, {options:?}: each record has its row and its one effect: {} rows, {found:?}",
            found.len()
        ));
    }
    let process = process.unwrap();
    if matches!(host, Host::Frozen | Host::AwayWithOffsets) && old > 0 {
        let counted = process.sum("oncebox_kafka_topic_made_again_total").await;
        ensure!(counted.is_some_and(|counted| counted > 0.0), "nobody is told: {counted:?}");
    }
    process.stop().await
}

const POSITION: &str = "['position']";

/// What could go wrong: a topic is deleted and made again, and its first records are below the
/// offset that was committed for its predecessor: they are in no row, nothing waits, no lag tells
/// of it.
#[tokio::test(flavor = "multi_thread")]
async fn a_topic_made_again_under_a_running_host_is_read_from_its_beginning() {
    let of = |ack, id| Options { ack, id, ..Options::default() };
    for (old, host, partitions, options) in [
        (30, Host::Frozen, 2, of("after_commit", Options::default().id)),
        (30, Host::Frozen, 4, of("after_insert", POSITION)),
        (0, Host::Frozen, 2, of("after_commit", POSITION)),
        (30, Host::Runs, 4, of("after_commit", POSITION)),
        (30, Host::Runs, 2, of("after_insert", Options::default().id)),
        (30, Host::Rests, 2, of("after_commit", POSITION)),
    ] {
        aside(move || made_again(old, host, partitions, options)).await.unwrap();
    }
}

/// What could go wrong: the same, while no host runs.
#[tokio::test(flavor = "multi_thread")]
async fn a_topic_made_again_while_no_host_runs_is_read_from_its_beginning() {
    let of = |ack, id| Options { ack, id, ..Options::default() };
    for (host, partitions, options) in [
        (Host::AwayWithOffsets, 2, of("after_commit", Options::default().id)),
        (Host::AwayWithOffsets, 4, of("after_insert", POSITION)),
        (Host::Away, 4, of("after_commit", POSITION)),
    ] {
        aside(move || made_again(30, host, partitions, options)).await.unwrap();
    }
}

/// What could go wrong: offsets that a person sets know nothing of the topic they were set for.
#[tokio::test(flavor = "multi_thread")]
async fn an_offset_that_was_sought_is_of_the_topic_it_was_sought_in() {
    let fixture =
        HostFixture::with(Options { partitions: 1, static_members: false, ..Options::default() })
            .await
            .unwrap();
    fixture.send(&Load::of([Work::Pay; 30]).named("old")).await.unwrap();
    let host = fixture.start_ready("a", &[]).await.unwrap();
    fixture.until(EFFECTS, 30).await.unwrap();
    acked(&fixture).await.unwrap();
    let tenant = fixture.tenant.name.clone();
    fixture.ok(&["consumer", "pause", "payments", "--tenant", &tenant]).await.unwrap();
    fixture
        .ok(&["consumer", "seek", "payments", "--tenant", &tenant, "--offset", "0=20", "--yes"])
        .await
        .unwrap();
    until("the offset is set", async || fixture.positions().await.unwrap()[&0].0 == 20)
        .await
        .unwrap();
    let notes = fixture.offsets_with_notes().await.unwrap();
    assert!(notes[0].2.contains("topic-id="), "{notes:?}");
    fixture.make_topic_again(1).await.unwrap();
    fixture.send(&Load::of([Work::Pay; 60]).named("new")).await.unwrap();
    fixture.set_offsets_with_notes(&notes).await.unwrap();
    fixture.ok(&["consumer", "resume", "payments", "--tenant", &tenant]).await.unwrap();
    fixture.until(EFFECTS, 90).await.unwrap();
    acked(&fixture).await.unwrap();
    fixture.check().await.unwrap();
    host.stop().await.unwrap();
}

/// What could go wrong: an offset that a host of an earlier version committed says nothing of its
/// topic, and everything is read again, or it stays so until its partition has another record.
#[tokio::test(flavor = "multi_thread")]
async fn an_offset_without_a_topic_id_is_taken_as_it_is_and_gets_one() {
    let fixture =
        HostFixture::with(Options { partitions: 1, static_members: false, ..Options::default() })
            .await
            .unwrap();
    fixture.send(&Load::of([Work::Pay; 30])).await.unwrap();
    fixture.reset_offsets(20).await.unwrap();
    assert_eq!(fixture.offsets_with_notes().await.unwrap()[0].2, "");
    let host = fixture.start_ready("a", &[]).await.unwrap();
    acked(&fixture).await.unwrap();
    assert_eq!(fixture.number(EFFECTS).await.unwrap(), 10, "what is below it was not read");
    assert!(fixture.offsets_with_notes().await.unwrap()[0].2.contains("topic-id="));
    host.stop().await.unwrap();
    // With nothing more to read.
    fixture.reset_offsets(30).await.unwrap();
    let host = fixture.start_ready("a", &[("ONCEBOX_KAFKA_IDLE_AFTER_MS", "0")]).await.unwrap();
    until("the offset has a topic", async || {
        fixture.offsets_with_notes().await.unwrap()[0].2.contains("topic-id=")
    })
    .await
    .unwrap();
    assert_eq!(fixture.positions().await.unwrap()[&0], (30, 30));
    host.stop().await.unwrap();
}

// Partitions --------------------------------------------------------------------------------------

/// A partition is added, and its records come only there.
async fn partition_added(options: Options) -> Result<()> {
    let rests = options.idle_after_ms == 500;
    let fixture =
        HostFixture::with(Options { partitions: 1, static_members: false, ..options.clone() })
            .await?;
    fixture.send(&Load::of([Work::Pay; 5]).named("before")).await?;
    let host = fixture.start_ready("a", &[]).await?;
    fixture.until(EFFECTS, 5).await?;
    acked(&fixture).await?;
    if rests {
        host.until_metric("oncebox_consumers", &["idle"], 1.0).await?;
    }
    fixture.add_partitions(3).await?;
    if !rests {
        let lag = ["partition=\"2\""];
        until("the new partition is in the lag", async || {
            host.metric("oncebox_kafka_lag_records", &lag).await == Some(0.0)
        })
        .await?;
    }
    fixture.send_to(2, &Load::of([Work::Pay; 5]).named("after")).await?;
    fixture.until(EFFECTS, 10).await?;
    fixture.wait_settled().await?;
    fixture.check().await?;
    host.stop().await
}

/// What could go wrong: what is written to a partition that is new waits for minutes, and is in no
/// lag.
#[tokio::test(flavor = "multi_thread")]
async fn a_partition_that_is_added_is_read_within_seconds() {
    for options in [
        Options::default(),
        Options { pattern: true, ..Options::default() },
        Options { idle_after_ms: 500, ..Options::default() },
    ] {
        aside(move || partition_added(options)).await.unwrap();
    }
}

/// What could go wrong: a host goes on saying what the lag of a partition was that another host
/// reads now.
#[tokio::test(flavor = "multi_thread")]
async fn a_host_says_nothing_of_partitions_that_it_gave_up() {
    let fixture = HostFixture::with(Options {
        partitions: 4,
        static_members: false,
        idle_after_ms: 0,
        ..Options::default()
    })
    .await
    .unwrap();
    fixture.send(&Load::of([Work::Pay; 40])).await.unwrap();
    let one = fixture.start_ready("a", &[]).await.unwrap();
    const GAUGES: [&str; 2] = ["oncebox_kafka_lag_records", "oncebox_kafka_partition_paused"];
    let count = async |host: &HostProcess| {
        let mut counts = Vec::new();
        for gauge in GAUGES {
            counts.push(host.samples(gauge).await.len());
        }
        counts
    };
    until("one host has all", async || count(&one).await == [4, 4]).await.unwrap();
    let two = fixture.start_ready("b", &[]).await.unwrap();
    until("each says it of its own", async || {
        count(&one).await == [2, 2] && count(&two).await == [2, 2]
    })
    .await
    .unwrap();
    two.stop().await.unwrap();
    until("one host has all again", async || count(&one).await == [4, 4]).await.unwrap();
    // Nobody reads them any more.
    fixture.ok(&["consumer", "pause", "payments", "--tenant", &fixture.tenant.name]).await.unwrap();
    until("nobody has any", async || count(&one).await == [0, 0]).await.unwrap();
    one.stop().await.unwrap();
}

// Brokers that come and go ------------------------------------------------------------------------

/// What could go wrong: a broker, or the way to it, comes and goes while consumers rest, and the
/// host dies of a question that timed out meanwhile; or it lives and hears of nothing any more.
#[tokio::test(flavor = "multi_thread")]
async fn a_host_whose_consumers_rest_outlives_twenty_bounces_of_the_broker() {
    const BOUNCES: usize = 20;
    const RESTING: usize = 24;
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let advertised = listener.local_addr().unwrap().port();
    let kafka = tokio::task::spawn_blocking(move || KafkaServer::start_behind(&[advertised]))
        .await
        .unwrap()
        .unwrap();
    let way =
        Proxy::at(listener, SocketAddr::from(([127, 0, 0, 1], kafka.own_ports()[0]))).unwrap();
    let brokers = Some(format!("127.0.0.1:{advertised}"));
    let fixture = HostFixture::with(Options { brokers, idle_after_ms: 500, ..Options::default() })
        .await
        .unwrap();
    let policy = fixture
        .control
        .consumers()
        .get(&fixture.tenant.name, "payments")
        .await
        .unwrap()
        .policy()
        .unwrap();
    let component = include_bytes!("../../../guest-examples/components/ledger.wasm");
    for number in 1..RESTING {
        let name = format!("resting-{number}");
        fixture.control.consumers().create(&fixture.tenant.name, &name, &policy).await.unwrap();
        let deployment = NewDeployment::stable("payment.captured", "ledger", "");
        fixture
            .control
            .versions()
            .deploy_compiled(&fixture.tenant.name, &name, deployment, component)
            .await
            .unwrap();
    }
    let host = fixture.start_ready("a", &[]).await.unwrap();
    host.until_metric("oncebox_consumers", &["idle"], RESTING as f64).await.unwrap();
    let open = async || host.metric("oncebox_consumers", &["open"]).await.unwrap_or(0.0);
    for bounce in 0..BOUNCES {
        way.close();
        // Now and then only the connections are cut. Else until consumers open since nothing can be
        // told of them: questions, which may take three seconds, have timed out before that.
        if bounce % 4 != 3 {
            until("a consumer opens", async || open().await >= 1.0 || !host.is_running())
                .await
                .unwrap();
        }
        assert!(host.is_running(), "the host died of bounce {bounce}");
        way.heal();
        until("all rest again", async || open().await == 0.0 || !host.is_running()).await.unwrap();
        assert!(host.is_running(), "the host died of bounce {bounce}");
    }
    fixture.send(&Load::of([Work::Pay; 5])).await.unwrap();
    fixture.until(EFFECTS, 5).await.unwrap();
    host.stop().await.unwrap();
}
