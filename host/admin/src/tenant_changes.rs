//! Changes of a tenant, and its end.

use std::time::Duration;

use axum::{Json, extract::State};
use oncebox_inbox::Admin;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use utoipa::ToSchema;

use crate::{
    Api,
    auth::Caller,
    error::ApiError,
    extract::{self, Path},
    tenants::Tenant,
};

/// How long a request waits for the end of a tenant before it says how far that is.
const PATIENCE: Duration = Duration::from_secs(3);

/// What each host gives a tenant, over all of its consumers. Over a limit messages wait; they do
/// not fail.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct TenantLimits {
    /// Its share of a busy host against the other tenants', 1 to 10,000.
    pub weight: u32,
    /// Database connections; none for the host's own bound.
    pub connections_max: Option<usize>,
    /// Transactions at the same time; none for the host's own bound on a tenant.
    pub transactions_max: Option<usize>,
    /// Bytes of guests' memory together; none for the host's own bound.
    pub memory_bytes_max: Option<u64>,
    /// Longest call of a handler, milliseconds, whatever a policy says; none for the host's own
    /// bound.
    #[serde(default)]
    pub deadline_ms_max: Option<u64>,
    /// Messages a second; none for as many as come.
    pub messages_per_second: Option<u32>,
    /// Topics that tokens of the tenant may name in policies: whole names, or beginnings with a `*`
    /// behind them; none for `oncebox.<tenant>.*`. No token of a tenant may name a pattern,
    /// whatever this says.
    #[serde(default)]
    pub topics_allowed: Option<Vec<String>>,
}

impl From<oncebox_inbox::TenantLimits> for TenantLimits {
    fn from(limits: oncebox_inbox::TenantLimits) -> Self {
        let oncebox_inbox::TenantLimits {
            weight,
            connections_max,
            transactions_max,
            memory_bytes_max,
            deadline_ms_max,
            messages_per_second,
            topics_allowed,
        } = limits;
        Self {
            weight,
            connections_max,
            transactions_max,
            memory_bytes_max,
            deadline_ms_max,
            messages_per_second,
            topics_allowed,
        }
    }
}

/// Nothing more is to be said.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Nothing {}

/// A tenant to be deleted.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct TenantDeletion {
    /// The tenant's name once more: everything of it goes for good.
    pub confirm: String,
}

/// How far the end of a tenant is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct TenantRemoval {
    /// The tenant.
    pub tenant: String,
    /// Whether nothing of it is left but the audit log.
    pub is_done: bool,
    /// Hosts that still run something of it.
    pub waiting_for: Vec<String>,
    /// Tables, functions and whatever else is left in its schema.
    pub objects: i64,
    /// Messages that are left in its inbox; more than 100,000 are counted as one more.
    pub messages: i64,
}

/// Suspend a tenant: all of its consumers rest
///
/// Hosts finish the batches that they run and leave its groups. Its tokens only look, and nothing
/// is uploaded or deployed for it.
#[utoipa::path(post, path = "/v1/tenants/{tenant}/suspend", tag = "tenants", params(("tenant" = String, Path)), request_body = Nothing,
    responses((status = 200, body = Tenant)), extensions(("x-role" = json!("platform"))))]
pub(crate) async fn suspend(
    caller: Caller,
    Path(tenant): Path<String>,
    extract::Json(Nothing {}): extract::Json<Nothing>,
) -> Result<Json<Tenant>, ApiError> {
    Ok(Json(caller.admin.suspend_tenant(&tenant).await?.into()))
}

/// Resume a suspended tenant: its consumers go on where they were
#[utoipa::path(post, path = "/v1/tenants/{tenant}/resume", tag = "tenants", params(("tenant" = String, Path)), request_body = Nothing,
    responses((status = 200, body = Tenant)), extensions(("x-role" = json!("platform"))))]
pub(crate) async fn resume(
    caller: Caller,
    Path(tenant): Path<String>,
    extract::Json(Nothing {}): extract::Json<Nothing>,
) -> Result<Json<Tenant>, ApiError> {
    Ok(Json(caller.admin.resume_tenant(&tenant).await?.into()))
}

/// Change what hosts give a tenant
///
/// What is not named stays; `null` takes a limit away.
#[utoipa::path(patch, path = "/v1/tenants/{tenant}/limits", tag = "tenants", params(("tenant" = String, Path)),
    request_body = TenantLimits, responses((status = 200, body = Tenant)), extensions(("x-role" = json!("platform"))))]
pub(crate) async fn limit(
    caller: Caller,
    Path(tenant): Path<String>,
    extract::Json(changes): extract::Json<Map<String, Value>>,
) -> Result<Json<Tenant>, ApiError> {
    Ok(Json(caller.admin.limit_tenant(&tenant, &changes).await?.into()))
}

/// Give a tenant new passwords and a new secret
///
/// Nobody is shown them. Messages go on: for ten minutes what was good before is good as well.
#[utoipa::path(post, path = "/v1/tenants/{tenant}/rotate-credentials", tag = "tenants", params(("tenant" = String, Path)),
    request_body = Nothing, responses((status = 200, body = Tenant)), extensions(("x-role" = json!("admin"))))]
pub(crate) async fn rotate(
    caller: Caller,
    Path(tenant): Path<String>,
    extract::Json(Nothing {}): extract::Json<Nothing>,
) -> Result<Json<Tenant>, ApiError> {
    Ok(Json(caller.admin.rotate_credentials(&tenant).await?.into()))
}

/// Delete a tenant with its tables and its messages, for good
///
/// Hosts let go of it first. The answer says how far it is after some seconds; the work goes on
/// without the caller, and asking again tells more, until there is no such tenant. The audit log
/// stays.
#[utoipa::path(delete, path = "/v1/tenants/{tenant}", tag = "tenants", params(("tenant" = String, Path)), request_body = TenantDeletion,
    responses((status = 200, body = TenantRemoval)), extensions(("x-role" = json!("platform"))))]
pub(crate) async fn delete(
    State(api): State<Api>,
    caller: Caller,
    Path(tenant): Path<String>,
    extract::Json(TenantDeletion { confirm }): extract::Json<TenantDeletion>,
) -> Result<Json<TenantRemoval>, ApiError> {
    caller.admin.tenant(&tenant).await?;
    if confirm != tenant {
        let detail = format!(
            "`confirm` is `{confirm}`; it must be the tenant's name, since everything of \
                `{tenant}` goes for good"
        );
        return Err(ApiError::invalid(detail));
    }
    let row = caller.admin.delete_tenant(&tenant).await?;
    let admin = caller.admin.clone();
    let removing = api.tasks().spawn({
        let row = row.clone();
        async move {
            admin.remove_tenant(&row).await.inspect_err(
                |error| tracing::warn!(tenant = row.name, %error, "a tenant is not deleted yet"),
            )
        }
    });
    // It is not this task's work that ends when the time is up, only the wait for it.
    if let Ok(removed) = tokio::time::timeout(PATIENCE, removing).await {
        removed.map_err(|error| {
            ApiError::host(
                crate::Code::Internal,
                "the host failed to delete it; its log says why",
                error,
            )
        })??;
    }
    Ok(Json(how_far(&caller.admin, &row).await?))
}

async fn how_far(admin: &Admin, row: &oncebox_inbox::Tenant) -> Result<TenantRemoval, ApiError> {
    let tenant = row.name.clone();
    if !admin.tenants().await?.iter().any(|other| other.tenant_id == row.tenant_id) {
        return Ok(TenantRemoval {
            tenant,
            is_done: true,
            waiting_for: Vec::new(),
            objects: 0,
            messages: 0,
        });
    }
    let oncebox_inbox::TenantRemoval { waiting_for, objects, messages } =
        admin.tenant_removal(row).await?;
    Ok(TenantRemoval { tenant, is_done: false, waiting_for, objects, messages })
}
