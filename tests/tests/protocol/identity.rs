//! What cannot be understood is kept where a person sees it, once, and holds nothing.

use oncebox_tests::inbox::{InboxFixture, deliver, record};

/// What could go wrong: a record without identity is dropped, gets a made-up one, blocks the
/// partition, or is parked anew with every delivery. S0-037, S1-122, A8.
#[tokio::test(flavor = "multi_thread")]
async fn undecodable_records_are_parked_once_with_their_bytes() {
    let fixture = InboxFixture::new().await;
    let consumer = fixture.simple("", "").await;
    let without_id = |offset| {
        let mut record = record(offset, "", "raw \0 bytes");
        record.headers = vec![("other".to_owned(), vec![0, 255])];
        record.topic_id = Some("T1".into());
        record
    };
    let mut log = vec![
        without_id(0),
        record(1, "good", ""),
        without_id(2),
        record(3, "bad\nid", ""),
        record(4, "", ""),
        record(5, "good", ""),
    ];
    log.push(record(6, &"x".repeat(513), ""));
    for _ in 0..2 {
        let errors = deliver(&fixture.host(&consumer), &log).await;
        assert!(errors.is_empty(), "{errors:?}");
    }
    for (id, reason) in [
        ("undecodable:t:T1:0:0", "undecodable: no message id"),
        ("undecodable:t:T1:0:2", "undecodable: no message id"),
        ("undecodable:t:0:3", "undecodable: the message id has a control character"),
        ("undecodable:t:0:4", "undecodable: the message id is empty"),
        ("undecodable:t:0:6", "undecodable: the message id is longer than 512 bytes"),
    ] {
        // S1-122.
        assert_eq!(fixture.row(&consumer, id).await.state(), ("parked", Some(reason), 0));
    }
    let detail = fixture
        .control
        .messages()
        .inbox_show("acme", "orders", "undecodable:t:T1:0:0")
        .await
        .unwrap();
    assert_eq!(detail.payload.as_deref(), Some(&b"raw \0 bytes"[..]));
    assert_eq!(detail.headers, [("other".to_owned(), vec![0, 255])]);
    assert_eq!(fixture.number("SELECT count(*) FROM oncebox.inbox").await, 6);
    fixture.finish().await;
}

/// What could go wrong: a topic that was deleted and made again, or another partition, is taken for
/// what was there before, and its messages are lost as duplicates. A8 (a), S0-016, S3-008.
#[tokio::test(flavor = "multi_thread")]
async fn positions_of_another_topic_or_partition_are_other_messages() {
    let fixture = InboxFixture::new().await;
    let consumer = fixture.simple("", "identity = { id = ['position'] }").await;
    for (topic_id, partition) in [("T1", 0), ("T2", 0), ("T2", 1)] {
        let mut record = record(0, "", "");
        record.topic_id = Some(topic_id.into());
        record.partition = partition;
        for _ in 0..2 {
            deliver(&fixture.host(&consumer), std::slice::from_ref(&record)).await;
        }
    }
    // S0-016, S2-018, S3-008.
    assert_eq!(
        fixture.number("SELECT count(*) FROM oncebox.inbox WHERE status = 'completed'").await,
        3
    );
    fixture.finish().await;
}

/// What could go wrong: a tombstone or an empty payload has no place, or the two are taken for one.
/// A8 (d).
#[tokio::test(flavor = "multi_thread")]
async fn tombstones_are_messages() {
    let fixture = InboxFixture::new().await;
    let consumer = fixture.simple("", "payload = 'all'").await;
    let mut tombstone = record(0, "gone", "");
    tombstone.payload = None;
    let log = [tombstone, record(1, "empty", ""), record(2, "gone", "")];
    deliver(&fixture.host(&consumer), &log).await;
    let row = fixture.row(&consumer, "gone").await;
    assert_eq!((row.status.as_str(), row.payload, row.payload_hash), ("completed", None, None));
    assert_eq!(fixture.row(&consumer, "empty").await.payload.as_deref(), Some(&b""[..]));
    assert_eq!(
        fixture.number("SELECT count(*) FROM oncebox.inbox WHERE reason = 'collision'").await,
        1
    );
    fixture.finish().await;
}
