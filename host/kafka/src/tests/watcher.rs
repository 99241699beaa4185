//! Tests of the watcher, against the mock cluster.

use std::time::Duration;

use super::support::{Cluster, PARTITIONS, Seen, config, start, until};
use crate::{ConsumerConfig, Drained, Lag, LagWatch, ServerRun, Watchers};

const TOPIC: &str = "orders";
/// More than the duration of a poll without any answer.
const SOON: Duration = Duration::from_secs(30);

/// The run of a server of which nothing is known.
fn no_server() -> tokio::sync::watch::Receiver<ServerRun> {
    tokio::sync::watch::channel(None).1
}

async fn watch(watchers: &Watchers, config: &ConsumerConfig) -> (LagWatch, Lag) {
    let mut watched = watchers.watch(config, no_server()).unwrap();
    let lag = watched.first(SOON).await;
    (watched, lag)
}

/// A closed consumer could stay closed although a message waits for it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_message_for_an_idle_group_is_reported() {
    let cluster = Cluster::new(TOPIC);
    let (watchers, config) = (Watchers::default(), config(&cluster.address, "t", "rest", TOPIC));
    let (mut watched, lag) = watch(&watchers, &config).await;
    assert_eq!(lag, Lag::CaughtUp { committed: false }, "an empty topic, a group that never was");
    cluster.send(TOPIC, 3..4, 1);
    assert_eq!(watched.until_behind().await, Lag::Behind);
    assert_eq!(watch(&watchers, &config).await.1, Lag::Behind);

    // The group is caught up again once any member has read the message.
    let seen = Seen::free();
    let consumer = start(config.clone(), &seen);
    until("it is read", || seen.count() == 1).await;
    assert_eq!(consumer.drain(SOON).await, Drained::Clean);
    let (mut watched, lag) = watch(&watchers, &config).await;
    assert_eq!(lag, Lag::CaughtUp { committed: true });
    assert!(watched.has_committed());
    cluster.send(TOPIC, 0..PARTITIONS, 1);
    assert_eq!(watched.until_behind().await, Lag::Behind);
}

/// Unread records of a group that was not watched could pass for read.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn unread_records_are_found_at_the_first_poll() {
    let cluster = Cluster::new(TOPIC);
    cluster.send(TOPIC, 0..1, 10);
    let (watchers, config) = (Watchers::default(), config(&cluster.address, "t", "first", TOPIC));
    assert_eq!(
        watch(&watchers, &config).await.1,
        Lag::Behind,
        "a group that never was begins at the first record"
    );
    let mut other = config.clone();
    other.topics.push("nowhere".to_owned());
    assert_eq!(watch(&watchers, &other).await.1, Lag::Unavailable, "a topic that does not exist");
    let mut other = config.clone();
    other.topics = vec!["^ord.*".to_owned()];
    assert_eq!(
        watchers.watch(&other, no_server()).unwrap().first(Duration::from_millis(200)).await,
        Lag::Pending
    );
}

/// Brokers that do not answer could pass for brokers without new records.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn silence_does_not_pass_for_caught_up() {
    let cluster = Cluster::new(TOPIC);
    let (watchers, config) = (Watchers::default(), config(&cluster.address, "t", "silence", TOPIC));
    let (mut watched, lag) = watch(&watchers, &config).await;
    assert_eq!(lag, Lag::CaughtUp { committed: false });
    cluster.set_down(true);
    assert_eq!(
        tokio::time::timeout(Duration::from_secs(30), watched.until_behind()).await.unwrap(),
        Lag::Unavailable
    );
    cluster.set_down(false);
    assert_eq!(watch(&watchers, &config).await.1, Lag::CaughtUp { committed: false });
}

/// A group could stay unpolled when its coordinator moves, or does not exist yet as after the first
/// start of a broker. It could also end the process: librdkafka does not expect such an answer from
/// a client without a group.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_coordinator_that_is_not_there_yet_is_asked_again() {
    const OFFSET_FETCH: i16 = 9;
    use rdkafka::types::RDKafkaRespErr::{
        RD_KAFKA_RESP_ERR_COORDINATOR_NOT_AVAILABLE, RD_KAFKA_RESP_ERR_NOT_COORDINATOR,
    };
    let cluster = Cluster::new(TOPIC);
    cluster.fail(
        OFFSET_FETCH,
        &[RD_KAFKA_RESP_ERR_COORDINATOR_NOT_AVAILABLE, RD_KAFKA_RESP_ERR_NOT_COORDINATOR],
    );
    let (watchers, config) = (Watchers::default(), config(&cluster.address, "t", "moves", TOPIC));
    assert_eq!(watch(&watchers, &config).await.1, Lag::CaughtUp { committed: false });
}

/// Every idle consumer could cost the brokers requests of its own.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn many_idle_groups_share_a_few_requests() {
    const GROUPS: usize = 200;
    const LIST_OFFSETS: i16 = 2;
    let cluster = Cluster::new(TOPIC);
    let watchers = Watchers::default();
    let mut watched = Vec::new();
    for group in 0..GROUPS {
        watched.push(
            watchers
                .watch(&config(&cluster.address, "t", &format!("many-{group}"), TOPIC), no_server())
                .unwrap(),
        );
    }
    for watched in &mut watched {
        assert_eq!(watched.first(SOON).await, Lag::CaughtUp { committed: false });
    }
    let threads = || {
        std::fs::read_dir("/proc/self/task").unwrap().filter(|task| {
            let name = task
                .as_ref()
                .map(|task| std::fs::read_to_string(task.path().join("comm")).unwrap_or_default());
            name.is_ok_and(|name| name.trim() == "oncebox-watch")
        })
    };
    assert!(threads().count() >= 1);
    let looks = cluster.requests(LIST_OFFSETS, Duration::from_secs(3)).await;
    assert!((1..=3 * 4 + 2).contains(&looks), "{looks} requests for the ends of partitions in 3 s");
    cluster.send(TOPIC, 5..6, 1);
    for watched in &mut watched {
        assert_eq!(watched.until_behind().await, Lag::Behind);
    }
}

/// A broker that goes down and comes back while groups are idle could end the host. librdkafka
/// answers a request a second time, once the broker is back, if the request timed out while it
/// waited for its coordinator.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_broker_that_comes_and_goes_ends_nothing() {
    const BOUNCES: usize = 20;
    const GROUPS: usize = 8;
    const OFFSET_FETCH: i16 = 9;
    let cluster = Cluster::new(TOPIC);
    let watchers = Watchers::default();
    let fresh = |name: String| {
        watchers.watch(&config(&cluster.address, "t", &name, TOPIC), no_server()).unwrap()
    };
    let mut resting = Vec::new();
    for bounce in 0..BOUNCES {
        for group in 0..GROUPS {
            resting.push(fresh(format!("rests-{bounce}-{group}")));
        }
        for watched in &mut resting {
            assert!(matches!(watched.first(SOON).await, Lag::CaughtUp { .. } | Lag::Unavailable));
        }
        // The requests about these groups find the coordinator known and down; they time out, and
        // the coordinator is back.
        let asked =
            (0..GROUPS).map(|group| fresh(format!("asked-{bounce}-{group}"))).collect::<Vec<_>>();
        cluster.set_down(true);
        for mut watched in asked {
            // Groups that were answered before the broker went down are known; the lag of the
            // others is unavailable.
            let lag = watched.first(SOON).await;
            assert!(matches!(lag, Lag::CaughtUp { .. } | Lag::Unavailable), "{lag:?}");
        }
        cluster.set_down(false);
        // The process not only lives: it goes on polling, and gets answers.
        let (_, lag) =
            watch(&watchers, &config(&cluster.address, "t", &format!("after-{bounce}"), TOPIC))
                .await;
        assert!(matches!(lag, Lag::CaughtUp { .. } | Lag::Unavailable), "{lag:?}");
        resting.truncate(GROUPS);
    }
    let (_, lag) = watch(&watchers, &config(&cluster.address, "t", "last", TOPIC)).await;
    assert_eq!(lag, Lag::CaughtUp { committed: false });
    assert!(
        cluster.requests(OFFSET_FETCH, Duration::from_secs(3)).await < 100,
        "questions that timed out are not asked again and again"
    );
}
