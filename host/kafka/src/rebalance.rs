//! librdkafka's callbacks. They run on the poll thread, inside a poll; each only turns
//! what happened into an event for the consumer's loop and, when partitions are taken
//! away, waits for the answer that nothing of them runs any more.

use std::{
    sync::{
        atomic::{AtomicU64, Ordering},
        mpsc::{SyncSender, sync_channel},
    },
    time::Duration,
};

use oncebox_model::{hooks, record::Record};
use rdkafka::{
    ClientContext, TopicPartitionList,
    config::RDKafkaLogLevel,
    consumer::{BaseConsumer, Consumer as _, ConsumerContext, RebalanceProtocol},
    error::{KafkaError, KafkaResult},
    types::RDKafkaRespErr,
};
use tokio::sync::mpsc;

use crate::{error::ConsumerError, flow::Partition, metric::Labels};

/// Everything that the poll thread has to say to the consumer's loop, in order.
pub(crate) enum Event {
    /// Records, in the order of their partitions. They were read when `generation`
    /// rebalances had happened, and mean nothing to a later assignment.
    Records { generation: u64, records: Vec<Record> },
    /// Partitions are ours from now on.
    Assigned { generation: u64, partitions: Vec<Partition> },
    /// Partitions are ours no longer once `answer` is given. If `lost`, they already
    /// belong to somebody else.
    Revoked { partitions: Vec<Partition>, lost: bool, answer: SyncSender<()> },
    /// The client is of no use any more.
    Fatal(ConsumerError),
}

/// What librdkafka calls back.
pub(crate) struct Context {
    labels: Labels,
    events: mpsc::Sender<Event>,
    /// Rebalances so far. Changed only on the poll thread.
    generation: AtomicU64,
    /// Upper bound for giving partitions up.
    patience: Duration,
}

impl Context {
    pub(crate) fn new(labels: Labels, events: mpsc::Sender<Event>, patience: Duration) -> Self {
        Self { labels, events, generation: AtomicU64::new(0), patience }
    }

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
        // A pause outlives the assignment it was made in.
        if let Err(error) = consumer.resume(list) {
            return self.fatal("resume", &error);
        }
        self.send(Event::Assigned { generation, partitions: partitions(list) });
    }

    fn revoked(&self, consumer: &BaseConsumer<Self>, list: &TopicPartitionList) {
        hooks::point("kafka:revoke:before");
        self.generation.fetch_add(1, Ordering::AcqRel);
        let lost = consumer.assignment_lost();
        let (answer, answered) = sync_channel(1);
        self.send(Event::Revoked { partitions: partitions(list), lost, answer });
        if let Err(std::sync::mpsc::RecvTimeoutError::Timeout) =
            answered.recv_timeout(self.patience)
        {
            tracing::error!(
                tenant = self.labels.tenant,
                consumer = self.labels.consumer,
                "partitions are given up without an answer from the consumer's loop"
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
        self.send(Event::Fatal(ConsumerError::Fatal {
            text: format!("failed to {what} partitions: {error}"),
        }));
    }

    /// The loop is gone during shutdown; then nobody needs to know.
    fn send(&self, event: Event) {
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
        tracing::warn!(tenant, consumer, %error, "a commit of offsets failed; the next one covers \
            it, or the records come again");
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

    /// The same error comes out of the poll as well, where it is logged; the reason
    /// comes only here.
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
