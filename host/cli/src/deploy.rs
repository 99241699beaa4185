//! `oncebox deploy`, and the parts that canaries and shadows share with it.

use std::path::PathBuf;

use anyhow::{Context, Result, ensure};
use clap::{Args, ValueEnum};
use oncebox_api::wire::{self, DeploymentBody, NewDeploymentBody, VersionBody};
use oncebox_devkit::{
    api::{Api, path},
    slot::{Slot, handler_name},
    upload::{self, Upload, short},
};
use serde_json::{Map, Value};

use super::{
    hosts::{self, WaitingFor},
    version,
};

#[derive(Args)]
pub(super) struct DeployArgs {
    #[command(flatten)]
    what: WhatArgs,
    #[command(flatten)]
    waiting: WaitingFor,
}

/// A version, and what it is to take.
#[derive(Args)]
pub(super) struct WhatArgs {
    /// The component, which is uploaded first
    #[arg(required_unless_present = "version")]
    component: Option<PathBuf>,
    /// A version that was uploaded before instead, by the first digits of its digest
    #[arg(long, value_name = "DIGEST", conflicts_with = "component")]
    version: Option<String>,
    /// Name of the handler; by default the file's, for a version that of the handler that is live
    #[arg(long)]
    handler: Option<String>,
    #[command(flatten)]
    slot: SlotArgs,
    /// A setting that the handler reads, `key=value`
    #[arg(long = "set", value_name = "KEY=VALUE", value_parser = setting)]
    settings: Vec<(String, String)>,
    /// A cap on a run that differs from the policy's, such as `deadline_ms=2000`
    #[arg(long = "limit", value_name = "KEY=NUMBER", value_parser = limit)]
    limits: Vec<(String, u64)>,
    /// Name of the migration that the tenant's schema must hold
    #[arg(long, value_name = "NAME")]
    requires_migration: Option<String>,
    /// The version that a failed message is tried again on
    #[arg(long, value_enum, default_value_t)]
    retries: RetriesArg,
    /// A right that the handler gets beyond SQL: `emit`, to send outgoing messages
    #[arg(long = "grant", value_name = "GRANT", value_enum)]
    grants: Vec<GrantArg>,
}

/// The place of a deployment.
#[derive(Debug, Clone, Args)]
pub(super) struct SlotArgs {
    /// The tenant
    #[arg(long)]
    tenant: String,
    /// The consumer
    #[arg(long)]
    consumer: String,
    /// The event type it takes; `*` takes those that no other deployment takes
    #[arg(long)]
    event_type: String,
    /// Only these versions of the event, such as `>=2, <4`
    #[arg(long, value_name = "RANGE")]
    event_versions: Option<String>,
}

/// The version that a failed message is tried again on.
#[derive(Debug, Clone, Copy, Default, ValueEnum)]
pub(super) enum RetriesArg {
    /// The one that is live by then
    #[default]
    Live,
    /// The one that failed
    Pinned,
}

/// A right that a deployment gives its handler.
#[derive(Debug, Clone, Copy, ValueEnum)]
pub(super) enum GrantArg {
    /// Send outgoing messages, to the destinations that the tenant's limits allow
    Emit,
}

impl From<GrantArg> for wire::GrantBody {
    fn from(grant: GrantArg) -> Self {
        match grant {
            GrantArg::Emit => Self::Emit,
        }
    }
}

impl From<RetriesArg> for wire::RetriesBody {
    fn from(retries: RetriesArg) -> Self {
        match retries {
            RetriesArg::Live => Self::Live,
            RetriesArg::Pinned => Self::Pinned,
        }
    }
}

impl From<SlotArgs> for Slot {
    fn from(args: SlotArgs) -> Self {
        let SlotArgs { tenant, consumer, event_type, event_versions } = args;
        Self { tenant, consumer, event_type, event_versions }
    }
}

/// Parses a setting, as it is written on the command line.
pub(super) fn setting(text: &str) -> Result<(String, String), String> {
    let (key, value) = text.split_once('=').ok_or("a setting is `key=value`")?;
    Ok((key.to_owned(), value.to_owned()))
}

fn limit(text: &str) -> Result<(String, u64), String> {
    let wrong = "a limit is `key=number`";
    let (key, value) = text.split_once('=').ok_or(wrong)?;
    Ok((key.to_owned(), value.parse().map_err(|_| wrong)?))
}

impl WhatArgs {
    /// Returns the place of the deployment.
    pub(super) fn slot(&self) -> Slot {
        self.slot.clone().into()
    }

    /// Uploads the component, if one is given. Returns the version and the deployment to make of
    /// it.
    pub(super) async fn prepare(&self, api: &Api) -> Result<(VersionBody, NewDeploymentBody)> {
        let slot = self.slot();
        let Slot { tenant, event_type, event_versions, .. } = &slot;
        // This is reported before anything is uploaded.
        ensure!(
            !event_type.is_empty(),
            "the event type is empty; use `*` for those that no other deployment takes"
        );
        let version = match (&self.component, &self.version) {
            (Some(file), _) => {
                let bytes = upload::read(file)?;
                // A misspelt name is reported before anything is uploaded.
                let _: Value = api.get(&slot.path(&[])).await?;
                let handler = self.handler.clone().unwrap_or_else(|| handler_name(file));
                if self.handler.is_some() {
                    Self::tell_of_new_handler(api, &slot, &handler).await?;
                }
                Upload { tenant, handler: &handler, name: file.display().to_string(), bytes }
                    .until_ready(api)
                    .await?
            }
            (None, digest) => {
                let handler = match &self.handler {
                    Some(handler) => handler.clone(),
                    None => {
                        slot.live(api, "stable")
                            .await?
                            .context("nothing is live there; `--handler` says whose version it is")?
                            .handler
                    }
                };
                upload::find(api, tenant, &handler, digest.as_deref().unwrap_or_default()).await?
            }
        };
        let new = NewDeploymentBody {
            event_type: event_type.clone(),
            event_versions: event_versions.clone(),
            handler: version.handler.clone(),
            version: version.digest.clone(),
            settings: self
                .settings
                .iter()
                .map(|(key, value)| (key.clone(), value.clone().into()))
                .collect(),
            limits: self
                .limits
                .iter()
                .map(|(key, value)| (key.clone(), (*value).into()))
                .collect::<Map<_, _>>(),
            requires_migration: self.requires_migration.clone(),
            retries: self.retries.into(),
            grants: self.grants.iter().map(|grant| (*grant).into()).collect(),
        };
        Ok((version, new))
    }

    /// Warns of a name that makes a new handler where another one is live: it may be misspelt.
    async fn tell_of_new_handler(api: &Api, slot: &Slot, handler: &str) -> Result<()> {
        let handlers: Vec<wire::HandlerBody> =
            api.get(&path(&["tenants", &slot.tenant, "handlers"])).await?;
        if handlers.iter().any(|known| known.name == handler) {
            return Ok(());
        }
        if let Some(live) = slot.live(api, "stable").await? {
            let of = slot.shown();
            eprintln!(
                "note: handler `{handler}` is new; `{}` is live for {of}; `--handler {}` makes it \
                    a version of that",
                live.handler, live.handler
            );
        }
        Ok(())
    }
}

pub(super) async fn run(api: &Api, args: DeployArgs, json: bool) -> Result<()> {
    let slot = args.what.slot();
    let (version, new) = args.what.prepare(api).await?;
    let deployed: DeploymentBody = api.post(&slot.path(&["deployments"]), &new).await?;
    if !json {
        println!(
            "handler `{}`, version {}, takes {}",
            deployed.handler,
            short(&deployed.digest),
            slot.shown()
        );
        println!("imports: {}", version::imports(&version));
        if !deployed.grants.is_empty() {
            println!("grants: {}", deployed.grants.join(", "));
        }
    }
    hosts::report(api, &slot, deployed, &args.waiting, json).await
}
