//! The messages of a run, made from a seed, and the totals that the tables must hold after it.

use anyhow::{Context, Result, ensure};
use oncebox_tests::kafka::KafkaServer;
use rand::{Rng, SeedableRng, rngs::StdRng};
use rdkafka::{
    ClientConfig,
    consumer::{BaseConsumer, Consumer},
    error::{KafkaError, RDKafkaErrorCode},
    message::{Header, OwnedHeaders},
    producer::{BaseProducer, BaseRecord, Producer},
};
use serde::Serialize;
use std::{
    collections::HashMap,
    thread,
    time::{Duration, Instant},
};

use crate::sent::sent_topic;

/// Accounts in the tables; the hot workload books to the first `HOT_ACCOUNTS` alone.
pub const ACCOUNTS: i32 = 100_000;
const HOT_ACCOUNTS: i32 = 100;
/// Type of the events that the component takes.
pub const EVENT_TYPE: &str = "order.placed";
/// Distance of the messages that are sent twice: one in 20.
const DUPLICATE_OF: usize = 20;
/// Longest time that the broker may take for one answer.
pub const TIMEOUT: Duration = Duration::from_secs(60);

/// The rows that the messages meet at.
#[derive(
    Debug,
    Clone,
    Copy,
    PartialEq,
    Eq,
    Hash,
    PartialOrd,
    Ord,
    Serialize,
    serde::Deserialize,
    clap::ValueEnum,
)]
#[serde(rename_all = "snake_case")]
pub enum Workload {
    /// 100,000 accounts: two messages hardly ever want one row.
    Spread,
    /// 100 accounts: messages often want one row.
    Hot,
}

impl Workload {
    /// Returns the number of accounts that the messages are booked to.
    pub fn accounts(self) -> i32 {
        match self {
            Self::Spread => ACCOUNTS,
            Self::Hot => HOT_ACCOUNTS,
        }
    }

    /// Returns the name in tables.
    pub fn name(self) -> &'static str {
        match self {
            Self::Spread => "spread",
            Self::Hot => "hot",
        }
    }
}

/// The messages of a topic.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Load {
    /// Rows that the messages meet at.
    pub workload: Workload,
    /// Partitions of the topic.
    pub partitions: i32,
    /// Different messages; one in twenty comes twice.
    pub messages: usize,
    /// Bytes of a payload, about.
    pub payload_bytes: usize,
}

/// Sums over the tables of the effect.
#[derive(Debug, Clone, Copy, PartialEq, Eq, sqlx::FromRow)]
pub struct Totals {
    /// Rows of `orders`.
    pub orders: i64,
    /// Sum of `account.n`.
    pub bookings: i64,
    /// Sum of `account.balance`.
    pub balance: i64,
}

/// One order.
#[derive(Debug, Clone)]
pub struct Order {
    /// Number of the message.
    pub number: usize,
    /// Number of the order in the payload: that of the message, unless something is to go wrong.
    pub order: usize,
    /// Account that the order is booked to.
    pub account: i32,
    /// Amount that is booked.
    pub amount: i64,
}

impl Order {
    /// Returns the message's id.
    pub fn id(&self) -> String {
        format!("m-{}", self.number)
    }

    /// Returns an id in the form of a UUID. It depends on the number alone, and ids of numbers that
    /// follow each other are far apart in an index.
    pub fn random_id(&self) -> String {
        let bits: u128 = StdRng::seed_from_u64(self.number as u64).random();
        let hex = format!("{bits:032x}");
        let parts = [&hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..]];
        parts.join("-")
    }

    /// Returns the payload. Its note begins with `note` and is padded to the payload's size.
    pub fn payload(&self, note: &str, payload_bytes: usize) -> String {
        let Self { order, account, amount, .. } = self;
        let start = format!(
            r#"{{"order_id":"o-{order}","account":{account},"amount":{amount},"note":"{note} "#
        );
        let padding = payload_bytes.saturating_sub(start.len() + 2);
        format!("{start}{}\"}}", "x".repeat(padding))
    }
}

impl Load {
    /// Returns the orders, in the order of their first delivery.
    pub fn orders(&self) -> Vec<Order> {
        self.orders_from(0)
    }

    /// Returns the orders with numbers from `first` on. But for the numbers they are those of
    /// [`Load::orders`], so that a topic takes one load after the other.
    pub fn orders_from(&self, first: usize) -> Vec<Order> {
        let mut rng = StdRng::seed_from_u64(1);
        let account = |rng: &mut StdRng| rng.random_range(0..self.workload.accounts());
        (0..self.messages)
            .map(|number| Order {
                number: first + number,
                order: first + number,
                account: account(&mut rng),
                amount: rng.random_range(1..1_000),
            })
            .collect()
    }

    /// Returns the totals after each order is applied once.
    pub fn totals(&self) -> Totals {
        let count = self.messages as i64;
        Totals {
            orders: count,
            bookings: count,
            balance: self.orders().iter().map(|order| order.amount).sum(),
        }
    }

    /// Returns the numbers of the orders in the order of their deliveries: each once, one in twenty
    /// again at a random distance, which is at most `within` orders.
    pub fn deliveries(&self, within: usize) -> Vec<usize> {
        let mut rng = StdRng::seed_from_u64(2);
        let mut at: Vec<(usize, usize)> =
            (0..self.messages).map(|number| (number, number)).collect();
        for number in (0..self.messages).step_by(DUPLICATE_OF) {
            let last = number.saturating_add(within).min(self.messages);
            at.push((rng.random_range(number..=last), number));
        }
        at.sort_by_key(|(position, _)| *position);
        at.into_iter().map(|(_, number)| number).collect()
    }

    /// Returns the number of records in the topic, duplicates included.
    pub fn records(&self) -> usize {
        self.messages + self.messages.div_ceil(DUPLICATE_OF)
    }
}

/// Filled topics. Runs with equal loads read one topic, each in a group of its own.
pub struct Topics {
    kafka: KafkaServer,
    filled: HashMap<Load, String>,
}

impl Topics {
    /// Creates an empty set of topics.
    pub fn new(kafka: KafkaServer) -> Self {
        Self { kafka, filled: HashMap::new() }
    }

    /// Returns a topic that holds this load and nothing else. Fills a new one where there is none.
    pub async fn filled(&mut self, load: &Load) -> Result<String> {
        if let Some(topic) = self.filled.get(load) {
            return Ok(topic.clone());
        }
        let topic = self.empty(load.partitions).await?;
        let (brokers, filling, load) = (self.kafka.bootstrap().to_owned(), topic.clone(), *load);
        let fill = move || fill(&brokers, &filling, &load, 0, Ids::Numbered);
        tokio::task::spawn_blocking(fill).await??;
        self.filled.insert(load, topic.clone());
        Ok(topic)
    }

    /// Adds a load to a topic. Its orders have numbers from `first` on, and random ids.
    pub async fn append(&self, topic: &str, load: &Load, first: usize) -> Result<()> {
        let (brokers, topic, load) = (self.kafka.bootstrap().to_owned(), topic.to_owned(), *load);
        let fill = move || fill(&brokers, &topic, &load, first, Ids::Random);
        tokio::task::spawn_blocking(fill).await?
    }

    /// Creates the topic that a consumer sends to, by its group. Its records have the times at
    /// which the broker took them.
    pub async fn for_sent(&self, group: &str, partitions: i32) -> Result<String> {
        let topic = sent_topic(group);
        let broker_time = [("message.timestamp.type", "LogAppendTime")];
        self.kafka.create_topic(&topic, partitions, &broker_time).await?;
        Ok(topic)
    }

    /// Creates a topic without messages.
    pub async fn empty(&self, partitions: i32) -> Result<String> {
        let topic = format!("orders-{:08x}", rand::random::<u32>());
        self.kafka.create_topic(&topic, partitions, &[]).await?;
        Ok(topic)
    }
}

/// The form of message ids.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ids {
    /// `m-` and the number.
    Numbered,
    /// As UUIDs, in random order.
    Random,
}

/// A producer of orders, with their format on the wire.
pub struct Sender {
    producer: BaseProducer,
    topic: String,
    load: Load,
    ids: Ids,
}

impl Sender {
    /// Creates a producer with these properties.
    pub fn new(
        brokers: &str,
        topic: &str,
        load: &Load,
        properties: &[(&str, &str)],
    ) -> Result<Self> {
        let mut config = ClientConfig::new();
        config.set("bootstrap.servers", brokers).set("enable.idempotence", "true");
        for (name, value) in properties {
            config.set(*name, *value);
        }
        let producer = config.create().context("failed to make a producer")?;
        Ok(Self { producer, topic: topic.to_owned(), load: *load, ids: Ids::Numbered })
    }

    /// Returns the producer with this form of message ids.
    pub fn with_ids(self, ids: Ids) -> Self {
        Self { ids, ..self }
    }

    /// Sends an order. Both deliveries of an order go to one partition.
    pub fn send(&self, order: &Order, note: &str) -> Result<()> {
        self.send_as(order, note, EVENT_TYPE)
    }

    /// Sends an order as an event of a type.
    pub fn send_as(&self, order: &Order, note: &str, event_type: &str) -> Result<()> {
        let payload = order.payload(note, self.load.payload_bytes);
        let id = match self.ids {
            Ids::Numbered => order.id(),
            Ids::Random => order.random_id(),
        };
        let headers = OwnedHeaders::new()
            .insert(Header { key: "message-id", value: Some(&id) })
            .insert(Header { key: "event-type", value: Some(event_type) });
        let partition = order.number as i32 % self.load.partitions;
        let mut record = BaseRecord::<(), _>::to(&self.topic)
            .partition(partition)
            .payload(&payload)
            .headers(headers);
        loop {
            match self.producer.send(record) {
                Ok(()) => break,
                Err((KafkaError::MessageProduction(RDKafkaErrorCode::QueueFull), refused)) => {
                    self.producer.poll(Duration::from_millis(10));
                    record = refused;
                }
                Err((error, _)) => return Err(error).context("failed to send a message"),
            }
        }
        self.producer.poll(Duration::ZERO);
        Ok(())
    }

    /// Sends orders at a rate a second, or as fast as it can, each with a note of its moment, and
    /// waits until the broker has them.
    pub fn send_at(
        &self,
        orders: &[Order],
        rate: Option<f64>,
        note: impl Fn() -> String,
    ) -> Result<()> {
        let begun = Instant::now();
        for (number, order) in orders.iter().enumerate() {
            if let Some(rate) = rate {
                let due = Duration::from_secs_f64(number as f64 / rate);
                std::thread::sleep(due.saturating_sub(begun.elapsed()));
            }
            self.send(order, &note())?;
        }
        self.flush()
    }

    /// Waits until all messages are sent.
    pub fn flush(&self) -> Result<()> {
        self.producer.flush(TIMEOUT).context("failed to send all messages")
    }
}

fn fill(brokers: &str, topic: &str, load: &Load, first: usize, ids: Ids) -> Result<()> {
    let client: BaseConsumer = ClientConfig::new()
        .set("bootstrap.servers", brokers)
        .create()
        .context("failed to make a client")?;
    let before: i64 = ends(&client, topic, load.partitions)?.iter().sum();
    let sender = Sender::new(
        brokers,
        topic,
        load,
        &[("queue.buffering.max.kbytes", "262144"), ("linger.ms", "20")],
    )?
    .with_ids(ids);
    let orders = load.orders_from(first);
    for number in load.deliveries(usize::MAX) {
        sender.send(&orders[number], "preloaded")?;
    }
    sender.flush()?;
    let ends = ends(&client, topic, load.partitions)?;
    ensure!(
        ends.iter().sum::<i64>() - before == load.records() as i64,
        "`{topic}` holds {ends:?} records, {before} of them from before, and {} were sent",
        load.records()
    );
    Ok(())
}

/// Returns the end offset of each partition. One of a new topic may have no leader for a moment.
pub fn ends(client: &BaseConsumer, topic: &str, partitions: i32) -> Result<Vec<i64>> {
    let deadline = Instant::now() + TIMEOUT;
    let end = |partition| loop {
        match client.fetch_watermarks(topic, partition, TIMEOUT) {
            Err(_) if Instant::now() < deadline => thread::sleep(Duration::from_millis(100)),
            found => break found.map(|(_, high)| high),
        }
    };
    (0..partitions).map(end).collect::<Result<_, _>>().context("failed to ask for a topic's end")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_order_is_sent_and_one_in_twenty_again_later() {
        let load =
            Load { workload: Workload::Hot, partitions: 4, messages: 1_000, payload_bytes: 200 };
        let deliveries = load.deliveries(usize::MAX);
        let mut sent = vec![0; load.messages];
        deliveries.iter().for_each(|number| sent[*number] += 1);
        assert_eq!((deliveries.len(), load.records()), (1_050, 1_050));
        assert_eq!(sent.iter().filter(|times| **times == 2).count(), 50);
        assert!(sent.iter().all(|times| (1..=2).contains(times)));
    }

    #[test]
    fn a_later_load_has_other_numbers_and_the_same_effects() {
        let load =
            Load { workload: Workload::Spread, partitions: 4, messages: 100, payload_bytes: 200 };
        let (first, later) = (load.orders(), load.orders_from(100));
        for (one, other) in first.iter().zip(&later) {
            assert_eq!((one.account, one.amount), (other.account, other.amount));
            assert_eq!((one.number + 100, one.order + 100), (other.number, other.order));
        }
        let mut ids: Vec<_> = first.iter().chain(&later).map(Order::random_id).collect();
        assert!(ids.iter().all(|id| id.len() == 36 && id.split('-').count() == 5));
        assert!(!ids.is_sorted(), "the ids of one number after the other are in order");
        ids.sort();
        ids.dedup();
        assert_eq!(ids.len(), 200);
    }

    #[test]
    fn a_second_delivery_comes_within_the_distance_that_is_asked_for() {
        let load =
            Load { workload: Workload::Spread, partitions: 1, messages: 1_000, payload_bytes: 200 };
        let deliveries = load.deliveries(10);
        assert_eq!(deliveries.len(), 1_050);
        for number in (0..load.messages).step_by(DUPLICATE_OF) {
            let at: Vec<_> = (0..).zip(&deliveries).filter(|(_, it)| **it == number).collect();
            let distance: usize = at[1].0 - at[0].0;
            // Ten orders, and the second deliveries of others among them.
            assert!(at.len() == 2 && distance <= 12, "{number} is {distance} deliveries away");
        }
    }

    #[test]
    fn a_payload_is_as_long_as_asked() {
        let load =
            Load { workload: Workload::Spread, partitions: 1, messages: 1, payload_bytes: 1 };
        let order = &load.orders()[0];
        assert_eq!(order.payload("n", 65_536).len(), 65_536);
        let parsed: serde_json::Value =
            serde_json::from_str(&order.payload("n", 300)).expect("a payload is JSON");
        assert_eq!(parsed["order_id"], "o-0");
    }
}
