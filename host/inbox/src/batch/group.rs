//! Messages that one batch handler takes in one call.

use oncebox_model::{
    error::InboxError,
    handler::DeliveryKind,
    hooks,
    outcome::{Disposition, Failure, FailureKind},
    tx::Tx,
};
use tokio::time::Instant;

use crate::{
    batch::{
        call::{Ended, Together, run, run_together},
        claim::Claimed,
        process::{Done, Routed, Stop, host_statement, refused, undo_message},
    },
    consumer::ConsumerInbox,
};

/// Returns the new messages from `first` on that go to its handler, and the index behind the last
/// of them. Duplicates between them are left out; the first new message of another handler ends the
/// group.
pub(crate) fn group(batch: &[Routed], claims: &[Claimed], first: usize) -> (Vec<usize>, usize) {
    let mut group = vec![first];
    for index in first + 1..batch.len() {
        if claims[index] != Claimed::New && !hooks::sabotage("duplicates_run") {
            continue;
        }
        if !std::ptr::addr_eq(&*batch[index].handler, &*batch[first].handler) {
            return (group, index);
        }
        group.push(index);
    }
    (group, batch.len())
}

impl ConsumerInbox {
    /// Runs a group in one call of its handler. Messages that the answer calls failed are excluded,
    /// and the others run again without them. Where the failed message is unknown, each half runs
    /// by itself. All of this happens in the one transaction, each call under a savepoint.
    pub(crate) async fn handle_together(
        &self,
        tx: &Tx,
        batch: &[Routed],
        group: Vec<usize>,
        done: &mut Done,
    ) -> Result<(), Stop> {
        // A stack of groups: the first messages of the partition are on top.
        let mut open = vec![group];
        while let Some(group) = open.pop() {
            // Without messages behind a message of their key that failed in an earlier round.
            let (group, behind) = self.next_together(batch, group, done);
            open.extend((!behind.is_empty()).then_some(behind));
            if group.is_empty() {
                continue;
            }
            host_statement(tx, "SAVEPOINT m").await?;
            hooks::point("inbox:handle:before");
            let began = Instant::now();
            let ended = match *group {
                [index] => run(self.job(&batch[index], 1, DeliveryKind::Live), tx)
                    .await
                    .map(|result| vec![Ok(result)]),
                _ => run_together(self.together(batch, &group), tx).await,
            };
            // Each message is counted with an equal share of the call.
            let each = began.elapsed() / group.len().try_into().unwrap_or(u32::MAX);
            group
                .iter()
                .for_each(|index| self.count_duration(&batch[*index].offered.message, each));
            hooks::point("inbox:handle:after");
            let failed = match ended {
                Ended::Ok(answers) => match failures(&group, &answers) {
                    failed if failed.is_empty() => {
                        host_statement(tx, "RELEASE SAVEPOINT m").await?;
                        for (index, result) in group.into_iter().zip(answers) {
                            done.completion.succeeded(
                                batch[index].ran(),
                                result.ok().flatten(),
                                &self.policy,
                            );
                            done.ended(index, &batch[index], Disposition::Completed, None);
                        }
                        continue;
                    }
                    failed => failed,
                },
                Ended::Failed(failure) => match *group {
                    [index] => vec![(index, failure)],
                    // A half could take as long again.
                    _ if failure.kind == FailureKind::Deadline => {
                        return Err(Stop::AtCommit { failure });
                    }
                    _ => Vec::new(),
                },
                Ended::Contention(failure) => return Err(Stop::Contention { failure }),
                Ended::Abandoned(failure) => return Err(alone_or(&group, failure)),
                // The message that broke the connection is unknown.
                Ended::Lost => {
                    return Err(Stop::Lost { index: group[0], among: group[group.len() - 1] + 1 });
                }
                Ended::Stopped(why) => return Err(Stop::Host(InboxError::Stopped { why })),
            };
            // The effects of the whole call are rolled back, those of its good messages too.
            self.undo_group(tx, &group, &failed).await?;
            // The failed message is unknown: halves, with the front half on top of the stack.
            if failed.is_empty() {
                let (front, back) = group.split_at(group.len() / 2);
                open.extend([back.to_vec(), front.to_vec()]);
                continue;
            }
            for (index, failure) in &failed {
                let disposition =
                    self.record_failure(&batch[*index], *index, failure, &mut done.completion)?;
                done.ended(*index, &batch[*index], disposition, Some(failure.kind.clone()));
            }
            let rest: Vec<_> = group
                .into_iter()
                .filter(|index| failed.iter().all(|(failed, _)| failed != index))
                .collect();
            open.extend((!rest.is_empty()).then_some(rest));
        }
        Ok(())
    }

    /// Returns the common call of a group, made from the first message's job.
    fn together<'a>(&'a self, batch: &'a [Routed], group: &[usize]) -> Together<'a> {
        let messages = group.iter().map(|index| &batch[*index].offered.message).collect();
        Together { job: self.job(&batch[group[0]], 1, DeliveryKind::Live), messages }
    }

    /// Rolls a group's call back. An error of the rollback becomes the stop that it means.
    async fn undo_group(
        &self,
        tx: &Tx,
        group: &[usize],
        failed: &[(usize, Failure)],
    ) -> Result<(), Stop> {
        let Err(error) = undo_message(tx).await else {
            hooks::point("inbox:fail:after");
            return Ok(());
        };
        // A statement of the guest ended the transaction or removed the savepoint.
        Err(match (refused(&error), failed.first()) {
            (Some(_), Some((_, failure))) => alone_or(group, failure.clone()),
            (Some(error), None) => {
                Stop::AtCommit { failure: Failure::new(FailureKind::Other, error.message) }
            }
            (None, _) => Stop::Host(error),
        })
    }
}

/// Returns the stop for a group whose transaction cannot go on. A single message is recorded alone;
/// several are settled one by one, in new transactions.
fn alone_or(group: &[usize], failure: Failure) -> Stop {
    match *group {
        [index] => Stop::Abandoned { index, failure },
        _ => Stop::AtCommit { failure },
    }
}

/// Returns the messages that the answers call failed, by index in the batch.
fn failures(group: &[usize], answers: &[Result<Option<String>, Failure>]) -> Vec<(usize, Failure)> {
    if hooks::sabotage("batch_answers_ignored") {
        return Vec::new();
    }
    let failed = group
        .iter()
        .zip(answers)
        .filter_map(|(index, answer)| Some((*index, answer.as_ref().err()?.clone())));
    failed.collect()
}
