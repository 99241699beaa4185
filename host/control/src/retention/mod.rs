//! Retention: the removal of time partitions whose messages are past their retention class.
//!
//! A host removes a partition in steps, each of which it commits before the next
//! ([`removal`](self::removal)). The row of `oncebox.removal` and the catalog say how far a removal
//! is, so that another host continues after a crash at any step. One process at a time works on a
//! database, under a lock that ends with its connection.

// The time partitions, and when each is due.
pub(crate) mod partitions;
// The removal of one, step by step.
mod removal;
// The count of its messages, in slices.
mod count;
// The pauses of a removal.
mod pauses;
// One run over every database.
mod run_all;
// The removal of old outgoing messages.
mod outgoing;

use std::time::Duration;

use oncebox_model::error::InboxError;
use sqlx::{Connection, PgConnection};

use crate::{
    archive::attempt::leave_attempts,
    database::{
        locks::{self, HostLock},
        schema,
        tenant_database::{DatabaseLabel, InboxDatabase, open::answered_within},
    },
    handles::Retention,
};

pub use partitions::TimePartition;
pub use removal::Removal;
pub use run_all::{OtherProcess, RetentionFailure, RetentionResult};

/// Removals that a report shows, of the newest.
const SHOWN: i64 = 50;

/// The time partitions of one database, and the removals.
#[derive(Debug, Clone)]
pub struct RetentionReport {
    /// The database.
    pub label: DatabaseLabel,
    /// The partitions that are still there, by the time at which they are due.
    pub partitions: Vec<TimePartition>,
    /// The removals, the newest first: at most the last 50, and all that are not finished.
    pub removals: Vec<Removal>,
}

/// What retention has yet to do in one database.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct RetentionBacklog {
    /// Partitions that are due.
    pub due: i64,
    /// Removals that have begun and not ended.
    pub unfinished: i64,
    /// Those of them whose last try ended with an error.
    pub failed: i64,
}

/// The result of one run on one database.
#[derive(Debug, Clone, Default)]
pub struct RetentionRun {
    /// False where another process is at work on the database; then nothing was done.
    pub is_ours: bool,
    /// The finished removals.
    pub removed: Vec<Removal>,
    /// The partitions that stay for the next run, each with the error.
    pub failed: Vec<(String, String)>,
}

/// Messages that retention removed, of one consumer.
#[derive(Debug, Clone, sqlx::FromRow)]
pub struct Forgotten {
    /// Name of the tenant.
    pub tenant: String,
    /// Name of the consumer.
    pub consumer: String,
    /// Removed messages that had completed.
    pub completed: i64,
    /// Removed messages that had been skipped.
    pub skipped: i64,
    /// Removed messages that had been discarded.
    pub discarded: i64,
}

impl Retention<'_> {
    /// Reads the partitions and the removals of a database. Changes nothing.
    ///
    /// # Errors
    /// An error of the database.
    pub async fn report(&self, database: &InboxDatabase) -> Result<RetentionReport, InboxError> {
        let mut connection = database.database.pool.acquire().await?;
        Ok(RetentionReport {
            label: database.label.clone(),
            partitions: partitions::all(&mut connection).await?,
            removals: removal::newest(&mut connection, SHOWN).await?,
        })
    }

    /// Counts what is due and what is under way in a database. Reads no message.
    ///
    /// # Errors
    /// An error of the database.
    pub async fn backlog(&self, database: &InboxDatabase) -> Result<RetentionBacklog, InboxError> {
        const UNFINISHED: &str = "SELECT count(*) AS unfinished, count(error) AS failed \
            FROM oncebox.removal WHERE state <> 'dropped'";
        let mut connection = database.database.pool.acquire().await?;
        let due = partitions::due(&mut connection).await?.len() as i64;
        let (unfinished, failed) = sqlx::query_as(UNFINISHED).fetch_one(&mut *connection).await?;
        Ok(RetentionBacklog { due, unfinished, failed })
    }

    /// Removes every partition of a database that is due. A partition that cannot be removed stays
    /// for the next run, and the others are removed.
    ///
    /// # Errors
    /// An error of the database before the first partition. `Conflict` where messages must be
    /// archived first and this process cannot do that; `Archive` where the archive does not answer.
    pub async fn run(&self, database: &InboxDatabase) -> Result<RetentionRun, InboxError> {
        // Before anything is moved. Each removal looks again.
        let store = self.0.archive().required().await?;
        let mut turn = database.connect().await?;
        if !locks::try_for_session(&mut turn, HostLock::Retention).await? {
            let _ = turn.close().await; // it holds nothing
            return Ok(RetentionRun::default());
        }
        // Messages that must stay move to the present partition.
        schema::ensure_partitions(&database.database.pool).await?;
        let (mut stuck, name) = (Vec::new(), database.name());
        leave_attempts(&mut turn).await?;
        if let Some(store) = store {
            self.0.archive().clear_attempts(&mut turn, store, name, None).await?;
        }
        let mut run = RetentionRun { is_ours: true, ..RetentionRun::default() };
        for partition in partitions::due(&mut turn).await? {
            // Only one detach of a class can be under way.
            if stuck.contains(&partition.class) {
                continue;
            }
            match removal::remove(self.0, name, &mut turn, &partition).await {
                Ok(removal) => run.removed.push(removal),
                Err(error) => {
                    stuck.push(partition.class.clone());
                    let error = explained(&error);
                    // By another connection: this one may be what failed.
                    if let Ok(mut connection) = database.database.pool.acquire().await {
                        let _ = removal::note_error(&mut connection, &partition.name, &error).await;
                    }
                    run.failed.push((partition.name, error));
                }
            }
        }
        // The server ends the session some time after the close; the next run need not wait for it.
        let _ = locks::release_for_session(&mut turn, HostLock::Retention).await;
        let _ = turn.close().await; // the lock ends either way
        Ok(run)
    }

    /// Reads what retention removed so far, by consumer.
    ///
    /// # Errors
    /// An error of the database.
    pub async fn forgotten(&self, database: &InboxDatabase) -> Result<Vec<Forgotten>, InboxError> {
        const SUMS: &str = "SELECT t.name AS tenant, c.name AS consumer, \
                sum(f.completed)::bigint AS completed, sum(f.skipped)::bigint AS skipped, \
                sum(f.discarded)::bigint AS discarded \
            FROM oncebox.forgotten f JOIN oncebox.consumer c USING (consumer_id) \
            JOIN oncebox.tenant t USING (tenant_id) GROUP BY 1, 2 ORDER BY 1, 2";
        Ok(sqlx::query_as(SUMS).fetch_all(&database.database.pool).await?)
    }
}

/// Returns the text of an error for operators.
fn explained(error: &InboxError) -> String {
    match error {
        // A lock timeout, which elsewhere is about a message.
        InboxError::InFlightElsewhere => format!(
            "a transaction that began earlier was still open after {LOCK_TIMEOUT}; the next run \
                tries again"
        ),
        error => error.to_string(),
    }
}

impl InboxDatabase {
    /// Opens a connection for a run. Its waits are long: a detach waits for the transactions that
    /// run, and nothing waits behind it.
    async fn connect(&self) -> Result<PgConnection, InboxError> {
        let options =
            self.database.options.clone().application_name("oncebox retention").options([
                ("lock_timeout", LOCK_TIMEOUT),
                ("statement_timeout", "0"),
                ("idle_in_transaction_session_timeout", "60000"),
                ("timezone", "UTC"),
            ]);
        // A scan of a large partition takes as long as it takes.
        let options = options.answer_timeout(Duration::MAX);
        Ok(answered_within(CONNECT_TIMEOUT, PgConnection::connect_with(&options)).await??)
    }
}

/// Longest wait of a removal for a lock, and for the transactions that began before a detach: longer
/// than the longest deadline of a handler.
const LOCK_TIMEOUT: &str = "660s";
/// Longest wait for a connection.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
