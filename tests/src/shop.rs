//! A shop whose orders cause messages: over Kafka to shipping and from there to the last consumer,
//! and into the inbox of billing.
//!
//! The consumers write what they handled into one table without a key, so that a doubled effect
//! shows. Each order also emits a message that is due an hour later and is cancelled by a `stop`.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use anyhow::{Context, Result, ensure};
use oncebox_control::NewDeployment;
use oncebox_model::policy::Policy;
use rand::{Rng, rngs::StdRng};
use rdkafka::{
    ClientConfig, Message as _, Offset, TopicPartitionList,
    consumer::{BaseConsumer, Consumer},
    message::{Header, Headers, OwnedHeaders, OwnedMessage},
    producer::{FutureProducer, FutureRecord},
};
use serde_json::json;
use sqlx::{AssertSqlSafe, Connection, Executor, PgConnection};
use tokio::time::sleep;

use crate::{
    guests::{Emit, End, Step, component},
    host::{HostFixture, Options},
    outgoing::derived_id,
};

const CONSUMERS: [&str; 4] = ["orders", "shipping", "billing", "last"];
/// Partitions of each topic.
const PARTITIONS: i32 = 2;
/// Keys of orders.
const KEYS: usize = 6;
/// End of the name of the topic that nothing is sent to in time.
pub const LATE: &str = "late";
/// End of the name of the topic that is not there.
pub const DEAD: &str = "dead";
/// Token of what is due later.
const TOKEN: &str = "later";
const BROKER_TIMEOUT: Duration = Duration::from_secs(30);

const SEEN: &str = "CREATE TABLE seen (place bigint GENERATED ALWAYS AS IDENTITY, consumer text \
    NOT NULL, message_id text NOT NULL)";

/// An order that is placed.
#[derive(Debug, Clone)]
pub struct Order {
    /// Its message's id.
    pub id: String,
    /// Key of its record, and of what it emits.
    pub key: String,
}

/// A record of a topic.
#[derive(Debug)]
pub struct Arrived {
    /// Its key.
    pub key: Option<Vec<u8>>,
    /// Its payload.
    pub payload: Option<Vec<u8>>,
    headers: BTreeMap<String, String>,
}

impl Arrived {
    fn of(message: &OwnedMessage) -> Self {
        let headers = message.headers().into_iter().flat_map(|headers| headers.iter());
        let text =
            |value: Option<&[u8]>| String::from_utf8_lossy(value.unwrap_or_default()).into_owned();
        Self {
            key: message.key().map(<[u8]>::to_vec),
            payload: message.payload().map(<[u8]>::to_vec),
            headers: headers.map(|header| (header.key.to_owned(), text(header.value))).collect(),
        }
    }

    /// A header's value; empty where it has none.
    pub fn header(&self, name: &str) -> String {
        self.headers.get(name).cloned().unwrap_or_default()
    }

    /// The id by which it is known again.
    pub fn id(&self) -> String {
        self.header("ce_id")
    }
}

/// The shop, with what was ordered.
pub struct ShopFixture {
    /// Its database, its tenant and its hosts.
    pub base: HostFixture,
    /// Topic of the first hop's messages.
    pub events: String,
    /// Topic of the second hop's messages.
    pub last: String,
    /// Topic of what is due later.
    pub late: String,
    /// Topic that is not there.
    pub dead: String,
    incoming: String,
    placed: Vec<Order>,
    stops: BTreeSet<String>,
    publisher: Publisher,
}

impl ShopFixture {
    /// Everything that is sent has a place to go to.
    pub async fn new() -> Result<Self> {
        Self::create(Options::default(), false).await
    }

    /// What fails runs again an hour later.
    pub async fn with_slow_retries() -> Result<Self> {
        let options = Options { backoff_ms: (3_600_000, 3_600_000), ..Options::default() };
        Self::create(options, false).await
    }

    /// The same with all of it in a database of the tenant's own.
    pub async fn with_own_database() -> Result<Self> {
        Self::create(Options { own_database: true, ..Options::default() }, false).await
    }

    /// Each order emits, last, a message to a topic that is not there.
    pub async fn with_dead_destination() -> Result<Self> {
        Self::create(Options::default(), true).await
    }

    async fn create(options: Options, has_dead: bool) -> Result<Self> {
        let backoff_ms = options.backoff_ms;
        let base = HostFixture::with(options).await?;
        let topic = |name: &str| format!("{}.{name}", base.topic);
        let [incoming, events, last, late, dead] = ["in", "events", "last", LATE, DEAD].map(topic);
        for topic in [&incoming, &events, &last, &late] {
            base.kafka().create_topic(topic, PARTITIONS, &[]).await?;
        }
        let tenant = base.tenant.name.clone();
        let allowed =
            json!({ "destinations_allowed": [format!("kafka:{}.*", base.topic), "inbox:*"] });
        let allowed = allowed.as_object().context("an object")?;
        base.control.tenants().set_limits(&tenant, allowed).await?;
        base.control.tenant_databases().apply_migration(&base.tenant, "seen", SEEN).await?;
        let publisher = Publisher::new(base.kafka().bootstrap())?;
        let (placed, stops) = (Vec::new(), BTreeSet::new());
        let shop = Self { base, events, last, late, dead, incoming, placed, stops, publisher };
        shop.deploy(has_dead, backoff_ms).await?;
        Ok(shop)
    }

    async fn deploy(&self, has_dead: bool, backoff_ms: (u32, u32)) -> Result<()> {
        let Self { events, last, late, dead, incoming, .. } = self;
        let mut placing = vec![
            Step::Emit(Emit::to(format!("kafka:{events}"), "order.placed")),
            Step::Emit(Emit::to("inbox:billing", "order.billed")),
            Step::Emit(Emit {
                after_ms: Some(3_600_000),
                cancel_token: Some(TOKEN.to_owned()),
                ..Emit::to(format!("kafka:{late}"), "order.late")
            }),
        ];
        if has_dead {
            placing.push(Step::Emit(Emit::to(format!("kafka:{dead}"), "order.undeliverable")));
        }
        let shipping = vec![Step::Emit(Emit::to(format!("kafka:{last}"), "order.shipped"))];
        let stopping = vec![Step::Cancel(TOKEN.to_owned())];
        let consumers = [
            ("orders", incoming, vec![("order", placing), ("stop", stopping)]),
            ("shipping", events, vec![("order.placed", shipping)]),
            // Nobody publishes what it reads: its messages come from the handlers of `orders`.
            ("billing", late, vec![("order.billed", Vec::new())]),
            ("last", last, vec![("order.shipped", Vec::new())]),
        ];
        let tenant = &self.base.tenant.name;
        for (name, topic, handlers) in consumers {
            let policy = policy(name, topic, backoff_ms)?;
            self.base.control.consumers().create(tenant, name, &policy).await?;
            for (event_type, steps) in handlers {
                self.deploy_one(name, event_type, steps).await?;
            }
        }
        Ok(())
    }

    /// Deploys a handler that has the effect of a consumer, and does these steps after it.
    pub async fn deploy_one(
        &self,
        consumer: &str,
        event_type: &str,
        steps: Vec<Step>,
    ) -> Result<()> {
        let effect = format!("INSERT INTO seen (consumer, message_id) VALUES ('{consumer}', $1)");
        let emits = !steps.is_empty();
        let all = [vec![Step::ExecuteWithId(effect), Step::GiveUpOnError], steps].concat();
        let handler = format!("{consumer}-{}", event_type.replace('.', "-"));
        let grants = if emits { vec!["emit".to_owned()] } else { Vec::new() };
        let new = NewDeployment { grants, ..NewDeployment::stable(event_type, &handler, "") };
        let (tenant, component) = (&self.base.tenant.name, component(&all, &End::Ok));
        self.base.control.versions().deploy_compiled(tenant, consumer, new, &component).await?;
        Ok(())
    }

    /// Orders of drawn keys, under ids that no other has.
    pub fn orders(&mut self, rng: &mut StdRng, count: usize) -> Vec<Order> {
        let first = self.placed.len();
        let orders: Vec<_> = (first..first + count)
            .map(|number| Order {
                id: format!("o-{number}"),
                key: format!("key-{}", rng.random_range(0..KEYS)),
            })
            .collect();
        self.placed.extend(orders.iter().cloned());
        orders
    }

    /// Every order so far.
    pub fn placed(&self) -> &[Order] {
        &self.placed
    }

    /// Publishes orders; those of a key go to one partition.
    pub async fn place(&self, orders: &[Order]) -> Result<()> {
        for order in orders {
            self.publish(&order.id, "order", &order.key).await?;
        }
        Ok(())
    }

    /// Publishes an order with a trace context.
    pub async fn place_traced(&mut self, id: &str, trace_parent: &str) -> Result<()> {
        self.placed.push(Order { id: id.to_owned(), key: "traced".to_owned() });
        let (of, headers) = ((id, "order", "traced"), [("traceparent", trace_parent)]);
        self.publisher.publish_with(&self.incoming, of, &format!("order {id}"), &headers).await
    }

    /// Publishes a message that cancels what is due later.
    pub async fn cancel_late(&mut self, id: &str) -> Result<()> {
        self.stops.insert(id.to_owned());
        self.publish(id, "stop", "stop").await
    }

    async fn publish(&self, id: &str, event_type: &str, key: &str) -> Result<()> {
        let payload = format!("order {id}");
        self.publisher.publish(&self.incoming, (id, event_type, key), &payload).await
    }

    /// What each consumer handles, by its name.
    fn expected(&self) -> BTreeMap<&'static str, BTreeSet<String>> {
        let tenant = &self.base.tenant.name;
        let ids = self.placed.iter().map(|order| order.id.as_str());
        let of = |ordinal| {
            let derived = ids.clone().map(|id| derived_id(tenant, "orders", id, ordinal));
            derived.collect::<BTreeSet<_>>()
        };
        let (shipped, billed) = (of(0), of(1));
        let last = shipped.iter().map(|id| derived_id(tenant, "shipping", id, 0)).collect();
        let orders = ids.clone().map(str::to_owned).chain(self.stops.iter().cloned()).collect();
        BTreeMap::from([
            ("orders", orders),
            ("shipping", shipped),
            ("billing", billed),
            ("last", last),
        ])
    }

    /// Waits until every order has been handled by the first consumer.
    pub async fn wait_placed(&self) -> Result<()> {
        let seen = "SELECT count(DISTINCT message_id) FROM {schema}.seen WHERE consumer = \
            'orders' AND message_id LIKE 'o-%'";
        self.base.until(seen, self.placed.len() as i64).await
    }

    /// Lets hosts start consumers again that are quarantined, since hosts were killed while they
    /// started them. It ends with an error alone.
    pub async fn keep_releasing(&self) -> Result<()> {
        loop {
            for consumer in CONSUMERS {
                self.base.control.consumers().release(&self.base.tenant.name, consumer).await?;
            }
            sleep(Duration::from_millis(500)).await;
        }
    }

    /// Waits until every message has had an effect, and a relay has nothing to do but what is due
    /// later or goes nowhere.
    pub async fn wait_done(&self) -> Result<()> {
        tokio::select! {
            done = self.wait_for_effects() => done,
            failed = self.keep_releasing() => failed,
        }
    }

    async fn wait_for_effects(&self) -> Result<()> {
        let expected: usize = self.expected().values().map(BTreeSet::len).sum();
        let seen = "SELECT count(DISTINCT (consumer, message_id)) FROM {schema}.seen";
        self.base.until(seen, expected as i64).await?;
        let at_rest = format!(
            "SELECT (count(*) = 0)::int::bigint FROM oncebox.outgoing WHERE status IN \
                ('received', 'in_progress', 'failed_retryable') AND destination NOT LIKE \
                '%.{LATE}' AND destination NOT LIKE '%.{DEAD}'"
        );
        self.base.until(&at_rest, 1).await
    }

    /// Each consumer has handled what it should, each message once; each topic holds what was
    /// emitted to it and nothing else, each key in order; nothing is parked or left to be sent.
    pub async fn check(&self) -> Result<()> {
        let schema = &self.base.tenant.schema_name;
        let sql = format!("SELECT consumer, message_id, count(*) FROM {schema}.seen GROUP BY 1, 2");
        let seen: Vec<(String, String, i64)> =
            sqlx::query_as(AssertSqlSafe(sql)).fetch_all(&self.base.pool).await?;
        let expected = self.expected();
        for (consumer, expected) in &expected {
            let of = || seen.iter().filter(|(name, ..)| name == consumer);
            let twice: Vec<_> = of().filter(|(.., count)| *count != 1).collect();
            if !twice.is_empty() {
                return self.base.violated(format!("`{consumer}` has effects twice: {twice:?}"));
            }
            let found: BTreeSet<_> = of().map(|(_, id, _)| id.clone()).collect();
            if found != *expected {
                let lost: Vec<_> = expected.difference(&found).take(5).collect();
                let odd: Vec<_> = found.difference(expected).take(5).collect();
                return self.base.violated(format!(
                    "`{consumer}`: effects of {lost:?} are lost, and those of {odd:?} odd"
                ));
            }
        }
        for (topic, consumer) in [(&self.events, "shipping"), (&self.last, "last")] {
            let arrived = self.read(topic).await?;
            let ids: BTreeSet<_> = arrived.iter().map(Arrived::id).collect();
            if ids != expected[consumer] {
                return self.base.violated(format!("`{topic}` holds other messages: {ids:?}"));
            }
        }
        self.check_order(&self.read(&self.events).await?, 0)?;
        if !self.read(&self.late).await?.is_empty() {
            return self.base.violated("what is due later was sent".to_owned());
        }
        let parked = self
            .base
            .number("SELECT count(*) FROM oncebox.outgoing WHERE status IN ('parked', 'discarded')")
            .await?;
        if parked > 0 {
            return self.base.violated(format!("{parked} outgoing messages are given up"));
        }
        self.base.check_whole().await
    }

    /// Of each key, the first arrivals of what orders emitted are in the order of the orders. What
    /// comes again comes under a known id.
    pub fn check_order(&self, arrived: &[Arrived], ordinal: u32) -> Result<()> {
        let tenant = &self.base.tenant.name;
        let places: BTreeMap<_, _> = (0..)
            .zip(&self.placed)
            .map(|(place, order)| (derived_id(tenant, "orders", &order.id, ordinal), place))
            .collect();
        let mut highest: BTreeMap<&[u8], i32> = BTreeMap::new();
        let mut known = BTreeSet::new();
        for record in arrived {
            let id = record.id();
            if !known.insert(id.clone()) {
                continue;
            }
            let key = record.key.as_deref().context("a record without its key")?;
            let place: i32 = *places.get(&id).context("a record of no order")?;
            let before = highest.insert(key, place);
            if before.is_some_and(|before| before > place) {
                let key = String::from_utf8_lossy(key);
                return self.base.violated(format!("a message of `{key}` passed another: {id}"));
            }
        }
        Ok(())
    }

    /// The number of outgoing messages to a topic in a status.
    pub async fn count(&self, topic: &str, status: &str) -> Result<i64> {
        self.base.number(&counting(topic, status)).await
    }

    /// A query for the number of messages that are due later and are in a status.
    pub fn late_in(&self, status: &str) -> String {
        counting(&self.late, status)
    }

    /// Every record of a topic, partition after partition.
    pub async fn read(&self, topic: &str) -> Result<Vec<Arrived>> {
        read_topic(self.base.kafka().bootstrap(), topic).await
    }
}

/// Ends the leases of relays that were killed, as the time does, and their marks of consumers that
/// they were starting, for which others would wait. No host may live.
pub async fn end_leases(base: &HostFixture) -> Result<()> {
    let end = "UPDATE oncebox.outgoing SET locked_until = now() - interval '1 second' WHERE status \
        = 'in_progress'";
    base.execute(end).await?;
    // The marks are in the host's database, where the tenant may have one of its own.
    let mut host = PgConnection::connect(base.database_url()).await?;
    host.execute("DELETE FROM oncebox.start_mark").await?;
    Ok(host.close().await?)
}

/// Reads every record of a topic of the shop, partition after partition.
pub async fn read_topic(brokers: &str, topic: &str) -> Result<Vec<Arrived>> {
    let (topic, brokers) = (topic.to_owned(), brokers.to_owned());
    let read = move || -> Result<Vec<Arrived>> {
        let client: BaseConsumer = ClientConfig::new()
            .set("bootstrap.servers", brokers)
            .set("group.id", format!("reader-{:08x}", rand::random::<u32>()))
            .set("enable.auto.commit", "false")
            .set("log_level", "0")
            .create()
            .context("failed to make a client")?;
        let mut all = Vec::new();
        for partition in 0..PARTITIONS {
            let (low, high) = client.fetch_watermarks(&topic, partition, BROKER_TIMEOUT)?;
            if low == high {
                continue;
            }
            let mut list = TopicPartitionList::new();
            list.add_partition_offset(&topic, partition, Offset::Offset(low))?;
            client.assign(&list)?;
            let mut next = low;
            while next < high {
                let record = client.poll(BROKER_TIMEOUT).context("a record is missing")??.detach();
                ensure!(record.partition() == partition, "a record of another partition");
                next = record.offset() + 1;
                all.push(Arrived::of(&record));
            }
        }
        Ok(all)
    };
    tokio::task::spawn_blocking(read).await?
}

/// Publishes records with an id and a type, those of a key to one partition.
pub struct Publisher(FutureProducer);

impl Publisher {
    /// A publisher for these brokers.
    pub fn new(brokers: &str) -> Result<Self> {
        let producer = ClientConfig::new()
            .set("bootstrap.servers", brokers)
            .set("enable.idempotence", "true")
            .set("log_level", "0")
            .create()
            .context("failed to start the publisher")?;
        Ok(Self(producer))
    }

    /// Publishes a record, and waits until the brokers have it.
    pub async fn publish(
        &self,
        topic: &str,
        (id, event_type, key): (&str, &str, &str),
        payload: &str,
    ) -> Result<()> {
        self.publish_with(topic, (id, event_type, key), payload, &[]).await
    }

    /// Publishes a record with further headers.
    pub async fn publish_with(
        &self,
        topic: &str,
        (id, event_type, key): (&str, &str, &str),
        payload: &str,
        further: &[(&str, &str)],
    ) -> Result<()> {
        let headers = OwnedHeaders::new()
            .insert(Header { key: "type", value: Some(event_type) })
            .insert(Header { key: "id", value: Some(id) });
        let headers = further.iter().fold(headers, |headers, (key, value)| {
            headers.insert(Header { key, value: Some(*value) })
        });
        let record = FutureRecord::to(topic).key(key).payload(payload).headers(headers);
        let sent = self.0.send(record, BROKER_TIMEOUT).await;
        sent.map(drop).map_err(|(error, _)| error).context("a record was not published")
    }
}

fn counting(topic: &str, status: &str) -> String {
    format!(
        "SELECT count(*) FROM oncebox.outgoing WHERE destination = 'kafka:{topic}' AND status = \
            '{status}'"
    )
}

/// A consumer in the order of the keys. What comes from Kafka through a relay is known by the
/// headers of CloudEvents.
fn policy(name: &str, topic: &str, (shortest, longest): (u32, u32)) -> Result<Policy> {
    let identity = if name == "orders" {
        "id = [{ header = 'id' }], event_type = [{ header = 'type' }]"
    } else {
        "id = [{ header = 'ce_id' }], event_type = [{ header = 'ce_type' }]"
    };
    let policy = format!(
        "topics = ['{topic}']\nack = 'after_commit'\norder = 'key'\nidentity = {{ {identity} }}\n\
         retry = {{ attempts_max = 20, backoff_min_ms = {shortest}, backoff_max_ms = {longest}, \
         lease_ms = 4000 }}\nlimits = {{ deadline_ms = 1400 }}\n\
         kafka.properties = {{ 'session.timeout.ms' = '6000', 'heartbeat.interval.ms' = '300', \
         'auto.commit.interval.ms' = '100', 'reconnect.backoff.max.ms' = '500', \
         'topic.metadata.refresh.interval.ms' = '1000' }}"
    );
    Ok(Policy::parse(&policy)?)
}
