//! Actions of operators on outgoing messages. A redrive makes parked messages, and those that wait
//! for their next attempt, due at once. A discard excludes messages from being sent.
//!
//! A message has its position for good, and a job comes to each position once. So a message that
//! fails again while a job runs is not taken twice. A message that a relay is about to lease, or
//! that another operator acts on, is left alone.

use chrono::{DateTime, Utc};
use oncebox_model::{error::InboxError, outgoing::OutgoingStatus};
use sqlx::{Executor, PgConnection, Postgres, QueryBuilder};

use super::filter::OutgoingFilter;
use crate::tenants::moves::check_is_here;

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

    /// Returns the statuses of the action's messages.
    fn statuses(self) -> &'static [OutgoingStatus] {
        use OutgoingStatus::{FailedRetryable, Parked, Received};
        match self {
            Self::Redrive => &[Parked, FailedRetryable],
            Self::Discard => &[Received, FailedRetryable, Parked],
        }
    }

    /// Returns the condition on the statuses of the action's messages.
    fn condition(self) -> String {
        let names: Vec<_> = self.statuses().iter().map(|status| status.as_str()).collect();
        format!(" AND o.status IN ('{}')", names.join("', '"))
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

/// Outgoing messages of one consumer, for an action.
pub(crate) struct OutgoingSelection<'a> {
    pub(crate) consumer_id: i32,
    pub(crate) action: OutgoingAction,
    pub(crate) filter: &'a OutgoingFilter,
    /// Latest time at which a message was emitted.
    pub(crate) as_of: DateTime<Utc>,
}

/// A message in one of the action's statuses.
#[derive(Debug, Clone, PartialEq, Eq, sqlx::FromRow)]
pub(crate) struct OutgoingCandidate {
    message_id: String,
    ordinal: i32,
    bucket: DateTime<Utc>,
    pub(crate) position: i64,
    /// Whether the filter takes it.
    pub(crate) is_selected: bool,
}

impl OutgoingSelection<'_> {
    /// Reads the next messages behind a position, whether the filter takes them or not, so that a
    /// page reads its rows alone. Returns them in the order of their positions, and whether there
    /// may be more.
    pub(crate) async fn page(
        &self,
        connection: &mut PgConnection,
        after: i64,
        limit: i64,
    ) -> Result<(Vec<OutgoingCandidate>, bool), InboxError> {
        // The index on what is open serves each day in order.
        const PLAN: &str = "SET LOCAL enable_seqscan = off; SET LOCAL enable_bitmapscan = off; \
            SET LOCAL enable_sort = off; SET LOCAL jit = off";
        connection.execute(sqlx::raw_sql(PLAN)).await?;
        let (mut found, mut end) = (Vec::new(), None::<i64>);
        for status in self.action.statuses() {
            if self.filter.status.is_some_and(|of_filter| of_filter != *status) {
                continue;
            }
            let mut query = self.page_query(*status, after, limit);
            let rows: Vec<OutgoingCandidate> =
                query.build_query_as().fetch_all(&mut *connection).await?;
            if rows.len() as i64 == limit {
                // Behind its last row there may be others of this status.
                let last = rows.last().map(|row| row.position);
                end = end.min(last).or(end).or(last);
            }
            found.extend(rows);
        }
        found.retain(|row| end.is_none_or(|end| row.position <= end));
        found.sort_by_key(|row| row.position);
        Ok((found, end.is_some()))
    }

    fn page_query(&self, status: OutgoingStatus, after: i64, limit: i64) -> QueryBuilder<Postgres> {
        let mut query = QueryBuilder::<Postgres>::new(
            "SELECT o.message_id, o.ordinal, o.bucket, o.position, (true",
        );
        self.filter.push(&mut query);
        query.push(") IS TRUE AS is_selected FROM oncebox.outgoing o WHERE o.consumer_id = ");
        query.push_bind(self.consumer_id);
        query.push(" AND o.status <> 'completed' AND o.status = ").push_bind(status.as_str());
        query.push(" AND o.created_at <= ").push_bind(self.as_of);
        query.push(" AND o.position > ").push_bind(after);
        query.push(" ORDER BY o.position LIMIT ").push_bind(limit);
        query
    }

    /// Does the action on these messages, as far as it still can be done, and returns their number.
    pub(crate) async fn act(
        &self,
        connection: &mut PgConnection,
        messages: &[&OutgoingCandidate],
    ) -> Result<i64, InboxError> {
        check_is_here(connection, self.consumer_id).await?;
        let ids: Vec<_> = messages.iter().map(|message| message.message_id.clone()).collect();
        let ordinals: Vec<_> = messages.iter().map(|message| message.ordinal).collect();
        let buckets: Vec<_> = messages.iter().map(|message| message.bucket).collect();
        let mut query = self.act_query(ids, ordinals, buckets);
        Ok(query.build_query_scalar().fetch_one(connection).await?)
    }

    fn act_query(
        &self,
        ids: Vec<String>,
        ordinals: Vec<i32>,
        buckets: Vec<DateTime<Utc>>,
    ) -> QueryBuilder<Postgres> {
        let mut query = QueryBuilder::<Postgres>::new(
            "WITH chosen AS MATERIALIZED (SELECT o.consumer_id, o.message_id, o.ordinal, o.bucket \
            FROM unnest(",
        );
        query.push_bind(ids).push(", ").push_bind(ordinals).push(", ").push_bind(buckets);
        query.push(
            ") AS a (message_id, ordinal, bucket) JOIN oncebox.outgoing o ON o.message_id = \
            a.message_id AND o.ordinal = a.ordinal AND o.bucket = a.bucket WHERE o.consumer_id = ",
        );
        query.push_bind(self.consumer_id).push(self.action.condition());
        query.push(" FOR UPDATE OF o SKIP LOCKED), changed AS (UPDATE oncebox.outgoing o SET ");
        query.push(self.action.change()).push(
            " FROM chosen WHERE o.consumer_id = chosen.consumer_id AND o.message_id = \
            chosen.message_id AND o.ordinal = chosen.ordinal AND o.bucket = chosen.bucket \
            RETURNING o.position) SELECT count(*) FROM changed",
        );
        query
    }

    /// Counts the messages that relays are sending and that the action would else take, up to a
    /// limit.
    pub(crate) async fn under_way(
        &self,
        connection: &mut PgConnection,
        limit: i64,
    ) -> Result<i64, InboxError> {
        let mut query = QueryBuilder::<Postgres>::new(
            "SELECT count(*) FROM (SELECT FROM oncebox.outgoing o WHERE o.status = 'in_progress' \
            AND o.consumer_id = ",
        );
        query.push_bind(self.consumer_id);
        query.push(" AND o.created_at <= ").push_bind(self.as_of);
        self.filter.push(&mut query);
        query.push(" LIMIT ").push_bind(limit).push(") m");
        Ok(query.build_query_scalar().fetch_one(connection).await?)
    }
}

/// Counts the messages of a tenant that an action would change, up to a limit.
pub(crate) async fn count(
    connection: &mut PgConnection,
    tenant: &str,
    action: OutgoingAction,
    filter: &OutgoingFilter,
    limit: i64,
) -> Result<i64, sqlx::Error> {
    let mut query = QueryBuilder::<Postgres>::new(
        "SELECT count(*) FROM (SELECT FROM oncebox.outgoing o JOIN oncebox.consumer c USING \
        (consumer_id) JOIN oncebox.tenant t USING (tenant_id) WHERE t.name = ",
    );
    query
        .push_bind(tenant.to_owned())
        .push(action.condition())
        .push(" AND o.status <> 'completed'");
    filter.push_consumer(&mut query);
    filter.push(&mut query);
    query.push(" LIMIT ").push_bind(limit).push(") m");
    query.build_query_scalar().fetch_one(connection).await
}

#[cfg(test)]
mod tests {
    use super::*;

    // What could go wrong: an action takes a message that a relay is sending, one of another
    // consumer, or more than its filter says; or the filter decides what a page reads.
    #[test]
    fn an_action_takes_what_no_relay_sends_and_no_more_than_asked() {
        let filter = OutgoingFilter { ids: vec!["a".to_owned()], ..OutgoingFilter::default() };
        for action in [OutgoingAction::Redrive, OutgoingAction::Discard] {
            let selection = OutgoingSelection {
                consumer_id: 1,
                action,
                filter: &filter,
                as_of: DateTime::UNIX_EPOCH,
            };
            let condition = action.condition();
            assert!(!condition.contains("in_progress") && !condition.contains("'completed'"));
            let page = selection.page_query(OutgoingStatus::Parked, 7, 500).into_string();
            let (columns, rows) = page.split_once(" FROM oncebox.outgoing").expect("a table");
            assert!(columns.contains("o.id = ANY") && !rows.contains("o.id"), "{page}");
            for part in ["consumer_id = ", "created_at <= ", "position > ", " LIMIT "] {
                assert!(rows.contains(part), "{part} in {page}");
            }
            let act = selection.act_query(Vec::new(), Vec::new(), Vec::new()).into_string();
            let (chosen, changed) = act.split_once(" FOR UPDATE OF o SKIP LOCKED").expect("locks");
            assert!(chosen.contains(&condition) && chosen.contains("o.consumer_id = "), "{act}");
            assert!(changed.contains(action.change()), "{act}");
        }
        // Each status must have the times that the table's constraints ask for.
        assert!(OutgoingAction::Redrive.change().contains("next_attempt_at = now()"));
        assert!(OutgoingAction::Discard.change().contains("next_attempt_at = NULL"));
    }
}
