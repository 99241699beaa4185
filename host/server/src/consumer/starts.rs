//! The marks under which consumers are started: written before a start, and taken away once this
//! process has survived it. `oncebox_control` judges the marks, and explains their purpose there.

use std::{
    sync::{
        Arc, OnceLock,
        atomic::{AtomicI64, Ordering},
    },
    time::Duration,
};

use anyhow::{Result, bail};
use futures::{FutureExt, future::BoxFuture};
use oncebox_control::{Consumer, Control, Start, StartTurn};
use oncebox_kafka::{Behind, Inbox, OpenAt, Opened, PartitionInboxError};
use oncebox_model::InboxError;
use tokio::{
    sync::{Mutex, OwnedSemaphorePermit, Semaphore},
    time::{Instant, sleep, timeout},
};

/// Longest wait of a start for another host that tries the same policy: until that host is taken
/// for gone, and a little more.
const ELSEWHERE_MAX: Duration = Duration::from_secs(20);
/// Pause between two questions in that time.
const ASK: Duration = Duration::from_millis(300);
/// Longest stay of a mark where nothing proves that its start was survived: brokers may be
/// unavailable, or other hosts have all partitions.
const PROOF_MAX: Duration = Duration::from_secs(5);
/// Longest wait of an opening partition until the proof is written.
const WRITE_MAX: Duration = Duration::from_secs(5);
/// Most statements about marks at a time.
const TURNS_MAX: usize = 3;
/// Most tries to take a mark away.
const TAKE_AWAY_MAX: u32 = 60;
/// Pause between two tries to take a mark away.
const TAKE_AWAY_AGAIN: Duration = Duration::from_secs(1);

/// Returns the parts of a host that decide whether it survives a start: the versions of the program
/// and of its native library.
fn build() -> &'static str {
    static BUILD: OnceLock<String> = OnceLock::new();
    BUILD.get_or_init(|| {
        format!(
            "{}/librdkafka {}",
            env!("CARGO_PKG_VERSION"),
            rdkafka::util::get_rdkafka_version().1
        )
    })
}

/// The starts of a host's consumers.
pub(crate) struct Starts {
    control: Control,
    /// The host's name.
    host: String,
    /// Id of the host's row; 0 until it has one.
    host_id: AtomicI64,
    /// Permit for a start that no host has survived yet; this host runs one at a time.
    alone: Arc<Semaphore>,
    /// Permits for statements about marks: a host that starts thousands of consumers leaves
    /// connections to other work.
    turns: Semaphore,
}

impl Starts {
    pub(crate) fn new(control: Control, host: String) -> Arc<Self> {
        Arc::new(Self {
            control,
            host,
            host_id: AtomicI64::new(0),
            alone: Arc::new(Semaphore::new(1)),
            turns: Semaphore::new(TURNS_MAX),
        })
    }

    /// Sets the host's row, which later marks name.
    pub(crate) fn on_host(&self, host_id: i64) {
        self.host_id.store(host_id, Ordering::Release);
    }

    async fn ask(&self, of: (i32, i64), is_alone: bool) -> Result<StartTurn> {
        let _turn = self.turns.acquire().await?;
        let host = (self.host_id.load(Ordering::Acquire), self.host.as_str());
        Ok(self.control.reconciliation().begin_start(host, of, build(), is_alone).await?)
    }

    /// Waits for marks that are being written, for a limited time. A mark that is written after the
    /// end of the host's row would count as that of a host that died.
    pub(crate) async fn quiet(&self) {
        let _ = timeout(WRITE_MAX, self.turns.acquire_many(TURNS_MAX as u32)).await;
    }

    async fn end(&self, start: &Start, proven_by: Option<&str>) -> Result<(), InboxError> {
        // The semaphore is never closed.
        let _turn = self.turns.acquire().await;
        self.control.reconciliation().end_start(start, proven_by).await
    }

    /// Returns the trial of a consumer, with the state of the row that was read.
    pub(crate) fn trial(self: &Arc<Self>, consumer: &Consumer) -> Trial {
        let Consumer { consumer_id, revision, tenant, name, .. } = consumer;
        Trial {
            starts: self.clone(),
            consumer_id: *consumer_id,
            revision: *revision,
            tenant: tenant.clone(),
            name: name.clone(),
        }
    }
}

/// A consumer to start, at one revision of its policy.
#[derive(Clone)]
pub(crate) struct Trial {
    starts: Arc<Starts>,
    consumer_id: i32,
    revision: i64,
    tenant: String,
    name: String,
}

impl Trial {
    /// Writes the mark of a start. An error states why the consumer must not be started now.
    pub(crate) async fn begin(&self) -> Result<Mark> {
        let Self { starts, tenant, name, .. } = self;
        let deadline = Instant::now() + ELSEWHERE_MAX;
        let mut alone = None;
        loop {
            // In a task of its own: a caller may stop waiting while the mark is committed. The task
            // then still gets the mark, and drops it, which takes it away.
            match tokio::spawn(self.clone().ask(alone.take())).await?? {
                Turn::Begun(mark) => return Ok(mark),
                Turn::Alone => alone = Some(starts.alone.clone().acquire_owned().await?),
                Turn::Elsewhere(host) if Instant::now() > deadline => {
                    bail!(
                        "host `{host}` starts consumer `{tenant}/{name}` first, and has not said \
                            how that ends"
                    )
                }
                Turn::Elsewhere(_) => sleep(ASK).await,
            }
        }
    }

    async fn ask(self, alone: Option<OwnedSemaphorePermit>) -> Result<Turn> {
        let Self { starts, consumer_id, revision, tenant, name } = self;
        let turn = starts.ask((consumer_id, revision), alone.is_some()).await?;
        Ok(match turn {
            StartTurn::Begin(start) => Turn::Begun(Mark { starts, start, alone, is_over: false }),
            StartTurn::Alone => Turn::Alone,
            // The permit is dropped here: a start that waits for another host blocks no other
            // start.
            StartTurn::Elsewhere(host) => Turn::Elsewhere(host),
            StartTurn::Changed => {
                bail!("the policy of consumer `{tenant}/{name}` was changed meanwhile")
            }
            StartTurn::Quarantined(quarantine) => bail!(quarantine.text(&tenant, &name)),
        })
    }
}

/// The answer to a start that asks to begin.
enum Turn {
    /// Permission, with the mark.
    Begun(Mark),
    /// Permission once this host runs no other start that no host has survived yet.
    Alone,
    /// Permission once the named host has tried the start.
    Elsewhere(String),
}

/// The mark of a start. Dropping it takes it away: the start is over, and this process lives.
pub(crate) struct Mark {
    starts: Arc<Starts>,
    start: Start,
    /// Permit for the part of a start that this host runs alone; held until that part is over.
    alone: Option<OwnedSemaphorePermit>,
    is_over: bool,
}

impl Mark {
    /// Ends the part of the start that this host runs alone, once the native library has processed
    /// the subscription. The library answers a subscription after it has compiled the patterns.
    /// With patterns, or where a host ended here before, only partitions count as proof.
    async fn settle(&mut self, has_patterns: bool) {
        if self.alone.is_none() || has_patterns || self.start.is_suspected {
            return;
        }
        match self.starts.control.reconciliation().start_settles(&self.start).await {
            Ok(()) => self.alone = None,
            Err(error) => tracing::debug!(%error, "a start goes on under its mark as it is"),
        }
    }

    /// Writes that the whole start was survived, and returns whether that was written.
    async fn survived(mut self) -> bool {
        let ended = timeout(WRITE_MAX, self.starts.end(&self.start, Some(build()))).await;
        self.is_over = matches!(ended, Ok(Ok(())));
        if !self.is_over {
            tracing::warn!(
                consumer_id = self.start.consumer_id,
                "a start was survived, which could not be written down"
            );
        }
        self.is_over
    }
}

impl Drop for Mark {
    fn drop(&mut self) {
        let Ok(runtime) = tokio::runtime::Handle::try_current() else { return };
        if self.is_over {
            return;
        }
        let (starts, start, alone) = (self.starts.clone(), self.start, self.alone.take());
        runtime.spawn(async move {
            let mut tries = 1;
            while let Err(error) = starts.end(&start, None).await {
                if tries == TAKE_AWAY_MAX || !error.is_retryable() {
                    tracing::warn!(consumer_id = start.consumer_id, %error, tries, "the mark of a \
                        start stays; it goes with this host");
                    break;
                }
                tries += 1;
                sleep(TAKE_AWAY_AGAIN).await;
            }
            drop(alone);
        });
    }
}

/// An inbox whose first partition proves that the start was survived: the subscription was
/// processed, the group joined, and no message ran yet.
pub(crate) struct Proving {
    inbox: Arc<dyn Inbox>,
    mark: Mutex<Option<Mark>>,
    has_patterns: bool,
    /// Whether this process has survived such a start; a later one needs no mark.
    is_proven: Arc<std::sync::atomic::AtomicBool>,
}

impl Proving {
    pub(crate) fn new(
        inbox: Arc<dyn Inbox>,
        mark: Option<Mark>,
        has_patterns: bool,
        is_proven: &Arc<std::sync::atomic::AtomicBool>,
    ) -> Arc<Self> {
        Arc::new(Self { inbox, mark: Mutex::new(mark), has_patterns, is_proven: is_proven.clone() })
    }

    /// Records that the client was made and has subscribed.
    pub(crate) async fn started(&self) {
        if let Some(mark) = &mut *self.mark.lock().await {
            mark.settle(self.has_patterns).await;
        }
    }

    /// Takes the mark away after a while without a proof.
    pub(crate) async fn give_up_later(self: Arc<Self>) {
        sleep(PROOF_MAX).await;
        drop(self.mark.lock().await.take());
    }

    async fn prove(&self) {
        let mut mark = self.mark.lock().await;
        if let Some(mark) = mark.take()
            && mark.survived().await
        {
            self.is_proven.store(true, Ordering::Release);
        }
    }
}

impl Inbox for Proving {
    fn open(&self, at: OpenAt) -> BoxFuture<'_, Result<Opened, PartitionInboxError>> {
        async move {
            self.prove().await;
            self.inbox.open(at).await
        }
        .boxed()
    }

    fn behind(&self, at: OpenAt) -> BoxFuture<'_, Result<Option<Behind>, PartitionInboxError>> {
        self.inbox.behind(at)
    }
}
