//! The transaction that stores a message. The function is in `host/inbox/sql`.

use oncebox_model::{error::InboxError, headers, hooks, message::Message, tx::bounded};
use sqlx::PgPool;

/// Begin of the transaction. The function rests on a snapshot for each statement. A message that
/// another transaction runs at the moment has its id locked; its sender is asked to wait instead.
const BEGIN: &str =
    "BEGIN ISOLATION LEVEL READ COMMITTED READ WRITE; SET LOCAL lock_timeout = '1s'";

/// What became of a message.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Receipt {
    /// The inbox has a new row, of this status.
    New(String),
    /// The inbox had a row under the id: of this status, and with this payload or another one.
    Known(String, bool),
    /// There is no such consumer here, now.
    NotHere,
}

#[derive(sqlx::FromRow)]
struct ReceivedRow {
    outcome: String,
    row_status: Option<String>,
    same_payload: Option<bool>,
}

/// Stores a message of a tenant's consumer. What it returns is committed.
pub(crate) async fn receive(
    pool: &PgPool,
    tenant_id: i32,
    consumer_id: i32,
    message: &Message,
    ordering: Option<i64>,
) -> Result<Receipt, InboxError> {
    const RECEIVE: &str = "SELECT outcome, row_status, same_payload FROM oncebox.receive($1, $2, \
        $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14, $15, $16, $17, $18, $19)";
    let record = &message.record;
    let mut tx = bounded(pool.begin_with(BEGIN)).await?;
    let query = sqlx::query_as(RECEIVE)
        .bind(tenant_id)
        .bind(consumer_id)
        .bind(&message.id)
        .bind(&*record.topic)
        .bind(record.partition)
        .bind(record.offset)
        .bind(record.timestamp_ms)
        .bind(record.key.as_deref())
        .bind(message.ordering_key.as_deref())
        .bind(&message.source)
        .bind(&message.event_type)
        .bind(message.event_version.as_deref())
        .bind(message.content_type.as_deref())
        .bind(message.trace_parent.as_deref())
        .bind(message.payload_hash.as_ref().map(|hash| hash.as_slice()))
        .bind(headers::encode(&record.headers))
        .bind(record.payload.as_deref())
        .bind(ordering)
        .bind(message.sequence.filter(|_| ordering.is_some()));
    let received: ReceivedRow = bounded(query.fetch_one(&mut *tx)).await?;
    hooks::point("ingress:commit:before");
    bounded(tx.commit()).await?;
    hooks::point("ingress:commit:after");
    Ok(match (received.outcome.as_str(), received.row_status) {
        ("new", Some(status)) => Receipt::New(status),
        ("known", Some(status)) => Receipt::Known(status, received.same_payload.unwrap_or(true)),
        _ => Receipt::NotHere,
    })
}
