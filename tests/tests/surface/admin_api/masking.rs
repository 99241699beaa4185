//! What a policy masks. What could go wrong: one of the ways out shows it, or shows it to a role; a
//! message is shown unmasked to somebody who may not see it, or without a trace; what was masked is
//! stored in the place of what it masks.

use std::collections::BTreeSet;

use axum::http::StatusCode;
use oncebox_api::{Limits, Mode, wire::Role};
use oncebox_model::headers;
use serde_json::{Value, json};

use super::{
    fixture::{Answer, ApiFixture},
    steps::{fill, operations},
};

/// A part of every text that is masked.
pub const SECRET: &str = "hunter2";

/// The payload of the message, whose amount no float holds.
pub const PAYLOAD: &str = r#"{"amount": 12345678901234567890.10, "card": {"number": "hunter2"},
    "owners": [{"email": "hunter2@example.com", "name": "Ada"}]}"#;
/// The same as everybody sees it.
pub const MASKED_PAYLOAD: &str = r#"{"amount": 12345678901234567890.10, "card": {"number": "***"},
    "owners": [{"email": "***", "name": "Ada"}]}"#;

const CONSUMER: &str = "/v1/tenants/acme/consumers/orders";
const MESSAGE: &str = "/v1/tenants/acme/consumers/orders/inbox/m%2F1";

/// Puts secrets into the messages of the fixture, and masks them for all roles below `role`.
pub async fn mask(fixture: &ApiFixture, role: &str) {
    let policy = json!({
        "topics": ["oncebox.acme.t"], "ack": "after_commit",
        "masking": { "fields": ["/card/number", "/owners/*/email"], "headers": ["X-Card"],
            "key": true, "role": role }
    });
    let change = json!({ "policy": policy, "accept": true });
    let set = send(fixture, "PUT", &format!("{CONSUMER}/policy"), &change, Role::Admin).await;
    assert_eq!(set.status, StatusCode::OK, "{set:?}");
    let encoded = headers::encode(&vec![
        ("x-card".to_owned(), SECRET.as_bytes().to_vec()),
        ("x-shop".to_owned(), b"Berlin".to_vec()),
    ]);
    let record = format!(
        "key = '{SECRET}', headers = '\\x{}', payload = convert_to('{PAYLOAD}', 'UTF8')",
        hex::encode(encoded)
    );
    fixture
        .execute(&format!(
            "UPDATE oncebox.inbox SET {record}, ordering_key = '{SECRET}' WHERE message_id = 'm/1'; \
             UPDATE oncebox.outgoing SET {record}, lane = 1, status = 'completed', \
                settled_at = now(), next_attempt_at = NULL, answer_status = 200, \
                answer = '{SECRET}', answer_is_whole = true"
        ))
        .await;
}

async fn send(fixture: &ApiFixture, method: &str, path: &str, body: &Value, role: Role) -> Answer {
    let token = fixture.token_of("acme", role);
    let body = body.to_string().into_bytes();
    fixture.send(method, path, body, "application/json", Some(&token)).await
}

/// The entries of the audit log about messages that were shown unmasked.
async fn unmaskings(fixture: &ApiFixture) -> Vec<Value> {
    let token = fixture.token_of("", Role::Admin);
    let path = "/v1/tenants/acme/audit?limit=1000";
    let audit = fixture.send("GET", path, Vec::new(), "", Some(&token)).await;
    let entries = audit.body.as_array().expect("entries").iter();
    entries.filter(|entry| entry["action"] == "inbox.unmask").cloned().collect()
}

/// Every operation that reads, with and without payloads, as every role.
#[tokio::test(flavor = "multi_thread")]
async fn no_way_out_shows_what_a_policy_masks() {
    let fixture = ApiFixture::new(Mode::Tokens, Limits::default()).await;
    mask(&fixture, "admin").await;
    let reads = operations().into_keys().filter(|(method, _)| method == "GET");
    let mut masked = BTreeSet::new();
    for (_, template) in reads {
        let path = fill(&template, 1);
        let tenant = if template.contains("{tenant}") { "acme" } else { "" };
        for role in Role::ALL {
            let token = fixture.token_of(tenant, role);
            for query in ["", "?payload=true"] {
                let path = format!("{path}{query}");
                let answer = fixture.send("GET", &path, Vec::new(), "", Some(&token)).await;
                let shown = answer.body.to_string();
                // S1-093.
                assert!(!shown.contains(SECRET), "{path} as {role}: {shown}");
                // The document of the API says what it stands for.
                if shown.contains("***") && template.starts_with("/v1/") {
                    assert!(shown.contains("\"masked\":true"), "{path}: {shown}");
                    masked.insert((template.clone(), role));
                }
            }
        }
    }
    let ways = [
        "/v1/tenants/{tenant}/consumers/{consumer}/inbox/{message_id}",
        "/v1/tenants/{tenant}/consumers/{consumer}/inbox/{message_id}/history",
        "/v1/tenants/{tenant}/consumers/{consumer}/export",
        "/v1/tenants/{tenant}/outgoing/messages/{id}",
    ];
    let ways = ways.iter().flat_map(|way| Role::ALL.map(|role| ((*way).to_owned(), role)));
    assert_eq!(masked, ways.collect());

    let path = format!("{MESSAGE}?payload=true");
    let shown = send(&fixture, "GET", &path, &Value::Null, Role::Viewer).await.body;
    assert_eq!(shown["payload"], MASKED_PAYLOAD);
    assert_eq!(shown["key"], "***");
    assert_eq!(shown["headers"], json!([["x-card", "***"], ["x-shop", "Berlin"]]));
    let out = format!("{}?payload=true", fill("/v1/tenants/{tenant}/outgoing/messages/{id}", 1));
    let out = send(&fixture, "GET", &out, &Value::Null, Role::Admin).await.body;
    assert_eq!((&out["payload"], &out["answer"]), (&json!(MASKED_PAYLOAD), &json!("***")));

    // A payload that cannot be looked into is masked as a whole.
    let raw = format!("UPDATE oncebox.inbox SET payload = '{SECRET}' WHERE message_id = 'm/1'");
    fixture.execute(&raw).await;
    let shown = send(&fixture, "GET", &path, &Value::Null, Role::Admin).await.body;
    assert_eq!(shown["payload"], "***");
    // So is one that was never understood: what a message has as a field stands elsewhere in it.
    let event = json!({ "specversion": "1.0", "data": { "card": { "number": SECRET } } });
    let raw = format!(
        "UPDATE oncebox.inbox SET message_id = 'undecodable:t/0/1', key = NULL, headers = '', \
            payload = '{event}' WHERE message_id = 'm/1'"
    );
    fixture.execute(&raw).await;
    let path = format!("{CONSUMER}/inbox/undecodable%3At%2F0%2F1?payload=true");
    let shown = send(&fixture, "GET", &path, &Value::Null, Role::Admin).await.body;
    assert_eq!((&shown["payload"], &shown["masked"]), (&json!("***"), &json!(true)), "{shown}");
    assert!(unmaskings(&fixture).await.is_empty(), "nobody asked for that");
    fixture.finish().await;
}

/// Who may, with which trace; and what is not shown where there can be none.
#[tokio::test(flavor = "multi_thread")]
async fn a_message_is_unmasked_for_a_role_and_leaves_a_trace() {
    let fixture = ApiFixture::new(Mode::Tokens, Limits::default()).await;
    mask(&fixture, "admin").await;
    let path = format!("{MESSAGE}/unmask");
    let why = json!({ "reason": "the card was refused" });
    let before = fixture.digest().await;
    for role in [Role::Viewer, Role::Operator, Role::Deployer] {
        let refused = send(&fixture, "POST", &path, &why, role).await;
        assert_eq!((refused.status, refused.code()), (StatusCode::FORBIDDEN, "forbidden"));
        assert_eq!(refused.detail().contains("masking.role"), role > Role::Viewer, "{refused:?}");
        assert!(!refused.body.to_string().contains(SECRET), "{refused:?}");
    }
    let absent = format!("{CONSUMER}/inbox/absent/unmask");
    let absent = send(&fixture, "POST", &absent, &why, Role::Admin).await;
    assert_eq!(absent.status, StatusCode::NOT_FOUND, "{absent:?}");
    let unsaid = send(&fixture, "POST", &path, &json!({ "reason": " " }), Role::Admin).await;
    assert_eq!(unsaid.status, StatusCode::BAD_REQUEST, "{unsaid:?}");
    let read = send(&fixture, "GET", &path, &Value::Null, Role::Admin).await;
    assert_eq!(read.status, StatusCode::METHOD_NOT_ALLOWED, "{read:?}");
    assert_eq!(fixture.digest().await, before, "what is refused leaves no trace");

    let shown = send(&fixture, "POST", &path, &why, Role::Admin).await;
    assert_eq!(shown.status, StatusCode::OK, "{shown:?}");
    assert_eq!(shown.body["payload"], PAYLOAD);
    assert_eq!((&shown.body["key"], &shown.body["masked"]), (&json!(SECRET), &json!(false)));
    assert_eq!(shown.body["headers"], json!([["x-card", SECRET], ["x-shop", "Berlin"]]));
    let entries = unmaskings(&fixture).await;
    assert_eq!(entries.len(), 1, "{entries:?}");
    assert_eq!(
        (&entries[0]["actor"], &entries[0]["subject"]),
        (&json!("acme-admin"), &json!("acme/orders"))
    );
    let details = json!({ "message_id": "m/1", "reason": "the card was refused" });
    assert_eq!(entries[0]["details"], details);

    mask(&fixture, "operator").await;
    let shown = send(&fixture, "POST", &path, &why, Role::Operator).await;
    assert_eq!(shown.body["payload"], PAYLOAD, "{shown:?}");
    assert_eq!(unmaskings(&fixture).await.len(), 2);

    fixture
        .execute(
            "ALTER TABLE oncebox.audit ADD CONSTRAINT no_entry CHECK (action <> 'inbox.unmask') \
                NOT VALID",
        )
        .await;
    let failed = send(&fixture, "POST", &path, &why, Role::Admin).await;
    assert!(failed.status.is_server_error(), "{failed:?}");
    assert!(!failed.body.to_string().contains(SECRET), "{failed:?}");
    fixture.finish().await;
}

/// A payload that was copied from a page is refused; one that was written anew is taken.
#[tokio::test(flavor = "multi_thread")]
async fn what_was_masked_is_not_stored() {
    let fixture = ApiFixture::new(Mode::Tokens, Limits::default()).await;
    mask(&fixture, "admin").await;
    let path = format!("{MESSAGE}/edit");
    let before = fixture.digest().await;
    for payload in [MASKED_PAYLOAD, r#"{"owners": [{}, {"email": "\u002a**"}]}"#, "***"] {
        let edit = json!({ "reason": "a typo", "payload": payload });
        let refused = send(&fixture, "POST", &path, &edit, Role::Admin).await;
        assert_eq!((refused.status, refused.code()), (StatusCode::BAD_REQUEST, "invalid"));
        assert!(refused.detail().contains("masking.fields"), "{refused:?}");
    }
    assert_eq!(fixture.digest().await, before);
    let edit = json!({ "reason": "a typo", "payload": PAYLOAD.replace("Ada", "***") });
    let taken = send(&fixture, "POST", &path, &edit, Role::Operator).await;
    assert_eq!(taken.status, StatusCode::OK, "{taken:?}");
    assert!(!taken.body.to_string().contains(SECRET), "{taken:?}");
    fixture.finish().await;
}
