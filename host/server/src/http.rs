//! Health, readiness and metrics.

use std::{net::SocketAddr, sync::Arc};

use anyhow::{Context, Result};
use axum::{Router, extract::State, http::StatusCode, response::IntoResponse, routing::get};
use metrics_exporter_prometheus::PrometheusHandle;
use tokio::{net::TcpListener, sync::watch};
use tokio_util::sync::CancellationToken;

/// What `/readyz` answers: ready, or why not.
pub(crate) type Readiness = Result<(), String>;

struct Shared {
    metrics: PrometheusHandle,
    readiness: watch::Receiver<Readiness>,
}

/// Bind before anything else starts, so that a taken address is an error at once.
pub(crate) async fn bind(address: SocketAddr) -> Result<TcpListener> {
    let bound = TcpListener::bind(address).await;
    bound.with_context(|| format!("failed to listen on `{address}`; set `http.listen` to a free address"))
}

/// Serve until told to stop.
pub(crate) async fn serve(
    listener: TcpListener,
    metrics: PrometheusHandle,
    readiness: watch::Receiver<Readiness>,
    stop: CancellationToken,
) -> Result<()> {
    let shared = Arc::new(Shared { metrics, readiness });
    let router = Router::new()
        .route("/healthz", get(|| async { "ok\n" }))
        .route("/readyz", get(ready))
        .route("/metrics", get(|State(shared): State<Arc<Shared>>| async move { shared.metrics.render() }))
        .with_state(shared);
    axum::serve(listener, router).with_graceful_shutdown(async move { stop.cancelled().await }).await?;
    Ok(())
}

async fn ready(State(shared): State<Arc<Shared>>) -> impl IntoResponse {
    match &*shared.readiness.borrow() {
        Ok(()) => (StatusCode::OK, "ready\n".to_owned()),
        Err(why) => (StatusCode::SERVICE_UNAVAILABLE, format!("not ready: {why}\n")),
    }
}
