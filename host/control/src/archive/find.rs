//! The search for a message in the archive. The table of files says which may hold the id; of each
//! the search reads the footer, filters, and perhaps a row group.

use chrono::{DateTime, Utc};
use futures::StreamExt;
use oncebox_archive::{ArchiveError, ArchiveStore, ArchivedMessage};
use oncebox_model::error::InboxError;
use serde::{Deserialize, de::DeserializeOwned};
use sqlx::AssertSqlSafe;

use super::{
    changed_row, check_row, failed,
    list::{ArchivedFile, FILES},
};
use crate::{
    handles::Archive,
    messages::{
        history::HistoryEvent,
        list::{InboxDetail, InboxRow},
    },
};

/// Files that are searched at a time.
const AT_ONCE: usize = 32;

/// A message of the archive.
#[derive(Debug, Clone)]
pub struct ArchivedDetail {
    /// The message with its record, as it stood in the inbox.
    pub detail: InboxDetail,
    /// Key that orders it; none for a message without order.
    pub ordering_key: Option<Vec<u8>>,
    /// Failed runs and operators' actions, oldest first.
    pub history: Vec<HistoryEvent>,
    /// Payloads that edits replaced, oldest first.
    pub edits: Vec<ArchivedEdit>,
    /// The file that holds it.
    pub file: ArchivedFile,
}

/// A payload that an edit replaced.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ArchivedEdit {
    /// Edits of the message so far, this one included.
    pub edit_number: i32,
    /// Time of the edit.
    pub at: DateTime<Utc>,
    /// Payload before the edit.
    pub payload: Option<Vec<u8>>,
}

/// An entry of the history, as the archive has it.
#[derive(Deserialize)]
struct EventText {
    at: DateTime<Utc>,
    event: String,
    attempt: Option<i32>,
    version_id: Option<i32>,
    reason: Option<String>,
    error: Option<String>,
    actor: Option<String>,
}

/// An edit, as the archive has it. The payload is in hexadecimal digits.
#[derive(Deserialize)]
struct EditText {
    edit_number: i32,
    at: DateTime<Utc>,
    payload: Option<String>,
}

/// An error that ended a search.
enum SearchFailure {
    Archive(ArchiveError),
    Other(InboxError),
}

impl From<InboxError> for SearchFailure {
    fn from(error: InboxError) -> Self {
        Self::Other(error)
    }
}

impl From<SearchFailure> for InboxError {
    fn from(failure: SearchFailure) -> Self {
        match failure {
            SearchFailure::Archive(error) => failed(error),
            SearchFailure::Other(error) => error,
        }
    }
}

impl Archive<'_> {
    /// Finds the messages of a tenant with an id in the archive, the last archived first. Without a
    /// consumer it looks at all, deleted ones included. An id is there more than once where several
    /// consumers had it, or where it ran again after it was forgotten.
    ///
    /// # Errors
    /// `Archive` where a file that may hold the id is missing or damaged, or the archive does not
    /// answer, also where another file has the id. `Conflict` where this process has no archive.
    /// `NotFound` where there is no such tenant.
    pub async fn find(
        &self,
        tenant: &str,
        consumer: Option<&str>,
        message_id: &str,
    ) -> Result<Vec<ArchivedDetail>, InboxError> {
        match self.find_once(tenant, consumer, message_id).await {
            // An erasure may have put another file in its place since the list was read.
            Err(SearchFailure::Archive(ArchiveError::Missing { .. })) => {
                Ok(self.find_once(tenant, consumer, message_id).await?)
            }
            found => Ok(found?),
        }
    }

    async fn find_once(
        &self,
        tenant: &str,
        consumer: Option<&str>,
        message_id: &str,
    ) -> Result<Vec<ArchivedDetail>, SearchFailure> {
        let files = self.candidates(tenant, consumer, message_id).await?;
        if files.is_empty() {
            return Ok(Vec::new());
        }
        let store = self.store().ok_or_else(|| {
            InboxError::conflict(
                "this process has no `archive.location`, so that it cannot read the archive; give \
                    it the settings of the hosts",
            )
        })?;
        let searches: Vec<_> =
            files.into_iter().map(|file| search(store, file, message_id)).collect();
        let searched: Vec<_> = futures::stream::iter(searches).buffered(AT_ONCE).collect().await;
        let (mut found, mut error) = (Vec::new(), None);
        for result in searched {
            match result {
                Ok(Some((file, message))) => found.push(self.detail(file, message).await?),
                Ok(None) => {}
                Err(failure) => {
                    tracing::warn!(error = %failure, "a file of the archive was not searched");
                    error = error.or(Some(failure));
                }
            }
        }
        match error {
            Some(error) => Err(SearchFailure::Archive(error)),
            None => Ok(found),
        }
    }

    /// Returns the files whose ids begin at or below an id and end at or above it, the last first.
    async fn candidates(
        &self,
        tenant: &str,
        consumer: Option<&str>,
        message_id: &str,
    ) -> Result<Vec<ArchivedFile>, InboxError> {
        let tenant = self.0.tenants().get(tenant).await?;
        let database = self.0.tenant_databases().get(&tenant)?;
        let candidates = format!(
            "{FILES} AND f.tenant_id = $1 AND ($2::text IS NULL OR f.consumer = $2) \
                AND f.first_id <= $3 AND f.last_id >= $3 ORDER BY f.verified_at DESC, f.path"
        );
        let query = sqlx::query_as(AssertSqlSafe(candidates)).bind(tenant.tenant_id);
        let query = query.bind(consumer).bind(message_id);
        let files: Vec<ArchivedFile> = query.fetch_all(&database.pool).await?;
        if files.is_empty() {
            return Ok(files);
        }
        let installation = self.0.tenant_databases().installation().await?.to_string();
        for file in &files {
            check_row(&file.path, &installation, &tenant.name).map_err(failed)?;
        }
        Ok(files)
    }

    async fn detail(
        &self,
        file: ArchivedFile,
        message: ArchivedMessage,
    ) -> Result<ArchivedDetail, InboxError> {
        let damaged = || failed(ArchiveError::damaged(&file.path, &"its history is no JSON"));
        let events: Vec<EventText> = parsed(&message.history).ok_or_else(damaged)?;
        let edits: Vec<EditText> = parsed(&message.edits).ok_or_else(damaged)?;
        let versions = events.iter().filter_map(|event| event.version_id).collect();
        let digests = self.0.messages().digests(versions).await?;
        let event = |event: EventText| HistoryEvent {
            at: event.at,
            event: event.event,
            attempt: event.attempt,
            version: event.version_id.and_then(|id| digests.get(&id).cloned()),
            reason: event.reason,
            error: event.error,
            actor: event.actor,
        };
        let edit = |edit: EditText| ArchivedEdit {
            edit_number: edit.edit_number,
            at: edit.at,
            payload: edit.payload.and_then(|digits| hex::decode(digits).ok()),
        };
        let history = events.into_iter().map(event).collect();
        let edits = edits.into_iter().map(edit).collect();
        let ordering_key = message.ordering_key.clone();
        let unknown = || failed(ArchiveError::damaged(&file.path, &"a status is not known"));
        let detail = detail(message).ok_or_else(unknown)?;
        Ok(ArchivedDetail { detail, ordering_key, history, edits, file })
    }
}

async fn search(
    store: &ArchiveStore,
    file: ArchivedFile,
    message_id: &str,
) -> Result<Option<(ArchivedFile, ArchivedMessage)>, ArchiveError> {
    let footer = file.footer().ok_or_else(|| changed_row(&file.path))?;
    let found = store.find(&file.path, file.bytes as u64, footer, message_id).await?;
    Ok(found.map(|message| (file, message)))
}

/// Parses a JSON array; nothing is an empty one.
fn parsed<T: DeserializeOwned>(text: &Option<String>) -> Option<Vec<T>> {
    match text {
        None => Some(Vec::new()),
        Some(text) => serde_json::from_str(text).ok(),
    }
}

/// Returns a message of the archive as a list of the inbox shows it; none where its status is not
/// known.
fn detail(message: ArchivedMessage) -> Option<InboxDetail> {
    let result = match message.result {
        None => None,
        Some(text) => Some(serde_json::from_str(&text).ok()?),
    };
    let row = InboxRow {
        tenant: message.tenant,
        consumer: message.consumer,
        message_id: message.message_id,
        status: message.status.parse().ok()?,
        reason: message.reason,
        event_type: message.event_type,
        event_version: message.event_version,
        source: message.source,
        topic: message.topic,
        partition: message.partition,
        offset: message.offset,
        attempts: message.attempts,
        crashes: message.crashes,
        last_error: message.last_error,
        next_attempt_at: message.next_attempt_at,
        locked_until: message.locked_until,
        version: message.version,
        version_id: message.version_id,
        result,
        payload_hash: message.payload_hash.map(hex::encode),
        payload_bytes: message.payload.as_ref().map(|payload| payload.len() as i32),
        trace_parent: message.trace_parent,
        received_at: message.received_at,
        processed_at: message.processed_at,
        erased_at: message.erased_at,
    };
    Some(InboxDetail {
        row,
        key: message.key,
        is_kept: message.headers.is_some(),
        headers: oncebox_model::headers::decode(message.headers.as_deref().unwrap_or_default()),
        payload: message.payload,
    })
}
