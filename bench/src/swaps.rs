//! The gap that a swap makes in processing. The component and a copy of it with other bytes take
//! turns under a steady load. The database records when each message was committed. A second run
//! makes no swaps; its gaps are taken at the moments at which the swaps would have been.

use std::time::Duration;

use anyhow::{Context, Result};
use oncebox_control::Control;
use serde::{Deserialize, Serialize};
use tokio::time::sleep;

use crate::{
    latency::{WARM_UP, send_steadily, until_committed},
    load::{Load, Workload},
    measure::now_us,
    run::{Bench, Job, Started, check, finish},
    servers::Database,
    throughput::PAYLOAD_BYTES,
    variants::{
        Batch, Variant,
        host::{control, deploy},
    },
};

/// Swaps of a run.
const SWAPS: usize = 50;
/// Time from one swap to the next. Gaps in this time after a swap count as its gaps.
const PERIOD: Duration = Duration::from_millis(200);
/// Load, messages a second.
const RATE: f64 = 800.0;

/// Pauses of partitions in the moments after swaps, or at the moments of swaps that were left out.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Gaps {
    /// Whether the run made swaps.
    pub swaps: bool,
    /// Number of pairs of a moment and a partition that were measured.
    pub looks: usize,
    /// Median pause, milliseconds.
    pub p50_ms: f64,
    /// 99th percentile of the pauses, milliseconds.
    pub p99_ms: f64,
    /// Longest pause, milliseconds.
    pub max_ms: f64,
}

/// Measures a run without swaps and one with them.
pub async fn measure(bench: &mut Bench, partitions: i32) -> Result<Vec<Gaps>> {
    let mut gaps = Vec::new();
    for swaps in [false, true] {
        gaps.push(
            run(bench, partitions, swaps).await.with_context(|| format!("gaps, swaps: {swaps}"))?,
        );
    }
    Ok(gaps)
}

async fn run(bench: &mut Bench, partitions: i32, swaps: bool) -> Result<Gaps> {
    let messages = (RATE * (SWAPS + 10) as f64 * PERIOD.as_secs_f64()) as usize;
    let load =
        Load { workload: Workload::Spread, partitions, messages, payload_bytes: PAYLOAD_BYTES };
    let job =
        Job { variant: Variant::Component, load, batch: Batch::DEFAULT, log_statements: false };
    let topic = bench.topics.empty(partitions).await?;
    let started = bench.start(&job, &topic).await?;
    let worked = tokio::try_join!(
        send_steadily(bench, &job, &started, &topic, RATE),
        swap(bench, &started, swaps)
    );
    let (moments, worked) = match worked {
        Ok(((), moments)) => (moments, Ok(())),
        Err(error) => (Vec::new(), Err(error)),
    };
    let (database, _) = finish(started, worked)?;
    check(&job, &database).await?;
    let gaps = gaps(&database, &moments).await?;
    bench.servers.drop_database(database).await?;
    let at = |share: f64| gaps[((gaps.len() - 1) as f64 * share).round() as usize];
    Ok(Gaps { swaps, looks: gaps.len(), p50_ms: at(0.5), p99_ms: at(0.99), max_ms: at(1.0) })
}

/// Deploys the component and its copy in turn, or only waits where `swaps` is false. Returns the
/// moments, microseconds of the clock that the database reads too.
async fn swap(bench: &Bench, started: &Started, swaps: bool) -> Result<Vec<f64>> {
    let control: Control = control(&bench.servers, &started.database)?;
    let component = std::fs::read(bench.programs.component(&Variant::Component))
        .context("failed to read the component")?;
    let copy = with_section(&component);
    until_committed(&started.database, WARM_UP as i64).await?;
    sleep(PERIOD * 5).await;
    let mut moments = Vec::new();
    for number in 0..SWAPS {
        moments.push(now_us());
        if swaps {
            deploy(&control, &bench.servers, if number % 2 == 0 { &copy } else { &component })
                .await?;
        }
        sleep(PERIOD).await;
    }
    Ok(moments)
}

/// Returns the component with one more custom section: another version with identical behaviour.
fn with_section(component: &[u8]) -> Vec<u8> {
    const SECTION: &[u8] = b"\x00\x05\x04swap";
    [component, SECTION].concat()
}

/// Returns, for each moment and partition, the longest time between two commits that a swap at that
/// moment could have caused. Sorted, milliseconds.
async fn gaps(database: &Database, moments: &[f64]) -> Result<Vec<f64>> {
    let commits = database.commits_by_partition().await?;
    let mut gaps: Vec<f64> = Vec::new();
    for of_partition in commits.chunk_by(|one, other| one.0 == other.0) {
        for moment in moments {
            let until = moment + PERIOD.as_secs_f64() * 1e6;
            let overlapping =
                of_partition.windows(2).filter(|pair| pair[1].1 > *moment && pair[0].1 < until);
            gaps.extend(overlapping.map(|pair| (pair[1].1 - pair[0].1) / 1e3).reduce(f64::max));
        }
    }
    gaps.sort_by(f64::total_cmp);
    anyhow::ensure!(!gaps.is_empty(), "nothing was committed around the swaps");
    Ok(gaps)
}

#[cfg(test)]
mod tests {
    use super::with_section;

    #[test]
    fn a_copy_is_another_version_of_the_same_component() {
        let copy = with_section(b"\0asm");
        assert_eq!(copy, b"\0asm\x00\x05\x04swap");
    }
}
