//! Metrics, and what they are labelled with.

use metrics::{Counter, Gauge, Label, counter, gauge};

use crate::flow::Partition;

/// Who a metric or a log line is about.
#[derive(Debug, Clone)]
pub(crate) struct Labels {
    pub(crate) tenant: String,
    pub(crate) consumer: String,
}

impl Labels {
    fn consumer(&self) -> Vec<Label> {
        vec![
            Label::new("tenant", self.tenant.clone()),
            Label::new("consumer", self.consumer.clone()),
        ]
    }

    /// Rebalances by kind: `assigned`, `revoked`, `lost`.
    pub(crate) fn rebalance(&self, kind: &'static str) {
        let mut labels = self.consumer();
        labels.push(Label::from_static_parts("kind", kind));
        counter!("oncebox_kafka_rebalances_total", labels).increment(1);
    }

    /// Errors that librdkafka reported and the loop went on from.
    pub(crate) fn read_error(&self) {
        counter!("oncebox_kafka_read_errors_total", self.consumer()).increment(1);
    }

    /// Commits that failed or did not come back in time.
    pub(crate) fn commit_error(&self) {
        counter!("oncebox_kafka_commit_errors_total", self.consumer()).increment(1);
    }

    /// Times that a partition's topic was found to be another one of the same name.
    pub(crate) fn topic_made_again(&self, partition: &Partition) {
        counter!("oncebox_kafka_topic_made_again_total", self.of(partition)).increment(1);
    }

    fn of(&self, partition: &Partition) -> Vec<Label> {
        let mut labels = self.consumer();
        labels.push(Label::new("topic", partition.topic.to_string()));
        labels.push(Label::new("partition", partition.number.to_string()));
        labels
    }

    pub(crate) fn partition(&self, partition: &Partition) -> PartitionMeters {
        let labels = self.of(partition);
        PartitionMeters {
            read: counter!("oncebox_kafka_records_read_total", labels.clone()),
            acked: counter!("oncebox_kafka_records_acked_total", labels.clone()),
            paused: gauge!("oncebox_kafka_partition_paused", labels.clone()),
            lag: gauge!("oncebox_kafka_lag_records", labels.clone()),
            sink_errors: counter!("oncebox_kafka_sink_errors_total", labels.clone()),
            head_lost: counter!("oncebox_kafka_offset_below_low_watermark_total", labels),
        }
    }
}

/// Metrics of one partition.
pub(crate) struct PartitionMeters {
    /// Records taken from the broker.
    pub(crate) read: Counter,
    /// Records whose offset was stored.
    pub(crate) acked: Counter,
    /// 1 while the partition is paused.
    pub(crate) paused: Gauge,
    /// High watermark minus the first offset that is not settled.
    pub(crate) lag: Gauge,
    /// Times that the sink failed.
    pub(crate) sink_errors: Counter,
    /// Times that records were deleted by the broker before they were settled.
    pub(crate) head_lost: Counter,
}

impl PartitionMeters {
    /// Ends the gauges. A metric cannot be taken back; one that is not a number is left out of what
    /// a host tells.
    pub(crate) fn end_gauges(&self) {
        self.lag.set(f64::NAN);
        self.paused.set(f64::NAN);
    }
}
