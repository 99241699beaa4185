//! Statements that the database receives per message, counted in its log. Each is a round trip.

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};

use crate::{
    load::{Load, Workload},
    run::{Bench, Job},
    throughput::PAYLOAD_BYTES,
    variants::{Batch, Variant},
};

/// Messages of a run, enough that statements at the start do not show in the figure.
const MESSAGES: usize = 2_000;

/// Statements of one variant.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Statements {
    /// The variant.
    pub variant: Variant,
    /// Statements per message, those of the handler among them.
    pub per_message: f64,
}

/// Runs a variant with the server's log of statements on. Measures no times.
pub async fn count(bench: &mut Bench, variant: &Variant) -> Result<Statements> {
    let load = Load {
        workload: Workload::Spread,
        partitions: 1,
        messages: MESSAGES,
        payload_bytes: PAYLOAD_BYTES,
    };
    let before = logged(bench)?;
    bench
        .run(&Job { variant: variant.clone(), load, batch: Batch::DEFAULT, log_statements: true })
        .await?;
    let count = logged(bench)? - before;
    // pgbench sends each message once, the others get one in twenty again.
    Ok(Statements { variant: variant.clone(), per_message: count as f64 / MESSAGES as f64 })
}

fn logged(bench: &Bench) -> Result<usize> {
    let path = bench.servers.database_log();
    let log = std::fs::read_to_string(&path)
        .with_context(|| format!("failed to read `{}`", path.display()))?;
    Ok(log
        .lines()
        .filter(|line| line.contains("LOG:  statement: ") || line.contains("LOG:  execute "))
        .count())
}
