//! The inbox's handler of messages, as a component.

use std::sync::Arc;

use futures::future::BoxFuture;
use oncebox_model::{
    handler::{Answer, BatchRun, DeliveryKind, Handler, Run},
    message::Message,
    outcome::{Failure, FailureKind},
    tx::Tx,
};
use tokio::sync::Semaphore;
use wasmtime::{Engine, Store};

use crate::{
    bindings::{HandlerPre, batch::BatchHandlerPre, oncebox::handler::types},
    component::{LinkedWorld, LoadedComponent},
    outcome::{self, CallEnd, GuestAnswer},
    record::{FUEL, Recorder},
    settings::{HandlerSettings, Settings},
    state::StoreState,
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
                outcome::of_message(state, end.and_then(only)?).await
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
        outcome::of_message(self.used(store), end).await
    }

    async fn run_batch(
        &self,
        pre: &BatchHandlerPre<StoreState>,
        tx: &Tx,
        run: &BatchRun<'_>,
    ) -> Result<Vec<Answer>, Failure> {
        let (state, end) = self.call_batch(pre, tx, run).await;
        outcome::of_batch(state, end).await
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
