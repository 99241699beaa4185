//! Messages that one batch handler takes in one call.

use oncebox_model::{
    handler::Answer,
    hooks::{self, Defect},
    outcome::{Failure, FailureKind},
    outgoing::{Outbox, Output},
    trace,
    tx::Tx,
};
use tokio::time::Instant;

use crate::{
    admission::batch_sizer::SavepointMode,
    batch::{
        abort::Abort,
        call::{CallResult, GroupCall, call, call_group},
        routed::Routed,
        state::BatchState,
        statements::{refused, release_savepoint, set_savepoint, undo_message},
    },
    consumer::ConsumerInbox,
    session::Transaction,
};

/// Results of the messages of a group that succeeded, in order.
type Results = Vec<Output>;

impl ConsumerInbox {
    /// Runs a group in one call of its handler. Messages that the answer calls failed are excluded,
    /// and the others run again without them. Where the failed message is unknown, each half runs
    /// by itself. All of this happens in the one transaction, each call under a savepoint.
    pub(crate) async fn handle_group(
        &self,
        transaction: &Transaction<'_>,
        state: &mut BatchState<'_>,
        group: Vec<usize>,
    ) -> Result<(), Abort> {
        let tx = transaction.tx();
        self.catch_up(transaction, state).await?;
        // A stack of groups: the first messages of the partition are on top.
        let mut open = vec![group];
        while let Some(group) = open.pop() {
            // Without messages behind a message of their key that failed in an earlier round.
            let (group, behind) = state.split_runnable(group);
            open.extend((!behind.is_empty()).then_some(behind));
            if group.is_empty() {
                continue;
            }
            state.write_cancellable(transaction, group[0]).await?;
            set_savepoint(tx, SavepointMode::Savepoints).await?;
            let failed = match self.try_group(transaction, state, &group).await? {
                Ok(results) => {
                    release_savepoint(tx, SavepointMode::Savepoints).await?;
                    for (index, output) in group.into_iter().zip(results) {
                        state.succeeded(index, output);
                    }
                    continue;
                }
                Err(failed) => failed,
            };
            // The effects of the whole call are rolled back, those of its good messages too.
            undo_group(tx, &group, &failed).await?;
            state.spans.undone(&group, &failed);
            state.batch[group[0]].point_after_failure();
            // The failed message is unknown: halves, with the front half on top of the stack.
            if failed.is_empty() {
                let (front, back) = group.split_at(group.len() / 2);
                open.extend([back.to_vec(), front.to_vec()]);
                continue;
            }
            for (index, failure) in &failed {
                state.failed(*index, failure)?;
            }
            let is_failed = |index: &usize| failed.iter().any(|(failed, _)| failed == index);
            let rest: Vec<_> = group.into_iter().filter(|index| !is_failed(index)).collect();
            open.extend((!rest.is_empty()).then_some(rest));
        }
        Ok(())
    }

    /// Calls the handler of a group. Returns the results where all messages succeeded, or else the
    /// failures by index in the batch. No failure means that the failed message is unknown.
    async fn try_group(
        &self,
        transaction: &Transaction<'_>,
        state: &mut BatchState<'_>,
        group: &[usize],
    ) -> Result<Result<Results, Vec<(usize, Failure)>>, Abort> {
        let (tx, first, last) = (transaction.tx(), group[0], group[group.len() - 1]);
        let routed = &state.batch[first];
        let outbox = self.outbox(transaction, routed);
        routed.point_before_call();
        let began = Instant::now();
        let span_of = |index: &usize| self.process_span(&state.batch[*index], &state.spans);
        let spans: Vec<_> = group.iter().map(span_of).collect();
        let called = async {
            match *group {
                [_] => call(self.call(routed, &outbox), tx).await.map(|output| vec![Ok(output)]),
                _ => call_group(self.group_call(state.batch, group, &outbox), tx).await,
            }
        };
        let result = trace::within(spans.iter().flatten().next(), called).await;
        let took = began.elapsed();
        for (index, span) in group.iter().zip(spans) {
            state.spans.ran(*index, (span, took), &result);
        }
        // Each message is counted with an equal share of the call.
        let each = took / group.len().try_into().unwrap_or(u32::MAX);
        for index in group {
            self.count_duration(&state.batch[*index].request.message, each);
        }
        routed.point_after_call();
        match result {
            CallResult::Ok(answers) => match failures(group, &answers) {
                failed if failed.is_empty() => {
                    Ok(Ok(answers.into_iter().map(Result::unwrap_or_default).collect()))
                }
                failed => Ok(Err(failed)),
            },
            CallResult::Failed(failure) if group.len() == 1 => Ok(Err(vec![(first, failure)])),
            // A half could take as long again.
            CallResult::Failed(failure) if failure.kind == FailureKind::Deadline => {
                Err(Abort::AtCommit { failure })
            }
            CallResult::Failed(_) => Ok(Err(Vec::new())),
            CallResult::Contention(failure) => Err(Abort::Contention { failure }),
            CallResult::Abandoned(failure) => Err(alone_or(group, failure)),
            // The message that broke the connection is unknown.
            CallResult::ConnectionLost => Err(state.connection_lost(first, last + 1).await),
            CallResult::Stopped(why) => Err(Abort::stopped(why)),
        }
    }

    /// Returns the common call of a group, made from the first message's.
    fn group_call<'a>(
        &'a self,
        batch: &'a [Routed],
        group: &[usize],
        outbox: &'a Outbox,
    ) -> GroupCall<'a> {
        let messages = group.iter().map(|index| &batch[*index].request.message).collect();
        GroupCall { call: self.call(&batch[group[0]], outbox), messages }
    }
}

/// Rolls a group's call back. An error of the rollback becomes the abort that it means.
async fn undo_group(tx: &Tx, group: &[usize], failed: &[(usize, Failure)]) -> Result<(), Abort> {
    let Err(error) = undo_message(tx).await else { return Ok(()) };
    // A statement of the guest ended the transaction or removed the savepoint.
    Err(match (refused(&error), failed.first()) {
        (Some(_), Some((_, failure))) => alone_or(group, failure.clone()),
        (Some(error), None) => {
            Abort::AtCommit { failure: Failure::new(FailureKind::Other, error.message) }
        }
        (None, _) => Abort::Host(error),
    })
}

/// Returns the abort for a group whose transaction cannot go on. A single message is recorded
/// alone; several are settled one by one, in new transactions.
fn alone_or(group: &[usize], failure: Failure) -> Abort {
    match *group {
        [index] => Abort::Abandoned { index, failure },
        _ => Abort::AtCommit { failure },
    }
}

/// Returns the messages that the answers call failed, by index in the batch.
fn failures(group: &[usize], answers: &[Answer]) -> Vec<(usize, Failure)> {
    if hooks::sabotage(Defect::BatchAnswersIgnored) {
        return Vec::new();
    }
    let failed = group
        .iter()
        .zip(answers)
        .filter_map(|(index, answer)| Some((*index, answer.as_ref().err()?.clone())));
    failed.collect()
}
