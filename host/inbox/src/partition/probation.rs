//! Probation: a restarted process learns that its predecessor died on a message.
//!
//! The host writes a row per held partition when it takes the partition. It deletes the row at the
//! first progress or at a clean hand-over.

use std::sync::Arc;

use oncebox_model::{
    error::InboxError,
    inbox::{Behind, OpenAt, ServerRun},
    policy::Dedup,
};
use sqlx::Row;

use super::{
    PartitionInbox, clock::DatabaseClock, duplicate_payloads::DuplicatePayloads,
    payloads::FetchedPayloads, position::Position,
};
use crate::{
    admission::Admission, batch::statements::commit_host, consumer::ConsumerInbox,
    host_call::host_call,
};

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
        let topic = topic.into();
        let at = OpenAt { topic, topic_id: None, partition, next_offset, server: None };
        // Only an offset that names a server can be ahead of it.
        Self::open_at(consumer, at).await?.map_err(|_| InboxError::ServerStarted)
    }

    /// Opens a partition. Returns how far the database is behind where it may have lost what was
    /// settled before the offset; it opens nothing then.
    pub(super) async fn open_at(
        consumer: Arc<ConsumerInbox>,
        at: OpenAt,
    ) -> Result<Result<Self, Behind>, InboxError> {
        let opening = rand::random();
        let (taken, server) = consumer.take_partition(&at, opening).await?;
        let suspect = match taken {
            Ok(suspect) => suspect,
            Err(next_offset) => return Ok(Err(Behind { next_offset, server })),
        };
        let OpenAt { topic, partition, next_offset, .. } = &at;
        if suspect {
            tracing::warn!(
                tenant = consumer.tenant,
                consumer = consumer.name,
                topic = &**topic,
                partition,
                next_offset,
                "an earlier process died at this offset; the next messages run alone, under a lease"
            );
        }
        let probation = if suspect { on_probation(&consumer) } else { 0 };
        let duplicate_payloads = DuplicatePayloads::default();
        let server = server.filter(|_| consumer.policy.dedup != Dedup::Off);
        Ok(Ok(Self {
            consumer,
            topic: topic.to_string(),
            partition: *partition,
            position: Position::new(at, opening, server),
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
        }))
    }

    /// Gives the partition up cleanly: deletes its probation row, and notes its position.
    pub async fn close(mut self) {
        self.fetched.clear();
        let unnoted = self.position.unnoted();
        if self.is_cleared && unnoted.is_none() {
            return;
        }
        self.permit = None;
        let mut admission = self.consumer.admit_first().await;
        admission.hold_to(self.position.turn());
        let Self { consumer, topic, partition, .. } = &self;
        if let Err(error) = consumer.partition_cleared(&admission, topic, *partition, unnoted).await
        {
            tracing::debug!(%error, "failed to clear the probation row; the next process will be \
                careful");
        }
    }
}

impl ConsumerInbox {
    /// Takes a partition at an offset and writes its probation row. Returns true where an earlier
    /// process did so at this offset and made no progress, and as an error the position of a
    /// database that may have lost what was settled before the offset. Also returns the run of the
    /// server that answered.
    async fn take_partition(
        &self,
        at: &OpenAt,
        opening: i64,
    ) -> Result<(Result<bool, i64>, ServerRun), InboxError> {
        let admission = self.admit_first().await;
        let transaction = self.sessions.begin_admitted(&admission).await?;
        let server = transaction.server().clone();
        let query = host_call!("take_partition" {
            p_secret: transaction.secret(),
            p_consumer: self.consumer_id,
            p_topic: &*at.topic,
            p_topic_id: at.topic_id.as_deref(),
            p_partition: at.partition,
            p_next_offset: at.next_offset,
            p_opening: opening,
            p_is_doubted: self.doubts(at, &server),
        });
        let taken = transaction.row(query).await.and_then(|row| {
            let behind: Option<i64> = row.try_get("behind_at")?;
            Ok(behind.map_or(Ok(row.try_get("is_suspect")?), Err))
        });
        Ok((commit_host(transaction, taken).await?, server))
    }

    /// Deletes the probation row of a partition that made progress or is given up cleanly. Notes the
    /// position, where there is one to note.
    pub(crate) async fn partition_cleared(
        &self,
        admission: &Admission,
        topic: &str,
        partition: i32,
        next_offset: Option<i64>,
    ) -> Result<(), InboxError> {
        let transaction = self.sessions.begin_admitted(admission).await?;
        let query = host_call!("partition_cleared" {
            p_secret: transaction.secret(),
            p_consumer: self.consumer_id,
            p_topic: topic,
            p_partition: partition,
            p_next_offset: next_offset,
        });
        let cleared = transaction.rows(query).await;
        commit_host(transaction, cleared).await.map(drop)
    }
}

/// Returns how many messages run under a lease while a partition is on probation.
fn on_probation(consumer: &ConsumerInbox) -> usize {
    PROBATION_MESSAGES.max(consumer.policy.batch.messages_max)
}
