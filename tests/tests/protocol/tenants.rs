//! Tenants come, change and go while messages flow: new secrets, a new master key, rest, limits,
//! schema, end.

use std::{
    os::unix::process::ExitStatusExt,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use oncebox_control::{Control, MasterKey};
use oncebox_inbox::{Budget, ConsumerInbox, SessionSettings, Sessions};
use oncebox_model::{InboxError, hooks::REMOVAL_POINTS};
use oncebox_tests::{
    cli::{Access, CliFixture},
    host::{HostFixture, Options, program},
    inbox::{Guest, InboxFixture, TestConsumer, code, drive, record, step, take},
    load::{Load, Work},
    wait::DEADLINE,
};
use serde_json::{Value, json};
use sqlx::{AssertSqlSafe, Connection, Executor, PgConnection, postgres::PgConnectOptions};
use tokio::{
    process::Command,
    time::{sleep, timeout},
};

const QUICK: &str = "retry = { backoff_min_ms = 1, backoff_max_ms = 20 }";

/// A host of which the test holds the sessions.
fn host(fixture: &InboxFixture, consumer: &TestConsumer) -> (Arc<ConsumerInbox>, Arc<Sessions>) {
    let sessions = Sessions::of(
        fixture.control.tenant_databases().session_target(&consumer.tenant).unwrap(),
        &SessionSettings::default(),
        Budget::new(16),
    );
    let (row, policy) = (&consumer.row, consumer.policy.clone());
    let inbox = ConsumerInbox::new(
        row.consumer_id,
        row.tenant.clone(),
        row.name.clone(),
        policy,
        "host".into(),
        sessions.clone(),
        fixture.scripts(),
    );
    (inbox, sessions)
}

/// What could go wrong: while credentials change, a message is lost, doubled, or blamed for a login
/// that was refused; or what was good before is good for ever. S3-014.
#[tokio::test(flavor = "multi_thread")]
async fn new_credentials_cost_no_message() {
    let fixture = InboxFixture::new().await;
    let consumer = fixture.simple("", QUICK).await;
    let (inbox, sessions) = host(&fixture, &consumer);
    let before = fixture.guest_options(&consumer.tenant);
    let mut old = Guest::connect(&fixture, &consumer).await;
    let script = |n: i64| if n % 7 == 0 { "before 2 retry 1\nsleep 2" } else { "sleep 2" };
    let records: Vec<_> = (0..400).map(|n| record(n, &format!("m{n}"), script(n))).collect();

    let settled = AtomicBool::new(false);
    let delivering = async {
        let mut partition = take(&inbox).await;
        let errors = drive(&mut partition, &records).await;
        partition.close().await;
        settled.store(true, Ordering::SeqCst);
        errors
    };
    let retrying = async {
        while !settled.load(Ordering::SeqCst) {
            if !matches!(step(&inbox).await, Ok(1..)) {
                sleep(Duration::from_millis(5)).await;
            }
        }
    };
    let rotating = async {
        let mut rotations = 0;
        while rotations < 5 || !settled.load(Ordering::SeqCst) {
            rotate(&fixture, &sessions).await;
            rotations += 1;
            sleep(Duration::from_millis(100)).await;
        }
        rotations
    };
    let (errors, (), rotations) = tokio::join!(delivering, retrying, rotating);
    println!(
        "{rotations} rotations under load; {} errors of the host: {:?}",
        errors.len(),
        errors.first().map(ToString::to_string)
    );
    fixture.retry_until_settled(&inbox).await;
    for n in 0..400 {
        let row = fixture.row(&consumer, &format!("m{n}")).await;
        assert_eq!(
            (row.status.as_str(), row.attempts, row.crashes),
            ("completed", if n % 7 == 0 { 2 } else { 1 }, 0),
            "{row:?}"
        );
    }

    // The password before is refused at once, the secret before after its end.
    let error = PgConnection::connect_with(&before).await.expect_err("the password of before");
    assert_eq!(code(&error), "28P01");
    assert_eq!(
        code(&old.claim(&["late"]).await.unwrap_err()),
        "42501",
        "a secret that is two rotations old"
    );
    old.secret = fixture.secret(&fixture.control.tenants().get("acme").await.unwrap());
    fixture.control.tenants().rotate_credentials("acme").await.unwrap();
    claims(&mut old).await.expect("the secret before counts for ten minutes");
    fixture.execute("UPDATE oncebox.tenant SET secret_before_until = now()").await;
    assert_eq!(code(&claims(&mut old).await.unwrap_err()), "42501", "the secret before has ended");
    fixture.finish().await;
}

/// A rotation of which the host hears a moment later; logins in between wait for it.
async fn rotate(fixture: &InboxFixture, sessions: &Arc<Sessions>) {
    let tenant = fixture.control.tenants().rotate_credentials("acme").await.unwrap();
    let logging_in = (0..6).map(|_| async {
        sessions.begin().await.map(|transaction| transaction.rollback()).map(drop)
    });
    let logging_in = futures::future::join_all(logging_in);
    let renewing = async {
        sleep(Duration::from_millis(50)).await;
        let credentials = fixture.control.tenant_databases().credentials(&tenant).unwrap();
        sessions.renew(&credentials.guest_password, credentials.secret);
    };
    let (began, ()) = tokio::join!(logging_in, renewing);
    began.into_iter().for_each(|began| began.unwrap());
}

async fn claims(guest: &mut Guest) -> Result<(), sqlx::Error> {
    guest.execute("BEGIN ISOLATION LEVEL READ COMMITTED READ WRITE").await?;
    let claimed = guest.claim(&["late"]).await;
    guest.execute("ROLLBACK").await?;
    claimed.map(drop)
}

/// What could go wrong: a running host does not hear of a rotation, and its connections are refused
/// for ever.
#[tokio::test(flavor = "multi_thread")]
async fn a_host_that_runs_goes_on_with_new_credentials() {
    let fixture = HostFixture::with(Options { partitions: 1, ..Options::default() }).await.unwrap();
    let host = fixture.start_ready("a", &[]).await.unwrap();
    for round in 0..3 {
        let load = Load::of([Work::Pay, Work::Pay, Work::Fails(2), Work::Pay, Work::Open])
            .named(&format!("r{round}"));
        fixture.send(&load).await.unwrap();
        fixture.control.tenants().rotate_credentials(&fixture.tenant.name).await.unwrap();
    }
    fixture.wait_settled().await.unwrap();
    // Only a login with the present password works from here on.
    fixture.cut_sessions().await.unwrap();
    fixture.send(&Load::of([Work::Pay, Work::Pay]).named("after")).await.unwrap();
    fixture.wait_settled().await.unwrap();
    fixture.check().await.unwrap();
    host.stop().await.unwrap();
}

fn key() -> MasterKey {
    MasterKey::parse(&MasterKey::generate()).unwrap()
}

/// What could go wrong: a key is changed for some tenants and not for others, or a host with the
/// wrong one fails in a way that nobody understands.
#[tokio::test(flavor = "multi_thread")]
async fn everything_is_sealed_under_a_new_master_key_or_nothing() {
    let fixture = InboxFixture::new().await;
    let (old, new, other) = (key(), key(), key());
    let with = |key: &MasterKey| Control::new(fixture.superuser_options(), key.clone(), "test");
    let (before, after) = (with(&old), with(&new));
    before.tenants().create("acme").await.unwrap();
    // As an installation has it that is older than sealed credentials.
    let derived = before.tenants().create("derived").await.unwrap();
    let hash = hex::encode(sha256(&old.secret(&derived.login)));
    fixture
        .execute(format!(
            "UPDATE oncebox.tenant SET credentials = NULL, secret_hash = '\\x{hash}' \
        WHERE name = 'derived'"
        ))
        .await;
    let mut credentials = Vec::new();
    for name in ["acme", "derived"] {
        credentials.push(
            before
                .tenant_databases()
                .credentials(&before.tenants().get(name).await.unwrap())
                .unwrap(),
        );
    }
    let error = after
        .tenant_databases()
        .credentials(&after.tenants().get("acme").await.unwrap())
        .unwrap_err()
        .to_string();
    assert!(
        error.contains(&old.name()) && error.contains("keys.previous_master_key_file"),
        "{error}"
    );
    let error = after
        .tenant_databases()
        .credentials(&after.tenants().get("derived").await.unwrap())
        .unwrap_err()
        .to_string();
    assert!(error.contains("was made under another master key"), "{error}");
    let both = with(&new.clone().with_previous(&old));
    assert_eq!(
        both.tenant_databases().credentials(&both.tenants().get("derived").await.unwrap()).unwrap(),
        credentials[1],
        "a host that has both"
    );

    // One that opens with neither: nothing changes.
    with(&other).tenants().create("strange").await.unwrap();
    let sealed = "SELECT count(*) FROM oncebox.tenant WHERE credentials IS NOT NULL";
    let error = before.tenants().rotate_master_key(&new).await.unwrap_err().to_string();
    assert!(error.contains(&other.name()), "{error}");
    assert_eq!(fixture.number(sealed).await, 2, "`derived` was sealed all the same");
    fixture.execute("DELETE FROM oncebox.tenant WHERE name = 'strange'").await;

    let rotated = before.tenants().rotate_master_key(&new).await.unwrap();
    assert_eq!((rotated.sealed, rotated.unchanged, &rotated.key), (2, 0, &new.name()));
    for again in [&before, &after] {
        let rotated = again.tenants().rotate_master_key(&new).await.unwrap();
        assert_eq!((rotated.sealed, rotated.unchanged), (0, 2));
    }
    for (name, credentials) in ["acme", "derived"].into_iter().zip(credentials) {
        let tenant = after.tenants().get(name).await.unwrap();
        assert_eq!(after.tenant_databases().credentials(&tenant).unwrap(), credentials, "{name}");
        assert!(matches!(
            before.tenant_databases().credentials(&tenant),
            Err(InboxError::Sealed(_))
        ));
    }
    assert_eq!(
        fixture.number("SELECT count(*) FROM oncebox.audit WHERE action = 'keys.rotate'").await,
        1
    );
    fixture.finish().await;
}

fn sha256(bytes: &[u8]) -> Vec<u8> {
    use sha2::Digest;
    sha2::Sha256::digest(bytes).to_vec()
}

/// What could go wrong: a suspended tenant changes something, cannot be looked at, or nobody hears
/// of it.
#[tokio::test(flavor = "multi_thread")]
async fn a_suspended_tenant_is_only_looked_at() {
    let mut cli = CliFixture::open(Access::Server).await;
    cli.ok(&["tenant", "create", "acme"]).await;
    let token = |answer: Value| answer["token"].as_str().unwrap().to_owned();
    let admins = token(
        cli.json(&["token", "create", "theirs", "--tenant", "acme", "--role", "admin"]).await,
    );
    let ours = cli.folder().get("ONCEBOX_TOKEN").unwrap();
    let suspended = cli.json(&["tenant", "suspend", "acme"]).await;
    assert_eq!(
        (&suspended["state"], suspended["revision"].as_i64()),
        (&json!("suspended"), Some(1))
    );
    assert_eq!(
        cli.json(&["tenant", "suspend", "acme"]).await["revision"],
        1,
        "again, it changes nothing"
    );

    cli.file("table.sql", "CREATE TABLE note (id int)");
    cli.folder().set("ONCEBOX_TOKEN", &admins);
    let refused = "tenant `acme` is suspended, and only looked at; `oncebox tenant resume acme` is \
        for whoever runs the host";
    cli.fails(&["token", "create", "more", "--tenant", "acme", "--role", "viewer"], refused).await;
    cli.fails(&["tenant", "rotate-credentials", "acme"], refused).await;
    cli.fails(
        &["tenant", "schema", "apply", "acme", "table.sql"],
        &format!("`table.sql`: {refused}"),
    )
    .await;
    cli.fails(
        &["tenant", "resume", "acme"],
        "this is for whoever runs the host; the token is of tenant `acme`",
    )
    .await;
    assert_eq!(cli.json(&["tenant", "show", "acme"]).await["state"], "suspended");

    cli.folder().set("ONCEBOX_TOKEN", &ours);
    cli.file("good.wasm", include_bytes!("../../../guest-examples/components/ledger.wasm"));
    let said = cli
        .run(&["version", "upload", "good.wasm", "--tenant", "acme", "--handler", "ledger"])
        .await;
    assert!(said.stderr.contains(refused), "{}", said.stderr);
    cli.ok(&["tenant", "schema", "apply", "acme", "table.sql"]).await;
    assert_eq!(cli.json(&["tenant", "resume", "acme"]).await["state"], "active");
    let actions = cli
        .rows("SELECT to_jsonb(action) FROM oncebox.audit WHERE tenant = 'acme' ORDER BY audit_id")
        .await;
    assert_eq!(
        actions,
        ["tenant.create", "token.create", "tenant.suspend", "tenant.migrate", "tenant.resume"]
            .map(|action| json!(action))
    );
}

/// What could go wrong: a limit is taken that cannot work, or one that nobody named changes.
#[tokio::test(flavor = "multi_thread")]
async fn limits_are_changed_one_by_one() {
    let cli = CliFixture::open(Access::Database).await;
    cli.ok(&["tenant", "create", "acme"]).await;
    let limits =
        cli.json(&["tenant", "limits", "acme", "--weight", "300", "--connections-max", "4"]).await;
    assert_eq!(
        (&limits["weight"], &limits["connections_max"], &limits["memory_bytes_max"]),
        (&json!(300), &json!(4), &Value::Null)
    );
    let limits = cli
        .json(&[
            "tenant",
            "limits",
            "acme",
            "--connections-max",
            "none",
            "--messages-per-second",
            "50",
        ])
        .await;
    assert_eq!(
        (&limits["weight"], &limits["connections_max"], &limits["messages_per_second"]),
        (&json!(300), &Value::Null, &json!(50))
    );
    assert_eq!(cli.json(&["tenant", "limits", "acme"]).await, limits);
    cli.fails(
        &["tenant", "limits", "acme", "--weight", "0", "--memory-bytes-max", "1"],
        "`memory_bytes_max` is 1; it must be 1048576 to 1099511627776, or none; `weight` is 0; it \
            must be 1 to 10000",
    )
    .await;
    assert_eq!(
        cli.json(&["tenant", "show", "acme"]).await["revision"],
        2,
        "what changed nothing or was refused is no revision"
    );
}

/// What could go wrong: half of a file is applied, or something that reaches past the schema.
#[tokio::test(flavor = "multi_thread")]
async fn a_schema_is_applied_from_a_folder_each_file_once() {
    let cli = CliFixture::open(Access::Database).await;
    cli.ok(&["tenant", "create", "acme"]).await;
    std::fs::create_dir(cli.dir().join("schema")).unwrap();
    cli.file("schema/0002_row.sql", "INSERT INTO note VALUES (1, 'it''s; one')");
    cli.file(
        "schema/0001_note.sql",
        "-- notes\nCREATE TABLE note (id int, text text);\nCOMMENT ON TABLE note IS $$;$$;",
    );
    cli.file("schema/README.md", "COMMIT");
    let applied = cli.json(&["tenant", "schema", "apply", "acme", "schema"]).await;
    assert_eq!(applied, json!({ "applied": ["0001_note", "0002_row"], "known": [] }));
    assert_eq!(
        cli.ok(&["tenant", "schema", "apply", "acme", "schema"]).await,
        "tenant `acme` holds all of them already\n"
    );

    cli.file("schema/0003_more.sql", "CREATE TABLE more (id int);");
    cli.file(
        "schema/0004_bad.sql",
        "CREATE TABLE never (id int);\nGRANT ALL ON never TO PUBLIC;\nCOMMIT; CREATE RULE r AS ON \
            INSERT TO note DO ALSO NOTIFY x",
    );
    let said = cli.run(&["tenant", "schema", "apply", "acme", "schema"]).await;
    let lines: Vec<_> = said.stderr.lines().collect();
    assert_eq!(lines[0], "error: nothing was applied, for 3 reasons", "{}", said.stderr);
    for (line, part) in lines[1..].iter().zip([
        "0004_bad.sql`, line 2: `GRANT`",
        "line 3: `COMMIT`",
        "line 3: `CREATE RULE`",
    ]) {
        assert!(line.contains(part), "{}", said.stderr);
    }
    cli.file("schema/0004_bad.sql", "CREATE TABLE never (id int);\n\nSELECT 1/0;\nSELECT 1");
    let said = cli.run(&["tenant", "schema", "apply", "acme", "schema"]).await;
    assert!(
        said.stderr.contains("migration `0004_bad` was not applied: line 3: division by zero"),
        "{}",
        said.stderr
    );
    let listed = cli.json(&["tenant", "schema", "list", "acme"]).await;
    let names: Vec<_> = listed
        .as_array()
        .unwrap()
        .iter()
        .map(|migration| migration["name"].as_str().unwrap())
        .collect();
    assert_eq!(names, ["0001_note", "0002_row", "0003_more"]);
    let tables = cli
        .rows(
            "SELECT to_jsonb(relname) FROM pg_class JOIN pg_namespace n ON n.oid = \
        relnamespace WHERE nspname LIKE 't\\_%' AND relkind = 'r' ORDER BY 1",
        )
        .await;
    assert_eq!(tables, ["more", "note"].map(|table| json!(table)));
}

/// What could go wrong: the turn of a migration ends only when PostgreSQL has closed its session,
/// and the next one, which comes right after the answer, is refused.
#[tokio::test(flavor = "multi_thread")]
async fn migrations_follow_each_other_at_once() {
    let fixture = InboxFixture::new().await;
    let tenant = fixture.tenant("acme", "").await;
    for number in 0..100 {
        let table = format!("CREATE TABLE t{number} (id int)");
        let applied = fixture
            .control
            .tenant_databases()
            .apply_migration(&tenant, &format!("t{number}"), &table)
            .await;
        assert!(applied.unwrap());
        // One that is known takes the turn as well, where another host may have applied it.
        assert!(
            !fixture
                .control
                .tenant_databases()
                .apply_migration(&tenant, &format!("t{number}"), &table)
                .await
                .unwrap()
        );
    }
    fixture.finish().await;
}

/// What could go wrong: a text that PostgreSQL reads otherwise than the host ends the migration's
/// transaction, or runs with other rights.
#[tokio::test(flavor = "multi_thread")]
async fn no_text_ends_the_transaction_of_a_migration() {
    let fixture = InboxFixture::new().await;
    let tenant = fixture.tenant("acme", "").await;
    for (n, sql) in [
        "CREATE TABLE t (a int); COMMIT; SELECT 1/0",
        "CREATE TABLE t (a int); SELECT E'\\'; COMMIT; SELECT '; SELECT 1/0; --'",
        "CREATE TABLE t (a int); SELECT 'a\\'; COMMIT; SELECT 'b'; SELECT 1/0",
        "CREATE TABLE t (a int); SELECT $x$;$x$; /* /* */ */ COMMIT; SELECT 1/0",
        "CREATE TABLE t (a int); SELECT U&'!0041' UESCAPE '!'; COMMIT; SELECT 1/0",
        "CREATE TABLE t (a int); CREATE FUNCTION f() RETURNS int LANGUAGE sql BEGIN ATOMIC SELECT \
            1; END; END; SELECT 1/0",
        "CREATE TABLE t (a int); (COMMIT)",
        "CREATE TABLE t (a int); SELECT 1 \\; COMMIT",
        "CREATE TABLE t (a int); SET ROLE postgres; SELECT 1",
        "CREATE TABLE t (a int); SELECT 1 WHERE ( ; COMMIT ; SELECT 1/0 )",
    ]
    .into_iter()
    .enumerate()
    {
        let error = fixture
            .control
            .tenant_databases()
            .apply_migration(&tenant, &format!("m{n}"), sql)
            .await
            .expect_err(sql);
        assert!(
            matches!(error, InboxError::Invalid(_) | InboxError::Statements { .. }),
            "`{sql}`: \
            {error}"
        );
        assert_eq!(
            fixture.number("SELECT count(*) FROM pg_class WHERE relname = 't'").await,
            0,
            "`{sql}` was applied: {error}"
        );
    }
    fixture.finish().await;
}

/// Everything that a tenant's schema may hold, more of it than fits into the locks of one
/// transaction twice.
const FULL: &str = "CREATE TABLE parent (id int PRIMARY KEY, at date) ; CREATE TABLE child (id int \
    REFERENCES parent, n int GENERATED ALWAYS AS IDENTITY); \
    CREATE TABLE split (id int) PARTITION BY LIST (id); CREATE TABLE split_1 PARTITION OF split \
    FOR VALUES IN (1); \
    CREATE TYPE mood AS ENUM ('good'); CREATE TYPE pair AS (a int, b int); CREATE DOMAIN small AS \
    int CHECK (VALUE < 9); CREATE TABLE \"Odd \"\" name\" (m mood, s small); \
    CREATE VIEW seen AS SELECT * FROM parent; CREATE MATERIALIZED VIEW kept AS SELECT * FROM seen; \
    CREATE SEQUENCE counter; \
    CREATE STATISTICS s ON id, at FROM parent";

/// What could go wrong: something of a deleted tenant stays, another tenant notices, or a host that
/// nobody reached claims for it afterwards.
#[tokio::test(flavor = "multi_thread")]
async fn a_deleted_tenant_leaves_its_audit_and_nothing_else() {
    let fixture = InboxFixture::new().await;
    let consumer = fixture.simple(FULL, "").await;
    for batch in 0..8 {
        let tables: String = (0..50)
            .map(|n| format!("CREATE TABLE many_{batch}_{n} (id int PRIMARY KEY, note text);"))
            .collect();
        fixture
            .control
            .tenant_databases()
            .apply_migration(&consumer.tenant, &format!("many-{batch}"), &tables)
            .await
            .unwrap();
    }
    let other = fixture.tenant("other", "").await;
    let beside = fixture.consumer(&other, "orders", "").await;
    let (inbox, _) = host(&fixture, &consumer);
    let records: Vec<_> = (0..200).map(|n| record(n, &format!("m{n}"), "")).collect();
    let mut partition = take(&inbox).await;
    assert!(drive(&mut partition, &records).await.is_empty());
    // A zombie: it claimed before the deletion began, and is silent.
    let mut zombie = Guest::begin(&fixture, &consumer).await;
    zombie.claim(&["zombie"]).await.unwrap();

    let (neighbour, _) = host(&fixture, &beside);
    let done = AtomicBool::new(false);
    let load = async {
        let (mut partition, mut sent, mut errors) = (take(&neighbour).await, 0, Vec::new());
        while !done.load(Ordering::SeqCst) || sent < 200 {
            let batch: Vec<_> =
                (sent..sent + 20).map(|n| record(n, &format!("n{n}"), "")).collect();
            errors.extend(drive(&mut partition, &batch).await);
            sent += 20;
        }
        partition.close().await;
        (sent, errors)
    };
    let deleting = async {
        let tenant = fixture.control.tenants().delete("acme").await.unwrap();
        assert_eq!(tenant.state.as_str(), "deleting");
        assert!(
            fixture
                .control
                .tenants()
                .rotate_credentials("acme")
                .await
                .unwrap_err()
                .to_string()
                .contains("is being deleted")
        );
        assert!(fixture.control.tenants().remove(&tenant).await.unwrap());
        assert!(
            !fixture.control.tenants().remove(&tenant).await.unwrap(),
            "there is nothing left to do"
        );
        done.store(true, Ordering::SeqCst);
    };
    let ((sent, errors), ()) =
        timeout(DEADLINE, async { tokio::join!(load, deleting) }).await.unwrap();
    assert!(errors.is_empty(), "the neighbour noticed: {errors:?}");
    println!("{sent} messages of the neighbour meanwhile");

    assert!(zombie.complete(&[], &[]).await.is_err(), "a zombie's session outlived its tenant");
    assert!(PgConnection::connect_with(&fixture.guest_options(&consumer.tenant)).await.is_err());
    assert!(drive_once(&inbox).await.is_err(), "a host that did not hear of it still works for it");
    left_of(&fixture, &consumer).await;
    for n in 0..sent {
        assert_eq!(fixture.row(&beside, &format!("n{n}")).await.state(), ("completed", None, 1));
    }
    let again = fixture.control.tenants().create("acme").await.unwrap();
    assert_ne!(again.schema_name, consumer.tenant.schema_name);
    fixture.finish().await;
}

async fn drive_once(inbox: &Arc<ConsumerInbox>) -> Result<usize, InboxError> {
    let mut partition = oncebox_inbox::PartitionInbox::open(inbox.clone(), "t", 0, 9_999).await?;
    partition.process(&[record(9_999, "late", "")]).await
}

/// Nothing of the tenant is left in catalogs or tables but the audit log.
async fn left_of(fixture: &InboxFixture, consumer: &TestConsumer) {
    let (tenant, id) = (&consumer.tenant, consumer.row.consumer_id);
    for (what, count) in [
        (
            "schema",
            format!("SELECT count(*) FROM pg_namespace WHERE nspname = '{}'", tenant.schema_name),
        ),
        ("roles", format!("SELECT count(*) FROM pg_roles WHERE rolname LIKE '{}%'", tenant.login)),
        ("messages", format!("SELECT count(*) FROM oncebox.inbox WHERE consumer_id = {id}")),
        ("probation", format!("SELECT count(*) FROM oncebox.probation WHERE consumer_id = {id}")),
        ("consumers", format!("SELECT count(*) FROM oncebox.consumer WHERE consumer_id = {id}")),
        (
            "row",
            format!("SELECT count(*) FROM oncebox.tenant WHERE tenant_id = {}", tenant.tenant_id),
        ),
        (
            "migrations",
            format!(
                "SELECT count(*) FROM oncebox.tenant_migration WHERE tenant_id = {}",
                tenant.tenant_id
            ),
        ),
        (
            "endpoints",
            format!("SELECT count(*) FROM oncebox.endpoint WHERE tenant_id = {}", tenant.tenant_id),
        ),
        (
            "stores",
            format!(
                "SELECT count(*) FROM oncebox.tenant_store WHERE tenant_id = {}",
                tenant.tenant_id
            ),
        ),
        (
            "sessions",
            format!("SELECT count(*) FROM pg_stat_activity WHERE usename LIKE '{}%'", tenant.login),
        ),
    ] {
        assert_eq!(fixture.number(count).await, 0, "{what} of the deleted tenant are left");
    }
    let audited = "SELECT count(*) FROM oncebox.audit WHERE tenant = 'acme' AND action IN \
        ('tenant.create', 'tenant.delete', 'tenant.deleted')";
    assert_eq!(fixture.number(audited).await, 3);
}

/// What could go wrong: a process dies in the middle of a deletion, and what it left cannot be
/// deleted, or the component that another tenant uses as well is gone.
#[tokio::test(flavor = "multi_thread")]
async fn a_deletion_that_was_killed_at_any_step_goes_on() {
    let mut cli = CliFixture::open(Access::Database).await;
    cli.file(
        "tables.sql",
        (0..45).map(|n| format!("CREATE TABLE t{n} (id int);\n")).collect::<String>(),
    );
    cli.file(
        "policy.toml",
        "topics = ['t']\nack = 'after_commit'\nidentity = { id = [{ header = \
        'id' }], event_type = ['topic'] }\n",
    );
    cli.file("ledger.wasm", include_bytes!("../../../guest-examples/components/ledger.wasm"));
    cli.file("order.wasm", include_bytes!("../../../guest-examples/components/order.wasm"));
    made(&cli, "keeps", "ledger.wasm").await;
    for point in REMOVAL_POINTS {
        made(&cli, "acme", "ledger.wasm").await;
        cli.ok(&["version", "upload", "order.wasm", "--tenant", "acme", "--handler", "other"])
            .await;
        fill(&mut cli).await;
        kill_at(&mut cli, point).await;
        let refused = cli.run(&["tenant", "rotate-credentials", "acme"]).await;
        assert!(
            refused.stderr.contains("tenant `acme` is being deleted"),
            "{point}: {}",
            refused.stderr
        );
        cli.fails(
            &["tenant", "delete", "acme", "--confirm", "acm"],
            "`confirm` is `acm`; it must be the tenant's name, since everything of `acme` goes for \
                good",
        )
        .await;
        let said = cli.ok(&["tenant", "delete", "acme", "--confirm", "acme"]).await;
        assert!(
            said.ends_with("tenant `acme` is deleted; the audit log keeps who did what\n"),
            "{point}: {said}"
        );
        let left = cli
            .rows(
                "SELECT to_jsonb(what) FROM (SELECT nspname::text AS what FROM pg_namespace WHERE \
                    nspname LIKE 't\\_%' \
            UNION ALL SELECT name FROM oncebox.tenant UNION ALL SELECT encode(digest, 'hex') FROM \
            oncebox.component \
            UNION ALL SELECT message_id FROM oncebox.inbox) w",
            )
            .await;
        assert_eq!(
            left.len(),
            3,
            "{point}: the schema, the row and the component of `keeps`, and no more: {left:?}"
        );
        println!("{point}: killed, then brought to its end");
    }
    assert_eq!(
        cli.json(&["version", "list", "--tenant", "keeps", "--handler", "ledger"])
            .await
            .as_array()
            .unwrap()
            .len(),
        1
    );
    cli.fails(
        &["tenant", "delete", "acme", "--confirm", "acme"],
        "there is no tenant `acme`; `oncebox tenant list` shows those there are",
    )
    .await;
}

async fn made(cli: &CliFixture, tenant: &str, component: &str) {
    cli.ok(&["tenant", "create", tenant, "--schema", "tables.sql"]).await;
    cli.ok(&["consumer", "create", "orders", "--tenant", tenant, "--policy", "policy.toml"]).await;
    cli.ok(&["deploy", component, "--tenant", tenant, "--consumer", "orders", "--event-type", "t"])
        .await;
}

/// Messages of the tenant.
async fn fill(cli: &mut CliFixture) {
    let url: PgConnectOptions = cli.folder().get("ONCEBOX_DATABASE_URL").unwrap().parse().unwrap();
    let mut connection = PgConnection::connect_with(&url).await.unwrap();
    let insert = "INSERT INTO oncebox.inbox (consumer_id, message_id, retention_class, bucket, \
        topic, partition, \"offset\", record_timestamp_ms, \
        status, processed_at, payload) SELECT c.consumer_id, 'm' || n, 1, \
        oncebox.bucket_at(1::smallint, now()), 't', 0, n, 1, 'skipped', now(), 'x' \
        FROM generate_series(1, 100) n, oncebox.consumer c JOIN oncebox.tenant t USING (tenant_id) \
        WHERE t.name = 'acme'";
    connection.execute(AssertSqlSafe(insert.to_owned())).await.unwrap();
}

/// The program, which dies at a step of the deletion.
async fn kill_at(cli: &mut CliFixture, point: &str) {
    let mut command = Command::new(program().unwrap());
    for name in ["ONCEBOX_DATABASE_URL", "ONCEBOX_MASTER_KEY"] {
        command.env(name, cli.folder().get(name).unwrap());
    }
    let output = command
        .env("ONCEBOX_FAILPOINT", point)
        .args(["tenant", "delete", "acme", "--confirm", "acme"])
        .output()
        .await
        .unwrap();
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.signal(), Some(9), "`{point}` was never reached: {said}");
}
