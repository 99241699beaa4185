//! The host's own statements: rollback, savepoints, a transaction of one of them, and their errors.

use oncebox_model::{
    error::InboxError,
    hooks::{self, Defect},
    outcome::{Failure, FailureKind},
    sqlstate,
    tx::{StatementError, Tx, bounded},
};
use sqlx::Executor;

use crate::{
    admission::batch_sizer::SavepointMode,
    batch::abort::Abort,
    session::{CommitError, Transaction},
};

/// Rolls a transaction back, and returns the abort that ended it. A transaction that is only
/// dropped closes its connection.
pub(crate) async fn rollback<T>(transaction: Transaction<'_>, abort: Abort) -> Result<T, Abort> {
    transaction.rollback().await;
    Err(abort)
}

/// Ends a transaction that holds one statement of the host and no claim to run. Commits it where
/// the statement succeeded, and rolls it back where it failed.
pub(crate) async fn commit_host<T>(
    transaction: Transaction<'_>,
    answer: Result<T, sqlx::Error>,
) -> Result<T, InboxError> {
    match answer {
        Ok(answer) => transaction.commit().await.map(|()| answer).map_err(|error| match error {
            CommitError::Completion(error) => error.into(),
            CommitError::RolledBack(error) => InboxError::Invalid(error.message),
            CommitError::Unknown(error) => InboxError::CommitUnknown(error),
        }),
        Err(error) => {
            transaction.rollback().await;
            Err(error.into())
        }
    }
}

/// Sets the savepoint before a message or a group, where the mode has any. It is sent with the next
/// statement, which PostgreSQL refuses for the same reasons; an error of its own condemns the session.
pub(crate) async fn set_savepoint(tx: &Tx, mode: SavepointMode) -> Result<(), InboxError> {
    match mode {
        SavepointMode::Savepoints => Ok(tx.enqueue(sqlx::raw_sql("SAVEPOINT m"), None).await?),
        SavepointMode::Optimistic => Ok(()),
    }
}

/// Releases the savepoint of a message or a group that succeeded.
pub(crate) async fn release_savepoint(tx: &Tx, mode: SavepointMode) -> Result<(), InboxError> {
    match mode {
        SavepointMode::Savepoints => host_statement(tx, "RELEASE SAVEPOINT m").await,
        SavepointMode::Optimistic => Ok(()),
    }
}

/// Rolls the transaction back to the savepoint, and releases it.
pub(crate) async fn undo_message(tx: &Tx) -> Result<(), InboxError> {
    if hooks::sabotage(Defect::FailedEffectStays) && tx.error().await.is_none() {
        return host_statement(tx, "RELEASE SAVEPOINT m").await;
    }
    host_statement(tx, "ROLLBACK TO SAVEPOINT m; RELEASE SAVEPOINT m").await?;
    tx.recovered().await;
    Ok(())
}

/// Executes a constant statement of the host in the transaction.
pub(crate) async fn host_statement(tx: &Tx, text: &'static str) -> Result<(), InboxError> {
    let mut statement = tx.statement().await;
    let answer = bounded(statement.connection().execute(sqlx::raw_sql(text))).await.map(drop);
    statement.finish(answer.as_ref().err());
    Ok(answer?)
}

/// Classifies an error of the claim: data of a message, a full lock table, or a fault of the host.
pub(crate) fn at_claim(error: InboxError) -> Abort {
    match refused(&error) {
        Some(answer) if lacks_partition(&answer) => {
            Abort::Host(InboxError::PartitionMissing(answer.message))
        }
        Some(answer) if is_about_data(&answer) => Abort::AtClaim { failure: sql_failure(answer) },
        Some(answer) if answer.sqlstate == sqlstate::OUT_OF_MEMORY => Abort::LockTableFull(error),
        _ => Abort::Host(error),
    }
}

/// Classifies an error of the completion: data of a message, prepared statements that guest code
/// deallocated, or a fault of the host.
pub(crate) fn at_completion(error: InboxError) -> Abort {
    match refused(&error) {
        Some(answer) if lacks_partition(&answer) => {
            Abort::Host(InboxError::PartitionMissing(answer.message))
        }
        Some(answer) if is_about_data(&answer) => {
            Abort::AtCommit { failure: Failure::new(FailureKind::BadResult, answer.message) }
        }
        Some(StatementError { sqlstate, message, .. })
            if sqlstate == sqlstate::UNDEFINED_PREPARED_STATEMENT =>
        {
            let text = format!(
                "code that ran for this message deallocated what was prepared on its session: \
                    {message}"
            );
            Abort::AtCommit { failure: Failure::new(FailureKind::Sql { sqlstate }, text) }
        }
        _ => Abort::Host(error),
    }
}

/// Classifies an error of deferred constraints that are checked before a COMMIT, as
/// [`commit`](super::process::commit) classifies that of the COMMIT.
pub(crate) fn at_constraints(error: InboxError) -> Abort {
    match refused(&error) {
        Some(answer) => Abort::AtCommit { failure: sql_failure(answer) },
        None => Abort::Host(error),
    }
}

/// Returns whether a statement of the host found no time partition for a row: a check violation
/// without the name of a constraint. That is the host's fault and never a message's.
fn lacks_partition(error: &StatementError) -> bool {
    error.sqlstate == sqlstate::CHECK_VIOLATION && error.constraint.is_none()
}

/// Returns whether an error of a host's statement is about a message: a data exception, a
/// constraint, a limit of size. A full disk or a timeout is not.
fn is_about_data(error: &StatementError) -> bool {
    ["22", "23", "54"].iter().any(|class| error.sqlstate.starts_with(class))
}

/// Returns PostgreSQL's answer where it refused a statement; none where the error is another one.
pub(crate) fn refused(error: &InboxError) -> Option<StatementError> {
    match error {
        InboxError::Refused(error) => oncebox_model::tx::answered(error),
        _ => None,
    }
}

/// Returns the failure that PostgreSQL's answer means: contention, or its SQLSTATE.
pub(super) fn sql_failure(error: StatementError) -> Failure {
    if error.is_contention() {
        return Failure::new(FailureKind::Contention, error.message);
    }
    Failure::new(FailureKind::Sql { sqlstate: error.sqlstate }, error.message)
}

#[cfg(test)]
mod tests {
    use super::*;

    // What could go wrong: a host that has not made its time partitions fails the messages of its
    // tenants, or a constraint that a message breaks stops its partition.
    #[test]
    fn a_missing_time_partition_is_the_hosts_fault() {
        let error = |sqlstate: &str, constraint: Option<&str>| StatementError {
            sqlstate: sqlstate.to_owned(),
            message: String::new(),
            constraint: constraint.map(str::to_owned),
        };
        assert!(lacks_partition(&error(sqlstate::CHECK_VIOLATION, None)));
        let named = error(sqlstate::CHECK_VIOLATION, Some("outgoing_destination_length"));
        assert!(!lacks_partition(&named) && is_about_data(&named));
        assert!(!lacks_partition(&error("22021", None)));
        let missing = InboxError::PartitionMissing("no partition of relation".to_owned());
        assert!(missing.is_retryable() && missing.to_string().contains("`oncebox migrate`"));
    }
}
