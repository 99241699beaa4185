//! Several hosts of one consumer: throughput of one and more, each on a processor of its own, and
//! the pauses of partitions while one host leaves the group and comes back.

use std::{fs, ops::Range, path::PathBuf, process::Command, time::Duration};

use anyhow::{Context, Result, ensure};
use oncebox_devkit::local::process::Child;
use oncebox_tests::guests::{End, Step, component, execute};
use serde::{Deserialize, Serialize};
use tokio::{
    task::spawn_blocking,
    time::{Instant, sleep},
};

use crate::{
    latency::WARM_UP,
    load::{Load, Sender, Workload},
    measure::now_us,
    run::{Bench, END},
    servers::Database,
    throughput::PAYLOAD_BYTES,
    variants::{Batch, host, spawn, tail},
};

/// Partitions of the scaled consumer.
const PARTITIONS: i32 = 16;
/// What the handler of the scaled consumer does: a loop that keeps a processor busy for some
/// ten milliseconds, and one statement.
const BUSY: &str = "(local.set $left (i32.const 40000000)) (loop $again (local.set $left (i32.sub \
    (local.get $left) (i32.const 1))) (br_if $again (local.get $left)))";
const STATEMENT: &str = "SELECT 1";
/// Messages of a run, for each host.
const MESSAGES: usize = 1_000;
/// Time in which hosts that have joined divide the partitions.
const SETTLING: Duration = Duration::from_secs(8);
/// Share of the commits between which the rate is taken: hosts end one after the other.
const MEASURED: (f64, f64) = (0.1, 0.8);
/// Longest duration of a run.
const DEADLINE: Duration = Duration::from_secs(180);

/// Partitions of the consumer whose hosts leave and come.
const PAUSED_PARTITIONS: i32 = 4;
/// Times that a host leaves and comes back.
const CHANGES: usize = 5;
/// Time in which a change is over. Pauses in this time after a change count as its pauses.
const CHANGE: Duration = Duration::from_secs(8);
/// Load beside the changes, messages a second.
const RATE: f64 = 400.0;
/// Intervals of heartbeats, milliseconds: that of Kafka, the default of a host, and a shorter one.
const HEARTBEATS_MS: [u32; 3] = [3_000, 1_000, 300];

/// Figures of several hosts.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Hosts {
    /// Throughput by the number of hosts.
    pub scaling: Vec<Scaling>,
    /// Pauses by the interval of heartbeats.
    pub pauses: Vec<Pauses>,
}

/// Throughput of a number of hosts, one rate for each round.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Scaling {
    /// Hosts, each on one processor of its own.
    pub hosts: usize,
    /// Messages a second.
    pub rates: Vec<f64>,
    /// Rounds a second of as many loops without hosts: what the processors allow.
    pub loops: Vec<f64>,
}

/// Pauses of the partition that waits longest, one for each change.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Pauses {
    /// Interval of heartbeats, milliseconds.
    pub heartbeat_ms: u32,
    /// Milliseconds, of a host that leaves.
    pub leaving: Vec<f64>,
    /// Milliseconds, of a host that comes.
    pub coming: Vec<f64>,
}

/// Measures the throughput of each number of hosts that has a processor for each, and the pauses.
pub async fn measure(bench: &mut Bench, rounds: usize) -> Result<Hosts> {
    let processors = std::thread::available_parallelism().map_or(1, usize::from);
    let component = component(&[Step::Wat(BUSY.to_owned()), execute(STATEMENT)], &End::Ok);
    let mut scaling: Vec<_> = [1, 2, 4]
        .into_iter()
        .filter(|hosts| *hosts <= processors)
        .map(|hosts| Scaling { hosts, rates: Vec::new(), loops: Vec::new() })
        .collect();
    for _ in 0..rounds {
        for Scaling { hosts, rates, loops } in &mut scaling {
            let rate = scaled(bench, &component, *hosts)
                .await
                .with_context(|| format!("throughput of {hosts} hosts"))?;
            eprintln!("hosts: {rate:.0} messages a second of {hosts}");
            rates.push(rate);
            let threads = *hosts;
            loops.push(spawn_blocking(move || looped(threads)).await?);
        }
    }
    let mut pauses = Vec::new();
    for heartbeat_ms in HEARTBEATS_MS {
        let of_changes = changes(bench, heartbeat_ms)
            .await
            .with_context(|| format!("pauses with heartbeats of {heartbeat_ms} ms"))?;
        eprintln!("hosts: {of_changes:?}");
        pauses.push(of_changes);
    }
    Ok(Hosts { scaling, pauses })
}

/// Hosts of one consumer on one database.
struct Group<'a> {
    bench: &'a Bench,
    database: Database,
    topic: String,
    partitions: i32,
    /// File with settings of every host.
    config: PathBuf,
}

impl<'a> Group<'a> {
    async fn new(
        bench: &'a mut Bench,
        component: Option<&[u8]>,
        partitions: i32,
        settings: &str,
    ) -> Result<Self> {
        let topic = bench.topics.empty(partitions).await?;
        let database = bench.servers.database(true).await?;
        let policy = host::policy(&topic, &format!("group-{topic}"), Batch::DEFAULT)?;
        let (servers, programs) = (&bench.servers, &bench.programs);
        match component {
            Some(component) => host::create_with(servers, &database, component, &policy).await?,
            None => host::create(servers, programs, &database, &policy).await?,
        };
        let config = bench.logs.join(format!("{topic}.toml"));
        fs::write(&config, settings).context("failed to write the hosts' settings")?;
        Ok(Self { bench, database, topic, partitions, config })
    }

    /// Starts a host, on this processor alone where one is named.
    fn start(&self, number: usize, processor: Option<usize>) -> Result<Child> {
        let log = self.bench.logs.join(format!("{}-{number}.log", self.topic));
        let program =
            host::program(&self.bench.servers, &self.database, &self.bench.programs, &log)?;
        let mut command = match processor {
            Some(processor) => pinned(&program, processor),
            None => program,
        };
        command.env("ONCEBOX_CONFIG", &self.config);
        spawn(command, &log).with_context(|| tail(&log))
    }

    /// Sends messages at a rate, or at once.
    async fn send(&self, range: Range<usize>, rate: Option<f64>) -> Result<()> {
        let load = Load {
            workload: Workload::Spread,
            partitions: self.partitions,
            messages: range.end,
            payload_bytes: PAYLOAD_BYTES,
        };
        let brokers = self.bench.servers.kafka.bootstrap();
        let sender = Sender::new(brokers, &self.topic, &load, &[("linger.ms", "0")])?;
        let orders = load.orders().split_off(range.start);
        spawn_blocking(move || sender.send_at(&orders, rate, || "0".to_owned())).await?
    }

    /// Waits until so many messages completed, and checks that each has one row.
    async fn until_completed(&self, messages: usize) -> Result<()> {
        const COMPLETED: &str = "SELECT count(*) FROM oncebox.inbox WHERE status = 'completed'";
        let mut connection = self.database.connect().await?;
        let deadline = Instant::now() + DEADLINE;
        loop {
            let completed: i64 = sqlx::query_scalar(COMPLETED).fetch_one(&mut connection).await?;
            if completed == messages as i64 {
                return Ok(());
            }
            ensure!(completed < messages as i64, "{completed} completed of {messages} messages");
            ensure!(Instant::now() < deadline, "{completed} of {messages} within {DEADLINE:?}");
            sleep(Duration::from_millis(200)).await;
        }
    }
}

/// Returns the command on one processor.
fn pinned(program: &Command, processor: usize) -> Command {
    let mut command = Command::new("taskset");
    command.arg("-c").arg(processor.to_string()).arg(program.get_program());
    command.args(program.get_args());
    for (name, value) in program.get_envs() {
        match value {
            Some(value) => command.env(name, value),
            None => command.env_remove(name),
        };
    }
    if let Some(dir) = program.get_current_dir() {
        command.current_dir(dir);
    }
    command
}

/// Returns the messages a second of so many hosts.
async fn scaled(bench: &mut Bench, component: &[u8], hosts: usize) -> Result<f64> {
    let messages = WARM_UP + MESSAGES * hosts;
    let group = Group::new(bench, Some(component), PARTITIONS, "").await?;
    let children: Vec<_> =
        (0..hosts).map(|number| group.start(number, Some(number))).collect::<Result<_>>()?;
    let worked = async {
        group.send(0..WARM_UP, None).await?;
        group.until_completed(WARM_UP).await?;
        sleep(SETTLING).await;
        group.send(WARM_UP..messages, None).await?;
        group.until_completed(messages).await
    };
    let worked = worked.await;
    end(children);
    worked?;
    let commits = group.database.commits_by_partition().await?;
    let rate = rate(commits.into_iter().map(|(_, at)| at).collect())?;
    let database = group.database;
    bench.servers.drop_database(database).await?;
    Ok(rate)
}

/// Returns the rounds a second of loops in so many threads, which do nothing else.
fn looped(threads: usize) -> f64 {
    const ROUNDS: u64 = 2_000_000_000;
    let begun = std::time::Instant::now();
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                for round in 0..ROUNDS {
                    std::hint::black_box(round);
                }
            });
        }
    });
    (ROUNDS * threads as u64) as f64 / begun.elapsed().as_secs_f64()
}

fn end(children: Vec<Child>) {
    for child in children {
        child.end(&END);
    }
}

/// Returns the messages a second between two shares of the commits after the warm-up.
fn rate(mut commits: Vec<f64>) -> Result<f64> {
    commits.sort_by(f64::total_cmp);
    let measured = commits.get(WARM_UP..).unwrap_or_default();
    let at = |share: f64| (measured.len() as f64 * share) as usize;
    let (from, to) = (at(MEASURED.0), at(MEASURED.1));
    ensure!(from < to && measured[from] < measured[to], "there is nothing to measure");
    Ok((to - from) as f64 / ((measured[to] - measured[from]) / 1e6))
}

/// Measures the pauses while one of two hosts leaves and comes back, beside a steady load.
async fn changes(bench: &mut Bench, heartbeat_ms: u32) -> Result<Pauses> {
    let settings = format!("[kafka.properties]\n'heartbeat.interval.ms' = '{heartbeat_ms}'\n");
    let group = Group::new(bench, None, PAUSED_PARTITIONS, &settings).await?;
    let stays = group.start(0, None)?;
    let mut moves = Some(group.start(1, None)?);
    let (mut left, mut came) = (Vec::new(), Vec::new());
    let seconds = (CHANGE * (2 * CHANGES + 1) as u32).as_secs_f64();
    let messages = WARM_UP + (RATE * seconds) as usize;
    let worked = async {
        group.send(0..WARM_UP, None).await?;
        group.until_completed(WARM_UP).await?;
        sleep(CHANGE).await;
        let change = async {
            sleep(CHANGE / 4).await; // messages come by then
            for _ in 0..CHANGES {
                left.push(now_us());
                if let Some(leaves) = moves.take() {
                    spawn_blocking(move || leaves.end(&END)).await?;
                }
                sleep(CHANGE).await;
                came.push(now_us());
                moves = Some(group.start(1, None)?);
                sleep(CHANGE).await;
            }
            anyhow::Ok(())
        };
        tokio::try_join!(group.send(WARM_UP..messages, Some(RATE)), change)?;
        group.until_completed(messages).await
    };
    let worked = worked.await;
    end(moves.into_iter().chain([stays]).collect());
    worked?;
    let commits = group.database.commits_by_partition().await?;
    let leaving: Vec<_> = left.iter().map(|moment| pause(&commits, *moment)).collect();
    let coming: Vec<_> = came.iter().map(|moment| pause(&commits, *moment)).collect();
    ensure!(leaving.iter().chain(&coming).all(|pause| *pause > 0.0), "no commits at a change");
    let database = group.database;
    bench.servers.drop_database(database).await?;
    Ok(Pauses { heartbeat_ms, leaving, coming })
}

/// Returns the longest time between two commits of any partition that overlaps a change.
fn pause(commits: &[(i32, f64)], moment: f64) -> f64 {
    let until = moment + CHANGE.as_secs_f64() * 1e6;
    let pairs = commits.chunk_by(|one, other| one.0 == other.0).flat_map(|of| of.windows(2));
    pairs
        .filter(|pair| pair[1].1 > moment && pair[0].1 < until)
        .map(|pair| (pair[1].1 - pair[0].1) / 1e3)
        .fold(0.0, f64::max)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rate_is_that_of_the_messages_after_the_warm_up() {
        let warm_up = [0.0; WARM_UP];
        let commits: Vec<_> =
            warm_up.into_iter().chain((1..=100).map(|n| f64::from(n) * 1e4)).collect();
        assert_eq!(rate(commits).expect("a rate").round(), 100.0);
        assert!(rate(warm_up.to_vec()).is_err());
    }

    #[test]
    fn a_pause_is_that_of_the_partition_that_waits_longest() {
        let commits = [(0, 1e6), (0, 2e6), (0, 2.5e6), (1, 1e6), (1, 4e6), (1, 40e6)];
        assert_eq!(pause(&commits, 1.5e6), 36_000.0);
        assert_eq!(pause(&commits[..5], 1.5e6), 3_000.0);
        assert_eq!(pause(&commits[..3], 3e6), 0.0);
    }
}
