//! A replayed message in its transaction.
//!
//! It runs on the path of a leased message, a batch of one with a savepoint. Its transaction begins
//! with `begin_replayed` instead of `claim`, and ends with `complete_replayed` instead of
//! `complete`. Its row stays as it is. What its run emits is dropped.

use std::sync::Arc;

use oncebox_model::{
    error::InboxError,
    hooks::{self, Defect},
    message::Message,
    outcome::Failure,
    outgoing::{CancelNothing, Outbox, OutboxMode, OutgoingMessage},
    policy::ReplayEmit,
};
use sqlx::Row;

use crate::{
    admission::Admission,
    batch::{
        abort::Abort,
        complete::{Completion, enqueue_completion, storable},
        outgoing::{Emitted, write_outgoing},
        process::commit,
        replay_turn::{ReplayEnd, ReplayTurn, ReplayedRun},
        routed::Routed,
        settled::Settled,
    },
    consumer::ConsumerInbox,
    host_call::host_call,
    session::Transaction,
};

/// Failures in a row that pause a replay.
const FAILURES_IN_A_ROW_MAX: i32 = 10;
/// Failures of a replay whose texts are kept.
const FAILURES_KEPT_MAX: i32 = 100;

impl ConsumerInbox {
    /// Begins the run of the replayed message of a batch; returns its end where it does not run,
    /// and none where it runs or the batch is another one.
    pub(crate) async fn begin_replay(
        &self,
        transaction: &Transaction<'_>,
        batch: &[Routed],
    ) -> Result<Option<ReplayEnd>, InboxError> {
        let [Routed { request, generation, replay: Some(turn), .. }] = batch else {
            return Ok(None);
        };
        self.begin_replayed(transaction, *turn, &request.message.id, *generation).await
    }

    /// Locks a replayed message and inserts the guard row. Returns the end of a message that does
    /// not run.
    async fn begin_replayed(
        &self,
        transaction: &Transaction<'_>,
        turn: ReplayTurn,
        message_id: &str,
        generation: i64,
    ) -> Result<Option<ReplayEnd>, InboxError> {
        let query = host_call!("begin_replayed" {
            p_secret: transaction.secret(),
            p_consumer: self.consumer_id,
            p_generation: generation,
            p_replay: turn.replay_id,
            p_epoch: turn.epoch,
            p_step: turn.step,
            p_id: message_id,
            p_at: turn.completed_at,
        });
        let row = transaction.row(query).await?;
        let end = match row.try_get::<&str, _>(0)? {
            "ours" => None,
            "busy" => Some(ReplayEnd::Busy),
            "changed" => Some(ReplayEnd::Changed),
            _ => Some(ReplayEnd::Lost),
        };
        hooks::point("replay:begin:after");
        Ok(end)
    }

    /// Completes the transaction of a replayed message: moves the cursor and counts the message.
    /// PostgreSQL refuses it unless the replay is still this host's.
    pub(crate) async fn complete_replayed(
        &self,
        transaction: &Transaction<'_>,
        turn: ReplayTurn,
        (message, version, generation): (&Message, Option<i32>, i64),
        run: ReplayedRun,
    ) -> Result<ReplayEnd, InboxError> {
        let (suppressed, failure) = match run {
            ReplayedRun::Ok(suppressed) => (suppressed, None),
            ReplayedRun::Failed(failure) => (Vec::new(), Some(failure)),
        };
        if hooks::sabotage(Defect::ReplaySends) {
            let mut emitted = Emitted::default();
            emitted.add(message, suppressed.clone(), |_| None);
            write_outgoing(transaction, self.consumer_id, &emitted).await?;
        }
        if hooks::sabotage(Defect::ReplayCursorOutside) {
            return self.complete_outside(transaction, turn, message, suppressed).await;
        }
        let query = host_call!("complete_replayed" {
            p_secret: transaction.secret(),
            p_consumer: self.consumer_id,
            p_replay: turn.replay_id,
            p_epoch: turn.epoch,
            p_step: turn.step,
            p_id: message.id.as_str(),
            p_at: turn.completed_at,
            p_version: version,
            p_generation: generation,
            p_suppressed: suppressed.len() as i64,
            p_reason: failure.as_ref().map(|failure| failure.kind.reason()),
            p_error: failure.as_ref().map(|failure| storable(&failure.text)),
            p_in_a_row_max: FAILURES_IN_A_ROW_MAX,
            p_kept_max: FAILURES_KEPT_MAX,
        });
        let row = transaction.row(query).await?;
        let is_paused = row.try_get::<&str, _>(0)? == "paused";
        hooks::point("replay:complete:after");
        Ok(match failure {
            None => ReplayEnd::Replayed { suppressed },
            Some(failure) => ReplayEnd::Failed { failure, is_paused },
        })
    }

    /// Moves the cursor in a transaction of its own, before the commit: a defect, for the tests to
    /// notice.
    async fn complete_outside(
        &self,
        transaction: &Transaction<'_>,
        turn: ReplayTurn,
        message: &Message,
        suppressed: Vec<OutgoingMessage>,
    ) -> Result<ReplayEnd, InboxError> {
        const MOVE: &str = "UPDATE oncebox.replay SET step = step + 1, cursor_at = $2, \
            cursor_id = $3, replayed = replayed + 1 WHERE replay_id = $1";
        let completion = Completion::new(&self.policy);
        enqueue_completion(transaction, self.consumer_id, &completion).await?;
        let query =
            sqlx::query(MOVE).bind(turn.replay_id).bind(turn.completed_at).bind(&message.id);
        query.execute(self.sessions.host_pool()).await?;
        Ok(ReplayEnd::Replayed { suppressed })
    }

    /// Records the failure of a replayed message whose transaction is gone, or that no handler can
    /// take, in a transaction of its own.
    pub(crate) async fn record_replayed(
        &self,
        admission: &Admission,
        turn: ReplayTurn,
        (message, version, generation): (&Message, Option<i32>, i64),
        failure: Failure,
    ) -> Result<Settled, InboxError> {
        let transaction = self.sessions.begin_admitted(admission).await?;
        let begun = self.begin_replayed(&transaction, turn, &message.id, generation).await;
        let end = match begun {
            Ok(None) => {
                let of = (message, version, generation);
                let failed = ReplayedRun::Failed(failure);
                self.complete_replayed(&transaction, turn, of, failed).await
            }
            Ok(Some(end)) => {
                transaction.rollback().await;
                return Ok(Settled::replayed(end));
            }
            Err(error) => Err(error),
        };
        match end {
            Ok(end) => {
                commit(transaction, Abort::Host).await.map_err(Abort::into_host_error)?;
                hooks::point("replay:commit:after");
                Ok(Settled::replayed(end))
            }
            Err(error) => {
                transaction.rollback().await;
                Err(error)
            }
        }
    }
}

/// Returns what a replayed run may do with the consumer's outgoing messages: it gets the ids of its
/// emits, which are dropped, or a refusal, and cancels nothing.
pub(crate) fn replay_outbox(outbox: Outbox, emit: ReplayEmit) -> Outbox {
    let mode = match emit {
        ReplayEmit::Suppressed => OutboxMode::Suppressed,
        ReplayEmit::Withheld => OutboxMode::Withheld,
    };
    Outbox { mode, canceller: Arc::new(CancelNothing), ..outbox }
}

#[cfg(test)]
mod tests {
    use super::*;

    // What could go wrong: a replayed run cancels what its first run emitted, or gains a right that
    // its deployment does not have. S1-123.
    #[test]
    fn a_replay_takes_rights_away_and_gives_none() {
        let outbox = Outbox { may_emit: true, ..Outbox::closed() };
        for (emit, mode) in [
            (ReplayEmit::Suppressed, OutboxMode::Suppressed),
            (ReplayEmit::Withheld, OutboxMode::Withheld),
        ] {
            let replayed = replay_outbox(outbox.clone(), emit);
            // S1-123.
            assert_eq!((replayed.mode, replayed.may_emit), (mode, true));
            assert!(replayed.allowed.is_empty());
            assert!(!replay_outbox(Outbox::closed(), emit).may_emit);
        }
    }
}
