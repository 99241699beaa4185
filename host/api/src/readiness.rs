//! The seven parts of the baseline that a consumer meets before it is relied on.

use axum::{Json, extract::State};
use oncebox_control::{BaselinePart, FactAnswer, ReadinessFact, ReadinessInput, ReadinessPart};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use self::scans::scanned;
use crate::{Api, auth::Caller, error::ApiError, extract::Path, horizon};

// Scans of inboxes, few at a time.
pub(crate) mod scans;

/// The answers to the seven parts of the baseline, from facts of the running system.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
#[schema(as = ConsumerReadiness)]
pub struct ReadinessBody {
    /// Name of the tenant.
    pub tenant: String,
    /// Name of the consumer.
    pub consumer: String,
    /// The worst answer of the parts.
    pub answer: FactAnswerBody,
    /// The parts, in their fixed order.
    pub parts: Vec<ReadinessPartBody>,
}

/// The answer to one part.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[schema(as = ReadinessPart)]
pub struct ReadinessPartBody {
    /// The part.
    pub part: BaselinePartBody,
    /// The worst answer of its facts.
    pub answer: FactAnswerBody,
    /// Facts of the part.
    pub facts: Vec<ReadinessFactBody>,
}

/// A fact of a part.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[schema(as = ReadinessFact)]
pub struct ReadinessFactBody {
    /// Name of the fact, one word.
    pub name: String,
    /// The answer.
    pub answer: FactAnswerBody,
    /// Description of what was found, as text for a reader.
    pub found: String,
    /// What to do, as text for a reader; null where there is nothing to do.
    pub advice: Option<String>,
}

/// A part of the baseline.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, ToSchema)]
#[schema(as = BaselinePart)]
#[serde(rename_all = "snake_case")]
pub enum BaselinePartBody {
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

impl BaselinePartBody {
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

    /// Returns the name of the part.
    pub fn name(self) -> &'static str {
        match self {
            Self::StableId => "stable_id",
            Self::DurableDedup => "durable_dedup",
            Self::TransactionalEffect => "transactional_effect",
            Self::ExternalIdempotency => "external_idempotency",
            Self::ReplayPolicy => "replay_policy",
            Self::CrashTests => "crash_tests",
            Self::Observability => "observability",
        }
    }
}

/// The answer to a fact or a part.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[schema(as = FactAnswer)]
#[serde(rename_all = "snake_case")]
pub enum FactAnswerBody {
    /// It holds.
    Met,
    /// It is not known.
    NotKnown,
    /// It does not hold.
    NotMet,
}

impl From<BaselinePart> for BaselinePartBody {
    fn from(part: BaselinePart) -> Self {
        match part {
            BaselinePart::StableId => Self::StableId,
            BaselinePart::DurableDedup => Self::DurableDedup,
            BaselinePart::TransactionalEffect => Self::TransactionalEffect,
            BaselinePart::ExternalIdempotency => Self::ExternalIdempotency,
            BaselinePart::ReplayPolicy => Self::ReplayPolicy,
            BaselinePart::CrashTests => Self::CrashTests,
            BaselinePart::Observability => Self::Observability,
        }
    }
}

impl From<FactAnswer> for FactAnswerBody {
    fn from(answer: FactAnswer) -> Self {
        match answer {
            FactAnswer::Met => Self::Met,
            FactAnswer::NotKnown => Self::NotKnown,
            FactAnswer::NotMet => Self::NotMet,
        }
    }
}

impl From<ReadinessFact> for ReadinessFactBody {
    fn from(fact: ReadinessFact) -> Self {
        let ReadinessFact { name, answer, found, advice } = fact;
        Self { name: name.to_owned(), answer: answer.into(), found, advice }
    }
}

impl From<ReadinessPart> for ReadinessPartBody {
    fn from(part: ReadinessPart) -> Self {
        Self {
            part: part.part.into(),
            answer: part.answer().into(),
            facts: part.facts.into_iter().map(Into::into).collect(),
        }
    }
}

/// Show whether a consumer meets the baseline
///
/// Answers seven parts from facts: what the inbox holds, the brokers' settings, checks of the
/// database, the versions that run with the stored outcomes of `oncebox verify`, and hosts. Where a
/// fact is not known, the answer is `not_known`. What the inbox and its database hold is read once
/// a minute for each consumer, and few inboxes are read at a time: a request that is answered 503
/// is to be repeated.
#[utoipa::path(get, path = "/v1/tenants/{tenant}/consumers/{consumer}/readiness", tag = "consumers",
    params(("tenant" = String, Path), ("consumer" = String, Path)), responses((status = 200, body = ReadinessBody)),
    extensions(("x-role" = json!("viewer"))))]
pub(crate) async fn show(
    State(api): State<Api>,
    caller: Caller,
    Path((tenant, consumer)): Path<(String, String)>,
) -> Result<Json<ReadinessBody>, ApiError> {
    let row = caller.control.consumers().get(&tenant, &consumer).await?;
    let policy = row.policy()?;
    let scan = scanned(&api, &caller.control, &row, &policy).await?;
    let horizon = horizon::proof_of(&api, &caller, &row, &policy).await?;
    let facts = caller.control.consumers().readiness_facts(&row).await?;
    let input = ReadinessInput { policy: &policy, horizon: &horizon, facts: &facts, scan: &scan };
    let parts = input.answers();
    let worst = parts.iter().map(ReadinessPart::answer).max().unwrap_or(FactAnswer::NotKnown);
    Ok(Json(ReadinessBody {
        tenant: row.tenant,
        consumer: row.name,
        answer: worst.into(),
        parts: parts.into_iter().map(Into::into).collect(),
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    // What could go wrong: a name of the command line is not the name in JSON.
    #[test]
    fn names_are_those_in_json() {
        for part in BaselinePartBody::ALL {
            assert_eq!(serde_json::to_value(part).expect("a name"), part.name());
        }
        let parts = BaselinePart::ALL.map(BaselinePartBody::from);
        assert_eq!(parts, BaselinePartBody::ALL);
    }
}
