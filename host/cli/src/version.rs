//! `oncebox version …`

mod attest;
mod diff;
mod show;

pub(crate) use show::imports;

use std::path::PathBuf;

use anyhow::Result;
use clap::{Args, Subcommand};
use oncebox_api::wire::{DeploymentBody, VersionBody, VersionDiff};
use oncebox_devkit::{
    api::{Api, path},
    output,
    slot::handler_name,
    upload::{self, Upload, short},
};

use self::diff::Live;
use super::consumer;

#[derive(Subcommand)]
pub(super) enum VersionCommand {
    /// Upload a component, or a core module that carries its component type
    Upload {
        /// The file
        file: PathBuf,
        /// The tenant
        #[arg(long)]
        tenant: String,
        /// Name of the handler; by default the file's
        #[arg(long)]
        handler: Option<String>,
        /// Do not wait until it is compiled
        #[arg(long)]
        no_wait: bool,
    },
    /// List the versions of a handler, newest first
    List {
        #[command(flatten)]
        of: HandlerArgs,
    },
    /// Show what a version is: its size, what it imports, what it was made with
    Show {
        /// The version, by the first digits of its digest
        version: String,
        #[command(flatten)]
        of: HandlerArgs,
    },
    /// Compare two versions, and the settings that they run with
    Diff {
        /// The version before
        before: String,
        /// The version after
        after: String,
        #[command(flatten)]
        of: HandlerArgs,
    },
    /// Store the outcome of `oncebox verify` with its version
    Attest(attest::AttestArgs),
}

#[derive(Args)]
pub(super) struct HandlerArgs {
    /// The tenant
    #[arg(long)]
    tenant: String,
    /// The handler
    #[arg(long)]
    handler: String,
}

impl HandlerArgs {
    fn path(&self, rest: &[&str]) -> String {
        path(&[&["tenants", &self.tenant, "handlers", &self.handler, "versions"], rest].concat())
    }
}

pub(super) async fn run(api: &Api, command: VersionCommand, json: bool) -> Result<()> {
    match command {
        VersionCommand::Upload { file, tenant, handler, no_wait } => {
            let bytes = upload::read(&file)?;
            let handler = handler.unwrap_or_else(|| handler_name(&file));
            let upload = Upload {
                tenant: &tenant,
                handler: &handler,
                name: file.display().to_string(),
                bytes,
            };
            let version =
                if no_wait { upload.send(api).await? } else { upload.until_ready(api).await? };
            print(&version, json)
        }
        VersionCommand::List { of } => {
            list(&api.get::<Vec<VersionBody>>(&of.path(&[])).await?, json)
        }
        VersionCommand::Show { version, of } => print(&api.get(&of.path(&[&version])).await?, json),
        VersionCommand::Diff { before, after, of } => {
            let diff: VersionDiff = api.get(&of.path(&[&before, "diff", &after])).await?;
            let live = live(api, &of, &diff).await?;
            if json {
                return diff::json(&diff, &live);
            }
            diff::print(&diff, &live);
            Ok(())
        }
        VersionCommand::Attest(args) => attest::run(api, &args, json).await,
    }
}

/// Returns the live deployments of either version.
async fn live(api: &Api, of: &HandlerArgs, diff: &VersionDiff) -> Result<Vec<Live>> {
    let mut live = Vec::new();
    for consumer in consumer::all(api, Some(&of.tenant)).await? {
        let path = path(&["tenants", &of.tenant, "consumers", &consumer.name, "deployments"]);
        let all: Vec<DeploymentBody> = api.get(&path).await?;
        let is_it = |d: &DeploymentBody| {
            d.handler == of.handler
                && [&diff.before.digest, &diff.after.digest].contains(&&d.digest)
        };
        let name = format!("{}/{}", of.tenant, consumer.name);
        live.extend(
            all.into_iter()
                .filter(is_it)
                .map(|deployment| Live { consumer: name.clone(), deployment }),
        );
    }
    Ok(live)
}

fn print(version: &VersionBody, json: bool) -> Result<()> {
    if json {
        return output::json(version);
    }
    show::print(version);
    Ok(())
}

fn list(versions: &[VersionBody], json: bool) -> Result<()> {
    if json {
        return output::json(&versions);
    }
    let cells = |v: &VersionBody| {
        vec![
            short(&v.digest).to_owned(),
            v.state.clone(),
            output::bytes(v.size),
            output::time(v.created_at),
            v.created_by.clone(),
        ]
    };
    output::table(
        &["VERSION", "STATE", "SIZE", "UPLOADED", "BY"],
        &versions.iter().map(cells).collect::<Vec<_>>(),
    );
    Ok(())
}
