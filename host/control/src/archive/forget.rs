//! Files that an operator takes out of the list, before or after their deletion from the storage.

use chrono::{DateTime, Utc};
use oncebox_model::error::InboxError;
use serde_json::json;
use sqlx::AssertSqlSafe;

use super::list::of;
use crate::{audit::Subject, handles::Archive};

/// Selection of files that are taken out of the list: those that fit all that is given.
#[derive(Debug, Clone, Default)]
pub struct ForgottenFiles {
    /// Name of the tenant, also of a deleted one.
    pub tenant: Option<String>,
    /// Name of the consumer of that tenant.
    pub consumer: Option<String>,
    /// Time before which they were written.
    pub before: Option<DateTime<Utc>>,
}

impl Archive<'_> {
    /// Takes files out of the list, and returns their paths. Messages in them are not found any
    /// more. The files themselves stay, and may be deleted afterwards. Files of a partition that is
    /// not dropped yet stay in the list.
    ///
    /// # Errors
    /// `Invalid` where neither a tenant nor a time is given, or a consumer without its tenant. An
    /// error of a database; then files in other databases may be forgotten already.
    pub async fn forget(&self, which: &ForgottenFiles) -> Result<Vec<String>, InboxError> {
        let ForgottenFiles { tenant, consumer, before } = which;
        if tenant.is_none() && (before.is_none() || consumer.is_some()) {
            return Err(InboxError::Invalid(
                "name the tenant of the files, or the time before which they were written; a \
                    consumer needs its tenant"
                    .to_owned(),
            ));
        }
        // First, since what is forgotten in a tenant's own database is so whatever comes after.
        let mut tx = self.0.pool.begin().await?;
        let subject = match (tenant, consumer) {
            (None, _) => Subject::platform("archive"),
            (Some(tenant), None) => Subject::tenant(tenant),
            (Some(tenant), Some(consumer)) => Subject::of(tenant, consumer),
        };
        let details = json!({ "tenant": tenant, "consumer": consumer, "before": before });
        self.0.audit().record(&mut tx, "archive.forget", subject, details).await?;
        tx.commit().await?;
        let mut forgotten = Vec::new();
        for database in self.0.retention().databases().await? {
            let forget = format!(
                "DELETE FROM oncebox.archive_file f USING oncebox.removal r \
                 WHERE r.partition_name = f.partition_name AND {of} \
                   AND (r.state = 'dropped' OR r.began_at <> f.removal_began_at) \
                   AND ($1::text IS NULL OR f.tenant = $1) \
                   AND ($2::text IS NULL OR f.consumer = $2) \
                   AND ($3::timestamptz IS NULL OR f.written_at < $3) RETURNING f.path",
                of = of(&database)
            );
            let query = sqlx::query_scalar(AssertSqlSafe(forget)).bind(tenant).bind(consumer);
            let paths: Vec<String> = query.bind(before).fetch_all(&database.database.pool).await?;
            forgotten.extend(paths);
        }
        forgotten.sort_unstable();
        Ok(forgotten)
    }
}
