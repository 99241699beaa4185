//! Tests against the embedded broker, with an inbox that only counts.

use std::{
    collections::BTreeMap,
    sync::{Mutex, atomic::AtomicUsize},
};

use futures::{FutureExt, future::BoxFuture};
use oncebox_devkit::local::broker::MockBroker;
use oncebox_kafka::{OpenAt, Opened, PartitionInbox, PartitionInboxError, ServerRun, Timing};
use oncebox_model::{policy, record::Record};
use rdkafka::{
    ClientConfig,
    producer::{FutureProducer, FutureRecord},
};
use tokio::time::Instant;

use super::*;

const TOPIC: &str = "orders";
const SOON: Duration = Duration::from_secs(20);
const NEVER: Duration = Duration::from_secs(3_600);

#[derive(Default)]
struct Seen {
    offsets: Mutex<Vec<i64>>,
    opened: AtomicUsize,
}

impl Seen {
    fn opened(&self) -> usize {
        self.opened.load(Ordering::SeqCst)
    }

    fn offsets(&self) -> Vec<i64> {
        self.offsets.lock().expect("no panic while held").clone()
    }
}

struct Counting(Arc<Seen>);

impl Inbox for Counting {
    fn open(&self, _: OpenAt) -> BoxFuture<'_, Result<Opened, PartitionInboxError>> {
        self.0.opened.fetch_add(1, Ordering::SeqCst);
        let partition = Opened::Ready(Box::new(Self(self.0.clone())));
        async move { Ok(partition) }.boxed()
    }
}

/// A database that is always in reach.
struct InReach;

impl InboxDatabase for InReach {
    fn silent_for(&self) -> Option<Duration> {
        None
    }

    fn answers(&self) -> BoxFuture<'_, bool> {
        async { true }.boxed()
    }

    fn server(&self) -> watch::Receiver<ServerRun> {
        watch::Sender::default().subscribe()
    }
}

impl PartitionInbox for Counting {
    fn process<'a>(
        &'a mut self,
        records: &'a [Record],
    ) -> BoxFuture<'a, Result<usize, PartitionInboxError>> {
        self.0
            .offsets
            .lock()
            .expect("no panic while held")
            .extend(records.iter().map(|record| record.offset));
        async move { Ok(records.len()) }.boxed()
    }

    fn batch_max(&self) -> usize {
        64
    }

    fn close<'a>(self: Box<Self>, _: i64) -> BoxFuture<'a, ()> {
        async {}.boxed()
    }
}

fn config(brokers: &str, consumer: &str) -> ConsumerConfig {
    let properties = [
        ("bootstrap.servers", brokers),
        // The embedded broker holds a group that every member left for the rest of this time after
        // a second.
        ("session.timeout.ms", "1300"),
        ("heartbeat.interval.ms", "200"),
        ("auto.commit.interval.ms", "50"),
    ];
    ConsumerConfig {
        tenant: "t".to_owned(),
        consumer: consumer.to_owned(),
        topics: vec![TOPIC.to_owned()],
        kafka: policy::KafkaPolicy::default(),
        host_properties: properties
            .map(|(name, value)| (name.to_owned(), value.to_owned()))
            .into_iter()
            .collect::<BTreeMap<_, _>>(),
        timing: Timing::default(),
    }
}

struct Broker {
    broker: MockBroker,
    producer: FutureProducer,
}

impl Broker {
    fn start() -> Self {
        let broker = MockBroker::start().expect("a broker");
        broker.create_topic(TOPIC, 1).expect("a topic");
        let producer = ClientConfig::new()
            .set("bootstrap.servers", broker.bootstrap())
            .set("linger.ms", "0")
            .create()
            .expect("a producer");
        Self { broker, producer }
    }

    async fn send(&self) {
        let record = FutureRecord::<(), _>::to(TOPIC).payload("x");
        self.producer.send(record, SOON).await.expect("a record");
    }

    fn read(&self, limits: &Arc<IdleLimits>, consumer: &str) -> (IdleConsumer, Arc<Seen>) {
        let seen = Arc::<Seen>::default();
        let (config, inbox) =
            (config(self.broker.bootstrap(), consumer), Arc::new(Counting(seen.clone())));
        let reading =
            IdleConsumer::start(limits.clone(), config, inbox, None, None, Arc::new(InReach));
        (reading.expect("a consumer"), seen)
    }
}

async fn until(what: &str, mut reached: impl FnMut() -> bool) {
    let deadline = Instant::now() + SOON;
    while !reached() {
        assert!(Instant::now() < deadline, "not within {SOON:?}: {what}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// Could fail so: a message that arrives just as its consumer closes waits until another arrives.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nothing_is_missed_while_a_consumer_opens_and_closes() {
    let broker = Broker::start();
    let limits = IdleLimits::with(Duration::from_millis(60), NEVER, (NEVER, NEVER));
    let (reading, seen) = broker.read(&limits, "closing");
    assert!(!reading.is_open());
    for sent in 1..=25 {
        broker.send().await;
        until("it is read", || seen.offsets().len() == sent).await;
        tokio::time::sleep(Duration::from_millis(rand::random_range(0..400))).await;
    }
    assert_eq!(seen.offsets(), (0..25).collect::<Vec<i64>>());
    until("it closes", || !reading.is_open()).await;
    assert!(seen.opened() > 2, "opened {} times, so it never closed in between", seen.opened());
    assert_eq!(reading.drain(SOON).await, Drained::Clean);
    assert!(matches!(reading.failure(), Some(ConsumerError::Panicked)), "it is over");
}

/// Could fail so: brokers forget the offsets of a group without members, and it reads everything
/// again.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_group_with_offsets_is_joined_now_and_then() {
    let broker = Broker::start();
    let limits = IdleLimits::with(
        Duration::from_millis(200),
        NEVER,
        (Duration::from_millis(300), Duration::from_millis(300)),
    );
    let (without, unseen) = broker.read(&limits, "without");
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert_eq!(unseen.opened(), 0, "a group without offsets has nothing to be kept");
    assert_eq!(without.drain(SOON).await, Drained::Clean);
    broker.send().await;
    let (with, seen) = broker.read(&limits, "with");
    until("it is read", || seen.offsets().len() == 1).await;
    until("it is joined again and again", || seen.opened() >= 3).await;
    until("it is left again", || !with.is_open()).await;
    assert_eq!(seen.offsets(), [0]);
    assert_eq!(with.drain(SOON).await, Drained::Clean);
}

/// Could fail so: brokers that become unavailable make a host with many consumers open them all at
/// once.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn those_that_cannot_tell_open_a_few_at_a_time() {
    let limits = IdleLimits::with(NEVER, NEVER, (NEVER, NEVER));
    let start = |number| {
        let config = config("127.0.0.1:1", &format!("blind-{number}"));
        IdleConsumer::start(
            limits.clone(),
            config,
            Arc::new(Counting(Arc::default())),
            None,
            None,
            Arc::new(InReach),
        )
        .expect("a consumer")
    };
    let readings: Vec<_> = (0..3 * AT_ONCE).map(start).collect();
    let open = || readings.iter().filter(|reading| reading.is_open()).count();
    until("some open", || open() == AT_ONCE).await;
    tokio::time::sleep(Duration::from_secs(3)).await;
    assert_eq!(open(), AT_ONCE);
    for reading in &readings {
        reading.drain(Duration::from_millis(200)).await;
    }
}

/// Could fail so: a consumer that must never close waits for records before it joins.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_that_never_closes_joins_at_once() {
    let broker = Broker::start();
    let (reading, seen) = broker.read(&IdleLimits::new(Duration::ZERO, NEVER), "always");
    assert!(reading.is_open());
    until("it has its partition", || seen.opened() == 1).await;
    tokio::time::sleep(Duration::from_millis(500)).await;
    assert!(reading.is_open() && reading.failure().is_none());
    assert_eq!(reading.drain(SOON).await, Drained::Clean);
}
