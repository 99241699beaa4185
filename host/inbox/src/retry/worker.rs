//! The retry workers. They run due messages of the inbox: retries, messages on probation, and all
//! messages of a consumer that acks after the insert.

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

/// Pause of a worker when nothing is due, where no poller wakes it.
const IDLE: Duration = Duration::from_millis(250);
/// Pause after a fault of the host, and delay of a lease that such a fault gives back.
const TROUBLE: Duration = Duration::from_secs(1);

/// Messages in a row that wait for a circuit breaker or a registry, before a worker pauses.
const WAITING_IN_A_ROW: u32 = 16;

/// Longest delay of a message that a circuit breaker holds back.
const PUT_OFF: Duration = Duration::from_secs(5);

/// Runs a worker until `stop` is cancelled; a message that runs at that time is finished. Where a
/// poller exists, the worker holds no connection and sends no query until it is woken.
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

/// Runs due messages until none is left, or none may run. Where there is more than one message,
/// wakes another worker to help.
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

/// Leases one due message and runs it, in a transaction of its own. Returns how many messages were
/// due: 0 or 1.
///
/// # Errors
///
/// Returns an error where the message was not run, or its result is not recorded.
pub async fn step(consumer: &ConsumerInbox, stop: &CancellationToken) -> Result<usize, InboxError> {
    // The admission comes before the lease. A lease could run out while its message waits for
    // admission, and would count as a crash.
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
        // Nor did this one. A wait for a registry holds no lease and no place of the host.
        consumer.release(&admission, &leased, TROUBLE).await?;
        drop(admission);
        consumer.prepare(std::iter::once(leased.message.record.payload.as_deref())).await?;
    }
    Ok(1)
}

/// Reason why the work of a lease ended without a commit of the message's effect.
enum Undone {
    /// Message that another worker has, or that is not to run. Any row change about that is
    /// committed.
    NotRun,
    /// Failure that is to be recorded in a new transaction.
    Failed(Failure),
    /// Connection that broke alone while the message ran: the lease ends, and the crash is counted.
    Lost,
    /// Outage of several connections, the message's among them: the attempt did not happen.
    Outage,
    /// Fault of the host.
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
    /// Returns the run of this lease, by a version.
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

/// Reports the first run of a message to its handler, and no further one. Otherwise a message that
/// is stuck would count as many.
fn settled_first(leased: &Leased, handler: &Arc<dyn Handler>, disposition: Disposition) {
    if leased.attempt == 1 {
        handler.settled(disposition);
    }
}

impl ConsumerInbox {
    /// Returns how long circuit breakers hold back every message that may be due; none where a
    /// lease is worth taking. A lease that is given back at once costs two commits.
    fn held_back(&self) -> Option<Duration> {
        // An interrupted lease has to be reported to the database, whatever the breakers say.
        if self.interrupted().is_empty() {
            self.breakers.held_back(&*self.handlers())
        } else {
            None
        }
    }

    /// Runs a leased message and records its result, or gives the lease back.
    async fn run_leased(&self, admission: Admission, leased: &Leased) -> Result<(), InboxError> {
        let handlers = self.handlers();
        match self.run_leased_with(&admission, &*handlers, leased).await {
            Err(InboxError::StaleDeployments) => {
                // The attempt did not happen; the loaded deployments were withdrawn.
                let _ = self.release(&admission, leased, Duration::ZERO).await;
                drop(admission);
                if self.newer_than(handlers.generation()).await {
                    Ok(())
                } else {
                    Err(InboxError::StaleDeployments)
                }
            }
            answer => {
                // A message that was put off did not use the rate.
                admission.settled(usize::from(answer.is_ok()));
                answer
            }
        }
    }

    /// Runs one transaction under a lease: resume, handle, complete, commit. Repeats it under
    /// contention, and records a failure whose transaction is gone.
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
                // The attempt did not happen. Another version may take the message long before this
                // one is tried.
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
                    // Where the database cannot be told, the lease runs out.
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
                    // After a lost answer to COMMIT, the release waits for that commit to end. It
                    // releases the lease only if the transaction was rolled back.
                    let _ = self.release(admission, leased, TROUBLE).await;
                    return Err(error);
                }
            }
        }
    }

    /// Reports the end of a run to the version's circuit breaker: of a probe, or of a first run.
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

    /// Runs one transaction of a lease, from BEGIN to COMMIT or ROLLBACK.
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
                // The check comes before the rollback, which may wait for a server that is away.
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

    /// Runs everything between BEGIN and COMMIT under a lease: locks the row, runs the message,
    /// writes the completion.
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

    /// Remembers a lease that this worker lost, if it ran out because the database was slow or
    /// away. The worker that took it over counted a crash that was none; the database takes that
    /// back.
    fn has_lost(&self, leased: &Leased) {
        if leased.has_run_out(Duration::from_millis(self.policy.retry.lease_ms)) {
            self.was_interrupted(leased);
        }
    }

    /// Records a failure whose transaction is gone, under the lease of its run. Where that fails,
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

    /// Records a failure in a new transaction, if the lease is still valid.
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
