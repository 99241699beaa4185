//! The protocol: transactions from claim to commit, until the front of a batch is settled.
//!
//! A batch is the messages at the front of one Kafka partition: decoded, each with its handler, a
//! WebAssembly component that the tenant uploaded. One transaction of a batch takes four steps:
//!
//! 1. `claim` inserts an inbox row for each message that has none, as `completed` at once, so that
//!    a message that succeeds costs no second write. It also inserts a guard row. The deferred
//!    trigger of the guard row refuses every COMMIT that `complete` did not precede.
//! 2. Each new message goes to its handler, whose SQL runs in this very transaction.
//! 3. `complete` writes results and failures into the rows, and deletes the guard row.
//! 4. COMMIT makes the rows durable together with the effects of the handlers.
//!
//! A message that has a row already is a duplicate: no handler runs, and its row settles it. A new
//! message may have to wait for an earlier one of its ordering key. Its own row settles it, and a
//! retry worker runs it later. Settled means that Kafka's offset may move past the message: it is
//! completed, or its row says what happens next.
//!
//! A retry worker runs a message from its row. It first leases the message: it writes into the row,
//! and commits, that it has the message until a certain time. The leased message is then a batch of
//! one, whose transaction begins with `resume` instead of `claim`. A replayed message is one, too;
//! [`replayed`](super::replayed) has its begin and its end.
//!
//! A transaction that cannot commit ends with an [`Abort`], the reason. Nothing of it remains, and
//! it is repeated with fewer messages, later or with savepoints, as [`Plan::after`] says, until the
//! front of the batch is settled. An error of the host, such as a lost connection, ends that: the
//! partition's worker offers the messages again. So it does where the answer to a COMMIT is lost,
//! and the next claim finds out: the rows are there, or they are not.

use oncebox_model::{
    error::InboxError,
    hooks::{self, Defect},
    outcome::Disposition,
    outgoing::Outbox,
    trace::{self, Span},
};
use tokio::time::{Duration, Instant};

use crate::{
    admission::{
        Admission,
        batch_sizer::{SavepointMode, SerialPermit},
    },
    batch::{
        abort::Abort,
        call::{Call, CallResult, call},
        outgoing::outbox,
        plan::{AfterAbort, Plan},
        replayed::replay_outbox,
        routed::Routed,
        settled::Settled,
        state::{BatchState, Next, refused_of},
        statements::{
            at_completion, refused, release_savepoint, rollback, set_savepoint, sql_failure,
            undo_message,
        },
    },
    consumer::ConsumerInbox,
    session::{CommitError, Transaction},
    shadow,
    spans::RunSpans,
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

    /// Runs one transaction: claim, handle, complete, commit. The messages that it returns as
    /// settled may be acked. The caller got the `admission`, the host's permission to have a
    /// transaction open.
    async fn transact(
        &self,
        admission: &Admission,
        batch: &[Routed],
        mode: SavepointMode,
        received: Option<&Span>,
    ) -> Result<Settled, Abort> {
        let spans = RunSpans::of_batch(received.map(Span::context));
        let transaction = self.sessions.begin_with_first(admission).await?;
        match self.run(&transaction, batch, mode, spans).await {
            Ok(mut settled) => {
                let span = settled.spans.settle(self, batch);
                let commit = commit(transaction, refused_of(batch, &settled.results));
                let committed = trace::within(span.as_ref(), commit).await;
                settled.spans.ended(self, batch, span, &committed);
                committed.map(|()| settled)
            }
            Err(abort) => rollback(transaction, abort).await,
        }
    }

    /// Runs everything between BEGIN and COMMIT, in order.
    async fn run(
        &self,
        transaction: &Transaction<'_>,
        batch: &[Routed],
        mode: SavepointMode,
        spans: RunSpans,
    ) -> Result<Settled, Abort> {
        if let Some(end) = self.begin_replay(transaction, batch).await? {
            return Ok(Settled::replayed(end)); // it does not run, and nothing is written
        }
        let Some(mut state) = BatchState::open(self, transaction, batch).await? else {
            return Ok(Settled::default()); // the lease is lost, or was given back
        };
        state.spans = spans;
        while let Some(next) = state.next() {
            self.handle_next(transaction, &mut state, next, mode).await?;
        }
        state.complete(transaction).await
    }

    /// Runs the messages that are next: one, or those of one batch handler in one call.
    pub(crate) async fn handle_next(
        &self,
        transaction: &Transaction<'_>,
        state: &mut BatchState<'_>,
        next: Next,
        mode: SavepointMode,
    ) -> Result<(), Abort> {
        match next {
            Next::One(index) => self.handle(transaction, state, index, mode).await,
            Next::Group(group) => self.handle_group(transaction, state, group).await,
        }
    }

    /// Runs one message. With [`SavepointMode::Savepoints`], the message's effects are rolled back
    /// where it fails, and the failure goes into its row. With [`SavepointMode::Optimistic`], which
    /// saves two statements for each message, a failure aborts the transaction. [`CallResult`] and
    /// [`Abort`] describe the cases.
    async fn handle(
        &self,
        transaction: &Transaction<'_>,
        state: &mut BatchState<'_>,
        index: usize,
        mode: SavepointMode,
    ) -> Result<(), Abort> {
        let (tx, routed) = (transaction.tx(), &state.batch[index]);
        let may_run_ahead = state.may_run_ahead(index, mode);
        if !may_run_ahead || state.writes_cancellable(index) {
            self.catch_up(transaction, state).await?;
        }
        state.write_cancellable(transaction, index).await?;
        set_savepoint(tx, mode).await?;
        // A candidate version may be tried on this message after the commit; the changes that the
        // live version makes are then captured, to compare them.
        let watch = shadow::watch(tx, routed.shadow.is_some()).await?;
        let (outbox, cancels) =
            shadow::recorded(self.outbox(transaction, routed), routed.shadow.is_some());
        routed.point_before_call(); // where tests kill the process
        let began = Instant::now();
        let span = self.process_span(routed, &state.spans);
        let called = call(Call { may_run_ahead, ..self.call(routed, &outbox) }, tx);
        let result = trace::within(span.as_ref(), called).await;
        let took = began.elapsed();
        self.count_duration(&routed.request.message, took);
        state.spans.ran(index, (span, took), &result);
        routed.point_after_call();
        match result {
            CallResult::Ok(output) => {
                let live = (&output, cancels.taken());
                state.sample(transaction, index, watch, live).await.map_err(at_completion)?;
                if routed.lease.is_none() {
                    release_savepoint(tx, mode).await?; // COMMIT releases that of a leased message
                }
                state.succeeded(index, output);
                if may_run_ahead {
                    state.ran_ahead(index);
                }
                Ok(())
            }
            // The session lost its prepared statements, perhaps to code of an earlier message.
            // `AtCommit` makes each message run alone.
            CallResult::Failed(failure) if tx.has_forgotten().await => {
                Err(Abort::AtCommit { failure })
            }
            CallResult::Failed(failure) if mode == SavepointMode::Optimistic => {
                Err(Abort::without_savepoint(index, failure))
            }
            CallResult::Failed(failure) => match undo_message(tx).await {
                Ok(()) => {
                    routed.point_after_failure();
                    state.failed(index, &failure)
                }
                // A statement of the guest ended the transaction or removed the savepoint.
                Err(error) if refused(&error).is_some() => Err(Abort::Abandoned { index, failure }),
                Err(error) => Err(Abort::Host(error)),
            },
            CallResult::Contention(failure) => Err(Abort::Contention { failure }),
            CallResult::Abandoned(failure) => Err(Abort::Abandoned { index, failure }),
            CallResult::ConnectionLost => Err(state.connection_lost(index, index + 1).await),
            CallResult::Stopped(why) => Err(Abort::stopped(why)),
        }
    }

    /// Adapts the next transactions of this consumer to one that committed.
    fn learn(&self, settled: &Settled) {
        let failed =
            settled.results.iter().filter(|(_, is, _)| *is != Disposition::Completed).count();
        self.sizer.committed(settled.results.len(), failed);
        self.sizer.fitted(settled.fit, self.batch_duration());
        self.count_withdrawn(settled.fit.withdrawn);
    }

    /// Returns how long after its claim a transaction may begin to run further messages.
    pub(super) fn batch_duration(&self) -> Duration {
        Duration::from_millis(self.policy.batch.duration_ms)
    }

    /// Returns the call of a message's handler.
    pub(crate) fn call<'a>(&'a self, routed: &'a Routed, outbox: &'a Outbox) -> Call<'a> {
        let (attempt, kind) = routed.attempt();
        Call {
            tenant: &self.tenant,
            consumer: &self.name,
            handler: &routed.handler,
            message: &routed.request.message,
            attempt,
            kind,
            deadline: self.deadline(&routed.handler),
            outbox,
            may_run_ahead: false,
        }
    }

    /// Returns what the handler of a message may do with the consumer's outgoing messages.
    pub(crate) fn outbox(&self, transaction: &Transaction<'_>, routed: &Routed) -> Outbox {
        let outbox = outbox(&self.sessions, self.consumer_id, transaction, &*routed.handler);
        match routed.replay {
            Some(turn) => replay_outbox(outbox, turn.emit),
            None => outbox,
        }
    }
}

/// Commits a transaction whose completion is written or enqueued. Turns a refused COMMIT into the
/// abort that it means, and a refused completion into that of `refused`; a lost answer is
/// [`InboxError::CommitUnknown`], neither done nor failed.
pub(crate) async fn commit(
    transaction: Transaction<'_>,
    refused: fn(InboxError) -> Abort,
) -> Result<(), Abort> {
    hooks::point("inbox:commit:before");
    match transaction.commit().await {
        Ok(()) => {}
        Err(CommitError::Completion(_)) if hooks::sabotage(Defect::CompletionUnread) => {}
        Err(CommitError::Completion(error)) => return Err(refused(error.into())),
        // A refusal is the messages', whatever its SQLSTATE: a deferred trigger of the tenant can
        // raise any. It cannot be the guard's, since the completion has shown that the guard row is
        // gone.
        Err(CommitError::RolledBack(error)) if error.is_contention() => {
            return Err(Abort::Contention { failure: sql_failure(error) });
        }
        Err(CommitError::RolledBack(error)) => {
            return Err(Abort::AtCommit { failure: sql_failure(error) });
        }
        Err(CommitError::Unknown(_)) if hooks::sabotage(Defect::LostCommitIsDone) => return Ok(()),
        Err(CommitError::Unknown(error)) => {
            return Err(Abort::Host(InboxError::CommitUnknown(error)));
        }
    }
    hooks::point("inbox:commit:after");
    Ok(())
}
