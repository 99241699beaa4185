//! The benchmark's consumers that are no `oncebox` host. Each is a process of its own, so that its
//! CPU can be told from that of the others; it runs until SIGTERM.

mod by_hand;
mod native;
mod order;

use anyhow::{Context, Result};
use clap::{Args, Parser};
use tokio::signal::unix::{SignalKind, signal};

/// Which consumer, and where it connects.
#[derive(Parser)]
enum Command {
    /// The inbox with a handler in Rust: what a component's sandbox costs is the difference.
    Native(native::Options),
    /// A consumer as people write it: one transaction per message, a table of processed ids.
    ByHand(by_hand::Options),
}

/// Where the servers are.
#[derive(Args)]
struct Servers {
    /// URL of the database.
    #[arg(long)]
    database: String,
    /// Brokers.
    #[arg(long)]
    brokers: String,
}

#[tokio::main]
async fn main() -> Result<()> {
    match Command::parse() {
        Command::Native(options) => native::run(options).await,
        Command::ByHand(options) => by_hand::run(options).await,
    }
}

async fn until_terminated() -> Result<()> {
    signal(SignalKind::terminate()).context("failed to listen for SIGTERM")?.recv().await;
    Ok(())
}
