//! `oncebox shadow …`

mod differences;

use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use clap::{Args, Subcommand};
use oncebox_api::wire::{DeploymentBody, NewShadow};
use oncebox_devkit::terminal;
use oncebox_devkit::{
    api::Api,
    output,
    slot::{POLL, Slot},
    upload::{short, spinner},
};
use serde_json::Value;

use self::differences::Differences;
use super::{
    canary,
    deploy::{SlotArgs, WhatArgs},
    hosts::{self, WaitingFor},
    version,
};

#[derive(Subcommand)]
pub(super) enum ShadowCommand {
    /// Run a version on live messages after the live one, without an effect
    Start(ShadowStartArgs),
    /// List the shadows that run
    List(canary::TrialsArgs),
    /// Show what it would have done differently
    Show {
        #[command(flatten)]
        slot: SlotArgs,
    },
    /// Take it away
    Stop {
        #[command(flatten)]
        slot: SlotArgs,
        /// Why; it is kept with the deployment
        #[arg(long)]
        reason: Option<String>,
    },
}

#[derive(Args)]
pub(super) struct ShadowStartArgs {
    #[command(flatten)]
    what: WhatArgs,
    /// The share of messages that it runs on
    #[arg(long, default_value_t = 100.0)]
    percent: f64,
    /// How long one run may take
    #[arg(long, value_name = "MS")]
    duration_ms: Option<u64>,
    #[command(flatten)]
    waiting: WaitingFor,
}

pub(super) async fn run(api: &Api, command: ShadowCommand, json: bool) -> Result<()> {
    match command {
        ShadowCommand::Start(args) => start(api, args, json).await,
        ShadowCommand::List(args) => args.list(api, "shadow", json).await,
        ShadowCommand::Show { slot } => show(api, &slot.into(), json).await,
        ShadowCommand::Stop { slot, reason } => {
            let slot = Slot::from(slot);
            let live = slot.live(api, "shadow").await?;
            let shadow = live.with_context(|| {
                format!(
                    "no shadow runs for {}; `oncebox deployments --history` \
                    shows what became of it",
                    slot.shown()
                )
            })?;
            canary::end(api, &slot, &shadow, reason, json).await
        }
    }
}

async fn start(api: &Api, args: ShadowStartArgs, json: bool) -> Result<()> {
    let ShadowStartArgs { what, percent, duration_ms, waiting } = args;
    let slot = &what.slot();
    let (version, deployment) = what.prepare(api).await?;
    let new = NewShadow { deployment, percent, duration_ms };
    let shadow: DeploymentBody = api.post(&slot.path(&["shadows"]), &new).await?;
    if !json {
        println!(
            "version {} runs on {percent} % of the messages of {}, after the live version and \
                without an effect",
            short(&shadow.digest),
            slot.shown()
        );
        println!("imports: {}", version::imports(&version));
    }
    if let Some(seconds) = waiting.seconds() {
        until_captured(api, slot, &shadow, Duration::from_secs(seconds)).await?;
    }
    hosts::report(api, slot, shadow, &waiting, json).await
}

/// Waits until the changes of every table are captured: before that no message is compared. A host
/// puts the triggers there; without one there is nothing to wait for.
async fn until_captured(
    api: &Api,
    slot: &Slot,
    shadow: &DeploymentBody,
    within: Duration,
) -> Result<()> {
    let deadline = Instant::now() + within;
    let id = shadow.deployment_id.to_string();
    let bar = spinner();
    loop {
        let found: Differences = api.get(&slot.path(&["deployments", &id, "differences"])).await?;
        let left = differences::tables(&found.uncaptured_tables);
        if left.is_empty()
            || api.get::<DeploymentBody>(&slot.path(&["deployments", &id])).await?.hosts.is_empty()
        {
            bar.finish_and_clear();
            return Ok(());
        }
        if Instant::now() >= deadline {
            bail!(
                "after {} s changes of {left} are not captured, which other transactions may hold; \
                    nothing is compared until then, \
                 and `oncebox shadow show` says when that is over",
                within.as_secs()
            );
        }
        terminal::tell(&bar, &format!("changes of {left} are not captured yet"));
        tokio::time::sleep(POLL).await;
    }
}

async fn show(api: &Api, slot: &Slot, json: bool) -> Result<()> {
    let id = slot.latest(api, "shadow").await?.deployment_id.to_string();
    let found: Value = api.get(&slot.path(&["deployments", &id, "differences"])).await?;
    if json {
        return output::json(&found);
    }
    let differences: Differences = serde_json::from_value(found)
        .context("the server tells of differences in another form; use `--json`")?;
    differences::print(&differences);
    Ok(())
}
