//! The errors of the inbox, and the side that is to blame for each.

use std::time::Duration;

use sqlx::migrate::MigrateError;

use crate::{
    meter::Stopped,
    problem::Problem,
    sqlstate,
    tx::{StatementError, answered},
};

/// An error of the inbox itself. A handler's failure is no such error: it becomes a row.
#[derive(Debug, thiserror::Error)]
pub enum InboxError {
    /// Database that cannot be reached, or a connection that broke outside a handler.
    #[error("the database is not reachable: {}", plain(.0))]
    Unreachable(#[source] sqlx::Error),
    /// Server that answers but holds no database of this name.
    #[error("database `{database}` does not exist; `oncebox migrate` creates it")]
    NoDatabase {
        /// Name of the database.
        database: String,
    },
    /// Database named by a tenant that cannot be reached.
    #[error("the database of tenant `{tenant}` is not reachable: {}", plain(.source))]
    TenantDatabaseUnavailable {
        /// Name of the tenant.
        tenant: String,
        /// Error of the driver.
        source: sqlx::Error,
    },
    /// Change that the host's database has and a tenant's own database does not have yet.
    #[error("{text}: {source}")]
    NotPropagated {
        /// Advice on what to do.
        text: String,
        /// Cause.
        source: Box<InboxError>,
    },
    /// Lost answer to COMMIT. Claiming the messages again reveals whether they were committed.
    #[error("the answer to a commit was lost: {}", plain(.0))]
    CommitUnknown(#[source] sqlx::Error),
    /// Connection that broke alone while a handler ran; its message becomes suspect.
    #[error("the connection broke while message `{message_id}` ran")]
    LostInHandler {
        /// Id of the message that ran, or of the first of those that ran together.
        message_id: String,
        /// Number of messages, from the front of the batch, that ran on the connection.
        among: usize,
    },
    /// Connection that broke while a handler ran, and others with it: the break says nothing about
    /// the message.
    #[error(
        "connections to the database broke, one of them while message `{message_id}` ran; it runs \
            again and nothing is counted"
    )]
    LostInOutage {
        /// Id of the message that ran, or of the first of those that ran together.
        message_id: String,
        /// Number of messages, from the front of the batch, that ran on the connection.
        among: usize,
    },
    /// Claim by another session on one of these messages.
    #[error("a message of the batch is in flight elsewhere")]
    InFlightElsewhere,
    /// Lock of the host that another process holds for too long.
    #[error("{text}")]
    HostLocked {
        /// Purpose of the lock.
        purpose: &'static str,
        /// Text for operators: the holder of the lock, and what to do.
        text: String,
    },
    /// Server that has started since the last transaction of a partition. It may have lost commits,
    /// which the partition checks first.
    #[error("the database's server has started again, or another server has taken its place")]
    ServerStarted,
    /// Server that does not have commits of a partition any more that it had confirmed.
    #[error(
        "the database has lost commits of partition {partition} of topic `{topic}` that it had \
            confirmed"
    )]
    CommitsLost {
        /// Name of the topic.
        topic: String,
        /// Number of the partition.
        partition: i32,
    },
    /// Deployments loaded on this host that are of an older generation than the consumer requires.
    #[error("the deployments loaded here are stale")]
    StaleDeployments,
    /// Open circuit breaker of the version that these messages go to: it fails too often. The
    /// messages wait at their place.
    #[error("the circuit breaker of version {version} is open; its messages are offered again in \
        {} ms", retry_after.as_millis())]
    BreakerOpen {
        /// The version.
        version: i32,
        /// Time until the messages may be offered again.
        retry_after: Duration,
    },
    /// Transaction that the host stopped before its end. Its messages have lost nothing.
    #[error("{}", match why {
        Stopped::GaveWay => "a transaction held a place that is kept for other tenants for too \
            long and was rolled back; it runs again",
        Stopped::Withdrawn => "a transaction was rolled back: its consumer or tenant is to rest",
    })]
    Stopped {
        /// Cause.
        why: Stopped,
    },
    /// Unavailable database of the tenant, while another task tries to connect to it.
    #[error("the database is away; it is tried again in {} ms", retry_after.as_millis())]
    DatabaseUnavailable {
        /// Time until the next try.
        retry_after: Duration,
    },
    /// Connections that begin without the options they ask for: a program stands between the host
    /// and PostgreSQL.
    #[error(
        "the startup options {} of a connection do not reach PostgreSQL; a pooler such as \
            PgBouncer drops them, and the \
         host's limits and rights rest on them: connect to PostgreSQL directly",
        named(lost)
    )]
    OptionsLost {
        /// Names of the lost options.
        lost: Vec<String>,
    },
    /// Schema registry that cannot be asked for the schema of a payload.
    #[error("{0}")]
    RegistryUnavailable(oncebox_registry::RegistryError),
    /// Schema of a payload that the registry has not delivered in time.
    #[error(
        "the schema registry did not hand out the schema of a message in time; the message runs \
            later"
    )]
    SchemaTimeout,
    /// Store from which this host cannot fetch the payload of any message.
    #[error("{0}")]
    StoreNotOpened(String),
    /// Payload that is still to be fetched: the messages are offered again at once, and fetched
    /// before.
    #[error("the payload of a message is still to be fetched")]
    PayloadNotAtHand,
    /// Statement of the host that PostgreSQL refused.
    #[error("the database refused a statement of the host: {}", plain(.0))]
    Refused(#[source] sqlx::Error),
    /// Table of the host without a time partition for a row that is written now.
    #[error(
        "a time partition of the host's tables is missing; hosts make them ahead of time, and \
         `oncebox migrate` does so at once ({0})"
    )]
    PartitionMissing(String),
    /// Setting that cannot work.
    #[error("{0}")]
    Invalid(String),
    /// Policy that cannot work, with every key that is wrong.
    #[error("{}", joined(.0))]
    Policy(Vec<Problem>),
    /// Text of SQL that is refused before any of it runs.
    #[error("{what} was not applied: {}", joined(problems))]
    Statements {
        /// Name of the text.
        what: String,
        /// All problems of the text, each with its line.
        problems: Vec<Problem>,
    },
    /// Named object that does not exist.
    #[error("{0}")]
    NotFound(String),
    /// Request that conflicts with the present state.
    #[error("{text}")]
    Conflict {
        /// Stable code for programs: `conflict`, `version_not_ready`, `component_refused`,
        /// `migration_missing`, `grant_missing`, `host_too_old`.
        code: &'static str,
        /// Text for readers.
        text: String,
    },
    /// Sealed value that this host's master key does not open.
    #[error("{0}")]
    Sealed(String),
    /// Archive that takes or serves no file, or a file in it that is damaged.
    #[error("{error}")]
    Archive {
        /// Text for callers of the API: the file, without what the storage answered.
        text: String,
        /// Whole text, for operators.
        error: String,
    },
    /// Migration that failed.
    #[error("a migration failed: {0}")]
    Migration(#[from] MigrateError),
}

/// Time that the messages of a stopped transaction wait before they ask for admission again.
const STOPPED: Duration = Duration::from_millis(250);

/// The side that has to act on an error.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Blame {
    /// The host or its database; a message's attempts stay untouched.
    Host,
    /// The caller, with what it asked for.
    Caller,
}

impl InboxError {
    /// Creates a conflict under the general code `conflict`.
    pub fn conflict(text: impl Into<String>) -> Self {
        Self::Conflict { code: "conflict", text: text.into() }
    }

    /// Returns the side that is to blame.
    pub fn blame(&self) -> Blame {
        match self {
            Self::Invalid(_)
            | Self::Policy(_)
            | Self::Statements { .. }
            | Self::NotFound(_)
            | Self::Conflict { .. } => Blame::Caller,
            _ => Blame::Host,
        }
    }

    /// Returns whether repeating the call later may succeed.
    pub fn is_retryable(&self) -> bool {
        self.blame() == Blame::Host
            && !matches!(
                self,
                Self::Migration(_)
                    | Self::Sealed(_)
                    | Self::OptionsLost { .. }
                    | Self::NoDatabase { .. }
            )
    }

    /// Returns whether the database is unavailable and may answer a repeated call without any
    /// change by an operator. A database that is available and refuses is a different case.
    pub fn is_away(&self) -> bool {
        match self {
            Self::Unreachable(error)
            | Self::TenantDatabaseUnavailable { source: error, .. }
            | Self::Refused(error)
            | Self::CommitUnknown(error) => is_of_outage(error),
            Self::Migration(
                MigrateError::Execute(error) | MigrateError::ExecuteMigration(error, _),
            ) => is_of_outage(error),
            Self::DatabaseUnavailable { .. } | Self::InFlightElsewhere => true,
            _ => false,
        }
    }

    /// Returns how long to wait before repeating the call. None where that is unknown, or where the
    /// call itself is wrong.
    pub fn retry_after(&self) -> Option<Duration> {
        match self {
            Self::BreakerOpen { retry_after, .. } | Self::DatabaseUnavailable { retry_after } => {
                Some(*retry_after)
            }
            Self::Stopped { .. } => Some(STOPPED),
            Self::PayloadNotAtHand => Some(Duration::ZERO),
            _ => None,
        }
    }

    /// Returns whether PostgreSQL refuses the row itself, so that it would refuse it again: a value
    /// that does not fit, or one that an index or a constraint of the table does not take. A missing
    /// time partition counts as a constraint without a name, and is none of the row's.
    pub fn is_of_row(&self) -> bool {
        let Self::Refused(error) = self else { return false };
        answered(error).is_some_and(|answer| {
            let is_of = |class: &str| answer.sqlstate.starts_with(class);
            is_of("22") || is_of("54") || is_of("23") && answer.constraint.is_some()
        })
    }

    /// Returns whether it is certain that nothing was committed.
    pub fn is_outcome_known(&self) -> bool {
        !matches!(self, Self::CommitUnknown(_))
    }
}

/// Returns whether an error of the driver comes from an outage.
fn is_of_outage(error: &sqlx::Error) -> bool {
    match error {
        // Connections that are refused, broken, cut off in the middle of a message, or not
        // answered; a name that does not resolve at the moment.
        sqlx::Error::Io(_) | sqlx::Error::PoolTimedOut | sqlx::Error::Protocol(_) => true,
        sqlx::Error::Database(answer) => answer.code().is_some_and(|code| {
            // Classes: connections that broke, exhausted resources, operator intervention, system
            // errors. Codes: a standby that is about to become the primary or has just stopped
            // being it, and locks of other transactions.
            ["08", "53", "57", "58"].iter().any(|class| code.starts_with(class))
                || code == sqlstate::READ_ONLY_TRANSACTION
                || sqlstate::is_of_another_transaction(&code)
        }),
        _ => false,
    }
}

fn named(names: &[String]) -> String {
    names.iter().map(|name| format!("`{name}`")).collect::<Vec<_>>().join(", ")
}

fn joined(problems: &[Problem]) -> String {
    problems.iter().map(|problem| problem.text.as_str()).collect::<Vec<_>>().join("; ")
}

/// Returns the text of an error without the driver's frame around it.
pub fn plain(error: &sqlx::Error) -> String {
    match error {
        sqlx::Error::Database(answer) => answer.message().to_owned(),
        sqlx::Error::Io(error) => error.to_string(),
        other => other.to_string(),
    }
}

impl From<sqlx::Error> for InboxError {
    fn from(error: sqlx::Error) -> Self {
        match answered(&error) {
            Some(StatementError { sqlstate: code, .. }) => match code.as_str() {
                code if sqlstate::is_of_another_transaction(code) => Self::InFlightElsewhere,
                sqlstate::STALE_DEPLOYMENTS => Self::StaleDeployments,
                _ => Self::Refused(error),
            },
            None => Self::Unreachable(error),
        }
    }
}
