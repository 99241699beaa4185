//! librdkafka's callbacks. They run on the poll thread, inside a poll. Each only sends an event to
//! the consumer's loop. A revocation also waits for the loop's answer that no batch of the
//! partitions runs any more.

use std::{
    sync::{
        atomic::{AtomicU64, Ordering},
        mpsc::sync_channel,
    },
    time::Duration,
};

use oncebox_model::hooks;
use rdkafka::{
    ClientContext, TopicPartitionList,
    config::RDKafkaLogLevel,
    consumer::{BaseConsumer, Consumer as _, ConsumerContext, RebalanceProtocol},
    error::{KafkaError, KafkaResult},
    types::RDKafkaRespErr,
};
use tokio::sync::mpsc;

use crate::{error::ConsumerError, metric::Labels, partition::Partition, poll_event::PollEvent};

/// The receiver of librdkafka's callbacks.
pub(crate) struct Context {
    labels: Labels,
    events: mpsc::Sender<PollEvent>,
    /// Number of rebalances so far. Changed only on the poll thread.
    generation: AtomicU64,
    /// The longest wait for the loop's answer to a revocation.
    patience: Duration,
}

impl Context {
    pub(crate) fn new(labels: Labels, events: mpsc::Sender<PollEvent>, patience: Duration) -> Self {
        Self { labels, events, generation: AtomicU64::new(0), patience }
    }

    /// Returns the number of rebalances so far.
    pub(crate) fn generation(&self) -> u64 {
        self.generation.load(Ordering::Acquire)
    }

    fn assigned(&self, consumer: &BaseConsumer<Self>, list: &TopicPartitionList) {
        let generation = self.generation.fetch_add(1, Ordering::AcqRel) + 1;
        let assigned = match consumer.rebalance_protocol() {
            RebalanceProtocol::Cooperative => consumer.incremental_assign(list),
            _ => consumer.assign(list),
        };
        if let Err(error) = assigned {
            return self.fatal("assign", &error);
        }
        // A pause outlives the assignment in which it was made.
        if let Err(error) = consumer.resume(list) {
            return self.fatal("resume", &error);
        }
        self.send(PollEvent::Assigned { generation, partitions: partitions(list) });
    }

    fn revoked(&self, consumer: &BaseConsumer<Self>, list: &TopicPartitionList) {
        hooks::point("kafka:revoke:before");
        self.generation.fetch_add(1, Ordering::AcqRel);
        let lost = consumer.assignment_lost();
        let (answer, answered) = sync_channel(1);
        self.send(PollEvent::Revoked { partitions: partitions(list), lost, answer });
        if let Err(std::sync::mpsc::RecvTimeoutError::Timeout) =
            answered.recv_timeout(self.patience)
        {
            tracing::error!(
                tenant = self.labels.tenant,
                consumer = self.labels.consumer,
                "partitions released without an answer from the consumer's loop"
            );
        }
        let unassigned = match consumer.rebalance_protocol() {
            RebalanceProtocol::Cooperative => consumer.incremental_unassign(list),
            _ => consumer.unassign(),
        };
        if let Err(error) = unassigned {
            self.fatal("unassign", &error);
        }
    }

    fn fatal(&self, what: &str, error: &KafkaError) {
        self.send(PollEvent::Fatal(ConsumerError::Fatal {
            text: format!("failed to {what} partitions: {error}"),
        }));
    }

    /// Sends an event to the loop. During shutdown the loop is gone, and the event is dropped.
    fn send(&self, event: PollEvent) {
        let _ = self.events.blocking_send(event);
    }
}

impl ConsumerContext for Context {
    fn rebalance(
        &self,
        consumer: &BaseConsumer<Self>,
        code: RDKafkaRespErr,
        list: &mut TopicPartitionList,
    ) {
        match code {
            RDKafkaRespErr::RD_KAFKA_RESP_ERR__ASSIGN_PARTITIONS => self.assigned(consumer, list),
            _ => self.revoked(consumer, list),
        }
    }

    fn commit_callback(&self, result: KafkaResult<()>, _: &TopicPartitionList) {
        use rdkafka::types::RDKafkaErrorCode::NoOffset;
        let Err(error) = result else { return };
        if error.rdkafka_error_code() == Some(NoOffset) {
            return;
        }
        self.labels.commit_error();
        let Labels { tenant, consumer } = &self.labels;
        tracing::warn!(tenant, consumer, %error, "offset commit failed; the next commit covers \
            it, or the records are redelivered");
    }
}

impl ClientContext for Context {
    fn log(&self, level: RDKafkaLogLevel, facility: &str, text: &str) {
        use RDKafkaLogLevel::{Alert, Critical, Debug, Emerg, Error, Info, Notice, Warning};
        let Labels { tenant, consumer } = &self.labels;
        match level {
            Emerg | Alert | Critical | Error | Warning => {
                tracing::warn!(target: "librdkafka", tenant, consumer, facility, "{text}");
            }
            Notice | Info => {
                tracing::info!(target: "librdkafka", tenant, consumer, facility, "{text}")
            }
            Debug => tracing::debug!(target: "librdkafka", tenant, consumer, facility, "{text}"),
        }
    }

    /// Logs the reason of an error. The poll returns the error too, and logs it there, but only
    /// this callback has the reason.
    fn error(&self, error: KafkaError, reason: &str) {
        let Labels { tenant, consumer } = &self.labels;
        tracing::debug!(target: "librdkafka", tenant, consumer, %error, "{reason}");
    }

    fn stats_raw(&self, _: &[u8]) {}
}

fn partitions(list: &TopicPartitionList) -> Vec<Partition> {
    list.elements()
        .iter()
        .map(|element| Partition { topic: element.topic().into(), number: element.partition() })
        .collect()
}
