//! Waits for stores, for other fetches and for memory, and what ends them.

use super::*;

/// What could go wrong: a transaction's batch waits for a store in a call that nothing can end, or
/// what is fetched waits for what hangs, or is fetched again.
#[tokio::test(flavor = "multi_thread")]
async fn only_the_wait_that_can_be_ended_fetches() {
    let mut fixture = InboxFixture::new().await;
    let server = S3Server::start().await;
    let tenant = tenant(&mut fixture, &server, Duration::from_secs(600)).await;
    let consumer = fixture.consumer(&tenant, "orders", &policy(", timeout_ms = 600000", "")).await;
    server.put_key("in/quick", Some("result 1"));
    server.put_key("in/held", Some("result 2"));
    server.hold("in/held");
    let log = [
        referring(0, "quick", "s3://kept/in/quick"),
        referring(1, "held", "s3://kept/in/held"),
        referring(2, "behind", "s3://kept/in/quick"),
    ];
    let mut partition = take(&host(&fixture, &consumer)).await;
    let early = partition.process(&log).await;
    assert!(matches!(early, Err(InboxError::PayloadNotAtHand)), "{early:?}");
    assert!(server.gets().is_empty(), "it fetched");

    timeout(DEADLINE, partition.ready(&log)).await.expect("what hangs holds up what is fetched");
    assert_eq!(partition.process(&log).await.unwrap(), 1);
    let given_up = timeout(Duration::from_millis(20), partition.ready(&log[1..])).await;
    assert!(given_up.is_err());
    let hanging = partition.process(&log[1..]).await;
    assert!(matches!(hanging, Err(InboxError::PayloadNotAtHand)), "{hanging:?}");

    server.release("in/held");
    assert!(drive(&mut partition, &log[1..]).await.is_empty());
    assert_eq!((server.asked("in/held"), server.asked("in/quick")), (1, 2), "it began anew");
    for id in ["quick", "held", "behind"] {
        assert_eq!(fixture.row(&consumer, id).await.state(), ("completed", None, 1), "{id}");
    }
    partition.close().await;
    fixture.finish().await;
}

/// Waits until an object was asked for so often.
async fn until_asked(server: &S3Server, key: &str, count: usize) {
    let is_asked = async || anyhow::Ok(server.asked(key) == count);
    let said = async || format!("it was asked for {:?}", server.gets());
    wait::until(DEADLINE, Duration::from_millis(5), is_asked, said).await.unwrap();
}

/// What could go wrong: a slow store takes the fetches of another one; a wait for other fetches of
/// the tenant counts as an attempt; an access that was taken away meanwhile still opens.
#[tokio::test(flavor = "multi_thread")]
async fn a_wait_for_other_fetches_is_no_attempt() {
    let mut fixture = InboxFixture::new().await;
    let server = S3Server::start().await;
    let tenant = tenant(&mut fixture, &server, Duration::from_secs(600)).await;
    let limits =
        FetchLimits { stall: Duration::from_secs(600), fetches_max: 1, ..FetchLimits::default() };
    fixture.control = fixture.control.clone().fetching_from(limited(&server, limits));
    allow_in(&fixture, &tenant, "slow").await;
    let in_slow = |timeout_ms: u64| {
        format!(
            "reference = {{ store = 'slow', source = {{ header = 'ref' }}, timeout_ms = \
                {timeout_ms} }}"
        )
    };
    let first = fixture.consumer(&tenant, "first", &in_slow(600_000)).await;
    let second = fixture.consumer(&tenant, "second", &in_slow(1_000)).await;
    let third = fixture.consumer(&tenant, "third", &in_slow(600_000)).await;
    let other = fixture.consumer(&tenant, "other", &policy("", "")).await;
    for key in ["in/held", "in/quick", "in/late"] {
        server.put_key(key, Some("result 1"));
    }
    let deliver_to = |consumer: &TestConsumer, offset, id: &str, key: &str| {
        let host = host(&fixture, consumer);
        let log = [referring(offset, id, &format!("s3://kept/{key}"))];
        tokio::spawn(async move { deliver(&host, &log).await })
    };
    server.hold("in/held");
    let holding = deliver_to(&first, 0, "held", "in/held");
    until_asked(&server, "in/held", 1).await;
    let beside = deliver_to(&other, 0, "beside", "in/quick");
    timeout(DEADLINE, beside).await.expect("the slow store holds it up").unwrap();
    let waiting = deliver_to(&second, 0, "waits", "in/late");
    sleep(Duration::from_millis(1_200)).await; // longer than its fetch may take
    assert_eq!(server.asked("in/late"), 0);
    assert!(fixture.find(&second, "waits").await.is_none(), "the wait is an attempt");
    server.release("in/held");
    holding.await.unwrap();
    assert!(waiting.await.unwrap().is_empty());
    assert_eq!(fixture.row(&second, "waits").await.state(), ("completed", None, 1));

    server.hold("in/held");
    let holding = deliver_to(&first, 1, "again", "in/held");
    until_asked(&server, "in/held", 2).await;
    let waiting = deliver_to(&third, 0, "late", "in/late");
    sleep(Duration::from_millis(200)).await; // so that it waits
    fixture.control.tenant_stores().delete("acme", "slow").await.unwrap();
    server.release("in/held");
    holding.await.unwrap();
    waiting.await.unwrap();
    let row = fixture.row(&third, "late").await;
    assert_eq!(row.state(), ("parked", Some("reference_not_allowed"), 1));
    assert_eq!(server.asked("in/late"), 1, "it was fetched without access");
    fixture.finish().await;
}

/// What could go wrong: fetched payloads fill the host's memory; those that wait for memory wait
/// for each other for ever, or count attempts.
#[tokio::test(flavor = "multi_thread")]
async fn payloads_share_a_bounded_memory() {
    let mut fixture = InboxFixture::new().await;
    let server = S3Server::start().await;
    let tenant = tenant(&mut fixture, &server, Duration::from_secs(600)).await;
    // Room for two objects, which count twice each.
    let bytes = 300 << 10;
    let limits = FetchLimits {
        stall: Duration::from_secs(600),
        memory_bytes: 4 * bytes + (16 << 10),
        ..FetchLimits::default()
    };
    fixture.control = fixture.control.clone().fetching_from(limited(&server, limits));
    let object = format!("result 1\n# {}", "x".repeat(bytes - 11));
    for key in ["in/held", "in/large"] {
        server.put_key(key, Some(&object));
    }
    server.hold("in/held");
    let first = fixture.consumer(&tenant, "first", &policy(", timeout_ms = 600000", "")).await;
    let mut partition = take(&host(&fixture, &first)).await;
    let log = [
        referring(0, "held", "s3://kept/in/held"),
        referring(1, "ahead", "s3://kept/in/large"),
        referring(2, "beyond", "s3://kept/in/large"),
    ];
    let given_up = timeout(Duration::from_millis(500), partition.ready(&log)).await;
    assert!(given_up.is_err(), "the first payload is held");
    server.release("in/held");
    partition.ready(&log).await;
    let settled = partition.process(&log).await.unwrap();
    assert!(settled <= 2, "three payloads are in memory");
    assert!(drive(&mut partition, &log[settled..]).await.is_empty());
    partition.close().await;

    let mut running = Vec::new();
    for name in ["second", "third", "fourth"] {
        let consumer = fixture.consumer(&tenant, name, &policy("", "")).await;
        let host = host(&fixture, &consumer);
        running.push(tokio::spawn(async move {
            let log: Vec<_> =
                (0..6).map(|n| referring(n, &format!("m{n}"), "s3://kept/in/large")).collect();
            deliver(&host, &log).await
        }));
    }
    for running in running {
        let errors = timeout(DEADLINE, running).await.expect("they wait for each other").unwrap();
        assert!(errors.is_empty(), "{errors:?}");
    }
    let other = "SELECT count(*) FROM oncebox.inbox WHERE status <> 'completed' OR attempts <> 1";
    assert_eq!(fixture.number(other).await, 0);
    assert_eq!(fixture.number("SELECT count(*) FROM oncebox.inbox").await, 21);
    fixture.finish().await;
}

/// What could go wrong: a long fetch outlasts its lease and counts a crash; a worker that is told
/// to stop waits for the store, or has counted an attempt.
#[tokio::test(flavor = "multi_thread")]
async fn a_leased_fetch_keeps_its_lease_and_ends_at_a_stop() {
    let mut fixture = InboxFixture::new().await;
    let server = S3Server::start().await;
    let tenant = tenant(&mut fixture, &server, Duration::from_secs(600)).await;
    let policy = policy(", timeout_ms = 600000", "ack = 'after_insert'");
    let consumer = fixture.consumer(&tenant, "orders", &policy).await;
    server.put_key("in/held", Some("result 1"));
    server.hold("in/held");
    let host = host(&fixture, &consumer);
    deliver(&host, &[referring(0, "held", "s3://kept/in/held")]).await;
    let stop = CancellationToken::new();
    let worker = tokio::spawn({
        let (host, stop) = (host.clone(), stop.clone());
        async move { retry::step(&host, &stop).await }
    });
    until_asked(&server, "in/held", 1).await;
    let ends: i64 = fixture.number(LEASE_ENDS).await;
    fixture.until(&format!("({LEASE_ENDS}) > {ends}")).await;
    assert_eq!(fixture.row(&consumer, "held").await.state(), ("in_progress", None, 1));
    stop.cancel();
    let stopped = timeout(DEADLINE, worker).await.expect("it waits for the store").unwrap();
    assert_eq!(stopped.unwrap(), 1);
    assert_eq!(fixture.row(&consumer, "held").await.state(), ("received", None, 0));
    server.release("in/held");
    fixture.retry_until_settled(&host).await;
    assert_eq!(fixture.row(&consumer, "held").await.state(), ("completed", None, 1));
    fixture.finish().await;
}

const LEASE_ENDS: &str =
    "SELECT (extract(epoch FROM locked_until) * 1000)::bigint FROM oncebox.inbox";
