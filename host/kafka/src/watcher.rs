//! The lag watcher: one client for each cluster of brokers, which polls the lag of many consumers.
//! A consumer without unread records then needs no client of its own.
//!
//! A group has unread records also where its offset was acked in another run of the database's
//! server, which may have lost their commits. The consumer then opens and finds out.
//!
//! The watcher errs on the side of reading. A consumer may stay closed only while the watcher has
//! seen, for every partition of its topics, that the group's next offset is the end. The watcher
//! never commits and is a member of no group.

mod ask;
mod group;
mod poll;

use std::{
    collections::{BTreeMap, HashMap},
    sync::{
        Mutex, PoisonError,
        mpsc::{SyncSender, TrySendError, sync_channel},
    },
    time::Duration,
};

use oncebox_model::inbox::ServerRun;
use tokio::sync::watch;

use self::{group::WatchedGroup, poll::Poll};
use crate::{config::ConsumerConfig, error::ConsumerError};

/// The most consumers that wait for a watcher to receive them.
const WAITING_MAX: usize = 4_096;

/// The lag of a consumer's group, as far as a watcher knows it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Lag {
    /// Not known yet.
    Pending,
    /// No unread records in any partition.
    CaughtUp {
        /// Whether the group has committed offsets, which brokers could expire.
        committed: bool,
    },
    /// Unread records.
    Behind,
    /// Unknown for a while, since brokers do not answer; or a topic that does not exist.
    Unavailable,
}

/// The watchers of a host, by the properties that their clients connect with.
#[derive(Default)]
pub struct Watchers {
    running: Mutex<HashMap<BTreeMap<String, String>, SyncSender<WatchedGroup>>>,
}

/// A subscription to the lag of one consumer; the watcher polls it until this is dropped.
pub struct LagWatch {
    lag: watch::Receiver<Lag>,
}

impl Watchers {
    /// Begins to watch a consumer, whose database is in the given run of its server. The watcher does not resolve topic names that are regular
    /// expressions, so the lag of such a consumer stays [`Lag::Pending`].
    ///
    /// # Errors
    ///
    /// A [`ConsumerError`] when a property or setting is refused, or no watcher can take
    /// the consumer.
    pub fn watch(
        &self,
        config: &ConsumerConfig,
        server: watch::Receiver<ServerRun>,
    ) -> Result<LagWatch, ConsumerError> {
        config.check()?;
        let (sender, lag) = watch::channel(Lag::Pending);
        if !config.has_patterns() {
            let group = WatchedGroup::new(config.group(), &config.topics, server, sender);
            self.hand_over(config, group)?;
        }
        Ok(LagWatch { lag })
    }

    /// Sends a group to the watcher of its brokers, which is started if none runs.
    fn hand_over(
        &self,
        config: &ConsumerConfig,
        mut group: WatchedGroup,
    ) -> Result<(), ConsumerError> {
        let properties = config.connection_properties();
        let mut running = self.running.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(watcher) = running.get(&properties) {
            group = match watcher.try_send(group) {
                Ok(()) => return Ok(()),
                // A watcher ends when it had no consumers for a while.
                Err(TrySendError::Disconnected(group)) => group,
                Err(TrySendError::Full(_)) => {
                    return Err(ConsumerError::Client {
                        text: "too many consumers wait to be watched".to_owned(),
                    });
                }
            };
        }
        let (sender, groups) = sync_channel(WAITING_MAX);
        let _ = sender.try_send(group); // the channel is empty
        Poll::start(&properties, &config.secrets(), groups)?;
        running.insert(properties, sender);
        Ok(())
    }
}

impl LagWatch {
    /// Returns the lag once it is known, or [`Lag::Pending`] when `within` has passed.
    pub async fn first(&mut self, within: Duration) -> Lag {
        let known = self.lag.wait_for(|lag| *lag != Lag::Pending);
        let known =
            tokio::time::timeout(within, known).await.ok().and_then(Result::ok).map(|lag| *lag);
        known.unwrap_or(Lag::Pending)
    }

    /// Returns whether the group is known to be caught up with committed offsets, which brokers
    /// could expire.
    pub fn has_committed(&self) -> bool {
        matches!(*self.lag.borrow(), Lag::CaughtUp { committed: true })
    }

    /// Waits until the group is behind or its lag is unavailable, and returns which.
    pub async fn until_behind(&mut self) -> Lag {
        match self.lag.wait_for(|lag| matches!(lag, Lag::Behind | Lag::Unavailable)).await {
            Ok(lag) => *lag,
            // The watcher has ended, which is a bug.
            Err(_) => Lag::Unavailable,
        }
    }
}
