//! `oncebox hosts`, and waiting until all of them run a deployment.

use std::time::Duration;

use anyhow::Result;
use clap::Args;
use oncebox_api::wire::{DeploymentBody, HostBody, HostFailing, HostProgressBody};
use oncebox_devkit::{
    api::{Api, path},
    output,
    slot::{Slot, wait_until_switched},
    upload::short,
};

/// Whether to wait.
#[derive(Args)]
pub(super) struct WaitingFor {
    /// Wait until every running host has switched, for so many seconds
    #[arg(long, value_name = "SECONDS", num_args = 0..=1, require_equals = true, default_missing_value = "60")]
    wait: Option<u64>,
}

impl WaitingFor {
    /// Returns how long to wait, in seconds, if waiting was requested.
    pub(super) fn seconds(&self) -> Option<u64> {
        self.wait
    }
}

pub(super) async fn run(api: &Api, json: bool) -> Result<()> {
    let hosts: Vec<HostBody> = api.get(&path(&["hosts"])).await?;
    if json {
        return output::json(&hosts);
    }
    let cells = |host: &HostBody| {
        let consumers: Vec<_> =
            host.consumers.iter().map(|(state, count)| format!("{count} {state}")).collect();
        let (started, seen) = (output::time(host.started_at), output::time(host.seen_at));
        let version = host.version.clone().unwrap_or_else(|| "-".to_owned());
        let (id, name) = (host.host_id.to_string(), host.name.clone());
        vec![id, name, version, started, seen, consumers.join(", ")]
    };
    output::table(
        &["HOST", "NAME", "VERSION", "STARTED", "SEEN", "CONSUMERS"],
        &hosts.iter().map(cells).collect::<Vec<_>>(),
    );
    for host in &hosts {
        for HostFailing { tenant, consumer, error } in &host.failing {
            println!(
                "consumer `{tenant}/{consumer}` fails on host `{}`: {}",
                host.name,
                error.as_deref().unwrap_or_default()
            );
        }
    }
    Ok(())
}

/// Prints a deployment that was just made. If waiting was requested, it waits first until every
/// host has switched.
pub(super) async fn report(
    api: &Api,
    slot: &Slot,
    deployed: DeploymentBody,
    waiting: &WaitingFor,
    json: bool,
) -> Result<()> {
    if !json {
        deployed.warnings.iter().for_each(|warning| println!("warning: {warning}"));
    }
    let Some(seconds) = waiting.wait else {
        return if json { output::json(&deployed) } else { Ok(()) };
    };
    let id = deployed.deployment_id;
    let outcome = wait_until_switched(api, slot, id, Duration::from_secs(seconds)).await;
    let now: DeploymentBody = api.get(&slot.path(&["deployments", &id.to_string()])).await?;
    if json {
        output::json(&now)?;
    } else {
        table(&now);
    }
    outcome.map(drop)
}

/// Waits, if that was requested, until every running host has switched to what is live now.
pub(super) async fn wait_quietly(
    api: &Api,
    slot: &Slot,
    live: &DeploymentBody,
    waiting: &WaitingFor,
    json: bool,
) -> Result<()> {
    let Some(seconds) = waiting.wait else { return Ok(()) };
    let switched =
        wait_until_switched(api, slot, live.deployment_id, Duration::from_secs(seconds)).await?;
    if !json {
        println!(
            "{switched} of {switched} hosts have switched to version {} for {}",
            short(&live.digest),
            slot.shown()
        );
    }
    Ok(())
}

fn has_switched(deployment: &DeploymentBody, host: &HostProgressBody) -> bool {
    host.generation >= deployment.generation
}

/// Returns the state of a host for a deployment, in a word.
pub(super) fn state<'a>(deployment: &DeploymentBody, host: &'a HostProgressBody) -> &'a str {
    if has_switched(deployment, host) {
        "switched"
    } else if host.state == "switched" {
        "waiting" // the host has not seen this deployment yet
    } else {
        &host.state
    }
}

/// Prints how far each host is with a deployment.
pub(super) fn table(deployment: &DeploymentBody) {
    if deployment.hosts.is_empty() {
        println!("no host is running; the first that starts takes it up");
        return;
    }
    let cells = |host: &HostProgressBody| {
        vec![
            host.host.clone(),
            state(deployment, host).to_owned(),
            output::time(host.at),
            host.error.clone().unwrap_or_default(),
        ]
    };
    output::table(
        &["HOST", "STATE", "SINCE", "ERROR"],
        &deployment.hosts.iter().map(cells).collect::<Vec<_>>(),
    );
}
