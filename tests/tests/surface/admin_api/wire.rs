//! The API on a socket, spoken to byte by byte.

use std::{
    net::SocketAddr,
    path::PathBuf,
    pin::Pin,
    time::{Duration, Instant},
};

use oncebox_api::listen::Listener;
use oncebox_tests::wait::DEADLINE;
use openssl::ssl::{SslConnector, SslMethod};
use tokio::{
    io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt},
    net::TcpStream,
    task::JoinHandle,
    time::timeout,
};
use tokio_util::sync::CancellationToken;

use super::fixture::ApiFixture;

/// A certificate for `localhost`, signed by itself, and its key.
pub struct Certificate {
    dir: PathBuf,
    pub certificate: PathBuf,
    key: PathBuf,
}

impl Drop for Certificate {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.dir); // what is left is in the folder for such things
    }
}

pub fn self_signed() -> Certificate {
    let dir = std::env::temp_dir().join(format!(
        "oncebox-tls-{}-{:08x}",
        std::process::id(),
        rand::random::<u32>()
    ));
    std::fs::create_dir_all(&dir).unwrap();
    let (certificate, key) = (dir.join("api.crt"), dir.join("api.key"));
    let made = std::process::Command::new("openssl")
        .args([
            "req",
            "-x509",
            "-newkey",
            "rsa:2048",
            "-nodes",
            "-days",
            "2",
            "-subj",
            "/CN=localhost",
            "-addext",
            "subjectAltName=DNS:localhost",
        ])
        .arg("-keyout")
        .arg(&key)
        .arg("-out")
        .arg(&certificate)
        .output()
        .expect("`openssl` is installed");
    assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
    Certificate { dir, certificate, key }
}

/// A request that ends its connection.
pub fn request(method: &str, path: &str, headers: &[(&str, &str)], body: &str) -> String {
    let mut text = format!(
        "{method} {path} HTTP/1.1\r\nconnection: close\r\ncontent-length: {}\r\n",
        body.len()
    );
    if !headers.iter().any(|(name, _)| *name == "host") {
        text += "host: localhost\r\n";
    }
    for (name, value) in headers {
        text += &format!("{name}: {value}\r\n");
    }
    text + "\r\n" + body
}

/// A plain address.
#[derive(Clone, Copy)]
pub struct Plain(pub SocketAddr);

impl Plain {
    /// Send, and read to the end or to the first answer.
    pub async fn talk(&self, bytes: &[u8]) -> String {
        exchange(TcpStream::connect(self.0).await.expect("it listens"), bytes).await
    }
}

pub struct Server {
    pub address: SocketAddr,
    stop: CancellationToken,
    serving: JoinHandle<()>,
}

impl Server {
    pub async fn start(fixture: &ApiFixture, certificate: Option<&Certificate>) -> Self {
        Self::with_pages(fixture, certificate, axum::Router::new()).await
    }

    pub async fn with_pages(
        fixture: &ApiFixture,
        certificate: Option<&Certificate>,
        pages: axum::Router,
    ) -> Self {
        let files = certificate.map(|c| (c.certificate.as_path(), c.key.as_path()));
        let listener =
            Listener::bind_api("127.0.0.1:0".parse().unwrap(), files, fixture.api.mode())
                .await
                .expect("a listener");
        let (address, stop) = (listener.address(), CancellationToken::new());
        let (api, grace) = (fixture.api.clone(), Duration::from_secs(5));
        let serving = tokio::spawn(listener.serve_api(api, pages, stop.clone(), grace));
        Self { address, stop, serving }
    }

    pub async fn connect(&self) -> TcpStream {
        TcpStream::connect(self.address).await.expect("it listens")
    }

    pub async fn talk(&self, bytes: &[u8]) -> String {
        Plain(self.address).talk(bytes).await
    }

    pub async fn talk_tls(&self, certificate: &Certificate, bytes: &[u8]) -> String {
        let mut builder = SslConnector::builder(SslMethod::tls_client()).unwrap();
        builder.set_ca_file(&certificate.certificate).unwrap();
        let ssl = builder.build().configure().unwrap().into_ssl("localhost").unwrap();
        let mut stream = tokio_openssl::SslStream::new(ssl, self.connect().await).unwrap();
        Pin::new(&mut stream).connect().await.expect("a handshake");
        exchange(stream, bytes).await
    }

    /// How long a connection is kept that says nothing.
    pub fn silence(&self) -> impl Future<Output = Duration> + Send + 'static {
        let address = self.address;
        async move {
            let started = Instant::now();
            let mut stream = TcpStream::connect(address).await.expect("it listens");
            let _ = timeout(DEADLINE, stream.read(&mut [0; 1])).await;
            started.elapsed()
        }
    }

    pub async fn stop(self) {
        self.stop.cancel();
        timeout(DEADLINE, self.serving).await.expect("it stops").expect("it does not panic");
    }
}

/// An answer is whole when its connection ends; one that is kept open is read until it says nothing
/// more.
async fn exchange(mut stream: impl AsyncRead + AsyncWrite + Unpin, bytes: &[u8]) -> String {
    let _ = stream.write_all(bytes).await; // it may have answered already
    let (mut said, mut chunk) = (Vec::new(), [0; 4096]);
    loop {
        let wait = if said.is_empty() { DEADLINE } else { Duration::from_millis(500) };
        match timeout(wait, stream.read(&mut chunk)).await {
            Ok(Ok(read)) if read > 0 => said.extend_from_slice(&chunk[..read]),
            _ => break,
        }
    }
    String::from_utf8_lossy(&said).into_owned()
}
