//! The proof that files hold what the database has, before anything of it is dropped.

use futures::StreamExt;
use oncebox_archive::{ArchiveError, FileReader, computed};
use oncebox_model::{
    error::InboxError,
    hooks::{self, Defect},
};
use sha2::{Digest, Sha256};
use sqlx::{AssertSqlSafe, PgConnection};

use super::{
    consumers::ArchivedConsumer,
    failed,
    write::{NewFile, PartitionWork},
};

/// Files whose lengths are read at a time.
const LOOKS_AT_ONCE: usize = 8;

impl PartitionWork<'_, '_> {
    /// Reads a file back, and compares it with the database. Returns the digest of its ids.
    pub(super) async fn verify(
        &self,
        connection: &mut PgConnection,
        consumer: &ArchivedConsumer,
        new: &NewFile,
    ) -> Result<Vec<u8>, InboxError> {
        let expected = self.expected(connection, consumer, new).await?;
        if hooks::sabotage(Defect::DropBeforeArchiveVerified) {
            return Ok(expected.1);
        }
        let stored = self.store.get(&new.path).await.map_err(failed)?;
        let damaged = |what: &str| Err(failed(ArchiveError::damaged(&new.path, &what)));
        if stored != new.file.bytes {
            return damaged("the archive returned other bytes than were written");
        }
        let (path, footer) = (new.path.clone(), new.file.footer);
        let ids = computed(&new.path, move || FileReader::open(&path, stored, &footer)?.ids());
        let ids = ids.await.map_err(failed)?;
        if (ids.len() as i64, digest(ids)) != expected {
            return damaged("it does not hold the messages of the database");
        }
        Ok(expected.1)
    }

    /// Returns the number of messages that a file must hold, and the digest of their ids.
    async fn expected(
        &self,
        connection: &mut PgConnection,
        consumer: &ArchivedConsumer,
        new: &NewFile,
    ) -> Result<(i64, Vec<u8>), InboxError> {
        let expected = format!(
            "SELECT count(*), sha256(coalesce(string_agg(sha256(convert_to(i.message_id, 'UTF8')), \
                ''::bytea ORDER BY i.message_id COLLATE \"C\"), ''::bytea)) \
             FROM oncebox.{name} i \
             WHERE i.consumer_id = $1 AND i.message_id > $2 AND i.message_id <= $3",
            name = self.partition.name
        );
        let query = sqlx::query_as(AssertSqlSafe(expected)).bind(consumer.consumer_id);
        let query = query.bind(&new.begins_after).bind(&new.ends_with);
        Ok(query.fetch_one(connection).await?)
    }

    /// Checks that each message of the consumers in the partition is in a file with a row.
    pub(super) async fn check(
        &self,
        connection: &mut PgConnection,
        consumers: &[ArchivedConsumer],
    ) -> Result<(), InboxError> {
        let missing = format!(
            "SELECT coalesce(sum(m.there - m.archived), 0)::bigint FROM ( \
                SELECT (SELECT count(*) FROM oncebox.{name} i \
                        WHERE i.consumer_id = c.consumer_id) AS there, \
                    (SELECT coalesce(sum(f.rows), 0) FROM oncebox.archive_file f \
                        WHERE f.partition_name = $2 AND f.removal_began_at = $3 \
                          AND f.consumer_id = c.consumer_id) AS archived \
                FROM unnest($1::int[]) AS c(consumer_id)) m WHERE m.there > m.archived",
            name = self.partition.name
        );
        let consumers: Vec<_> = consumers.iter().map(|consumer| consumer.consumer_id).collect();
        let query = sqlx::query_scalar(AssertSqlSafe(missing));
        let query = query.bind(consumers).bind(self.partition.name);
        let missing: i64 = query.bind(self.began_at).fetch_one(connection).await?;
        if missing == 0 {
            return Ok(());
        }
        Err(InboxError::conflict(format!(
            "{missing} messages of the partition are in no file of the archive; the next run \
                archives them"
        )))
    }

    /// Checks that the place is still the one that was marked, and that the files of this removal
    /// are there with their lengths: a volume may be gone since they were read back. A file that is not
    /// there loses its row, and so do those after it, so that the next run deletes what is left of
    /// them and writes them again.
    pub(super) async fn check_files(
        &self,
        connection: &mut PgConnection,
    ) -> Result<(), InboxError> {
        const FILES: &str = "SELECT path, bytes FROM oncebox.archive_file \
            WHERE partition_name = $1 AND removal_began_at = $2";
        // What is there of them has payloads. It was read back, so that no put is under way.
        const LOST: &str = "WITH lost AS (DELETE FROM oncebox.archive_file f \
                USING oncebox.archive_file l \
                WHERE l.path = ANY ($1) AND f.partition_name = l.partition_name \
                  AND f.removal_began_at = l.removal_began_at AND f.consumer_id = l.consumer_id \
                  AND f.file_number >= l.file_number \
                RETURNING f.path, f.partition_name, f.tenant_id, f.consumer_id) \
            INSERT INTO oncebox.archive_attempt (path, partition_name, tenant_id, consumer_id, \
                put_ends_at) \
            SELECT l.path, l.partition_name, l.tenant_id, l.consumer_id, now() FROM lost l \
            ON CONFLICT (path) DO NOTHING";
        let query = sqlx::query_as(FILES).bind(self.partition.name).bind(self.began_at);
        let files: Vec<(String, i64)> = query.fetch_all(&mut *connection).await?;
        // After the files, the place: only of the right one a file is lost.
        let looks: Vec<_> = files.iter().map(|(path, bytes)| self.look_at(path, *bytes)).collect();
        let looked: Vec<_> = futures::stream::iter(looks).buffered(LOOKS_AT_ONCE).collect().await;
        self.archive.required().await?;
        let (mut lost, mut first) = (Vec::new(), None);
        for ((path, _), error) in files.iter().zip(looked) {
            let Some(error) = error else { continue };
            if !matches!(error, ArchiveError::Unavailable { .. }) {
                lost.push(path.as_str());
            }
            first = first.or(Some(error));
        }
        let Some(error) = first else { return Ok(()) };
        sqlx::query(LOST).bind(lost).execute(connection).await?;
        Err(failed(error))
    }

    /// Returns what is wrong with a file, if anything is.
    async fn look_at(&self, path: &str, bytes: i64) -> Option<ArchiveError> {
        match self.store.length(path).await {
            Ok(length) if length == bytes as u64 => None,
            Ok(length) => {
                let cause = format!("it has {length} bytes, and not {bytes}");
                Some(ArchiveError::damaged(path, &cause))
            }
            Err(error) => Some(error),
        }
    }
}

/// Returns the digest of ids, as the database makes it.
pub(crate) fn digest(mut ids: Vec<Vec<u8>>) -> Vec<u8> {
    ids.sort_unstable();
    let mut all = Sha256::new();
    for id in ids {
        all.update(Sha256::digest(id));
    }
    all.finalize().to_vec()
}
