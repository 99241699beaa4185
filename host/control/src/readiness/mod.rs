//! The seven parts of the baseline that a consumer meets before it is relied on, answered from what
//! the inbox, the deployments, the hosts and the databases hold. A fact that is not known is never
//! taken for one that holds.

// The facts, as the databases hold them.
mod facts;
// Stable id, durable dedup, transactional effect.
mod inbox_parts;
// External idempotency, replay policy, crash tests.
mod outer_parts;
// Observability.
mod observability;
// The parts that a policy alone decides.
mod of_policy;
// The facts that are read from many rows of an inbox.
mod scan;

use std::fmt;

use oncebox_model::policy::{Horizon, Policy};

pub use self::{
    facts::{DesiredRun, LiveHost, LiveVersion, ReadinessFacts},
    of_policy::unmet_by_policy,
    scan::{InboxScan, SeenMessages},
};

/// A part of the baseline.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum BaselinePart {
    /// A message has one id in all its deliveries, and no other message has it.
    StableId,
    /// The inbox remembers ids for longer than messages can come again.
    DurableDedup,
    /// Effect and completion commit together.
    TransactionalEffect,
    /// Nothing leaves the database that could happen twice.
    ExternalIdempotency,
    /// Reading again and redriving have rules that are safe.
    ReplayPolicy,
    /// The versions that run were killed at every step, and no effect was lost or doubled.
    CrashTests,
    /// Somebody sees what is stuck.
    Observability,
}

impl BaselinePart {
    /// All parts, in the order of a report.
    pub const ALL: [Self; 7] = [
        Self::StableId,
        Self::DurableDedup,
        Self::TransactionalEffect,
        Self::ExternalIdempotency,
        Self::ReplayPolicy,
        Self::CrashTests,
        Self::Observability,
    ];
}

/// The answer to a fact or a part. The last one is the worst.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum FactAnswer {
    /// It holds.
    Met,
    /// It is not known.
    NotKnown,
    /// It does not hold.
    NotMet,
}

/// A fact of a part.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ReadinessFact {
    /// Name of the fact, one word.
    pub name: &'static str,
    /// The answer.
    pub answer: FactAnswer,
    /// Description of what was found.
    pub found: String,
    /// What to do where it does not hold or is not known.
    pub advice: Option<String>,
}

/// The answer to one part, with its facts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ReadinessPart {
    /// The part.
    pub part: BaselinePart,
    /// Facts of the part, at least one.
    pub facts: Vec<ReadinessFact>,
}

impl ReadinessPart {
    /// Returns the worst answer of the facts.
    pub fn answer(&self) -> FactAnswer {
        let worst = self.facts.iter().map(|fact| fact.answer).max();
        worst.unwrap_or(FactAnswer::NotKnown)
    }
}

impl ReadinessFact {
    fn met(name: &'static str, found: impl Into<String>) -> Self {
        Self { name, answer: FactAnswer::Met, found: found.into(), advice: None }
    }

    fn not_met(name: &'static str, found: impl Into<String>, advice: impl Into<String>) -> Self {
        Self { answer: FactAnswer::NotMet, advice: Some(advice.into()), ..Self::met(name, found) }
    }

    fn not_known(name: &'static str, found: impl Into<String>, advice: impl Into<String>) -> Self {
        Self { answer: FactAnswer::NotKnown, advice: Some(advice.into()), ..Self::met(name, found) }
    }
}

/// Everything that the answers are derived from.
#[derive(Debug, Clone, Copy)]
pub struct ReadinessInput<'a> {
    /// The consumer's policy.
    pub policy: &'a Policy,
    /// The proof that its inbox remembers for long enough, against the brokers as they are now.
    pub horizon: &'a Horizon,
    /// Facts of the host's database.
    pub facts: &'a ReadinessFacts,
    /// Facts of the database with the consumer's inbox.
    pub scan: &'a InboxScan,
}

impl ReadinessInput<'_> {
    /// Answers the seven parts, in the order of [`BaselinePart::ALL`].
    pub fn answers(&self) -> Vec<ReadinessPart> {
        BaselinePart::ALL
            .into_iter()
            .map(|part| ReadinessPart { part, facts: self.facts_of(part) })
            .collect()
    }

    fn facts_of(&self, part: BaselinePart) -> Vec<ReadinessFact> {
        match part {
            BaselinePart::StableId => self.stable_id(),
            BaselinePart::DurableDedup => self.durable_dedup(),
            BaselinePart::TransactionalEffect => self.transactional_effect(),
            BaselinePart::ExternalIdempotency => self.external_idempotency(),
            BaselinePart::ReplayPolicy => self.replay_policy(),
            BaselinePart::CrashTests => self.crash_tests(),
            BaselinePart::Observability => self.observability(),
        }
    }
}

/// Names that a text lists at most.
const NAMED_MAX: usize = 5;

/// Lists the first texts, and says how many more there are.
fn listed(texts: &[String]) -> String {
    let first: Vec<_> = texts.iter().take(NAMED_MAX).map(String::as_str).collect();
    match texts.len().saturating_sub(NAMED_MAX) {
        0 => first.join(", "),
        more => format!("{} and {more} more", first.join(", ")),
    }
}

/// A count with its noun, in the singular or the plural.
struct Counted(i64, &'static str);

impl fmt::Display for Counted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self(count, noun) = self;
        let ending = if *count == 1 { "" } else { "s" };
        write!(f, "{count} {noun}{ending}")
    }
}

#[cfg(test)]
mod tests;
