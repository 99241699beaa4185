//! The erasure in the archive. It begins after the passes over the inbox: what is archived later is
//! empty already, and attempts at files that began before are waited for.
//!
//! One file after the other is looked at, in the order of the paths. A file that holds a readable
//! message of the subject is written again under a new name, without what is erased. It is read
//! back, takes the row of the old file, and then the old file is deleted. Both names have a row in
//! `oncebox.archive_attempt` as long as a crash may leave the file behind.

use std::time::Duration;

use bytes::Bytes;
use chrono::{DateTime, Utc};
use oncebox_archive::{ArchiveError, ArchiveStore, Footer, computed};
use oncebox_model::{error::InboxError, hooks};
use sqlx::{AssertSqlSafe, Connection, PgConnection, PgPool};

use super::{
    ErasureTarget,
    file::{self, ErasureEntry, RewrittenFile},
    inbox::{ErasureStep, ErasureWait, InboxErasure},
};
use crate::{
    archive::{attempt::EndedAttempt, changed_row, check_row, failed, is_file_of},
    database::{
        locks::{self, HostLock},
        tenant_database::open::answered_within,
    },
};

/// Longest wait for a connection.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);

/// The place of an erasure among the files of the archive.
#[derive(sqlx::FromRow)]
struct ArchiveProgress {
    /// Path of the file that was looked at last; empty before the first.
    at_file: String,
    /// Time at which the passes over the inbox had ended.
    passed_at: DateTime<Utc>,
    actor: String,
    reason: String,
}

/// Attempts of tenant $1 whose files are to be deleted: those of interrupted erasures, the files
/// that were replaced, those whose puts may have gone on until now, and, once in each erasure,
/// those that the storage did not delete before. $2 is the time at which the passes over the inbox
/// had ended.
const OLD: &str = "tenant_id = $1 AND CASE WHEN is_left THEN coalesce(tried_at < $2, true) \
    ELSE coalesce(put_ends_at <= now(), erasure_id IS NOT NULL) END";

/// Numbers of files of the tenant that are to be deleted.
#[derive(sqlx::FromRow)]
struct OldFiles {
    files: i64,
    /// Those of them that an erasure wrote or replaced. It does not end before they were tried.
    of_erasures: i64,
}

/// A file that may hold messages of the subject.
#[derive(sqlx::FromRow)]
struct SuspectFile {
    path: String,
    partition_name: String,
    consumer_id: i32,
    rows: i64,
    bytes: i64,
    id_digest: Vec<u8>,
    footer_bytes: i64,
    footer_digest: Vec<u8>,
}

impl SuspectFile {
    fn footer(&self) -> Result<Footer, InboxError> {
        let footer = self.footer_digest.as_slice().try_into().ok().and_then(|digest| {
            Some(Footer { bytes: u64::try_from(self.footer_bytes).ok()?, digest })
        });
        footer.ok_or_else(|| failed(changed_row(&self.path)))
    }

    /// Returns a path that no file has, beside this one. The path was checked: the last of its
    /// dashes stands in the name of the file.
    fn new_path(&self) -> String {
        let stem = self.path.rsplit_once('-').map_or(self.path.as_str(), |(stem, _)| stem);
        format!("{stem}-{}.parquet", hex::encode(rand::random::<[u8; 8]>()))
    }
}

impl InboxErasure {
    /// Looks at the next file of the archive, and erases in it. `Done` says that none is left.
    pub(super) async fn look_at_archive(&self) -> Result<ErasureStep, InboxError> {
        let progress = self.archive_progress(&self.database.pool).await?;
        let unfinished = self.unfinished_attempts(&progress).await?;
        if unfinished > 0 {
            return Ok(ErasureStep::Waits(ErasureWait::Files(unfinished)));
        }
        let next = self.next_file(&self.database.pool, &progress).await?;
        let (store, old) = (self.control.archive().store(), self.old_files(&progress).await?);
        // What a removal left is deleted where this process can do that, and is named otherwise.
        if next.is_none() && old.of_erasures == 0 && (old.files == 0 || store.is_none()) {
            return Ok(ErasureStep::Done);
        }
        let Some(store) = store else {
            return Err(InboxError::conflict(
                "the archive may hold messages of the subject, and this process has no \
                    `archive.location`; give it the settings of the hosts, or repeat the command \
                    with `--server`",
            ));
        };
        let mut connection = self.connect().await?;
        let lock = HostLock::ArchiveErasure(self.tenant.tenant_id);
        let is_ours = locks::try_for_session(&mut connection, lock).await?;
        let step = if is_ours { self.erase_next(&mut connection, store).await } else { Ok(()) };
        let _ = connection.close().await; // the lock ends either way
        step?;
        Ok(if is_ours { ErasureStep::Erased } else { ErasureStep::Again })
    }

    /// Opens a connection, which holds the lock of the tenant's files while one is written.
    async fn connect(&self) -> Result<PgConnection, InboxError> {
        let options = self.database.options.clone().application_name("oncebox erase");
        let connecting = PgConnection::connect_with(&options);
        Ok(answered_within(CONNECT_TIMEOUT, connecting).await??)
    }

    async fn archive_progress(&self, pool: &PgPool) -> Result<ArchiveProgress, InboxError> {
        const PROGRESS: &str = "UPDATE oncebox.erasure SET worked_at = now(), \
            passed_at = coalesce(passed_at, clock_timestamp()) WHERE erasure_id = $1 \
            RETURNING at_file, passed_at, actor, reason";
        let query = sqlx::query_as(PROGRESS).bind(self.erasure_id);
        query.fetch_optional(pool).await?.ok_or_else(|| self.ended())
    }

    /// Counts attempts at files of the tenant that may have read its messages before they were
    /// erased.
    async fn unfinished_attempts(&self, progress: &ArchiveProgress) -> Result<i64, InboxError> {
        const UNFINISHED: &str = "SELECT count(*) FROM oncebox.archive_attempt \
            WHERE tenant_id = $1 AND erasure_id IS NULL AND put_ends_at IS NULL \
              AND began_at <= $2";
        let query = sqlx::query_scalar(UNFINISHED).bind(self.tenant.tenant_id);
        Ok(query.bind(progress.passed_at).fetch_one(&self.database.pool).await?)
    }

    /// Counts files of the tenant that interrupted work left and that are to be deleted.
    async fn old_files(&self, progress: &ArchiveProgress) -> Result<OldFiles, InboxError> {
        let old = format!(
            "SELECT count(*) AS files, count(*) FILTER (WHERE erasure_id IS NOT NULL AND NOT \
                is_left) AS of_erasures FROM oncebox.archive_attempt WHERE {OLD}"
        );
        let query = sqlx::query_as(AssertSqlSafe(old)).bind(self.tenant.tenant_id);
        Ok(query.bind(progress.passed_at).fetch_one(&self.database.pool).await?)
    }

    /// Returns the next file that may hold a message of the subject, also of a deleted consumer.
    async fn next_file(
        &self,
        pool: &PgPool,
        progress: &ArchiveProgress,
    ) -> Result<Option<SuspectFile>, InboxError> {
        const NEXT: &str = "SELECT f.path, f.partition_name, f.consumer_id, f.rows, f.bytes, \
                f.id_digest, f.footer_bytes, f.footer_digest FROM oncebox.archive_file f \
            WHERE f.forgotten_at IS NULL AND f.tenant_id = $1 AND f.path > $2 \
              AND ($3::int IS NULL OR f.consumer_id = $3) \
              AND ($4::text IS NULL OR f.first_id <= $4 AND f.last_id >= $4) \
            ORDER BY f.path LIMIT 1";
        let only = self.consumer.as_ref().and_then(|_| self.consumers.first());
        let id = match &self.target {
            ErasureTarget::MessageId(id) => Some(id.as_str()),
            ErasureTarget::Key(_) => None,
        };
        let query = sqlx::query_as(NEXT).bind(self.tenant.tenant_id).bind(&progress.at_file);
        let query = query.bind(only.map(|consumer| consumer.consumer_id)).bind(id);
        Ok(query.fetch_optional(pool).await?)
    }

    /// Deletes files that were replaced, and looks at the next one. Nobody else does either.
    async fn erase_next(
        &self,
        connection: &mut PgConnection,
        store: &ArchiveStore,
    ) -> Result<(), InboxError> {
        const ADVANCE: &str = "UPDATE oncebox.erasure SET at_file = $2, worked_at = now(), \
            looked_at = looked_at + $3 WHERE erasure_id = $1";
        let progress = self.archive_progress(&self.database.pool).await?;
        self.delete_old_files(connection, store, &progress).await?;
        let next = self.next_file(&self.database.pool, &progress).await?;
        let Some(file) = next else { return Ok(()) };
        let installation = self.installation().await?;
        check_row(&file.path, &installation, &self.tenant.name).map_err(failed)?;
        let looked_at = match &self.target {
            ErasureTarget::MessageId(id) => {
                let found = store.find(&file.path, file.bytes as u64, file.footer()?, id).await;
                if found.map_err(failed)?.is_some_and(|message| self.target.is_readable(&message)) {
                    self.rewrite(connection, store, &file, &progress).await?;
                }
                1
            }
            ErasureTarget::Key(_) => {
                self.rewrite(connection, store, &file, &progress).await?;
                file.rows
            }
        };
        let query = sqlx::query(ADVANCE).bind(self.erasure_id).bind(&file.path).bind(looked_at);
        query.execute(connection).await?;
        Ok(())
    }

    /// Writes a file again without the payloads of the subject, where it holds such.
    async fn rewrite(
        &self,
        connection: &mut PgConnection,
        store: &ArchiveStore,
        suspect: &SuspectFile,
        progress: &ArchiveProgress,
    ) -> Result<(), InboxError> {
        const NOW: &str = "SELECT clock_timestamp()";
        const ATTEMPT: &str = "INSERT INTO oncebox.archive_attempt (path, partition_name, \
            tenant_id, consumer_id, erasure_id) VALUES ($1, $2, $3, $4, $5)";
        let at = sqlx::query_scalar(NOW).fetch_one(&mut *connection).await?;
        let entry =
            ErasureEntry { at, reason: progress.reason.clone(), actor: progress.actor.clone() };
        // The row may say anything of the length.
        let length = store.length(&suspect.path).await.map_err(failed)?;
        let _memory = store.memory_for_rewrite(length).await;
        let old = store.get(&suspect.path).await.map_err(failed)?;
        let (path, new_path) = (suspect.path.clone(), suspect.new_path());
        let (footer, target, of) = (suspect.footer()?, self.target.clone(), new_path.clone());
        let rewritten = computed(&suspect.path, move || {
            file::rewrite(&path, old, &footer, &of, &target, &entry)
        });
        let Some(rewritten) = rewritten.await.map_err(failed)? else { return Ok(()) };
        let attempt = sqlx::query(ATTEMPT).bind(&new_path).bind(&suspect.partition_name);
        let attempt = attempt.bind(self.tenant.tenant_id).bind(suspect.consumer_id);
        attempt.bind(self.erasure_id).execute(&mut *connection).await?;
        hooks::point("erase:archive:begun");
        store.put(&new_path, rewritten.file.bytes.clone()).await.map_err(failed)?;
        let stored = store.get(&new_path).await.map_err(failed)?;
        self.check(suspect, &new_path, &rewritten, stored).await?;
        self.replace(connection, suspect, &new_path, &rewritten, at).await?;
        hooks::point("erase:archive:after");
        self.delete_old_files(connection, store, progress).await
    }

    /// Checks what the storage returned: the bytes that were written, with the messages of the old
    /// file, none of them readable that the target selects.
    async fn check(
        &self,
        suspect: &SuspectFile,
        new_path: &str,
        rewritten: &RewrittenFile,
        stored: Bytes,
    ) -> Result<(), InboxError> {
        let damaged = |what: &str| Err(failed(ArchiveError::damaged(new_path, &what)));
        if stored != rewritten.file.bytes {
            return damaged("the archive returned other bytes than were written");
        }
        let (path, footer, target) =
            (new_path.to_owned(), rewritten.file.footer, self.target.clone());
        let content = computed(new_path, move || file::content(&path, stored, &footer, &target));
        let content = content.await.map_err(failed)?;
        if content.readable > 0 {
            return damaged("it still holds payloads of the subject");
        }
        if (content.rows, content.id_digest) != (suspect.rows, suspect.id_digest.clone()) {
            return damaged("it does not hold the messages of the file that it replaces");
        }
        Ok(())
    }

    /// Gives the row of a file to the one that replaces it, and counts what was erased.
    async fn replace(
        &self,
        connection: &mut PgConnection,
        suspect: &SuspectFile,
        new_path: &str,
        rewritten: &RewrittenFile,
        written_at: DateTime<Utc>,
    ) -> Result<(), InboxError> {
        const REPLACE: &str = "WITH attempt AS (DELETE FROM oncebox.archive_attempt \
                WHERE path = $2), \
             old AS (INSERT INTO oncebox.archive_attempt (path, partition_name, tenant_id, \
                consumer_id, erasure_id, put_ends_at) SELECT f.path, f.partition_name, \
                f.tenant_id, f.consumer_id, $3, now() FROM oncebox.archive_file f \
                WHERE f.path = $1) \
             UPDATE oncebox.archive_file SET path = $2, bytes = $4, footer_bytes = $5, \
                footer_digest = $6, written_at = $7, verified_at = now() \
             WHERE path = $1 AND forgotten_at IS NULL";
        const COUNT: &str = "UPDATE oncebox.erasure SET archive_files = archive_files + 1, \
            archived = archived + $2, edits = edits + $3, errors = errors + $4 \
            WHERE erasure_id = $1";
        let RewrittenFile { file, messages, edits, errors } = rewritten;
        let mut tx = connection.begin().await?;
        let query = sqlx::query(REPLACE)
            .bind(&suspect.path)
            .bind(new_path)
            .bind(self.erasure_id)
            .bind(file.bytes.len() as i64)
            .bind(file.footer.bytes as i64)
            .bind(file.footer.digest.as_slice())
            .bind(written_at);
        if query.execute(&mut *tx).await?.rows_affected() != 1 {
            return Err(InboxError::conflict(format!(
                "the file `{}` was taken out of the archive's list just now; repeat the command",
                suspect.path
            )));
        }
        let query = sqlx::query(COUNT).bind(self.erasure_id).bind(messages);
        query.bind(edits).bind(errors).execute(&mut *tx).await?;
        hooks::point("erase:archive:before");
        tx.commit().await?;
        Ok(())
    }

    /// Deletes files that were replaced, and those that attempts left. One that the storage does
    /// not delete is named by the proof, and tried again by the next erasure.
    async fn delete_old_files(
        &self,
        connection: &mut PgConnection,
        store: &ArchiveStore,
        progress: &ArchiveProgress,
    ) -> Result<(), InboxError> {
        let old = format!(
            "SELECT path, coalesce(put_ends_at <= now(), false) AS is_over \
                FROM oncebox.archive_attempt WHERE {OLD} ORDER BY path"
        );
        let query = sqlx::query_as(AssertSqlSafe(old)).bind(self.tenant.tenant_id);
        let query = query.bind(progress.passed_at);
        let old: Vec<EndedAttempt> = query.fetch_all(&mut *connection).await?;
        let installation = self.installation().await?;
        for attempt in old {
            let is_own = is_file_of(attempt.path(), &installation, &self.tenant.name);
            attempt.delete(connection, store, is_own).await?;
        }
        Ok(())
    }

    async fn installation(&self) -> Result<String, InboxError> {
        Ok(self.control.tenant_databases().installation().await?.to_string())
    }

    /// Lists files of the tenant that are outside of the list and may be there, as texts for
    /// operators.
    pub(super) async fn files_left(
        &self,
        connection: &mut PgConnection,
    ) -> Result<Vec<String>, InboxError> {
        const LEFT: &str = "SELECT format('the file `%s` of the archive, which %s', \
                path, CASE \
                WHEN is_left AND tried_at IS NOT NULL THEN 'the storage does not delete' \
                WHEN is_left OR put_ends_at <= now() THEN 'is not deleted yet' \
                ELSE 'was deleted, and which an interrupted write may bring back until ' || \
                    to_char(put_ends_at AT TIME ZONE 'UTC', 'YYYY-MM-DD HH24:MI:SS \"UTC\"') END) \
            FROM oncebox.archive_attempt WHERE tenant_id = $1 \
              AND (is_left OR put_ends_at IS NOT NULL) ORDER BY path";
        let query = sqlx::query_scalar(LEFT).bind(self.tenant.tenant_id);
        Ok(query.fetch_all(connection).await?)
    }
}
