//! Erasure of the payloads of a data subject.

use axum::Json;
use chrono::{DateTime, Utc};
use oncebox_control::{ErasureRequest, ErasureTarget};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::{
    auth::Caller,
    error::ApiError,
    extract::{self, Path},
    jobs::check_reason,
};

/// An erasure of the messages of a data subject: one of `message_id`, `key` and `key_hex` selects
/// them.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct NewErasure {
    /// Reason, 1 to 1,000 characters, kept with each message and in the audit log.
    pub reason: String,
    /// Id of the message.
    #[serde(default)]
    pub message_id: Option<String>,
    /// Record key or ordering key of the messages, as text.
    #[serde(default)]
    pub key: Option<String>,
    /// Record key or ordering key of the messages, in hexadecimal digits.
    #[serde(default)]
    pub key_hex: Option<String>,
    /// Name of the only consumer; by default all consumers of the tenant.
    #[serde(default)]
    pub consumer: Option<String>,
}

/// The progress of an erasure. A caller repeats the request until there is a proof.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[schema(as = Erasure)]
pub struct ErasureBody {
    /// Number of messages that were erased so far.
    pub erased: i64,
    /// Number of messages that were looked at so far. Each pass looks at all messages of the
    /// consumers, and the last pass finds nothing.
    pub looked_at: i64,
    /// Number of messages, or of transactions with messages that are not known yet, that others
    /// hold. The erasure cannot end before they let go of them.
    pub in_flight: i64,
    /// What the erasure waits for, as text for a reader.
    pub waits_for: Option<String>,
    /// The proof, once the erasure has ended.
    pub proof: Option<ErasureProofBody>,
}

/// The figures of an erasure that has ended.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[schema(as = ErasureProof)]
pub struct ErasureProofBody {
    /// Name of the tenant.
    pub tenant: String,
    /// Names of the consumers whose messages were looked at.
    pub consumers: Vec<String>,
    /// Id that selected the messages.
    pub message_id: Option<String>,
    /// HMAC-SHA-256 of the key that selected the messages, under a key of the tenant, in
    /// hexadecimal digits.
    pub key_hmac: Option<String>,
    /// Reason that the operator gave.
    pub reason: String,
    /// Name of the token or user that began the erasure.
    pub actor: String,
    /// Time of the begin, by the clock of the database with the inbox.
    pub began_at: DateTime<Utc>,
    /// Time of the end, by the same clock.
    pub ended_at: DateTime<Utc>,
    /// Numbers of erased messages, by consumer and by their state before.
    pub erased: Vec<ErasedCountBody>,
    /// Number of the subject's messages that had been erased before.
    pub already_erased: i64,
    /// Number of erased payloads that edits had replaced.
    pub edits: i64,
    /// Number of erased texts of failures in histories.
    pub errors: i64,
    /// Number of deleted differences of shadows.
    pub differences: i64,
    /// Number of files of the archive that were written again.
    pub archive_files: i64,
    /// Number of messages that were erased in them.
    pub archived: i64,
    /// SHA-256, in hexadecimal digits, over a line `<consumer>/<message id>` for each erased
    /// message. The lines are sorted by their bytes, and each ends with a line feed.
    pub digest: String,
    /// Number of the subject's messages that are still readable, counted after the last one was
    /// erased.
    pub readable: i64,
    /// Tables that were vacuumed.
    pub vacuumed: Vec<String>,
    /// Tables that could not be vacuumed, each with the error.
    pub not_vacuumed: Vec<String>,
    /// What the erasure does not cover.
    pub not_covered: Vec<String>,
    /// Id of the entry `erase` in the audit log.
    pub audit_id: i64,
}

/// A number of erased messages.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[schema(as = ErasedCount)]
pub struct ErasedCountBody {
    /// Name of the consumer.
    pub consumer: String,
    /// State before the erasure.
    pub status: String,
    /// Number of messages.
    pub messages: i64,
}

/// Erase the payloads of a data subject
///
/// Payload, headers, their hash, results and texts of failures of the messages become unreadable in
/// the inbox, its history and its edits, and in the archive. Messages that are not settled are
/// discarded. Ids, keys and positions stay, and another delivery of an id is a duplicate. A request
/// works for a few seconds and answers how far the erasure is; it is repeated until the answer has
/// a proof.
#[utoipa::path(post, path = "/v1/tenants/{tenant}/erase", tag = "inbox",
    params(("tenant" = String, Path)), request_body = NewErasure,
    responses((status = 200, body = ErasureBody)), extensions(("x-role" = json!("admin"))))]
pub(crate) async fn erase(
    caller: Caller,
    Path(tenant): Path<String>,
    extract::Json(new): extract::Json<NewErasure>,
) -> Result<Json<ErasureBody>, ApiError> {
    check_reason(&new.reason)?;
    let target = target(new.message_id, new.key, new.key_hex)?;
    let request = ErasureRequest { target, consumer: new.consumer, reason: new.reason };
    Ok(Json(caller.control.erasures().erase(&tenant, &request).await?.into()))
}

/// Returns what selects the messages: exactly one of the three.
fn target(
    message_id: Option<String>,
    key: Option<String>,
    key_hex: Option<String>,
) -> Result<ErasureTarget, ApiError> {
    let (name, target) = match (message_id, key, key_hex) {
        (Some(id), None, None) => ("message_id", ErasureTarget::MessageId(id)),
        (None, Some(key), None) => ("key", ErasureTarget::Key(key.into_bytes())),
        (None, None, Some(digits)) => {
            let key = hex::decode(digits).map_err(|error| {
                ApiError::invalid(format!("`key_hex` is not in hexadecimal digits: {error}"))
            })?;
            ("key_hex", ErasureTarget::Key(key))
        }
        _ => {
            return Err(ApiError::invalid(
                "an erasure needs exactly one of `message_id`, `key` and `key_hex`",
            ));
        }
    };
    let is_empty = match &target {
        ErasureTarget::MessageId(id) => id.is_empty(),
        ErasureTarget::Key(key) => key.is_empty(),
    };
    if is_empty {
        return Err(ApiError::invalid(format!(
            "`{name}` is empty, and would select no message or those of no subject"
        )));
    }
    Ok(target)
}

impl From<oncebox_control::ErasureProgress> for ErasureBody {
    fn from(progress: oncebox_control::ErasureProgress) -> Self {
        let oncebox_control::ErasureProgress { erased, looked_at, in_flight, waits_for, proof } =
            progress;
        Self { erased, looked_at, in_flight, waits_for, proof: proof.map(Into::into) }
    }
}

impl From<oncebox_control::ErasureProof> for ErasureProofBody {
    fn from(proof: oncebox_control::ErasureProof) -> Self {
        Self {
            tenant: proof.tenant,
            consumers: proof.consumers,
            message_id: proof.message_id,
            key_hmac: proof.key_hmac,
            reason: proof.reason,
            actor: proof.actor,
            began_at: proof.began_at,
            ended_at: proof.ended_at,
            erased: proof.erased.into_iter().map(Into::into).collect(),
            already_erased: proof.already_erased,
            edits: proof.edits,
            errors: proof.errors,
            differences: proof.differences,
            archive_files: proof.archive_files,
            archived: proof.archived,
            digest: proof.digest,
            readable: proof.readable,
            vacuumed: proof.vacuumed,
            not_vacuumed: proof.not_vacuumed,
            not_covered: proof.not_covered,
            audit_id: proof.audit_id,
        }
    }
}

impl From<oncebox_control::ErasedCount> for ErasedCountBody {
    fn from(count: oncebox_control::ErasedCount) -> Self {
        let oncebox_control::ErasedCount { consumer, status, messages } = count;
        Self { consumer, status, messages }
    }
}
