//! The move of a tenant to another database: everything goes along, in steps that may each be
//! interrupted, and nothing counts in two databases.

use std::{collections::BTreeMap, os::unix::process::ExitStatusExt, time::Duration};

use oncebox_control::{
    Action, ArchiveFilter, Control, DatabaseUrl, DeletionStep, DeploymentRole, ErasureRequest,
    ErasureTarget, HostLimits, JobAction, JobFilter, MoveStep, NamedDatabase, NamedDatabases,
    NewDeployment, NewJob, Severity, Tenant, moved_tables,
};
use oncebox_inbox::PartitionInbox;
use oncebox_model::{InboxError, hooks::MOVE_POINTS};
use oncebox_tests::{
    cli::{Access, CliFixture},
    host::program,
    inbox::{InboxFixture, TestConsumer, deliver, record, take},
    postgres::TestDatabase,
    wait::{self, DEADLINE},
};
use serde_json::{Map, Value, json};
use sqlx::{AssertSqlSafe, PgPool};
use tokio::{process::Command, time::timeout};

/// A tenant in the host's database, and two other databases.
struct MoveFixture {
    inbox: InboxFixture,
    databases: [TestDatabase; 2],
}

impl MoveFixture {
    async fn new() -> Self {
        let mut inbox = InboxFixture::new().await;
        let databases =
            [InboxFixture::another_database().await, InboxFixture::another_database().await];
        let named = ["one", "two"].iter().zip(&databases).map(|(name, database)| NamedDatabase {
            name: (*name).to_owned(),
            url: DatabaseUrl::parse(database.url()).unwrap(),
            weight: 0,
            connections_max: 4,
        });
        inbox.control = inbox.control.clone().placing_in(NamedDatabases::new(named).unwrap());
        Self { inbox, databases }
    }

    fn control(&self) -> &Control {
        &self.inbox.control
    }

    /// The tenant as its row has it now.
    async fn tenant(&self) -> Tenant {
        self.control().tenants().get("acme").await.unwrap()
    }

    async fn pool(&self) -> PgPool {
        self.control().tenant_databases().get(&self.tenant().await).unwrap().pool
    }

    /// Begins a move, and works on it as a host does.
    async fn carry(&self, to: &str) -> Result<(), InboxError> {
        self.control().tenants().begin_move("acme", to).await?;
        let tenant = self.tenant().await;
        self.control().tenants().carry_move(&tenant).await.map(|carried| assert!(carried))
    }

    async fn step(&self) -> Option<MoveStep> {
        self.control().tenants().move_of("acme").await.unwrap().map(|known| known.step)
    }
}

/// A schema with what `pg_dump` and COPY treat apart.
const OWN_TABLES: &str = "
CREATE TYPE mood AS ENUM ('calm', 'angry');
CREATE TYPE place AS (x int, moods mood[]);
CREATE DOMAIN amount AS numeric CHECK (VALUE >= 0);
CREATE TABLE parent (id int PRIMARY KEY, child int);
CREATE TABLE child (id int PRIMARY KEY, parent int REFERENCES parent);
ALTER TABLE parent ADD FOREIGN KEY (child) REFERENCES child DEFERRABLE INITIALLY DEFERRED;
CREATE TABLE \"Odd \"\"name\" (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, gone int, at timestamptz, for_how_long interval,
    \"of\" place, moods mood[], ratio float8, price amount, bytes bytea, doc jsonb, note text,
    twice numeric GENERATED ALWAYS AS (price * 2) STORED);
ALTER TABLE \"Odd \"\"name\" DROP COLUMN gone;
CREATE TABLE by_day (day date NOT NULL, n int) PARTITION BY RANGE (day);
CREATE TABLE by_day_1 PARTITION OF by_day FOR VALUES FROM ('2026-01-01') TO ('2026-02-01');
CREATE TABLE by_day_rest PARTITION OF by_day DEFAULT;
CREATE DOMAIN of_owner AS int CHECK (current_user LIKE '%\\_owner');
CREATE TABLE listed (n of_owner) PARTITION BY LIST (n);
CREATE TABLE listed_1 PARTITION OF listed FOR VALUES IN (1);
INSERT INTO listed VALUES (1);
CREATE SEQUENCE tickets INCREMENT 7 START 100;
CREATE INDEX odd_note ON \"Odd \"\"name\" (lower(note)) WHERE price > 1;
CREATE VIEW moods AS SELECT m, count(*) FROM \"Odd \"\"name\", unnest(moods) m GROUP BY 1;
CREATE MATERIALIZED VIEW days AS SELECT day, sum(n) AS n FROM by_day GROUP BY 1;
INSERT INTO parent VALUES (1, 1), (2, NULL);
INSERT INTO child VALUES (1, 1), (2, 1);
INSERT INTO \"Odd \"\"name\" (at, for_how_long, \"of\", moods, ratio, price, bytes, doc, note)
    VALUES ('2026-03-29 02:30:00.123456+01', '-1 mon +3 days -04:05:06.7', (1, '{calm,angry}'),
        '{angry,NULL}', 0.1::float8 + 0.2::float8, 12.50, '\\x00ff5c', '{\"a\": [1, null]}',
        E'tab\\tback\\\\slash\\nline \\\\N'),
    (NULL, NULL, NULL, NULL, 'NaN', NULL, NULL, NULL, NULL), ('infinity', '1 day', NULL, '{}',
        '-infinity', 0, '', '1', '');
INSERT INTO by_day VALUES ('2026-01-05', 1), ('2027-01-05', 2);
SELECT nextval('tickets'), nextval('tickets');
REFRESH MATERIALIZED VIEW days;";

/// A function of the tenant's that is called for each row, and that fails where it is called with
/// the rights of a superuser of the host.
const CALLED: &str = "
GRANT USAGE ON LANGUAGE plpgsql TO $o;
CREATE FUNCTION $s.is_bounded(int) RETURNS boolean LANGUAGE plpgsql AS $$
BEGIN
    RESET ROLE;
    IF current_setting('is_superuser') = 'on' AND current_setting('application_name') = 'oncebox host' THEN
        RAISE EXCEPTION 'called with the rights of the host';
    END IF;
    RETURN true;
END $$;
ALTER FUNCTION $s.is_bounded(int) OWNER TO $o;
ALTER TABLE $s.parent ADD CHECK ($s.is_bounded(id));
CREATE FUNCTION $s.is_whole($s.child) RETURNS boolean LANGUAGE plpgsql AS
    $$ BEGIN RETURN $s.is_bounded(1); END $$;
ALTER FUNCTION $s.is_whole($s.child) OWNER TO $o;
ALTER TABLE $s.child ADD CHECK ($s.is_whole(child.*));";

/// Rows of the host's tables that no message of the test makes. `$c` is the consumer, `$t` the
/// tenant, `$d` a deployment.
const ROWS: &str = "
INSERT INTO oncebox.outgoing (consumer_id, message_id, ordinal, bucket, id, destination, key, lane,
    event_type, correlation_id, headers, payload, status, reason, due_at, next_attempt_at, settled_at)
SELECT $c, 'out', n, date_bin('1 day', now(), '2000-01-03 00:00:00+00'), 'id-' || n, 'kafka:out', 'k',
    7, 'x', 'c', '', '\\xff00', s, CASE s WHEN 'parked' THEN 'attempts' END, now() + interval '1 day',
    CASE s WHEN 'received' THEN now() + interval '1 day' END, CASE s WHEN 'completed' THEN now() END
FROM unnest(ARRAY['received', 'parked', 'completed', 'received']) WITH ORDINALITY AS u(s, n);
INSERT INTO oncebox.inbox_history (consumer_id, message_id, event, error)
    SELECT $c, 'm0', 'failed', 'error ' || n FROM generate_series(1, 3) n;
INSERT INTO oncebox.inbox_edit VALUES ($c, 'm0', 1, now(), 'before');
INSERT INTO oncebox.sequence_position VALUES ($c, sha256('a'), 5, now());
INSERT INTO oncebox.probation VALUES ($c, 't', 3, 17, 2);
INSERT INTO oncebox.forgotten (consumer_id, topic, partition, \"offset\", record_timestamp_ms)
    VALUES ($c, 't', 4, 99, 1);
INSERT INTO oncebox.job (tenant_id, consumer_id, action, state, filter, actor, reason, estimate,
    is_counted_whole, ended_at) SELECT $t, $c, 'redrive', 'done', '{}', 'me', 'job ' || n, 1, true, now()
    FROM generate_series(1, 2) n;
INSERT INTO oncebox.replay (consumer_id, state, kind, emit, filter, until_at, policy_revision,
    generation, expires_at, planned_by, found, found_without_payload, is_counted_whole, actor, reason,
    began_at, ended_at, cursor_at)
    SELECT $c, 'done', 'derived', 'suppress', '{}', now(), 1, 1, now(), 'me', n, 0, true, 'me', 'r',
        now(), now(), now() FROM generate_series(1, 2) n;
INSERT INTO oncebox.replay_failure (replay_id, step, message_id, reason, error)
    SELECT replay_id, found, 'm0', 'rejected', 'of ' || found FROM oncebox.replay WHERE consumer_id = $c;
INSERT INTO oncebox.shadow_total (deployment_id, messages, differ) VALUES ($d, 3, 3);
INSERT INTO oncebox.shadow_sum VALUES ($d, 't', 'update', 'c', 3);
INSERT INTO oncebox.shadow_difference (deployment_id, message_id, \"table\", change, \"column\", live)
    SELECT $d, 'm' || n, 't', 'update', 'c', n::text FROM generate_series(1, 3) n;
INSERT INTO oncebox.archive_file (path, partition_name, removal_began_at, tenant_id, tenant,
    consumer_id, consumer, file_number, first_id, last_id, ends_with, rows, bytes, id_digest,
    footer_bytes, footer_digest, written_at)
    VALUES ('a/b', 'inbox_30d_1', now(), $t, 'acme', $c, 'orders', 1, 'a', 'b', 'b', 2, 3, '', 1, '', now());
INSERT INTO oncebox.removal (partition_name, retention_class, from_at, to_at, state, removed, bytes,
    host, dropped_at) VALUES ('inbox_30d_1', 2, '2026-01-01', '2026-01-02', 'dropped', 2, 3, 'h', now());
INSERT INTO oncebox.archive_attempt (path, partition_name, tenant_id, consumer_id, is_left, put_ends_at)
    VALUES ('a/c', 'inbox_30d_1', $t, $c, true, now());";

/// Keys that the other database gives by itself.
const GIVEN: [&str; 6] =
    ["history_id", "position", "job_id", "replay_id", "difference_id", "revision"];

/// What a database has of a tenant: the rows of the host's tables, in the order of the keys that
/// each database gives, and the rows of its own tables.
async fn contents(
    pool: &PgPool,
    tenant: &Tenant,
    consumer: i32,
    deployment: i64,
) -> BTreeMap<String, Vec<Value>> {
    const OWN: &str = "SELECT c.oid::regclass::text FROM pg_class c WHERE c.relnamespace = \
        to_regnamespace($1) AND c.relkind IN ('r', 'v', 'm', 'S') ORDER BY 1";
    let mut all = BTreeMap::new();
    for table in moved_tables() {
        let condition = match table {
            "tenant_migration" | "archive_file" | "archive_attempt" | "job" => {
                format!("r.tenant_id = {}", tenant.tenant_id)
            }
            "shadow_total" | "shadow_sum" | "shadow_difference" => {
                format!("r.deployment_id = {deployment}")
            }
            "replay_failure" => format!(
                "r.replay_id IN (SELECT replay_id FROM oncebox.replay WHERE consumer_id = {consumer})"
            ),
            _ => format!("r.consumer_id = {consumer}"),
        };
        let given = GIVEN.map(|given| format!("to_jsonb(r)->'{given}'")).join(", ");
        let rows = format!(
            "SELECT to_jsonb(r) - '{{{}}}'::text[] FROM oncebox.{table} r WHERE {condition} ORDER BY \
                {given}, 1",
            GIVEN.join(",")
        );
        all.insert(
            table.to_owned(),
            sqlx::query_scalar(AssertSqlSafe(rows)).fetch_all(pool).await.unwrap(),
        );
    }
    let own: Vec<String> =
        sqlx::query_scalar(OWN).bind(&tenant.schema_name).fetch_all(pool).await.unwrap();
    for table in own {
        // A sequence writes ahead by itself.
        let rows =
            format!("SELECT to_jsonb(r) - 'log_cnt' FROM (SELECT * FROM {table}) r ORDER BY 1");
        let found = sqlx::query_scalar(AssertSqlSafe(rows)).fetch_all(pool).await.unwrap();
        all.insert(table, found);
    }
    all
}

/// The statements that make the tenant's schema, as PostgreSQL's catalog has it: definitions, owners
/// and rights.
async fn definitions(pool: &PgPool, tenant: &Tenant) -> Vec<String> {
    const DEFINITIONS: &str = "SELECT format('%s %s %s %s', c.relname, c.relkind, c.relowner::regrole, \
            ARRAY(SELECT a::text FROM unnest(c.relacl) a ORDER BY 1)) FROM pg_class c WHERE c.relnamespace = to_regnamespace($1) \
        UNION ALL SELECT pg_get_indexdef(indexrelid) FROM pg_index i JOIN pg_class c ON c.oid = \
            i.indexrelid WHERE c.relnamespace = to_regnamespace($1) \
        UNION ALL SELECT conrelid::regclass || pg_get_constraintdef(oid) FROM pg_constraint WHERE \
            connamespace = to_regnamespace($1) \
        UNION ALL SELECT pg_get_triggerdef(t.oid) FROM pg_trigger t JOIN pg_class c ON c.oid = \
            t.tgrelid WHERE c.relnamespace = to_regnamespace($1) AND NOT t.tgisinternal \
        UNION ALL SELECT format('schema %s %s', nspowner::regrole, nspacl) FROM pg_namespace WHERE \
            nspname = $1 \
        UNION ALL SELECT format('default %s %s %s', defaclrole::regrole, defaclobjtype, defaclacl) \
            FROM pg_default_acl WHERE defaclnamespace = to_regnamespace($1) \
        ORDER BY 1";
    sqlx::query_scalar(DEFINITIONS).bind(&tenant.schema_name).fetch_all(pool).await.unwrap()
}

/// A consumer with messages in several states, and rows in every table that goes along.
async fn filled(fixture: &MoveFixture) -> (TestConsumer, i64) {
    let tenant = fixture.inbox.tenant("acme", OWN_TABLES).await;
    let consumer = fixture.inbox.consumer(&tenant, "orders", "").await;
    let host = fixture.inbox.host(&consumer);
    let records: Vec<_> = (0..20)
        .map(|n| record(n, &format!("m{n}"), if n % 5 == 4 { "reject" } else { "" }))
        .collect();
    deliver(&host, &records).await;
    // A shadow installs triggers on the tenant's tables.
    let (control, name) = (fixture.control(), &consumer.row.name);
    let live = NewDeployment::stable("*", "h", "");
    let shadow =
        NewDeployment { role: DeploymentRole::Shadow, percent: Some(100.0), ..live.clone() };
    control.versions().deploy_compiled("acme", name, live, b"live").await.unwrap();
    let shadow = control.versions().deploy_compiled("acme", name, shadow, b"other").await.unwrap();
    let deployment = shadow.deployment_id;
    control.shadows().reconcile_capture(&tenant).await.unwrap();
    let rows = ROWS
        .replace("$c", &consumer.row.consumer_id.to_string())
        .replace("$t", &tenant.tenant_id.to_string())
        .replace("$d", &deployment.to_string());
    fixture.inbox.execute(rows).await;
    let called = CALLED.replace("$s", &tenant.schema_name).replace("$o", &tenant.owner_login);
    fixture.inbox.execute(called).await;
    (consumer, deployment)
}

/// What could go wrong: a table of the host or of the tenant is left out, a value changes on its
/// way, a right or a trigger is missing, a row keeps a key that another tenant has, the inbox
/// forgets a message, or something is left behind.
#[tokio::test(flavor = "multi_thread")]
async fn everything_of_a_tenant_goes_along() {
    let fixture = MoveFixture::new().await;
    // Another tenant is there first, with the keys that the moved rows have here.
    let other = fixture.control().tenants().create_in("globex", "one").await.unwrap();
    fixture.control().tenant_databases().replicate(&other).await.unwrap();
    let (consumer, deployment) = filled(&fixture).await;
    let tenant = fixture.tenant().await;
    let id = consumer.row.consumer_id;
    let source = fixture.inbox.pool.clone();
    let before = contents(&source, &tenant, id, deployment).await;
    let defined = definitions(&source, &tenant).await;
    assert!(before.values().all(|rows| !rows.is_empty()), "{before:#?}");
    assert!(defined.len() > 30, "{defined:#?}");

    for (to, from) in
        [("one", &source), ("two", &pool_of(&fixture, 0)), ("one", &pool_of(&fixture, 1))]
    {
        fixture.carry(to).await.unwrap();
        assert_eq!(fixture.step().await, None, "the move is over");
        let moved = fixture.tenant().await;
        assert_eq!((moved.database.as_deref(), moved.state.as_str()), (Some(to), "active"));
        let there = fixture.pool().await;
        let after = contents(&there, &tenant, id, deployment).await;
        for (table, rows) in &before {
            assert_eq!(after.get(table), Some(rows), "{table}, moved to `{to}`");
        }
        assert_eq!(after.len(), before.len());
        // The list of the archive has its files by the removals of their partitions.
        let filter = ArchiveFilter { tenant: Some("acme".to_owned()), limit: 9, consumer: None };
        let files = fixture.control().archive().files(&filter).await.unwrap();
        assert_eq!(files.len(), 1, "moved to `{to}`: {files:?}");
        assert_eq!(definitions(&there, &tenant).await, defined, "moved to `{to}`");
        // Nothing is left behind: neither rows nor the schema.
        let left = contents(from, &tenant, id, deployment).await;
        let left: Vec<_> = left
            .iter()
            .filter(|(table, rows)| !rows.is_empty() && *table != "tenant_migration")
            .collect();
        assert!(left.is_empty(), "{left:?}");
    }

    // The inbox knows what it has handled, the rest goes on, and new keys follow those that came.
    let there = fixture.pool().await;
    let consumer = TestConsumer { tenant: fixture.tenant().await, ..consumer };
    let host = fixture.inbox.host(&consumer);
    deliver(&host, &[record(20, "m0", ""), record(21, "new", "")]).await;
    let effects = format!(
        "SELECT count(*) FROM {}.effect WHERE message_id IN ('m0', 'new')",
        tenant.schema_name
    );
    let effects: i64 = sqlx::query_scalar(AssertSqlSafe(effects)).fetch_one(&there).await.unwrap();
    assert_eq!(effects, 2);
    for (sequence, least) in [("oncebox.ordering_place", 1 << 20), ("tickets", 107)] {
        let sequence = sequence.replace("tickets", &format!("{}.tickets", tenant.schema_name));
        let next = format!("SELECT nextval('{sequence}')");
        let next: i64 = sqlx::query_scalar(AssertSqlSafe(next)).fetch_one(&there).await.unwrap();
        assert!(next > least, "{sequence}: {next}");
    }
    let audited = fixture
        .inbox
        .number(
            "SELECT count(*) FROM oncebox.audit WHERE action IN ('tenant.move', 'tenant.moved')",
        )
        .await;
    assert_eq!(audited, 6);
    fixture.control().tenants().delete("acme").await.unwrap();
    fixture.control().tenants().remove(&fixture.tenant().await).await.unwrap();
    fixture.inbox.finish().await;
}

fn pool_of(fixture: &MoveFixture, database: usize) -> PgPool {
    PgPool::connect_lazy(fixture.databases[database].url()).unwrap()
}

/// What could go wrong: a table that comes later is forgotten by the move.
#[tokio::test(flavor = "multi_thread")]
async fn every_table_with_rows_of_tenants_goes_along_or_says_why_not() {
    const TABLES: &str = "SELECT DISTINCT c.table_name::text FROM information_schema.columns c JOIN \
        pg_class t ON t.oid = format('oncebox.%I', c.table_name)::regclass WHERE c.table_schema = \
        'oncebox' AND NOT t.relispartition AND t.relkind IN ('r', 'p') AND c.column_name IN \
        ('tenant_id', 'consumer_id', 'deployment_id', 'replay_id', 'erasure_id', 'version_id', \
        'handler_id')";
    // Of the host's database alone: the source about tenants, and what hosts report.
    const OF_THE_HOST: [&str; 18] = [
        "tenant",
        "consumer",
        "tenant_store",
        "endpoint",
        "token",
        "duplicates_refused",
        "handler",
        "version",
        "verification",
        "deployment",
        "deployment_outcome",
        "host_consumer",
        "host_endpoint",
        "ingress_secret",
        "consumer_start",
        "start_mark",
        "placed_tenant",
        "tenant_move",
    ];
    // No move begins to copy while an erasure is under way; a host's turn to copy dead letters ends.
    const ENDS_BEFORE: [&str; 3] = ["erasure", "erased_message", "copying"];
    let fixture = InboxFixture::new().await;
    let tables: Vec<String> = sqlx::query_scalar(TABLES).fetch_all(&fixture.pool).await.unwrap();
    let mut known: Vec<_> = moved_tables().chain(OF_THE_HOST).chain(ENDS_BEFORE).collect();
    known.sort_unstable();
    let mut tables: Vec<_> = tables.iter().map(String::as_str).collect();
    tables.sort_unstable();
    assert_eq!(tables, known);
    fixture.finish().await;
}

/// What could go wrong: while a tenant is copied, a host, an operator or a tenant changes what was
/// copied already, or another tenant is held up; a move that was cancelled goes on, or leaves a
/// tenant that stands still or is in two databases.
#[tokio::test(flavor = "multi_thread")]
async fn nobody_changes_a_tenant_while_it_is_copied_and_a_cancel_lets_it_stay() {
    let fixture = MoveFixture::new().await;
    let (consumer, _) = filled(&fixture).await;
    // The second time from a database that holds a replica, the first time from the host's own.
    for (from, to) in [(None, "one"), (Some("one"), "two")] {
        let tenant = fixture.tenant().await;
        assert_eq!(tenant.database.as_deref(), from);
        let source = fixture.pool().await;
        let consumer = TestConsumer { tenant: tenant.clone(), ..consumer.clone() };
        let other = other_tenant(&fixture, from, to).await;
        let id = consumer.row.consumer_id;
        let execute = async |sql: &str| {
            let sql = AssertSqlSafe(sql.replace("$c", &id.to_string()));
            sqlx::raw_sql(sql).execute(&source).await.unwrap();
        };
        // A relay has it: the copy waits.
        execute(
            "UPDATE oncebox.outgoing SET status = 'in_progress', next_attempt_at = NULL, \
                locked_by = 'x', locked_until = now() + interval '1 hour' WHERE consumer_id = $c \
                AND ordinal = 1; \
             UPDATE oncebox.outgoing SET next_attempt_at = now() WHERE consumer_id = $c AND ordinal \
                = 4",
        )
        .await;
        let host = fixture.inbox.host(&consumer);
        let mut held = take(&host).await;
        let control = fixture.control().clone();
        let carrying = tokio::spawn({
            let (control, tenant, to) = (control.clone(), tenant.clone(), to.to_owned());
            async move {
                control.tenants().begin_move("acme", &to).await.unwrap();
                control.tenants().carry_move(&tenant).await
            }
        });
        wait::until(
            DEADLINE,
            Duration::from_millis(20),
            async || {
                Ok(is_shut(&source, &tenant).await
                    && fixture.step().await == Some(MoveStep::Copying))
            },
            async || format!("it is {:?}", fixture.step().await),
        )
        .await
        .unwrap();

        // A host that does not know yet.
        let record = record(40, "late", "");
        assert!(held.process(std::slice::from_ref(&record)).await.is_err());
        // A reconciliation lets nobody in.
        control.tenant_databases().replicate(&fixture.tenant().await).await.unwrap();
        assert!(is_shut(&source, &tenant).await);
        let stands_still = format!("tenant `acme` is being moved to `{to}`");
        let tenants = control.tenants();
        for refused in [
            tenants.resume("acme").await.map(drop),
            tenants.suspend("acme").await.map(drop),
            tenants.delete("acme").await.map(drop),
            tenants.rotate_credentials("acme").await.map(drop),
            tenants.set_limits("acme", &limits()).await.map(drop),
            tenants.begin_move("acme", if to == "one" { "two" } else { "one" }).await.map(drop),
        ] {
            let error = refused.unwrap_err().to_string();
            assert!(error.contains(&stands_still), "{error}");
        }
        for (what, refused) in acts(&control, "acme").await {
            let error = refused.unwrap_err().to_string();
            assert!(error.contains("is being moved to another database"), "{what}: {error}");
        }
        assert_eq!(leased(&source, &tenant, id).await, 0);
        // A second process, and a repeated request.
        assert!(!tenants.carry_move(&tenant).await.unwrap());
        let again = tenants.begin_move("acme", to).await.unwrap();
        assert_eq!(again.unwrap().step, MoveStep::Copying);

        // Others, on both sides, go on.
        for other in &other {
            assert_eq!(
                deliver(&fixture.inbox.host(other), &[self::record(0, "m", "")]).await.len(),
                0
            );
            for (what, done) in acts(&control, &other.tenant.name).await {
                assert!(done.is_ok(), "{what} of another tenant: {done:?}");
            }
        }

        let left = tenants.cancel_move("acme").await.unwrap().unwrap();
        assert_eq!(left.step, MoveStep::Cancelled);
        let error = carrying.await.unwrap().unwrap_err().to_string();
        assert!(error.contains("the move was cancelled"), "{error}");
        let stays = fixture.tenant().await;
        assert_eq!((stays.database.as_deref(), stays.state.as_str()), (from, "active"));
        let back = TestConsumer { tenant: stays.clone(), ..consumer.clone() };
        let host = fixture.inbox.host(&back);
        assert_eq!(deliver(&host, &[record]).await.len(), 0, "{from:?}");
        // What is left there goes, then the tenant can be moved.
        assert!(tenants.carry_move(&stays).await.unwrap());
        assert_eq!(fixture.step().await, None);
        execute(
            "UPDATE oncebox.outgoing SET status = 'parked', reason = 'x', locked_by = NULL, \
                locked_until = NULL WHERE consumer_id = $c AND status = 'in_progress'; \
             DELETE FROM oncebox.job WHERE consumer_id = $c AND state = 'running'",
        )
        .await;
        fixture.carry(to).await.unwrap();
        assert_eq!(fixture.tenant().await.database.as_deref(), Some(to));
        // A host that knew the tenant where it was, while a part of it is left there.
        if from.is_some() {
            let left = format!(
                "INSERT INTO oncebox.tenant (tenant_id, name, schema_name, login, owner_login, \
                    secret_hash) OVERRIDING SYSTEM VALUE VALUES ({}, 'acme', '{}', '{}', '{}', '')",
                stays.tenant_id, stays.schema_name, stays.login, stays.owner_login
            );
            execute(&left).await;
            control.tenant_databases().replicate(&stays).await.unwrap();
            let schema = format!("SELECT to_regnamespace('{}') IS NOT NULL", stays.schema_name);
            let has_schema: bool =
                sqlx::query_scalar(AssertSqlSafe(schema)).fetch_one(&source).await.unwrap();
            assert!(is_shut(&source, &stays).await && !has_schema, "it counts in two databases");
            execute(&format!("DELETE FROM oncebox.tenant WHERE tenant_id = {}", stays.tenant_id))
                .await;
        }
        let late = PartitionInbox::open(host, "t", 0, 2_000_000).await;
        assert!(late.is_err(), "{from:?}");
    }
    fixture.inbox.finish().await;
}

/// What could go wrong: what cannot be moved stops the tenant's messages, or is not named; a name of
/// the tenant's becomes a statement of the host.
#[tokio::test(flavor = "multi_thread")]
async fn what_cannot_be_moved_is_named_while_the_tenant_runs() {
    let fixture = MoveFixture::new().await;
    let (consumer, _) = filled(&fixture).await;
    let tenant = fixture.tenant().await;
    let (id, schema) = (consumer.row.consumer_id, &tenant.schema_name);
    let refused = async |make: String, undo: String, says: &str| {
        fixture.inbox.execute(make).await;
        let error = fixture.carry("one").await.unwrap_err().to_string();
        assert!(error.contains(says), "{error}");
        let known = fixture.control().tenants().move_of("acme").await.unwrap().unwrap();
        assert_eq!((known.step, known.error), (MoveStep::Preparing, Some(error)));
        assert_eq!(fixture.tenant().await.state.as_str(), "active");
        let found =
            fixture.control().doctor().run(HostLimits { connections_max: 10_000 }).await.unwrap();
        let found: Vec<_> = found.iter().filter(|finding| finding.found.contains(says)).collect();
        assert!(found.len() == 1 && found[0].severity == Severity::Warning, "{found:?}");
        fixture.inbox.execute(undo).await;
    };
    refused(
        format!("CREATE TABLE {schema}.\"a\nDROP TABLE oncebox.tenant; --\" (n int)"),
        format!("DROP TABLE {schema}.\"a\nDROP TABLE oncebox.tenant; --\""),
        "has something named \"a\\nDROP TABLE oncebox.tenant; --\"",
    )
    .await;
    let job = "UPDATE oncebox.job SET state = $s, ended_at = $e WHERE reason = 'job 1'";
    refused(
        job.replace("$s", "'paused'").replace("$e", "NULL"),
        job.replace("$s", "'done'").replace("$e", "now()"),
        "of tenant `acme` is not over",
    )
    .await;
    refused(
        format!("UPDATE oncebox.consumer SET state = 'deleting' WHERE consumer_id = {id}"),
        format!("UPDATE oncebox.consumer SET state = 'running' WHERE consumer_id = {id}"),
        "consumer `orders` is being deleted",
    )
    .await;
    refused(
        "CREATE DOMAIN public.mine AS int; ALTER TABLE $t ADD of_others public.mine"
            .replace("$t", &format!("{schema}.effect")),
        format!("ALTER TABLE {schema}.effect DROP of_others; DROP DOMAIN public.mine"),
        "permission denied for schema public",
    )
    .await;
    fixture.carry("one").await.unwrap();
    assert_eq!(fixture.step().await, None);
    fixture.inbox.finish().await;
}

/// What could go wrong: a move that is cancelled in the middle of the last transaction of its copy
/// leaves a copy that counts, beside the tenant that stays.
#[tokio::test(flavor = "multi_thread")]
async fn a_copy_that_a_cancel_meets_counts_for_nothing() {
    const HELD: &str = "SELECT EXISTS (SELECT FROM pg_locks WHERE NOT granted AND relation = \
        'oncebox.archive_attempt'::regclass)";
    let fixture = MoveFixture::new().await;
    let (consumer, _) = filled(&fixture).await;
    let there = pool_of(&fixture, 0);
    let mut holder = there.begin().await.unwrap();
    sqlx::query("LOCK TABLE oncebox.archive_attempt").execute(&mut *holder).await.unwrap();
    let control = fixture.control().clone();
    let carrying = tokio::spawn(async move {
        control.tenants().begin_move("acme", "one").await.unwrap();
        let tenant = control.tenants().get("acme").await.unwrap();
        control.tenants().carry_move(&tenant).await
    });
    wait::until(
        DEADLINE,
        Duration::from_millis(10),
        async || Ok(sqlx::query_scalar(HELD).fetch_one(&there).await?),
        async || format!("it is {:?}", fixture.step().await),
    )
    .await
    .unwrap();
    fixture.control().tenants().cancel_move("acme").await.unwrap();
    holder.rollback().await.unwrap();
    carrying.await.unwrap().unwrap_err();
    const COUNTS: &str = "SELECT count(*) FROM oncebox.tenant WHERE secret_hash <> ''";
    let counts: i64 = sqlx::query_scalar(COUNTS).fetch_one(&there).await.unwrap();
    assert_eq!(counts, 0);
    let stays = fixture.tenant().await;
    assert_eq!((stays.database.as_deref(), stays.state.as_str()), (None, "active"));
    assert!(fixture.control().tenants().carry_move(&stays).await.unwrap());
    let left: i64 = sqlx::query_scalar("SELECT count(*) FROM pg_namespace WHERE nspname = $1")
        .bind(&stays.schema_name)
        .fetch_one(&there)
        .await
        .unwrap();
    assert_eq!((left, fixture.step().await), (0, None));

    // A consumer that is deleted before the rest of it is removed: its rows are found by its key.
    fixture.carry("one").await.unwrap();
    let left = "INSERT INTO oncebox.tenant_move (tenant_id, step, from_database, to_database, \
        began_by, moved_at) VALUES ($t, 'moved', NULL, 'one', 'test', now())";
    let left = left.replace("$t", &stays.tenant_id.to_string());
    fixture.inbox.execute(left).await;
    let tenants = fixture.control().tenants();
    fixture.control().consumers().delete("acme", "orders").await.unwrap();
    let desired = fixture.control().reconciliation().desired_states().await.unwrap();
    let desired = desired.iter().find(|desired| desired.consumer_id == consumer.row.consumer_id);
    let step = fixture.control().reconciliation().delete_some(desired.unwrap()).await.unwrap();
    assert!(matches!(step, DeletionStep::None));
    let error = fixture.control().erasures().erase("acme", &erasure()).await.unwrap_err();
    assert!(error.to_string().contains("is being moved to another database"), "{error}");
    let moved = fixture.tenant().await;
    tenants.delete("acme").await.unwrap();
    let error = tenants.remove(&moved).await.unwrap_err().to_string();
    assert!(
        error.contains("what is left of it in the host's database is being removed"),
        "{error}"
    );
    assert!(tenants.carry_move(&moved).await.unwrap());
    assert!(tenants.remove(&fixture.tenant().await).await.unwrap());
    fixture.inbox.finish().await;
}

/// Whether the tenant is shut out of a database.
async fn is_shut(pool: &PgPool, tenant: &Tenant) -> bool {
    const SHUT: &str = "SELECT secret_hash = '' FROM oncebox.tenant WHERE tenant_id = $1";
    sqlx::query_scalar(SHUT).bind(tenant.tenant_id).fetch_one(pool).await.unwrap()
}

fn limits() -> Map<String, Value> {
    Map::from_iter([("weight".to_owned(), json!(7))])
}

/// A tenant beside it, where it is and where it goes.
async fn other_tenant(fixture: &MoveFixture, from: Option<&str>, to: &str) -> Vec<TestConsumer> {
    let mut others = Vec::new();
    for place in [from, Some(to)] {
        let name = format!("beside-{to}-{}", place.unwrap_or("here"));
        let tenants = fixture.control().tenants();
        let tenant = match place {
            Some(place) => tenants.create_in(&name, place).await.unwrap(),
            None => tenants.create(&name).await.unwrap(),
        };
        fixture.inbox.make_tables(&tenant, "").await;
        let consumer = fixture.inbox.consumer(&tenant, "orders", "").await;
        fixture.control().tenant_databases().replicate(&tenant).await.unwrap();
        others.push(consumer);
    }
    others
}

fn erasure() -> ErasureRequest {
    ErasureRequest {
        target: ErasureTarget::MessageId("nobody".to_owned()),
        consumer: None,
        reason: "test".to_owned(),
    }
}

/// Changes of messages by operators.
async fn acts(control: &Control, tenant: &str) -> Vec<(&'static str, Result<(), InboxError>)> {
    let redrive = NewJob {
        action: JobAction::Inbox(Action::Redrive),
        consumer: Some("orders".to_owned()),
        filter: JobFilter::default(),
        reason: "test".to_owned(),
        rate: None,
    };
    vec![
        ("job", control.jobs().start(tenant, &redrive).await.map(drop)),
        ("erasure", control.erasures().erase(tenant, &erasure()).await.map(drop)),
    ]
}

/// Outgoing messages that a relay would get.
async fn leased(pool: &PgPool, tenant: &Tenant, consumer: i32) -> i64 {
    const LEASE: &str = "SELECT (SELECT count(*) FROM oncebox.lease_outgoing($1, ARRAY[$2], '{}', \
        'kafka:out', 10, 1000000, 1000, 'test')) + (SELECT count(*) FROM oncebox.outgoing_due(10, 0, \
        '{}', '{}') WHERE consumer = $2)";
    sqlx::query_scalar(LEASE).bind(tenant.tenant_id).bind(consumer).fetch_one(pool).await.unwrap()
}

/// What could go wrong: a process dies in the middle of a move, and the tenant is lost, is in two
/// databases, or is left in parts that no later move removes.
#[tokio::test(flavor = "multi_thread")]
async fn a_move_that_was_killed_at_any_step_goes_on() {
    let mut cli = CliFixture::open(Access::Database).await;
    let databases =
        [InboxFixture::another_database().await, InboxFixture::another_database().await];
    let config: String = ["one", "two"]
        .iter()
        .zip(&databases)
        .map(|(name, of)| {
            format!("[[databases]]\nname = '{name}'\nurl = '{}'\nweight = 0\n", of.url())
        })
        .collect();
    cli.file("databases.toml", config);
    let file = cli.dir().join("databases.toml").display().to_string();
    cli.folder().set("ONCEBOX_CONFIG", &file);
    let mut tables: String = (0..25).map(|n| format!("CREATE TABLE t{n} (id int);\n")).collect();
    tables.push_str("INSERT INTO t7 SELECT generate_series(1, 50);\n");
    cli.file("tables.sql", tables);
    cli.file(
        "policy.toml",
        "topics = ['t']\nack = 'after_commit'\nidentity = { id = [{ header = 'id' }], event_type = \
            ['topic'] }\n",
    );
    cli.ok(&["tenant", "create", "acme", "--schema", "tables.sql"]).await;
    cli.ok(&["consumer", "create", "orders", "--tenant", "acme", "--policy", "policy.toml"]).await;
    fill(&mut cli).await;
    cli.fails(
        &["tenant", "move", "acme"],
        "tenant `acme` is not being moved; `--to` names the database to which it goes",
    )
    .await;
    cli.fails(
        &["tenant", "move", "acme", "--to", "three"],
        "no database is named `three` in `[[databases]]` of this process; `oncebox databases` lists \
            those that are",
    )
    .await;
    let own = cli.folder().get("ONCEBOX_DATABASE_URL").unwrap();
    for (number, point) in MOVE_POINTS.iter().enumerate() {
        let to = ["one", "two"][number % 2];
        let output = arguments(&mut cli, &["tenant", "move", "acme", "--to", to])
            .env("ONCEBOX_FAILPOINT", point)
            .kill_on_drop(true)
            .output();
        let output = timeout(DEADLINE, output).await.expect(point).unwrap();
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.signal(), Some(9), "`{point}` was never reached: {said}");
        let databases = [&*own, databases[0].url(), databases[1].url()];
        let lives: Vec<_> = places(&databases, "secret_hash <> '' AND database_url IS NULL").await;
        assert!(lives.len() <= 1, "{point}: the tenant lives in {lives:?}");
        if cli.json(&["tenant", "show", "acme"]).await["database"] != to
            || *point != "tenant:move:ended"
        {
            let said = timeout(DEADLINE, cli.run(&["tenant", "move", "acme"])).await.expect(point);
            assert!(
                said.stdout.ends_with(&format!("tenant `acme` is in `{to}`\n")),
                "{point}: {said:?}"
            );
        }
        let shown = cli.json(&["tenant", "show", "acme"]).await;
        assert_eq!(
            (&shown["database"], &shown["state"]),
            (&json!(to), &json!("active")),
            "{point}"
        );
        assert_eq!(
            places(&databases, "secret_hash <> '' AND database_url IS NULL").await,
            [1 + number % 2]
        );
        // The rows are there and nowhere else.
        for (place, url) in databases.iter().enumerate() {
            let expected = if place == 1 + number % 2 { (100, 25, 50) } else { (0, 0, 0) };
            assert_eq!(rows(url, &shown).await, expected, "{point}: database {place}");
        }
        println!("{point}: killed, then brought to its end");
    }
    let last = ["one", "two"][(MOVE_POINTS.len() - 1) % 2];
    let said = cli.ok(&["tenant", "move", "acme", "--to", last]).await;
    assert_eq!(said, format!("tenant `acme` is in `{last}`\n"), "a repeated request");
}

/// The databases in which the tenant's row is like this.
async fn places(databases: &[&str], condition: &str) -> Vec<usize> {
    let mut places = Vec::new();
    for (place, url) in databases.iter().enumerate() {
        let pool = PgPool::connect(url).await.unwrap();
        let is = format!("SELECT count(*) FROM oncebox.tenant WHERE {condition}");
        let is: i64 = sqlx::query_scalar(AssertSqlSafe(is)).fetch_one(&pool).await.unwrap();
        places.extend((is > 0).then_some(place));
        pool.close().await;
    }
    places
}

/// Messages of the tenant, tables of its own, and rows in one of them.
async fn rows(url: &str, tenant: &Value) -> (i64, i64, i64) {
    let pool = PgPool::connect(url).await.unwrap();
    let count = async |sql: String| {
        sqlx::query_scalar::<_, i64>(AssertSqlSafe(sql)).fetch_one(&pool).await.unwrap()
    };
    let schema = tenant["schema_name"].as_str().unwrap();
    let messages = count("SELECT count(*) FROM oncebox.inbox".to_owned()).await;
    let tables =
        count(format!("SELECT count(*) FROM pg_tables WHERE schemaname = '{schema}'")).await;
    let own = match tables {
        0 => 0,
        _ => count(format!("SELECT count(*) FROM {schema}.t7")).await,
    };
    pool.close().await;
    (messages, tables, own)
}

async fn fill(cli: &mut CliFixture) {
    const FILL: &str = "INSERT INTO oncebox.inbox (consumer_id, message_id, retention_class, bucket, \
        topic, partition, \"offset\", record_timestamp_ms, status, processed_at, payload) SELECT \
        consumer_id, 'm' || n, retention_class, oncebox.bucket_at(retention_class, now()), 't', 0, n, \
        1, 'skipped', now(), 'x' FROM generate_series(1, 100) n, oncebox.consumer";
    let pool = PgPool::connect(&cli.folder().get("ONCEBOX_DATABASE_URL").unwrap()).await.unwrap();
    sqlx::query(FILL).execute(&pool).await.unwrap();
    pool.close().await;
}

/// The program, on the databases of the fixture.
fn arguments(cli: &mut CliFixture, arguments: &[&str]) -> Command {
    let mut command = Command::new(program().unwrap());
    for name in ["ONCEBOX_DATABASE_URL", "ONCEBOX_MASTER_KEY", "ONCEBOX_CONFIG"] {
        command.env(name, cli.folder().get(name).unwrap());
    }
    command.args(arguments);
    command
}
