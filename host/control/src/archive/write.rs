//! The files of a time partition, written after its detach. Nothing changes in the partition any
//! more, so that a process continues where another one ended: with the first message that is in no
//! file with a row.
//!
//! For each consumer, from file to file:
//!
//! 1. Messages are read in the order of the database, as many as fit into a row group, and encoded.
//! 2. The file is written, under a name that no other attempt has (`attempt`).
//! 3. It is read back. Its bytes, the number of its messages and the digest of their ids must be
//!    those of the database.
//! 4. Its row is inserted.
//!
//! In the end each message is in a file with a row, the place is the one that was marked, and all
//! files are there.

use chrono::{DateTime, Utc};
use oncebox_archive::{
    ArchiveStore, ArchivedMessage, FileWriter, GROUP_ROWS_MAX, WrittenFile, computed,
};
use oncebox_model::{
    error::InboxError,
    hooks::{self, Defect},
};
use sqlx::PgConnection;

use super::{consumers::ArchivedConsumer, failed, group::weighed_next};
use crate::handles::Archive;

/// A time partition that is detached and not dropped.
#[derive(Debug, Clone, Copy)]
pub(crate) struct DetachedPartition<'p> {
    /// Name of its table.
    pub(crate) name: &'p str,
    /// Name of the database; none for the host's.
    pub(crate) database: Option<&'p str>,
    /// End of its time, exclusive. What stands beside its messages is older.
    pub(crate) to_at: DateTime<Utc>,
}

/// The files of one consumer that are recorded: the number of the last, and where it ends.
struct WrittenFiles {
    file_number: i32,
    ends_with: String,
    /// Messages that are weighed for the next row group.
    weighed: usize,
}

/// A file that was written, and not recorded.
pub(super) struct NewFile {
    pub(super) path: String,
    file_number: i32,
    pub(super) file: WrittenFile,
    rows: i64,
    first_id: String,
    last_id: String,
    /// Where it begins and ends, in the order of the database.
    pub(super) begins_after: String,
    pub(super) ends_with: String,
    /// Messages that are weighed for the first row group of the next file.
    weighed: usize,
    written_at: DateTime<Utc>,
}

impl<'a> Archive<'a> {
    /// Writes the messages of a partition to the archive, where they must go there. Afterwards each
    /// is in a file that was read back and has a row. Returns false where they need not go there.
    ///
    /// # Errors
    /// `Archive` where the archive does not take a file, or does not return what was written.
    /// `Conflict` where this process cannot archive. An error of the database.
    pub(crate) async fn write(
        &self,
        connection: &mut PgConnection,
        partition: DetachedPartition<'_>,
    ) -> Result<bool, InboxError> {
        const BEGAN: &str = "SELECT began_at FROM oncebox.removal WHERE partition_name = $1";
        let Some(store) = self.required().await? else { return Ok(false) };
        let query = sqlx::query_scalar(BEGAN).bind(partition.name);
        let began_at = query.fetch_one(&mut *connection).await?;
        let work = PartitionWork { archive: *self, store, partition, began_at };
        let consumers = self.consumers_in(connection, &partition).await?;
        self.clear_attempts(connection, store, partition.database, Some(partition.name)).await?;
        for consumer in &consumers {
            work.write_consumer(connection, consumer).await?;
        }
        if !hooks::sabotage(Defect::DropBeforeArchiveVerified) {
            work.check(connection, &consumers).await?;
            work.check_files(connection).await?;
        }
        work.log(connection).await?;
        Ok(true)
    }
}

/// The work on one partition.
pub(super) struct PartitionWork<'a, 'p> {
    pub(super) archive: Archive<'a>,
    pub(super) store: &'a ArchiveStore,
    pub(super) partition: DetachedPartition<'p>,
    pub(super) began_at: DateTime<Utc>,
}

impl PartitionWork<'_, '_> {
    /// Writes the files of a consumer, from the first message that is in none.
    async fn write_consumer(
        &self,
        connection: &mut PgConnection,
        consumer: &ArchivedConsumer,
    ) -> Result<(), InboxError> {
        let mut progress = self.progress(connection, consumer).await?;
        while let Some(new) = self.write_file(connection, consumer, &progress).await? {
            hooks::point("archive:write:after");
            let id_digest = self.verify(connection, consumer, &new).await?;
            hooks::point("archive:verify:after");
            self.record(connection, consumer, &new, &id_digest).await?;
            let NewFile { file_number, ends_with, weighed, .. } = new;
            progress = WrittenFiles { file_number, ends_with, weighed };
        }
        Ok(())
    }

    async fn progress(
        &self,
        connection: &mut PgConnection,
        consumer: &ArchivedConsumer,
    ) -> Result<WrittenFiles, InboxError> {
        // An earlier removal of a partition of this name has files of its own.
        const PROGRESS: &str = "SELECT coalesce(max(f.file_number), 0), \
                coalesce((array_agg(f.ends_with ORDER BY f.file_number DESC) \
                    FILTER (WHERE f.removal_began_at = $3))[1], '') \
            FROM oncebox.archive_file f WHERE f.partition_name = $1 AND f.consumer_id = $2";
        let query = sqlx::query_as(PROGRESS).bind(self.partition.name).bind(consumer.consumer_id);
        let (file_number, ends_with) = query.bind(self.began_at).fetch_one(connection).await?;
        Ok(WrittenFiles { file_number, ends_with, weighed: GROUP_ROWS_MAX })
    }

    /// Writes the next file of a consumer; none where all its messages are in files.
    async fn write_file(
        &self,
        connection: &mut PgConnection,
        consumer: &ArchivedConsumer,
        progress: &WrittenFiles,
    ) -> Result<Option<NewFile>, InboxError> {
        let file_number = progress.file_number + 1;
        let path = self.begin_attempt(connection, consumer, file_number).await?;
        let mut writer = FileWriter::new(&path).map_err(failed)?;
        let (mut ends_with, mut weighed) = (progress.ends_with.clone(), progress.weighed);
        let mut ids: Option<(String, String)> = None;
        while !writer.is_full() {
            let mut group = self.read_group(connection, consumer, &ends_with, weighed).await?;
            let Some(last) = group.last() else { break };
            weighed = weighed_next(group.len());
            ends_with.clone_from(&last.message_id);
            ids = bounds(ids, &group);
            if hooks::sabotage(Defect::DropBeforeArchiveVerified) {
                group.pop();
            }
            writer = computed(&path, move || {
                writer.write(&group)?;
                Ok(writer)
            })
            .await
            .map_err(failed)?;
        }
        let Some((first_id, last_id)) = ids else {
            self.end_attempt(connection, &path).await?;
            return Ok(None);
        };
        let rows = writer.rows() as i64;
        let file = computed(&path, move || writer.finish()).await.map_err(failed)?;
        let written_at =
            sqlx::query_scalar("SELECT clock_timestamp()").fetch_one(&mut *connection).await?;
        self.store.put(&path, file.bytes.clone()).await.map_err(failed)?;
        let begins_after = progress.ends_with.clone();
        Ok(Some(NewFile {
            path,
            file_number,
            file,
            rows,
            first_id,
            last_id,
            begins_after,
            ends_with,
            weighed,
            written_at,
        }))
    }

    async fn record(
        &self,
        connection: &mut PgConnection,
        consumer: &ArchivedConsumer,
        new: &NewFile,
        id_digest: &[u8],
    ) -> Result<(), InboxError> {
        const RECORD: &str = "WITH attempt AS (DELETE FROM oncebox.archive_attempt \
                WHERE path = $1) \
            INSERT INTO oncebox.archive_file (path, partition_name, \
                removal_began_at, tenant_id, tenant, consumer_id, consumer, file_number, \
                first_id, last_id, ends_with, rows, bytes, id_digest, footer_bytes, \
                footer_digest, written_at) \
            VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14, $15, $16, $17)";
        hooks::point("archive:record:before");
        let query = sqlx::query(RECORD)
            .bind(&new.path)
            .bind(self.partition.name)
            .bind(self.began_at)
            .bind(consumer.tenant_id)
            .bind(&consumer.tenant)
            .bind(consumer.consumer_id)
            .bind(&consumer.consumer)
            .bind(new.file_number)
            .bind(&new.first_id)
            .bind(&new.last_id)
            .bind(&new.ends_with)
            .bind(new.rows)
            .bind(new.file.bytes.len() as i64)
            .bind(id_digest)
            .bind(new.file.footer.bytes as i64)
            .bind(new.file.footer.digest.as_slice())
            .bind(new.written_at);
        query.execute(connection).await?;
        hooks::point("archive:record:after");
        Ok(())
    }

    async fn log(&self, connection: &mut PgConnection) -> Result<(), InboxError> {
        const SUMS: &str = "SELECT count(*), coalesce(sum(rows), 0)::bigint, \
                coalesce(sum(bytes), 0)::bigint \
            FROM oncebox.archive_file WHERE partition_name = $1 AND removal_began_at = $2";
        let query = sqlx::query_as(SUMS).bind(self.partition.name).bind(self.began_at);
        let (files, messages, bytes): (i64, i64, i64) = query.fetch_one(connection).await?;
        if files > 0 {
            let partition = self.partition.name;
            tracing::info!(partition, files, messages, bytes, "time partition archived");
        }
        Ok(())
    }
}

/// Returns the lowest and the highest id, in the order of bytes, with those of a group.
fn bounds(ids: Option<(String, String)>, group: &[ArchivedMessage]) -> Option<(String, String)> {
    let all = || group.iter().map(|message| &message.message_id);
    let (lowest, highest) = (all().min()?.clone(), all().max()?.clone());
    Some(match ids {
        None => (lowest, highest),
        Some((first, last)) => (first.min(lowest), last.max(highest)),
    })
}
