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

/// Prints the inputs of the proof, with the memory that each needs, and the verdict.
pub(super) async fn run(api: &Api, args: &ExplainArgs, json: bool) -> Result<()> {
    let ExplainArgs { consumer, tenant } = args;
    let horizon: HorizonBody =
        api.get(&path(&["tenants", tenant, "consumers", consumer, "horizon"])).await?;
    if json {
        return output::json(&horizon);
    }
    output::table(&["OF", "SETTING", "VALUE", "NEEDS"], &rows(&horizon));
    println!("\n{}", horizon.conclusion);
    Ok(())
}

fn rows(horizon: &HorizonBody) -> Vec<Vec<String>> {
    let input = |input: &HorizonInputBody| {
        let needs = input.needs.clone().unwrap_or_default();
        vec![input.of.clone(), input.name.clone(), input.value.clone(), needs]
    };
    let of_policy = |name: &str, value: &str| {
        vec!["policy".to_owned(), name.to_owned(), value.to_owned(), String::new()]
    };
    let mut rows: Vec<_> = horizon.inputs.iter().map(input).collect();
    rows.push(of_policy("retention", &horizon.retention));
    rows.push(of_policy("replay.past_horizon", &horizon.past_horizon));
    rows.push(vec![
        "formula".to_owned(),
        "factor".to_owned(),
        horizon.factor.to_string(),
        String::new(),
    ]);
    rows
}
