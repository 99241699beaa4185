//! Migrations of a tenant's own tables.

use axum::{Json, http::StatusCode};
use chrono::{DateTime, Utc};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::{
    auth::Caller,
    error::{ApiError, Code},
    extract::{self, Path},
};

/// A migration that was applied to a tenant's schema.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
#[schema(as = Migration)]
pub struct MigrationBody {
    /// Name, unique within the tenant.
    pub name: String,
    /// SHA-256 of its text.
    pub digest: String,
    /// Time of application.
    pub applied_at: DateTime<Utc>,
    /// Name of the token or user that applied it.
    pub applied_by: String,
}

/// A migration to be applied.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(as = NewMigration)]
pub struct NewMigrationBody {
    /// A letter or digit, then up to 99 of A-Z, a-z, 0-9, `.`, `_` and `-`.
    pub name: String,
    /// Statements of a schema, which run in one transaction as the owner of the tenant's schema.
    pub sql: String,
}

impl From<oncebox_control::Migration> for MigrationBody {
    fn from(migration: oncebox_control::Migration) -> Self {
        let oncebox_control::Migration { name, digest, applied_at, applied_by } = migration;
        Self { name, digest: hex::encode(digest), applied_at, applied_by }
    }
}

/// List the migrations that the tenant's schema holds
#[utoipa::path(get, path = "/v1/tenants/{tenant}/migrations", tag = "tenants", params(("tenant" = String, Path)),
    responses((status = 200, body = Vec<MigrationBody>)), extensions(("x-role" = json!("viewer"))))]
pub(crate) async fn list(
    caller: Caller,
    Path(tenant): Path<String>,
) -> Result<Json<Vec<MigrationBody>>, ApiError> {
    let tenant = caller.control.tenants().get(&tenant).await?;
    Ok(Json(
        caller
            .control
            .tenant_databases()
            .migrations(&tenant.name)
            .await?
            .into_iter()
            .map(Into::into)
            .collect(),
    ))
}

/// Apply a migration to the tenant's tables
///
/// A migration is applied once: its name with an equal text again changes nothing, and with another
/// text it is refused. Statements that do not belong to a schema are refused before any statement
/// runs; `problems` names each with its line.
#[utoipa::path(post, path = "/v1/tenants/{tenant}/migrations", tag = "tenants", params(("tenant" = String, Path)),
    request_body = NewMigrationBody,
    responses((status = 201, body = MigrationBody), (status = 200, body = MigrationBody, description = "The schema holds it already")),
    extensions(("x-role" = json!("admin"))))]
pub(crate) async fn apply(
    caller: Caller,
    Path(tenant): Path<String>,
    extract::Json(new): extract::Json<NewMigrationBody>,
) -> Result<(StatusCode, Json<MigrationBody>), ApiError> {
    let tenant = caller.control.tenants().get(&tenant).await?;
    let is_new =
        caller.control.tenant_databases().apply_migration(&tenant, &new.name, &new.sql).await?;
    let held = caller
        .control
        .tenant_databases()
        .migrations(&tenant.name)
        .await?
        .into_iter()
        .find(|migration| migration.name == new.name);
    let held = held.ok_or_else(|| {
        ApiError::new(Code::NotFound, format!("migration `{}` is gone again", new.name))
    })?;
    Ok((if is_new { StatusCode::CREATED } else { StatusCode::OK }, Json(held.into())))
}
