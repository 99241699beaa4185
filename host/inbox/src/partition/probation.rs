//! Probation: a restarted process learns that its predecessor died on a message.
//!
//! The host writes a row per held partition when it takes the partition. It deletes the row at the
//! first progress or at a clean hand-over.

use oncebox_model::error::InboxError;
use sqlx::Row;

use crate::{admission::Admission, batch::commit::commit_host, consumer::ConsumerInbox};

impl ConsumerInbox {
    /// Takes a partition at an offset and writes its probation row. Returns true where an earlier
    /// process did so at this offset and made no progress.
    pub(crate) async fn take_partition(
        &self,
        topic: &str,
        partition: i32,
        next_offset: i64,
    ) -> Result<bool, InboxError> {
        const TAKE: &str = "SELECT * FROM oncebox_host.take_partition($1, $2, $3, $4, $5)";
        let admission = self.admit_first().await;
        let transaction = self.sessions.begin_admitted(&admission).await?;
        let query = sqlx::query(TAKE)
            .bind(transaction.secret())
            .bind(self.consumer_id)
            .bind(topic)
            .bind(partition)
            .bind(next_offset);
        let suspect = transaction.row(query).await.and_then(|row| row.try_get(0));
        commit_host(transaction, suspect).await
    }

    /// Deletes the probation row of a partition that made progress or is given up cleanly.
    pub(crate) async fn partition_cleared(
        &self,
        admission: &Admission,
        topic: &str,
        partition: i32,
    ) -> Result<(), InboxError> {
        const CLEARED: &str = "SELECT * FROM oncebox_host.partition_cleared($1, $2, $3, $4)";
        let transaction = self.sessions.begin_admitted(admission).await?;
        let query = sqlx::query(CLEARED)
            .bind(transaction.secret())
            .bind(self.consumer_id)
            .bind(topic)
            .bind(partition);
        let cleared = transaction.rows(query).await;
        commit_host(transaction, cleared).await.map(drop)
    }
}
