//! The messages of a row group: what of the database goes into one, and how much.

use oncebox_archive::{ArchivedMessage, GROUP_ROWS_MAX};
use oncebox_model::error::InboxError;
use sqlx::{AssertSqlSafe, Connection, Executor, PgConnection};

use super::{consumers::ArchivedConsumer, write::PartitionWork};

/// Most bytes of the messages of a row group, as they are in memory; its first message may exceed
/// them.
const GROUP_BYTES_MAX: i64 = 8 << 20;

/// Columns of a message that the table has under the names of the archive.
const COLUMNS: &str = "i.consumer_id, i.message_id, i.retention_class, i.bucket, i.topic, \
    i.partition, i.\"offset\", i.record_timestamp_ms, i.key, i.ordering_key, i.source, \
    i.event_type, i.event_version, i.content_type, i.trace_parent, i.status, i.reason, \
    i.attempts, i.crashes, i.last_error, i.next_attempt_at, i.locked_until, i.locked_by, \
    i.epoch, i.version_id, i.result::text AS result, i.payload, i.headers, i.payload_hash, \
    i.received_at, i.processed_at, i.ordering_hash, i.ordering_position, i.sequence_version, \
    i.waits_until, i.over_gap, i.copied_at, i.erased_at";

/// Bytes that a message `i` takes in memory once it is read, with all that stands beside it.
const SIZE: &str = "1000 + coalesce(octet_length(i.payload), 0) \
    + coalesce(octet_length(i.headers), 0) + coalesce(octet_length(i.result::text), 0) \
    + coalesce(octet_length(i.key), 0) + coalesce(octet_length(i.ordering_key), 0) \
    + octet_length(i.message_id) + coalesce(octet_length(i.last_error), 0) \
    + coalesce(octet_length(i.source), 0) + coalesce(octet_length(i.event_type), 0) \
    + coalesce(octet_length(i.event_version), 0) + coalesce(octet_length(i.content_type), 0) \
    + coalesce(octet_length(i.trace_parent), 0) \
    + coalesce((SELECT sum(100 + 2 * coalesce(octet_length(e.payload), 0)) \
        FROM oncebox.inbox_edit e \
        WHERE e.consumer_id = i.consumer_id AND e.message_id = i.message_id), 0) \
    + coalesce((SELECT sum(200 + coalesce(octet_length(h.error), 0) \
            + coalesce(octet_length(h.reason), 0)) FROM oncebox.inbox_history h \
        WHERE h.consumer_id = i.consumer_id AND h.message_id = i.message_id), 0)";

/// History and edits of a message `i`, as the archive has them. $4 is the end of the partition's
/// time: what came later belongs to a message that came again under the same id, but for the entry
/// of the erasure of this one, which has the time of its transaction, and for those of its replays.
const BESIDE: &str = "(SELECT json_agg(json_build_object('at', h.at, 'event', h.event, \
        'attempt', h.attempt, 'version_id', h.version_id, 'reason', h.reason, 'error', h.error, \
        'actor', h.actor) ORDER BY h.history_id)::text FROM oncebox.inbox_history h \
        WHERE h.consumer_id = i.consumer_id AND h.message_id = i.message_id \
          AND (h.at < $4 OR h.event = 'erased' AND h.at = i.erased_at \
            OR h.event = 'replayed' AND NOT EXISTS (SELECT FROM oncebox.inbox n \
                WHERE n.consumer_id = i.consumer_id AND n.message_id = i.message_id \
                  AND n.received_at <= h.at))) \
        AS history, \
    (SELECT json_agg(json_build_object('edit_number', e.edit_number, 'at', e.at, \
        'payload', encode(e.payload, 'hex')) ORDER BY e.edit_number)::text \
        FROM oncebox.inbox_edit e WHERE e.consumer_id = i.consumer_id \
        AND e.message_id = i.message_id AND e.at < $4) AS edits";

/// Least messages that are weighed for a row group.
const WEIGHED_MIN: usize = 100;

/// Returns how many messages are weighed for the next row group, after one with a number of
/// messages. Large messages are so weighed about twice, and not 5,000 for each few that fit.
pub(super) fn weighed_next(messages: usize) -> usize {
    (2 * messages).clamp(WEIGHED_MIN, GROUP_ROWS_MAX)
}

impl PartitionWork<'_, '_> {
    /// Reads the messages of a consumer that follow an id, as many as fit into a row group, and at
    /// most a number.
    pub(super) async fn read_group(
        &self,
        connection: &mut PgConnection,
        consumer: &ArchivedConsumer,
        after: &str,
        rows_max: usize,
    ) -> Result<Vec<ArchivedMessage>, InboxError> {
        // By the key, and in its order: a plan by another index would read and sort all messages of
        // the consumer for each group.
        const BY_KEY: &str = "SET LOCAL enable_seqscan = off; SET LOCAL enable_bitmapscan = off; SET LOCAL jit = off";
        let group = format!(
            "WITH page AS (SELECT i.* FROM oncebox.{name} i \
                WHERE i.consumer_id = $1 AND i.message_id > $2 ORDER BY i.message_id LIMIT $3), \
             sized AS (SELECT i.*, {SIZE} AS size FROM page i), \
             summed AS (SELECT i.*, sum(i.size) OVER (ORDER BY i.message_id \
                ROWS UNBOUNDED PRECEDING) - i.size AS before FROM sized i) \
             SELECT $5::text AS tenant, $6::text AS consumer, NULL::text AS version, \
                {COLUMNS}, {BESIDE} \
             FROM summed i WHERE i.before < $7::bigint ORDER BY i.message_id",
            name = self.partition.name
        );
        let mut tx = connection.begin().await?;
        tx.execute(sqlx::raw_sql(BY_KEY)).await?;
        let query = sqlx::query_as(AssertSqlSafe(group))
            .bind(consumer.consumer_id)
            .bind(after)
            .bind(rows_max as i64)
            .bind(self.partition.to_at)
            .bind(&consumer.tenant)
            .bind(&consumer.consumer)
            .bind(GROUP_BYTES_MAX);
        let mut messages: Vec<ArchivedMessage> = query.fetch_all(&mut *tx).await?;
        tx.commit().await?;
        self.name_versions(&mut messages).await?;
        Ok(messages)
    }

    /// Sets the digests of the messages' versions, which may be deleted before the archive is.
    async fn name_versions(&self, messages: &mut [ArchivedMessage]) -> Result<(), InboxError> {
        let mut ids: Vec<_> = messages.iter().filter_map(|message| message.version_id).collect();
        ids.sort_unstable();
        ids.dedup();
        if ids.is_empty() {
            return Ok(());
        }
        let digests = self.archive.0.messages().digests(ids).await?;
        for message in messages {
            message.version = message.version_id.and_then(|id| digests.get(&id).cloned());
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    // What could go wrong: thousands of large messages are weighed for each few of them that fit
    // into a group, or groups of small ones stay small after a large message.
    #[test]
    fn as_many_are_weighed_as_may_fit() {
        assert_eq!([0, 8, 60, 2_000, 5_000].map(weighed_next), [100, 100, 120, 4_000, 5_000]);
        let mut weighed = weighed_next(1);
        for _ in 0..6 {
            weighed = weighed_next(weighed);
        }
        assert_eq!(weighed, GROUP_ROWS_MAX);
    }
}
