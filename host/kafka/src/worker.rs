//! The worker of one assigned partition: it processes one batch at a time, in order.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use oncebox_model::{
    hooks::{self, Defect},
    inbox::{Inbox, PartitionInbox, PartitionInboxError, ServerRun},
    record::Record,
};
use tokio::sync::{Notify, mpsc};
use tokio_util::sync::CancellationToken;

use crate::{
    backoff::Backoff,
    client::Client,
    error::ConsumerError,
    metric::Labels,
    offsets::{OffsetNote, OffsetTracker, Stored},
    partition_state::PartitionState,
    pause::PauseList,
    topic_id::TopicId,
    topic_id_cache::TopicIdCache,
};

mod start;

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
pub(crate) struct WorkerContext {
    pub(crate) client: Arc<Client>,
    pub(crate) inbox: Arc<dyn Inbox>,
    pub(crate) offset_tracker: OffsetTracker,
    pub(crate) topic_ids: TopicIdCache,
    pub(crate) labels: Labels,
    pub(crate) pauses: Arc<PauseList>,
    /// The longest wait for one answer of a broker.
    pub(crate) lookup: Duration,
    /// The longest wait for a synchronous commit.
    pub(crate) commit: Duration,
    /// Held while a worker replaces committed offsets.
    pub(crate) replacing: tokio::sync::Mutex<()>,
    /// Notified when the loop may have to pause or resume a partition.
    pub(crate) wake: Notify,
}

/// The worker's own state.
pub(crate) struct PartitionWorker {
    pub(crate) shared: Arc<WorkerContext>,
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
    /// The note beside the committed offset that the partition starts at; none where it starts
    /// elsewhere.
    noted: Option<OffsetNote>,
    /// The time of the assignment; the topic's id must not be older.
    assigned_at: Instant,
    /// The first offset that is not settled.
    next: i64,
    /// The first offset that is not taken from the queue.
    expected: ExpectedOffset,
}

/// The offset of the next record, and the source of that expectation.
enum ExpectedOffset {
    /// The brokers' answer. The next record may have another offset, since librdkafka asks the
    /// brokers for itself.
    Resume(i64),
    /// The offset after the previous record.
    After(i64),
}

impl PartitionWorker {
    pub(crate) fn new(
        shared: Arc<WorkerContext>,
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
            noted: None,
            assigned_at: Instant::now(),
            next: 0,
            expected: ExpectedOffset::Resume(0),
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

    /// Runs the protocol: offers records, waits until they are settled, stores the offset. Offers
    /// the records again after the inbox has failed.
    async fn work(&mut self, inbox: &mut dyn PartitionInbox) -> Result<(), ConsumerError> {
        let batch_max = inbox.batch_max().max(1);
        while self.fill(inbox, batch_max).await? {
            let offered = self.pending.len().min(batch_max);
            let is_ready = tokio::select! {
                biased;
                () = self.stop.requested.cancelled() => false,
                () = inbox.ready(&self.pending[..offered]) => true,
            };
            if !is_ready {
                return Ok(());
            }
            if hooks::sabotage(Defect::AckBeforeCommit) {
                self.store(self.pending[offered - 1].offset + 1, offered, inbox.server());
            }
            match checked(inbox.process(&self.pending[..offered]).await, offered) {
                Ok(settled) => self.settled(settled, offered, inbox.server()),
                Err(PartitionInboxError { commits_lost: true, .. }) => {
                    return Err(self.commits_lost());
                }
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
    async fn fill(
        &mut self,
        inbox: &mut dyn PartitionInbox,
        batch_max: usize,
    ) -> Result<bool, ConsumerError> {
        if self.stop.requested.is_cancelled() {
            return Ok(false);
        }
        while self.pending.is_empty() {
            let record = tokio::select! {
                biased;
                () = self.stop.requested.cancelled() => None,
                record = self.records.recv() => record,
                whole = inbox.idle() => {
                    whole.map_err(|_| self.commits_lost())?;
                    self.note_again(inbox.server()).await;
                    continue;
                }
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
        let (ExpectedOffset::Resume(expected) | ExpectedOffset::After(expected)) = self.expected;
        // The first record may belong to a topic that was made after the partition was opened; its
        // offset does not show that.
        if matches!(self.expected, ExpectedOffset::Resume(_)) || record.offset < expected {
            self.check_topic(expected, record.offset).await?;
        }
        if record.offset > expected {
            self.gap(expected);
        }
        self.expected = ExpectedOffset::After(record.offset + 1);
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

    /// Stores the offset after the settled prefix, and removes the prefix.
    fn settled(&mut self, count: usize, offered: usize, server: ServerRun) {
        let last = self.pending[count - 1].offset;
        let ahead = hooks::sabotage(Defect::OffsetStoredBeforeSettled);
        let stored = if ahead { self.pending[offered - 1].offset } else { last };
        self.advance(last + 1);
        self.store(stored + 1, count, server);
        self.state.released(&self.pending[..count]);
        self.pending.drain(..count);
        self.recovered();
    }

    fn advance(&mut self, next: i64) {
        self.next = next;
        self.state.set_next_offset(next);
    }

    /// Stores an offset, and logs if it is not stored.
    fn store(&mut self, next: i64, count: usize, server: ServerRun) {
        let WorkerContext { client, offset_tracker, labels, .. } = &*self.shared;
        let Labels { tenant, consumer } = labels;
        let partition = &self.state.partition;
        let note = OffsetNote { topic_id: self.topic_id.clone(), server };
        match offset_tracker.store(&**client, partition, self.generation, next, &note) {
            Stored::Yes => {
                self.state.meters.acked.increment(count as u64);
                self.noted = Some(note);
            }
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
            Err(PartitionInboxError { text, ..PartitionInboxError::default() })
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
