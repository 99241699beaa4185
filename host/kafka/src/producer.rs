//! Writing to a topic, for copies of dead letters.

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

/// How long the brokers may take to have a record.
const TIMEOUT_MS: &str = "20000";
/// How long a full queue of the client is waited for.
const QUEUE: Duration = Duration::from_secs(10);
/// Bytes of a record; the brokers may take less.
const BYTES_MAX: &str = "134217728";

/// A record to write.
#[derive(Debug, Clone, Copy)]
pub struct NewRecord<'a> {
    /// Its key.
    pub key: Option<&'a [u8]>,
    /// Its headers.
    pub headers: &'a [(String, Vec<u8>)],
    /// Its payload.
    pub payload: Option<&'a [u8]>,
}

/// Why a record was not written.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ProduceError {
    /// It is larger than the brokers, or the topic, take.
    #[error("the record is larger than the brokers take")]
    TooLarge,
    /// The brokers do not take it, and would not another time.
    #[error("{0}")]
    Refused(String),
    /// The brokers do not have it, or do not say so.
    #[error("{0}")]
    Failed(String),
}

/// Writes to the brokers that a consumer reads from.
pub struct Producer(FutureProducer);

impl Producer {
    /// A producer with the rights of a consumer. It connects when there is something to write.
    pub fn new(config: &ConsumerConfig) -> Result<Self, ConsumerError> {
        let mut client = ClientConfig::new();
        // Properties of reading are said to be ignored, each time.
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

    /// Write records, all at once: what became of each.
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
