//! One run of a handler inside the open transaction, and how it ended.

use std::{sync::Arc, time::Duration};

use tokio::time::{Instant, timeout_at};
use tracing::Instrument;

use crate::{
    handler::{DeliveryKind, Failure, FailureKind, Handler, Run},
    message::Message,
    tx::Tx,
};

/// How a run ended.
#[derive(Debug)]
pub enum Ended {
    /// The handler answered ok, and the transaction is sound.
    Ok(Option<String>),
    /// The run failed; a rollback to before it makes the transaction sound again.
    Failed(Failure),
    /// The run was stopped in the middle of a statement: the connection is given up, the failure is
    /// the message's.
    Abandoned(Failure),
    /// Deadlock, serialization failure or lock timeout.
    Contention(Failure),
    /// The connection broke while the handler ran.
    Lost,
}

/// Who runs what, and how often it ran before.
#[derive(Clone, Copy)]
pub struct Job<'a> {
    /// The tenant's name.
    pub tenant: &'a str,
    /// The consumer's name.
    pub consumer: &'a str,
    /// The handler.
    pub handler: &'a Arc<dyn Handler>,
    /// The message.
    pub message: &'a Message,
    /// Which run this is, from 1.
    pub attempt: u32,
    /// Live or retry.
    pub kind: DeliveryKind,
    /// Wall clock around the whole call.
    pub deadline: Duration,
}

/// Run a handler and judge the end by the place, not by what the guest says: an error that PostgreSQL
/// answered counts although the handler answered ok, and contention counts before anything else.
pub async fn run(job: Job<'_>, tx: &Tx) -> Ended {
    let run = Run {
        tenant: job.tenant,
        consumer: job.consumer,
        message: job.message,
        attempt: job.attempt,
        kind: job.kind,
        deadline: Instant::now() + job.deadline,
    };
    let answer = timeout_at(run.deadline, job.handler.handle(tx, &run)).instrument(span(&job)).await;
    let answer =
        answer.unwrap_or_else(|_| Err(Failure::new(FailureKind::Deadline, format!("stopped after {} ms", job.deadline.as_millis()))));
    if tx.is_abandoned().await {
        return Ended::Abandoned(answer.err().unwrap_or_else(|| Failure::new(FailureKind::Deadline, "left a statement unfinished")));
    }
    if tx.is_broken().await {
        return Ended::Lost;
    }
    match (answer, tx.error().await) {
        (_, Some(error)) if error.is_contention() => Ended::Contention(Failure::new(FailureKind::Contention, error.message)),
        (Err(failure), _) => Ended::Failed(failure),
        (Ok(_), Some(error)) if !crate::hooks::sabotage("swallowed_error_is_ok") => Ended::Failed(Failure::new(
            FailureKind::Sql { sqlstate: error.sqlstate },
            format!("a statement failed and the handler answered ok: {}", error.message),
        )),
        (Ok(result), _) => Ended::Ok(result),
    }
}

/// What every log line of a message carries.
fn span(job: &Job<'_>) -> tracing::Span {
    tracing::info_span!(
        "message",
        tenant = job.tenant,
        consumer = job.consumer,
        message_id = job.message.id,
        event_type = job.message.event_type,
        version = job.handler.version(),
        trace_id = job.message.trace_id(),
        attempt = job.attempt,
    )
}
