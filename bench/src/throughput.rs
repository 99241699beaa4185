//! Full speed: rounds of runs, one of each variant in turn.

use std::collections::HashMap;

use anyhow::Result;

use crate::{
    load::{Load, Workload},
    report::Cell,
    run::{Bench, Figures, Job},
    variants::{Batch, Variant},
};

/// Default payload, bytes.
pub const PAYLOAD_BYTES: usize = 200;
/// Fewest messages of a run that is measured.
const MESSAGES_MIN: f64 = 500.0;

/// Sizes runs by the rates of earlier runs, so that all take about the wanted time.
pub struct Pace {
    seconds: f64,
    fixed: Option<usize>,
    rates: HashMap<Key, f64>,
}

/// Settings that a known rate belongs to.
type Key = (Variant, Workload, i32, usize, usize);

impl Pace {
    /// Creates a pace for runs of about this number of measured seconds.
    pub fn of_seconds(seconds: f64) -> Self {
        Self { seconds, fixed: None, rates: HashMap::new() }
    }

    /// Creates a pace for runs of a fixed number of messages, of any duration.
    pub fn of_messages(messages: usize) -> Self {
        Self { fixed: Some(messages), ..Self::of_seconds(0.0) }
    }

    /// Runs a variant with a load of the right size. Repeats a first run whose size was too far
    /// off.
    pub async fn run(
        &mut self,
        bench: &mut Bench,
        variant: &Variant,
        load: Load,
        batch: Batch,
    ) -> Result<Figures> {
        let key = (
            variant.clone(),
            load.workload,
            load.partitions,
            load.payload_bytes,
            batch.messages_max,
        );
        let known = self.rates.get(&key).copied();
        let job = |messages| Job {
            variant: variant.clone(),
            load: Load { messages, ..load },
            batch,
            log_statements: false,
        };
        if let Some(messages) = self.fixed {
            return bench.run(&job(messages)).await;
        }
        let mut figures = bench.run(&job(self.size(known.unwrap_or(variant.guess())))).await?;
        let off = !(0.5 * self.seconds..3.0 * self.seconds).contains(&figures.seconds);
        if known.is_none() && off && self.size(figures.rate) != figures.messages {
            figures = bench.run(&job(self.size(figures.rate))).await?;
        }
        self.rates.insert(key, figures.rate);
        Ok(figures)
    }

    /// Returns the number of messages of a run, in steps, so that runs share topics. Allows for the
    /// tenth at either end that is not measured.
    fn size(&self, rate: f64) -> usize {
        let wanted = (rate * self.seconds / 0.8).max(MESSAGES_MIN);
        let step = (wanted.log2() * 2.0).round() / 2.0;
        (step.exp2() / 100.0).round() as usize * 100
    }
}

/// Measures every variant with every load, in rounds, of which every other one goes backwards.
pub async fn measure(
    bench: &mut Bench,
    pace: &mut Pace,
    variants: &[Variant],
    loads: &[(Workload, i32)],
    rounds: usize,
) -> Result<Vec<Cell>> {
    let mut cells: Vec<Cell> = Vec::new();
    for round in 1..=rounds {
        for (workload, partitions) in loads.iter().copied() {
            let is_first = (workload, partitions) == loads[0];
            let mut turns: Vec<_> =
                variants.iter().filter(|it| is_first || !it.has_one_load()).collect();
            // What a run leaves behind for the next one is not always that of the same variant.
            if round % 2 == 0 {
                turns.reverse();
            }
            for variant in turns {
                let load = Load { workload, partitions, messages: 0, payload_bytes: PAYLOAD_BYTES };
                let figures = pace.run(bench, variant, load, Batch::DEFAULT).await?;
                let (name, letter) = (workload.name(), variant.letter());
                eprintln!(
                    "round {round} of {rounds}, {name} rows, {partitions} partitions: ({letter}) \
                        {:.0}/s",
                    figures.rate
                );
                match cells.iter_mut().find(|c| {
                    c.variant == *variant && c.workload == workload && c.partitions == partitions
                }) {
                    Some(cell) => cell.runs.push(figures),
                    None => cells.push(Cell {
                        variant: variant.clone(),
                        title: variant.title(),
                        workload,
                        partitions,
                        runs: vec![figures],
                    }),
                }
            }
        }
    }
    Ok(cells)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_come_in_steps() {
        let pace = Pace::of_seconds(2.0);
        assert_eq!(pace.size(1_000.0), pace.size(1_050.0));
        assert!((2_000..4_000).contains(&pace.size(1_000.0)));
        assert_eq!(pace.size(1.0), 500);
    }
}
