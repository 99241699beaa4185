//! The proof that a consumer's inbox remembers for longer than its messages can come again, against
//! the brokers as they are now.

use axum::{Json, extract::State};
use oncebox_model::policy::{
    Horizon, HorizonInput, HorizonVerdict, MARGIN, Policy, Redelivery, TopicRetention,
    TopicSettings,
};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::{
    Api,
    auth::Caller,
    error::{ApiError, Code},
    extract::Path,
};

/// The proof that a consumer's inbox remembers for long enough.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
#[schema(as = Horizon)]
pub struct HorizonBody {
    /// Inputs: settings of the topics, of the group and of the policy, as they are now.
    pub inputs: Vec<HorizonInputBody>,
    /// Factor between the longest redelivery and the memory that it needs.
    pub factor: u64,
    /// Memory that is needed, milliseconds; null for ever.
    pub needed_ms: Option<u64>,
    /// Time for which the inbox surely remembers a completed message, milliseconds; null for ever.
    pub remembered_ms: Option<u64>,
    /// Retention class of the policy.
    pub retention: String,
    /// The policy's `replay.past_horizon`.
    pub past_horizon: String,
    /// The verdict.
    pub verdict: HorizonVerdictBody,
    /// The verdict as a sentence, as text for a reader.
    pub conclusion: String,
}

/// An input of the proof.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[schema(as = HorizonInput)]
pub struct HorizonInputBody {
    /// Place of the setting: a topic, the group or the policy.
    pub of: String,
    /// Name of the setting.
    pub name: String,
    /// Its value, with the value in words where it is a time.
    pub value: String,
    /// Memory that it needs, in words; null where it does not count.
    pub needs: Option<String>,
}

/// The verdict on a consumer's memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[schema(as = HorizonVerdict)]
#[serde(rename_all = "snake_case")]
pub enum HorizonVerdictBody {
    /// The inbox remembers for as long as is needed.
    Holds,
    /// It forgets too soon, and records that it may have forgotten are parked.
    Parked,
    /// It forgets too soon, and a record that it has forgotten has its effect again.
    TooShort,
    /// A topic's settings are not known.
    Unknown,
    /// Deduplication is off: nothing is remembered.
    NotRemembered,
}

impl From<HorizonVerdict> for HorizonVerdictBody {
    fn from(verdict: HorizonVerdict) -> Self {
        match verdict {
            HorizonVerdict::Holds => Self::Holds,
            HorizonVerdict::Parked => Self::Parked,
            HorizonVerdict::TooShort => Self::TooShort,
            HorizonVerdict::Unknown => Self::Unknown,
            HorizonVerdict::NotRemembered => Self::NotRemembered,
        }
    }
}

impl HorizonBody {
    fn of(horizon: &Horizon) -> Self {
        let input = |input: &HorizonInput| HorizonInputBody {
            of: input.of.clone(),
            name: input.name.clone(),
            value: input.value.clone(),
            needs: input.needs.map(|needs| needs.to_string()),
        };
        Self {
            inputs: horizon.inputs.iter().map(input).collect(),
            factor: MARGIN,
            needed_ms: horizon.needed.ms(),
            remembered_ms: horizon.remembered.ms(),
            retention: horizon.retention.name().to_owned(),
            past_horizon: horizon.past_horizon.name().to_owned(),
            verdict: horizon.verdict.into(),
            conclusion: horizon.conclusion(),
        }
    }
}

/// Show whether a consumer's inbox remembers for long enough
///
/// Asks the brokers for how long they keep the records of the consumer's topics. The inbox must
/// remember completed messages for twice as long, or for ever.
#[utoipa::path(get, path = "/v1/tenants/{tenant}/consumers/{consumer}/horizon", tag = "consumers",
    params(("tenant" = String, Path), ("consumer" = String, Path)), responses((status = 200, body = HorizonBody)),
    extensions(("x-role" = json!("viewer"))))]
pub(crate) async fn show(
    State(api): State<Api>,
    caller: Caller,
    Path((tenant, consumer)): Path<(String, String)>,
) -> Result<Json<HorizonBody>, ApiError> {
    let policy = caller.admin.consumers().get(&tenant, &consumer).await?.policy()?;
    let redelivery = match api.brokers() {
        Some(brokers) => brokers.redelivery(&tenant, &consumer, &policy).await,
        None => without_brokers(&policy),
    };
    Ok(Json(HorizonBody::of(&Horizon::of(&policy, &redelivery))))
}

/// Returns what a process without brokers knows of a policy's topics.
fn without_brokers(policy: &Policy) -> Redelivery {
    let reason = "this process knows no brokers; set `kafka.brokers` (ONCEBOX_KAFKA_BROKERS), or \
        ask a server";
    let topic = |topic: &String| TopicSettings {
        topic: topic.clone(),
        kept: TopicRetention::Unknown(reason.to_owned()),
    };
    Redelivery { topics: policy.topics.iter().map(topic).collect(), group_ms: 0 }
}

/// Refuses a new policy under which a redelivery would have its effect again. Returns the warnings
/// of one that passes.
pub(crate) async fn check(
    api: &Api,
    tenant: &str,
    consumer: &str,
    policy: &Policy,
) -> Result<Vec<String>, ApiError> {
    let Some(horizon) = prove(api, tenant, consumer, policy).await else { return Ok(Vec::new()) };
    match horizon.refusal() {
        Some(text) => Err(ApiError::new(Code::Conflict, text)),
        None => Ok(horizon.warning().into_iter().collect()),
    }
}

/// Returns the warning about a policy that is in place already, if there is one.
pub(crate) async fn warning(
    api: &Api,
    tenant: &str,
    consumer: &str,
    policy: &Policy,
) -> Option<String> {
    prove(api, tenant, consumer, policy).await?.warning()
}

/// Proves a policy against the brokers. Returns none in a process without brokers, and for a policy
/// whose verdict does not depend on them.
async fn prove(api: &Api, tenant: &str, consumer: &str, policy: &Policy) -> Option<Horizon> {
    if !policy.has_horizon() {
        return None;
    }
    let redelivery = api.brokers()?.redelivery(tenant, consumer, policy).await;
    Some(Horizon::of(policy, &redelivery))
}
