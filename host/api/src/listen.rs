//! HTTP on a socket: connections with bounds, TLS where a certificate is configured.

use std::{
    io::{self, IoSlice},
    net::SocketAddr,
    path::{Path, PathBuf},
    pin::{Pin, pin},
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use axum::{Router, body::Body, http::Extensions};
use bytes::Bytes;
use hyper::{
    body::{Frame, Incoming, SizeHint},
    server::conn::http1,
    service::service_fn,
};
use hyper_util::rt::{TokioIo, TokioTimer};
use openssl::{
    error::ErrorStack,
    ssl::{AlpnError, Ssl, SslAcceptor, SslFiletype, SslMethod, select_next_proto},
};
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    net::{TcpListener, TcpStream},
    time::{sleep, timeout},
};
use tokio_openssl::SslStream;
use tokio_util::{sync::CancellationToken, task::TaskTracker};
use tower::ServiceExt;

use crate::{
    Api, Mode,
    connections::{Connection, Connections},
};

/// Longest duration of a handshake, and of the head of a request.
const HEAD_TIMEOUT: Duration = Duration::from_secs(10);
/// Longest life of a connection, so that a connection whose client reads nothing ends.
const CONNECTION_TIMEOUT: Duration = Duration::from_secs(900);
/// The only protocol, in ALPN's wire format.
const ALPN: &[u8] = b"\x08http/1.1";

/// An error that keeps the API from being served.
#[derive(Debug, thiserror::Error)]
pub enum ListenError {
    /// An address that is taken, or not one of this machine.
    #[error(
        "failed to listen on `{address}`; set `{name}.listen` (ONCEBOX_{}_LISTEN) to a free address",
        name.to_uppercase()
    )]
    Bind {
        /// Section of the settings that has the address.
        name: &'static str,
        /// The address.
        address: SocketAddr,
        /// The cause.
        source: std::io::Error,
    },
    /// An address that other machines can reach, without tokens.
    #[error("without tokens the API is served on a loopback address only, not on `{0}`")]
    OpenToOthers(SocketAddr),
    /// A certificate or key that is missing or invalid.
    #[error("the certificate in `{}` or the key in `{}` cannot be used; both are PEM, and belong \
        together", certificate.display(), key.display())]
    Certificate {
        /// File of the certificate and those that signed it.
        certificate: PathBuf,
        /// File of its private key.
        key: PathBuf,
        /// The cause.
        source: ErrorStack,
    },
}

/// A bound address.
pub struct Listener {
    /// Section of the settings that has the address, and label of its metrics.
    name: &'static str,
    tcp: TcpListener,
    address: SocketAddr,
    tls: Option<SslAcceptor>,
}

impl Listener {
    /// Binds the address of the API; with a certificate and its key, for TLS. Without tokens, only
    /// a loopback address.
    ///
    /// # Errors
    ///
    /// A [`ListenError`] for an address that is not permitted or cannot be bound, or for a
    /// certificate that cannot be used.
    pub async fn bind_api(
        address: SocketAddr,
        certificate: Option<(&Path, &Path)>,
        mode: Mode,
    ) -> Result<Self, ListenError> {
        if mode == Mode::Open && !address.ip().is_loopback() {
            return Err(ListenError::OpenToOthers(address));
        }
        Self::bind("api", address, certificate).await
    }

    /// Binds the address that a section of the settings has; with a certificate and its key, for
    /// TLS.
    ///
    /// # Errors
    ///
    /// A [`ListenError`] for an address that cannot be bound, or for a certificate that cannot be
    /// used.
    pub async fn bind(
        name: &'static str,
        address: SocketAddr,
        certificate: Option<(&Path, &Path)>,
    ) -> Result<Self, ListenError> {
        let tls = certificate.map(|(certificate, key)| {
            let wrong = |source| ListenError::Certificate {
                certificate: certificate.to_owned(),
                key: key.to_owned(),
                source,
            };
            acceptor(certificate, key).map_err(wrong)
        });
        let failed = |source| ListenError::Bind { name, address, source };
        let tcp = TcpListener::bind(address).await.map_err(failed)?;
        let address = tcp.local_addr().map_err(failed)?;
        Ok(Self { name, tcp, address, tls: tls.transpose()? })
    }

    /// Returns the bound address, with its port.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Returns the URL: `https://…` or `http://…`.
    pub fn url(&self) -> String {
        format!("{}://{}", if self.tls.is_some() { "https" } else { "http" }, self.address)
    }

    /// Returns whether connections are encrypted.
    pub fn is_encrypted(&self) -> bool {
        self.tls.is_some()
    }

    /// Serves the API, and `pages` beside it, until `stop` is cancelled. Requests that run then have
    /// `grace` to end.
    pub async fn serve_api(
        self,
        api: Api,
        pages: Router,
        stop: CancellationToken,
        grace: Duration,
    ) {
        let is_for_others = !self.address.ip().is_loopback();
        assert!(api.mode() == Mode::Tokens || !is_for_others, "the address was checked");
        if self.tls.is_none() && is_for_others {
            tracing::warn!(listen = %self.address, "API served without TLS to other \
                machines, tokens can be read on the way; \
                set `api.tls_certificate_file` and `api.tls_key_file`");
        }
        let router = crate::router(api.clone()).merge(pages);
        let connections = Connections::new(self.name);
        let tasks = accept(self.tcp, self.tls, router, connections, stop, grace).await;
        let ending = async {
            tasks.wait().await;
            api.finish().await;
        };
        if timeout(grace, ending).await.is_err() {
            tracing::warn!("API requests left running after the grace period");
        }
    }

    /// Serves a router until `stop` is cancelled. Requests that run then have `grace` to end.
    pub async fn serve(self, router: Router, stop: CancellationToken, grace: Duration) {
        let connections = Connections::new(self.name);
        let tasks = accept(self.tcp, self.tls, router, connections, stop, grace).await;
        let _ = timeout(grace, tasks.wait()).await; // its sender asks again
    }
}

/// Notes that a request comes from a sender that proved who it is. Its connection is not closed for
/// another one while it is answered.
pub fn note_authenticated(request: &Extensions) {
    if let Some(connection) = request.get::<Arc<Connection>>() {
        connection.authenticated();
    }
}

/// Serves a router on a socket, without TLS, until `stop` is cancelled. Requests that run then have
/// `grace` to end. The name of the listener is a label of its metrics.
pub async fn serve_plain(
    tcp: TcpListener,
    router: Router,
    listener: &'static str,
    stop: CancellationToken,
    grace: Duration,
) {
    let tasks = accept(tcp, None, router, Connections::new(listener), stop, grace).await;
    let _ = timeout(grace, tasks.wait()).await; // an answer that is not read by then is lost
}

/// Accepts connections until `stop` is cancelled. Returns the tasks of the connections that are
/// left.
async fn accept(
    tcp: TcpListener,
    tls: Option<SslAcceptor>,
    router: Router,
    connections: Connections,
    stop: CancellationToken,
    grace: Duration,
) -> TaskTracker {
    let tasks = TaskTracker::new();
    loop {
        let accepted = tokio::select! {
            accepted = tcp.accept() => accepted,
            () = stop.cancelled() => break,
        };
        match accepted {
            Ok((stream, address)) => {
                let Some(place) = connections.admit(address.ip()) else {
                    tracing::debug!(%address, "connection refused, no other can be closed \
                        for it");
                    continue;
                };
                let (tls, router, stop) = (tls.clone(), router.clone(), stop.clone());
                tasks.spawn(async move {
                    tokio::select! {
                        () = connection(stream, tls, router, place.clone(), stop, grace) => {}
                        () = place.closed() => tracing::debug!(%address, "connection closed \
                            for another"),
                    }
                });
            }
            // No file descriptor is free, or the client is gone already. The pause keeps the loop
            // from spinning.
            Err(error) => {
                tracing::debug!(%error, "connection not accepted");
                sleep(Duration::from_millis(50)).await;
            }
        }
    }
    tasks.close();
    tasks
}

fn acceptor(certificate: &Path, key: &Path) -> Result<SslAcceptor, ErrorStack> {
    let mut builder = SslAcceptor::mozilla_intermediate_v5(SslMethod::tls_server())?;
    builder.set_certificate_chain_file(certificate)?;
    builder.set_private_key_file(key, SslFiletype::PEM)?;
    builder.check_private_key()?;
    builder.set_alpn_select_callback(|_, offered| {
        select_next_proto(ALPN, offered).ok_or(AlpnError::NOACK)
    });
    Ok(builder.build())
}

async fn connection(
    stream: TcpStream,
    tls: Option<SslAcceptor>,
    router: Router,
    place: Arc<Connection>,
    stop: CancellationToken,
    grace: Duration,
) {
    let _ = stream.set_nodelay(true); // only slower without
    match tls {
        None => answer(stream, router, place, stop, grace).await,
        Some(tls) => match timeout(HEAD_TIMEOUT, handshake(stream, &tls)).await {
            Ok(Ok(stream)) => answer(stream, router, place, stop, grace).await,
            Ok(Err(error)) => tracing::debug!(%error, "TLS handshake failed"),
            Err(_) => tracing::debug!("TLS handshake timed out"),
        },
    }
}

async fn handshake(
    stream: TcpStream,
    tls: &SslAcceptor,
) -> Result<SslStream<TcpStream>, openssl::ssl::Error> {
    let mut stream = SslStream::new(Ssl::new(tls.context())?, stream)?;
    Pin::new(&mut stream).accept().await?;
    Ok(stream)
}

async fn answer(
    stream: impl AsyncRead + AsyncWrite + Unpin,
    router: Router,
    place: Arc<Connection>,
    stop: CancellationToken,
    grace: Duration,
) {
    let stream = TrackedStream { stream, place: place.clone() };
    let service = service_fn(move |mut request: hyper::Request<Incoming>| {
        place.requested();
        request.extensions_mut().insert(place.clone());
        let (answering, place) = (router.clone().oneshot(request.map(Body::new)), place.clone());
        async move { answering.await.map(|response| response.map(|body| TrackedBody { body, place })) }
    });
    let mut builder = http1::Builder::new();
    builder.timer(TokioTimer::new()).header_read_timeout(HEAD_TIMEOUT);
    let mut connection = pin!(builder.serve_connection(TokioIo::new(stream), service));
    let ended = tokio::select! {
        ended = connection.as_mut() => ended,
        () = stop.cancelled() => {
            connection.as_mut().graceful_shutdown();
            timeout(grace, connection).await.unwrap_or(Ok(()))
        }
        () = sleep(CONNECTION_TIMEOUT) => Ok(()),
    };
    if let Err(error) = ended {
        tracing::debug!(%error, "connection failed");
    }
}

/// A body that reports to its connection when all of it was handed over to be sent.
struct TrackedBody {
    body: Body,
    place: Arc<Connection>,
}

impl hyper::body::Body for TrackedBody {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        Pin::new(&mut self.body).poll_frame(context)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

impl Drop for TrackedBody {
    fn drop(&mut self) {
        self.place.answered();
    }
}

/// A stream that reports to its connection when all data handed over to it was sent.
struct TrackedStream<S> {
    stream: S,
    place: Arc<Connection>,
}

impl<S: AsyncRead + Unpin> AsyncRead for TrackedStream<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(context, buffer)
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for TrackedStream<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(context, bytes)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write_vectored(context, bytes)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let flushed = Pin::new(&mut self.stream).poll_flush(context);
        if flushed.is_ready() {
            self.place.flushed();
        }
        flushed
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}
