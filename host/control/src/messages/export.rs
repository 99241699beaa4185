//! Messages with all that is kept of them, for an archive or an audit.

use std::collections::HashMap;

use oncebox_model::{error::InboxError, headers};
use sqlx::{PgPool, Row};

use crate::{
    consumers::Consumer,
    control::Admin,
    messages::{
        history::StoryEvent,
        list::{Depth, Filter, InboxDetail, InboxRow},
    },
};

/// Bytes of records of one page, behind the first.
const BYTES_MAX: i64 = 8 << 20;
/// Messages of one page.
pub const EXPORTED_MAX: i64 = 100;

/// A message with what became of it.
#[derive(Debug, Clone)]
pub struct Exported {
    /// The message; without its record where that was not asked for.
    pub detail: InboxDetail,
    /// Failed runs, and what people did, in order.
    pub history: Vec<StoryEvent>,
}

impl Admin {
    /// A page of a consumer's messages, newest first. It may be shorter than the filter's limit:
    /// the end is a page without messages.
    pub async fn inbox_export(
        &self,
        tenant: &str,
        consumer: &str,
        filter: &Filter,
        with_record: bool,
    ) -> Result<Vec<Exported>, InboxError> {
        let consumer = self.consumer(tenant, consumer).await?;
        let limit = filter.limit.min(EXPORTED_MAX);
        let filter = Filter {
            tenant: Some(tenant.to_owned()),
            consumer: Some(consumer.name.clone()),
            limit,
            ..filter.clone()
        };
        // Whoever exports reads all of it.
        let mut rows = self.inbox_list_to(&filter, Depth::Whole).await?;
        let place = self.place(&self.tenant(tenant).await?)?.pool;
        let ids =
            |rows: &[InboxRow]| rows.iter().map(|row| row.message_id.clone()).collect::<Vec<_>>();
        let mut records = HashMap::new();
        if with_record {
            rows.truncate(fitting(&rows, &sizes(&place, &consumer, &ids(&rows)).await?));
            records = self::records(&place, &consumer, &ids(&rows)).await?;
        }
        let mut histories = self.histories(&place, consumer.consumer_id, &ids(&rows)).await?;
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

/// How many of these go into one answer, and at least one.
fn fitting(rows: &[InboxRow], sizes: &HashMap<String, i64>) -> usize {
    let mut bytes = 0;
    let fits = |row: &&InboxRow| {
        bytes += sizes.get(&row.message_id).copied().unwrap_or_default();
        bytes <= BYTES_MAX
    };
    rows.iter().take_while(fits).count().max(1)
}

/// Bytes of the records of messages, by id.
async fn sizes(
    place: &PgPool,
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
    Ok(query.fetch_all(place).await?.into_iter().collect())
}

type Record = (Option<Vec<u8>>, Option<Vec<u8>>, Option<Vec<u8>>);

/// Key, headers and payload of messages, by id.
async fn records(
    place: &PgPool,
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
    Ok(query.fetch_all(place).await?.into_iter().map(record).collect::<Result<_, sqlx::Error>>()?)
}
