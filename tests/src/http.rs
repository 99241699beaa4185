//! The HTTP client of the tests: one request on a connection of its own.

use std::time::Duration;

use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpStream, ToSocketAddrs},
    time::timeout,
};

/// A server's answer to a request.
#[derive(Debug)]
pub struct Response {
    /// Status code.
    pub status: u16,
    /// Body, as it came over the wire.
    pub body: String,
}

/// Gets a path of a server; none where the server does not answer in time.
pub async fn get(address: impl ToSocketAddrs, path: &str, limit: Duration) -> Option<Response> {
    let request = format!("GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n");
    let answer = exchange(address, &request, limit).await?;
    let (head, body) = answer.split_once("\r\n\r\n")?;
    let status = head.split(' ').nth(1)?.parse().ok()?;
    Some(Response { status, body: body.to_owned() })
}

/// Sends a request and returns head and body of the answer; none where the server does not answer
/// in time. The request asks the server to close the connection.
pub async fn exchange(
    address: impl ToSocketAddrs,
    request: &str,
    limit: Duration,
) -> Option<String> {
    let exchange = async {
        let mut stream = TcpStream::connect(address).await.ok()?;
        stream.write_all(request.as_bytes()).await.ok()?;
        let mut answer = Vec::new();
        stream.read_to_end(&mut answer).await.ok()?;
        Some(String::from_utf8_lossy(&answer).into_owned())
    };
    timeout(limit, exchange).await.ok()?
}
