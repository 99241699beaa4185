//! Deletion of a consumer. Its rows are removed in batches, each in its own transaction, so that no
//! caller waits for them. A host that dies on the way leaves the rest to another host. The audit
//! log stays.

use oncebox_model::{error::InboxError, hooks};
use serde_json::{Value, json};
use sqlx::{PgConnection, Postgres};

use crate::{
    audit::Subject,
    consumers::{
        Consumer,
        state::{DesiredState, late_hosts},
    },
    control::Control,
    handles::Reconciliation,
    tenants::moves::is_here,
};

/// Inbox rows that are removed in one transaction.
const BATCH: i64 = 5_000;

/// The progress of a consumer's removal.
pub enum DeletionStep {
    /// None: the consumer is gone, another host removes it, or its tenant is being moved.
    None,
    /// Waiting for these hosts, which still run the consumer.
    Waits(Vec<String>),
    /// Number of rows that were removed; more may be left.
    Removed(u64),
    /// The inbox is empty; the consumer's own row is next.
    Last(Box<LastOfConsumer>),
}

/// A consumer without inbox rows, under a lock that keeps other hosts from removing it.
pub struct LastOfConsumer {
    /// Consumer, with its policy.
    pub consumer: Consumer,
    control: Control,
    tx: sqlx::Transaction<'static, Postgres>,
}

impl Reconciliation<'_> {
    /// Removes some of the rows of a consumer that is being deleted, once no live host runs it.
    /// Returns the progress.
    ///
    /// # Errors
    /// An error of the host's database or of the tenant's.
    pub async fn delete_some(&self, desired: &DesiredState) -> Result<DeletionStep, InboxError> {
        let consumer_id = desired.consumer_id;
        let mut tx = self.0.pool.begin().await?;
        sqlx::query("SET LOCAL idle_in_transaction_session_timeout = '60s'")
            .execute(&mut *tx)
            .await?;
        const LOCK: &str = "SELECT revision FROM oncebox.consumer WHERE consumer_id = $1 AND state \
            = 'deleting' FOR NO KEY UPDATE SKIP LOCKED";
        let Some(revision) =
            sqlx::query_scalar(LOCK).bind(consumer_id).fetch_optional(&mut *tx).await?
        else {
            return Ok(DeletionStep::None);
        };
        // What is left of it in another database is found by its key.
        if self.is_moving(consumer_id).await? {
            return Ok(DeletionStep::None);
        }
        let late = late_hosts(&mut tx, consumer_id, revision, true).await?;
        if !late.is_empty() {
            tx.rollback().await?;
            return Ok(DeletionStep::Waits(late));
        }
        let Some(removed) = self.remove_some(&desired.tenant, consumer_id).await? else {
            return Ok(DeletionStep::None);
        };
        if removed > 0 {
            hooks::point("consumer:delete:batch");
            tx.rollback().await?; // it was begun for its lock
            return Ok(DeletionStep::Removed(removed));
        }
        let Some(consumer) = self.0.consumers().by_id(consumer_id).await? else {
            return Ok(DeletionStep::None);
        };
        Ok(DeletionStep::Last(Box::new(LastOfConsumer { consumer, control: self.0.clone(), tx })))
    }

    /// Returns whether the consumer's tenant stands still for a move, or something of it is left in
    /// another database.
    async fn is_moving(&self, consumer_id: i32) -> Result<bool, InboxError> {
        const MOVES: &str = "SELECT EXISTS (SELECT FROM oncebox.tenant_move m JOIN \
            oncebox.consumer c USING (tenant_id) WHERE c.consumer_id = $1 AND m.step <> 'preparing')";
        Ok(sqlx::query_scalar(MOVES).bind(consumer_id).fetch_one(&self.0.pool).await?)
    }

    /// Removes a batch of the consumer's messages, then of those that its handlers sent, and after
    /// the last batch what is stored beside them. The consumer's state denies claims and
    /// completions, so no rows are added. Returns none while the tenant is being moved.
    async fn remove_some(&self, tenant: &str, consumer_id: i32) -> Result<Option<u64>, InboxError> {
        let tenant = self.0.tenants().get(tenant).await?;
        // A tenant's own database must have the state before any row is removed there.
        self.0.tenant_databases().replicate(&tenant).await?;
        let database = self.0.tenant_databases().get(&tenant)?;
        let mut tx = database.pool.begin().await?;
        // A tenant in deletion is shut out as well, and its rows go.
        if !tenant.state.is_deleting() && !is_here(&mut tx, consumer_id).await? {
            return Ok(None);
        }
        let mut removed = remove_messages(&mut tx, consumer_id).await?;
        if removed == 0 {
            removed = remove_outgoing(&mut tx, consumer_id).await?;
        }
        if removed == 0 {
            remove_beside_messages(&mut tx, consumer_id).await?;
        }
        tx.commit().await?;
        Ok(Some(removed))
    }
}

/// Removes a batch of a consumer's messages. Returns how many.
pub(crate) async fn remove_messages(
    connection: &mut PgConnection,
    consumer_id: i32,
) -> Result<u64, InboxError> {
    const REMOVE: &str = "DELETE FROM oncebox.inbox i USING (SELECT message_id, \
        retention_class, bucket FROM oncebox.inbox \
            WHERE consumer_id = $1 LIMIT $2) d \
        WHERE i.consumer_id = $1 AND i.message_id = d.message_id AND i.retention_class = \
        d.retention_class AND i.bucket = d.bucket";
    let removed = sqlx::query(REMOVE).bind(consumer_id).bind(BATCH).execute(connection).await?;
    Ok(removed.rows_affected())
}

/// Removes a batch of the messages that a consumer's handlers sent, whether they were sent or not.
/// Returns how many.
pub(crate) async fn remove_outgoing(
    connection: &mut PgConnection,
    consumer_id: i32,
) -> Result<u64, InboxError> {
    const REMOVE: &str = "DELETE FROM oncebox.outgoing o USING (SELECT message_id, ordinal, bucket \
        FROM oncebox.outgoing WHERE consumer_id = $1 LIMIT $2) d \
        WHERE o.consumer_id = $1 AND o.message_id = d.message_id AND o.ordinal = d.ordinal AND \
        o.bucket = d.bucket";
    let removed = sqlx::query(REMOVE).bind(consumer_id).bind(BATCH).execute(connection).await?;
    Ok(removed.rows_affected())
}

/// Removes what is stored beside a consumer's messages, once the messages are gone.
pub(crate) async fn remove_beside_messages(
    connection: &mut PgConnection,
    consumer_id: i32,
) -> Result<(), InboxError> {
    const REMOVE: [&str; 8] = [
        "DELETE FROM oncebox.copying WHERE consumer_id = $1",
        "DELETE FROM oncebox.inbox_history WHERE consumer_id = $1",
        "DELETE FROM oncebox.inbox_edit WHERE consumer_id = $1",
        "DELETE FROM oncebox.sequence_position WHERE consumer_id = $1",
        "DELETE FROM oncebox.probation WHERE consumer_id = $1",
        "DELETE FROM oncebox.partition_position WHERE consumer_id = $1",
        "DELETE FROM oncebox.replay WHERE consumer_id = $1",
        "DELETE FROM oncebox.job WHERE consumer_id = $1",
    ];
    for statement in REMOVE {
        sqlx::query(statement).bind(consumer_id).execute(&mut *connection).await?;
    }
    Ok(())
}

impl LastOfConsumer {
    /// Removes the consumer's deployments and its own row. `details` are kept in the audit log.
    ///
    /// # Errors
    /// An error of the host's database.
    pub async fn remove(mut self, details: Value) -> Result<(), InboxError> {
        let Consumer { consumer_id, tenant, name, .. } = &self.consumer;
        hooks::point("consumer:delete:last");
        const REMOVE: [&str; 3] = [
            "DELETE FROM oncebox.deployment_outcome o USING oncebox.deployment d WHERE \
                d.deployment_id = o.deployment_id AND d.consumer_id = $1",
            "DELETE FROM oncebox.deployment WHERE consumer_id = $1",
            "DELETE FROM oncebox.consumer WHERE consumer_id = $1",
        ];
        for statement in REMOVE {
            sqlx::query(statement).bind(consumer_id).execute(&mut *self.tx).await?;
        }
        let details = json!({ "consumer_id": consumer_id, "more": details });
        self.control
            .audit()
            .record(&mut self.tx, "consumer.deleted", Subject::of(tenant, name), details)
            .await?;
        Ok(self.tx.commit().await?)
    }
}
