//! The benchmark's command line.

use std::path::PathBuf;

use clap::{Parser, ValueEnum};

use crate::{history, load::Workload, outgoing, pages, soak, variants::Variant};

/// The options of the benchmark: one business effect by the host, by hand and by others, on real
/// Kafka and PostgreSQL.
#[derive(Parser)]
#[command(name = "bench.sh", about)]
pub struct Options {
    /// Variants: a, b, b1, c, c1, c2, c3, d, d64, e, f, `g:<language>`. By default all that can run.
    #[arg(long, value_delimiter = ',')]
    pub variants: Vec<Variant>,
    /// Parts. By default all but `history`, `removal`, `outgoing`, `hosts`, `pages` and `soak`, which take long; with
    /// `--quick` without the plots.
    #[arg(long, value_delimiter = ',', value_enum)]
    parts: Vec<Part>,
    /// Only this workload.
    #[arg(long, value_enum)]
    workload: Option<Workload>,
    /// Only this number of partitions. By default 1 and 4.
    #[arg(long, value_parser = clap::value_parser!(i32).range(1..=64))]
    partitions: Option<i32>,
    /// One round of short runs, without plots.
    #[arg(long)]
    quick: bool,
    /// Check the effects of a few messages by each variant, and measure nothing. Of the named parts
    /// only `outgoing` runs too.
    #[arg(long)]
    pub smoke: bool,
    /// Rounds. Tables show the median.
    #[arg(long, value_parser = clap::value_parser!(u16).range(1..))]
    rounds: Option<u16>,
    /// Measured seconds of a run, about.
    #[arg(long)]
    seconds: Option<f64>,
    /// `history`: numbers of messages in the inbox. By default 0, 1, 10 and 50 million.
    #[arg(long, value_name = "ROWS", value_delimiter = ',')]
    history: Vec<u64>,
    /// `removal`: messages of the removed partition.
    #[arg(long, value_name = "ROWS", default_value_t = 20_000_000)]
    pub removal_rows: u64,
    /// `outgoing`: messages that are due later, at the rate of a million in one minute.
    #[arg(long, value_name = "MESSAGES", default_value_t = outgoing::TIMERS)]
    pub timers: u64,
    /// `pages`: messages of the history.
    #[arg(long, value_name = "ROWS", default_value_t = pages::ROWS)]
    pub pages_rows: u64,
    /// `pages`: tenants beside it.
    #[arg(long, value_name = "TENANTS", default_value_t = pages::TENANTS)]
    pub tenants: usize,
    /// `soak`: duration of the load, minutes.
    #[arg(long, default_value_t = soak::MINUTES)]
    pub minutes: f64,
    /// Only the hostile or slow neighbours whose name contains this text.
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
    /// The profile that compiled them, for the report.
    #[arg(long, default_value = "measure", hide = true)]
    pub profile: String,
}

/// A part of the benchmark.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Part {
    /// Throughput and CPU of every variant.
    Throughput,
    /// Throughput and CPU of the component in each language that was built.
    Languages,
    /// Time from send to commit, at a tenth of the load.
    Latency,
    /// Pauses that swaps of the component cause.
    Swaps,
    /// Latency of a tenant's few messages beside another tenant's backlog.
    Fairness,
    /// Throughput and latency of a tenant beside a hostile neighbour.
    Isolation,
    /// Statements per message.
    Statements,
    /// Cost of the claim alone.
    Claims,
    /// Throughput where the database is 0.5 and 2 ms away.
    Network,
    /// Throughput by payload and by transaction size.
    Plots,
    /// Throughput and claims beside up to 50 million messages in the inbox.
    History,
    /// Latency while a large time partition is removed.
    Removal,
    /// Throughput, delay and timers of what handlers emit, beside an outbox written by hand.
    Outgoing,
    /// Throughput of several hosts, and pauses while hosts leave and come.
    Hosts,
    /// Time of each page of the console beside 10 million messages and 500 tenants.
    Pages,
    /// Half an hour of load under a retention of minutes.
    Soak,
}

impl Part {
    /// Returns whether the part takes long and much of the disk, so that it runs only where it is
    /// named.
    fn is_lasting(self) -> bool {
        matches!(
            self,
            Self::History | Self::Removal | Self::Outgoing | Self::Hosts | Self::Pages | Self::Soak
        )
    }
}

impl Options {
    /// Returns whether a part is wanted.
    pub fn wants(&self, part: Part) -> bool {
        if self.smoke {
            let is_named = part == Part::Outgoing && self.parts.contains(&part);
            return part == Part::Throughput || is_named;
        }
        if self.parts.is_empty() {
            !(part.is_lasting() || self.quick && part == Part::Plots)
        } else {
            self.parts.contains(&part)
        }
    }

    /// Returns the workloads, each with each number of partitions.
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

    /// Returns the names of the wanted parts that last.
    pub fn lasting(&self) -> Vec<&'static str> {
        let all = [
            (Part::History, "history"),
            (Part::Removal, "removal"),
            (Part::Outgoing, "outgoing"),
            (Part::Hosts, "hosts"),
            (Part::Pages, "pages"),
            (Part::Soak, "soak"),
        ];
        all.into_iter().filter(|(part, _)| self.wants(*part)).map(|(_, name)| name).collect()
    }

    /// Returns the numbers of messages in the inbox for the part `history`, in ascending order.
    pub fn history(&self) -> Vec<u64> {
        let mut sizes = self.history.clone();
        if sizes.is_empty() {
            sizes.extend(history::SIZES);
        }
        sizes.sort_unstable();
        sizes.dedup();
        sizes
    }

    /// Returns the number of rounds.
    pub fn rounds(&self) -> usize {
        self.rounds.map_or(if self.quick || self.smoke { 1 } else { 3 }, usize::from)
    }

    /// Returns the seconds that a run is measured for, about.
    pub fn seconds(&self) -> f64 {
        self.seconds.unwrap_or(if self.quick { 1.0 } else { 2.0 })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_lasts_runs_only_where_it_is_named() {
        let parse = |arguments: &[&str]| {
            let all = [["bench.sh"].as_slice(), arguments].concat();
            Options::try_parse_from(all).expect("options")
        };
        let lasting =
            [Part::History, Part::Removal, Part::Outgoing, Part::Hosts, Part::Pages, Part::Soak];
        assert!(!lasting.iter().any(|part| parse(&[]).wants(*part)));
        assert!(parse(&[]).wants(Part::Plots) && !parse(&["--quick"]).wants(Part::Plots));
        let named = parse(&["--parts", "history,soak", "--history", "1000,0,1000"]);
        assert_eq!(lasting.map(|part| named.wants(part)), [true, false, false, false, false, true]);
        assert_eq!(named.lasting(), ["history", "soak"]);
        assert_eq!(named.history(), [0, 1_000]);
        assert!(!parse(&["--smoke"]).wants(Part::Outgoing));
        let smoke = parse(&["--smoke", "--parts", "throughput,outgoing,soak"]);
        assert_eq!(
            lasting.map(|part| smoke.wants(part)),
            [false, false, true, false, false, false]
        );
        assert_eq!(parse(&[]).history(), history::SIZES);
    }
}
