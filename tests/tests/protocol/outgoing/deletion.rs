//! What is deleted or erased takes its outgoing messages along.

use oncebox_control::{
    Consumer, DeletionStep, DesiredState, ErasureProof, ErasureRequest, ErasureTarget,
};
use oncebox_tests::{
    inbox::{InboxFixture, TestConsumer, deliver},
    outgoing::{StepRelay, caused_by, emitting, emitting_host, outgoing},
};
use serde_json::json;

async fn desired(fixture: &InboxFixture, consumer: &TestConsumer) -> DesiredState {
    let states = fixture.control.reconciliation().desired_states().await.unwrap();
    states.into_iter().find(|state| state.consumer_id == consumer.row.consumer_id).unwrap()
}

/// Deletes a consumer as hosts do it.
async fn delete(fixture: &InboxFixture, consumer: &TestConsumer) {
    let Consumer { tenant, name, .. } = &consumer.row;
    fixture.control.consumers().delete(tenant, name).await.unwrap();
    let desired = desired(fixture, consumer).await;
    for _ in 0..100 {
        match fixture.control.reconciliation().delete_some(&desired).await.unwrap() {
            DeletionStep::None => return,
            DeletionStep::Waits(hosts) => panic!("no host runs it, but {hosts:?}"),
            DeletionStep::Removed(_) => {}
            DeletionStep::Last(last) => return last.remove(json!({})).await.unwrap(),
        }
    }
    panic!("the deletion of a consumer does not end");
}

/// What could go wrong: a consumer or a tenant that was deleted still sends, holds lanes of others,
/// or keeps payloads.
#[tokio::test(flavor = "multi_thread")]
async fn what_is_deleted_sends_nothing_more() {
    let fixture = InboxFixture::new().await;
    let tenant = fixture.tenant("acme", "").await;
    let stranger = fixture.tenant("other", "").await;
    let mut consumers = Vec::new();
    for (tenant, name) in [(&tenant, "orders"), (&tenant, "beside"), (&stranger, "orders")] {
        let consumer = fixture.consumer(tenant, name, "").await;
        let log = [
            emitting(0, "a", &["emit kafka:orders.out key=k", "emit inbox:billing after=60000"]),
            emitting(1, "b", &["emit kafka:orders.out key=k token=t"]),
        ];
        deliver(&emitting_host(&fixture, &consumer), &log).await;
        consumers.push(consumer);
    }
    let left = async || {
        let rows = outgoing(&fixture).await;
        let of = |consumer: &TestConsumer| {
            rows.iter().filter(|row| row.consumer_id == consumer.row.consumer_id).count()
        };
        consumers.iter().map(of).collect::<Vec<_>>()
    };
    assert_eq!(left().await, [3, 3, 3]);
    delete(&fixture, &consumers[0]).await;
    assert_eq!(left().await, [0, 3, 3]);
    let deleted = fixture.control.tenants().delete("other").await.unwrap();
    assert!(fixture.control.tenants().remove(&deleted).await.unwrap());
    assert_eq!(left().await, [0, 3, 0]);
    fixture
        .execute(format!("DELETE FROM {}.effect WHERE consumer = 'orders'", tenant.schema_name))
        .await;
    fixture.finish().await;
}

fn of_id(id: &str) -> ErasureRequest {
    let target = ErasureTarget::MessageId(id.to_owned());
    ErasureRequest { target, consumer: None, reason: "they asked for it".to_owned() }
}

/// Repeats the request until there is a proof; none where there is none after some calls.
async fn erase(fixture: &InboxFixture, id: &str) -> Option<ErasureProof> {
    for _ in 0..20 {
        let progress = fixture.control.erasures().erase("acme", &of_id(id)).await.unwrap();
        if progress.proof.is_some() {
            return progress.proof;
        }
    }
    None
}

/// What could go wrong: the payload of an erased message lives on in what it emitted; or an erasure
/// says that all is gone while a message with the payload is still to be sent; or it erases what
/// another message emitted.
#[tokio::test(flavor = "multi_thread")]
async fn an_erasure_reaches_what_its_message_emitted() {
    const READABLE: &str = "SELECT count(*) FROM oncebox.outgoing WHERE message_id = 'a' AND \
        (convert_from(payload, 'UTF8') LIKE '%secret%' OR convert_from(key, 'UTF8') LIKE \
        '%secret%' OR position('note of'::bytea IN headers) > 0)";
    let fixture = InboxFixture::new().await;
    let consumer = fixture.simple("", "payload = 'all'").await;
    let emit = "emit kafka:orders.out key=secret-key payload=secret-payload";
    let log = [emitting(0, "a", &[emit]), emitting(1, "b", &[emit])];
    deliver(&emitting_host(&fixture, &consumer), &log).await;
    assert_eq!(fixture.number(READABLE).await, 1);
    fixture
        .execute(
            "UPDATE oncebox.outgoing SET status = 'completed', next_attempt_at = NULL, settled_at \
                = now()",
        )
        .await;
    assert!(erase(&fixture, "a").await.is_some(), "the erasure does not end");
    assert_eq!(fixture.number(READABLE).await, 0, "what was emitted is still readable");
    let kept = caused_by(&fixture, "b").await;
    assert_eq!(kept.payload.as_deref(), Some(&b"secret-payload"[..]), "it was another's");
    assert_eq!(kept.key.as_deref(), Some(&b"secret-key"[..]));
    fixture.finish().await;
}

/// What could go wrong: an erasure ends with a proof while its message's payload is still to be
/// sent, or is being sent, and a relay sends it afterwards; or it breaks what a relay is doing.
#[tokio::test(flavor = "multi_thread")]
async fn nothing_of_an_erased_message_is_sent_after_the_proof() {
    const TO: &str = "kafka:orders.out";
    let fixture = InboxFixture::new().await;
    let consumer = fixture.simple("", "payload = 'all'").await;
    let relay = StepRelay::new(&fixture, "relay", &[&consumer]);
    let line = |more: &str| format!("emit {TO} key=k payload=secret {more}");
    let (now, later) = (line(""), line("after=3600000"));
    let log = [emitting(0, "leased", &[&now]), emitting(1, "waiting", &[&later])];
    deliver(&emitting_host(&fixture, &consumer), &log).await;

    let leased = relay.lease(TO, 10).await;
    assert_eq!(leased.len(), 1);
    let held = fixture.control.erasures().erase("acme", &of_id("leased")).await.unwrap();
    assert_eq!(held.proof, None, "a proof while a relay sends the payload");
    let row = caused_by(&fixture, "leased").await;
    assert_eq!(row.payload.as_deref(), Some(&b"secret"[..]), "a relay lost what it sends");
    assert_eq!(relay.mark(&leased, "completed").await, 1);
    assert!(erase(&fixture, "leased").await.is_some(), "it was sent, so that nothing holds it");
    assert!(erase(&fixture, "waiting").await.is_some(), "nothing is sent now");
    for (id, status) in [("leased", "completed"), ("waiting", "discarded")] {
        let row = caused_by(&fixture, id).await;
        assert_eq!((row.status.as_str(), row.payload, row.key), (status, None, None), "`{id}`");
    }
    fixture
        .execute("UPDATE oncebox.outgoing SET due_at = now() WHERE message_id = 'waiting'")
        .await;
    assert_eq!(relay.lease(TO, 10).await, [], "an erased message is sent");
    fixture.finish().await;
}
