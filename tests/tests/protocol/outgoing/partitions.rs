//! Time partitions of outgoing messages: they are there before they are needed, and leave with what
//! is settled. What is still to be sent stays, whatever its age.

use std::{collections::BTreeMap, time::Duration};

use oncebox_control::{OutgoingAction, RetentionResult, schema};
use oncebox_tests::{
    inbox::{InboxFixture, TestConsumer, deliver, open},
    job::{carry_out, outgoing_job, these},
    outgoing::{
        CancelTransaction, LeasedOutgoing, OutgoingRow, StepRelay, age_outgoing, caused_by,
        check_emitted, emitting, emitting_host, outgoing, partition_name,
    },
};
use tokio::time::sleep;

const TO: &str = "kafka:orders.out";
/// Days for which settled messages are kept in these tests.
const DAYS: u32 = 7;

async fn is_there(fixture: &InboxFixture, days: i64) -> bool {
    let name = partition_name(days);
    let found = format!("SELECT count(*) FROM pg_class WHERE relname = {name}");
    fixture.number(found).await == 1
}

async fn remove(fixture: &InboxFixture) -> RetentionResult {
    fixture.control.retention().remove_outgoing(DAYS).await
}

/// What a row says but for its partition.
fn content(row: &OutgoingRow) -> OutgoingRow {
    OutgoingRow { partition: String::new(), ..row.clone() }
}

fn contents(rows: &[OutgoingRow], causes: &[&str]) -> BTreeMap<String, OutgoingRow> {
    let kept = rows.iter().filter(|row| causes.contains(&row.message_id.as_str()));
    kept.map(|row| (row.message_id.clone(), content(row))).collect()
}

/// What could go wrong: at midnight there is no partition, so that nothing that emits completes.
#[tokio::test(flavor = "multi_thread")]
async fn partitions_are_made_before_they_are_needed() {
    let fixture = InboxFixture::new().await;
    for ahead in 0..=2 {
        assert!(is_there(&fixture, -ahead).await, "{ahead} days ahead");
    }
    let consumer = fixture.simple("", "").await;
    let host = emitting_host(&fixture, &consumer);
    let line = format!("emit {TO}");
    let log = [emitting(0, "a", &[&line])];
    // A host that slept for days: the day's partition is not there, and nothing is lost for it.
    fixture
        .execute(
            "DO $$ DECLARE v text; BEGIN FOR v IN SELECT inhrelid::regclass::text FROM pg_inherits \
                WHERE inhparent = 'oncebox.outgoing'::regclass LOOP EXECUTE 'DROP TABLE ' || v; \
                END LOOP; END $$",
        )
        .await;
    let mut partition = open(&host, 7).await;
    let error = partition.process(&log).await.expect_err("nowhere to put what it emits");
    assert!(error.to_string().contains("`oncebox migrate`"), "{error}");
    partition.close().await;
    assert!(schema::ensure_partitions_for(&fixture.pool, &[]).await.unwrap() >= 3);
    deliver(&host, &log).await;
    fixture.retry_until_settled(&host).await;
    check_emitted(&fixture, &consumer, &log).await;
    assert_eq!(outgoing(&fixture).await.len(), 1);
    fixture.finish().await;
}

/// One message in each status, by its cause's id, which is the name of the status.
async fn every_status(fixture: &InboxFixture, consumer: &TestConsumer) -> StepRelay {
    let relay = StepRelay::new(fixture, "relay", &[consumer]);
    let host = emitting_host(fixture, consumer);
    let line = format!("emit {TO} token=t");
    for status in ["completed", "failed_retryable", "parked", "discarded"] {
        deliver(&host, &[emitting(0, status, &[&line])]).await;
        let leased = relay.lease(TO, 10).await;
        let marked = if status == "discarded" { "parked" } else { status };
        assert_eq!(relay.mark(&leased, marked).await, 1, "`{status}`");
        // It is due at once, and others are leased next.
        fixture
            .execute(
                "UPDATE oncebox.outgoing SET next_attempt_at = now() + interval '1 hour' WHERE \
                    status = 'failed_retryable'",
            )
            .await;
    }
    let id = caused_by(fixture, "discarded").await.id;
    let discard = outgoing_job(OutgoingAction::Discard, these(&[&id]));
    assert_eq!(carry_out(&fixture.control, "acme", &discard).await.unwrap().changed, 1);
    let own = format!("emit {TO} token=own after=3600000");
    deliver(&host, &[emitting(1, "cancelled", &[&own])]).await;
    let mut cancelling = CancelTransaction::begin(fixture, consumer).await;
    assert!(cancelling.cancel("own").await.unwrap());
    cancelling.commit().await;
    deliver(&host, &[emitting(2, "received", &[&format!("emit {TO} key=k after=3600000")])]).await;
    for row in outgoing(fixture).await {
        assert_eq!(row.status, row.message_id, "{row:?}");
    }
    relay
}

/// What could go wrong: rows pile up for ever; a message that is still to be sent, or that waits
/// for an operator, goes with the others, or comes back as another; one that a relay is sending is
/// pulled from under it; what is too young goes.
#[tokio::test(flavor = "multi_thread")]
async fn what_is_settled_leaves_with_its_day_and_what_is_not_stays() {
    const STAY: [&str; 3] = ["failed_retryable", "parked", "received"];
    let fixture = InboxFixture::new().await;
    let consumer = fixture.simple("", "").await;
    let relay = every_status(&fixture, &consumer).await;
    let host = emitting_host(&fixture, &consumer);
    let line = format!("emit {TO}");
    deliver(&host, &[emitting(3, "leased", &[&line])]).await;
    let leased = relay.lease(TO, 10).await;
    assert_eq!(leased.len(), 1);
    age_outgoing(&fixture, "true", 9).await;
    deliver(&host, &[emitting(4, "young", &[&line])]).await;
    age_outgoing(&fixture, "message_id = 'young'", 7).await;
    let before = outgoing(&fixture).await;
    let old = &before[0].partition;
    assert!(before.iter().filter(|row| row.partition == *old).count() == 7, "{before:#?}");

    // The relay says what became of its message while the removal waits for it.
    let aged = leased_now(&fixture).await;
    let removing = remove(&fixture);
    let confirming = async {
        sleep(Duration::from_millis(600)).await;
        assert!(is_there(&fixture, 9).await, "a message is pulled from under its relay");
        assert_eq!(relay.mark(&aged, "completed").await, 1);
    };
    let (result, ()) = tokio::join!(removing, confirming);
    assert_eq!((result.removed, &result.failed[..]), (1, &[][..]));
    assert!(!is_there(&fixture, 9).await && is_there(&fixture, 7).await);
    let after = outgoing(&fixture).await;
    assert_eq!(contents(&after, &STAY), contents(&before, &STAY), "a message is lost or changed");
    let left: Vec<_> = after.iter().map(|row| row.message_id.as_str()).collect();
    assert_eq!(left, ["failed_retryable", "parked", "received", "young"]);
    assert!(
        after[..3].iter().all(|row| row.partition != *old && row.partition != after[3].partition)
    );

    let again = remove(&fixture).await;
    assert_eq!((again.removed, &again.failed[..]), (0, &[][..]), "there is nothing left to do");
    // What stayed is sent when it is due.
    fixture
        .execute(
            "UPDATE oncebox.outgoing SET next_attempt_at = now() WHERE status IN ('received', \
                'failed_retryable')",
        )
        .await;
    let leased = relay.lease(TO, 10).await;
    assert_eq!(leased.len(), 3, "the two that stayed, and the young one");
    assert_eq!(relay.mark(&leased, "completed").await, 3);
    fixture.finish().await;
}

/// The leased messages as they are now that their rows were put back by days.
async fn leased_now(fixture: &InboxFixture) -> Vec<LeasedOutgoing> {
    let leased = sqlx::query_as(
        "SELECT consumer_id, message_id, ordinal, bucket, id, key, epoch FROM oncebox.outgoing \
            WHERE status = 'in_progress'",
    );
    leased.fetch_all(&fixture.pool).await.unwrap()
}

/// What could go wrong: two hosts remove one partition and hinder each other; a host that dies
/// after the detach leaves a table for ever, or what is in it is lost.
#[tokio::test(flavor = "multi_thread")]
async fn a_removal_that_was_interrupted_is_ended_by_the_next() {
    let fixture = InboxFixture::new().await;
    let consumer = fixture.simple("", "").await;
    let host = emitting_host(&fixture, &consumer);
    let later = format!("emit {TO} after=3600000");
    let settle = "UPDATE oncebox.outgoing SET status = 'discarded', next_attempt_at = NULL, \
        settled_at = now() WHERE message_id = 'settled'";
    let log = [emitting(0, "settled", &[&later]), emitting(1, "open", &[&later])];
    deliver(&host, &log).await;
    fixture.execute(settle).await;
    age_outgoing(&fixture, "true", 20).await;
    let before = outgoing(&fixture).await;
    let detach = format!("ALTER TABLE oncebox.outgoing DETACH PARTITION {}", before[0].partition);

    // By hand: a host moves what must stay before it detaches.
    fixture.execute(detach.clone()).await;
    assert!(outgoing(&fixture).await.is_empty());
    let mended = remove(&fixture).await;
    assert_eq!((mended.removed, mended.failed.len()), (0, 1), "{mended:?}");
    assert!(is_there(&fixture, 20).await, "an open message was dropped");
    assert_eq!(outgoing(&fixture).await, before, "it is a partition again");

    let (one, other) = tokio::join!(remove(&fixture), remove(&fixture));
    assert_eq!(one.removed + other.removed, 1, "{one:?} {other:?}");
    assert!(one.failed.is_empty() && other.failed.is_empty(), "{one:?} {other:?}");
    let after = outgoing(&fixture).await;
    assert_eq!(contents(&after, &["open"]), contents(&before, &["open"]));
    assert_eq!(after.len(), 1);

    // A host died between the detach and the drop of a table without open messages.
    deliver(&host, &[emitting(3, "settled-2", &[&later])]).await;
    fixture.execute(settle.replace("'settled'", "'settled-2'")).await;
    age_outgoing(&fixture, "message_id = 'settled-2'", 20).await;
    fixture.execute(detach).await;
    let ended = remove(&fixture).await;
    assert_eq!((ended.removed, &ended.failed[..]), (1, &[][..]));
    assert!(!is_there(&fixture, 20).await);
    assert_eq!(contents(&outgoing(&fixture).await, &["open"]), contents(&before, &["open"]));
    fixture.finish().await;
}
