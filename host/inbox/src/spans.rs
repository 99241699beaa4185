//! Spans of a consumer's messages: `receive` for each batch, `process` for each run, `settle` for
//! each commit, and `create` for each message that a run emits.

use std::time::{Duration, SystemTime};

use oncebox_model::{
    error::InboxError,
    handler::DeliveryKind,
    message::Message,
    outcome::Failure,
    outgoing::{DELIVERED_TOPIC, OutgoingMessage, new_outgoing_span},
    policy::INGRESS_TOPIC,
    trace::{self, NewSpan, Span},
};
use opentelemetry::trace::{SpanContext, SpanKind, TraceFlags, TraceState};

use crate::{
    batch::{abort::Abort, call::CallResult, routed::Routed},
    consumer::ConsumerInbox,
};

/// Key of the attribute that says whether the transaction of a run was committed.
const TRANSACTION: &str = "oncebox.transaction";
const COMMITTED: &str = "committed";
const ROLLED_BACK: &str = "rolled_back";
/// The answer to COMMIT was lost.
const UNKNOWN: &str = "unknown";

impl ConsumerInbox {
    /// Gives a message without a trace context one of its own, where it is to be traced. Its row
    /// keeps it.
    pub(crate) fn give_context(&self, message: &mut Message) {
        if trace::is_enabled() && !trace::is_valid(message.trace_parent.as_deref()) {
            let derived = self.derived(message).filter(SpanContext::is_sampled);
            message.trace_parent = derived.as_ref().map(trace::trace_parent);
        }
    }

    /// Returns the context of a message that came with none: the same with each delivery.
    fn derived(&self, message: &Message) -> Option<SpanContext> {
        let record = &message.record;
        let (partition, offset) = (record.partition.to_be_bytes(), record.offset.to_be_bytes());
        let names = [self.tenant.as_bytes(), self.name.as_bytes(), record.topic.as_bytes()];
        trace::derived(&[names[0], names[1], names[2], &partition, &offset])
    }

    /// Begins the span of a batch that comes from a partition, with a link to each traced message.
    pub(crate) fn receive(&self, batch: &[Routed]) -> Option<Span> {
        let first = &batch.first()?.request.message;
        let contexts = batch.iter().map(|one| one.request.message.trace_parent.as_deref());
        let mut contexts = contexts.filter_map(trace::traced).peekable();
        contexts.peek()?;
        self.new_span("receive", SpanKind::Client, first)
            .with("messaging.batch.message_count", batch.len() as i64)
            .linked(contexts)
            .begin_trace()
    }

    /// Begins the span of a run of a message. None where the message is not traced.
    pub(crate) fn process_span(&self, routed: &Routed, spans: &RunSpans) -> Option<Span> {
        let message = &routed.request.message;
        let parent = trace::traced(message.trace_parent.as_deref())?;
        let (attempt, delivery) = routed.attempt();
        let is_tombstone = message.record.payload.is_none().then_some(true);
        let offset = is_of_kafka(message).then_some(message.record.offset);
        self.new_span("process", SpanKind::Consumer, message)
            .with("messaging.message.id", message.id.clone())
            .with("messaging.message.body.size", message.record.payload_bytes() as i64)
            .with_some("messaging.kafka.offset", offset)
            .with_some("messaging.kafka.message.tombstone", is_tombstone)
            .with("oncebox.event_type", message.event_type.clone())
            .with("oncebox.version", i64::from(routed.handler.version()))
            .with("oncebox.attempt", i64::from(attempt))
            .with("oncebox.delivery", name_of(delivery))
            .linked(spans.received.clone())
            .begin_below(&parent)
    }

    /// Creates a span of an operation on messages of one partition, or of one that another consumer
    /// sent.
    fn new_span(&self, operation: &'static str, kind: SpanKind, message: &Message) -> NewSpan {
        let record = &message.record;
        let is_of_kafka = is_of_kafka(message);
        let (system, destination) =
            if is_of_kafka { ("kafka", &*record.topic) } else { ("oncebox", &*self.name) };
        let partition = is_of_kafka.then(|| record.partition.to_string());
        NewSpan::new(format!("{operation} {destination}"), kind)
            .with("messaging.system", system)
            .with("messaging.operation.name", operation)
            .with("messaging.operation.type", operation)
            .with("messaging.destination.name", destination.to_owned())
            .with_some("messaging.destination.partition.id", partition)
            .with("messaging.consumer.group.name", self.policy.group(&self.tenant, &self.name))
            .with("oncebox.tenant", self.tenant.clone())
            .with("oncebox.consumer", self.name.clone())
    }

    /// Begins the span of a message that a run emitted.
    fn create_span(&self, run: &Span, outgoing: &OutgoingMessage) -> Option<Span> {
        let of = (&*self.tenant, &*self.name);
        let (destination, id) = (&outgoing.destination, &*outgoing.id);
        new_outgoing_span("create", SpanKind::Producer, destination, id, of)
            .begin_below(&run.context())
    }

    /// Returns the context with which an outgoing message is sent: that of its `create`. One whose
    /// cause is not traced says so, where the cause came without a context.
    pub(crate) fn create(
        &self,
        spans: &mut RunSpans,
        (index, cause): (usize, &Message),
        outgoing: &OutgoingMessage,
    ) -> Option<String> {
        if let Some(run) = spans.of(index) {
            let created = self.create_span(run, outgoing)?;
            let trace_parent = created.trace_parent();
            spans.created.push(created);
            return Some(trace_parent);
        }
        match &cause.trace_parent {
            Some(_) => None,
            None => self.derived(cause).map(|context| trace::trace_parent(&unsampled(&context))),
        }
    }

    /// Adds the first span of the trace of a message that came without a context, after its first
    /// run.
    fn begin_own_trace(&self, run: &RunSpan, batch: &[Routed]) {
        let Some(routed) = batch.get(run.index).filter(|routed| routed.attempt().0 == 1) else {
            return;
        };
        let message = &routed.request.message;
        let context = trace::traced(message.trace_parent.as_deref());
        let own = self.derived(message).filter(|own| context.as_ref() == Some(own));
        let root = own.and_then(|own| {
            self.new_span("receive", SpanKind::Client, message)
                .with("messaging.batch.message_count", 1)
                .begin_as(&own, run.began_at)
        });
        if let Some(root) = root {
            root.end_at(run.ended_at);
        }
    }
}

/// Returns whether a message came from a topic, and not from another consumer or over HTTP.
fn is_of_kafka(message: &Message) -> bool {
    ![DELIVERED_TOPIC, INGRESS_TOPIC].contains(&&*message.record.topic)
}

/// Returns the context of a trace that nobody records.
fn unsampled(context: &SpanContext) -> SpanContext {
    let (trace_id, span_id) = (context.trace_id(), context.span_id());
    SpanContext::new(trace_id, span_id, TraceFlags::default(), false, TraceState::NONE)
}

fn name_of(delivery: DeliveryKind) -> &'static str {
    match delivery {
        DeliveryKind::Live => "live",
        DeliveryKind::Retry => "retry",
        DeliveryKind::Replay => "replay",
        DeliveryKind::Shadow => "shadow",
    }
}

/// The span of a run that has ended, by the index of its message in the batch.
#[derive(Debug)]
struct RunSpan {
    index: usize,
    span: Span,
    began_at: SystemTime,
    ended_at: SystemTime,
}

/// Spans of the runs of one transaction, and of what they emitted. They end with the transaction, so
/// that each says what became of its run.
#[derive(Debug, Default)]
pub(crate) struct RunSpans {
    /// Span of the batch; none where it is not recorded, or for a message that comes from no
    /// partition.
    received: Option<SpanContext>,
    ran: Vec<RunSpan>,
    created: Vec<Span>,
    /// Whether COMMIT was sent.
    is_committing: bool,
}

impl RunSpans {
    /// Creates the spans of a transaction of a batch.
    pub(crate) fn of_batch(received: Option<SpanContext>) -> Self {
        Self { received, ran: Vec::new(), created: Vec::new(), is_committing: false }
    }

    /// Adds the span of a run, which took this long, with the result of its call.
    pub(crate) fn ran<T>(
        &mut self,
        index: usize,
        (span, took): (Option<Span>, Duration),
        result: &CallResult<T>,
    ) {
        let Some(span) = span else { return };
        match result {
            CallResult::Ok(_) => {}
            CallResult::Failed(failure)
            | CallResult::Abandoned(failure)
            | CallResult::Contention(failure) => failed(&span, failure),
            CallResult::ConnectionLost => span.fail("connection_lost"),
            CallResult::Stopped(_) => span.fail("stopped"),
        }
        let ended_at = SystemTime::now();
        let began_at = ended_at.checked_sub(took).unwrap_or(ended_at);
        self.ran.push(RunSpan { index, span, began_at, ended_at });
    }

    /// Returns the span of the last run of a message.
    fn of(&self, index: usize) -> Option<&Span> {
        self.ran.iter().rev().find(|run| run.index == index).map(|run| &run.span)
    }

    /// Marks the runs of a group that failed, and ends the spans of its other runs. These were
    /// rolled back within the transaction, and their messages run again.
    pub(crate) fn undone(&mut self, group: &[usize], failures: &[(usize, Failure)]) {
        let failure_of = |index| failures.iter().find(|(failed, _)| *failed == index);
        for run in self.ran.iter().filter(|run| group.len() > 1 && group.contains(&run.index)) {
            failure_of(run.index).inspect(|(_, failure)| failed(&run.span, failure));
        }
        let is_good =
            |run: &mut RunSpan| group.contains(&run.index) && failure_of(run.index).is_none();
        self.ran.extract_if(.., is_good).for_each(|run| end(run, ROLLED_BACK));
    }

    /// Begins the span of the commit, below that of the batch; below that of the run for a message
    /// that runs from the inbox.
    pub(crate) fn settle(&mut self, consumer: &ConsumerInbox, batch: &[Routed]) -> Option<Span> {
        self.is_committing = true;
        let first = batch.first()?;
        let of_run = || self.ran.first().map(|run| run.span.context());
        let parent = self.received.clone().or_else(of_run)?;
        consumer
            .new_span("settle", SpanKind::Client, &first.request.message)
            .with("messaging.batch.message_count", batch.len() as i64)
            .begin_below(&parent)
    }

    /// Ends the spans of a transaction by the answer to its COMMIT. What is unknown is not said.
    pub(crate) fn ended(
        &mut self,
        consumer: &ConsumerInbox,
        batch: &[Routed],
        settle: Option<Span>,
        committed: &Result<(), Abort>,
    ) {
        let transaction = match committed {
            Ok(()) => COMMITTED,
            Err(Abort::Host(InboxError::CommitUnknown(_))) => UNKNOWN,
            Err(_) => ROLLED_BACK,
        };
        if let Some(settle) = settle {
            if committed.is_err() {
                settle.fail(transaction);
            }
            settle.end();
        }
        if committed.is_ok() {
            self.ran.iter().for_each(|run| consumer.begin_own_trace(run, batch));
        }
        self.end_all(transaction);
    }

    fn end_all(&mut self, transaction: &'static str) {
        for created in self.created.drain(..) {
            created.set(TRANSACTION, transaction);
            created.end();
        }
        self.ran.drain(..).for_each(|run| end(run, transaction));
    }
}

impl Drop for RunSpans {
    fn drop(&mut self) {
        self.end_all(if self.is_committing { UNKNOWN } else { ROLLED_BACK });
    }
}

fn end(run: RunSpan, transaction: &'static str) {
    run.span.set(TRANSACTION, transaction);
    run.span.end_at(run.ended_at);
}

/// Marks the span of a run that failed, and logs the failure as an exception of the span.
fn failed(span: &Span, failure: &Failure) {
    span.fail(failure.kind.name());
    let _current = span.attach();
    tracing::event!(
        target: "oncebox::exception",
        tracing::Level::DEBUG,
        exception.r#type = failure.kind.name(),
        exception.message = trace::bounded(&failure.text),
        "a handler failed"
    );
}
