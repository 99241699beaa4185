//! Export of messages with everything that is kept of them, for an archive or an audit.

use std::collections::HashMap;

use oncebox_model::{error::InboxError, headers};
use sqlx::{PgPool, Row};

use crate::{
    consumers::Consumer,
    handles::Messages,
    messages::{
        filter::Filter,
        history::HistoryEvent,
        list::{Depth, InboxDetail, InboxRow},
    },
};

/// Most bytes of records on one page; the first record may exceed it.
const BYTES_MAX: i64 = 8 << 20;
/// Most messages on one page.
pub const EXPORTED_MAX: i64 = 100;

/// A message with its history.
#[derive(Debug, Clone)]
pub struct Exported {
    /// Message; without its record where the caller does not ask for records.
    pub detail: InboxDetail,
    /// Failed runs and operators' actions, oldest first.
    pub history: Vec<HistoryEvent>,
}

impl Messages<'_> {
    /// Returns a page of a consumer's messages, newest first. A page may be shorter than the
    /// filter's limit; an empty page is the end.
    pub async fn inbox_export(
        &self,
        tenant: &str,
        consumer: &str,
        filter: &Filter,
        with_record: bool,
    ) -> Result<Vec<Exported>, InboxError> {
        let consumer = self.0.consumers().get(tenant, consumer).await?;
        let limit = filter.limit.min(EXPORTED_MAX);
        let filter = Filter {
            tenant: Some(tenant.to_owned()),
            consumer: Some(consumer.name.clone()),
            limit,
            ..filter.clone()
        };
        // An export reads all messages.
        let mut rows = self.inbox_list_to(&filter, Depth::Whole).await?;
        let database = self.0.tenant_databases().get(&self.0.tenants().get(tenant).await?)?.pool;
        let ids =
            |rows: &[InboxRow]| rows.iter().map(|row| row.message_id.clone()).collect::<Vec<_>>();
        let mut records = HashMap::new();
        if with_record {
            rows.truncate(fitting(&rows, &sizes(&database, &consumer, &ids(&rows)).await?));
            records = self::records(&database, &consumer, &ids(&rows)).await?;
        }
        let mut histories = self.histories(&database, consumer.consumer_id, &ids(&rows)).await?;
        let exported = |row: InboxRow| {
            let history = histories.remove(&row.message_id).unwrap_or_default();
            let (key, headers, payload) = records.remove(&row.message_id).unwrap_or_default();
            let is_kept = headers.is_some();
            let headers = headers::decode(headers.as_deref().unwrap_or_default());
            Exported { detail: InboxDetail { row, key, is_kept, headers, payload }, history }
        };
        Ok(rows.into_iter().map(exported).collect())
    }
}

/// Returns how many of the first rows fit into one page; at least one.
fn fitting(rows: &[InboxRow], sizes: &HashMap<String, i64>) -> usize {
    let mut bytes = 0;
    let fits = |row: &&InboxRow| {
        bytes += sizes.get(&row.message_id).copied().unwrap_or_default();
        bytes <= BYTES_MAX
    };
    rows.iter().take_while(fits).count().max(1)
}

/// Reads the sizes of messages' records, in bytes, by id.
async fn sizes(
    database: &PgPool,
    consumer: &Consumer,
    ids: &[String],
) -> Result<HashMap<String, i64>, InboxError> {
    const SIZES: &str = "SELECT message_id, (coalesce(octet_length(key), 0) + \
        coalesce(octet_length(headers), 0) \
            + coalesce(octet_length(payload), 0))::bigint FROM oncebox.inbox \
        WHERE consumer_id = $1 AND retention_class = $2 AND message_id = ANY ($3)";
    let query = sqlx::query_as(SIZES)
        .bind(consumer.consumer_id)
        .bind(consumer.policy()?.retention.class())
        .bind(ids);
    Ok(query.fetch_all(database).await?.into_iter().collect())
}

type Record = (Option<Vec<u8>>, Option<Vec<u8>>, Option<Vec<u8>>);

/// Reads key, headers and payload of messages, by id.
async fn records(
    database: &PgPool,
    consumer: &Consumer,
    ids: &[String],
) -> Result<HashMap<String, Record>, InboxError> {
    const RECORDS: &str = "SELECT message_id, key, headers, payload FROM oncebox.inbox \
        WHERE consumer_id = $1 AND retention_class = $2 AND message_id = ANY ($3)";
    let query = sqlx::query(RECORDS)
        .bind(consumer.consumer_id)
        .bind(consumer.policy()?.retention.class())
        .bind(ids);
    let record = |row: sqlx::postgres::PgRow| {
        Ok((
            row.try_get("message_id")?,
            (row.try_get("key")?, row.try_get("headers")?, row.try_get("payload")?),
        ))
    };
    Ok(query
        .fetch_all(database)
        .await?
        .into_iter()
        .map(record)
        .collect::<Result<_, sqlx::Error>>()?)
}
