//! The host's metrics on their way to a collector, once in an interval and at the end.

use std::{
    sync::Arc,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use anyhow::{Context, Result, anyhow, bail};
use axum::http::{HeaderMap, HeaderName, HeaderValue, header::CONTENT_TYPE};
use metrics_exporter_prometheus::PrometheusHandle;
use percent_encoding::percent_decode_str;
use prost::Message;
use reqwest::{Client, redirect::Policy};
use tokio::{task::JoinHandle, time::sleep};
use tokio_util::sync::CancellationToken;

use super::{
    END_MAX, REQUEST_MAX, resource,
    samples::{self, SampleTimes},
};
use crate::{
    config::TelemetrySettings,
    http::{Scrapes, told},
};

/// Variables with headers of requests, as `name=value,…`; those of the later one replace others.
const HEADERS: [&str; 2] = ["OTEL_EXPORTER_OTLP_HEADERS", "OTEL_EXPORTER_OTLP_METRICS_HEADERS"];

/// Begins to send the metrics, as far as the settings say so, until told to stop. An answer of the
/// collector counts as a scrape.
///
/// # Errors
///
/// Fails if a variable with headers cannot be read.
pub(crate) fn begin(
    settings: &TelemetrySettings,
    metrics: PrometheusHandle,
    scrapes: Arc<Scrapes>,
    stop: CancellationToken,
) -> Result<Option<JoinHandle<()>>> {
    let Some(url) = settings.url("metrics").filter(|_| settings.metrics) else { return Ok(None) };
    let mut headers = HeaderMap::new();
    for variable in HEADERS {
        let given = std::env::var(variable).unwrap_or_default();
        headers.extend(read_headers(&given).with_context(|| format!("failed to read {variable}"))?);
    }
    headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/x-protobuf"));
    let client = Client::builder().redirect(Policy::none()).default_headers(headers);
    let client = client.timeout(REQUEST_MAX).build();
    let client = client.context("failed to prepare the client of the collector")?;
    let push = Push { client, url, metrics, scrapes, start: now() };
    let interval = Duration::from_millis(settings.metrics_interval_ms);
    Ok(Some(tokio::spawn(push.keep(interval, stop))))
}

struct Push {
    client: Client,
    url: String,
    metrics: PrometheusHandle,
    scrapes: Arc<Scrapes>,
    start: u64,
}

impl Push {
    async fn keep(self, interval: Duration, stop: CancellationToken) {
        let mut is_failing = false;
        loop {
            tokio::select! {
                biased;
                () = stop.cancelled() => break,
                () = sleep(interval) => {}
            }
            let sent = self.send().await;
            match &sent {
                Err(error) if !is_failing => {
                    tracing::warn!("the collector does not take the metrics: {error:#}");
                }
                Ok(()) if is_failing => tracing::info!("the collector takes the metrics again"),
                _ => {}
            }
            is_failing = sent.is_err();
        }
        let last = tokio::time::timeout(END_MAX, self.send()).await;
        if !matches!(last, Ok(Ok(()))) {
            tracing::warn!("the collector did not get the last metrics");
        }
    }

    /// Sends the present samples.
    async fn send(&self) -> Result<()> {
        let times = SampleTimes { start: self.start, now: now() };
        let rendered = told(&self.metrics.render());
        let body = samples::request(&rendered, &resource(), times).encode_to_vec();
        let answer = self.client.post(&self.url).body(body).send().await;
        let status = answer.map_err(|error| anyhow!(error.without_url()))?.status();
        if !status.is_success() {
            bail!("it answered with the status {}", status.as_u16());
        }
        self.scrapes.note();
        Ok(())
    }
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
