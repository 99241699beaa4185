//! The host's own advisory locks, and their waiting times.
//!
//! The first number of an advisory lock names its owner (table `oncebox.consumer`). A consumer's
//! number is for its messages, and its negative for the keys that order them. Zero is the host. So
//! no id and no key that a sender chooses names a lock of the host.

use std::time::Duration;

use oncebox_model::{
    error::InboxError,
    hooks::{self, Defect},
    sqlstate,
    tx::answered,
};
use sqlx::{AssertSqlSafe, Executor, PgConnection};

/// The first number of every lock of the host.
const SPACE: i32 = 0;

/// Longest wait for most locks of the host. A holder does little work under one.
const WAIT: Duration = Duration::from_secs(20);

/// Longest wait for the migrations of another host.
pub(crate) const MIGRATION_WAIT: Duration = Duration::from_secs(45);

/// Longest wait for another writer of a replica: less than the time that the database has to
/// answer.
const REPLICA_WAIT: Duration = Duration::from_secs(8);

/// A lock of the host, named by the work that its holder does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum HostLock {
    /// Migration of the schema.
    Migrate,
    /// A change of privilege lists.
    Grants,
    /// Assignment of a Kafka group to a consumer.
    Groups,
    /// Creation of inbox partitions.
    Partitions,
    /// A migration of this tenant's own tables.
    TenantMigration(i32),
    /// A write of this tenant's replica, in the tenant's own database.
    Replica(i32),
    /// Removal of this tenant, or its move to another database.
    Removal(i32),
    /// Removal of inbox partitions that are past their retention.
    Retention,
    /// Erasure in this tenant's files of the archive.
    ArchiveErasure(i32),
    /// The copy of this tenant to another database, against changes of its rows (`oncebox.is_here`).
    Copy(i32),
}

/// Factor of the tenant in the second number. The remainder is the kind of lock.
const KINDS: i32 = 16;

impl HostLock {
    /// Returns the second number of the lock. The database assigns the tenants' numbers. Two
    /// tenants that are 2^28 apart share a lock.
    fn number(self) -> i32 {
        let (kind, tenant_id) = match self {
            Self::Migrate => (1, 0),
            Self::Grants => (2, 0),
            Self::Groups => (3, 0),
            Self::Partitions => (4, 0),
            Self::TenantMigration(tenant_id) => (5, tenant_id),
            Self::Replica(tenant_id) => (6, tenant_id),
            Self::Removal(tenant_id) => (7, tenant_id),
            Self::Retention => (8, 0),
            Self::ArchiveErasure(tenant_id) => (9, tenant_id),
            Self::Copy(tenant_id) => (10, tenant_id),
        };
        tenant_id.wrapping_mul(KINDS).wrapping_add(kind)
    }

    /// Returns the work that is done under the lock, as a phrase for error texts.
    fn purpose(self) -> &'static str {
        match self {
            Self::Migrate => "bring the database up to date",
            Self::Grants => "change privileges in the database",
            Self::Groups => "give out a kafka group",
            Self::Partitions => "make partitions of the inbox",
            Self::TenantMigration(_) => "apply a migration of the tenant",
            Self::Replica(_) => "write to the tenant's own database",
            Self::Removal(_) => "move the tenant or take it away",
            Self::Retention => "remove partitions of the inbox",
            Self::ArchiveErasure(_) => "erase in the tenant's archive",
            Self::Copy(_) => "change messages of the tenant",
        }
    }

    /// Returns the longest wait for the lock.
    fn wait(self) -> Duration {
        match self {
            Self::Migrate => MIGRATION_WAIT,
            Self::Replica(_) => REPLICA_WAIT,
            _ => WAIT,
        }
    }

    /// Returns the lock's two numbers, as arguments of PostgreSQL's functions.
    pub(crate) fn numbers(self) -> String {
        let space = if hooks::sabotage(Defect::HostLocksAmongMessages) { 1 } else { SPACE };
        format!("{space}, {}", self.number())
    }
}

/// Takes a lock until the end of the open transaction. Where others hold it for too long, the error
/// names them, and the transaction stays usable.
pub(crate) async fn take(connection: &mut PgConnection, lock: HostLock) -> Result<(), InboxError> {
    let wait = lock.wait();
    let before: String = sqlx::query_scalar("SELECT current_setting('lock_timeout')")
        .fetch_one(&mut *connection)
        .await?;
    let take = format!(
        "SAVEPOINT host_lock; SET LOCAL lock_timeout = '{}ms'; SELECT pg_advisory_xact_lock({}); \
         SET LOCAL lock_timeout = '{before}'; RELEASE SAVEPOINT host_lock",
        wait.as_millis(),
        lock.numbers()
    );
    let Err(error) = connection.execute(sqlx::raw_sql(AssertSqlSafe(take))).await else {
        return Ok(());
    };
    if !is_lock_timeout(&error) {
        return Err(error.into());
    }
    connection.execute("ROLLBACK TO SAVEPOINT host_lock; RELEASE SAVEPOINT host_lock").await?;
    Err(held(connection, lock).await)
}

/// Takes a lock until the connection ends.
pub(crate) async fn take_for_session(
    connection: &mut PgConnection,
    lock: HostLock,
) -> Result<(), InboxError> {
    let wait = lock.wait();
    let take = format!(
        "SET lock_timeout = '{}ms'; SELECT pg_advisory_lock({}); RESET lock_timeout",
        wait.as_millis(),
        lock.numbers()
    );
    let Err(error) = connection.execute(sqlx::raw_sql(AssertSqlSafe(take))).await else {
        return Ok(());
    };
    if !is_lock_timeout(&error) {
        return Err(error.into());
    }
    Err(held(connection, lock).await)
}

/// Takes a lock until the connection ends, if it is free. Returns whether it was.
pub(crate) async fn try_for_session(
    connection: &mut PgConnection,
    lock: HostLock,
) -> Result<bool, InboxError> {
    let take = AssertSqlSafe(format!("SELECT pg_try_advisory_lock({})", lock.numbers()));
    Ok(sqlx::query_scalar(take).fetch_one(connection).await?)
}

/// Releases a lock of this session before the session ends.
pub(crate) async fn release_for_session(
    connection: &mut PgConnection,
    lock: HostLock,
) -> Result<(), InboxError> {
    let release = AssertSqlSafe(format!("SELECT pg_advisory_unlock({})", lock.numbers()));
    connection.execute(sqlx::query(release)).await?;
    Ok(())
}

/// Returns whether PostgreSQL gave up waiting for a lock.
pub(crate) fn is_lock_timeout(error: &sqlx::Error) -> bool {
    answered(error).is_some_and(|answer| answer.sqlstate == sqlstate::LOCK_NOT_AVAILABLE)
}

/// Returns the error for a lock that others held for too long.
async fn held(connection: &mut PgConnection, lock: HostLock) -> InboxError {
    const HOLDERS: &str = "SELECT coalesce(string_agg(format('process %s of `%s`%s, %s for %s s', \
        l.pid, a.usename, \
            CASE WHEN a.application_name <> '' THEN format(' (`%s`)', a.application_name) ELSE '' \
            END, \
            coalesce(a.state, 'unknown'), coalesce(round(extract(epoch FROM now() - \
            a.state_change)), 0)), '; '), 'nobody any more') \
        FROM pg_locks l LEFT JOIN pg_stat_activity a USING (pid) \
        WHERE l.locktype = 'advisory' AND l.granted AND l.database = (SELECT oid FROM pg_database \
        WHERE datname = current_database()) \
          AND l.classid = $1::bigint::oid AND l.objid = $2::bigint::oid AND l.objsubid = 2";
    // `pg_locks` shows the numbers without their signs.
    let shown = |number: i32| i64::from(number.cast_unsigned());
    let query = sqlx::query_scalar(HOLDERS).bind(shown(SPACE)).bind(shown(lock.number()));
    let holders: String = match query.fetch_one(connection).await {
        Ok(holders) => holders,
        Err(error) => format!("who does cannot be seen: {}", oncebox_model::error::plain(&error)),
    };
    InboxError::HostLocked {
        purpose: lock.purpose(),
        text: format!(
            "waited {} s to {}, since another process does so ({holders}); try again, and if it \
                hangs, end it with \
             `SELECT pg_terminate_backend(…)`",
            lock.wait().as_secs(),
            lock.purpose()
        ),
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn each_lock_has_a_number_of_its_own() {
        let of_tenants = (1..1_000)
            .flat_map(|id| [HostLock::Replica(id), HostLock::Removal(id), HostLock::Copy(id)]);
        let alone = [HostLock::Migrate, HostLock::Grants, HostLock::Groups, HostLock::Partitions];
        let locks: Vec<_> = of_tenants
            .chain(alone)
            .chain([HostLock::Replica(i32::MAX), HostLock::Removal(i32::MAX)])
            .collect();
        let numbers: HashSet<_> = locks.iter().map(|lock| lock.number()).collect();
        assert_eq!(numbers.len(), locks.len());
        assert!(locks.iter().all(|lock| lock.numbers().starts_with("0, ")));
    }
}
