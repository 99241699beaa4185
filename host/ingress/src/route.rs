//! The route, and the steps of a request in their order.

use std::{
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use axum::{
    Router,
    body::Body,
    extract::{Path, State},
    http::{Extensions, HeaderMap, header, request::Parts},
    response::{IntoResponse, Response},
    routing::post,
};
use bytes::Bytes;
use chrono::Utc;
use oncebox_control::Control;
use oncebox_model::{
    InboxError, PayloadKey, identity,
    message::Message,
    ordering::ordering_hash,
    policy::{Collision, Verification},
    status::ConsumerState,
    token_bucket::TokenBucket,
};
use tokio::{
    sync::{Semaphore, SemaphorePermit},
    time::{Instant, timeout},
};
use tokio_util::task::TaskTracker;

use crate::{
    answer::{Answer, Refusal},
    body::{self, BodyError, ReadBody},
    directory::{Directory, Lookup, Receiver},
    request::record,
    store::{self, Receipt},
    verifier::single,
};

/// Transactions in the host's own database at a time, for all its tenants.
const STORES_MAX: usize = 4;
/// Longest wait for the place of an inbox, and longest wait for a turn. With that for a lock they
/// are below the three seconds that the least patient senders wait.
const WAIT_MAX: Duration = Duration::from_secs(1);

/// The host, as the ingress needs it.
pub trait IngressHost: Send + Sync + 'static {
    /// Hears that a request comes from a sender that proved who it is.
    fn verified(&self, request: &Extensions);

    /// Hears that a message has come to the inbox of a consumer and is committed there.
    fn received(&self, consumer_id: i32);
}

/// Messages over HTTP.
pub struct Ingress {
    directory: Directory,
    turns: Semaphore,
    host: Arc<dyn IngressHost>,
    /// Transactions under way, also those whose clients are gone.
    tasks: TaskTracker,
    /// Lines of the log about errors.
    lines: Mutex<TokenBucket>,
}

impl Ingress {
    /// Creates the ingress of a host. Until [`Ingress::begin`] it knows no consumer.
    pub fn new(control: Control, host: Arc<dyn IngressHost>) -> Arc<Self> {
        Answer::begin_counts();
        Arc::new(Self {
            directory: Directory::new(control),
            turns: Semaphore::new(STORES_MAX),
            host,
            tasks: TaskTracker::new(),
            lines: Mutex::default(),
        })
    }

    /// Reads for the first time which consumers take messages over HTTP.
    pub async fn begin(&self) {
        self.directory.look().await;
    }

    /// Reads that again and again. Does not end.
    pub async fn keep(&self) {
        self.directory.keep().await;
    }

    /// Waits for the transactions under way, once no request comes any more.
    pub async fn finish(&self) {
        self.tasks.close();
        self.tasks.wait().await;
    }

    /// Returns the ingress as a service.
    pub fn router(self: &Arc<Self>) -> Router {
        Router::new().route("/in/{tenant}/{consumer}", post(take)).with_state(self.clone())
    }

    /// Takes a request: it is verified, becomes a message, is stored, and is answered.
    async fn take(
        self: Arc<Self>,
        (tenant, consumer): (&str, &str),
        head: &Parts,
        body: Body,
    ) -> Result<Answer, Refusal> {
        let seconds = u64::try_from(Utc::now().timestamp()).unwrap_or_default();
        let receiver = self.receiver(tenant, consumer)?;
        // Without a proof that could do, no body is read.
        let offered = receiver.verifier.proof(&head.headers, seconds);
        offered.map_err(|_| Refusal::Unverified)?;
        let body = read(&receiver, &head.headers, body).await?;
        // Once more: a secret that was taken away while the body came counts no more.
        let receiver = self.receiver(tenant, consumer)?;
        let proof = receiver.verifier.proof(&head.headers, seconds);
        let verified = proof.and_then(|proof| receiver.verifier.verify(&proof, &body.bytes));
        verified.map_err(|_| Refusal::Unverified)?;
        self.host.verified(&head.extensions);
        receiver.admit().map_err(|wait| Refusal::RateLimited { seconds: wait.as_secs() + 1 })?;
        if let Some(answer) = challenge(&receiver, &body.bytes) {
            return Ok(answer);
        }
        if !receiver.row.is_active || receiver.row.state == ConsumerState::Deleting {
            return Err(Refusal::Closed);
        }
        // A task of its own: a client that goes away ends no transaction in its middle.
        let headers = head.headers.clone();
        let ingress = self.clone();
        let storing = async move { ingress.store(&receiver, &headers, body).await };
        self.tasks.spawn(storing).await.map_err(|_| Refusal::Unavailable)?
    }

    fn receiver(&self, tenant: &str, consumer: &str) -> Result<Arc<Receiver>, Refusal> {
        match self.directory.get(tenant, consumer) {
            Lookup::Receiver(receiver) => Ok(receiver),
            Lookup::Nobody => Err(Refusal::Unverified),
            Lookup::Unusable => Err(Refusal::Unusable),
            Lookup::Unknown => Err(Refusal::Unavailable),
        }
    }

    async fn store(
        &self,
        receiver: &Receiver,
        headers: &HeaderMap,
        body: ReadBody,
    ) -> Result<Answer, Refusal> {
        let target = timeout(WAIT_MAX, self.directory.target(receiver)).await;
        let target = target.map_err(|_| Refusal::Unavailable)?;
        let (pool, key) = target.map_err(|error| self.refusal(&error))?;
        let _turns = timeout(WAIT_MAX, self.turn(receiver)).await.map_err(|_| Refusal::Busy)?;
        let ReadBody { bytes, memory: _memory } = body;
        let message = message(receiver, headers, bytes, Utc::now().timestamp_micros(), &key)?;
        let (tenant_id, consumer_id) = (receiver.row.tenant_id, receiver.row.consumer_id);
        let ordering = ordering_hash(consumer_id, receiver.policy.order, &message);
        let received = store::receive(&pool, tenant_id, consumer_id, &message, ordering).await;
        match received.map_err(|error| self.refusal(&error))? {
            Receipt::New(status) => {
                self.host.received(consumer_id);
                Ok(Answer::Stored { id: message.id, status })
            }
            Receipt::Known(_, false) if receiver.policy.collision() == Collision::Park => {
                Err(Refusal::Collision(message.id))
            }
            Receipt::Known(status, _) => Ok(Answer::Known { id: message.id, status }),
            Receipt::NotHere => {
                receiver.forget_target().await;
                Err(Refusal::Closed)
            }
        }
    }

    /// Takes a turn of the tenant, and in the host's database one of all tenants. In another
    /// database its connections are the bound.
    async fn turn<'t>(&'t self, receiver: &'t Receiver) -> [Option<SemaphorePermit<'t>>; 2] {
        // Nobody closes the semaphores.
        let of_tenant = receiver.turns.acquire().await.ok();
        let of_host = match receiver.row.has_own_database {
            true => None,
            false => self.turns.acquire().await.ok(),
        };
        [of_tenant, of_host]
    }

    /// Returns the refusal for an error. Logs one that is not the sender's, at most once a second.
    fn refusal(&self, error: &InboxError) -> Refusal {
        if error.is_of_row() {
            return Refusal::NoMessage("PostgreSQL cannot keep one of its values".to_owned());
        }
        if matches!(error, InboxError::InFlightElsewhere) {
            return Refusal::Busy;
        }
        let mut lines = self.lines.lock().unwrap_or_else(PoisonError::into_inner);
        if lines.take(1, 1, Instant::now()) == 1 {
            tracing::warn!(%error, "message over HTTP not stored, its sender is asked to send it \
                again");
        }
        Refusal::Unavailable
    }
}

async fn read(receiver: &Receiver, headers: &HeaderMap, body: Body) -> Result<ReadBody, Refusal> {
    let most = receiver.ingress.body_bytes_max;
    let length = single(headers, header::CONTENT_LENGTH.as_str());
    if length.and_then(|text| text.parse::<usize>().ok()).is_some_and(|length| length > most) {
        return Err(Refusal::TooLarge(most));
    }
    body::read(body, most, &receiver.memory).await.map_err(|error| match error {
        BodyError::TooLarge => Refusal::TooLarge(most),
        BodyError::Unfinished => Refusal::Unfinished,
        BodyError::Full => Refusal::Full,
    })
}

/// Returns the message of a verified request.
fn message(
    receiver: &Receiver,
    headers: &HeaderMap,
    body: Bytes,
    now_us: i64,
    key: &PayloadKey,
) -> Result<Message, Refusal> {
    let record = record(headers, body, &receiver.ingress, now_us);
    let record = record.map_err(|_| Refusal::HeadersTooLarge)?;
    let (sequence, reference) =
        (receiver.policy.sequence.as_ref(), receiver.policy.reference.as_ref());
    identity::decode(record, &receiver.identity, sequence, reference, None, key)
        .map_err(|(_, fault)| Refusal::NoMessage(format!("by the policy of the consumer: {fault}")))
}

/// Returns the answer to Slack's question whether this is the right place, which it asks once.
fn challenge(receiver: &Receiver, body: &[u8]) -> Option<Answer> {
    if receiver.ingress.verify != Verification::Slack {
        return None;
    }
    let asked: serde_json::Value = serde_json::from_slice(body).ok()?;
    let is_asked = asked.get("type")?.as_str()? == "url_verification";
    let text = asked.get("challenge")?.as_str()?;
    is_asked.then(|| Answer::Challenge(text.to_owned()))
}

async fn take(
    State(ingress): State<Arc<Ingress>>,
    Path((tenant, consumer)): Path<(String, String)>,
    request: axum::extract::Request,
) -> Response {
    let (head, body) = request.into_parts();
    let taken = ingress.take((&tenant, &consumer), &head, body).await;
    taken.unwrap_or_else(Answer::Refused).counted().into_response()
}
