//! Counts of open messages in the inbox of one consumer, for operators.

use oncebox_model::{
    backlog::{Alert, Backlog, OpenMessages},
    error::InboxError,
};
use sqlx::{Executor, PgPool};

use crate::handles::Messages;

/// Most messages of one state that a request counts; a higher number is not exact.
const COUNTED_MAX: i64 = 100_000;
/// Statement that limits one count in PostgreSQL, to 8,000 milliseconds.
const WITHIN: &str = "SET LOCAL statement_timeout = 8000";
/// Statement by which hosts also count for their metrics.
const OPEN: &str = include_str!("../../../inbox/src/retry/open_messages.sql");
/// Planner settings for that statement.
const PLAN_BY_KEY: &str = include_str!("../../../inbox/src/retry/plan_by_key.sql");

impl Messages<'_> {
    /// Counts the open messages of a consumer, and returns the alert bounds of its policy that they
    /// reach.
    pub async fn backlog(
        &self,
        tenant: &str,
        consumer: &str,
    ) -> Result<(Backlog, Vec<Alert>), InboxError> {
        let (tenant, consumer) =
            (self.0.tenants().get(tenant).await?, self.0.consumers().get(tenant, consumer).await?);
        let policy = consumer.policy()?;
        let pool = self.0.tenant_databases().get(&tenant)?.pool;
        let backlog = count(&pool, consumer.consumer_id, policy.retention.class()).await?;
        let alerts = backlog.alerts(&policy.alerts);
        Ok((backlog, alerts))
    }
}

async fn count(pool: &PgPool, consumer_id: i32, class: i16) -> Result<Backlog, InboxError> {
    let mut tx = pool.begin().await?;
    tx.execute(sqlx::raw_sql(PLAN_BY_KEY)).await?;
    tx.execute(sqlx::raw_sql(WITHIN)).await?;
    let query =
        sqlx::query_as::<_, OpenMessages>(OPEN).bind([consumer_id]).bind([class]).bind(COUNTED_MAX);
    let open = query.fetch_all(&mut *tx).await?;
    tx.commit().await?;
    Ok(Backlog { open })
}
