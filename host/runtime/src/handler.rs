//! The inbox's handler of messages, as a component: each call in an instance of its own, and what
//! its end means for the message.

use std::sync::Arc;

use futures::future::BoxFuture;
use oncebox_model::{
    handler::{Answer, BatchRun, DeliveryKind, Handler, Run},
    message::Message,
    outcome::{Failure, FailureKind},
    outgoing::Output,
    tx::Tx,
};
use serde_json::Value;
use tokio::sync::Semaphore;
use wasmtime::{Engine, Store};

use crate::{
    bindings::{HandlerPre, batch::BatchHandlerPre, oncebox::handler::types},
    component::{LinkedWorld, LoadedComponent},
    failure::{GuestAnswer, decided, failure_of, other, trapped},
    host::sql::ConnectionLost,
    record::{FUEL, Recorder},
    settings::{HandlerSettings, Settings},
    state::StoreState,
    text::{FAILURE_BYTES, bounded},
};

/// Most bytes that a guest may pass to the host in one call, beside the parameters of a statement
/// or an outgoing message.
const HOST_CALL_BYTES: usize = 16 << 20;

/// A handler that runs every message, or every batch, in a fresh instance of one component.
pub struct ComponentHandler {
    instances: Arc<Semaphore>,
    component: LoadedComponent,
    settings: Settings,
}

impl ComponentHandler {
    pub(crate) fn new(
        instances: Arc<Semaphore>,
        component: LoadedComponent,
        settings: HandlerSettings,
        counts_fuel: bool,
    ) -> Self {
        Self { instances, component, settings: Settings::new(settings, counts_fuel) }
    }

    /// Adds a recorder, which keeps everything that runs do.
    pub fn recorded_by(mut self, recorder: Recorder) -> Self {
        self.settings.recorder = Some(recorder);
        self
    }

    async fn run(&self, tx: &Tx, run: &Run<'_>) -> Answer {
        match self.component.world() {
            LinkedWorld::Single(pre) => self.run_single(pre, tx, run).await,
            LinkedWorld::Batch(pre) => {
                let batch = BatchRun {
                    tenant: run.tenant,
                    consumer: run.consumer,
                    messages: &[run.message],
                    deadline: run.deadline,
                    outbox: run.outbox,
                };
                let (state, end) = self.call_batch(pre, tx, &batch).await;
                of_message(state, end.and_then(only)?).await
            }
        }
    }

    async fn run_single(&self, pre: &HandlerPre<StoreState>, tx: &Tx, run: &Run<'_>) -> Answer {
        // Declared before the store, so the permit is released after the store's slot.
        let _instance = self.instances.acquire().await.expect("the semaphore is never closed");
        let mut store = self.store(tx, run, &[run.message]);
        let answer = async {
            let instance = pre.instantiate_async(&mut store).await?;
            instance
                .oncebox_handler_incoming_handler()
                .call_handle(&mut store, &guest_message(run.message))
                .await
        };
        let end = CallEnd::of(answer.await);
        of_message(self.used(store), end).await
    }

    async fn run_batch(
        &self,
        pre: &BatchHandlerPre<StoreState>,
        tx: &Tx,
        run: &BatchRun<'_>,
    ) -> Result<Vec<Answer>, Failure> {
        let (state, end) = self.call_batch(pre, tx, run).await;
        of_batch(state, end).await
    }

    async fn call_batch(
        &self,
        pre: &BatchHandlerPre<StoreState>,
        tx: &Tx,
        run: &BatchRun<'_>,
    ) -> (StoreState, CallEnd<Vec<GuestAnswer>>) {
        let _instance = self.instances.acquire().await.expect("the semaphore is never closed");
        let mut store = self.store(tx, &first(run), run.messages);
        let messages: Vec<_> = run.messages.iter().map(|message| guest_message(message)).collect();
        let answer = async {
            let instance = pre.instantiate_async(&mut store).await?;
            instance
                .oncebox_handler_incoming_batch_handler()
                .call_handle_batch(&mut store, &messages)
                .await
        };
        let end = CallEnd::of(answer.await);
        (self.used(store), end)
    }

    /// Returns the state of a store whose run has ended, with the fuel that is left.
    fn used(&self, mut store: Store<StoreState>) -> StoreState {
        if self.settings.counts_fuel {
            store.data_mut().fuel_left = store.get_fuel().ok();
        }
        store.into_data()
    }

    fn store(&self, tx: &Tx, run: &Run<'_>, messages: &[&Message]) -> Store<StoreState> {
        store(self.component.engine(), Some(tx), run, messages, &self.settings)
    }
}

/// Makes a store under the limits, in which a spinning guest yields.
pub(crate) fn store(
    engine: &Engine,
    tx: Option<&Tx>,
    run: &Run<'_>,
    messages: &[&Message],
    settings: &Settings,
) -> Store<StoreState> {
    let mut store = Store::new(engine, StoreState::new(tx, run, messages, settings));
    store.limiter(|state| &mut state.memory);
    let outgoing_bytes_max =
        usize::try_from(settings.limits.outgoing_bytes_max).unwrap_or(HOST_CALL_BYTES);
    let payload_bytes_max = settings.limits.params_bytes_max.max(outgoing_bytes_max);
    store.set_hostcall_fuel(HOST_CALL_BYTES + 2 * payload_bytes_max);
    // The first deadline must be short too: a long one would let a spinning guest run past the
    // host's timeout.
    store.set_epoch_deadline(1);
    store.epoch_deadline_async_yield_and_update(1);
    if settings.counts_fuel {
        store.set_fuel(FUEL).expect("the engine counts fuel");
    }
    store
}

/// Returns the run of a batch's first message, which seeds clock, randomness and log. The guest
/// gets no facts of it.
fn first<'a>(run: &BatchRun<'a>) -> Run<'a> {
    let BatchRun { tenant, consumer, messages, deadline, outbox } = *run;
    let message = messages[0];
    let kind = DeliveryKind::Live;
    let (attempt, may_run_ahead) = (1, false);
    Run { tenant, consumer, message, attempt, kind, deadline, outbox, may_run_ahead }
}

/// Returns the answer for a batch of one message.
fn only(answers: Vec<GuestAnswer>) -> Result<GuestAnswer, Failure> {
    <[GuestAnswer; 1]>::try_from(answers).map(|[answer]| answer).map_err(|answers| {
        Failure::new(
            FailureKind::BadResult,
            format!("the handler was given 1 message and answered for {}", answers.len()),
        )
    })
}

impl Handler for ComponentHandler {
    fn version(&self) -> i32 {
        self.settings.version
    }

    fn may_emit(&self) -> bool {
        self.settings.may_emit
    }

    fn handle<'a>(&'a self, tx: &'a Tx, run: &'a Run<'a>) -> BoxFuture<'a, Answer> {
        Box::pin(self.run(tx, run))
    }

    fn takes_batches(&self) -> bool {
        self.component.takes_batches()
    }

    fn handle_batch<'a>(
        &'a self,
        tx: &'a Tx,
        run: &'a BatchRun<'a>,
    ) -> BoxFuture<'a, Result<Vec<Answer>, Failure>> {
        match self.component.world() {
            LinkedWorld::Batch(pre) => Box::pin(self.run_batch(pre, tx, run)),
            LinkedWorld::Single(_) => Box::pin(async {
                Err(Failure::new(FailureKind::Other, "this component takes one message at a time"))
            }),
        }
    }
}

fn guest_message(message: &Message) -> types::Message {
    types::Message {
        id: message.id.clone(),
        source: message.source.clone(),
        event_type: message.event_type.clone(),
        key: message.record.key.clone(),
        timestamp: message.record.timestamp_ms,
        headers: message.record.headers.clone(),
        content_type: message.content_type.clone(),
        payload: message.body().map(<[u8]>::to_vec),
    }
}

/// The end of a call of the guest.
enum CallEnd<T> {
    /// A return with an answer.
    Answered(T),
    /// A trap, or another error of wasmtime.
    Trapped(wasmtime::Error),
}

impl<T> CallEnd<T> {
    fn of(answer: wasmtime::Result<T>) -> Self {
        match answer {
            Ok(answer) => Self::Answered(answer),
            Err(error) => Self::Trapped(error),
        }
    }

    /// Maps the answer by a function that may fail.
    fn and_then<U>(
        self,
        read: impl FnOnce(T) -> Result<U, Failure>,
    ) -> Result<CallEnd<U>, Failure> {
        match self {
            Self::Answered(answer) => read(answer).map(CallEnd::Answered),
            Self::Trapped(error) => Ok(CallEnd::Trapped(error)),
        }
    }
}

/// Returns the outcome of a call for one message. An explicit decision of the handler stands.
/// Everything else gives way to a failure in the transaction, which a handler may not have noticed.
async fn of_message(mut state: StoreState, end: CallEnd<GuestAnswer>) -> Answer {
    state.end_statements(matches!(end, CallEnd::Answered(Ok(_)))).await;
    let (result, guest_text) = match end {
        CallEnd::Answered(Err(answer)) => match decided(&answer) {
            Some(failure) => return Err(failure),
            None => (Err(other(&answer)), other(&answer).text),
        },
        CallEnd::Answered(Ok(result)) => (Ok(result), String::new()),
        CallEnd::Trapped(error) => return Err(failure_of_trap(&mut state, &error).await),
    };
    if let Some(failure) = transaction_failure(&mut state, &guest_text).await {
        return Err(failure);
    }
    let result = match checked(result?, state.limits.outcome_bytes_max) {
        Ok(result) => result,
        Err(failure) => {
            state.wait_for_enqueued().await;
            return Err(failure);
        }
    };
    forget_savepoints(&mut state).await?;
    Ok(Output { result, outgoing: state.take_outgoing().remove(&0).unwrap_or_default() })
}

/// Returns the outcomes of a call for a batch. A failure in the transaction fails the whole call,
/// since its message is not known. Otherwise each answer counts for its own message.
async fn of_batch(
    mut state: StoreState,
    end: CallEnd<Vec<GuestAnswer>>,
) -> Result<Vec<Answer>, Failure> {
    state.end_statements(false).await;
    let answers = match end {
        CallEnd::Answered(answers) => answers,
        CallEnd::Trapped(error) => return Err(failure_of_trap(&mut state, &error).await),
    };
    if let Some(failure) = transaction_failure(&mut state, "").await {
        return Err(failure);
    }
    forget_savepoints(&mut state).await?;
    let bytes_max = state.limits.outcome_bytes_max;
    let mut outgoing = state.take_outgoing();
    let outcome = |(at, answer): (usize, GuestAnswer)| -> Answer {
        let result = answer.map_err(|answer| failure_of(&answer))?;
        let result = checked(result, bytes_max)?;
        Ok(Output { result, outgoing: outgoing.remove(&at).unwrap_or_default() })
    };
    Ok(answers.into_iter().enumerate().map(outcome).collect())
}

/// Returns the failure of a trapped call. A failure in the transaction before the trap comes first.
async fn failure_of_trap(state: &mut StoreState, error: &wasmtime::Error) -> Failure {
    if error.downcast_ref::<ConnectionLost>().is_some() {
        return Failure::new(FailureKind::Crashed, ConnectionLost.to_string());
    }
    let failure = trapped(state, error);
    transaction_failure(state, &failure.text).await.unwrap_or(failure)
}

async fn forget_savepoints(state: &mut StoreState) -> Result<(), Failure> {
    state
        .forget_savepoints()
        .await
        .map_err(|lost| Failure::new(FailureKind::Crashed, lost.to_string()))
}

/// Returns the transaction's first failure, if there is one: a failed statement, a refusal or a
/// cap. Its text ends with the guest's own.
async fn transaction_failure(state: &mut StoreState, guest_text: &str) -> Option<Failure> {
    let (kind, text) = match (state.tx_error().await, state.session.fault()) {
        (Some(error), _) => (
            FailureKind::Sql { sqlstate: error.sqlstate.clone() },
            format!("{}: {}", error.sqlstate, error.message),
        ),
        (None, Some(fault)) => (fault.kind.clone(), fault.text.clone()),
        (None, None) => return None,
    };
    let text = match guest_text.is_empty() {
        true => text,
        false => format!("{text}; the handler: {guest_text}"),
    };
    Some(Failure::new(kind, bounded(&text, FAILURE_BYTES)))
}

/// Checks that a result can be stored as jsonb. Otherwise the completion would fail, without the
/// reason.
fn checked(result: Option<String>, bytes_max: usize) -> Result<Option<String>, Failure> {
    let bad = |text: String| Err(Failure::new(FailureKind::BadResult, text));
    let Some(text) = &result else { return Ok(None) };
    if text.len() > bytes_max {
        return bad(format!(
            "the result has {} bytes, more than the {bytes_max} of `outcome_bytes_max`",
            text.len()
        ));
    }
    match serde_json::from_str::<Value>(text) {
        Err(error) => bad(format!("the result is not JSON: {error}")),
        Ok(value) if has_nul(&value) => {
            bad("the result contains `\\u0000`, which PostgreSQL cannot store".to_owned())
        }
        Ok(_) => Ok(result),
    }
}

/// Returns whether a value contains a NUL character. The parser's limit on nesting bounds the
/// recursion.
fn has_nul(value: &Value) -> bool {
    match value {
        Value::String(text) => text.contains('\0'),
        Value::Array(values) => values.iter().any(has_nul),
        Value::Object(members) => {
            members.iter().any(|(name, value)| name.contains('\0') || has_nul(value))
        }
        Value::Null | Value::Bool(_) | Value::Number(_) => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_that_jsonb_takes_are_kept() {
        assert_eq!(checked(None, 0), Ok(None));
        for text in
            ["null", "{}", "\"a\\u00e9\"", "[1, 2.5, {\"a\": null}]", " 1 ", "\"\\ud83d\\ude00\""]
        {
            assert_eq!(checked(Some(text.to_owned()), 100), Ok(Some(text.to_owned())));
        }
    }

    #[test]
    fn results_that_jsonb_refuses_are_the_handlers_failure() {
        let deep = format!("{}{}", "[".repeat(1000), "]".repeat(1000));
        for text in [
            "",
            "{",
            "undefined",
            "'a'",
            "\"\\u0000\"",
            "{\"\\u0000\": 1}",
            "[[\"a\\u0000\"]]",
            "\"\\ud800\"",
            "1 2",
            "NaN",
            &deep,
        ] {
            let failure = checked(Some(text.to_owned()), 10_000).expect_err(text);
            assert_eq!(failure.kind, FailureKind::BadResult, "{text}");
        }
        assert!(checked(Some("\"long\"".to_owned()), 3).is_err());
    }
}
