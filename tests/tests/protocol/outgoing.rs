//! Outgoing messages are there if the message that caused them completed, and under the same ids
//! whatever ran again.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use oncebox_model::outgoing::outgoing_id;
use oncebox_tests::{
    inbox::{Guest, InboxFixture, TestConsumer, deliver, step},
    outgoing::{
        OutgoingRow, batch_emitting_host, caused_by, check_emitted, emitting, emitting_host,
        outgoing,
    },
    wait::DEADLINE,
};
use sqlx::AssertSqlSafe;
use tokio::time::{sleep, timeout};

mod cancel;
mod deletion;
mod figures;
mod inbox_destination;
mod looks;
mod partitions;
mod relay;
mod rights;

const QUICK: &str = "retry = { attempts_max = 3, backoff_min_ms = 1, backoff_max_ms = 1 }";

/// The ids of outgoing messages, by cause and ordinal.
fn ids(rows: &[OutgoingRow]) -> BTreeMap<(String, i32), String> {
    rows.iter().map(|row| ((row.message_id.clone(), row.ordinal), row.id.clone())).collect()
}

/// What could go wrong: the id of an outgoing message is drawn, counts attempts, or hangs on the
/// host, the time or the position of the record, so that a destination cannot tell a repeated
/// message from a new one; or two outgoing messages share one. S1-049.
#[tokio::test(flavor = "multi_thread")]
async fn a_repeated_run_emits_under_the_same_ids_and_nothing_else_does() {
    const TWO: &[&str] = &["emit kafka:orders.out", "emit inbox:billing"];
    let mut known = BTreeMap::new();
    for fails_first in [false, true] {
        let fixture = InboxFixture::new().await;
        let consumer = fixture.simple("", QUICK).await;
        let host = emitting_host(&fixture, &consumer);
        let trap = if fails_first { "before 2 trap" } else { "" };
        let offset = if fails_first { 700 } else { 0 };
        let script = [TWO, &[trap]].concat();
        deliver(&host, &[emitting(offset, "a", &script), emitting(offset + 1, "b", TWO)]).await;
        fixture.retry_until_settled(&host).await;
        let attempts = if fails_first { 2 } else { 1 };
        assert_eq!(fixture.row(&consumer, "a").await.state(), ("completed", None, attempts));
        let found = ids(&outgoing(&fixture).await);
        assert_eq!(found.len(), 4, "{found:?}");
        if fails_first {
            // S1-049: a second run, at another position, on another day.
            assert_eq!(found, known, "the ids of a repeated run are others");
        }
        known = found;
        fixture.finish().await;
    }

    let fixture = InboxFixture::new().await;
    let tenant = fixture.tenant("acme", "").await;
    let stranger = fixture.tenant("other", "").await;
    for (tenant, name) in [(&tenant, "orders"), (&tenant, "copies"), (&stranger, "orders")] {
        let consumer = fixture.consumer(tenant, name, QUICK).await;
        let host = emitting_host(&fixture, &consumer);
        deliver(&host, &[emitting(0, "a", TWO), emitting(1, "b", TWO)]).await;
    }
    let rows = outgoing(&fixture).await;
    let different: BTreeSet<_> = rows.iter().map(|row| &row.id).collect();
    assert_eq!((rows.len(), different.len()), (12, 12), "two outgoing messages share an id");
    assert_eq!(ids(&rows[..4]), known, "another database");
    fixture.finish().await;
}

/// What could go wrong: parts of an id run into each other, so that (`ab`, `c`) and (`a`, `bc`)
/// have one id.
#[test]
fn the_parts_of_an_id_do_not_run_into_each_other() {
    let parts = ["", "a", "ab", "b", "a/b", "a\0b", "1", "11"];
    let mut seen = BTreeMap::new();
    for tenant in parts {
        for consumer in parts {
            for message in parts {
                for ordinal in [0, 1, 11, 256] {
                    let id = outgoing_id(tenant, consumer, message, ordinal);
                    let source = (tenant, consumer, message, ordinal);
                    let other = seen.insert(id.clone(), source);
                    assert!(other.is_none(), "{other:?} and {source:?} have the id {id}");
                    let is_uuid = id.len() == 36
                        && id.char_indices().all(|(at, c)| match at {
                            8 | 13 | 18 | 23 => c == '-',
                            14 => c == '8',
                            19 => "89ab".contains(c),
                            _ => c.is_ascii_hexdigit(),
                        });
                    assert!(is_uuid, "{id} is no UUID of version 8");
                }
            }
        }
    }
}

/// Delivers messages that end in every way, some of them several times.
async fn end_in_every_way(fixture: &InboxFixture, consumer: &TestConsumer, batches: bool) {
    let host = if batches {
        batch_emitting_host(fixture, consumer)
    } else {
        emitting_host(fixture, consumer)
    };
    let one = "emit kafka:orders.out key=k";
    let log = [
        emitting(0, "ok", &[one, "emit inbox:billing payload=x", "result 1"]),
        emitting(1, "rejected", &[one, "reject"]),
        emitting(2, "later", &[one, one, "before 2 other"]),
        emitting(3, "parked", &[one, "park"]),
        emitting(4, "trapped", &[one, "trap"]),
        emitting(5, "failed", &[one, "sql SELECT 1/0"]),
        emitting(6, "swallowed", &[one, "swallow SELECT 1/0"]),
        emitting(7, "silent", &[]),
        emitting(8, "last", &[one]),
    ];
    for _ in 0..2 {
        deliver(&host, &log).await;
        // Also while some of them wait for their next run.
        check_emitted(fixture, consumer, &log).await;
        fixture.retry_until_settled(&host).await;
        check_emitted(fixture, consumer, &log).await;
    }
    for row in fixture.rows().await {
        let is_done = ["ok", "later", "silent", "last"].contains(&row.message_id.as_str());
        // S0-022.
        assert_eq!(row.status == "completed", is_done, "{row:?}");
    }
    // S0-025, S0-047, S1-037, S3-020.
    assert_eq!(outgoing(fixture).await.len(), 5, "two of `ok`, two of `later`, one of `last`");
}

/// What could go wrong: an outgoing message of a message that failed is sent, one of a message that
/// completed is not there, or one of a savepoint that was rolled back stays; a redelivery emits
/// again. S0-022, S0-025, S0-047, S1-037, S3-020.
#[tokio::test(flavor = "multi_thread")]
async fn outgoing_messages_are_there_if_their_cause_completed() {
    for policy in ["", "inbox = 'light'", "ack = 'after_insert'", "payload = 'none'"] {
        for batches in [false, true] {
            println!("policy `{policy}`, batches: {batches}");
            let fixture = InboxFixture::new().await.unhurried();
            let consumer = fixture.simple("", &format!("{policy}\n{QUICK}")).await;
            end_in_every_way(&fixture, &consumer, batches).await;
            fixture.finish().await;
        }
    }
}

/// What could go wrong: a claim that is withdrawn, since the time of its batch is over, leaves what
/// its message would emit, or takes what its neighbours emitted with it.
#[tokio::test(flavor = "multi_thread")]
async fn withdrawn_claims_leave_nothing_to_send() {
    let fixture = InboxFixture::new().await;
    let consumer = fixture.simple("", "batch = { duration_ms = 50 }").await;
    let log: Vec<_> = (0..12)
        .map(|n| emitting(n, &format!("m{n}"), &["emit kafka:orders.out", "sleep 30"]))
        .collect();
    deliver(&emitting_host(&fixture, &consumer), &log).await;
    assert_eq!(outgoing(&fixture).await.len(), 12);
    check_emitted(&fixture, &consumer, &log).await;
    fixture.finish().await;
}

/// What could go wrong: without a row of its cause an outgoing message has no place, or a second
/// delivery, which runs, fails for the first one's rows.
#[tokio::test(flavor = "multi_thread")]
async fn without_deduplication_messages_emit_as_well() {
    let fixture = InboxFixture::new().await;
    let consumer = fixture.simple("", &format!("dedup = 'off'\n{QUICK}")).await;
    let host = emitting_host(&fixture, &consumer);
    let log = [
        emitting(0, "a", &["emit kafka:orders.out", "emit kafka:orders.out"]),
        emitting(1, "b", &["emit kafka:orders.out", "reject"]),
        emitting(2, "c", &["emit kafka:orders.out"]),
    ];
    assert!(deliver(&host, &log).await.is_empty());
    fixture.retry_until_settled(&host).await;
    let first = ids(&outgoing(&fixture).await);
    let causes: Vec<_> = first.keys().map(|(id, _)| id.as_str()).collect();
    assert_eq!(causes, ["a", "a", "c"]);
    // What runs again emits again, under the ids that it had.
    let again = timeout(DEADLINE, deliver(&host, &log[..1])).await;
    let errors = again.expect("a second run is not held up by what the first one emitted");
    assert!(errors.is_empty(), "{errors:?}");
    assert_eq!(ids(&outgoing(&fixture).await), first);
    fixture.execute("DELETE FROM oncebox.inbox").await;
    fixture.execute(format!("DELETE FROM {}.effect", consumer.tenant.schema_name)).await;
    fixture.finish().await;
}

/// What could go wrong: a worker whose lease ran out, and its successor, both leave what the
/// message emits; or a worker that lost its lease leaves it without the effect.
#[tokio::test(flavor = "multi_thread")]
async fn a_lease_that_ran_out_emits_once() {
    let fixture = InboxFixture::new().await;
    let policy = "ack = 'after_insert'\nretry = { lease_ms = 4000, backoff_min_ms = 1, \
        backoff_max_ms = 1 }\nlimits = { deadline_ms = 1000 }";
    let consumer = fixture.simple("", policy).await;
    let host = emitting_host(&fixture, &consumer);
    let log = [emitting(0, "a", &["emit kafka:orders.out token=t"])];
    deliver(&host, &log).await;
    let mut dead = Guest::connect(&fixture, &consumer).await;
    assert_eq!(dead.lease(50).await.unwrap().len(), 1);
    fixture.until("SELECT locked_until < now() FROM oncebox.inbox").await;
    while step(&host).await.unwrap() == 0 {
        sleep(Duration::from_millis(5)).await;
    }
    check_emitted(&fixture, &consumer, &log).await;
    dead.execute("BEGIN ISOLATION LEVEL READ COMMITTED READ WRITE").await.unwrap();
    assert!(!dead.resume("a", 1).await.unwrap(), "a lost lease is held");
    drop(dead);
    check_emitted(&fixture, &consumer, &log).await;
    fixture.finish().await;
}

/// What could go wrong: what a row says of its message is not what was emitted: its due time is
/// the host's, a key is lost, messages of one key are in two lanes, or of two tenants in one.
#[tokio::test(flavor = "multi_thread")]
async fn a_row_says_what_was_emitted() {
    let fixture = InboxFixture::new().await;
    let tenant = fixture.tenant("acme", "").await;
    let stranger = fixture.tenant("other", "").await;
    let at = fixture.number("SELECT (extract(epoch FROM now()) * 1000)::bigint + 7200000").await;
    let lines = [
        "emit kafka:orders.out key=k1".to_owned(),
        "emit kafka:orders.out key=k1 after=60000".to_owned(),
        "emit kafka:orders.out key=k2".to_owned(),
        "emit kafka:other.out key=k1".to_owned(),
        "emit kafka:orders.out type=order.late payload=p token=t".to_owned(),
        format!("emit inbox:billing at={at}"),
        "emit inbox:billing at=1000".to_owned(),
    ];
    let lines: Vec<_> = lines.iter().map(String::as_str).collect();
    let mut correlated = emitting(0, "a", &lines);
    correlated.headers.push(("ce_correlationid".to_owned(), b"order-7".to_vec()));
    for (tenant, name) in [(&tenant, "orders"), (&tenant, "copies"), (&stranger, "orders")] {
        let consumer = fixture.consumer(tenant, name, "").await;
        deliver(&emitting_host(&fixture, &consumer), std::slice::from_ref(&correlated)).await;
    }
    let orders = fixture.consumer(&tenant, "plain", "").await;
    deliver(&emitting_host(&fixture, &orders), &[emitting(1, "b", &["emit inbox:billing"])]).await;

    let rows = outgoing(&fixture).await;
    let (own, others) = rows.split_at(7);
    let lanes: Vec<_> = own.iter().map(|row| row.lane).collect();
    assert!(lanes[0].is_some() && lanes[0] == lanes[1], "{lanes:?}");
    assert!(lanes[2].is_some() && lanes[2] != lanes[0], "another key: {lanes:?}");
    assert!(lanes[3].is_some() && lanes[3] != lanes[0], "another destination: {lanes:?}");
    assert_eq!(lanes[4..], [None, None, None], "without a key there is no order");
    assert_eq!(others[0].lane, lanes[0], "a key is of the tenant, whichever consumer emits");
    assert_ne!(others[7].lane, lanes[0], "a key of another tenant");
    assert_eq!((own[0].due_after_ms, own[1].due_after_ms), (0, 60_000));
    assert!((3_600_000..=7_200_000).contains(&own[5].due_after_ms), "{:?}", own[5]);
    assert!(own[6].due_after_ms <= 0, "a time that is past: {:?}", own[6]);
    assert_eq!(own[4].payload.as_deref(), Some(&b"p"[..]));
    assert_eq!(
        (own[4].event_type.as_str(), own[4].cancel_token.as_deref()),
        ("order.late", Some("t"))
    );
    assert!(rows.iter().all(|row| row.state() == ("received", None) && row.attempts == 0));
    assert!(own.iter().all(|row| row.correlation_id == "order-7"), "{own:?}");
    assert_eq!(caused_by(&fixture, "b").await.correlation_id, "b");
    fixture.finish().await;
}

/// What could go wrong: a bug of ours, or a hand in the database, makes a row that no relay sends
/// and no operator finds.
#[tokio::test(flavor = "multi_thread")]
async fn the_schema_refuses_impossible_outgoing_rows() {
    let fixture = InboxFixture::new().await;
    let consumer = fixture.simple("", "").await;
    let log = [emitting(0, "a", &["emit kafka:orders.out"])];
    deliver(&emitting_host(&fixture, &consumer), &log).await;
    for (set, constraint) in [
        ("status = 'finished', next_attempt_at = NULL", "outgoing_status_known"),
        ("status = 'completed', next_attempt_at = NULL", "outgoing_settled_has_time"),
        ("settled_at = now()", "outgoing_settled_has_time"),
        ("next_attempt_at = NULL", "outgoing_due_has_time"),
        ("status = 'in_progress', next_attempt_at = NULL", "outgoing_lease_has_end"),
        ("locked_until = now()", "outgoing_lease_has_end"),
        ("status = 'parked', next_attempt_at = NULL", "outgoing_failure_has_reason"),
        ("key = 'k'", "outgoing_lane_has_key"),
        ("lane = 7", "outgoing_lane_has_key"),
        ("ordinal = -1", "outgoing_ordinal_positive"),
        ("message_id = ''", "outgoing_message_id_length"),
        ("destination = ''", "outgoing_destination_length"),
        ("consumer_id = 0", "outgoing_consumer_positive"),
    ] {
        let update = AssertSqlSafe(format!("UPDATE oncebox.outgoing SET {set}"));
        let refused = sqlx::query(update).execute(&fixture.pool).await.expect_err(set);
        let violated = refused.as_database_error().and_then(|error| error.constraint());
        assert_eq!(violated, Some(constraint), "`{set}`: {refused}");
    }
    fixture.finish().await;
}
