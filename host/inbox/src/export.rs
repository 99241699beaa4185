//! Messages with all that is kept of them, for an archive or an audit.

use std::collections::HashMap;

use sqlx::{PgPool, Row};

use crate::{
    admin::Admin,
    browse::{Filter, InboxDetail, InboxRow},
    error::InboxError,
    headers,
    story::StoryEvent,
    subscription::Consumer,
};

/// Bytes of payloads of one page.
const BYTES_MAX: i64 = 16 << 20;

/// A message with what became of it.
#[derive(Debug, Clone)]
pub struct Exported {
    /// The message; without its record where that was not asked for.
    pub detail: InboxDetail,
    /// Failed runs, and what people did, in order.
    pub history: Vec<StoryEvent>,
}

impl Admin {
    /// A page of a consumer's messages, newest first. With their records it may be shorter than the filter's limit: the
    /// end is a page without messages.
    pub async fn inbox_export(
        &self,
        tenant: &str,
        consumer: &str,
        filter: &Filter,
        with_record: bool,
    ) -> Result<Vec<Exported>, InboxError> {
        let consumer = self.consumer(tenant, consumer).await?;
        let filter = Filter { tenant: Some(tenant.to_owned()), consumer: Some(consumer.name.clone()), ..filter.clone() };
        let mut rows = self.inbox_list(&filter).await?;
        if with_record {
            rows.truncate(fitting(&rows));
        }
        let place = self.place(&self.tenant(tenant).await?)?.pool;
        let ids: Vec<_> = rows.iter().map(|row| row.message_id.clone()).collect();
        let mut histories = self.histories(&place, consumer.consumer_id, &ids).await?;
        let mut records = if with_record { records(&place, &consumer, &ids).await? } else { HashMap::new() };
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
fn fitting(rows: &[InboxRow]) -> usize {
    let mut bytes = 0;
    let fits = |row: &&InboxRow| {
        bytes += i64::from(row.payload_bytes.unwrap_or_default());
        bytes <= BYTES_MAX
    };
    rows.iter().take_while(fits).count().max(1)
}

type Record = (Option<Vec<u8>>, Option<Vec<u8>>, Option<Vec<u8>>);

/// Key, headers and payload of messages, by id.
async fn records(place: &PgPool, consumer: &Consumer, ids: &[String]) -> Result<HashMap<String, Record>, InboxError> {
    const RECORDS: &str = "SELECT message_id, key, headers, payload FROM oncebox.inbox \
        WHERE consumer_id = $1 AND retention_class = $2 AND message_id = ANY ($3)";
    let query = sqlx::query(RECORDS).bind(consumer.consumer_id).bind(consumer.policy()?.retention.class()).bind(ids);
    let record = |row: sqlx::postgres::PgRow| {
        Ok((row.try_get("message_id")?, (row.try_get("key")?, row.try_get("headers")?, row.try_get("payload")?)))
    };
    Ok(query.fetch_all(place).await?.into_iter().map(record).collect::<Result<_, sqlx::Error>>()?)
}
