//! The server: durability of a commit, contents of its log, access of logins, and its capacity.

use super::{Check, Finding, Look, Severity};

pub(super) const CHECKS: &[Check] = &[
    Check::new(
        "version",
        "the version of PostgreSQL is one that Oncebox runs on",
        "SELECT CASE WHEN v < 140000 THEN 'error' ELSE 'warning' END, format('the server is \
            PostgreSQL %s', current_setting('server_version')), NULL
         FROM (SELECT current_setting('server_version_num')::int AS v) s WHERE v < 140000 OR v >= \
            190000",
    )
    .advice("Oncebox needs 14 and is tried with 15; nobody has tried it with later ones than 18"),
    Check::new(
        "durability",
        "a commit that was answered outlives a crash of the server",
        "SELECT 'error', '`fsync` is off: a crash of the machine loses messages that were acked, \
            or the whole database', 'ALTER SYSTEM SET fsync = on; SELECT pg_reload_conf()'
         WHERE current_setting('fsync') = 'off'
         UNION ALL
         SELECT 'error', '`synchronous_commit` is off: a crash of the server loses messages that \
            were acked just before', 'ALTER SYSTEM SET synchronous_commit = on; SELECT \
            pg_reload_conf()'
         WHERE current_setting('synchronous_commit') = 'off'
         UNION ALL
         SELECT 'warning', '`full_page_writes` is off: a crash of the machine can tear pages', \
            'ALTER SYSTEM SET full_page_writes = on; SELECT pg_reload_conf()'
         WHERE current_setting('full_page_writes') = 'off'",
    ),
    Check::new(
        "replicas",
        "",
        "SELECT CASE WHEN r.has_replica AND r.names = '' THEN 'warning' WHEN r.names <> '' AND \
            r.commit = 'local' THEN 'warning' ELSE 'ok' END,
                CASE WHEN r.names = '' AND r.has_replica THEN 'commits wait for no replica: a \
            failover loses messages that were acked since it last caught up'
                     WHEN r.names = '' THEN 'there is no replica; what was acked is in this server \
            alone'
                     WHEN r.commit = 'local' THEN 'replicas are named, but `synchronous_commit` is \
            `local`: commits do not wait for them'
                     ELSE format('commits wait for replicas: %s', r.names) END, NULL
         FROM (SELECT EXISTS (SELECT FROM pg_stat_replication) AS has_replica, \
            current_setting('synchronous_standby_names') AS names,
                      current_setting('synchronous_commit') AS commit) r
         UNION ALL
         SELECT 'warning', '`wal_level` is minimal: neither replicas nor a restore to a point in \
            time are possible', 'ALTER SYSTEM SET wal_level = replica'
         WHERE current_setting('wal_level') = 'minimal'",
    )
    .advice(
        "`synchronous_standby_names` makes commits wait; without it, rewind the consumers \
        after a failover, which the inbox makes safe",
    ),
    Check::new(
        "passwords",
        "the server asks tenants' logins for their password, and not in the clear",
        "SELECT CASE WHEN r.auth_method = 'trust' THEN 'error' ELSE 'warning' END,
                format('line %s of pg_hba.conf lets tenants'' logins in by `%s` (%s)', \
            r.line_number, r.auth_method, r.type), NULL
         FROM pg_hba_file_rules r
         WHERE r.error IS NULL AND (r.auth_method = 'trust' OR r.auth_method = 'password' AND \
            r.type IN ('host', 'hostnossl'))
           AND ('all' = ANY (r.database) OR current_database() = ANY (r.database))
           AND ('all' = ANY (r.user_name) OR r.user_name && (SELECT array_agg(rolname::text) FROM \
            login))",
    )
    .advice(
        "write `scram-sha-256` there, and `SELECT pg_reload_conf()`; a guessed password is \
        tried in any case, see `logins`",
    ),
    Check::new(
        "encryption",
        "connections over a network are encrypted",
        "SELECT 'warning', 'the host''s connection to the database goes over the network without \
            TLS', NULL
         FROM pg_stat_ssl s WHERE s.pid = pg_backend_pid() AND NOT s.ssl AND inet_client_addr() IS \
            NOT NULL
           AND NOT inet_client_addr() <<= '127.0.0.0/8' AND inet_client_addr() <> '::1'",
    )
    .advice("give the database's URL `?sslmode=verify-full`, and the server a certificate"),
    Check::new(
        "preloaded",
        "nothing is loaded into every session that writes parameters to the log",
        "SELECT 'warning', '`auto_explain` is loaded; it can write parameters, and so secrets and \
            payloads, to the log', 'ALTER SYSTEM SET auto_explain.log_parameter_max_length = 0; \
            SELECT pg_reload_conf()'
         WHERE concat_ws(',', current_setting('shared_preload_libraries', true), \
            current_setting('session_preload_libraries', true)) LIKE '%auto_explain%'
           AND coalesce(nullif(current_setting('auto_explain.log_parameter_max_length', true), \
            ''), '-1') <> '0'",
    )
    .advice(
        "that setting is there from PostgreSQL 16 on; before, do not load it on a server with \
        tenants",
    ),
];

/// Locks of a claim's transaction beside those on messages and on partitions: parents, catalogs,
/// the tenant's tables.
const LOCKS_BESIDE: i64 = 64;
/// Connections of a host beside those of tenants' sessions.
const CONNECTIONS_BESIDE: i64 = 28;

impl Look<'_> {
    /// Checks that the lock table and the connections suffice for the live hosts.
    pub(super) async fn server_bears_the_hosts(&self) -> Vec<Finding> {
        const FIGURES: &str = "SELECT current_setting('max_locks_per_transaction')::int8, \
                current_setting('max_connections')::int8 + \
                current_setting('max_prepared_transactions')::int8, \
                current_setting('max_connections')::int8 - \
                current_setting('superuser_reserved_connections')::int8, \
                (SELECT coalesce(max(n), 0) FROM (SELECT sum(1 + (SELECT count(*) FROM pg_index x \
                WHERE x.indrelid = i.inhrelid))::int8 AS n \
                    FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid WHERE c.relnamespace \
                    = 'oncebox'::regnamespace AND c.relkind = 'r' GROUP BY i.inhparent) p)";
        const BATCH: &str = "SELECT coalesce(max((policy #>> '{batch,messages_max}')::int8), 64) \
            FROM oncebox.consumer";
        let figures: Result<(i64, i64, i64, i64), _> =
            sqlx::query_as(FIGURES).fetch_one(&self.pool).await;
        let batch: Result<i64, _> = sqlx::query_scalar(BATCH).fetch_one(&self.control.pool).await;
        let ((per_transaction, backends, connections, partitions), batch) = match (figures, batch) {
            (Ok(figures), Ok(batch)) => (figures, batch),
            (Err(error), _) | (_, Err(error)) => return vec![self.unknown("locks", &error)],
        };
        let hosts = self.control.hosts().list().await.map_or(1, |hosts| hosts.len().max(1) as i64);
        let sessions = self.limits.connections_max as i64 * hosts;
        let each = batch + partitions + LOCKS_BESIDE;
        vec![
            self.locks(sessions, each, per_transaction, backends),
            self.connections(sessions + hosts * CONNECTIONS_BESIDE, hosts, connections),
        ]
    }

    fn locks(&self, sessions: i64, each: i64, per_transaction: i64, backends: i64) -> Finding {
        let (needed, there) = (sessions * each, per_transaction * backends);
        let found = format!(
            "{sessions} transactions at the same time take up to {each} locks each, {needed} \
                together; the server has room for {there}"
        );
        if needed <= there {
            return self.finding("locks", Severity::Ok, found);
        }
        let right = (needed / backends.max(1) + 1).max(per_transaction + 1);
        self.finding(
            "locks",
            Severity::Error,
            format!(
                "{found}: claims fail with \"out of shared \
            memory\" under load"
            ),
        )
        .fix(format!("ALTER SYSTEM SET max_locks_per_transaction = {right}"))
        .advise(
            "it takes a restart of the server; or lower `database.connections_max` or the \
                consumers' `batch.messages_max`",
        )
    }

    fn connections(&self, needed: i64, hosts: i64, there: i64) -> Finding {
        let found = format!(
            "{hosts} hosts with {} tenants open up to {needed} connections; the server takes \
                {there}",
            self.tenants.len()
        );
        if needed <= there {
            return self.finding("connections", Severity::Ok, found);
        }
        self.finding("connections", Severity::Error, found)
            .fix(format!("ALTER SYSTEM SET max_connections = {}", needed + 10))
            .advise(
                "it takes a restart of the server; or lower `database.connections_max` of the \
                hosts",
            )
    }

    /// Checks that the clocks of the database and of this host agree. All decisions use the time of
    /// the database; operators read logs by the time of the host.
    pub(super) async fn clocks_agree(&self) -> Vec<Finding> {
        let (asked, before) = (std::time::Instant::now(), oncebox_model::hooks::host_clock());
        let now: chrono::DateTime<chrono::Utc> =
            match sqlx::query_scalar("SELECT clock_timestamp()").fetch_one(&self.pool).await {
                Ok(now) => now,
                Err(error) => return vec![self.unknown("clock", &error)],
            };
        let apart = (now - before).num_milliseconds();
        let found = format!(
            "the clocks of the server and of this host are {apart} ms apart, give or take {}",
            asked.elapsed().as_millis()
        );
        if apart.abs() < 5_000 + asked.elapsed().as_millis() as i64 {
            return vec![self.finding("clock", Severity::Ok, found)];
        }
        vec![self.finding("clock", Severity::Warning, found).advise("run a time service on both")]
    }
}
