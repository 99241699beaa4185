//! The removal of old time partitions of outgoing messages. A partition is of one day, by UTC.
//!
//! 1. Messages that are not settled move to the present partition: those that are still to be sent,
//!    and those that are parked.
//! 2. The partition is detached, concurrently: no transaction that emits waits for it.
//! 3. A message in it that must stay after all, which only a change by hand can cause, makes it a
//!    partition again, and the next run moves the message.
//! 4. Its table is dropped.
//!
//! No message enters a partition of a day that is over, and none that is settled opens again. So
//! once no message in it must stay, none will. A message that a relay has leased is left where it
//! is, since its relay looks for it there; its lease ends within half a minute.
//!
//! The catalog says how far a removal is. A process that dies after the detach leaves a table
//! without a parent, and one that dies during it leaves a pending detach; the next run ends both.

use std::time::Duration;

use chrono::{DateTime, Utc};
use oncebox_model::{error::InboxError, sqlstate, tx::answered};
use sqlx::{AssertSqlSafe, Connection, Executor, PgConnection};
use tokio::time::{Instant, sleep, timeout};

use super::{RetentionFailure, RetentionResult, explained};
use crate::{
    database::{
        locks::{self, HostLock},
        schema,
        tenant_database::{DatabaseLabel, InboxDatabase},
    },
    handles::Retention,
};

/// Messages that one transaction moves.
const MOVED_AT_ONCE: i64 = 1_000;
/// Longest wait for messages that must stay and that others hold: longer than a relay's lease.
const BUSY: Duration = Duration::from_secs(45);
/// Pause between two tries to move them.
const AGAIN: Duration = Duration::from_millis(200);
/// Longest run on one database; the next run continues.
const LONGEST: Duration = Duration::from_secs(1_800);

/// Statuses of messages that leave with their partition, as SQL.
const SETTLED: &str = "('completed', 'cancelled', 'discarded')";

/// A time partition of outgoing messages whose time is over.
#[derive(Debug, Clone, sqlx::FromRow)]
struct OldPartition {
    name: String,
    from_at: DateTime<Utc>,
    to_at: DateTime<Utc>,
    /// Whether it hangs on its parent.
    is_attached: bool,
    /// Whether its detach has begun and not ended.
    is_pending: bool,
}

impl Retention<'_> {
    /// Removes the time partitions of outgoing messages that are older than so many days, in every
    /// database, and logs it. A database on which another process removes is left to that process.
    /// One that fails does not keep the others from their turn.
    pub async fn remove_outgoing(&self, days: u32) -> RetentionResult {
        let databases = match self.0.tenant_databases().all().await {
            Ok(databases) => databases,
            Err(error) => return failure(&DatabaseLabel::default(), None, &error),
        };
        let runs = databases.iter().map(async |database| {
            match timeout(LONGEST, self.remove_outgoing_of(database, days)).await {
                Ok(Ok(run)) => run,
                Ok(Err(error)) => failure(&database.label, None, &error),
                Err(_) => {
                    let text = format!(
                        "it took more than {} s; the next run goes on where it ended",
                        LONGEST.as_secs()
                    );
                    failure(&database.label, None, &InboxError::conflict(text))
                }
            }
        });
        let mut result = RetentionResult::default();
        for run in futures::future::join_all(runs).await {
            result.removed += run.removed;
            result.failed.extend(run.failed);
        }
        result
    }

    async fn remove_outgoing_of(
        &self,
        database: &InboxDatabase,
        days: u32,
    ) -> Result<RetentionResult, InboxError> {
        let mut turn = database.connect().await?;
        if !locks::try_for_session(&mut turn, HostLock::Retention).await? {
            let _ = turn.close().await; // it holds nothing
            return Ok(RetentionResult::default());
        }
        // Messages that must stay move to the present partition.
        schema::ensure_partitions(&database.database.pool).await?;
        let DatabaseLabel { tenant, database: name } = &database.label;
        let mut result = RetentionResult::default();
        for partition in old(&mut turn, days).await? {
            match remove(&mut turn, &partition).await {
                Ok(moved) => {
                    result.removed += 1;
                    let partition = partition.name;
                    tracing::info!(
                        tenant,
                        database = name,
                        partition,
                        moved,
                        "outgoing messages removed"
                    );
                }
                Err(error) => {
                    let failed = failure(&database.label, Some(partition.name), &error).failed;
                    result.failed.extend(failed);
                    // Only one detach can be under way.
                    break;
                }
            }
        }
        let _ = locks::release_for_session(&mut turn, HostLock::Retention).await;
        let _ = turn.close().await; // the lock ends either way
        Ok(result)
    }
}

/// Logs the error of a database or of one of its partitions, and returns it as the result.
fn failure(
    label: &DatabaseLabel,
    partition: Option<String>,
    error: &InboxError,
) -> RetentionResult {
    let error = explained(error);
    let DatabaseLabel { tenant, database } = label;
    tracing::error!(tenant, database, partition, error, "removal of outgoing messages failed");
    let label = label.clone();
    RetentionResult { removed: 0, failed: vec![RetentionFailure { label, partition, error }] }
}

/// Returns the partitions that were over so many days ago, the oldest first, and those that an
/// earlier run has detached.
async fn old(connection: &mut PgConnection, days: u32) -> Result<Vec<OldPartition>, InboxError> {
    const OLD: &str = "WITH named AS ( \
            SELECT c.oid, c.relname::text AS name, c.relispartition AS is_attached, \
                to_date(right(c.relname, 8), 'YYYYMMDD')::timestamp AT TIME ZONE 'UTC' AS from_at \
            FROM pg_class c WHERE c.relnamespace = 'oncebox'::regnamespace AND c.relkind = 'r' \
              AND c.relname ~ '^outgoing_[0-9]{8}$') \
        SELECT n.name, n.from_at, n.from_at + interval '24 hours' AS to_at, n.is_attached, \
            coalesce(i.inhdetachpending, false) AS is_pending \
        FROM named n LEFT JOIN pg_inherits i ON i.inhrelid = n.oid \
        WHERE n.from_at + interval '24 hours' + $1 * interval '24 hours' <= now() \
        ORDER BY n.is_attached, is_pending DESC, n.from_at";
    let query = sqlx::query_as(OLD).bind(i32::try_from(days).unwrap_or(i32::MAX));
    Ok(query.fetch_all(connection).await?)
}

/// Removes a partition, from the step at which it is. Returns how many messages stay elsewhere.
async fn remove(
    connection: &mut PgConnection,
    partition: &OldPartition,
) -> Result<i64, InboxError> {
    let name = &partition.name;
    let mut moved = 0;
    if partition.is_attached {
        if !partition.is_pending {
            moved = move_staying(connection, partition).await?;
        }
        let how = if partition.is_pending { "FINALIZE" } else { "CONCURRENTLY" };
        let detach = format!("ALTER TABLE oncebox.outgoing DETACH PARTITION oncebox.{name} {how}");
        connection.execute(sqlx::raw_sql(AssertSqlSafe(detach))).await?;
    }
    attach_staying(connection, partition).await?;
    let drop_table = format!("DROP TABLE oncebox.{name}");
    connection.execute(sqlx::raw_sql(AssertSqlSafe(drop_table))).await?;
    Ok(moved)
}

/// Counts the messages of a table that must stay.
async fn staying(connection: &mut PgConnection, name: &str) -> Result<i64, InboxError> {
    let count = format!(
        "SELECT count(*) FROM oncebox.{name} o WHERE o.status <> 'completed' \
            AND o.status NOT IN {SETTLED}"
    );
    Ok(sqlx::query_scalar(AssertSqlSafe(count)).fetch_one(connection).await?)
}

/// Moves the messages that must stay to the present partition, and returns how many. A message that
/// is leased or locked settles soon, or is moved later.
async fn move_staying(
    connection: &mut PgConnection,
    partition: &OldPartition,
) -> Result<i64, InboxError> {
    let deadline = Instant::now() + BUSY;
    let mut all = 0;
    loop {
        let moved = match move_batch(connection, partition).await {
            // Another transaction moved one of them, or waits for one as this one does.
            Err(error) if is_of_another_transaction(&error) => 0,
            moved => moved?,
        };
        all += moved;
        if moved > 0 {
            continue;
        }
        let left = staying(connection, &partition.name).await?;
        if left == 0 {
            return Ok(all);
        }
        if Instant::now() > deadline {
            return Err(InboxError::conflict(format!(
                "{left} outgoing messages of the partition must stay and are held by others; the \
                    next run moves them"
            )));
        }
        sleep(AGAIN).await;
    }
}

fn is_of_another_transaction(error: &sqlx::Error) -> bool {
    answered(error).is_some_and(|answer| sqlstate::is_of_another_transaction(&answer.sqlstate))
}

/// Moves some of the messages in a transaction, and returns how many.
async fn move_batch(
    connection: &mut PgConnection,
    partition: &OldPartition,
) -> Result<i64, sqlx::Error> {
    let sql = format!(
        "WITH kept AS MATERIALIZED ( \
            SELECT o.consumer_id, o.message_id, o.ordinal, o.bucket FROM oncebox.{name} o \
            WHERE o.status <> 'completed' AND o.status NOT IN {SETTLED} \
              AND o.status <> 'in_progress' \
            LIMIT {MOVED_AT_ONCE} FOR UPDATE SKIP LOCKED), \
         moved AS (UPDATE oncebox.outgoing o \
            SET bucket = date_bin('1 day', now(), '2000-01-03 00:00:00+00') \
            FROM kept k WHERE o.consumer_id = k.consumer_id AND o.message_id = k.message_id \
              AND o.ordinal = k.ordinal AND o.bucket = k.bucket \
              AND o.bucket >= $1 AND o.bucket < $2 RETURNING 1) \
         SELECT count(*) FROM moved",
        name = partition.name
    );
    let mut tx = connection.begin().await?;
    let query = sqlx::query_scalar(AssertSqlSafe(sql)).bind(partition.from_at);
    let moved = query.bind(partition.to_at).fetch_one(&mut *tx).await?;
    tx.commit().await?;
    Ok(moved)
}

/// Attaches a detached partition again where a message in it must stay.
async fn attach_staying(
    connection: &mut PgConnection,
    partition: &OldPartition,
) -> Result<(), InboxError> {
    let OldPartition { name, from_at, to_at, .. } = partition;
    let left = staying(connection, name).await?;
    if left == 0 {
        return Ok(());
    }
    let attach = format!(
        "ALTER TABLE oncebox.outgoing ATTACH PARTITION oncebox.{name} FOR VALUES FROM \
            ('{from_at}') TO ('{to_at}')"
    );
    connection.execute(sqlx::raw_sql(AssertSqlSafe(attach))).await?;
    Err(InboxError::conflict(format!(
        "{left} outgoing messages of the partition must stay and were put there after it was \
            detached; it is a partition again, and the next run moves them"
    )))
}

#[cfg(test)]
mod tests {
    use oncebox_model::outgoing::OutgoingStatus;

    use super::*;

    // What could go wrong: a partition is dropped with messages that are still to be sent, or stays
    // for ever for the sake of those that are settled.
    #[test]
    fn what_leaves_with_a_partition_is_settled() {
        for status in OutgoingStatus::ALL {
            let leaves = SETTLED.contains(&format!("'{status}'"));
            assert_eq!(leaves, status.is_settled(), "{status}");
        }
    }
}
