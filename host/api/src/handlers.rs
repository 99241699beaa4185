//! Handlers of a tenant.

use axum::Json;
use chrono::{DateTime, Utc};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::{auth::Caller, error::ApiError, extract::Path};

/// A handler, which deployments give the messages of an event type to. Its first version creates
/// it.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
#[schema(as = Handler)]
pub struct HandlerBody {
    /// Name.
    pub name: String,
    /// Number of uploaded versions.
    pub versions: i64,
    /// Time of the newest upload.
    pub latest_at: Option<DateTime<Utc>>,
}

impl From<oncebox_control::HandlerRow> for HandlerBody {
    fn from(row: oncebox_control::HandlerRow) -> Self {
        let oncebox_control::HandlerRow { name, versions, latest_at } = row;
        Self { name, versions, latest_at }
    }
}

/// List handlers
#[utoipa::path(get, path = "/v1/tenants/{tenant}/handlers", tag = "versions", params(("tenant" = String, Path)),
    responses((status = 200, body = Vec<HandlerBody>)), extensions(("x-role" = json!("viewer"))))]
pub(crate) async fn list(
    caller: Caller,
    Path(tenant): Path<String>,
) -> Result<Json<Vec<HandlerBody>>, ApiError> {
    Ok(Json(
        caller.control.versions().handlers(&tenant).await?.into_iter().map(Into::into).collect(),
    ))
}
