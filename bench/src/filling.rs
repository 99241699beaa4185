//! Histories of the inbox, made by SQL: time partitions as a host makes them, full of messages that
//! settled long ago.

use std::{ops::Range, time::Instant};

use anyhow::{Context, Result, ensure};
use oncebox_devkit::output::number;
use oncebox_model::policy::Retention;
use sqlx::{AssertSqlSafe, Executor, PgConnection};

use crate::servers::{Database, Servers};

/// Bytes that a message of a history takes with its index entries, about.
const ROW_BYTES: u64 = 400;
/// Factor from the size of the history to the room that is asked for: the write-ahead log and sorts
/// need room too.
const ROOM_FACTOR: f64 = 1.5;
/// Messages of one statement.
const BATCH: i64 = 500_000;
/// One message in so many is parked: about 0.1 %.
const PARKED_EVERY: i64 = 997;
/// Topic of the messages of histories; nobody reads it.
pub const TOPIC: &str = "orders-past";

/// A time partition of the inbox, of the retention class that consumers have by default.
#[derive(Debug, Clone, PartialEq, Eq, sqlx::FromRow)]
pub struct Period {
    /// Name of its table.
    pub name: String,
    /// Name of the table of the class.
    parent: String,
    /// Begin of its time.
    from_at: String,
    /// End of its time, exclusive.
    to_at: String,
}

impl Period {
    /// Returns the period a number of buckets before the present one, with the name and the bounds
    /// that a host gives.
    pub async fn back(connection: &mut PgConnection, buckets: i32) -> Result<Self> {
        const PERIOD: &str = "SELECT 'inbox_' || r.name AS parent, 'inbox_' || r.name || \
                to_char(b.from_at AT TIME ZONE 'UTC', '_YYYYMMDDHH24MISS') AS name, \
                b.from_at::text AS from_at, (b.from_at + r.bucket)::text AS to_at \
            FROM oncebox.retention_class r, LATERAL (SELECT date_bin(r.bucket, now(), \
                '2000-01-03 00:00:00+00') - $1::int * r.bucket AS from_at) b \
            WHERE r.retention_class = $2";
        let query = sqlx::query_as(PERIOD).bind(buckets).bind(Retention::default().class());
        Ok(query.fetch_one(connection).await?)
    }

    /// Makes the table, where it is missing. It is no part of the inbox yet, and has no index, so
    /// that it fills quickly.
    pub async fn make(&self, connection: &mut PgConnection) -> Result<()> {
        let name = &self.name;
        let make = format!(
            "CREATE TABLE IF NOT EXISTS oncebox.{name} (LIKE oncebox.inbox INCLUDING DEFAULTS \
                INCLUDING CONSTRAINTS); \
             DO $$ BEGIN EXECUTE format('ALTER TABLE oncebox.{name} OWNER TO %I', \
                (SELECT pg_get_userbyid(relowner) FROM pg_class \
                 WHERE oid = 'oncebox.inbox'::regclass)); END $$"
        );
        execute(connection, make).await
    }

    /// Makes the table a part of the inbox, where it is none. Its messages get their index entries.
    pub async fn attach(&self, connection: &mut PgConnection) -> Result<()> {
        let Self { name, parent, from_at, to_at } = self;
        let attach = format!(
            "DO $$ BEGIN IF NOT EXISTS (SELECT FROM pg_inherits \
                WHERE inhrelid = 'oncebox.{name}'::regclass) THEN \
             ALTER TABLE oncebox.{parent} ATTACH PARTITION oncebox.{name} FOR VALUES FROM \
                ('{from_at}') TO ('{to_at}'); END IF; END $$"
        );
        execute(connection, attach).await
    }

    /// Fills the period with the messages of some numbers, spread over the consumers and over the
    /// period's time until now. No autovacuum begins meanwhile.
    pub async fn fill(
        &self,
        connection: &mut PgConnection,
        numbers: Range<i64>,
        consumers: &[i32],
        progress: &mut Progress,
    ) -> Result<()> {
        let (name, statement) = (&self.name, self.statement());
        let autovacuum = format!("ALTER TABLE oncebox.{name} SET (autovacuum_enabled = false)");
        execute(connection, autovacuum).await?;
        let mut first = numbers.start;
        while first < numbers.end {
            let end = numbers.end.min(first + BATCH);
            let query = sqlx::query(AssertSqlSafe(statement.as_str()));
            query
                .bind(first)
                .bind(end)
                .bind(consumers)
                .execute(&mut *connection)
                .await
                .with_context(|| format!("failed to fill `{name}`"))?;
            progress.add(end - first);
            first = end;
        }
        Ok(())
    }

    /// Brings the period's statistics, visibility map and hints up to date, as autovacuum has done
    /// with every period of this size before long. Then autovacuum has nothing left to do with it.
    pub async fn settle(&self, connection: &mut PgConnection) -> Result<()> {
        let name = &self.name;
        execute(connection, format!("VACUUM (ANALYZE) oncebox.{name}")).await?;
        execute(connection, format!("ALTER TABLE oncebox.{name} RESET (autovacuum_enabled)")).await
    }

    /// Returns the statement that inserts the messages with numbers from $1 up to $2, of the
    /// consumers $3. It sorts them by their keys: ids are in random order, and each would touch
    /// another page of the index.
    fn statement(&self) -> String {
        let Self { name, from_at, to_at, .. } = self;
        let class = Retention::default().class();
        format!(
            "INSERT INTO oncebox.{name} (consumer_id, message_id, retention_class, bucket, topic, \
                partition, \"offset\", record_timestamp_ms, source, event_type, status, reason, \
                attempts, version_id, payload, headers, payload_hash, received_at, processed_at) \
             SELECT r.consumer_id, r.message_id, {class}, b.from_at, '{TOPIC}', (r.n % 4)::int, \
                r.n, (extract(epoch FROM r.at) * 1000)::bigint, '{TOPIC}', 'order.placed', \
                CASE WHEN r.is_parked THEN 'parked' ELSE 'completed' END, \
                CASE WHEN r.is_parked THEN 'no_route' END, (NOT r.is_parked)::int, \
                CASE WHEN NOT r.is_parked THEN 1 END, \
                CASE WHEN r.is_parked THEN convert_to(r.payload, 'UTF8') END, \
                CASE WHEN r.is_parked THEN ''::bytea END, \
                sha256(convert_to(r.payload, 'UTF8')), r.at - interval '20 milliseconds', r.at \
             FROM (SELECT '{from_at}'::timestamptz AS from_at, \
                least('{to_at}'::timestamptz, now()) AS to_at) b \
             CROSS JOIN LATERAL (SELECT n, \
                ($3::int[])[(1 + n % cardinality($3::int[]))::int] AS consumer_id, \
                md5('history ' || n)::uuid::text AS message_id, \
                n % {PARKED_EVERY} = 0 AS is_parked, \
                b.from_at + (b.to_at - b.from_at) * ((n - $1)::float8 / ($2 - $1)) AS at, \
                '{{\"order_id\":\"o-' || n || '\",\"account\":' || (n % 100000) || \
                ',\"amount\":250,\"note\":\"' || repeat('x', 140) || '\"}}' AS payload \
                FROM generate_series($1::bigint, $2::bigint - 1) AS n) r \
             ORDER BY r.consumer_id, r.message_id"
        )
    }
}

/// The progress of a history, on stderr.
pub struct Progress {
    what: String,
    rows: i64,
    done: i64,
    begun: Instant,
}

impl Progress {
    /// Begins with no row of `rows`.
    pub fn new(what: impl Into<String>, rows: i64) -> Self {
        Self { what: what.into(), rows, done: 0, begun: Instant::now() }
    }

    fn add(&mut self, rows: i64) {
        self.done += rows;
        let seconds = self.begun.elapsed().as_secs_f64();
        eprintln!(
            "{}: {} of {} rows are made, {seconds:.0} s",
            self.what,
            number(self.done),
            number(self.rows)
        );
    }
}

/// Refuses a history for which the disk has not enough room. `option` is the option that asks for
/// fewer rows.
pub async fn check_room(servers: &Servers, rows: u64, option: &str) -> Result<()> {
    let (dir, free) = servers.room().await?;
    let wanted = (rows * ROW_BYTES) as f64 * ROOM_FACTOR;
    ensure!(
        free as f64 >= wanted,
        "{} rows of history need about {:.1} GB, and `{dir}` has {:.1} GB left; make room there, \
            or ask for fewer rows with `{option}`",
        number(rows as i64),
        wanted / 1e9,
        free as f64 / 1e9
    );
    Ok(())
}

/// Opens a connection to fill periods with. A crash of the server may lose what it commits, and the
/// server writes no images of pages into its log, until [`end`].
pub async fn begin(servers: &Servers, database: &Database) -> Result<PgConnection> {
    servers.set("full_page_writes", Some("off")).await?;
    let mut connection = database.connect().await?;
    let settings = "SET synchronous_commit = off; SET work_mem = '256MB'; \
        SET maintenance_work_mem = '512MB'";
    execute(&mut connection, settings.to_owned()).await?;
    Ok(connection)
}

/// Ends the filling: the server is as durable as before, and everything is on the disk.
pub async fn end(servers: &Servers, database: &Database) -> Result<()> {
    servers.set("full_page_writes", None).await?;
    database.execute("CHECKPOINT").await
}

async fn execute(connection: &mut PgConnection, sql: String) -> Result<()> {
    connection
        .execute(sqlx::raw_sql(AssertSqlSafe(sql.clone())))
        .await
        .with_context(|| format!("failed: `{sql}`"))?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use oncebox_tests::inbox::InboxFixture;

    use super::*;

    // What could go wrong: a host does not take the periods for its own, or the rows are not those
    // of a message that settled.
    #[tokio::test(flavor = "multi_thread")]
    async fn a_history_is_what_a_host_would_have_left() {
        let fixture = InboxFixture::new().await;
        let consumer = fixture.simple("", "").await;
        let other = fixture.consumer(&consumer.tenant, "others", "").await;
        let consumers = [consumer.row.consumer_id, other.row.consumer_id];
        let mut connection = fixture.superuser().await;
        let mut progress = Progress::new("test", 1_000);
        // The present period, and one that is due; the second is attached when it is full.
        let present = Period::back(&mut connection, 0).await.expect("the present period");
        let old = Period::back(&mut connection, 5).await.expect("an old period");
        for period in [&present, &old] {
            period.make(&mut connection).await.expect("a table");
        }
        present.attach(&mut connection).await.expect("the period is attached already");
        for (period, numbers) in [(&present, 0..500), (&old, 500..1_000)] {
            let filled = period.fill(&mut connection, numbers, &consumers, &mut progress).await;
            filled.expect("a full period");
        }
        old.attach(&mut connection).await.expect("a part of the inbox");
        for period in [&present, &old] {
            period.settle(&mut connection).await.expect("a settled period");
        }

        let count = |condition: &str| {
            fixture.number(format!("SELECT count(*) FROM oncebox.inbox WHERE {condition}"))
        };
        assert_eq!(count("true").await, 1_000);
        assert_eq!(
            fixture.number("SELECT count(DISTINCT message_id) FROM oncebox.inbox").await,
            1_000
        );
        assert_eq!(count(&format!("consumer_id = {}", consumers[0])).await, 500);
        assert_eq!(count("status = 'parked'").await, 2, "0 and 997");
        assert_eq!(count("processed_at > now() OR received_at > processed_at").await, 0);
        let old_rows = format!("SELECT count(*) FROM oncebox.{}", old.name);
        assert_eq!(fixture.number(old_rows).await, 500);

        let retention = fixture.control.retention();
        let database = fixture.control.tenant_databases().all().await.expect("databases").remove(0);
        let report = retention.report(&database).await.expect("a report");
        let state = |period: &Period| {
            let found = report.partitions.iter().find(|partition| partition.name == period.name);
            found.map(|partition| (partition.is_ours, partition.is_due, partition.messages))
        };
        assert_eq!(state(&present), Some((true, false, Some(500))));
        assert_eq!(state(&old), Some((true, true, Some(500))));
        let run = retention.run(&database).await.expect("a run");
        assert!(run.failed.is_empty(), "{run:?}");
        let removed: Vec<_> =
            run.removed.iter().map(|it| (&it.partition_name, it.removed, it.moved)).collect();
        assert_eq!(removed, [(&old.name, Some(499), 1)], "a parked message stays");
        assert_eq!(count("true").await, 501);
        // No message of a history had an effect.
        fixture.execute("DELETE FROM oncebox.inbox").await;
        fixture.finish().await;
    }
}
