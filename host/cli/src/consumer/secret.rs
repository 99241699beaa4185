//! `oncebox consumer secret …`

use std::path::PathBuf;

use anyhow::Result;
use clap::Subcommand;
use oncebox_api::wire::{
    IngressSecretBody, IngressSecretChangeBody, NewIngressRotation, NewIngressSecret,
};
use oncebox_devkit::{api::Api, output};

use super::Named;
use crate::endpoint::Inputs;

#[derive(Subcommand)]
pub(crate) enum SecretCommand {
    /// Give the consumer a secret in place of all others
    Set {
        #[command(flatten)]
        of: Named,
        /// File with the secret, or `-`; by default the host makes one and shows it once
        #[arg(long, value_name = "FILE")]
        secret_file: Option<PathBuf>,
    },
    /// Begin to know another secret beside the present one, or finish that
    Rotate {
        #[command(flatten)]
        of: Named,
        /// File with the other secret, or `-`; by default the host makes one and shows it once
        #[arg(long, value_name = "FILE", conflicts_with = "finish")]
        secret_file: Option<PathBuf>,
        /// Know the present secret alone
        #[arg(long)]
        finish: bool,
    },
    /// Show how many secrets the consumer has, and since when
    Show(Named),
    /// Remove the secrets; requests to the consumer are refused
    Remove(Named),
}

/// Segment of the paths of the API.
const SECRET: &str = "ingress-secret";

pub(super) async fn run(api: &Api, command: SecretCommand, as_json: bool) -> Result<()> {
    let mut inputs = Inputs::default();
    match command {
        SecretCommand::Set { of, secret_file } => {
            let secret = secret_file.map(|file| inputs.secret(&file)).transpose()?;
            let new = NewIngressSecret { secret };
            let set: IngressSecretChangeBody = api.put_json(&of.path(&[SECRET]), &new).await?;
            let text = format!("consumer {} takes messages over HTTP with this secret", of.shown());
            changed(&set, &text, as_json)
        }
        SecretCommand::Rotate { of, secret_file, finish } => {
            let secret = secret_file.map(|file| inputs.secret(&file)).transpose()?;
            let new = NewIngressRotation { secret, finish };
            let rotated: IngressSecretChangeBody =
                api.post(&of.path(&[SECRET, "rotate"]), &new).await?;
            let text = if finish {
                format!("consumer {} knows one secret", of.shown())
            } else {
                format!(
                    "consumer {} knows both secrets; when its senders have the new one, `oncebox \
                        consumer secret rotate {} --tenant {} --finish`",
                    of.shown(),
                    of.name,
                    of.tenant
                )
            };
            changed(&rotated, &text, as_json)
        }
        SecretCommand::Show(of) => {
            let shown: IngressSecretBody = api.get(&of.path(&[SECRET])).await?;
            if as_json {
                return output::json(&shown);
            }
            let IngressSecretBody { revision, secrets, set_at, set_by } = shown;
            let number = if secrets == 1 { "one secret" } else { "two secrets" };
            println!(
                "consumer {} has {number} for messages over HTTP, revision {revision}, set {} by \
                    {set_by}",
                of.shown(),
                set_at.format("%Y-%m-%d %H:%M:%S UTC")
            );
            Ok(())
        }
        SecretCommand::Remove(of) => {
            let removed: IngressSecretBody = api.delete(&of.path(&[SECRET])).await?;
            if as_json {
                return output::json(&removed);
            }
            println!("consumer {} takes no messages over HTTP any more", of.shown());
            Ok(())
        }
    }
}

/// Prints a change: a secret that the host made on standard output, and what it means beside it.
fn changed(change: &IngressSecretChangeBody, text: &str, as_json: bool) -> Result<()> {
    if as_json {
        return output::json(change);
    }
    if let Some(secret) = &change.secret {
        println!("{secret}");
    }
    eprintln!("{text}");
    Ok(())
}
