//! The sequence of an aggregate's versions: which message is next, which is past, and which has
//! missing versions before it.
//!
//! The host reads and moves the sequence in the transaction of the message, under the lock of its
//! key.

use std::{collections::HashMap, fmt};

use oncebox_model::{
    error::InboxError,
    hooks::{self, Defect},
    message::Message,
    policy::{self, Gap},
};
use sqlx::Row;

use crate::{host_call::host_call, session::Transaction};

/// Versions of the messages of one transaction, and of their aggregates.
#[derive(Debug, Default)]
pub(crate) struct SequenceState {
    /// Version that each message makes, by message id, and whether it may run over its gap.
    messages: HashMap<String, (i64, GapOverride)>,
    /// Versions of the aggregates, moved as messages complete.
    aggregates: Aggregates,
    /// Ids of the messages that completed.
    completed: Vec<String>,
}

/// Permission of a message to run although versions before its own are missing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum GapOverride {
    /// None: it waits.
    No,
    /// Wait at its end: the policy decides.
    Overdue,
    /// Given once and for all: it runs.
    Yes,
}

/// Versions of aggregates, by ordering key; none before the first.
#[derive(Debug, Default, Clone)]
pub(crate) struct Aggregates(HashMap<Vec<u8>, Option<i64>>);

/// Version that a message makes, and the version that its aggregate is at.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct SequencePosition {
    pub(crate) version: i64,
    pub(crate) at: Option<i64>,
}

impl fmt::Display for SequencePosition {
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
pub(crate) enum SequenceVerdict {
    /// Next version: the message runs.
    Next,
    /// Past version: the message is skipped.
    Superseded(SequencePosition),
    /// Version ahead: the message waits for those before it.
    Gap(SequencePosition),
    /// Version ahead after too long a wait: a worker that leased the message parks it.
    Overdue(SequencePosition),
}

impl SequenceState {
    /// Returns the decision about a message; one that is in no sequence runs.
    pub(crate) fn verdict(&self, message: &Message, gap: Gap) -> SequenceVerdict {
        self.verdict_at(&self.aggregates, message, gap)
    }

    /// Returns the decision about a message, with its aggregate at the version that `aggregates`
    /// gives.
    pub(crate) fn verdict_at(
        &self,
        aggregates: &Aggregates,
        message: &Message,
        gap: Gap,
    ) -> SequenceVerdict {
        let Some((version, gap_override)) = self.messages.get(&message.id) else {
            return SequenceVerdict::Next;
        };
        let position = SequencePosition { version: *version, at: aggregates.of(message) };
        match position.at {
            Some(at) if is_past(position.version, at) => SequenceVerdict::Superseded(position),
            Some(at) if is_gap(position.version, at) => match (gap_override, gap) {
                (GapOverride::Yes, _) | (GapOverride::Overdue, Gap::Proceed) => {
                    SequenceVerdict::Next
                }
                (GapOverride::Overdue, Gap::Park) => SequenceVerdict::Overdue(position),
                (GapOverride::No, _) => SequenceVerdict::Gap(position),
            },
            _ => SequenceVerdict::Next,
        }
    }

    /// Returns the versions of the aggregates, to be moved ahead on trial.
    pub(crate) fn aggregates(&self) -> &Aggregates {
        &self.aggregates
    }

    /// Moves a message's aggregate to its version, in `aggregates`.
    pub(crate) fn advance(&self, aggregates: &mut Aggregates, message: &Message) {
        if let Some((version, _)) = self.messages.get(&message.id) {
            aggregates.moved(message, *version);
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

/// Returns whether an aggregate at version `at` is past a message's version.
fn is_past(version: i64, at: i64) -> bool {
    version <= at && !hooks::sabotage(Defect::OldVersionsRun)
}

/// Returns whether versions are missing between an aggregate at version `at` and a message's.
fn is_gap(version: i64, at: i64) -> bool {
    version - 1 > at && !hooks::sabotage(Defect::GapsUnseen)
}

impl Aggregates {
    /// Returns the version of a message's aggregate; none before the first.
    pub(crate) fn of(&self, message: &Message) -> Option<i64> {
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

/// Reads the versions of messages of this transaction, and of their aggregates. Without
/// `[sequence]` in the policy no message is in a sequence.
pub(crate) async fn sequence_of(
    transaction: &Transaction<'_>,
    consumer_id: i32,
    policy: Option<&policy::Sequence>,
    messages: impl Iterator<Item = &Message>,
) -> Result<SequenceState, InboxError> {
    let mut state = SequenceState::default();
    let Some(policy) = policy else { return Ok(state) };
    let messages: HashMap<_, _> = messages.map(|message| (message.id.as_str(), message)).collect();
    if messages.is_empty() {
        return Ok(state);
    }
    let query = host_call!("sequence_of" {
        p_secret: transaction.secret(),
        p_consumer: consumer_id,
        p_first: policy.first.map(i64::from),
        p_id: messages.keys().copied().collect::<Vec<_>>(),
    });
    for row in transaction.rows(query).await? {
        let id: String = row.try_get("id")?;
        let key = messages.get(id.as_str()).and_then(|message| message.ordering_key.clone());
        let Some(key) = key else { continue };
        state.aggregates.0.insert(key, row.try_get("at")?);
        let gap_override = match (row.try_get("over_gap")?, row.try_get("reason")?) {
            (true, _) => GapOverride::Yes,
            (false, Some("gap_overdue")) => GapOverride::Overdue,
            (false, _) => GapOverride::No,
        };
        state.messages.insert(id, (row.try_get("version")?, gap_override));
    }
    Ok(state)
}

/// Moves the aggregates to the versions that completed in this transaction. Returns true where that
/// releases a message.
pub(crate) async fn move_sequence(
    transaction: &Transaction<'_>,
    consumer_id: i32,
    state: &SequenceState,
) -> Result<bool, InboxError> {
    if state.completed.is_empty() || hooks::sabotage(Defect::SequenceStays) {
        return Ok(false);
    }
    hooks::point("inbox:sequence:before");
    let query = host_call!("move_sequence" {
        p_secret: transaction.secret(),
        p_consumer: consumer_id,
        p_id: &state.completed,
    });
    let is_released = transaction.row(query).await?.try_get(0)?;
    hooks::point("inbox:sequence:after");
    Ok(is_released)
}
