//! `oncebox tenant move`

use std::time::Duration;

use anyhow::{Result, bail};
use clap::Args;
use oncebox_api::wire::{NewTenantMove, TenantMoveBody};
use oncebox_devkit::{
    api::{Api, path},
    output::{self, bytes},
};

/// Pause between two looks.
const PAUSE: Duration = Duration::from_millis(300);

#[derive(Args)]
pub(crate) struct MoveArgs {
    /// The tenant
    tenant: String,
    /// Name of the other database in the hosts' configuration; without it, the move that is under
    /// way is shown until it is over
    #[arg(long, value_name = "DATABASE")]
    to: Option<String>,
    /// Let it stay where it is; where it has been moved, leave what is left in the first database
    #[arg(long, conflicts_with = "to")]
    cancel: bool,
}

/// Begins a move, or cancels it, and shows how far it is until it is over. It goes on when this
/// command ends, since hosts carry it out.
pub(super) async fn run(api: &Api, args: MoveArgs, json: bool) -> Result<()> {
    let MoveArgs { tenant, to, cancel } = args;
    let route = path(&["tenants", &tenant, "move"]);
    let mut known: TenantMoveBody = match &to {
        Some(to) => api.post(&route, &NewTenantMove { to: to.clone() }).await?,
        None if cancel => api.delete(&route).await?,
        None => api.get(&route).await?,
    };
    if known.is_done && to.is_none() && !cancel {
        bail!("tenant `{tenant}` is not being moved; `--to` names the database to which it goes");
    }
    let mut before = None;
    while !known.is_done {
        let shown = shown(&known);
        if !json && before.as_ref() != Some(&shown) {
            println!("{shown}");
        }
        before = Some(shown);
        tokio::time::sleep(PAUSE).await;
        // Its error is in what is shown next.
        let _ = api.carry_move(&tenant).await;
        known = api.get(&route).await?;
    }
    if json {
        return output::json(&known);
    }
    let place = known.database.map_or("the host's database".into(), |name| format!("`{name}`"));
    println!("tenant `{tenant}` is in {place}");
    Ok(())
}

fn shown(known: &TenantMoveBody) -> String {
    let to = known.to.as_deref().unwrap_or_default();
    let from =
        known.from.as_deref().map_or("the host's database".into(), |from| format!("`{from}`"));
    let step = match known.step.as_deref() {
        Some("preparing") => format!("trying whether it can go from {from} to `{to}`"),
        Some("stopping") => "its consumers stop".to_owned(),
        Some("copying") => format!("copying to `{to}`: {} so far", bytes(known.copied_bytes)),
        Some("moved") => format!("it runs in `{to}`; removing what is left in {from}"),
        _ => format!("it stays in {from}; removing what is left in `{to}`"),
    };
    match &known.error {
        Some(error) => format!("{step}; the last try failed: {error}"),
        None => step,
    }
}
