//! Jobs: actions of an operator on every message that a filter selects, which hosts carry out.

use std::collections::BTreeMap;

use axum::Json;
use chrono::{DateTime, Utc};
use oncebox_control::{JobAction, JobControl, JobFilter, NewJob};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::{
    auth::Caller,
    consumer_changes::NothingMore,
    error::ApiError,
    extract::{Json as Body, Path, Query},
};

/// The messages that a job selects. A member that is absent does not restrict them.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields, default)]
#[schema(as = JobFilter)]
pub struct JobFilterBody {
    /// Status.
    pub status: Option<String>,
    /// Reason of the status, with any details after a colon. Only of an inbox.
    pub reason: Option<String>,
    /// Event type. Only of an inbox.
    pub event_type: Option<String>,
    /// Ordering key; bytes that are not text as `0x` and hexadecimal digits. Only of an inbox.
    pub key: Option<String>,
    /// Text within the last error, regardless of case. Only of an inbox.
    pub error: Option<String>,
    /// First digits of the digest of the version that ran the message last. Only of an inbox.
    pub version: Option<String>,
    /// Earliest time of receipt. Only of an inbox.
    pub since: Option<DateTime<Utc>>,
    /// Time before which the message was received. Only of an inbox.
    pub until: Option<DateTime<Utc>>,
    /// Whole destination, such as `kafka:orders`. Only of outgoing messages.
    pub destination: Option<String>,
    /// Id of the message that caused them. Only of outgoing messages.
    pub cause: Option<String>,
    /// Ids, at most 1,000.
    pub ids: Option<Vec<String>>,
}

impl From<JobFilterBody> for JobFilter {
    fn from(body: JobFilterBody) -> Self {
        let JobFilterBody { status, reason, event_type, key, error, version, .. } = body;
        let JobFilterBody { since, until, destination, cause, ids, .. } = body;
        Self {
            status,
            reason,
            event_type,
            key,
            error,
            version,
            since,
            until,
            destination,
            cause,
            ids,
        }
    }
}

impl From<JobFilter> for JobFilterBody {
    fn from(filter: JobFilter) -> Self {
        let JobFilter { status, reason, event_type, key, error, version, .. } = filter;
        let JobFilter { since, until, destination, cause, ids, .. } = filter;
        Self {
            status,
            reason,
            event_type,
            key,
            error,
            version,
            since,
            until,
            destination,
            cause,
            ids,
        }
    }
}

/// A job to start, or to estimate.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(as = NewJob)]
pub struct NewJobBody {
    /// Action: `redrive`, `retry` or `discard` messages of an inbox, `outgoing_redrive` or
    /// `outgoing_discard` outgoing messages.
    pub action: String,
    /// Consumer. Absent only for outgoing messages, for those of every consumer.
    #[serde(default)]
    pub consumer: Option<String>,
    /// Messages to act on; by default all that the action can be done with.
    #[serde(default)]
    pub filter: JobFilterBody,
    /// Reason, 1 to 1,000 characters, kept with each message of an inbox and in the audit log.
    pub reason: String,
    /// Largest number of messages per second, 1 to 100,000. By default there is no limit.
    #[serde(default)]
    pub rate: Option<u32>,
}

/// The number of messages that a job would change.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
#[schema(as = JobEstimate)]
pub struct JobEstimateBody {
    /// Number of messages that were counted, within two seconds and up to 100,000.
    pub messages: i64,
    /// Whether the count looked at all messages; else there are at least as many.
    pub is_counted_whole: bool,
}

/// A job.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
#[schema(as = Job)]
pub struct JobBody {
    /// Id.
    pub job_id: i64,
    /// Tenant.
    pub tenant: String,
    /// Consumer. Null for outgoing messages of every consumer.
    pub consumer: Option<String>,
    /// Action: `redrive`, `retry`, `discard`, `outgoing_redrive` or `outgoing_discard`.
    pub action: String,
    /// State: `running`, `paused`, `done` or `cancelled`.
    pub state: String,
    /// Messages that it selects. A list shows it without the ids.
    pub filter: JobFilterBody,
    /// Number of ids in the filter. Null where it has none.
    pub ids: Option<i64>,
    /// Time by which a message must have been received, or have become a dead letter: that of the
    /// start. A message that fails again while the job runs is left alone.
    pub as_of: DateTime<Utc>,
    /// Largest number of messages per second. Null for no limit.
    pub rate: Option<i32>,
    /// Actor who started it.
    pub actor: String,
    /// Reason for the start.
    pub reason: String,
    /// Number of messages that were counted before the start.
    pub estimate: i64,
    /// Whether that count looked at all messages; else there were at least as many.
    pub is_counted_whole: bool,
    /// Time of the start.
    pub began_at: DateTime<Utc>,
    /// Time of the end. Null before it.
    pub ended_at: Option<DateTime<Utc>>,
    /// Number of messages that it changed.
    pub changed: i64,
    /// Number of messages that the last pass left out, by reason: `undecodable`, `no_record`,
    /// `unordered` (a second payload under an id that is in order) and `busy` (a host runs it or one
    /// of its key, or someone else acts on it).
    pub left_out: BTreeMap<String, i64>,
    /// Number of the pass over the messages, from 1. Passes repeat until one finds nothing to do.
    pub pass: i32,
    /// Reason for which hosts paused it, or the text of a page that failed and is tried again.
    pub note: Option<String>,
    /// Host that works on it. Null where none does.
    pub host: Option<String>,
}

impl From<oncebox_control::Job> for JobBody {
    fn from(job: oncebox_control::Job) -> Self {
        Self {
            job_id: job.job_id,
            tenant: job.tenant,
            consumer: job.consumer,
            action: job.action,
            state: job.state,
            filter: job.filter.0.into(),
            ids: job.ids,
            as_of: job.as_of,
            rate: job.rate,
            actor: job.actor,
            reason: job.reason,
            estimate: job.estimate,
            is_counted_whole: job.is_counted_whole,
            began_at: job.began_at,
            ended_at: job.ended_at,
            changed: job.changed,
            left_out: job.left_out.0,
            pass: job.pass,
            note: job.note,
            host: job.host,
        }
    }
}

/// Checks the reason that a change of messages must give.
pub(crate) fn check_reason(reason: &str) -> Result<(), ApiError> {
    match reason.trim().is_empty() || reason.chars().count() > 1_000 {
        true => Err(ApiError::invalid("`reason` must say why, in 1 to 1,000 characters")),
        false => Ok(()),
    }
}

fn new_job(body: NewJobBody) -> Result<NewJob, ApiError> {
    let NewJobBody { action, consumer, filter, reason, rate } = body;
    check_reason(&reason)?;
    let action = JobAction::named(&action).ok_or_else(|| {
        let names = JobAction::ALL.map(JobAction::name).join(", ");
        ApiError::invalid(format!("`action` is `{action}`; use {names}"))
    })?;
    Ok(NewJob { action, consumer, filter: filter.into(), reason, rate })
}

/// Start a job
///
/// `redrive` runs dead letters again, under their ids, with their headers and a new budget of runs;
/// with order by key they wait for earlier messages of their key. `retry` makes messages due now
/// that wait for their next attempt. `discard` excludes messages that did not complete from any run;
/// their rows stay, and messages that wait behind them follow. `outgoing_redrive` sends parked
/// outgoing messages, and those that wait for their next attempt, now. `outgoing_discard` excludes
/// messages that no host is sending from being sent.
///
/// Hosts carry the job out; it goes on whatever becomes of the caller, or of a host. Each message is
/// acted on once, however many jobs select it.
#[utoipa::path(post, path = "/v1/tenants/{tenant}/jobs", tag = "jobs",
    params(("tenant" = String, Path)), request_body = NewJobBody,
    responses((status = 200, body = JobBody)), extensions(("x-role" = json!("operator"))))]
pub(crate) async fn start(
    caller: Caller,
    Path(tenant): Path<String>,
    Body(new): Body<NewJobBody>,
) -> Result<Json<JobBody>, ApiError> {
    Ok(Json(caller.control.jobs().start(&tenant, &new_job(new)?).await?.into()))
}

/// Count the messages that a job would change
///
/// Changes nothing.
#[utoipa::path(post, path = "/v1/tenants/{tenant}/jobs/estimate", tag = "jobs",
    params(("tenant" = String, Path)), request_body = NewJobBody,
    responses((status = 200, body = JobEstimateBody)),
    extensions(("x-role" = json!("operator"))))]
pub(crate) async fn estimate(
    caller: Caller,
    Path(tenant): Path<String>,
    Body(new): Body<NewJobBody>,
) -> Result<Json<JobEstimateBody>, ApiError> {
    let oncebox_control::JobEstimate { messages, is_counted_whole } =
        caller.control.jobs().estimate(&tenant, &new_job(new)?).await?;
    Ok(Json(JobEstimateBody { messages, is_counted_whole }))
}

/// List jobs, newest first
#[utoipa::path(get, path = "/v1/tenants/{tenant}/jobs", tag = "jobs",
    params(("tenant" = String, Path),
        ("consumer" = Option<String>, Query, description = "Only jobs on this consumer")),
    responses((status = 200, body = Vec<JobBody>)), extensions(("x-role" = json!("viewer"))))]
pub(crate) async fn list(
    caller: Caller,
    Path(tenant): Path<String>,
    mut query: Query,
) -> Result<Json<Vec<JobBody>>, ApiError> {
    let consumer = query.text("consumer")?;
    query.end()?;
    let jobs = caller.control.jobs().list(&tenant, consumer.as_deref()).await?;
    Ok(Json(jobs.into_iter().map(Into::into).collect()))
}

/// Show a job
#[utoipa::path(get, path = "/v1/tenants/{tenant}/jobs/{job_id}", tag = "jobs",
    params(("tenant" = String, Path), ("job_id" = i64, Path)),
    responses((status = 200, body = JobBody)), extensions(("x-role" = json!("viewer"))))]
pub(crate) async fn show(
    caller: Caller,
    Path((tenant, job_id)): Path<(String, i64)>,
) -> Result<Json<JobBody>, ApiError> {
    Ok(Json(caller.control.jobs().show(&tenant, job_id).await?.into()))
}

/// Pause a job
///
/// The page under way is finished.
#[utoipa::path(post, path = "/v1/tenants/{tenant}/jobs/{job_id}/pause", tag = "jobs",
    params(("tenant" = String, Path), ("job_id" = i64, Path)), request_body = NothingMore,
    responses((status = 200, body = JobBody)), extensions(("x-role" = json!("operator"))))]
pub(crate) async fn pause(
    caller: Caller,
    Path(path): Path<(String, i64)>,
    Body(NothingMore {}): Body<NothingMore>,
) -> Result<Json<JobBody>, ApiError> {
    act(&caller, path, JobControl::Pause).await
}

/// Resume a paused job
#[utoipa::path(post, path = "/v1/tenants/{tenant}/jobs/{job_id}/resume", tag = "jobs",
    params(("tenant" = String, Path), ("job_id" = i64, Path)), request_body = NothingMore,
    responses((status = 200, body = JobBody)), extensions(("x-role" = json!("operator"))))]
pub(crate) async fn resume(
    caller: Caller,
    Path(path): Path<(String, i64)>,
    Body(NothingMore {}): Body<NothingMore>,
) -> Result<Json<JobBody>, ApiError> {
    act(&caller, path, JobControl::Resume).await
}

/// Cancel a job
///
/// It ends where it is; what it changed stays.
#[utoipa::path(post, path = "/v1/tenants/{tenant}/jobs/{job_id}/cancel", tag = "jobs",
    params(("tenant" = String, Path), ("job_id" = i64, Path)), request_body = NothingMore,
    responses((status = 200, body = JobBody)), extensions(("x-role" = json!("operator"))))]
pub(crate) async fn cancel(
    caller: Caller,
    Path(path): Path<(String, i64)>,
    Body(NothingMore {}): Body<NothingMore>,
) -> Result<Json<JobBody>, ApiError> {
    act(&caller, path, JobControl::Cancel).await
}

async fn act(
    caller: &Caller,
    (tenant, job_id): (String, i64),
    action: JobControl,
) -> Result<Json<JobBody>, ApiError> {
    Ok(Json(caller.control.jobs().act(&tenant, job_id, action).await?.into()))
}
