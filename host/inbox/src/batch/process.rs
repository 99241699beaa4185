//! The protocol: one transaction from claim to commit, and the reaction of the host when it stops.
//!
//! A batch is the front of one partition: decoded records, each with its handler. One transaction
//! of a batch takes four steps:
//!
//! 1. `claim` inserts an inbox row for each message that has none, as `completed` at once. It also
//!    inserts a guard row. The deferred trigger of the guard row refuses every COMMIT that
//!    `complete` did not precede.
//! 2. Each new message goes to its handler, whose SQL runs in this very transaction.
//! 3. `complete` writes results and failures into the rows, and deletes the guard row.
//! 4. COMMIT makes the rows durable together with the effects of the handlers.
//!
//! A message that has a row already is a duplicate: no handler runs, and its row settles it. A new
//! message may have to wait for an earlier one of its key. Its own row settles it, and a retry
//! worker runs it later. Settled means that Kafka's offset may move past the message.
//!
//! `transact` is one such transaction, and `work` is what it does between BEGIN and COMMIT.
//! `settle` repeats transactions until the front of the batch is settled. A [`Stop`] says why a
//! transaction stopped, and `settle` chooses the next one by it.

use std::{sync::Arc, time::Duration};

use oncebox_model::{
    error::InboxError,
    handler::{DeliveryKind, Handler, Shadow},
    hooks,
    message::Message,
    outcome::{Disposition, Failure, FailureKind},
    policy::Dedup,
    tx::{StatementError, Tx, UNKNOWN_STATEMENT, bounded},
};
use sqlx::Executor;
use tokio::time::Instant;

use crate::{
    admission::{
        Admission,
        batch_sizer::{Fit, Mode, Turn},
    },
    batch::{
        call::{Ended, Job, run},
        claim::{As, Claimed, Offered, claim},
        complete::{Completion, Ran, Recorded, complete},
        group,
    },
    consumer::ConsumerInbox,
    ordering::{key_lock::Held, sequence::Sequenced},
    session::{CommitError, Transaction},
    shadow::{self, Sampled},
};

/// A message and the handler that runs it.
pub(crate) struct Routed {
    pub(crate) offered: Offered,
    pub(crate) handler: Arc<dyn Handler>,
    /// Generation of the handlers that `handler` was chosen from; a claim with a stale one is
    /// refused.
    pub(crate) generation: i64,
    /// Candidate version to be tried on the message after the commit; set where the message is in
    /// its sample.
    pub(crate) shadow: Option<Arc<Shadow>>,
}

impl Routed {
    /// Returns the first run of the message, under a claim of this transaction, by its handler's
    /// version.
    pub(crate) fn ran(&self) -> Ran<'_> {
        Ran { version: Some(self.handler.version()), ..Ran::not(&self.offered.message) }
    }
}

/// Permission to run transactions of this consumer, one after the other.
pub(crate) struct Admitted {
    /// Permit of the host's scheduler.
    pub(crate) admission: Admission,
    /// Serial permit of the consumer, held while its transactions on this host run one at a time.
    /// It is taken before the admission. Otherwise a consumer that waits for its turn would hold a
    /// place of the host.
    pub(crate) turn: Turn,
}

/// Result of each message that ran: its index in the batch, its disposition, the kind of its
/// failure.
pub(crate) type Outcomes = Vec<(usize, Disposition, Option<FailureKind>)>;

/// Result of a committed transaction.
#[derive(Debug)]
pub(crate) struct Settled {
    /// Answers to the claims that count, from the first message of the batch on. Later claims were
    /// withdrawn, and their messages come again.
    pub(crate) claims: Vec<Claimed>,
    /// Result of each message that ran.
    pub(crate) ran: Outcomes,
    /// True where one message was settled after a larger transaction failed at its claim or its
    /// COMMIT. The messages behind it are then settled one by one too.
    pub(crate) alone: bool,
    /// Completed messages, to be tried on shadow candidates after the commit.
    pub(crate) sampled: Vec<Sampled>,
    /// Failures in the committed rows, to be counted and logged after the commit.
    pub(crate) failures: Vec<Recorded>,
    /// Share of the claimed messages that it had time for, which bounds the next batch.
    pub(crate) fit: Fit,
}

impl Settled {
    /// Returns the result of a transaction that claimed messages and ran none of them.
    pub(crate) fn stored(claims: Vec<Claimed>) -> Self {
        Self {
            claims,
            ran: Vec::new(),
            alone: false,
            sampled: Vec::new(),
            failures: Vec::new(),
            fit: Fit::default(),
        }
    }
}

/// State of an open transaction.
#[derive(Default)]
pub(crate) struct Done {
    /// Answers to the claims, by index in the batch.
    pub(crate) claims: Vec<Claimed>,
    /// Rows that `complete` has to write, and claims that it has to withdraw.
    pub(crate) completion: Completion,
    /// Result of each message that ran.
    pub(crate) ran: Outcomes,
    /// Ordering keys of messages that failed; they hold back later messages of their keys.
    pub(crate) held: Held,
    /// Versions of the aggregates, moved forward as messages of this transaction complete.
    pub(crate) sequenced: Sequenced,
}

impl Done {
    /// Records the result of a message that ran. An open failure blocks the message's key; a
    /// completion moves its aggregate.
    pub(crate) fn ended(
        &mut self,
        index: usize,
        routed: &Routed,
        disposition: Disposition,
        failure: Option<FailureKind>,
    ) {
        self.held.ended(index, &routed.offered, disposition);
        if disposition == Disposition::Completed {
            self.sequenced.completed(&routed.offered.message);
        }
        self.ran.push((index, disposition, failure));
    }
}

/// Reason why a transaction stopped. Nothing of the transaction remains, unless the answer to its
/// COMMIT was lost ([`InboxError::CommitUnknown`]); then the next claim finds out.
#[derive(Debug)]
pub(crate) enum Stop {
    /// Failure of a message without a savepoint before it.
    Failed,
    /// Failure of one message that this transaction cannot record. A statement was cut off, the
    /// savepoint is gone, or claims are not written. `settle` records it in another transaction.
    Abandoned { index: usize, failure: Failure },
    /// Deadlock, serialization failure, lock timeout or full lock table, in a message's statement
    /// or at COMMIT.
    Contention { failure: Failure },
    /// Failure that cannot be ascribed to one message of several: a deferred constraint at COMMIT,
    /// a refused result, a deadline of a common call.
    AtCommit { failure: Failure },
    /// Refusal of the data of some message by the claim.
    AtClaim { failure: Failure },
    /// Lock table of the server without room for the locks of this many claims.
    Crowded(InboxError),
    /// Connection that broke while a message ran, or several in one call. `index` is the message,
    /// or the first of them. The first `among` messages of the batch had run on the connection.
    Lost { index: usize, among: usize },
    /// Error of the host, its database or a connection; it costs no message an attempt.
    Host(InboxError),
}

impl From<InboxError> for Stop {
    fn from(error: InboxError) -> Self {
        Self::Host(error)
    }
}

/// Repetitions of a message alone that meets contention, before the contention counts as a failed
/// attempt.
const CONTENTION_REPEATS: u32 = 5;

impl ConsumerInbox {
    /// Runs one transaction: claim, handle, complete, commit. The messages that it returns as
    /// settled may be acked.
    async fn transact(
        &self,
        admitted: &mut Admitted,
        batch: &[Routed],
        mode: Mode,
    ) -> Result<Settled, Stop> {
        // Serialization may have begun since the admission. The turn is then taken only if it is
        // free: waiting would hold a place of the host.
        if !admitted.turn.is_held() {
            admitted.turn = self.pace.try_turn();
        }
        let transaction = self.sessions.begin_admitted(&admitted.admission).await?;
        let began = std::time::Instant::now();
        let ended = match self.work(&transaction, batch, mode).await {
            Ok(settled) => commit(transaction).await.map(|()| settled),
            Err(stop) => {
                // The check comes before the rollback, which may wait for a server that is away.
                let stop = match stop {
                    Stop::Lost { index, among } => {
                        self.lost(&batch[index].offered.message, among, began).await
                    }
                    stop => stop,
                };
                transaction.rollback().await;
                Err(stop)
            }
        };
        if matches!(ended, Err(Stop::Contention { .. })) {
            self.pace.contended(&admitted.turn);
        }
        ended
    }

    /// Returns the stop for a connection that broke while a message ran. The message is suspect
    /// where this connection broke alone; an outage says nothing about it.
    async fn lost(&self, message: &Message, among: usize, began: std::time::Instant) -> Stop {
        let message_id = message.id.clone();
        let is_alone = self.sessions.broke_alone(&self.who(&message_id), began).await;
        Stop::Host(match is_alone {
            true => InboxError::LostInHandler { message_id, among },
            false => InboxError::LostInOutage { message_id, among },
        })
    }

    /// Returns a name of the message that is unique among all messages of the tenant.
    pub(crate) fn who(&self, message_id: &str) -> String {
        format!("{}/{message_id}", self.consumer_id)
    }

    /// Runs everything between BEGIN and COMMIT, in order.
    async fn work(
        &self,
        transaction: &Transaction<'_>,
        batch: &[Routed],
        mode: Mode,
    ) -> Result<Settled, Stop> {
        let claims = self.claim_live(transaction, batch).await.map_err(at_claim)?;
        // The time limit begins after the claim, since the claim takes its time for all messages at
        // once.
        let started = Instant::now();
        let sequenced = self.sequenced(transaction, batch, &claims).await?;
        let mut done = Done { claims, sequenced, ..Done::default() };
        let (mut sampled, mut fit) = (Vec::new(), Fit::default());
        let mut next = 0;
        while let Some(routed) = batch.get(next) {
            let index = next;
            next += 1;
            // A new message does not run where an earlier message of its key failed, or where the
            // version of its aggregate is not next.
            done.held.keep_back(index, &routed.offered, &mut done.claims[index]);
            self.in_sequence(&mut done, routed, index);
            if done.claims[index] != Claimed::New && !hooks::sabotage("duplicates_run") {
                continue; // a duplicate, settled by its row, or not its turn: nothing runs for it
            }
            // At least one message runs, however short the limit.
            if !done.ran.is_empty() && started.elapsed() >= self.batch_duration() {
                fit =
                    Fit { is_cut: true, withdrawn: self.withdraw(&mut done, batch, index), ..fit };
                break;
            }
            if routed.handler.takes_batches() {
                let (group, behind) = group::group(batch, &done.claims, index);
                self.handle_together(transaction.tx(), batch, group, &mut done).await?;
                next = behind;
                continue;
            }
            let (disposition, kind) = self
                .handle(transaction, routed, index, mode, &mut done.completion, &mut sampled)
                .await?;
            done.ended(index, routed, disposition, kind);
        }
        fit =
            Fit { ran: done.ran.len(), settled: done.claims.len(), took: started.elapsed(), ..fit };
        // A row that waits is completed too: it gets the payload and the time that its later run
        // needs.
        for (routed, claimed) in batch.iter().zip(&done.claims) {
            match claimed {
                Claimed::Waiting { is_due } => done.completion.waits(&routed.offered, *is_due),
                Claimed::Gap => {
                    self.waits_for_gap(&routed.offered, &done.sequenced, &mut done.completion)
                }
                _ => {}
            }
        }
        self.move_sequence(transaction, &done.sequenced).await.map_err(at_completion)?;
        complete(transaction, self.consumer_id, &done.completion).await.map_err(at_completion)?;
        self.due_after(&done.completion);
        Ok(Settled {
            claims: done.claims,
            ran: done.ran,
            alone: false,
            sampled,
            failures: done.completion.recorded(),
            fit,
        })
    }

    /// Claims the messages that this transaction is about to run. With `dedup = "off"` all count as
    /// new and no row is written. The guard row is inserted in either case, so that no COMMIT
    /// succeeds without `complete`.
    async fn claim_live(
        &self,
        transaction: &Transaction<'_>,
        batch: &[Routed],
    ) -> Result<Vec<Claimed>, InboxError> {
        let claimant = self.claimant(batch[0].generation);
        if self.policy.dedup == Dedup::Off {
            claim(transaction, claimant, &[], As::Completed).await?;
            return Ok(vec![Claimed::New; batch.len()]);
        }
        let offered: Vec<_> = batch.iter().map(|routed| &routed.offered).collect();
        claim(transaction, claimant, &offered, As::Completed).await
    }

    /// Runs one claimed message and adds its result to `completion`. With savepoints a failure is
    /// rolled back and becomes the message's row; without them it stops the transaction.
    async fn handle(
        &self,
        transaction: &Transaction<'_>,
        routed: &Routed,
        index: usize,
        mode: Mode,
        completion: &mut Completion,
        sampled: &mut Vec<Sampled>,
    ) -> Result<(Disposition, Option<FailureKind>), Stop> {
        let tx = transaction.tx();
        if mode == Mode::Savepoints {
            host_statement(tx, "SAVEPOINT m").await?;
        }
        let watch = match routed.shadow {
            Some(_) => Some(shadow::begin(tx).await?),
            None => None,
        };
        hooks::point("inbox:handle:before");
        let began = Instant::now();
        let ended = run(self.job(routed, 1, DeliveryKind::Live), tx).await;
        self.count_duration(&routed.offered.message, began.elapsed());
        hooks::point("inbox:handle:after");
        let forgot = tx.has_forgotten().await;
        match ended {
            Ended::Ok(result) => {
                if let (Some(shadow), Some(watch)) = (&routed.shadow, watch) {
                    let trace = watch.end(transaction).await.map_err(at_completion)?;
                    sampled.push(Sampled::new(
                        shadow,
                        &routed.offered.message,
                        routed.generation,
                        result.clone(),
                        trace,
                    ));
                }
                if mode == Mode::Savepoints {
                    host_statement(tx, "RELEASE SAVEPOINT m").await?;
                }
                completion.succeeded(routed.ran(), result, &self.policy);
                Ok((Disposition::Completed, None))
            }
            // The session lost its prepared statements, perhaps to code of an earlier message.
            // `AtCommit` makes each message run alone.
            Ended::Failed(failure) if forgot => Err(Stop::AtCommit { failure }),
            Ended::Failed(failure)
                if mode == Mode::Optimistic && hooks::sabotage("failure_written_by_upsert") =>
            {
                Err(Stop::Abandoned { index, failure })
            }
            Ended::Failed(_) if mode == Mode::Optimistic => Err(Stop::Failed),
            Ended::Failed(failure) => {
                if let Err(error) = undo_message(tx).await {
                    // A statement of the guest ended the transaction or removed the savepoint.
                    let answered = refused(&error).is_some();
                    return Err(if answered {
                        Stop::Abandoned { index, failure }
                    } else {
                        Stop::Host(error)
                    });
                }
                hooks::point("inbox:fail:after");
                let disposition = self.record_failure(routed, index, &failure, completion)?;
                Ok((disposition, Some(failure.kind)))
            }
            Ended::Contention(failure) => Err(Stop::Contention { failure }),
            Ended::Abandoned(failure) => Err(Stop::Abandoned { index, failure }),
            Ended::Lost => Err(Stop::Lost { index, among: index + 1 }),
            Ended::Stopped(why) => Err(Stop::Host(InboxError::Stopped { why })),
        }
    }

    /// Turns the row of a claim into the record of its failure. With `dedup = "off"` there is no
    /// row yet. The message is then settled alone, through a claim that writes one.
    pub(crate) fn record_failure(
        &self,
        routed: &Routed,
        index: usize,
        failure: &Failure,
        completion: &mut Completion,
    ) -> Result<Disposition, Stop> {
        if self.policy.dedup == Dedup::Off {
            return Err(Stop::Abandoned { index, failure: failure.clone() });
        }
        Ok(completion.failed(routed.ran(), failure, &self.policy))
    }

    /// Settles the front of a batch, and repeats its transaction as often as that takes. Settles at
    /// least one message, or returns an error. `size` bounds the first transaction. It sets
    /// savepoints only where messages of this consumer have failed often of late.
    pub(crate) async fn settle(
        &self,
        admitted: &mut Admitted,
        batch: &[Routed],
        size: usize,
    ) -> Result<Settled, InboxError> {
        let (pace, mut mode) = self.pace.next();
        let mut size = size.min(pace).clamp(1, batch.len());
        let mut repeats = 0;
        let mut alone = false;
        loop {
            // The limit of a mode is about savepoints of messages. A batch handler needs one per
            // call.
            let limit = if batch[0].handler.takes_batches() { size } else { mode.limit(size) };
            let stop = match self.transact(admitted, &batch[..limit.min(batch.len())], mode).await {
                Ok(mut settled) => {
                    settled.alone = alone;
                    settled.sampled.drain(..).for_each(|sampled| self.shadows.offer(sampled));
                    let failed = settled
                        .ran
                        .iter()
                        .filter(|(_, disposition, _)| *disposition != Disposition::Completed)
                        .count();
                    self.pace.committed(settled.ran.len(), failed);
                    self.pace.fitted(settled.fit, self.batch_duration());
                    self.count_withdrawn(settled.fit.withdrawn);
                    self.tell_failures(
                        batch.iter().map(|routed| &routed.offered.message),
                        settled.failures.drain(..),
                    );
                    return Ok(settled);
                }
                Err(stop) => stop,
            };
            tracing::debug!(consumer = self.name, size, ?mode, ?stop, "a transaction stopped");
            match stop {
                // Again, with a savepoint before each message.
                Stop::Failed => mode = Mode::Savepoints,
                Stop::Contention { .. } | Stop::AtClaim { .. } | Stop::AtCommit { .. }
                    if size > 1 =>
                {
                    // `transact` has reported contention: transactions of this consumer take turns
                    // from then on, and shrink where that does not help. A refused claim or COMMIT
                    // does not name its message: from here each is settled alone.
                    if matches!(stop, Stop::Contention { .. }) {
                        size = size.min(self.pace.next().0);
                    } else {
                        (size, mode, alone) = (1, Mode::Savepoints, true);
                    }
                }
                // Fewer claims need fewer locks.
                Stop::Crowded(_) if size > 1 => {
                    self.pace.crowded();
                    size /= 2;
                }
                // From here the transaction holds one message, so its failure is that message's.
                Stop::Contention { failure } if repeats >= CONTENTION_REPEATS => {
                    return self.record_alone(&admitted.admission, &batch[0], failure).await;
                }
                Stop::Contention { .. } => {
                    // The turn is given up, so that other transactions of the consumer run during
                    // the pause. The pause is random, so that two opponents do not meet again.
                    repeats += 1;
                    admitted.turn = Turn::default();
                    tokio::time::sleep(Duration::from_millis(rand::random_range(
                        1..=10 << repeats,
                    )))
                    .await;
                }
                Stop::AtCommit { failure } => {
                    return self.record_alone(&admitted.admission, &batch[0], failure).await;
                }
                // PostgreSQL refuses the row itself, so no claim can carry a failure record.
                Stop::AtClaim { failure } => {
                    let Routed { offered, generation, .. } = &batch[0];
                    let claimed = self
                        .park_unclaimable(
                            &admitted.admission,
                            *generation,
                            &offered.message,
                            &failure,
                        )
                        .await?;
                    return Ok(Settled { alone, ..Settled::stored(vec![claimed]) });
                }
                Stop::Abandoned { index: 0, failure } => {
                    return self.record_alone(&admitted.admission, &batch[0], failure).await;
                }
                // The messages before it are settled first, so that positions stay in order.
                Stop::Abandoned { index, .. } => size = index,
                // `transact` has turned this stop into an error of the host already.
                Stop::Lost { index, among } => {
                    return Err(InboxError::LostInHandler {
                        message_id: batch[index].offered.message.id.clone(),
                        among,
                    });
                }
                Stop::Host(error) if hooks::sabotage("attempt_on_host_fault") => {
                    return self
                        .record_alone(
                            &admitted.admission,
                            &batch[0],
                            Failure::new(FailureKind::Other, error.to_string()),
                        )
                        .await;
                }
                Stop::Host(error) | Stop::Crowded(error) => return Err(error),
            }
        }
    }

    /// Records a failure whose transaction is gone, in a new transaction and through a claim. Where
    /// another session has claimed the message by then, nothing is written.
    async fn record_alone(
        &self,
        admission: &Admission,
        routed: &Routed,
        failure: Failure,
    ) -> Result<Settled, InboxError> {
        let transaction = self.sessions.begin_admitted(admission).await?;
        let message = &routed.offered.message;
        let mut claims = claim(
            &transaction,
            self.claimant(routed.generation),
            &[&routed.offered],
            As::Completed,
        )
        .await?;
        let mut completion = Completion::default();
        let mut ran = Vec::new();
        if claims[0] == Claimed::New || hooks::sabotage("failure_written_by_upsert") {
            let disposition = completion.failed(routed.ran(), &failure, &self.policy);
            ran.push((0, disposition, Some(failure.kind)));
        } else if let Claimed::Waiting { is_due } = claims[0] {
            // It ran and failed before its turn; it runs again in its turn.
            completion.waits(&routed.offered, is_due);
        }
        complete(&transaction, self.consumer_id, &completion).await?;
        self.due_after(&completion);
        commit(transaction).await.map_err(stopped)?;
        self.tell_failures(std::iter::once(message), completion.recorded().into_iter());
        claims.truncate(1);
        Ok(Settled { ran, ..Settled::stored(claims) })
    }

    /// Parks a message whose row PostgreSQL refuses, under its position in Kafka instead of its id.
    async fn park_unclaimable(
        &self,
        admission: &Admission,
        generation: i64,
        message: &Message,
        failure: &Failure,
    ) -> Result<Claimed, InboxError> {
        let parked = crate::partition::parking::unclaimable(message, failure);
        let claims = self
            .store_together(admission, generation, std::slice::from_ref(&parked), As::Parked)
            .await
            .map_err(stopped)?;
        claims
            .into_iter()
            .next()
            .ok_or_else(|| InboxError::Invalid("a claim of one message had no answer".to_owned()))
    }

    /// Stores messages that do not run yet, in a transaction of their own. Where PostgreSQL refuses
    /// the row of one of them, each gets its own transaction.
    pub(crate) async fn store(
        &self,
        admission: &Admission,
        generation: i64,
        offered: &[Offered],
        r#as: As,
    ) -> Result<Vec<Claimed>, InboxError> {
        match self.store_together(admission, generation, offered, r#as).await {
            Err(Stop::AtClaim { .. }) => {}
            answer => return answer.map_err(stopped),
        }
        let mut claims = Vec::with_capacity(offered.len());
        for one in offered {
            match self.store_together(admission, generation, std::slice::from_ref(one), r#as).await
            {
                Err(Stop::AtClaim { failure }) => claims.push(
                    self.park_unclaimable(admission, generation, &one.message, &failure).await?,
                ),
                answer => claims.extend(answer.map_err(stopped)?),
            }
        }
        Ok(claims)
    }

    /// Stores messages in one transaction, in the state that `as` names. New messages to be run
    /// wake the retry workers after the commit.
    async fn store_together(
        &self,
        admission: &Admission,
        generation: i64,
        offered: &[Offered],
        r#as: As,
    ) -> Result<Vec<Claimed>, Stop> {
        let transaction = self.sessions.begin_admitted(admission).await?;
        let claims = match claim(
            &transaction,
            self.claimant(generation),
            &offered.iter().collect::<Vec<_>>(),
            r#as,
        )
        .await
        {
            Ok(claims) => claims,
            Err(error) => {
                transaction.rollback().await;
                return Err(at_claim(error));
            }
        };
        // `no_route` of the policy may skip or reject a message instead of parking it.
        if r#as == As::Parked
            && let Err(error) = self.settle_unrouted(&transaction, offered, &claims).await
        {
            transaction.rollback().await;
            return Err(Stop::Host(error));
        }
        hooks::point("inbox:park:before");
        commit(transaction).await?;
        hooks::point("inbox:park:after");
        match r#as {
            As::Received => self.due.now(),
            As::Parked => {
                let kept =
                    offered.iter().zip(&claims).filter(|(_, claimed)| **claimed == Claimed::New);
                kept.for_each(|(offered, _)| self.count_kept(offered));
            }
            As::Completed => {}
        }
        Ok(claims)
    }

    /// Returns the call of a message's handler for one attempt.
    pub(crate) fn job<'a>(
        &'a self,
        routed: &'a Routed,
        attempt: u32,
        kind: DeliveryKind,
    ) -> Job<'a> {
        Job {
            tenant: &self.tenant,
            consumer: &self.name,
            handler: &routed.handler,
            message: &routed.offered.message,
            attempt,
            kind,
            deadline: self.deadline(&routed.handler),
        }
    }

    /// Withdraws the claims from `index` on, which did not run; their messages come again. Returns
    /// how many rows this takes back.
    fn withdraw(&self, done: &mut Done, batch: &[Routed], index: usize) -> usize {
        let mut withdrawn = 0;
        for (routed, claimed) in batch.iter().zip(&done.claims).skip(index) {
            let written = claimed.is_ours() && self.policy.dedup == Dedup::Inbox;
            if written && !hooks::sabotage("withdrawn_claims_stay") {
                done.completion.withdraw(&routed.offered.message.id);
                withdrawn += 1;
            }
        }
        done.claims.truncate(index);
        withdrawn
    }

    /// Returns how long after its claim a transaction may begin to run further messages.
    fn batch_duration(&self) -> Duration {
        Duration::from_millis(self.policy.batch.duration_ms)
    }
}

/// Commits a transaction whose completion is written. Turns a refused COMMIT into the stop that it
/// means; a lost answer is [`InboxError::CommitUnknown`], neither done nor failed.
pub(crate) async fn commit(transaction: Transaction<'_>) -> Result<(), Stop> {
    hooks::point("inbox:commit:before");
    let answer = transaction.commit().await;
    if matches!(answer, Err(CommitError::Unknown(_))) && hooks::sabotage("lost_commit_is_done") {
        return Ok(());
    }
    answer.map_err(|error| match error {
        // A refusal is the messages', whatever its SQLSTATE: a deferred trigger of the tenant can
        // raise any. It cannot be the guard's, since the completion has shown that the guard row is
        // gone.
        CommitError::RolledBack(error) if error.is_contention() => {
            Stop::Contention { failure: sql_failure(error) }
        }
        CommitError::RolledBack(error) => Stop::AtCommit { failure: sql_failure(error) },
        CommitError::Unknown(error) => Stop::Host(InboxError::CommitUnknown(error)),
    })?;
    hooks::point("inbox:commit:after");
    Ok(())
}

/// Ends a transaction that holds one statement of the host and no claim to run. Commits it where
/// the statement succeeded, and rolls it back where it failed.
pub(crate) async fn commit_host<T>(
    transaction: Transaction<'_>,
    answer: Result<T, sqlx::Error>,
) -> Result<T, InboxError> {
    match answer {
        Ok(answer) => transaction.commit().await.map(|()| answer).map_err(|error| match error {
            CommitError::RolledBack(error) => InboxError::Invalid(error.message),
            CommitError::Unknown(error) => InboxError::CommitUnknown(error),
        }),
        Err(error) => {
            transaction.rollback().await;
            Err(error.into())
        }
    }
}

/// Rolls the transaction back to before the message, and releases the message's savepoint.
pub(crate) async fn undo_message(tx: &Tx) -> Result<(), InboxError> {
    if hooks::sabotage("failed_effect_stays") && tx.error().await.is_none() {
        return host_statement(tx, "RELEASE SAVEPOINT m").await;
    }
    host_statement(tx, "ROLLBACK TO SAVEPOINT m; RELEASE SAVEPOINT m").await?;
    tx.recovered().await;
    Ok(())
}

/// Executes a constant statement of the host in the transaction.
pub(crate) async fn host_statement(tx: &Tx, text: &'static str) -> Result<(), InboxError> {
    let mut statement = tx.statement().await;
    let answer = bounded(statement.connection().execute(sqlx::raw_sql(text))).await.map(drop);
    statement.finish(answer.as_ref().err());
    Ok(answer?)
}

/// SQLSTATE of a full lock table.
const OUT_OF_MEMORY: &str = "53200";

/// Classifies an error of the claim: data of a message, a full lock table, or a fault of the host.
fn at_claim(error: InboxError) -> Stop {
    match refused(&error) {
        // A check violation without a constraint's name is a missing time partition: the host's
        // fault.
        Some(answer) if answer.sqlstate == "23514" && answer.constraint.is_none() => {
            Stop::Host(error)
        }
        Some(answer) if is_about_data(&answer) => Stop::AtClaim { failure: sql_failure(answer) },
        Some(answer) if answer.sqlstate == OUT_OF_MEMORY => Stop::Crowded(error),
        _ => Stop::Host(error),
    }
}

/// Classifies an error of the completion: data of a message, prepared statements that guest code
/// deallocated, or a fault of the host.
pub(crate) fn at_completion(error: InboxError) -> Stop {
    match refused(&error) {
        Some(answer) if is_about_data(&answer) => {
            Stop::AtCommit { failure: Failure::new(FailureKind::BadResult, answer.message) }
        }
        Some(StatementError { sqlstate, message, .. }) if sqlstate == UNKNOWN_STATEMENT => {
            let text = format!(
                "code that ran for this message deallocated what was prepared on its session: \
                    {message}"
            );
            Stop::AtCommit { failure: Failure::new(FailureKind::Sql { sqlstate }, text) }
        }
        _ => Stop::Host(error),
    }
}

/// Returns whether an error of a host's statement is about a message: a data exception, a
/// constraint, a limit of size. A full disk or a timeout is not.
fn is_about_data(error: &StatementError) -> bool {
    ["22", "23", "54"].iter().any(|class| error.sqlstate.starts_with(class))
}

/// Returns PostgreSQL's answer where it refused a statement; none where the error is another one.
pub(crate) fn refused(error: &InboxError) -> Option<StatementError> {
    match error {
        InboxError::Refused(error) => oncebox_model::tx::answered(error),
        _ => None,
    }
}

/// Returns the failure that PostgreSQL's answer means: contention, or its SQLSTATE.
fn sql_failure(error: StatementError) -> Failure {
    if error.is_contention() {
        return Failure::new(FailureKind::Contention, error.message);
    }
    Failure::new(FailureKind::Sql { sqlstate: error.sqlstate }, error.message)
}

/// Returns the host's error for a stop of a transaction in which no handler ran.
pub(crate) fn stopped(stop: Stop) -> InboxError {
    match stop {
        Stop::Host(error) | Stop::Crowded(error) => error,
        other => InboxError::Invalid(format!("a transaction of the host alone stopped: {other:?}")),
    }
}
