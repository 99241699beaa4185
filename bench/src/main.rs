//! The benchmark; `bench.sh` builds everything and runs this.

mod load;
mod measure;
mod report;
mod run;
mod servers;
mod variants;

use std::{
    collections::HashMap,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result};
use clap::Parser;

use crate::{
    load::{Load, Topics, Workload},
    report::{Cell, Environment, Report},
    run::{Bench, Job},
    servers::Servers,
    variants::{Batch, Programs, Variant},
};

/// The same business effect by the host, by hand and by others, on real Kafka and PostgreSQL.
#[derive(Parser)]
struct Options {
    /// Variants, by letter: a, b, b1, c, c1, d, e, f, g:<language>. All that can run, unless named.
    #[arg(long, value_delimiter = ',')]
    variants: Vec<Variant>,
    /// Only this workload: `spread` or `hot`.
    #[arg(long, value_enum)]
    workload: Option<Workload>,
    /// Only with so many partitions: 1 or 4.
    #[arg(long)]
    partitions: Option<i32>,
    /// One round of short runs.
    #[arg(long)]
    quick: bool,
    /// Rounds; medians are shown.
    #[arg(long)]
    rounds: Option<usize>,
    /// Seconds that a run is to be measured for.
    #[arg(long)]
    seconds: Option<f64>,
    /// Write everything that was measured into this file.
    #[arg(long)]
    json: Option<PathBuf>,
    /// The folder of the programs to measure.
    #[arg(long, default_value = "target/bench/bin")]
    bin: PathBuf,
    /// How they were compiled; for the report.
    #[arg(long, default_value = "dev")]
    profile: String,
}

impl Options {
    fn loads(&self) -> Vec<(Workload, i32)> {
        let all = [(Workload::Spread, 1), (Workload::Spread, 4), (Workload::Hot, 1), (Workload::Hot, 4)];
        let wanted = |(workload, partitions): &(Workload, i32)| {
            self.workload.is_none_or(|only| only == *workload) && self.partitions.is_none_or(|only| only == *partitions)
        };
        all.into_iter().filter(wanted).collect()
    }
}

const PAYLOAD_BYTES: usize = 200;

#[tokio::main]
async fn main() -> Result<()> {
    let options = Options::parse();
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().context("the crate is in a folder of the workspace")?.to_owned();
    let dir = root.join("target/bench").join(format!("run-{}", std::process::id()));
    let logs = root.join("target/bench/logs");
    std::fs::create_dir_all(&dir)?;
    std::fs::create_dir_all(&logs)?;
    let programs = Programs { bin: root.join(&options.bin), root };
    eprintln!("starting Kafka and PostgreSQL");
    let servers = Servers::start(dir).await?;
    let topics = Topics::new(oncebox_tests::kafka::KafkaServer::at(servers.kafka.bootstrap()));
    let mut bench = Bench::new(servers, topics, programs, logs);
    let measured = measure(&mut bench, &options).await;
    bench.servers.stop()?;
    let report = measured?;
    print!("{}", report.text());
    if let Some(path) = &options.json {
        std::fs::write(path, serde_json::to_vec_pretty(&report)?).with_context(|| format!("failed to write `{}`", path.display()))?;
    }
    Ok(())
}

async fn measure(bench: &mut Bench, options: &Options) -> Result<Report> {
    let rounds = options.rounds.unwrap_or(if options.quick { 1 } else { 3 });
    let seconds = options.seconds.unwrap_or(if options.quick { 1.5 } else { 3.0 });
    let named = if options.variants.is_empty() { Variant::lettered() } else { options.variants.clone() };
    let mut variants = Vec::new();
    for variant in named {
        match bench.programs.missing(&variant) {
            Some(why) => eprintln!("({}) is left out: {why}", variant.letter()),
            None => variants.push(variant),
        }
    }
    let mut cells: Vec<Cell> = Vec::new();
    let mut rates: HashMap<(Variant, Workload, i32), f64> = HashMap::new();
    for round in 1..=rounds {
        for (workload, partitions) in options.loads() {
            for variant in &variants {
                let key = (variant.clone(), workload, partitions);
                let rate = rates.get(&key).copied().unwrap_or(variant.guess());
                let load = Load { workload, partitions, messages: sized(rate, seconds), payload_bytes: PAYLOAD_BYTES };
                let job = Job { variant: variant.clone(), load, batch: Batch::DEFAULT };
                let mut figures = bench.run(&job).await?;
                if !rates.contains_key(&key) && (figures.seconds < 0.5 * seconds || figures.seconds > 3.0 * seconds) {
                    let load = Load { messages: sized(figures.rate, seconds), ..load };
                    figures = bench.run(&Job { load, ..job }).await?;
                }
                eprintln!(
                    "round {round}: {} rows, {partitions} partitions, ({}): {:.0}/s",
                    workload.name(),
                    variant.letter(),
                    figures.rate
                );
                rates.insert(key, figures.rate);
                match cells.iter_mut().find(|c| c.variant == *variant && c.workload == workload && c.partitions == partitions) {
                    Some(cell) => cell.runs.push(figures),
                    None => {
                        cells.push(Cell { variant: variant.clone(), title: variant.title(), workload, partitions, runs: vec![figures] })
                    }
                }
            }
        }
    }
    let environment = Environment {
        processor: processor(),
        cores: std::thread::available_parallelism().map_or(1, usize::from),
        postgres: bench.servers.postgres_version().await?,
        profile: options.profile.clone(),
        rounds,
    };
    Ok(Report { environment, throughput: cells })
}

/// Messages for a run of about so many measured seconds, in steps, so that topics are used again.
fn sized(rate: f64, seconds: f64) -> usize {
    let wanted = (rate * seconds / 0.8).max(500.0);
    let step = (wanted.log2() * 2.0).round() / 2.0;
    (step.exp2() / 100.0).round() as usize * 100
}

fn processor() -> String {
    let info = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let model = info.lines().find(|line| line.starts_with("model name")).and_then(|line| line.split_once(':'));
    model.map_or_else(|| "unknown".to_owned(), |(_, name)| name.trim().to_owned())
}
