//! A collector of OpenTelemetry on this machine: it takes OTLP over HTTP, and keeps what it gets.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicI64, Ordering},
    },
};

use anyhow::{Context, Result};
use axum::{
    Router,
    body::Bytes,
    extract::State,
    http::{HeaderMap, StatusCode},
    routing::post,
};
use opentelemetry_proto::tonic::{
    collector::{
        logs::v1::ExportLogsServiceRequest,
        metrics::v1::{
            ExportMetricsPartialSuccess, ExportMetricsServiceRequest, ExportMetricsServiceResponse,
        },
        trace::v1::ExportTraceServiceRequest,
    },
    common::v1::{KeyValue, any_value::Value},
    logs::v1::LogRecord,
    metrics::v1::{Metric, NumberDataPoint, metric::Data, number_data_point},
    trace::v1::{Span, status::StatusCode as SpanStatus},
};
use prost::Message;
use tokio::{net::TcpListener, task::JoinHandle};

/// A span that came.
#[derive(Debug, Clone)]
pub struct CollectedSpan {
    /// Name, such as `process orders`.
    pub name: String,
    /// Kind, such as `SPAN_KIND_CONSUMER`.
    pub kind: &'static str,
    /// Trace, in hex.
    pub trace_id: String,
    /// Own id, in hex.
    pub span_id: String,
    /// Id of its parent, in hex; empty where it has none.
    pub parent_id: String,
    /// Traces of the contexts that it is linked to.
    pub links: Vec<String>,
    /// Number of links that were cut.
    pub links_dropped: u32,
    /// Attributes, as text.
    pub attributes: BTreeMap<String, String>,
    /// Whether it failed.
    pub is_error: bool,
    /// Name of the program that made it.
    pub service: String,
    /// Process that made it.
    pub instance: String,
}

impl CollectedSpan {
    fn of(span: Span, resource: &BTreeMap<String, String>) -> Self {
        let status = span.status.as_ref().map_or(SpanStatus::Unset, |status| status.code());
        let of_resource = |key| resource.get(key).cloned().unwrap_or_default();
        Self {
            kind: span.kind().as_str_name(),
            name: span.name,
            trace_id: hex::encode(span.trace_id),
            span_id: hex::encode(span.span_id),
            parent_id: hex::encode(span.parent_span_id),
            links: span.links.iter().map(|link| hex::encode(&link.trace_id)).collect(),
            links_dropped: span.dropped_links_count,
            attributes: texts(&span.attributes),
            is_error: status == SpanStatus::Error,
            service: of_resource("service.name"),
            instance: of_resource("service.instance.id"),
        }
    }

    /// The value of an attribute; empty where it has none.
    pub fn get(&self, key: &str) -> &str {
        self.attributes.get(key).map_or("", String::as_str)
    }

    /// The first word of its name.
    pub fn operation(&self) -> &str {
        self.name.split(' ').next().unwrap_or_default()
    }

    /// Keys of its attributes.
    pub fn keys(&self) -> BTreeSet<String> {
        self.attributes.keys().cloned().collect()
    }
}

/// A log line that came.
#[derive(Debug, Clone)]
pub struct CollectedLine {
    /// Text.
    pub body: String,
    /// Trace within which it was written, in hex; empty where it was in none.
    pub trace_id: String,
    /// Span within which it was written, in hex.
    pub span_id: String,
    /// Attributes, as text.
    pub attributes: BTreeMap<String, String>,
}

impl CollectedLine {
    fn of(line: LogRecord) -> Self {
        Self {
            body: line
                .body
                .and_then(|body| body.value)
                .map(|value| text(&value))
                .unwrap_or_default(),
            trace_id: hex::encode(line.trace_id),
            span_id: hex::encode(line.span_id),
            attributes: texts(&line.attributes),
        }
    }
}

/// A sample of a counter or a gauge that came.
#[derive(Debug, Clone)]
pub struct CollectedSample {
    /// Name of the metric.
    pub name: String,
    /// Labels.
    pub labels: BTreeMap<String, String>,
    /// Value.
    pub value: f64,
    /// Name of the program.
    pub service: String,
    /// Header `api-key` of the request; empty where it has none.
    pub api_key: String,
}

#[derive(Default)]
struct Shared {
    spans: Mutex<Vec<CollectedSpan>>,
    lines: Mutex<Vec<CollectedLine>>,
    samples: Mutex<Vec<Vec<CollectedSample>>>,
    refuses: AtomicBool,
    rejected_samples: AtomicI64,
}

/// The collector. It ends with this value.
pub struct Collector {
    url: String,
    shared: Arc<Shared>,
    serving: JoinHandle<()>,
}

impl Collector {
    /// Starts a collector on a free port.
    pub async fn start() -> Result<Self> {
        let listener = TcpListener::bind("127.0.0.1:0").await.context("failed to listen")?;
        let url = format!("http://{}", listener.local_addr()?);
        let shared = Arc::<Shared>::default();
        let routes = Router::new()
            .route("/v1/traces", post(take_spans))
            .route("/v1/logs", post(take_lines))
            .route("/v1/metrics", post(take_samples))
            .with_state(shared.clone());
        let serving = tokio::spawn(async move {
            let _ = axum::serve(listener, routes).await; // it ends with the test
        });
        Ok(Self { url, shared, serving })
    }

    /// The endpoint for a host.
    pub fn url(&self) -> &str {
        &self.url
    }

    /// Refuses everything from now on, or takes it again.
    pub fn refuse(&self, refuses: bool) {
        self.shared.refuses.store(refuses, Ordering::SeqCst);
    }

    /// Answers that it took all samples of a request but so many.
    pub fn reject_samples(&self, number: i64) {
        self.shared.rejected_samples.store(number, Ordering::SeqCst);
    }

    /// The spans that have come.
    pub fn spans(&self) -> Vec<CollectedSpan> {
        held(&self.shared.spans).clone()
    }

    /// The samples that have come, by request.
    pub fn samples(&self) -> Vec<Vec<CollectedSample>> {
        held(&self.shared.samples).clone()
    }

    /// The log lines that have come.
    pub fn lines(&self) -> Vec<CollectedLine> {
        held(&self.shared.lines).clone()
    }
}

impl Drop for Collector {
    fn drop(&mut self) {
        self.serving.abort();
    }
}

async fn take_spans(State(shared): State<Arc<Shared>>, body: Bytes) -> StatusCode {
    if shared.refuses.load(Ordering::SeqCst) {
        return StatusCode::BAD_REQUEST;
    }
    let Ok(request) = ExportTraceServiceRequest::decode(body) else {
        return StatusCode::BAD_REQUEST;
    };
    for of_process in request.resource_spans {
        let resource = of_process.resource.map(|it| texts(&it.attributes)).unwrap_or_default();
        let spans = of_process.scope_spans.into_iter().flat_map(|scope| scope.spans);
        held(&shared.spans).extend(spans.map(|span| CollectedSpan::of(span, &resource)));
    }
    StatusCode::OK
}

async fn take_lines(State(shared): State<Arc<Shared>>, body: Bytes) -> StatusCode {
    let Ok(request) = ExportLogsServiceRequest::decode(body) else {
        return StatusCode::BAD_REQUEST;
    };
    let scopes = request.resource_logs.into_iter().flat_map(|of_process| of_process.scope_logs);
    let lines = scopes.flat_map(|scope| scope.log_records);
    held(&shared.lines).extend(lines.map(CollectedLine::of));
    StatusCode::OK
}

async fn take_samples(
    State(shared): State<Arc<Shared>>,
    headers: HeaderMap,
    body: Bytes,
) -> Result<Vec<u8>, StatusCode> {
    if shared.refuses.load(Ordering::SeqCst) {
        return Err(StatusCode::BAD_REQUEST);
    }
    let request = ExportMetricsServiceRequest::decode(body).map_err(|_| StatusCode::BAD_REQUEST)?;
    let key = headers.get("api-key").and_then(|key| key.to_str().ok()).unwrap_or_default();
    let mut samples = Vec::new();
    for of_process in request.resource_metrics {
        let resource = of_process.resource.map(|it| texts(&it.attributes)).unwrap_or_default();
        let service = resource.get("service.name").cloned().unwrap_or_default();
        let metrics = of_process.scope_metrics.into_iter().flat_map(|scope| scope.metrics);
        samples.extend(metrics.flat_map(|metric| samples_of(metric, &service, key)));
    }
    held(&shared.samples).push(samples);
    let rejected_data_points = shared.rejected_samples.load(Ordering::SeqCst);
    let partial_success = (rejected_data_points > 0).then(|| ExportMetricsPartialSuccess {
        rejected_data_points,
        error_message: String::new(),
    });
    Ok(ExportMetricsServiceResponse { partial_success }.encode_to_vec())
}

fn samples_of(metric: Metric, service: &str, api_key: &str) -> Vec<CollectedSample> {
    let points = match metric.data {
        Some(Data::Sum(sum)) => sum.data_points,
        Some(Data::Gauge(gauge)) => gauge.data_points,
        _ => Vec::new(),
    };
    let sample = |point: NumberDataPoint| CollectedSample {
        name: metric.name.clone(),
        labels: texts(&point.attributes),
        value: match point.value {
            Some(number_data_point::Value::AsDouble(value)) => value,
            _ => f64::NAN,
        },
        service: service.to_owned(),
        api_key: api_key.to_owned(),
    };
    points.into_iter().map(sample).collect()
}

fn held<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn texts(attributes: &[KeyValue]) -> BTreeMap<String, String> {
    let value = |it: &KeyValue| it.value.as_ref()?.value.as_ref().map(text);
    let found: BTreeMap<_, _> =
        attributes.iter().filter_map(|it| Some((it.key.clone(), value(it)?))).collect();
    assert_eq!(found.len(), attributes.len(), "each key is there once: {attributes:?}");
    found
}

fn text(value: &Value) -> String {
    match value {
        Value::StringValue(text) => text.clone(),
        Value::BoolValue(value) => value.to_string(),
        Value::IntValue(value) => value.to_string(),
        Value::DoubleValue(value) => value.to_string(),
        other => format!("{other:?}"),
    }
}
