//! Tokens with their roles.

use std::fmt;

use axum::{Json, http::StatusCode};
use chrono::{DateTime, Utc};
use oncebox_control::TokenRole;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::{
    auth::Caller,
    error::ApiError,
    extract::{self, Path},
};

/// The role of a token. Each role includes the ones before it.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize, ToSchema,
)]
#[serde(rename_all = "snake_case")]
pub enum Role {
    /// Role that reads everything but tokens.
    Viewer,
    /// Role that rolls back, ends deployments, changes shares, and acts on consumers and messages.
    Operator,
    /// Role that uploads and deploys.
    Deployer,
    /// Role that creates tenants, consumers and tokens, and applies migrations.
    Admin,
}

impl Role {
    /// All roles, the least powerful first.
    pub const ALL: [Self; 4] = [Self::Viewer, Self::Operator, Self::Deployer, Self::Admin];

    /// Returns the name in the API and on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::Viewer => "viewer",
            Self::Operator => "operator",
            Self::Deployer => "deployer",
            Self::Admin => "admin",
        }
    }

    /// Returns the role of a name.
    pub fn parse(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|role| role.name() == name)
    }
}

impl fmt::Display for Role {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl From<TokenRole> for Role {
    fn from(role: TokenRole) -> Self {
        match role {
            TokenRole::Viewer => Self::Viewer,
            TokenRole::Operator => Self::Operator,
            TokenRole::Deployer => Self::Deployer,
            TokenRole::Admin => Self::Admin,
        }
    }
}

impl From<Role> for TokenRole {
    fn from(role: Role) -> Self {
        match role {
            Role::Viewer => Self::Viewer,
            Role::Operator => Self::Operator,
            Role::Deployer => Self::Deployer,
            Role::Admin => Self::Admin,
        }
    }
}

/// A token's row, without the token.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
#[schema(as = Token)]
pub struct TokenBody {
    /// Key.
    pub token_id: i64,
    /// Name of the holder: a user or a program.
    pub name: String,
    /// Role.
    pub role: Role,
    /// The only tenant that it reaches; null reaches all.
    pub tenant: Option<String>,
    /// Time of creation.
    pub created_at: DateTime<Utc>,
    /// Name of the token or user that created it.
    pub created_by: String,
    /// Time of expiry; null for never.
    pub expires_at: Option<DateTime<Utc>>,
    /// Time of revocation; null where it was not revoked.
    pub revoked_at: Option<DateTime<Utc>>,
}

impl From<oncebox_control::Token> for TokenBody {
    fn from(token: oncebox_control::Token) -> Self {
        let oncebox_control::Token {
            token_id,
            name,
            role,
            tenant,
            created_at,
            created_by,
            expires_at,
            revoked_at,
        } = token;
        Self {
            token_id,
            name,
            role: role.into(),
            tenant,
            created_at,
            created_by,
            expires_at,
            revoked_at,
        }
    }
}

/// A token to be created.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(as = NewToken)]
pub struct NewTokenBody {
    /// Name of the holder, a user or a program. A letter or digit, then up to 62 of A-Z, a-z, 0-9,
    /// `.`, `_`, `@` and `-`.
    pub name: String,
    /// Role.
    pub role: Role,
    /// Time of expiry; by default never.
    pub expires_at: Option<DateTime<Utc>>,
}

/// A token that was just created. No other answer shows it.
#[derive(Clone, Serialize, Deserialize, ToSchema)]
pub struct TokenCreated {
    /// Key.
    pub token_id: i64,
    /// Name of the holder: a user or a program.
    pub name: String,
    /// Role.
    pub role: Role,
    /// The only tenant that it reaches; null reaches all.
    pub tenant: Option<String>,
    /// Time of expiry; null for never.
    pub expires_at: Option<DateTime<Utc>>,
    /// The token: `obx_` and 64 hexadecimal digits.
    pub token: String,
}

impl fmt::Debug for TokenCreated {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TokenCreated")
            .field("token_id", &self.token_id)
            .field("name", &self.name)
            .finish_non_exhaustive()
    }
}

/// List all tokens, also expired and revoked ones
#[utoipa::path(get, path = "/v1/tokens", tag = "tokens", responses((status = 200, body = Vec<TokenBody>)),
    extensions(("x-role" = json!("admin"))))]
pub(crate) async fn list(caller: Caller) -> Result<Json<Vec<TokenBody>>, ApiError> {
    Ok(Json(caller.control.tokens().list(None).await?.into_iter().map(Into::into).collect()))
}

/// Create a token that reaches every tenant
#[utoipa::path(post, path = "/v1/tokens", tag = "tokens", request_body = NewTokenBody, responses((status = 201, body = TokenCreated)),
    extensions(("x-role" = json!("admin"))))]
pub(crate) async fn create(
    caller: Caller,
    extract::Json(new): extract::Json<NewTokenBody>,
) -> Result<(StatusCode, Json<TokenCreated>), ApiError> {
    create_for(&caller, None, &new).await
}

/// Revoke a token at once
#[utoipa::path(delete, path = "/v1/tokens/{token_id}", tag = "tokens", params(("token_id" = i64, Path)),
    responses((status = 200, body = TokenBody)), extensions(("x-role" = json!("admin"))))]
pub(crate) async fn revoke(
    caller: Caller,
    Path(token_id): Path<i64>,
) -> Result<Json<TokenBody>, ApiError> {
    Ok(Json(caller.control.tokens().revoke(None, token_id).await?.into()))
}

/// List the tokens of a tenant, also expired and revoked ones
#[utoipa::path(get, path = "/v1/tenants/{tenant}/tokens", tag = "tokens", params(("tenant" = String, Path)),
    responses((status = 200, body = Vec<TokenBody>)), extensions(("x-role" = json!("admin"))))]
pub(crate) async fn list_of_tenant(
    caller: Caller,
    Path(tenant): Path<String>,
) -> Result<Json<Vec<TokenBody>>, ApiError> {
    Ok(Json(
        caller.control.tokens().list(Some(&tenant)).await?.into_iter().map(Into::into).collect(),
    ))
}

/// Create a token that reaches this tenant only
#[utoipa::path(post, path = "/v1/tenants/{tenant}/tokens", tag = "tokens", params(("tenant" = String, Path)), request_body = NewTokenBody,
    responses((status = 201, body = TokenCreated)), extensions(("x-role" = json!("admin"))))]
pub(crate) async fn create_of_tenant(
    caller: Caller,
    Path(tenant): Path<String>,
    extract::Json(new): extract::Json<NewTokenBody>,
) -> Result<(StatusCode, Json<TokenCreated>), ApiError> {
    create_for(&caller, Some(&tenant), &new).await
}

/// Revoke a token of a tenant at once
#[utoipa::path(delete, path = "/v1/tenants/{tenant}/tokens/{token_id}", tag = "tokens",
    params(("tenant" = String, Path), ("token_id" = i64, Path)), responses((status = 200, body = TokenBody)),
    extensions(("x-role" = json!("admin"))))]
pub(crate) async fn revoke_of_tenant(
    caller: Caller,
    Path((tenant, token_id)): Path<(String, i64)>,
) -> Result<Json<TokenBody>, ApiError> {
    Ok(Json(caller.control.tokens().revoke(Some(&tenant), token_id).await?.into()))
}

async fn create_for(
    caller: &Caller,
    tenant: Option<&str>,
    new: &NewTokenBody,
) -> Result<(StatusCode, Json<TokenCreated>), ApiError> {
    let new = oncebox_control::NewToken {
        name: &new.name,
        role: new.role.into(),
        tenant,
        expires_at: new.expires_at,
    };
    let (token, secret) = caller.control.tokens().create(&new).await?;
    let oncebox_control::Token { token_id, name, role, tenant, expires_at, .. } = token;
    let created = TokenCreated {
        token_id,
        name,
        role: role.into(),
        tenant,
        expires_at,
        token: secret.reveal().to_owned(),
    };
    Ok((StatusCode::CREATED, Json(created)))
}
