//! What was measured, as data and as tables.

use std::{collections::BTreeMap, fmt::Write as _};

use serde::{Deserialize, Serialize};

use crate::{load::Workload, measure::Cpu, run::Figures, variants::Variant};

/// Everything one call of the benchmark found.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Report {
    /// The machine and the programs.
    pub environment: Environment,
    /// Throughput and CPU.
    pub throughput: Vec<Cell>,
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
    /// How our programs were compiled.
    pub profile: String,
    /// Runs of each cell.
    pub rounds: usize,
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
    /// Its runs, in the order they were made.
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
        let middle = |index: usize| values.get(index).copied();
        let median = match values.len() {
            0 => return None,
            even if even % 2 == 0 => (middle(even / 2 - 1)? + middle(even / 2)?) / 2.0,
            odd => middle(odd / 2)?,
        };
        Some(Self { median, min: *values.first()?, max: *values.last()? })
    }
}

impl Cell {
    /// Messages a second.
    pub fn rate(&self) -> Option<Spread> {
        Spread::of(self.runs.iter().map(|run| run.rate))
    }

    /// Longest time in which nothing was committed, in any run.
    pub fn longest_gap_ms(&self) -> f64 {
        self.runs.iter().map(|run| run.longest_gap_ms).fold(0.0, f64::max)
    }

    /// Median CPU per message of each party.
    pub fn cpu(&self) -> Option<Cpu> {
        let median = |part: fn(&Cpu) -> f64| Spread::of(self.runs.iter().map(|run| part(&run.cpu))).map(|spread| spread.median);
        Some(Cpu { consumer: median(|cpu| cpu.consumer)?, database: median(|cpu| cpu.database)?, broker: median(|cpu| cpu.broker)? })
    }
}

impl Report {
    /// Cells by what they were given, in the order of the letters.
    fn groups(&self) -> BTreeMap<(Workload, i32), Vec<&Cell>> {
        let mut groups: BTreeMap<_, Vec<_>> = BTreeMap::new();
        for cell in &self.throughput {
            groups.entry((cell.workload, cell.partitions)).or_default().push(cell);
        }
        groups
    }

    /// For a terminal.
    pub fn text(&self) -> String {
        let mut text = String::new();
        for ((workload, partitions), cells) in self.groups() {
            let plural = if partitions == 1 { "" } else { "s" };
            let _ = writeln!(text, "\n{} rows, {partitions} partition{plural}", workload.name());
            let _ = writeln!(
                text,
                "{:<8}{:>9}{:>19}{:>9}{:>10}{:>9}{:>10}{:>9}{:>10}{:>8}",
                "VARIANT", "MSG/S", "MIN–MAX", "× (d)", "CPU µs", "× (d)", "DB µs", "× (d)", "BROKER µs", "GAP ms"
            );
            let reference = cells.iter().find(|cell| cell.variant == Variant::ByHand).and_then(|cell| Some((cell.rate()?, cell.cpu()?)));
            for cell in cells {
                let (Some(rate), Some(cpu)) = (cell.rate(), cell.cpu()) else { continue };
                let by = |value: f64, of: fn(&(Spread, Cpu)) -> f64| {
                    reference.as_ref().map_or_else(|| "–".to_owned(), |reference| format!("{:.2}", value / of(reference)))
                };
                let _ = writeln!(
                    text,
                    "{:<8}{:>9.0}{:>19}{:>9}{:>10.0}{:>9}{:>10.0}{:>9}{:>10.0}{:>8.0}",
                    cell.variant.letter(),
                    rate.median,
                    format!("{:.0}–{:.0}", rate.min, rate.max),
                    by(rate.median, |d| d.0.median),
                    cpu.consumer,
                    by(cpu.consumer, |d| d.1.consumer),
                    cpu.database,
                    by(cpu.database, |d| d.1.database),
                    cpu.broker,
                    cell.longest_gap_ms(),
                );
            }
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_median_of_an_even_number_is_between_the_middle_two() {
        let spread = Spread::of([4.0, 1.0, 3.0, 2.0]).expect("values");
        assert_eq!(spread, Spread { median: 2.5, min: 1.0, max: 4.0 });
        assert_eq!(Spread::of([]), None);
    }
}
