//! Spans of messages, for OpenTelemetry: the tracer of this process, and the trace context that a
//! message carries.
//!
//! A message is traced or not for its whole life. Its producer decides, in the `traceparent` of the
//! record; for a message without one the decision follows from where it stands, so that each host
//! and each delivery makes the same one. Without a tracer no span is made, and nothing is computed
//! for one.

use std::{borrow::Cow, cell::Cell, sync::OnceLock, time::SystemTime};

use opentelemetry::{
    Context, ContextGuard, Key, KeyValue, Value,
    context::FutureExt,
    global::BoxedTracer,
    trace::{
        Link, SpanContext, SpanId, SpanKind, Status, TraceContextExt, TraceFlags, TraceId,
        TraceState, Tracer,
    },
};
use sha2::{Digest, Sha256};

/// Most bytes of a text in a span.
const TEXT_BYTES_MAX: usize = 4_096;

/// Key of the attribute that names the class of an error.
const ERROR_TYPE: &str = "error.type";

/// Class of the error of a span that was dropped before its end.
pub const INTERRUPTED: &str = "interrupted";

/// The messages that are traced, and the spans within a run.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct TraceSettings {
    /// Share of the messages without a context that are traced, 0 to 1.
    pub sample: f64,
    /// Share of the traces of producers that are followed, 0 to 1.
    pub follow: f64,
    /// Whether the statements of handlers have spans.
    pub statements: bool,
    /// Most spans that a run of a handler adds.
    pub handler_spans: u32,
}

static TRACING: OnceLock<(BoxedTracer, TraceSettings)> = OnceLock::new();

/// Starts tracing, for the rest of the process. Only the first call has an effect.
pub fn enable(tracer: BoxedTracer, settings: TraceSettings) {
    let _ = TRACING.set((tracer, settings));
}

/// Returns whether this process makes spans.
pub fn is_enabled() -> bool {
    TRACING.get().is_some()
}

/// Returns the context in which a message is traced, from its `traceparent`. None where this
/// process makes no spans, or where the message is not traced.
pub fn traced(trace_parent: Option<&str>) -> Option<SpanContext> {
    let (_, settings) = TRACING.get()?;
    let context = context(trace_parent?).filter(SpanContext::is_sampled)?;
    is_in_share(context.trace_id(), settings.follow).then_some(context)
}

/// Returns the context of a message that came with none, from what identifies its delivery. None
/// where this process makes no spans.
pub fn derived(identity: &[&[u8]]) -> Option<SpanContext> {
    let (_, settings) = TRACING.get()?;
    let mut hash = Sha256::new();
    for part in identity {
        hash.update((part.len() as u64).to_be_bytes());
        hash.update(part);
    }
    let digest: [u8; 32] = hash.finalize().into();
    let trace_id = TraceId::from_bytes(std::array::from_fn(|at| digest[at]));
    let span_id = SpanId::from_bytes(std::array::from_fn(|at| digest[16 + at]));
    let is_traced = is_in_share(trace_id, settings.sample.min(settings.follow));
    let flags = if is_traced { TraceFlags::SAMPLED } else { TraceFlags::default() };
    Some(SpanContext::new(trace_id, span_id, flags, true, TraceState::NONE))
}

/// Returns whether a trace is in a share of all, in the same way on each host.
fn is_in_share(trace_id: TraceId, share: f64) -> bool {
    let [.., a, b, c, d] = trace_id.to_bytes();
    f64::from(u32::from_be_bytes([a, b, c, d])) < share * (f64::from(u32::MAX) + 1.0)
}

/// Returns whether a text is a `traceparent`, as W3C's Trace Context has it. A message without a
/// valid one counts as one without any.
pub fn is_valid(trace_parent: Option<&str>) -> bool {
    trace_parent.and_then(context).is_some()
}

/// Reads a `traceparent`. One of a later version may have further fields.
fn context(trace_parent: &str) -> Option<SpanContext> {
    let mut fields = trace_parent.split('-');
    let mut field = |digits: usize| {
        let field = fields.next()?;
        let is_hex = |byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f');
        (field.len() == digits && field.bytes().all(is_hex)).then_some(field)
    };
    let (version, trace, span, flags) = (field(2)?, field(32)?, field(16)?, field(2)?);
    if version == "ff" || version == "00" && fields.next().is_some() {
        return None;
    }
    let flags = TraceFlags::new(u8::from_str_radix(flags, 16).ok()?) & TraceFlags::SAMPLED;
    let (trace, span) = (TraceId::from_hex(trace).ok()?, SpanId::from_hex(span).ok()?);
    let context = SpanContext::new(trace, span, flags, true, TraceState::NONE);
    context.is_valid().then_some(context)
}

/// A span before it begins.
pub struct NewSpan {
    name: Cow<'static, str>,
    kind: SpanKind,
    attributes: Vec<KeyValue>,
    links: Vec<Link>,
}

impl NewSpan {
    /// Creates a span of this name and kind.
    pub fn new(name: impl Into<Cow<'static, str>>, kind: SpanKind) -> Self {
        Self { name: name.into(), kind, attributes: Vec::new(), links: Vec::new() }
    }

    /// Returns the span with an attribute. A long text is cut.
    pub fn with(mut self, key: &'static str, value: impl Into<Value>) -> Self {
        let value = match value.into() {
            Value::String(text) => Value::String(bounded(text.as_str()).to_owned().into()),
            value => value,
        };
        self.attributes.push(KeyValue::new(key, value));
        self
    }

    /// Returns the span with an attribute, where there is a value.
    pub fn with_some(self, key: &'static str, value: Option<impl Into<Value>>) -> Self {
        match value {
            Some(value) => self.with(key, value),
            None => self,
        }
    }

    /// Returns the span with links to these contexts.
    pub fn linked(mut self, contexts: impl IntoIterator<Item = SpanContext>) -> Self {
        self.links.extend(contexts.into_iter().map(Link::with_context));
        self
    }

    /// Begins the first span of a trace.
    pub fn begin_trace(self) -> Option<Span> {
        self.begin(&Context::new(), SystemTime::now())
    }

    /// Begins the span below another one, which may be of another process.
    pub fn begin_below(self, parent: &SpanContext) -> Option<Span> {
        let parent = Context::new().with_remote_span_context(parent.clone());
        self.begin(&parent, SystemTime::now())
    }

    /// Begins, as of an earlier time, the first span of a trace with the ids of this context.
    pub fn begin_as(self, context: &SpanContext, at: SystemTime) -> Option<Span> {
        NEXT_IDS.set(Some((context.trace_id(), context.span_id())));
        let span = self.begin(&Context::new(), at);
        NEXT_IDS.set(None);
        span
    }

    fn begin(self, parent: &Context, at: SystemTime) -> Option<Span> {
        let (tracer, _) = TRACING.get()?;
        let builder = tracer.span_builder(self.name).with_kind(self.kind).with_start_time(at);
        let builder = builder.with_attributes(self.attributes).with_links(self.links);
        let span = tracer.build_with_context(builder, parent);
        let context = Context::new().with_span(span);
        context.span().is_recording().then(|| Span { context: Some(context) })
    }
}

thread_local! {
    static NEXT_IDS: Cell<Option<(TraceId, SpanId)>> = const { Cell::new(None) };
}

/// Returns the ids of the next span of this thread; none where it is to have new ones. The process's
/// generator of ids asks for them.
pub fn next_ids() -> Option<(TraceId, SpanId)> {
    NEXT_IDS.get()
}

/// A span that is recorded. One that is dropped before its end was interrupted, and says so.
#[derive(Debug)]
pub struct Span {
    /// Context with the span as the current one; none once it has ended.
    context: Option<Context>,
}

impl Span {
    /// Returns the context that spans below this one have as their parent.
    pub fn context(&self) -> SpanContext {
        let context = self.context.as_ref();
        context.map_or(SpanContext::NONE, |context| context.span().span_context().clone())
    }

    /// Returns the `traceparent` of messages that are caused within this span.
    pub fn trace_parent(&self) -> String {
        trace_parent(&self.context())
    }

    /// Adds an attribute.
    pub fn set(&self, key: impl Into<Key>, value: impl Into<Value>) {
        if let Some(context) = &self.context {
            context.span().set_attribute(KeyValue::new(key, value));
        }
    }

    /// Marks the span as failed with an error of this class. The text of an error may hold values
    /// of a payload, so that no span has it.
    pub fn fail(&self, error_type: impl Into<Cow<'static, str>>) {
        if let Some(context) = &self.context {
            context.span().set_attribute(KeyValue::new(ERROR_TYPE, error_type.into()));
            context.span().set_status(Status::error(""));
        }
    }

    /// Makes this the current span of the thread until the guard is dropped.
    pub fn attach(&self) -> Option<ContextGuard> {
        self.context.clone().map(Context::attach)
    }

    /// Ends the span.
    pub fn end(self) {
        self.end_at(SystemTime::now());
    }

    /// Ends the span as of an earlier time.
    pub fn end_at(mut self, time: SystemTime) {
        if let Some(context) = self.context.take() {
            context.span().end_with_timestamp(time);
        }
    }
}

impl Drop for Span {
    fn drop(&mut self) {
        if self.context.is_some() {
            self.fail(INTERRUPTED);
        }
    }
}

/// Returns the `traceparent` of a context.
pub fn trace_parent(context: &SpanContext) -> String {
    let flags = context.trace_flags() & TraceFlags::SAMPLED;
    format!("00-{}-{}-{:02x}", context.trace_id(), context.span_id(), flags.to_u8())
}

/// Runs a future with a span as the current one, where there is one.
pub async fn within<F: Future>(span: Option<&Span>, future: F) -> F::Output {
    match span.and_then(|span| span.context.clone()) {
        Some(context) => future.with_context(context).await,
        None => future.await,
    }
}

/// Returns the context of the current span, where it is recorded and statements have spans.
pub fn of_statements() -> Option<SpanContext> {
    TRACING.get().filter(|(_, settings)| settings.statements)?;
    current()
}

/// Returns the context of the current span, where it is recorded and a handler that has begun this
/// many spans may begin another one.
pub fn of_handler(begun: u32) -> Option<SpanContext> {
    TRACING.get().filter(|(_, settings)| begun < settings.handler_spans)?;
    current()
}

fn current() -> Option<SpanContext> {
    Context::map_current(|current| {
        let span = current.span();
        span.is_recording().then(|| span.span_context().clone())
    })
}

/// Cuts a text to what a span holds.
pub fn bounded(text: &str) -> &str {
    &text[..text.floor_char_boundary(TEXT_BYTES_MAX)]
}

#[cfg(test)]
mod tests {
    use super::*;

    const TRACE: &str = "0af7651916cd43dd8448eb211c80319c";
    const SPAN: &str = "b7ad6b7169203331";

    // What could go wrong: a producer's text that is no context begins a trace of zeros, or one of
    // a later version of the standard is not followed.
    #[test]
    fn a_trace_parent_is_read_as_the_standard_has_it() {
        for (text, is_sampled) in [
            (format!("00-{TRACE}-{SPAN}-01"), true),
            (format!("00-{TRACE}-{SPAN}-00"), false),
            (format!("00-{TRACE}-{SPAN}-ff"), true),
            (format!("01-{TRACE}-{SPAN}-01-more"), true),
        ] {
            let read = context(&text).expect(&text);
            assert_eq!(read.is_sampled(), is_sampled, "{text}");
            assert_eq!((read.trace_id().to_string(), read.is_remote()), (TRACE.to_owned(), true));
            let written = trace_parent(&read);
            assert_eq!(written, format!("00-{TRACE}-{SPAN}-0{}", u8::from(is_sampled)));
        }
        for text in [
            String::new(),
            "x".to_owned(),
            format!("00-{TRACE}-{SPAN}"),
            format!("00-{TRACE}-{SPAN}-01-more"),
            format!("ff-{TRACE}-{SPAN}-01"),
            format!("00-{}-{SPAN}-01", "0".repeat(32)),
            format!("00-{TRACE}-{}-01", "0".repeat(16)),
            format!("00-{}-{SPAN}-01", TRACE.to_uppercase()),
            format!("00-{}-{SPAN}-01", &TRACE[1..]),
            format!("00-{TRACE}-{SPAN}-1"),
            format!("00-{TRACE}-{SPAN}-+1"),
            format!("00-{TRACE}é-{SPAN}-01"),
        ] {
            assert!(context(&text).is_none(), "{text}");
            assert!(!is_valid(Some(&text)), "{text}");
        }
    }

    // What could go wrong: hosts decide differently about one message, or a share is none.
    #[test]
    fn a_share_is_of_the_traces_and_the_same_everywhere() {
        let trace = |number: u128| TraceId::from_bytes((number * (1 << 22)).to_be_bytes());
        let in_share =
            |share| (0..1024).filter(|number| is_in_share(trace(*number), share)).count();
        assert_eq!([0.0, 0.25, 0.5, 1.0].map(in_share), [0, 256, 512, 1024]);
        assert_eq!(derived(&[b"a"]), None, "no span is made");
    }

    #[test]
    fn a_text_is_cut_between_characters() {
        let text = "é".repeat(TEXT_BYTES_MAX);
        assert_eq!(bounded(&text).len(), TEXT_BYTES_MAX);
        assert_eq!(bounded(&format!("a{text}")).len(), TEXT_BYTES_MAX - 1);
        assert_eq!(bounded("short"), "short");
    }
}
