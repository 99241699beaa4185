//! Tests of pausing and resuming in librdkafka, against the mock cluster.

use std::{
    collections::BTreeSet,
    sync::{Arc, Barrier},
    thread,
    time::{Duration, Instant},
};

use rdkafka::{
    ClientConfig, Message, Offset, TopicPartitionList,
    consumer::{BaseConsumer, Consumer},
    producer::{BaseProducer, BaseRecord, Producer},
};

use crate::config::DEFAULTS;

const TOPIC: &str = "orders";
/// Number of partitions; each of them may hit the moment in question.
const PARTITIONS: i32 = 500;
const ROUNDS: usize = 200;
/// The longest wait for records.
const SOON: Duration = Duration::from_secs(15);

/// A partition that is resumed during another operation could stay paused for ever. Such an
/// operation is the pause of all partitions that the library makes at a rebalance. The library
/// drops an order that was numbered before, and queued after, another order, and reports it as
/// done.
#[test]
fn a_partition_is_resumed_whatever_is_done_to_it_meanwhile() {
    let producer: BaseProducer =
        ClientConfig::new().set("test.mock.num.brokers", "1").create().unwrap();
    let mock = producer.client().mock_cluster().unwrap();
    mock.create_topic(TOPIC, PARTITIONS, 1).unwrap();
    for partition in 0..PARTITIONS {
        producer
            .send(BaseRecord::<(), str>::to(TOPIC).partition(partition).payload("x"))
            .map_err(|(error, _)| error)
            .unwrap();
    }
    producer.flush(SOON).unwrap();
    let mut config = ClientConfig::new();
    config
        .set("bootstrap.servers", mock.bootstrap_servers())
        .set("group.id", "pauses")
        .set("enable.auto.commit", "false");
    let consumer: Arc<BaseConsumer> =
        Arc::new(config.set("fetch.wait.max.ms", "10").create().unwrap());
    let mut partitions = TopicPartitionList::new();
    for partition in 0..PARTITIONS {
        partitions.add_partition_offset(TOPIC, partition, Offset::Offset(0)).unwrap();
    }
    consumer.assign(&partitions).unwrap();
    assert_eq!(not_read(&consumer), BTreeSet::new(), "they are there when they were read");

    let begin = Arc::new(Barrier::new(2));
    let resuming = thread::spawn({
        let (consumer, partitions, begin) = (consumer.clone(), partitions.clone(), begin.clone());
        move || {
            for _ in 0..ROUNDS {
                begin.wait();
                consumer.resume(&partitions).unwrap();
                begin.wait();
            }
        }
    });
    let mut paused = BTreeSet::new();
    for _ in 0..ROUNDS {
        consumer.pause(&partitions).unwrap();
        begin.wait();
        let sought = consumer.seek_partitions(partitions.clone(), SOON);
        begin.wait();
        sought.unwrap();
        paused.extend(not_read(&consumer));
    }
    resuming.join().unwrap();
    assert_eq!(paused, BTreeSet::new(), "these stayed paused");
}

/// Returns the partitions from which no record arrives.
fn not_read(consumer: &BaseConsumer) -> BTreeSet<i32> {
    let (mut left, until) = (BTreeSet::from_iter(0..PARTITIONS), Instant::now() + SOON);
    while !left.is_empty() && Instant::now() < until {
        if let Some(Ok(message)) = consumer.poll(Duration::from_millis(50)) {
            left.remove(&message.partition());
        }
    }
    left
}

/// Rounds of one distance between pause and resume.
const RESUMED: usize = 12;

/// What could go wrong: a partition stands still for a second after it is resumed. The thread of
/// its broker sleeps, since it had nothing to fetch; or it finds the library's queue full of records
/// that the pause has made void, and looks again a second later.
#[test]
fn a_partition_that_is_resumed_is_read_at_once() {
    let producer: BaseProducer =
        ClientConfig::new().set("test.mock.num.brokers", "1").create().unwrap();
    let mock = producer.client().mock_cluster().unwrap();
    mock.create_topic(TOPIC, 1, 1).unwrap();
    for number in 0..20_000 {
        let record = BaseRecord::<(), [u8]>::to(TOPIC).partition(0).payload(&[7; 100]);
        producer.send(record).map_err(|(error, _)| error).unwrap();
        if number % 1_000 == 0 {
            producer.flush(SOON).unwrap();
        }
    }
    producer.flush(SOON).unwrap();
    let mut config = ClientConfig::new();
    for (name, value) in DEFAULTS {
        config.set(*name, *value);
    }
    config
        .set("bootstrap.servers", mock.bootstrap_servers())
        .set("group.id", "resumed")
        .set("enable.auto.commit", "false")
        .set("queued.min.messages", "200");
    let consumer: BaseConsumer = config.create().unwrap();
    let mut partitions = TopicPartitionList::new();
    partitions.add_partition_offset(TOPIC, 0, Offset::Offset(0)).unwrap();
    consumer.assign(&partitions).unwrap();
    let mut next = 0;
    let mut read = |count: usize| {
        let asked = Instant::now();
        for _ in 0..count {
            let message = consumer.poll(SOON).expect("a record").unwrap();
            assert_eq!(message.offset(), next, "in order, none twice");
            next += 1;
        }
        asked.elapsed()
    };
    read(1);
    let mut slow = Vec::new();
    for (queue_full_ms, paused_ms) in [(60, 60), (60, 0), (0, 60), (0, 0)] {
        for _ in 0..RESUMED {
            read(120);
            thread::sleep(Duration::from_millis(queue_full_ms));
            consumer.pause(&partitions).unwrap();
            thread::sleep(Duration::from_millis(paused_ms));
            consumer.resume(&partitions).unwrap();
            let took = read(1);
            if took > Duration::from_millis(500) {
                slow.push((queue_full_ms, paused_ms, took));
            }
        }
    }
    // A machine that stands still by itself does so now and then.
    assert!(slow.len() < 3, "{} of {}: {slow:?}", slow.len(), 4 * RESUMED);
}
