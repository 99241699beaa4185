//! Sending to Kafka: the producers of the tenants, and one record.
//!
//! Each tenant has a producer of its own for each set of connection properties that its consumers
//! have, since a consumer sends with its own rights. A producer that nobody has used for a while is
//! closed.

use std::{
    collections::{BTreeMap, HashMap, hash_map::Entry},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use oncebox_kafka::{ConsumerConfig, ConsumerError, NewRecord, ProduceError, Producer};
use tokio::{runtime::Handle, time::Instant};

use crate::{
    directory::TenantFacts, host::RelayHost, outcome::Sent, reason::OutgoingReason,
    record_headers::record_headers, row::OutgoingRow,
};

/// A tenant, and the properties of a connection. The values may be passwords, so that this is never
/// shown.
type ProducerKey = (String, BTreeMap<String, String>);

/// A producer, and the last time at which it was asked for.
struct CachedProducer {
    producer: Arc<Producer>,
    used: Instant,
}

/// The producers of a host for outgoing messages.
#[derive(Default)]
pub(crate) struct Producers {
    known: Mutex<HashMap<ProducerKey, CachedProducer>>,
}

impl Producers {
    /// Returns the producer for a consumer's settings. It connects with its first record.
    ///
    /// # Errors
    ///
    /// A [`ConsumerError`] where no client can be made with these settings.
    pub(crate) fn of(&self, config: &ConsumerConfig) -> Result<Arc<Producer>, ConsumerError> {
        let (key, now) = (key_of(config), Instant::now());
        let mut known = self.known();
        if let Some(cached) = known.get_mut(&key) {
            cached.used = now;
            return Ok(cached.producer.clone());
        }
        // Under the lock: pairs of a tenant ask together, and one client is made for all.
        let producer = Arc::new(Producer::of_outgoing(config)?);
        known.insert(key, CachedProducer { producer: producer.clone(), used: now });
        Ok(producer)
    }

    /// Returns, by consumer, what the messages of a lease are sent to a topic with.
    pub(crate) fn senders(
        &self,
        host: &dyn RelayHost,
        tenant: &TenantFacts,
        rows: &[OutgoingRow],
    ) -> HashMap<i32, KafkaSender> {
        let mut senders = HashMap::new();
        for row in rows {
            let Entry::Vacant(vacant) = senders.entry(row.consumer_id) else { continue };
            let Some(emitter) = tenant.consumers.get(&row.consumer_id) else { continue };
            let Some(policy) = &emitter.policy else { continue };
            let config = host.kafka(&tenant.name, &emitter.name, policy);
            vacant.insert(KafkaSender::new(self, config));
        }
        senders
    }

    /// Forgets a producer that has failed for good, unless another one has taken its place.
    fn forget(&self, config: &ConsumerConfig, broken: &Arc<Producer>) {
        let mut known = self.known();
        let key = key_of(config);
        let is_same = known.get(&key).is_some_and(|cached| Arc::ptr_eq(&cached.producer, broken));
        let removed = if is_same { known.remove(&key) } else { None };
        drop(known);
        close(removed.into_iter().collect());
    }

    /// Closes the producers that nobody has asked for in this time.
    pub(crate) fn close_unused(&self, unused: Duration) {
        let mut known = self.known();
        let is_unused = |cached: &CachedProducer| {
            cached.used.elapsed() >= unused && Arc::strong_count(&cached.producer) == 1
        };
        let closed = known.extract_if(|_, cached| is_unused(cached)).map(|(_, it)| it).collect();
        drop(known);
        close(closed);
    }

    fn known(&self) -> MutexGuard<'_, HashMap<ProducerKey, CachedProducer>> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn key_of(config: &ConsumerConfig) -> ProducerKey {
    (config.tenant.clone(), config.connection_properties())
}

/// Drops producers on another thread: each waits for its own threads.
fn close(closed: Vec<CachedProducer>) {
    if !closed.is_empty() {
        tokio::task::spawn_blocking(move || drop(closed));
    }
}

/// What the messages of one consumer are sent to a topic with, for the time of a lease.
pub(crate) struct KafkaSender {
    config: ConsumerConfig,
    /// The producer, or why there is none. It is there until this is dropped.
    producer: Result<Option<Arc<Producer>>, ConsumerError>,
}

impl KafkaSender {
    /// Looks the producer up for the settings of a consumer.
    fn new(producers: &Producers, config: ConsumerConfig) -> Self {
        Self { producer: producers.of(&config).map(Some), config }
    }

    /// Sends a message to a topic.
    pub(crate) async fn send(&self, producers: &Producers, topic: &str, row: &OutgoingRow) -> Sent {
        let producer = match &self.producer {
            Ok(Some(producer)) => producer,
            Ok(None) => return Sent::Unsent,
            Err(error) => return Sent::away(OutgoingReason::NoClient, error.to_string()),
        };
        let headers = record_headers(row, &self.config.tenant, &self.config.consumer);
        let (key, payload) = (row.key.as_deref(), row.payload.as_deref());
        match producer.send_outgoing(topic, &NewRecord { key, headers: &headers, payload }).await {
            Ok(()) => Sent::Confirmed,
            Err(error) => {
                if matches!(error, ProduceError::Broken(_)) {
                    producers.forget(&self.config, producer);
                }
                Sent::of_kafka(error, row.attempt())
            }
        }
    }
}

impl Drop for KafkaSender {
    fn drop(&mut self) {
        // The last one of a producer that was forgotten meanwhile.
        let producer = self.producer.as_mut().ok().and_then(Option::take);
        if let (Some(producer), Ok(runtime)) =
            (producer.and_then(Arc::into_inner), Handle::try_current())
        {
            runtime.spawn_blocking(move || drop(producer));
        }
    }
}

#[cfg(test)]
mod tests {
    use oncebox_kafka::Timing;
    use oncebox_model::policy::Policy;

    use super::*;

    fn config(tenant: &str, property: &str) -> ConsumerConfig {
        let policy = Policy::parse("topics = ['t']\nack = 'after_commit'").unwrap();
        ConsumerConfig {
            tenant: tenant.to_owned(),
            consumer: "c".to_owned(),
            topics: policy.topics.clone(),
            kafka: policy.kafka.clone(),
            host_properties: BTreeMap::from([
                ("bootstrap.servers".to_owned(), "localhost:1".to_owned()),
                ("sasl.username".to_owned(), property.to_owned()),
            ]),
            timing: Timing::default(),
        }
    }

    // What could go wrong: two tenants, or two consumers with other rights, share a producer, or
    // each message makes a client of its own.
    #[tokio::test]
    async fn a_producer_is_that_of_a_tenant_and_its_rights() {
        let producers = Producers::default();
        let one = producers.of(&config("a", "me")).unwrap();
        assert!(Arc::ptr_eq(&one, &producers.of(&config("a", "me")).unwrap()));
        assert!(!Arc::ptr_eq(&one, &producers.of(&config("b", "me")).unwrap()));
        assert!(!Arc::ptr_eq(&one, &producers.of(&config("a", "you")).unwrap()));
        producers.forget(&config("b", "me"), &one);
        assert_eq!(producers.known().len(), 3, "another one has its place");
        producers.forget(&config("a", "me"), &one);
        assert_eq!(producers.known().len(), 2);
        producers.close_unused(Duration::from_secs(60));
        assert_eq!(producers.known().len(), 2);
        producers.close_unused(Duration::ZERO);
        assert_eq!(producers.known().len(), 0);
    }
}
