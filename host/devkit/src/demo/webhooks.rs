//! Webhooks over HTTP: signed as GitHub signs them, and sent again until they are answered, as a
//! sender does that keeps what it has not been told of.

use std::{
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use anyhow::{Context, Result, bail};
use axum::{
    body::Body,
    http::{Request, StatusCode, header::CONTENT_TYPE},
};
use hmac::{Hmac, KeyInit, Mac};
use hyper::client::conn::http1::{SendRequest, handshake};
use hyper_util::rt::TokioIo;
use sha2::Sha256;
use tokio::{
    net::TcpStream,
    sync::{Mutex, mpsc},
    task::JoinSet,
    time::{sleep, timeout},
};

use super::{TENANTS, input::Record};

/// Requests at a time.
const SENDERS: usize = 8;
/// Longest wait for an answer. The host may be dead, or may not have begun to listen again.
const ANSWER_MAX: Duration = Duration::from_secs(10);
/// Pause before a webhook is sent again.
const AGAIN: Duration = Duration::from_millis(50);
/// Tries of one webhook.
const TRIES_MAX: usize = 1_000;

/// Where webhooks go, and what they are signed with.
#[derive(Clone)]
pub(super) struct WebhookTarget {
    /// Address of the host's ingress.
    pub(super) address: SocketAddr,
    /// Secret of each tenant's consumer.
    pub(super) secrets: [String; TENANTS.len()],
}

/// Tasks that send webhooks.
pub(super) struct Webhooks {
    queue: mpsc::Sender<Record>,
    tasks: JoinSet<Result<()>>,
}

impl Webhooks {
    /// Starts the tasks. Each webhook that is answered is counted.
    pub(super) fn start(target: &WebhookTarget, sent: &Arc<AtomicU64>) -> Self {
        let (queue, records) = mpsc::channel(SENDERS);
        let records = Arc::new(Mutex::new(records));
        let mut tasks = JoinSet::new();
        for _ in 0..SENDERS {
            tasks.spawn(send_all(target.clone(), records.clone(), sent.clone()));
        }
        Self { queue, tasks }
    }

    /// Hands a webhook over, once a task is free for it.
    pub(super) async fn send(&mut self, record: Record) -> Result<()> {
        if self.queue.send(record).await.is_err() {
            return self.ended().await;
        }
        Ok(())
    }

    /// Waits until every webhook is answered.
    pub(super) async fn finish(mut self) -> Result<()> {
        let (closed, _) = mpsc::channel(1);
        drop(std::mem::replace(&mut self.queue, closed));
        self.ended().await
    }

    async fn ended(&mut self) -> Result<()> {
        while let Some(ended) = self.tasks.join_next().await {
            ended??;
        }
        Ok(())
    }
}

async fn send_all(
    target: WebhookTarget,
    records: Arc<Mutex<mpsc::Receiver<Record>>>,
    sent: Arc<AtomicU64>,
) -> Result<()> {
    let mut connection = None;
    loop {
        let next = records.lock().await.recv().await;
        let Some(record) = next else { return Ok(()) };
        send(&target, &record, &mut connection).await?;
        sent.fetch_add(1, Ordering::Relaxed);
    }
}

/// Sends a webhook until it is answered. Only an answer that says that it is stored ends that.
async fn send(
    target: &WebhookTarget,
    record: &Record,
    connection: &mut Option<SendRequest<Body>>,
) -> Result<()> {
    for _ in 0..TRIES_MAX {
        match timeout(ANSWER_MAX, attempt(target, record, connection)).await {
            Ok(Ok(StatusCode::ACCEPTED | StatusCode::OK)) => return Ok(()),
            Ok(Ok(status)) if status.is_client_error() && status != 429 => {
                bail!("a webhook was refused with {status}")
            }
            Ok(Ok(_)) => {}
            // The host died, or is not there yet.
            Ok(Err(_)) | Err(_) => *connection = None,
        }
        sleep(AGAIN).await;
    }
    bail!("a webhook was sent {TRIES_MAX} times and never stored")
}

async fn attempt(
    target: &WebhookTarget,
    record: &Record,
    connection: &mut Option<SendRequest<Body>>,
) -> Result<StatusCode> {
    let request = request(target, record)?;
    let mut sender = match connection.take() {
        Some(sender) => sender,
        None => {
            let stream = TcpStream::connect(target.address).await?;
            let (sender, connection) = handshake(TokioIo::new(stream)).await?;
            tokio::spawn(connection);
            sender
        }
    };
    sender.ready().await?;
    let response = sender.send_request(request).await?;
    let status = response.status();
    // The connection is free for the next request once the body is read.
    axum::body::to_bytes(Body::new(response.into_body()), 64 << 10).await?;
    *connection = Some(sender);
    Ok(status)
}

fn request(target: &WebhookTarget, record: &Record) -> Result<Request<Body>> {
    let mac = Hmac::<Sha256>::new_from_slice(target.secrets[record.tenant].as_bytes())
        .context("the secret is no key")?;
    let signature = hex::encode(mac.chain_update(&record.payload).finalize().into_bytes());
    let mut request = Request::post(format!("/in/{}/github", TENANTS[record.tenant]))
        .header("host", target.address.to_string())
        .header("x-hub-signature-256", format!("sha256={signature}"))
        .header("ce-partitionkey", &record.key);
    for (name, value) in &record.headers {
        let name = match name.strip_prefix("ce_") {
            Some(attribute) => format!("ce-{attribute}"),
            None => CONTENT_TYPE.to_string(),
        };
        request = request.header(name, value.as_slice());
    }
    Ok(request.body(Body::from(record.payload.clone()))?)
}
