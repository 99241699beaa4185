//! The functions of the host in a database are those of the newest program that was there, whole
//! and with their privileges, whoever starts when.

use std::collections::BTreeMap;

use futures::future::join_all;
use oncebox_control::{Functions, HostLimits, SCHEMA_NUMBER, Severity, schema};
use oncebox_model::InboxError;
use oncebox_tests::inbox::InboxFixture;
use sqlx::{Connection, PgConnection, postgres::PgConnectOptions};

/// The program of a release so many after this one.
fn later(releases: i32) -> Functions {
    Functions { schema_number: SCHEMA_NUMBER + releases, ..Functions::of_this_program() }
}

/// The same program with another text of a function.
fn with(mut program: Functions, function: &str, from: &str, to: &str) -> Functions {
    let of_it = format!("FUNCTION {function}(");
    let text = program.texts.iter_mut().find(|text| text.contains(&of_it)).unwrap();
    assert!(text.contains(from), "`{function}` does not say `{from}` any more");
    *text = text.replace(from, to).into();
    program
}

/// The same program without a function.
fn without(mut program: Functions, function: &str) -> Functions {
    program.texts.retain(|text| !text.contains(&format!("FUNCTION {function}(")));
    program
}

/// Everything about the functions of a database: text, rights, settings, owner, and who may call
/// them; by name and parameters.
async fn functions(connection: &mut PgConnection) -> BTreeMap<String, String> {
    const FUNCTIONS: &str = "SELECT p.oid::regprocedure::text, \
            row(p.prosrc, p.prosecdef, p.proconfig, p.provolatile, p.proowner::regrole, \
            pg_get_function_arguments(p.oid), pg_get_function_result(p.oid), \
            (SELECT array_agg(a.grantee::regrole::text ORDER BY a.grantee::regrole::text) FROM \
            aclexplode(coalesce(p.proacl, acldefault('f', p.proowner))) a))::text \
        FROM pg_proc p WHERE p.pronamespace IN ('oncebox'::regnamespace, \
            'oncebox_host'::regnamespace)";
    let rows: Vec<_> = sqlx::query_as(FUNCTIONS).fetch_all(connection).await.unwrap();
    rows.into_iter().collect()
}

/// What is recorded of them, by name: hash, number and time.
async fn recorded(connection: &mut PgConnection) -> BTreeMap<String, String> {
    const RECORDED: &str = "SELECT name, row(hash, definition_hash, schema_number, \
        applied_at)::text FROM oncebox.function";
    let rows: Vec<_> = sqlx::query_as(RECORDED).fetch_all(connection).await.unwrap();
    rows.into_iter().collect()
}

/// Functions and record of a test's database.
async fn state(fixture: &InboxFixture) -> [BTreeMap<String, String>; 2] {
    let mut connection = fixture.superuser().await;
    let state = [functions(&mut connection).await, recorded(&mut connection).await];
    connection.close().await.unwrap();
    state
}

/// Start a program on the database.
async fn start(fixture: &InboxFixture, program: &Functions) -> Result<(), InboxError> {
    schema::migrate_with(&fixture.superuser_options(), program).await.map(drop)
}

/// What could go wrong: a host of the release before, which starts later, puts its texts back.
#[tokio::test(flavor = "multi_thread")]
async fn an_older_host_puts_no_older_text_back() {
    let fixture = InboxFixture::new().await;
    fixture.tenant("acme", "").await;
    let release = "oncebox_host.release";
    let mut newer = with(without(later(1), "oncebox.edit"), release, "RETURN FOUND", "RETURN NULL");
    newer.texts.push(
        "CREATE OR REPLACE FUNCTION oncebox.newer() RETURNS int LANGUAGE plpgsql AS $$ BEGIN \
            RETURN 1; END $$;"
            .into(),
    );
    let shipped = state(&fixture).await;
    start(&fixture, &newer).await.unwrap();
    let left = state(&fixture).await;
    assert_ne!(left[0], shipped[0]);
    start(&fixture, &Functions::of_this_program()).await.unwrap();
    assert_eq!(state(&fixture).await, left, "the older host changed something");
    // Nor does its doctor print how to.
    let findings = fixture.control.doctor().run(HostLimits { connections_max: 8 }).await.unwrap();
    let code: Vec<_> = findings.iter().filter(|finding| finding.check == "host_code").collect();
    assert!(
        matches!(code[..], [one] if one.severity == Severity::Unknown && one.sql.is_none()),
        "{code:#?}"
    );
    // The newer one has nothing to do when it starts again.
    start(&fixture, &newer).await.unwrap();
    assert_eq!(state(&fixture).await, left);
    // A release that differs in nothing but what it drops has superseded the others too.
    start(&fixture, &without(newer.clone(), "oncebox.newer")).await.unwrap();
    start(
        &fixture,
        &without(Functions { schema_number: SCHEMA_NUMBER + 2, ..newer }, "oncebox.newer"),
    )
    .await
    .unwrap();
    start(&fixture, &later(1)).await.unwrap();
    assert!(!state(&fixture).await[0].keys().any(|name| name.contains("edit(")));
    fixture.finish().await;
}

/// What could go wrong: a text was changed, by a program of the same number or by hand, and stays.
#[tokio::test(flavor = "multi_thread")]
async fn a_changed_text_is_repaired_by_an_equal_program() {
    let fixture = InboxFixture::new().await;
    fixture.tenant("acme", "").await;
    let [shipped, _] = state(&fixture).await;
    let other = with(later(0), "oncebox_host.release", "RETURN FOUND", "RETURN NULL");
    start(&fixture, &other).await.unwrap();
    assert_ne!(state(&fixture).await[0], shipped);
    start(&fixture, &later(0)).await.unwrap();
    assert_eq!(state(&fixture).await[0], shipped);
    for change in [
        "ALTER FUNCTION oncebox_host.claim SET search_path = public",
        "ALTER FUNCTION oncebox_host.claim SECURITY INVOKER",
        "DROP FUNCTION oncebox_host.partition_cleared",
        "CREATE OR REPLACE FUNCTION oncebox.bucket_at(p_class smallint, p_at timestamptz) RETURNS \
            timestamptz LANGUAGE sql STABLE AS 'SELECT p_at'",
        "CREATE FUNCTION oncebox_host.lease_ends() RETURNS int LANGUAGE sql AS 'SELECT 1'",
        "DROP FUNCTION oncebox_host.release; CREATE FUNCTION oncebox_host.release(int) RETURNS int \
            LANGUAGE sql AS 'SELECT 1'",
        "DROP FUNCTION oncebox.changed_since; CREATE FUNCTION oncebox.changed_since(p_row \
            oncebox.inbox, p_time timestamptz) RETURNS int LANGUAGE sql AS 'SELECT 1'",
    ] {
        fixture.execute(change).await;
        assert_ne!(state(&fixture).await[0], shipped, "{change}");
        start(&fixture, &later(0)).await.unwrap();
        assert_eq!(state(&fixture).await[0], shipped, "{change}");
    }
    fixture.finish().await;
}

/// What could go wrong: a function gets another signature, and is there twice, or comes back open
/// to everybody, or closed to the tenants, or with the rights of its caller.
#[tokio::test(flavor = "multi_thread")]
async fn another_signature_replaces_the_function_with_its_privileges() {
    let fixture = InboxFixture::new().await;
    fixture.tenant("acme", "").await;
    let release = "oncebox_host.release";
    let [shipped, _] = state(&fixture).await;
    let rest = |functions: &BTreeMap<String, String>| -> BTreeMap<_, _> {
        functions.clone().into_iter().filter(|(name, _)| !name.contains(".release(")).collect()
    };
    let mut releases = 0;
    for (from, to) in [
        ("p_delay_ms bigint)", "p_delay_ms bigint, p_more int)"),
        ("RETURNS boolean", "RETURNS text"),
        ("p_delay_ms", "p_pause_ms"),
    ] {
        releases += 1;
        start(&fixture, &with(later(releases), release, from, to)).await.unwrap();
        let [functions, _] = state(&fixture).await;
        assert_eq!(functions.len(), shipped.len(), "{to}");
        assert_eq!(rest(&functions), rest(&shipped), "{to}");
        const SOUND: &str = "SELECT p.prosecdef AND p.proconfig @> ARRAY['search_path=pg_catalog, \
                pg_temp'] AND p.proowner = n.nspowner \
                AND NOT EXISTS (SELECT FROM aclexplode(p.proacl) a WHERE a.grantee = 0) \
                AND (SELECT count(*) FROM oncebox.tenant t WHERE has_function_privilege(t.login, \
                p.oid, 'EXECUTE')) = 1 \
            FROM pg_proc p JOIN pg_namespace n ON n.oid = p.pronamespace \
            WHERE n.nspname = 'oncebox_host' AND p.proname = 'release'";
        let is_sound: Vec<bool> = sqlx::query_scalar(SOUND).fetch_all(&fixture.pool).await.unwrap();
        assert_eq!(is_sound, [true], "{to}");
        // And back.
        releases += 1;
        start(&fixture, &later(releases)).await.unwrap();
        assert_eq!(state(&fixture).await[0], shipped, "{to}");
    }
    fixture.finish().await;
}

/// What could go wrong: a host ends in the middle, or PostgreSQL refuses one of the texts, and some
/// functions are of one release and some of another.
#[tokio::test(flavor = "multi_thread")]
async fn functions_change_together_or_not_at_all() {
    let fixture = InboxFixture::new().await;
    let tenant = fixture.tenant("acme", "CREATE TABLE item (id int PRIMARY KEY);").await;
    assert!(fixture.control.shadows().install_capture(&tenant).await.unwrap().is_empty());
    let before = state(&fixture).await;
    let changed = with(later(1), "oncebox.authorize", "'denied'", "'refused'");
    let mut broken = changed.clone();
    broken.texts.push(
        "CREATE OR REPLACE FUNCTION oncebox.broken() RETURNS int LANGUAGE plpgsql AS $$ BEGIN \
            RETRUN 1; END $$;"
            .into(),
    );
    // The tenant's triggers need it.
    let needed = without(changed.clone(), "oncebox_host.capture_row");
    for program in [broken, needed] {
        let refused = start(&fixture, &program).await.unwrap_err();
        assert!(matches!(refused, InboxError::Refused(_)), "{refused:?}");
        assert_eq!(state(&fixture).await, before, "{refused}");
    }
    start(&fixture, &changed).await.unwrap();
    let after = state(&fixture).await;
    assert!(after[0] != before[0] && after[0].len() == before[0].len());
    fixture.finish().await;
}

/// What could go wrong: a plan names no function that an update would make, replace or drop.
#[tokio::test(flavor = "multi_thread")]
async fn a_plan_names_the_functions_that_would_change() {
    let fixture = InboxFixture::new().await;
    let planned = async || {
        let mut plans = fixture.control.tenant_databases().migration_plans().await.unwrap();
        let (label, plan) = plans.pop().unwrap();
        assert!(label.database.is_none() && plans.is_empty());
        plan.unwrap()
    };
    assert!(planned().await.is_empty());
    let mut earlier = with(
        without(Functions::of_this_program(), "oncebox.edit"),
        "oncebox_host.release",
        "RETURN FOUND",
        "RETURN NULL",
    );
    earlier.texts.push(
        "CREATE OR REPLACE FUNCTION oncebox.older() RETURNS int LANGUAGE plpgsql AS $$ BEGIN \
            RETURN 1; END $$;"
            .into(),
    );
    start(&fixture, &earlier).await.unwrap();
    let plan = planned().await;
    assert_eq!(plan.functions, ["oncebox.edit", "oncebox.older", "oncebox_host.release"]);
    assert!(plan.migrations.is_empty() && !plan.is_newer);
    start(&fixture, &later(0)).await.unwrap();
    assert!(planned().await.is_empty());
    start(&fixture, &later(1)).await.unwrap();
    assert!(planned().await.is_newer);
    fixture.finish().await;
}

/// What could go wrong: hosts of two releases start at once, and which texts are left is chance.
#[tokio::test(flavor = "multi_thread")]
async fn of_hosts_that_start_at_once_the_newest_leaves_its_texts() {
    let fixture = InboxFixture::new().await;
    fixture.tenant("acme", "").await;
    let newer = with(later(1), "oncebox_host.release", "RETURN FOUND", "RETURN NULL");
    let programs = [later(0), newer.clone(), later(0), newer.clone(), later(0)];
    let started = join_all(programs.iter().map(|program| start(&fixture, program))).await;
    assert!(started.iter().all(Result::is_ok), "{started:?}");
    let left = state(&fixture).await;
    start(&fixture, &newer).await.unwrap();
    assert_eq!(state(&fixture).await, left, "the newest was not left");
    fixture.finish().await;
}

/// What could go wrong: the functions of a tenant's own database stay behind, or are put back by an
/// older host.
#[tokio::test(flavor = "multi_thread")]
async fn functions_of_a_tenants_own_database_are_brought_up_to_date_too() {
    let fixture = InboxFixture::new().await;
    let database = InboxFixture::another_database().await;
    let tenant = fixture.tenant_at("apart", &database, "").await;
    let options: PgConnectOptions = database.url().parse().unwrap();
    let mut connection = database.connect().await.unwrap();
    let shipped = functions(&mut connection).await;

    let other = with(later(0), "oncebox_host.release", "RETURN FOUND", "RETURN NULL");
    schema::migrate_with(&options, &other).await.unwrap();
    assert_ne!(functions(&mut connection).await, shipped);
    fixture.control.tenant_databases().prepare(&tenant).await.unwrap();
    assert_eq!(functions(&mut connection).await, shipped);

    let newer = Functions { schema_number: SCHEMA_NUMBER + 1, ..other };
    schema::migrate_with(&options, &newer).await.unwrap();
    let left = functions(&mut connection).await;
    fixture.control.tenant_databases().prepare(&tenant).await.unwrap();
    assert_eq!(functions(&mut connection).await, left, "the older host changed something");
    connection.close().await.unwrap();
    fixture.finish().await;
}
