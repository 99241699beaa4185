//! The host's metrics on their way to a collector, once in an interval and at the end.

use std::{
    env::VarError,
    sync::Arc,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use anyhow::{Context, Result, anyhow, bail};
use axum::http::{HeaderMap, HeaderName, HeaderValue, header::CONTENT_TYPE};
use metrics_exporter_prometheus::PrometheusHandle;
use opentelemetry_proto::tonic::collector::metrics::v1::ExportMetricsServiceResponse;
use opentelemetry_sdk::Resource;
use percent_encoding::percent_decode_str;
use prost::Message;
use reqwest::{Client, redirect::Policy};
use tokio::{task::JoinHandle, time::sleep};
use tokio_util::sync::CancellationToken;

use super::{
    END_MAX, REQUEST_MAX, resource,
    samples::{self, SampleTimes},
};
use crate::{config::TelemetrySettings, http::Scrapes};

/// Variables with headers of requests, as `name=value,…`. The first that is set counts.
const HEADERS: [&str; 2] = ["OTEL_EXPORTER_OTLP_METRICS_HEADERS", "OTEL_EXPORTER_OTLP_HEADERS"];

/// The sending of this process's metrics.
pub(crate) struct MetricsPush {
    stop: CancellationToken,
    task: JoinHandle<()>,
}

impl MetricsPush {
    /// Sends what the metrics are now, for a limited time, and ends.
    pub(crate) async fn end(self) {
        self.stop.cancel();
        let _ = self.task.await; // it has no result, and its panic is logged
    }
}

/// Begins to send the metrics, as far as the settings say so. An answer of the collector counts as
/// a scrape.
///
/// # Errors
///
/// Fails if a variable with headers cannot be read.
pub(crate) fn begin(
    settings: &TelemetrySettings,
    metrics: PrometheusHandle,
    scrapes: Arc<Scrapes>,
) -> Result<Option<MetricsPush>> {
    let Some(url) = settings.url("metrics").filter(|_| settings.metrics) else { return Ok(None) };
    let mut headers = headers()?;
    headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/x-protobuf"));
    let client = Client::builder().redirect(Policy::none()).default_headers(headers);
    let client = client.timeout(REQUEST_MAX).build();
    let client = client.context("failed to prepare the client of the collector")?;
    let push = Push { client, url, metrics, scrapes, resource: resource(), start: now() };
    let interval = Duration::from_millis(settings.metrics_interval_ms);
    let stop = CancellationToken::new();
    let task = tokio::spawn(push.keep(interval, stop.clone()));
    Ok(Some(MetricsPush { stop, task }))
}

struct Push {
    client: Client,
    url: String,
    metrics: PrometheusHandle,
    scrapes: Arc<Scrapes>,
    resource: Resource,
    start: u64,
}

impl Push {
    async fn keep(self, interval: Duration, stop: CancellationToken) {
        let mut failing = None;
        let one_after_the_other = async {
            loop {
                sleep(interval).await;
                let failed = self.send().await.err().map(|error| format!("{error:#}"));
                match &failed {
                    Some(error) if failed != failing => {
                        tracing::warn!("the collector does not take the metrics: {error}");
                    }
                    None if failing.is_some() => {
                        tracing::info!("the collector takes the metrics again");
                    }
                    _ => {}
                }
                failing = failed;
            }
        };
        tokio::select! {
            biased;
            () = stop.cancelled() => {}
            () = one_after_the_other => {}
        }
        let last = tokio::time::timeout(END_MAX, self.send()).await;
        if let Err(error) = last.unwrap_or_else(|_| Err(anyhow!("it did not answer in time"))) {
            tracing::warn!("the collector did not take the last metrics: {error:#}");
        }
    }

    /// Sends the present samples, and counts the request.
    async fn send(&self) -> Result<()> {
        let sent = self.request().await;
        let outcome = if sent.is_ok() { "exported" } else { "failed" };
        metrics::counter!("oncebox_metrics_requests_total", "outcome" => outcome).increment(1);
        sent
    }

    async fn request(&self) -> Result<()> {
        let times = SampleTimes { start: self.start, now: now() };
        let request = samples::request(&self.metrics.render(), &self.resource, times);
        let answer = self.client.post(&self.url).body(request.encode_to_vec()).send().await;
        let answer = answer.map_err(reqwest::Error::without_url)?;
        if !answer.status().is_success() {
            bail!("it answered with the status {}", answer.status().as_u16());
        }
        let body = answer.bytes().await.map_err(reqwest::Error::without_url)?;
        let answer = ExportMetricsServiceResponse::decode(body).unwrap_or_default();
        let rejected = answer.partial_success.map_or(0, |partial| partial.rejected_data_points);
        if rejected > 0 {
            bail!("it rejected {rejected} of the samples");
        }
        self.scrapes.note();
        Ok(())
    }
}

/// Returns the headers that the environment has for these requests.
fn headers() -> Result<HeaderMap> {
    for variable in HEADERS {
        match std::env::var(variable) {
            Err(VarError::NotPresent) => {}
            Err(VarError::NotUnicode(_)) => bail!("{variable} is no text"),
            Ok(text) if text.is_empty() => {}
            Ok(text) => {
                return read_headers(&text).with_context(|| format!("failed to read {variable}"));
            }
        }
    }
    Ok(HeaderMap::new())
}

/// Reads headers. No error repeats a value, which may be a secret.
fn read_headers(text: &str) -> Result<HeaderMap> {
    let mut headers = HeaderMap::new();
    let given = text.split(',').map(str::trim).enumerate().filter(|(_, entry)| !entry.is_empty());
    for (at, entry) in given {
        let fault = || anyhow!("entry {} is no `name=value` of a header", at + 1);
        let (name, value) = entry.split_once('=').ok_or_else(fault)?;
        let value: Vec<u8> = percent_decode_str(value.trim()).collect();
        let mut value = HeaderValue::from_bytes(&value).map_err(|_| fault())?;
        value.set_sensitive(true);
        let name = HeaderName::from_bytes(name.trim().as_bytes()).map_err(|_| fault())?;
        headers.insert(name, value);
    }
    Ok(headers)
}

/// Returns the nanoseconds of the Unix epoch.
fn now() -> u64 {
    let elapsed = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(elapsed.as_nanos()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    // What could go wrong: a header is left out without a word, or an error repeats a secret.
    #[test]
    fn headers_are_read_as_the_standard_has_them() {
        let read = |text: &str| {
            let headers = read_headers(text)?;
            let pair = |(name, value): (&HeaderName, &HeaderValue)| {
                (name.to_string(), String::from_utf8_lossy(value.as_bytes()).into_owned())
            };
            anyhow::Ok(headers.iter().map(pair).collect::<Vec<_>>())
        };
        let of = |name: &str, value: &str| (name.to_owned(), value.to_owned());
        assert_eq!(read("").expect("none"), []);
        let two = read(" api-key = a%20b%2Cc= , x-tenant=é,").expect("two");
        assert_eq!(two, [of("api-key", "a b,c="), of("x-tenant", "é")]);
        for text in ["hunter2", "a=b,hunter2", "=hunter2", "a=hunter2%0A", "a b=hunter2"] {
            let error = format!("{:#}", read(text).expect_err(text));
            assert!(error.contains("is no `name=value`"), "{text}: {error}");
            assert!(!error.contains("hunter2"), "{error}");
        }
    }
}
