//! The workers that run what is due in the inbox: retries, messages on probation, and everything of
//! a consumer that acks after the insert.

use std::{sync::Arc, time::Duration};

use oncebox_model::{
    error::InboxError,
    handler::{DeliveryKind, Handler, Handlers},
    hooks,
    outcome::{Disposition, Failure, FailureKind},
};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::{
    admission::{
        Admission,
        breaker::{Admission as Passage, LOOK_AGAIN, Probe},
    },
    batch::{
        call::{Ended, run},
        claim::Offered,
        complete::{Completion, Ran, complete},
        process::{Routed, Stop, commit, host_statement, refused, undo_message},
    },
    consumer::ConsumerInbox,
    retry::lease::Leased,
    session::Transaction,
};

/// Pause when nothing is due.
const IDLE: Duration = Duration::from_millis(250);
/// Pause after trouble of the host.
const TROUBLE: Duration = Duration::from_secs(1);

/// Messages in a row that are put off because of a circuit breaker, before a worker pauses.
const WAITING_IN_A_ROW: u32 = 16;

/// How long a message is put off at once.
const PUT_OFF: Duration = Duration::from_secs(5);

/// Run a worker until it is told to stop. A message that runs then is brought to its end. It asks
/// nothing and holds nothing until it is told that something is due, where there is someone who
/// tells.
pub async fn work(consumer: Arc<ConsumerInbox>, stop: CancellationToken) {
    let mut pause = if consumer.due.is_told() { Duration::MAX } else { Duration::ZERO };
    while !stop.is_cancelled() {
        tokio::select! {
            () = stop.cancelled() => return,
            () = consumer.due.wait() => {}
            () = tokio::time::sleep(pause) => {}
        }
        pause = match work_off(&consumer, &stop).await {
            Ok(()) if let Some(wait) = consumer.held_back() => wait.min(LOOK_AGAIN),
            Ok(()) if consumer.due.is_told() => Duration::MAX,
            Ok(()) | Err(InboxError::BreakerOpen { .. }) => IDLE,
            Err(InboxError::DatabaseAway { again_in }) => again_in,
            Err(error @ InboxError::Stopped { .. }) => error.again_in().unwrap_or(IDLE),
            Err(error) => {
                tracing::warn!(tenant = consumer.tenant, consumer = consumer.name, %error, "the \
                    retry worker waits");
                TROUBLE
            }
        };
    }
}

/// Until nothing is due, or nothing that is may run. Where there is more than one message, another
/// worker is called to help.
async fn work_off(consumer: &ConsumerInbox, stop: &CancellationToken) -> Result<(), InboxError> {
    let (mut is_more, mut waiting) = (false, 0);
    while !stop.is_cancelled() && consumer.held_back().is_none() {
        match step(consumer, stop).await {
            Ok(0) => break,
            Ok(_) => waiting = 0,
            // Messages of other versions may be due behind it.
            Err(
                InboxError::BreakerOpen { .. }
                | InboxError::RegistryAway(_)
                | InboxError::SchemaLate,
            ) if waiting < WAITING_IN_A_ROW => {
                waiting += 1;
            }
            Err(error) => return Err(error),
        }
        if is_more {
            consumer.due.now();
        }
        is_more = true;
    }
    Ok(())
}

/// Lease one message that is due and run it, in a transaction of its own. The answer is how many
/// were due.
pub async fn step(consumer: &ConsumerInbox, stop: &CancellationToken) -> Result<usize, InboxError> {
    // Let in before the lease is taken: it could run out while its message waits, and would count
    // as a crash.
    let admission = tokio::select! {
        biased;
        admission = consumer.admit(1, true) => admission,
        () = stop.cancelled() => return Ok(0),
    };
    consumer.tell_interrupted(&admission).await?;
    let Some(mut leased) = consumer.lease(&admission).await? else { return Ok(0) };
    if stop.is_cancelled() {
        // The attempt did not happen.
        consumer.release(&admission, &leased, Duration::ZERO).await?;
    } else if consumer.decode_leased(&mut leased) {
        consumer.run_leased(admission, &leased).await?;
    } else {
        // Nor did this one. Nobody holds a lease or a place of the host while waiting for a
        // registry.
        consumer.release(&admission, &leased, TROUBLE).await?;
        drop(admission);
        consumer.prepare(std::iter::once(leased.message.record.payload.as_deref())).await?;
    }
    Ok(1)
}

/// Why the work of a lease ended without a commit.
enum Undone {
    /// Someone else has the message, or it is not to run now; what was written about that is
    /// committed.
    NotRun,
    /// Its failure is to be recorded in a new transaction.
    Failed(Failure),
    /// The connection broke alone while it ran: the lease ends, and the crash is counted.
    Lost,
    /// Connections broke, its own among them: the attempt did not happen.
    Outage,
    /// The host's trouble.
    Host(InboxError),
}

impl From<InboxError> for Undone {
    fn from(error: InboxError) -> Self {
        Self::Host(error)
    }
}

impl From<Stop> for Undone {
    fn from(stop: Stop) -> Self {
        match stop {
            Stop::AtCommit { failure } | Stop::Contention { failure } => Self::Failed(failure),
            Stop::Host(error) | Stop::Crowded(error) => Self::Host(error),
            other => {
                Self::Host(InboxError::Invalid(format!("a leased message stopped: {other:?}")))
            }
        }
    }
}

impl Leased {
    fn ran(&self, version: Option<i32>) -> Ran<'_> {
        Ran {
            message: &self.message,
            epoch: self.epoch,
            version,
            attempt: self.attempt,
            age: self.age,
        }
    }
}

/// A message that is stuck would otherwise count as many.
fn settled_first(leased: &Leased, handler: &Arc<dyn Handler>, disposition: Disposition) {
    if leased.attempt == 1 {
        handler.settled(disposition);
    }
}

impl ConsumerInbox {
    /// For how long circuit breakers hold back whatever may be due. A lease would be given back at
    /// once, and each of them is two commits.
    fn held_back(&self) -> Option<Duration> {
        // Leases that the database is still to be told of wait for no breaker.
        if self.interrupted().is_empty() {
            self.breakers.held_back(&*self.handlers())
        } else {
            None
        }
    }

    /// Bring a leased message to its end, or give the lease back.
    async fn run_leased(&self, admission: Admission, leased: &Leased) -> Result<(), InboxError> {
        let handlers = self.handlers();
        match self.run_leased_with(&admission, &*handlers, leased).await {
            Err(InboxError::StaleDeployments) => {
                // The attempt did not happen; what is loaded here was withdrawn.
                let _ = self.release(&admission, leased, Duration::ZERO).await;
                drop(admission);
                if self.newer_than(handlers.generation()).await {
                    Ok(())
                } else {
                    Err(InboxError::StaleDeployments)
                }
            }
            answer => {
                // What was put off did not use the rate.
                admission.settled(usize::from(answer.is_ok()));
                answer
            }
        }
    }

    /// Resume, handle, complete, commit, in one transaction.
    async fn run_leased_with(
        &self,
        admission: &Admission,
        handlers: &dyn Handlers,
        leased: &Leased,
    ) -> Result<(), InboxError> {
        let generation = handlers.generation();
        let Some(handler) = handlers.resolve(&leased.message, leased.version) else {
            let failure = Failure::new(FailureKind::NoRoute, "no deployment takes this event type");
            return self.record_leased(admission, leased, generation, None, failure).await;
        };
        if let Some(fault) = leased.fault.clone().or_else(|| self.schemas.fault(&leased.message)) {
            return self
                .record_leased(
                    admission,
                    leased,
                    generation,
                    None,
                    Failure::new(FailureKind::Schema, fault),
                )
                .await;
        }
        let probe = match self.breakers.admit(&*handler, true) {
            Passage::Pass => None,
            Passage::Probe(probe) => Some(probe),
            Passage::Wait(left) => {
                // The attempt did not happen. Another version may take it long before this one is
                // tried.
                let again_in = left.min(PUT_OFF);
                self.release(admission, leased, again_in).await?;
                return Err(InboxError::BreakerOpen { version: handler.version(), again_in });
            }
        };
        let offered = Offered {
            message: leased.message.clone(),
            version: Some(handler.version()),
            reason: None,
            ordering: None,
        };
        let routed = Routed { offered, handler, generation, shadow: None };
        let mut repeats = 0;
        loop {
            let undone = match self.transact_leased(admission, leased, &routed).await {
                Ok((disposition, failure)) => {
                    self.count_run(&leased.message, disposition);
                    settled_first(leased, &routed.handler, disposition);
                    self.judge(leased, &*routed.handler, probe, failure);
                    return Ok(());
                }
                Err(undone) => undone,
            };
            match undone {
                Undone::NotRun => {
                    self.has_lost(leased);
                    return Ok(());
                }
                Undone::Lost => {
                    // Where that cannot be said, the lease runs out.
                    let _ = self.end_lease(admission, leased).await;
                    return Err(InboxError::LostInHandler {
                        message_id: leased.message.id.clone(),
                        among: 1,
                    });
                }
                Undone::Outage => {
                    self.was_interrupted(leased);
                    return Err(InboxError::LostInOutage {
                        message_id: leased.message.id.clone(),
                        among: 1,
                    });
                }
                Undone::Failed(failure)
                    if failure.kind == FailureKind::Contention && repeats < 5 =>
                {
                    repeats += 1;
                    tokio::time::sleep(Duration::from_millis(rand::random_range(
                        1..=10 << repeats,
                    )))
                    .await;
                }
                Undone::Failed(failure) => {
                    let kind = failure.kind.clone();
                    self.record_leased(
                        admission,
                        leased,
                        generation,
                        Some(&routed.handler),
                        failure,
                    )
                    .await?;
                    self.judge(leased, &*routed.handler, probe, Some(kind));
                    return Ok(());
                }
                Undone::Host(InboxError::StaleDeployments) => {
                    return Err(InboxError::StaleDeployments);
                }
                Undone::Host(error) => {
                    // After a commit whose answer was lost it waits for that commit, and releases
                    // only what was rolled back.
                    let _ = self.release(admission, leased, TROUBLE).await;
                    return Err(error);
                }
            }
        }
    }

    /// Tell the version's circuit breaker how a run ended: that of a probe, or a first one.
    fn judge(
        &self,
        leased: &Leased,
        handler: &dyn Handler,
        probe: Option<Probe>,
        failure: Option<FailureKind>,
    ) {
        match probe {
            Some(probe) => probe.ended(failure.as_ref()),
            None if leased.attempt == 1 => self.breakers.ran(handler, [&failure]),
            None => {}
        }
    }

    async fn transact_leased(
        &self,
        admission: &Admission,
        leased: &Leased,
        routed: &Routed,
    ) -> Result<(Disposition, Option<FailureKind>), Undone> {
        let transaction = self.sessions.begin_admitted(admission).await?;
        let began = std::time::Instant::now();
        match self.work_leased(&transaction, leased, routed).await {
            Ok((disposition, mut completion)) => {
                hooks::point("retry:commit:before");
                commit(transaction).await?;
                hooks::point("retry:commit:after");
                let failures = completion.recorded();
                let kind = failures.first().map(|recorded| recorded.failure.kind.clone());
                self.tell_failures(std::iter::once(&leased.message), failures.into_iter());
                Ok((disposition, kind))
            }
            Err(Undone::Lost) => {
                // Before the rollback, which may wait for a server that is away.
                let is_alone =
                    self.sessions.broke_alone(&self.who(&leased.message.id), began).await;
                transaction.rollback().await;
                Err(if is_alone { Undone::Lost } else { Undone::Outage })
            }
            Err(Undone::NotRun) => {
                commit(transaction).await?;
                Err(Undone::NotRun)
            }
            Err(undone) => {
                transaction.rollback().await;
                Err(undone)
            }
        }
    }

    async fn work_leased(
        &self,
        transaction: &Transaction<'_>,
        leased: &Leased,
        routed: &Routed,
    ) -> Result<(Disposition, Completion), Undone> {
        let (message, tx) = (&leased.message, transaction.tx());
        if !self.resume(transaction, routed.generation, leased).await? {
            return Err(Undone::NotRun);
        }
        let (mut completion, version) = (Completion::default(), Some(routed.handler.version()));
        let mut sequenced = self.sequence_of(transaction, std::iter::once(message)).await?;
        if !self.leased_in_sequence(leased.ran(None), &sequenced, &mut completion) {
            complete(transaction, self.consumer_id, &completion).await?;
            return Err(Undone::NotRun);
        }
        host_statement(tx, "SAVEPOINT m").await?;
        let began = Instant::now();
        let ended = run(self.job(routed, leased.attempt, DeliveryKind::Retry), tx).await;
        self.count_duration(message, began.elapsed());
        hooks::point("retry:handle:after");
        let disposition = match ended {
            Ended::Ok(result) => {
                completion.succeeded(leased.ran(version), result, &self.policy);
                sequenced.completed(message);
                Disposition::Completed
            }
            Ended::Failed(failure) => {
                if let Err(error) = undo_message(tx).await {
                    return Err(if refused(&error).is_some() {
                        Undone::Failed(failure)
                    } else {
                        Undone::Host(error)
                    });
                }
                completion.failed(leased.ran(version), &failure, &self.policy)
            }
            Ended::Contention(failure) | Ended::Abandoned(failure) => {
                return Err(Undone::Failed(failure));
            }
            Ended::Lost => return Err(Undone::Lost),
            // The attempt did not happen.
            Ended::Stopped(why) => return Err(Undone::Host(InboxError::Stopped { why })),
        };
        self.move_sequence(transaction, &sequenced)
            .await
            .map_err(crate::batch::process::at_completion)?;
        complete(transaction, self.consumer_id, &completion)
            .await
            .map_err(crate::batch::process::at_completion)?;
        self.due_after(&completion);
        Ok((disposition, completion))
    }

    /// The message of a lease is not ours any more. Where that ran out, since the database was slow
    /// or away, whoever took it over has counted a crash that was none.
    fn has_lost(&self, leased: &Leased) {
        if leased.has_run_out(Duration::from_millis(self.policy.retry.lease_ms)) {
            self.was_interrupted(leased);
        }
    }

    /// Record a failure whose transaction is gone, under the same lease. Where that cannot be done,
    /// the attempt did not happen: a lease that runs out would count as a crash.
    async fn record_leased(
        &self,
        admission: &Admission,
        leased: &Leased,
        generation: i64,
        handler: Option<&Arc<dyn Handler>>,
        failure: Failure,
    ) -> Result<(), InboxError> {
        let recorded =
            self.record_leased_now(admission, leased, generation, handler, failure).await;
        if recorded.as_ref().is_err_and(|error| !matches!(error, InboxError::StaleDeployments)) {
            self.was_interrupted(leased);
        }
        recorded
    }

    async fn record_leased_now(
        &self,
        admission: &Admission,
        leased: &Leased,
        generation: i64,
        handler: Option<&Arc<dyn Handler>>,
        failure: Failure,
    ) -> Result<(), InboxError> {
        let transaction = self.sessions.begin_admitted(admission).await?;
        match self.resume(&transaction, generation, leased).await {
            Ok(true) => {}
            Ok(false) => {
                self.has_lost(leased);
                return commit(transaction).await.map_err(crate::batch::process::stopped);
            }
            Err(error) => {
                transaction.rollback().await;
                return Err(error);
            }
        }
        let version = handler.map(|handler| handler.version());
        let mut completion = Completion::default();
        let disposition = completion.failed(leased.ran(version), &failure, &self.policy);
        complete(&transaction, self.consumer_id, &completion).await?;
        self.due_after(&completion);
        commit(transaction).await.map_err(crate::batch::process::stopped)?;
        self.tell_failures(std::iter::once(&leased.message), completion.recorded().into_iter());
        self.count_run(&leased.message, disposition);
        if let Some(handler) = handler {
            settled_first(leased, handler, disposition);
        }
        Ok(())
    }
}
