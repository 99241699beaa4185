//! The periodic work of the loop: pauses, lag, and the check of the topics' ids.

use std::{collections::HashSet, sync::Arc, time::Duration};

use super::EventLoop;
use crate::{error::ConsumerError, topic_id::describe};

/// The longest wait for a paused partition's watermarks.
const MEASURE: Duration = Duration::from_secs(1);

impl EventLoop {
    /// Runs the periodic work. It also pauses and resumes again where that failed before: a
    /// partition must not stay paused for lack of an event.
    pub(super) async fn tick(&mut self) -> Result<(), ConsumerError> {
        self.regulate_all();
        self.measure_lag();
        self.check_topics().await
    }

    /// Fails when a topic was made again. The check is needed where the new topic has records
    /// beyond the offset of the old one. Records below that offset are not read, and no record
    /// steps back. Offsets stored before the check have the old topic's id beside them, so the
    /// restarted consumer begins at the low watermark.
    async fn check_topics(&mut self) -> Result<(), ConsumerError> {
        if let Some(checking) = self.checking.take_if(|checking| checking.is_finished()) {
            match checking.await {
                Ok(Some(topic)) => {
                    self.shared
                        .offset_tracker
                        .of_topic(&topic)
                        .iter()
                        .for_each(|(partition, _)| self.shared.labels.topic_made_again(partition));
                    return Err(ConsumerError::MadeAgain { topic: topic.to_string() });
                }
                Ok(None) => {}
                Err(_) => return Err(ConsumerError::Panicked),
            }
        }
        if self.checking.is_none() {
            let known = self.assigned.values().filter_map(|assigned| assigned.state.topic_id());
            let known: HashSet<_> = known.collect();
            let (client, lookup) = (Arc::clone(&self.shared.client), self.config.timing.lookup);
            self.checking = Some(tokio::spawn(async move {
                for (topic, id) in known {
                    let name = Arc::clone(&topic);
                    // Not through `topic_ids`: workers would wait for its lock.
                    let present = client
                        .lookup(move |client| describe(&client.consumer, &name, lookup))
                        .await;
                    // A missing answer proves nothing. The check ends at the first silent broker;
                    // the next tick asks again, in another order.
                    if present.ok()?.is_some_and(|present| present != id) {
                        return Some(topic);
                    }
                }
                None
            }));
        }
        Ok(())
    }

    /// Measures the partitions' lag. Asks brokers only about paused partitions; the high watermark
    /// of the others comes with each fetch.
    fn measure_lag(&mut self) {
        if self.measuring.as_ref().is_some_and(|measuring| !measuring.is_finished()) {
            return;
        }
        let client = Arc::clone(&self.shared.client);
        let partitions: Vec<_> =
            self.assigned.values().map(|assigned| Arc::clone(&assigned.state)).collect();
        self.measuring = Some(tokio::task::spawn_blocking(move || {
            for state in partitions {
                let seen = client.watermarks_seen(&state.partition).filter(|_| !state.is_paused());
                let known = seen.map_or_else(|| client.watermarks(&state.partition, MEASURE), Ok);
                // The measurement ends at the first silent broker; the next tick asks again.
                let Ok((_, high)) = known else { return };
                if let Some(next) = state.next_offset() {
                    state.set_lag((high - next).max(0));
                }
            }
        }));
    }
}
