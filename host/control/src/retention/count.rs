//! The count of what a time partition holds when it goes, for `oncebox.forgotten`.
//!
//! The table is read in slices with pauses between them: read at once, a partition of some million
//! messages would take a processor for half a minute. All slices see one snapshot. Otherwise a
//! message that changes in between could be read twice, or not at all, and with it the highest
//! offset. The price is that PostgreSQL vacuums nothing that died after the snapshot until then.

use std::collections::HashMap;

use oncebox_model::error::InboxError;
use sqlx::{AssertSqlSafe, Connection, Executor, PgConnection};
use tokio::time::Instant;

use super::pauses::Pauses;

/// Pages of a slice: 2 MiB.
const SLICE: i64 = 256;

/// A partition of a topic, of one consumer.
type Source = (i32, String, i32);

/// What the time partition holds of a partition of a topic.
#[derive(Debug, Clone, Copy, PartialEq, Eq, sqlx::FromRow)]
struct Tally {
    /// Highest offset.
    offset: i64,
    /// Latest timestamp of a record, milliseconds.
    record_timestamp_ms: i64,
    /// Messages, whatever their status.
    messages: i64,
    completed: i64,
    skipped: i64,
    discarded: i64,
}

impl Tally {
    /// Returns what two slices hold together.
    fn with(self, other: Self) -> Self {
        Self {
            offset: self.offset.max(other.offset),
            record_timestamp_ms: self.record_timestamp_ms.max(other.record_timestamp_ms),
            messages: self.messages + other.messages,
            completed: self.completed + other.completed,
            skipped: self.skipped + other.skipped,
            discarded: self.discarded + other.discarded,
        }
    }
}

/// What a slice holds of a partition of a topic.
#[derive(sqlx::FromRow)]
struct SliceTally {
    consumer_id: i32,
    topic: String,
    partition: i32,
    #[sqlx(flatten)]
    tally: Tally,
}

/// Adds what the partition holds to `oncebox.forgotten`. A partition that was attached again has
/// been counted before: its messages are not added a second time.
pub(super) async fn count(
    connection: &mut PgConnection,
    name: &str,
    pauses: &mut Pauses,
) -> Result<(), InboxError> {
    let tallies = read(connection, name, pauses).await?;
    write(connection, name, tallies).await
}

/// Reads the partition, slice by slice.
async fn read(
    connection: &mut PgConnection,
    name: &str,
    pauses: &mut Pauses,
) -> Result<HashMap<Source, Tally>, InboxError> {
    // The first statement takes the snapshot, so that no row of it is behind these pages.
    let pages = format!(
        "SELECT pg_relation_size('oncebox.{name}') / current_setting('block_size')::bigint"
    );
    let slice = format!(
        "SELECT i.consumer_id, i.topic, i.partition, max(i.\"offset\") AS \"offset\", \
            max(i.record_timestamp_ms) AS record_timestamp_ms, count(*) AS messages, \
            count(*) FILTER (WHERE i.status = 'completed') AS completed, \
            count(*) FILTER (WHERE i.status = 'skipped') AS skipped, \
            count(*) FILTER (WHERE i.status = 'discarded') AS discarded \
         FROM oncebox.{name} i WHERE i.ctid >= $1::text::tid AND i.ctid < $2::text::tid \
         GROUP BY 1, 2, 3"
    );
    let mut tx = connection.begin_with("BEGIN ISOLATION LEVEL REPEATABLE READ, READ ONLY").await?;
    tx.execute("SET LOCAL enable_seqscan = off; SET LOCAL jit = off").await?;
    let pages: i64 = sqlx::query_scalar(AssertSqlSafe(pages)).fetch_one(&mut *tx).await?;
    let mut tallies = HashMap::new();
    let mut page = 0;
    while page < pages {
        let began = Instant::now();
        let end = page + SLICE;
        let query = sqlx::query_as(AssertSqlSafe(slice.as_str()));
        let query = query.bind(format!("({page},0)")).bind(format!("({end},0)"));
        let found: Vec<SliceTally> = query.fetch_all(&mut *tx).await?;
        found.into_iter().for_each(|part| add(&mut tallies, part));
        if end < pages {
            pauses.after(began).await;
        }
        page = end;
    }
    tx.commit().await?;
    Ok(tallies)
}

fn add(tallies: &mut HashMap<Source, Tally>, part: SliceTally) {
    let SliceTally { consumer_id, topic, partition, tally } = part;
    let sum = tallies.entry((consumer_id, topic, partition));
    sum.and_modify(|sum| *sum = sum.with(tally)).or_insert(tally);
}

/// Writes the counts, unless a removal before this one did.
async fn write(
    connection: &mut PgConnection,
    name: &str,
    tallies: HashMap<Source, Tally>,
) -> Result<(), InboxError> {
    let write = format!(
        "WITH part AS (SELECT * FROM unnest($1::int[], $2::text[], $3::int[], $4::bigint[], \
            $5::bigint[], $6::bigint[], $7::bigint[], $8::bigint[], $9::bigint[]) \
            AS p(consumer_id, topic, partition, \"offset\", record_timestamp_ms, messages, \
                completed, skipped, discarded)), \
         counted AS (UPDATE oncebox.removal r SET state = 'counted', was_counted = true, \
            removed = (SELECT coalesce(sum(p.messages), 0) FROM part p), \
            bytes = pg_total_relation_size('oncebox.{name}') \
            FROM oncebox.removal o WHERE o.partition_name = r.partition_name \
              AND r.partition_name = '{name}' AND r.state = 'moving' \
            RETURNING (NOT o.was_counted)::int AS is_new) \
         INSERT INTO oncebox.forgotten AS f (consumer_id, topic, partition, \"offset\", \
            record_timestamp_ms, completed, skipped, discarded) \
         SELECT p.consumer_id, p.topic, p.partition, p.\"offset\", p.record_timestamp_ms, \
            p.completed * k.is_new, p.skipped * k.is_new, p.discarded * k.is_new \
         FROM counted k, part p JOIN oncebox.consumer c USING (consumer_id) \
         ON CONFLICT (consumer_id, topic, partition) DO UPDATE SET \
            \"offset\" = greatest(f.\"offset\", excluded.\"offset\"), \
            record_timestamp_ms = greatest(f.record_timestamp_ms, excluded.record_timestamp_ms), \
            completed = f.completed + excluded.completed, skipped = f.skipped + excluded.skipped, \
            discarded = f.discarded + excluded.discarded, forgotten_at = now()"
    );
    let (sources, tallies): (Vec<Source>, Vec<Tally>) = tallies.into_iter().unzip();
    let column = |of: fn(&Tally) -> i64| tallies.iter().map(of).collect::<Vec<i64>>();
    let query = sqlx::query(AssertSqlSafe(write));
    let query = query
        .bind(sources.iter().map(|source| source.0).collect::<Vec<i32>>())
        .bind(sources.iter().map(|source| source.1.as_str()).collect::<Vec<&str>>())
        .bind(sources.iter().map(|source| source.2).collect::<Vec<i32>>())
        .bind(column(|tally| tally.offset))
        .bind(column(|tally| tally.record_timestamp_ms))
        .bind(column(|tally| tally.messages))
        .bind(column(|tally| tally.completed))
        .bind(column(|tally| tally.skipped))
        .bind(column(|tally| tally.discarded));
    query.execute(connection).await?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn slice(consumer_id: i32, offset: i64, completed: i64) -> SliceTally {
        let tally = Tally {
            offset,
            record_timestamp_ms: 1_000 - offset,
            messages: completed + 1,
            completed,
            skipped: 1,
            discarded: 0,
        };
        SliceTally { consumer_id, topic: "t".to_owned(), partition: 0, tally }
    }

    // What could go wrong: a mark is that of the last slice, and not the highest.
    #[test]
    fn slices_add_up() {
        let mut tallies = HashMap::new();
        for part in [slice(1, 5, 2), slice(1, 3, 4), slice(2, 9, 1)] {
            add(&mut tallies, part);
        }
        let sum = Tally {
            offset: 5,
            record_timestamp_ms: 997,
            messages: 8,
            completed: 6,
            skipped: 2,
            discarded: 0,
        };
        assert_eq!(tallies[&(1, "t".to_owned(), 0)], sum);
        assert_eq!(tallies.len(), 2);
    }
}
