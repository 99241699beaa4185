//! The schema holds the state rules, and its indexes serve what runs all the time.

use chrono::{DateTime, Utc};
use futures::future::join_all;
use oncebox_control::{Cursor, Filter, HostLimits, Severity, schema};
use oncebox_model::{MessageStatus, record::Record};
use oncebox_tests::inbox::{Guest, InboxFixture, deliver, drive, record, records, step, take};
use sqlx::{AssertSqlSafe, PgConnection};

/// What could go wrong: a tool or a person looks for a column that one of the sources promises.
/// S0-011, S1-023, S2-001, S2-003, S3-003, S4-006, S4-007, S1-022, S1-070.
#[tokio::test(flavor = "multi_thread")]
async fn the_promised_columns_are_there() {
    let fixture = InboxFixture::new().await;
    let consumer = fixture.simple("", "").await;
    deliver(
        &fixture.host(&consumer),
        &[record(0, "done", "result 1"), record(1, "dead", "reject")],
    )
    .await;
    for sql in [
        "SELECT consumer_id, message_id, topic, partition, \"offset\", key, ordering_key, payload, \
            headers, payload_hash, source, event_type, \
            event_version, content_type, trace_parent, status, reason, attempts, crashes, \
            last_error, next_attempt_at, locked_until, locked_by, \
            epoch, version_id, result, received_at, processed_at FROM oncebox.inbox WHERE \
            received_at <= now() AND processed_at <= now() LIMIT 1",
        "SELECT consumer_name, message_id, processed_at, result FROM oncebox.processed_message \
            WHERE tenant_name = 'acme' AND message_id = 'done'",
        "SELECT message_id, reason, processed_at, last_error, payload FROM oncebox.dead_letter \
            WHERE consumer_name = 'orders' AND message_id = 'dead'",
    ] {
        let rows = sqlx::query(AssertSqlSafe(sql)).fetch_all(&fixture.pool).await.unwrap();
        // S0-011, S1-019, S1-022, S1-023, S2-001, S2-003, S3-003, S4-007.
        assert_eq!(rows.len(), 1, "`{sql}`");
    }
    fixture.finish().await;
}

/// What could go wrong: a bug of ours, or a hand in the database, makes a row that no rule covers.
/// S0-012, S0-014, S1-025 to S1-030, S2-004.
#[tokio::test(flavor = "multi_thread")]
async fn the_schema_refuses_impossible_rows() {
    let fixture = InboxFixture::new().await;
    let consumer = fixture.simple("", "").await;
    deliver(&fixture.host(&consumer), &records(["a"])).await;
    for (set, constraint) in [
        ("status = 'finished', processed_at = NULL", "inbox_status_known"),
        ("processed_at = NULL", "inbox_settled_has_time"),
        ("status = 'in_progress', processed_at = NULL", "inbox_lease_has_end"),
        ("locked_until = now()", "inbox_lease_has_end"),
        ("status = 'received', processed_at = NULL", "inbox_due_has_time"),
        ("next_attempt_at = now()", "inbox_due_has_time"),
        ("status = 'parked'", "inbox_failure_has_reason"),
        ("message_id = ''", "inbox_message_id_length"),
        ("message_id = repeat('x', 601)", "inbox_message_id_length"),
    ] {
        let refused = sqlx::query(AssertSqlSafe(format!("UPDATE oncebox.inbox SET {set}")))
            .execute(&fixture.pool)
            .await
            .unwrap_err();
        // S0-014, S2-004.
        assert_eq!(
            refused.as_database_error().unwrap().constraint(),
            Some(constraint),
            "`{set}`: {refused}"
        );
    }
    let again = sqlx::query("INSERT INTO oncebox.inbox SELECT * FROM oncebox.inbox")
        .execute(&fixture.pool)
        .await
        .unwrap_err();
    // S0-012, S1-120.
    assert!(again.as_database_error().unwrap().is_unique_violation(), "{again}");
    fixture.finish().await;
}

/// What could go wrong: a message that somebody looks for is not in the list, or on no page of it,
/// or the filter is ignored. S1-070.
#[tokio::test(flavor = "multi_thread")]
async fn a_message_is_found_by_whatever_is_known_of_it() {
    let fixture = InboxFixture::new().await;
    let consumer = fixture.simple("", "no_route = 'park'").await;
    // Ids that a collation would put in another order than their bytes; all of a batch have one
    // time.
    let mut batch: Vec<_> = ["b", "B", "a", "Z", "_", "0"]
        .iter()
        .enumerate()
        .map(|(n, id)| record(n as i64, id, ""))
        .collect();
    batch.push(record(6, "dead", "reject"));
    batch[0].key = Some(b"k1".to_vec());
    batch[1].key = Some(vec![0xff, 0x00]);
    deliver(&fixture.host(&consumer), &batch).await;
    fixture.execute("UPDATE oncebox.inbox SET received_at = '2026-01-31 12:00:00.000001+00'").await;
    fixture
        .execute(
            "UPDATE oncebox.inbox SET received_at = '2026-01-31 13:00:00+00' WHERE \
        message_id IN ('a', 'dead')",
        )
        .await;
    let all = ["a", "dead", "0", "B", "Z", "_", "b"];
    let found = async |filter: Filter| -> Vec<String> {
        let rows = fixture
            .control
            .messages()
            .inbox_list(&Filter {
                limit: if filter.limit == 0 { 50 } else { filter.limit },
                ..filter
            })
            .await
            .unwrap();
        rows.into_iter().map(|row| row.message_id).collect()
    };
    let at = |text: &str| Some(DateTime::parse_from_rfc3339(text).unwrap().with_timezone(&Utc));
    let text = |text: &str| Some(text.to_owned());
    assert_eq!(found(Filter::default()).await, all);
    for (filter, expected) in [
        (Filter { tenant: text("acme"), consumer: text("orders"), ..Filter::default() }, &all[..]),
        (Filter { consumer: text("other"), ..Filter::default() }, &[]),
        (Filter { status: Some(MessageStatus::FailedTerminal), ..Filter::default() }, &["dead"]),
        (Filter { reason: text("reject"), ..Filter::default() }, &["dead"]),
        (Filter { reason: text("trap"), ..Filter::default() }, &[]),
        (Filter { event_type: text("t"), ..Filter::default() }, &all),
        (Filter { event_type: text("tt"), ..Filter::default() }, &[]),
        (
            Filter { ordering_keys: vec![b"k1".to_vec(), b"k2".to_vec()], ..Filter::default() },
            &["b"],
        ),
        (Filter { ordering_keys: vec![vec![0xff, 0x00]], ..Filter::default() }, &["B"]),
        (Filter { since: at("2026-01-31T13:00:00Z"), ..Filter::default() }, &["a", "dead"]),
        (Filter { until: at("2026-01-31T13:00:00Z"), ..Filter::default() }, &all[2..]),
        (
            Filter {
                since: at("2026-01-31T12:00:00.000002Z"),
                until: at("2026-01-31T13:00:00Z"),
                ..Filter::default()
            },
            &[],
        ),
        (Filter { version: text("00"), ..Filter::default() }, &[]),
    ] {
        // S0-042, S1-034, S1-070.
        assert_eq!(found(filter.clone()).await, expected, "{filter:?}");
    }
    let error = fixture.row(&consumer, "dead").await.last_error.unwrap();
    assert_eq!(
        found(Filter { error: Some(error.to_uppercase()), ..Filter::default() }).await,
        ["dead"],
        "{error}"
    );
    assert_eq!(found(Filter { error: text("%"), ..Filter::default() }).await, [""; 0]);

    for limit in 1..=all.len() as i64 {
        let (mut paged, mut after) = (Vec::new(), None);
        loop {
            let rows = fixture
                .control
                .messages()
                .inbox_list(&Filter { limit, after: after.clone(), ..Filter::default() })
                .await
                .unwrap();
            let Some(last) = rows.last() else { break };
            let cursor =
                Cursor { received_at: last.received_at, message_id: Some(last.message_id.clone()) };
            after = Some(cursor.to_string().parse().unwrap());
            assert_eq!(after, Some(cursor));
            paged.extend(rows.into_iter().map(|row| row.message_id));
        }
        assert_eq!(paged, all, "pages of {limit}");
    }
    deliver(&fixture.host(&consumer), &[Record { headers: Vec::new(), ..record(7, "", "") }]).await;
    for (reason, count) in [("undecodable", 1), ("undecod", 0), ("undecodable:", 0), ("reject", 1)]
    {
        assert_eq!(
            found(Filter { reason: text(reason), ..Filter::default() }).await.len(),
            count,
            "{reason}"
        );
    }
    let behind_the_time =
        Cursor { received_at: at("2026-01-31T13:00:00Z").unwrap(), message_id: None };
    assert_eq!(found(Filter { after: Some(behind_the_time), ..Filter::default() }).await, all[2..]);
    fixture.finish().await;
}

/// What could go wrong: a list reads a consumer's whole part of the inbox, for a page of fifty, and
/// takes the longer the more there is; or a question that has to be narrower is answered with what
/// is not all of it. S1-070.
#[tokio::test(flavor = "multi_thread")]
async fn every_list_is_answered_from_an_index_or_asks_for_less() {
    let fixture = InboxFixture::new().await;
    let consumer = fixture.simple("", "").await;
    let rows = |consumer_id: i32, ids: &str, status: &str, reason: &str, count: u32| {
        let times = if status == "completed" || status == "parked" { "now()" } else { "NULL" };
        format!(
            "INSERT INTO oncebox.inbox (consumer_id, message_id, retention_class, bucket, topic, \
                partition, \"offset\", record_timestamp_ms, \
                status, reason, attempts, received_at, processed_at, event_type) \
             SELECT {consumer_id}, '{ids}' || n, 1, oncebox.bucket_at(1::smallint, now()), 't', 0, \
             n, 0, '{status}', {reason}, 1, \
                now() - n * interval '1 second', {times}, 't' FROM generate_series(1, {count}) n"
        )
    };
    let of_us = consumer.row.consumer_id;
    fixture.execute(rows(of_us, "old", "completed", "NULL", 60_000)).await;
    fixture.execute(rows(of_us, "left", "parked", "'park'", 30_000)).await;
    // Somebody else's are newer, and between ours.
    let other = fixture.consumer(&consumer.tenant, "other", "").await;
    fixture.execute(rows(other.row.consumer_id, "other", "completed", "NULL", 60_000)).await;
    fixture
        .execute("UPDATE oncebox.inbox SET event_type = 'rare' WHERE message_id = 'old59999'")
        .await;
    fixture.execute("VACUUM ANALYZE").await;
    let text = |text: &str| Some(text.to_owned());
    let whose =
        Filter { tenant: text("acme"), consumer: text("orders"), limit: 50, ..Filter::default() };
    let hours = |hours: i64| Some(Utc::now() - chrono::TimeDelta::hours(hours));
    let asked = [
        ("everything", whose.clone()),
        ("of all consumers", Filter { consumer: None, ..whose.clone() }),
        ("of all tenants", Filter { consumer: None, tenant: None, ..whose.clone() }),
        ("completed", Filter { status: Some(MessageStatus::Completed), ..whose.clone() }),
        ("parked", Filter { status: Some(MessageStatus::Parked), ..whose.clone() }),
        (
            "of a state that none is in",
            Filter { status: Some(MessageStatus::FailedTerminal), ..whose.clone() },
        ),
        ("old", Filter { until: hours(12), ..whose.clone() }),
        ("of an hour", Filter { since: hours(9), until: hours(8), ..whose.clone() }),
        (
            "behind a cursor",
            Filter {
                after: Some(Cursor { received_at: hours(10).unwrap(), message_id: text("x") }),
                ..whose.clone()
            },
        ),
    ];
    for (what, filter) in &asked {
        assert_eq!(
            fixture.control.messages().inbox_list(filter).await.unwrap().len(),
            if what.contains("none") { 0 } else { 50 },
            "{what}"
        );
        let (pages, plan) = pages_read(&fixture, filter).await;
        println!("{what}: {pages} pages");
        assert!(pages < 600, "{what} reads {pages} pages:\n{plan}");
    }
    // It is the index that does it.
    fixture.execute("DROP INDEX oncebox.inbox_newest").await;
    let (pages, _) = pages_read(&fixture, &asked[0].1).await;
    assert!(pages > 1_000, "without the index it would read {pages} pages");
    fixture
        .execute("CREATE INDEX inbox_newest ON oncebox.inbox ((consumer_id::bigint), received_at)")
        .await;

    // What no index knows is looked for among the newest only, and the answer says when that is not
    // all.
    let looked = async |filter: Filter| {
        fixture
            .control
            .messages()
            .inbox_list(&filter)
            .await
            .map(|rows| rows.len())
            .map_err(|error| error.to_string())
    };
    let common = Filter { event_type: text("t"), ..whose.clone() };
    assert_eq!(looked(common).await, Ok(50));
    let rare = Filter { event_type: text("rare"), ..whose.clone() };
    let refused = looked(rare.clone()).await.unwrap_err();
    assert!(
        refused.contains("of the newest 20000 messages of a consumer 0 are like that")
            && refused.contains("`since`"),
        "{refused}"
    );
    assert_eq!(looked(Filter { until: hours(16), ..rare.clone() }).await, Ok(1));
    let many = Filter { reason: text("park"), limit: 20_001, ..whose.clone() };
    let refused = looked(many.clone()).await.unwrap_err();
    assert!(refused.contains("ask for at most 20000"), "{refused}");
    assert_eq!(looked(Filter { limit: 20_000, ..many.clone() }).await, Ok(20_000));
    assert_eq!(
        looked(Filter { reason: text("trap"), until: hours(5), ..many.clone() }).await,
        Ok(0),
        "a reason is looked for in open rows"
    );
    let (pages, plan) = pages_read(&fixture, &rare).await;
    // A page is counted each time that a row on it is looked at.
    assert!(pages < 30_000, "{pages} pages:\n{plan}");
    // An export reads all of it.
    let exported =
        fixture.control.messages().inbox_export("acme", "orders", &rare, false).await.unwrap();
    assert_eq!(exported.len(), 1);
    fixture.execute("DELETE FROM oncebox.inbox").await;
    fixture.finish().await;
}

/// Pages that a list reads, and its plan.
async fn pages_read(fixture: &InboxFixture, filter: &Filter) -> (u64, String) {
    let plan = fixture.control.messages().inbox_list_plan(filter).await.unwrap();
    (shared_pages(&plan), plan.join("\n"))
}

/// Pages that a statement read, by its plan.
fn shared_pages(plan: &[String]) -> u64 {
    let all = plan
        .iter()
        .find_map(|line| line.trim().strip_prefix("Buffers: shared "))
        .unwrap_or_default();
    let counts = all
        .split_whitespace()
        .filter_map(|word| word.split_once('='))
        .filter(|(what, _)| matches!(*what, "hit" | "read"));
    counts.map(|(_, count)| count.trim_end_matches(',').parse::<u64>().unwrap()).sum()
}

/// As a lease looks for what is due: the head of an index, not a sort of everything that waits.
const DUE: &str = "SELECT x.message_id FROM oncebox.inbox x WHERE x.consumer_id = 1 AND \
    x.retention_class = 1 \
    AND x.status IN ('received', 'failed_retryable') AND x.next_attempt_at <= now() \
    ORDER BY x.next_attempt_at, x.\"offset\" LIMIT 1 FOR UPDATE SKIP LOCKED";

/// What could go wrong: a claim, or the search for what is due, reads a whole partition, and every
/// message gets slower with each one before it. S0-013, S0-020, S1-024, S2-002, S3-004.
#[tokio::test(flavor = "multi_thread")]
async fn a_full_inbox_is_read_by_index() {
    let fixture = InboxFixture::new().await;
    let consumer = fixture.simple("", "retry = { attempts_max = 9 }").await;
    let host = fixture.host(&consumer);
    // Sessions warm up on an empty inbox, when a plan that reads everything is as good as any.
    let mut partition = take(&host).await;
    for n in 0..20 {
        drive(&mut partition, &[record(n, &format!("warm{n}"), "")]).await;
        step(&host).await.unwrap();
    }
    fixture
        .execute(format!(
            "INSERT INTO oncebox.inbox (consumer_id, message_id, retention_class, \
        bucket, topic, partition, \"offset\", \
        record_timestamp_ms, status, attempts, processed_at) SELECT {}, 'old' || n, 1, \
        oncebox.bucket_at(1::smallint, now()), 't', 0, n, 0, \
        'completed', 1, now() FROM generate_series(1, 50000) n",
            consumer.row.consumer_id
        ))
        .await;
    fixture
        .execute(format!(
            "INSERT INTO {}.effect SELECT 'orders', 'old' || n, 1, 1 FROM generate_series(1, \
                50000) n",
            consumer.tenant.schema_name
        ))
        .await;
    for n in 0..20 {
        drive(
            &mut partition,
            &[
                record(100 + n, &format!("new{n}"), "reject"),
                record(200 + n, &format!("old{}", n + 1), ""),
            ],
        )
        .await;
        step(&host).await.unwrap();
    }
    // The same with plans made for the full table, by sessions that come now.
    fixture.execute("ANALYZE").await;
    let fresh = fixture.host(&consumer);
    for n in 0..10 {
        deliver(
            &fresh,
            &[
                record(300 + n, &format!("fresh{n}"), ""),
                record(400 + n, &format!("old{}", n + 1), ""),
            ],
        )
        .await;
        step(&fresh).await.unwrap();
    }
    // Sessions report what they read when they end.
    partition.close().await;
    drop((host, fresh));
    fixture
        .until(&format!(
            "SELECT count(*) = 0 FROM pg_stat_activity WHERE usename = '{}'",
            consumer.tenant.login
        ))
        .await;
    let scanned = fixture
        .number(
            "SELECT sum(seq_tup_read)::bigint FROM pg_stat_user_tables WHERE \
        relname LIKE 'inbox_7d%'",
        )
        .await;
    // One scan for each of the 60 messages would read three million; autovacuum may read it once.
    // S0-020.
    assert!(scanned < 100_000, "whole scans of the inbox read {scanned} rows");

    let leaf: String =
        sqlx::query_scalar("SELECT DISTINCT tableoid::regclass::text FROM oncebox.inbox")
            .fetch_one(&fixture.pool)
            .await
            .unwrap();
    let leaf = leaf.trim_start_matches("oncebox.");
    for (sql, index) in [
        (
            "SELECT * FROM oncebox.inbox WHERE consumer_id = 1 AND status = 'failed_terminal' \
                ORDER BY received_at LIMIT 10",
            "consumer_id_status_received_at_idx",
        ),
        (
            "SELECT * FROM oncebox.inbox WHERE consumer_id = 1 AND status IN ('received', \
                'failed_retryable') AND next_attempt_at <= now()",
            "consumer_id_next_attempt_at_offset_idx",
        ),
        (
            "SELECT * FROM oncebox.inbox WHERE consumer_id = 1 AND status = 'in_progress' AND \
                locked_until < now()",
            "consumer_id_locked_until_offset_idx",
        ),
        (DUE, "consumer_id_next_attempt_at_offset_idx"),
    ] {
        let plan: Vec<String> = sqlx::query_scalar(AssertSqlSafe(format!("EXPLAIN {sql}")))
            .fetch_all(&fixture.pool)
            .await
            .unwrap();
        let plan = plan.join("\n");
        // Partitions that were analyzed when they were empty may be read whole.
        let by_index = plan
            .lines()
            .any(|line| line.contains("Index") && line.contains(&format!("{leaf}_{index}")));
        // S0-013, S1-024, S2-002, S3-004.
        assert!(by_index && !plan.contains(&format!("Seq Scan on {leaf} ")), "`{sql}`:\n{plan}");
    }
    // However much is due, the next one is found at the head of an index.
    fixture
        .execute(format!(
            "INSERT INTO oncebox.inbox (consumer_id, message_id, retention_class, bucket, topic, \
                partition, \"offset\", \
        record_timestamp_ms, status, next_attempt_at) SELECT {}, 'due' || n, 1, \
        oncebox.bucket_at(1::smallint, now()), 't', 0, n, 0, \
        'received', now() FROM generate_series(1, 20000) n",
            consumer.row.consumer_id
        ))
        .await;
    fixture.execute("ANALYZE").await;
    let plan: Vec<String> = sqlx::query_scalar(AssertSqlSafe(format!("EXPLAIN {DUE}")))
        .fetch_all(&fixture.pool)
        .await
        .unwrap();
    assert!(!plan.join("\n").contains("Sort  ("), "{plan:?}");
    let brin = "SELECT count(*) FROM pg_indexes WHERE tablename = 'inbox' AND indexdef LIKE \
        '%USING brin (processed_at)%completed%'";
    assert_eq!(fixture.number(brin).await, 1);
    fixture.finish().await;
}

/// What could go wrong: a second host that starts migrates or makes partitions at the same time, or
/// what a repetition does stops claims. S0-028, S2-016.
#[tokio::test(flavor = "multi_thread")]
async fn preparing_the_database_can_be_repeated_while_messages_flow() {
    let fixture = InboxFixture::new().await;
    let consumer = fixture.simple("", "").await;
    fixture
        .execute(
            "DO $$ DECLARE t text; BEGIN FOR t IN SELECT relname FROM pg_class WHERE relname \
        ~ '^inbox_.*_[0-9]{14}$' AND relkind = 'r' LOOP \
        EXECUTE 'DROP TABLE oncebox.' || t; END LOOP; END $$",
        )
        .await;
    let host = fixture.host(&consumer);
    let flowing = tokio::spawn(async move {
        let ids: Vec<_> = (0..200).map(|n| format!("m{n}")).collect();
        // Without a partition a claim fails; that is the host's trouble, and nothing is parked.
        deliver(&host, &records(ids.iter().map(String::as_str))).await.len()
    });
    let superuser = fixture.superuser_options();
    let preparing = (0..4).map(async |_| {
        (schema::migrate(&superuser).await, schema::ensure_partitions(&fixture.pool).await)
    });
    let mut made = 0;
    for (open, partitions) in join_all(preparing).await {
        assert_eq!(open.unwrap(), Vec::<String>::new());
        made += partitions.unwrap();
    }
    // S0-028.
    assert!(made >= 3, "{made} partitions for the present bucket and two ahead");
    assert_eq!(schema::ensure_partitions(&fixture.pool).await.unwrap(), 0);
    flowing.await.unwrap();
    assert_eq!(
        fixture.number("SELECT count(*) FROM oncebox.inbox WHERE status = 'completed'").await,
        200
    );
    fixture.finish().await;
}

/// What could go wrong: sessions plan their first claims over the partitions of classes that nobody
/// uses; or the first message of a class finds no partition, here or in a tenant's own database.
/// S3-016.
#[tokio::test(flavor = "multi_thread")]
async fn a_retention_class_has_partitions_once_a_consumer_has_it() {
    const COUNTS: &str = "SELECT ARRAY(SELECT count(i.inhrelid) FROM oncebox.retention_class r \
        LEFT JOIN pg_inherits i ON i.inhparent = ('oncebox.inbox_' || r.name)::regclass GROUP BY \
        r.retention_class ORDER BY r.retention_class)";
    let (fixture, database) = (InboxFixture::new().await, InboxFixture::another_database().await);
    let counts = async |pool: &sqlx::PgPool| {
        sqlx::query_scalar::<_, Vec<i64>>(COUNTS).fetch_one(pool).await.unwrap()
    };
    let (here, there) =
        (fixture.tenant("here", "").await, fixture.tenant_at("there", &database, "").await);
    let there_pool = fixture.control.tenant_databases().get(&there).unwrap().pool;
    assert_eq!(
        [counts(&fixture.pool).await, counts(&there_pool).await],
        [[3, 0, 0, 0], [3, 0, 0, 0]]
    );

    let (month, ever) = (
        fixture.consumer(&here, "month", "retention = '30d'").await,
        fixture.consumer(&there, "ever", "retention = 'permanent'").await,
    );
    // S3-016.
    assert_eq!(counts(&fixture.pool).await, [3, 3, 0, 3]);
    fixture.control.tenant_databases().replicate(&there).await.unwrap();
    assert_eq!(
        counts(&there_pool).await,
        [3, 0, 0, 3],
        "what consumers of other tenants have is not made there"
    );
    for consumer in [&month, &ever] {
        assert!(deliver(&fixture.host(consumer), &records(["a", "b"])).await.is_empty());
    }
    assert_eq!(fixture.effects(&month, "a").await, 1);

    // What time uses up is made again, of the classes in use alone.
    fixture
        .execute(
            "DO $$ DECLARE t text; BEGIN FOR t IN SELECT relname FROM pg_class WHERE relname ~ \
                '^inbox_(7d|1y|permanent)_[0-9]{14}$' \
        AND relkind = 'r' LOOP EXECUTE 'DROP TABLE oncebox.' || t; END LOOP; END $$",
        )
        .await;
    assert_eq!(schema::ensure_partitions(&fixture.pool).await.unwrap(), 3);
    assert_eq!(counts(&fixture.pool).await, [0, 3, 0, 3]);
    assert!(
        fixture
            .control
            .doctor()
            .run(HostLimits { connections_max: 32 })
            .await
            .unwrap()
            .iter()
            .all(|finding| finding.check != "partitions" || finding.severity == Severity::Ok)
    );
    fixture.finish().await;
}

/// What could go wrong: the plan of a claim is made while a partition is new and empty, and reads
/// all of it for every message once it has filled, until someone analyzes it. S0-020.
#[tokio::test(flavor = "multi_thread")]
async fn a_claim_touches_a_few_pages_however_full_a_new_partition_is() {
    let fixture = InboxFixture::new().await;
    let consumer = fixture.simple("", "").await;
    let mut guest = Guest::connect(&fixture, &consumer).await;
    let mut claim = async |ids: &[&str]| {
        guest.execute("BEGIN ISOLATION LEVEL READ COMMITTED READ WRITE").await.unwrap();
        let pages = guest.claim_and_count_pages(ids).await.unwrap();
        guest.execute("ROLLBACK").await.unwrap();
        pages
    };
    // More often than it takes until PostgreSQL keeps a plan.
    for _ in 0..8 {
        claim(&["a", "b", "c"]).await;
    }
    let empty = claim(&["a", "b", "c"]).await;
    fixture
        .execute(format!(
            "INSERT INTO oncebox.inbox (consumer_id, message_id, retention_class, bucket, topic, \
                partition, \"offset\", \
             record_timestamp_ms, status, processed_at) \
             SELECT {}, 'm' || n, 1, oncebox.bucket_at(1::smallint, now()), 't', 0, n, n, \
             'completed', now() FROM generate_series(1, 20000) n",
            consumer.row.consumer_id
        ))
        .await;
    // An automatic ANALYZE in between has the plan made again, which reads the catalog once.
    let mut full = i64::MAX;
    for _ in 0..3 {
        full = full.min(claim(&["a", "b", "m77"]).await);
    }
    // S0-020.
    assert!(full < empty + 60, "three messages cost {full} pages among 20,000, {empty} among none");
    fixture.execute("DELETE FROM oncebox.inbox").await;
    fixture.finish().await;
}

/// Pages that a page of a replay of a hundred messages reads, on a session that has its plan, and
/// how many messages it has.
async fn page_of_replay(
    connection: &mut PgConnection,
    consumer_id: i32,
    after: &str,
    more: &str,
) -> (u64, i64) {
    let call = format!(
        "oncebox.page_of_replay({consumer_id}, 1::smallint, {after}, '', now() + interval '1 day', \
            {more}, 100)"
    );
    let explain = format!("EXPLAIN (ANALYZE, BUFFERS, COSTS OFF, TIMING OFF) SELECT * FROM {call}");
    let mut pages = u64::MAX;
    // The first call makes the plan, and an automatic ANALYZE has it made again.
    for _ in 0..3 {
        let explain = sqlx::query_scalar(AssertSqlSafe(explain.clone()));
        let plan: Vec<String> = explain.fetch_all(&mut *connection).await.unwrap();
        assert!(plan[0].contains("Function Scan"), "{plan:?}");
        pages = pages.min(shared_pages(&plan));
    }
    let count = format!("SELECT coalesce(cardinality(ids), 0)::bigint FROM {call}");
    let count = sqlx::query_scalar(AssertSqlSafe(count)).fetch_one(connection).await.unwrap();
    (pages, count)
}

/// What could go wrong: a page of a replay reads, or sorts, all messages that completed, and the
/// more the fewer of them the filter leaves; or its plan is made while the inbox is empty, and is
/// kept.
#[tokio::test(flavor = "multi_thread")]
async fn a_page_of_a_replay_reads_as_many_rows_as_it_may_have() {
    let fixture = InboxFixture::new().await;
    let consumer = fixture.simple("", "").await;
    let of_us = consumer.row.consumer_id;
    let other = fixture.consumer(&consumer.tenant, "other", "").await;
    // Half of them completed when they came, the others a minute later.
    let rows = |consumer_id: i32, ids: &str, status: &str| {
        format!(
            "INSERT INTO oncebox.inbox (consumer_id, message_id, retention_class, bucket, topic, \
                partition, \"offset\", record_timestamp_ms, status, reason, attempts, \
                received_at, processed_at, event_type, headers) \
             SELECT {consumer_id}, '{ids}' || n, 1, oncebox.bucket_at(1::smallint, now()), 't', 0, \
             n, 0, '{status}', 'park', 1, now() - n * interval '1 second', \
             now() - n * interval '1 second' + n % 2 * interval '1 minute', \
             CASE n WHEN 29000 THEN 'rare' ELSE 't' END, ''::bytea FROM generate_series(1, 30000) n"
        )
    };
    let mut early = fixture.pool.acquire().await.unwrap();
    // All that there is; far behind; a type that none has on this page; ids.
    let asked = [
        ("'epoch'", "NULL, NULL", 1..=200),
        ("now() - interval '4 hours'", "NULL, NULL", 1..=200),
        ("now() - interval '2 hours'", "'rare', NULL", 0..=0),
        ("'epoch'", "NULL, '{completed1,completed2,parked1}'", 2..=2),
    ];
    for (after, more, _) in &asked {
        assert_eq!(page_of_replay(&mut early, of_us, after, more).await.1, 0);
    }
    fixture.execute(rows(of_us, "completed", "completed")).await;
    fixture.execute(rows(of_us, "parked", "parked")).await;
    fixture.execute(rows(other.row.consumer_id, "other", "completed")).await;
    for is_analyzed in [false, true] {
        if is_analyzed {
            fixture.execute("VACUUM ANALYZE").await;
        }
        let mut fresh = fixture.pool.acquire().await.unwrap();
        for connection in [&mut early, &mut fresh] {
            for (after, more, expected) in &asked {
                let (pages, count) = page_of_replay(connection, of_us, after, more).await;
                println!("{after} {more}: {pages} pages, {count} messages");
                assert!(expected.contains(&count), "{after} {more}: {count} messages");
                assert!(pages < 1_000, "{after} {more}: {pages} pages, analyzed: {is_analyzed}");
            }
        }
    }
    // It is the index that does it.
    fixture.execute("DROP INDEX oncebox.inbox_completed_late").await;
    let (pages, _) = page_of_replay(&mut early, of_us, "'epoch'", "NULL, NULL").await;
    assert!(pages > 1_000, "without the index it would read {pages} pages");
    drop(early);
    fixture.execute("DELETE FROM oncebox.inbox").await;
    fixture.finish().await;
}
