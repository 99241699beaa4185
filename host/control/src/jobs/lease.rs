//! The lease of a job: at most one host works on it, and another goes on where that one ended.

use std::{collections::BTreeMap, time::Duration};

use chrono::{DateTime, Utc};
use oncebox_model::{error::InboxError, hooks};
use serde_json::Value;
use sqlx::types::Json;

use super::{JobAction, filter::JobFilter, page::JobCursor};
use crate::{consumers::Consumer, database::tenant_database::TenantDatabase, handles::Jobs};

/// Length of a lease. Each page renews it.
pub(super) const LEASE: Duration = Duration::from_secs(30);
/// Pause before a page that failed is tried again.
pub(super) const AGAIN: Duration = Duration::from_secs(5);
/// Hosts that may end while they have a job, without a page in between. Then it is paused.
const CRASHES_MAX: i32 = 3;

/// A job that this process has leased.
pub struct LeasedJob {
    /// Key.
    pub job_id: i64,
    /// Name of the tenant.
    pub tenant: String,
    pub(super) tenant_id: i32,
    /// None for outgoing messages of every consumer.
    pub(super) consumer: Option<Consumer>,
    pub(super) action: JobAction,
    pub(super) filter: JobFilter,
    /// Versions that the filter's digest names, where it has one.
    pub(super) versions: Option<Vec<i32>>,
    pub(super) as_of: DateTime<Utc>,
    pub(super) rate: Option<u32>,
    pub(super) actor: String,
    pub(super) reason: String,
    pub(super) database: TenantDatabase,
    pub(super) epoch: i64,
    pub(super) step: i64,
    pub(super) pass: i32,
    pub(super) cursor: JobCursor,
    pub(super) changed: i64,
    pub(super) changed_in_pass: i64,
    pub(super) left_out: BTreeMap<String, i64>,
}

/// The jobs of a tenant that are not over.
#[derive(Debug, Clone, PartialEq, sqlx::FromRow)]
pub struct OpenJobs {
    /// Name of the tenant.
    pub tenant: String,
    /// Number of jobs that hosts work on, or will.
    pub running: i64,
    /// Number of jobs that an operator or hosts paused.
    pub paused: i64,
    /// Longest time for which no host has worked on one of them, seconds. Those that an operator
    /// paused do not count.
    pub idle_s: f64,
    /// Whether one of them waits for a host.
    pub is_waiting: bool,
}

/// The end of this process's work on a job that is not over.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum JobLeft {
    /// Another process, or this one, goes on after this pause.
    Until(Duration),
    /// It cannot go on, for this reason, until an operator resumes it.
    Paused(String),
    /// A page failed, with this text. It is tried again, and paused like one that ends hosts.
    Failed(String),
}

#[derive(sqlx::FromRow)]
struct LeasedRow {
    job_id: i64,
    tenant_id: i32,
    tenant: String,
    consumer_id: Option<i32>,
    action: String,
    state: String,
    filter: Value,
    as_of: DateTime<Utc>,
    rate: Option<i32>,
    actor: String,
    reason: String,
    epoch: i64,
    step: i64,
    pass: i32,
    cursor: Json<JobCursor>,
    changed: i64,
    changed_in_pass: i64,
    left_out: Json<BTreeMap<String, i64>>,
    note: Option<String>,
}

impl Jobs<'_> {
    /// Counts the jobs of a database that are not over, by tenant. Reads those jobs alone.
    ///
    /// # Errors
    /// An error of the database.
    pub async fn open(&self, database: &TenantDatabase) -> Result<Vec<OpenJobs>, InboxError> {
        // Hosts pause a job after three leases without a page, so that the last lease tells since
        // when it has not gone on. A start and a resume set `due_at`.
        const OPEN: &str = "SELECT t.name AS tenant, \
                count(*) FILTER (WHERE j.state = 'running') AS running, \
                count(*) FILTER (WHERE j.state = 'paused') AS paused, \
                coalesce(extract(epoch FROM max(now() - greatest(j.leased_at, j.due_at)) \
                    FILTER (WHERE j.state = 'running' OR j.note IS NOT NULL)), 0)::float8 AS idle_s, \
                bool_or(j.state = 'running' AND j.due_at <= now() \
                    AND (j.locked_until IS NULL OR j.locked_until < now())) AS is_waiting \
            FROM oncebox.job j JOIN oncebox.tenant t USING (tenant_id) \
            WHERE j.state IN ('running', 'paused') GROUP BY t.name";
        Ok(sqlx::query_as(OPEN).fetch_all(&database.pool).await?)
    }

    /// Leases a job of a database that waits, or this one, if it waits: of the tenant whose jobs
    /// have not been worked on for the longest. One that ended hosts again and again is paused
    /// instead.
    ///
    /// # Errors
    /// An error of a database.
    pub async fn lease(
        &self,
        database: &TenantDatabase,
        owner: &str,
        job_id: Option<i64>,
    ) -> Result<Option<LeasedJob>, InboxError> {
        // A lease that ran out is that of a host that ended, since a host gives its lease back.
        const TAKE: &str = "UPDATE oncebox.job j SET epoch = j.epoch + 1, leased_at = now(), \
                crashes = l.crashes, \
                state = CASE WHEN l.crashes < $3 THEN j.state ELSE 'paused' END, \
                note = CASE WHEN l.crashes < $3 THEN NULL \
                    ELSE format('%s hosts ended while they had it, all at one page', l.crashes) \
                    END, \
                locked_by = CASE WHEN l.crashes < $3 THEN $1 END, \
                locked_until = CASE WHEN l.crashes < $3 \
                    THEN now() + $2 * interval '1 millisecond' END \
            FROM (SELECT w.job_id, w.crashes + (w.locked_by IS NOT NULL)::int AS crashes \
                FROM oncebox.job w WHERE w.state = 'running' \
                  AND w.due_at <= now() AND (w.locked_until IS NULL OR w.locked_until < now()) \
                  AND ($4::bigint IS NULL OR w.job_id = $4) \
                ORDER BY (SELECT max(o.leased_at) FROM oncebox.job o \
                        WHERE o.tenant_id = w.tenant_id AND o.state = 'running') NULLS FIRST, \
                    w.leased_at NULLS FIRST, w.job_id \
                LIMIT 1 FOR UPDATE OF w SKIP LOCKED) l, \
                oncebox.tenant t \
            WHERE j.job_id = l.job_id AND t.tenant_id = j.tenant_id \
            RETURNING j.job_id, t.tenant_id, t.name AS tenant, j.consumer_id, j.action, j.state, j.filter, \
                j.as_of, j.rate, j.actor, j.reason, j.epoch, j.step, j.pass, j.cursor, j.changed, \
                j.changed_in_pass, j.left_out, j.note";
        let query = sqlx::query_as(TAKE)
            .bind(owner)
            .bind(LEASE.as_millis() as i64)
            .bind(CRASHES_MAX)
            .bind(job_id);
        let row: Option<LeasedRow> = query.fetch_optional(&database.pool).await?;
        let Some(row) = row else { return Ok(None) };
        if row.state == "paused" {
            let note = row.note.as_deref().unwrap_or_default();
            tracing::error!(job = row.job_id, tenant = row.tenant, note, "job paused");
            return Ok(None);
        }
        hooks::point("job:lease:after");
        let (job_id, epoch) = (row.job_id, row.epoch);
        match self.leased(database, row).await {
            Ok(job) => Ok(Some(job)),
            Err(error) => {
                tracing::warn!(job = job_id, %error, "a job cannot be worked on");
                leave(database, (job_id, epoch), &JobLeft::of_error(&error)).await?;
                Ok(None)
            }
        }
    }

    async fn leased(
        &self,
        database: &TenantDatabase,
        row: LeasedRow,
    ) -> Result<LeasedJob, InboxError> {
        let consumer = match row.consumer_id {
            Some(consumer_id) => {
                let consumer = self.0.consumers().by_id(consumer_id).await?;
                let gone = || InboxError::NotFound("the consumer of this job is gone".to_owned());
                Some(consumer.ok_or_else(gone)?)
            }
            None => None,
        };
        let of_another_release = || {
            InboxError::Invalid(
                "this release does not know its action or its filter; use the one that started it"
                    .to_owned(),
            )
        };
        let action = JobAction::named(&row.action).ok_or_else(of_another_release)?;
        let filter: JobFilter =
            serde_json::from_value(row.filter).map_err(|_| of_another_release())?;
        Ok(LeasedJob {
            job_id: row.job_id,
            tenant: row.tenant,
            versions: self.0.messages().versions_like(filter.version.as_deref()).await?,
            tenant_id: row.tenant_id,
            consumer,
            action,
            filter,
            as_of: row.as_of,
            rate: row.rate.and_then(|rate| u32::try_from(rate).ok()),
            actor: row.actor,
            reason: row.reason,
            database: database.clone(),
            epoch: row.epoch,
            step: row.step,
            pass: row.pass,
            cursor: row.cursor.0,
            changed: row.changed,
            changed_in_pass: row.changed_in_pass,
            left_out: row.left_out.0,
        })
    }

    /// Gives the lease of a job back that is not over.
    ///
    /// # Errors
    /// An error of the database.
    pub async fn leave(&self, job: &LeasedJob, left: &JobLeft) -> Result<(), InboxError> {
        leave(&job.database, (job.job_id, job.epoch), left).await
    }
}

async fn leave(
    database: &TenantDatabase,
    (job_id, epoch): (i64, i64),
    left: &JobLeft,
) -> Result<(), InboxError> {
    const LEAVE: &str = "UPDATE oncebox.job SET crashes = crashes + $3, note = $4, \
        state = CASE WHEN crashes + $3 < $5 THEN state ELSE 'paused' END, \
        due_at = now() + $6 * interval '1 millisecond', locked_until = NULL, locked_by = NULL \
        WHERE job_id = $1 AND epoch = $2 AND state = 'running'";
    let (failures, note, pause) = match left {
        JobLeft::Until(pause) => (0, None, *pause),
        JobLeft::Failed(why) => (1, Some(why), AGAIN),
        JobLeft::Paused(why) => (CRASHES_MAX, Some(why), Duration::ZERO),
    };
    let query = sqlx::query(LEAVE)
        .bind(job_id)
        .bind(epoch)
        .bind(failures)
        .bind(note)
        .bind(CRASHES_MAX)
        .bind(pause.as_millis() as i64);
    query.execute(&database.pool).await?;
    Ok(())
}

impl JobLeft {
    /// Returns what becomes of a job after an error.
    pub(super) fn of_error(error: &InboxError) -> Self {
        match error {
            InboxError::Invalid(_) | InboxError::NotFound(_) => Self::Paused(error.to_string()),
            error => Self::Failed(error.to_string()),
        }
    }
}
