//! The consumers with messages in a time partition. The host's database says who they are, since a
//! path in the archive is made of their names: the rows in a tenant's own database are a replica,
//! which the tenant can change.

use std::collections::BTreeMap;

use oncebox_model::error::InboxError;
use sqlx::{AssertSqlSafe, PgConnection};

use super::write::DetachedPartition;
use crate::handles::Archive;

/// A consumer with messages in a partition.
#[derive(Debug, Clone, sqlx::FromRow)]
pub(super) struct ArchivedConsumer {
    pub(super) tenant_id: i32,
    pub(super) tenant: String,
    pub(super) consumer_id: i32,
    pub(super) consumer: String,
    /// Whether it is being deleted. Then its messages go unarchived.
    is_deleting: bool,
}

impl Archive<'_> {
    /// Returns the consumers whose messages in a partition are archived, by number. A consumer that
    /// is deleted, or is being deleted, has none.
    ///
    /// # Errors
    /// `Conflict` where the partition has messages of consumers that are not deleted and that the
    /// host does not know in this database. An error of a database.
    pub(super) async fn consumers_in(
        &self,
        connection: &mut PgConnection,
        partition: &DetachedPartition<'_>,
    ) -> Result<Vec<ArchivedConsumer>, InboxError> {
        const KNOWN: &str = "SELECT t.tenant_id, t.name AS tenant, c.consumer_id, \
                c.name AS consumer, 'deleting' IN (c.state, t.state) AS is_deleting \
            FROM oncebox.consumer c JOIN oncebox.tenant t USING (tenant_id) \
            WHERE t.database IS NOT DISTINCT FROM $1";
        let query = sqlx::query_as(KNOWN).bind(partition.database);
        let known: Vec<ArchivedConsumer> = query.fetch_all(&self.0.pool).await?;
        let mut known: BTreeMap<_, _> =
            known.into_iter().map(|consumer| (consumer.consumer_id, consumer)).collect();
        let (mut archived, mut unknown) = (Vec::new(), Vec::new());
        for consumer_id in present(connection, partition.name).await? {
            match known.remove(&consumer_id) {
                Some(consumer) if consumer.is_deleting => {}
                Some(consumer) => archived.push(consumer),
                None => unknown.push(consumer_id),
            }
        }
        let mut names: Vec<String> =
            sqlx::query_scalar(NAMES).bind(&unknown).fetch_all(connection).await?;
        let of_host: Vec<String> =
            sqlx::query_scalar(NAMES).bind(&unknown).fetch_all(&self.0.pool).await?;
        names.extend(of_host);
        names.sort_unstable();
        names.dedup();
        if names.is_empty() {
            return Ok(archived);
        }
        Err(InboxError::conflict(format!(
            "the partition has messages of consumers that the host does not know in this database: \
                {}; a consumer that was deleted goes from the database with `oncebox consumer \
                delete`, and messages that were put there by hand must be taken out by hand",
            names.join(", ")
        )))
    }
}

/// Returns the numbers of the consumers with messages in a table, from index entry to index entry.
async fn present(connection: &mut PgConnection, name: &str) -> Result<Vec<i32>, InboxError> {
    let present = format!(
        "WITH RECURSIVE there AS ( \
            (SELECT i.consumer_id FROM oncebox.{name} i ORDER BY i.consumer_id LIMIT 1) \
            UNION ALL \
            SELECT (SELECT i.consumer_id FROM oncebox.{name} i \
                WHERE i.consumer_id > t.consumer_id ORDER BY i.consumer_id LIMIT 1) \
            FROM there t WHERE t.consumer_id IS NOT NULL) \
         SELECT t.consumer_id FROM there t WHERE t.consumer_id IS NOT NULL ORDER BY 1"
    );
    Ok(sqlx::query_scalar(AssertSqlSafe(present)).fetch_all(connection).await?)
}

/// Names of consumers that a database has and that are not being deleted.
const NAMES: &str = "SELECT format('%s/%s (%s)', t.name, c.name, c.consumer_id) \
    FROM oncebox.consumer c JOIN oncebox.tenant t USING (tenant_id) \
    WHERE c.consumer_id = ANY ($1) AND 'deleting' NOT IN (c.state, t.state)";
