//! Trial of a component's start, before any message depends on it.

use std::time::Duration;

use oncebox_model::{
    Problem,
    handler::{DeliveryKind, Run},
    message::Message,
    outgoing::Outbox,
    policy::Limits,
    record::Record,
};
use tokio::time::{Instant, timeout};
use wasmtime::Store;

use crate::{
    component::{LinkedWorld, LoadedComponent},
    failure,
    handler::store,
    load::WasmRuntime,
    settings::{HandlerSettings, Settings},
    state::StoreState,
};

/// Longest time of a start. Every message begins with one.
const START_MAX: Duration = Duration::from_secs(5);

impl WasmRuntime {
    /// Instantiates a component under the limits, without a database and without a message. A
    /// component that traps, spins or takes memory without end at its start would fail every
    /// message.
    ///
    /// # Errors
    ///
    /// The problem of a component that does not start.
    pub async fn probe(&self, component: &LoadedComponent) -> Result<(), Problem> {
        self.probe_within(component, START_MAX).await
    }

    pub(crate) async fn probe_within(
        &self,
        component: &LoadedComponent,
        limit: Duration,
    ) -> Result<(), Problem> {
        let _instance = self.instance().await;
        let (message, settings) = (empty_message(), self.probe_settings());
        let (deadline, outbox) = (Instant::now() + limit, Outbox::closed());
        let run = Run {
            tenant: "",
            consumer: "",
            message: &message,
            attempt: 1,
            kind: DeliveryKind::Live,
            deadline,
            outbox: &outbox,
            may_run_ahead: false,
        };
        let mut store = store(component.engine(), None, &run, &[], &settings);
        match timeout(limit, start(component, &mut store)).await {
            Ok(Ok(())) => Ok(()),
            Ok(Err(error)) => Err(failed(&failure::trapped(store.data(), &error).text)),
            Err(_) => Err(failed(&format!("it does not end within {} s", limit.as_secs_f64()))),
        }
    }

    fn probe_settings(&self) -> Settings {
        let limits = Limits { memory_bytes: self.memory_bytes_max(), ..Limits::default() };
        Settings::new(
            HandlerSettings {
                version: 0,
                limits,
                config: Vec::new(),
                random_key: [0; 32],
                may_emit: false,
            },
            self.counts_fuel(),
        )
    }
}

async fn start(component: &LoadedComponent, store: &mut Store<StoreState>) -> wasmtime::Result<()> {
    match component.world() {
        LinkedWorld::Single(pre) => pre.instantiate_async(store).await.map(drop),
        LinkedWorld::Batch(pre) => pre.instantiate_async(store).await.map(drop),
    }
}

fn failed(why: &str) -> Problem {
    let text = format!(
        "the component fails when it is started, before any message: {why}; what runs at its start \
            may use neither SQL nor settings, \
         so move it into the handler"
    );
    Problem::new("traps_at_start", text)
}

/// Returns an empty message, which seeds clock and randomness of a start.
fn empty_message() -> Message {
    Message {
        id: String::new(),
        source: String::new(),
        event_type: String::new(),
        event_version: None,
        ordering_key: None,
        sequence: None,
        content_type: None,
        trace_parent: None,
        decoded: None,
        fetched: None,
        payload_hash: None,
        record: Record {
            topic: "".into(),
            topic_id: None,
            partition: 0,
            offset: 0,
            timestamp_ms: 0,
            key: None,
            headers: Vec::new(),
            payload: None,
        },
    }
}
