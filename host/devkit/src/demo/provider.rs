//! A provider outside, as the demo plays it on 127.0.0.1. It acts once for each `Idempotency-Key`,
//! and fails by a fixed schedule.

use std::{
    io,
    net::{Ipv4Addr, SocketAddr},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use anyhow::{Context, Result};
use axum::{
    body::{Body, to_bytes},
    http::{HeaderValue, Request, Response, StatusCode, header::RETRY_AFTER, request::Parts},
};
use hyper::{body::Incoming, server::conn::http1, service::service_fn};
use hyper_util::rt::TokioIo;
use tokio::{
    net::{TcpListener, TcpStream},
    task::JoinHandle,
    time::sleep,
};

use super::{
    TENANTS,
    ledger::{Arrival, ReceivedMessage, ReceiverLedger, delivery_of},
};

/// Time from the act to the answer. In it a kill of the host finds calls that were acted on and not
/// answered.
const ANSWER_AFTER: Duration = Duration::from_millis(20);
/// Number of calls after which the schedule begins again.
const PERIOD: u64 = 50;
/// Most bytes of a call's body.
const BODY_BYTES_MAX: usize = 64 << 10;
/// Pause after a connection that could not be accepted.
const ACCEPT_AGAIN: Duration = Duration::from_millis(50);

/// Reaction of the provider to a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Conduct {
    /// It acts, unless it has, and answers 200.
    Act,
    /// It acts, unless it has, and breaks the connection.
    ActAndBreak,
    /// It answers 500 and does not act.
    Fail,
    /// It answers 429 with a second to wait, and does not act.
    AskToWait,
}

impl Conduct {
    /// Returns the reaction to the call of this number, from 0.
    fn of(call: u64) -> Self {
        match call % PERIOD {
            3 => Self::ActAndBreak,
            6 => Self::Fail,
            9 => Self::AskToWait,
            _ => Self::Act,
        }
    }
}

/// The calls so far, and a ledger for each tenant.
#[derive(Default)]
struct ProviderState {
    calls: u64,
    ledgers: [ReceiverLedger; TENANTS.len()],
}

impl ProviderState {
    /// Counts a call and returns the reaction to it.
    fn count(&mut self) -> Conduct {
        self.calls += 1;
        Conduct::of(self.calls - 1)
    }
}

/// The provider. It ends when this is dropped.
pub(super) struct FakeProvider {
    address: SocketAddr,
    state: Arc<Mutex<ProviderState>>,
    task: JoinHandle<()>,
}

impl FakeProvider {
    /// Starts the provider on a free port.
    pub(super) async fn start() -> Result<Self> {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await;
        let listener = listener.context("failed to start the fake provider")?;
        let address = listener.local_addr().context("failed to start the fake provider")?;
        let state = Arc::new(Mutex::new(ProviderState::default()));
        let task = tokio::spawn(accept(listener, state.clone()));
        Ok(Self { address, state, task })
    }

    /// Returns host and port, as lists of hosts have them.
    pub(super) fn authority(&self) -> String {
        self.address.to_string()
    }

    /// Returns the URL at which the provider acts for a tenant.
    pub(super) fn url(&self, tenant: &str) -> String {
        format!("http://{}/{tenant}", self.address)
    }

    /// Returns the settings with which a host may send to the provider, and to no other place.
    pub(super) fn host_settings(&self) -> String {
        let host = self.authority();
        format!(
            "[http_destinations]\nhosts_allowed = ['{host}']\nplain_http_hosts = ['{host}']\n\
             private_ranges_allowed = ['127.0.0.1/32']\n"
        )
    }

    /// Returns the ledger of each tenant.
    pub(super) fn ledgers(&self) -> [ReceiverLedger; TENANTS.len()] {
        locked(&self.state).ledgers.clone()
    }
}

impl Drop for FakeProvider {
    fn drop(&mut self) {
        self.task.abort();
    }
}

fn locked(state: &Mutex<ProviderState>) -> MutexGuard<'_, ProviderState> {
    state.lock().unwrap_or_else(PoisonError::into_inner)
}

async fn accept(listener: TcpListener, state: Arc<Mutex<ProviderState>>) {
    loop {
        match listener.accept().await {
            Ok((stream, _)) => {
                tokio::spawn(serve(stream, state.clone()));
            }
            // The process has no descriptor left: the host calls again.
            Err(_) => sleep(ACCEPT_AGAIN).await,
        }
    }
}

async fn serve(stream: TcpStream, state: Arc<Mutex<ProviderState>>) {
    let service = service_fn(move |request| answer(request, state.clone()));
    // Connections break by the schedule, and when the host is killed.
    let _ = http1::Builder::new().serve_connection(TokioIo::new(stream), service).await;
}

/// Answers a call. An error breaks its connection.
async fn answer(
    request: Request<Incoming>,
    state: Arc<Mutex<ProviderState>>,
) -> io::Result<Response<Body>> {
    let (head, body) = request.into_parts();
    let body = to_bytes(Body::new(body), BODY_BYTES_MAX).await.map_err(io::Error::other)?;
    let Some((tenant, key, message)) = read_call(&head, body.to_vec()) else {
        return Ok(of_status(StatusCode::BAD_REQUEST));
    };
    let conduct = locked(&state).count();
    match conduct {
        Conduct::Act | Conduct::ActAndBreak => {}
        Conduct::Fail => return Ok(of_status(StatusCode::INTERNAL_SERVER_ERROR)),
        Conduct::AskToWait => {
            let mut response = of_status(StatusCode::TOO_MANY_REQUESTS);
            response.headers_mut().insert(RETRY_AFTER, HeaderValue::from_static("1"));
            return Ok(response);
        }
    }
    let arrival = locked(&state).ledgers[tenant].note(key, message);
    sleep(ANSWER_AFTER).await;
    match (conduct, arrival) {
        (Conduct::ActAndBreak, _) => Err(io::ErrorKind::ConnectionReset.into()),
        (_, Arrival::Conflict) => Ok(of_status(StatusCode::UNPROCESSABLE_ENTITY)),
        (_, Arrival::New | Arrival::Repeated) => Ok(of_status(StatusCode::OK)),
    }
}

/// Reads the index of the tenant, the key and the message of a call. Returns none for a call that
/// lacks one of them.
fn read_call(head: &Parts, payload: Vec<u8>) -> Option<(usize, String, ReceivedMessage)> {
    let header = |name: &str| head.headers.get(name)?.to_str().ok();
    let path = head.uri.path().strip_prefix('/')?;
    let tenant = TENANTS.iter().position(|tenant| *tenant == path)?;
    // A header of CloudEvents has the space of a message id as `%20`.
    let delivery = delivery_of(&header("ce-causationid")?.replace("%20", " "));
    let event_type = header("ce-type")?.to_owned();
    let key = header("idempotency-key")?.to_owned();
    Some((tenant, key, ReceivedMessage { delivery, event_type, payload }))
}

fn of_status(status: StatusCode) -> Response<Body> {
    let mut response = Response::new(Body::empty());
    *response.status_mut() = status;
    response
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "in a test, a panic is the report")]
mod tests {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    use super::*;

    /// Calls the provider and returns the status of its answer, or none where it broke the
    /// connection.
    async fn call(provider: &FakeProvider, path: &str, headers: &str, body: &str) -> Option<u16> {
        let mut stream = TcpStream::connect(provider.address).await.unwrap();
        let request = format!(
            "POST /{path} HTTP/1.1\r\nhost: {}\r\nconnection: close\r\ncontent-length: {}\r\n\
             {headers}\r\n{body}",
            provider.authority(),
            body.len()
        );
        stream.write_all(request.as_bytes()).await.unwrap();
        let mut text = String::new();
        stream.read_to_string(&mut text).await.ok()?;
        text.split(' ').nth(1)?.parse().ok()
    }

    async fn send(provider: &FakeProvider, key: &str, body: &str) -> Option<u16> {
        let headers = format!(
            "idempotency-key: {key}\r\nce-type: comment.mail\r\n\
             ce-causationid: https://github.com%20d-{key}\r\n"
        );
        call(provider, "acme", &headers, body).await
    }

    // What could go wrong: the provider acts twice for a key, so that the demo blames the host; or
    // it never fails, so that the demo shows nothing.
    #[tokio::test]
    async fn it_acts_once_for_a_key_and_fails_by_its_schedule() {
        let provider = FakeProvider::start().await.unwrap();
        let mut statuses = Vec::new();
        for key in ["0", "0", "2", "3", "3", "5", "6", "6", "8", "9", "9"] {
            statuses.push(send(&provider, key, "{}").await);
        }
        let ok = Some(200);
        let expected = [ok, ok, ok, None, ok, ok, Some(500), ok, ok, Some(429), ok];
        assert_eq!(statuses, expected);
        assert_eq!(send(&provider, "0", "{\"other\":1}").await, Some(422));
        let [acme, globex] = provider.ledgers();
        assert_eq!((acme.distinct(), acme.repeated(), acme.conflicts()), (7, 2, 1));
        assert_eq!(globex.distinct(), 0);
        let sent = acme.by_delivery();
        let keys: Vec<_> = sent.keys().map(String::as_str).collect();
        assert_eq!(keys, ["d-0", "d-2", "d-3", "d-5", "d-6", "d-8", "d-9"]);
        assert!(
            sent.values().all(|(event_type, _, ids)| event_type == "comment.mail" && *ids == 1)
        );
    }

    #[tokio::test]
    async fn a_call_without_a_key_or_for_nobody_is_refused_and_not_counted() {
        let provider = FakeProvider::start().await.unwrap();
        assert_eq!(
            call(&provider, "acme", "ce-type: x\r\nce-causationid: d\r\n", "").await,
            Some(400)
        );
        let complete = "idempotency-key: 1\r\nce-type: x\r\nce-causationid: d\r\n";
        assert_eq!(call(&provider, "initech", complete, "").await, Some(400));
        assert_eq!(locked(&provider.state).calls, 0);
    }

    #[tokio::test]
    async fn a_host_may_send_to_it_and_to_no_other_place() {
        let provider = FakeProvider::start().await.unwrap();
        let config: oncebox_server::Config = toml::from_str(&provider.host_settings()).unwrap();
        assert!(config.http_destinations.sender().is_ok());
        assert_eq!(config.http_destinations.hosts_allowed, [provider.authority()]);
        assert_eq!(config.http_destinations.private_ranges_allowed, ["127.0.0.1/32"]);
    }
}
