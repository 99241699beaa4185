//! What a look of a relay finds, however many destinations a tenant makes up.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::{Duration, Instant},
};

use oncebox_tests::{
    inbox::{InboxFixture, TestConsumer, deliver},
    outgoing::{emitting, emitting_host},
    relay::TestRelay,
    wait::DEADLINE,
};
use tokio::time::sleep;

const STEPS: i32 = 50;
/// Destinations of one consumer, several times as many as a look steps over.
const DESTINATIONS: i32 = 180;

/// The destinations at which each consumer was left.
type Afters = BTreeMap<i32, String>;

/// Returns the destinations with something due, and where the look left consumers.
async fn look(fixture: &InboxFixture, afters: &Afters) -> (BTreeSet<String>, Afters) {
    const LOOK: &str = "SELECT consumer, target, is_due, is_cut \
        FROM oncebox.outgoing_due($1, 0, $2, $3)";
    let consumers: Vec<i32> = afters.keys().copied().collect();
    let behind: Vec<&str> = afters.values().map(String::as_str).collect();
    let query = sqlx::query_as(LOOK).bind(STEPS).bind(consumers).bind(behind);
    let found: Vec<(i32, String, bool, bool)> = query.fetch_all(&fixture.pool).await.unwrap();
    let cuts = found.iter().filter(|(.., is_cut)| *is_cut);
    let cuts = cuts.map(|(consumer, target, ..)| (*consumer, target.clone())).collect();
    let due = found.into_iter().filter(|(_, _, is_due, _)| *is_due);
    (due.map(|(_, target, ..)| target).collect(), cuts)
}

/// Makes one outgoing message of the consumer many, each for a destination of its own.
async fn multiply(fixture: &InboxFixture, consumer: &TestConsumer, destinations: i32) {
    let copies = format!(
        "INSERT INTO oncebox.outgoing (consumer_id, message_id, ordinal, bucket, id, destination, \
            event_type, correlation_id, headers, payload, status, due_at, next_attempt_at) \
         SELECT consumer_id, message_id, n, bucket, id || n, destination || to_char(n, 'FM000'), \
            event_type, correlation_id, headers, payload, status, due_at, next_attempt_at \
         FROM oncebox.outgoing CROSS JOIN generate_series(1, {destinations} - 1) n \
         WHERE consumer_id = {}",
        consumer.row.consumer_id
    );
    fixture.execute(copies).await;
}

/// Makes the message for a destination due.
async fn make_due(fixture: &InboxFixture, destination: &str) {
    let due = format!(
        "UPDATE oncebox.outgoing SET due_at = now(), next_attempt_at = now() WHERE destination = \
            '{destination}'"
    );
    fixture.execute(due).await;
}

/// What could go wrong: a tenant that has made up thousands of destinations keeps all others
/// waiting, since a look steps over its own first; or one of them is never found behind the others,
/// above all where two consumers have very many.
#[tokio::test(flavor = "multi_thread")]
async fn a_consumer_with_very_many_destinations_keeps_no_other_waiting() {
    let fixture = InboxFixture::new().await;
    let a = fixture.simple("", "").await;
    let b = fixture.consumer(&a.tenant, "b", "").await;
    let last = fixture.consumer(&a.tenant, "last", "").await;
    for (consumer, line) in
        [(&a, "emit kafka:a- after=86400000"), (&b, "emit kafka:b- after=86400000")]
    {
        deliver(&emitting_host(&fixture, consumer), &[emitting(0, "timer", &[line])]).await;
        multiply(&fixture, consumer, DESTINATIONS).await;
    }
    deliver(&emitting_host(&fixture, &last), &[emitting(0, "now", &["emit kafka:z"])]).await;
    for destination in ["kafka:a-170", "kafka:b-170"] {
        make_due(&fixture, destination).await;
    }

    let (mut afters, mut found, mut looks) = (Afters::new(), BTreeSet::new(), 0);
    while !(found.contains("kafka:a-170") && found.contains("kafka:b-170")) {
        looks += 1;
        assert!(looks <= 1 + DESTINATIONS / STEPS, "one is never found: {found:?}");
        let (due, cuts) = look(&fixture, &afters).await;
        assert!(due.contains("kafka:z"), "the last consumer waits: {due:?}");
        assert_eq!(cuts.len(), 2, "both have more than a look steps over: {cuts:?}");
        afters = cuts;
        found.extend(due);
    }
    assert!(looks > 2, "one look steps over at most {STEPS}");
    // From there on it begins again at the first.
    make_due(&fixture, "kafka:a-").await;
    let behind = Afters::from([(a.row.consumer_id, "kafka:a-170".to_owned())]);
    let (due, _) = look(&fixture, &behind).await;
    assert!(due.contains("kafka:a-") && !due.contains("kafka:b-170"), "{due:?}");
    fixture.finish().await;
}

/// What could go wrong: of a tenant with very many destinations some are never sent to.
#[tokio::test(flavor = "multi_thread")]
async fn every_destination_of_a_crowd_gets_its_turn() {
    const CROWD: i32 = 600;
    let fixture = InboxFixture::new().await;
    let consumer = fixture.simple("", "").await;
    deliver(&emitting_host(&fixture, &consumer), &[emitting(0, "now", &["emit inbox:gone"])]).await;
    multiply(&fixture, &consumer, CROWD).await;
    let relay = TestRelay::start(&fixture, "a").await;
    let parked = "SELECT count(*) FROM oncebox.outgoing WHERE status = 'parked'";
    let deadline = Instant::now() + DEADLINE;
    while fixture.number(parked).await < i64::from(CROWD) {
        assert!(Instant::now() < deadline, "{} are parked", fixture.number(parked).await);
        sleep(Duration::from_millis(50)).await;
    }
    relay.stop().await;
    fixture.finish().await;
}
