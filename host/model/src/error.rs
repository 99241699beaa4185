//! What can go wrong in the inbox, and whose fault it is.

use std::time::Duration;

use sqlx::migrate::MigrateError;

use crate::{
    meter::Stopped,
    problem::Problem,
    tx::{StatementError, answered},
};

/// An error of the inbox itself. A handler's failure is not one: it becomes a row.
#[derive(Debug, thiserror::Error)]
pub enum InboxError {
    /// The database cannot be reached, or a connection broke outside a handler.
    #[error("the database is not reachable: {}", plain(.0))]
    Unreachable(#[source] sqlx::Error),
    /// The server answers, and holds no database of this name.
    #[error("database `{database}` does not exist; `oncebox migrate` creates it")]
    NoDatabase {
        /// Its name.
        database: String,
    },
    /// The database that a tenant named cannot be reached.
    #[error("the database of tenant `{tenant}` is not reachable: {}", plain(.source))]
    PlaceAway {
        /// The tenant.
        tenant: String,
        /// What the driver says.
        source: sqlx::Error,
    },
    /// A change is made in the host's database, and a tenant's own does not know of it yet.
    #[error("{text}: {source}")]
    NotThereYet {
        /// What is to be done about it.
        text: String,
        /// Why.
        source: Box<InboxError>,
    },
    /// The answer to COMMIT was lost. Claiming again finds out what became of it.
    #[error("the answer to a commit was lost: {}", plain(.0))]
    CommitUnknown(#[source] sqlx::Error),
    /// The connection broke alone while a handler ran; its message is suspect now.
    #[error("the connection broke while message `{message_id}` ran")]
    LostInHandler {
        /// The message that ran, or the first of those that ran together.
        message_id: String,
        /// From the front of the batch, the messages that ran on it.
        among: usize,
    },
    /// The connection broke while a handler ran, and others with it: nothing is known of its
    /// message.
    #[error(
        "connections to the database broke, one of them while message `{message_id}` ran; it runs \
            again and nothing is counted"
    )]
    LostInOutage {
        /// The message that ran, or the first of those that ran together.
        message_id: String,
        /// From the front of the batch, the messages that ran on it.
        among: usize,
    },
    /// Another session holds a claim on one of these messages.
    #[error("a message of the batch is in flight elsewhere")]
    InFlightElsewhere,
    /// Another process holds a lock of the host's for too long.
    #[error("{text}")]
    HostLocked {
        /// What it is taken for.
        purpose: &'static str,
        /// For operators: who holds it, and what to do.
        text: String,
    },
    /// The consumer requires a newer generation of deployments than this host has loaded.
    #[error("the deployments loaded here are stale")]
    StaleDeployments,
    /// The version these messages go to fails too often; they wait at their place.
    #[error("the circuit breaker of version {version} is open; its messages are offered again in \
        {} ms", again_in.as_millis())]
    BreakerOpen {
        /// The version.
        version: i32,
        /// When to offer them again.
        again_in: Duration,
    },
    /// The host stopped a transaction before its end. Its messages have lost nothing.
    #[error("{}", match why {
        Stopped::GaveWay => "a transaction held a place that is kept for other tenants for too \
            long and was rolled back; it runs again",
        Stopped::Withdrawn => "a transaction was rolled back: its consumer or tenant is to rest",
    })]
    Stopped {
        /// Why.
        why: Stopped,
    },
    /// The tenant's database is away, and someone else tries it.
    #[error("the database is away; it is tried again in {} ms", again_in.as_millis())]
    DatabaseAway {
        /// When to try again.
        again_in: Duration,
    },
    /// Connections begin without the options that they ask for: something stands between the host
    /// and PostgreSQL.
    #[error(
        "the startup options {} of a connection do not reach PostgreSQL; a pooler such as \
            PgBouncer drops them, and the \
         host's limits and rights rest on them: connect to PostgreSQL directly",
        named(lost)
    )]
    OptionsLost {
        /// Names of the options.
        lost: Vec<String>,
    },
    /// The schema of a payload cannot be asked for.
    #[error("{0}")]
    RegistryAway(oncebox_registry::RegistryError),
    /// The schema of a payload is not at hand yet.
    #[error(
        "the schema registry did not hand out the schema of a message in time; the message runs \
            later"
    )]
    SchemaLate,
    /// PostgreSQL refused a statement of the host.
    #[error("the database refused a statement of the host: {}", plain(.0))]
    Refused(#[source] sqlx::Error),
    /// A setting that cannot work.
    #[error("{0}")]
    Invalid(String),
    /// A policy that cannot work, with every key that is wrong.
    #[error("{}", joined(.0))]
    Policy(Vec<Problem>),
    /// A text of SQL that is refused before anything of it runs.
    #[error("{what} was not applied: {}", joined(problems))]
    Statements {
        /// Which text.
        what: String,
        /// Everything that is wrong with it, each with its line.
        problems: Vec<Problem>,
    },
    /// Something named does not exist.
    #[error("{0}")]
    NotFound(String),
    /// What was asked for is in the way of what there is.
    #[error("{text}")]
    Conflict {
        /// Stable, for programs: `conflict`, `version_not_ready`, `component_refused`,
        /// `migration_missing`.
        code: &'static str,
        /// For people.
        text: String,
    },
    /// Something that is kept sealed does not open with this host's master key.
    #[error("{0}")]
    Sealed(String),
    /// A migration failed.
    #[error("a migration failed: {0}")]
    Migration(#[from] MigrateError),
}

/// How long the messages of a stopped transaction wait before they ask for a place again.
const STOPPED: Duration = Duration::from_millis(250);

/// Who has to do something about it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Blame {
    /// The host or its database; a message's attempts stay untouched.
    Host,
    /// Whoever called, with what they asked for.
    Caller,
}

impl InboxError {
    /// Something stands in the way, under the code for no particular reason.
    pub fn conflict(text: impl Into<String>) -> Self {
        Self::Conflict { code: "conflict", text: text.into() }
    }

    /// Whose fault it is.
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

    /// Whether the same call may succeed later.
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

    /// Whether the database is away, and may answer the same call later without anybody changing
    /// anything: as opposed to one that is there and refuses.
    pub fn is_away(&self) -> bool {
        match self {
            Self::Unreachable(error)
            | Self::PlaceAway { source: error, .. }
            | Self::Refused(error)
            | Self::CommitUnknown(error) => is_of_outage(error),
            Self::Migration(
                MigrateError::Execute(error) | MigrateError::ExecuteMigration(error, _),
            ) => is_of_outage(error),
            Self::DatabaseAway { .. } | Self::InFlightElsewhere => true,
            _ => false,
        }
    }

    /// How long to wait before the same call, where that is known and nothing is wrong with the
    /// call itself.
    pub fn again_in(&self) -> Option<Duration> {
        match self {
            Self::BreakerOpen { again_in, .. } | Self::DatabaseAway { again_in } => Some(*again_in),
            Self::Stopped { .. } => Some(STOPPED),
            _ => None,
        }
    }

    /// Whether it is known that nothing was committed.
    pub fn is_outcome_known(&self) -> bool {
        !matches!(self, Self::CommitUnknown(_))
    }
}

/// Whether an error of the driver comes of an outage.
fn is_of_outage(error: &sqlx::Error) -> bool {
    match error {
        // A connection that is refused, broken, cut off in the middle of a message, or not
        // answered; a name that is not resolved for now.
        sqlx::Error::Io(_) | sqlx::Error::PoolTimedOut | sqlx::Error::Protocol(_) => true,
        sqlx::Error::Database(answer) => answer.code().is_some_and(|code| {
            // Connections that broke, resources that ran out, operators that intervened, the
            // system's own trouble; a standby that is about to become the primary, or was it until
            // now; locks of others.
            ["08", "53", "57", "58"].iter().any(|class| code.starts_with(class))
                || ["25006", "55P03", "40001", "40P01"].contains(&&*code)
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

/// What happened, without the driver's frame around it.
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
            Some(StatementError { sqlstate, .. }) => match sqlstate.as_str() {
                "55P03" | "40P01" | "40001" => Self::InFlightElsewhere,
                "OB005" => Self::StaleDeployments,
                _ => Self::Refused(error),
            },
            None => Self::Unreachable(error),
        }
    }
}
