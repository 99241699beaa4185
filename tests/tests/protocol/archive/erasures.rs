//! Erasures of messages whose ids came again, of what stands beside messages in files, and of files
//! that a changed row names.

use oncebox_control::{ArchiveStore, ErasureRequest, ErasureTarget, ForgottenFiles, Severity};
use oncebox_tests::{
    inbox::InboxFixture,
    s3::{S3Fault, S3Server},
};

use super::{
    archive_findings, archived, archiving, completed, completed_in, erase, execute, files, of_id,
    retain, retain_one,
};
use sqlx::PgPool;

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

/// What could go wrong: the proof says that a file is gone, and the bucket, which keeps versions,
/// has put a delete marker over it.
#[tokio::test(flavor = "multi_thread")]
async fn a_version_that_the_bucket_keeps_is_named() {
    let fixture = InboxFixture::new().await;
    let server = S3Server::start().await;
    let control = archiving(&fixture, &server.options());
    let consumer = fixture.simple("", "").await;
    completed(&fixture, &consumer, "'m' || n", 0..3, "'x'").await;
    retain_one(&control).await;
    let old = files(&fixture).await.remove(0).path;
    server.keep_versions(true);
    let proof = erase(&control, of_id("m1")).await;
    assert_eq!((proof.archive_files, proof.archived), (1, 1), "{proof:?}");
    assert!(server.versions()[0].ends_with(&old), "{:?}", server.versions());
    let named = format!("the file `{old}` of the archive, which the storage does not delete");
    assert!(proof.not_covered.contains(&named), "{proof:?}");
    // S0-029: the new file is in its place, and is found.
    assert_eq!(archived(&fixture, &server).await.lines().count(), 3);
    let found = control.archive().find("acme", None, "m1").await.unwrap();
    assert!(found[0].detail.row.erased_at.is_some());
    let proof = erase(&control, of_id("m2")).await;
    assert!(proof.not_covered.contains(&named), "also later: {proof:?}");
    fixture.finish().await;
}

/// What could go wrong: each of many erasures reads a file into memory at the same time.
#[tokio::test(flavor = "multi_thread")]
async fn an_erasure_waits_for_the_memory_of_a_file() {
    let fixture = InboxFixture::new().await;
    let server = S3Server::start().await;
    let store = ArchiveStore::new(&server.options()).unwrap();
    let control = fixture.control.clone().archiving_at(store.clone());
    let consumer = fixture.simple("", "").await;
    completed(&fixture, &consumer, "'m' || n", 0..3, "'x'").await;
    fixture.execute("UPDATE oncebox.inbox SET key = 'k'").await;
    retain_one(&control).await;
    // Other erasures hold all of it.
    let (held, before) = (store.memory_for_rewrite(u64::MAX).await, server.served());
    let releasing = async {
        fixture
            .until(
                "SELECT EXISTS (SELECT FROM pg_locks l JOIN pg_stat_activity a USING (pid) WHERE \
                    l.locktype = 'advisory' AND l.granted AND \
                    a.application_name = 'oncebox erase')",
            )
            .await;
        for _ in 0..50 {
            fixture.number("SELECT 1::bigint").await;
        }
        assert_eq!(server.served(), before, "a file is read");
        drop(held);
    };
    let key = ErasureTarget::Key(b"k".to_vec());
    let (proof, ()) = tokio::join!(erase(&control, key), releasing);
    assert_eq!((proof.archive_files, proof.archived), (1, 3), "{proof:?}");
    fixture.finish().await;
}

/// What could go wrong: a tenant that changes its own database has a host read, replace or forget a
/// file of another tenant, has it name the mark as a file to delete, or forges lines of a log.
#[tokio::test(flavor = "multi_thread")]
async fn rows_of_a_tenants_own_database_name_no_other_file() {
    let fixture = InboxFixture::new().await;
    let server = S3Server::start().await;
    let control = archiving(&fixture, &server.options());
    let theirs = fixture.simple("", "").await;
    completed(&fixture, &theirs, "'m' || n", 0..3, "'x'").await;
    retain_one(&control).await;
    let of_acme: String = sqlx::query_scalar("SELECT path FROM oncebox.archive_file")
        .fetch_one(&fixture.pool)
        .await
        .unwrap();
    let database = InboxFixture::another_database().await;
    let tenant = fixture.tenant_at("apart", &database, "").await;
    let consumer = fixture.consumer(&tenant, "orders", "").await;
    control.tenant_databases().replicate(&tenant).await.unwrap();
    let there = PgPool::connect(database.url()).await.unwrap();
    completed_in(&there, consumer.row.consumer_id, "'m' || n", 0..3, "'x'").await;
    let apart = control.tenant_databases().all().await.unwrap().remove(1);
    let run = control.retention().run(&apart).await.unwrap();
    assert_eq!((run.removed.len(), run.failed.len()), (1, 0), "{run:?}");
    let own: String = sqlx::query_scalar("SELECT path FROM oncebox.archive_file")
        .fetch_one(&there)
        .await
        .unwrap();

    let request = ErasureRequest { target: of_id("m1"), consumer: None, reason: "r".to_owned() };
    let installation = own.split('/').next().unwrap();
    let (mark, lines) = (format!("{installation}/oncebox-archive"), format!("{own}\n{of_acme}"));
    for path in [&mark, &of_acme, &lines] {
        let puts = server.all_puts();
        let name = "footer_bytes = 0, footer_digest = sha256('')";
        execute(&there, format!("UPDATE oncebox.archive_file SET path = '{path}', {name}")).await;
        let found = control.archive().find("apart", None, "m1").await.unwrap_err().to_string();
        let erased = loop {
            match control.erasures().erase("apart", &request).await {
                Ok(progress) => assert!(progress.proof.is_none(), "{progress:?}"),
                Err(error) => break error.to_string(),
            }
        };
        let looked = archive_findings(&control).await.remove(0);
        assert_eq!(looked.0, Severity::Error);
        for error in [found, erased, looked.1] {
            assert!(error.contains("names no file of the tenant"), "{error}");
            assert!(!error.contains('\n'), "{error}");
        }
        let which = ForgottenFiles { tenant: Some("apart".to_owned()), ..Default::default() };
        assert_eq!(control.archive().forget(&which).await.unwrap(), [""; 0]);
        assert_eq!(server.all_puts(), puts, "nothing was written");
        assert!(server.object(&of_acme).is_some() && server.object(&mark).is_some());
    }
    there.close().await;
    fixture.finish().await;
}
