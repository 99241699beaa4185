//! `trace`: spans that a guest adds to the trace of its message.

use std::collections::BTreeMap;

use oncebox_model::trace::{self, NewSpan, Span};
use opentelemetry::trace::{SpanContext, SpanKind};
use wasmtime::component::Resource;

use crate::{
    bindings::tracer::oncebox::handler0_2_0::trace::{Host, HostSpan},
    state::StoreState,
};

/// Most bytes of the name of a span, of the key of an attribute, and of the class of an error.
const NAME_BYTES_MAX: usize = 100;
/// Most bytes of the value of an attribute.
const VALUE_BYTES_MAX: usize = 1_024;
/// Most bytes of all texts that a run adds to spans: they wait in memory for a collector, beside
/// those of all tenants.
const TEXT_BYTES_MAX: usize = 4_096;
/// Handle of every span that is not recorded.
const UNRECORDED: u32 = 0;

/// What a guest's handle of a span stands for. The host keeps it by its number.
#[derive(Debug)]
pub struct HandlerSpan;

/// The spans that a run has added, and those of them that are open.
#[derive(Debug, Default)]
pub(crate) struct HandlerSpans {
    /// Spans that were begun, which is the number of the youngest.
    begun: u32,
    /// Bytes of the texts of all of them.
    text_bytes: usize,
    /// The open ones, the youngest last.
    open: Vec<OpenSpan>,
}

#[derive(Debug)]
struct OpenSpan {
    number: u32,
    span: Span,
    attributes: BTreeMap<String, String>,
    error_type: Option<String>,
}

impl HandlerSpans {
    /// Returns the context of the youngest open span.
    pub(crate) fn youngest(&self) -> Option<SpanContext> {
        self.open.last().map(|open| open.span.context())
    }

    /// Begins a span, where the run is traced and may add another one, and returns its handle.
    fn begin(&mut self, name: &str, tenant: &str, consumer: &str) -> u32 {
        let Some(of_run) = trace::of_handler(self.begun) else { return UNRECORDED };
        let name = cut(name, NAME_BYTES_MAX);
        if !self.has_room(name.len()) {
            return UNRECORDED;
        }
        let span = NewSpan::new(name.to_owned(), SpanKind::Internal)
            .with("oncebox.tenant", tenant.to_owned())
            .with("oncebox.consumer", consumer.to_owned())
            .begin_below(&self.youngest().unwrap_or(of_run));
        let Some(span) = span else { return UNRECORDED };
        self.begun += 1;
        let (attributes, error_type) = (BTreeMap::new(), None);
        self.open.push(OpenSpan { number: self.begun, span, attributes, error_type });
        self.begun
    }

    /// Sets an attribute. Handlers have names of their own, so that none says what only the host
    /// knows.
    fn set(&mut self, number: u32, key: &str, value: &str) {
        let Some(at) = self.find(number) else { return };
        let key = format!("handler.{}", cut(key, NAME_BYTES_MAX));
        let value = cut(value, VALUE_BYTES_MAX);
        if self.has_room(key.len() + value.len()) {
            self.open[at].attributes.insert(key, value.to_owned());
        }
    }

    fn fail(&mut self, number: u32, error_type: &str) {
        let Some(at) = self.find(number) else { return };
        let error_type = cut(error_type, NAME_BYTES_MAX);
        if self.has_room(error_type.len()) {
            self.open[at].error_type = Some(error_type.to_owned());
        }
    }

    fn end(&mut self, number: u32) {
        if let Some(at) = self.find(number) {
            self.open.remove(at).end();
        }
    }

    fn find(&self, number: u32) -> Option<usize> {
        self.open.iter().position(|open| open.number == number)
    }

    /// Takes room for a text, and returns whether there was enough.
    fn has_room(&mut self, bytes: usize) -> bool {
        let taken = self.text_bytes + bytes;
        let has_room = taken <= TEXT_BYTES_MAX;
        if has_room {
            self.text_bytes = taken;
        }
        has_room
    }
}

impl Drop for HandlerSpans {
    /// Ends what the guest left open; where it did not fail, it was interrupted.
    fn drop(&mut self) {
        while let Some(mut open) = self.open.pop() {
            open.error_type.get_or_insert_with(|| trace::INTERRUPTED.to_owned());
            open.end();
        }
    }
}

impl OpenSpan {
    fn end(self) {
        for (key, value) in self.attributes {
            self.span.set(key, value);
        }
        if let Some(error_type) = self.error_type {
            self.span.fail(error_type);
        }
        self.span.end();
    }
}

/// Cuts a text between two characters.
fn cut(text: &str, bytes_max: usize) -> &str {
    &text[..text.floor_char_boundary(bytes_max)]
}

impl Host for StoreState {}

impl HostSpan for StoreState {
    fn new(&mut self, name: String) -> wasmtime::Result<Resource<HandlerSpan>> {
        let number = self.spans.begin(&name, &self.facts.tenant, &self.facts.consumer);
        Ok(Resource::new_own(number))
    }

    fn set_attribute(
        &mut self,
        handle: Resource<HandlerSpan>,
        key: String,
        value: String,
    ) -> wasmtime::Result<()> {
        self.spans.set(handle.rep(), &key, &value);
        Ok(())
    }

    fn fail(&mut self, handle: Resource<HandlerSpan>, error_type: String) -> wasmtime::Result<()> {
        self.spans.fail(handle.rep(), &error_type);
        Ok(())
    }

    fn drop(&mut self, handle: Resource<HandlerSpan>) -> wasmtime::Result<()> {
        self.spans.end(handle.rep());
        Ok(())
    }
}
