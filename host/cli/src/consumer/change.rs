//! Changes of a consumer: its policy, its state, its deletion.

use std::{
    io::{BufRead, IsTerminal, Write},
    path::PathBuf,
};

use anyhow::{Result, bail};
use clap::Args;
use oncebox_api::wire::{
    ConsumerBody, NewPolicy, NothingMore, PolicyChangeBody, PolicyDifferenceBody,
};
use oncebox_devkit::policy_file::{policy_object, read_policy};
use oncebox_devkit::{
    api::{Api, with_query},
    output,
};
use serde_json::Value;

use super::{
    Named, Waited,
    show::state as told,
    wait::{For, Patience, wait},
};

#[derive(Args)]
pub(crate) struct SetArgs {
    #[command(flatten)]
    of: Named,
    /// TOML file with the policy
    #[arg(long)]
    policy: PathBuf,
    /// Accept what follows for messages
    #[arg(long)]
    yes: bool,
    #[command(flatten)]
    patience: Patience,
}

/// Changes the policy to that of a file. Asks first, if what follows is not accepted yet.
pub(super) async fn set_policy(api: &Api, args: &SetArgs, json: bool) -> Result<()> {
    let SetArgs { of, policy, yes, patience } = args;
    let policy =
        policy_object(&read_policy(&of.tenant, &of.name, policy, &|path| std::fs::read(path))?)?;
    let mut change: PolicyChangeBody = api
        .put_json(&of.path(&["policy"]), &NewPolicy { policy: policy.clone(), accept: *yes })
        .await?;
    if !json {
        show(of, &change);
    }
    if !change.is_made {
        if json {
            output::json(&change)?;
        }
        ask(json, "change the policy?")?;
        change = api.put_json(&of.path(&["policy"]), &NewPolicy { policy, accept: true }).await?;
    }
    if change.differences.is_empty() {
        return if json { output::json(&change) } else { Ok(()) };
    }
    let consumer = wait(api, of, For::Work, patience, json).await?;
    match (json, consumer) {
        (true, Some(consumer)) => output::json(&PolicyChangeBody { consumer, ..change }),
        (true, None) => output::json(&change),
        (false, _) => {
            println!("the policy of consumer {} is changed", of.shown());
            Ok(())
        }
    }
}

fn show(of: &Named, change: &PolicyChangeBody) {
    if change.differences.is_empty() {
        println!("the policy of consumer {} is that already", of.shown());
    }
    for PolicyDifferenceBody { key, before, after } in &change.differences {
        println!("  {key}: {} -> {}", value(before.as_ref()), value(after.as_ref()));
    }
    for consequence in &change.consequences {
        println!("{}: {}", consequence.key, consequence.text);
    }
    change.warnings.iter().for_each(|warning| println!("warning: {warning}"));
}

fn value(value: Option<&Value>) -> String {
    value.map_or_else(|| "nothing".to_owned(), ToString::to_string)
}

/// Asks the operator at the terminal, and fails if there is none.
pub(super) fn ask(json: bool, question: &str) -> Result<()> {
    if json || !std::io::stdin().is_terminal() {
        bail!("nothing was changed; repeat it with `--yes` to accept what follows");
    }
    print!("{question} [y/N] ");
    std::io::stdout().flush()?;
    let mut answer = String::new();
    std::io::stdin().lock().read_line(&mut answer)?;
    if !matches!(answer.trim(), "y" | "yes") {
        bail!("nothing was changed");
    }
    Ok(())
}

/// Sends a consumer the verb of another state, and waits for the hosts.
pub(super) async fn state(api: &Api, of: &Waited, verb: &str, what: For, json: bool) -> Result<()> {
    let Waited { of, patience } = of;
    let asked: ConsumerBody = api.post(&of.path(&[verb]), &NothingMore {}).await?;
    let consumer = wait(api, of, what, patience, json).await?.unwrap_or(asked);
    if json {
        return output::json(&consumer);
    }
    println!("consumer {} is {}", of.shown(), told(&consumer));
    Ok(())
}

/// Deletes a consumer, and waits for the hosts.
pub(super) async fn delete(api: &Api, of: &Waited, confirm: &str, json: bool) -> Result<()> {
    let Waited { of, patience } = of;
    let asked: ConsumerBody =
        api.delete(&with_query(&of.path(&[]), &[("confirm", Some(confirm.to_owned()))])).await?;
    let left = wait(api, of, For::Gone, patience, json).await?;
    if json {
        return output::json(
            &left.unwrap_or(ConsumerBody { state: "deleted".to_owned(), ..asked }),
        );
    }
    match left {
        Some(_) => println!("consumer {} is being deleted", of.shown()),
        None => println!(
            "consumer {} is deleted; `oncebox audit --tenant {}` says what became of its group",
            of.shown(),
            of.tenant
        ),
    }
    Ok(())
}
