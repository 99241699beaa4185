//! Actions of operators on outgoing messages. A redrive makes parked messages, and those that wait
//! for their next attempt, due at once. A discard excludes messages from being sent.
//!
//! A call takes a batch from the oldest on, and returns the position that it came to, from which
//! the next call continues. So a message that fails again while a command runs is not taken twice.
//! A message that a relay is about to lease, or that another operator acts on, is left alone.

use oncebox_model::error::InboxError;
use serde_json::{Value, json};
use sqlx::{Executor, PgConnection, Postgres, QueryBuilder};

use super::{WITHIN, filter::OutgoingFilter, within};
use crate::{audit::Subject, database::tenant_database::TenantDatabase, handles::OutgoingMessages};

/// An action on outgoing messages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OutgoingAction {
    /// Makes parked messages and those that wait for their next attempt due at once, with all of
    /// their attempts. They keep their ids and their places in their lanes.
    Redrive,
    /// Excludes messages that no relay is sending from being sent; their rows stay.
    Discard,
}

impl OutgoingAction {
    /// Returns the action's name in the audit log.
    pub fn name(self) -> &'static str {
        match self {
            Self::Redrive => "redrive",
            Self::Discard => "discard",
        }
    }

    /// Returns the condition on the action's messages.
    fn condition(self) -> &'static str {
        match self {
            Self::Redrive => " AND o.status IN ('parked', 'failed_retryable')",
            Self::Discard => " AND o.status IN ('received', 'failed_retryable', 'parked')",
        }
    }

    /// Returns the columns that the action sets.
    fn change(self) -> &'static str {
        match self {
            Self::Redrive => {
                "status = 'received', reason = NULL, attempts = 0, next_attempt_at = now(), \
                    settled_at = NULL"
            }
            Self::Discard => "status = 'discarded', next_attempt_at = NULL, settled_at = now()",
        }
    }
}

/// An action, with the selection of its messages.
#[derive(Debug, Clone)]
pub struct OutgoingBulk {
    /// Action.
    pub action: OutgoingAction,
    /// Filter for messages of the tenant.
    pub filter: OutgoingFilter,
    /// Reason; stored in the audit log.
    pub reason: String,
    /// Position behind which the batch begins; none for the oldest message.
    pub after: Option<i64>,
    /// Most messages of one call; 0 only counts them.
    pub limit: u32,
}

/// The result of one call of an action.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OutgoingBulkResult {
    /// Messages that were changed.
    pub changed: i64,
    /// Messages that are left behind the position, counted up to 100,000.
    pub left: i64,
    /// Position from which the next call continues.
    pub after: Option<i64>,
}

/// Most messages that are counted.
const COUNT_MAX: i64 = 100_000;

impl OutgoingMessages<'_> {
    /// Does the action on a batch of outgoing messages, or counts them.
    ///
    /// # Errors
    /// `NotFound` where the tenant or the consumer does not exist, `Invalid` where the filter finds
    /// too little in time, or an error of the database.
    pub async fn act(
        &self,
        tenant: &str,
        bulk: &OutgoingBulk,
    ) -> Result<OutgoingBulkResult, InboxError> {
        let database = self.database(tenant, bulk.filter.consumer.as_deref()).await?;
        let (mut changed, mut after) = (0, bulk.after);
        if bulk.limit > 0 {
            let (acted, last) = self.act_in(&database, tenant, bulk).await?;
            (changed, after) = (acted, last.or(after));
        }
        let mut tx = database.pool.begin().await?;
        let left = within(count(&mut tx, tenant, bulk, after, COUNT_MAX)).await?;
        tx.commit().await?;
        Ok(OutgoingBulkResult { changed, left, after })
    }

    /// Changes one batch, and writes the audit log. The log is written in the transaction of the
    /// change; where the messages are in another database, before it. Returns the number of
    /// messages and the position of the last one.
    async fn act_in(
        &self,
        database: &TenantDatabase,
        tenant: &str,
        bulk: &OutgoingBulk,
    ) -> Result<(i64, Option<i64>), InboxError> {
        let action = format!("outgoing.{}", bulk.action.name());
        let mut tx = database.pool.begin().await?;
        if database.is_dedicated {
            let limit = i64::from(bulk.limit);
            let found = within(count(&mut tx, tenant, bulk, bulk.after, limit)).await?;
            if found == 0 {
                return Ok((0, None));
            }
            let mut log = self.0.pool.begin().await?;
            let details = details(bulk, found);
            self.0.audit().record(&mut log, &action, subject(tenant, bulk), details).await?;
            log.commit().await?;
        }
        let (changed, last) = within(change(&mut tx, tenant, bulk)).await?;
        if !database.is_dedicated && changed > 0 {
            let details = details(bulk, changed);
            self.0.audit().record(&mut tx, &action, subject(tenant, bulk), details).await?;
        }
        tx.commit().await?;
        Ok((changed, last))
    }
}

fn subject(tenant: &str, bulk: &OutgoingBulk) -> Subject {
    match &bulk.filter.consumer {
        Some(consumer) => Subject::of(tenant, consumer),
        None => Subject::tenant(tenant),
    }
}

/// Returns what the audit log keeps of an action.
fn details(bulk: &OutgoingBulk, messages: i64) -> Value {
    let OutgoingFilter { status, destination, cause, ids, .. } = &bulk.filter;
    json!({
        "reason": bulk.reason,
        "messages": messages,
        "status": status.map(|status| status.as_str()),
        "destination": destination,
        "cause": cause,
        "ids": ids,
    })
}

/// Adds the tables, and the conditions of the action and of its filter.
fn push_selection(
    query: &mut QueryBuilder<Postgres>,
    tenant: &str,
    bulk: &OutgoingBulk,
    after: Option<i64>,
) {
    query
        .push(
            " FROM oncebox.outgoing o JOIN oncebox.consumer c USING (consumer_id) \
            JOIN oncebox.tenant t USING (tenant_id) WHERE t.name = ",
        )
        .push_bind(tenant.to_owned());
    query.push(bulk.action.condition()).push(" AND o.status <> 'completed'");
    bulk.filter.push_consumer(query);
    bulk.filter.push(query);
    if let Some(after) = after {
        query.push(" AND o.position > ").push_bind(after);
    }
}

/// Builds the statement that changes a batch.
fn change_query(tenant: &str, bulk: &OutgoingBulk) -> QueryBuilder<Postgres> {
    let mut query = QueryBuilder::<Postgres>::new(
        "WITH chosen AS MATERIALIZED (SELECT o.consumer_id, o.message_id, o.ordinal, o.bucket",
    );
    push_selection(&mut query, tenant, bulk, bulk.after);
    query.push(" ORDER BY o.position LIMIT ").push_bind(i64::from(bulk.limit));
    query.push(" FOR UPDATE OF o SKIP LOCKED), changed AS (UPDATE oncebox.outgoing o SET ");
    query.push(bulk.action.change()).push(
        " FROM chosen WHERE o.consumer_id = chosen.consumer_id AND o.message_id = \
        chosen.message_id AND o.ordinal = chosen.ordinal AND o.bucket = chosen.bucket RETURNING \
        o.position) SELECT count(*), max(position) FROM changed",
    );
    query
}

async fn change(
    connection: &mut PgConnection,
    tenant: &str,
    bulk: &OutgoingBulk,
) -> Result<(i64, Option<i64>), InboxError> {
    connection.execute(sqlx::raw_sql(WITHIN)).await?;
    Ok(change_query(tenant, bulk).build_query_as().fetch_one(connection).await?)
}

/// Counts the messages that an action would change behind a position, up to a limit.
async fn count(
    connection: &mut PgConnection,
    tenant: &str,
    bulk: &OutgoingBulk,
    after: Option<i64>,
    limit: i64,
) -> Result<i64, InboxError> {
    connection.execute(sqlx::raw_sql(WITHIN)).await?;
    let mut query = QueryBuilder::<Postgres>::new("SELECT count(*) FROM (SELECT o.position");
    push_selection(&mut query, tenant, bulk, after);
    query.push(" LIMIT ").push_bind(limit).push(") m");
    Ok(query.build_query_scalar().fetch_one(connection).await?)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bulk(action: OutgoingAction) -> OutgoingBulk {
        let filter = OutgoingFilter {
            consumer: Some("orders".to_owned()),
            ids: vec!["a".to_owned()],
            ..OutgoingFilter::default()
        };
        OutgoingBulk { action, filter, reason: "a test".to_owned(), after: Some(7), limit: 500 }
    }

    // What could go wrong: an action takes a message that a relay is sending, one of another
    // tenant, or more than its filter and its limit say.
    #[test]
    fn an_action_takes_what_no_relay_sends_and_no_more_than_asked() {
        for action in [OutgoingAction::Redrive, OutgoingAction::Discard] {
            let sql = change_query("acme", &bulk(action)).into_string();
            let (chosen, changed) = sql.split_once(" FOR UPDATE OF o SKIP LOCKED").expect("locks");
            assert!(!chosen.contains("in_progress") && !chosen.contains("'completed')"), "{sql}");
            let conditions = [
                "t.name = $1",
                action.condition(),
                " AND c.name = $2 AND o.id = ANY ($3) AND o.position > $4 ORDER BY o.position \
                    LIMIT $5",
            ];
            for condition in conditions {
                assert!(chosen.contains(condition), "{condition} in {sql}");
            }
            assert!(changed.contains(action.change()), "{sql}");
        }
        // Each status must have the times that the table's constraints ask for.
        assert!(OutgoingAction::Redrive.change().contains("next_attempt_at = now()"));
        assert!(OutgoingAction::Discard.change().contains("next_attempt_at = NULL"));
    }

    #[test]
    fn the_audit_log_keeps_the_reason_and_the_selection() {
        let kept = details(&bulk(OutgoingAction::Discard), 3);
        assert_eq!(kept["reason"], "a test");
        assert_eq!((&kept["messages"], &kept["ids"][0]), (&json!(3), &json!("a")));
    }
}
