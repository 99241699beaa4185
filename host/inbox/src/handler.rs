//! The seam between the inbox and whatever does the work: a component or plain Rust.

use std::{sync::Arc, time::Duration};

use futures::future::BoxFuture;
use tokio::time::Instant;

use crate::{complete::Disposition, message::Message, shadow::Shadow, tx::Tx};

/// Why a message is being run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DeliveryKind {
    /// The first run, straight from the broker.
    Live,
    /// A later run, from the inbox.
    Retry,
    /// A trial run of a candidate, after the live version's; always rolled back.
    Shadow,
}

/// One run of one message.
#[derive(Debug, Clone)]
pub struct Run<'a> {
    /// The tenant's name.
    pub tenant: &'a str,
    /// The consumer's name.
    pub consumer: &'a str,
    /// What to handle.
    pub message: &'a Message,
    /// Which run of this message this is, from 1.
    pub attempt: u32,
    /// Live, retry or shadow.
    pub kind: DeliveryKind,
    /// When the host stops this call.
    pub deadline: Instant,
}

/// One run of several messages in one call, each for the first time.
#[derive(Debug, Clone)]
pub struct BatchRun<'a> {
    /// The tenant's name.
    pub tenant: &'a str,
    /// The consumer's name.
    pub consumer: &'a str,
    /// What to handle, in the order of the partition; never empty.
    pub messages: &'a [&'a Message],
    /// When the host stops this call.
    pub deadline: Instant,
}

/// What a handler says of one message.
pub type Answer = Result<Option<String>, Failure>;

/// Does the work of a message. Its SQL goes through `tx`, into the transaction that also
/// holds the claim; it can neither commit nor roll back.
pub trait Handler: Send + Sync + 'static {
    /// The version that is recorded in the rows it completes.
    fn version(&self) -> i32;

    /// Told after the commit what became of a message that it ran for the first time.
    fn settled(&self, _disposition: Disposition) {}

    /// Whether its runs are counted to be compared with another version's, which needs them to go
    /// on. Its messages are never held back by a circuit breaker.
    fn is_judged(&self) -> bool {
        false
    }

    /// Wall clock for one call, where it is to be less than the consumer's.
    fn deadline(&self) -> Option<Duration> {
        None
    }

    /// Handle one message. Ok may carry a JSON document, kept in the inbox row.
    ///
    /// The future is dropped at the deadline, or never: everything it holds must be
    /// undone by a rollback.
    fn handle<'a>(&'a self, tx: &'a Tx, run: &'a Run<'a>) -> BoxFuture<'a, Answer>;

    /// Whether the new messages of a transaction go to [`Handler::handle_batch`], all in one call.
    fn takes_batches(&self) -> bool {
        false
    }

    /// Handle several messages. One answer for each, in order; an error speaks for none of them and
    /// says that the call as a whole failed. Only called where [`Handler::takes_batches`]; a single
    /// message may still go to [`Handler::handle`].
    fn handle_batch<'a>(
        &'a self,
        _tx: &'a Tx,
        _run: &'a BatchRun<'a>,
    ) -> BoxFuture<'a, Result<Vec<Answer>, Failure>> {
        Box::pin(async {
            Err(Failure::new(FailureKind::Other, "this handler takes one message at a time"))
        })
    }
}

/// The live handlers of one consumer, as loaded at one generation of its deployments.
pub trait Handlers: Send + Sync + 'static {
    /// The handler a message goes to, by its event type and version and, where a canary runs, by
    /// its ordering key. `failed` is the version that failed it before, which takes it again where
    /// its deployment says so.
    fn resolve(&self, message: &Message, failed: Option<i32>) -> Option<Arc<dyn Handler>>;
    /// The candidate that shadows the handler of this message, where there is one.
    fn shadow(&self, _message: &Message) -> Option<Arc<Shadow>> {
        None
    }
    /// Every handler that some message may go to; none where that is not known.
    fn all(&self) -> Vec<Arc<dyn Handler>> {
        Vec::new()
    }
    /// The generation of deployments this set was loaded at; the claim refuses older ones
    /// than the consumer requires.
    fn generation(&self) -> i64;
}

/// A run that did not succeed: its kind, and a text for people.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Failure {
    /// What happened.
    pub kind: FailureKind,
    /// For people; kept in `last_error`.
    pub text: String,
}

impl Failure {
    /// A failure of this kind with its text.
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
    /// The handler asked to be run again, perhaps after a delay of its own choice.
    Retry {
        /// Overrides the consumer's backoff.
        delay: Option<Duration>,
    },
    /// The handler will never take this message.
    Reject,
    /// The handler wants a person to look.
    Park,
    /// The handler failed with a text of its own.
    Other,
    /// What the handler returned could not be kept.
    BadResult,
    /// The connection or the process died while the message ran, repeatedly.
    Crashed,
    /// No deployment takes this event type.
    NoRoute,
    /// Its payload is not what its schema says.
    Schema,
}

impl FailureKind {
    /// The kind's name in rows, logs and metrics.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Trap => "trap",
            Self::Deadline => "deadline",
            Self::OutOfMemory => "out_of_memory",
            Self::StatementRefused => "statement_refused",
            Self::Sql { .. } => "sql_error",
            Self::Limit => "limit",
            Self::Contention => "contention",
            Self::Retry { .. } => "retry",
            Self::Reject => "reject",
            Self::Park => "park",
            Self::Other => "other",
            Self::BadResult => "bad_result",
            Self::Crashed => "crashed",
            Self::NoRoute => "no_route",
            Self::Schema => "schema",
        }
    }

    /// Whether the handler itself said what is to become of the message.
    pub fn is_decision(&self) -> bool {
        matches!(self, Self::Retry { .. } | Self::Reject | Self::Park)
    }

    /// What the inbox row says under `reason`: the kind, with the SQLSTATE where there is one.
    pub fn reason(&self) -> String {
        match self {
            Self::Sql { sqlstate } => format!("sql_error:{sqlstate}"),
            other => other.name().to_owned(),
        }
    }
}
