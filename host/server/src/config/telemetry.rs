//! Settings of what is sent to an OpenTelemetry collector.

use std::ops::RangeInclusive;

use axum::http::Uri;
use serde::{
    Deserialize, Deserializer,
    de::{Error, Unexpected, Visitor},
};

/// `[telemetry]`
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct TelemetrySettings {
    /// URL of a collector that takes OTLP over HTTP, without `/v1/traces`; empty where nothing is
    /// sent.
    #[serde(deserialize_with = "endpoint")]
    pub endpoint: String,
    /// Whether spans are sent.
    pub traces: bool,
    /// Whether log lines are sent, beside those on standard error.
    pub logs: bool,
    /// Whether metrics are sent, beside what `/metrics` answers.
    pub metrics: bool,
    /// Pause between two requests with metrics, in milliseconds, from 1000 to 120000.
    #[serde(deserialize_with = "metrics_interval_ms")]
    pub metrics_interval_ms: u64,
    /// Share of the messages that are traced among those without a `traceparent`, from 0 to 1.
    #[serde(deserialize_with = "share")]
    pub sample: f64,
    /// Share of the traces of producers that are followed, from 0 to 1.
    #[serde(deserialize_with = "share")]
    pub follow: f64,
    /// Whether the statements of handlers have spans, with their texts.
    pub statements: bool,
    /// Most spans that a run of a handler adds, from 0 to 1000.
    #[serde(deserialize_with = "handler_spans")]
    pub handler_spans: u32,
}

impl Default for TelemetrySettings {
    fn default() -> Self {
        Self {
            endpoint: String::new(),
            traces: true,
            logs: false,
            metrics: false,
            metrics_interval_ms: 60_000,
            sample: 1.0,
            follow: 1.0,
            statements: false,
            handler_spans: 32,
        }
    }
}

impl TelemetrySettings {
    /// Returns the URL for a signal; none where there is no collector.
    pub(crate) fn url(&self, signal: &str) -> Option<String> {
        let endpoint = self.endpoint.trim_end_matches('/');
        (!endpoint.is_empty()).then(|| format!("{endpoint}/v1/{signal}"))
    }
}

fn endpoint<'de, D: Deserializer<'de>>(deserializer: D) -> Result<String, D::Error> {
    let text = String::deserialize(deserializer)?;
    match fault(&text) {
        None => Ok(text),
        // The text is not repeated: it may hold a password.
        Some(fault) => Err(D::Error::custom(format!(
            "the URL of the collector {fault}; it looks like http://127.0.0.1:4318"
        ))),
    }
}

fn fault(text: &str) -> Option<&'static str> {
    if text.is_empty() {
        return None;
    }
    let Ok(uri) = text.parse::<Uri>() else { return Some("cannot be read") };
    if !matches!(uri.scheme_str(), Some("http" | "https")) {
        return Some("begins with neither `http://` nor `https://`");
    }
    if uri.authority().is_none_or(|authority| authority.as_str().contains('@')) {
        return Some("holds a user or a password; OTEL_EXPORTER_OTLP_HEADERS holds secrets");
    }
    if uri.query().is_some() {
        return Some("holds a query (`?`)");
    }
    uri.path().ends_with("/v1/traces").then_some("ends with `/v1/traces`, which the host adds")
}

fn handler_spans<'de, D: Deserializer<'de>>(deserializer: D) -> Result<u32, D::Error> {
    within(u32::deserialize(deserializer)?, 0..=1_000, "a number from 0 to 1000")
}

fn metrics_interval_ms<'de, D: Deserializer<'de>>(deserializer: D) -> Result<u64, D::Error> {
    within(u64::deserialize(deserializer)?, 1_000..=120_000, "a number from 1000 to 120000")
}

/// Returns a number that is within its bounds.
fn within<N: Copy + Into<u64> + PartialOrd, E: Error>(
    number: N,
    bounds: RangeInclusive<N>,
    expected: &'static str,
) -> Result<N, E> {
    let fault = || E::invalid_value(Unexpected::Unsigned(number.into()), &expected);
    bounds.contains(&number).then_some(number).ok_or_else(fault)
}

/// Reads a share. The environment has it as a text.
fn share<'de, D: Deserializer<'de>>(deserializer: D) -> Result<f64, D::Error> {
    deserializer.deserialize_any(Share)
}

struct Share;

impl Visitor<'_> for Share {
    type Value = f64;

    fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("a share from 0 to 1, such as 0.01")
    }

    fn visit_f64<E: Error>(self, value: f64) -> Result<f64, E> {
        let is_share = (0.0..=1.0).contains(&value);
        is_share.then_some(value).ok_or_else(|| E::invalid_value(Unexpected::Float(value), &self))
    }

    fn visit_i64<E: Error>(self, value: i64) -> Result<f64, E> {
        self.visit_f64(value as f64)
    }

    fn visit_str<E: Error>(self, value: &str) -> Result<f64, E> {
        let parsed = value.parse().map_err(|_| E::invalid_value(Unexpected::Str(value), &self))?;
        self.visit_f64(parsed)
    }
}

#[cfg(test)]
mod tests {
    use oncebox_model::policy::toml_error;

    use super::*;

    // What could go wrong: a setting that sends nothing is accepted, or an error repeats a secret.
    #[test]
    fn settings_that_cannot_work_are_refused_by_name() {
        let parse = toml::from_str::<TelemetrySettings>;
        for (text, says) in [
            ("endpoint = 'localhost:4318'", "begins with neither"),
            ("endpoint = 'grpc://a:4317'", "begins with neither"),
            ("endpoint = 'http://'", "cannot be read"),
            ("endpoint = 'http://me:hunter2@a:4318'", "holds a user or a password"),
            ("endpoint = 'http://a:4318?key=hunter2'", "holds a query"),
            ("endpoint = 'http://a:4318/v1/traces'", "which the host adds"),
            ("sample = 1.5", "expected a share from 0 to 1"),
            ("sample = -1", "expected a share from 0 to 1"),
            ("follow = 2", "expected a share from 0 to 1"),
            ("sample = 'all'", "expected a share from 0 to 1"),
            ("sample = nan", "expected a share from 0 to 1"),
            ("handler_spans = 1001", "expected a number from 0 to 1000"),
            ("metrics_interval_ms = 999", "expected a number from 1000 to 120000"),
            ("metrics_interval_ms = 120_001", "expected a number from 1000 to 120000"),
            ("handler_spans = -1", "expected u32"),
            ("protocol = 'grpc'", "unknown field `protocol`"),
        ] {
            let error = toml_error(text, &parse(text).expect_err(text)).to_string();
            assert!(error.contains(says), "{text}: {error}");
            assert!(!error.contains("hunter2"), "{error}");
        }
    }

    #[test]
    fn a_signal_has_a_path_of_its_own() {
        let url = |text| toml::from_str::<TelemetrySettings>(text).expect(text).url("traces");
        assert_eq!(url(""), None);
        for text in ["endpoint = 'https://c.example/otlp/'", "endpoint = 'https://c.example/otlp'"]
        {
            assert_eq!(url(text).as_deref(), Some("https://c.example/otlp/v1/traces"));
        }
        let sample = |text| toml::from_str::<TelemetrySettings>(text).expect(text).sample;
        let read = [sample(""), sample("sample = 0"), sample("sample = 0.25")];
        assert_eq!((read, sample("sample = '0.01'")), ([1.0, 0.0, 0.25], 0.01));
    }
}
