//! A cancelled message is never sent, and a message that is sent was never cancelled.

use std::time::Duration;

use oncebox_tests::{
    inbox::{InboxFixture, TestConsumer, deliver},
    outgoing::{
        CancelTransaction, StepRelay, batch_emitting_host, caused_by, check_emitted, emitting,
        emitting_host, outgoing,
    },
};
use rand::{Rng, SeedableRng, rngs::StdRng};
use tokio::time::sleep;

use super::QUICK;

const TO: &str = "kafka:orders.out";

/// The statuses of what each of these messages caused.
async fn statuses(fixture: &InboxFixture, causes: &[&str]) -> Vec<String> {
    let mut statuses = Vec::new();
    for cause in causes {
        statuses.push(caused_by(fixture, cause).await.status);
    }
    statuses
}

/// What could go wrong: a cancel of a message that then fails stays; one of a message that
/// completes does not; or it withdraws what has another token, or another consumer's.
#[tokio::test(flavor = "multi_thread")]
async fn a_cancel_is_of_its_messages_transaction() {
    for batches in [false, true] {
        println!("batches: {batches}");
        let fixture = InboxFixture::new().await.unhurried();
        let consumer = fixture.simple("", QUICK).await;
        let beside = fixture.consumer(&consumer.tenant, "beside", QUICK).await;
        let host = if batches {
            batch_emitting_host(&fixture, &consumer)
        } else {
            emitting_host(&fixture, &consumer)
        };
        let emit = |token: &str| format!("emit {TO} after=3600000 token={token}");
        let (one, two) = (emit("one"), emit("two"));
        let log = [emitting(0, "a", &[&one]), emitting(1, "b", &[&two]), emitting(2, "c", &[&one])];
        deliver(&host, &log).await;
        deliver(&emitting_host(&fixture, &beside), &[emitting(0, "theirs", &[&one])]).await;

        // In the middle of messages that complete, so that savepoints undo it.
        let failing = [
            emitting(3, "d", &[]),
            emitting(4, "e", &["cancel one", "reject"]),
            emitting(5, "f", &["cancel one", "sql SELECT 1/0"]),
            emitting(6, "g", &["cancel one", "park"]),
            emitting(7, "h", &[]),
        ];
        deliver(&host, &failing).await;
        fixture.retry_until_settled(&host).await;
        let all = ["a", "b", "c", "theirs"];
        assert_eq!(statuses(&fixture, &all).await, ["received"; 4], "a cancel was not undone");

        deliver(&host, &[emitting(8, "i", &["cancel one", "before 2 other"])]).await;
        fixture.retry_until_settled(&host).await;
        assert_eq!(
            statuses(&fixture, &all).await,
            ["cancelled", "received", "cancelled", "received"],
            "a cancel is of its consumer and its token"
        );
        let row = caused_by(&fixture, "a").await;
        assert!(row.settled && !row.leased, "{row:?}");
        // A second time there is nothing.
        deliver(&host, &[emitting(9, "j", &["cancel one"])]).await;
        let mut again = CancelTransaction::begin(&fixture, &consumer).await;
        assert!(!again.cancel("one").await.unwrap(), "it was cancelled before");
        assert!(again.cancel("two").await.unwrap());
        again.roll_back().await;
        assert_eq!(caused_by(&fixture, "b").await.status, "received");
        check_emitted(&fixture, &consumer, &log).await;
        fixture.finish().await;
    }
}

/// What could go wrong: a message cancels what an earlier one of its transaction emitted, which has
/// no row yet, and it is sent; or the cancel of one that fails holds, or takes the emit along.
#[tokio::test(flavor = "multi_thread")]
async fn a_cancel_reaches_what_its_transaction_emitted() {
    let fixture = InboxFixture::new().await.unhurried();
    let consumer = fixture.simple("", QUICK).await;
    let emit = |token: &str| format!("emit {TO} after=3600000 token={token}");
    let (one, two, three) = (emit("one"), emit("two"), emit("three"));
    let log = [
        emitting(0, "a", &[&one]),
        emitting(1, "b", &["cancel one"]),
        emitting(2, "c", &[&two]),
        emitting(3, "d", &["cancel two", "reject"]),
        emitting(4, "e", &[&three, "park"]),
        emitting(5, "f", &["cancel three"]),
        emitting(6, "g", &[&one]),
    ];
    deliver(&emitting_host(&fixture, &consumer), &log).await;
    assert_eq!(
        statuses(&fixture, &["a", "c", "g"]).await,
        ["cancelled", "received", "received"],
        "a cancel is of what came before it, and of what completed"
    );
    check_emitted(&fixture, &consumer, &log).await;
    fixture.finish().await;
}

/// Emits one message with the token `t`, under a new id.
async fn emit_one(fixture: &InboxFixture, consumer: &TestConsumer, number: i64) -> String {
    let id = format!("m{number}");
    let line = format!("emit {TO} key=k token=t");
    deliver(&emitting_host(fixture, consumer), &[emitting(number, &id, &[&line])]).await;
    id
}

/// What could go wrong: a cancel waits for a relay or a relay for a cancel, or both have the
/// message. In either order, whoever comes first has it.
#[tokio::test(flavor = "multi_thread")]
async fn whoever_comes_first_has_the_message() {
    let fixture = InboxFixture::new().await;
    let consumer = fixture.simple("", "").await;
    let relay = StepRelay::new(&fixture, "relay", &[&consumer]);

    // The cancel first, and it commits.
    let id = emit_one(&fixture, &consumer, 0).await;
    let mut cancelling = CancelTransaction::begin(&fixture, &consumer).await;
    assert!(cancelling.cancel("t").await.unwrap());
    assert_eq!(relay.lease(TO, 10).await, [], "a message that is being cancelled is leased");
    cancelling.commit().await;
    assert_eq!(relay.lease(TO, 10).await, [], "a cancelled message is leased");
    assert_eq!(caused_by(&fixture, &id).await.status, "cancelled");

    // The cancel first, and it is undone.
    let id = emit_one(&fixture, &consumer, 1).await;
    let mut cancelling = CancelTransaction::begin(&fixture, &consumer).await;
    assert!(cancelling.cancel("t").await.unwrap());
    assert_eq!(relay.lease(TO, 10).await, []);
    cancelling.roll_back().await;
    let leased = relay.lease(TO, 10).await;
    assert_eq!(leased.len(), 1, "a cancel that was undone keeps its message back");
    assert_eq!(relay.mark(&leased, "completed").await, 1);
    assert_eq!(caused_by(&fixture, &id).await.state(), ("completed", None));

    // The relay first: while it leases, while it sends, and after it sent.
    let id = emit_one(&fixture, &consumer, 2).await;
    let mut leasing = fixture.pool.begin().await.unwrap();
    let lease = sqlx::AssertSqlSafe(relay.lease_statement(TO, 10));
    sqlx::query(lease).execute(&mut *leasing).await.unwrap();
    let mut cancelling = CancelTransaction::begin(&fixture, &consumer).await;
    assert!(!cancelling.cancel("t").await.unwrap(), "it is being leased");
    leasing.commit().await.unwrap();
    assert!(!cancelling.cancel("t").await.unwrap(), "it is being sent");
    cancelling.commit().await;
    assert_eq!(caused_by(&fixture, &id).await.status, "in_progress");
    relay.dies().await;
    assert_eq!(relay.reclaim().await, 1);
    let mut cancelling = CancelTransaction::begin(&fixture, &consumer).await;
    assert!(!cancelling.cancel("t").await.unwrap(), "it may have arrived");
    cancelling.commit().await;
    let leased = relay.lease(TO, 10).await;
    assert_eq!(relay.mark(&leased, "completed").await, 1);
    let mut cancelling = CancelTransaction::begin(&fixture, &consumer).await;
    assert!(!cancelling.cancel("t").await.unwrap(), "it was sent");
    cancelling.commit().await;
    assert_eq!(caused_by(&fixture, &id).await.status, "completed");

    // One that its destination refused has not arrived, and waits for another attempt.
    let id = emit_one(&fixture, &consumer, 3).await;
    let leased = relay.lease(TO, 10).await;
    assert_eq!(relay.mark(&leased, "failed_retryable").await, 1);
    let mut cancelling = CancelTransaction::begin(&fixture, &consumer).await;
    assert!(cancelling.cancel("t").await.unwrap(), "it was refused");
    cancelling.commit().await;
    assert_eq!(caused_by(&fixture, &id).await.state(), ("cancelled", None));
    fixture.finish().await;
}

/// What could go wrong: some meeting of a cancel and a relay that nobody thought of, after which a
/// message is sent and cancelled, or neither. S0-025.
#[tokio::test(flavor = "multi_thread")]
async fn a_message_is_cancelled_or_sent_and_never_both() {
    let fixture = InboxFixture::new().await;
    let consumer = fixture.simple("", "").await;
    let relays = ["one", "other"].map(|name| StepRelay::new(&fixture, name, &[&consumer]));
    let (mut cancelled, mut sent) = (0, 0);
    for seed in 0..60 {
        let mut rng = StdRng::seed_from_u64(seed);
        let id = emit_one(&fixture, &consumer, 100 + seed as i64).await;
        let mut cancelling = CancelTransaction::begin(&fixture, &consumer).await;
        // So that this session has planned the statement, as those of the relays have.
        assert!(!cancelling.cancel("of nothing").await.unwrap());
        // Half of the meetings have one end alone, so that there are both however fast this runs.
        let (commits, comes_first) = match seed % 4 {
            0 => (true, true),
            1 => (false, rng.random_bool(0.5)),
            _ => (rng.random_bool(0.7), false),
        };
        let early = comes_first && cancelling.cancel("t").await.unwrap();
        let [before, between, first, second] =
            [0; 4].map(|_| Duration::from_micros(rng.random_range(0..2_500)));
        let cancel = async {
            sleep(before).await;
            let found = cancelling.cancel("t").await.unwrap() || early;
            sleep(between).await;
            if commits {
                cancelling.commit().await;
            } else {
                cancelling.roll_back().await;
            }
            found
        };
        let lease = async |relay: &StepRelay, pause| {
            sleep(pause).await;
            relay.lease(TO, 10).await
        };
        let (found, one, other) =
            tokio::join!(cancel, lease(&relays[0], first), lease(&relays[1], second));
        let leases = one.len() + other.len();
        let row = caused_by(&fixture, &id).await;
        let has_cancelled = found && commits;
        // S0-025.
        assert!(leases <= 1, "seed {seed}: two relays have the message: {row:?}");
        assert!(
            !(has_cancelled && leases == 1),
            "seed {seed}: the message is cancelled and sent: {row:?}"
        );
        match row.status.as_str() {
            "cancelled" => assert!(has_cancelled, "seed {seed}: {row:?}"),
            "in_progress" => assert_eq!(leases, 1, "seed {seed}: {row:?}"),
            // Each passed over the other's lock; a relay looks again.
            "received" => assert!(!has_cancelled && leases == 0, "seed {seed}: {row:?}"),
            _ => panic!("seed {seed}: {row:?}"),
        }
        let again = relays[0].lease(TO, 10).await;
        assert_eq!(again.len(), usize::from(row.status == "received"), "seed {seed}: {row:?}");
        for leased in [one, other, again] {
            relays[0].mark(&leased, "completed").await;
        }
        cancelled += usize::from(row.status == "cancelled");
        sent += usize::from(row.status != "cancelled");
    }
    println!("{cancelled} cancelled, {sent} sent");
    assert!(cancelled > 5 && sent > 5, "{cancelled} cancelled, {sent} sent: no race");
    assert!(outgoing(&fixture).await.iter().all(|row| row.settled), "something is left");
    fixture.finish().await;
}
