//! Contained: hostile and broken handlers end in the failure that is theirs, without any effect,
//! without harm to the messages beside them, and without anything of them staying behind.
//!
//! Every case is a component of its own in one batch with well-behaved ones. A hostile guest writes
//! its effect and some loot, does its deed, writes again, ignores whatever it is answered, and says
//! that all is well; unless it says something else.

use std::{
    collections::HashMap,
    io::Write,
    sync::{Arc, Mutex, OnceLock},
};

use oncebox_control::Tenant;
use oncebox_inbox::{ConsumerInbox, SessionSettings};
use oncebox_model::{handler::Handler, policy::Limits, record::Record};
use oncebox_runtime::{HandlerSettings, RuntimeConfig, WasmRuntime};
use oncebox_tests::{
    attacks::{self, Case, FUNCTIONS, completes, endless, fails},
    guests::{self, End, Step, component, encode, execute, spin, trap},
    inbox::{InboxFixture, PlainHandlers, TestConsumer, deliver, record},
};
use sqlx::AssertSqlSafe;

const EFFECT: &str =
    "INSERT INTO effect (consumer, message_id, attempt, version) VALUES ('orders', $1, 1, 1)";

const SCHEMA: &str = "CREATE TABLE loot (what text); CREATE TABLE note (id int PRIMARY KEY, text \
    text NOT NULL CONSTRAINT note_is_short CHECK (length(text) < 10)); \
    CREATE TABLE line (note int REFERENCES note); INSERT INTO note VALUES (1, 'one');";

/// Small caps, so that they are reached quickly.
const POLICY: &str = "batch = { duration_ms = 60000 }
retry = { attempts_max = 2, backoff_min_ms = 1, backoff_max_ms = 1 }
limits = { statements_max = 50, statement_texts_max = 30, statement_bytes_max = 20000, params_max \
    = 100, params_bytes_max = 100000, \
rows_max = 100, result_bytes_max = 100000, savepoints_max = 4, log_bytes_max = 4000, \
outcome_bytes_max = 1000, deadline_ms = 20000 }";

/// Effect, loot, the deed, loot again.
fn around<D: IntoIterator<Item = Step>>(deed: D) -> Vec<Step> {
    let mut steps =
        vec![Step::ExecuteWithId(EFFECT.to_owned()), execute("INSERT INTO loot VALUES ('before')")];
    steps.extend(deed);
    steps.push(execute("INSERT INTO loot VALUES ('after')"));
    steps
}

/// A guest that does something and says that all is well.
fn hostile(deed: impl IntoIterator<Item = Step>) -> Vec<u8> {
    component(&around(deed), &End::Ok)
}

fn well_behaved() -> Vec<u8> {
    let steps = [
        Step::ExecuteWithId(EFFECT.to_owned()),
        Step::GiveUpOnError,
        Step::Query("SELECT * FROM note".to_owned()),
        Step::GiveUpOnError,
    ];
    component(&steps, &End::Result(b"{\"fine\":true}".to_vec()))
}

/// A database with the tenant under attack by its own handlers, and another tenant beside it.
struct IsolationFixture {
    inbox: InboxFixture,
    consumer: TestConsumer,
    victim: Tenant,
    runtime: WasmRuntime,
    host: Arc<ConsumerInbox>,
    before: String,
}

impl IsolationFixture {
    async fn new(policy: &str) -> Self {
        Self::with(policy, SessionSettings::default(), "").await
    }

    /// With tables that need a language, which an operator has to grant.
    async fn with(policy: &str, settings: SessionSettings, functions: &str) -> Self {
        let inbox = InboxFixture::new().await;
        let victim = inbox
            .tenant(
                "victim",
                "CREATE TABLE vault (secret text); INSERT INTO vault VALUES ('gold');",
            )
            .await;
        let tenant = inbox.tenant("acme", SCHEMA).await;
        if !functions.is_empty() {
            inbox
                .execute(format!("GRANT USAGE ON LANGUAGE plpgsql TO {}", tenant.owner_login))
                .await;
            inbox
                .control
                .tenant_databases()
                .apply_migration(&tenant, "functions", functions)
                .await
                .unwrap();
        }
        let consumer = inbox.consumer(&tenant, "orders", policy).await;
        let runtime =
            WasmRuntime::new(RuntimeConfig { instances_max: 4, ..RuntimeConfig::default() })
                .unwrap();
        let host = inbox.host_with(&consumer, inbox.scripts(), &settings);
        let before = host_state(&inbox).await;
        Self { inbox, consumer, victim, runtime, host, before }
    }

    async fn handler(&self, component: &[u8]) -> Arc<dyn Handler> {
        let loaded = self.runtime.load(component).await.unwrap();
        let limits: Limits = self.consumer.policy.limits.clone();
        Arc::new(self.runtime.handler(
            &loaded,
            HandlerSettings {
                version: 1,
                limits,
                config: Vec::new(),
                random_key: [1; 32],
                may_emit: false,
            },
        ))
    }

    /// One batch: each case between two well-behaved messages. Then every row and every effect.
    async fn check(&self, cases: &[Case]) {
        let mut handlers =
            HashMap::from([("good".to_owned(), self.handler(&well_behaved()).await)]);
        let mut log = vec![of_type("good", "good")];
        for case in cases {
            assert!(
                handlers.insert(case.name.clone(), self.handler(&case.component).await).is_none(),
                "two cases `{}`",
                case.name
            );
            log.extend([
                of_type(&case.name, &case.name),
                of_type("good", &format!("beside {}", case.name)),
            ]);
        }
        (0..).zip(&mut log).for_each(|(offset, record)| record.offset = offset);
        self.host.set_handlers(PlainHandlers::resolving(0, move |event_type| {
            handlers.get(event_type).cloned()
        }));
        let errors = deliver(&self.host, &log).await;
        assert!(
            errors.is_empty(),
            "the host took a message's failure for its own trouble: {errors:?}"
        );
        self.check_rows(cases, 1).await;
        if self.consumer.policy.retry.attempts_max == 2 {
            self.inbox.retry_until_settled(&self.host).await;
            self.check_rows(cases, 2).await;
        }
    }

    async fn check_rows(&self, cases: &[Case], attempts: i32) {
        let mut faults = Vec::new();
        for case in cases {
            let row = self.inbox.row(&self.consumer, &case.name).await;
            let retried = attempts == 2 && case.status == "failed_retryable";
            let status = if retried { "failed_terminal" } else { case.status };
            let expected = (status, case.reason.as_deref(), if retried { 2 } else { 1 });
            let has_text = row.last_error.as_deref().unwrap_or_default().contains(&case.text);
            if row.state() != expected || !has_text {
                faults.push(format!(
                    "`{}` should be {expected:?} with `{}`, is {:?} with {:?}",
                    case.name,
                    case.text,
                    row.state(),
                    row.last_error
                ));
            }
            let effects = self.inbox.effects(&self.consumer, &case.name).await;
            if effects != i64::from(case.status == "completed") {
                faults.push(format!("`{}` is {} with {effects} effects", case.name, case.status));
            }
            let beside = self.inbox.row(&self.consumer, &format!("beside {}", case.name)).await;
            if beside.state() != ("completed", None, 1) || beside.result.is_none() {
                faults.push(format!("beside `{}`: {beside:?}", case.name));
            }
        }
        assert!(faults.is_empty(), "{}", faults.join("\n"));
    }

    /// What the handlers of this tenant wrote beside their effects.
    async fn loot(&self) -> Vec<String> {
        let sql = format!("SELECT what FROM {}.loot ORDER BY 1", self.consumer.tenant.schema_name);
        sqlx::query_scalar(AssertSqlSafe(sql)).fetch_all(&self.inbox.pool).await.unwrap()
    }

    /// Nothing was taken, nothing is left: the other tenant's tables, the roles and their settings,
    /// the host's rows, prepared transactions, large objects, advisory locks, open transactions,
    /// the guard.
    async fn finish(self) {
        assert_eq!(
            host_state(&self.inbox).await,
            self.before,
            "something outside the tenant's tables changed"
        );
        let kept =
            format!("SELECT count(*) FROM {}.vault WHERE secret = 'gold'", self.victim.schema_name);
        assert_eq!(self.inbox.number(kept).await, 1);
        let left = "SELECT (SELECT count(*) FROM pg_prepared_xacts WHERE database = \
            current_database()) + (SELECT count(*) FROM pg_largeobject_metadata)";
        assert_eq!(
            self.inbox.number(left).await,
            0,
            "a prepared transaction or a large object is left over"
        );
        self.inbox.finish().await;
    }
}

/// Everything that no handler may change, as a text to compare.
async fn host_state(inbox: &InboxFixture) -> String {
    const STATE: &str = "WITH role AS (SELECT a.* FROM pg_authid a WHERE rolname IN (SELECT login \
        FROM oncebox.tenant UNION ALL SELECT owner_login FROM oncebox.tenant)) \
        SELECT concat_ws(E'\n', (SELECT string_agg(r::text, E'\n' ORDER BY r.oid) FROM role r), \
            (SELECT string_agg(s::text, E'\n' ORDER BY s.setdatabase, s.setrole) FROM \
            pg_db_role_setting s WHERE setrole IN (SELECT oid FROM role)), \
            (SELECT string_agg(m::text, E'\n' ORDER BY m.roleid, m.member) FROM pg_auth_members m \
            WHERE member IN (SELECT oid FROM role)), \
            (SELECT string_agg(n.nspname || n.nspacl::text, E'\n' ORDER BY n.oid) FROM \
            pg_namespace n), \
            (SELECT string_agg(c.oid::regclass::text || coalesce(c.relacl::text, ''), E'\n' ORDER \
            BY c.oid) FROM pg_class c), \
            (SELECT string_agg(t::text, E'\n' ORDER BY t.tenant_id) FROM oncebox.tenant t), \
            (SELECT string_agg(c::text, E'\n' ORDER BY c.consumer_id) FROM oncebox.consumer c), \
            (SELECT string_agg(a::text, E'\n' ORDER BY a.audit_id) FROM oncebox.audit a), \
            (SELECT count(*)::text FROM oncebox.probation))";
    sqlx::query_scalar(STATE).fetch_one(&inbox.pool).await.unwrap()
}

fn of_type(event_type: &str, id: &str) -> Record {
    let mut record = record(0, id, "{}");
    record.headers.push(("type".to_owned(), event_type.into()));
    record
}

/// What could go wrong: a handler ends the transaction that holds its claim, or changes the session
/// that other messages use. D.3 of the sandbox, B3; D4, D5.
#[tokio::test(flavor = "multi_thread")]
async fn only_statements_on_rows_reach_the_database() {
    let fixture = IsolationFixture::new(POLICY).await;
    let refused = |name: &str, sql: &str, word: &str| {
        fails(
            name,
            hostile([execute(sql)]),
            "statement_refused",
            &format!("`{word}` is not allowed"),
        )
    };
    let mut cases = Vec::new();
    for (name, sql, word) in attacks::NOT_ON_ROWS {
        cases.push(refused(name, sql, word));
    }
    for (name, sql, text) in [
        ("empty", "", "is empty"),
        ("semicolon before", ";COMMIT", "cannot begin with `;`"),
        ("open comment", "/* select 1", "not closed"),
        ("nul", "SELECT 1\0; COMMIT", "NUL"),
        ("white space of Unicode", "\u{a0}SELECT 1", "not allowed"),
    ] {
        cases.push(fails(name, hostile([execute(sql)]), "statement_refused", text));
    }
    // These begin well; PostgreSQL takes one statement at a time.
    for (name, sql) in [
        ("two statements", "INSERT INTO loot VALUES ('first'); COMMIT"),
        ("a statement and a role", "SELECT 1; RESET ROLE"),
    ] {
        cases.push(fails(name, hostile([execute(sql)]), "sql_error:42601", "multiple commands"));
    }
    // A refusal outlives whatever the guest says afterwards, but for a decision of its own.
    let commit = || around([execute("COMMIT")]);
    cases.push(fails(
        "refused, then a trap",
        component(&[commit(), vec![trap()]].concat(), &End::Ok),
        "statement_refused",
        "unreachable",
    ));
    cases.push(fails(
        "refused, then other",
        component(&commit(), &End::Other("my own words".into())),
        "statement_refused",
        "my own words",
    ));
    cases.push(fails(
        "refused, as rows",
        hostile([Step::Query("COMMIT".to_owned())]),
        "statement_refused",
        "COMMIT",
    ));
    for some in cases.chunks(25) {
        fixture.check(some).await;
    }
    assert_eq!(fixture.loot().await, [""; 0]);
    fixture.finish().await;
}

/// What could go wrong: a handler reads or writes what is not its tenant's, completes or claims
/// messages by itself, or reaches out of its transaction through a function. B1, B3, D.2; D5.
#[tokio::test(flavor = "multi_thread")]
async fn everything_but_the_tenants_rows_is_out_of_reach() {
    let fixture = IsolationFixture::new(POLICY).await;
    let (victim, consumer) = (&fixture.victim.schema_name, fixture.consumer.row.consumer_id);
    let denied = attacks::out_of_reach(victim, consumer);
    let cases: Vec<_> = denied
        .iter()
        .map(|(name, sql)| fails(name, hostile([execute(sql)]), "sql_error:42501", "denied"))
        .collect();
    for some in cases.chunks(25) {
        fixture.check(some).await;
    }
    assert_eq!(fixture.loot().await, [""; 0]);
    fixture.finish().await;
}

/// What could go wrong: an error that a handler swallows is committed as a success, or the row says
/// something else than PostgreSQL did. S0-022, S0-024; D3.
#[tokio::test(flavor = "multi_thread")]
async fn a_failed_statement_is_recorded_with_its_code() {
    let fixture = IsolationFixture::new(POLICY).await;
    let mut cases = Vec::new();
    for (sqlstate, sql, text) in [
        ("22012", "SELECT 1/0", "division by zero"),
        ("22P02", "SELECT 'x'::int", "invalid input syntax"),
        ("22003", "SELECT 2147483647 + 1", "out of range"),
        ("23502", "INSERT INTO note VALUES (2, NULL)", "null value"),
        ("23503", "INSERT INTO line VALUES (99)", "foreign key"),
        ("23505", "INSERT INTO note VALUES (1, 'again')", "duplicate key"),
        ("23514", "INSERT INTO note VALUES (2, 'much too long')", "note_is_short"),
        ("42P01", "SELECT * FROM nowhere", "does not exist"),
        ("42703", "SELECT nothing FROM note", "does not exist"),
        ("42883", "SELECT nothing()", "does not exist"),
        ("42601", "SELECT FROM WHERE", "syntax error"),
        ("21000", "SELECT (SELECT n FROM generate_series(1, 2) n)", "more than one row"),
        ("54000", "SELECT repeat('x', 2000000000)", ""),
    ] {
        cases.push(fails(
            &format!("swallowed {sqlstate}"),
            hostile([execute(sql)]),
            &format!("sql_error:{sqlstate}"),
            text,
        ));
    }
    let honest = component(&around([execute("SELECT 1/0"), Step::GiveUpOnError]), &End::Ok);
    cases.push(fails("given up", honest, "sql_error:22012", "gave up"));
    cases.push(fails(
        "after rows",
        hostile([Step::Query("SELECT 1/(n - 3) FROM generate_series(1, 5) n".into())]),
        "sql_error:22012",
        "",
    ));
    cases.push(fails(
        "then a trap",
        component(&[around([execute("SELECT 1/0")]), vec![trap()]].concat(), &End::Ok),
        "sql_error:22012",
        "unreachable",
    ));
    cases.push(fails(
        "the first one counts",
        hostile([execute("SELECT 1/0"), execute("SELECT 'x'::int")]),
        "sql_error:22012",
        "division",
    ));
    // S0-022, S0-024.
    fixture.check(&cases).await;
    assert_eq!(fixture.loot().await, [""; 0]);
    fixture.finish().await;
}

/// What could go wrong: a component that breaks, lies about its memory or takes too much of
/// something takes the host or its neighbours with it, or is recorded as something else. D6.
#[tokio::test(flavor = "multi_thread")]
async fn a_broken_or_greedy_component_ends_alone() {
    let fixture = IsolationFixture::new(POLICY).await;
    let wat = |text: &str| hostile([Step::Wat(text.to_owned())]);
    let query = |sql: &str| Step::Query(sql.to_owned());
    fixture.check(&attacks::broken_components(&around::<Vec<Step>>)).await;
    fixture
        .check(&[
            fails(
                "a huge parameter",
                hostile([Step::ExecuteWith("INSERT INTO loot VALUES ($1)".into(), 1, 10_000_000)]),
                "limit",
                "params_bytes_max",
            ),
            fails(
                "huge parameters",
                hostile([Step::ExecuteWith("INSERT INTO loot VALUES ($1)".into(), 100, 10_000)]),
                "limit",
                "params_bytes_max",
            ),
            fails(
                "a parameter that does not fit",
                hostile([Step::ExecuteWith("SELECT $1::int".into(), 1, 5)]),
                "other",
                "$1",
            ),
            fails(
                "a column that cannot be carried",
                hostile([query("SELECT point(1, 2)")]),
                "other",
                "cast",
            ),
            // All of this is allowed.
            completes(
                "a full result",
                hostile([query(
                    "SELECT repeat('x', 800) FROM \
                generate_series(1, 100)",
                )]),
            ),
            completes(
                "a refused growth that is survived",
                wat("(drop (memory.grow (i32.const \
                60000)))"),
            ),
            completes(
                "nothing of one message in the next",
                wat("(if (i32.load (i32.const 60000)) (then unreachable)) (i32.store (i32.const \
                    60000) (i32.const 1))"),
            ),
        ])
        .await;
    assert_eq!(fixture.loot().await, ["after", "after", "after", "before", "before", "before"]);
    fixture.finish().await;
}

/// What could go wrong: a message that does not end holds its partition, its locks and its
/// connection. D6, A4.
#[tokio::test(flavor = "multi_thread")]
async fn a_handler_that_does_not_end_is_stopped() {
    let policy =
        "batch = { duration_ms = 60000 }\nlimits = { deadline_ms = 1000, statements_max = 100000 }";
    let fixture = IsolationFixture::new(policy).await;
    let spinning_allocator = guests::text(&around([]), &End::Ok).replacen(
        "(local $at i32)\n",
        "(local $at i32) (loop $again (br $again))\n",
        1,
    );
    let spinning_start = guests::text(&around([]), &End::Ok).replacen(
        "(memory ",
        "(start $begin) (func $begin (loop $again (br $again))) (memory ",
        1,
    );
    // The memory that the host's answers take is given back each time.
    let empty_statement = "(global.set $next (i32.const 60000)) (call $execute (i32.const 0) \
        (i32.const 0) (i32.const 0) (i32.const 0) (i32.const 256))";
    let stopped = "stopped after 1000 ms";
    fixture
        .check(&[
            fails("spins", hostile([spin()]), "deadline", stopped),
            fails("spins at the start", encode(&spinning_start), "deadline", stopped),
            fails(
                "spins while it is handed its message",
                encode(&spinning_allocator),
                "deadline",
                stopped,
            ),
            fails(
                "calls the host for ever",
                hostile([Step::Repeat(u32::MAX, Box::new(Step::Wat(empty_statement.into())))]),
                "deadline",
                stopped,
            ),
            fails(
                "logs for ever",
                hostile([Step::Repeat(u32::MAX, Box::new(Step::Log("x".into())))]),
                "deadline",
                stopped,
            ),
        ])
        .await;
    fixture
        .check(&[
            fails(
                "spins in a statement",
                hostile([execute(endless("count(*)"))]),
                "deadline",
                stopped,
            ),
            fails(
                "recurses in a statement",
                hostile([execute(
                    "WITH RECURSIVE r AS (SELECT 1 AS n UNION ALL SELECT n + 1 FROM \
                    r) SELECT count(*) FROM r",
                )]),
                "deadline",
                stopped,
            ),
            fails("reads rows for ever", hostile([Step::Query(endless("1"))]), "deadline", stopped),
        ])
        .await;
    assert_eq!(fixture.loot().await, [""; 0]);
    fixture.finish().await;
}

/// What could go wrong: a statement that PostgreSQL itself stops is the host's trouble. D3.
#[tokio::test(flavor = "multi_thread")]
async fn a_statement_that_takes_too_long_is_the_messages_failure() {
    let settings = SessionSettings { statement_timeout_ms: 500, ..SessionSettings::default() };
    let fixture = IsolationFixture::with(POLICY, settings, "").await;
    fixture
        .check(&[
            fails(
                "bomb",
                hostile([execute(
                    "WITH RECURSIVE r AS (SELECT 1 AS n UNION ALL SELECT n + 1 FROM \
                    r) SELECT count(*) FROM r",
                )]),
                "sql_error:57014",
                "timeout",
            ),
            fails("series", hostile([execute(endless("count(*)"))]), "sql_error:57014", "timeout"),
        ])
        .await;
    assert_eq!(fixture.loot().await, [""; 0]);
    fixture.finish().await;
}

/// What could go wrong: code of a tenant that runs at COMMIT runs with the host's rights, ends the
/// transaction by itself, raises what the host takes for its own trouble, or leaves the session as
/// it likes. B2, B3, A3; D3, D4.
#[tokio::test(flavor = "multi_thread")]
async fn code_of_a_tenant_runs_as_the_tenant_also_at_commit() {
    let fixture = IsolationFixture::with(POLICY, SessionSettings::default(), FUNCTIONS).await;
    let insert = |table: &str, text: &str| {
        hostile([execute(format!("INSERT INTO {table} VALUES ($do${text}$do$)"))])
    };
    let secret = "'\\x00'::bytea";
    let consumer = fixture.consumer.row.consumer_id;
    let mut cases = Vec::new();
    for table in ["now_raises", "then_raises"] {
        for code in ["P0001", "57P01", "08006", "OB001", "XX000"] {
            cases.push(fails(
                &format!("{table} {code}"),
                insert(table, code),
                &format!("sql_error:{code}"),
                "raised",
            ));
        }
        for code in ["40001", "55P03"] {
            cases.push(fails(
                &format!("{table} {code}"),
                insert(table, code),
                "contention",
                "raised",
            ));
        }
    }
    for table in ["now_does", "then_does"] {
        for (name, sql, sqlstate) in [
            (
                "the inbox",
                "INSERT INTO loot SELECT message_id FROM oncebox.inbox".to_owned(),
                "42501",
            ),
            (
                "another tenant",
                format!("INSERT INTO loot SELECT secret FROM {}.vault", fixture.victim.schema_name),
                "42501",
            ),
            (
                "a guess",
                format!("SELECT oncebox_host.partition_cleared({secret}, {consumer}, 't', 0)"),
                "42501",
            ),
            ("rollback", "ROLLBACK".to_owned(), "0A000"),
            ("commit", "COMMIT".to_owned(), "0A000"),
        ] {
            cases.push(fails(
                &format!("{table} {name}"),
                insert(table, &sql),
                &format!("sql_error:{sqlstate}"),
                "",
            ));
        }
    }
    // Checked early, the guard says that the message is not completed.
    cases.push(fails(
        "the guard, early",
        insert("now_does", "SET CONSTRAINTS ALL IMMEDIATE"),
        "sql_error:OB001",
        "commit guard",
    ));
    for some in cases.chunks(25) {
        fixture.check(some).await;
    }
    assert_eq!(fixture.loot().await, [""; 0]);
    fixture.finish().await;
}

/// What could go wrong: a tenant's function gets out of its role, or what it sets in the session is
/// there for later messages. B1, B3.
#[tokio::test(flavor = "multi_thread")]
async fn what_a_tenants_function_sets_ends_with_its_transaction() {
    let fixture = IsolationFixture::with(POLICY, SessionSettings::default(), FUNCTIONS).await;
    let does = |what: &str| execute(format!("INSERT INTO now_does VALUES ($do${what}$do$)"));
    let guest = |steps: Vec<Step>| {
        component(&[vec![Step::ExecuteWithId(EFFECT.to_owned())], steps].concat(), &End::Ok)
    };
    let says = |what: &str| execute(format!("INSERT INTO loot SELECT {what}"));
    // At COMMIT it is still the tenant, whatever it tries.
    let me = "INSERT INTO loot SELECT session_user || ' ' || current_user";
    fixture
        .check(&[
            completes(
                "who am I at commit",
                guest(vec![execute(format!("INSERT INTO then_does VALUES ($do${me}$do$)"))]),
            ),
            completes(
                "reset role",
                guest(vec![
                    does("RESET ROLE"),
                    does("RESET SESSION AUTHORIZATION"),
                    says("session_user || ' ' || current_user"),
                ]),
            ),
        ])
        .await;
    let login = &fixture.consumer.tenant.login;
    assert_eq!(fixture.loot().await, vec![format!("{login} {login}"); 2]);
    // Settings of a session that lives on.
    fixture.inbox.execute(format!("TRUNCATE {}.loot", fixture.consumer.tenant.schema_name)).await;
    fixture
        .check(&[completes(
            "sets",
            guest(vec![
                does("SET statement_timeout = 0"),
                does("SET default_transaction_read_only = off"),
            ]),
        )])
        .await;
    let asked = "current_setting('statement_timeout') || ' ' || \
        current_setting('default_transaction_read_only')";
    fixture.check(&[completes("asks", guest(vec![says(asked)]))]).await;
    assert_eq!(fixture.loot().await, ["5s on"]);
    fixture.finish().await;
}

/// What could go wrong: an answer of a handler is taken for another, a statement that was undone
/// still fails the message, or a flood of lines fills the log. S0-010, S1-067, S1-068.
#[tokio::test(flavor = "multi_thread")]
async fn answers_and_savepoints_and_logs_do_what_they_say() {
    let lines = captured_log();
    let policy = format!(
        "{}\n",
        POLICY.replace(
            "attempts_max = 2, backoff_min_ms = 1, backoff_max_ms = 1",
            "attempts_max = 5"
        )
    );
    let fixture = IsolationFixture::new(&policy).await;
    let answers = |end: End| component(&around([]), &end);
    let status = |name: &str, end: End, status: &'static str, reason: &str, text: &str| Case {
        status,
        ..fails(name, answers(end), reason, text)
    };
    let undone = || {
        [
            Step::Savepoint,
            execute("INSERT INTO loot VALUES ('undone')"),
            execute("SELECT 1/0"),
            Step::RollBack,
        ]
    };
    fixture
        // S0-010, S1-068, S1-115.
        .check(&[
            fails("later", answers(End::Retry(Some(60_000))), "retry", "asked to be run again"),
            fails("retry", answers(End::Retry(None)), "retry", "asked to be run again"),
            fails("other", answers(End::Other("my own words".into())), "other", "my own words"),
            status("reject", End::Reject("never".into()), "failed_terminal", "reject", "never"),
            status("park", End::Park("look here".into()), "parked", "park", "look here"),
            completes("recovers", hostile(undone())),
            completes(
                "recovers and releases",
                hostile(undone().into_iter().chain([Step::Release])),
            ),
            completes("leaves a savepoint open", hostile([Step::Savepoint])),
            fails(
                "recovers, then fails",
                hostile(undone().into_iter().chain([execute("SELECT 1/0")])),
                "sql_error:22012",
                "division",
            ),
            fails(
                "releases what failed",
                hostile([Step::Savepoint, execute("SELECT 1/0"), Step::Release]),
                "sql_error:22012",
                "division",
            ),
            completes(
                "floods",
                hostile([Step::Repeat(100_000, Box::new(Step::Log("flood flood flood".into())))]),
            ),
        ])
        .await;
    let due = fixture.inbox.row(&fixture.consumer, "later").await.due_in_ms.unwrap();
    // S1-067.
    assert!((30_000..=60_000).contains(&due), "{due}");
    let due = fixture.inbox.row(&fixture.consumer, "retry").await.due_in_ms.unwrap();
    assert!(due <= 1_000, "{due}");
    assert_eq!(fixture.loot().await.iter().filter(|what| *what == "undone").count(), 0);
    assert_eq!(fixture.loot().await.len(), 2 * 4, "two each of what completed");
    let log = String::from_utf8_lossy(&lines.lock().unwrap()).into_owned();
    let flood: Vec<_> = log
        .lines()
        .filter(|line| line.contains("message_id=\"floods\"") || line.contains("message_id=floods"))
        .collect();
    // S0-039.
    assert!((2..=4000 / 64 + 1).contains(&flood.len()), "{} lines", flood.len());
    assert!(flood.iter().any(|line| line.contains("log output truncated")), "{flood:?}");
    fixture.finish().await;
}

/// Every line of the log of this process from now on.
fn captured_log() -> Arc<Mutex<Vec<u8>>> {
    static LINES: OnceLock<Arc<Mutex<Vec<u8>>>> = OnceLock::new();
    LINES
        .get_or_init(|| {
            let lines = Arc::new(Mutex::new(Vec::new()));
            let writer = Lines(lines.clone());
            tracing_subscriber::fmt()
                .with_ansi(false)
                .with_env_filter(
                    "handler=trace,oncebox_control=info,oncebox_inbox=info,oncebox_model=info",
                )
                .with_writer(move || writer.clone())
                .init();
            lines
        })
        .clone()
}

#[derive(Clone)]
struct Lines(Arc<Mutex<Vec<u8>>>);

impl Write for Lines {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().unwrap().extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}
