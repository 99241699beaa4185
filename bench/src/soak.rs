//! A load that lasts, under a retention of minutes: does anything grow without end? One message in
//! twenty comes twice, and one in a hundred fails. The benchmark redrives or discards what stopped,
//! as operators do, so that the open messages grow only where something is wrong.

// What is watched, and its trends.
pub mod quantities;

use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use anyhow::{Context, Result, bail, ensure};
use oncebox_control::{Action, Control, JobAction, JobFilter, NewJob};
use oncebox_model::MessageStatus;
use serde::{Deserialize, Serialize};
use tokio::time::{Instant, sleep, sleep_until};
use tokio_util::sync::CancellationToken;

use self::quantities::{Sampling, Series};
use crate::{
    latency::{WARM_UP, until_committed},
    load::{ACCOUNTS, EVENT_TYPE, Order, Sender, Totals},
    run::{Bench, Job, Started, finish},
    servers::Database,
    steady::{PARTITIONS, SteadyLoad, load, maximum},
    throughput::Pace,
    variants::{
        Batch, Variant,
        host::{self, CONSUMER, policy_with},
    },
};

/// Duration of the load, where none is asked for, minutes.
pub const MINUTES: f64 = 30.0;
/// Load, as a share of what the host does at most.
const SHARE: f64 = 0.25;
/// Time of one partition of the measured class, seconds.
const BUCKET_S: i64 = 60;
/// Time for which the measured class remembers a message, seconds.
const RETENTION_S: i64 = 180;
/// Settings of the host. Each of its runs also makes the partitions of the next two buckets, so the
/// pause is far shorter than they are.
const SETTINGS: [(&str, &str); 1] = [("ONCEBOX_RETENTION_INTERVAL_MS", "5000")];
/// Further lines of the policy: payloads are kept, and a failing message is a dead letter soon.
const POLICY: &str = "payload = 'all'\nretry = { attempts_max = 3, backoff_min_ms = 1000 }";
/// Pause between two samples, and between two visits of the operator.
const INTERVAL: Duration = Duration::from_secs(10);
/// Samples between two lines of progress.
const SAMPLES_A_LINE: u32 = 6;
/// Longest time between both deliveries of a message, seconds: it is remembered for far longer.
const DUPLICATE_WITHIN_S: f64 = 5.0;
/// Pause between two looks at a job of the operator.
const JOB_LOOK: Duration = Duration::from_millis(100);
/// Longest time after the load until nothing is open any more.
const DEADLINE: Duration = Duration::from_secs(180);
const NOTE: &str = "soak";

/// Everything that a soak found.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Soak {
    /// Duration of the load, minutes.
    pub minutes: f64,
    /// Load, deliveries a second.
    pub rate: f64,
    /// Time of one partition, seconds.
    pub bucket_s: i64,
    /// Time for which a message is remembered, seconds.
    pub retention_s: i64,
    /// Different messages.
    pub messages: usize,
    /// Deliveries that the host refused as duplicates.
    pub refused: i64,
    /// Dead letters that the operator redrove.
    pub redriven: i64,
    /// Messages that the operator discarded.
    pub discarded: i64,
    /// Partitions that were removed.
    pub removals: i64,
    /// Messages that were removed with them.
    pub removed: i64,
    /// Minute of the first removal. Trends begin here.
    pub first_removal: f64,
    /// The quantities over time.
    pub series: Vec<Series>,
}

/// A fault of an order.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fault {
    /// Its account is not there when it comes: the handler rejects it. The operator makes the
    /// account and redrives the message.
    NoAccount,
    /// It has the number of an order that is there: its statement fails, also when it is tried
    /// again. The operator discards it.
    NumberTaken,
    /// No deployment takes its event type: it is parked. The operator discards it.
    Unrouted,
}

impl Fault {
    /// Returns the fault of the order with a number. One order in a hundred has one.
    fn of(number: usize) -> Option<Self> {
        match number % 300 {
            50 => Some(Self::NoAccount),
            150 => Some(Self::NumberTaken),
            250 => Some(Self::Unrouted),
            _ => None,
        }
    }

    /// Returns whether the order has an effect in the end.
    fn has_effect(self) -> bool {
        self == Self::NoAccount
    }
}

/// Returns the orders of a load with their faults.
fn orders(job: &Job) -> Vec<Order> {
    let mut orders = job.load.orders();
    for order in &mut orders {
        match Fault::of(order.number) {
            Some(Fault::NoAccount) => order.account = missing_account(order.number),
            Some(Fault::NumberTaken) => order.order = 0,
            Some(Fault::Unrouted) | None => {}
        }
    }
    orders
}

/// Returns the account of an order whose account is missing at first: one of its own.
fn missing_account(number: usize) -> i32 {
    ACCOUNTS + number as i32
}

/// Returns the totals after each order without a fault, and each that is redriven, is applied once.
fn expected(orders: &[Order]) -> Totals {
    let applied =
        orders.iter().filter(|order| Fault::of(order.number).is_none_or(Fault::has_effect));
    let (count, balance) =
        applied.fold((0, 0), |(count, balance), order| (count + 1, balance + order.amount));
    Totals { orders: count, bookings: count, balance }
}

/// Runs the load for some minutes and watches.
pub async fn measure(bench: &mut Bench, pace: &mut Pace, minutes: f64) -> Result<Soak> {
    let rate = SHARE * maximum(bench, pace).await?;
    let messages = WARM_UP + (rate * minutes * 60.0 / 1.05) as usize;
    let job = Job {
        variant: Variant::Component,
        load: load(messages),
        batch: Batch::DEFAULT,
        log_statements: false,
    };
    let topic = bench.topics.empty(PARTITIONS).await?;
    let group = format!("soak-{topic}");
    let database = bench.servers.database(true).await?;
    database.execute(short_retention()).await?;
    let policy = policy_with(&topic, &group, Batch::DEFAULT, POLICY)?;
    host::create(&bench.servers, &bench.programs, &database, &policy).await?;
    let orders = orders(&job);
    let totals = expected(&orders);
    let started = bench.start_host(database, &group, &SETTINGS)?;
    let worked = work(bench, &job, &started, &topic, rate, orders).await;
    let (seen, worked) = match worked {
        Ok(seen) => (Some(seen), Ok(())),
        Err(error) => (None, Err(error)),
    };
    let (database, _) = finish(started, worked).context("the soak")?;
    let Some((operator, series)) = seen else { bail!("the soak has no figures") };
    let found = database.totals().await?;
    ensure!(found == totals, "the effects are wrong: {found:?} instead of {totals:?}");
    let figures = figures(&database).await?;
    bench.servers.drop_database(database).await?;
    ensure!(figures.removals > 0, "no partition was removed; let the soak take more `--minutes`");
    Ok(Soak {
        minutes,
        rate,
        bucket_s: BUCKET_S,
        retention_s: RETENTION_S,
        messages,
        refused: figures.refused,
        redriven: operator.redriven,
        discarded: operator.discarded,
        removals: figures.removals,
        removed: figures.removed,
        first_removal: figures.first_removal,
        series,
    })
}

/// Returns the statement that gives the class short times. No partition of the class is there yet.
fn short_retention() -> String {
    format!(
        "UPDATE oncebox.retention_class SET bucket = '{BUCKET_S} seconds', \
            retention = '{RETENTION_S} seconds' WHERE retention_class = 1"
    )
}

/// Sends the load, watches, and does an operator's work, until everything that was sent is settled.
async fn work(
    bench: &Bench,
    job: &Job,
    started: &Started,
    topic: &str,
    rate: f64,
    orders: Vec<Order>,
) -> Result<(Operator, Vec<Series>)> {
    let sender =
        || Sender::new(bench.servers.kafka.bootstrap(), topic, &job.load, &[("linger.ms", "0")]);
    let (warm_up, sender) = (sender()?, sender()?);
    let first = orders[..WARM_UP].to_vec();
    tokio::task::spawn_blocking(move || {
        first.iter().try_for_each(|order| warm_up.send(order, NOTE))?;
        warm_up.flush()
    })
    .await??;
    until_committed(&started.database, WARM_UP as i64).await?;

    let within = (DUPLICATE_WITHIN_S * rate) as usize;
    // The first orders are sent. One of them that comes again is a duplicate as any other.
    let deliveries: Vec<_> = job.load.deliveries(within).into_iter().skip(WARM_UP).collect();
    let (count, reached) = (deliveries.len(), Arc::new(AtomicUsize::new(WARM_UP)));
    let mut operator = Operator::new(bench, &started.database, reached.clone())?;
    let sending = SteadyLoad::start(sender, count, rate, move |sender, nth| {
        let order = &orders[deliveries[nth]];
        reached.fetch_max(order.number + 1, Ordering::Relaxed);
        let event_type = match Fault::of(order.number) {
            Some(Fault::Unrouted) => "order.unknown",
            _ => EVENT_TYPE,
        };
        sender.send_as(order, NOTE, event_type)
    });
    let (postmaster, _) = bench.servers.pids()?;
    let mut sampling = Sampling::new(&started.database, started.child.pid(), postmaster);
    mark_begin(&started.database).await?;
    let is_sent = CancellationToken::new();
    let sending = async {
        sending.finish().await?;
        is_sent.cancel();
        anyhow::Ok(())
    };
    tokio::try_join!(sending, attend(&mut sampling, &mut operator, &is_sent))?;
    bench.wait(job, started, topic).await?;
    operator.until_nothing_is_open(job.load.messages).await?;
    Ok((operator, sampling.finish()))
}

/// Takes a sample and does the operator's work at intervals, until all is sent.
async fn attend(
    sampling: &mut Sampling,
    operator: &mut Operator,
    is_sent: &CancellationToken,
) -> Result<()> {
    let begun = Instant::now();
    for nth in 0.. {
        tokio::select! {
            () = sleep_until(begun + INTERVAL * nth) => {}
            () = is_sent.cancelled() => return Ok(()),
        }
        sampling.take(begun.elapsed().as_secs_f64() / 60.0).await?;
        let reached = operator.reached.load(Ordering::Relaxed);
        operator.visit(reached).await?;
        if nth % SAMPLES_A_LINE == 0 {
            eprintln!(
                "soak: minute {:.0}, {reached} messages sent, {} redriven, {} discarded",
                begun.elapsed().as_secs_f64() / 60.0,
                operator.redriven,
                operator.discarded
            );
        }
    }
    Ok(())
}

/// An operator, who looks after what does not continue by itself.
struct Operator {
    control: Control,
    tenant: String,
    database: Database,
    /// Number after that of the last order that is sent.
    reached: Arc<AtomicUsize>,
    /// Number of the first order whose missing account is not made yet.
    next: usize,
    redriven: i64,
    discarded: i64,
}

impl Operator {
    fn new(bench: &Bench, database: &Database, reached: Arc<AtomicUsize>) -> Result<Self> {
        Ok(Self {
            control: host::control(&bench.servers, database)?,
            tenant: bench.servers.tenant.name.clone(),
            database: database.clone(),
            reached,
            next: 0,
            redriven: 0,
            discarded: 0,
        })
    }

    /// Makes the accounts that orders up to a number miss, redrives those orders, and discards the
    /// messages that cannot succeed.
    async fn visit(&mut self, orders: usize) -> Result<()> {
        let accounts: Vec<_> = (self.next..orders)
            .filter(|number| Fault::of(*number) == Some(Fault::NoAccount))
            .map(|number| missing_account(number).to_string())
            .collect();
        self.next = self.next.max(orders);
        if !accounts.is_empty() {
            let make = format!(
                "INSERT INTO {}.account (id) VALUES ({}) ON CONFLICT DO NOTHING",
                self.database.schema,
                accounts.join("), (")
            );
            self.database.execute(make).await?;
        }
        self.redriven += self.act(Action::Redrive, MessageStatus::FailedTerminal, "reject").await?;
        for (status, reason) in [
            (MessageStatus::FailedTerminal, "sql_error"),
            (MessageStatus::FailedTerminal, "other"),
            (MessageStatus::Parked, "no_route"),
        ] {
            self.discarded += self.act(Action::Discard, status, reason).await?;
        }
        Ok(())
    }

    /// Acts on all messages of a status and a reason. Returns how many there were.
    async fn act(&self, action: Action, status: MessageStatus, reason: &str) -> Result<i64> {
        let filter = JobFilter {
            status: Some(status.as_str().to_owned()),
            reason: Some(reason.to_owned()),
            ..JobFilter::default()
        };
        let new = NewJob {
            action: JobAction::Inbox(action),
            consumer: Some(CONSUMER.to_owned()),
            filter,
            reason: "benchmark".to_owned(),
            rate: None,
        };
        let jobs = self.control.jobs();
        let mut job = jobs.start(&self.tenant, &new).await?;
        while job.state == "running" {
            sleep(JOB_LOOK).await;
            job = jobs.show(&self.tenant, job.job_id).await?;
        }
        ensure!(job.state == "done", "job {} is {}: {:?}", job.job_id, job.state, job.note);
        Ok(job.changed)
    }

    /// Visits until no message is open. A message that is open for another reason than a fault of
    /// its order stays, and is an error.
    async fn until_nothing_is_open(&mut self, orders: usize) -> Result<()> {
        const OPEN: &str = "SELECT count(*), coalesce(string_agg(DISTINCT \
                status || coalesce(' (' || reason || ')', ''), ', '), '') FROM oncebox.inbox \
            WHERE status <> 'completed' AND status NOT IN ('skipped', 'discarded')";
        let deadline = Instant::now() + DEADLINE;
        loop {
            self.visit(orders).await?;
            let mut connection = self.database.connect().await?;
            let (open, which): (i64, String) =
                sqlx::query_as(OPEN).fetch_one(&mut connection).await?;
            if open == 0 {
                break;
            }
            ensure!(Instant::now() < deadline, "{open} messages are still open: {which}");
            sleep(Duration::from_secs(1)).await;
        }
        self.control.pool.close().await;
        Ok(())
    }
}

/// Remembers the time at which the load begins, by the clock of the database.
async fn mark_begin(database: &Database) -> Result<()> {
    database.execute("CREATE TABLE public.soak AS SELECT clock_timestamp() AS begun_at").await
}

/// What the database says at the end.
#[derive(sqlx::FromRow)]
struct Figures {
    refused: i64,
    removals: i64,
    removed: i64,
    first_removal: f64,
}

/// Reads the figures, and checks that no transaction left its guard behind.
async fn figures(database: &Database) -> Result<Figures> {
    const FIGURES: &str = "SELECT \
        coalesce((SELECT sum(refused) FROM oncebox.duplicates_refused), 0)::bigint AS refused, \
        count(*) FILTER (WHERE state = 'dropped') AS removals, \
        coalesce(sum(removed), 0)::bigint AS removed, \
        coalesce(extract(epoch FROM min(dropped_at) FILTER (WHERE removed > 0) \
            - (SELECT begun_at FROM public.soak)), 0)::float8 / 60 AS first_removal \
        FROM oncebox.removal";
    let mut connection = database.connect().await?;
    let guards: i64 =
        sqlx::query_scalar("SELECT count(*) FROM oncebox.guard").fetch_one(&mut connection).await?;
    ensure!(guards == 0, "{guards} transactions left their guards behind");
    Ok(sqlx::query_as(FIGURES).fetch_one(&mut connection).await?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_order_in_a_hundred_has_a_fault_and_a_third_of_those_an_effect() {
        let job = Job {
            variant: Variant::Component,
            load: load(3_000),
            batch: Batch::DEFAULT,
            log_statements: false,
        };
        let orders = orders(&job);
        let faults: Vec<_> = orders.iter().filter_map(|order| Fault::of(order.number)).collect();
        assert_eq!(faults.len(), 30);
        let totals = expected(&orders);
        assert_eq!((totals.orders, totals.bookings), (2_980, 2_980));
        let missing: Vec<_> = orders.iter().filter(|order| order.account >= ACCOUNTS).collect();
        assert_eq!(missing.len(), 10);
        assert!(missing.iter().all(|order| order.account == missing_account(order.number)));
        assert_eq!(orders.iter().filter(|order| order.order != order.number).count(), 10);
        // A second delivery has the payload of the first, and no order with a fault has one.
        assert!(job.load.deliveries(10).len() > orders.len());
        assert!((0..3_000).step_by(20).all(|number| Fault::of(number).is_none()));
        assert!(Fault::of(0).is_none() && (0..WARM_UP).all(|number| Fault::of(number).is_none()));
    }
}
