//! Health, readiness and metrics.

use std::{
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use anyhow::{Context, Result};
use axum::{Router, extract::State, http::StatusCode, response::IntoResponse, routing::get};
use metrics_exporter_prometheus::{PrometheusBuilder, PrometheusHandle};
use tokio::{net::TcpListener, sync::watch};
use tokio_util::sync::CancellationToken;

/// The answer of `/readyz`: the time of the host's last look at its consumers, or the reason that
/// it is not ready.
pub(crate) type Readiness = Result<Instant, String>;

/// Sets the host's readiness, and logs a change of it.
pub(crate) fn announce(to: &watch::Sender<Readiness>, readiness: Readiness) {
    let before = to.send_replace(readiness.clone());
    match (&before, &readiness) {
        (Err(_), Ok(_)) => tracing::info!("ready"),
        (Err(known), Err(why)) if known == why => {}
        (_, Err(why)) => tracing::warn!(why, "not ready"),
        _ => {}
    }
}

/// Time after which a host whose loop has not come round counts as hung.
const STALE: Duration = Duration::from_secs(30);

/// Whether something took the metrics since this was last reported.
#[derive(Default)]
pub(crate) struct Scrapes(AtomicBool);

impl Scrapes {
    /// Notes an answer to `/metrics`, or that a collector took them.
    pub(crate) fn note(&self) {
        self.0.store(true, Ordering::Relaxed);
    }

    /// Returns whether something took them since the last call.
    pub(crate) fn take(&self) -> bool {
        self.0.swap(false, Ordering::Relaxed)
    }
}

struct HttpState {
    metrics: PrometheusHandle,
    scrapes: Arc<Scrapes>,
    readiness: watch::Receiver<Readiness>,
}

/// Binds the address, before anything else starts, so that a taken address is an error at once.
pub(crate) async fn bind(address: SocketAddr) -> Result<TcpListener> {
    let bound = TcpListener::bind(address).await;
    bound.with_context(|| {
        format!(
            "failed to listen on `{address}`; set `http.listen` \
        (ONCEBOX_HTTP_LISTEN) to a free address"
        )
    })
}

/// Upper bounds of the buckets of histograms, in seconds.
const BUCKETS: [f64; 8] = [0.001, 0.005, 0.025, 0.1, 0.5, 2.5, 10.0, 60.0];

/// Pause between two sortings of observations into their buckets; they happen also where nothing
/// scrapes the metrics.
const UPKEEP: Duration = Duration::from_secs(5);

/// Installs the recorder of this process's metrics.
pub(crate) fn recorder() -> Result<PrometheusHandle> {
    let builder =
        PrometheusBuilder::new().set_buckets(&BUCKETS).context("failed to set up the metrics")?;
    builder.install_recorder().context("failed to install the metrics recorder")
}

/// Longest time that open requests may take at the end.
const GRACE: Duration = Duration::from_secs(1);

/// Serves health, readiness and metrics until told to stop.
pub(crate) async fn serve(
    listener: TcpListener,
    metrics: PrometheusHandle,
    scrapes: Arc<Scrapes>,
    readiness: watch::Receiver<Readiness>,
    stop: CancellationToken,
) {
    let upkeep = metrics.clone();
    let kept = tokio::spawn(async move {
        loop {
            tokio::time::sleep(UPKEEP).await;
            upkeep.run_upkeep();
        }
    });
    let shared = Arc::new(HttpState { metrics, scrapes, readiness });
    let router = Router::new()
        .route("/healthz", get(|| async { "ok\n" }))
        .route("/readyz", get(ready))
        .route(
            "/metrics",
            get(|State(shared): State<Arc<HttpState>>| async move {
                shared.scrapes.note();
                told(&shared.metrics.render())
            }),
        )
        .with_state(shared);
    oncebox_api::listen::serve_plain(listener, router, "metrics", stop, GRACE).await;
    kept.abort();
}

/// Returns the rendered samples without those that are not a number: gauges that have ended, as of
/// a revoked partition.
fn told(rendered: &str) -> String {
    rendered
        .split_inclusive('\n')
        .filter(|line| line.starts_with('#') || !line.trim_end().ends_with(" NaN"))
        .collect()
}

async fn ready(State(shared): State<Arc<HttpState>>) -> impl IntoResponse {
    match &*shared.readiness.borrow() {
        Ok(looked_at) if looked_at.elapsed() < STALE => (StatusCode::OK, "ready\n".to_owned()),
        Ok(looked_at) => {
            let seconds = looked_at.elapsed().as_secs();
            (
                StatusCode::SERVICE_UNAVAILABLE,
                format!("not ready: the host has not looked at its consumers for {seconds} s\n"),
            )
        }
        Err(why) => (StatusCode::SERVICE_UNAVAILABLE, format!("not ready: {why}\n")),
    }
}
