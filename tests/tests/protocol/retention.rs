//! Retention: what is old goes, what must stay stays, and what was forgotten never runs again by
//! itself.

use std::{collections::BTreeMap, time::Duration};

use oncebox_control::{Action, Removal, RetentionRun};
use oncebox_model::{
    policy::{Retention, TimeSpan},
    record::Record,
};
use oncebox_tests::{
    aging::{age, old_partition},
    inbox::{InboxFixture, PlainHandlers, TestConsumer, both, deliver, record, records},
    job::{carry_out, inbox_job, these},
};
use rand::{Rng, SeedableRng, rngs::StdRng};
use sqlx::{AssertSqlSafe, Connection};
use tokio::time::timeout;

mod histories;
mod killed;

/// What could go wrong: the proof counts on more days, or on fewer, than the database keeps.
#[tokio::test(flavor = "multi_thread")]
async fn the_classes_of_policies_are_those_of_the_schema() {
    const HOURS: &str = "SELECT coalesce(extract(epoch FROM {time}) / 3600, 0)::bigint FROM \
        oncebox.retention_class WHERE name = '{class}'";
    let fixture = InboxFixture::new().await;
    for class in Retention::ALL {
        let hours = async |time: &str| {
            let sql = HOURS.replace("{time}", time).replace("{class}", class.name());
            fixture.number(sql).await
        };
        let in_hours = |span: TimeSpan| span.ms().map_or(0, |ms| ms as i64 / 3_600_000);
        assert_eq!(in_hours(class.span()), hours("retention").await, "{class:?}");
        // A run every hour adds one.
        let kept = in_hours(class.longest_kept());
        assert_eq!((kept - 1).max(0), hours("retention + bucket").await, "{class:?}");
    }
    fixture.finish().await;
}

/// One run of retention on the host's database.
async fn retain(fixture: &InboxFixture) -> RetentionRun {
    let retention = fixture.control.retention();
    let database = fixture.control.tenant_databases().all().await.unwrap().remove(0);
    retention.run(&database).await.unwrap()
}

/// A run that removes exactly one partition.
async fn retain_one(fixture: &InboxFixture) -> Removal {
    let mut run = retain(fixture).await;
    assert!(run.is_ours && run.failed.is_empty(), "{run:?}");
    assert_eq!(run.removed.len(), 1, "{run:?}");
    run.removed.remove(0)
}

async fn act(fixture: &InboxFixture, action: Action, ids: &[&str]) -> i64 {
    if ids.is_empty() {
        return 0;
    }
    let job = inbox_job(action, "orders", these(ids));
    carry_out(&fixture.control, "acme", &job).await.unwrap().changed
}

/// The ids in the inbox, with their statuses.
async fn statuses(fixture: &InboxFixture) -> BTreeMap<String, String> {
    fixture.rows().await.into_iter().map(|row| (row.message_id, row.status)).collect()
}

/// Forgets the effects of messages that have no row any more, after a look that each happened once:
/// the fixture's last check compares effects with rows.
async fn settle_forgotten(fixture: &InboxFixture, consumer: &TestConsumer, ids: &[&str]) {
    for id in ids {
        assert_eq!(fixture.effects(consumer, id).await, 1, "`{id}`");
        let schema = &consumer.tenant.schema_name;
        fixture
            .execute(format!(
                "DELETE FROM {schema}.effect WHERE message_id = '{id}' AND consumer = '{}'",
                consumer.row.name
            ))
            .await;
    }
}

const QUICK: &str = "retry = { attempts_max = 2, backoff_min_ms = 1, backoff_max_ms = 1 }";

/// What could go wrong: rows pile up for ever; a message goes before its time; a message that
/// someone still needs goes with the others, or loses its payload or its history; the history of
/// what is gone stays. S0-027, S2-015, S2-016, S3-007, S3-019, S4-013, S0-028.
#[tokio::test(flavor = "multi_thread")]
async fn what_is_past_its_retention_goes_and_what_is_open_stays() {
    let fixture = InboxFixture::new().await;
    let consumer = fixture.simple("", QUICK).await;
    let host = fixture.host(&consumer);
    let old = [
        record(0, "done", ""),
        record(1, "redriven", "before 2 trap"),
        record(2, "discarded", "park"),
        record(3, "parked", "park"),
        record(4, "terminal", "reject"),
        record(5, "late", "retry 60000"),
    ];
    deliver(&host, &old).await;
    let due = "SELECT count(*) = 1 FROM oncebox.inbox WHERE status = 'failed_retryable'";
    while !sqlx::query_scalar::<_, bool>(due).fetch_one(&fixture.pool).await.unwrap() {
        oncebox_tests::inbox::step(&host).await.unwrap();
    }
    assert_eq!(act(&fixture, Action::Discard, &["discarded"]).await, 1);
    let kept_before: Vec<_> = fixture.rows().await;
    let name = age(&fixture.pool, "true", 12).await;
    deliver(&host, &[record(6, "young", ""), record(7, "young-parked", "park")]).await;
    let younger = age(&fixture.pool, "message_id LIKE 'young%'", 4).await;
    assert_ne!(name, younger, "a partition that is not due yet");

    let report = fixture.control.retention().report(&database(&fixture).await).await.unwrap();
    let planned: Vec<_> = report.partitions.iter().filter(|partition| partition.is_due).collect();
    assert_eq!(planned.len(), 1, "{report:#?}");
    assert_eq!((&planned[0].name, planned[0].staying, planned[0].is_ours), (&name, Some(3), true));

    let removal = retain_one(&fixture).await;
    assert_eq!(
        (removal.partition_name.as_str(), removal.state.as_str(), removal.moved, removal.removed),
        (name.as_str(), "dropped", 3, Some(3))
    );
    assert!(removal.bytes > Some(0) && removal.error.is_none(), "{removal:?}");
    let stays = |id: &str, status: &str| (id.to_owned(), status.to_owned());
    // S0-027, S0-030, S2-015.
    assert_eq!(
        statuses(&fixture).await,
        BTreeMap::from([
            stays("late", "failed_retryable"),
            stays("parked", "parked"),
            stays("terminal", "failed_terminal"),
            stays("young", "completed"),
            stays("young-parked", "parked"),
        ])
    );
    for before in
        kept_before.iter().filter(|row| ["parked", "terminal"].contains(&&*row.message_id))
    {
        let after = fixture.row(&consumer, &before.message_id).await;
        assert_eq!((after.state(), &after.payload), (before.state(), &before.payload));
        assert_eq!((&after.headers, after.offset), (&before.headers, before.offset));
    }
    let table = format!("SELECT (to_regclass('oncebox.{name}') IS NULL)::int::bigint");
    // S2-016, S3-019: the table is gone, and no row was deleted one by one.
    assert_eq!(fixture.number(table).await, 1);
    assert_eq!(
        fixture
            .number(
                "SELECT count(*) FROM oncebox.inbox_history WHERE message_id IN ('redriven', \
                    'discarded')"
            )
            .await,
        0,
        "the history of what is gone"
    );
    let history = "SELECT count(*) FROM oncebox.inbox_history WHERE message_id = 'terminal'";
    assert_eq!(fixture.number(history).await, 1, "the history of what stays");
    let forgotten = fixture.control.retention().forgotten(&database(&fixture).await).await.unwrap();
    assert_eq!(forgotten.len(), 1);
    assert_eq!(
        (forgotten[0].completed, forgotten[0].skipped, forgotten[0].discarded),
        (2, 0, 1),
        "{forgotten:?}"
    );
    let again = retain(&fixture).await;
    assert!(again.removed.is_empty() && again.failed.is_empty(), "{again:?}");
    // What stayed can still be cured.
    assert_eq!(act(&fixture, Action::Discard, &["parked", "terminal", "late"]).await, 3);
    settle_forgotten(&fixture, &consumer, &["done", "redriven"]).await;
    fixture.finish().await;
}

/// What could go wrong: of a partition that is read in slices, one is read twice or left out, and
/// with it the highest offset. Then a forgotten message that comes again runs again.
#[tokio::test(flavor = "multi_thread")]
async fn a_partition_of_many_slices_is_counted_whole() {
    let fixture = InboxFixture::new().await;
    let consumer = fixture.simple("", "").await;
    let host = fixture.host(&consumer);
    deliver(&host, &[record(0, "first", "")]).await;
    let name = age(&fixture.pool, "true", 12).await;
    // Wide copies, so that few messages fill many pages, with the highest offsets in the middle.
    fixture
        .execute(format!(
            "INSERT INTO oncebox.{name} SELECT r.* FROM oncebox.{name} i, \
                generate_series(1, 6000) n, LATERAL jsonb_populate_record(i, jsonb_build_object( \
                'message_id', 'copy-' || n, 'offset', n * 7919 % 6007, 'partition', n % 2, \
                'record_timestamp_ms', n * 104729 % 6007, 'source', repeat('x', 700), 'status', \
                CASE n % 9 WHEN 0 THEN 'skipped' WHEN 1 THEN 'discarded' ELSE 'completed' END)) r"
        ))
        .await;
    let pages = format!("SELECT pg_relation_size('oncebox.{name}') / 8192");
    assert!(fixture.number(pages).await > 2 * 256, "more than two slices");
    let held = format!(
        "SELECT partition, max(\"offset\"), max(record_timestamp_ms), \
            count(*) FILTER (WHERE status = 'completed'), \
            count(*) FILTER (WHERE status = 'skipped'), \
            count(*) FILTER (WHERE status = 'discarded') \
         FROM oncebox.{name} GROUP BY 1 ORDER BY 1"
    );
    let forgotten = "SELECT partition, \"offset\", record_timestamp_ms, completed, skipped, \
        discarded FROM oncebox.forgotten ORDER BY 1";
    let sums = async |sql: String| {
        let query = sqlx::query_as::<_, (i32, i64, i64, i64, i64, i64)>(AssertSqlSafe(sql));
        query.fetch_all(&fixture.pool).await.unwrap()
    };
    let held = sums(held).await;
    let removal = retain_one(&fixture).await;
    assert_eq!((removal.moved, removal.removed), (0, Some(6_001)));
    assert_eq!(held.len(), 2);
    assert_eq!(sums(forgotten.to_owned()).await, held);
    settle_forgotten(&fixture, &consumer, &["first"]).await;
    fixture.finish().await;
}

async fn database(fixture: &InboxFixture) -> oncebox_control::InboxDatabase {
    fixture.control.tenant_databases().all().await.unwrap().remove(0)
}

/// What could go wrong: a record that comes again after its message was forgotten has its effect
/// again; it is lost; it cannot be run although it should; or records that never ran are held back
/// with it. S1-046, S1-111, S2-017, S4-020.
#[tokio::test(flavor = "multi_thread")]
async fn what_was_forgotten_is_parked() {
    both(what_was_forgotten_is_parked_of).await;
}

async fn what_was_forgotten_is_parked_of(fixture: InboxFixture) {
    let consumer = fixture.simple("", "payload = 'failed'").await;
    let host = fixture.host(&consumer);
    deliver(&host, &records(["a", "b", "c"])).await;
    age(&fixture.pool, "true", 12).await;
    retain_one(&fixture).await;
    assert!(fixture.rows().await.is_empty());

    // The group was set back; behind the old records are new ones.
    let log = records(["a", "b", "c", "d", "e"]);
    deliver(&host, &log).await;
    for id in ["a", "b", "c"] {
        let row = fixture.row(&consumer, id).await;
        // S1-111.
        assert_eq!(row.state(), ("parked", Some("horizon"), 0), "{id}");
        assert!(row.headers.is_some() && row.last_error.is_some(), "{row:?}");
        assert_eq!(row.version_id, None, "the withdrawal of a version runs what it failed");
        assert_eq!(fixture.script.runs(id).len(), 1, "{id} runs a second time");
    }
    for id in ["d", "e"] {
        assert_eq!(fixture.row(&consumer, id).await.state(), ("completed", None, 1), "{id}");
    }
    // A delivery of what is parked is a duplicate, and a run of an operator is a run.
    deliver(&host, &log).await;
    assert_eq!(fixture.rows().await.len(), 5);
    settle_forgotten(&fixture, &consumer, &["a", "b", "c"]).await;
    assert_eq!(act(&fixture, Action::Redrive, &["b"]).await, 1);
    fixture.retry_until_settled(&host).await;
    assert_eq!(fixture.row(&consumer, "b").await.state(), ("completed", None, 1));

    // A consumer that reads the topic for the first time has forgotten nothing of it.
    let new = fixture.consumer(&consumer.tenant, "new", "").await;
    deliver(&fixture.host(&new), &log).await;
    for id in ["a", "b", "c", "d", "e"] {
        assert_eq!(fixture.row(&new, id).await.state(), ("completed", None, 1), "{id}");
    }
    // A topic that was made again begins with low offsets, and later timestamps.
    let later = Record { timestamp_ms: record(9, "", "").timestamp_ms, ..record(0, "z", "") };
    // Another partition of the topic has its own mark.
    let beside = Record { partition: 1, ..record(0, "y", "") };
    deliver(&host, &[later]).await;
    deliver(&host, &[beside]).await;
    for id in ["y", "z"] {
        assert_eq!(fixture.row(&consumer, id).await.state(), ("completed", None, 1), "{id}");
    }
    fixture.finish().await;
}

/// What could go wrong: the choice of the policy is not heeded, or a message is judged in one of the
/// ways in which it is stored, and not in another. S1-047, S4-012.
#[tokio::test(flavor = "multi_thread")]
async fn the_policy_decides_about_what_was_forgotten() {
    let fixture = InboxFixture::new().await;
    let consumer = fixture.simple("", "").await;
    for (name, policy) in [
        ("runs", "replay = { past_horizon = 'run' }"),
        ("inserts", "ack = 'after_insert'"),
        ("keeps-nothing", "payload = 'none'"),
        ("inserts-nothing", "payload = 'none'\nack = 'after_insert'"),
        ("light", "inbox = 'light'"),
    ] {
        let consumer = fixture.consumer(&consumer.tenant, name, policy).await;
        let host = fixture.host(&consumer);
        deliver(&host, &records(["a"])).await;
        fixture.retry_until_settled(&host).await;
    }
    age(&fixture.pool, "true", 12).await;
    retain_one(&fixture).await;
    for (name, expected) in [
        ("runs", ("completed", None, 1)),
        ("inserts", ("parked", Some("horizon"), 0)),
        ("keeps-nothing", ("parked", Some("horizon"), 0)),
        ("inserts-nothing", ("parked", Some("horizon"), 0)),
        ("light", ("parked", Some("horizon"), 0)),
    ] {
        let row = fixture.control.consumers().get("acme", name).await.unwrap();
        let policy = row.policy().unwrap();
        let again = TestConsumer { tenant: consumer.tenant.clone(), row, policy };
        let host = fixture.host(&again);
        deliver(&host, &records(["a"])).await;
        fixture.retry_until_settled(&host).await;
        let row = fixture.row(&again, "a").await;
        assert_eq!(row.state(), expected, "{name}");
        assert_eq!(row.headers.is_some(), ["inserts", "light"].contains(&name), "{name}");
        if name == "runs" {
            assert_eq!(fixture.effects(&again, "a").await, 2);
            let schema = &consumer.tenant.schema_name;
            fixture
                .execute(format!(
                    "DELETE FROM {schema}.effect WHERE ctid = (SELECT min(ctid) FROM \
                        {schema}.effect WHERE consumer = 'runs')"
                ))
                .await;
        } else {
            settle_forgotten(&fixture, &again, &["a"]).await;
        }
    }
    let empty = "SELECT count(*) FROM oncebox.inbox WHERE status = 'parked' AND event_type IS NULL";
    assert_eq!(fixture.number(empty).await, 0, "a parked row is full");
    fixture.finish().await;
}

/// What could go wrong: what was forgotten is parked for another reason, and the cure for that reason
/// runs it a second time.
#[tokio::test(flavor = "multi_thread")]
async fn what_was_forgotten_is_parked_as_that() {
    let fixture = InboxFixture::new().await;
    let consumer = fixture.simple("", "").await;
    let host = fixture.host(&consumer);
    deliver(&host, &records(["a"])).await;
    age(&fixture.pool, "true", 12).await;
    retain_one(&fixture).await;
    // Its deployment has ended since.
    host.set_handlers(PlainHandlers::resolving(1, |_| None));
    let unnamed = Record { headers: Vec::new(), ..record(0, "", "") };
    deliver(&host, &[record(0, "a", ""), record(1, "b", "")]).await;
    deliver(&host, &[unnamed]).await;
    assert_eq!(fixture.row(&consumer, "a").await.state(), ("parked", Some("horizon"), 0));
    assert_eq!(fixture.row(&consumer, "b").await.state(), ("parked", Some("no_route"), 0));
    let undecodable = "SELECT count(*) FROM oncebox.inbox WHERE reason LIKE 'undecodable%'";
    assert_eq!(fixture.number(undecodable).await, 1, "it never had an id to be forgotten");
    settle_forgotten(&fixture, &consumer, &["a"]).await;
    fixture.finish().await;
}

/// What could go wrong: a message runs before an earlier one of its key that is parked, since that
/// one may have run; or the version of an aggregate that is past it is parked for nothing.
#[tokio::test(flavor = "multi_thread")]
async fn what_was_forgotten_keeps_its_turn() {
    both(what_was_forgotten_keeps_its_turn_of).await;
}

async fn what_was_forgotten_keeps_its_turn_of(fixture: InboxFixture) {
    const BY_VERSION: &str = "order = 'key'\nsequence = { version = { header = 'version' }, first \
        = 1, gap_wait_ms = 60000 }";
    let of_key = |offset, id: &str, key: &str, version: Option<i64>| {
        let mut of_key = Record { key: Some(key.as_bytes().to_vec()), ..record(offset, id, "") };
        let version = version.map(|version| version.to_string().into_bytes());
        of_key.headers.extend(version.map(|version| ("version".to_owned(), version)));
        of_key
    };
    let consumer = fixture.simple("", "order = 'key'").await;
    let versions = fixture.consumer(&consumer.tenant, "versions", BY_VERSION).await;
    let (host, by_version) = (fixture.host(&consumer), fixture.host(&versions));
    deliver(&host, &[of_key(0, "k1", "k", None), of_key(1, "l1", "l", None)]).await;
    deliver(&by_version, &[of_key(0, "v1", "v", Some(1))]).await;
    age(&fixture.pool, "true", 12).await;
    retain_one(&fixture).await;

    let log = [of_key(0, "k1", "k", None), of_key(2, "k2", "k", None), of_key(3, "m1", "m", None)];
    deliver(&host, &log).await;
    assert_eq!(fixture.row(&consumer, "k1").await.state(), ("parked", Some("horizon"), 0));
    assert_eq!(fixture.row(&consumer, "k2").await.state(), ("waiting", None, 0));
    assert_eq!(fixture.row(&consumer, "m1").await.state(), ("completed", None, 1));
    assert_eq!(act(&fixture, Action::Discard, &["k1"]).await, 1);
    fixture.retry_until_settled(&host).await;
    assert_eq!(fixture.row(&consumer, "k2").await.state(), ("completed", None, 1));

    deliver(&by_version, &[of_key(0, "v1", "v", Some(1)), of_key(1, "v2", "v", Some(2))]).await;
    assert_eq!(fixture.row(&versions, "v1").await.state(), ("skipped", Some("old_version"), 0));
    assert_eq!(fixture.row(&versions, "v2").await.state(), ("completed", None, 1));
    settle_forgotten(&fixture, &consumer, &["k1", "l1"]).await;
    settle_forgotten(&fixture, &versions, &["v1"]).await;
    fixture.finish().await;
}

/// What could go wrong: the row of a version that was given up goes while the versions before it are
/// still missing, and its aggregate waits for it for ever.
#[tokio::test(flavor = "multi_thread")]
async fn a_version_stays_until_its_aggregate_is_past_it() {
    const BY_VERSION: &str = "order = 'key'\nsequence = { version = { header = 'version' }, first \
        = 1, gap_wait_ms = 3600000 }";
    let fixture = InboxFixture::new().await;
    let consumer = fixture.simple("", BY_VERSION).await;
    let host = fixture.host(&consumer);
    let version = |offset, version: i64| {
        let id = format!("v{version}");
        let mut of_key = Record { key: Some(b"k".to_vec()), ..record(offset, &id, "") };
        of_key.headers.push(("version".to_owned(), version.to_string().into_bytes()));
        of_key
    };
    deliver(&host, &[version(0, 3)]).await;
    assert_eq!(act(&fixture, Action::Discard, &["v3"]).await, 1);
    age(&fixture.pool, "true", 12).await;
    let removal = retain_one(&fixture).await;
    assert_eq!((removal.moved, removal.removed), (1, Some(0)), "v3 stays");
    deliver(&host, &[version(1, 4)]).await;
    deliver(&host, &[version(2, 1), version(3, 2)]).await;
    fixture.retry_until_settled(&host).await;
    assert_eq!(fixture.row(&consumer, "v4").await.state(), ("completed", None, 1));
    age(&fixture.pool, "true", 12).await;
    let removal = retain_one(&fixture).await;
    assert_eq!((removal.moved, removal.removed), (0, Some(4)), "the aggregate is past it");
    settle_forgotten(&fixture, &consumer, &["v1", "v2", "v4"]).await;
    fixture.finish().await;
}

/// What could go wrong: claims queue behind a removal that waits for a transaction of before, or
/// find a message in none of the states of a removal. S3-017.
#[tokio::test(flavor = "multi_thread")]
async fn no_claim_waits_for_a_removal() {
    let fixture = InboxFixture::new().await;
    let consumer = fixture.simple("", "").await;
    let host = fixture.host(&consumer);
    deliver(&host, &records(["a"])).await;
    let name = age(&fixture.pool, "true", 12).await;
    let mut reader = fixture.superuser().await;
    let mut open = reader.begin().await.unwrap();
    let seen: i64 = sqlx::query_scalar("SELECT count(*) FROM oncebox.inbox")
        .fetch_one(&mut *open)
        .await
        .unwrap();
    assert_eq!(seen, 1);
    let mut waiting = Box::pin(retain(&fixture));
    let detaching = fixture.until(
        "SELECT EXISTS (SELECT FROM pg_inherits WHERE inhdetachpending) AND EXISTS (SELECT FROM \
            pg_stat_activity WHERE application_name = 'oncebox retention' AND wait_event_type = \
            'Lock' AND datname = current_database())",
    );
    tokio::select! {
        () = detaching => {}
        run = &mut waiting => panic!("it did not wait for the open transaction: {run:?}"),
    }
    // Claims of known, forgotten and new messages, and a partition that is made ahead.
    let claims = async {
        deliver(&host, &records(["a", "b"])).await;
        // As hosts attach one.
        fixture
            .execute(
                "CREATE TABLE oncebox.inbox_7d_ahead (LIKE oncebox.inbox INCLUDING DEFAULTS \
                    INCLUDING CONSTRAINTS); ALTER TABLE oncebox.inbox_7d ATTACH PARTITION \
                    oncebox.inbox_7d_ahead FOR VALUES FROM ('2100-01-01') TO ('2100-01-02')",
            )
            .await;
    };
    tokio::select! {
        () = claims => {}
        run = &mut waiting => panic!("it did not wait for the open transaction: {run:?}"),
    }
    assert_eq!(fixture.row(&consumer, "a").await.state(), ("parked", Some("horizon"), 0));
    assert_eq!(fixture.row(&consumer, "b").await.state(), ("completed", None, 1));
    assert_eq!(fixture.script.runs("a").len(), 1);
    // It is cancelled while it waits; the next run ends what it began.
    fixture
        .execute(
            "SELECT pg_cancel_backend(pid) FROM pg_stat_activity WHERE application_name = 'oncebox \
                retention' AND datname = current_database()",
        )
        .await;
    let run = waiting.as_mut().await;
    drop(waiting);
    assert_eq!((run.removed.len(), run.failed.len()), (0, 1), "{run:?}");
    let report = fixture.control.retention().report(&database(&fixture).await).await.unwrap();
    assert!(report.removals[0].error.is_some(), "{report:?}");
    assert_eq!(
        fixture.number("SELECT count(*) FROM pg_inherits WHERE inhdetachpending").await,
        1,
        "half done"
    );
    deliver(&host, &records(["a", "b", "c"])).await;
    assert_eq!(fixture.row(&consumer, "c").await.state(), ("completed", None, 1));
    open.rollback().await.unwrap();
    reader.close().await.unwrap();
    assert_eq!(retain_one(&fixture).await.partition_name, name);
    settle_forgotten(&fixture, &consumer, &["a"]).await;
    fixture.finish().await;
}

/// What could go wrong: a table goes that retention did not make; a message goes that another
/// session holds just now; a second process works on the same partition.
#[tokio::test(flavor = "multi_thread")]
async fn a_removal_takes_only_what_is_its_own() {
    let fixture = InboxFixture::new().await;
    let consumer = fixture.simple("", "").await;
    let host = fixture.host(&consumer);
    deliver(&host, &[record(0, "a", "park"), record(1, "b", "")]).await;
    let name = age(&fixture.pool, "true", 12).await;
    // Made by a person, for a time that is as old.
    let theirs = old_partition(&fixture.pool, 40).await;
    fixture
        .execute(format!("ALTER TABLE oncebox.{theirs} RENAME TO inbox_7d_20200101000000"))
        .await;
    fixture.execute("CREATE TABLE oncebox.inbox_7d_20190101000000 (LIKE oncebox.inbox)").await;

    let mut holder = fixture.superuser().await;
    let mut open = holder.begin().await.unwrap();
    let held: String = sqlx::query_scalar(
        "SELECT message_id FROM oncebox.inbox WHERE message_id = 'a' FOR UPDATE",
    )
    .fetch_one(&mut *open)
    .await
    .unwrap();
    assert_eq!(held, "a");
    let mut first = Box::pin(retain(&fixture));
    let begun = format!(
        "SELECT EXISTS (SELECT FROM oncebox.removal WHERE partition_name = '{name}') AND EXISTS \
            (SELECT FROM pg_locks WHERE locktype = 'advisory' AND classid = 0 AND granted AND \
            database = (SELECT oid FROM pg_database WHERE datname = current_database()))"
    );
    tokio::select! {
        () = fixture.until(&begun) => {}
        run = &mut first => panic!("the message is locked: {run:?}"),
    }
    let second = retain(&fixture).await;
    assert!(!second.is_ours && second.removed.is_empty(), "{second:?}");
    open.rollback().await.unwrap();
    holder.close().await.unwrap();
    let run = first.as_mut().await;
    drop(first);
    assert_eq!(run.removed.len(), 1, "{run:?}");
    assert_eq!((run.removed[0].moved, run.removed[0].removed), (1, Some(1)));
    for theirs in ["inbox_7d_20200101000000", "inbox_7d_20190101000000"] {
        let there = format!("SELECT (to_regclass('oncebox.{theirs}') IS NOT NULL)::int::bigint");
        assert_eq!(fixture.number(there).await, 1, "{theirs}");
    }
    settle_forgotten(&fixture, &consumer, &["b"]).await;
    fixture.finish().await;
}

/// What could go wrong: what a person puts into a partition while it is removed goes with it, or
/// stops retention for good.
#[tokio::test(flavor = "multi_thread")]
async fn what_is_put_into_a_partition_while_it_goes_comes_back() {
    let fixture = InboxFixture::new().await;
    let consumer = fixture.simple("", "").await;
    let host = fixture.host(&consumer);
    deliver(&host, &[record(0, "a", "park"), record(1, "b", "")]).await;
    let name = age(&fixture.pool, "true", 12).await;
    let removal = retain_one(&fixture).await;
    assert_eq!(removal.moved, 1);
    // As a process leaves it that dies before the drop, and a person in between.
    fixture
        .execute(format!(
            "CREATE TABLE oncebox.{name} (LIKE oncebox.inbox INCLUDING DEFAULTS INCLUDING \
                CONSTRAINTS INCLUDING INDEXES); INSERT INTO oncebox.{name} SELECT * FROM \
                oncebox.inbox WHERE message_id = 'a'; UPDATE oncebox.{name} SET bucket = (SELECT \
                from_at FROM oncebox.removal); DELETE FROM oncebox.inbox; UPDATE oncebox.removal \
                SET state = 'counted', dropped_at = NULL"
        ))
        .await;
    let run = retain(&fixture).await;
    assert_eq!(run.failed.len(), 1, "{run:?}");
    assert!(run.failed[0].1.contains("1 messages of the partition must stay"), "{run:?}");
    assert_eq!(fixture.row(&consumer, "a").await.status, "parked", "it is known again");
    let counted = "SELECT completed FROM oncebox.forgotten";
    assert_eq!(fixture.number(counted).await, 1);
    assert_eq!(retain_one(&fixture).await.moved, 2, "one, and one of the first time");
    assert_eq!(fixture.row(&consumer, "a").await.status, "parked");
    assert_eq!(fixture.number(counted).await, 1, "what went was counted twice");
    settle_forgotten(&fixture, &consumer, &["b"]).await;
    fixture.finish().await;
}
