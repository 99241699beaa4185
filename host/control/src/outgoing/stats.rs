//! Counts of outgoing messages that are still to be sent, and of parked ones.

use chrono::{DateTime, Utc};
use oncebox_model::{error::InboxError, outgoing::OutgoingStatus};
use sqlx::{Executor, PgPool};

use super::{WITHIN, within};
use crate::handles::OutgoingMessages;

/// Most messages of one consumer and status that a request counts; a higher number is not exact.
const COUNTED_MAX: i64 = 100_000;

/// Outgoing messages to one destination that are in one status for one reason.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize, sqlx::FromRow)]
pub struct OutgoingCount {
    /// Name of the consumer whose handlers emitted them.
    pub consumer: String,
    /// Destination.
    pub destination: String,
    /// Status.
    pub status: OutgoingStatus,
    /// Reason, without the details after a colon.
    pub reason: Option<String>,
    /// Number of messages.
    pub messages: i64,
    /// Number of those that are past their due time.
    pub due: i64,
    /// Earliest due time among them.
    pub oldest_due_at: DateTime<Utc>,
    /// State of the circuit breaker of their endpoint, on the live host where it is the most open:
    /// `open` or `half_open`; none where it is closed, or the destination is no endpoint.
    #[sqlx(skip)]
    pub breaker: Option<String>,
}

impl OutgoingMessages<'_> {
    /// Counts the outgoing messages of a tenant that are not settled, and the parked ones, by
    /// consumer, destination, status and reason.
    ///
    /// # Errors
    /// `NotFound` where the tenant or the consumer does not exist, or an error of the database.
    pub async fn stats(
        &self,
        tenant: &str,
        consumer: Option<&str>,
    ) -> Result<Vec<OutgoingCount>, InboxError> {
        let pool = self.database(tenant, consumer).await?.pool;
        let mut counts = within(counts(&pool, tenant, consumer)).await?;
        let breakers = self.0.endpoints().breakers(tenant).await?;
        for count in &mut counts {
            let Some(endpoint) = count.destination.strip_prefix("http:") else { continue };
            let states = breakers.iter().filter(|breaker| breaker.endpoint == endpoint);
            // `open` is greater than `half_open`, by the alphabet too.
            count.breaker = states.map(|breaker| breaker.state.clone()).max();
        }
        Ok(counts)
    }
}

async fn counts(
    pool: &PgPool,
    tenant: &str,
    consumer: Option<&str>,
) -> Result<Vec<OutgoingCount>, InboxError> {
    const COUNT: &str = "SELECT c.name AS consumer, o.destination, o.status, \
        split_part(o.reason, ':', 1) AS reason, count(*) AS messages, \
        count(*) FILTER (WHERE o.due_at <= now()) AS due, min(o.due_at) AS oldest_due_at \
        FROM oncebox.consumer c JOIN oncebox.tenant t USING (tenant_id) \
        CROSS JOIN unnest($3::text[]) AS asked(status) \
        CROSS JOIN LATERAL (SELECT destination, status, reason, due_at FROM oncebox.outgoing \
            WHERE consumer_id = c.consumer_id AND outgoing.status = asked.status \
            AND outgoing.status <> 'completed' ORDER BY position LIMIT $4) o \
        WHERE t.name = $1 AND ($2::text IS NULL OR c.name = $2) \
        GROUP BY 1, 2, 3, 4 ORDER BY 1, 2, 3, 4";
    let mut tx = pool.begin().await?;
    tx.execute(sqlx::raw_sql(WITHIN)).await?;
    let query = sqlx::query_as(COUNT)
        .bind(tenant)
        .bind(consumer)
        .bind(COUNTED.map(OutgoingStatus::as_str))
        .bind(COUNTED_MAX);
    let counts = query.fetch_all(&mut *tx).await?;
    tx.commit().await?;
    Ok(counts)
}

/// Statuses that are counted: those of messages that a relay or an operator still has to act on.
const COUNTED: [OutgoingStatus; 4] = [
    OutgoingStatus::Received,
    OutgoingStatus::InProgress,
    OutgoingStatus::FailedRetryable,
    OutgoingStatus::Parked,
];
