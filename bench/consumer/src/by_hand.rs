//! The idempotent consumer of articles and code bases, complete and without tricks: rdkafka's
//! `StreamConsumer`, sqlx, a table of processed ids, a transaction per message.
//!
//! It is generous in three ways. Each partition has a consumer and a connection of its own. The
//! connection is not pinged before each use, as sqlx's pool would. Statements stay prepared.
//!
//! With `--messages-max` above one it shares a transaction among the messages that are there: one
//! statement claims their ids, sorted, so that two consumers cannot lock them crosswise.
//!
//! With an outbox, the transaction also inserts what is to be sent of the message (`outbox.rs`).

use std::collections::HashSet;

use anyhow::{Context, Result};
use clap::Args;
use futures::FutureExt;
use rdkafka::{
    ClientConfig, Message,
    consumer::{Consumer, StreamConsumer},
    message::{BorrowedMessage, Headers},
};
use sqlx::{Connection, PgConnection};
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use crate::{Servers, order::Order, outbox, until_terminated};

#[derive(Args)]
pub(crate) struct ByHandOptions {
    #[command(flatten)]
    servers: Servers,
    /// The topic.
    #[arg(long)]
    topic: String,
    /// The Kafka group.
    #[arg(long)]
    group: String,
    /// Partitions of the topic, and consumers that join the group.
    #[arg(long)]
    partitions: usize,
    /// Most messages of a transaction.
    #[arg(long, default_value_t = 1)]
    messages_max: usize,
    /// A topic to which an outbox sends a record of each message. By default there is none.
    #[arg(long)]
    outbox_to: Option<String>,
}

const CLAIM: &str = "INSERT INTO processed (message_id) VALUES ($1) ON CONFLICT DO NOTHING";
/// Claims ids and returns the new ones. Its transaction commits what is done, or nothing.
const CLAIM_ALL: &str = "INSERT INTO processed (message_id, done) SELECT DISTINCT id, true FROM \
    unnest($1::text[]) AS o(id) ORDER BY id ON CONFLICT DO NOTHING RETURNING message_id";
/// SQLSTATE of a transaction that was rolled back to end a deadlock.
const DEADLOCK: &str = "40P01";
const DONE: &str = "UPDATE processed SET done = true WHERE message_id = $1";

pub(crate) async fn run(options: ByHandOptions) -> Result<()> {
    let mut consumers = JoinSet::new();
    for _ in 0..options.partitions {
        let consumer = consumer(&options)?;
        let connection = PgConnection::connect(&options.servers.database)
            .await
            .context("failed to connect to the database")?;
        if options.messages_max > 1 {
            consumers.spawn(consume_batches(consumer, connection, options.messages_max));
        } else {
            consumers.spawn(consume(consumer, connection, options.outbox_to.is_some()));
        }
    }
    let (mut pollers, stop) = (JoinSet::new(), CancellationToken::new());
    if let Some(topic) = options.outbox_to {
        pollers.spawn(outbox::poll(options.servers, topic, stop.clone()));
    }
    tokio::select! {
        ended = until_terminated() => ended?,
        Some(ended) = consumers.join_next() => ended??,
        Some(ended) = pollers.join_next() => ended??,
    }
    stop.cancel();
    while let Some(ended) = pollers.join_next().await {
        ended??;
    }
    Ok(())
}

fn consumer(options: &ByHandOptions) -> Result<StreamConsumer> {
    let consumer: StreamConsumer = ClientConfig::new()
        .set("bootstrap.servers", &options.servers.brokers)
        .set("group.id", &options.group)
        .set("auto.offset.reset", "earliest")
        .set("enable.auto.commit", "true")
        .set("enable.auto.offset.store", "false")
        // The host's interval.
        .set("auto.commit.interval.ms", "500")
        .create()
        .context("failed to make a consumer")?;
    consumer.subscribe(&[&options.topic]).context("failed to subscribe")?;
    Ok(consumer)
}

async fn consume(
    consumer: StreamConsumer,
    mut connection: PgConnection,
    has_outbox: bool,
) -> Result<()> {
    loop {
        let message = consumer.recv().await.context("failed to receive")?;
        process(&mut connection, &message, has_outbox).await?;
        consumer.store_offset_from_message(&message).context("failed to store an offset")?;
    }
}

async fn consume_batches(
    consumer: StreamConsumer,
    mut connection: PgConnection,
    messages_max: usize,
) -> Result<()> {
    loop {
        let mut batch = vec![consumer.recv().await.context("failed to receive")?];
        while batch.len() < messages_max
            && let Some(message) = consumer.recv().now_or_never()
        {
            batch.push(message.context("failed to receive")?);
        }
        while let Err(error) = process_batch(&mut connection, &batch).await {
            // Two batches that update the same accounts in another order.
            let is_deadlock = error.downcast_ref::<sqlx::Error>().is_some_and(|error| {
                error.as_database_error().is_some_and(|error| error.code() == Some(DEADLOCK.into()))
            });
            anyhow::ensure!(is_deadlock, error);
        }
        for message in &batch {
            consumer.store_offset_from_message(message).context("failed to store an offset")?;
        }
    }
}

async fn process_batch(connection: &mut PgConnection, batch: &[BorrowedMessage<'_>]) -> Result<()> {
    let ids = batch.iter().map(message_id).collect::<Result<Vec<_>>>()?;
    let mut tx = connection.begin().await?;
    let new: Vec<String> = sqlx::query_scalar(CLAIM_ALL).bind(&ids).fetch_all(&mut *tx).await?;
    let mut new: HashSet<_> = new.into_iter().collect();
    for (message, id) in batch.iter().zip(ids) {
        if new.remove(id) {
            let payload = message.payload().unwrap_or_default();
            let order: Order = serde_json::from_slice(payload).context("malformed payload")?;
            anyhow::ensure!(order.apply(&mut tx).await?, "no account {}", order.account);
        }
    }
    Ok(tx.commit().await?)
}

async fn process(
    connection: &mut PgConnection,
    message: &BorrowedMessage<'_>,
    has_outbox: bool,
) -> Result<()> {
    let id = message_id(message)?;
    let mut tx = connection.begin().await?;
    if sqlx::query(CLAIM).bind(id).execute(&mut *tx).await?.rows_affected() == 1 {
        let payload = message.payload().unwrap_or_default();
        let order: Order = serde_json::from_slice(payload).context("malformed payload")?;
        anyhow::ensure!(order.apply(&mut tx).await?, "no account {}", order.account);
        if has_outbox {
            outbox::insert(&mut tx, id, payload).await?;
        }
        sqlx::query(DONE).bind(id).execute(&mut *tx).await?;
    }
    Ok(tx.commit().await?)
}

fn message_id<'a>(message: &'a BorrowedMessage<'_>) -> Result<&'a str> {
    let headers = message.headers().context("a message without headers")?;
    let found =
        headers.iter().find(|header| header.key == "message-id").and_then(|header| header.value);
    Ok(std::str::from_utf8(found.context("a message without `message-id`")?)?)
}
