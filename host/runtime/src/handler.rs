//! A component as the inbox sees it: a handler of messages.

use std::sync::Arc;

use futures::future::BoxFuture;
use oncebox_inbox::{
    handler::{Failure, Handler, Run},
    message::Message,
    policy::Limits,
    tx::Tx,
};
use tokio::sync::Semaphore;
use wasmtime::Store;

use crate::{
    bindings::oncebox::handler::types,
    component::LoadedComponent,
    ending::{self, Ending},
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
}

/// Runs every message in a fresh instance of one component.
pub struct ComponentHandler {
    instances: Arc<Semaphore>,
    component: LoadedComponent,
    settings: Settings,
}

impl ComponentHandler {
    pub(crate) fn new(instances: Arc<Semaphore>, component: LoadedComponent, settings: HandlerSettings) -> Self {
        let settings = Settings {
            version: settings.version,
            limits: Arc::new(settings.limits),
            config: Arc::new(settings.config),
            random_key: settings.random_key,
        };
        Self { instances, component, settings }
    }

    async fn run(&self, tx: &Tx, run: &Run<'_>) -> Result<Option<String>, Failure> {
        // Declared before the store, so given back after the store gave its slot back.
        let _instance = self.instances.acquire().await.expect("the semaphore is never closed");
        let mut store = self.store(tx, run);
        let ending = self.call(&mut store, run.message).await;
        ending::settle(store.into_data(), ending).await
    }

    fn store(&self, tx: &Tx, run: &Run<'_>) -> Store<State> {
        let mut store = Store::new(self.component.engine(), State::new(tx, run, &self.settings));
        store.limiter(|state| &mut state.memory);
        store.set_hostcall_fuel(HOST_CALL_BYTES + 2 * self.settings.limits.params_bytes_max);
        // The first deadline counts as well: a large one would let a spinning guest run
        // past the host's timeout.
        store.set_epoch_deadline(1);
        store.epoch_deadline_async_yield_and_update(1);
        store
    }

    async fn call(&self, store: &mut Store<State>, message: &Message) -> Ending {
        let answer = async {
            let instance = self.component.pre().instantiate_async(&mut *store).await?;
            instance.oncebox_handler_incoming_handler().call_handle(store, &guest_message(message)).await
        };
        match answer.await {
            Ok(answer) => Ending::Answered(answer),
            Err(error) => Ending::Trapped(error),
        }
    }
}

impl Handler for ComponentHandler {
    fn version(&self) -> i32 {
        self.settings.version
    }

    fn handle<'a>(&'a self, tx: &'a Tx, run: &'a Run<'a>) -> BoxFuture<'a, Result<Option<String>, Failure>> {
        Box::pin(self.run(tx, run))
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
        payload: message.record.payload.clone(),
    }
}
