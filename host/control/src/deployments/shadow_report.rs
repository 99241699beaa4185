//! Results of a shadow, for operators and programs.

use oncebox_model::error::InboxError;
use serde_json::Value;
use sqlx::types::chrono::{DateTime, Utc};

use crate::handles::Shadows;

/// Sums and newest differences of one shadow. Every sampled message that the live version completed
/// counts once: in `same`, `differ`, `failed` or `skipped`.
#[derive(Debug, Clone, Default, serde::Serialize)]
pub struct ShadowReport {
    /// Key of the shadow's deployment.
    pub deployment_id: i64,
    /// Messages in the sample that the live version completed.
    pub messages: i64,
    /// Messages for which both versions gave equal answers and made equal changes.
    pub same: i64,
    /// Messages for which the answers or the changes differ.
    pub differ: i64,
    /// Messages that the candidate failed and the live version did not.
    pub failed: i64,
    /// Messages that were not compared, by reason.
    pub skipped: Vec<ShadowSkipped>,
    /// Tables of the tenant without the trigger that captures their changes, while the shadow is
    /// live. No message is compared while any table is listed.
    pub uncaptured_tables: Vec<String>,
    /// Wall-clock time of the live version for the compared messages, microseconds.
    pub live_us: i64,
    /// Wall-clock time of the candidate for the compared messages, microseconds.
    pub candidate_us: i64,
    /// Statements of the live version for the compared messages.
    pub live_statements: i64,
    /// Statements of the candidate for the compared messages.
    pub candidate_statements: i64,
    /// Time at which the first sums were written; none before the first comparison.
    pub first_at: Option<DateTime<Utc>>,
    /// Time at which the last sums were written; none before the first comparison.
    pub last_at: Option<DateTime<Utc>>,
    /// Ways in which messages differ, with the number of messages of each, most first.
    pub sums: Vec<ShadowSum>,
    /// The newest differences, newest first.
    pub differences: Vec<ShadowDifference>,
}

/// Messages that were not compared for one reason.
#[derive(Debug, Clone, serde::Serialize)]
pub struct ShadowSkipped {
    /// Stable name of the reason.
    pub reason: String,
    /// Meaning of the reason, for operators.
    pub meaning: &'static str,
    /// Number of messages.
    pub messages: i64,
}

/// One way in which messages differ.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize, sqlx::FromRow)]
pub struct ShadowSum {
    /// Table with the difference; empty where the outcome differs.
    pub table: String,
    /// Kind of change: inserted, updated, deleted, or outcome.
    pub change: String,
    /// Column with the difference; empty where only one version has the row. `result` or `failure`
    /// for an outcome.
    pub column: String,
    /// Number of messages that differ in this way.
    pub messages: i64,
}

/// One difference in one message. Values are in PostgreSQL's text form, cut after a kibibyte. They
/// are absent where the consumer's policy keeps no payloads.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize, sqlx::FromRow)]
pub struct ShadowDifference {
    /// Time at which the difference was written.
    pub at: DateTime<Utc>,
    /// Id of the message.
    pub message_id: String,
    /// Table, as in [`ShadowSum`].
    pub table: String,
    /// Kind of change, as in [`ShadowSum`].
    pub change: String,
    /// Column, as in [`ShadowSum`].
    pub column: String,
    /// Primary key of the row, as a JSON object.
    pub row_key: Option<String>,
    /// Value before both runs.
    pub before: Option<String>,
    /// Value after the run of the live version.
    pub live: Option<String>,
    /// Value after the run of the candidate.
    pub candidate: Option<String>,
}

#[derive(sqlx::FromRow)]
struct Total {
    messages: i64,
    same: i64,
    differ: i64,
    failed: i64,
    skipped: Value,
    live_us: i64,
    candidate_us: i64,
    live_statements: i64,
    candidate_statements: i64,
    first_at: DateTime<Utc>,
    last_at: DateTime<Utc>,
}

impl Shadows<'_> {
    /// Returns the results of a shadow so far; an empty report before the first comparison. Refuses
    /// a deployment that is not a shadow.
    ///
    /// # Errors
    /// `NotFound` where there is no such deployment. `Invalid` where it is no shadow.
    pub async fn report(&self, deployment_id: i64) -> Result<ShadowReport, InboxError> {
        const ROLE: &str = "SELECT d.role, c.tenant_id, d.ended_at IS NULL FROM oncebox.deployment \
            d JOIN oncebox.consumer c USING (consumer_id) WHERE d.deployment_id = $1";
        let found: Option<(String, i32, bool)> =
            sqlx::query_as(ROLE).bind(deployment_id).fetch_optional(&self.0.pool).await?;
        match found.as_ref().map(|(role, ..)| role.as_str()) {
            None => {
                return Err(InboxError::NotFound(format!(
                    "there is no deployment {deployment_id}"
                )));
            }
            Some("shadow") => {}
            Some(role) => {
                return Err(InboxError::Invalid(format!(
                    "deployment {deployment_id} is no shadow but `{role}`; only a shadow has \
                        differences"
                )));
            }
        }
        // The results contain the tenant's row values, so they are stored in the tenant's database.
        const TENANT: &str = "SELECT * FROM oncebox.tenant WHERE tenant_id = $1";
        let tenant = sqlx::query_as(TENANT)
            .bind(found.as_ref().map(|(_, tenant_id, _)| *tenant_id))
            .fetch_one(&self.0.pool)
            .await?;
        let is_live = found.is_some_and(|(.., is_live)| is_live);
        let uncaptured_tables =
            if is_live { self.uncaptured_tables(&tenant).await? } else { Vec::new() };
        let pool = &self.0.tenant_databases().get(&tenant)?.pool;
        let total: Option<Total> =
            sqlx::query_as("SELECT * FROM oncebox.shadow_total WHERE deployment_id = $1")
                .bind(deployment_id)
                .fetch_optional(pool)
                .await?;
        let Some(total) = total else {
            return Ok(ShadowReport {
                deployment_id,
                uncaptured_tables,
                ..ShadowReport::default()
            });
        };
        const SUMS: &str = "SELECT \"table\", change, \"column\", messages FROM oncebox.shadow_sum \
            WHERE deployment_id = $1 \
            ORDER BY messages DESC, \"table\", change, \"column\"";
        const NEWEST: &str = "SELECT at, message_id, \"table\", change, \"column\", row_key, \
            before, live, candidate \
            FROM oncebox.shadow_difference WHERE deployment_id = $1 ORDER BY difference_id DESC";
        Ok(ShadowReport {
            deployment_id,
            messages: total.messages,
            same: total.same,
            differ: total.differ,
            failed: total.failed,
            skipped: reasons(&total.skipped)
                .into_iter()
                .map(|(reason, messages, meaning)| ShadowSkipped { reason, meaning, messages })
                .collect(),
            uncaptured_tables,
            live_us: total.live_us,
            candidate_us: total.candidate_us,
            live_statements: total.live_statements,
            candidate_statements: total.candidate_statements,
            first_at: Some(total.first_at),
            last_at: Some(total.last_at),
            sums: sqlx::query_as(SUMS).bind(deployment_id).fetch_all(pool).await?,
            differences: sqlx::query_as(NEWEST).bind(deployment_id).fetch_all(pool).await?,
        })
    }
}

/// Reasons for which messages are not compared, with their meaning.
const REASONS: &[(&str, &str)] = &[
    ("queue_full", "the host was behind with trials"),
    ("no_connection", "no connection to the database was to spare"),
    ("stood_in_the_way", "another session waited for the trial, which was stopped"),
    ("busy", "a row was locked by another session"),
    ("time", "the candidate was stopped after the shadow's `duration_ms`"),
    ("too_many_changes", "the live version changed more rows, or more bytes, than are captured"),
    ("candidate_changes", "the candidate changed more rows, or more bytes, than are captured"),
    ("not_captured", "changes could not be captured"),
    ("not_installed", "a table of the tenant does not have its trigger yet"),
    ("moved_on", "the rows could not be brought back to what the live version saw"),
    ("stale", "deployments changed meanwhile"),
    ("database", "the connection to the database broke, or the database was not well"),
];

/// Returns each reason with its number of messages and its meaning. The meaning of an unknown
/// reason is empty.
fn reasons(counts: &Value) -> Vec<(String, i64, &'static str)> {
    let known = |name: &str| {
        REASONS.iter().find(|(reason, _)| *reason == name).map_or("", |(_, meaning)| *meaning)
    };
    let counts = counts.as_object().into_iter().flatten();
    counts
        .map(|(name, count)| (name.clone(), count.as_i64().unwrap_or_default(), known(name)))
        .collect()
}
