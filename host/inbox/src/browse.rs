//! Looking into the inbox.

use std::{collections::HashMap, time::Duration};

use sqlx::{PgPool, Row};

use crate::{admin::Admin, error::InboxError, tenant::Tenant};

/// Which rows to list.
#[derive(Debug, Clone, Default)]
pub struct Filter {
    /// Only this tenant.
    pub tenant: Option<String>,
    /// Only this consumer.
    pub consumer: Option<String>,
    /// Only this status.
    pub status: Option<String>,
    /// At most this many, newest first.
    pub limit: i64,
}

/// A row of the inbox without its payload.
#[derive(Debug, Clone, serde::Serialize, sqlx::FromRow)]
pub struct InboxRow {
    /// Name of the tenant.
    pub tenant: String,
    /// Name of the consumer.
    pub consumer: String,
    /// The message id.
    pub message_id: String,
    /// State.
    pub status: String,
    /// Why it is in this state.
    pub reason: Option<String>,
    /// What chose its handler.
    pub event_type: Option<String>,
    /// Version of the event's schema.
    pub event_version: Option<String>,
    /// CloudEvents `source`, or the topic.
    pub source: Option<String>,
    /// Topic it came from.
    pub topic: String,
    /// Partition it came from.
    pub partition: i32,
    /// Offset it came from.
    pub offset: i64,
    /// Runs so far.
    pub attempts: i32,
    /// Runs that ended without an answer.
    pub crashes: i32,
    /// What the last failure said.
    pub last_error: Option<String>,
    /// When it runs next.
    pub next_attempt_at: Option<chrono::DateTime<chrono::Utc>>,
    /// When its lease ends.
    pub locked_until: Option<chrono::DateTime<chrono::Utc>>,
    /// SHA-256 of the component that completed it.
    pub version: Option<String>,
    #[serde(skip)]
    version_id: Option<i32>,
    /// What the handler returned.
    pub result: Option<serde_json::Value>,
    /// SHA-256 of the payload.
    pub payload_hash: Option<String>,
    /// Bytes of payload kept.
    pub payload_bytes: Option<i32>,
    /// W3C trace context.
    pub trace_parent: Option<String>,
    /// When it was first claimed.
    pub received_at: chrono::DateTime<chrono::Utc>,
    /// When it was settled.
    pub processed_at: Option<chrono::DateTime<chrono::Utc>>,
}

/// A row with what is kept of its record.
#[derive(Debug, Clone)]
pub struct InboxDetail {
    /// The row.
    pub row: InboxRow,
    /// Key of the record.
    pub key: Option<Vec<u8>>,
    /// Headers, where they are kept.
    pub headers: crate::message::Headers,
    /// Payload, where it is kept.
    pub payload: Option<Vec<u8>>,
}

const ROW: &str = "SELECT t.name AS tenant, c.name AS consumer, i.message_id, i.status, i.reason, i.event_type, i.event_version, \
    i.version_id, i.source, i.topic, i.partition, i.\"offset\", i.attempts, i.crashes, i.last_error, i.next_attempt_at, i.locked_until, \
    encode(v.digest, 'hex') AS version, i.result, encode(i.payload_hash, 'hex') AS payload_hash, \
    octet_length(i.payload) AS payload_bytes, i.trace_parent, i.received_at, i.processed_at \
    FROM oncebox.inbox i JOIN oncebox.consumer c USING (consumer_id) JOIN oncebox.tenant t USING (tenant_id) \
    LEFT JOIN oncebox.version v USING (version_id) WHERE ";

/// How long a tenant's own database may take to answer while others wait behind it.
const ANSWER_MAX: Duration = Duration::from_secs(10);

impl Admin {
    /// Rows of the inbox, newest first. Over all tenants, those whose own database does not answer are left
    /// out, and the log says so.
    pub async fn inbox_list(&self, filter: &Filter) -> Result<Vec<InboxRow>, InboxError> {
        let tenants = self.tenants().await?.into_iter().filter(|tenant| filter.tenant.as_ref().is_none_or(|name| *name == tenant.name));
        let (own, hosts): (Vec<_>, Vec<_>) = tenants.partition(|tenant| tenant.database.is_some());
        let mut rows = if hosts.is_empty() { Vec::new() } else { list(&self.pool, filter).await? };
        let asked = own.iter().map(|tenant| async move { (tenant, self.inbox_list_of(tenant, filter).await) });
        for (tenant, found) in futures::future::join_all(asked).await {
            match found {
                Ok(found) => rows.extend(found),
                Err(error) if filter.tenant.is_none() => {
                    tracing::warn!(tenant = tenant.name, %error, "the tenant's own database does not answer; its messages are not listed");
                }
                Err(error) => return Err(error),
            }
        }
        rows.sort_by(|a, b| b.received_at.cmp(&a.received_at).then_with(|| a.message_id.cmp(&b.message_id)));
        rows.truncate(filter.limit.max(0) as usize);
        Ok(rows)
    }

    /// The rows of a tenant with a database of its own.
    async fn inbox_list_of(&self, tenant: &Tenant, filter: &Filter) -> Result<Vec<InboxRow>, InboxError> {
        let filter = Filter { tenant: Some(tenant.name.clone()), ..filter.clone() };
        let place = self.place(tenant)?;
        let listed = tokio::time::timeout(ANSWER_MAX, list(&place.pool, &filter)).await;
        let mut rows = listed.map_err(|_| away(tenant))??;
        self.name_versions(&mut rows).await?;
        Ok(rows)
    }

    /// Versions are rows of the host's database.
    async fn name_versions(&self, rows: &mut [InboxRow]) -> Result<(), InboxError> {
        const DIGESTS: &str = "SELECT version_id, encode(digest, 'hex') FROM oncebox.version WHERE version_id = ANY ($1)";
        let ids: Vec<i32> = rows.iter().filter_map(|row| row.version_id).collect();
        let digests: HashMap<i32, String> = sqlx::query_as(DIGESTS).bind(ids).fetch_all(&self.pool).await?.into_iter().collect();
        for row in rows {
            row.version = row.version_id.and_then(|id| digests.get(&id).cloned());
        }
        Ok(())
    }

    /// One row with its record.
    pub async fn inbox_show(&self, tenant: &str, consumer: &str, message_id: &str) -> Result<InboxDetail, InboxError> {
        const WHERE: &str = "t.name = $1 AND c.name = $2 AND i.message_id = $3";
        let place = self.place(&self.tenant(tenant).await?)?;
        let query = sqlx::query_as(sqlx::AssertSqlSafe([ROW, WHERE].concat()));
        let row: Option<InboxRow> = query.bind(tenant).bind(consumer).bind(message_id).fetch_optional(&place.pool).await?;
        let mut row =
            row.ok_or_else(|| InboxError::NotFound(format!("the inbox of `{tenant}/{consumer}` holds no message `{message_id}`")))?;
        if place.is_own {
            self.name_versions(std::slice::from_mut(&mut row)).await?;
        }
        const RECORD: &str =
            "SELECT key, headers, payload FROM oncebox.inbox_message WHERE tenant_name = $1 AND consumer_name = $2 AND message_id = $3";
        let record = sqlx::query(RECORD).bind(tenant).bind(consumer).bind(message_id).fetch_one(&place.pool).await?;
        let headers = record.try_get::<Option<&[u8]>, _>("headers")?.unwrap_or_default();
        Ok(InboxDetail { row, key: record.try_get("key")?, headers: crate::headers::decode(headers), payload: record.try_get("payload")? })
    }
}

async fn list(pool: &PgPool, filter: &Filter) -> Result<Vec<InboxRow>, InboxError> {
    const WHERE: &str = "($1::text IS NULL OR t.name = $1) AND ($2::text IS NULL OR c.name = $2) AND ($3::text IS NULL OR i.status = $3) \
        ORDER BY i.received_at DESC, i.message_id LIMIT $4";
    let query = sqlx::query_as(sqlx::AssertSqlSafe([ROW, WHERE].concat()));
    Ok(query.bind(&filter.tenant).bind(&filter.consumer).bind(&filter.status).bind(filter.limit).fetch_all(pool).await?)
}

fn away(tenant: &Tenant) -> InboxError {
    InboxError::PlaceAway { tenant: tenant.name.clone(), source: sqlx::Error::Io(std::io::ErrorKind::TimedOut.into()) }
}
