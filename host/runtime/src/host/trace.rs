//! `trace`: spans that a guest adds to the trace of its message.

use oncebox_model::trace::{self, NewSpan, Span};
use opentelemetry::trace::{SpanContext, SpanKind};
use wasmtime::component::Resource;

use crate::{
    bindings::tracer::oncebox::handler0_2_0::trace::{Host, HostSpan},
    state::StoreState,
    text::bounded,
};

/// Most bytes of the name of a span, and of the class of an error.
const NAME_BYTES_MAX: usize = 255;
/// Most bytes of the key of an attribute, as the guest has it.
const KEY_BYTES_MAX: usize = 100;
/// Most attributes of a span.
const ATTRIBUTES_MAX: u32 = 32;

/// A guest's handle of a span, which may not be recorded.
#[derive(Debug)]
pub struct HandlerSpan {
    /// Number of the span in its run, where it is recorded.
    number: u32,
    span: Option<Span>,
    attributes: u32,
}

/// The spans of a run that are open and recorded.
#[derive(Debug, Default)]
pub(crate) struct OpenSpans {
    /// Spans that were begun.
    begun: u32,
    /// Number and context of each open span, the youngest last.
    open: Vec<(u32, SpanContext)>,
}

impl OpenSpans {
    /// Returns the context of the youngest open span.
    pub(crate) fn youngest(&self) -> Option<SpanContext> {
        self.open.last().map(|(_, context)| context.clone())
    }

    /// Begins a span, where the run is traced and may add another one.
    fn begin(&mut self, name: &str, tenant: &str, consumer: &str) -> HandlerSpan {
        let span = trace::of_handler(self.begun).and_then(|of_run| {
            NewSpan::new(bounded(name, NAME_BYTES_MAX), SpanKind::Internal)
                .with("oncebox.tenant", tenant.to_owned())
                .with("oncebox.consumer", consumer.to_owned())
                .begin_below(&self.youngest().unwrap_or(of_run))
        });
        if let Some(span) = &span {
            self.begun += 1;
            self.open.push((self.begun, span.context()));
        }
        HandlerSpan { number: self.begun, span, attributes: 0 }
    }

    fn end(&mut self, ended: HandlerSpan) {
        if let Some(span) = ended.span {
            self.open.retain(|(number, _)| *number != ended.number);
            span.end();
        }
    }
}

impl HandlerSpan {
    fn set(&mut self, key: &str, value: &str) {
        if let Some(span) = self.span.as_ref().filter(|_| self.attributes < ATTRIBUTES_MAX) {
            self.attributes += 1;
            // Handlers have names of their own, so that none says what only the host knows.
            let key = format!("handler.{}", bounded(key, KEY_BYTES_MAX));
            span.set(key, trace::bounded(value).to_owned());
        }
    }
}

impl Host for StoreState {}

impl HostSpan for StoreState {
    fn new(&mut self, name: String) -> wasmtime::Result<Resource<HandlerSpan>> {
        let span = self.spans.begin(&name, &self.facts.tenant, &self.facts.consumer);
        Ok(self.table.push(span)?)
    }

    fn set_attribute(
        &mut self,
        handle: Resource<HandlerSpan>,
        key: String,
        value: String,
    ) -> wasmtime::Result<()> {
        self.table.get_mut(&handle)?.set(&key, &value);
        Ok(())
    }

    fn fail(&mut self, handle: Resource<HandlerSpan>, error_type: String) -> wasmtime::Result<()> {
        if let Some(span) = &self.table.get(&handle)?.span {
            span.fail(bounded(&error_type, NAME_BYTES_MAX));
        }
        Ok(())
    }

    fn drop(&mut self, handle: Resource<HandlerSpan>) -> wasmtime::Result<()> {
        let span = self.table.delete(handle)?;
        self.spans.end(span);
        Ok(())
    }
}
