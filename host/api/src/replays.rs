//! Replays of completed messages: a plan first, then the start with its token.

use axum::Json;
use chrono::{DateTime, Utc};
use oncebox_control::{ReplayAction, ReplayFilter, ReplayStart};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::{
    auth::Caller,
    consumer_changes::NothingMore,
    error::ApiError,
    extract::{Json as Body, Path, Query},
    jobs::check_reason,
};

/// The completed messages that a replay selects. A member that is absent does not restrict them.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields, default)]
#[schema(as = ReplayFilter)]
pub struct ReplayFilterBody {
    /// Event type.
    pub event_type: Option<String>,
    /// Earliest time of completion.
    pub from: Option<DateTime<Utc>>,
    /// Time before which they completed; by default that of the plan, and never a later one.
    pub to: Option<DateTime<Utc>>,
    /// Ids, at most 1,000.
    pub ids: Option<Vec<String>>,
}

impl From<ReplayFilterBody> for ReplayFilter {
    fn from(ReplayFilterBody { event_type, from, to, ids }: ReplayFilterBody) -> Self {
        Self { event_type, from, to, ids }
    }
}

impl From<ReplayFilter> for ReplayFilterBody {
    fn from(ReplayFilter { event_type, from, to, ids }: ReplayFilter) -> Self {
        Self { event_type, from, to, ids }
    }
}

/// A request for a plan.
#[derive(Debug, Clone, Default, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct NewReplayPlan {
    /// Messages to replay.
    #[serde(default)]
    pub filter: ReplayFilterBody,
}

/// A plan of a replay. Nothing runs before it is started with the token.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
#[schema(as = ReplayPlan)]
pub struct ReplayPlanBody {
    /// Id of the replay.
    pub replay_id: i64,
    /// Token that starts it. It is shown here alone.
    pub token: String,
    /// Time after which the token starts nothing: 15 minutes after the plan.
    pub expires_at: DateTime<Utc>,
    /// The policy's `replay.kind`, which says what the start asks for.
    pub kind: String,
    /// The policy's `replay.emit`.
    pub emit: String,
    /// Number of messages that would run.
    pub found: i64,
    /// Number of messages that cannot run, since no payload of them is stored.
    pub without_payload: i64,
    /// Whether the count looked at all messages; else there are at least as many.
    pub is_counted_whole: bool,
    /// Time before which a message must have completed.
    pub until: DateTime<Utc>,
    /// Number of messages, from the first on, whose outgoing messages were looked up.
    pub sampled: i64,
    /// Number of those that caused outgoing messages, as far as these are kept.
    pub sampled_emitting: i64,
    /// Number of outgoing messages that those caused. A replay emits them again and sends none.
    pub sampled_outgoing: i64,
}

/// The start of a planned replay.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct NewReplay {
    /// Token of the plan.
    pub token: String,
    /// Reason, 1 to 1,000 characters, kept with each replayed message and in the audit log.
    pub reason: String,
    /// Kind `audit`: the number of messages that the plan found, confirmed.
    #[serde(default)]
    pub confirm: Option<i64>,
    /// Kind `analytics`: that the derived tables were reset.
    #[serde(default)]
    pub reset_done: bool,
    /// Kinds `notification` and `workflow`: that the caller knows that nothing is sent.
    #[serde(default)]
    pub effects_suppressed: bool,
}

/// A replay.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
#[schema(as = Replay)]
pub struct ReplayBody {
    /// Id.
    pub replay_id: i64,
    /// Tenant.
    pub tenant: String,
    /// Consumer.
    pub consumer: String,
    /// State: `planned`, `running`, `paused`, `done` or `cancelled`.
    pub state: String,
    /// The policy's `replay.kind` at the plan.
    pub kind: String,
    /// The policy's `replay.emit` at the plan.
    pub emit: String,
    /// Messages that it selects.
    pub filter: ReplayFilterBody,
    /// Time before which a message must have completed.
    pub until: DateTime<Utc>,
    /// Time of the plan.
    pub planned_at: DateTime<Utc>,
    /// Actor of the plan.
    pub planned_by: String,
    /// Actor of the start. Null before it.
    pub actor: Option<String>,
    /// Reason for the start. Null before it.
    pub reason: Option<String>,
    /// Time of the start. Null before it.
    pub began_at: Option<DateTime<Utc>>,
    /// Time of the end. Null before it.
    pub ended_at: Option<DateTime<Utc>>,
    /// Completion time of the message that it came to last. Null before the first.
    pub cursor_at: Option<DateTime<Utc>>,
    /// Number of messages that the plan found.
    pub found: i64,
    /// Whether the plan counted all of them; else there are at least as many.
    pub is_counted_whole: bool,
    /// Number of messages that ran.
    pub replayed: i64,
    /// Number of messages that failed and were rolled back; they stay completed.
    pub failed: i64,
    /// Number of messages without a stored payload.
    pub without_payload: i64,
    /// Number of messages that were not as they were planned: removed or erased since.
    pub changed: i64,
    /// Number of outgoing messages that were not sent.
    pub suppressed: i64,
    /// Generation of the consumer's deployments at the plan.
    pub generation: i64,
    /// Generation that ran the last message: another one where deployments changed meanwhile. Null
    /// before the first.
    pub generation_last: Option<i64>,
    /// Reason for which hosts paused it. Null where they did not.
    pub note: Option<String>,
    /// Host that works on it. Null where none does.
    pub host: Option<String>,
}

impl From<oncebox_control::ReplayJob> for ReplayBody {
    fn from(job: oncebox_control::ReplayJob) -> Self {
        Self {
            replay_id: job.replay_id,
            tenant: job.tenant,
            consumer: job.consumer,
            state: job.state,
            kind: job.kind,
            emit: job.emit,
            filter: job.filter.0.into(),
            until: job.until_at,
            planned_at: job.planned_at,
            planned_by: job.planned_by,
            actor: job.actor,
            reason: job.reason,
            began_at: job.began_at,
            ended_at: job.ended_at,
            cursor_at: job.cursor_at,
            found: job.found,
            is_counted_whole: job.is_counted_whole,
            replayed: job.replayed,
            failed: job.failed,
            without_payload: job.without_payload,
            changed: job.changed,
            suppressed: job.suppressed,
            generation: job.generation,
            generation_last: job.generation_last,
            note: job.note,
            host: job.host,
        }
    }
}

/// A message of a replay that failed.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
#[schema(as = ReplayFailure)]
pub struct ReplayFailureBody {
    /// Id of the message.
    pub message_id: String,
    /// Time of the failure.
    pub at: DateTime<Utc>,
    /// Kind of the failure.
    pub reason: String,
    /// Text of the failure. Null where the message was erased.
    pub error: Option<String>,
}

/// A replay with the first hundred of its failures.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
#[schema(as = ReplayDetail)]
pub struct ReplayDetailBody {
    /// The replay.
    #[serde(flatten)]
    pub replay: ReplayBody,
    /// Its first failures.
    pub failures: Vec<ReplayFailureBody>,
}

/// Plan a replay of completed messages
///
/// Counts the messages for at most 8 seconds, and answers with a token that starts this plan. The
/// token is valid for 15 minutes, and while policy and deployments of the consumer stay as they
/// are.
#[utoipa::path(post, path = "/v1/tenants/{tenant}/consumers/{consumer}/replays/plan",
    tag = "replays", params(("tenant" = String, Path), ("consumer" = String, Path)),
    request_body = NewReplayPlan, responses((status = 200, body = ReplayPlanBody)),
    extensions(("x-role" = json!("operator"))))]
pub(crate) async fn plan(
    caller: Caller,
    Path((tenant, consumer)): Path<(String, String)>,
    Body(new): Body<NewReplayPlan>,
) -> Result<Json<ReplayPlanBody>, ApiError> {
    let plan = caller.control.replays().plan(&tenant, &consumer, &new.filter.into()).await?;
    Ok(Json(ReplayPlanBody {
        replay_id: plan.replay_id,
        token: plan.token,
        expires_at: plan.expires_at,
        kind: plan.kind.name().to_owned(),
        emit: plan.emit.name().to_owned(),
        found: plan.found,
        without_payload: plan.without_payload,
        is_counted_whole: plan.is_counted_whole,
        until: plan.until,
        sampled: plan.sampled,
        sampled_emitting: plan.sampled_emitting,
        sampled_outgoing: plan.sampled_outgoing,
    }))
}

/// Start a planned replay
///
/// Hosts replay the messages one after the other, behind live messages. Nothing that a replayed run
/// emits is sent. The policy's `replay.kind` says what else the request has to hold.
#[utoipa::path(post, path = "/v1/tenants/{tenant}/consumers/{consumer}/replays",
    tag = "replays", params(("tenant" = String, Path), ("consumer" = String, Path)),
    request_body = NewReplay, responses((status = 200, body = ReplayBody)),
    extensions(("x-role" = json!("operator"))))]
pub(crate) async fn start(
    caller: Caller,
    Path((tenant, consumer)): Path<(String, String)>,
    Body(new): Body<NewReplay>,
) -> Result<Json<ReplayBody>, ApiError> {
    let NewReplay { token, reason, confirm, reset_done, effects_suppressed } = new;
    check_reason(&reason)?;
    let start = ReplayStart { token, reason, confirm, reset_done, effects_suppressed };
    Ok(Json(caller.control.replays().start(&tenant, &consumer, &start).await?.into()))
}

/// List replays, newest first
#[utoipa::path(get, path = "/v1/tenants/{tenant}/replays", tag = "replays",
    params(("tenant" = String, Path),
        ("consumer" = Option<String>, Query, description = "Only replays of this consumer")),
    responses((status = 200, body = Vec<ReplayBody>)),
    extensions(("x-role" = json!("viewer"))))]
pub(crate) async fn list(
    caller: Caller,
    Path(tenant): Path<String>,
    mut query: Query,
) -> Result<Json<Vec<ReplayBody>>, ApiError> {
    let consumer = query.text("consumer")?;
    query.end()?;
    let jobs = caller.control.replays().list(&tenant, consumer.as_deref()).await?;
    Ok(Json(jobs.into_iter().map(Into::into).collect()))
}

/// Show a replay with its first failures
#[utoipa::path(get, path = "/v1/tenants/{tenant}/consumers/{consumer}/replays/{replay_id}",
    tag = "replays",
    params(("tenant" = String, Path), ("consumer" = String, Path), ("replay_id" = i64, Path)),
    responses((status = 200, body = ReplayDetailBody)),
    extensions(("x-role" = json!("viewer"))))]
pub(crate) async fn show(
    caller: Caller,
    Path((tenant, consumer, replay_id)): Path<(String, String, i64)>,
) -> Result<Json<ReplayDetailBody>, ApiError> {
    let detail = caller.control.replays().show(&tenant, &consumer, replay_id).await?;
    let failure = |failure: oncebox_control::ReplayFailure| ReplayFailureBody {
        message_id: failure.message_id,
        at: failure.at,
        reason: failure.reason,
        error: failure.error,
    };
    Ok(Json(ReplayDetailBody {
        replay: detail.job.into(),
        failures: detail.failures.into_iter().map(failure).collect(),
    }))
}

/// Pause a replay
///
/// A message that runs is rolled back where its run ends after this.
#[utoipa::path(post,
    path = "/v1/tenants/{tenant}/consumers/{consumer}/replays/{replay_id}/pause",
    tag = "replays",
    params(("tenant" = String, Path), ("consumer" = String, Path), ("replay_id" = i64, Path)),
    request_body = NothingMore, responses((status = 200, body = ReplayBody)),
    extensions(("x-role" = json!("operator"))))]
pub(crate) async fn pause(
    caller: Caller,
    Path(path): Path<(String, String, i64)>,
    Body(NothingMore {}): Body<NothingMore>,
) -> Result<Json<ReplayBody>, ApiError> {
    act(&caller, path, ReplayAction::Pause).await
}

/// Resume a paused replay
#[utoipa::path(post,
    path = "/v1/tenants/{tenant}/consumers/{consumer}/replays/{replay_id}/resume",
    tag = "replays",
    params(("tenant" = String, Path), ("consumer" = String, Path), ("replay_id" = i64, Path)),
    request_body = NothingMore, responses((status = 200, body = ReplayBody)),
    extensions(("x-role" = json!("operator"))))]
pub(crate) async fn resume(
    caller: Caller,
    Path(path): Path<(String, String, i64)>,
    Body(NothingMore {}): Body<NothingMore>,
) -> Result<Json<ReplayBody>, ApiError> {
    act(&caller, path, ReplayAction::Resume).await
}

/// Cancel a replay
///
/// It ends where it is; the effects of the messages that ran stay.
#[utoipa::path(post,
    path = "/v1/tenants/{tenant}/consumers/{consumer}/replays/{replay_id}/cancel",
    tag = "replays",
    params(("tenant" = String, Path), ("consumer" = String, Path), ("replay_id" = i64, Path)),
    request_body = NothingMore, responses((status = 200, body = ReplayBody)),
    extensions(("x-role" = json!("operator"))))]
pub(crate) async fn cancel(
    caller: Caller,
    Path(path): Path<(String, String, i64)>,
    Body(NothingMore {}): Body<NothingMore>,
) -> Result<Json<ReplayBody>, ApiError> {
    act(&caller, path, ReplayAction::Cancel).await
}

async fn act(
    caller: &Caller,
    (tenant, consumer, replay_id): (String, String, i64),
    action: ReplayAction,
) -> Result<Json<ReplayBody>, ApiError> {
    let job = caller.control.replays().act(&tenant, &consumer, replay_id, action).await?;
    Ok(Json(job.into()))
}
