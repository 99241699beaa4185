//! Search for messages with two rows in the inbox. A key cannot span partitions, so only the locks
//! of the claim keep ids unique across buckets. PostgreSQL itself would not notice a duplicate.

use sqlx::Executor;

use super::{Finding, Look, Severity};

const CHECK: &str = "ids";

/// Maximum of rows that one check reads.
const ROWS_MAX: i64 = 1_000_000;

/// Maximum of messages that findings name.
const NAMED_MAX: usize = 10;

/// Settings of the check's transaction. It is given up after the statement timeout.
const SETTINGS: &str = "SET TRANSACTION READ ONLY; SET LOCAL statement_timeout = '30s'; SET LOCAL \
    enable_seqscan = off; \
    SET LOCAL enable_sort = off; SET LOCAL enable_bitmapscan = off; SET LOCAL jit = off";

/// Query for the number of rows of the inbox by the planner's statistics, and for its largest
/// partition with its pages.
const SIZE: &str = "SELECT coalesce(sum(greatest(c.reltuples, 0)), 0)::bigint, \
        (array_agg(c.oid::regclass::text ORDER BY c.reltuples DESC))[1], coalesce(max(c.relpages), \
        0) \
    FROM pg_partition_tree('oncebox.inbox') t JOIN pg_class c ON c.oid = t.relid WHERE t.isleaf";

/// Query for duplicates. It reads rows in the order of their key from a start position to the last
/// row of a consumer, by the partitions' indexes and without a sort. Each duplicate is listed with
/// its buckets.
const LOOK: &str = "WITH slice AS MATERIALIZED ( \
        SELECT i.consumer_id, i.message_id, i.status, i.bucket FROM oncebox.inbox i \
        WHERE (i.consumer_id, i.message_id) >= ($1, $2) AND i.consumer_id <= $5 \
        ORDER BY i.consumer_id, i.message_id LIMIT $3), \
    twice AS MATERIALIZED ( \
        SELECT s.consumer_id, s.message_id, string_agg(format('%s in the bucket of %s', s.status, \
        to_char(s.bucket AT TIME ZONE 'UTC', \
            'YYYY-MM-DD HH24:MI')), ', ' ORDER BY s.bucket) AS places \
        FROM slice s GROUP BY s.consumer_id, s.message_id HAVING count(*) > 1) \
    SELECT (SELECT count(*) FROM slice), (SELECT count(*) FROM twice), coalesce(array_agg(n.text), \
    '{}') FROM ( \
        SELECT format('message `%s` of `%s` stands twice in the inbox: %s', w.message_id, \
            coalesce(t.name || '/' || c.name, 'consumer ' || w.consumer_id), w.places) AS text \
        FROM twice w LEFT JOIN oncebox.consumer c USING (consumer_id) LEFT JOIN oncebox.tenant t \
        USING (tenant_id) \
        ORDER BY w.consumer_id, w.message_id LIMIT $4) n";

impl Look<'_> {
    /// Checks that no message has a row in two buckets, as far as a check of bounded cost can tell.
    pub(super) async fn ids_stand_once(&self) -> Vec<Finding> {
        match self.twice().await {
            Ok(findings) => findings,
            Err(error) => vec![self.unknown(CHECK, &error)],
        }
    }

    /// Checks that no message of a consumer has a row in two buckets. Where it has more rows than
    /// one check reads, and none of these is a duplicate, the result is not known.
    pub(super) async fn ids_of_consumer(&self, consumer_id: i32) -> Vec<Finding> {
        match self.twice_of_consumer(consumer_id).await {
            Ok(findings) => findings,
            Err(error) => vec![self.unknown(CHECK, &error)],
        }
    }

    async fn twice_of_consumer(&self, consumer_id: i32) -> Result<Vec<Finding>, sqlx::Error> {
        let mut tx = self.pool.begin().await?;
        tx.execute(sqlx::raw_sql(SETTINGS)).await?;
        let look = sqlx::query_as(LOOK)
            .bind(consumer_id)
            .bind("")
            .bind(ROWS_MAX)
            .bind(NAMED_MAX as i64)
            .bind(consumer_id);
        let (seen, twice, named): (i64, i64, Vec<String>) = look.fetch_one(&mut *tx).await?;
        tx.rollback().await?;
        if twice == 0 && seen >= ROWS_MAX {
            let found = format!("none of the first {seen} messages stands twice; there are more");
            return Ok(vec![self.finding(CHECK, Severity::Unknown, found)]);
        }
        Ok(self.told(seen, seen, twice, named))
    }

    async fn twice(&self) -> Result<Vec<Finding>, sqlx::Error> {
        let mut tx = self.pool.begin().await?;
        tx.execute(sqlx::raw_sql(SETTINGS)).await?;
        let (rows, largest, pages): (i64, Option<String>, i32) =
            sqlx::query_as(SIZE).fetch_one(&mut *tx).await?;
        let mut start = None;
        if let Some(largest) = largest.filter(|_| rows > ROWS_MAX) {
            // Samples about ten pages, whatever the size of the partition.
            let percent = (1_000.0 / f64::from(pages.max(1))).min(100.0);
            let place = format!(
                "SELECT consumer_id, message_id FROM {largest} TABLESAMPLE SYSTEM ({percent}) \
                    ORDER BY random() LIMIT 1"
            );
            tx.execute("SET LOCAL enable_sort = on").await?;
            start = sqlx::query_as::<_, (i32, String)>(sqlx::AssertSqlSafe(place))
                .fetch_optional(&mut *tx)
                .await?;
            tx.execute("SET LOCAL enable_sort = off; SET LOCAL jit = off").await?;
        }
        let (consumer_id, message_id) = start.unwrap_or_default();
        let look = sqlx::query_as(LOOK)
            .bind(consumer_id)
            .bind(message_id)
            .bind(ROWS_MAX)
            .bind(NAMED_MAX as i64)
            .bind(i32::MAX);
        let (seen, twice, named): (i64, i64, Vec<String>) = look.fetch_one(&mut *tx).await?;
        tx.rollback().await?;
        Ok(self.told(rows, seen, twice, named))
    }

    fn told(&self, rows: i64, seen: i64, twice: i64, named: Vec<String>) -> Vec<Finding> {
        let advice = "look whether the effect is there twice, and mend that first; then delete the \
            row that should not be. Rows that were copied \
            or restored by hand come to this, and hosts that claimed under other locks beside \
            newer ones";
        let more = twice - named.len() as i64;
        let mut findings: Vec<_> = named
            .into_iter()
            .map(|found| self.finding(CHECK, Severity::Error, found).advise(advice))
            .collect();
        if more > 0 {
            findings.push(
                self.finding(CHECK, Severity::Error, format!("{more} more messages stand twice"))
                    .advise(advice),
            );
        }
        if findings.is_empty() {
            let found = match rows > ROWS_MAX {
                true => format!(
                    "no message stands twice among {seen} of some {rows} rows, from a random place \
                        on"
                ),
                false => format!("none of the inbox's {seen} messages stands twice"),
            };
            findings.push(self.finding(CHECK, Severity::Ok, found));
        }
        findings
    }
}
