//! Leases and probation: an attempt is counted before it runs, one worker has a message at a time,
//! and a message that kills its process or its connection is found out.

use std::{
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

use oncebox_control::{Action, JobFilter};
use oncebox_devkit::local::postgres::{PostgresOptions, PrivatePostgres};
use oncebox_inbox::{ConsumerInbox, SessionSettings, retry};
use oncebox_model::{InboxError, handler::DeliveryKind, record::Record};
use oncebox_tests::{
    host::{HostFixture, Options},
    inbox::{
        Guest, InboxFixture, PlainHandlers, Script, TestConsumer, code, deliver, drive, open,
        record, records, step, take,
    },
    job::{carry_out, inbox_job},
    load::{Load, Work},
    temp_dir::TempDir,
    wait::DEADLINE,
};
use rand::{Rng, SeedableRng, rngs::StdRng};
use sqlx::{AssertSqlSafe, Connection, Executor};
use tokio::{
    io::copy_bidirectional,
    net::{TcpListener, TcpStream},
    task::spawn_blocking,
    time::{Duration, Instant, sleep, timeout},
};
use tokio_util::sync::CancellationToken;

const QUICK: &str = "retry = { backoff_min_ms = 1, backoff_max_ms = 1 }";

/// What could go wrong: with the ack after the insert something runs before it is stored, is lost
/// after it, or is never run. S1-064 to S1-069, S1-071, S0-005, S0-006, S0-049, S2-005.
#[tokio::test(flavor = "multi_thread")]
async fn after_insert_stores_first_and_workers_run() {
    let fixture = InboxFixture::new().await;
    let consumer =
        fixture.simple("", &format!("ack = 'after_insert'\npayload = 'none'\n{QUICK}")).await;
    let host = fixture.host(&consumer);
    let mut log: Vec<_> = (0..30).map(|n| record(n, &format!("m{n}"), "result 1")).collect();
    log.push(record(30, "again", "before 3 trap"));
    log.push(record(31, "rejected", "reject"));
    log.push(record(32, "m0", "result 1"));
    deliver(&host, &log).await;
    // S0-005, S0-049, S1-025, S1-034, S1-071.
    assert_eq!(
        fixture
            .number(
                "SELECT count(*) FROM oncebox.inbox WHERE status = 'received' AND payload IS \
            NOT NULL AND attempts = 0"
            )
            .await,
        32
    );
    assert!(fixture.script.runs("m0").is_empty(), "it ran before the ack");
    let stop = CancellationToken::new();
    let workers: Vec<_> =
        (0..3).map(|_| tokio::spawn(retry::work(fixture.host(&consumer), stop.clone()))).collect();
    fixture
        .until(
            "SELECT count(*) = 0 FROM oncebox.inbox WHERE status IN ('received', \
        'in_progress', 'failed_retryable')",
        )
        .await;
    stop.cancel();
    for worker in workers {
        worker.await.unwrap();
    }
    let row = fixture.row(&consumer, "m0").await;
    // S1-069.
    assert_eq!(
        (row.state(), row.epoch, row.processed, row.leased),
        (("completed", None, 1), 1, true, false)
    );
    assert_eq!(
        (row.result, row.payload, row.version_id),
        (Some(serde_json::json!(1)), None, Some(1))
    );
    assert_eq!(
        fixture.script.runs("m0").iter().map(|ran| ran.kind).collect::<Vec<_>>(),
        [DeliveryKind::Retry]
    );
    assert_eq!(fixture.row(&consumer, "again").await.state(), ("completed", None, 3));
    assert_eq!(
        fixture.row(&consumer, "rejected").await.state(),
        ("failed_terminal", Some("reject"), 1)
    );
    fixture.finish().await;
}

/// What could go wrong: an attempt that kills the process is not counted, since the count dies with
/// it. S1-010, S1-026, S0-006.
#[tokio::test(flavor = "multi_thread")]
async fn an_attempt_is_committed_before_it_runs() {
    let fixture = InboxFixture::new().await;
    let consumer = fixture.simple("", "ack = 'after_insert'").await;
    let host = fixture.host(&consumer);
    deliver(&host, &[record(0, "a", "gate g")]).await;
    let worker = tokio::spawn(async move { step(&host).await });
    fixture.script.gate("g").reached(1).await;
    let row = fixture.row(&consumer, "a").await;
    // S1-010, S1-026, S1-064.
    assert_eq!((row.state(), row.epoch, row.leased), (("in_progress", None, 1), 1, true));
    // S0-006.
    const OWNED: &str =
        "SELECT count(*) FROM oncebox.inbox WHERE locked_by LIKE 'host-%' AND locked_until > now()";
    assert_eq!(fixture.number(OWNED).await, 1, "whoever runs it is named, and for how long");
    fixture.script.gate("g").open();
    assert_eq!(worker.await.unwrap().unwrap(), 1);
    fixture.finish().await;
}

async fn expired(fixture: &InboxFixture) {
    fixture.until("SELECT count(*) > 0 FROM oncebox.inbox WHERE locked_until < now()").await;
}

/// What could go wrong: a message whose worker died stays in progress for ever, or is run for ever
/// although it kills each worker. S1-112, S1-066, S0-031, D3.
#[tokio::test(flavor = "multi_thread")]
async fn an_expired_lease_is_taken_over_and_the_third_crash_parks() {
    let fixture = InboxFixture::new().await;
    let consumer = fixture.simple("", "ack = 'after_insert'").await;
    let host = fixture.host(&consumer);
    deliver(&host, &records(["once", "kills"])).await;
    let mut dying = Guest::connect(&fixture, &consumer).await;
    // Both were leased when the process died; from then on they run alone.
    assert_eq!(dying.lease(50).await.unwrap().len(), 2);
    expired(&fixture).await;
    assert_eq!(step(&host).await.unwrap(), 1);
    let row = fixture.row(&consumer, "once").await;
    // S0-031, S1-066, S1-112.
    assert_eq!((row.state(), row.crashes, row.epoch), (("completed", None, 2), 1, 2));
    for crash in 1..=2 {
        assert_eq!(dying.lease(50).await.unwrap(), [("kills".to_owned(), crash + 1)]);
        expired(&fixture).await;
    }
    assert_eq!(step(&host).await.unwrap(), 0);
    let row = fixture.row(&consumer, "kills").await;
    assert_eq!(
        (row.state(), row.crashes, row.processed),
        (("parked", Some("crashed"), 3), 3, true)
    );
    assert!(row.payload.is_some() && row.last_error.unwrap().contains("died"));
    fixture.finish().await;
}

/// What could go wrong: a lease that runs out while its worker still works lets a second one run
/// beside it. S0-002, A9.
#[tokio::test(flavor = "multi_thread")]
async fn a_live_transaction_is_left_alone_after_its_lease() {
    let fixture = InboxFixture::new().await;
    let mut consumer = fixture.simple("", "ack = 'after_insert'").await;
    // Shorter than the deadline, which a policy may not say.
    consumer.policy.retry.lease_ms = 50;
    consumer.policy.limits.deadline_ms = 40;
    let other = fixture.host(&consumer);
    consumer.policy.limits.deadline_ms = 20_000;
    consumer.policy.retry.lease_ms = 20_050;
    let slow = fixture.host(&consumer);
    deliver(&slow, &[record(0, "a", "gate g")]).await;
    fixture
        .execute(
            "CREATE FUNCTION soon() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN \
        NEW.locked_until = now() + interval '50 ms'; RETURN NEW; END $$; \
        GRANT EXECUTE ON FUNCTION soon() TO PUBLIC; GRANT USAGE ON SCHEMA public TO PUBLIC; \
        CREATE TRIGGER soon BEFORE UPDATE ON oncebox.inbox FOR EACH ROW WHEN (NEW.status = \
        'in_progress') EXECUTE FUNCTION soon()",
        )
        .await;
    let worker = tokio::spawn(async move { step(&slow).await });
    fixture.script.gate("g").reached(1).await;
    expired(&fixture).await;
    for _ in 0..3 {
        // S0-002.
        assert_eq!(step(&other).await.unwrap(), 0);
    }
    fixture.script.gate("g").open();
    assert_eq!(worker.await.unwrap().unwrap(), 1);
    let row = fixture.row(&consumer, "a").await;
    assert_eq!((row.state(), row.crashes), (("completed", None, 1), 0));
    fixture.finish().await;
}

/// What could go wrong: a worker that slept through its lease writes over what its successor did.
/// S0-002, S2-011, A9.
#[tokio::test(flavor = "multi_thread")]
async fn an_old_epoch_can_neither_resume_nor_complete() {
    let fixture = InboxFixture::new().await;
    let consumer = fixture.simple("", "ack = 'after_insert'").await;
    let host = fixture.host(&consumer);
    deliver(&host, &records(["a", "b"])).await;
    let mut slow = Guest::connect(&fixture, &consumer).await;
    let leased = slow.lease(50).await.unwrap();
    assert_eq!(leased, [("a".to_owned(), 1), ("b".to_owned(), 1)]);
    expired(&fixture).await;
    assert_eq!(step(&host).await.unwrap(), 1);
    let mut late = Guest::begin(&fixture, &consumer).await;
    // S2-011.
    assert!(!late.resume("a", 1).await.unwrap(), "it is completed");
    assert_eq!(code(&late.complete(&[], &["a"]).await.unwrap_err()), "OB002");
    drop(late);
    let mut slow = Guest::begin(&fixture, &consumer).await;
    assert!(slow.resume("b", 1).await.unwrap(), "nobody has taken it over yet");
    // While it works it has the row; the completed neighbour is not its own.
    assert_eq!(step(&host).await.unwrap(), 0);
    assert_eq!(code(&slow.complete(&[], &["a"]).await.unwrap_err()), "OB003");
    drop(slow);
    fixture
        .until(
            "SELECT NOT EXISTS (SELECT FROM pg_stat_activity WHERE datname = current_database() \
            AND state LIKE 'idle in transaction%')",
        )
        .await;
    let mut slow = Guest::begin(&fixture, &consumer).await;
    let mut successor = Guest::connect(&fixture, &consumer).await;
    assert_eq!(successor.lease(50).await.unwrap(), [("b".to_owned(), 2)]);
    assert!(!slow.resume("b", 1).await.unwrap(), "a successor has leased it");
    drop((slow, successor));
    fixture.retry_until_settled(&host).await;
    fixture.finish().await;
}

/// What could go wrong: a duplicate from the broker runs beside a retry, or waits for it. S2-012.
#[tokio::test(flavor = "multi_thread")]
async fn a_duplicate_that_races_a_retry_is_settled_at_once() {
    let fixture = InboxFixture::new().await;
    let consumer = fixture.simple("", QUICK).await;
    let host = fixture.host(&consumer);
    let log = [record(0, "a", "before 2 retry 0\ngate g")];
    deliver(&host, &log).await;
    let worker = tokio::spawn(async move { while step(&host).await.unwrap() == 0 {} });
    fixture.script.gate("g").reached(1).await;
    assert!(deliver(&fixture.host(&consumer), &log).await.is_empty());
    // S0-019, S2-012.
    assert_eq!(
        fixture.row(&consumer, "a").await.status,
        "in_progress",
        "the duplicate waited for the retry"
    );
    fixture.script.gate("g").open();
    worker.await.unwrap();
    assert_eq!(fixture.row(&consumer, "a").await.state(), ("completed", None, 2));
    fixture.finish().await;
}

/// What could go wrong: two workers get the same row, or wait for each other. S1-065, S2-009.
#[tokio::test(flavor = "multi_thread")]
async fn workers_share_what_is_due() {
    let fixture = InboxFixture::new().await;
    let consumer = fixture.simple("", "ack = 'after_insert'").await;
    let log: Vec<_> = (0..100).map(|n| record(n, &format!("m{n}"), "")).collect();
    deliver(&fixture.host(&consumer), &log).await;
    let stop = CancellationToken::new();
    let workers: Vec<_> =
        (0..6).map(|_| tokio::spawn(retry::work(fixture.host(&consumer), stop.clone()))).collect();
    fixture.until("SELECT count(*) = 100 FROM oncebox.inbox WHERE status = 'completed'").await;
    stop.cancel();
    for worker in workers {
        worker.await.unwrap();
    }
    for n in 0..100 {
        // S0-049, S1-034, S1-065, S2-009.
        assert_eq!(fixture.script.runs(&format!("m{n}")).len(), 1);
    }
    assert_eq!(
        fixture
            .number(
                "SELECT count(*) FROM oncebox.inbox WHERE attempts = 1 AND crashes = 0 \
        AND epoch = 1"
            )
            .await,
        100
    );
    fixture.finish().await;
}

/// What could go wrong: the host's trouble, or its end, uses up attempts of messages that never
/// ran. D3.
#[tokio::test(flavor = "multi_thread")]
async fn a_lease_given_back_costs_no_attempt() {
    let fixture = InboxFixture::new().await;
    let consumer = fixture.simple("", "ack = 'after_insert'").await;
    let host = fixture.host(&consumer);
    deliver(&host, &records(["a", "b", "c"])).await;
    let unused = "SELECT count(*) FROM oncebox.inbox WHERE status = 'received' AND attempts = 0 \
        AND crashes = 0";
    let stopped = CancellationToken::new();
    stopped.cancel();
    assert_eq!(retry::step(&host, &stopped).await.unwrap(), 1);
    assert_eq!(fixture.number(unused).await, 3);
    fixture.execute("UPDATE oncebox.consumer SET generation = 5, generation_required = 5").await;
    let error = step(&host).await.unwrap_err();
    assert!(matches!(error, InboxError::StaleDeployments), "{error}");
    assert_eq!(fixture.number(unused).await, 3);
    let handler = Script::version(fixture.script.clone(), 7);
    host.set_handlers(PlainHandlers::resolving(5, move |_| Some(handler.clone())));
    fixture.retry_until_settled(&host).await;
    assert_eq!(
        fixture
            .number(
                "SELECT count(*) FROM oncebox.inbox WHERE status = 'completed' AND \
        attempts = 1 AND version_id = 7"
            )
            .await,
        3
    );
    fixture.finish().await;
}

/// What could go wrong: the process dies, and messages that only waited beside the one that ran
/// lose an attempt, or are taken for the cause. S1-010.
#[tokio::test(flavor = "multi_thread")]
async fn a_lease_holds_one_message() {
    let fixture = InboxFixture::new().await;
    let consumer = fixture.simple("", "ack = 'after_insert'").await;
    let host = fixture.host(&consumer);
    deliver(&host, &records(["a", "b", "c"])).await;
    assert_eq!(step(&host).await.unwrap(), 1);
    // S1-010.
    assert_eq!(
        fixture
            .number(
                "SELECT count(*) FROM oncebox.inbox WHERE status = 'received' AND \
        attempts = 0 AND epoch = 0"
            )
            .await,
        2
    );
    fixture.retry_until_settled(&host).await;
    fixture.finish().await;
}

/// What could go wrong: after a crash the message that caused it runs in a batch again, and the
/// process dies again, for ever. D3.
#[tokio::test(flavor = "multi_thread")]
async fn a_second_start_at_one_offset_is_careful() {
    let fixture = InboxFixture::new().await;
    let consumer = fixture.simple("", "").await;
    let host = fixture.host(&consumer);
    let log: Vec<_> = (10..80).map(|n| record(n, &format!("m{n}"), "")).collect();
    drop(open(&host, 10).await);
    let mut partition = open(&host, 10).await;
    drive(&mut partition, &log).await;
    assert_eq!(
        fixture
            .number(
                "SELECT count(*) FROM oncebox.inbox WHERE status = 'received' AND reason = \
            'probation' AND attempts = 0"
            )
            .await,
        64
    );
    assert_eq!(
        fixture.number("SELECT count(*) FROM oncebox.inbox WHERE status = 'completed'").await,
        6
    );
    assert_eq!(
        fixture.number("SELECT count(*) FROM oncebox.probation").await,
        0,
        "progress clears it"
    );
    // They come one at a time.
    assert_eq!(step(&host).await.unwrap(), 1);
    fixture.retry_until_settled(&host).await;
    let row = fixture.row(&consumer, "m10").await;
    assert_eq!((row.state(), row.crashes), (("completed", None, 1), 0));
    fixture.finish().await;
}

/// What could go wrong: a restart settles what was done before, takes that for progress, and meets
/// the message that kills it as unprepared as ever; or the duplicates use up the care that was
/// meant for it. D3.
#[tokio::test(flavor = "multi_thread")]
async fn duplicates_are_no_progress() {
    let fixture = InboxFixture::new().await;
    let consumer = fixture.simple("", "").await;
    let host = fixture.host(&consumer);
    let done: Vec<_> = (0..70).map(|n| record(n, &format!("m{n}"), "")).collect();
    for _ in 0..3 {
        // A process that dies gives nothing up.
        drive(&mut open(&host, 0).await, &done).await;
    }
    let mut partition = open(&host, 0).await;
    drive(&mut partition, &done).await;
    drive(&mut partition, &[record(70, "kills", "")]).await;
    assert_eq!(fixture.row(&consumer, "kills").await.status, "received");
    partition.close().await;
    fixture.retry_until_settled(&host).await;
    fixture.finish().await;
}

/// What could go wrong: a hand-over looks like a crash, and everything crawls.
#[tokio::test(flavor = "multi_thread")]
async fn a_clean_hand_over_or_another_offset_is_no_sign_of_a_crash() {
    let fixture = InboxFixture::new().await;
    let consumer = fixture.simple("", "").await;
    let host = fixture.host(&consumer);
    open(&host, 10).await.close().await;
    assert_eq!(fixture.number("SELECT count(*) FROM oncebox.probation").await, 0);
    drop(open(&host, 10).await);
    drop(open(&host, 11).await);
    let mut partition = open(&host, 10).await;
    drive(&mut partition, &[record(10, "a", "")]).await;
    partition.close().await;
    assert_eq!(fixture.row(&consumer, "a").await.state(), ("completed", None, 1));
    fixture.finish().await;
}

/// A consumer whose messages can end their own database session.
async fn deadly(fixture: &InboxFixture, policy: &str) -> TestConsumer {
    let consumer = fixture.simple("", policy).await;
    fixture
        .execute(format!(
            "GRANT EXECUTE ON FUNCTION pg_terminate_backend(int, bigint) TO {}",
            consumer.tenant.login
        ))
        .await;
    consumer
}

/// What could go wrong: a message that kills its database session holds its partition for ever, or
/// its neighbours pay for it. A3, D3.
#[tokio::test(flavor = "multi_thread")]
async fn a_message_that_kills_its_session_is_parked_and_others_go_on() {
    let fixture = InboxFixture::new().await;
    let consumer =
        deadly(&fixture, "limits = { deadline_ms = 5000 }\nretry = { lease_ms = 8000 }").await;
    let host = fixture.host(&consumer);
    let log = [
        record(0, "a", ""),
        record(1, "kills", "sql SELECT pg_terminate_backend(pg_backend_pid())"),
        record(2, "b", ""),
    ];
    let mut partition = take(&host).await;
    let errors = drive(&mut partition, &log).await;
    assert!(
        matches!(&errors[..], [InboxError::LostInHandler { message_id, .. }] if message_id == "kills"),
        "{errors:?}"
    );
    // The one before it has run alone, the one behind it never ran on that connection.
    assert_eq!(
        fixture
            .number(
                "SELECT count(*) FROM oncebox.inbox WHERE status = 'received' AND reason = \
            'probation' AND attempts = 0"
            )
            .await,
        1
    );
    partition.close().await;
    fixture.retry_until_settled(&host).await;
    let row = fixture.row(&consumer, "kills").await;
    assert_eq!((row.state(), row.crashes), (("parked", Some("crashed"), 3), 3));
    for id in ["a", "b"] {
        let row = fixture.row(&consumer, id).await;
        assert_eq!((row.state(), row.crashes), (("completed", None, 1), 0), "`{id}`");
    }
    fixture.finish().await;
}

/// What could go wrong: a connection that an operator or a failover ends, in the middle of a
/// statement, is taken for the message's failure. D3.
#[tokio::test(flavor = "multi_thread")]
async fn a_session_killed_from_outside_costs_no_attempt() {
    let fixture = InboxFixture::new().await;
    let consumer =
        fixture.simple("CREATE TABLE hot (n int); INSERT INTO hot VALUES (0);", "").await;
    let host = fixture.host(&consumer);
    let mut holder = fixture.superuser().await;
    holder
        .execute(sqlx::raw_sql(AssertSqlSafe(format!(
            "BEGIN; UPDATE {}.hot SET n = n",
            consumer.tenant.schema_name
        ))))
        .await
        .unwrap();
    let log = [record(0, "a", "sql UPDATE hot SET n = n + 1"), record(1, "b", "")];
    let running = tokio::spawn({
        let (host, log) = (host.clone(), log.clone());
        async move { deliver(&host, &log).await }
    });
    fixture.until_blocked(1).await;
    fixture.end_blocked().await;
    let errors = running.await.unwrap();
    assert!(matches!(&errors[..], [InboxError::LostInHandler { .. }]), "{errors:?}");
    holder.close().await.unwrap();
    fixture.retry_until_settled(&host).await;
    for id in ["a", "b"] {
        assert_eq!(fixture.row(&consumer, id).await.state(), ("completed", None, 1), "`{id}`");
    }
    fixture.finish().await;
}

/// What could go wrong: a connection that breaks in a claim, or while it idles, is blamed on a
/// message, or everything is put on probation. D3.
#[tokio::test(flavor = "multi_thread")]
async fn a_connection_lost_outside_a_handler_is_the_hosts() {
    let fixture = InboxFixture::new().await;
    let consumer = fixture.simple("", "").await;
    let host = fixture.host(&consumer);
    // Idle connections that died are replaced without a word.
    deliver(&host, &records(["a"])).await;
    fixture
        .execute(format!(
            "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity WHERE usename = '{}'",
            consumer.tenant.login
        ))
        .await;
    assert!(deliver(&host, &[record(1, "b", "")]).await.is_empty());
    // A claim that waits for another holder of the message.
    let mut holder = Guest::begin(&fixture, &consumer).await;
    holder.claim(&["c"]).await.unwrap();
    let running = tokio::spawn({
        let host: Arc<ConsumerInbox> = host.clone();
        let log: Vec<Record> = vec![record(2, "c", "")];
        async move { deliver(&host, &log).await }
    });
    fixture.until_blocked(1).await;
    fixture.end_blocked().await;
    drop(holder);
    let errors = running.await.unwrap();
    assert!(matches!(errors.first(), Some(InboxError::Unreachable(_))), "{errors:?}");
    assert_eq!(fixture.row(&consumer, "c").await.state(), ("completed", None, 1));
    fixture.finish().await;
}

/// What could go wrong: the answer to a COMMIT is lost, and the message counts as failed, as
/// crashed, or runs twice. D3.
#[tokio::test(flavor = "multi_thread")]
async fn a_lost_answer_to_commit_is_found_out_by_claiming_again() {
    let fixture = InboxFixture::new().await;
    let consumer = deadly(&fixture, &format!("limits = {{ deadline_ms = 1000 }}\n{QUICK}")).await;
    let tenant = &consumer.tenant;
    fixture.execute(format!("GRANT USAGE ON LANGUAGE plpgsql TO {}", tenant.owner_login)).await;
    // Sequences do not roll back: each kills one commit only.
    fixture
        .control
        .tenant_databases()
        .apply_migration(
            tenant,
            "bomb",
            "CREATE TABLE bomb (fuse text); CREATE SEQUENCE \
        live; CREATE SEQUENCE again; \
        CREATE FUNCTION explode() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN \
            IF nextval(NEW.fuse::regclass) = 1 THEN PERFORM \
            pg_terminate_backend(pg_backend_pid()); PERFORM count(*) FROM generate_series(1, \
            10000000); END IF; \
            RETURN NULL; END $$; \
        CREATE CONSTRAINT TRIGGER bomb AFTER INSERT ON bomb DEFERRABLE INITIALLY DEFERRED FOR EACH \
        ROW EXECUTE FUNCTION explode();",
        )
        .await
        .unwrap();
    let host = fixture.host(&consumer);
    let errors = deliver(
        &host,
        &[
            record(0, "a", "sql INSERT INTO bomb VALUES ('live')"),
            record(1, "b", "before 2 retry 0\nsql INSERT INTO bomb VALUES ('again')"),
        ],
    )
    .await;
    assert!(matches!(&errors[..], [InboxError::CommitUnknown(_)]), "{errors:?}");
    assert_eq!(fixture.row(&consumer, "a").await.state(), ("completed", None, 1));
    let error = loop {
        if let Err(error) = step(&host).await {
            break error;
        }
    };
    assert!(matches!(error, InboxError::CommitUnknown(_)), "{error}");
    fixture.retry_until_settled(&host).await;
    let row = fixture.row(&consumer, "b").await;
    assert_eq!((row.state(), row.crashes), (("completed", None, 2), 0));
    fixture.finish().await;
}

const HOT: &str = "CREATE TABLE hot (n int); INSERT INTO hot VALUES (0);";
const WAITS: &str = "sql UPDATE hot SET n = n + 1";

/// Holds back every message that [`WAITS`], until it is dropped.
async fn hold(fixture: &InboxFixture, consumer: &TestConsumer) -> sqlx::PgConnection {
    let mut holder = fixture.superuser().await;
    holder
        .execute(sqlx::raw_sql(AssertSqlSafe(format!(
            "BEGIN; UPDATE {}.hot SET n = n",
            consumer.tenant.schema_name
        ))))
        .await
        .unwrap();
    holder
}

async fn cut_all(fixture: &InboxFixture, consumer: &TestConsumer) {
    let login = &consumer.tenant.login;
    // All at once, and then until they are gone.
    for wait_ms in [0, 5_000] {
        fixture
            .execute(format!(
                "SELECT pg_terminate_backend(pid, {wait_ms}) FROM pg_stat_activity \
            WHERE usename = '{login}'"
            ))
            .await;
    }
}

/// What could go wrong: outages that end all connections are counted as crashes of the messages
/// that happen to run, and the third parks them. D3.
#[tokio::test(flavor = "multi_thread")]
async fn outages_under_a_retry_are_charged_to_nobody() {
    let fixture = InboxFixture::new().await;
    let consumer = fixture
        .simple(
            HOT,
            "ack = 'after_insert'\nlimits = { deadline_ms = 9000 }\nretry = { lease_ms = 12000 }",
        )
        .await;
    let host = fixture.host(&consumer);
    deliver(&host, &[record(0, "a", WAITS), record(1, "b", WAITS)]).await;
    let holder = hold(&fixture, &consumer).await;
    let stop = CancellationToken::new();
    let workers: Vec<_> =
        (0..2).map(|_| tokio::spawn(retry::work(host.clone(), stop.clone()))).collect();
    for _ in 0..3 {
        fixture.until_blocked(2).await;
        cut_all(&fixture, &consumer).await;
    }
    holder.close().await.unwrap();
    fixture.until("SELECT bool_and(status IN ('completed', 'parked')) FROM oncebox.inbox").await;
    stop.cancel();
    for worker in workers {
        worker.await.unwrap();
    }
    for id in ["a", "b"] {
        let row = fixture.row(&consumer, id).await;
        assert_eq!((row.state(), row.crashes), (("completed", None, 1), 0), "`{id}`");
    }
    fixture.finish().await;
}

/// A way to the server on which new connections can be made to wait.
struct Lock {
    address: SocketAddr,
    is_shut: AtomicBool,
}

impl Lock {
    async fn before(fixture: &InboxFixture) -> Arc<Self> {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let lock = Arc::new(Self {
            address: listener.local_addr().unwrap(),
            is_shut: AtomicBool::new(false),
        });
        let options = fixture.superuser_options();
        let (server, here) = ((options.get_host().to_owned(), options.get_port()), lock.clone());
        tokio::spawn(async move {
            while let Ok((mut client, _)) = listener.accept().await {
                let (here, server) = (here.clone(), server.clone());
                tokio::spawn(async move {
                    while here.is_shut.load(Ordering::SeqCst) {
                        sleep(Duration::from_millis(10)).await;
                    }
                    let mut server = TcpStream::connect(server).await.unwrap();
                    let _ = copy_bidirectional(&mut client, &mut server).await;
                });
            }
        });
        lock
    }
}

/// What could go wrong: a run that ended at its deadline, and that a slow database does not let its
/// host record before its lease is over, is counted as a crash by whoever takes it over; the third
/// parks the message, for ever. D3.
#[tokio::test(flavor = "multi_thread")]
async fn what_could_not_be_recorded_in_time_is_taken_back() {
    let fixture = InboxFixture::new().await;
    let policy = "ack = 'after_insert'\nlimits = { deadline_ms = 3000 }\nretry = { lease_ms = \
        6000, backoff_min_ms = 1, backoff_max_ms = 1 }";
    let consumer = fixture.simple(HOT, policy).await;
    let well = fixture.host(&consumer);
    deliver(&well, &[record(0, "a", WAITS)]).await;
    let holder = hold(&fixture, &consumer).await;
    // What ends a run is its deadline, and no bound of its session.
    let settings = SessionSettings {
        lock_timeout_ms: 10_000,
        statement_timeout_ms: 10_000,
        ..SessionSettings::default()
    };
    let mut slow = Vec::new();
    for _ in 0..3 {
        let lock = Lock::before(&fixture).await;
        let host = fixture.host_through(&consumer, lock.address, &settings);
        let worker = tokio::spawn({
            let host = host.clone();
            async move { step(&host).await }
        });
        fixture
            .until(
                "SELECT count(*) = 1 FROM oncebox.inbox WHERE status = 'in_progress' AND \
            locked_until > now()",
            )
            .await;
        fixture.until_blocked(1).await;
        lock.is_shut.store(true, Ordering::SeqCst);
        expired(&fixture).await;
        slow.push((lock, host, worker));
        // The statement that was given up has let go of the row.
        fixture.until_blocked(0).await;
    }
    assert_eq!(step(&well).await.unwrap(), 0);
    let row = fixture.row(&consumer, "a").await;
    assert_eq!((row.state(), row.crashes), (("parked", Some("crashed"), 3), 3));

    holder.close().await.unwrap();
    for (lock, host, worker) in slow {
        lock.is_shut.store(false, Ordering::SeqCst);
        let _ = timeout(DEADLINE, worker).await.unwrap().unwrap();
        let _ = step(&host).await;
    }
    fixture.retry_until_settled(&well).await;
    let row = fixture.row(&consumer, "a").await;
    assert_eq!(
        (row.status.as_str(), row.reason.as_deref()),
        ("completed", None),
        "what an outage parked is released: {row:?}"
    );
    fixture.finish().await;
}

/// What could go wrong: a server that is started again while a message runs under its lease has a
/// crash counted.
#[tokio::test(flavor = "multi_thread")]
async fn restarts_of_the_server_under_a_lease_are_no_crashes() {
    let folder = TempDir::new("lease");
    let options = PostgresOptions::new(folder.path()).tcp(true);
    let mut postgres =
        spawn_blocking(move || PrivatePostgres::start(options)).await.unwrap().unwrap();
    let options = Options {
        postgres: Some(postgres.url()),
        ack: "after_insert",
        partitions: 1,
        deadline_ms: 12_000,
        ..Options::default()
    };
    let fixture = HostFixture::with(options).await.unwrap();
    fixture.send(&Load::of([Work::Sleeps(1_500), Work::Pay])).await.unwrap();
    let host = fixture.start_ready("a", &[]).await.unwrap();
    for _ in 0..3 {
        fixture.until_sleeping(1).await.unwrap();
        postgres.restart_immediate().unwrap();
        host.wait_ready().await.unwrap();
    }
    fixture.wait_settled().await.unwrap();
    let found = fixture.found().await.unwrap();
    assert!(found.iter().all(|row| row.status == "completed" && row.crashes == 0), "{found:?}");
    fixture.check().await.unwrap();
    host.stop().await.unwrap();
    drop(fixture);
    drop(postgres);
}

/// What could go wrong: a message that takes the server with it is an outage each time, and never
/// comes to an end; or what is told of a lease that is over changes a message that is done.
#[tokio::test(flavor = "multi_thread")]
async fn a_message_that_is_under_way_in_every_outage_is_parked() {
    let fixture = InboxFixture::new().await;
    let consumer = fixture.simple("", "ack = 'after_insert'").await;
    let host = fixture.host(&consumer);
    deliver(&host, &records(["a"])).await;
    let mut guest = Guest::connect(&fixture, &consumer).await;
    for epoch in 1..=5 {
        fixture.execute("UPDATE oncebox.inbox SET next_attempt_at = now()").await;
        assert_eq!(guest.lease(60_000).await.unwrap(), [("a".to_owned(), epoch)]);
        let outcome = guest.interrupted("a", epoch).await.unwrap();
        let row = fixture.row(&consumer, "a").await;
        if epoch < 5 {
            assert_eq!(
                (outcome.as_str(), row.state(), row.crashes),
                ("due", ("received", None, 0), 0)
            );
            // The later, the more often.
            let bound = ((1 << (epoch - 1)) - 1) * 1_000;
            assert!((bound - 2_000..=bound).contains(&row.due_in_ms.unwrap()), "{row:?}");
        } else {
            assert_eq!(
                (outcome.as_str(), row.state(), row.crashes),
                ("parked", ("parked", Some("crashed"), 1), 0)
            );
            assert!(row.last_error.unwrap().contains("the database went away"));
        }
        assert_eq!(guest.interrupted("a", epoch).await.unwrap(), "done", "it is told once");
    }
    // A person gives it another five.
    let redrive = inbox_job(Action::Redrive, "orders", JobFilter::default());
    assert_eq!(carry_out(&fixture.control, "acme", &redrive).await.unwrap().changed, 1);
    assert_eq!(guest.lease(60_000).await.unwrap(), [("a".to_owned(), 6)]);
    assert_eq!(guest.interrupted("a", 6).await.unwrap(), "due");
    fixture.retry_until_settled(&host).await;
    assert_eq!(guest.interrupted("a", 7).await.unwrap(), "done");
    assert_eq!(fixture.row(&consumer, "a").await.state(), ("completed", None, 1));
    fixture.finish().await;
}

/// What could go wrong: one lost connection puts everything on probation, message by message; or an
/// outage does.
#[tokio::test(flavor = "multi_thread")]
async fn a_lost_connection_slows_down_nobody_else() {
    for is_outage in [false, true] {
        let fixture = InboxFixture::new().await;
        let policy = "batch = { duration_ms = 60000 }\nlimits = { deadline_ms = 60000 }\nretry = { \
            lease_ms = 70000 }";
        let consumer = fixture.simple(HOT, policy).await;
        // What waits for the holder does so until its connection is ended.
        let settings = SessionSettings {
            lock_timeout_ms: 60_000,
            statement_timeout_ms: 60_000,
            ..SessionSettings::default()
        };
        let host = fixture.host_with(&consumer, fixture.scripts(), &settings);
        deliver(&host, &records(["warm"])).await;
        let mut tasks = Vec::new();
        let holder = hold(&fixture, &consumer).await;
        for partition in 0..4 {
            let script =
                |n: i64| if partition == 0 && n == 40 || is_outage && n == 1 { WAITS } else { "" };
            let log: Vec<_> = (0..100)
                .map(|n| Record { partition, ..record(n, &format!("{partition}-{n}"), script(n)) })
                .collect();
            let host = host.clone();
            tasks.push(tokio::spawn(async move {
                let mut inbox =
                    oncebox_inbox::PartitionInbox::open(host, "t", partition, 1).await.unwrap();
                let errors = drive(&mut inbox, &log).await;
                inbox.close().await;
                errors
            }));
        }
        let waiting = if is_outage { 4 } else { 1 };
        fixture.until_blocked(waiting).await;
        if is_outage {
            cut_all(&fixture, &consumer).await;
        } else {
            fixture
                .until("SELECT count(*) = 301 FROM oncebox.inbox WHERE status = 'completed'")
                .await;
            fixture.end_blocked().await;
        }
        holder.close().await.unwrap();
        for task in tasks {
            println!("{:?}", task.await.unwrap());
        }
        fixture.retry_until_settled(&host).await;
        let leased = fixture.number("SELECT count(*) FROM oncebox.inbox WHERE epoch > 0").await;
        assert!(
            leased <= i64::from(!is_outage),
            "{leased} messages were run one by one; an outage: {is_outage}"
        );
        assert_eq!(
            fixture
                .number(
                    "SELECT count(*) FROM oncebox.inbox WHERE status = 'completed' AND \
                attempts = 1 AND crashes = 0"
                )
                .await,
            401
        );
        fixture.finish().await;
    }
}

/// What could go wrong: a message that kills its connection is not found among those that ran
/// beside it, or not within the logarithm of their number; or one of those is charged.
#[tokio::test(flavor = "multi_thread")]
async fn a_killer_is_found_by_halving() {
    let seed = rand::random();
    let mut rng = StdRng::seed_from_u64(seed);
    for batches in [false, true] {
        let mut fixture = InboxFixture::new().await;
        if batches {
            fixture.batches();
        }
        let tenant = fixture.tenant("acme", "").await;
        fixture
            .execute(format!(
                "GRANT EXECUTE ON FUNCTION pg_terminate_backend(int, bigint) TO {}",
                tenant.login
            ))
            .await;
        for round in 0..3 {
            let policy = "limits = { deadline_ms = 5000 }\nretry = { lease_ms = 8000 }\nbatch = { \
                duration_ms = 60000 }";
            let consumer = fixture.consumer(&tenant, &format!("round{round}"), policy).await;
            let killer = rng.random_range(0..64);
            let script = |n: i64| {
                if n == killer { "sql SELECT pg_terminate_backend(pg_backend_pid())" } else { "" }
            };
            let log: Vec<_> = (0..100).map(|n| record(n, &format!("m{n}"), script(n))).collect();
            let host = fixture.host(&consumer);
            let mut partition = take(&host).await;
            let errors = drive(&mut partition, &log).await;
            partition.close().await;
            println!(
                "seed {seed}, batches: {batches}: the message at {killer} killed {} connections of \
                    batches",
                errors.len()
            );
            assert!((1..=7).contains(&errors.len()), "seed {seed}, at {killer}: {errors:?}");
            let started = Instant::now();
            fixture.retry_until_settled(&host).await;
            println!("parked after {:?}", started.elapsed());
            let row = fixture.row(&consumer, &format!("m{killer}")).await;
            assert_eq!(
                (row.state(), row.crashes),
                (("parked", Some("crashed"), 3), 3),
                "seed {seed}"
            );
            let others = format!(
                "SELECT count(*) FROM oncebox.inbox WHERE consumer_id = {} AND status = \
                    'completed' AND attempts = 1 AND crashes = 0 AND epoch = 0",
                consumer.row.consumer_id
            );
            assert_eq!(
                fixture.number(others).await,
                99,
                "seed {seed}: neighbours are charged, or run one by one"
            );
        }
        fixture.finish().await;
    }
}
