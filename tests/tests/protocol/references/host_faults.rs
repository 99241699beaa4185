//! Faults of the host, and breakers: nothing is fetched in vain, and no attempt is counted.

use super::*;

/// Offers a record to a partition and a leased message to a worker; both fail by the host.
async fn fails_by_the_host(
    fixture: &InboxFixture,
    consumers: [&TestConsumer; 2],
    fetchers: impl Fn(&TestConsumer) -> Arc<dyn ReferenceFetcher>,
    says: &str,
) {
    let [live, stored] = consumers;
    let log = [referring(0, "a", "s3://kept/in/a")];
    let host = fixture.host(live);
    host.fetch_with(fetchers(live));
    let mut partition = take(&host).await;
    partition.ready(&log).await;
    let error = partition.process(&log).await.expect_err(says);
    let text = error.to_string();
    assert!(matches!(error, InboxError::StoreNotOpened(_)) && text.contains(says), "{text}");
    partition.close().await;
    assert!(fixture.find(live, "a").await.is_none(), "{says}: a row was written");

    let host = fixture.host(stored);
    host.fetch_with(fetchers(stored));
    let reset = format!(
        "UPDATE oncebox.inbox SET next_attempt_at = now() WHERE consumer_id = {}",
        stored.row.consumer_id
    );
    fixture.execute(reset).await;
    let error = step(&host).await.expect_err(says).to_string();
    assert!(error.contains(says), "{error}");
    let row = fixture.row(stored, "a").await;
    assert_eq!(row.state(), ("received", None, 0), "{says}: an attempt was counted");
}

/// What could go wrong: a host with a wrong clock, a wrong key or without the store's settings
/// parks the messages of its tenants, or uses up their attempts.
#[tokio::test(flavor = "multi_thread")]
async fn a_fault_of_the_host_is_no_attempt() {
    let mut fixture = InboxFixture::new().await;
    let server = S3Server::start().await;
    let tenant = tenant(&mut fixture, &server, Duration::from_secs(10)).await;
    server.put_key("in/a", Some("result 1"));
    let live = fixture.consumer(&tenant, "live", &policy("", "")).await;
    let stored = fixture.consumer(&tenant, "stored", &policy("", "ack = 'after_insert'")).await;
    deliver(&host(&fixture, &stored), &[referring(0, "a", "s3://kept/in/a")]).await;
    let both = [&live, &stored];
    let own = |consumer: &TestConsumer| fetcher(&fixture, consumer);
    for code in ["RequestTimeTooSkewed", "InvalidAccessKeyId"] {
        server.refuse(Some(code));
        fails_by_the_host(&fixture, both, own, code).await;
    }
    server.refuse(None);
    let without = fixture.control.clone().fetching_from(Stores::default());
    let unnamed =
        |consumer: &TestConsumer| without.tenant_stores().fetcher(&consumer.tenant, "docs");
    fails_by_the_host(&fixture, both, unnamed, "cannot open the store `docs`").await;
    let other = MasterKey::parse(&MasterKey::generate()).unwrap();
    let sealed = Control::new(fixture.superuser_options(), other, "test")
        .fetching_from(stores(&server, Duration::from_secs(10)));
    let unopened =
        |consumer: &TestConsumer| sealed.tenant_stores().fetcher(&consumer.tenant, "docs");
    fails_by_the_host(&fixture, both, unopened, "cannot open the store `docs`").await;

    for consumer in both {
        let reset = "UPDATE oncebox.inbox SET next_attempt_at = now() WHERE status = 'received'";
        fixture.execute(reset).await;
        let host = host(&fixture, consumer);
        deliver(&host, &[referring(0, "a", "s3://kept/in/a")]).await;
        fixture.retry_until_settled(&host).await;
        assert_eq!(fixture.row(consumer, "a").await.state(), ("completed", None, 1));
    }
    fixture.finish().await;
}

/// What could go wrong: the text of an answer that is an error fills the host's memory.
#[tokio::test(flavor = "multi_thread")]
async fn an_error_with_a_large_body_is_cut_off() {
    let mut fixture = InboxFixture::new().await;
    let server = S3Server::start().await;
    let tenant = tenant(&mut fixture, &server, Duration::from_secs(10)).await;
    let fetcher = fixture.control.tenant_stores().fetcher(&tenant, "docs");
    let fetch = async |code: &'static str| {
        server.refuse(Some(code));
        let timeout = Duration::from_secs(30);
        let bounds = FetchBounds { bytes_max: 100, timeout, waits_for_memory: true };
        match fetcher.fetch("s3://kept/in/a", bounds).await {
            Err(FetchError::Reference(error)) => error.fault,
            other => panic!("{other:?}"),
        }
    };
    assert_eq!(fetch("AccessDenied").await, ReferenceFault::NotAllowed);
    let large = "x".repeat(1 << 20).leak();
    assert_eq!(fetch(large).await, ReferenceFault::Unavailable, "it was read to its end");
    fixture.finish().await;
}

/// What could go wrong: the messages of a version that is held back are fetched all the same, again
/// and again, and fill the memory.
#[tokio::test(flavor = "multi_thread")]
async fn an_open_breaker_comes_before_the_fetch() {
    let mut fixture = InboxFixture::new().await;
    let server = S3Server::start().await;
    let tenant = tenant(&mut fixture, &server, Duration::from_secs(10)).await;
    let breaker = "batch = { messages_max = 1 }\nbreaker = { runs_min = 10, pause_ms = 60000 }";
    let consumer = fixture.consumer(&tenant, "orders", &policy("", breaker)).await;
    server.put_key("in/trap", Some("trap"));
    server.put_key("in/next", Some("result 1"));
    let host = host(&fixture, &consumer);
    let mut partition = take(&host).await;
    for offset in 0..10 {
        let log = [referring(offset, &format!("m{offset}"), "s3://kept/in/trap")];
        assert!(drive(&mut partition, &log).await.is_empty());
    }
    let log = [referring(10, "next", "s3://kept/in/next")];
    for _ in 0..3 {
        partition.ready(&log).await;
        let held = partition.process(&log).await;
        assert!(matches!(held, Err(InboxError::BreakerOpen { .. })), "{held:?}");
    }
    assert_eq!(server.asked("in/next"), 0);
    partition.close().await;
    fixture.finish().await;
}
