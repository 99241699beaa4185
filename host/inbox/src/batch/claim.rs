//! The claim: the database decides which messages of a batch are new.

use oncebox_model::{
    MessageStatus,
    error::InboxError,
    headers,
    hooks::{self, Defect},
    message::Message,
    policy::PayloadPolicy,
};
use sqlx::Row;

use crate::{
    host_call::{column, host_call},
    session::Transaction,
};

/// A message on its way into the inbox.
#[derive(Debug, Clone)]
pub struct ClaimRequest {
    /// The message; for one that could not be decoded, only its position and its raw bytes.
    pub message: Message,
    /// Version that will run it; none where none will.
    pub version: Option<i32>,
    /// Reason why it is parked; none where it is not.
    pub reason: Option<String>,
    /// Number that it shares with the messages that it must run in order with; see
    /// [`oncebox_model::ordering::ordering_hash`]. None where order does not matter.
    pub ordering: Option<i64>,
}

/// State that a claim gives to a new message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum InitialStatus {
    /// The message runs in this very transaction. The guard keeps the row from being committed
    /// before its completion.
    Completed,
    /// The message is stored, to run under a lease.
    Received,
    /// The message is kept for an operator.
    Parked,
}

impl InitialStatus {
    /// Returns the status of the new row.
    fn status(self) -> &'static str {
        match self {
            Self::Completed => MessageStatus::Completed.as_str(),
            Self::Received => MessageStatus::Received.as_str(),
            Self::Parked => MessageStatus::Parked.as_str(),
        }
    }
}

/// Answer to the claim of one message.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ClaimOutcome {
    /// New: its row belongs to this transaction.
    New,
    /// New, but behind another message of its key: it stays in the inbox.
    Waiting {
        /// True where another transaction holds the lock of its key. The holder may have looked
        /// already for the message to run next, so this one has to become due by itself.
        is_due: bool,
    },
    /// New, but versions of its aggregate before its own are missing: it stays in the inbox.
    Gap,
    /// New, but its aggregate is at its version or a later one: it is skipped.
    Superseded,
    /// Unknown, but at or below what the inbox has forgotten of its partition: it may have run, and
    /// is parked.
    Forgotten,
    /// Duplicate: the message has a row already, or comes earlier in this batch. So this delivery
    /// is settled.
    Duplicate {
        /// Status of its row.
        status: String,
        /// Whether both deliveries have an equal payload hash. True where its row is light.
        same_payload: bool,
        /// Result that its completion kept, as JSON.
        result: Option<String>,
    },
}

impl ClaimOutcome {
    /// Returns the name in metrics and logs: `new`, `waiting` for its turn, `gap`, `old`,
    /// `past_horizon`, `already_done` or `in_flight_elsewhere`. The last stands for a message that
    /// waits in the inbox for a retry worker.
    pub fn name(&self) -> &'static str {
        match self {
            Self::New => "new",
            Self::Waiting { .. } => "waiting",
            Self::Gap => "gap",
            Self::Superseded => "old",
            Self::Forgotten => "past_horizon",
            Self::Duplicate { status, .. } if is_open(status) => "in_flight_elsewhere",
            Self::Duplicate { .. } => "already_done",
        }
    }

    /// Returns whether the delivery is refused, since its message is done: completed, or in a state
    /// that an operator can see.
    pub fn is_duplicate(&self) -> bool {
        matches!(self, Self::Duplicate { status, .. } if !is_open(status))
    }

    /// Returns the status of a duplicate's row.
    pub(crate) fn known_status(&self) -> Option<&str> {
        match self {
            Self::Duplicate { status, .. } => Some(status),
            _ => None,
        }
    }

    /// Returns whether this delivery made the row.
    pub fn is_ours(&self) -> bool {
        !matches!(self, Self::Duplicate { .. })
    }
}

/// Returns whether a row of this status is still to be run.
pub fn is_open(status: &str) -> bool {
    status.parse().is_ok_and(MessageStatus::is_pending)
}

/// Consumer that claims, with its loaded generation.
#[derive(Debug, Clone, Copy)]
pub struct Claimant {
    /// Key of the consumer's row.
    pub consumer_id: i32,
    /// Generation of the deployments that chose the handlers; a stale one is refused.
    pub generation: i64,
    /// Policy for the rows that keep payloads.
    pub payload: PayloadPolicy,
    /// Bytes of the largest payload that a row keeps.
    pub payload_bytes_max: usize,
    /// Whether an unknown message that the inbox may have forgotten is parked.
    pub parks_forgotten: bool,
    /// Whether a message that completes leaves a light row.
    pub is_light: bool,
    /// Whether all records of the partition before the first message are settled.
    pub is_front: bool,
}

impl Claimant {
    /// Returns whether a row may keep the message's payload.
    fn fits(&self, message: &Message) -> bool {
        message.record.payload_bytes() <= self.payload_bytes_max
    }
}

/// Claims a batch of one partition and returns one answer per message, in order. With
/// [`InitialStatus::Completed`] it also inserts the guard row, even where `requests` is empty. It
/// always checks the secret and the generation.
///
/// Two sessions that claim one id meet in an advisory lock. The second waits, and then finds the
/// row of the first, or takes the message where the first rolled back. A wait beyond the lock
/// timeout is [`InboxError::InFlightElsewhere`].
pub async fn claim(
    transaction: &Transaction<'_>,
    claimant: Claimant,
    requests: &[&ClaimRequest],
    status: InitialStatus,
) -> Result<Vec<ClaimOutcome>, InboxError> {
    hooks::point("inbox:claim:before");
    let (topic, partition) = requests.first().map_or(("", 0), |first| {
        let record = &first.message.record;
        (&*record.topic, record.partition)
    });
    let position = requests.first().map(|first| first.message.record.offset);
    let position = position.filter(|_| claimant.is_front && transaction.notes_position());
    let keep = status != InitialStatus::Completed && claimant.payload != PayloadPolicy::None
        || status == InitialStatus::Received
        || claimant.payload == PayloadPolicy::All;
    let keeps = |request: &ClaimRequest| keep && claimant.fits(&request.message);
    let is_ordered = requests.iter().any(|o| o.ordering.is_some());
    let query = host_call!("claim" {
        p_secret: transaction.secret(),
        p_consumer: claimant.consumer_id,
        p_generation: claimant.generation,
        p_status: status.status(),
        p_topic: topic,
        p_partition: partition,
        p_id: column(requests, |o| o.message.id.as_str()),
        p_reason: column(requests, |o| o.reason.as_deref()),
        p_version: column(requests, |o| o.version),
        p_offset: column(requests, |o| o.message.record.offset),
        p_timestamp_ms: column(requests, |o| o.message.record.timestamp_ms),
        p_key: column(requests, |o| o.message.record.key.as_deref()),
        p_ordering_key: column(requests, |o| o.message.ordering_key.as_deref()),
        p_source: column(requests, |o| o.message.source.as_str()),
        p_event_type: column(requests, |o| o.message.event_type.as_str()),
        p_event_version: column(requests, |o| o.message.event_version.as_deref()),
        p_content_type: column(requests, |o| o.message.content_type.as_deref()),
        p_trace_parent: column(requests, |o| o.message.trace_parent.as_deref()),
        p_hash: column(requests, |o| o.message.payload_hash.as_ref().map(|hash| hash.as_slice())),
        p_headers:
            column(requests, |o| keeps(o).then(|| headers::encode(&o.message.record.headers))),
        p_payload: column(requests, |o| o.message.record.payload.as_deref().filter(|_| keeps(o))),
        p_ordering: is_ordered.then(|| column(requests, |o| o.ordering)),
        p_sequence: column(requests, |o| o.message.sequence.filter(|_| o.ordering.is_some())),
        p_parks_forgotten: claimant.parks_forgotten,
        p_light: claimant.is_light,
        p_position: position,
    });
    let rows = transaction.rows(query).await?;
    let outcomes = rows.iter().map(read).collect::<Result<Vec<_>, _>>()?;
    let mut lost = Vec::new();
    for ((row, outcome), request) in rows.iter().zip(&outcomes).zip(requests) {
        let is_same = matches!(outcome, ClaimOutcome::Duplicate { same_payload: true, .. });
        if is_same && claimant.fits(&request.message) && row.try_get("lost_record")? {
            lost.push(&request.message);
        }
    }
    if !lost.is_empty() && !hooks::sabotage(Defect::LostRecordStays) {
        restore(transaction, claimant.consumer_id, &lost).await?;
    }
    hooks::point("inbox:claim:after");
    Ok(outcomes)
}

/// Restores the records of dead letters that lost them, from their redelivery. It runs in the
/// transaction of the claim, which holds the messages' locks. So of two redeliveries that come at
/// once the second finds nothing to do.
async fn restore(
    transaction: &Transaction<'_>,
    consumer_id: i32,
    messages: &[&Message],
) -> Result<(), InboxError> {
    let query = host_call!("restore_records" {
        p_secret: transaction.secret(),
        p_consumer: consumer_id,
        p_id: column(messages, |m| m.id.as_str()),
        p_hash: column(messages, |m| m.payload_hash.as_ref().map(|hash| hash.as_slice())),
        p_headers: column(messages, |m| headers::encode(&m.record.headers)),
        p_payload: column(messages, |m| m.record.payload.as_deref()),
    });
    let records: i32 = transaction.row(query).await?.try_get(0)?;
    tracing::debug!(consumer_id, records, "records of dead letters restored");
    Ok(())
}

/// Reads the claim's answer for one message. A message that another session inserted despite the
/// lock is [`InboxError::InFlightElsewhere`].
fn read(row: &sqlx::postgres::PgRow) -> Result<ClaimOutcome, InboxError> {
    match row.try_get::<&str, _>("outcome")? {
        "new" => Ok(ClaimOutcome::New),
        "waiting" => Ok(ClaimOutcome::Waiting {
            is_due: row.try_get::<&str, _>("known_status")? == MessageStatus::Received.as_str(),
        }),
        "forgotten"
            if row.try_get::<&str, _>("known_status")? == MessageStatus::Skipped.as_str() =>
        {
            Ok(ClaimOutcome::Superseded)
        }
        "forgotten" => Ok(ClaimOutcome::Forgotten),
        "known" => Ok(ClaimOutcome::Duplicate {
            status: row.try_get("known_status")?,
            same_payload: row.try_get("same_payload")?,
            result: row.try_get("known_result")?,
        }),
        _ => Err(InboxError::InFlightElsewhere),
    }
}
