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
    PayloadKey,
    identity::{self, Undecodable},
    message::Message,
    ordering::ordering_hash,
    policy::{Collision, Verification},
    status::ConsumerState,
    token_bucket::TokenBucket,
};
use sqlx::PgPool;
use tokio::{
    sync::Semaphore,
    time::{Instant, timeout},
};

use crate::{
    answer::{Answer, Refusal},
    body::{self, BodyError, MEMORY_KB, ReadBody},
    directory::{Directory, Receiver},
    request::record,
    store::{self, Receipt},
    verifier::single,
};

/// Transactions of all tenants at a time, on this host.
const STORES_MAX: usize = 4;
/// Longest wait for a turn and a transaction. A sender asks again, and the id decides.
const STORE_MAX: Duration = Duration::from_secs(10);

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
    memory: Arc<Semaphore>,
    turns: Semaphore,
    host: Arc<dyn IngressHost>,
    /// Lines of the log about errors.
    lines: Mutex<TokenBucket>,
}

impl Ingress {
    /// Creates the ingress of a host.
    pub fn new(control: Control, host: Arc<dyn IngressHost>) -> Self {
        Answer::begin_counts();
        Self {
            directory: Directory::new(control),
            memory: Arc::new(Semaphore::new(MEMORY_KB)),
            turns: Semaphore::new(STORES_MAX),
            host,
            lines: Mutex::default(),
        }
    }

    /// Returns the ingress as a service.
    pub fn router(self) -> Router {
        Router::new().route("/in/{tenant}/{consumer}", post(take)).with_state(Arc::new(self))
    }

    /// Takes a request: it is verified, becomes a message, is stored, and is answered.
    async fn take(
        &self,
        (tenant, consumer): (&str, &str),
        head: &Parts,
        body: Body,
    ) -> Result<Answer, Refusal> {
        let found = self.directory.get(tenant, consumer).await;
        let found = found.map_err(|error| self.unavailable(&error))?;
        let receiver = found.ok_or(Refusal::Unverified)?;
        let body = self.read(&receiver, &head.headers, body).await?;
        let now = Utc::now();
        let verifier = receiver.verifier.as_ref().ok_or(Refusal::Unavailable)?;
        let seconds = u64::try_from(now.timestamp()).unwrap_or_default();
        let verified = verifier.verify(&head.headers, &body.bytes, seconds);
        verified.map_err(|_| Refusal::Unverified)?;
        self.host.verified(&head.extensions);
        receiver.admit().map_err(|wait| Refusal::RateLimited { seconds: wait.as_secs() + 1 })?;
        if let Some(answer) = challenge(&receiver, &body.bytes) {
            return Ok(answer);
        }
        if !receiver.row.is_active || receiver.row.state == ConsumerState::Deleting {
            return Err(Refusal::Closed);
        }
        let stored = timeout(STORE_MAX, self.store(&receiver, &head.headers, body, now));
        stored.await.map_err(|_| Refusal::Busy)?
    }

    async fn read(
        &self,
        receiver: &Receiver,
        headers: &HeaderMap,
        body: Body,
    ) -> Result<ReadBody, Refusal> {
        let most = receiver.ingress.body_bytes_max;
        let length = single(headers, header::CONTENT_LENGTH.as_str());
        if length.and_then(|text| text.parse::<usize>().ok()).is_some_and(|length| length > most) {
            return Err(Refusal::TooLarge(most));
        }
        body::read(body, most, &self.memory).await.map_err(|error| match error {
            BodyError::TooLarge => Refusal::TooLarge(most),
            BodyError::Unfinished => Refusal::Unfinished,
            BodyError::Busy => Refusal::Busy,
        })
    }

    async fn store(
        &self,
        receiver: &Receiver,
        headers: &HeaderMap,
        body: ReadBody,
        now: chrono::DateTime<Utc>,
    ) -> Result<Answer, Refusal> {
        let (pool, key) =
            self.directory.target(receiver).await.map_err(|error| self.unavailable(&error))?;
        let bytes = body.bytes.clone();
        let message = message(receiver, headers, bytes, now.timestamp_micros(), &key)?;
        // Nobody closes the semaphores.
        let _of_tenant = receiver.turns.acquire().await.map_err(|_| Refusal::Busy)?;
        let _of_host = self.turns.acquire().await.map_err(|_| Refusal::Busy)?;
        let receipt = self.receive(receiver, &pool, &message).await?;
        match receipt {
            Receipt::New => {
                self.host.received(receiver.row.consumer_id);
                Ok(Answer::Stored { id: message.id })
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

    async fn receive(
        &self,
        receiver: &Receiver,
        pool: &PgPool,
        message: &Message,
    ) -> Result<Receipt, Refusal> {
        let (tenant_id, consumer_id) = (receiver.row.tenant_id, receiver.row.consumer_id);
        let ordering = ordering_hash(consumer_id, receiver.policy.order, message);
        let received = store::receive(pool, tenant_id, consumer_id, message, ordering).await;
        received.map_err(|error| self.unavailable(&error))
    }

    /// Returns the refusal for an error that is not the sender's. Logs at most one a second.
    fn unavailable(&self, error: &dyn std::fmt::Display) -> Refusal {
        let mut lines = self.lines.lock().unwrap_or_else(PoisonError::into_inner);
        if lines.take(1, 1, Instant::now()) == 1 {
            tracing::warn!(%error, "message over HTTP not stored, its sender is asked to send it \
                again");
        }
        Refusal::Unavailable
    }
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
        .map_err(|(_, fault): (_, Undecodable)| Refusal::NoMessage(fault))
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
