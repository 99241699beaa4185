//! Changes of a tenant, and its deletion.

use std::time::Duration;

use axum::{Json, extract::State};
use oncebox_control::Control;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use utoipa::ToSchema;

use crate::{
    Api,
    auth::Caller,
    error::ApiError,
    extract::{self, Path},
    tenants::TenantBody,
};

/// Longest wait of a request for the end of a deletion, before the answer reports the progress.
const PATIENCE: Duration = Duration::from_secs(3);

/// The resources that each host gives a tenant, over all of its consumers. Over a limit messages
/// wait; they do not fail. The storage budget limits nothing.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
#[schema(as = TenantLimits)]
pub struct TenantLimitsBody {
    /// Weight against the other tenants on a busy host, 1 to 10,000.
    pub weight: u32,
    /// Largest number of database connections; null for the host's own bound.
    pub connections_max: Option<usize>,
    /// Largest number of transactions at a time; null for the host's own bound on a tenant.
    pub transactions_max: Option<usize>,
    /// Memory of all guests together, bytes; null for the host's own bound.
    pub memory_bytes_max: Option<u64>,
    /// Longest call of a handler, milliseconds, also where a policy allows more; null for the
    /// host's own bound.
    #[serde(default)]
    pub deadline_ms_max: Option<u64>,
    /// Messages a second; null for no limit.
    pub messages_per_second: Option<u32>,
    /// Bytes that the tenant's inbox is meant to take at most, now and in 30 days; null for no
    /// budget. Above it there is an alert, and messages go on.
    #[serde(default)]
    pub storage_budget_bytes: Option<u64>,
    /// Longest retention class that tokens of the tenant may choose for a new consumer: `7d`,
    /// `30d`, `1y` or `permanent`; null for no bound.
    #[serde(default)]
    pub retention_max: Option<String>,
    /// Topics that tokens of the tenant may name in policies: whole names, or beginnings followed
    /// by `*`; null for `oncebox.<tenant>.*`. A token of a tenant may never name a pattern.
    #[serde(default)]
    pub topics_allowed: Option<Vec<String>>,
    /// Destinations that handlers of the tenant may send outgoing messages to: whole destinations
    /// such as `kafka:orders` or `inbox:billing`, or beginnings followed by `*`; null for none.
    #[serde(default)]
    pub destinations_allowed: Option<Vec<String>>,
    /// Hosts that endpoints of the tenant may be on, as far as the operator's settings allow them
    /// too: names such as `hooks.example`, `*.` and a name, or addresses, each with a port where it
    /// is not that of the scheme; null for none.
    #[serde(default)]
    pub endpoint_hosts_allowed: Option<Vec<String>>,
}

impl From<oncebox_model::TenantLimits> for TenantLimitsBody {
    fn from(limits: oncebox_model::TenantLimits) -> Self {
        let oncebox_model::TenantLimits {
            weight,
            connections_max,
            transactions_max,
            memory_bytes_max,
            deadline_ms_max,
            messages_per_second,
            storage_budget_bytes,
            retention_max,
            topics_allowed,
            destinations_allowed,
            endpoint_hosts_allowed,
        } = limits;
        Self {
            weight,
            connections_max,
            transactions_max,
            memory_bytes_max,
            deadline_ms_max,
            messages_per_second,
            storage_budget_bytes,
            retention_max: retention_max.map(|class| class.name().to_owned()),
            topics_allowed,
            destinations_allowed,
            endpoint_hosts_allowed,
        }
    }
}

/// A body without members.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Nothing {}

/// The request to delete a tenant.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct TenantDeletion {
    /// The tenant's name, repeated because the deletion is final.
    pub confirm: String,
}

/// The progress of a tenant's deletion.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[schema(as = TenantRemoval)]
pub struct TenantRemovalBody {
    /// The tenant.
    pub tenant: String,
    /// Whether only the audit log is left of the tenant.
    pub is_done: bool,
    /// Hosts that still do work of the tenant.
    pub waiting_for: Vec<String>,
    /// Number of tables, functions and other objects left in its schema.
    pub objects: i64,
    /// Number of messages left in its inbox; 100,001 for more than 100,000.
    pub messages: i64,
}

/// Suspend a tenant: all of its consumers stop
///
/// Hosts finish the batches that they run and leave its groups. Its tokens can only read, and
/// nothing is uploaded or deployed for it.
#[utoipa::path(post, path = "/v1/tenants/{tenant}/suspend", tag = "tenants", params(("tenant" = String, Path)), request_body = Nothing,
    responses((status = 200, body = TenantBody)), extensions(("x-role" = json!("platform"))))]
pub(crate) async fn suspend(
    caller: Caller,
    Path(tenant): Path<String>,
    extract::Json(Nothing {}): extract::Json<Nothing>,
) -> Result<Json<TenantBody>, ApiError> {
    Ok(Json(caller.control.tenants().suspend(&tenant).await?.into()))
}

/// Resume a suspended tenant: its consumers continue where they stopped
#[utoipa::path(post, path = "/v1/tenants/{tenant}/resume", tag = "tenants", params(("tenant" = String, Path)), request_body = Nothing,
    responses((status = 200, body = TenantBody)), extensions(("x-role" = json!("platform"))))]
pub(crate) async fn resume(
    caller: Caller,
    Path(tenant): Path<String>,
    extract::Json(Nothing {}): extract::Json<Nothing>,
) -> Result<Json<TenantBody>, ApiError> {
    Ok(Json(caller.control.tenants().resume(&tenant).await?.into()))
}

/// Change the limits of a tenant
///
/// Limits that the body does not name stay; `null` removes a limit.
#[utoipa::path(patch, path = "/v1/tenants/{tenant}/limits", tag = "tenants", params(("tenant" = String, Path)),
    request_body = TenantLimitsBody, responses((status = 200, body = TenantBody)), extensions(("x-role" = json!("platform"))))]
pub(crate) async fn limit(
    caller: Caller,
    Path(tenant): Path<String>,
    extract::Json(changes): extract::Json<Map<String, Value>>,
) -> Result<Json<TenantBody>, ApiError> {
    Ok(Json(caller.control.tenants().set_limits(&tenant, &changes).await?.into()))
}

/// Give a tenant new passwords and a new secret
///
/// No answer shows them. Messages are processed throughout: the former credentials stay valid for
/// ten minutes.
#[utoipa::path(post, path = "/v1/tenants/{tenant}/rotate-credentials", tag = "tenants", params(("tenant" = String, Path)),
    request_body = Nothing, responses((status = 200, body = TenantBody)), extensions(("x-role" = json!("admin"))))]
pub(crate) async fn rotate(
    caller: Caller,
    Path(tenant): Path<String>,
    extract::Json(Nothing {}): extract::Json<Nothing>,
) -> Result<Json<TenantBody>, ApiError> {
    Ok(Json(caller.control.tenants().rotate_credentials(&tenant).await?.into()))
}

/// Delete a tenant with its tables and its messages, for good
///
/// Hosts stop its consumers first. After some seconds the answer reports the progress; the deletion
/// continues without the caller. Repeat the request to see the progress, until the tenant is not
/// found. The audit log stays.
#[utoipa::path(delete, path = "/v1/tenants/{tenant}", tag = "tenants", params(("tenant" = String, Path)), request_body = TenantDeletion,
    responses((status = 200, body = TenantRemovalBody)), extensions(("x-role" = json!("platform"))))]
pub(crate) async fn delete(
    State(api): State<Api>,
    caller: Caller,
    Path(tenant): Path<String>,
    extract::Json(TenantDeletion { confirm }): extract::Json<TenantDeletion>,
) -> Result<Json<TenantRemovalBody>, ApiError> {
    caller.control.tenants().get(&tenant).await?;
    if confirm != tenant {
        let detail = format!(
            "`confirm` is `{confirm}`; it must be the tenant's name, since everything of \
                `{tenant}` goes for good"
        );
        return Err(ApiError::invalid(detail));
    }
    let row = caller.control.tenants().delete(&tenant).await?;
    let control = caller.control.clone();
    let removing = api.tasks().spawn({
        let row = row.clone();
        async move {
            control.tenants().remove(&row).await.inspect_err(
                |error| tracing::warn!(tenant = row.name, %error, "tenant deletion not finished"),
            )
        }
    });
    // The timeout ends only the wait: the task of the deletion continues.
    if let Ok(removed) = tokio::time::timeout(PATIENCE, removing).await {
        removed.map_err(|error| {
            ApiError::host(
                crate::Code::Internal,
                "the host failed to delete it; its log says why",
                error,
            )
        })??;
    }
    Ok(Json(how_far(&caller.control, &row).await?))
}

async fn how_far(
    control: &Control,
    row: &oncebox_control::Tenant,
) -> Result<TenantRemovalBody, ApiError> {
    let tenant = row.name.clone();
    if !control.tenants().list().await?.iter().any(|other| other.tenant_id == row.tenant_id) {
        return Ok(TenantRemovalBody {
            tenant,
            is_done: true,
            waiting_for: Vec::new(),
            objects: 0,
            messages: 0,
        });
    }
    let oncebox_control::TenantRemoval { waiting_for, objects, messages } =
        control.tenants().removal(row).await?;
    Ok(TenantRemovalBody { tenant, is_done: false, waiting_for, objects, messages })
}
