//! `oncebox tenant delete`

use std::{
    io::{BufRead, IsTerminal, Write},
    time::Duration,
};

use anyhow::{Result, bail};
use clap::Args;
use oncebox_api::wire::{TenantDeletion, TenantRemovalBody};
use oncebox_devkit::{
    api::{Api, Refused, path},
    output,
};

/// Pause between two requests.
const PAUSE: Duration = Duration::from_millis(300);

#[derive(Args)]
pub(crate) struct DeleteArgs {
    /// The tenant
    tenant: String,
    /// Its name once more; without it, you are asked at the terminal
    #[arg(long, value_name = "TENANT")]
    confirm: Option<String>,
}

/// Repeats the request until nothing of the tenant is left. The deletion goes on when this command
/// ends, since any process can carry it out.
pub(super) async fn run(api: &Api, args: DeleteArgs, json: bool) -> Result<()> {
    let DeleteArgs { tenant, confirm } = args;
    let confirm = match confirm {
        Some(confirm) => confirm,
        None => ask(&tenant)?,
    };
    let (route, body) = (path(&["tenants", &tenant]), TenantDeletion { confirm });
    let mut before: Option<TenantRemovalBody> = None;
    loop {
        let removal: TenantRemovalBody = match api.delete_with(&route, &body).await {
            Ok(removal) => removal,
            // Another caller has completed the deletion.
            Err(error)
                if before.is_some()
                    && error
                        .downcast_ref::<Refused>()
                        .is_some_and(|refused| refused.status == 404) =>
            {
                break;
            }
            Err(error) => return Err(error),
        };
        if removal.is_done {
            break;
        }
        if !json && before.as_ref() != Some(&removal) {
            println!("{}", shown(&removal));
        }
        before = Some(removal);
        tokio::time::sleep(PAUSE).await;
    }
    output::done(json, &format!("tenant `{tenant}` is deleted; the audit log keeps who did what"))
}

fn shown(removal: &TenantRemovalBody) -> String {
    if !removal.waiting_for.is_empty() {
        return format!("waiting for hosts to let go of it: {}", removal.waiting_for.join(", "));
    }
    let more = if removal.messages > 100_000 { "more than " } else { "" };
    format!(
        "{} objects of its schema and {more}{} messages are left",
        removal.objects,
        removal.messages.min(100_000)
    )
}

/// Asks the operator at the terminal.
fn ask(tenant: &str) -> Result<String> {
    if !std::io::stdin().is_terminal() {
        bail!(
            "everything of tenant `{tenant}` would be deleted for good; say `--confirm {tenant}` \
                if that is meant"
        );
    }
    eprint!(
        "everything of tenant `{tenant}` will be deleted for good, tables and messages; type its \
            name: "
    );
    std::io::stderr().flush()?;
    let mut answer = String::new();
    std::io::stdin().lock().read_line(&mut answer)?;
    Ok(answer.trim().to_owned())
}
