//! One call of a handler inside the open transaction, and its result.

use std::{sync::Arc, time::Duration};

use futures::future::BoxFuture;
use oncebox_model::{
    handler::{Answer, BatchRun, DeliveryKind, Handler, Run},
    message::Message,
    meter::Stopped,
    outcome::{Failure, FailureKind},
    tx::Tx,
};
use tokio::time::{Instant, timeout_at};
use tracing::Instrument;

use crate::admission::Metered;

/// Result of a run.
#[derive(Debug)]
pub enum Ended<T> {
    /// An answer of the handler, in a sound transaction.
    Ok(T),
    /// A failure; a rollback to before the run makes the transaction sound again.
    Failed(Failure),
    /// A failure in the middle of a statement: the connection is given up, and the failure is the
    /// message's.
    Abandoned(Failure),
    /// Deadlock, serialization failure, lock timeout or full lock table.
    Contention(Failure),
    /// A connection that broke while the handler ran.
    Lost,
    /// A stop by the host; the message loses no attempt.
    Stopped(Stopped),
}

impl<T> Ended<T> {
    /// Maps the answer of a run, and keeps every other result.
    pub(crate) fn map<U>(self, map: impl FnOnce(T) -> U) -> Ended<U> {
        match self {
            Self::Ok(answer) => Ended::Ok(map(answer)),
            Self::Failed(failure) => Ended::Failed(failure),
            Self::Abandoned(failure) => Ended::Abandoned(failure),
            Self::Contention(failure) => Ended::Contention(failure),
            Self::Lost => Ended::Lost,
            Self::Stopped(why) => Ended::Stopped(why),
        }
    }
}

/// One call of a handler: its consumer, its message, its attempt and its deadline.
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
    /// Number of this run, from 1.
    pub attempt: u32,
    /// Kind of the delivery: live, retry or shadow.
    pub kind: DeliveryKind,
    /// Wall-clock limit of the whole call.
    pub deadline: Duration,
}

/// One call of a handler for several messages.
pub struct Together<'a> {
    /// Job of the first message.
    pub job: Job<'a>,
    /// All messages of the call, in order.
    pub messages: Vec<&'a Message>,
}

/// Runs a handler on one message.
pub async fn run(job: Job<'_>, tx: &Tx) -> Ended<Option<String>> {
    let run = Run {
        tenant: job.tenant,
        consumer: job.consumer,
        message: job.message,
        attempt: job.attempt,
        kind: job.kind,
        deadline: Instant::now() + job.deadline,
    };
    judge(&job, run.deadline, job.handler.handle(tx, &run), tx).await
}

/// Runs a handler on several messages in one call. Another number of answers than of messages is a
/// failure.
pub async fn run_together(together: Together<'_>, tx: &Tx) -> Ended<Vec<Answer>> {
    let Together { job, messages } = &together;
    let run = BatchRun {
        tenant: job.tenant,
        consumer: job.consumer,
        messages,
        deadline: Instant::now() + job.deadline,
    };
    match judge(job, run.deadline, job.handler.handle_batch(tx, &run), tx).await {
        Ended::Ok(answers) if answers.len() != messages.len() => Ended::Failed(Failure::new(
            FailureKind::BadResult,
            format!(
                "the handler was given {} messages and answered for {}",
                messages.len(),
                answers.len()
            ),
        )),
        ended => ended,
    }
}

/// Waits for a handler and classifies its result by where an error occurred, not by what the guest
/// answers. An error that PostgreSQL returned counts although the handler answered ok. Contention
/// counts before every other failure.
async fn judge<T>(
    job: &Job<'_>,
    deadline: Instant,
    answer: BoxFuture<'_, Result<T, Failure>>,
    tx: &Tx,
) -> Ended<T> {
    let started = Instant::now();
    tx.run_begins().await;
    let answer = timeout_at(deadline, attended(Metered::new(answer, tx.meter().clone()), tx))
        .instrument(span(job))
        .await;
    if job.kind != DeliveryKind::Shadow {
        warn_if_slow(job, started.elapsed());
    }
    let answer = match answer {
        Ok(Attended::Answered(answer)) => answer,
        Ok(Attended::Lost) => return Ended::Lost,
        Ok(Attended::Stopped(why)) => return Ended::Stopped(why),
        Err(_) => Err(Failure::new(
            FailureKind::Deadline,
            format!("stopped after {} ms", job.deadline.as_millis()),
        )),
    };
    if tx.is_abandoned().await {
        return Ended::Abandoned(answer.err().unwrap_or_else(|| {
            Failure::new(FailureKind::Deadline, "left a statement unfinished")
        }));
    }
    if tx.is_broken().await {
        return Ended::Lost;
    }
    match (answer, tx.error().await) {
        (_, Some(error)) if error.is_contention() => {
            Ended::Contention(Failure::new(FailureKind::Contention, error.message))
        }
        (Err(failure), _) => match tx.contention().await {
            // The guest rolled back to a savepoint of its own and gave up. That is still
            // contention, unless the guest itself decided (`retry`, `reject`, `park`).
            Some(error) if !failure.kind.is_decision() => {
                Ended::Contention(Failure::new(FailureKind::Contention, error.message))
            }
            _ => Ended::Failed(failure),
        },
        (Ok(_), Some(error)) if !oncebox_model::hooks::sabotage("swallowed_error_is_ok") => {
            Ended::Failed(Failure::new(
                FailureKind::Sql { sqlstate: error.sqlstate },
                format!("a statement failed and the handler answered ok: {}", error.message),
            ))
        }
        (Ok(answer), _) => Ended::Ok(answer),
    }
}

/// First event while a handler runs.
enum Attended<T> {
    Answered(Result<T, Failure>),
    /// Loss of its session, whether the handler is in a statement or computes.
    Lost,
    Stopped(Stopped),
}

/// Waits for a handler's answer, for as long as it can be of use: until the host stops it or its
/// session is lost.
async fn attended<T>(answer: impl Future<Output = Result<T, Failure>>, tx: &Tx) -> Attended<T> {
    let mut lost = std::pin::pin!(tx.lost());
    tokio::select! {
        biased;
        why = tx.meter().stopped() => Attended::Stopped(why),
        () = &mut lost => Attended::Lost,
        answer = answer => {
            // A check of the session may be under way. Its answer has to be read before the
            // connection is used again.
            tokio::select! {
                biased;
                () = tx.idle() => {}
                () = &mut lost => {}
            }
            Attended::Answered(answer)
        }
    }
}

/// Warns of a call that took more than half of its deadline (S3-013). Such a handler holds locks
/// and a connection for that long, and its owner should know before the deadline is reached.
fn warn_if_slow(job: &Job<'_>, took: Duration) {
    if took * 2 < job.deadline {
        return;
    }
    metrics::counter!("oncebox_slow_runs_total", "tenant" => job.tenant.to_owned(), "consumer" => job.consumer.to_owned()).increment(1);
    tracing::warn!(
        tenant = job.tenant,
        consumer = job.consumer,
        message_id = job.message.id,
        event_type = job.message.event_type,
        took_ms = took.as_millis() as u64,
        deadline_ms = job.deadline.as_millis() as u64,
        "a handler took more than half of its deadline, with the transaction open"
    );
}

/// Returns the tracing span of a call, whose fields every log line of the message carries.
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
