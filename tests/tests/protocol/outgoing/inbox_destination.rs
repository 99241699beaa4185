//! Messages from one consumer to another of the same tenant, with the relay of a host: each is in
//! the other's inbox once, in the order of its key.

use std::collections::{BTreeMap, BTreeSet};

use oncebox_control::{JobFilter, OutgoingAction};
use oncebox_model::record::Record;
use oncebox_tests::{
    inbox::{InboxFixture, TestConsumer, deliver},
    job::{carry_out, outgoing_job},
    outgoing::{OutgoingRow, check_emitted, derived_id, emitting, emitting_host, outgoing},
    relay::TestRelay,
    wait::DEADLINE,
};
use rand::{Rng, SeedableRng, rngs::StdRng};
use serde_json::json;
use tokio::time::{Duration, Instant, sleep};

use super::QUICK;

/// A fixture whose tenant may send to its own consumers.
async fn allowed(fixture: &InboxFixture, destinations: &[&str]) {
    let limits = json!({ "destinations_allowed": destinations });
    fixture.control.tenants().set_limits("acme", limits.as_object().unwrap()).await.unwrap();
}

/// Waits until every outgoing message that these hold for is as they say.
async fn until(fixture: &InboxFixture, what: &str, is_so: impl Fn(&[OutgoingRow]) -> bool) {
    let deadline = Instant::now() + DEADLINE;
    loop {
        let rows = outgoing(fixture).await;
        if is_so(&rows) {
            return;
        }
        assert!(Instant::now() < deadline, "never {what}: {rows:#?}");
        sleep(Duration::from_millis(20)).await;
    }
}

/// The messages in a consumer's inbox, in the order in which those of a key are to run.
async fn inbox_of(fixture: &InboxFixture, consumer: &TestConsumer) -> Vec<(String, Vec<u8>)> {
    sqlx::query_as(
        "SELECT message_id, coalesce(ordering_key, '') FROM oncebox.inbox WHERE consumer_id = $1 \
            ORDER BY ordering_position, \"offset\"",
    )
    .bind(consumer.row.consumer_id)
    .fetch_all(&fixture.pool)
    .await
    .unwrap()
}

/// Messages with emits of four keys.
fn log(rng: &mut StdRng, first: i64, messages: i64) -> Vec<Record> {
    let of = |number: i64, rng: &mut StdRng| {
        let line = |rng: &mut StdRng| {
            format!("emit inbox:billing key=k{} payload=#", rng.random_range(0..4))
        };
        let lines: Vec<_> = (0..rng.random_range(1..4)).map(|_| line(rng)).collect();
        let lines: Vec<_> = lines.iter().map(String::as_str).collect();
        emitting(number, &format!("m{number}"), &lines)
    };
    (first..first + messages).map(|number| of(number, rng)).collect()
}

/// What could go wrong: a message is in the other inbox twice or not at all when a relay dies at
/// its delivery, or messages of a key are in another order. S0-001, S0-025, S1-042, S3-020.
#[tokio::test(flavor = "multi_thread")]
async fn what_two_relays_deliver_to_an_inbox_is_there_once_and_in_order() {
    let fixture = InboxFixture::new().await;
    let consumer = fixture.simple("", QUICK).await;
    let billing = fixture.consumer(&consumer.tenant, "billing", "order = 'key'").await;
    allowed(&fixture, &["inbox:*"]).await;
    let host = emitting_host(&fixture, &consumer);
    let seed = rand::random();
    println!("seed {seed}");
    let mut rng = StdRng::seed_from_u64(seed);
    let (mut all, stays) = (Vec::new(), TestRelay::start(&fixture, "stays").await);
    for round in 0..4 {
        let mortal = TestRelay::start(&fixture, &format!("mortal-{round}")).await;
        let log = log(&mut rng, 40 * round, 40);
        deliver(&host, &log).await;
        all.extend(log);
        for relay in [&mortal, &stays] {
            relay.wake(consumer.tenant.tenant_id, "inbox:billing");
        }
        sleep(Duration::from_millis(rng.random_range(0..120))).await;
        mortal.kill(&fixture).await;
    }
    until(&fixture, "sent", |rows| rows.iter().all(|row| row.settled)).await;
    stays.stop().await;
    check_emitted(&fixture, &consumer, &all).await;
    let rows = outgoing(&fixture).await;
    let arrived = inbox_of(&fixture, &billing).await;
    let ids: BTreeSet<_> = arrived.iter().map(|(id, _)| id).collect();
    let expected: BTreeSet<_> = rows.iter().map(|row| &row.id).collect();
    // S0-001, S0-025, S1-042, S3-020.
    assert_eq!(ids, expected, "messages are lost or made up");
    assert_eq!(arrived.len(), rows.len(), "a message is there twice");
    assert_eq!(by_key(arrived), by_key(emitted_in_order(&rows)), "a message passed one of its key");
    // Each takes effect once, as a message from a broker does.
    fixture.retry_until_settled(&fixture.host(&billing)).await;
    fixture.finish().await;
}

/// Ids and keys in the order of the emits.
fn emitted_in_order(rows: &[OutgoingRow]) -> Vec<(String, Vec<u8>)> {
    rows.iter().map(|row| (row.id.clone(), row.key.clone().unwrap_or_default())).collect()
}

fn by_key(messages: Vec<(String, Vec<u8>)>) -> BTreeMap<Vec<u8>, Vec<String>> {
    let mut keys: BTreeMap<_, Vec<_>> = BTreeMap::new();
    for (id, key) in messages {
        keys.entry(key).or_default().push(id);
    }
    keys
}

/// What could go wrong: a delivery that came before, by another way or before a relay forgot it, is
/// made again.
#[tokio::test(flavor = "multi_thread")]
async fn a_message_that_the_inbox_knows_counts_as_delivered() {
    let fixture = InboxFixture::new().await;
    let consumer = fixture.simple("", QUICK).await;
    let billing = fixture.consumer(&consumer.tenant, "billing", "").await;
    allowed(&fixture, &["inbox:billing"]).await;
    let id = derived_id("acme", "orders", "a", 0);
    deliver(&fixture.host(&billing), &[emitting(0, &id, &["#"])]).await;
    let line = ["emit inbox:billing payload=#"];
    deliver(&emitting_host(&fixture, &consumer), &[emitting(0, "a", &line)]).await;
    let relay = TestRelay::start(&fixture, "relay").await;
    until(&fixture, "sent", |rows| rows[0].settled).await;
    relay.stop().await;
    assert_eq!(outgoing(&fixture).await[0].state(), ("completed", None));
    // S0-003.
    assert_eq!(fixture.effects(&billing, &id).await, 1);
    assert_eq!(fixture.script.runs(&id).len(), 1);
    fixture.finish().await;
}

async fn redrive(fixture: &InboxFixture) -> i64 {
    let redrive = outgoing_job(OutgoingAction::Redrive, JobFilter::default());
    carry_out(&fixture.control, "acme", &redrive).await.unwrap().changed
}

fn states(rows: &[OutgoingRow]) -> Vec<(&str, Option<&str>)> {
    rows.iter().map(OutgoingRow::state).collect()
}

/// What could go wrong: a message to nobody is tried for ever, or dropped; it holds its lane where
/// the consumer says `go_on`, or holds nothing where it says `stop`; or it is lost when an operator
/// has mended what was wrong.
#[tokio::test(flavor = "multi_thread")]
async fn a_message_to_no_consumer_is_parked_until_there_is_one() {
    for (policy, stops) in [("", false), ("[outgoing]\non_parked = 'stop'", true)] {
        println!("policy `{policy}`");
        let fixture = InboxFixture::new().await;
        let consumer = fixture.simple("", &format!("{QUICK}\n{policy}")).await;
        allowed(&fixture, &["inbox:*"]).await;
        let line = "emit inbox:billing key=k payload=#";
        let log = [emitting(0, "a", &[line, line]), emitting(1, "b", &[line])];
        let host = emitting_host(&fixture, &consumer);
        deliver(&host, &log).await;
        let relay = TestRelay::start(&fixture, "relay").await;
        let parked = ("parked", Some("no_such_consumer"));
        let expected = if stops {
            vec![parked, ("received", None), ("received", None)]
        } else {
            vec![parked; 3]
        };
        until(&fixture, "parked", |rows| states(rows) == expected).await;
        // Another key is no part of the lane. When it is done, the relay has looked again.
        let other = ["emit inbox:billing key=other payload=#"];
        deliver(&host, &[emitting(2, "c", &other)]).await;
        until(&fixture, "parked", |rows| rows[3].state() == parked).await;
        assert_eq!(states(&outgoing(&fixture).await[..3]), expected);

        let billing = fixture.consumer(&consumer.tenant, "billing", "order = 'key'").await;
        assert_eq!(redrive(&fixture).await, if stops { 2 } else { 4 });
        until(&fixture, "sent", |rows| rows.iter().all(|row| row.settled)).await;
        relay.stop().await;
        let rows = outgoing(&fixture).await;
        assert_eq!(states(&rows), vec![("completed", None); 4]);
        let arrived = inbox_of(&fixture, &billing).await;
        assert_eq!(by_key(arrived), by_key(emitted_in_order(&rows)), "a message passed another");
        fixture.retry_until_settled(&fixture.host(&billing)).await;
        fixture.finish().await;
    }
}

/// What could go wrong: what an operator forbids after it was emitted is sent, tried for ever or
/// dropped. S0-047.
#[tokio::test(flavor = "multi_thread")]
async fn what_is_no_longer_allowed_is_parked() {
    let fixture = InboxFixture::new().await;
    let consumer = fixture.simple("", QUICK).await;
    let billing = fixture.consumer(&consumer.tenant, "billing", "").await;
    allowed(&fixture, &["inbox:billing", "kafka:orders.*"]).await;
    let lines = ["emit inbox:billing payload=#", "emit kafka:orders.out payload=#"];
    deliver(&emitting_host(&fixture, &consumer), &[emitting(0, "a", &lines)]).await;
    allowed(&fixture, &["inbox:billings", "kafka:order"]).await;
    let relay = TestRelay::start(&fixture, "relay").await;
    let parked = vec![("parked", Some("not_allowed")); 2];
    until(&fixture, "parked", |rows| states(rows) == parked).await;
    // S0-047.
    assert!(inbox_of(&fixture, &billing).await.is_empty(), "it was sent");
    allowed(&fixture, &["inbox:billing"]).await;
    assert_eq!(redrive(&fixture).await, 2);
    let expected = vec![("completed", None), ("parked", Some("not_allowed"))];
    until(&fixture, "sent and parked", |rows| states(rows) == expected).await;
    relay.stop().await;
    assert_eq!(inbox_of(&fixture, &billing).await.len(), 1);
    fixture.retry_until_settled(&fixture.host(&billing)).await;
    fixture.finish().await;
}

/// What could go wrong: a suspended tenant sends, or what it held back is not sent afterwards.
#[tokio::test(flavor = "multi_thread")]
async fn a_suspended_tenant_sends_nothing_until_it_is_resumed() {
    let fixture = InboxFixture::new().await;
    let consumer = fixture.simple("", QUICK).await;
    let billing = fixture.consumer(&consumer.tenant, "billing", "").await;
    let neighbour = fixture.tenant("neighbour", "").await;
    let theirs = fixture.consumer(&neighbour, "orders", "").await;
    let beside = fixture.consumer(&neighbour, "billing", "").await;
    let limits = json!({ "destinations_allowed": ["inbox:*"] });
    for tenant in ["acme", "neighbour"] {
        let limits = limits.as_object().unwrap();
        fixture.control.tenants().set_limits(tenant, limits).await.unwrap();
    }
    let line = ["emit inbox:billing payload=#"];
    deliver(&emitting_host(&fixture, &consumer), &[emitting(0, "a", &line)]).await;
    fixture.control.tenants().suspend("acme").await.unwrap();
    let relay = TestRelay::start(&fixture, "relay").await;
    // The neighbour's is sent, so that the relay is at work.
    deliver(&emitting_host(&fixture, &theirs), &[emitting(0, "a", &line)]).await;
    until(&fixture, "sent", |rows| rows[1].settled).await;
    assert_eq!(outgoing(&fixture).await[0].state(), ("received", None));
    assert!(inbox_of(&fixture, &billing).await.is_empty());
    fixture.control.tenants().resume("acme").await.unwrap();
    until(&fixture, "sent", |rows| rows[0].settled).await;
    relay.stop().await;
    for consumer in [&billing, &beside] {
        assert_eq!(inbox_of(&fixture, consumer).await.len(), 1);
        fixture.retry_until_settled(&fixture.host(consumer)).await;
    }
    fixture.finish().await;
}
