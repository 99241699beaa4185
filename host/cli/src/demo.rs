//! `oncebox demo`

use std::path::PathBuf;

use anyhow::Result;
use clap::Args;
use oncebox_devkit::demo::{self, DemoOptions, DemoSource};

#[derive(Args)]
pub(super) struct DemoArgs {
    /// Distinct events
    #[arg(long, default_value_t = demo::EVENTS_DEFAULT)]
    events: usize,
    /// Times the host is killed while a transaction is open
    #[arg(long, default_value_t = 6)]
    kills: usize,
    /// Seed of the order, the duplicates and the malformed records
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Folder for the database and the logs; emptied first
    #[arg(long, default_value = ".oncebox/demo")]
    dir: PathBuf,
    /// A running PostgreSQL with an empty database instead of a private one
    #[arg(long)]
    database_url: Option<String>,
    /// Running brokers instead of the embedded one, with the topics `github.acme`,
    /// `github.acme.comments`, `github.globex` and `github.globex.comments`
    #[arg(long)]
    brokers: Option<String>,
    /// Way in which webhooks come: `kafka`, or `http` for every other delivery over HTTP, signed as
    /// GitHub signs, and the rest by Kafka
    #[arg(long, default_value = "kafka", value_parser = ["kafka", "http"])]
    source: String,
}

pub(super) async fn run(args: DemoArgs, json: bool) -> Result<()> {
    let DemoArgs { events, kills, seed, dir, database_url, brokers, source } = args;
    let source = if source == "http" { DemoSource::Http } else { DemoSource::Kafka };
    demo::run(DemoOptions { events, kills, seed, dir, database_url, brokers, source }, json).await
}
