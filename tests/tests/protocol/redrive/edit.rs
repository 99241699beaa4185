//! A dead letter that gets another payload.

use super::*;
use chrono::{DateTime, Utc};

async fn edit(
    fixture: &InboxFixture,
    id: &str,
    payload: &str,
    as_of: Option<DateTime<Utc>>,
) -> Result<(), String> {
    let edit = Edit { payload: payload.into(), reason: "a typo".to_owned(), as_of };
    fixture
        .control
        .messages()
        .edit_message("acme", "orders", id, &edit)
        .await
        .map_err(|error| error.to_string())
}

/// What could go wrong: a mended message is a new one to the inbox, what came is lost, or its
/// redelivery is taken for another payload. S1-059, S1-060, S0-042.
#[tokio::test(flavor = "multi_thread")]
async fn an_edited_letter_is_the_same_message() {
    let fixture = InboxFixture::new().await;
    let consumer = fixture.simple("", QUICK).await;
    let host = fixture.host(&consumer);
    let mut letter = record(0, "a", "reject");
    letter.headers.push(("causation".to_owned(), b"c-1".to_vec()));
    deliver(&host, std::slice::from_ref(&letter)).await;
    let before = fixture.row(&consumer, "a").await;
    assert_eq!(before.state(), ("failed_terminal", Some("reject"), 1));

    edit(&fixture, "a", "park", None).await.unwrap();
    assert_eq!(fixture.row(&consumer, "a").await.state(), ("received", None, 0));
    let twice = edit(&fixture, "a", "park", None).await.unwrap_err();
    assert!(
        twice.contains("message `a` of `acme/orders` is received; only dead letters"),
        "{twice}"
    );
    let failed_at: DateTime<Utc> =
        sqlx::query_scalar("SELECT now()").fetch_one(&fixture.pool).await.unwrap();
    fixture.retry_until_settled(&host).await;
    assert_eq!(fixture.row(&consumer, "a").await.state(), ("parked", Some("park"), 1));
    let again = edit(&fixture, "a", "park", Some(failed_at)).await.unwrap_err();
    assert!(
        again.contains("became a dead letter again"),
        "what is sent again does not meet what failed since: {again}"
    );
    edit(&fixture, "a", "result 7", None).await.unwrap();
    fixture.retry_until_settled(&host).await;

    let row = fixture.row(&consumer, "a").await;
    assert_eq!((row.state(), &row.result), (("completed", None, 1), &Some(serde_json::json!(7))));
    assert_eq!((row.offset, &row.payload_hash), (before.offset, &before.payload_hash));
    deliver(&host, &[letter]).await;
    // S1-059, S1-060.
    assert_eq!(
        (fixture.rows().await.len(), fixture.effects(&consumer, "a").await),
        (1, 1),
        "what comes again is what came"
    );

    const EDITS: &str = "SELECT edit_number, payload FROM oncebox.inbox_edit WHERE message_id \
        = 'a' ORDER BY edit_number";
    let edits: Vec<(i32, Vec<u8>)> = sqlx::query_as(EDITS).fetch_all(&fixture.pool).await.unwrap();
    assert_eq!(edits, [(1, b"reject".to_vec()), (2, b"park".to_vec())]);
    let person = |event: &str, attempt| {
        (event.to_owned(), attempt, Some("a typo".to_owned()), Some("test".to_owned()))
    };
    let failed = |reason: &str| ("failed".to_owned(), Some(1), Some(reason.to_owned()), None);
    let (redriven, edited) = (person("redriven", Some(1)), person("edited", None));
    let expected =
        [failed("reject"), redriven.clone(), edited.clone(), failed("park"), redriven, edited];
    // S0-042.
    assert_eq!(history(&fixture, "a").await, expected);
    let audit = fixture.control.audit().list(Some("acme"), 10).await.unwrap();
    let of_edits: Vec<_> = audit.iter().filter(|entry| entry.action == "inbox.edit").collect();
    assert_eq!(of_edits.len(), 2);
    assert!(!format!("{of_edits:?}").contains("result 7"), "payloads are no part of the audit log");
    fixture.finish().await;
}

/// What could go wrong: a payload is given to what cannot run, or the row is left without the one
/// that it had.
#[tokio::test(flavor = "multi_thread")]
async fn what_cannot_run_cannot_be_edited() {
    let fixture = InboxFixture::new().await;
    let consumer = fixture.simple("", "retry = { backoff_min_ms = 600000, jitter = 'none' }").await;
    let mut no_id = record(2, "", "");
    no_id.headers.clear();
    let log = [record(0, "done", ""), record(1, "later", "trap"), no_id];
    deliver(&fixture.host(&consumer), &log).await;
    let undecodable =
        fixture.rows().await.into_iter().find(|row| row.state().0 == "parked").unwrap().message_id;
    for (id, expected) in [
        ("done", "is completed; only"),
        ("later", "is failed_retryable; only"),
        (&undecodable, "was never understood"),
        ("nobody", "no message"),
    ] {
        let refused = edit(&fixture, id, "", None).await.unwrap_err();
        assert!(refused.contains(expected), "{id}: {refused}");
    }
    assert_eq!(fixture.number("SELECT count(*) FROM oncebox.inbox_edit").await, 0);
    let keepless = fixture.consumer(&consumer.tenant, "keepless", "payload = 'none'").await;
    deliver(&fixture.host(&keepless), &[record(0, "gone", "reject")]).await;
    let edit = Edit { payload: Vec::new(), reason: "a typo".to_owned(), as_of: None };
    let refused = fixture
        .control
        .messages()
        .edit_message("acme", "keepless", "gone", &edit)
        .await
        .unwrap_err()
        .to_string();
    assert!(refused.contains("has no record"), "{refused}");
    fixture.finish().await;
}
