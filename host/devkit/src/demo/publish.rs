//! Publishing with a bounded lead, and in shares: the records after a kill are held back until the
//! kill begins, so that the host has transactions to be killed in.
//!
//! The embedded broker keeps 5 MiB per partition and drops the head without an error, so no partition
//! ever holds much that is not yet consumed.

use std::{
    collections::{HashMap, VecDeque},
    hash::{DefaultHasher, Hash, Hasher},
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering},
    },
    time::Duration,
};

use anyhow::{Context, Result, ensure};
use rdkafka::{
    ClientConfig, Offset, TopicPartitionList,
    consumer::{BaseConsumer, Consumer},
    message::{Header, OwnedHeaders},
    producer::{FutureProducer, FutureRecord, Producer},
};
use tokio::{sync::Notify, task::JoinHandle};

use super::{
    PARTITIONS, TENANTS,
    input::{Input, PlannedDelivery},
    topic,
    webhooks::{WebhookTarget, Webhooks},
};

/// Most bytes in a partition that are not consumed.
const LEAD_BYTES: usize = 3 << 20;
const TIMEOUT: Duration = Duration::from_secs(30);

/// The publisher at work.
pub(super) struct Publishing {
    published: Arc<AtomicU64>,
    failure: Arc<Mutex<Option<String>>>,
    task: JoinHandle<()>,
    watch: Arc<Watch>,
    shares: Arc<Shares>,
}

/// The shares of the plan: one before each kill, and one after the last.
struct Shares {
    records: usize,
    shares: usize,
    /// Number of shares that may be published.
    released: AtomicUsize,
    /// Signal to the publisher that another share is released.
    next: Notify,
    /// True while the publisher waits for the next share.
    is_held_back: AtomicBool,
}

impl Shares {
    fn new(records: usize, kills: usize) -> Self {
        let (released, is_held_back) = (AtomicUsize::new(1), AtomicBool::new(false));
        Self { records, shares: kills + 1, released, next: Notify::new(), is_held_back }
    }

    /// Returns whether the record at `index` is of a share that is not released yet.
    fn holds_back(&self, index: usize) -> bool {
        index >= self.records * self.released.load(Ordering::Relaxed) / self.shares
    }
}

/// Starts publishing the plan, in one share more than there are kills.
pub(super) fn start(
    input: Input,
    plan: Vec<PlannedDelivery>,
    kills: usize,
    brokers: &str,
    target: Option<WebhookTarget>,
) -> Publishing {
    let shares = Arc::new(Shares::new(plan.len(), kills));
    let published = Arc::new(AtomicU64::new(0));
    let failure = Arc::new(Mutex::new(None));
    let watch = Arc::new(Watch { brokers: brokers.to_owned() });
    let task = {
        let (published, failure, watch) = (published.clone(), failure.clone(), watch.clone());
        let shares = shares.clone();
        tokio::spawn(async move {
            let webhooks = target.map(|target| Webhooks::start(&target, &published));
            let publishing = publish(input, plan, watch, &published, &shares, webhooks);
            if let Err(error) = publishing.await {
                *failure.lock().expect("no panic while held") = Some(format!("{error:#}"));
            }
        })
    };
    Publishing { published, failure, task, watch, shares }
}

impl Publishing {
    pub(super) fn published(&self) -> u64 {
        self.published.load(Ordering::Relaxed)
    }

    pub(super) fn failure(&self) -> Option<String> {
        self.failure.lock().expect("no panic while held").clone()
    }

    /// Releases the records behind the next kill.
    pub(super) fn release(&self) {
        self.shares.released.fetch_add(1, Ordering::Relaxed);
        self.shares.next.notify_one();
    }

    /// Returns whether the groups have acked all records before the next kill.
    pub(super) async fn is_held_back(&self) -> Result<bool> {
        Ok(self.shares.is_held_back.load(Ordering::Acquire) && self.behind().await? == 0)
    }

    /// Returns whether everything was published and the groups have acked it.
    pub(super) async fn is_consumed(&self) -> Result<bool> {
        if !self.task.is_finished() {
            return Ok(false);
        }
        Ok(self.behind().await? == 0)
    }

    /// Counts the published records that the groups have not acked.
    pub(super) async fn behind(&self) -> Result<i64> {
        let positions = self.watch.positions().await?;
        Ok(positions.values().map(|p| (p.high - p.committed).max(0)).sum())
    }

    pub(super) async fn finish(self) -> Result<()> {
        Ok(self.task.await?)
    }
}

/// The ends of a partition, and its group's committed offset.
struct Position {
    low: i64,
    high: i64,
    committed: i64,
}

type Place = (usize, i32);

/// A watch of the groups' offsets through the broker, as any tool would read them.
struct Watch {
    brokers: String,
}

impl Watch {
    async fn positions(&self) -> Result<HashMap<Place, Position>> {
        let brokers = self.brokers.clone();
        tokio::task::spawn_blocking(move || {
            let mut positions = HashMap::new();
            for tenant in 0..TENANTS.len() {
                of_tenant(&brokers, tenant, &mut positions)?;
            }
            Ok(positions)
        })
        .await?
    }
}

fn of_tenant(brokers: &str, tenant: usize, positions: &mut HashMap<Place, Position>) -> Result<()> {
    let (name, topic) = (TENANTS[tenant], topic(TENANTS[tenant]));
    let group = format!("oncebox.{name}.github");
    let client: BaseConsumer =
        ClientConfig::new().set("bootstrap.servers", brokers).set("group.id", group).create()?;
    let mut list = TopicPartitionList::new();
    (0..PARTITIONS).for_each(|partition| {
        list.add_partition(&topic, partition);
    });
    let committed =
        client.committed_offsets(list, TIMEOUT).context("failed to read the group's offsets")?;
    for partition in 0..PARTITIONS {
        let (low, high) = client
            .fetch_watermarks(&topic, partition, TIMEOUT)
            .context("failed to read a partition's ends")?;
        let committed =
            match committed.find_partition(&topic, partition).map(|element| element.offset()) {
                Some(Offset::Offset(offset)) => offset,
                _ => 0,
            };
        positions.insert((tenant, partition), Position { low, high, committed });
    }
    Ok(())
}

/// The records of each partition that its group has not acked.
#[derive(Default)]
struct Lead {
    records: HashMap<Place, VecDeque<(i64, usize)>>,
    bytes: HashMap<Place, usize>,
}

impl Lead {
    fn has_room(&self, place: Place, bytes: usize) -> bool {
        self.bytes.get(&place).is_none_or(|held| held + bytes <= LEAD_BYTES)
    }

    fn add(&mut self, place: Place, offset: i64, bytes: usize) {
        self.records.entry(place).or_default().push_back((offset, bytes));
        *self.bytes.entry(place).or_default() += bytes;
    }

    fn consumed(&mut self, place: Place, committed: i64) {
        let (Some(records), Some(held)) =
            (self.records.get_mut(&place), self.bytes.get_mut(&place))
        else {
            return;
        };
        while let Some((offset, bytes)) =
            records.front().copied().filter(|(offset, _)| *offset < committed)
        {
            debug_assert!(offset < committed);
            *held -= bytes;
            records.pop_front();
        }
    }
}

async fn publish(
    input: Input,
    plan: Vec<PlannedDelivery>,
    watch: Arc<Watch>,
    published: &AtomicU64,
    shares: &Shares,
    mut webhooks: Option<Webhooks>,
) -> Result<()> {
    let mut deliveries: HashMap<usize, usize> = HashMap::new();
    let producer: FutureProducer = ClientConfig::new()
        .set("bootstrap.servers", &watch.brokers)
        .set("compression.type", "zstd")
        .set("enable.idempotence", "true")
        .set("linger.ms", "5")
        .create()
        .context("failed to start the publisher")?;
    let mut lead = Lead::default();
    let mut sent = Vec::new();
    for (index, delivery) in plan.into_iter().enumerate() {
        while shares.holds_back(index) {
            settle(&mut sent, &mut lead, published).await?;
            shares.is_held_back.store(true, Ordering::Release);
            shares.next.notified().await;
        }
        shares.is_held_back.store(false, Ordering::Release);
        let record = input.record(delivery);
        if let (Some(webhooks), PlannedDelivery::Event(event)) = (&mut webhooks, delivery) {
            let nth = deliveries.entry(event).or_default();
            *nth += 1;
            if (event + *nth).is_multiple_of(2) {
                webhooks.send(record).await?;
                continue;
            }
        }
        let place = (record.tenant, partition(&record.key));
        let bytes = record.payload.len() + 512;
        // Records under way count only once the broker has given them an offset: wait for those
        // first.
        if !lead.has_room(place, bytes + sent.iter().map(|(_, bytes, _)| bytes).sum::<usize>())
            || sent.len() >= 256
        {
            settle(&mut sent, &mut lead, published).await?;
        }
        while !lead.has_room(place, bytes) {
            tokio::time::sleep(Duration::from_millis(20)).await;
            refresh(&watch, &mut lead).await?;
        }
        let topic = topic(TENANTS[record.tenant]);
        let headers = record.headers.iter().fold(OwnedHeaders::new(), |headers, (key, value)| {
            headers.insert(Header { key, value: Some(value) })
        });
        let message = FutureRecord::to(&topic)
            .partition(place.1)
            .key(&record.key)
            .payload(&record.payload)
            .headers(headers);
        let answer = producer
            .send_result(message)
            .map_err(|(error, _)| error)
            .context("failed to publish")?;
        sent.push((place, bytes, answer));
    }
    settle(&mut sent, &mut lead, published).await?;
    if let Some(webhooks) = webhooks {
        webhooks.finish().await?;
    }
    tokio::task::spawn_blocking(move || producer.flush(TIMEOUT)).await??;
    Ok(())
}

async fn settle(
    sent: &mut Vec<(Place, usize, rdkafka::producer::DeliveryFuture)>,
    lead: &mut Lead,
    published: &AtomicU64,
) -> Result<()> {
    for (place, bytes, answer) in sent.drain(..) {
        let delivered = answer
            .await
            .context("the publisher ended")?
            .map_err(|(error, _)| error)
            .context("a record was not published")?;
        lead.add(place, delivered.offset, bytes);
        published.fetch_add(1, Ordering::Relaxed);
    }
    Ok(())
}

/// Frees the room of acked records. Records that the broker dropped before they were acked are an
/// error.
async fn refresh(watch: &Watch, lead: &mut Lead) -> Result<()> {
    for (place, position) in watch.positions().await? {
        ensure!(
            position.low <= position.committed,
            "the embedded broker dropped records of partition {} that were not consumed",
            place.1
        );
        lead.consumed(place, position.committed);
    }
    Ok(())
}

fn partition(key: &str) -> i32 {
    let mut hasher = DefaultHasher::new();
    key.hash(&mut hasher);
    (hasher.finish() % PARTITIONS as u64) as i32
}
