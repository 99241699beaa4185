//! `oncebox dev`

use std::path::PathBuf;

use anyhow::Result;
use clap::Args;
use oncebox_devkit::dev::{self, DevOptions, running};
use oncebox_server::Config;

#[derive(Args)]
pub(super) struct DevArgs {
    /// Components to deploy, each as `event.type=file.wasm`, or `file.wasm` for every event type. A
    /// file that changes is deployed again
    components: Vec<String>,
    /// Folder of components, each named for its event type: `event.type.wasm`. What changes or
    /// comes is deployed
    #[arg(long, value_name = "DIR")]
    watch: Option<PathBuf>,
    /// Folder for the database and the keys
    #[arg(long, default_value = running::DIR)]
    dir: PathBuf,
    /// SQL files with the handlers' tables, each applied once
    #[arg(long)]
    schema: Vec<PathBuf>,
    /// Topic to read; by default the one that was read before, else `events`
    #[arg(long)]
    topic: Option<String>,
    /// A running PostgreSQL instead of a private one
    #[arg(long)]
    database_url: Option<String>,
    /// Running brokers instead of the embedded one
    #[arg(long)]
    brokers: Option<String>,
}

pub(super) async fn run(config: Config, args: DevArgs) -> Result<()> {
    let DevArgs { components, watch, dir, schema, topic, database_url, brokers } = args;
    let options = DevOptions { components, watch, dir, schema, topic, database_url, brokers };
    dev::run(config, options).await
}
