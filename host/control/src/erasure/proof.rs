//! The end of an erasure: its figures, for the operator and for the audit log.

use chrono::{DateTime, Utc};
use futures::TryStreamExt;
use oncebox_model::{error::InboxError, hooks};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use sqlx::PgConnection;

use super::{
    ErasureProgress,
    inbox::{ErasureRow, InboxErasure},
    subject,
};

/// What an erasure leaves, as texts for operators.
const NOT_COVERED: [&str; 9] = [
    "records in the brokers' topics, copies of dead letters in a topic included",
    "older versions of the archive's files, where the storage keeps them, and files that were \
        taken out of its list",
    "objects in stores to which messages referred",
    "the tenant's own tables, which its handlers wrote",
    "backups and the write-ahead log of the database until they expire, and replicas until they \
        have applied it",
    "bytes in free space of the database's files, until PostgreSQL uses the space again",
    "logs of hosts, handlers and the database",
    "message ids, keys, event types, trace contexts, positions and times, which stay in the inbox",
    "reasons that operators gave, in histories and in the audit log",
];

/// The figures of an erasure that has ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ErasureProof {
    /// Name of the tenant.
    pub tenant: String,
    /// Names of the consumers whose messages were looked at.
    pub consumers: Vec<String>,
    /// Id that selected the messages; none where a key did.
    pub message_id: Option<String>,
    /// HMAC-SHA-256 of the key that selected the messages, under a key of the tenant, in
    /// hexadecimal digits; none where an id did.
    pub key_hmac: Option<String>,
    /// Reason that the operator gave.
    pub reason: String,
    /// Operator who began the erasure.
    pub actor: String,
    /// Time of the begin, by the clock of the database with the inbox.
    pub began_at: DateTime<Utc>,
    /// Time of the end, by the same clock.
    pub ended_at: DateTime<Utc>,
    /// Erased messages, by consumer and by their status before.
    pub erased: Vec<ErasedCount>,
    /// Messages of the subject that an earlier erasure had erased.
    pub already_erased: i64,
    /// Payloads that edits had replaced, and that were erased.
    pub edits: i64,
    /// Texts of failures in histories that were erased.
    pub errors: i64,
    /// Differences of shadows that were deleted.
    pub differences: i64,
    /// Files of the archive that were written again.
    pub archive_files: i64,
    /// Messages that were erased in them.
    pub archived: i64,
    /// SHA-256, in hexadecimal digits, over a line `<consumer>/<message id>` for each erased
    /// message. The lines are sorted by their bytes, and each ends with a line feed.
    pub digest: String,
    /// Messages of the subject that are still readable, counted after the last one was erased.
    pub readable: i64,
    /// Tables that were vacuumed.
    pub vacuumed: Vec<String>,
    /// Tables that could not be vacuumed, each with the error.
    pub not_vacuumed: Vec<String>,
    /// What the erasure does not cover.
    pub not_covered: Vec<String>,
    /// Id of the entry in the audit log.
    pub audit_id: i64,
}

/// A number of erased messages.
#[derive(Debug, Clone, PartialEq, Eq, sqlx::FromRow)]
pub struct ErasedCount {
    /// Name of the consumer.
    pub consumer: String,
    /// Status before the erasure.
    pub status: String,
    /// Number of messages.
    pub messages: i64,
}

impl InboxErasure {
    /// Ends the erasure: writes the figures to the audit log, and deletes its row. The entry and
    /// the deletion are one transaction; where the inbox is in another database, the entry comes
    /// first.
    pub(super) async fn conclude(&self) -> Result<ErasureProgress, InboxError> {
        const END: &str = "DELETE FROM oncebox.erasure WHERE erasure_id = $1";
        let mut progress = self.progress(None).await?;
        let mut tx = self.database.pool.begin().await?;
        let row = self.lock(&mut tx).await?;
        let mut proof = self.proof(&mut tx, row).await?;
        if self.database.is_dedicated {
            let mut own = self.control.pool.begin().await?;
            proof.audit_id = self.record_end(&mut own, &proof).await?;
            own.commit().await?;
        } else {
            proof.audit_id = self.record_end(&mut tx, &proof).await?;
        }
        sqlx::query(END).bind(self.erasure_id).execute(&mut *tx).await?;
        hooks::point("erase:end:before");
        tx.commit().await?;
        hooks::point("erase:end:after");
        progress.proof = Some(proof);
        Ok(progress)
    }

    /// Reads the figures. The id of the audit entry is not known yet.
    async fn proof(
        &self,
        connection: &mut PgConnection,
        row: ErasureRow,
    ) -> Result<ErasureProof, InboxError> {
        const COUNTS: &str = "SELECT c.name AS consumer, m.status, count(*) AS messages \
            FROM oncebox.erased_message m JOIN oncebox.consumer c USING (consumer_id) \
            WHERE m.erasure_id = $1 AND m.status IS NOT NULL GROUP BY 1, 2 ORDER BY 1, 2";
        let counts = sqlx::query_as(COUNTS).bind(self.erasure_id);
        let erased = counts.fetch_all(&mut *connection).await?;
        let ended_at =
            sqlx::query_scalar("SELECT clock_timestamp()").fetch_one(&mut *connection).await?;
        let mut not_covered = Vec::from(NOT_COVERED.map(str::to_owned));
        not_covered.extend(self.files_left(connection).await?);
        let digest = self.digest(connection).await?;
        let (message_id, key_hmac) = self.target.shown(&self.subject);
        Ok(ErasureProof {
            tenant: self.tenant.name.clone(),
            consumers: self.consumers.iter().map(|consumer| consumer.name.clone()).collect(),
            message_id,
            key_hmac,
            reason: row.reason,
            actor: row.actor,
            began_at: row.began_at,
            ended_at,
            erased,
            already_erased: row.already_erased,
            edits: row.edits,
            errors: row.errors,
            differences: row.differences,
            archive_files: row.archive_files,
            archived: row.archived,
            digest,
            readable: row.found,
            vacuumed: row.vacuumed,
            not_vacuumed: row.not_vacuumed,
            not_covered,
            audit_id: 0,
        })
    }

    async fn digest(&self, connection: &mut PgConnection) -> Result<String, InboxError> {
        const LINES: &str = "SELECT c.name || '/' || m.message_id AS line \
            FROM oncebox.erased_message m JOIN oncebox.consumer c USING (consumer_id) \
            WHERE m.erasure_id = $1 AND m.status IS NOT NULL \
            ORDER BY (c.name || '/' || m.message_id) COLLATE \"C\"";
        let mut digest = Sha256::new();
        let query = sqlx::query_scalar::<_, String>(LINES).bind(self.erasure_id);
        let mut lines = query.fetch(connection);
        while let Some(line) = lines.try_next().await? {
            digest.update(line);
            digest.update("\n");
        }
        Ok(hex::encode(digest.finalize()))
    }

    async fn record_end(
        &self,
        connection: &mut PgConnection,
        proof: &ErasureProof,
    ) -> Result<i64, InboxError> {
        let subject = subject(&self.tenant.name, self.consumer.as_deref());
        let audit = self.control.audit();
        audit.record_with_id(connection, "erase", subject, proof.details()).await
    }
}

impl ErasureProof {
    /// Returns the figures for the audit log.
    fn details(&self) -> Value {
        let erased = |count: &ErasedCount| {
            json!({
                "consumer": count.consumer, "status": count.status, "messages": count.messages,
            })
        };
        json!({
            "message_id": self.message_id,
            "key_hmac": self.key_hmac,
            "reason": self.reason,
            "began_by": self.actor,
            "began_at": self.began_at,
            "ended_at": self.ended_at,
            "consumers": self.consumers,
            "erased": self.erased.iter().map(erased).collect::<Vec<_>>(),
            "already_erased": self.already_erased,
            "edits": self.edits,
            "errors": self.errors,
            "differences": self.differences,
            "archive_files": self.archive_files,
            "archived": self.archived,
            "digest": self.digest,
            "readable": self.readable,
            "not_vacuumed": self.not_vacuumed,
        })
    }
}
