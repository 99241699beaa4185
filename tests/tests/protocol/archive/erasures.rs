//! Erasures of messages whose ids came again, and of what stands beside messages in files.

use oncebox_tests::{
    inbox::InboxFixture,
    s3::{S3Fault, S3Server},
};

use super::{archived, archiving, completed, erase, of_id, retain, retain_one};

/// What could go wrong: a message that was forgotten and came again loses its history and its edits
/// to the archive of the first one, once both are erased.
#[tokio::test(flavor = "multi_thread")]
async fn a_message_that_came_again_keeps_its_history() {
    let fixture = InboxFixture::new().await;
    let server = S3Server::start().await;
    let control = archiving(&fixture, &server.options());
    let consumer = fixture.simple("", "").await;
    let id = consumer.row.consumer_id;
    completed(&fixture, &consumer, "'m' || n", 0..3, "'x'").await;
    fixture
        .execute(format!(
            "INSERT INTO oncebox.inbox_history (consumer_id, message_id, event, error, at) VALUES \
                ({id}, 'm1', 'failed', 'first', now() - interval '12 days')"
        ))
        .await;
    server.break_put(1, S3Fault::Refuse);
    assert_eq!(retain(&control).await.unwrap().failed.len(), 1);
    // What is refused leaves no file for which the erasure would wait.
    fixture.execute("DELETE FROM oncebox.archive_attempt").await;
    fixture
        .execute(format!(
            "INSERT INTO oncebox.inbox (consumer_id, message_id, retention_class, bucket, topic, \
                partition, \"offset\", record_timestamp_ms, status, reason, last_error, \
                processed_at, payload, headers, payload_hash) VALUES ({id}, 'm1', 1, \
                oncebox.bucket_at(1::smallint, now()), 't', 0, 9, 1, 'failed_terminal', 'reject', \
                'again', now(), 'x', '', 'x'); \
             INSERT INTO oncebox.inbox_history (consumer_id, message_id, event, error, at) VALUES \
                ({id}, 'm1', 'failed', 'again', now() - interval '1 minute'); \
             INSERT INTO oncebox.inbox_edit (consumer_id, message_id, edit_number, payload, at) \
                VALUES ({id}, 'm1', 1, 'again', now() - interval '1 minute')"
        ))
        .await;
    let proof = erase(&control, of_id("m1")).await;
    let erased: i64 = proof.erased.iter().map(|count| count.messages).sum();
    assert_eq!((erased, proof.readable), (1, 0), "one id, whose two messages are erased");
    retain_one(&control).await;
    let found = control.archive().find("acme", None, "m1").await.unwrap();
    let events: Vec<_> = found[0].history.iter().map(|event| event.event.as_str()).collect();
    assert_eq!((events, found[0].edits.len()), (vec!["failed", "erased"], 0));
    let kept: Vec<String> =
        sqlx::query_scalar("SELECT event FROM oncebox.inbox_history ORDER BY history_id")
            .fetch_all(&fixture.pool)
            .await
            .unwrap();
    assert_eq!(kept, ["failed", "discarded", "erased"], "those of the message that came again");
    assert_eq!(fixture.number("SELECT count(*) FROM oncebox.inbox_edit").await, 1);
    fixture.finish().await;
}

/// What could go wrong: the text of a failure that is in the file of an erased message stays there
/// for ever, since each erasure skips the message.
#[tokio::test(flavor = "multi_thread")]
async fn an_erasure_looks_beside_erased_messages() {
    let fixture = InboxFixture::new().await;
    let server = S3Server::start().await;
    let control = archiving(&fixture, &server.options());
    let consumer = fixture.simple("", "").await;
    completed(&fixture, &consumer, "'m' || n", 0..3, "'x'").await;
    erase(&control, of_id("m1")).await;
    fixture
        .execute(format!(
            "INSERT INTO oncebox.inbox_history (consumer_id, message_id, event, error, at) VALUES \
                ({}, 'm1', 'failed', 'mark-1-end', now() - interval '12 days')",
            consumer.row.consumer_id
        ))
        .await;
    retain_one(&control).await;
    assert!(archived(&fixture, &server).await.contains("mark-1-end"));
    let proof = erase(&control, of_id("m1")).await;
    assert_eq!((proof.archive_files, proof.archived, proof.errors), (1, 1, 1), "{proof:?}");
    assert!(!archived(&fixture, &server).await.contains("mark-1-end"));
    let proof = erase(&control, of_id("m1")).await;
    assert_eq!(proof.archive_files, 0, "nothing of it is readable: {proof:?}");
    fixture.finish().await;
}
