//! The handler on a real PostgreSQL: `DATABASE_URL=… cargo test`.

use oncebox_guest::{
    Message, json, params,
    test::{Database, Outcome},
};

use super::commented;

const TABLES: &str = include_str!("../../github-schema.sql");

fn comment(id: &str) -> Message {
    let payload = json!({
        "action": "edited",
        "comment": { "id": 7, "html_url": "https://github.com/octo/r#7", "body": "Hm." },
        "repository": { "id": 42, "full_name": "octo/r" },
    });
    Message::new(id, "com.github.issue_comment", &payload)
}

/// What could go wrong: a comment is not told to both, or to one of them in an order of its own.
#[test]
fn a_comment_is_told_to_everyone_and_mailed() {
    let mut db = Database::from_env(TABLES);
    db.settings
        .insert("tell_to".into(), "kafka:github.acme.comments".into());
    assert_eq!(db.run(commented, &comment("m-1")), Outcome::ok(()));
    let [event, mail] = db.sent() else {
        panic!("{:?}", db.sent())
    };
    assert_eq!(
        (&*event.destination, &*event.event_type),
        ("kafka:github.acme.comments", "comment.edited")
    );
    assert_eq!(
        event.payload.as_deref(),
        Some(&br#"{"comment":7,"repository":42,"url":"https://github.com/octo/r#7"}"#[..])
    );
    assert_eq!(
        (&*mail.destination, &*mail.event_type),
        ("http:mail", "comment.mail")
    );
    assert_eq!(
        mail.payload.as_deref(),
        Some(&br#"{"text":"comment edited: https://github.com/octo/r#7","to":"octo/r"}"#[..])
    );
    for sent in [event, mail] {
        assert_eq!(sent.key.as_deref(), Some(&b"42"[..]));
    }
    let audited: Vec<(String, i64)> = db.query("SELECT event, repository FROM audit", params![]);
    assert_eq!(audited, [("issue_comment".to_owned(), 42)]);
}

/// What could go wrong: a webhook that is rejected tells anyone.
#[test]
fn a_comment_without_a_repository_sends_nothing() {
    let mut db = Database::from_env(TABLES);
    let payload = json!({ "action": "created", "comment": { "id": 7, "html_url": "u" } });
    let message = Message::new("m-1", "com.github.commit_comment", &payload);
    assert_eq!(
        db.run(commented, &message),
        Outcome::Reject("the payload names no repository".into())
    );
    assert!(db.sent().is_empty());
}
