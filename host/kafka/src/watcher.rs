//! The lag watcher: one client for each cluster of brokers, which knows of many consumers whether
//! there is something for them to read, so that those with nothing need no client of their own.
//!
//! It errs on the side of reading: a consumer may stay closed only while the watcher has positively
//! seen, of every partition of its topics, that the group's next offset is the end. It never
//! commits anything and is a member of no group.

mod ask;
mod look;
mod subject;

use std::{
    collections::{BTreeMap, HashMap},
    sync::{
        Mutex, PoisonError,
        mpsc::{SyncSender, TrySendError, sync_channel},
    },
    time::Duration,
};

use tokio::sync::watch;

use self::{look::Look, subject::Subject};
use crate::{config::ConsumerConfig, error::ConsumerError};

/// Consumers that may wait to be taken in by a watcher.
const WAITING_MAX: usize = 4_096;

/// What a watcher knows of a consumer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Sight {
    /// Nothing yet.
    Unknown,
    /// The group has read everything. `committed`: it has offsets that the brokers could forget.
    Nothing {
        /// Whether the group has committed offsets.
        committed: bool,
    },
    /// There are records that the group has not read.
    Something,
    /// It cannot be told, and has not been for a while.
    Blind,
}

/// The watchers of a host, by what their clients connect with.
#[derive(Default)]
pub struct Watchers {
    running: Mutex<HashMap<BTreeMap<String, String>, SyncSender<Subject>>>,
}

/// A consumer that is watched, until this is dropped.
pub struct Watched {
    sight: watch::Receiver<Sight>,
}

impl Watchers {
    /// Begin to watch a consumer. A name of a topic that is a regular expression is not resolved
    /// here, so such a consumer stays unknown for ever.
    pub fn watch(&self, config: &ConsumerConfig) -> Result<Watched, ConsumerError> {
        config.check()?;
        let (tell, sight) = watch::channel(Sight::Unknown);
        if !config.has_patterns() {
            let subject = Subject::new(config.group(), &config.topics, tell);
            self.hand_over(config, subject)?;
        }
        Ok(Watched { sight })
    }

    fn hand_over(
        &self,
        config: &ConsumerConfig,
        mut subject: Subject,
    ) -> Result<(), ConsumerError> {
        let properties = config.connection_properties();
        let mut running = self.running.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(watcher) = running.get(&properties) {
            subject = match watcher.try_send(subject) {
                Ok(()) => return Ok(()),
                // A watcher ends when it has had nobody to watch for a while.
                Err(TrySendError::Disconnected(subject)) => subject,
                Err(TrySendError::Full(_)) => {
                    return Err(ConsumerError::Client {
                        text: "too many consumers wait to be watched".to_owned(),
                    });
                }
            };
        }
        let (sender, subjects) = sync_channel(WAITING_MAX);
        let _ = sender.try_send(subject); // it is empty
        Look::start(&properties, &config.secrets(), subjects)?;
        running.insert(properties, sender);
        Ok(())
    }
}

impl Watched {
    /// What is known at the end of a bounded wait for something to be known.
    pub async fn first(&mut self, within: Duration) -> Sight {
        let known = self.sight.wait_for(|sight| *sight != Sight::Unknown);
        let known =
            tokio::time::timeout(within, known).await.ok().and_then(Result::ok).map(|sight| *sight);
        known.unwrap_or(Sight::Unknown)
    }

    /// Whether its group has offsets that the brokers could forget, as far as it is known.
    pub fn has_committed(&self) -> bool {
        matches!(*self.sight.borrow(), Sight::Nothing { committed: true })
    }

    /// Wait until there is something to read, or until that cannot be told.
    pub async fn something(&mut self) -> Sight {
        match self.sight.wait_for(|sight| matches!(sight, Sight::Something | Sight::Blind)).await {
            Ok(sight) => *sight,
            // The watcher is gone, which is a bug of ours.
            Err(_) => Sight::Blind,
        }
    }
}
