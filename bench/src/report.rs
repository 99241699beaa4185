//! What was measured, as data.

use serde::{Deserialize, Serialize};

use crate::{
    claims::ClaimCost, fairness::Pair, isolation::Isolation, latency::Latency, load::Workload,
    measure::Cpu, run::Figures, statements::Statements, swaps::Gaps, sweep::Point,
    variants::Variant,
};

/// Everything one call of the benchmark found.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Report {
    /// The machine and the programs.
    pub environment: Environment,
    /// Throughput and CPU.
    pub throughput: Vec<Cell>,
    /// The same of the component in each language.
    pub languages: Vec<Cell>,
    /// From send to commit, at a tenth of the load.
    pub latency: Vec<Latency>,
    /// Pauses with and without swaps.
    #[serde(default)]
    pub gaps: Vec<Gaps>,
    /// A tenant alone and beside another one's backlog.
    #[serde(default)]
    pub fairness: Vec<Pair>,
    /// What a tenant feels of a hostile neighbour.
    #[serde(default)]
    pub isolation: Vec<Isolation>,
    /// What the database is sent.
    pub statements: Vec<Statements>,
    /// What a claim costs the database.
    pub claims: Vec<ClaimCost>,
    /// Throughput by the size of the payload.
    pub payloads: Vec<Point>,
    /// Throughput by the size of a transaction.
    pub batches: Vec<Point>,
}

/// Where it was measured.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Environment {
    /// The processor's name.
    pub processor: String,
    /// Cores, shared by everything.
    pub cores: usize,
    /// Version of PostgreSQL.
    pub postgres: String,
    /// How the measured programs were compiled.
    pub profile: String,
    /// Runs of each cell.
    pub rounds: usize,
    /// Seconds that a run is measured for, about.
    pub seconds: f64,
}

/// All runs of one variant with one load.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Cell {
    /// The variant.
    pub variant: Variant,
    /// What it is.
    pub title: String,
    /// Which rows.
    pub workload: Workload,
    /// Partitions.
    pub partitions: i32,
    /// Its runs, one each round.
    pub runs: Vec<Figures>,
}

/// Median, least and greatest.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Spread {
    /// Median.
    pub median: f64,
    /// Least.
    pub min: f64,
    /// Greatest.
    pub max: f64,
}

impl Spread {
    /// Of some values; none of none.
    pub fn of(values: impl IntoIterator<Item = f64>) -> Option<Self> {
        let mut values: Vec<_> = values.into_iter().collect();
        values.sort_by(f64::total_cmp);
        let (min, max) = (*values.first()?, *values.last()?);
        let (low, high) = ((values.len() - 1) / 2, values.len() / 2);
        Some(Self { median: (values[low] + values[high]) / 2.0, min, max })
    }
}

/// Something that a run showed.
pub type Measure = fn(&Figures) -> f64;

/// Messages a second.
pub const RATE: Measure = |run| run.rate;
/// CPU of the measured process per message.
pub const CONSUMER: Measure = |run| run.cpu.consumer;
/// CPU of the database per message.
pub const DATABASE: Measure = |run| run.cpu.database;

impl Cell {
    /// What all its runs showed.
    pub fn spread(&self, measure: Measure) -> Option<Spread> {
        Spread::of(self.runs.iter().map(measure))
    }

    /// The same as a multiple of another cell's, round by round: what disturbs one run of a round
    /// often disturbs the other.
    pub fn ratio(&self, to: &Self, measure: Measure) -> Option<Spread> {
        Spread::of(self.runs.iter().zip(&to.runs).map(|(run, other)| measure(run) / measure(other)))
    }

    /// Median CPU per message of each party.
    pub fn cpu(&self) -> Option<Cpu> {
        let median = |measure: Measure| self.spread(measure).map(|spread| spread.median);
        Some(Cpu {
            consumer: median(CONSUMER)?,
            database: median(DATABASE)?,
            broker: median(|run| run.cpu.broker)?,
        })
    }

    /// Longest time in which nothing was committed, in any run.
    pub fn longest_gap_ms(&self) -> f64 {
        self.runs.iter().map(|run| run.longest_gap_ms).fold(0.0, f64::max)
    }
}

impl Report {
    /// The cell of a variant.
    pub fn cell(&self, variant: &Variant, workload: Workload, partitions: i32) -> Option<&Cell> {
        self.throughput.iter().find(|cell| {
            cell.variant == *variant && cell.workload == workload && cell.partitions == partitions
        })
    }

    /// The loads there are, in order.
    pub fn loads(&self) -> Vec<(Workload, i32)> {
        let mut loads: Vec<_> =
            self.throughput.iter().map(|cell| (cell.workload, cell.partitions)).collect();
        loads.sort();
        loads.dedup();
        loads
    }

    /// The variants there are, in the order they were asked for.
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
    fn a_median_of_an_even_number_is_between_the_middle_two() {
        let spread = Spread::of([4.0, 1.0, 3.0, 2.0]).expect("values");
        assert_eq!(spread, Spread { median: 2.5, min: 1.0, max: 4.0 });
        assert_eq!(Spread::of([7.0]).map(|spread| spread.median), Some(7.0));
        assert_eq!(Spread::of([]), None);
    }
}
