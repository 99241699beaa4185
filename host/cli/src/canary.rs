//! `oncebox canary …`

use anyhow::{Context, Result};
use clap::{Args, Subcommand};
use oncebox_api::wire::{DeploymentBody, Ending, GuardBody, NewCanary, NewPercent};
use oncebox_devkit::{api::Api, output, slot::Slot, upload::short};

use super::{
    deploy::{SlotArgs, WhatArgs},
    deployments::{self, DeploymentsArgs},
    hosts::{self, WaitingFor},
    version,
};

#[derive(Subcommand)]
pub(super) enum CanaryCommand {
    /// Give a version a share of the ordering keys
    Start(CanaryStartArgs),
    /// List the canaries that run
    List(TrialsArgs),
    /// Show a canary: its version, its share, what ends it, and how far the hosts are
    Show {
        #[command(flatten)]
        slot: SlotArgs,
    },
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
        waiting: WaitingFor,
    },
    /// Take it away; the live version takes all keys again
    Stop {
        #[command(flatten)]
        slot: SlotArgs,
        /// Why; it is kept with the deployment
        #[arg(long)]
        reason: Option<String>,
    },
}

/// Of which tenant or consumer the canaries or shadows are listed.
#[derive(Args)]
pub(super) struct TrialsArgs {
    /// Only this tenant's
    #[arg(long)]
    tenant: Option<String>,
    /// Only this consumer's
    #[arg(long)]
    consumer: Option<String>,
    /// Also those that have ended
    #[arg(long)]
    history: bool,
}

impl TrialsArgs {
    /// Lists the deployments of a role.
    pub(super) async fn list(self, api: &Api, role: &'static str, json: bool) -> Result<()> {
        let Self { tenant, consumer, history } = self;
        deployments::run(api, DeploymentsArgs { tenant, consumer, history, role: Some(role) }, json)
            .await
    }
}

#[derive(Args)]
pub(super) struct CanaryStartArgs {
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
    waiting: WaitingFor,
}

pub(super) async fn run(api: &Api, command: CanaryCommand, json: bool) -> Result<()> {
    match command {
        CanaryCommand::Start(args) => start(api, args, json).await,
        CanaryCommand::List(args) => args.list(api, "canary", json).await,
        CanaryCommand::Show { slot } => show(&Slot::from(slot).latest(api, "canary").await?, json),
        CanaryCommand::Grow { slot, percent } => {
            let slot = Slot::from(slot);
            let canary = live(api, &slot).await?;
            let grown: DeploymentBody = api
                .patch(
                    &slot.path(&["deployments", &canary.deployment_id.to_string()]),
                    &NewPercent { percent },
                )
                .await?;
            let text = format!(
                "version {} takes {percent} % of the keys of {}",
                short(&grown.digest),
                slot.shown()
            );
            if json { output::json(&grown) } else { output::done(false, &text) }
        }
        CanaryCommand::Promote { slot, waiting } => {
            let slot = Slot::from(slot);
            let canary = live(api, &slot).await?;
            let promoted: DeploymentBody = api
                .post(
                    &slot.path(&["deployments", &canary.deployment_id.to_string(), "promote"]),
                    &serde_json::json!({}),
                )
                .await?;
            if !json {
                println!("version {} takes {}", short(&promoted.digest), slot.shown());
            }
            hosts::report(api, &slot, promoted, &waiting, json).await
        }
        CanaryCommand::Stop { slot, reason } => {
            let slot = Slot::from(slot);
            let canary = live(api, &slot).await?;
            end(api, &slot, &canary, reason, json).await
        }
    }
}

async fn start(api: &Api, args: CanaryStartArgs, json: bool) -> Result<()> {
    let CanaryStartArgs { what, percent, margin, window, messages_min, waiting } = args;
    let slot = &what.slot();
    let (version, deployment) = what.prepare(api).await?;
    let guard = GuardBody { margin_percent: margin, window_s: window, messages_min };
    let canary: DeploymentBody = api
        .post(&slot.path(&["canaries"]), &NewCanary { deployment, percent, guard: Some(guard) })
        .await?;
    if !json {
        println!(
            "version {} takes {percent} % of the keys of {}",
            short(&canary.digest),
            slot.shown()
        );
        println!(
            "it ends by itself when it fails {margin} points more often than the live version, \
                over {window} s and {messages_min} messages or more"
        );
        println!("imports: {}", version::imports(&version));
    }
    hosts::report(api, slot, canary, &waiting, json).await
}

fn show(canary: &DeploymentBody, json: bool) -> Result<()> {
    if json {
        return output::json(canary);
    }
    let mut rows = vec![
        vec![
            "version".to_owned(),
            format!("{} of handler `{}`", short(&canary.digest), canary.handler),
        ],
        vec![
            "share".to_owned(),
            format!("{} % of the ordering keys", canary.percent.unwrap_or_default()),
        ],
        vec![
            "started".to_owned(),
            format!("{} by {}", output::time(canary.created_at), canary.created_by),
        ],
    ];
    if let Some(guard) = &canary.guard {
        let GuardBody { margin_percent, window_s, messages_min } = guard;
        let text = format!(
            "by itself when it fails {margin_percent} points more often, over {window_s} s and \
                {messages_min} messages or more"
        );
        rows.push(vec!["ends".to_owned(), text]);
    }
    if canary.ended_at.is_some() {
        rows.push(vec!["ended".to_owned(), deployments::ended(canary)]);
    }
    output::table(&["WHAT", "VALUE"], &rows);
    if canary.ended_at.is_none() {
        println!();
        hosts::table(canary);
    }
    Ok(())
}

async fn live(api: &Api, slot: &Slot) -> Result<DeploymentBody> {
    let canary = slot.live(api, "canary").await?;
    canary.with_context(|| {
        format!(
            "no canary runs for {}; `oncebox deployments --history` shows what became of it",
            slot.shown()
        )
    })
}

/// Ends a canary or a shadow.
pub(super) async fn end(
    api: &Api,
    slot: &Slot,
    deployment: &DeploymentBody,
    reason: Option<String>,
    json: bool,
) -> Result<()> {
    let path = slot.path(&["deployments", &deployment.deployment_id.to_string(), "end"]);
    let ended: DeploymentBody = api.post(&path, &Ending { reason }).await?;
    if json {
        return output::json(&ended);
    }
    println!(
        "the {} of version {} for {} has ended",
        ended.role,
        short(&ended.digest),
        slot.shown()
    );
    Ok(())
}
