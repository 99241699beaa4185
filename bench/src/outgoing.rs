//! Outgoing messages: the throughput of a handler that emits one of each message, the time from the
//! commit until the broker has the record, and the drain of many that are due in one minute. A
//! consumer with an outbox written by hand stands beside the host.
//!
//! A message counts when it is committed and its record is on the broker. Each run checks that the
//! broker has one record of each message and no other.

// Many outgoing messages that are due in one minute.
mod timers;

use std::collections::HashMap;

use anyhow::{Context, Result, ensure};
use serde::{Deserialize, Serialize};
use sqlx::AssertSqlSafe;

pub use self::timers::{TIMERS, Timers};
use crate::{
    latency::{WARM_UP, send_steadily},
    load::Workload,
    report::{Cell, RATE},
    run::{Bench, Job, check, finish},
    sent::{self, SentRecord},
    servers::Database,
    steady::{PARTITIONS, load},
    throughput::{self, Pace},
    trend::percentile,
    variants::{
        Batch,
        Variant::{self, ByHand, ByHandOutbox, ComponentEmitting, ComponentQuiet},
    },
};

/// Load at which the delay is measured, as a share of the variant's own throughput.
const SHARE: f64 = 0.5;
/// Duration of that load, as a multiple of the seconds of a run at full speed.
const DELAY_FACTOR: f64 = 5.0;

/// Everything that was measured of outgoing messages.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Outgoing {
    /// Throughput and CPU, with and without an outgoing message of each message.
    pub cells: Vec<Cell>,
    /// Time from commit to broker at half load, of the host and by hand.
    pub delays: Vec<Delay>,
    /// Drain of what is due in one minute.
    pub timers: Timers,
}

/// Time from the commit of a message until the broker has taken its outgoing message.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Delay {
    /// The variant.
    pub variant: Variant,
    /// Load, messages a second.
    pub rate: f64,
    /// Measured messages.
    pub messages: i64,
    /// Median, milliseconds.
    pub p50_ms: f64,
    /// 99th percentile, milliseconds.
    pub p99_ms: f64,
}

impl Outgoing {
    /// Returns the cell of a variant.
    pub fn cell(&self, variant: &Variant) -> Option<&Cell> {
        self.cells.iter().find(|cell| cell.variant == *variant)
    }

    /// Returns the number of runs whose records were checked.
    pub fn runs(&self) -> usize {
        let sending = self.cells.iter().filter(|cell| cell.variant.sends());
        sending.map(|cell| cell.runs.len()).sum::<usize>() + self.delays.len() + 1
    }

    /// Returns the median throughput of a variant, messages a second.
    pub fn rate(&self, variant: &Variant) -> Option<f64> {
        Some(self.cell(variant)?.spread(RATE)?.median)
    }
}

/// Measures all of it. Runs at full speed take about `seconds`.
pub async fn measure(
    bench: &mut Bench,
    pace: &mut Pace,
    timers: u64,
    rounds: usize,
    seconds: f64,
) -> Result<Outgoing> {
    let variants = [ByHand, ByHandOutbox, ComponentQuiet, ComponentEmitting];
    let loads = [(Workload::Spread, PARTITIONS)];
    let cells = throughput::measure(bench, pace, &variants, &loads, rounds).await?;
    let timers = timers::measure(bench, timers).await.context("timers")?;
    let mut outgoing = Outgoing { cells, delays: Vec::new(), timers };
    for variant in [ByHandOutbox, ComponentEmitting] {
        let rate = SHARE * outgoing.rate(&variant).unwrap_or_else(|| variant.guess());
        let what = || format!("delay of ({}) {}", variant.letter(), variant.title());
        let delay = delay(bench, &variant, rate, DELAY_FACTOR * seconds).await;
        let delay = delay.with_context(what)?;
        eprintln!(
            "from commit to broker at {rate:.0}/s: ({}) p50 {:.1} ms, p99 {:.1} ms",
            variant.letter(),
            delay.p50_ms,
            delay.p99_ms
        );
        outgoing.delays.push(delay);
    }
    Ok(outgoing)
}

/// Sends messages at a rate for some seconds and measures the delay of what is sent of them: until
/// the broker took it, by its own clock, in whole milliseconds that are not later than the true time.
async fn delay(bench: &mut Bench, variant: &Variant, rate: f64, seconds: f64) -> Result<Delay> {
    let load = load(WARM_UP + (rate * seconds).max(1.0) as usize);
    let job = Job { variant: variant.clone(), load, batch: Batch::DEFAULT, log_statements: false };
    let topic = bench.topics.empty(PARTITIONS).await?;
    let started = bench.start(&job, &topic).await?;
    let group = started.group.clone();
    let worked = send_steadily(bench, &job, &started, &topic, rate).await;
    let (database, _) = finish(started, worked)?;
    check(&job, &database).await?;
    let brokers = bench.servers.kafka.bootstrap();
    let records = sent::checked(brokers, &group, variant, &load, &database).await?;
    let delays = sorted_delays(&records, &commits(&database).await?);
    bench.servers.drop_database(database).await?;
    let (p50_ms, p99_ms) = (percentile(&delays, 0.5), percentile(&delays, 0.99));
    let (variant, messages) = (variant.clone(), delays.len() as i64);
    ensure!(messages > 0, "no message was measured");
    Ok(Delay { variant, rate, messages, p50_ms, p99_ms })
}

/// Returns the times of the commits of the measured messages, microseconds since the Unix epoch, by
/// the key of their outgoing message.
async fn commits(database: &Database) -> Result<HashMap<String, f64>> {
    let sql = format!(
        "SELECT 'm-' || substr(id, 3), extract(epoch FROM pg_xact_commit_timestamp(xmin))::float8 \
            * 1e6 FROM {}.orders WHERE note NOT LIKE '0 %'",
        database.schema
    );
    let query = sqlx::query_as::<_, (String, f64)>(AssertSqlSafe(sql));
    Ok(query.fetch_all(&mut database.connect().await?).await?.into_iter().collect())
}

/// Returns the times from the commits to the records, milliseconds, in ascending order. Records of
/// other messages are passed over.
fn sorted_delays(records: &[SentRecord], commits: &HashMap<String, f64>) -> Vec<f64> {
    let delay = |record: &SentRecord| Some((record.at_us - commits.get(&record.key)?) / 1e3);
    let mut delays: Vec<f64> = records.iter().filter_map(delay).collect();
    delays.sort_by(f64::total_cmp);
    delays
}

#[cfg(test)]
mod tests {
    use super::*;

    // What could go wrong: the delay is taken from the commit of another message.
    #[test]
    fn a_delay_is_from_the_commit_of_its_own_message() {
        let record = |key: &str, at_us| SentRecord { key: key.to_owned(), at_us };
        let records = [record("a", 9_000.0), record("warm-up", 1.0), record("b", 8_000.0)];
        let commits = [("a", 2_000.0), ("b", 3_500.0)].map(|(key, at)| (key.to_owned(), at));
        assert_eq!(sorted_delays(&records, &commits.into()), [4.5, 7.0]);
    }
}
