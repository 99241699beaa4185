//! The state of one open transaction of a batch.
//!
//! [`BatchState::open`] claims the messages of a batch, or resumes a leased one.
//! [`BatchState::next`] chooses the messages that run next, by order, sequence, group and time.
//! [`BatchState::complete`] writes the results as the host's last statement before COMMIT.

use std::sync::Arc;

use oncebox_model::{
    error::InboxError,
    handler::{DeliveryKind, Handler, Shadow},
    hooks::{self, Defect},
    outcome::{Disposition, Failure, FailureKind},
    policy::Dedup,
};
use tokio::time::Instant;

use crate::{
    admission::batch_sizer::Fit,
    batch::{
        abort::Abort,
        claim::{ClaimOutcome, ClaimRequest, InitialStatus, claim},
        commit::{at_claim, at_completion},
        complete::{Completion, Execution, Lease, Recorded, complete},
    },
    consumer::{COMMIT, ConsumerInbox},
    ordering::{
        key_lock::BlockedKeys,
        sequence::{SequenceState, move_sequence, sequence_of},
    },
    session::Transaction,
    shadow::{Sampled, Watch},
};

/// A message and the handler that runs it.
pub(crate) struct Routed {
    pub(crate) request: ClaimRequest,
    /// Lease that the message runs under; none for a live message, which the transaction claims.
    pub(crate) lease: Option<Lease>,
    pub(crate) handler: Arc<dyn Handler>,
    /// Generation of the handlers that `handler` was chosen from; a claim with a stale one is
    /// refused.
    pub(crate) generation: i64,
    /// Candidate version to be tried on the message after the commit; set where the message is in
    /// its sample.
    pub(crate) shadow: Option<Arc<Shadow>>,
}

impl Routed {
    /// Returns the execution of the message, by the version that the request names.
    fn execution(&self) -> Execution<'_> {
        let version = self.request.version;
        Execution { version, ..Execution::of(&self.request.message, self.lease) }
    }

    /// Returns the number of the attempt, from 1, and the kind of the delivery.
    pub(crate) fn attempt(&self) -> (u32, DeliveryKind) {
        match self.lease {
            Some(Lease { attempt, .. }) => (attempt, DeliveryKind::Retry),
            None => (1, DeliveryKind::Live),
        }
    }

    /// Passes the fail point before the call of a live message's handler.
    pub(crate) fn point_before_call(&self) {
        if self.lease.is_none() {
            hooks::point("inbox:handle:before");
        }
    }

    /// Passes the fail point after a live message's failure was rolled back.
    pub(crate) fn point_after_failure(&self) {
        if self.lease.is_none() {
            hooks::point("inbox:fail:after");
        }
    }

    /// Passes the fail point after the call of the handler.
    pub(crate) fn point_after_call(&self) {
        hooks::point(match self.lease {
            Some(_) => "retry:handle:after",
            None => "inbox:handle:after",
        });
    }
}

/// Result of each message that ran: its index in the batch, its disposition, the kind of its
/// failure.
pub(crate) type Results = Vec<(usize, Disposition, Option<FailureKind>)>;

/// Result of a committed transaction.
#[derive(Debug, Default)]
pub(crate) struct Settled {
    /// Answers to the claims that count, from the first message of the batch on. Later claims were
    /// withdrawn, and their messages come again.
    pub(crate) claims: Vec<ClaimOutcome>,
    /// Result of each message that ran.
    pub(crate) results: Results,
    /// Failure of a run whose message another session has by now; nothing was written about it.
    pub(crate) unrecorded: Option<FailureKind>,
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
    pub(crate) fn stored(claims: Vec<ClaimOutcome>) -> Self {
        Self { claims, ..Self::default() }
    }
}

/// Messages that run next.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Next {
    /// One message, by its index in the batch.
    One(usize),
    /// Messages of one batch handler, by their indexes in the batch.
    Group(Vec<usize>),
}

/// State of an open transaction.
pub(crate) struct BatchState<'a> {
    pub(crate) consumer: &'a ConsumerInbox,
    pub(crate) batch: &'a [Routed],
    /// Answers to the claims, by index in the batch.
    pub(crate) claims: Vec<ClaimOutcome>,
    /// Rows that `complete` has to write, and claims that it has to withdraw.
    pub(crate) completion: Completion,
    /// Versions of the aggregates, moved forward as messages of this transaction complete.
    pub(crate) sequence: SequenceState,
    /// Ordering keys of messages that failed; they hold back later messages of their keys.
    pub(crate) blocked: BlockedKeys,
    results: Results,
    sampled: Vec<Sampled>,
    /// Index of the first message that `next` has not looked at.
    next: usize,
    /// Time at which the transaction began.
    began: std::time::Instant,
    /// Time at which the claim was answered; the time limit of the batch begins then, since the
    /// claim takes its time for all messages at once.
    claimed: Instant,
    fit: Fit,
}

impl<'a> BatchState<'a> {
    /// Claims the messages of a batch, or resumes the one that is leased. Returns none where the
    /// lease is lost or it is not the message's turn; the caller then commits what the database
    /// wrote about that.
    pub(crate) async fn open(
        consumer: &'a ConsumerInbox,
        transaction: &Transaction<'_>,
        batch: &'a [Routed],
    ) -> Result<Option<Self>, Abort> {
        let began = std::time::Instant::now();
        let [Routed { request, lease: Some(lease), generation, .. }] = batch else {
            let claims = Self::claim(consumer, transaction, batch).await?;
            return Self::sequenced(consumer, transaction, batch, claims, began).await.map(Some);
        };
        let (id, generation) = (&request.message.id, *generation);
        if !consumer.resume(transaction, generation, id, lease.epoch).await? {
            return Ok(None);
        }
        let claims = vec![ClaimOutcome::New];
        Self::sequenced(consumer, transaction, batch, claims, began).await.map(Some)
    }

    /// Claims the messages that this transaction is about to run. With `dedup = "off"` all count as
    /// new and no row is written. The guard row is inserted in either case, so that no COMMIT
    /// succeeds without `complete`.
    async fn claim(
        consumer: &'a ConsumerInbox,
        transaction: &Transaction<'_>,
        batch: &'a [Routed],
    ) -> Result<Vec<ClaimOutcome>, Abort> {
        let claimant = consumer.claimant(batch[0].generation);
        let requests: Vec<_> = match consumer.policy.dedup {
            Dedup::Off => Vec::new(),
            Dedup::Inbox => batch.iter().map(|routed| &routed.request).collect(),
        };
        let claims = claim(transaction, claimant, &requests, InitialStatus::Completed)
            .await
            .map_err(at_claim)?;
        Ok(match consumer.policy.dedup {
            Dedup::Off => vec![ClaimOutcome::New; batch.len()],
            Dedup::Inbox => claims,
        })
    }

    /// Reads the versions of the new messages, and of their aggregates.
    async fn sequenced(
        consumer: &'a ConsumerInbox,
        transaction: &Transaction<'_>,
        batch: &'a [Routed],
        claims: Vec<ClaimOutcome>,
        began: std::time::Instant,
    ) -> Result<Self, Abort> {
        let claimed = Instant::now();
        let new = batch.iter().zip(&claims).filter(|(_, claim)| **claim == ClaimOutcome::New);
        let messages = new.map(|(routed, _)| &routed.request.message);
        let policy = consumer.policy.sequence.as_ref();
        let sequence = sequence_of(transaction, consumer.consumer_id, policy, messages).await?;
        let mut blocked = BlockedKeys::default();
        for (index, routed) in batch.iter().enumerate() {
            if claims[index] == ClaimOutcome::Forgotten {
                blocked.failed(index, &routed.request, Disposition::Parked);
            }
        }
        Ok(Self {
            consumer,
            batch,
            claims,
            completion: Completion::new(&consumer.policy),
            sequence,
            blocked,
            results: Results::new(),
            sampled: Vec::new(),
            next: 0,
            began,
            claimed,
            fit: Fit::default(),
        })
    }

    /// Returns the messages that run next; none when all are decided, or when the time of the batch
    /// is over. The claims behind are then withdrawn. At least one message runs, however short the
    /// time.
    pub(crate) fn next(&mut self) -> Option<Next> {
        while let Some(routed) = self.batch.get(self.next) {
            let index = self.next;
            self.next += 1;
            self.decide(index);
            if !self.is_to_run(index) {
                continue; // a duplicate, settled by its row, or not its turn
            }
            if !self.results.is_empty() && self.claimed.elapsed() >= self.consumer.batch_duration()
            {
                self.withdraw(index);
                return None;
            }
            if !routed.handler.takes_batches() {
                return Some(Next::One(index));
            }
            let (group, behind) = self.group(index);
            self.next = behind;
            return Some(Next::Group(group));
        }
        None
    }

    /// Decides whether a new message runs. It does not where an earlier message of its key failed,
    /// or where the version of its aggregate is not next.
    pub(crate) fn decide(&mut self, index: usize) {
        let request = &self.batch[index].request;
        self.blocked.hold_back(index, request, &mut self.claims[index]);
        self.in_sequence(index);
    }

    /// Returns whether a message is to run in this transaction.
    fn is_to_run(&self, index: usize) -> bool {
        self.claims[index] == ClaimOutcome::New || hooks::sabotage(Defect::DuplicatesRun)
    }

    /// Returns the new messages from `first` on that go to its handler, and the index behind the
    /// last of them. Duplicates between them are left out; the first new message of another handler
    /// ends the group.
    fn group(&self, first: usize) -> (Vec<usize>, usize) {
        let handler = |index: usize| &*self.batch[index].handler;
        let mut group = vec![first];
        for index in (first + 1..self.batch.len()).filter(|index| self.is_to_run(*index)) {
            if !std::ptr::addr_eq(handler(index), handler(first)) {
                return (group, index);
            }
            group.push(index);
        }
        (group, self.batch.len())
    }

    /// Withdraws the claims from `first` on, which did not run; their messages come again.
    fn withdraw(&mut self, first: usize) {
        self.fit.is_cut = true;
        for (routed, claim) in self.batch.iter().zip(&self.claims).skip(first) {
            if claim.is_ours() && self.consumer.policy.dedup == Dedup::Inbox {
                self.completion.withdraw(&routed.request.message.id);
                self.fit.withdrawn += 1;
            }
        }
        self.claims.truncate(first);
    }

    /// Returns the claim or lease of a message that does not run.
    pub(super) fn execution_of(&self, index: usize) -> Execution<'a> {
        let routed = &self.batch[index];
        Execution::of(&routed.request.message, routed.lease)
    }

    /// Records the success of a message. Its completion moves its aggregate.
    pub(crate) fn succeeded(&mut self, index: usize, result: Option<String>) {
        let routed = &self.batch[index];
        self.completion.succeeded(routed.execution(), result, &self.consumer.policy);
        self.sequence.completed(&routed.request.message);
        self.results.push((index, Disposition::Completed, None));
    }

    /// Records the failure of a message, whose effects are undone, in the row of its claim or
    /// lease. An open failure blocks the message's key. With `dedup = "off"` there is no row yet,
    /// and the message is settled alone, through a claim that writes one.
    pub(crate) fn failed(&mut self, index: usize, failure: &Failure) -> Result<(), Abort> {
        let routed = &self.batch[index];
        if self.consumer.policy.dedup == Dedup::Off && routed.lease.is_none() {
            return Err(Abort::Abandoned { index, failure: failure.clone() });
        }
        let disposition =
            self.completion.failed(routed.execution(), failure, &self.consumer.policy);
        self.blocked.failed(index, &routed.request, disposition);
        self.results.push((index, disposition, Some(failure.kind.clone())));
        Ok(())
    }

    /// Keeps a completed message for the trial of its shadow candidate after the commit.
    pub(crate) async fn sample(
        &mut self,
        transaction: &Transaction<'_>,
        index: usize,
        watch: Option<Watch>,
        result: &Option<String>,
    ) -> Result<(), InboxError> {
        let Routed { request, generation, shadow, .. } = &self.batch[index];
        if let Some((shadow, watch)) = shadow.as_ref().zip(watch) {
            let trace = watch.end(transaction).await?;
            let sampled =
                Sampled::new(shadow, &request.message, *generation, result.clone(), trace);
            self.sampled.push(sampled);
        }
        Ok(())
    }

    /// Returns the abort for a connection that broke while a message ran. `index` is the message,
    /// or the first of a group; the first `among` messages of the batch had run on the connection.
    /// The message is suspect where this connection broke alone; an outage says nothing about it.
    pub(crate) async fn connection_lost(&self, index: usize, among: usize) -> Abort {
        let message_id = self.batch[index].request.message.id.clone();
        let unique = format!("{}/{message_id}", self.consumer.consumer_id);
        // The check comes before the rollback, which may wait for a server that is away.
        let is_alone = self.consumer.sessions.broke_alone(&unique, self.began).await;
        Abort::Host(match is_alone {
            true => InboxError::LostInHandler { message_id, among },
            false => InboxError::LostInOutage { message_id, among },
        })
    }

    /// Writes the completion and deletes the guard row. A row that waits gets the payload and the
    /// time that its later run needs.
    pub(crate) async fn complete(
        mut self,
        transaction: &Transaction<'_>,
    ) -> Result<Settled, Abort> {
        let consumer = self.consumer;
        // A leased message that did not run is charged with no failure.
        let is_leased = self.batch.iter().any(|routed| routed.lease.is_some());
        let refused =
            if is_leased && self.results.is_empty() { Abort::Host } else { at_completion };
        let (ran, settled, took) = (self.results.len(), self.claims.len(), self.claimed.elapsed());
        for (index, routed) in self.batch.iter().enumerate().take(settled) {
            match self.claims[index] {
                ClaimOutcome::Waiting { is_due } => {
                    self.completion.waits(&routed.request.message, is_due);
                }
                ClaimOutcome::Gap => self.waits_for_gap(index),
                ClaimOutcome::Forgotten => {
                    self.completion.past_horizon(&routed.request.message, &consumer.policy);
                }
                _ => {}
            }
        }
        let is_released = move_sequence(transaction, consumer.consumer_id, &self.sequence);
        if is_released.await.map_err(refused)? {
            consumer.wakeup.after(COMMIT);
        }
        complete(transaction, consumer.consumer_id, &self.completion).await.map_err(refused)?;
        consumer.due_after(&self.completion);
        if is_leased && ran > 0 {
            hooks::point("retry:commit:before");
        }
        Ok(Settled {
            claims: self.claims,
            results: self.results,
            unrecorded: None,
            alone: false,
            sampled: self.sampled,
            failures: self.completion.recorded(),
            fit: Fit { ran, settled, took, ..self.fit },
        })
    }
}
