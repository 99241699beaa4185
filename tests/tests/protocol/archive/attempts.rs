//! Files that an interrupted write leaves, or that lose their row: none stays unknown, and none
//! keeps an erasure from its end.

use oncebox_control::Control;
use oncebox_tests::{
    inbox::InboxFixture,
    s3::{S3Fault, S3Server},
};

use super::{
    archived, archiving, completed, erase, files, interrupted, is_there, of_id, retain, retain_one,
};

const ATTEMPTS: &str = "SELECT count(*) FROM oncebox.archive_attempt";
const FILES: &str = "SELECT count(*) FROM oncebox.archive_file";

/// Paths of the attempts, in order.
async fn attempts(fixture: &InboxFixture) -> Vec<String> {
    let paths = "SELECT path FROM oncebox.archive_attempt ORDER BY path";
    sqlx::query_scalar(paths).fetch_all(&fixture.pool).await.unwrap()
}

/// Lets the time pass until no put of an interrupted attempt can be under way.
async fn end_puts(fixture: &InboxFixture) {
    fixture.execute("UPDATE oncebox.archive_attempt SET put_ends_at = now()").await;
}

/// An erasure of a message; the texts of its proof about files.
async fn not_covered(control: &Control, id: &str) -> Vec<String> {
    let proof = erase(control, of_id(id)).await;
    proof.not_covered.into_iter().filter(|text| text.contains(".parquet")).collect()
}

/// A run that removes nothing and fails with a text.
async fn retain_none(control: &Control, says: &str) {
    let run = retain(control).await.unwrap();
    assert!(run.removed.is_empty() && run.failed[0].1.contains(says), "{says}: {run:?}");
}

/// What could go wrong: a file that loses its row, since it or one before it was lost, stays with
/// its payloads, and no list and no proof names it; files of a volume that is gone for a moment
/// count as lost.
#[tokio::test(flavor = "multi_thread")]
async fn what_is_left_of_a_lost_file_is_deleted() {
    let fixture = InboxFixture::new().await;
    let server = S3Server::start().await;
    let control = archiving(&fixture, &server.options());
    let (name, first) = interrupted(&fixture, &server, &control).await;
    // As if the messages were in two files.
    let second = first.replace("-000001-", "-000002-");
    server.set_object(&second, server.object(&first));
    fixture
        .execute(format!(
            "INSERT INTO oncebox.archive_file SELECT (jsonb_populate_record(f, jsonb_build_object( \
                'path', '{second}', 'file_number', 2))).* FROM oncebox.archive_file f"
        ))
        .await;

    // The volume is not mounted when the files are looked for: none of them is lost.
    server.unmount_at_look();
    retain_none(&control, "check that the folder is mounted").await;
    server.mount();
    assert_eq!(fixture.number(FILES).await, 3);
    // What was refused has no file.
    fixture.execute("DELETE FROM oncebox.archive_attempt").await;

    server.set_object(&first, None);
    retain_none(&control, &first).await;
    assert_eq!(fixture.number(FILES).await, 1, "those after the lost one are written again, too");
    assert_eq!(attempts(&fixture).await, [&*first, &*second]);
    assert!(is_there(&fixture, &name).await && server.object(&second).is_some());
    server.lock(true);
    let left = not_covered(&control, "m1").await;
    assert!(left.len() == 2 && left[1].contains(&second), "{left:?}");
    server.lock(false);
    fixture.execute("UPDATE oncebox.archive_attempt SET tried_at = NULL").await;

    // One that is shorter than it was written is lost as well.
    let of_other = files(&fixture).await.remove(0);
    let whole = server.object(&of_other.path).unwrap();
    server.set_object(&of_other.path, Some(whole.slice(..whole.len() / 2)));
    retain_none(&control, "and not").await;
    assert_eq!(attempts(&fixture).await, [of_other.path]);
    retain_one(&control).await;
    assert_eq!(attempts(&fixture).await, [""; 0]);
    assert_eq!(archived(&fixture, &server).await.lines().count(), 6);
    assert_eq!(not_covered(&control, "m1").await, [""; 0]);
    fixture.finish().await;
}

/// What could go wrong: after the end of the archive, nobody ends an attempt that was interrupted,
/// and each erasure of the tenant waits for it for ever, or ends without a word of its file.
#[tokio::test(flavor = "multi_thread")]
async fn an_attempt_of_an_archive_that_ended_holds_no_erasure_up() {
    let fixture = InboxFixture::new().await;
    let server = S3Server::start().await;
    let control = archiving(&fixture, &server.options());
    let consumer = fixture.simple("", "").await;
    completed(&fixture, &consumer, "'m' || n", 0..3, "'x'").await;
    server.break_put(1, S3Fault::Cut);
    assert_eq!(retain(&control).await.unwrap().failed.len(), 1);
    let path = attempts(&fixture).await.remove(0);
    control.archive().end().await.unwrap().unwrap();
    retain_one(&fixture.control).await;

    let left = not_covered(&fixture.control, "m1").await;
    let expected = format!("the file `{path}` of the archive, which is not deleted yet");
    assert_eq!(left, [expected], "by a process that has no archive");
    assert!(server.object(&path).is_some());
    let left = not_covered(&control, "m1").await;
    let expected = format!("the file `{path}` of the archive, which was deleted, and which an");
    assert!(left.len() == 1 && left[0].starts_with(&expected), "{left:?}");
    assert!(server.object(&path).is_none());
    end_puts(&fixture).await;
    assert_eq!(not_covered(&control, "m1").await, [""; 0]);
    assert_eq!(fixture.number(ATTEMPTS).await, 0);
    fixture.finish().await;
}

/// What could go wrong: a put that goes on after its process has ended brings back a file that was
/// deleted, and no row names it any more.
#[tokio::test(flavor = "multi_thread")]
async fn a_put_that_lands_after_the_deletion_is_deleted_again() {
    let fixture = InboxFixture::new().await;
    let server = S3Server::start().await;
    let control = archiving(&fixture, &server.options());
    let consumer = fixture.simple("", "").await;
    completed(&fixture, &consumer, "'m' || n", 0..3, "'x'").await;
    server.break_put(1, S3Fault::Cut);
    assert_eq!(retain(&control).await.unwrap().failed.len(), 1);
    let path = attempts(&fixture).await.remove(0);
    let late = server.object(&path).unwrap();
    retain_one(&control).await;
    assert!(server.object(&path).is_none(), "the next run deletes it");
    server.set_object(&path, Some(late));
    let left = not_covered(&control, "m1").await;
    assert!(left.len() == 1 && left[0].contains(&path), "{left:?}");
    // Not before no put can be under way, and then without a partition that is due.
    retain(&control).await.unwrap();
    assert_eq!(attempts(&fixture).await, [path]);
    end_puts(&fixture).await;
    retain(&control).await.unwrap();
    assert_eq!(fixture.number(ATTEMPTS).await, 0);
    assert_eq!(archived(&fixture, &server).await.lines().count(), 3);
    fixture.finish().await;
}
