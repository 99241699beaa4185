//! Dead letters that are copied to a topic.
//!
//! The row comes first, the copy after it. As soon as the brokers have the copy, the row records
//! which of its failures was copied. A host that dies between the two leaves the row to be copied
//! again, so each dead letter is copied at least once.

use std::time::Duration;

use chrono::{DateTime, SecondsFormat, Utc};
use oncebox_model::{error::InboxError, headers, hooks, record::Headers};
use sqlx::Row;

use crate::consumer::ConsumerInbox;

/// Most dead letters that one call reads.
const LETTERS: i64 = 100;
/// Most bytes of payload that one call reads; a larger payload comes alone.
const BYTES: i64 = 8 << 20;
/// Time that a host has to copy a consumer's dead letters, before another host may.
const TURN: Duration = Duration::from_secs(60);

/// A dead letter, or a parked message, that is to be copied.
#[derive(Debug, Clone)]
pub struct DeadLetter {
    /// Id of the message.
    pub message_id: String,
    /// Key of the record.
    pub key: Option<Vec<u8>>,
    /// Headers of the record, followed by those that say why it is a dead letter.
    pub headers: Headers,
    /// Payload of the record.
    pub payload: Option<Vec<u8>>,
    /// True for a record from a topic of dead letters, of any consumer: copies of copies could go
    /// in a circle.
    pub is_copy: bool,
    processed_at: DateTime<Utc>,
}

/// Header that marks a copy, with the name of its consumer.
const CONSUMER: &str = "oncebox-consumer";

impl ConsumerInbox {
    /// Returns the oldest dead letters that were not copied to a topic, where it is this host's
    /// turn to copy them. Messages that were read from that topic are not copied to it.
    ///
    /// # Errors
    ///
    /// Fails where the host's database does.
    pub async fn pending(&self, topic: &str) -> Result<Vec<DeadLetter>, InboxError> {
        const TAKE: &str = "INSERT INTO oncebox.copying AS c (consumer_id, owner, until) VALUES \
            ($1, $2, now() + $3 * interval '1 second') \
            ON CONFLICT (consumer_id) DO UPDATE SET owner = excluded.owner, until = excluded.until \
            WHERE c.owner = excluded.owner OR c.until <= now()";
        const IS_SOME: &str = "SELECT EXISTS (SELECT FROM oncebox.inbox i WHERE i.consumer_id = $1 \
            AND i.retention_class = $2 \
            AND i.status IN ('failed_terminal', 'parked') AND i.copied_at IS DISTINCT FROM \
            i.processed_at AND i.topic <> $3)";
        let is_some = sqlx::query_scalar(IS_SOME)
            .bind(self.consumer_id)
            .bind(self.policy.retention.class())
            .bind(topic);
        if !is_some.fetch_one(self.sessions.host_pool()).await? {
            return Ok(Vec::new());
        }
        let take =
            sqlx::query(TAKE).bind(self.consumer_id).bind(&self.owner).bind(TURN.as_secs() as i64);
        match take.execute(self.sessions.host_pool()).await?.rows_affected() {
            0 => Ok(Vec::new()),
            _ => self.dead_letters(topic).await,
        }
    }

    async fn dead_letters(&self, topic: &str) -> Result<Vec<DeadLetter>, InboxError> {
        const UNCOPIED: &str = "SELECT message_id, topic, partition, \"offset\", \
            record_timestamp_ms, key, headers, payload, event_type, \
                status, reason, last_error, attempts, processed_at \
            FROM (SELECT x.*, row_number() OVER oldest AS nth, sum(octet_length(x.payload)) OVER \
            oldest AS bytes FROM ( \
                SELECT i.* FROM oncebox.inbox i WHERE i.consumer_id = $1 AND i.retention_class = \
                $2 \
                    AND i.status IN ('failed_terminal', 'parked') AND i.copied_at IS DISTINCT FROM \
                    i.processed_at AND i.topic <> $3 \
                ORDER BY i.processed_at, i.\"offset\" LIMIT $4) x WINDOW oldest AS (ORDER BY \
                x.processed_at, x.\"offset\", x.message_id)) y \
            WHERE y.nth = 1 OR y.bytes <= $5 ORDER BY y.nth";
        let query = sqlx::query(UNCOPIED)
            .bind(self.consumer_id)
            .bind(self.policy.retention.class())
            .bind(topic)
            .bind(LETTERS)
            .bind(BYTES);
        let rows = query.fetch_all(self.sessions.host_pool()).await?;
        Ok(rows.iter().map(|row| self.letter(row)).collect::<Result<_, sqlx::Error>>()?)
    }

    fn letter(&self, row: &sqlx::postgres::PgRow) -> Result<DeadLetter, sqlx::Error> {
        let message_id: String = row.try_get("message_id")?;
        let processed_at: DateTime<Utc> = row.try_get("processed_at")?;
        let mut headers =
            headers::decode(row.try_get::<Option<&[u8]>, _>("headers")?.unwrap_or_default());
        let is_copy = headers.iter().any(|(name, _)| name == CONSUMER);
        let text = |name| row.try_get::<Option<String>, _>(name);
        let said = [
            ("oncebox-tenant", Some(self.tenant.clone())),
            (CONSUMER, Some(self.name.clone())),
            ("oncebox-message-id", Some(message_id.clone())),
            ("oncebox-event-type", text("event_type")?),
            ("oncebox-status", text("status")?),
            ("oncebox-reason", text("reason")?),
            ("oncebox-error", text("last_error")?),
            ("oncebox-attempts", Some(row.try_get::<i32, _>("attempts")?.to_string())),
            ("oncebox-at", Some(processed_at.to_rfc3339_opts(SecondsFormat::Millis, true))),
            ("oncebox-topic", text("topic")?),
            ("oncebox-partition", Some(row.try_get::<i32, _>("partition")?.to_string())),
            ("oncebox-offset", Some(row.try_get::<i64, _>("offset")?.to_string())),
            (
                "oncebox-timestamp-ms",
                Some(row.try_get::<i64, _>("record_timestamp_ms")?.to_string()),
            ),
        ];
        headers.extend(
            said.into_iter()
                .filter_map(|(name, value)| Some((name.to_owned(), value?.into_bytes()))),
        );
        Ok(DeadLetter {
            message_id,
            key: row.try_get("key")?,
            headers,
            payload: row.try_get("payload")?,
            is_copy,
            processed_at,
        })
    }

    /// Records that these dead letters are copied. One that was redriven since then and failed
    /// again is copied again, as is one that another transaction has locked.
    ///
    /// # Errors
    ///
    /// Fails where the host's database does.
    pub async fn copied(&self, dead_letters: &[&DeadLetter]) -> Result<(), InboxError> {
        const COPIED: &str = "UPDATE oncebox.inbox i SET copied_at = i.processed_at \
            FROM (SELECT x.message_id FROM oncebox.inbox x JOIN unnest($3::text[], \
            $4::timestamptz[]) AS c(id, at) \
                ON x.message_id = c.id AND x.processed_at = c.at \
                WHERE x.consumer_id = $1 AND x.retention_class = $2 FOR UPDATE OF x SKIP LOCKED) l \
            WHERE i.consumer_id = $1 AND i.retention_class = $2 AND i.message_id = l.message_id";
        hooks::point("inbox:copied:before");
        let (ids, times): (Vec<_>, Vec<_>) = dead_letters
            .iter()
            .map(|letter| (letter.message_id.as_str(), letter.processed_at))
            .unzip();
        let query = sqlx::query(COPIED)
            .bind(self.consumer_id)
            .bind(self.policy.retention.class())
            .bind(ids)
            .bind(times);
        query.execute(self.sessions.host_pool()).await?;
        Ok(())
    }
}
