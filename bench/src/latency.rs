//! Time from send to commit, at a tenth of the load. The note of each order holds the time at which
//! it was sent. The database records the time of its commit, by the clock of the sender.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde::{Deserialize, Serialize};
use sqlx::AssertSqlSafe;
use tokio::time::{Instant, sleep};

use crate::{
    load::{Load, Sender, Workload},
    measure::now_us,
    run::{Bench, Job, Started, check, finish},
    servers::Database,
    throughput::PAYLOAD_BYTES,
    variants::{Batch, Variant},
};

/// Messages that are sent and committed before the measurement starts.
pub const WARM_UP: usize = 40;
const DEADLINE: Duration = Duration::from_secs(30);

/// Latency of a variant's messages.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Latency {
    /// The variant.
    pub variant: Variant,
    /// Partitions.
    pub partitions: i32,
    /// Load, messages sent a second.
    pub rate: f64,
    /// Median time from send to commit, milliseconds.
    pub p50_ms: f64,
    /// 99th percentile of the time from send to commit, milliseconds.
    pub p99_ms: f64,
}

/// Sends messages at a rate for some seconds and measures their latency.
pub async fn measure(
    bench: &mut Bench,
    variant: &Variant,
    partitions: i32,
    rate: f64,
    seconds: f64,
) -> Result<Latency> {
    let messages = WARM_UP + (rate * seconds) as usize;
    let load =
        Load { workload: Workload::Spread, partitions, messages, payload_bytes: PAYLOAD_BYTES };
    let job = Job { variant: variant.clone(), load, batch: Batch::DEFAULT, log_statements: false };
    let what = || format!("latency of ({}) {}", variant.letter(), variant.title());
    let topic = bench.topics.empty(partitions).await?;
    let started = bench.start(&job, &topic).await.with_context(what)?;
    let worked = send_steadily(bench, &job, &started, &topic, rate).await;
    let (database, _) = finish(started, worked).with_context(what)?;
    check(&job, &database).await.with_context(what)?;
    let (p50_ms, p99_ms) = percentiles(&database).await?;
    bench.servers.drop_database(database).await?;
    Ok(Latency { variant: variant.clone(), partitions, rate, p50_ms, p99_ms })
}

/// Sends a load at a rate, after a few messages to warm up, and waits until all of it is acked.
pub async fn send_steadily(
    bench: &Bench,
    job: &Job,
    started: &Started,
    topic: &str,
    rate: f64,
) -> Result<()> {
    let sender =
        || Sender::new(bench.servers.kafka.bootstrap(), topic, &job.load, &[("linger.ms", "0")]);
    let (warm_up, measured) = (sender()?, sender()?);
    let mut orders = job.load.orders();
    let rest = orders.split_off(WARM_UP);
    tokio::task::spawn_blocking(move || {
        orders.iter().try_for_each(|order| warm_up.send(order, "0"))?;
        warm_up.flush()
    })
    .await??;
    until_committed(&started.database, WARM_UP as i64).await?;
    tokio::task::spawn_blocking(move || {
        measured.send_at(&rest, Some(rate), || format!("{:.0}", now_us()))
    })
    .await??;
    bench.wait(job, started, topic).await
}

/// Waits until at least `orders` orders are committed.
pub async fn until_committed(database: &Database, orders: i64) -> Result<()> {
    let deadline = Instant::now() + DEADLINE;
    while database.totals().await?.orders < orders {
        ensure!(
            Instant::now() < deadline,
            "the first messages were not committed within {DEADLINE:?}"
        );
        sleep(Duration::from_millis(100)).await;
    }
    Ok(())
}

/// Returns the median and the 99th percentile of all measured messages, milliseconds.
pub async fn percentiles(database: &Database) -> Result<(f64, f64)> {
    let sql = format!(
        "SELECT percentile_cont(0.5) WITHIN GROUP (ORDER BY ms), percentile_cont(0.99) WITHIN \
            GROUP (ORDER BY ms) FROM (\
         SELECT extract(epoch FROM pg_xact_commit_timestamp(xmin))::float8 * 1e3 - \
         split_part(note, ' ', 1)::float8 / 1e3 AS ms \
         FROM {}.orders WHERE note NOT LIKE '0 %') t",
        database.schema
    );
    Ok(sqlx::query_as(AssertSqlSafe(sql)).fetch_one(&mut database.connect().await?).await?)
}
