//! The check, once an hour, that each consumer's inbox remembers for longer than its topics keep
//! records: an operator of the brokers may change a topic at any time.

use std::{
    collections::BTreeMap,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use oncebox_kafka::{ConsumerConfig, topic_settings};
use oncebox_model::policy::{Horizon, HorizonVerdict, MemoryFacts, Policy, Redelivery, TimeSpan};
use tokio::time::Instant;

use crate::brokers::{ASK, redelivery};

/// Longest wait of a started consumer for its first check.
const FIRST: Duration = Duration::from_secs(30);
/// Longest pause after a check without an answer of the brokers.
const AGAIN: Duration = Duration::from_secs(300);
/// Bounds of the pause between two looks for consumers whose check is due.
const STEP: (Duration, Duration) = (Duration::from_millis(50), Duration::from_secs(5));
/// Most consumers of one check.
const AT_ONCE: usize = 500;

/// The checks of all consumers that read on this host.
pub(crate) struct Horizons {
    watched: Mutex<BTreeMap<u64, WatchedHorizon>>,
    next_key: AtomicU64,
    /// Pause between two checks of a consumer; none for no checks.
    pause: Option<Duration>,
}

/// A consumer between two checks.
struct WatchedHorizon {
    config: ConsumerConfig,
    /// Its policy, without the schemas of payloads.
    policy: Policy,
    due_at: Instant,
    /// Result of the last check that the brokers answered.
    is_short: bool,
}

/// The checks of one consumer, until it is dropped.
pub(crate) struct HorizonGuard {
    horizons: Arc<Horizons>,
    key: u64,
}

impl Horizons {
    /// Creates the checks with the pause between two of a consumer; zero stands for none.
    pub(crate) fn new(pause: Duration) -> Arc<Self> {
        let pause = Some(pause).filter(|pause| !pause.is_zero());
        Arc::new(Self { watched: Mutex::default(), next_key: AtomicU64::new(0), pause })
    }

    /// Begins to check a consumer. Returns none for a consumer whose verdict does not depend on its
    /// topics.
    pub(crate) fn watch(
        self: &Arc<Self>,
        config: &ConsumerConfig,
        policy: &Policy,
    ) -> Option<HorizonGuard> {
        let pause = self.pause?;
        if !policy.has_horizon() {
            return None;
        }
        let key = self.next_key.fetch_add(1, Ordering::Relaxed);
        let watched = WatchedHorizon {
            config: config.clone(),
            policy: Policy { schemas: BTreeMap::new(), ..policy.clone() },
            due_at: Instant::now() + pause.min(FIRST).mul_f64(rand::random()),
            is_short: false,
        };
        self.lock().insert(key, watched);
        Some(HorizonGuard { horizons: self.clone(), key })
    }

    /// Checks consumers when they are due, for ever.
    pub(crate) async fn run(self: Arc<Self>) {
        let Some(pause) = self.pause else { return };
        loop {
            tokio::time::sleep((pause / 4).clamp(STEP.0, STEP.1)).await;
            let due = self.due();
            if !due.is_empty() {
                self.check(due, pause).await;
            }
        }
    }

    /// Returns the consumers whose check is due, each with its key.
    fn due(&self) -> Vec<(u64, ConsumerConfig)> {
        let now = Instant::now();
        let watched = self.lock();
        let due = watched.iter().filter(|(_, watched)| watched.due_at <= now).take(AT_ONCE);
        due.map(|(key, watched)| (*key, watched.config.clone())).collect()
    }

    async fn check(&self, due: Vec<(u64, ConsumerConfig)>, pause: Duration) {
        let (keys, configs): (Vec<_>, Vec<_>) = due.into_iter().unzip();
        let found = topic_settings(&configs, ASK).await;
        let mut watched = self.lock();
        for ((key, config), topics) in keys.iter().zip(&configs).zip(found) {
            // A consumer that has ended since has no gauges any more.
            if let Some(watched) = watched.get_mut(key) {
                let horizon = watched.prove(&redelivery(config, topics));
                let pause = watched.report(&horizon, pause);
                // Checks of consumers that started together do not stay together.
                watched.due_at = Instant::now() + pause.mul_f64(0.75 + rand::random::<f64>() / 2.0);
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<u64, WatchedHorizon>> {
        self.watched.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl WatchedHorizon {
    /// Proves, or disproves, that the consumer remembers for long enough. No verdict depends on its
    /// growth, or on what its tenant may choose.
    fn prove(&self, redelivery: &Redelivery) -> Horizon {
        Horizon::of(&self.policy, redelivery, &MemoryFacts::default())
    }

    /// Reports the result of a check, and returns the pause before the next.
    fn report(&mut self, horizon: &Horizon, pause: Duration) -> Duration {
        let ConsumerConfig { tenant, consumer, .. } = &self.config;
        let conclusion = horizon.conclusion();
        if horizon.verdict == HorizonVerdict::Unknown {
            tracing::debug!(tenant, consumer, conclusion, "horizon not checked");
            return pause.min(AGAIN);
        }
        let is_short = horizon.verdict == HorizonVerdict::TooShort;
        match (self.is_short, is_short) {
            (false, true) => tracing::warn!(tenant, consumer, conclusion, "horizon too short"),
            (true, false) => {
                tracing::info!(tenant, consumer, conclusion, "horizon no longer short")
            }
            _ => {}
        }
        self.is_short = is_short;
        self.set_gauges(
            f64::from(u8::from(is_short)),
            seconds(horizon.needed),
            seconds(horizon.remembered),
        );
        pause
    }

    fn set_gauges(&self, short: f64, needed: f64, remembered: f64) {
        let ConsumerConfig { tenant, consumer, .. } = &self.config;
        let labels = [("tenant", tenant.clone()), ("consumer", consumer.clone())];
        metrics::gauge!("oncebox_consumer_horizon_short", &labels).set(short);
        metrics::gauge!("oncebox_consumer_horizon_needed_seconds", &labels).set(needed);
        metrics::gauge!("oncebox_consumer_horizon_remembered_seconds", &labels).set(remembered);
    }
}

impl Drop for HorizonGuard {
    fn drop(&mut self) {
        // Gauges that are not a number are not shown. Under the lock, so that a check that is under
        // way does not set them again.
        let mut watched = self.horizons.lock();
        if let Some(watched) = watched.remove(&self.key) {
            watched.set_gauges(f64::NAN, f64::NAN, f64::NAN);
        }
    }
}

/// Returns a time in seconds; for ever is infinite.
fn seconds(span: TimeSpan) -> f64 {
    span.ms().map_or(f64::INFINITY, |ms| ms as f64 / 1_000.0)
}

#[cfg(test)]
mod tests {
    use oncebox_kafka::Timing;
    use oncebox_model::policy::{BrokerRetention, TopicRetention, TopicSettings};

    use super::*;

    fn watched() -> WatchedHorizon {
        let policy = "topics = ['t']\nack = 'after_commit'\nreplay = { past_horizon = 'run' }";
        let policy = Policy::parse(policy).expect("a policy of the test");
        let config = ConsumerConfig {
            tenant: "acme".to_owned(),
            consumer: "orders".to_owned(),
            topics: policy.topics.clone(),
            kafka: policy.reading(),
            host_properties: BTreeMap::new(),
            timing: Timing::default(),
        };
        WatchedHorizon { config, policy, due_at: Instant::now(), is_short: false }
    }

    // What could go wrong: silence of the brokers ends an alert, or puts off the next check for an
    // hour.
    #[tokio::test]
    async fn silence_changes_nothing_and_is_soon_asked_again() {
        let hour = Duration::from_secs(3_600);
        let mut watched = watched();
        let mut report = |kept: TopicRetention| {
            let topics = vec![TopicSettings { topic: "t".to_owned(), kept }];
            let horizon = watched.prove(&Redelivery { topics, group_ms: 0 });
            let pause = watched.report(&horizon, hour);
            (watched.is_short, pause)
        };
        let days = |days: u64| {
            TopicRetention::Known(BrokerRetention {
                retention_ms: Some(days * 86_400_000),
                retention_bytes: None,
                segment_ms: 1,
                cleanup_policy: "delete".to_owned(),
            })
        };
        let silence = || TopicRetention::Unknown("away".to_owned());
        assert_eq!(report(silence()), (false, AGAIN));
        assert_eq!(report(days(7)), (true, hour));
        assert_eq!(report(silence()), (true, AGAIN));
        assert_eq!(report(days(1)), (false, hour));
    }
}
