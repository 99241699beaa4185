//! The secrets by which a consumer knows the senders of messages over HTTP.

use axum::Json;
use chrono::{DateTime, Utc};
use oncebox_control::{IngressSecret, IngressSecretChange};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::{
    auth::Caller,
    error::ApiError,
    extract::{self, Path},
};

/// The secrets of a consumer, which are never shown.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[schema(as = IngressSecret)]
pub struct IngressSecretBody {
    /// Number of the latest change, from 1.
    pub revision: i64,
    /// Number of secrets: 2 during a rotation.
    pub secrets: i32,
    /// Time of the latest change.
    pub set_at: DateTime<Utc>,
    /// Who made it.
    pub set_by: String,
}

/// The secrets of a consumer after a change.
#[derive(Clone, Serialize, Deserialize, ToSchema)]
#[schema(as = IngressSecretChange)]
pub struct IngressSecretChangeBody {
    /// The secrets.
    #[serde(flatten)]
    pub now: IngressSecretBody,
    /// The secret that the host made, which no other answer shows; null where the request had one,
    /// or finished a rotation.
    pub secret: Option<String>,
}

/// A secret in place of all others.
#[derive(Clone, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct NewIngressSecret {
    /// The secret, as the sender has it; null for one that the host makes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(write_only)]
    pub secret: Option<String>,
}

/// A step of the rotation of a secret.
#[derive(Clone, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct NewIngressRotation {
    /// The other secret, as the sender has it; null for one that the host makes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(write_only)]
    pub secret: Option<String>,
    /// Whether the secret before the present one is known no more. Then no other secret is begun.
    #[serde(default)]
    pub finish: bool,
}

impl From<IngressSecret> for IngressSecretBody {
    fn from(secret: IngressSecret) -> Self {
        let IngressSecret { revision, secrets, set_at, set_by } = secret;
        Self { revision, secrets, set_at, set_by }
    }
}

/// Show whether the consumer has a secret for messages over HTTP
#[utoipa::path(get, path = "/v1/tenants/{tenant}/consumers/{consumer}/ingress-secret", tag = "consumers",
    params(("tenant" = String, Path), ("consumer" = String, Path)),
    responses((status = 200, body = IngressSecretBody)), extensions(("x-role" = json!("viewer"))))]
pub(crate) async fn show(
    caller: Caller,
    Path((tenant, consumer)): Path<(String, String)>,
) -> Result<Json<IngressSecretBody>, ApiError> {
    let secret = caller.control.ingress().secret(&tenant, &consumer).await?;
    Ok(Json(secret.into()))
}

/// Give the consumer a secret for messages over HTTP, in place of all others
///
/// Hosts know it within two seconds. A secret that the host makes is in this answer and in no other.
#[utoipa::path(put, path = "/v1/tenants/{tenant}/consumers/{consumer}/ingress-secret", tag = "consumers",
    params(("tenant" = String, Path), ("consumer" = String, Path)), request_body = NewIngressSecret,
    responses((status = 200, body = IngressSecretChangeBody)), extensions(("x-role" = json!("admin"))))]
pub(crate) async fn set(
    caller: Caller,
    Path((tenant, consumer)): Path<(String, String)>,
    extract::Json(new): extract::Json<NewIngressSecret>,
) -> Result<Json<IngressSecretChangeBody>, ApiError> {
    let ingress = caller.control.ingress();
    let (secret, made) = match new.secret {
        Some(secret) => (secret, None),
        None => {
            let secret = ingress.generate_secret(&tenant, &consumer).await?;
            (secret.clone(), Some(secret))
        }
    };
    let change = IngressSecretChange::Replace(secret);
    let now = ingress.change_secret(&tenant, &consumer, &change).await?.into();
    Ok(Json(IngressSecretChangeBody { now, secret: made }))
}

/// Rotate the consumer's secret for messages over HTTP
///
/// Until the rotation is finished, both secrets are known. A secret that the host makes is in this
/// answer and in no other.
#[utoipa::path(post, path = "/v1/tenants/{tenant}/consumers/{consumer}/ingress-secret/rotate", tag = "consumers",
    params(("tenant" = String, Path), ("consumer" = String, Path)), request_body = NewIngressRotation,
    responses((status = 200, body = IngressSecretChangeBody)), extensions(("x-role" = json!("admin"))))]
pub(crate) async fn rotate(
    caller: Caller,
    Path((tenant, consumer)): Path<(String, String)>,
    extract::Json(new): extract::Json<NewIngressRotation>,
) -> Result<Json<IngressSecretChangeBody>, ApiError> {
    let ingress = caller.control.ingress();
    let (change, made) = match (new.finish, new.secret) {
        (true, None) => (IngressSecretChange::Finish, None),
        (true, Some(_)) => {
            return Err(ApiError::invalid("`finish` begins no other `secret`"));
        }
        (false, Some(secret)) => (IngressSecretChange::Rotate(secret), None),
        (false, None) => {
            let secret = ingress.generate_secret(&tenant, &consumer).await?;
            (IngressSecretChange::Rotate(secret.clone()), Some(secret))
        }
    };
    let now = ingress.change_secret(&tenant, &consumer, &change).await?.into();
    Ok(Json(IngressSecretChangeBody { now, secret: made }))
}

/// Remove the consumer's secrets for messages over HTTP
///
/// Requests to it are refused from then on.
#[utoipa::path(delete, path = "/v1/tenants/{tenant}/consumers/{consumer}/ingress-secret", tag = "consumers",
    params(("tenant" = String, Path), ("consumer" = String, Path)),
    responses((status = 200, body = IngressSecretBody)), extensions(("x-role" = json!("admin"))))]
pub(crate) async fn remove(
    caller: Caller,
    Path((tenant, consumer)): Path<(String, String)>,
) -> Result<Json<IngressSecretBody>, ApiError> {
    let removed = caller.control.ingress().remove_secret(&tenant, &consumer).await?;
    Ok(Json(removed.into()))
}
