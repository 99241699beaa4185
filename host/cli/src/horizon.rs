//! `oncebox retention explain`: the proof that a consumer's inbox remembers for long enough.

use anyhow::Result;
use clap::Args;
use oncebox_api::wire::{HorizonBody, HorizonInputBody};
use oncebox_devkit::{
    api::{Api, path},
    output,
};

#[derive(Args)]
pub(super) struct ExplainArgs {
    /// The consumer
    consumer: String,
    /// Its tenant
    #[arg(long)]
    tenant: String,
}

/// Prints the inputs of the proof, with the memory that each needs and the time that it allows, and
/// the verdict.
pub(super) async fn run(api: &Api, args: &ExplainArgs, json: bool) -> Result<()> {
    let ExplainArgs { consumer, tenant } = args;
    let horizon: HorizonBody =
        api.get(&path(&["tenants", tenant, "consumers", consumer, "horizon"])).await?;
    if json {
        return output::json(&horizon);
    }
    let headings = ["FACTOR", "OF", "SETTING", "VALUE", "NEEDS", "ALLOWS", "DECIDES"];
    output::table(&headings, &rows(&horizon));
    println!("\n{}", horizon.conclusion);
    if let Some(raise) = &horizon.raise {
        println!("{raise}");
    }
    for warning in &horizon.warnings {
        println!("warning: {warning}");
    }
    Ok(())
}

fn rows(horizon: &HorizonBody) -> Vec<Vec<String>> {
    let input = |input: &HorizonInputBody| {
        vec![
            input.factor.clone(),
            input.of.clone(),
            input.name.clone(),
            input.value.clone(),
            input.needs.clone().unwrap_or_default(),
            input.allows.clone().unwrap_or_default(),
            if input.decides { "yes".to_owned() } else { String::new() },
        ]
    };
    let setting = |of: &str, name: &str, value: &str| {
        let mut row = vec![String::new(); 7];
        row[1..4].clone_from_slice(&[of.to_owned(), name.to_owned(), value.to_owned()]);
        row
    };
    let mut rows: Vec<_> = horizon.inputs.iter().map(input).collect();
    rows.push(setting("policy", "retention", &horizon.retention));
    if let Some(bound) = &horizon.raise_bound {
        rows.push(setting("policy", "replay.horizon", &format!("raise, to {bound} at most")));
    }
    rows.push(setting("policy", "replay.past_horizon", &horizon.past_horizon));
    rows.push(setting("formula", "factor", &horizon.factor.to_string()));
    rows
}
