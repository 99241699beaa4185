//! Locks between tenants: nobody locks what is another's, and a migration gives way instead of
//! letting messages queue behind it.

use std::{collections::BTreeSet, time::Duration};

use oncebox_control::{Control, MigrationBounds};
use oncebox_model::InboxError;
use oncebox_tests::inbox::{InboxFixture, code, deliver, record};
use oncebox_tests::wait::DEADLINE;
use sqlx::{AssertSqlSafe, Connection, Executor, PgConnection};
use tokio::time::timeout;

/// One of everything that refers to a relation.
const OBJECTS: &str =
    "CREATE TABLE {v}.t (a int PRIMARY KEY, b text DEFAULT 'x' CHECK (length(b) < 9), g int \
        GENERATED ALWAYS AS (a + 1) STORED);
    CREATE VIEW {v}.vw AS SELECT * FROM {v}.t; CREATE MATERIALIZED VIEW {v}.mv AS SELECT * FROM \
        {v}.t; CREATE SEQUENCE {v}.s;
    CREATE TABLE {v}.p (a int) PARTITION BY RANGE (a); CREATE TABLE {v}.p1 PARTITION OF {v}.p FOR \
        VALUES FROM (0) TO (10);
    CREATE FUNCTION {v}.f() RETURNS bigint LANGUAGE sql BEGIN ATOMIC SELECT count(*) FROM {v}.t; \
        END;
    CREATE FUNCTION {v}.tr() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NULL; END';
    CREATE TRIGGER trg AFTER INSERT ON {v}.t FOR EACH ROW EXECUTE FUNCTION {v}.tr();
    CREATE RULE r AS ON INSERT TO {v}.p DO ALSO SELECT count(*) FROM {v}.t;
    CREATE STATISTICS {v}.st (dependencies) ON a, b FROM {v}.t; CREATE POLICY pol ON {v}.t USING \
        (true);";

/// Calls every function of the catalog that takes the number or the name of something with every
/// number and name of the victim's, and notes the calls that left a lock. Each is undone.
const CALLS: &str = r#"
CREATE TEMP TABLE locking (oid oid, name text, call text, locks text);
DO $$
DECLARE f record; c text; q text; l text; args text; ty text; candidates text[]; held text[];
BEGIN
    SELECT array_agg(o::text) INTO candidates FROM (
        SELECT oid AS o FROM pg_class WHERE relnamespace = '{v}'::regnamespace
        UNION ALL SELECT r.oid FROM pg_rewrite r JOIN pg_class c ON c.oid = r.ev_class WHERE c.relnamespace = '{v}'::regnamespace
        UNION ALL SELECT oid FROM pg_constraint WHERE connamespace = '{v}'::regnamespace
        UNION ALL SELECT g.oid FROM pg_trigger g JOIN pg_class c ON c.oid = g.tgrelid WHERE c.relnamespace = '{v}'::regnamespace
        UNION ALL SELECT d.oid FROM pg_attrdef d JOIN pg_class c ON c.oid = d.adrelid WHERE c.relnamespace = '{v}'::regnamespace
        UNION ALL SELECT oid FROM pg_proc WHERE pronamespace = '{v}'::regnamespace
        UNION ALL SELECT oid FROM pg_type WHERE typnamespace = '{v}'::regnamespace AND typtype = 'c'
        UNION ALL SELECT oid FROM pg_statistic_ext WHERE stxnamespace = '{v}'::regnamespace
        UNION ALL SELECT p.oid FROM pg_policy p JOIN pg_class c ON c.oid = p.polrelid WHERE c.relnamespace = '{v}'::regnamespace
    ) x (o);
    candidates := candidates || ARRAY['{v}.t', '{v}.vw', '{v}.mv', '{v}.s', '{v}.p', '{v}.p1', '{v}.f()', '{v}.f', '{v}'];
    FOR f IN SELECT p.oid, p.proname, p.proargtypes::oid[] AS types, p.pronargs FROM pg_proc p
        WHERE pronamespace = 'pg_catalog'::regnamespace AND prokind IN ('f', 'w') AND pronargs BETWEEN 1 AND 6
            -- What ends sessions, sleeps, or changes the server for all.
            AND proname !~ '^(pg_sleep|pg_terminate|pg_cancel|binary_upgrade|pg_advisory|pg_try_adv|pg_stop|pg_backup|pg_promote|pg_switch|pg_create_|pg_drop|pg_reload|pg_rotate|pg_wal_replay|pg_start|pg_log_|set_config|pg_notify|pg_read|pg_ls|pg_logical|pg_replication|lo_|lowrite|loread|pg_export|pg_copy|pg_import|pg_stat_reset|.*_to_xml)'
            AND EXISTS (SELECT FROM unnest(p.proargtypes::oid[]) a WHERE a IN ('oid'::regtype, 'regclass'::regtype, 'text'::regtype, 'name'::regtype,
                'regproc'::regtype, 'regprocedure'::regtype, 'regtype'::regtype))
            AND prorettype NOT IN ('cstring'::regtype, 'internal'::regtype, 'event_trigger'::regtype, 'trigger'::regtype)
    LOOP
        FOREACH c IN ARRAY candidates LOOP
            args := '';
            FOR i IN 1..f.pronargs LOOP
                ty := format_type(f.types[i - 1 + array_lower(f.types, 1)], NULL);
                args := args || CASE WHEN i > 1 THEN ', ' ELSE '' END || CASE
                    WHEN ty IN ('oid', 'regclass', 'regproc', 'regprocedure', 'regtype', 'text', 'name') THEN quote_literal(c) || '::' || ty
                    WHEN ty IN ('smallint', 'integer', 'bigint') THEN '1::' || ty
                    WHEN ty = 'boolean' THEN 'true' WHEN ty = '"char"' THEN '''r''::"char"' ELSE 'NULL::' || ty END;
            END LOOP;
            BEGIN
                SELECT coalesce(array_agg(relation::text || mode), '{}') INTO held FROM pg_locks WHERE pid = pg_backend_pid() AND relation IS NOT NULL;
                q := format('SELECT pg_catalog.%I(%s)', f.proname, args);
                EXECUTE q;
                SELECT string_agg(DISTINCT relation::regclass || ' ' || mode, ', ') INTO l FROM pg_locks WHERE pid = pg_backend_pid()
                    AND relation IN (SELECT oid FROM pg_class WHERE relnamespace = '{v}'::regnamespace) AND relation::text || mode <> ALL (held);
                RAISE EXCEPTION USING ERRCODE = 'LOCKS', MESSAGE = coalesce(l, '');
            EXCEPTION
                WHEN SQLSTATE 'LOCKS' THEN
                    IF sqlerrm <> '' THEN INSERT INTO locking VALUES (f.oid, f.proname, q, sqlerrm); END IF;
                WHEN others THEN NULL;
            END;
        END LOOP;
    END LOOP;
END $$"#;

async fn execute(connection: &mut PgConnection, sql: String) {
    connection.execute(sqlx::raw_sql(AssertSqlSafe(sql))).await.unwrap();
}

/// What could go wrong: a function of the catalog locks a table that is another tenant's to the end
/// of the transaction, and the other's migration, and behind that its messages, wait for it
/// (security finding 5).
#[tokio::test(flavor = "multi_thread")]
async fn no_function_locks_what_is_another_tenants() {
    let fixture = InboxFixture::new().await;
    let (victim, attacker) =
        (fixture.tenant("victim", "").await, fixture.tenant("mallory", "").await);
    let mut superuser = fixture.superuser().await;
    for sql in [OBJECTS, CALLS] {
        execute(&mut superuser, sql.replace("{v}", &victim.schema_name)).await;
    }
    let locking: Vec<(String, String, String)> = sqlx::query_as(
        "SELECT DISTINCT ON (oid) name, call, locks FROM locking ORDER BY oid, call",
    )
    .fetch_all(&mut superuser)
    .await
    .unwrap();
    println!("{locking:#?}");
    for known in ["pg_get_viewdef", "pg_partition_tree", "pg_get_ruledef", "nextval"] {
        assert!(locking.iter().any(|(name, ..)| name == known), "the calls do not find `{known}`");
    }
    let calls: Vec<(String, String)> =
        sqlx::query_as("SELECT call, locks FROM locking").fetch_all(&mut superuser).await.unwrap();
    let mut guest = fixture.guest(&attacker).await;
    let backend: i32 =
        sqlx::query_scalar("SELECT pg_backend_pid()").fetch_one(&mut guest).await.unwrap();
    let mut open = Vec::new();
    for (call, locks) in calls {
        let mut tx = guest.begin().await.unwrap();
        let answer = sqlx::query(AssertSqlSafe(call.clone())).execute(&mut *tx).await;
        // PostgreSQL answers with the error before it gives the locks back, and takes the next
        // statement after that.
        let _ = sqlx::query("SELECT 1").execute(&mut *tx).await;
        const HELD: &str = "SELECT count(*) FROM pg_locks l JOIN pg_class c ON c.oid = l.relation \
            WHERE l.pid = $1 AND c.relnamespace = $2::regnamespace";
        let held: i64 = sqlx::query_scalar(HELD)
            .bind(backend)
            .bind(&victim.schema_name)
            .fetch_one(&mut superuser)
            .await
            .unwrap();
        if held > 0 {
            open.push(format!("{call}: {locks}"));
        } else {
            assert_eq!(answer.as_ref().err().map(code).as_deref(), Some("42501"), "{call}");
        }
        tx.rollback().await.unwrap();
    }
    assert!(open.is_empty(), "a tenant locks what is another's by {open:#?}");
    fixture.finish().await;
}

fn bounded(control: &Control, attempts_max: u32) -> Control {
    control.clone().bounding_migrations(MigrationBounds {
        lock_timeout_ms: 200,
        attempts_max,
        ..MigrationBounds::default()
    })
}

/// What could go wrong: a migration waits for a lock without a bound, and messages queue behind it
/// and lose attempts (security finding 5). Somebody holds the table for as long as the test likes.
#[tokio::test(flavor = "multi_thread")]
async fn messages_go_on_while_a_migration_waits() {
    const MESSAGES: usize = 40;
    let fixture = InboxFixture::new().await;
    let consumer =
        fixture.simple("CREATE TABLE note (id text)", "batch = { messages_max = 4 }").await;
    let mut holder = fixture.superuser().await;
    execute(
        &mut holder,
        format!("BEGIN; LOCK TABLE {}.note IN ACCESS SHARE MODE", consumer.tenant.schema_name),
    )
    .await;
    let migration = tokio::spawn({
        let (control, tenant) = (bounded(&fixture.control, 10_000), consumer.tenant.clone());
        async move {
            control
                .tenant_databases()
                .apply_migration(&tenant, "waits", "ALTER TABLE note ADD COLUMN text text")
                .await
        }
    });
    let waits = format!(
        "SELECT EXISTS (SELECT FROM pg_stat_activity WHERE usename = '{}' AND wait_event_type = \
            'Lock')",
        consumer.tenant.owner_login
    );
    fixture.until(&waits).await;
    let host = fixture.host(&consumer);
    let script = format!("sql INSERT INTO {}.note (id) VALUES ('x')", consumer.tenant.schema_name);
    let messages: Vec<_> =
        (0..MESSAGES as i64).map(|offset| record(offset, &format!("m{offset}"), &script)).collect();
    let errors = timeout(DEADLINE, deliver(&host, &messages))
        .await
        .expect("messages go on while the migration waits");
    assert_eq!(errors.len(), 0, "{errors:?}");
    assert!(!migration.is_finished(), "the table is still held");
    // While the first one pauses, another may try and fail by itself.
    let refused = async {
        loop {
            let again = bounded(&fixture.control, 1)
                .tenant_databases()
                .apply_migration(&consumer.tenant, "beside", "ALTER TABLE note ADD COLUMN n int")
                .await;
            let said = again.expect_err("the table is still held").to_string();
            if said.contains("a migration of tenant") && said.contains("is being applied") {
                return;
            }
        }
    };
    timeout(DEADLINE, refused).await.expect("a migration beside another is refused");
    execute(&mut holder, "ROLLBACK".to_owned()).await;
    assert!(
        timeout(DEADLINE, migration)
            .await
            .expect("it is applied when nobody holds the table")
            .unwrap()
            .unwrap()
    );
    let well = "SELECT count(*) FROM oncebox.inbox WHERE status = 'completed' AND attempts = 1 AND \
        last_error IS NULL";
    assert_eq!(fixture.number(well).await, MESSAGES as i64);
    fixture.finish().await;
}

/// What could go wrong: a migration that gives way does not say to whom.
#[tokio::test(flavor = "multi_thread")]
async fn a_migration_that_gives_way_names_what_holds_the_lock() {
    let fixture = InboxFixture::new().await;
    let tenant = fixture.tenant("acme", "CREATE TABLE note (id text)").await;
    let mut holder = fixture.superuser().await;
    execute(
        &mut holder,
        format!("BEGIN; LOCK TABLE {}.note IN ACCESS SHARE MODE", tenant.schema_name),
    )
    .await;
    let backend: i32 =
        sqlx::query_scalar("SELECT pg_backend_pid()").fetch_one(&mut holder).await.unwrap();
    let applied = bounded(&fixture.control, 3)
        .tenant_databases()
        .apply_migration(
            &tenant,
            "waits",
            "CREATE TABLE other (id int); ALTER TABLE note ADD COLUMN n int",
        )
        .await;
    let error = applied.unwrap_err();
    let said = error.to_string();
    assert!(matches!(error, InboxError::Conflict { .. }), "{error:?}");
    for part in [
        "migration `waits` was not applied: line 1",
        "tried 3 times",
        ".note` is held by process",
        &format!("process {backend},"),
        "apply the migration again",
    ] {
        assert!(said.contains(part), "`{part}` is not in: {said}");
    }
    execute(&mut holder, "ROLLBACK".to_owned()).await;
    assert_eq!(
        fixture.number("SELECT count(*) FROM oncebox.tenant_migration WHERE name = 'waits'").await,
        0
    );
    let table = format!(
        "SELECT count(*) FROM pg_class WHERE relname = 'other' AND relnamespace = \
            '{}'::regnamespace",
        tenant.schema_name
    );
    assert_eq!(fixture.number(table).await, 0, "nothing of it is kept");
    fixture.finish().await;
}

/// What could go wrong: a tenant's migration runs for ever, or fills the disk (security finding 6).
#[tokio::test(flavor = "multi_thread")]
async fn migrations_are_bounded() {
    let fixture = InboxFixture::new().await;
    let tenant = fixture.tenant("acme", "CREATE TABLE note (id numeric)").await;
    let limited = format!(
        "SELECT count(*) FROM pg_db_role_setting s, unnest(s.setconfig) c WHERE c LIKE \
            'temp_file_limit=%' \
         AND s.setrole IN ('{}'::regrole, '{}'::regrole)",
        tenant.login, tenant.owner_login
    );
    assert_eq!(fixture.number(limited).await, 2, "both logins have a bound on temporary files");
    fixture
        .execute(format!("INSERT INTO {}.note SELECT generate_series(1, 3000)", tenant.schema_name))
        .await;
    let control = fixture.control.clone().bounding_migrations(MigrationBounds {
        statement_timeout_ms: 300,
        ..MigrationBounds::default()
    });
    let slow = "ALTER TABLE note ADD CONSTRAINT slow CHECK (length((factorial(20000 + id::bigint % \
        7))::text) > 1)";
    let said = timeout(DEADLINE, control.tenant_databases().apply_migration(&tenant, "slow", slow))
        .await
        .expect("it is stopped")
        .unwrap_err()
        .to_string();
    assert!(
        said.contains(
            "migration `slow` was not applied: line 1: canceling statement due to statement timeout"
        ),
        "{said}"
    );
    let open =
        format!("SELECT count(*) FROM pg_stat_activity WHERE usename = '{}'", tenant.owner_login);
    let before = tokio::time::Instant::now() + DEADLINE;
    while fixture.number(open.clone()).await > 0 {
        assert!(tokio::time::Instant::now() < before, "its session goes on");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    fixture.finish().await;
}

/// What could go wrong: docs/isolation.md calls a function closed that is not, or does not know of
/// one (security finding 9).
#[tokio::test(flavor = "multi_thread")]
async fn the_functions_that_are_closed_are_those_of_the_page() {
    const DOCS: &str = include_str!("../../../docs/isolation.md");
    const CLOSED: &str = "SELECT DISTINCT p.proname::text FROM pg_proc p WHERE p.pronamespace = \
        'pg_catalog'::regnamespace \
        AND NOT has_function_privilege($1, p.oid, 'EXECUTE') \
        AND NOT EXISTS (SELECT FROM pg_init_privs i WHERE i.objoid = p.oid AND i.classoid = \
        'pg_proc'::regclass)";
    let fixture = InboxFixture::new().await;
    let tenant = fixture.tenant("acme", "").await;
    let found: BTreeSet<String> = sqlx::query_scalar(CLOSED)
        .bind(&tenant.login)
        .fetch_all(&fixture.pool)
        .await
        .unwrap()
        .into_iter()
        .collect();
    let section = DOCS
        .split("### Functions that are closed")
        .nth(1)
        .expect("the page has the list")
        .split("\n#")
        .next()
        .unwrap();
    let listed: BTreeSet<String> =
        section.split('`').skip(1).step_by(2).map(str::to_owned).collect();
    let (unknown, open): (Vec<_>, Vec<_>) =
        (found.difference(&listed).collect(), listed.difference(&found).collect());
    assert!(
        unknown.is_empty() && open.is_empty(),
        "closed, and not in the page: {unknown:?}; in the page, and open: {open:?}"
    );
    let mut guest = fixture.guest(&tenant).await;
    for tells in [
        "pg_xact_status('3')",
        "pg_blocking_pids(1)",
        "pg_database_size(current_database())",
        "pg_control_system()",
        "txid_status(3)",
        "pg_tablespace_size('pg_default')",
    ] {
        let refused =
            sqlx::query(AssertSqlSafe(format!("SELECT {tells}"))).execute(&mut guest).await;
        assert_eq!(refused.as_ref().err().map(code).as_deref(), Some("42501"), "{tells}");
    }
    fixture.finish().await;
}
