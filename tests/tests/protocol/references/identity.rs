//! References as a part of what a message is: collisions, edits, references in payloads.

use super::*;

/// What could go wrong: a message with a known id and another reference counts as a duplicate, and
/// its object is lost; a redelivery counts as another payload; a light row has what was fetched.
#[tokio::test(flavor = "multi_thread")]
async fn another_reference_is_another_payload() {
    let mut fixture = InboxFixture::new().await;
    let server = S3Server::start().await;
    let tenant = tenant(&mut fixture, &server, Duration::from_secs(10)).await;
    server.put_key("in/a", Some("result 1"));
    server.put_key("in/b", Some("result 2"));
    for (name, more, collisions) in
        [("full", "payload = 'all'", 1), ("light", "inbox = 'light'\nlight = { result = true }", 0)]
    {
        let consumer = fixture.consumer(&tenant, name, &policy("", more)).await;
        let host = host(&fixture, &consumer);
        let log = [
            referring(0, "a", "s3://kept/in/a"),
            referring(1, "a", "s3://kept/in/a"),
            referring(2, "a", "s3://kept/in/b"),
        ];
        for record in &log {
            deliver(&host, std::slice::from_ref(record)).await;
        }
        let row = fixture.row(&consumer, "a").await;
        assert_eq!((row.status.as_str(), row.result), ("completed", Some(1.into())), "{name}");
        assert_eq!(fixture.effects(&consumer, "a").await, 1, "{name}");
        let collided = format!(
            "SELECT count(*) FROM oncebox.inbox WHERE reason = 'collision' AND consumer_id = {}",
            consumer.row.consumer_id
        );
        assert_eq!(fixture.number(collided).await, collisions, "{name}");
        if name == "light" {
            assert_eq!(row.payload, None);
        }
    }
    fixture.finish().await;
}

/// What could go wrong: an operator gives a message another payload, and the handler gets the
/// object; or a reference in the payload cannot be mended.
#[tokio::test(flavor = "multi_thread")]
async fn an_edit_that_no_handler_would_get_is_refused() {
    let mut fixture = InboxFixture::new().await;
    let server = S3Server::start().await;
    let tenant = tenant(&mut fixture, &server, Duration::from_secs(10)).await;
    server.put_key("in/a", Some("result 1"));
    let in_payload = "payload = 'all'\nreference = { store = 'docs', source = { json_pointer = \
        '/ref' } }";
    let header = fixture.consumer(&tenant, "header", &policy("", "payload = 'all'")).await;
    let pointer = fixture.consumer(&tenant, "pointer", in_payload).await;
    let edit = async |consumer: &str, id: &str, payload: &str| {
        let edit = Edit { payload: payload.into(), reason: "a typo".to_owned(), as_of: None };
        let edited = fixture.control.messages().edit_message("acme", consumer, id, &edit).await;
        edited.map_err(|error| error.to_string())
    };
    let host = host(&fixture, &header);
    deliver(&host, &[referring(0, "a", "s3://kept/in/gone"), record(1, "own", "reject")]).await;
    let refused = edit("header", "a", "result 2").await.unwrap_err();
    assert!(refused.contains("by the header `ref`") && refused.contains("redrive"), "{refused}");
    assert_eq!(fixture.row(&header, "a").await.state().0, "parked");
    edit("header", "own", "result 2").await.unwrap();
    fixture.retry_until_settled(&host).await;
    assert_eq!(fixture.row(&header, "own").await.result, Some(2.into()));

    let host = self::host(&fixture, &pointer);
    let log = [
        record(0, "a", r#"{"ref":"s3://kept/in/a"}"#),
        record(1, "wrong", r#"{"ref":"s3://kept/in/gone"}"#),
        record(2, "no JSON", "result 1"),
    ];
    deliver(&host, &log).await;
    assert_eq!(fixture.row(&pointer, "a").await.result, Some(1.into()));
    let state = ("parked", Some("reference_malformed"), 1);
    assert_eq!(fixture.row(&pointer, "no JSON").await.state(), state);
    assert_eq!(fixture.row(&pointer, "wrong").await.state().0, "parked");
    edit("pointer", "wrong", r#"{"ref":"s3://kept/in/a"}"#).await.unwrap();
    fixture.retry_until_settled(&host).await;
    assert_eq!(fixture.row(&pointer, "wrong").await.result, Some(1.into()));
    fixture.finish().await;
}
