//! The archive: its files, and messages in them.

use axum::Json;
use chrono::{DateTime, Utc};
use oncebox_control::{ArchiveFilter, ArchivedDetail, ArchivedEdit, ArchivedFile, ForgottenFiles};
use oncebox_model::masking::Mask;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::{
    auth::Caller,
    error::ApiError,
    extract::{self, Path, Query},
    inbox::{HistoryEventBody, InboxDetailBody},
    masking::{MaskedRecord, mask_of_any},
};

/// The archive of the installation, with its newest files.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
#[schema(as = Archive)]
pub struct ArchiveBody {
    /// Place to which messages go before their removal; null where they are not archived.
    pub location: Option<String>,
    /// Time from which no message is removed unarchived; null where they are not archived.
    pub since: Option<DateTime<Utc>>,
    /// Files, the newest first.
    pub files: Vec<ArchivedFileBody>,
}

/// A file of the archive, which was read back and found whole.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
#[schema(as = ArchivedFile)]
pub struct ArchivedFileBody {
    /// Path below the location of the archive.
    pub path: String,
    /// Name of the time partition that held its messages.
    pub partition: String,
    /// Name of the tenant.
    pub tenant: String,
    /// Name of the consumer.
    pub consumer: String,
    /// Begin of the time in which its messages changed their status for the last time.
    pub from_at: DateTime<Utc>,
    /// End of that time, exclusive.
    pub to_at: DateTime<Utc>,
    /// Lowest message id, in the order of bytes.
    pub first_id: String,
    /// Highest message id, in the order of bytes.
    pub last_id: String,
    /// Number of messages.
    pub messages: i64,
    /// Length of the file, bytes.
    pub bytes: i64,
    /// SHA-256 of the SHA-256 of each id, in the order of the ids' bytes.
    pub id_digest: String,
    /// Time at which it was read back.
    pub verified_at: DateTime<Utc>,
}

/// A message of the archive, as it stood in the inbox when it was removed. What the policy of the
/// consumer masks now is `***`; where the consumer was deleted, all of the record.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
#[schema(as = ArchivedMessage)]
pub struct ArchivedMessageBody {
    /// The message; key, headers and payload where they are requested and were kept.
    #[serde(flatten)]
    pub message: InboxDetailBody,
    /// Ordering key; bytes that are not text are `0x` and hexadecimal digits.
    pub ordering_key: Option<String>,
    /// Failed runs and actions of operators, in order.
    pub history: Vec<HistoryEventBody>,
    /// Edits of the payload, in order.
    pub edits: Vec<ArchivedEditBody>,
    /// Path of the file that holds it, below the location of the archive.
    pub file: String,
    /// Time at which that file was read back.
    pub archived_at: DateTime<Utc>,
}

/// An edit of an archived message.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
#[schema(as = ArchivedEdit)]
pub struct ArchivedEditBody {
    /// Edits of the message so far, this one included.
    pub edit_number: i32,
    /// Time of the edit.
    pub at: DateTime<Utc>,
    /// Payload before the edit, where it is requested; bytes that are not text are `0x` and
    /// hexadecimal digits.
    pub payload: Option<String>,
}

/// The end of the archive.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct ArchiveEnded {
    /// Place to which messages went; null where they were not archived.
    pub location: Option<String>,
}

/// Files that are taken out of the list: those that fit all that is given.
#[derive(Debug, Clone, Default, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ForgetFiles {
    /// Name of a tenant, deleted ones of the host's database included; needed without `before`.
    #[serde(default)]
    pub tenant: Option<String>,
    /// Name of the consumer of that tenant.
    #[serde(default)]
    pub consumer: Option<String>,
    /// Time before which they were written; needed without `tenant`.
    #[serde(default)]
    pub before: Option<DateTime<Utc>>,
}

/// Files that were taken out of the list.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct FilesForgotten {
    /// Paths below the location of the archive.
    pub files: Vec<String>,
}

impl From<ArchivedFile> for ArchivedFileBody {
    fn from(file: ArchivedFile) -> Self {
        Self {
            path: file.path,
            partition: file.partition_name,
            tenant: file.tenant,
            consumer: file.consumer,
            from_at: file.from_at,
            to_at: file.to_at,
            first_id: file.first_id,
            last_id: file.last_id,
            messages: file.rows,
            bytes: file.bytes,
            id_digest: file.id_digest,
            verified_at: file.verified_at,
        }
    }
}

impl ArchivedMessageBody {
    fn new(found: ArchivedDetail, mask: &Mask, with_record: bool) -> Self {
        let ArchivedDetail { detail, ordering_key, history, edits, file } = found;
        let mut record = MaskedRecord::new(mask);
        let ordering_key = record.ordering_key(ordering_key.as_deref());
        let edit = |edit: ArchivedEdit| ArchivedEditBody {
            edit_number: edit.edit_number,
            at: edit.at,
            payload: record.payload(edit.payload.as_deref().filter(|_| with_record)),
        };
        let edits = edits.into_iter().map(edit).collect();
        let mut message = InboxDetailBody::new(detail, with_record.then_some(mask));
        message.masked |= record.is_masked;
        Self {
            message,
            ordering_key,
            history: history.into_iter().map(Into::into).collect(),
            edits,
            file: file.path,
            archived_at: file.verified_at,
        }
    }
}

/// Show where messages are archived, and the newest files
///
/// A tenant's own database that does not answer is left out.
#[utoipa::path(get, path = "/v1/archive", tag = "archive",
    params(("consumer" = Option<String>, Query, description = "Only files of consumers of this \
            name"),
        ("limit" = Option<i64>, Query, description = "At most this many, 1 to 1,000; by default \
            50")),
    responses((status = 200, body = ArchiveBody)), extensions(("x-role" = json!("viewer"))))]
pub(crate) async fn show(caller: Caller, query: Query) -> Result<Json<ArchiveBody>, ApiError> {
    let filter = filter(None, query)?;
    let mark = caller.control.archive().mark().await?;
    let files = caller.control.archive().files(&filter).await?;
    Ok(Json(ArchiveBody {
        since: mark.as_ref().map(|mark| mark.set_at),
        location: mark.map(|mark| mark.location),
        files: files.into_iter().map(Into::into).collect(),
    }))
}

/// End the archive: remove messages without archiving them
///
/// Files that were written stay. A host that is still set to archive begins again at its next run,
/// so take the setting from all hosts first.
#[utoipa::path(delete, path = "/v1/archive", tag = "archive",
    responses((status = 200, body = ArchiveEnded)), extensions(("x-role" = json!("admin"))))]
pub(crate) async fn end(caller: Caller, query: Query) -> Result<Json<ArchiveEnded>, ApiError> {
    query.end()?;
    let mark = caller.control.archive().end().await?;
    Ok(Json(ArchiveEnded { location: mark.map(|mark| mark.location) }))
}

/// Take files out of the list
///
/// Messages in them are not found any more. The files themselves stay: delete them from the storage
/// afterwards. Files of a partition that is not dropped yet stay in the list.
#[utoipa::path(post, path = "/v1/archive/forget", tag = "archive", request_body = ForgetFiles,
    responses((status = 200, body = FilesForgotten)), extensions(("x-role" = json!("admin"))))]
pub(crate) async fn forget(
    caller: Caller,
    extract::Json(which): extract::Json<ForgetFiles>,
) -> Result<Json<FilesForgotten>, ApiError> {
    let ForgetFiles { tenant, consumer, before } = which;
    let which = ForgottenFiles { tenant, consumer, before };
    Ok(Json(FilesForgotten { files: caller.control.archive().forget(&which).await? }))
}

/// List the archived files of a tenant, the newest first
#[utoipa::path(get, path = "/v1/tenants/{tenant}/archive", tag = "archive",
    params(("tenant" = String, Path),
        ("consumer" = Option<String>, Query, description = "Only files of this consumer"),
        ("limit" = Option<i64>, Query, description = "At most this many, 1 to 1,000; by default \
            50")),
    responses((status = 200, body = Vec<ArchivedFileBody>)),
    extensions(("x-role" = json!("viewer"))))]
pub(crate) async fn list(
    caller: Caller,
    Path(tenant): Path<String>,
    query: Query,
) -> Result<Json<Vec<ArchivedFileBody>>, ApiError> {
    let files = caller.control.archive().files(&filter(Some(tenant), query)?).await?;
    Ok(Json(files.into_iter().map(Into::into).collect()))
}

/// Find a message in the archive of a tenant
///
/// Lists all messages with the id, the last archived first: several consumers may have had it, and
/// it may have run again after it was forgotten. The list is empty where there is none.
#[utoipa::path(get, path = "/v1/tenants/{tenant}/archive/messages/{message_id}", tag = "archive",
    params(("tenant" = String, Path), ("message_id" = String, Path),
        ("consumer" = Option<String>, Query, description = "Only messages of this consumer"),
        ("payload" = Option<bool>, Query, description = "Also key, headers and payload, where the \
            policy kept them")),
    responses((status = 200, body = Vec<ArchivedMessageBody>)),
    extensions(("x-role" = json!("viewer"))))]
pub(crate) async fn find(
    caller: Caller,
    Path((tenant, message_id)): Path<(String, String)>,
    mut query: Query,
) -> Result<Json<Vec<ArchivedMessageBody>>, ApiError> {
    let (consumer, with_record) = (query.text("consumer")?, query.flag("payload")?);
    query.end()?;
    let found = caller.control.archive().find(&tenant, consumer.as_deref(), &message_id).await?;
    let mut bodies = Vec::new();
    for found in found {
        let (name, is_it) = (&found.detail.row.consumer, |id| id == found.file.consumer_id);
        let mask = mask_of_any(&caller.control, &tenant, name, is_it).await?;
        bodies.push(ArchivedMessageBody::new(found, &mask, with_record));
    }
    Ok(Json(bodies))
}

fn filter(tenant: Option<String>, mut query: Query) -> Result<ArchiveFilter, ApiError> {
    let filter = ArchiveFilter { tenant, consumer: query.text("consumer")?, limit: query.limit()? };
    query.end()?;
    Ok(filter)
}
