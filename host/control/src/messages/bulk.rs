//! What people do with messages that do not go on by themselves: run dead letters again, discard
//! what is not to run any more, run now what waits for its next attempt.
//!
//! The state of the messages is the progress. A call does a batch; asked again, it goes on with
//! what is left, and what was done is not done twice, whoever asks and however often.

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

/// What is done.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verb {
    /// Dead letters are due again, under their ids and with their headers, and with a budget of
    /// runs as if they were new. In order by key they still wait for their turn.
    Redrive,
    /// Messages that did not complete never run; their rows stay. What waits behind one in its key
    /// follows.
    Discard,
    /// Messages that wait for their next attempt are due now.
    Retry,
}

impl Verb {
    /// Its name in the database and in the audit log.
    pub fn name(self) -> &'static str {
        match self {
            Self::Redrive => "redrive",
            Self::Discard => "discard",
            Self::Retry => "retry",
        }
    }

    /// The messages that it is for, behind [`FROM`], before and after the time that was asked at;
    /// `oncebox.remedy` looks again at each.
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

/// What is to be done, with which messages.
#[derive(Debug, Clone)]
pub struct Remedy {
    /// What is done.
    pub verb: Verb,
    /// Which messages of the consumer; its place in a list and its limit do not matter.
    pub filter: Filter,
    /// Only these; none for any.
    pub message_ids: Vec<String>,
    /// Why; kept with each message and in the audit log.
    pub reason: String,
    /// Only what was there, or was a dead letter, by then; none for now. Whoever asks in batches
    /// says the same each time, so that what fails again meanwhile is left alone.
    pub as_of: Option<DateTime<Utc>>,
    /// Messages of one call, at most; none is only counted.
    pub limit: u32,
}

/// What was done.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Remedied {
    /// Messages with which it was done.
    pub changed: i64,
    /// Messages with which it is still to be done, counted up to 100,000.
    pub left: i64,
    /// What [`Remedy::as_of`] was.
    pub as_of: DateTime<Utc>,
}

/// Messages are counted up to here.
const COUNT_MAX: i64 = 100_000;

impl Admin {
    /// Do it with a batch of messages, or count them.
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

    /// The audit log is written in the transaction of the change; where the messages are in another
    /// database, before it.
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

/// The messages that are meant.
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

    /// The oldest ones.
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
