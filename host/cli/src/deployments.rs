//! `oncebox deployments`

use anyhow::Result;
use clap::Args;
use oncebox_api::wire::DeploymentBody;
use oncebox_devkit::{
    api::{Api, path, with_query},
    output,
    upload::short,
};

use super::{consumer, hosts};

#[derive(Args)]
pub(super) struct DeploymentsArgs {
    /// Only this tenant's
    #[arg(long)]
    pub(super) tenant: Option<String>,
    /// Only this consumer's
    #[arg(long)]
    pub(super) consumer: Option<String>,
    /// Also those that have ended
    #[arg(long)]
    pub(super) history: bool,
    /// Only those of this role
    #[arg(skip)]
    pub(super) role: Option<&'static str>,
}

/// A deployment, with its consumer.
#[derive(serde::Serialize)]
struct Of {
    tenant: String,
    consumer: String,
    #[serde(flatten)]
    deployment: DeploymentBody,
}

pub(super) async fn run(api: &Api, args: DeploymentsArgs, json: bool) -> Result<()> {
    let mut all = Vec::new();
    for (tenant, consumer) in consumers(api, &args).await? {
        let path = path(&["tenants", &tenant, "consumers", &consumer, "deployments"]);
        let found: Vec<DeploymentBody> = api
            .get(&with_query(&path, &[("history", args.history.then(|| "true".to_owned()))]))
            .await?;
        let found = found
            .into_iter()
            .filter(|deployment| args.role.is_none_or(|role| deployment.role == role));
        all.extend(found.map(|deployment| Of {
            tenant: tenant.clone(),
            consumer: consumer.clone(),
            deployment,
        }));
    }
    if json {
        return output::json(&all);
    }
    print(&all, args.history);
    Ok(())
}

/// Returns the consumers that are asked for.
async fn consumers(api: &Api, args: &DeploymentsArgs) -> Result<Vec<(String, String)>> {
    if let (Some(tenant), Some(consumer)) = (&args.tenant, &args.consumer) {
        return Ok(vec![(tenant.clone(), consumer.clone())]);
    }
    let consumers = consumer::all(api, args.tenant.as_deref()).await?;
    let wanted = consumers
        .into_iter()
        .filter(|consumer| args.consumer.as_ref().is_none_or(|name| *name == consumer.name));
    Ok(wanted.map(|consumer| (consumer.tenant, consumer.name)).collect())
}

fn print(all: &[Of], history: bool) {
    let mut headings =
        vec!["ID", "CONSUMER", "EVENT TYPE", "ROLE", "HANDLER", "VERSION", "SINCE", "BY", "HOSTS"];
    // Few deployments have one.
    let has_grants = all.iter().any(|of| !of.deployment.grants.is_empty());
    if has_grants {
        headings.push("GRANTS");
    }
    if history {
        headings.push("ENDED");
    }
    let cells = |of: &Of| {
        let d = &of.deployment;
        let mut cells = vec![
            d.deployment_id.to_string(),
            format!("{}/{}", of.tenant, of.consumer),
            d.event_versions.as_ref().map_or_else(
                || d.event_type.clone(),
                |versions| format!("{} ({versions})", d.event_type),
            ),
            d.percent.map_or_else(|| d.role.clone(), |percent| format!("{} {percent} %", d.role)),
            d.handler.clone(),
            short(&d.digest).to_owned(),
            output::time(d.created_at),
            d.created_by.clone(),
            if d.ended_at.is_none() { hosts(d) } else { String::new() },
        ];
        if has_grants {
            cells.push(d.grants.join(", "));
        }
        if history {
            cells.push(ended(d));
        }
        cells
    };
    output::table(&headings, &all.iter().map(cells).collect::<Vec<_>>());
}

/// Describes how many hosts run a deployment, and the state of the others.
fn hosts(deployment: &DeploymentBody) -> String {
    let late = |host| match hosts::state(deployment, host) {
        "switched" => None,
        state => Some(format!(
            ", {} {state}{}",
            host.host,
            host.error.as_ref().map_or_else(String::new, |error| format!(" ({error})"))
        )),
    };
    let late: Vec<_> = deployment.hosts.iter().filter_map(late).collect();
    let of = deployment.hosts.len();
    format!("{} of {of} switched{}", of - late.len(), late.concat())
}

/// Describes when a deployment ended, how and why; returns an empty text while it lives.
pub(super) fn ended(deployment: &DeploymentBody) -> String {
    let (Some(at), Some(how)) = (deployment.ended_at, &deployment.ended_how) else {
        return String::new();
    };
    let reason =
        deployment.ended_reason.as_ref().map_or_else(String::new, |reason| format!(": {reason}"));
    format!("{} {}{reason}", output::time(at), how.replace('_', " "))
}
