//! Actions of operators on messages that do not continue by themselves. A redrive runs dead letters
//! again, a discard excludes messages from any run, and a retry makes later attempts due at once.
//!
//! The state of the messages is the progress. A call takes a batch, and a repeated call continues
//! with the rest. Each message is acted on once, however many calls and callers request it.

use chrono::{DateTime, Utc};
use oncebox_model::{error::InboxError, hooks};
use serde_json::json;
use sqlx::{PgConnection, PgPool, Postgres, QueryBuilder};

use crate::{
    audit::Subject,
    consumers::Consumer,
    handles::Messages,
    messages::filter::{FROM, Filter},
};

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

    /// Returns the condition on the action's messages, behind [`FROM`], in two parts: before and
    /// after the bound `as_of` time. `oncebox.act_on_messages` checks each message again.
    fn condition(self) -> [&'static str; 2] {
        match self {
            Self::Redrive => [
                " AND i.status IN ('failed_terminal', 'parked') AND i.headers IS NOT NULL AND \
                    i.reason !~ '^(undecodable|unclaimable)' \
                 AND NOT oncebox.is_unordered(i) AND i.processed_at <= ",
                "",
            ],
            Self::Discard => [
                " AND i.status IN ('received', 'failed_retryable', 'failed_terminal', 'parked', \
                    'waiting') AND i.received_at <= ",
                "",
            ],
            Self::Retry => [
                " AND i.status = 'failed_retryable' AND i.next_attempt_at > now() AND NOT \
                    oncebox.changed_since(i, ",
                ")",
            ],
        }
    }
}

/// An action, with the selection of its messages.
#[derive(Debug, Clone)]
pub struct BulkAction {
    /// Action.
    pub action: Action,
    /// Filter for messages of the consumer; its cursor and its limit have no effect.
    pub filter: Filter,
    /// Ids of the messages; empty for all that the filter takes.
    pub message_ids: Vec<String>,
    /// Reason; stored with each message and in the audit log.
    pub reason: String,
    /// Latest time by which a message was received, or became a dead letter; none for the present
    /// time. A caller that works in batches gives an equal time for each, so that it leaves alone
    /// messages that fail again in between.
    pub as_of: Option<DateTime<Utc>>,
    /// Most messages of one call; 0 only counts them.
    pub limit: u32,
}

/// The result of one call of an action.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BulkResult {
    /// Messages that were changed.
    pub changed: i64,
    /// Messages that are left, counted up to 100,000.
    pub left: i64,
    /// Time as of which the messages were selected, as in [`BulkAction::as_of`].
    pub as_of: DateTime<Utc>,
}

/// Most messages that are counted.
const COUNT_MAX: i64 = 100_000;

impl Messages<'_> {
    /// Does the action on a batch of messages, or counts them.
    pub async fn act_on_messages(
        &self,
        tenant: &str,
        name: &str,
        bulk: &BulkAction,
    ) -> Result<BulkResult, InboxError> {
        let consumer = self.0.consumers().get(tenant, name).await?;
        if consumer.state.is_deleting() {
            return Err(InboxError::conflict(format!(
                "consumer `{tenant}/{name}` is being deleted"
            )));
        }
        let database = self.0.tenant_databases().get(&self.0.tenants().get(tenant).await?)?;
        let versions = self.versions_like(bulk.filter.version.as_deref()).await?;
        let as_of = match bulk.as_of {
            Some(as_of) => as_of,
            None => sqlx::query_scalar("SELECT now()").fetch_one(&database.pool).await?,
        };
        if bulk.action != Action::Discard {
            refuse_erased(&database.pool, &consumer, &bulk.message_ids).await?;
        }
        let selection = Selection { consumer: &consumer, bulk, versions: &versions, as_of };
        let mut changed = 0;
        if bulk.limit > 0 {
            let ids = selection.ids(&database.pool).await?;
            if !ids.is_empty() {
                hooks::point("inbox:action:before");
                changed = self
                    .act_on_ids(&consumer, &database.pool, database.is_dedicated, bulk, &ids, as_of)
                    .await?;
                hooks::point("inbox:action:after");
            }
        }
        Ok(BulkResult { changed, left: selection.count(&database.pool).await?, as_of })
    }

    /// Does the action on messages with these ids, and writes the audit log. The log is written in
    /// the transaction of the change; where the messages are in another database, before it.
    async fn act_on_ids(
        &self,
        consumer: &Consumer,
        database: &PgPool,
        is_dedicated: bool,
        bulk: &BulkAction,
        ids: &[String],
        as_of: DateTime<Utc>,
    ) -> Result<i64, InboxError> {
        let subject = || Subject::of(&consumer.tenant, &consumer.name);
        let action = format!("inbox.{}", bulk.action.name());
        let details =
            |messages: i64| json!({ "reason": bulk.reason, "messages": messages, "as_of": as_of });
        if is_dedicated {
            let mut tx = self.0.pool.begin().await?;
            self.0.audit().record(&mut tx, &action, subject(), details(ids.len() as i64)).await?;
            tx.commit().await?;
        }
        let mut tx = database.begin().await?;
        let changed = self.act_in(&mut tx, consumer, bulk, ids, as_of).await?;
        if !is_dedicated && changed > 0 {
            self.0.audit().record(&mut tx, &action, subject(), details(changed)).await?;
        }
        tx.commit().await?;
        Ok(changed)
    }

    async fn act_in(
        &self,
        connection: &mut PgConnection,
        consumer: &Consumer,
        bulk: &BulkAction,
        ids: &[String],
        as_of: DateTime<Utc>,
    ) -> Result<i64, InboxError> {
        const ACT: &str = "SELECT oncebox.act_on_messages($1, $2, $3, $4, $5, $6, $7)";
        let query = sqlx::query_scalar::<_, i32>(ACT)
            .bind(consumer.consumer_id)
            .bind(consumer.policy()?.retention.class())
            .bind(bulk.action.name())
            .bind(ids)
            .bind(as_of)
            .bind(&self.0.actor)
            .bind(&bulk.reason);
        Ok(query.fetch_one(connection).await?.into())
    }
}

/// Refuses a run of messages that an operator names and that are erased.
async fn refuse_erased(
    database: &PgPool,
    consumer: &Consumer,
    ids: &[String],
) -> Result<(), InboxError> {
    const ERASED: &str = "SELECT message_id, erased_at FROM oncebox.inbox WHERE consumer_id = $1 \
        AND message_id = ANY ($2) AND erased_at IS NOT NULL ORDER BY message_id LIMIT 1";
    if ids.is_empty() {
        return Ok(());
    }
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

/// The messages that an action selects.
struct Selection<'a> {
    consumer: &'a Consumer,
    bulk: &'a BulkAction,
    versions: &'a Option<Vec<i32>>,
    as_of: DateTime<Utc>,
}

impl Selection<'_> {
    fn query(&self, select: &str) -> QueryBuilder<Postgres> {
        let Self { consumer, bulk, versions, as_of } = self;
        let mut query = QueryBuilder::new([select, FROM, " AND i.consumer_id = "].concat());
        let [before, after] = bulk.action.condition();
        query.push_bind(consumer.consumer_id).push(before).push_bind(*as_of).push(after);
        bulk.filter.push(&mut query, versions);
        if !bulk.message_ids.is_empty() {
            query.push(" AND i.message_id = ANY (").push_bind(bulk.message_ids.clone()).push(")");
        }
        query
    }

    /// Reads the ids of the oldest messages.
    async fn ids(&self, database: &PgPool) -> Result<Vec<String>, InboxError> {
        let mut query = self.query("SELECT i.message_id");
        query
            .push(" ORDER BY i.received_at, i.\"offset\" LIMIT ")
            .push_bind(i64::from(self.bulk.limit));
        Ok(query.build_query_scalar().fetch_all(database).await?)
    }

    async fn count(&self, database: &PgPool) -> Result<i64, InboxError> {
        let mut query = self.query("SELECT count(*) FROM (SELECT i.message_id");
        query.push(" LIMIT ").push_bind(COUNT_MAX).push(") m");
        Ok(query.build_query_scalar().fetch_one(database).await?)
    }
}
