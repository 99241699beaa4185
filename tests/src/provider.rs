//! A provider outside, over HTTP, that acts once for each `Idempotency-Key` and misbehaves: it
//! fails before and after it has acted, does not answer, breaks connections, asks for time, sends
//! elsewhere, and refuses.

use std::{
    collections::{BTreeMap, VecDeque},
    net::SocketAddr,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use oncebox_control::{DuplicateDecision, NewEndpoint};
use oncebox_sender::{AddressRange, AllowedHosts, Sender, SenderOptions};
use sha2::{Digest, Sha256};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
    task::JoinHandle,
    time::sleep,
};

/// Longest time of a request's arrival.
const ARRIVAL_MAX: Duration = Duration::from_secs(10);
/// Time for which a provider that stalls keeps the connection: longer than any endpoint waits, and
/// any test.
const STALL: Duration = Duration::from_secs(600);
/// Calls of a key after which a seeded provider behaves.
const MISBEHAVES_MAX: usize = 2;

/// What a provider does with a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reply {
    /// It acts, unless it has, and answers 200.
    Ok,
    /// It answers with this status and does not act.
    Status(u16),
    /// It acts, unless it has, and answers 500.
    ActAndFail,
    /// It acts, unless it has, and breaks the connection.
    ActAndBreak,
    /// It breaks the connection and does not act.
    Break,
    /// It acts, unless it has, and does not answer.
    ActAndStall,
    /// It answers 429 and asks for so many seconds.
    Limit(u64),
    /// It answers 307, to a place on itself.
    Redirect,
}

/// How a provider chooses what it does.
#[derive(Debug)]
pub enum Behaviour {
    /// These replies, one for each call; then it behaves.
    Scripted(VecDeque<Reply>),
    /// By a seed: some keys are refused at each call, and others misbehave in their first calls.
    Seeded(u64),
}

impl Behaviour {
    /// A provider that always behaves.
    pub fn sound() -> Self {
        Self::scripted(&[])
    }

    /// A provider with these first replies.
    pub fn scripted(replies: &[Reply]) -> Self {
        Self::Scripted(replies.iter().copied().collect())
    }
}

/// A request as the provider got it.
#[derive(Debug, Clone)]
pub struct Call {
    /// Its `Idempotency-Key`.
    pub key: String,
    /// Method and path.
    pub line: String,
    /// Its headers, by their names in lower case.
    pub headers: BTreeMap<String, String>,
    /// Its body.
    pub body: Vec<u8>,
    /// Moment of its arrival.
    pub at: Instant,
    /// What the provider did.
    pub reply: Reply,
}

/// What a provider knows of a key.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct LedgerEntry {
    /// Calls with the key.
    pub calls: usize,
    /// Times that it acted for the key: never more than once.
    pub effects: usize,
    /// Body of the first call.
    pub body: Vec<u8>,
}

#[derive(Debug)]
struct State {
    behaviour: Behaviour,
    ledger: BTreeMap<String, LedgerEntry>,
    calls: Vec<Call>,
    /// What no sender may do.
    faults: Vec<String>,
}

/// A provider on this machine.
pub struct Provider {
    address: SocketAddr,
    state: Arc<Mutex<State>>,
    task: JoinHandle<()>,
}

impl Provider {
    /// Starts a provider on a port of its own.
    pub async fn start(behaviour: Behaviour) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let address = listener.local_addr().expect("an address");
        let (ledger, calls, faults) = (BTreeMap::new(), Vec::new(), Vec::new());
        let state = Arc::new(Mutex::new(State { behaviour, ledger, calls, faults }));
        let shared = state.clone();
        let task = tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                tokio::spawn(answer(stream, shared.clone()));
            }
        });
        Self { address, state, task }
    }

    /// Host and port, as lists of hosts have them.
    pub fn authority(&self) -> String {
        self.address.to_string()
    }

    /// URL of the place that acts.
    pub fn url(&self) -> String {
        format!("http://{}/charges", self.address)
    }

    /// Settings of an endpoint there that recognises keys, with short timeouts.
    pub fn endpoint(&self, name: &str) -> NewEndpoint {
        NewEndpoint {
            connect_timeout_ms: 1_000,
            timeout_ms: 1_500,
            failures_max: 1_000,
            pause_ms: 100,
            ..NewEndpoint::new(name, &self.url(), DuplicateDecision::ReceiverDeduplicates)
        }
    }

    /// A sender that may send there.
    pub fn sender(&self) -> Arc<Sender> {
        self.sender_with(vec!["127.0.0.0/8".parse().expect("a range")])
    }

    /// A sender whose list has its host, and that may send to the public Internet alone.
    pub fn public_sender(&self) -> Arc<Sender> {
        self.sender_with(Vec::new())
    }

    fn sender_with(&self, private_ranges_allowed: Vec<AddressRange>) -> Arc<Sender> {
        let hosts = AllowedHosts::parse([self.authority()]).expect("a host");
        let options = SenderOptions {
            allowed_hosts: hosts.clone(),
            plain_http_hosts: hosts,
            private_ranges_allowed,
            ca_file: None,
        };
        Arc::new(Sender::new(options).expect("a sender"))
    }

    /// The table of a host's configuration that lets it send there.
    pub fn host_settings(&self) -> String {
        let host = self.authority();
        format!(
            "[http_destinations]\nhosts_allowed = ['{host}']\nplain_http_hosts = ['{host}']\n\
             private_ranges_allowed = ['127.0.0.0/8']\n"
        )
    }

    /// Adds replies for the next calls of a scripted provider.
    pub fn script(&self, replies: &[Reply]) {
        if let Behaviour::Scripted(script) = &mut self.state().behaviour {
            script.extend(replies);
        }
    }

    /// What it knows of each key.
    pub fn ledger(&self) -> BTreeMap<String, LedgerEntry> {
        self.state().ledger.clone()
    }

    /// Every call so far.
    pub fn calls(&self) -> Vec<Call> {
        self.state().calls.clone()
    }

    /// What a sender did that none may do: calls without a key, and keys with two bodies.
    pub fn faults(&self) -> Vec<String> {
        self.state().faults.clone()
    }

    fn state(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }
}

impl Drop for Provider {
    fn drop(&mut self) {
        self.task.abort();
    }
}

fn lock(state: &Mutex<State>) -> MutexGuard<'_, State> {
    state.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Whether a provider with this seed refuses a key, at each call.
pub fn refuses(seed: u64, key: &str) -> bool {
    refusal(seed, key).is_some()
}

fn refusal(seed: u64, key: &str) -> Option<Reply> {
    match drawn(seed, key, usize::MAX) {
        0..13 => Some(Reply::Status(400)),
        13..26 => Some(Reply::Redirect),
        _ => None,
    }
}

/// A byte that is drawn for a call.
fn drawn(seed: u64, key: &str, nth: usize) -> u8 {
    let text = format!("{seed}/{key}/{nth}");
    Sha256::digest(text)[0]
}

fn seeded(seed: u64, key: &str, nth: usize) -> Reply {
    if let Some(reply) = refusal(seed, key) {
        return reply;
    }
    match drawn(seed, key, nth) {
        _ if nth >= MISBEHAVES_MAX => Reply::Ok,
        0..120 => Reply::Ok,
        120..145 => Reply::Status(500),
        145..170 => Reply::ActAndFail,
        170..195 => Reply::ActAndBreak,
        195..215 => Reply::Break,
        215..228 => Reply::Limit(1),
        228..242 => Reply::ActAndStall,
        242.. => Reply::Status(503),
    }
}

impl State {
    /// Writes a call into the ledger, and chooses what is done with it.
    fn take(&mut self, mut call: Call) -> Reply {
        let entry = self.ledger.entry(call.key.clone()).or_default();
        if entry.calls == 0 {
            entry.body.clone_from(&call.body);
        } else if entry.body != call.body {
            self.faults.push(format!("key `{}` came with two bodies", call.key));
        }
        if call.key.is_empty() {
            self.faults.push(format!("a call without a key: {}", call.line));
        }
        call.reply = match &mut self.behaviour {
            Behaviour::Scripted(script) => script.pop_front().unwrap_or(Reply::Ok),
            Behaviour::Seeded(seed) => seeded(*seed, &call.key, entry.calls),
        };
        entry.calls += 1;
        let acts = matches!(
            call.reply,
            Reply::Ok | Reply::ActAndFail | Reply::ActAndBreak | Reply::ActAndStall
        );
        if acts && entry.effects == 0 {
            entry.effects = 1;
        }
        let reply = call.reply;
        self.calls.push(call);
        reply
    }
}

async fn answer(mut stream: TcpStream, state: Arc<Mutex<State>>) {
    let Ok(Some(call)) = tokio::time::timeout(ARRIVAL_MAX, read(&mut stream)).await else { return };
    let key = call.key.clone();
    let reply = lock(&state).take(call);
    let body = format!("{{\"charge\":\"{key}\"}}");
    let (status, header) = match reply {
        Reply::Ok => ("200 OK".to_owned(), String::new()),
        Reply::Status(status) => (format!("{status} Status"), String::new()),
        Reply::ActAndFail => ("500 Failed".to_owned(), String::new()),
        Reply::Limit(seconds) => ("429 Limited".to_owned(), format!("retry-after: {seconds}\r\n")),
        Reply::Redirect => ("307 Elsewhere".to_owned(), "location: /elsewhere\r\n".to_owned()),
        Reply::ActAndBreak | Reply::Break => return,
        Reply::ActAndStall => return sleep(STALL).await,
    };
    let text = format!(
        "HTTP/1.1 {status}\r\ncontent-type: application/json\r\n{header}content-length: {}\r\n\
         connection: close\r\n\r\n{body}",
        body.len()
    );
    // A client that is gone gets no answer.
    let _ = stream.write_all(text.as_bytes()).await;
    let _ = stream.shutdown().await;
}

/// Reads one request; none where it ends before its end.
async fn read(stream: &mut TcpStream) -> Option<Call> {
    let (mut bytes, mut chunk): (Vec<u8>, _) = (Vec::new(), [0; 8192]);
    let head_end = loop {
        if let Some(end) = bytes.windows(4).position(|window| window == b"\r\n\r\n") {
            break end;
        }
        match stream.read(&mut chunk).await.ok()? {
            0 => return None,
            read => bytes.extend_from_slice(&chunk[..read]),
        }
    };
    let head = String::from_utf8_lossy(&bytes[..head_end]).into_owned();
    let mut lines = head.split("\r\n");
    let line = lines.next().unwrap_or_default().to_owned();
    let header = |line: &str| {
        let (name, value) = line.split_once(':')?;
        Some((name.trim().to_lowercase(), value.trim().to_owned()))
    };
    let headers: BTreeMap<_, _> = lines.filter_map(header).collect();
    let length = headers.get("content-length").and_then(|text| text.parse().ok()).unwrap_or(0);
    let mut body = bytes.split_off(head_end + 4);
    while body.len() < length {
        match stream.read(&mut chunk).await.ok()? {
            0 => return None,
            read => body.extend_from_slice(&chunk[..read]),
        }
    }
    let key = headers.get("idempotency-key").cloned().unwrap_or_default();
    let line = line.rsplit_once(' ').map_or(line.clone(), |(line, _)| line.to_owned());
    Some(Call { key, line, headers, body, at: Instant::now(), reply: Reply::Ok })
}
