//! State of a store, for one run of a handler.

use std::{collections::HashMap, sync::Arc};

use oncebox_model::{
    handler::{DeliveryKind, Run},
    message::Message,
    outgoing::{Outbox, OutgoingMessage},
    policy::Limits,
    trace,
    tx::{StatementError, Tx},
};
use tokio::time::Instant;
use wasmtime::component::ResourceTable;
use wasmtime_wasi::{WasiCtx, WasiCtxView, WasiView};

use crate::{
    host::{
        clock::Clock,
        emit::EmitLog,
        log::lines::HandlerLog,
        random::Random,
        sql::{Enqueued, Error, SqlSession, SqlStop},
        trace::HandlerSpans,
        wasi::sandbox,
    },
    limiter::MemoryLimiter,
    record::Recording,
    settings::Settings,
};

/// Most host resources of a guest at the same time: streams, pollables, savepoints.
const RESOURCES_MAX: usize = 1024;

/// The host's state of one run.
pub(crate) struct StoreState {
    pub(crate) facts: Facts,
    /// The host's open transaction. None in a trial of the start.
    tx: Option<Tx>,
    pub(crate) limits: Arc<Limits>,
    pub(crate) config: Arc<Vec<(String, String)>>,
    pub(crate) session: SqlSession,
    /// Enqueued statements whose answers the run has not seen.
    pub(crate) enqueued: Enqueued,
    may_run_ahead: bool,
    /// Whether the deployment has the grant `emit`, and the run is one of a message.
    pub(crate) may_emit: bool,
    pub(crate) outbox: Outbox,
    pub(crate) emits: EmitLog,
    pub(crate) log: HandlerLog,
    pub(crate) spans: HandlerSpans,
    pub(crate) memory: MemoryLimiter,
    pub(crate) table: ResourceTable,
    pub(crate) clock: Clock,
    pub(crate) random: Random,
    /// Rest of [`crate::record::FUEL`], where the engine counts fuel and the run has ended by
    /// itself.
    pub(crate) fuel_left: Option<u64>,
    pub(crate) recording: Option<Recording>,
    /// Context of WASI, made at its first use. Most components import nothing of WASI.
    wasi: Option<WasiCtx>,
}

/// The facts that `context` returns.
pub(crate) struct Facts {
    pub(crate) tenant: String,
    pub(crate) consumer: String,
    pub(crate) topic: Arc<str>,
    pub(crate) partition: i32,
    pub(crate) offset: i64,
    pub(crate) attempt: u32,
    pub(crate) kind: DeliveryKind,
    pub(crate) event_version: Option<String>,
    pub(crate) trace_parent: Option<String>,
    pub(crate) deadline: Instant,
}

impl StoreState {
    /// Makes the state of a run of these messages, of which `run` names the first.
    pub(crate) fn new(
        tx: Option<&Tx>,
        run: &Run<'_>,
        messages: &[&Message],
        settings: &Settings,
    ) -> Self {
        let recording =
            settings.recorder.as_ref().map(|recorder| recorder.start(&run.message.id, run.attempt));
        let log = HandlerLog::new(settings.limits.log_bytes_max, recording.is_some());
        let mut table = ResourceTable::new();
        table.set_max_capacity(RESOURCES_MAX);
        Self {
            facts: Facts::of(run),
            tx: tx.cloned(),
            session: SqlSession::default(),
            enqueued: Enqueued::new(),
            may_run_ahead: run.may_run_ahead,
            may_emit: settings.may_emit && run.outbox.may_emit,
            outbox: run.outbox.clone(),
            emits: EmitLog::of(messages),
            memory: MemoryLimiter::new(settings.limits.memory_bytes),
            clock: Clock::starting_at(run.message.record.timestamp_ms),
            random: Random::new(&settings.random_key, run.consumer, &run.message.id),
            wasi: None,
            limits: settings.limits.clone(),
            config: settings.config.clone(),
            log,
            spans: HandlerSpans::default(),
            table,
            fuel_left: None,
            recording,
        }
    }

    /// Returns the host's open transaction, or the guest's error where there is none.
    pub(crate) fn tx(&self) -> Result<Tx, SqlStop> {
        let none = || {
            SqlStop::Guest(Error::Refused(
                "there is no database before the first message; send SQL from the handler only"
                    .to_owned(),
            ))
        };
        self.tx.clone().ok_or_else(none)
    }

    /// Takes the messages that the run emitted, by the index of their cause. Their records stay.
    pub(crate) fn take_outgoing(&mut self) -> HashMap<usize, Vec<OutgoingMessage>> {
        self.record_outgoing();
        self.emits.take()
    }

    /// Ends the statements of the run: waits for what is enqueued, unless a run that succeeds may
    /// leave that to its caller.
    pub(crate) async fn end_statements(&mut self, is_ok: bool) {
        // Its statements are neither recorded nor traced, and none is within a savepoint.
        let may_run_ahead = self.may_run_ahead
            && self.recording.is_none()
            && self.session.outermost().is_none()
            && trace::of_statements().is_none();
        if !(is_ok && may_run_ahead) {
            self.wait_for_enqueued().await;
        }
    }

    fn record_outgoing(&mut self) {
        if let Some(recording) = &mut self.recording {
            recording.emitted(self.emits.records(), self.emits.cancel_records());
        }
    }

    /// Returns the first error of the transaction since it was last sound.
    pub(crate) async fn tx_error(&mut self) -> Option<StatementError> {
        match &self.tx {
            Some(tx) => tx.error().await,
            None => None,
        }
    }
}

impl Drop for StoreState {
    /// Ends the recording, also of a run that was stopped: its record shows what it did before.
    fn drop(&mut self) {
        self.record_outgoing();
        if let Some(recording) = self.recording.take() {
            recording.end(self.log.take_lines(), self.memory.used(), self.fuel_left);
        }
    }
}

impl Facts {
    fn of(run: &Run<'_>) -> Self {
        let message = run.message;
        Self {
            tenant: run.tenant.to_owned(),
            consumer: run.consumer.to_owned(),
            topic: message.record.topic.clone(),
            partition: message.record.partition,
            offset: message.record.offset,
            attempt: run.attempt,
            kind: run.kind,
            event_version: message.event_version.clone(),
            trace_parent: message.trace_parent.clone(),
            deadline: run.deadline,
        }
    }
}

impl WasiView for StoreState {
    fn ctx(&mut self) -> WasiCtxView<'_> {
        let ctx = self.wasi.get_or_insert_with(|| sandbox::context(&self.log));
        WasiCtxView { ctx, table: &mut self.table }
    }
}
