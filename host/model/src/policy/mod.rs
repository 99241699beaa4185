//! The policy of a consumer, as its owner writes it in TOML and as its row keeps it.

// The sources of a message's id, event type, ordering key and version.
mod source;
// The parts of a message that operators see masked.
mod masking;
// The form of the rows of completed messages.
mod light;
// The messages that run in order.
mod order;
// The bounds of a transaction.
mod batch;
// The retries of a message that failed.
mod retry;
// The limits of handlers, and of a consumer as a whole.
mod limits;
// The bounds at which open messages become an alert.
mod alerts;
// The rules for messages over HTTP.
mod ingress;
// The rules for messages that handlers send.
mod outgoing;
// The rules for reading records again, and for replays.
mod replay;
// The schemas of payloads.
mod schemas;
// The references of messages to their payloads.
mod reference;
// The compilation of those schemas, off the threads that serve all tenants.
mod apart;
// From a text to a policy, with everything that is wrong with it.
mod parse;
// The checks of a policy.
mod check;
// The parts of a policy that reach a native library.
mod native;
// A policy in sentences.
mod explain;
// The questions to ask of an inbox, answered by a policy.
mod readiness;
// The times for which an inbox can remember.
mod retention;
// The effects outside the database, as the owner declares them.
mod effects;
// The factors that choose a retention, beside the brokers.
mod factors;
// The time for which topics keep records.
mod topic_retention;
// The inputs of the proof below.
mod horizon_input;
// The proof that the inbox remembers for long enough.
mod horizon;
// The raise of the memory of a new consumer to what the proof needs.
mod raise;

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

pub(crate) use self::native::{is_topic, shown};
pub use self::{
    alerts::{Alerts, WATCHED_MAX},
    apart::apart,
    batch::{BATCH_MESSAGES_MAX, Batch},
    check::PolicyProblem,
    effects::{Effects, OutsideEffects},
    factors::{EffectRisk, Factors, MARGIN},
    horizon::{Horizon, HorizonVerdict, MemoryFacts, Redelivery},
    horizon_input::{HorizonInput, RetentionFactor, TimeSpan},
    ingress::{
        INGRESS_TOPIC, INGRESS_TYPE_HEADER, IngressPolicy, PUBLIC_PREFIX, SYMMETRIC_PREFIX,
        SecretFault, Verification,
    },
    light::{LightRows, RowForm},
    limits::{Limits, OF_CONSUMER},
    masking::{Masking, UnmaskRole},
    native::{TOPICS_MAX, group_fault, is_pattern, properties_fault, topic_fault, topics_fault},
    order::{Gap, Order, Sequence},
    outgoing::{OnParked, OutgoingPolicy},
    parse::toml_error,
    raise::{HorizonRule, MemoryRaise},
    readiness::{ReadinessAnswer, ReadinessVerdict},
    reference::{ReferencePolicy, ReferenceSource},
    replay::{Replay, ReplayEmit, ReplayKind},
    retention::Retention,
    retry::{Jitter, Preset, Retry},
    schemas::{PayloadSchema, Schemas},
    source::{IdSource, IdentityPolicy, KeySource, TypeSource, VersionSource},
    topic_retention::{BrokerRetention, TopicRetention, TopicSettings},
};

/// The policy of one consumer. Unknown keys are refused.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, expecting = "a table with a policy; `policy_file` names a file")]
pub struct Policy {
    /// Topics to read.
    pub topics: Vec<String>,
    /// Point at which the host acks a message to the broker. Chosen, never implied.
    pub ack: Ack,
    /// Messages that run in order.
    #[serde(default, skip_serializing_if = "Order::is_none")]
    pub order: Order,
    /// Sequence of versions that messages of an aggregate run in; none for no sequence.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sequence: Option<Sequence>,
    /// Deduplication by the inbox.
    #[serde(default)]
    pub dedup: Dedup,
    /// Form of the rows of completed messages.
    #[serde(default, skip_serializing_if = "RowForm::is_full")]
    pub inbox: RowForm,
    /// What light rows keep beside what all of them do.
    #[serde(default, skip_serializing_if = "LightRows::is_default")]
    pub light: LightRows,
    /// Time for which the inbox remembers a completed message.
    #[serde(default)]
    pub retention: Retention,
    /// Factors that `retention` is compared with, beside the brokers.
    #[serde(default, skip_serializing_if = "Factors::is_default")]
    pub factors: Factors,
    /// Effects outside the database, as the owner declares them.
    #[serde(default, skip_serializing_if = "Effects::is_default")]
    pub effects: Effects,
    /// Rows that keep payload and headers.
    #[serde(default)]
    pub payload: PayloadPolicy,
    /// Parts of a message that are masked where it is shown.
    #[serde(default, skip_serializing_if = "Masking::is_default")]
    pub masking: Masking,
    /// Treatment of a known id that comes with another payload; none for the default of the rows'
    /// form. See [`Policy::collision`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub collision: Option<Collision>,
    /// Treatment of a message that no deployment takes.
    #[serde(default)]
    pub no_route: NoRoute,
    /// Encoding of payloads.
    #[serde(default, skip_serializing_if = "WireFormat::is_plain")]
    pub wire_format: WireFormat,
    /// Sources of id, event type and ordering key.
    #[serde(default)]
    pub identity: IdentityPolicy,
    /// Messages over HTTP; none where they come by Kafka alone.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ingress: Option<IngressPolicy>,
    /// References of messages to payloads that the host fetches; none where payloads stand in the
    /// messages.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reference: Option<ReferencePolicy>,
    /// Schemas of payloads, by event type; keys may also be `orders.*` and `*`.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub schemas: BTreeMap<String, PayloadSchema>,
    /// Bounds of a transaction.
    #[serde(default)]
    pub batch: Batch,
    /// Retries after a failure.
    #[serde(default)]
    pub retry: Retry,
    /// Treatment of dead letters beside their rows.
    #[serde(default, skip_serializing_if = "DeadLetters::is_default")]
    pub dead_letters: DeadLetters,
    /// Permission to set offsets back, treatment of old records, and replays.
    #[serde(default, skip_serializing_if = "Replay::is_default")]
    pub replay: Replay,
    /// Circuit breaker of a version that fails too often.
    #[serde(default)]
    pub breaker: BreakerPolicy,
    /// Caps on one message and on one run of its handler.
    #[serde(default)]
    pub limits: Limits,
    /// Rules for messages that handlers send.
    #[serde(default, skip_serializing_if = "OutgoingPolicy::is_default")]
    pub outgoing: OutgoingPolicy,
    /// Bounds at which open messages become an alert.
    #[serde(default, skip_serializing_if = "Alerts::is_default")]
    pub alerts: Alerts,
    /// Reading of records from Kafka.
    #[serde(default)]
    pub kafka: KafkaPolicy,
}

/// The point at which the host acks a message to the broker.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Ack {
    /// After the effect is committed; the broker's lag is the backlog.
    AfterCommit,
    /// After the message is stored; workers run it from the inbox under a lease.
    AfterInsert,
}

/// The deduplication of deliveries.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Dedup {
    /// Every message is claimed in the inbox: its effect happens once.
    #[default]
    Inbox,
    /// No claim is written: a redelivered message has its effect again. For telemetry, and for
    /// handlers that are idempotent by themselves. Failures still become rows.
    Off,
}

/// The rows that keep payload and headers. A row that is still to be run always has them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PayloadPolicy {
    /// Rows that did not complete.
    #[default]
    Failed,
    /// Every row.
    All,
    /// No row once it is settled, except a dead letter that was delivered again since.
    None,
}

/// The treatment of a known id with another payload.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Collision {
    /// It is kept as a parked row of its own, `<id>#<hash>`. The default with full rows.
    #[default]
    Park,
    /// It is taken for a duplicate. The default with light rows, which keep no hash of a payload.
    Ignore,
}

/// Treatment of a message that no deployment takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum NoRoute {
    /// It is kept, and waits for a deployment and an operator.
    #[default]
    Park,
    /// It is acked; its row says `skipped` and keeps no payload.
    Skip,
    /// It is a dead letter at once.
    Reject,
}

/// The encoding of payloads.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum WireFormat {
    /// As they are: bytes to the host, and JSON where a source or a schema of the policy looks into
    /// them.
    #[default]
    Plain,
    /// By the schemas of a registry: Avro, Protobuf or JSON Schema. Each payload begins with the id
    /// of its schema. Handlers, and sources and schemas of the policy, see the equivalent JSON.
    Confluent,
}

impl WireFormat {
    fn is_plain(&self) -> bool {
        *self == Self::Plain
    }
}

/// The circuit breaker for versions that fail too often. Each version has its own breaker on each
/// host. A failure is a trap, a limit, an error or no answer. A handler's decision to reject, to
/// park or to be run again is no failure.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct BreakerPolicy {
    /// Switch. While it is off, a failing version fails its messages one after the other.
    pub enabled: bool,
    /// Share of the first runs within the window, in percent, 1 to 99. The breaker opens when more
    /// of them failed.
    pub failures_percent: u32,
    /// First runs within the window before the breaker judges a version; a run that ended at its
    /// deadline counts as five.
    pub runs_min: u32,
    /// Length of the window, milliseconds.
    pub window_ms: u64,
    /// Milliseconds for which the breaker stays open at first, before one message probes. The time
    /// doubles with each probe that fails.
    pub pause_ms: u64,
    /// Milliseconds for which the breaker stays open at most.
    pub pause_max_ms: u64,
}

impl Default for BreakerPolicy {
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

/// The treatment of dead letters, and of parked messages, beside their rows.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct DeadLetters {
    /// Topic that each is copied to, with its headers and the reason for its state; none for no
    /// copies.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub topic: Option<String>,
}

impl DeadLetters {
    fn is_default(&self) -> bool {
        *self == Self::default()
    }
}

/// The treatment of a message that may have run before, which the inbox cannot know.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PastHorizon {
    /// It runs as a message that comes for the first time.
    Run,
    /// It is parked for an operator where its record is at or below what the inbox has forgotten of
    /// its partition.
    #[default]
    Park,
    /// As `park`, and every unknown message whose record is older than `retention` is parked too,
    /// wherever it stands: for producers that send an event again under its old timestamp.
    ParkByTime,
}

impl PastHorizon {
    /// Returns the name of the treatment in a policy.
    pub fn name(self) -> &'static str {
        match self {
            Self::Run => "run",
            Self::Park => "park",
            Self::ParkByTime => "park_by_time",
        }
    }
}

/// The reading of records from Kafka.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct KafkaPolicy {
    /// Group id; empty for `oncebox.<tenant>.<consumer>`.
    pub group: String,
    /// Records held per partition before it is paused; at least four transactions of
    /// `batch.messages_max`, so that the next ones fill while one runs.
    pub prefetch_messages: usize,
    /// Bytes held per partition before it is paused.
    pub prefetch_bytes: usize,
    /// Properties of librdkafka, which override the host's own.
    pub properties: BTreeMap<String, String>,
}

impl Default for KafkaPolicy {
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
    /// Returns the Kafka settings, with a prefetch that batches of this policy do not run dry.
    pub fn reading(&self) -> KafkaPolicy {
        let prefetch_messages = self.kafka.prefetch_messages.max(4 * self.batch.messages_max);
        KafkaPolicy { prefetch_messages, ..self.kafka.clone() }
    }

    /// Returns the Kafka group of a consumer with this policy.
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

    // What could go wrong: a key is added that the documentation does not name.
    #[test]
    fn every_key_is_in_the_documentation() {
        const DOCS: &str = include_str!("../../../../docs/policy.md");
        let policy = "topics = ['t']\nack = 'after_commit'\norder = 'key'\nwire_format = \
            'confluent'\nsequence = { version = { header = 'v' }, first = 1 }\nretry = { preset = \
            'seed-002', age_max_ms = 1 }\ndead_letters = { topic = 'd' }\nreplay = { allowed = \
            false, horizon = 'raise', raise_max = '1y', kind = 'audit', emit = 'withheld' \
            }\nfactors = { legal_min_days = 1, \
            legal_max_days = 500, id_unique_days = 500, replay_days = 1, budget_bytes = 1, \
            effect_risk = 'high' }\nlimits = { transactions_max = 1, messages_per_second = 1 \
            }\neffects = { outside = 'none' }\ninbox = 'light'\nlight = { result = true \
            }\ncollision = 'ignore'\nreference = { store = 's', source = { header = 'r' } \
            }\noutgoing = { on_parked = 'stop' }\nmasking = { fields = ['/a'], headers = ['h'], key = \
            true, role = 'operator' }";
        // What cannot stand beside the other keys.
        let over_http = "topics = ['t']\nack = 'after_commit'\ningress = { verify = 'bearer', \
            event_type = 'e' }";
        let mut keys = Vec::new();
        for text in [policy, over_http] {
            let policy = Policy::parse(text).expect("a policy");
            let policy = serde_json::to_value(policy).expect("a value");
            for (name, value) in policy.as_object().expect("a table") {
                match value.as_object() {
                    Some(members) => {
                        keys.extend(members.keys().map(|member| format!("{name}.{member}")))
                    }
                    None => keys.push(name.clone()),
                }
            }
        }
        assert!(keys.len() > 40, "{keys:?}");
        let missing: Vec<_> =
            keys.iter().filter(|key| !DOCS.contains(&format!("| `{key}` |"))).collect();
        assert!(missing.is_empty(), "{missing:?}");
    }
}
