//! `oncebox send`

use std::path::PathBuf;

use anyhow::Result;
use clap::Args;
use oncebox_devkit::send::{self, SendOptions};
use oncebox_server::Config;

#[derive(Args)]
pub(super) struct SendArgs {
    /// JSON objects one after another, `-` for standard input: {"id": "m-1", "event_type":
    /// "order.placed", "payload": …}
    file: PathBuf,
    /// Brokers; by default those of the configuration, else of the `oncebox dev` of this folder
    #[arg(long)]
    brokers: Option<String>,
    /// Topic; by default the one that `oncebox dev` reads, else `events`
    #[arg(long)]
    topic: Option<String>,
}

pub(super) async fn run(config: &Config, args: SendArgs, json: bool) -> Result<()> {
    let SendArgs { file, brokers, topic } = args;
    send::run(config, SendOptions { file, brokers, topic }, json).await
}
