//! The worker of one assigned partition: it processes one batch at a time, in order.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use oncebox_model::{hooks, record::Record};
use tokio::sync::{Notify, mpsc};
use tokio_util::sync::CancellationToken;

use crate::{
    backoff::Backoff,
    client::{Client, Positions},
    error::ConsumerError,
    inbox::{Inbox, PartitionInbox, PartitionInboxError},
    metric::Labels,
    offsets::{OffsetTracker, Stored},
    partition::{Partition, PartitionState},
    pause::PauseList,
    position::{Committed, Start, start},
    topic_id::{TopicId, TopicIds},
};

/// A request to a worker to end, and the worker's report that it has ended.
#[derive(Default)]
pub(crate) struct StopSignal {
    /// Cancelled when the worker is to end.
    requested: CancellationToken,
    /// Whether the partition was lost, so that it may have another owner already.
    lost: AtomicBool,
    /// Cancelled when the worker has ended.
    pub(crate) done: CancellationToken,
}

impl StopSignal {
    /// Tells the worker to end after the batch that runs. `lost` says that another member may own
    /// the partition already.
    pub(crate) fn request(&self, lost: bool) {
        self.lost.fetch_or(lost, Ordering::AcqRel);
        self.requested.cancel();
    }
}

/// The state that the workers of a consumer share.
pub(crate) struct Shared {
    pub(crate) client: Arc<Client>,
    pub(crate) inbox: Arc<dyn Inbox>,
    pub(crate) offset_tracker: OffsetTracker,
    pub(crate) topic_ids: TopicIds,
    pub(crate) labels: Labels,
    pub(crate) pauses: Arc<PauseList>,
    /// The longest wait for one answer of a broker.
    pub(crate) lookup: Duration,
    /// The longest wait for a synchronous commit.
    pub(crate) commit: Duration,
    /// Held while a worker replaces the offsets of a deleted topic.
    pub(crate) replacing: tokio::sync::Mutex<()>,
    /// Notified when the loop may have to pause or resume a partition.
    pub(crate) wake: Notify,
}

/// The worker's own state.
pub(crate) struct Worker {
    pub(crate) shared: Arc<Shared>,
    pub(crate) state: Arc<PartitionState>,
    pub(crate) stop: Arc<StopSignal>,
    /// Number of rebalances up to this assignment.
    pub(crate) generation: u64,
    /// The partition's queue.
    pub(crate) records: mpsc::Receiver<Record>,
    /// Workers of earlier assignments of this partition that had not ended in time.
    pub(crate) predecessors: Vec<CancellationToken>,
    /// Records taken from the queue and not settled.
    pending: Vec<Record>,
    backoff: Backoff,
    topic_id: TopicId,
    /// The time of the assignment; the topic's id must not be older.
    assigned_at: Instant,
    /// The first offset that is not settled.
    next: i64,
    /// The first offset that is not taken from the queue.
    expected: Expected,
}

/// The offset of the next record, and the source of that expectation.
enum Expected {
    /// The brokers' answer. The next record may have another offset, since librdkafka asks the
    /// brokers for itself.
    Resume(i64),
    /// The offset after the previous record.
    After(i64),
}

impl Worker {
    pub(crate) fn new(
        shared: Arc<Shared>,
        state: Arc<PartitionState>,
        stop: Arc<StopSignal>,
        generation: u64,
        records: mpsc::Receiver<Record>,
        predecessors: Vec<CancellationToken>,
    ) -> Self {
        Self {
            shared,
            state,
            stop,
            generation,
            records,
            predecessors,
            pending: Vec::new(),
            backoff: Backoff::default(),
            topic_id: None,
            assigned_at: Instant::now(),
            next: 0,
            expected: Expected::Resume(0),
        }
    }

    /// Opens the partition, processes records until told to stop, and closes the partition.
    pub(crate) async fn run(mut self) -> Result<(), ConsumerError> {
        let _done = self.stop.done.clone().drop_guard();
        let Some(mut inbox) = self.open().await? else { return Ok(()) };
        let result = self.work(inbox.as_mut()).await;
        if !self.stop.lost.load(Ordering::Acquire) {
            inbox.close(self.next).await;
        }
        result
    }

    /// Waits for earlier workers of the partition, then opens the partition. Returns none when told
    /// to stop.
    async fn open(&mut self) -> Result<Option<Box<dyn PartitionInbox>>, ConsumerError> {
        for predecessor in std::mem::take(&mut self.predecessors) {
            tokio::select! {
                () = self.stop.requested.cancelled() => return Ok(None),
                () = predecessor.cancelled() => {}
            }
        }
        match self.find_start().await {
            None => return Ok(None),
            Some(Start::MadeAgain { .. }) => return self.start_over().await.map_or(Ok(None), Err),
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
    async fn find_start(&mut self) -> Option<Start> {
        self.find_topic_id(self.assigned_at).await?;
        let mut positions = self.find_positions().await?;
        if let Start::MadeAgain { .. } = start(&positions, &self.topic_id) {
            // Another host may know the new topic before this one, and may have committed for it.
            self.find_topic_id(Instant::now()).await?;
            positions = self.find_positions().await?;
        }
        let start = start(&positions, &self.topic_id);
        match start {
            Start::Committed(next) => self.note_topic(&positions.committed, next).await,
            Start::Beginning(_) | Start::MadeAgain { .. } => {}
            Start::TruncatedBefore { committed, low } => self.truncated_before(committed, low),
            Start::BeyondEnd { committed, low } => self.beyond_end(committed, low, positions.high),
        }
        self.advance(start.next());
        self.expected = Expected::Resume(self.next);
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

    /// Runs the protocol: offers records, waits until they are settled, stores the offset. Offers
    /// the records again after the inbox has failed.
    async fn work(&mut self, inbox: &mut dyn PartitionInbox) -> Result<(), ConsumerError> {
        let batch_max = inbox.batch_max().max(1);
        while self.fill(batch_max).await? {
            let offered = self.pending.len().min(batch_max);
            let is_ready = tokio::select! {
                biased;
                () = self.stop.requested.cancelled() => false,
                () = inbox.ready(offered) => true,
            };
            if !is_ready {
                return Ok(());
            }
            if hooks::sabotage("ack_before_commit") {
                self.store(self.pending[offered - 1].offset + 1, offered);
            }
            match checked(inbox.process(&self.pending[..offered]).await, offered) {
                Ok(settled) => self.settled(settled, offered),
                Err(PartitionInboxError { pause: Some(pause), .. }) => {
                    if self.wait(pause).await.is_none() {
                        return Ok(());
                    }
                }
                Err(error) => {
                    self.state.meters.inbox_errors.increment(1);
                    if self.back_off("processing records", &error.text).await.is_none() {
                        return Ok(());
                    }
                }
            }
        }
        Ok(())
    }

    /// Waits for one record, and takes further records that are in the queue, up to `batch_max`.
    /// Returns false when told to stop.
    async fn fill(&mut self, batch_max: usize) -> Result<bool, ConsumerError> {
        if self.stop.requested.is_cancelled() {
            return Ok(false);
        }
        if self.pending.is_empty() {
            let record = tokio::select! {
                biased;
                () = self.stop.requested.cancelled() => None,
                record = self.records.recv() => record,
            };
            let Some(record) = record else { return Ok(false) };
            self.take(record).await?;
        }
        while self.pending.len() < batch_max {
            let Ok(record) = self.records.try_recv() else { break };
            self.take(record).await?;
        }
        Ok(true)
    }

    /// Checks a record's offset and adds the record to the pending ones.
    async fn take(&mut self, mut record: Record) -> Result<(), ConsumerError> {
        let (Expected::Resume(expected) | Expected::After(expected)) = self.expected;
        // The first record may belong to a topic that was made after the partition was opened; its
        // offset does not show that.
        if matches!(self.expected, Expected::Resume(_)) || record.offset < expected {
            self.check_topic(expected, record.offset).await?;
        }
        if record.offset > expected {
            self.gap(expected);
        }
        self.expected = Expected::After(record.offset + 1);
        record.topic_id = self.topic_id.clone();
        self.pending.push(record);
        Ok(())
    }

    /// Reports a gap before a record as a loss if the broker has deleted records that were not
    /// read. Other gaps are no loss: compaction and transaction markers leave them.
    fn gap(&self, expected: i64) {
        if let Some((low, _)) = self.shared.client.watermarks_seen(&self.state.partition)
            && low > expected
        {
            self.truncated_before(expected, low);
        }
    }

    /// Fails if the topic's id has changed. After a change of leader a broker may redeliver
    /// records, and the inbox recognizes these as duplicates. In a topic that was made again the
    /// record is another one, and without this check the inbox would take it for a duplicate too.
    async fn check_topic(&mut self, expected: i64, found: i64) -> Result<(), ConsumerError> {
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

    /// Stores the offset after the settled prefix, and removes the prefix.
    fn settled(&mut self, count: usize, offered: usize) {
        let last = self.pending[count - 1].offset;
        let ahead = hooks::sabotage("offset_stored_before_settled");
        let stored = if ahead { self.pending[offered - 1].offset } else { last };
        self.advance(last + 1);
        self.store(stored + 1, count);
        self.state.released(&self.pending[..count]);
        self.pending.drain(..count);
        self.recovered();
    }

    fn advance(&mut self, next: i64) {
        self.next = next;
        self.state.set_next_offset(next);
    }

    /// Stores an offset, and logs if it is not stored.
    fn store(&self, next: i64, count: usize) {
        let Shared { client, offset_tracker, labels, .. } = &*self.shared;
        let Labels { tenant, consumer } = labels;
        let partition = &self.state.partition;
        match offset_tracker.store(&**client, partition, self.generation, next, &self.topic_id) {
            Stored::Yes => self.state.meters.acked.increment(count as u64),
            Stored::NotOurs => {
                tracing::info!(tenant, consumer, %partition, next, "records settled after the \
                    partition was given up; not acked");
            }
            Stored::Failed(error) => {
                tracing::warn!(tenant, consumer, %partition, next, %error, "offset store \
                    failed; the records are redelivered");
            }
        }
    }

    /// Logs a failure of the operation `what`, pauses the partition and waits for the next delay.
    /// Returns none when told to stop.
    async fn back_off(&mut self, what: &str, text: &str) -> Option<()> {
        let delay = self.backoff.next();
        let Labels { tenant, consumer } = &self.shared.labels;
        let partition = &self.state.partition;
        tracing::warn!(tenant, consumer, %partition, error = text, ?delay, "{what} failed; \
            retrying");
        self.wait(delay).await
    }

    /// Pauses the partition and waits. Returns none when told to stop.
    async fn wait(&mut self, pause: Duration) -> Option<()> {
        self.state.set_backing_off(true);
        self.shared.wake.notify_one();
        tokio::select! {
            () = self.stop.requested.cancelled() => None,
            () = tokio::time::sleep(pause) => Some(()),
        }
    }

    /// Resets the backoff, and has the loop resume a partition that is paused.
    fn recovered(&mut self) {
        self.backoff.reset();
        self.state.set_backing_off(false);
        if self.state.with_pause(|pause| pause.wanted) && self.state.should_resume() {
            self.shared.wake.notify_one();
        }
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

    fn truncated_before(&self, next_offset: i64, low_watermark: i64) {
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

/// Turns a count outside the inbox's contract into an error, so that no offset is stored for a
/// record that was not offered.
fn checked(
    result: Result<usize, PartitionInboxError>,
    offered: usize,
) -> Result<usize, PartitionInboxError> {
    match result {
        Ok(settled) if settled == 0 || settled > offered => {
            let text = format!("the inbox settled {settled} of {offered} records, which is a bug");
            Err(PartitionInboxError { text, pause: None })
        }
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_inbox_that_breaks_its_contract_settles_nothing() {
        assert!(checked(Ok(0), 3).is_err());
        assert!(checked(Ok(4), 3).is_err());
        assert_eq!(checked(Ok(3), 3).unwrap(), 3);
    }
}
