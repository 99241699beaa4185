//! Outgoing messages in lists.

use chrono::{DateTime, Utc};
use oncebox_model::outgoing::OutgoingStatus;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// An outgoing message, without its key, its headers and its payload.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
#[schema(as = OutgoingRow)]
pub struct OutgoingRowBody {
    /// Name of the tenant.
    pub tenant: String,
    /// Name of the consumer whose handler emitted it.
    pub consumer: String,
    /// Id of the message that caused it.
    pub cause: String,
    /// Number of the emit among those of its cause, from 0.
    pub ordinal: i32,
    /// Its id, derived from tenant, consumer, cause and ordinal.
    pub id: String,
    /// Position in the order of the emits of its database.
    pub position: i64,
    /// Destination, such as `kafka:orders`.
    pub destination: String,
    /// Type of the event.
    pub event_type: String,
    /// Media type of the payload.
    pub content_type: Option<String>,
    /// State.
    #[schema(value_type = String)]
    pub status: OutgoingStatus,
    /// Reason of the state.
    pub reason: Option<String>,
    /// Text of the last failure.
    pub last_error: Option<String>,
    /// Whether an attempt ended without an answer, so that its destination may have it. No handler
    /// can cancel it then.
    #[serde(default)]
    pub may_have_arrived: bool,
    /// Number of attempts to send it.
    pub attempts: i32,
    /// Time at which it is due, as it was emitted.
    pub due_at: DateTime<Utc>,
    /// Time of the next attempt.
    pub next_attempt_at: Option<DateTime<Utc>>,
    /// End of the lease of the relay that sends it.
    pub locked_until: Option<DateTime<Utc>>,
    /// Host whose relay sends it.
    pub locked_by: Option<String>,
    /// Name by which handlers of the consumer can cancel it.
    pub cancel_token: Option<String>,
    /// Bytes of payload kept.
    pub payload_bytes: Option<i32>,
    /// Id that all messages of one process share.
    pub correlation_id: String,
    /// W3C trace context.
    pub trace_parent: Option<String>,
    /// Time of the transaction that emitted it.
    pub created_at: DateTime<Utc>,
    /// Time at which it was confirmed, cancelled or discarded.
    pub settled_at: Option<DateTime<Utc>>,
    /// Status of its endpoint's answer, where that is kept or was delivered.
    #[serde(default)]
    pub answer_status: Option<i32>,
}

impl From<oncebox_control::OutgoingRow> for OutgoingRowBody {
    fn from(row: oncebox_control::OutgoingRow) -> Self {
        Self {
            tenant: row.tenant,
            consumer: row.consumer,
            cause: row.cause,
            ordinal: row.ordinal,
            id: row.id,
            position: row.position,
            destination: row.destination,
            event_type: row.event_type,
            content_type: row.content_type,
            status: row.status,
            reason: row.reason,
            last_error: row.last_error,
            may_have_arrived: row.may_have_arrived,
            attempts: row.attempts,
            due_at: row.due_at,
            next_attempt_at: row.next_attempt_at,
            locked_until: row.locked_until,
            locked_by: row.locked_by,
            cancel_token: row.cancel_token,
            payload_bytes: row.payload_bytes,
            correlation_id: row.correlation_id,
            trace_parent: row.trace_parent,
            created_at: row.created_at,
            settled_at: row.settled_at,
            answer_status: row.answer_status,
        }
    }
}
