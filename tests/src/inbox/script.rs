//! Handlers that do what their messages say, and what a test holds in its hand meanwhile.

use std::{
    collections::HashMap,
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use futures::future::BoxFuture;
use oncebox_model::{
    Shadow,
    handler::{Answer, BatchRun, DeliveryKind, Handler, Handlers, Run},
    message::Message,
    outcome::{Failure, FailureKind},
    outgoing::Output,
    tx::Tx,
};
use sqlx::AssertSqlSafe;
use tokio::{
    sync::watch,
    time::{sleep, timeout},
};

use crate::wait::DEADLINE;

/// The handler of an event type.
type Resolve = dyn Fn(&str) -> Option<Arc<dyn Handler>> + Send + Sync;

/// Handlers that are plain Rust.
pub struct PlainHandlers {
    generation: i64,
    resolve: Box<Resolve>,
    all: Vec<Arc<dyn Handler>>,
    shadow: Option<Arc<Shadow>>,
}

impl PlainHandlers {
    /// One handler for every event type but `nobody`, at generation 0.
    pub fn of(handler: Arc<dyn Handler>) -> Arc<Self> {
        let all = vec![handler.clone()];
        let resolve = move |event_type: &str| (event_type != "nobody").then(|| handler.clone());
        Arc::new(Self { generation: 0, resolve: Box::new(resolve), all, shadow: None })
    }

    /// A generation, and who takes an event type.
    pub fn resolving(
        generation: i64,
        resolve: impl Fn(&str) -> Option<Arc<dyn Handler>> + Send + Sync + 'static,
    ) -> Arc<Self> {
        Arc::new(Self { generation, resolve: Box::new(resolve), all: Vec::new(), shadow: None })
    }

    /// One handler for every event type, and a candidate that is tried beside it.
    pub fn shadowed(handler: Arc<dyn Handler>, shadow: Shadow) -> Arc<Self> {
        let all = vec![handler.clone()];
        Arc::new(Self {
            generation: 0,
            resolve: Box::new(move |_| Some(handler.clone())),
            all,
            shadow: Some(Arc::new(shadow)),
        })
    }
}

impl Handlers for PlainHandlers {
    fn resolve(&self, message: &Message, _failed: Option<i32>) -> Option<Arc<dyn Handler>> {
        (self.resolve)(&message.event_type)
    }

    fn shadow(&self, _message: &Message) -> Option<Arc<Shadow>> {
        self.shadow.clone()
    }

    fn all(&self) -> Vec<Arc<dyn Handler>> {
        self.all.clone()
    }

    fn generation(&self) -> i64 {
        self.generation
    }
}

/// A handler that is a closure.
pub struct PlainHandler<F> {
    version: i32,
    handle: F,
}

impl<F> PlainHandler<F>
where
    F: for<'a> Fn(&'a Tx, &'a Run<'a>) -> BoxFuture<'a, Answer> + Send + Sync + 'static,
{
    /// A handler of this version.
    pub fn new(version: i32, handle: F) -> Arc<Self> {
        Arc::new(Self { version, handle })
    }
}

impl<F> Handler for PlainHandler<F>
where
    F: for<'a> Fn(&'a Tx, &'a Run<'a>) -> BoxFuture<'a, Answer> + Send + Sync + 'static,
{
    fn version(&self) -> i32 {
        self.version
    }

    fn handle<'a>(&'a self, tx: &'a Tx, run: &'a Run<'a>) -> BoxFuture<'a, Answer> {
        (self.handle)(tx, run)
    }
}

/// A handler that does what the payload says, after it has written its effect. A step a line:
///
/// - `sql <statement>`: its error is the handler's; `swallow <statement>`: its error is ignored;
/// - `gate <name>`: report there, and wait until the test opens it; `sleep <ms>`;
/// - `result <json>`: what a success returns;
/// - `retry [<ms>]`, `reject`, `park`, `other`, `trap`: fail;
/// - `before <n> <step>`: do the step only in attempts before the n-th;
/// - `shadow <step>`: do the step only in a trial of a shadow; `live <step>`: only outside of one.
pub struct Script;

impl Script {
    /// The handler, as version 1.
    pub fn handler(control: Arc<ScriptControl>) -> Arc<dyn Handler> {
        Self::version(control, 1)
    }

    /// The handler, taking the messages of a transaction together.
    pub fn batch_handler(control: Arc<ScriptControl>) -> Arc<dyn Handler> {
        Arc::new(BatchScript(control))
    }

    /// The handler as another version.
    pub fn version(control: Arc<ScriptControl>, version: i32) -> Arc<dyn Handler> {
        PlainHandler::new(version, move |tx, run| {
            let control = control.clone();
            Box::pin(async move { perform(&control, version, tx, run).await })
        })
    }
}

/// The same for all messages of a transaction in one call. As with a statement that works on a set,
/// a failed statement speaks for no message in particular; any other failure is its message's.
struct BatchScript(Arc<ScriptControl>);

impl BatchScript {
    async fn perform(&self, tx: &Tx, batch: &BatchRun<'_>) -> Result<Vec<Answer>, Failure> {
        self.0.calls.fetch_add(1, Ordering::Relaxed);
        let mut answers = Vec::new();
        for message in batch.messages {
            let BatchRun { tenant, consumer, deadline, outbox, .. } = *batch;
            let kind = DeliveryKind::Live;
            let (attempt, may_run_ahead) = (1, false);
            let run =
                Run { tenant, consumer, message, attempt, kind, deadline, outbox, may_run_ahead };
            let answer = perform(&self.0, 1, tx, &run).await;
            if let Err(Failure { kind: FailureKind::Sql { .. } | FailureKind::Trap, .. }) = answer {
                return Err(answer.expect_err("it was one"));
            }
            answers.push(answer);
        }
        Ok(answers)
    }
}

impl Handler for BatchScript {
    fn version(&self) -> i32 {
        1
    }

    fn handle<'a>(&'a self, tx: &'a Tx, run: &'a Run<'a>) -> BoxFuture<'a, Answer> {
        self.0.calls.fetch_add(1, Ordering::Relaxed);
        Box::pin(perform(&self.0, 1, tx, run))
    }

    fn takes_batches(&self) -> bool {
        true
    }

    fn handle_batch<'a>(
        &'a self,
        tx: &'a Tx,
        run: &'a BatchRun<'a>,
    ) -> BoxFuture<'a, Result<Vec<Answer>, Failure>> {
        Box::pin(self.perform(tx, run))
    }
}

async fn perform(control: &ScriptControl, version: i32, tx: &Tx, run: &Run<'_>) -> Answer {
    let backend = take_effect(tx, run, version).await?;
    control.ran(run, backend);
    let mut result = None;
    let payload = run.message.body().unwrap_or_default();
    for line in String::from_utf8_lossy(payload).lines() {
        let in_trial = run.kind == DeliveryKind::Shadow;
        let line = match line.split_once(' ') {
            Some(("shadow", step)) if in_trial => step,
            Some(("live", step)) if !in_trial => step,
            Some(("shadow" | "live", _)) => continue,
            _ => line,
        };
        if let Some(json) = line.strip_prefix("result ") {
            result = Some(json.to_owned());
        } else {
            perform_step(control, tx, run, line).await?;
        }
    }
    Ok(Output::from(result))
}

async fn perform_step(
    control: &ScriptControl,
    tx: &Tx,
    run: &Run<'_>,
    line: &str,
) -> Result<(), Failure> {
    let (verb, rest) = line.split_once(' ').unwrap_or((line, ""));
    let fail = |kind: FailureKind| Err(Failure::new(kind, format!("the script says `{line}`")));
    match verb {
        "" | "#" => Ok(()),
        "sql" => execute(tx, rest).await.map(drop),
        "swallow" => {
            let _ = execute(tx, rest).await;
            Ok(())
        }
        "sleep" => {
            sleep(Duration::from_millis(rest.parse().expect("milliseconds"))).await;
            Ok(())
        }
        "gate" => {
            control.gate(rest).pass().await;
            Ok(())
        }
        "before" => {
            let (attempt, step) = rest.split_once(' ').expect("`before <n> <step>`");
            if run.attempt >= attempt.parse().expect("an attempt") {
                return Ok(());
            }
            Box::pin(perform_step(control, tx, run, step)).await
        }
        "retry" => fail(FailureKind::Retry { delay: rest.parse().ok().map(Duration::from_millis) }),
        "reject" => fail(FailureKind::Reject),
        "park" => fail(FailureKind::Park),
        "other" => fail(FailureKind::Other),
        "trap" => fail(FailureKind::Trap),
        _ => panic!("a script cannot say `{line}`"),
    }
}

async fn take_effect(tx: &Tx, run: &Run<'_>, version: i32) -> Result<i32, Failure> {
    const INSERT: &str = "INSERT INTO effect (consumer, message_id, attempt, version) VALUES ($1, \
        $2, $3, $4) RETURNING pg_backend_pid()";
    let mut statement = tx.statement().await;
    let query = sqlx::query_scalar(INSERT)
        .bind(run.consumer)
        .bind(&run.message.id)
        .bind(run.attempt as i32)
        .bind(version);
    let answer = query.fetch_one(statement.connection()).await;
    statement.finish(answer.as_ref().err());
    answer.map_err(|error| sql_failure(&error))
}

/// One statement of a handler.
pub async fn execute(tx: &Tx, sql: &str) -> Result<u64, Failure> {
    let mut statement = tx.statement().await;
    let answer = sqlx::query(AssertSqlSafe(sql.to_owned())).execute(statement.connection()).await;
    statement.finish(answer.as_ref().err());
    answer.map(|done| done.rows_affected()).map_err(|error| sql_failure(&error))
}

fn sql_failure(error: &sqlx::Error) -> Failure {
    let sqlstate =
        error.as_database_error().and_then(|error| error.code()).unwrap_or_default().into_owned();
    Failure::new(FailureKind::Sql { sqlstate }, error.to_string())
}

/// One run of a scripted handler.
#[derive(Debug, Clone)]
pub struct Ran {
    /// The message.
    pub message_id: String,
    /// Which attempt.
    pub attempt: u32,
    /// Live or retry.
    pub kind: DeliveryKind,
    /// Process id of the backend it ran on.
    pub backend: i32,
}

/// What a test holds in its hand while scripts run.
#[derive(Default)]
pub struct ScriptControl {
    gates: Mutex<HashMap<String, Arc<Gate>>>,
    runs: Mutex<Vec<Ran>>,
    calls: AtomicUsize,
}

impl ScriptControl {
    /// The gate of this name.
    pub fn gate(&self, name: &str) -> Arc<Gate> {
        self.gates.lock().expect("no panic while held").entry(name.to_owned()).or_default().clone()
    }

    /// How often the handler of batches was called.
    pub fn calls(&self) -> usize {
        self.calls.load(Ordering::Relaxed)
    }

    /// Every run so far, also of attempts that were rolled back.
    pub fn runs(&self, message_id: &str) -> Vec<Ran> {
        self.runs
            .lock()
            .expect("no panic while held")
            .iter()
            .filter(|ran| ran.message_id == message_id)
            .cloned()
            .collect()
    }

    fn ran(&self, run: &Run<'_>, backend: i32) {
        let ran = Ran {
            message_id: run.message.id.clone(),
            attempt: run.attempt,
            kind: run.kind,
            backend,
        };
        self.runs.lock().expect("no panic while held").push(ran);
    }
}

/// A place where handlers wait for the test.
pub struct Gate {
    arrived: watch::Sender<usize>,
    open: watch::Sender<bool>,
}

impl Default for Gate {
    fn default() -> Self {
        Self { arrived: watch::Sender::new(0), open: watch::Sender::new(false) }
    }
}

impl Gate {
    /// Report here, and wait until the gate is open.
    pub async fn pass(&self) {
        self.arrived.send_modify(|arrived| *arrived += 1);
        let _ = self.open.subscribe().wait_for(|open| *open).await;
    }

    /// Wait until this many handlers have come here.
    pub async fn reached(&self, count: usize) {
        let mut arrived = self.arrived.subscribe();
        let waiting = timeout(DEADLINE, arrived.wait_for(|arrived| *arrived >= count)).await;
        drop(
            waiting
                .unwrap_or_else(|_| panic!("{count} handlers did not come to the gate"))
                .expect("the gate lives"),
        );
    }

    /// Let everyone through, also those who come later.
    pub fn open(&self) {
        self.open.send_replace(true);
    }
}
