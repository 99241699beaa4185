//! Statements that a handler enqueues, and messages that run ahead of them. What could go wrong: a
//! message has another effect or another end than with statements that are waited for; an error is
//! charged to another message; a handler learns of a statement that is rolled back afterwards; a
//! statement is never sent, or its error never read; both ends of a connection wait for each other.

use std::sync::Arc;

use oncebox_inbox::{ConsumerInbox, SessionSettings};
use oncebox_model::{error::InboxError, policy::Limits, record::Record};
use oncebox_tests::{
    inbox::{InboxFixture, PlainHandlers, TestConsumer, drive, open},
    interpreter::{interpreter, record_of},
    proxy::Proxy,
};
use rand::{Rng, SeedableRng, rngs::StdRng};
use sqlx::Executor;

const TABLES: &str = "CREATE TABLE item (id text PRIMARY KEY, n int NOT NULL CHECK (n > 0), \
        UNIQUE (id, n) DEFERRABLE); \
    CREATE TABLE counter (id int PRIMARY KEY, n int NOT NULL); \
    INSERT INTO counter SELECT id, 0 FROM generate_series(1, 4) id;";

async fn host_of(
    fixture: &InboxFixture,
    consumer: &TestConsumer,
    limits: Limits,
) -> Arc<ConsumerInbox> {
    let handler = Arc::new(interpreter(limits).await.unwrap());
    fixture.host_with(consumer, PlainHandlers::of(handler), &SessionSettings::default())
}

/// A step whose statement is waited for, and one whose statement may be enqueued.
#[derive(Debug, Clone)]
struct Program {
    steps: Vec<(&'static str, String)>,
    end: &'static str,
}

/// The statement that a message which succeeds has carried out once.
fn effect(number: usize) -> String {
    format!("INSERT INTO effect VALUES ('c', 'm{number}', 1, 1)")
}

/// What a message does: mostly what succeeds, and any of the ways to fail.
fn program(random: &mut StdRng, number: usize) -> Program {
    let statement = |random: &mut StdRng, step: usize| -> String {
        let id = random.random_range(1..=4);
        match random.random_range(0..24) {
            0 => "INSERT INTO item VALUES ('taken', 1)".to_owned(),
            1 => format!("INSERT INTO item VALUES ('{number}-{step}-bad', 0)"),
            2 => "SELECT 1 / 0".to_owned(),
            3 => "INSERT INTO nowhere VALUES (1)".to_owned(),
            4 => "COMMIT".to_owned(),
            5 => format!("SELECT n FROM counter WHERE id = {id}"),
            6 => "UPDATE counter SET n = n + 1 RETURNING n".to_owned(),
            7 => "UPDATE counter SET n = n / (n - n) WHERE id = 1".to_owned(),
            8..16 => format!("INSERT INTO item VALUES ('{number}-{step}', {id})"),
            _ => format!("UPDATE counter SET n = n + {id} WHERE id = {id}"),
        }
    };
    let mut steps = vec![("e", effect(number))];
    for step in 0..random.random_range(1..5) {
        if random.random_bool(0.15) {
            steps.push(("s", String::new()));
            for inner in 0..random.random_range(1..3) {
                steps.push(("e", statement(random, 10 * (step + 1) + inner)));
            }
            let end = ["r", "l", "d", "o"][random.random_range(0..4)];
            steps.push((end, String::new()));
        } else {
            steps.push(("e", statement(random, step)));
        }
    }
    let end = ["n", "n", "n", "n", "n", "n", "f", "j", "x"][random.random_range(0..9)];
    Program { steps, end }
}

/// What is left of a batch: rows of the tenant's tables, and how each message ended.
async fn left(
    fixture: &InboxFixture,
    consumer: &TestConsumer,
    messages: usize,
) -> (Vec<String>, Vec<String>) {
    let schema = &consumer.tenant.schema_name;
    let tables = format!(
        "SELECT concat_ws(' ', id, n) FROM {schema}.item UNION ALL \
         SELECT concat_ws(' ', 'counter', id, n) FROM {schema}.counter ORDER BY 1"
    );
    let rows = sqlx::query_scalar(sqlx::AssertSqlSafe(tables))
        .fetch_all(&mut fixture.superuser().await)
        .await
        .unwrap();
    let mut ends = Vec::new();
    for number in 0..messages {
        let row = fixture.row(consumer, &format!("m{number}")).await;
        let error = row.last_error.as_deref().unwrap_or_default().to_owned();
        ends.push(format!("{number} {:?} {error}", row.state()));
    }
    (rows, ends)
}

/// Messages that enqueue any of their statements leave the same rows, and end the same way with the
/// same errors, as the same messages with statements that are waited for.
#[tokio::test(flavor = "multi_thread")]
async fn enqueued_statements_mean_what_statements_mean_that_are_waited_for() {
    const MESSAGES: usize = 10;
    let fixture = InboxFixture::new().await;
    let mut failed = 0;
    for seed in 0..24 {
        let mut random = StdRng::seed_from_u64(seed);
        let programs: Vec<_> = (0..MESSAGES).map(|number| program(&mut random, number)).collect();
        let mut results = Vec::new();
        for is_enqueued in [false, true] {
            let tenant = fixture.tenant(&format!("t{seed}-{is_enqueued}"), TABLES).await;
            let policy = "retry = { attempts_max = 1 }";
            let consumer = fixture.consumer(&tenant, "c", policy).await;
            let host = host_of(&fixture, &consumer, Limits::default()).await;
            let records: Vec<Record> = (0..)
                .zip(&programs)
                .map(|(number, program)| {
                    let step = |(op, text): &(&'static str, String)| match *op {
                        "e" if is_enqueued && random.random_bool(0.7) => ("q", text.clone()),
                        op => (op, text.clone()),
                    };
                    let steps: Vec<_> = program.steps.iter().map(step).collect();
                    record_of(number, &format!("m{number}"), &steps, program.end)
                })
                .collect();
            let mut partition = open(&host, 0).await;
            let errors = drive(&mut partition, &records).await;
            assert!(errors.is_empty(), "seed {seed}: {errors:?}");
            partition.close().await;
            results.push(left(&fixture, &consumer, MESSAGES).await);
        }
        failed += results[0].1.iter().filter(|end| !end.contains("completed")).count();
        assert_eq!(results[0], results[1], "seed {seed}: {programs:#?}");
    }
    assert!((40..200).contains(&failed), "{failed} of 240 fail");
    fixture.finish().await;
}

/// Records of messages with these steps, one after the other.
fn records(messages: &[&[(&str, &str)]]) -> Vec<Record> {
    let record = |(number, steps): (usize, &&[(&str, &str)])| {
        let own = steps.iter().map(|(op, text)| (*op, (*text).to_owned()));
        let steps: Vec<_> = [("q", effect(number))].into_iter().chain(own).collect();
        record_of(number as i64, &format!("m{number}"), &steps, "n")
    };
    messages.iter().enumerate().map(record).collect()
}

/// What could go wrong: a message is failed for the number of rows that another one touched; one
/// that has to touch a row, and does not, is completed, or keeps half of its effects; a handler that
/// undoes such a statement, or decides itself, is not believed.
#[tokio::test(flavor = "multi_thread")]
async fn a_message_ends_as_a_statement_says_that_touches_other_rows_than_expected() {
    let fixture = InboxFixture::new().await;
    let tenant = fixture.tenant("acme", TABLES).await;
    let consumer = fixture.consumer(&tenant, "c", "retry = { attempts_max = 1 }").await;
    let host = host_of(&fixture, &consumer, Limits::default()).await;
    let (one, none) = ("UPDATE counter SET n = n + 1 WHERE id = 1", "DELETE FROM item");
    let two = "UPDATE counter SET n = n + 1 WHERE id < 3";
    let mut records = records(&[
        &[("u", one)],
        &[("q", one), ("u", none)],
        &[("u", one), ("q", none), ("e", one)],
        &[("u", two)],
        &[("e", one), ("u", none), ("e", one), ("q", one)],
        &[("s", ""), ("u", two), ("r", ""), ("u", one)],
        &[("u", none), ("s", ""), ("q", one), ("r", "")],
        &[("s", ""), ("u", two), ("l", "")],
        &[("u", "UPDATE counter SET n = n + 1 WHERE id = 2 RETURNING n")],
        &[("u", "SELECT n FROM counter")],
        &[("u", none), ("q", "SELECT 1 / 0 FROM counter")],
    ]);
    let rejects = [("u", none.to_owned())];
    records.push(record_of(11, "m11", &rejects, "j"));
    let mut partition = open(&host, 0).await;
    assert!(drive(&mut partition, &records).await.is_empty());
    partition.close().await;
    for (number, ends) in (0..).zip([
        None,
        Some("parked"),
        None,
        Some("parked"),
        Some("parked"),
        None,
        Some("parked"),
        Some("parked"),
        None,
        Some("parked"),
        Some("failed_terminal"),
        Some("failed_terminal"),
    ]) {
        let row = fixture.row(&consumer, &format!("m{number}")).await;
        assert_eq!(row.status, ends.unwrap_or("completed"), "{number}: {row:?}");
        let error = row.last_error.as_deref();
        match ends {
            Some("parked") => assert_eq!(error, Some("words"), "{number}"),
            Some(_) if number == 10 => assert!(error.unwrap().starts_with("22012: ")),
            Some(_) => assert_eq!((error, &*row.reason.unwrap()), (Some("words"), "reject")),
            None => assert_eq!(error, None, "{number}"),
        }
    }
    let counted = format!("SELECT sum(n)::bigint FROM {}.counter", tenant.schema_name);
    assert_eq!(fixture.number(counted).await, 5);
    fixture.finish().await;
}

/// What could go wrong: a message is stopped, and loses an attempt, for a statement of an earlier one
/// that takes too long; or nobody stops such a statement.
#[tokio::test(flavor = "multi_thread")]
async fn a_slow_statement_is_stopped_at_the_deadline_of_its_own_message() {
    const SLOW: &str = "INSERT INTO item SELECT 'slow', count(*) FROM \
        generate_series(1, 30000) a, generate_series(1, 30000) b";
    let fixture = InboxFixture::new().await;
    for (name, second, last) in [("a", "q", "q"), ("b", "q", "e"), ("c", "e", "q")] {
        let tenant = fixture.tenant(name, TABLES).await;
        let policy = "limits = { deadline_ms = 1000 }\nbatch = { duration_ms = 5000 }\n\
            retry = { attempts_max = 1 }";
        let consumer = fixture.consumer(&tenant, "c", policy).await;
        let host = host_of(&fixture, &consumer, Limits::default()).await;
        let one = "UPDATE counter SET n = n + 1 WHERE id = 1";
        let records = records(&[&[("q", one)], &[(second, SLOW)], &[(last, one)]]);
        let mut partition = open(&host, 0).await;
        let errors = drive(&mut partition, &records).await;
        assert!(errors.is_empty(), "{errors:?}");
        partition.close().await;
        for (number, state) in [
            (0, ("completed", None, 1)),
            (1, ("failed_terminal", Some("deadline"), 1)),
            (2, ("completed", None, 1)),
        ] {
            let row = fixture.row(&consumer, &format!("m{number}")).await;
            assert_eq!(row.state(), state, "{name} {number}: {row:?}");
        }
    }
    fixture.finish().await;
}

/// What could go wrong: while a handler computes, the host asks the server whether it still knows the
/// session, and takes the error of an enqueued statement for an answer to that.
#[tokio::test(flavor = "multi_thread")]
async fn an_error_that_comes_while_the_handler_computes_is_its_statements() {
    let fixture = InboxFixture::new().await;
    let tenant = fixture.tenant("acme", TABLES).await;
    let policy = "limits = { deadline_ms = 120000 }\nbatch = { duration_ms = 30000 }\n\
        retry = { attempts_max = 1, lease_ms = 300000 }";
    let consumer = fixture.consumer(&tenant, "c", policy).await;
    let host = host_of(&fixture, &consumer, Limits::default()).await;
    let (one, bad) = ("UPDATE counter SET n = n + 1 WHERE id = 1", "UPDATE counter SET id = 1");
    let (none, unfit) = ("DELETE FROM item", "SELECT n FROM counter WHERE id = $1");
    let messages: [&[_]; 6] = [
        &[("q", one), ("e", none), ("e", unfit)],
        &[("q", one), ("q", bad), ("w", "")],
        &[("q", one), ("s", ""), ("q", bad), ("w", ""), ("e", unfit), ("r", "")],
        &[("s", ""), ("q", bad), ("w", ""), ("r", ""), ("q", one)],
        &[("u", none), ("w", "")],
        &[("q", one)],
    ];
    let mut partition = open(&host, 0).await;
    let records = records(&messages);
    // Each pair shares a transaction: the first of it runs ahead.
    for pair in [0..1, 1..2, 2..4, 4..6] {
        assert!(drive(&mut partition, &records[pair]).await.is_empty());
    }
    partition.close().await;
    for (number, state) in [
        (0, ("failed_terminal", Some("other"), 1)), // a parameter is missing
        (1, ("failed_terminal", Some("sql_error:23505"), 1)),
        (2, ("completed", None, 1)),
        (3, ("completed", None, 1)),
        (4, ("parked", Some("park"), 1)),
        (5, ("completed", None, 1)),
    ] {
        let row = fixture.row(&consumer, &format!("m{number}")).await;
        assert_eq!(row.state(), state, "{number}: {row:?}");
    }
    let counted = format!("SELECT sum(n)::bigint FROM {}.counter", tenant.schema_name);
    assert_eq!(fixture.number(counted).await, 3);
    fixture.finish().await;
}

/// What could go wrong: a connection that breaks while the host waits for statements of messages
/// that ran ahead is taken for a fault of the host alone, and the messages break it for ever.
#[tokio::test(flavor = "multi_thread")]
async fn a_connection_that_breaks_at_enqueued_statements_makes_their_messages_suspect() {
    let fixture = InboxFixture::new().await;
    let (one, other) = ("UPDATE counter SET n = n + 1 WHERE id = 1", "DELETE FROM item");
    // A later message waits, for its own statement; or nobody does before the end.
    for (name, second, third) in [("a", one, other), ("b", other, one)] {
        let tenant = fixture.tenant(name, TABLES).await;
        let consumer = fixture.consumer(&tenant, "c", "").await;
        let host = host_of(&fixture, &consumer, Limits::default()).await;
        let messages: [&[_]; 4] =
            [&[("e", one), ("e", other)], &[("q", other)], &[("q", second)], &[("q", third)]];
        let records = records(&messages);
        let mut partition = open(&host, 0).await;
        assert!(drive(&mut partition, &records[..1]).await.is_empty());
        let mut blocker = fixture.superuser().await;
        let held = format!("BEGIN; UPDATE {}.counter SET n = n WHERE id = 1", tenant.schema_name);
        blocker.execute(sqlx::raw_sql(sqlx::AssertSqlSafe(held))).await.unwrap();
        let driven = tokio::spawn(async move {
            let errors = drive(&mut partition, &records[1..]).await;
            partition.close().await;
            errors
        });
        fixture.until_blocked(1).await;
        fixture.end_blocked().await;
        blocker.execute("COMMIT").await.unwrap();
        let errors = driven.await.unwrap();
        assert!(
            matches!(&*errors, [InboxError::LostInHandler { among: 3, .. }]),
            "{name}: {errors:?}"
        );
        fixture.retry_until_settled(&host).await; // they run alone, under a lease
        let counted = format!("SELECT sum(n)::bigint FROM {}.counter", tenant.schema_name);
        assert_eq!(fixture.number(counted).await, 2, "{name}");
        for number in 0..4 {
            let row = fixture.row(&consumer, &format!("m{number}")).await;
            assert_eq!(row.status, "completed", "{name} {number}: {row:?}");
        }
    }
    fixture.finish().await;
}

/// What could go wrong: what a guest enqueues is not bounded by its caps, is not the kind of
/// statement that a guest may send, or returns more than the network holds, so that both ends wait
/// for each other.
#[tokio::test(flavor = "multi_thread")]
async fn enqueued_statements_are_bounded_like_others() {
    let fixture = InboxFixture::new().await;
    let tenant = fixture.tenant("acme", TABLES).await;
    let consumer = fixture.consumer(&tenant, "c", "retry = { attempts_max = 1 }").await;
    let limits = Limits { statements_max: 4, statement_texts_max: 3, ..Limits::default() };
    let host = host_of(&fixture, &consumer, limits).await;
    let one = "UPDATE counter SET n = n + 1 WHERE id = 1";
    let large = "SELECT repeat('x', 100000) FROM generate_series(1, 300)";
    let records = records(&[
        &[("q", one), ("q", one), ("q", one)],
        &[("q", one), ("q", one), ("q", one), ("q", one)],
        &[("q", one), ("q", "DELETE FROM item"), ("q", "DELETE FROM item WHERE n = 1")],
        &[("q", "COMMIT")],
        &[("q", "DO $$ BEGIN END $$")],
        &[("q", "UPDATE counter SET n = $1")],
        &[("q", large), ("q", one), ("q", large)],
    ]);
    let mut partition = open(&host, 0).await;
    assert!(drive(&mut partition, &records).await.is_empty());
    partition.close().await;
    for (number, state) in [
        (0, ("completed", None, 1)),
        (1, ("failed_terminal", Some("limit"), 1)),
        (2, ("failed_terminal", Some("limit"), 1)),
        (3, ("failed_terminal", Some("statement_refused"), 1)),
        (4, ("failed_terminal", Some("statement_refused"), 1)),
        (5, ("failed_terminal", Some("other"), 1)),
        (6, ("completed", None, 1)),
    ] {
        let row = fixture.row(&consumer, &format!("m{number}")).await;
        assert_eq!(row.state(), state, "{number}: {row:?}");
    }
    let counted = format!("SELECT sum(n)::bigint FROM {}.counter", tenant.schema_name);
    assert_eq!(fixture.number(counted).await, 4);
    fixture.finish().await;
}

/// The effect of the message behind those that had one, by a text that is the same for all.
const NEXT_EFFECT: &str = "WITH c AS (UPDATE counter SET n = n + 1 WHERE id = 3 RETURNING n) \
    INSERT INTO effect SELECT 'orders', 'm' || n - 1, 1, 1 FROM c";

/// What could go wrong: each enqueued statement waits for its answer after all.
#[tokio::test(flavor = "multi_thread")]
async fn enqueued_statements_share_round_trips() {
    let fixture = InboxFixture::new().await;
    let consumer = fixture.simple(TABLES, "batch = { duration_ms = 5000 }").await;
    let options = fixture.superuser_options();
    let server = format!("{}:{}", options.get_host(), options.get_port()).parse().unwrap();
    let proxy = Proxy::to(server).await.unwrap();
    let handler = Arc::new(interpreter(Limits::default()).await.unwrap());
    let settings = SessionSettings::default();
    let handlers = PlainHandlers::of(handler);
    let host = fixture.host_through_with(&consumer, proxy.address(), &settings, handlers);
    let (mut partition, mut next) = (open(&host, 0).await, 3);
    let work = |number: i64| {
        let steps = [
            ("q", NEXT_EFFECT.to_owned()),
            ("q", "UPDATE counter SET n = n + 1 WHERE id = 1".to_owned()),
            ("u", "UPDATE counter SET n = n + 1 WHERE id = 2".to_owned()),
            ("q", "DELETE FROM item WHERE id = 'nothing'".to_owned()),
        ];
        record_of(number, &format!("m{number}"), &steps, "n")
    };
    // The first ones prepare what later ones use.
    assert!(drive(&mut partition, &[work(0)]).await.is_empty());
    assert!(drive(&mut partition, &[work(1), work(2)]).await.is_empty());
    // One that finds 64 statements enqueued waits, and brings their answers.
    for (messages, trips) in [(1, 3), (16, 3), (17, 4), (32, 4)] {
        let before = proxy.trips();
        let records: Vec<_> = (next..next + messages).map(work).collect();
        next += messages;
        assert!(drive(&mut partition, &records).await.is_empty());
        assert_eq!(proxy.trips() - before, trips, "{messages} messages");
    }
    partition.close().await;
    let schema = &consumer.tenant.schema_name;
    let counted = format!("SELECT sum(n)::bigint FROM {schema}.counter");
    assert_eq!(fixture.number(counted).await, 3 * 69);
    fixture.finish().await;
}
