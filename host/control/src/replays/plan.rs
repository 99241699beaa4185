//! Plans of replays: what would run, what cannot, and what would not be sent.

use std::time::Duration;

use chrono::{DateTime, TimeDelta, Utc};
use oncebox_model::{
    error::InboxError,
    policy::{Dedup, ReplayEmit, ReplayKind},
    sqlstate,
    tx::answered,
};
use serde_json::json;
use sqlx::{AssertSqlSafe, Executor, PgConnection, types::Json};
use tokio::time::Instant;

use super::{
    ReplayTarget,
    filter::ReplayFilter,
    token::{ReplayToken, generate_secret, hash_of},
};
use crate::{handles::Replays, tenants::moves::check_is_here};

/// Time for which a token starts its plan.
const TOKEN_MINUTES: i64 = 15;
/// Longest count of a plan.
const COUNT_TIME: Duration = Duration::from_secs(8);
/// Most messages that a plan counts.
const COUNT_MAX: i64 = 1_000_000;
/// Messages of one statement of the count.
const PAGE: i32 = 5_000;
/// First messages of a plan whose outgoing messages are looked up.
const SAMPLE: usize = 1_000;
/// Longest look for the outgoing messages of a plan.
const SAMPLE_TIME: Duration = Duration::from_secs(4);

/// A plan of a replay.
#[derive(Debug, Clone)]
pub struct ReplayPlan {
    /// Key of the replay.
    pub replay_id: i64,
    /// Token that starts it, shown here alone.
    pub token: String,
    /// Time after which the token starts nothing.
    pub expires_at: DateTime<Utc>,
    /// Meaning of the consumer's effects, by its policy.
    pub kind: ReplayKind,
    /// Answer to an emit of a replayed run.
    pub emit: ReplayEmit,
    /// Messages that would run.
    pub found: i64,
    /// Messages that cannot run, since no record of them is stored.
    pub without_payload: i64,
    /// Whether the count looked at all messages; else there are at least as many.
    pub is_counted_whole: bool,
    /// Time before which a message must have completed.
    pub until: DateTime<Utc>,
    /// Messages from the first on whose outgoing messages were looked up.
    pub sampled: i64,
    /// Those of them that have outgoing messages, as far as these are kept.
    pub sampled_emitting: i64,
    /// Outgoing messages of those.
    pub sampled_outgoing: i64,
}

/// Counts of a plan.
#[derive(Debug, Default)]
struct PlanCounts {
    found: i64,
    without_payload: i64,
    is_whole: bool,
    /// Ids of the first messages that would run.
    sample: Vec<String>,
}

/// Outgoing messages of the first messages of a plan.
#[derive(Debug, Default, sqlx::FromRow)]
struct Sample {
    /// Messages that were looked at.
    messages: i64,
    /// Those of them that caused outgoing messages.
    emitting: i64,
    outgoing: i64,
}

#[derive(sqlx::FromRow)]
struct CountedPage {
    ids: Option<Vec<String>>,
    have_record: Option<Vec<bool>>,
    end_at: Option<DateTime<Utc>>,
    end_id: Option<String>,
}

impl Replays<'_> {
    /// Plans a replay of a consumer's completed messages. Nothing runs before
    /// [`start`](Self::start) is called with the token.
    ///
    /// # Errors
    /// `NotFound` where there is no such consumer. `Conflict` where its policy allows no replay.
    /// `Invalid` for a filter that selects nothing. An error of a database.
    pub async fn plan(
        &self,
        tenant: &str,
        name: &str,
        filter: &ReplayFilter,
    ) -> Result<ReplayPlan, InboxError> {
        filter.check()?;
        let target = self.target(tenant, name).await?;
        let kind = allowed_kind(&target)?;
        let emit = target.policy.replay.emit;
        let policy_revision = self.policy_revision(target.consumer.consumer_id).await?;
        let now: DateTime<Utc> =
            sqlx::query_scalar("SELECT now()").fetch_one(&target.database.pool).await?;
        let until = filter.to.map_or(now, |to| to.min(now));
        let counted = count(&target, filter, until).await?;
        let sample = sample(&target, &counted.sample).await?.unwrap_or_default();
        let details = json!({ "filter": filter, "found": counted.found,
            "without_payload": counted.without_payload, "kind": kind });
        let (secret, expires_at) = (generate_secret(), now + TimeDelta::minutes(TOKEN_MINUTES));
        self.audit_before(&target, "replay.plan", &details).await?;
        let mut tx = target.database.pool.begin().await?;
        check_is_here(&mut tx, target.consumer.consumer_id).await?;
        forget_plans(&mut tx, target.consumer.consumer_id).await?;
        const INSERT: &str = "INSERT INTO oncebox.replay (consumer_id, kind, emit, filter, \
                until_at, policy_revision, generation, token_hash, expires_at, planned_by, found, \
                found_without_payload, is_counted_whole, cursor_at) \
            VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14) \
            RETURNING replay_id";
        let query = sqlx::query_scalar(INSERT)
            .bind(target.consumer.consumer_id)
            .bind(kind.name())
            .bind(emit.name())
            .bind(Json(filter))
            .bind(until)
            .bind(policy_revision)
            .bind(target.consumer.generation)
            .bind(hash_of(&secret))
            .bind(expires_at)
            .bind(&self.0.actor)
            .bind(counted.found)
            .bind(counted.without_payload)
            .bind(counted.is_whole)
            .bind(begin_of(filter));
        let replay_id: i64 = query.fetch_one(&mut *tx).await?;
        self.audit_with(&mut tx, &target, "replay.plan", &details).await?;
        tx.commit().await?;
        Ok(ReplayPlan {
            replay_id,
            token: ReplayToken::new(tenant, name, replay_id, secret).text(),
            expires_at,
            kind,
            emit,
            found: counted.found,
            without_payload: counted.without_payload,
            is_counted_whole: counted.is_whole,
            until,
            sampled: sample.messages,
            sampled_emitting: sample.emitting,
            sampled_outgoing: sample.outgoing,
        })
    }

    /// Returns the revision of the last change of a consumer's policy.
    async fn policy_revision(&self, consumer_id: i32) -> Result<i64, InboxError> {
        const REVISION: &str =
            "SELECT policy_revision FROM oncebox.consumer WHERE consumer_id = $1";
        Ok(sqlx::query_scalar(REVISION).bind(consumer_id).fetch_one(&self.0.pool).await?)
    }
}

/// Returns the kind of a consumer whose policy allows replays.
fn allowed_kind(target: &ReplayTarget) -> Result<ReplayKind, InboxError> {
    if target.policy.dedup == Dedup::Off {
        return Err(InboxError::conflict(format!(
            "the policy of `{}` says `dedup = \"off\"`, so no message that completed is kept",
            target.shown()
        )));
    }
    target.policy.replay.kind.ok_or_else(|| {
        InboxError::conflict(format!(
            "the policy of `{}` allows no replay; `replay.kind` says what one would mean for it, \
                and allows it (docs/replay.md)",
            target.shown()
        ))
    })
}

/// Returns the time at which a replay begins.
fn begin_of(filter: &ReplayFilter) -> DateTime<Utc> {
    filter.from.unwrap_or(DateTime::UNIX_EPOCH)
}

/// Deletes plans of a consumer that nobody started in time.
async fn forget_plans(connection: &mut PgConnection, consumer_id: i32) -> Result<(), InboxError> {
    const FORGET: &str = "DELETE FROM oncebox.replay WHERE consumer_id = $1 AND state = 'planned' \
        AND expires_at < now()";
    sqlx::query(FORGET).bind(consumer_id).execute(connection).await?;
    Ok(())
}

/// Counts the messages of a filter, page by page, for as long as a plan may.
async fn count(
    target: &ReplayTarget,
    filter: &ReplayFilter,
    until: DateTime<Utc>,
) -> Result<PlanCounts, InboxError> {
    let deadline = Instant::now() + COUNT_TIME;
    let mut counted = PlanCounts::default();
    let mut next = Some((begin_of(filter), String::new()));
    while let Some((after, after_id)) = next {
        let left = deadline.saturating_duration_since(Instant::now());
        let Some(page) = page(target, filter, until, (after, &after_id), left).await? else {
            return Ok(counted);
        };
        next = page.end_at.zip(page.end_id);
        let have_record = page.have_record.unwrap_or_default();
        for (id, has_record) in page.ids.unwrap_or_default().into_iter().zip(have_record) {
            if !has_record {
                counted.without_payload += 1;
                continue;
            }
            counted.found += 1;
            if counted.sample.len() < SAMPLE {
                counted.sample.push(id);
            }
        }
        let is_over =
            counted.found + counted.without_payload >= COUNT_MAX || Instant::now() > deadline;
        if next.is_some() && is_over {
            return Ok(counted);
        }
    }
    counted.is_whole = true;
    Ok(counted)
}

/// Reads a page of the messages that a replay would take, as the hosts do; none where that takes
/// longer than `within`.
async fn page(
    target: &ReplayTarget,
    filter: &ReplayFilter,
    until: DateTime<Utc>,
    (after, after_id): (DateTime<Utc>, &str),
    within: Duration,
) -> Result<Option<CountedPage>, InboxError> {
    const READ: &str = "SELECT ids, have_record, end_at, end_id \
        FROM oncebox.page_of_replay($1, $2, $3, $4, $5, $6, $7, $8)";
    let mut tx = target.database.pool.begin().await?;
    limit(&mut tx, within).await?;
    let query = sqlx::query_as(READ)
        .bind(target.consumer.consumer_id)
        .bind(target.policy.retention.class())
        .bind(after)
        .bind(after_id)
        .bind(until)
        .bind(&filter.event_type)
        .bind(&filter.ids)
        .bind(PAGE);
    let page = in_time(query.fetch_one(&mut *tx).await)?;
    tx.rollback().await?; // it was begun for its time limit
    Ok(page)
}

/// Returns how many of these messages caused outgoing messages, and how many of those there are;
/// none where that takes too long.
async fn sample(target: &ReplayTarget, ids: &[String]) -> Result<Option<Sample>, InboxError> {
    const CAUSED: &str = "SELECT cardinality($2)::bigint AS messages, \
            count(DISTINCT o.message_id) AS emitting, count(*) AS outgoing \
        FROM oncebox.outgoing o WHERE o.consumer_id = $1 AND o.message_id = ANY ($2)";
    let mut tx = target.database.pool.begin().await?;
    limit(&mut tx, SAMPLE_TIME).await?;
    let query = sqlx::query_as(CAUSED).bind(target.consumer.consumer_id).bind(ids);
    let caused = in_time(query.fetch_one(&mut *tx).await)?;
    tx.rollback().await?; // it was begun for its time limit
    Ok(caused)
}

/// Limits the time of each statement of a transaction.
async fn limit(connection: &mut PgConnection, within: Duration) -> Result<(), InboxError> {
    // Zero would be no limit.
    let set = format!("SET LOCAL statement_timeout = {}", within.as_millis().max(1));
    connection.execute(sqlx::raw_sql(AssertSqlSafe(set))).await?;
    Ok(())
}

/// Returns none for a statement that its time limit ended.
pub(crate) fn in_time<T>(answer: Result<T, sqlx::Error>) -> Result<Option<T>, InboxError> {
    let is_late = |error: &sqlx::Error| {
        answered(error).is_some_and(|answer| answer.sqlstate == sqlstate::QUERY_CANCELED)
    };
    match answer {
        Ok(answer) => Ok(Some(answer)),
        Err(error) if is_late(&error) => Ok(None),
        Err(error) => Err(error.into()),
    }
}
