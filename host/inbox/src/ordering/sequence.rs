//! The sequence of an aggregate's versions: which message is next, which is past, and before which
//! one some are missing. Judged and moved in the transaction of the message, under the lock of its
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

/// Where messages of one transaction, and their aggregates, stand.
#[derive(Debug, Default)]
pub(crate) struct Sequenced {
    /// The version that each message makes, and whether it may run over its gap.
    messages: HashMap<String, (i64, OverGap)>,
    aggregates: Aggregates,
    /// Messages that completed.
    completed: Vec<String>,
}

/// Whether a message may run although versions before its own are missing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum OverGap {
    /// It is to wait.
    No,
    /// It has waited for as long as the policy says.
    Overdue,
    /// It was let to, once and for all.
    Yes,
}

/// The versions that aggregates are at, by ordering key; none before the first.
#[derive(Debug, Default, Clone)]
struct Aggregates(HashMap<Vec<u8>, Option<i64>>);

/// What a message makes, and where its aggregate is.
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

/// What is to become of a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// It runs.
    Next,
    /// Its aggregate is past it.
    Old(Place),
    /// It waits for versions before it.
    Gap(Place),
    /// It has waited too long for them.
    Overdue(Place),
}

impl Sequenced {
    /// What is to become of a message. One that is in no sequence runs.
    pub(crate) fn verdict(&self, message: &Message, gap: Gap) -> Verdict {
        self.verdict_at(&self.aggregates, message, gap)
    }

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

    /// A message completed, so its aggregate is at its version.
    pub(crate) fn completed(&mut self, message: &Message) {
        if let Some((version, _)) = self.messages.get(&message.id) {
            self.aggregates.moved(message, *version);
            self.completed.push(message.id.clone());
        }
    }
}

impl Aggregates {
    fn of(&self, message: &Message) -> Option<i64> {
        message.ordering_key.as_ref().and_then(|key| self.0.get(key).copied().flatten())
    }

    fn moved(&mut self, message: &Message, version: i64) {
        if let Some(key) = &message.ordering_key {
            let at = self.0.entry(key.clone()).or_default();
            *at = (*at).max(Some(version));
        }
    }
}

impl ConsumerInbox {
    /// Where the messages of a batch stand that are to be run.
    pub(crate) async fn sequenced(
        &self,
        transaction: &Transaction<'_>,
        batch: &[Routed],
        claims: &[Claimed],
    ) -> Result<Sequenced, InboxError> {
        let new = batch.iter().zip(claims).filter(|(_, claimed)| **claimed == Claimed::New);
        self.sequence_of(transaction, new.map(|(routed, _)| &routed.offered.message)).await
    }

    /// Where messages of this transaction stand.
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

    /// A claimed message that is about to run may have to wait, or is not to run at all.
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

    /// Of messages that are to run in one call, those whose turn it is if those before them
    /// complete, and those of which that can only be said afterwards.
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

    /// The row of a claimed message before which versions are missing: due at once where its
    /// transaction brought them.
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

    /// What is written of a leased message that does not run; true where it is to run.
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

    /// Move the aggregates to the versions of what completed in this transaction.
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

    fn gap(&self) -> Gap {
        self.policy.sequence.as_ref().map(|sequence| sequence.gap).unwrap_or_default()
    }

    fn gap_wait(&self) -> Duration {
        Duration::from_millis(
            self.policy.sequence.as_ref().map_or(0, |sequence| sequence.gap_wait_ms),
        )
    }

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

/// What a transaction makes due is due once it is committed; a look finds it where that takes
/// longer.
const AFTER_COMMIT: Duration = Duration::from_millis(20);
