//! HTTP for storage that speaks S3, over OpenSSL as all of the host's TLS. It follows no redirects
//! and reads neither the environment nor proxy settings. A connection is used again.

use std::{
    io,
    net::SocketAddr,
    path::Path,
    pin::Pin,
    sync::{Mutex, MutexGuard, PoisonError},
    task::{Context, Poll},
    time::Duration,
};

use async_trait::async_trait;
use http_body_util::{BodyExt, Limited};
use hyper::{
    HeaderMap, Method, Uri,
    body::{Body, Frame, SizeHint},
    client::conn::http1::{SendRequest, handshake},
    header::{HOST, HeaderValue},
};
use hyper_util::rt::TokioIo;
use object_store::{
    ClientOptions,
    client::{
        HttpClient, HttpConnector, HttpError, HttpErrorKind, HttpRequest, HttpRequestBody,
        HttpResponse, HttpResponseBody, HttpService,
    },
};
use openssl::ssl::{SslConnector, SslMethod};
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::{TcpStream, lookup_host},
    time::{Instant, Sleep, sleep, timeout},
};
use tokio_openssl::SslStream;

use crate::{ArchiveError, network::is_public};

/// Longest wait for a connection.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// Longest wait for the head of an answer, from the last byte of the request, and for the next
/// bytes of its body.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(60);
/// Bytes a second of the slowest line over which a file is written.
const SLOWEST: u64 = 128 << 10;
/// Most bytes of the body of an answer that is an error.
const ERROR_BYTES_MAX: usize = 64 << 10;
/// Most connections that are kept.
const KEPT_MAX: usize = 32;

/// Error of a deletion that hides a file, and does not delete it.
const LEAVES_VERSION: &str = "the bucket keeps versions: it hides the file behind a delete \
    marker, and the older version stays";

type Sender = SendRequest<HttpRequestBody>;

/// Makes clients, each with connections of its own.
#[derive(Debug)]
pub(crate) struct Connector {
    tls: SslConnector,
    stall: Duration,
    allows_private: bool,
}

impl Connector {
    /// Prepares TLS that trusts the system's authorities and those of a file. Its clients connect
    /// to any address.
    pub(crate) fn new(ca_file: Option<&Path>) -> Result<Self, ArchiveError> {
        let failed = |error| {
            ArchiveError::Settings(format!("failed to prepare TLS of the archive: {error}"))
        };
        let mut builder = SslConnector::builder(SslMethod::tls_client()).map_err(failed)?;
        if let Some(path) = ca_file {
            builder.set_ca_file(path).map_err(|_| {
                ArchiveError::Settings(format!(
                    "`{}` is not there or holds no certificates in PEM",
                    path.display()
                ))
            })?;
        }
        Ok(Self { tls: builder.build(), stall: ANSWER_TIMEOUT, allows_private: true })
    }

    /// Returns a connector whose clients wait this long for the next bytes.
    pub(crate) fn stalling_after(self, stall: Duration) -> Self {
        Self { stall, ..self }
    }

    /// Returns a connector whose clients connect to no address of a private network.
    pub(crate) fn public_only(self) -> Self {
        Self { allows_private: false, ..self }
    }
}

impl HttpConnector for Connector {
    fn connect(&self, _: &ClientOptions) -> object_store::Result<HttpClient> {
        Ok(HttpClient::new(Client {
            tls: self.tls.clone(),
            stall: self.stall,
            allows_private: self.allows_private,
            kept: Mutex::default(),
        }))
    }
}

/// A client with the connections that it keeps.
#[derive(Debug)]
struct Client {
    tls: SslConnector,
    /// Longest wait for the head of an answer, and for the next bytes of its body.
    stall: Duration,
    /// Whether it connects to addresses of a private network.
    allows_private: bool,
    kept: Mutex<Vec<(Target, Sender)>>,
}

/// The server of a request.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Target {
    is_tls: bool,
    host: String,
    port: u16,
}

#[async_trait]
impl HttpService for Client {
    async fn call(&self, request: HttpRequest) -> Result<HttpResponse, HttpError> {
        let bytes = request.body().content_length() as u64;
        match timeout(self.stall + sending(bytes), self.exchange(request)).await {
            Ok(answer) => answer,
            Err(_) => Err(late()),
        }
    }
}

impl Client {
    async fn exchange(&self, request: HttpRequest) -> Result<HttpResponse, HttpError> {
        let target = Target::of(request.uri())?;
        let is_deletion = *request.method() == Method::DELETE;
        let request = target.address(request)?;
        let mut sender = match self.take(&target) {
            Some(sender) => sender,
            None => self.open(&target).await?,
        };
        let answer = sender.send_request(request).await;
        let answer = answer.map_err(|error| HttpError::new(HttpErrorKind::Request, error))?;
        self.keep(target, sender);
        if is_deletion && leaves_version(answer.headers()) {
            return Err(HttpError::new(HttpErrorKind::Unknown, io::Error::other(LEAVES_VERSION)));
        }
        let broken = |error: hyper::Error| HttpError::new(HttpErrorKind::Interrupted, error);
        let steady = |body: hyper::body::Incoming| Steady::new(body.map_err(broken), self.stall);
        if answer.status().is_success() {
            return Ok(answer.map(|body| HttpResponseBody::new(steady(body))));
        }
        // The body of an error is collected, and may be without an end.
        Ok(answer.map(|body| {
            let body = Limited::new(steady(body), ERROR_BYTES_MAX);
            HttpResponseBody::new(body.map_err(|error| {
                HttpError::new(HttpErrorKind::Interrupted, io::Error::other(error))
            }))
        }))
    }

    fn kept(&self) -> MutexGuard<'_, Vec<(Target, Sender)>> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes a connection on which the last answer was read to its end.
    fn take(&self, target: &Target) -> Option<Sender> {
        let mut kept = self.kept();
        kept.retain(|(_, sender)| !sender.is_closed());
        let at = kept.iter().position(|(of, sender)| of == target && sender.is_ready())?;
        Some(kept.swap_remove(at).1)
    }

    /// Keeps a connection. Its answer is still being read, and nothing takes it before.
    fn keep(&self, target: Target, sender: Sender) {
        let mut kept = self.kept();
        if kept.len() < KEPT_MAX {
            kept.push((target, sender));
        }
    }

    /// Connects to one of the addresses of a server that are allowed. The address that was judged
    /// is the one that is used.
    async fn connect(&self, target: &Target) -> io::Result<TcpStream> {
        let found = lookup_host((target.host.as_str(), target.port)).await?;
        let is_allowed = |address: &SocketAddr| self.allows_private || is_public(address.ip());
        let allowed: Vec<_> = found.filter(is_allowed).collect();
        if allowed.is_empty() {
            return Err(io::Error::other(format!(
                "`{}` has no address outside of private networks, and those are not allowed for it",
                target.host
            )));
        }
        TcpStream::connect(&allowed[..]).await
    }

    async fn open(&self, target: &Target) -> Result<Sender, HttpError> {
        let stream = timeout(CONNECT_TIMEOUT, self.connect(target)).await.map_err(|_| late())?;
        let stream = stream.map_err(unreachable)?;
        let _ = stream.set_nodelay(true); // only faster
        if !target.is_tls {
            return connection(stream).await;
        }
        let session = self
            .tls
            .configure()
            .and_then(|tls| tls.into_ssl(&target.host))
            .and_then(|session| SslStream::new(session, stream));
        let mut stream = session.map_err(unreachable)?;
        Pin::new(&mut stream).connect().await.map_err(unreachable)?;
        connection(stream).await
    }
}

/// Returns whether the answer to a deletion says that an older version stays. So does that of a
/// bucket with a lock against deletion, which refuses only to delete a version.
fn leaves_version(headers: &HeaderMap) -> bool {
    headers.get("x-amz-delete-marker").is_some_and(|value| value == "true")
}

/// Returns the longest wait of the archive for the answer to a request with a body of so many
/// bytes.
pub(crate) fn longest(bytes: u64) -> Duration {
    ANSWER_TIMEOUT + sending(bytes)
}

/// Returns the longest time in which so many bytes are sent.
fn sending(bytes: u64) -> Duration {
    Duration::from_secs(bytes / SLOWEST)
}

/// The body of an answer, which ends with an error where no bytes come for too long.
struct Steady<B> {
    body: B,
    stall: Duration,
    patience: Pin<Box<Sleep>>,
}

impl<B> Steady<B> {
    fn new(body: B, stall: Duration) -> Self {
        Self { body, stall, patience: Box::pin(sleep(stall)) }
    }
}

impl<B: Body<Error = HttpError> + Unpin> Body for Steady<B> {
    type Data = B::Data;
    type Error = HttpError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Self::Data>, Self::Error>>> {
        if let Poll::Ready(frame) = Pin::new(&mut self.body).poll_frame(context) {
            let stall = self.stall;
            self.patience.as_mut().reset(Instant::now() + stall);
            return Poll::Ready(frame);
        }
        match self.patience.as_mut().poll(context) {
            Poll::Ready(()) => Poll::Ready(Some(Err(late()))),
            Poll::Pending => Poll::Pending,
        }
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

/// Begins HTTP on a stream. A task drives the connection for as long as its sender lives.
async fn connection<S>(stream: S) -> Result<Sender, HttpError>
where
    S: AsyncRead + AsyncWrite + Send + Unpin + 'static,
{
    let (sender, connection) = handshake(TokioIo::new(stream)).await.map_err(unreachable)?;
    tokio::spawn(async move {
        let _ = connection.await; // its error reaches the request
    });
    Ok(sender)
}

fn unreachable<E: std::error::Error + Send + Sync + 'static>(error: E) -> HttpError {
    HttpError::new(HttpErrorKind::Connect, error)
}

fn late() -> HttpError {
    HttpError::new(HttpErrorKind::Timeout, io::Error::from(io::ErrorKind::TimedOut))
}

impl Target {
    fn of(uri: &Uri) -> Result<Self, HttpError> {
        let is_tls = uri.scheme_str() != Some("http");
        let host = uri.host().ok_or_else(|| unreachable(io::Error::other("no server is named")))?;
        let port = uri.port_u16().unwrap_or(if is_tls { 443 } else { 80 });
        let host = host.trim_matches(['[', ']']).to_ascii_lowercase();
        Ok(Self { is_tls, host, port })
    }

    /// Returns the name of the server as signatures have it: without the port of its scheme.
    fn authority(&self) -> String {
        let host = match self.host.contains(':') {
            true => format!("[{}]", self.host),
            false => self.host.clone(),
        };
        match (self.is_tls, self.port) {
            (true, 443) | (false, 80) => host,
            (_, port) => format!("{host}:{port}"),
        }
    }

    /// Returns a request as it goes over a connection to the server.
    fn address(&self, mut request: HttpRequest) -> Result<HttpRequest, HttpError> {
        let wrong = |error| HttpError::new(HttpErrorKind::Unknown, error);
        let authority = HeaderValue::try_from(self.authority()).map_err(wrong)?;
        request.headers_mut().insert(HOST, authority);
        let path = request.uri().path_and_query().cloned();
        *request.uri_mut() = path.map_or_else(Uri::default, Uri::from);
        Ok(request)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    // What could go wrong: a large file on a slow line is given up before it can arrive.
    #[test]
    fn a_large_file_has_time_for_a_slow_line() {
        assert_eq!(longest(0), Duration::from_secs(60));
        assert_eq!(longest(48 << 20), Duration::from_secs(60 + 384));
    }

    // What could go wrong: a server refuses the signature, since its name was signed otherwise.
    #[test]
    fn a_server_is_named_as_it_is_signed() {
        for (uri, name) in [
            ("https://S3.example:443/a", "s3.example"),
            ("https://s3.example:9000/a", "s3.example:9000"),
            ("http://127.0.0.1:80/a", "127.0.0.1"),
            ("http://[::1]:9000/a", "[::1]:9000"),
        ] {
            let target = Target::of(&uri.parse().expect(uri)).expect(uri);
            assert_eq!(target.authority(), name);
        }
    }
}
