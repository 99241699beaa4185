//! Outcomes of `oncebox verify` for a version, stored by whoever ran it. A host cannot repeat them:
//! it kills no process of its own, and has no messages to try.

use chrono::{DateTime, Utc};
use oncebox_model::error::InboxError;
use serde_json::json;

use super::version::find;
use crate::{audit::Subject, handles::Versions};

/// Outcomes of a version that are kept; older ones are deleted.
const KEPT: i64 = 20;

/// An outcome of `oncebox verify` to be stored.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NewVerification {
    /// Whether every window left each effect exactly once.
    pub is_passed: bool,
    /// Messages that were delivered, without repetitions.
    pub messages: i32,
    /// Windows that were tried.
    pub windows: i32,
    /// Windows that failed.
    pub windows_failed: i32,
    /// Workers that were killed.
    pub killed: i32,
    /// Warnings about the handler's statements.
    pub warnings: i32,
    /// Seed of orders and repetitions.
    pub seed: i64,
    /// Release of the program that verified.
    pub program_version: String,
}

/// A stored outcome of `oncebox verify`.
#[derive(Debug, Clone, PartialEq, Eq, sqlx::FromRow)]
pub struct Verification {
    /// Key; grows with time.
    pub verification_id: i64,
    /// Time at which it was stored.
    pub at: DateTime<Utc>,
    /// Actor that stored it.
    pub actor: String,
    /// Whether every window left each effect exactly once.
    pub is_passed: bool,
    /// Messages that were delivered, without repetitions.
    pub messages: i32,
    /// Windows that were tried.
    pub windows: i32,
    /// Windows that failed.
    pub windows_failed: i32,
    /// Workers that were killed.
    pub killed: i32,
    /// Warnings about the handler's statements.
    pub warnings: i32,
    /// Seed of orders and repetitions.
    pub seed: i64,
    /// Release of the program that verified.
    pub program_version: String,
}

impl NewVerification {
    fn check(&self) -> Result<(), InboxError> {
        let Self { messages, windows, windows_failed, killed, warnings, .. } = self;
        let are_counts = *messages > 0
            && *windows > 0
            && *killed > 0
            && *warnings >= 0
            && (0..=*windows).contains(windows_failed);
        if !are_counts {
            return Err(InboxError::Invalid(
                "a verification has a message, a window and a killed worker at least, and no count \
                    below zero"
                    .to_owned(),
            ));
        }
        if self.is_passed && *windows_failed > 0 {
            return Err(InboxError::Invalid(
                "no window of a verification that passed has failed".to_owned(),
            ));
        }
        Ok(())
    }
}

impl Versions<'_> {
    /// Stores an outcome of `oncebox verify` for a version, and deletes those beyond the newest
    /// twenty. Returns the stored outcome.
    ///
    /// # Errors
    /// `NotFound` where there is no such version. `Invalid` for counts that no run can have.
    pub async fn attest(
        &self,
        tenant: &str,
        handler: &str,
        digest: &str,
        new: &NewVerification,
    ) -> Result<Verification, InboxError> {
        const INSERT: &str = "INSERT INTO oncebox.verification (version_id, actor, is_passed, \
            messages, windows, windows_failed, killed, warnings, seed, program_version) \
            VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10) RETURNING verification_id, at, actor, \
            is_passed, messages, windows, windows_failed, killed, warnings, seed, program_version";
        const DELETE: &str = "DELETE FROM oncebox.verification WHERE version_id = $1 AND \
            verification_id NOT IN (SELECT verification_id FROM oncebox.verification \
            WHERE version_id = $1 ORDER BY verification_id DESC LIMIT $2)";
        new.check()?;
        let tenant = self.0.tenants().get(tenant).await?;
        let mut tx = self.0.pool.begin().await?;
        let version = find(&mut tx, tenant.tenant_id, handler, digest).await?;
        let stored: Verification = sqlx::query_as(INSERT)
            .bind(version.version_id)
            .bind(&self.0.actor)
            .bind(new.is_passed)
            .bind(new.messages)
            .bind(new.windows)
            .bind(new.windows_failed)
            .bind(new.killed)
            .bind(new.warnings)
            .bind(new.seed)
            .bind(&new.program_version)
            .fetch_one(&mut *tx)
            .await?;
        sqlx::query(DELETE).bind(version.version_id).bind(KEPT).execute(&mut *tx).await?;
        let details = json!({
            "digest": hex::encode(version.digest), "is_passed": new.is_passed,
            "windows": new.windows, "windows_failed": new.windows_failed, "killed": new.killed,
        });
        self.0
            .audit()
            .record(&mut tx, "version.attest", Subject::of(&tenant.name, handler), details)
            .await?;
        tx.commit().await?;
        Ok(stored)
    }

    /// Lists the stored outcomes of `oncebox verify` for a version, newest first.
    ///
    /// # Errors
    /// `NotFound` where there is no such version.
    pub async fn verifications(
        &self,
        tenant: &str,
        handler: &str,
        digest: &str,
    ) -> Result<Vec<Verification>, InboxError> {
        const LIST: &str = "SELECT verification_id, at, actor, is_passed, messages, windows, \
            windows_failed, killed, warnings, seed, program_version FROM oncebox.verification \
            WHERE version_id = $1 ORDER BY verification_id DESC";
        let version = self.get(tenant, handler, digest).await?;
        Ok(sqlx::query_as(LIST).bind(version.version_id).fetch_all(&self.0.pool).await?)
    }
}
