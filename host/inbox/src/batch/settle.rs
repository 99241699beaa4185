//! Repeated transactions: what follows one that was aborted.
//!
//! [`Plan::after`] is the whole table. A transaction is repeated smaller, later or with savepoints,
//! until it commits, or until an abort is the failure of one message, which is recorded in a
//! transaction of its own.

use std::time::Duration;

use oncebox_model::{
    error::InboxError,
    hooks::{self, Defect},
    message::Message,
    outcome::{Disposition, Failure, FailureKind},
    trace::Span,
};

use crate::{
    admission::{
        Admission,
        batch_sizer::{BatchSizer, SavepointMode, SerialPermit},
    },
    batch::{
        abort::Abort,
        claim::{ClaimOutcome, ClaimRequest, Claimant, InitialStatus, claim},
        commit::commit,
        complete::{Completion, Execution, Lease, enqueue_completion},
        routed::Routed,
        settled::Settled,
    },
    consumer::ConsumerInbox,
    session::Transaction,
};

/// Permission to run transactions of this consumer, one after the other.
pub(crate) struct Permit {
    /// Permit of the host's scheduler.
    pub(crate) admission: Admission,
    /// Serial permit of the consumer, held while its transactions on this host run one at a time.
    /// It is taken before the admission. Otherwise a consumer that waits for it would hold a place
    /// of the host. A leased message has none.
    pub(crate) serial: SerialPermit,
}

/// Repetitions of a message alone that meets contention, before the contention counts as a failed
/// attempt.
const CONTENTION_REPEATS: u32 = 5;

/// Size and mode of the next transaction of a batch.
#[derive(Debug)]
struct Plan {
    /// Messages of the transaction, from the front of the batch.
    size: usize,
    mode: SavepointMode,
    /// True once the messages are settled one by one.
    alone: bool,
    /// Repetitions after contention, with one message.
    repeats: u32,
}

/// Step that follows an aborted transaction.
#[derive(Debug)]
enum AfterAbort {
    /// The next transaction, by the plan.
    Again,
    /// The next transaction, after a pause.
    AgainAfter(Duration),
    /// The record of the first message's failure.
    Record(Failure),
    /// The parking of the first message, whose row PostgreSQL refuses.
    Park(Failure),
    /// The end: nothing is settled.
    Fail(InboxError),
}

impl Plan {
    /// Plans the next transaction after one that was aborted. From a size of one on, a failure is
    /// that message's.
    fn after(&mut self, abort: Abort, sizer: &BatchSizer) -> AfterAbort {
        match abort {
            Abort::Failed => self.mode = SavepointMode::Savepoints,
            // The sizer knows of the contention: transactions of this consumer run one at a time
            // from then on, and shrink where that does not help.
            Abort::Contention { .. } if self.size > 1 => self.size = self.size.min(sizer.next().0),
            // A refused claim or COMMIT does not name its message: from here each is settled alone.
            Abort::AtClaim { .. } | Abort::AtCommit { .. } if self.size > 1 => {
                (self.size, self.mode, self.alone) = (1, SavepointMode::Savepoints, true);
            }
            // Fewer claims need fewer locks.
            Abort::LockTableFull(_) if self.size > 1 => {
                sizer.crowded();
                self.size /= 2;
            }
            // The messages before it are settled first, so that positions stay in order.
            Abort::Abandoned { index, .. } if index > 0 => self.size = index,
            // The pause is random, so that two opponents do not meet again.
            Abort::Contention { .. } if self.repeats < CONTENTION_REPEATS => {
                self.repeats += 1;
                let ms = rand::random_range(1..=10 << self.repeats);
                return AfterAbort::AgainAfter(Duration::from_millis(ms));
            }
            Abort::Contention { failure }
            | Abort::AtCommit { failure }
            | Abort::Abandoned { failure, .. } => return AfterAbort::Record(failure),
            Abort::AtClaim { failure } => return AfterAbort::Park(failure),
            Abort::LockTableFull(error) | Abort::Host(error) => return AfterAbort::of_host(error),
        }
        AfterAbort::Again
    }
}

impl AfterAbort {
    /// Returns the step after an error of the host, which costs no message an attempt.
    fn of_host(error: InboxError) -> Self {
        if hooks::sabotage(Defect::AttemptOnHostFault) {
            return Self::Record(Failure::new(FailureKind::Other, error.to_string()));
        }
        Self::Fail(error)
    }
}

impl ConsumerInbox {
    /// Settles the front of a batch, and repeats its transaction as often as that takes. Settles at
    /// least one message, or returns an error. `size` bounds the first transaction. It sets
    /// savepoints only where messages of this consumer have failed often of late.
    pub(crate) async fn settle(
        &self,
        permit: &mut Permit,
        batch: &[Routed],
        size: usize,
    ) -> Result<Settled, InboxError> {
        let (size_max, mode) = self.sizer.next();
        let plan = Plan::new(size.min(size_max).clamp(1, batch.len()), mode);
        let span = self.receive(plan.front(batch));
        let Permit { admission, serial } = permit;
        let settled = self.repeat(admission, serial, batch, plan, span.as_ref()).await;
        if let Some(span) = span {
            if settled.is_err() {
                span.fail("host_fault");
            }
            span.end();
        }
        settled
    }

    /// Settles a leased or a replayed message: repeats its transaction under contention, and records
    /// a failure whose transaction is gone. Nothing ran where the lease is lost or it is not its
    /// turn.
    pub(crate) async fn settle_leased(
        &self,
        admission: &Admission,
        leased: &Routed,
    ) -> Result<Settled, InboxError> {
        let plan = Plan::new(1, SavepointMode::Savepoints);
        let batch = std::slice::from_ref(leased);
        self.repeat(admission, &mut SerialPermit::default(), batch, plan, None).await
    }

    /// Repeats the transaction of a batch until one commits, or its first message is recorded.
    async fn repeat(
        &self,
        admission: &Admission,
        serial: &mut SerialPermit,
        batch: &[Routed],
        mut plan: Plan,
        received: Option<&Span>,
    ) -> Result<Settled, InboxError> {
        let is_live = batch[0].is_live();
        loop {
            // Serialization may have begun since the admission. The permit is then taken only if it
            // is free: waiting would hold a place of the host.
            if is_live && !serial.is_held() {
                *serial = self.sizer.try_serial_permit();
            }
            let front = plan.front(batch);
            let abort = match self.transact(admission, front, plan.mode, received).await {
                Ok(settled) => return Ok(self.committed(batch, settled, plan.alone)),
                Err(abort) => abort,
            };
            tracing::debug!(consumer = self.name, ?plan, ?abort, "transaction aborted");
            if is_live && matches!(abort, Abort::Contention { .. }) {
                self.sizer.contended(serial);
            }
            match plan.after(abort, &self.sizer) {
                AfterAbort::Again => {}
                AfterAbort::AgainAfter(pause) => {
                    *serial = SerialPermit::default(); // others may run during the pause
                    tokio::time::sleep(pause).await;
                }
                AfterAbort::Record(failure) => {
                    let Routed { request, lease, generation, replay, .. } = &batch[0];
                    if let Some(turn) = *replay {
                        let of = (&request.message, request.version, *generation);
                        return self.record_replayed(admission, turn, of, failure).await;
                    }
                    return self.record(admission, request, *lease, *generation, failure).await;
                }
                AfterAbort::Park(failure) => {
                    let Routed { request, generation, .. } = &batch[0];
                    let message = &request.message;
                    let claim =
                        self.park_unclaimable(admission, *generation, message, &failure).await?;
                    return Ok(Settled { alone: plan.alone, ..Settled::stored(vec![claim]) });
                }
                AfterAbort::Fail(error) => return Err(error),
            }
        }
    }

    /// Reports a committed transaction: to the sizer, the trials of candidates, the relay, and the
    /// log.
    fn committed(&self, batch: &[Routed], mut settled: Settled, alone: bool) -> Settled {
        match batch[0].lease {
            Some(_) if settled.results.is_empty() => {}
            Some(_) => hooks::point("retry:commit:after"),
            None if batch[0].replay.is_some() => hooks::point("replay:commit:after"),
            None => self.learn(&settled),
        }
        settled.sampled.drain(..).for_each(|sampled| self.shadows.offer(sampled));
        self.tell_relay_of(std::mem::take(&mut settled.destinations));
        let messages = batch.iter().map(|routed| &routed.request.message);
        self.tell_failures(messages, settled.failures.drain(..));
        Settled { alone, ..settled }
    }

    /// Returns how long after its claim a transaction may begin to run further messages.
    pub(super) fn batch_duration(&self) -> Duration {
        Duration::from_millis(self.policy.batch.duration_ms)
    }

    /// Adapts the next transactions of this consumer to one that committed.
    fn learn(&self, settled: &Settled) {
        let failed =
            settled.results.iter().filter(|(_, is, _)| *is != Disposition::Completed).count();
        self.sizer.committed(settled.results.len(), failed);
        self.sizer.fitted(settled.fit, self.batch_duration());
        self.count_withdrawn(settled.fit.withdrawn);
    }

    /// Records a failure whose transaction is gone, in a new transaction and through a claim, or
    /// under the lease of its run. Writes nothing where another session has the message by then.
    pub(crate) async fn record(
        &self,
        admission: &Admission,
        request: &ClaimRequest,
        lease: Option<Lease>,
        generation: i64,
        failure: Failure,
    ) -> Result<Settled, InboxError> {
        let transaction = self.sessions.begin_admitted(admission).await?;
        let claim = match self.claim_again(&transaction, request, lease, generation).await {
            Ok(claim) => claim,
            Err(error) => {
                transaction.rollback().await;
                return Err(error);
            }
        };
        let Some(claim) = claim else {
            commit(transaction, Abort::Host).await.map_err(Abort::into_host_error)?;
            return Ok(Settled { unrecorded: Some(failure.kind), ..Settled::default() });
        };
        let message: &Message = &request.message;
        let mut completion = Completion::new(&self.policy);
        let mut results = Vec::new();
        if is_ours(&claim) {
            let version = request.version;
            let execution = Execution { version, ..Execution::of(message, lease) };
            let disposition = completion.failed(execution, &failure, &self.policy);
            results.push((0, disposition, Some(failure.kind)));
        } else if let ClaimOutcome::Waiting { is_due } = claim {
            // It ran and failed before its turn; it runs again in its turn.
            completion.waits(message, is_due);
        } else if claim == ClaimOutcome::Forgotten {
            completion.past_horizon(message, &self.policy);
        }
        enqueue_completion(&transaction, self.consumer_id, &completion).await?;
        self.due_after(&completion);
        commit(transaction, Abort::Host).await.map_err(Abort::into_host_error)?;
        self.tell_failures(std::iter::once(message), completion.recorded().into_iter());
        Ok(Settled { results, ..Settled::stored(vec![claim]) })
    }

    /// Claims a message whose first transaction is gone, or resumes its lease; returns none where
    /// the lease is lost.
    pub(super) async fn claim_again(
        &self,
        transaction: &Transaction<'_>,
        request: &ClaimRequest,
        lease: Option<Lease>,
        generation: i64,
    ) -> Result<Option<ClaimOutcome>, InboxError> {
        if let Some(lease) = lease {
            let id = &request.message.id;
            let is_ours = self.resume(transaction, generation, id, lease.epoch).await?;
            return Ok(is_ours.then_some(ClaimOutcome::New));
        }
        let claimant = Claimant { is_front: true, ..self.claimant(generation) };
        let claims = claim(transaction, claimant, &[request], InitialStatus::Completed).await?;
        Ok(claims.into_iter().next())
    }
}

/// Returns whether a failure is to be written into the row of a claim.
fn is_ours(claim: &ClaimOutcome) -> bool {
    *claim == ClaimOutcome::New || hooks::sabotage(Defect::FailureWrittenByUpsert)
}

impl Plan {
    fn new(size: usize, mode: SavepointMode) -> Self {
        Self { size, mode, alone: false, repeats: 0 }
    }

    /// Returns the messages of the next transaction. The limit of a mode is about savepoints of
    /// messages; a batch handler needs one per call.
    fn front<'a>(&self, batch: &'a [Routed]) -> &'a [Routed] {
        let takes_batches = batch[0].handler.takes_batches();
        let size = if takes_batches { self.size } else { self.mode.limit(self.size) };
        &batch[..size.min(batch.len())]
    }
}
