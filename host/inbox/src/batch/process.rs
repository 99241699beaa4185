//! The protocol: one transaction from claim to commit, and what is done when it stops.

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

/// A message with the handler it goes to.
pub(crate) struct Routed {
    pub(crate) offered: Offered,
    pub(crate) handler: Arc<dyn Handler>,
    /// Generation of the set of handlers that this one is of.
    pub(crate) generation: i64,
    /// The candidate that is tried on it afterwards, where it is in a sample.
    pub(crate) shadow: Option<Arc<Shadow>>,
}

impl Routed {
    /// The first run of a message that was claimed in this transaction.
    pub(crate) fn ran(&self) -> Ran<'_> {
        Ran { version: Some(self.handler.version()), ..Ran::not(&self.offered.message) }
    }
}

/// Leave to run transactions of this consumer, one after the other.
pub(crate) struct Admitted {
    pub(crate) admission: Admission,
    /// Where the consumer's transactions take turns, its turn: taken before the admission, so that
    /// nobody holds a place of the host while waiting for the neighbours.
    pub(crate) turn: Turn,
}

/// What became of each message that ran: its index, and the kind of its failure.
pub(crate) type Outcomes = Vec<(usize, Disposition, Option<FailureKind>)>;

/// What a committed transaction did.
#[derive(Debug)]
pub(crate) struct Settled {
    /// The answer to each claim that counts; claims behind these were withdrawn and come again.
    pub(crate) claims: Vec<Claimed>,
    /// What became of each message that ran.
    pub(crate) ran: Outcomes,
    /// The batch could only be settled message by message.
    pub(crate) alone: bool,
    /// Messages that completed, on which candidates are to be tried.
    pub(crate) sampled: Vec<Sampled>,
    /// Failures that it recorded, to be told.
    pub(crate) failures: Vec<Recorded>,
    /// How much of what it claimed it had time for.
    pub(crate) fit: Fit,
}

impl Settled {
    /// Messages that were claimed, in a transaction that ran none of them.
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

/// What a transaction has done so far.
#[derive(Default)]
pub(crate) struct Done {
    /// The answers to its claims.
    pub(crate) claims: Vec<Claimed>,
    /// What its completion has to write.
    pub(crate) completion: Completion,
    /// What became of each message that ran.
    pub(crate) ran: Outcomes,
    /// What holds back messages behind it.
    pub(crate) held: Held,
    /// Where the versions of their aggregates are, and move to.
    pub(crate) sequenced: Sequenced,
}

impl Done {
    /// A message ran and came to this end.
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

/// Why a transaction stopped. Nothing of it remains.
#[derive(Debug)]
pub(crate) enum Stop {
    /// A message failed and there was no savepoint before it.
    Failed,
    /// A message was stopped in the middle of a statement; its failure is to be recorded alone.
    Abandoned { index: usize, failure: Failure },
    /// Deadlock, serialization failure or lock timeout in a message's statement.
    Contention { failure: Failure },
    /// Something of some message was refused at the end: a deferred constraint, a result.
    AtCommit { failure: Failure },
    /// The claim's data was refused, for some message.
    AtClaim { failure: Failure },
    /// The server's lock table has no room for this many claims.
    Crowded(InboxError),
    /// The connection broke while a message ran, or several together; `among` so many, from the
    /// first, had run on it.
    Lost { index: usize, among: usize },
    /// The host's own trouble.
    Host(InboxError),
}

impl From<InboxError> for Stop {
    fn from(error: InboxError) -> Self {
        Self::Host(error)
    }
}

/// Repetitions of a message that meets contention alone, before that is an attempt.
const CONTENTION_REPEATS: u32 = 5;

impl ConsumerInbox {
    /// One transaction: claim, handle, complete, commit. What it returns as settled may be acked.
    async fn transact(
        &self,
        admitted: &mut Admitted,
        batch: &[Routed],
        mode: Mode,
    ) -> Result<Settled, Stop> {
        if !admitted.turn.is_held() {
            admitted.turn = self.pace.try_turn();
        }
        let transaction = self.sessions.begin_admitted(&admitted.admission).await?;
        let began = std::time::Instant::now();
        let ended = match self.work(&transaction, batch, mode).await {
            Ok(settled) => commit(transaction).await.map(|()| settled),
            Err(stop) => {
                // Before the rollback, which may wait for a server that is away.
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

    /// The connection broke while a message ran. It is suspect where that one broke alone; an
    /// outage says nothing of it.
    async fn lost(&self, message: &Message, among: usize, began: std::time::Instant) -> Stop {
        let message_id = message.id.clone();
        let is_alone = self.sessions.broke_alone(&self.who(&message_id), began).await;
        Stop::Host(match is_alone {
            true => InboxError::LostInHandler { message_id, among },
            false => InboxError::LostInOutage { message_id, among },
        })
    }

    /// A message among all of a tenant's.
    pub(crate) fn who(&self, message_id: &str) -> String {
        format!("{}/{message_id}", self.consumer_id)
    }

    /// Everything between BEGIN and COMMIT, in order.
    async fn work(
        &self,
        transaction: &Transaction<'_>,
        batch: &[Routed],
        mode: Mode,
    ) -> Result<Settled, Stop> {
        let claims = self.claim_live(transaction, batch).await.map_err(at_claim)?;
        // What the claim takes, it takes for all of them.
        let started = Instant::now();
        let sequenced = self.sequenced(transaction, batch, &claims).await?;
        let mut done = Done { claims, sequenced, ..Done::default() };
        let (mut sampled, mut fit) = (Vec::new(), Fit::default());
        let mut next = 0;
        while let Some(routed) = batch.get(next) {
            let index = next;
            next += 1;
            done.held.keep_back(index, &routed.offered, &mut done.claims[index]);
            self.in_sequence(&mut done, routed, index);
            if done.claims[index] != Claimed::New && !hooks::sabotage("duplicates_run") {
                continue; // a duplicate, settled by its row, or not its turn: nothing runs for it
            }
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

    /// Claim what is about to be run. Without deduplication everything is new and no row says so;
    /// the guard is set in any case, so that nothing but the completion lets the transaction
    /// commit.
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

    /// Run one claimed message; under a savepoint its failure becomes its row.
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
            // Perhaps code of a message before it did that: each runs alone.
            Ended::Failed(failure) if forgot => Err(Stop::AtCommit { failure }),
            Ended::Failed(failure)
                if mode == Mode::Optimistic && hooks::sabotage("failure_written_by_upsert") =>
            {
                Err(Stop::Abandoned { index, failure })
            }
            Ended::Failed(_) if mode == Mode::Optimistic => Err(Stop::Failed),
            Ended::Failed(failure) => {
                if let Err(error) = undo_message(tx).await {
                    // A statement of the guest ended the transaction, or took the savepoint away.
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

    /// The claim's row becomes the failure record. Where claims are not written there is none yet:
    /// the message is settled alone, with a claim that is.
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

    /// Bring the front of a batch to an end, however often its transaction has to be repeated: at
    /// least one message is settled, or the trouble is the host's. `size` bounds the first try.
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
                Stop::Failed => mode = Mode::Savepoints,
                Stop::Contention { .. } | Stop::AtClaim { .. } | Stop::AtCommit { .. }
                    if size > 1 =>
                {
                    if matches!(stop, Stop::Contention { .. }) {
                        size = size.min(self.pace.next().0);
                    } else {
                        (size, mode, alone) = (1, Mode::Savepoints, true);
                    }
                }
                Stop::Crowded(_) if size > 1 => {
                    self.pace.crowded();
                    size /= 2;
                }
                Stop::Contention { failure } if repeats >= CONTENTION_REPEATS => {
                    return self.record_alone(&admitted.admission, &batch[0], failure).await;
                }
                Stop::Contention { .. } => {
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
                // What stands before it is settled first, so that positions stay in order.
                Stop::Abandoned { index, .. } => size = index,
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

    /// Record a failure whose transaction is gone, through the claim: refused means that someone
    /// else has the message, and nothing is written.
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
            completion.waits(&routed.offered, is_due); // it failed before its turn, and runs again in its turn
        }
        complete(&transaction, self.consumer_id, &completion).await?;
        self.due_after(&completion);
        commit(transaction).await.map_err(stopped)?;
        self.tell_failures(std::iter::once(message), completion.recorded().into_iter());
        claims.truncate(1);
        Ok(Settled { ran, ..Settled::stored(claims) })
    }

    /// A message whose row PostgreSQL does not take is kept under its position.
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

    /// Write messages that are not run now, in a transaction of their own; when PostgreSQL does not
    /// take the row of one of them, in one each.
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

    /// Take back claims that were not run, from `index` on; they come again. The answer is how many
    /// were written.
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

    fn batch_duration(&self) -> Duration {
        Duration::from_millis(self.policy.batch.duration_ms)
    }
}

/// COMMIT, after the checked completion.
pub(crate) async fn commit(transaction: Transaction<'_>) -> Result<(), Stop> {
    hooks::point("inbox:commit:before");
    let answer = transaction.commit().await;
    if matches!(answer, Err(CommitError::Unknown(_))) && hooks::sabotage("lost_commit_is_done") {
        return Ok(());
    }
    answer.map_err(|error| match error {
        // Whatever its code: a deferred trigger of the tenant can raise any, and the completion
        // before has shown that the guard is gone.
        CommitError::RolledBack(error) if error.is_contention() => {
            Stop::Contention { failure: sql_failure(error) }
        }
        CommitError::RolledBack(error) => Stop::AtCommit { failure: sql_failure(error) },
        CommitError::Unknown(error) => Stop::Host(InboxError::CommitUnknown(error)),
    })?;
    hooks::point("inbox:commit:after");
    Ok(())
}

/// The end of a transaction that holds one statement of the host and no claim to run.
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

/// Back to before the message, and out of its savepoint.
pub(crate) async fn undo_message(tx: &Tx) -> Result<(), InboxError> {
    if hooks::sabotage("failed_effect_stays") && tx.error().await.is_none() {
        return host_statement(tx, "RELEASE SAVEPOINT m").await;
    }
    host_statement(tx, "ROLLBACK TO SAVEPOINT m; RELEASE SAVEPOINT m").await?;
    tx.recovered().await;
    Ok(())
}

/// A constant statement of the host.
pub(crate) async fn host_statement(tx: &Tx, text: &'static str) -> Result<(), InboxError> {
    let mut statement = tx.statement().await;
    let answer = bounded(statement.connection().execute(sqlx::raw_sql(text))).await.map(drop);
    statement.finish(answer.as_ref().err());
    Ok(answer?)
}

/// What PostgreSQL answers when its lock table is full.
const OUT_OF_MEMORY: &str = "53200";

fn at_claim(error: InboxError) -> Stop {
    match refused(&error) {
        // A CHECK without a name is a missing partition: the host's.
        Some(answer) if answer.sqlstate == "23514" && answer.constraint.is_none() => {
            Stop::Host(error)
        }
        Some(answer) if is_about_data(&answer) => Stop::AtClaim { failure: sql_failure(answer) },
        Some(answer) if answer.sqlstate == OUT_OF_MEMORY => Stop::Crowded(error),
        _ => Stop::Host(error),
    }
}

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

/// Data exceptions, constraints and limits of size: something about a message, where the statement
/// is the host's. A full disk or a timeout is not.
fn is_about_data(error: &StatementError) -> bool {
    ["22", "23", "54"].iter().any(|class| error.sqlstate.starts_with(class))
}

pub(crate) fn refused(error: &InboxError) -> Option<StatementError> {
    match error {
        InboxError::Refused(error) => oncebox_model::tx::answered(error),
        _ => None,
    }
}

fn sql_failure(error: StatementError) -> Failure {
    if error.is_contention() {
        return Failure::new(FailureKind::Contention, error.message);
    }
    Failure::new(FailureKind::Sql { sqlstate: error.sqlstate }, error.message)
}

/// The host's error for a stop of a transaction in which no handler ran.
pub(crate) fn stopped(stop: Stop) -> InboxError {
    match stop {
        Stop::Host(error) | Stop::Crowded(error) => error,
        other => InboxError::Invalid(format!("a transaction of the host alone stopped: {other:?}")),
    }
}
