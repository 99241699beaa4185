//! The API on a socket: connections with bounds, TLS where a certificate is configured.

use std::{
    net::SocketAddr,
    path::{Path, PathBuf},
    pin::{Pin, pin},
    sync::Arc,
    time::Duration,
};

use axum::{Router, body::Body};
use hyper::{body::Incoming, server::conn::http1, service::service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use openssl::{
    error::ErrorStack,
    ssl::{AlpnError, Ssl, SslAcceptor, SslFiletype, SslMethod, select_next_proto},
};
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::{TcpListener, TcpStream},
    sync::Semaphore,
    time::{sleep, timeout},
};
use tokio_openssl::SslStream;
use tokio_util::{sync::CancellationToken, task::TaskTracker};
use tower::ServiceExt;

use crate::{Api, Mode};

/// How long a handshake, and the head of a request, may take.
const HEAD_TIMEOUT: Duration = Duration::from_secs(10);
/// Connections at the same time; over it, new ones wait in the system's queue.
const CONNECTIONS_MAX: usize = 256;
/// How long a connection may be used, so that one that is not read from ends.
const CONNECTION_TIMEOUT: Duration = Duration::from_secs(900);
/// All that is spoken.
const ALPN: &[u8] = b"\x08http/1.1";

/// Why the API cannot be served.
#[derive(Debug, thiserror::Error)]
pub enum ListenError {
    /// The address is taken, or not one of this machine.
    #[error("failed to listen on `{address}`; set `api.listen` to a free address")]
    Bind {
        /// The address.
        address: SocketAddr,
        /// Why.
        source: std::io::Error,
    },
    /// Without tokens, other machines must not reach it.
    #[error("without tokens the API is served on a loopback address only, not on `{0}`")]
    OpenToOthers(SocketAddr),
    /// A file of the certificate is missing or not right.
    #[error("the certificate in `{}` or the key in `{}` cannot be used; both are PEM, and belong together", certificate.display(), key.display())]
    Certificate {
        /// The certificate and those it was signed by.
        certificate: PathBuf,
        /// Its private key.
        key: PathBuf,
        /// Why.
        source: ErrorStack,
    },
}

/// A bound address.
pub struct Listener {
    tcp: TcpListener,
    address: SocketAddr,
    tls: Option<SslAcceptor>,
    mode: Mode,
}

impl Listener {
    /// Bind an address; with a certificate and its key, for TLS. Without tokens, only a loopback address.
    pub async fn bind(address: SocketAddr, certificate: Option<(&Path, &Path)>, mode: Mode) -> Result<Self, ListenError> {
        if mode == Mode::Open && !address.ip().is_loopback() {
            return Err(ListenError::OpenToOthers(address));
        }
        let tls = certificate.map(|(certificate, key)| {
            let wrong = |source| ListenError::Certificate { certificate: certificate.to_owned(), key: key.to_owned(), source };
            acceptor(certificate, key).map_err(wrong)
        });
        let failed = |source| ListenError::Bind { address, source };
        let tcp = TcpListener::bind(address).await.map_err(failed)?;
        let address = tcp.local_addr().map_err(failed)?;
        Ok(Self { tcp, address, tls: tls.transpose()?, mode })
    }

    /// The address, with its port.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// `https://…` or `http://…`.
    pub fn url(&self) -> String {
        format!("{}://{}", if self.tls.is_some() { "https" } else { "http" }, self.address)
    }

    /// Serve until told to stop; what runs by then may take as long as `grace`.
    pub async fn serve(self, api: Api, stop: CancellationToken, grace: Duration) {
        assert_eq!(api.mode(), self.mode, "the address was checked for another mode");
        if self.tls.is_none() && !self.address.ip().is_loopback() {
            tracing::warn!(listen = %self.address, "the API is served without TLS to other machines: whoever is between sees the tokens; \
                set `api.tls_certificate_file` and `api.tls_key_file`");
        }
        let (router, tasks) = (crate::router(api.clone()), TaskTracker::new());
        let turns = Arc::new(Semaphore::new(CONNECTIONS_MAX));
        loop {
            let accepting = async {
                let turn = turns.clone().acquire_owned().await;
                (self.tcp.accept().await, turn)
            };
            let (accepted, turn) = tokio::select! {
                accepted = accepting => accepted,
                () = stop.cancelled() => break,
            };
            match accepted {
                Ok((stream, _)) => {
                    let connection = connection(stream, self.tls.clone(), router.clone(), stop.clone(), grace);
                    tasks.spawn(async move {
                        connection.await;
                        drop(turn);
                    });
                }
                // No file descriptor is free, or the client is gone already.
                Err(error) => {
                    tracing::debug!(%error, "a connection was not accepted");
                    sleep(Duration::from_millis(50)).await;
                }
            }
        }
        tasks.close();
        let ending = async {
            tasks.wait().await;
            api.finish().await;
        };
        if timeout(grace, ending).await.is_err() {
            tracing::warn!("requests of the API still ran when their time was up");
        }
    }
}

fn acceptor(certificate: &Path, key: &Path) -> Result<SslAcceptor, ErrorStack> {
    let mut builder = SslAcceptor::mozilla_intermediate_v5(SslMethod::tls_server())?;
    builder.set_certificate_chain_file(certificate)?;
    builder.set_private_key_file(key, SslFiletype::PEM)?;
    builder.check_private_key()?;
    builder.set_alpn_select_callback(|_, offered| select_next_proto(ALPN, offered).ok_or(AlpnError::NOACK));
    Ok(builder.build())
}

async fn connection(stream: TcpStream, tls: Option<SslAcceptor>, router: Router, stop: CancellationToken, grace: Duration) {
    let _ = stream.set_nodelay(true); // only slower without
    match tls {
        None => answer(stream, router, stop, grace).await,
        Some(tls) => match timeout(HEAD_TIMEOUT, handshake(stream, &tls)).await {
            Ok(Ok(stream)) => answer(stream, router, stop, grace).await,
            Ok(Err(error)) => tracing::debug!(%error, "a client could not agree on TLS"),
            Err(_) => tracing::debug!("a client did not agree on TLS in time"),
        },
    }
}

async fn handshake(stream: TcpStream, tls: &SslAcceptor) -> Result<SslStream<TcpStream>, openssl::ssl::Error> {
    let mut stream = SslStream::new(Ssl::new(tls.context())?, stream)?;
    Pin::new(&mut stream).accept().await?;
    Ok(stream)
}

async fn answer(stream: impl AsyncRead + AsyncWrite + Unpin, router: Router, stop: CancellationToken, grace: Duration) {
    let service = service_fn(move |request: hyper::Request<Incoming>| router.clone().oneshot(request.map(Body::new)));
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
        tracing::debug!(%error, "a connection of the API broke");
    }
}
