//! Replacing the payload of a dead letter.

use axum::Json;
use base64::{Engine, engine::general_purpose::STANDARD};
use chrono::{DateTime, Utc};
use oncebox_control::Edit;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::{
    auth::Caller,
    error::ApiError,
    extract::{Json as Body, Path},
    inbox::InboxDetailBody,
    jobs::check_reason,
};

/// The new payload of a dead letter: one of `payload` and `payload_base64`.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct NewEdit {
    /// Reason, 1 to 1,000 characters, kept with the message and in the audit log.
    pub reason: String,
    /// The payload, as text.
    #[serde(default)]
    pub payload: Option<String>,
    /// The payload as base64, where it is not text.
    #[serde(default)]
    pub payload_base64: Option<String>,
    /// Time at which the message must have been a dead letter already. A repeated request then does
    /// not change a message that failed again since. By default the present.
    #[serde(default)]
    pub as_of: Option<DateTime<Utc>>,
}

/// Give a dead letter another payload and run it again
///
/// The row keeps its id, headers and history, and the former payload is kept. A redelivery is
/// compared with the payload that was first received, and is a duplicate.
#[utoipa::path(post, path = "/v1/tenants/{tenant}/consumers/{consumer}/inbox/{message_id}/edit", tag = "inbox",
    params(("tenant" = String, Path), ("consumer" = String, Path), ("message_id" = String, Path)), request_body = NewEdit,
    responses((status = 200, body = InboxDetailBody)), extensions(("x-role" = json!("operator"))))]
pub(crate) async fn edit(
    caller: Caller,
    Path((tenant, consumer, message_id)): Path<(String, String, String)>,
    Body(new): Body<NewEdit>,
) -> Result<Json<InboxDetailBody>, ApiError> {
    let NewEdit { reason, payload, payload_base64, as_of } = new;
    check_reason(&reason)?;
    let payload = match (payload, payload_base64) {
        (Some(text), None) => text.into_bytes(),
        (None, Some(encoded)) => STANDARD.decode(encoded).map_err(|error| {
            ApiError::invalid(format!("`payload_base64` is no base64: {error}"))
        })?,
        _ => {
            return Err(ApiError::invalid("an edit needs one of `payload` and `payload_base64`"));
        }
    };
    caller
        .control
        .messages()
        .edit_message(&tenant, &consumer, &message_id, &Edit { payload, reason, as_of })
        .await?;
    let detail = caller.control.messages().inbox_show(&tenant, &consumer, &message_id).await?;
    Ok(Json(InboxDetailBody::new(detail, None)))
}
