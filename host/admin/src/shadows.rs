//! What shadows found.

use axum::Json;
use chrono::{DateTime, Utc};
use oncebox_inbox as inbox;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::{auth::Caller, error::ApiError, extract::Path};

/// Sums and the newest differences of a shadow. Every sampled message that the live version
/// completed is one of `same`, `differ`, `failed` and `skipped`.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct ShadowReport {
    /// The deployment.
    pub deployment_id: i64,
    /// Sampled messages that the live version completed.
    pub messages: i64,
    /// Both versions answered and changed the same.
    pub same: i64,
    /// They did not.
    pub differ: i64,
    /// The candidate failed where the live version did not.
    pub failed: i64,
    /// Not compared.
    pub skipped: Vec<ShadowSkipped>,
    /// Tables whose changes are not captured yet, while the shadow is live: no message is compared
    /// until there is none.
    #[serde(default)]
    pub uncaptured_tables: Vec<String>,
    /// Wall clock of the live version, of the messages that were compared, microseconds.
    pub live_us: i64,
    /// The same of the candidate.
    pub candidate_us: i64,
    /// Statements of the live version, of the messages that were compared.
    pub live_statements: i64,
    /// The same of the candidate.
    pub candidate_statements: i64,
    /// When the first sums were written; none where nothing was compared yet.
    pub first_at: Option<DateTime<Utc>>,
    /// When the last ones were.
    pub last_at: Option<DateTime<Utc>>,
    /// In how many messages something differs in the same way, most first.
    pub sums: Vec<ShadowSum>,
    /// The newest differences, newest first.
    pub differences: Vec<ShadowDifference>,
}

/// Messages that were not compared.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct ShadowSkipped {
    /// Why; stable, for programs.
    pub reason: String,
    /// Why, for people.
    pub meaning: String,
    /// How many.
    pub messages: i64,
}

/// One way in which messages differ.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct ShadowSum {
    /// The table; empty where the outcome differs.
    pub table: String,
    /// `inserted`, `updated`, `deleted` or `outcome`.
    pub change: String,
    /// The column; empty where only one version has the row; `result` or `failure` of an outcome.
    pub column: String,
    /// How many messages.
    pub messages: i64,
}

/// One difference in one message. Values are as PostgreSQL writes them, cut after a kibibyte, and
/// absent where the consumer's policy keeps no payloads.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct ShadowDifference {
    /// When it was written.
    pub at: DateTime<Utc>,
    /// The message.
    pub message_id: String,
    /// As in the sums.
    pub table: String,
    /// As in the sums.
    pub change: String,
    /// As in the sums.
    pub column: String,
    /// The row's primary key, as a JSON object.
    pub row_key: Option<String>,
    /// The value before both runs.
    pub before: Option<String>,
    /// After the live version.
    pub live: Option<String>,
    /// After the candidate.
    pub candidate: Option<String>,
}

impl From<inbox::ShadowReport> for ShadowReport {
    fn from(report: inbox::ShadowReport) -> Self {
        let skipped = report.skipped.into_iter();
        let skipped = skipped.map(|of| ShadowSkipped {
            reason: of.reason,
            meaning: of.meaning.to_owned(),
            messages: of.messages,
        });
        let sums = report.sums.into_iter();
        let sums = sums.map(|inbox::ShadowSum { table, change, column, messages }| ShadowSum {
            table,
            change,
            column,
            messages,
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

impl From<inbox::ShadowDifference> for ShadowDifference {
    fn from(difference: inbox::ShadowDifference) -> Self {
        let inbox::ShadowDifference {
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

/// What a shadow would have done differently
#[utoipa::path(get, path = "/v1/tenants/{tenant}/consumers/{consumer}/deployments/{deployment_id}/differences", tag = "deployments",
    params(("tenant" = String, Path), ("consumer" = String, Path), ("deployment_id" = i64, Path)),
    responses((status = 200, body = ShadowReport)), extensions(("x-role" = json!("viewer"))))]
pub(crate) async fn differences(
    caller: Caller,
    Path((tenant, consumer, deployment_id)): Path<(String, String, i64)>,
) -> Result<Json<ShadowReport>, ApiError> {
    let consumer = caller.admin.consumer(&tenant, &consumer).await?;
    // It must be one of this consumer's.
    caller.admin.deployment(consumer.consumer_id, deployment_id).await?;
    Ok(Json(caller.admin.shadow_report(deployment_id).await?.into()))
}
