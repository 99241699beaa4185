//! The cost of a claim beside a history: the host's throughput, and its claim alone, by the number
//! of messages that the inbox remembers, and by the number of time partitions that hold them.
//!
//! A database grows from size to size. At each size the host runs in rounds, and in each round (d)
//! runs on a fresh database, so that a machine that is slower for a while shows. The messages have
//! ids in random order, as those of the history: a claim looks for each anywhere in the indexes.

use anyhow::{Context, Result};
use oncebox_devkit::output::number;
use serde::{Deserialize, Serialize};

use crate::{
    claims::{self, HostClaim},
    filling::{self, Period, Progress, check_room},
    report::Spread,
    run::{Bench, Figures, Job},
    servers::Database,
    steady::{PARTITIONS, load},
    throughput::Pace,
    trend::slope,
    variants::{
        Batch, Variant,
        host::{self, control, policy},
        pgbench,
    },
};

/// Numbers of messages in the inbox, where none are asked for.
pub const SIZES: [u64; 4] = [0, 1_000_000, 10_000_000, 50_000_000];
/// Time partitions that hold the messages of the sizes: the present one and three before it. No
/// message of the class `7d` in them is due.
pub const LIVE: i32 = 4;
/// Numbers of time partitions of the second measurement.
const COUNTS: [i32; 3] = [1, 8, 60];
/// Messages in the inbox in that measurement.
const ROWS_OF_COUNTS: u64 = 1_000_000;
/// Settings of the measured host: most of these periods are due.
pub const SETTINGS: [(&str, &str); 1] = [("ONCEBOX_RETENTION_ENABLED", "false")];

/// Everything that was measured beside histories.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct History {
    /// By the number of messages.
    pub sizes: Vec<HistoryPoint>,
    /// By the number of time partitions.
    pub partitions: Vec<HistoryPoint>,
}

/// The rounds beside one history.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct HistoryPoint {
    /// Messages of the history.
    pub rows: u64,
    /// Time partitions that hold them.
    pub partitions: usize,
    /// Size of the inbox with its indexes, bytes.
    pub bytes: i64,
    /// Entries of a page of the largest key index, on average; 0 where it has one page.
    pub entries_per_page: f64,
    /// The rounds.
    pub rounds: Vec<HistoryRound>,
}

/// One round.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct HistoryRound {
    /// The host, beside the history.
    pub host: Figures,
    /// The consumer written by hand, in a database of its own.
    pub by_hand: Figures,
    /// The host's claim alone; none where there is no pgbench.
    pub claim: Option<HostClaim>,
}

impl HistoryRound {
    /// Returns the host's throughput as a multiple of that by hand.
    fn throughput(&self) -> f64 {
        self.host.rate / self.by_hand.rate
    }
}

/// A measure of a round; none where it was not taken.
pub type RoundMeasure = fn(&HistoryRound) -> Option<f64>;

/// Messages a second, as a multiple of those by hand.
pub const THROUGHPUT: RoundMeasure = |round| Some(round.throughput());
/// Time per message, as a multiple of that by hand.
pub const TIME: RoundMeasure = |round| Some(1.0 / round.throughput());
/// Messages a second of the host.
pub const HOST_RATE: RoundMeasure = |round| Some(round.host.rate);
/// Messages a second by hand.
pub const HAND_RATE: RoundMeasure = |round| Some(round.by_hand.rate);
/// CPU time of the database for the claim of a new message, microseconds.
pub const NEW: RoundMeasure = |round| round.claim.map(|claim| claim.new_us);
/// CPU time of the database for the claim of a known message, microseconds.
pub const KNOWN: RoundMeasure = |round| round.claim.map(|claim| claim.known_us);

impl HistoryPoint {
    /// Returns the spread of a measure over the rounds.
    pub fn spread(&self, measure: RoundMeasure) -> Option<Spread> {
        Spread::of(self.rounds.iter().filter_map(measure))
    }

    /// Returns the spread of a measure as a multiple of its median at another point.
    pub fn ratio(&self, to: &Self, measure: RoundMeasure) -> Option<Spread> {
        let reference = to.spread(measure)?.median;
        Spread::of(self.rounds.iter().filter_map(measure).map(|value| value / reference))
    }
}

impl History {
    /// Returns the rows of each history with a measure of its cost: the median, as a multiple of the
    /// median at the first size.
    pub fn costs(&self, measure: RoundMeasure) -> Vec<(f64, f64)> {
        let Some(first) = self.sizes.first() else { return Vec::new() };
        let cost = |point: &HistoryPoint| Some(point.ratio(first, measure)?.median);
        let rows = |point: &HistoryPoint| point.rows as f64;
        self.sizes.iter().filter_map(|point| Some((rows(point), cost(point)?))).collect()
    }

    /// Returns what each factor of ten of the history adds to the cost, as a share of the cost at
    /// the first size, by the line of least squares over the sizes that have rows. `None` for fewer
    /// than two of them.
    pub fn slope_per_decade(&self, measure: RoundMeasure) -> Option<f64> {
        let decades = self.costs(measure).into_iter().filter(|(rows, _)| *rows > 0.0);
        slope(&decades.map(|(rows, cost)| (rows.log10(), cost)).collect::<Vec<_>>())
    }
}

/// A database with a history, on which the host runs again and again.
pub struct Aged {
    /// The database.
    pub database: Database,
    topic: String,
    group: String,
    /// Consumers of the history; the first is the measured one.
    consumers: Vec<i32>,
    periods: Vec<Period>,
    /// Messages of the history.
    rows: i64,
    /// Messages that the topic held so far, each of them once.
    sent: usize,
    /// Rounds so far.
    rounds: usize,
}

/// Measures beside each size of a history, and beside each number of time partitions.
pub async fn measure(
    bench: &mut Bench,
    pace: &mut Pace,
    sizes: &[u64],
    rounds: usize,
) -> Result<History> {
    let most = sizes.iter().copied().chain([ROWS_OF_COUNTS]).max().unwrap_or_default();
    check_room(&bench.servers, most, "--history").await?;
    // Every run has as many messages as the first one of the right length.
    let calibration = pace.run(bench, &Variant::Component, load(0), Batch::DEFAULT).await?;
    let messages = calibration.messages;

    let mut partitions = Vec::new();
    for count in COUNTS {
        let mut aged = Aged::create(bench, count).await?;
        partitions.push(aged.point(bench, pace, ROWS_OF_COUNTS, messages, rounds).await?);
        bench.servers.drop_database(aged.database).await?;
    }
    let mut points = Vec::new();
    let mut aged = Aged::create(bench, LIVE).await?;
    for rows in sizes {
        points.push(aged.point(bench, pace, *rows, messages, rounds).await?);
    }
    bench.servers.drop_database(aged.database).await?;
    Ok(History { sizes: points, partitions })
}

impl Aged {
    /// Creates the database with its consumers, and a number of time partitions up to the present
    /// one. They are empty.
    pub async fn create(bench: &mut Bench, partitions: i32) -> Result<Self> {
        let database = bench.servers.database(true).await?;
        let topic = bench.topics.empty(PARTITIONS).await?;
        let group = format!("history-{topic}");
        let measured = policy(&topic, &group, Batch::DEFAULT)?;
        let consumer = host::create(&bench.servers, &bench.programs, &database, &measured).await?;
        let mut consumers = vec![consumer];
        let control = control(&bench.servers, &database)?;
        for other in ["invoices", "shipments"] {
            let policy = policy(filling::TOPIC, &format!("{group}-{other}"), Batch::DEFAULT)?;
            let tenant = &bench.servers.tenant.name;
            // Half of the history is of the measured consumer.
            let created = control.consumers().create(tenant, other, &policy).await?;
            consumers.extend([created.consumer_id, consumer]);
        }
        consumers.pop();
        control.pool.close().await;
        let mut connection = database.connect().await?;
        let mut periods = Vec::new();
        for back in 0..partitions {
            let period = Period::back(&mut connection, back).await?;
            period.make(&mut connection).await?;
            period.attach(&mut connection).await?;
            periods.push(period);
        }
        Ok(Self { database, topic, group, consumers, periods, rows: 0, sent: 0, rounds: 0 })
    }

    /// Lets the history grow to a size, and measures there.
    async fn point(
        &mut self,
        bench: &mut Bench,
        pace: &mut Pace,
        rows: u64,
        messages: usize,
        rounds: usize,
    ) -> Result<HistoryPoint> {
        let partitions = self.periods.len();
        let what = format!("history of {} rows in {partitions} partitions", number(rows as i64));
        self.grow(bench, &what, rows as i64).await.with_context(|| what.clone())?;
        let mut point = HistoryPoint {
            rows,
            partitions,
            bytes: self.bytes().await?,
            entries_per_page: self.entries_per_page().await?,
            rounds: Vec::new(),
        };
        for round in 1..=rounds {
            let measured = self.round(bench, pace, messages, round % 2 == 0).await;
            let measured = measured.with_context(|| what.clone())?;
            let claim = measured.claim.map_or_else(String::new, |claim| {
                format!(", claim {:.1} µs new, {:.1} µs known", claim.new_us, claim.known_us)
            });
            eprintln!(
                "round {round} of {rounds}, {what}: (c) {:.0}/s, (d) {:.0}/s{claim}",
                measured.host.rate, measured.by_hand.rate
            );
            point.rounds.push(measured);
        }
        Ok(point)
    }

    /// Adds messages to the history until it has this number, an equal share to each period.
    pub async fn grow(&mut self, bench: &Bench, what: &str, rows: i64) -> Result<()> {
        let mut progress = Progress::new(what, rows - self.rows);
        let mut connection = filling::begin(&bench.servers, &self.database).await?;
        let (from, count) = (self.rows, self.periods.len() as i64);
        let share = |number: i64| from + (rows - from) * number / count;
        for (number, period) in (0..).zip(&self.periods) {
            let numbers = share(number)..share(number + 1);
            period.fill(&mut connection, numbers, &self.consumers, &mut progress).await?;
            period.settle(&mut connection).await?;
        }
        self.rows = rows;
        filling::end(&bench.servers, &self.database).await
    }

    /// Runs (d) on a fresh database and the host on this one, in either order, and then the claim
    /// alone.
    async fn round(
        &mut self,
        bench: &mut Bench,
        pace: &mut Pace,
        messages: usize,
        host_first: bool,
    ) -> Result<HistoryRound> {
        if self.rows == 0 {
            // What the rounds before left would be a history.
            self.database.execute("TRUNCATE oncebox.inbox").await?;
        }
        let first = if host_first { Some(self.run(bench, messages).await?) } else { None };
        let by_hand = pace.run(bench, &Variant::ByHand, load(0), Batch::DEFAULT).await?;
        let host = match first {
            Some(host) => host,
            None => self.run(bench, messages).await?,
        };
        let claim = match pgbench::program() {
            Some(_) => Some(claims::beside_history(bench, &self.database, self.rounds).await?),
            None => None,
        };
        self.rounds += 1;
        Ok(HistoryRound { host, by_hand, claim })
    }

    /// Sends messages and runs the host until it has processed all of them.
    async fn run(&mut self, bench: &mut Bench, messages: usize) -> Result<Figures> {
        let load = load(messages);
        let job =
            Job { variant: Variant::Component, load, batch: Batch::DEFAULT, log_statements: false };
        bench.topics.append(&self.topic, &load, self.sent).await?;
        self.sent += messages;
        self.database.empty_effect().await?;
        let started = bench.start_host(self.database.clone(), &self.group, &SETTINGS)?;
        Ok(bench.to_end(&job, started, &self.topic).await?.1)
    }

    async fn bytes(&self) -> Result<i64> {
        const BYTES: &str = "SELECT sum(pg_total_relation_size(relid))::bigint \
            FROM pg_partition_tree('oncebox.inbox') WHERE isleaf";
        let mut connection = self.database.connect().await?;
        Ok(sqlx::query_scalar(BYTES).fetch_one(&mut connection).await?)
    }

    /// Returns the entries of a page of the largest key index, as its statistics have them.
    async fn entries_per_page(&self) -> Result<f64> {
        const ENTRIES: &str = "SELECT i.reltuples::float8 / i.relpages FROM pg_index x \
            JOIN pg_class i ON i.oid = x.indexrelid JOIN pg_class t ON t.oid = x.indrelid \
            WHERE x.indisprimary AND t.relnamespace = 'oncebox'::regnamespace \
              AND t.relname::text = ANY ($1) AND i.relpages > 2 AND i.reltuples > 0 \
            ORDER BY i.relpages DESC LIMIT 1";
        let names: Vec<_> = self.periods.iter().map(|period| period.name.clone()).collect();
        let mut connection = self.database.connect().await?;
        let query = sqlx::query_scalar(ENTRIES).bind(names);
        Ok(query.fetch_optional(&mut connection).await?.unwrap_or(0.0))
    }
}

#[cfg(test)]
pub mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use crate::measure::Cpu;

    /// Returns a history of these sizes, each with the host's rate and the cost of its claim.
    pub fn history(sizes: &[(u64, f64, f64)]) -> History {
        let figures = |rate| Figures {
            messages: 1_000,
            seconds: 1.0,
            rate,
            longest_gap_ms: 1.0,
            cpu: Cpu::default(),
            inbox_bytes: None,
            threads: BTreeMap::new(),
        };
        let point = |(rows, rate, new_us): &(u64, f64, f64)| HistoryPoint {
            rows: *rows,
            partitions: 4,
            bytes: 400 * *rows as i64,
            entries_per_page: 100.0,
            rounds: vec![HistoryRound {
                host: figures(*rate),
                by_hand: figures(1_000.0),
                claim: Some(HostClaim { new_us: *new_us, known_us: 2.0 * new_us }),
            }],
        };
        History { sizes: sizes.iter().map(point).collect(), partitions: Vec::new() }
    }

    #[test]
    fn costs_are_multiples_of_the_empty_inbox_and_the_slope_is_per_factor_of_ten() {
        let history = history(&[
            (0, 4_000.0, 10.0),
            (1_000_000, 4_000.0, 11.0),
            (100_000_000, 2_000.0, 13.0),
        ]);
        let costs = history.costs(NEW);
        assert_eq!(costs, [(0.0, 1.0), (1e6, 1.1), (1e8, 1.3)]);
        assert_eq!(history.costs(TIME)[2], (1e8, 2.0));
        let slope = history.slope_per_decade(NEW).expect("two sizes with rows");
        assert!((slope - 0.1).abs() < 1e-9, "{slope}");
        assert_eq!(self::history(&[(0, 1.0, 1.0), (10, 1.0, 1.0)]).slope_per_decade(NEW), None);
    }
}
