//! The erasure in one file of the archive, in memory. A row group is decoded at a time.

use bytes::Bytes;
use chrono::{DateTime, Utc};
use oncebox_archive::{ArchiveError, ArchivedMessage, FileReader, Footer, WrittenFile};
use serde_json::{Value, json};

use super::ErasureTarget;
use crate::archive::verify::digest;

/// The entry in the history of each message that is erased.
pub(super) struct ErasureEntry {
    pub(super) at: DateTime<Utc>,
    pub(super) reason: String,
    pub(super) actor: String,
}

/// A file that replaces another one, with the numbers of what was erased.
pub(super) struct RewrittenFile {
    pub(super) file: WrittenFile,
    pub(super) messages: i64,
    pub(super) edits: i64,
    pub(super) errors: i64,
}

/// The messages of a file.
pub(super) struct FileContent {
    pub(super) rows: i64,
    pub(super) id_digest: Vec<u8>,
    /// Messages that the target selects and of which something is readable.
    pub(super) readable: i64,
}

impl ErasureTarget {
    /// Returns whether the target selects a message of which something is readable: one that is not
    /// erased, or whose edits or history hold a payload or the text of a failure.
    pub(super) fn is_readable(&self, message: &ArchivedMessage) -> bool {
        let is_selected = match self {
            Self::MessageId(id) => message.message_id == *id,
            Self::Key(key) => {
                message.key.as_ref() == Some(key) || message.ordering_key.as_ref() == Some(key)
            }
        };
        is_selected
            && (message.erased_at.is_none()
                || may_hold(message.edits.as_deref(), "payload")
                || may_hold(message.history.as_deref(), "error"))
    }
}

/// Returns a file without the payloads of the messages that the target selects; none where it holds
/// no such payload.
pub(super) fn rewrite(
    path: &str,
    bytes: Bytes,
    footer: &Footer,
    new_path: &str,
    target: &ErasureTarget,
    entry: &ErasureEntry,
) -> Result<Option<RewrittenFile>, ArchiveError> {
    let file = FileReader::open(path, bytes, footer)?;
    if readable(&file, target)? == 0 {
        return Ok(None);
    }
    let (mut messages, mut edits, mut errors) = (0, 0, 0);
    let file = file.rewrite(new_path, |message| {
        if target.is_readable(message) {
            messages += 1;
            let counts = empty(message, entry)
                .ok_or_else(|| ArchiveError::damaged(path, &"its history is no JSON"))?;
            edits += counts.0;
            errors += counts.1;
        }
        Ok(())
    })?;
    Ok(Some(RewrittenFile { file, messages, edits, errors }))
}

/// Reads what a file holds.
pub(super) fn content(
    path: &str,
    bytes: Bytes,
    footer: &Footer,
    target: &ErasureTarget,
) -> Result<FileContent, ArchiveError> {
    let file = FileReader::open(path, bytes, footer)?;
    let ids = file.ids()?;
    let rows = ids.len() as i64;
    Ok(FileContent { rows, id_digest: digest(ids), readable: readable(&file, target)? })
}

fn readable(file: &FileReader, target: &ErasureTarget) -> Result<i64, ArchiveError> {
    let mut readable = 0;
    for group in 0..file.groups() {
        let messages = file.read(group)?;
        readable += messages.iter().filter(|message| target.is_readable(message)).count() as i64;
    }
    Ok(readable)
}

/// Takes the payload out of a message, as `oncebox.erase` does in the inbox. Returns the numbers of
/// edits and errors that it erased; none where they are no JSON.
fn empty(message: &mut ArchivedMessage, entry: &ErasureEntry) -> Option<(i64, i64)> {
    (message.payload, message.headers, message.payload_hash) = (None, None, None);
    (message.result, message.last_error) = (None, None);
    message.erased_at = Some(entry.at);
    let (edits, count) = without(message.edits.as_deref(), "payload")?;
    message.edits = message.edits.is_some().then(|| Value::Array(edits).to_string());
    let (mut history, errors) = without(message.history.as_deref(), "error")?;
    history.push(json!({
        "at": entry.at, "event": "erased", "attempt": null, "version_id": null,
        "reason": entry.reason, "error": null, "actor": entry.actor,
    }));
    message.history = Some(Value::Array(history).to_string());
    Some((count, errors))
}

/// Returns whether an entry of a JSON array has a member. One that cannot be read may have it.
fn may_hold(text: Option<&str>, member: &str) -> bool {
    without(text, member).is_none_or(|(_, count)| count > 0)
}

/// Returns the entries of a JSON array without a member, and how many had it.
fn without(text: Option<&str>, member: &str) -> Option<(Vec<Value>, i64)> {
    let Some(text) = text else { return Some((Vec::new(), 0)) };
    let mut entries: Vec<Value> = serde_json::from_str(text).ok()?;
    let mut count = 0;
    for entry in &mut entries {
        if let Some(value) = entry.get_mut(member).filter(|value| !value.is_null()) {
            *value = Value::Null;
            count += 1;
        }
    }
    Some((entries, count))
}
