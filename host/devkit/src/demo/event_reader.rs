//! Reading of the events that handlers emit, as a consumer of their topics outside.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use anyhow::{Context, Result, ensure};
use rdkafka::{
    ClientConfig, Message, Offset, TopicPartitionList,
    consumer::{Consumer, StreamConsumer},
    message::{BorrowedMessage, Headers},
    metadata::MetadataTopic,
};
use tokio::{
    task::{JoinHandle, spawn_blocking},
    time::{Instant, sleep},
};

use super::{
    PARTITIONS, TENANTS, comments_topic,
    ledger::{ReceivedMessage, ReceiverLedger, delivery_of},
};

/// Longest time for an answer of the brokers, and for reading to the ends of the topics.
const TIMEOUT: Duration = Duration::from_secs(30);
/// Time between two comparisons of the position with the ends of the topics.
const COMPARE_AGAIN: Duration = Duration::from_millis(20);

/// A tenant's index and a partition of its topic.
type TopicPlace = (usize, i32);

/// The events so far.
#[derive(Default)]
struct ReaderState {
    ledgers: [ReceiverLedger; TENANTS.len()],
    /// Offset of the next record of each partition.
    next: HashMap<TopicPlace, i64>,
    /// Text of the client's last error.
    last_error: Option<String>,
}

/// The reader. It reads all the time, since the embedded broker keeps only the last records.
pub(super) struct EventReader {
    consumer: Arc<StreamConsumer>,
    state: Arc<Mutex<ReaderState>>,
    task: JoinHandle<()>,
}

impl EventReader {
    /// Starts to read the topics of all tenants, from their present ends.
    pub(super) async fn start(brokers: &str) -> Result<Self> {
        let brokers = brokers.to_owned();
        let (consumer, next) = spawn_blocking(move || open(&brokers)).await??;
        let (consumer, state) = (
            Arc::new(consumer),
            Arc::new(Mutex::new(ReaderState { next, ..ReaderState::default() })),
        );
        let task = tokio::spawn(read(consumer.clone(), state.clone()));
        Ok(Self { consumer, state, task })
    }

    /// Reads to the ends of the topics, and returns the ledger of each tenant.
    pub(super) async fn finish(self) -> Result<[ReceiverLedger; TENANTS.len()]> {
        let consumer = self.consumer.clone();
        let ends = spawn_blocking(move || ends(&consumer)).await??;
        let deadline = Instant::now() + TIMEOUT;
        loop {
            if let Some(ledgers) = self.read_to(&ends) {
                return Ok(ledgers);
            }
            ensure!(
                Instant::now() < deadline,
                "the topics of the events were not read to their ends within {} s; the client's \
                    last error: {}",
                TIMEOUT.as_secs(),
                self.last_error()
            );
            sleep(COMPARE_AGAIN).await;
        }
    }

    /// Returns the ledger of each tenant when the reader has come to these ends.
    fn read_to(&self, ends: &HashMap<TopicPlace, i64>) -> Option<[ReceiverLedger; TENANTS.len()]> {
        let state = locked(&self.state);
        let is_read = ends.iter().all(|(place, end)| state.next.get(place) >= Some(end));
        is_read.then(|| state.ledgers.clone())
    }

    fn last_error(&self) -> String {
        locked(&self.state).last_error.clone().unwrap_or_else(|| "none".to_owned())
    }
}

impl Drop for EventReader {
    fn drop(&mut self) {
        self.task.abort();
    }
}

fn locked(state: &Mutex<ReaderState>) -> MutexGuard<'_, ReaderState> {
    state.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Opens a client that reads from the present ends of the topics. It joins no group.
fn open(brokers: &str) -> Result<(StreamConsumer, HashMap<TopicPlace, i64>)> {
    let consumer: StreamConsumer = ClientConfig::new()
        .set("bootstrap.servers", brokers)
        .set("group.id", "oncebox-demo")
        .set("enable.auto.commit", "false")
        .set("auto.offset.reset", "earliest")
        .create()
        .context("failed to start the reader of events")?;
    let next = ends(&consumer)?;
    let mut list = TopicPartitionList::new();
    for ((tenant, partition), offset) in &next {
        let topic = comments_topic(TENANTS[*tenant]);
        list.add_partition_offset(&topic, *partition, Offset::Offset(*offset))?;
    }
    consumer.assign(&list).context("failed to read the topics of the events")?;
    Ok((consumer, next))
}

/// Returns the offset behind the last record of each partition.
fn ends(consumer: &StreamConsumer) -> Result<HashMap<TopicPlace, i64>> {
    let mut ends = HashMap::new();
    for (tenant, name) in TENANTS.iter().enumerate() {
        let topic = comments_topic(name);
        let metadata = consumer.fetch_metadata(Some(&topic), TIMEOUT);
        let metadata = metadata.with_context(|| format!("failed to look up topic `{topic}`"))?;
        let partitions =
            metadata.topics().first().map(MetadataTopic::partitions).unwrap_or_default();
        ensure!(
            !partitions.is_empty(),
            "the brokers have no topic `{topic}`; create it with {PARTITIONS} partitions"
        );
        for partition in partitions {
            let (_, high) = consumer
                .fetch_watermarks(&topic, partition.id(), TIMEOUT)
                .context("failed to read a partition's ends")?;
            ends.insert((tenant, partition.id()), high);
        }
    }
    Ok(ends)
}

async fn read(consumer: Arc<StreamConsumer>, state: Arc<Mutex<ReaderState>>) {
    loop {
        match consumer.recv().await {
            Ok(record) => locked(&state).note(&record),
            // The client goes on by itself; the text is shown if the ends are not reached.
            Err(error) => locked(&state).last_error = Some(error.to_string()),
        }
    }
}

impl ReaderState {
    fn note(&mut self, record: &BorrowedMessage<'_>) {
        let is_read = |name: &&str| comments_topic(name) == record.topic();
        let Some(tenant) = TENANTS.iter().position(is_read) else { return };
        let header = |name: &str| {
            let headers = record.headers();
            let found = headers.and_then(|all| all.iter().find(|header| header.key == name));
            let value = found.and_then(|header| header.value).unwrap_or_default();
            String::from_utf8_lossy(value).into_owned()
        };
        let message = ReceivedMessage {
            delivery: delivery_of(&header("ce_causationid")),
            event_type: header("ce_type"),
            payload: record.payload().unwrap_or_default().to_vec(),
        };
        self.ledgers[tenant].note(header("ce_id"), message);
        self.next.insert((tenant, record.partition()), record.offset() + 1);
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "in a test, a panic is the report")]
mod tests {
    use rdkafka::{
        message::{Header, OwnedHeaders},
        producer::{FutureProducer, FutureRecord},
    };

    use super::*;
    use crate::local::broker::MockBroker;

    async fn publish(producer: &FutureProducer, tenant: usize, id: &str, delivery: &str) {
        let topic = comments_topic(TENANTS[tenant]);
        let cause = format!("https://github.com {delivery}");
        let headers =
            [("ce_id", id), ("ce_type", "comment.created"), ("ce_causationid", cause.as_str())];
        let headers = headers.into_iter().fold(OwnedHeaders::new(), |headers, (key, value)| {
            headers.insert(Header { key, value: Some(value) })
        });
        let record = FutureRecord::to(&topic).key("42").payload("{}").headers(headers);
        producer.send(record, TIMEOUT).await.unwrap();
    }

    // What could go wrong: an event that the broker has is not counted, one of an earlier run is,
    // or one that was written twice counts as two.
    #[tokio::test(flavor = "multi_thread")]
    async fn it_reads_what_came_since_its_start() {
        let broker = MockBroker::start().unwrap();
        for tenant in TENANTS {
            broker.create_topic(&comments_topic(tenant), PARTITIONS).unwrap();
        }
        let producer: FutureProducer =
            ClientConfig::new().set("bootstrap.servers", broker.bootstrap()).create().unwrap();
        publish(&producer, 0, "0", "d-0").await;
        let reader = EventReader::start(broker.bootstrap()).await.unwrap();
        for (tenant, id, delivery) in [(0, "1", "d-1"), (0, "1", "d-1"), (1, "2", "d-2")] {
            publish(&producer, tenant, id, delivery).await;
        }
        let [acme, globex] = reader.finish().await.unwrap();
        assert_eq!((acme.distinct(), acme.repeated(), acme.conflicts()), (1, 1, 0));
        assert_eq!((globex.distinct(), globex.repeated()), (1, 0));
        let sent = |ledger: &ReceiverLedger| ledger.by_delivery().into_keys().collect::<Vec<_>>();
        assert_eq!((sent(&acme), sent(&globex)), (vec!["d-1".to_owned()], vec!["d-2".to_owned()]));
    }
}
