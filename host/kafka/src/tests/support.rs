//! A mock cluster, a counting inbox, and waits with a deadline.

use std::{
    collections::BTreeMap,
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use futures::future::BoxFuture;
use oncebox_model::{policy, record::Record};
use rdkafka::{
    ClientConfig, Offset, TopicPartitionList, bindings as rd,
    consumer::{BaseConsumer, Consumer as _},
    producer::{BaseProducer, BaseRecord, Producer as _},
    types::RDKafkaRespErr,
};
use tokio::sync::Semaphore;

use crate::{
    ConsumerConfig, ConsumerHandle, Inbox, OpenAt, Opened, PartitionInbox, PartitionInboxError,
    Timing, start_consumer,
};

pub(crate) const PARTITIONS: i32 = 16;

/// A broker in this process, and a producer to it.
pub(crate) struct Cluster {
    producer: BaseProducer,
    pub(crate) address: String,
}

impl Cluster {
    pub(crate) fn new(topic: &str) -> Self {
        let _ = tracing_subscriber::fmt()
            .with_env_filter("warn,oncebox_kafka=info")
            .with_test_writer()
            .try_init();
        let producer: BaseProducer = ClientConfig::new()
            .set("test.mock.num.brokers", "1")
            .set("queue.buffering.max.ms", "0")
            .create()
            .unwrap();
        let mock = producer.client().mock_cluster().unwrap();
        mock.create_topic(topic, PARTITIONS, 1).unwrap();
        let address = mock.bootstrap_servers();
        drop(mock);
        // SAFETY: the producer is alive and has a mock cluster.
        unsafe {
            let mock = rd::rd_kafka_handle_mock_cluster(producer.client().native_ptr());
            rd::rd_kafka_mock_group_initial_rebalance_delay_ms(mock, 50);
        }
        Self { producer, address }
    }

    /// Takes the broker down, or up again.
    pub(crate) fn set_down(&self, down: bool) {
        let mock = self.producer.client().mock_cluster().unwrap();
        if down { mock.broker_down(1) } else { mock.broker_up(1) }.unwrap();
    }

    /// Sends `count` records to each of the partitions.
    pub(crate) fn send(&self, topic: &str, partitions: std::ops::Range<i32>, count: usize) {
        self.send_sized(topic, partitions, count, 8);
    }

    pub(crate) fn send_sized(
        &self,
        topic: &str,
        partitions: std::ops::Range<i32>,
        count: usize,
        size: usize,
    ) {
        for partition in partitions {
            for _ in 0..count {
                let payload = vec![b'x'; size];
                let record = BaseRecord::<(), _>::to(topic).partition(partition).payload(&payload);
                self.producer.send(record).map_err(|(error, _)| error).unwrap();
            }
        }
        self.producer.flush(Duration::from_secs(10)).unwrap();
    }

    /// Makes the next requests of a kind fail with these errors, one each.
    pub(crate) fn fail(&self, api_key: i16, errors: &[RDKafkaRespErr]) {
        // SAFETY: the producer is alive and has a mock cluster; the errors are copied.
        unsafe {
            let mock = rd::rd_kafka_handle_mock_cluster(self.producer.client().native_ptr());
            rd::rd_kafka_mock_push_request_errors_array(
                mock,
                api_key,
                errors.len(),
                errors.as_ptr(),
            );
        }
    }

    /// Counts the requests of a kind that arrive within `within`.
    pub(crate) async fn requests(&self, api_key: i16, within: Duration) -> usize {
        let mock = self.mock();
        // SAFETY: the cluster lives as long as the producer; the requests are a copy, destroyed
        // once.
        unsafe { rd::rd_kafka_mock_start_request_tracking(mock as *mut _) };
        tokio::time::sleep(within).await;
        // SAFETY: the cluster lives as long as `self`.
        unsafe {
            let mock = self.mock() as *mut rd::rd_kafka_mock_cluster_t;
            let mut count = 0;
            let requests = rd::rd_kafka_mock_get_requests(mock, &raw mut count);
            let all = if requests.is_null() {
                &[][..]
            } else {
                std::slice::from_raw_parts(requests, count)
            };
            let found = all
                .iter()
                .filter(|request| rd::rd_kafka_mock_request_api_key(**request) == api_key)
                .count();
            rd::rd_kafka_mock_request_destroy_array(requests, count);
            rd::rd_kafka_mock_stop_request_tracking(mock);
            found
        }
    }

    /// Returns the mock cluster's pointer as a number, which may be held across an await.
    fn mock(&self) -> usize {
        // SAFETY: the producer is alive and has a mock cluster.
        unsafe { rd::rd_kafka_handle_mock_cluster(self.producer.client().native_ptr()) as usize }
    }

    /// Returns the group's committed offset of a partition.
    pub(crate) fn committed(&self, group: &str, topic: &str, partition: i32) -> Option<i64> {
        let reader: BaseConsumer = ClientConfig::new()
            .set("bootstrap.servers", &self.address)
            .set("group.id", group)
            .create()
            .unwrap();
        let mut list = TopicPartitionList::new();
        list.add_partition(topic, partition);
        let list = reader.committed_offsets(list, Duration::from_secs(5)).unwrap();
        match list.elements()[0].offset() {
            Offset::Offset(offset) => Some(offset),
            _ => None,
        }
    }
}

pub(crate) fn config(address: &str, tenant: &str, consumer: &str, topic: &str) -> ConsumerConfig {
    ConsumerConfig {
        tenant: tenant.to_owned(),
        consumer: consumer.to_owned(),
        topics: vec![topic.to_owned()],
        kafka: policy::KafkaPolicy::default(),
        host_properties: [
            ("bootstrap.servers", address),
            // The mock cluster takes a session's length less a second for each rebalance.
            ("session.timeout.ms", "2500"),
            ("heartbeat.interval.ms", "200"),
        ]
        .map(|(name, value)| (name.to_owned(), value.to_owned()))
        .into(),
        timing: Timing { tick: Duration::from_millis(200), ..Timing::default() },
    }
}

/// The calls that a counting inbox has received; shared by all of its partitions.
pub(crate) struct Seen {
    /// Settled records per partition: offsets in order.
    pub(crate) settled: Mutex<BTreeMap<i32, Vec<i64>>>,
    /// Calls per partition: offsets offered.
    pub(crate) offered: Mutex<Vec<(i32, Vec<i64>)>>,
    pub(crate) opened: Mutex<Vec<(i32, i64)>>,
    pub(crate) closed: Mutex<Vec<(i32, i64)>>,
    pub(crate) topic_ids: Mutex<std::collections::BTreeSet<Option<String>>>,
    /// Calls that fail before any succeeds.
    pub(crate) failures: AtomicUsize,
    /// Opens that fail before any succeeds.
    pub(crate) open_failures: AtomicUsize,
    /// Calls that run at present.
    pub(crate) running: AtomicUsize,
    /// Permits, one per call; when it is closed, no call needs one.
    pub(crate) gate: Semaphore,
    /// The most records that a call settles.
    pub(crate) settles_max: usize,
    pub(crate) batch_max: usize,
}

impl Seen {
    pub(crate) fn free() -> Arc<Self> {
        Self::with(usize::MAX, 64)
    }

    pub(crate) fn with(settles_max: usize, batch_max: usize) -> Arc<Self> {
        let seen = Self::new(settles_max, batch_max);
        seen.gate.close();
        Arc::new(seen)
    }

    /// Makes an inbox whose every call waits for `gate`.
    pub(crate) fn gated() -> Arc<Self> {
        Arc::new(Self::new(usize::MAX, 64))
    }

    fn new(settles_max: usize, batch_max: usize) -> Self {
        Self {
            settled: Mutex::default(),
            offered: Mutex::default(),
            opened: Mutex::default(),
            closed: Mutex::default(),
            topic_ids: Mutex::default(),
            failures: AtomicUsize::new(0),
            open_failures: AtomicUsize::new(0),
            running: AtomicUsize::new(0),
            gate: Semaphore::new(0),
            settles_max,
            batch_max,
        }
    }

    pub(crate) fn count(&self) -> usize {
        self.settled.lock().unwrap().values().map(Vec::len).sum()
    }

    pub(crate) fn of(&self, partition: i32) -> Vec<i64> {
        self.settled.lock().unwrap().get(&partition).cloned().unwrap_or_default()
    }

    pub(crate) fn running(&self) -> usize {
        self.running.load(Ordering::SeqCst)
    }
}

pub(crate) struct Counting(pub(crate) Arc<Seen>);

impl Inbox for Counting {
    fn open(&self, at: OpenAt) -> BoxFuture<'_, Result<Opened, PartitionInboxError>> {
        Box::pin(async move {
            let OpenAt { partition, next_offset, .. } = at;
            take_one(&self.0.open_failures)?;
            self.0.opened.lock().unwrap().push((partition, next_offset));
            let seen = Arc::clone(&self.0);
            Ok(Opened::Ready(Box::new(CountingPartition { seen, partition })))
        })
    }
}

struct CountingPartition {
    seen: Arc<Seen>,
    partition: i32,
}

impl PartitionInbox for CountingPartition {
    fn process<'a>(
        &'a mut self,
        records: &'a [Record],
    ) -> BoxFuture<'a, Result<usize, PartitionInboxError>> {
        Box::pin(async move {
            let seen = &self.seen;
            let offsets: Vec<i64> = records.iter().map(|record| record.offset).collect();
            seen.offered.lock().unwrap().push((self.partition, offsets.clone()));
            seen.topic_ids
                .lock()
                .unwrap()
                .insert(records[0].topic_id.as_deref().map(str::to_owned));
            take_one(&seen.failures)?;
            seen.running.fetch_add(1, Ordering::SeqCst);
            if let Ok(permit) = seen.gate.acquire().await {
                permit.forget();
            }
            let count = records.len().min(seen.settles_max);
            seen.settled
                .lock()
                .unwrap()
                .entry(self.partition)
                .or_default()
                .extend(&offsets[..count]);
            seen.running.fetch_sub(1, Ordering::SeqCst);
            Ok(count)
        })
    }

    fn batch_max(&self) -> usize {
        self.seen.batch_max
    }

    fn close<'a>(self: Box<Self>, next_offset: i64) -> BoxFuture<'a, ()> {
        Box::pin(
            async move { self.seen.closed.lock().unwrap().push((self.partition, next_offset)) },
        )
    }
}

fn take_one(failures: &AtomicUsize) -> Result<(), PartitionInboxError> {
    match failures.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |left| left.checked_sub(1)) {
        Ok(_) => Err(PartitionInboxError { text: "as asked".to_owned(), ..Default::default() }),
        Err(_) => Ok(()),
    }
}

/// Counters of the process, by name and consumer.
#[derive(Default)]
pub(crate) struct Counts {
    counters: Mutex<BTreeMap<(String, String), Arc<std::sync::atomic::AtomicU64>>>,
}

impl Counts {
    pub(crate) fn of(&self, name: &str, consumer: &str) -> u64 {
        let key = (name.to_owned(), consumer.to_owned());
        self.counters.lock().unwrap().get(&key).map_or(0, |count| count.load(Ordering::SeqCst))
    }
}

impl metrics::Recorder for Counts {
    fn describe_counter(
        &self,
        _: metrics::KeyName,
        _: Option<metrics::Unit>,
        _: metrics::SharedString,
    ) {
    }
    fn describe_gauge(
        &self,
        _: metrics::KeyName,
        _: Option<metrics::Unit>,
        _: metrics::SharedString,
    ) {
    }
    fn describe_histogram(
        &self,
        _: metrics::KeyName,
        _: Option<metrics::Unit>,
        _: metrics::SharedString,
    ) {
    }

    fn register_counter(&self, key: &metrics::Key, _: &metrics::Metadata<'_>) -> metrics::Counter {
        let consumer =
            key.labels().find(|label| label.key() == "consumer").map_or("", metrics::Label::value);
        let key = (key.name().to_owned(), consumer.to_owned());
        Arc::clone(self.counters.lock().unwrap().entry(key).or_default()).into()
    }

    fn register_gauge(&self, _: &metrics::Key, _: &metrics::Metadata<'_>) -> metrics::Gauge {
        metrics::Gauge::noop()
    }

    fn register_histogram(
        &self,
        _: &metrics::Key,
        _: &metrics::Metadata<'_>,
    ) -> metrics::Histogram {
        metrics::Histogram::noop()
    }
}

pub(crate) fn start(config: ConsumerConfig, seen: &Arc<Seen>) -> ConsumerHandle {
    start_consumer(config, Arc::new(Counting(Arc::clone(seen)))).unwrap()
}

/// Polls until `reached`, for thirty seconds at most.
pub(crate) async fn until(what: &str, mut reached: impl FnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(30);
    while !reached() {
        assert!(Instant::now() < deadline, "not within 30 s: {what}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}
