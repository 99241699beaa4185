//! Order by key and by partition: what failed holds back what comes behind it of its key, and
//! nothing else, whoever runs it and whenever.

mod sequence;

use std::{sync::Arc, time::Duration};

use oncebox_control::Action;
use oncebox_inbox::{ConsumerInbox, SessionSettings, retry::poller::release_unblocked};
use oncebox_model::{policy::Policy, record::Record};
use oncebox_tests::{
    inbox::{Guest, InboxFixture, TestConsumer, both, deliver, drive, open, record, step, take},
    job::{carry_out, inbox_job, of_reason, these},
    wait::DEADLINE,
};
use tokio::time::timeout;

const TRAIL: &str =
    "CREATE TABLE trail (place bigint GENERATED ALWAYS AS IDENTITY, message_id text NOT NULL);";
const BY_KEY: &str = "order = 'key'\nretry = { backoff_min_ms = 1, backoff_max_ms = 1 }";

/// A message of a key, which leaves its id in the trail, and then does what the script says.
fn keyed(offset: i64, id: &str, key: &str, script: &str) -> Record {
    let script = format!("sql INSERT INTO trail (message_id) VALUES ('{id}')\n{script}");
    Record {
        key: (!key.is_empty()).then(|| key.as_bytes().to_vec()),
        ..record(offset, id, &script)
    }
}

/// What took effect, in order.
async fn trail(fixture: &InboxFixture, consumer: &TestConsumer) -> Vec<String> {
    let sql =
        format!("SELECT message_id FROM {}.trail ORDER BY place", consumer.tenant.schema_name);
    sqlx::query_scalar(sqlx::AssertSqlSafe(sql)).fetch_all(&fixture.pool).await.unwrap()
}

async fn states(fixture: &InboxFixture) -> Vec<(String, String, i32)> {
    fixture.rows().await.into_iter().map(|row| (row.message_id, row.status, row.attempts)).collect()
}

#[track_caller]
fn check(found: &[(String, String, i32)], expected: &[(&str, &str, i32)]) {
    let found: Vec<_> = found
        .iter()
        .map(|(id, status, attempts)| (id.as_str(), status.as_str(), *attempts))
        .collect();
    assert_eq!(found, expected);
}

/// A person is done with a message.
async fn discard(fixture: &InboxFixture, consumer: &TestConsumer, id: &str) {
    let discard = inbox_job(Action::Discard, &consumer.row.name, these(&[id]));
    let done = carry_out(&fixture.control, &consumer.tenant.name, &discard).await.unwrap();
    assert_eq!(done.changed, 1);
}

async fn sweep(fixture: &InboxFixture, consumer: &TestConsumer) -> i64 {
    release_unblocked(
        &fixture.pool,
        &[(consumer.row.consumer_id, consumer.policy.retention.class())],
    )
    .await
    .unwrap()
}

/// What could go wrong: a message passes one of its key that failed, in the same transaction or a
/// later one, or waits for one of another key; what waits is not run afterwards, without its
/// payload, or out of order. S0-034, S1-062.
#[tokio::test(flavor = "multi_thread")]
async fn a_message_that_failed_holds_back_its_key_and_nothing_else() {
    both(async |fixture| {
        let consumer = fixture.simple(TRAIL, BY_KEY).await;
        let host = fixture.host(&consumer);
        let first = [
            keyed(0, "k0", "k", ""),
            keyed(1, "k1", "k", "before 2 retry 60000"),
            keyed(2, "k2", "k", "result 2"),
            keyed(3, "x1", "x", ""),
            keyed(4, "none", "", ""),
        ];
        deliver(&host, &first).await;
        let then =
            [keyed(5, "k3", "k", ""), keyed(6, "x2", "x", ""), keyed(2, "k2", "k", "result 2")];
        deliver(&fixture.host(&consumer), &then).await;
        let expected = [
            ("k0", "completed", 1),
            ("k1", "failed_retryable", 1),
            ("k2", "waiting", 0),
            ("x1", "completed", 1),
            ("none", "completed", 1),
            ("k3", "waiting", 0),
            ("x2", "completed", 1),
        ];
        check(&states(&fixture).await, &expected);
        assert_eq!(sweep(&fixture, &consumer).await, 0, "they wait for something");
        fixture
            .execute("UPDATE oncebox.inbox SET next_attempt_at = now() WHERE message_id = 'k1'")
            .await;
        fixture.retry_until_settled(&fixture.host(&consumer)).await;
        // S0-034, S1-062.
        assert_eq!(trail(&fixture, &consumer).await, ["k0", "x1", "none", "x2", "k1", "k2", "k3"]);
        assert_eq!(fixture.row(&consumer, "k2").await.result, Some(serde_json::json!(2)));
        // From here on the key is live again.
        deliver(&host, &[keyed(7, "k4", "k", "")]).await;
        check(&states(&fixture).await[7..], &[("k4", "completed", 1)]);
        fixture.finish().await;
    })
    .await;
}

/// What could go wrong: a dead letter, a parked message or one that nobody takes lets its key pass,
/// or holds it for good; one that has no place in the order holds it too.
#[tokio::test(flavor = "multi_thread")]
async fn a_dead_letter_holds_its_key_until_a_person_is_done_with_it() {
    let fixture = InboxFixture::new().await;
    let consumer = fixture.simple(TRAIL, BY_KEY).await;
    let host = fixture.host(&consumer);
    let mut nobody = keyed(2, "unrouted", "u", "");
    nobody.headers.push(("type".to_owned(), b"nobody".to_vec()));
    let mut no_id = keyed(3, "", "k", "");
    no_id.headers.clear();
    let log = [
        keyed(0, "rejected", "r", "reject"),
        keyed(1, "parked", "p", "park"),
        nobody,
        no_id,
        keyed(4, "k1", "k", ""),
        keyed(5, "r2", "r", ""),
        keyed(6, "p2", "p", ""),
        keyed(7, "u2", "u", ""),
        keyed(8, "r3", "r", ""),
        keyed(4, "k1", "k", "# another payload"),
        keyed(9, "k2", "k", ""),
    ];
    deliver(&host, &log).await;
    assert_eq!(trail(&fixture, &consumer).await, ["k1", "k2"]);
    fixture.retry_until_settled(&host).await;
    assert_eq!(
        fixture.number("SELECT count(*) FROM oncebox.inbox WHERE status = 'waiting'").await,
        4
    );
    for (id, follow) in
        [("rejected", &["r2", "r3"][..]), ("unrouted", &["u2"]), ("parked", &["p2"])]
    {
        discard(&fixture, &consumer, id).await;
        assert_eq!(sweep(&fixture, &consumer).await, 0, "the next one is due already");
        fixture.retry_until_settled(&host).await;
        let trail = trail(&fixture, &consumer).await;
        assert_eq!(trail[trail.len() - follow.len()..], *follow);
    }
    fixture.finish().await;
}

/// What could go wrong: whoever runs a message has looked for what comes next before that is a row,
/// and nobody ever looks again; or a live batch waits for as long as a handler of a retry takes.
/// A7.
#[tokio::test(flavor = "multi_thread")]
async fn a_message_that_comes_while_its_key_is_being_worked_on_is_neither_lost_nor_in_the_way() {
    let fixture = InboxFixture::new().await;
    let consumer = fixture.simple(TRAIL, BY_KEY).await;
    let (host, other) = (fixture.host(&consumer), fixture.host(&consumer));
    deliver(&host, &[keyed(0, "k1", "k", "before 2 retry 1\ngate retried")]).await;
    let retry = tokio::spawn({
        let host = host.clone();
        async move { until_one(&host).await }
    });
    fixture.script.gate("retried").reached(1).await;
    // A claim of the key that is not committed when the retry ends.
    let live = tokio::spawn(async move {
        deliver(&other, &[keyed(1, "k2", "k", ""), keyed(2, "x", "x", "gate live")]).await
    });
    fixture.script.gate("live").reached(1).await;
    fixture.script.gate("retried").open();
    retry.await.unwrap();
    fixture.script.gate("live").open();
    live.await.unwrap();
    fixture.retry_until_settled(&host).await;
    check(
        &states(&fixture).await,
        &[("k1", "completed", 2), ("k2", "completed", 1), ("x", "completed", 1)],
    );
    assert_eq!(trail(&fixture, &consumer).await, ["k1", "x", "k2"]);
    fixture.finish().await;
}

/// What could go wrong: a retry that takes long holds up a batch that has a message of its key, and
/// with it all other keys of the partition.
#[tokio::test(flavor = "multi_thread")]
async fn a_slow_key_holds_up_no_batch() {
    let fixture = InboxFixture::new().await;
    let consumer =
        fixture.simple(TRAIL, &format!("{BY_KEY}\nlimits = {{ deadline_ms = 20000 }}")).await;
    let host = fixture.host(&consumer);
    deliver(&host, &[keyed(0, "k1", "k", "before 2 retry 1\ngate slow")]).await;
    let retry = tokio::spawn({
        let host = host.clone();
        async move { until_one(&host).await }
    });
    fixture.script.gate("slow").reached(1).await;
    let live = [keyed(1, "k2", "k", ""), keyed(2, "x", "x", ""), keyed(3, "k3", "k", "")];
    // A batch that waited would wait for the gate, and not for the end of a lock's patience.
    let settings = SessionSettings { lock_timeout_ms: 120_000, ..SessionSettings::default() };
    let other = fixture.host_with(&consumer, fixture.scripts(), &settings);
    timeout(DEADLINE, deliver(&other, &live)).await.expect("the batch waits for no key");
    assert!(!retry.is_finished(), "the batch waits for no key");
    assert_eq!(trail(&fixture, &consumer).await, ["x"]);
    // A worker that gets hold of one meanwhile puts it off.
    assert_eq!(step(&fixture.host(&consumer)).await.unwrap(), 1);
    assert!(
        fixture.row(&consumer, "k2").await.attempts == 0 && fixture.script.runs("k2").is_empty()
    );
    fixture.script.gate("slow").open();
    retry.await.unwrap();
    fixture.retry_until_settled(&host).await;
    assert_eq!(trail(&fixture, &consumer).await, ["k1", "x", "k2", "k3"]);
    assert!(
        fixture
            .rows()
            .await
            .iter()
            .all(|row| row.attempts == if row.message_id == "k1" { 2 } else { 1 }),
        "{:?}",
        fixture.rows().await
    );
    fixture.finish().await;
}

/// Run one message that is due, as soon as one is.
async fn until_one(host: &ConsumerInbox) {
    while step(host).await.unwrap() == 0 {
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
}

/// What could go wrong: what is stored before it runs, runs side by side.
#[tokio::test(flavor = "multi_thread")]
async fn what_is_stored_first_runs_in_order_too() {
    let fixture = InboxFixture::new().await;
    let consumer = fixture.simple(TRAIL, &format!("ack = 'after_insert'\n{BY_KEY}")).await;
    let host = fixture.host(&consumer);
    let log: Vec<_> = (0..40)
        .map(|n| {
            keyed(
                n,
                &format!("m{n}"),
                &format!("k{}", n % 4),
                ["", "before 3 trap"][usize::from(n % 7 == 3)],
            )
        })
        .collect();
    let mut partition = take(&host).await;
    drive(&mut partition, &log).await;
    assert_eq!(
        fixture.number("SELECT count(*) FROM oncebox.inbox WHERE status = 'received'").await,
        4,
        "the first of each key"
    );
    drive(&mut partition, &[keyed(40, "m40", "k0", "")]).await;
    partition.close().await;
    let stop = tokio_util::sync::CancellationToken::new();
    let work = |_| tokio::spawn(oncebox_inbox::retry::work(fixture.host(&consumer), stop.clone()));
    let workers: Vec<_> = (0..4).map(work).collect();
    fixture.until("SELECT count(*) = 41 FROM oncebox.inbox WHERE status = 'completed'").await;
    stop.cancel();
    futures::future::join_all(workers).await;
    let trail = trail(&fixture, &consumer).await;
    for key in 0..4 {
        let of_key: Vec<_> = trail
            .iter()
            .map(|id| id[1..].parse::<usize>().unwrap())
            .filter(|n| n % 4 == key)
            .collect();
        assert!(of_key.is_sorted() && of_key.len() >= 10, "{of_key:?}");
    }
    fixture.finish().await;
}

/// What could go wrong: a partition's messages pass one that failed; another partition's wait for
/// it.
#[tokio::test(flavor = "multi_thread")]
async fn a_partition_is_a_key() {
    let fixture = InboxFixture::new().await;
    let consumer = fixture.simple(TRAIL, &BY_KEY.replace("'key'", "'partition'")).await;
    let host = fixture.host(&consumer);
    deliver(
        &host,
        &[
            keyed(0, "a", "k", ""),
            keyed(1, "b", "k", "before 2 retry 60000"),
            keyed(2, "c", "l", ""),
        ],
    )
    .await;
    let mut elsewhere = oncebox_inbox::PartitionInbox::open(host.clone(), "t", 1, 0).await.unwrap();
    drive(&mut elsewhere, &[Record { partition: 1, ..keyed(0, "d", "k", "") }]).await;
    elsewhere.close().await;
    assert_eq!(trail(&fixture, &consumer).await, ["a", "d"]);
    fixture
        .execute("UPDATE oncebox.inbox SET next_attempt_at = now() WHERE message_id = 'b'")
        .await;
    fixture.retry_until_settled(&host).await;
    assert_eq!(trail(&fixture, &consumer).await, ["a", "d", "b", "c"]);
    fixture.finish().await;
}

/// What could go wrong: one key comes by two partitions to two hosts, and both run at once, or wait
/// for each other for ever.
#[tokio::test(flavor = "multi_thread")]
async fn one_key_of_two_partitions_runs_one_message_at_a_time() {
    let fixture = InboxFixture::new().await;
    let consumer =
        fixture.simple(&format!("{TRAIL} CREATE TABLE busy (key text PRIMARY KEY)"), BY_KEY).await;
    // Two at once would meet here.
    let script = "sql INSERT INTO busy VALUES ('k')\nsleep 3\nsql DELETE FROM busy";
    let sides = (0..2).map(|side| {
        let host: Arc<ConsumerInbox> = fixture.host(&consumer);
        async move {
            let mut partition =
                oncebox_inbox::PartitionInbox::open(host.clone(), "t", side, 0).await.unwrap();
            for n in 0..20 {
                let id = format!("p{side}-{n:02}");
                drive(&mut partition, &[Record { partition: side, ..keyed(n, &id, "k", script) }])
                    .await;
            }
            partition.close().await;
        }
    });
    futures::future::join_all(sides).await;
    fixture.retry_until_settled(&fixture.host(&consumer)).await;
    let trail = trail(&fixture, &consumer).await;
    for side in ["p0-", "p1-"] {
        let of_side: Vec<_> = trail.iter().filter(|id| id.starts_with(side)).collect();
        assert!(of_side.is_sorted() && of_side.len() == 20, "{of_side:?}");
    }
    assert!(
        fixture.rows().await.iter().all(|row| row.attempts == 1),
        "one of them met the other: {:?}",
        fixture.rows().await
    );
    fixture.finish().await;
}

/// What could go wrong: a claim that was not run by the end of its batch's time is forgotten, since
/// it waited, or loses its payload.
#[tokio::test(flavor = "multi_thread")]
async fn what_waits_in_a_slow_batch_is_whole() {
    let fixture = InboxFixture::new().await;
    let consumer =
        fixture.simple(TRAIL, &format!("{BY_KEY}\nbatch = {{ duration_ms = 20 }}")).await;
    let host = fixture.host(&consumer);
    deliver(&host, &[keyed(0, "k1", "k", "before 2 retry 60000")]).await;
    let log: Vec<_> = (1..12)
        .map(|n| keyed(n, &format!("m{n:02}"), if n % 2 == 0 { "k" } else { "x" }, "sleep 15"))
        .collect();
    deliver(&host, &log).await;
    assert_eq!(
        fixture
            .number(
                "SELECT count(*) FROM oncebox.inbox WHERE status = 'waiting' AND payload IS \
            NOT NULL AND headers IS NOT NULL"
            )
            .await,
        5
    );
    fixture
        .execute("UPDATE oncebox.inbox SET next_attempt_at = now() WHERE message_id = 'k1'")
        .await;
    fixture.retry_until_settled(&host).await;
    assert_eq!(
        fixture.number("SELECT count(*) FROM oncebox.inbox WHERE status = 'completed'").await,
        12
    );
    fixture.finish().await;
}

/// What could go wrong: rows that are in the wrong state for their place, after a change of the
/// policy, a redrive or by hand, run out of order, or never.
#[tokio::test(flavor = "multi_thread")]
async fn a_message_that_is_due_before_its_turn_waits_for_it() {
    let fixture = InboxFixture::new().await;
    let consumer = fixture.simple(TRAIL, BY_KEY).await;
    let host = fixture.host(&consumer);
    deliver(
        &host,
        &[
            keyed(0, "k1", "k", "before 2 retry 60000"),
            keyed(1, "k2", "k", "before 2 retry 1"),
            keyed(2, "k3", "k", ""),
        ],
    )
    .await;
    fixture
        .execute(
            "UPDATE oncebox.inbox SET status = 'failed_retryable', reason = 'trap', attempts \
            = 1, next_attempt_at = now() WHERE message_id = 'k2'",
        )
        .await;
    assert_eq!(step(&host).await.unwrap(), 1);
    assert_eq!(fixture.row(&consumer, "k2").await.state(), ("waiting", Some("trap"), 1));
    // And a dead worker's lease.
    fixture
        .execute("UPDATE oncebox.inbox SET next_attempt_at = now() WHERE message_id = 'k1'")
        .await;
    assert_eq!(Guest::connect(&fixture, &consumer).await.lease(1).await.unwrap().len(), 1);
    fixture.retry_until_settled(&host).await;
    assert_eq!(trail(&fixture, &consumer).await, ["k1", "k2", "k3"]);
    fixture.finish().await;
}

/// What could go wrong: a host dies on a partition, and what is stored to be run with care loses
/// its order.
#[tokio::test(flavor = "multi_thread")]
async fn a_suspect_partition_keeps_its_order() {
    let fixture = InboxFixture::new().await;
    let consumer = fixture.simple(TRAIL, BY_KEY).await;
    drop(open(&fixture.host(&consumer), 7).await);
    let host = fixture.host(&consumer);
    let mut suspect = open(&host, 7).await;
    let log = [
        keyed(7, "k1", "k", ""),
        keyed(8, "x1", "x", ""),
        keyed(9, "k2", "k", ""),
        keyed(10, "k3", "k", ""),
    ];
    drive(&mut suspect, &log).await;
    let expected =
        [("k1", "received", 0), ("x1", "received", 0), ("k2", "waiting", 0), ("k3", "waiting", 0)];
    check(&states(&fixture).await, &expected);
    suspect.close().await;
    fixture.retry_until_settled(&host).await;
    let trail = trail(&fixture, &consumer).await;
    assert!(
        trail.iter().filter(|id| id.starts_with('k')).is_sorted() && trail.len() == 4,
        "{trail:?}"
    );
    fixture.finish().await;
}

/// What could go wrong: order is asked for where no row could wait.
#[test]
fn order_needs_the_inbox() {
    let policy = "topics = ['t']\nack = 'after_commit'\ndedup = 'off'\norder = 'key'";
    let refused = Policy::parse(policy).unwrap_err().to_string();
    assert!(refused.contains("`order` needs `dedup = \"inbox\"`"), "{refused}");
}
