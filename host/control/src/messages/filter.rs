//! Filters of inbox rows, and the SQL that they become.

use chrono::{DateTime, Utc};
use oncebox_model::MessageStatus;
use sqlx::{Postgres, QueryBuilder};

use super::cursor::Cursor;

/// Conditions on the rows of a list.
#[derive(Debug, Clone, Default)]
pub struct Filter {
    /// Name of the tenant; none for all.
    pub tenant: Option<String>,
    /// Name of the consumer; none for all.
    pub consumer: Option<String>,
    /// Status of the rows.
    pub status: Option<MessageStatus>,
    /// Reason of the rows; it also takes rows with this reason and details after a colon.
    pub reason: Option<String>,
    /// Event type of the rows.
    pub event_type: Option<String>,
    /// Ordering keys, of which a row has one; empty for any.
    pub ordering_keys: Vec<Vec<u8>>,
    /// Text that the last error contains, regardless of case.
    pub error: Option<String>,
    /// First digits of the digest of the version that last ran the message.
    pub version: Option<String>,
    /// Earliest time at which a row was received.
    pub since: Option<DateTime<Utc>>,
    /// Time before which a row was received.
    pub until: Option<DateTime<Utc>>,
    /// Cursor after which the list begins.
    pub after: Option<Cursor>,
    /// Most rows, newest first.
    pub limit: i64,
}

/// Returns the ordering keys that a list may show like this: the decoded digits, if any, and the
/// text itself.
pub fn keys(shown: &str) -> Vec<Vec<u8>> {
    let bytes = shown.strip_prefix("0x").and_then(|digits| hex::decode(digits).ok());
    bytes.into_iter().chain([shown.as_bytes().to_vec()]).collect()
}

/// Tables behind a list of columns, with the names that [`Filter::push`] uses.
pub(crate) const FROM: &str = " FROM oncebox.inbox i JOIN oncebox.consumer c USING (consumer_id) \
    JOIN oncebox.tenant t USING (tenant_id) \
    LEFT JOIN oncebox.version v USING (version_id) WHERE true";

impl Filter {
    /// Adds the conditions behind [`FROM`], all but the cursor. Only conditions that the filter
    /// contains are added, so that each combination has its own plan.
    pub(crate) fn push(&self, query: &mut QueryBuilder<Postgres>, versions: &Option<Vec<i32>>) {
        let texts = [
            (" AND t.name = ", &self.tenant),
            (" AND c.name = ", &self.consumer),
            (" AND i.event_type = ", &self.event_type),
        ];
        for (condition, text) in texts {
            if let Some(text) = text {
                query.push(condition).push_bind(text);
            }
        }
        if let Some(status) = self.status {
            query.push(" AND i.status = ").push_bind(status);
        }
        if let Some(reason) = &self.reason {
            query.push(" AND (i.reason = ").push_bind(reason);
            query.push(" OR starts_with(i.reason, ").push_bind(format!("{reason}:")).push("))");
        }
        if !self.ordering_keys.is_empty() {
            query.push(" AND i.ordering_key = ANY (").push_bind(&self.ordering_keys).push(")");
        }
        if let Some(error) = &self.error {
            query
                .push(" AND position(lower(")
                .push_bind(error)
                .push(") in lower(i.last_error)) > 0");
        }
        if let Some(versions) = versions {
            query.push(" AND i.version_id = ANY (").push_bind(versions).push(")");
        }
        if let Some(since) = self.since {
            query.push(" AND i.received_at >= ").push_bind(since);
        }
        if let Some(until) = self.until {
            query.push(" AND i.received_at < ").push_bind(until);
        }
    }

    /// Returns whether indexes answer the whole filter, so that a page reads only its own rows.
    pub(super) fn is_in_an_index(&self) -> bool {
        let Self { reason, event_type, ordering_keys, error, version, .. } = self;
        reason.is_none()
            && event_type.is_none()
            && ordering_keys.is_empty()
            && error.is_none()
            && version.is_none()
    }

    /// Adds the conditions for which a consumer's messages have an index.
    fn push_indexed(&self, query: &mut QueryBuilder<Postgres>) {
        if let Some(status) = self.status {
            query.push(" AND i.status = ").push_bind(status);
            if status != MessageStatus::Completed {
                // The condition of the partial index on open messages.
                query.push(" AND i.status <> 'completed'");
            }
        }
        if let Some(since) = self.since {
            query.push(" AND i.received_at >= ").push_bind(since);
        }
        if let Some(until) = self.until {
            query.push(" AND i.received_at < ").push_bind(until);
        }
        match &self.after {
            Some(Cursor { received_at, message_id: Some(id) }) => {
                // Only the first of these conditions can use an index.
                query.push(" AND i.received_at <= ").push_bind(received_at);
                query.push(" AND (i.received_at < ").push_bind(received_at);
                query.push(" OR i.message_id COLLATE \"C\" > ").push_bind(id).push(")");
            }
            Some(Cursor { received_at, message_id: None }) => {
                query.push(" AND i.received_at < ").push_bind(received_at);
            }
            None => {}
        }
    }

    /// Adds a subquery with the filter's consumers, and the messages of each from the newest on.
    pub(super) fn push_newest(&self, query: &mut QueryBuilder<Postgres>, columns: &str) {
        query.push(
            " FROM (SELECT c.consumer_id AS id FROM oncebox.consumer c JOIN oncebox.tenant \
            t USING (tenant_id) WHERE true",
        );
        for (condition, text) in
            [(" AND t.name = ", &self.tenant), (" AND c.name = ", &self.consumer)]
        {
            if let Some(text) = text {
                query.push(condition).push_bind(text);
            }
        }
        query.push(") asked ");
        let by_state = self.reason.is_some() && self.status.is_none();
        if by_state {
            // A row with a reason is not completed, and the rows of each other state have an index.
            query.push("CROSS JOIN unnest(ARRAY[").push(OPEN).push("]) AS any_of(state) ");
        }
        query
            .push("CROSS JOIN LATERAL (SELECT ")
            .push(columns)
            .push(" FROM oncebox.inbox i WHERE ");
        // The index of open messages has the consumer as a column, and the index of all messages as
        // an expression.
        let is_open =
            by_state || self.status.is_some_and(|status| status != MessageStatus::Completed);
        query.push(if is_open {
            "i.consumer_id = asked.id"
        } else {
            "i.consumer_id::bigint = asked.id::bigint"
        });
        if by_state {
            query.push(" AND i.status = any_of.state AND i.status <> 'completed'");
        }
        self.push_indexed(query);
        query.push(NEWEST_FIRST);
    }
}

/// All states except `completed`.
const OPEN: &str = "'received', 'in_progress', 'failed_retryable', 'failed_terminal', 'parked', \
    'waiting', 'skipped', 'discarded'";
/// Order of a list.
pub(super) const NEWEST_FIRST: &str = " ORDER BY i.received_at DESC, i.message_id COLLATE \"C\"";
