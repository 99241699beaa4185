//! The audit log: the changes, with their actors.

use axum::Json;
use chrono::{DateTime, Utc};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use utoipa::ToSchema;

use crate::{
    auth::Caller,
    error::ApiError,
    extract::{Path, Query},
};

/// A change in the audit log.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
#[schema(as = AuditEntry)]
pub struct AuditEntryBody {
    /// Key; grows with time.
    pub audit_id: i64,
    /// Time of the change.
    pub at: DateTime<Utc>,
    /// Actor: the name of a token, or of a user of the host's machine; `oncebox` for a host by
    /// itself.
    pub actor: String,
    /// Action, such as `deploy` or `tenant.create`.
    pub action: String,
    /// Subject of the action.
    pub subject: String,
    /// The tenant that the change belongs to; null where it belongs to none.
    pub tenant: Option<String>,
    /// Further details, by action.
    pub details: Value,
}

impl From<oncebox_control::AuditEntry> for AuditEntryBody {
    fn from(entry: oncebox_control::AuditEntry) -> Self {
        let oncebox_control::AuditEntry { audit_id, at, actor, action, subject, tenant, details } =
            entry;
        Self { audit_id, at, actor, action, subject, tenant, details }
    }
}

/// List all changes, newest first
#[utoipa::path(get, path = "/v1/audit", tag = "audit",
    params(("limit" = Option<i64>, Query, description = "At most this many, 1 to 1,000; by default \
        50")),
    responses((status = 200, body = Vec<AuditEntryBody>)), extensions(("x-role" = json!("viewer"))))]
pub(crate) async fn list(
    caller: Caller,
    mut query: Query,
) -> Result<Json<Vec<AuditEntryBody>>, ApiError> {
    let limit = query.limit()?;
    query.end()?;
    Ok(Json(caller.control.audit().list(None, limit).await?.into_iter().map(Into::into).collect()))
}

/// List the changes of a tenant, newest first
#[utoipa::path(get, path = "/v1/tenants/{tenant}/audit", tag = "audit",
    params(("tenant" = String, Path), ("limit" = Option<i64>, Query, description = "At most this \
        many, 1 to 1,000; by default 50")),
    responses((status = 200, body = Vec<AuditEntryBody>)), extensions(("x-role" = json!("viewer"))))]
pub(crate) async fn list_of_tenant(
    caller: Caller,
    Path(tenant): Path<String>,
    mut query: Query,
) -> Result<Json<Vec<AuditEntryBody>>, ApiError> {
    let limit = query.limit()?;
    query.end()?;
    // The log also keeps entries of deleted tenants. This refuses a name without a tenant, which
    // would look like an empty log.
    caller.control.tenants().get(&tenant).await?;
    Ok(Json(
        caller
            .control
            .audit()
            .list(Some(&tenant), limit)
            .await?
            .into_iter()
            .map(Into::into)
            .collect(),
    ))
}
