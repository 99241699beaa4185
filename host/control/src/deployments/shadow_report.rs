//! What a shadow found, for people and programs.

use oncebox_model::error::InboxError;
use serde_json::Value;
use sqlx::types::chrono::{DateTime, Utc};

use crate::control::Admin;

/// Sums and the newest differences of one shadow. Every message that was sampled and completed is
/// one of `same`, `differ`, `failed` and `skipped`.
#[derive(Debug, Clone, Default, serde::Serialize)]
pub struct ShadowReport {
    /// The deployment.
    pub deployment_id: i64,
    /// Messages in the sample that the live version completed.
    pub messages: i64,
    /// Both versions answered and changed the same.
    pub same: i64,
    /// They did not.
    pub differ: i64,
    /// The candidate failed where the live version did not.
    pub failed: i64,
    /// Not compared.
    pub skipped: Vec<ShadowSkipped>,
    /// Tables of the tenant without the trigger that captures their changes, while the shadow is
    /// live: no message is compared until there is none.
    pub uncaptured_tables: Vec<String>,
    /// Wall clock of the live version, of the messages that were compared, microseconds.
    pub live_us: i64,
    /// The same of the candidate.
    pub candidate_us: i64,
    /// Statements of the live version, of the messages that were compared.
    pub live_statements: i64,
    /// The same of the candidate.
    pub candidate_statements: i64,
    /// When the first and the last sums were written; none: nothing was compared yet.
    pub first_at: Option<DateTime<Utc>>,
    /// See `first_at`.
    pub last_at: Option<DateTime<Utc>>,
    /// In how many messages something differs in the same way, most first.
    pub sums: Vec<ShadowSum>,
    /// The newest differences, newest first.
    pub differences: Vec<ShadowDifference>,
}

/// Messages that were not compared.
#[derive(Debug, Clone, serde::Serialize)]
pub struct ShadowSkipped {
    /// A stable name.
    pub reason: String,
    /// What it means.
    pub meaning: &'static str,
    /// How many.
    pub messages: i64,
}

/// One way in which messages differ.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize, sqlx::FromRow)]
pub struct ShadowSum {
    /// The table; empty where the outcome differs.
    pub table: String,
    /// inserted, updated, deleted, or outcome.
    pub change: String,
    /// The column; empty where only one version has the row; `result` or `failure` of an outcome.
    pub column: String,
    /// How many messages.
    pub messages: i64,
}

/// One difference in one message. Values are as PostgreSQL writes them, cut after a kibibyte, and
/// absent where the consumer's policy keeps no payloads.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize, sqlx::FromRow)]
pub struct ShadowDifference {
    /// When it was written.
    pub at: DateTime<Utc>,
    /// The message.
    pub message_id: String,
    /// As in [`ShadowSum`].
    pub table: String,
    /// As in [`ShadowSum`].
    pub change: String,
    /// As in [`ShadowSum`].
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

impl Admin {
    /// What a shadow has found so far; nothing, where it has found nothing yet.
    pub async fn shadow_report(&self, deployment_id: i64) -> Result<ShadowReport, InboxError> {
        const ROLE: &str = "SELECT d.role, c.tenant_id, d.ended_at IS NULL FROM oncebox.deployment \
            d JOIN oncebox.consumer c USING (consumer_id) WHERE d.deployment_id = $1";
        let found: Option<(String, i32, bool)> =
            sqlx::query_as(ROLE).bind(deployment_id).fetch_optional(&self.pool).await?;
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
        // What it found speaks of the tenant's rows, and is kept beside them.
        const TENANT: &str = "SELECT * FROM oncebox.tenant WHERE tenant_id = $1";
        let tenant = sqlx::query_as(TENANT)
            .bind(found.as_ref().map(|(_, tenant_id, _)| *tenant_id))
            .fetch_one(&self.pool)
            .await?;
        let is_live = found.is_some_and(|(.., is_live)| is_live);
        let uncaptured_tables =
            if is_live { self.uncaptured_tables(&tenant).await? } else { Vec::new() };
        let pool = &self.place(&tenant)?.pool;
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

/// The reasons for which messages are not compared, and what they mean.
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

/// What is known of the reasons, for people.
fn reasons(counts: &Value) -> Vec<(String, i64, &'static str)> {
    let known = |name: &str| {
        REASONS.iter().find(|(reason, _)| *reason == name).map_or("", |(_, meaning)| *meaning)
    };
    let counts = counts.as_object().into_iter().flatten();
    counts
        .map(|(name, count)| (name.clone(), count.as_i64().unwrap_or_default(), known(name)))
        .collect()
}
