//! Archived messages of a consumer whose policy masks parts of them. What could go wrong: the
//! archive shows what the inbox does not, in a payload or in one that an edit replaced; or all of a
//! message whose policy went with its consumer.

use std::sync::Arc;

use axum::{
    body::Body,
    http::{Request, StatusCode},
};
use oncebox_api::{Api, Checking, Components, Limits, Mode, Principal, Unchecked};
use oncebox_model::policy::{Masking, Policy};
use serde_json::Value;
use tower::ServiceExt;

use super::*;

const SECRET: &str = "hunter2";
const PAYLOAD: &str = r#"{"card": "hunter2", "n": 1}"#;
const MASKED: &str = r#"{"card": "***", "n": 1}"#;

/// Nothing is uploaded here.
struct NoComponents;

impl Components for NoComponents {
    fn check(&self, _: Bytes) -> Checking<'_> {
        Box::pin(async { Err(Unchecked::Refused(Vec::new())) })
    }

    fn submit(&self, _: [u8; 32]) {}

    fn check_policy(&self, _: &str, _: &str, _: &Policy) -> Result<(), String> {
        Ok(())
    }
}

/// The archived message of an id, as the API shows it to whoever may see most.
async fn shown(control: &Control, id: &str) -> Value {
    let api = Api::new(control.clone(), Arc::new(NoComponents), Limits::default(), Mode::Tokens);
    let path = format!("/v1/tenants/acme/archive/messages/{id}?payload=true");
    let request = Request::get(path).extension(Principal::local("test")).body(Body::empty());
    let response = oncebox_api::router(api).oneshot(request.unwrap()).await.unwrap();
    assert_eq!(response.status(), StatusCode::OK);
    let body = axum::body::to_bytes(response.into_body(), 1 << 20).await.unwrap();
    let mut found: Vec<Value> = serde_json::from_slice(&body).unwrap();
    assert_eq!(found.len(), 1);
    found.remove(0)
}

#[tokio::test(flavor = "multi_thread")]
async fn an_archived_message_is_masked_as_its_policy_says_now() {
    let fixture = InboxFixture::new().await;
    let directory = TempDir::new("archive");
    let control = archiving(&fixture, &folder(&directory));
    let consumer = fixture.simple("", "").await;
    let gone = fixture.consumer(&consumer.tenant, "gone", "").await;
    let payload = format!("'{PAYLOAD}'");
    completed(&fixture, &gone, "'g' || n", 1..2, &payload).await;
    completed(&fixture, &consumer, "'m' || n", 1..2, &payload).await;
    fixture
        .execute(format!(
            "UPDATE oncebox.inbox SET key = '{SECRET}', ordering_key = '{SECRET}'; \
             INSERT INTO oncebox.inbox_edit (consumer_id, message_id, edit_number, payload, at) \
                VALUES ({}, 'm1', 1, '{PAYLOAD}', now() - interval '12 days')",
            consumer.row.consumer_id
        ))
        .await;
    retain_one(&control).await;

    let whole = shown(&control, "m1").await;
    assert_eq!((&whole["payload"], &whole["masked"]), (&json!(PAYLOAD), &json!(false)));
    assert_eq!(whole["edits"][0]["payload"], PAYLOAD);
    let masking = Masking { fields: vec!["/card".to_owned()], key: true, ..Masking::default() };
    let policy = Policy { masking, ..consumer.policy.clone() };
    let change = control.consumers().set_policy("acme", "orders", policy, true).await.unwrap();
    assert!(change.is_made, "{change:?}");
    let masked = shown(&control, "m1").await;
    assert!(!masked.to_string().contains(SECRET), "{masked}");
    assert_eq!((&masked["payload"], &masked["masked"]), (&json!(MASKED), &json!(true)));
    assert_eq!((&masked["key"], &masked["ordering_key"]), (&json!("***"), &json!("***")));
    assert_eq!(masked["edits"][0]["payload"], MASKED);

    assert_eq!(shown(&control, "g1").await["payload"], PAYLOAD);
    fixture.execute("DELETE FROM oncebox.consumer WHERE name = 'gone'").await;
    for is_made_again in [false, true] {
        if is_made_again {
            fixture.consumer(&consumer.tenant, "gone", "").await;
        }
        let unknown = shown(&control, "g1").await;
        assert!(!unknown.to_string().contains(SECRET), "{unknown}");
        assert_eq!((&unknown["payload"], &unknown["masked"]), (&json!("***"), &json!(true)));
    }
    fixture.finish().await;
}
