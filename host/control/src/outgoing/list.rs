//! Lists of outgoing messages, and single ones.

use chrono::{DateTime, Utc};
use oncebox_model::{error::InboxError, outgoing::OutgoingStatus, record::Headers};
use sqlx::{Executor, FromRow, PgPool, Postgres, QueryBuilder, postgres::PgRow};

use super::{WITHIN, filter::OutgoingFilter, within};
use crate::{handles::OutgoingMessages, messages::list::InboxRow};

/// An outgoing message without its key, its headers and its payload.
#[derive(Debug, Clone, serde::Serialize, FromRow)]
pub struct OutgoingRow {
    /// Name of the tenant.
    pub tenant: String,
    /// Name of the consumer whose handler emitted it.
    pub consumer: String,
    /// Id of the message that caused it.
    pub cause: String,
    /// Number of the emit among those of its cause, from 0.
    pub ordinal: i32,
    /// Its id, derived from tenant, consumer, cause and ordinal.
    pub id: String,
    /// Position in the order of the inserts of its database.
    pub position: i64,
    /// Destination, such as `kafka:orders`.
    pub destination: String,
    /// Type of the event.
    pub event_type: String,
    /// Media type of the payload.
    pub content_type: Option<String>,
    /// Status.
    pub status: OutgoingStatus,
    /// Reason for the status, and details after a colon.
    pub reason: Option<String>,
    /// Text of the last failure.
    pub last_error: Option<String>,
    /// Whether an attempt ended without an answer, so that its destination may have it.
    pub may_have_arrived: bool,
    /// Attempts to send it so far.
    pub attempts: i32,
    /// Time at which it is due, as it was emitted.
    pub due_at: DateTime<Utc>,
    /// Time of the next attempt.
    pub next_attempt_at: Option<DateTime<Utc>>,
    /// Time at which the lease of the relay that sends it ends.
    pub locked_until: Option<DateTime<Utc>>,
    /// Host whose relay sends it.
    pub locked_by: Option<String>,
    /// Name by which the handler can cancel it.
    pub cancel_token: Option<String>,
    /// Size of the payload, bytes.
    pub payload_bytes: Option<i32>,
    /// Id that all messages of one process share.
    pub correlation_id: String,
    /// W3C trace context.
    pub trace_parent: Option<String>,
    /// Time of the transaction that emitted it.
    pub created_at: DateTime<Utc>,
    /// Time at which it was confirmed, cancelled or discarded.
    pub settled_at: Option<DateTime<Utc>>,
    /// Status of its endpoint's answer, where that is kept or was delivered.
    pub answer_status: Option<i32>,
}

/// The answer of an endpoint that keeps answers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StoredAnswer {
    /// Media type; none where the answer named none.
    pub content_type: Option<String>,
    /// Body, up to the host's bound.
    pub body: Vec<u8>,
    /// Whether that is all of it.
    pub is_whole: bool,
}

/// An outgoing message with its record and its cause.
#[derive(Debug, Clone)]
pub struct OutgoingDetail {
    /// The row.
    pub row: OutgoingRow,
    /// Key, by which its destination's messages keep their order.
    pub key: Option<Vec<u8>>,
    /// Headers that the handler gave it.
    pub headers: Headers,
    /// Payload.
    pub payload: Option<Vec<u8>>,
    /// Answer of its endpoint; none where none is kept.
    pub answer: Option<StoredAnswer>,
    /// Row of the message that caused it; none where the inbox holds none.
    pub cause: Option<InboxRow>,
}

/// The outgoing messages of one message.
#[derive(Debug, Clone, Default)]
pub struct CausedMessages {
    /// The first of them, by ordinal.
    pub first: Vec<OutgoingRow>,
    /// Their number.
    pub total: i64,
}

/// Row with the stored parts of the record.
#[derive(FromRow)]
struct OutgoingRecord {
    #[sqlx(flatten)]
    row: OutgoingRow,
    key: Option<Vec<u8>>,
    headers: Option<Vec<u8>>,
    payload: Option<Vec<u8>>,
    answer: Option<Vec<u8>>,
    answer_content_type: Option<String>,
    answer_is_whole: Option<bool>,
}

/// Columns of an [`OutgoingRow`], from the tables `t`, `c` and `o`.
const ROW: &str = "SELECT t.name AS tenant, c.name AS consumer, o.message_id AS cause, \
    o.ordinal, o.id, o.position, o.destination, o.event_type, o.content_type, o.status, o.reason, \
    o.last_error, o.may_have_arrived, o.attempts, o.due_at, o.next_attempt_at, o.locked_until, \
    o.locked_by, o.cancel_token, octet_length(o.payload) AS payload_bytes, o.correlation_id, \
    o.trace_parent, o.created_at, o.settled_at, o.answer_status";
/// Further columns of an [`OutgoingRecord`].
const RECORD: &str =
    ", o.key, o.headers, o.payload, o.answer, o.answer_content_type, o.answer_is_whole";
/// Joins behind the rows `o`.
const NAMES: &str = " JOIN oncebox.consumer c USING (consumer_id) \
    JOIN oncebox.tenant t USING (tenant_id)";
/// Most outgoing messages of one message that its history names.
const CAUSED_MAX: i64 = 100;

impl OutgoingMessages<'_> {
    /// Lists outgoing messages of a tenant, newest first. Those behind the position `after` follow
    /// on the page before.
    ///
    /// # Errors
    /// `NotFound` where the tenant or the consumer does not exist, `Invalid` where the filter finds
    /// too little in time, or an error of the database.
    pub async fn list(
        &self,
        tenant: &str,
        filter: &OutgoingFilter,
        after: Option<i64>,
        limit: i64,
    ) -> Result<Vec<OutgoingRow>, InboxError> {
        let pool = self.database(tenant, filter.consumer.as_deref()).await?.pool;
        within(read(&pool, newest(ROW, tenant, filter, after, limit))).await
    }

    /// Returns one outgoing message with its record and its cause. `consumer` and `cause`, where
    /// they are known, make the search short.
    ///
    /// # Errors
    /// `NotFound` where there is none of this id, or an error as of [`OutgoingMessages::list`].
    pub async fn show(
        &self,
        tenant: &str,
        id: &str,
        consumer: Option<String>,
        cause: Option<String>,
    ) -> Result<OutgoingDetail, InboxError> {
        let ids = vec![id.to_owned()];
        let filter = OutgoingFilter { consumer, cause, ids, ..OutgoingFilter::default() };
        let pool = self.database(tenant, filter.consumer.as_deref()).await?.pool;
        let columns = [ROW, RECORD].concat();
        let found: Vec<OutgoingRecord> =
            within(read(&pool, newest(&columns, tenant, &filter, None, 1))).await?;
        let found = found.into_iter().next();
        let OutgoingRecord {
            row,
            key,
            headers,
            payload,
            answer,
            answer_content_type: content_type,
            answer_is_whole,
        } = found.ok_or_else(|| {
            InboxError::NotFound(format!(
                "tenant `{tenant}` has no outgoing message `{id}`{}; one that was sent is removed \
                    after some days",
                filter.cause.as_ref().map_or_else(String::new, |id| format!(" of message `{id}`"))
            ))
        })?;
        let inbox = self.0.messages();
        let cause = match inbox.inbox_show(tenant, &row.consumer, &row.cause).await {
            Ok(detail) => Some(detail.row),
            Err(InboxError::NotFound(_)) => None,
            Err(error) => return Err(error),
        };
        let headers = oncebox_model::headers::decode(&headers.unwrap_or_default());
        let answer = answer.map(|body| {
            let is_whole = answer_is_whole.unwrap_or_default();
            StoredAnswer { content_type, body, is_whole }
        });
        Ok(OutgoingDetail { row, key, headers, payload, answer, cause })
    }

    /// Reads the outgoing messages of one message, by the keys of its row.
    pub(crate) async fn caused(
        &self,
        database: &PgPool,
        consumer_id: i32,
        message_id: &str,
    ) -> Result<CausedMessages, InboxError> {
        const WHERE: &str = " WHERE o.consumer_id = $1 AND o.message_id = $2 \
            ORDER BY o.ordinal LIMIT $3";
        const COUNT: &str = "SELECT count(*) FROM oncebox.outgoing WHERE consumer_id = $1 AND \
            message_id = $2";
        let rows = [ROW, " FROM oncebox.outgoing o", NAMES, WHERE].concat();
        let first: Vec<OutgoingRow> = sqlx::query_as(sqlx::AssertSqlSafe(rows))
            .bind(consumer_id)
            .bind(message_id)
            .bind(CAUSED_MAX)
            .fetch_all(database)
            .await?;
        let mut total = first.len() as i64;
        if total == CAUSED_MAX {
            let query = sqlx::query_scalar(COUNT).bind(consumer_id).bind(message_id);
            total = query.fetch_one(database).await?;
        }
        Ok(CausedMessages { first, total })
    }
}

/// Runs a statement, for no longer than the server's bound.
async fn read<T>(pool: &PgPool, mut query: QueryBuilder<Postgres>) -> Result<Vec<T>, InboxError>
where
    T: for<'r> FromRow<'r, PgRow> + Send + Unpin,
{
    let mut tx = pool.begin().await?;
    tx.execute(sqlx::raw_sql(WITHIN)).await?;
    let rows = query.build_query_as().fetch_all(&mut *tx).await?;
    tx.commit().await?;
    Ok(rows)
}

/// Builds the statement for the newest outgoing messages of a tenant: those of each consumer, then
/// the newest of these.
fn newest(
    columns: &str,
    tenant: &str,
    filter: &OutgoingFilter,
    after: Option<i64>,
    limit: i64,
) -> QueryBuilder<Postgres> {
    let mut query = QueryBuilder::<Postgres>::new(columns);
    query
        .push(
            " FROM (SELECT c.consumer_id AS asked_id FROM oncebox.consumer c JOIN oncebox.tenant t \
            USING (tenant_id) WHERE t.name = ",
        )
        .push_bind(tenant.to_owned());
    filter.push_consumer(&mut query);
    query.push(
        ") asked CROSS JOIN LATERAL (SELECT o.* FROM oncebox.outgoing o WHERE o.consumer_id = \
        asked.asked_id",
    );
    filter.push(&mut query);
    if let Some(after) = after {
        query.push(" AND o.position < ").push_bind(after);
    }
    query.push(" ORDER BY o.position DESC LIMIT ").push_bind(limit);
    query.push(") o").push(NAMES).push(" ORDER BY o.position DESC LIMIT ").push_bind(limit);
    query
}

#[cfg(test)]
mod tests {
    use super::*;

    // What could go wrong: a page of one tenant shows another's messages, or a page begins with
    // what the last one ended with.
    #[test]
    fn a_page_is_of_one_tenant_and_goes_on_behind_a_position() {
        let filter = OutgoingFilter { cause: Some("m-1".to_owned()), ..OutgoingFilter::default() };
        let sql = newest(ROW, "acme", &filter, Some(7), 50).into_string();
        let (_, from) = sql.split_once(" FROM ").expect("tables");
        assert_eq!(
            from,
            "(SELECT c.consumer_id AS asked_id FROM oncebox.consumer c JOIN oncebox.tenant t USING \
                (tenant_id) WHERE t.name = $1) asked CROSS JOIN LATERAL (SELECT o.* FROM \
                oncebox.outgoing o WHERE o.consumer_id = asked.asked_id AND o.message_id = $2 AND \
                o.position < $3 ORDER BY o.position DESC LIMIT $4) o JOIN oncebox.consumer c USING \
                (consumer_id) JOIN oncebox.tenant t USING (tenant_id) ORDER BY o.position DESC \
                LIMIT $5"
        );
        assert!(!ROW.contains("o.payload,"), "a list shows no payload");
        assert!(!ROW.contains("o.answer,"), "a list shows no answer");
    }
}
