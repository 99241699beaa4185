//! Once: whatever is delivered how often, in whatever order, to however many hosts, each message
//! takes effect exactly once for its consumer.

use std::sync::Arc;

use oncebox_control::{Action, JobFilter};
use oncebox_inbox::ConsumerInbox;
use oncebox_model::{InboxError, record::Record};
use oncebox_tests::{
    inbox::{
        Guest, InboxFixture, PlainHandlers, Script, TestConsumer, both, code, deliver, drive, open,
        record, records, step, take,
    },
    job::{carry_out, inbox_job},
    wait::DEADLINE,
};
use rand::{Rng, SeedableRng, rngs::StdRng, seq::SliceRandom};
use sha2::Digest;
use sqlx::{AssertSqlSafe, Connection, Executor};
use tokio::time::{Duration, Instant, sleep};

/// What could go wrong: nothing happens, the row does not say what happened, or the row grows a
/// payload nobody asked for. S1-102, S1-003, S1-035, S3-024, S0-005 to S0-008, S1-036.
#[tokio::test(flavor = "multi_thread")]
async fn a_first_delivery_takes_effect() {
    both(a_first_delivery_takes_effect_of).await;
}

async fn a_first_delivery_takes_effect_of(fixture: InboxFixture) {
    let consumer = fixture.simple("", "").await;
    let host = fixture.host(&consumer);
    assert!(deliver(&host, &records(["a", "b"])).await.is_empty());
    let row = fixture.row(&consumer, "a").await;
    // S1-027, S1-035, S1-102.
    assert_eq!(
        (row.state(), row.version_id, row.processed, row.leased),
        (("completed", None, 1), Some(1), true, false)
    );
    assert_eq!((row.payload, row.headers, row.topic.as_str(), row.offset), (None, None, "t", 0));
    assert_eq!(row.payload_hash.unwrap().len(), 32, "the hash is always kept");
    assert_eq!(fixture.effects(&consumer, "b").await, 1);
    fixture.finish().await;
}

/// What could go wrong: a duplicate runs, is taken for an error, or holds the partition.
/// S1-103, S1-104, S1-113, S1-125, S4-008, S4-009, S0-019, S3-005.
#[tokio::test(flavor = "multi_thread")]
async fn a_duplicate_after_success_is_settled_without_a_run() {
    both(a_duplicate_after_success_is_settled_without_a_run_of).await;
}

async fn a_duplicate_after_success_is_settled_without_a_run_of(fixture: InboxFixture) {
    let consumer = fixture.simple("", "").await;
    // The second host knows nothing of the first, as after a crash between commit and ack.
    for _ in 0..2 {
        assert!(deliver(&fixture.host(&consumer), &records(["a", "b"])).await.is_empty());
    }
    // Duplicates inside one batch, beside a new one.
    deliver(&fixture.host(&consumer), &records(["c", "a", "c", "c", "b"])).await;
    // S0-007, S0-019, S1-103, S1-104, S1-113, S1-125, S4-008, S4-009.
    assert_eq!(fixture.script.runs("a").len(), 1);
    assert_eq!(fixture.script.runs("c").len(), 1);
    assert_eq!(fixture.number("SELECT count(*) FROM oncebox.inbox").await, 3);
    fixture.finish().await;
}

/// What could go wrong: what a failed transaction wrote stays, or its claim does and the message is
/// lost. S1-105, S0-022, S1-004, S1-005, S1-006, S3-008.
#[tokio::test(flavor = "multi_thread")]
async fn a_failure_before_commit_leaves_nothing_and_redelivery_runs() {
    both(a_failure_before_commit_leaves_nothing_and_redelivery_runs_of).await;
}

async fn a_failure_before_commit_leaves_nothing_and_redelivery_runs_of(fixture: InboxFixture) {
    let consumer = fixture.simple("", "batch = { duration_ms = 60000 }").await;
    let (host, records) = (fixture.host(&consumer), [record(0, "a", ""), record(1, "b", "gate b")]);
    let mut partition = open(&host, 0).await;
    let offered = records.clone();
    let running = tokio::spawn(async move { (partition.process(&offered).await, partition) });
    fixture.script.gate("b").reached(1).await;
    let backend = fixture.script.runs("b")[0].backend;
    fixture.execute(format!("SELECT pg_terminate_backend({backend})")).await;
    fixture.script.gate("b").open();
    let (answer, mut partition) = running.await.unwrap();
    assert!(matches!(answer, Err(InboxError::Unreachable(_))), "{answer:?}");
    // S0-022, S1-005, S1-006, S3-008, S3-024.
    assert_eq!(fixture.number("SELECT count(*) FROM oncebox.inbox").await, 0);
    assert_eq!(fixture.effects(&consumer, "a").await, 0);
    drive(&mut partition, &records).await;
    partition.close().await;
    // S1-105.
    assert_eq!(fixture.row(&consumer, "b").await.state(), ("completed", None, 1));
    fixture.finish().await;
}

/// What could go wrong: two claimers check, both find nothing, both act. S4-015, S4-016, S0-002,
/// S0-018, S0-004.
#[tokio::test(flavor = "multi_thread")]
async fn many_claimers_of_one_message_run_it_once() {
    both(many_claimers_of_one_message_run_it_once_of).await;
}

async fn many_claimers_of_one_message_run_it_once_of(fixture: InboxFixture) {
    let consumer = fixture.simple("", "").await;
    let ids: Vec<_> = (0..20).map(|n| format!("m{n}")).collect();
    let mut tasks = Vec::new();
    for host in 0..8 {
        let inbox = fixture.host(&consumer);
        let mut order: Vec<_> =
            (0..).zip(&ids).map(|(offset, id)| record(offset, id, "")).collect();
        order.shuffle(&mut StdRng::seed_from_u64(host));
        tasks.push(tokio::spawn(async move { deliver(&inbox, &order).await }));
    }
    for task in tasks {
        task.await.unwrap();
    }
    for id in &ids {
        // S0-002, S0-018, S4-015, S4-016.
        assert_eq!(fixture.effects(&consumer, id).await, 1);
    }
    fixture.finish().await;
}

/// What could go wrong: a second claimer does not wait for the first, or cannot take over after it
/// rolled back. S0-002.
#[tokio::test(flavor = "multi_thread")]
async fn a_second_claimer_waits_and_takes_over_when_the_first_fails() {
    both(a_second_claimer_waits_and_takes_over_when_the_first_fails_of).await;
}

async fn a_second_claimer_waits_and_takes_over_when_the_first_fails_of(fixture: InboxFixture) {
    let consumer = fixture.simple("", "").await;
    let (first, second) = (fixture.host(&consumer), fixture.host(&consumer));
    let gated = [record(0, "a", "gate g")];
    let mut partition = open(&first, 0).await;
    let running = tokio::spawn(async move { partition.process(&gated).await });
    fixture.script.gate("g").reached(1).await;
    let waiting = tokio::spawn(async move { deliver(&second, &[record(0, "a", "gate g")]).await });
    fixture.until_blocked(1).await;
    // S0-002.
    assert_eq!(fixture.script.runs("a").len(), 1, "both run at the same time");
    let backend = fixture.script.runs("a")[0].backend;
    fixture.execute(format!("SELECT pg_terminate_backend({backend})")).await;
    fixture.script.gate("g").open();
    assert!(running.await.unwrap().is_err());
    waiting.await.unwrap();
    // S3-005.
    assert_eq!(fixture.effects(&consumer, "a").await, 1);
    fixture.finish().await;
}

/// What could go wrong: some mixture of order, batch cut, repetition, failure and host doubles or
/// loses a message. S1-002, S4-001, S4-017, S1-118, S1-001.
#[tokio::test(flavor = "multi_thread")]
async fn any_deliveries_have_the_effect_of_one() {
    let seed =
        std::env::var("ONCEBOX_SEED").map_or_else(|_| rand::random(), |text| text.parse().unwrap());
    println!("ONCEBOX_SEED={seed}");
    both(async |fixture| any_deliveries(fixture, seed).await).await;
}

async fn any_deliveries(fixture: InboxFixture, seed: u64) {
    let mut random = StdRng::seed_from_u64(seed);
    let consumer = fixture
        .simple(
            "CREATE TABLE hot (id int PRIMARY KEY, n int NOT NULL); INSERT INTO hot SELECT n, 0 \
                FROM generate_series(0, 3) n;",
            "retry = { attempts_max = 4, backoff_min_ms = 1, backoff_max_ms = 5 }",
        )
        .await;
    let mut log: Vec<_> =
        (0..60).map(|n| record(n, &format!("m{n}"), &random_script(&mut random))).collect();
    for _ in 0..40 {
        let mut again = log[random.random_range(0..60)].clone();
        again.offset = log.len() as i64;
        log.push(again);
    }
    let mut hosts = Vec::new();
    for _ in 0..4 {
        let (inbox, log, seed) = (fixture.host(&consumer), log.clone(), random.random());
        hosts.push(tokio::spawn(async move { deliver_randomly(inbox, &log, seed).await }));
    }
    for host in hosts {
        host.await.unwrap();
    }
    fixture.retry_until_settled(&fixture.host(&consumer)).await;
    let expected = log[..60]
        .iter()
        .filter(|record| {
            !String::from_utf8_lossy(record.payload.as_ref().unwrap()).contains("reject")
        })
        .count();
    // S1-002, S1-118, S4-001, S4-017.
    assert_eq!(
        fixture.number("SELECT count(*) FROM oncebox.inbox WHERE status = 'completed'").await,
        expected as i64
    );
    assert_eq!(fixture.number("SELECT count(*) FROM oncebox.inbox").await, 60);
    fixture.finish().await;
}

fn random_script(random: &mut StdRng) -> String {
    let hot = format!("sql UPDATE hot SET n = n + 1 WHERE id = {}", random.random_range(0..4));
    match random.random_range(0..12) {
        0 => "reject".into(),
        1 => "before 3 trap".into(),
        2 => format!("{hot}\nbefore 2 retry 1"),
        3 => "before 2 sql SELECT 1/0".into(),
        4 => "before 2 swallow SELECT 1/0".into(),
        5..8 => hot,
        _ => "result {\"n\":1}".into(),
    }
}

/// Start anywhere at or before what is not settled, any batch cut, over and over to the end.
async fn deliver_randomly(host: Arc<ConsumerInbox>, log: &[Record], seed: u64) {
    let mut random = StdRng::seed_from_u64(seed);
    let mut from = 0;
    let deadline = Instant::now() + DEADLINE;
    let mut partition = take(&host).await;
    while from < log.len() {
        assert!(Instant::now() < deadline, "no end at {from}");
        let until = (from + random.random_range(1..=64)).min(log.len());
        match partition.process(&log[from..until]).await {
            Ok(settled) => from += settled,
            Err(_) => sleep(Duration::from_millis(10)).await,
        }
        if random.random_ratio(1, 10) {
            from = from.saturating_sub(random.random_range(0..20));
            // After a clean hand-over, or after one that looks like a crash.
            let next =
                if random.random_ratio(1, 3) { open(&host, 0).await } else { take(&host).await };
            std::mem::replace(&mut partition, next).close().await;
        }
    }
    partition.close().await;
}

/// What could go wrong: one consumer's claim hides the message from another, of the same tenant or
/// of another one. S1-052, S1-053, S4-021, S1-120, S0-012.
#[tokio::test(flavor = "multi_thread")]
async fn each_consumer_takes_a_message_for_itself() {
    both(each_consumer_takes_a_message_for_itself_of).await;
}

async fn each_consumer_takes_a_message_for_itself_of(fixture: InboxFixture) {
    let (acme, globex) = (fixture.tenant("acme", "").await, fixture.tenant("globex", "").await);
    let consumers = [
        fixture.consumer(&acme, "orders", "").await,
        fixture.consumer(&acme, "billing", "").await,
        fixture.consumer(&globex, "orders", "").await,
    ];
    for consumer in &consumers {
        deliver(&fixture.host(consumer), &records(["a", "a"])).await;
    }
    for consumer in &consumers {
        // S0-012, S1-052, S1-053, S1-120, S4-021.
        assert_eq!(fixture.effects(consumer, "a").await, 1);
    }
    fixture.finish().await;
}

/// What could go wrong: what the handler answered is lost, or a redelivery cannot get at it.
/// S0-024, S4-006, S4-010.
#[tokio::test(flavor = "multi_thread")]
async fn a_redelivery_gets_the_stored_result() {
    both(a_redelivery_gets_the_stored_result_of).await;
}

async fn a_redelivery_gets_the_stored_result_of(fixture: InboxFixture) {
    let consumer = fixture.simple("", "").await;
    deliver(&fixture.host(&consumer), &[record(0, "msg-abc-123", "result {\"reserved\":3}")]).await;
    assert_eq!(
        fixture.row(&consumer, "msg-abc-123").await.result,
        Some(serde_json::json!({"reserved": 3}))
    );
    let mut guest = Guest::begin(&fixture, &consumer).await;
    let answer = guest.claim(&["msg-abc-123", "x"]).await.unwrap();
    // S0-024.
    assert_eq!(answer[0].1.as_deref(), Some("{\"reserved\": 3}"));
    assert_eq!((answer[0].0.as_str(), answer[1].0.as_str()), ("known", "new"));
    drop(guest);
    fixture.finish().await;
}

/// What could go wrong: a transaction whose completion was skipped, by a bug of the host or by a
/// COMMIT out of a guest's statement, commits an effect. S0-021, S0-023, S0-046, D4.
#[tokio::test(flavor = "multi_thread")]
async fn the_database_refuses_a_commit_without_completion() {
    both(the_database_refuses_a_commit_without_completion_of).await;
}

async fn the_database_refuses_a_commit_without_completion_of(fixture: InboxFixture) {
    let consumer = fixture.simple("", "").await;
    let mut guest = Guest::begin(&fixture, &consumer).await;
    guest.claim(&["a"]).await.unwrap();
    guest.execute("INSERT INTO effect VALUES ('orders', 'a', 1, 1)").await.unwrap();
    // S0-021, S0-023, S0-046, S1-003, S1-035.
    assert_eq!(code(&guest.execute("COMMIT").await.unwrap_err()), "OB001");
    // Nor can a session get around it by asking for the check early.
    let mut guest = Guest::begin(&fixture, &consumer).await;
    guest.claim(&["a"]).await.unwrap();
    assert_eq!(code(&guest.execute("SET CONSTRAINTS ALL IMMEDIATE").await.unwrap_err()), "OB001");
    // A COMMIT in the middle of a handler's run fails, and the message's transaction with it.
    let stray = "sql COMMIT";
    deliver(&fixture.host(&consumer), &[record(0, "b", stray)]).await;
    assert_eq!(
        fixture.row(&consumer, "b").await.state(),
        ("failed_retryable", Some("sql_error:OB001"), 1)
    );
    drop(guest);
    fixture.finish().await;
}

/// What could go wrong: a completion succeeds for a claim of another transaction, or of none.
#[tokio::test(flavor = "multi_thread")]
async fn a_completion_needs_the_claim_of_its_own_transaction() {
    let fixture = InboxFixture::new().await;
    let consumer = fixture.simple("", "").await;
    let mut guest = Guest::begin(&fixture, &consumer).await;
    assert_eq!(code(&guest.complete(&[], &[]).await.unwrap_err()), "OB002");
    deliver(&fixture.host(&consumer), &records(["done"])).await;
    for (withdrawn, failed) in [(&["done"][..], &[][..]), (&[], &["done"])] {
        let mut guest = Guest::begin(&fixture, &consumer).await;
        guest.claim(&["a", "done"]).await.unwrap();
        assert_eq!(code(&guest.complete(withdrawn, failed).await.unwrap_err()), "OB003");
    }
    drop(guest);
    fixture.finish().await;
}

/// What could go wrong: under a snapshot older than its locks a claim sees nothing of an earlier
/// holder. A1 (3): the isolation level is a default that a role can set for itself.
#[tokio::test(flavor = "multi_thread")]
async fn a_claim_refuses_another_isolation_level() {
    let fixture = InboxFixture::new().await;
    let consumer = fixture.simple("", "").await;
    for level in ["REPEATABLE READ", "SERIALIZABLE"] {
        let mut guest = Guest::connect(&fixture, &consumer).await;
        guest.execute(&format!("BEGIN ISOLATION LEVEL {level} READ WRITE")).await.unwrap();
        assert_eq!(code(&guest.claim(&["a"]).await.unwrap_err()), "OB004");
    }
    fixture
        .execute(format!(
            "ALTER ROLE {} SET default_transaction_isolation = 'repeatable read'",
            consumer.tenant.login
        ))
        .await;
    assert!(deliver(&fixture.host(&consumer), &records(["a"])).await.is_empty());
    fixture.finish().await;
}

/// What could go wrong: a tenant calls the host's functions for itself or for another, or looks
/// into the host's tables. S0-047, D5.
#[tokio::test(flavor = "multi_thread")]
async fn a_tenants_session_reaches_nothing_of_the_host_or_of_others() {
    let fixture = InboxFixture::new().await;
    let (acme, globex) = (fixture.tenant("acme", "").await, fixture.tenant("globex", "").await);
    let (orders, others) = (
        fixture.consumer(&acme, "orders", "").await,
        fixture.consumer(&globex, "orders", "").await,
    );
    deliver(&fixture.host(&others), &records(["theirs"])).await;
    let secrets = [vec![0; 32], Vec::new(), fixture.secret(&globex), fixture.secret(&acme)];
    for (secret, consumer) in secrets.iter().zip([&orders, &orders, &orders, &others]) {
        let mut guest = Guest::begin(&fixture, &orders).await;
        guest.secret.clone_from(secret);
        guest.consumer_id = consumer.row.consumer_id;
        assert_eq!(code(&guest.claim(&["theirs"]).await.unwrap_err()), "42501");
    }
    // Nor does a secret that leaked open anything in the session of another tenant.
    let mut guest = Guest::begin(&fixture, &others).await;
    guest.secret = fixture.secret(&acme);
    guest.consumer_id = orders.row.consumer_id;
    assert_eq!(code(&guest.claim(&["mine"]).await.unwrap_err()), "42501");
    drop(guest);
    let (inbox, effect) =
        ("SELECT * FROM oncebox.inbox", format!("SELECT * FROM {}.effect", globex.schema_name));
    let refused = [
        inbox,
        &effect,
        "SELECT * FROM oncebox.guard",
        "DELETE FROM oncebox.guard",
        "SELECT * FROM oncebox.tenant",
        "SELECT * FROM oncebox.inbox_message",
        "SELECT oncebox.bucket_at(1::smallint, now())",
        "SELECT * FROM oncebox.authorize('x', 1)",
        "CREATE TABLE mine (n int)",
        "CREATE TEMP TABLE mine (n int)",
        "CREATE TABLE public.mine (n int)",
        "SET ROLE postgres",
        "SELECT pg_advisory_lock(1)",
        "SELECT set_config('a.b', 'c', false)",
        "SELECT pg_sleep(1)",
        "SELECT pg_notify('a', 'b')",
        "SELECT query_to_xml('SELECT 1', true, true, '')",
        "DO $$ BEGIN NULL; END $$",
        "TRUNCATE effect",
        "SELECT lo_create(0)",
    ];
    for sql in refused {
        let mut guest = Guest::begin(&fixture, &orders).await;
        let error = guest.execute(sql).await.expect_err(sql);
        assert_eq!(code(&error), "42501", "`{sql}`: {error}");
    }
    fixture.finish().await;
}

/// What could go wrong: claims in different time buckets, whose keys do not conflict, both succeed.
/// A1: the holder's transaction stays open over the boundary.
#[tokio::test(flavor = "multi_thread")]
async fn claims_in_two_buckets_have_one_effect() {
    let fixture = InboxFixture::new().await;
    let consumer = two_second_buckets(&fixture).await;
    for round in 0..3 {
        let (id, gate) = (format!("m{round}"), format!("g{round}"));
        let records = [record(round, &id, &format!("gate {gate}"))];
        let (holder, later) = (fixture.host(&consumer), fixture.host(&consumer));
        let (mut partition, claimed) = (open(&holder, round).await, records.clone());
        let running = tokio::spawn(async move { partition.process(&claimed).await });
        fixture.script.gate(&gate).reached(1).await;
        let bucket = fixture
            .number("SELECT extract(epoch FROM oncebox.bucket_at(9::smallint, now()))::bigint")
            .await;
        fixture
            .until(&format!(
                "SELECT extract(epoch FROM oncebox.bucket_at(9::smallint, now())) > {bucket}"
            ))
            .await;
        let second = tokio::spawn(async move { deliver(&later, &records).await });
        fixture.until_blocked(1).await;
        fixture.script.gate(&gate).open();
        assert_eq!(running.await.unwrap().unwrap(), 1);
        second.await.unwrap();
        // S0-012.
        assert_eq!((fixture.script.runs(&id).len(), fixture.effects(&consumer, &id).await), (1, 1));
    }
    // And long after: the row of an old bucket still speaks.
    deliver(&fixture.host(&consumer), &[record(0, "m0", "gate g0")]).await;
    assert_eq!(fixture.number("SELECT count(DISTINCT bucket) FROM oncebox.inbox").await, 3);
    fixture.finish().await;
}

/// What could go wrong: with buckets passing by, a retry moves its row between partitions while
/// duplicates of it come. A1, A9, S2-012.
#[tokio::test(flavor = "multi_thread")]
async fn rows_that_change_their_bucket_stay_one_row() {
    let fixture = InboxFixture::new().await;
    let consumer = two_second_buckets(&fixture).await;
    let ids: Vec<_> = (0..12).map(|n| format!("m{n}")).collect();
    let log: Vec<_> = (0..)
        .zip(&ids)
        .map(|(offset, id)| record(offset, id, "before 4 retry 900\nsleep 5"))
        .collect();
    let mut tasks = Vec::new();
    let until = Instant::now() + Duration::from_secs(5);
    for _ in 0..2 {
        let (host, log) = (fixture.host(&consumer), log.clone());
        tasks.push(tokio::spawn(async move {
            while Instant::now() < until {
                deliver(&host, &log).await;
                let _ = step(&host).await;
                sleep(Duration::from_millis(50)).await;
            }
        }));
    }
    for task in tasks {
        task.await.unwrap();
    }
    fixture.retry_until_settled(&fixture.host(&consumer)).await;
    for id in &ids {
        // S2-012.
        assert_eq!(
            (fixture.effects(&consumer, id).await, fixture.row(&consumer, id).await.attempts),
            (1, 4)
        );
    }
    fixture.finish().await;
}

/// A consumer of a retention class whose buckets last two seconds, with partitions for a while.
async fn two_second_buckets(fixture: &InboxFixture) -> TestConsumer {
    fixture
        .execute(
            "INSERT INTO oncebox.retention_class VALUES (9, '2s', '2 seconds', '1 minute'); \
        CREATE TABLE oncebox.inbox_2s PARTITION OF oncebox.inbox FOR VALUES IN (9) PARTITION BY \
        RANGE (bucket); \
        DO $$ BEGIN FOR n IN 0..40 LOOP EXECUTE format('CREATE TABLE oncebox.inbox_2s_%s PARTITION \
        OF oncebox.inbox_2s FOR VALUES FROM (%L) TO (%L)', \
            n, oncebox.bucket_at(9::smallint, now()) + n * interval '2 seconds', \
            oncebox.bucket_at(9::smallint, now()) + (n + 1) * interval '2 seconds'); \
        END LOOP; END $$;",
        )
        .await;
    let consumer = fixture
        .simple("", "retry = { backoff_min_ms = 10, backoff_max_ms = 10, attempts_max = 10 }")
        .await;
    fixture.execute("UPDATE oncebox.consumer SET retention_class = 9").await;
    consumer
}

/// What could go wrong: a host that fails late overwrites what another completed meanwhile. A4: its
/// failure is recorded through the claim, or not at all.
#[tokio::test(flavor = "multi_thread")]
async fn a_zombies_failure_overwrites_nothing() {
    both(a_zombies_failure_overwrites_nothing_of).await;
}

async fn a_zombies_failure_overwrites_nothing_of(fixture: InboxFixture) {
    let consumer = fixture
        .simple(
            "CREATE TABLE hot (n int); INSERT INTO hot VALUES (0);",
            "limits = { deadline_ms = 1000 }",
        )
        .await;
    let (zombie, owner) = (fixture.host(&consumer), fixture.host(&consumer));
    // The zombie hangs in a statement; at its deadline the connection is given up, its claim with
    // it.
    let mut lock = fixture.superuser().await;
    lock.execute(AssertSqlSafe(format!("BEGIN; LOCK TABLE {}.hot", consumer.tenant.schema_name)))
        .await
        .unwrap();
    let script = "gate g\nbefore 2 sql UPDATE hot SET n = 1";
    let late = tokio::spawn(async move { deliver(&zombie, &[record(0, "a", script)]).await });
    fixture.script.gate("g").reached(1).await;
    // The new owner waits for the message's lock; it runs a version that needs no hot row.
    let version = Script::version(fixture.script.clone(), 2);
    owner.set_handlers(PlainHandlers::of(version));
    let taking = tokio::spawn(async move { deliver(&owner, &[record(0, "a", "")]).await });
    fixture.until_blocked(1).await;
    fixture.script.gate("g").open();
    taking.await.unwrap();
    late.await.unwrap();
    let row = fixture.row(&consumer, "a").await;
    assert_eq!((row.state(), row.version_id), (("completed", None, 1), Some(2)));
    lock.close().await.unwrap();
    // The two payloads differ, so the loser's is kept beside as a collision.
    assert_eq!(
        fixture.number("SELECT count(*) FROM oncebox.inbox WHERE reason = 'collision'").await,
        1
    );
    fixture.finish().await;
}

/// What could go wrong: claims that a slow batch does not come to are completed without having run,
/// or never come again. A5: 50 ms bound a batch.
#[tokio::test(flavor = "multi_thread")]
async fn claims_that_were_not_run_are_withdrawn_and_come_again() {
    let fixture = InboxFixture::new().await;
    let consumer = fixture.simple("", "batch = { duration_ms = 50 }").await;
    let log: Vec<_> = (0..10).map(|n| record(n, &format!("m{}", n % 8), "sleep 30")).collect();
    let host = fixture.host(&consumer);
    let mut partition = open(&host, 0).await;
    let first = partition.process(&log).await.unwrap();
    assert!((1..=3).contains(&first), "{first} messages of 30 ms in 50 ms");
    assert_eq!(fixture.number("SELECT count(*) FROM oncebox.inbox").await, first as i64);
    drive(&mut partition, &log[first..]).await;
    partition.close().await;
    for n in 0..8 {
        assert_eq!(fixture.script.runs(&format!("m{n}")).len(), 1);
    }
    fixture.finish().await;
}

/// What could go wrong: a host that was told of a newer deployment speaks for the old one it still
/// runs, and a withdrawn version completes a message. D11.
#[tokio::test(flavor = "multi_thread")]
async fn a_stale_host_completes_nothing() {
    let fixture = InboxFixture::new().await;
    let consumer = fixture.simple("", "").await;
    fixture.execute("UPDATE oncebox.consumer SET generation = 2, generation_required = 2").await;
    let host = fixture.host(&consumer);
    let mut partition = open(&host, 0).await;
    let error = partition.process(&records(["a"])).await.unwrap_err();
    assert!(matches!(error, InboxError::StaleDeployments), "{error}");
    // The swap comes right after the old set was asked who takes the message.
    let (old, new) =
        (Script::version(fixture.script.clone(), 1), Script::version(fixture.script.clone(), 2));
    let new = PlainHandlers::resolving(2, move |_| Some(new.clone()));
    let swapped = host.clone();
    host.set_handlers(PlainHandlers::resolving(1, move |_| {
        swapped.set_handlers(new.clone());
        Some(old.clone())
    }));
    // Refused under the old one, and run again by the new one.
    assert_eq!(partition.process(&records(["a"])).await.unwrap(), 1);
    partition.close().await;
    assert_eq!(fixture.row(&consumer, "a").await.version_id, Some(2));
    fixture.finish().await;
}

/// What could go wrong: a record that comes again after its message was forgotten has its effect
/// again, though the policy would rather ask; or what is known, or new, is asked about. S1-046,
/// S1-047, S2-017.
#[tokio::test(flavor = "multi_thread")]
async fn what_may_be_forgotten_is_parked_where_the_policy_says_so() {
    let fixture = InboxFixture::new().await;
    let consumer = fixture.simple("", "replay = { past_horizon = 'park_by_time' }").await;
    let host = fixture.host(&consumer);
    let now: i64 = sqlx::query_scalar("SELECT (extract(epoch FROM now()) * 1000)::bigint")
        .fetch_one(&fixture.pool)
        .await
        .unwrap();
    let aged = |offset, id: &str, days: i64| Record {
        timestamp_ms: now - days * 86_400_000,
        ..record(offset, id, "")
    };
    let timeless = Record { timestamp_ms: 0, ..record(2, "timeless", "") };
    deliver(&host, &[aged(0, "young", 6), aged(1, "old", 8), timeless, aged(3, "young", 8)]).await;
    for (id, expected) in [
        ("young", ("completed", None, 1)),
        ("old", ("parked", Some("horizon"), 0)),
        ("timeless", ("completed", None, 1)),
    ] {
        // S1-111.
        assert_eq!(fixture.row(&consumer, id).await.state(), expected, "{id}");
    }
    assert_eq!(
        (fixture.rows().await.len(), fixture.effects(&consumer, "young").await),
        (3, 1),
        "what is known is a duplicate"
    );
    let redrive = inbox_job(Action::Redrive, "orders", JobFilter::default());
    assert_eq!(carry_out(&fixture.control, "acme", &redrive).await.unwrap().changed, 1);
    fixture.retry_until_settled(&host).await;
    assert_eq!(fixture.row(&consumer, "old").await.state(), ("completed", None, 1));
    let usual = fixture.consumer(&consumer.tenant, "usual", "").await;
    deliver(&fixture.host(&usual), &[aged(0, "usual", 8)]).await;
    assert_eq!(fixture.row(&usual, "usual").await.state(), ("completed", None, 1));
    fixture.finish().await;
}

/// What could go wrong: an id that is used for two things loses one of them. A8 (b), S0-048,
/// S1-091.
#[tokio::test(flavor = "multi_thread")]
async fn another_payload_under_a_known_id_is_kept_unless_the_policy_says_ignore() {
    both(another_payload_under_a_known_id_is_kept_unless_the_policy_says_ignore_of).await;
}

async fn another_payload_under_a_known_id_is_kept_unless_the_policy_says_ignore_of(
    fixture: InboxFixture,
) {
    let tenant = fixture.tenant("acme", "").await;
    const TYPED: &str =
        "identity = { id = [{ header = 'id' }], event_type = [{ header = 'type' }, 'topic'] }";
    for (policy, kept) in [(TYPED.to_owned(), 1), (format!("{TYPED}\ncollision = 'ignore'"), 0)] {
        let name = if kept == 1 { "keeping" } else { "ignoring" };
        let consumer = fixture.consumer(&tenant, name, &policy).await;
        let log = [
            record(0, "a", ""),
            record(1, "a", "# other"),
            record(2, "a", ""),
            record(3, "a", "# other"),
        ];
        for _ in 0..2 {
            deliver(&fixture.host(&consumer), &log).await;
        }
        let of = |what: &str| {
            format!(
                "SELECT count(*) FROM oncebox.inbox WHERE consumer_id = {} AND {what}",
                consumer.row.consumer_id
            )
        };
        assert_eq!(fixture.number(of("status = 'completed'")).await, 1);
        // S0-048, S1-091.
        assert_eq!(
            fixture
                .number(of("status = 'parked' AND reason = 'collision' AND message_id LIKE 'a#%' \
                AND payload = '# other'"))
                .await,
            kept
        );
        // Nobody takes this one's type; its id is taken all the same.
        let mut unrouted = record(4, "a", "# third");
        unrouted.headers.push(("type".to_owned(), b"nobody".to_vec()));
        deliver(&fixture.host(&consumer), &[unrouted]).await;
        assert_eq!(
            fixture
                .number(of("status = 'parked' AND reason = 'collision' AND payload = '# third'"))
                .await,
            kept
        );
    }
    fixture.finish().await;
}

/// What could go wrong: the hash of a guessable payload tells what it was, or that two tenants got
/// the same one; or a rotation changes the key, and then a known payload passes for another, or
/// another for the known one.
#[tokio::test(flavor = "multi_thread")]
async fn a_payload_hash_is_keyed_by_the_tenant_and_outlasts_its_credentials() {
    let fixture = InboxFixture::new().await;
    const YES: &str = "# yes";
    let mut hashes = vec![sha2::Sha256::digest(YES).to_vec()];
    for name in ["acme", "globex"] {
        let tenant = fixture.tenant(name, "").await;
        let consumer = fixture.consumer(&tenant, "orders", "").await;
        deliver(&fixture.host(&consumer), &[record(0, "a", YES)]).await;
        hashes.extend(fixture.row(&consumer, "a").await.payload_hash);

        fixture.control.tenants().rotate_credentials(name).await.unwrap();
        let tenant = fixture.control.tenants().get(name).await.unwrap();
        let renewed = TestConsumer { tenant, ..consumer };
        let again = [record(1, "a", YES), record(2, "a", "# no"), record(3, "b", YES)];
        deliver(&fixture.host(&renewed), &again).await;
        let collisions = format!(
            "SELECT count(*) FROM oncebox.inbox WHERE consumer_id = {} AND message_id LIKE 'a#%'",
            renewed.row.consumer_id
        );
        assert_eq!(fixture.number(collisions).await, 1, "the other payload, and it alone");
        let hash = fixture.row(&renewed, "b").await.payload_hash;
        assert_eq!(hash.as_ref(), hashes.last(), "the key is another one after a rotation");
    }
    let distinct: std::collections::HashSet<_> = hashes.iter().collect();
    assert_eq!((hashes.len(), distinct.len()), (3, 3), "{hashes:02x?}");
    fixture.finish().await;
}

/// What could go wrong: a payload is kept that must not be, or missing where a person or a retry
/// needs it. S0-011, S1-093.
#[tokio::test(flavor = "multi_thread")]
async fn payloads_are_kept_as_the_policy_says() {
    both(payloads_are_kept_as_the_policy_says_of).await;
}

async fn payloads_are_kept_as_the_policy_says_of(fixture: InboxFixture) {
    let tenant = fixture.tenant("acme", "").await;
    // Kept of: completed, rejected, waiting for a retry, and the same once it has succeeded.
    for (policy, expected) in [
        ("failed", [false, true, true, false]),
        ("all", [true, true, true, true]),
        ("none", [false, false, true, false]),
    ] {
        let consumer = fixture.consumer(&tenant, policy, &format!("payload = '{policy}'")).await;
        let log = [
            record(0, "done", ""),
            record(1, "rejected", "reject"),
            record(2, "again", "before 2 retry 0"),
        ];
        let host = fixture.host(&consumer);
        deliver(&host, &log).await;
        let mut rows = vec![
            fixture.row(&consumer, "done").await,
            fixture.row(&consumer, "rejected").await,
            fixture.row(&consumer, "again").await,
        ];
        fixture.retry_until_settled(&host).await;
        rows.push(fixture.row(&consumer, "again").await);
        assert_eq!(rows[3].state(), ("completed", None, 2), "{policy}");
        for (row, kept) in rows.iter().zip(expected) {
            // S0-008, S0-011.
            assert_eq!(
                (row.payload.is_some(), row.headers.is_some()),
                (kept, kept),
                "{policy}: {row:?}"
            );
            assert_eq!(
                row.payload_hash.as_ref().map(Vec::len),
                Some(32),
                "{policy}: the hash is always kept"
            );
        }
    }
    fixture.finish().await;
}

/// What could go wrong: a duplicate of a completed message locks or writes its row, so that
/// deliveries of it hold each other up and leave dead rows. S0-020.
#[tokio::test(flavor = "multi_thread")]
async fn a_claim_of_a_completed_message_locks_no_row() {
    let fixture = InboxFixture::new().await;
    let consumer = fixture.simple("", "").await;
    deliver(&fixture.host(&consumer), &records(["a"])).await;
    let mut guest = Guest::begin(&fixture, &consumer).await;
    assert_eq!(guest.claim(&["a"]).await.unwrap()[0].0, "known");
    // A row that someone locks or has replaced has an xmax, and cannot be locked without waiting.
    // S0-020.
    assert_eq!(
        fixture.number("SELECT xmax::text::bigint FROM oncebox.inbox FOR UPDATE NOWAIT").await,
        0
    );
    drop(guest);
    fixture.finish().await;
}

/// What could go wrong: with deduplication switched off rows are still written for what completes,
/// a failure or its neighbours are lost, or a withdrawn deployment goes on. S0-036, S3-010.
#[tokio::test(flavor = "multi_thread")]
async fn without_deduplication_redelivery_runs_again_and_failures_stay_rows() {
    both(async |fixture| {
        let consumer = fixture
            .simple(
                "",
                "dedup = 'off'\nretry = { attempts_max = 2, backoff_min_ms \
            = 1, backoff_max_ms = 1 }",
            )
            .await;
        let host = fixture.host(&consumer);
        let log = [
            record(0, "a", "result 1"),
            record(1, "b", "before 2 retry 1"),
            record(2, "c", ""),
            record(3, "d", "reject"),
            record(4, "e", ""),
        ];
        for _ in 0..2 {
            assert!(deliver(&host, &log).await.is_empty());
        }
        fixture.retry_until_settled(&host).await;
        for (id, effects) in [("a", 2), ("b", 1), ("c", 2), ("d", 0), ("e", 2)] {
            // S0-036, S3-010.
            assert_eq!(fixture.effects(&consumer, id).await, effects, "`{id}`");
        }
        let rows = fixture.rows().await;
        let states: Vec<_> = rows
            .iter()
            .map(|row| (row.message_id.as_str(), row.status.as_str(), row.attempts))
            .collect();
        assert_eq!(states, [("b", "completed", 2), ("d", "failed_terminal", 1)]);
        fixture.execute("UPDATE oncebox.consumer SET generation_required = 1").await;
        let mut partition = take(&host).await;
        let stale = partition.process(&log[..1]).await.unwrap_err();
        assert!(stale.to_string().contains("stale"), "{stale}");
        partition.close().await;
        fixture.execute("DELETE FROM oncebox.inbox").await;
        fixture.execute(format!("DELETE FROM {}.effect", consumer.tenant.schema_name)).await;
        fixture.finish().await;
    })
    .await;
}

/// What could go wrong: a handler of batches is called once per message, or with messages it did
/// before, or one failure takes the others with it. S0-036, S3-011.
#[tokio::test(flavor = "multi_thread")]
async fn a_batch_handler_is_called_once_for_all_that_is_new() {
    let mut fixture = InboxFixture::new().await;
    fixture.batches();
    let consumer = fixture.simple("", "batch = { messages_max = 500, duration_ms = 10000 }").await;
    let host = fixture.host(&consumer);
    let ids: Vec<_> = (0..400).map(|n| format!("m{n}")).collect();
    let log: Vec<_> = (0..).zip(&ids).map(|(offset, id)| record(offset, id, "")).collect();
    deliver(&host, &log[..100]).await;
    let calls = fixture.script.calls();
    deliver(&host, &log).await;
    // S0-035, S0-036, S3-011.
    assert_eq!(
        fixture.script.calls() - calls,
        1,
        "300 new messages behind 100 known ones are one call"
    );
    // One that says itself that it failed costs one more call, for the others.
    let rejected: Vec<_> =
        (0..64).map(|n| record(n, &format!("r{n}"), if n == 20 { "reject" } else { "" })).collect();
    let calls = fixture.script.calls();
    deliver(&host, &rejected).await;
    assert_eq!(fixture.script.calls() - calls, 2);
    // One that fails in a statement is found by halving.
    let broken: Vec<_> = (0..64)
        .map(|n| record(n, &format!("s{n}"), if n == 20 { "sql SELECT 1/0" } else { "" }))
        .collect();
    let calls = fixture.script.calls();
    deliver(&host, &broken).await;
    assert_eq!(
        fixture.script.calls() - calls,
        13,
        "a call for all, then two for each of six halvings"
    );
    assert_eq!(fixture.row(&consumer, "r20").await.status, "failed_terminal");
    assert_eq!(
        fixture.row(&consumer, "s20").await.state(),
        ("failed_retryable", Some("sql_error:22012"), 1)
    );
    assert_eq!(
        fixture.number("SELECT count(*) FROM oncebox.inbox WHERE status = 'completed'").await,
        400 + 63 + 63
    );
    fixture.finish().await;
}
