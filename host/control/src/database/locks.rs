//! The host's own advisory locks, and how long they are waited for.
//!
//! An advisory lock of two numbers says in the first one whose it is (table `oncebox.consumer`): a
//! consumer's number for its messages, the same below zero for what these are in order with, zero
//! for the host. So no id and no key that anybody makes up names a lock of the host's.

use std::time::Duration;

use oncebox_model::{error::InboxError, hooks, tx::answered};
use sqlx::{AssertSqlSafe, Executor, PgConnection};

/// The first number of a lock of the host's.
const SPACE: i32 = 0;

/// How long a lock of the host's is waited for. Whoever holds one does little under it.
const WAIT: Duration = Duration::from_secs(20);

/// How long the migrations of another host are waited for.
pub(crate) const MIGRATION_WAIT: Duration = Duration::from_secs(45);

/// How long another writer of a mirror is waited for: less than the database has to answer.
const MIRROR_WAIT: Duration = Duration::from_secs(8);

/// What PostgreSQL answers when a lock was waited for in vain.
const LOCK_TIMEOUT: &str = "55P03";

/// Every lock of the host's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum HostLock {
    /// The schema is brought up to date.
    Migrate,
    /// Lists of privileges are written.
    Grants,
    /// A consumer takes a Kafka group.
    Groups,
    /// Partitions of the inbox are made.
    Partitions,
    /// A migration of this tenant's own is applied.
    TenantMigration(i32),
    /// The mirror of this tenant is written in the tenant's own database.
    Mirror(i32),
    /// This tenant is being taken away.
    Removal(i32),
}

/// What each kind of lock has of the second number; the rest is the tenant's.
const KINDS: i32 = 16;

impl HostLock {
    /// The second number of the lock. Tenants' numbers are the database's to give; two that are
    /// 2^28 apart share a lock.
    fn number(self) -> i32 {
        let (kind, tenant_id) = match self {
            Self::Migrate => (1, 0),
            Self::Grants => (2, 0),
            Self::Groups => (3, 0),
            Self::Partitions => (4, 0),
            Self::TenantMigration(tenant_id) => (5, tenant_id),
            Self::Mirror(tenant_id) => (6, tenant_id),
            Self::Removal(tenant_id) => (7, tenant_id),
        };
        tenant_id.wrapping_mul(KINDS).wrapping_add(kind)
    }

    /// What is done under it.
    fn purpose(self) -> &'static str {
        match self {
            Self::Migrate => "bring the database up to date",
            Self::Grants => "change privileges in the database",
            Self::Groups => "give out a kafka group",
            Self::Partitions => "make partitions of the inbox",
            Self::TenantMigration(_) => "apply a migration of the tenant",
            Self::Mirror(_) => "write to the tenant's own database",
            Self::Removal(_) => "take the tenant away",
        }
    }

    /// How long it is waited for.
    fn wait(self) -> Duration {
        match self {
            Self::Migrate => MIGRATION_WAIT,
            Self::Mirror(_) => MIRROR_WAIT,
            _ => WAIT,
        }
    }

    /// The lock's two numbers, as arguments of PostgreSQL's functions.
    pub(crate) fn numbers(self) -> String {
        let space = if hooks::sabotage("host_locks_among_messages") { 1 } else { SPACE };
        format!("{space}, {}", self.number())
    }
}

/// Take a lock until the end of the transaction that is open. One that others hold for too long is
/// an error that names them, and the transaction is as sound as before.
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

/// Take a lock until the connection ends.
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

/// Take a lock until the connection ends, where nobody has it.
pub(crate) async fn try_for_session(
    connection: &mut PgConnection,
    lock: HostLock,
) -> Result<bool, InboxError> {
    let take = AssertSqlSafe(format!("SELECT pg_try_advisory_lock({})", lock.numbers()));
    Ok(sqlx::query_scalar(take).fetch_one(connection).await?)
}

/// Releases a lock of this session, before the session ends.
pub(crate) async fn release_for_session(
    connection: &mut PgConnection,
    lock: HostLock,
) -> Result<(), InboxError> {
    let release = AssertSqlSafe(format!("SELECT pg_advisory_unlock({})", lock.numbers()));
    connection.execute(sqlx::query(release)).await?;
    Ok(())
}

/// Whether PostgreSQL gave up waiting for a lock.
pub(crate) fn is_lock_timeout(error: &sqlx::Error) -> bool {
    answered(error).is_some_and(|answer| answer.sqlstate == LOCK_TIMEOUT)
}

/// The error for a lock that others held for too long.
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
    // PostgreSQL shows the numbers without their signs.
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
            .flat_map(|tenant_id| [HostLock::Mirror(tenant_id), HostLock::Removal(tenant_id)]);
        let alone = [HostLock::Migrate, HostLock::Grants, HostLock::Groups, HostLock::Partitions];
        let locks: Vec<_> = of_tenants
            .chain(alone)
            .chain([HostLock::Mirror(i32::MAX), HostLock::Removal(i32::MAX)])
            .collect();
        let numbers: HashSet<_> = locks.iter().map(|lock| lock.number()).collect();
        assert_eq!(numbers.len(), locks.len());
        assert!(locks.iter().all(|lock| lock.numbers().starts_with("0, ")));
    }
}
