//! Producers: of copies of dead letters, and of outgoing messages.
//!
//! The producer of outgoing messages is idempotent: the brokers drop what librdkafka sends twice,
//! and keep the order of a partition while it does. That holds within one producer. A record that a
//! process sends again after it was told nothing is another record.

use std::{collections::BTreeMap, time::Duration};

use futures::future::join_all;
use rdkafka::{
    ClientConfig,
    config::RDKafkaLogLevel,
    error::KafkaError,
    message::{Header, OwnedHeaders},
    producer::{FutureProducer, FutureRecord},
    types::RDKafkaErrorCode,
};

use crate::{config::ConsumerConfig, error::ConsumerError};

/// The longest time until the brokers have stored a record, in milliseconds.
const TIMEOUT_MS: &str = "20000";
/// The longest wait for room in the client's queue.
const QUEUE: Duration = Duration::from_secs(10);
/// The largest record, in bytes; the brokers may accept less.
const BYTES_MAX: &str = "134217728";
/// The longest time until the brokers have stored an outgoing message, in milliseconds, and the
/// longest wait for room in the client's queue. Together they end well before the lease of a relay.
const OUTGOING_TIMEOUT_MS: &str = "15000";
const OUTGOING_QUEUE: Duration = Duration::from_secs(2);
/// The longest time for which a topic may be unknown before the client says so, in milliseconds. A
/// topic that was just created is not known everywhere at once.
const OUTGOING_UNKNOWN_MS: &str = "5000";
/// The memory of a client for outgoing messages that are under way, in kilobytes.
const OUTGOING_QUEUE_KB: &str = "65536";

/// The longest time from the call of [`Producer::send_outgoing`] to its answer.
pub const OUTGOING_MAX: Duration = Duration::from_secs(18);

/// A record to write.
#[derive(Debug, Clone, Copy)]
pub struct NewRecord<'a> {
    /// The record's key.
    pub key: Option<&'a [u8]>,
    /// The record's headers.
    pub headers: &'a [(String, Vec<u8>)],
    /// The record's payload.
    pub payload: Option<&'a [u8]>,
}

/// The reason why a record was not written.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ProduceError {
    /// A record that is larger than the brokers or the topic accept.
    #[error("the record is larger than the brokers take")]
    TooLarge,
    /// A record that the brokers refuse, and would refuse again.
    #[error("{0}")]
    Refused(String),
    /// A topic that the brokers do not know.
    #[error("{0}")]
    UnknownTopic(String),
    /// A topic that this client has no right to write to.
    #[error("{0}")]
    NoRight(String),
    /// A record that did not leave, since no broker answers, or none accepts this client.
    #[error("{0}")]
    Away(String),
    /// A record that the brokers did not confirm in time. It may have arrived.
    #[error("{0}")]
    Unconfirmed(String),
    /// A record of a client that has failed for good. Another client can send it again.
    #[error("{0}")]
    Broken(String),
    /// A record that failed on its way for another reason.
    #[error("{0}")]
    Failed(String),
}

impl ProduceError {
    /// Returns whether the brokers refuse the record itself, and would refuse it again.
    pub fn is_of_record(&self) -> bool {
        matches!(self, Self::TooLarge | Self::Refused(_))
    }

    /// Translates librdkafka's error.
    fn of(error: &KafkaError) -> Self {
        use RDKafkaErrorCode as Code;
        let text = error.to_string();
        let Some(code) = error.rdkafka_error_code() else { return Self::Failed(text) };
        match code {
            Code::MessageSizeTooLarge | Code::InvalidMessageSize => Self::TooLarge,
            Code::InvalidMessage | Code::InvalidRecord | Code::PolicyViolation => {
                Self::Refused(text)
            }
            Code::UnknownTopic | Code::UnknownTopicOrPartition | Code::InvalidTopic => {
                Self::UnknownTopic(text)
            }
            Code::TopicAuthorizationFailed => Self::NoRight(text),
            Code::AllBrokersDown
            | Code::Resolve
            | Code::SSL
            | Code::Authentication
            | Code::SaslAuthenticationFailed
            | Code::UnsupportedSASLMechanism
            | Code::ClusterAuthorizationFailed
            | Code::QueueFull => Self::Away(text),
            Code::MessageTimedOut
            | Code::RequestTimedOut
            | Code::OperationTimedOut
            | Code::BrokerTransportFailure => Self::Unconfirmed(text),
            Code::Fatal
            | Code::Fenced
            | Code::GaplessGuarantee
            | Code::OutOfOrderSequenceNumber
            | Code::InvalidProducerEpoch
            | Code::UnknownProducerId
            | Code::PurgeQueue
            | Code::PurgeInflight
            | Code::DestroyBroker => Self::Broken(text),
            _ => Self::Failed(text),
        }
    }
}

/// A producer for the brokers that a consumer reads from.
pub struct Producer(FutureProducer);

impl Producer {
    /// Makes a producer with the rights of a consumer. It connects with the first record.
    ///
    /// # Errors
    ///
    /// A [`ConsumerError`] when librdkafka refuses a property.
    pub fn new(config: &ConsumerConfig) -> Result<Self, ConsumerError> {
        let settings = [
            ("acks", "all"),
            ("message.timeout.ms", TIMEOUT_MS),
            ("message.max.bytes", BYTES_MAX),
            ("queue.buffering.max.ms", "5"),
        ];
        Self::with(config.connection_properties(), &config.secrets(), &settings)
    }

    /// Makes an idempotent producer of outgoing messages, with the rights of a consumer. It
    /// connects with the first record.
    ///
    /// # Errors
    ///
    /// A [`ConsumerError`] where the configuration would reach into the host, or librdkafka refuses
    /// a property.
    pub fn of_outgoing(config: &ConsumerConfig) -> Result<Self, ConsumerError> {
        config.check()?;
        Self::with(config.connection_properties(), &config.secrets(), &OUTGOING)
    }

    fn with(
        connection: BTreeMap<String, String>,
        secrets: &[String],
        settings: &[(&str, &str)],
    ) -> Result<Self, ConsumerError> {
        let mut client = ClientConfig::new();
        // librdkafka would log each property of reading as ignored.
        client.set_log_level(RDKafkaLogLevel::Critical);
        for (name, value) in connection {
            client.set(name, value);
        }
        for (name, value) in settings {
            client.set(*name, *value);
        }
        Ok(Self(client.create().map_err(|error| ConsumerError::from_creation(error, secrets))?))
    }

    /// Writes records, all at once, and returns the result of each, in order.
    pub async fn send(
        &self,
        topic: &str,
        records: &[NewRecord<'_>],
    ) -> Vec<Result<(), ProduceError>> {
        join_all(records.iter().map(|record| self.send_one(topic, record))).await
    }

    /// Writes an outgoing message, and returns once the brokers have stored it, within
    /// [`OUTGOING_MAX`].
    ///
    /// # Errors
    ///
    /// A [`ProduceError`] where they did not, or did not say so in time.
    pub async fn send_outgoing(
        &self,
        topic: &str,
        record: &NewRecord<'_>,
    ) -> Result<(), ProduceError> {
        let sent = self.0.send(future_record(topic, record), OUTGOING_QUEUE).await;
        sent.map(drop).map_err(|(error, _)| ProduceError::of(&error))
    }

    async fn send_one(&self, topic: &str, new: &NewRecord<'_>) -> Result<(), ProduceError> {
        let sent = self.0.send(future_record(topic, new), QUEUE).await;
        sent.map(drop).map_err(|(error, _)| ProduceError::of(&error))
    }
}

/// The settings of a producer of outgoing messages, over those of its connection.
const OUTGOING: [(&str, &str); 7] = [
    ("enable.idempotence", "true"),
    ("acks", "all"),
    ("message.timeout.ms", OUTGOING_TIMEOUT_MS),
    ("message.max.bytes", BYTES_MAX),
    ("topic.metadata.propagation.max.ms", OUTGOING_UNKNOWN_MS),
    ("queue.buffering.max.kbytes", OUTGOING_QUEUE_KB),
    // The messages of a lease come together, so there is little to wait for.
    ("queue.buffering.max.ms", "2"),
];

fn future_record<'a>(topic: &'a str, new: &NewRecord<'a>) -> FutureRecord<'a, [u8], [u8]> {
    let mut headers = OwnedHeaders::new_with_capacity(new.headers.len());
    for (key, value) in new.headers {
        headers = headers.insert(Header { key, value: Some(value) });
    }
    let mut record = FutureRecord::<[u8], [u8]>::to(topic).headers(headers);
    record.key = new.key;
    record.payload = new.payload;
    record
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tests::support::config;

    fn of(code: RDKafkaErrorCode) -> ProduceError {
        ProduceError::of(&KafkaError::MessageProduction(code))
    }

    // What could go wrong: a record that can never be stored is sent for ever, or one that the
    // brokers would take tomorrow is given up.
    #[test]
    fn an_error_says_whether_it_is_of_the_record_the_topic_or_the_brokers() {
        use RDKafkaErrorCode as Code;
        assert_eq!(of(Code::MessageSizeTooLarge), ProduceError::TooLarge);
        for code in [Code::InvalidRecord, Code::PolicyViolation] {
            assert!(matches!(of(code), ProduceError::Refused(_)), "{code:?}");
            assert!(of(code).is_of_record(), "{code:?}");
        }
        for code in [Code::UnknownTopic, Code::UnknownTopicOrPartition] {
            assert!(matches!(of(code), ProduceError::UnknownTopic(_)), "{code:?}");
        }
        assert!(matches!(of(Code::TopicAuthorizationFailed), ProduceError::NoRight(_)));
        for code in [Code::AllBrokersDown, Code::SaslAuthenticationFailed, Code::QueueFull] {
            assert!(matches!(of(code), ProduceError::Away(_)), "{code:?}");
        }
        for code in [Code::MessageTimedOut, Code::BrokerTransportFailure] {
            assert!(matches!(of(code), ProduceError::Unconfirmed(_)), "{code:?}");
        }
        assert!(matches!(of(Code::Fatal), ProduceError::Broken(_)));
        assert!(matches!(of(Code::NotEnoughReplicas), ProduceError::Failed(_)));
        assert!(matches!(ProduceError::of(&KafkaError::Canceled), ProduceError::Failed(_)));
        for other in [of(Code::UnknownTopic), of(Code::Fatal), of(Code::NotEnoughReplicas)] {
            assert!(!other.is_of_record(), "{other}");
        }
    }

    // What could go wrong: librdkafka refuses the settings together, which would show with the
    // first message only, or a property of a tenant takes the idempotence away.
    #[test]
    fn a_producer_of_outgoing_messages_is_made() {
        let mut config = config("localhost:1", "t", "c", "topic");
        config.kafka.properties.insert("client.rack".to_owned(), "a".to_owned());
        assert!(Producer::of_outgoing(&config).is_ok());
        config.kafka.properties.insert("acks".to_owned(), "0".to_owned());
        let mut client = ClientConfig::new();
        for (name, value) in config.connection_properties() {
            client.set(name, value);
        }
        for (name, value) in OUTGOING {
            client.set(name, value);
        }
        assert_eq!(
            (client.get("acks"), client.get("enable.idempotence")),
            (Some("all"), Some("true"))
        );
        config.kafka.properties.insert("plugin.library.paths".to_owned(), "x".to_owned());
        assert!(Producer::of_outgoing(&config).is_err(), "it reaches into the host");
    }

    #[test]
    fn a_send_ends_before_a_lease_does() {
        let timeout = OUTGOING_TIMEOUT_MS.parse().map(Duration::from_millis);
        assert!(timeout.is_ok_and(|timeout| timeout + OUTGOING_QUEUE < OUTGOING_MAX));
    }
}
