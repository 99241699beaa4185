//! Leases and probation: an attempt is counted before it runs, one worker has a message at a time, and a
//! message that kills its process or its connection is found out.

#![allow(clippy::unwrap_used, reason = "a panic is how a test fails")]

use std::sync::Arc;

use oncebox_inbox::{ConsumerInbox, InboxError, handler::DeliveryKind, message::Record, retry};
use oncebox_tests::inbox::{Guest, PlainHandlers, Script, TestConsumer, World, code, deliver, drive, open, record, records, step, take};
use sqlx::{AssertSqlSafe, Connection, Executor};
use tokio_util::sync::CancellationToken;

const QUICK: &str = "retry = { backoff_min_ms = 1, backoff_max_ms = 1 }";

/// What could go wrong: with the ack after the insert something runs before it is stored, is lost after
/// it, or is never run. S1-064 to S1-069, S1-071, S0-005, S0-006, S0-049, S2-005.
#[tokio::test(flavor = "multi_thread")]
async fn after_insert_stores_first_and_workers_run() {
    let world = World::new().await;
    let consumer = world.simple("", &format!("ack = 'after_insert'\npayload = 'none'\n{QUICK}")).await;
    let host = world.host(&consumer);
    let mut log: Vec<_> = (0..30).map(|n| record(n, &format!("m{n}"), "result 1")).collect();
    log.push(record(30, "again", "before 3 trap"));
    log.push(record(31, "rejected", "reject"));
    log.push(record(32, "m0", "result 1"));
    deliver(&host, &log).await;
    assert_eq!(
        world.number("SELECT count(*) FROM oncebox.inbox WHERE status = 'received' AND payload IS NOT NULL AND attempts = 0").await,
        32
    );
    assert!(world.control.runs("m0").is_empty(), "it ran before the ack");
    let stop = CancellationToken::new();
    let workers: Vec<_> = (0..3).map(|_| tokio::spawn(retry::work(world.host(&consumer), stop.clone()))).collect();
    world.until("SELECT count(*) = 0 FROM oncebox.inbox WHERE status IN ('received', 'in_progress', 'failed_retryable')").await;
    stop.cancel();
    for worker in workers {
        worker.await.unwrap();
    }
    let row = world.row(&consumer, "m0").await;
    assert_eq!((row.state(), row.epoch, row.processed, row.leased), (("completed", None, 1), 1, true, false));
    assert_eq!((row.result, row.payload, row.version_id), (Some(serde_json::json!(1)), None, Some(1)));
    assert_eq!(world.control.runs("m0").iter().map(|ran| ran.kind).collect::<Vec<_>>(), [DeliveryKind::Retry]);
    assert_eq!(world.row(&consumer, "again").await.state(), ("completed", None, 3));
    assert_eq!(world.row(&consumer, "rejected").await.state(), ("failed_terminal", Some("reject"), 1));
    world.finish().await;
}

/// What could go wrong: an attempt that kills the process is not counted, since the count dies with it.
/// S1-010, S1-026, S0-006.
#[tokio::test(flavor = "multi_thread")]
async fn an_attempt_is_committed_before_it_runs() {
    let world = World::new().await;
    let consumer = world.simple("", "ack = 'after_insert'").await;
    let host = world.host(&consumer);
    deliver(&host, &[record(0, "a", "gate g")]).await;
    let worker = tokio::spawn(async move { step(&host).await });
    world.control.gate("g").reached(1).await;
    let row = world.row(&consumer, "a").await;
    assert_eq!((row.state(), row.epoch, row.leased), (("in_progress", None, 1), 1, true));
    world.control.gate("g").open();
    assert_eq!(worker.await.unwrap().unwrap(), 1);
    world.finish().await;
}

async fn expired(world: &World) {
    world.until("SELECT count(*) > 0 FROM oncebox.inbox WHERE locked_until < now()").await;
}

/// What could go wrong: a message whose worker died stays in progress for ever, or is run for ever although
/// it kills each worker. S1-112, S1-066, S0-031, D3.
#[tokio::test(flavor = "multi_thread")]
async fn an_expired_lease_is_taken_over_and_the_third_crash_parks() {
    let world = World::new().await;
    let consumer = world.simple("", "ack = 'after_insert'").await;
    let host = world.host(&consumer);
    deliver(&host, &records(["once", "kills"])).await;
    let mut dying = Guest::connect(&world, &consumer).await;
    // Both were leased when the process died; from then on they run alone.
    assert_eq!(dying.lease(50).await.unwrap().len(), 2);
    expired(&world).await;
    assert_eq!(step(&host).await.unwrap(), 1);
    let row = world.row(&consumer, "once").await;
    assert_eq!((row.state(), row.crashes, row.epoch), (("completed", None, 2), 1, 2));
    for crash in 1..=2 {
        assert_eq!(dying.lease(50).await.unwrap(), [("kills".to_owned(), crash + 1)]);
        expired(&world).await;
    }
    assert_eq!(step(&host).await.unwrap(), 0);
    let row = world.row(&consumer, "kills").await;
    assert_eq!((row.state(), row.crashes, row.processed), (("parked", Some("crashed"), 3), 3, true));
    assert!(row.payload.is_some() && row.last_error.unwrap().contains("died"));
    world.finish().await;
}

/// What could go wrong: a lease that runs out while its worker still works lets a second one run beside
/// it. S0-002, A9.
#[tokio::test(flavor = "multi_thread")]
async fn a_live_transaction_is_left_alone_after_its_lease() {
    let world = World::new().await;
    let mut consumer = world.simple("", "ack = 'after_insert'").await;
    // Shorter than the deadline, which a policy may not say.
    consumer.policy.retry.lease_ms = 50;
    consumer.policy.limits.deadline_ms = 40;
    let other = world.host(&consumer);
    consumer.policy.limits.deadline_ms = 20_000;
    consumer.policy.retry.lease_ms = 20_050;
    let slow = world.host(&consumer);
    deliver(&slow, &[record(0, "a", "gate g")]).await;
    world.execute("CREATE FUNCTION soon() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN NEW.locked_until = now() + interval '50 ms'; RETURN NEW; END $$; \
        GRANT EXECUTE ON FUNCTION soon() TO PUBLIC; GRANT USAGE ON SCHEMA public TO PUBLIC; \
        CREATE TRIGGER soon BEFORE UPDATE ON oncebox.inbox FOR EACH ROW WHEN (NEW.status = 'in_progress') EXECUTE FUNCTION soon()").await;
    let worker = tokio::spawn(async move { step(&slow).await });
    world.control.gate("g").reached(1).await;
    expired(&world).await;
    for _ in 0..3 {
        assert_eq!(step(&other).await.unwrap(), 0);
    }
    world.control.gate("g").open();
    assert_eq!(worker.await.unwrap().unwrap(), 1);
    let row = world.row(&consumer, "a").await;
    assert_eq!((row.state(), row.crashes), (("completed", None, 1), 0));
    world.finish().await;
}

/// What could go wrong: a worker that slept through its lease writes over what its successor did.
/// S0-002, S2-011, A9.
#[tokio::test(flavor = "multi_thread")]
async fn an_old_epoch_can_neither_resume_nor_complete() {
    let world = World::new().await;
    let consumer = world.simple("", "ack = 'after_insert'").await;
    let host = world.host(&consumer);
    deliver(&host, &records(["a", "b"])).await;
    let mut slow = Guest::connect(&world, &consumer).await;
    let leased = slow.lease(50).await.unwrap();
    assert_eq!(leased, [("a".to_owned(), 1), ("b".to_owned(), 1)]);
    expired(&world).await;
    assert_eq!(step(&host).await.unwrap(), 1);
    let mut late = Guest::begin(&world, &consumer).await;
    assert!(!late.resume("a", 1).await.unwrap(), "it is completed");
    assert_eq!(code(&late.complete(&[], &["a"]).await.unwrap_err()), "OB002");
    drop(late);
    let mut slow = Guest::begin(&world, &consumer).await;
    assert!(slow.resume("b", 1).await.unwrap(), "nobody has taken it over yet");
    // While it works it has the row; the completed neighbour is not its own.
    assert_eq!(step(&host).await.unwrap(), 0);
    assert_eq!(code(&slow.complete(&[], &["a"]).await.unwrap_err()), "OB003");
    drop(slow);
    world
        .until("SELECT NOT EXISTS (SELECT FROM pg_stat_activity WHERE datname = current_database() AND state LIKE 'idle in transaction%')")
        .await;
    let mut slow = Guest::begin(&world, &consumer).await;
    let mut successor = Guest::connect(&world, &consumer).await;
    assert_eq!(successor.lease(50).await.unwrap(), [("b".to_owned(), 2)]);
    assert!(!slow.resume("b", 1).await.unwrap(), "a successor has leased it");
    drop((slow, successor));
    world.retry_until_settled(&host).await;
    world.finish().await;
}

/// What could go wrong: a duplicate from the broker runs beside a retry, or waits for it. S2-012.
#[tokio::test(flavor = "multi_thread")]
async fn a_duplicate_that_races_a_retry_is_settled_at_once() {
    let world = World::new().await;
    let consumer = world.simple("", QUICK).await;
    let host = world.host(&consumer);
    let log = [record(0, "a", "before 2 retry 0\ngate g")];
    deliver(&host, &log).await;
    let worker = tokio::spawn(async move { while step(&host).await.unwrap() == 0 {} });
    world.control.gate("g").reached(1).await;
    assert!(deliver(&world.host(&consumer), &log).await.is_empty());
    assert_eq!(world.row(&consumer, "a").await.status, "in_progress", "the duplicate waited for the retry");
    world.control.gate("g").open();
    worker.await.unwrap();
    assert_eq!(world.row(&consumer, "a").await.state(), ("completed", None, 2));
    world.finish().await;
}

/// What could go wrong: two workers get the same row, or wait for each other. S1-065, S2-009.
#[tokio::test(flavor = "multi_thread")]
async fn workers_share_what_is_due() {
    let world = World::new().await;
    let consumer = world.simple("", "ack = 'after_insert'").await;
    let log: Vec<_> = (0..100).map(|n| record(n, &format!("m{n}"), "")).collect();
    deliver(&world.host(&consumer), &log).await;
    let stop = CancellationToken::new();
    let workers: Vec<_> = (0..6).map(|_| tokio::spawn(retry::work(world.host(&consumer), stop.clone()))).collect();
    world.until("SELECT count(*) = 100 FROM oncebox.inbox WHERE status = 'completed'").await;
    stop.cancel();
    for worker in workers {
        worker.await.unwrap();
    }
    for n in 0..100 {
        assert_eq!(world.control.runs(&format!("m{n}")).len(), 1);
    }
    assert_eq!(world.number("SELECT count(*) FROM oncebox.inbox WHERE attempts = 1 AND crashes = 0 AND epoch = 1").await, 100);
    world.finish().await;
}

/// What could go wrong: the host's trouble, or its end, uses up attempts of messages that never ran. D3.
#[tokio::test(flavor = "multi_thread")]
async fn a_lease_given_back_costs_no_attempt() {
    let world = World::new().await;
    let consumer = world.simple("", "ack = 'after_insert'").await;
    let host = world.host(&consumer);
    deliver(&host, &records(["a", "b", "c"])).await;
    let unused = "SELECT count(*) FROM oncebox.inbox WHERE status = 'received' AND attempts = 0 AND crashes = 0";
    let stopped = CancellationToken::new();
    stopped.cancel();
    assert_eq!(retry::step(&host, &stopped).await.unwrap(), 1);
    assert_eq!(world.number(unused).await, 3);
    world.execute("UPDATE oncebox.consumer SET generation = 5, generation_required = 5").await;
    let error = step(&host).await.unwrap_err();
    assert!(matches!(error, InboxError::StaleDeployments), "{error}");
    assert_eq!(world.number(unused).await, 3);
    let handler = Script::version(world.control.clone(), 7);
    host.set_handlers(PlainHandlers::resolving(5, move |_| Some(handler.clone())));
    world.retry_until_settled(&host).await;
    assert_eq!(world.number("SELECT count(*) FROM oncebox.inbox WHERE status = 'completed' AND attempts = 1 AND version_id = 7").await, 3);
    world.finish().await;
}

/// What could go wrong: the process dies, and messages that only waited beside the one that ran lose an
/// attempt, or are taken for the cause. S1-010.
#[tokio::test(flavor = "multi_thread")]
async fn a_lease_holds_one_message() {
    let world = World::new().await;
    let consumer = world.simple("", "ack = 'after_insert'").await;
    let host = world.host(&consumer);
    deliver(&host, &records(["a", "b", "c"])).await;
    assert_eq!(step(&host).await.unwrap(), 1);
    assert_eq!(world.number("SELECT count(*) FROM oncebox.inbox WHERE status = 'received' AND attempts = 0 AND epoch = 0").await, 2);
    world.retry_until_settled(&host).await;
    world.finish().await;
}

/// What could go wrong: after a crash the message that caused it runs in a batch again, and the process
/// dies again, for ever. D3.
#[tokio::test(flavor = "multi_thread")]
async fn a_second_start_at_one_offset_is_careful() {
    let world = World::new().await;
    let consumer = world.simple("", "").await;
    let host = world.host(&consumer);
    let log: Vec<_> = (10..80).map(|n| record(n, &format!("m{n}"), "")).collect();
    drop(open(&host, 10).await);
    let mut partition = open(&host, 10).await;
    drive(&mut partition, &log).await;
    assert_eq!(
        world.number("SELECT count(*) FROM oncebox.inbox WHERE status = 'received' AND reason = 'probation' AND attempts = 0").await,
        64
    );
    assert_eq!(world.number("SELECT count(*) FROM oncebox.inbox WHERE status = 'completed'").await, 6);
    assert_eq!(world.number("SELECT count(*) FROM oncebox.probation").await, 0, "progress clears it");
    // They come one at a time.
    assert_eq!(step(&host).await.unwrap(), 1);
    world.retry_until_settled(&host).await;
    let row = world.row(&consumer, "m10").await;
    assert_eq!((row.state(), row.crashes), (("completed", None, 1), 0));
    world.finish().await;
}

/// What could go wrong: a restart settles what was done before, takes that for progress, and meets the
/// message that kills it as unprepared as ever; or the duplicates use up the care that was meant for it. D3.
#[tokio::test(flavor = "multi_thread")]
async fn duplicates_are_no_progress() {
    let world = World::new().await;
    let consumer = world.simple("", "").await;
    let host = world.host(&consumer);
    let done: Vec<_> = (0..70).map(|n| record(n, &format!("m{n}"), "")).collect();
    for _ in 0..3 {
        // A process that dies gives nothing up.
        drive(&mut open(&host, 0).await, &done).await;
    }
    let mut partition = open(&host, 0).await;
    drive(&mut partition, &done).await;
    drive(&mut partition, &[record(70, "kills", "")]).await;
    assert_eq!(world.row(&consumer, "kills").await.status, "received");
    partition.close().await;
    world.retry_until_settled(&host).await;
    world.finish().await;
}

/// What could go wrong: a hand-over looks like a crash, and everything crawls.
#[tokio::test(flavor = "multi_thread")]
async fn a_clean_hand_over_or_another_offset_is_no_sign_of_a_crash() {
    let world = World::new().await;
    let consumer = world.simple("", "").await;
    let host = world.host(&consumer);
    open(&host, 10).await.close().await;
    assert_eq!(world.number("SELECT count(*) FROM oncebox.probation").await, 0);
    drop(open(&host, 10).await);
    drop(open(&host, 11).await);
    let mut partition = open(&host, 10).await;
    drive(&mut partition, &[record(10, "a", "")]).await;
    partition.close().await;
    assert_eq!(world.row(&consumer, "a").await.state(), ("completed", None, 1));
    world.finish().await;
}

/// A consumer whose messages can end their own database session.
async fn deadly(world: &World, policy: &str) -> TestConsumer {
    let consumer = world.simple("", policy).await;
    world.execute(format!("GRANT EXECUTE ON FUNCTION pg_terminate_backend(int, bigint) TO {}", consumer.tenant.login)).await;
    consumer
}

/// What could go wrong: a message that kills its database session holds its partition for ever, or its
/// neighbours pay for it. A3, D3.
#[tokio::test(flavor = "multi_thread")]
async fn a_message_that_kills_its_session_is_parked_and_others_go_on() {
    let world = World::new().await;
    let consumer = deadly(&world, "limits = { deadline_ms = 100 }\nretry = { lease_ms = 250 }").await;
    let host = world.host(&consumer);
    let log = [record(0, "a", ""), record(1, "kills", "sql SELECT pg_terminate_backend(pg_backend_pid())"), record(2, "b", "")];
    let mut partition = take(&host).await;
    let errors = drive(&mut partition, &log).await;
    assert!(matches!(&errors[..], [InboxError::LostInHandler { message_id }] if message_id == "kills"), "{errors:?}");
    assert_eq!(
        world.number("SELECT count(*) FROM oncebox.inbox WHERE status = 'received' AND reason = 'probation' AND attempts = 0").await,
        3
    );
    partition.close().await;
    world.retry_until_settled(&host).await;
    let row = world.row(&consumer, "kills").await;
    assert_eq!((row.state(), row.crashes), (("parked", Some("crashed"), 3), 3));
    for id in ["a", "b"] {
        let row = world.row(&consumer, id).await;
        assert_eq!((row.state(), row.crashes), (("completed", None, 1), 0), "`{id}`");
    }
    world.finish().await;
}

/// What could go wrong: a connection that an operator or a failover ends, in the middle of a statement,
/// is taken for the message's failure. D3.
#[tokio::test(flavor = "multi_thread")]
async fn a_session_killed_from_outside_costs_no_attempt() {
    let world = World::new().await;
    let consumer = world.simple("CREATE TABLE hot (n int); INSERT INTO hot VALUES (0);", "").await;
    let host = world.host(&consumer);
    let mut holder = world.superuser().await;
    holder.execute(sqlx::raw_sql(AssertSqlSafe(format!("BEGIN; UPDATE {}.hot SET n = n", consumer.tenant.schema_name)))).await.unwrap();
    let log = [record(0, "a", "sql UPDATE hot SET n = n + 1"), record(1, "b", "")];
    let running = tokio::spawn({
        let (host, log) = (host.clone(), log.clone());
        async move { deliver(&host, &log).await }
    });
    world.until("SELECT count(*) = 1 FROM pg_locks WHERE NOT granted").await;
    world.execute("SELECT pg_terminate_backend(pid) FROM pg_locks WHERE NOT granted").await;
    let errors = running.await.unwrap();
    assert!(matches!(&errors[..], [InboxError::LostInHandler { .. }]), "{errors:?}");
    holder.close().await.unwrap();
    world.retry_until_settled(&host).await;
    for id in ["a", "b"] {
        assert_eq!(world.row(&consumer, id).await.state(), ("completed", None, 1), "`{id}`");
    }
    world.finish().await;
}

/// What could go wrong: a connection that breaks in a claim, or while it idles, is blamed on a message, or
/// everything is put on probation. D3.
#[tokio::test(flavor = "multi_thread")]
async fn a_connection_lost_outside_a_handler_is_the_hosts() {
    let world = World::new().await;
    let consumer = world.simple("", "").await;
    let host = world.host(&consumer);
    // Idle connections that died are replaced without a word.
    deliver(&host, &records(["a"])).await;
    world
        .execute(format!("SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity WHERE usename = '{}'", consumer.tenant.login))
        .await;
    assert!(deliver(&host, &[record(1, "b", "")]).await.is_empty());
    // A claim that waits for another holder of the message.
    let mut holder = Guest::begin(&world, &consumer).await;
    holder.claim(&["c"]).await.unwrap();
    let running = tokio::spawn({
        let host: Arc<ConsumerInbox> = host.clone();
        let log: Vec<Record> = vec![record(2, "c", "")];
        async move { deliver(&host, &log).await }
    });
    world.until("SELECT count(*) = 1 FROM pg_locks WHERE locktype = 'advisory' AND NOT granted").await;
    world.execute("SELECT pg_terminate_backend(pid, 5000) FROM pg_locks WHERE NOT granted").await;
    drop(holder);
    let errors = running.await.unwrap();
    assert!(matches!(errors.first(), Some(InboxError::Unreachable(_))), "{errors:?}");
    assert_eq!(world.row(&consumer, "c").await.state(), ("completed", None, 1));
    world.finish().await;
}

/// What could go wrong: the answer to a COMMIT is lost, and the message counts as failed, as crashed, or
/// runs twice. D3.
#[tokio::test(flavor = "multi_thread")]
async fn a_lost_answer_to_commit_is_found_out_by_claiming_again() {
    let world = World::new().await;
    let consumer = deadly(&world, &format!("limits = {{ deadline_ms = 1000 }}\n{QUICK}")).await;
    let tenant = &consumer.tenant;
    world.execute(format!("GRANT USAGE ON LANGUAGE plpgsql TO {}", tenant.owner_login)).await;
    // Sequences do not roll back: each kills one commit only.
    world.admin.apply_migration(tenant, "bomb", "CREATE TABLE bomb (fuse text); CREATE SEQUENCE live; CREATE SEQUENCE again; \
        CREATE FUNCTION explode() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN \
            IF nextval(NEW.fuse::regclass) = 1 THEN PERFORM pg_terminate_backend(pg_backend_pid()); PERFORM count(*) FROM generate_series(1, 10000000); END IF; \
            RETURN NULL; END $$; \
        CREATE CONSTRAINT TRIGGER bomb AFTER INSERT ON bomb DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION explode();").await.unwrap();
    let host = world.host(&consumer);
    let errors = deliver(
        &host,
        &[
            record(0, "a", "sql INSERT INTO bomb VALUES ('live')"),
            record(1, "b", "before 2 retry 0\nsql INSERT INTO bomb VALUES ('again')"),
        ],
    )
    .await;
    assert!(matches!(&errors[..], [InboxError::CommitUnknown(_)]), "{errors:?}");
    assert_eq!(world.row(&consumer, "a").await.state(), ("completed", None, 1));
    let error = loop {
        if let Err(error) = step(&host).await {
            break error;
        }
    };
    assert!(matches!(error, InboxError::CommitUnknown(_)), "{error}");
    world.retry_until_settled(&host).await;
    let row = world.row(&consumer, "b").await;
    assert_eq!((row.state(), row.crashes), (("completed", None, 2), 0));
    world.finish().await;
}
