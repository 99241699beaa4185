//! The erasure in time partitions that retention has detached and not dropped yet. Their messages
//! are settled, and no worker holds one. So they are emptied in their tables, and what is archived
//! of them afterwards is empty, too.

use std::collections::BTreeSet;

use chrono::{DateTime, Utc};
use oncebox_model::error::InboxError;
use sqlx::{AssertSqlSafe, PgConnection};

use super::{
    inbox::{ErasedConsumer, ErasedRow, ErasureRow, ErasureStep, ErasureWait, InboxErasure},
    window::{self, ErasureWindow},
};

/// A time partition that is out of the inbox.
#[derive(sqlx::FromRow)]
struct DetachedTable {
    name: String,
    /// End of its time, exclusive. What stands beside its messages is older.
    to_at: DateTime<Utc>,
    /// Whether its detach has not ended. Then it may be locked.
    is_pending: bool,
}

/// The place of a pass among the detached partitions.
struct RemovedPlace<'a> {
    table: &'a str,
    /// Number of the consumer; the highest of all where the table has no further one.
    consumer_id: i32,
    /// Id of the message that was looked at last; empty before the first.
    message_id: &'a str,
}

impl InboxErasure {
    /// Looks at the next messages in detached time partitions, and erases those that the target
    /// selects. Returns none where this pass has looked at all of them.
    pub(super) async fn look_at_removed(
        &self,
        connection: &mut PgConnection,
        row: &ErasureRow,
    ) -> Result<Option<ErasureStep>, InboxError> {
        const NEXT: &str = "SELECT m.partition_name AS name, m.to_at, \
                coalesce(i.inhdetachpending, false) AS is_pending \
            FROM oncebox.removal m \
            JOIN pg_class c ON c.oid = to_regclass('oncebox.' || m.partition_name) \
            LEFT JOIN pg_inherits i ON i.inhrelid = c.oid \
            WHERE m.state = 'counted' AND (NOT c.relispartition OR i.inhdetachpending) \
              AND (m.partition_name > $1 OR m.partition_name = $1 AND $2 < 2147483647) \
            ORDER BY m.partition_name LIMIT 1";
        let query = sqlx::query_as(NEXT).bind(&row.removed_table).bind(row.removed_consumer);
        let next: Option<DetachedTable> = query.fetch_optional(&mut *connection).await?;
        let Some(table) = next else { return Ok(None) };
        if table.is_pending {
            return Ok(Some(ErasureStep::Waits(ErasureWait::Removals(1))));
        }
        let is_begun = table.name == row.removed_table;
        let at_consumer = if is_begun { row.removed_consumer } else { 0 };
        let next = self.consumers.iter().find(|consumer| consumer.consumer_id >= at_consumer);
        let (window, differences) = match next {
            Some(consumer) => {
                let is_begun = is_begun && at_consumer == consumer.consumer_id;
                let after = if is_begun { &*row.removed_message } else { "" };
                let window = self.look_on_removed(connection, row, &table, consumer, after).await?;
                let trials = &window.matching;
                let differences = self.forget_trials(connection, consumer, trials).await?;
                (window, differences)
            }
            None => (ErasureWindow::default(), 0),
        };
        let place = match (next, &window.last) {
            (Some(consumer), Some(last)) => (consumer.consumer_id, last.as_str()),
            (Some(consumer), None) => (consumer.consumer_id + 1, ""),
            (None, _) => (i32::MAX, ""),
        };
        let place = RemovedPlace { table: &table.name, consumer_id: place.0, message_id: place.1 };
        self.advance_removed(connection, &window, differences, place).await?;
        Ok(Some(ErasureStep::Erased))
    }

    /// Looks at the next messages of a consumer in a table, and erases those that are selected.
    async fn look_on_removed(
        &self,
        connection: &mut PgConnection,
        row: &ErasureRow,
        table: &DetachedTable,
        consumer: &ErasedConsumer,
        after: &str,
    ) -> Result<ErasureWindow, InboxError> {
        let seen = window::look(connection, &table.name, consumer, &self.target, after).await?;
        let window = ErasureWindow::of(seen);
        let free = self.erase_sent(connection, consumer, &window.found).await?;
        if !free.is_empty() {
            let erased = self.erase_removed(connection, row, table, consumer, &free).await?;
            self.record(connection, consumer.consumer_id, &erased).await?;
        }
        Ok(window)
    }

    /// Erases what the handlers of these messages sent, and returns the messages of which no relay
    /// sends anything now. The others are found again in the next pass.
    pub(super) async fn erase_sent(
        &self,
        connection: &mut PgConnection,
        consumer: &ErasedConsumer,
        ids: &[String],
    ) -> Result<Vec<String>, InboxError> {
        const ERASE: &str = "SELECT u.id, e.is_held, coalesce(e.partitions, '{}') \
            FROM unnest($2::text[]) AS u(id) \
            CROSS JOIN LATERAL oncebox.erase_outgoing($1, u.id) AS e";
        if ids.is_empty() {
            return Ok(Vec::new());
        }
        let query = sqlx::query_as(ERASE).bind(consumer.consumer_id).bind(ids);
        let erased: Vec<(String, bool, Vec<String>)> = query.fetch_all(&mut *connection).await?;
        let tables: BTreeSet<&str> =
            erased.iter().flat_map(|(.., tables)| tables).map(String::as_str).collect();
        self.vacuum_later(connection, &tables).await?;
        Ok(erased.into_iter().filter(|(_, is_held, _)| !is_held).map(|(id, ..)| id).collect())
    }

    /// Empties messages in a table, as `oncebox.erase` does in the inbox.
    async fn erase_removed(
        &self,
        connection: &mut PgConnection,
        row: &ErasureRow,
        table: &DetachedTable,
        consumer: &ErasedConsumer,
        ids: &[String],
    ) -> Result<Vec<ErasedRow>, InboxError> {
        // The history is deleted before the table is dropped. An entry that comes after that goes
        // with the drop.
        const NOTE: &str = "UPDATE oncebox.removal SET has_erased = true \
            WHERE partition_name = $1 AND NOT has_erased";
        let erase = format!(
            "WITH erased AS (UPDATE oncebox.{name} i SET payload = NULL, headers = NULL, \
                payload_hash = NULL, result = NULL, last_error = NULL, erased_at = now() \
                WHERE i.consumer_id = $1 AND i.message_id = ANY ($2) AND i.erased_at IS NULL \
                RETURNING i.message_id, i.status), \
             edits AS (UPDATE oncebox.inbox_edit e SET payload = NULL FROM erased i \
                WHERE e.consumer_id = $1 AND e.message_id = i.message_id AND e.at < $3 \
                  AND e.payload IS NOT NULL RETURNING e.message_id), \
             errors AS (UPDATE oncebox.inbox_history h SET error = NULL FROM erased i \
                WHERE h.consumer_id = $1 AND h.message_id = i.message_id AND h.at < $3 \
                  AND h.error IS NOT NULL RETURNING h.message_id), \
             failures AS (UPDATE oncebox.replay_failure f SET error = NULL \
                FROM oncebox.replay r, erased i WHERE r.replay_id = f.replay_id \
                  AND r.consumer_id = $1 AND f.message_id = i.message_id AND f.at < $3), \
             entries AS (INSERT INTO oncebox.inbox_history (consumer_id, message_id, event, \
                reason, actor) SELECT $1, i.message_id, 'erased', $4, $5 FROM erased i) \
             SELECT i.message_id AS id, i.status, \
                (SELECT count(*) FROM edits e WHERE e.message_id = i.message_id) AS edits, \
                (SELECT count(*) FROM errors h WHERE h.message_id = i.message_id) AS errors, \
                ARRAY['oncebox.{name}'] AS partitions FROM erased i",
            name = table.name
        );
        let query = sqlx::query_as(AssertSqlSafe(erase)).bind(consumer.consumer_id).bind(ids);
        let query = query.bind(table.to_at).bind(&row.reason).bind(&row.actor);
        let erased = query.fetch_all(&mut *connection).await?;
        sqlx::query(NOTE).bind(&table.name).execute(connection).await?;
        Ok(erased)
    }

    async fn advance_removed(
        &self,
        connection: &mut PgConnection,
        window: &ErasureWindow,
        differences: i64,
        place: RemovedPlace<'_>,
    ) -> Result<(), InboxError> {
        const ADVANCE: &str = "UPDATE oncebox.erasure SET removed_table = $2, \
            removed_consumer = $3, removed_message = $4, found = found + $5, \
            looked_at = looked_at + $6, differences = differences + $8, \
            already_erased = already_erased + CASE pass WHEN 1 THEN $7 ELSE 0 END \
            WHERE erasure_id = $1";
        let query = sqlx::query(ADVANCE)
            .bind(self.erasure_id)
            .bind(place.table)
            .bind(place.consumer_id)
            .bind(place.message_id)
            .bind(window.found.len() as i64)
            .bind(window.looked_at)
            .bind(window.already_erased)
            .bind(differences);
        query.execute(connection).await?;
        Ok(())
    }
}
