//! The figures behind the metrics of outgoing messages and their alert: how many are open, and how
//! late the oldest of them is.

use oncebox_tests::{
    inbox::{InboxFixture, deliver},
    outgoing::{StepRelay, emitting, emitting_host},
};
use sqlx::{PgPool, Postgres, Transaction};

const TO: &str = "kafka:orders.out";
/// Messages that the relay of a host counts at most, in each status.
const COUNTED_MAX: i64 = 10_000;

/// Returns how many messages of the consumer are counted as open, and the seconds by which the
/// oldest is past its due time.
async fn figures(tx: &mut Transaction<'_, Postgres>, counted_max: i64) -> (i64, f64) {
    const FIGURES: &str =
        "SELECT messages, oldest_s FROM oncebox.outgoing_figures($1) WHERE consumer = 'orders'";
    sqlx::query_as(FIGURES).bind(counted_max).fetch_one(&mut **tx).await.unwrap()
}

/// Checks that the oldest message is late by at least so many seconds, and by less than twice as
/// many: others are late by half, or are not due.
async fn check_oldest(pool: &PgPool, seconds: f64) {
    let mut tx = pool.begin().await.unwrap();
    for counted_max in [COUNTED_MAX, 100] {
        let (messages, oldest_s) = figures(&mut tx, counted_max).await;
        assert!(messages >= counted_max, "{messages} messages are counted of {counted_max}");
        assert!(
            (seconds..2.0 * seconds).contains(&oldest_s),
            "the oldest is {oldest_s} s late, not {seconds} s, with {counted_max} counted"
        );
    }
    tx.rollback().await.unwrap();
}

/// Returns how many rows of outgoing messages the transaction has read by now.
async fn rows_read(tx: &mut Transaction<'_, Postgres>) -> i64 {
    const READ: &str = "SELECT sum(coalesce(seq_tup_read, 0) + coalesce(idx_tup_fetch, 0))::bigint \
        FROM pg_stat_xact_all_tables WHERE schemaname = 'oncebox' AND relname LIKE 'outgoing%'";
    sqlx::query_scalar(READ).fetch_one(&mut **tx).await.unwrap()
}

/// What could go wrong: a message that nobody sends is not seen, and its alert never fires, since
/// more timers than are counted were emitted before it; or it is seen, by reading them all every
/// ten seconds.
#[tokio::test(flavor = "multi_thread")]
async fn the_oldest_is_found_behind_more_timers_than_are_counted() {
    let fixture = InboxFixture::new().await;
    let consumer = fixture.simple("", "").await;
    let host = emitting_host(&fixture, &consumer);
    let timer = format!("emit {TO} after=86400000");
    deliver(&host, &[emitting(0, "timer", &[&timer])]).await;
    let timers = format!(
        "INSERT INTO oncebox.outgoing (consumer_id, message_id, ordinal, bucket, id, destination, \
            event_type, correlation_id, headers, payload, status, due_at, next_attempt_at) \
         SELECT consumer_id, message_id, n, bucket, id || n, destination, event_type, \
            correlation_id, headers, payload, status, due_at, next_attempt_at \
         FROM oncebox.outgoing CROSS JOIN generate_series(1, {}) n",
        COUNTED_MAX + 100
    );
    fixture.execute(timers).await;
    let late = ["emit kafka:orders.out", "emit kafka:other.out"];
    deliver(&host, &[emitting(1, "late", &late)]).await;

    let pool = &fixture.pool;
    fixture.execute(past_due("ordinal = 0", 600, "due_at")).await;
    check_oldest(pool, 600.0).await;
    // Elsewhere, and it waits for its next attempt, as a message does that has failed.
    let waits = "now() + interval '1 hour', status = 'failed_retryable', reason = 'failed'";
    fixture.execute(past_due("ordinal = 1", 1_200, waits)).await;
    check_oldest(pool, 1_200.0).await;

    let mut tx = pool.begin().await.unwrap();
    figures(&mut tx, 100).await; // makes the plans
    let before = rows_read(&mut tx).await;
    figures(&mut tx, 100).await;
    let read = rows_read(&mut tx).await - before;
    tx.rollback().await.unwrap();
    // A hundred that are counted, and the heads of two destinations.
    assert!((100..150).contains(&read), "{read} rows are read");

    // What a relay is sending is late as well; what is sent is not.
    let settle = "UPDATE oncebox.outgoing SET status = 'discarded', next_attempt_at = NULL, \
        settled_at = now() WHERE message_id = 'late' AND ordinal = 1";
    fixture.execute(settle).await;
    let relay = StepRelay::new(&fixture, "relay", &[&consumer]);
    let leased = relay.lease(TO, 10).await;
    assert_eq!(leased.len(), 1, "{leased:?}");
    check_oldest(pool, 600.0).await;
    assert_eq!(relay.mark(&leased, "completed").await, 1);
    let mut tx = pool.begin().await.unwrap();
    assert_eq!(figures(&mut tx, COUNTED_MAX).await, (COUNTED_MAX, 0.0));
    tx.rollback().await.unwrap();
    fixture.finish().await;
}

/// Returns the statement that makes messages so many seconds late. `next` is the time of their next
/// attempt, with what else is to be set: the due time where that is `due_at`.
fn past_due(which: &str, seconds: i64, next: &str) -> String {
    let due_at = format!("now() - interval '{seconds} seconds'");
    let next = if next == "due_at" { due_at.as_str() } else { next };
    format!(
        "UPDATE oncebox.outgoing SET due_at = {due_at}, next_attempt_at = {next} WHERE message_id \
            = 'late' AND {which}"
    )
}
