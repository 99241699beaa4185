//! Probation: a restarted process learns that its predecessor died on a message.
//!
//! The host writes a row per held partition when it takes the partition. It deletes the row at the
//! first progress or at a clean hand-over.

use std::sync::Arc;

use oncebox_model::error::InboxError;
use sqlx::Row;

use super::{
    PartitionInbox, clock::DatabaseClock, duplicate_payloads::DuplicatePayloads,
    payloads::FetchedPayloads,
};
use crate::{admission::Admission, batch::commit::commit_host, consumer::ConsumerInbox};

/// Messages that run under a lease after a sign that one of them kills the process. A whole batch
/// where that is more.
const PROBATION_MESSAGES: usize = 64;

impl PartitionInbox {
    /// Opens a partition that was assigned, at the offset where consumption starts.
    ///
    /// # Errors
    ///
    /// Returns an error where the probation row cannot be written.
    pub async fn open(
        consumer: Arc<ConsumerInbox>,
        topic: &str,
        partition: i32,
        next_offset: i64,
    ) -> Result<Self, InboxError> {
        let suspect = consumer.take_partition(topic, partition, next_offset).await?;
        if suspect {
            tracing::warn!(
                tenant = consumer.tenant,
                consumer = consumer.name,
                topic,
                partition,
                next_offset,
                "an earlier process died at this offset; the next messages run alone, under a lease"
            );
        }
        let probation = if suspect { on_probation(&consumer) } else { 0 };
        let duplicate_payloads = DuplicatePayloads::default();
        Ok(Self {
            consumer,
            topic: topic.to_owned(),
            partition,
            probation,
            suspected: 0,
            outages: 0,
            single_runs_left: 0,
            made_progress: false,
            is_cleared: false,
            fetched: FetchedPayloads::default(),
            duplicate_payloads,
            clock: DatabaseClock::default(),
            permit: None,
        })
    }

    /// Gives the partition up cleanly: deletes its probation row.
    pub async fn close(mut self) {
        self.fetched.clear();
        if self.is_cleared {
            return;
        }
        self.permit = None;
        let admission = self.consumer.admit_first().await;
        if let Err(error) = self.progressed(&admission).await {
            tracing::debug!(%error, "failed to clear the probation row; the next process will be \
                careful");
        }
    }
}

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

/// Returns how many messages run under a lease while a partition is on probation.
fn on_probation(consumer: &ConsumerInbox) -> usize {
    PROBATION_MESSAGES.max(consumer.policy.batch.messages_max)
}
