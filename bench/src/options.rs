//! What the benchmark is asked to do.

use std::path::PathBuf;

use clap::{Parser, ValueEnum};

use crate::{load::Workload, variants::Variant};

/// The same business effect by the host, by hand and by others, on real Kafka and PostgreSQL.
#[derive(Parser)]
#[command(name = "bench.sh", about)]
pub struct Options {
    /// Variants: a, b, b1, c, c1, d, e, f, `g:<language>`. All that can run, unless named.
    #[arg(long, value_delimiter = ',')]
    pub variants: Vec<Variant>,
    /// Parts. All, unless named; with `--quick` all but the plots.
    #[arg(long, value_delimiter = ',', value_enum)]
    parts: Vec<Part>,
    /// Only this workload.
    #[arg(long, value_enum)]
    workload: Option<Workload>,
    /// Only with so many partitions: 1 or 4.
    #[arg(long, value_parser = clap::value_parser!(i32).range(1..=64))]
    partitions: Option<i32>,
    /// One round of short runs, without plots.
    #[arg(long)]
    quick: bool,
    /// A few messages by each variant: whether their effects are right, and nothing else.
    #[arg(long)]
    pub smoke: bool,
    /// Rounds; medians are shown.
    #[arg(long, value_parser = clap::value_parser!(u16).range(1..))]
    rounds: Option<u16>,
    /// Seconds that a run is to be measured for.
    #[arg(long)]
    seconds: Option<f64>,
    /// Of the neighbours that are hostile or slow, those whose name has this text.
    #[arg(long, value_name = "TEXT", default_value = "")]
    pub beside: String,
    /// Write everything that was measured into this file.
    #[arg(long)]
    pub json: Option<PathBuf>,
    /// Measure nothing; take a report that `--json` wrote.
    #[arg(long, conflicts_with = "smoke")]
    pub from: Option<PathBuf>,
    /// Bring docs/benchmark.md and its plots up to date.
    #[arg(long)]
    pub docs: bool,
    /// The folder of the programs to measure.
    #[arg(long, default_value = "target/bench/bin", hide = true)]
    pub bin: PathBuf,
    /// How they were compiled; for the report.
    #[arg(long, default_value = "dev", hide = true)]
    pub profile: String,
}

/// A part of the benchmark.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Part {
    /// Throughput and CPU of every variant.
    Throughput,
    /// The same of the component in each language that was built.
    Languages,
    /// From send to commit, at a tenth of the load.
    Latency,
    /// Pauses that swaps of the component make.
    Swaps,
    /// How long a tenant's few messages take beside another one's backlog.
    Fairness,
    /// What a tenant feels of a hostile neighbour.
    Isolation,
    /// Statements per message.
    Statements,
    /// The claim alone.
    Claims,
    /// Throughput by payload and by transaction size.
    Plots,
}

impl Options {
    /// Whether a part is wanted.
    pub fn wants(&self, part: Part) -> bool {
        if self.smoke {
            return part == Part::Throughput;
        }
        if self.parts.is_empty() {
            !(self.quick && part == Part::Plots)
        } else {
            self.parts.contains(&part)
        }
    }

    /// Workloads and numbers of partitions.
    pub fn loads(&self) -> Vec<(Workload, i32)> {
        let workloads =
            self.workload.map_or(vec![Workload::Spread, Workload::Hot], |only| vec![only]);
        let partitions = match (self.partitions, self.smoke) {
            (Some(only), _) => vec![only],
            (None, true) => vec![2],
            (None, false) => vec![1, 4],
        };
        let all = workloads
            .iter()
            .flat_map(|workload| partitions.iter().map(|partitions| (*workload, *partitions)));
        all.take(if self.smoke { 1 } else { usize::MAX }).collect()
    }

    /// Rounds.
    pub fn rounds(&self) -> usize {
        self.rounds.map_or(if self.quick || self.smoke { 1 } else { 3 }, usize::from)
    }

    /// Measured seconds of a run.
    pub fn seconds(&self) -> f64 {
        self.seconds.unwrap_or(if self.quick { 1.0 } else { 2.0 })
    }
}
