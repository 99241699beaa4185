//! The Kafka half of a consumer: closed while there is nothing to read, open otherwise.
//!
//! A closed consumer is an entry of the lag watcher that its brokers have in this host. It opens
//! when the watcher finds records to read or cannot tell. It closes when it had nothing to do for a
//! while and the group has read everything, on every host. The order of closing leaves no gap: the
//! consumer is watched before it leaves its group, from offsets that were committed. So records
//! that arrive in between open it again.

mod task;
mod timer;

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
    ConsumerConfig, ConsumerError, Drained, Inbox, ServerRun, Watchers, start_consumer,
};
use tokio::{
    sync::{Semaphore, watch},
    time::timeout,
};

use self::task::IdleTask;
use crate::consumer::starts::{Mark, Proving, Trial};

/// Time beyond a drain's own, in which the task reports its end.
const MARGIN: Duration = Duration::from_secs(3);
/// Most limits at a time: of consumers that have records to read, and of the others, each.
const AT_ONCE: usize = 8;
/// Interval at which an idle consumer joins its group and leaves it again, which restarts the
/// retention of its offsets. Kafka forgets the offsets of a group that has been empty for
/// `offsets.retention.minutes`, seven days by default. The group would then read everything again,
/// also messages that the inbox has long dropped.
const KEEP: Duration = Duration::from_secs(12 * 3_600);
/// The first such interval after a start: how long the group has been empty is not known then.
const KEEP_FIRST: Duration = Duration::from_secs(3_600);

/// The watchers, limits and permits that all consumers of a host share for opening and closing.
pub(crate) struct IdleLimits {
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

impl IdleLimits {
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
pub(crate) trait InboxDatabase: Send + Sync {
    /// Returns for how long the database has left a question unanswered; none while no question is
    /// open.
    fn silent_for(&self) -> Option<Duration>;
    /// Asks the database, and returns whether it answers.
    fn answers(&self) -> BoxFuture<'_, bool>;
    /// Returns the run of its server, as it changes.
    fn server(&self) -> watch::Receiver<ServerRun>;
}

impl InboxDatabase for Sessions {
    fn silent_for(&self) -> Option<Duration> {
        self.silent_for()
    }

    fn answers(&self) -> BoxFuture<'_, bool> {
        self.is_in_reach().boxed()
    }

    fn server(&self) -> watch::Receiver<ServerRun> {
        self.server()
    }
}

/// The Kafka half of a consumer that runs. Dropping it drains it in the background.
pub(crate) struct IdleConsumer {
    drain: watch::Sender<Option<Duration>>,
    ended: watch::Receiver<Option<Ended>>,
    is_open: Arc<AtomicBool>,
}

/// The result of a Kafka half that ended.
type Ended = Result<Drained, ConsumerError>;

impl IdleConsumer {
    /// Begins to read, or to watch. It must be called on a tokio runtime.
    pub(crate) fn start(
        limits: Arc<IdleLimits>,
        config: ConsumerConfig,
        inbox: Arc<dyn Inbox>,
        trial: Option<Trial>,
        mark: Option<Mark>,
        database: Arc<dyn InboxDatabase>,
    ) -> Result<Self, ConsumerError> {
        config.check()?;
        let is_proven = Arc::<AtomicBool>::default();
        // A consumer that never closes opens here, so that a refused property is an error of this
        // call.
        let never_closes = limits.idle_after.is_none() || config.has_patterns();
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
        let watched = if never_closes {
            None
        } else {
            Some(limits.watchers.watch(&config, database.server())?)
        };
        let (drain, drain_asked) = watch::channel(None);
        let (end, ended) = watch::channel(None);
        let is_open = Arc::new(AtomicBool::new(first.is_some()));
        let task = IdleTask {
            limits,
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

#[cfg(test)]
mod tests;
