//! What was seen before is known: in whatever state it is, and by whatever way it comes again.

use std::collections::BTreeSet;

use oncebox_control::Action;
use oncebox_inbox::{PartitionInbox, SessionSettings};
use oncebox_model::record::Record;
use oncebox_tests::{
    inbox::{InboxFixture, Row, TestConsumer, deliver, drive, record, step},
    job::{carry_out, inbox_job, these},
};

const STATES: [&str; 9] = [
    "completed",
    "discarded",
    "failed_retryable",
    "failed_terminal",
    "in_progress",
    "parked",
    "received",
    "skipped",
    "waiting",
];

fn keyed(offset: i64, id: &str, key: &str, script: &str) -> Record {
    Record { key: Some(key.into()), ..record(offset, id, script) }
}

/// The row as it is read at any time.
async fn row(fixture: &InboxFixture, consumer: &TestConsumer, id: &str) -> Row {
    Row { due_in_ms: None, ..fixture.row(consumer, id).await }
}

/// What could go wrong: a delivery of a message that is known is taken for an error, waits, runs,
/// or changes the row, in a state that nobody tried. Every state that the schema knows is tried.
#[tokio::test(flavor = "multi_thread")]
async fn a_delivery_of_what_is_known_is_acked_whatever_its_state() {
    const DEFINED: &str = "SELECT m[1] FROM pg_constraint, \
        regexp_matches(pg_get_constraintdef(oid), '''(\\w+)''', 'g') m \
        WHERE conname = 'inbox_status_known' AND conrelid = 'oncebox.inbox'::regclass";
    let mut tried = BTreeSet::new();
    for ack in ["after_commit", "after_insert"] {
        let fixture = InboxFixture::new().await;
        let policy = format!(
            "ack = '{ack}'\norder = 'key'\nno_route = 'skip'\nlimits = {{ deadline_ms = 600000 }}\n\
             retry = {{ lease_ms = 700000, backoff_min_ms = 600000, backoff_max_ms = 600000, \
             jitter = 'none' }}"
        );
        let consumer = fixture.simple("", &policy).await;
        // The one that is under way stays so while the others come again.
        let settings = SessionSettings {
            idle_in_transaction_timeout_ms: 600_000,
            ..SessionSettings::default()
        };
        let host = fixture.host_with(&consumer, fixture.scripts(), &settings);
        let mut unrouted = keyed(6, "unrouted", "f", "");
        unrouted.headers.push(("type".to_owned(), b"nobody".to_vec()));
        let log = [
            keyed(0, "done", "a", "result 1"),
            keyed(1, "later", "b", "retry 600000"),
            keyed(2, "behind", "b", ""),
            keyed(3, "rejected", "c", "reject"),
            keyed(4, "parked", "d", "park"),
            keyed(5, "given up", "e", "reject"),
            unrouted,
        ];
        deliver(&host, &log).await;
        if ack == "after_insert" {
            while step(&host).await.unwrap() > 0 {}
            deliver(&host, &[keyed(7, "working", "g", "gate g"), keyed(8, "stored", "h", "")])
                .await;
        }
        let discard = inbox_job(Action::Discard, "orders", these(&["given up"]));
        assert_eq!(carry_out(&fixture.control, "acme", &discard).await.unwrap().changed, 1);
        let worker = (ack == "after_insert").then(|| {
            let host = host.clone();
            tokio::spawn(async move { step(&host).await })
        });
        if worker.is_some() {
            fixture.script.gate("g").reached(1).await;
        }

        let mut again = log.to_vec();
        if worker.is_some() {
            again.extend([keyed(7, "working", "g", "gate g"), keyed(8, "stored", "h", "")]);
        }
        for record in &again {
            let id = String::from_utf8(record.header("id").unwrap().to_vec()).unwrap();
            let (before, runs) =
                (row(&fixture, &consumer, &id).await, fixture.script.runs(&id).len());
            for _ in 0..2 {
                assert!(
                    deliver(&fixture.host(&consumer), std::slice::from_ref(record))
                        .await
                        .is_empty(),
                    "{ack}: `{id}` is {}",
                    before.status
                );
            }
            // S0-019: acked, and nothing happened.
            assert_eq!(
                (row(&fixture, &consumer, &id).await, fixture.script.runs(&id).len()),
                (before.clone(), runs),
                "{ack}: `{id}`"
            );
            tried.insert(before.status);
        }
        assert_eq!(fixture.rows().await.len(), again.len());
        if let Some(worker) = worker {
            fixture.script.gate("g").open();
            assert_eq!(worker.await.unwrap().unwrap(), 1);
        } else {
            let mut defined: Vec<String> =
                sqlx::query_scalar(DEFINED).fetch_all(&fixture.pool).await.unwrap();
            defined.sort();
            assert_eq!(defined, STATES, "a state that is not tried here");
        }
        fixture.finish().await;
    }
    assert_eq!(tried.iter().map(String::as_str).collect::<Vec<_>>(), STATES);
}

/// What could go wrong: a message that comes again by another way than a redelivery is another
/// message: from a topic of retries, or filled in later from somewhere else, where all but its id
/// and its payload differ.
#[tokio::test(flavor = "multi_thread")]
async fn a_message_that_comes_by_another_way_is_the_same() {
    let fixture = InboxFixture::new().await;
    let consumer = fixture.simple("", "topics = ['t', 't.retry', 'backfill']").await;
    let first = record(0, "a", "result 1");
    deliver(&fixture.host(&consumer), std::slice::from_ref(&first)).await;
    let before = row(&fixture, &consumer, "a").await;
    for (topic, partition, offset, header) in [
        ("t.retry", 0, 0, "retry-attempt"),
        ("t.retry", 3, 77, "retry-attempt"),
        ("backfill", 1, 5, "from"),
    ] {
        let mut again = Record {
            topic: topic.into(),
            partition,
            offset,
            timestamp_ms: 1,
            key: Some(b"k".to_vec()),
            ..first.clone()
        };
        again.headers.push((header.to_owned(), b"1".to_vec()));
        let mut taken =
            PartitionInbox::open(fixture.host(&consumer), topic, partition, offset).await.unwrap();
        assert!(drive(&mut taken, &[again]).await.is_empty());
        taken.close().await;
        // S1-001 (retry topic, manual backfill).
        assert_eq!(
            (row(&fixture, &consumer, "a").await, fixture.script.runs("a").len()),
            (before.clone(), 1),
            "{topic}"
        );
    }
    assert_eq!(fixture.number("SELECT count(*) FROM oncebox.inbox").await, 1);
    fixture.finish().await;
}
