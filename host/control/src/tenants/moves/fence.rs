//! The shut-out of a tenant from the database that it leaves. From its commit on, the tenant's rows
//! there do not change.

use std::time::Duration;

use oncebox_model::error::InboxError;
use sqlx::{AssertSqlSafe, Connection, PgConnection};
use tokio::time::sleep;

use super::{carry::Mover, guard::lost, refuse_older_hosts};
use crate::{
    database::locks::HostLock,
    tenants::shut_out::{end_sessions, forget_secret, shut_out},
};

/// Tries for the lock that changes by the host's login share, and the pause between two.
const TRIES_MAX: usize = 200;
const TRY: Duration = Duration::from_millis(50);

impl Mover<'_> {
    /// Shuts the tenant out. Waits for transactions that change its rows by the host's login, and
    /// ends its own sessions.
    pub(super) async fn shut_out(&mut self) -> Result<(), InboxError> {
        let tenant = &self.tenant;
        let mut connection = self.from.connect().await?;
        let mut tx = connection.begin().await?;
        self.take_copy_lock(&mut tx).await?;
        self.refuse_open_work(&mut tx).await?;
        self.refuse_removal(&mut tx).await?;
        if self.from.is_dedicated {
            // The host's database comes first: the other one is made to match it.
            let mut own = self.control.pool.begin().await?;
            self.begin_copying(&mut own).await?;
            own.commit().await?;
            self.guard.hold(&mut tx).await?;
        } else {
            self.begin_copying(&mut tx).await?;
        }
        shut_out(&mut tx, tenant).await?;
        tx.commit().await?;
        connection.close().await;
        end_sessions(&self.from.pool, tenant).await
    }

    /// Waits for transactions that change the tenant's rows by the host's login. It tries again and
    /// again, since others would queue behind a waiter.
    pub(super) async fn take_copy_lock(
        &self,
        connection: &mut PgConnection,
    ) -> Result<(), InboxError> {
        let numbers = HostLock::Copy(self.tenant.tenant_id).numbers();
        let take = format!("SELECT pg_try_advisory_xact_lock({numbers})");
        for _ in 0..TRIES_MAX {
            let query = sqlx::query_scalar(AssertSqlSafe(take.clone()));
            if query.fetch_one(&mut *connection).await? {
                return Ok(());
            }
            sleep(TRY).await;
        }
        Err(InboxError::conflict(
            "messages of the tenant are changed without a pause, by jobs or relays; it is tried again",
        ))
    }

    /// Clears the tenant's secret in the host's database, with the step of the move.
    async fn begin_copying(&self, own: &mut PgConnection) -> Result<(), InboxError> {
        const COPYING: &str = "UPDATE oncebox.tenant_move SET step = 'copying' WHERE tenant_id = \
            $1 AND epoch = $2 AND step IN ('stopping', 'copying')";
        // First its row, as every change of a tenant.
        self.control.tenants().lock_row(&mut *own, &self.tenant.name).await?;
        refuse_older_hosts(own).await?;
        let copying = sqlx::query(COPYING)
            .bind(self.tenant.tenant_id)
            .bind(self.guard.epoch)
            .execute(&mut *own)
            .await?;
        if copying.rows_affected() == 0 {
            return Err(lost());
        }
        forget_secret(own, &self.tenant).await
    }

    /// Refuses to move a tenant while jobs, replays or erasures work on its messages.
    pub(super) async fn refuse_open_work(
        &self,
        connection: &mut PgConnection,
    ) -> Result<(), InboxError> {
        const OPEN: &str = "SELECT format('job %s', job_id) FROM oncebox.job \
                WHERE tenant_id = $1 AND state IN ('running', 'paused') \
            UNION ALL SELECT format('replay %s', r.replay_id) FROM oncebox.replay r JOIN \
                oncebox.consumer c USING (consumer_id) WHERE c.tenant_id = $1 AND r.state IN \
                ('running', 'paused') \
            UNION ALL SELECT format('erasure %s', erasure_id) FROM oncebox.erasure \
                WHERE tenant_id = $1 LIMIT 1";
        let open: Option<String> =
            sqlx::query_scalar(OPEN).bind(self.tenant.tenant_id).fetch_optional(connection).await?;
        let Some(open) = open else { return Ok(()) };
        Err(InboxError::conflict(format!(
            "{open} of tenant `{}` is not over; the move goes on when it has ended or was cancelled",
            self.tenant.name
        )))
    }
}
