//! Servers, resolvers and senders of the tests.

use std::{
    collections::VecDeque,
    io,
    net::{IpAddr, SocketAddr},
    sync::{Arc, Mutex},
    time::Duration,
};

use bytes::Bytes;
use futures::future::BoxFuture;
use tokio::{
    io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt},
    net::{TcpListener, TcpStream},
    sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel},
};

use crate::{
    AllowedHosts, Endpoint, EndpointSettings, Request, Resolve, Sender, SenderOptions,
    target::Target,
};

mod answers;
mod refused;
mod resolved;
mod secrets;
mod tls;

/// How a server answers a request.
pub(crate) enum Answering {
    /// With this text; then it closes the connection.
    Text(String),
    /// With a body that comes slowly and has no end.
    Slow,
    /// With a body that comes fast and has no end.
    Endless,
    /// Not at all.
    Silence,
}

/// A server on this machine that counts the connections to it.
pub(crate) struct CountingServer {
    /// Its address; that of a wildcard where it listens on all.
    pub(crate) address: SocketAddr,
    peers: UnboundedReceiver<SocketAddr>,
    requests: UnboundedReceiver<String>,
}

impl CountingServer {
    /// Starts a server on an address, such as `127.0.0.1:0`.
    pub(crate) async fn start(address: &str, answering: Answering) -> Self {
        Self::of(TcpListener::bind(address).await.unwrap(), answering)
    }

    /// Starts a server on all addresses of this machine.
    pub(crate) async fn start_everywhere() -> Self {
        let listener = match TcpListener::bind("[::]:0").await {
            Ok(listener) => listener,
            // A machine without IPv6.
            Err(_) => TcpListener::bind("0.0.0.0:0").await.unwrap(),
        };
        Self::of(listener, Answering::Text(answer("200 OK", "")))
    }

    fn of(listener: TcpListener, answering: Answering) -> Self {
        let address = listener.local_addr().unwrap();
        let (accepted, peers) = unbounded_channel();
        let (received, requests) = unbounded_channel();
        let answering = Arc::new(answering);
        tokio::spawn(async move {
            while let Ok((stream, peer)) = listener.accept().await {
                let _ = accepted.send(SocketAddr::new(peer.ip().to_canonical(), peer.port()));
                tokio::spawn(serve(stream, answering.clone(), received.clone()));
            }
        });
        Self { address, peers, requests }
    }

    /// Returns how many connections there were since the last call. It connects itself: the
    /// listener accepts in order, so that what came before is counted.
    pub(crate) async fn accepted(&mut self) -> usize {
        let at = match self.address.ip().is_unspecified() {
            true => SocketAddr::new("127.0.0.1".parse().unwrap(), self.address.port()),
            false => self.address,
        };
        let own = TcpStream::connect(at).await.unwrap();
        let own = own.local_addr().unwrap();
        let mut others = 0;
        while self.peers.recv().await.unwrap() != own {
            others += 1;
        }
        others
    }

    /// Returns the next request.
    pub(crate) async fn request(&mut self) -> String {
        self.requests.recv().await.unwrap()
    }
}

/// Reads a request, hands it on and answers it.
pub(crate) async fn serve<S: AsyncRead + AsyncWrite + Unpin>(
    mut stream: S,
    answering: Arc<Answering>,
    requests: UnboundedSender<String>,
) {
    let Some(request) = read_request(&mut stream).await else { return };
    let _ = requests.send(request);
    let head = b"HTTP/1.1 200 OK\r\n\r\n";
    match &*answering {
        // The client may stop reading.
        Answering::Text(text) => drop(stream.write_all(text.as_bytes()).await),
        Answering::Silence => std::future::pending().await,
        Answering::Slow => {
            drop(stream.write_all(head).await);
            while stream.write_all(b"x").await.is_ok() {
                let _ = stream.flush().await;
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        }
        Answering::Endless => {
            drop(stream.write_all(head).await);
            while stream.write_all(&[b'x'; 16 << 10]).await.is_ok() {}
        }
    }
}

/// Reads the head of a request and its body; none where the client closes before.
async fn read_request<S: AsyncRead + Unpin>(stream: &mut S) -> Option<String> {
    let mut bytes = Vec::new();
    loop {
        if let Some(end) = bytes.windows(4).position(|window| window == b"\r\n\r\n") {
            let head = String::from_utf8_lossy(&bytes[..end]).to_lowercase();
            let length = head.lines().find_map(|line| line.strip_prefix("content-length: "));
            let length: usize = length.map_or(0, |length| length.parse().unwrap());
            if bytes.len() >= end + 4 + length {
                return Some(String::from_utf8_lossy(&bytes).into_owned());
            }
        }
        let mut part = [0; 4_096];
        match stream.read(&mut part).await {
            Ok(length) if length > 0 => bytes.extend_from_slice(&part[..length]),
            _ => return None,
        }
    }
}

/// Returns an answer with this status and body.
pub(crate) fn answer(status: &str, body: &str) -> String {
    format!("HTTP/1.1 {status}\r\ncontent-length: {}\r\n\r\n{body}", body.len())
}

/// A resolver that gives one prepared answer after the other, and then none.
pub(crate) struct ScriptedResolver {
    answers: Mutex<VecDeque<Vec<IpAddr>>>,
    asked: Mutex<Vec<String>>,
}

impl ScriptedResolver {
    /// Creates a resolver with these answers.
    pub(crate) fn new(answers: &[&[&str]]) -> Arc<Self> {
        let addresses = |answer: &&[&str]| -> Vec<IpAddr> {
            answer.iter().map(|address| address.parse().unwrap()).collect()
        };
        let answers = Mutex::new(answers.iter().map(addresses).collect());
        Arc::new(Self { answers, asked: Mutex::default() })
    }

    /// Returns the names that were looked up.
    pub(crate) fn asked(&self) -> Vec<String> {
        self.asked.lock().unwrap().clone()
    }
}

impl Resolve for ScriptedResolver {
    fn resolve<'a>(&'a self, name: &'a str) -> BoxFuture<'a, io::Result<Vec<IpAddr>>> {
        self.asked.lock().unwrap().push(name.to_owned());
        let answer = self.answers.lock().unwrap().pop_front();
        let answer = answer.ok_or_else(|| io::Error::other("there is no such name"));
        Box::pin(std::future::ready(answer))
    }
}

/// Returns a list of hosts.
pub(crate) fn hosts<T: AsRef<str>>(entries: &[T]) -> AllowedHosts {
    AllowedHosts::parse(entries).unwrap()
}

/// Returns the entry of a list that stands for the host and port of a URL, and no others.
pub(crate) fn entry_of(url: &str) -> String {
    let target = Target::parse(url).unwrap_or_else(|why| panic!("{url} {why}"));
    format!("{}:{}", target.host, target.port)
}

/// Creates a sender to these hosts, with `http:` too.
pub(crate) fn sender(
    allowed: AllowedHosts,
    private_ranges_allowed: &[&str],
    resolver: Arc<dyn Resolve>,
) -> Sender {
    let ranges = private_ranges_allowed.iter().map(|range| range.parse().unwrap()).collect();
    let options = SenderOptions {
        plain_http_hosts: allowed.clone(),
        allowed_hosts: allowed,
        private_ranges_allowed: ranges,
        ca_file: None,
    };
    Sender::new(options).unwrap().with_resolver(resolver)
}

/// Creates an endpoint whose host the tenant's limits allow.
pub(crate) fn endpoint_with(url: &str, change: impl FnOnce(&mut EndpointSettings)) -> Endpoint {
    let mut settings = EndpointSettings::new(url, hosts(&[entry_of(url)]));
    change(&mut settings);
    Endpoint::new(settings).unwrap()
}

/// Creates a message.
pub(crate) fn request() -> Request {
    Request {
        id: "0f1e2d3c-0000-8000-8000-000000000001".to_owned(),
        source: "oncebox:acme/orders".to_owned(),
        event_type: "order.paid".to_owned(),
        content_type: Some("application/json".to_owned()),
        headers: vec![("x-mine".to_owned(), b"1".to_vec())],
        body: Bytes::from_static(br#"{"order":17}"#),
        trace_parent: Some("00-ab-cd-01".to_owned()),
    }
}
