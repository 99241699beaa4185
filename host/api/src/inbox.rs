//! The inbox of a consumer.

use axum::Json;
use chrono::{DateTime, Utc};
use oncebox_control::{Cursor, Filter, keys};
use oncebox_model::{MessageStatus, masking::Mask, message::UNDECODABLE};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use utoipa::ToSchema;

use crate::{
    auth::Caller,
    error::ApiError,
    extract::{Path, Query},
    masking::{MaskedRecord, mask_of},
    outgoing::row::OutgoingRowBody,
};

/// A message in the inbox, without its payload. The row of a completed message may be light: then
/// its event type, event version, source, payload hash and trace context are null.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
#[schema(as = InboxRow)]
pub struct InboxRowBody {
    /// Name of the tenant.
    pub tenant: String,
    /// Name of the consumer.
    pub consumer: String,
    /// The message id.
    pub message_id: String,
    /// State.
    #[schema(value_type = String)]
    pub status: MessageStatus,
    /// Reason of the state.
    pub reason: Option<String>,
    /// Event type, which selects the handler.
    pub event_type: Option<String>,
    /// Version of the event's schema.
    pub event_version: Option<String>,
    /// CloudEvents `source`, or the topic.
    pub source: Option<String>,
    /// Topic of the record.
    pub topic: String,
    /// Partition of the record.
    pub partition: i32,
    /// Offset of the record.
    pub offset: i64,
    /// Number of runs.
    pub attempts: i32,
    /// Number of runs that ended without an answer.
    pub crashes: i32,
    /// Text of the last failure.
    pub last_error: Option<String>,
    /// Time of the next run.
    pub next_attempt_at: Option<DateTime<Utc>>,
    /// End of the lease.
    pub locked_until: Option<DateTime<Utc>>,
    /// SHA-256 of the component that completed it.
    pub version: Option<String>,
    /// Value that the handler returned.
    pub result: Option<Value>,
    /// HMAC-SHA-256 of the payload that came, under a key of the tenant.
    pub payload_hash: Option<String>,
    /// Bytes of payload kept.
    pub payload_bytes: Option<i32>,
    /// W3C trace context.
    pub trace_parent: Option<String>,
    /// Time of the first claim.
    pub received_at: DateTime<Utc>,
    /// Time at which the message was settled.
    pub processed_at: Option<DateTime<Utc>>,
    /// Time at which all that the row held of the payload was erased.
    pub erased_at: Option<DateTime<Utc>>,
}

impl From<oncebox_control::InboxRow> for InboxRowBody {
    fn from(row: oncebox_control::InboxRow) -> Self {
        Self {
            tenant: row.tenant,
            consumer: row.consumer,
            message_id: row.message_id,
            status: row.status,
            reason: row.reason,
            event_type: row.event_type,
            event_version: row.event_version,
            source: row.source,
            topic: row.topic,
            partition: row.partition,
            offset: row.offset,
            attempts: row.attempts,
            crashes: row.crashes,
            last_error: row.last_error,
            next_attempt_at: row.next_attempt_at,
            locked_until: row.locked_until,
            version: row.version,
            result: row.result,
            payload_hash: row.payload_hash,
            payload_bytes: row.payload_bytes,
            trace_parent: row.trace_parent,
            received_at: row.received_at,
            processed_at: row.processed_at,
            erased_at: row.erased_at,
        }
    }
}

/// A message in the inbox, with its record where it is requested. Bytes that are not text are `0x`
/// and hexadecimal digits. What the policy of the consumer masks is `***`.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
#[schema(as = InboxDetail)]
pub struct InboxDetailBody {
    /// The message.
    #[serde(flatten)]
    pub row: InboxRowBody,
    /// Key of the record.
    pub key: Option<String>,
    /// Headers: names and values. Null where they are not requested.
    pub headers: Option<Vec<(String, String)>>,
    /// Payload.
    pub payload: Option<String>,
    /// Whether anything of it is masked.
    #[serde(default)]
    pub masked: bool,
}

/// The history of a message, its obstacles, and the possible actions.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
#[schema(as = MessageHistory)]
pub struct MessageHistoryBody {
    /// The message.
    pub message: InboxRowBody,
    /// Ordering key; bytes that are not text are `0x` and hexadecimal digits. `***` where the
    /// policy of the consumer masks it.
    pub ordering_key: Option<String>,
    /// Whether the ordering key is masked.
    #[serde(default)]
    pub masked: bool,
    /// Failed runs and actions of operators, in order; the last 200.
    pub history: Vec<HistoryEventBody>,
    /// Open message of its key that it waits for.
    #[serde(rename = "behind")]
    pub blocked_by: Option<BlockedByBody>,
    /// Version of the aggregate that the message creates, where the consumer guards the sequence.
    pub aggregate_version: Option<i64>,
    /// Present version of the aggregate.
    pub aggregate_at: Option<i64>,
    /// Time until which it waits for earlier versions of the aggregate.
    pub waits_until: Option<DateTime<Utc>>,
    /// Outgoing messages that its run emitted, by ordinal; the first 100.
    #[serde(default)]
    pub outgoing: Vec<OutgoingRowBody>,
    /// Number of these messages.
    #[serde(default)]
    pub outgoing_total: i64,
    /// Next step of the message, in a sentence or two.
    pub next: String,
    /// Commands of an operator that move the message on.
    pub commands: Vec<String>,
}

/// An event in the history of a message.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
#[schema(as = HistoryEvent)]
pub struct HistoryEventBody {
    /// Time of the event.
    pub at: DateTime<Utc>,
    /// Kind: `failed`, `crashed`, `interrupted`, `redriven`, `discarded`, `retried`, `edited`,
    /// `restored`, `erased` or `replayed`.
    pub event: String,
    /// Number of the run, since the message was first received or last redriven.
    pub attempt: Option<i32>,
    /// SHA-256 of the component that ran the message.
    pub version: Option<String>,
    /// Reason of a failed run, or the reason that an operator gave.
    pub reason: Option<String>,
    /// Text of the failure.
    pub error: Option<String>,
    /// Name of the operator's token or user; null for a run.
    pub actor: Option<String>,
}

/// A message that holds back others.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
#[schema(as = BlockedBy)]
pub struct BlockedByBody {
    /// Message id.
    pub message_id: String,
    /// State.
    #[schema(value_type = String)]
    pub status: MessageStatus,
    /// Reason of the state.
    pub reason: Option<String>,
}

impl From<oncebox_control::HistoryEvent> for HistoryEventBody {
    fn from(e: oncebox_control::HistoryEvent) -> Self {
        Self {
            at: e.at,
            event: e.event,
            attempt: e.attempt,
            version: e.version,
            reason: e.reason,
            error: e.error,
            actor: e.actor,
        }
    }
}

impl MessageHistoryBody {
    fn new(message: oncebox_control::MessageHistory, mask: &Mask) -> Self {
        let mut record = MaskedRecord::new(mask);
        let blocked_by = |b: oncebox_control::BlockedBy| BlockedByBody {
            message_id: b.message_id,
            status: b.status,
            reason: b.reason,
        };
        Self {
            message: message.detail.row.into(),
            ordering_key: record.ordering_key(message.ordering_key.as_deref()),
            masked: record.is_masked,
            history: message.history.into_iter().map(Into::into).collect(),
            blocked_by: message.blocked_by.map(blocked_by),
            aggregate_version: message.aggregate.map(|aggregate| aggregate.version),
            aggregate_at: message.aggregate.and_then(|aggregate| aggregate.at),
            waits_until: message.waits_until,
            outgoing: message.outgoing.first.into_iter().map(Into::into).collect(),
            outgoing_total: message.outgoing.total,
            next: message.next.text,
            commands: message.next.commands,
        }
    }
}

/// List messages, newest first
///
/// Messages with equal times are in the order of their ids. The next page begins after the last
/// message of this one: `after` is its `received_at`, a comma and its `message_id`.
#[utoipa::path(get, path = "/v1/tenants/{tenant}/consumers/{consumer}/inbox", tag = "inbox",
    params(("tenant" = String, Path), ("consumer" = String, Path),
        ("status" = Option<String>, Query, description = "Only messages in this state"),
        ("reason" = Option<String>, Query, description = "Only messages that are there for this \
            reason, with whatever it says after a colon"),
        ("event_type" = Option<String>, Query, description = "Only messages of this event type"),
        ("key" = Option<String>, Query, description = "Only messages of this ordering key; bytes \
            that are no text as `0x` and hexadecimal digits"),
        ("error" = Option<String>, Query, description = "Only messages whose last error holds this \
            text, regardless of case"),
        ("version" = Option<String>, Query, description = "Only messages that a version ran last \
            whose digest begins like this"),
        ("since" = Option<DateTime<Utc>>, Query, description = "Only messages received at this \
            time or later"),
        ("until" = Option<DateTime<Utc>>, Query, description = "Only messages received before this \
            time"),
        ("after" = Option<String>, Query, description = "Only messages after this cursor"),
        ("limit" = Option<i64>, Query, description = "At most this many, 1 to 1,000; by default \
            50")),
    responses((status = 200, body = Vec<InboxRowBody>)), extensions(("x-role" = json!("viewer"))))]
pub(crate) async fn list(
    caller: Caller,
    Path((tenant, consumer)): Path<(String, String)>,
    mut query: Query,
) -> Result<Json<Vec<InboxRowBody>>, ApiError> {
    let filter = Filter {
        tenant: Some(tenant.clone()),
        consumer: Some(consumer.clone()),
        ..filter(&mut query)?
    };
    query.end()?;
    // A misspelt name must not look like an empty inbox.
    caller.control.consumers().get(&tenant, &consumer).await?;
    Ok(Json(
        caller.control.messages().inbox_list(&filter).await?.into_iter().map(Into::into).collect(),
    ))
}

/// Reads the filter of a list or an export from the query.
pub(crate) fn filter(query: &mut Query) -> Result<Filter, ApiError> {
    Ok(Filter {
        status: query.one_of("status", &MessageStatus::NAMES)?.and_then(|name| name.parse().ok()),
        reason: query.text("reason")?,
        event_type: query.text("event_type")?,
        ordering_keys: query.text("key")?.as_deref().map(keys).unwrap_or_default(),
        error: query.text("error")?,
        version: query.text("version")?,
        since: query.parsed("since", "a time as of RFC 3339")?,
        until: query.parsed("until", "a time as of RFC 3339")?,
        after: query
            .parsed::<Cursor>("after", "a time as of RFC 3339, a comma and the id of a message")?,
        limit: query.limit()?,
        ..Filter::default()
    })
}

/// The open messages of an inbox.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct InboxStats {
    /// Name of the tenant.
    pub tenant: String,
    /// Name of the consumer.
    pub consumer: String,
    /// Number of messages that are still to be run, or run at present.
    pub pending: i64,
    /// Age of the oldest of them since it was received, seconds.
    pub oldest_pending_age_s: Option<f64>,
    /// Messages that did not complete, by state and reason. Each state is counted up to 100,000.
    /// Skipped and discarded messages are not counted.
    pub open: Vec<InboxOpen>,
    /// Bounds of the policy that are reached.
    pub alerts: Vec<InboxAlert>,
}

/// Messages that are in one state for one reason.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct InboxOpen {
    /// State.
    #[schema(value_type = String)]
    pub status: MessageStatus,
    /// Reason, without the details after a colon.
    pub reason: Option<String>,
    /// Number of messages.
    pub messages: i64,
    /// Time at which the first of them was received.
    pub oldest: DateTime<Utc>,
}

/// A bound of the policy that is reached.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct InboxAlert {
    /// Key of the bound in `[alerts]`.
    pub alert: String,
    /// Present value.
    pub value: f64,
    /// Bound at which the alert begins.
    pub bound: u64,
}

/// Count open messages
///
/// Counts messages that did not complete, by state and reason, and names the bounds of the policy's
/// `[alerts]` that are reached.
#[utoipa::path(get, path = "/v1/tenants/{tenant}/consumers/{consumer}/backlog", tag = "inbox",
    params(("tenant" = String, Path), ("consumer" = String, Path)),
    responses((status = 200, body = InboxStats)), extensions(("x-role" = json!("viewer"))))]
pub(crate) async fn backlog(
    caller: Caller,
    Path((tenant, consumer)): Path<(String, String)>,
    query: Query,
) -> Result<Json<InboxStats>, ApiError> {
    query.end()?;
    let (backlog, alerts) = caller.control.messages().backlog(&tenant, &consumer).await?;
    let alert = |a: oncebox_model::Alert| InboxAlert {
        alert: a.name.to_owned(),
        value: a.value,
        bound: a.bound,
    };
    Ok(Json(InboxStats {
        tenant,
        consumer,
        pending: backlog.pending(),
        oldest_pending_age_s: backlog.oldest_pending_age_s(),
        alerts: alerts.into_iter().map(alert).collect(),
        open: backlog.open.into_iter().map(Into::into).collect(),
    }))
}

impl From<oncebox_model::OpenMessages> for InboxOpen {
    fn from(open: oncebox_model::OpenMessages) -> Self {
        Self {
            status: open.status,
            reason: open.reason,
            messages: open.messages,
            oldest: open.oldest,
        }
    }
}

/// Show a message
#[utoipa::path(get, path = "/v1/tenants/{tenant}/consumers/{consumer}/inbox/{message_id}", tag = "inbox",
    params(("tenant" = String, Path), ("consumer" = String, Path), ("message_id" = String, Path),
        ("payload" = Option<bool>, Query, description = "Also key, headers and payload, where the \
            policy keeps them")),
    responses((status = 200, body = InboxDetailBody)), extensions(("x-role" = json!("viewer"))))]
pub(crate) async fn show(
    caller: Caller,
    Path((tenant, consumer, message_id)): Path<(String, String, String)>,
    mut query: Query,
) -> Result<Json<InboxDetailBody>, ApiError> {
    let with_record = query.flag("payload")?;
    query.end()?;
    let detail = caller.control.messages().inbox_show(&tenant, &consumer, &message_id).await?;
    let mask = match with_record {
        true => Some(mask_of(&caller.control, &tenant, &consumer).await?),
        false => None,
    };
    Ok(Json(InboxDetailBody::new(detail, mask.as_ref())))
}

impl InboxDetailBody {
    /// Creates the body; with the record, as far as a mask shows it, or without.
    pub(crate) fn new(detail: oncebox_control::InboxDetail, mask: Option<&Mask>) -> Self {
        let is_undecoded = detail.row.message_id.starts_with(UNDECODABLE);
        let row = detail.row.into();
        let Some(mask) = mask else {
            return Self { row, key: None, headers: None, payload: None, masked: false };
        };
        let mut record = MaskedRecord::new(mask);
        let payload = match is_undecoded {
            true => record.raw_payload(detail.payload.as_deref()),
            false => record.payload(detail.payload.as_deref()),
        };
        Self {
            row,
            key: record.key(detail.key.as_deref()),
            headers: Some(record.headers(&detail.headers)),
            payload,
            masked: record.is_masked,
        }
    }
}

/// Show the history of a message
///
/// The history has its failed runs, the actions of operators, the messages it waits for, its next
/// step, and commands for that.
#[utoipa::path(get, path = "/v1/tenants/{tenant}/consumers/{consumer}/inbox/{message_id}/history", tag = "inbox",
    params(("tenant" = String, Path), ("consumer" = String, Path), ("message_id" = String, Path)),
    responses((status = 200, body = MessageHistoryBody)), extensions(("x-role" = json!("viewer"))))]
pub(crate) async fn history(
    caller: Caller,
    Path((tenant, consumer, message_id)): Path<(String, String, String)>,
    query: Query,
) -> Result<Json<MessageHistoryBody>, ApiError> {
    query.end()?;
    let history =
        caller.control.messages().message_history(&tenant, &consumer, &message_id).await?;
    let mask = mask_of(&caller.control, &tenant, &consumer).await?;
    Ok(Json(MessageHistoryBody::new(history, &mask)))
}
