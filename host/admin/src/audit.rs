//! Who changed what.

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

/// A change that someone made.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct AuditEntry {
    /// Key; grows with time.
    pub audit_id: i64,
    /// When.
    pub at: DateTime<Utc>,
    /// Who: the name of a token, or of a user of the host's machine; `oncebox` for a host by
    /// itself.
    pub actor: String,
    /// What was done: `deploy`, `tenant.create`.
    pub action: String,
    /// To what.
    pub subject: String,
    /// The tenant that it was about, where it was about one.
    pub tenant: Option<String>,
    /// What else is worth knowing.
    pub details: Value,
}

impl From<oncebox_inbox::AuditEntry> for AuditEntry {
    fn from(entry: oncebox_inbox::AuditEntry) -> Self {
        let oncebox_inbox::AuditEntry { audit_id, at, actor, action, subject, tenant, details } =
            entry;
        Self { audit_id, at, actor, action, subject, tenant, details }
    }
}

/// All changes, newest first
#[utoipa::path(get, path = "/v1/audit", tag = "audit",
    params(("limit" = Option<i64>, Query, description = "At most this many, 1 to 1,000; by default \
        50")),
    responses((status = 200, body = Vec<AuditEntry>)), extensions(("x-role" = json!("viewer"))))]
pub(crate) async fn list(
    caller: Caller,
    mut query: Query,
) -> Result<Json<Vec<AuditEntry>>, ApiError> {
    let limit = query.limit()?;
    query.end()?;
    Ok(Json(caller.admin.audit_list(None, limit).await?.into_iter().map(Into::into).collect()))
}

/// Changes of a tenant, newest first
#[utoipa::path(get, path = "/v1/tenants/{tenant}/audit", tag = "audit",
    params(("tenant" = String, Path), ("limit" = Option<i64>, Query, description = "At most this \
        many, 1 to 1,000; by default 50")),
    responses((status = 200, body = Vec<AuditEntry>)), extensions(("x-role" = json!("viewer"))))]
pub(crate) async fn list_of_tenant(
    caller: Caller,
    Path(tenant): Path<String>,
    mut query: Query,
) -> Result<Json<Vec<AuditEntry>>, ApiError> {
    let limit = query.limit()?;
    query.end()?;
    // The log keeps what is gone; who asks for what never was is told.
    caller.admin.tenant(&tenant).await?;
    Ok(Json(
        caller.admin.audit_list(Some(&tenant), limit).await?.into_iter().map(Into::into).collect(),
    ))
}
