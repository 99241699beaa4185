//! Outgoing messages that are due later, as many a second as make a million in one minute. The
//! function inserts them that a completion calls for what handlers emit. Then a host starts and
//! sends them.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use oncebox_model::outgoing::outgoing_id;
use rdkafka::{ClientConfig, consumer::BaseConsumer};
use serde::{Deserialize, Serialize};
use sqlx::PgConnection;
use tokio::time::{Instant, sleep};

use crate::{
    filling,
    load::ends,
    measure::now_us,
    run::{Bench, Started, finish},
    sent::{self, SentRecord},
    servers::Database,
    steady::PARTITIONS,
    throughput::PAYLOAD_BYTES,
    variants::{
        Batch, Variant,
        emitting::{self, EMITTED_TYPE},
        host::{CONSUMER, policy},
    },
};

/// Messages, where no other number is asked for.
pub const TIMERS: u64 = 1_000_000;
/// Distance from one due time to the next, microseconds: a million in one minute.
const DUE_EACH_US: f64 = 60.0;
/// Time that is allowed for the insert of a message, microseconds. Where it takes longer, the first
/// messages are late, and are sent all the same.
const INSERT_US: f64 = 150.0;
/// Time that is allowed for the start of a host, microseconds.
const START_US: f64 = 3e6;
/// Messages of one statement.
const CHUNK: usize = 10_000;
/// Longest time without a further record, once the first message is due.
const PATIENCE: Duration = Duration::from_secs(60);
const POLL: Duration = Duration::from_millis(200);

/// Parameters: the consumer, the ids of the causes, the ids, the due times, the destination, the
/// event type and the payload. Each message has its cause's id as its key.
const INSERT: &str = "SELECT oncebox.insert_outgoing($1::int, $2::text[], \
        array_fill(0, ARRAY[c.n]), $3::text[], array_fill($5::text, ARRAY[c.n]), c.keys, \
        array_fill($6::text, ARRAY[c.n]), array_fill(NULL::text, ARRAY[c.n]), \
        array_fill(''::bytea, ARRAY[c.n]), array_fill($7::bytea, ARRAY[c.n]), \
        array_fill(NULL::text, ARRAY[c.n]), array_fill(NULL::bigint, ARRAY[c.n]), $4::bigint[], \
        array_fill(NULL::text, ARRAY[c.n]), $2::text[]) \
    FROM (SELECT count(*)::int AS n, array_agg(convert_to(u.id, 'UTF8') ORDER BY u.nth) AS keys \
        FROM unnest($2::text[]) WITH ORDINALITY AS u(id, nth)) c";

/// The drain of messages that are due one after the other.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Timers {
    /// Messages.
    pub messages: u64,
    /// Seconds from the first due time to the last.
    pub due_s: f64,
    /// Seconds from the first record on the broker to the last.
    pub drained_s: f64,
    /// Messages a second in that time.
    pub rate: f64,
}

/// The messages of a run.
struct Plan<'a> {
    /// Key of the consumer that emitted them.
    consumer: i32,
    /// Name of its tenant.
    tenant: &'a str,
    /// Topic that they go to.
    topic: &'a str,
    /// Number of messages.
    messages: usize,
    /// Due time of the first, microseconds since the Unix epoch.
    begin_us: f64,
}

impl Plan<'_> {
    /// Returns the id of the cause of a message.
    fn cause(number: usize) -> String {
        format!("t-{number}")
    }

    /// Returns the due time of a message, milliseconds since the Unix epoch.
    fn due_ms(&self, number: usize) -> i64 {
        ((self.begin_us + number as f64 * DUE_EACH_US) / 1e3) as i64
    }

    /// Inserts messages in the order of their due times.
    async fn insert(&self, connection: &mut PgConnection) -> Result<()> {
        let destination = format!("kafka:{}", self.topic);
        let payload = vec![b'x'; PAYLOAD_BYTES];
        for first in (0..self.messages).step_by(CHUNK) {
            let numbers = first..self.messages.min(first + CHUNK);
            let causes: Vec<String> = numbers.clone().map(Self::cause).collect();
            let id = |cause: &String| outgoing_id(self.tenant, CONSUMER, cause, 0);
            let ids: Vec<String> = causes.iter().map(id).collect();
            let due: Vec<i64> = numbers.map(|number| self.due_ms(number)).collect();
            let query = sqlx::query(INSERT).bind(self.consumer).bind(&causes).bind(&ids).bind(&due);
            let query = query.bind(&destination).bind(EMITTED_TYPE).bind(&payload);
            query.execute(&mut *connection).await.context("failed to insert messages")?;
        }
        Ok(())
    }
}

/// Inserts so many messages, and measures a host that sends them.
pub(super) async fn measure(bench: &mut Bench, messages: u64) -> Result<Timers> {
    ensure!(messages >= 2, "`--timers` is {messages}; a drain has at least two messages");
    let topic = bench.topics.empty(PARTITIONS).await?;
    let group = format!("timers-{topic}");
    let sent_to = bench.topics.for_sent(&group, PARTITIONS).await?;
    let database = bench.servers.database(true).await?;
    let policy = policy(&topic, &group, Batch::DEFAULT)?;
    let consumer =
        emitting::create(&bench.servers, &database, &policy, Some(sent_to.as_str())).await?;
    let tenant = bench.servers.tenant.name.clone();
    let plan = Plan {
        consumer,
        tenant: &tenant,
        topic: &sent_to,
        messages: messages as usize,
        begin_us: now_us() + messages as f64 * INSERT_US + START_US,
    };
    fill(bench, &database, &plan).await?;
    let started = bench.start_host(database, &group, &[])?;
    let drained = drain(bench, &started, &plan).await;
    let (database, _) = finish(started, drained)?;
    sent::check_rows(&database, &Variant::ComponentEmitting, plan.messages).await?;
    let records = sent::read(bench.servers.kafka.bootstrap(), &sent_to, PARTITIONS).await?;
    bench.servers.drop_database(database).await?;
    figures(&plan, &records)
}

/// Inserts the messages, and brings the statistics of their table up to date.
async fn fill(bench: &Bench, database: &Database, plan: &Plan<'_>) -> Result<()> {
    eprintln!("{} outgoing messages are made", plan.messages);
    let mut connection = filling::begin(&bench.servers, database).await?;
    plan.insert(&mut connection).await?;
    database.execute("VACUUM (ANALYZE) oncebox.outgoing").await?;
    filling::end(&bench.servers, database).await
}

/// Waits until the broker has as many records as there are messages.
async fn drain(bench: &Bench, started: &Started, plan: &Plan<'_>) -> Result<()> {
    let client: BaseConsumer = ClientConfig::new()
        .set("bootstrap.servers", bench.servers.kafka.bootstrap())
        .create()
        .context("failed to make a client")?;
    let client = std::sync::Arc::new(client);
    let early = Duration::from_secs_f64((plan.begin_us - now_us()).max(0.0) / 1e6);
    let (mut known, mut deadline) = (0, Instant::now() + early + PATIENCE);
    while known < plan.messages as i64 {
        ensure!(started.child.is_running(), "the host ended by itself after {known} records");
        let (client, topic) = (client.clone(), plan.topic.to_owned());
        let ends = tokio::task::spawn_blocking(move || ends(&client, &topic, PARTITIONS)).await??;
        let records: i64 = ends.iter().sum();
        if records > known {
            (known, deadline) = (records, Instant::now().max(deadline - PATIENCE) + PATIENCE);
        }
        ensure!(
            Instant::now() < deadline,
            "of {} messages {known} are on the broker, and no further one came in {PATIENCE:?}",
            plan.messages
        );
        sleep(POLL).await;
    }
    Ok(())
}

/// Checks that each message was sent once, and none before it was due, and returns the figures.
fn figures(plan: &Plan<'_>, records: &[SentRecord]) -> Result<Timers> {
    sent::check_each_once(records, (0..plan.messages).map(Plan::cause))?;
    let is_early = |record: &&SentRecord| {
        let number = record.key.strip_prefix("t-").and_then(|number| number.parse().ok());
        number.is_some_and(|number| record.at_us < plan.due_ms(number) as f64 * 1e3)
    };
    let early = records.iter().filter(is_early).count();
    ensure!(early == 0, "{early} messages were sent before they were due");
    let times = sent::times(records);
    let (Some((first, _)), Some((last, _))) = (times.first(), times.last()) else {
        anyhow::bail!("there are no records")
    };
    // The broker's times are whole milliseconds.
    let drained_s = (last - first).max(1e3) / 1e6;
    Ok(Timers {
        messages: plan.messages as u64,
        due_s: (plan.messages - 1) as f64 * DUE_EACH_US / 1e6,
        drained_s,
        rate: plan.messages as f64 / drained_s,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plan(messages: usize) -> Plan<'static> {
        Plan { consumer: 1, tenant: "t", topic: "sent", messages, begin_us: 5e9 }
    }

    #[test]
    fn a_million_is_due_in_one_minute() {
        let plan = plan(1_000_000);
        assert_eq!((plan.due_ms(0), plan.due_ms(500_000)), (5_000_000, 5_030_000));
        assert!((5_059_999..5_060_000).contains(&plan.due_ms(999_999)));
    }

    // What could go wrong: a message that was sent before its time, or not at all, makes a drain
    // look quick.
    #[test]
    fn a_drain_that_is_early_or_not_whole_has_no_figures() {
        let plan = plan(3);
        let records = |times: &[f64]| -> Vec<SentRecord> {
            let all = times.iter().enumerate();
            all.map(|(number, at_us)| SentRecord { key: Plan::cause(number), at_us: *at_us })
                .collect()
        };
        let good = figures(&plan, &records(&[5e9, 5.0005e9, 5.001e9])).expect("figures");
        assert_eq!((good.messages, good.drained_s, good.rate), (3, 1.0, 3.0));
        assert!(figures(&plan, &records(&[4.999e9, 5.0005e9, 5.001e9])).is_err(), "early");
        assert!(figures(&plan, &records(&[5e9, 5.001e9])).is_err(), "one is missing");
    }
}
