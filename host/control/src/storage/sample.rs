//! The sample of a time partition: some of its pages, read whole, and the share of each consumer.

use chrono::{DateTime, Utc};
use oncebox_model::{MessageStatus, error::InboxError};
use sqlx::{AssertSqlSafe, PgConnection};

use super::forecast::{GrowthWindow, SampledSpan};
use crate::retention::partitions::TimePartition;

/// Most pages of a partition that are read, about: each page is drawn by itself.
const PAGES_MAX: f64 = 1_000.0;

/// Columns of variable length. `pg_column_size` of a column reads its length as it is stored: it
/// fetches nothing that stands outside of the row, and decompresses nothing.
const COLUMNS: [&str; 17] = [
    "message_id",
    "topic",
    "key",
    "ordering_key",
    "source",
    "event_type",
    "event_version",
    "content_type",
    "trace_parent",
    "status",
    "reason",
    "last_error",
    "locked_by",
    "result",
    "payload",
    "headers",
    "payload_hash",
];

/// Bytes of a row beside those columns, about: its header, and its columns of fixed length.
const ROW_BYTES: i64 = 120;

/// A sample of a time partition.
#[derive(Debug)]
pub(super) struct PartitionSample {
    /// Number of the retention class.
    pub(super) retention_class: i16,
    from_at: DateTime<Utc>,
    to_at: DateTime<Utc>,
    /// Pages of the partition.
    pages: f64,
    /// Probability with which each was read; 1 for all.
    fraction: f64,
    /// Size of the table with what stands outside of its rows, bytes.
    table_bytes: f64,
    /// Size of its indexes, bytes.
    index_bytes: f64,
    rows: Vec<SampledRows>,
}

/// Rows of a sample that belong to one consumer, have one status and were received within one
/// growth window, and in no shorter one.
#[derive(Debug, sqlx::FromRow)]
struct SampledRows {
    consumer_id: i32,
    status: MessageStatus,
    /// Position of the window; the number of windows for what was received before all of them.
    growth_window: i32,
    messages: i64,
    bytes: i64,
}

/// What such rows stand for in the partition.
#[derive(Debug, PartialEq)]
pub(super) struct ConsumerShare {
    pub(super) consumer_id: i32,
    pub(super) status: MessageStatus,
    pub(super) window: usize,
    pub(super) messages: f64,
    pub(super) bytes: f64,
}

/// Sizes of a partition.
#[derive(Debug, sqlx::FromRow)]
struct PartitionSize {
    pages: i64,
    table_bytes: i64,
    index_bytes: i64,
}

/// Reads a sample of a partition. Returns none where its table is gone.
pub(super) async fn take(
    connection: &mut PgConnection,
    partition: &TimePartition,
) -> Result<Option<PartitionSample>, InboxError> {
    const SIZE: &str = "SELECT coalesce(pg_relation_size(c.oid), 0) / \
                current_setting('block_size')::bigint AS pages, \
            coalesce(pg_table_size(c.oid), 0) AS table_bytes, \
            coalesce(pg_indexes_size(c.oid), 0) AS index_bytes \
        FROM pg_class c WHERE c.oid = to_regclass($1)";
    let table = format!("oncebox.\"{}\"", partition.name.replace('"', "\"\""));
    let query = sqlx::query_as(SIZE).bind(&table);
    let Some(size): Option<PartitionSize> = query.fetch_optional(&mut *connection).await? else {
        return Ok(None);
    };
    let pages = size.pages as f64;
    let fraction = if pages > PAGES_MAX { PAGES_MAX / pages } else { 1.0 };
    let rows = if size.pages > 0 {
        sqlx::query_as(AssertSqlSafe(statement(&table, fraction))).fetch_all(connection).await?
    } else {
        Vec::new()
    };
    Ok(Some(PartitionSample {
        retention_class: partition.retention_class,
        from_at: partition.from_at,
        to_at: partition.to_at,
        pages,
        fraction,
        table_bytes: size.table_bytes as f64,
        index_bytes: size.index_bytes as f64,
        rows,
    }))
}

/// Returns the statement that reads a sample. The seed is always the same: so two hosts read the
/// same pages, and a figure that changes from one hour to the next does so because of the inbox.
fn statement(table: &str, fraction: f64) -> String {
    let columns = COLUMNS.map(|column| format!("coalesce(pg_column_size(i.{column}), 0)"));
    let windows = GrowthWindow::ALL.map(|window| {
        let (days, index) = (window.days(), window.index());
        format!("WHEN i.received_at > now() - interval '{days} days' THEN {index}")
    });
    format!(
        "SELECT i.consumer_id, i.status, CASE {windows} ELSE {beyond} END AS growth_window, \
            count(*) AS messages, sum({ROW_BYTES}::bigint + {columns})::bigint AS bytes \
         FROM {table} i TABLESAMPLE SYSTEM ({percent}) REPEATABLE (0) GROUP BY 1, 2, 3",
        windows = windows.join(" "),
        beyond = GrowthWindow::ALL.len(),
        columns = columns.join(" + "),
        percent = 100.0 * fraction,
    )
}

impl PartitionSample {
    /// Returns what the sampled rows stand for. A table's bytes belong to consumers by the stored
    /// sizes of their rows, those of its indexes by the number of their rows.
    pub(super) fn shares(&self) -> impl Iterator<Item = ConsumerShare> {
        let messages: i64 = self.rows.iter().map(|rows| rows.messages).sum();
        let bytes: i64 = self.rows.iter().map(|rows| rows.bytes).sum();
        let (of_message, of_byte) =
            (self.index_bytes / messages.max(1) as f64, self.table_bytes / bytes.max(1) as f64);
        self.rows.iter().map(move |rows| ConsumerShare {
            consumer_id: rows.consumer_id,
            status: rows.status,
            window: usize::try_from(rows.growth_window).unwrap_or(0),
            messages: rows.messages as f64 / self.fraction,
            bytes: rows.messages as f64 * of_message + rows.bytes as f64 * of_byte,
        })
    }

    /// Returns the time that the sample covers, as ages.
    pub(super) fn span(&self, now: DateTime<Utc>) -> SampledSpan {
        let age_days = |at: DateTime<Utc>| (now - at).num_seconds() as f64 / 86_400.0;
        SampledSpan {
            from_days: age_days(self.from_at),
            to_days: age_days(self.to_at).max(0.0),
            pages: self.pages * self.fraction,
            is_whole: self.fraction >= 1.0,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample(rows: Vec<SampledRows>, fraction: f64) -> PartitionSample {
        let at = DateTime::UNIX_EPOCH;
        PartitionSample {
            retention_class: 1,
            from_at: at,
            to_at: at,
            pages: 10.0,
            fraction,
            table_bytes: 9_000.0,
            index_bytes: 1_000.0,
            rows,
        }
    }

    fn rows(consumer_id: i32, growth_window: i32, messages: i64, bytes: i64) -> SampledRows {
        let status = MessageStatus::Completed;
        SampledRows { consumer_id, status, growth_window, messages, bytes }
    }

    // What could go wrong: consumers together have more or less than the partition, or one with
    // few large messages has the bytes of one with many small ones.
    #[test]
    fn consumers_share_the_whole_partition() {
        let sample =
            sample(vec![rows(1, 0, 30, 1_000), rows(1, 3, 10, 1_000), rows(2, 0, 10, 7_000)], 0.5);
        let shares: Vec<_> = sample.shares().collect();
        let share = |consumer_id, window, messages, bytes| ConsumerShare {
            consumer_id,
            status: MessageStatus::Completed,
            window,
            messages,
            bytes,
        };
        let expected =
            [share(1, 0, 60.0, 1_600.0), share(1, 3, 20.0, 1_200.0), share(2, 0, 20.0, 7_200.0)];
        assert_eq!(shares, expected);
        assert_eq!(shares.iter().map(|share| share.bytes).sum::<f64>(), 10_000.0);
    }

    #[test]
    fn a_partition_without_rows_has_no_shares() {
        assert_eq!(sample(Vec::new(), 1.0).shares().count(), 0);
    }

    // What could go wrong: a small part of a large table is written in a way that SQL reads as
    // something else.
    #[test]
    fn the_statement_draws_pages_by_their_percentage() {
        let text = statement("oncebox.\"inbox_7d_1\"", 1.0 / 1_048_576.0);
        assert!(text.contains("SYSTEM (0.000095367431640625) REPEATABLE (0)"), "{text}");
        assert!(statement("t", 1.0).contains("SYSTEM (100) "), "{text}");
        assert!(text.contains("interval '30 days' THEN 2 ELSE 3 END"), "{text}");
        assert!(COLUMNS.iter().all(|column| text.contains(&format!("(i.{column})"))), "{text}");
    }
}
