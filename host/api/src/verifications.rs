//! Stored outcomes of `oncebox verify` for a version.

use axum::{Json, http::StatusCode};
use chrono::{DateTime, Utc};
use oncebox_control::{NewVerification, Verification};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::{
    auth::Caller,
    error::ApiError,
    extract::{self, Path},
};

/// Longest release of a program, bytes.
const PROGRAM_BYTES_MAX: usize = 64;

/// An outcome of `oncebox verify` to be stored.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[schema(as = NewVerification)]
#[serde(deny_unknown_fields)]
pub struct NewVerificationBody {
    /// Whether every window left each effect exactly once.
    pub is_passed: bool,
    /// Messages that were delivered, without repetitions.
    pub messages: i32,
    /// Windows that were tried.
    pub windows: i32,
    /// Windows that failed.
    pub windows_failed: i32,
    /// Workers that were killed.
    pub killed: i32,
    /// Warnings about the handler's statements.
    pub warnings: i32,
    /// Seed of orders and repetitions.
    pub seed: i64,
    /// Release of the program that verified.
    pub program_version: String,
}

/// A stored outcome of `oncebox verify`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[schema(as = Verification)]
pub struct VerificationBody {
    /// Key; grows with time.
    pub verification_id: i64,
    /// Time at which it was stored.
    pub at: DateTime<Utc>,
    /// Name of the token or user that stored it.
    pub actor: String,
    /// Whether every window left each effect exactly once.
    pub is_passed: bool,
    /// Messages that were delivered, without repetitions.
    pub messages: i32,
    /// Windows that were tried.
    pub windows: i32,
    /// Windows that failed.
    pub windows_failed: i32,
    /// Workers that were killed.
    pub killed: i32,
    /// Warnings about the handler's statements.
    pub warnings: i32,
    /// Seed of orders and repetitions.
    pub seed: i64,
    /// Release of the program that verified.
    pub program_version: String,
}

impl From<Verification> for VerificationBody {
    fn from(stored: Verification) -> Self {
        let Verification {
            verification_id,
            at,
            actor,
            is_passed,
            messages,
            windows,
            windows_failed,
            killed,
            warnings,
            seed,
            program_version,
        } = stored;
        Self {
            verification_id,
            at,
            actor,
            is_passed,
            messages,
            windows,
            windows_failed,
            killed,
            warnings,
            seed,
            program_version,
        }
    }
}

impl NewVerificationBody {
    fn into_new(self) -> Result<NewVerification, ApiError> {
        let Self {
            is_passed,
            messages,
            windows,
            windows_failed,
            killed,
            warnings,
            seed,
            program_version,
        } = self;
        if !(1..=PROGRAM_BYTES_MAX).contains(&program_version.len()) {
            let detail = format!("`program_version` must have 1 to {PROGRAM_BYTES_MAX} bytes");
            return Err(ApiError::invalid(detail));
        }
        Ok(NewVerification {
            is_passed,
            messages,
            windows,
            windows_failed,
            killed,
            warnings,
            seed,
            program_version,
        })
    }
}

/// List the stored outcomes of `oncebox verify`, newest first
#[utoipa::path(get, path = "/v1/tenants/{tenant}/handlers/{handler}/versions/{digest}/verifications", tag = "versions",
    params(("tenant" = String, Path), ("handler" = String, Path), ("digest" = String, Path)),
    responses((status = 200, body = Vec<VerificationBody>)), extensions(("x-role" = json!("viewer"))))]
pub(crate) async fn list(
    caller: Caller,
    Path((tenant, handler, digest)): Path<(String, String, String)>,
) -> Result<Json<Vec<VerificationBody>>, ApiError> {
    let stored = caller.control.versions().verifications(&tenant, &handler, &digest).await?;
    Ok(Json(stored.into_iter().map(Into::into).collect()))
}

/// Store an outcome of `oncebox verify`
///
/// The host does not repeat the run: the outcome is what the caller says, and the audit log keeps
/// the caller's name. Of each version the newest twenty outcomes are kept.
#[utoipa::path(post, path = "/v1/tenants/{tenant}/handlers/{handler}/versions/{digest}/verifications", tag = "versions",
    params(("tenant" = String, Path), ("handler" = String, Path), ("digest" = String, Path)),
    request_body = NewVerificationBody, responses((status = 201, body = VerificationBody)),
    extensions(("x-role" = json!("deployer"))))]
pub(crate) async fn attest(
    caller: Caller,
    Path((tenant, handler, digest)): Path<(String, String, String)>,
    extract::Json(new): extract::Json<NewVerificationBody>,
) -> Result<(StatusCode, Json<VerificationBody>), ApiError> {
    let new = new.into_new()?;
    let stored = caller.control.versions().attest(&tenant, &handler, &digest, &new).await?;
    Ok((StatusCode::CREATED, Json(stored.into())))
}
