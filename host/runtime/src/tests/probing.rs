//! Trials of a component's start: a component that cannot start is refused before a message needs
//! it.

use std::time::{Duration, Instant};

use super::{
    component,
    guests::{EXECUTE, OK, execute, guest},
    runtime,
};
use crate::Problem;

async fn probe(parts: &str) -> Result<(), Problem> {
    let runtime = runtime();
    let text = guest(EXECUTE, OK);
    let text = format!("{} {parts})", text.trim_end().strip_suffix(')').expect("a module"));
    let loaded = runtime.load(&component(&text)).await.expect("sound");
    runtime.probe_within(&loaded, Duration::from_secs(1)).await
}

async fn check(body: &str, part: &str) {
    let problem = probe(&format!("(func $start {body}) (start $start)"))
        .await
        .expect_err("it fails at its start");
    println!("{}", problem.text);
    assert!(
        problem.code == "traps_at_start" && problem.text.contains(part),
        "`{}` lacks `{part}`",
        problem.text
    );
    assert!(!problem.text.contains('\n'), "{}", problem.text);
}

#[tokio::test]
async fn a_start_that_ends_is_fine() {
    probe("").await.expect("no start");
    probe("(func $start) (start $start)").await.expect("a harmless start");
}

#[tokio::test]
async fn a_start_that_traps_is_told() {
    check("unreachable", "wasm trap: wasm `unreachable` instruction executed").await;
    check("(call $start)", "call stack exhausted").await;
    let initialized = probe("(func (export \"_initialize\") unreachable)").await;
    assert!(initialized.is_err(), "toolchains call this name at the start");
    check("(drop (i32.load (i32.const -4)))", "out of bounds").await;
}

#[tokio::test]
async fn a_start_that_spins_is_stopped() {
    let start = Instant::now();
    check("(call $spin)", "it does not end within 1 s").await;
    assert!(start.elapsed() < Duration::from_secs(10), "{:?}", start.elapsed());
}

#[tokio::test]
async fn a_start_that_takes_memory_without_end_is_stopped() {
    check(
        "(loop (br_if 0 (i32.ne (memory.grow (i32.const 100)) (i32.const -1)))) unreachable",
        "bytes of memory",
    )
    .await;
}

#[tokio::test]
async fn sql_at_the_start_is_answered_and_does_no_harm() {
    // The answer's first byte says that it is an error.
    let body = format!(
        "{} (if (i32.eqz (i32.load8_u (i32.const 256))) (then unreachable))",
        execute("select 1")
    );
    // Imports that need an allocator are linked after the start section has run. Toolchains use
    // this name for code that needs such imports.
    probe(&format!("(func (export \"_initialize\") {body})"))
        .await
        .expect("the guest took the error");
}
