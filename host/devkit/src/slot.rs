//! The place of a deployment: a consumer, an event type and a range of its versions.

use std::{
    path::Path,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail};
use oncebox_api::wire::{self, ConsumerBody, DeploymentBody, NewDeploymentBody, VersionBody};
use oncebox_model::contract::is_emit;
use serde_json::{Map, Value};

use crate::{
    api::{Api, path, with_query},
    terminal,
    upload::spinner,
};

/// Pause between two requests for the state of the hosts.
pub const POLL: Duration = Duration::from_millis(200);

/// The place of a deployment.
#[derive(Debug, Clone)]
pub struct Slot {
    /// Name of the tenant.
    pub tenant: String,
    /// Name of the consumer.
    pub consumer: String,
    /// The event type that the deployment takes.
    pub event_type: String,
    /// Range of the event's versions; none for all.
    pub event_versions: Option<String>,
}

impl Slot {
    /// Returns a path of the API, below the slot's consumer.
    pub fn path(&self, rest: &[&str]) -> String {
        path(&[&["tenants", &self.tenant, "consumers", &self.consumer], rest].concat())
    }

    /// Returns the live deployment of a role in this slot.
    pub async fn live(&self, api: &Api, role: &str) -> Result<Option<DeploymentBody>> {
        let live: Vec<DeploymentBody> = api.get(&self.path(&["deployments"])).await?;
        Ok(live.into_iter().find(|deployment| deployment.role == role && self.is_of(deployment)))
    }

    /// Returns the deployment of a role that runs in this slot, else the last that did.
    pub async fn latest(&self, api: &Api, role: &str) -> Result<DeploymentBody> {
        let all: Vec<DeploymentBody> = api
            .get(&with_query(&self.path(&["deployments"]), &[("history", Some("true".to_owned()))]))
            .await?;
        let found =
            all.into_iter().filter(|deployment| deployment.role == role && self.is_of(deployment));
        found
            .max_by_key(|deployment| deployment.deployment_id)
            .with_context(|| format!("no {role} ever ran for {}", self.shown()))
    }

    /// Returns whether a deployment is for this slot.
    fn is_of(&self, deployment: &DeploymentBody) -> bool {
        deployment.event_type == self.event_type && deployment.event_versions == self.event_versions
    }

    /// Makes a version live in this slot, without settings, limits or a required migration, and
    /// with the grants that its imports need.
    pub async fn deploy(&self, api: &Api, version: &VersionBody) -> Result<DeploymentBody> {
        let new = NewDeploymentBody {
            event_type: self.event_type.clone(),
            event_versions: self.event_versions.clone(),
            handler: version.handler.clone(),
            version: version.digest.clone(),
            settings: Map::new(),
            limits: Map::new(),
            requires_migration: None,
            retries: wire::RetriesBody::Live,
            grants: grants_of(version),
        };
        api.post(&self.path(&["deployments"]), &new).await
    }

    /// Describes the slot for operators.
    pub fn shown(&self) -> String {
        let of = format!("`{}/{}`", self.tenant, self.consumer);
        match &self.event_versions {
            Some(versions) => format!("`{}` ({versions}) of {of}", self.event_type),
            None => format!("`{}` of {of}", self.event_type),
        }
    }
}

/// Returns the grants that a version needs, by what it imports.
fn grants_of(version: &VersionBody) -> Vec<wire::GrantBody> {
    let imports = version.report.as_ref().and_then(|report| report["imports"].as_array());
    let mut names = imports.into_iter().flatten().filter_map(Value::as_str);
    match names.any(is_emit) {
        true => vec![wire::GrantBody::Emit],
        false => Vec::new(),
    }
}

/// Returns the default name of a handler: that of its file.
pub fn handler_name(component: &Path) -> String {
    component
        .file_stem()
        .map(|stem| stem.to_string_lossy().to_lowercase().replace('_', "-"))
        .unwrap_or_default()
}

/// Waits until every running host has switched to what is live by now. Returns the number of hosts.
/// A withdrawn deployment has no row of its own to wait for, so the consumer's generation counts.
pub async fn wait_until_switched(
    api: &Api,
    slot: &Slot,
    deployment_id: i64,
    within: Duration,
) -> Result<usize> {
    let (path, deadline) =
        (slot.path(&["deployments", &deployment_id.to_string()]), Instant::now() + within);
    let generation = api.get::<ConsumerBody>(&slot.path(&[])).await?.generation;
    let bar = spinner();
    loop {
        let hosts = api.get::<DeploymentBody>(&path).await?.hosts;
        let (switched, late): (Vec<_>, Vec<_>) =
            hosts.iter().partition(|host| host.generation >= generation);
        if let Some(failed) =
            late.iter().find(|host| host.state == "failed" && host.next_generation >= generation)
        {
            bail!(
                "host `{}` cannot switch: {}",
                failed.host,
                failed.error.as_deref().unwrap_or("it did not say why")
            );
        }
        if late.is_empty() {
            bar.finish_and_clear();
            return Ok(switched.len());
        }
        if Instant::now() >= deadline {
            let late: Vec<_> = late.iter().map(|host| format!("`{}`", host.host)).collect();
            bail!(
                "after {} s these hosts have not switched: {}",
                within.as_secs(),
                late.join(", ")
            );
        }
        terminal::tell(&bar, &format!("{} of {} hosts have switched", switched.len(), hosts.len()));
        tokio::time::sleep(POLL).await;
    }
}
