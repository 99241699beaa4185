//! The sequence guard: each version of an aggregate takes effect once and after the one before it,
//! in whatever order and however often they come.

use std::collections::BTreeMap;

use oncebox_inbox::PartitionInbox;
use rand::{Rng, SeedableRng, rngs::StdRng, seq::SliceRandom};

use super::*;

fn guarded(more: &str) -> String {
    format!("{BY_KEY}\nsequence = {{ version = {{ header = 'v' }}, {more} }}")
}

/// A message that makes a version of an aggregate.
fn version(offset: i64, id: &str, key: &str, version: i64, script: &str) -> Record {
    let mut record = keyed(offset, id, key, script);
    record.headers.push(("v".to_owned(), version.to_string().into_bytes()));
    record
}

async fn reasons(fixture: &InboxFixture) -> Vec<(String, String, String)> {
    let row = |row: oncebox_tests::inbox::Row| {
        (row.message_id, row.status, row.reason.unwrap_or_default())
    };
    fixture.rows().await.into_iter().map(row).collect()
}

#[track_caller]
fn check_reasons(found: &[(String, String, String)], expected: &[(&str, &str, &str)]) {
    let found: Vec<_> = found
        .iter()
        .map(|(id, status, reason)| (id.as_str(), status.as_str(), reason.as_str()))
        .collect();
    assert_eq!(found, expected);
}

/// What was waited for is waited for no longer.
async fn overdue(fixture: &InboxFixture) {
    fixture
        .execute(
            "UPDATE oncebox.inbox SET waits_until = now() WHERE reason = 'gap' AND status = \
        'waiting'",
        )
        .await;
}

async fn redrive(fixture: &InboxFixture, consumer: &TestConsumer, id: &str) {
    let redrive = inbox_job(Action::Redrive, &consumer.row.name, these(&[id]));
    let done = carry_out(&fixture.control, &consumer.tenant.name, &redrive).await.unwrap();
    assert_eq!(done.changed, 1);
}

/// What could go wrong: an old version has its effect after a newer one; one that leaves a gap
/// runs, or does not run when the gap closes; versions of other aggregates wait for it. S1-020,
/// S1-044, S1-061, S1-107, S1-108, S0-034.
#[tokio::test(flavor = "multi_thread")]
async fn old_versions_are_skipped_and_gaps_are_waited_for() {
    both(async |fixture| {
        let consumer = fixture.simple(TRAIL, &guarded("")).await;
        let host = fixture.host(&consumer);
        deliver(
            &host,
            &[
                version(0, "k3", "k", 3, ""),
                version(1, "k5", "k", 5, ""),
                version(2, "x1", "x", 1, ""),
            ],
        )
        .await;
        deliver(
            &host,
            &[
                version(3, "k6", "k", 6, ""),
                version(4, "k2", "k", 2, ""),
                version(5, "x2", "x", 2, ""),
            ],
        )
        .await;
        let expected = [
            ("k3", "completed", ""),
            ("k5", "waiting", "gap"),
            ("x1", "completed", ""),
            ("k6", "waiting", ""),
            ("k2", "skipped", "old_version"),
            ("x2", "completed", ""),
        ];
        // S1-014, S1-044, S1-061, S1-107, S1-108.
        check_reasons(&reasons(&fixture).await, &expected);
        assert_eq!(sweep(&fixture, &consumer).await, 0, "the gap is open");
        // One that makes version 3 again, under another id, and the missing one.
        deliver(
            &fixture.host(&consumer),
            &[version(6, "k3-again", "k", 3, ""), version(7, "k4", "k", 4, "")],
        )
        .await;
        fixture.retry_until_settled(&host).await;
        // S0-034, S1-020.
        assert_eq!(trail(&fixture, &consumer).await, ["k3", "x1", "x2", "k4", "k5", "k6"]);
        assert_eq!(fixture.row(&consumer, "k3-again").await.status, "skipped");
        // Redeliveries are duplicates as ever.
        deliver(&host, &[version(1, "k5", "k", 5, ""), version(8, "k7", "k", 7, "")]).await;
        assert_eq!(trail(&fixture, &consumer).await.len(), 7);
        fixture.finish().await;
    })
    .await;
}

/// What could go wrong: within one transaction a version counts that then fails, or one that
/// completes does not; a second message of a version is skipped though the first one failed.
#[tokio::test(flavor = "multi_thread")]
async fn versions_of_one_batch_count_when_they_complete() {
    both(async |fixture| {
        let consumer = fixture.simple(TRAIL, &guarded("first = 1")).await;
        let host = fixture.host(&consumer);
        let batch = [
            version(0, "k3", "k", 3, ""),
            version(1, "k1", "k", 1, ""),
            version(2, "k2", "k", 2, "before 2 retry 60000"),
            version(3, "k2-again", "k", 2, ""),
            version(4, "k4", "k", 4, ""),
            version(5, "x2", "x", 2, ""),
            version(6, "x1", "x", 1, ""),
            version(7, "x1-again", "x", 1, ""),
        ];
        deliver(&host, &batch).await;
        let states = reasons(&fixture).await;
        let of = |id: &str| {
            states
                .iter()
                .find(|(found, ..)| found == id)
                .map(|(_, status, _)| status.clone())
                .unwrap()
        };
        assert_eq!([of("k1"), of("x1")], ["completed", "completed"]);
        assert_eq!(
            (of("k2"), of("x1-again")),
            ("failed_retryable".to_owned(), "skipped".to_owned())
        );
        assert_ne!(of("k2-again"), "skipped", "version 2 is not made yet");
        assert_eq!(of("x2"), "received", "the gap closed in the same transaction");
        fixture
            .execute("UPDATE oncebox.inbox SET next_attempt_at = now() WHERE message_id = 'k2'")
            .await;
        while sweep(&fixture, &consumer).await
            + i64::from(step(&fixture.host(&consumer)).await.unwrap() > 0)
            > 0
        {}
        let trail = trail(&fixture, &consumer).await;
        let of_k: Vec<_> =
            trail.iter().filter(|id| id.starts_with('k')).map(|id| &id[..2]).collect();
        assert_eq!(of_k, ["k1", "k2", "k3", "k4"], "{trail:?}");
        assert_eq!(trail.iter().filter(|id| id.starts_with('x')).collect::<Vec<_>>(), ["x1", "x2"]);
        fixture.finish().await;
    })
    .await;
}

/// What could go wrong: a gap that never closes is waited for in silence for ever; what was parked
/// for it stays there when it closes after all, or what was missing takes effect after what came
/// behind it. S1-045, S1-062.
#[tokio::test(flavor = "multi_thread")]
async fn a_gap_that_stays_open_is_parked_and_cured() {
    let fixture = InboxFixture::new().await;
    let consumer = fixture.simple(TRAIL, &guarded("first = 1, gap_wait_ms = 60000")).await;
    let host = fixture.host(&consumer);
    deliver(
        &host,
        &[version(0, "k2", "k", 2, ""), version(1, "k3", "k", 3, ""), version(2, "x2", "x", 2, "")],
    )
    .await;
    fixture.retry_until_settled(&host).await;
    let wait = "SELECT count(*) FROM oncebox.inbox WHERE waits_until BETWEEN now() + interval '50 \
        s' AND now() + interval '60 s'";
    assert_eq!(fixture.number(wait).await, 3);
    overdue(&fixture).await;
    assert_eq!(sweep(&fixture, &consumer).await, 2, "the first of each key");
    fixture.retry_until_settled(&host).await;
    // S1-045, S1-062.
    check_reasons(
        &reasons(&fixture).await,
        &[("k2", "parked", "gap"), ("k3", "waiting", "gap"), ("x2", "parked", "gap")],
    );
    let row = fixture.row(&consumer, "k2").await;
    assert_eq!(
        row.last_error.as_deref(),
        Some("it makes version 2, and its aggregate is at version 0")
    );
    assert_eq!(row.attempts, 0);

    // One comes after all, and one is given up.
    deliver(&host, &[version(3, "k1", "k", 1, "")]).await;
    redrive(&fixture, &consumer, "x2").await;
    fixture.retry_until_settled(&host).await;
    deliver(&host, &[version(4, "x1", "x", 1, ""), version(5, "x3", "x", 3, "")]).await;
    let trail = trail(&fixture, &consumer).await;
    assert_eq!(
        trail.iter().filter(|id| id.starts_with('k')).collect::<Vec<_>>(),
        ["k1", "k2", "k3"]
    );
    assert_eq!(trail.iter().filter(|id| id.starts_with('x')).collect::<Vec<_>>(), ["x2", "x3"]);
    assert_eq!(fixture.row(&consumer, "x1").await.reason.as_deref(), Some("old_version"));
    fixture.finish().await;
}

/// What could go wrong: a version that will never run holds its aggregate as a gap, although a
/// person, or the policy, is done with it.
#[tokio::test(flavor = "multi_thread")]
async fn versions_that_are_given_up_leave_no_gap() {
    let fixture = InboxFixture::new().await;
    let consumer =
        fixture.simple(TRAIL, &format!("{}\nno_route = 'skip'", guarded("first = 1"))).await;
    let host = fixture.host(&consumer);
    let mut nobody = version(2, "x1", "x", 1, "");
    nobody.headers.push(("type".to_owned(), b"nobody".to_vec()));
    let log = [
        version(0, "k1", "k", 1, "reject"),
        version(1, "k2", "k", 2, ""),
        nobody,
        version(3, "x2", "x", 2, ""),
    ];
    deliver(&host, &log).await;
    discard(&fixture, &consumer, "k1").await;
    fixture.retry_until_settled(&host).await;
    // Nobody waited for its key, so that the one behind it is found by the next look.
    sweep(&fixture, &consumer).await;
    fixture.retry_until_settled(&host).await;
    let mut trail = trail(&fixture, &consumer).await;
    trail.sort();
    assert_eq!(trail, ["k2", "x2"]);
    fixture.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_policy_can_go_on_over_a_gap() {
    let fixture = InboxFixture::new().await;
    let consumer = fixture.simple(TRAIL, &guarded("first = 1, gap = 'proceed'")).await;
    let host = fixture.host(&consumer);
    deliver(&host, &[version(0, "k3", "k", 3, ""), version(1, "k4", "k", 4, "")]).await;
    overdue(&fixture).await;
    assert_eq!(sweep(&fixture, &consumer).await, 1);
    fixture.retry_until_settled(&host).await;
    deliver(&host, &[version(2, "k1", "k", 1, ""), version(3, "k5", "k", 5, "")]).await;
    assert_eq!(trail(&fixture, &consumer).await, ["k3", "k4", "k5"]);
    fixture.finish().await;
}

/// What could go wrong: a message that ran over its gap, and failed, waits for the gap again before
/// each further run, with its runs forgotten, and is never a dead letter; or one that is redriven
/// is not run.
#[tokio::test(flavor = "multi_thread")]
async fn what_ran_over_a_gap_does_not_wait_for_it_again() {
    for gap in ["proceed", "park"] {
        let fixture = InboxFixture::new().await;
        let consumer = fixture
            .simple(
                TRAIL,
                &guarded(&format!("first = 1, gap = '{gap}'"))
                    .replace("retry = {", "retry = { attempts_max = 2,"),
            )
            .await;
        let host = fixture.host(&consumer);
        deliver(&host, &[version(0, "k3", "k", 3, "trap"), version(1, "k4", "k", 4, "")]).await;
        overdue(&fixture).await;
        assert_eq!(sweep(&fixture, &consumer).await, 1);
        fixture.retry_until_settled(&host).await;
        if gap == "park" {
            assert_eq!(fixture.row(&consumer, "k3").await.state(), ("parked", Some("gap"), 0));
            redrive(&fixture, &consumer, "k3").await;
            fixture.retry_until_settled(&host).await;
        }
        for _ in 0..2 {
            assert_eq!(
                fixture.row(&consumer, "k3").await.state(),
                ("failed_terminal", Some("trap"), 2),
                "{gap}"
            );
            redrive(&fixture, &consumer, "k3").await;
            fixture.retry_until_settled(&host).await;
        }
        discard(&fixture, &consumer, "k3").await;
        fixture.finish().await;
    }
}

/// What could go wrong: a worker that died before it ran a message is taken for a run over the gap;
/// or one that ran before there was a gap passes what is missing.
#[tokio::test(flavor = "multi_thread")]
async fn only_what_was_let_to_runs_over_a_gap() {
    let fixture = InboxFixture::new().await;
    let consumer = fixture.simple(TRAIL, &format!("ack = 'after_insert'\n{}", guarded(""))).await;
    let host = fixture.host(&consumer);
    deliver(&host, &[version(0, "k3", "k", 3, "")]).await;
    fixture.retry_until_settled(&host).await;
    deliver(
        &host,
        &[version(1, "k5", "k", 5, ""), version(2, "x5", "x", 5, "before 2 retry 60000")],
    )
    .await;
    fixture
        .execute(
            "UPDATE oncebox.inbox SET status = 'in_progress', attempts = 1, epoch = 1, \
                next_attempt_at = NULL, \
             locked_until = now() - interval '1 s', locked_by = 'dead' WHERE message_id = 'k5'",
        )
        .await;
    while step(&host).await.unwrap() > 0 {}
    assert_eq!(fixture.row(&consumer, "k5").await.state(), ("waiting", Some("gap"), 1));
    assert_eq!(fixture.row(&consumer, "x5").await.status, "failed_retryable");
    deliver(&host, &[version(3, "x3", "x", 3, "")]).await;
    while step(&host).await.unwrap() > 0 {}
    fixture
        .execute("UPDATE oncebox.inbox SET next_attempt_at = now() WHERE message_id = 'x5'")
        .await;
    while step(&host).await.unwrap() > 0 {}
    assert_eq!(fixture.row(&consumer, "x5").await.state(), ("waiting", Some("gap"), 1));
    deliver(&host, &[version(4, "k4", "k", 4, ""), version(5, "x4", "x", 4, "")]).await;
    fixture.retry_until_settled(&host).await;
    let trail = trail(&fixture, &consumer).await;
    assert_eq!(
        trail.iter().filter(|id| id.starts_with('k')).collect::<Vec<_>>(),
        ["k3", "k4", "k5"]
    );
    assert_eq!(
        trail.iter().filter(|id| id.starts_with('x')).collect::<Vec<_>>(),
        ["x3", "x4", "x5"]
    );
    fixture.finish().await;
}

/// What could go wrong: what is kept without having run holds an aggregate that is past it; a
/// second payload under the id of a version runs beside everything; what is passed over is a gap
/// again when its rows are gone.
#[tokio::test(flavor = "multi_thread")]
async fn what_has_no_place_any_more_holds_nothing() {
    let fixture = InboxFixture::new().await;
    let consumer = fixture.simple(TRAIL, &guarded("first = 1")).await;
    let host = fixture.host(&consumer);
    let of_nobody = |offset, id: &str, number| {
        let mut record = version(offset, id, "k", number, "");
        record.headers.push(("type".to_owned(), b"nobody".to_vec()));
        record
    };
    deliver(
        &host,
        &[version(0, "k1", "k", 1, ""), of_nobody(1, "late", 1), version(2, "k2", "k", 2, "")],
    )
    .await;
    deliver(&host, &[version(0, "k1", "k", 1, "# another payload")]).await;
    let states = reasons(&fixture).await;
    assert_eq!(
        states[2..4],
        [
            ("late".into(), "skipped".into(), "old_version".into()),
            ("k2".into(), "completed".into(), "".into())
        ]
    );
    let again = inbox_job(Action::Redrive, "orders", of_reason("collision"));
    let done = carry_out(&fixture.control, "acme", &again).await.unwrap();
    let left_out = [("unordered".to_owned(), 1)].into();
    assert_eq!((done.changed, done.left_out.0), (0, left_out), "it has no place in the order");

    deliver(
        &host,
        &[
            of_nobody(3, "given up", 3),
            of_nobody(4, "too", 4),
            version(5, "k5", "k", 5, "retry 60000"),
        ],
    )
    .await;
    discard(&fixture, &consumer, "given up").await;
    discard(&fixture, &consumer, "too").await;
    assert_eq!(step(&host).await.unwrap(), 1);
    assert_eq!(fixture.row(&consumer, "k5").await.status, "failed_retryable");
    fixture.execute("DELETE FROM oncebox.inbox WHERE status = 'discarded'").await;
    fixture
        .execute("UPDATE oncebox.inbox SET next_attempt_at = now() WHERE message_id = 'k5'")
        .await;
    assert_eq!(step(&host).await.unwrap(), 1);
    assert_eq!(fixture.row(&consumer, "k5").await.state(), ("failed_retryable", Some("retry"), 2));
    discard(&fixture, &consumer, "k5").await;
    fixture.finish().await;
}

/// What could go wrong: the largest of numbers has no next one, and its aggregate stops its
/// partition.
#[tokio::test(flavor = "multi_thread")]
async fn the_largest_version_holds_nothing_up() {
    let fixture = InboxFixture::new().await;
    let consumer = fixture.simple(TRAIL, &guarded("")).await;
    let host = fixture.host(&consumer);
    let log = [
        version(0, "last", "k", i64::MAX - 1, ""),
        version(1, "behind", "k", i64::MAX, ""),
        version(2, "old", "k", 7, ""),
        version(3, "far", "x", 1, ""),
        version(4, "gap", "x", i64::MAX - 1, ""),
    ];
    deliver(&host, &log).await;
    let statuses: Vec<_> =
        reasons(&fixture).await.into_iter().map(|(_, status, _)| status).collect();
    assert_eq!(statuses, ["completed", "parked", "skipped", "completed", "waiting"]);
    fixture.finish().await;
}

/// What could go wrong: a record without a version, or of no aggregate, runs outside of every
/// sequence.
#[tokio::test(flavor = "multi_thread")]
async fn a_message_without_a_place_is_parked() {
    let fixture = InboxFixture::new().await;
    let consumer = fixture.simple(TRAIL, &guarded("")).await;
    let host = fixture.host(&consumer);
    let mut bad = keyed(2, "c", "k", "");
    bad.headers.push(("v".to_owned(), b"next".to_vec()));
    deliver(&host, &[keyed(0, "a", "k", ""), version(1, "b", "", 1, ""), bad]).await;
    let found: Vec<_> = reasons(&fixture)
        .await
        .into_iter()
        .map(|(_, status, reason)| format!("{status} {reason}"))
        .collect();
    let expected = [
        "parked undecodable: no version of its aggregate",
        "parked undecodable: no ordering key, which is to name its aggregate",
        "parked undecodable: the version of its aggregate is not a whole number from 0 to \
            9223372036854775806",
    ];
    assert_eq!(found, expected);
    fixture.finish().await;
}

/// What could go wrong: any of it, in an order that nobody thought of. Versions of six aggregates
/// come shuffled, twice, with failures among them, to two hosts at once.
#[tokio::test(flavor = "multi_thread")]
async fn shuffled_versions_take_effect_in_their_sequence() {
    for ack in ["after_commit", "after_insert"] {
        let seed = rand::random();
        println!("{ack}: seed {seed}");
        let mut rng = StdRng::seed_from_u64(seed);
        let fixture = InboxFixture::new().await;
        let consumer =
            fixture.simple(TRAIL, &format!("{}\nack = '{ack}'", guarded("first = 1"))).await;
        let mut versions: Vec<_> =
            (1..=20_i64).flat_map(|version| (0..6).map(move |key| (version, key))).collect();
        versions.extend(versions.clone());
        versions.shuffle(&mut rng);
        let mut records: Vec<_> = versions
            .iter()
            .enumerate()
            .map(|(offset, (number, key))| {
                let fails = if (number + key) % 5 == 0 { "before 2 retry 1" } else { "" };
                version(
                    offset as i64,
                    &format!("{key}-{number:02}"),
                    &format!("key {key}"),
                    *number,
                    fails,
                )
            })
            .collect();
        let mut partitions = [Vec::new(), Vec::new()];
        for record in records.drain(..) {
            let partition = rng.random_range(0..2);
            partitions[partition].push(Record { partition: partition as i32, ..record });
        }
        let drives = partitions.iter().enumerate().map(|(place, records)| {
            let host = fixture.host(&consumer);
            async move {
                let mut partition = PartitionInbox::open(host, "t", place as i32, 0).await.unwrap();
                drive(&mut partition, records).await;
                partition.close().await;
            }
        });
        futures::future::join_all(drives).await;
        let host = fixture.host(&consumer);
        while sweep(&fixture, &consumer).await + i64::from(step(&host).await.unwrap() > 0) > 0
            || fixture
                .number(
                    "SELECT count(*) FROM oncebox.inbox WHERE status IN ('received', \
                'failed_retryable', 'waiting')",
                )
                .await
                > 0
        {}
        let mut of_keys: BTreeMap<String, Vec<String>> = BTreeMap::new();
        for id in trail(&fixture, &consumer).await {
            let (key, number) = id.split_once('-').unwrap();
            of_keys.entry(key.to_owned()).or_default().push(number.to_owned());
        }
        let expected: Vec<_> = (1..=20).map(|number| format!("{number:02}")).collect();
        assert_eq!(of_keys.len(), 6, "seed {seed}");
        for (key, of_key) in of_keys {
            // S1-021.
            assert_eq!(of_key, expected, "key {key}, seed {seed}");
        }
        fixture.finish().await;
    }
}
