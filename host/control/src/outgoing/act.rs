//! Actions of operators on outgoing messages. A redrive makes parked messages, and those that wait
//! for their next attempt, due at once. A discard excludes messages from being sent.
//!
//! A page takes messages from the oldest on, and returns the position that it came to, behind which
//! the next page begins. So a message that fails again while a job runs is not taken twice.
//! A message that a relay is about to lease, or that another operator acts on, is left alone.

use oncebox_model::error::InboxError;
use sqlx::{Executor, PgConnection, Postgres, QueryBuilder};

use super::{WITHIN, filter::OutgoingFilter, within};

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
    /// Returns the action's name.
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

/// Adds the tables, and the conditions of the action and of its filter.
fn push_selection(
    query: &mut QueryBuilder<Postgres>,
    tenant: &str,
    action: OutgoingAction,
    filter: &OutgoingFilter,
    after: Option<i64>,
) {
    query
        .push(
            " FROM oncebox.outgoing o JOIN oncebox.consumer c USING (consumer_id) \
            JOIN oncebox.tenant t USING (tenant_id) WHERE t.name = ",
        )
        .push_bind(tenant.to_owned());
    query.push(action.condition()).push(" AND o.status <> 'completed'");
    filter.push_consumer(query);
    filter.push(query);
    if let Some(after) = after {
        query.push(" AND o.position > ").push_bind(after);
    }
}

/// Builds the statement that changes a page.
fn change_query(
    tenant: &str,
    action: OutgoingAction,
    filter: &OutgoingFilter,
    after: Option<i64>,
    limit: u32,
) -> QueryBuilder<Postgres> {
    let mut query = QueryBuilder::<Postgres>::new(
        "WITH chosen AS MATERIALIZED (SELECT o.consumer_id, o.message_id, o.ordinal, o.bucket",
    );
    push_selection(&mut query, tenant, action, filter, after);
    query.push(" ORDER BY o.position LIMIT ").push_bind(i64::from(limit));
    query.push(" FOR UPDATE OF o SKIP LOCKED), changed AS (UPDATE oncebox.outgoing o SET ");
    query.push(action.change()).push(
        " FROM chosen WHERE o.consumer_id = chosen.consumer_id AND o.message_id = \
        chosen.message_id AND o.ordinal = chosen.ordinal AND o.bucket = chosen.bucket RETURNING \
        o.position) SELECT count(*), max(position) FROM changed",
    );
    query
}

/// Changes the next outgoing messages behind a position, from the oldest on. Returns their number
/// and the position of the last one; none where there was none.
///
/// # Errors
/// `Invalid` where the filter finds too little in time, or an error of the database.
pub(crate) async fn change(
    connection: &mut PgConnection,
    tenant: &str,
    action: OutgoingAction,
    filter: &OutgoingFilter,
    after: Option<i64>,
    limit: u32,
) -> Result<(i64, Option<i64>), InboxError> {
    within(async {
        connection.execute(sqlx::raw_sql(WITHIN)).await?;
        let mut query = change_query(tenant, action, filter, after, limit);
        Ok(query.build_query_as().fetch_one(connection).await?)
    })
    .await
}

/// Counts the messages that an action would change, up to a limit.
pub(crate) async fn count(
    connection: &mut PgConnection,
    tenant: &str,
    action: OutgoingAction,
    filter: &OutgoingFilter,
    limit: i64,
) -> Result<i64, sqlx::Error> {
    let mut query = QueryBuilder::<Postgres>::new("SELECT count(*) FROM (SELECT o.position");
    push_selection(&mut query, tenant, action, filter, None);
    query.push(" LIMIT ").push_bind(limit).push(") m");
    query.build_query_scalar().fetch_one(connection).await
}

#[cfg(test)]
mod tests {
    use super::*;

    // What could go wrong: an action takes a message that a relay is sending, one of another
    // tenant, or more than its filter and its limit say.
    #[test]
    fn an_action_takes_what_no_relay_sends_and_no_more_than_asked() {
        let filter = OutgoingFilter {
            consumer: Some("orders".to_owned()),
            ids: vec!["a".to_owned()],
            ..OutgoingFilter::default()
        };
        for action in [OutgoingAction::Redrive, OutgoingAction::Discard] {
            let sql = change_query("acme", action, &filter, Some(7), 500).into_string();
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
}
