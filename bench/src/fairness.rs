//! How long a tenant's messages take, a few a second, on a host of its own and on one where another
//! tenant has a backlog that outlasts the run. Each pair is measured one right after the other.

use anyhow::{Context, Result, ensure};
use oncebox_inbox::{Ask, Class, HostBounds, NewDeployment, Scheduler};
use serde::{Deserialize, Serialize};

use crate::{
    latency::{WARM_UP, percentiles, send_steadily, until_committed},
    load::{Load, Workload},
    run::{Bench, Job, Started, check, finish},
    servers::Database,
    throughput::PAYLOAD_BYTES,
    variants::{
        Batch, Variant,
        host::{CONSUMER, admin, policy},
    },
};

/// Messages that wait for the other tenant.
const BACKLOG: usize = 200_000;
/// Partitions they wait in.
const BACKLOG_PARTITIONS: i32 = 8;
/// Messages a second.
const RATE: f64 = 25.0;
/// Messages that are measured.
const MESSAGES: usize = 300;
/// Messages of the backlog that are done before the clock runs.
const UNDER_WAY: i64 = 2_000;

/// How long messages took.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub struct Times {
    /// Median, milliseconds.
    pub p50_ms: f64,
    /// All but one in a hundred were faster, milliseconds.
    pub p99_ms: f64,
}

/// Two runs, one right after the other.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub struct Pair {
    /// The tenant has the host for itself.
    pub alone: Times,
    /// Another tenant has a backlog.
    pub beside: Times,
    /// Messages of the backlog that waited still when the last of the others was done.
    pub backlog_left: usize,
}

/// Nanoseconds of a processor that letting one transaction in and out takes, on a host with so many
/// busy tenants.
async fn admission_ns(tenants: i32) -> f64 {
    const TIMES: u32 = 100_000;
    let scheduler = Scheduler::new(HostBounds::new(32, 4 << 30));
    let ask = |tenant_id, messages| Ask {
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

/// A pair for each round; which of the two comes first changes.
pub async fn measure(bench: &mut Bench, partitions: i32, rounds: usize) -> Result<Vec<Pair>> {
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
        pairs.push(Pair { alone, beside, backlog_left });
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

/// The answer is how many messages of the backlog were left at the end.
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

/// Another tenant with its consumer, at work on its backlog.
async fn flood(bench: &Bench, started: &Started, topic: &str) -> Result<Database> {
    let admin = admin(&bench.servers, &started.database)?;
    let tenant = admin.create_tenant("flood").await?;
    let database = started.database.of_tenant(&admin, &tenant).await?;
    let group = format!("{}-flood", started.group);
    admin.create_consumer(&tenant.name, CONSUMER, &policy(topic, &group, Batch::DEFAULT)?).await?;
    let component = std::fs::read(bench.programs.component(&Variant::Component))
        .context("failed to read the component")?;
    admin
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
