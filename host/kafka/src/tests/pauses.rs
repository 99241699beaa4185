//! Pausing and resuming in librdkafka, against the mock cluster.

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

const TOPIC: &str = "orders";
/// Each of them may meet the moment that this is about.
const PARTITIONS: i32 = 500;
const ROUNDS: usize = 200;
/// How long records may take to come.
const SOON: Duration = Duration::from_secs(15);

/// A partition that is resumed while something else is done to it, such as the pause that the
/// library makes of all partitions at a rebalance, could stay paused for ever: the library drops
/// what was numbered before, and queued after, another order, and says that it was done.
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

/// Partitions of which nothing comes.
fn not_read(consumer: &BaseConsumer) -> BTreeSet<i32> {
    let (mut left, until) = (BTreeSet::from_iter(0..PARTITIONS), Instant::now() + SOON);
    while !left.is_empty() && Instant::now() < until {
        if let Some(Ok(message)) = consumer.poll(Duration::from_millis(50)) {
            left.remove(&message.partition());
        }
    }
    left
}
