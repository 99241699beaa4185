//! The removal of a large time partition under load. A host processes messages at a tenth of its
//! maximum for six minutes. From the second minute on its retention removes a partition. The latency
//! before, meanwhile and in the last minute shows the effect on the other messages.

// The latency of each moment, and the durations of the steps.
pub mod figures;
// The stages of a removal, as the database shows them.
mod watch;

use std::time::Duration;

use anyhow::{Context, Result, bail};
use oncebox_devkit::output::number;
use sqlx::AssertSqlSafe;
use tokio::time::{Instant, sleep, sleep_until};

use self::{
    figures::{MINUTE, MINUTES, RemovalRound, Stage, When, durations, moments},
    watch::{removed, watch},
};
use crate::{
    filling::{self, Period, Progress, check_room},
    latency::{WARM_UP, until_committed},
    load::{Order, Sender},
    measure::now_us,
    run::{Bench, Job, Started, check, finish},
    servers::Database,
    steady::{PARTITIONS, SteadyLoad, load, maximum},
    throughput::Pace,
    variants::{
        Batch, Variant,
        host::{self, policy},
    },
};

/// Load, as a share of what the host does at most when all is there at once. A message that comes
/// alone costs several times as much: a quarter uses two cores up before the removal begins.
const SHARE: f64 = 0.1;
/// Pause between the first messages and the load, in which the host comes to rest.
const REST: Duration = Duration::from_secs(2);
/// Buckets between the present partition and the removed one, which is due by the real retention.
const BACK: i32 = 5;
/// Settings of the measured host: it looks every second for what is due.
const SETTINGS: [(&str, &str); 1] = [("ONCEBOX_RETENTION_INTERVAL_MS", "1000")];
/// Keeps the partition from being due until its minute begins.
const NOT_YET: &str =
    "UPDATE oncebox.retention_class SET retention = '10 years' WHERE retention_class = 1";
const DUE: &str =
    "UPDATE oncebox.retention_class SET retention = '7 days' WHERE retention_class = 1";

/// Measures some rounds, each with a partition of `rows` messages on a fresh database.
pub async fn measure(
    bench: &mut Bench,
    pace: &mut Pace,
    rows: u64,
    rounds: usize,
) -> Result<Vec<RemovalRound>> {
    check_room(&bench.servers, rows, "--removal-rows").await?;
    let rate = SHARE * maximum(bench, pace).await?;
    let mut measured = Vec::new();
    for number in 1..=rounds {
        let what = || format!("round {number} of the removal");
        let round = round(bench, rate, rows as i64).await.with_context(what)?;
        let p99 = |when| round.moment(when).map_or(f64::NAN, |moment| moment.p99_ms);
        eprintln!(
            "round {number} of {rounds}, removal: {:.1} s, p99 {:.1} ms before, {:.1} ms in its \
                minute, {:.1} ms after",
            round.seconds(),
            p99(When::Before),
            p99(When::Minute),
            p99(When::After)
        );
        measured.push(round);
    }
    Ok(measured)
}

async fn round(bench: &mut Bench, rate: f64, rows: i64) -> Result<RemovalRound> {
    let topic = bench.topics.empty(PARTITIONS).await?;
    let group = format!("removal-{topic}");
    let (database, period) = filled(bench, &topic, &group, rows).await?;
    let messages = WARM_UP + (f64::from(MINUTES) * MINUTE.as_secs_f64() * rate) as usize;
    let job = Job {
        variant: Variant::Component,
        load: load(messages),
        batch: Batch::DEFAULT,
        log_statements: false,
    };
    let started = bench.start_host(database, &group, &SETTINGS)?;
    let worked = work(bench, &job, &started, &topic, rate, &period).await;
    let (seen, worked) = match worked {
        Ok(seen) => (Some(seen), Ok(())),
        Err(error) => (None, Err(error)),
    };
    let (database, _) = finish(started, worked)?;
    check(&job, &database).await?;
    let Some((begun, looks)) = seen else { bail!("the round has no figures") };
    let removed = removed(&database, &period, rows).await?;
    let times = times(&database).await?;
    bench.servers.drop_database(database).await?;
    Ok(RemovalRound {
        rate,
        rows,
        moved: removed.moved,
        bytes: removed.bytes,
        moments: moments(times, begun, (removed.began_us, removed.dropped_us)),
        steps: durations(&looks),
    })
}

/// Creates a database with the consumer, another one, and a full partition. It is due by the
/// retention of its class, which is longer until the load has run for a minute.
async fn filled(
    bench: &mut Bench,
    topic: &str,
    group: &str,
    rows: i64,
) -> Result<(Database, Period)> {
    let database = bench.servers.database(true).await?;
    let own = policy(topic, group, Batch::DEFAULT)?;
    let consumer = host::create(&bench.servers, &bench.programs, &database, &own).await?;
    let control = host::control(&bench.servers, &database)?;
    let other = policy(filling::TOPIC, &format!("{group}-other"), Batch::DEFAULT)?;
    let tenant = &bench.servers.tenant.name;
    let other = control.consumers().create(tenant, "invoices", &other).await?;
    control.pool.close().await;
    database.execute(NOT_YET).await?;

    let mut connection = filling::begin(&bench.servers, &database).await?;
    let period = Period::back(&mut connection, BACK).await?;
    let consumers = [consumer, other.consumer_id];
    let mut progress = Progress::new(format!("partition of {} rows", number(rows)), rows);
    period.make(&mut connection).await?;
    period.fill(&mut connection, 0..rows, &consumers, &mut progress).await?;
    eprintln!("the partition gets its indexes and its statistics");
    period.attach(&mut connection).await?;
    period.settle(&mut connection).await?;
    filling::end(&bench.servers, &database).await?;
    Ok((database, period))
}

/// Sends the load, makes the partition due after a minute, and watches its removal. Returns the
/// time at which the load began, and the stages with the times at which they were first seen,
/// microseconds.
async fn work(
    bench: &Bench,
    job: &Job,
    started: &Started,
    topic: &str,
    rate: f64,
    period: &Period,
) -> Result<(f64, Vec<(f64, Stage)>)> {
    let sender =
        || Sender::new(bench.servers.kafka.bootstrap(), topic, &job.load, &[("linger.ms", "0")]);
    let (warm_up, sender) = (sender()?, sender()?);
    let mut orders = job.load.orders();
    let rest: Vec<Order> = orders.split_off(WARM_UP);
    tokio::task::spawn_blocking(move || {
        orders.iter().try_for_each(|order| warm_up.send(order, "0"))?;
        warm_up.flush()
    })
    .await??;
    until_committed(&started.database, WARM_UP as i64).await?;
    sleep(REST).await;

    let (begun, begun_us) = (Instant::now(), now_us());
    let sending = SteadyLoad::start(sender, rest.len(), rate, move |sender, number| {
        sender.send(&rest[number], &format!("{:.0}", now_us()))
    });
    let become_due = async {
        sleep_until(begun + MINUTE).await;
        started.database.execute(DUE).await
    };
    let watching = watch(&started.database, period, begun + MINUTES * MINUTE);
    let ((), (), looks) = tokio::try_join!(sending.finish(), become_due, watching)?;
    bench.wait(job, started, topic).await?;
    Ok((begun_us, looks))
}

/// Returns the time at which each message of the load was sent, microseconds, and the milliseconds
/// until its commit.
async fn times(database: &Database) -> Result<Vec<(f64, f64)>> {
    let sql = format!(
        "SELECT sent, extract(epoch FROM committed)::float8 * 1e3 - sent / 1e3 FROM (\
         SELECT split_part(note, ' ', 1)::float8 AS sent, \
            pg_xact_commit_timestamp(xmin) AS committed \
         FROM {}.orders WHERE note NOT LIKE '0 %') t",
        database.schema
    );
    Ok(sqlx::query_as(AssertSqlSafe(sql)).fetch_all(&mut database.connect().await?).await?)
}
