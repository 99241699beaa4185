//! The poll thread: reads records and serves librdkafka's callbacks. It is a thread and not a task,
//! because a callback waits for workers that run on the runtime.

use std::{sync::Arc, time::Duration};

use oncebox_model::record::Record;
use rdkafka::{
    Message as _,
    consumer::Consumer as _,
    error::KafkaError,
    message::{BorrowedMessage, Headers as _},
    types::RDKafkaErrorCode,
};
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

use crate::{
    client::Client, error::ConsumerError, metric::Labels, pause::PauseList, poll_event::PollEvent,
};

/// The most records of one batch.
pub(crate) const BATCH_MESSAGES: usize = 128;
/// Size of a batch, in bytes; the batch ends with the record that reaches it.
const BATCH_BYTES: usize = 1 << 20;
/// The most batches that wait for the loop.
pub(crate) const BATCHES_WAITING: usize = 2;
/// The longest wait of one poll, and so the longest delay of a stop.
const WAIT: Duration = Duration::from_millis(50);

/// The state of the poll thread.
pub(crate) struct Poller {
    pub(crate) client: Arc<Client>,
    pub(crate) events: mpsc::Sender<PollEvent>,
    pub(crate) stop: CancellationToken,
    pub(crate) labels: Labels,
    pub(crate) pauses: Arc<PauseList>,
    /// The names of the topics seen so far, shared by their records.
    pub(crate) topics: Vec<Arc<str>>,
}

impl Poller {
    /// Reads until the loop stops it or is gone, or until the client is dead; then leaves the
    /// group.
    pub(crate) fn run(mut self) {
        while !self.stop.is_cancelled() {
            self.pauses.pause_listed(&self.client, &self.labels);
            let (generation, records) = self.read();
            if records.is_empty() {
                continue;
            }
            if self.events.blocking_send(PollEvent::Records { generation, records }).is_err() {
                break;
            }
        }
        self.leave();
    }

    /// Reads one batch and returns its generation with it. A rebalance ends the batch, since a poll
    /// that serves one returns nothing; so all of its records are of one generation.
    fn read(&mut self) -> (u64, Vec<Record>) {
        let client = Arc::clone(&self.client);
        let (mut records, mut bytes, mut generation) = (Vec::new(), 0, 0);
        let mut wait = WAIT;
        while records.len() < BATCH_MESSAGES && bytes < BATCH_BYTES {
            let Some(polled) = client.consumer.poll(wait) else { break };
            match polled {
                Ok(message) => {
                    let record = self.record(&message);
                    bytes += record.size();
                    records.push(record);
                }
                Err(error) => {
                    self.failed(&error);
                    break;
                }
            }
            generation = client.consumer.context().generation();
            wait = Duration::ZERO;
        }
        (generation, records)
    }

    /// Handles an error of a poll. librdkafka recovers by itself from errors that are not fatal.
    fn failed(&self, error: &KafkaError) {
        self.labels.read_error();
        let Labels { tenant, consumer } = &self.labels;
        match error {
            KafkaError::MessageConsumptionFatal(_) => {
                let text = error.to_string();
                self.stop.cancel();
                let _ = self.events.blocking_send(PollEvent::Fatal(ConsumerError::Fatal { text }));
            }
            // librdkafka would repeat the request for ever, and the consumer would look healthy.
            KafkaError::MessageConsumption(
                RDKafkaErrorCode::TopicAuthorizationFailed
                | RDKafkaErrorCode::GroupAuthorizationFailed
                | RDKafkaErrorCode::ClusterAuthorizationFailed,
            ) => {
                let text = error.to_string();
                self.stop.cancel();
                let _ =
                    self.events.blocking_send(PollEvent::Fatal(ConsumerError::Refused { text }));
            }
            // librdkafka's own log has these errors, without the repetitions.
            KafkaError::MessageConsumption(RDKafkaErrorCode::BrokerTransportFailure) => {
                tracing::debug!(tenant, consumer, %error, "read error reported; reading \
                    continues");
            }
            _ => {
                tracing::warn!(tenant, consumer, %error, "read error reported; reading continues")
            }
        }
    }

    /// Copies a message out of librdkafka's memory. The worker adds the topic's id.
    fn record(&mut self, message: &BorrowedMessage<'_>) -> Record {
        let headers = message.headers().map_or_else(Vec::new, |headers| {
            headers
                .iter()
                .map(|header| {
                    (header.key.to_owned(), header.value.map_or_else(Vec::new, <[u8]>::to_vec))
                })
                .collect()
        });
        Record {
            topic: self.topic(message.topic()),
            topic_id: None,
            partition: message.partition(),
            offset: message.offset(),
            timestamp_ms: message.timestamp().to_millis().unwrap_or(0),
            key: message.key().map(<[u8]>::to_vec),
            headers,
            payload: message.payload().map(<[u8]>::to_vec),
        }
    }

    /// Returns the topic's name, shared by all of its records.
    fn topic(&mut self, name: &str) -> Arc<str> {
        if let Some(known) = self.topics.iter().find(|known| &***known == name) {
            return Arc::clone(known);
        }
        let topic: Arc<str> = name.into();
        self.topics.push(Arc::clone(&topic));
        topic
    }

    /// Leaves the group by closing the client. If a worker did not end in time and still holds the
    /// client, this closes nothing. The member then stays, without polls, until the worker drops
    /// the client.
    fn leave(self) {
        let Err(client) = Arc::try_unwrap(self.client) else { return };
        if let Err(error) = client.consumer.close_queue() {
            let Labels { tenant, consumer } = &self.labels;
            tracing::warn!(tenant, consumer, %error, "group leave failed; the broker removes the \
                member after the session timeout");
            return;
        }
        while !client.consumer.closed() {
            client.consumer.poll(WAIT);
        }
    }
}
