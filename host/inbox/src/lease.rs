//! Leases: the attempt is counted and committed before it runs, so that a message that kills the
//! process is counted too.

use std::time::Duration;

use sqlx::{Row, postgres::PgRow};

use crate::{
    consumer::ConsumerInbox,
    error::InboxError,
    headers, hooks,
    message::{Message, Record},
    process::commit_host,
    scheduler::Admission,
    session::Transaction,
    tx::bounded,
};

/// A message that is ours until its lease runs out.
#[derive(Debug, Clone)]
pub(crate) struct Leased {
    pub(crate) message: Message,
    /// Which run this is, from 1.
    pub(crate) attempt: u32,
    pub(crate) epoch: i64,
    /// The version that ran it last.
    pub(crate) version: Option<i32>,
    /// Since it was received, or last redriven.
    pub(crate) age: Duration,
    /// Why its payload does not decode, where it does not.
    pub(crate) fault: Option<String>,
}

/// Messages under one lease: when the process dies, an attempt is counted of the message that ran, and of
/// no other.
const LEASE_MESSAGES: i32 = 1;
/// Attempts that ended without an answer, before a message is parked as `crashed`.
const CRASHES_MAX: i32 = 3;

impl ConsumerInbox {
    /// Lease one message that is due.
    pub(crate) async fn lease(&self, admission: &Admission) -> Result<Option<Leased>, InboxError> {
        const LEASE: &str = "SELECT * FROM oncebox_host.lease_with_age($1, $2, $3, $4, $5, $6)";
        hooks::point("retry:lease:before");
        let transaction = self.sessions.begin_admitted(admission).await?;
        let query = sqlx::query(LEASE)
            .bind(transaction.secret())
            .bind(self.consumer_id)
            .bind(&self.owner)
            .bind(LEASE_MESSAGES)
            .bind(self.policy.retry.lease_ms as i64)
            .bind(CRASHES_MAX);
        let mut statement = transaction.tx().statement().await;
        let rows = bounded(query.fetch_all(statement.connection())).await;
        statement.finish(rows.as_ref().err());
        let rows = commit_host(transaction, rows).await?;
        let Some(row) = rows.first() else { return Ok(None) };
        hooks::point("retry:lease:after");
        let leased = read(row)?;
        if row.try_get("is_taken_over")? {
            let Leased { message, attempt, epoch, .. } = &leased;
            tracing::warn!(
                tenant = self.tenant,
                consumer = self.name,
                message_id = message.id,
                attempt,
                epoch,
                "lease taken over: its run ended without an answer"
            );
        }
        Ok(Some(leased))
    }

    /// Decode the payload of a leased message, where it begins as those of a schema registry do: the data of a CloudEvent, or
    /// what a person gave it, may be JSON already. False: its schema is not at hand.
    pub(crate) fn decode_leased(&self, leased: &mut Leased) -> bool {
        let message = &mut leased.message;
        let payload = message.record.payload.as_deref().filter(|payload| payload.first() == Some(&0));
        let Some((decoder, payload)) = self.decoder.get().zip(payload) else { return true };
        match decoder.decode(payload) {
            Ok(decoded) => message.decoded = Some(decoded.json.into()),
            Err(fault) if fault.is_not_prepared() => return false,
            Err(fault) => leased.fault = Some(fault.to_string()),
        }
        true
    }

    /// Lock a leased message's row for the working transaction. False: the lease is lost.
    pub(crate) async fn resume(&self, transaction: &Transaction<'_>, generation: i64, leased: &Leased) -> Result<bool, InboxError> {
        const RESUME: &str = "SELECT * FROM oncebox_host.resume($1, $2, $3, $4, $5)";
        let query = sqlx::query_scalar(RESUME)
            .bind(transaction.secret())
            .bind(self.consumer_id)
            .bind(generation)
            .bind(&leased.message.id)
            .bind(leased.epoch);
        let mut statement = transaction.tx().statement().await;
        let ours = bounded(query.fetch_one(statement.connection())).await;
        statement.finish(ours.as_ref().err());
        Ok(ours?)
    }

    /// Give a lease back unused; the attempt did not happen.
    pub(crate) async fn release(&self, admission: &Admission, leased: &Leased, delay: Duration) -> Result<bool, InboxError> {
        const RELEASE: &str = "SELECT * FROM oncebox_host.release($1, $2, $3, $4, $5)";
        let transaction = self.sessions.begin_admitted(admission).await?;
        let query = sqlx::query_scalar(RELEASE)
            .bind(transaction.secret())
            .bind(self.consumer_id)
            .bind(&leased.message.id)
            .bind(leased.epoch)
            .bind(delay.as_millis() as i64);
        let mut statement = transaction.tx().statement().await;
        let released = bounded(query.fetch_one(statement.connection())).await;
        statement.finish(released.as_ref().err());
        let released = commit_host(transaction, released).await?;
        self.due.after(delay);
        Ok(released)
    }
}

fn read(row: &PgRow) -> Result<Leased, sqlx::Error> {
    let message = read_message(row)?;
    Ok(Leased {
        message,
        attempt: row.try_get::<i32, _>("attempts")?.max(1) as u32,
        epoch: row.try_get("epoch")?,
        version: row.try_get("version_id")?,
        age: Duration::from_millis(row.try_get::<i64, _>("age_ms")?.max(0) as u64),
        fault: None,
    })
}

fn read_message(row: &PgRow) -> Result<Message, sqlx::Error> {
    let record = Record {
        topic: row.try_get::<String, _>("topic")?.into(),
        topic_id: None,
        partition: row.try_get("partition")?,
        offset: row.try_get("offset")?,
        timestamp_ms: row.try_get("timestamp_ms")?,
        key: row.try_get("key")?,
        headers: headers::decode(row.try_get::<Option<&[u8]>, _>("headers")?.unwrap_or_default()),
        payload: row.try_get("payload")?,
    };
    Ok(Message {
        id: row.try_get("id")?,
        source: row.try_get::<Option<String>, _>("source")?.unwrap_or_default(),
        event_type: row.try_get::<Option<String>, _>("event_type")?.unwrap_or_default(),
        event_version: row.try_get("event_version")?,
        ordering_key: row.try_get("ordering_key")?,
        sequence: None,
        content_type: row.try_get("content_type")?,
        trace_parent: row.try_get("trace_parent")?,
        decoded: None,
        payload_hash: row.try_get::<Option<&[u8]>, _>("payload_hash")?.and_then(|hash| hash.try_into().ok()),
        record,
    })
}
