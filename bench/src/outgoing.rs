//! Outgoing messages: the throughput of a handler that emits one of each message, the time from the
//! commit to the broker's ack, and the drain of many that are due in one minute. A consumer with an
//! outbox written by hand stands beside the host.
//!
//! A message counts when it is committed and its record is on the broker. Each run checks that the
//! broker has one record of each message and no other.

// Many outgoing messages that are due in one minute.
mod timers;

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};
use sqlx::AssertSqlSafe;

pub use self::timers::{TIMERS, Timers};
use crate::{
    latency::{WARM_UP, send_steadily},
    load::Workload,
    report::{Cell, RATE},
    run::{Bench, Job, check, finish},
    sent,
    servers::Database,
    steady::{PARTITIONS, load},
    throughput::{self, Pace},
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
    /// Time from commit to ack at half load, of the host and by hand.
    pub delays: Vec<Delay>,
    /// Drain of what is due in one minute.
    pub timers: Timers,
}

/// Time from the commit of a message to the broker's ack of its outgoing message, as the sender
/// sees it.
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
            "from commit to ack at {rate:.0}/s: ({}) p50 {:.1} ms, p99 {:.1} ms",
            variant.letter(),
            delay.p50_ms,
            delay.p99_ms
        );
        outgoing.delays.push(delay);
    }
    Ok(outgoing)
}

/// Sends messages at a rate for some seconds and measures the delay of what is sent of them.
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
    sent::checked(brokers, &group, variant, &load, &database).await?;
    let (p50_ms, p99_ms, messages) = percentiles(&database, variant).await?;
    bench.servers.drop_database(database).await?;
    Ok(Delay { variant: variant.clone(), rate, messages, p50_ms, p99_ms })
}

/// Returns the median and the 99th percentile of the measured messages, milliseconds, and the
/// number of these messages. The time ends where the sender writes down the ack: the begin of the
/// transaction that marks the row, or by hand of its statement, which is later than the ack.
async fn percentiles(database: &Database, variant: &Variant) -> Result<(f64, f64, i64)> {
    let sql = format!(
        "SELECT percentile_cont(0.5) WITHIN GROUP (ORDER BY ms), percentile_cont(0.99) WITHIN \
            GROUP (ORDER BY ms), count(*) FROM (\
         SELECT extract(epoch FROM s.at - pg_xact_commit_timestamp(o.xmin))::float8 * 1e3 AS ms \
         FROM {}.orders o JOIN ({}) s ON s.cause = 'm-' || substr(o.id, 3) \
         WHERE o.note NOT LIKE '0 %') t",
        database.schema,
        sent::rows_of(variant)
    );
    let query = sqlx::query_as(AssertSqlSafe(sql));
    query.fetch_one(&mut database.connect().await?).await.context("there are no delays")
}
