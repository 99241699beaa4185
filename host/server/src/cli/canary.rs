//! `oncebox canary …`

use anyhow::{Context, Result};
use clap::{Args, Subcommand};

use super::{
    api::Api,
    deploy::{SlotArgs, WhatArgs},
    hosts::{self, Waiting},
    output,
    upload::short,
    version,
    wire::{Deployment, Ending, Guard, NewCanary, NewPercent},
};

#[derive(Subcommand)]
pub(super) enum CanaryCommand {
    /// Give a version a share of the ordering keys
    Start(StartArgs),
    /// Give it another share; a key that is its own stays so while the share grows
    Grow {
        #[command(flatten)]
        slot: SlotArgs,
        /// The new share of the ordering keys
        #[arg(long)]
        percent: f64,
    },
    /// Make it the live version, for all keys
    Promote {
        #[command(flatten)]
        slot: SlotArgs,
        #[command(flatten)]
        waiting: Waiting,
    },
    /// Take it away; the live version takes all keys again
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
    /// Its share of the ordering keys
    #[arg(long)]
    percent: f64,
    /// Points of percentage that it may fail more often than the live version; more ends it
    #[arg(long, value_name = "PERCENT", default_value_t = 5.0)]
    margin: f64,
    /// Seconds that are looked at
    #[arg(long, value_name = "SECONDS", default_value_t = 60)]
    window: u32,
    /// Messages that it must have run within them before it is judged
    #[arg(long, value_name = "COUNT", default_value_t = 20)]
    messages_min: u32,
    #[command(flatten)]
    waiting: Waiting,
}

pub(super) async fn run(api: &Api, command: CanaryCommand, json: bool) -> Result<()> {
    match command {
        CanaryCommand::Start(args) => start(api, args, json).await,
        CanaryCommand::Grow { slot, percent } => {
            let canary = live(api, &slot).await?;
            let grown: Deployment =
                api.patch(&slot.path(&["deployments", &canary.deployment_id.to_string()]), &NewPercent { percent }).await?;
            let text = format!("version {} takes {percent} % of the keys of {}", short(&grown.digest), slot.shown());
            if json { output::json(&grown) } else { output::done(false, &text) }
        }
        CanaryCommand::Promote { slot, waiting } => {
            let canary = live(api, &slot).await?;
            let promoted: Deployment =
                api.post(&slot.path(&["deployments", &canary.deployment_id.to_string(), "promote"]), &serde_json::json!({})).await?;
            if !json {
                println!("version {} takes {}", short(&promoted.digest), slot.shown());
            }
            hosts::report(api, &slot, promoted, &waiting, json).await
        }
        CanaryCommand::End { slot, reason } => {
            let canary = live(api, &slot).await?;
            end(api, &slot, &canary, reason, json).await
        }
    }
}

async fn start(api: &Api, args: StartArgs, json: bool) -> Result<()> {
    let StartArgs { what, percent, margin, window, messages_min, waiting } = args;
    let slot = &what.slot;
    let (version, deployment) = what.prepare(api).await?;
    let guard = Guard { margin_percent: margin, window_s: window, messages_min };
    let canary: Deployment = api.post(&slot.path(&["canaries"]), &NewCanary { deployment, percent, guard: Some(guard) }).await?;
    if !json {
        println!("version {} takes {percent} % of the keys of {}", short(&canary.digest), slot.shown());
        println!(
            "it ends by itself when it fails {margin} points more often than the live version, over {window} s and {messages_min} messages or more"
        );
        println!("imports: {}", version::imports(&version));
    }
    hosts::report(api, slot, canary, &waiting, json).await
}

async fn live(api: &Api, slot: &SlotArgs) -> Result<Deployment> {
    let canary = slot.live(api, "canary").await?;
    canary.with_context(|| format!("no canary runs for {}; `oncebox deployments --history` shows what became of it", slot.shown()))
}

/// Take a canary or a shadow away.
pub(super) async fn end(api: &Api, slot: &SlotArgs, deployment: &Deployment, reason: Option<String>, json: bool) -> Result<()> {
    let path = slot.path(&["deployments", &deployment.deployment_id.to_string(), "end"]);
    let ended: Deployment = api.post(&path, &Ending { reason }).await?;
    if json {
        return output::json(&ended);
    }
    println!("the {} of version {} for {} has ended", ended.role, short(&ended.digest), slot.shown());
    Ok(())
}
