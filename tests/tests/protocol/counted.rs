//! What a host counts and logs is what happened: every delivery in one counter, every parked
//! message with a line, and no more claims written than a slow database can afford.
//!
//! These tests run on one thread, since what is counted and logged on it is looked at.

use oncebox_model::record::Record;
use oncebox_tests::{
    inbox::{Guest, InboxFixture, TestConsumer, deliver, drive, record, step, take},
    telemetry::Telemetry,
};
use serde_json::Value;

/// Counts every claim that is written, also one that is taken back or rolled back: sequences do
/// neither.
const COUNT_CLAIMS: &str = "CREATE SEQUENCE claims; CREATE FUNCTION count_claim() RETURNS trigger \
    LANGUAGE plpgsql SECURITY DEFINER AS \
    $$ BEGIN PERFORM nextval('public.claims'); RETURN NULL; END $$; \
    CREATE TRIGGER count_claim AFTER INSERT ON oncebox.inbox FOR EACH ROW EXECUTE FUNCTION \
    count_claim()";

/// Makes every effect take as long as the table says.
async fn slow_database(fixture: &InboxFixture, consumer: &TestConsumer) {
    let schema = &consumer.tenant.schema_name;
    fixture
        .execute(format!(
            "{COUNT_CLAIMS}; CREATE TABLE slowness (ms float8); INSERT INTO slowness VALUES (0); \
             CREATE FUNCTION slow() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER AS \
             $$ BEGIN PERFORM pg_sleep((SELECT ms FROM public.slowness) / 1000); RETURN NULL; END \
             $$; \
             CREATE TRIGGER slow AFTER INSERT ON {schema}.effect FOR EACH ROW EXECUTE FUNCTION \
             slow()"
        ))
        .await;
}

async fn claims(fixture: &InboxFixture) -> i64 {
    fixture.number("SELECT CASE WHEN is_called THEN last_value ELSE 0 END FROM claims").await
}

/// What could go wrong: the slower the database, the more it is made to write: claims that a batch
/// has no time to run are written, taken back and written again, for ever; or a consumer stays with
/// the small batches of a bad hour. A5.
#[tokio::test]
async fn a_slower_database_is_not_written_more() {
    let telemetry = Telemetry::default();
    let fixture = InboxFixture::new().await;
    let consumer = fixture.simple("", "batch = { duration_ms = 900 }").await;
    slow_database(&fixture, &consumer).await;
    let host = fixture.host(&consumer);
    let mut partition = take(&host).await;
    let mut offset = 0;
    let mut some = |count: i64| {
        let records: Vec<_> = (offset..offset + count)
            .map(|offset| record(offset, &format!("m{offset}"), ""))
            .collect();
        offset += count;
        records
    };
    let mut written = Vec::new();
    for (slowness, messages) in [(30, 128), (120, 96), (300, 32), (1_200, 6)] {
        fixture.execute(format!("UPDATE slowness SET ms = {slowness}")).await;
        let before = claims(&fixture).await;
        assert!(drive(&mut partition, &some(messages)).await.is_empty());
        let claims = claims(&fixture).await - before;
        println!("{slowness} ms a message: {claims} claims for {messages} messages");
        // What a batch has to take back, it has run before since it last had to, but for the first
        // time.
        assert!(
            claims <= 2 * messages + 64,
            "{claims} claims were written for {messages} messages of {slowness} ms"
        );
        written.push(claims as f64 / messages as f64);
    }
    // Once it knows the database it takes back next to nothing, however slow that is.
    assert!(written[2] <= 1.5, "claims written for a message, by slowness: {written:?}");
    let completed =
        fixture.number("SELECT count(*) FROM oncebox.inbox WHERE status = 'completed'").await;
    let withdrawn = telemetry
        .sum("oncebox_claims_withdrawn_total", &[("tenant", "acme"), ("consumer", "orders")]);
    assert_eq!(
        withdrawn,
        (claims(&fixture).await - completed) as f64,
        "what was taken back is counted"
    );

    fixture.execute("UPDATE slowness SET ms = 0").await;
    let records = some(64 * 40);
    let (mut settled, mut calls, mut largest) = (0, 0, 0);
    while largest < 64 && settled < records.len() - 64 {
        let count = partition.process(&records[settled..]).await.unwrap();
        (settled, calls, largest) = (settled + count, calls + 1, largest.max(count));
    }
    assert!(largest == 64, "after {calls} batches the largest had {largest} messages");
    partition.close().await;
    fixture.finish().await;
}

fn of_type(event_type: &str, mut record: Record) -> Record {
    record.headers.push(("type".to_owned(), event_type.into()));
    record
}

fn versioned(version: u32, key: &str, mut record: Record) -> Record {
    record.headers.push(("version".to_owned(), version.to_string().into_bytes()));
    record.key = Some(key.as_bytes().to_vec());
    record
}

const BY_VERSION: &str = "order = 'key'\nsequence = { version = { header = 'version' }, first = 1, \
    gap_wait_ms = 600000 }\n\
    retry = { backoff_min_ms = 600000, backoff_max_ms = 600000, jitter = 'none' }";

#[track_caller]
fn check(telemetry: &Telemetry, metric: &str, label: &str, expected: &[(&str, f64)]) {
    for (value, count) in expected {
        assert_eq!(
            telemetry.sum(metric, &[(label, value)]),
            *count,
            "`{metric}` with {label} {value}:\n{}",
            telemetry.metrics()
        );
    }
    let sum: f64 = expected.iter().map(|(_, count)| count).sum();
    assert_eq!(
        telemetry.sum(metric, &[]),
        sum,
        "`{metric}` counts something else too:\n{}",
        telemetry.metrics()
    );
}

/// What could go wrong: a delivery is in no counter, or in two; one that is parked is taken for a
/// duplicate; an outcome is never counted.
#[tokio::test]
async fn every_delivery_is_counted_once_with_its_outcome() {
    let telemetry = Telemetry::default();
    let fixture = InboxFixture::new().await;
    let consumer = fixture.simple("", BY_VERSION).await;
    let host = fixture.host(&consumer);
    let mut no_id = record(9, "", "");
    no_id.headers.clear();
    let mut log = [
        versioned(1, "k", record(0, "k1", "")),
        versioned(1, "k", record(1, "k1 again", "")),
        versioned(3, "k", record(2, "k3", "")),
        versioned(1, "l", record(3, "l1", "trap")),
        versioned(2, "l", record(4, "l2", "")),
        versioned(1, "m", of_type("nobody", record(5, "m1", ""))),
        versioned(1, "n", record(6, "n1", "")),
        // Another payload under a known id.
        versioned(1, "n", record(7, "n1", "# other")),
        versioned(1, "n", of_type("nobody", record(8, "n1", "# third"))),
        no_id,
        versioned(1, "o", record(10, "o1", "park")),
    ];
    for record in &mut log {
        record
            .headers
            .push(("traceparent".to_owned(), format!("00-{:032x}-{:016x}-01", 7, 9).into_bytes()));
    }
    for _ in 0..2 {
        assert!(deliver(&host, &log).await.is_empty());
    }
    // S0-009, S0-040, S1-079, S1-094: each outcome, by consumer. k1, l1, m1, n1, its two collisions,
    // the one without an id, o1.
    check(
        &telemetry,
        "oncebox_claims_total",
        "outcome",
        &[
            ("new", 8.0),
            ("waiting", 1.0),
            ("gap", 1.0),
            ("old", 1.0),
            // Of the second time, those that are open: l1 and l2, and k3, which waits.
            ("in_flight_elsewhere", 3.0),
            ("already_done", 8.0),
        ],
    );
    // S1-081: what was received is the sum of all outcomes, by event type.
    assert_eq!(telemetry.sum("oncebox_claims_total", &[]), 2.0 * log.len() as f64);
    for (event_type, received) in [("t", 16.0), ("nobody", 4.0), ("", 2.0)] {
        let labels = [("tenant", "acme"), ("consumer", "orders"), ("event_type", event_type)];
        assert_eq!(
            telemetry.sum("oncebox_claims_total", &labels),
            received,
            "`{event_type}`:\n{}",
            telemetry.metrics()
        );
    }
    // S1-077: once each, however often they come.
    check(
        &telemetry,
        "oncebox_parked_total",
        "reason",
        &[("no_route", 1.0), ("collision", 2.0), ("undecodable", 1.0), ("park", 1.0)],
    );
    // S1-083: runs that failed.
    check(&telemetry, "oncebox_failures_total", "reason", &[("trap", 1.0), ("park", 1.0)]);
    check(
        &telemetry,
        "oncebox_messages_total",
        "disposition",
        &[("completed", 2.0), ("failed_retryable", 1.0), ("parked", 1.0)],
    );

    // S1-086: each duplicate with what it is a duplicate of; what is parked is none.
    let skipped = telemetry.events("duplicate skipped");
    assert_eq!(skipped.len(), 11, "{skipped:#?}");
    let of = |id: &str| {
        skipped
            .iter()
            .filter(|event| event["message_id"] == id)
            .map(|event| event["status"].as_str().unwrap())
            .collect::<Vec<_>>()
    };
    assert_eq!(
        (of("k1"), of("l1"), of("n1")),
        (vec!["completed"], vec!["failed_retryable"], vec!["completed"])
    );
    for event in &skipped {
        assert_eq!(
            (&event["tenant"], &event["consumer"], &event["same_payload"]),
            (&"acme".into(), &"orders".into(), &true.into())
        );
        assert!(event["outcome"].is_string() && event["event_type"].is_string(), "{event}");
        let is_decoded = !event["message_id"].as_str().unwrap().starts_with("undecodable:");
        assert_eq!(event["trace_id"].is_string(), is_decoded, "{event}");
    }
    let parked = telemetry.events("message parked");
    let reasons: Vec<_> = parked
        .iter()
        .map(|event| (event["reason"].as_str().unwrap(), event["message_id"].as_str().unwrap()))
        .collect();
    // S1-088: each parked message, also one that its handler parks, and no other event for it.
    assert_eq!(reasons.len(), 5, "{parked:#?}");
    assert!(
        reasons.contains(&("no_route", "m1")) && reasons.contains(&("park", "o1")),
        "{reasons:?}"
    );
    assert!(
        reasons
            .iter()
            .any(|(reason, id)| reason.starts_with("undecodable: ") && *id == "undecodable:t:0:9"),
        "{reasons:?}"
    );
    assert!(parked.iter().all(|event| event["level"] == "WARN"
        && event["tenant"] == "acme"
        && event["consumer"] == "orders"));
    let failed = telemetry.events("message failed");
    assert_eq!(
        failed.iter().map(|event| &event["message_id"]).collect::<Vec<_>>(),
        ["l1"],
        "{failed:#?}"
    );
    // S1-091: the id that came twice, and the one that the newcomer is kept under.
    let collisions: Vec<_> = parked.iter().filter(|event| event["reason"] == "collision").collect();
    assert_eq!(collisions.len(), 2);
    assert!(collisions.iter().all(|event| event["collides_with"] == "n1"
        && event["message_id"].as_str().unwrap().starts_with("n1#")));
    fixture.finish().await;
}

/// What could go wrong: a claim that waits in vain for another session's is not counted, or under
/// no event type. S0-009.
#[tokio::test]
async fn a_claim_that_is_in_flight_elsewhere_is_counted_and_logged() {
    let telemetry = Telemetry::default();
    let fixture = InboxFixture::new().await;
    let consumer = fixture.simple("", "").await;
    let mut holder = Guest::begin(&fixture, &consumer).await;
    holder.claim(&["a"]).await.unwrap();
    let host = fixture.host(&consumer);
    let mut partition = take(&host).await;
    let error = partition.process(&[record(0, "a", "")]).await.unwrap_err();
    let labels = [
        ("outcome", "in_flight_elsewhere"),
        ("event_type", "t"),
        ("tenant", "acme"),
        ("consumer", "orders"),
    ];
    // S1-079: the sixth outcome.
    assert_eq!(
        telemetry.sum("oncebox_claims_total", &labels),
        1.0,
        "{error}:\n{}",
        telemetry.metrics()
    );
    let waited = telemetry.events("claim in flight elsewhere");
    assert_eq!(
        (waited.len(), &waited[0]["event_type"], &waited[0]["messages"]),
        (1, &"t".into(), &1.into()),
        "{waited:?}"
    );
    drop(holder);
    drive(&mut partition, &[record(0, "a", "")]).await;
    partition.close().await;
    fixture.finish().await;
}

/// What could go wrong: a failure whose transaction is repeated is counted as often as that, or one
/// that is rolled back is counted although it never was.
#[tokio::test]
async fn a_failure_is_counted_when_it_is_committed() {
    let telemetry = Telemetry::default();
    let fixture = InboxFixture::new().await;
    let consumer = fixture
        .simple(
            "CREATE TABLE late (n int UNIQUE DEFERRABLE INITIALLY DEFERRED)",
            "batch = { duration_ms = 30000 }",
        )
        .await;
    let host = fixture.host(&consumer);
    // Each of the two that fail fails in a batch, then under a savepoint in one that fails at its
    // commit, then alone.
    let log = [
        record(0, "one", "reject"),
        record(1, "two", "park"),
        record(2, "three", "sql INSERT INTO late VALUES (1)"),
        record(3, "four", "sql INSERT INTO late VALUES (1)"),
    ];
    deliver(&host, &log).await;
    assert_eq!(
        fixture.row(&consumer, "four").await.state(),
        ("failed_retryable", Some("sql_error:23505"), 1)
    );
    // S1-083
    check(
        &telemetry,
        "oncebox_failures_total",
        "reason",
        &[("reject", 1.0), ("park", 1.0), ("sql_error", 1.0)],
    );
    check(&telemetry, "oncebox_parked_total", "reason", &[("park", 1.0)]);
    assert_eq!(
        (telemetry.events("message failed").len(), telemetry.events("message parked").len()),
        (2, 1)
    );
    fixture.finish().await;
}

/// What could go wrong: what PostgreSQL does not take is counted as parked twice, or again with
/// each delivery.
#[tokio::test]
async fn what_cannot_be_claimed_is_parked_once() {
    let telemetry = Telemetry::default();
    let fixture = InboxFixture::new().await;
    let tenant = fixture.tenant("acme", "").await;
    for (name, policy, event_type) in
        [("live", "", "t"), ("stored", "ack = 'after_insert'", "t"), ("unrouted", "", "nobody")]
    {
        let consumer = fixture.consumer(&tenant, name, policy).await;
        let mut bad = of_type(event_type, record(0, "bad", ""));
        bad.headers.push(("content-type".to_owned(), b"a\0b".to_vec()));
        for _ in 0..2 {
            deliver(&fixture.host(&consumer), std::slice::from_ref(&bad)).await;
        }
        let of = [("consumer", name)];
        assert_eq!(
            telemetry.sum("oncebox_parked_total", &of),
            1.0,
            "{name}:\n{}",
            telemetry.metrics()
        );
        assert_eq!(
            telemetry.sum("oncebox_claims_total", &of),
            2.0,
            "{name}:\n{}",
            telemetry.metrics()
        );
    }
    fixture.finish().await;
}

/// What could go wrong: the third run that ends without an answer parks its message without a word.
/// S1-087, S1-088, S1-077.
#[tokio::test]
async fn a_message_parked_as_crashed_is_counted_and_logged() {
    let telemetry = Telemetry::default();
    let fixture = InboxFixture::new().await;
    let consumer = fixture.simple("", "ack = 'after_insert'").await;
    let host = fixture.host(&consumer);
    deliver(&host, &[record(0, "kills", "")]).await;
    let mut dying = Guest::connect(&fixture, &consumer).await;
    for _ in 1..=3 {
        assert_eq!(dying.lease(50).await.unwrap()[0].0, "kills");
        fixture.until("SELECT count(*) > 0 FROM oncebox.inbox WHERE locked_until < now()").await;
    }
    assert_eq!(step(&host).await.unwrap(), 0);
    assert_eq!(fixture.row(&consumer, "kills").await.state(), ("parked", Some("crashed"), 3));
    // S1-077, S1-083
    check(&telemetry, "oncebox_parked_total", "reason", &[("crashed", 1.0)]);
    assert_eq!(
        telemetry.sum("oncebox_failures_total", &[("reason", "crashed"), ("event_type", "t")]),
        1.0,
        "{}",
        telemetry.metrics()
    );
    let parked = telemetry.events("message parked");
    let fields = |event: &Value| {
        let of = |name: &str| event[name].as_str().unwrap_or_default().to_owned();
        (of("tenant"), of("consumer"), of("message_id"), of("event_type"), of("reason"))
    };
    assert_eq!(parked.len(), 1, "{parked:?}");
    // S1-088
    assert_eq!(
        fields(&parked[0]),
        ("acme".into(), "orders".into(), "kills".into(), "t".into(), "crashed".into())
    );
    assert_eq!(parked[0]["attempt"], 3);
    fixture.finish().await;
}

/// What could go wrong: an expired lease is taken over without a word. S1-087.
#[tokio::test]
async fn a_lease_that_is_taken_over_is_logged_and_its_crash_counted() {
    let telemetry = Telemetry::default();
    let fixture = InboxFixture::new().await;
    let consumer = fixture.simple("", "ack = 'after_insert'").await;
    let host = fixture.host(&consumer);
    deliver(&host, &[record(0, "once", "")]).await;
    let mut dying = Guest::connect(&fixture, &consumer).await;
    dying.lease(50).await.unwrap();
    fixture.until("SELECT count(*) > 0 FROM oncebox.inbox WHERE locked_until < now()").await;
    assert_eq!(step(&host).await.unwrap(), 1);
    // S1-087
    let taken = telemetry.events("lease taken over: its run ended without an answer");
    assert_eq!(taken.len(), 1, "{taken:?}");
    let event = &taken[0];
    assert_eq!(
        (&event["tenant"], &event["consumer"], &event["message_id"]),
        (&"acme".into(), &"orders".into(), &"once".into())
    );
    assert_eq!((&event["attempt"], &event["epoch"]), (&2.into(), &2.into()));
    check(&telemetry, "oncebox_failures_total", "reason", &[("crashed", 1.0)]);
    check(&telemetry, "oncebox_parked_total", "reason", &[]);
    fixture.finish().await;
}

/// What could go wrong: a slow run is not counted, or a quick one is.
#[tokio::test]
async fn slow_runs_are_counted() {
    let telemetry = Telemetry::default();
    let fixture = InboxFixture::new().await;
    let consumer = fixture.simple("", "limits = { deadline_ms = 4000 }").await;
    let host = fixture.host(&consumer);
    deliver(&host, &[record(0, "quick", ""), record(1, "slow", "sleep 2050")]).await;
    assert_eq!(
        telemetry.sum("oncebox_slow_runs_total", &[("tenant", "acme"), ("consumer", "orders")]),
        1.0,
        "{}",
        telemetry.metrics()
    );
    let events = telemetry
        .events("a handler took more than half of its deadline, with the transaction open");
    assert_eq!(events.iter().map(|event| &event["message_id"]).collect::<Vec<_>>(), ["slow"]);
    fixture.finish().await;
}

/// What could go wrong: ids that change between deliveries of one event go by unseen, or sound ones
/// are suspected. S1-049.
#[tokio::test]
async fn ids_that_change_for_one_payload_are_suspected() {
    let telemetry = Telemetry::default();
    let fixture = InboxFixture::new().await;
    let consumer = fixture.simple("", "").await;
    let host = fixture.host(&consumer);
    let payload = |n: i32| format!("# {n:0>80}");
    let mut partition = take(&host).await;
    let log = [
        record(0, "a", &payload(1)),
        record(1, "a", &payload(1)), // a redelivery
        record(2, "b", &payload(2)),
        record(3, "another id", &payload(1)),
        record(4, "c", "# short"),
        record(5, "d", "# short"),
        record(6, "a third", &payload(1)),
    ];
    assert!(drive(&mut partition, &log).await.is_empty());
    partition.close().await;
    // S1-049
    assert_eq!(
        telemetry.sum("oncebox_suspect_ids_total", &[("tenant", "acme"), ("consumer", "orders")]),
        2.0,
        "{}",
        telemetry.metrics()
    );
    let warned = telemetry.events(
        "the same payload came under another message id; ids that change \
        between deliveries defeat deduplication",
    );
    assert_eq!(
        warned.iter().map(|event| &event["message_id"]).collect::<Vec<_>>(),
        ["another id"],
        "one line for a partition"
    );
    fixture.finish().await;
}

/// What could go wrong: messages that no deployment takes become dead letters, and no counter says
/// why, so that no alert can.
#[tokio::test]
async fn a_message_that_nobody_takes_is_counted_by_its_reason() {
    for (no_route, metric) in
        [("park", "oncebox_parked_total"), ("reject", "oncebox_failures_total")]
    {
        let telemetry = Telemetry::default();
        let fixture = InboxFixture::new().await;
        let consumer = fixture.simple("", &format!("no_route = '{no_route}'")).await;
        let host = fixture.host(&consumer);
        let log = [of_type("nobody", record(0, "a", "")), of_type("nobody", record(1, "b", ""))];
        for _ in 0..2 {
            assert!(deliver(&host, &log).await.is_empty());
        }
        // S1-101.
        check(&telemetry, metric, "reason", &[("no_route", 2.0)]);
        assert_eq!(telemetry.sum(metric, &[("event_type", "nobody")]), 2.0, "{no_route}");
        fixture.finish().await;
    }
}
