//! Everything that was measured, as data.

use serde::{Deserialize, Serialize};

use crate::{
    claims::ClaimCost, fairness::FairnessPair, history::History, hosts::Hosts,
    isolation::Isolation, latency::Latency, load::Workload, measure::Cpu, network::Distance,
    outgoing::Outgoing, pages::Pages, removal::figures::RemovalRound, run::Figures, soak::Soak,
    statements::Statements, swaps::Gaps, sweep::Point, variants::Variant,
};

/// Everything that one call of the benchmark measured.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Report {
    /// The machine and the programs.
    pub environment: Environment,
    /// Throughput and CPU of every variant.
    pub throughput: Vec<Cell>,
    /// Throughput and CPU of the component in each language.
    pub languages: Vec<Cell>,
    /// Time from send to commit, at a tenth of the load.
    pub latency: Vec<Latency>,
    /// Pauses with and without swaps.
    #[serde(default)]
    pub gaps: Vec<Gaps>,
    /// Latency of a tenant alone and beside another tenant's backlog.
    #[serde(default)]
    pub fairness: Vec<FairnessPair>,
    /// Figures of a tenant beside a hostile neighbour.
    #[serde(default)]
    pub isolation: Vec<Isolation>,
    /// Statements that the database receives.
    pub statements: Vec<Statements>,
    /// Cost of a claim in the database.
    pub claims: Vec<ClaimCost>,
    /// Throughput where the database is away.
    #[serde(default)]
    pub network: Vec<Distance>,
    /// Throughput by the size of the payload.
    pub payloads: Vec<Point>,
    /// Throughput by the size of a transaction.
    pub batches: Vec<Point>,
    /// Throughput and claims beside a history.
    #[serde(default)]
    pub history: Option<History>,
    /// Latency around the removal of a time partition, one a round.
    #[serde(default)]
    pub removal: Vec<RemovalRound>,
    /// Outgoing messages.
    #[serde(default)]
    pub outgoing: Option<Outgoing>,
    /// Several hosts.
    #[serde(default)]
    pub hosts: Option<Hosts>,
    /// Pages of the console beside a history.
    #[serde(default)]
    pub pages: Option<Pages>,
    /// A load that lasts.
    #[serde(default)]
    pub soak: Option<Soak>,
}

/// The machine and the programs of a measurement.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Environment {
    /// The processor's name.
    pub processor: String,
    /// Cores, shared by everything.
    pub cores: usize,
    /// Version of PostgreSQL.
    pub postgres: String,
    /// Cargo profile of the measured programs.
    pub profile: String,
    /// Runs of each cell.
    pub rounds: usize,
    /// Measured seconds of a run, about.
    pub seconds: f64,
}

/// All runs of one variant with one load.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Cell {
    /// The variant.
    pub variant: Variant,
    /// Title of the variant.
    pub title: String,
    /// Rows that the messages meet at.
    pub workload: Workload,
    /// Partitions.
    pub partitions: i32,
    /// Runs, one a round.
    pub runs: Vec<Figures>,
}

/// Median, least and greatest.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Spread {
    /// Median.
    pub median: f64,
    /// Least.
    pub min: f64,
    /// Greatest.
    pub max: f64,
}

impl Spread {
    /// Returns the spread of some values; `None` where there are none.
    pub fn of(values: impl IntoIterator<Item = f64>) -> Option<Self> {
        let mut values: Vec<_> = values.into_iter().collect();
        values.sort_by(f64::total_cmp);
        let (min, max) = (*values.first()?, *values.last()?);
        let (low, high) = ((values.len() - 1) / 2, values.len() / 2);
        Some(Self { median: (values[low] + values[high]) / 2.0, min, max })
    }
}

/// A figure of a run.
pub type Measure = fn(&Figures) -> f64;

/// Messages a second.
pub const RATE: Measure = |run| run.rate;
/// CPU of the measured process per message, microseconds.
pub const CONSUMER: Measure = |run| run.cpu.consumer;
/// CPU of the database per message, microseconds.
pub const DATABASE: Measure = |run| run.cpu.database;

/// Bytes of the inbox per completed message; not a number without an inbox.
pub const INBOX_BYTES: Measure = |run| run.inbox_bytes.unwrap_or(f64::NAN);

impl Cell {
    /// Returns the spread of a figure over all runs.
    pub fn spread(&self, measure: Measure) -> Option<Spread> {
        Spread::of(self.runs.iter().map(measure))
    }

    /// Returns the spread of a figure as a multiple of another cell's, round by round. A
    /// disturbance of one run of a round often disturbs the other too.
    pub fn ratio(&self, to: &Self, measure: Measure) -> Option<Spread> {
        Spread::of(self.runs.iter().zip(&to.runs).map(|(run, other)| measure(run) / measure(other)))
    }

    /// Returns the median CPU per message of each party.
    pub fn cpu(&self) -> Option<Cpu> {
        let median = |measure: Measure| self.spread(measure).map(|spread| spread.median);
        Some(Cpu {
            consumer: median(CONSUMER)?,
            database: median(DATABASE)?,
            broker: median(|run| run.cpu.broker)?,
        })
    }

    /// Returns the longest time without a commit in any run, milliseconds.
    pub fn longest_gap_ms(&self) -> f64 {
        self.runs.iter().map(|run| run.longest_gap_ms).fold(0.0, f64::max)
    }
}

impl Report {
    /// Returns a report without figures.
    pub fn new(environment: Environment) -> Self {
        Self {
            environment,
            throughput: Vec::new(),
            languages: Vec::new(),
            latency: Vec::new(),
            gaps: Vec::new(),
            fairness: Vec::new(),
            isolation: Vec::new(),
            statements: Vec::new(),
            claims: Vec::new(),
            network: Vec::new(),
            payloads: Vec::new(),
            batches: Vec::new(),
            history: None,
            removal: Vec::new(),
            outgoing: None,
            hosts: None,
            pages: None,
            soak: None,
        }
    }

    /// Returns the cell of a variant with a load.
    pub fn cell(&self, variant: &Variant, workload: Workload, partitions: i32) -> Option<&Cell> {
        self.throughput.iter().find(|cell| {
            cell.variant == *variant && cell.workload == workload && cell.partitions == partitions
        })
    }

    /// Returns the cells of the host as it is by default and of a variant of it, at the load of the
    /// latter.
    pub fn beside(&self, variant: &Variant) -> Option<(&Cell, &Cell)> {
        let other = self.throughput.iter().find(|cell| cell.variant == *variant)?;
        let default = self.cell(&Variant::Component, other.workload, other.partitions)?;
        Some((default, other))
    }

    /// Returns the measured loads, sorted.
    pub fn loads(&self) -> Vec<(Workload, i32)> {
        let mut loads: Vec<_> =
            self.throughput.iter().map(|cell| (cell.workload, cell.partitions)).collect();
        loads.sort();
        loads.dedup();
        loads
    }

    /// Returns the measured variants, in the order of their first run.
    pub fn variants(&self) -> Vec<Variant> {
        let mut variants: Vec<Variant> = Vec::new();
        for cell in &self.throughput {
            if !variants.contains(&cell.variant) {
                variants.push(cell.variant.clone());
            }
        }
        variants
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_report_of_before_the_lasting_parts_is_read() {
        let environment = Environment {
            processor: "p".to_owned(),
            cores: 2,
            postgres: "15".to_owned(),
            profile: "measure".to_owned(),
            rounds: 1,
            seconds: 1.0,
        };
        let mut json = serde_json::to_value(Report::new(environment)).expect("JSON");
        for part in ["history", "removal", "outgoing", "pages", "soak"] {
            let fields = json.as_object_mut().expect("an object");
            assert!(fields.remove(part).is_some(), "{part}");
        }
        let report: Report = serde_json::from_value(json).expect("a report");
        assert!(report.history.is_none() && report.removal.is_empty() && report.soak.is_none());
        assert!(report.outgoing.is_none() && report.pages.is_none());
    }

    #[test]
    fn a_median_of_an_even_number_is_between_the_middle_two() {
        let spread = Spread::of([4.0, 1.0, 3.0, 2.0]).expect("values");
        assert_eq!(spread, Spread { median: 2.5, min: 1.0, max: 4.0 });
        assert_eq!(Spread::of([7.0]).map(|spread| spread.median), Some(7.0));
        assert_eq!(Spread::of([]), None);
    }
}
