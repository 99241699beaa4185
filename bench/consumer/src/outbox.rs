//! The transactional outbox of articles and code bases: the consumer's transaction inserts a row,
//! and a poller publishes rows in the order of their ids and marks them.
//!
//! It is generous in three ways. A partial index finds the rows that are not sent. A batch is sent
//! at once, without lingering, and marked in one statement. The poller waits only after a batch
//! that was not full.

use std::time::Duration;

use anyhow::{Context, Result, anyhow};
use rdkafka::{
    ClientConfig,
    message::{Header, OwnedHeaders},
    producer::{FutureProducer, FutureRecord},
};
use sqlx::{Connection, PgConnection};
use tokio::time::sleep;
use tokio_util::sync::CancellationToken;

use crate::Servers;

/// Rows of a batch.
const BATCH: i64 = 500;
/// Pause after a batch that was not full.
const PAUSE: Duration = Duration::from_millis(20);

const EVENT_TYPE: &str = "order.accepted";
const INSERT: &str = "INSERT INTO outbox (key, event_type, payload) VALUES ($1, $2, $3)";
const UNSENT: &str = "SELECT id, key, event_type, payload FROM outbox WHERE sent_at IS NULL \
    ORDER BY id LIMIT $1 FOR UPDATE SKIP LOCKED";
/// The time is that of the statement: `now()` is that of the transaction, which began before the
/// batch was sent.
const MARK: &str = "UPDATE outbox SET sent_at = clock_timestamp() WHERE id = ANY ($1)";

#[derive(sqlx::FromRow)]
struct OutboxRow {
    id: i64,
    key: String,
    event_type: String,
    payload: Vec<u8>,
}

/// Inserts what is to be sent of a message.
pub(crate) async fn insert(connection: &mut PgConnection, id: &str, payload: &[u8]) -> Result<()> {
    sqlx::query(INSERT).bind(id).bind(EVENT_TYPE).bind(payload).execute(connection).await?;
    Ok(())
}

/// Publishes batches, until the end of the one in which `stop` is cancelled.
pub(crate) async fn poll(servers: Servers, topic: String, stop: CancellationToken) -> Result<()> {
    let mut connection = PgConnection::connect(&servers.database)
        .await
        .context("failed to connect to the database")?;
    let producer: FutureProducer = ClientConfig::new()
        .set("bootstrap.servers", &servers.brokers)
        .set("enable.idempotence", "true")
        .set("acks", "all")
        .set("linger.ms", "0")
        .create()
        .context("failed to make a producer")?;
    while !stop.is_cancelled() {
        let rows = publish(&mut connection, &producer, &topic).await?;
        if rows < BATCH {
            tokio::select! {
                () = stop.cancelled() => {}
                () = sleep(PAUSE) => {}
            }
        }
    }
    Ok(())
}

/// Publishes one batch, waits for the brokers' answers, and marks its rows. Returns their number.
async fn publish(
    connection: &mut PgConnection,
    producer: &FutureProducer,
    topic: &str,
) -> Result<i64> {
    let mut tx = connection.begin().await?;
    let rows: Vec<OutboxRow> = sqlx::query_as(UNSENT).bind(BATCH).fetch_all(&mut *tx).await?;
    if rows.is_empty() {
        tx.rollback().await?;
        return Ok(0);
    }
    let mut sent = Vec::with_capacity(rows.len());
    for row in &rows {
        let record =
            FutureRecord::to(topic).key(&row.key).payload(&row.payload).headers(headers(row));
        sent.push(producer.send_result(record).map_err(|(error, _)| error)?);
    }
    for answer in sent {
        let answer = answer.await.map_err(|_| anyhow!("the producer is gone"))?;
        answer.map_err(|(error, _)| error).context("the broker refused a record")?;
    }
    let ids: Vec<i64> = rows.iter().map(|row| row.id).collect();
    sqlx::query(MARK).bind(&ids).execute(&mut *tx).await?;
    tx.commit().await?;
    Ok(rows.len() as i64)
}

/// Returns the headers of a record: those that a receiver needs to recognise it.
fn headers(row: &OutboxRow) -> OwnedHeaders {
    OwnedHeaders::new()
        .insert(Header { key: "message-id", value: Some(&row.key) })
        .insert(Header { key: "event-type", value: Some(&row.event_type) })
}
