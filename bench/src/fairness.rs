//! Latency of a tenant with a few messages a second, in pairs of runs that follow each other
//! directly. In one run the tenant has the host for itself. In the other, another tenant has a
//! backlog that outlasts the run.

use anyhow::{Context, Result, ensure};
use oncebox_control::NewDeployment;
use oncebox_inbox::{AdmissionRequest, Class, HostBounds, Scheduler};
use serde::{Deserialize, Serialize};

use crate::{
    latency::{WARM_UP, percentiles, send_steadily, until_committed},
    load::{Load, Workload},
    run::{Bench, Job, Started, check, finish},
    servers::Database,
    throughput::PAYLOAD_BYTES,
    variants::{
        Batch, Variant,
        host::{CONSUMER, control, policy},
    },
};

/// Backlog of the other tenant, messages.
const BACKLOG: usize = 200_000;
/// Partitions of the backlog.
const BACKLOG_PARTITIONS: i32 = 8;
/// Load of the measured tenant, messages a second.
const RATE: f64 = 25.0;
/// Measured messages.
const MESSAGES: usize = 300;
/// Messages of the backlog that are committed before the measurement starts.
const UNDER_WAY: i64 = 2_000;

/// Latency of a tenant's messages.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub struct Times {
    /// Median time from send to commit, milliseconds.
    pub p50_ms: f64,
    /// 99th percentile of the time from send to commit, milliseconds.
    pub p99_ms: f64,
}

/// Two runs of the measured tenant, one right after the other.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub struct FairnessPair {
    /// Latency with the host for itself.
    pub alone: Times,
    /// Latency beside another tenant with a backlog.
    pub beside: Times,
    /// Messages of the backlog that are not committed when the last measured message is.
    pub backlog_left: usize,
}

/// Returns the time to admit one transaction and to end its admission, nanoseconds, on a host with
/// this number of busy tenants.
async fn admission_ns(tenants: i32) -> f64 {
    const TIMES: u32 = 100_000;
    let scheduler = Scheduler::new(HostBounds::new(32, 4 << 30));
    let ask = |tenant_id, messages| AdmissionRequest {
        tenant_id,
        consumer_id: 1,
        class: Class::Fair,
        memory: 0,
        messages,
    };
    let held: Vec<_> =
        (0..tenants).filter_map(|tenant_id| scheduler.admit_spare(ask(tenant_id, 0))).collect();
    let begun = std::time::Instant::now();
    for number in 0..TIMES {
        drop(scheduler.admit(ask(number as i32 % tenants, 1)).await);
    }
    drop(held);
    begun.elapsed().as_nanos() as f64 / f64::from(TIMES)
}

/// Measures a pair for each round. The order within the pairs alternates.
pub async fn measure(
    bench: &mut Bench,
    partitions: i32,
    rounds: usize,
) -> Result<Vec<FairnessPair>> {
    for tenants in [1, 20] {
        eprintln!(
            "fairness: {:.0} ns for an admission and its end, {tenants} busy tenants",
            admission_ns(tenants).await
        );
    }
    let mut pairs = Vec::new();
    for round in 0..rounds {
        let mut alone = None;
        if round % 2 == 0 {
            alone = Some(run(bench, partitions, false).await.context("fairness, alone")?.0);
        }
        let (beside, backlog_left) =
            run(bench, partitions, true).await.context("fairness, beside a backlog")?;
        let alone = match alone {
            Some(alone) => alone,
            None => run(bench, partitions, false).await.context("fairness, alone")?.0,
        };
        eprintln!(
            "fairness: p99 {:.1} ms alone, {:.1} ms beside the backlog, {backlog_left} left of it",
            alone.p99_ms, beside.p99_ms
        );
        pairs.push(FairnessPair { alone, beside, backlog_left });
    }
    Ok(pairs)
}

async fn run(bench: &mut Bench, partitions: i32, backlog: bool) -> Result<(Times, usize)> {
    let load = Load {
        workload: Workload::Spread,
        partitions,
        messages: WARM_UP + MESSAGES,
        payload_bytes: PAYLOAD_BYTES,
    };
    let waiting = Load {
        workload: Workload::Spread,
        partitions: BACKLOG_PARTITIONS,
        messages: BACKLOG,
        payload_bytes: PAYLOAD_BYTES,
    };
    let job =
        Job { variant: Variant::Component, load, batch: Batch::DEFAULT, log_statements: false };
    let topic = bench.topics.empty(partitions).await?;
    let waiting_topic = if backlog { Some(bench.topics.filled(&waiting).await?) } else { None };
    let started = bench.start(&job, &topic).await?;
    let worked = work(bench, &job, &started, &topic, waiting_topic.as_deref()).await;
    let (left, worked) = match worked {
        Ok(left) => (left, Ok(())),
        Err(error) => (0, Err(error)),
    };
    let (database, _) = finish(started, worked)?;
    check(&job, &database).await?;
    let (p50_ms, p99_ms) = percentiles(&database).await?;
    bench.servers.drop_database(database).await?;
    Ok((Times { p50_ms, p99_ms }, left))
}

/// Sends the measured messages and returns how many messages of the backlog are left at the end.
/// Fails where the backlog ended first.
async fn work(
    bench: &Bench,
    job: &Job,
    started: &Started,
    topic: &str,
    waiting_topic: Option<&str>,
) -> Result<usize> {
    let other = match waiting_topic {
        Some(waiting_topic) => Some(flood(bench, started, waiting_topic).await?),
        None => None,
    };
    send_steadily(bench, job, started, topic, RATE).await?;
    let Some(other) = other else { return Ok(0) };
    let left = BACKLOG.saturating_sub(other.totals().await?.orders as usize);
    ensure!(
        left > 0,
        "the backlog of {BACKLOG} was worked off before the last message was sent; there was \
            nothing to be fair between"
    );
    Ok(left)
}

/// Creates another tenant with a consumer and waits until it has processed a part of its backlog.
async fn flood(bench: &Bench, started: &Started, topic: &str) -> Result<Database> {
    let control = control(&bench.servers, &started.database)?;
    let tenant = control.tenants().create("flood").await?;
    let database = started.database.of_tenant(&control, &tenant).await?;
    let group = format!("{}-flood", started.group);
    control
        .consumers()
        .create(&tenant.name, CONSUMER, &policy(topic, &group, Batch::DEFAULT)?)
        .await?;
    let component = std::fs::read(bench.programs.component(&Variant::Component))
        .context("failed to read the component")?;
    control
        .versions()
        .deploy_compiled(
            &tenant.name,
            CONSUMER,
            NewDeployment::stable("order.placed", "order", ""),
            &component,
        )
        .await?;
    until_committed(&database, UNDER_WAY).await?;
    Ok(database)
}
