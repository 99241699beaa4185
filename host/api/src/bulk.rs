//! Actions of an operator on many messages of an inbox.

use axum::Json;
use chrono::{DateTime, Utc};
use oncebox_control::{Action, Filter};
use oncebox_model::MessageStatus;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::{
    auth::Caller,
    error::ApiError,
    extract::{Json as Body, Path},
    inbox::{InboxFilter, keys},
};

/// An action on messages, with its reason.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(as = BulkAction)]
pub struct BulkActionBody {
    /// Reason, 1 to 1,000 characters, kept with each message and in the audit log.
    pub reason: String,
    /// Filter of the messages.
    #[serde(default)]
    pub filter: InboxFilter,
    /// Ids of the messages, at most 1,000; empty for all that the filter finds.
    #[serde(default)]
    pub message_ids: Vec<String>,
    /// Time at which a message must have been in the inbox, or a dead letter, already. A request
    /// that is repeated until nothing is left carries the value of the first answer. By default the
    /// present.
    #[serde(default)]
    pub as_of: Option<DateTime<Utc>>,
    /// Largest number of messages of this request; 0 only counts, and changes nothing. By default
    /// 1,000, which is the maximum.
    #[serde(default = "bulk_limit")]
    pub limit: u32,
}

/// Largest number of messages of a request.
const BULK_MAX: u32 = 1_000;

fn bulk_limit() -> u32 {
    BULK_MAX
}

/// The result of an action on messages.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
#[schema(as = BulkResult)]
pub struct BulkResultBody {
    /// Number of changed messages.
    pub changed: i64,
    /// Number of messages that are still to be changed, counted up to 100,000. Hosts may be running
    /// some of them.
    pub left: i64,
    /// `as_of` of the next request.
    pub as_of: DateTime<Utc>,
}

/// Run dead letters again
///
/// They keep their ids, headers and attempts, and get a new budget of runs. With order by key they
/// wait for earlier messages of their key. A repeated request runs them once. A message whose
/// record the policy did not keep, or that was never decoded, cannot run again.
#[utoipa::path(post, path = "/v1/tenants/{tenant}/consumers/{consumer}/redrive", tag = "inbox",
    params(("tenant" = String, Path), ("consumer" = String, Path)), request_body = BulkActionBody,
    responses((status = 200, body = BulkResultBody)), extensions(("x-role" = json!("operator"))))]
pub(crate) async fn redrive(
    caller: Caller,
    Path((tenant, consumer)): Path<(String, String)>,
    Body(bulk): Body<BulkActionBody>,
) -> Result<Json<BulkResultBody>, ApiError> {
    apply(&caller, &tenant, &consumer, Action::Redrive, bulk).await
}

/// Discard messages
///
/// A discarded message never runs, and its row stays. Messages of its key that wait behind it are
/// due.
#[utoipa::path(post, path = "/v1/tenants/{tenant}/consumers/{consumer}/discard", tag = "inbox",
    params(("tenant" = String, Path), ("consumer" = String, Path)), request_body = BulkActionBody,
    responses((status = 200, body = BulkResultBody)), extensions(("x-role" = json!("operator"))))]
pub(crate) async fn discard(
    caller: Caller,
    Path((tenant, consumer)): Path<(String, String)>,
    Body(bulk): Body<BulkActionBody>,
) -> Result<Json<BulkResultBody>, ApiError> {
    apply(&caller, &tenant, &consumer, Action::Discard, bulk).await
}

/// Run messages now that wait for their next attempt
#[utoipa::path(post, path = "/v1/tenants/{tenant}/consumers/{consumer}/retry", tag = "inbox",
    params(("tenant" = String, Path), ("consumer" = String, Path)), request_body = BulkActionBody,
    responses((status = 200, body = BulkResultBody)), extensions(("x-role" = json!("operator"))))]
pub(crate) async fn retry(
    caller: Caller,
    Path((tenant, consumer)): Path<(String, String)>,
    Body(bulk): Body<BulkActionBody>,
) -> Result<Json<BulkResultBody>, ApiError> {
    apply(&caller, &tenant, &consumer, Action::Retry, bulk).await
}

/// Checks the reason that a change of messages must give.
pub(crate) fn check_reason(reason: &str) -> Result<(), ApiError> {
    match reason.trim().is_empty() || reason.chars().count() > 1_000 {
        true => Err(ApiError::invalid("`reason` must say why, in 1 to 1,000 characters")),
        false => Ok(()),
    }
}

async fn apply(
    caller: &Caller,
    tenant: &str,
    consumer: &str,
    action: Action,
    bulk: BulkActionBody,
) -> Result<Json<BulkResultBody>, ApiError> {
    let BulkActionBody { reason, filter, message_ids, as_of, limit } = bulk;
    check_reason(&reason)?;
    if limit > BULK_MAX || message_ids.len() > BULK_MAX as usize {
        return Err(ApiError::invalid(format!(
            "`limit` and the number of `message_ids` must be at most {BULK_MAX}"
        )));
    }
    let known = |name: String| {
        name.parse().map_err(|_| {
            let names = MessageStatus::NAMES.join(", ");
            ApiError::invalid(format!("`filter.status` is `{name}`; use {names}"))
        })
    };
    let filter = Filter {
        status: filter.status.map(known).transpose()?,
        reason: filter.reason,
        event_type: filter.event_type,
        ordering_keys: filter.key.map(keys).unwrap_or_default(),
        error: filter.error,
        version: filter.version,
        since: filter.since,
        until: filter.until,
        ..Filter::default()
    };
    let bulk = oncebox_control::BulkAction { action, filter, message_ids, reason, as_of, limit };
    let oncebox_control::BulkResult { changed, left, as_of } =
        caller.control.messages().act_on_messages(tenant, consumer, &bulk).await?;
    Ok(Json(BulkResultBody { changed, left, as_of }))
}
