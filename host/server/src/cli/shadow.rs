//! `oncebox shadow …`

mod differences;

use anyhow::{Context, Result};
use clap::{Args, Subcommand};
use serde_json::Value;

use self::differences::Differences;
use super::{
    api::{Api, with_query},
    canary,
    deploy::{SlotArgs, WhatArgs},
    hosts::{self, Waiting},
    output,
    upload::short,
    version,
    wire::{Deployment, NewShadow},
};

#[derive(Subcommand)]
pub(super) enum ShadowCommand {
    /// Run a version on live messages after the live one, without an effect
    Start(StartArgs),
    /// Show what it would have done differently
    Show {
        #[command(flatten)]
        slot: SlotArgs,
    },
    /// Take it away
    End {
        #[command(flatten)]
        slot: SlotArgs,
        /// Why; it is kept with the deployment
        #[arg(long)]
        reason: Option<String>,
    },
}

#[derive(Args)]
pub(super) struct StartArgs {
    #[command(flatten)]
    what: WhatArgs,
    /// The share of messages that it runs on
    #[arg(long, default_value_t = 100.0)]
    percent: f64,
    /// How long one run may take
    #[arg(long, value_name = "MS")]
    duration_ms: Option<u64>,
    #[command(flatten)]
    waiting: Waiting,
}

pub(super) async fn run(api: &Api, command: ShadowCommand, json: bool) -> Result<()> {
    match command {
        ShadowCommand::Start(args) => start(api, args, json).await,
        ShadowCommand::Show { slot } => show(api, &slot, json).await,
        ShadowCommand::End { slot, reason } => {
            let live = slot.live(api, "shadow").await?;
            let shadow = live
                .with_context(|| format!("no shadow runs for {}; `oncebox deployments --history` shows what became of it", slot.shown()))?;
            canary::end(api, &slot, &shadow, reason, json).await
        }
    }
}

async fn start(api: &Api, args: StartArgs, json: bool) -> Result<()> {
    let StartArgs { what, percent, duration_ms, waiting } = args;
    let slot = &what.slot;
    let (version, deployment) = what.prepare(api).await?;
    let new = NewShadow { deployment, percent, duration_ms };
    let shadow: Deployment = api.post(&slot.path(&["shadows"]), &new).await?;
    if !json {
        println!(
            "version {} runs on {percent} % of the messages of {}, after the live version and without an effect",
            short(&shadow.digest),
            slot.shown()
        );
        println!("imports: {}", version::imports(&version));
    }
    hosts::report(api, slot, shadow, &waiting, json).await
}

async fn show(api: &Api, slot: &SlotArgs, json: bool) -> Result<()> {
    let id = latest(api, slot).await?.deployment_id.to_string();
    let found: Value = api.get(&slot.path(&["deployments", &id, "differences"])).await?;
    if json {
        return output::json(&found);
    }
    let differences: Differences =
        serde_json::from_value(found).context("the server tells of differences in another form; use `--json`")?;
    differences::print(&differences);
    Ok(())
}

/// The shadow that runs, else the last that did.
async fn latest(api: &Api, slot: &SlotArgs) -> Result<Deployment> {
    let all: Vec<Deployment> = api.get(&with_query(&slot.path(&["deployments"]), &[("history", Some("true".to_owned()))])).await?;
    let found = all.into_iter().filter(|deployment| deployment.role == "shadow" && slot.is_of(deployment)).max_by_key(|d| d.deployment_id);
    found.with_context(|| format!("no shadow ever ran for {}", slot.shown()))
}
