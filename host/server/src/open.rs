//! The Kafka half of a consumer: closed while there is nothing to read, open otherwise.
//!
//! A closed consumer is an entry of the lag watcher that its brokers have in this host. It opens
//! when the watcher finds records to read or cannot tell. It closes when it had nothing to do for a
//! while and the group has read everything, on every host. The order of closing leaves no gap: the
//! consumer is watched before it leaves its group, from offsets that were committed. So records
//! that arrive in between open it again.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use futures::{FutureExt, future::BoxFuture};
use oncebox_inbox::Sessions;
use oncebox_kafka::{
    ConsumerConfig, ConsumerError, ConsumerHandle, ConsumerStatus, Drained, Inbox, Lag, LagWatch,
    PartitionStatus, Watchers, start_consumer,
};
use oncebox_model::hooks;
use tokio::{
    sync::{OwnedSemaphorePermit, Semaphore, watch},
    time::{Instant, timeout},
};

use crate::starts::{Mark, Proving, Trial};

/// Longest wait for the first lag of a consumer's topics.
const FIRST_LOOK: Duration = Duration::from_secs(3);
/// Longest drain of running messages when a consumer closes.
const CLOSE: Duration = Duration::from_secs(20);
/// Longest drain when its database is out of reach: few of the messages can finish then.
const LEAVE: Duration = Duration::from_secs(2);
/// Pause between two questions to a database that is out of reach. Also the pause between two such
/// checks of a consumer that never closes.
const LOOK_AGAIN: Duration = Duration::from_secs(1);
/// Time beyond a drain's own, in which the task reports its end.
const MARGIN: Duration = Duration::from_secs(3);
/// Most openings at a time: of consumers that have records to read, and of the others, each.
const AT_ONCE: usize = 8;
/// Time for which an opening holds its permit when there are records to read. A host that returns
/// to many busy consumers starts 32 of them a second.
const HOLD_EAGER: Duration = Duration::from_millis(250);
/// Longest time for which an opening holds its permit when the lag is unknown, or when only the
/// group's offsets are to be kept. It ends earlier once the consumer has joined its group.
const HOLD_CAREFUL: Duration = Duration::from_secs(10);
/// Interval at which an idle consumer joins its group and leaves it again, which restarts the
/// retention of its offsets. Kafka forgets the offsets of a group that has been empty for
/// `offsets.retention.minutes`, seven days by default. The group would then read everything again,
/// also messages that the inbox has long dropped.
const KEEP: Duration = Duration::from_secs(12 * 3_600);
/// The first such interval after a start: how long the group has been empty is not known then.
const KEEP_FIRST: Duration = Duration::from_secs(3_600);
/// Idle time after which a consumer that opened only to keep its offsets closes.
const KEEP_OPEN: Duration = Duration::from_millis(500);

/// The watchers, limits and permits that all consumers of a host share for opening and closing.
pub(crate) struct Openings {
    watchers: Watchers,
    /// Idle time after which a consumer closes; none for never.
    idle_after: Option<Duration>,
    /// Time without an answer of its database, while it is out of reach, after which a consumer
    /// closes; none for never.
    leave_after: Option<Duration>,
    keep: (Duration, Duration),
    eager: Arc<Semaphore>,
    careful: Arc<Semaphore>,
}

impl Openings {
    /// Creates the shared part with both times; zero stands for never.
    pub(crate) fn new(idle_after: Duration, leave_after: Duration) -> Arc<Self> {
        Self::with(idle_after, leave_after, (KEEP_FIRST, KEEP))
    }

    fn with(idle_after: Duration, leave_after: Duration, keep: (Duration, Duration)) -> Arc<Self> {
        let permits = || Arc::new(Semaphore::new(AT_ONCE));
        let [idle_after, leave_after] =
            [idle_after, leave_after].map(|after| Some(after).filter(|after| !after.is_zero()));
        Arc::new(Self {
            watchers: Watchers::default(),
            idle_after,
            leave_after,
            keep,
            eager: permits(),
            careful: permits(),
        })
    }
}

/// The database of a consumer's inbox, as far as this host reaches it.
pub(crate) trait Database: Send + Sync {
    /// Returns for how long the database has left a question unanswered; none while no question is
    /// open.
    fn silent_for(&self) -> Option<Duration>;
    /// Asks the database, and returns whether it answers.
    fn answers(&self) -> BoxFuture<'_, bool>;
}

impl Database for Sessions {
    fn silent_for(&self) -> Option<Duration> {
        self.silent_for()
    }

    fn answers(&self) -> BoxFuture<'_, bool> {
        self.is_in_reach().boxed()
    }
}

/// The Kafka half of a consumer that runs. Dropping it drains it in the background.
pub(crate) struct Reading {
    drain: watch::Sender<Option<Duration>>,
    ended: watch::Receiver<Option<Ended>>,
    is_open: Arc<AtomicBool>,
}

/// The result of a Kafka half that ended.
type Ended = Result<Drained, ConsumerError>;

impl Reading {
    /// Begins to read, or to watch. It must be called on a tokio runtime.
    pub(crate) fn start(
        openings: Arc<Openings>,
        config: ConsumerConfig,
        inbox: Arc<dyn Inbox>,
        trial: Option<Trial>,
        mark: Option<Mark>,
        database: Arc<dyn Database>,
    ) -> Result<Self, ConsumerError> {
        config.check()?;
        let is_proven = Arc::<AtomicBool>::default();
        // A consumer that never closes opens here, so that a refused property is an error of this
        // call.
        let never_closes = openings.idle_after.is_none() || config.has_patterns();
        let first = match never_closes {
            true => {
                let proving = Proving::new(inbox.clone(), mark, config.has_patterns(), &is_proven);
                Some((start_consumer(config.clone(), proving.clone())?, proving))
            }
            // The client of any other is made under another mark, when the consumer opens. This
            // mark is held until the consumer is watched, which makes a client for the first
            // consumer of its brokers.
            false => None,
        };
        let watched = if never_closes { None } else { Some(openings.watchers.watch(&config)?) };
        let (drain, drain_asked) = watch::channel(None);
        let (end, ended) = watch::channel(None);
        let is_open = Arc::new(AtomicBool::new(first.is_some()));
        let task = Task {
            openings,
            config,
            inbox,
            database,
            drain: drain_asked,
            is_open: is_open.clone(),
            trial,
            is_proven,
        };
        tokio::spawn(async move { end.send_replace(Some(task.run(first, watched).await)) });
        Ok(Self { drain, ended, is_open })
    }

    /// Returns whether the consumer is a member of its group, or becomes one.
    pub(crate) fn is_open(&self) -> bool {
        self.is_open.load(Ordering::Acquire)
    }

    /// Returns the error with which the task ended by itself, if it did.
    pub(crate) fn failure(&self) -> Option<ConsumerError> {
        if let Some(ended) = &*self.ended.borrow() {
            return Some(ended.as_ref().err().cloned().unwrap_or(ConsumerError::Panicked));
        }
        self.ended.has_changed().err().map(|_| ConsumerError::Panicked)
    }

    /// Finishes running messages, commits the offsets and leaves the group.
    pub(crate) async fn drain(&self, within: Duration) -> Drained {
        self.drain.send_replace(Some(within));
        let mut ended = self.ended.clone();
        match timeout(within + MARGIN, ended.wait_for(Option::is_some)).await {
            Ok(Ok(ended)) if matches!(&*ended, Some(Ok(Drained::Clean))) => Drained::Clean,
            _ => Drained::Unfinished,
        }
    }
}

/// The reason that a consumer opens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Why {
    /// Records to read.
    Something,
    /// Unknown lag.
    Blind,
    /// Offsets of its group that must be kept.
    Keep,
}

/// The reason that a consumer closed.
enum Closed {
    /// Nothing to do; the lag is watched.
    Idle(LagWatch),
    /// A database out of this host's reach; another host may reach it.
    CutOff,
    /// A request to drain, with its result.
    Drained(Drained),
}

/// The task that opens and closes a consumer.
struct Task {
    openings: Arc<Openings>,
    config: ConsumerConfig,
    inbox: Arc<dyn Inbox>,
    database: Arc<dyn Database>,
    drain: watch::Receiver<Option<Duration>>,
    is_open: Arc<AtomicBool>,
    /// The trial under which its client is made; none in tests of this module alone.
    trial: Option<Trial>,
    is_proven: Arc<AtomicBool>,
}

impl Task {
    async fn run(
        mut self,
        first: Option<(ConsumerHandle, Arc<Proving>)>,
        watched: Option<LagWatch>,
    ) -> Ended {
        if let Some((handle, proving)) = first {
            proving.started().await;
            tokio::spawn(proving.give_up_later());
            return self.read_for_ever(handle).await;
        }
        let (mut watched, mut keep) = (watched, self.openings.keep.0);
        loop {
            let why = match watched.take() {
                Some(resting) => self.rest(resting, keep).await,
                // The records that arrived while the database was out of reach are not known.
                None => self.database_is_back().await.then_some(Why::Blind),
            };
            let Some(why) = why else { return Ok(Drained::Clean) };
            let Some(permit) = self.permit(why).await else { return Ok(Drained::Clean) };
            let Some(mark) = self.mark().await? else { return Ok(Drained::Clean) };
            match self.open(why, permit, mark).await? {
                Closed::Drained(drained) => return Ok(drained),
                Closed::Idle(idle) => watched = Some(idle),
                Closed::CutOff => {}
            }
            keep = self.openings.keep.1;
        }
    }

    /// Waits until the database answers. Returns false where the consumer was told to drain.
    async fn database_is_back(&self) -> bool {
        let _counted = Counted::new("cut_off");
        let back = async {
            while !self.database.answers().await {
                tokio::time::sleep(LOOK_AGAIN).await;
            }
        };
        tokio::select! {
            biased;
            () = asked(self.drain.clone()) => false,
            () = back => {
                tracing::info!(tenant = self.config.tenant, consumer = self.config.consumer, "consumer opened: its database answers again");
                true
            }
        }
    }

    /// Leaves the group where the database has been out of reach for too long, and returns whether
    /// it did. The host that takes over meets the claims of messages that still run here.
    async fn left(&self, handle: &ConsumerHandle) -> bool {
        let Some(silent_for) =
            self.database.silent_for().filter(|_| !hooks::sabotage("cut_off_stays"))
        else {
            return false;
        };
        if self.openings.leave_after.is_none_or(|leave_after| silent_for < leave_after)
            || self.database.answers().await
        {
            return false;
        }
        handle.drain(LEAVE).await;
        tracing::warn!(
            tenant = self.config.tenant,
            consumer = self.config.consumer,
            silent_ms = silent_for.as_millis() as u64,
            "consumer closed: its database is out of reach, so it left its group to other hosts"
        );
        true
    }

    /// Waits for a reason to open. Returns none where the consumer was told to drain.
    async fn rest(&mut self, mut watched: LagWatch, keep: Duration) -> Option<Why> {
        let _counted = Counted::new("idle");
        let drain = self.drain.clone();
        tokio::select! {
            biased;
            () = asked(drain) => None,
            why = reason(&mut watched, keep) => Some(why),
        }
    }

    /// Acquires a permit to open. Returns none where the consumer was told to drain.
    async fn permit(&mut self, why: Why) -> Option<OwnedSemaphorePermit> {
        let places =
            if why == Why::Something { &self.openings.eager } else { &self.openings.careful };
        tokio::select! {
            biased;
            () = asked(self.drain.clone()) => None,
            permit = places.clone().acquire_owned() => permit.ok(),
        }
    }

    /// Writes the mark under which the client is made, unless this process has survived such a
    /// start before. The outer option is none where the consumer was told to drain.
    async fn mark(&mut self) -> Result<Option<Option<Mark>>, ConsumerError> {
        let Some(trial) = self.trial.as_ref().filter(|_| !self.is_proven.load(Ordering::Acquire))
        else {
            return Ok(Some(None));
        };
        tokio::select! {
            biased;
            () = asked(self.drain.clone()) => Ok(None),
            begun = trial.begin() => match begun {
                Ok(mark) => Ok(Some(Some(mark))),
                Err(error) => Err(ConsumerError::NotStarted { text: crate::report::one_line(&error) }),
            },
        }
    }

    /// Makes the client under a mark, if it needs one, and takes the mark away once the start is
    /// survived.
    async fn start(&self, mark: Option<Mark>) -> Result<ConsumerHandle, ConsumerError> {
        let proving =
            Proving::new(self.inbox.clone(), mark, self.config.has_patterns(), &self.is_proven);
        let handle = start_consumer(self.config.clone(), proving.clone())?;
        proving.started().await;
        tokio::spawn(proving.give_up_later());
        Ok(handle)
    }

    /// Joins the group and reads until there is nothing more to do.
    async fn open(
        &mut self,
        why: Why,
        permit: OwnedSemaphorePermit,
        mark: Option<Mark>,
    ) -> Result<Closed, ConsumerError> {
        let handle = self.start(mark).await?;
        self.is_open.store(true, Ordering::Release);
        let _counted = Counted::new("open");
        tracing::info!(
            tenant = self.config.tenant,
            consumer = self.config.consumer,
            ?why,
            "consumer opened"
        );
        let closed = self.read(&handle, why, permit).await;
        self.is_open.store(false, Ordering::Release);
        if let Ok(Closed::Idle(_)) = closed {
            tracing::info!(
                tenant = self.config.tenant,
                consumer = self.config.consumer,
                "consumer closed: nothing to do"
            );
        }
        closed
    }

    async fn read(
        &mut self,
        handle: &ConsumerHandle,
        why: Why,
        permit: OwnedSemaphorePermit,
    ) -> Result<Closed, ConsumerError> {
        let hold = if why == Why::Something { HOLD_EAGER } else { HOLD_CAREFUL };
        let (opened_at, mut permit) = (Instant::now(), Some(permit));
        let mut quiet = Quiet::new(self.idle_after(why));
        loop {
            let step = if permit.is_some() {
                Duration::from_millis(25)
            } else {
                quiet.step().min(LOOK_AGAIN)
            };
            tokio::select! {
                biased;
                () = asked(self.drain.clone()) => return Ok(Closed::Drained(self.drain_now(handle).await)),
                ended = handle.join() => return Err(ended.err().unwrap_or(ConsumerError::Panicked)),
                () = tokio::time::sleep(step) => {}
            }
            if self.left(handle).await {
                return Ok(Closed::CutOff);
            }
            let status = handle.status();
            if !status.partitions.is_empty() || opened_at.elapsed() >= hold {
                permit = None;
            }
            // A consumer that opened to keep its offsets must have joined its group.
            let has_joined = !status.partitions.is_empty() || opened_at.elapsed() >= HOLD_CAREFUL;
            if quiet.is_over(&status)
                && (has_joined || why != Why::Keep)
                && let Some(watched) = self.nothing_left().await
            {
                // Messages that do not end in time run on; the host that runs one next meets its
                // claim.
                handle.drain(CLOSE).await;
                return Ok(Closed::Idle(watched));
            }
        }
    }

    fn idle_after(&self, why: Why) -> Duration {
        let idle_after = self.openings.idle_after.unwrap_or(Duration::MAX);
        if why == Why::Keep { idle_after.min(KEEP_OPEN) } else { idle_after }
    }

    /// Returns a watch of the group's lag, if the whole group has read everything.
    async fn nothing_left(&self) -> Option<LagWatch> {
        let mut watched = self.openings.watchers.watch(&self.config).ok()?;
        matches!(watched.first(FIRST_LOOK).await, Lag::CaughtUp { .. }).then_some(watched)
    }

    /// Reads until told to drain, except while the database is out of reach.
    async fn read_for_ever(&mut self, mut handle: ConsumerHandle) -> Ended {
        loop {
            {
                let _counted = Counted::new("open");
                while !self.left(&handle).await {
                    tokio::select! {
                        biased;
                        () = asked(self.drain.clone()) => return Ok(self.drain_now(&handle).await),
                        ended = handle.join() => return Err(ended.err().unwrap_or(ConsumerError::Panicked)),
                        () = tokio::time::sleep(LOOK_AGAIN) => {}
                    }
                }
            }
            self.is_open.store(false, Ordering::Release);
            if !self.database_is_back().await {
                return Ok(Drained::Clean);
            }
            let Some(mark) = self.mark().await? else { return Ok(Drained::Clean) };
            handle = self.start(mark).await?;
            self.is_open.store(true, Ordering::Release);
        }
    }

    async fn drain_now(&self, handle: &ConsumerHandle) -> Drained {
        let within = self.drain.borrow().unwrap_or(CLOSE);
        handle.drain(within).await
    }
}

/// Waits until told to drain; a dropped sender counts as that, too.
async fn asked(mut drain: watch::Receiver<Option<Duration>>) {
    let _ = drain.wait_for(Option::is_some).await;
}

/// Waits until a watched consumer must open, and returns the reason.
async fn reason(watched: &mut LagWatch, keep: Duration) -> Why {
    if watched.first(FIRST_LOOK).await == Lag::Pending {
        return Why::Blind;
    }
    loop {
        let kept = tokio::time::sleep(keep.mul_f64(0.5 + rand::random::<f64>() / 2.0));
        tokio::select! {
            lag = watched.until_behind() => return if lag == Lag::Behind { Why::Something } else { Why::Blind },
            // A group without committed offsets has none to lose.
            () = kept => if watched.has_committed() { return Why::Keep },
        }
    }
}

/// The time since a consumer's partitions last changed or had work.
struct Quiet {
    idle_after: Duration,
    since: Instant,
    seen: Vec<(String, i32, Option<i64>)>,
}

impl Quiet {
    fn new(idle_after: Duration) -> Self {
        Self { idle_after, since: Instant::now(), seen: Vec::new() }
    }

    /// Returns the pause between two checks.
    fn step(&self) -> Duration {
        (self.idle_after / 8).clamp(Duration::from_millis(25), Duration::from_secs(5))
    }

    /// Returns whether nothing has happened for long enough. After a yes, a quarter of the idle
    /// time passes before the next.
    fn is_over(&mut self, status: &ConsumerStatus) -> bool {
        let seen: Vec<_> = status
            .partitions
            .iter()
            .map(|p| (p.topic.clone(), p.partition, p.next_offset))
            .collect();
        let rests = |p: &PartitionStatus| {
            p.messages == 0 && !p.backing_off && !p.leaving && p.next_offset.is_some()
        };
        if seen != self.seen || !status.partitions.iter().all(rests) {
            (self.seen, self.since) = (seen, Instant::now());
            return false;
        }
        let is_over = self.since.elapsed() >= self.idle_after;
        if is_over {
            self.since = Instant::now() - self.idle_after.mul_f64(0.75);
        }
        is_over
    }
}

/// One consumer's entry in the gauge of consumers by state, until it is dropped.
struct Counted(&'static str);

impl Counted {
    fn new(state: &'static str) -> Self {
        metrics::gauge!("oncebox_consumers", "state" => state).increment(1.0);
        Self(state)
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        metrics::gauge!("oncebox_consumers", "state" => self.0).decrement(1.0);
    }
}

#[cfg(test)]
mod tests;
