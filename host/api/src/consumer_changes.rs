//! Changes of existing consumers: their policy, their state, their deletion.

use axum::{Json, extract::State};
use oncebox_model::policy::Policy;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use utoipa::ToSchema;

use crate::{
    Api,
    auth::Caller,
    consumers::{ConsumerBody, check_tenants_policy, parse, shown},
    error::{ApiError, Code},
    extract::{Json as Body, Path, Query},
    horizon,
};

/// The request to change a policy.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct NewPolicy {
    /// The whole policy, with the keys of a policy's file. `…` as a value of `kafka.properties`
    /// keeps the present value.
    #[schema(value_type = Object)]
    pub policy: Map<String, Value>,
    /// Whether to make a change that has consequences. Without it, such a change is only described.
    #[serde(default)]
    pub accept: bool,
}

/// A change of a policy, made or described.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
#[schema(as = PolicyChange)]
pub struct PolicyChangeBody {
    /// The keys that change.
    pub differences: Vec<PolicyDifferenceBody>,
    /// Consequences, which the caller must accept.
    pub consequences: Vec<ConsequenceBody>,
    /// Whether the requested policy is in place.
    pub is_made: bool,
    /// The consumer after the request.
    pub consumer: ConsumerBody,
    /// Warnings, which need no acceptance.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub warnings: Vec<String>,
}

/// A key of a policy that changes.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
#[schema(as = PolicyDifference)]
pub struct PolicyDifferenceBody {
    /// The key, with dots.
    pub key: String,
    /// Value before; null where there was none. Values of `kafka.properties` are not shown.
    pub before: Option<Value>,
    /// Value after; null where there is none.
    pub after: Option<Value>,
}

/// A consequence of a change.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
#[schema(as = Consequence)]
pub struct ConsequenceBody {
    /// The key whose change causes it.
    pub key: String,
    /// Text for a reader.
    pub text: String,
}

/// A body without members.
#[derive(Debug, Clone, Default, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct NothingMore {}

/// Give a consumer another policy
///
/// A change with consequences for messages is only described until it is accepted. Hosts finish
/// their batches with the old policy and start again with the new one. `retention` cannot change;
/// one that `replay.horizon = "raise"` raised at the creation to the present one stands for it. A
/// token of a tenant cannot change `kafka.properties`: the values that it sends are ignored. It
/// cannot add a pattern, or a topic that its tenant may not read; those that an operator set may
/// stay. A change of `topics`, `dedup`, `replay`, `retry` or `factors` is refused where the brokers
/// keep records for longer than `retention` covers and `replay.past_horizon` is `run`, also with
/// `replay.horizon = "raise"`, and where `factors` contradict the longest redelivery.
#[utoipa::path(put, path = "/v1/tenants/{tenant}/consumers/{consumer}/policy", tag = "consumers",
    params(("tenant" = String, Path), ("consumer" = String, Path)), request_body = NewPolicy,
    responses((status = 200, body = PolicyChangeBody)), extensions(("x-role" = json!("admin"))))]
pub(crate) async fn set_policy(
    State(api): State<Api>,
    caller: Caller,
    Path((tenant, consumer)): Path<(String, String)>,
    Body(new): Body<NewPolicy>,
) -> Result<Json<PolicyChangeBody>, ApiError> {
    let mut policy = parse(new.policy).await?;
    let before = caller.control.consumers().get(&tenant, &consumer).await?;
    check_tenants_policy(&caller, &tenant, &consumer, &mut policy, Some(&before)).await?;
    let known = before.policy().ok();
    if let Some(known) = &known {
        policy.keep_memory(known);
    }
    api.components().check_policy(&tenant, &consumer, &policy).map_err(ApiError::invalid)?;
    let warnings = match asked_about(known, &policy) {
        Some(asked) => horizon::check(&api, &caller, &before, &asked).await?,
        None => Vec::new(),
    };
    let change =
        caller.control.consumers().set_policy(&tenant, &consumer, policy, new.accept).await?;
    let difference = |d: oncebox_control::PolicyDifference| PolicyDifferenceBody {
        key: d.key,
        before: d.before,
        after: d.after,
    };
    let consequence =
        |c: oncebox_control::Consequence| ConsequenceBody { key: c.key.to_owned(), text: c.text };
    Ok(Json(PolicyChangeBody {
        differences: change.differences.into_iter().map(difference).collect(),
        consequences: change.consequences.into_iter().map(consequence).collect(),
        is_made: change.is_made,
        consumer: shown(&caller.control, &tenant, &consumer).await?,
        warnings,
    }))
}

/// Returns the policy to ask the brokers about; none where no key changes that decides how long a
/// message must be remembered.
fn asked_about(before: Option<Policy>, after: &Policy) -> Option<Policy> {
    let Some(before) = before else { return Some(after.clone()) };
    let is_alike = (&before.topics, before.dedup, &before.replay, &before.retry, &before.factors)
        == (&after.topics, after.dedup, &after.replay, &after.retry, &after.factors);
    // Asked as the consumer connects now: the new policy may hold hidden values.
    (!is_alike).then(|| Policy { kafka: before.kafka, ..after.clone() })
}

/// Pause a consumer
///
/// Hosts finish the batches that they run, leave the group, and stop retries.
#[utoipa::path(post, path = "/v1/tenants/{tenant}/consumers/{consumer}/pause", tag = "consumers",
    params(("tenant" = String, Path), ("consumer" = String, Path)), request_body = NothingMore,
    responses((status = 200, body = ConsumerBody)), extensions(("x-role" = json!("operator"))))]
pub(crate) async fn pause(
    caller: Caller,
    Path((tenant, consumer)): Path<(String, String)>,
    Body(NothingMore {}): Body<NothingMore>,
) -> Result<Json<ConsumerBody>, ApiError> {
    caller.control.consumers().pause(&tenant, &consumer).await?;
    Ok(Json(shown(&caller.control, &tenant, &consumer).await?))
}

/// Resume a consumer
///
/// A token that is of no tenant also releases a consumer from quarantine, which begins when a host
/// ends while starting it.
#[utoipa::path(post, path = "/v1/tenants/{tenant}/consumers/{consumer}/resume", tag = "consumers",
    params(("tenant" = String, Path), ("consumer" = String, Path)), request_body = NothingMore,
    responses((status = 200, body = ConsumerBody)), extensions(("x-role" = json!("operator"))))]
pub(crate) async fn resume(
    caller: Caller,
    Path((tenant, consumer)): Path<(String, String)>,
    Body(NothingMore {}): Body<NothingMore>,
) -> Result<Json<ConsumerBody>, ApiError> {
    let quarantine = caller.control.consumers().get(&tenant, &consumer).await?.quarantine;
    if let Some(quarantine) = quarantine {
        if caller.principal.tenant().is_some() {
            let text = quarantine.text(&tenant, &consumer);
            return Err(ApiError::new(
                Code::Forbidden,
                format!("a token of a tenant cannot resume consumer `{tenant}/{consumer}`: {text}"),
            ));
        }
        caller.control.consumers().release(&tenant, &consumer).await?;
    }
    caller.control.consumers().resume(&tenant, &consumer).await?;
    Ok(Json(shown(&caller.control, &tenant, &consumer).await?))
}

/// Drain a consumer
///
/// No further records are read. Retries continue until nothing in its inbox is open, and the
/// consumer is paused.
#[utoipa::path(post, path = "/v1/tenants/{tenant}/consumers/{consumer}/drain", tag = "consumers",
    params(("tenant" = String, Path), ("consumer" = String, Path)), request_body = NothingMore,
    responses((status = 200, body = ConsumerBody)), extensions(("x-role" = json!("operator"))))]
pub(crate) async fn drain(
    caller: Caller,
    Path((tenant, consumer)): Path<(String, String)>,
    Body(NothingMore {}): Body<NothingMore>,
) -> Result<Json<ConsumerBody>, ApiError> {
    caller.control.consumers().drain(&tenant, &consumer).await?;
    Ok(Json(shown(&caller.control, &tenant, &consumer).await?))
}

/// Delete a consumer
///
/// `confirm` is its name. After the answer nothing runs for it, and hosts remove its inbox, its
/// deployments and its group in the brokers. The effects of its messages, the tenant's handlers and
/// the audit log stay.
#[utoipa::path(delete, path = "/v1/tenants/{tenant}/consumers/{consumer}", tag = "consumers",
    params(("tenant" = String, Path), ("consumer" = String, Path), ("confirm" = String, Query)),
    responses((status = 200, body = ConsumerBody)), extensions(("x-role" = json!("admin"))))]
pub(crate) async fn delete(
    caller: Caller,
    Path((tenant, consumer)): Path<(String, String)>,
    mut query: Query,
) -> Result<Json<ConsumerBody>, ApiError> {
    let confirmed = query.text("confirm")?;
    query.end()?;
    let row = caller.control.consumers().get(&tenant, &consumer).await?;
    if confirmed.as_deref() != Some(row.name.as_str()) {
        return Err(ApiError::invalid(
            "query parameter `confirm` must be the consumer's name: its inbox is deleted, for good",
        ));
    }
    caller.control.consumers().delete(&tenant, &consumer).await?;
    Ok(Json(shown(&caller.control, &tenant, &consumer).await?))
}
