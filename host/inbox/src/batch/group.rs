//! Messages that one handler takes together, in one call.

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

/// From `first` on, the new messages that go to the same handler as it does; known ones between
/// them are passed over. The second answer is the index behind the last.
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
    /// Run a group in one call. What its answer calls failed is excluded, and the others are run
    /// again without it; when nobody can say which message failed, both halves are run by
    /// themselves. All of this happens in the one transaction, each call under a savepoint.
    pub(crate) async fn handle_together(
        &self,
        tx: &Tx,
        batch: &[Routed],
        group: Vec<usize>,
        done: &mut Done,
    ) -> Result<(), Stop> {
        // A stack: what comes first in the partition is on top.
        let mut open = vec![group];
        while let Some(group) = open.pop() {
            // Not what stands behind a message of its key that failed meanwhile.
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
                    // Each half would take as long again.
                    _ if failure.kind == FailureKind::Deadline => {
                        return Err(Stop::AtCommit { failure });
                    }
                    _ => Vec::new(),
                },
                Ended::Contention(failure) => return Err(Stop::Contention { failure }),
                Ended::Abandoned(failure) => return Err(alone_or(&group, failure)),
                // Nobody can say which of them.
                Ended::Lost => {
                    return Err(Stop::Lost { index: group[0], among: group[group.len() - 1] + 1 });
                }
                Ended::Stopped(why) => return Err(Stop::Host(InboxError::Stopped { why })),
            };
            self.undo_group(tx, &group, &failed).await?;
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

    fn together<'a>(&'a self, batch: &'a [Routed], group: &[usize]) -> Together<'a> {
        let messages = group.iter().map(|index| &batch[*index].offered.message).collect();
        Together { job: self.job(&batch[group[0]], 1, DeliveryKind::Live), messages }
    }

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
        // A statement of the guest ended the transaction, or took the savepoint away.
        Err(match (refused(&error), failed.first()) {
            (Some(_), Some((_, failure))) => alone_or(group, failure.clone()),
            (Some(error), None) => {
                Stop::AtCommit { failure: Failure::new(FailureKind::Other, error.message) }
            }
            (None, _) => Stop::Host(error),
        })
    }
}

/// What stopped a group in a way that only a new transaction can mend: for one message it is
/// recorded, several are settled one by one.
fn alone_or(group: &[usize], failure: Failure) -> Stop {
    match *group {
        [index] => Stop::Abandoned { index, failure },
        _ => Stop::AtCommit { failure },
    }
}

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
