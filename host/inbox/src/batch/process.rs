//! The protocol: one transaction from claim to commit.
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
//! A leased message is a batch of one, whose transaction begins with `resume` instead of `claim`.
//! [`settle`](super::settle) repeats transactions until the front of a batch is settled.

use oncebox_model::error::InboxError;
use tokio::time::Instant;

use crate::{
    admission::{Admission, batch_sizer::SavepointMode},
    batch::{
        abort::Abort,
        call::{Call, CallResult, call},
        commit::{
            at_completion, commit, refused, release_savepoint, rollback, set_savepoint,
            undo_message,
        },
        state::{BatchState, Next, Routed, Settled},
    },
    consumer::ConsumerInbox,
    session::Transaction,
    shadow,
};

impl ConsumerInbox {
    /// Runs one transaction: claim, handle, complete, commit. The messages that it returns as
    /// settled may be acked.
    pub(crate) async fn transact(
        &self,
        admission: &Admission,
        batch: &[Routed],
        mode: SavepointMode,
    ) -> Result<Settled, Abort> {
        let transaction = self.sessions.begin_admitted(admission).await?;
        match self.run(&transaction, batch, mode).await {
            Ok(settled) => commit(transaction).await.map(|()| settled),
            Err(abort) => rollback(transaction, abort).await,
        }
    }

    /// Runs everything between BEGIN and COMMIT, in order.
    async fn run(
        &self,
        transaction: &Transaction<'_>,
        batch: &[Routed],
        mode: SavepointMode,
    ) -> Result<Settled, Abort> {
        let Some(mut state) = BatchState::open(self, transaction, batch).await? else {
            return Ok(Settled::default()); // the lease is lost
        };
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

    /// Runs one message. With savepoints a failure is rolled back and becomes the message's row;
    /// without them it aborts the transaction.
    async fn handle(
        &self,
        transaction: &Transaction<'_>,
        state: &mut BatchState<'_>,
        index: usize,
        mode: SavepointMode,
    ) -> Result<(), Abort> {
        let (tx, routed) = (transaction.tx(), &state.batch[index]);
        set_savepoint(tx, mode).await?;
        let watch = shadow::watch(tx, routed.shadow.is_some()).await?;
        routed.point_before_call();
        let began = Instant::now();
        let result = call(self.call(routed), tx).await;
        self.count_duration(&routed.request.message, began.elapsed());
        routed.point_after_call();
        match result {
            CallResult::Ok(result) => {
                state.sample(transaction, index, watch, &result).await.map_err(at_completion)?;
                if routed.lease.is_none() {
                    release_savepoint(tx, mode).await?; // a leased message is the only one
                }
                state.succeeded(index, result);
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
            CallResult::Stopped(why) => Err(Abort::Host(InboxError::Stopped { why })),
        }
    }

    /// Returns the call of a message's handler.
    pub(crate) fn call<'a>(&'a self, routed: &'a Routed) -> Call<'a> {
        let (attempt, kind) = routed.attempt();
        Call {
            tenant: &self.tenant,
            consumer: &self.name,
            handler: &routed.handler,
            message: &routed.request.message,
            attempt,
            kind,
            deadline: self.deadline(&routed.handler),
        }
    }
}
