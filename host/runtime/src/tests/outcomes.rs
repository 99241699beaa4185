//! Every end of a guest, and the outcome that it becomes.

use std::time::Duration;

use oncebox_model::{
    outcome::{Failure, FailureKind},
    policy::Limits,
    tx::Tx,
};

use super::{
    connection_to_nowhere,
    guests::{EXECUTE, LOG, OK, execute, fail_with, guest, ok_with, stores},
    handle, handler, message, run,
};

async fn check(core: &str, kind: FailureKind, part: &str) {
    check_under(Limits::default(), core, kind, part).await;
}

async fn check_under(limits: Limits, core: &str, kind: FailureKind, part: &str) {
    let Failure { kind: actual, text } = run(core, limits).await.expect_err("a failure");
    assert_eq!(actual, kind, "{text}");
    assert!(text.contains(part), "`{text}` does not contain `{part}`");
}

#[tokio::test]
async fn answers_arrive_as_they_were_given() {
    assert_eq!(run(&guest("", OK), Limits::default()).await, Ok(None));
    let result = run(&guest("", &ok_with("{\"a\":1}")), Limits::default()).await;
    assert_eq!(result, Ok(Some("{\"a\":1}".to_owned())));
    check(&guest("", &fail_with(1, "no")), FailureKind::Reject, "no").await;
    check(&guest("", &fail_with(2, "look")), FailureKind::Park, "look").await;
    check(&guest("", &fail_with(3, "hm")), FailureKind::Other, "hm").await;
    check(&guest("", &fail_with(3, "h\0m")), FailureKind::Other, "h\u{fffd}m").await;
}

#[tokio::test]
async fn a_retry_carries_its_delay() {
    let head = "(i32.store8 (i32.const 64) (i32.const 1))";
    let retry = guest("", &format!("{head} {OK}"));
    check(&retry, FailureKind::Retry { delay: None }, "").await;
    let delay =
        "(i32.store8 (i32.const 80) (i32.const 1)) (i64.store (i32.const 88) (i64.const 1500))";
    let later = guest("", &format!("{head} {delay} {OK}"));
    check(&later, FailureKind::Retry { delay: Some(Duration::from_millis(1500)) }, "").await;
}

#[tokio::test]
async fn results_that_cannot_be_kept_are_bad_results() {
    check(&guest("", &ok_with("{")), FailureKind::BadResult, "not JSON").await;
    check(&guest("", &ok_with("\"\\u0000\"")), FailureKind::BadResult, "u0000").await;
    let limits = Limits { outcome_bytes_max: 4, ..Limits::default() };
    check_under(
        limits,
        &guest("", &ok_with("\"long\"")),
        FailureKind::BadResult,
        "outcome_bytes_max",
    )
    .await;
}

#[tokio::test]
async fn traps_say_what_and_with_which_last_words() {
    check(&guest("", "unreachable"), FailureKind::Trap, "unreachable").await;
    check(&guest("", "(i32.load (i32.const -4))"), FailureKind::Trap, "out of bounds").await;
    check(
        &guest("", "(i32.div_s (i32.const 1) (i32.const 0))"),
        FailureKind::Trap,
        "divide by zero",
    )
    .await;
    let panic = format!(
        "{} (call $log (i32.const 4) (i32.const 2048) (i32.const 5)) unreachable",
        stores(2048, "boom!")
    );
    check(&guest(LOG, &panic), FailureKind::Trap, "boom!").await;
    check(
        &guest("(func $deep (call $deep))", "(call $deep) unreachable"),
        FailureKind::Trap,
        "call stack exhausted",
    )
    .await;
    // A result that points outside the guest's memory.
    check(&guest("", "(i32.const -8)"), FailureKind::Trap, "").await;
}

#[tokio::test]
async fn a_memory_hog_is_told_from_a_bug() {
    let hog = "(if (i32.eq (memory.grow (i32.const 2000)) (i32.const -1)) (then unreachable)) \
        (i32.const 64)";
    check(&guest("", hog), FailureKind::OutOfMemory, "memory_bytes").await;
    let table = "(if (i32.eq (table.grow $t (ref.null func) (i32.const 10000000)) (i32.const -1)) \
        (then unreachable)) (i32.const 64)";
    check(&guest("(table $t 1 funcref)", table), FailureKind::OutOfMemory, "memory_bytes").await;
    let limits = Limits { memory_bytes: 1000, ..Limits::default() };
    check_under(limits, &guest("", OK), FailureKind::OutOfMemory, "memory_bytes").await;
}

#[tokio::test]
async fn memories_and_tables_count_together() {
    let two = "(memory.grow (i32.const 6)) drop (table.grow $t (ref.null func) (i32.const 19000)) \
        (i32.const -1) i32.eq (if (then unreachable)) (i32.const 64)";
    let core = guest("(table $t 1 funcref)", two);
    let limits = Limits { memory_bytes: 10 * 65_536 + 16, ..Limits::default() };
    check_under(limits, &core, FailureKind::OutOfMemory, "memory_bytes").await;
    let limits = Limits { memory_bytes: 10 * 65_536 + 19_001 * 8, ..Limits::default() };
    assert_eq!(run(&core, limits).await, Ok(None));
}

#[tokio::test]
async fn a_guest_that_survives_a_refused_growth_is_fine() {
    assert_eq!(
        run(&guest("", "(drop (memory.grow (i32.const 60000))) (i32.const 64)"), Limits::default())
            .await,
        Ok(None)
    );
}

#[tokio::test]
async fn a_spinning_guest_is_stopped_in_time_and_leaves_the_host_alive() {
    let tx = Tx::on(connection_to_nowhere().await);
    let spinning = handler(&guest("", "(call $spin) (i32.const 64)"), Limits::default()).await;
    let message = message();
    for _ in 0..5 {
        let start = std::time::Instant::now();
        // More runs than instances: each must give its slot back.
        tokio::time::timeout(Duration::from_millis(50), handle(&spinning, &tx, &message))
            .await
            .expect_err("it never ends");
        assert!(start.elapsed() < Duration::from_secs(6), "{:?}", start.elapsed());
    }
    assert!(!tx.is_broken().await);
}

#[tokio::test]
async fn with_every_instance_taken_a_message_waits() {
    let tx = Tx::on(connection_to_nowhere().await);
    let message = message();
    // Each guest yields while it spins: two instances, ten messages.
    let busy = "(local $i i32) (loop $l (local.set $i (i32.add (local.get $i) (i32.const 1))) \
        (br_if $l (i32.lt_u (local.get $i) (i32.const 20000000)))) (i32.const 64)";
    let handler = handler(&guest("", busy), Limits::default()).await;
    let runs = (0..10).map(|_| handle(&handler, &tx, &message));
    for result in futures::future::join_all(runs).await {
        assert_eq!(result, Ok(None));
    }
}

#[tokio::test]
async fn a_refusal_that_the_guest_swallows_still_fails_the_message() {
    let commit = execute("/* select */ COMMIT");
    check(
        &guest(EXECUTE, &format!("{commit} {OK}")),
        FailureKind::StatementRefused,
        "`COMMIT` is not allowed",
    )
    .await;
    check(
        &guest(EXECUTE, &format!("{commit} unreachable")),
        FailureKind::StatementRefused,
        "unreachable",
    )
    .await;
    check(
        &guest(EXECUTE, &format!("{commit} {}", fail_with(3, "my own words"))),
        FailureKind::StatementRefused,
        "my own words",
    )
    .await;
    check(
        &guest(EXECUTE, &format!("{commit} {}", fail_with(1, "my decision"))),
        FailureKind::Reject,
        "my decision",
    )
    .await;
}

#[tokio::test]
async fn a_cap_that_the_guest_swallows_still_fails_the_message() {
    let limits = Limits { statement_bytes_max: 3, ..Limits::default() };
    check_under(
        limits,
        &guest(EXECUTE, &format!("{} {OK}", execute("select 1"))),
        FailureKind::Limit,
        "statement_bytes_max",
    )
    .await;
    let limits = Limits { statements_max: 0, ..Limits::default() };
    check_under(
        limits,
        &guest(EXECUTE, &format!("{} {OK}", execute("select 1"))),
        FailureKind::Limit,
        "statements_max",
    )
    .await;
}

#[tokio::test]
async fn a_lost_connection_is_not_the_guests_fault() {
    let handler =
        handler(&guest(EXECUTE, &format!("{} {OK}", execute("select 1"))), Limits::default()).await;
    let tx = Tx::on(connection_to_nowhere().await);
    let failure = handle(&handler, &tx, &message()).await.expect_err("no server answers");
    assert_eq!(failure.kind, FailureKind::Crashed, "{}", failure.text);
    assert!(tx.is_broken().await);
}

#[tokio::test]
async fn a_huge_string_cannot_make_the_host_allocate_without_bound() {
    // A length of 1 GiB in a memory of 64 KiB, and lists that claim to be long.
    let lie = "(call $execute (i32.const 0) (i32.const 1073741824) (i32.const 0) (i32.const 0) \
        (i32.const 256)) (i32.const 64)";
    check(&guest(EXECUTE, lie), FailureKind::Trap, "").await;
    let lie = "(call $execute (i32.const 0) (i32.const 0) (i32.const 0) (i32.const 100000000) \
        (i32.const 256)) (i32.const 64)";
    check(&guest(EXECUTE, lie), FailureKind::Trap, "").await;
}

#[tokio::test]
async fn state_of_one_message_does_not_reach_the_next() {
    let counter = r#"(global.set $count (i32.add (global.get $count) (i32.const 1)))
        (if (i32.ne (global.get $count) (i32.const 1)) (then unreachable))
        (if (i32.load (i32.const 60000)) (then unreachable))
        (i32.store (i32.const 60000) (i32.const 1)) (i32.const 64)"#;
    let tx = Tx::on(connection_to_nowhere().await);
    let handler =
        handler(&guest("(global $count (mut i32) (i32.const 0))", counter), Limits::default())
            .await;
    for _ in 0..5 {
        assert_eq!(handle(&handler, &tx, &message()).await, Ok(None));
    }
}
