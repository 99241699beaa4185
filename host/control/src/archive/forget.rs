//! Files that an operator takes out of the list, before or after their deletion from the storage.
//! A file is marked first. Its row goes a day later, so that an answer that was lost can be asked
//! for again.

use chrono::{DateTime, Utc};
use oncebox_model::error::InboxError;
use serde_json::json;
use sqlx::{AssertSqlSafe, PgPool};

use super::check_row;
use crate::{audit::Subject, handles::Archive};

/// Time for which a file that was forgotten keeps its row.
const REMEMBERED: &str = "interval '1 day'";

/// Selection of files that are taken out of the list: those that fit all that is given.
#[derive(Debug, Clone, Default)]
pub struct ForgottenFiles {
    /// Name of the tenant, also of a deleted one whose inbox was in the host's database.
    pub tenant: Option<String>,
    /// Name of the consumer of that tenant.
    pub consumer: Option<String>,
    /// Time before which they were written.
    pub before: Option<DateTime<Utc>>,
}

impl Archive<'_> {
    /// Takes files out of the list, and returns their paths. Messages in them are not found any
    /// more. The files themselves stay, and may be deleted afterwards. Files of a partition that is
    /// not dropped yet stay in the list. The same call within a day returns the same paths again.
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
        for database in self.0.tenant_databases().all().await? {
            let pool = &database.database.pool;
            let rows = selected(pool, &self.of(&database).await?, which).await?;
            let paths = self.own_paths(rows).await?;
            mark(pool, &paths).await?;
            forgotten.extend(paths);
        }
        forgotten.sort_unstable();
        Ok(forgotten)
    }

    /// Returns the paths of rows that name a file of their tenant.
    async fn own_paths(&self, rows: Vec<(String, String)>) -> Result<Vec<String>, InboxError> {
        if rows.is_empty() {
            return Ok(Vec::new());
        }
        let installation = self.0.tenant_databases().installation().await?.to_string();
        let is_own =
            |(path, tenant): (String, String)| match check_row(&path, &installation, &tenant) {
                Ok(()) => Some(path),
                Err(error) => {
                    tracing::warn!(%error, "a row of the archive's list was not forgotten");
                    None
                }
            };
        Ok(rows.into_iter().filter_map(is_own).collect())
    }
}

/// Returns the files of a database that are selected, each with its tenant: those of the list, and
/// those that were marked within a day.
async fn selected(
    pool: &PgPool,
    only: &str,
    which: &ForgottenFiles,
) -> Result<Vec<(String, String)>, InboxError> {
    let selected = format!(
        "SELECT f.path, f.tenant FROM oncebox.archive_file f \
         JOIN oncebox.removal r USING (partition_name) \
         WHERE {only} AND (r.state = 'dropped' OR r.began_at <> f.removal_began_at) \
           AND coalesce(f.forgotten_at > now() - {REMEMBERED}, true) \
           AND ($1::text IS NULL OR f.tenant = $1) \
           AND ($2::text IS NULL OR f.consumer = $2) \
           AND ($3::timestamptz IS NULL OR f.written_at < $3)"
    );
    let query = sqlx::query_as(AssertSqlSafe(selected)).bind(&which.tenant);
    Ok(query.bind(&which.consumer).bind(which.before).fetch_all(pool).await?)
}

/// Marks files as forgotten, and deletes the rows of those that were marked long ago.
async fn mark(pool: &PgPool, paths: &[String]) -> Result<(), InboxError> {
    const MARK: &str = "UPDATE oncebox.archive_file SET forgotten_at = now() \
        WHERE path = ANY ($1) AND forgotten_at IS NULL";
    sqlx::query(MARK).bind(paths).execute(pool).await?;
    let old =
        format!("DELETE FROM oncebox.archive_file WHERE forgotten_at <= now() - {REMEMBERED}");
    sqlx::query(AssertSqlSafe(old)).execute(pool).await?;
    Ok(())
}
