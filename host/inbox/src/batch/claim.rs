//! The claim: which messages of a batch are new, decided by the database.

use oncebox_model::{
    error::InboxError, headers, hooks, message::Message, policy::PayloadPolicy, tx::bounded,
};
use sqlx::Row;

use crate::{
    host_call::{column, host_call},
    session::Transaction,
};

/// A message on its way into the inbox.
#[derive(Debug, Clone)]
pub struct Offered {
    /// The message; for one that could not be decoded, what is known of it.
    pub message: Message,
    /// The version that will run it.
    pub version: Option<i32>,
    /// Why it is parked, where it is.
    pub reason: Option<String>,
    /// What it is in order with, where it is with something; see [`crate::ordering::key_lock`].
    pub ordering: Option<i64>,
}

/// What a claim makes of a message that nobody has seen before.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum As {
    /// It is run in this very transaction; the guard keeps it from being committed before
    /// its completion.
    Completed,
    /// It is stored, to be run under a lease.
    Received,
    /// It is kept for a person.
    Parked,
}

impl As {
    fn status(self) -> &'static str {
        match self {
            Self::Completed => "completed",
            Self::Received => "received",
            Self::Parked => "parked",
        }
    }
}

/// The answer to the claim of one message.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Claimed {
    /// Nobody had it; it is ours.
    New,
    /// Nobody had it, and it is not its turn: it stays in the inbox.
    Waiting {
        /// Its key is being worked on. Whoever does may have looked already for what comes next, so
        /// that the message has to be due by itself.
        is_due: bool,
    },
    /// Nobody had it, and versions of its aggregate are missing before it: it stays in the inbox.
    Gap,
    /// Nobody had it, and its aggregate is past its version: it is skipped.
    Old,
    /// It is in the inbox already, so its delivery is settled.
    Known {
        /// The state of its row.
        status: String,
        /// Whether the payload is the same.
        same_payload: bool,
        /// What its completion kept.
        result: Option<String>,
    },
}

impl Claimed {
    /// Name in metrics and logs: `new`, `waiting` for its turn, `gap`, `old`, `already_done` or
    /// `in_flight_elsewhere`, where the last stands for a message that waits in the inbox for one
    /// of its workers.
    pub fn name(&self) -> &'static str {
        match self {
            Self::New => "new",
            Self::Waiting { .. } => "waiting",
            Self::Gap => "gap",
            Self::Old => "old",
            Self::Known { status, .. } if is_open(status) => "in_flight_elsewhere",
            Self::Known { .. } => "already_done",
        }
    }

    /// Whether the delivery is refused, since its message is done: completed, or in a state that
    /// somebody can see.
    pub fn is_duplicate(&self) -> bool {
        matches!(self, Self::Known { status, .. } if !is_open(status))
    }

    /// Whether this delivery made the row.
    pub fn is_ours(&self) -> bool {
        !matches!(self, Self::Known { .. })
    }
}

/// Whether a row of this status is still to be run.
pub fn is_open(status: &str) -> bool {
    matches!(status, "received" | "in_progress" | "failed_retryable" | "waiting")
}

/// Which consumer claims, with what it has loaded.
#[derive(Debug, Clone, Copy)]
pub struct Claimant {
    /// The consumer.
    pub consumer_id: i32,
    /// Generation of deployments.
    pub generation: i64,
    /// Which rows keep payloads.
    pub payload: PayloadPolicy,
}

/// Claim a batch of one partition. One answer for each message, in order. A claim of nothing sets
/// the guard all the same, and checks who asks.
pub async fn claim(
    transaction: &Transaction<'_>,
    claimant: Claimant,
    offered: &[&Offered],
    r#as: As,
) -> Result<Vec<Claimed>, InboxError> {
    hooks::point("inbox:claim:before");
    let (topic, partition) = offered.first().map_or(("", 0), |first| {
        let record = &first.message.record;
        (&*record.topic, record.partition)
    });
    let keep = r#as != As::Completed && claimant.payload != PayloadPolicy::None
        || r#as == As::Received
        || claimant.payload == PayloadPolicy::All;
    let is_ordered = offered.iter().any(|o| o.ordering.is_some());
    let query = host_call!("claim" {
        p_secret: transaction.secret(),
        p_consumer: claimant.consumer_id,
        p_generation: claimant.generation,
        p_status: r#as.status(),
        p_topic: topic,
        p_partition: partition,
        p_id: column(offered, |o| o.message.id.as_str()),
        p_reason: column(offered, |o| o.reason.as_deref()),
        p_version: column(offered, |o| o.version),
        p_offset: column(offered, |o| o.message.record.offset),
        p_timestamp_ms: column(offered, |o| o.message.record.timestamp_ms),
        p_key: column(offered, |o| o.message.record.key.as_deref()),
        p_ordering_key: column(offered, |o| o.message.ordering_key.as_deref()),
        p_source: column(offered, |o| o.message.source.as_str()),
        p_event_type: column(offered, |o| o.message.event_type.as_str()),
        p_event_version: column(offered, |o| o.message.event_version.as_deref()),
        p_content_type: column(offered, |o| o.message.content_type.as_deref()),
        p_trace_parent: column(offered, |o| o.message.trace_parent.as_deref()),
        p_hash: column(offered, |o| o.message.payload_hash.as_ref().map(|hash| hash.as_slice())),
        p_headers: column(offered, |o| keep.then(|| headers::encode(&o.message.record.headers))),
        p_payload: column(offered, |o| o.message.record.payload.as_deref().filter(|_| keep)),
        p_ordering: is_ordered.then(|| column(offered, |o| o.ordering)),
        p_sequence: column(offered, |o| o.message.sequence.filter(|_| o.ordering.is_some())),
    });
    let mut statement = transaction.tx().statement().await;
    let rows = bounded(query.fetch_all(statement.connection())).await;
    statement.finish(rows.as_ref().err());
    let rows = rows?;
    let claimed = rows.iter().map(read).collect::<Result<Vec<_>, _>>()?;
    let mut lost = Vec::new();
    for ((row, claimed), offered) in rows.iter().zip(&claimed).zip(offered) {
        let is_same = matches!(claimed, Claimed::Known { same_payload: true, .. });
        if is_same && row.try_get("lost_record")? && !hooks::sabotage("lost_record_stays") {
            lost.push(&offered.message);
        }
    }
    if !lost.is_empty() {
        restore(transaction, claimant.consumer_id, &lost).await?;
    }
    hooks::point("inbox:claim:after");
    Ok(claimed)
}

/// Bring back the records of dead letters that lost them, from their redelivery: in the transaction
/// of its claim, which holds the messages' locks, so that of two that come at once the second finds
/// nothing to do.
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
    let mut statement = transaction.tx().statement().await;
    let restored = bounded(query.fetch_one(statement.connection())).await;
    statement.finish(restored.as_ref().err());
    let records: i32 = restored?.try_get(0)?;
    tracing::debug!(consumer_id, records, "records of dead letters restored");
    Ok(())
}

fn read(row: &sqlx::postgres::PgRow) -> Result<Claimed, InboxError> {
    match row.try_get::<&str, _>("outcome")? {
        "new" => Ok(Claimed::New),
        "waiting" => {
            Ok(Claimed::Waiting { is_due: row.try_get::<&str, _>("known_status")? == "received" })
        }
        "known" => Ok(Claimed::Known {
            status: row.try_get("known_status")?,
            same_payload: row.try_get("same_payload")?,
            result: row.try_get("known_result")?,
        }),
        _ => Err(InboxError::InFlightElsewhere),
    }
}
