//! Requests to a server, each over a connection of its own.

use std::{
    net::SocketAddr,
    path::{Path, PathBuf},
    pin::Pin,
    time::Duration,
};

use anyhow::{Context, Result, bail, ensure};
use axum::{
    body::Body,
    http::{
        HeaderValue, Request, Response, Uri,
        header::{ACCEPT, AUTHORIZATION, CONNECTION, HOST, USER_AGENT},
    },
};
use hyper_util::rt::TokioIo;
use openssl::ssl::{SslConnector, SslMethod};
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::TcpStream,
    task::AbortHandle,
};
use tokio_openssl::SslStream;

/// Longest time for each step of a connection: finding the address, connecting, securing.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);

/// Files that a connection to a server needs.
#[derive(Debug, Clone, Default)]
pub struct RemoteOptions {
    /// File with the token.
    pub token_file: Option<PathBuf>,
    /// Certificates (PEM) of an authority to trust, beside the system's.
    pub ca_file: Option<PathBuf>,
}

/// A server, and how to reach it.
#[derive(Clone)]
pub struct Remote {
    base: String,
    host: String,
    port: u16,
    /// Path that the server's routes stand under.
    prefix: String,
    authority: HeaderValue,
    token: Option<HeaderValue>,
    tls: Option<SslConnector>,
}

impl Remote {
    /// Checks the options and returns the server that they name. Sends nothing yet.
    pub fn new(url: &str, options: &RemoteOptions, token: Option<String>) -> Result<Self> {
        let wrong = || {
            format!(
                "`{url}` is not the URL of a server; it is that of its API (`api.listen`), such as \
                    https://oncebox.example:9465"
            )
        };
        let uri: Uri = url.parse().with_context(wrong)?;
        let (Some(scheme), Some(authority)) = (uri.scheme_str(), uri.authority()) else {
            bail!("{}", wrong())
        };
        ensure!(matches!(scheme, "http" | "https") && uri.query().is_none(), "{}", wrong());
        // A password would be sent on and logged; a token has its own places.
        ensure!(
            !authority.as_str().contains('@'),
            "the URL of a server holds no password; use `--token-file` or ONCEBOX_TOKEN"
        );
        let is_tls = scheme == "https";
        let token =
            match &options.token_file {
                Some(path) => Some(std::fs::read_to_string(path).with_context(|| {
                    format!("failed to read the token from `{}`", path.display())
                })?),
                None => token,
            };
        Ok(Self {
            base: url.trim_end_matches('/').to_owned(),
            host: authority.host().trim_matches(['[', ']']).to_owned(),
            port: authority.port_u16().unwrap_or(if is_tls { 443 } else { 80 }),
            prefix: uri.path().trim_end_matches('/').to_owned(),
            authority: HeaderValue::from_str(authority.as_str())?,
            token: token.map(|token| bearer(&token)).transpose()?,
            tls: if is_tls { Some(connector(options.ca_file.as_deref())?) } else { None },
        })
    }

    /// Returns the server's URL.
    pub(super) fn base(&self) -> &str {
        &self.base
    }

    /// Sends a request and waits for the head of its answer.
    pub(super) async fn send(&self, mut request: Request<Body>) -> Result<Response<Body>> {
        *request.uri_mut() = format!("{}{}", self.prefix, request.uri()).parse()?;
        let headers = request.headers_mut();
        headers.insert(HOST, self.authority.clone());
        headers.insert(
            USER_AGENT,
            HeaderValue::from_static(concat!("oncebox/", env!("CARGO_PKG_VERSION"))),
        );
        headers
            .insert(ACCEPT, HeaderValue::from_static("application/json, application/problem+json"));
        headers.insert(CONNECTION, HeaderValue::from_static("close"));
        let stream = self.connect().await?;
        if let Some(token) = &self.token {
            headers.insert(AUTHORIZATION, token.clone());
        }
        let answered = match &self.tls {
            None => exchange(stream, request).await,
            Some(tls) => exchange(self.secured(tls, stream).await?, request).await,
        };
        answered.with_context(|| {
            format!(
                "the server at `{}` did not answer as a server does; check \
                `--server` (ONCEBOX_SERVER)",
                self.base
            )
        })
    }

    async fn secured(&self, tls: &SslConnector, stream: TcpStream) -> Result<SslStream<TcpStream>> {
        let failed = || {
            format!(
                "no secure connection to `{}`; `--ca-file` names a private authority",
                self.base
            )
        };
        let mut stream = SslStream::new(tls.configure()?.into_ssl(&self.host)?, stream)?;
        let connecting =
            tokio::time::timeout(CONNECT_TIMEOUT, Pin::new(&mut stream).connect()).await;
        connecting.with_context(failed)?.with_context(failed)?;
        Ok(stream)
    }

    async fn connect(&self) -> Result<TcpStream> {
        let unreachable = || {
            format!(
                "the server at `{}` is not reachable; check `--server` (ONCEBOX_SERVER)",
                self.base
            )
        };
        let late = |_| std::io::Error::from(std::io::ErrorKind::TimedOut);
        let resolving = tokio::time::timeout(
            CONNECT_TIMEOUT,
            tokio::net::lookup_host((self.host.as_str(), self.port)),
        )
        .await;
        let addresses: Vec<SocketAddr> =
            resolving.map_err(late).flatten().with_context(unreachable)?.collect();
        // A name does not tell where it leads, so the addresses are checked.
        ensure!(
            self.token.is_none()
                || self.tls.is_some()
                || addresses.iter().all(|address| address.ip().is_loopback()),
            "the token is not sent to `{}` over plain http, since that is another machine; use \
                https",
            self.host
        );
        let connected =
            tokio::time::timeout(CONNECT_TIMEOUT, TcpStream::connect(&addresses[..])).await;
        let stream = connected.map_err(late).flatten().with_context(unreachable)?;
        stream.set_nodelay(true)?;
        Ok(stream)
    }
}

/// Handle that aborts the task of a connection, with the last byte of its answer or before.
struct Connection(AbortHandle);

impl Drop for Connection {
    fn drop(&mut self) {
        self.0.abort();
    }
}

async fn exchange<S>(stream: S, request: Request<Body>) -> Result<Response<Body>>
where
    S: AsyncRead + AsyncWrite + Send + Unpin + 'static,
{
    let (mut sender, connection) =
        hyper::client::conn::http1::handshake(TokioIo::new(stream)).await?;
    let task = Connection(tokio::spawn(connection).abort_handle());
    let response = sender.send_request(request).await?;
    Ok(response.map(|body| {
        let chunks = futures::stream::unfold(
            (Body::new(body).into_data_stream(), task),
            async |(mut chunks, task)| {
                let chunk = futures::StreamExt::next(&mut chunks).await?;
                Some((chunk, (chunks, task)))
            },
        );
        Body::from_stream(chunks)
    }))
}

fn bearer(token: &str) -> Result<HeaderValue> {
    let token = token.trim();
    let is_sound = !token.is_empty() && token.bytes().all(|byte| byte.is_ascii_graphic());
    ensure!(
        is_sound,
        "the token is not one: a token is one word of printable characters; see `--token-file` and \
            ONCEBOX_TOKEN"
    );
    let mut value = HeaderValue::from_str(&format!("Bearer {token}"))?;
    value.set_sensitive(true);
    Ok(value)
}

/// Returns a connector that trusts the system's authorities and those of a file. It checks the name
/// of the server.
fn connector(ca_file: Option<&Path>) -> Result<SslConnector> {
    let mut builder =
        SslConnector::builder(SslMethod::tls_client()).context("failed to prepare TLS")?;
    if let Some(path) = ca_file {
        std::fs::metadata(path)
            .with_context(|| format!("failed to read the certificates `{}`", path.display()))?;
        builder
            .set_ca_file(path)
            .with_context(|| format!("`{}` holds no certificates in PEM", path.display()))?;
    }
    Ok(builder.build())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn new(url: &str, token: Option<&str>) -> Result<Remote> {
        Remote::new(url, &RemoteOptions::default(), token.map(str::to_owned))
    }

    #[test]
    fn urls_are_read_or_named() {
        for (url, host, port, prefix) in [
            ("http://127.0.0.1:9465", "127.0.0.1", 9465, ""),
            ("http://[::1]:1/", "::1", 1, ""),
            ("https://oncebox.example/api/", "oncebox.example", 443, "/api"),
            ("http://localhost", "localhost", 80, ""),
        ] {
            let remote = new(url, None).expect("a sound URL");
            assert_eq!(
                (remote.host.as_str(), remote.port, remote.prefix.as_str()),
                (host, port, prefix),
                "{url}"
            );
        }
        for url in [
            "",
            "oncebox.example",
            "ftp://h",
            "http://",
            "/x",
            "http://h/?q=1",
            "http://u:p@h",
            "http://h h",
        ] {
            assert!(new(url, None).is_err(), "{url}");
        }
    }

    #[test]
    fn tokens_are_one_word() {
        assert!(new("http://h", Some(" secret\n")).is_ok());
        for token in ["", " ", "a b", "a\nb", "ä"] {
            let error = new("http://h", Some(token)).err().expect("no token").to_string();
            assert!(error.starts_with("the token is not one"), "{error}");
        }
    }
}
