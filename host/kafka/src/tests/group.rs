//! Tests of two members of a group.

use std::time::Duration;

use super::support::{Cluster, PARTITIONS, Seen, config, start, until};
use crate::Drained;

const TOPIC: &str = "orders";

/// A partition could be given up while a batch of it runs, or with its acks lost. The new owner
/// would then run these records a second time.
///
/// Unlike a broker, the mock cluster refuses offsets as soon as another member has asked to rejoin,
/// which takes milliseconds. Such a rebalance shows nothing, and the test repeats it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_rebalance_waits_for_what_runs_and_commits_it() {
    for _ in 0..8 {
        if rebalances_with_offsets_committed().await {
            return;
        }
    }
    panic!("no rebalance of eight had the offsets committed of what was given up");
}

/// Returns whether the offsets of the partitions that were given up are committed.
async fn rebalances_with_offsets_committed() -> bool {
    let cluster = Cluster::new(TOPIC);
    cluster.send(TOPIC, 0..PARTITIONS, 10);
    let first_seen = Seen::gated();
    let member = || {
        let mut config = config(&cluster.address, "t", "pair", TOPIC);
        // The mock cluster removes a member that is slow to rejoin, even on a busy machine.
        config.host_properties.insert("session.timeout.ms".to_owned(), "5000".to_owned());
        config
    };
    let first = start(member(), &first_seen);
    until("every partition runs", || first_seen.running() == PARTITIONS as usize).await;

    let second_seen = Seen::free();
    let second = start(member(), &second_seen);
    until("the first is asked to give up", || first.status().partitions.iter().any(|p| p.leaving))
        .await;
    assert_eq!(second_seen.count(), 0);
    assert_eq!(first_seen.running(), PARTITIONS as usize, "nothing that runs is cancelled");
    first_seen.gate.close();

    until("they share", || {
        let (one, two) = (first.status().partitions.len(), second.status().partitions.len());
        one < PARTITIONS as usize && two > 0 && one + two == PARTITIONS as usize
    })
    .await;
    let moved: Vec<_> = second.status().partitions.iter().map(|p| p.partition).collect();
    if moved
        .iter()
        .any(|partition| cluster.committed("oncebox.t.pair", TOPIC, *partition) != Some(10))
    {
        tokio::join!(first.drain(Duration::from_secs(10)), second.drain(Duration::from_secs(10)));
        return false;
    }
    let all = first_seen.count() + second_seen.count();
    assert_eq!(all, 10 * PARTITIONS as usize);
    cluster.send(TOPIC, 0..PARTITIONS, 1);
    until("the new ones are settled", || {
        first_seen.count() + second_seen.count() >= 11 * PARTITIONS as usize
    })
    .await;
    let once = |partition| [first_seen.of(partition), second_seen.of(partition)].concat();
    for partition in 0..PARTITIONS {
        assert_eq!(
            once(partition),
            (0..11).collect::<Vec<i64>>(),
            "partition {partition} ran twice or lost its order"
        );
    }
    assert!(second_seen.opened.lock().unwrap().iter().all(|(_, next)| *next == 10));
    let drained =
        tokio::join!(first.drain(Duration::from_secs(10)), second.drain(Duration::from_secs(10)));
    assert_eq!(drained, (Drained::Clean, Drained::Clean));
    true
}

/// A late worker could ack for a partition that was lost, or run beside the worker of the next
/// assignment.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_worker_of_a_lost_partition_acks_nothing_and_the_next_one_waits_for_it() {
    let cluster = Cluster::new(TOPIC);
    cluster.send(TOPIC, 0..1, 10);
    let seen = Seen::gated();
    let consumer = start(config(&cluster.address, "t", "lost", TOPIC), &seen);
    until("the batch runs", || seen.running() == 1).await;
    cluster.set_down(true);
    until("the assignment is lost", || consumer.status().partitions.is_empty()).await;
    cluster.set_down(false);
    until("assigned again", || consumer.status().partitions.len() == PARTITIONS as usize).await;
    until("the others are open again", || {
        seen.opened.lock().unwrap().len() == 2 * PARTITIONS as usize - 1
    })
    .await;
    assert_eq!(seen.running(), 1);
    assert!(seen.of(0).is_empty());
    seen.gate.close();
    until("settled again", || seen.of(0).len() == 20).await;
    assert_eq!(seen.of(0), (0..10).chain(0..10).collect::<Vec<i64>>());
    assert!(seen.closed.lock().unwrap().is_empty(), "what was lost is not closed");
    assert_eq!(consumer.drain(Duration::from_secs(10)).await, Drained::Clean);
    assert_eq!(cluster.committed("oncebox.t.lost", TOPIC, 0), Some(10));
}
