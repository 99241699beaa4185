//! Finding the offset that a partition starts at, opening its inbox, and checking that its topic is
//! still the same one.

use std::{sync::Arc, time::Instant};

use oncebox_model::inbox::{PartitionInbox, PartitionInboxError};

use super::{ExpectedOffset, PartitionWorker};
use crate::{
    client::Client,
    error::ConsumerError,
    metric::Labels,
    partition::Partition,
    position::{Committed, PartitionStart, Positions, start},
    topic_id::TopicId,
};

impl PartitionWorker {
    /// Waits for earlier workers of the partition, then opens the partition. Returns none when told
    /// to stop.
    pub(super) async fn open(&mut self) -> Result<Option<Box<dyn PartitionInbox>>, ConsumerError> {
        for predecessor in std::mem::take(&mut self.predecessors) {
            tokio::select! {
                () = self.stop.requested.cancelled() => return Ok(None),
                () = predecessor.cancelled() => {}
            }
        }
        match self.find_start().await {
            None => return Ok(None),
            Some(PartitionStart::MadeAgain { .. }) => {
                return self.start_over().await.map_or(Ok(None), Err);
            }
            Some(_) => {}
        }
        Ok(self.open_inbox().await)
    }

    async fn open_inbox(&mut self) -> Option<Box<dyn PartitionInbox>> {
        let shared = Arc::clone(&self.shared);
        let (topic, number) =
            (Arc::clone(&self.state.partition.topic), self.state.partition.number);
        loop {
            match shared.inbox.open(&topic, number, self.next).await {
                Ok(inbox) => {
                    self.recovered();
                    return Some(inbox);
                }
                Err(PartitionInboxError { pause: Some(pause), .. }) => self.wait(pause).await?,
                Err(error) => self.back_off("opening the partition's inbox", &error.text).await?,
            }
        }
    }

    /// Finds the offset to start at. Asks for the topic's id first. A position that is older than
    /// the id could belong to the topic's predecessor, and would count as valid in this topic. An
    /// id that is older than the position is found out later, by [`Self::check_topic`] or by the
    /// loop's check of the ids.
    async fn find_start(&mut self) -> Option<PartitionStart> {
        self.find_topic_id(self.assigned_at).await?;
        let mut positions = self.find_positions().await?;
        if let PartitionStart::MadeAgain { .. } = start(&positions, &self.topic_id) {
            // Another host may know the new topic before this one, and may have committed for it.
            self.find_topic_id(Instant::now()).await?;
            positions = self.find_positions().await?;
        }
        let start = start(&positions, &self.topic_id);
        match start {
            PartitionStart::Committed(next) => self.note_topic(&positions.committed, next).await,
            PartitionStart::Beginning(_) | PartitionStart::MadeAgain { .. } => {}
            PartitionStart::TruncatedBefore { committed, low } => {
                self.truncated_before(committed, low)
            }
            PartitionStart::BeyondEnd { committed, low } => {
                self.beyond_end(committed, low, positions.high)
            }
        }
        self.advance(start.next());
        self.expected = ExpectedOffset::Resume(self.next);
        Some(start)
    }

    /// Asks for the partition's positions until brokers answer. Returns none when told to stop.
    async fn find_positions(&mut self) -> Option<Positions> {
        loop {
            match self.shared.client.positions(&self.state.partition, self.shared.lookup).await {
                Ok(positions) => return Some(positions),
                Err(text) => self.back_off("finding the partition's position", &text).await?,
            }
        }
    }

    /// Asks for the topic's id, as of `since` or later, until a broker answers. Returns none when
    /// told to stop.
    async fn find_topic_id(&mut self, since: Instant) -> Option<()> {
        self.topic_id = loop {
            match self.ask_topic_id(since).await {
                Ok(id) => break id,
                Err(text) => self.back_off("finding the topic's id", &text).await?,
            }
        };
        self.state.set_topic_id(&self.topic_id);
        Some(())
    }

    /// Commits the topic's id beside an offset that has none, from an earlier version or another
    /// program. Such an offset counts as valid in any topic, and the next commit may be far off. A
    /// failure is only logged, since the next record's commit notes the id too.
    async fn note_topic(&self, committed: &Option<Committed>, next: i64) {
        if self.topic_id.is_none()
            || committed.as_ref().is_none_or(|committed| committed.topic_id.is_some())
        {
            return;
        }
        let (shared, generation) = (Arc::clone(&self.shared), self.generation);
        let offset = (self.state.partition.clone(), next, self.topic_id.clone());
        let note = move |client: &Client| match shared.offset_tracker.is_ours(&offset.0, generation)
        {
            true => client.commit(&[offset], shared.commit).map_err(|error| error.to_string()),
            // The present owner may have got further.
            false => Ok(()),
        };
        let noted = self.shared.client.lookup(note).await;
        if let Err(error) = noted {
            let Labels { tenant, consumer } = &self.shared.labels;
            tracing::debug!(tenant, consumer, partition = %self.state.partition, error, "topic \
                id not noted beside the offset");
        }
    }

    /// Replaces the offsets of the topic's predecessor by the low watermark, for all partitions of
    /// the topic that this consumer owns. Returns the error that ends the consumer. The consumer
    /// has to start again, because librdkafka already reads from the predecessor's offset. If the
    /// host dies before the commit, the next host finds the predecessor's offsets again; after the
    /// commit it finds the low watermark. Returns none when told to stop.
    async fn start_over(&mut self) -> Option<ConsumerError> {
        let (shared, topic) = (Arc::clone(&self.shared), Arc::clone(&self.state.partition.topic));
        let _only = shared.replacing.lock().await;
        loop {
            let (assigned, id, ours) = (
                shared.offset_tracker.of_topic(&topic),
                self.topic_id.clone(),
                Arc::clone(&shared),
            );
            let replace = move |client: &Client| {
                client.start_over(&ours.offset_tracker, &assigned, &id, ours.lookup, ours.commit)
            };
            let replaced = shared.client.lookup(replace).await;
            match replaced {
                Ok(replaced) => {
                    replaced.iter().for_each(|(partition, committed, low)| {
                        self.made_again(partition, *committed, *low)
                    });
                    return Some(ConsumerError::MadeAgain { topic: topic.to_string() });
                }
                Err(text) => {
                    self.back_off("replacing the offsets of a deleted topic", &text).await?
                }
            }
        }
    }

    async fn ask_topic_id(&self, since: Instant) -> Result<TopicId, String> {
        let shared = &self.shared;
        shared.topic_ids.of(&shared.client, &self.state.partition.topic, since, shared.lookup).await
    }

    /// Fails if the topic's id has changed. After a change of leader a broker may redeliver
    /// records, and the inbox recognizes these as duplicates. In a topic that was made again the
    /// record is another one, and without this check the inbox would take it for a duplicate too.
    pub(super) async fn check_topic(
        &mut self,
        expected: i64,
        found: i64,
    ) -> Result<(), ConsumerError> {
        let partition = self.state.partition.to_string();
        loop {
            match self.ask_topic_id(Instant::now()).await {
                Ok(id) if id == self.topic_id => break,
                Ok(_) => {
                    self.shared.labels.topic_made_again(&self.state.partition);
                    let topic = self.state.partition.topic.to_string();
                    return Err(if found < expected {
                        ConsumerError::WentBack { topic, partition, expected, found }
                    } else {
                        ConsumerError::MadeAgain { topic }
                    });
                }
                // No batch runs. `fill` notices the stop and offers no more records.
                Err(text) if self.back_off("finding the topic's id", &text).await.is_none() => {
                    break;
                }
                Err(_) => {}
            }
        }
        if found < expected {
            let Labels { tenant, consumer } = &self.shared.labels;
            tracing::warn!(tenant, consumer, partition, expected, found, "records redelivered");
        }
        Ok(())
    }

    fn made_again(&self, partition: &Partition, committed: i64, low_watermark: i64) {
        let Labels { tenant, consumer } = &self.shared.labels;
        self.shared.labels.topic_made_again(partition);
        tracing::error!(
            tenant,
            consumer,
            topic = &*partition.topic,
            partition = partition.number,
            committed,
            low_watermark,
            "topic deleted and made again: the committed offset belongs to the old topic; reading \
                continues at the low watermark"
        );
    }

    pub(super) fn truncated_before(&self, next_offset: i64, low_watermark: i64) {
        self.state.meters.truncated_before.increment(1);
        let Labels { tenant, consumer } = &self.shared.labels;
        tracing::error!(
            tenant,
            consumer,
            topic = &*self.state.partition.topic,
            partition = self.state.partition.number,
            next_offset,
            low_watermark,
            "records deleted by the broker before they were settled; reading continues at the low \
                watermark"
        );
    }

    fn beyond_end(&self, committed: i64, low_watermark: i64, high_watermark: i64) {
        let Labels { tenant, consumer } = &self.shared.labels;
        tracing::error!(
            tenant,
            consumer,
            topic = &*self.state.partition.topic,
            partition = self.state.partition.number,
            committed,
            low_watermark,
            high_watermark,
            "committed offset found above the high watermark: the topic was truncated, or made \
                again by brokers without topic ids; reading continues at the low watermark"
        );
    }
}
