//! Tests of one member: order, acks, backpressure, failures, drain and restart.

use std::{
    sync::{Arc, atomic::Ordering},
    time::Duration,
};

use super::support::{Cluster, Counts, PARTITIONS, Seen, config, start, until};
use crate::{ConsumerState, Drained, event_loop::OVERSHOOT};

const TOPIC: &str = "orders";
const DRAIN: Duration = Duration::from_secs(10);

/// Records of a partition could overtake each other; an offset could be stored wrongly.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn records_come_in_order_and_a_restart_resumes_behind_the_last_ack() {
    let cluster = Cluster::new(TOPIC);
    cluster.send(TOPIC, 0..PARTITIONS, 300);
    let seen = Seen::with(7, 20);
    seen.open_failures.store(3, Ordering::SeqCst);
    let first = start(config(&cluster.address, "t", "c", TOPIC), &seen);
    until("all settled", || seen.count() == 300 * PARTITIONS as usize).await;
    for partition in 0..PARTITIONS {
        assert_eq!(seen.of(partition), (0..300).collect::<Vec<i64>>());
    }
    assert!(seen.offered.lock().unwrap().iter().all(|(_, offsets)| offsets.len() <= 20));
    assert_eq!(seen.topic_ids.lock().unwrap().len(), 1, "a topic's id must not change");
    assert_eq!(first.drain(DRAIN).await, Drained::Clean);
    assert_eq!(seen.closed.lock().unwrap().len(), PARTITIONS as usize);
    assert_eq!(cluster.committed("oncebox.t.c", TOPIC, 5), Some(300));

    cluster.send(TOPIC, 0..PARTITIONS, 2);
    let seen = Seen::free();
    let second = start(config(&cluster.address, "t", "c", TOPIC), &seen);
    until("the new ones settled", || seen.count() == 2 * PARTITIONS as usize).await;
    assert_eq!(seen.of(3), [300, 301]);
    assert!(seen.opened.lock().unwrap().iter().all(|(_, next)| *next == 300));
    assert_eq!(second.drain(DRAIN).await, Drained::Clean);
    assert!(second.join().await.is_ok());
}

/// A settled prefix could be taken for the whole batch.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn only_the_settled_prefix_is_acked_on_drain() {
    let cluster = Cluster::new(TOPIC);
    cluster.send(TOPIC, 0..1, 30);
    let mut seen = Seen::gated();
    let inner = Arc::get_mut(&mut seen).unwrap();
    (inner.settles_max, inner.batch_max) = (4, 10);
    let consumer = start(config(&cluster.address, "t", "prefix", TOPIC), &seen);
    seen.gate.add_permits(2);
    until("the third batch runs", || seen.count() == 8 && seen.running() == 1).await;
    let drain = consumer.drain(DRAIN);
    tokio::pin!(drain);
    until("draining", || {
        let _ = futures::FutureExt::now_or_never(&mut drain);
        consumer.status().state == ConsumerState::Draining
    })
    .await;
    seen.gate.add_permits(100);
    assert_eq!(drain.await, Drained::Clean);
    assert_eq!(
        seen.of(0),
        (0..12).collect::<Vec<i64>>(),
        "the batch that ran is finished, no other is begun"
    );
    assert!(seen.closed.lock().unwrap().contains(&(0, 12)));
    assert_eq!(cluster.committed("oncebox.t.prefix", TOPIC, 0), Some(12));
}

/// Work that does not end could hold up a shutdown, or be acked though not settled.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_drain_gives_up_at_its_deadline_without_acking() {
    let cluster = Cluster::new(TOPIC);
    cluster.send(TOPIC, 0..1, 10);
    let seen = Seen::gated();
    let consumer = start(config(&cluster.address, "t", "stuck", TOPIC), &seen);
    until("the batch runs", || seen.running() == 1).await;
    let began = std::time::Instant::now();
    assert_eq!(consumer.drain(Duration::from_secs(1)).await, Drained::Unfinished);
    assert!(began.elapsed() < Duration::from_secs(9));
    assert!(consumer.join().await.is_ok());
    seen.gate.close();
    until("the late batch is settled", || seen.count() == 10).await;
    assert_eq!(cluster.committed("oncebox.t.stuck", TOPIC, 0), None);
}

/// A slow partition could fill the memory, or hold up the others.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_slow_inbox_pauses_its_partition_and_memory_stays_bounded() {
    let cluster = Cluster::new(TOPIC);
    cluster.send_sized(TOPIC, 0..1, 6_000, 100);
    let seen = Seen::gated();
    let mut config = config(&cluster.address, "t", "slow", TOPIC);
    config.kafka.prefetch_messages = 200;
    let consumer = start(config, &seen);
    let partition = || consumer.status().partitions.into_iter().find(|p| p.partition == 0);
    until("paused", || partition().is_some_and(|p| p.paused)).await;
    let held = partition().unwrap().messages;
    assert!((200..=200 + OVERSHOOT).contains(&held), "{held}");
    let mut most = held;
    while seen.count() < 6_000 {
        seen.gate.add_permits(4);
        until("a batch is settled", || seen.gate.available_permits() == 0 || seen.count() == 6_000)
            .await;
        most = most.max(partition().unwrap().messages);
    }
    assert!(most <= 200 + OVERSHOOT, "{most}");
    assert_eq!(seen.of(0), (0..6_000).collect::<Vec<i64>>());
    until("resumed", || partition().is_some_and(|p| !p.paused && p.messages == 0 && p.bytes == 0))
        .await;
    assert_eq!(consumer.drain(DRAIN).await, Drained::Clean);
}

/// Large records could fill the memory although their number is bounded.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn large_records_pause_by_bytes() {
    let cluster = Cluster::new(TOPIC);
    cluster.send_sized(TOPIC, 0..1, 40, 50_000);
    let seen = Seen::gated();
    let mut config = config(&cluster.address, "t", "large", TOPIC);
    config.kafka.prefetch_bytes = 200_000;
    let consumer = start(config, &seen);
    let partition = || consumer.status().partitions.into_iter().find(|p| p.partition == 0);
    until("paused", || partition().is_some_and(|p| p.paused)).await;
    seen.gate.close();
    until("all settled", || seen.count() == 40).await;
    assert_eq!(seen.of(0), (0..40).collect::<Vec<i64>>());
    assert_eq!(consumer.drain(DRAIN).await, Drained::Clean);
}

/// Records could be skipped, or acked, while the inbox fails.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_failing_inbox_gets_the_same_records_again() {
    let cluster = Cluster::new(TOPIC);
    cluster.send(TOPIC, 2..3, 5);
    let seen = Seen::with(usize::MAX, 3);
    seen.failures.store(4, Ordering::SeqCst);
    let consumer = start(config(&cluster.address, "t", "failing", TOPIC), &seen);
    until("backing off and paused", || {
        consumer
            .status()
            .partitions
            .iter()
            .any(|p| p.backing_off && p.paused && p.next_offset == Some(0))
    })
    .await;
    until("all settled", || seen.count() == 5).await;
    let offered = seen.offered.lock().unwrap().clone();
    assert_eq!(offered[4].1[0], 0);
    assert!(
        offered[..4].windows(2).all(|calls| calls[1].1.starts_with(&calls[0].1)),
        "{offered:?}"
    );
    assert_eq!(seen.of(2), [0, 1, 2, 3, 4]);
    until("resumed", || consumer.status().partitions.iter().all(|p| !p.paused && !p.backing_off))
        .await;
    assert_eq!(consumer.drain(DRAIN).await, Drained::Clean);
}

/// Records that the broker deleted before they were settled could go unnoticed. The mock
/// cluster keeps five MiB per partition.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn records_deleted_by_the_broker_are_counted_when_a_partition_opens_and_while_it_runs() {
    let recorder = Arc::new(Counts::default());
    let _ = metrics::set_global_recorder(Arc::clone(&recorder));
    let lost =
        |consumer: &str| recorder.of("oncebox_kafka_offset_below_low_watermark_total", consumer);
    let cluster = Cluster::new(TOPIC);
    cluster.send_sized(TOPIC, 0..1, 20, 1_000);
    let seen = Seen::free();
    let consumer = start(config(&cluster.address, "t", "head", TOPIC), &seen);
    until("the first ones settled", || seen.count() == 20).await;
    assert_eq!(consumer.drain(DRAIN).await, Drained::Clean);
    assert_eq!(lost("head"), 0);

    cluster.send_sized(TOPIC, 0..1, 120, 100_000);
    let seen = Seen::gated();
    let mut again = config(&cluster.address, "t", "head", TOPIC);
    again.kafka.prefetch_messages = 10;
    let consumer = start(again, &seen);
    until("a batch runs", || seen.running() == 1).await;
    assert_eq!(lost("head"), 1);
    let low = seen.opened.lock().unwrap().iter().find(|(partition, _)| *partition == 0).unwrap().1;
    assert!(low > 20, "{low}");
    assert_eq!(seen.offered.lock().unwrap()[0].1[0], low);

    until("paused", || consumer.status().partitions.iter().any(|p| p.paused)).await;
    cluster.send_sized(TOPIC, 0..1, 120, 100_000);
    seen.gate.close();
    until("the last one settled", || seen.of(0).last() == Some(&259)).await;
    assert_eq!(lost("head"), 2);
    assert_eq!(consumer.drain(DRAIN).await, Drained::Clean);
}
