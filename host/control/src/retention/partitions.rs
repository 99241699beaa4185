//! The time partitions of the inbox, found in the catalog below the tables of the retention
//! classes.

use chrono::{DateTime, Utc};
use oncebox_model::{
    error::InboxError,
    hooks::{self, Defect},
    sqlstate,
    tx::answered,
};
use sqlx::PgConnection;

/// A time partition of the inbox.
#[derive(Debug, Clone, sqlx::FromRow)]
pub struct TimePartition {
    /// Name of its table in the schema `oncebox`.
    pub name: String,
    /// Name of its retention class.
    pub class: String,
    /// Begin of the time in which its messages changed their status for the last time.
    pub from_at: DateTime<Utc>,
    /// End of that time, exclusive.
    pub to_at: DateTime<Utc>,
    /// Time from which retention removes it; none for ever.
    pub due_at: Option<DateTime<Utc>>,
    /// Whether that time has come, by the database's clock.
    pub is_due: bool,
    /// Messages in it, as PostgreSQL estimates them; none before its first analysis.
    pub messages: Option<i64>,
    /// Messages in it that will stay: they move to the present partition before the removal.
    /// Counted, not estimated; none for a partition that is not due.
    pub staying: Option<i64>,
    /// Size of the table with its indexes, bytes; 0 while it is being detached.
    pub bytes: i64,
    /// Whether Oncebox made the partition, by its name and bounds. Retention leaves others alone.
    pub is_ours: bool,
    /// Whether the inbox has it. False once a removal has detached it: its messages are forgotten.
    pub(crate) is_attached: bool,
    /// Whether its detach has begun and not ended. Then the end may hold the table locked, so that
    /// neither its size nor its messages are looked at.
    pub(crate) is_pending: bool,
    /// Number of its retention class.
    pub(crate) retention_class: i16,
}

/// Finds the partitions: those of the catalog, and those that a removal has detached already. $1 is
/// the time by which a partition is due.
const PARTITIONS: &str = "WITH leaf AS ( \
        SELECT c.oid, true AS is_attached, i.inhdetachpending AS is_pending, \
            c.relname::text AS name, c.reltuples, r.retention_class, r.name AS class, \
            r.bucket, r.retention, b.bound[1]::timestamptz AS from_at, \
            b.bound[2]::timestamptz AS to_at \
        FROM oncebox.retention_class r \
        JOIN pg_class p ON p.relnamespace = 'oncebox'::regnamespace \
            AND p.relname = 'inbox_' || r.name \
        JOIN pg_inherits i ON i.inhparent = p.oid JOIN pg_class c ON c.oid = i.inhrelid \
        CROSS JOIN LATERAL (SELECT regexp_match(pg_get_expr(c.relpartbound, c.oid), \
            $re$FROM \\('([^']+)'\\) TO \\('([^']+)'\\)$re$) AS bound) b \
        WHERE b.bound IS NOT NULL \
        UNION \
        SELECT c.oid, false, false, c.relname, c.reltuples, r.retention_class, r.name, r.bucket, \
            r.retention, m.from_at, m.to_at \
        FROM oncebox.removal m JOIN oncebox.retention_class r USING (retention_class) \
        JOIN pg_class c ON c.relnamespace = 'oncebox'::regnamespace AND c.relname = m.partition_name \
        WHERE m.state = 'counted' AND NOT c.relispartition) \
    SELECT l.name, l.class, l.retention_class, l.from_at, l.to_at, l.to_at + l.retention AS due_at, \
        coalesce(l.to_at + l.retention <= $1, false) AS is_due, \
        CASE WHEN l.reltuples >= 0 THEN l.reltuples::bigint END AS messages, \
        NULL::bigint AS staying, CASE WHEN NOT l.is_pending THEN coalesce(pg_total_relation_size(l.oid), 0) ELSE 0 END \
            AS bytes, l.is_attached, l.is_pending, \
        l.name = 'inbox_' || l.class || to_char(l.from_at AT TIME ZONE 'UTC', '_YYYYMMDDHH24MISS') \
            AS is_ours \
    FROM leaf l ORDER BY due_at NULLS LAST, l.from_at, l.name";

/// Returns the partitions by the time at which they are due, with the messages of each due one that
/// will stay.
pub(super) async fn all(connection: &mut PgConnection) -> Result<Vec<TimePartition>, InboxError> {
    let mut partitions = Vec::new();
    for mut partition in find(connection).await? {
        if partition.is_due && partition.is_ours && !partition.is_pending {
            match super::removal::staying(connection, &partition.name).await {
                Err(error) if is_gone(&error) => continue, // a run has dropped it meanwhile
                staying => partition.staying = Some(staying?),
            }
        }
        partitions.push(partition);
    }
    Ok(partitions)
}

/// Returns the partitions that Oncebox made and that are due, the oldest first.
pub(super) async fn due(connection: &mut PgConnection) -> Result<Vec<TimePartition>, InboxError> {
    let mut partitions = find(connection).await?;
    partitions.retain(|partition| partition.is_due && partition.is_ours);
    Ok(partitions)
}

/// Returns whether the table is not there any more.
pub(crate) fn is_gone(error: &InboxError) -> bool {
    let InboxError::Refused(error) = error else { return false };
    answered(error).is_some_and(|answer| answer.sqlstate == sqlstate::UNDEFINED_TABLE)
}

/// Returns the partitions by the time at which they are due. Looks at no message.
pub(crate) async fn find(connection: &mut PgConnection) -> Result<Vec<TimePartition>, InboxError> {
    let now = if hooks::sabotage(Defect::RetentionByHostClock) {
        hooks::host_clock() + chrono::TimeDelta::days(6) // a host's clock may be anything
    } else {
        sqlx::query_scalar("SELECT now()").fetch_one(&mut *connection).await?
    };
    Ok(sqlx::query_as(PARTITIONS).bind(now).fetch_all(connection).await?)
}
