//! A way to a server that does what networks do: it is cut, it swallows what goes through it, it
//! ends in the middle of a packet. Of PostgreSQL's protocol it knows enough to let a COMMIT through
//! and keep its answer.

use std::{
    net::SocketAddr,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError, Weak,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
};

use anyhow::{Context, Result};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{
        TcpListener, TcpStream,
        tcp::{OwnedReadHalf, OwnedWriteHalf},
    },
    task::JoinHandle,
};
use tokio_util::sync::CancellationToken;

/// How much of a message is looked at.
const LOOKED_AT: usize = 256;

/// A listener in front of a server. It ends with this value, and its connections with it.
pub struct Proxy {
    address: SocketAddr,
    shared: Arc<Shared>,
    accepting: JoinHandle<()>,
}

/// What was done to connections: only what really struck counts.
#[derive(Debug, Default)]
pub struct Struck {
    /// Connections of which something was swallowed.
    pub swallowed: AtomicUsize,
    /// Connections that ended within a message of the server.
    pub truncated: AtomicUsize,
    /// Commits that the server answered and the client did not hear of.
    pub commits_withheld: AtomicUsize,
}

struct Shared {
    /// Where new connections lead.
    server: Mutex<SocketAddr>,
    ways: Mutex<Vec<Weak<Way>>>,
    /// New connections end at once.
    is_closed: AtomicBool,
    /// New connections are swallowed, too.
    is_hole: AtomicBool,
    /// The next message of the server, on whichever connection, is cut short.
    truncate: AtomicBool,
    /// The answer to the next COMMIT, on whichever connection, is kept.
    withhold: AtomicBool,
    accepted: AtomicUsize,
    trips: AtomicUsize,
    struck: Struck,
    /// Ends of swallowed connections towards the server, which has heard of no end.
    buried: Mutex<Vec<(OwnedReadHalf, OwnedWriteHalf)>>,
}

/// One connection.
#[derive(Default)]
struct Way {
    is_hole: AtomicBool,
    has_swallowed: AtomicBool,
    /// A COMMIT was let through, and nothing comes back from here on.
    is_withheld: AtomicBool,
    /// It ends when the client sends something.
    is_doomed: AtomicBool,
    /// The server waits for the client.
    is_ready: AtomicBool,
    cut: CancellationToken,
}

impl Proxy {
    /// Stand in front of a server.
    pub async fn to(server: SocketAddr) -> Result<Self> {
        Self::at(TcpListener::bind("127.0.0.1:0").await.context("failed to listen")?, server)
    }

    /// Stand in front of a server where somebody listens already.
    pub fn at(listener: TcpListener, server: SocketAddr) -> Result<Self> {
        let address = listener.local_addr()?;
        let shared = Arc::new(Shared::to(server));
        let here = shared.clone();
        let accepting = tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                here.accepted.fetch_add(1, Ordering::SeqCst);
                let server = *lock(&here.server);
                tokio::spawn(connection(here.clone(), client, server));
            }
        });
        Ok(Self { address, shared, accepting })
    }

    /// Stand in front of the server of a URL. The answer is the proxy, and the URL through it.
    pub async fn before(url: &str) -> Result<(Self, String)> {
        let authority = url
            .split("://")
            .nth(1)
            .and_then(|rest| rest.split(['/', '?']).next())
            .context("the URL has no address")?;
        let server = authority.rsplit('@').next().context("the URL has no address")?;
        let proxy =
            Self::to(server.parse().with_context(|| format!("`{server}` is no address"))?).await?;
        let through = url.replacen(server, &proxy.address.to_string(), 1);
        Ok((proxy, through))
    }

    /// Lead new connections to another server.
    pub fn lead_to(&self, server: SocketAddr) {
        *lock(&self.shared.server) = server;
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Connections that came.
    pub fn accepted(&self) -> usize {
        self.shared.accepted.load(Ordering::SeqCst)
    }

    /// Round trips so far: how often a client sent something after the server was ready for it.
    pub fn trips(&self) -> usize {
        self.shared.trips.load(Ordering::SeqCst)
    }

    /// What was done so far.
    pub fn struck(&self) -> &Struck {
        &self.shared.struck
    }

    /// Close every connection, both ways.
    pub fn cut(&self) -> usize {
        let ways = self.shared.ways();
        ways.iter().for_each(|way| way.cut.cancel());
        ways.len()
    }

    /// End every connection, and new ones as soon as they come, until [`Proxy::heal`].
    pub fn close(&self) {
        self.shared.is_closed.store(true, Ordering::SeqCst);
        self.cut();
    }

    /// End each connection that there is as soon as its client sends something, which has heard of
    /// nothing until then.
    pub fn cut_when_used(&self) -> usize {
        let ways: Vec<_> = lock(&self.shared.ways).iter().filter_map(Weak::upgrade).collect();
        ways.iter().for_each(|way| way.is_doomed.store(true, Ordering::SeqCst));
        ways.len()
    }

    /// Swallow what goes through the connections that there are, and keep them open. New ones work.
    pub fn swallow_present(&self) -> usize {
        let ways = self.shared.ways();
        ways.iter().for_each(|way| way.is_hole.store(true, Ordering::SeqCst));
        ways.len()
    }

    /// Swallow everything, on new connections too, until [`Proxy::heal`].
    pub fn swallow(&self) {
        self.shared.is_hole.store(true, Ordering::SeqCst);
        self.shared.is_closed.store(false, Ordering::SeqCst);
        self.swallow_present();
    }

    /// Let new connections through. Those that were swallowed end, on both sides.
    pub fn heal(&self) {
        self.shared.is_closed.store(false, Ordering::SeqCst);
        self.shared.is_hole.store(false, Ordering::SeqCst);
        self.shared
            .ways()
            .iter()
            .filter(|way| way.is_hole.load(Ordering::SeqCst))
            .for_each(|way| way.cut.cancel());
        self.shared.buried().clear();
    }

    /// End the connection on which the server says something next, within that.
    pub fn truncate_next(&self) {
        self.shared.truncate.store(true, Ordering::SeqCst);
    }

    /// Let the next COMMIT through, and end its connection when the server has answered.
    pub fn withhold_next_commit(&self) {
        self.shared.withhold.store(true, Ordering::SeqCst);
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.accepting.abort();
        self.cut();
    }
}

impl Shared {
    fn to(server: SocketAddr) -> Self {
        Self {
            server: Mutex::new(server),
            ways: Mutex::default(),
            is_closed: AtomicBool::default(),
            is_hole: AtomicBool::default(),
            truncate: AtomicBool::default(),
            withhold: AtomicBool::default(),
            accepted: AtomicUsize::default(),
            trips: AtomicUsize::default(),
            struck: Struck::default(),
            buried: Mutex::default(),
        }
    }

    fn ways(&self) -> Vec<Arc<Way>> {
        let mut ways = lock(&self.ways);
        ways.retain(|way| way.strong_count() > 0);
        ways.iter().filter_map(Weak::upgrade).collect()
    }

    fn buried(&self) -> MutexGuard<'_, Vec<(OwnedReadHalf, OwnedWriteHalf)>> {
        lock(&self.buried)
    }

    fn swallowed(&self, way: &Way) {
        if !way.has_swallowed.swap(true, Ordering::SeqCst) {
            self.struck.swallowed.fetch_add(1, Ordering::SeqCst);
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

async fn connection(shared: Arc<Shared>, client: TcpStream, server: SocketAddr) {
    if shared.is_closed.load(Ordering::SeqCst) {
        return;
    }
    let way = Arc::new(Way::default());
    way.is_hole.store(shared.is_hole.load(Ordering::SeqCst), Ordering::SeqCst);
    lock(&shared.ways).push(Arc::downgrade(&way));
    let Ok(server) = TcpStream::connect(server).await else { return };
    let (mut from_client, mut to_client) = client.into_split();
    let (mut from_server, mut to_server) = server.into_split();
    tokio::select! {
        () = way.cut.cancelled() => return,
        () = up(&shared, &way, &mut from_client, &mut to_server) => {}
        () = down(&shared, &way, &mut from_server, &mut to_client) => {}
    }
    if way.is_hole.load(Ordering::SeqCst) {
        // Its end is swallowed as well.
        shared.buried().push((from_server, to_server));
    }
}

/// From the client to the server.
async fn up(shared: &Shared, way: &Way, client: &mut OwnedReadHalf, server: &mut OwnedWriteHalf) {
    let (mut bytes, mut messages) = (vec![0; 64 << 10], Messages::of_client());
    while let Ok(count @ 1..) = client.read(&mut bytes).await {
        if way.is_hole.load(Ordering::SeqCst) {
            shared.swallowed(way);
            continue;
        }
        if way.is_doomed.load(Ordering::SeqCst) {
            return;
        }
        if way.is_ready.swap(false, Ordering::SeqCst) {
            shared.trips.fetch_add(1, Ordering::SeqCst);
        }
        let mut commits = false;
        messages.read(&bytes[..count], |kind, body| {
            commits |= kind == b'Q' && body.windows(6).any(|word| word == b"COMMIT")
        });
        if commits && shared.withhold.swap(false, Ordering::SeqCst) {
            way.is_withheld.store(true, Ordering::SeqCst);
        }
        if server.write_all(&bytes[..count]).await.is_err() {
            return;
        }
    }
}

/// From the server to the client.
async fn down(shared: &Shared, way: &Way, server: &mut OwnedReadHalf, client: &mut OwnedWriteHalf) {
    let (mut bytes, mut messages) = (vec![0; 64 << 10], Messages::of_server());
    while let Ok(count @ 1..) = server.read(&mut bytes).await {
        if way.is_hole.load(Ordering::SeqCst) {
            shared.swallowed(way);
            continue;
        }
        let (mut is_answered, mut is_ready) = (false, false);
        messages.read(&bytes[..count], |kind, body| {
            is_answered |= kind == b'E' || kind == b'C' && body.starts_with(b"COMMIT");
            is_ready |= kind == b'Z';
        });
        way.is_ready.fetch_or(is_ready, Ordering::SeqCst);
        if way.is_withheld.load(Ordering::SeqCst) {
            if is_answered {
                shared.struck.commits_withheld.fetch_add(1, Ordering::SeqCst);
                return;
            }
            continue;
        }
        if count > 1 && shared.truncate.swap(false, Ordering::SeqCst) {
            // Whatever it is, its last byte is missing.
            let _ = client.write_all(&bytes[..count - 1]).await;
            shared.struck.truncated.fetch_add(1, Ordering::SeqCst);
            return;
        }
        if client.write_all(&bytes[..count]).await.is_err() {
            return;
        }
    }
}

/// The messages of one side of a connection to PostgreSQL, by their kind and how they begin. What
/// speaks another protocol is let through all the same.
struct Messages {
    /// The first message of a client has no kind.
    is_first: bool,
    head: Vec<u8>,
    body: Vec<u8>,
    /// Bytes of the message that are still to come.
    left: usize,
}

impl Messages {
    fn of_client() -> Self {
        Self { is_first: true, head: Vec::new(), body: Vec::new(), left: 0 }
    }

    fn of_server() -> Self {
        Self { is_first: false, ..Self::of_client() }
    }

    fn read(&mut self, mut bytes: &[u8], mut whole: impl FnMut(u8, &[u8])) {
        while !bytes.is_empty() {
            let head = if self.is_first { 4 } else { 5 };
            if self.head.len() < head {
                let (taken, rest) = bytes.split_at(bytes.len().min(head - self.head.len()));
                self.head.extend_from_slice(taken);
                bytes = rest;
                if self.head.len() == head {
                    let length = self.head[head - 4..]
                        .iter()
                        .fold(0, |length, byte| (length << 8) | usize::from(*byte));
                    self.left = length.saturating_sub(4);
                }
            } else {
                let (taken, rest) = bytes.split_at(bytes.len().min(self.left));
                let room = LOOKED_AT.saturating_sub(self.body.len());
                self.body.extend_from_slice(&taken[..taken.len().min(room)]);
                self.left -= taken.len();
                bytes = rest;
            }
            if self.head.len() == head && self.left == 0 {
                whole(if self.is_first { 0 } else { self.head[0] }, &self.body);
                self.is_first = false;
                self.head.clear();
                self.body.clear();
            }
        }
    }
}
