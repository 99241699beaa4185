//! What a consumer is told to do, as its owner writes it in TOML and as its row keeps it.

// Where id, event type, ordering key and version of a message are found.
mod source;
// What runs in its order.
mod order;
// How many messages share a transaction.
mod batch;
// When and how often a message that failed runs again.
mod retry;
// What handlers, and a consumer as a whole, may take.
mod limits;
// When what is open is too much.
mod alerts;
// What payloads have to be.
mod schemas;
// Compiling those schemas, off the threads that serve all.
mod apart;
// From a text to a policy, with everything that is wrong with it.
mod parse;
// What in a policy cannot work.
mod check;
// What of it reaches a native library.
mod native;
// A policy in sentences.
mod explain;
// The questions that are asked of an inbox, answered by a policy.
mod readiness;

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

pub use self::{
    alerts::{Alerts, WATCHED_MAX},
    apart::apart,
    batch::Batch,
    check::PolicyProblem,
    limits::{Limits, OF_CONSUMER},
    native::{TOPICS_MAX, group_fault, is_pattern, properties_fault, topic_fault, topics_fault},
    order::{Gap, Order, Sequence},
    parse::toml_error,
    readiness::{Answer, Standing},
    retry::{Jitter, Preset, Retry},
    schemas::{PayloadSchema, Schemas},
    source::{IdSource, Identity, KeySource, TypeSource, VersionSource},
};

/// The policy of one consumer. Unknown keys are refused.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, expecting = "a table with a policy; `policy_file` names a file")]
pub struct Policy {
    /// Topics to read.
    pub topics: Vec<String>,
    /// When the broker is told that a message is done. Chosen, never implied.
    pub ack: Ack,
    /// What runs in its order.
    #[serde(default, skip_serializing_if = "Order::is_none")]
    pub order: Order,
    /// Whether messages run in the sequence of the versions of their aggregates.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sequence: Option<Sequence>,
    /// Whether the inbox remembers what completed.
    #[serde(default)]
    pub dedup: Dedup,
    /// How long the inbox remembers a completed message.
    #[serde(default)]
    pub retention: Retention,
    /// Which rows keep payload and headers.
    #[serde(default)]
    pub payload: PayloadPolicy,
    /// What becomes of a known id that comes with another payload.
    #[serde(default)]
    pub collision: Collision,
    /// What becomes of a message that no deployment takes.
    #[serde(default)]
    pub no_route: NoRoute,
    /// How payloads are encoded.
    #[serde(default, skip_serializing_if = "WireFormat::is_plain")]
    pub wire_format: WireFormat,
    /// Where id, event type and ordering key are found.
    #[serde(default)]
    pub identity: Identity,
    /// What payloads have to be, by event type, also `orders.*` and `*`.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub schemas: BTreeMap<String, PayloadSchema>,
    /// Bounds of a transaction.
    #[serde(default)]
    pub batch: Batch,
    /// What happens after a failure.
    #[serde(default)]
    pub retry: Retry,
    /// What becomes of dead letters beside their rows.
    #[serde(default, skip_serializing_if = "DeadLetters::is_default")]
    pub dead_letters: DeadLetters,
    /// Whether offsets may be set back.
    #[serde(default, skip_serializing_if = "Replay::is_default")]
    pub replay: Replay,
    /// When messages wait for a version that fails too often.
    #[serde(default)]
    pub breaker: Breaker,
    /// Caps on one run of a handler.
    #[serde(default)]
    pub limits: Limits,
    /// From where on what is open is too much.
    #[serde(default, skip_serializing_if = "Alerts::is_default")]
    pub alerts: Alerts,
    /// How records are read.
    #[serde(default)]
    pub kafka: Kafka,
}

/// When the broker is told.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Ack {
    /// After the effect is committed; the broker's lag is the backlog.
    AfterCommit,
    /// After the message is stored; workers run it from the inbox under a lease.
    AfterInsert,
}

/// Whether deliveries are deduplicated.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Dedup {
    /// Every message is claimed in the inbox: its effect happens once.
    #[default]
    Inbox,
    /// No claim is written: a redelivered message has its effect again. For telemetry and for
    /// handlers that are idempotent by themselves. Failures are rows as ever.
    Off,
}

/// Retention classes; each has its own set of time partitions.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub enum Retention {
    /// Seven days.
    #[default]
    #[serde(rename = "7d")]
    SevenDays,
    /// Thirty days.
    #[serde(rename = "30d")]
    ThirtyDays,
    /// One year.
    #[serde(rename = "1y")]
    OneYear,
    /// For ever.
    #[serde(rename = "permanent")]
    Permanent,
}

impl Retention {
    /// The class's key in `oncebox.retention_class`.
    pub fn class(self) -> i16 {
        match self {
            Self::SevenDays => 1,
            Self::ThirtyDays => 2,
            Self::OneYear => 3,
            Self::Permanent => 4,
        }
    }

    /// How long a completed message is surely remembered; none for ever.
    pub fn days(self) -> Option<i64> {
        match self {
            Self::SevenDays => Some(7),
            Self::ThirtyDays => Some(30),
            Self::OneYear => Some(365),
            Self::Permanent => None,
        }
    }
}

/// Which rows keep payload and headers. A row that is still to be run always has them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PayloadPolicy {
    /// Rows that did not complete.
    #[default]
    Failed,
    /// Every row.
    All,
    /// No row once it is settled, but for a dead letter that was delivered again since.
    None,
}

/// What becomes of a known id with another payload.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Collision {
    /// It is kept as a parked row of its own, `<id>#<hash>`.
    #[default]
    Park,
    /// It is taken for a duplicate.
    Ignore,
}

/// What becomes of a message that no deployment takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum NoRoute {
    /// It is kept, and waits for a deployment and a person.
    #[default]
    Park,
    /// It is acked; its row says `skipped` and keeps no payload.
    Skip,
    /// It is a dead letter at once.
    Reject,
}

/// How payloads are encoded.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum WireFormat {
    /// As they are: bytes to the host, and JSON where something is looked for in them.
    #[default]
    Plain,
    /// By the schemas of a registry, whose id each begins with: Avro, Protobuf, JSON Schema. Where
    /// something is looked for, and to handlers, they are the JSON that this stands for.
    Confluent,
}

impl WireFormat {
    fn is_plain(&self) -> bool {
        *self == Self::Plain
    }
}

/// When messages wait for a version that fails too often. Each version has a breaker of its own on
/// each host. A failure is a trap, a limit, an error or no answer; what a handler decides, be it to
/// reject, to park or to be run again, is none.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Breaker {
    /// Off: messages of a version that fails are failed by it, one after the other.
    pub enabled: bool,
    /// It opens when more than this share of the first runs within the window failed; 1 to 99.
    pub failures_percent: u32,
    /// First runs within the window before it is judged; one that ended at its deadline stands for
    /// five.
    pub runs_min: u32,
    /// Milliseconds that are looked at.
    pub window_ms: u64,
    /// How long it stays open at first, before one message probes. It doubles with each probe that
    /// fails.
    pub pause_ms: u64,
    /// How long it stays open at most.
    pub pause_max_ms: u64,
}

impl Default for Breaker {
    fn default() -> Self {
        Self {
            enabled: true,
            failures_percent: 50,
            runs_min: 20,
            window_ms: 30_000,
            pause_ms: 5_000,
            pause_max_ms: 300_000,
        }
    }
}

/// What becomes of dead letters, and of parked messages, beside their rows.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct DeadLetters {
    /// The topic that each is copied to, with its headers and why it is one; none for no copies.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub topic: Option<String>,
}

impl DeadLetters {
    fn is_default(&self) -> bool {
        *self == Self::default()
    }
}

/// Whether what was read may be read again.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Replay {
    /// Whether `oncebox consumer seek` may set offsets back. Redeliveries by the brokers come all
    /// the same.
    pub allowed: bool,
    /// What becomes of a message that is older than `retention`, and not known: the inbox may have
    /// forgotten it.
    pub past_horizon: PastHorizon,
}

impl Default for Replay {
    fn default() -> Self {
        Self { allowed: true, past_horizon: PastHorizon::Run }
    }
}

/// What becomes of a message of which the inbox cannot know whether it ran.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PastHorizon {
    /// It runs: it is taken for one that comes for the first time.
    #[default]
    Run,
    /// It is parked, for a person who knows.
    Park,
}

impl Replay {
    fn is_default(&self) -> bool {
        *self == Self::default()
    }
}

/// How records are read.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Kafka {
    /// Group id; empty for `oncebox.<tenant>.<consumer>`.
    pub group: String,
    /// Records held per partition before it is paused; at least four transactions of
    /// `batch.messages_max`, so that the next ones fill while one runs.
    pub prefetch_messages: usize,
    /// Bytes held per partition before it is paused.
    pub prefetch_bytes: usize,
    /// Any property of librdkafka, over the host's own.
    pub properties: BTreeMap<String, String>,
}

impl Default for Kafka {
    fn default() -> Self {
        Self {
            group: String::new(),
            prefetch_messages: 512,
            prefetch_bytes: 8 << 20,
            properties: BTreeMap::new(),
        }
    }
}

impl Policy {
    /// How records are read, with a queue that batches of this policy do not run dry.
    pub fn reading(&self) -> Kafka {
        let prefetch_messages = self.kafka.prefetch_messages.max(4 * self.batch.messages_max);
        Kafka { prefetch_messages, ..self.kafka.clone() }
    }

    /// The Kafka group of a consumer with this policy.
    pub fn group(&self, tenant: &str, consumer: &str) -> String {
        match self.kafka.group.as_str() {
            "" => format!("oncebox.{tenant}.{consumer}"),
            group => group.to_owned(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    // What could go wrong: a key is added, and nobody can look it up.
    #[test]
    fn every_key_is_in_the_documentation() {
        const DOCS: &str = include_str!("../../../../docs/policy.md");
        let policy = "topics = ['t']\nack = 'after_commit'\norder = 'key'\nwire_format = \
            'confluent'\nsequence = { version = { header = 'v' }, first = 1 }\nretry = { preset = \
            'seed-002', age_max_ms = 1 }\ndead_letters = { topic = 'd' }\nreplay = { allowed = \
            false }\nlimits = { transactions_max = 1, messages_per_second = 1 }";
        let policy =
            serde_json::to_value(Policy::parse(policy).expect("a policy")).expect("a value");
        let mut keys = Vec::new();
        for (name, value) in policy.as_object().expect("a table") {
            match value.as_object() {
                Some(members) => {
                    keys.extend(members.keys().map(|member| format!("{name}.{member}")))
                }
                None => keys.push(name.clone()),
            }
        }
        assert!(keys.len() > 40, "{keys:?}");
        let missing: Vec<_> =
            keys.iter().filter(|key| !DOCS.contains(&format!("| `{key}` |"))).collect();
        assert!(missing.is_empty(), "{missing:?}");
    }
}
