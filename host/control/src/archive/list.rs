//! Lists of the archive's files, and sums over them. Nothing here reads a file.

use chrono::{DateTime, Utc};
use oncebox_archive::Footer;
use oncebox_model::error::InboxError;
use sqlx::{AssertSqlSafe, PgPool};

use crate::{database::tenant_database::InboxDatabase, handles::Archive};

/// A file of the archive, which was read back and found whole.
#[derive(Debug, Clone, sqlx::FromRow)]
pub struct ArchivedFile {
    /// Path below the location of the archive.
    pub path: String,
    /// Name of the time partition that held its messages.
    pub partition_name: String,
    /// Name of the tenant.
    pub tenant: String,
    /// Key of the consumer. Another one may have its name now.
    pub consumer_id: i32,
    /// Name of the consumer.
    pub consumer: String,
    /// Lowest message id, in the order of bytes.
    pub first_id: String,
    /// Highest message id, in the order of bytes.
    pub last_id: String,
    /// Number of messages.
    pub rows: i64,
    /// Length of the file, bytes.
    pub bytes: i64,
    /// SHA-256 of the SHA-256 of each id, in the order of the ids' bytes, in hexadecimal digits.
    pub id_digest: String,
    /// Begin of the partition's time.
    pub from_at: DateTime<Utc>,
    /// End of the partition's time, exclusive.
    pub to_at: DateTime<Utc>,
    /// Time at which it was read back.
    pub verified_at: DateTime<Utc>,
    footer_bytes: i64,
    footer_digest: Vec<u8>,
}

/// Selection of files.
#[derive(Debug, Clone, Default)]
pub struct ArchiveFilter {
    /// Only files of this tenant.
    pub tenant: Option<String>,
    /// Only files of consumers of this name.
    pub consumer: Option<String>,
    /// Most files.
    pub limit: i64,
}

/// Sums over the files of a consumer.
#[derive(Debug, Clone, sqlx::FromRow)]
pub struct ArchiveTotal {
    /// Name of the tenant.
    pub tenant: String,
    /// Name of the consumer.
    pub consumer: String,
    /// Number of files.
    pub files: i64,
    /// Bytes of the files.
    pub bytes: i64,
}

/// Files `f` with the time of their partition; a condition may follow.
pub(super) const FILES: &str = "SELECT f.path, f.partition_name, f.tenant, f.consumer_id, \
        f.consumer, f.first_id, f.last_id, f.rows, f.bytes, encode(f.id_digest, 'hex') AS id_digest, \
        r.from_at, r.to_at, f.verified_at, f.footer_bytes, f.footer_digest \
    FROM oncebox.archive_file f JOIN oncebox.removal r USING (partition_name) \
    WHERE f.forgotten_at IS NULL";

impl ArchivedFile {
    /// Returns the footer with which it was written; none where its row was changed by hand.
    pub(super) fn footer(&self) -> Option<Footer> {
        let digest = self.footer_digest.as_slice().try_into().ok()?;
        Some(Footer { bytes: self.footer_bytes.try_into().ok()?, digest })
    }
}

impl Archive<'_> {
    /// Lists files, the newest first. A list over all tenants leaves out those whose own database
    /// does not answer, and logs that. It has files of deleted tenants whose inbox was in the
    /// host's database. A list of one tenant has none of another that had its name before.
    ///
    /// # Errors
    /// An error of a database. `NotFound` where there is no such tenant.
    pub async fn files(&self, filter: &ArchiveFilter) -> Result<Vec<ArchivedFile>, InboxError> {
        let mut files = match &filter.tenant {
            Some(tenant) => {
                let tenant = self.0.tenants().get(tenant).await?;
                let database = self.0.tenant_databases().get(&tenant)?;
                let only = format!("f.tenant_id = {}", tenant.tenant_id);
                files(&database.pool, &only, filter).await?
            }
            None => self.files_of_all(filter).await?,
        };
        files.sort_by(|a, b| (b.verified_at, &a.path).cmp(&(a.verified_at, &b.path)));
        files.truncate(filter.limit.max(0) as usize);
        Ok(files)
    }

    async fn files_of_all(&self, filter: &ArchiveFilter) -> Result<Vec<ArchivedFile>, InboxError> {
        let mut all = Vec::new();
        for database in self.0.tenant_databases().all().await? {
            let only = self.of(&database).await?;
            match (files(database.pool(), &only, filter).await, database.name()) {
                (Ok(files), _) => all.extend(files),
                (Err(error), None) => return Err(error),
                (Err(error), Some(database)) => {
                    tracing::warn!(database, %error, "files of the archive not listed");
                }
            }
        }
        Ok(all)
    }

    /// Returns some files of a database, chosen by chance. A row in a tenant's own database may
    /// name any file.
    pub(crate) async fn sample(
        &self,
        database: &InboxDatabase,
        limit: i64,
    ) -> Result<Vec<ArchivedFile>, InboxError> {
        let only = self.of(database).await?;
        let sample = format!("{FILES} AND {only} ORDER BY random() LIMIT $1");
        let query = sqlx::query_as(AssertSqlSafe(sample)).bind(limit);
        Ok(query.fetch_all(&database.database.pool).await?)
    }

    /// Sums up the files of a database, by consumer.
    ///
    /// # Errors
    /// An error of the database.
    pub async fn totals(&self, database: &InboxDatabase) -> Result<Vec<ArchiveTotal>, InboxError> {
        let sums = format!(
            "SELECT f.tenant, f.consumer, count(*) AS files, sum(f.bytes)::bigint AS bytes \
             FROM oncebox.archive_file f WHERE f.forgotten_at IS NULL AND {} \
             GROUP BY 1, 2 ORDER BY 1, 2",
            self.of(database).await?
        );
        Ok(sqlx::query_as(AssertSqlSafe(sums)).fetch_all(&database.database.pool).await?)
    }

    /// Returns the condition for the files of a database: those of the tenants in it, whatever
    /// tenants its rows name. The host's has those of deleted tenants, too.
    pub(super) async fn of(&self, database: &InboxDatabase) -> Result<String, InboxError> {
        let Some(name) = database.name() else { return Ok("true".to_owned()) };
        let tenants = self.0.tenant_databases().tenants_in(Some(name)).await?;
        // The names of tenants have no quotes.
        let quoted: Vec<_> = tenants.iter().map(|tenant| format!("'{tenant}'")).collect();
        Ok(format!("f.tenant = ANY (ARRAY[{}]::text[])", quoted.join(", ")))
    }
}

async fn files(
    pool: &PgPool,
    only: &str,
    filter: &ArchiveFilter,
) -> Result<Vec<ArchivedFile>, InboxError> {
    let list = format!(
        "{FILES} AND {only} AND ($1::text IS NULL OR f.consumer = $1) \
         ORDER BY f.verified_at DESC, f.path LIMIT $2"
    );
    let query = sqlx::query_as(AssertSqlSafe(list)).bind(&filter.consumer).bind(filter.limit);
    Ok(query.fetch_all(pool).await?)
}
