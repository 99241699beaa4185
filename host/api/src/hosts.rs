//! The running hosts.

use std::collections::BTreeMap;

use axum::Json;
use chrono::{DateTime, Utc};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::{auth::Caller, error::ApiError};

/// A host with a recent heartbeat.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
#[schema(as = Host)]
pub struct HostBody {
    /// Key; a restarted process is another host.
    pub host_id: i64,
    /// Name of the machine and id of the process.
    pub name: String,
    /// Time of the start.
    pub started_at: DateTime<Utc>,
    /// Time of the last heartbeat.
    pub seen_at: DateTime<Utc>,
    /// Release that it runs; none for one of 0.1.
    pub version: Option<String>,
    /// Number of its consumers in each state: `starting`, `idle`, `running`, `stopped`, `failing`.
    pub consumers: BTreeMap<String, usize>,
    /// Consumers that fail on the host.
    pub failing: Vec<HostFailing>,
}

/// A consumer that fails on a host.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct HostFailing {
    /// Tenant of the consumer.
    pub tenant: String,
    /// The consumer.
    pub consumer: String,
    /// Cause.
    pub error: Option<String>,
}

impl HostBody {
    fn new(
        host: oncebox_control::Host,
        runs: &[oncebox_control::HostConsumerStatus],
        names: &BTreeMap<i32, (String, String)>,
    ) -> Self {
        let oncebox_control::Host { host_id, name, started_at, seen_at, version } = host;
        let (mut consumers, mut failing) = (BTreeMap::new(), Vec::new());
        for run in runs.iter().filter(|run| run.host_id == host_id) {
            *consumers.entry(run.state.clone()).or_default() += 1;
            if let ("failing", Some((tenant, consumer))) =
                (run.state.as_str(), names.get(&run.consumer_id))
            {
                failing.push(HostFailing {
                    tenant: tenant.clone(),
                    consumer: consumer.clone(),
                    error: run.error.clone(),
                });
            }
        }
        Self { host_id, name, started_at, seen_at, version, consumers, failing }
    }
}

/// A host's progress with a consumer.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
#[schema(as = HostProgress)]
pub struct HostProgressBody {
    /// The host.
    pub host_id: i64,
    /// Name of the host.
    pub host: String,
    /// Generation of deployments that it runs.
    pub generation: i64,
    /// Generation that `state` belongs to.
    pub next_generation: i64,
    /// `compiling`, `switched` or `failed`.
    pub state: String,
    /// Cause of a failure.
    pub error: Option<String>,
    /// Time of the report.
    pub at: DateTime<Utc>,
}

impl From<oncebox_control::HostProgress> for HostProgressBody {
    fn from(progress: oncebox_control::HostProgress) -> Self {
        let oncebox_control::HostProgress {
            host_id,
            host,
            generation,
            next_generation,
            state,
            error,
            at,
        } = progress;
        Self { host_id, host, generation, next_generation, state, error, at }
    }
}

/// List the running hosts
#[utoipa::path(get, path = "/v1/hosts", tag = "hosts", responses((status = 200, body = Vec<HostBody>)),
    extensions(("x-role" = json!("viewer"))))]
pub(crate) async fn list(caller: Caller) -> Result<Json<Vec<HostBody>>, ApiError> {
    let runs = caller.control.hosts().statuses(None, None).await?;
    let names = caller
        .control
        .reconciliation()
        .desired_states()
        .await?
        .into_iter()
        .map(|s| (s.consumer_id, (s.tenant, s.name)))
        .collect();
    Ok(Json(
        caller
            .control
            .hosts()
            .list()
            .await?
            .into_iter()
            .map(|host| HostBody::new(host, &runs, &names))
            .collect(),
    ))
}
