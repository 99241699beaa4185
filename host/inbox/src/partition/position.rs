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
    message::{Message, undecodable_id},
    policy::Dedup,
};
use sqlx::Row;
use tokio::time::Instant;

use crate::{
    admission::PartitionTurn,
    batch::{claim::ClaimOutcome, statements::commit_host},
    consumer::ConsumerInbox,
    host_call::host_call,
};

/// Interval at which the claims of a partition note its position. After lost commits, the records
/// of at most that time are read again.
pub(super) const NOTE_INTERVAL: Duration = Duration::from_secs(5);
/// Most duplicates in a row, without a new message, before the next claim notes the position.
const DUPLICATES_MAX: usize = 512;

/// Position of a partition that is held.
#[derive(Debug)]
pub(super) struct Position {
    /// Place of the partition, with the offset and the server run at which it was opened.
    opened: OpenAt,
    /// Number by which the database knows this opening.
    opening: i64,
    /// Run of the server that has all commits of the partition. None where nothing is deduplicated,
    /// so that no record may be read again.
    pub(super) server: ServerRun,
    /// Rows that show that all records since the last note are settled. The row that was inserted
    /// last, like the note, is younger than every row seen before it.
    shown_by: ShownBy,
    /// Offset of the first record that is not settled.
    next_offset: i64,
    noted_at: Instant,
    /// Offset that the database noted last.
    noted: i64,
}

/// Rows by which a partition's records since the last note are settled.
#[derive(Debug, Default)]
struct ShownBy {
    /// The row that the partition inserted last: its offset, and the ids that it may have.
    inserted: Option<(i64, [String; 2])>,
    /// Ids of the duplicates since then.
    duplicates: Vec<String>,
}

/// Answer of the database about a partition.
struct Found {
    /// Offset before which it knows all records as settled; none where it knows nothing.
    next_offset: Option<i64>,
    /// Number of the partition's last opening.
    opening: Option<i64>,
    /// Whether it has the rows of all messages that it was asked for.
    has_rows: bool,
    /// Run of the server that answered.
    server: ServerRun,
}

impl Position {
    pub(super) fn new(opened: OpenAt, opening: i64, server: ServerRun) -> Self {
        let next_offset = opened.next_offset;
        let noted_at = Instant::now();
        Self {
            opened,
            opening,
            server,
            shown_by: ShownBy::default(),
            next_offset,
            noted_at,
            noted: next_offset,
        }
    }

    /// Returns the rules for the transactions of the next turn; none where nothing is deduplicated.
    pub(super) fn turn(&self) -> Option<PartitionTurn> {
        let server = self.server.clone();
        let notes_position = self.noted_at.elapsed() >= NOTE_INTERVAL
            || self.shown_by.duplicates.len() > DUPLICATES_MAX;
        server.is_some().then_some(PartitionTurn { server, notes_position })
    }

    /// Records the answers to claims of a transaction that has committed.
    pub(super) fn claimed<'a>(
        &mut self,
        turn: Option<&PartitionTurn>,
        claimed: impl Iterator<Item = (&'a Message, &'a ClaimOutcome)> + Clone,
    ) {
        let (Some(turn), Some((first, _))) = (turn, claimed.clone().next()) else { return };
        // A note of the offset that is noted already changes nothing that could be looked for.
        let is_noted = turn.notes_position && first.record.offset > self.noted;
        if turn.notes_position {
            self.noted_at = Instant::now();
        }
        if is_noted {
            self.noted_as(first.record.offset);
        }
        match claimed.clone().filter(|(_, outcome)| outcome.is_ours()).last() {
            Some((Message { id, record, .. }, _)) => {
                let inserted = Some((record.offset, [id.clone(), undecodable_id(record)]));
                self.shown_by = ShownBy { inserted, duplicates: Vec::new() };
            }
            None if is_noted => {}
            None => {
                self.shown_by.duplicates.extend(claimed.map(|(message, _)| message.id.clone()));
            }
        }
    }

    /// Records that the database has noted an offset.
    pub(super) fn noted_as(&mut self, offset: i64) {
        self.noted = offset;
        self.shown_by = ShownBy::default();
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
        // Without this opening, the position may be from before a step back.
        let is_opened = found.opening == Some(position.opening);
        let is_noted = found.next_offset.is_some_and(|offset| offset >= position.noted);
        Ok((is_opened && is_noted && found.has_rows, found.server))
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
        if at.server.is_none() || at.server == *self.sessions.server().borrow() {
            return Ok(None);
        }
        let found = self.position(at, &ShownBy::default()).await?;
        let next_offset = found.next_offset.unwrap_or(0);
        let is_behind = self.doubts(at, &found.server) && next_offset < at.next_offset;
        Ok(is_behind.then_some(Behind { next_offset, server: found.server }))
    }

    /// Reads the position of a partition, and whether rows are there.
    async fn position(&self, at: &OpenAt, shown_by: &ShownBy) -> Result<Found, InboxError> {
        let admission = self.admit_first().await;
        let transaction = self.sessions.begin_admitted(&admission).await?;
        let server = transaction.server().clone();
        let query = host_call!("position_of" {
            p_secret: transaction.secret(),
            p_consumer: self.consumer_id,
            p_topic: &*at.topic,
            p_topic_id: at.topic_id.as_deref(),
            p_partition: at.partition,
            p_inserted_offset: shown_by.inserted.as_ref().map(|(offset, _)| *offset),
            p_inserted_id: shown_by.inserted.as_ref().map(|(_, ids)| &ids[..]),
            p_id: &shown_by.duplicates,
        });
        let found = transaction.row(query).await.and_then(|row| {
            Ok(Found {
                next_offset: row.try_get("next_offset")?,
                opening: row.try_get("opening")?,
                has_rows: row.try_get("has_rows")?,
                server,
            })
        });
        commit_host(transaction, found).await
    }
}
