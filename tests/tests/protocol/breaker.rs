//! A version that fails too often is given no more messages until one of them gets through; they
//! wait at their place and lose nothing. A database that is away is tried by one connection
//! (S3-022).

use std::{
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
};

use oncebox_inbox::{ConsumerInbox, PartitionInbox, SessionSettings, retry};
use oncebox_model::{
    InboxError, Output,
    handler::Handler,
    outcome::{Failure, FailureKind},
    record::Record,
};
use oncebox_tests::{
    inbox::{
        InboxFixture, PlainHandler, PlainHandlers, TestConsumer, deliver, drive, execute, open,
        record,
    },
    wait::{self, DEADLINE},
};
use tokio::{
    io::copy_bidirectional,
    net::{TcpListener, TcpStream},
    time::{Duration, Instant, sleep, timeout},
};
use tokio_util::sync::CancellationToken;

/// Ten runs are enough, and nothing takes long. One message a transaction, so that counts are
/// exact.
const POLICY: &str = "batch = { messages_max = 1 }\nbreaker = { runs_min = 10, pause_ms = 400, \
    pause_max_ms = 1600 }\n\
    retry = { backoff_min_ms = 3600000, backoff_max_ms = 3600000, jitter = 'none' }";

/// A handler's version that fails or works as the test says, and counts its runs.
#[derive(Default)]
struct Switch {
    works: AtomicBool,
    runs: AtomicUsize,
}

impl Switch {
    fn handler(self: &Arc<Self>, version: i32) -> Arc<dyn Handler> {
        let switch = self.clone();
        PlainHandler::new(version, move |tx, run| {
            let switch = switch.clone();
            Box::pin(async move {
                switch.runs.fetch_add(1, Ordering::SeqCst);
                if !switch.works.load(Ordering::SeqCst) {
                    return Err(Failure::new(FailureKind::Trap, "as the test says"));
                }
                let sql = format!(
                    "INSERT INTO effect (consumer, message_id, attempt, version) VALUES ('{}', \
                        '{}', 1, {version})",
                    run.consumer, run.message.id
                );
                execute(tx, &sql).await.map(|_| Output::default())
            })
        })
    }

    fn runs(&self) -> usize {
        self.runs.load(Ordering::SeqCst)
    }

    fn set(&self, works: bool) {
        self.works.store(works, Ordering::SeqCst);
    }
}

fn log(partition: i32, count: i64) -> Vec<Record> {
    (0..count).map(|n| Record { partition, ..record(n, &format!("{partition}-{n}"), "") }).collect()
}

async fn failing(
    fixture: &InboxFixture,
    policy: &str,
) -> (TestConsumer, Arc<Switch>, Arc<ConsumerInbox>) {
    let consumer = fixture.simple("", policy).await;
    let switch = Arc::new(Switch::default());
    let host = fixture.host_with(
        &consumer,
        PlainHandlers::of(switch.handler(1)),
        &SessionSettings::default(),
    );
    (consumer, switch, host)
}

fn is_open(host: &ConsumerInbox) -> bool {
    host.breakers().iter().any(|breaker| breaker.state != "closed")
}

/// Offer records until the breaker opens; how many were settled.
async fn until_open(partition: &mut PartitionInbox, records: &[Record]) -> usize {
    let mut settled = 0;
    loop {
        assert!(settled < records.len(), "it never opened");
        match partition.process(&records[settled..]).await {
            Ok(count) => settled += count,
            Err(InboxError::BreakerOpen { version: 1, .. }) => return settled,
            Err(error) => panic!("{error}"),
        }
    }
}

/// What could go wrong: it opens too early, too late, never, or marks failed what only waits; or a
/// probe is more than one message; or it does not close again. S3-022.
#[tokio::test(flavor = "multi_thread")]
async fn it_opens_at_the_rate_probes_with_one_message_and_closes_by_itself() {
    let fixture = InboxFixture::new().await;
    let (consumer, switch, host) = failing(&fixture, POLICY).await;
    let records = log(0, 40);
    let mut partition = open(&host, 0).await;
    // S3-022.
    assert_eq!(until_open(&mut partition, &records).await, 10, "it opens with the tenth failure");
    let open_since = fixture.number("SELECT count(*) FROM oncebox.inbox").await;
    assert_eq!(open_since, 10, "what waits has no row");

    // One message probes after the pause, fails, and the next pause is twice as long.
    let (before, began) = (switch.runs(), Instant::now());
    let first_pause = Duration::from_millis(host.breakers()[0].probes_in_ms.unwrap_or(0));
    let settled = partition_until(&mut partition, &records[10..], 1).await;
    assert_eq!((settled, host.breakers()[0].pause_ms), (1, 1600), "a probe that fails");
    assert!(
        is_open(&host) && switch.runs() - before <= 2,
        "one message, at most once without a savepoint"
    );
    switch.set(true);
    let errors = drive(&mut partition, &records[11..]).await;
    // What remained of the first pause, and then the second one.
    let paused = began.elapsed();
    assert!(
        paused >= first_pause + Duration::from_millis(700),
        "the second pause is twice the first: {first_pause:?} and on until {paused:?}"
    );
    assert!(
        errors.iter().all(|error| matches!(error, InboxError::BreakerOpen { .. })),
        "{errors:?}"
    );
    assert!(!is_open(&host), "a success closes it");
    for n in 0..40 {
        let (status, effects) = if n < 11 { ("failed_retryable", 0) } else { ("completed", 1) };
        let id = format!("0-{n}");
        let row = fixture.row(&consumer, &id).await;
        assert_eq!((row.status.as_str(), row.attempts), (status, 1), "`{id}`: {row:?}");
        assert_eq!(fixture.effects(&consumer, &id).await, effects, "`{id}`");
    }
    partition.close().await;
    fixture.finish().await;
}

/// Offer records until so many are settled.
async fn partition_until(
    partition: &mut PartitionInbox,
    records: &[Record],
    count: usize,
) -> usize {
    let (mut settled, deadline) = (0, Instant::now() + DEADLINE);
    while settled < count {
        assert!(Instant::now() < deadline, "settled {settled}");
        match partition.process(&records[settled..]).await {
            Ok(more) => settled += more,
            Err(InboxError::BreakerOpen { retry_after, .. }) => sleep(retry_after).await,
            Err(error) => panic!("{error}"),
        }
    }
    settled
}

/// What could go wrong: a few failures of many, or few runs at all, stop a consumer; or what a
/// handler decides counts as its failure.
#[tokio::test(flavor = "multi_thread")]
async fn few_runs_and_decisions_open_nothing() {
    let fixture = InboxFixture::new().await;
    let consumer = fixture.simple("", POLICY).await;
    let host = fixture.host(&consumer);
    let traps: Vec<_> = (0..9).map(|n| record(n, &format!("few-{n}"), "trap")).collect();
    assert!(deliver(&host, &traps).await.is_empty() && !is_open(&host));
    let host = fixture.host(&consumer);
    let decide = |n: i64| ["reject", "park", "retry 3600000"][n as usize % 3];
    let decisions: Vec<_> =
        (0..60).map(|n| record(n, &format!("decided-{n}"), decide(n))).collect();
    assert!(deliver(&host, &decisions).await.is_empty() && !is_open(&host));
    let mixed: Vec<_> = (0..60)
        .map(|n| record(n, &format!("mixed-{n}"), if n % 2 == 0 { "trap" } else { "" }))
        .rev()
        .collect();
    assert!(
        deliver(&host, &mixed).await.is_empty() && !is_open(&host),
        "half is not more than half"
    );
    fixture.finish().await;
}

/// What could go wrong: while nothing may run, workers lease what is due and give it back, again
/// and again, each time with two commits that others wait for; or they do not come back.
#[tokio::test(flavor = "multi_thread")]
async fn nothing_is_leased_while_nothing_may_run() {
    let fixture = InboxFixture::new().await;
    let policy = POLICY.replace(
        "pause_ms = 400, pause_max_ms = 1600",
        "pause_ms = 3600000, pause_max_ms = 3600000",
    );
    let (consumer, _, host) =
        failing(&fixture, &policy.replace("backoff_min_ms = 3600000", "backoff_min_ms = 1")).await;
    let mut partition = open(&host, 0).await;
    until_open(&mut partition, &log(0, 40)).await;
    partition.close().await;
    fixture
        .until("SELECT count(*) = 10 FROM oncebox.inbox WHERE status = 'failed_retryable'")
        .await;
    fixture.execute("UPDATE oncebox.inbox SET next_attempt_at = now()").await;
    let stop = CancellationToken::new();
    let workers: Vec<_> =
        (0..4).map(|_| tokio::spawn(retry::work(host.clone(), stop.clone()))).collect();
    sleep(Duration::from_secs(1)).await;
    assert_eq!(fixture.number("SELECT sum(epoch)::int8 FROM oncebox.inbox").await, 0, "leases");
    // Another version may run at once.
    let repaired = Arc::new(Switch::default());
    repaired.set(true);
    host.set_handlers(PlainHandlers::of(repaired.handler(2)));
    fixture.until("SELECT count(*) = 10 FROM oncebox.inbox WHERE status = 'completed'").await;
    assert_eq!(fixture.number("SELECT sum(epoch)::int8 FROM oncebox.inbox").await, 10, "leases");
    stop.cancel();
    for worker in workers {
        worker.await.unwrap();
    }
    assert_eq!(fixture.effects(&consumer, "0-0").await, 1);
    fixture.finish().await;
}

/// What could go wrong: each partition probes for itself, and a version that fails is given as many
/// messages as there are partitions.
#[tokio::test(flavor = "multi_thread")]
async fn two_partitions_probe_once_and_two_hosts_once_each() {
    let fixture = InboxFixture::new().await;
    let policy = POLICY
        .replace("pause_ms = 400, pause_max_ms = 1600", "pause_ms = 2000, pause_max_ms = 3600000");
    let (consumer, switch, host) = failing(&fixture, &policy).await;
    let other = fixture.host_with(
        &consumer,
        PlainHandlers::of(switch.handler(1)),
        &SessionSettings::default(),
    );
    let mut workers = Vec::new();
    let stop = CancellationToken::new();
    for (host, number) in [(&host, 0), (&host, 1), (&other, 2), (&other, 3)] {
        let partition = PartitionInbox::open(host.clone(), "t", number, 0).await.unwrap();
        workers.push(tokio::spawn(consume(partition, log(number, 60), stop.clone())));
    }
    until(async || is_open(&host) && is_open(&other)).await;
    let rows = "SELECT count(*) FROM oncebox.inbox";
    // What was under way when they opened.
    sleep(Duration::from_millis(200)).await;
    let opened = fixture.number(rows).await;
    // Ten runs each, and what the other partition had under way.
    assert!((20..=22).contains(&opened), "{opened} messages failed before both breakers were open");
    // After two seconds, then after four: each host probed once, then twice.
    for probes in 1..=2 {
        until(async || fixture.number(rows).await > opened + 2 * probes - 1).await;
        sleep(Duration::from_millis(100)).await;
        assert_eq!(
            fixture.number(rows).await,
            opened + 2 * probes,
            "one message probes on each host"
        );
    }
    switch.set(true);
    for worker in workers {
        timeout(DEADLINE, worker).await.expect("it closes by itself").unwrap();
    }
    assert_eq!(fixture.number(rows).await, 240);
    let lost = "SELECT count(*) FROM oncebox.inbox WHERE attempts <> 1 OR (status = \
        'failed_retryable') <> (reason IS NOT NULL)";
    assert_eq!(fixture.number(lost).await, 0, "attempts are untouched");
    fixture.finish().await;
}

/// Offer records as a broker's worker does.
async fn consume(mut partition: PartitionInbox, records: Vec<Record>, stop: CancellationToken) {
    let mut settled = 0;
    while settled < records.len() && !stop.is_cancelled() {
        match partition.process(&records[settled..]).await {
            Ok(count) => settled += count,
            Err(error) => sleep(error.retry_after().unwrap_or(Duration::from_millis(50))).await,
        }
    }
    partition.close().await;
}

async fn until(mut holds: impl AsyncFnMut() -> bool) {
    wait::until(
        DEADLINE,
        Duration::from_millis(10),
        async || Ok(holds().await),
        async || "it never came".to_owned(),
    )
    .await
    .unwrap();
}

/// What could go wrong: a version that was repaired waits for the pause of the one that was not;
/// messages of other versions wait too; or a retry counts attempts while it waits.
#[tokio::test(flavor = "multi_thread")]
async fn another_version_has_its_own_breaker_and_retries_wait() {
    let fixture = InboxFixture::new().await;
    let policy = "batch = { messages_max = 1 }\nbreaker = { runs_min = 10, pause_ms = 60000, \
        pause_max_ms = 60000 }\n\
        retry = { backoff_min_ms = 1, backoff_max_ms = 1 }";
    let (consumer, switch, host) = failing(&fixture, policy).await;
    let records = log(0, 40);
    let mut partition = open(&host, 0).await;
    until_open(&mut partition, &records).await;
    // What failed is due, and is put off without an attempt.
    let runs = switch.runs();
    sleep(Duration::from_millis(20)).await;
    for _ in 0..3 {
        let answer = retry::step(&host, &CancellationToken::new()).await;
        assert!(matches!(answer, Err(InboxError::BreakerOpen { .. })), "{answer:?}");
    }
    assert_eq!(
        (
            switch.runs(),
            fixture.number("SELECT count(*) FROM oncebox.inbox WHERE attempts = 1").await
        ),
        (runs, 10)
    );

    let repaired = Arc::new(Switch::default());
    repaired.set(true);
    host.set_handlers(PlainHandlers::of(repaired.handler(2)));
    let errors = timeout(DEADLINE, drive(&mut partition, &records[10..]))
        .await
        .expect("the new version has no breaker");
    assert!(errors.is_empty(), "{errors:?}");
    fixture
        .execute(
            "UPDATE oncebox.inbox SET next_attempt_at = now() WHERE status = 'failed_retryable'",
        )
        .await;
    fixture.retry_until_settled(&host).await;
    for n in 0..40 {
        let row = fixture.row(&consumer, &format!("0-{n}")).await;
        assert_eq!(
            (row.state(), row.version_id),
            (("completed", None, if n < 10 { 2 } else { 1 }), Some(2)),
            "{row:?}"
        );
    }
    partition.close().await;
    fixture.finish().await;
}

/// A way to the database that can be cut, and counts who comes.
struct Gateway {
    address: SocketAddr,
    is_up: AtomicBool,
    tries: AtomicUsize,
    cut: std::sync::Mutex<CancellationToken>,
}

impl Gateway {
    async fn to(options: &sqlx::postgres::PgConnectOptions) -> Arc<Self> {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let gateway = Arc::new(Self {
            address: listener.local_addr().unwrap(),
            is_up: AtomicBool::new(true),
            tries: AtomicUsize::new(0),
            cut: std::sync::Mutex::default(),
        });
        let (server, here) = ((options.get_host().to_owned(), options.get_port()), gateway.clone());
        tokio::spawn(async move {
            while let Ok((mut client, _)) = listener.accept().await {
                here.tries.fetch_add(1, Ordering::SeqCst);
                if !here.is_up.load(Ordering::SeqCst) {
                    continue;
                }
                let (cut, server) = (here.cut.lock().unwrap().clone(), server.clone());
                tokio::spawn(async move {
                    let mut server = TcpStream::connect(server).await.unwrap();
                    tokio::select! {
                        () = cut.cancelled() => {}
                        _ = copy_bidirectional(&mut client, &mut server) => {}
                    }
                });
            }
        });
        gateway
    }

    fn down(&self) {
        self.is_up.store(false, Ordering::SeqCst);
        std::mem::take(&mut *self.cut.lock().unwrap()).cancel();
    }
}

/// What could go wrong: while the database is away, every partition and worker tries it as often as
/// it can; or it is back and nobody notices; or what waited has lost an attempt.
#[tokio::test(flavor = "multi_thread")]
async fn a_database_that_is_away_is_tried_by_one_connection() {
    let fixture = InboxFixture::new().await;
    let consumer = fixture.simple("", "").await;
    let gateway = Gateway::to(&fixture.superuser_options()).await;
    let host = fixture.host_through(&consumer, gateway.address, &SessionSettings::default());
    let stop = CancellationToken::new();
    let mut tasks: Vec<_> =
        (0..4).map(|_| tokio::spawn(retry::work(host.clone(), stop.clone()))).collect();
    let mut workers = Vec::new();
    for number in 0..16 {
        let mut partition = PartitionInbox::open(host.clone(), "t", number, 0).await.unwrap();
        drive(&mut partition, &log(number, 5)).await;
        workers.push(partition);
    }
    gateway.down();
    let before = gateway.tries.load(Ordering::SeqCst);
    let later = |number| log(number, 40).split_off(5);
    tasks.extend(
        workers.into_iter().zip(0..).map(|(partition, number)| {
            tokio::spawn(consume(partition, later(number), stop.clone()))
        }),
    );
    sleep(Duration::from_secs(3)).await;
    let tries = gateway.tries.load(Ordering::SeqCst) - before;
    println!("{tries} connections were tried in 3 seconds by 16 partitions and 4 workers");
    // Those that were on their way when the first one failed, then one at 0.25, 0.75, 1.75 s.
    assert!(tries <= 20 + 5, "{tries} connections were tried");
    gateway.is_up.store(true, Ordering::SeqCst);
    fixture
        .until(
            "SELECT count(*) = 16 * 40 FROM oncebox.inbox WHERE status = 'completed' AND \
        attempts = 1",
        )
        .await;
    stop.cancel();
    for task in tasks {
        timeout(DEADLINE, task).await.unwrap().unwrap();
    }
    fixture.finish().await;
}
