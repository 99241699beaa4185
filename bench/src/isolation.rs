//! The effect of other tenants on one tenant, the victim, which is under a steady load. Runs come
//! in pairs. In one run the victim is beside a polite tenant with more messages than it can
//! process. In the other it is beside a tenant with that load and hostile handlers, or beside many
//! with slow handlers.
//!
//! All are consumers of one host: its sessions, its budget of connections, its runtime, one
//! database. There is no broker, since it would not differ between the runs: records are handed
//! over when they are due.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use anyhow::{Context, Result};
use oncebox_control::{Control, Tenant};
use oncebox_inbox::{Budget, ConsumerInbox, PartitionInbox, SessionSettings, Sessions, retry};
use oncebox_model::{
    handler::{Handler, Handlers},
    policy::Policy,
    record::Record,
};
use oncebox_runtime::{HandlerSettings, RuntimeConfig, WasmRuntime};
use oncebox_tests::{
    guests::{self, End, Step, component, encode, execute, spin, trap},
    inbox::PlainHandlers,
};
use serde::{Deserialize, Serialize};
use tokio::{
    task::JoinHandle,
    time::{Instant, sleep},
};
use tokio_util::sync::CancellationToken;

use crate::{measure::Machine, run::Bench, variants::host::control};

/// Load of the victim, messages a second, all partitions together.
const RATE: f64 = 200.0;
/// Load of the victim beside slow tenants, messages a second.
const RATE_BESIDE_SLOW: f64 = 50.0;
/// Partitions of the victim and of one neighbour.
const PARTITIONS: i32 = 2;
/// Numbers of slow tenants. They take few of the host's places, about as many as are kept for
/// others, or more than all places.
const SLOW: [usize; 4] = [1, 4, 5, 40];
/// Partitions of all slow tenants together, at least: more than the host has places.
const SLOW_PARTITIONS: usize = 40;
/// Time at the start that is not measured. Versions are instantiated for the first time,
/// connections are opened, and the breaker of a version that always fails collects its failures.
const WARM_UP: Duration = Duration::from_secs(2);
/// Largest share of the processors' time that other machines may take before a pair is measured
/// again. A victim waits for them as for a neighbour, and one in a hundred messages soon has.
const STOLEN_MAX: f64 = 0.03;
/// Attempts at a pair. After the last, the attempt with the least stolen time counts.
const TRIES_MAX: usize = 5;
/// Connections of the host: the default of a host.
const CONNECTIONS: usize = 32;

const TABLES: &str = "CREATE TABLE orders (id text PRIMARY KEY, at timestamptz NOT NULL DEFAULT \
    now()); \
    CREATE TABLE hot (id int PRIMARY KEY, n bigint NOT NULL); INSERT INTO hot VALUES (1, 0);";

const POLICY: &str = "topics = ['t']\nack = 'after_commit'\nidentity = { id = [{ header = 'id' }], \
    event_type = ['topic'] }";

/// Deadline of a handler that is not slow, milliseconds.
const DEADLINE_MS: u32 = 1_000;
/// Deadline of slow handlers, milliseconds; each run of one uses it up.
const SLOW_DEADLINE_MS: u32 = 5_000;

/// The victim's figures beside one kind of attack.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Isolation {
    /// The neighbour's deed, by its name.
    pub deed: String,
    /// Pairs of runs, one a round.
    pub pairs: Vec<IsolationPair>,
}

/// Two runs of the victim, one right after the other.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub struct IsolationPair {
    /// The victim's figures beside a polite tenant.
    pub polite: Felt,
    /// The victim's figures beside the attacker.
    pub hostile: Felt,
    /// Share of the processors' time that other machines took during both runs.
    pub stolen: f64,
}

/// The victim's throughput and latency in one run.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub struct Felt {
    /// Committed messages a second.
    pub rate: f64,
    /// Median time from due to committed, milliseconds.
    pub p50_ms: f64,
    /// 99th percentile of the time from due to committed, milliseconds.
    pub p99_ms: f64,
}

impl Isolation {
    /// Returns a figure beside the attacker as a multiple of that beside the polite tenant: the
    /// median over the pairs.
    pub fn ratio(&self, figure: impl Fn(&Felt) -> f64) -> f64 {
        median(self.pairs.iter().map(|pair| figure(&pair.hostile) / figure(&pair.polite)))
    }

    /// Returns the median of a figure over the pairs.
    pub fn median(&self, figure: impl Fn(&IsolationPair) -> f64) -> f64 {
        median(self.pairs.iter().map(figure))
    }
}

fn median(values: impl Iterator<Item = f64>) -> f64 {
    let mut values: Vec<_> = values.collect();
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}

/// Name of the deed of a neighbour without messages. Without it, the ratios could not separate a
/// victim that gains from an idle neighbour from one that is unaffected.
const NOTHING: &str = "nothing at all";

/// Measures every attack whose name contains `name`, in a pair for each round. The order within the
/// pairs alternates.
pub async fn measure(
    bench: &mut Bench,
    name: &str,
    rounds: usize,
    seconds: f64,
) -> Result<Vec<Isolation>> {
    let database = bench.servers.database(true).await?;
    let house = House::new(control(&bench.servers, &database)?).await?;
    let mut found: BTreeMap<usize, Vec<IsolationPair>> = BTreeMap::new();
    let deeds: Vec<_> = deeds().into_iter().filter(|deed| deed.name.contains(name)).collect();
    for round in 0..rounds {
        for (number, deed) in deeds.iter().enumerate() {
            let mut quietest: Option<IsolationPair> = None;
            for _ in 0..TRIES_MAX {
                let pair = house.pair(deed, (round + number) % 2 == 0, seconds).await;
                let pair = pair.with_context(|| format!("beside {}", deed.name))?;
                eprintln!("isolation, {}: {pair:?}", deed.name);
                let is_quiet = pair.stolen <= STOLEN_MAX;
                quietest = quietest.filter(|known| known.stolen <= pair.stolen).or(Some(pair));
                if is_quiet {
                    break;
                }
            }
            found.entry(number).or_default().extend(quietest);
        }
    }
    house.control.pool.close().await;
    bench.servers.drop_database(database).await?;
    Ok(found
        .into_iter()
        .map(|(number, pairs)| Isolation { deed: deeds[number].name.clone(), pairs })
        .collect())
}

/// The neighbours of a victim.
struct Deed {
    name: String,
    /// Component that the neighbours run for each message; none where they have no messages.
    component: Option<Vec<u8>>,
    tenants: usize,
    partitions: i32,
    deadline_ms: u32,
    /// Load of the victim, messages a second.
    rate: f64,
}

impl Deed {
    fn of_one(name: &str, component: Option<Vec<u8>>) -> Self {
        let (tenants, partitions) = (1, PARTITIONS);
        Self {
            name: name.to_owned(),
            component,
            tenants,
            partitions,
            deadline_ms: DEADLINE_MS,
            rate: RATE,
        }
    }

    fn of_slow(tenants: usize) -> Self {
        let name = format!("{tenants} slow tenant{}", if tenants == 1 { "" } else { "s" });
        let partitions = (SLOW_PARTITIONS / tenants).max(PARTITIONS as usize) as i32;
        let component = Some(component(&[spin()], &End::Ok));
        Self {
            name,
            component,
            tenants,
            partitions,
            deadline_ms: SLOW_DEADLINE_MS,
            rate: RATE_BESIDE_SLOW,
        }
    }

    /// Returns the time at the start that is not measured. The host knows which tenants are slow
    /// only after handlers have reached their deadlines twice.
    fn warm_up(&self) -> Duration {
        WARM_UP + 2 * Duration::from_millis(u64::from(self.deadline_ms))
    }
}

fn deeds() -> Vec<Deed> {
    let does = |steps: &[Step]| Some(component(steps, &End::Ok));
    let many = |times, step: Step| Step::Repeat(times, Box::new(step));
    let recursive = guests::text(&[Step::Wat("(call $deep)".into())], &End::Ok).replacen(
        "(memory ",
        "(func $deep (call $deep)) (memory ",
        1,
    );
    let grow = "(loop $more (memory.fill (i32.mul (memory.size) (i32.const 65536)) (i32.const 1) \
        (i32.const 0)) \
        (br_if $more (i32.ne (memory.grow (i32.const 16)) (i32.const -1)))) unreachable";
    let of_one = [
        (NOTHING, None),
        ("loops to the deadline", does(&[spin()])),
        ("100,000 statements", does(&[many(100_000, execute("SELECT 1"))])),
        ("huge results", does(&[Step::Query("SELECT repeat('x', 32000000)".into())])),
        ("memory growth", does(&[Step::Wat(grow.into())])),
        ("lock waits", does(&[execute("UPDATE hot SET n = n + 1"), spin()])),
        ("log floods", does(&[many(100_000, Step::Log("x".repeat(1_000)))])),
        ("always failing", does(&[trap()])),
        ("deep recursion", Some(encode(&recursive))),
    ];
    of_one
        .into_iter()
        .map(|(name, component)| Deed::of_one(name, component))
        .chain(SLOW.map(Deed::of_slow))
        .collect()
}

/// The host and its tenants.
struct House {
    control: Control,
    runtime: WasmRuntime,
    /// Component of the victim and of a polite neighbour.
    polite: Vec<u8>,
    victim: Tenant,
    neighbours: Vec<Tenant>,
}

impl House {
    async fn new(control: Control) -> Result<Self> {
        let runtime = WasmRuntime::new(RuntimeConfig::default())?;
        let victim = control.tenants().create("victim").await?;
        control.tenant_databases().apply_migration(&victim, "tables", TABLES).await?;
        let mut neighbours = Vec::new();
        for number in 0..deeds().iter().map(|deed| deed.tenants).max().unwrap_or_default() {
            let neighbour = control.tenants().create(&format!("neighbour-{number}")).await?;
            control.tenant_databases().apply_migration(&neighbour, "tables", TABLES).await?;
            neighbours.push(neighbour);
        }
        let polite = component(
            &[
                Step::ExecuteWithId("INSERT INTO orders (id) VALUES ($1)".to_owned()),
                Step::GiveUpOnError,
            ],
            &End::Ok,
        );
        Ok(Self { control, runtime, polite, victim, neighbours })
    }

    /// Measures both runs of a pair, in either order.
    async fn pair(&self, deed: &Deed, polite_first: bool, seconds: f64) -> Result<IsolationPair> {
        let before = Machine::now();
        let polite = Deed {
            rate: deed.rate,
            deadline_ms: deed.deadline_ms,
            ..Deed::of_one("polite", Some(self.polite.clone()))
        };
        let (polite, hostile) = if polite_first {
            (self.run(&polite, seconds).await?, self.run(deed, seconds).await?)
        } else {
            let hostile = self.run(deed, seconds).await?;
            (self.run(&polite, seconds).await?, hostile)
        };
        Ok(IsolationPair { polite, hostile, stolen: Machine::now().stolen_since(before) })
    }

    /// Returns the victim's figures beside neighbours with more messages than they can process, or
    /// with none.
    async fn run(&self, deed: &Deed, seconds: f64) -> Result<Felt> {
        let budget = Budget::new(CONNECTIONS);
        let victim = self.consumer(&self.victim, &self.polite, DEADLINE_MS, &budget).await?;
        let stop = CancellationToken::new();
        let mut beside = Vec::new();
        if let Some(component) = &deed.component {
            for neighbour in &self.neighbours[..deed.tenants] {
                let neighbour =
                    self.consumer(neighbour, component, deed.deadline_ms, &budget).await?;
                beside.extend(self.work(&neighbour, deed.partitions, f64::INFINITY, &stop).await?);
            }
        }
        let looked_at = self.work(&victim, PARTITIONS, deed.rate, &stop).await?;
        let warm_up = deed.warm_up();
        sleep(warm_up + Duration::from_secs_f64(seconds)).await;
        stop.cancel();
        let latencies = joined(looked_at).await?;
        joined(beside).await?;
        felt(latencies, warm_up, seconds)
    }

    async fn consumer(
        &self,
        tenant: &Tenant,
        component: &[u8],
        deadline_ms: u32,
        budget: &Arc<Budget>,
    ) -> Result<Arc<ConsumerInbox>> {
        let policy =
            Policy::parse(&format!("{POLICY}\nlimits = {{ deadline_ms = {deadline_ms} }}"))?;
        let name = format!("c{:08x}", rand::random::<u32>());
        let row = self.control.consumers().create(&tenant.name, &name, &policy).await?;
        let loaded = self.runtime.load(component).await?;
        let settings = HandlerSettings {
            version: 1,
            limits: policy.limits.clone(),
            config: Vec::new(),
            random_key: [1; 32],
            may_emit: false,
        };
        let handler: Arc<dyn Handler> = Arc::new(self.runtime.handler(&loaded, settings));
        let handlers: Arc<dyn Handlers> = PlainHandlers::of(handler);
        let sessions = Sessions::of(
            self.control.tenant_databases().session_target(tenant)?,
            &SessionSettings::default(),
            budget.clone(),
        );
        Ok(ConsumerInbox::new(
            row.consumer_id,
            tenant.name.clone(),
            name,
            policy,
            "bench".to_owned(),
            sessions,
            handlers,
        ))
    }

    /// Starts a consumer's partitions and retry workers, as a host does.
    async fn work(
        &self,
        consumer: &Arc<ConsumerInbox>,
        partitions: i32,
        rate: f64,
        stop: &CancellationToken,
    ) -> Result<Vec<Worker>> {
        let mut workers = Vec::new();
        for number in 0..partitions {
            let partition = PartitionInbox::open(consumer.clone(), "t", number, 0).await?;
            workers.push(tokio::spawn(consume(
                partition,
                number,
                rate / f64::from(partitions),
                stop.clone(),
            )));
        }
        for _ in 0..consumer.policy.retry.workers {
            let (consumer, stop) = (consumer.clone(), stop.clone());
            workers.push(tokio::spawn(async move {
                retry::work(consumer, stop).await;
                Vec::new()
            }));
        }
        Ok(workers)
    }
}

/// Time of a message's commit since the start, and its lateness. A message that was due and never
/// committed has no time, and is late by the time until the end.
type Late = (Option<Duration>, Duration);
type Worker = JoinHandle<Vec<Late>>;

async fn joined(workers: Vec<Worker>) -> Result<Vec<Late>> {
    let mut all = Vec::new();
    for worker in workers {
        all.extend(worker.await?);
    }
    Ok(all)
}

/// Hands records over when they are due; all that are due form one batch, up to `batch_max`.
async fn consume(
    mut partition: PartitionInbox,
    number: i32,
    rate: f64,
    stop: CancellationToken,
) -> Vec<Late> {
    let start = Instant::now();
    let due = |offset: usize| {
        if rate.is_finite() {
            Duration::from_secs_f64(offset as f64 / rate)
        } else {
            Duration::ZERO
        }
    };
    let mut late = Vec::new();
    while !stop.is_cancelled() {
        let next = late.len();
        tokio::time::sleep_until(start + due(next)).await;
        let count = (1..partition.batch_max())
            .take_while(|more| due(next + more) <= start.elapsed())
            .count()
            + 1;
        let records: Vec<_> = (next..next + count).map(|offset| record(number, offset)).collect();
        match partition.process(&records).await {
            Ok(settled) => {
                let now = start.elapsed();
                late.extend(
                    (next..next + settled)
                        .map(|offset| (Some(now), now.saturating_sub(due(offset)))),
                );
            }
            Err(error) => sleep(error.retry_after().unwrap_or(Duration::from_millis(50))).await,
        }
    }
    let end = start.elapsed();
    if rate.is_finite() {
        late.extend(
            (late.len()..).map(due).take_while(|due| *due < end).map(|due| (None, end - due)),
        );
    }
    partition.close().await;
    late
}

fn record(partition: i32, offset: usize) -> Record {
    Record {
        topic: "t".into(),
        topic_id: None,
        partition,
        offset: offset as i64,
        timestamp_ms: 1_700_000_000_000,
        key: None,
        headers: vec![(
            "id".to_owned(),
            format!("{partition}-{offset}-{:016x}", rand::random::<u64>()).into_bytes(),
        )],
        payload: Some(b"{}".to_vec()),
    }
}

fn felt(all: Vec<Late>, warm_up: Duration, seconds: f64) -> Result<Felt> {
    let until = warm_up + Duration::from_secs_f64(seconds);
    let measured: Vec<_> = all
        .into_iter()
        .filter(|(at, _)| at.is_none_or(|at| (warm_up..until).contains(&at)))
        .collect();
    let committed = measured.iter().filter(|(at, _)| at.is_some()).count();
    let mut late: Vec<f64> = measured.iter().map(|(_, late)| late.as_secs_f64() * 1e3).collect();
    anyhow::ensure!(!late.is_empty(), "no message of the victim was due");
    late.sort_by(f64::total_cmp);
    let at = |share: f64| late[((late.len() - 1) as f64 * share).round() as usize];
    Ok(Felt { rate: committed as f64 / seconds, p50_ms: at(0.5), p99_ms: at(0.99) })
}
