//! A producer, for copies of dead letters.

use std::time::Duration;

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
    /// A record that the brokers did not confirm in time, or that failed on its way.
    #[error("{0}")]
    Failed(String),
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
        let mut client = ClientConfig::new();
        // librdkafka would log each property of reading as ignored.
        client.set_log_level(RDKafkaLogLevel::Critical);
        for (name, value) in config.connection_properties() {
            client.set(name, value);
        }
        client
            .set("acks", "all")
            .set("message.timeout.ms", TIMEOUT_MS)
            .set("message.max.bytes", BYTES_MAX);
        client.set("queue.buffering.max.ms", "5");
        Ok(Self(
            client
                .create()
                .map_err(|error| ConsumerError::from_creation(error, &config.secrets()))?,
        ))
    }

    /// Writes records, all at once, and returns the result of each, in order.
    pub async fn send(
        &self,
        topic: &str,
        records: &[NewRecord<'_>],
    ) -> Vec<Result<(), ProduceError>> {
        join_all(records.iter().map(|record| self.send_one(topic, record))).await
    }

    async fn send_one(&self, topic: &str, new: &NewRecord<'_>) -> Result<(), ProduceError> {
        let mut headers = OwnedHeaders::new_with_capacity(new.headers.len());
        for (key, value) in new.headers {
            headers = headers.insert(Header { key, value: Some(value) });
        }
        let mut record = FutureRecord::<[u8], [u8]>::to(topic).headers(headers);
        record.key = new.key;
        record.payload = new.payload;
        match self.0.send(record, QUEUE).await {
            Ok(_) => Ok(()),
            Err((
                KafkaError::MessageProduction(
                    RDKafkaErrorCode::MessageSizeTooLarge | RDKafkaErrorCode::InvalidMessageSize,
                ),
                _,
            )) => Err(ProduceError::TooLarge),
            Err((
                error @ KafkaError::MessageProduction(
                    RDKafkaErrorCode::InvalidMessage
                    | RDKafkaErrorCode::InvalidRecord
                    | RDKafkaErrorCode::PolicyViolation,
                ),
                _,
            )) => Err(ProduceError::Refused(error.to_string())),
            Err((error, _)) => Err(ProduceError::Failed(error.to_string())),
        }
    }
}
