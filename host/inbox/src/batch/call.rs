//! One call of a handler inside the open transaction, and its result.

use std::{sync::Arc, time::Duration};

use futures::future::BoxFuture;
use oncebox_model::{
    handler::{Answer, BatchRun, DeliveryKind, Handler, Run},
    hooks::{self, Defect},
    message::Message,
    meter::Stopped,
    outcome::{Failure, FailureKind},
    outgoing::{Outbox, Output},
    tx::{StatementError, Tx},
};
use tokio::time::{Instant, timeout_at};
use tracing::Instrument;

use crate::admission::MeteredFuture;

/// Result of a call.
#[derive(Debug)]
pub enum CallResult<T> {
    /// An answer of the handler, in a sound transaction.
    Ok(T),
    /// A failure; a rollback to before the call makes the transaction sound again.
    Failed(Failure),
    /// A failure in the middle of a statement: the connection is given up, and the failure is the
    /// message's.
    Abandoned(Failure),
    /// Deadlock, serialization failure, lock timeout or full lock table.
    Contention(Failure),
    /// A connection that broke while the handler ran.
    ConnectionLost,
    /// A stop by the host; the message loses no attempt.
    Stopped(Stopped),
}

impl<T> CallResult<T> {
    /// Maps the answer of a call, and keeps every other result.
    pub(crate) fn map<U>(self, map: impl FnOnce(T) -> U) -> CallResult<U> {
        match self {
            Self::Ok(answer) => CallResult::Ok(map(answer)),
            Self::Failed(failure) => CallResult::Failed(failure),
            Self::Abandoned(failure) => CallResult::Abandoned(failure),
            Self::Contention(failure) => CallResult::Contention(failure),
            Self::ConnectionLost => CallResult::ConnectionLost,
            Self::Stopped(why) => CallResult::Stopped(why),
        }
    }
}

/// One call of a handler: its consumer, its message, its attempt and its deadline.
#[derive(Clone, Copy)]
pub struct Call<'a> {
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
    /// Kind of the delivery: live, retry, replay or shadow.
    pub kind: DeliveryKind,
    /// Wall-clock limit of the whole call.
    pub deadline: Duration,
    /// Rights to emit and to cancel outgoing messages.
    pub outbox: &'a Outbox,
    /// Whether the call may end before its enqueued statements are answered; [`caught_up`] waits for
    /// them.
    pub may_run_ahead: bool,
}

/// One call of a handler for several messages.
pub struct GroupCall<'a> {
    /// Call of the first message.
    pub call: Call<'a>,
    /// All messages of the call, in order.
    pub messages: Vec<&'a Message>,
}

/// Calls a handler with one message.
pub async fn call(call: Call<'_>, tx: &Tx) -> CallResult<Output> {
    let run = Run {
        tenant: call.tenant,
        consumer: call.consumer,
        message: call.message,
        attempt: call.attempt,
        kind: call.kind,
        deadline: Instant::now() + call.deadline,
        outbox: call.outbox,
        may_run_ahead: call.may_run_ahead,
    };
    observed(&call, run.deadline, call.handler.handle(tx, &run), tx).await
}

/// Waits for what handlers have enqueued that ran ahead. `call` is that of the last one, whose
/// deadline bounds the wait.
pub async fn caught_up(call: Call<'_>, tx: &Tx) -> CallResult<()> {
    let answers = Box::pin(async {
        let _kept_by_the_transaction = tx.wait_for_enqueued().await;
        Ok(())
    });
    classify(&call, Instant::now() + call.deadline, answers, tx).await
}

/// Waits for a handler, classifies its result, and warns of one that took long.
async fn observed<T>(
    call: &Call<'_>,
    deadline: Instant,
    answer: BoxFuture<'_, Result<T, Failure>>,
    tx: &Tx,
) -> CallResult<T> {
    let started = Instant::now();
    let result = classify(call, deadline, answer, tx).await;
    if call.kind != DeliveryKind::Shadow {
        warn_if_slow(call, started.elapsed());
    }
    result
}

/// Calls a handler with several messages. Another number of answers than of messages is a failure.
pub async fn call_group(group: GroupCall<'_>, tx: &Tx) -> CallResult<Vec<Answer>> {
    let GroupCall { call, messages } = &group;
    let run = BatchRun {
        tenant: call.tenant,
        consumer: call.consumer,
        messages,
        deadline: Instant::now() + call.deadline,
        outbox: call.outbox,
    };
    match observed(call, run.deadline, call.handler.handle_batch(tx, &run), tx).await {
        CallResult::Ok(answers) if answers.len() != messages.len() => {
            CallResult::Failed(Failure::new(
                FailureKind::BadResult,
                format!(
                    "the handler was given {} messages and answered for {}",
                    messages.len(),
                    answers.len()
                ),
            ))
        }
        ended => ended,
    }
}

/// Waits for a handler and classifies its result by where an error occurred, not by what the guest
/// answers. An error that PostgreSQL returned counts although the handler answered ok. Contention
/// counts before every other failure.
async fn classify<T>(
    call: &Call<'_>,
    deadline: Instant,
    answer: BoxFuture<'_, Result<T, Failure>>,
    tx: &Tx,
) -> CallResult<T> {
    tx.run_begins().await;
    let answer = timeout_at(deadline, attended(MeteredFuture::new(answer, tx.meter().clone()), tx))
        .instrument(span(call))
        .await;
    let answer = match answer {
        Ok(Attended::Answered(answer)) => answer,
        Ok(Attended::ConnectionLost) => return CallResult::ConnectionLost,
        Ok(Attended::Stopped(why)) => {
            tx.abandon_enqueued().await;
            return CallResult::Stopped(why);
        }
        Err(_) => {
            tx.abandon_enqueued().await;
            Err(Failure::new(
                FailureKind::Deadline,
                format!("stopped after {} ms", call.deadline.as_millis()),
            ))
        }
    };
    let is_abandoned = tx.is_abandoned().await;
    if !is_abandoned && tx.is_broken().await {
        return CallResult::ConnectionLost;
    }
    let is_unfinished = is_abandoned || answer.is_err();
    let is_behind = tx.has_earlier_failed().await || is_unfinished && tx.awaits_earlier().await;
    if is_behind && !hooks::sabotage(Defect::EarlierFailureIsOwn) {
        return behind(tx).await;
    }
    if is_abandoned {
        return CallResult::Abandoned(answer.err().unwrap_or_else(|| {
            Failure::new(FailureKind::Deadline, "left a statement unfinished")
        }));
    }
    match (answer, tx.error().await) {
        (_, Some(error)) if error.is_contention() => {
            CallResult::Contention(Failure::new(FailureKind::Contention, error.message))
        }
        (Err(failure), _) => match tx.contention().await {
            // The guest rolled back to a savepoint of its own and gave up. That is still
            // contention, unless the guest itself decided (`retry`, `reject`, `park`).
            Some(error) if !failure.kind.is_decision() => {
                CallResult::Contention(Failure::new(FailureKind::Contention, error.message))
            }
            _ => CallResult::Failed(failure),
        },
        (Ok(answer), Some(error)) => swallowed(answer, error),
        (Ok(answer), None) => CallResult::Ok(answer),
    }
}

/// Returns the result of a call that has none of its own: a statement of an earlier one has failed,
/// or has no answer where this one was cut off. It is contention, or a failure of an unknown message.
async fn behind<T>(tx: &Tx) -> CallResult<T> {
    match tx.error().await {
        Some(error) if error.is_contention() => {
            CallResult::Contention(Failure::new(FailureKind::Contention, error.message))
        }
        _ => CallResult::Failed(Failure::new(
            FailureKind::Other,
            "a statement that an earlier message enqueued has failed, or took too long",
        )),
    }
}

/// Returns the failure of a handler that answered ok although one of its statements failed.
fn swallowed<T>(answer: T, error: StatementError) -> CallResult<T> {
    if hooks::sabotage(Defect::SwallowedErrorIsOk) {
        return CallResult::Ok(answer);
    }
    CallResult::Failed(Failure::new(
        FailureKind::Sql { sqlstate: error.sqlstate },
        format!("a statement failed and the handler answered ok: {}", error.message),
    ))
}

/// First event while a handler runs.
enum Attended<T> {
    Answered(Result<T, Failure>),
    /// Loss of its session, whether the handler is in a statement or computes.
    ConnectionLost,
    Stopped(Stopped),
}

/// Waits for a handler's answer, for as long as it can be of use: until the host stops it or its
/// session is lost.
async fn attended<T>(answer: impl Future<Output = Result<T, Failure>>, tx: &Tx) -> Attended<T> {
    let mut lost = std::pin::pin!(tx.lost());
    tokio::select! {
        biased;
        why = tx.meter().stopped() => Attended::Stopped(why),
        () = &mut lost => Attended::ConnectionLost,
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
fn warn_if_slow(call: &Call<'_>, took: Duration) {
    if took * 2 < call.deadline {
        return;
    }
    metrics::counter!("oncebox_slow_runs_total", "tenant" => call.tenant.to_owned(), "consumer" => call.consumer.to_owned()).increment(1);
    tracing::warn!(
        tenant = call.tenant,
        consumer = call.consumer,
        message_id = call.message.id,
        event_type = call.message.event_type,
        took_ms = took.as_millis() as u64,
        deadline_ms = call.deadline.as_millis() as u64,
        "a handler took more than half of its deadline, with the transaction open"
    );
}

/// Returns the tracing span of a call, whose fields every log line of the message carries.
fn span(call: &Call<'_>) -> tracing::Span {
    tracing::info_span!(
        "message",
        tenant = call.tenant,
        consumer = call.consumer,
        message_id = call.message.id,
        event_type = call.message.event_type,
        version = call.handler.version(),
        trace_id = call.message.trace_id(),
        attempt = call.attempt,
    )
}
