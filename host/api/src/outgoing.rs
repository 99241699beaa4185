//! The outgoing messages of a tenant.

pub(crate) mod row;

use axum::Json;
use chrono::{DateTime, Utc};
use oncebox_control::OutgoingFilter;
use oncebox_model::{masking::Mask, outgoing::OutgoingStatus};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use self::row::OutgoingRowBody;
use crate::{
    auth::Caller,
    error::ApiError,
    extract::{Path, Query},
    inbox::InboxRowBody,
    masking::{MaskedRecord, mask_of},
};

/// An outgoing message with its cause, and with its record where it is requested. Bytes that are
/// not text are `0x` and hexadecimal digits. What the policy of the consumer masks is `***`, in the
/// answer too.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
#[schema(as = OutgoingDetail)]
pub struct OutgoingDetailBody {
    /// The message.
    #[serde(flatten)]
    pub row: OutgoingRowBody,
    /// Key, by which messages of its destination keep their order.
    pub key: Option<String>,
    /// Headers that the handler gave it: names and values. Null where they are not requested.
    pub headers: Option<Vec<(String, String)>>,
    /// Payload.
    pub payload: Option<String>,
    /// Media type of the answer of its endpoint, where that keeps answers.
    #[serde(default)]
    pub answer_content_type: Option<String>,
    /// Body of that answer, up to 64 KiB.
    #[serde(default)]
    pub answer: Option<String>,
    /// Whether that is all of the body.
    #[serde(default)]
    pub answer_is_whole: Option<bool>,
    /// Whether anything of it is masked.
    #[serde(default)]
    pub masked: bool,
    /// The message that caused it; null where the inbox does not hold it.
    pub caused_by: Option<InboxRowBody>,
}

impl OutgoingDetailBody {
    /// Creates the body; with the record, as far as a mask shows it, or without.
    fn new(detail: oncebox_control::OutgoingDetail, mask: Option<&Mask>) -> Self {
        let mut body = Self {
            key: None,
            headers: None,
            payload: None,
            answer_content_type: None,
            answer: None,
            answer_is_whole: None,
            masked: false,
            caused_by: detail.cause.map(Into::into),
            row: detail.row.into(),
        };
        if let Some(mask) = mask {
            let mut record = MaskedRecord::new(mask);
            body.key = record.key(detail.key.as_deref());
            body.headers = Some(record.headers(&detail.headers));
            body.payload = record.payload(detail.payload.as_deref());
            if let Some(answer) = detail.answer {
                body.answer = record.payload(Some(&answer.body));
                body.answer_is_whole = Some(answer.is_whole);
                body.answer_content_type = answer.content_type;
            }
            body.masked = record.is_masked;
        }
        body
    }
}

/// Outgoing messages to one destination that are in one state for one reason.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
#[schema(as = OutgoingCount)]
pub struct OutgoingCountBody {
    /// Name of the consumer whose handlers emitted them.
    pub consumer: String,
    /// Destination.
    pub destination: String,
    /// State.
    #[schema(value_type = String)]
    pub status: OutgoingStatus,
    /// Reason, without the details after a colon.
    pub reason: Option<String>,
    /// Number of messages.
    pub messages: i64,
    /// Number of those that are past their due time.
    pub due: i64,
    /// Earliest due time among them.
    pub oldest_due_at: DateTime<Utc>,
    /// State of their endpoint's circuit breaker, on the host where it is the most open: `open` or
    /// `half_open`; null where it is closed, or the destination is no endpoint.
    #[serde(default)]
    pub breaker: Option<String>,
}

impl From<oncebox_control::OutgoingCount> for OutgoingCountBody {
    fn from(count: oncebox_control::OutgoingCount) -> Self {
        Self {
            consumer: count.consumer,
            destination: count.destination,
            status: count.status,
            reason: count.reason,
            messages: count.messages,
            due: count.due,
            oldest_due_at: count.oldest_due_at,
            breaker: count.breaker,
        }
    }
}

/// List outgoing messages, newest first
///
/// The next page begins after the last message of this one: `after` is its `position`.
#[utoipa::path(get, path = "/v1/tenants/{tenant}/outgoing", tag = "outgoing",
    params(("tenant" = String, Path),
        ("consumer" = Option<String>, Query, description = "Only messages that handlers of this \
            consumer emitted"),
        ("status" = Option<String>, Query, description = "Only messages in this state"),
        ("destination" = Option<String>, Query, description = "Only messages to this destination, \
            such as `kafka:orders`"),
        ("cause" = Option<String>, Query, description = "Only messages that this message caused"),
        ("id" = Option<String>, Query, description = "Only the message of this id"),
        ("after" = Option<i64>, Query, description = "Only messages before this position"),
        ("limit" = Option<i64>, Query, description = "At most this many, 1 to 1,000; by default \
            50")),
    responses((status = 200, body = Vec<OutgoingRowBody>)),
    extensions(("x-role" = json!("viewer"))))]
pub(crate) async fn list(
    caller: Caller,
    Path(tenant): Path<String>,
    mut query: Query,
) -> Result<Json<Vec<OutgoingRowBody>>, ApiError> {
    let status = query.one_of("status", &OutgoingStatus::NAMES)?;
    let filter = OutgoingFilter {
        consumer: query.text("consumer")?,
        status: status.and_then(|name| name.parse().ok()),
        destination: query.text("destination")?,
        cause: query.text("cause")?,
        ids: query.text("id")?.into_iter().collect(),
    };
    let after = query.parsed("after", "the position of an outgoing message")?;
    let limit = query.limit()?;
    query.end()?;
    let rows = caller.control.outgoing().list(&tenant, &filter, after, limit).await?;
    Ok(Json(rows.into_iter().map(Into::into).collect()))
}

/// Show an outgoing message with the message that caused it
#[utoipa::path(get, path = "/v1/tenants/{tenant}/outgoing/messages/{id}", tag = "outgoing",
    params(("tenant" = String, Path), ("id" = String, Path),
        ("consumer" = Option<String>, Query, description = "Consumer whose handler emitted it, \
            which makes the search short"),
        ("cause" = Option<String>, Query, description = "Id of the message that caused it, which \
            makes the search short"),
        ("payload" = Option<bool>, Query, description = "Also key, headers, payload and \
            the endpoint's answer")),
    responses((status = 200, body = OutgoingDetailBody)),
    extensions(("x-role" = json!("viewer"))))]
pub(crate) async fn show(
    caller: Caller,
    Path((tenant, id)): Path<(String, String)>,
    mut query: Query,
) -> Result<Json<OutgoingDetailBody>, ApiError> {
    let with_record = query.flag("payload")?;
    let (consumer, cause) = (query.text("consumer")?, query.text("cause")?);
    query.end()?;
    let detail = caller.control.outgoing().show(&tenant, &id, consumer, cause).await?;
    let mask = match with_record {
        true => Some(mask_of(&caller.control, &tenant, &detail.row.consumer).await?),
        false => None,
    };
    Ok(Json(OutgoingDetailBody::new(detail, mask.as_ref())))
}

/// Count outgoing messages that are still to be sent, and parked ones
///
/// Counts by consumer, destination, state and reason, up to 100,000 of each consumer and state.
#[utoipa::path(get, path = "/v1/tenants/{tenant}/outgoing/stats", tag = "outgoing",
    params(("tenant" = String, Path),
        ("consumer" = Option<String>, Query, description = "Only messages that handlers of this \
            consumer emitted")),
    responses((status = 200, body = Vec<OutgoingCountBody>)),
    extensions(("x-role" = json!("viewer"))))]
pub(crate) async fn stats(
    caller: Caller,
    Path(tenant): Path<String>,
    mut query: Query,
) -> Result<Json<Vec<OutgoingCountBody>>, ApiError> {
    let consumer = query.text("consumer")?;
    query.end()?;
    let counts = caller.control.outgoing().stats(&tenant, consumer.as_deref()).await?;
    Ok(Json(counts.into_iter().map(Into::into).collect()))
}
