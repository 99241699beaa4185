//! The records that a run has sent to the broker, beside the rows of which they were made.

use std::collections::{BTreeMap, HashSet};

use anyhow::{Context, Result, ensure};
use rdkafka::{
    ClientConfig, Message, Offset, TopicPartitionList,
    consumer::{BaseConsumer, Consumer},
};
use sqlx::AssertSqlSafe;

use crate::{
    load::{Load, Order, TIMEOUT, ends},
    servers::Database,
    variants::Variant,
};

/// Beginning of the names of topics that are sent to.
pub const SENT: &str = "sent-";

/// Returns the topic that a consumer sends to, by its group.
pub fn sent_topic(group: &str) -> String {
    format!("{SENT}{group}")
}

/// A record that was sent.
#[derive(Debug, Clone, PartialEq)]
pub struct SentRecord {
    /// Its key: the id of the message that caused it.
    pub key: String,
    /// Time at which the broker took it, microseconds since the Unix epoch. It is a whole
    /// millisecond, and not later than the true time.
    pub at_us: f64,
}

/// Checks that each message of a load has one row that says that it was sent, and one record, and
/// returns the records.
pub async fn checked(
    brokers: &str,
    group: &str,
    variant: &Variant,
    load: &Load,
    database: &Database,
) -> Result<Vec<SentRecord>> {
    check_rows(database, variant, load.messages).await?;
    let records = read(brokers, &sent_topic(group), load.partitions).await?;
    check_each_once(&records, load.orders().iter().map(Order::id))?;
    Ok(records)
}

/// Returns the query for the id of each cause and the time at which it was seen that its outgoing
/// message is on the broker; null: it is not.
pub fn rows_of(variant: &Variant) -> &'static str {
    match variant.is_host() {
        true => "SELECT message_id AS cause, settled_at AS at FROM oncebox.outgoing",
        false => "SELECT key AS cause, sent_at AS at FROM outbox",
    }
}

/// Checks that so many rows, and no others, say that they were sent.
pub async fn check_rows(database: &Database, variant: &Variant, expected: usize) -> Result<()> {
    let sql = format!("SELECT count(*), count(at) FROM ({}) AS sent", rows_of(variant));
    let query = sqlx::query_as(AssertSqlSafe(sql));
    let (rows, sent): (i64, i64) = query.fetch_one(&mut database.connect().await?).await?;
    ensure!(
        (rows, sent) == (expected as i64, expected as i64),
        "there are {rows} outgoing messages, {sent} of them sent, and {expected} are right"
    );
    Ok(())
}

/// Checks that each key has one record, and that there are no others.
pub fn check_each_once(
    records: &[SentRecord],
    keys: impl IntoIterator<Item = String>,
) -> Result<()> {
    let mut missing: HashSet<String> = keys.into_iter().collect();
    let surplus = records.iter().filter(|record| !missing.remove(&record.key)).count();
    ensure!(
        missing.is_empty() && surplus == 0,
        "{} messages are not on the broker, and of its {} records {surplus} are there twice or are \
            of no message",
        missing.len(),
        records.len()
    );
    Ok(())
}

/// Returns the times at which the broker took records, each with their number, in ascending order.
pub fn times(records: &[SentRecord]) -> Vec<(f64, i64)> {
    let mut counts = BTreeMap::new();
    for record in records {
        *counts.entry(record.at_us as i64).or_insert(0) += 1;
    }
    counts.into_iter().map(|(at, count)| (at as f64, count)).collect()
}

/// Reads all records of a topic.
pub async fn read(brokers: &str, topic: &str, partitions: i32) -> Result<Vec<SentRecord>> {
    let (brokers, topic) = (brokers.to_owned(), topic.to_owned());
    let read = move || {
        read_all(&brokers, &topic, partitions).with_context(|| format!("failed to read `{topic}`"))
    };
    tokio::task::spawn_blocking(read).await?
}

fn read_all(brokers: &str, topic: &str, partitions: i32) -> Result<Vec<SentRecord>> {
    let client: BaseConsumer = ClientConfig::new()
        .set("bootstrap.servers", brokers)
        .set("group.id", format!("reader-of-{topic}"))
        .set("enable.auto.commit", "false")
        .create()
        .context("failed to make a client")?;
    let expected: i64 = ends(&client, topic, partitions)?.iter().sum();
    let mut assignment = TopicPartitionList::new();
    for partition in 0..partitions {
        assignment.add_partition_offset(topic, partition, Offset::Beginning)?;
    }
    client.assign(&assignment)?;
    let mut found = Vec::with_capacity(expected as usize);
    while found.len() < expected as usize {
        let record = client.poll(TIMEOUT).context("the broker does not send all of its records")?;
        let record = record?;
        let key = record.key().context("a record without a key")?;
        let at_ms = record.timestamp().to_millis().context("a record without a time")?;
        found.push(SentRecord {
            key: String::from_utf8_lossy(key).into_owned(),
            at_us: at_ms as f64 * 1e3,
        });
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(key: &str, at_us: f64) -> SentRecord {
        SentRecord { key: key.to_owned(), at_us }
    }

    // What could go wrong: a message that is lost, or there twice, passes for sent.
    #[test]
    fn each_message_is_sent_once_and_no_other() {
        let check = |sent: &[&str]| {
            let records: Vec<_> = sent.iter().map(|key| record(key, 1.0)).collect();
            check_each_once(&records, ["a", "b"].map(str::to_owned))
        };
        assert!(check(&["b", "a"]).is_ok());
        for wrong in [&["a"][..], &["a", "b", "a"], &["a", "b", "c"], &["a", "a"]] {
            assert!(check(wrong).is_err(), "{wrong:?}");
        }
    }

    #[test]
    fn records_of_one_time_are_counted_together() {
        let records = [record("a", 2_000.0), record("b", 1_000.0), record("c", 2_000.0)];
        assert_eq!(times(&records), [(1_000.0, 1), (2_000.0, 2)]);
    }
}
