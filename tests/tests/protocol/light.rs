//! Light rows: a completed message leaves its id, its position and its times, and every other
//! message leaves all that a later run needs.

use std::{
    collections::BTreeMap,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use oncebox_control::{Action, Filter, JobFilter};
use oncebox_inbox::SessionSettings;
use oncebox_model::{
    Output,
    handler::Handler,
    outcome::{Failure, FailureKind},
    policy::{Collision, Policy, RowForm},
    record::Record,
};
use oncebox_tests::{
    inbox::{
        InboxFixture, PlainHandler, PlainHandlers, TestConsumer, both, deliver, execute, record,
    },
    job::{carry_out, inbox_job},
};
use serde_json::{Map, Value, json};

/// The columns of a light row that are not null.
const LIGHT: [&str; 16] = [
    "attempts",
    "bucket",
    "consumer_id",
    "crashes",
    "epoch",
    "message_id",
    "offset",
    "over_gap",
    "partition",
    "processed_at",
    "received_at",
    "record_timestamp_ms",
    "retention_class",
    "status",
    "topic",
    "version_id",
];
/// Columns whose values differ between two consumers, or between two moments.
const OF_ONE: [&str; 8] = [
    "bucket",
    "consumer_id",
    "next_attempt_at",
    "ordering_hash",
    "ordering_position",
    "processed_at",
    "received_at",
    "waits_until",
];
const QUICK: &str = "retry = { backoff_min_ms = 1, backoff_max_ms = 1 }";
const TRACE: &str = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";

/// A record that has everything that a row keeps of one, and makes a version of its key.
fn rich(offset: i64, id: &str, key: &str, version: i64, script: &str) -> Record {
    let mut rich = Record { key: Some(key.as_bytes().to_vec()), ..record(offset, id, script) };
    for (name, value) in [
        ("v", version.to_string().as_str()),
        ("type", "order.placed"),
        ("ce_source", "/shop/orders"),
        ("ce_dataschema", "https://shop.example/schemas/order/7"),
        ("content-type", "text/plain"),
        ("traceparent", TRACE),
        ("causation", "c-1"),
    ] {
        rich.headers.push((name.to_owned(), value.as_bytes().to_vec()));
    }
    rich
}

/// The same with another value of a header.
fn with(mut record: Record, name: &str, value: &str) -> Record {
    record.headers.push((name.to_owned(), value.as_bytes().to_vec()));
    record
}

/// The rows of a consumer by id, without what is null in them.
async fn rows(
    fixture: &InboxFixture,
    consumer: &TestConsumer,
) -> BTreeMap<String, Map<String, Value>> {
    let rows: Vec<(String, Value)> = sqlx::query_as(
        "SELECT message_id, jsonb_strip_nulls(to_jsonb(i)) FROM oncebox.inbox i WHERE consumer_id \
            = $1",
    )
    .bind(consumer.row.consumer_id)
    .fetch_all(&fixture.pool)
    .await
    .unwrap();
    rows.into_iter().map(|(id, row)| (id, row.as_object().unwrap().clone())).collect()
}

fn columns(row: &Map<String, Value>) -> Vec<&str> {
    let mut columns: Vec<_> = row.keys().map(String::as_str).collect();
    columns.sort_unstable();
    columns
}

/// Checks that a row is light, with some columns more.
#[track_caller]
fn check_light(row: &Map<String, Value>, more: &[&str]) {
    let mut expected = [&LIGHT[..], more].concat();
    expected.sort_unstable();
    assert_eq!(columns(row), expected);
}

/// Checks the rows of a light consumer against those of a full one that was given the same records:
/// what completed is light, and all else is as if it were full.
#[track_caller]
fn check_alike(
    full: &BTreeMap<String, Map<String, Value>>,
    light: &BTreeMap<String, Map<String, Value>>,
    more: &[&str],
) {
    assert_eq!(full.keys().collect::<Vec<_>>(), light.keys().collect::<Vec<_>>());
    for (id, full) in full {
        let light = &light[id];
        assert_eq!(full["status"], light["status"], "`{id}`");
        if full["status"] == "completed" {
            assert!(full.contains_key("payload_hash"), "`{id}`: {full:?}");
            check_light(light, more);
            continue;
        }
        assert_eq!(columns(full), columns(light), "`{id}`");
        for (column, value) in full.iter().filter(|(column, _)| !OF_ONE.contains(&&***column)) {
            assert_eq!(light[column], *value, "`{column}` of `{id}`");
        }
    }
}

async fn redrive_all(fixture: &InboxFixture, consumer: &TestConsumer) -> i64 {
    let redrive = inbox_job(Action::Redrive, &consumer.row.name, JobFilter::default());
    carry_out(&fixture.control, "acme", &redrive).await.unwrap().changed
}

/// What could go wrong: the row of a completed message keeps what it is not to keep, or lacks its
/// id, its position or its times. S1-012, S1-022.
#[tokio::test(flavor = "multi_thread")]
async fn a_completed_message_leaves_a_light_row() {
    both(async |fixture| {
        let tenant = fixture.tenant("acme", "").await;
        let full = fixture.consumer(&tenant, "full", "").await;
        let light = fixture.consumer(&tenant, "light", "inbox = 'light'").await;
        let sent = rich(5, "done", "k", 1, "");
        for consumer in [&full, &light] {
            deliver(&fixture.host(consumer), std::slice::from_ref(&sent)).await;
        }
        let found = rows(&fixture, &light).await;
        let row = &found["done"];
        // S1-012.
        check_light(row, &[]);
        assert_eq!(
            (&row["topic"], &row["partition"], &row["offset"], &row["record_timestamp_ms"]),
            (&json!("t"), &json!(0), &json!(5), &json!(sent.timestamp_ms))
        );
        let bytes = async |consumer: &TestConsumer| {
            let size = format!(
                "SELECT pg_column_size(i)::bigint FROM oncebox.inbox i WHERE consumer_id = {}",
                consumer.row.consumer_id
            );
            fixture.number(size).await
        };
        let (full, light) = (bytes(&full).await, bytes(&light).await);
        println!("a full row has {full} bytes, a light one {light}");
        assert!(light * 10 < full * 6, "{light} bytes instead of {full}");
        let processed = "SELECT count(*) FROM oncebox.processed_message WHERE consumer_name = 'light' \
            AND message_id = 'done' AND processed_at <= now()";
        // S1-022.
        assert_eq!(fixture.number(processed).await, 1);
        fixture.finish().await;
    })
    .await;
}

/// What could go wrong: a message that fails, is parked, skipped or has to wait loses what its
/// light claim did not write, in whatever order and whether it ran live or from its row; or a
/// message that completes later keeps it.
#[tokio::test(flavor = "multi_thread")]
async fn what_does_not_complete_has_a_full_row() {
    const SEQUENCE: &str = "order = 'key'\nsequence = { version = { header = 'v' } }";
    const IN_ORDER: [&str; 2] = ["ordering_hash", "ordering_position"];
    const IN_SEQUENCE: [&str; 4] =
        ["ordering_hash", "ordering_key", "ordering_position", "sequence_version"];
    both(async |fixture| {
        let fixture = fixture.unhurried();
        let tenant = fixture.tenant("acme", "").await;
        for (name, policy, more) in [
            ("none", String::new(), &[][..]),
            ("key", "order = 'key'".to_owned(), &IN_ORDER[..]),
            ("sequence", SEQUENCE.to_owned(), &IN_SEQUENCE[..]),
            ("inserted", format!("ack = 'after_insert'\n{SEQUENCE}"), &IN_SEQUENCE[..]),
        ] {
            let policy = format!("{policy}\n{QUICK}");
            let full = fixture.consumer(&tenant, name, &policy).await;
            let policy = format!("inbox = 'light'\n{policy}");
            let light = fixture.consumer(&tenant, &format!("{name}-light"), &policy).await;
            let log = [
                rich(0, "done", "a", 1, ""),
                rich(1, "again", "b", 1, "before 2 retry 0"),
                rich(2, "behind", "b", 2, ""),
                rich(3, "dead", "c", 1, "reject"),
                rich(4, "parked", "d", 1, "park"),
                rich(5, "new", "e", 2, ""),
                rich(6, "old", "e", 1, ""),
                rich(7, "before-gap", "f", 1, ""),
                rich(8, "behind-gap", "f", 3, ""),
                with(rich(9, "unrouted", "g", 1, ""), "type", "nobody"),
                Record { headers: Vec::new(), ..rich(10, "", "h", 1, "") },
            ];
            // PostgreSQL holds no such text, which its claim has to find out before it runs.
            let refused = with(rich(11, "refused", "i", 1, ""), "ce_source", "a\0b");
            let hosts = [fixture.host(&full), fixture.host(&light)];
            for host in &hosts {
                deliver(host, &log).await;
                deliver(host, std::slice::from_ref(&refused)).await;
            }
            check_alike(&rows(&fixture, &full).await, &rows(&fixture, &light).await, more);
            for host in &hosts {
                fixture.retry_until_settled(host).await;
            }
            let settled = rows(&fixture, &light).await;
            check_alike(&rows(&fixture, &full).await, &settled, more);
            assert_eq!(settled["again"]["status"], "completed", "{name}");
            assert_eq!(settled["behind"]["status"], "completed", "{name}");
            assert!(!settled.contains_key("refused"), "{name}: it is under its position");
        }
        fixture.finish().await;
    })
    .await;
}

/// What a handler was given, by message id, and whether its fault is mended.
#[derive(Default)]
struct Watched {
    given: Mutex<BTreeMap<String, Vec<String>>>,
    is_mended: AtomicBool,
}

/// A handler that does what the payload says, until it is mended.
fn watching(watched: &Arc<Watched>) -> Arc<dyn Handler> {
    let watched = watched.clone();
    PlainHandler::new(1, move |tx, run| {
        let watched = watched.clone();
        Box::pin(async move {
            let (consumer, message) = (run.consumer, run.message);
            let id = message.id.clone();
            let effect =
                format!("INSERT INTO effect VALUES ('{consumer}', '{id}', {}, 1)", run.attempt);
            execute(tx, &effect).await?;
            let mut given = watched.given.lock().unwrap();
            given.entry(id).or_default().push(format!("{message:?}"));
            let payload = String::from_utf8_lossy(message.body().unwrap_or_default());
            let kind = match payload.as_ref() {
                _ if watched.is_mended.load(Ordering::Relaxed) => return Ok(Output::default()),
                "retry" => FailureKind::Retry { delay: Some(Duration::ZERO) },
                "reject" => FailureKind::Reject,
                "park" => FailureKind::Park,
                _ => return Ok(Output::default()),
            };
            Err(Failure::new(kind, "a test"))
        })
    })
}

/// What could go wrong: a message that runs again from its row is given to its handler without its
/// key, its type, its trace or a header.
#[tokio::test(flavor = "multi_thread")]
async fn a_later_run_is_given_what_the_first_one_was() {
    let fixture = InboxFixture::new().await.unhurried();
    let tenant = fixture.tenant("acme", "").await;
    let watched = Arc::new(Watched::default());
    let log = [
        rich(0, "again", "a", 1, "retry"),
        rich(1, "behind", "a", 2, "# nothing"),
        rich(2, "dead", "b", 1, "reject"),
        rich(3, "parked", "c", 1, "park"),
        with(rich(4, "unrouted", "d", 1, "# nothing"), "type", "nobody"),
    ];
    for form in ["full", "light"] {
        let policy = format!("inbox = '{form}'\norder = 'key'\n{QUICK}");
        let consumer = fixture.consumer(&tenant, form, &policy).await;
        let handler = watching(&watched);
        let handlers = PlainHandlers::of(handler.clone());
        let host = fixture.host_with(&consumer, handlers, &SessionSettings::default());
        watched.is_mended.store(false, Ordering::Relaxed);
        deliver(&host, &log).await;
        watched.is_mended.store(true, Ordering::Relaxed);
        host.set_handlers(PlainHandlers::resolving(0, move |_| Some(handler.clone())));
        assert_eq!(redrive_all(&fixture, &consumer).await, 3, "{form}");
        fixture.retry_until_settled(&host).await;
        for id in ["again", "behind", "dead", "parked", "unrouted"] {
            assert_eq!(fixture.row(&consumer, id).await.status, "completed", "{form}: `{id}`");
        }
    }
    let given = std::mem::take(&mut *watched.given.lock().unwrap());
    assert_eq!(given.len(), log.len());
    for (id, runs) in given {
        assert!(runs.len() >= 2, "`{id}` ran {} times", runs.len());
        assert!(runs[0].contains(TRACE) && runs[0].contains("/shop/orders"), "{}", runs[0]);
        for run in &runs {
            assert_eq!(*run, runs[0], "`{id}`");
        }
    }
    let light = fixture.control.consumers().get("acme", "light").await.unwrap();
    let policy = light.policy().unwrap();
    let light = TestConsumer { tenant, row: light, policy };
    for row in rows(&fixture, &light).await.values() {
        check_light(row, &["ordering_hash", "ordering_position"]);
    }
    fixture.finish().await;
}

/// What could go wrong: a message whose row holds no hash runs again, or is taken for another one,
/// also when the consumer keeps full rows again; or a dead letter gets a record back that is not
/// its own. S1-012.
#[tokio::test(flavor = "multi_thread")]
async fn another_delivery_of_a_light_row_is_a_duplicate() {
    both(async |fixture| {
        let tenant = fixture.tenant("acme", "").await;
        let light = fixture.consumer(&tenant, "orders", "inbox = 'light'").await;
        let mut full = light.clone();
        full.policy.inbox = RowForm::Full;
        assert_eq!(full.policy.collision(), Collision::Park);
        let host = fixture.host(&light);
        deliver(&host, &[rich(0, "a", "k", 1, ""), rich(1, "a", "k", 1, "")]).await;
        deliver(&host, &[rich(0, "a", "k", 1, ""), rich(2, "a", "k", 1, "# other")]).await;
        let back = fixture.host(&full);
        deliver(&back, &[rich(3, "a", "k", 1, "# third"), rich(4, "b", "k", 1, "")]).await;
        deliver(&host, &[rich(5, "b", "k", 1, "# other"), rich(6, "c", "k", 1, "")]).await;
        let found = rows(&fixture, &light).await;
        // S1-012.
        assert_eq!(found.keys().collect::<Vec<_>>(), ["a", "b", "c"]);
        assert!(found.values().all(|row| row["status"] == "completed"), "{found:?}");
        assert!(found["b"].contains_key("payload_hash"), "it came while rows were full");
        check_light(&found["a"], &[]);
        check_light(&found["c"], &[]);
        for id in ["a", "b", "c"] {
            assert_eq!(fixture.effects(&light, id).await, 1, "`{id}`");
        }
        // A full row is compared as ever.
        deliver(&back, &[rich(7, "b", "k", 1, "# other")]).await;
        assert_eq!(rows(&fixture, &light).await.len(), 4, "a collision beside `b`");

        let policy = "inbox = 'light'\npayload = 'none'";
        let letters = fixture.consumer(&tenant, "letters", policy).await;
        let host = fixture.host(&letters);
        let letter = rich(0, "letter", "k", 1, "reject");
        deliver(&host, std::slice::from_ref(&letter)).await;
        deliver(&host, &[rich(1, "letter", "k", 1, "# other")]).await;
        assert_eq!(fixture.row(&letters, "letter").await.headers, None, "another payload came");
        deliver(&host, &[letter]).await;
        let row = fixture.row(&letters, "letter").await;
        assert_eq!(
            (row.status.as_str(), row.payload.as_deref()),
            ("failed_terminal", Some(&b"reject"[..]))
        );
        assert!(row.headers.is_some(), "{row:?}");
        fixture.finish().await;
    })
    .await;
}

/// What could go wrong: a result is kept that nobody asked for, or one that was asked for is not.
/// S4-006.
#[tokio::test(flavor = "multi_thread")]
async fn the_result_stays_where_the_policy_says() {
    both(async |fixture| {
        let tenant = fixture.tenant("acme", "").await;
        for (name, more, expected) in [
            ("without", "", [None, None]),
            ("with", "light = { result = true }", [Some(json!(7)), Some(json!({ "n": 8 }))]),
        ] {
            let policy = format!("inbox = 'light'\n{more}\n{QUICK}");
            let consumer = fixture.consumer(&tenant, name, &policy).await;
            let host = fixture.host(&consumer);
            let log = [
                rich(0, "at-once", "k", 1, "result 7"),
                rich(1, "later", "k", 1, "before 2 retry 0\nresult {\"n\": 8}"),
            ];
            deliver(&host, &log).await;
            fixture.retry_until_settled(&host).await;
            let found = rows(&fixture, &consumer).await;
            for (id, expected) in ["at-once", "later"].into_iter().zip(expected) {
                // S4-006.
                assert_eq!(found[id].get("result"), expected.as_ref(), "{name}: `{id}`");
                let more: &[&str] = if expected.is_some() { &["result"] } else { &[] };
                check_light(&found[id], more);
            }
        }
        fixture.finish().await;
    })
    .await;
}

/// What could go wrong: a policy promises what a light row cannot keep, and no one hears of it.
/// S3-010.
#[test]
fn what_a_light_row_cannot_do_is_refused() {
    let read = |more: &str| Policy::read(&format!("topics = ['t']\nack = 'after_commit'\n{more}"));
    for (policy, key, why) in [
        ("inbox = 'light'\ncollision = 'park'", "collision", "keeps no hash of its payload"),
        ("inbox = 'light'\npayload = 'all'", "payload", "a light row keeps no payload"),
        ("inbox = 'light'\ndedup = 'off'", "inbox", "needs `dedup = \"inbox\"`"),
        ("light = { result = true }", "light.result", "needs `inbox = \"light\"`"),
    ] {
        let (read, problems) = read(policy);
        assert!(read.is_none() && problems.len() == 1, "{policy}: {problems:?}");
        // S3-010.
        assert_eq!(problems[0].key, key);
        assert!(problems[0].text.contains(why), "{}", problems[0].text);
    }
    for more in [
        "",
        "collision = 'ignore'",
        "payload = 'none'",
        "order = 'partition'",
        "order = 'key'\nsequence = { version = { header = 'v' } }",
        "light = { result = true }\ndead_letters = { topic = 'dead' }",
    ] {
        let (policy, problems) = read(&format!("inbox = 'light'\n{more}"));
        let policy = policy.unwrap_or_else(|| panic!("{more}: {problems:?}"));
        assert_eq!(policy.collision(), Collision::Ignore, "{more}");
    }
    let (policy, _) = read("");
    assert_eq!(policy.unwrap().collision(), Collision::Park);
}

/// What could go wrong: a row without a type is no row to a command, or is shown as one that was
/// never decoded.
#[tokio::test(flavor = "multi_thread")]
async fn rows_of_both_forms_are_shown_together() {
    let fixture = InboxFixture::new().await;
    let light = fixture.simple("", "inbox = 'light'").await;
    let mut full = light.clone();
    full.policy.inbox = RowForm::Full;
    let host = fixture.host(&light);
    deliver(&host, &[rich(0, "light", "k", 1, ""), rich(1, "letter", "k", 1, "reject")]).await;
    deliver(&fixture.host(&full), &[rich(2, "full", "k", 1, "")]).await;
    let messages = fixture.control.messages();
    let all = Filter { limit: 50, ..Filter::default() };
    let listed = messages.inbox_list(&all).await.unwrap();
    let forms: BTreeMap<_, _> = listed
        .iter()
        .map(|row| (row.message_id.as_str(), (row.is_light(), row.event_type.as_deref())))
        .collect();
    let typed = (false, Some("order.placed"));
    assert_eq!(
        forms,
        BTreeMap::from([("full", typed), ("letter", typed), ("light", (true, None))])
    );
    let of_type = Filter { event_type: Some("order.placed".to_owned()), ..all.clone() };
    assert_eq!(messages.inbox_list(&of_type).await.unwrap().len(), 2);
    let exported = messages.inbox_export("acme", "orders", &all, true).await.unwrap();
    assert_eq!(exported.len(), 3);
    for (id, is_light) in [("light", true), ("full", false), ("letter", false)] {
        let shown = messages.inbox_show("acme", "orders", id).await.unwrap();
        assert_eq!((shown.row.is_light(), shown.key.is_none()), (is_light, is_light), "{id}");
        let history = messages.message_history("acme", "orders", id).await.unwrap();
        assert_eq!(history.next.text.contains("Its row is light"), is_light, "{id}");
    }
    fixture.finish().await;
}
