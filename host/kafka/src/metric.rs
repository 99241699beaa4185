//! Metrics and their labels.

use metrics::{Counter, Gauge, Label, counter, gauge};

use crate::partition::Partition;

/// The tenant and consumer that a metric or a log line is about.
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

    /// Counts a rebalance by kind: `assigned`, `revoked`, `lost`.
    pub(crate) fn rebalance(&self, kind: &'static str) {
        let mut labels = self.consumer();
        labels.push(Label::from_static_parts("kind", kind));
        counter!("oncebox_kafka_rebalances_total", labels).increment(1);
    }

    /// Counts an error that librdkafka reported while reading.
    pub(crate) fn read_error(&self) {
        counter!("oncebox_kafka_read_errors_total", self.consumer()).increment(1);
    }

    /// Counts a commit that failed or was not answered in time.
    pub(crate) fn commit_error(&self) {
        counter!("oncebox_kafka_commit_errors_total", self.consumer()).increment(1);
    }

    /// Counts a partition whose topic is found to be another one of an old name.
    pub(crate) fn topic_made_again(&self, partition: &Partition) {
        counter!("oncebox_kafka_topic_made_again_total", self.of(partition)).increment(1);
    }

    /// Counts a partition whose database has lost commits, and that is read again from an earlier
    /// offset.
    pub(crate) fn rewound(&self, partition: &Partition) {
        counter!("oncebox_kafka_rewinds_total", self.of(partition)).increment(1);
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
            inbox_errors: counter!("oncebox_kafka_inbox_errors_total", labels.clone()),
            truncated_before: counter!("oncebox_kafka_offset_below_low_watermark_total", labels),
        }
    }
}

/// Metrics of one partition.
pub(crate) struct PartitionMeters {
    /// Records taken from the broker.
    pub(crate) read: Counter,
    /// Records whose offset was stored.
    pub(crate) acked: Counter,
    /// 1 while the partition is paused, else 0.
    pub(crate) paused: Gauge,
    /// High watermark minus the first offset that is not settled.
    pub(crate) lag: Gauge,
    /// Failures of the inbox.
    pub(crate) inbox_errors: Counter,
    /// Losses of records that the broker deleted before they were settled.
    pub(crate) truncated_before: Counter,
}

impl PartitionMeters {
    /// Ends the gauges. A metric cannot be removed; a host leaves out a gauge that is not a number.
    pub(crate) fn end_gauges(&self) {
        self.lag.set(f64::NAN);
        self.paused.set(f64::NAN);
    }
}
