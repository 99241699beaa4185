//! A failure becomes a row that says what happened, undoes its own effect and nobody else's, and
//! never holds its partition.

use std::sync::{
    Arc, Mutex,
    atomic::{AtomicUsize, Ordering},
};

use oncebox_control::{Action, JobFilter, Tenant};
use oncebox_inbox::SessionSettings;
use oncebox_model::{
    Output,
    outcome::{Failure, FailureKind},
    record::Record,
};
use oncebox_tests::{
    inbox::{
        InboxFixture, PlainHandler, PlainHandlers, Row, TestConsumer, both, deliver, drive,
        execute, record, take,
    },
    job::{carry_out, inbox_job},
    wait::{self, DEADLINE},
};
use sqlx::{AssertSqlSafe, Connection, Executor, PgConnection};
use tokio::time::Duration;

/// Messages that succeed, with the given ones between them; then what each row says.
async fn check(
    fixture: &InboxFixture,
    consumer: &TestConsumer,
    settings: &SessionSettings,
    cases: &[(Record, &str, Option<&str>, i32)],
) {
    let mut log = Vec::new();
    for (n, (failing, ..)) in cases.iter().enumerate() {
        log.push(record(0, &format!("before{n}"), ""));
        log.push(failing.clone());
    }
    log.push(record(0, "last", "result {\"ok\":true}"));
    (0..).zip(&mut log).for_each(|(offset, record)| record.offset = offset);
    let host = fixture.host_with(consumer, fixture.scripts(), settings);
    let errors = deliver(&host, &log).await;
    assert!(errors.is_empty(), "the host took a message's failure for its own trouble: {errors:?}");
    for (failing, status, reason, attempts) in cases {
        let id = String::from_utf8(failing.header("id").unwrap().to_vec()).unwrap();
        let row = fixture.row(consumer, &id).await;
        assert_eq!(row.state(), (*status, *reason, *attempts), "`{id}`: {row:?}");
        assert_eq!(
            fixture.effects(consumer, &id).await,
            i64::from(*status == "completed"),
            "`{id}`"
        );
    }
    let completed = format!(
        "SELECT count(*) FROM oncebox.inbox WHERE consumer_id = {} AND status = 'completed'",
        consumer.row.consumer_id
    );
    let expected = cases.len() + 1 + cases.iter().filter(|case| case.1 == "completed").count();
    assert_eq!(
        fixture.number(completed).await,
        expected as i64,
        "a neighbour of a failure is not completed"
    );
}

fn of_type(event_type: &str, mut record: Record) -> Record {
    record.headers.push(("type".to_owned(), event_type.into()));
    record
}

/// What could go wrong: a failure of one kind is taken for another, loses its text or payload, or
/// keeps its effect. S0-010, S0-022, S0-024, S1-067, S1-068, S1-115, S3-006, S3-015, S0-038.
#[tokio::test(flavor = "multi_thread")]
async fn each_failure_ends_in_its_row_and_leaves_its_neighbours() {
    both(each_failure_ends_in_its_row_and_leaves_its_neighbours_of).await;
}

async fn each_failure_ends_in_its_row_and_leaves_its_neighbours_of(fixture: InboxFixture) {
    let consumer = fixture
        .simple(
            "CREATE TABLE stock (n int CHECK (n >= 0)); INSERT INTO stock VALUES (0);",
            "batch = { duration_ms = 5000 }",
        )
        .await;
    let retryable =
        |script: &str, reason| (record(0, script, script), "failed_retryable", Some(reason), 1);
    // S0-010, S0-022, S1-068, S1-115, S3-006, S3-015.
    check(
        &fixture,
        &consumer,
        &SessionSettings::default(),
        &[
            retryable("retry 60000", "retry"),
            retryable("retry", "retry"),
            retryable("trap", "trap"),
            retryable("other", "other"),
            retryable("sql SELECT 1/0", "sql_error:22012"),
            retryable("swallow SELECT 1/0", "sql_error:22012"),
            (
                record(0, "swallowed, then other", "swallow SELECT 1/0\nother"),
                "failed_retryable",
                Some("other"),
                1,
            ),
            retryable("sql UPDATE stock SET n = n - 1", "sql_error:23514"),
            retryable("sql SELECT * FROM nowhere", "sql_error:42P01"),
            retryable("sql COMMIT", "sql_error:OB001"),
            (record(0, "rejected", "reject"), "failed_terminal", Some("reject"), 1),
            (record(0, "parked", "park"), "parked", Some("park"), 1),
            (of_type("nobody", record(0, "lost", "")), "parked", Some("no_route"), 0),
        ],
    )
    .await;
    let asked = fixture.row(&consumer, "retry 60000").await;
    // S1-028, S1-067.
    assert!((10_000..=60_000).contains(&asked.due_in_ms.unwrap()), "{asked:?}");
    let backed_off = fixture.row(&consumer, "retry").await;
    assert!(backed_off.due_in_ms.unwrap() <= 1_000, "{backed_off:?}");
    let parked = fixture.row(&consumer, "parked").await;
    assert_eq!((parked.payload.as_deref(), parked.processed), (Some(&b"park"[..]), true));
    assert_eq!(parked.last_error.as_deref(), Some("the script says `park`"));
    fixture.finish().await;
}

/// What could go wrong: what a handler returns, or the text of its failure, is not to be stored,
/// and the completion fails for the batch on every try. A8 (c).
#[tokio::test(flavor = "multi_thread")]
async fn results_and_texts_that_cannot_be_stored_hold_nothing() {
    both(results_and_texts_that_cannot_be_stored_hold_nothing_of).await;
}

async fn results_and_texts_that_cannot_be_stored_hold_nothing_of(fixture: InboxFixture) {
    let consumer = fixture
        .simple("", "retry = { attempts_max = 2, backoff_min_ms = 1, backoff_max_ms = 1 }")
        .await;
    let deep = format!("result {}", "[".repeat(100_000));
    let bad =
        |id: &str, script: &str| (record(0, id, script), "failed_retryable", Some("bad_result"), 1);
    check(
        &fixture,
        &consumer,
        &SessionSettings::default(),
        &[
            bad("no JSON", "result {"),
            bad("nothing", "result "),
            bad("NUL", "result \"a\0b\""),
            bad("escaped NUL", "result \"\\u0000\""),
            bad("deep", &deep),
            (record(0, "text with NUL", "park \0"), "parked", Some("park"), 1),
            (
                record(0, "long text", &format!("park {}", "é".repeat(5_000))),
                "parked",
                Some("park"),
                1,
            ),
        ],
    )
    .await;
    assert!(fixture.row(&consumer, "long text").await.last_error.unwrap().len() <= 4_096);
    // The same from a retry worker.
    fixture.retry_until_settled(&fixture.host(&consumer)).await;
    for id in ["no JSON", "nothing", "NUL", "escaped NUL", "deep"] {
        assert_eq!(
            fixture.row(&consumer, id).await.state(),
            ("failed_terminal", Some("bad_result"), 2),
            "`{id}`"
        );
    }
    fixture.finish().await;
}

/// What could go wrong: texts of a record that PostgreSQL does not take fail the claim of their
/// batch, on every try, on every way into the inbox. A8 (c).
#[tokio::test(flavor = "multi_thread")]
async fn records_that_cannot_be_claimed_are_parked_alone() {
    both(records_that_cannot_be_claimed_are_parked_alone_of).await;
}

async fn records_that_cannot_be_claimed_are_parked_alone_of(fixture: InboxFixture) {
    let tenant = fixture.tenant("acme", "").await;
    for (name, policy, event_type, neighbour) in [
        ("live", "", "t", "completed"),
        ("stored", "ack = 'after_insert'", "t", "received"),
        ("unrouted", "", "nobody", "parked"),
    ] {
        let consumer = fixture.consumer(&tenant, name, policy).await;
        let mut log = Vec::new();
        for (n, header) in
            ["content-type", "ce_source", "traceparent", "ce_dataschema"].into_iter().enumerate()
        {
            let mut bad = of_type(event_type, record(2 * n as i64, &format!("bad{n}"), "bytes"));
            bad.headers.push((header.to_owned(), b"a\0b".to_vec()));
            log.extend([
                bad,
                of_type(event_type, record(2 * n as i64 + 1, &format!("good{n}"), "")),
            ]);
        }
        let errors = deliver(&fixture.host(&consumer), &log).await;
        assert!(errors.is_empty(), "{name}: {errors:?}");
        for n in 0..4 {
            assert_eq!(
                fixture.row(&consumer, &format!("good{n}")).await.status,
                neighbour,
                "{name}"
            );
            let row = fixture.row(&consumer, &format!("undecodable:t:0:{}", 2 * n)).await;
            assert_eq!(row.state(), ("parked", Some("unclaimable: sql_error:22021"), 0), "{name}");
            assert_eq!(row.payload.as_deref(), Some(&b"bytes"[..]));
        }
        assert_eq!(
            fixture
                .number(format!(
                    "SELECT count(*) FROM oncebox.inbox WHERE consumer_id = {}",
                    consumer.row.consumer_id
                ))
                .await,
            8
        );
        // Offered again, they are duplicates.
        assert!(deliver(&fixture.host(&consumer), &log).await.is_empty());
        assert_eq!(
            fixture
                .number(format!(
                    "SELECT count(*) FROM oncebox.inbox WHERE consumer_id = {}",
                    consumer.row.consumer_id
                ))
                .await,
            8
        );
        fixture.retry_until_settled(&fixture.host(&consumer)).await;
    }
    fixture.finish().await;
}

/// What could go wrong: a message is tried for ever, or given up too early. S2-009, S2-013, S1-010.
#[tokio::test(flavor = "multi_thread")]
async fn attempts_end_at_their_limit() {
    both(attempts_end_at_their_limit_of).await;
}

async fn attempts_end_at_their_limit_of(fixture: InboxFixture) {
    let consumer = fixture
        .simple("", "retry = { attempts_max = 3, backoff_min_ms = 1, backoff_max_ms = 1 }")
        .await;
    let host = fixture.host(&consumer);
    deliver(
        &host,
        &[
            record(0, "never", "trap"),
            record(1, "third", "before 3 trap"),
            record(2, "noroute", "before 2 trap"),
        ],
    )
    .await;
    fixture.retry_until_settled(&host).await;
    // S1-010, S1-029, S2-009, S2-013, S3-024.
    assert_eq!(fixture.row(&consumer, "never").await.state(), ("failed_terminal", Some("trap"), 3));
    assert_eq!(fixture.row(&consumer, "third").await.state(), ("completed", None, 3));
    // A run that was undone with its neighbours is the same attempt.
    let mut attempts: Vec<_> = fixture.script.runs("third").iter().map(|ran| ran.attempt).collect();
    attempts.dedup();
    assert_eq!(attempts, [1, 2, 3]);
    fixture.finish().await;
}

/// What could go wrong: what is too old to be of use is tried again and again, or a person who says
/// that it is to run once more is not heard. S2-009.
#[tokio::test(flavor = "multi_thread")]
async fn what_is_too_old_is_not_tried_again() {
    let fixture = InboxFixture::new().await;
    let consumer = fixture
        .simple(
            "",
            "retry = { age_max_ms = 3600000, attempts_max = 3, \
        backoff_min_ms = 1, backoff_max_ms = 1 }",
        )
        .await;
    let host = fixture.host(&consumer);
    deliver(&host, &[record(0, "old", "trap"), record(1, "young", "before 3 trap")]).await;
    assert_eq!(fixture.row(&consumer, "old").await.state(), ("failed_retryable", Some("trap"), 1));
    fixture
        .execute(
            "UPDATE oncebox.inbox SET received_at = received_at - interval '2 hours' WHERE \
        message_id = 'old'",
        )
        .await;
    fixture.retry_until_settled(&host).await;
    // S2-009.
    assert_eq!(fixture.row(&consumer, "old").await.state(), ("failed_terminal", Some("trap"), 2));
    assert_eq!(fixture.row(&consumer, "young").await.state(), ("completed", None, 3));

    let again = inbox_job(Action::Redrive, "orders", JobFilter::default());
    assert_eq!(carry_out(&fixture.control, "acme", &again).await.unwrap().changed, 1);
    fixture.retry_until_settled(&host).await;
    assert_eq!(
        fixture.row(&consumer, "old").await.state(),
        ("failed_terminal", Some("trap"), 3),
        "it is as old as its redrive"
    );
    fixture.finish().await;
}

/// A table with one row, and a superuser's session that holds it.
async fn held_row(fixture: &InboxFixture) -> (TestConsumer, PgConnection) {
    let consumer = fixture
        .simple(
            "CREATE TABLE hot (id int PRIMARY KEY, n int); INSERT INTO hot VALUES (1, 0);",
            "limits = { deadline_ms = 400 }\nbatch = { duration_ms = 5000 }\nretry = { \
                backoff_min_ms = 1, backoff_max_ms = 1 }",
        )
        .await;
    let mut holder = fixture.superuser().await;
    holder
        .execute(sqlx::raw_sql(AssertSqlSafe(format!(
            "BEGIN; UPDATE {}.hot SET n = n",
            consumer.tenant.schema_name
        ))))
        .await
        .unwrap();
    (consumer, holder)
}

/// What could go wrong: a message that hangs in a statement is not stopped, its backend lives on
/// with its locks, it takes its neighbours with it, or its failure is lost with its connection. A4,
/// A9.
#[tokio::test(flavor = "multi_thread")]
async fn a_deadline_in_a_statement_is_recorded_alone() {
    both(a_deadline_in_a_statement_is_recorded_alone_of).await;
}

async fn a_deadline_in_a_statement_is_recorded_alone_of(fixture: InboxFixture) {
    let (consumer, holder) = held_row(&fixture).await;
    let hanging = record(0, "hangs", "sql UPDATE hot SET n = n + 1");
    check(
        &fixture,
        &consumer,
        &SessionSettings::default(),
        &[(hanging, "failed_retryable", Some("deadline"), 1)],
    )
    .await;
    let backends: Vec<_> =
        fixture.script.runs("hangs").iter().map(|ran| ran.backend.to_string()).collect();
    assert!(!backends.is_empty());
    fixture
        .until(&format!(
            "SELECT NOT EXISTS (SELECT FROM pg_stat_activity WHERE pid IN ({}))",
            backends.join(", ")
        ))
        .await;
    holder.close().await.unwrap();
    fixture.retry_until_settled(&fixture.host(&consumer)).await;
    assert_eq!(fixture.row(&consumer, "hangs").await.state(), ("completed", None, 2));
    fixture.finish().await;
}

/// What could go wrong: the same from a retry worker.
#[tokio::test(flavor = "multi_thread")]
async fn a_deadline_of_a_retry_is_an_attempt() {
    let fixture = InboxFixture::new().await;
    let (consumer, holder) = held_row(&fixture).await;
    let host = fixture.host(&consumer);
    deliver(&host, &[record(0, "a", "before 2 retry 0\nbefore 3 sql UPDATE hot SET n = n + 1")])
        .await;
    fixture.retry_until_settled(&host).await;
    assert_eq!(fixture.row(&consumer, "a").await.state(), ("completed", None, 3));
    holder.close().await.unwrap();
    fixture.finish().await;
}

/// What could go wrong: a handler that does nothing holds its transaction for ever.
#[tokio::test(flavor = "multi_thread")]
async fn a_deadline_while_idle_costs_no_connection() {
    both(a_deadline_while_idle_costs_no_connection_of).await;
}

async fn a_deadline_while_idle_costs_no_connection_of(fixture: InboxFixture) {
    let consumer =
        fixture.simple("", "limits = { deadline_ms = 200 }\nbatch = { duration_ms = 5000 }").await;
    check(
        &fixture,
        &consumer,
        &SessionSettings::default(),
        &[(record(0, "sleeps", "sleep 20000"), "failed_retryable", Some("deadline"), 1)],
    )
    .await;
    assert_eq!(
        fixture.row(&consumer, "sleeps").await.last_error.as_deref(),
        Some("stopped after 200 ms")
    );
    let backends =
        ["before0", "sleeps", "last"].map(|id| fixture.script.runs(id).last().unwrap().backend);
    assert!(backends.iter().all(|backend| *backend == backends[0]), "{backends:?}");
    fixture.finish().await;
}

/// What could go wrong: a handler meets a deadlock or a lock timeout under a savepoint of its own,
/// goes back to it and fails, and the message pays for it with an attempt. A5.
#[tokio::test(flavor = "multi_thread")]
async fn contention_under_a_handlers_savepoint_is_nobodys() {
    let fixture = InboxFixture::new().await;
    let (consumer, holder) = held_row(&fixture).await;
    let tries = Arc::new(AtomicUsize::new(0));
    let counted = tries.clone();
    let handler = PlainHandler::new(1, move |tx, run| {
        counted.fetch_add(1, Ordering::Relaxed);
        Box::pin(async move {
            execute(
                tx,
                &format!(
                    "INSERT INTO effect VALUES ('orders', '{}', {}, 1)",
                    run.message.id, run.attempt
                ),
            )
            .await?;
            execute(tx, "SAVEPOINT own").await?;
            if execute(tx, "UPDATE hot SET n = n + 1").await.is_err() {
                execute(tx, "ROLLBACK TO SAVEPOINT own").await?;
                tx.recovered().await;
                return Err(Failure::new(FailureKind::Other, "gave up"));
            }
            Ok(Output::default())
        })
    });
    let settings = SessionSettings { lock_timeout_ms: 100, ..SessionSettings::default() };
    let host = fixture.host_with(&consumer, PlainHandlers::of(handler), &settings);
    let delivering = tokio::spawn(async move { deliver(&host, &[record(0, "a", "")]).await });
    wait::until(
        DEADLINE,
        Duration::from_millis(5),
        async || Ok(tries.load(Ordering::Relaxed) >= 2),
        async || "the message was not run again".to_owned(),
    )
    .await
    .unwrap();
    holder.close().await.unwrap();
    assert!(delivering.await.unwrap().is_empty());
    assert_eq!(fixture.row(&consumer, "a").await.state(), ("completed", None, 1));
    fixture.finish().await;
}

/// What could go wrong: a handler comes nearer and nearer to its deadline, holding locks all the
/// while, and its owner learns of it when messages fail. S3-013.
#[tokio::test]
async fn a_handler_near_its_deadline_is_warned_of() {
    let lines = Lines::default();
    let writer = lines.clone();
    let logging =
        tracing_subscriber::fmt().with_ansi(false).with_writer(move || writer.clone()).finish();
    let _logging = tracing::subscriber::set_default(logging);
    let fixture = InboxFixture::new().await;
    let consumer =
        fixture.simple("", "limits = { deadline_ms = 2000 }\nbatch = { duration_ms = 5000 }").await;
    deliver(
        &fixture.host(&consumer),
        &[record(0, "slow", "sleep 1100"), record(1, "quick", "sleep 10")],
    )
    .await;
    let text = lines.text();
    let warned: Vec<_> =
        text.lines().filter(|line| line.contains("more than half of its deadline")).collect();
    assert_eq!(warned.len(), 1, "{text}");
    // S1-055, S3-013.
    assert!(
        warned[0].contains("WARN")
            && warned[0].contains("message_id=\"slow\"")
            && warned[0].contains("deadline_ms=2000"),
        "{text}"
    );
    fixture.finish().await;
}

/// What was logged.
#[derive(Clone, Default)]
struct Lines(Arc<Mutex<Vec<u8>>>);

impl Lines {
    fn text(&self) -> String {
        String::from_utf8_lossy(&self.0.lock().unwrap()).into_owned()
    }
}

impl std::io::Write for Lines {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().unwrap().write(bytes)
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

/// What could go wrong: a statement that PostgreSQL itself stopped counts as the host's trouble.
#[tokio::test(flavor = "multi_thread")]
async fn a_statement_timeout_is_the_messages() {
    both(a_statement_timeout_is_the_messages_of).await;
}

async fn a_statement_timeout_is_the_messages_of(fixture: InboxFixture) {
    let consumer = fixture.simple("", "").await;
    let settings = SessionSettings { statement_timeout_ms: 300, ..SessionSettings::default() };
    let slow = record(0, "slow", "sql SELECT count(*) FROM generate_series(1, 1000000000)");
    check(
        &fixture,
        &consumer,
        &settings,
        &[(slow, "failed_retryable", Some("sql_error:57014"), 1)],
    )
    .await;
    fixture.finish().await;
}

/// What could go wrong: what fails only at COMMIT takes the whole batch with it, again and again,
/// or nobody is blamed. B2, D3.
#[tokio::test(flavor = "multi_thread")]
async fn a_deferred_constraint_is_its_messages_failure() {
    both(a_deferred_constraint_is_its_messages_failure_of).await;
}

async fn a_deferred_constraint_is_its_messages_failure_of(fixture: InboxFixture) {
    let consumer = fixture
        .simple(
            "CREATE TABLE parent (id int PRIMARY KEY); \
        CREATE TABLE child (id int REFERENCES parent DEFERRABLE INITIALLY DEFERRED);",
            "batch = { duration_ms = 5000 }",
        )
        .await;
    check(
        &fixture,
        &consumer,
        &SessionSettings::default(),
        &[
            (
                record(0, "orphan", "sql INSERT INTO child VALUES (7)"),
                "failed_retryable",
                Some("sql_error:23503"),
                1,
            ),
            (
                record(
                    0,
                    "later",
                    "sql INSERT INTO child VALUES (8)\nsql INSERT INTO parent VALUES (8)",
                ),
                "completed",
                None,
                1,
            ),
        ],
    )
    .await;
    fixture.finish().await;
}

/// A tenant that may write functions, as an operator can allow, with a table whose trigger raises
/// the code that is inserted: at once or at COMMIT.
async fn raising(fixture: &InboxFixture, policy: &str) -> TestConsumer {
    let tenant: Tenant = fixture.tenant("acme", "").await;
    fixture.execute(format!("GRANT USAGE ON LANGUAGE plpgsql TO {}", tenant.owner_login)).await;
    fixture
        .control
        .tenant_databases()
        .apply_migration(
            &tenant,
            "raises",
            "CREATE TABLE now_raises (code text); CREATE \
        TABLE then_raises (code text); \
        CREATE FUNCTION raise_it() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION \
        'raised' USING ERRCODE = NEW.code; END $$; \
        CREATE TRIGGER now AFTER INSERT ON now_raises FOR EACH ROW EXECUTE FUNCTION raise_it(); \
        CREATE CONSTRAINT TRIGGER later AFTER INSERT ON then_raises DEFERRABLE INITIALLY DEFERRED \
        FOR EACH ROW EXECUTE FUNCTION raise_it();",
        )
        .await
        .unwrap();
    fixture.consumer(&tenant, "orders", policy).await
}

/// What could go wrong: a tenant's code raises a code that the host takes for its own trouble, and
/// its partition stands still for ever. A3, D3.
#[tokio::test(flavor = "multi_thread")]
async fn a_tenants_code_may_raise_what_it_likes() {
    both(a_tenants_code_may_raise_what_it_likes_of).await;
}

async fn a_tenants_code_may_raise_what_it_likes_of(fixture: InboxFixture) {
    let consumer = raising(
        &fixture,
        "batch = { duration_ms = 5000 }\nretry = { attempts_max = 2, \
            backoff_min_ms = 1, backoff_max_ms = 1 }",
    )
    .await;
    let codes = [
        "P0001", "23514", "OB001", "OB002", "OB003", "OB005", "42501", "57P01", "57014", "53100",
        "08006", "XX000", "25P02", "40001", "40P01", "55P03",
    ];
    let mut cases = Vec::new();
    for (code, table) in codes.iter().flat_map(|code| [(code, "now_raises"), (code, "then_raises")])
    {
        let reason = if ["40001", "40P01", "55P03"].contains(code) {
            "contention".to_owned()
        } else {
            format!("sql_error:{code}")
        };
        cases.push((
            record(
                0,
                &format!("{table} {code}"),
                &format!("sql INSERT INTO {table} VALUES ('{code}')"),
            ),
            reason,
        ));
    }
    let cases: Vec<_> = cases
        .iter()
        .map(|(record, reason)| (record.clone(), "failed_retryable", Some(reason.as_str()), 1))
        .collect();
    check(&fixture, &consumer, &SessionSettings::default(), &cases).await;
    fixture.retry_until_settled(&fixture.host(&consumer)).await;
    assert_eq!(
        fixture
            .number(
                "SELECT count(*) FROM oncebox.inbox WHERE status = 'failed_terminal' AND \
            attempts = 2"
            )
            .await,
        cases.len() as i64
    );
    fixture.finish().await;
}

/// What could go wrong: a tenant's code lets its session forget what the host prepared on it, and
/// whatever comes to that session next stands still for ever.
#[tokio::test(flavor = "multi_thread")]
async fn a_session_that_forgets_what_was_prepared_stops_nothing() {
    both(a_session_that_forgets_what_was_prepared_stops_nothing_of).await;
}

async fn a_session_that_forgets_what_was_prepared_stops_nothing_of(fixture: InboxFixture) {
    let tenant: Tenant = fixture.tenant("acme", "").await;
    fixture.execute(format!("GRANT USAGE ON LANGUAGE plpgsql TO {}", tenant.owner_login)).await;
    fixture
        .control
        .tenant_databases()
        .apply_migration(
            &tenant,
            "forgets",
            "CREATE TABLE now_forgets (id int); CREATE TABLE then_forgets (id int); \
        CREATE FUNCTION forget() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN EXECUTE 'DEALLOCATE \
        ALL'; RETURN NULL; END $$; \
        CREATE TRIGGER now AFTER INSERT ON now_forgets FOR EACH ROW EXECUTE FUNCTION forget(); \
        CREATE CONSTRAINT TRIGGER later AFTER INSERT ON then_forgets DEFERRABLE INITIALLY DEFERRED \
        FOR EACH ROW EXECUTE FUNCTION forget();",
        )
        .await
        .unwrap();
    let consumer = fixture
        .consumer(
            &tenant,
            "orders",
            "retry = { attempts_max = 5, backoff_min_ms = 1, backoff_max_ms = 1 }",
        )
        .await;
    let host = fixture.host(&consumer);
    let mut partition = take(&host).await;
    for round in 0..6 {
        let table = if round % 2 == 0 { "now_forgets" } else { "then_forgets" };
        // A session that is sound, then one that has just forgotten everything.
        let forgets = format!("sql INSERT INTO {table} VALUES ({round})");
        drive(&mut partition, &[record(3 * round, &format!("sound{round}"), "")]).await;
        let behind = record(3 * round + 2, &format!("behind{round}"), "sql SELECT 1");
        drive(
            &mut partition,
            &[record(3 * round + 1, &format!("forgets{round}"), &forgets), behind],
        )
        .await;
        fixture.retry_until_settled(&host).await;
    }
    let rows = fixture.rows().await;
    let its_own = |row: &Row| {
        row.message_id.starts_with("forgets")
            && row.state() == ("failed_terminal", Some("sql_error:26000"), 5)
    };
    assert!(
        rows.len() == 18 && rows.iter().all(|row| row.status == "completed" || its_own(row)),
        "{rows:#?}"
    );
    fixture.finish().await;
}

/// What could go wrong: contention is counted as a failure at once, or repeated for ever. A3.
#[tokio::test(flavor = "multi_thread")]
async fn contention_alone_is_repeated_then_an_attempt() {
    both(contention_alone_is_repeated_then_an_attempt_of).await;
}

async fn contention_alone_is_repeated_then_an_attempt_of(fixture: InboxFixture) {
    let (consumer, holder) = held_row(&fixture).await;
    let settings = SessionSettings { lock_timeout_ms: 50, ..SessionSettings::default() };
    check(
        &fixture,
        &consumer,
        &settings,
        &[(
            record(0, "waits", "sql UPDATE hot SET n = n + 1"),
            "failed_retryable",
            Some("contention"),
            1,
        )],
    )
    .await;
    assert!(fixture.script.runs("waits").len() >= 6, "{} runs", fixture.script.runs("waits").len());
    holder.close().await.unwrap();
    fixture.retry_until_settled(&fixture.host(&consumer)).await;
    assert_eq!(fixture.row(&consumer, "waits").await.state(), ("completed", None, 2));
    fixture.finish().await;
}

const HOT: &str = "CREATE TABLE hot (id int PRIMARY KEY, n int NOT NULL); INSERT INTO hot SELECT \
    n, 0 FROM generate_series(1, 10) n;";

/// What could go wrong: two hosts that lock in opposite order deadlock, and one loses its effects
/// or repeats the same batch for ever. A5, D2.
#[tokio::test(flavor = "multi_thread")]
async fn a_deadlock_of_two_hosts_costs_neither_its_effects() {
    both(a_deadlock_of_two_hosts_costs_neither_its_effects_of).await;
}

async fn a_deadlock_of_two_hosts_costs_neither_its_effects_of(fixture: InboxFixture) {
    let consumer = fixture.simple(HOT, "batch = { duration_ms = 60000 }").await;
    let mut tasks = Vec::new();
    for (name, first, second) in [("x", 1, 2), ("y", 2, 1)] {
        let host = fixture.host(&consumer);
        let mut log = vec![record(
            0,
            name,
            &format!(
                "sql UPDATE hot SET n = n + 1 WHERE id = {first}\ngate {name}\nsql UPDATE hot SET \
                    n = n + 1 WHERE id = {second}"
            ),
        )];
        log.extend((1..64).map(|n| record(n, &format!("{name}{n}"), "")));
        tasks.push(tokio::spawn(async move { deliver(&host, &log).await }));
    }
    for name in ["x", "y"] {
        fixture.script.gate(name).reached(1).await;
    }
    for name in ["x", "y"] {
        fixture.script.gate(name).open();
    }
    for task in tasks {
        let errors = task.await.unwrap();
        assert!(errors.is_empty(), "{errors:?}");
    }
    assert_eq!(
        fixture.number(format!("SELECT sum(n) FROM {}.hot", consumer.tenant.schema_name)).await,
        4
    );
    let sizes: Vec<i64> = sqlx::query_scalar(AssertSqlSafe(format!(
        "SELECT count(*) FROM {}.effect GROUP BY xmin::text ORDER BY 1",
        consumer.tenant.schema_name
    )))
    .fetch_all(&fixture.pool)
    .await
    .unwrap();
    // The winner's batch stays whole; the loser's is run again, in parts only where it loses again.
    assert!(
        sizes.last() == Some(&64) && sizes.iter().sum::<i64>() == 128,
        "messages in each transaction: {sizes:?}"
    );
    assert_eq!(
        fixture
            .number(
                "SELECT count(*) FROM oncebox.inbox WHERE status = 'completed' AND attempts = 1"
            )
            .await,
        128
    );
    fixture.finish().await;
}

/// What could go wrong: with many workers on a few rows nothing gets done, or updates are lost. A5.
#[tokio::test(flavor = "multi_thread")]
async fn hot_rows_and_many_workers_lose_nothing() {
    both(hot_rows_and_many_workers_lose_nothing_of).await;
}

async fn hot_rows_and_many_workers_lose_nothing_of(fixture: InboxFixture) {
    let consumer = fixture.simple(HOT, "").await;
    let mut tasks = Vec::new();
    for worker in 0..6_i64 {
        let host = fixture.host(&consumer);
        let log: Vec<_> = (0..40)
            .map(|n| {
                let rows = [(worker * 3 + n) % 10 + 1, (worker * 7 + n * 3) % 10 + 1];
                record(
                    n,
                    &format!("{worker}-{n}"),
                    &rows
                        .map(|id| format!("sql UPDATE hot SET n = n + 1 WHERE id = {id}"))
                        .join("\n"),
                )
            })
            .collect();
        tasks.push(tokio::spawn(async move { deliver(&host, &log).await }));
    }
    for task in tasks {
        task.await.unwrap();
    }
    fixture.retry_until_settled(&fixture.host(&consumer)).await;
    assert_eq!(
        fixture.number(format!("SELECT sum(n) FROM {}.hot", consumer.tenant.schema_name)).await,
        6 * 40 * 2
    );
    assert_eq!(
        fixture.number("SELECT count(*) FROM oncebox.inbox WHERE status = 'completed'").await,
        240
    );
    fixture.finish().await;
}

/// What could go wrong: where failures are common, each batch runs twice. D2, A4.
#[tokio::test(flavor = "multi_thread")]
async fn savepoints_stay_on_while_failures_are_common() {
    let fixture = InboxFixture::new().await;
    let consumer = fixture.simple("", "batch = { duration_ms = 60000 }").await;
    let host = fixture.host(&consumer);
    let batch = |from: i64| -> Vec<Record> {
        (from..from + 10)
            .map(|n| record(n, &format!("m{n}"), if n % 10 == 9 { "reject" } else { "" }))
            .collect()
    };
    let mut partition = take(&host).await;
    drive(&mut partition, &batch(0)).await;
    assert_eq!(fixture.script.runs("m0").len(), 2, "without savepoints the batch runs again");
    for n in 1..30 {
        drive(&mut partition, &batch(n * 10)).await;
    }
    drive(&mut partition, &batch(300)).await;
    assert_eq!(fixture.script.runs("m300").len(), 1, "with savepoints it does not");
    partition.close().await;
    assert_eq!(
        fixture.number("SELECT count(*) FROM oncebox.inbox WHERE status = 'failed_terminal'").await,
        31
    );
    // More than 60 savepoints overflow a cache, so that batches are cut there.
    let many: Vec<_> = (1000..1064).map(|n| record(n, &format!("m{n}"), "")).collect();
    let mut partition = take(&host).await;
    assert_eq!(partition.process(&many).await.unwrap(), 60);
    drive(&mut partition, &many).await;
    partition.close().await;
    fixture.finish().await;
}

/// What could go wrong: a handler is given a payload that its consumer says it never is; what is
/// parked for that lets its key pass, keeps no payload, or is run when it is redriven and still not
/// valid.
#[tokio::test(flavor = "multi_thread")]
async fn a_payload_that_is_not_valid_never_reaches_a_handler() {
    const POLICY: &str =
        "order = 'key'\n[schemas.'*']\njson_schema = { type = 'object', required = ['account'] }";
    for ack in ["after_commit", "after_insert"] {
        let fixture = InboxFixture::new().await;
        let consumer = fixture.simple("", &format!("ack = '{ack}'\n{POLICY}")).await;
        let handler = PlainHandler::new(1, |tx, run| {
            Box::pin(async move {
                let sql = format!(
                    "INSERT INTO effect (consumer, message_id, attempt, version) VALUES ('{}', \
                        '{}', 1, 1)",
                    run.consumer, run.message.id
                );
                execute(tx, &sql).await.map(|_| Output::default())
            })
        });
        let host =
            fixture.host_with(&consumer, PlainHandlers::of(handler), &SessionSettings::default());
        let of_key = |offset, id, key: &str, payload| Record {
            key: Some(key.into()),
            ..record(offset, id, payload)
        };
        let log = [
            of_key(0, "valid", "a", r#"{"account": "x"}"#),
            of_key(1, "wrong", "k", r#"{"amount": 7}"#),
            of_key(2, "behind", "k", r#"{"account": "x"}"#),
            of_key(3, "text", "b", "hunter2"),
            Record { payload: None, ..of_key(4, "tombstone", "c", "") },
        ];
        deliver(&host, &log).await;
        fixture.retry_until_settled(&host).await;
        let states = async || {
            let rows = fixture.rows().await.into_iter();
            rows.map(|row| {
                format!("{} {} {}", row.message_id, row.status, row.reason.unwrap_or_default())
            })
            .collect::<Vec<_>>()
        };
        let expected = [
            "valid completed ",
            "wrong parked schema: /: \"account\" is a required property",
            "behind waiting ",
            "text parked schema: it is no JSON, in line 1 at 1",
            "tombstone completed ",
        ];
        // S0-037.
        assert_eq!(states().await, expected, "{ack}");
        assert_eq!(
            fixture.row(&consumer, "wrong").await.payload.as_deref(),
            Some(br#"{"amount": 7}"#.as_slice())
        );

        let parked = JobFilter { status: Some("parked".to_owned()), ..JobFilter::default() };
        let again = inbox_job(Action::Redrive, "orders", parked);
        assert_eq!(carry_out(&fixture.control, "acme", &again).await.unwrap().changed, 2);
        fixture.retry_until_settled(&host).await;
        let row = fixture.row(&consumer, "wrong").await;
        assert_eq!(
            (row.state(), row.last_error.as_deref()),
            (("parked", Some("schema"), 1), Some("/: \"account\" is a required property"))
        );
        assert_eq!(fixture.effects(&consumer, "wrong").await, 0);
        fixture
            .execute(
                "UPDATE oncebox.inbox SET payload = '{\"account\": \"y\"}' WHERE message_id \
            = 'wrong'",
            )
            .await;
        assert_eq!(carry_out(&fixture.control, "acme", &again).await.unwrap().changed, 2);
        fixture.retry_until_settled(&host).await;
        assert_eq!(states().await[1..3], ["wrong completed ", "behind completed "], "{ack}");
        fixture.finish().await;
    }
}
