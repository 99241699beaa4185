//! The end of a tenant's access to a database, before its rows are removed or moved: live hosts stop
//! its consumers, then nothing of it is claimed any more, by whichever process.

use std::time::Duration;

use chrono::{DateTime, Utc};
use oncebox_model::error::InboxError;
use sqlx::{AssertSqlSafe, Executor, PgConnection, PgPool};
use tokio::time::{Instant, sleep};

use crate::{database::tenant_database::replica, handles::Tenants, tenants::Tenant};

/// Longest wait for live hosts to stop the tenant's consumers: longer than a host may take to
/// drain.
const HOSTS_MAX: Duration = Duration::from_secs(60);
/// Interval between two checks.
const LOOK: Duration = Duration::from_millis(200);
/// Checks for sessions that were ended, before the removal gives up.
const ENDINGS_MAX: usize = 100;

impl Tenants<'_> {
    /// Waits until live hosts have stopped the tenant's consumers, for [`HOSTS_MAX`] at most. A
    /// host that is late is shut out as well: its batch is rolled back, as if its connection had
    /// broken.
    pub(super) async fn hosts_let_go(&self, tenant: &Tenant) -> Result<(), InboxError> {
        let deadline = Instant::now() + HOSTS_MAX;
        loop {
            let late = self.late_hosts_of(tenant).await?;
            if late.is_empty() {
                return Ok(());
            }
            if Instant::now() > deadline {
                tracing::warn!(tenant = tenant.name, hosts = ?late, "hosts did not let go of a \
                    tenant in time; they are shut out");
                return Ok(());
            }
            sleep(LOOK).await;
        }
    }

    /// Lists live hosts that have not reported the tenant's consumers as stopped.
    pub(super) async fn late_hosts_of(&self, tenant: &Tenant) -> Result<Vec<String>, InboxError> {
        const LATE: &str = "SELECT DISTINCT h.name FROM oncebox.host h JOIN oncebox.consumer c ON \
            c.tenant_id = $1 AND c.generation > 0 \
            LEFT JOIN oncebox.host_consumer r ON r.host_id = h.host_id AND r.consumer_id = \
            c.consumer_id \
            WHERE h.seen_at > now() - interval '10 seconds' \
                AND (r.status IS DISTINCT FROM 'stopped' OR r.status_revision < c.revision) ORDER \
                BY h.name";
        Ok(sqlx::query_scalar(LATE).bind(tenant.tenant_id).fetch_all(&self.0.pool).await?)
    }
}

/// Shuts the tenant out of a database: its roles cannot log in, and host functions refuse its
/// secret. [`end_sessions`] follows, after the commit.
pub(super) async fn shut_out(
    connection: &mut PgConnection,
    tenant: &Tenant,
) -> Result<(), InboxError> {
    // A copy that was read before this change must not restore access afterwards.
    replica::lock(connection, tenant.tenant_id).await?;
    for login in logins(connection, tenant).await? {
        let shut = format!("ALTER ROLE {login} NOLOGIN");
        connection.execute(sqlx::raw_sql(AssertSqlSafe(shut))).await?;
    }
    forget_secret(connection, tenant).await
}

/// Ends the sessions of a tenant that is shut out, with any statement that they run.
///
/// # Errors
/// `Conflict` where sessions do not end.
pub(super) async fn end_sessions(pool: &PgPool, tenant: &Tenant) -> Result<(), InboxError> {
    // Those of a tenant that is let in again meanwhile begin later.
    const END: &str = "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE \
        usename::text = ANY ($1) AND backend_start <= $2";
    let began: DateTime<Utc> =
        sqlx::query_scalar("SELECT clock_timestamp()").fetch_one(pool).await?;
    for _ in 0..ENDINGS_MAX {
        let found: i64 = sqlx::query_scalar(END)
            .bind([&tenant.login, &tenant.owner_login].map(String::as_str))
            .bind(began)
            .fetch_one(pool)
            .await?;
        if found == 0 {
            return Ok(());
        }
        sleep(LOOK).await;
    }
    Err(InboxError::conflict(format!(
        "sessions of tenant `{}` do not end; look at `pg_stat_activity`, then try again",
        tenant.name
    )))
}

/// Clears the hashes of the tenant's secrets. No hash is empty, so nothing is authorized, also for
/// a session that is about to be ended.
pub(super) async fn forget_secret(
    connection: &mut PgConnection,
    tenant: &Tenant,
) -> Result<(), InboxError> {
    const FORGET: &str = "UPDATE oncebox.tenant SET secret_hash = '', secret_hash_before = NULL, \
        secret_before_until = NULL WHERE tenant_id = $1";
    sqlx::query(FORGET).bind(tenant.tenant_id).execute(connection).await?;
    Ok(())
}

/// Lists those of the tenant's roles that exist.
pub(super) async fn logins(
    connection: &mut PgConnection,
    tenant: &Tenant,
) -> Result<Vec<String>, InboxError> {
    const THERE: &str =
        "SELECT rolname::text FROM pg_roles WHERE rolname::text = ANY ($1) ORDER BY rolname";
    let logins = [&tenant.login, &tenant.owner_login].map(String::as_str);
    Ok(sqlx::query_scalar(THERE).bind(logins).fetch_all(connection).await?)
}
