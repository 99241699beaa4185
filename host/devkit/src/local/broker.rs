//! librdkafka's mock cluster as an embedded broker that any Kafka client can reach.
//!
//! Fit for development, with limits to know: nothing is on disk; a partition keeps 5 MiB or
//! 100,000 batches and silently drops its head beyond that, so give topics 16 partitions;
//! a topic that a client asks for appears with four partitions; there is no admin API; the
//! port is a free one on 127.0.0.1; a rebalance with a second member takes 5 to 10 seconds.

use std::ptr::NonNull;

use anyhow::Context;
use rdkafka::ClientConfig;
use rdkafka::bindings::{
    rd_kafka_handle_mock_cluster, rd_kafka_mock_cluster_t,
    rd_kafka_mock_group_initial_rebalance_delay_ms,
};
use rdkafka::mocking::MockCluster;
use rdkafka::producer::{BaseProducer, DefaultProducerContext, Producer};

/// Time in milliseconds that a new group waits for more members. The default of 3 s would be the
/// longest part of a first run.
const INITIAL_REBALANCE_DELAY_MS: i32 = 100;

/// A broker inside this process; it ends when this is dropped, and its data with it.
pub struct MockBroker {
    /// The cluster lives inside this client and as long as it; nothing is sent with it.
    client: BaseProducer,
    bootstrap: String,
}

impl MockBroker {
    /// Starts a cluster of one broker, in about a millisecond.
    pub fn start() -> anyhow::Result<Self> {
        let mut config = ClientConfig::new();
        config.set("test.mock.num.brokers", "1").set("client.id", "embedded-broker");
        let client: BaseProducer =
            config.create().context("failed to start the embedded broker")?;
        let cluster = raw_cluster(&client)?;
        // SAFETY: `cluster` is the live cluster inside `client`.
        unsafe {
            rd_kafka_mock_group_initial_rebalance_delay_ms(
                cluster.as_ptr(),
                INITIAL_REBALANCE_DELAY_MS,
            )
        };
        let bootstrap = mock_cluster(&client)?.bootstrap_servers();
        Ok(Self { client, bootstrap })
    }

    /// Returns the broker's `host:port`, for any client's `bootstrap.servers`.
    pub fn bootstrap(&self) -> &str {
        &self.bootstrap
    }

    /// Creates a topic. One that exists is an error: its partitions cannot be changed.
    pub fn create_topic(&self, name: &str, partitions: i32) -> anyhow::Result<()> {
        let created = mock_cluster(&self.client)?.create_topic(name, partitions, 1);
        created.with_context(|| format!("failed to create the topic `{name}`"))
    }
}

fn mock_cluster(client: &BaseProducer) -> anyhow::Result<MockCluster<'_, DefaultProducerContext>> {
    client.client().mock_cluster().context("the client has no mock cluster")
}

/// Returns a pointer to the mock cluster of a client. The safe API has no call for the rebalance
/// delay.
fn raw_cluster(client: &BaseProducer) -> anyhow::Result<NonNull<rd_kafka_mock_cluster_t>> {
    // SAFETY: `native_ptr` is a live client; the call only reads a field of it.
    let cluster = unsafe { rd_kafka_handle_mock_cluster(client.client().native_ptr()) };
    NonNull::new(cluster).context("the client has no mock cluster")
}
