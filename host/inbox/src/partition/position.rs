//! The position of a partition in the database, and the check that the database still has what it
//! confirmed.
//!
//! Kafka's offset says what was acked, and PostgreSQL can lose commits behind it: at a failover to
//! an asynchronous standby, with a restored backup, or in a crash with `synchronous_commit = off`.
//! So the database keeps a position of its own for each partition: an offset before which all
//! records were settled. Claims note it in their transactions, a few seconds apart. PostgreSQL
//! loses commits only from the end, so a database that has the note has all commits before it.
//!
//! Each loss comes with a start of a server. A host notes the server's run beside each offset that
//! it acks, and opens a partition at the database's position where another run answers. While it
//! holds a partition, its transactions run in one run of the server. In the next run it first looks
//! for what showed it last that its records are settled: the row that it inserted last, the rows
//! that made later records duplicates, the position that it noted. Where one is missing, the
//! partition's records are read again from the database's position; the inbox refuses those that it
//! knows.

use std::time::Duration;

use oncebox_model::{
    error::InboxError,
    hooks::{self, Defect},
    inbox::{Behind, OpenAt, ServerRun},
    message::Message,
    policy::Dedup,
};
use sqlx::Row;
use tokio::time::Instant;

use crate::{
    admission::PartitionTurn,
    batch::{claim::ClaimOutcome, commit::commit_host},
    consumer::ConsumerInbox,
    host_call::host_call,
};

/// Interval at which the claims of a partition note its position. After lost commits, the records
/// of at most that time are read again.
const NOTE_INTERVAL: Duration = Duration::from_secs(5);
/// Most duplicates in a row, without a new message, before the next claim notes the position.
const DUPLICATES_MAX: usize = 512;

/// Position of a partition that is held.
#[derive(Debug)]
pub(super) struct Position {
    /// Place of the partition, with the offset and the server run at which it was opened.
    opened: OpenAt,
    /// Run of the server that has all commits of the partition. None where nothing is deduplicated,
    /// so that no record may be read again.
    pub(super) server: ServerRun,
    /// Ids of messages whose rows show that all records since the last note are settled: the row
    /// that was inserted last, or the note, is as old as every row seen before it.
    shown_by: Vec<String>,
    /// Offset of the first record that is not settled.
    next_offset: i64,
    noted_at: Instant,
    /// Offset that the database noted last.
    noted: i64,
}

/// Answer of the database about a partition.
struct Found {
    /// Offset before which it knows all records as settled; none where it knows nothing.
    next_offset: Option<i64>,
    /// Whether it has the rows of all messages that it was asked for.
    has_rows: bool,
    /// Run of the server that answered.
    server: ServerRun,
}

impl Position {
    pub(super) fn new(opened: OpenAt, server: ServerRun) -> Self {
        let next_offset = opened.next_offset;
        let noted_at = Instant::now();
        Self { opened, server, shown_by: Vec::new(), next_offset, noted_at, noted: next_offset }
    }

    /// Returns the rules for the transactions of the next turn; none where nothing is deduplicated.
    pub(super) fn turn(&self) -> Option<PartitionTurn> {
        let server = self.server.clone();
        let notes_position =
            self.noted_at.elapsed() >= NOTE_INTERVAL || self.shown_by.len() > DUPLICATES_MAX;
        server.is_some().then_some(PartitionTurn { server, notes_position })
    }

    /// Records the answers to claims of a transaction that has committed.
    pub(super) fn claimed<'a>(
        &mut self,
        turn: Option<&PartitionTurn>,
        claimed: impl Iterator<Item = (&'a Message, &'a ClaimOutcome)> + Clone,
    ) {
        let Some(turn) = turn else { return };
        if turn.notes_position
            && let Some((first, _)) = claimed.clone().next()
        {
            self.noted_at = Instant::now();
            self.noted = first.record.offset;
            self.shown_by.clear();
        }
        match claimed.clone().filter(|(_, outcome)| outcome.is_ours()).last() {
            Some((message, _)) => self.shown_by = vec![message.id.clone()],
            None if turn.notes_position => {}
            None => self.shown_by.extend(claimed.map(|(message, _)| message.id.clone())),
        }
    }

    /// Records that all records before an offset are settled.
    pub(super) fn settled(&mut self, next_offset: i64) {
        self.next_offset = next_offset;
    }

    /// Returns the offset that is to be noted when the partition is given up; none where the
    /// database has noted it.
    pub(super) fn unnoted(&self) -> Option<i64> {
        (self.server.is_some() && self.next_offset != self.noted).then_some(self.next_offset)
    }
}

impl ConsumerInbox {
    /// Returns the run of the server that answers, and whether it has all commits of a partition.
    pub(super) async fn has_commits(
        &self,
        position: &Position,
    ) -> Result<(bool, ServerRun), InboxError> {
        let found = self.position(&position.opened, &position.shown_by).await?;
        let is_behind = found.next_offset.is_none_or(|next_offset| next_offset < position.noted);
        Ok((found.has_rows && !is_behind, found.server))
    }

    /// Returns whether a server other than that of the offset may have lost what was settled before
    /// it.
    pub(super) fn doubts(&self, at: &OpenAt, server: &ServerRun) -> bool {
        at.server.is_some()
            && at.server != *server
            && self.policy.dedup != Dedup::Off
            && !hooks::sabotage(Defect::ServerUnchecked)
    }

    /// Returns how far the database is behind an offset that was acked in another run of its
    /// server; none where it is not.
    ///
    /// # Errors
    ///
    /// Returns an error where the database does not answer.
    pub(crate) async fn behind(&self, at: &OpenAt) -> Result<Option<Behind>, InboxError> {
        let found = self.position(at, &[]).await?;
        let next_offset = found.next_offset.unwrap_or(0);
        let is_behind = self.doubts(at, &found.server) && next_offset < at.next_offset;
        Ok(is_behind.then_some(Behind { next_offset, server: found.server }))
    }

    /// Reads the position of a partition, and whether messages have rows.
    async fn position(&self, at: &OpenAt, ids: &[String]) -> Result<Found, InboxError> {
        let admission = self.admit_first().await;
        let transaction = self.sessions.begin_admitted(&admission).await?;
        let server = transaction.server().clone();
        let query = host_call!("position_of" {
            p_secret: transaction.secret(),
            p_consumer: self.consumer_id,
            p_topic: &*at.topic,
            p_topic_id: at.topic_id.as_deref(),
            p_partition: at.partition,
            p_id: ids,
        });
        let found = transaction.row(query).await.and_then(|row| {
            Ok(Found {
                next_offset: row.try_get("next_offset")?,
                has_rows: row.try_get("has_rows")?,
                server,
            })
        });
        commit_host(transaction, found).await
    }
}
