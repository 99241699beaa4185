//! `oncebox rollback`

use anyhow::Result;
use clap::Args;
use oncebox_api::wire::{NewRollback, RollbackBody};
use oncebox_devkit::{api::Api, output, slot::Slot, upload::short};

use super::deploy::SlotArgs;
use super::hosts::{self, WaitingFor};

#[derive(Args)]
pub(super) struct RollbackArgs {
    #[command(flatten)]
    slot: SlotArgs,
    /// The version to go back to, by the first digits of its digest; by default the one before
    #[arg(long, value_name = "DIGEST")]
    to: Option<String>,
    /// Why; it is kept with the deployment
    #[arg(long)]
    reason: Option<String>,
    /// Run again what the withdrawn version failed
    #[arg(long)]
    redrive: bool,
    #[command(flatten)]
    waiting: WaitingFor,
}

pub(super) async fn run(api: &Api, args: RollbackArgs, json: bool) -> Result<()> {
    let RollbackArgs { slot, to, reason, redrive, waiting } = args;
    let slot = Slot::from(slot);
    let request = NewRollback {
        event_type: slot.event_type.clone(),
        event_versions: slot.event_versions.clone(),
        to,
        reason,
        redrive,
    };
    let done: RollbackBody = api.post(&slot.path(&["rollbacks"]), &request).await?;
    if json {
        output::json(&done)?;
    } else {
        print(&slot, &done, redrive);
    }
    hosts::wait_quietly(api, &slot, &done.live, &waiting, json).await
}

fn print(slot: &Slot, done: &RollbackBody, redrive: bool) {
    let RollbackBody { withdrawn, live, migrations_kept, redriven } = done;
    let what = if withdrawn.role == "canary" { "canary" } else { "version" };
    println!(
        "{what} {} of {} is withdrawn; version {} is live",
        short(&withdrawn.digest),
        slot.shown(),
        short(&live.digest)
    );
    if !migrations_kept.is_empty() {
        println!(
            "these migrations are later than that version, and stay: {}",
            migrations_kept.join(", ")
        );
    }
    if redrive {
        println!("{redriven} messages that it had failed run again");
    }
}
