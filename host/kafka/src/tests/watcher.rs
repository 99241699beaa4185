//! The watcher, against the mock cluster.

use std::time::Duration;

use super::support::{Cluster, PARTITIONS, Seen, config, start, until};
use crate::{ConsumerConfig, Drained, Sight, Watched, Watchers};

const TOPIC: &str = "orders";
/// More than a look takes whose every question stays without an answer.
const SOON: Duration = Duration::from_secs(30);

async fn watch(watchers: &Watchers, config: &ConsumerConfig) -> (Watched, Sight) {
    let mut watched = watchers.watch(config).unwrap();
    let sight = watched.first(SOON).await;
    (watched, sight)
}

/// A consumer that is closed could have a message waiting that nobody tells it of.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_message_that_comes_to_a_group_at_rest_is_told() {
    let cluster = Cluster::new(TOPIC);
    let (watchers, config) = (Watchers::default(), config(&cluster.address, "t", "rest", TOPIC));
    let (mut watched, sight) = watch(&watchers, &config).await;
    assert_eq!(
        sight,
        Sight::Nothing { committed: false },
        "an empty topic, a group that never was"
    );
    cluster.send(TOPIC, 3..4, 1);
    assert_eq!(watched.something().await, Sight::Something);
    assert_eq!(watch(&watchers, &config).await.1, Sight::Something);

    // Reading it puts an end to that, wherever it is read.
    let seen = Seen::free();
    let consumer = start(config.clone(), &seen);
    until("it is read", || seen.count() == 1).await;
    assert_eq!(consumer.drain(SOON).await, Drained::Clean);
    let (mut watched, sight) = watch(&watchers, &config).await;
    assert_eq!(sight, Sight::Nothing { committed: true });
    assert!(watched.has_committed());
    cluster.send(TOPIC, 0..PARTITIONS, 1);
    assert_eq!(watched.something().await, Sight::Something);
}

/// What was left behind while nobody watched could be taken for read.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_a_group_has_not_read_is_found_at_the_first_look() {
    let cluster = Cluster::new(TOPIC);
    cluster.send(TOPIC, 0..1, 10);
    let (watchers, config) = (Watchers::default(), config(&cluster.address, "t", "first", TOPIC));
    assert_eq!(
        watch(&watchers, &config).await.1,
        Sight::Something,
        "a group that never was begins at the first record"
    );
    let mut other = config.clone();
    other.topics.push("nowhere".to_owned());
    assert_eq!(watch(&watchers, &other).await.1, Sight::Blind, "a topic that does not exist");
    let mut other = config.clone();
    other.topics = vec!["^ord.*".to_owned()];
    assert_eq!(
        watchers.watch(&other).unwrap().first(Duration::from_millis(200)).await,
        Sight::Unknown
    );
}

/// Brokers that do not answer could pass for brokers with nothing new.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn silence_is_not_taken_for_nothing_to_read() {
    let cluster = Cluster::new(TOPIC);
    let (watchers, config) = (Watchers::default(), config(&cluster.address, "t", "silence", TOPIC));
    let (mut watched, sight) = watch(&watchers, &config).await;
    assert_eq!(sight, Sight::Nothing { committed: false });
    cluster.set_down(true);
    assert_eq!(
        tokio::time::timeout(Duration::from_secs(30), watched.something()).await.unwrap(),
        Sight::Blind
    );
    cluster.set_down(false);
    assert_eq!(watch(&watchers, &config).await.1, Sight::Nothing { committed: false });
}

/// A group whose coordinator moves, or is not there yet as after the first start of a broker, could
/// be lost sight of, or end the process: librdkafka does not expect such an answer from a client
/// without a group.
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
    assert_eq!(watch(&watchers, &config).await.1, Sight::Nothing { committed: false });
}

/// Every consumer that rests could cost the brokers requests of its own.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn many_groups_at_rest_share_a_few_requests() {
    const GROUPS: usize = 200;
    const LIST_OFFSETS: i16 = 2;
    let cluster = Cluster::new(TOPIC);
    let watchers = Watchers::default();
    let mut watched = Vec::new();
    for group in 0..GROUPS {
        watched.push(
            watchers
                .watch(&config(&cluster.address, "t", &format!("many-{group}"), TOPIC))
                .unwrap(),
        );
    }
    for watched in &mut watched {
        assert_eq!(watched.first(SOON).await, Sight::Nothing { committed: false });
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
        assert_eq!(watched.something().await, Sight::Something);
    }
}

/// A broker that comes and goes while groups rest could end the host: librdkafka answers a question
/// that timed out while it waited for its coordinator a second time, once the broker is back.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_broker_that_comes_and_goes_ends_nothing() {
    const BOUNCES: usize = 20;
    const GROUPS: usize = 8;
    const OFFSET_FETCH: i16 = 9;
    let cluster = Cluster::new(TOPIC);
    let watchers = Watchers::default();
    let fresh =
        |name: String| watchers.watch(&config(&cluster.address, "t", &name, TOPIC)).unwrap();
    let mut resting = Vec::new();
    for bounce in 0..BOUNCES {
        for group in 0..GROUPS {
            resting.push(fresh(format!("rests-{bounce}-{group}")));
        }
        for watched in &mut resting {
            assert!(matches!(watched.first(SOON).await, Sight::Nothing { .. } | Sight::Blind));
        }
        // The questions about these find the coordinator known and away; they time out, and it is
        // back.
        let asked =
            (0..GROUPS).map(|group| fresh(format!("asked-{bounce}-{group}"))).collect::<Vec<_>>();
        cluster.set_down(true);
        for mut watched in asked {
            // Those that were answered before the broker went away are known; the others cannot be
            // told.
            let sight = watched.first(SOON).await;
            assert!(matches!(sight, Sight::Nothing { .. } | Sight::Blind), "{sight:?}");
        }
        cluster.set_down(false);
        // Not only does the process live: it goes on asking, and is answered.
        let (_, sight) =
            watch(&watchers, &config(&cluster.address, "t", &format!("after-{bounce}"), TOPIC))
                .await;
        assert!(matches!(sight, Sight::Nothing { .. } | Sight::Blind), "{sight:?}");
        resting.truncate(GROUPS);
    }
    let (_, sight) = watch(&watchers, &config(&cluster.address, "t", "last", TOPIC)).await;
    assert_eq!(sight, Sight::Nothing { committed: false });
    assert!(
        cluster.requests(OFFSET_FETCH, Duration::from_secs(3)).await < 100,
        "questions that timed out are not asked again and again"
    );
}
