//! Finding the offset that a partition starts at, opening its inbox, and checking that its topic is
//! still the same one.

use std::{sync::Arc, time::Instant};

use oncebox_model::inbox::{OpenAt, Opened, PartitionInbox, PartitionInboxError, ServerRun};

use super::{ExpectedOffset, PartitionWorker};
use crate::{
    client::Client,
    error::ConsumerError,
    metric::Labels,
    offsets::OffsetNote,
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
        match self.open_inbox().await {
            None => Ok(None),
            Some(Opened::Ready(inbox)) => {
                self.note_again(inbox.server()).await;
                Ok(Some(inbox))
            }
            Some(Opened::Behind(_)) => self.rewind().await.map_or(Ok(None), Err),
        }
    }

    async fn open_inbox(&mut self) -> Option<Opened> {
        let inbox = Arc::clone(&self.shared.inbox);
        loop {
            let server = self.noted.as_ref().and_then(|note| note.server.clone());
            let at = open_at(&self.state.partition, &self.topic_id, self.next, &server);
            match inbox.open(at).await {
                Ok(opened) => {
                    self.recovered();
                    return Some(opened);
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
        let (start, high) = (start(&positions, &self.topic_id), positions.high);
        match start {
            PartitionStart::Committed(_) => {
                self.noted = positions.committed.map(|committed| committed.note);
            }
            PartitionStart::Beginning(_) | PartitionStart::MadeAgain { .. } => {}
            PartitionStart::TruncatedBefore { committed, low } => {
                self.truncated_before(committed, low)
            }
            PartitionStart::BeyondEnd { committed, low } => self.beyond_end(committed, low, high),
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

    /// Commits the present offset once more, where another note belongs beside it: the offset is
    /// from an earlier version or another program, or was acked in another run of the server. Without the topic's id it would count as valid in any topic, and the next
    /// commit may be far off. A failure is only logged, since the next record's commit has the note
    /// too.
    pub(super) async fn note_again(&mut self, server: ServerRun) {
        let note = OffsetNote { topic_id: self.topic_id.clone(), server };
        if self.noted.as_ref().is_none_or(|noted| *noted == note) {
            return;
        }
        let (shared, generation) = (Arc::clone(&self.shared), self.generation);
        let offset = (self.state.partition.clone(), self.next, note.clone());
        let commit =
            move |client: &Client| match shared.offset_tracker.is_ours(&offset.0, generation) {
                true => client.commit(&[offset], shared.commit).map_err(|error| error.to_string()),
                // The present owner may have got further.
                false => Ok(()),
            };
        let committed = self.shared.client.lookup(commit).await;
        self.noted = Some(note);
        if let Err(error) = committed {
            let Labels { tenant, consumer } = &self.shared.labels;
            tracing::debug!(tenant, consumer, partition = %self.state.partition, error, "note \
                beside the offset not replaced");
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

    /// Replaces the committed offsets of all partitions that this consumer owns and whose database
    /// is behind them. Returns the error that ends the consumer, which has to start again, because
    /// librdkafka already reads from the offset that is replaced. If the host dies before the
    /// commit, the next host finds the same; after the commit it finds the database's own position.
    /// Returns none when told to stop.
    async fn rewind(&mut self) -> Option<ConsumerError> {
        let shared = Arc::clone(&self.shared);
        let _only = tokio::select! {
            () = self.stop.requested.cancelled() => return None,
            only = shared.replacing.lock() => only,
        };
        loop {
            match self.rewind_assigned().await {
                Ok(()) => return Some(self.commits_lost()),
                Err(text) => self.back_off("replacing offsets of lost commits", &text).await?,
            }
        }
    }

    async fn rewind_assigned(&self) -> Result<(), String> {
        let (shared, lookup, commit) = (&self.shared, self.shared.lookup, self.shared.commit);
        let assigned = shared.offset_tracker.assigned();
        let partitions: Vec<_> = assigned.iter().map(|(partition, _)| partition.clone()).collect();
        let committed = shared.client.lookup(move |client| {
            client.committed(&partitions, lookup).map_err(|error| error.to_string())
        });
        let mut rewound = Vec::new();
        for ((partition, generation), committed) in assigned.into_iter().zip(committed.await?) {
            let Some(Committed { offset, note }) = committed else { continue };
            let at = open_at(&partition, &note.topic_id, offset, &note.server);
            let behind = shared.inbox.behind(at).await.map_err(|error| error.text)?;
            if let Some(behind) = behind.filter(|behind| behind.next_offset < offset) {
                let note = OffsetNote { topic_id: note.topic_id, server: behind.server };
                rewound.push((generation, offset, (partition, behind.next_offset, note)));
            }
        }
        let ours = Arc::clone(shared);
        let replace = move |client: &Client| {
            rewound.retain(|(generation, _, (partition, ..))| {
                ours.offset_tracker.is_ours(partition, *generation)
            });
            let offsets: Vec<_> = rewound.iter().map(|(.., offset)| offset.clone()).collect();
            match offsets.is_empty() {
                true => Ok(rewound),
                false => client.commit(&offsets, commit).map(|()| rewound),
            }
            .map_err(|error| error.to_string())
        };
        for (_, committed, (partition, next_offset, _)) in shared.client.lookup(replace).await? {
            self.rewound(&partition, committed, next_offset);
        }
        Ok(())
    }

    /// Returns the error that ends a consumer whose database has lost commits.
    pub(super) fn commits_lost(&self) -> ConsumerError {
        ConsumerError::CommitsLost { partition: self.state.partition.to_string() }
    }

    fn rewound(&self, partition: &Partition, committed: i64, next_offset: i64) {
        let Labels { tenant, consumer } = &self.shared.labels;
        self.shared.labels.rewound(partition);
        tracing::error!(
            tenant,
            consumer,
            topic = &*partition.topic,
            partition = partition.number,
            committed,
            next_offset,
            "database found behind the committed offset, after a failover, a restored backup or a \
                crash: reading continues at the position that the database knows"
        );
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

/// Returns the request to open a partition at an offset with that note.
fn open_at(
    partition: &Partition,
    topic_id: &TopicId,
    next_offset: i64,
    server: &ServerRun,
) -> OpenAt {
    OpenAt {
        topic: Arc::clone(&partition.topic),
        topic_id: topic_id.clone(),
        partition: partition.number,
        next_offset,
        server: server.clone(),
    }
}
