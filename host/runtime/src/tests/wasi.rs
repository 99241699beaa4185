//! WASI for stock toolchains: deterministic clocks, randomness that repeats, output that becomes
//! log lines, and nothing else.

use oncebox_model::{outcome::FailureKind, policy::Limits, tx::Tx};

use super::{
    component, connection_to_nowhere,
    guests::{guest, stores},
    handle, handler, message, run, runtime,
};

/// Imports of a guest for WASI 0.1. The adapter adds those of WASI 0.2.
const WASI: &str = r#"
  (import "wasi_snapshot_preview1" "fd_write" (func $fd_write (param i32 i32 i32 i32) (result i32)))
  (import "wasi_snapshot_preview1" "random_get" (func $random_get (param i32 i32) (result i32)))
  (import "wasi_snapshot_preview1" "clock_time_get" (func $clock_time_get (param i32 i64 i32) (result i32)))
  (import "wasi_snapshot_preview1" "poll_oneoff" (func $poll_oneoff (param i32 i32 i32 i32) (result i32)))
  (import "wasi_snapshot_preview1" "environ_sizes_get" (func $environ_sizes_get (param i32 i32) (result i32)))
  (import "wasi_snapshot_preview1" "fd_prestat_get" (func $fd_prestat_get (param i32 i32) (result i32)))
  (import "wasi_snapshot_preview1" "proc_exit" (func $proc_exit (param i32)))"#;

/// Code that answers ok with 16 octal digits of the number at address 3072.
const ANSWER_NUMBER: &str = r#"
  (local $i i32) (local $n i64)
  (local.set $n (i64.load (i32.const 3072)))
  (local.set $i (i32.const 16))
  (loop $digits
    (i32.store8 (i32.add (i32.const 4096) (local.get $i))
      (i32.add (i32.const 48) (i32.wrap_i64 (i64.and (local.get $n) (i64.const 7)))))
    (local.set $n (i64.shr_u (local.get $n) (i64.const 3)))
    (local.set $i (i32.sub (local.get $i) (i32.const 1)))
    (br_if $digits (i32.gt_s (local.get $i) (i32.const 0))))
  (i32.store8 (i32.const 4096) (i32.const 34)) (i32.store8 (i32.const 4113) (i32.const 34))
  (i32.store8 (i32.const 72) (i32.const 1))
  (i32.store (i32.const 76) (i32.const 4096)) (i32.store (i32.const 80) (i32.const 18))
  (i32.const 64)"#;

/// Returns a guest that runs `code` and then answers with the number.
fn number(code: &str) -> String {
    let (locals, rest) = ANSWER_NUMBER.split_once("(local.set").expect("locals come first");
    guest(WASI, &format!("{locals} {code} (local.set{rest}"))
}

fn octal(number: u64) -> Option<String> {
    Some(format!("\"{:016o}\"", number & ((1 << 48) - 1)))
}

#[tokio::test]
async fn time_begins_at_the_message_and_two_runs_agree() {
    let wall = number("(drop (call $clock_time_get (i32.const 0) (i64.const 1) (i32.const 3072)))");
    assert_eq!(run(&wall, Limits::default()).await, Ok(octal(1_700_000_000_000_001_000)));
    let monotonic =
        number("(drop (call $clock_time_get (i32.const 1) (i64.const 1) (i32.const 3072)))");
    assert_eq!(run(&monotonic, Limits::default()).await, Ok(octal(1_000)));
}

#[tokio::test]
async fn a_sleep_of_an_hour_takes_no_time_and_moves_the_clock() {
    // One subscription: a relative timeout on the monotonic clock.
    let sleep = r#"(i32.store8 (i32.const 1032) (i32.const 0)) (i32.store (i32.const 1040) (i32.const 1))
        (i64.store (i32.const 1048) (i64.const 3600000000000))
        (if (call $poll_oneoff (i32.const 1024) (i32.const 1200) (i32.const 1) (i32.const 1300)) (then unreachable))
        (drop (call $clock_time_get (i32.const 1) (i64.const 1) (i32.const 3072)))
        (i64.store (i32.const 3072) (i64.div_u (i64.load (i32.const 3072)) (i64.const 1000000000)))"#;
    let start = std::time::Instant::now();
    assert_eq!(run(&number(sleep), Limits::default()).await, Ok(octal(3_600)));
    assert!(start.elapsed().as_secs() < 60);
}

#[tokio::test]
async fn randomness_repeats_for_a_message_and_differs_between_messages() {
    let random = number("(drop (call $random_get (i32.const 3072) (i32.const 8)))");
    let handler = handler(&random, Limits::default()).await;
    let tx = Tx::on(connection_to_nowhere().await);
    let (first, mut other) = (message(), message());
    other.id = "m-2".to_owned();
    let one = handle(&handler, &tx, &first).await.expect("ok");
    assert_eq!(handle(&handler, &tx, &first).await.expect("ok"), one);
    assert_ne!(handle(&handler, &tx, &other).await.expect("ok"), one);
}

#[tokio::test]
async fn there_is_no_environment_and_no_file() {
    let environment = number("(drop (call $environ_sizes_get (i32.const 3072) (i32.const 3076)))");
    assert_eq!(run(&environment, Limits::default()).await, Ok(octal(0)));
    // 8 is `badf`: no folder was opened beforehand.
    let folders = number(
        "(i32.store (i32.const 3072) (call $fd_prestat_get (i32.const 3) (i32.const 3200)))",
    );
    assert_eq!(run(&folders, Limits::default()).await, Ok(octal(8)));
}

#[tokio::test]
async fn the_last_words_on_standard_error_are_in_the_failure() {
    let panic = format!(
        "{} (i32.store (i32.const 1024) (i32.const 2048)) (i32.store (i32.const 1028) (i32.const 9))
         (drop (call $fd_write (i32.const 2) (i32.const 1024) (i32.const 1) (i32.const 1032))) \
            unreachable",
        stores(2048, "panicked!")
    );
    let failure = run(&guest(WASI, &panic), Limits::default()).await.expect_err("a trap");
    assert_eq!(failure.kind, FailureKind::Trap);
    assert!(failure.text.contains("panicked!"), "{}", failure.text);
}

#[tokio::test]
async fn an_exit_is_a_trap_with_its_status() {
    let failure =
        run(&guest(WASI, "(call $proc_exit (i32.const 1)) unreachable"), Limits::default())
            .await
            .expect_err("a trap");
    assert_eq!(
        (failure.kind, failure.text.contains("exited with status 1")),
        (FailureKind::Trap, true),
        "{}",
        failure.text
    );
}

#[tokio::test]
async fn a_flood_of_output_is_cut() {
    let flood = format!(
        r#"(local $i i32) {} (i32.store (i32.const 1024) (i32.const 2048)) (i32.store (i32.const 1028) (i32.const 5))
        (loop $again
          (drop (call $fd_write (i32.const 1) (i32.const 1024) (i32.const 1) (i32.const 1032)))
          (local.set $i (i32.add (local.get $i) (i32.const 1)))
          (br_if $again (i32.lt_u (local.get $i) (i32.const 20000))))
        (i32.const 64)"#,
        stores(2048, "line\n")
    );
    assert_eq!(run(&guest(WASI, &flood), Limits::default()).await, Ok(None));
}

#[tokio::test]
async fn the_adapter_needs_nothing_beyond_the_sandbox() {
    let loaded = runtime().load(&component(&guest(WASI, "(i32.const 64)"))).await.expect("sound");
    assert!(
        !loaded
            .imports()
            .iter()
            .any(|import| import.starts_with("wasi:sockets") || import.starts_with("wasi:http"))
    );
}
