//! States, as rows, metrics and the API show them.

use std::{fmt, str::FromStr};

use serde::{Deserialize, Serialize};
use sqlx::{
    Decode, Encode, Postgres, Type,
    encode::IsNull,
    error::BoxDynError,
    postgres::{PgArgumentBuffer, PgTypeInfo, PgValueRef},
};

/// Status of a message: the column `status` of its row.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum MessageStatus {
    /// Stored and due, with no failed run since. A claim stores a message so that runs under a
    /// lease. A redrive, the message before it in its key, the end of its gap, or a lease that was
    /// given back moves a message here.
    Received,
    /// Leased by a worker until `locked_until`. The worker's lease moves it here, and the worker's
    /// result, the next lease after that time, or the lease's return moves it on.
    InProgress,
    /// Its effect is committed. The transaction of the run moves it here, for good.
    Completed,
    /// A run failed and attempts are left. The failed run moves it here, and a worker leases it
    /// again at `next_attempt_at`.
    FailedRetryable,
    /// A dead letter: the handler rejected it, or no attempt is left. The failed run, or the claim
    /// of a message without a route, moves it here. It stays until an operator redrives or discards
    /// it.
    FailedTerminal,
    /// A message that needs an operator before it runs. A claim moves it here where it cannot run,
    /// a run where the handler asks for that, and the host after crashes or an overdue gap. It
    /// stays until an operator redrives or discards it, or until its gap closes.
    Parked,
    /// Behind an earlier open message of its key, or behind a missing version of its aggregate. A
    /// claim or a worker moves it here, and the completion or the discard of that message moves it
    /// on. So does the end of the gap or of `waits_until`.
    Waiting,
    /// Not run, for good. A claim or a worker moves it here where no handler takes it and the
    /// policy skips such messages, or where its aggregate is past its version.
    Skipped,
    /// Excluded from any run, for good. An operator's discard moves it here.
    Discarded,
}

impl MessageStatus {
    /// All statuses, in the order of the table's constraint.
    pub const ALL: [Self; 9] = [
        Self::Received,
        Self::InProgress,
        Self::Completed,
        Self::FailedRetryable,
        Self::FailedTerminal,
        Self::Parked,
        Self::Waiting,
        Self::Skipped,
        Self::Discarded,
    ];

    /// Names of all statuses, in the order of [`ALL`](Self::ALL).
    pub const NAMES: [&str; Self::ALL.len()] = {
        let mut names = [""; Self::ALL.len()];
        let mut nth = 0;
        while nth < names.len() {
            names[nth] = Self::ALL[nth].as_str();
            nth += 1;
        }
        names
    };

    /// Statuses of messages that run or are still to run.
    pub const PENDING: [Self; 4] =
        [Self::Received, Self::InProgress, Self::FailedRetryable, Self::Waiting];

    /// Statuses of messages that stay until an operator acts.
    pub const DEAD: [Self; 2] = [Self::FailedTerminal, Self::Parked];

    /// Returns the name of the status in rows, metrics and the API.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Received => "received",
            Self::InProgress => "in_progress",
            Self::Completed => "completed",
            Self::FailedRetryable => "failed_retryable",
            Self::FailedTerminal => "failed_terminal",
            Self::Parked => "parked",
            Self::Waiting => "waiting",
            Self::Skipped => "skipped",
            Self::Discarded => "discarded",
        }
    }

    /// Returns whether the message runs or is still to run.
    pub fn is_pending(self) -> bool {
        Self::PENDING.contains(&self)
    }

    /// Returns whether the message stays until an operator acts.
    pub fn is_dead(self) -> bool {
        Self::DEAD.contains(&self)
    }

    /// Returns whether the message never runs again, and later messages of its key do not wait for
    /// it.
    pub fn is_settled(self) -> bool {
        matches!(self, Self::Completed | Self::Skipped | Self::Discarded)
    }

    /// Returns whether later messages of its key have to wait for the message.
    pub fn is_open(self) -> bool {
        !self.is_settled()
    }
}

/// A text that is no status of a message.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{0}` is no status of a message")]
pub struct UnknownStatus(String);

impl FromStr for MessageStatus {
    type Err = UnknownStatus;

    fn from_str(text: &str) -> Result<Self, UnknownStatus> {
        let status = Self::ALL.into_iter().find(|status| status.as_str() == text);
        status.ok_or_else(|| UnknownStatus(text.to_owned()))
    }
}

impl fmt::Display for MessageStatus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}

// The column is a text. A type by name would cost a query for its number on each connection.
impl Type<Postgres> for MessageStatus {
    fn type_info() -> PgTypeInfo {
        <str as Type<Postgres>>::type_info()
    }

    fn compatible(ty: &PgTypeInfo) -> bool {
        <str as Type<Postgres>>::compatible(ty)
    }
}

impl Encode<'_, Postgres> for MessageStatus {
    fn encode_by_ref(&self, buffer: &mut PgArgumentBuffer) -> Result<IsNull, BoxDynError> {
        <&str as Encode<Postgres>>::encode(self.as_str(), buffer)
    }
}

impl<'r> Decode<'r, Postgres> for MessageStatus {
    fn decode(value: PgValueRef<'r>) -> Result<Self, BoxDynError> {
        Ok(<&str as Decode<Postgres>>::decode(value)?.parse()?)
    }
}

/// Reason of a message's status: the column `reason` of its row, up to a colon. Details may follow
/// the colon, as in `sql_error:23505`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Reason {
    /// The record has no usable id, event type or version, or its payload does not decode.
    Undecodable,
    /// The database refuses the row of the message, also when it is claimed alone.
    Unclaimable,
    /// The id is known with another payload.
    Collision,
    /// No deployment takes the event type and version.
    NoRoute,
    /// The payload has more bytes than the policy allows, and is not kept.
    TooLarge,
    /// The payload violates its schema.
    Schema,
    /// The reference to the payload cannot be read.
    ReferenceMalformed,
    /// The tenant may not have what the reference names.
    ReferenceNotAllowed,
    /// The store has no object where the reference points.
    ReferenceMissing,
    /// The object has more bytes than the policy allows.
    ReferenceTooLarge,
    /// The store did not deliver the object.
    ReferenceUnavailable,
    /// The record is older than the inbox remembers.
    Horizon,
    /// Versions of the aggregate before the message's own are missing.
    Gap,
    /// The missing versions did not come in time, and a worker is about to park or run the message.
    GapOverdue,
    /// The aggregate was at the message's version already, or past it.
    OldVersion,
    /// The process that had the message before died, so that the message runs under a lease.
    Probation,
    /// The runs ended with their process or connection, too often.
    Crashed,
    /// The handler asked for an operator.
    Park,
    /// The handler refused the message.
    Reject,
    /// The handler asked for another run.
    Retry,
    /// The guest trapped.
    Trap,
    /// The run reached its deadline.
    Deadline,
    /// The guest reached its memory limit.
    OutOfMemory,
    /// A cap of the consumer was reached.
    Limit,
    /// A statement failed, or a constraint at commit. Its SQLSTATE follows the colon.
    SqlError,
    /// A statement is of a kind that is not allowed.
    StatementRefused,
    /// Deadlocks or lock waits, also when the message ran alone.
    Contention,
    /// The handler's answer is invalid or could not be kept.
    BadResult,
    /// The handler failed with a text of its own.
    Other,
}

impl Reason {
    /// All reasons.
    pub const ALL: [Self; 29] = [
        Self::Undecodable,
        Self::Unclaimable,
        Self::Collision,
        Self::NoRoute,
        Self::TooLarge,
        Self::Schema,
        Self::ReferenceMalformed,
        Self::ReferenceNotAllowed,
        Self::ReferenceMissing,
        Self::ReferenceTooLarge,
        Self::ReferenceUnavailable,
        Self::Horizon,
        Self::Gap,
        Self::GapOverdue,
        Self::OldVersion,
        Self::Probation,
        Self::Crashed,
        Self::Park,
        Self::Reject,
        Self::Retry,
        Self::Trap,
        Self::Deadline,
        Self::OutOfMemory,
        Self::Limit,
        Self::SqlError,
        Self::StatementRefused,
        Self::Contention,
        Self::BadResult,
        Self::Other,
    ];

    /// Returns the name of the reason in rows, logs and metrics.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Undecodable => "undecodable",
            Self::Unclaimable => "unclaimable",
            Self::Collision => "collision",
            Self::NoRoute => "no_route",
            Self::TooLarge => "too_large",
            Self::Schema => "schema",
            Self::ReferenceMalformed => "reference_malformed",
            Self::ReferenceNotAllowed => "reference_not_allowed",
            Self::ReferenceMissing => "reference_missing",
            Self::ReferenceTooLarge => "reference_too_large",
            Self::ReferenceUnavailable => "reference_unavailable",
            Self::Horizon => "horizon",
            Self::Gap => "gap",
            Self::GapOverdue => "gap_overdue",
            Self::OldVersion => "old_version",
            Self::Probation => "probation",
            Self::Crashed => "crashed",
            Self::Park => "park",
            Self::Reject => "reject",
            Self::Retry => "retry",
            Self::Trap => "trap",
            Self::Deadline => "deadline",
            Self::OutOfMemory => "out_of_memory",
            Self::Limit => "limit",
            Self::SqlError => "sql_error",
            Self::StatementRefused => "statement_refused",
            Self::Contention => "contention",
            Self::BadResult => "bad_result",
            Self::Other => "other",
        }
    }

    /// Finds the reason that a row's text begins with; none for a text of another origin.
    pub fn of(text: &str) -> Option<Self> {
        text.split(':').next()?.parse().ok()
    }

    /// Returns whether the message was never understood, so that it has no identity to run under.
    pub fn is_without_identity(self) -> bool {
        matches!(self, Self::Undecodable | Self::Unclaimable)
    }
}

/// A text that is no reason of a message's status.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{0}` is no reason of a message's status")]
pub struct UnknownReason(String);

impl FromStr for Reason {
    type Err = UnknownReason;

    fn from_str(text: &str) -> Result<Self, UnknownReason> {
        let reason = Self::ALL.into_iter().find(|reason| reason.as_str() == text);
        reason.ok_or_else(|| UnknownReason(text.to_owned()))
    }
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}

/// A breaker that is not closed, as a host shows it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct BreakerState {
    /// The handler's version.
    pub version_id: i32,
    /// `open` or `half_open`.
    pub state: &'static str,
    /// Milliseconds until it lets a message probe; none while one probes.
    pub probes_in_ms: Option<u64>,
    /// Milliseconds for which it stays open the next time.
    pub pause_ms: u64,
}

/// State of a consumer, as its row holds it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, sqlx::Type)]
#[serde(rename_all = "snake_case")]
#[sqlx(type_name = "text", rename_all = "snake_case")]
pub enum ConsumerState {
    /// Hosts read its topics and run its messages.
    Running,
    /// Hosts run nothing of it.
    Paused,
    /// Hosts run the messages that are in the inbox, and read no others.
    Draining,
    /// Hosts remove its rows.
    Deleting,
}

impl ConsumerState {
    /// Returns the name in rows and in the API.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Running => "running",
            Self::Paused => "paused",
            Self::Draining => "draining",
            Self::Deleting => "deleting",
        }
    }

    /// Returns whether the consumer is being deleted.
    pub fn is_deleting(self) -> bool {
        self == Self::Deleting
    }

    /// Returns whether the offsets of the consumer's group may be set.
    pub fn allows_seek(self) -> bool {
        matches!(self, Self::Running | Self::Paused)
    }
}

impl fmt::Display for ConsumerState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}

/// State of a tenant, as its row holds it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, sqlx::Type)]
#[serde(rename_all = "snake_case")]
#[sqlx(type_name = "text", rename_all = "snake_case")]
pub enum TenantState {
    /// Its consumers run.
    Active,
    /// Its consumers are stopped, and its tokens only read.
    Suspended,
    /// Hosts remove everything of it.
    Deleting,
}

impl TenantState {
    /// Returns the name in rows and in the API.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Active => "active",
            Self::Suspended => "suspended",
            Self::Deleting => "deleting",
        }
    }

    /// Returns whether consumers of the tenant run.
    pub fn is_active(self) -> bool {
        self == Self::Active
    }

    /// Returns whether the tenant is being deleted.
    pub fn is_deleting(self) -> bool {
        self == Self::Deleting
    }
}

impl fmt::Display for TenantState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SCHEMA: &str = include_str!("../../../migrations/0001_schema.sql");
    const PAGE: &str = include_str!("../../../docs/inbox.md");

    #[test]
    fn statuses_are_those_of_the_table() {
        let (_, constraint) = SCHEMA.split_once("inbox_status_known CHECK").expect("a constraint");
        let (constraint, _) = constraint.split_once("CONSTRAINT").expect("another constraint");
        let known: Vec<_> = constraint.split('\'').skip(1).step_by(2).collect();
        assert_eq!(known, MessageStatus::NAMES);
        for status in MessageStatus::ALL {
            assert_eq!(status.as_str().parse(), Ok(status));
            assert_eq!(serde_json::json!(status), status.as_str());
            let groups = [status.is_pending(), status.is_dead(), status.is_settled()];
            assert_eq!(groups.into_iter().filter(|is| *is).count(), 1, "{status}");
        }
        let unknown = "gone".parse::<MessageStatus>().expect_err("an unknown status");
        assert_eq!(unknown.to_string(), "`gone` is no status of a message");
    }

    #[test]
    fn reasons_are_those_of_the_page() {
        let (_, table) = PAGE.split_once("| reason | state |").expect("a table of reasons");
        let (table, _) = table.split_once("\n\n").expect("an end of the table");
        let first = table.lines().skip(2).filter_map(|row| row.split('|').nth(1));
        let names = first.flat_map(|cell| cell.split('`').skip(1).step_by(2));
        let mut known: Vec<_> = names.map(|name| Reason::of(name).expect(name)).collect();
        known.sort_unstable();
        let mut all = Reason::ALL.to_vec();
        all.sort_unstable();
        assert_eq!(known, all);
        assert_eq!(Reason::of("unclaimable: sql_error:22021"), Some(Reason::Unclaimable));
        assert_eq!(Reason::of("because I say so"), None);
        assert_eq!(serde_json::json!(Reason::SqlError), Reason::SqlError.as_str());
    }
}
