//! Messages that wait for their trial, and the task that runs the trials.

use std::{
    sync::{
        Arc, Mutex, OnceLock, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use oncebox_model::{handler::Shadow, message::Message, outgoing::Output, policy::PayloadPolicy};
use tokio::{sync::mpsc, task::JoinHandle, time::Instant};
use tokio_util::sync::CancellationToken;

use super::{
    cancels::Cancel,
    capture::Trace,
    tally::{Tally, TrialVerdict},
};
use crate::session::Sessions;

/// Most messages that wait for their trial.
const MESSAGES_MAX: usize = 64;
/// Most bytes of those messages and of their changes.
const BYTES_MAX: usize = 8 << 20;
/// Interval at which sums are written.
const WRITE: Duration = Duration::from_millis(500);
/// Longest wait of a trial for a lock: it gives way before any deadlock detector starts.
const LOCK_TIMEOUT: Duration = Duration::from_millis(30);

/// A live run of a message in the sample; it counts once its transaction has committed.
#[derive(Clone)]
pub(crate) struct Sampled {
    pub(super) shadow: Arc<Shadow>,
    pub(super) message: Message,
    /// Generation of deployments under which the live run ran.
    pub(super) generation: i64,
    pub(super) live: LiveRun,
}

/// What a live run answered and did.
#[derive(Clone)]
pub(crate) struct LiveRun {
    /// Result, and the messages that it emitted.
    pub(crate) output: Output,
    /// Cancels of outgoing messages, with their answers.
    pub(crate) cancels: Vec<Cancel>,
    /// Row changes and cost.
    pub(crate) trace: Trace,
}

impl std::fmt::Debug for Sampled {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Sampled({})", self.message.id)
    }
}

impl Sampled {
    pub(crate) fn new(
        shadow: &Arc<Shadow>,
        message: &Message,
        generation: i64,
        live: LiveRun,
    ) -> Self {
        Self { shadow: shadow.clone(), message: message.clone(), generation, live }
    }

    fn bytes(&self) -> usize {
        let changes = self.live.trace.changes.iter().flatten();
        let outgoing = self.live.output.outgoing.iter().map(|message| message.bytes() as usize);
        let side = |side: &Option<String>| side.as_ref().map_or(0, String::len);
        self.message.record.size()
            + self.message.decoded.as_ref().map_or(0, |json| json.len())
            + self.message.fetched.as_ref().map_or(0, |payload| payload.len())
            + changes.map(|change| side(&change.before) + side(&change.after)).sum::<usize>()
            + outgoing.sum::<usize>()
    }
}

/// A consumer's trials: one task and one connection, which exist only after a first message was
/// sampled.
pub(crate) struct TrialQueue {
    shared: Arc<TrialContext>,
    sender: OnceLock<mpsc::Sender<Sampled>>,
    task: Mutex<Option<JoinHandle<()>>>,
    stop: CancellationToken,
}

/// State that the queue and its task share.
pub(super) struct TrialContext {
    pub(super) consumer_id: i32,
    pub(super) tenant: String,
    pub(super) consumer: String,
    pub(super) sessions: Arc<Sessions>,
    /// Most bytes that an instance may have.
    pub(super) memory: u64,
    payload: PayloadPolicy,
    tally: Tally,
    bytes: AtomicUsize,
}

impl TrialQueue {
    pub(crate) fn new(
        consumer_id: i32,
        (tenant, consumer): (&str, &str),
        payload: PayloadPolicy,
        memory: u64,
        sessions: &Arc<Sessions>,
    ) -> Self {
        let shared = TrialContext {
            consumer_id,
            tenant: tenant.to_owned(),
            consumer: consumer.to_owned(),
            sessions: sessions.giving_way(LOCK_TIMEOUT),
            memory,
            payload,
            tally: Tally::default(),
            bytes: AtomicUsize::new(0),
        };
        Self {
            shared: Arc::new(shared),
            sender: OnceLock::new(),
            task: Mutex::default(),
            stop: CancellationToken::new(),
        }
    }

    /// Offers a message whose transaction has committed. Never waits: a message for which there is
    /// no room is counted as skipped.
    pub(crate) fn offer(&self, sampled: Sampled) {
        // The task exists from the first message on, since it also writes the sums.
        let (shared, sender) = (&self.shared, self.sender());
        if let Err(reason) = sampled.live.trace.changes {
            return shared.skip(&sampled, reason);
        }
        let bytes = sampled.bytes();
        if shared.bytes.fetch_add(bytes, Ordering::Relaxed) + bytes > BYTES_MAX {
            shared.bytes.fetch_sub(bytes, Ordering::Relaxed);
            return shared.skip(&sampled, "queue_full");
        }
        if let Err(
            mpsc::error::TrySendError::Full(sampled) | mpsc::error::TrySendError::Closed(sampled),
        ) = sender.try_send(sampled)
        {
            shared.bytes.fetch_sub(bytes, Ordering::Relaxed);
            shared.skip(&sampled, "queue_full");
        }
    }

    /// Finishes the running trial, writes the sums and ends the task. Drops the messages that still
    /// wait.
    pub(crate) async fn close(&self) {
        self.stop.cancel();
        let task = self.task.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(task) = task {
            let _ = task.await; // an error is an abort, or a panic that is reported already
        }
    }

    fn sender(&self) -> &mpsc::Sender<Sampled> {
        self.sender.get_or_init(|| {
            let (sender, receiver) = mpsc::channel(MESSAGES_MAX);
            let task = tokio::spawn(work(self.shared.clone(), receiver, self.stop.clone()));
            *self.task.lock().unwrap_or_else(PoisonError::into_inner) = Some(task);
            sender
        })
    }
}

impl Drop for TrialQueue {
    fn drop(&mut self) {
        self.stop.cancel();
    }
}

impl TrialContext {
    fn skip(&self, sampled: &Sampled, reason: &'static str) {
        self.add(sampled, TrialVerdict::Skipped(reason));
    }

    fn add(&self, sampled: &Sampled, verdict: TrialVerdict) {
        let name = match &verdict {
            TrialVerdict::Same(_) => "same",
            TrialVerdict::Differ(..) => "differ",
            TrialVerdict::Failed(_) => "failed",
            TrialVerdict::Skipped(reason) => reason,
        };
        metrics::counter!("oncebox_shadow_messages_total", "tenant" => self.tenant.clone(), "consumer" => self.consumer.clone(),
            "verdict" => name)
        .increment(1);
        self.tally.add(
            sampled.shadow.deployment_id,
            &sampled.message.id,
            verdict,
            self.payload != PayloadPolicy::None,
        );
    }

    async fn write(&self) {
        if let Err(error) = self.tally.write(self.sessions.host_pool()).await {
            tracing::warn!(tenant = self.tenant, consumer = self.consumer, %error, "failed to \
                write what a shadow found; it is tried again");
        }
    }
}

async fn work(
    shared: Arc<TrialContext>,
    mut receiver: mpsc::Receiver<Sampled>,
    stop: CancellationToken,
) {
    let mut write_at = Instant::now() + WRITE;
    loop {
        let sampled = tokio::select! {
            biased;
            () = stop.cancelled() => break,
            () = tokio::time::sleep_until(write_at) => None,
            sampled = receiver.recv() => match sampled {
                Some(sampled) => Some(sampled),
                None => break,
            },
        };
        match sampled {
            Some(sampled) => {
                let verdict = shared.attempt(&sampled).await;
                shared.bytes.fetch_sub(sampled.bytes(), Ordering::Relaxed);
                shared.add(&sampled, verdict);
            }
            None => {
                shared.write().await;
                write_at = Instant::now() + WRITE;
            }
        }
    }
    shared.write().await;
}
