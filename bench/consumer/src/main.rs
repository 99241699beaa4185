//! The benchmark's consumers that are no `oncebox` host. Each is a process of its own, so that its
//! CPU is measured apart from that of the others. It runs until SIGTERM.

mod by_hand;
mod native;
mod order;
mod outbox;

use anyhow::{Context, Result};
use clap::{Args, Parser};
use tokio::signal::unix::{SignalKind, signal};

/// The consumer to run, with its connections.
#[derive(Parser)]
enum Command {
    /// The inbox with a handler in Rust: the difference to a component is the cost of its sandbox.
    Native(native::NativeOptions),
    /// A consumer written by hand: one transaction per message, a table of processed ids.
    ByHand(by_hand::ByHandOptions),
}

/// Addresses of the servers.
#[derive(Args)]
struct Servers {
    /// URL of the database.
    #[arg(long)]
    database: String,
    /// Addresses of the brokers.
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
