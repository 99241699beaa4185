//! The benchmark; `bench.sh` builds everything and runs this.

mod claims;
mod docs;
mod fairness;
mod filling;
mod history;
mod hosts;
mod isolation;
mod latency;
mod load;
mod measure;
mod network;
mod options;
mod outgoing;
mod pages;
mod panels;
mod plot;
mod removal;
mod report;
mod run;
mod sent;
mod servers;
mod soak;
mod statements;
mod steady;
mod swaps;
mod sweep;
mod tables;
mod throughput;
mod trend;
mod variants;

use std::{fs, path::Path, process::ExitCode};

use anyhow::{Context, Result, ensure};
use clap::Parser;
use oncebox_tests::kafka::KafkaServer;

use crate::{
    load::{Topics, Workload},
    options::{Options, Part},
    report::{Environment, RATE, Report},
    run::Bench,
    servers::Servers,
    throughput::Pace,
    variants::{Programs, Variant},
};

/// Messages of a smoke run, which checks effects and times nothing.
const SMOKE_MESSAGES: usize = 400;
/// Partitions of the parts that use a single number of them.
const PARTITIONS: i32 = 4;

fn main() -> ExitCode {
    let outcome = oncebox_runtime::executor()
        .map_err(Into::into)
        .and_then(|executor| executor.block_on(run(&Options::parse())));
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("bench.sh: {error:#}");
            ExitCode::FAILURE
        }
    }
}

async fn run(options: &Options) -> Result<()> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"))
        .parent()
        .context("the crate is in a folder of the workspace")?
        .to_owned();
    if options.docs {
        docs::check(&root, &options.lasting())?;
    }
    let report = match &options.from {
        Some(path) => read(path)?,
        None => measured(&root, options).await?,
    };
    if options.smoke {
        println!("the effects of {} variants are right", report.throughput.len());
        if let Some(outgoing) = &report.outgoing {
            println!("{} runs sent each outgoing message once", outgoing.runs());
        }
    } else {
        print!("{}", tables::terminal(&report));
    }
    if let Some(path) = &options.json {
        fs::write(path, serde_json::to_vec_pretty(&report)?)
            .with_context(|| format!("failed to write `{}`", path.display()))?;
    }
    if options.docs { docs::write(&root, &report) } else { Ok(()) }
}

/// Reads the report that an earlier call wrote with `--json`.
fn read(path: &Path) -> Result<Report> {
    let json = fs::read(path).with_context(|| format!("failed to read `{}`", path.display()))?;
    serde_json::from_slice(&json)
        .with_context(|| format!("`{}` is no report of this benchmark", path.display()))
}

/// Starts the servers, measures, and stops the servers, also after an error or Ctrl-C.
async fn measured(root: &Path, options: &Options) -> Result<Report> {
    let (dir, logs) = (
        root.join(format!("target/bench/run-{}", std::process::id())),
        root.join("target/bench/logs"),
    );
    for dir in [&dir, &logs] {
        fs::create_dir_all(dir).with_context(|| format!("failed to create `{}`", dir.display()))?;
    }
    let programs = Programs { bin: root.join(&options.bin), root: root.to_owned() };
    eprintln!("starting Kafka and PostgreSQL");
    let servers = Servers::start(dir).await?;
    let topics = Topics::new(KafkaServer::at(servers.kafka.bootstrap()));
    let mut bench = Bench::new(servers, topics, programs, logs);
    let measured = tokio::select! {
        measured = measure(&mut bench, options) => measured,
        _ = tokio::signal::ctrl_c() => Err(anyhow::anyhow!("interrupted")),
    };
    bench.servers.stop()?;
    measured
}

/// Measures all wanted parts one after the other: a second part at work would distort the figures.
async fn measure(bench: &mut Bench, options: &Options) -> Result<Report> {
    let variants = available(bench, options);
    ensure!(!variants.is_empty(), "none of the variants can run here");
    let (rounds, seconds) = (options.rounds(), options.seconds());
    let mut pace =
        if options.smoke { Pace::of_messages(SMOKE_MESSAGES) } else { Pace::of_seconds(seconds) };
    let mut report = Report::new(environment(bench, options).await?);
    let lettered: Vec<_> = variants
        .iter()
        .filter(|variant| !matches!(variant, Variant::Language(_)))
        .cloned()
        .collect();
    if options.wants(Part::Throughput) {
        report.throughput =
            throughput::measure(bench, &mut pace, &lettered, &options.loads(), rounds).await?;
    }
    if options.wants(Part::Languages) && lettered.len() < variants.len() {
        // The component in Rust runs in these rounds too: it is the reference for the languages.
        let languages: Vec<_> = [Variant::Component]
            .into_iter()
            .chain(variants.iter().filter(|v| !lettered.contains(v)).cloned())
            .collect();
        report.languages = throughput::measure(
            bench,
            &mut pace,
            &languages,
            &[(Workload::Spread, PARTITIONS)],
            rounds,
        )
        .await?;
    }
    let consumers =
        || lettered.iter().filter(|one| **one != Variant::Pgbench && !one.has_one_load());
    if options.wants(Part::Latency) {
        for variant in consumers() {
            let known = report
                .cell(variant, Workload::Spread, PARTITIONS)
                .and_then(|cell| cell.spread(RATE));
            let rate = known.map_or_else(|| variant.guess(), |rate| rate.median) / 10.0;
            report
                .latency
                .push(latency::measure(bench, variant, PARTITIONS, rate, 2.0 * seconds).await?);
        }
    }
    if options.wants(Part::Statements) {
        for variant in &lettered {
            report.statements.push(statements::count(bench, variant).await?);
        }
    }
    if options.wants(Part::Swaps) && lettered.contains(&Variant::Component) {
        report.gaps = swaps::measure(bench, PARTITIONS).await?;
    }
    if options.wants(Part::Fairness) && lettered.contains(&Variant::Component) {
        report.fairness = fairness::measure(bench, PARTITIONS, rounds).await?;
    }
    if options.wants(Part::Isolation) {
        report.isolation = isolation::measure(bench, &options.beside, rounds, seconds).await?;
    }
    if options.wants(Part::Claims) {
        report.claims = claims::measure(bench).await?;
    }
    if options.wants(Part::Network) {
        report.network = network::measure(bench, &lettered, rounds, seconds).await?;
    }
    if options.wants(Part::Plots) {
        report.payloads = sweep::payloads(bench, &mut pace, &lettered).await?;
        report.batches = sweep::batches(bench, &mut pace, &lettered).await?;
    }
    measure_lasting(bench, options, &mut pace, &mut report).await?;
    Ok(report)
}

/// Measures the wanted parts among those that last.
async fn measure_lasting(
    bench: &mut Bench,
    options: &Options,
    pace: &mut Pace,
    report: &mut Report,
) -> Result<()> {
    let rounds = options.rounds();
    if options.wants(Part::History) {
        let sizes = options.history();
        report.history = Some(history::measure(bench, pace, &sizes, rounds).await?);
    }
    if options.wants(Part::Removal) {
        report.removal = removal::measure(bench, pace, options.removal_rows, rounds).await?;
    }
    if options.wants(Part::Outgoing) {
        let (timers, seconds) = (options.timers, options.seconds());
        report.outgoing = Some(outgoing::measure(bench, pace, timers, rounds, seconds).await?);
    }
    if options.wants(Part::Hosts) {
        report.hosts = Some(hosts::measure(bench, rounds).await?);
    }
    if options.wants(Part::Pages) {
        report.pages = Some(pages::measure(bench, options.pages_rows, options.tenants).await?);
    }
    if options.wants(Part::Soak) {
        report.soak = Some(soak::measure(bench, pace, options.minutes).await?);
    }
    Ok(())
}

/// Returns the requested variants that can run, or all that can where none was named. Prints each
/// other variant with the reason.
fn available(bench: &Bench, options: &Options) -> Vec<Variant> {
    let all = || Variant::lettered().into_iter().chain(bench.programs.languages()).collect();
    let wanted: Vec<_> = if options.variants.is_empty() { all() } else { options.variants.clone() };
    if options.wants(Part::Languages)
        && options.variants.is_empty()
        && bench.programs.languages().is_empty()
    {
        eprintln!(
            "(g) is left out: there are no components in `target/languages`; build them with \
                guest-examples/languages/build.sh"
        );
    }
    let can_run = |variant: &Variant| match bench.programs.missing(variant) {
        Some(why) => {
            eprintln!("({}) is left out: {why}", variant.letter());
            false
        }
        None => true,
    };
    wanted.into_iter().filter(can_run).collect()
}

async fn environment(bench: &Bench, options: &Options) -> Result<Environment> {
    let info = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let model = info
        .lines()
        .find(|line| line.starts_with("model name"))
        .and_then(|line| line.split_once(':'));
    Ok(Environment {
        processor: model.map_or_else(|| "unknown".to_owned(), |(_, name)| name.trim().to_owned()),
        cores: std::thread::available_parallelism().map_or(1, usize::from),
        postgres: bench.servers.postgres_version().await?,
        profile: options.profile.clone(),
        rounds: options.rounds(),
        seconds: options.seconds(),
    })
}
