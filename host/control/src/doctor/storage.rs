//! The inbox's partitions, and leftovers of transactions.

use sqlx::AssertSqlSafe;

use super::{Check, Finding, Look, Severity};
use crate::database::schema::{BUCKETS_AHEAD, MISSING_PARTITIONS, OUTGOING};

const CHECK: &str = "partitions";

pub(super) const CHECKS: &[Check] = &[
    Check::new(
        "partition_leftovers",
        "no partition was left half attached or half detached",
        "SELECT 'warning', format('the table %s is no partition of the inbox any more, or not yet; \
            its rows are known to no claim', c.oid::regclass),
                format('ALTER TABLE oncebox.inbox_%s ATTACH PARTITION %s FOR VALUES FROM (%L) TO \
            (%L)', r.name, c.oid::regclass, b.from_at, b.from_at + r.bucket)
         FROM pg_class c CROSS JOIN LATERAL (SELECT substring(c.relname from \
            '^inbox_(.+)_\\d{14}$') AS class, substring(c.relname from '\\d{14}$') AS at) n
              JOIN oncebox.retention_class r ON r.name = n.class, LATERAL (SELECT \
            to_timestamp(n.at || '+00', 'YYYYMMDDHH24MISSTZH') AS from_at) b
         WHERE c.relnamespace = 'oncebox'::regnamespace AND c.relkind = 'r' AND NOT c.relispartition
              AND NOT EXISTS (SELECT FROM oncebox.removal m WHERE m.partition_name = c.relname AND \
            m.state = 'counted')
         UNION ALL
         SELECT 'warning', format('the table %s is no partition of the outgoing messages any more, \
            or not yet; its rows are not sent', c.oid::regclass),
                format('ALTER TABLE oncebox.outgoing ATTACH PARTITION %s FOR VALUES FROM (%L) TO \
            (%L)', c.oid::regclass, d.from_at, d.from_at + interval '24 hours')
         FROM pg_class c CROSS JOIN LATERAL (SELECT to_timestamp(substring(c.relname from \
            '\\d{8}$') || '+00', 'YYYYMMDDTZH') AS from_at) d
         WHERE c.relnamespace = 'oncebox'::regnamespace AND c.relkind = 'r' AND NOT \
            c.relispartition AND c.relname ~ '^outgoing_\\d{8}$'
         UNION ALL
         SELECT 'warning', format('detaching the partition %s of the inbox was begun and not \
            finished', i.inhrelid::regclass),
                format('ALTER TABLE %s DETACH PARTITION %s FINALIZE', i.inhparent::regclass, \
            i.inhrelid::regclass)
         FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid WHERE i.inhdetachpending AND \
            c.relnamespace = 'oncebox'::regnamespace
              AND NOT EXISTS (SELECT FROM oncebox.removal m WHERE m.partition_name = c.relname AND \
            m.state = 'counted')",
    )
    .advice("look first whether someone keeps the table on purpose; attached again, messages of \
        that time are known again"),
    Check::new(
        "removals",
        "no removal of a time partition has failed for longer than a day",
        "SELECT 'warning', format('the removal of the time partition `%s` began at %s and is not \
            finished: %s', m.partition_name, m.began_at, m.error), NULL::text
         FROM oncebox.removal m WHERE m.state <> 'dropped' AND m.error IS NOT NULL AND m.began_at \
            < now() - interval '1 day'",
    )
    .advice("mend what the error names; hosts try again at every run, and `oncebox retention run` \
        does so at once"),
    Check::new(
        "erasures",
        "no erasure was left unfinished for longer than a day",
        "SELECT 'warning', format('an erasure of messages of tenant `%s` began at %s and is not \
            finished: %s', t.name, e.began_at, e.reason), NULL::text
         FROM oncebox.erasure e JOIN oncebox.tenant t USING (tenant_id)
         WHERE e.began_at < now() - interval '1 day'",
    )
    .advice("repeat the command, which continues where it stopped; `oncebox audit` has it as \
        `erase.begin`"),
    Check::new(
        "indexes",
        "every index of the inbox is valid",
        "SELECT 'error', format('the index %s is not valid, so that claims are slow or not \
            unique', i.indexrelid::regclass), format('REINDEX INDEX %s', i.indexrelid::regclass)
         FROM pg_index i JOIN pg_class c ON c.oid = i.indrelid
         WHERE c.relnamespace = 'oncebox'::regnamespace AND c.relkind = 'r' AND NOT (i.indisvalid \
            AND i.indisready)
         UNION ALL
         SELECT 'error', format('the partition %s of the inbox has no primary key', \
            c.oid::regclass),
                format('ALTER TABLE %s ADD PRIMARY KEY (consumer_id, message_id, retention_class, \
            bucket)', c.oid::regclass)
         FROM pg_partition_tree('oncebox.inbox') t JOIN pg_class c ON c.oid = t.relid
         WHERE t.isleaf AND NOT EXISTS (SELECT FROM pg_index i WHERE i.indrelid = c.oid AND \
            i.indisprimary)",
    ),
    Check::new(
        "prepared_transactions",
        "no prepared transaction is left over",
        "SELECT CASE WHEN p.owner::text IN (SELECT rolname FROM login) THEN 'error' ELSE 'warning' \
            END,
                format('the prepared transaction `%s` of `%s` has held its locks since %s', p.gid, \
            p.owner, p.prepared), format('ROLLBACK PREPARED %L', p.gid)
         FROM pg_prepared_xacts p WHERE p.database = current_database()",
    ),
    Check::new(
        "open_transactions",
        "no session holds a transaction open and does nothing",
        "SELECT 'warning', format('process %s of `%s` has idled in its transaction since %s; dead \
            rows stay as long', a.pid, a.usename, a.state_change),
                format('SELECT pg_terminate_backend(%s)', a.pid)
         FROM pg_stat_activity a WHERE a.datname = current_database() AND a.state LIKE 'idle in \
            transaction%' AND a.state_change < now() - interval '10 minutes'",
    ),
];

impl Look<'_> {
    /// Checks that the partitions of the present bucket and of the next [`BUCKETS_AHEAD`] exist.
    pub(super) async fn partitions_are_made_ahead(&self) -> Vec<Finding> {
        // An existing table that is no partition is a leftover, which is attached instead.
        let query = format!(
            "SELECT m.parent, m.name, m.from_at::text, m.to_at::text FROM ({MISSING_PARTITIONS}) m \
                WHERE to_regclass('oncebox.' || m.name) IS NULL"
        );
        let missing: Result<Vec<(String, String, String, String)>, _> =
            sqlx::query_as(AssertSqlSafe(query))
                .bind(BUCKETS_AHEAD)
                .bind([0_i16; 0])
                .fetch_all(&self.pool)
                .await;
        let mut findings: Vec<_> = match missing {
            Err(error) => vec![self.unknown(CHECK, &error)],
            Ok(missing) => missing
                .iter()
                .map(|(parent, name, from, to)| self.missing(parent, name, from, to))
                .collect(),
        };
        if findings.is_empty() {
            findings.push(self.finding(
                CHECK,
                Severity::Ok,
                format!("the inbox's partitions are made {BUCKETS_AHEAD} buckets ahead"),
            ));
        }
        findings
    }

    fn missing(&self, parent: &str, name: &str, from: &str, to: &str) -> Finding {
        let of = if parent == OUTGOING { "outgoing messages" } else { "the inbox" };
        let found = format!(
            "the partition `{name}` of {of}, for {from} to {to}, is missing; without it messages \
                of that time stop"
        );
        let sql = format!(
            "CREATE TABLE oncebox.{name} PARTITION OF oncebox.{parent} FOR VALUES FROM ('{from}') \
                TO ('{to}'); \
             DO $$ BEGIN EXECUTE format('ALTER TABLE oncebox.{name} OWNER TO %I', (SELECT \
             pg_get_userbyid(relowner) FROM pg_class WHERE oid = 'oncebox.inbox'::regclass)); END \
             $$"
        );
        self.finding(CHECK, Severity::Error, found)
            .fix(sql)
            .advise("`oncebox migrate` makes it, too; running hosts do so ahead of time")
    }
}
