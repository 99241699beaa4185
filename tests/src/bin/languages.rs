//! What a call costs in each language: the CPU time of this process for the order example, less
//! that of the same two statements sent by plain Rust, as a ratio to the component written in Rust.
//! The table of docs/languages.md.
//!
//! `languages [name=component.wasm…]`; by default the examples, and `rust`. A fresh instance for
//! each message, on one thread, in one open transaction at a time that is rolled back.

use std::time::Duration;

use anyhow::{Context, Result, anyhow, ensure};
use futures::future::BoxFuture;
use oncebox_model::{
    Outbox, Output,
    handler::{Answer, DeliveryKind, Handler, Run},
    message::Message,
    outcome::Failure,
    policy::Limits,
    record::Record,
    tx::Tx,
};
use oncebox_runtime::{
    ComponentHandler, HandlerSettings, RuntimeConfig, WasmRuntime,
    sql::{StatementMode, Value, run_statement},
};
use oncebox_tests::inbox::InboxFixture;
use serde_json::json;
use sqlx::Executor;
use tokio::time::Instant;

const SCHEMA: &str = include_str!("../../../guest-examples/languages/schema.sql");
/// Calls in one transaction; the row of the account gets a version for each.
const CALLS: usize = 100;
/// Transactions that are measured of each; the quietest counts, since whatever else the machine
/// does only adds.
const ROUNDS: usize = 20;
const DEFAULT: &[(&str, &str)] = &[
    ("rust", "guest-examples/components/order.wasm"),
    ("c", "target/languages/c.wasm"),
    ("go", "target/languages/go.wasm"),
    ("javascript", "target/languages/javascript.wasm"),
    ("typescript", "target/languages/typescript.wasm"),
    ("python", "target/languages/python.wasm"),
];

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<()> {
    let given: Vec<String> = std::env::args().skip(1).collect();
    let mut components = Vec::new();
    for argument in &given {
        components.push(
            argument
                .split_once('=')
                .with_context(|| format!("`{argument}` is not `name=component.wasm`"))?,
        );
    }
    if components.is_empty() {
        components.extend_from_slice(DEFAULT);
    }
    let fixture = InboxFixture::new().await;
    let outcome = compare(&fixture, &components).await;
    fixture.finish().await;
    outcome
}

async fn compare(fixture: &InboxFixture, components: &[(&str, &str)]) -> Result<()> {
    let tenant = fixture.tenant("acme", SCHEMA).await;
    let tx = Tx::on(fixture.guest(&tenant).await);
    let mut loaded = Vec::new();
    for (name, path) in components {
        loaded.push(component(name, path).await?);
    }
    let mut handlers: Vec<&dyn Handler> = vec![&Plain];
    handlers.extend(loaded.iter().map(|one| &one.handler as &dyn Handler));
    let calls = measure(&tx, &handlers).await?;
    println!("the two statements alone: {} us", calls[0].as_micros());
    println!(
        "{:<12} {:>9} {:>10} {:>12} {:>14} {:>8}",
        "language", "KiB", "compile s", "call us", "less SQL us", "ratio"
    );
    let own = |call: &Duration| call.saturating_sub(calls[0]);
    for ((name, _), (one, call)) in components.iter().zip(loaded.iter().zip(&calls[1..])) {
        let ratio = own(call).as_secs_f64() / own(&calls[1]).as_secs_f64();
        let (compile, call, own) =
            (one.compile.as_secs_f64(), call.as_micros(), own(call).as_micros());
        println!("{name:<12} {:>9} {compile:>10.2} {call:>12} {own:>14} {ratio:>8.1}", one.kib);
    }
    Ok(())
}

/// A component, ready to run.
struct Loaded {
    handler: ComponentHandler,
    kib: usize,
    compile: Duration,
}

async fn component(name: &str, path: &str) -> Result<Loaded> {
    let advice = || {
        format!("failed to read `{path}`; build it with `guest-examples/languages/build.sh {name}`")
    };
    let bytes = std::fs::read(path).with_context(advice)?;
    let runtime = WasmRuntime::new(RuntimeConfig { instances_max: 1, ..RuntimeConfig::default() })?;
    let start = Instant::now();
    let loaded = runtime.load(&bytes).await.with_context(|| format!("failed to load `{path}`"))?;
    let settings = HandlerSettings {
        version: 1,
        limits: limits(),
        config: Vec::new(),
        random_key: [1; 32],
        may_emit: false,
    };
    let compile = start.elapsed();
    Ok(Loaded { handler: runtime.handler(&loaded, settings), kib: bytes.len() / 1024, compile })
}

fn limits() -> Limits {
    Limits { deadline_ms: 60_000, ..Limits::default() }
}

/// The CPU time of one call of each, in its quietest round. They take turns, so that a busy minute
/// of the machine is nobody's alone. The first round warms up.
async fn measure(tx: &Tx, handlers: &[&dyn Handler]) -> Result<Vec<Duration>> {
    let mut best = vec![Duration::MAX; handlers.len()];
    for number in 0..=ROUNDS {
        for (best, handler) in best.iter_mut().zip(handlers) {
            let spent = round(tx, *handler).await?;
            if number > 0 {
                *best = spent.min(*best);
            }
        }
    }
    Ok(best.into_iter().map(|spent| spent / CALLS as u32).collect())
}

/// The CPU time of [`CALLS`] calls in one transaction, which ends with nothing done.
async fn round(tx: &Tx, handler: &dyn Handler) -> Result<Duration> {
    control(tx, "BEGIN ISOLATION LEVEL READ COMMITTED READ WRITE").await?;
    let messages: Vec<_> = (0..CALLS).map(message).collect();
    let start = cpu_time();
    for message in &messages {
        let deadline = Instant::now() + Duration::from_secs(60);
        let run = Run {
            tenant: "acme",
            consumer: "orders",
            message,
            attempt: 1,
            kind: DeliveryKind::Live,
            deadline,
            outbox: &Outbox::closed(),
            may_run_ahead: false,
        };
        let output = handler
            .handle(tx, &run)
            .await
            .map_err(|failure| anyhow!("{}: {}", failure.kind.name(), failure.text))?;
        ensure!(output.result.is_none(), "it answered {output:?}");
    }
    let spent = cpu_time() - start;
    control(tx, "ROLLBACK").await?;
    Ok(spent)
}

async fn control(tx: &Tx, text: &'static str) -> Result<()> {
    let mut statement = tx.statement().await;
    let outcome = statement.connection().execute(text).await;
    statement.finish(outcome.as_ref().err());
    outcome.map(drop).with_context(|| format!("failed to `{text}`"))
}

/// User and system time of this process; the database is another.
fn cpu_time() -> Duration {
    // SAFETY: all zeroes is a valid `rusage`, and the call fills the one it is given.
    let usage = unsafe {
        let mut usage: libc::rusage = std::mem::zeroed();
        libc::getrusage(libc::RUSAGE_SELF, &raw mut usage);
        usage
    };
    let time = |t: libc::timeval| Duration::new(t.tv_sec as u64, t.tv_usec as u32 * 1_000);
    time(usage.ru_utime) + time(usage.ru_stime)
}

fn message(number: usize) -> Message {
    let payload = json!({ "order_id": format!("o-{number}"), "account": 17, "amount": 250, "note": "two of the usual" });
    let record = Record {
        topic: "orders".into(),
        topic_id: None,
        partition: 0,
        offset: number as i64,
        timestamp_ms: 1_700_000_000_000,
        key: None,
        headers: Vec::new(),
        payload: Some(payload.to_string().into_bytes()),
    };
    Message {
        id: format!("m-{number}"),
        source: "orders".to_owned(),
        event_type: "order.placed".to_owned(),
        event_version: None,
        ordering_key: None,
        sequence: None,
        content_type: None,
        trace_parent: None,
        decoded: None,
        fetched: None,
        payload_hash: None,
        record,
    }
}

/// The two statements and nothing else, through the same code that runs those of components.
struct Plain;

impl Plain {
    async fn execute(tx: &Tx, text: &str, params: &[Value]) -> Result<(), Failure> {
        let answer = run_statement(tx, &limits(), StatementMode::Execute, text, params).await;
        answer.map(drop).map_err(|_| Failure::new(oncebox_model::outcome::FailureKind::Other, text))
    }
}

impl Handler for Plain {
    fn version(&self) -> i32 {
        1
    }

    fn handle<'a>(&'a self, tx: &'a Tx, run: &'a Run<'a>) -> BoxFuture<'a, Answer> {
        Box::pin(async move {
            let id = Value::Text(run.message.id.clone());
            let (account, amount, note) =
                (Value::Int8(17), Value::Int8(250), Value::Text("two of the usual".to_owned()));
            let insert = "INSERT INTO orders (id, account, amount, note) VALUES ($1, $2, $3, $4)";
            Self::execute(tx, insert, &[id, account, amount, note]).await?;
            let update = "UPDATE account SET balance = balance + $2, n = n + 1 WHERE id = $1";
            Self::execute(tx, update, &[Value::Int8(17), Value::Int8(250)]).await?;
            Ok(Output::default())
        })
    }
}
