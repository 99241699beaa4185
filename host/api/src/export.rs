//! The export of an inbox, for an archive or an audit.

use axum::Json;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::{
    auth::Caller,
    error::ApiError,
    extract::{Path, Query},
    inbox::{HistoryEventBody, InboxDetailBody, filter},
    masking::mask_of,
};

/// A message with its history.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct InboxExport {
    /// The message; key, headers and payload where they are requested and kept.
    #[serde(flatten)]
    pub message: InboxDetailBody,
    /// Failed runs and actions of operators, in order; the newest 200.
    pub history: Vec<HistoryEventBody>,
}

/// Export messages, newest first
///
/// Lists messages with their history. A page has at most 100 messages, and with `payload` at most 8
/// MiB of records after the first. It may therefore be shorter than `limit`; a page without
/// messages is the end.
#[utoipa::path(get, path = "/v1/tenants/{tenant}/consumers/{consumer}/export", tag = "inbox",
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
        ("since" = Option<chrono::DateTime<chrono::Utc>>, Query, description = "Only messages \
            received at this time or later"),
        ("until" = Option<chrono::DateTime<chrono::Utc>>, Query, description = "Only messages \
            received before this time"),
        ("payload" = Option<bool>, Query, description = "Also key, headers and payload, where the \
            policy keeps them"),
        ("after" = Option<String>, Query, description = "Only messages after this cursor"),
        ("limit" = Option<i64>, Query, description = "At most this many, 1 to 1,000; by default \
            50")),
    responses((status = 200, body = Vec<InboxExport>)), extensions(("x-role" = json!("viewer"))))]
pub(crate) async fn export(
    caller: Caller,
    Path((tenant, consumer)): Path<(String, String)>,
    mut query: Query,
) -> Result<Json<Vec<InboxExport>>, ApiError> {
    let (filter, with_record) = (filter(&mut query)?, query.flag("payload")?);
    query.end()?;
    let exported =
        caller.control.messages().inbox_export(&tenant, &consumer, &filter, with_record).await?;
    let mask = match with_record {
        true => Some(mask_of(&caller.control, &tenant, &consumer).await?),
        false => None,
    };
    let wire = |e: oncebox_control::Exported| InboxExport {
        message: InboxDetailBody::new(e.detail, mask.as_ref()),
        history: e.history.into_iter().map(Into::into).collect(),
    };
    Ok(Json(exported.into_iter().map(wire).collect()))
}
