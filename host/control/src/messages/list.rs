//! Lists of inbox rows, and single rows.

use std::{
    collections::{HashMap, HashSet},
    time::Duration,
};

use chrono::{DateTime, Utc};
use oncebox_model::{MessageStatus, error::InboxError};
use sqlx::{PgPool, Postgres, QueryBuilder, Row};

use super::filter::{FROM, Filter, NEWEST_FIRST};
use crate::{handles::Messages, tenants::Tenant};

/// A row of the inbox without its payload.
#[derive(Debug, Clone, serde::Serialize, sqlx::FromRow)]
pub struct InboxRow {
    /// Name of the tenant.
    pub tenant: String,
    /// Name of the consumer.
    pub consumer: String,
    /// The message id.
    pub message_id: String,
    /// Status.
    pub status: MessageStatus,
    /// Reason for the status: a [`Reason`](oncebox_model::Reason), and details after a colon.
    pub reason: Option<String>,
    /// Type of the event, by which the handler is chosen; none in a light row, as the next two.
    pub event_type: Option<String>,
    /// Version of the event's schema.
    pub event_version: Option<String>,
    /// CloudEvents `source`, or the topic.
    pub source: Option<String>,
    /// Kafka topic of the record.
    pub topic: String,
    /// Kafka partition of the record.
    pub partition: i32,
    /// Kafka offset of the record.
    pub offset: i64,
    /// Runs so far.
    pub attempts: i32,
    /// Runs that ended without an answer.
    pub crashes: i32,
    /// Text of the last failure.
    pub last_error: Option<String>,
    /// Time of the next run.
    pub next_attempt_at: Option<DateTime<Utc>>,
    /// Time at which the lease ends.
    pub locked_until: Option<DateTime<Utc>>,
    /// SHA-256 of the component that last ran it.
    pub version: Option<String>,
    #[serde(skip)]
    pub(crate) version_id: Option<i32>,
    /// Result that the handler returned.
    pub result: Option<serde_json::Value>,
    /// HMAC-SHA-256 of the payload that came, under a key of the tenant; none in a light row.
    pub payload_hash: Option<String>,
    /// Size of the stored payload, bytes.
    pub payload_bytes: Option<i32>,
    /// W3C trace context.
    pub trace_parent: Option<String>,
    /// Time of the first claim.
    pub received_at: DateTime<Utc>,
    /// Time at which it was settled.
    pub processed_at: Option<DateTime<Utc>>,
    /// Time at which all that it held of its payload was erased.
    pub erased_at: Option<DateTime<Utc>>,
}

impl InboxRow {
    /// Returns whether the row is light: its message completed, and its consumer keeps no more of
    /// it.
    pub fn is_light(&self) -> bool {
        self.status == MessageStatus::Completed && self.event_type.is_none()
    }
}

/// A row with the stored parts of its record.
#[derive(Debug, Clone)]
pub struct InboxDetail {
    /// The row.
    pub row: InboxRow,
    /// Key of the record.
    pub key: Option<Vec<u8>>,
    /// Whether headers and payload are kept.
    pub is_kept: bool,
    /// Headers; empty where they are not stored.
    pub headers: oncebox_model::record::Headers,
    /// Payload; none where it is not stored.
    pub payload: Option<Vec<u8>>,
}

const ROW: &str = "SELECT t.name AS tenant, c.name AS consumer, i.message_id, i.status, i.reason, \
    i.event_type, i.event_version, \
    i.version_id, i.source, i.topic, i.partition, i.\"offset\", i.attempts, i.crashes, \
    i.last_error, i.next_attempt_at, i.locked_until, \
    encode(v.digest, 'hex') AS version, i.result, encode(i.payload_hash, 'hex') AS payload_hash, \
    octet_length(i.payload) AS payload_bytes, i.trace_parent, i.received_at, i.processed_at, \
    i.erased_at";

/// Most messages of one consumer that a list reads, from the newest on, for conditions without an
/// index.
pub const LOOKED_AT_MAX: i64 = 20_000;

/// The number of messages that a list reads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Depth {
    /// At most `LOOKED_AT_MAX` messages of each consumer, so that the time does not depend on the
    /// size of the inbox. Where these are not enough, the list is refused with advice for a
    /// narrower filter.
    Bounded,
    /// All messages, for callers that read the whole inbox.
    Whole,
}

/// Longest wait for a tenant's own database, while other callers wait behind it.
const ANSWER_MAX: Duration = Duration::from_secs(10);

impl Messages<'_> {
    /// Lists rows of the inbox, newest first. A list over all tenants leaves out those whose own
    /// database does not answer, and logs that. A filter without an index is refused where the
    /// newest `LOOKED_AT_MAX` messages of a consumer are not enough.
    pub async fn inbox_list(&self, filter: &Filter) -> Result<Vec<InboxRow>, InboxError> {
        self.inbox_list_to(filter, Depth::Bounded).await
    }

    /// Lists rows of the inbox as [`Messages::inbox_list`] does, to a given depth.
    pub(crate) async fn inbox_list_to(
        &self,
        filter: &Filter,
        depth: Depth,
    ) -> Result<Vec<InboxRow>, InboxError> {
        let versions = &self.versions_like(filter.version.as_deref()).await?;
        let tenants = self
            .0
            .tenants()
            .list()
            .await?
            .into_iter()
            .filter(|tenant| filter.tenant.as_ref().is_none_or(|name| *name == tenant.name));
        let (mut own, hosts): (Vec<_>, Vec<_>) =
            tenants.partition(|tenant| tenant.database.is_some());
        // A named database is asked once, for all of its tenants.
        let mut asked = HashSet::new();
        own.retain(|tenant| {
            tenant.database_name().is_none_or(|name| asked.insert(name.to_owned()))
        });
        let mut rows = if hosts.is_empty() {
            Vec::new()
        } else {
            list(&self.0.pool, filter, versions, depth).await?
        };
        let asked = own.iter().map(|tenant| async move {
            (tenant, self.inbox_list_of(tenant, filter, versions, depth).await)
        });
        for (tenant, found) in futures::future::join_all(asked).await {
            match found {
                Ok(found) => rows.extend(found),
                Err(error)
                    if filter.tenant.is_none()
                        && !(tenant.database_name().is_some()
                            && matches!(error, InboxError::Invalid(_))) =>
                {
                    tracing::warn!(tenant = tenant.name, database = tenant.database, %error, "the \
                        tenant's database does not answer; messages there are not listed");
                }
                Err(error) => return Err(error),
            }
        }
        rows.sort_by(|a, b| {
            b.received_at.cmp(&a.received_at).then_with(|| a.message_id.cmp(&b.message_id))
        });
        rows.truncate(filter.limit.max(0) as usize);
        Ok(rows)
    }

    /// Lists the rows of a tenant outside the host's database. In a named one it lists those of all
    /// tenants, where the filter names none.
    async fn inbox_list_of(
        &self,
        tenant: &Tenant,
        filter: &Filter,
        versions: &Option<Vec<i32>>,
        depth: Depth,
    ) -> Result<Vec<InboxRow>, InboxError> {
        let mut filter = filter.clone();
        // A tenant's own database may hold rows in the name of another one.
        if tenant.database_name().is_none() {
            filter.tenant = Some(tenant.name.clone());
        }
        let database = self.0.tenant_databases().get(tenant)?;
        let listed =
            tokio::time::timeout(ANSWER_MAX, list(&database.pool, &filter, versions, depth)).await;
        let mut rows = listed.map_err(|_| away(tenant))??;
        self.name_versions(&mut rows).await?;
        Ok(rows)
    }

    /// Finds the versions whose digests begin with `prefix`; none without a prefix.
    pub(crate) async fn versions_like(
        &self,
        prefix: Option<&str>,
    ) -> Result<Option<Vec<i32>>, InboxError> {
        const IDS: &str = "SELECT version_id FROM oncebox.version WHERE starts_with(encode(digest, \
            'hex'), lower($1))";
        let Some(prefix) = prefix else { return Ok(None) };
        Ok(Some(sqlx::query_scalar(IDS).bind(prefix).fetch_all(&self.0.pool).await?))
    }

    /// Sets the digests of the rows' versions. Versions are rows of the host's database, so a
    /// tenant's own database cannot name them.
    async fn name_versions(&self, rows: &mut [InboxRow]) -> Result<(), InboxError> {
        let digests = self.digests(rows.iter().filter_map(|row| row.version_id).collect()).await?;
        for row in rows {
            row.version = row.version_id.and_then(|id| digests.get(&id).cloned());
        }
        Ok(())
    }

    /// Reads the digests of versions.
    pub(crate) async fn digests(&self, ids: Vec<i32>) -> Result<HashMap<i32, String>, InboxError> {
        const DIGESTS: &str = "SELECT version_id, encode(digest, 'hex') FROM oncebox.version WHERE \
            version_id = ANY ($1)";
        Ok(sqlx::query_as(DIGESTS).bind(ids).fetch_all(&self.0.pool).await?.into_iter().collect())
    }

    /// Returns one row with its record.
    pub async fn inbox_show(
        &self,
        tenant: &str,
        consumer: &str,
        message_id: &str,
    ) -> Result<InboxDetail, InboxError> {
        const WHERE: &str = " AND t.name = $1 AND c.name = $2 AND i.message_id = $3";
        let database = self.0.tenant_databases().get(&self.0.tenants().get(tenant).await?)?;
        let query = sqlx::query_as(sqlx::AssertSqlSafe([ROW, FROM, WHERE].concat()));
        let row: Option<InboxRow> = query
            .bind(tenant)
            .bind(consumer)
            .bind(message_id)
            .fetch_optional(&database.pool)
            .await?;
        let mut row = row.ok_or_else(|| {
            InboxError::NotFound(format!(
                "the inbox of `{tenant}/{consumer}` holds no message `{message_id}`"
            ))
        })?;
        if database.is_dedicated {
            self.name_versions(std::slice::from_mut(&mut row)).await?;
        }
        const RECORD: &str = "SELECT key, headers, payload FROM oncebox.inbox_message WHERE \
            tenant_name = $1 AND consumer_name = $2 AND message_id = $3";
        let record = sqlx::query(RECORD)
            .bind(tenant)
            .bind(consumer)
            .bind(message_id)
            .fetch_one(&database.pool)
            .await?;
        let headers = record.try_get::<Option<&[u8]>, _>("headers")?;
        Ok(InboxDetail {
            row,
            key: record.try_get("key")?,
            is_kept: headers.is_some(),
            headers: oncebox_model::headers::decode(headers.unwrap_or_default()),
            payload: record.try_get("payload")?,
        })
    }
}

async fn list(
    pool: &PgPool,
    filter: &Filter,
    versions: &Option<Vec<i32>>,
    depth: Depth,
) -> Result<Vec<InboxRow>, InboxError> {
    let rows: Vec<InboxRow> =
        question("", filter, versions, depth).build_query_as().fetch_all(pool).await?;
    let is_short =
        (rows.len() as i64) < filter.limit && !filter.is_in_an_index() && depth == Depth::Bounded;
    if is_short && goes_on(pool, filter).await? {
        return Err(InboxError::Invalid(too_wide(rows.len())));
    }
    Ok(rows)
}

/// Builds the statement that answers a filter, after the prefix `words`.
fn question(
    words: &str,
    filter: &Filter,
    versions: &Option<Vec<i32>>,
    depth: Depth,
) -> QueryBuilder<Postgres> {
    let mut query = QueryBuilder::<Postgres>::new([words, ROW].concat());
    filter.push_newest(&mut query, "i.*");
    let looked_at_max = match (filter.is_in_an_index(), depth) {
        (true, _) => Some(filter.limit),
        (false, Depth::Bounded) => Some(LOOKED_AT_MAX),
        (false, Depth::Whole) => None,
    };
    if let Some(looked_at_max) = looked_at_max {
        query.push(" LIMIT ").push_bind(looked_at_max);
    }
    query.push(
        ") i JOIN oncebox.consumer c USING (consumer_id) JOIN oncebox.tenant t USING (tenant_id) \
         LEFT JOIN oncebox.version v USING (version_id) WHERE true",
    );
    filter.push(&mut query, versions);
    query.push(NEWEST_FIRST).push(" LIMIT ").push_bind(filter.limit);
    query
}

#[cfg(feature = "test-hooks")]
impl Messages<'_> {
    /// Returns PostgreSQL's plan of a list in the host's own database, with the pages that it
    /// reads; for tests.
    pub async fn inbox_list_plan(&self, filter: &Filter) -> Result<Vec<String>, InboxError> {
        let versions = self.versions_like(filter.version.as_deref()).await?;
        let mut question =
            question("EXPLAIN (ANALYZE, BUFFERS) ", filter, &versions, Depth::Bounded);
        Ok(question.build_query_scalar().fetch_all(&self.0.pool).await?)
    }
}

/// Returns whether a consumer has more messages than the list has read.
async fn goes_on(pool: &PgPool, filter: &Filter) -> Result<bool, InboxError> {
    let mut query = QueryBuilder::<Postgres>::new("SELECT EXISTS (SELECT");
    filter.push_newest(&mut query, "");
    query.push(" OFFSET ").push_bind(LOOKED_AT_MAX).push(" LIMIT 1) i)");
    Ok(query.build_query_scalar().fetch_one(pool).await?)
}

fn too_wide(found: usize) -> String {
    let enough = match found {
        0 => String::new(),
        found => format!(", or ask for at most {found}"),
    };
    format!(
        "of the newest {LOOKED_AT_MAX} messages of a consumer {found} are like that, and to find \
            more all others would be read; ask for \
         one state (`status`) or a time (`since`, `until`){enough}"
    )
}

fn away(tenant: &Tenant) -> InboxError {
    InboxError::TenantDatabaseUnavailable {
        tenant: tenant.name.clone(),
        source: sqlx::Error::Io(std::io::ErrorKind::TimedOut.into()),
    }
}
