//! Consumers of a tenant.

use axum::{Json, extract::State, http::StatusCode};
use chrono::{DateTime, Utc};
use oncebox_inbox::policy::Policy;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use utoipa::ToSchema;

use crate::{
    Api,
    auth::Caller,
    error::{ApiError, Code},
    extract::{self, Path},
};

/// A consumer.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct Consumer {
    /// Key.
    pub consumer_id: i32,
    /// Name of its tenant.
    pub tenant: String,
    /// Name.
    pub name: String,
    /// Its policy. Values of `kafka.properties` are not shown.
    pub policy: Value,
    /// Grows with every change of its deployments.
    pub generation: i64,
    /// When it was made.
    pub created_at: DateTime<Utc>,
}

impl From<oncebox_inbox::Consumer> for Consumer {
    fn from(consumer: oncebox_inbox::Consumer) -> Self {
        let policy = consumer.policy_shown();
        let oncebox_inbox::Consumer { consumer_id, tenant, name, generation, created_at, .. } = consumer;
        Self { consumer_id, tenant, name, policy, generation, created_at }
    }
}

/// A consumer to be made.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct NewConsumer {
    /// A lower-case letter, then up to 62 of a-z, 0-9 and `-`.
    pub name: String,
    /// The policy, with the keys of a policy's file.
    #[schema(value_type = Object)]
    pub policy: Map<String, Value>,
}

/// List consumers
#[utoipa::path(get, path = "/v1/tenants/{tenant}/consumers", tag = "consumers", params(("tenant" = String, Path)),
    responses((status = 200, body = Vec<Consumer>)), extensions(("x-role" = json!("viewer"))))]
pub(crate) async fn list(caller: Caller, Path(tenant): Path<String>) -> Result<Json<Vec<Consumer>>, ApiError> {
    let tenant = caller.admin.tenant(&tenant).await?.name;
    let all = caller.admin.consumers().await?;
    Ok(Json(all.into_iter().filter(|consumer| consumer.tenant == tenant).map(Into::into).collect()))
}

/// Make a consumer
///
/// It starts with its first deployment. A token of a tenant cannot set `kafka.properties`: with them a
/// consumer could speak to the brokers as somebody else.
#[utoipa::path(post, path = "/v1/tenants/{tenant}/consumers", tag = "consumers", params(("tenant" = String, Path)),
    request_body = NewConsumer, responses((status = 201, body = Consumer)), extensions(("x-role" = json!("admin"))))]
pub(crate) async fn create(
    State(api): State<Api>,
    caller: Caller,
    Path(tenant): Path<String>,
    extract::Json(new): extract::Json<NewConsumer>,
) -> Result<(StatusCode, Json<Consumer>), ApiError> {
    let policy = parse(new.policy)?;
    if caller.principal.tenant().is_some() && !policy.kafka.properties.is_empty() {
        let detail = "a token of a tenant cannot set `policy.kafka.properties`; ask whoever runs the host";
        return Err(ApiError::new(Code::Forbidden, detail));
    }
    api.components().check_policy(&tenant, &new.name, &policy).map_err(ApiError::invalid)?;
    let consumer = caller.admin.create_consumer(&tenant, &new.name, &policy).await?;
    Ok((StatusCode::CREATED, Json(consumer.into())))
}

fn parse(policy: Map<String, Value>) -> Result<Policy, ApiError> {
    serde_path_to_error::deserialize(Value::Object(policy)).map_err(|error| match error.path().to_string() {
        path if path == "." => ApiError::invalid(format!("`policy` is not right: {}", error.inner())),
        path => ApiError::invalid(format!("`policy.{path}` is not right: {}", error.inner())),
    })
}

/// One consumer
#[utoipa::path(get, path = "/v1/tenants/{tenant}/consumers/{consumer}", tag = "consumers",
    params(("tenant" = String, Path), ("consumer" = String, Path)), responses((status = 200, body = Consumer)),
    extensions(("x-role" = json!("viewer"))))]
pub(crate) async fn show(caller: Caller, Path((tenant, consumer)): Path<(String, String)>) -> Result<Json<Consumer>, ApiError> {
    Ok(Json(caller.admin.consumer(&tenant, &consumer).await?.into()))
}
