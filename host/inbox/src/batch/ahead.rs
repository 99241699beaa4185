//! Messages that run ahead of their statements.
//!
//! A handler may enqueue statements, which nobody waits for. Where a failure would abort the whole
//! transaction in any case, the next message runs before they are answered, and all of them share
//! round trips. A handler that asks the database is stopped where a statement of an earlier one has
//! failed. The transaction is then repeated, after contention as before, else with savepoints: each
//! message waits for its own statements there, and the failure is that message's.

use oncebox_model::hooks::{self, Defect};

use crate::{
    admission::batch_sizer::SavepointMode,
    batch::{
        abort::Abort,
        call::{Call, CallResult, caught_up},
        state::BatchState,
    },
    consumer::ConsumerInbox,
    session::Transaction,
};

impl BatchState<'_> {
    /// Returns whether the next message may run before the statements of the message at `index` are
    /// answered. No statement of the host may come between, whose error theirs would be.
    pub(crate) fn may_run_ahead(&self, index: usize, mode: SavepointMode) -> bool {
        let routed = &self.batch[index];
        let is_alone = self.batch.len() == 1; // a leased message and a replayed one are, too
        mode == SavepointMode::Optimistic && !is_alone && routed.shadow.is_none()
    }

    /// Notes that the message at `index` has run and may have left statements unanswered.
    pub(crate) fn ran_ahead(&mut self, index: usize) {
        self.ahead = Some(index);
    }
}

impl ConsumerInbox {
    /// Waits for the statements of the messages that ran ahead, before a statement of the host.
    pub(crate) async fn catch_up(
        &self,
        transaction: &Transaction<'_>,
        state: &mut BatchState<'_>,
    ) -> Result<(), Abort> {
        let Some(index) = state.ahead.take() else { return Ok(()) };
        if hooks::sabotage(Defect::AheadUnread) {
            return Ok(());
        }
        let tx = transaction.tx();
        let routed = &state.batch[index];
        let outbox = self.outbox(transaction, routed);
        let call: Call<'_> = self.call(routed, &outbox);
        match caught_up(call, tx).await {
            CallResult::Ok(()) => Ok(()),
            CallResult::Failed(_) | CallResult::Abandoned(_) => Err(Abort::Failed),
            CallResult::Contention(failure) => Err(Abort::Contention { failure }),
            CallResult::ConnectionLost => Err(state.connection_lost(index, index + 1).await),
            CallResult::Stopped(why) => Err(Abort::stopped(why)),
        }
    }
}
