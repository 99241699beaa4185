//! The findings of shadows.

use axum::Json;
use chrono::{DateTime, Utc};
use oncebox_control as control;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::{auth::Caller, error::ApiError, extract::Path};

/// Sums and the newest differences of a shadow. Every sampled message that the live version
/// completed is one of `same`, `differ`, `failed` and `skipped`.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
#[schema(as = ShadowReport)]
pub struct ShadowReportBody {
    /// The deployment.
    pub deployment_id: i64,
    /// Sampled messages that the live version completed.
    pub messages: i64,
    /// Messages with equal answers and changes of both versions.
    pub same: i64,
    /// Messages with different answers or changes.
    pub differ: i64,
    /// Messages on which the candidate failed and the live version did not.
    pub failed: i64,
    /// Messages that were not compared, by reason.
    pub skipped: Vec<ShadowSkippedBody>,
    /// Tables whose changes are not captured yet, while the shadow is live. No message is compared
    /// before the list is empty.
    #[serde(default)]
    pub uncaptured_tables: Vec<String>,
    /// Wall-clock time of the live version over the compared messages, microseconds.
    pub live_us: i64,
    /// Wall-clock time of the candidate over the compared messages, microseconds.
    pub candidate_us: i64,
    /// Number of statements of the live version over the compared messages.
    pub live_statements: i64,
    /// Number of statements of the candidate over the compared messages.
    pub candidate_statements: i64,
    /// Time of the first sums; null where nothing was compared yet.
    pub first_at: Option<DateTime<Utc>>,
    /// Time of the last sums.
    pub last_at: Option<DateTime<Utc>>,
    /// Kinds of difference with their numbers of messages, most first.
    pub sums: Vec<ShadowSumBody>,
    /// The newest differences, newest first.
    pub differences: Vec<ShadowDifferenceBody>,
}

/// Messages that were not compared for one reason.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
#[schema(as = ShadowSkipped)]
pub struct ShadowSkippedBody {
    /// Reason, stable for programs.
    pub reason: String,
    /// Reason, as text for a reader.
    pub meaning: String,
    /// Number of messages.
    pub messages: i64,
}

/// One kind of difference.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
#[schema(as = ShadowSum)]
pub struct ShadowSumBody {
    /// The table; empty where the outcome differs.
    pub table: String,
    /// `inserted`, `updated`, `deleted` or `outcome`.
    pub change: String,
    /// The column; empty where only one version has the row; `result` or `failure` for an outcome.
    pub column: String,
    /// Number of messages.
    pub messages: i64,
}

/// One difference in one message. Values are texts of PostgreSQL, cut after a kibibyte. They are
/// absent where the consumer's policy keeps no payloads.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
#[schema(as = ShadowDifference)]
pub struct ShadowDifferenceBody {
    /// Time of the record.
    pub at: DateTime<Utc>,
    /// Id of the message.
    pub message_id: String,
    /// The table, as in `sums`.
    pub table: String,
    /// The change, as in `sums`.
    pub change: String,
    /// The column, as in `sums`.
    pub column: String,
    /// The row's primary key, as a JSON object.
    pub row_key: Option<String>,
    /// The value before both runs.
    pub before: Option<String>,
    /// The value after the live version.
    pub live: Option<String>,
    /// The value after the candidate.
    pub candidate: Option<String>,
}

impl From<control::ShadowReport> for ShadowReportBody {
    fn from(report: control::ShadowReport) -> Self {
        let skipped = report.skipped.into_iter();
        let skipped = skipped.map(|of| ShadowSkippedBody {
            reason: of.reason,
            meaning: of.meaning.to_owned(),
            messages: of.messages,
        });
        let sums = report.sums.into_iter();
        let sums = sums.map(|control::ShadowSum { table, change, column, messages }| {
            ShadowSumBody { table, change, column, messages }
        });
        Self {
            deployment_id: report.deployment_id,
            messages: report.messages,
            same: report.same,
            differ: report.differ,
            failed: report.failed,
            skipped: skipped.collect(),
            uncaptured_tables: report.uncaptured_tables,
            live_us: report.live_us,
            candidate_us: report.candidate_us,
            live_statements: report.live_statements,
            candidate_statements: report.candidate_statements,
            first_at: report.first_at,
            last_at: report.last_at,
            sums: sums.collect(),
            differences: report.differences.into_iter().map(Into::into).collect(),
        }
    }
}

impl From<control::ShadowDifference> for ShadowDifferenceBody {
    fn from(difference: control::ShadowDifference) -> Self {
        let control::ShadowDifference {
            at,
            message_id,
            table,
            change,
            column,
            row_key,
            before,
            live,
            candidate,
        } = difference;
        Self { at, message_id, table, change, column, row_key, before, live, candidate }
    }
}

/// List the differences of a shadow
#[utoipa::path(get, path = "/v1/tenants/{tenant}/consumers/{consumer}/deployments/{deployment_id}/differences", tag = "deployments",
    params(("tenant" = String, Path), ("consumer" = String, Path), ("deployment_id" = i64, Path)),
    responses((status = 200, body = ShadowReportBody)), extensions(("x-role" = json!("viewer"))))]
pub(crate) async fn differences(
    caller: Caller,
    Path((tenant, consumer, deployment_id)): Path<(String, String, i64)>,
) -> Result<Json<ShadowReportBody>, ApiError> {
    let consumer = caller.control.consumers().get(&tenant, &consumer).await?;
    // The deployment must be one of this consumer's.
    caller.control.deployments().get(consumer.consumer_id, deployment_id).await?;
    Ok(Json(caller.control.shadows().report(deployment_id).await?.into()))
}
