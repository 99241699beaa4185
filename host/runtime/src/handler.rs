//! A component as the inbox sees it: a handler of messages.

use std::sync::Arc;

use futures::future::BoxFuture;
use oncebox_model::{
    handler::{Answer, BatchRun, DeliveryKind, Handler, Run},
    message::Message,
    outcome::{Failure, FailureKind},
    policy::Limits,
    tx::Tx,
};
use tokio::sync::Semaphore;
use wasmtime::{Engine, Store};

use crate::{
    bindings::{HandlerPre, batch::BatchHandlerPre, oncebox::handler::types},
    component::{LoadedComponent, World},
    ending::{self, Ending, Said},
    record::{FUEL, Recorder},
    state::State,
};

/// What a guest may hand to the host in one call besides the parameters of a statement.
const HOST_CALL_BYTES: usize = 16 << 20;

/// What a deployment says about a component.
#[derive(Clone)]
pub struct HandlerSettings {
    /// The version that is recorded in the rows it completes.
    pub version: i32,
    /// Caps on one run.
    pub limits: Limits,
    /// What `config` answers.
    pub config: Vec<(String, String)>,
    /// The tenant's key, from which `wasi:random` is derived. A secret.
    pub random_key: [u8; 32],
}

/// The settings as every run shares them.
pub(crate) struct Settings {
    pub(crate) version: i32,
    pub(crate) limits: Arc<Limits>,
    pub(crate) config: Arc<Vec<(String, String)>>,
    pub(crate) random_key: [u8; 32],
    /// The engine counts fuel, so every store needs some.
    counts_fuel: bool,
    /// What runs did is kept here, where someone wants to see it.
    pub(crate) recorder: Option<Recorder>,
}

impl Settings {
    pub(crate) fn new(settings: HandlerSettings, counts_fuel: bool) -> Self {
        Self {
            version: settings.version,
            limits: Arc::new(settings.limits),
            config: Arc::new(settings.config),
            random_key: settings.random_key,
            counts_fuel,
            recorder: None,
        }
    }
}

/// Runs every message, or every batch, in a fresh instance of one component.
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

    /// The same handler, with everything its runs do kept by a recorder.
    pub fn recorded_by(mut self, recorder: Recorder) -> Self {
        self.settings.recorder = Some(recorder);
        self
    }

    async fn run(&self, tx: &Tx, run: &Run<'_>) -> Answer {
        match self.component.world() {
            World::Single(pre) => self.run_single(pre, tx, run).await,
            World::Batch(pre) => {
                let batch = BatchRun {
                    tenant: run.tenant,
                    consumer: run.consumer,
                    messages: &[run.message],
                    deadline: run.deadline,
                };
                let (state, ending) = self.call_batch(pre, tx, &batch).await;
                ending::settle(state, ending.and_then(only)?).await
            }
        }
    }

    async fn run_single(&self, pre: &HandlerPre<State>, tx: &Tx, run: &Run<'_>) -> Answer {
        // Declared before the store, so given back after the store gave its slot back.
        let _instance = self.instances.acquire().await.expect("the semaphore is never closed");
        let mut store = self.store(tx, run);
        let answer = async {
            let instance = pre.instantiate_async(&mut store).await?;
            instance
                .oncebox_handler_incoming_handler()
                .call_handle(&mut store, &guest_message(run.message))
                .await
        };
        let ending = Ending::of(answer.await);
        ending::settle(self.used(store), ending).await
    }

    async fn run_batch(
        &self,
        pre: &BatchHandlerPre<State>,
        tx: &Tx,
        run: &BatchRun<'_>,
    ) -> Result<Vec<Answer>, Failure> {
        let (state, ending) = self.call_batch(pre, tx, run).await;
        ending::settle_batch(state, ending).await
    }

    async fn call_batch(
        &self,
        pre: &BatchHandlerPre<State>,
        tx: &Tx,
        run: &BatchRun<'_>,
    ) -> (State, Ending<Vec<Said>>) {
        let _instance = self.instances.acquire().await.expect("the semaphore is never closed");
        let mut store = self.store(tx, &first(run));
        let messages: Vec<_> = run.messages.iter().map(|message| guest_message(message)).collect();
        let answer = async {
            let instance = pre.instantiate_async(&mut store).await?;
            instance
                .oncebox_handler_incoming_batch_handler()
                .call_handle_batch(&mut store, &messages)
                .await
        };
        let ending = Ending::of(answer.await);
        (self.used(store), ending)
    }

    /// What is left of a store whose run came to an end.
    fn used(&self, mut store: Store<State>) -> State {
        if self.settings.counts_fuel {
            store.data_mut().fuel_left = store.get_fuel().ok();
        }
        store.into_data()
    }

    fn store(&self, tx: &Tx, run: &Run<'_>) -> Store<State> {
        store(self.component.engine(), Some(tx), run, &self.settings)
    }
}

/// A store under the limits, in which a spinning guest yields.
pub(crate) fn store(
    engine: &Engine,
    tx: Option<&Tx>,
    run: &Run<'_>,
    settings: &Settings,
) -> Store<State> {
    let mut store = Store::new(engine, State::new(tx, run, settings));
    store.limiter(|state| &mut state.memory);
    store.set_hostcall_fuel(HOST_CALL_BYTES + 2 * settings.limits.params_bytes_max);
    // The first deadline counts as well: a large one would let a spinning guest run
    // past the host's timeout.
    store.set_epoch_deadline(1);
    store.epoch_deadline_async_yield_and_update(1);
    if settings.counts_fuel {
        store.set_fuel(FUEL).expect("the engine counts fuel");
    }
    store
}

/// What clock, randomness and log of a batch begin with. No facts of it reach the guest.
fn first<'a>(run: &BatchRun<'a>) -> Run<'a> {
    let BatchRun { tenant, consumer, messages, deadline } = *run;
    Run { tenant, consumer, message: messages[0], attempt: 1, kind: DeliveryKind::Live, deadline }
}

/// The answer of a batch of one.
fn only(answers: Vec<Said>) -> Result<Said, Failure> {
    <[Said; 1]>::try_from(answers).map(|[answer]| answer).map_err(|answers| {
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
            World::Batch(pre) => Box::pin(self.run_batch(pre, tx, run)),
            World::Single(_) => Box::pin(async {
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
