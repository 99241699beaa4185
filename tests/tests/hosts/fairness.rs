//! Tenants of one host share it by their weights; over a limit messages wait, and none fails of it.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicI64, AtomicUsize, Ordering},
    },
    time::Duration,
};

use oncebox_control::Tenant;
use oncebox_inbox::{
    Budget, ConsumerInbox, HostBounds, PartitionInbox, SessionSettings, Sessions, Snapshot,
    TenantCounts, retry,
};
use oncebox_model::{InboxError, TenantLimits, record::Record};
use oncebox_tests::{
    host::{HostFixture, Options},
    inbox::{InboxFixture, TestConsumer, record},
    load::{Load, Work},
    wait::DEADLINE,
};
use tokio::{
    task::JoinHandle,
    time::{Instant, sleep, timeout},
};
use tokio_util::sync::CancellationToken;

/// One host for several tenants.
struct Host {
    budget: Arc<Budget>,
}

impl Host {
    fn of(transactions_max: usize, memory_bytes_max: u64) -> Self {
        Self { budget: Budget::of(32, HostBounds::new(transactions_max, memory_bytes_max)) }
    }

    fn inbox(&self, fixture: &InboxFixture, consumer: &TestConsumer) -> Arc<ConsumerInbox> {
        let sessions = Sessions::of(
            fixture.control.tenant_databases().session_target(&consumer.tenant).unwrap(),
            &SessionSettings::default(),
            self.budget.clone(),
        );
        let row = consumer.row.clone();
        ConsumerInbox::new(
            row.consumer_id,
            row.tenant,
            row.name,
            consumer.policy.clone(),
            "host".into(),
            sessions,
            fixture.scripts(),
        )
    }

    fn snapshot(&self) -> Snapshot {
        self.budget.scheduler().snapshot()
    }

    fn counts(&self, tenant: &Tenant) -> TenantCounts {
        self.snapshot().tenants[&tenant.tenant_id].clone()
    }
}

fn limited(tenant: &Tenant, limits: TenantLimits) -> Tenant {
    let mut tenant = tenant.clone();
    tenant.limits = limits;
    tenant
}

fn at(partition: i32, offset: i64, id: &str, script: &str) -> Record {
    Record { partition, ..record(offset, id, script) }
}

/// Messages of one tenant that wait in so many partitions, each worked through by a task as a
/// broker's worker would, until it is stopped.
struct Backlog {
    left: Arc<AtomicUsize>,
    stop: Arc<AtomicBool>,
    workers: Vec<JoinHandle<()>>,
}

impl Backlog {
    fn start(
        inbox: &Arc<ConsumerInbox>,
        partitions: i32,
        messages: usize,
        script: &'static str,
    ) -> Self {
        let (left, stop) = (Arc::new(AtomicUsize::new(messages)), Arc::new(AtomicBool::new(false)));
        let each = messages as i64 / i64::from(partitions);
        let work = |partition| {
            let (inbox, left, stop) = (inbox.clone(), left.clone(), stop.clone());
            tokio::spawn(async move {
                let mut partition_inbox =
                    PartitionInbox::open(inbox, "t", partition, 0).await.unwrap();
                let mut next = 0;
                while next < each && !stop.load(Ordering::Relaxed) {
                    let waiting = (next..each).take(64);
                    let records: Vec<_> = waiting
                        .map(|offset| {
                            at(partition, offset, &format!("{partition}-{offset}"), script)
                        })
                        .collect();
                    let settled = partition_inbox.process(&records).await.unwrap();
                    next += settled as i64;
                    left.fetch_sub(settled, Ordering::Relaxed);
                }
                partition_inbox.close().await;
            })
        };
        let workers = (0..partitions).map(work).collect();
        Self { left, stop, workers }
    }

    /// Messages that still wait.
    fn left(&self) -> usize {
        self.left.load(Ordering::Relaxed)
    }

    async fn done(self) {
        for worker in self.workers {
            timeout(DEADLINE, worker).await.expect("the backlog is worked off").unwrap();
        }
    }

    async fn stop(self) {
        self.stop.store(true, Ordering::Relaxed);
        self.done().await;
    }
}

/// What could go wrong: a tenant with a backlog holds up one that sends a few messages a second.
/// Show 2 of the tenants' isolation: two hundred thousand messages of A wait in 16 partitions, and
/// one of B after the other is let in before those of A that came before it.
#[tokio::test(flavor = "multi_thread")]
async fn a_few_messages_overtake_a_backlog_of_two_hundred_thousand() {
    const BACKLOG: usize = 200_000;
    let fixture = InboxFixture::new().await;
    let (a, b) = (fixture.tenant("a", "").await, fixture.tenant("b", "").await);
    let (a, b) =
        (fixture.consumer(&a, "orders", "").await, fixture.consumer(&b, "orders", "").await);
    let host = Host::of(2, 4 << 30);
    // A new connection is slow at first, and what it costs is B's; that is paid for before.
    let mut partition = PartitionInbox::open(host.inbox(&fixture, &b), "t", 0, 0).await.unwrap();
    assert_eq!(partition.process(&[at(0, 0, "b0", "")]).await.unwrap(), 1);
    let backlog = Backlog::start(&host.inbox(&fixture, &a), 16, BACKLOG, "");
    let before = Instant::now() + DEADLINE;
    while host.snapshot().waiting < 13 || host.counts(&a.tenant).messages == 0 {
        assert!(Instant::now() < before, "the backlog does not wait: {:?}", host.snapshot());
        sleep(Duration::from_millis(5)).await;
    }
    let mut overtaken = Vec::new();
    for offset in 1..=40 {
        let granted = host.counts(&a.tenant).granted;
        assert_eq!(
            partition.process(&[at(0, offset, &format!("b{offset}"), "")]).await.unwrap(),
            1
        );
        overtaken.push(host.counts(&a.tenant).granted - granted);
        sleep(Duration::from_millis(50)).await;
    }
    let (left, counts) = (backlog.left(), host.counts(&b.tenant));
    println!(
        "B was overtaken {} times at most while it waited, {overtaken:?} with its own run; {left} \
            of {BACKLOG} left",
        counts.overtaken_max
    );
    assert!(left > BACKLOG / 2, "the backlog still stands: {left} left");
    assert!(counts.overtaken_max <= 2, "B waited for {} transactions of A", counts.overtaken_max);
    assert_eq!(counts.messages, 41);
    partition.close().await;
    backlog.stop().await;
    let of_b = format!(
        "SELECT count(*) FROM oncebox.inbox WHERE consumer_id = {} AND status = 'completed'",
        b.row.consumer_id
    );
    assert_eq!(fixture.number(of_b).await, 41);
    fixture.finish().await;
}

/// What could go wrong: a tenant gets more than its weight because it has more partitions, or less.
#[tokio::test(flavor = "multi_thread")]
async fn two_busy_tenants_share_the_host_by_their_weights() {
    let fixture = InboxFixture::new().await;
    let (light, heavy) = (fixture.tenant("light", "").await, fixture.tenant("heavy", "").await);
    let heavy = limited(&heavy, TenantLimits { weight: 300, ..TenantLimits::default() });
    let (light, heavy) = (
        fixture.consumer(&light, "orders", "").await,
        fixture.consumer(&heavy, "orders", "").await,
    );
    let host = Host::of(2, 4 << 30);
    // The lighter one has four times the partitions.
    let of_light = Backlog::start(&host.inbox(&fixture, &light), 16, 160_000, "");
    let of_heavy = Backlog::start(&host.inbox(&fixture, &heavy), 4, 160_000, "");
    let counts = || (host.counts(&light.tenant), host.counts(&heavy.tenant));
    let began = loop {
        let (light, heavy) = counts();
        if light.granted >= 10 && heavy.granted >= 10 {
            break (light, heavy);
        }
        sleep(Duration::from_millis(5)).await;
    };
    let ended = loop {
        let (light, heavy) = counts();
        if light.granted + heavy.granted >= began.0.granted + began.1.granted + 400 {
            break (light, heavy);
        }
        sleep(Duration::from_millis(5)).await;
    };
    let messages =
        |ended: &TenantCounts, began: &TenantCounts| (ended.messages - began.messages) as f64;
    let (by_light, by_heavy) = (messages(&ended.0, &began.0), messages(&ended.1, &began.1));
    let cost = |ended: &TenantCounts, began: &TenantCounts| {
        (ended.cpu + ended.database - began.cpu - began.database).as_secs_f64()
    };
    let by_cost = cost(&ended.1, &began.1) / cost(&ended.0, &began.0);
    println!(
        "with three times the weight: {by_heavy} messages to {by_light}, {by_cost:.2} times the \
            cost"
    );
    // What is shared is cost, and a machine that stalls lets some messages cost more than others.
    assert!((1.5..8.0).contains(&(by_heavy / by_light)), "{by_heavy} messages to {by_light}");
    assert!((2.6..3.4).contains(&by_cost), "{by_cost} times the cost");
    of_light.stop().await;
    of_heavy.stop().await;
    fixture.finish().await;
}

/// All of a tenant's messages in eight partitions, to their end; none failed, and each ran once.
async fn all_complete(
    fixture: &InboxFixture,
    host: &Host,
    consumer: &TestConsumer,
    messages: usize,
    script: &'static str,
) -> (TenantCounts, i64) {
    let (most, stop) = (Arc::new(AtomicI64::new(0)), CancellationToken::new());
    let watch = tokio::spawn({
        let (pool, login, most, stop) =
            (fixture.pool.clone(), consumer.tenant.login.clone(), most.clone(), stop.clone());
        async move {
            while !stop.is_cancelled() {
                const SESSIONS: &str = "SELECT count(*) FROM pg_stat_activity WHERE usename = $1 \
                    AND datname = current_database()";
                let sessions =
                    sqlx::query_scalar(SESSIONS).bind(&login).fetch_one(&pool).await.unwrap();
                most.fetch_max(sessions, Ordering::Relaxed);
                sleep(Duration::from_millis(5)).await;
            }
        }
    });
    let inbox = host.inbox(fixture, consumer);
    let worker_stop = CancellationToken::new();
    let worker = tokio::spawn(retry::work(inbox.clone(), worker_stop.clone()));
    Backlog::start(&inbox, 8, messages, script).done().await;
    worker_stop.cancel();
    worker.await.unwrap();
    stop.cancel();
    watch.await.unwrap();
    let of_consumer =
        format!("FROM oncebox.inbox WHERE consumer_id = {}", consumer.row.consumer_id);
    let all = fixture.number(format!("SELECT count(*) {of_consumer}")).await;
    let well = fixture
        .number(format!(
            "SELECT count(*) {of_consumer} AND status = 'completed' AND attempts \
            <= 1 AND last_error IS NULL"
        ))
        .await;
    assert_eq!((all, well), (messages as i64, messages as i64));
    let snapshot = host.snapshot();
    assert_eq!((snapshot.running, snapshot.waiting, snapshot.memory_bytes), (0, 0, 0));
    (host.counts(&consumer.tenant), most.load(Ordering::Relaxed))
}

/// What could go wrong: over a cap messages fail, run all the same, or wait for ever; the wait
/// counts against a deadline, here of 300 ms, that waiting alone would pass.
#[tokio::test(flavor = "multi_thread")]
async fn over_every_cap_messages_wait_and_none_fails() {
    const SLOW: &str = "sleep 30";
    const MESSAGES: usize = 64;
    let policy =
        "batch = { messages_max = 2 }\nlimits = { deadline_ms = 300, memory_bytes = 67108864 }";
    let none = TenantLimits::default;
    for (name, limits, at_once) in [
        ("transactions", TenantLimits { transactions_max: Some(2), ..none() }, 2),
        ("connections", TenantLimits { connections_max: Some(3), ..none() }, 3),
        // Partitions that come and go need no memory, and are not held up.
        ("memory", TenantLimits { memory_bytes_max: Some(130 << 20), ..none() }, 32),
        ("rate", TenantLimits { messages_per_second: Some(40), ..none() }, 32),
        ("nothing", none(), 32),
    ] {
        let fixture = InboxFixture::new().await;
        let tenant = limited(&fixture.tenant("acme", "").await, limits);
        let consumer = fixture.consumer(&tenant, "orders", policy).await;
        let (host, started) = (Host::of(32, 4 << 30), Instant::now());
        let (counts, sessions) = all_complete(&fixture, &host, &consumer, MESSAGES, SLOW).await;
        println!(
            "{name}: {} transactions and {sessions} sessions at once, in {:?}",
            counts.running_peak,
            started.elapsed()
        );
        assert!(
            counts.running_peak <= at_once && sessions <= at_once as i64,
            "{name}: {counts:?}, {sessions} sessions"
        );
        match name {
            "rate" => {
                assert!(started.elapsed() >= Duration::from_millis(590), "{:?}", started.elapsed())
            }
            "memory" => assert_eq!(counts.memory_bytes_peak, 2 * (64 << 20)),
            "nothing" => assert!(
                counts.running_peak > 3,
                "the caps above are what holds the others: {counts:?}"
            ),
            _ => assert_eq!(counts.running_peak, at_once),
        }
        fixture.finish().await;
    }
    // What all tenants share, and what a consumer may have.
    for (name, host, limits) in [
        ("the host's memory", Host::of(32, 100 << 20), ""),
        ("the host's transactions", Host::of(1, 4 << 30), ""),
        ("the consumer's transactions", Host::of(32, 4 << 30), ", transactions_max = 1"),
        ("memory for less than one", Host::of(32, 1 << 20), ""),
    ] {
        let fixture = InboxFixture::new().await;
        let policy = format!(
            "batch = {{ messages_max = 4 }}\nlimits = {{ deadline_ms = 300, memory_bytes = \
                67108864{limits} }}"
        );
        let consumer = fixture.consumer(&fixture.tenant("acme", "").await, "orders", &policy).await;
        let (counts, _) = all_complete(&fixture, &host, &consumer, 32, "sleep 20").await;
        println!(
            "{name}: {} transactions, {} bytes at once",
            counts.running_peak, counts.memory_bytes_peak
        );
        // Partitions that come and go are no transactions of the consumer's, and need no memory.
        let runs = counts.memory_bytes_peak <= 64 << 20;
        let in_turn = counts.running_peak == 1 || name != "the host's transactions";
        assert!(runs && in_turn, "{name}: {counts:?}");
        fixture.finish().await;
    }
}

/// What could go wrong: a consumer's rate holds up another one of its tenant.
#[tokio::test(flavor = "multi_thread")]
async fn a_consumers_rate_is_its_own() {
    let fixture = InboxFixture::new().await;
    let tenant = fixture.tenant("acme", "").await;
    let slow = fixture.consumer(&tenant, "slow", "limits = { messages_per_second = 1 }").await;
    let fast = fixture.consumer(&tenant, "fast", "").await;
    let host = Host::of(8, 4 << 30);
    let of_slow = Backlog::start(&host.inbox(&fixture, &slow), 4, 1_000, "");
    Backlog::start(&host.inbox(&fixture, &fast), 4, 1_000, "").done().await;
    assert!(of_slow.left() > 900, "{} of 1,000 are left", of_slow.left());
    for worker in of_slow.workers {
        worker.abort(); // it waits for its rate, and nothing of it runs
    }
    fixture.until("SELECT count(*) >= 1000 FROM oncebox.inbox WHERE status = 'completed'").await;
    fixture.finish().await;
}

/// What could go wrong: a host that runs keeps to the limits of its start.
#[tokio::test(flavor = "multi_thread")]
async fn limits_that_change_take_effect_at_once() {
    let fixture = InboxFixture::new().await;
    let tenant = limited(
        &fixture.tenant("acme", "").await,
        TenantLimits { transactions_max: Some(1), ..TenantLimits::default() },
    );
    let consumer = fixture.consumer(&tenant, "orders", "batch = { messages_max = 1 }").await;
    let (host, gate) = (Host::of(8, 4 << 30), fixture.script.gate("held"));
    let backlog = Backlog::start(&host.inbox(&fixture, &consumer), 4, 4, "gate held");
    gate.reached(1).await;
    while host.snapshot().waiting < 3 {
        sleep(Duration::from_millis(5)).await;
    }
    assert_eq!(host.snapshot().running, 1);
    let limits = TenantLimits { transactions_max: Some(3), ..TenantLimits::default() };
    let scheduler = host.budget.scheduler();
    scheduler.set_limits(tenant.tenant_id, tenant.revision, &tenant.name, &limits);
    gate.reached(3).await;
    assert_eq!((host.snapshot().running, host.snapshot().waiting), (3, 1));
    gate.open();
    backlog.done().await;
    fixture.finish().await;
}

/// What could go wrong: a host that is told to stop waits for what waits; or its limits are those
/// of its start. The tenant may have one message a second, and a hundred and fifty wait.
#[tokio::test(flavor = "multi_thread")]
async fn a_host_stops_at_once_while_transactions_wait() {
    let fixture = HostFixture::with(Options { partitions: 6, ..Options::default() }).await.unwrap();
    let load = Load::of((0..150).map(|_| Work::Pay));
    fixture.open_accounts(&load).await.unwrap();
    set_rate(&fixture, "1").await;
    let host = fixture.start_ready("a", &[]).await.unwrap();
    fixture.send(&load).await.unwrap();
    fixture.until("SELECT count(*) FROM oncebox.inbox", 3).await.unwrap();
    let stopping = Instant::now();
    host.stop().await.unwrap();
    assert!(stopping.elapsed() < Duration::from_secs(8), "it took {:?}", stopping.elapsed());
    let done = fixture.number("SELECT count(*) FROM oncebox.inbox").await.unwrap();
    assert!(done < 75, "{done} messages at one a second");
    // The rate ends while the next host runs.
    let host = fixture.start_ready("a", &[]).await.unwrap();
    set_rate(&fixture, "null").await;
    fixture.wait_settled().await.unwrap();
    fixture.check().await.unwrap();
    host.stop().await.unwrap();
}

async fn set_rate(fixture: &HostFixture, rate: &str) {
    let limits = format!(
        "UPDATE oncebox.tenant SET limits = '{{\"messages_per_second\": {rate}}}', revision = \
            revision + 1"
    );
    fixture.execute(&limits).await.unwrap();
}

/// Longer than any test: handlers that hold a place until the test lets them go.
const HOLDS: &str = "limits = { deadline_ms = 600000 }\nretry = { lease_ms = 700000 }\nbatch = { \
    messages_max = 1 }";

/// Tenants whose handlers hold their places until the gate opens, each with messages in so many
/// partitions. What they run is given up with the test.
async fn besiege(
    fixture: &InboxFixture,
    host: &Host,
    tenants: usize,
    partitions: i32,
) -> Vec<JoinHandle<()>> {
    let mut workers = Vec::new();
    for n in 0..tenants {
        let tenant = fixture.tenant(&format!("slow-{n}"), "").await;
        let inbox = host.inbox(fixture, &fixture.consumer(&tenant, "orders", HOLDS).await);
        workers.extend((0..partitions).map(|partition| {
            let inbox = inbox.clone();
            tokio::spawn(async move {
                let mut held = PartitionInbox::open(inbox, "t", partition, 0).await.unwrap();
                let records = [at(partition, 0, &format!("{partition}"), "gate siege")];
                // A place that was lent and is wanted back: the message comes again.
                while let Err(error) = held.process(&records).await {
                    assert!(error.retry_after().is_some(), "{error}");
                    sleep(error.retry_after().unwrap()).await;
                }
            })
        }));
    }
    workers
}

/// What could go wrong: tenants with slow handlers hold every place of a host, also those that are
/// kept, and another tenant's messages wait for their deadlines (security finding 3, show 3).
/// Nothing of the slow ones ends here; the victim's messages all complete, and it waits for no
/// place but for the loans of those that came before it.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn one_to_forty_slow_tenants_hold_up_nobody() {
    const MESSAGES: i64 = 100;
    for tenants in [1, 4, 5, 40] {
        let fixture = InboxFixture::new().await;
        let victim = fixture.consumer(&fixture.tenant("victim", "").await, "orders", "").await;
        let host = Host::of(32, 4 << 30);
        let inbox = host.inbox(&fixture, &victim);
        let gate = fixture.script.gate("siege");
        let mut partition = PartitionInbox::open(inbox, "t", 0, 0).await.unwrap();
        assert_eq!(partition.process(&[at(0, 0, "before", "")]).await.unwrap(), 1);
        let partitions = (40 / tenants).max(2);
        let slow = besiege(&fixture, &host, tenants, partitions as i32).await;
        let before = Instant::now() + DEADLINE;
        while host.snapshot().running < 28 {
            assert!(Instant::now() < before, "the places are not seized: {:?}", host.snapshot());
            sleep(Duration::from_millis(5)).await;
        }
        for offset in 1..=MESSAGES {
            let processed =
                timeout(DEADLINE, partition.process(&[at(0, offset, &format!("v{offset}"), "")]))
                    .await;
            assert_eq!(processed.expect("it finds a place").unwrap(), 1);
        }
        let (snapshot, counts) = (host.snapshot(), host.counts(&victim.tenant));
        println!(
            "{tenants} slow tenants: the victim was overtaken {} times, {} stopped",
            counts.overtaken_max,
            { snapshot.tenants.values().map(|counts| counts.stopped).sum::<u64>() }
        );
        assert!(snapshot.running >= 28 && snapshot.waiting > 0, "the siege goes on: {snapshot:?}");
        let ended: u64 = snapshot.tenants.values().map(|counts| counts.messages).sum();
        assert_eq!(ended, counts.messages, "nothing of the slow tenants came to an end");
        assert_eq!((counts.messages, counts.stopped), (MESSAGES as u64 + 1, 0));
        // Tenants of which nothing is known have half of what is kept, so the victim's place is
        // never theirs.
        assert_eq!(counts.overtaken_max, 0, "with {tenants} slow tenants");
        let of_victim = format!(
            "consumer_id = {} AND status = 'completed' AND attempts <= 1",
            victim.row.consumer_id
        );
        assert_eq!(
            fixture.number(format!("SELECT count(*) FROM oncebox.inbox WHERE {of_victim}")).await,
            MESSAGES + 1
        );
        gate.open();
        for slow in slow {
            timeout(DEADLINE, slow).await.expect("they end").unwrap();
        }
        let well = fixture
            .number(
                "SELECT count(*) FROM oncebox.inbox WHERE status = 'completed' AND attempts <= 1",
            )
            .await;
        assert_eq!(
            well,
            MESSAGES + 1 + (partitions * tenants) as i64,
            "who gave a place back lost no attempt"
        );
        partition.close().await;
        assert_eq!(host.snapshot().running, 0);
        fixture.finish().await;
    }
}

/// A message whose handler computes, with the task that settles it.
async fn computing(
    fixture: &InboxFixture,
    host: &Host,
) -> (TestConsumer, Arc<ConsumerInbox>, JoinHandle<(PartitionInbox, Result<usize, InboxError>)>) {
    let consumer = fixture.consumer(&fixture.tenant("acme", "").await, "orders", HOLDS).await;
    let inbox = host.inbox(fixture, &consumer);
    let task = tokio::spawn({
        let inbox = inbox.clone();
        async move {
            let mut partition = PartitionInbox::open(inbox, "t", 0, 0).await.unwrap();
            let processed = partition.process(&[at(0, 0, "m", "gate held")]).await;
            (partition, processed)
        }
    });
    fixture.script.gate("held").reached(1).await;
    (consumer, inbox, task)
}

/// What could go wrong: PostgreSQL ends a session, and its handler, which only computes, holds its
/// place to its deadline (security finding 3).
#[tokio::test(flavor = "multi_thread")]
async fn a_handler_ends_with_its_session() {
    let fixture = InboxFixture::new().await;
    let host = Host::of(8, 4 << 30);
    let (consumer, _, task) = computing(&fixture, &host).await;
    let end = format!(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = '{}'",
        consumer.tenant.login
    );
    fixture.execute(end).await;
    let (_, ended) = timeout(DEADLINE, task).await.expect("it ends before its gate opens").unwrap();
    assert!(
        matches!(ended, Err(InboxError::LostInHandler { .. } | InboxError::LostInOutage { .. })),
        "{ended:?}"
    );
    assert_eq!(
        (host.snapshot().running, fixture.number("SELECT count(*) FROM oncebox.inbox").await),
        (0, 0)
    );
    fixture.finish().await;
}

/// What could go wrong: a tenant is suspended, and its handlers hold their places for as long as
/// they like; or what is stopped leaves an effect or costs an attempt.
#[tokio::test(flavor = "multi_thread")]
async fn a_handler_that_is_stopped_leaves_nothing() {
    let fixture = InboxFixture::new().await;
    let host = Host::of(8, 4 << 30);
    let (consumer, inbox, task) = computing(&fixture, &host).await;
    assert_eq!(inbox.stop_handlers(), 1);
    let (mut partition, ended) =
        timeout(DEADLINE, task).await.expect("it ends before its gate opens").unwrap();
    assert!(matches!(ended, Err(InboxError::Stopped { .. })), "{ended:?}");
    assert_eq!(
        (host.snapshot().running, fixture.number("SELECT count(*) FROM oncebox.inbox").await),
        (0, 0)
    );
    fixture.script.gate("held").open();
    assert_eq!(partition.process(&[at(0, 0, "m", "gate held")]).await.unwrap(), 1);
    assert_eq!(fixture.row(&consumer, "m").await.state(), ("completed", None, 1));
    assert_eq!(fixture.effects(&consumer, "m").await, 1);
    partition.close().await;
    fixture.finish().await;
}

/// What could go wrong: a tenant's policy says how long its handlers may hold a place, and nobody
/// else has a say.
#[tokio::test(flavor = "multi_thread")]
async fn an_operators_bound_on_deadlines_holds() {
    let fixture = InboxFixture::new().await;
    for (name, bounds, limits) in [
        (
            "host",
            HostBounds {
                deadline_max: Some(Duration::from_millis(200)),
                ..HostBounds::new(8, 4 << 30)
            },
            TenantLimits::default(),
        ),
        (
            "tenant",
            HostBounds::new(8, 4 << 30),
            TenantLimits { deadline_ms_max: Some(200), ..TenantLimits::default() },
        ),
    ] {
        let tenant = limited(&fixture.tenant(name, "").await, limits);
        let consumer = fixture.consumer(&tenant, "orders", HOLDS).await;
        let host = Host { budget: Budget::of(32, bounds) };
        let inbox = host.inbox(&fixture, &consumer);
        assert_eq!(inbox.deadline_cut(), Some(Duration::from_millis(200)));
        let mut partition = PartitionInbox::open(inbox, "t", 0, 0).await.unwrap();
        let processed = timeout(DEADLINE, partition.process(&[at(0, 0, "m", "gate never")])).await;
        assert_eq!(processed.expect("it is stopped").unwrap(), 1);
        let row = fixture.row(&consumer, "m").await;
        assert_eq!(row.last_error.as_deref(), Some("stopped after 200 ms"), "{row:?}");
        partition.close().await;
    }
    fixture.finish().await;
}
