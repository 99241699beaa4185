//! Changes of deployments.

use axum::{Json, extract::State, http::StatusCode};
use oncebox_control as control;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::{
    Api,
    auth::Caller,
    deployments::{DeploymentBody, NewCanary, NewDeploymentBody, NewShadow},
    error::ApiError,
    extract::{Json as Body, Path},
    horizon,
};

/// A new share of a canary or a shadow.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct NewPercent {
    /// Share, more than 0 and at most 100.
    pub percent: f64,
}

/// The request to end a deployment.
#[derive(Debug, Clone, Default, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Ending {
    /// Reason, kept with the deployment.
    #[serde(default)]
    pub reason: Option<String>,
}

/// The request to promote a canary. It has no members.
#[derive(Debug, Clone, Default, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Promotion {}

/// The request to roll back.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct NewRollback {
    /// The event type of the slot.
    pub event_type: String,
    /// The event versions of the slot.
    #[serde(default)]
    pub event_versions: Option<String>,
    /// First digits of the digest of the version to go back to. By default the version before.
    #[serde(default)]
    pub to: Option<String>,
    /// Reason, kept with the withdrawn deployment.
    #[serde(default)]
    pub reason: Option<String>,
    /// Whether to run messages again that the withdrawn version failed.
    #[serde(default)]
    pub redrive: bool,
}

/// The result of a rollback.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
#[schema(as = Rollback)]
pub struct RollbackBody {
    /// The withdrawn deployment.
    pub withdrawn: DeploymentBody,
    /// The deployment that is live instead.
    pub live: DeploymentBody,
    /// Migrations that are later than the live version; they stay applied.
    pub migrations_kept: Vec<String>,
    /// Number of messages that the withdrawn version failed and that run again.
    pub redriven: u64,
}

/// Deploy: make a version live
///
/// Hosts switch between two transactions. The deployment that was live for this event type and
/// these event versions ends.
#[utoipa::path(post, path = "/v1/tenants/{tenant}/consumers/{consumer}/deployments", tag = "deployments",
    params(("tenant" = String, Path), ("consumer" = String, Path)), request_body = NewDeploymentBody,
    responses((status = 201, body = DeploymentBody)), extensions(("x-role" = json!("deployer"))))]
pub(crate) async fn deploy(
    State(api): State<Api>,
    caller: Caller,
    Path((tenant, consumer)): Path<(String, String)>,
    Body(new): Body<NewDeploymentBody>,
) -> Result<(StatusCode, Json<DeploymentBody>), ApiError> {
    let new = new.into_inbox(control::DeploymentRole::Stable, None, None);
    // Read before, and asked beside: no error of the warning is one of the deployment.
    let row = caller.control.consumers().get(&tenant, &consumer).await?;
    let policy = row.policy()?;
    let (deployed, warnings) = tokio::join!(
        caller.deploy(&tenant, &consumer, &new),
        horizon::warnings_of(&api, &caller, &row, &policy)
    );
    let (status, Json(mut deployed)) = deployed?;
    deployed.warnings.extend(warnings);
    Ok((status, Json(deployed)))
}

/// Start a canary
///
/// It takes a share of the ordering keys, and ends automatically when it fails too often.
#[utoipa::path(post, path = "/v1/tenants/{tenant}/consumers/{consumer}/canaries", tag = "deployments",
    params(("tenant" = String, Path), ("consumer" = String, Path)), request_body = NewCanary,
    responses((status = 201, body = DeploymentBody)), extensions(("x-role" = json!("deployer"))))]
pub(crate) async fn start_canary(
    caller: Caller,
    Path((tenant, consumer)): Path<(String, String)>,
    Body(new): Body<NewCanary>,
) -> Result<(StatusCode, Json<DeploymentBody>), ApiError> {
    let NewCanary { deployment, percent, guard } = new;
    caller
        .deploy(
            &tenant,
            &consumer,
            &deployment.into_inbox(control::DeploymentRole::Canary, Some(percent), guard),
        )
        .await
}

/// Start a shadow
///
/// It runs on a share of the messages after the live version, and its effects are rolled back.
#[utoipa::path(post, path = "/v1/tenants/{tenant}/consumers/{consumer}/shadows", tag = "deployments",
    params(("tenant" = String, Path), ("consumer" = String, Path)), request_body = NewShadow,
    responses((status = 201, body = DeploymentBody)), extensions(("x-role" = json!("deployer"))))]
pub(crate) async fn start_shadow(
    caller: Caller,
    Path((tenant, consumer)): Path<(String, String)>,
    Body(new): Body<NewShadow>,
) -> Result<(StatusCode, Json<DeploymentBody>), ApiError> {
    let NewShadow { mut deployment, percent, duration_ms } = new;
    if let Some(duration_ms) = duration_ms {
        deployment.limits.insert("deadline_ms".to_owned(), duration_ms.into());
    }
    caller
        .deploy(
            &tenant,
            &consumer,
            &deployment.into_inbox(control::DeploymentRole::Shadow, Some(percent), None),
        )
        .await
}

/// Roll back
///
/// Goes back to the version before, or to a named one. Where a canary runs, the canary is
/// withdrawn. No transaction that begins after the answer completes with the withdrawn version.
#[utoipa::path(post, path = "/v1/tenants/{tenant}/consumers/{consumer}/rollbacks", tag = "deployments",
    params(("tenant" = String, Path), ("consumer" = String, Path)), request_body = NewRollback,
    responses((status = 201, body = RollbackBody)), extensions(("x-role" = json!("operator"))))]
pub(crate) async fn roll_back(
    caller: Caller,
    Path((tenant, consumer)): Path<(String, String)>,
    Body(new): Body<NewRollback>,
) -> Result<(StatusCode, Json<RollbackBody>), ApiError> {
    let NewRollback { event_type, event_versions, to, reason, redrive } = new;
    let slot = control::Slot { event_type, event_versions };
    let done = caller
        .control
        .deployments()
        .roll_back(&tenant, &consumer, &slot, to.as_deref(), reason.as_deref(), redrive)
        .await?;
    let control::Rollback { withdrawn, live, migrations_kept, redriven } = done;
    let withdrawn = caller.shown(&tenant, &consumer, withdrawn).await?;
    let live = caller.shown(&tenant, &consumer, live).await?;
    Ok((StatusCode::CREATED, Json(RollbackBody { withdrawn, live, migrations_kept, redriven })))
}

/// Give a canary or a shadow another share
#[utoipa::path(patch, path = "/v1/tenants/{tenant}/consumers/{consumer}/deployments/{deployment_id}", tag = "deployments",
    params(("tenant" = String, Path), ("consumer" = String, Path), ("deployment_id" = i64, Path)), request_body = NewPercent,
    responses((status = 200, body = DeploymentBody)), extensions(("x-role" = json!("operator"))))]
pub(crate) async fn set_percent(
    caller: Caller,
    Path((tenant, consumer, deployment_id)): Path<(String, String, i64)>,
    Body(new): Body<NewPercent>,
) -> Result<Json<DeploymentBody>, ApiError> {
    let changed = caller
        .control
        .deployments()
        .set_percent(&tenant, &consumer, deployment_id, new.percent)
        .await?;
    Ok(Json(caller.shown(&tenant, &consumer, changed).await?))
}

/// Promote a canary: it takes everything
#[utoipa::path(post, path = "/v1/tenants/{tenant}/consumers/{consumer}/deployments/{deployment_id}/promote", tag = "deployments",
    params(("tenant" = String, Path), ("consumer" = String, Path), ("deployment_id" = i64, Path)), request_body = Promotion,
    responses((status = 200, body = DeploymentBody)), extensions(("x-role" = json!("deployer"))))]
pub(crate) async fn promote(
    caller: Caller,
    Path((tenant, consumer, deployment_id)): Path<(String, String, i64)>,
    Body(Promotion {}): Body<Promotion>,
) -> Result<Json<DeploymentBody>, ApiError> {
    let promoted = caller.control.deployments().promote(&tenant, &consumer, deployment_id).await?;
    Ok(Json(caller.shown(&tenant, &consumer, promoted).await?))
}

/// End a canary, a shadow or a stable deployment
#[utoipa::path(post, path = "/v1/tenants/{tenant}/consumers/{consumer}/deployments/{deployment_id}/end", tag = "deployments",
    params(("tenant" = String, Path), ("consumer" = String, Path), ("deployment_id" = i64, Path)), request_body = Ending,
    responses((status = 200, body = DeploymentBody)), extensions(("x-role" = json!("operator"))))]
pub(crate) async fn end(
    caller: Caller,
    Path((tenant, consumer, deployment_id)): Path<(String, String, i64)>,
    Body(ending): Body<Ending>,
) -> Result<Json<DeploymentBody>, ApiError> {
    let ended = caller
        .control
        .deployments()
        .end(&tenant, &consumer, deployment_id, ending.reason.as_deref())
        .await?;
    Ok(Json(caller.shown(&tenant, &consumer, ended).await?))
}
