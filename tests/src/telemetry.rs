//! The metrics and the log of a host that runs in this process.

use std::sync::{Arc, Mutex};

use metrics_exporter_prometheus::{PrometheusBuilder, PrometheusHandle};
use serde_json::Value;
use tracing::subscriber::DefaultGuard;
use tracing_subscriber::fmt::MakeWriter;

/// Counters and log of everything that runs on this thread, until it is dropped: for tests whose
/// runtime has one thread.
pub struct Telemetry {
    handle: PrometheusHandle,
    lines: Lines,
    _recorder: metrics::LocalRecorderGuard<'static>,
    _subscriber: DefaultGuard,
}

#[derive(Clone, Default)]
struct Lines(Arc<Mutex<Vec<u8>>>);

impl std::io::Write for Lines {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().expect("no panic while held").extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

impl<'a> MakeWriter<'a> for Lines {
    type Writer = Self;

    fn make_writer(&'a self) -> Self {
        self.clone()
    }
}

impl Default for Telemetry {
    fn default() -> Self {
        let recorder = Box::leak(Box::new(PrometheusBuilder::new().build_recorder()));
        let (handle, lines) = (recorder.handle(), Lines::default());
        let subscriber = tracing_subscriber::fmt()
            .json()
            .with_max_level(tracing::Level::DEBUG)
            .with_writer(lines.clone())
            .finish();
        let _recorder = metrics::set_default_local_recorder(recorder);
        Self { handle, lines, _recorder, _subscriber: tracing::subscriber::set_default(subscriber) }
    }
}

impl Telemetry {
    /// The sum of a metric's series that have all of these labels.
    pub fn sum(&self, metric: &str, labels: &[(&str, &str)]) -> f64 {
        let rendered = self.handle.render();
        let of_metric = rendered
            .lines()
            .filter_map(|line| line.strip_prefix(metric)?.strip_prefix('{')?.rsplit_once("} "));
        let wanted: Vec<_> =
            labels.iter().map(|(label, value)| format!("{label}=\"{value}\"")).collect();
        let found = of_metric.filter(|(has, _)| wanted.iter().all(|label| has.contains(label)));
        found.map(|(_, value)| value.parse::<f64>().expect("a number")).sum()
    }

    /// Everything that the metrics say, for a test that fails.
    pub fn metrics(&self) -> String {
        self.handle.render()
    }

    /// The log's events of this text, each with its fields and its `level`.
    pub fn events(&self, text: &str) -> Vec<Value> {
        let lines = self.lines.0.lock().expect("no panic while held");
        let lines = String::from_utf8_lossy(&lines);
        let events =
            lines.lines().map(|line| serde_json::from_str::<Value>(line).expect("a line of JSON"));
        let of_text = events.filter(|event| event["fields"]["message"] == text);
        of_text
            .map(|mut event| {
                event["fields"]["level"] = event["level"].take();
                event["fields"].take()
            })
            .collect()
    }
}
