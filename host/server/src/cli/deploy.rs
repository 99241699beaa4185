//! `oncebox deploy`

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use clap::Args;
use oncebox_inbox::NewDeployment;
use oncebox_runtime::{Runtime, RuntimeConfig};
use serde_json::Value;

use super::{output, ready};
use crate::config::Config;

#[derive(Args)]
pub(super) struct DeployArgs {
    /// The component
    component: PathBuf,
    /// The tenant
    #[arg(long)]
    tenant: String,
    /// The consumer
    #[arg(long)]
    consumer: String,
    /// The event type it takes; `*` takes those that no other deployment takes
    #[arg(long)]
    event_type: String,
    /// Name of the handler; by default the file's
    #[arg(long)]
    handler: Option<String>,
    /// A setting that the handler reads, `key=value`
    #[arg(long = "set", value_name = "KEY=VALUE", value_parser = setting)]
    settings: Vec<(String, String)>,
}

/// The name of a handler that is given none: its file's.
pub(crate) fn handler_name(component: &Path) -> String {
    component.file_stem().map(|stem| stem.to_string_lossy().to_lowercase().replace('_', "-")).unwrap_or_default()
}

/// A setting as it is written on the command line.
pub(super) fn setting(text: &str) -> Result<(String, String), String> {
    let (key, value) = text.split_once('=').ok_or("a setting is `key=value`")?;
    Ok((key.to_owned(), value.to_owned()))
}

pub(super) async fn run(config: &Config, args: DeployArgs, json: bool) -> Result<()> {
    let path = args.component.display();
    let bytes = std::fs::read(&args.component).with_context(|| format!("failed to read the component `{path}`"))?;
    let size_max = config.runtime.component_bytes_max;
    ensure!(bytes.len() <= size_max, "`{path}` has {} bytes; `runtime.component_bytes_max` allows {size_max}", bytes.len());
    let admin = ready(config).await?;
    let runtime =
        Runtime::new(RuntimeConfig { instances_max: 1, cache_dir: config.runtime.cache_dir.clone(), ..RuntimeConfig::default() })?;
    let loaded = runtime.load(&bytes).await.with_context(|| format!("`{path}` cannot be deployed"))?;
    let handler = match args.handler {
        Some(name) => name,
        None => handler_name(&args.component),
    };
    let settings = args.settings.into_iter().map(|(key, value)| (key, Value::String(value))).collect();
    let deployment = NewDeployment { settings, ..NewDeployment::stable(&args.event_type, &handler, "") };
    let deployment = admin.deploy_compiled(&args.tenant, &args.consumer, deployment, &bytes).await?;
    if json {
        return output::json(&deployment);
    }
    println!(
        "handler `{handler}`, version {}, takes `{}` of `{}/{}`",
        &hex::encode(loaded.digest())[..12],
        args.event_type,
        args.tenant,
        args.consumer
    );
    println!("imports: {}", if loaded.imports().is_empty() { "nothing".to_owned() } else { loaded.imports().join(", ") });
    Ok(())
}
