//! The task that opens and closes a consumer.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use oncebox_kafka::{
    ConsumerConfig, ConsumerError, ConsumerHandle, Drained, Inbox, Lag, LagWatch, start_consumer,
};
use oncebox_model::hooks::{self, Defect};
use tokio::{
    sync::{OwnedSemaphorePermit, watch},
    time::Instant,
};

use super::{
    Ended, IdleLimits, InboxDatabase,
    timer::{GaugeGuard, IdleTimer},
};
use crate::consumer::starts::{Mark, Proving, Trial};

/// Longest wait for the first lag of a consumer's topics.
const FIRST_LOOK: Duration = Duration::from_secs(3);
/// Longest drain of running messages when a consumer closes.
const CLOSE: Duration = Duration::from_secs(20);
/// Longest drain when its database is out of reach: few of the messages can finish then.
const LEAVE: Duration = Duration::from_secs(2);
/// Pause between two questions to a database that is out of reach. Also the pause between two such
/// checks of a consumer that never closes.
const RECHECK: Duration = Duration::from_secs(1);
/// Time for which an opening holds its permit when there are records to read. A host that returns
/// to many busy consumers starts 32 of them a second.
const HOLD_EAGER: Duration = Duration::from_millis(250);
/// Longest time for which an opening holds its permit when the lag is unknown, or when only the
/// group's offsets are to be kept. It ends earlier once the consumer has joined its group.
const HOLD_CAREFUL: Duration = Duration::from_secs(10);
/// Idle time after which a consumer that opened only to keep its offsets closes.
const KEEP_OPEN: Duration = Duration::from_millis(500);

/// The reason that a consumer opens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum OpenReason {
    /// Records to read.
    Lag,
    /// Unknown lag.
    LagUnknown,
    /// Offsets of its group that must be kept.
    KeepOffsets,
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
pub(super) struct IdleTask {
    pub(super) limits: Arc<IdleLimits>,
    pub(super) config: ConsumerConfig,
    pub(super) inbox: Arc<dyn Inbox>,
    pub(super) database: Arc<dyn InboxDatabase>,
    pub(super) drain: watch::Receiver<Option<Duration>>,
    pub(super) is_open: Arc<AtomicBool>,
    /// The trial under which its client is made; none in tests of this module alone.
    pub(super) trial: Option<Trial>,
    pub(super) is_proven: Arc<AtomicBool>,
}

impl IdleTask {
    /// Runs until the consumer is told to drain, or fails.
    pub(super) async fn run(
        mut self,
        first: Option<(ConsumerHandle, Arc<Proving>)>,
        watched: Option<LagWatch>,
    ) -> Ended {
        if let Some((handle, proving)) = first {
            proving.started().await;
            tokio::spawn(proving.give_up_later());
            return self.read_for_ever(handle).await;
        }
        let (mut watched, mut keep) = (watched, self.limits.keep.0);
        loop {
            let why = match watched.take() {
                Some(resting) => self.rest(resting, keep).await,
                // The records that arrived while the database was out of reach are not known.
                None => self.database_is_back().await.then_some(OpenReason::LagUnknown),
            };
            let Some(why) = why else { return Ok(Drained::Clean) };
            let Some(permit) = self.permit(why).await else { return Ok(Drained::Clean) };
            let Some(mark) = self.mark().await? else { return Ok(Drained::Clean) };
            match self.open(why, permit, mark).await? {
                Closed::Drained(drained) => return Ok(drained),
                Closed::Idle(idle) => watched = Some(idle),
                Closed::CutOff => {}
            }
            keep = self.limits.keep.1;
        }
    }

    /// Waits until the database answers. Returns false where the consumer was told to drain.
    async fn database_is_back(&self) -> bool {
        let _counted = GaugeGuard::new("cut_off");
        let back = async {
            while !self.database.answers().await {
                tokio::time::sleep(RECHECK).await;
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
            self.database.silent_for().filter(|_| !hooks::sabotage(Defect::CutOffStays))
        else {
            return false;
        };
        if self.limits.leave_after.is_none_or(|leave_after| silent_for < leave_after)
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
    async fn rest(&mut self, mut watched: LagWatch, keep: Duration) -> Option<OpenReason> {
        let _counted = GaugeGuard::new("idle");
        let drain = self.drain.clone();
        tokio::select! {
            biased;
            () = asked(drain) => None,
            why = reason(&mut watched, keep) => Some(why),
        }
    }

    /// Acquires a permit to open. Returns none where the consumer was told to drain.
    async fn permit(&mut self, why: OpenReason) -> Option<OwnedSemaphorePermit> {
        let places = if why == OpenReason::Lag { &self.limits.eager } else { &self.limits.careful };
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
                Err(error) => Err(ConsumerError::NotStarted { text: crate::error_text::one_line(&error) }),
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
        why: OpenReason,
        permit: OwnedSemaphorePermit,
        mark: Option<Mark>,
    ) -> Result<Closed, ConsumerError> {
        let handle = self.start(mark).await?;
        self.is_open.store(true, Ordering::Release);
        let _counted = GaugeGuard::new("open");
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
        why: OpenReason,
        permit: OwnedSemaphorePermit,
    ) -> Result<Closed, ConsumerError> {
        let hold = if why == OpenReason::Lag { HOLD_EAGER } else { HOLD_CAREFUL };
        let (opened_at, mut permit) = (Instant::now(), Some(permit));
        let mut quiet = IdleTimer::new(self.idle_after(why));
        loop {
            let step = if permit.is_some() {
                Duration::from_millis(25)
            } else {
                quiet.step().min(RECHECK)
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
                && (has_joined || why != OpenReason::KeepOffsets)
                && let Some(watched) = self.nothing_left().await
            {
                // Messages that do not end in time run on; the host that runs one next meets its
                // claim.
                handle.drain(CLOSE).await;
                return Ok(Closed::Idle(watched));
            }
        }
    }

    fn idle_after(&self, why: OpenReason) -> Duration {
        let idle_after = self.limits.idle_after.unwrap_or(Duration::MAX);
        if why == OpenReason::KeepOffsets { idle_after.min(KEEP_OPEN) } else { idle_after }
    }

    /// Returns a watch of the group's lag, if the whole group has read everything.
    async fn nothing_left(&self) -> Option<LagWatch> {
        let mut watched = self.limits.watchers.watch(&self.config, self.database.server()).ok()?;
        matches!(watched.first(FIRST_LOOK).await, Lag::CaughtUp { .. }).then_some(watched)
    }

    /// Reads until told to drain, except while the database is out of reach.
    async fn read_for_ever(&mut self, mut handle: ConsumerHandle) -> Ended {
        loop {
            {
                let _counted = GaugeGuard::new("open");
                while !self.left(&handle).await {
                    tokio::select! {
                        biased;
                        () = asked(self.drain.clone()) => return Ok(self.drain_now(&handle).await),
                        ended = handle.join() => return Err(ended.err().unwrap_or(ConsumerError::Panicked)),
                        () = tokio::time::sleep(RECHECK) => {}
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
async fn reason(watched: &mut LagWatch, keep: Duration) -> OpenReason {
    if watched.first(FIRST_LOOK).await == Lag::Pending {
        return OpenReason::LagUnknown;
    }
    loop {
        let kept = tokio::time::sleep(keep.mul_f64(0.5 + rand::random::<f64>() / 2.0));
        tokio::select! {
            lag = watched.until_behind() => return if lag == Lag::Behind { OpenReason::Lag } else { OpenReason::LagUnknown },
            // A group without committed offsets has none to lose.
            () = kept => if watched.has_committed() { return OpenReason::KeepOffsets },
        }
    }
}
