//! Statements that a handler enqueues, and messages that run ahead of them. What could go wrong: a
//! message has another effect or another end than with statements that are waited for; an error is
//! charged to another message; a handler learns of a statement that is rolled back afterwards; a
//! statement is never sent, or its error never read; both ends of a connection wait for each other.

use std::sync::Arc;

use oncebox_inbox::{ConsumerInbox, SessionSettings};
use oncebox_model::{policy::Limits, record::Record};
use oncebox_tests::{
    inbox::{InboxFixture, PlainHandlers, TestConsumer, drive, open},
    interpreter::{interpreter, record_of},
    proxy::Proxy,
};
use rand::{Rng, SeedableRng, rngs::StdRng};

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

/// The effect of the message behind those that had one, by a text that is the same for all.
const NEXT_EFFECT: &str = "WITH c AS (UPDATE counter SET n = n + 1 WHERE id = 3 RETURNING n) \
    INSERT INTO effect SELECT 'orders', 'm' || n - 1, 1, 1 FROM c";

/// What could go wrong: each enqueued statement waits for its answer after all.
#[tokio::test(flavor = "multi_thread")]
async fn enqueued_statements_share_round_trips() {
    let fixture = InboxFixture::new().await;
    let consumer = fixture.simple(TABLES, "").await;
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
