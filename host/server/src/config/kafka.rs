//! Settings of the brokers.

use std::collections::BTreeMap;

use serde::Deserialize;

/// `[kafka]`
#[derive(Clone, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct KafkaSettings {
    /// `bootstrap.servers` of every client.
    pub brokers: String,
    /// Idle time, in milliseconds, after which a consumer leaves its group until it has records to
    /// read; 0 for never.
    pub idle_after_ms: u64,
    /// Milliseconds between two checks that a consumer's inbox remembers for longer than its topics
    /// keep records; 0 for no checks.
    pub horizon_check_ms: u64,
    /// Any properties of librdkafka, for every consumer.
    pub properties: BTreeMap<String, String>,
}

impl Default for KafkaSettings {
    fn default() -> Self {
        Self {
            brokers: String::new(),
            idle_after_ms: 60_000,
            horizon_check_ms: 3_600_000,
            properties: BTreeMap::new(),
        }
    }
}

/// Values of properties may be passwords.
impl std::fmt::Debug for KafkaSettings {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let names: Vec<_> = self.properties.keys().collect();
        f.debug_struct("KafkaSettings")
            .field("brokers", &self.brokers)
            .field("idle_after_ms", &self.idle_after_ms)
            .field("horizon_check_ms", &self.horizon_check_ms)
            .field("properties", &names)
            .finish()
    }
}
