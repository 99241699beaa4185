//! The sequence of an aggregate's versions: which message is next, which is past, and which has
//! missing versions before it.
//!
//! The host reads and moves the sequence in the transaction of the message, under the lock of its
//! key.

use std::{collections::HashMap, fmt, time::Duration};

use oncebox_model::{error::InboxError, hooks, message::Message, policy::Gap, tx::bounded};
use sqlx::Row;

use crate::{
    batch::{
        claim::{Claimed, Offered},
        complete::{Completion, Ran},
        process::{Done, Routed},
    },
    consumer::{ConsumerInbox, Parked},
    session::Transaction,
};

/// Versions of the messages of one transaction, and of their aggregates.
#[derive(Debug, Default)]
pub(crate) struct Sequenced {
    /// Version that each message makes, by message id, and whether it may run over its gap.
    messages: HashMap<String, (i64, OverGap)>,
    /// Versions of the aggregates, moved as messages complete.
    aggregates: Aggregates,
    /// Ids of the messages that completed.
    completed: Vec<String>,
}

/// Permission of a message to run although versions before its own are missing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum OverGap {
    /// None: it waits.
    No,
    /// Wait at its end: the policy decides.
    Overdue,
    /// Given once and for all: it runs.
    Yes,
}

/// Versions of aggregates, by ordering key; none before the first.
#[derive(Debug, Default, Clone)]
struct Aggregates(HashMap<Vec<u8>, Option<i64>>);

/// Version that a message makes, and the version that its aggregate is at.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Place {
    version: i64,
    at: Option<i64>,
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { version, at } = self;
        match at {
            Some(at) if version > at => {
                write!(f, "it makes version {version}, and its aggregate is at version {at}")
            }
            Some(at) => write!(
                f,
                "it makes version {version}, and its aggregate is at version {at} already"
            ),
            None => write!(f, "it makes version {version}, and its aggregate has none yet"),
        }
    }
}

/// Decision about a message by its version.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// Next version: the message runs.
    Next,
    /// Past version: the message is skipped.
    Old(Place),
    /// Version ahead: the message waits for those before it.
    Gap(Place),
    /// Version ahead after too long a wait: a worker that leased the message parks it.
    Overdue(Place),
}

impl Sequenced {
    /// Returns the decision about a message; one that is in no sequence runs.
    pub(crate) fn verdict(&self, message: &Message, gap: Gap) -> Verdict {
        self.verdict_at(&self.aggregates, message, gap)
    }

    /// Returns the decision about a message, with its aggregate at the version that `aggregates`
    /// gives.
    fn verdict_at(&self, aggregates: &Aggregates, message: &Message, gap: Gap) -> Verdict {
        let Some((version, over_gap)) = self.messages.get(&message.id) else {
            return Verdict::Next;
        };
        let place = Place { version: *version, at: aggregates.of(message) };
        match place.at {
            Some(at) if place.version <= at && !hooks::sabotage("old_versions_run") => {
                Verdict::Old(place)
            }
            Some(at) if place.version - 1 > at && !hooks::sabotage("gaps_unseen") => {
                match (over_gap, gap) {
                    (OverGap::Yes, _) | (OverGap::Overdue, Gap::GoOn) => Verdict::Next,
                    (OverGap::Overdue, Gap::Park) => Verdict::Overdue(place),
                    (OverGap::No, _) => Verdict::Gap(place),
                }
            }
            _ => Verdict::Next,
        }
    }

    /// Moves the aggregate of a completed message to its version.
    pub(crate) fn completed(&mut self, message: &Message) {
        if let Some((version, _)) = self.messages.get(&message.id) {
            self.aggregates.moved(message, *version);
            self.completed.push(message.id.clone());
        }
    }
}

impl Aggregates {
    /// Returns the version of a message's aggregate; none before the first.
    fn of(&self, message: &Message) -> Option<i64> {
        message.ordering_key.as_ref().and_then(|key| self.0.get(key).copied().flatten())
    }

    /// Moves a message's aggregate to a version, never back.
    fn moved(&mut self, message: &Message, version: i64) {
        if let Some(key) = &message.ordering_key {
            let at = self.0.entry(key.clone()).or_default();
            *at = (*at).max(Some(version));
        }
    }
}

impl ConsumerInbox {
    /// Reads the versions of the new messages of a batch, and of their aggregates.
    pub(crate) async fn sequenced(
        &self,
        transaction: &Transaction<'_>,
        batch: &[Routed],
        claims: &[Claimed],
    ) -> Result<Sequenced, InboxError> {
        let new = batch.iter().zip(claims).filter(|(_, claimed)| **claimed == Claimed::New);
        self.sequence_of(transaction, new.map(|(routed, _)| &routed.offered.message)).await
    }

    /// Reads the versions of messages of this transaction, and of their aggregates. Without
    /// `[sequence]` in the policy no message is in a sequence.
    pub(crate) async fn sequence_of(
        &self,
        transaction: &Transaction<'_>,
        messages: impl Iterator<Item = &Message>,
    ) -> Result<Sequenced, InboxError> {
        const SEQUENCE_OF: &str = "SELECT * FROM oncebox_host.sequence_of($1, $2, $3, $4)";
        let Some(policy) = &self.policy.sequence else { return Ok(Sequenced::default()) };
        let messages: HashMap<_, _> =
            messages.map(|message| (message.id.as_str(), message)).collect();
        let mut sequenced = Sequenced::default();
        if messages.is_empty() {
            return Ok(sequenced);
        }
        let query = sqlx::query(SEQUENCE_OF)
            .bind(transaction.secret())
            .bind(self.consumer_id)
            .bind(policy.first.map(i64::from))
            .bind(messages.keys().copied().collect::<Vec<_>>());
        let mut statement = transaction.tx().statement().await;
        let rows = bounded(query.fetch_all(statement.connection())).await;
        statement.finish(rows.as_ref().err());
        for row in rows? {
            let id: String = row.try_get("id")?;
            if let Some(key) =
                messages.get(id.as_str()).and_then(|message| message.ordering_key.clone())
            {
                sequenced.aggregates.0.insert(key, row.try_get("at")?);
                let over_gap = match (row.try_get("over_gap")?, row.try_get("reason")?) {
                    (true, _) => OverGap::Yes,
                    (false, Some("gap_overdue")) => OverGap::Overdue,
                    (false, _) => OverGap::No,
                };
                sequenced.messages.insert(id, (row.try_get("version")?, over_gap));
            }
        }
        Ok(sequenced)
    }

    /// Decides by its version whether a new message runs. Otherwise marks its claim as a gap, or
    /// skips the message.
    pub(crate) fn in_sequence(&self, done: &mut Done, routed: &Routed, index: usize) {
        let message = &routed.offered.message;
        if done.claims[index] != Claimed::New {
            return;
        }
        match done.sequenced.verdict(message, self.gap()) {
            Verdict::Next => {}
            Verdict::Gap(_) | Verdict::Overdue(_) => done.claims[index] = Claimed::Gap,
            Verdict::Old(place) => {
                self.log_sequence(
                    message,
                    place,
                    "a version that its aggregate is past was skipped",
                );
                done.completion.is_old(Ran::not(message), &place, &self.policy);
                done.claims[index] = Claimed::Old;
            }
        }
    }

    /// Splits a group into messages that may run in this call if the earlier ones complete, and the
    /// rest. The rest can only be decided after the call. Messages that do not run are marked in
    /// `done` and left out.
    pub(crate) fn next_together(
        &self,
        batch: &[Routed],
        group: Vec<usize>,
        done: &mut Done,
    ) -> (Vec<usize>, Vec<usize>) {
        let mut ahead = done.sequenced.aggregates.clone();
        let mut next = Vec::with_capacity(group.len());
        for (nth, index) in group.iter().copied().enumerate() {
            let Routed { offered, .. } = &batch[index];
            done.held.keep_back(index, offered, &mut done.claims[index]);
            if done.claims[index] != Claimed::New {
                continue;
            }
            let message = &offered.message;
            if done.sequenced.verdict_at(&ahead, message, self.gap()) == Verdict::Next {
                if let Some((version, _)) = done.sequenced.messages.get(&message.id) {
                    ahead.moved(message, *version);
                }
                next.push(index);
            } else if ahead.of(message) == done.sequenced.aggregates.of(message) {
                self.in_sequence(done, &batch[index], index);
            } else {
                return (next, group[nth..].to_vec());
            }
        }
        (next, Vec::new())
    }

    /// Stores a claimed message that has missing versions before it. It is due at once where this
    /// transaction brought those versions.
    pub(crate) fn waits_for_gap(
        &self,
        offered: &Offered,
        sequenced: &Sequenced,
        completion: &mut Completion,
    ) {
        match sequenced.verdict(&offered.message, self.gap()) {
            Verdict::Gap(place) => {
                self.log_sequence(
                    &offered.message,
                    place,
                    "versions are missing before a message; it waits",
                );
                completion.waits_for_gap(Ran::not(&offered.message), &place, self.gap_wait());
            }
            _ => completion.waits(offered, true),
        }
    }

    /// Decides by its version whether a leased message runs. Returns true where it does; otherwise
    /// adds the row that says why not.
    pub(crate) fn leased_in_sequence(
        &self,
        ran: Ran<'_>,
        sequenced: &Sequenced,
        completion: &mut Completion,
    ) -> bool {
        match sequenced.verdict(ran.message, self.gap()) {
            Verdict::Next => return true,
            Verdict::Old(place) => {
                self.log_sequence(
                    ran.message,
                    place,
                    "a version that its aggregate is past was skipped",
                );
                completion.is_old(ran, &place, &self.policy);
            }
            Verdict::Gap(place) => {
                self.log_sequence(
                    ran.message,
                    place,
                    "versions are missing before a message; it waits",
                );
                completion.waits_for_gap(ran, &place, self.gap_wait());
            }
            Verdict::Overdue(place) => {
                let Message { id, event_type, .. } = ran.message;
                let attempt = Some(ran.attempt);
                self.log_parked(&Parked {
                    trace_id: ran.message.trace_id(),
                    attempt,
                    ..Parked::new(id, event_type, crate::batch::complete::GAP)
                });
                completion.parked_for_gap(ran, &place);
            }
        }
        false
    }

    /// Moves the aggregates to the versions that completed in this transaction, and wakes the retry
    /// workers where that releases a message.
    pub(crate) async fn move_sequence(
        &self,
        transaction: &Transaction<'_>,
        sequenced: &Sequenced,
    ) -> Result<(), InboxError> {
        const MOVE: &str = "SELECT * FROM oncebox_host.move_sequence($1, $2, $3)";
        if sequenced.completed.is_empty() || hooks::sabotage("sequence_stays") {
            return Ok(());
        }
        hooks::point("inbox:sequence:before");
        let query = sqlx::query_scalar(MOVE)
            .bind(transaction.secret())
            .bind(self.consumer_id)
            .bind(&sequenced.completed);
        let mut statement = transaction.tx().statement().await;
        let released = bounded(query.fetch_one(statement.connection())).await;
        statement.finish(released.as_ref().err());
        if released? {
            self.due.after(AFTER_COMMIT);
        }
        hooks::point("inbox:sequence:after");
        Ok(())
    }

    /// Returns the policy for messages whose gap outlasts the wait.
    fn gap(&self) -> Gap {
        self.policy.sequence.as_ref().map(|sequence| sequence.gap).unwrap_or_default()
    }

    /// Returns how long a message waits for missing versions.
    fn gap_wait(&self) -> Duration {
        Duration::from_millis(
            self.policy.sequence.as_ref().map_or(0, |sequence| sequence.gap_wait_ms),
        )
    }

    /// Logs a decision about a message's version.
    fn log_sequence(&self, message: &Message, place: Place, text: &str) {
        tracing::info!(
            tenant = self.tenant,
            consumer = self.name,
            message_id = message.id,
            event_type = message.event_type,
            trace_id = message.trace_id(),
            version = place.version,
            at = place.at,
            "{text}"
        );
    }
}

/// Delay of a wakeup for messages that a transaction makes due, so that its commit comes first. The
/// poller finds them where the commit takes longer.
const AFTER_COMMIT: Duration = Duration::from_millis(20);
