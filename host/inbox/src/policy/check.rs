//! What in a policy cannot work. Everything is said at once.

use super::{Ack, DeadLetters, Dedup, Order, PastHorizon, PayloadPolicy, Policy, TypeSource, WireFormat, schemas::SCHEMAS_MAX};
use crate::{backlog::WATCHED_MAX, error::InboxError, problem::Problem};

/// One thing that is wrong with a policy.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct PolicyProblem {
    /// The key, with dots; empty where it is the document.
    pub key: String,
    /// Its line in the file it was read from.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub line: Option<usize>,
    /// What is wrong, with the key.
    pub text: String,
}

impl PolicyProblem {
    pub(super) fn new(key: &str, text: impl Into<String>) -> Self {
        Self { key: key.to_owned(), line: None, text: text.into() }
    }
}

impl std::fmt::Display for PolicyProblem {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.line {
            Some(line) => write!(f, "line {line}: {}", self.text),
            None => f.write_str(&self.text),
        }
    }
}

/// Problems as an error.
pub(super) fn refuse(problems: Vec<PolicyProblem>) -> Result<(), InboxError> {
    match problems.is_empty() {
        true => Ok(()),
        false => Err(InboxError::Policy(problems.iter().map(|problem| Problem::new("policy", problem.to_string())).collect())),
    }
}

/// What Kafka takes for the name of a topic.
fn is_topic(name: &str) -> bool {
    let is_known = |c: char| c.is_ascii_alphanumeric() || "._-".contains(c);
    (1..=249).contains(&name.len()) && name.chars().all(is_known) && ![".", ".."].contains(&name)
}

const DAY_MS: u64 = 24 * 3_600 * 1_000;

impl Policy {
    /// Refuse what cannot work, naming every key that is wrong.
    pub fn check(&self) -> Result<(), InboxError> {
        refuse(self.problems())
    }

    /// Everything that cannot work.
    pub fn problems(&self) -> Vec<PolicyProblem> {
        let mut found = Vec::new();
        self.check_ranges(&mut found);
        self.check_together(&mut found);
        if self.schemas.len() > SCHEMAS_MAX {
            let text = format!("`schemas` has {}; at most {SCHEMAS_MAX} can be looked at", self.schemas.len());
            found.push(PolicyProblem::new("schemas", text));
        }
        for (event_type, schema) in self.schemas.iter().take(SCHEMAS_MAX) {
            if let Err(error) = schema.compile() {
                let key = format!("schemas.{event_type}.json_schema");
                found.push(PolicyProblem::new(&key, format!("`{key}`: {error}")));
            }
        }
        found
    }

    /// Numbers, one by one.
    fn check_ranges(&self, found: &mut Vec<PolicyProblem>) {
        let Self { batch, sequence, retry, breaker, limits, kafka, .. } = self;
        const ANY: u64 = u64::MAX;
        let ranges = [
            ("batch.messages_max", batch.messages_max as u64, 1_000),
            ("batch.duration_ms", batch.duration_ms, 60_000),
            ("sequence.gap_wait_ms", sequence.as_ref().map_or(1, |sequence| sequence.gap_wait_ms), 30 * DAY_MS),
            ("retry.attempts_max", retry.attempts_max.into(), 1_000),
            ("retry.backoff_min_ms", retry.backoff_min_ms, ANY),
            ("retry.backoff_max_ms", retry.backoff_max_ms, 30 * DAY_MS),
            ("retry.backoff_factor", retry.backoff_factor.into(), 100),
            ("retry.lease_ms", retry.lease_ms, 30 * DAY_MS),
            ("retry.workers", retry.workers as u64, 64),
            ("retry.age_max_ms", retry.age_max_ms.unwrap_or(1), 366 * DAY_MS),
            ("breaker.failures_percent", breaker.failures_percent.into(), 99),
            ("breaker.runs_min", breaker.runs_min.into(), ANY),
            ("breaker.window_ms", breaker.window_ms, DAY_MS),
            ("breaker.pause_ms", breaker.pause_ms, ANY),
            ("breaker.pause_max_ms", breaker.pause_max_ms, DAY_MS),
            ("limits.deadline_ms", limits.deadline_ms, 600_000),
            ("limits.memory_bytes", limits.memory_bytes as u64, 128 << 20),
            ("limits.transactions_max", limits.transactions_max.unwrap_or(1) as u64, 10_000),
            ("limits.messages_per_second", limits.messages_per_second.unwrap_or(1).into(), 10_000_000),
            ("alerts.parked", self.alerts.parked.max(1), WATCHED_MAX as u64),
            ("alerts.dead_letters", self.alerts.dead_letters.max(1), WATCHED_MAX as u64),
            ("alerts.collisions", self.alerts.collisions.max(1), WATCHED_MAX as u64),
            ("alerts.pending_age_s", self.alerts.pending_age_s.max(1), 30 * DAY_MS / 1_000),
            ("kafka.prefetch_messages", kafka.prefetch_messages as u64, 100_000),
            ("kafka.prefetch_bytes", kafka.prefetch_bytes as u64, ANY),
        ];
        for (key, value, most) in ranges {
            if value == 0 {
                found.push(PolicyProblem::new(key, format!("`{key}` is 0; it must be at least 1")));
            } else if value > most {
                found.push(PolicyProblem::new(key, format!("`{key}` is {value}; it must be at most {most}")));
            }
        }
    }

    /// What contradicts something else.
    fn check_together(&self, found: &mut Vec<PolicyProblem>) {
        let Self { topics, retry, breaker, limits, identity, dead_letters: DeadLetters { topic: copies }, .. } = self;
        let lease = format!("`retry.lease_ms` is {}; it must be over `limits.deadline_ms`, {}", retry.lease_ms, limits.deadline_ms);
        let rules = [
            ("topics", topics.is_empty() || topics.iter().any(String::is_empty), "`topics` must name at least one topic"),
            (
                "dedup",
                self.dedup == Dedup::Off && self.ack == Ack::AfterInsert,
                "`dedup = \"off\"` needs `ack = \"after_commit\"`: what is acked after its insert is in the inbox",
            ),
            (
                "order",
                self.dedup == Dedup::Off && self.order != Order::None,
                "`order` needs `dedup = \"inbox\"`: what is to wait for its turn is a row of the inbox",
            ),
            (
                "sequence",
                self.sequence.is_some() && self.order != Order::Key,
                "`sequence` needs `order = \"key\"`: the ordering key names the aggregate whose versions are counted",
            ),
            (
                "identity",
                identity.id.is_empty() || identity.event_type.is_empty(),
                "`identity.id` and `identity.event_type` must each name at least one source",
            ),
            (
                "identity.event_type",
                self.wire_format == WireFormat::Plain && identity.event_type.contains(&TypeSource::Schema),
                "`identity.event_type` has `schema`, which needs `wire_format = \"confluent\"`: other payloads name no schema",
            ),
            (
                "replay.past_horizon",
                self.replay.past_horizon == PastHorizon::Park && self.dedup == Dedup::Off,
                "`replay.past_horizon = \"park\"` needs `dedup = \"inbox\"`: without it nothing is remembered of any message",
            ),
            ("retry.backoff_max_ms", retry.backoff_max_ms < retry.backoff_min_ms, "`retry.backoff_max_ms` is below `retry.backoff_min_ms`"),
            ("breaker.pause_max_ms", breaker.pause_max_ms < breaker.pause_ms, "`breaker.pause_max_ms` is below `breaker.pause_ms`"),
            ("retry.lease_ms", retry.lease_ms <= limits.deadline_ms, &lease),
            (
                "dead_letters.topic",
                copies.as_ref().is_some_and(|topic| !is_topic(topic)),
                "`dead_letters.topic` must be the name of one topic: 1 to 249 of the characters a-z, A-Z, 0-9, `.`, `_` and `-`",
            ),
            (
                "dead_letters.topic",
                copies.as_ref().is_some_and(|topic| topics.contains(topic)),
                "`dead_letters.topic` is one of `topics`: the consumer would read its own dead letters",
            ),
            (
                "dead_letters.topic",
                copies.is_some() && self.payload == PayloadPolicy::None,
                "`dead_letters.topic` needs a `payload` other than \"none\": a copy is made of what the row keeps",
            ),
        ];
        for (key, _, text) in rules.into_iter().filter(|(_, is_broken, _)| *is_broken) {
            // One that is wrong by itself is said once.
            if !found.iter().any(|problem| problem.key == key) {
                found.push(PolicyProblem::new(key, text));
            }
        }
    }
}
