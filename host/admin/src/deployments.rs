//! Deployments: which version takes an event type of a consumer.

use axum::{Json, http::StatusCode};
use chrono::{DateTime, Utc};
use oncebox_inbox as inbox;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use utoipa::ToSchema;

use crate::{
    auth::Caller,
    error::ApiError,
    extract::{Path, Query},
    hosts::HostProgress,
};

/// Which version runs a message again after it failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum Retries {
    /// The one that is live by then.
    #[default]
    Live,
    /// The one that failed, unless it was withdrawn.
    Pinned,
}

impl From<Retries> for inbox::Retries {
    fn from(retries: Retries) -> Self {
        match retries {
            Retries::Live => Self::Live,
            Retries::Pinned => Self::Pinned,
        }
    }
}

/// What ends a canary by itself: over the window, a failure rate above the stable version's by more
/// than the margin.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Guard {
    /// Percentage points that the canary may fail more often than the stable version.
    pub margin_percent: f64,
    /// Seconds that are looked at.
    pub window_s: u32,
    /// Runs of the canary within the window before it is judged.
    pub messages_min: u32,
}

impl Default for Guard {
    fn default() -> Self {
        inbox::Guard::default().into()
    }
}

impl From<inbox::Guard> for Guard {
    fn from(guard: inbox::Guard) -> Self {
        let inbox::Guard { margin_percent, window_s, messages_min } = guard;
        Self { margin_percent, window_s, messages_min }
    }
}

impl From<Guard> for inbox::Guard {
    fn from(guard: Guard) -> Self {
        let Guard { margin_percent, window_s, messages_min } = guard;
        Self { margin_percent, window_s, messages_min }
    }
}

/// A deployment to be made.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct NewDeployment {
    /// The event type; `orders.*` for all that begin with `orders.`; `*` for all. The most specific
    /// wins.
    pub event_type: String,
    /// A semantic-version requirement such as `>=2, <4`. Null takes every version, and none.
    #[serde(default)]
    pub event_versions: Option<String>,
    /// Name of the handler.
    pub handler: String,
    /// SHA-256 of the version's component, or 6 or more of its first digits.
    pub version: String,
    /// What the handler reads through `config`.
    #[serde(default)]
    #[schema(value_type = Object)]
    pub settings: Map<String, Value>,
    /// Caps, where they are to be below the consumer's, by the keys of a policy's `limits`.
    #[serde(default)]
    #[schema(value_type = Object)]
    pub limits: Map<String, Value>,
    /// Name of the migration that the tenant's schema must hold.
    #[serde(default)]
    pub requires_migration: Option<String>,
    /// Which version runs a message again after it failed.
    #[serde(default)]
    pub retries: Retries,
}

/// A canary to be started.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct NewCanary {
    /// What to run.
    #[serde(flatten)]
    pub deployment: NewDeployment,
    /// Share of ordering keys, more than 0 and at most 100. A key stays with the canary while it
    /// grows.
    pub percent: f64,
    /// What ends it by itself.
    #[serde(default)]
    pub guard: Option<Guard>,
}

/// A shadow to be started.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct NewShadow {
    /// What to run.
    #[serde(flatten)]
    pub deployment: NewDeployment,
    /// Share of messages, more than 0 and at most 100.
    pub percent: f64,
    /// How long one run may take, milliseconds; 250 where it is not said.
    #[serde(default)]
    pub duration_ms: Option<u64>,
}

/// A deployment, and how far the hosts are with it.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct Deployment {
    /// Key.
    pub deployment_id: i64,
    /// The event type.
    pub event_type: String,
    /// Which versions of the event it takes.
    pub event_versions: Option<String>,
    /// `stable`, `canary` or `shadow`.
    pub role: String,
    /// Share that it takes, where it is no stable one.
    pub percent: Option<f64>,
    /// Name of the handler.
    pub handler: String,
    /// SHA-256 of the version's component.
    pub digest: String,
    /// What the handler reads through `config`.
    #[schema(value_type = Object)]
    pub settings: Map<String, Value>,
    /// Caps below the consumer's.
    #[schema(value_type = Object)]
    pub limits: Map<String, Value>,
    /// The migration that the tenant's schema must hold.
    pub requires_migration: Option<String>,
    /// Which version runs a message again: `live` or `pinned`.
    pub retries: String,
    /// What ends a canary by itself.
    pub guard: Option<Guard>,
    /// Generation of the consumer that it began with: a host that runs this one or a later one has
    /// it.
    pub generation: i64,
    /// When it began.
    pub created_at: DateTime<Utc>,
    /// Who made it.
    pub created_by: String,
    /// When it ended.
    pub ended_at: Option<DateTime<Utc>>,
    /// `superseded`, `rolled_back`, `promoted` or `ended`.
    pub ended_how: Option<String>,
    /// Why, where someone said.
    pub ended_reason: Option<String>,
    /// The hosts that run, and how far each is with the consumer.
    #[serde(default)]
    pub hosts: Vec<HostProgress>,
    /// What whoever deploys should know; only in the answer to that.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub warnings: Vec<String>,
}

impl Deployment {
    fn of(row: inbox::Deployment, hosts: &[HostProgress]) -> Self {
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

impl NewDeployment {
    pub(crate) fn into_inbox(
        self,
        role: inbox::Role,
        percent: Option<f64>,
        guard: Option<Guard>,
    ) -> inbox::NewDeployment {
        inbox::NewDeployment {
            slot: inbox::Slot { event_type: self.event_type, event_versions: self.event_versions },
            handler: self.handler,
            version: self.version,
            settings: self.settings,
            limits: self.limits,
            requires_migration: self.requires_migration,
            retries: self.retries.into(),
            role,
            percent,
            guard: guard.map(Into::into),
        }
    }
}

impl Caller {
    /// A deployment as it is shown, with the hosts that run.
    pub(crate) async fn shown(
        &self,
        tenant: &str,
        consumer: &str,
        row: inbox::Deployment,
    ) -> Result<Deployment, ApiError> {
        let consumer = self.admin.consumer(tenant, consumer).await?;
        Ok(Deployment::of(row, &self.progress(consumer.consumer_id).await?))
    }

    pub(crate) async fn progress(&self, consumer_id: i32) -> Result<Vec<HostProgress>, ApiError> {
        Ok(self.admin.host_progress(consumer_id).await?.into_iter().map(Into::into).collect())
    }

    pub(crate) async fn deploy(
        &self,
        tenant: &str,
        consumer: &str,
        new: &inbox::NewDeployment,
    ) -> Result<(StatusCode, Json<Deployment>), ApiError> {
        let made = self.admin.deploy(tenant, consumer, new).await?;
        let consumer_id = self.admin.consumer(tenant, consumer).await?.consumer_id;
        let warnings = self.admin.scope_warnings(consumer_id, &made).await?;
        let shown = Deployment { warnings, ..self.shown(tenant, consumer, made).await? };
        Ok((StatusCode::CREATED, Json(shown)))
    }
}

/// List deployments, newest first
///
/// Those that are live, or all there ever were.
#[utoipa::path(get, path = "/v1/tenants/{tenant}/consumers/{consumer}/deployments", tag = "deployments",
    params(("tenant" = String, Path), ("consumer" = String, Path),
        ("history" = Option<bool>, Query, description = "Also those that have ended")),
    responses((status = 200, body = Vec<Deployment>)), extensions(("x-role" = json!("viewer"))))]
pub(crate) async fn list(
    caller: Caller,
    Path((tenant, consumer)): Path<(String, String)>,
    mut query: Query,
) -> Result<Json<Vec<Deployment>>, ApiError> {
    let history = query.flag("history")?;
    query.end()?;
    let consumer = caller.admin.consumer(&tenant, &consumer).await?;
    let hosts = caller.progress(consumer.consumer_id).await?;
    let rows = caller.admin.deployment_list(consumer.consumer_id, history).await?;
    // What has ended is no host's business any more.
    let shown = rows.into_iter().map(|row| {
        if row.ended_at.is_none() { Deployment::of(row, &hosts) } else { Deployment::of(row, &[]) }
    });
    Ok(Json(shown.collect()))
}

/// One deployment
#[utoipa::path(get, path = "/v1/tenants/{tenant}/consumers/{consumer}/deployments/{deployment_id}", tag = "deployments",
    params(("tenant" = String, Path), ("consumer" = String, Path), ("deployment_id" = i64, Path)),
    responses((status = 200, body = Deployment)), extensions(("x-role" = json!("viewer"))))]
pub(crate) async fn show(
    caller: Caller,
    Path((tenant, consumer, deployment_id)): Path<(String, String, i64)>,
) -> Result<Json<Deployment>, ApiError> {
    let consumer = caller.admin.consumer(&tenant, &consumer).await?;
    let row = caller.admin.deployment(consumer.consumer_id, deployment_id).await?;
    Ok(Json(Deployment::of(row, &caller.progress(consumer.consumer_id).await?)))
}
