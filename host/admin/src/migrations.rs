//! Migrations of a tenant's own tables.

use axum::{Json, http::StatusCode};
use chrono::{DateTime, Utc};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::{
    auth::Caller,
    error::ApiError,
    extract::{self, Path},
};

/// A migration that a tenant's schema holds.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct Migration {
    /// Its name, unique within the tenant.
    pub name: String,
    /// SHA-256 of its text.
    pub digest: String,
    /// When it was applied.
    pub applied_at: DateTime<Utc>,
    /// Who applied it.
    pub applied_by: String,
}

/// A migration to be applied.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct NewMigration {
    /// A letter or digit, then up to 99 of A-Z, a-z, 0-9, `.`, `_` and `-`.
    pub name: String,
    /// Statements, run in one transaction as the owner of the tenant's schema.
    pub sql: String,
}
