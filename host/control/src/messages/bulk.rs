//! Actions of operators on messages that do not continue by themselves. A redrive runs dead letters
//! again, a discard excludes messages from any run, and a retry makes later attempts due at once.
//!
//! The state of the messages is the progress: a message that was acted on is not selected again.

use chrono::{DateTime, Utc};
use oncebox_model::{MessageStatus, error::InboxError};
use sqlx::{Executor, PgConnection, PgPool, Postgres, QueryBuilder};

use crate::{consumers::Consumer, messages::filter::Filter, tenants::moves::check_is_here};

/// An action on messages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Action {
    /// Makes dead letters due again, under their ids, with their headers and with the runs of a new
    /// message. In order by key they still wait for their turn.
    Redrive,
    /// Excludes messages that did not complete from any run; their rows stay. Messages that wait
    /// behind one in its key follow.
    Discard,
    /// Makes messages that wait for their next attempt due at once.
    Retry,
}

impl Action {
    /// Returns the action's name in the database and in the audit log.
    pub fn name(self) -> &'static str {
        match self {
            Self::Redrive => "redrive",
            Self::Discard => "discard",
            Self::Retry => "retry",
        }
    }

    /// Returns the statuses of the action's messages. A message moves to a later one by itself
    /// while a job passes over them in this order.
    pub(crate) fn statuses(self) -> &'static [MessageStatus] {
        use MessageStatus::{FailedRetryable, FailedTerminal, Parked, Received, Waiting};
        match self {
            Self::Redrive => &[FailedTerminal, Parked],
            Self::Discard => &[Waiting, Received, FailedRetryable, FailedTerminal, Parked],
            Self::Retry => &[FailedRetryable],
        }
    }

    /// Returns the condition on the action's messages beside their statuses and their receipt,
    /// before and after the bound time of the action. `oncebox.act_on_messages` checks each message
    /// again.
    fn condition(self) -> [&'static str; 2] {
        match self {
            Self::Redrive => [" AND i.processed_at <= ", ""],
            Self::Discard => [" AND i.received_at <= ", ""],
            Self::Retry => {
                [" AND i.next_attempt_at > now() AND NOT oncebox.changed_since(i, ", ")"]
            }
        }
    }

    /// Returns the expression for what keeps a message of the condition from the action, or null.
    fn obstacle(self) -> &'static str {
        match self {
            Self::Redrive => {
                // The function is called for each message, so only for those that it can be true of.
                "CASE WHEN i.reason ~ '^(undecodable|unclaimable)' THEN 'undecodable' \
                    WHEN i.headers IS NULL THEN 'no_record' \
                    WHEN i.reason = 'collision' AND oncebox.is_unordered(i) THEN 'unordered' END"
            }
            Self::Discard | Self::Retry => "NULL::text",
        }
    }
}

/// The messages of an action.
pub(crate) struct Selection<'a> {
    pub(crate) consumer_id: i32,
    pub(crate) class: i16,
    pub(crate) action: Action,
    pub(crate) filter: &'a Filter,
    /// Versions that the filter's digest names, where it has one.
    pub(crate) versions: &'a Option<Vec<i32>>,
    /// Ids, of which a message has one; none for any.
    pub(crate) ids: Option<&'a [String]>,
    /// Latest time by which a message was received, or became a dead letter.
    pub(crate) as_of: DateTime<Utc>,
}

/// A message in one of the action's statuses.
#[derive(Debug, Clone, PartialEq, Eq, sqlx::FromRow)]
pub(crate) struct Candidate {
    pub(crate) message_id: String,
    pub(crate) received_at: DateTime<Utc>,
    /// Whether the filter takes it.
    pub(crate) is_selected: bool,
    /// What keeps it from the action; none where nothing does.
    pub(crate) obstacle: Option<String>,
}

impl Selection<'_> {
    /// Counts the messages that the action would change, up to a limit.
    pub(crate) async fn count(
        &self,
        connection: &mut PgConnection,
        limit: i64,
    ) -> Result<i64, sqlx::Error> {
        let mut query =
            QueryBuilder::new("SELECT count(*) FROM (SELECT FROM oncebox.inbox i WHERE");
        self.push_consumer(&mut query);
        let statuses = self.action.statuses().iter().map(|status| status.as_str());
        query.push(" AND i.status IN ('").push(Vec::from_iter(statuses).join("', '")).push("')");
        query.push(" AND i.status <> 'completed'");
        self.push_ids(&mut query);
        self.push_selected(&mut query);
        query.push(" AND ").push(self.action.obstacle()).push(" IS NULL");
        query.push(" LIMIT ").push_bind(limit).push(") m");
        query.build_query_scalar().fetch_one(connection).await
    }

    /// Returns the statuses through which the action goes.
    pub(crate) fn statuses(&self) -> Vec<MessageStatus> {
        let of_filter = |status: &MessageStatus| self.filter.status.is_none_or(|it| it == *status);
        self.action.statuses().iter().copied().filter(of_filter).collect()
    }

    /// Reads the next messages of a status from the oldest on, whether the filter takes them or
    /// not, so that a page reads its rows alone. With ids it is all of them.
    pub(crate) async fn page(
        &self,
        connection: &mut PgConnection,
        status: MessageStatus,
        after: &Option<(DateTime<Utc>, String)>,
        limit: i64,
    ) -> Result<Vec<Candidate>, InboxError> {
        // Without ids the index on what is open serves each partition in order.
        const BY_PLACE: &str = "SET LOCAL enable_seqscan = off; SET LOCAL enable_bitmapscan = off; \
            SET LOCAL enable_sort = off; SET LOCAL jit = off";
        const BY_ID: &str = "SET LOCAL enable_seqscan = off; SET LOCAL jit = off";
        let plan = if self.ids.is_some() { BY_ID } else { BY_PLACE };
        connection.execute(sqlx::raw_sql(plan)).await?;
        let mut query = self.page_query(status, after, limit);
        Ok(query.build_query_as().fetch_all(connection).await?)
    }

    fn page_query(
        &self,
        status: MessageStatus,
        after: &Option<(DateTime<Utc>, String)>,
        limit: i64,
    ) -> QueryBuilder<Postgres> {
        let mut query = QueryBuilder::new("SELECT i.message_id, i.received_at, (true");
        self.push_selected(&mut query);
        query.push(") IS TRUE AS is_selected, ").push(self.action.obstacle());
        query.push(" AS obstacle FROM oncebox.inbox i WHERE");
        self.push_consumer(&mut query);
        match self.ids {
            // An expression, so that the index of the ids alone serves this.
            Some(_) => query.push(" AND i.status || '' = ").push_bind(status),
            None => query.push(" AND i.status <> 'completed' AND i.status = ").push_bind(status),
        };
        self.push_ids(&mut query);
        query.push(" AND i.received_at <= ").push_bind(self.as_of);
        if let Some((at, id)) = after {
            query.push(" AND i.received_at >= ").push_bind(*at);
            query.push(" AND (i.received_at > ").push_bind(*at);
            query.push(" OR i.message_id COLLATE \"C\" > ").push_bind(id.clone()).push(")");
        }
        query.push(" ORDER BY i.received_at, i.message_id COLLATE \"C\" LIMIT ").push_bind(limit);
        query
    }

    /// Counts the messages that a host runs and that the action would else take, up to a limit.
    pub(crate) async fn running(
        &self,
        connection: &mut PgConnection,
        limit: i64,
    ) -> Result<i64, InboxError> {
        if self.action != Action::Discard {
            return Ok(0);
        }
        let mut query =
            QueryBuilder::new("SELECT count(*) FROM (SELECT FROM oncebox.inbox i WHERE");
        self.push_consumer(&mut query);
        query.push(" AND i.status = 'in_progress'");
        self.push_ids(&mut query);
        self.push_selected(&mut query);
        query.push(" LIMIT ").push_bind(limit).push(") m");
        Ok(query.build_query_scalar().fetch_one(connection).await?)
    }

    fn push_consumer(&self, query: &mut QueryBuilder<Postgres>) {
        query.push(" i.consumer_id = ").push_bind(self.consumer_id);
        query.push(" AND i.retention_class = ").push_bind(self.class);
    }

    fn push_ids(&self, query: &mut QueryBuilder<Postgres>) {
        if let Some(ids) = self.ids {
            query.push(" AND i.message_id = ANY (").push_bind(ids.to_vec()).push(")");
        }
    }

    fn push_selected(&self, query: &mut QueryBuilder<Postgres>) {
        let [before, after] = self.action.condition();
        query.push(before).push_bind(self.as_of).push(after);
        self.filter.push(query, self.versions);
    }

    /// Does the action on these messages, as far as it still can be done, and returns their number.
    /// Each gets an entry in its history.
    pub(crate) async fn act(
        &self,
        connection: &mut PgConnection,
        ids: &[&str],
        actor: &str,
        reason: &str,
    ) -> Result<i64, InboxError> {
        const ACT: &str = "SELECT oncebox.act_on_messages($1, $2, $3, $4, $5, $6, $7)";
        check_is_here(connection, self.consumer_id).await?;
        let query = sqlx::query_scalar::<_, i32>(ACT)
            .bind(self.consumer_id)
            .bind(self.class)
            .bind(self.action.name())
            .bind(ids)
            .bind(self.as_of)
            .bind(actor)
            .bind(reason);
        Ok(query.fetch_one(connection).await?.into())
    }
}

/// Refuses a run of messages that an operator names and that are erased.
pub(crate) async fn refuse_erased(
    database: &PgPool,
    consumer: &Consumer,
    ids: &[String],
) -> Result<(), InboxError> {
    const ERASED: &str = "SELECT message_id, erased_at FROM oncebox.inbox WHERE consumer_id = $1 \
        AND message_id = ANY ($2) AND erased_at IS NOT NULL ORDER BY message_id LIMIT 1";
    let query = sqlx::query_as(ERASED).bind(consumer.consumer_id).bind(ids);
    let found: Option<(String, DateTime<Utc>)> = query.fetch_optional(database).await?;
    match found {
        Some((id, at)) => Err(erased(&consumer.tenant, &consumer.name, &id, at)),
        None => Ok(()),
    }
}

/// Returns the error of an action on an erased message.
pub(super) fn erased(tenant: &str, consumer: &str, id: &str, at: DateTime<Utc>) -> InboxError {
    InboxError::conflict(format!(
        "message `{id}` of `{tenant}/{consumer}` was erased at {}, so there is nothing left to run",
        at.format("%F %T UTC")
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    // What could go wrong: a page leaves out a condition of the filter, so that an action takes
    // more than was asked, or the filter decides what a page reads, so that a rare message is
    // looked for through the whole inbox in one statement.
    #[test]
    fn a_page_reads_by_place_and_selects_by_the_filter() {
        let filter = Filter { reason: Some("no_route".to_owned()), ..Filter::default() };
        let versions = Some(vec![1]);
        for action in [Action::Redrive, Action::Discard, Action::Retry] {
            let selection = Selection {
                consumer_id: 1,
                class: 7,
                action,
                filter: &filter,
                versions: &versions,
                ids: None,
                as_of: DateTime::UNIX_EPOCH,
            };
            let after = Some((DateTime::UNIX_EPOCH, "a".to_owned()));
            let sql = selection.page_query(MessageStatus::Parked, &after, 500).into_string();
            let (columns, rows) = sql.split_once(" FROM oncebox.inbox i WHERE").expect("a table");
            assert!(columns.contains("i.reason = $2") && columns.contains("i.version_id = ANY"));
            assert!(
                columns.contains(action.obstacle()) && columns.contains("<= $1")
                    || action == Action::Retry
            );
            assert!(rows.contains("i.consumer_id = ") && rows.contains("i.status = "), "{rows}");
            assert!(rows.contains("i.received_at <= "), "what comes later is not read: {rows}");
            assert!(!rows.contains("i.reason") && rows.contains(" LIMIT "), "{rows}");
        }
    }
}
