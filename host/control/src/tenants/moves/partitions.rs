//! The time partitions that a tenant's rows need in another database.

use chrono::{DateTime, Utc};
use oncebox_model::error::InboxError;
use sqlx::{AssertSqlSafe, PgConnection};

use super::{carry::Mover, rows::joined};
use crate::database::schema::{MissingPartition, make_partitions};

/// A time partition of the database that the tenant leaves.
#[derive(Debug, Clone, sqlx::FromRow)]
struct SourcePartition {
    #[sqlx(flatten)]
    partition: MissingPartition,
    /// Retention class of a partition of the inbox.
    retention_class: Option<i16>,
}

/// The times whose rows get another bucket, since retention has removed them in the other database
/// or is about to: those of the inbox with their class, and those of outgoing messages.
#[derive(Debug, Default)]
pub(super) struct PastTimes(Vec<(Option<i16>, DateTime<Utc>, DateTime<Utc>)>);

/// Makes the partitions that the tenant's rows need. Returns the times that the other database does
/// not keep any more.
pub(super) async fn make(mover: &Mover<'_>, consumers: &[i32]) -> Result<PastTimes, InboxError> {
    const IS_PAST: &str = "SELECT EXISTS (SELECT FROM oncebox.removal WHERE partition_name = $1), EXISTS (SELECT \
        FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid WHERE c.relnamespace = \
        'oncebox'::regnamespace AND c.relname = $1)";
    let mut past = PastTimes::default();
    let mut missing = Vec::new();
    for SourcePartition { partition, retention_class } in needed(mover, consumers).await? {
        let (is_past, is_there): (bool, bool) =
            sqlx::query_as(IS_PAST).bind(&partition.name).fetch_one(&mover.to.pool).await?;
        if is_past {
            past.0.push((retention_class, partition.from_at, partition.to_at));
        } else if !is_there {
            missing.push(partition);
        }
    }
    make_partitions(&mover.to.pool, &missing).await?;
    Ok(past)
}

/// Lists the partitions in which the tenant has rows.
async fn needed(mover: &Mover<'_>, consumers: &[i32]) -> Result<Vec<SourcePartition>, InboxError> {
    const ALL: &str = "SELECT p.relname::text AS parent, c.relname::text AS name, \
            b.bound[1]::timestamptz AS from_at, b.bound[2]::timestamptz AS to_at, \
            r.retention_class \
        FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid \
        JOIN pg_class p ON p.oid = i.inhparent AND p.relnamespace = 'oncebox'::regnamespace \
        LEFT JOIN oncebox.retention_class r ON p.relname = 'inbox_' || r.name \
        CROSS JOIN LATERAL (SELECT regexp_match(pg_get_expr(c.relpartbound, c.oid), \
            $re$FROM \\('([^']+)'\\) TO \\('([^']+)'\\)$re$) AS bound) b \
        WHERE b.bound IS NOT NULL AND c.relkind = 'r' AND (r.retention_class IS NOT NULL OR \
            p.relname = 'outgoing') ORDER BY 2";
    let mut connection = mover.from.pool.acquire().await?;
    let all: Vec<SourcePartition> = sqlx::query_as(ALL).fetch_all(&mut *connection).await?;
    let mut needed = Vec::new();
    for source in all {
        if has_rows(&mut connection, &source.partition.name, consumers).await? {
            needed.push(source);
        }
    }
    Ok(needed)
}

async fn has_rows(
    connection: &mut PgConnection,
    partition: &str,
    consumers: &[i32],
) -> Result<bool, InboxError> {
    let rows = format!(
        "SELECT EXISTS (SELECT FROM oncebox.\"{partition}\" WHERE consumer_id = ANY \
            ('{{{}}}'::int[]))",
        joined(consumers)
    );
    Ok(sqlx::query_scalar(AssertSqlSafe(rows)).fetch_one(connection).await?)
}

impl PastTimes {
    /// Returns the expression for the bucket of a row `r` of a table in the other database, where
    /// some rows get the present one, as retention gives it to rows that stay.
    pub(super) fn bucket(&self, table: &str) -> String {
        let is_inbox = table == "inbox";
        let mut cases = String::new();
        for (class, from, to) in self.0.iter().filter(|(class, ..)| class.is_some() == is_inbox) {
            let of_class =
                class.map_or_else(String::new, |class| format!("r.retention_class = {class} AND "));
            let now = if is_inbox {
                "oncebox.bucket_at(r.retention_class, now())"
            } else {
                "date_bin('1 day', now(), '2000-01-03 00:00:00+00')"
            };
            cases.push_str(&format!(
                "WHEN {of_class}r.bucket >= '{}' AND r.bucket < '{}' THEN {now} ",
                from.to_rfc3339(),
                to.to_rfc3339()
            ));
        }
        if cases.is_empty() { "r.bucket".into() } else { format!("CASE {cases}ELSE r.bucket END") }
    }
}
