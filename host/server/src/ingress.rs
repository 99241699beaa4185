//! Messages over HTTP: the address at which they come, and the workers that hear of them.

use std::{sync::Arc, time::Duration};

use anyhow::Result;
use axum::http::Extensions;
use oncebox_api::listen::{self, Listener};
use oncebox_inbox::DuePoller;
use oncebox_ingress::{Ingress, IngressHost};
use tokio_util::sync::CancellationToken;

use crate::{config::IngressSettings, context::HostContext};

/// Longest time that open requests may take at the end.
pub(crate) const GRACE: Duration = Duration::from_secs(5);

/// This host, as the ingress needs it.
struct IngressAccess(Arc<DuePoller>);

impl IngressHost for IngressAccess {
    fn verified(&self, request: &Extensions) {
        listen::note_authenticated(request);
    }

    fn received(&self, consumer_id: i32) {
        self.0.wake(consumer_id);
    }
}

/// Binds the address; none where the settings have none.
///
/// # Errors
/// The address cannot be bound, or the certificate cannot be used.
pub(crate) async fn bind(settings: &IngressSettings) -> Result<Option<Listener>> {
    let Some(address) = settings.listen else { return Ok(None) };
    Ok(Some(Listener::bind("ingress", address, settings.certificate()?).await?))
}

/// Serves messages over HTTP until told to stop.
pub(crate) fn serve(
    listener: Listener,
    host: &HostContext,
    stop: CancellationToken,
) -> impl Future<Output = ()> + use<> {
    if !listener.is_encrypted() && !listener.address().ip().is_loopback() {
        tracing::warn!(listen = %listener.address(), "messages over HTTP taken without TLS from \
            other machines; set `ingress.tls_certificate_file` and `ingress.tls_key_file`, or let a \
            proxy end TLS");
    }
    tracing::info!(ingress = listener.url(), "messages over HTTP are taken");
    let access = Arc::new(IngressAccess(host.due_poller.clone()));
    // Connections of their own, so that the host's own work waits for none of them.
    let ingress = Ingress::new(host.control.for_requests(), access);
    let serving = listener.serve(ingress.router(), stop, GRACE);
    async move {
        ingress.begin().await;
        tokio::select! {
            () = serving => {}
            () = ingress.keep() => {}
        }
        ingress.finish().await;
    }
}
