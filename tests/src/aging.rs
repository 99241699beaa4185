//! Messages as old as a test needs them: in the partition, and with the times, that they would have
//! had the days passed.

use sqlx::{AssertSqlSafe, Executor, PgPool};

/// Makes the partition of the class `7d` for the time so many days ago, as a host would have made
/// it then. Returns its name.
pub async fn old_partition(database: &PgPool, days: i64) -> String {
    let (name, make) = making(database, days).await;
    execute(database, make).await;
    name
}

/// Returns the name of that partition, and the statement that makes it; nothing where it is there.
async fn making(database: &PgPool, days: i64) -> (String, String) {
    let (name, from, to): (String, String, String) = sqlx::query_as(
        "SELECT 'inbox_7d' || to_char(b.at AT TIME ZONE 'UTC', '_YYYYMMDDHH24MISS'), b.at::text, \
            (b.at + b.bucket)::text FROM (SELECT oncebox.bucket_at(1::smallint, now() - $1 * \
            interval '1 day') AS at, bucket FROM oncebox.retention_class WHERE retention_class = \
            1) b",
    )
    .bind(days)
    .fetch_one(database)
    .await
    .expect("a bucket");
    let is_there: bool = sqlx::query_scalar("SELECT to_regclass('oncebox.' || $1) IS NOT NULL")
        .bind(&name)
        .fetch_one(database)
        .await
        .expect("an answer");
    let make = format!(
        "CREATE TABLE oncebox.{name} PARTITION OF oncebox.inbox_7d FOR VALUES FROM ('{from}') TO \
            ('{to}'); DO $$ BEGIN EXECUTE format('ALTER TABLE oncebox.{name} OWNER TO %I', (SELECT \
            pg_get_userbyid(relowner) FROM pg_class WHERE oid = 'oncebox.inbox'::regclass)); END \
            $$;"
    );
    (name, if is_there { String::new() } else { make })
}

/// Puts the messages of a condition so many days back, with their history and their edits. Returns
/// the name of their partition.
pub async fn age(database: &PgPool, which: &str, days: i64) -> String {
    // In one transaction: an empty partition of that time is due at once.
    let (name, make) = making(database, days).await;
    let back = format!("interval '{days} days'");
    execute(
        database,
        format!(
            "{make} UPDATE oncebox.inbox_history h SET at = at - {back} FROM oncebox.inbox i WHERE \
                i.consumer_id = h.consumer_id AND i.message_id = h.message_id AND ({which}); \
             UPDATE oncebox.inbox_edit h SET at = at - {back} FROM oncebox.inbox i WHERE \
                i.consumer_id = h.consumer_id AND i.message_id = h.message_id AND ({which}); \
             UPDATE oncebox.inbox i SET bucket = oncebox.bucket_at(1::smallint, now() - {back}), \
                received_at = received_at - {back}, processed_at = processed_at - {back} WHERE \
                ({which})",
            which = which.replace("message_id", "i.message_id")
        ),
    )
    .await;
    name
}

/// Lets days pass: everything that the database remembers is so much older. Messages of the class
/// `7d` go to the partitions of their time.
pub async fn pass(database: &PgPool, days: i64) {
    let buckets: Vec<i64> = sqlx::query_scalar(
        "SELECT DISTINCT (extract(epoch FROM now() - bucket) / 86400)::bigint FROM oncebox.inbox",
    )
    .fetch_all(database)
    .await
    .expect("buckets");
    // A bucket has two and a third days: the messages of one may come into two.
    for old in buckets {
        for more in -3..=3 {
            old_partition(database, (old + days + more).max(0)).await;
        }
    }
    let back = format!("interval '{days} days'");
    let ms = days * 86_400_000;
    let statement = format!(
        "UPDATE oncebox.inbox_history SET at = at - {back}; \
         UPDATE oncebox.inbox_edit SET at = at - {back}; \
         UPDATE oncebox.forgotten SET record_timestamp_ms = record_timestamp_ms - {ms}; \
         UPDATE oncebox.inbox SET received_at = received_at - {back}, processed_at = processed_at - \
            {back}, record_timestamp_ms = record_timestamp_ms - {ms}, \
            bucket = oncebox.bucket_at(1::smallint, greatest(processed_at, bucket) - {back})"
    );
    execute(database, statement).await;
}

async fn execute(database: &PgPool, sql: String) {
    database
        .execute(sqlx::raw_sql(AssertSqlSafe(sql.clone())))
        .await
        .unwrap_or_else(|error| panic!("`{sql}`: {error}"));
}
