//! Guests that send messages: what becomes of an emit, and what fails the message.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use futures::future::BoxFuture;
use oncebox_model::{
    handler::{Answer, BatchRun, Handler},
    outcome::{Failure, FailureKind},
    outgoing::{
        CancelOutgoing, Destination, Due, Outbox, OutboxMode, OutgoingMessage, Output, outgoing_id,
    },
    policy::Limits,
    tx::Tx,
};
use tokio::time::Instant;

use super::{
    component, connection_to_nowhere,
    guests::{EMIT, GuestEmit, MUST_BE_OK, OK, batch_guest, cancel, emit, guest},
    handle_with, handler, message, runtime, settings,
};
use crate::{CancelRecord, HandlerSettings, Recorder};

/// A canceller that finds something in the database, or nothing, or fails.
struct Database {
    found: bool,
    is_sound: AtomicBool,
}

impl CancelOutgoing for Database {
    fn cancel<'a>(
        &'a self,
        _tx: &'a Tx,
        _token: &'a str,
    ) -> BoxFuture<'a, Result<bool, sqlx::Error>> {
        Box::pin(async move {
            match self.is_sound.load(Ordering::Relaxed) {
                true => Ok(self.found),
                false => Err(sqlx::Error::Decode("no boolean".into())),
            }
        })
    }
}

/// Rights to send to `kafka:` topics that begin with `acme.`, and to one consumer.
fn outbox(found: bool, is_sound: bool) -> Outbox {
    Outbox {
        mode: OutboxMode::Open,
        may_emit: true,
        allowed: Arc::new(["kafka:acme.*".to_owned(), "inbox:orders".to_owned()]),
        canceller: Arc::new(Database { found, is_sound: AtomicBool::new(is_sound) }),
    }
}

const TO_KAFKA: GuestEmit<'_> = GuestEmit {
    destination: "kafka:acme.orders",
    event_type: "order.confirmed",
    key: None,
    after_ms: None,
    token: None,
    cause: None,
};

/// Runs a guest that emits, once.
async fn send(core: &str, limits: Limits, outbox: &Outbox) -> Result<Output, Failure> {
    let tx = Tx::on(connection_to_nowhere().await);
    handle_with(&handler(core, limits).await, &tx, &message(), outbox).await
}

async fn sent(body: &str) -> Result<Vec<OutgoingMessage>, Failure> {
    let core = guest(EMIT, body);
    send(&core, Limits::default(), &outbox(false, true)).await.map(|output| output.outgoing)
}

async fn check_failure(body: &str, kind: FailureKind, part: &str) {
    let failure = sent(body).await.expect_err("a failure");
    assert_eq!(failure.kind, kind, "{}", failure.text);
    assert!(failure.text.contains(part), "`{}` lacks `{part}`", failure.text);
}

#[tokio::test]
async fn what_is_emitted_is_in_the_output_with_derived_ids() {
    let reminder = GuestEmit {
        destination: "inbox:orders",
        event_type: "order.reminder",
        key: Some("o-1"),
        after_ms: Some(30_000),
        token: Some("reminder:o-1"),
        ..TO_KAFKA
    };
    let body = format!("{} {MUST_BE_OK} {} {MUST_BE_OK} {OK}", emit(TO_KAFKA), emit(reminder));
    let id = |ordinal| outgoing_id("acme", "orders", "m-1", ordinal);
    let expected = [
        OutgoingMessage {
            ordinal: 0,
            id: id(0),
            destination: Destination::Kafka { topic: "acme.orders".to_owned() },
            event_type: "order.confirmed".to_owned(),
            content_type: None,
            key: None,
            headers: Vec::new(),
            payload: None,
            due: Due::Now,
            cancel_token: None,
        },
        OutgoingMessage {
            ordinal: 1,
            id: id(1),
            destination: Destination::Inbox { consumer: "orders".to_owned() },
            event_type: "order.reminder".to_owned(),
            content_type: None,
            key: Some(b"o-1".to_vec()),
            headers: Vec::new(),
            payload: None,
            due: Due::After(Duration::from_secs(30)),
            cancel_token: Some("reminder:o-1".to_owned()),
        },
    ];
    assert_eq!(sent(&body).await.expect("it succeeds"), expected);
    assert_eq!(sent(&body).await.expect("a second run"), expected, "ids repeat");
}

#[tokio::test]
async fn the_guest_gets_the_id() {
    let answer = "(if (i32.ne (i32.load (i32.const 264)) (i32.const 36)) (then unreachable)) \
        (i32.store8 (i32.const 4096) (i32.const 34)) (memory.copy (i32.const 4097) (i32.load \
        (i32.const 260)) (i32.const 36)) (i32.store8 (i32.const 4133) (i32.const 34)) (i32.store8 \
        (i32.const 72) (i32.const 1)) (i32.store (i32.const 76) (i32.const 4096)) (i32.store \
        (i32.const 80) (i32.const 38)) (i32.const 64)";
    let core = guest(EMIT, &format!("{} {MUST_BE_OK} {answer}", emit(TO_KAFKA)));
    let output = send(&core, Limits::default(), &outbox(false, true)).await.expect("it succeeds");
    assert_eq!(output.result, Some(format!("\"{}\"", outgoing_id("acme", "orders", "m-1", 0))));
}

// What could go wrong: a handler overlooks a refusal, and a message that was meant to be sent is
// lost without a trace.
#[tokio::test]
async fn a_refusal_that_the_guest_swallows_still_fails_the_message() {
    for (destination, part) in [
        ("kafka:secrets", "`kafka:secrets` is not allowed"),
        ("inbox:billing", "--destinations-allowed"),
        ("ftp:orders", "`ftp:orders` is no destination"),
    ] {
        let body = format!("{} {OK}", emit(GuestEmit { destination, ..TO_KAFKA }));
        check_failure(&body, FailureKind::StatementRefused, part).await;
    }
    let nameless = format!("{} {OK}", emit(GuestEmit { event_type: "", ..TO_KAFKA }));
    check_failure(&nameless, FailureKind::StatementRefused, "the event type is empty").await;
    let token = format!("{} {OK}", cancel(""));
    check_failure(&token, FailureKind::StatementRefused, "the cancel token is empty").await;
}

#[tokio::test]
async fn a_cap_that_the_guest_swallows_still_fails_the_message() {
    let core = guest(EMIT, &format!("{} {} {OK}", emit(TO_KAFKA), emit(TO_KAFKA)));
    for (limits, name) in [
        (Limits { outgoing_max: 1, ..Limits::default() }, "outgoing_max"),
        (Limits { outgoing_bytes_max: 50, ..Limits::default() }, "outgoing_bytes_max"),
    ] {
        let failure = send(&core, limits, &outbox(false, true)).await.expect_err("a cap");
        assert_eq!(failure.kind, FailureKind::Limit, "{}", failure.text);
        assert!(failure.text.contains(name), "{}", failure.text);
    }
    let both = send(&core, Limits::default(), &outbox(false, true)).await.expect("below the caps");
    assert_eq!(both.outgoing.len(), 2);
}

// What could go wrong: a message that was withdrawn in the run that emitted it is sent.
#[tokio::test]
async fn a_cancel_withdraws_what_this_run_emitted() {
    let named = |token| emit(GuestEmit { token: Some(token), ..TO_KAFKA });
    let answered = |found: u32| {
        format!(
            "(if (i32.ne (i32.load8_u (i32.const 260)) (i32.const {found})) (then unreachable))"
        )
    };
    let body = format!(
        "{} {} {} {} {} {} {OK}",
        named("a"),
        named("b"),
        cancel("a"),
        answered(1),
        cancel("a"),
        answered(0)
    );
    let left = sent(&body).await.expect("it succeeds");
    assert_eq!(left.iter().map(|message| message.ordinal).collect::<Vec<_>>(), [1]);
}

#[tokio::test]
async fn a_cancel_says_what_the_database_found_or_fails_the_message() {
    let found = "(if (i32.eqz (i32.load8_u (i32.const 260))) (then unreachable))";
    let core = guest(EMIT, &format!("{} {MUST_BE_OK} {found} {OK}", cancel("a")));
    let output = send(&core, Limits::default(), &outbox(true, true)).await.expect("it succeeds");
    assert!(output.outgoing.is_empty());
    let core = guest(EMIT, &format!("{} {OK}", cancel("a")));
    let failure =
        send(&core, Limits::default(), &outbox(true, false)).await.expect_err("it was overlooked");
    assert!(failure.text.contains("no boolean"), "{}", failure.text);
}

#[tokio::test]
async fn without_the_grant_a_component_does_not_load_and_cannot_send() {
    let runtime = runtime();
    let core = guest(EMIT, &format!("{} {OK}", emit(TO_KAFKA)));
    let loaded = runtime.load(&component(&core)).await.expect("sound");
    assert!(loaded.emits());
    loaded.check_grant(true).expect("granted");
    let refusal = loaded.check_grant(false).expect_err("not granted").to_string();
    for part in ["`oncebox:handler/emit@0.2.0`", "`oncebox deploy --grant emit`"] {
        assert!(refusal.contains(part), "{refusal}");
    }
    let settings = HandlerSettings { may_emit: false, ..settings(Limits::default(), Vec::new()) };
    let handler = runtime.handler(&loaded, settings);
    let tx = Tx::on(connection_to_nowhere().await);
    let answer = handle_with(&handler, &tx, &message(), &outbox(false, true)).await;
    let failure = answer.expect_err("the emit is refused");
    assert!(failure.text.contains("the grant `emit`"), "{}", failure.text);
    let other = runtime.load(&component(&guest("", OK))).await.expect("sound");
    assert!(!other.emits());
    other.check_grant(false).expect("it needs none");
}

/// What could go wrong: a replayed run withdraws what its first run emitted, or its emit has
/// another id; or a policy that withholds the right to emit is not obeyed. S1-057, S1-123.
#[tokio::test]
async fn a_replayed_run_gets_its_ids_and_cancels_nothing() {
    let named = GuestEmit { token: Some("a"), ..TO_KAFKA };
    let core = guest(EMIT, &format!("{} {MUST_BE_OK} {} {OK}", emit(named), cancel("a")));
    let replayed = Outbox { mode: OutboxMode::Suppressed, ..outbox(true, true) };
    let output = send(&core, Limits::default(), &replayed).await.expect("it succeeds");
    let ids: Vec<_> = output.outgoing.into_iter().map(|message| message.id).collect();
    // The inbox drops the message; the cancel has not withdrawn it.
    // S1-057.
    assert_eq!(ids, [outgoing_id("acme", "orders", "m-1", 0)]);
    let withheld = Outbox { mode: OutboxMode::Withheld, ..outbox(true, true) };
    let failure = send(&core, Limits::default(), &withheld).await.expect_err("withheld");
    assert_eq!(failure.kind, FailureKind::StatementRefused);
    // S1-123.
    assert!(failure.text.contains("replay.emit"), "{}", failure.text);
    let only_cancels = guest(EMIT, &format!("{} {OK}", cancel("a")));
    assert!(send(&only_cancels, Limits::default(), &withheld).await.is_ok());
}

#[tokio::test]
async fn a_failed_run_sends_nothing() {
    let reject = "(i32.store8 (i32.const 64) (i32.const 1)) (i32.store8 (i32.const 72) (i32.const \
        1)) (i32.const 64)";
    check_failure(&format!("{} {reject}", emit(TO_KAFKA)), FailureKind::Reject, "").await;
    check_failure(&format!("{} unreachable", emit(TO_KAFKA)), FailureKind::Trap, "").await;
}

/// Runs a guest on a batch of two messages, `m-1` and `m-2`.
async fn send_batch(body: &str) -> Result<Vec<Answer>, Failure> {
    let handler = handler(&batch_guest(EMIT, body), Limits::default()).await;
    let (first, mut second) = (message(), message());
    second.id = "m-2".to_owned();
    let (tx, outbox) = (Tx::on(connection_to_nowhere().await), outbox(false, true));
    let run = BatchRun {
        tenant: "acme",
        consumer: "orders",
        messages: &[&first, &second],
        deadline: Instant::now() + Duration::from_secs(5),
        outbox: &outbox,
    };
    handler.handle_batch(&tx, &run).await
}

#[tokio::test]
async fn in_a_batch_an_emit_is_that_of_its_cause() {
    let of = |cause| emit(GuestEmit { cause: Some(cause), ..TO_KAFKA });
    let body = format!("{} {MUST_BE_OK} {} {MUST_BE_OK} {}", of(1), of(0), of(1));
    let answers = send_batch(&body).await.expect("it succeeds");
    let ids: Vec<Vec<String>> = answers
        .into_iter()
        .map(|answer| answer.expect("ok").outgoing.into_iter().map(|it| it.id).collect())
        .collect();
    let id = |message_id, ordinal| outgoing_id("acme", "orders", message_id, ordinal);
    assert_eq!(ids, [vec![id("m-1", 0)], vec![id("m-2", 0), id("m-2", 1)]]);
    let failure = send_batch(&emit(TO_KAFKA)).await.expect_err("no cause");
    assert_eq!(failure.kind, FailureKind::StatementRefused);
    assert!(failure.text.contains("2 messages"), "{}", failure.text);
}

#[tokio::test]
async fn a_recorder_shows_what_would_be_sent() {
    let recorder = Recorder::default();
    let after = GuestEmit { after_ms: Some(1_500), key: Some("o-1"), ..TO_KAFKA };
    let core = guest(EMIT, &format!("{} {} {OK}", emit(after), cancel("a")));
    let handler = handler(&core, Limits::default()).await.recorded_by(recorder.clone());
    let tx = Tx::on(connection_to_nowhere().await);
    handle_with(&handler, &tx, &message(), &outbox(false, true)).await.expect("it succeeds");
    let run = recorder.take().pop().expect("a run");
    let [sent] = &run.outgoing[..] else { panic!("{:?}", run.outgoing) };
    let shown = (&*sent.destination, &*sent.due, sent.key.as_deref(), &*sent.cause);
    assert_eq!(shown, ("kafka:acme.orders", "after 1500 ms", Some("o-1"), "m-1"));
    assert_eq!(run.cancels, [CancelRecord { token: "a".to_owned(), found: false }]);
}
