//! The hosts that run.

use axum::Json;
use chrono::{DateTime, Utc};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::{auth::Caller, error::ApiError};

/// A host that was seen lately.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct Host {
    /// Key; a restart is another host.
    pub host_id: i64,
    /// Name of the machine and id of the process.
    pub name: String,
    /// When it started.
    pub started_at: DateTime<Utc>,
    /// When it last said that it lives.
    pub seen_at: DateTime<Utc>,
}

impl From<oncebox_inbox::Host> for Host {
    fn from(host: oncebox_inbox::Host) -> Self {
        let oncebox_inbox::Host { host_id, name, started_at, seen_at } = host;
        Self { host_id, name, started_at, seen_at }
    }
}

/// A host's progress with a consumer.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct HostProgress {
    /// The host.
    pub host_id: i64,
    /// Its name.
    pub host: String,
    /// Generation of deployments that it runs.
    pub generation: i64,
    /// The generation that `state` speaks of.
    pub next_generation: i64,
    /// `compiling`, `switched` or `failed`.
    pub state: String,
    /// Why it failed.
    pub error: Option<String>,
    /// When it said so.
    pub at: DateTime<Utc>,
}

impl From<oncebox_inbox::HostProgress> for HostProgress {
    fn from(progress: oncebox_inbox::HostProgress) -> Self {
        let oncebox_inbox::HostProgress { host_id, host, generation, next_generation, state, error, at } = progress;
        Self { host_id, host, generation, next_generation, state, error, at }
    }
}

/// List the hosts that run
#[utoipa::path(get, path = "/v1/hosts", tag = "hosts", responses((status = 200, body = Vec<Host>)),
    extensions(("x-role" = json!("viewer"))))]
pub(crate) async fn list(caller: Caller) -> Result<Json<Vec<Host>>, ApiError> {
    Ok(Json(caller.admin.hosts().await?.into_iter().map(Into::into).collect()))
}
