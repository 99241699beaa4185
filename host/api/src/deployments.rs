//! Deployments: the version that takes an event type of a consumer.

use std::collections::BTreeSet;

use axum::{Json, http::StatusCode};
use chrono::{DateTime, Utc};
use oncebox_control as control;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use utoipa::ToSchema;

use crate::{
    auth::Caller,
    error::ApiError,
    extract::{Path, Query},
    hosts::HostProgressBody,
};

/// The version that runs a message again after a failure.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
#[schema(as = Retries)]
pub enum RetriesBody {
    /// The version that is live at the retry.
    #[default]
    Live,
    /// The version that failed, unless it was withdrawn.
    Pinned,
}

impl From<RetriesBody> for control::Retries {
    fn from(retries: RetriesBody) -> Self {
        match retries {
            RetriesBody::Live => Self::Live,
            RetriesBody::Pinned => Self::Pinned,
        }
    }
}

/// A right that a deployment gives its handler beyond SQL.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
#[schema(as = Grant)]
pub enum GrantBody {
    /// To emit outgoing messages, to the destinations that the tenant's limits allow.
    Emit,
}

impl GrantBody {
    /// Returns the name in the API.
    pub fn name(self) -> &'static str {
        match self {
            Self::Emit => "emit",
        }
    }
}

/// The bound that ends a canary automatically: over the window, a failure rate above the stable
/// version's by more than the margin.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields, default)]
#[schema(as = Guard)]
pub struct GuardBody {
    /// Margin: percentage points by which the canary may fail more often than the stable version.
    pub margin_percent: f64,
    /// Window, seconds.
    pub window_s: u32,
    /// Runs of the canary within the window before it is judged.
    pub messages_min: u32,
}

impl Default for GuardBody {
    fn default() -> Self {
        control::Guard::default().into()
    }
}

impl From<control::Guard> for GuardBody {
    fn from(guard: control::Guard) -> Self {
        let control::Guard { margin_percent, window_s, messages_min } = guard;
        Self { margin_percent, window_s, messages_min }
    }
}

impl From<GuardBody> for control::Guard {
    fn from(guard: GuardBody) -> Self {
        let GuardBody { margin_percent, window_s, messages_min } = guard;
        Self { margin_percent, window_s, messages_min }
    }
}

/// A deployment to be created.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(as = NewDeployment)]
pub struct NewDeploymentBody {
    /// The event type; `orders.*` for all that begin with `orders.`; `*` for all. The most specific
    /// one wins.
    pub event_type: String,
    /// A semantic-version requirement such as `>=2, <4`. Null takes every version, and messages
    /// without one.
    #[serde(default)]
    pub event_versions: Option<String>,
    /// Name of the handler.
    pub handler: String,
    /// SHA-256 of the version's component, or 6 or more of its first digits.
    pub version: String,
    /// Settings that the handler reads through `config`.
    #[serde(default)]
    #[schema(value_type = Object)]
    pub settings: Map<String, Value>,
    /// Caps below the consumer's, by the keys of a policy's `limits`.
    #[serde(default)]
    #[schema(value_type = Object)]
    pub limits: Map<String, Value>,
    /// Name of the migration that the tenant's schema must hold.
    #[serde(default)]
    pub requires_migration: Option<String>,
    /// The version that runs a message again after a failure.
    #[serde(default)]
    pub retries: RetriesBody,
    /// Rights of the handler beyond SQL: `emit`, to emit outgoing messages. By default none.
    #[serde(default)]
    pub grants: Vec<GrantBody>,
}

/// A canary to be started.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct NewCanary {
    /// The deployment to start.
    #[serde(flatten)]
    pub deployment: NewDeploymentBody,
    /// Share of ordering keys, more than 0 and at most 100. A key stays with the canary while the
    /// share grows.
    pub percent: f64,
    /// The bound that ends the canary automatically.
    #[serde(default)]
    pub guard: Option<GuardBody>,
}

/// A shadow to be started.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct NewShadow {
    /// The deployment to start.
    #[serde(flatten)]
    pub deployment: NewDeploymentBody,
    /// Share of messages, more than 0 and at most 100.
    pub percent: f64,
    /// Longest duration of one run, milliseconds; by default 250.
    #[serde(default)]
    pub duration_ms: Option<u64>,
}

/// A deployment, with the progress of the hosts.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
#[schema(as = Deployment)]
pub struct DeploymentBody {
    /// Key.
    pub deployment_id: i64,
    /// The event type.
    pub event_type: String,
    /// Versions of the event that it takes; null for all.
    pub event_versions: Option<String>,
    /// `stable`, `canary` or `shadow`.
    pub role: String,
    /// Share of a canary or a shadow.
    pub percent: Option<f64>,
    /// Name of the handler.
    pub handler: String,
    /// SHA-256 of the version's component.
    pub digest: String,
    /// Settings that the handler reads through `config`.
    #[schema(value_type = Object)]
    pub settings: Map<String, Value>,
    /// Caps below the consumer's.
    #[schema(value_type = Object)]
    pub limits: Map<String, Value>,
    /// The migration that the tenant's schema must hold.
    pub requires_migration: Option<String>,
    /// The version that runs a message again: `live` or `pinned`.
    pub retries: String,
    /// Rights of the handler beyond SQL, such as `emit`.
    #[serde(default)]
    pub grants: Vec<String>,
    /// The bound that ends a canary automatically.
    pub guard: Option<GuardBody>,
    /// Generation of the consumer that the deployment began with. A host that runs this generation
    /// or a later one has loaded it.
    pub generation: i64,
    /// Time of the start.
    pub created_at: DateTime<Utc>,
    /// Name of the token or user that created it.
    pub created_by: String,
    /// Time of the end; null while it is live.
    pub ended_at: Option<DateTime<Utc>>,
    /// Kind of end: `superseded`, `rolled_back`, `promoted` or `ended`.
    pub ended_how: Option<String>,
    /// Reason of the end, where one was given.
    pub ended_reason: Option<String>,
    /// The running hosts, with their progress for the consumer.
    #[serde(default)]
    pub hosts: Vec<HostProgressBody>,
    /// Warnings for the deployer. Only in the answer to a deployment.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub warnings: Vec<String>,
}

impl DeploymentBody {
    fn of(row: control::Deployment, hosts: &[HostProgressBody]) -> Self {
        let object = |value: Value| match value {
            Value::Object(object) => object,
            _ => Map::new(),
        };
        Self {
            warnings: Vec::new(),
            deployment_id: row.deployment_id,
            event_type: row.slot.event_type,
            event_versions: row.slot.event_versions,
            role: row.role.name().to_owned(),
            percent: row.percent,
            handler: row.handler,
            digest: hex::encode(row.digest),
            settings: object(row.settings),
            limits: object(row.limits),
            requires_migration: row.requires_migration,
            retries: row.retries.name().to_owned(),
            grants: row.grants,
            guard: row.guard.map(Into::into),
            generation: row.generation,
            created_at: row.created_at,
            created_by: row.created_by,
            ended_at: row.ended_at,
            ended_how: row.ended_how,
            ended_reason: row.ended_reason,
            hosts: hosts.to_vec(),
        }
    }
}

impl NewDeploymentBody {
    pub(crate) fn into_inbox(
        self,
        role: control::DeploymentRole,
        percent: Option<f64>,
        guard: Option<GuardBody>,
    ) -> control::NewDeployment {
        let granted: BTreeSet<_> = self.grants.into_iter().collect();
        control::NewDeployment {
            slot: control::Slot {
                event_type: self.event_type,
                event_versions: self.event_versions,
            },
            handler: self.handler,
            version: self.version,
            settings: self.settings,
            limits: self.limits,
            requires_migration: self.requires_migration,
            retries: self.retries.into(),
            grants: granted.into_iter().map(|grant| grant.name().to_owned()).collect(),
            role,
            percent,
            guard: guard.map(Into::into),
        }
    }
}

impl Caller {
    /// Returns the wire type of a deployment, with the running hosts.
    pub(crate) async fn shown(
        &self,
        tenant: &str,
        consumer: &str,
        row: control::Deployment,
    ) -> Result<DeploymentBody, ApiError> {
        let consumer = self.control.consumers().get(tenant, consumer).await?;
        Ok(DeploymentBody::of(row, &self.progress(consumer.consumer_id).await?))
    }

    pub(crate) async fn progress(
        &self,
        consumer_id: i32,
    ) -> Result<Vec<HostProgressBody>, ApiError> {
        Ok(self.control.hosts().progress(consumer_id).await?.into_iter().map(Into::into).collect())
    }

    pub(crate) async fn deploy(
        &self,
        tenant: &str,
        consumer: &str,
        new: &control::NewDeployment,
    ) -> Result<(StatusCode, Json<DeploymentBody>), ApiError> {
        let made = self.control.deployments().deploy(tenant, consumer, new).await?;
        let consumer_id = self.control.consumers().get(tenant, consumer).await?.consumer_id;
        let warnings = self.control.deployments().overlap_warnings(consumer_id, &made).await?;
        let shown = DeploymentBody { warnings, ..self.shown(tenant, consumer, made).await? };
        Ok((StatusCode::CREATED, Json(shown)))
    }
}

/// List deployments, newest first
///
/// Lists live deployments, or with `history` also the ended ones.
#[utoipa::path(get, path = "/v1/tenants/{tenant}/consumers/{consumer}/deployments", tag = "deployments",
    params(("tenant" = String, Path), ("consumer" = String, Path),
        ("history" = Option<bool>, Query, description = "Also those that have ended")),
    responses((status = 200, body = Vec<DeploymentBody>)), extensions(("x-role" = json!("viewer"))))]
pub(crate) async fn list(
    caller: Caller,
    Path((tenant, consumer)): Path<(String, String)>,
    mut query: Query,
) -> Result<Json<Vec<DeploymentBody>>, ApiError> {
    let history = query.flag("history")?;
    query.end()?;
    let consumer = caller.control.consumers().get(&tenant, &consumer).await?;
    let hosts = caller.progress(consumer.consumer_id).await?;
    let rows = caller.control.deployments().list(consumer.consumer_id, history).await?;
    // Hosts have no progress with an ended deployment.
    let shown = rows.into_iter().map(|row| {
        if row.ended_at.is_none() {
            DeploymentBody::of(row, &hosts)
        } else {
            DeploymentBody::of(row, &[])
        }
    });
    Ok(Json(shown.collect()))
}

/// Show a deployment
#[utoipa::path(get, path = "/v1/tenants/{tenant}/consumers/{consumer}/deployments/{deployment_id}", tag = "deployments",
    params(("tenant" = String, Path), ("consumer" = String, Path), ("deployment_id" = i64, Path)),
    responses((status = 200, body = DeploymentBody)), extensions(("x-role" = json!("viewer"))))]
pub(crate) async fn show(
    caller: Caller,
    Path((tenant, consumer, deployment_id)): Path<(String, String, i64)>,
) -> Result<Json<DeploymentBody>, ApiError> {
    let consumer = caller.control.consumers().get(&tenant, &consumer).await?;
    let row = caller.control.deployments().get(consumer.consumer_id, deployment_id).await?;
    Ok(Json(DeploymentBody::of(row, &caller.progress(consumer.consumer_id).await?)))
}
