//! The state of one open transaction of a batch.
//!
//! [`BatchState::open`] claims the messages of a batch, or resumes a leased one.
//! [`BatchState::next`] chooses the messages that run next, by order, sequence, group and time.
//! [`BatchState::complete`] enqueues the results, as the host's last statement before COMMIT.

use oncebox_model::{
    error::InboxError,
    hooks::{self, Defect},
    outcome::{Disposition, Failure},
    outgoing::Output,
    policy::Dedup,
};
use tokio::time::Instant;

use crate::{
    admission::batch_sizer::Fit,
    batch::{
        abort::Abort,
        claim::{ClaimOutcome, Claimant, InitialStatus, claim},
        complete::{Completion, Execution, enqueue_completion},
        outgoing::write_outgoing,
        replay_turn::{ReplayTurn, ReplayedRun},
        routed::Routed,
        settled::{Results, Settled},
        statements::{at_claim, at_completion},
    },
    consumer::{COMMIT, ConsumerInbox},
    ordering::{
        key_lock::BlockedKeys,
        sequence::{SequenceState, move_sequence, sequence_of},
    },
    session::Transaction,
    shadow::{Cancel, LiveRun, Sampled, Watch},
    spans::RunSpans,
};

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
    /// Result of the replayed message; none for every other batch, and before its run.
    replayed: Option<(ReplayTurn, ReplayedRun)>,
    sampled: Vec<Sampled>,
    /// Spans of the runs.
    pub(crate) spans: RunSpans,
    /// Last message that may have left statements unanswered.
    pub(super) ahead: Option<usize>,
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
        if let [Routed { replay: Some(_), .. }] = batch {
            // The caller has begun it. Its order and its sequence were decided when it first ran.
            let (claims, sequence) = (vec![ClaimOutcome::New], SequenceState::default());
            let times = (began, Instant::now());
            return Ok(Some(Self::new(consumer, batch, claims, sequence, times)));
        }
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
        let claimant = Claimant { is_front: true, ..consumer.claimant(batch[0].generation) };
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
        Ok(Self::new(consumer, batch, claims, sequence, (began, claimed)))
    }

    /// Makes the state of a transaction whose messages are claimed.
    fn new(
        consumer: &'a ConsumerInbox,
        batch: &'a [Routed],
        claims: Vec<ClaimOutcome>,
        sequence: SequenceState,
        (began, claimed): (std::time::Instant, Instant),
    ) -> Self {
        let mut blocked = BlockedKeys::default();
        for (index, routed) in batch.iter().enumerate() {
            if claims[index] == ClaimOutcome::Forgotten {
                blocked.failed(index, &routed.request, Disposition::Parked);
            }
        }
        Self {
            consumer,
            batch,
            claims,
            completion: Completion::new(&consumer.policy),
            sequence,
            blocked,
            results: Results::new(),
            replayed: None,
            sampled: Vec::new(),
            spans: RunSpans::default(),
            ahead: None,
            next: 0,
            began,
            claimed,
            fit: Fit::default(),
        }
    }

    /// Returns the messages that run next; none when all are decided, or when the batch is over.
    /// The claims behind are then withdrawn. At least one message runs, however short the time.
    pub(crate) fn next(&mut self) -> Option<Next> {
        while let Some(routed) = self.batch.get(self.next) {
            let index = self.next;
            self.next += 1;
            self.decide(index);
            if !self.is_to_run(index) {
                continue; // a duplicate, settled by its row, or not its turn
            }
            if !self.results.is_empty() && self.is_over() {
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

    /// Returns whether no further message begins: the time of the batch is over, or its messages
    /// have emitted as much as a transaction may hold.
    fn is_over(&self) -> bool {
        self.claimed.elapsed() >= self.consumer.batch_duration()
            || self.completion.emitted().is_full()
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

    /// Records the success of a message. Its completion moves its aggregate, and writes what it
    /// emitted.
    pub(crate) fn succeeded(&mut self, index: usize, output: Output) {
        let routed = &self.batch[index];
        if let Some(turn) = routed.replay {
            // What it emitted is counted and dropped.
            self.replayed = Some((turn, ReplayedRun::Ok(output.outgoing)));
            return self.results.push((index, Disposition::Completed, None));
        }
        let (consumer, spans) = (self.consumer, &mut self.spans);
        let cause = (index, &routed.request.message);
        let create = |outgoing: &_| consumer.create(spans, cause, outgoing);
        self.completion.succeeded(routed.execution(), output, &consumer.policy, create);
        self.sequence.completed(&routed.request.message);
        self.results.push((index, Disposition::Completed, None));
    }

    /// Records the failure of a message, whose effects are undone, in the row of its claim or
    /// lease. An open failure blocks the message's key. With `dedup = "off"` there is no row yet,
    /// and the message is settled alone, through a claim that writes one.
    pub(crate) fn failed(&mut self, index: usize, failure: &Failure) -> Result<(), Abort> {
        let routed = &self.batch[index];
        if let Some(turn) = routed.replay {
            self.replayed = Some((turn, ReplayedRun::Failed(failure.clone())));
            return Ok(());
        }
        if self.consumer.policy.dedup == Dedup::Off && routed.lease.is_none() {
            return Err(Abort::Abandoned { index, failure: failure.clone() });
        }
        let disposition =
            self.completion.failed(routed.execution(), failure, &self.consumer.policy);
        self.blocked.failed(index, &routed.request, disposition);
        self.results.push((index, disposition, Some(failure.kind.clone())));
        Ok(())
    }

    /// Returns whether [`Self::write_cancellable`] writes anything.
    pub(crate) fn writes_cancellable(&self, index: usize) -> bool {
        self.completion.emitted().is_cancellable() && self.batch[index].handler.may_emit()
    }

    /// Writes what earlier messages emitted, where the handler of a message may cancel it. Call it
    /// before the savepoint of that message.
    pub(crate) async fn write_cancellable(
        &mut self,
        transaction: &Transaction<'_>,
        index: usize,
    ) -> Result<(), Abort> {
        if !self.writes_cancellable(index) {
            return Ok(());
        }
        let emitted = self.completion.emitted();
        let written = write_outgoing(transaction, self.consumer.consumer_id, emitted).await;
        written.map_err(at_completion)?;
        self.completion.wrote_emitted();
        Ok(())
    }

    /// Keeps a completed message for the trial of its shadow candidate after the commit.
    pub(crate) async fn sample(
        &mut self,
        transaction: &Transaction<'_>,
        index: usize,
        watch: Option<Watch>,
        (output, cancels): (&Output, Vec<Cancel>),
    ) -> Result<(), InboxError> {
        let Routed { request, generation, shadow, .. } = &self.batch[index];
        if let Some((shadow, watch)) = shadow.as_ref().zip(watch) {
            let trace = watch.end(transaction).await?;
            let live = LiveRun { output: output.clone(), cancels, trace };
            self.sampled.push(Sampled::new(shadow, &request.message, *generation, live));
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

    /// Enqueues the completion, to be sent with COMMIT, once all handlers' statements are answered.
    /// A row that waits gets the payload and the time that its later run needs.
    pub(crate) async fn complete(
        mut self,
        transaction: &Transaction<'_>,
    ) -> Result<Settled, Abort> {
        if let Some(run) = self.replayed.take() {
            let settled = self.complete_replay(transaction, run).await?;
            return Ok(Settled { spans: self.spans, ..settled });
        }
        let consumer = self.consumer;
        consumer.catch_up(transaction, &mut self).await?;
        let is_leased = self.batch.iter().any(|routed| routed.lease.is_some());
        let refused = refused_of(self.batch, &self.results);
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
        enqueue_completion(transaction, consumer.consumer_id, &self.completion)
            .await
            .map_err(refused)?;
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
            spans: self.spans,
            destinations: self.completion.emitted().due_destinations(),
            failures: self.completion.recorded(),
            fit: Fit { ran, settled, took, ..self.fit },
            replayed: None,
        })
    }

    /// Writes the completion of a replayed message.
    async fn complete_replay(
        &self,
        transaction: &Transaction<'_>,
        (turn, run): (ReplayTurn, ReplayedRun),
    ) -> Result<Settled, Abort> {
        let Routed { request, generation, .. } = &self.batch[0]; // a batch of one
        let of = (&request.message, request.version, *generation);
        let end = self.consumer.complete_replayed(transaction, turn, of, run).await;
        Ok(Settled::replayed(end.map_err(at_completion)?))
    }
}

/// Returns what a refused completion means. A leased message that did not run is charged with no
/// failure.
pub(crate) fn refused_of(batch: &[Routed], results: &Results) -> fn(InboxError) -> Abort {
    let is_leased = batch.iter().any(|routed| routed.lease.is_some());
    if is_leased && results.is_empty() { Abort::Host } else { at_completion }
}
