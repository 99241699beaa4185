//! Attempts to write a file. Each has a row from before the first message is read until the file is
//! recorded, so that nothing of a message is in a file that no row names. The row of a process that
//! died stays for the next run, which deletes the file.

use oncebox_archive::ArchiveError;
use oncebox_model::error::InboxError;
use sqlx::PgConnection;

use super::{consumers::ArchivedConsumer, is_file_of, write::PartitionWork};

impl PartitionWork<'_, '_> {
    /// Begins an attempt, and returns the path of its file. No other attempt has it: what was read
    /// back is never written again, not even by a put of an earlier attempt that goes on.
    pub(super) async fn begin_attempt(
        &self,
        connection: &mut PgConnection,
        consumer: &ArchivedConsumer,
        file_number: i32,
    ) -> Result<String, InboxError> {
        const BEGIN: &str = "INSERT INTO oncebox.archive_attempt (path, partition_name, tenant_id, \
            consumer_id) VALUES ($1, $2, $3, $4)";
        // A consumer that is made again under its name has another number.
        let ArchivedConsumer { tenant, consumer: name, consumer_id, .. } = consumer;
        let (partition, random) = (self.partition.name, hex::encode(rand::random::<[u8; 8]>()));
        let file =
            format!("{partition}/{tenant}/{name}/{consumer_id}-{file_number:06}-{random}.parquet");
        let path = self.archive.path(&file).await?;
        let query = sqlx::query(BEGIN).bind(&path).bind(partition).bind(consumer.tenant_id);
        query.bind(consumer_id).execute(connection).await?;
        Ok(path)
    }

    /// Ends an attempt that has no file, since no message is left for one.
    pub(super) async fn end_attempt(
        &self,
        connection: &mut PgConnection,
        path: &str,
    ) -> Result<(), InboxError> {
        const END: &str = "DELETE FROM oncebox.archive_attempt WHERE path = $1";
        sqlx::query(END).bind(path).execute(connection).await?;
        Ok(())
    }

    /// Deletes the files of attempts at this partition that were interrupted. One that the storage
    /// does not delete keeps its row, and is tried again by the next run. So does one of a tenant
    /// that has none of the consumers in this database.
    pub(super) async fn clear_attempts(
        &self,
        connection: &mut PgConnection,
        consumers: &[ArchivedConsumer],
    ) -> Result<(), InboxError> {
        const LEFT: &str = "SELECT path FROM oncebox.archive_attempt WHERE partition_name = $1 \
                AND erasure_id IS NULL ORDER BY path";
        const KEEP: &str = "UPDATE oncebox.archive_attempt SET is_left = true WHERE path = $1";
        let query = sqlx::query_scalar(LEFT).bind(self.partition.name);
        let paths: Vec<String> = query.fetch_all(&mut *connection).await?;
        let installation = self.archive.0.tenant_databases().installation().await?.to_string();
        let is_own = |path: &str| {
            let tenants = consumers.iter().map(|consumer| consumer.tenant.as_str());
            let mut tenants = tenants.chain(self.partition.tenant);
            self.partition.tenant.is_none()
                || tenants.any(|tenant| is_file_of(path, &installation, tenant))
        };
        for path in paths {
            let deleted = match is_own(&path) {
                true => self.store.delete(&path).await,
                false => Err(ArchiveError::damaged(&path, &"its row was changed")),
            };
            match deleted {
                Ok(()) | Err(ArchiveError::Missing { .. }) => {
                    self.end_attempt(connection, &path).await?;
                }
                Err(error) => {
                    tracing::warn!(%error, "an interrupted file of the archive was not deleted");
                    sqlx::query(KEEP).bind(&path).execute(&mut *connection).await?;
                }
            }
        }
        Ok(())
    }
}
