//! Leases: a worker counts and commits an attempt before it runs. So a message that kills the
//! process is counted too.

use std::time::Duration;

use tokio::time::Instant;

use oncebox_model::{
    error::InboxError,
    headers, hooks,
    message::Message,
    outcome::{Failure, FailureKind},
    record::Record,
};
use sqlx::{Row, postgres::PgRow};

use crate::{
    admission::Admission,
    batch::{claim::ClaimRequest, complete::Lease, statements::commit_host},
    consumer::ConsumerInbox,
    metrics::Parked,
    retry::interrupted::Interrupted,
    session::Transaction,
};

/// Message that this worker holds until its lease runs out.
#[derive(Debug, Clone)]
pub(crate) struct Leased {
    pub(crate) message: Message,
    /// Its counted attempt.
    pub(crate) lease: Lease,
    /// Version that ran it last.
    pub(crate) version: Option<i32>,
    /// Reason why its payload does not decode; none where it does.
    pub(crate) fault: Option<String>,
    /// Failure to fetch the payload that it refers to; none where there is none.
    pub(crate) unfetched: Option<Failure>,
    /// Moment of the request for the lease, which is no later than its begin.
    asked_at: Instant,
}

impl Leased {
    /// Returns whether a lease of this length has run out.
    pub(crate) fn has_run_out(&self, lease: Duration) -> bool {
        self.asked_at.elapsed() >= lease
    }

    /// Returns the time that a lease of this length has left.
    pub(crate) fn left(&self, lease: Duration) -> Duration {
        lease.saturating_sub(self.asked_at.elapsed())
    }

    /// Returns the message as a transaction takes it, to be run by a version.
    pub(crate) fn request(&self, version: Option<i32>) -> ClaimRequest {
        ClaimRequest { message: self.message.clone(), version, reason: None, ordering: None }
    }
}

/// Messages under one lease. When the process dies, an attempt of the message that ran is counted,
/// and of no other.
const LEASE_MESSAGES: i32 = 1;
/// Pause before an interrupted lease is reported again, while a worker holds the lock of its
/// message.
const BUSY: Duration = Duration::from_secs(1);
/// Attempts without an answer after which a message is parked as `crashed`.
const CRASHES_MAX: i32 = 3;
/// Outages of the database that hit a message's run, after which it is taken for their cause and
/// parked as `crashed`. A message may run for a twentieth of the time between two outages. It then
/// meets this many in a row by chance once in three million times.
const INTERRUPTIONS_MAX: i32 = 5;

impl ConsumerInbox {
    /// Leases one due message; returns none where none is due. Logs messages that are parked as
    /// crashed and leases that are taken over.
    pub(crate) async fn lease(&self, admission: &Admission) -> Result<Option<Leased>, InboxError> {
        const LEASE: &str = "SELECT * FROM oncebox_host.lease($1, $2, $3, $4, $5, $6, $7)";
        hooks::point("retry:lease:before");
        let transaction = self.sessions.begin_admitted(admission).await?;
        let asked_at = Instant::now();
        let query = sqlx::query(LEASE)
            .bind(transaction.secret())
            .bind(self.consumer_id)
            .bind(&self.owner)
            .bind(LEASE_MESSAGES)
            .bind(self.policy.lease().as_millis() as i64)
            .bind(CRASHES_MAX)
            .bind(INTERRUPTIONS_MAX);
        let rows = transaction.rows(query).await;
        let rows = commit_host(transaction, rows).await?;
        let mut leased = None;
        for row in &rows {
            let read = read(row, asked_at)?;
            match row.try_get::<Option<&str>, _>("ended")? {
                Some("parked") => self.tell_crashed(&read, row.try_get("last_error")?),
                ended => {
                    ended.into_iter().for_each(|ended| self.tell_taken_over(&read, ended));
                    leased = Some(read);
                }
            }
        }
        if leased.is_some() {
            hooks::point("retry:lease:after");
        }
        Ok(leased)
    }

    /// Counts and logs a message that was parked because its runs ended without an answer (S1-077,
    /// S1-088).
    fn tell_crashed(
        &self,
        Leased { message, lease: Lease { attempt, .. }, .. }: &Leased,
        error: Option<&str>,
    ) {
        let reason = FailureKind::Crashed.name();
        self.count_failure(&message.event_type, reason);
        let (attempt, trace_id) = (Some(*attempt), message.trace_id());
        self.log_parked(&Parked {
            attempt,
            error,
            trace_id,
            ..Parked::new(&message.id, &message.event_type, reason)
        });
    }

    /// Counts and logs a lease that was taken over after it ran out (S1-087).
    fn tell_taken_over(
        &self,
        Leased { message, lease: Lease { attempt, epoch, .. }, .. }: &Leased,
        ended: &str,
    ) {
        if ended == FailureKind::Crashed.name() {
            self.count_failure(&message.event_type, FailureKind::Crashed.name());
        }
        tracing::warn!(
            tenant = self.tenant,
            consumer = self.name,
            message_id = message.id,
            event_type = message.event_type,
            trace_id = message.trace_id(),
            attempt,
            epoch,
            ended,
            "lease taken over: its run ended without an answer"
        );
    }

    /// Remembers a lease whose run ended for no fault of its message. The next worker of this host
    /// that leases reports it first, when the database answers again. If the lease ran out and a
    /// crash was counted since, the report takes that back.
    pub(crate) fn was_interrupted(&self, leased: &Leased) {
        let interrupted =
            Interrupted { message_id: leased.message.id.clone(), epoch: leased.lease.epoch };
        self.interrupted().push(interrupted);
        self.wakeup.now();
    }

    /// Reports interrupted leases to the database. A lease whose message a worker is running is
    /// reported again later.
    pub(crate) async fn tell_interrupted(&self, admission: &Admission) -> Result<(), InboxError> {
        const TELL: &str = "SELECT * FROM oncebox_host.lease_interrupted($1, $2, $3, $4, $5, $6)";
        let told = self.interrupted().clone();
        if told.is_empty() {
            return Ok(());
        }
        let transaction = self.sessions.begin_admitted(admission).await?;
        let query = sqlx::query(TELL)
            .bind(transaction.secret())
            .bind(self.consumer_id)
            .bind(told.iter().map(|interrupted| &*interrupted.message_id).collect::<Vec<_>>())
            .bind(told.iter().map(|interrupted| interrupted.epoch).collect::<Vec<_>>())
            .bind(CRASHES_MAX)
            .bind(INTERRUPTIONS_MAX);
        let rows = transaction.rows(query).await;
        let rows = commit_host(transaction, rows).await?;
        let mut busy = Vec::new();
        for row in &rows {
            let (message_id, epoch) =
                (row.try_get::<String, _>("id")?, row.try_get::<i64, _>("epoch")?);
            let (outcome, event_type): (&str, Option<&str>) =
                (row.try_get("outcome")?, row.try_get("event_type")?);
            if outcome == "parked" {
                let (reason, event_type) =
                    (FailureKind::Crashed.name(), event_type.unwrap_or_default());
                self.count_failure(event_type, reason);
                self.log_parked(&Parked::new(&message_id, event_type, reason));
            }
            tracing::info!(
                tenant = self.tenant,
                consumer = self.name,
                message_id,
                epoch,
                outcome,
                "lease interrupted"
            );
            if outcome == "busy" {
                busy.push(Interrupted { message_id, epoch });
            }
        }
        if !busy.is_empty() {
            self.wakeup.after(BUSY);
        }
        self.interrupted()
            .retain(|interrupted| !told.contains(interrupted) || busy.contains(interrupted));
        Ok(())
    }

    /// Ends a lease whose run broke its connection. The worker that leases the message next takes
    /// it over, and counts the crash.
    pub(crate) async fn end_lease(
        &self,
        admission: &Admission,
        leased: &Leased,
    ) -> Result<(), InboxError> {
        const END: &str = "SELECT * FROM oncebox_host.lease_ends($1, $2, $3, $4)";
        let transaction = self.sessions.begin_admitted(admission).await?;
        let query = sqlx::query(END)
            .bind(transaction.secret())
            .bind(self.consumer_id)
            .bind(&leased.message.id)
            .bind(leased.lease.epoch);
        let ended = transaction.rows(query).await;
        commit_host(transaction, ended).await?;
        self.wakeup.now();
        Ok(())
    }

    /// Decodes the payload of a leased message, where it begins like one of a schema registry. The
    /// data of a CloudEvent, or a payload that an operator replaced, may be JSON already. Returns
    /// false where the schema is not at hand.
    pub(crate) fn decode_leased(&self, leased: &mut Leased) -> bool {
        self.decode_stored(&mut leased.message, &mut leased.fault)
    }

    /// Decodes the payload of a stored message, as for a leased one. Puts the reason why it does
    /// not decode into `fault`. Returns false where the schema is not at hand.
    pub(crate) fn decode_stored(&self, message: &mut Message, fault: &mut Option<String>) -> bool {
        let payload =
            message.record.payload.as_deref().filter(|payload| payload.first() == Some(&0));
        let Some((decoder, payload)) = self.decoder.get().zip(payload) else { return true };
        match decoder.decode(payload) {
            Ok(decoded) => message.decoded = Some(decoded.json.into()),
            Err(error) if error.is_not_prepared() => return false,
            Err(error) => *fault = Some(error.to_string()),
        }
        true
    }

    /// Locks a leased message's key and row for the working transaction, and inserts the guard row.
    /// Returns false where the lease is lost or an earlier message of its key is open.
    pub(crate) async fn resume(
        &self,
        transaction: &Transaction<'_>,
        generation: i64,
        message_id: &str,
        epoch: i64,
    ) -> Result<bool, InboxError> {
        const RESUME: &str = "SELECT * FROM oncebox_host.resume($1, $2, $3, $4, $5)";
        let query = sqlx::query(RESUME)
            .bind(transaction.secret())
            .bind(self.consumer_id)
            .bind(generation)
            .bind(message_id)
            .bind(epoch);
        Ok(transaction.row(query).await?.try_get(0)?)
    }

    /// Prolongs the lease of a message that waits for its payload or for admission. Returns whether
    /// the lease was still valid.
    pub(crate) async fn renew_lease(
        &self,
        admission: &Admission,
        leased: &mut Leased,
    ) -> Result<bool, InboxError> {
        const RENEW: &str = "SELECT * FROM oncebox_host.renew_lease($1, $2, $3, $4, $5)";
        let transaction = self.sessions.begin_admitted(admission).await?;
        let asked_at = Instant::now();
        let query = sqlx::query(RENEW)
            .bind(transaction.secret())
            .bind(self.consumer_id)
            .bind(&leased.message.id)
            .bind(leased.lease.epoch)
            .bind(self.policy.lease().as_millis() as i64);
        let renewed = transaction.row(query).await.and_then(|row| row.try_get(0));
        let renewed = commit_host(transaction, renewed).await?;
        if renewed {
            leased.asked_at = asked_at;
        }
        Ok(renewed)
    }

    /// Gives a lease back unused; the attempt did not happen. A release that fails is reported to
    /// the database later.
    pub(crate) async fn release(
        &self,
        admission: &Admission,
        leased: &Leased,
        delay: Duration,
    ) -> Result<bool, InboxError> {
        let released = self.release_now(admission, leased, delay).await;
        if released.is_err() {
            self.was_interrupted(leased);
        }
        released
    }

    /// Gives a lease back, due again after a delay. Returns whether the lease was still valid.
    async fn release_now(
        &self,
        admission: &Admission,
        leased: &Leased,
        delay: Duration,
    ) -> Result<bool, InboxError> {
        const RELEASE: &str = "SELECT * FROM oncebox_host.release($1, $2, $3, $4, $5)";
        let transaction = self.sessions.begin_admitted(admission).await?;
        let query = sqlx::query(RELEASE)
            .bind(transaction.secret())
            .bind(self.consumer_id)
            .bind(&leased.message.id)
            .bind(leased.lease.epoch)
            .bind(delay.as_millis() as i64);
        let released = transaction.row(query).await.and_then(|row| row.try_get(0));
        let released = commit_host(transaction, released).await?;
        self.wakeup.after(delay);
        Ok(released)
    }
}

/// Reads a leased message from its row.
fn read(row: &PgRow, asked_at: Instant) -> Result<Leased, sqlx::Error> {
    let message = read_message(row)?;
    Ok(Leased {
        asked_at,
        message,
        lease: Lease {
            attempt: row.try_get::<i32, _>("attempts")?.max(1) as u32,
            epoch: row.try_get("epoch")?,
            age: Duration::from_millis(row.try_get::<i64, _>("age_ms")?.max(0) as u64),
        },
        version: row.try_get("version_id")?,
        fault: None,
        unfetched: None,
    })
}

/// Reads the message of a row; neither a lease nor a replay needs its sequence.
pub(crate) fn read_message(row: &PgRow) -> Result<Message, sqlx::Error> {
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
        fetched: None,
        payload_hash: row
            .try_get::<Option<&[u8]>, _>("payload_hash")?
            .and_then(|hash| hash.try_into().ok()),
        record,
    })
}
