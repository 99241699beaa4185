//! The worker of one assigned partition: one batch at a time, in order.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use oncebox_model::record::Record;
use tokio::sync::{Notify, mpsc};
use tokio_util::sync::CancellationToken;

use crate::{
    backoff::Backoff,
    client::{Bearings, Client},
    error::ConsumerError,
    flow::{Flow, Partition},
    metric::Labels,
    offsets::{Ledger, Stored},
    pause::PauseList,
    position::{Committed, Start, start},
    sabotage,
    sink::{Inbox, PartitionInbox, SinkError},
    topic_id::{TopicId, TopicIds},
};

/// How a worker is told to end, and how it tells that it has.
#[derive(Default)]
pub(crate) struct Leave {
    asked: CancellationToken,
    lost: AtomicBool,
    /// Cancelled when nothing of the worker runs any more.
    pub(crate) done: CancellationToken,
}

impl Leave {
    /// End after the batch that runs. `lost`: the partition is already somebody else's.
    pub(crate) fn ask(&self, lost: bool) {
        self.lost.fetch_or(lost, Ordering::AcqRel);
        self.asked.cancel();
    }
}

/// What the workers of a consumer share.
pub(crate) struct Shared {
    pub(crate) client: Arc<Client>,
    pub(crate) inbox: Arc<dyn Inbox>,
    pub(crate) ledger: Ledger,
    pub(crate) topic_ids: TopicIds,
    pub(crate) labels: Labels,
    pub(crate) pauses: Arc<PauseList>,
    pub(crate) lookup: Duration,
    /// How long a synchronous commit may take.
    pub(crate) commit: Duration,
    /// Held while offsets of a topic that is gone are replaced.
    pub(crate) replacing: tokio::sync::Mutex<()>,
    /// Rung when a partition may have to be paused or resumed.
    pub(crate) bell: Notify,
}

/// The worker's own state.
pub(crate) struct Worker {
    pub(crate) shared: Arc<Shared>,
    pub(crate) flow: Arc<Flow>,
    pub(crate) leave: Arc<Leave>,
    pub(crate) generation: u64,
    pub(crate) records: mpsc::Receiver<Record>,
    /// Workers of earlier assignments of this partition that had not ended in time.
    pub(crate) predecessors: Vec<CancellationToken>,
    pending: Vec<Record>,
    backoff: Backoff,
    topic_id: TopicId,
    assigned_at: Instant,
    /// First offset not settled.
    next: i64,
    /// First offset not taken from the queue; none before the first record.
    expected: Expected,
}

/// Where the next record is expected.
enum Expected {
    /// From the brokers' word; the next record may stand elsewhere, as librdkafka looked
    /// for itself.
    Told(i64),
    /// From the record before.
    Seen(i64),
}

impl Worker {
    pub(crate) fn new(
        shared: Arc<Shared>,
        flow: Arc<Flow>,
        leave: Arc<Leave>,
        generation: u64,
        records: mpsc::Receiver<Record>,
        predecessors: Vec<CancellationToken>,
    ) -> Self {
        Self {
            shared,
            flow,
            leave,
            generation,
            records,
            predecessors,
            pending: Vec::new(),
            backoff: Backoff::default(),
            topic_id: None,
            assigned_at: Instant::now(),
            next: 0,
            expected: Expected::Told(0),
        }
    }

    /// Opens the partition, works until asked to leave, closes it.
    pub(crate) async fn run(mut self) -> Result<(), ConsumerError> {
        let _done = self.leave.done.clone().drop_guard();
        let Some(mut inbox) = self.open().await? else { return Ok(()) };
        let result = self.work(inbox.as_mut()).await;
        if !self.leave.lost.load(Ordering::Acquire) {
            inbox.close(self.next).await;
        }
        result
    }

    /// None when the partition was taken away meanwhile.
    async fn open(&mut self) -> Result<Option<Box<dyn PartitionInbox>>, ConsumerError> {
        for predecessor in std::mem::take(&mut self.predecessors) {
            tokio::select! {
                () = self.leave.asked.cancelled() => return Ok(None),
                () = predecessor.cancelled() => {}
            }
        }
        match self.find_position().await {
            None => return Ok(None),
            Some(Start::MadeAgain { .. }) => return self.start_over().await.map_or(Ok(None), Err),
            Some(_) => {}
        }
        Ok(self.open_inbox().await)
    }

    async fn open_inbox(&mut self) -> Option<Box<dyn PartitionInbox>> {
        let shared = Arc::clone(&self.shared);
        let (topic, number) = (Arc::clone(&self.flow.partition.topic), self.flow.partition.number);
        loop {
            match shared.inbox.open(&topic, number, self.next).await {
                Ok(inbox) => {
                    self.well();
                    return Some(inbox);
                }
                Err(SinkError { pause: Some(pause), .. }) => self.rest(pause).await?,
                Err(error) => self.trouble("open the partition's inbox", &error.text).await?,
            }
        }
    }

    /// Asks for the topic's id first: a position that is older than the id could be of the topic's
    /// predecessor, and would be taken for one in this topic. The other way round it is found out
    /// later, by [`Self::is_same_topic`] or the loop's look at the ids.
    async fn find_position(&mut self) -> Option<Start> {
        self.find_topic_id(self.assigned_at).await?;
        let mut bearings = self.find_bearings().await?;
        if let Start::MadeAgain { .. } = start(&bearings, &self.topic_id) {
            // Unless another host heard of the new topic before this one.
            self.find_topic_id(Instant::now()).await?;
            bearings = self.find_bearings().await?;
        }
        let start = start(&bearings, &self.topic_id);
        match start {
            Start::Committed(next) => self.note_topic(&bearings.committed, next).await,
            Start::Beginning(_) | Start::MadeAgain { .. } => {}
            Start::HeadLost { committed, low } => self.head_lost(committed, low),
            Start::BeyondEnd { committed, low } => self.beyond_end(committed, low, bearings.high),
        }
        self.advance(start.next());
        self.expected = Expected::Told(self.next);
        Some(start)
    }

    async fn find_bearings(&mut self) -> Option<Bearings> {
        loop {
            match self.shared.client.bearings(&self.flow.partition, self.shared.lookup).await {
                Ok(bearings) => return Some(bearings),
                Err(text) => self.trouble("find the partition's position", &text).await?,
            }
        }
    }

    async fn find_topic_id(&mut self, since: Instant) -> Option<()> {
        self.topic_id = loop {
            match self.ask_topic_id(since).await {
                Ok(id) => break id,
                Err(text) => self.trouble("find the topic's id", &text).await?,
            }
        };
        self.flow.set_topic_id(&self.topic_id);
        Some(())
    }

    /// Notes the topic beside an offset that has none, of an earlier version or another program: it
    /// is taken as it is, and could wait long for the next record. What fails here is done with
    /// that one.
    async fn note_topic(&self, committed: &Option<Committed>, next: i64) {
        if self.topic_id.is_none()
            || committed.as_ref().is_none_or(|committed| committed.topic_id.is_some())
        {
            return;
        }
        let (shared, generation) = (Arc::clone(&self.shared), self.generation);
        let offset = (self.flow.partition.clone(), next, self.topic_id.clone());
        let note = move |client: &Client| match shared.ledger.is_ours(&offset.0, generation) {
            true => client.commit(&[offset], shared.commit).map_err(|error| error.to_string()),
            // Whoever has it now may be further.
            false => Ok(()),
        };
        let noted = self.shared.client.lookup(note).await;
        if let Err(error) = noted {
            let Labels { tenant, consumer } = &self.shared.labels;
            tracing::debug!(tenant, consumer, partition = %self.flow.partition, error, "the \
                topic's id was not noted beside the offset");
        }
    }

    /// Replaces the offsets of the topic's predecessor by the beginning of this one, for all of its
    /// partitions that are ours, and ends the consumer: librdkafka reads already, from where the
    /// predecessor was left, and a consumer that starts anew reads from where its group's offsets
    /// are. If the host dies before the commit, the next one finds the same; after it, it finds the
    /// beginning. None when asked to leave.
    async fn start_over(&mut self) -> Option<ConsumerError> {
        let (shared, topic) = (Arc::clone(&self.shared), Arc::clone(&self.flow.partition.topic));
        let _only = shared.replacing.lock().await;
        loop {
            let (assigned, id, ours) =
                (shared.ledger.of_topic(&topic), self.topic_id.clone(), Arc::clone(&shared));
            let replace = move |client: &Client| {
                client.start_over(&ours.ledger, &assigned, &id, ours.lookup, ours.commit)
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
                    self.trouble("replace the offsets of a topic that was deleted", &text).await?
                }
            }
        }
    }

    async fn ask_topic_id(&self, since: Instant) -> Result<TopicId, String> {
        let shared = &self.shared;
        shared.topic_ids.of(&shared.client, &self.flow.partition.topic, since, shared.lookup).await
    }

    /// The protocol: offer, wait until settled, store the offset. The same records come
    /// again when the sink is in trouble.
    async fn work(&mut self, inbox: &mut dyn PartitionInbox) -> Result<(), ConsumerError> {
        let batch_max = inbox.batch_max().max(1);
        while self.fill(batch_max).await? {
            let offered = self.pending.len().min(batch_max);
            let is_ready = tokio::select! {
                biased;
                () = self.leave.asked.cancelled() => false,
                () = inbox.ready(offered) => true,
            };
            if !is_ready {
                return Ok(());
            }
            if sabotage::on(sabotage::ACK_BEFORE_COMMIT) {
                self.store(self.pending[offered - 1].offset + 1, offered);
            }
            match checked(inbox.process(&self.pending[..offered]).await, offered) {
                Ok(settled) => self.settled(settled, offered),
                Err(SinkError { pause: Some(pause), .. }) => {
                    if self.rest(pause).await.is_none() {
                        return Ok(());
                    }
                }
                Err(error) => {
                    self.flow.meters.sink_errors.increment(1);
                    if self.trouble("process records", &error.text).await.is_none() {
                        return Ok(());
                    }
                }
            }
        }
        Ok(())
    }

    /// Waits for one record and takes what else is there. False when asked to leave.
    async fn fill(&mut self, batch_max: usize) -> Result<bool, ConsumerError> {
        if self.leave.asked.is_cancelled() {
            return Ok(false);
        }
        if self.pending.is_empty() {
            let record = tokio::select! {
                biased;
                () = self.leave.asked.cancelled() => None,
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

    /// Looks at a record's place in the log before it is offered.
    async fn take(&mut self, mut record: Record) -> Result<(), ConsumerError> {
        let (Expected::Told(expected) | Expected::Seen(expected)) = self.expected;
        // The first record may be of a topic that was made since the partition was opened, where
        // nothing shows it.
        if matches!(self.expected, Expected::Told(_)) || record.offset < expected {
            self.is_same_topic(expected, record.offset).await?;
        }
        if record.offset > expected {
            self.gap(expected);
        }
        self.expected = Expected::Seen(record.offset + 1);
        record.topic_id = self.topic_id.clone();
        self.pending.push(record);
        Ok(())
    }

    /// Offsets have gaps (compaction, transaction markers); it is a loss only if the
    /// broker has deleted what we had not read.
    fn gap(&self, expected: i64) {
        if let Some((low, _)) = self.shared.client.watermarks_seen(&self.flow.partition)
            && low > expected
        {
            self.head_lost(expected, low);
        }
    }

    /// After a leader changed, a broker may deliver records again, which the inbox takes
    /// for the duplicates they are. In a re-created topic it is another record, and
    /// would be taken for a duplicate too if the topic's id were not asked anew.
    async fn is_same_topic(&mut self, expected: i64, found: i64) -> Result<(), ConsumerError> {
        let partition = self.flow.partition.to_string();
        loop {
            match self.ask_topic_id(Instant::now()).await {
                Ok(id) if id == self.topic_id => break,
                Ok(_) => {
                    self.shared.labels.topic_made_again(&self.flow.partition);
                    let topic = self.flow.partition.topic.to_string();
                    return Err(if found < expected {
                        ConsumerError::WentBack { topic, partition, expected, found }
                    } else {
                        ConsumerError::MadeAgain { topic }
                    });
                }
                // Nothing is running; leaving is noticed by `fill`, which offers nothing more.
                Err(text) if self.trouble("find the topic's id", &text).await.is_none() => break,
                Err(_) => {}
            }
        }
        if found < expected {
            let Labels { tenant, consumer } = &self.shared.labels;
            tracing::warn!(
                tenant,
                consumer,
                partition,
                expected,
                found,
                "records were delivered again"
            );
        }
        Ok(())
    }

    fn settled(&mut self, count: usize, offered: usize) {
        let last = self.pending[count - 1].offset;
        let ahead = sabotage::on(sabotage::OFFSET_STORED_BEFORE_SETTLED);
        let stored = if ahead { self.pending[offered - 1].offset } else { last };
        self.advance(last + 1);
        self.store(stored + 1, count);
        self.flow.let_go(&self.pending[..count]);
        self.pending.drain(..count);
        self.well();
    }

    fn advance(&mut self, next: i64) {
        self.next = next;
        self.flow.set_next_offset(next);
    }

    fn store(&self, next: i64, count: usize) {
        let Shared { client, ledger, labels, .. } = &*self.shared;
        let Labels { tenant, consumer } = labels;
        let partition = &self.flow.partition;
        match ledger.store(&**client, partition, self.generation, next, &self.topic_id) {
            Stored::Yes => self.flow.meters.acked.increment(count as u64),
            Stored::NotOurs => {
                tracing::info!(tenant, consumer, %partition, next, "settled after the partition \
                    was given up; not acked");
            }
            Stored::Failed(error) => {
                tracing::warn!(tenant, consumer, %partition, next, %error, "failed to store an \
                    offset; its records will come again");
            }
        }
    }

    /// The host's trouble: pauses the partition and waits. None when asked to leave.
    async fn trouble(&mut self, what: &str, text: &str) -> Option<()> {
        let delay = self.backoff.next();
        let Labels { tenant, consumer } = &self.shared.labels;
        let partition = &self.flow.partition;
        tracing::warn!(tenant, consumer, %partition, error = text, ?delay, "failed to {what}; \
            trying again");
        self.rest(delay).await
    }

    /// Pauses the partition and waits. None when asked to leave.
    async fn rest(&mut self, pause: Duration) -> Option<()> {
        self.flow.set_in_trouble(true);
        self.shared.bell.notify_one();
        tokio::select! {
            () = self.leave.asked.cancelled() => None,
            () = tokio::time::sleep(pause) => Some(()),
        }
    }

    fn well(&mut self) {
        self.backoff.reset();
        self.flow.set_in_trouble(false);
        if self.flow.with_pause(|pause| pause.wanted) && self.flow.should_resume() {
            self.shared.bell.notify_one();
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
            "the topic was deleted and made again: the committed offset is of the one that is \
                gone; going on from the low watermark"
        );
    }

    fn head_lost(&self, next_offset: i64, low_watermark: i64) {
        self.flow.meters.head_lost.increment(1);
        let Labels { tenant, consumer } = &self.shared.labels;
        tracing::error!(
            tenant,
            consumer,
            topic = &*self.flow.partition.topic,
            partition = self.flow.partition.number,
            next_offset,
            low_watermark,
            "the broker deleted records before they were settled; going on from the low watermark"
        );
    }

    fn beyond_end(&self, committed: i64, low_watermark: i64, high_watermark: i64) {
        let Labels { tenant, consumer } = &self.shared.labels;
        tracing::error!(
            tenant,
            consumer,
            topic = &*self.flow.partition.topic,
            partition = self.flow.partition.number,
            committed,
            low_watermark,
            high_watermark,
            "the committed offset is above the high watermark: the topic was truncated, or made \
                again by brokers that tell no ids; \
             going on from the low watermark"
        );
    }
}

/// Holds a sink to its contract, so that an offset is never stored for a record that was
/// not offered.
fn checked(result: Result<usize, SinkError>, offered: usize) -> Result<usize, SinkError> {
    match result {
        Ok(settled) if settled == 0 || settled > offered => {
            let text = format!("the inbox settled {settled} of {offered} records, which is a bug");
            Err(SinkError { text, pause: None })
        }
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sink_that_breaks_its_contract_settles_nothing() {
        assert!(checked(Ok(0), 3).is_err());
        assert!(checked(Ok(4), 3).is_err());
        assert_eq!(checked(Ok(3), 3).unwrap(), 3);
    }
}
