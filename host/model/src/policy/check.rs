//! The checks of a policy. All problems are reported at once.

use super::{
    Ack, BATCH_MESSAGES_MAX, Collision, DeadLetters, Dedup, IdSource, IngressPolicy, KeySource,
    Order, PastHorizon, PayloadPolicy, Policy, ReferenceSource, TypeSource, VersionSource,
    WATCHED_MAX, WireFormat, retry::LEASE_ROOM_MS, schemas,
};
use crate::{error::InboxError, problem::Problem};

/// One problem of a policy.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct PolicyProblem {
    /// Key, with dots; empty where the problem is the document's.
    pub key: String,
    /// Line of the key in the file that the policy was read from.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub line: Option<usize>,
    /// Description of the problem, with the key.
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

/// Refuses a policy that has problems, with all of them in the error.
pub(super) fn refuse(problems: Vec<PolicyProblem>) -> Result<(), InboxError> {
    match problems.is_empty() {
        true => Ok(()),
        false => Err(InboxError::Policy(
            problems.iter().map(|problem| Problem::new("policy", problem.to_string())).collect(),
        )),
    }
}

/// Returns whether a text can be the name of a store.
fn is_name(text: &str) -> bool {
    text.starts_with(|c: char| c.is_ascii_lowercase())
        && text.len() <= 63
        && text.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-')
}

/// Maximum bytes of the name of a header.
const HEADER_BYTES_MAX: usize = 256;
/// Maximum bytes of a JSON pointer.
const POINTER_BYTES_MAX: usize = 1_024;
/// Maximum number of sources of a message id, or of an event type.
const SOURCES_MAX: usize = 16;
/// Maximum bytes of an event type.
const EVENT_TYPE_BYTES_MAX: usize = 512;

/// Maximum of days that a factor names: a century.
const DAYS_MAX: u64 = 36_525;

const DAY_MS: u64 = 24 * 3_600 * 1_000;

impl Policy {
    /// Refuses a policy that cannot work.
    ///
    /// # Errors
    ///
    /// [`InboxError::Policy`] with every key that is wrong.
    pub fn check(&self) -> Result<(), InboxError> {
        refuse(self.problems())
    }

    /// Refuses a policy that cannot work, without a check of its schemas, which occupies a
    /// processor for a while. The check asks no other program.
    ///
    /// # Errors
    ///
    /// [`InboxError::Policy`] with every key that is wrong.
    pub fn check_but_schemas(&self) -> Result<(), InboxError> {
        refuse(self.problems_but_schemas())
    }

    /// Returns all problems of the policy.
    pub fn problems(&self) -> Vec<PolicyProblem> {
        let mut found = self.problems_but_schemas();
        for (event_type, fault) in schemas::faults(&self.schemas) {
            let key = if event_type.is_empty() {
                "schemas".to_owned()
            } else {
                format!("schemas.{event_type}.json_schema")
            };
            found.push(PolicyProblem::new(&key, format!("`{key}`: {fault}")));
        }
        found
    }

    fn problems_but_schemas(&self) -> Vec<PolicyProblem> {
        let mut found = Vec::new();
        self.check_ranges(&mut found);
        self.check_texts(&mut found);
        self.masking.check(&mut found);
        if let Some((key, text)) = self.native_fault() {
            found.push(PolicyProblem::new(&key, text));
        }
        self.check_together(&mut found);
        self.check_factors(&mut found);
        found
    }

    /// Checks each number against its range.
    fn check_ranges(&self, found: &mut Vec<PolicyProblem>) {
        let Self { batch, sequence, reference, retry, breaker, limits, factors, kafka, .. } = self;
        let reference = reference.as_ref();
        let ranges = [
            ("batch.messages_max", batch.messages_max as u64, BATCH_MESSAGES_MAX),
            ("batch.duration_ms", batch.duration_ms, 60_000),
            (
                "sequence.gap_wait_ms",
                sequence.as_ref().map_or(1, |sequence| sequence.gap_wait_ms),
                30 * DAY_MS,
            ),
            (
                "reference.bytes_max",
                reference.map_or(1, |reference| reference.bytes_max as u64),
                128 << 20,
            ),
            (
                "reference.timeout_ms",
                reference.map_or(1, |reference| reference.timeout_ms),
                600_000,
            ),
            ("retry.attempts_max", retry.attempts_max.into(), 1_000),
            ("retry.backoff_min_ms", retry.backoff_min_ms, 30 * DAY_MS),
            ("retry.backoff_max_ms", retry.backoff_max_ms, 30 * DAY_MS),
            ("retry.backoff_factor", retry.backoff_factor.into(), 100),
            ("retry.lease_ms", retry.lease_ms, 30 * DAY_MS),
            ("retry.workers", retry.workers as u64, 64),
            ("retry.age_max_ms", retry.age_max_ms.unwrap_or(1), 366 * DAY_MS),
            ("factors.legal_min_days", factors.legal_min_days.unwrap_or(1), DAYS_MAX),
            ("factors.legal_max_days", factors.legal_max_days.unwrap_or(1), DAYS_MAX),
            ("factors.id_unique_days", factors.id_unique_days.unwrap_or(1), DAYS_MAX),
            ("factors.replay_days", factors.replay_days.unwrap_or(1), DAYS_MAX),
            ("factors.budget_bytes", factors.budget_bytes.unwrap_or(1), 1 << 53),
            ("breaker.failures_percent", breaker.failures_percent.into(), 99),
            ("breaker.runs_min", breaker.runs_min.into(), 1_000_000),
            ("breaker.window_ms", breaker.window_ms, DAY_MS),
            ("breaker.pause_ms", breaker.pause_ms, DAY_MS),
            ("breaker.pause_max_ms", breaker.pause_max_ms, DAY_MS),
            ("limits.deadline_ms", limits.deadline_ms, 600_000),
            ("limits.memory_bytes", limits.memory_bytes as u64, 128 << 20),
            ("limits.statements_max", u64::from(limits.statements_max).max(1), 1_000_000),
            ("limits.statement_texts_max", limits.statement_texts_max.max(1) as u64, 10_000),
            ("limits.statement_bytes_max", limits.statement_bytes_max.max(1) as u64, 4 << 20),
            ("limits.params_max", limits.params_max.max(1) as u64, 32_767),
            ("limits.params_bytes_max", limits.params_bytes_max.max(1) as u64, 128 << 20),
            ("limits.rows_max", limits.rows_max.max(1) as u64, 1_000_000),
            ("limits.result_bytes_max", limits.result_bytes_max.max(1) as u64, 128 << 20),
            ("limits.savepoints_max", limits.savepoints_max.max(1) as u64, 64),
            ("limits.log_bytes_max", limits.log_bytes_max.max(1) as u64, 4 << 20),
            ("limits.outcome_bytes_max", limits.outcome_bytes_max.max(1) as u64, 4 << 20),
            ("limits.payload_bytes_max", limits.payload_bytes_max as u64, 128 << 20),
            ("limits.outgoing_max", u64::from(limits.outgoing_max).max(1), 10_000),
            ("limits.outgoing_bytes_max", limits.outgoing_bytes_max.max(1), 16 << 20),
            ("limits.transactions_max", limits.transactions_max.unwrap_or(1) as u64, 10_000),
            (
                "limits.messages_per_second",
                limits.messages_per_second.unwrap_or(1).into(),
                10_000_000,
            ),
            ("alerts.parked", self.alerts.parked.max(1), WATCHED_MAX as u64),
            ("alerts.dead_letters", self.alerts.dead_letters.max(1), WATCHED_MAX as u64),
            ("alerts.collisions", self.alerts.collisions.max(1), WATCHED_MAX as u64),
            ("alerts.pending_age_s", self.alerts.pending_age_s.max(1), 30 * DAY_MS / 1_000),
            ("kafka.prefetch_messages", kafka.prefetch_messages as u64, 100_000),
            ("kafka.prefetch_bytes", kafka.prefetch_bytes as u64, 1 << 30),
        ];
        let of_ingress = self.ingress.iter().flat_map(IngressPolicy::ranges);
        for (key, value, most) in ranges.into_iter().chain(of_ingress) {
            if value == 0 {
                found.push(PolicyProblem::new(key, format!("`{key}` is 0; it must be at least 1")));
            } else if value > most {
                found.push(PolicyProblem::new(
                    key,
                    format!("`{key}` is {value}; it must be at most {most}"),
                ));
            }
        }
    }

    /// Checks each text, and the number of sources.
    fn check_texts(&self, found: &mut Vec<PolicyProblem>) {
        let identity = &self.identity;
        for (key, sources) in
            [("identity.id", identity.id.len()), ("identity.event_type", identity.event_type.len())]
        {
            if sources > SOURCES_MAX {
                found.push(PolicyProblem::new(
                    key,
                    format!("`{key}` has {sources} sources; there may be at most {SOURCES_MAX}"),
                ));
            }
        }
        let (header, pointer) = (HEADER_BYTES_MAX, POINTER_BYTES_MAX);
        let ids = identity.id.iter().filter_map(|source| match source {
            IdSource::Header(name) => Some(("identity.id", name, header)),
            IdSource::JsonPointer(to) => Some(("identity.id", to, pointer)),
            _ => None,
        });
        let types = identity.event_type.iter().filter_map(|source| match source {
            TypeSource::Header(name) => Some(("identity.event_type", name, header)),
            TypeSource::JsonPointer(to) => Some(("identity.event_type", to, pointer)),
            _ => None,
        });
        let key = match &identity.ordering_key {
            KeySource::JsonPointer(to) => Some(("identity.ordering_key", to, pointer)),
            KeySource::RecordKey => None,
        };
        let version = self.sequence.as_ref().map(|sequence| match &sequence.version {
            VersionSource::Header(name) => ("sequence.version", name, header),
            VersionSource::JsonPointer(to) => ("sequence.version", to, pointer),
        });
        let reference = self.reference.as_ref().map(|reference| match &reference.source {
            ReferenceSource::Header(name) => ("reference.source", name, header),
            ReferenceSource::JsonPointer(to) => ("reference.source", to, pointer),
        });
        let own_type = self.ingress.as_ref().and_then(|ingress| ingress.event_type.as_ref());
        let own_type = own_type.map(|text| ("ingress.event_type", text, EVENT_TYPE_BYTES_MAX));
        let schemas =
            self.schemas.keys().map(|event_type| ("schemas", event_type, EVENT_TYPE_BYTES_MAX));
        let sources = ids.chain(types).chain(key).chain(version).chain(reference).chain(own_type);
        for (key, text, most) in sources.chain(schemas) {
            let is_known = found.iter().any(|problem| problem.key == key);
            if !is_known && (text.len() > most || text.chars().any(char::is_control)) {
                let rule = format!(
                    "`{key}` has a text of {} bytes; it must be at most {most}, without control \
                        characters",
                    text.len()
                );
                found.push(PolicyProblem::new(key, rule));
            }
        }
    }

    /// Checks for keys that contradict each other.
    fn check_together(&self, found: &mut Vec<PolicyProblem>) {
        let lease = format!(
            "`retry.lease_ms` is {}; it must be over `limits.deadline_ms`, {}, by more than \
                {LEASE_ROOM_MS}: time to end a statement, \
             log in and record the failure",
            self.retry.lease_ms, self.limits.deadline_ms
        );
        let rules = self
            .identity_rules()
            .into_iter()
            .chain(self.light_rules())
            .chain(self.ingress_rules())
            .chain(self.failure_rules(&lease));
        for (key, _, text) in rules.filter(|(_, is_broken, _)| *is_broken) {
            // A key that is wrong by itself is reported once.
            if !found.iter().any(|problem| problem.key == key) {
                found.push(PolicyProblem::new(key, text));
            }
        }
    }

    /// Returns the rules between keys of deduplication, order and identity: the key to report,
    /// whether the rule is broken, and the problem.
    fn identity_rules(&self) -> [(&'static str, bool, &'static str); 8] {
        [
            (
                "reference.store",
                self.reference.as_ref().is_some_and(|reference| !is_name(&reference.store)),
                "`reference.store` is no name of a store; that is a lower-case letter, then up to \
                    62 of a-z, 0-9 and `-`",
            ),
            (
                "dedup",
                self.dedup == Dedup::Off && self.ack == Ack::AfterInsert,
                "`dedup = \"off\"` needs `ack = \"after_commit\"`: what is acked after its insert \
                    is in the inbox",
            ),
            (
                "order",
                self.dedup == Dedup::Off && self.order != Order::None,
                "`order` needs `dedup = \"inbox\"`: what is to wait for its turn is a row of the \
                    inbox",
            ),
            (
                "sequence",
                self.sequence.is_some() && self.order != Order::Key,
                "`sequence` needs `order = \"key\"`: the ordering key names the aggregate whose \
                    versions are counted",
            ),
            (
                "identity",
                self.identity.id.is_empty() || self.identity.event_type.is_empty(),
                "`identity.id` and `identity.event_type` must each name at least one source",
            ),
            (
                "identity.event_type",
                self.wire_format == WireFormat::Plain
                    && self.identity.event_type.contains(&TypeSource::Schema),
                "`identity.event_type` has `schema`, which needs `wire_format = \"confluent\"`: \
                    other payloads name no schema",
            ),
            (
                "replay.past_horizon",
                self.replay.past_horizon == PastHorizon::ParkByTime && self.dedup == Dedup::Off,
                "`replay.past_horizon = \"park_by_time\"` needs `dedup = \"inbox\"`: without it nothing is \
                    remembered of any message",
            ),
            (
                "replay.kind",
                self.replay.kind.is_some() && self.dedup == Dedup::Off,
                "`replay.kind` needs `dedup = \"inbox\"`: without it no message that completed is \
                    kept, so there is none to replay",
            ),
        ]
    }

    /// Returns the rules between the form of rows and what only one form can do, as
    /// [`Self::identity_rules`] does.
    fn light_rules(&self) -> [(&'static str, bool, &'static str); 4] {
        let is_light = self.is_light();
        [
            (
                "inbox",
                is_light && self.dedup == Dedup::Off,
                "`inbox = \"light\"` needs `dedup = \"inbox\"`: without it a message that \
                    completes leaves no row at all",
            ),
            (
                "payload",
                is_light && self.payload == PayloadPolicy::All,
                "`payload = \"all\"` needs `inbox = \"full\"`: a light row keeps no payload",
            ),
            (
                "collision",
                is_light && self.collision == Some(Collision::Park),
                "`collision = \"park\"` needs `inbox = \"full\"`: a light row keeps no hash of its \
                    payload, so that another payload under its id is not noticed; leave the key \
                    out, or set it to \"ignore\"",
            ),
            (
                "light.result",
                !is_light && self.light.result,
                "`light.result` needs `inbox = \"light\"`: a full row keeps the result in any case",
            ),
        ]
    }

    /// Returns the rules between messages over HTTP and what else the policy says, as
    /// [`Self::identity_rules`] does.
    fn ingress_rules(&self) -> [(&'static str, bool, &'static str); 4] {
        let is_there = self.ingress.is_some();
        let ingress = self.ingress.as_ref();
        [
            (
                "ingress",
                is_there && self.dedup == Dedup::Off,
                "`ingress` needs `dedup = \"inbox\"`: what comes over HTTP is stored in the inbox \
                    before it is answered",
            ),
            (
                "ingress",
                is_there && self.wire_format == WireFormat::Confluent,
                "`ingress` needs `wire_format = \"plain\"`: the body of a request names no schema \
                    of a registry",
            ),
            (
                "ingress.event_type",
                ingress.is_some_and(|it| it.event_type.as_ref().is_some_and(String::is_empty)),
                "`ingress.event_type` is empty; leave it out to refuse requests without a type",
            ),
            (
                "ingress.body_bytes_max",
                ingress.is_some_and(|it| it.body_bytes_max > self.limits.payload_bytes_max),
                "`ingress.body_bytes_max` is over `limits.payload_bytes_max`: what is larger than \
                    that is not kept",
            ),
        ]
    }

    /// Returns the rules between keys of retries, the breaker and dead letters, as
    /// [`Self::identity_rules`] does.
    fn failure_rules<'a>(&self, lease: &'a str) -> [(&'static str, bool, &'a str); 5] {
        let Self { topics, retry, breaker, limits, .. } = self;
        let DeadLetters { topic: copies } = &self.dead_letters;
        [
            (
                "retry.backoff_max_ms",
                retry.backoff_max_ms < retry.backoff_min_ms,
                "`retry.backoff_max_ms` is below `retry.backoff_min_ms`",
            ),
            (
                "breaker.pause_max_ms",
                breaker.pause_max_ms < breaker.pause_ms,
                "`breaker.pause_max_ms` is below `breaker.pause_ms`",
            ),
            (
                "retry.lease_ms",
                retry.lease_ms <= limits.deadline_ms.saturating_add(LEASE_ROOM_MS),
                lease,
            ),
            (
                "dead_letters.topic",
                copies.as_ref().is_some_and(|topic| topics.contains(topic)),
                "`dead_letters.topic` is one of `topics`: the consumer would read its own dead \
                    letters",
            ),
            (
                "dead_letters.topic",
                copies.is_some() && self.payload == PayloadPolicy::None,
                "`dead_letters.topic` needs a `payload` other than \"none\": a copy is made of \
                    what the row keeps",
            ),
        ]
    }
}
