//! One run of a handler inside the open transaction, and how it ended.

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

/// How a run ended.
#[derive(Debug)]
pub enum Ended<T> {
    /// The handler answered, and the transaction is sound.
    Ok(T),
    /// The run failed; a rollback to before it makes the transaction sound again.
    Failed(Failure),
    /// The run was stopped in the middle of a statement: the connection is given up, the failure is
    /// the message's.
    Abandoned(Failure),
    /// Deadlock, serialization failure or lock timeout.
    Contention(Failure),
    /// The connection broke while the handler ran.
    Lost,
    /// The host stopped it; the message has lost nothing.
    Stopped(Stopped),
}

impl<T> Ended<T> {
    /// The same end of another answer.
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
    /// Live, retry or shadow.
    pub kind: DeliveryKind,
    /// Wall clock around the whole call.
    pub deadline: Duration,
}

/// Several messages in one call.
pub struct Together<'a> {
    /// The first message's job.
    pub job: Job<'a>,
    /// All of them.
    pub messages: Vec<&'a Message>,
}

/// Run a handler on one message.
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

/// Run a handler on several messages in one call; one answer for each.
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

/// Wait for a handler and judge the end by the place, not by what the guest says: an error that
/// PostgreSQL answered counts although the handler answered ok, and contention counts before
/// anything else.
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
            // It came back to a savepoint and gave up: still nobody's fault, unless it decided
            // otherwise.
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

/// What came first while a handler ran.
enum Attended<T> {
    Answered(Result<T, Failure>),
    /// Its session is gone, whether it speaks to the database or computes.
    Lost,
    Stopped(Stopped),
}

/// Wait for a handler's answer for as long as it can be of use.
async fn attended<T>(answer: impl Future<Output = Result<T, Failure>>, tx: &Tx) -> Attended<T> {
    let mut lost = std::pin::pin!(tx.lost());
    tokio::select! {
        biased;
        why = tx.meter().stopped() => Attended::Stopped(why),
        () = &mut lost => Attended::Lost,
        answer = answer => {
            // The server may be asked just now whether it knows the session, and its answer is to
            // be read.
            tokio::select! {
                biased;
                () = tx.idle() => {}
                () = &mut lost => {}
            }
            Attended::Answered(answer)
        }
    }
}

/// A handler that comes near its deadline holds locks and a connection for that long; its owner
/// should know before the deadline is reached (S3-013).
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
