//! The removal of one time partition, step by step:
//!
//! 1. Messages that must stay move to the present partition: what is open, failed, waiting or
//!    parked, and versions that their aggregates have yet to pass over.
//! 2. The rest is counted into `oncebox.forgotten`, with the highest offset and the latest
//!    timestamp of each partition of a topic. From then on claims know what may be forgotten.
//! 3. The partition is detached, concurrently: no claim waits for it.
//! 4. Its messages are archived, where the installation does that (`crate::archive`).
//! 5. The history and the edits of its messages are deleted.
//! 6. Its table is dropped.
//!
//! No message enters a partition whose time is over: a message gets the bucket of the time at which
//! its status changes. So once no message in it must stay, none will.

use std::time::Duration;

use chrono::{DateTime, Utc};
use oncebox_model::{
    error::InboxError,
    hooks::{self, Defect},
    sqlstate,
    tx::answered,
};
use sqlx::{AssertSqlSafe, Connection, Executor, PgConnection, Postgres, Transaction};
use tokio::time::{Instant, sleep};

use super::{count::count, partitions::TimePartition, pauses::Pauses};
use crate::{
    archive::{attempt::leave_attempts, write::DetachedPartition},
    control::Control,
};

/// The removal of a time partition.
#[derive(Debug, Clone, sqlx::FromRow)]
pub struct Removal {
    /// Name of the partition's table.
    pub partition_name: String,
    /// Name of the retention class.
    pub class: String,
    /// Begin of the partition's time.
    pub from_at: DateTime<Utc>,
    /// End of the partition's time, exclusive.
    pub to_at: DateTime<Utc>,
    /// `moving`, `counted` or `dropped`.
    pub state: String,
    /// Messages that moved to the present partition so far.
    pub moved: i64,
    /// Messages that were removed; none before they are counted.
    pub removed: Option<i64>,
    /// Size of the table with its indexes, bytes; none before they are counted.
    pub bytes: Option<i64>,
    /// Time of the first step.
    pub began_at: DateTime<Utc>,
    /// Time of the last step.
    pub dropped_at: Option<DateTime<Utc>>,
    /// Host or operator that did the last step.
    pub host: String,
    /// Error that ended the last try.
    pub error: Option<String>,
}

/// Messages `i` of a table `{table}` that must stay, in two parts: what is open, failed, waiting or
/// parked; and versions that were passed over and that their aggregates are not past yet. Without
/// the row, such an aggregate would wait for that version. A consumer that was deleted keeps
/// nothing. Each part reads an index from consumer to consumer, and no completed message.
const STAYING: [&str; 2] = [
    "SELECT i.consumer_id, i.message_id FROM oncebox.consumer c CROSS JOIN LATERAL ( \
        SELECT i.consumer_id, i.message_id FROM oncebox.{table} i \
        WHERE i.consumer_id = c.consumer_id AND i.status <> 'completed' AND i.status IN \
            ('received', 'in_progress', 'failed_retryable', 'failed_terminal', 'parked', 'waiting') \
        {batch}) i",
    "SELECT i.consumer_id, i.message_id FROM oncebox.consumer c CROSS JOIN LATERAL ( \
        SELECT i.consumer_id, i.message_id FROM oncebox.{table} i \
        WHERE i.consumer_id = c.consumer_id AND i.status IN ('skipped', 'discarded') \
          AND i.sequence_version IS NOT NULL AND i.sequence_version > coalesce( \
            (SELECT s.version FROM oncebox.sequence_position s WHERE s.consumer_id = i.consumer_id \
                AND s.key_hash = sha256(i.ordering_key)), -1) {batch}) i",
];

/// The entry `h` of the erasure of a message `i`, which has the time of its transaction.
const ERASED: &str = "h.event = 'erased' AND h.at = i.erased_at";

/// The entry `h` of a replay of a message `i`, at any time after its completion. That of a message
/// that came again under the id has the row of that message before it.
const REPLAYED: &str = "h.event = 'replayed' AND NOT EXISTS (SELECT FROM oncebox.inbox n \
    WHERE n.consumer_id = i.consumer_id AND n.message_id = i.message_id AND n.received_at <= h.at)";

/// Messages that one transaction moves.
const MOVED_AT_ONCE: i64 = 200;
/// Longest wait for messages that must stay and that others hold locked.
const BUSY: Duration = Duration::from_secs(30);
/// Pause between two tries to move them.
const AGAIN: Duration = Duration::from_millis(200);

/// Removes a partition, from the step at which it is. `database` is the name of the database; none
/// for the host's.
pub(super) async fn remove(
    control: &Control,
    database: Option<&str>,
    connection: &mut PgConnection,
    partition: &TimePartition,
) -> Result<Removal, InboxError> {
    let name = &partition.name;
    let state = begin(connection, partition, &control.actor).await?;
    hooks::point("retention:begin:after");
    if state == "moving" {
        let mut pauses = Pauses::new();
        move_staying(connection, partition, &mut pauses).await?;
        hooks::point("retention:move:after");
        count(connection, name, &mut pauses).await?;
        hooks::point("retention:count:after");
    }
    detach(connection, partition).await?;
    hooks::point("retention:detach:after");
    // Before the archive and before the history goes: a message that comes back keeps both.
    attach_staying(connection, partition).await?;
    let detached = DetachedPartition { name, database, to_at: partition.to_at };
    let is_archived = control.archive().write(connection, detached).await?;
    delete_history(connection, partition).await?;
    hooks::point("retention:history:after");
    attach_staying(connection, partition).await?;
    let mut tx = connection.begin().await?;
    if !is_archived {
        control.archive().check_is_off(&mut tx, database).await?;
    }
    drop_table(tx, name).await?;
    hooks::point("retention:drop:after");
    by_name(connection, name).await
}

/// Writes the row of the removal, or takes it over, and returns its state. A partition that someone
/// made again after its removal is removed anew.
async fn begin(
    connection: &mut PgConnection,
    partition: &TimePartition,
    host: &str,
) -> Result<String, InboxError> {
    const BEGIN: &str = "INSERT INTO oncebox.removal AS r \
            (partition_name, retention_class, from_at, to_at, host) \
        VALUES ($1, $2, $3, $4, $5) \
        ON CONFLICT (partition_name) DO UPDATE SET host = excluded.host, \
            state = CASE r.state WHEN 'dropped' THEN 'moving' ELSE r.state END, \
            began_at = CASE r.state WHEN 'dropped' THEN now() ELSE r.began_at END, \
            moved = CASE r.state WHEN 'dropped' THEN 0 ELSE r.moved END, \
            was_counted = r.was_counted AND r.state <> 'dropped', \
            has_erased = r.has_erased AND r.state <> 'dropped', \
            dropped_at = NULL \
        RETURNING state";
    let query = sqlx::query_scalar(BEGIN).bind(&partition.name).bind(partition.retention_class);
    let query = query.bind(partition.from_at).bind(partition.to_at).bind(host);
    Ok(query.fetch_one(connection).await?)
}

/// Counts the messages of a partition that must stay.
pub(super) async fn staying(connection: &mut PgConnection, name: &str) -> Result<i64, InboxError> {
    let mut count = 0;
    for part in STAYING {
        let part = part.replace("{table}", name).replace("{batch}", "");
        let query = format!("SELECT count(*) FROM ({part}) i");
        let messages: i64 =
            sqlx::query_scalar(AssertSqlSafe(query)).fetch_one(&mut *connection).await?;
        count += messages;
    }
    Ok(count)
}

/// Moves the messages that must stay to the present partition. A message that is locked is being
/// changed, and the change moves it.
async fn move_staying(
    connection: &mut PgConnection,
    partition: &TimePartition,
    pauses: &mut Pauses,
) -> Result<(), InboxError> {
    if hooks::sabotage(Defect::DropBeforeMove) {
        return Ok(());
    }
    let deadline = Instant::now() + BUSY;
    loop {
        let (began, mut moved) = (Instant::now(), 0);
        for part in STAYING {
            moved += match move_batch(connection, partition, part).await {
                // Another transaction moved one of them, or waits for one as this one does.
                Err(error) if is_of_another_transaction(&error) => 0,
                moved => moved?,
            };
        }
        if moved > 0 {
            pauses.after(began).await;
            continue;
        }
        let left = staying(connection, &partition.name).await?;
        if left == 0 {
            return Ok(());
        }
        if Instant::now() > deadline {
            return Err(InboxError::conflict(format!(
                "{left} messages of the partition must stay and are locked by others; the next run \
                    moves them"
            )));
        }
        sleep(AGAIN).await;
    }
}

fn is_of_another_transaction(error: &sqlx::Error) -> bool {
    answered(error).is_some_and(|answer| sqlstate::is_of_another_transaction(&answer.sqlstate))
}

/// Moves some of the messages of one part in a transaction, and returns how many.
async fn move_batch(
    connection: &mut PgConnection,
    partition: &TimePartition,
    part: &str,
) -> Result<i64, sqlx::Error> {
    let batch = format!("LIMIT {MOVED_AT_ONCE} FOR UPDATE SKIP LOCKED");
    let kept = part.replace("{table}", &partition.name).replace("{batch}", &batch);
    let sql = format!(
        "WITH kept AS ({kept} LIMIT {MOVED_AT_ONCE}), \
         moved AS (UPDATE oncebox.inbox i SET bucket = oncebox.bucket_at($2, now()) FROM kept k \
            WHERE i.consumer_id = k.consumer_id AND i.message_id = k.message_id \
              AND i.retention_class = $2 AND i.bucket >= $3 AND i.bucket < $4 RETURNING 1) \
         UPDATE oncebox.removal r SET moved = r.moved + m.messages \
         FROM (SELECT count(*) AS messages FROM moved) m WHERE r.partition_name = $1 \
         RETURNING m.messages"
    );
    let mut tx = connection.begin().await?;
    tx.execute("SET LOCAL enable_seqscan = off; SET LOCAL jit = off").await?;
    let query = sqlx::query_scalar(AssertSqlSafe(sql)).bind(&partition.name);
    let query = query.bind(partition.retention_class).bind(partition.from_at);
    let moved = query.bind(partition.to_at).fetch_one(&mut *tx).await?;
    hooks::point("retention:move:before");
    tx.commit().await?;
    Ok(moved)
}

/// Detaches the partition, where it is attached. Ends a detach that a process left half done.
async fn detach(
    connection: &mut PgConnection,
    partition: &TimePartition,
) -> Result<(), InboxError> {
    const PENDING: &str = "SELECT i.inhdetachpending FROM pg_inherits i \
        WHERE i.inhrelid = to_regclass('oncebox.' || $1)";
    let TimePartition { name, class, .. } = partition;
    let pending = sqlx::query_scalar(PENDING).bind(name).fetch_optional(&mut *connection).await?;
    let how = match pending {
        None => return Ok(()),
        Some(false) => "CONCURRENTLY",
        Some(true) => "FINALIZE",
    };
    let detach = format!("ALTER TABLE oncebox.inbox_{class} DETACH PARTITION oncebox.{name} {how}");
    connection.execute(sqlx::raw_sql(AssertSqlSafe(detach))).await?;
    Ok(())
}

/// Deletes the history and the edits of the messages of a detached partition. What came later
/// belongs to a message that came again under the same id, but for the entry of an erasure, which
/// leaves its message in the partition.
async fn delete_history(
    connection: &mut PgConnection,
    partition: &TimePartition,
) -> Result<(), InboxError> {
    const CONSUMERS: &str =
        "SELECT consumer_id FROM oncebox.consumer WHERE retention_class = $1 ORDER BY consumer_id";
    let query = sqlx::query_scalar(CONSUMERS).bind(partition.retention_class);
    // From consumer to consumer, so that no transaction is that of the whole partition.
    let consumers: Vec<i32> = query.fetch_all(&mut *connection).await?;
    let later = format!("OR {ERASED} OR {REPLAYED}");
    for (table, later) in [("inbox_history", &*later), ("inbox_edit", "")] {
        let delete = format!(
            "DELETE FROM oncebox.{table} h USING oncebox.{name} i \
             WHERE h.consumer_id = i.consumer_id AND h.message_id = i.message_id \
               AND (h.at < $1 {later}) AND h.consumer_id = $2",
            name = partition.name
        );
        for consumer_id in &consumers {
            let delete = sqlx::query(AssertSqlSafe(delete.as_str())).bind(partition.to_at);
            delete.bind(consumer_id).execute(&mut *connection).await?;
        }
    }
    delete_replay_failures(connection, partition).await
}

/// Deletes what replays keep of the failures of the messages in a detached partition. Each keeps a
/// hundred at most.
async fn delete_replay_failures(
    connection: &mut PgConnection,
    partition: &TimePartition,
) -> Result<(), InboxError> {
    let delete = format!(
        "DELETE FROM oncebox.replay_failure f USING oncebox.replay r, oncebox.{name} i \
         WHERE r.replay_id = f.replay_id AND i.consumer_id = r.consumer_id \
           AND i.message_id = f.message_id",
        name = partition.name
    );
    sqlx::query(AssertSqlSafe(delete)).execute(connection).await?;
    Ok(())
}

/// Attaches a detached partition again where a message in it must stay after all, which only a
/// change by hand can cause. Then the removal begins anew. Files that were written stay: they have
/// the history, and the archive of the new removal does not count them.
async fn attach_staying(
    connection: &mut PgConnection,
    partition: &TimePartition,
) -> Result<(), InboxError> {
    const AGAIN: &str = "UPDATE oncebox.removal SET state = 'moving', \
        began_at = clock_timestamp() WHERE partition_name = $1";
    if hooks::sabotage(Defect::DropBeforeMove) {
        return Ok(());
    }
    let TimePartition { name, class, from_at, to_at, .. } = partition;
    let left = staying(connection, name).await?;
    if left == 0 {
        return Ok(());
    }
    let attach = format!(
        "ALTER TABLE oncebox.inbox_{class} ATTACH PARTITION oncebox.{name} FOR VALUES FROM \
            ('{from_at}') TO ('{to_at}')"
    );
    let mut tx = connection.begin().await?;
    tx.execute(sqlx::raw_sql(AssertSqlSafe(attach))).await?;
    sqlx::query(AGAIN).bind(name).execute(&mut *tx).await?;
    tx.commit().await?;
    Err(InboxError::conflict(format!(
        "{left} messages of the partition must stay and were put there after it was counted; it is \
            a partition again, and the next run moves them"
    )))
}

/// Drops the table of a detached partition in which no message must stay, and commits.
async fn drop_table(mut tx: Transaction<'_, Postgres>, name: &str) -> Result<(), InboxError> {
    const DROPPED: &str = "UPDATE oncebox.removal SET state = 'dropped', dropped_at = now(), \
        error = NULL WHERE partition_name = $1";
    const HAS_ERASED: &str = "SELECT has_erased FROM oncebox.removal WHERE partition_name = $1";
    // From here on nobody erases in the table. An erasure may have come after `delete_history`.
    let lock = format!("LOCK TABLE oncebox.{name} IN ACCESS EXCLUSIVE MODE");
    tx.execute(sqlx::raw_sql(AssertSqlSafe(lock))).await?;
    let has_erased: bool = sqlx::query_scalar(HAS_ERASED).bind(name).fetch_one(&mut *tx).await?;
    if has_erased {
        let entries = format!(
            "DELETE FROM oncebox.inbox_history h USING oncebox.{name} i \
             WHERE h.consumer_id = i.consumer_id AND h.message_id = i.message_id \
               AND {ERASED}"
        );
        sqlx::query(AssertSqlSafe(entries)).execute(&mut *tx).await?;
    }
    tx.execute(sqlx::raw_sql(AssertSqlSafe(format!("DROP TABLE oncebox.{name}")))).await?;
    sqlx::query(DROPPED).bind(name).execute(&mut *tx).await?;
    // No further run archives the partition.
    leave_attempts(&mut tx).await?;
    hooks::point("retention:drop:before");
    tx.commit().await?;
    Ok(())
}

/// Keeps the error that ended a try.
pub(super) async fn note_error(
    connection: &mut PgConnection,
    name: &str,
    error: &str,
) -> Result<(), InboxError> {
    const NOTE: &str = "UPDATE oncebox.removal SET error = $2 WHERE partition_name = $1";
    sqlx::query(NOTE).bind(name).bind(error).execute(connection).await?;
    Ok(())
}

const REMOVALS: &str = "SELECT m.partition_name, r.name AS class, m.from_at, m.to_at, m.state, \
        m.moved, m.removed, m.bytes, m.began_at, m.dropped_at, m.host, m.error \
    FROM oncebox.removal m JOIN oncebox.retention_class r USING (retention_class)";

async fn by_name(connection: &mut PgConnection, name: &str) -> Result<Removal, InboxError> {
    let query = format!("{REMOVALS} WHERE m.partition_name = $1");
    Ok(sqlx::query_as(AssertSqlSafe(query)).bind(name).fetch_one(connection).await?)
}

/// Returns all removals that are not finished, and the newest that are, the newest first.
pub(super) async fn newest(
    connection: &mut PgConnection,
    limit: i64,
) -> Result<Vec<Removal>, InboxError> {
    let query = format!(
        "{REMOVALS} WHERE m.state <> 'dropped' OR m.partition_name IN (SELECT d.partition_name \
            FROM oncebox.removal d WHERE d.state = 'dropped' ORDER BY d.dropped_at DESC LIMIT $1) \
         ORDER BY m.began_at DESC, m.partition_name DESC"
    );
    Ok(sqlx::query_as(AssertSqlSafe(query)).bind(limit).fetch_all(connection).await?)
}
