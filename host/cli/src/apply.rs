//! `oncebox apply`: makes tenants, consumers and deployments what a file says. It first compares
//! them with the file and shows the plan, and only then changes anything. It never takes anything
//! away.

use std::{
    io::{BufRead, IsTerminal, Write},
    path::PathBuf,
};

use anyhow::{Result, ensure};
use clap::Args;
use oncebox_devkit::{
    api::Api,
    apply::{self, Applied, PlanLine, Sign},
    output,
};
use serde_json::json;

use super::hosts::{self, WaitingFor};

#[derive(Args)]
pub(super) struct ApplyArgs {
    /// File with tenants, consumers and deployments
    #[arg(long, short)]
    file: PathBuf,
    /// Only show what would be done
    #[arg(long)]
    dry_run: bool,
    /// Ask before anything is done
    #[arg(long, conflicts_with = "dry_run")]
    prompt: bool,
    #[command(flatten)]
    waiting: WaitingFor,
}

pub(super) async fn run(api: &Api, args: ApplyArgs, as_json: bool) -> Result<()> {
    let tenants = apply::read(&args.file)?;
    let changes = apply::compare(api, &tenants).await?;
    if !as_json {
        changes.iter().for_each(|change| println!("{change}"));
    }
    let (created, changed) = (count(&changes, Sign::Create), count(&changes, Sign::Change));
    let is_nothing = created + changed == 0;
    let is_asked = args.prompt && !is_nothing;
    if !args.dry_run && !is_nothing && (!is_asked || agrees()?) {
        let Applied { deployed, warnings } = apply::carry_out(api, &changes).await?;
        if !as_json {
            warnings.iter().for_each(|warning| println!("warning: {warning}"));
        }
        for (slot, deployment) in &deployed {
            hosts::wait_quietly(api, slot, deployment, &args.waiting, as_json).await?;
        }
    } else if is_asked {
        println!("nothing was done");
        return Ok(());
    }
    summary(&changes, &args, as_json)
}

fn summary(changes: &[PlanLine<'_>], args: &ApplyArgs, as_json: bool) -> Result<()> {
    let (created, changed) = (count(changes, Sign::Create), count(changes, Sign::Change));
    let unchanged = changes.len() - created - changed;
    if as_json {
        let changes: Vec<_> = changes.iter().map(PlanLine::json).collect();
        return output::json(&json!({
            "changes": changes, "created": created, "changed": changed, "unchanged": unchanged, "dry_run": args.dry_run,
        }));
    }
    let would = if args.dry_run { "to be " } else { "" };
    match created + changed {
        0 => println!("no changes"),
        _ => println!("{created} {would}created, {changed} {would}changed, {unchanged} unchanged"),
    }
    Ok(())
}

fn count(changes: &[PlanLine<'_>], sign: Sign) -> usize {
    changes.iter().filter(|change| change.sign == sign).count()
}

/// Asks the operator at the terminal.
fn agrees() -> Result<bool> {
    ensure!(std::io::stdin().is_terminal(), "`--prompt` needs a terminal to ask at");
    eprint!("do this? [y/N] ");
    std::io::stderr().flush()?;
    let mut answer = String::new();
    std::io::stdin().lock().read_line(&mut answer)?;
    Ok(matches!(answer.trim(), "y" | "Y" | "yes"))
}
