//! Actions of operators on messages that do not continue by themselves. Dead letters are run again,
//! messages that are not to run are discarded, and messages with a later attempt run at once.
//!
//! The state of the messages is the progress. A call does a batch, and a repeated call continues
//! with the rest. A message that is done is not done twice, however often and by which callers this
//! is requested.

use chrono::{DateTime, Utc};
use oncebox_model::{error::InboxError, hooks};
use serde_json::json;
use sqlx::{PgConnection, PgPool, Postgres, QueryBuilder};

use crate::{
    audit::Subject,
    consumers::Consumer,
    control::Admin,
    messages::list::{FROM, Filter},
};

/// An action on messages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verb {
    /// Makes dead letters due again, under their ids, with their headers and with the runs of a new
    /// message. In order by key they still wait for their turn.
    Redrive,
    /// Excludes messages that did not complete from any run; their rows stay. Messages that wait
    /// behind one in its key follow.
    Discard,
    /// Makes messages that wait for their next attempt due at once.
    Retry,
}

impl Verb {
    /// Returns the action's name in the database and in the audit log.
    pub fn name(self) -> &'static str {
        match self {
            Self::Redrive => "redrive",
            Self::Discard => "discard",
            Self::Retry => "retry",
        }
    }

    /// Returns the condition on the action's messages, behind [`FROM`], in two parts: before and
    /// after the bound `as_of` time. `oncebox.remedy` checks each message again.
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

/// An action, with the messages that it is for.
#[derive(Debug, Clone)]
pub struct Remedy {
    /// Action.
    pub verb: Verb,
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

/// The result of an action.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Remedied {
    /// Messages that were changed.
    pub changed: i64,
    /// Messages that are left, counted up to 100,000.
    pub left: i64,
    /// Time as of which the messages were chosen, as in [`Remedy::as_of`].
    pub as_of: DateTime<Utc>,
}

/// Most messages that are counted.
const COUNT_MAX: i64 = 100_000;

impl Admin {
    /// Does the action on a batch of messages, or counts them.
    pub async fn remedy(
        &self,
        tenant: &str,
        name: &str,
        remedy: &Remedy,
    ) -> Result<Remedied, InboxError> {
        let consumer = self.consumer(tenant, name).await?;
        if consumer.state == "deleting" {
            return Err(InboxError::conflict(format!(
                "consumer `{tenant}/{name}` is being deleted"
            )));
        }
        let place = self.place(&self.tenant(tenant).await?)?;
        let versions = self.versions_like(remedy.filter.version.as_deref()).await?;
        let as_of = match remedy.as_of {
            Some(as_of) => as_of,
            None => sqlx::query_scalar("SELECT now()").fetch_one(&place.pool).await?,
        };
        let chosen = Chosen { consumer: &consumer, remedy, versions: &versions, as_of };
        let mut changed = 0;
        if remedy.limit > 0 {
            let ids = chosen.ids(&place.pool).await?;
            if !ids.is_empty() {
                hooks::point("inbox:remedy:before");
                changed = self
                    .remedy_these(&consumer, &place.pool, place.is_own, remedy, &ids, as_of)
                    .await?;
                hooks::point("inbox:remedy:after");
            }
        }
        Ok(Remedied { changed, left: chosen.count(&place.pool).await?, as_of })
    }

    /// Does the action on messages with these ids, and writes the audit log. The log is written in
    /// the transaction of the change; where the messages are in another database, before it.
    async fn remedy_these(
        &self,
        consumer: &Consumer,
        place: &PgPool,
        is_own: bool,
        remedy: &Remedy,
        ids: &[String],
        as_of: DateTime<Utc>,
    ) -> Result<i64, InboxError> {
        let subject = || Subject::of(&consumer.tenant, &consumer.name);
        let action = format!("inbox.{}", remedy.verb.name());
        let details = |messages: i64| json!({ "reason": remedy.reason, "messages": messages, "as_of": as_of });
        if is_own {
            let mut tx = self.pool.begin().await?;
            self.audit(&mut tx, &action, subject(), details(ids.len() as i64)).await?;
            tx.commit().await?;
        }
        let mut tx = place.begin().await?;
        let changed = self.remedy_in(&mut tx, consumer, remedy, ids, as_of).await?;
        if !is_own && changed > 0 {
            self.audit(&mut tx, &action, subject(), details(changed)).await?;
        }
        tx.commit().await?;
        Ok(changed)
    }

    async fn remedy_in(
        &self,
        connection: &mut PgConnection,
        consumer: &Consumer,
        remedy: &Remedy,
        ids: &[String],
        as_of: DateTime<Utc>,
    ) -> Result<i64, InboxError> {
        const REMEDY: &str = "SELECT oncebox.remedy($1, $2, $3, $4, $5, $6, $7)";
        let query = sqlx::query_scalar::<_, i32>(REMEDY)
            .bind(consumer.consumer_id)
            .bind(consumer.policy()?.retention.class())
            .bind(remedy.verb.name())
            .bind(ids)
            .bind(as_of)
            .bind(&self.actor)
            .bind(&remedy.reason);
        Ok(query.fetch_one(connection).await?.into())
    }
}

/// The messages that an action is for.
struct Chosen<'a> {
    consumer: &'a Consumer,
    remedy: &'a Remedy,
    versions: &'a Option<Vec<i32>>,
    as_of: DateTime<Utc>,
}

impl Chosen<'_> {
    fn query(&self, select: &str) -> QueryBuilder<Postgres> {
        let Self { consumer, remedy, versions, as_of } = self;
        let mut query = QueryBuilder::new([select, FROM, " AND i.consumer_id = "].concat());
        let [before, after] = remedy.verb.condition();
        query.push_bind(consumer.consumer_id).push(before).push_bind(*as_of).push(after);
        remedy.filter.push(&mut query, versions);
        if !remedy.message_ids.is_empty() {
            query.push(" AND i.message_id = ANY (").push_bind(remedy.message_ids.clone()).push(")");
        }
        query
    }

    /// Reads the ids of the oldest messages.
    async fn ids(&self, place: &PgPool) -> Result<Vec<String>, InboxError> {
        let mut query = self.query("SELECT i.message_id");
        query
            .push(" ORDER BY i.received_at, i.\"offset\" LIMIT ")
            .push_bind(i64::from(self.remedy.limit));
        Ok(query.build_query_scalar().fetch_all(place).await?)
    }

    async fn count(&self, place: &PgPool) -> Result<i64, InboxError> {
        let mut query = self.query("SELECT count(*) FROM (SELECT i.message_id");
        query.push(" LIMIT ").push_bind(COUNT_MAX).push(") m");
        Ok(query.build_query_scalar().fetch_one(place).await?)
    }
}
