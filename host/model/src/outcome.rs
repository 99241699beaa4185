//! The disposition of a message that ran, and every way in which a run can fail.

use std::time::Duration;

use crate::{
    reference::ReferenceFault,
    status::{MessageStatus, Reason},
};

/// The disposition of a message that ran.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Disposition {
    /// Its effect is committed.
    Completed,
    /// It will run again.
    FailedRetryable,
    /// It is a dead letter.
    FailedTerminal,
    /// It waits for an operator.
    Parked,
    /// No deployment takes it, and its consumer's policy permits that; or its aggregate is already
    /// past its version.
    Skipped,
}

impl Disposition {
    /// Returns whether later messages of its key have to wait.
    pub fn is_open(self) -> bool {
        MessageStatus::from(self).is_open()
    }

    /// Returns the status of its row.
    pub fn status(self) -> &'static str {
        MessageStatus::from(self).as_str()
    }
}

impl From<Disposition> for MessageStatus {
    fn from(disposition: Disposition) -> Self {
        match disposition {
            Disposition::Completed => Self::Completed,
            Disposition::FailedRetryable => Self::FailedRetryable,
            Disposition::FailedTerminal => Self::FailedTerminal,
            Disposition::Parked => Self::Parked,
            Disposition::Skipped => Self::Skipped,
        }
    }
}

/// A run that did not succeed: its kind, and a text for readers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Failure {
    /// Kind of the failure.
    pub kind: FailureKind,
    /// Text for readers; kept in `last_error`.
    pub text: String,
}

impl Failure {
    /// Creates a failure of a kind with its text.
    pub fn new(kind: FailureKind, text: impl Into<String>) -> Self {
        Self { kind, text: text.into() }
    }
}

/// Every way in which a run can fail.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum FailureKind {
    /// The guest trapped.
    Trap,
    /// The guest was stopped at its deadline.
    Deadline,
    /// The guest asked for more memory than its limit.
    OutOfMemory,
    /// The guest sent a statement of a kind that is not allowed.
    StatementRefused,
    /// A statement of the guest failed, or a constraint of its tables at commit.
    Sql {
        /// PostgreSQL's code.
        sqlstate: String,
    },
    /// A cap of the consumer was reached.
    Limit,
    /// Deadlock, serialization failure or lock timeout, also when run alone.
    Contention,
    /// The handler asked for another run, perhaps after a delay of its own choice.
    Retry {
        /// Delay that overrides the consumer's backoff.
        delay: Option<Duration>,
    },
    /// The handler will never take this message.
    Reject,
    /// The handler asked for an operator.
    Park,
    /// The handler failed with a text of its own.
    Other,
    /// The result of the handler could not be kept.
    BadResult,
    /// The connection or the process died while the message ran, repeatedly.
    Crashed,
    /// No deployment takes this event type.
    NoRoute,
    /// The payload does not match its schema.
    Schema,
    /// The payload that the message refers to was not fetched, so that no handler ran.
    Reference(ReferenceFault),
}

impl FailureKind {
    /// Returns the kind's name in rows, logs and metrics.
    pub fn name(&self) -> &'static str {
        Reason::from(self).as_str()
    }

    /// Returns whether the handler itself decided what happens to the message.
    pub fn is_decision(&self) -> bool {
        matches!(self, Self::Retry { .. } | Self::Reject | Self::Park)
    }

    /// Returns the `reason` of the inbox row: the kind, with the SQLSTATE where there is one.
    pub fn reason(&self) -> String {
        match self {
            Self::Sql { sqlstate } => format!("{}:{sqlstate}", Reason::SqlError),
            other => other.name().to_owned(),
        }
    }
}

impl From<&FailureKind> for Reason {
    fn from(kind: &FailureKind) -> Self {
        match kind {
            FailureKind::Trap => Self::Trap,
            FailureKind::Deadline => Self::Deadline,
            FailureKind::OutOfMemory => Self::OutOfMemory,
            FailureKind::StatementRefused => Self::StatementRefused,
            FailureKind::Sql { .. } => Self::SqlError,
            FailureKind::Limit => Self::Limit,
            FailureKind::Contention => Self::Contention,
            FailureKind::Retry { .. } => Self::Retry,
            FailureKind::Reject => Self::Reject,
            FailureKind::Park => Self::Park,
            FailureKind::Other => Self::Other,
            FailureKind::BadResult => Self::BadResult,
            FailureKind::Crashed => Self::Crashed,
            FailureKind::NoRoute => Self::NoRoute,
            FailureKind::Schema => Self::Schema,
            FailureKind::Reference(fault) => fault.reason(),
        }
    }
}
