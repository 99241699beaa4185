//! Attempts to write a file. Each has a row from before the first message is read until the file is
//! recorded, so that nothing of a message is in a file that no row names. The row of a process that
//! died stays for the next run, which deletes the file.
//!
//! A put may go on after its process, or its request, has ended: it may bring the file back after
//! it was deleted. So the row of an interrupted attempt stays until no such put can be under way,
//! and the file is deleted once more before the row goes.

use oncebox_archive::{ArchiveError, ArchiveStore};
use oncebox_model::error::InboxError;
use sqlx::PgConnection;

use super::{
    changed_row, consumers::ArchivedConsumer, is_file_of, is_file_of_installation,
    write::PartitionWork,
};
use crate::handles::Archive;

/// Longest time, as an interval of PostgreSQL, for which a put goes on after its process has ended.
const PUT_MAX: &str = "1 hour";

impl PartitionWork<'_, '_> {
    /// Begins an attempt, and returns the path of its file. No other attempt has it: what was read
    /// back is never written again, not even by a put of an earlier attempt that goes on.
    pub(super) async fn begin_attempt(
        &self,
        connection: &mut PgConnection,
        consumer: &ArchivedConsumer,
        file_number: i32,
    ) -> Result<String, InboxError> {
        const BEGIN: &str = "INSERT INTO oncebox.archive_attempt (path, partition_name, tenant_id, \
            consumer_id) VALUES ($1, $2, $3, $4)";
        // A consumer that is made again under its name has another number.
        let ArchivedConsumer { tenant, consumer: name, consumer_id, .. } = consumer;
        let (partition, random) = (self.partition.name, hex::encode(rand::random::<[u8; 8]>()));
        let file =
            format!("{partition}/{tenant}/{name}/{consumer_id}-{file_number:06}-{random}.parquet");
        let path = self.archive.path(&file).await?;
        let query = sqlx::query(BEGIN).bind(&path).bind(partition).bind(consumer.tenant_id);
        query.bind(consumer_id).execute(connection).await?;
        Ok(path)
    }

    /// Ends an attempt that has no file, since no message is left for one.
    pub(super) async fn end_attempt(
        &self,
        connection: &mut PgConnection,
        path: &str,
    ) -> Result<(), InboxError> {
        const END: &str = "DELETE FROM oncebox.archive_attempt WHERE path = $1";
        sqlx::query(END).bind(path).execute(connection).await?;
        Ok(())
    }
}

impl Archive<'_> {
    /// Deletes the files of attempts at a partition that were interrupted. Without a partition, it
    /// deletes those that are due again: where a put may have gone on, and, once a day, where the
    /// storage did not delete the file. The caller holds the lock of retention, so that no attempt
    /// is under way. `database` is the name of the database; none for the host's. A file of a tenant that has
    /// no inbox in this database stays.
    ///
    /// # Errors
    /// An error of a database. A file that is not deleted is no error: it keeps its row.
    pub(crate) async fn clear_attempts(
        &self,
        connection: &mut PgConnection,
        store: &ArchiveStore,
        database: Option<&str>,
        partition: Option<&str>,
    ) -> Result<(), InboxError> {
        const ENDED: &str = "SELECT path, coalesce(put_ends_at <= now(), false) AS is_over \
            FROM oncebox.archive_attempt WHERE CASE \
                WHEN $1::text IS NOT NULL THEN \
                    partition_name = $1 AND erasure_id IS NULL AND put_ends_at IS NULL \
                WHEN is_left THEN coalesce(tried_at < now() - interval '1 day', true) \
                ELSE put_ends_at <= now() END ORDER BY path";
        let query = sqlx::query_as(ENDED).bind(partition);
        let ended: Vec<EndedAttempt> = query.fetch_all(&mut *connection).await?;
        if ended.is_empty() {
            return Ok(());
        }
        let installation = self.0.tenant_databases().installation().await?.to_string();
        let tenants = self.0.tenant_databases().tenants_in(database).await?;
        for attempt in ended {
            let is_own = match database {
                Some(_) => {
                    tenants.iter().any(|name| is_file_of(&attempt.path, &installation, name))
                }
                None => is_file_of_installation(&attempt.path, &installation),
            };
            attempt.delete(connection, store, is_own).await?;
        }
        Ok(())
    }
}

/// An attempt whose process has ended, or a file that another one replaced.
#[derive(sqlx::FromRow)]
pub(crate) struct EndedAttempt {
    path: String,
    /// Whether no put of the file can be under way.
    is_over: bool,
}

impl EndedAttempt {
    /// Returns the path of the file.
    pub(crate) fn path(&self) -> &str {
        &self.path
    }

    /// Deletes the file, unless another tenant may own it, and notes that. The row goes with the
    /// file where no put of it can be under way.
    ///
    /// # Errors
    /// An error of the database. A file that is not deleted is no error: its row says so.
    pub(crate) async fn delete(
        &self,
        connection: &mut PgConnection,
        store: &ArchiveStore,
        is_own: bool,
    ) -> Result<(), InboxError> {
        const GONE: &str = "DELETE FROM oncebox.archive_attempt WHERE path = $1";
        const TRIED: &str = "UPDATE oncebox.archive_attempt SET is_left = $3, \
            tried_at = clock_timestamp(), put_ends_at = coalesce(put_ends_at, \
            clock_timestamp() + $2::interval) WHERE path = $1";
        let deleted = match is_own {
            true => store.delete(&self.path).await,
            false => Err(changed_row(&self.path)),
        };
        let is_left = match deleted {
            Ok(()) | Err(ArchiveError::Missing { .. }) => false,
            Err(error) => {
                tracing::warn!(%error, "a file of the archive was not deleted");
                true
            }
        };
        let query = match self.is_over && !is_left {
            true => sqlx::query(GONE).bind(&self.path),
            false => sqlx::query(TRIED).bind(&self.path).bind(PUT_MAX).bind(is_left),
        };
        query.execute(connection).await?;
        Ok(())
    }
}

/// Notes that nobody continues the attempts at partitions that are dropped. Their files may be
/// there. The caller holds the lock of retention.
///
/// # Errors
/// An error of the database.
pub(crate) async fn leave_attempts(connection: &mut PgConnection) -> Result<(), InboxError> {
    const LEAVE: &str = "UPDATE oncebox.archive_attempt a SET is_left = true, \
            put_ends_at = clock_timestamp() + $1::interval \
        FROM oncebox.removal r WHERE r.partition_name = a.partition_name \
          AND r.state = 'dropped' AND a.erasure_id IS NULL AND a.put_ends_at IS NULL";
    sqlx::query(LEAVE).bind(PUT_MAX).execute(connection).await?;
    Ok(())
}
