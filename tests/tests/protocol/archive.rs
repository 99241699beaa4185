//! The archive: nothing is dropped that was not read back, everything in it is found, and no
//! process drops past it.

use std::collections::BTreeSet;

use bytes::Bytes;
use chrono::{DateTime, Utc};
use oncebox_archive::{ArchivedMessage, FileReader, Footer};
use oncebox_control::{
    ArchiveFilter, ArchiveOptions, ArchiveStore, Control, ErasureProof, ErasureRequest,
    ErasureTarget, ForgottenFiles, HostLimits, RetentionRun, Severity,
};
use oncebox_model::InboxError;
use oncebox_tests::{
    aging::old_partition,
    inbox::{InboxFixture, TestConsumer},
    s3::{S3Fault, S3Server, SECRET_ACCESS_KEY},
    temp_dir::TempDir,
};
use serde_json::json;
use sha2::{Digest, Sha256};
use sqlx::{AssertSqlSafe, Executor, PgPool};

mod attempts;
mod erasures;
mod masking;

/// Access of a host with an archive.
fn archiving(fixture: &InboxFixture, options: &ArchiveOptions) -> Control {
    fixture.control.clone().archiving_at(ArchiveStore::new(options).unwrap())
}

fn folder(directory: &TempDir) -> ArchiveOptions {
    let location = format!("file://{}", directory.path().display());
    ArchiveOptions { location, ..ArchiveOptions::default() }
}

async fn retain(control: &Control) -> Result<RetentionRun, InboxError> {
    let database = control.tenant_databases().all().await?.remove(0);
    control.retention().run(&database).await
}

/// A run that removes exactly one partition.
async fn retain_one(control: &Control) {
    let run = retain(control).await.unwrap();
    assert!(run.is_ours && run.failed.is_empty() && run.removed.len() == 1, "{run:?}");
}

/// Puts messages that completed twelve days ago into the inbox, each with the payload of an SQL
/// expression over its number `n`. Returns the name of their partition.
async fn completed(
    fixture: &InboxFixture,
    consumer: &TestConsumer,
    ids: &str,
    numbers: std::ops::Range<i64>,
    payload: &str,
) -> String {
    completed_in(&fixture.pool, consumer.row.consumer_id, ids, numbers, payload).await
}

/// The same in another database.
async fn completed_in(
    pool: &PgPool,
    consumer: i32,
    ids: &str,
    numbers: std::ops::Range<i64>,
    payload: &str,
) -> String {
    let name = old_partition(pool, 12).await;
    execute(
        pool,
        format!(
            "INSERT INTO oncebox.inbox (consumer_id, message_id, retention_class, bucket, topic, \
                partition, \"offset\", record_timestamp_ms, status, received_at, processed_at, \
                payload, headers) \
             SELECT {consumer}, {ids}, 1, oncebox.bucket_at(1::smallint, now() - interval '12 \
                days'), 't', 0, n, n, 'completed', now() - interval '12 days', now() - interval \
                '12 days', {payload}, '' FROM generate_series({first}, {last}) n",
            first = numbers.start,
            last = numbers.end - 1
        ),
    )
    .await;
    name
}

async fn execute(pool: &PgPool, sql: String) {
    pool.execute(sqlx::raw_sql(AssertSqlSafe(sql))).await.unwrap();
}

/// What PostgreSQL does not compress and zstd hardly does: 320 bytes for each number.
const RANDOM: &str = "(SELECT string_agg(decode(md5(n || ' ' || k), 'hex'), ''::bytea) \
    FROM generate_series(1, 20) k)";

async fn is_there(fixture: &InboxFixture, table: &str) -> bool {
    fixture
        .number(format!("SELECT (to_regclass('oncebox.{table}') IS NOT NULL)::int::bigint"))
        .await
        == 1
}

/// The rows of a table as the archive has to have them, in the order of the ids' bytes.
async fn expected(fixture: &InboxFixture, table: &str) -> Vec<ArchivedMessage> {
    let columns: Vec<String> = sqlx::query_scalar(
        "SELECT column_name::text FROM information_schema.columns WHERE table_schema = 'oncebox' \
            AND table_name = 'inbox' ORDER BY ordinal_position",
    )
    .fetch_all(&fixture.pool)
    .await
    .unwrap();
    // A column that was added since is lost with the table.
    let known: BTreeSet<_> = ArchivedMessage::NAMES.iter().copied().collect();
    let unknown: Vec<_> = columns.iter().filter(|name| !known.contains(name.as_str())).collect();
    assert!(unknown.is_empty(), "the archive lacks {unknown:?}");
    let shown = |name: &String| match name.as_str() {
        "result" => "i.result::text AS result".to_owned(),
        name => format!("i.\"{name}\""),
    };
    let shown: Vec<_> = columns.iter().map(shown).collect();
    let rows = format!(
        "SELECT {}, t.name AS tenant, c.name AS consumer, NULL::text AS version, NULL::text AS \
            history, NULL::text AS edits FROM oncebox.{table} i JOIN oncebox.consumer c USING \
            (consumer_id) JOIN oncebox.tenant t USING (tenant_id) WHERE c.state <> 'deleting' \
            ORDER BY i.message_id COLLATE \"C\"",
        shown.join(", ")
    );
    sqlx::query_as(AssertSqlSafe(rows)).fetch_all(&fixture.pool).await.unwrap()
}

#[derive(sqlx::FromRow)]
struct FileRow {
    path: String,
    first_id: String,
    last_id: String,
    rows: i64,
    bytes: i64,
    id_digest: Vec<u8>,
    footer_bytes: i64,
    footer_digest: Vec<u8>,
}

async fn files(fixture: &InboxFixture) -> Vec<FileRow> {
    let files = "SELECT path, first_id, last_id, rows, bytes, id_digest, footer_bytes, \
        footer_digest FROM oncebox.archive_file ORDER BY file_number";
    sqlx::query_as(files).fetch_all(&fixture.pool).await.unwrap()
}

/// What could go wrong: a column, a byte or a letter is lost on the way; the digest is of other
/// ids; history or edits go with the inbox; what was deleted lives on. S0-029.
#[tokio::test(flavor = "multi_thread")]
async fn every_column_survives_the_archive() {
    let fixture = InboxFixture::new().await;
    let server = S3Server::start().await;
    let control = archiving(&fixture, &server.options());
    let consumer = fixture.simple("", "").await;
    let gone = fixture.consumer(&consumer.tenant, "gone", "").await;
    completed(&fixture, &gone, "'g' || n", 0..3, "'x'").await;
    let name = completed(&fixture, &consumer, "chr(96 + n::int)", 1..4, "'x'").await;
    fixture
        .execute(
            "UPDATE oncebox.inbox SET key = '\\x00ff', ordering_key = '\\x6b', source = 'größer \
                😀', event_type = 'paid', event_version = '2', content_type = 'text/plain', \
                trace_parent = '00-1', reason = NULL, attempts = 7, crashes = 2, last_error = \
                E'a\\nb', epoch = 9007199254740993, version_id = 2147483647, result = '{\"a\": [1, \
                null, \"ü\"]}', payload = '\\x00ff10', headers = '\\x000161', payload_hash = \
                sha256('x'), processed_at = '2026-01-02 03:04:05.678901+00', ordering_hash = \
                -9223372036854775808, ordering_position = 9223372036854775807, sequence_version = \
                0, waits_until = '1970-01-01 00:00:00.000001+00', over_gap = true, copied_at = \
                '1969-12-31 23:59:59.999999+00' WHERE message_id = 'b'; \
             UPDATE oncebox.inbox SET payload = NULL, headers = NULL WHERE message_id = 'c'; \
             UPDATE oncebox.inbox SET message_id = 'ä/😀' WHERE message_id = 'a'; \
             UPDATE oncebox.consumer SET state = 'deleting' WHERE name = 'gone'",
        )
        .await;
    let of_b = format!("{}, 'b'", consumer.row.consumer_id);
    fixture
        .execute(format!(
            "INSERT INTO oncebox.inbox_history (consumer_id, message_id, event, attempt, reason, \
                error, at) VALUES ({of_b}, 'failed', 1, 'trap', 'böse', now() - interval '12 \
                days'), ({of_b}, 'edited', NULL, 'why', NULL, now() - interval '12 days'); \
             INSERT INTO oncebox.inbox_edit (consumer_id, message_id, edit_number, payload, at) \
                VALUES ({of_b}, 1, '\\x00', now() - interval '12 days')"
        ))
        .await;
    let mut expected = expected(&fixture, &name).await;
    assert_eq!(expected.len(), 3);
    retain_one(&control).await;
    assert!(!is_there(&fixture, &name).await);
    assert_eq!(server.refusals(), [""; 0], "each request was signed");

    let files = files(&fixture).await;
    assert_eq!(files.len(), 1);
    let FileRow { path, first_id, last_id, rows, bytes, id_digest, footer_bytes, footer_digest } =
        &files[0];
    let (tenant, id) = (&consumer.tenant.name, consumer.row.consumer_id);
    assert!(path.contains(&format!("/{name}/{tenant}/orders/{id}-000001-")), "{path}");
    assert_eq!((first_id.as_str(), last_id.as_str(), *rows), ("b", "ä/😀", 3));
    let object = server.object(path).unwrap();
    assert_eq!(object.len() as i64, *bytes);
    let mut ids = Sha256::new();
    for id in ["b", "c", "ä/😀"] {
        ids.update(Sha256::digest(id));
    }
    assert_eq!(ids.finalize().as_slice(), id_digest.as_slice());

    let digest = footer_digest.as_slice().try_into().unwrap();
    let footer = Footer { bytes: *footer_bytes as u64, digest };
    let file = FileReader::open(path, object, &footer).unwrap();
    let mut read: Vec<_> = (0..file.groups()).flat_map(|group| file.read(group).unwrap()).collect();
    read.sort_by(|a, b| a.message_id.cmp(&b.message_id));
    for (expected, read) in expected.iter_mut().zip(&read) {
        (expected.history, expected.edits) = (read.history.clone(), read.edits.clone());
    }
    // S0-029: each column of each message.
    assert_eq!(read, expected);

    let found = control.archive().find("acme", None, "b").await.unwrap();
    assert_eq!(found.len(), 1);
    let found = &found[0];
    assert_eq!(found.history.len(), 2, "{found:?}");
    assert_eq!(found.history[0].error.as_deref(), Some("böse"));
    assert_eq!(found.edits[0].payload.as_deref(), Some(b"\0".as_slice()));
    assert_eq!(found.detail.row.result, Some(json!({ "a": [1, null, "ü"] })));
    assert_eq!(found.detail.payload.as_deref(), Some(b"\0\xff\x10".as_slice()));
    let renamed = control.archive().find("acme", Some("orders"), "ä/😀").await.unwrap();
    assert_eq!(renamed.len(), 1);
    for (consumer, id) in [(None, "g1"), (Some("gone"), "b"), (None, "absent"), (None, "")] {
        let found = control.archive().find("acme", consumer, id).await.unwrap();
        assert!(found.is_empty(), "{id}: {found:?}");
    }
    assert_eq!(fixture.number("SELECT count(*) FROM oncebox.inbox_history").await, 0);
    fixture.execute("UPDATE oncebox.consumer SET state = 'running'").await;
    fixture.finish().await;
}

/// What could go wrong: a partition is dropped although its file is not what was written; the error
/// does not say which file, or says the secret; nothing recovers.
#[tokio::test(flavor = "multi_thread")]
async fn what_was_not_read_back_is_not_dropped() {
    let fixture = InboxFixture::new().await;
    let server = S3Server::start().await;
    let control = archiving(&fixture, &server.options());
    let consumer = fixture.simple("", "").await;
    let name = completed(&fixture, &consumer, "'m' || n", 0..100, RANDOM).await;
    fixture
        .execute(format!(
            "INSERT INTO oncebox.inbox_history (consumer_id, message_id, event, at) VALUES \
                ({}, 'm1', 'failed', now() - interval '12 days')",
            consumer.row.consumer_id
        ))
        .await;
    server.lock(true);
    for (fault, says) in [
        (S3Fault::Cut, "the archive returned other bytes than were written"),
        (S3Fault::Refuse, "403 Forbidden"),
    ] {
        server.break_put(1, fault);
        let run = retain(&control).await.unwrap();
        assert!(run.removed.is_empty() && run.failed.len() == 1, "{run:?}");
        let error = &run.failed[0].1;
        assert!(error.contains("-000001-") && error.contains(".parquet`"), "{error}");
        assert!(error.contains(says) && !error.contains(SECRET_ACCESS_KEY), "{error}");
        let noted: String = sqlx::query_scalar("SELECT error FROM oncebox.removal")
            .fetch_one(&fixture.pool)
            .await
            .unwrap();
        // S0-029: nothing of it is gone, and the error is there to be read.
        assert_eq!(&noted, error);
        assert!(is_there(&fixture, &name).await);
        assert_eq!(fixture.number("SELECT count(*) FROM oncebox.archive_file").await, 0);
        assert_eq!(fixture.number("SELECT count(*) FROM oncebox.inbox_history").await, 1);
    }
    let left = "SELECT count(*) FROM oncebox.archive_attempt";
    let is_left = format!("{left} WHERE is_left");
    assert_eq!((fixture.number(left).await, fixture.number(&*is_left).await), (2, 1));
    server.lock(false);
    // What was not deleted is tried again after a day.
    fixture.execute("UPDATE oncebox.archive_attempt SET tried_at = NULL").await;
    retain_one(&control).await;
    // Each attempt has a name of its own, and those that were interrupted are deleted.
    assert_eq!((server.puts().len(), server.paths().len()), (2, 1), "{:?}", server.puts());
    assert_ne!(server.puts()[0], server.puts()[1]);
    assert!(server.paths()[0].ends_with(&files(&fixture).await[0].path), "{:?}", server.paths());
    assert_eq!((fixture.number(left).await, fixture.number(&*is_left).await), (2, 0));
    assert_eq!(control.archive().find("acme", None, "m99").await.unwrap().len(), 1);

    // A key that is not the one.
    let stranger = ArchiveOptions { secret_access_key: "wrong".to_owned(), ..server.options() };
    let error = archiving(&fixture, &stranger).archive().find("acme", None, "m99").await;
    let error = error.unwrap_err().to_string();
    assert!(error.contains("SignatureDoesNotMatch") && !error.contains("wrong"), "{error}");

    // The file is damaged later, then gone.
    let path = &files(&fixture).await[0].path;
    let whole = server.object(path).unwrap();
    let mut damaged = whole.to_vec();
    damaged[whole.len() / 2] ^= 1;
    for (object, says) in [
        (Some(Bytes::from(damaged)), "is damaged"),
        (Some(whole.slice(..whole.len() - 9)), "is damaged"),
        (None, "the archive has no file"),
    ] {
        server.set_object(path, object);
        let error = control.archive().find("acme", None, "m5").await.unwrap_err().to_string();
        assert!(error.contains(path.as_str()) && error.contains(says), "{error}");
    }
    let found = archive_findings(&control).await;
    assert!(found[0].0 == Severity::Error && found[0].1.contains(path.as_str()), "{found:?}");
    server.set_object(path, Some(whole));
    let puts = server.all_puts();
    assert_eq!(archive_findings(&control).await[0].0, Severity::Ok);
    assert_eq!(server.all_puts(), puts, "the doctor writes nothing");
    fixture.finish().await;
}

async fn archive_findings(control: &Control) -> Vec<(Severity, String)> {
    let findings = control.doctor().run(HostLimits { connections_max: 1 }).await.unwrap();
    let of_archive = findings.into_iter().filter(|finding| finding.check == "archive");
    of_archive.map(|finding| (finding.severity, finding.found)).collect()
}

/// What could go wrong: a process that knows nothing of the archive drops what must go there first;
/// an archive goes into a folder that is only by chance at that path; nobody can end it.
#[tokio::test(flavor = "multi_thread")]
async fn no_process_drops_past_the_archive() {
    let fixture = InboxFixture::new().await;
    let (directory, other) = (TempDir::new("archive"), TempDir::new("archive"));
    let control = archiving(&fixture, &folder(&directory));
    let consumer = fixture.simple("", "").await;
    let name = completed(&fixture, &consumer, "'m' || n", 0..3, "'x'").await;
    assert!(archive_findings(&fixture.control).await.is_empty(), "nothing is archived yet");
    control.archive().announce().await.unwrap();

    let refused = async |control: &Control, says: &str| {
        let error = retain(control).await.unwrap_err().to_string();
        assert!(error.contains(says), "{error}");
        assert!(is_there(&fixture, &name).await);
        let begun = fixture.number("SELECT count(*) FROM oncebox.removal").await;
        assert_eq!(begun, 0, "nothing was moved");
    };
    // S0-029: a process without the setting, and one with another.
    refused(&fixture.control, "this process has no `archive.location`").await;
    refused(&archiving(&fixture, &folder(&other)), "give all of them one `archive.location`").await;
    assert_eq!(archive_findings(&fixture.control).await[0].0, Severity::Unknown);

    retain_one(&control).await;
    let path = directory.path().join(&files(&fixture).await[0].path);
    assert!(path.is_file(), "{}", path.display());
    assert!(control.archive().find("acme", None, "m0").await.unwrap()[0].detail.payload.is_some());
    let error = fixture.control.archive().find("acme", None, "m0").await.unwrap_err().to_string();
    assert!(error.contains("cannot read the archive"), "{error}");

    // The folder is not mounted.
    let name = completed(&fixture, &consumer, "'m' || n", 10..13, "'x'").await;
    let aside = directory.path().with_extension("aside");
    std::fs::rename(directory.path(), &aside).unwrap();
    std::fs::create_dir(directory.path()).unwrap();
    let error = retain(&control).await.unwrap_err().to_string();
    assert!(error.contains("check that the folder is mounted"), "{error}");
    assert_eq!(archive_findings(&control).await[0].0, Severity::Error);
    assert!(is_there(&fixture, &name).await);
    std::fs::remove_dir(directory.path()).unwrap();
    std::fs::rename(&aside, directory.path()).unwrap();
    // A partition of the name was removed before, and its file stays.
    retain_one(&control).await;
    let rows: Vec<_> = files(&fixture).await.into_iter().map(|file| file.rows).collect();
    assert_eq!(rows, [3, 3]);
    for id in ["m2", "m12"] {
        assert_eq!(control.archive().find("acme", None, id).await.unwrap().len(), 1, "{id}");
    }

    let mark = fixture.control.archive().end().await.unwrap().unwrap();
    assert!(mark.location.starts_with("file://"), "{mark:?}");
    let audited = "SELECT count(*) FROM oncebox.audit WHERE action = 'archive.off'";
    assert_eq!(fixture.number(audited).await, 1);
    completed(&fixture, &consumer, "'m' || n", 20..23, "'x'").await;
    retain_one(&fixture.control).await;
    assert_eq!(files(&fixture).await.len(), 2, "nothing was archived");
    fixture.finish().await;
}

/// What could go wrong: an id at the end of a group or of a file is not found; the search reads the
/// archive from end to end, which takes longer the larger it is. S0-029.
#[tokio::test(flavor = "multi_thread")]
async fn a_message_is_found_by_a_few_reads() {
    let fixture = InboxFixture::new().await;
    let server = S3Server::start().await;
    let control = archiving(&fixture, &server.options());
    let consumer = fixture.simple("", "").await;
    let ids = "'m' || lpad(n::text, 6, '0')";
    completed(&fixture, &consumer, ids, 0..12_000, RANDOM).await;
    retain_one(&control).await;
    let bytes = files(&fixture).await[0].bytes as usize;
    assert!(bytes > 3 << 20, "{bytes}");
    let found = async |id: &str| {
        let before = server.served();
        let found = control.archive().find("acme", None, id).await.unwrap();
        (
            found.into_iter().map(|found| found.detail.row.message_id).collect::<Vec<_>>(),
            server.served() - before,
        )
    };
    for number in [0, 1, 4_999, 5_000, 5_001, 9_999, 10_000, 11_999] {
        let id = format!("m{number:06}");
        let (ids, read) = found(&id).await;
        assert_eq!(ids, [id.as_str()]);
        // S0-029: a group of 5,000 of 12,000 messages, and what leads to it.
        assert!(read < bytes / 2 + (64 << 10), "{id}: {read} of {bytes} bytes");
    }
    let mut read = 0;
    for number in 0..10 {
        let (ids, more) = found(&format!("m{:06}-absent", number * 1_000)).await;
        assert!(ids.is_empty(), "{ids:?}");
        read += more;
    }
    assert!(read < bytes, "{read} bytes for ten ids that are not there");
    assert_eq!(found("m012000").await, (Vec::new(), 0), "beyond the last");
    assert_eq!(found("a").await, (Vec::new(), 0), "before the first");
    fixture.finish().await;
}

/// What could go wrong: a large partition is one file in memory; an interrupted archive begins from
/// the beginning each time, and never ends.
#[tokio::test(flavor = "multi_thread")]
async fn an_interrupted_archive_continues_with_the_next_file() {
    let fixture = InboxFixture::new().await;
    let server = S3Server::start().await;
    let control = archiving(&fixture, &server.options());
    let consumer = fixture.simple("", "").await;
    completed(&fixture, &consumer, "'m' || lpad(n::text, 2, '0')", 0..40, "NULL").await;
    let payload: Vec<u8> = (0..1 << 20).map(|_| rand::random()).collect();
    sqlx::query("UPDATE oncebox.inbox SET payload = convert_to(message_id, 'UTF8') || $1")
        .bind(&payload)
        .execute(&fixture.pool)
        .await
        .unwrap();
    server.break_put(2, S3Fault::Refuse);
    let run = retain(&control).await.unwrap();
    assert!(run.failed.len() == 1 && run.failed[0].1.contains("-000002-"), "{run:?}");
    let first = files(&fixture).await;
    assert_eq!(first.len(), 1);
    assert!(first[0].bytes >= 32 << 20 && first[0].bytes < 48 << 20, "{}", first[0].bytes);
    retain_one(&control).await;
    let paths: Vec<_> = files(&fixture).await.into_iter().map(|file| file.path).collect();
    let puts = server.puts();
    assert_eq!(puts.len(), 2, "the first file was written once: {puts:?}");
    assert!(puts.iter().zip(&paths).all(|(put, path)| put.ends_with(path.as_str())), "{puts:?}");
    for id in ["m00", "m31", "m39"] {
        let found = control.archive().find("acme", None, id).await.unwrap();
        let expected = [id.as_bytes(), &payload].concat();
        assert!(found[0].detail.payload.as_ref() == Some(&expected), "{id}");
    }
    let listed: DateTime<Utc> =
        sqlx::query_scalar("SELECT max(verified_at) FROM oncebox.archive_file")
            .fetch_one(&fixture.pool)
            .await
            .unwrap();
    let filter = ArchiveFilter { limit: 1, ..Default::default() };
    let newest = control.archive().files(&filter).await.unwrap();
    assert_eq!((newest.len(), newest[0].verified_at, &newest[0].path), (1, listed, &paths[1]));
    fixture.finish().await;
}

/// What could go wrong: a tenant that changes its own database gives its files the names of another
/// tenant's, or hands that tenant its messages.
#[tokio::test(flavor = "multi_thread")]
async fn a_tenants_own_database_does_not_name_the_files() {
    let fixture = InboxFixture::new().await;
    let directory = TempDir::new("archive");
    let control = archiving(&fixture, &folder(&directory));
    let theirs = fixture.simple("", "").await;
    let database = InboxFixture::another_database().await;
    let tenant = fixture.tenant_at("apart", &database, "").await;
    let consumer = fixture.consumer(&tenant, "orders", "").await;
    control.tenant_databases().replicate(&tenant).await.unwrap();
    let there = PgPool::connect(database.url()).await.unwrap();
    let (own, other) = (consumer.row.consumer_id, theirs.row.consumer_id);
    let rename = "UPDATE oncebox.tenant SET name = 'acme'; UPDATE oncebox.consumer SET name = 'x'";
    execute(&there, rename.to_owned()).await;
    let name = completed_in(&there, own, "'m' || n", 0..3, "'x'").await;
    completed_in(&there, other, "'o' || n", 0..3, "'x'").await;
    let apart = control.tenant_databases().all().await.unwrap().remove(1);

    let run = control.retention().run(&apart).await.unwrap();
    let unknown = format!("does not know in this database: acme/orders ({other});");
    assert!(run.removed.is_empty() && run.failed[0].1.contains(&unknown), "{run:?}");
    execute(&there, format!("DELETE FROM oncebox.{name} WHERE consumer_id = {other}")).await;
    let run = control.retention().run(&apart).await.unwrap();
    assert_eq!((run.removed.len(), run.failed.len()), (1, 0), "{run:?}");
    let (path, of): (String, String) =
        sqlx::query_as("SELECT path, tenant || '/' || consumer FROM oncebox.archive_file")
            .fetch_one(&there)
            .await
            .unwrap();
    assert!(path.contains(&format!("/{name}/apart/orders/{own}-000001")), "{path}");
    assert_eq!(of, "apart/orders");
    assert_eq!(control.archive().find("apart", None, "m1").await.unwrap().len(), 1);
    assert!(control.archive().find("acme", None, "m1").await.unwrap().is_empty());
    there.close().await;
    fixture.finish().await;
}

/// What could go wrong: messages with long histories are read into memory all at once.
#[tokio::test(flavor = "multi_thread")]
async fn long_histories_are_read_in_parts() {
    let fixture = InboxFixture::new().await;
    let server = S3Server::start().await;
    let control = archiving(&fixture, &server.options());
    let consumer = fixture.simple("", "").await;
    completed(&fixture, &consumer, "'m' || lpad(n::text, 2, '0')", 0..20, "'x'").await;
    fixture
        .execute(
            "INSERT INTO oncebox.inbox_history (consumer_id, message_id, event, error, at) SELECT \
                i.consumer_id, i.message_id, 'failed', repeat('e', 4000), i.processed_at FROM \
                oncebox.inbox i, generate_series(1, 250) n",
        )
        .await;
    retain_one(&control).await;
    let file = &files(&fixture).await[0];
    let digest = file.footer_digest.as_slice().try_into().unwrap();
    let footer = Footer { bytes: file.footer_bytes as u64, digest };
    let reader = FileReader::open(&file.path, server.object(&file.path).unwrap(), &footer).unwrap();
    // A message takes about 1.05 MB, and a group has 8 MiB.
    let rows: Vec<_> =
        (0..reader.groups()).map(|group| reader.read(group).unwrap().len()).collect();
    assert_eq!(rows.iter().sum::<usize>(), 20);
    assert!(rows.len() > 2 && rows.iter().all(|rows| *rows <= 8), "{rows:?}");
    let found = control.archive().find("acme", None, "m19").await.unwrap();
    assert_eq!(found[0].history.len(), 250);
    fixture.finish().await;
}

/// A run over a partition with messages `m0` to `m2` of one consumer and `o0` to `o2` of another
/// that ends after the file of the first. Returns the names of the partition and of that file.
async fn interrupted(
    fixture: &InboxFixture,
    server: &S3Server,
    control: &Control,
) -> (String, String) {
    let consumer = fixture.simple("", "").await;
    let other = fixture.consumer(&consumer.tenant, "later", "").await;
    let name = completed(fixture, &consumer, "'m' || n", 0..3, "'x'").await;
    completed(fixture, &other, "'o' || n", 0..3, "'x'").await;
    server.break_put(2, S3Fault::Refuse);
    assert_eq!(retain(control).await.unwrap().failed.len(), 1);
    (name, files(fixture).await.remove(0).path)
}

/// What could go wrong: a file that was lost between two runs counts as the archive of messages
/// that are still there, and they are dropped.
#[tokio::test(flavor = "multi_thread")]
async fn a_file_that_is_lost_before_the_drop_is_written_again() {
    let fixture = InboxFixture::new().await;
    let server = S3Server::start().await;
    let control = archiving(&fixture, &server.options());
    let (name, path) = interrupted(&fixture, &server, &control).await;
    server.set_object(&path, None);
    let run = retain(&control).await.unwrap();
    assert!(run.removed.is_empty() && run.failed[0].1.contains(&path), "{run:?}");
    assert!(is_there(&fixture, &name).await);
    assert_eq!(fixture.number("SELECT count(*) FROM oncebox.archive_file").await, 1);
    retain_one(&control).await;
    for id in ["m2", "o2"] {
        assert_eq!(control.archive().find("acme", None, id).await.unwrap().len(), 1, "{id}");
    }
    fixture.finish().await;
}

/// What could go wrong: of two hosts that archive for the first time, the second marks a folder
/// that is not mounted; the mark of an earlier archive is taken for this one's.
#[tokio::test(flavor = "multi_thread")]
async fn one_place_is_marked() {
    let fixture = InboxFixture::new().await;
    let [mounted, unmounted, link] = [(); 3].map(|()| TempDir::new("archive"));
    for folder in [&mounted, &unmounted, &link] {
        std::fs::create_dir(folder.path()).unwrap();
    }
    // All processes name one location, and do not see one folder there.
    let at = link.path().join("place");
    let mount = |folder: &TempDir| {
        let _ = std::fs::remove_file(&at); // the first time there is none
        std::os::unix::fs::symlink(folder.path(), &at).unwrap();
    };
    mount(&mounted);
    let location = format!("file://{}", at.display());
    let options = ArchiveOptions { location, ..ArchiveOptions::default() };
    let control = archiving(&fixture, &options);
    let both = [retain(&control), retain(&control)];
    for run in futures::future::join_all(both).await {
        run.unwrap();
    }
    let refused = async || {
        let error = retain(&control).await.unwrap_err().to_string();
        assert!(error.contains("check that the folder is mounted"), "{error}");
    };
    mount(&unmounted);
    refused().await;
    // A mark of the same installation that is not the one of this archive.
    control.archive().end().await.unwrap().unwrap();
    retain(&control).await.unwrap();
    mount(&mounted);
    refused().await;
    fixture.finish().await;
}

/// Erases a message by its id.
async fn erase(control: &Control, target: ErasureTarget) -> ErasureProof {
    let request = ErasureRequest { target, consumer: None, reason: "they asked".to_owned() };
    for _ in 0..20 {
        let progress = control.erasures().erase("acme", &request).await.unwrap();
        if let Some(proof) = progress.proof {
            return proof;
        }
    }
    panic!("the erasure does not end");
}

fn of_id(id: &str) -> ErasureTarget {
    ErasureTarget::MessageId(id.to_owned())
}

/// What could go wrong: the archive does not say that a message was erased before its removal, and
/// who did it.
#[tokio::test(flavor = "multi_thread")]
async fn an_erasure_before_the_removal_is_in_the_archive() {
    let fixture = InboxFixture::new().await;
    let server = S3Server::start().await;
    let control = archiving(&fixture, &server.options());
    let consumer = fixture.simple("", "").await;
    completed(&fixture, &consumer, "'m' || n", 0..3, "'x'").await;
    erase(&control, of_id("m1")).await;
    retain_one(&control).await;
    let found = control.archive().find("acme", None, "m1").await.unwrap();
    let events: Vec<_> = found[0].history.iter().map(|event| event.event.as_str()).collect();
    assert_eq!(events, ["erased"]);
    assert_eq!(found[0].history[0].reason.as_deref(), Some("they asked"));
    assert!(found[0].detail.row.erased_at.is_some() && found[0].detail.payload.is_none());
    let whole = control.archive().find("acme", None, "m2").await.unwrap();
    assert!(whole[0].detail.payload.is_some() && whole[0].history.is_empty());
    assert_eq!(fixture.number("SELECT count(*) FROM oncebox.inbox_history").await, 0);
    fixture.finish().await;
}

/// What could go wrong: a partition that comes back to the inbox, since a message in it must stay,
/// has lost its history, and is archived without it.
#[tokio::test(flavor = "multi_thread")]
async fn a_partition_that_comes_back_keeps_its_history() {
    let fixture = InboxFixture::new().await;
    let server = S3Server::start().await;
    let control = archiving(&fixture, &server.options());
    let consumer = fixture.simple("", "").await;
    let name = completed(&fixture, &consumer, "'m' || n", 0..3, "'x'").await;
    fixture
        .execute(
            "INSERT INTO oncebox.inbox_history (consumer_id, message_id, event, error, at) SELECT \
                consumer_id, message_id, 'failed', 'e', processed_at FROM oncebox.inbox",
        )
        .await;
    server.break_put(1, S3Fault::Refuse);
    assert_eq!(retain(&control).await.unwrap().failed.len(), 1);
    // By hand, in the detached table.
    let park = "status = 'parked', reason = 'park' WHERE message_id = 'm1'";
    fixture.execute(format!("UPDATE oncebox.{name} SET {park}")).await;
    let run = retain(&control).await.unwrap();
    assert!(run.failed[0].1.contains("1 messages of the partition must stay"), "{run:?}");
    assert_eq!(server.puts(), [""; 0], "nothing was archived");
    assert_eq!(fixture.number("SELECT count(*) FROM oncebox.inbox_history").await, 3);
    retain_one(&control).await;
    assert_eq!(fixture.row(&consumer, "m1").await.status, "parked");
    assert_eq!(fixture.number("SELECT count(*) FROM oncebox.inbox_history").await, 1);
    let found = control.archive().find("acme", None, "m2").await.unwrap();
    assert_eq!((found.len(), found[0].history.len()), (1, 1), "{found:?}");
    fixture.finish().await;
}

/// What could go wrong: a process that began a removal before there was an archive drops the
/// partition after the decision to archive.
#[tokio::test(flavor = "multi_thread")]
async fn a_removal_that_began_without_an_archive_does_not_drop() {
    let fixture = InboxFixture::new().await;
    let directory = TempDir::new("archive");
    let control = archiving(&fixture, &folder(&directory));
    let consumer = fixture.simple("", "").await;
    let name = completed(&fixture, &consumer, "'m' || n", 0..3, "'x'").await;
    fixture
        .execute(
            "INSERT INTO oncebox.inbox_history (consumer_id, message_id, event, at) SELECT \
                consumer_id, message_id, 'failed', processed_at FROM oncebox.inbox",
        )
        .await;
    // The removal waits after it looked for the archive, and before the drop.
    let mut held = fixture.pool.begin().await.unwrap();
    held.execute("SELECT FROM oncebox.inbox_history FOR UPDATE").await.unwrap();
    let deciding = async {
        fixture.until_blocked(1).await;
        control.archive().announce().await.unwrap();
        held.rollback().await.unwrap();
    };
    let (run, ()) = tokio::join!(retain(&fixture.control), deciding);
    let run = run.unwrap();
    assert!(run.removed.is_empty() && run.failed[0].1.contains("archives them first"), "{run:?}");
    assert!(is_there(&fixture, &name).await);
    retain_one(&control).await;
    assert_eq!(control.archive().find("acme", None, "m1").await.unwrap().len(), 1);
    fixture.finish().await;
}

/// What could go wrong: a file that was deleted on purpose fails each search and the doctor for
/// good; another tenant's file is forgotten with it; a search hides that a file is missing.
#[tokio::test(flavor = "multi_thread")]
async fn a_file_that_is_deleted_on_purpose_is_forgotten() {
    let fixture = InboxFixture::new().await;
    let server = S3Server::start().await;
    let control = archiving(&fixture, &server.options());
    let consumer = fixture.simple("", "").await;
    let kept = fixture.consumer(&consumer.tenant, "kept", "").await;
    for consumer in [&consumer, &kept] {
        completed(&fixture, consumer, "'m' || n", 0..3, "'x'").await;
    }
    retain_one(&control).await;
    let path: String =
        sqlx::query_scalar("SELECT path FROM oncebox.archive_file WHERE consumer = 'orders'")
            .fetch_one(&fixture.pool)
            .await
            .unwrap();
    server.set_object(&path, None);
    let error = control.archive().find("acme", None, "m1").await.unwrap_err().to_string();
    assert!(error.contains(&path), "{error}");
    let forget = async |consumer: Option<&str>, before: Option<DateTime<Utc>>| {
        let which = ForgottenFiles {
            tenant: consumer.map(|_| "acme".to_owned()),
            consumer: consumer.map(str::to_owned),
            before,
        };
        control.archive().forget(&which).await
    };
    assert!(forget(None, None).await.is_err(), "all of them");
    let long_ago = DateTime::from_timestamp(0, 0);
    assert!(forget(Some("orders"), long_ago).await.unwrap().is_empty());
    // An answer that was lost is given again, for a day.
    for _ in 0..2 {
        assert_eq!(forget(Some("orders"), None).await.unwrap(), [&*path]);
    }
    assert_eq!(control.archive().find("acme", None, "m1").await.unwrap().len(), 1);
    assert_eq!(archive_findings(&control).await[0].0, Severity::Ok);
    let audited = "SELECT count(*) FROM oncebox.audit WHERE action = 'archive.forget' AND \
        subject = 'acme/orders'";
    assert_eq!(fixture.number(audited).await, 3);
    assert!(erase(&control, of_id("m1")).await.archive_files == 1, "only in the list");
    let files = control.archive().files(&ArchiveFilter { limit: 9, ..Default::default() }).await;
    assert_eq!(files.unwrap().len(), 1);
    fixture
        .execute(
            "UPDATE oncebox.archive_file SET forgotten_at = forgotten_at - interval '2 days' \
                WHERE forgotten_at IS NOT NULL",
        )
        .await;
    assert!(forget(Some("orders"), None).await.unwrap().is_empty());
    assert_eq!(fixture.number("SELECT count(*) FROM oncebox.archive_file").await, 1);
    fixture.finish().await;
}

/// All messages in the files that have a row, as text. No other file is there.
async fn archived(fixture: &InboxFixture, server: &S3Server) -> String {
    let files = files(fixture).await;
    let mut stored = server.paths();
    for FileRow { path, .. } in &files {
        stored.retain(|stored| !stored.ends_with(path.as_str()));
    }
    assert_eq!(stored, [""; 0], "files without a row");
    let mut text = String::new();
    for file in files {
        let digest = file.footer_digest.as_slice().try_into().unwrap();
        let footer = Footer { bytes: file.footer_bytes as u64, digest };
        let object = server.object(&file.path).unwrap();
        assert_eq!(object.len() as i64, file.bytes);
        let reader = FileReader::open(&file.path, object, &footer).unwrap();
        for group in 0..reader.groups() {
            for mut message in reader.read(group).unwrap() {
                let payload = message.payload.take().unwrap_or_default();
                let headers = message.headers.take().unwrap_or_default();
                let bytes = [payload, headers].concat();
                text += &format!("{message:?} {}\n", String::from_utf8_lossy(&bytes));
            }
        }
    }
    text
}

/// What could go wrong: an erasure leaves payloads in a file, takes those of others, loses a
/// message, or leaves the old file.
#[tokio::test(flavor = "multi_thread")]
async fn an_erasure_covers_the_archive() {
    let fixture = InboxFixture::new().await;
    let server = S3Server::start().await;
    let control = archiving(&fixture, &server.options());
    let consumer = fixture.simple("", "").await;
    let other = fixture.consumer(&consumer.tenant, "other", "").await;
    for consumer in [&consumer, &other] {
        let payload = "convert_to('mark-' || n || '-end', 'UTF8')";
        completed(&fixture, consumer, "'m' || lpad(n::text, 2, '0')", 0..20, payload).await;
    }
    fixture
        .execute(
            "UPDATE oncebox.inbox SET headers = 'mark-7-end', payload_hash = 'x', result = \
                '\"mark-7-end\"', last_error = 'mark-7-end' WHERE message_id = 'm07'; \
             UPDATE oncebox.inbox SET key = 'k' WHERE message_id IN ('m07', 'm08'); \
             UPDATE oncebox.inbox SET ordering_key = 'k' WHERE message_id = 'm09'; \
             INSERT INTO oncebox.inbox_history (consumer_id, message_id, event, error, at) SELECT \
                consumer_id, message_id, 'failed', 'mark-7-end', processed_at FROM oncebox.inbox \
                WHERE message_id = 'm07'; \
             INSERT INTO oncebox.inbox_edit (consumer_id, message_id, edit_number, payload, at) \
                SELECT consumer_id, message_id, 1, 'mark-7-end', processed_at FROM oncebox.inbox \
                WHERE message_id = 'm07'",
        )
        .await;
    retain_one(&control).await;
    let marks = |text: &str, n: i64| {
        let mark = format!("mark-{n}-end");
        text.matches(&mark).count() + text.matches(&hex::encode(mark)).count()
    };
    let before = archived(&fixture, &server).await;
    assert_eq!([6, 7, 8].map(|n| marks(&before, n)), [2, 12, 2], "{before}");
    let paths: Vec<_> = files(&fixture).await.into_iter().map(|file| file.path).collect();

    // A process without the archive says so, and ends nothing.
    let request = ErasureRequest { target: of_id("m07"), consumer: None, reason: "r".to_owned() };
    let error = loop {
        match fixture.control.erasures().erase("acme", &request).await {
            Ok(progress) => assert!(progress.proof.is_none(), "{progress:?}"),
            Err(error) => break error.to_string(),
        }
    };
    assert!(error.contains("has no `archive.location`"), "{error}");

    let proof = erase(&control, of_id("m07")).await;
    assert_eq!((proof.archive_files, proof.archived), (2, 2), "{proof:?}");
    assert_eq!((proof.edits, proof.errors, proof.erased.len()), (2, 2, 0), "{proof:?}");
    let after = archived(&fixture, &server).await;
    assert_eq!([6, 7, 8].map(|n| marks(&after, n)), [2, 0, 2], "{after}");
    assert_eq!(after.lines().count(), 40);
    let found = control.archive().find("acme", Some("orders"), "m07").await.unwrap();
    let events: Vec<_> = found[0].history.iter().map(|event| event.event.as_str()).collect();
    assert_eq!(events, ["failed", "erased"]);
    assert!(found[0].detail.row.erased_at.is_some() && found[0].edits[0].payload.is_none());
    let now: Vec<_> = files(&fixture).await.into_iter().map(|file| file.path).collect();
    assert!(now.iter().all(|path| !paths.contains(path)), "{now:?}");

    // By key, where the storage deletes nothing; then it does.
    server.lock(true);
    let key = || ErasureTarget::Key(b"k".to_vec());
    let proof = erase(&control, key()).await;
    assert_eq!((proof.archive_files, proof.archived), (2, 4), "{proof:?}");
    for path in &now {
        assert!(proof.not_covered.iter().any(|text| text.contains(path.as_str())), "{proof:?}");
    }
    server.lock(false);
    let proof = erase(&control, key()).await;
    assert_eq!((proof.archive_files, proof.archived), (0, 0), "{proof:?}");
    assert!(proof.not_covered.iter().all(|text| !text.contains(".parquet")), "{proof:?}");
    let after = archived(&fixture, &server).await;
    assert_eq!([6, 7, 8, 9].map(|n| marks(&after, n)), [2, 0, 0, 0], "{after}");
    assert_eq!(fixture.number("SELECT count(*) FROM oncebox.archive_attempt").await, 0);
    fixture.finish().await;
}

/// What could go wrong: an erasure ends while a file that was read before it is still being
/// written, with the payload.
#[tokio::test(flavor = "multi_thread")]
async fn an_erasure_waits_for_files_that_are_being_written() {
    let fixture = InboxFixture::new().await;
    let server = S3Server::start().await;
    let control = archiving(&fixture, &server.options());
    let consumer = fixture.simple("", "").await;
    completed(&fixture, &consumer, "'m' || n", 0..3, "'mark-1-end'").await;
    // An interrupted attempt: its file has the payload.
    server.break_put(1, S3Fault::Cut);
    assert_eq!(retain(&control).await.unwrap().failed.len(), 1);
    let request = ErasureRequest { target: of_id("m1"), consumer: None, reason: "r".to_owned() };
    let progress = loop {
        let progress = control.erasures().erase("acme", &request).await.unwrap();
        assert!(progress.proof.is_none(), "{progress:?}");
        if progress.in_flight > 0 {
            break progress;
        }
    };
    assert!(progress.waits_for.unwrap().starts_with("files that retention is writing"));
    assert_eq!(progress.erased, 1, "in the detached table");
    retain_one(&control).await;
    let proof = erase(&control, of_id("m1")).await;
    assert_eq!((proof.archive_files, proof.archived), (0, 0), "it was archived without: {proof:?}");
    let text = archived(&fixture, &server).await;
    assert_eq!(text.matches("mark-1-end").count(), 2, "{text}");
    fixture.finish().await;
}
