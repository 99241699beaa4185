//! The size of inboxes: by consumer, what it grows to, and who is told when it is too much.

use oncebox_control::{
    BudgetExcess, ConsumerStorage, Finding, HostLimits, Severity, StorageReport, TenantStorage,
};
use oncebox_tests::inbox::{InboxFixture, TestConsumer};
use serde_json::json;
use sqlx::{AssertSqlSafe, Executor, PgPool};

/// Puts completed messages into the present time partition of a class.
struct Messages<'a> {
    class: i16,
    /// Rows of (consumer, n), as SQL.
    rows: &'a str,
    /// Payload of `n`, as SQL.
    payload: &'a str,
    /// How long ago they were received.
    age: &'a str,
}

impl Messages<'_> {
    async fn insert(&self, pool: &PgPool) {
        let Self { class, rows, payload, age } = self;
        let insert = format!(
            "INSERT INTO oncebox.inbox (consumer_id, message_id, retention_class, bucket, topic, \
                partition, \"offset\", record_timestamp_ms, status, attempts, received_at, \
                processed_at, payload, headers, payload_hash) \
             SELECT r.consumer_id, 'm-{age}-' || lpad(r.n::text, 8, '0'), {class}, \
                oncebox.bucket_at({class}::smallint, now()), 't', 0, r.n, 1, 'completed', 1, \
                now() - interval '{age}', now(), {payload}, ''::bytea, sha256(r.n::text::bytea) \
             FROM ({rows}) r (consumer_id, n)"
        );
        pool.execute(sqlx::raw_sql(AssertSqlSafe(insert))).await.expect("messages");
    }
}

/// Rows of so many messages of one consumer.
fn of(consumer: &TestConsumer, count: i64) -> String {
    format!("SELECT {}, n FROM generate_series(1, {count}) n", consumer.row.consumer_id)
}

/// The report of the host's database, or of the one that a tenant named.
async fn report(fixture: &InboxFixture, tenant: Option<&str>) -> StorageReport {
    let databases = fixture.control.tenant_databases().all().await.unwrap();
    let found = databases.into_iter().find(|database| database.label.tenant.as_deref() == tenant);
    fixture.control.storage().report(&found.expect("the database")).await.unwrap()
}

fn tenant<'a>(report: &'a StorageReport, name: &str) -> &'a TenantStorage {
    let found = report.tenants.iter().find(|tenant| tenant.tenant == name);
    found.unwrap_or_else(|| panic!("`{name}` is not in {report:#?}"))
}

fn consumer<'a>(report: &'a StorageReport, of: &str, name: &str) -> &'a ConsumerStorage {
    let consumers = &tenant(report, of).consumers;
    let found = consumers.iter().find(|consumer| consumer.consumer == name);
    found.unwrap_or_else(|| panic!("`{of}/{name}` is not in {report:#?}"))
}

fn is_near(found: i64, exact: f64) -> bool {
    (found as f64 - exact).abs() <= 0.2 * exact
}

/// A read of all rows of a partition: by consumer its messages, and its bytes of the whole.
async fn exact(pool: &PgPool, partition: &str) -> Vec<(i32, i64, f64)> {
    let all = format!(
        "WITH of_consumer AS (SELECT i.consumer_id, count(*) AS messages, \
            sum(pg_column_size(i.*)) AS stored FROM oncebox.{partition} i GROUP BY 1) \
         SELECT consumer_id, messages, \
            (pg_table_size('oncebox.{partition}') * stored / sum(stored) OVER () \
            + pg_indexes_size('oncebox.{partition}') * messages / sum(messages) OVER ())::float8 \
         FROM of_consumer ORDER BY consumer_id"
    );
    sqlx::query_as(AssertSqlSafe(all)).fetch_all(pool).await.unwrap()
}

async fn present_partition(pool: &PgPool, class: &str) -> String {
    let name = format!(
        "SELECT DISTINCT tableoid::regclass::text FROM oncebox.inbox WHERE retention_class = \
            (SELECT retention_class FROM oncebox.retention_class WHERE name = '{class}')"
    );
    let name: String = sqlx::query_scalar(AssertSqlSafe(name)).fetch_one(pool).await.unwrap();
    name.trim_start_matches("oncebox.").to_owned()
}

/// What could go wrong: a consumer is told the bytes of another one, all consumers together more or
/// less than there are; large payloads, which stand outside of their rows, do not count; or the
/// figures need a read of the whole inbox.
#[tokio::test(flavor = "multi_thread")]
async fn each_consumer_has_its_share_of_the_inbox() {
    let fixture = InboxFixture::new().await;
    let acme = fixture.tenant("acme", "").await;
    let globex = fixture.tenant("globex", "").await;
    let small = fixture.consumer(&acme, "small", "").await;
    let wide = fixture.consumer(&acme, "wide", "").await;
    let files = fixture.consumer(&globex, "files", "").await;
    // Mixed in each page, as hosts write them.
    let rows = format!(
        "SELECT c.consumer_id, n FROM generate_series(1, 20000) n JOIN (VALUES ({}, 1), ({}, 1), \
            ({}, 50)) c (consumer_id, step) ON n % c.step = 0 ORDER BY n",
        small.row.consumer_id, wide.row.consumer_id, files.row.consumer_id
    );
    // Bytes that do not compress: none, 400, and 10,240, which are too many for a row.
    let payload = format!(
        "CASE r.consumer_id WHEN {} THEN (SELECT string_agg(sha256((r.n * 13 + s)::text::bytea), \
            ''::bytea) FROM generate_series(1, 13) s) \
         WHEN {} THEN (SELECT string_agg(sha256((r.n * 320 + s)::text::bytea), ''::bytea) \
            FROM generate_series(1, 320) s) END",
        wide.row.consumer_id, files.row.consumer_id
    );
    Messages { class: 1, rows: &rows, payload: &payload, age: "1 hour" }
        .insert(&fixture.pool)
        .await;
    let partition = present_partition(&fixture.pool, "7d").await;
    // Its size is to stay what it is.
    let still = "autovacuum_enabled = false, toast.autovacuum_enabled = false";
    fixture.execute(format!("ALTER TABLE oncebox.{partition} SET ({still})")).await;
    let pages = format!("SELECT pg_relation_size('oncebox.{partition}') / 8192");
    assert!(fixture.number(pages).await > 1_300, "it is too large to be read whole");

    let found = report(&fixture, None).await;
    let exact = exact(&fixture.pool, &partition).await;
    assert_eq!(exact.len(), 3);
    for (consumer_id, messages, bytes) in exact {
        let named = [(&small, "acme"), (&wide, "acme"), (&files, "globex")]
            .into_iter()
            .find(|(consumer, _)| consumer.row.consumer_id == consumer_id);
        let (of, tenant) = named.expect("a consumer of the test");
        let storage = consumer(&found, tenant, &of.row.name);
        // S3-012: estimated from a part of the pages.
        assert!(
            storage.is_sampled
                && is_near(storage.messages, messages as f64)
                && is_near(storage.bytes, bytes),
            "{storage:?}: {messages} messages of {bytes} bytes"
        );
        assert_eq!((storage.bytes_per_day, storage.growth_days), (storage.bytes, 1), "all of it");
    }
    // The sizes of partitions are exact, and consumers together have all of them.
    let size = format!("SELECT pg_total_relation_size('oncebox.{partition}')");
    let size = fixture.number(size).await;
    let listed = found.partitions.iter().find(|listed| listed.name == partition).unwrap();
    let sum: i64 = found.tenants.iter().map(|tenant| tenant.sum(|one| one.bytes)).sum();
    assert!(listed.bytes == size && (sum - size).abs() <= 3, "{sum} of {size}: {listed:?}");
    // Another measurement, by whatever host, reads the same pages.
    assert_eq!(report(&fixture, None).await.tenants[0].consumers, found.tenants[0].consumers);

    // A detach that has begun may hold the table locked at any moment.
    let pending = |is: bool| {
        format!(
            "UPDATE pg_inherits SET inhdetachpending = {is} WHERE inhrelid = \
                'oncebox.{partition}'::regclass"
        )
    };
    fixture.execute(pending(true)).await;
    let without = report(&fixture, None).await;
    fixture.execute(pending(false)).await;
    assert_eq!(tenant(&without, "acme").sum(|consumer| consumer.messages), 0);
    fixture.execute("DELETE FROM oncebox.inbox").await;
    fixture.finish().await;
}

/// What could go wrong: growth counts what came long ago, a class that ends is said to grow for
/// ever, one that does not to level off; an inbox without messages, a deleted consumer or a
/// tenant's own database is in the way.
#[tokio::test(flavor = "multi_thread")]
async fn growth_and_forecast_follow_from_what_came() {
    let fixture = InboxFixture::new().await;
    let acme = fixture.tenant("acme", "").await;
    let week = fixture.consumer(&acme, "week", "").await;
    let month = fixture.consumer(&acme, "month", "retention = '30d'").await;
    let ever = fixture.consumer(&acme, "ever", "retention = 'permanent'").await;
    fixture.consumer(&acme, "idle", "").await;
    // Rows of one class are equally large, so that the figures can be found by hand.
    let put = async |class, rows: &str, age| {
        Messages { class, rows, payload: "NULL::bytea", age }.insert(&fixture.pool).await;
    };
    put(1, &of(&week, 60), "1 hour").await;
    put(1, &of(&week, 40), "2 days").await;
    put(4, &of(&ever, 10), "3 hours").await;
    put(4, &of(&ever, 10), "50 days").await;
    // Of as many messages nobody knows the consumer any more.
    put(2, &of(&month, 20), "5 days").await;
    put(2, "SELECT 999999, n FROM generate_series(1, 20) n", "5 days").await;

    let found = report(&fixture, None).await;
    let size = async |class: &str| {
        let partition = present_partition(&fixture.pool, class).await;
        fixture.number(format!("SELECT pg_total_relation_size('oncebox.{partition}')")).await as f64
    };
    let expect = |name: &str, messages: i64, figures: [f64; 4], levels_off: Option<f64>| {
        let storage = consumer(&found, "acme", name);
        let in_days = [storage.bytes_in_30_days, storage.bytes_in_365_days];
        let all = [storage.bytes, storage.bytes_per_day, in_days[0], in_days[1]];
        let is_equal = |found: i64, by_hand: f64| (found as f64 - by_hand).abs() <= 1.0;
        // S3-012.
        assert!(
            storage.messages == messages
                && all.iter().zip(figures).all(|(found, by_hand)| is_equal(*found, by_hand))
                && storage.levels_off_at_bytes.is_some() == levels_off.is_some()
                && is_equal(storage.levels_off_at_bytes.unwrap_or(0), levels_off.unwrap_or(0.0)),
            "{storage:?}, and by hand {messages}, {figures:?}, {levels_off:?}"
        );
        assert!(!storage.is_sampled && storage.growth_days == 1, "{storage:?}");
    };
    // 60 of 100 came within a day: 9 1/3 days of that is what there is at most.
    let bytes = size("7d").await;
    let level = 0.6 * bytes * (7.0 + 56.0 / 24.0);
    expect("week", 100, [bytes, 0.6 * bytes, level, level], Some(level));
    expect("idle", 0, [0.0; 4], Some(0.0));
    let bytes = size("permanent").await;
    expect("ever", 20, [bytes, 0.5 * bytes, 16.0 * bytes, 183.5 * bytes], None);
    // Nothing comes any more: after 30 of 40 days a quarter is left.
    let bytes = size("30d").await / 2.0;
    expect("month", 20, [bytes, 0.0, 0.25 * bytes, 0.0], Some(0.0));
    assert_eq!(tenant(&found, "acme").consumers.len(), 4, "{found:#?}");

    // A tenant's own database has an inbox of its own.
    let database = InboxFixture::another_database().await;
    let apart = fixture.tenant_at("apart", &database, "").await;
    let own = fixture.consumer(&apart, "own", "").await;
    fixture.control.tenant_databases().replicate(&apart).await.unwrap();
    let there = fixture.control.tenant_databases().get(&apart).unwrap().pool;
    Messages { class: 1, rows: &of(&own, 7), payload: "NULL::bytea", age: "1 hour" }
        .insert(&there)
        .await;
    let here = report(&fixture, None).await;
    assert!(here.tenants.iter().all(|tenant| tenant.tenant != "apart"), "{here:#?}");
    let its = report(&fixture, Some("apart")).await;
    assert_eq!((its.label.tenant.as_deref(), its.tenants.len()), (Some("apart"), 1));
    assert_eq!(consumer(&its, "apart", "own").messages, 7);
    there.execute("DELETE FROM oncebox.inbox").await.unwrap();
    fixture.execute("DELETE FROM oncebox.inbox").await;
    fixture.finish().await;
}

/// What could go wrong: nobody hears that an inbox is above its budget, or only when it is too
/// late; or somebody hears it who has room, or no budget.
#[tokio::test(flavor = "multi_thread")]
async fn an_operator_hears_of_an_inbox_above_its_budget() {
    let fixture = InboxFixture::new().await;
    let orders = fixture.simple("", "retention = 'permanent'").await;
    fixture.tenant("globex", "").await;
    let rows = of(&orders, 50);
    Messages { class: 4, rows: &rows, payload: "NULL::bytea", age: "1 hour" }
        .insert(&fixture.pool)
        .await;
    let found = report(&fixture, None).await;
    let storage = tenant(&found, "acme");
    let bytes = storage.sum(|consumer| consumer.bytes) as u64;
    let warned = async || -> Vec<Finding> {
        let limits = HostLimits { connections_max: 1 };
        let findings = fixture.control.doctor().run(limits).await.unwrap();
        findings.into_iter().filter(|finding| finding.check == "storage_budgets").collect()
    };
    for (budget, excess, says) in [
        (None, None, "is within"),
        (Some(bytes - 1), Some(BudgetExcess::Now), "more than its budget"),
        (Some(bytes), Some(BudgetExcess::In30Days), "in 30 days"),
        (Some(31 * bytes - 1), Some(BudgetExcess::In30Days), "in 30 days"),
        (Some(31 * bytes + 1), None, "is within"),
    ] {
        assert_eq!(storage.excess(budget), excess, "{budget:?}");
        let change = json!({ "storage_budget_bytes": budget });
        let change = change.as_object().unwrap();
        fixture.control.tenants().set_limits("acme", change).await.unwrap();
        let findings = warned().await;
        let severity = if excess.is_some() { Severity::Warning } else { Severity::Ok };
        // S3-012.
        assert!(
            matches!(&findings[..], [one] if one.severity == severity && one.found.contains(says)),
            "{budget:?}: {findings:#?}"
        );
    }
    fixture.execute("DELETE FROM oncebox.inbox").await;
    fixture.finish().await;
}
