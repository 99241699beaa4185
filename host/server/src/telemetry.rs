//! Spans, log lines and metrics on their way to a collector, over OTLP.

pub(crate) mod push;
mod samples;

use std::time::Duration;

use anyhow::{Context as _, Result, anyhow};
use oncebox_model::{
    policy::BATCH_MESSAGES_MAX,
    trace::{self, TraceSettings},
};
use opentelemetry::{
    Context, KeyValue, global,
    trace::{SpanId, TraceId},
};
use opentelemetry_appender_tracing::layer::OpenTelemetryTracingBridge;
use opentelemetry_otlp::{LogExporter, Protocol, SpanExporter, WithExportConfig, WithHttpConfig};
use opentelemetry_sdk::{
    Resource,
    error::OTelSdkResult,
    logs::{SdkLogger, SdkLoggerProvider},
    trace::{
        BatchConfigBuilder, BatchSpanProcessor, IdGenerator, RandomIdGenerator, Sampler,
        SdkTracerProvider, Span, SpanData, SpanProcessor,
    },
};

use reqwest::{blocking::Client, redirect::Policy};
use tokio::task::spawn_blocking;

use crate::config::TelemetrySettings;

/// Most spans that wait to be sent; a further one is dropped.
const SPANS_MAX: usize = 16_384;
/// Most spans of one request.
const REQUEST_SPANS_MAX: usize = 2_048;
/// Longest time of a request.
const REQUEST_MAX: Duration = Duration::from_secs(10);
/// Longest time for what is still to be sent at the end.
const END_MAX: Duration = Duration::from_secs(5);

/// The layer that hands log lines on.
pub(crate) type LogLayer = OpenTelemetryTracingBridge<SdkLoggerProvider, SdkLogger>;

/// What this process sends to a collector.
#[derive(Default)]
pub struct Telemetry {
    traces: Option<SdkTracerProvider>,
    logs: Option<SdkLoggerProvider>,
}

impl Telemetry {
    /// Prepares the sending of log lines, as far as the settings say so.
    pub(crate) fn new(settings: &TelemetrySettings) -> Result<Self> {
        let url = settings.url("logs").filter(|_| settings.logs);
        Ok(Self { logs: url.map(|url| logger(&url)).transpose()?, traces: None })
    }

    /// Returns the layer that sends log lines; none where none are sent.
    pub(crate) fn log_layer(&self) -> Option<LogLayer> {
        self.logs.as_ref().map(OpenTelemetryTracingBridge::new)
    }

    /// Starts to send spans, as far as the settings say so.
    pub(crate) fn start_traces(&mut self, settings: &TelemetrySettings) -> Result<()> {
        let Some(url) = settings.url("traces").filter(|_| settings.traces) else { return Ok(()) };
        let traces = tracer(&url)?;
        global::set_tracer_provider(traces.clone());
        let TelemetrySettings { sample, follow, statements, handler_spans, .. } = *settings;
        let settings = TraceSettings { sample, follow, statements, handler_spans };
        trace::enable(global::tracer("oncebox"), settings);
        self.traces = Some(traces);
        Ok(())
    }

    /// Sends what is left, for a limited time.
    pub async fn end(self) {
        let Self { traces, logs } = self;
        // Each waits for the thread that sends.
        let traces = spawn_blocking(move || traces.map(|it| it.shutdown_with_timeout(END_MAX)));
        let logs = spawn_blocking(move || logs.map(|it| it.shutdown_with_timeout(END_MAX)));
        for ended in [traces.await, logs.await] {
            if let Ok(Some(Err(error))) = ended {
                tracing::warn!(%error, "the collector did not get everything");
            }
        }
    }
}

/// Makes the client that sends: it follows no redirects, since it sends headers with secrets.
fn client() -> Result<Client> {
    // It has an executor of its own, which must not begin within another one.
    let made = std::thread::spawn(|| {
        Client::builder().redirect(Policy::none()).timeout(REQUEST_MAX).build()
    });
    let made = made.join().map_err(|_| anyhow!("the thread that prepares it panicked"))?;
    made.context("failed to prepare the client of the collector")
}

/// Makes the provider of spans.
fn tracer(url: &str) -> Result<SdkTracerProvider> {
    let exporter = SpanExporter::builder().with_http().with_endpoint(url);
    let exporter = exporter.with_http_client(client()?).with_protocol(Protocol::HttpBinary).build();
    let exporter = exporter.context("failed to prepare the sending of spans")?;
    let config = BatchConfigBuilder::default()
        .with_max_queue_size(SPANS_MAX)
        .with_max_export_batch_size(REQUEST_SPANS_MAX)
        .build();
    let processor =
        BatchSpanProcessor::builder(Counted(exporter)).with_batch_config(config).build();
    Ok(SdkTracerProvider::builder()
        .with_span_processor(CountedEnds(processor))
        // What is not traced does not come here.
        .with_sampler(Sampler::AlwaysOn)
        .with_id_generator(MessageIds::default())
        .with_max_links_per_span(BATCH_MESSAGES_MAX as u32)
        .with_resource(resource())
        .build())
}

/// Makes the provider of log lines.
fn logger(url: &str) -> Result<SdkLoggerProvider> {
    let exporter = LogExporter::builder().with_http().with_endpoint(url);
    let exporter = exporter.with_http_client(client()?).with_protocol(Protocol::HttpBinary).build();
    let exporter = exporter.context("failed to prepare the sending of log lines")?;
    Ok(SdkLoggerProvider::builder().with_batch_exporter(exporter).with_resource(resource()).build())
}

/// Returns what this process is, with what OTEL_RESOURCE_ATTRIBUTES and OTEL_SERVICE_NAME add.
fn resource() -> Resource {
    let given = |name| std::env::var(name).unwrap_or_default();
    let is_named = !given("OTEL_SERVICE_NAME").is_empty()
        || given("OTEL_RESOURCE_ATTRIBUTES").contains("service.name=");
    let builder = Resource::builder();
    let builder = if is_named { builder } else { builder.with_service_name("oncebox") };
    builder
        .with_attribute(KeyValue::new("service.version", env!("CARGO_PKG_VERSION")))
        .with_attribute(KeyValue::new("service.instance.id", crate::context::owner()))
        .build()
}

/// Makes the ids of spans: random ones, but for the first span of a message's own trace.
#[derive(Debug, Default)]
struct MessageIds(RandomIdGenerator);

impl IdGenerator for MessageIds {
    fn new_trace_id(&self) -> TraceId {
        trace::next_ids().map_or_else(|| self.0.new_trace_id(), |(trace_id, _)| trace_id)
    }

    fn new_span_id(&self) -> SpanId {
        trace::next_ids().map_or_else(|| self.0.new_span_id(), |(_, span_id)| span_id)
    }
}

/// Counts the spans that a collector takes, and those that it does not.
#[derive(Debug)]
struct Counted(SpanExporter);

impl opentelemetry_sdk::trace::SpanExporter for Counted {
    async fn export(&self, batch: Vec<SpanData>) -> OTelSdkResult {
        let spans = batch.len() as u64;
        let exported = self.0.export(batch).await;
        count(if exported.is_ok() { "exported" } else { "failed" }, spans);
        exported
    }

    fn shutdown_with_timeout(&self, timeout: Duration) -> OTelSdkResult {
        self.0.shutdown_with_timeout(timeout)
    }

    fn set_resource(&mut self, resource: &Resource) {
        self.0.set_resource(resource);
    }
}

/// Counts the spans that end. What is neither exported nor failed waits, or was dropped.
#[derive(Debug)]
struct CountedEnds(BatchSpanProcessor);

impl SpanProcessor for CountedEnds {
    fn on_start(&self, span: &mut Span, context: &Context) {
        self.0.on_start(span, context);
    }

    fn on_end(&self, span: SpanData) {
        count("ended", 1);
        self.0.on_end(span);
    }

    fn force_flush(&self) -> OTelSdkResult {
        self.0.force_flush()
    }

    fn shutdown_with_timeout(&self, timeout: Duration) -> OTelSdkResult {
        self.0.shutdown_with_timeout(timeout)
    }

    fn set_resource(&mut self, resource: &Resource) {
        self.0.set_resource(resource);
    }
}

fn count(outcome: &'static str, spans: u64) {
    metrics::counter!("oncebox_spans_total", "outcome" => outcome).increment(spans);
}
