//! The proof that a consumer's inbox remembers for longer than its messages can come again, against
//! the brokers as they are now.

use axum::{Json, extract::State};
use oncebox_control::Consumer;
use oncebox_model::policy::{
    Horizon, HorizonInput, HorizonVerdict, MemoryFacts, MemoryRaise, Policy, Redelivery, Retention,
    TopicRetention, TopicSettings,
};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::{
    Api,
    auth::Caller,
    brokers::NO_BROKERS,
    error::{ApiError, Code},
    extract::Path,
    storage,
};

/// The proof that a consumer's inbox remembers for long enough.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
#[schema(as = Horizon)]
pub struct HorizonBody {
    /// Inputs: settings of the topics, of the group and of the policy, as they are now, and the
    /// factors that the policy names.
    pub inputs: Vec<HorizonInputBody>,
    /// Factor between the longest redelivery and the memory that it needs.
    pub factor: u64,
    /// Memory that is needed, milliseconds; null for ever.
    pub needed_ms: Option<u64>,
    /// Time for which the inbox surely remembers a completed message, milliseconds; null for ever.
    pub remembered_ms: Option<u64>,
    /// Longest time for which a completed message stays in the inbox, milliseconds; null for ever.
    pub kept_ms: Option<u64>,
    /// Longest time that the factors allow, milliseconds; null without a bound.
    pub allowed_ms: Option<u64>,
    /// Retention class of the policy.
    pub retention: String,
    /// Longest class that `replay.horizon = "raise"` may choose for a new consumer with this
    /// policy; null where the policy does not say that.
    pub raise_bound: Option<String>,
    /// Class that a new consumer with this policy would get by a raise; null where it would get
    /// `retention`, or where no raise suffices. The class of this consumer stays.
    pub raise_to: Option<String>,
    /// The raise that a new consumer with this policy would get, as text for a reader; null where
    /// `raise_to` is.
    pub raise: Option<String>,
    /// The policy's `replay.past_horizon`.
    pub past_horizon: String,
    /// The verdict.
    pub verdict: HorizonVerdictBody,
    /// The verdict as a sentence, as text for a reader.
    pub conclusion: String,
    /// Warnings about factors that bring no message again, as text for a reader.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub warnings: Vec<String>,
}

/// An input of the proof.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[schema(as = HorizonInput)]
pub struct HorizonInputBody {
    /// Factor to which it belongs, such as `broker retention` or `law`.
    pub factor: String,
    /// Place of the setting: a topic, the group, the inbox or the policy.
    pub of: String,
    /// Name of the setting.
    pub name: String,
    /// Its value, with the value in words where it is a time.
    pub value: String,
    /// Memory that it needs, in words; null where it does not count.
    pub needs: Option<String>,
    /// Longest time that it allows to keep a message, in words; null where it sets no bound.
    pub allows: Option<String>,
    /// Whether it decides: no other input needs more, or none allows less.
    pub decides: bool,
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
            factor: input.factor.name().to_owned(),
            of: input.of.clone(),
            name: input.name.clone(),
            value: input.value.clone(),
            needs: input.needs.map(|needs| needs.to_string()),
            allows: input.allows.map(|allows| allows.to_string()),
            decides: input.decides,
        };
        let class = |class: Retention| class.name().to_owned();
        let raise = horizon.raise();
        Self {
            inputs: horizon.inputs.iter().map(input).collect(),
            factor: horizon.factor,
            needed_ms: horizon.needed.ms(),
            remembered_ms: horizon.remembered.ms(),
            kept_ms: horizon.kept.ms(),
            allowed_ms: horizon.allowed.ms(),
            retention: class(horizon.retention),
            raise_bound: horizon.raise_bound.map(class),
            raise_to: raise.as_ref().map(|raise| class(raise.to)),
            raise: raise.as_ref().map(MemoryRaise::described),
            past_horizon: horizon.past_horizon.name().to_owned(),
            verdict: horizon.verdict.into(),
            conclusion: horizon.conclusion(),
            warnings: horizon.cost_warning().into_iter().collect(),
        }
    }
}

/// Show whether a consumer's inbox remembers for long enough
///
/// Asks the brokers for how long they keep the records of the consumer's topics. The inbox must
/// remember completed messages for twice as long, or for ever. Each factor of the policy is an
/// input, with the memory that it needs or the time that it allows, and those that decide are
/// marked.
#[utoipa::path(get, path = "/v1/tenants/{tenant}/consumers/{consumer}/horizon", tag = "consumers",
    params(("tenant" = String, Path), ("consumer" = String, Path)), responses((status = 200, body = HorizonBody)),
    extensions(("x-role" = json!("viewer"))))]
pub(crate) async fn show(
    State(api): State<Api>,
    caller: Caller,
    Path((tenant, consumer)): Path<(String, String)>,
) -> Result<Json<HorizonBody>, ApiError> {
    let consumer = caller.control.consumers().get(&tenant, &consumer).await?;
    let policy = consumer.policy()?;
    Ok(Json(HorizonBody::of(&proof_of(&api, &caller, &consumer, &policy).await?)))
}

/// Proves the memory of a consumer with a policy, as [`proof`] does.
pub(crate) async fn proof_of(
    api: &Api,
    caller: &Caller,
    consumer: &Consumer,
    policy: &Policy,
) -> Result<Horizon, ApiError> {
    proof(api, caller, &consumer.tenant, &consumer.name, policy).await
}

/// Proves the memory of a consumer, whether it exists or not, with a policy. Asks the brokers for
/// the ways in which its messages come again; in a process without brokers they are not known.
async fn proof(
    api: &Api,
    caller: &Caller,
    tenant: &str,
    consumer: &str,
    policy: &Policy,
) -> Result<Horizon, ApiError> {
    let redelivery = match api.brokers() {
        Some(brokers) => brokers.redelivery(tenant, consumer, policy).await,
        None => without_brokers(policy),
    };
    let facts = facts(api, caller, tenant, consumer, policy).await?;
    Ok(Horizon::of(policy, &redelivery, &facts))
}

/// Returns what a process without brokers knows of a policy's topics.
fn without_brokers(policy: &Policy) -> Redelivery {
    let topic = |topic: &String| TopicSettings {
        topic: topic.clone(),
        kept: TopicRetention::Unknown(NO_BROKERS.to_owned()),
    };
    Redelivery { topics: policy.topics.iter().map(topic).collect(), group_ms: 0 }
}

/// The result of the check of a new consumer that was not refused.
#[derive(Default)]
pub(crate) struct HorizonCheck {
    /// Raise that the policy got; none where the memory is long enough.
    pub(crate) raise: Option<MemoryRaise>,
    /// Warnings for the owner of the consumer.
    pub(crate) warnings: Vec<String>,
}

/// Refuses the policy of a new consumer under which a redelivery would have its effect again.
/// Raises the retention of one that wants that to what is needed.
pub(crate) async fn check_new(
    api: &Api,
    caller: &Caller,
    tenant: &str,
    name: &str,
    policy: &mut Policy,
) -> Result<HorizonCheck, ApiError> {
    if !policy.has_horizon() {
        return Ok(HorizonCheck::default());
    }
    let horizon = proof(api, caller, tenant, name, policy).await?;
    refuse(horizon.refusal_of_new())?;
    let Some(raise) = horizon.raise() else {
        return Ok(HorizonCheck { raise: None, warnings: warnings(api, &horizon) });
    };
    policy.retention = raise.to;
    Ok(HorizonCheck { warnings: vec![raise.made()], raise: Some(raise) })
}

/// Refuses another policy of a consumer under which a redelivery would have its effect again, and
/// returns the warnings for its owner. The memory of an existing consumer is never raised.
pub(crate) async fn check(
    api: &Api,
    caller: &Caller,
    consumer: &Consumer,
    policy: &Policy,
) -> Result<Vec<String>, ApiError> {
    if !policy.has_horizon() {
        return Ok(Vec::new());
    }
    let horizon = proof_of(api, caller, consumer, policy).await?;
    refuse(horizon.refusal())?;
    Ok(warnings(api, &horizon))
}

fn refuse(refusal: Option<String>) -> Result<(), ApiError> {
    refusal.map_or(Ok(()), |text| Err(ApiError::new(Code::Conflict, text)))
}

/// Returns the warnings for the owner of a consumer. A process without brokers does not warn that
/// it knows nothing of them.
fn warnings(api: &Api, horizon: &Horizon) -> Vec<String> {
    let is_known = api.brokers().is_some() || horizon.verdict != HorizonVerdict::Unknown;
    let of_memory = horizon.warning().filter(|_| is_known);
    of_memory.into_iter().chain(horizon.cost_warning()).collect()
}

/// Logs a raise, once the consumer is created.
pub(crate) fn log_raise(tenant: &str, consumer: &str, raise: &MemoryRaise) {
    let MemoryRaise { from, to, cause } = raise;
    let (from, to) = (from.name(), to.name());
    tracing::warn!(tenant, consumer, from, to, cause, "memory raised");
}

/// Returns the warnings about a policy that is in place already. A proof that fails warns of
/// nothing.
pub(crate) async fn warnings_of(
    api: &Api,
    caller: &Caller,
    consumer: &Consumer,
    policy: &Policy,
) -> Vec<String> {
    if !policy.has_horizon() {
        return Vec::new();
    }
    match proof_of(api, caller, consumer, policy).await {
        Ok(horizon) => warnings(api, &horizon),
        Err(_) => Vec::new(),
    }
}

/// Returns what is known of a consumer beside its policy. Its growth is measured only for a policy
/// with a budget.
async fn facts(
    api: &Api,
    caller: &Caller,
    tenant: &str,
    consumer: &str,
    policy: &Policy,
) -> Result<MemoryFacts, ApiError> {
    let bytes_per_day = match policy.factors.budget_bytes {
        Some(_) => storage::bytes_per_day(api, &caller.control, tenant, consumer).await,
        None => None,
    };
    let retention_max = match caller.principal.tenant() {
        Some(_) => caller.control.tenants().get(tenant).await?.limits.retention_max,
        None => None,
    };
    Ok(MemoryFacts { bytes_per_day, retention_max })
}
