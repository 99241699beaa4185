//! One run: a fresh database, a full topic, one process; then figures, if its effects are right.

use std::{collections::BTreeMap, path::PathBuf, time::Duration};

use anyhow::{Context, Result, bail, ensure};
use libc::{SIGKILL, SIGTERM};
use oncebox_devkit::local::process::Child;
use rdkafka::{
    ClientConfig, Offset, TopicPartitionList,
    consumer::{BaseConsumer, Consumer},
};
use serde::{Deserialize, Serialize};
use tokio::time::{Instant, sleep};
use url::Url;

use crate::{
    load::{Load, Topics, ends},
    measure::{Cpu, Parties, Sampler, Samples, by_thread},
    network,
    sent::{self, sent_topic},
    servers::{Database, Servers},
    variants::{Batch, Programs, Setting, Variant, host, spawn, tail},
};

/// Longest duration of a run.
const DEADLINE: Duration = Duration::from_secs(90);
const POLL: Duration = Duration::from_millis(50);
const TIMEOUT: Duration = Duration::from_secs(10);
/// Signals that end a process, each with the time that it has.
pub const END: [(i32, Duration); 2] =
    [(SIGTERM, Duration::from_secs(20)), (SIGKILL, Duration::from_secs(5))];
/// Begin and end of the measured share of the messages, in the order of their commits. Before it
/// the process warms up, and after it partitions end one by one.
const MEASURED: (f64, f64) = (0.1, 0.9);

/// Figures of a run.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Figures {
    /// Different messages.
    pub messages: usize,
    /// Seconds from the first measured commit to the last, or to the last measured record where the
    /// variant sends.
    pub seconds: f64,
    /// Messages a second.
    pub rate: f64,
    /// Longest time without a commit, milliseconds.
    pub longest_gap_ms: f64,
    /// CPU time per message, microseconds.
    pub cpu: Cpu,
    /// CPU time of the measured process since its start, microseconds, by kind of thread.
    pub threads: BTreeMap<String, f64>,
    /// Bytes of the inbox, indexes included, per completed message; `None` without an inbox.
    #[serde(default)]
    pub inbox_bytes: Option<f64>,
}

/// The settings of a run.
#[derive(Debug, Clone)]
pub struct Job {
    /// The implementation.
    pub variant: Variant,
    /// The messages.
    pub load: Load,
    /// Limits of a transaction.
    pub batch: Batch,
    /// Whether the database logs every statement.
    pub log_statements: bool,
}

/// The servers, the topics and the programs of all runs.
pub struct Bench {
    /// Servers.
    pub servers: Servers,
    /// Topics.
    pub topics: Topics,
    /// Programs.
    pub programs: Programs,
    /// Logs of the measured processes.
    pub logs: PathBuf,
    /// Round trip between the processes that are started and the database; none on loopback.
    pub round_trip: Option<Duration>,
    runs: u32,
}

/// A running process with its database, group, log and sampler.
pub struct Started {
    /// The process.
    pub child: Child,
    /// Its database.
    pub database: Database,
    /// Its group.
    pub group: String,
    log: PathBuf,
    sampler: Sampler,
}

impl Bench {
    /// Creates a bench on running servers.
    pub fn new(servers: Servers, topics: Topics, programs: Programs, logs: PathBuf) -> Self {
        Self { servers, topics, programs, logs, round_trip: None, runs: 0 }
    }

    /// Runs a job to its end, checks its effects, and returns its figures.
    pub async fn run(&mut self, job: &Job) -> Result<Figures> {
        let what = || format!("({}) {}, {:?}", job.variant.letter(), job.variant.title(), job.load);
        let topic = self.topics.filled(&job.load).await.with_context(what)?;
        let started = self.start(job, &topic).await.with_context(what)?;
        let (database, figures) = self.to_end(job, started, &topic).await.with_context(what)?;
        self.servers.drop_database(database).await?;
        Ok(figures)
    }

    /// Waits until a started process is done, ends it, checks the effects, and returns the database
    /// with the figures.
    pub async fn to_end(
        &self,
        job: &Job,
        started: Started,
        topic: &str,
    ) -> Result<(Database, Figures)> {
        let ended = self.wait(job, &started, topic).await;
        let (log, group) = (started.log.clone(), started.group.clone());
        let threads = by_thread(started.child.pid());
        let (database, samples) = finish(started, ended)?;
        check(job, &database)
            .await
            .with_context(|| format!("its log ends with:\n{}", tail(&log)))?;
        let inbox_bytes = if job.variant.is_host() { database.inbox_bytes().await? } else { None };
        let commits = database.commits().await?;
        let done = match job.variant.sends() {
            true => {
                let brokers = self.servers.kafka.bootstrap();
                let sent = sent::checked(brokers, &group, &job.variant, &job.load, &database);
                sent::times(&sent.await?)
            }
            false => commits.clone(),
        };
        let figures = Figures { threads, inbox_bytes, ..figures(&commits, &done, &samples)? };
        Ok((database, figures))
    }

    /// Creates a database and starts the process on it.
    pub async fn start(&mut self, job: &Job, topic: &str) -> Result<Started> {
        self.runs += 1;
        let group = format!("bench-{}", self.runs);
        let log = self.logs.join(format!(
            "{:03}-{}.log",
            self.runs,
            job.variant.letter().replace(':', "-")
        ));
        let database = self.servers.database(job.variant.is_host()).await?;
        if job.log_statements {
            self.servers.log_statements(&database, job.variant.is_host()).await?;
        }
        if job.variant.sends() {
            self.topics.for_sent(&group, job.load.partitions).await?;
        }
        let away = self.away(&database)?;
        let setting = Setting {
            servers: &self.servers,
            database: &away,
            load: &job.load,
            topic,
            group: &group,
            batch: job.batch,
            programs: &self.programs,
            log: &log,
        };
        let child = job.variant.start(&setting).await?;
        self.sampled(child, database, group, log)
    }

    /// Returns a database as the measured processes see it.
    pub fn away(&self, database: &Database) -> Result<Database> {
        let Some(round_trip) = self.round_trip else { return Ok(database.clone()) };
        let mut url = Url::parse(&database.url).context("the database has no URL")?;
        let server = url.socket_addrs(|| Some(5432)).context("the database has no address")?;
        let address = network::listen(server[0], round_trip)?;
        url.set_host(Some(&address.ip().to_string()))?;
        url.set_port(Some(address.port())).ok().context("the database's URL takes no port")?;
        let mut away = database.clone();
        away.url = url.into();
        Ok(away)
    }

    /// Starts a host on a database that holds its consumer already, whose group is `group`.
    /// `settings` are variables of its environment, beside those of every host here.
    pub fn start_host(
        &mut self,
        database: Database,
        group: &str,
        settings: &[(&str, &str)],
    ) -> Result<Started> {
        self.runs += 1;
        let log = self.logs.join(format!("{:03}-c.log", self.runs));
        let mut command = host::program(&self.servers, &database, &self.programs, &log)?;
        command.envs(settings.iter().copied());
        let child = spawn(command, &log)?;
        self.sampled(child, database, group.to_owned(), log)
    }

    /// Begins to sample a process that has just started.
    fn sampled(
        &self,
        child: Child,
        database: Database,
        group: String,
        log: PathBuf,
    ) -> Result<Started> {
        let (postmaster, broker) = self.servers.pids()?;
        let sampler =
            Sampler::start(Parties { consumer: child.pid(), database: postmaster, broker });
        Ok(Started { child, database, group, log, sampler })
    }

    /// Waits until all messages are acked, and those that the variant sends are on the broker; or,
    /// where there is no broker, until the process has ended.
    pub async fn wait(&self, job: &Job, started: &Started, topic: &str) -> Result<()> {
        let watch =
            Watch::new(self.servers.kafka.bootstrap(), &started.group, topic, job.load.partitions)?;
        let deadline = Instant::now() + DEADLINE;
        let has_broker = job.variant != Variant::Pgbench;
        while started.child.is_running() {
            if has_broker && watch.all_acked().await? && watch.all_sent(job, started).await? {
                return Ok(());
            }
            ensure!(
                Instant::now() < deadline,
                "it is not done after {DEADLINE:?}; it says:\n{}",
                tail(&started.log)
            );
            sleep(POLL).await;
        }
        ensure!(!has_broker, "it ended by itself; it says:\n{}", tail(&started.log));
        Ok(())
    }
}

/// Ends the process and the sampling, also after an error.
pub fn finish(started: Started, ended: Result<()>) -> Result<(Database, Samples)> {
    let status = started.child.end(&END);
    let samples = started.sampler.finish()?;
    ended?;
    let Some(status) = status else {
        bail!("the process does not end; it says:\n{}", tail(&started.log))
    };
    ensure!(
        status.success() || status.signal_is(SIGTERM),
        "it ended with {status}; it says:\n{}",
        tail(&started.log)
    );
    Ok((started.database, samples))
}

trait SignalIs {
    fn signal_is(&self, signal: i32) -> bool;
}

impl SignalIs for std::process::ExitStatus {
    fn signal_is(&self, signal: i32) -> bool {
        std::os::unix::process::ExitStatusExt::signal(self) == Some(signal)
    }
}

/// Checks the effects of a run: a variant with wrong effects is an error, not a number.
pub async fn check(job: &Job, database: &Database) -> Result<()> {
    let found = database.totals().await?;
    if job.variant == Variant::Pgbench {
        // pgbench draws its own accounts and amounts.
        let each = job.load.messages as i64 / i64::from(job.load.partitions);
        let expected = each * i64::from(job.load.partitions);
        ensure!(
            (found.orders, found.bookings) == (expected, expected),
            "{found:?}, but {expected} transactions ran"
        );
        return Ok(());
    }
    let expected = job.load.totals();
    ensure!(found == expected, "the effects are wrong: {found:?} instead of {expected:?}");
    Ok(())
}

/// Returns the figures of a run from the times of its commits, and of what ends each message: the
/// commit too, or the record that is sent of it.
fn figures(commits: &[(f64, i64)], done: &[(f64, i64)], samples: &Samples) -> Result<Figures> {
    let messages: i64 = done.iter().map(|(_, count)| count).sum();
    let (from, before) = at_share(commits, MEASURED.0)?;
    let (to, until) = at_share(done, MEASURED.1)?;
    let (seconds, measured) = ((to - from) / 1e6, (until - before) as f64);
    ensure!(seconds > 0.0, "all was committed at once; there is nothing to measure");
    let cpu = samples.between(from, to).scaled(1.0 / measured);
    let longest_gap_ms = longest_gap(done, from, to) / 1e3;
    Ok(Figures {
        messages: messages as usize,
        seconds,
        rate: measured / seconds,
        longest_gap_ms,
        cpu,
        threads: BTreeMap::new(),
        inbox_bytes: None,
    })
}

/// Returns the longest time without a commit between two points in time, microseconds.
fn longest_gap(commits: &[(f64, i64)], from: f64, to: f64) -> f64 {
    let times: Vec<f64> =
        commits.iter().map(|(at, _)| *at).filter(|at| (from..=to).contains(at)).collect();
    times.windows(2).map(|pair| pair[1] - pair[0]).fold(0.0, f64::max)
}

/// Returns the time at which a share of the messages was committed, and their exact number.
fn at_share(commits: &[(f64, i64)], share: f64) -> Result<(f64, i64)> {
    let total: i64 = commits.iter().map(|(_, count)| count).sum();
    let mut sum = 0;
    for (at, count) in commits {
        sum += count;
        if sum as f64 >= share * total as f64 {
            return Ok((*at, sum));
        }
    }
    bail!("nothing was committed")
}

/// A client that compares the committed offsets of a group with the ends of a topic.
struct Watch {
    client: std::sync::Arc<BaseConsumer>,
    topic: String,
    ends: Vec<i64>,
}

impl Watch {
    fn new(brokers: &str, group: &str, topic: &str, partitions: i32) -> Result<Self> {
        let mut config = ClientConfig::new();
        let client: BaseConsumer = config
            .set("bootstrap.servers", brokers)
            .set("group.id", group)
            .create()
            .context("failed to make a client")?;
        let ends = ends(&client, topic, partitions)?;
        Ok(Self { client: client.into(), topic: topic.to_owned(), ends })
    }

    async fn all_acked(&self) -> Result<bool> {
        let mut asked = TopicPartitionList::new();
        asked.add_partition_range(&self.topic, 0, self.ends.len() as i32 - 1);
        let client = self.client.clone();
        let committed =
            tokio::task::spawn_blocking(move || client.committed_offsets(asked, TIMEOUT)).await?;
        let committed = committed.context("failed to ask how far the group is")?;
        let done = |(partition, end): (usize, &i64)| {
            let found = committed.find_partition(&self.topic, partition as i32);
            *end == 0 || found.is_some_and(|found| found.offset() == Offset::Offset(*end))
        };
        Ok(self.ends.iter().enumerate().all(done))
    }

    /// Returns whether the records that a variant sends are on the broker.
    async fn all_sent(&self, job: &Job, started: &Started) -> Result<bool> {
        if !job.variant.sends() {
            return Ok(true);
        }
        let (client, topic, partitions) =
            (self.client.clone(), sent_topic(&started.group), job.load.partitions);
        let ends = tokio::task::spawn_blocking(move || ends(&client, &topic, partitions)).await??;
        Ok(ends.iter().sum::<i64>() >= job.load.messages as i64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_count_messages_not_commits() {
        let commits = [(1.0, 10), (2.0, 10), (3.0, 60), (4.0, 20)];
        assert_eq!(at_share(&commits, 0.1).expect("a share"), (1.0, 10));
        assert_eq!(at_share(&commits, 0.5).expect("a share"), (3.0, 80));
        assert!(at_share(&[], 0.5).is_err());
        assert_eq!(longest_gap(&commits, 1.5, 4.0), 1.0);
    }
}
